"""The native backend: its refusals, and the autograd functions of its operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..common import Mask, Masks, Options, Powers, State, is_exporting
from ..library import NoForwardMode, differentiate, distinct
from ..state import empty_state
from ..variant import FlowVariant
from .build import failure
from .call import ALLOCATIONS, DTYPES, FEATURE_MAPS, is_narrow, with_rows
from .operators import (
    NO_STATE,
    native_bidirectional,
    native_bidirectional_backward,
    native_causal,
    native_causal_backward,
)

if TYPE_CHECKING:
    from ..bounds import Bounds, Lengths

MAX_DIM = 256
_NOT_PACKED = None, None, 0, 0


def refusals(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, variant: FlowVariant) -> list[str]:
    """Why the native code cannot run this call; empty if it can."""
    if query.device.type != "cpu":
        return [f"tensors on {query.device} (the native code is for CPUs)"]
    if is_exporting():
        return ["an exported graph cannot hold native code"]
    if torch._C._are_functorch_transforms_active():
        return ["torch.func transforms the operators of the torch backend only"]
    reasons = []
    if query.dtype not in DTYPES:
        reasons.append(f"{query.dtype} (the native code takes float32, float64 and bfloat16)")
    dims = query.shape[-1], value.shape[-1]
    if not all(1 <= dim <= MAX_DIM for dim in dims):
        reasons.append(f"head dimensions {dims[0]} and {dims[1]} (the native code takes 1 to {MAX_DIM})")
    if variant.competitors == "heads" or variant.feature_map not in FEATURE_MAPS:
        reasons.append('the native code has no competitors="heads" and no feature_map="relu+eps"')
    if variant.allocation not in ALLOCATIONS:
        reasons.append(f'allocation="{variant.allocation}" (the native code takes "sigmoid" and "none")')
    if not reasons and (reason := failure(is_narrow(query.dtype, *dims))) is not None:
        reasons.append(reason)
    return reasons


def by_name(query: Tensor) -> bool:
    """False: this is the preferred backend on a CPU."""
    return False


def bidirectional(query: Tensor, key: Tensor, value: Tensor, masks: Masks, options: Options) -> Tensor:
    """See `flow_attention`."""
    return _bidirectional(query, key, value, masks, _NOT_PACKED, options)


def causal(query: Tensor, key: Tensor, value: Tensor, mask: Mask, options: Options) -> Tensor:
    """See `flow_attention`."""
    return _causal(query, key, value, mask, NO_STATE, _NOT_PACKED, options)[0]


def recurrent(
    query: Tensor, key: Tensor, value: Tensor, mask: Mask, state: State | None, options: Options
) -> tuple[Tensor, State]:
    """See `flow_attention_recurrent`."""
    if state is None:
        state = empty_state(query, value, options.variant)
    result, *end, _ = _causal(query, key, value, mask, state, _NOT_PACKED, options)
    return result, tuple(end)


def packed(query: Tensor, key: Tensor, value: Tensor, lengths: Lengths, is_causal: bool, options: Options) -> Tensor:
    """See `flow_attention_varlen`."""
    query, key, value = (x.transpose(0, 1)[None] for x in (query, key, value))
    if is_causal:
        result = _causal(query, key, value, None, NO_STATE, lengths, options)[0]
    else:
        result = _bidirectional(query, key, value, (None, None), lengths, options)
    return result[0].transpose(0, 1)


def _bidirectional(
    query: Tensor, key: Tensor, value: Tensor, masks: Masks, lengths: Sequence[Any], options: Options
) -> Tensor:
    cu_seqlens_q, cu_seqlens_k, *longest = lengths
    tensors = with_rows(query), with_rows(key), with_rows(value), *masks, cu_seqlens_q, cu_seqlens_k, options.powers
    function = _Bidirectional if torch.compiler.is_compiling() else _EagerBidirectional
    result: Tensor
    result, _ = function.apply(*distinct(*tensors), *longest, *_flat_options(options))
    return result


def _causal(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask,
    state: Sequence[Tensor | None],
    lengths: Sequence[Any],
    options: Options,
) -> tuple[Tensor, ...]:
    cu_seqlens_q, cu_seqlens_k, *longest = lengths
    inputs = with_rows(query), with_rows(key), with_rows(value)
    tensors = *inputs, mask, *state, cu_seqlens_q, cu_seqlens_k, options.powers
    function = _Causal if torch.compiler.is_compiling() else _EagerCausal
    outputs: tuple[Tensor, ...] = function.apply(*distinct(*tensors), *longest, *_flat_options(options))
    return outputs


def _flat_options(options: Options) -> tuple[Any, ...]:
    """The last arguments of every operator."""
    return *options.as_args(), options.variant.renormalize


# these functions have the inputs and outputs of the operators
class _Bidirectional(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        query_mask: Mask,
        key_mask: Mask,
        cu_seqlens_q: Bounds,
        cu_seqlens_k: Bounds,
        powers: Powers,
        *options: Any,
    ) -> tuple[Tensor, Tensor]:
        tensors = query, key, value, query_mask, key_mask, cu_seqlens_q, cu_seqlens_k, powers
        result, kept = native_bidirectional(*tensors, *options)
        ctx.save_for_backward(*tensors, kept)
        ctx.mark_non_differentiable(kept)
        ctx.set_materialize_grads(False)  # torch would allocate zeros as large as `kept` for its unused gradient
        ctx.options = options
        return result, kept

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        *tensors, powers, kept = ctx.saved_tensors
        if grad is None:  # from a function whose backward pass returns None
            return (None,) * (len(tensors) + 1 + len(ctx.options))
        *grads, grad_powers = differentiate(native_bidirectional_backward, grad, *tensors, powers, kept, *ctx.options)
        no_masks, no_bounds, no_options = (None, None), (None, None), (None,) * len(ctx.options)
        return *grads, *no_masks, *no_bounds, None if powers is None else grad_powers, *no_options


class _Causal(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Mask,
        sums: Tensor | None,
        memory: Tensor | None,
        scalars: Tensor | None,
        cu_seqlens_q: Bounds,
        cu_seqlens_k: Bounds,
        powers: Powers,
        *options: Any,
    ) -> tuple[Tensor, ...]:
        tensors = query, key, value, mask, sums, memory, scalars, cu_seqlens_q, cu_seqlens_k, powers
        result, *end, kept = native_causal(*tensors, *options)
        ctx.save_for_backward(*tensors, kept)
        ctx.mark_non_differentiable(*(() if sums is not None else end), kept)
        ctx.set_materialize_grads(False)
        ctx.options = options
        return result, *end, kept

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        query, key, value, mask, sums, memory, scalars, *bounds, powers, kept = ctx.saved_tensors
        if grad is None:
            grad = query.new_zeros(*query.shape[:3], value.shape[3])
        *grad_end, _ = grad_outputs
        pairs = zip(grad_end, (sums, memory, scalars), strict=True)
        grad_end = [torch.zeros_like(x) if each is None and x is not None else each for each, x in pairs]
        tensors = query, key, value, mask, sums, memory, scalars, *bounds, powers, kept
        *grads, grad_sums, grad_memory, grad_scalars, grad_powers = differentiate(
            native_causal_backward, grad, *grad_end, *tensors, *ctx.options
        )
        grad_start = NO_STATE if sums is None else (grad_sums, grad_memory, grad_scalars)
        no_bounds, no_options = (None, None), (None,) * len(ctx.options)
        return *grads, None, *grad_start, *no_bounds, None if powers is None else grad_powers, *no_options


class _EagerBidirectional(NoForwardMode, _Bidirectional):
    pass


class _EagerCausal(NoForwardMode, _Causal):
    pass
