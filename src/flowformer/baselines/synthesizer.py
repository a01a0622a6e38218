"""Synthesizer: attention weights that are parameters ("random") or computed from the query ("dense"), without keys.

Quadratic in time and memory; the random form is also quadratic in parameters.

Shapes: B batch, H heads, N queries, M keys, D features, L max_length.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from .registry import Mechanism, register
from .tokens import check_length, masked_softmax, packed, required_length, unpacked, valid


@register
class SynthesizerAttention(Mechanism):
    """Random Synthesizer (Tay et al., 2021): softmax(R) V with a learned matrix R for each head.

    Rows and columns of R are indexed by positions among the tokens that take part.

    Args:
        max_length: L, number of rows and columns of R.
        dot_product: add QKᵀ/√d to R, as LRA's released code does. Otherwise keys are not used at all.

    >>> x = torch.randn(1, 2, 5, 4)
    >>> SynthesizerAttention(num_heads=2, max_length=8)(x, x, x, is_causal=True).shape
    torch.Size([1, 2, 5, 4])
    """

    name = "synthesizer"
    own_reads: ClassVar[tuple[str, ...]] = ()  # value of `reads` without the dot product

    def __init__(
        self,
        *,
        num_heads: int,
        head_dim: int | None = None,
        max_length: int | None = None,
        dot_product: bool = False,
    ) -> None:
        super().__init__()
        self.max_length = required_length(self.name, max_length)
        self.dot_product = dot_product
        self.reads = ("query", "key") if dot_product else self.own_reads
        self._build(num_heads, head_dim)

    def _build(self, num_heads: int, head_dim: int | None) -> None:
        self.logits = nn.Parameter(torch.empty(num_heads, self.max_length, self.max_length))
        for logits in self.logits:
            nn.init.xavier_uniform_(logits)

    def _synthesize(self, q: Tensor, keys: int) -> Tensor:
        """Return the logits of queries (B, H, N, D) for the first `keys` positions, (B, H, N, M) or (H, N, M)."""
        return self.logits[:, : q.shape[2], :keys].to(q.dtype)

    def attend(self, query, key, value, is_causal: bool, query_mask: Tensor | None, key_mask: Tensor | None) -> Tensor:
        check_length(self.name, self.max_length, query, key)
        queries = valid(query, query_mask)
        if is_causal:
            query_mask = key_mask  # queries and keys are the same tokens
        q, k, v = (
            packed(valid(x, mask), mask) for x, mask in ((queries, query_mask), (key, key_mask), (value, key_mask))
        )
        logits = self._synthesize(q, k.shape[2])
        if self.dot_product:
            logits = logits + q @ k.mT / q.shape[-1] ** 0.5
        seen = None
        if key_mask is not None:
            seen = torch.arange(k.shape[2], device=k.device) < key_mask.sum(-1)[:, None, None, None]
        if is_causal:
            past = torch.ones(k.shape[2], k.shape[2], dtype=torch.bool, device=k.device).tril()
            seen = past if seen is None else seen & past
        result = unpacked(masked_softmax(logits, seen) @ v, query_mask)
        return valid(result, query_mask).to(query.dtype)


@register
class DenseSynthesizerAttention(SynthesizerAttention):
    """Dense Synthesizer: row i of the logits is W₂ ReLU(W₁ q_i + b₁) + b₂, with one logit per position.

    In the paper, the input of this network is the layer's input; here it is the projected query of each head.

    Args: as for `SynthesizerAttention`; `max_length` is the number of columns of the logits.

    >>> x = torch.randn(1, 2, 5, 4)
    >>> DenseSynthesizerAttention(num_heads=2, head_dim=4, max_length=8)(x, x, x).shape
    torch.Size([1, 2, 5, 4])
    """

    name = "synthesizer-dense"
    own_reads = ("query",)

    def __init__(self, *, num_heads: int, head_dim: int, max_length: int | None = None, dot_product: bool = False):
        super().__init__(num_heads=num_heads, head_dim=head_dim, max_length=max_length, dot_product=dot_product)

    def _build(self, num_heads, head_dim) -> None:
        self.hidden_weight = nn.Parameter(torch.empty(num_heads, head_dim, head_dim))
        self.hidden_bias = nn.Parameter(torch.zeros(num_heads, 1, head_dim))
        self.logit_weight = nn.Parameter(torch.empty(num_heads, head_dim, self.max_length))
        self.logit_bias = nn.Parameter(torch.zeros(num_heads, 1, self.max_length))
        for weights in (self.hidden_weight, self.logit_weight):
            for weight in weights:
                nn.init.xavier_uniform_(weight)

    def _synthesize(self, q: Tensor, keys: int) -> Tensor:
        hidden = (q @ self.hidden_weight.to(q.dtype) + self.hidden_bias.to(q.dtype)).relu()
        return hidden @ self.logit_weight[..., :keys].to(q.dtype) + self.logit_bias[..., :keys].to(q.dtype)
