"""Packed sequences for the torch backend: sequences of like length are padded together, a few at a time.

Padding the whole batch to its longest sequence could need far more memory than the tokens do; groups of neighbours in
length do not. Only `graph` pads everything at once, since an exported graph cannot look at the lengths.

Shapes: query (T, H, D), key (T', H_kv, D), value (T', H_kv, E), cu_seqlens (B + 1,).
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from . import torch_backend
from .state import empty_state
from .variant import FlowVariant

Lengths = tuple[Tensor, Tensor, int, int]  # cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k

GROUP = 2**14  # tokens that are padded together, unless one sequence alone has more


def forward(query, key, value, lengths: Lengths, is_causal: bool, scale: float, variant: FlowVariant) -> Tensor:
    # tokens after the last sequence belong to none
    result = query.new_zeros(*query.shape[:2], value.shape[-1])
    for group in _groups(query, key, lengths, is_causal):
        q, k, v = group.sinks.pad(query), group.sources.pad(key), group.sources.pad(value)
        if is_causal:
            out, *_ = torch_backend.causal(q, k, v, group.sinks.mask, empty_state(q, v), scale, variant)
        else:
            out, _ = torch_backend.bidirectional(q, k, v, group.sinks.mask, group.sources.mask, scale, variant)
        group.sinks.unpad(out, result)
    return result


def backward(grad, query, key, value, lengths: Lengths, is_causal: bool, scale: float, variant: FlowVariant):
    grads = tuple(torch.zeros_like(x) for x in (query, key, value))
    for group in _groups(query, key, lengths, is_causal):
        g, q = group.sinks.pad(grad), group.sinks.pad(query)
        k, v = group.sources.pad(key), group.sources.pad(value)
        if is_causal:
            _, end, starts = torch_backend.causal(q, k, v, group.sinks.mask, empty_state(q, v), scale, variant)
            no_grad = tuple(torch.zeros_like(part) for part in end)
            parts = torch_backend.causal_backward(g, no_grad, q, k, v, group.sinks.mask, starts, scale, variant)
        else:
            masks = group.sinks.mask, group.sources.mask
            _, flows = torch_backend.bidirectional(q, k, v, *masks, scale, variant)
            parts = torch_backend.bidirectional_backward(g, q, k, v, *masks, flows, scale, variant)
        group.sinks.unpad(parts[0], grads[0])
        group.sources.unpad(parts[1], grads[1])
        group.sources.unpad(parts[2], grads[2])
    return grads


def graph(query, key, value, lengths: Lengths, is_causal: bool, scale: float, variant: FlowVariant) -> Tensor:
    """`forward` as one graph of plain operators that never looks at a length: for export, and where heads compete."""
    sinks = Rows.all(lengths[0], lengths[2])
    sources = sinks if is_causal else Rows.all(lengths[1], lengths[3])
    q, k, v = sinks.pad(query), sources.pad(key), sources.pad(value)
    if is_causal:
        out, _ = torch_backend.causal_graph(q, k, v, sinks.mask, empty_state(q, v), scale, variant)
    else:
        out = torch_backend.bidirectional_graph(q, k, v, sinks.mask, sources.mask, scale, variant)
    result = query.new_zeros(query.shape[0], *out.shape[1::2])
    # a place without a token holds 0 and adds nothing to the token it points at
    return result.index_add(0, sinks.places.flatten(), out.transpose(1, 2).flatten(0, 1))


class Rows(NamedTuple):
    """Some sequences of a packed tensor, as rows of a padded one."""

    places: Tensor  # (R, L), the token in each place
    mask: Tensor | None  # (R, L), True where there is one; None if everywhere

    @classmethod
    def of(cls, starts: list[int], lengths: list[int], device: torch.device) -> Rows:
        longest = max(lengths)
        place = torch.arange(longest, device=device)
        start = torch.tensor(starts, device=device)[:, None]
        if min(lengths) == longest:
            return cls(start + place, None)
        mask = place < torch.tensor(lengths, device=device)[:, None]
        return cls(torch.where(mask, start + place, 0), mask)

    @classmethod
    def all(cls, cu_seqlens: Tensor, longest: int) -> Rows:
        place = torch.arange(longest, device=cu_seqlens.device)
        mask = place < cu_seqlens.diff()[:, None]
        return cls(torch.where(mask, cu_seqlens[:-1, None] + place, 0), mask)

    def pad(self, x: Tensor) -> Tensor:
        """(T, H, D) -> (R, H, L, D)"""
        return x[self.places].transpose(1, 2)

    def unpad(self, padded: Tensor, x: Tensor) -> None:
        """Puts (R, H, L, D) back to where `pad` took it from."""
        padded = padded.transpose(1, 2)
        if self.mask is None:
            x[self.places] = padded
        else:
            x[self.places[self.mask]] = padded[self.mask]


class Group(NamedTuple):
    sinks: Rows
    sources: Rows


def _groups(query: Tensor, key: Tensor, lengths: Lengths, is_causal: bool) -> Iterator[Group]:
    (starts_q, lengths_q), (starts_k, lengths_k) = starts_and_lengths(query.shape[0], key.shape[0], lengths, is_causal)
    longer = [max(pair) for pair in zip(lengths_q, lengths_k, strict=True)]
    order = sorted((i for i in range(len(longer)) if longer[i]), key=longer.__getitem__)
    while order:
        fitting = 1
        while fitting < len(order) and (fitting + 1) * longer[order[fitting]] <= GROUP:
            fitting += 1
        chosen, order = order[:fitting], order[fitting:]
        yield Group(
            Rows.of([starts_q[i] for i in chosen], [lengths_q[i] for i in chosen], query.device),
            Rows.of([starts_k[i] for i in chosen], [lengths_k[i] for i in chosen], key.device),
        )


def starts_and_lengths(sinks: int, sources: int, lengths: Lengths, is_causal: bool):
    """Where each sequence of the queries, and of the keys, starts, and how long it is; nonsense is an error.

    Args:
        sinks, sources: how many tokens there are.
    """
    of_sinks = _starts_and_lengths(lengths[0], sinks, lengths[2], "q")
    of_sources = _starts_and_lengths(lengths[1], sources, lengths[3], "k")
    if is_causal and of_sinks[1] != of_sources[1]:
        raise ValueError(
            "causal attention needs as many queries as keys in each sequence, got cu_seqlens_q and cu_seqlens_k that "
            "differ. To continue sequences, pass the state of their past to flow_attention_recurrent."
        )
    return of_sinks, of_sources


_checked: MutableMapping[Tensor, tuple] = WeakTensorKeyDictionary()


def check_bounds(sinks: int, sources: int, lengths: Lengths, is_causal: bool) -> None:
    """Raises on bounds that make no sense, for kernels, which do not look at them on the host.

    To look at them waits for the device, so the same tensors are looked at once: layers that share them wait once.
    """
    cu_seqlens_q, cu_seqlens_k, *_ = lengths
    if cu_seqlens_q.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    # an inference tensor has no version, and may change unseen
    versions = (
        None
        if cu_seqlens_q.is_inference() or cu_seqlens_k.is_inference()
        else (cu_seqlens_q._version, cu_seqlens_k._version)
    )
    seen = versions, id(cu_seqlens_k), sinks, sources, *lengths[2:], is_causal
    if versions is None or _checked.get(cu_seqlens_q) != seen:
        starts_and_lengths(sinks, sources, lengths, is_causal)
        _checked[cu_seqlens_q] = seen


def _starts_and_lengths(cu_seqlens: Tensor, tokens: int, longest: int, side: str) -> tuple[list[int], list[int]]:
    bounds = cu_seqlens.tolist()
    lengths = [stop - start for start, stop in pairwise(bounds)]
    name = f"cu_seqlens_{side}"
    if bounds[0] != 0:
        raise ValueError(f"{name} must start at 0, got {bounds[0]}: it holds the B + 1 bounds of B sequences.")
    if lengths and min(lengths) < 0:
        at = next(i for i, length in enumerate(lengths) if length < 0)
        raise ValueError(f"{name} must not decrease, got {bounds[at]} followed by {bounds[at + 1]} at index {at + 1}.")
    if bounds[-1] > tokens:
        raise ValueError(f"{name} ends at {bounds[-1]}, beyond the {tokens} tokens that were passed.")
    if lengths and max(lengths) > longest:
        raise ValueError(f"{name} holds a sequence of {max(lengths)} tokens, but max_seqlen_{side} is {longest}.")
    return bounds[:-1], lengths
