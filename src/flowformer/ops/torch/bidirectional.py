"""Bidirectional Flow-Attention, forward and backward, linear in time and memory.

The sums are those of `reference.py`. The backward pass is written by hand, since autograd would save a dozen tensors of
the size of the input.

Shapes: query (B, H, N, D), key (B, H_kv, M, D), value (B, H_kv, M, E); G heads of a block, N sinks, M sources, D
features, E values.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..common import Mask, Masks, Options, empty_result, sum_dtype, valid_values
from ..variant import FlowVariant
from .features import feature_gradient, features
from .flows import add_outer, at_least_one, dot, length_ratio, token_flows, weighted_sum
from .gates import competing_flow, gate, split_powers
from .head_blocks import empty_gradients, head_blocks, one_block

MIN_BLOCKS = 4


class Flows(NamedTuple):
    """What the forward pass saves for the backward pass: a few numbers per token, and the sums of each head.

    The shapes are for a block of heads; those of all heads are (B, H, ...).
    """

    inverse_incoming: Tensor  # 1/I, (G, N)
    inverse_outgoing: Tensor  # 1/O, (G, M)
    allocation: Tensor  # α, (G, N), 0 where masked
    competition: Tensor  # c, (G, M), 0 where masked
    sums: Tensor  # Σk, Σq, Σk/O, Σq/I, (G, 4, D)
    memory: Tensor  # S = Σ kᵀ c V, (G, D, E)


def forward(query: Tensor, key: Tensor, value: Tensor, masks: Masks, options: Options) -> tuple[Tensor, Flows]:
    """The result, and the flows of every head for the backward pass, (B, H, ...)."""
    result, flows = empty_result(query, value.shape[-1]), empty_flows(query, key, value)
    scratch = _scratch(query, key, value)
    for block in head_blocks(query, key, value, max(query.shape[2], key.shape[2]), MIN_BLOCKS):
        inputs, own_masks = block.inputs(query, key, value), block.masks(masks)
        out, parts = _block_forward(*inputs, own_masks, options, scratch, block.sink_view(result))
        block.write_sinks(result, out)
        for kept, part in zip(flows, parts, strict=True):
            block.write_sinks(kept, part)
    return result, flows


def backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, masks: Masks, flows: Flows, options: Options
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value."""
    grad_query, grad_key, grad_value = empty_gradients(query, key, value)
    scratch = _scratch(query, key, value)
    for block in head_blocks(query, key, value, max(query.shape[2], key.shape[2]), MIN_BLOCKS):
        inputs, own_masks = block.inputs(query, key, value), block.masks(masks)
        parts = Flows(*(block.sinks(part) for part in flows))
        out = block.sink_view(grad_query), block.source_view(grad_key), block.source_view(grad_value)
        grads = _block_backward(block.sinks(grad), *inputs, own_masks, parts, options, scratch, out)
        block.write_sinks(grad_query, grads[0])
        block.write_sources(grad_key, grads[1])
        block.write_sources(grad_value, grads[2])
    return grad_query, grad_key.to(key.dtype), grad_value.to(value.dtype)


def graph(query: Tensor, key: Tensor, value: Tensor, masks: Masks, options: Options) -> Tensor:
    """`forward` in plain torch operators, differentiable by autograd.

    For variants without a registered operator, and for export, as one graph without loops for any length.
    """
    block, query, key, value, options = one_block(query, key, value, options)
    inputs, heads = block.inputs(query, key, value), max(query.shape[1], 1)
    flat, _ = _block_forward(*inputs, block.masks(masks), options, heads=heads)
    result: Tensor = flat.unflatten(0, query.shape[:2])
    return result.to(query.dtype)


def empty_flows(query: Tensor, key: Tensor, value: Tensor) -> Flows:
    batch, heads, sinks, dim = query.shape
    sources = key.shape[2]
    shapes = (sinks,), (sources,), (sinks,), (sources,), (4, dim), (dim, value.shape[-1])
    return Flows(*(query.new_empty(batch, heads, *shape, dtype=sum_dtype(query)) for shape in shapes))


class _Scratch:
    """Buffers reused across head blocks: fresh allocations would page-fault on first touch, which costs as much as the
    sums."""

    def __init__(self, size: int, like: Tensor) -> None:
        self.buffers: list[Tensor] = [part for _ in range(3) for part in like.new_empty(2, size, dtype=sum_dtype(like))]

    def __call__(self, index: int, *shape: int) -> Tensor | None:
        return self.buffers[index][: math.prod(shape)].view(shape)


def _no_scratch(index: int, *shape: int) -> Tensor | None:
    """No buffer: in a graph, the compiler plans the memory."""
    return None


def _scratch(query: Tensor, key: Tensor, value: Tensor) -> _Scratch:
    length, width = max(query.shape[2], key.shape[2]), max(query.shape[3], value.shape[3])
    # the first block is the largest
    block = next(head_blocks(query, key, value, length, MIN_BLOCKS), None)
    heads = 0 if block is None else query[block.batch, block.query_heads, :0].flatten(0, 1).shape[0]
    return _Scratch(heads * length * width, query)


def _block_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    masks: Masks,
    options: Options,
    scratch: Callable[..., Tensor | None] = _no_scratch,
    out: Tensor | None = None,
    heads: int = 1,
) -> tuple[Tensor, Flows]:
    """The result R (G, N, E), written to `out` if given, else in the dtype of the sums; and the flows.

    `_block_backward` does not support powers, `renormalize` and `competitors="heads"`: these are for autograd.

    Args:
        options: powers have the shape (2, G).
        heads: heads per sequence, for `competitors="heads"`.
    """
    (query_mask, key_mask), (_, variant, powers) = masks, options
    q = features(query, query_mask, options, scratch(0, *query.shape))
    k = features(key, key_mask, options, scratch(1, *key.shape))
    n, m = _count(query_mask, q), _count(key_mask, k)
    key_sum, query_sum = k.sum(-2), q.sum(-2)
    inverse_incoming = token_flows(q, key_sum, variant).reciprocal_()
    inverse_outgoing = token_flows(k, query_sum, variant).reciprocal_()
    conserved_key_sum = weighted_sum(inverse_outgoing, k)
    conserved_query_sum = weighted_sum(inverse_incoming, q)
    conserved_incoming = token_flows(q, conserved_key_sum, variant)
    conserved_outgoing = token_flows(k, conserved_query_sum, variant)

    tau, gamma = split_powers(powers, axes=1)
    bounded = competing_flow(conserved_outgoing, variant, tau)
    match variant.competition:
        case "softmax" if variant.competitors == "heads":
            share = bounded.unflatten(0, (len(k) // heads, heads)).softmax(1)
            competition = share.flatten(0, 1) * (m if variant.rescale else 1)
        case "softmax":
            competition = _softmax(bounded, key_mask, m if variant.rescale else 1)
        case kind:
            competition = gate(bounded, kind)
    if variant.allocation == "softmax":
        allocation = _softmax(conserved_incoming, query_mask, n if variant.rescale else 1)
    else:
        allocation = gate(conserved_incoming * length_ratio(n, m, variant), variant.allocation, gamma)
    if key_mask is not None:
        competition = competition.masked_fill(~key_mask, 0)
    if query_mask is not None:
        allocation = allocation.masked_fill(~query_mask, 0)

    competing = torch.mul(valid_values(value, key_mask), competition[..., None], out=scratch(2, *value.shape))
    memory = k.mT @ competing
    # matrix products are written to scratch, which is in cache; `out` is not, and only the last step writes to it
    result = torch.bmm(q, memory, out=scratch(3, *q.shape[:2], value.shape[-1]))
    received = allocation * inverse_incoming
    if variant.renormalize:
        received = allocation / token_flows(q, weighted_sum(competition, k), variant)
    result = torch.mul(result, received[..., None], out=out)
    sums = torch.stack([key_sum, query_sum, conserved_key_sum, conserved_query_sum], -2)
    return result, Flows(inverse_incoming, inverse_outgoing, allocation, competition, sums, memory)


def _block_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    masks: Masks,
    f: Flows,
    options: Options,
    scratch: _Scratch,
    out: tuple[Tensor | None, ...],
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value, each written to its tensor in `out` unless that is None."""
    (query_mask, key_mask), variant = masks, options.variant
    q = features(query, query_mask, options, scratch(0, *query.shape))
    k = features(key, key_mask, options, scratch(1, *key.shape))
    n, m = _count(query_mask, q), _count(key_mask, k)
    eps, (key_sum, query_sum, conserved_key_sum, conserved_query_sum) = variant.eps, f.sums.unbind(-2)

    # R = α/I · q S, and S = kᵀ c V
    received = (f.allocation * f.inverse_incoming)[..., None]
    received_grad = torch.mul(valid_values(grad, query_mask), received, out=scratch(2, *grad.shape))
    grad_q = torch.bmm(received_grad, f.memory.mT, out=scratch(3, *q.shape))
    grad_memory = q.mT @ received_grad
    alpha_dalpha = torch.mul(q, grad_q, out=scratch(4, *q.shape)).sum(-1)  # ⟨dR, R⟩, which is α dα
    competing = torch.mul(valid_values(value, key_mask), f.competition[..., None], out=scratch(2, *value.shape))
    grad_value = torch.bmm(k, grad_memory, out=scratch(4, *value.shape))  # still without c
    c_dc = torch.mul(grad_value, competing, out=scratch(5, *value.shape)).sum(-1)
    grad_value = torch.mul(grad_value, f.competition[..., None], out=out[2])
    grad_k = torch.bmm(competing, grad_memory.mT, out=scratch(5, *k.shape))
    grad_conserved_incoming = _allocation_gradient(alpha_dalpha, f.allocation, n, m, variant)
    grad_conserved_outgoing = _competition_gradient(c_dc, f.competition, m, variant)
    if variant.clamp is not None:
        outside = token_flows(k, conserved_query_sum, variant).abs() > variant.clamp
        grad_conserved_outgoing = grad_conserved_outgoing.masked_fill(outside, 0)

    # through the conserved flows, then through the flows that they are computed from
    grad_conserved_key_sum = weighted_sum(grad_conserved_incoming, q, eps)
    grad_conserved_query_sum = weighted_sum(grad_conserved_outgoing, k, eps)
    grad_outgoing = -dot(k, grad_conserved_key_sum) * f.inverse_outgoing * f.inverse_outgoing
    grad_incoming = -(alpha_dalpha + dot(q, grad_conserved_query_sum) * f.inverse_incoming) * f.inverse_incoming
    grad_query_sum = weighted_sum(grad_outgoing, k, eps)
    grad_key_sum = weighted_sum(grad_incoming, q, eps)

    add_outer(
        grad_q,
        [grad_conserved_incoming, f.inverse_incoming, grad_incoming, torch.ones_like(alpha_dalpha)],
        [conserved_key_sum + eps, grad_conserved_query_sum, key_sum + eps, grad_query_sum],
    )
    add_outer(
        grad_k,
        [grad_conserved_outgoing, f.inverse_outgoing, grad_outgoing, torch.ones_like(c_dc)],
        [conserved_query_sum + eps, grad_conserved_key_sum, query_sum + eps, grad_key_sum],
    )
    grad_query = feature_gradient(grad_q, q, options, out[0])
    return grad_query, feature_gradient(grad_k, k, options, out[1]), grad_value


def _competition_gradient(c_dc: Tensor, competition: Tensor, m: Tensor | int, variant: FlowVariant) -> Tensor:
    """dÔ before the clamp, from c dc."""
    match variant.competition:
        case "softmax":
            return _softmax_gradient(c_dc, competition, m if variant.rescale else 1)
        case "sigmoid":
            return c_dc * (1 - competition)
        case "none":
            return torch.zeros_like(c_dc)


def _allocation_gradient(
    alpha_dalpha: Tensor, allocation: Tensor, n: Tensor | int, m: Tensor | int, variant: FlowVariant
) -> Tensor:
    """dÎ, from α dα."""
    match variant.allocation:
        case "sigmoid":
            return alpha_dalpha * (1 - allocation) * length_ratio(n, m, variant)
        case "softmax":
            return _softmax_gradient(alpha_dalpha, allocation, n if variant.rescale else 1)
        case "none":
            return torch.zeros_like(alpha_dalpha)


def _softmax(flow: Tensor, mask: Mask, factor: Tensor | int) -> Tensor:
    if mask is not None:
        flow = flow.masked_fill(~mask, torch.finfo(flow.dtype).min)
    return flow.softmax(-1) * factor


def _softmax_gradient(weighted: Tensor, share: Tensor, factor: Tensor | int) -> Tensor:
    """The gradient of x from share · d share, where share = factor · softmax(x)."""
    return weighted - share * (weighted.sum(-1, keepdim=True) / at_least_one(factor))


def _count(mask: Mask, x: Tensor) -> Tensor | int:
    return x.shape[-2] if mask is None else mask.sum(-1, keepdim=True).to(x.dtype)
