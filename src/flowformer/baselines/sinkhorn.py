"""Sparse Sinkhorn attention: a block sees itself and the block that a learned, doubly stochastic sort puts beside it.

O(N·2C) for the attention and (N/C)² for the sort of blocks of C tokens.
Shapes: B batch, H heads, N tokens, D features, T blocks of C tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .._utils import check_positive
from ..ops.common import sum_dtype
from .blocks import BlockMechanism, count_blocks, join, softmax_blocks, split
from .registry import register
from .tokens import check_length, required_length


@register
class SinkhornAttention(BlockMechanism):
    """Sinkhorn attention (Tay et al., 2020).

    Each block is described by the sum of its keys, x. A sorter per head, relu(x W₁) W₂, scores every block to put
    beside it; Sinkhorn normalisation turns the scores into a soft permutation R of the blocks. Queries of block t
    attend in one softmax to the tokens of block t and to those of Σ_s R_ts · block s. While training, the scores take
    Gumbel noise, as published. R is normalised over later blocks too, so there is no causal form here.

    Args:
        num_heads, head_dim, max_length: of the sorter, which has a score for every block of the longest sequence.
        block: tokens of a block, C. 50 is the setting of the Long-Range Arena.
        iterations: of rows and columns in the normalisation.
        temperature: of the scores; towards 0 the sort becomes a permutation.

    >>> x = torch.randn(1, 2, 5, 4)
    >>> SinkhornAttention(num_heads=2, head_dim=4, max_length=8, block=2)(x, x, x).shape
    torch.Size([1, 2, 5, 4])
    """

    name = "sinkhorn"
    linear = True
    causal = False

    def __init__(
        self,
        *,
        num_heads: int,
        head_dim: int,
        max_length: int | None = None,
        block: int = 50,
        iterations: int = 5,
        temperature: float = 0.75,
    ):
        super().__init__()
        check_positive(block=block, iterations=iterations)
        if temperature <= 0:
            raise ValueError(f"sinkhorn attention needs a positive temperature, got {temperature}.")
        self.max_length = required_length(self.name, max_length)
        self.block = block
        self.iterations = iterations
        self.temperature = temperature
        self.hidden = nn.Parameter(torch.empty(num_heads, head_dim, head_dim))
        self.scores = nn.Parameter(torch.empty(num_heads, head_dim, count_blocks(self.max_length, block)))
        for head in (*self.hidden, *self.scores):
            nn.init.xavier_uniform_(head)

    def attend_in_order(self, query, key, value, is_causal: bool, sources: Tensor, lengths: Tensor) -> Tensor:
        check_length(self.name, self.max_length, query)
        q, k, v, s = (split(x, self.block) for x in (query, key, value, sources))  # (B, H, T, C, …)
        sort = self.sort(k, lengths).to(query.dtype)
        k, v = (torch.cat([x, torch.einsum("bhts,bhscd->bhtcd", sort, x)], 3) for x in (k, v))
        # a sorted token is a mixture of the tokens at its position in every block; it is valid if any of them is
        mixed = s.any(2, keepdim=True).expand_as(s)
        return join(softmax_blocks(q, k, v, torch.cat([s, mixed], 3).mT), query.shape[2])

    def sort(self, key: Tensor, lengths: Tensor) -> Tensor:
        """The soft permutation R of the blocks, (B, H, T, T), for keys (B, H, T, C, D) that are 0 where masked.

        A block behind the end of its sequence stays where it is.
        """
        dtype, blocks = sum_dtype(key), key.shape[2]
        described = key.to(dtype).sum(3)
        logits = (described @ self.hidden.to(dtype)).relu() @ self.scores[..., :blocks].to(dtype)
        if self.training:
            logits = logits - torch.empty_like(logits).exponential_().log()
        there = torch.arange(blocks, device=key.device) * self.block < lengths[:, None, None]  # (B, 1, T)
        alone = torch.eye(blocks, device=key.device, dtype=dtype).log()
        logits = torch.where(there[..., None] & there[..., None, :], logits / self.temperature, alone)
        for _ in range(self.iterations):
            logits = logits.log_softmax(-1)
            logits = logits.log_softmax(-2)
        return logits.exp()
