"""Softmax attention for linearized models: over all tokens in kept layers, and in a window of nearby tokens.

Shapes: B batch, H query heads, H_kv key/value heads, N queries, M keys (the last N belong to the query tokens), D query
and key features, E value features, R packed sequences. In a window: T blocks of C queries; each block sees S keys.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Tokens(NamedTuple):
    """Direction, padding and packing of the tokens of an attention layer."""

    is_causal: bool
    mask: Tensor | None = None  # (B, M) bool, False = padding
    bounds: Tensor | None = None  # (R + 1,), bounds of packed sequences in the flattened batch; then N = M

    def sequence(self, batch: int, length: int) -> Tensor | None:
        """Return the number, from 1, of the packed sequence that each token belongs to, (B, N); None if not packed."""
        if self.bounds is None:
            return None
        token = torch.arange(batch * length, device=self.bounds.device)
        return torch.searchsorted(self.bounds, token, right=True).view(batch, length)

    def pairs(self, query: Tensor, key: Tensor) -> Tensor | None:
        """Return the mask of visible pairs, (B or 1, 1, N, M) bool; None if `is_causal` alone describes it."""
        n, m = query.shape[2], key.shape[2]
        if self.mask is None and self.bounds is None and (not self.is_causal or n in (1, m)):
            return None
        visible = torch.ones(1, 1, n, m, dtype=torch.bool, device=query.device)
        if self.is_causal:
            visible = visible.tril(m - n)
        if self.mask is not None:
            visible = visible & self.mask[:, None, None]
        sequence = self.sequence(len(query), n)
        return visible if sequence is None else visible & (sequence[:, None, :, None] == sequence[:, None, None])

    def num_visible(self, query: Tensor, past: Tensor | None) -> Tensor:
        """Return the number of tokens that each query sees, (B, N).

        Args:
            past: (B,), number of tokens in the cache; None without a cache.
        """
        batch, _, n, _ = query.shape
        if self.bounds is not None:
            start, end = (self.bounds[self.sequence(batch, n) - 1 + shift] for shift in (0, 1))  # type: ignore[operator]
            token = torch.arange(batch * n, device=query.device).view(batch, n)
            return (token + 1 if self.is_causal else end) - start
        valid = query.new_ones(batch, n, dtype=torch.bool) if self.mask is None else self.mask[:, -n:]
        count = valid.cumsum(-1) if self.is_causal else valid.sum(-1, keepdim=True).expand(-1, n)
        return count if past is None else count + past[:, None]


def softmax_attention(
    query: Tensor, key: Tensor, value: Tensor, tokens: Tokens, scaling: float | None, softcap: float | None = None
) -> Tensor:
    """Return softmax(scaling · QKᵀ) V, (B, H, N, E); 0 for a query that sees no key."""
    visible = tokens.pairs(query, key)
    empty = None if visible is None else ~visible.any(-1, keepdim=True)
    if visible is not None and empty is not None:
        visible = visible | empty  # a row without a key would be NaN
    is_causal = visible is None and tokens.is_causal and query.shape[2] > 1
    if softcap is None:
        options = {"is_causal": is_causal, "scale": scaling, "enable_gqa": query.shape[1] != key.shape[1]}
        result = F.scaled_dot_product_attention(query, key, value, visible, **options)  # type: ignore[arg-type]
    else:
        shared = query.shape[1] // key.shape[1]
        scores = _scores(query, key.repeat_interleave(shared, 1).mT, scaling, softcap)
        if is_causal:
            visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
        if visible is not None:
            scores = scores.masked_fill(~visible, -torch.inf)
        result = scores.softmax(-1).to(value.dtype) @ value.repeat_interleave(shared, 1)
    return result if empty is None else result.masked_fill(empty, 0)


def window_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tokens: Tokens,
    window: int,
    scaling: float | None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute softmax attention to the keys less than `window` tokens away, at a cost of O(N · window).

    Args:
        key, value: (B, H_kv, M, D) and (B, H_kv, M, E), with M − N <= window.

    Returns: the result (B, H, N, E), 0 for a query that sees no key; the logarithm of the sum of exponentiated scores
    (B, H, N); and the number of keys that each query sees, (B, N).
    """
    batch, _, n, _ = query.shape
    key_heads, m = key.shape[1:3]
    chunk = max(min(window, n), 1)
    blocks = -(-n // chunk)
    padding = blocks * chunk - n
    after = 0 if tokens.is_causal else window
    # pad the keys so that the key of query token i is in column window + i
    left, right, width = window - (m - n), padding + after, window + chunk + after
    k, v = (F.pad(x, (0, 0, left, right)).unfold(2, width, chunk) for x in (key, value))  # (B, H_kv, T, D, S)
    q = F.pad(query, (0, 0, 0, padding)).unflatten(2, (blocks, chunk)).unflatten(1, (key_heads, -1))
    scores = _scores(q, k[:, :, None], scaling, softcap)  # (B, H_kv, H/H_kv, T, C, S)

    column = torch.arange(width, device=query.device)
    distance = window + column[:chunk, None] - column
    near = (distance < window) & (distance >= 0 if tokens.is_causal else distance > -window)
    valid = query.new_ones(batch, m, dtype=torch.bool) if tokens.mask is None else tokens.mask
    visible = near & F.pad(valid, (left, right)).unfold(1, width, chunk)[:, :, None]  # (B, T, C, S)
    sequence = tokens.sequence(batch, n)
    if sequence is not None:
        of_queries = F.pad(sequence, (0, padding)).unflatten(1, (blocks, chunk))
        of_keys = F.pad(sequence, (left, right)).unfold(1, width, chunk)
        visible = visible & (of_queries[..., None] == of_keys[:, :, None])
    empty = ~visible.any(-1, keepdim=True)  # a row without a key would be NaN
    scores = scores.masked_fill(~(visible | empty)[:, None, None], -torch.inf)
    log_sum = scores.logsumexp(-1, keepdim=True)
    weights = (scores - log_sum).exp().masked_fill(empty[:, None, None], 0)
    result = weights.to(value.dtype) @ v[:, :, None].mT

    def join(x: Tensor) -> Tensor:  # (B, H_kv, H/H_kv, T, C, ...) → (B, H, N, ...)
        return x.flatten(1, 2).flatten(2, 3)[:, :, :n]

    return join(result), join(log_sum)[..., 0], visible.sum(-1).flatten(1, 2)[:, :n]


def _scores(query: Tensor, key: Tensor, scaling: float | None, softcap: float | None) -> Tensor:
    """Return scaling · QKᵀ in at least float32, with the softcap of Gemma 2; `key` is already transposed."""
    scores = query @ key
    scores = scores.float() if scores.dtype in (torch.bfloat16, torch.float16) else scores
    scores = scores * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    return scores if softcap is None else softcap * (scores / softcap).tanh()
