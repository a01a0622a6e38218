"""The registered operators of the native backend: they allocate results and call the C++ code.

Packed sequences are passed as one row of tokens with the bounds of the sequences, so they need no other operators.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..common import Inputs, Mask, Powers, empty_result, sum_dtype
from ..library import VARIANT, register
from .call import padded, run, with_rows

if TYPE_CHECKING:
    from ..bounds import Bounds

SEGMENT = 384  # tokens between two states that causal attention keeps, as in `causal.h`
KEPT_SCALARS = 4  # scalars of such a state, likewise
NO_STATE = None, None, None
_NO_STATES: tuple[Tensor | None, ...] = NO_STATE * 4
_NO_GRADIENTS = (None,) * 4


def _run_bidirectional(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_mask: Mask,
    key_mask: Mask,
    cu_seqlens_q: Bounds,
    cu_seqlens_k: Bounds,
    powers: Powers,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *options: Any,
) -> tuple[Tensor, Tensor]:
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    bounds, masks = _checked_bounds(query, key, lengths, False), _contiguous(query_mask, key_mask)
    result, kept = _empty_bidirectional(
        query, key, value, query_mask, key_mask, cu_seqlens_q, cu_seqlens_k, powers, *options
    )
    outputs, powers_and_grads = (_zero_unused(result, bounds[0]), *_NO_GRADIENTS), (*_contiguous(powers), None)
    inputs = query, key, value
    run("bidirectional_forward", inputs, outputs, bounds, masks, kept, _NO_STATES, powers_and_grads, *options)
    return result, kept


def _run_bidirectional_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_mask: Mask,
    key_mask: Mask,
    cu_seqlens_q: Bounds,
    cu_seqlens_k: Bounds,
    powers: Powers,
    kept: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *options: Any,
) -> tuple[Tensor, ...]:
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    bounds, masks = _checked_bounds(query, key, lengths, False), _contiguous(query_mask, key_mask)
    inputs = query, key, value
    return _run_backward("bidirectional_backward", grad, inputs, bounds, masks, kept, _NO_STATES, powers, options)


def _run_causal(
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
    max_seqlen_q: int,
    max_seqlen_k: int,
    *options: Any,
) -> tuple[Tensor, ...]:
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    bounds, masks = _checked_bounds(query, key, lengths, True), _contiguous(mask, mask)
    state = _contiguous(sums, memory, scalars)
    result, *end, kept = _empty_causal(query, key, value, mask, sums, memory, scalars, cu_seqlens_q, *options)
    outputs, powers_and_grads = (_zero_unused(result, bounds[0]), *_NO_GRADIENTS), (*_contiguous(powers), None)
    inputs, states = (query, key, value), _NO_STATES if sums is None else (*state, *end, *NO_STATE, *NO_STATE)
    run("causal_forward", inputs, outputs, bounds, masks, kept, states, powers_and_grads, *options)
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
    sums: Tensor | None,
    memory: Tensor | None,
    scalars: Tensor | None,
    cu_seqlens_q: Bounds,
    cu_seqlens_k: Bounds,
    powers: Powers,
    kept: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *options: Any,
) -> tuple[Tensor, ...]:
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    bounds, masks = _checked_bounds(query, key, lengths, True), _contiguous(mask, mask)
    state = _contiguous(sums, memory, scalars)
    grad_start, states = _empty_like_state(query, state), _NO_STATES
    if sums is not None:
        states = (*state, *NO_STATE, *_contiguous(grad_sums, grad_memory, grad_scalars), *grad_start)
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


def _checked_bounds(query: Tensor, key: Tensor, lengths: tuple[Any, Any, int, int], is_causal: bool) -> list[Bounds]:
    cu_seqlens_q, cu_seqlens_k, _, _ = lengths
    if cu_seqlens_q is None:
        return [None, None]
    # imported here, so that importing the package stays fast
    from ..bounds import starts_and_lengths

    # not by `check_bounds`, which caches by version counter: bounds may share memory with a NumPy array, and writing to
    # that does not change the counter
    starts_and_lengths(query.shape[2], key.shape[2], lengths, is_causal)
    return [ends.long().contiguous() for ends in (cu_seqlens_q, cu_seqlens_k)]


def _contiguous(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if x is None else x.contiguous() for x in tensors]


def _zero_unused(x: Tensor, bounds: Bounds) -> Tensor:
    """Set x (1, H, T, D) to 0, in place, after the last packed sequence. Returns: x."""
    if bounds is not None:
        x[:, :, int(bounds[-1]) :] = 0
    return x


def _empty_bidirectional(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_mask: Mask,
    key_mask: Mask,
    cu_seqlens_q: Bounds,
    cu_seqlens_k: Bounds,
    powers: Powers,
    *rest: Any,
) -> tuple[Tensor, Tensor]:
    batch, heads, sinks, _ = query.shape
    *_, renormalize = rest  # the last argument of the operator
    # a record for each head, and two numbers for each token; sinks have one more if renormalised (the norm) and one
    # more with powers (the gate before its power)
    numbers = (2 + renormalize + (powers is not None)) * sinks + 2 * key.shape[2]
    size = _sequences(query, cu_seqlens_q) * heads * _record_size(query, value, renormalize) + batch * heads * numbers
    return empty_result(query, value.shape[-1]), query.new_empty((size,), dtype=sum_dtype(query))


def _empty_causal(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask,
    sums: Tensor | None,
    memory: Tensor | None,
    scalars: Tensor | None,
    cu_seqlens_q: Bounds,
    *rest: Any,
) -> tuple[Tensor, ...]:
    batch, heads, length, _ = query.shape
    *_, renormalize = rest  # the last argument of the operator
    # the state before each segment of a sequence except the first
    segments = length // SEGMENT
    segments = segments * batch if cu_seqlens_q is None else segments + _sequences(query, cu_seqlens_q)
    # two more numbers, since Dynamo specialises on sizes of 0 and 1
    size = segments * heads * (_record_size(query, value, renormalize) + KEPT_SCALARS) + 2
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


def _empty_bidirectional_gradients(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_mask: Mask,
    key_mask: Mask,
    cu_seqlens_q: Bounds,
    cu_seqlens_k: Bounds,
    powers: Powers,
    *rest: Any,
) -> tuple[Tensor, ...]:
    return *_empty_gradients(query, key, value), _empty_powers(query, powers)


def _empty_causal_gradients(
    grad: Tensor,
    grad_sums: Tensor | None,
    grad_memory: Tensor | None,
    grad_scalars: Tensor | None,
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
    *rest: Any,
) -> tuple[Tensor, ...]:
    state = _empty_like_state(query, (sums, memory, scalars))
    return *_empty_gradients(query, key, value), *state, _empty_powers(query, powers)


_INPUTS = "Tensor query, Tensor key, Tensor value"
_MASKS = "Tensor? query_mask, Tensor? key_mask"
_STATE = "Tensor? sums, Tensor? memory, Tensor? scalars"
_GRAD_STATE = "Tensor? grad_sums, Tensor? grad_memory, Tensor? grad_scalars"
_BOUNDS = "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k"
_POWERS = "Tensor? powers"
_LONGEST = "SymInt max_seqlen_q, SymInt max_seqlen_k"
_OPTIONS = f"{VARIANT}, bool renormalize"
native_bidirectional = register(
    f"native_bidirectional({_INPUTS}, {_MASKS}, {_BOUNDS}, {_POWERS}, {_LONGEST}, {_OPTIONS}) -> (Tensor, Tensor)",
    _run_bidirectional,
    _empty_bidirectional,
)
native_bidirectional_backward = register(
    f"native_bidirectional_backward(Tensor grad, {_INPUTS}, {_MASKS}, {_BOUNDS}, {_POWERS}, Tensor kept, {_LONGEST}, "
    f"{_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor)",
    _run_bidirectional_backward,
    _empty_bidirectional_gradients,
)
native_causal = register(
    f"native_causal({_INPUTS}, Tensor? mask, {_STATE}, {_BOUNDS}, {_POWERS}, {_LONGEST}, {_OPTIONS}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _run_causal,
    _empty_causal,
)
native_causal_backward = register(
    f"native_causal_backward(Tensor grad, {_GRAD_STATE}, {_INPUTS}, Tensor? mask, {_STATE}, {_BOUNDS}, {_POWERS}, "
    f"Tensor kept, {_LONGEST}, {_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _run_causal_backward,
    _empty_causal_gradients,
)
