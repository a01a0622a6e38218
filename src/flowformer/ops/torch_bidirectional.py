"""Bidirectional Flow-Attention of one block of heads, forward and backward, linear in time and memory.

Shapes: G heads of the block, N sinks, M sources, D features, E values. The sums are `reference.py`'s; the backward
pass is written by hand, since autograd would keep a dozen tensors of the size of the input.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .features import feature_gradient, features, sum_dtype, valid_values
from .variant import FlowVariant


class Flows(NamedTuple):
    """What the forward pass leaves for the backward pass: a few numbers a token, and the sums of each head."""

    inverse_incoming: Tensor  # 1/I, (G, N)
    inverse_outgoing: Tensor  # 1/O, (G, M)
    allocation: Tensor  # α, (G, N), 0 where masked
    competition: Tensor  # c, (G, M), 0 where masked
    sums: Tensor  # Σk, Σq, Σk/O, Σq/I, (G, 4, D)
    memory: Tensor  # S = Σ kᵀ c V, (G, D, E)


class Scratch:
    """Memory that one block of heads after another computes in. Fresh memory for each would cost as much as the sums:
    the system hands it out page by page."""

    def __init__(self, size: int, like: Tensor) -> None:
        self.buffers = [part for _ in range(3) for part in like.new_empty(2, size, dtype=sum_dtype(like))]

    def __call__(self, index: int, *shape: int) -> Tensor | None:
        return self.buffers[index][: math.prod(shape)].view(shape)


def no_scratch(index: int, *shape: int) -> Tensor | None:
    """For a graph, whose compiler has its own ideas about memory."""
    return None


def forward(
    query,
    key,
    value,
    query_mask,
    key_mask,
    scale: float,
    variant: FlowVariant,
    scratch: Callable[..., Tensor | None] = no_scratch,
    out: Tensor | None = None,
    heads: int = 1,
) -> tuple[Tensor, Flows]:
    """R, (G, N, E), written to `out` where there is one, else in the dtype of the sums.

    Args:
        heads: of each sequence; needed where they compete, which `backward` does not know.
    """
    q = features(query, query_mask, scale, variant, scratch(0, *query.shape))
    k = features(key, key_mask, scale, variant, scratch(1, *key.shape))
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
        case "softmax" if variant.competitors == "heads":
            share = conserved_outgoing.unflatten(0, (len(k) // heads, heads)).softmax(1)
            competition = share.flatten(0, 1) * (m if variant.rescale else 1)
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

    competing = torch.mul(valid_values(value, key_mask), competition[..., None], out=scratch(2, *value.shape))
    memory = k.mT @ competing
    # products go to memory that is in the cache, and only the last step to `out`, which is not
    result = torch.bmm(q, memory, out=scratch(3, *q.shape[:2], value.shape[-1]))
    result = torch.mul(result, (allocation * inverse_incoming)[..., None], out=out)
    sums = torch.stack([key_sum, query_sum, conserved_key_sum, conserved_query_sum], -2)
    return result, Flows(inverse_incoming, inverse_outgoing, allocation, competition, sums, memory)


def backward(
    grad, query, key, value, query_mask, key_mask, f: Flows, scale: float, variant: FlowVariant, scratch: Scratch, out
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value, written to those of `out` that are there."""
    q = features(query, query_mask, scale, variant, scratch(0, *query.shape))
    k = features(key, key_mask, scale, variant, scratch(1, *key.shape))
    n, m = _count(query_mask, q), _count(key_mask, k)
    eps, (key_sum, query_sum, conserved_key_sum, conserved_query_sum) = variant.eps, f.sums.unbind(-2)

    # R = α/I · q S, and S = kᵀ c V
    received = (f.allocation * f.inverse_incoming)[..., None]
    received_grad = torch.mul(valid_values(grad, query_mask), received, out=scratch(2, *grad.shape))
    grad_q = torch.bmm(received_grad, f.memory.mT, out=scratch(3, *q.shape))
    grad_memory = q.mT @ received_grad
    taken = torch.mul(q, grad_q, out=scratch(4, *q.shape)).sum(-1)  # ⟨dR, R⟩, which is α dα
    competing = torch.mul(valid_values(value, key_mask), f.competition[..., None], out=scratch(2, *value.shape))
    grad_value = torch.bmm(k, grad_memory, out=scratch(4, *value.shape))  # still without c
    given = torch.mul(grad_value, competing, out=scratch(5, *value.shape)).sum(-1)  # c dc
    grad_value = torch.mul(grad_value, f.competition[..., None], out=out[2])
    grad_k = torch.bmm(competing, grad_memory.mT, out=scratch(5, *k.shape))
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
    grad_query = feature_gradient(grad_q, q, scale, variant, out[0])
    return grad_query, feature_gradient(grad_k, k, scale, variant, out[1]), grad_value


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
    flow = _dot(x, total).add_(total.sum(-1, keepdim=True), alpha=variant.eps)
    return flow.add_(variant.flow_eps) if variant.flow_eps else flow


def _dot(x: Tensor, vector: Tensor) -> Tensor:
    # a row times a matrix: torch runs the heads of a column times a matrix one after another, seven times slower
    return torch.bmm(vector[:, None], x.mT)[:, 0]


def _weighted_sum(weight: Tensor, x: Tensor, eps: float = 0.0) -> Tensor:
    """Σ weight (x + ε), (G, D)."""
    total = torch.bmm(weight[:, None], x)[:, 0]
    return total.add_(weight.sum(-1, keepdim=True), alpha=eps) if eps else total


def _add_outer(x: Tensor, columns: list[Tensor], rows: list[Tensor]) -> None:
    """x += Σ column rowᵀ, as one narrow matrix product."""
    x.baddbmm_(torch.stack(columns, -2).mT, torch.stack(rows, -2))


def _count(mask: Tensor | None, x: Tensor) -> Tensor | int:
    return x.shape[-2] if mask is None else mask.sum(-1, keepdim=True).to(x.dtype)


def _at_least_one(count):
    return count.clamp_min(1) if isinstance(count, Tensor) else max(count, 1)


def _length_ratio(n, m, variant: FlowVariant):
    return n / _at_least_one(m) if variant.rescale else 1
