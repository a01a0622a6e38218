"""Random feature attention (RFA), with and without a gate. Linear in time and memory.

Shapes: B batch, H heads, N queries, M keys, D features of a head, R random directions.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .decay import decayed_product
from .directions import RandomDirections
from .linear import causal_product
from .registry import Mechanism, register
from .tokens import valid


@register
class RFAAttention(Mechanism):
    """RFA (Peng et al., 2021): φ(Q) (φ(K)ᵀV) / φ(Q) Σφ(K) with φ(x) = [sin(w·x̂), cos(w·x̂)]/√R of normalised x̂.

    The expectation of φ(q)·φ(k) is the Gaussian kernel of q̂ and k̂, which is proportional to exp(q̂·k̂). Each head has
    random directions w, multiplied by a learned width σ for each of the D features, initialised to 1.

    Args:
        features: R, number of random directions; φ has 2R features.
        redraw_every: number of calls in training mode between draws of the directions; the paper uses 1. None keeps the
            first draw.

    >>> x = torch.randn(1, 2, 5, 4)
    >>> RFAAttention(num_heads=2, head_dim=4)(x, x, x, is_causal=True).shape
    torch.Size([1, 2, 5, 4])
    """

    name = "rfa"
    linear = True
    eps = 1e-3  # lower bound of the normaliser, since a sum of random-feature kernels may be negative

    def __init__(
        self, *, num_heads: int, head_dim: int, features: int = 64, redraw_every: int | None = None, **sizes: int | None
    ) -> None:
        super().__init__(**sizes)
        self.directions = RandomDirections(num_heads, features, head_dim, redraw_every)
        self.sigma = nn.Parameter(torch.ones(num_heads, 1, head_dim))

    def redraw(self) -> None:
        """Draw new random directions."""
        self.directions.redraw()

    def attend(self, query, key, value, is_causal: bool, query_mask: Tensor | None, key_mask: Tensor | None) -> Tensor:
        q, k = valid(query, query_mask), valid(key, key_mask)
        w = self.sigma.to(q.dtype) * self.directions().to(q.dtype)  # (H, R, D)
        q, k = random_features(q, w), valid(random_features(k, w), key_mask)
        v = F.pad(valid(value, key_mask), (0, 1), value=1.0)  # the column of ones gives the normaliser
        product = self._product(q, k, v, key, key_mask) if is_causal else q @ (k.mT @ v)
        return (product[..., :-1] / product[..., -1:].clamp_min(self.eps)).to(query.dtype)

    def _product(self, q: Tensor, k: Tensor, v: Tensor, key: Tensor, key_mask: Tensor | None) -> Tensor:
        return causal_product(q, k, v)


def random_features(x: Tensor, w: Tensor) -> Tensor:
    """Return [sin(w·x̂), cos(w·x̂)]/√R with x̂ = x/‖x‖, (B, H, N, 2R), for directions w (H, R, D)."""
    angle = F.normalize(x, dim=-1) @ w.mT
    return torch.cat([angle.sin(), angle.cos()], -1) * w.shape[1] ** -0.5


@register
class GatedRFAAttention(RFAAttention):
    """RFA with a gate: S_t = g_t S_{t−1} + (1 − g_t) φ(k_t)ᵀ v_t, and likewise for the sum of φ(k).

    The gate g_t of each head is the sigmoid of a learned affine function of the key. In the paper it is a function of
    the layer's input, of which the key is a projection. There is no bidirectional form, since a gate needs an order.

    Args: as for `RFAAttention`.

    >>> x = torch.randn(1, 2, 5, 4)
    >>> GatedRFAAttention(num_heads=2, head_dim=4)(x, x, x, is_causal=True).shape
    torch.Size([1, 2, 5, 4])
    """

    name = "rfa-gate"
    bidirectional = False
    cross = False

    def __init__(
        self, *, num_heads: int, head_dim: int, features: int = 64, redraw_every: int | None = None, **sizes: int | None
    ) -> None:
        super().__init__(num_heads=num_heads, head_dim=head_dim, features=features, redraw_every=redraw_every, **sizes)
        self.gate_weight = nn.Parameter(torch.empty(num_heads, head_dim, 1))
        self.gate_bias = nn.Parameter(torch.zeros(num_heads, 1, 1))
        nn.init.normal_(self.gate_weight, std=head_dim**-0.5)

    def _product(self, q: Tensor, k: Tensor, v: Tensor, key: Tensor, key_mask: Tensor | None) -> Tensor:
        gate = valid(key, key_mask) @ self.gate_weight.to(q.dtype) + self.gate_bias.to(q.dtype)  # (B, H, M, 1)
        # log decay 0 for padding: the state does not decay there
        log_decay = valid(F.logsigmoid(gate), key_mask)[..., 0]
        return decayed_product(q, k * (-gate).sigmoid(), v, log_decay)
