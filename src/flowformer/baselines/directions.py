"""Random directions for random features and hashes; a state dict reproduces them and all later draws."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from .._utils import check_positive


class RandomDirections(nn.Module):
    """Gaussian vectors (G, F, D), returned by `forward`; each block of D vectors of a group is orthogonal.

    The seed of the first draw comes from torch's global generator, so that layers differ and `torch.manual_seed` makes
    them reproducible. The seed of the next draw is a buffer, so that a module loaded from a state dict makes the same
    draws as the saved one.

    Args:
        groups: G, number of independent sets of directions.
        features: F, number of directions in a set.
        dim: D, dimension of a direction.
        redraw_every: number of calls in training mode between draws; None keeps the first draw. With gradient
            checkpointing, a layer that runs n times per update needs a multiple of n.

    >>> directions = RandomDirections(2, 5, 4)
    >>> directions.redraw()
    >>> directions().shape
    torch.Size([2, 5, 4])
    """

    vectors: Tensor
    seed: Tensor
    calls: Tensor

    def __init__(self, groups: int, features: int, dim: int, redraw_every: int | None = None) -> None:
        super().__init__()
        check_positive(features=features)
        if redraw_every is not None and redraw_every < 1:
            raise ValueError(f"redraw_every must be a positive number of calls, or None for never, got {redraw_every}.")
        self.redraw_every = redraw_every
        self.register_buffer("vectors", torch.empty(groups, features, dim))
        self.register_buffer("seed", torch.randint(2**62, ()))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        if not self.seed.is_meta:
            self.redraw()

    def forward(self) -> Tensor:
        # Do not count or redraw during a backward pass (graph task id other than -1): gradient checkpointing recomputes
        # the layer there and needs the directions of the forward pass. On the meta device there is nothing to draw.
        if (
            self.training
            and self.redraw_every is not None
            and not self.calls.is_meta
            and torch._C._current_graph_task_id() == -1
        ):
            calls = int(self.calls)  # read once: on a GPU, it waits for the device
            if calls and calls % self.redraw_every == 0:
                self.redraw()
            self.calls += 1
        return self.vectors

    @torch.no_grad()
    def redraw(self) -> None:
        """Draw new directions."""
        groups, features, dim = self.vectors.shape
        generator = torch.Generator().manual_seed(int(self.seed))
        normal = partial(torch.randn, generator=generator, dtype=torch.float64, device="cpu")
        gaussian = normal(groups, -(-features // dim), dim, dim)
        rotations, triangle = torch.linalg.qr(gaussian)
        # fix the signs of QR, so that the rotation is uniformly distributed
        rotations = rotations * triangle.diagonal(dim1=-2, dim2=-1).sign()[..., None, :]
        rotations = rotations.mT.flatten(1, 2)[:, :features]
        # rows of a rotation have length 1: scale them to lengths of independent Gaussian vectors
        lengths = normal(groups, features, dim).norm(dim=-1)
        # a new tensor: the backward pass of an earlier call may still need the old one
        self.vectors = (rotations * lengths[..., None]).to(self.vectors)
        self.seed.fill_(torch.randint(2**62, (), generator=generator, device="cpu"))
