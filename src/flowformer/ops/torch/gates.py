"""Competition and allocation, up to what a softmax is taken over."""

from __future__ import annotations

import torch
from torch import Tensor

from ..variant import FlowVariant


def bounded(conserved_outgoing: Tensor, variant: FlowVariant, power: Tensor | None = None) -> Tensor:
    """What sources compete by: τ Ô, with Ô clamped."""
    flow = conserved_outgoing
    if variant.clamp is not None:
        flow = flow.clamp(-variant.clamp, variant.clamp)
    return flow if power is None else flow * power


def gate(flow: Tensor, kind: str, power: Tensor | None = None) -> Tensor:
    """sigmoid(flow)^γ, or 1 where the kind is "none"."""
    if kind == "none":
        return torch.ones_like(flow)
    share = flow.sigmoid()
    return share if power is None else share**power


def powers_for(powers: Tensor | None, axes: int) -> tuple[Tensor | None, Tensor | None]:
    """τ and γ of powers (2, H), with so many axes of tokens after that of heads."""
    if powers is None:
        return None, None
    tau, gamma = powers.unflatten(1, (-1, *[1] * axes)).unbind(0)
    return tau, gamma
