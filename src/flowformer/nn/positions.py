"""Position embeddings: sinusoidal or learned vectors that are added to tokens, or rotations of queries and keys.

Shapes: B batch, N tokens, W width, H heads, D head_dim.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from ..ops.context.exchange import Group


class SinusoidalPositions(nn.Module):
    """Adds sin(p / base^(2i/W)) and the cosine of the same angle, interleaved, to a token at any position p.

    The angles are computed in float32, or in float64 for float64 tokens. An odd width ends on a sine.

    >>> SinusoidalPositions(4)(torch.zeros(1, 2, 4))
    tensor([[[0.0000, 1.0000, 0.0000, 1.0000],
             [0.8415, 0.5403, 0.0100, 0.9999]]])
    """

    def __init__(self, dim: int, base: float = 10000.0) -> None:
        super().__init__()
        self.dim = dim
        self.base = base

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """Return x (B, N, W) plus its position embeddings.

        Args:
            positions: (N,) or (B, N) integers; None counts from 0. See `token_positions`.
        """
        _check(x, positions, self.dim)
        if positions is None:
            positions = torch.arange(x.shape[1], device=x.device)
        even = torch.arange(0, self.dim, 2, device=x.device, dtype=torch.promote_types(x.dtype, torch.float32))
        angle = positions[..., None] * self.base ** (-even / self.dim)
        table = torch.stack([angle.sin(), angle.cos()], -1).flatten(-2)[..., : self.dim]
        return x + table.to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.dim}, base={self.base}"


class FairseqPositions(nn.Module):
    """Adds the sinusoids of fairseq: sines in the first half of the width, cosines in the second, first position 2.

    The wavelengths grow from 2π to 2π·base, both included. An odd width ends on a 0.

    >>> FairseqPositions(4, base=10.0)(torch.zeros(1, 2, 4))
    tensor([[[ 0.9093,  0.1987, -0.4161,  0.9801],
             [ 0.1411,  0.2955, -0.9900,  0.9553]]])
    """

    def __init__(self, dim: int, base: float = 10000.0) -> None:
        super().__init__()
        self.dim = dim
        self.base = base

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """Return x (B, N, W) plus its position embeddings; same arguments as for `SinusoidalPositions`."""
        _check(x, positions, self.dim)
        if positions is None:
            positions = torch.arange(x.shape[1], device=x.device)
        half = self.dim // 2
        index = torch.arange(half, device=x.device, dtype=torch.promote_types(x.dtype, torch.float32))
        # fairseq counts positions from padding_idx + 1, and its dictionary has the padding at index 1
        angle = (positions + 2)[..., None] * self.base ** (-index / max(half - 1, 1))
        table = F.pad(torch.cat([angle.sin(), angle.cos()], -1), (0, self.dim % 2))
        return x + table.to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.dim}, base={self.base}"


class LearnedPositions(nn.Module):
    """Adds a learned vector to each of the first `max_length` positions.

    Args:
        max_length: number of positions; a longer sequence is an error.
        dim: W.
        std: standard deviation of the normal distribution that initialises the vectors.

    >>> LearnedPositions(16, 4)(torch.zeros(1, 2, 4)).shape
    torch.Size([1, 2, 4])
    """

    def __init__(
        self,
        max_length: int,
        dim: int,
        std: float = 0.02,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.max_length = max_length
        self.dim = dim
        self.std = std
        self.weight = nn.Parameter(torch.empty(max_length, dim, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """Return x (B, N, W) plus its position embeddings.

        Args:
            positions: (N,) or (B, N) integers below max_length; None counts from 0. See `token_positions`.
        """
        _check(x, positions, self.dim)
        if positions is None:
            self._check_length(x.shape[1])
            return x + self.weight[: x.shape[1]].to(x.dtype)
        # on a GPU this check would synchronise every step; there the lookup itself fails
        if positions.device.type == "cpu" and not torch.compiler.is_compiling() and positions.numel():
            self._check_length(int(positions.max()) + 1)
        return x + F.embedding(positions, self.weight).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.max_length}, {self.dim}"

    def _check_length(self, length: int) -> None:
        if length > self.max_length:
            raise ValueError(
                f"got {length} positions, but there are only {self.max_length} learned ones. Shorten the sequence, "
                "build the model for more, or use SinusoidalPositions."
            )


class RotaryPositions(nn.Module):
    """Rotates the features i and i + D/2 of a head at position p by the angle p / base^(2i/D).

    The dot product of a rotated query and key depends only on the distance of their tokens. The flows of Flow-Attention
    depend on the absolute positions, since φ is applied after the rotation. Count positions from the first token of a
    sequence, as `token_positions` does.

    >>> RotaryPositions(4)(torch.tensor([1.0, 1.0, 0.0, 0.0]).expand(1, 1, 2, 4))
    tensor([[[[1.0000, 1.0000, 0.0000, 0.0000],
              [0.5403, 0.9999, 0.8415, 0.0100]]]])
    """

    def __init__(self, dim: int, base: float = 10000.0) -> None:
        super().__init__()
        if dim % 2:
            raise ValueError(f"rotary positions turn pairs of features, so head_dim must be even, got {dim}.")
        if not base > 0:
            raise ValueError(f"the base of rotary positions must be positive, got {base}.")
        self.dim = dim
        self.base = base

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """Return x (B, H, N, D), rotated.

        Args:
            positions: (N,) or (B, N) integers; None counts from 0. See `token_positions`.
        """
        if positions is None:
            positions = torch.arange(x.shape[2], device=x.device)
        even = torch.arange(0, self.dim, 2, device=x.device, dtype=torch.promote_types(x.dtype, torch.float32))
        angle = positions[..., None, :, None] * self.base ** (-even / self.dim)  # (B, 1, N, D/2)
        cos, sin = angle.cos(), angle.sin()
        first, second = x.to(even.dtype).chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.dim}, base={self.base}"


def token_positions(mask: Tensor, past: Tensor | None = None, group: Group | None = None) -> Tensor:
    """Return the position of each token in its sequence, not counting padding on either side.

    Args:
        mask: (B, N) bool, True = a token.
        past: (B,) integers, number of preceding tokens, such as `FlowState.count`; None means 0.
        group: process group over whose ranks the sequences are split; the tokens of lower ranks are counted too.

    Returns: (B, N) integers from 0; the positions of padding are valid but arbitrary.

    >>> token_positions(torch.tensor([[False, True, True], [True, True, False]])).tolist()
    [[0, 0, 1], [0, 1, 1]]
    """
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    if group is not None:
        # imported here, since few callers need it
        from ..ops.context.exchange import tokens_before

        positions = positions + tokens_before(mask.sum(-1), group)[:, None]
    return positions if past is None else positions + past[:, None]


def _check(x: Tensor, positions: Tensor | None, dim: int) -> None:
    if x.dim() != 3 or x.shape[-1] != dim:
        raise ValueError(f"tokens must have shape (batch, length, {dim}), got {tuple(x.shape)}.")
    if positions is None:
        return
    if positions.is_floating_point() or positions.dtype == torch.bool:
        raise TypeError(f"positions must be integers, got {positions.dtype}. For a mask pass token_positions(mask).")
    if positions.shape not in (x.shape[1:2], x.shape[:2]):
        raise ValueError(
            f"positions must have shape {tuple(x.shape[1:2])} or {tuple(x.shape[:2])}, got {tuple(positions.shape)}."
        )
