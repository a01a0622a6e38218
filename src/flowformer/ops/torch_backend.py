"""The memory-linear backend in plain torch: walks over blocks of heads and segments of tokens small enough to stay in
cache, so that no intermediate is as large as an input.

Shapes: query (B, H, N, D), key (B, H_kv, M, D), value (B, H_kv, M, E); masks (B, N) and (B, M) bool, True = takes part.
The three tensors of a state are those of `FlowState`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from . import torch_bidirectional, torch_causal, torch_decode
from .features import feature_gradient, features, sum_dtype, valid_values
from .torch_bidirectional import Flows, Scratch
from .torch_causal import State
from .variant import FlowVariant

# numbers of one tensor that a block holds at most: what a CPU's cache likes, and what keeps another device busy
BLOCK = {"cpu": 2**19}
DEVICE_BLOCK = 2**26
# parts into which an input is cut even if it fits, so that what a block needs stays a fraction of it, unless the block
# would be so small that overhead is all there is
BIDIRECTIONAL_PARTS = 4
CAUSAL_PARTS = 8
SMALL_BLOCK = 2**15
CHUNK = 64  # tokens that meet in one C × C product
SEGMENT = 1024  # tokens between two states that are kept for the backward pass


def bidirectional(query, key, value, query_mask, key_mask, scale: float, variant: FlowVariant) -> tuple[Tensor, Flows]:
    """The result, and the flows of every head for the backward pass, (B, H, ...)."""
    result, flows = empty_result(query, value.shape[-1]), empty_flows(query, key, value)
    scratch = _scratch(query, key, value)
    for block in _blocks(query, key, value, max(query.shape[2], key.shape[2]), BIDIRECTIONAL_PARTS):
        inputs, masks = block.inputs(query, key, value), (block.mask(query_mask), block.mask(key_mask))
        out, parts = torch_bidirectional.forward(*inputs, *masks, scale, variant, scratch, block.sinks_of(result))
        block.put_sinks(result, out)
        for kept, part in zip(flows, parts, strict=True):
            block.put_sinks(kept, part)
    return result, flows


def bidirectional_backward(
    grad, query, key, value, query_mask, key_mask, flows: Flows, scale: float, variant: FlowVariant
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value."""
    grad_query, grad_key, grad_value = _empty_gradients(query, key, value)
    scratch = _scratch(query, key, value)
    for block in _blocks(query, key, value, max(query.shape[2], key.shape[2]), BIDIRECTIONAL_PARTS):
        inputs, masks = block.inputs(query, key, value), (block.mask(query_mask), block.mask(key_mask))
        parts = Flows(*(block.sinks(part) for part in flows))
        out = block.sinks_of(grad_query), block.sources_of(grad_key), block.sources_of(grad_value)
        grads = torch_bidirectional.backward(block.sinks(grad), *inputs, *masks, parts, scale, variant, scratch, out)
        block.put_sinks(grad_query, grads[0])
        block.put_sources(grad_key, grads[1])
        block.put_sources(grad_value, grads[2])
    return grad_query, grad_key.to(key.dtype), grad_value.to(value.dtype)


def causal(query, key, value, mask, state: State, scale: float, variant: FlowVariant) -> tuple[Tensor, State, State]:
    """The result, the state after the last token, and the states before each segment and after the last,
    (segments + 1, B, H, ...)."""
    result = empty_result(query, value.shape[-1])
    end = tuple(torch.empty_like(part) for part in state)
    starts = empty_starts(query, state)
    for block in _blocks(query, key, value, min(query.shape[2], SEGMENT), CAUSAL_PARTS):
        carried = tuple(block.sinks(part) for part in state)
        for index, segment in enumerate(_segments(query)):
            for kept, part in zip(starts, carried, strict=True):
                block.put_sinks(kept[index], part)
            q, k, v, valid = segment.inputs(block, query, key, value, mask, scale, variant)
            if query.shape[2] == 1:
                token = None if valid is None else valid[:, 0, 0]
                out, carried = torch_decode.step(q[:, 0, 0], k[:, 0, 0], v[:, 0, 0], token, carried, variant)
                block.put_sinks(result, out)
                continue
            position = segment.position(valid, carried)
            out, carried = torch_causal.forward(q, k, v, position, valid, carried, variant)
            block.put_sinks(result[:, :, segment.tokens], segment.join(out))
        for kept, last, part in zip(end, starts, carried, strict=True):
            block.put_sinks(kept, part)
            block.put_sinks(last[-1], part)
    return result, end, starts


def causal_backward(grad, grad_end: State, query, key, value, mask, starts: State, scale: float, variant: FlowVariant):
    """The gradients of query, key and value, and that of the state before the first token."""
    grad_query, grad_key, grad_value = _empty_gradients(query, key, value)
    grad_start = tuple(torch.empty_like(part) for part in grad_end)
    for block in _blocks(query, key, value, min(query.shape[2], SEGMENT), CAUSAL_PARTS):
        carried = tuple(block.sinks(part) for part in grad_end)
        for index, segment in reversed(list(enumerate(_segments(query)))):
            start = tuple(block.sinks(part[index]) for part in starts)
            q, k, v, valid = segment.inputs(block, query, key, value, mask, scale, variant)
            g = segment.cut(valid_values(block.sinks(grad[:, :, segment.tokens]), segment.mask(block, mask)))
            position = segment.position(valid, start)
            grad_q, grad_k, grad_v, carried = torch_causal.backward(
                g, q, k, v, position, valid, start, carried, variant
            )
            grad_q, grad_k = feature_gradient(grad_q, q, scale, variant), feature_gradient(grad_k, k, scale, variant)
            block.put_sinks(grad_query[:, :, segment.tokens], segment.join(grad_q))
            block.put_sources(grad_key[:, :, segment.tokens], segment.join(grad_k))
            block.put_sources(grad_value[:, :, segment.tokens], segment.join(grad_v))
        for kept, part in zip(grad_start, carried, strict=True):
            block.put_sinks(kept, part)
    return grad_query, grad_key.to(key.dtype), grad_value.to(value.dtype), grad_start


def bidirectional_graph(query, key, value, query_mask, key_mask, scale: float, variant: FlowVariant) -> Tensor:
    """`bidirectional` as one graph of plain operators without loops: for export, at any length, and for autograd where
    heads compete."""
    block, query, key, value = _whole(query, key, value)
    inputs, masks = block.inputs(query, key, value), (block.mask(query_mask), block.mask(key_mask))
    result, _ = torch_bidirectional.forward(*inputs, *masks, scale, variant, heads=max(query.shape[1], 1))
    return result.unflatten(0, query.shape[:2]).to(query.dtype)


def causal_graph(query, key, value, mask, state: State, scale: float, variant: FlowVariant) -> tuple[Tensor, State]:
    """`causal` as one graph of plain operators without loops: for export, at any length."""
    block, query, key, value = _whole(query, key, value)
    segment = Segment.of(slice(None), query.shape[2], CHUNK)
    start = tuple(block.sinks(part) for part in state)
    q, k, v, valid = segment.inputs(block, query, key, value, mask, scale, variant)
    out, end = torch_causal.forward(q, k, v, segment.position(valid, start), valid, start, variant)
    rows = query.shape[:2]
    result = segment.join(out).unflatten(0, rows).to(query.dtype)
    return result, tuple(part.unflatten(0, rows) for part in end)


def empty_result(query: Tensor, value_dim: int) -> Tensor:
    """Uninitialised (B, H, N, E) in the memory order of the query, so that joining the heads again needs no copy."""
    batch, heads, length, _ = query.shape
    if query.stride(1) < query.stride(2):
        return query.new_empty(batch, length, heads, value_dim).transpose(1, 2)
    return query.new_empty(batch, heads, length, value_dim)


def empty_flows(query: Tensor, key: Tensor, value: Tensor) -> Flows:
    batch, heads, sinks, dim = query.shape
    sources = key.shape[2]
    shapes = (sinks,), (sources,), (sinks,), (sources,), (4, dim), (dim, value.shape[-1])
    return Flows(*(query.new_empty(batch, heads, *shape, dtype=sum_dtype(query)) for shape in shapes))


def empty_starts(query: Tensor, state: State) -> State:
    # with the state after the last, there are two at least: compilers make a graph of its own for a size of one
    count = (query.shape[2] + SEGMENT - 1) // SEGMENT + 1
    return tuple(part.new_empty(count, *part.shape) for part in state)


class Block(NamedTuple):
    """Some key heads of some sequences, and one of the query heads that share each of them. G heads in all."""

    rows: slice
    heads: slice
    query_heads: slice
    width: int  # how many heads of a sequence
    first: bool  # of the query heads that share a key head

    def sinks(self, x: Tensor) -> Tensor:
        """(B, H, ...) -> (G, ...)"""
        return x[self.rows, self.query_heads].flatten(0, 1)

    def sources(self, x: Tensor) -> Tensor:
        """(B, H_kv, ...) -> (G, ...)"""
        return x[self.rows, self.heads].flatten(0, 1)

    def inputs(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.sinks(query), self.sources(key), self.sources(value)

    def mask(self, mask: Tensor | None) -> Tensor | None:
        """(B, N) -> (G, N)"""
        return None if mask is None else mask[self.rows].repeat_interleave(self.width, 0)

    def sinks_of(self, x: Tensor) -> Tensor | None:
        """The sinks of x as a view, (G, ...), to write to; None if there is no such view."""
        return _flat_view(x[self.rows, self.query_heads])

    def sources_of(self, x: Tensor) -> Tensor | None:
        """Likewise for sources; None also where there is something to add to."""
        return _flat_view(x[self.rows, self.heads]) if self.first else None

    def put_sinks(self, x: Tensor, part: Tensor) -> None:
        _put(x[self.rows, self.query_heads], part)

    def put_sources(self, x: Tensor, part: Tensor) -> None:
        view = x[self.rows, self.heads]
        if self.first:
            _put(view, part)
        else:
            view += part.view(view.shape)


def _blocks(query: Tensor, key: Tensor, value: Tensor, length: int, parts: int) -> Iterator[Block]:
    batch, heads = key.shape[:2]
    shared = query.shape[1] // max(heads, 1)
    size = length * max(query.shape[3], value.shape[3])
    block = BLOCK.get(query.device.type, DEVICE_BLOCK)
    fitting = max(1, min(block // max(size, 1), max(batch * heads // parts, SMALL_BLOCK // max(size, 1))))
    rows, width = (fitting // heads, heads) if fitting >= heads > 0 else (1, fitting)
    for row in range(0, batch, rows):
        for head in range(0, heads, width):
            stop = min(head + width, heads)
            for member in range(shared):
                query_heads = slice(head * shared + member, stop * shared, shared)
                yield Block(slice(row, row + rows), slice(head, stop), query_heads, stop - head, member == 0)


def _scratch(query: Tensor, key: Tensor, value: Tensor) -> Scratch:
    length, width = max(query.shape[2], key.shape[2]), max(query.shape[3], value.shape[3])
    # the first block is the largest
    block = next(_blocks(query, key, value, length, BIDIRECTIONAL_PARTS), None)
    heads = 0 if block is None else query[block.rows, block.query_heads, :0].flatten(0, 1).shape[0]
    return Scratch(heads * length * width, query)


def _whole(query: Tensor, key: Tensor, value: Tensor) -> tuple[Block, Tensor, Tensor, Tensor]:
    """Everything as one block; a graph without loops cannot share keys among query heads, so they are repeated."""
    shared = query.shape[1] // max(key.shape[1], 1)
    if shared > 1:
        key, value = key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1)
    return Block(slice(None), slice(None), slice(None), query.shape[1], True), query, key, value


class Segment(NamedTuple):
    """Tokens that are computed at once, in `chunks` of `chunk`, the last one filled up with masked tokens."""

    tokens: slice
    length: int
    chunk: int
    chunks: int

    @classmethod
    def of(cls, tokens: slice, length: int, chunk: int) -> Segment:
        # an exported graph serves any length, so it may not depend on this one: there, a masked chunk more makes two at
        # least, since a single one would be taken for the only one ever
        return cls(tokens, length, chunk, (length + chunk - 1) // chunk + torch.compiler.is_exporting())

    @property
    def padding(self) -> int:
        return self.chunks * self.chunk - self.length

    @property
    def is_padded(self) -> bool:
        return torch.compiler.is_exporting() or self.padding > 0

    def inputs(self, block: Block, query, key, value, mask, scale: float, variant: FlowVariant):
        """q, k (G, T, C, D) as features, v (G, T, C, E), and which tokens are valid, (G, T, C), or None for all."""
        query, key, value = block.inputs(*(x[:, :, self.tokens] for x in (query, key, value)))
        mask = self.mask(block, mask)
        q, k, v = features(query, mask, scale, variant), features(key, mask, scale, variant), valid_values(value, mask)
        if mask is None and self.is_padded:
            mask = q.new_ones(q.shape[:2], dtype=torch.bool)
        valid = None if mask is None else F.pad(mask, (0, self.padding)).unfold(1, self.chunk, self.chunk)
        return self.cut(q), self.cut(k), self.cut(v), valid

    def mask(self, block: Block, mask: Tensor | None) -> Tensor | None:
        return None if mask is None else block.mask(mask[:, self.tokens])

    def position(self, valid: Tensor | None, state: State) -> Tensor:
        """D, how many tokens there are up to and including this one, (G, T, C)."""
        count = state[2][:, 0]
        if valid is None:
            tokens = torch.arange(1, self.length + 1, dtype=count.dtype, device=count.device)
            return (count[:, None] + tokens).unflatten(1, (self.chunks, self.chunk))
        return torch_causal.running_sum(valid.to(count.dtype), count).clamp_min(1)

    def cut(self, x: Tensor) -> Tensor:
        """(G, tokens, D) -> (G, T, C, D)"""
        x = F.pad(x, (0, 0, 0, self.padding)) if self.is_padded else x
        # as x.unflatten(1, (T, C)), which in an exported graph would first have to prove that the length divides
        return x.unfold(1, self.chunk, self.chunk).mT

    def join(self, x: Tensor) -> Tensor:
        """(G, T, C, D) -> (G, tokens, D)"""
        x = x.flatten(1, 2)
        # a slice in an exported graph would have to prove that it is one
        return F.pad(x, (0, 0, 0, -self.padding)) if torch.compiler.is_exporting() else x[:, : self.length]


def _segments(query: Tensor) -> Iterator[Segment]:
    length = query.shape[2]
    for start in range(0, length, SEGMENT):
        size = min(SEGMENT, length - start)
        yield Segment.of(slice(start, start + size), size, min(CHUNK, size))


def _flat_view(view: Tensor) -> Tensor | None:
    rows, heads = view.shape[:2]
    return view.flatten(0, 1) if rows == 1 or view.stride(0) == heads * view.stride(1) else None


def _put(view: Tensor, part: Tensor) -> None:
    if part.data_ptr() != view.data_ptr():
        view.copy_(part.view(view.shape))


def _empty_gradients(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    # what several query heads add up to is added up in the dtype of the sums
    shared = key.shape[1] != query.shape[1]
    grad_key, grad_value = (torch.empty_like(x, dtype=sum_dtype(x) if shared else x.dtype) for x in (key, value))
    return torch.empty_like(query), grad_key, grad_value
