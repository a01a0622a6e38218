"""key=value overrides of the fields of a training config, as on the command line."""

from __future__ import annotations

import dataclasses
import inspect
import re
import types
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from .._utils import suggestion
from ..nn import is_flow
from ..nn.attention import FLOW_OPTIONS
from ..ops import FlowVariant
from .benchmark import benchmark
from .config import ModelConfig, TrainConfig

ATTENTION_OPTIONS = "attention_options"
# fields of model configs that are filled in from the data, see `tasks.Task.fitted`
BY_DATA = ("num_classes", "vocab_size", "num_features", "max_length", "padding_id", "state_dim", "action_dim", "window")


def keys(config: TrainConfig) -> dict[str, Any]:
    """Every key that `override` accepts, with its current value.

    >>> from flowformer.train import recipes
    >>> keys(recipes.get("lra/text"))["model.attention"]
    'flow'
    """
    fixed = {"recipe", *(f"model.{name}" for name in BY_DATA)}
    return {name: value for name, value in _leaves(config) if name not in fixed}


def override(config: TrainConfig, assignments: Sequence[str]) -> TrainConfig:
    """Return the config with some values replaced. A unique suffix of a key is enough, such as lr for optimiser.lr.

    Options of the attention are keys, too. preset=benchmark is applied before other values, so that they override it.

    Args:
        assignments: key=value each.

    >>> from flowformer.train import recipes
    >>> config = override(recipes.get("lra/text"), ["attention=softmax", "optimiser.lr=0.01", "steps=10"])
    >>> config.model.attention, config.optimiser.lr, config.steps
    ('softmax', 0.01, 10)
    >>> override(recipes.get("lra/text"), ["attention=linformer", "attention_options.rank=16"]).model.attention_options
    {'rank': 16}
    """
    # First the attention, which determines the accepted options, then the preset, which sets them. Numbers of epochs
    # or steps come before steps=none and epochs=none, since a config without either is refused.
    first = (r"(model\.)?attention=", r"preset=", r"(epochs|steps)=(?!(?i:none)$)")
    for assignment in sorted(assignments, key=lambda each: [not re.match(pattern, each) for pattern in first]):
        key, equals, text = assignment.partition("=")
        if not equals:
            raise ValueError(f"{assignment!r} is no override; accepted: key=value, such as steps=100.")
        config = _replaced(config, _resolve(config, key).split("."), text, key)
        if key == "preset" and config.preset == "benchmark":
            config = benchmark(config)
    assigned = {assignment.partition("=")[0] for assignment in assignments}
    for key, winner in (("epochs", "steps"), ("eval_epochs", "eval_every")):
        if key in assigned and None not in (getattr(config, key), getattr(config, winner)):
            raise ValueError(
                f"{key} has no effect in {config.recipe} beside {winner}={getattr(config, winner)}, which comes first. "
                f"Pass {winner}=none as well, or {winner} alone."
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
        raise ValueError(f"{key!r} cannot be set: the data of {config.recipe} determine it.")
    parts = [name for name in known if f".{key}." in f".{name}"]
    if parts:
        raise ValueError(f"{key!r} has parts; set one of {', '.join(parts)}.")
    short = {name.rsplit(".", 1)[-1] for name in known}
    part = key.rpartition(".")[0]
    accepted = [name for name in known if part and f".{name}".rpartition(".")[0].endswith(f".{part}")] or known
    synonym = _SYNONYMS.get(key.rpartition(".")[2])
    hint = f" (did you mean {synonym!r}?)" if synonym in known else suggestion(key, {*known, *short})
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
    """The options that the attention of a model accepts."""
    if is_flow(model.attention):
        return FLOW_OPTIONS
    from .. import baselines  # here, since most runs do not use them

    return baselines.options(model.attention)


def _parse(text: str, hint: Any, key: str) -> Any:
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        if types.NoneType in args and text.lower() == "none":
            return None
        single, *pair = (each for each in args if each is not types.NoneType)
        return _parse(text, pair[0] if pair and "," in text else single, key)  # image_size is a side, or two
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
        raise ValueError(f"{key} must be {KINDS.get(hint, hint)}, got {text!r}.") from None


# names that other trainers use for our keys
_SYNONYMS = {
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
KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
