"""Bidirectional Flow-Attention by Triton kernels: the operators and their autograd.

Shapes: query (B, H, N, D), key (B, H_kv, M, D), value (B, H_kv, M, E); masks (B, N) and (B, M) bool. Packed sequences
are one row of a batch, (1, H, T, D), with the bounds (B + 1,) of the sequences in it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...bounds import Bounds, Lengths, check_bounds
from ...common import Mask, Masks, Options, Powers, empty_result
from ...library import differentiate, distinct, register
from ..launch import Kernel, arguments
from ..plan import OPTIONS, FlatOptions, contiguous, dense, empty, flat_options, plan_of, variant_of
from ..precision import float32_precision
from .plan import BidirectionalPlan, kept_sizes


class Extras(NamedTuple):
    """The optional tensors of a call, in the order of the operators' arguments."""

    query_mask: Mask
    key_mask: Mask
    query_bounds: Bounds
    key_bounds: Bounds
    powers: Powers

    def contiguous(self) -> Extras:
        masks = contiguous(self.query_mask), contiguous(self.key_mask)
        return Extras(*masks, self.query_bounds, self.key_bounds, contiguous(self.powers))


def bidirectional(query: Tensor, key: Tensor, value: Tensor, masks: Masks, options: Options) -> Tensor:
    """R, (B, H, N, E), in the memory order of the query; see `flow_attention`."""
    extras = Extras(*masks, None, None, options.powers)
    return _apply(query, key, value, extras, max(query.shape[2], key.shape[2]), options)


def packed(query: Tensor, key: Tensor, value: Tensor, lengths: Lengths, options: Options) -> Tensor:
    """R of packed sequences, (T, H, E); see `flow_attention_varlen`."""
    query, key, value = (x.transpose(0, 1)[None] for x in (query, key, value))
    extras = Extras(None, None, *lengths[:2], options.powers)
    return _apply(query, key, value, extras, max(lengths[2:]), options)[0].transpose(0, 1)


def _apply(query: Tensor, key: Tensor, value: Tensor, extras: Extras, longest: int, options: Options) -> Tensor:
    leaves = query, key, value, extras.powers
    keep = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in leaves)
    inputs = *distinct(query, key, value, *extras), longest, keep, *flat_options(options)
    result: Tensor = _Bidirectional.apply(*inputs) if keep else _triton_bidirectional(*inputs)[0]
    return result


class _Bidirectional(torch.autograd.Function):
    # no setup_context: with it torch inspects the signature in every call
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        result: Tensor
        result, kept = _triton_bidirectional(*inputs)
        ctx.save_for_backward(*inputs[:8], kept)
        ctx.longest, ctx.options, ctx.has_powers = inputs[8], inputs[10:], inputs[7] is not None
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        inputs = *ctx.saved_tensors, ctx.longest, *ctx.options
        *input_grads, grad_powers = differentiate(_triton_bidirectional_backward, grads[0], *inputs)
        powers = grad_powers if ctx.has_powers else None
        return *input_grads, None, None, None, None, powers, None, None, *(None for _ in ctx.options)


def _forward(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """The result, and the buffer for the backward pass, which is empty unless `keep`."""
    extras, longest, keep, options = Extras(*rest[:5]).contiguous(), rest[5], rest[6], rest[7:]
    bounds = extras.query_bounds
    if bounds is not None and extras.key_bounds is not None:
        lengths = bounds, extras.key_bounds, longest, longest
        check_bounds(query.shape[2], key.shape[2], lengths, is_causal=False)
    query, key, value = dense(query), dense(key), dense(value)
    result = empty_result(query, value.shape[-1])
    is_empty = _is_empty(query, value, bounds)
    if is_empty or bounds is not None:
        # kernels do not write tokens that belong to no sequence
        result.zero_()
    if is_empty:
        return result, _empty_kept(query, key, value, bounds, keep, options)

    plan = _plan((query, key, value, result), extras, longest, keep, options)
    kept, scratch = empty(plan.kept, query.device), empty(plan.forward_scratch, query.device)
    ahead = functools.partial(_backward_kernels, query, key, value, result, kept, extras, longest, options)
    plan.launches((query, key, value, *extras, result, kept, scratch), plan.forward, ahead if keep else None)
    return result, kept


def _backward_kernels(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    result: Tensor,
    kept: Tensor,
    extras: Extras,
    longest: int,
    options: FlatOptions,
) -> Iterator[Kernel]:
    """The kernels of the backward pass, assuming that each gradient has the strides of its tensor."""
    tensors = query, key, value, result, query, key, value
    plan = _plan(tensors, extras, longest, True, options)
    scratch = empty(plan.backward_scratch, torch.device("meta"))
    return plan.backward(*arguments((*tensors, *extras, kept, scratch)))


def _backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """The gradients of query, key, value and powers; without powers the last is empty."""
    extras, kept, longest, options = Extras(*rest[:5]).contiguous(), rest[5], rest[6], rest[7:]
    bounds, powers = extras.query_bounds, extras.powers
    grads = [(torch.empty_like if bounds is None else torch.zeros_like)(x) for x in (query, key, value)]
    if _is_empty(query, value, bounds):
        return *(x.zero_() for x in grads), _empty_powers(query, powers).zero_()
    outs = [dense(x) for x in grads]
    tensors = *(dense(x) for x in (query, key, value, grad)), *outs
    plan = _plan(tensors, extras, longest, True, options)
    scratch = empty(plan.backward_scratch, query.device)
    plan.launches((*tensors, *extras, kept, scratch), plan.backward)
    grad_powers = _empty_powers(query, powers)
    if powers is not None:
        # the parts of each sequence, head and segment, summed in a fixed order
        parts = scratch[scratch.numel() - plan.backward_scratch[-1] :][: 2 * plan.records * plan.segments]
        grad_powers = parts.view(-1, query.shape[1], plan.segments, 2).sum((0, 2)).t().contiguous()
    return *(x if x is out else x.copy_(out) for x, out in zip(grads, outs, strict=True)), grad_powers


def _empty_powers(query: Tensor, powers: Powers) -> Tensor:
    return query.new_empty(0 if powers is None else powers.shape, dtype=torch.float32)


def _plan(
    tensors: tuple[Tensor, ...], extras: Extras, longest: int, keep: bool, options: FlatOptions
) -> BidirectionalPlan:
    precision = float32_precision() if tensors[0].dtype == torch.float32 else None
    return plan_of(BidirectionalPlan, (*tensors, *extras), longest, keep, precision, *options)


def _is_empty(query: Tensor, value: Tensor, bounds: Bounds) -> bool:
    """Whether there are no sinks, no sources, or no sequences."""
    return not (query.numel() and value.numel() and (bounds is None or bounds.shape[0] > 1))


def _empty_kept(query: Tensor, key: Tensor, value: Tensor, bounds: Bounds, keep: bool, options: FlatOptions) -> Tensor:
    (batch, heads, sinks, dim), sources = query.shape, key.shape[2]
    records = heads * (batch if bounds is None else bounds.shape[0] - 1)
    renormalize = variant_of(options).renormalize
    sizes = kept_sizes(batch * heads, records, sinks, sources, dim, value.shape[-1], renormalize) if keep else []
    return query.new_empty(sum(sizes), dtype=torch.float32)


def _fake_forward(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    extras, keep, options = Extras(*rest[:5]), rest[6], rest[7:]
    kept = _empty_kept(query, key, value, extras.query_bounds, keep, options)
    return empty_result(query, value.shape[-1]), kept


def _fake_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return *(torch.empty_like(x) for x in (query, key, value)), _empty_powers(query, Extras(*rest[:5]).powers)


_INPUTS = (
    "Tensor query, Tensor key, Tensor value, Tensor? query_mask, Tensor? key_mask, Tensor? cu_seqlens_q, "
    "Tensor? cu_seqlens_k, Tensor? powers"
)
_triton_bidirectional = register(
    f"triton_bidirectional({_INPUTS}, SymInt longest, bool keep, {OPTIONS}) -> (Tensor, Tensor)",
    _forward,
    _fake_forward,
)
_triton_bidirectional_backward = register(
    f"triton_bidirectional_backward(Tensor grad, {_INPUTS}, Tensor kept, SymInt longest, {OPTIONS})"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    _backward,
    _fake_backward,
)
