"""Packed sequences: checks of their bounds, and conversion of groups of sequences to padded tensors.

Shapes: packed tokens (T, H, D), cu_seqlens (B + 1,).
"""

from __future__ import annotations

from collections.abc import MutableMapping
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

Lengths = tuple[Tensor, Tensor, int, int]  # cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
Bounds = Tensor | None  # (B + 1,), 0 and the end of each sequence; None if sequences are not packed
Spans = tuple[list[int], list[int]]  # starts and lengths of the sequences


class PaddedSequences(NamedTuple):
    """Some sequences of a packed tensor, as the R rows of a padded tensor of length L."""

    tokens: Tensor  # (R, L), the index of the packed token at each position, 0 in the padding
    mask: Tensor | None  # (R, L), False in the padding; None without padding

    @classmethod
    def of(cls, starts: list[int], lengths: list[int], device: torch.device) -> PaddedSequences:
        """The sequences with these starts and lengths."""
        longest = max(lengths)
        position = torch.arange(longest, device=device)
        start = torch.tensor(starts, device=device)[:, None]
        if min(lengths) == longest:
            return cls(start + position, None)
        mask = position < torch.tensor(lengths, device=device)[:, None]
        return cls(torch.where(mask, start + position, 0), mask)

    @classmethod
    def all(cls, cu_seqlens: Tensor, longest: int) -> PaddedSequences:
        """All sequences, padded to `longest`; unlike `of`, without reading lengths on the host."""
        position = torch.arange(longest, device=cu_seqlens.device)
        mask = position < cu_seqlens.diff()[:, None]
        return cls(torch.where(mask, cu_seqlens[:-1, None] + position, 0), mask)

    def pad(self, x: Tensor) -> Tensor:
        """(T, H, D) -> (R, H, L, D)"""
        return x[self.tokens].transpose(1, 2)

    def unpad(self, padded: Tensor, x: Tensor) -> None:
        """Write padded (R, H, L, D) to the tokens of the packed tensor x (T, H, D), in place."""
        padded = padded.transpose(1, 2)
        if self.mask is None:
            x[self.tokens] = padded
        else:
            x[self.tokens[self.mask]] = padded[self.mask]


def starts_and_lengths(sinks: int, sources: int, lengths: Lengths, is_causal: bool) -> tuple[Spans, Spans]:
    """Starts and lengths of the sequences, for the queries and for the keys; raises on invalid bounds.

    Args:
        sinks, sources: the number of packed tokens.
    """
    of_sinks = _starts_and_lengths(lengths[0], sinks, lengths[2], "q")
    of_sources = _starts_and_lengths(lengths[1], sources, lengths[3], "k")
    if is_causal and of_sinks[1] != of_sources[1]:
        raise ValueError(
            "causal attention needs as many queries as keys in each sequence, got cu_seqlens_q and cu_seqlens_k that "
            "differ. To continue sequences, pass the state of their past to flow_attention_recurrent."
        )
    return of_sinks, of_sources


# by cu_seqlens_q: the cu_seqlens_k that it was read with, the rest of the arguments, and the result
_read: MutableMapping[Tensor, tuple[TensorWeakRef, tuple[object, ...], tuple[Spans, Spans]]] = WeakTensorKeyDictionary()


def check_bounds(sinks: int, sources: int, lengths: Lengths, is_causal: bool) -> None:
    """Raise on invalid bounds, except while a CUDA graph is captured. For kernels, which read them on the device."""
    if not (lengths[0].is_cuda and torch.cuda.is_current_stream_capturing()):
        read_bounds(sinks, sources, lengths, is_causal)


def read_bounds(sinks: int, sources: int, lengths: Lengths, is_causal: bool) -> tuple[Spans, Spans]:
    """The result of `starts_and_lengths`, cached: it waits for the device, and layers that share bounds wait once.

    For bounds on a GPU. On the CPU they may share memory with a NumPy array, and writing to that changes no version.
    """
    cu_seqlens_q, cu_seqlens_k, *_ = lengths
    # an inference tensor has no version counter, so a change since the last check would go unnoticed
    versions = (
        None
        if cu_seqlens_q.is_inference() or cu_seqlens_k.is_inference()
        else (cu_seqlens_q._version, cu_seqlens_k._version)
    )
    arguments = versions, sinks, sources, *lengths[2:], is_causal
    read = _read.get(cu_seqlens_q)
    if versions is not None and read is not None and read[0]() is cu_seqlens_k and read[1] == arguments:
        return read[2]
    spans = starts_and_lengths(sinks, sources, lengths, is_causal)
    _read[cu_seqlens_q] = TensorWeakRef(cu_seqlens_k), arguments, spans
    return spans


def _starts_and_lengths(cu_seqlens: Tensor, tokens: int, longest: int, side: str) -> Spans:
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
