"""Flows of a block of heads, and the sums over tokens that they are computed from.

Shapes: G heads of a block, N tokens, D features.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..variant import FlowVariant


def token_flows(x: Tensor, total: Tensor, variant: FlowVariant) -> Tensor:
    """The flow (x + ε)·(total + ε) + ε' of each token, (G, N), without storing x + ε."""
    total = total + variant.eps
    flows = dot(x, total).add_(total.sum(-1, keepdim=True), alpha=variant.eps)
    return flows.add_(variant.flow_eps) if variant.flow_eps else flows


def dot(x: Tensor, vector: Tensor) -> Tensor:
    """x·vector of each token, (G, N)."""
    # row times matrix: for matrix times column, torch's bmm runs the heads one after another, seven times slower
    return torch.bmm(vector[:, None], x.mT)[:, 0]


def weighted_sum(weight: Tensor, x: Tensor, eps: float = 0.0) -> Tensor:
    """Σ weight (x + ε), (G, D)."""
    total = torch.bmm(weight[:, None], x)[:, 0]
    return total.add_(weight.sum(-1, keepdim=True), alpha=eps) if eps else total


def add_outer(x: Tensor, columns: list[Tensor], rows: list[Tensor]) -> None:
    """x += Σ column rowᵀ, as one narrow matrix product."""
    x.baddbmm_(torch.stack(columns, -2).mT, torch.stack(rows, -2))


def at_least_one(count: Tensor | int) -> Tensor | int:
    return count.clamp_min(1) if isinstance(count, Tensor) else max(count, 1)


def length_ratio(n: Tensor | int, m: Tensor | int, variant: FlowVariant) -> Tensor | float:
    """n / m, which the variant with `rescale` multiplies the conserved incoming flow by; otherwise 1."""
    return n / at_least_one(m) if variant.rescale else 1
