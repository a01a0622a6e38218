"""Reformer: tokens attend to tokens in the same bucket of a locality-sensitive hash. O(N log N).

Shapes: B batch, H heads, N tokens, D features, E values, R rounds, T chunks of C tokens, S = 2C sources of a chunk.
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

SELF_PENALTY = 1e5  # subtracted from the logit of a token with itself


@register
class ReformerAttention(BlockMechanism):
    """LSH attention (Kitaev et al., 2020) in several rounds.

    The key of a token is its query, normalised to length 1; the keys passed are not used.

    Each round hashes the tokens by h(x) = argmax [xΩ; −xΩ], sorts them by bucket and cuts the sorted sequence into
    chunks. A token attends to the tokens of its bucket in its own and in the previous chunk. The rounds are merged into
    one softmax over the union of the tokens attended to. A token attends to itself only if there is no other token to
    attend to.

    The boundaries of chunks depend on the whole sequence, later tokens included. In causal attention, a token therefore
    attends to the `chunk` tokens before it in its bucket instead.

    Args:
        num_heads, head_dim: sizes of the hash directions.
        max_length: longest sequence; determines the number of buckets if `buckets` is None.
        rounds: R, number of hashes. The Long-Range Arena uses 1.
        chunk: C, number of tokens of a chunk.
        buckets: number of buckets, even; None means two per chunk of the longest sequence, as published. The Long-Range
            Arena uses 10.
        redraw_every: number of calls in training mode between draws of the hashes; the paper uses 1. None keeps the
            first draw.

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
        """Return the bucket of each token in each round, (B, H, R, N)."""
        directions = self.directions().unflatten(0, (-1, self.rounds)).to(x.dtype)
        scores = x[:, :, None] @ directions.mT
        return torch.cat([scores, -scores], -1).argmax(-1)

    def attend(self, query, key, value, is_causal: bool, query_mask: Tensor | None, key_mask: Tensor | None) -> Tensor:
        return super().attend(query, query, value, is_causal, query_mask, key_mask)

    def attend_in_order(self, query, key, value, is_causal: bool, sources: Tensor, lengths: Tensor) -> Tensor:
        dtype, length, heads = sum_dtype(query), query.shape[2], query.shape[1]
        chunk = min(self.chunk, length)
        shared = torch.where(sources, key, query).to(dtype)  # the query of a token that is only a source is 0
        # padding gets an extra bucket after all others, so that it does not shift the chunks
        padding = torch.arange(length, device=query.device) >= lengths[:, None, None, None]
        bucket = self.hash(shared).masked_fill(padding, self.buckets)
        order = bucket.argsort(dim=-1, stable=True)  # (B, H, R, N)
        sorted_position = order.argsort(dim=-1)

        def chunks(x: Tensor) -> Tensor:
            """Sort (B, H, 1 or R, N, D) by bucket and cut it into chunks, (B, H·R, T, C, D)."""
            index = order[..., None].expand(-1, -1, -1, -1, x.shape[-1])
            return split(x.expand(*order.shape, -1).gather(3, index).flatten(1, 2), chunk)

        q, k, v, s = (chunks(x[:, :, None]) for x in (shared, F.normalize(shared, dim=-1), value.to(dtype), sources))
        k, v, s = (neighbours(x, 1, 0) for x in (k, v, s))
        location = torch.stack([bucket, sorted_position], -1)
        own_location = chunks(location)
        seen = s.mT & self.meet(own_location, is_causal)
        # a pair that meets in n rounds is in the merged softmax n times: subtract log n from its logits
        times_met = torch.zeros(seen.shape, device=query.device, dtype=dtype)
        for nth in range(self.rounds):
            # not in place, which fails under vmap: the zeros are shared by all its examples
            times_met = times_met + self.meet(chunks(location[:, :, nth, None]), is_causal)
        itself = own_location[..., 1, None] == neighbours(own_location, 1, 0)[..., None, :, 1]
        logits = q @ k.mT * q.shape[-1] ** -0.5 - times_met.clamp_min(1).log() - SELF_PENALTY * itself
        empty = ~seen.any(-1, keepdim=True)
        logits = logits.masked_fill(~seen, -torch.inf).masked_fill(empty, 0)
        total = logits.logsumexp(-1, keepdim=True)
        parts = (logits - total).exp() @ v, total, ~empty

        def unsorted(x: Tensor) -> Tensor:
            """Undo `chunks`: (B, H·R, T, C, D) to (B, H, R, N, D)."""
            index = sorted_position[..., None].expand(-1, -1, -1, -1, x.shape[-1])
            return join(x, length).unflatten(1, (heads, -1)).gather(3, index)

        result, total, seen = map(unsorted, parts)
        weights = masked_softmax(total[..., 0].mT, seen[..., 0].mT)  # (B, H, N, R)
        return torch.einsum("bhnr,bhrne->bhne", weights, result).to(query.dtype)

    def meet(self, location: Tensor, is_causal: bool) -> Tensor:
        """Return which queries of a chunk attend to which tokens of this and the previous chunk, (B, H·R, T, C, S).

        Args:
            location: (B, H·R, T, C, 2), bucket of each token and its position in the sorted sequence, in one round,
                which may be another round than the one by which the chunks were sorted.
        """
        (bucket, position), (near_bucket, near_position) = location.unbind(-1), neighbours(location, 1, 0).unbind(-1)
        if not is_causal:  # compare chunks instead of positions
            position, near_position = position // self.chunk, near_position // self.chunk
        distance = position[..., None] - near_position[..., None, :]
        reach = self.chunk if is_causal else 1
        return (bucket[..., None] == near_bucket[..., None, :]) & (distance >= 0) & (distance <= reach)
