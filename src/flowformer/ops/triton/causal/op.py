"""Causal Flow-Attention by Triton kernels: the operators and their autograd.

Shapes: query (B, H, N, D), key (B, H_kv, N, D), value (B, H_kv, N, E), mask (B, N) bool. Packed sequences are one row
of a batch, (1, H, T, D), with the bounds (B + 1,) of the sequences in it. The three tensors of a state are those of
`FlowState`; the operators return them in one buffer.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ...bounds import Bounds, Lengths, check_bounds
from ...common import Mask, Options, Powers, State, empty_result
from ...library import differentiate, distinct, register
from ...state import empty_state, num_sums
from ..decode import decode
from ..launch import Kernel, arguments
from ..plan import OPTIONS, FlatOptions, contiguous, dense, empty, flat_options, plan_of, variant_of
from .launch_table import config
from .plan import CausalPlan, kept_sizes, powers_size, segment_count, state_sizes

_NOT_PACKED = None, None


def causal(query: Tensor, key: Tensor, value: Tensor, mask: Mask, options: Options) -> Tensor:
    """The result; see `flow_attention`."""
    return _apply(query, key, value, mask, _NOT_PACKED, query.shape[2], None, options)[0]


def recurrent(
    query: Tensor, key: Tensor, value: Tensor, mask: Mask, state: State | None, options: Options
) -> tuple[Tensor, State]:
    """The result and the state after the last token; see `flow_attention_recurrent`."""
    if query.shape[2] == 1 and not _needs_gradients(query, key, value, options.powers, *(state or ())):
        parts = empty_state(query, value, options.variant) if state is None else state
        sums, memory, scalars = (part.clone(memory_format=torch.contiguous_format) for part in parts)
        result = decode(query, key, value, mask, (sums, memory, scalars), options)
        return result, (sums, memory, scalars)
    result, end, _ = _apply(query, key, value, mask, _NOT_PACKED, query.shape[2], state, options)
    # decoding updates the tensors of a state in place, so each gets its own memory
    ends = state_views(end, query, query.shape[0], value.shape[3], num_sums(options.variant))
    sums, memory, scalars = (part.clone() for part in ends)
    return result, (sums, memory, scalars)


def packed(query: Tensor, key: Tensor, value: Tensor, lengths: Lengths, options: Options) -> Tensor:
    """The result (T, H, E) of packed sequences; see `flow_attention_varlen`."""
    query, key, value = (x.transpose(0, 1)[None] for x in (query, key, value))
    result, *_ = _apply(query, key, value, None, lengths[:2], max(lengths[2:]), None, options)
    return result[0].transpose(0, 1)


def _apply(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask,
    bounds: tuple[Bounds, Bounds],
    longest: int,
    state: State | None,
    options: Options,
) -> tuple[Tensor, Tensor, Tensor]:
    parts = (None, None, None) if state is None else state
    keep = _needs_gradients(query, key, value, options.powers, *parts)
    *tensors, sums, memory, scalars = distinct(query, key, value, mask, *bounds, *parts)
    inputs = *tensors, longest, keep, sums, memory, scalars, options.powers, *flat_options(options)
    result, end, kept = _Causal.apply(*inputs) if keep else _triton_causal(*inputs)
    return result, end, kept


def _needs_gradients(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


class _Causal(torch.autograd.Function):
    # no setup_context: with it torch inspects the signature in every call
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
        result, end, kept = _triton_causal(*inputs)
        scalars, powers = inputs[10:12]
        ctx.save_for_backward(*inputs[:5], powers, scalars, result, kept)
        ctx.mark_non_differentiable(kept)
        # gradients of unused outputs stay None instead of zeros
        ctx.set_materialize_grads(False)
        ctx.longest, ctx.options, ctx.has_state = inputs[6], inputs[12:], scalars is not None
        return result, end, kept

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_end: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
        *tensors, powers, scalars, result, kept = ctx.saved_tensors
        query, _, value, _, bounds = tensors
        if grad is None:
            grad = torch.zeros_like(result)
        inputs = *tensors, ctx.longest, powers, scalars, result, kept, *ctx.options
        *grads, start = differentiate(_triton_causal_backward, grad, grad_end, *inputs)
        # not by `variant_of`: torch.compile traces this function and cannot trace the dataclass
        batch, sums = _sequences(query, bounds), 5 if ctx.options[-1] else 4
        state = state_views(start, query, batch, value.shape[3], sums) if ctx.has_state else (None, None, None)
        grad_powers = None
        if powers is not None:
            grad_powers = powers_gradient(start, query, batch, value.shape[3], sums)
        return *grads, *(None for _ in range(5)), *state, grad_powers, *(None for _ in ctx.options)


def state_views(flat: Tensor, query: Tensor, batch: int, value_dim: int, sums: int) -> list[Tensor]:
    """The three tensors of a state as views of one buffer."""
    heads, dim = query.shape[1], query.shape[3]
    shapes = (batch, heads, sums, dim), (batch, heads, dim, value_dim), (batch, heads, 3)
    starts = itertools.accumulate(state_sizes(batch * heads, dim, value_dim, sums), initial=0)
    return [flat[start : start + math.prod(shape)].view(shape) for start, shape in zip(starts, shapes, strict=False)]


def powers_gradient(flat: Tensor, query: Tensor, batch: int, value_dim: int, sums: int) -> Tensor:
    """The gradient of the powers (2, H), from the parts that follow the gradient of a state in one buffer."""
    heads, dim = query.shape[1], query.shape[3]
    parts = flat[sum(state_sizes(batch * heads, dim, value_dim, sums)) :]
    segments = parts.shape[0] // max(2 * batch * heads, 1)
    # parts of each sequence, head and segment, summed in a fixed order
    return parts.view(batch, heads, segments, 2).sum((0, 2)).t()


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask,
    bounds: Bounds,
    key_bounds: Bounds,
    longest: int,
    keep: bool,
    sums: Tensor | None,
    memory: Tensor | None,
    scalars: Tensor | None,
    powers: Powers,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """The result, the last state in one buffer, and the kernels' flows and sums, all of them only if `keep`."""
    if bounds is not None and key_bounds is not None:
        check_bounds(query.shape[2], key.shape[2], (bounds, key_bounds, longest, longest), is_causal=True)
    query, key, value = dense(query), dense(key), dense(value)
    sums, memory, scalars, powers = (contiguous(x) for x in (sums, memory, scalars, powers))
    if not query.numel():
        result, end, kept = _empty_outputs(query, value, bounds, longest, keep, options)
        given = [part for part in (sums, memory, scalars) if part is not None]
        variant = variant_of(options)
        before = given or empty_state(query, value, variant)
        parts = state_views(end, query, _sequences(query, bounds), value.shape[3], num_sums(variant))
        for part, old in zip(parts, before, strict=True):
            part.copy_(old)
        return result, end, kept

    inputs = query, key, value, mask, bounds, powers, sums, memory, scalars
    plan = plan_of(CausalPlan, inputs, longest, keep, *options)
    result = empty_result(query, value.shape[3])
    if bounds is not None:
        # kernels do not write tokens that belong to no sequence
        result.zero_()
    kept, end = empty(plan.kept, query.device), empty(plan.state, query.device)
    scratch = empty(plan.forward_scratch, query.device) if plan.forward_scratch else None
    positions = positions_of(mask)
    saved = query, key, value, mask, positions, bounds, powers, scalars, result, kept
    ahead = functools.partial(_backward_kernels, *saved, longest, options) if keep else None
    inputs = query, key, value, positions, bounds, powers, sums, memory, scalars
    plan.launches((*inputs, result, kept, end, scratch), plan.forward, ahead)
    return result, end, kept


def _backward_kernels(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask,
    positions: Tensor | None,
    bounds: Bounds,
    powers: Powers,
    scalars: Tensor | None,
    result: Tensor,
    kept: Tensor,
    longest: int,
    options: FlatOptions,
) -> Iterator[Kernel]:
    """The kernels of the backward pass, assuming that each gradient has the strides of its tensor."""
    meta, rest = torch.device("meta"), (bounds, powers, result, None, scalars, result, kept)
    plan = plan_of(CausalPlan, (query, key, value, mask, *rest), longest, True, *options)
    start, scratch = empty(plan.start, meta), empty(plan.backward_scratch, meta)
    outs = query, *key_gradients(query, key, value, meta), start
    return plan.backward(*arguments((query, key, value, positions, *rest, *outs, scratch)))


def _backward(
    grad: Tensor,
    grad_end: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask,
    bounds: Bounds,
    longest: int,
    powers: Powers,
    scalars: Tensor | None,
    result: Tensor,
    kept: Tensor,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of query, key and value, and one buffer with the gradient of the state before the first token and,
    for each segment, the gradient of the powers."""
    grad, query, key, value = dense(grad), dense(query), dense(key), dense(value)
    grad_end, scalars, powers = contiguous(grad_end), contiguous(scalars), contiguous(powers)
    grad_query = torch.empty_like(query)
    grad_key, grad_value = key_gradients(query, key, value, query.device)
    if bounds is not None:
        for x in (grad_query, grad_key, grad_value):
            x.zero_()
    if not query.numel():
        start = _empty_start(query, value, bounds, longest, powers, options).zero_()
        if grad_end is not None:
            start[: grad_end.numel()] = grad_end
        return grad_query, torch.zeros_like(key), torch.zeros_like(value), start

    rest = bounds, powers, grad, grad_end, scalars, result, kept
    plan = plan_of(CausalPlan, (query, key, value, mask, *rest), longest, True, *options)
    start, scratch = empty(plan.start, query.device), empty(plan.backward_scratch, query.device)
    outs = grad_query, grad_key, grad_value, start
    plan.launches((query, key, value, positions_of(mask), *rest, *outs, scratch), plan.backward)
    return grad_query, add_shared(grad_key, key), add_shared(grad_value, value), start


def key_gradients(query: Tensor, key: Tensor, value: Tensor, device: torch.device) -> list[Tensor]:
    """Uninitialised gradients of key and value, one for every query head.

    The gradients of query heads that share a key head are summed in a fixed order afterwards.
    """
    if query.shape[1] == key.shape[1]:
        return [torch.empty_like(x, device=device) for x in (key, value)]
    return [x.new_empty(*query.shape[:2], *x.shape[2:], device=device) for x in (key, value)]


def add_shared(grad: Tensor, x: Tensor) -> Tensor:
    """The gradient of x (B, H_kv, N, ...), from the gradients of all query heads."""
    if grad.shape[1] == x.shape[1]:
        return grad
    # keep this dtype under autocast, which would choose float32
    total: Tensor = grad.unflatten(1, (x.shape[1], -1)).sum(2, dtype=grad.dtype)
    return total


def _empty_outputs(
    query: Tensor, value: Tensor, bounds: Bounds, longest: int, keep: bool, options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """The result, the last state, and what is saved for the backward pass, uninitialised."""
    rows, dim, value_dim = query.shape[1] * _sequences(query, bounds), query.shape[3], value.shape[3]
    variant = variant_of(options)
    chunk, sums = config(query.dtype, dim, value_dim, variant.feature_map).chunk, num_sums(variant)
    segments = segment_count(rows, longest, query.device)
    sizes = (
        sum(state_sizes(rows, dim, value_dim, sums)),
        sum(kept_sizes(query.shape, value_dim, rows, longest, segments, chunk, keep, sums)),
    )
    end, kept = (query.new_empty(size, dtype=torch.float32) for size in sizes)
    return empty_result(query, value_dim), end, kept


def _empty_start(
    query: Tensor, value: Tensor, bounds: Bounds, longest: int, powers: Powers, options: FlatOptions
) -> Tensor:
    """The gradients of the first state and of the powers, uninitialised."""
    rows, sums = query.shape[1] * _sequences(query, bounds), num_sums(variant_of(options))
    segments = segment_count(rows, longest, query.device)
    sizes = state_sizes(rows, query.shape[3], value.shape[3], sums), powers_size(rows, segments, powers is not None)
    return query.new_empty(sum(sizes[0]) + sum(sizes[1]), dtype=torch.float32)


def _sequences(query: Tensor, bounds: Bounds) -> int:
    return query.shape[0] if bounds is None else bounds.shape[0] - 1


def positions_of(mask: Mask) -> Tensor | None:
    """The number of valid tokens up to each token, negative where the token itself is masked."""
    if mask is None:
        return None
    mask = mask.contiguous()
    positions = mask.cumsum(1, dtype=torch.int32)
    return torch.where(mask, positions, -positions)


def _fake_forward(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    _, bounds, _, longest, keep, _, _, _, _, *options = rest
    return _empty_outputs(query, value, bounds, longest, keep, options)


def _fake_backward(grad: Tensor, grad_end: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    query, key, value, _, bounds, longest, powers, _, _, _, *options = rest
    start = _empty_start(query, value, bounds, longest, powers, options)
    return *(torch.empty_like(x) for x in (query, key, value)), start


_INPUTS = "Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor? bounds"
_STATE = "Tensor? sums, Tensor? memory, Tensor? scalars"
_triton_causal = register(
    f"triton_causal({_INPUTS}, Tensor? key_bounds, SymInt longest, bool keep, {_STATE}, Tensor? powers, {OPTIONS})"
    " -> (Tensor, Tensor, Tensor)",
    _forward,
    _fake_forward,
)
_triton_causal_backward = register(
    f"triton_causal_backward(Tensor grad, Tensor? grad_end, {_INPUTS}, SymInt longest, Tensor? powers, "
    f"Tensor? scalars, Tensor result, Tensor kept, {OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor)",
    _backward,
    _fake_backward,
)
