"""The config of a training run as a frozen dataclass; `overrides` replaces its fields by key=value."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from .._utils import check_between, check_choice, check_literals, check_positive, moved, read_json
from ..models import ClassifierConfig, DecisionConfig, DeiTConfig, LMConfig, TimeSeriesConfig, VisionConfig
from ..models.base import config_from
from ..nn import is_flow
from ..nn.attention import attention_names
from .optim import Optimiser, Schedule

ModelConfig = ClassifierConfig | DecisionConfig | DeiTConfig | LMConfig | TimeSeriesConfig | VisionConfig
_MODEL_CONFIGS = {each.__name__: each for each in get_args(ModelConfig)}
MAX_SEED = 2**32 - 1  # the largest seed that numpy accepts

Precision = Literal["float32", "tf32", "bf16", "fp16"]
Parallel = Literal["ddp", "fsdp", "context"]
Split = Literal["valid", "test"]
Preset = Literal["recipe", "benchmark"]


@dataclass(frozen=True)
class TrainConfig:
    """Everything that decides the result of a training run, besides the data.

    Args:
        recipe: name of the recipe that the config was made from.
        task: name of the task, see `tasks`; it defines batches, loss and metrics.
        data, data_options: name of the data set, and further arguments of `data.load`. With the option "partial" it
            accepts incomplete data, and the result says so.
        model: config of the model. Fields that the data determine (classes, features, vocabulary, lengths) are filled
            in.
        optimiser, schedule: the optimiser and the schedule of its learning rate.
        preset: "recipe" for the model sizes of the recipe, "benchmark" for those that the Long-Range Arena has for the
            attention; set by the override preset=benchmark.
        steps, epochs: length of the run; steps takes precedence if both are given.
        batch_size: examples in one update, over all ranks and micro-batches.
        accumulate: micro-batches of each rank in one update (gradient accumulation).
        pad_full: pad every batch to the longest sequence of the data set instead of the longest in the batch.
        drop_last: leave out the incomplete batch at the end of an epoch.
        replacement: draw examples with replacement, instead of each once per epoch.
        repeats: copies of an example in its batch, each with its own augmentation (repeated augmentation; 3 for DeiT).
            An epoch keeps its length, so it has fewer distinct examples.
        eval_every, eval_epochs: updates or epochs between evaluations; eval_every takes precedence unless it is None.
            There is always an evaluation after the last update.
        eval_batch_size: batch size of evaluations; None for batch_size.
        select_on: split on which the best evaluation is selected. With "valid" the test set is used only at the end.
            Most of the paper's code uses "test". Results name the split.
        episodes, final_episodes: episodes to play at each evaluation and at the last one, in reinforcement learning.
        label_smoothing, mixup, cutmix: regularisation of classification; mixup and cutmix are for images.
        precision: precision of matrix products; parameters are float32.
        parallel: "ddp", the whole model on each rank; "fsdp", a shard of it (FSDP2); or "context", as "ddp" with each
            sequence cut over the ranks. Results are the same, up to rounding and dropout.
        context_parallel_size: number of ranks that split each sequence, for language models with Flow-Attention. None
            is all ranks with parallel="context", else one. The batch is split over the groups of that many ranks.
        compile: whether to apply torch.compile to the model.
        graphs: whether to replay updates as CUDA graphs, on one GPU without accumulation: faster if launching kernels
            takes longer than running them. The model must not draw random numbers on the CPU. With graphs, torch
            computes the rectification of RAdam in float32: losses differ by less than 1 % in the first updates.
        on_device: whether to keep a small data set in GPU memory and gather batches there, without workers.
        seed: seed of the parameters, the order of the data and dropout.
        workers: worker processes that read data, limited to the number of cores.
        log_every, checkpoint_every: updates between lines of the log, and between checkpoints.
        keep: number of checkpoints to keep; older ones are deleted.
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
        """Folder name of the run, unique to the config: it ends with a digest of the fields that are not the default.

        A new field with a default therefore does not rename earlier runs. Changing a default does not rename them
        either, although it changes the run: change the recipes instead.
        """
        digest = hashlib.sha256(json.dumps(_non_default_fields(self), sort_keys=True).encode()).hexdigest()[:8]
        return f"{self.recipe}/{self.model.attention}-seed{self.seed}-{digest}"


def _non_default_fields(config: Any) -> dict[str, Any]:
    """The fields that differ from their defaults, including those of nested dataclasses."""
    changed = {}
    for each in dataclasses.fields(config):
        value = getattr(config, each.name)
        default = each.default_factory() if callable(each.default_factory) else each.default
        if dataclasses.is_dataclass(value):
            changed[each.name] = {"class": type(value).__name__} | _non_default_fields(value)
        elif value != default:
            changed[each.name] = value
    return changed


def to_dict(config: TrainConfig) -> dict[str, Any]:
    """The config as a dictionary of JSON values."""
    fields = dataclasses.asdict(config)
    fields["model"] = {"class": type(config.model).__name__, **fields["model"]}
    return json.loads(json.dumps(fields))


def from_dict(fields: dict[str, Any]) -> TrainConfig:
    """The config that `to_dict` turned into a dictionary."""
    fields = dict(fields)
    model = dict(fields.pop("model"))
    check_choice("class of models", model["class"], _MODEL_CONFIGS)
    parts = {
        "model": config_from(_MODEL_CONFIGS[model.pop("class")], model),
        "optimiser": config_from(Optimiser, fields.pop("optimiser")),
        "schedule": config_from(Schedule, fields.pop("schedule")),
    }
    return config_from(TrainConfig, {**fields, **parts})


def load(path: Path) -> TrainConfig:
    fields = read_json(path)
    if "recipe" not in fields:
        raise ValueError(
            f"{path} is not the config of a run: its keys are {', '.join(fields)}. Pass the folder of a run."
        )
    try:
        return from_dict(fields)
    except (ValueError, KeyError, TypeError) as error:
        reason = f"it lacks {error}" if isinstance(error, KeyError) else str(error).rstrip(".")
        raise ValueError(
            f"{path} cannot be read: {reason}. Read it with the version that made it, or copy it again."
        ) from error


__getattr__ = moved(__name__, {name: f"flowformer.train.overrides.{name}" for name in ("BY_DATA", "keys", "override")})
