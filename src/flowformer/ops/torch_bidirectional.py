"""Bidirectional Flow-Attention of one block of heads, forward and backward, linear in time and memory.

Shapes: G heads of the block, N sinks, M sources, D features, E values. The sums are `reference.py`'s; the backward
pass is written by hand, since autograd would keep a dozen tensors of the size of the input.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .features import feature_gradient_, features, valid_values
from .variant import FlowVariant


class Flows(NamedTuple):
    """What the forward pass leaves for the backward pass: a few numbers a token, and the sums of each head."""

    inverse_incoming: Tensor  # 1/I, (G, N)
    inverse_outgoing: Tensor  # 1/O, (G, M)
    allocation: Tensor  # α, (G, N), 0 where masked
    competition: Tensor  # c, (G, M), 0 where masked
    sums: Tensor  # Σk, Σq, Σk/O, Σq/I, (G, 4, D)
    memory: Tensor  # S = Σ kᵀ c V, (G, D, E)


def forward(
    query, key, value, query_mask, key_mask, scale: float, variant: FlowVariant, out: Tensor | None = None
) -> tuple[Tensor, Flows]:
    """R, (G, N, E), in the dtype of the sums; written to `out` where there is one."""
    q, k = features(query, query_mask, scale, variant), features(key, key_mask, scale, variant)
    n, m = _count(query_mask, q), _count(key_mask, k)
    key_sum, query_sum = k.sum(-2), q.sum(-2)
    inverse_incoming = _flow(q, key_sum, variant).reciprocal_()
    inverse_outgoing = _flow(k, query_sum, variant).reciprocal_()
    conserved_key_sum = _weighted_sum(inverse_outgoing, k)
    conserved_query_sum = _weighted_sum(inverse_incoming, q)
    conserved_incoming = _flow(q, conserved_key_sum, variant)
    conserved_outgoing = _flow(k, conserved_query_sum, variant)

    if variant.clamp is not None:
        conserved_outgoing = conserved_outgoing.clamp(-variant.clamp, variant.clamp)
    match variant.competition:
        case "softmax":
            competition = _softmax(conserved_outgoing, key_mask, m if variant.rescale else 1)
        case "sigmoid":
            competition = conserved_outgoing.sigmoid()
        case "none":
            competition = torch.ones_like(conserved_outgoing)
    match variant.allocation:
        case "sigmoid":
            allocation = (conserved_incoming * _length_ratio(n, m, variant)).sigmoid()
        case "softmax":
            allocation = _softmax(conserved_incoming, query_mask, n if variant.rescale else 1)
        case "none":
            allocation = torch.ones_like(conserved_incoming)
    if key_mask is not None:
        competition = competition.masked_fill(~key_mask, 0)
    if query_mask is not None:
        allocation = allocation.masked_fill(~query_mask, 0)

    memory = k.mT @ (valid_values(value, key_mask) * competition[..., None])
    result = torch.bmm(q, memory, out=out).mul_((allocation * inverse_incoming)[..., None])
    sums = torch.stack([key_sum, query_sum, conserved_key_sum, conserved_query_sum], -2)
    return result, Flows(inverse_incoming, inverse_outgoing, allocation, competition, sums, memory)


def backward(grad, query, key, value, query_mask, key_mask, f: Flows, scale: float, variant: FlowVariant, out):
    """The gradients of query, key and value, in the dtype of the sums, written to the three tensors `out`."""
    grad_q, grad_k, grad_value = out
    q, k = features(query, query_mask, scale, variant), features(key, key_mask, scale, variant)
    n, m = _count(query_mask, q), _count(key_mask, k)
    eps, (key_sum, query_sum, conserved_key_sum, conserved_query_sum) = variant.eps, f.sums.unbind(-2)

    # R = α/I · q S, and S = kᵀ c V
    received_grad = valid_values(grad, query_mask) * (f.allocation * f.inverse_incoming)[..., None]
    torch.bmm(received_grad, f.memory.mT, out=grad_q)
    grad_memory = q.mT @ received_grad
    taken = _row_dot(q, grad_q)  # ⟨dR, R⟩, which is α dα
    competing = valid_values(value, key_mask) * f.competition[..., None]
    torch.bmm(k, grad_memory, out=grad_value)  # still without c
    given = _row_dot(grad_value, competing)  # c dc
    torch.bmm(competing, grad_memory.mT, out=grad_k)
    grad_value.mul_(f.competition[..., None])
    grad_conserved_incoming = _allocation_gradient(taken, f.allocation, n, m, variant)
    grad_conserved_outgoing = _competition_gradient(given, f.competition, m, variant)
    if variant.clamp is not None:
        outside = _flow(k, conserved_query_sum, variant).abs() > variant.clamp
        grad_conserved_outgoing = grad_conserved_outgoing.masked_fill(outside, 0)

    # the conserved flows, then the flows they were made of
    grad_conserved_key_sum = _weighted_sum(grad_conserved_incoming, q, eps)
    grad_conserved_query_sum = _weighted_sum(grad_conserved_outgoing, k, eps)
    grad_outgoing = -_dot(k, grad_conserved_key_sum) * f.inverse_outgoing * f.inverse_outgoing
    grad_incoming = -(taken + _dot(q, grad_conserved_query_sum) * f.inverse_incoming) * f.inverse_incoming
    grad_query_sum = _weighted_sum(grad_outgoing, k, eps)
    grad_key_sum = _weighted_sum(grad_incoming, q, eps)

    _add_outer(
        grad_q,
        [grad_conserved_incoming, f.inverse_incoming, grad_incoming, torch.ones_like(taken)],
        [conserved_key_sum + eps, grad_conserved_query_sum, key_sum + eps, grad_query_sum],
    )
    _add_outer(
        grad_k,
        [grad_conserved_outgoing, f.inverse_outgoing, grad_outgoing, torch.ones_like(given)],
        [conserved_query_sum + eps, grad_conserved_key_sum, query_sum + eps, grad_key_sum],
    )
    feature_gradient_(grad_q, q, scale, variant)
    feature_gradient_(grad_k, k, scale, variant)


def _competition_gradient(given: Tensor, competition: Tensor, m, variant: FlowVariant) -> Tensor:
    """dÔ before the clamp, from c dc."""
    match variant.competition:
        case "softmax":
            return _softmax_gradient(given, competition, m if variant.rescale else 1)
        case "sigmoid":
            return given * (1 - competition)
        case "none":
            return torch.zeros_like(given)


def _allocation_gradient(taken: Tensor, allocation: Tensor, n, m, variant: FlowVariant) -> Tensor:
    """dÎ, from α dα."""
    match variant.allocation:
        case "sigmoid":
            return taken * (1 - allocation) * _length_ratio(n, m, variant)
        case "softmax":
            return _softmax_gradient(taken, allocation, n if variant.rescale else 1)
        case "none":
            return torch.zeros_like(taken)


def _softmax(flow: Tensor, mask: Tensor | None, factor) -> Tensor:
    if mask is not None:
        flow = flow.masked_fill(~mask, torch.finfo(flow.dtype).min)
    return flow.softmax(-1) * factor


def _softmax_gradient(weighted: Tensor, share: Tensor, factor) -> Tensor:
    """The gradient of x from share · d share, where share = factor · softmax(x)."""
    return weighted - share * (weighted.sum(-1, keepdim=True) / _at_least_one(factor))


def _flow(x: Tensor, total: Tensor, variant: FlowVariant) -> Tensor:
    """(x + ε)·(total + ε) + ε', without ever storing x + ε."""
    total = total + variant.eps
    return _dot(x, total) + (variant.eps * total.sum(-1, keepdim=True) + variant.flow_eps)


def _dot(x: Tensor, vector: Tensor) -> Tensor:
    # a row times a matrix: torch runs the heads of a column times a matrix one after another, seven times slower
    return (vector[..., None, :] @ x.mT).squeeze(-2)


def _row_dot(x: Tensor, y: Tensor) -> Tensor:
    return (x * y).sum(-1)


def _weighted_sum(weight: Tensor, x: Tensor, eps: float = 0.0) -> Tensor:
    """Σ weight (x + ε), (G, D)."""
    total = (weight[..., None, :] @ x).squeeze(-2)
    return total + eps * weight.sum(-1, keepdim=True) if eps else total


def _add_outer(x: Tensor, columns: list[Tensor], rows: list[Tensor]) -> None:
    """x += Σ column rowᵀ, as one narrow matrix product."""
    x.baddbmm_(torch.stack(columns, -2).mT, torch.stack(rows, -2))


def _count(mask: Tensor | None, x: Tensor) -> Tensor | int:
    return x.shape[-2] if mask is None else mask.sum(-1, keepdim=True).to(x.dtype)


def _at_least_one(count):
    return count.clamp_min(1) if isinstance(count, Tensor) else max(count, 1)


def _length_ratio(n, m, variant: FlowVariant):
    return n / _at_least_one(m) if variant.rescale else 1
