"""Representations of time series without labels: causal dilated convolutions, trained by a triplet loss.

The method of Franceschi, Dieuleveut and Jaggi, Unsupervised Scalable Representation Learning for Multivariate Time
Series (NeurIPS 2019), the rival that the paper's table calls "Unsuper. (TCN)".

Shapes: B series, N steps, C channels, K negatives, R representation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SLOPE = 0.01  # of the leaky ReLUs


class CausalConv(nn.Module):
    """A dilated convolution that sees no later step, its weights as length times direction (weight normalisation)."""

    # torch's own weight_norm makes modules that cannot be pickled, and an estimator must be
    def __init__(self, in_channels: int, out_channels: int, kernel_size: int, dilation: int) -> None:
        super().__init__()
        start = nn.Conv1d(in_channels, out_channels, kernel_size)
        self.direction, self.bias = start.weight, start.bias
        self.length = nn.Parameter(start.weight.detach().norm(dim=(1, 2), keepdim=True))
        self.dilation = dilation

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, N) to (B, out_channels, N)."""
        weight = self.length * self.direction / self.direction.norm(dim=(1, 2), keepdim=True)
        # taps before the first step would see nothing but the zeros of padding: in late layers that is most of them
        taps = min(weight.shape[-1], -(-x.shape[-1] // self.dilation))
        past = F.pad(x, ((taps - 1) * self.dilation, 0))
        return F.conv1d(past, weight[..., -taps:], self.bias, dilation=self.dilation)


class CausalBlock(nn.Module):
    """Two causal convolutions beside a residual connection."""

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int, dilation: int) -> None:
        super().__init__()
        self.first = CausalConv(in_channels, out_channels, kernel_size, dilation)
        self.second = CausalConv(out_channels, out_channels, kernel_size, dilation)
        same = in_channels == out_channels
        self.residual = nn.Identity() if same else nn.Conv1d(in_channels, out_channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.leaky_relu(self.first(x), SLOPE)
        return F.leaky_relu(self.second(hidden), SLOPE) + self.residual(x)


class TemporalEncoder(nn.Module):
    """One vector for a series of any length: blocks of dilation 1, 2, 4, …, the largest value over time, a linear map.

    Args:
        num_features: C.
        channels: of all blocks but the last.
        depth: number of these blocks.
        kernel_size: of the convolutions.
        last_channels: of the last block, which comes on top.
        representation_dim: R.

    >>> TemporalEncoder(3)(torch.randn(2, 50, 3)).shape
    torch.Size([2, 320])
    """

    def __init__(
        self,
        num_features: int,
        *,
        channels: int = 40,
        depth: int = 10,
        kernel_size: int = 3,
        last_channels: int = 160,
        representation_dim: int = 320,
    ) -> None:
        super().__init__()
        widths = [num_features, *[channels] * depth, last_channels]
        self.blocks = nn.Sequential(
            *(CausalBlock(widths[i], widths[i + 1], kernel_size, 2**i) for i in range(depth + 1)),
        )
        self.head = nn.Linear(last_channels, representation_dim)

    def forward(self, series: Tensor, mask: Tensor | None = None) -> Tensor:
        """(B, N, C) to (B, R); mask (B, N) bool, True = a step. Padding has to come last: it then takes no part."""
        x = self.blocks(series.mT)
        if mask is not None:
            x = x.masked_fill(~mask[:, None], -torch.inf)
        return self.head(x.amax(-1))


class Triplet(NamedTuple):
    """A piece of a series, a piece of that piece, and K pieces of other series, each (length, C)."""

    anchor: Tensor
    positive: Tensor
    negatives: list[Tensor]


def draw_triplet(series: Sequence[Tensor], index: int, num_negatives: int) -> Triplet:
    """A triplet around series[index]; all lengths, places and other series are uniformly random."""
    whole = series[index]
    positive_length = _uniform(1, len(whole))
    anchor = _piece(whole, _uniform(positive_length, len(whole)))
    # a single series can only be told apart from itself
    steps = [_uniform(1, max(len(series) - 1, 1)) for _ in range(num_negatives)]
    others = [series[(index + step) % len(series)] for step in steps]
    return Triplet(
        anchor, _piece(anchor, positive_length), [_piece(other, _uniform(1, len(other))) for other in others]
    )


def triplet_loss(anchor: Tensor, positive: Tensor, negatives: Tensor) -> Tensor:
    """The mean over B of −log σ(a·p) − Σ_k log σ(−a·n_k), for representations (B, R), (B, R) and (B, K, R)."""
    near = F.logsigmoid((anchor * positive).sum(-1))
    far = F.logsigmoid(-(negatives * anchor[:, None]).sum(-1)).sum(-1)
    return -(near + far).mean()


def _uniform(low: int, high: int) -> int:
    """Both ends count."""
    return int(torch.randint(low, high + 1, ()))


def _piece(series: Tensor, length: int) -> Tensor:
    start = _uniform(0, len(series) - length)
    return series[start : start + length]
