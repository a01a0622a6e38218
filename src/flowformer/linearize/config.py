"""LinearizeConfig: the attention that replaces softmax, and the training of the student."""

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
    """Options of `linearize` and `Student.transfer`.

    Args:
        features, variant, powers, gain, window, keep_layers: the attention that replaces softmax, see `Exchange`.
        length: tokens per row of text, limited to the number of positions of the model. Documents are packed into rows
            and do not attend to each other. A model that cannot keep packed documents apart (OPT, recurrent layers)
            gets one padded row per piece of `length` tokens. A model trained on hidden states gets one row per
            document, truncated to `length`.
        batch_size: rows per update, summed over all ranks.
        transfer_tokens: training tokens of stage 1, in which each layer learns to reproduce the result of the softmax
            attention it replaces.
        lora_tokens: training tokens of stage 2, in which the model learns the teacher's next-token distribution, or
            the teacher's last hidden states if it has no head.
        minutes: time limit of both stages together, divided between them in proportion to their tokens; None is no
            limit.
        transfer_lr, lora_lr: peak learning rates; a short warm-up is followed by a cosine decay to 0.
        lora_rank: rank of the LoRA updates in stage 2; 0 trains only the parameters of stage 1.
        lora_layers: the linear layers that get a LoRA update: those of "attention", or "all" except the head.
        optimizer: "adamw" or "radam".
        precision: "bf16" (autocast), "fp32", or "auto": bf16 on a GPU, fp32 elsewhere.
        gradient_checkpointing: recompute the activations of stage 2 in the backward pass instead of storing them.
        checkpoint_minutes: time between checkpoints; they are written only if `transfer` gets a folder.
        evaluate_tokens: number of tokens of the held-out text that are scored after each stage.
        seed: seed of the order of the rows and of the initial LoRA weights.
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
        """Parse command-line options of the form key=value, where a value is JSON or a plain string.

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
            options[name] = int(value) if isinstance(value, float) and value.is_integer() else value  # 1e6 is an int
        try:
            return cls(**options)
        except TypeError as error:
            raise ValueError(
                f"an option of {', '.join(assignments)} has a value of the wrong kind: {error}."
            ) from error

    @property
    def exchange(self) -> Exchange:
        """The fields that describe the new attention."""
        return Exchange(**{field.name: getattr(self, field.name) for field in fields(Exchange)})

    def to_dict(self) -> dict[str, Any]:
        """All fields as values that JSON can store."""
        return asdict(self) | self.exchange.to_dict()
