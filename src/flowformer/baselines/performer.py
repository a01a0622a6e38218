"""Performer: softmax attention by random features, or by ReLU features as in LRA. Linear in time and memory.

Shapes: B batch, H heads, N queries, M keys, D features of a head, R random features.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .decay import decayed_product
from .directions import RandomDirections
from .linear import causal_product
from .registry import Mechanism, register
from .tokens import valid


@register
class PerformerAttention(Mechanism):
    """FAVOR+ (Choromanski et al., 2021): features φ(x)_r = exp(ω_r·x − ‖x‖²/2) of queries and keys divided by d^¼.

    φ(q)·φ(k) is exp(q·k/√d) on average over the random directions ω, orthogonal to one another and shared by all heads.

    Exponents are taken relative to their maximum: that of the token for queries, that of all keys, or of all keys so
    far, for keys. It cancels, and makes the small constant that released code adds to every feature needless.

    Args:
        features: R.
        redraw_every: calls in training mode between draws of the directions, such as 1000; None keeps the first.

    >>> x = torch.randn(1, 2, 5, 4)
    >>> performer = PerformerAttention(head_dim=4)
    >>> performer.redraw()
    >>> performer(x, x, x, is_causal=True).shape
    torch.Size([1, 2, 5, 4])
    """

    name = "performer"
    linear = True

    def __init__(
        self, *, head_dim: int, features: int = 256, redraw_every: int | None = None, **sizes: int | None
    ) -> None:
        super().__init__(**sizes)
        self.directions = RandomDirections(1, features, head_dim, redraw_every)

    def redraw(self) -> None:
        """Draw new random directions."""
        self.directions.redraw()

    def attend(self, query, key, value, is_causal: bool, query_mask: Tensor | None, key_mask: Tensor | None) -> Tensor:
        directions = self.directions()[0]
        q, k = (exponents(valid(x, mask), directions) for x, mask in ((query, query_mask), (key, key_mask)))
        v = F.pad(valid(value, key_mask), (0, 1), value=1.0)  # the last column sums to the normaliser
        q = (q - q.detach().amax(-1, keepdim=True)).exp()
        nothing = torch.finfo(k.dtype).min
        highest = k.detach().amax(-1)  # (B, H, M)
        if key_mask is not None:
            highest = highest.masked_fill(~key_mask[:, None], nothing)
        highest = highest.cummax(-1).values if is_causal else highest.amax(-1, keepdim=True)
        k = k - highest[..., None]
        if key_mask is not None:
            k = k.masked_fill(~key_mask[:, None, :, None], -torch.inf)
        k = k.exp()
        if is_causal:
            before = F.pad(highest[..., :-1], (1, 0), value=nothing)
            # what came before a new maximum shrinks; before the first token there was nothing to shrink
            product = decayed_product(q, k, v, (before - highest).masked_fill(before == nothing, 0))
        else:
            product = q @ (k.mT @ v)
        normaliser = product[..., -1:]
        normaliser = normaliser.masked_fill(normaliser < torch.finfo(q.dtype).tiny, 1)
        return (product[..., :-1] / normaliser).to(query.dtype)


def exponents(x: Tensor, directions: Tensor) -> Tensor:
    """ω_r·x − ‖x‖²/2 of x divided by d^¼, (B, H, N, R), for directions ω (R, D)."""
    x = x * x.shape[-1] ** -0.25
    return x @ directions.to(x.dtype).mT - x.square().sum(-1, keepdim=True) / 2


@register
class PerformerReluAttention(Mechanism):
    """The deterministic form of LRA's released code: φ(x) = ReLU(x) + 1e-3, without random directions or scaling.

    >>> x = torch.randn(1, 2, 5, 4)
    >>> PerformerReluAttention()(x, x, x).shape
    torch.Size([1, 2, 5, 4])
    """

    name = "performer-relu"
    linear = True
    eps = 1e-3  # of every feature, as published

    def attend(self, query, key, value, is_causal: bool, query_mask: Tensor | None, key_mask: Tensor | None) -> Tensor:
        q, k = valid(query, query_mask).relu() + self.eps, valid(valid(key, key_mask).relu() + self.eps, key_mask)
        v = F.pad(valid(value, key_mask), (0, 1), value=1.0)
        product = causal_product(q, k, v) if is_causal else q @ (k.mT @ v)
        # only a query with no source has a sum below that of two features of 1e-3
        normaliser = product[..., -1:].clamp_min(self.eps**2)
        return (product[..., :-1] / normaliser).to(query.dtype)
