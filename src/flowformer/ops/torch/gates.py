"""Elementwise functions of competition and allocation: clamp, sigmoid and powers."""

from __future__ import annotations

import torch
from torch import Tensor

from ..variant import FlowVariant


def competing_flow(flow: Tensor, variant: FlowVariant, tau: Tensor | None = None) -> Tensor:
    """τ Ô after the clamp: the logits of the competition."""
    if variant.clamp is not None:
        flow = flow.clamp(-variant.clamp, variant.clamp)
    return flow if tau is None else flow * tau


def gate(flow: Tensor, kind: str, gamma: Tensor | None = None) -> Tensor:
    """sigmoid(flow)^γ, or 1 if the kind is "none"."""
    if kind == "none":
        return torch.ones_like(flow)
    share = flow.sigmoid()
    return share if gamma is None else share**gamma


def split_powers(powers: Tensor | None, axes: int) -> tuple[Tensor | None, Tensor | None]:
    """τ and γ of powers (2, H), each (H, 1, ...) with `axes` axes for the tokens."""
    if powers is None:
        return None, None
    tau, gamma = powers.unflatten(1, (-1, *[1] * axes)).unbind(0)
    return tau, gamma
