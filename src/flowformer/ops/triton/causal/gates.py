"""Competition and allocation in the causal kernels, and their gradients.

Shapes as in `forward_flows.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..numerics import LOG_ZERO, add_logs, decay, fast_log_add, log_add, sigmoid
from ..powers import competing_flow, raised_allocation
from .planes import (
    COMPETITION_WEIGHT,
    CONSERVED_OUTGOING,
    INVERSE_COMPETING,
    LOG_OUTGOING,
    RECEIVED,
    RENORMALIZED_RECEIVED,
)


@triton.jit
def running_log_sum(conserved_outgoing, keep, log_sum, clamp, tau, FAST: tl.constexpr):
    """log Σ exp(τ Ô) from the start of the segment up to each token, and up to the last."""
    flow = tl.where(keep, competing_flow(conserved_outgoing, clamp, tau), LOG_ZERO)
    log = tl.associative_scan(flow, 0, fast_log_add) if FAST else tl.associative_scan(flow, 0, log_add)
    log = add_logs(log, log_sum, FAST)
    # non-decreasing, so the maximum is the last
    return log, tl.max(log, 0)


@triton.jit
def compute_competition(
    p_flow, plane, keep, position, log_start, clamp, tau, FAST: tl.constexpr, COMPETITION: tl.constexpr
):
    """c of each source, 0 where masked; p_flow points to the tokens in the first plane of `flows`."""
    competition = tl.zeros(keep.shape, tl.float32) + 1.0
    if COMPETITION != "none":
        flow = competing_flow(tl.load(p_flow + CONSERVED_OUTGOING * plane, mask=keep, other=0.0), clamp, tau)
        if COMPETITION == "softmax":
            log = tl.load(p_flow + LOG_OUTGOING * plane, mask=keep, other=0.0)
            competition = position * tl.exp(flow - add_logs(log_start, log, FAST))
        else:
            competition = sigmoid(flow, False)
    return tl.where(keep, competition, 0.0)


@triton.jit
def allocation_weights(
    inverse_in, conserved_in, keep, inverse_position, gamma,
    FAST: tl.constexpr, ALLOCATION: tl.constexpr, RENORMALIZE: tl.constexpr,
):  # fmt: skip
    """α/(I·D), if RENORMALIZE α alone, and (1 − σ(Î))/D, 0 where masked; `inverse_position` is 1/D."""
    declined = tl.zeros(inverse_position.shape, tl.float32)
    received = tl.where(keep, 1.0, 0.0) if RENORMALIZE else inverse_in * inverse_position
    if ALLOCATION:
        received *= raised_allocation(sigmoid(conserved_in, FAST), gamma)
        declined += tl.where(keep, sigmoid(-conserved_in, FAST) * inverse_position, 0.0)
    return received, declined


@triton.jit
def load_tiles(p_plane, plane, mask, TILES: tl.constexpr):
    """The sum of the planes of several tiles, consecutive from p_plane on."""
    total = tl.zeros(p_plane.shape, tl.float32)
    for tile in range(TILES):
        total += tl.load(p_plane + tile * plane, mask=mask, other=0.0)
    return total


@triton.jit
def load_weights(p_flow, plane, keep, RENORMALIZE: tl.constexpr):
    """α/(I·D), or α/W, and c, as the forward pass has stored them; 0 where masked."""
    WHICH: tl.constexpr = RENORMALIZED_RECEIVED if RENORMALIZE else RECEIVED
    received = tl.load(p_flow + WHICH * plane, mask=keep, other=0.0)
    return received, tl.load(p_flow + COMPETITION_WEIGHT * plane, mask=keep, other=0.0)


@triton.jit
def competing_gradient(p_flow, plane, keep, overlap):
    """dW = −⟨dR, R⟩/W, 0 where masked."""
    return -overlap * tl.load(p_flow + INVERSE_COMPETING * plane, mask=keep, other=0.0)


@triton.jit
def combine_decay(later_log, later_sum, log, sum):
    """Combine L and Z of two neighbouring runs of tokens, the later run first. Returns: L and Z of the earlier one."""
    return log, sum + decay(log, later_log) * later_sum
