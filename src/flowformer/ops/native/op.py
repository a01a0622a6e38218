"""The native backend: its refusals, its operators, and their autograd functions.

Packed sequences are passed as one row of tokens with the bounds of the sequences, so they need no other operators.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..common import Inputs, Mask, Masks, Options, Powers, State, empty_result, is_exporting, sum_dtype
from ..library import VARIANT, NoForwardMode, differentiate, distinct, register
from ..state import empty_state
from ..variant import FlowVariant
from .build import failure
from .call import ALLOCATIONS, DTYPES, FEATURE_MAPS, is_narrow, padded, run, with_rows

if TYPE_CHECKING:
    from ..bounds import Bounds, Lengths

MAX_DIM = 256
SEGMENT = 384  # tokens between two states that causal attention keeps, as in `causal.h`
_NOT_PACKED = None, None, 0, 0
_NO_STATE = None, None, None
_NO_GRADIENTS = (None,) * 4
_NO_STATES: tuple[Tensor | None, ...] = (None,) * 12


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
    return _causal(query, key, value, mask, _NO_STATE, _NOT_PACKED, options)[0]


def recurrent(
    query: Tensor, key: Tensor, value: Tensor, mask: Mask, state: State | None, options: Options
) -> tuple[Tensor, State]:
    """See `flow_attention_recurrent`."""
    if state is None:
        state = empty_state(query, value, options.variant)
    result, *rest = _causal(query, key, value, mask, state, _NOT_PACKED, options)
    return result, tuple(rest[:3])


def packed(query: Tensor, key: Tensor, value: Tensor, lengths: Lengths, is_causal: bool, options: Options) -> Tensor:
    """See `flow_attention_varlen`."""
    query, key, value = (x.transpose(0, 1)[None] for x in (query, key, value))
    if is_causal:
        result = _causal(query, key, value, None, _NO_STATE, lengths, options)[0]
    else:
        result = _bidirectional(query, key, value, (None, None), lengths, options)
    return result[0].transpose(0, 1)


def _bidirectional(
    query: Tensor, key: Tensor, value: Tensor, masks: Masks, lengths: Sequence[Any], options: Options
) -> Tensor:
    tensors = with_rows(query), with_rows(key), with_rows(value), *masks, *lengths[:2], options.powers
    function = _Bidirectional if torch.compiler.is_compiling() else _EagerBidirectional
    result: Tensor = function.apply(*distinct(*tensors), *lengths[2:], *_flat_options(options))[0]
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
    tensors = with_rows(query), with_rows(key), with_rows(value), mask, *state, *lengths[:2], options.powers
    function = _Causal if torch.compiler.is_compiling() else _EagerCausal
    outputs: tuple[Tensor, ...] = function.apply(*distinct(*tensors), *lengths[2:], *_flat_options(options))
    return outputs


def _flat_options(options: Options) -> tuple[Any, ...]:
    """The arguments of `_OPTIONS`."""
    return *options.as_args(), options.variant.renormalize


# these functions have the inputs and outputs of the operators at the end of this file
class _Bidirectional(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        outputs: tuple[Tensor, ...] = _native_bidirectional(*inputs)
        ctx.save_for_backward(*inputs[:8], outputs[1])
        ctx.mark_non_differentiable(outputs[1])
        ctx.set_materialize_grads(False)  # torch would allocate zeros as large as `kept` for its unused gradient
        ctx.options = inputs[8:]
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        *input_grads, grad_powers = differentiate(_native_bidirectional_backward, grads[0], *saved, *ctx.options)
        powers = None if saved[7] is None else grad_powers
        return *input_grads, None, None, None, None, powers, *(None for _ in ctx.options)


class _Causal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        outputs: tuple[Tensor, ...] = _native_causal(*inputs)
        ctx.save_for_backward(*inputs[:10], outputs[4])
        ctx.mark_non_differentiable(*(outputs[4:] if inputs[4] is not None else outputs[1:]))
        ctx.set_materialize_grads(False)
        ctx.options = inputs[10:]
        return outputs

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *grad_end: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        query, value, state, powers = saved[0], saved[2], saved[4:7], saved[9]
        if grad is None:
            grad = query.new_zeros(*query.shape[:3], value.shape[3])
        pairs = zip(grad_end[:3], state, strict=True)
        grad_end = tuple(torch.zeros_like(x) if each is None and x is not None else each for each, x in pairs)
        *grads, grad_powers = differentiate(_native_causal_backward, grad, *grad_end, *saved, *ctx.options)
        grad_start = grads[3:] if state[0] is not None else _NO_STATE
        powers = None if powers is None else grad_powers
        return *grads[:3], None, *grad_start, None, None, powers, *(None for _ in ctx.options)


class _EagerBidirectional(NoForwardMode, _Bidirectional):
    pass


class _EagerCausal(NoForwardMode, _Causal):
    pass


def _run_bidirectional(
    query: Tensor, key: Tensor, value: Tensor, query_mask: Mask, key_mask: Mask, *rest: Any
) -> tuple[Tensor, Tensor]:
    lengths, powers, options = rest[:2] + rest[3:5], rest[2], rest[5:]
    bounds, masks = _checked_bounds(query, key, lengths, False), _contiguous(query_mask, key_mask)
    result, kept = _empty_bidirectional(query, key, value, None, None, *rest)
    outputs, powers = (_zero_unused(result, bounds[0]), *_NO_GRADIENTS), (*_contiguous(powers), None)
    run("bidirectional_forward", (query, key, value), outputs, bounds, masks, kept, _NO_STATES, powers, *options)
    return result, kept


def _run_bidirectional_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, query_mask: Mask, key_mask: Mask, *rest: Any
) -> tuple[Tensor, ...]:
    lengths, (powers, kept), options = rest[:2] + rest[4:6], rest[2:4], rest[6:]
    bounds, masks = _checked_bounds(query, key, lengths, False), _contiguous(query_mask, key_mask)
    inputs = query, key, value
    return _run_backward("bidirectional_backward", grad, inputs, bounds, masks, kept, _NO_STATES, powers, options)


def _run_causal(query: Tensor, key: Tensor, value: Tensor, mask: Mask, *rest: Any) -> tuple[Tensor, ...]:
    state, lengths, powers, options = _contiguous(*rest[:3]), rest[3:5] + rest[6:8], rest[5], rest[8:]
    bounds, masks = _checked_bounds(query, key, lengths, True), _contiguous(mask, mask)
    result, *end, kept = _empty_causal(query, key, value, None, *rest)
    outputs, powers = (_zero_unused(result, bounds[0]), *_NO_GRADIENTS), (*_contiguous(powers), None)
    states = _NO_STATES if state[0] is None else (*state, *end, *_NO_STATES[:6])
    run("causal_forward", (query, key, value), outputs, bounds, masks, kept, states, powers, *options)
    return result, *end, kept


def _run_causal_backward(
    grad: Tensor,
    grad_sums: Tensor | None,
    grad_memory: Tensor | None,
    grad_scalars: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask,
    *rest: Any,
) -> tuple[Tensor, ...]:
    state, lengths, (powers, kept), options = _contiguous(*rest[:3]), rest[3:5] + rest[7:9], rest[5:7], rest[9:]
    bounds, masks = _checked_bounds(query, key, lengths, True), _contiguous(mask, mask)
    grad_start, states = _empty_like_state(query, state), _NO_STATES
    if state[0] is not None:
        states = (*state, *_NO_STATES[:3], *_contiguous(grad_sums, grad_memory, grad_scalars), *grad_start)
    inputs = query, key, value
    *grads, grad_powers = _run_backward("causal_backward", grad, inputs, bounds, masks, kept, states, powers, options)
    return *grads, *grad_start, grad_powers


def _run_backward(
    function: str,
    grad: Tensor,
    inputs: Inputs,
    bounds: Sequence[Bounds],
    masks: Sequence[Mask],
    kept: Tensor,
    states: Sequence[Tensor | None],
    powers: Powers,
    options: Sequence[Any],
) -> tuple[Tensor, ...]:
    """The gradients of query, key, value and powers."""
    (query, key, value), grads = inputs, _empty_gradients(*inputs)
    # gradients of a shared key head are summed over its query heads, in the dtype of the sums
    parts, shared = list(grads), query.shape[1] != key.shape[1]
    if shared:
        parts[1:] = (x.new_empty(x.shape[0], query.shape[1], *x.shape[2:], dtype=sum_dtype(x)) for x in (key, value))
    for part, ends in zip(parts, (bounds[0], bounds[1], bounds[1]), strict=True):
        _zero_unused(part, ends)
    grad_powers, of_sequences = _empty_powers(query, powers), None
    if powers is not None:
        of_sequences = grad_powers.new_empty(2, _sequences(query, bounds[0]), query.shape[1])
    outputs, powers_and_grads = (None, with_rows(grad), *parts), (*_contiguous(powers), of_sequences)
    run(function, inputs, outputs, bounds, masks, kept, states, powers_and_grads, *options)
    if of_sequences is not None:
        torch.sum(of_sequences, 1, out=grad_powers)
    if shared:
        for x, part in zip(grads[1:], parts[1:], strict=True):
            x.copy_(part.unflatten(1, (x.shape[1], -1)).sum(2))
    return *grads, grad_powers


def _checked_bounds(query: Tensor, key: Tensor, lengths: Sequence[Any], is_causal: bool) -> list[Bounds]:
    if lengths[0] is None:
        return [None, None]
    # imported here, so that importing the package stays fast
    from ..bounds import starts_and_lengths

    # not by `check_bounds`, which caches by version counter: bounds may share memory with a NumPy array, and writing to
    # that does not change the counter
    starts_and_lengths(query.shape[2], key.shape[2], (lengths[0], lengths[1], lengths[2], lengths[3]), is_causal)
    return [ends.long().contiguous() for ends in lengths[:2]]


def _contiguous(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if x is None else x.contiguous() for x in tensors]


def _zero_unused(x: Tensor, bounds: Bounds) -> Tensor:
    """Set x (1, H, T, D) to 0, in place, after the last packed sequence. Returns: x."""
    if bounds is not None:
        x[:, :, int(bounds[-1]) :] = 0
    return x


def _empty_bidirectional(
    query: Tensor, key: Tensor, value: Tensor, query_mask: Mask, key_mask: Mask, *rest: Any
) -> tuple[Tensor, Tensor]:
    (batch, heads, sinks), powers, renormalize = query.shape[:3], rest[2], rest[-1]
    # a record for each head, and two numbers for each token; sinks have one more if renormalised (the norm) and one
    # more with powers (the gate before its power)
    numbers = (2 + renormalize + (powers is not None)) * sinks + 2 * key.shape[2]
    size = _sequences(query, rest[0]) * heads * _record_size(query, value, renormalize) + batch * heads * numbers
    return empty_result(query, value.shape[-1]), query.new_empty((size,), dtype=sum_dtype(query))


def _empty_causal(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask,
    sums: Tensor | None,
    memory: Tensor | None,
    scalars: Tensor | None,
    cu_seqlens: Bounds,
    *rest: Any,
) -> tuple[Tensor, ...]:
    batch, heads, length = query.shape[:3]
    # the state before each segment of a sequence except the first
    segments = length // SEGMENT * batch if cu_seqlens is None else length // SEGMENT + _sequences(query, cu_seqlens)
    # two more numbers, since Dynamo specialises on sizes of 0 and 1
    size = segments * heads * (_record_size(query, value, rest[-1]) + 4) + 2
    kept = query.new_empty((size,), dtype=sum_dtype(query))
    return empty_result(query, value.shape[-1]), *_empty_like_state(query, (sums, memory, scalars)), kept


def _record_size(query: Tensor, value: Tensor, renormalize: bool) -> int:
    """The size of a record: four or five sums of features, and S = Σ kᵀ c V, padded."""
    dtype = sum_dtype(query)
    return (4 + renormalize + padded(value.shape[-1], dtype)) * padded(query.shape[-1], dtype)


def _empty_like_state(query: Tensor, state: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """Three uninitialised contiguous tensors in the shapes of a state; empty without a state."""
    shapes = [(0,) if part is None else part.shape for part in state]
    return tuple(query.new_empty(shape, dtype=sum_dtype(query)) for shape in shapes)


def _sequences(query: Tensor, cu_seqlens: Bounds) -> int:
    return query.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1


def _empty_gradients(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    return tuple(_empty_rows(x) for x in (query, key, value))


def _empty_powers(query: Tensor, powers: Powers) -> Tensor:
    """An uninitialised gradient of the powers; empty without powers."""
    return query.new_empty((0,) if powers is None else powers.shape, dtype=sum_dtype(query))


def _empty_rows(x: Tensor) -> Tensor:
    """An uninitialised tensor like x, in the memory order of x if that has contiguous features.

    torch.empty_like may return others: of two axes with equal strides, as in sliding windows, it puts the shorter last.
    """
    empty = torch.empty_like(x)
    return empty if empty.stride(-1) == 1 else x.new_empty(x.shape)


def _empty_bidirectional_gradients(grad: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    query, key, value, _, _, _, _, powers = rest[:8]
    return *_empty_gradients(query, key, value), _empty_powers(query, powers)


def _empty_causal_gradients(grad: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    _, _, _, query, key, value, _, *state, _, _, powers = rest[:13]
    return *_empty_gradients(query, key, value), *_empty_like_state(query, state), _empty_powers(query, powers)


_INPUTS = "Tensor query, Tensor key, Tensor value"
_MASKS = "Tensor? query_mask, Tensor? key_mask"
_STATE = "Tensor? sums, Tensor? memory, Tensor? scalars"
_GRAD_STATE = "Tensor? grad_sums, Tensor? grad_memory, Tensor? grad_scalars"
_BOUNDS = "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k"
_POWERS = "Tensor? powers"
_LONGEST = "SymInt max_seqlen_q, SymInt max_seqlen_k"
_OPTIONS = f"{VARIANT}, bool renormalize"
_native_bidirectional = register(
    f"native_bidirectional({_INPUTS}, {_MASKS}, {_BOUNDS}, {_POWERS}, {_LONGEST}, {_OPTIONS}) -> (Tensor, Tensor)",
    _run_bidirectional,
    _empty_bidirectional,
)
_native_bidirectional_backward = register(
    f"native_bidirectional_backward(Tensor grad, {_INPUTS}, {_MASKS}, {_BOUNDS}, {_POWERS}, Tensor kept, {_LONGEST}, "
    f"{_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor)",
    _run_bidirectional_backward,
    _empty_bidirectional_gradients,
)
_native_causal = register(
    f"native_causal({_INPUTS}, Tensor? mask, {_STATE}, {_BOUNDS}, {_POWERS}, {_LONGEST}, {_OPTIONS}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _run_causal,
    _empty_causal,
)
_native_causal_backward = register(
    f"native_causal_backward(Tensor grad, {_GRAD_STATE}, {_INPUTS}, Tensor? mask, {_STATE}, {_BOUNDS}, {_POWERS}, "
    f"Tensor kept, {_LONGEST}, {_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _run_causal_backward,
    _empty_causal_gradients,
)
