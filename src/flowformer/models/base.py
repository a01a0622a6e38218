"""Base class of the models: config, save_pretrained and from_pretrained, gradient checkpointing, recorded maps."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from .._utils import atomic_file, optional_import, read_json, suggestion, write_atomically
from ..nn import record_maps
from ..nn.recording import is_recording
from ..ops import FlowMaps, FlowVariant

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"


class FlowModel(nn.Module):
    """A model built from a frozen dataclass, `config_class`.

    `gradient_checkpointing = True` keeps only the inputs of each layer during training and recomputes the rest in the
    backward pass.
    """

    config_class: ClassVar[type]
    config: Any
    checkpoint: Callable = staticmethod(partial(checkpoint, use_reentrant=False))  # (layer, *inputs) -> output

    def __init__(self, config: Any) -> None:
        super().__init__()
        if not isinstance(config, self.config_class):
            raise TypeError(f"{type(self).__name__} takes a {self.config_class.__name__}, got {type(config).__name__}.")
        self.config = config
        self.gradient_checkpointing = False

    def save_pretrained(self, folder: str | Path) -> None:
        """Write config.json and model.safetensors to a folder, which is created if missing.

        If the write fails or is interrupted, older files of these names are kept.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        config = {"model": type(self).__name__, **dataclasses.asdict(self.config)}
        if options := self._options():
            config["options"] = options
        safetensors = optional_import("safetensors.torch", "hf")
        with atomic_file(folder / WEIGHTS_FILE, "wb") as file:
            try:
                safetensors.save_model(self, file.name)
            except optional_import("safetensors", "hf").SafetensorError as error:
                raise OSError(f"{folder / WEIGHTS_FILE} could not be written: {error}.") from error
            # after the weights, the large file, so that a full disk leaves the old config with the old weights
            write_atomically(folder / CONFIG_FILE, json.dumps(config, indent=2) + "\n")

    @classmethod
    def from_pretrained(cls, folder: str | Path, *, device: torch.device | str = "cpu") -> Self:
        """Load a model that `save_pretrained` wrote, in evaluation mode.

        The model has the dtype of the saved weights, or torch's default dtype if they have several.
        """
        folder = Path(folder)
        for name in (CONFIG_FILE, WEIGHTS_FILE):
            if not (folder / name).is_file():
                raise FileNotFoundError(f"{folder} has no {name}; accepted: a folder that save_pretrained wrote.")
        fields = read_json(folder / CONFIG_FILE)
        saved_class, options = fields.pop("model", None), fields.pop("options", {})
        if saved_class != cls.__name__:
            raise ValueError(
                f"{folder} holds a {saved_class}, not a {cls.__name__}. Load it with {saved_class}.from_pretrained."
            )
        safetensors = optional_import("safetensors.torch", "hf")
        try:
            weights = safetensors.load_file(str(folder / WEIGHTS_FILE), device=str(device))
        except optional_import("safetensors", "hf").SafetensorError as error:
            raise ValueError(f"{folder / WEIGHTS_FILE} is damaged: {error}. Copy it or train it again.") from error
        dtypes = {tensor.dtype for tensor in weights.values() if tensor.is_floating_point()}
        model = cls(config_from(cls.config_class, fields), **options).to(device)
        if len(dtypes) == 1:
            model.to(dtypes.pop())
        try:
            safetensors.load_model(model, str(folder / WEIGHTS_FILE), strict=True, device=str(device))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # names or shapes that differ
            reason = str(error).rstrip(".")
            raise ValueError(
                f"{folder / WEIGHTS_FILE} does not fit the model of {CONFIG_FILE}: {reason}. Load it with the version "
                "that wrote it, or train it again."
            ) from error
        return model.eval()

    def num_parameters(self, *, trainable: bool = False) -> int:
        """The number of parameters, tied ones counted once; `trainable` counts only those with requires_grad."""
        return sum(p.numel() for p in self.parameters() if p.requires_grad or not trainable)

    def _options(self) -> dict[str, Any]:
        """The arguments of `__init__` besides the config, as JSON values; `save_pretrained` writes them too."""
        return {}

    def _layer(self, layer: nn.Module, *args, **kwargs):
        """Run layer(*args, **kwargs), with gradient checkpointing if it is on.

        A layer that records maps is not checkpointed: recomputation would record them twice, or, after the end of
        `record_maps`, save other tensors than the first run, which torch refuses.
        """
        checkpointing = self.gradient_checkpointing and self.training and torch.is_grad_enabled()
        if checkpointing and not is_recording(layer):
            return self.checkpoint(partial(layer, **kwargs), *args)
        return layer(*args, **kwargs)

    def _with_maps(self, *args, **kwargs) -> tuple[Any, list[FlowMaps]]:
        """Run the model and return its output and the flow maps of each layer."""
        with record_maps(self) as maps:
            return self(*args, **kwargs), maps


def options_with_dropout(config: Any) -> dict[str, Any]:
    """Return config.attention_options; for softmax attention, with config.attention_dropout as `weight_dropout`."""
    if config.attention != "softmax":
        return config.attention_options
    dropout = config.dropout if config.attention_dropout is None else config.attention_dropout
    return {"weight_dropout": dropout, **config.attention_options}


def config_from(config_class: type, fields: dict[str, Any]) -> Any:
    """Build a config from JSON values. The error for an unknown field suggests the nearest name."""
    accepted = {field.name: field for field in dataclasses.fields(config_class)}
    for name in fields:
        if name not in accepted:
            raise ValueError(
                f"{config_class.__name__} has no {name!r}{suggestion(name, accepted)}; accepted: {', '.join(accepted)}."
            )
    values: dict[str, Any] = {}
    for name, value in fields.items():
        if name == "variant" and isinstance(value, dict):
            value = FlowVariant(**value)
        values[name] = tuple(value) if isinstance(value, list) else value
    return config_class(**values)
