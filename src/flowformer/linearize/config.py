"""LinearizeConfig: what is exchanged, and how the model learns to live with it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from .._utils import check_kinds, check_literals, check_options, check_positive
from ..integrations.transformers.linearized_heads import RENORMALIZED, Exchange, Features
from ..ops import FlowVariant


@dataclass(frozen=True, kw_only=True)
class LinearizeConfig:
    """How a model is linearized.

    Args:
        features, variant, powers, gain, window, keep_layers: what takes the place of softmax, see `Exchange`.
        length: tokens of a row of text, at most what the model has positions for. Documents are packed into rows and do
            not see each other. A model that would let them (OPT, recurrent layers) gets a row for each piece of a
            document; where hidden states are learned, each document is a row of its own, cut to this length.
        batch_size: rows of an update, of all processes together.
        transfer_tokens: of stage 1, in which each attention learns the result of the softmax it replaces.
        lora_tokens: of stage 2, in which the model learns the teacher's distribution of the next token, or without a
            head its last hidden states.
        minutes: ends both stages early, the first after its share of the tokens; None is no limit.
        transfer_lr, lora_lr: learning rates, which fall to 0 by a cosine after a short warm-up.
        lora_rank: of the low-rank update in stage 2; 0 trains nothing but what stage 1 trained.
        lora_layers: the linear layers with an update: those of "attention", or "all" but the head.
        optimizer: "adamw" or "radam".
        precision: of what is computed: "bf16", "fp32", or "auto", which is bf16 on a GPU.
        gradient_checkpointing: computes activations of stage 2 again in place of keeping them.
        checkpoint_minutes: how often a run with a folder writes a checkpoint.
        evaluate_tokens: of the held-out text that are scored after each stage.
        seed: of the order of the rows.
    """

    features: Features = "hedgehog"
    variant: FlowVariant | str = RENORMALIZED
    powers: bool = True
    gain: bool = False
    window: int = 0
    keep_layers: tuple[int, ...] = ()
    length: int = 1024
    batch_size: int = 8
    transfer_tokens: int = 10_000_000
    lora_tokens: int = 20_000_000
    minutes: float | None = None
    transfer_lr: float = 1e-2
    lora_lr: float = 1e-3
    lora_rank: int = 16
    lora_layers: Literal["attention", "all"] = "attention"
    optimizer: Literal["adamw", "radam"] = "adamw"
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    gradient_checkpointing: bool = False
    checkpoint_minutes: float = 5.0
    evaluate_tokens: int = 100_000
    seed: int = 0

    def __post_init__(self) -> None:
        exchange = self.exchange
        for field in fields(exchange):
            object.__setattr__(self, field.name, getattr(exchange, field.name))
        check_literals(self)
        check_kinds(self)
        check_positive(length=self.length, batch_size=self.batch_size)
        if self.length < 2:
            raise ValueError("rows of one token have nothing to attend to: length must be at least 2.")
        for name in ("transfer_tokens", "lora_tokens", "lora_rank"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}.")
        for name in ("minutes", "transfer_lr", "lora_lr", "checkpoint_minutes"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be positive, got {value!r}.")
        if self.window >= self.length:
            raise ValueError(
                f"a window of {self.window} tokens covers rows of {self.length}: nothing would be left for the flow to "
                "learn. Pass a longer length, or a shorter window."
            )

    @classmethod
    def of(cls, assignments: Iterable[str]) -> LinearizeConfig:
        """The config of a command line: key=value, where a value is JSON or a plain string.

        >>> config = LinearizeConfig.of(["window=64", "keep_layers=[0, 4]", "features=projection"])
        >>> config.window, config.keep_layers, config.features
        (64, (0, 4), 'projection')
        """
        options: dict[str, Any] = {}
        for assignment in assignments:
            name, equals, text = assignment.partition("=")
            if not equals:
                raise ValueError(f"{assignment!r} is no option; accepted: key=value, such as window=64.")
            check_options("LinearizeConfig", [name], [field.name for field in fields(cls)])
            try:
                value = json.loads(text)
            except ValueError:
                value = text
            options[name] = int(value) if isinstance(value, float) and value.is_integer() else value  # as 1e6
        try:
            return cls(**options)
        except TypeError as error:
            raise ValueError(
                f"an option of {', '.join(assignments)} has a value of the wrong kind: {error}."
            ) from error

    @property
    def exchange(self) -> Exchange:
        return Exchange(**{field.name: getattr(self, field.name) for field in fields(Exchange)})

    def to_dict(self) -> dict[str, Any]:
        """As JSON holds it."""
        return asdict(self) | self.exchange.to_dict()
