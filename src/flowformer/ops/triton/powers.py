"""The learned exponents of each head inside kernels: τ of the competition and γ of the allocation.

`powers` is (2, H): τ of all heads, then γ. Without powers the kernels get None, which compiles to nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .numerics import clamped


@triton.jit
def load_tau(p_powers, head):
    return tl.load(p_powers + head)


@triton.jit
def load_gamma(p_powers, head, heads):
    return tl.load(p_powers + heads + head)


@triton.jit
def competing_flow(conserved_outgoing, clamp, tau):
    """τ Ô after the clamp."""
    flow = clamped(conserved_outgoing, -clamp, clamp)
    if tau is not None:
        flow *= tau
    return flow


@triton.jit
def raised_allocation(sigma, gamma):
    """σ^γ, for σ above 0."""
    if gamma is not None:
        sigma = tl.exp(gamma * tl.log(sigma))
    return sigma
