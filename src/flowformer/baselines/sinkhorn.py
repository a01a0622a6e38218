"""Sparse Sinkhorn attention: a block attends to itself and to a mixture of blocks given by a learned soft permutation.

O(N·2C) for the attention and (N/C)² for the sorting of blocks of C tokens.
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

    From the sum x of the keys of a block, a network for each head, relu(x W₁) W₂, computes a score for each block that
    may be matched with it. Sinkhorn normalisation turns the scores into a soft permutation R of the blocks. Queries of
    block t attend in one softmax to the tokens of block t and to those of the mixture Σ_s R_ts · block s. In training,
    Gumbel noise is added to the scores, as published. There is no causal form, since R is normalised over all blocks,
    later ones included.

    Args:
        num_heads, head_dim, max_length: sizes of the network, which has an output for each block of the longest
            sequence.
        block: C, number of tokens of a block. The default is the setting of the Long-Range Arena.
        iterations: number of normalisations of rows and columns.
        temperature: divisor of the scores; as it approaches 0, R approaches a permutation.

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
        block = min(self.block, query.shape[2])
        q, k, v, s = (split(x, block) for x in (query, key, value, sources))  # (B, H, T, C, …)
        sort = self.sort(k, lengths).to(query.dtype)
        k, v = (torch.cat([x, torch.einsum("bhts,bhscd->bhtcd", sort, x)], 3) for x in (k, v))
        # a mixed token is the weighted sum of the tokens at its position in all blocks; it is valid if any of them is
        mixed = s.any(2, keepdim=True).expand_as(s)
        return join(softmax_blocks(q, k, v, torch.cat([s, mixed], 3).mT), query.shape[2])

    def sort(self, key: Tensor, lengths: Tensor) -> Tensor:
        """Return the soft permutation R of the blocks, (B, H, T, T).

        R maps blocks of padding to themselves.

        Args:
            key: (B, H, T, C, D), 0 where masked.
            lengths: (B,), number of tokens of each sequence without padding.
        """
        dtype, blocks = sum_dtype(key), key.shape[2]
        block_sums = key.to(dtype).sum(3)
        logits = (block_sums @ self.hidden.to(dtype)).relu() @ self.scores[..., :blocks].to(dtype)
        if self.training:
            logits = logits - torch.empty_like(logits).exponential_().log()  # Gumbel noise
        present = torch.arange(blocks, device=key.device) * self.block < lengths[:, None, None]  # (B, 1, T)
        log_identity = torch.eye(blocks, device=key.device, dtype=dtype).log()
        logits = torch.where(present[..., None] & present[..., None, :], logits / self.temperature, log_identity)
        for _ in range(self.iterations):
            logits = logits.log_softmax(-1)
            logits = logits.log_softmax(-2)
        return logits.exp()
