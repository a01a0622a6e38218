"""Reformer: tokens attend among those that fall into their bucket of a locality-sensitive hash. O(N log N).

Shapes: B batch, H heads, N tokens, D features, E values, R rounds, T chunks of C tokens, S = 2C.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .._utils import check_positive
from ..ops.common import sum_dtype
from .blocks import BlockMechanism, count_blocks, join, neighbours, split
from .directions import RandomDirections
from .registry import register
from .tokens import masked_softmax, required_length

SELF_PENALTY = 1e5


@register
class ReformerAttention(BlockMechanism):
    """LSH attention (Kitaev et al., 2020) in several rounds.

    Queries and keys are one vector per token, the query: the keys passed are not used. Keys are normalised to
    length 1.

    A round hashes h(x) = argmax [xΩ; −xΩ], sorts the tokens by bucket, cuts the sorted sequence into chunks, and lets
    a token see the tokens of its bucket in its own and the previous chunk. The rounds are merged into one softmax over
    the union of what they see. A token sees itself only if it sees nothing else.

    Where chunks begin depends on the whole sequence, so a causal token sees, instead of two chunks, the `chunk` tokens
    before it in its bucket: the future changes nothing.

    Args:
        num_heads, head_dim: of the hashes.
        max_length: gives the number of buckets where that is not passed.
        rounds: hashes. The Long-Range Arena has 1.
        chunk: tokens of a chunk, C.
        buckets: even; None is two per chunk of the longest sequence, as published. The Long-Range Arena has 10.
        redraw_every: calls in training mode between draws of the hashes; the paper has 1, None keeps the first.

    >>> x = torch.randn(1, 2, 5, 4)
    >>> ReformerAttention(num_heads=2, head_dim=4, buckets=2)(x, x, x, is_causal=True).shape
    torch.Size([1, 2, 5, 4])
    """

    name = "reformer"
    linear = True
    reads = ("query",)

    def __init__(
        self,
        *,
        num_heads: int,
        head_dim: int,
        max_length: int | None = None,
        rounds: int = 4,
        chunk: int = 64,
        buckets: int | None = None,
        redraw_every: int | None = None,
    ):
        super().__init__()
        check_positive(rounds=rounds, chunk=chunk)
        self.buckets = 2 * count_blocks(required_length(self.name, max_length), chunk) if buckets is None else buckets
        if self.buckets < 2 or self.buckets % 2:
            raise ValueError(f"reformer attention needs an even number of buckets, 2 or more, got {buckets}.")
        self.chunk = chunk
        self.rounds = rounds
        self.directions = RandomDirections(num_heads * rounds, self.buckets // 2, head_dim, redraw_every)

    def redraw(self) -> None:
        """Draw new hashes."""
        self.directions.redraw()

    def hash(self, x: Tensor) -> Tensor:
        """The bucket of every token in every round, (B, H, R, N)."""
        directions = self.directions().unflatten(0, (-1, self.rounds)).to(x.dtype)
        scores = x[:, :, None] @ directions.mT
        return torch.cat([scores, -scores], -1).argmax(-1)

    def attend(self, query, key, value, is_causal: bool, query_mask: Tensor | None, key_mask: Tensor | None) -> Tensor:
        return super().attend(query, query, value, is_causal, query_mask, key_mask)

    def attend_in_order(self, query, key, value, is_causal: bool, sources: Tensor, lengths: Tensor) -> Tensor:
        dtype, length, heads = sum_dtype(query), query.shape[2], query.shape[1]
        chunk = min(self.chunk, length)
        shared = torch.where(sources, key, query).to(dtype)  # a token may be a source only
        # padding goes behind the last bucket, where it moves no chunk
        padding = torch.arange(length, device=query.device) >= lengths[:, None, None, None]
        bucket = self.hash(shared).masked_fill(padding, self.buckets)
        order = bucket.argsort(dim=-1, stable=True)  # (B, H, R, N)
        place = order.argsort(dim=-1)

        def chunks(x: Tensor) -> Tensor:
            """(B, H, 1 or R, N, D) sorted by bucket and cut, (B, H·R, T, C, D)."""
            index = order[..., None].expand(-1, -1, -1, -1, x.shape[-1])
            return split(x.expand(*order.shape, -1).gather(3, index).flatten(1, 2), chunk)

        q, k, v, s = (chunks(x[:, :, None]) for x in (shared, F.normalize(shared, dim=-1), value.to(dtype), sources))
        k, v, s = (neighbours(x, 1, 0) for x in (k, v, s))
        spot = torch.stack([bucket, place], -1)
        own = chunks(spot)
        seen = s.mT & self.meet(own, is_causal)
        # a pair that meets in several rounds must count once when these are merged
        times = torch.zeros(seen.shape, device=query.device, dtype=dtype)
        for nth in range(self.rounds):
            times += self.meet(chunks(spot[:, :, nth, None]), is_causal)
        itself = own[..., 1, None] == neighbours(own, 1, 0)[..., None, :, 1]
        logits = q @ k.mT * q.shape[-1] ** -0.5 - times.clamp_min(1).log() - SELF_PENALTY * itself
        empty = ~seen.any(-1, keepdim=True)
        logits = logits.masked_fill(~seen, -torch.inf).masked_fill(empty, 0)
        total = logits.logsumexp(-1, keepdim=True)
        parts = (logits - total).exp() @ v, total, ~empty

        result, total, seen = (
            join(x, length).unflatten(1, (heads, -1)).gather(3, place[..., None].expand(-1, -1, -1, -1, x.shape[-1]))
            for x in parts
        )
        weights = masked_softmax(total[..., 0].mT, seen[..., 0].mT)  # (B, H, N, R)
        return torch.einsum("bhnr,bhrne->bhne", weights, result).to(query.dtype)

    def meet(self, spot: Tensor, is_causal: bool) -> Tensor:
        """Which queries of a chunk see which of its sources and of those before it, (B, H·R, T, C, S).

        Args:
            spot: (B, H·R, T, C, 2), the bucket of each token and its place in the sorted sequence, in any one round.
        """
        (bucket, place), (near_bucket, near_place) = spot.unbind(-1), neighbours(spot, 1, 0).unbind(-1)
        if not is_causal:
            place, near_place = place // self.chunk, near_place // self.chunk
        back = place[..., None] - near_place[..., None, :]
        reach = self.chunk if is_causal else 1
        return (bucket[..., None] == near_bucket[..., None, :]) & (back >= 0) & (back <= reach)
