"""Causal Flow-Attention: processes segments of tokens in order, with the state between them, forward and backward.

Only the state before each segment is saved for the backward pass, which recomputes the flows of a segment.

Shapes: query (B, H, N, D), key (B, H_kv, N, D), value (B, H_kv, N, E), mask (B, N) bool, True = takes part; G heads of
a block, T chunks of a segment, C tokens of a chunk. The three tensors of a state are those of `FlowState`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..common import Mask, Options, State, empty_result, is_exporting, valid_values
from . import causal_segment
from .causal_segment import SegmentInputs
from .features import feature_gradient, features
from .head_blocks import HeadBlock, empty_gradients, head_blocks, one_block

MIN_BLOCKS = 8
CHUNK = 64  # tokens whose flows come from one C × C product
SEGMENT = 1024  # tokens between two states that are saved for the backward pass


def forward(
    query: Tensor, key: Tensor, value: Tensor, mask: Mask, state: State, options: Options
) -> tuple[Tensor, State, State]:
    """The result, the state after the last token, and the states before each segment and after the last one,
    (segments + 1, B, H, ...)."""
    result = empty_result(query, value.shape[-1])
    end = tuple(torch.empty_like(part) for part in state)
    starts = empty_starts(query, state)
    for block in head_blocks(query, key, value, min(query.shape[2], SEGMENT), MIN_BLOCKS):
        carried = tuple(block.sinks(part) for part in state)
        for index, segment in enumerate(_segments(query)):
            for kept, part in zip(starts, carried, strict=True):
                block.write_sinks(kept[index], part)
            q, k, v, valid = segment.inputs(block, query, key, value, mask, options)
            if query.shape[2] == 1:
                # imported here, since only decoding needs it
                from . import decode

                token = None if valid is None else valid[:, 0, 0]
                out, carried = decode.step(q[:, 0, 0], k[:, 0, 0], v[:, 0, 0], token, carried, options)
                block.write_sinks(result, out)
                continue
            inputs = SegmentInputs(q, k, v, segment.position(valid, carried), valid)
            out, carried = causal_segment.forward(inputs, carried, options)
            block.write_sinks(result[:, :, segment.tokens], segment.join(out))
        for kept, last, part in zip(end, starts, carried, strict=True):
            block.write_sinks(kept, part)
            block.write_sinks(last[-1], part)
    return result, end, starts


def backward(
    grad: Tensor,
    grad_end: State,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask,
    starts: State,
    options: Options,
) -> tuple[Tensor, Tensor, Tensor, State]:
    """The gradients of query, key, value and the state before the first token.

    Args:
        grad, grad_end: the gradients of the result and of the state after the last token.
        starts: the states before each segment, from `forward`.
    """
    grad_query, grad_key, grad_value = empty_gradients(query, key, value)
    grad_start = tuple(torch.empty_like(part) for part in grad_end)
    for block in head_blocks(query, key, value, min(query.shape[2], SEGMENT), MIN_BLOCKS):
        carried = tuple(block.sinks(part) for part in grad_end)
        for index, segment in reversed(list(enumerate(_segments(query)))):
            start = tuple(block.sinks(part[index]) for part in starts)
            q, k, v, valid = segment.inputs(block, query, key, value, mask, options)
            g = segment.cut(valid_values(block.sinks(grad[:, :, segment.tokens]), segment.mask(block, mask)))
            inputs = SegmentInputs(q, k, v, segment.position(valid, start), valid)
            grad_q, grad_k, grad_v, carried = causal_segment.backward(g, inputs, start, carried, options)
            grad_q, grad_k = feature_gradient(grad_q, q, options), feature_gradient(grad_k, k, options)
            block.write_sinks(grad_query[:, :, segment.tokens], segment.join(grad_q))
            block.write_sources(grad_key[:, :, segment.tokens], segment.join(grad_k))
            block.write_sources(grad_value[:, :, segment.tokens], segment.join(grad_v))
        for kept, part in zip(grad_start, carried, strict=True):
            block.write_sinks(kept, part)
    return grad_query, grad_key.to(key.dtype), grad_value.to(value.dtype), grad_start


def graph(
    query: Tensor, key: Tensor, value: Tensor, mask: Mask, state: State, options: Options
) -> tuple[Tensor, State]:
    """`forward` in plain torch operators, differentiable by autograd.

    For variants without a registered operator, and for export, as one graph without loops for any length.
    """
    block, query, key, value, options = one_block(query, key, value, options)
    sums, memory, scalars = (block.sinks(part) for part in state)
    # a count has no gradient
    carried: State = (sums, memory, torch.cat([scalars[:, :1].detach(), scalars[:, 1:]], -1))
    results = []
    if query.shape[2] == 0:
        q, k, v = block.inputs(query, key, value)
        results.append(q @ (k.mT @ v))  # an empty result that is part of the autograd graph
    whole = Segment.of(slice(None), query.shape[2], CHUNK)
    for segment in [whole] if is_exporting() else _segments(query):
        q, k, v, valid = segment.inputs(block, query, key, value, mask, options)
        if segment.chunks * segment.chunk == 1:
            from . import decode

            token = None if valid is None else valid[:, 0, 0]
            out, carried = decode.step(q[:, 0, 0], k[:, 0, 0], v[:, 0, 0], token, carried, options)
            results.append(out[:, None])
            continue
        inputs = SegmentInputs(q, k, v, segment.position(valid, carried), valid)
        out, carried = causal_segment.forward(inputs, carried, options)
        results.append(segment.join(out))
    rows = query.shape[:2]
    result: Tensor = torch.cat(results, 1).unflatten(0, rows)
    return result.to(query.dtype), tuple(part.unflatten(0, rows) for part in carried)


def empty_starts(query: Tensor, state: State) -> State:
    # one more, for the state after the last segment: torch.compile would specialise on a size of one
    count = (query.shape[2] + SEGMENT - 1) // SEGMENT + 1
    return tuple(part.new_empty(count, *part.shape) for part in state)


class Segment(NamedTuple):
    """Tokens that are processed at once, in chunks; the last chunk is padded with masked tokens."""

    tokens: slice
    length: int  # number of tokens
    chunk: int  # tokens per chunk
    chunks: int  # number of chunks

    @classmethod
    def of(cls, tokens: slice, length: int, chunk: int) -> Segment:
        # an exported graph must support any length, but export specialises on a single chunk: add a masked chunk, so
        # that there are at least two
        return cls(tokens, length, chunk, (length + chunk - 1) // chunk + int(is_exporting()))

    @property
    def padding(self) -> int:
        return self.chunks * self.chunk - self.length

    @property
    def is_padded(self) -> bool:
        return is_exporting() or self.padding > 0

    def inputs(
        self, block: HeadBlock, query: Tensor, key: Tensor, value: Tensor, mask: Mask, options: Options
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """q, k (G, T, C, D) as features, v (G, T, C, E), and which tokens are valid, (G, T, C), or None for all."""
        query, key, value = block.inputs(*(x[:, :, self.tokens] for x in (query, key, value)))
        mask = self.mask(block, mask)
        q, k, v = features(query, mask, options), features(key, mask, options), valid_values(value, mask)
        if mask is None and self.is_padded:
            mask = q.new_ones(q.shape[:2], dtype=torch.bool)
        valid = None if mask is None else F.pad(mask, (0, self.padding)).unfold(1, self.chunk, self.chunk)
        return self.cut(q), self.cut(k), self.cut(v), valid

    def mask(self, block: HeadBlock, mask: Mask) -> Tensor | None:
        return None if mask is None else block.mask(mask[:, self.tokens])

    def position(self, valid: Mask, state: State) -> Tensor:
        """D, the number of valid tokens up to and including each token, (G, T, C)."""
        count = state[2][:, 0]
        if valid is None:
            tokens = torch.arange(1, self.length + 1, dtype=count.dtype, device=count.device)
            position: Tensor = (count[:, None] + tokens).unflatten(1, (self.chunks, self.chunk))
            return position
        return causal_segment.running_sum(valid.to(count.dtype), count).clamp_min(1)

    def cut(self, x: Tensor) -> Tensor:
        """(G, tokens, D) -> (G, T, C, D)"""
        x = F.pad(x, (0, 0, 0, self.padding)) if self.is_padded else x
        # the same as x.unflatten(1, (T, C)), which in an exported graph would need a proof that C divides the length
        return x.unfold(1, self.chunk, self.chunk).mT

    def join(self, x: Tensor) -> Tensor:
        """(G, T, C, D) -> (G, tokens, D)"""
        x = x.flatten(1, 2)
        # in an exported graph, a slice would need a proof that it is not longer than x
        return F.pad(x, (0, 0, 0, -self.padding)) if is_exporting() else x[:, : self.length]


def _segments(query: Tensor) -> Iterator[Segment]:
    length = query.shape[2]
    for start in range(0, length, SEGMENT):
        size = min(SEGMENT, length - start)
        yield Segment.of(slice(start, start + size), size, min(CHUNK, size))
