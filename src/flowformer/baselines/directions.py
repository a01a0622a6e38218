"""Random directions for random features: drawn from a generator whose state travels with the module."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class RandomDirections(nn.Module):
    """Gaussian vectors (G, F, D), orthogonal to one another in blocks of D.

    The state of the generator is a buffer: the same seed gives the same directions, and a module loaded from a state
    dict goes on to redraw what the saved one would have.

    Args:
        groups: G, independent sets of directions.
        features: F, directions in a set.
        dim: D.

    >>> directions = RandomDirections(2, 5, 4, seed=0)
    >>> directions.redraw()
    >>> directions.vectors.shape
    torch.Size([2, 5, 4])
    """

    vectors: Tensor
    generator_state: Tensor

    def __init__(self, groups: int, features: int, dim: int, seed: int) -> None:
        super().__init__()
        if features < 1:
            raise ValueError(f"features must be positive, got {features}.")
        self.register_buffer("generator_state", torch.Generator().manual_seed(seed).get_state())
        self.register_buffer("vectors", torch.empty(groups, features, dim))
        self.redraw()

    @torch.no_grad()
    def redraw(self) -> None:
        """Takes the next draw."""
        groups, features, dim = self.vectors.shape
        generator = torch.Generator()
        generator.set_state(self.generator_state.cpu())
        blocks = -(-features // dim)
        gaussian = torch.randn(groups, blocks, dim, dim, generator=generator, dtype=torch.float64)
        rotations, triangle = torch.linalg.qr(gaussian)
        # the signs that QR happens to choose favour some directions: undone, all are equally likely
        rotations = rotations * triangle.diagonal(dim1=-2, dim2=-1).sign()[..., None, :]
        rotations = rotations.mT.flatten(1, 2)[:, :features]
        # a row of a rotation has length 1: give it that of a Gaussian vector
        lengths = torch.randn(groups, features, dim, generator=generator, dtype=torch.float64).norm(dim=-1)
        self.vectors.copy_(rotations * lengths[..., None])
        self.generator_state.copy_(generator.get_state())
