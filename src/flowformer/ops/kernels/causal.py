"""Causal Flow-Attention by Triton kernels: the operators and their autograd.

Shapes: query (B, H, N, D), key (B, H_kv, N, D), value (B, H_kv, N, E), or packed (T, H, D) and so on; mask (B, N) bool.
The three tensors of a state are those of `FlowState`.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from ..common import VARIANT, State, differentiate, distinct, empty_result, register
from ..state import empty_state
from ..variant import FlowVariant
from ..varlen import check_bounds
from .causal_plan import config, kept_sizes, plan_of, segment_count, state_sizes
from .decode import decode
from .launch import arguments
from .plan import contiguous, dense, empty


def causal(query, key, value, mask, scale: float, variant: FlowVariant) -> Tensor:
    """The result; see `flow_attention`."""
    return _call(query, key, value, mask, None, scale, variant)[0]


def recurrent(query, key, value, mask, state: State | None, scale: float, variant: FlowVariant) -> tuple[Tensor, State]:
    """The result and the state after the last token; see `flow_attention_recurrent`."""
    if query.shape[2] == 1 and not _needs_gradients(query, key, value, *(state or ())):
        parts = empty_state(query, value) if state is None else state
        sums, memory, scalars = (part.clone(memory_format=torch.contiguous_format) for part in parts)
        return decode(query, key, value, (sums, memory, scalars), scale, variant, mask), (sums, memory, scalars)
    result, end, _ = _call(query, key, value, mask, state, scale, variant)
    # apart from one another, since decoding writes into them
    sums, memory, scalars = (part.clone() for part in _state(end, query, query.shape[0], value.shape[3]))
    return result, (sums, memory, scalars)


def packed(query, key, value, lengths, scale: float, variant: FlowVariant) -> Tensor:
    """The result (T, H, E) of packed sequences; see `flow_attention_varlen`."""
    tensors = distinct(*(x.transpose(0, 1)[None] for x in (query, key, value)), None, *lengths[:2])
    result, *_ = _apply(*tensors, max(lengths[2:]), None, None, None, scale, *variant.as_args())
    return result[0].transpose(0, 1)


def _call(query, key, value, mask, state, scale, variant):
    tensors = distinct(query, key, value, mask, *((None, None, None) if state is None else state))
    return _apply(*tensors[:4], None, None, query.shape[2], *tensors[4:], scale, *variant.as_args())


def _needs_gradients(*inputs) -> bool:
    return torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in inputs)


def _apply(*inputs):
    if _needs_gradients(*inputs):
        return _Causal.apply(*inputs)
    return torch.ops.flowformer.triton_causal(*inputs[:7], False, *inputs[7:])


class _Causal(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, mask, bounds, key_bounds, longest, sums, memory, scalars, *options):
        result, end, kept = torch.ops.flowformer.triton_causal(
            query, key, value, mask, bounds, key_bounds, longest, True, sums, memory, scalars, *options
        )
        ctx.save_for_backward(query, key, value, mask, bounds, scalars, result, kept)
        ctx.mark_non_differentiable(kept)
        # gradients that nobody asked for are None, and cost nothing
        ctx.set_materialize_grads(False)
        ctx.longest, ctx.options, ctx.has_state = longest, options, sums is not None
        return result, end, kept

    @staticmethod
    def backward(ctx, grad, grad_end, _):
        query, key, value, mask, bounds, scalars, result, kept = ctx.saved_tensors
        if grad is None:
            grad = torch.zeros_like(result)
        operator = torch.ops.flowformer.triton_causal_backward
        inputs = query, key, value, mask, bounds, ctx.longest, scalars
        *grads, start = differentiate(operator, grad, grad_end, *inputs, result, kept, *ctx.options)
        state = _state(start, query, query.shape[0], value.shape[3]) if ctx.has_state else (None, None, None)
        return *grads, None, None, None, None, *state, *(None for _ in ctx.options)


def _state(flat: Tensor, query: Tensor, batch: int, value_dim: int) -> list[Tensor]:
    """The three tensors of a state that lies in one."""
    heads, dim = query.shape[1], query.shape[3]
    shapes = (batch, heads, 4, dim), (batch, heads, dim, value_dim), (batch, heads, 3)
    parts = flat.split_with_sizes(state_sizes(batch * heads, dim, value_dim))
    return [part[: math.prod(shape)].view(shape) for part, shape in zip(parts, shapes, strict=True)]


def forward(
    query, key, value, mask, bounds, key_bounds, longest, keep, sums, memory, scalars, scale, variant: FlowVariant
):
    """The result, the state after it in one tensor, and what the backward pass needs, if it is to `keep` that."""
    if bounds is not None:
        check_bounds(query.shape[2], key.shape[2], (bounds, key_bounds, longest, longest), is_causal=True)
    query, key, value = dense(query), dense(key), dense(value)
    sums, memory, scalars = contiguous(sums), contiguous(memory), contiguous(scalars)
    if not query.numel():
        result, end, kept = empty_outputs(query, value, bounds, longest, keep, variant.feature_map)
        before = empty_state(query, value) if sums is None else (sums, memory, scalars)
        for part, old in zip(_state(end, query, _sequences(query, bounds), value.shape[3]), before, strict=True):
            part.copy_(old)
        return result, end, kept
    plan = plan_of((query, key, value, mask, bounds, sums, memory, scalars), longest, keep, scale, variant)
    result = empty_result(query, value.shape[3])
    if bounds is not None:
        result.zero_()
    kept, end = empty(plan.kept, query.device), empty(plan.state, query.device)
    scratch = empty(plan.forward_scratch, query.device) if plan.forward_scratch else None
    inputs = query, key, value, _positions(mask), bounds, sums, memory, scalars

    def following():
        """The kernels of the backward pass, if gradients are laid out as what they are of."""
        tensors = query, key, value, mask, bounds, result, None, scalars, result, kept
        later = plan_of(tensors, longest, True, scale, variant)
        outs = (
            query,
            *_key_gradients(query, key, value, "meta"),
            end,
            empty(later.backward_scratch, torch.device("meta")),
        )
        return later.backward(*arguments((*tensors[:3], inputs[3], *tensors[4:], *outs)))

    plan.launches((*inputs, result, kept, end, scratch), plan.forward, following if keep else None)
    return result, end, kept


def backward(
    grad, grad_end, query, key, value, mask, bounds, longest, scalars, result, kept, scale, variant: FlowVariant
):
    """The gradients of query, key and value, and of the state before the first token."""
    grad, query, key, value = dense(grad), dense(query), dense(key), dense(value)
    grad_end, scalars = contiguous(grad_end), contiguous(scalars)
    heads, dim, value_dim = query.shape[1], query.shape[3], value.shape[3]
    shared = heads // max(key.shape[1], 1)
    grad_query = torch.empty_like(query)
    grad_key, grad_value = _key_gradients(query, key, value, query.device)
    if bounds is not None:
        for x in (grad_query, grad_key, grad_value):
            x.zero_()
    if not query.numel():
        sizes = state_sizes(heads * _sequences(query, bounds), dim, value_dim)
        start = query.new_zeros(sum(sizes), dtype=torch.float32) if grad_end is None else grad_end.clone()
        return grad_query, torch.zeros_like(key), torch.zeros_like(value), start
    tensors = query, key, value, mask, bounds, grad, grad_end, scalars, result, kept
    plan = plan_of(tensors, longest, True, scale, variant)
    start, scratch = empty(plan.state, query.device), empty(plan.backward_scratch, query.device)
    outs = grad_query, grad_key, grad_value, start, scratch
    plan.launches((*tensors[:3], _positions(mask), *tensors[4:], *outs), plan.backward)
    if shared > 1:
        grad_key, grad_value = (x.unflatten(1, (-1, shared)).sum(2, dtype=x.dtype) for x in (grad_key, grad_value))
    return grad_query, grad_key, grad_value, start


def _key_gradients(query, key, value, device) -> list[Tensor]:
    """Those of key and value, uninitialised: every query head writes its own.

    Those that share a key head are added up in a fixed order afterwards.
    """
    if query.shape[1] == key.shape[1]:
        return [torch.empty_like(x, device=device) for x in (key, value)]
    return [x.new_empty(*query.shape[:2], *x.shape[2:], device=device) for x in (key, value)]


def empty_outputs(query, value, bounds, longest, keep, feature_map):
    """The result, the end state, and what is kept, uninitialised."""
    rows, dim, value_dim = query.shape[1] * _sequences(query, bounds), query.shape[3], value.shape[3]
    chunk = config(query.dtype, dim, value_dim, feature_map).chunk
    segments = segment_count(rows, longest, query.device)
    kept = kept_sizes(query.shape, value_dim, rows, longest, segments, chunk, keep)
    sizes = sum(state_sizes(rows, dim, value_dim)), sum(kept)
    end, kept = (query.new_empty(size, dtype=torch.float32) for size in sizes)
    return empty_result(query, value.shape[3]), end, kept


def _sequences(query: Tensor, bounds: Tensor | None):
    return query.shape[0] if bounds is None else bounds.shape[0] - 1


def _positions(mask: Tensor | None) -> Tensor | None:
    """How many tokens of a sequence there are up to each, negative where it is none itself."""
    if mask is None:
        return None
    mask = mask.contiguous()
    positions = mask.cumsum(1, dtype=torch.int32)
    return torch.where(mask, positions, -positions)


_variant = functools.lru_cache(FlowVariant)  # it checks what it is given, in every call


def _forward(*args):
    return forward(*[*args[:12], _variant(*args[12:])])


def _backward(*args):
    return backward(*[*args[:12], _variant(*args[12:])])


def _fake_forward(query, key, value, mask, bounds, key_bounds, longest, keep, sums, memory, scalars, scale, *variant):
    return empty_outputs(query, value, bounds, longest, keep, FlowVariant(*variant).feature_map)


def _fake_backward(grad, grad_end, query, key, value, mask, bounds, *_):
    start = sum(state_sizes(query.shape[1] * _sequences(query, bounds), query.shape[3], value.shape[3]))
    return *(torch.empty_like(x) for x in (query, key, value)), query.new_empty(start, dtype=torch.float32)


_INPUTS = "Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor? bounds"
_STATE = "Tensor? sums, Tensor? memory, Tensor? scalars"
register(
    f"triton_causal({_INPUTS}, Tensor? key_bounds, SymInt longest, bool keep, {_STATE}, {VARIANT})"
    " -> (Tensor, Tensor, Tensor)",
    _forward,
    _fake_forward,
)
register(
    f"triton_causal_backward(Tensor grad, Tensor? grad_end, {_INPUTS}, SymInt longest, Tensor? scalars, "
    f"Tensor result, Tensor kept, {VARIANT}) -> (Tensor, Tensor, Tensor, Tensor)",
    _backward,
    _fake_backward,
)
