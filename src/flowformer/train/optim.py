"""Configs of optimisers and learning-rate schedules, and how an optimiser is built from its config."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from .._utils import check_between, check_literals
from ..models.vision import GridPositions
from ..nn import LearnedPositions

OptimiserName = Literal["adamw", "radam"]
ScheduleName = Literal["constant", "rsqrt", "cosine", "inverse_sqrt"]


@dataclass(frozen=True)
class Optimiser:
    """The optimiser of a run.

    Args:
        name: "adamw", which without weight decay is Adam, or "radam".
        lr: the learning rate, before the schedule.
        betas, eps: as in torch's Adam.
        weight_decay: decoupled from the gradient, as in AdamW, for every optimiser.
        decay: parameters with weight decay: "all", or "matrices" (no biases, norms, other vectors or position tables).
        clip: maximum norm of the gradient; None for no clipping.
    """

    name: OptimiserName = "adamw"
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    decay: Literal["all", "matrices"] = "all"
    clip: float | None = None

    def __post_init__(self) -> None:
        check_literals(self)
        check_between(0, math.inf, lr=self.lr, eps=self.eps, weight_decay=self.weight_decay)
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must be two numbers, each at least 0 and below 1, got {self.betas}.")
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"clip must be more than 0, or None for no bound, got {self.clip}.")


@dataclass(frozen=True)
class Schedule:
    """The learning rate over the updates.

    Args:
        name: the rate after the warm-up, at update s: "constant"; "rsqrt", lr/√s, where the warm-up ends at lr/√warmup
            and not at lr; "cosine", decay to `floor` at the last update; or "inverse_sqrt", lr·√(warmup/s).
        warmup: number of updates over which the rate rises linearly.
        start: the rate at the first update of the warm-up.
        floor: the rate at the last update of "cosine".
    """

    name: ScheduleName = "constant"
    warmup: int = 0
    start: float = 0.0
    floor: float = 0.0

    def __post_init__(self) -> None:
        check_literals(self)
        check_between(0, math.inf, start=self.start, floor=self.floor)
        if self.warmup < 0 or (self.warmup == 0 and self.name in ("rsqrt", "inverse_sqrt")):
            raise ValueError(
                f"the schedule {self.name!r} cannot have a warmup of {self.warmup} updates; pass at least 1."
            )

    def rate(self, lr: float, step: int, steps: int) -> float:
        """The rate of update `step`, counted from 0, in a run of `steps`.

        >>> [Schedule("rsqrt", warmup=4).rate(1.0, step, 100) for step in (0, 2, 4, 16)]
        [0.0, 0.25, 0.5, 0.25]
        """
        if self.name == "rsqrt":
            lr = lr / math.sqrt(max(step, self.warmup))
        if step < self.warmup:
            return self.start + (lr - self.start) * step / self.warmup
        if self.name == "cosine":
            # the last update is number steps - 1
            progress = (step - self.warmup) / max(steps - 1 - self.warmup, 1)
            return self.floor + (lr - self.floor) * (1 + math.cos(math.pi * progress)) / 2
        return lr * math.sqrt(self.warmup / step) if self.name == "inverse_sqrt" else lr


def build_optimiser(
    module: nn.Module, options: Optimiser, device: torch.device, *, capturable: bool = False
) -> torch.optim.Optimizer:
    """Build the optimiser of a module, with one group of parameters with weight decay and one without.

    Args:
        capturable: whether updates are captured as CUDA graphs.
    """
    # the released code does not decay position tables, although they are matrices
    positions = {
        id(p) for m in module.modules() if isinstance(m, LearnedPositions | GridPositions) for p in m.parameters()
    }
    decayed = [p for p in module.parameters() if options.decay == "all" or (p.dim() > 1 and id(p) not in positions)]
    chosen = {id(p) for p in decayed}
    others = [p for p in module.parameters() if id(p) not in chosen]
    groups = [{"params": decayed, "weight_decay": options.weight_decay}]
    if others:
        groups.append({"params": others, "weight_decay": 0.0})
    shared: dict[str, Any] = {"lr": options.lr, "betas": options.betas, "eps": options.eps}
    if capturable:
        shared["capturable"] = True
    if options.name == "radam":
        return torch.optim.RAdam(groups, decoupled_weight_decay=True, **shared)
    return torch.optim.AdamW(groups, fused=device.type == "cuda", **shared)
