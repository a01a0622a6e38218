"""Performer: linear attention with random features that approximate softmax, or with ReLU features as in LRA.

Linear in time and memory.

Shapes: B batch, H heads, N queries, M keys, D features of a head, E values, R random features, T chunks of C tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .directions import RandomDirections
from .linear import CHUNK, causal_product
from .registry import Mechanism, register
from .tokens import valid


@register
class PerformerAttention(Mechanism):
    """FAVOR+ (Choromanski et al., 2021): features φ(x)_r = exp(ω_r·x − ‖x‖²/2) of queries and keys divided by d^¼.

    The expectation of φ(q)·φ(k) over the random directions ω is proportional to exp(q·k/√d). The directions are
    orthogonal to one another and shared by all heads.

    For stability, maxima are subtracted from the exponents; they cancel in the normalisation. From the exponents of the
    keys we subtract the maximum of each feature over the keys that a query attends to, which is added to the exponents
    of the query, and from these their maximum over the features. The normaliser is then at least 1, so the small
    constant that the released code adds to every feature is not needed.

    Args:
        features: R, number of random features.
        redraw_every: number of calls in training mode between draws of the directions, such as 1000; None keeps the
            first draw.

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
        if key_mask is not None:
            k = k.masked_fill(~key_mask[:, None, :, None], torch.finfo(k.dtype).min)
        # the column of ones gives the normaliser
        v = valid(F.pad(value, (0, 1), value=1.0), key_mask)
        product = causal_exponential_product(q, k, v) if is_causal else exponential_product(q, k, v)
        # the normaliser is 0 only for a query without sources
        normaliser = product[..., -1:].clamp_min(torch.finfo(product.dtype).tiny)
        return (product[..., :-1] / normaliser).to(query.dtype)


def exponents(x: Tensor, directions: Tensor) -> Tensor:
    """Return ω_r·x̃ − ‖x̃‖²/2 with x̃ = x / d^¼, (B, H, N, R), for directions ω (R, D)."""
    x = x * x.shape[-1] ** -0.25
    return x @ directions.to(x.dtype).mT - x.square().sum(-1, keepdim=True) / 2


def exponential_product(a: Tensor, b: Tensor, v: Tensor) -> Tensor:
    """Return c_n Σ_m Σ_r exp(a_nr + b_mr) v_m for a (B, H, N, R), b (B, H, M, R), v (B, H, M, E).

    The constant c_n of each row makes its largest c_n exp(a_nr + b_mr) equal to 1.
    """
    highest = b.detach().amax(2, keepdim=True)
    a = a + highest
    return (a - a.detach().amax(-1, keepdim=True)).exp() @ ((b - highest).exp().mT @ v)


def causal_exponential_product(a: Tensor, b: Tensor, v: Tensor) -> Tensor:
    """Return `exponential_product` with the sum over sources m ≤ n only.

    Earlier chunks contribute through a running state. Within a chunk, a matrix product gives the contribution of the
    first half to the second half, and each half is divided again in the same way: no maximum of keys then includes a
    key after the query.
    """
    length = a.shape[2]
    chunk = min(CHUNK, 1 << max(length - 1, 0).bit_length())
    a, b, v = (F.pad(x, (0, 0, 0, -length % chunk)).unflatten(2, (-1, chunk)) for x in (a, b, v))  # (B, H, T, C, …)
    inside = b.detach().cummax(3).values
    after = inside[..., -1, :].cummax(2).values  # (B, H, T, R)
    before = F.pad(after[:, :, :-1], (0, 0, 1, 0), value=torch.finfo(b.dtype).min)
    a = a - (a.detach() + torch.maximum(inside, before[..., None, :])).amax(-1, keepdim=True)

    memory = (b - after[..., None, :]).exp().mT @ v  # (B, H, T, R, E)
    state, states = torch.zeros_like(memory[:, :, 0]), []
    for decay, added in zip((before - after).exp()[..., None].unbind(2), memory.unbind(2), strict=True):
        states.append(state)
        state = decay * state + added
    result = (a + before[..., None, :]).exp() @ torch.stack(states, 2) + (a + b).exp().sum(-1, keepdim=True) * v
    half = chunk // 2
    while half:
        queries = a.unflatten(3, (-1, 2, half))[..., 1, :, :]  # (B, H, T, C / 2·half, half, …)
        keys, values = (x.unflatten(3, (-1, 2, half))[..., 0, :, :] for x in (b, v))
        highest = keys.detach().amax(-2, keepdim=True)
        part = (queries + highest).exp() @ (keys - highest).exp().mT @ values
        result = result + F.pad(part, (0, 0, half, 0)).flatten(3, 4)
        half //= 2
    return result.flatten(2, 3)[:, :, :length]


@register
class PerformerReluAttention(Mechanism):
    """The deterministic variant in LRA's released code: φ(x) = ReLU(x) + 1e-3, without random directions or scaling.

    >>> x = torch.randn(1, 2, 5, 4)
    >>> PerformerReluAttention()(x, x, x).shape
    torch.Size([1, 2, 5, 4])
    """

    name = "performer-relu"
    linear = True
    eps = 1e-3  # added to every feature, as published

    def attend(self, query, key, value, is_causal: bool, query_mask: Tensor | None, key_mask: Tensor | None) -> Tensor:
        q, k = valid(query, query_mask).relu() + self.eps, valid(valid(key, key_mask).relu() + self.eps, key_mask)
        v = F.pad(valid(value, key_mask), (0, 1), value=1.0)
        product = causal_product(q, k, v) if is_causal else q @ (k.mT @ v)
        # products of features are at least eps², so only the sum of a query without sources is smaller
        normaliser = product[..., -1:].clamp_min(self.eps**2)
        return (product[..., :-1] / normaliser).to(query.dtype)
