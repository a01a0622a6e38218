"""The config of a training run as a frozen dataclass, and key=value overrides of its fields."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
import math
import re
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from .._utils import check_between, check_choice, check_literals, check_positive, read_json, suggestion
from ..models import ClassifierConfig, DecisionConfig, DeiTConfig, LMConfig, TimeSeriesConfig, VisionConfig
from ..models.base import config_from
from ..nn import is_flow
from ..nn.attention import attention_names
from ..ops import FlowVariant
from .optim import Optimiser, Schedule

ModelConfig = ClassifierConfig | DecisionConfig | DeiTConfig | LMConfig | TimeSeriesConfig | VisionConfig
_MODEL_CONFIGS = {each.__name__: each for each in get_args(ModelConfig)}
ATTENTION_OPTIONS = "attention_options"
MAX_SEED = 2**32 - 1  # what numpy takes
# fields of models that the data decide, see `tasks.Task.fitted`
BY_DATA = ("num_classes", "vocab_size", "num_features", "max_length", "padding_id", "state_dim", "action_dim", "window")

Precision = Literal["float32", "tf32", "bf16", "fp16"]
Parallel = Literal["ddp", "fsdp", "context"]
Split = Literal["valid", "test"]
Preset = Literal["recipe", "benchmark"]


@dataclass(frozen=True)
class TrainConfig:
    """Everything that decides the result of a training run, besides the data.

    Args:
        recipe: the name of the recipe it comes from.
        preset: whose sizes the model has: the "recipe"'s, or those that the Long-Range Arena has for the attention, as
            the override preset=benchmark asks for.
        task: what a batch and a metric are, see `tasks`.
        data, data_options: the name of the data, and what `data.load` takes besides; "partial" accepts incomplete data,
            and the result says so.
        model: the config of the model. What the data decides (classes, features, words, lengths) is filled in.
        optimiser, schedule: how it learns.
        steps, epochs: how long; steps comes first where both are given.
        batch_size: examples of one update, over all ranks and micro-batches.
        accumulate: micro-batches of a rank in one update (gradient accumulation).
        pad_full: pad every batch to the longest length of the data set instead of the longest of the batch.
        drop_last: leave out the incomplete batch at the end of an epoch.
        replacement: draw every example at random, instead of each once an epoch.
        repeats: how often an example is in its batch, augmented anew each time (repeated augmentation; 3 for DeiT); an
            epoch has as many fewer examples.
        eval_every, eval_epochs: updates or epochs between evaluations; eval_every comes first where it is not None. The
            last update is always followed by one.
        eval_batch_size: examples of one evaluated batch; None is batch_size.
        select_on: the split that says which evaluation is the best. "valid" leaves the test set alone until the end;
            "test" is what most of the paper's code does; results say so.
        episodes, final_episodes: to play at each evaluation and at the last, for tasks of reinforcement learning.
        label_smoothing, mixup, cutmix: of classification; mixup and cutmix are for images.
        precision: of the products; parameters are float32.
        parallel: "ddp", the whole model on each rank; "fsdp", a shard of it (FSDP2); or "context", as "ddp" with each
            sequence cut over the ranks. Results are the same, up to rounding and dropout.
        context_parallel_size: how many ranks share each sequence, of language models with Flow-Attention. None is all
            with parallel="context", else one. The other dimension of the ranks shares the batch.
        compile: whether torch.compile runs over the model.
        graphs: whether updates are replayed as CUDA graphs, on one GPU without accumulation: faster where launching
            kernels takes longer than running them. The model must not draw random numbers on the CPU. torch then
            rectifies RAdam in float32: its losses differ by less than 1 % in the first updates.
        on_device: whether data sets that fit are kept in GPU memory, where batches are gathered without workers.
        seed: of the parameters, the order of the data and dropout.
        workers: processes that read data, at most one for each core.
        log_every, checkpoint_every: updates between lines of the log, and between checkpoints to resume from.
        keep: how many of those checkpoints stay.
    """

    recipe: str
    task: str
    data: str
    model: ModelConfig
    optimiser: Optimiser
    schedule: Schedule = field(default_factory=Schedule)
    preset: Preset = "recipe"
    data_options: dict[str, Any] = field(default_factory=dict)
    steps: int | None = None
    epochs: int | None = None
    batch_size: int = 32
    accumulate: int = 1
    pad_full: bool = False
    drop_last: bool = True
    replacement: bool = False
    repeats: int = 1
    eval_every: int | None = None
    eval_epochs: int = 1
    eval_batch_size: int | None = None
    select_on: Split = "valid"
    episodes: int = 10
    final_episodes: int = 100
    label_smoothing: float = 0.0
    mixup: float = 0.0
    cutmix: float = 0.0
    precision: Precision = "float32"
    parallel: Parallel = "ddp"
    context_parallel_size: int | None = None
    compile: bool = False
    graphs: bool = False
    on_device: bool = True
    seed: int = 0
    workers: int = 0
    log_every: int = 10
    checkpoint_every: int = 1000
    keep: int = 2

    def __post_init__(self) -> None:
        check_literals(self)
        optional = ("steps", "epochs", "eval_every", "eval_batch_size", "context_parallel_size")
        required = ("batch_size", "accumulate", "repeats", "eval_epochs", "episodes", "final_episodes")
        given = [name for name in optional if getattr(self, name) is not None]
        for name in (*given, *required, "log_every", "checkpoint_every", "keep"):
            check_positive(**{name: getattr(self, name)})
        if not is_flow(self.model.attention):
            check_choice("attention", self.model.attention, attention_names())
        check_between(0, MAX_SEED, seed=self.seed)
        check_between(0, 1, label_smoothing=self.label_smoothing)
        check_between(0, math.inf, workers=self.workers, mixup=self.mixup, cutmix=self.cutmix)
        if (self.mixup or self.cutmix) and self.task != "images":
            raise ValueError(f"mixup and cutmix are for images, and the task is {self.task!r}; pass 0 for both.")
        if self.steps is None and self.epochs is None:
            raise ValueError("a run needs an end: pass steps or epochs.")
        cuts = self.parallel == "context" or (self.context_parallel_size or 1) > 1
        if cuts and not (self.task == "language" and is_flow(self.model.attention)):
            raise ValueError(
                f"the sequences of task {self.task!r} with {self.model.attention} attention cannot be cut over ranks; "
                "accepted: language models with Flow-Attention. Pass parallel=ddp or fsdp, without "
                "context_parallel_size."
            )

    def total_steps(self, steps_per_epoch: int) -> int:
        if self.steps is not None:
            return self.steps
        assert self.epochs is not None
        return self.epochs * steps_per_epoch

    @property
    def name(self) -> str:
        """The folder of the run, a different one for every config: it ends with a digest of what is not the default.

        So a field that is added with a default renames no earlier run. Neither does a default that is changed, though
        it is then another run: change the recipes instead.
        """
        digest = hashlib.sha256(json.dumps(_chosen(self), sort_keys=True).encode()).hexdigest()[:8]
        return f"{self.recipe}/{self.model.attention}-seed{self.seed}-{digest}"


def _chosen(config: Any) -> dict[str, Any]:
    """The fields that differ from their defaults, and those of the dataclasses inside."""
    chosen = {}
    for each in dataclasses.fields(config):
        value = getattr(config, each.name)
        default = each.default_factory() if callable(each.default_factory) else each.default
        if dataclasses.is_dataclass(value):
            chosen[each.name] = {"class": type(value).__name__} | _chosen(value)
        elif value != default:
            chosen[each.name] = value
    return chosen


def to_dict(config: TrainConfig) -> dict[str, Any]:
    """Plain values, as JSON holds them."""
    fields = dataclasses.asdict(config)
    fields["model"] = {"class": type(config.model).__name__, **fields["model"]}
    return json.loads(json.dumps(fields))


def from_dict(fields: dict[str, Any]) -> TrainConfig:
    """The config that `to_dict` turned into plain values."""
    fields = dict(fields)
    model = dict(fields.pop("model"))
    parts = {
        "model": config_from(_MODEL_CONFIGS[model.pop("class")], model),
        "optimiser": config_from(Optimiser, fields.pop("optimiser")),
        "schedule": config_from(Schedule, fields.pop("schedule")),
    }
    return config_from(TrainConfig, {**fields, **parts})


def load(path: Path) -> TrainConfig:
    fields = read_json(path)
    if "recipe" not in fields:
        raise ValueError(f"{path} is not of a run, but has {', '.join(fields)}. Pass the folder of a run.")
    return from_dict(fields)


def keys(config: TrainConfig) -> dict[str, Any]:
    """Every name that an override may have, with its value.

    >>> from flowformer.train import recipes
    >>> keys(recipes.get("lra/text"))["model.attention"]
    'flow'
    """
    fixed = {"recipe", *(f"model.{name}" for name in BY_DATA)}
    return {name: value for name, value in _leaves(config) if name not in fixed}


def override(config: TrainConfig, assignments: Sequence[str]) -> TrainConfig:
    """The config with some values replaced, each as key=value. The last parts of a key are enough if unique.

    The options of the attention are keys, too. preset=benchmark is applied before all others, so that they override
    it.

    >>> from flowformer.train import recipes
    >>> config = override(recipes.get("lra/text"), ["attention=softmax", "optimiser.lr=0.01", "steps=10"])
    >>> config.model.attention, config.optimiser.lr, config.steps
    ('softmax', 0.01, 10)
    >>> override(recipes.get("lra/text"), ["attention=linformer", "attention_options.rank=16"]).model.attention_options
    {'rank': 16}
    """
    # first the attention, which decides the options there are, then the preset, which sets them; epochs before
    # steps=none and steps before epochs=none, since a run needs an end
    first = (r"(model\.)?attention=", r"preset=", r"(epochs|steps)=(?!(?i:none)$)")
    for assignment in sorted(assignments, key=lambda each: [not re.match(pattern, each) for pattern in first]):
        key, equals, text = assignment.partition("=")
        if not equals:
            raise ValueError(f"{assignment!r} is no override; accepted: key=value, such as steps=100.")
        config = _replaced(config, _resolve(config, key).split("."), text, key)
        if key == "preset" and config.preset == "benchmark":
            from .benchmark import benchmark  # here, since it needs this file

            config = benchmark(config)
    assigned = {assignment.partition("=")[0] for assignment in assignments}
    for key, winner in (("epochs", "steps"), ("eval_epochs", "eval_every")):
        if key in assigned and None not in (getattr(config, key), getattr(config, winner)):
            raise ValueError(
                f"{key} has no effect beside {winner}={getattr(config, winner)}, which comes first. Pass {winner}=none "
                f"as well, or {winner} alone."
            )
    return config


def _leaves(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    values = (
        config if isinstance(config, dict) else {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    )
    for name, value in values.items():
        if isinstance(value, FlowVariant):
            yield prefix + name, value  # variant=core sets all of its fields
        if name == ATTENTION_OPTIONS:
            value = {option: parameter.default for option, parameter in _options(config).items()} | value
        if dataclasses.is_dataclass(value) or isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _resolve(config: TrainConfig, key: str) -> str:
    known = keys(config)
    if key in known:
        return key
    matches = [name for name in known if name.endswith(f".{key}")]
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise ValueError(f"{key!r} may be any of {', '.join(matches)}; write it in full.")
    if key.removeprefix("model.") in BY_DATA:
        raise ValueError(f"{key!r} cannot be set: it is what the data of {config.recipe} have.")
    parts = [name for name in known if f".{key}." in f".{name}"]
    if parts:
        raise ValueError(f"{key!r} has parts; set one of {', '.join(parts)}.")
    short = {name.rsplit(".", 1)[-1] for name in known}
    part = key.rpartition(".")[0]
    accepted = [name for name in known if part and f".{name}".rpartition(".")[0].endswith(f".{part}")] or known
    here = _ELSEWHERE.get(key.rpartition(".")[2])
    hint = f" (did you mean {here!r}?)" if here in known else suggestion(key, {*known, *short})
    raise ValueError(f"{config.recipe} has no key {key!r}{hint}; accepted: {', '.join(accepted)}.")


def _replaced(config: Any, path: list[str], text: str, key: str) -> Any:
    name, *rest = path
    if isinstance(config, dict):
        return {**config, name: _parse(text, type(config[name]), key)}
    value = getattr(config, name)
    if name == ATTENTION_OPTIONS:
        (option,) = rest
        return replace(config, **{name: {**value, option: _parse(text, _options(config)[option].annotation, key)}})
    if rest:
        return replace(config, **{name: _replaced(value, rest, text, key)})
    return replace(config, **{name: _parse(text, get_type_hints(type(config))[name], key)})


def _options(model: ModelConfig) -> dict[str, inspect.Parameter]:
    """What the attention of a model can be built with."""
    if is_flow(model.attention):
        return {}
    from .. import baselines  # here, since most runs need none of them

    return baselines.options(model.attention)


def _parse(text: str, hint: Any, key: str) -> Any:
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        if types.NoneType in args and text.lower() == "none":
            return None
        hint = next(each for each in args if each is not types.NoneType)
        return _parse(text, hint, key)
    if origin is Literal:
        if text not in args:
            raise ValueError(f"{key} cannot be {text!r}{suggestion(text, args)}; accepted: {', '.join(args)}.")
        return text
    if hint is FlowVariant:
        return FlowVariant.named(text)
    if origin is tuple:
        return tuple(_parse(part, args[0], key) for part in text.strip("()").split(",") if part)
    try:
        return _BOOLEANS[text.lower()] if hint is bool else hint(text)
    except (ValueError, KeyError):
        raise ValueError(f"{key} must be {_KINDS.get(hint, hint)}, got {text!r}.") from None


# the names that other trainers have for our keys
_ELSEWHERE = {
    "learning_rate": "optimiser.lr",
    "max_lr": "optimiser.lr",
    "wd": "optimiser.weight_decay",
    "optim": "optimiser.name",
    "optimizer": "optimiser.name",
    "max_grad_norm": "optimiser.clip",
    "grad_clip": "optimiser.clip",
    "lr_scheduler_type": "schedule.name",
    "warmup_steps": "schedule.warmup",
    "max_steps": "steps",
    "num_train_epochs": "epochs",
    "n_epochs": "epochs",
    "per_device_train_batch_size": "batch_size",
    "gradient_accumulation_steps": "accumulate",
    "eval_steps": "eval_every",
    "logging_steps": "log_every",
    "save_steps": "checkpoint_every",
    "num_workers": "workers",
    "bf16": "precision",
    "fp16": "precision",
    "hidden_size": "model.embed_dim",
    "d_model": "model.embed_dim",
}
_BOOLEANS = {"true": True, "false": False}
_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
