"""Packed sequences: groups of sequences of similar length are padded and computed together.

Padding the whole batch to its longest sequence could need far more memory than the tokens. Only `graph` does so, since
an exported graph cannot depend on the lengths.

Shapes: query (T, H, D), key (T', H_kv, D), value (T', H_kv, E), cu_seqlens (B + 1,).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..bounds import Lengths, PaddedSequences, starts_and_lengths
from ..common import Mask, Options, is_exporting
from ..state import empty_state
from . import bidirectional, causal

GROUP_SIZE = 2**14  # maximum of padded tokens in a group; a longer sequence forms a group alone


def forward(query: Tensor, key: Tensor, value: Tensor, lengths: Lengths, is_causal: bool, options: Options) -> Tensor:
    def attend(q: Tensor, k: Tensor, v: Tensor, query_mask: Mask, key_mask: Mask) -> Tensor:
        if is_causal:
            return causal.forward(q, k, v, query_mask, empty_state(q, v), options)[0]
        return bidirectional.forward(q, k, v, (query_mask, key_mask), options)[0]

    return _by_groups(query, key, value, _groups(query, key, lengths, is_causal), attend)


def backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, lengths: Lengths, is_causal: bool, options: Options
) -> tuple[Tensor, Tensor, Tensor]:
    grads = torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    for group in _groups(query, key, lengths, is_causal):
        g, q = group.sinks.pad(grad), group.sinks.pad(query)
        k, v = group.sources.pad(key), group.sources.pad(value)
        if is_causal:
            _, end, starts = causal.forward(q, k, v, group.sinks.mask, empty_state(q, v), options)
            no_grad = tuple(torch.zeros_like(part) for part in end)
            grad_q, grad_k, grad_v, _ = causal.backward(g, no_grad, q, k, v, group.sinks.mask, starts, options)
        else:
            masks = group.sinks.mask, group.sources.mask
            _, flows = bidirectional.forward(q, k, v, masks, options)
            grad_q, grad_k, grad_v = bidirectional.backward(g, q, k, v, masks, flows, options)
        group.sinks.unpad(grad_q, grads[0])
        group.sources.unpad(grad_k, grads[1])
        group.sources.unpad(grad_v, grads[2])
    return grads


def graph(query: Tensor, key: Tensor, value: Tensor, lengths: Lengths, is_causal: bool, options: Options) -> Tensor:
    """`forward` in plain torch operators, differentiable by autograd.

    For variants without a registered operator, and for export, as one graph for all lengths.
    """

    def attend(q: Tensor, k: Tensor, v: Tensor, query_mask: Mask, key_mask: Mask) -> Tensor:
        if is_causal:
            return causal.graph(q, k, v, query_mask, empty_state(q, v, options.variant), options)[0]
        return bidirectional.graph(q, k, v, (query_mask, key_mask), options)

    if not is_exporting():
        return _by_groups(query, key, value, _groups(query, key, lengths, is_causal), attend)
    sinks = PaddedSequences.all(lengths[0], lengths[2])
    sources = sinks if is_causal else PaddedSequences.all(lengths[1], lengths[3])
    out = attend(sinks.pad(query), sources.pad(key), sources.pad(value), sinks.mask, sources.mask)
    result = query.new_zeros(query.shape[0], *out.shape[1::2])
    # padding points at token 0 and holds 0, so adding it leaves that token unchanged
    return result.index_add(0, sinks.tokens.flatten(), out.transpose(1, 2).flatten(0, 1))


class _Group(NamedTuple):
    sinks: PaddedSequences
    sources: PaddedSequences


def _by_groups(
    query: Tensor, key: Tensor, value: Tensor, groups: Iterator[_Group], attend: Callable[..., Tensor]
) -> Tensor:
    # tokens after the last sequence belong to no sequence: their result is 0
    result = query.new_zeros(*query.shape[:2], value.shape[-1])
    for sinks, sources in groups:
        out = attend(sinks.pad(query), sources.pad(key), sources.pad(value), sinks.mask, sources.mask)
        sinks.unpad(out, result)
    return result


def _groups(query: Tensor, key: Tensor, lengths: Lengths, is_causal: bool) -> Iterator[_Group]:
    (starts_q, lengths_q), (starts_k, lengths_k) = starts_and_lengths(query.shape[0], key.shape[0], lengths, is_causal)
    longer = [max(pair) for pair in zip(lengths_q, lengths_k, strict=True)]
    order = sorted((i for i in range(len(longer)) if longer[i]), key=longer.__getitem__)
    while order:
        fitting = 1
        while fitting < len(order) and (fitting + 1) * longer[order[fitting]] <= GROUP_SIZE:
            fitting += 1
        chosen, order = order[:fitting], order[fitting:]
        yield _Group(
            PaddedSequences.of([starts_q[i] for i in chosen], [lengths_q[i] for i in chosen], query.device),
            PaddedSequences.of([starts_k[i] for i in chosen], [lengths_k[i] for i in chosen], key.device),
        )
