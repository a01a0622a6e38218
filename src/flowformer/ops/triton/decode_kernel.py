"""The kernel of `decode.py`."""

from __future__ import annotations

import triton
import triton.language as tl

from .causal.planes import (
    COMPETING_SUM,
    CONSERVED_KEY_SUM,
    CONSERVED_QUERY_SUM,
    COUNT,
    KEY_SUM,
    QUERY_SUM,
    STATE_LOG_OUTGOING,
)
from .features import feature
from .numerics import LOG_ZERO, clamped, log_add, sigmoid


@triton.jit
def decode_kernel(
    p_query, p_key, p_value, p_mask, p_powers, p_result, p_sums, p_memory, p_scalars,
    q_batch, q_head, k_batch, k_head, v_batch, v_head, r_batch, r_head, mask_batch,
    heads, shared, scale, eps, flow_eps, clamp,
    D: tl.constexpr, BLOCK_D: tl.constexpr, E: tl.constexpr, BLOCK_E: tl.constexpr, MAP: tl.constexpr,
    COMPETITION: tl.constexpr, ALLOCATION: tl.constexpr, RENORMALIZE: tl.constexpr,
):  # fmt: skip
    """One token for every head, the state updated in place, except where the token is masked.

    Grid:   (B·H,). A program loops over tiles of E.
    Reads:  Q (B, H, 1, D), K (B, H_kv, 1, D), V (B, H_kv, 1, E), the mask (B, 1), the powers (2, H), the state.
    Writes: R (B, H, 1, E), 0 where masked; the state.
    """
    row = tl.program_id(0).to(tl.int64)
    batch, head = row // heads, row % heads
    columns = tl.arange(0, BLOCK_D)
    inner = columns < D
    p_result += batch * r_batch + head * r_head
    p_value += batch * v_batch + head // shared * v_head
    p_memory += row * (D * E)
    keep = True
    if p_mask is not None:
        keep = tl.load(p_mask + batch * mask_batch) != 0
    if keep:
        q = tl.load(p_query + batch * q_batch + head * q_head + columns, mask=inner, other=0.0)
        k = tl.load(p_key + batch * k_batch + head // shared * k_head + columns, mask=inner, other=0.0)
        q, k = feature(q, scale, MAP, False), feature(k, scale, MAP, False)
        SUMS: tl.constexpr = 5 if RENORMALIZE else 4
        p_vectors, p_state = p_sums + row * (SUMS * D) + columns, p_scalars + row * 3
        seen, old_log = tl.load(p_state + COUNT), tl.load(p_state + STATE_LOG_OUTGOING)
        position = seen + 1.0
        key_sum = tl.load(p_vectors + KEY_SUM * D, mask=inner, other=0.0) + k
        query_sum = tl.load(p_vectors + QUERY_SUM * D, mask=inner, other=0.0) + q
        conserved_key = tl.load(p_vectors + CONSERVED_KEY_SUM * D, mask=inner, other=0.0)
        conserved_query = tl.load(p_vectors + CONSERVED_QUERY_SUM * D, mask=inner, other=0.0)
        incoming = tl.sum(tl.where(inner, (q + eps) * (key_sum + eps), 0.0), 0) + flow_eps
        outgoing = tl.sum(tl.where(inner, (k + eps) * (query_sum + eps), 0.0), 0) + flow_eps
        conserved_key += k * (position / outgoing)
        conserved_query += q * (position / incoming)
        conserved_in = tl.sum(tl.where(inner, (q + eps) * (conserved_key + eps), 0.0), 0) + flow_eps
        conserved_out = tl.sum(tl.where(inner, (k + eps) * (conserved_query + eps), 0.0), 0) + flow_eps
        competition, log = 1.0, old_log
        flow = clamped(conserved_out / position, -clamp, clamp)
        if p_powers is not None:
            flow *= tl.load(p_powers + head)
        if COMPETITION == "softmax":
            log = log_add(flow, tl.where(seen > 0, old_log, LOG_ZERO))
            competition = position * tl.exp(flow - log)
        elif COMPETITION == "sigmoid":
            competition = sigmoid(flow, False)
        if RENORMALIZE:
            competing_sum = tl.load(p_vectors + COMPETING_SUM * D, mask=inner, other=0.0) + k * competition
            incoming = tl.sum(tl.where(inner, (q + eps) * (competing_sum + eps), 0.0), 0) + flow_eps
        received = 1.0 / incoming
        if ALLOCATION:
            allocation = sigmoid(conserved_in / position, False)
            if p_powers is not None:
                allocation = tl.exp(tl.load(p_powers + heads + head) * tl.log(allocation))
            received *= allocation
        # several threads hold the same element of a vector: all must have loaded it before one stores it
        tl.debug_barrier()
        tl.store(p_vectors + KEY_SUM * D, key_sum, mask=inner)
        tl.store(p_vectors + QUERY_SUM * D, query_sum, mask=inner)
        tl.store(p_vectors + CONSERVED_KEY_SUM * D, conserved_key, mask=inner)
        tl.store(p_vectors + CONSERVED_QUERY_SUM * D, conserved_query, mask=inner)
        if RENORMALIZE:
            tl.store(p_vectors + COMPETING_SUM * D, competing_sum, mask=inner)
        tl.store(p_state + COUNT, position)
        tl.store(p_state + STATE_LOG_OUTGOING, log)
        sinks, sources = tl.where(inner, q * received, 0.0), tl.where(inner, k * competition, 0.0)
        for tile in range(0, E, BLOCK_E):
            values = tile + tl.arange(0, BLOCK_E)
            v = tl.load(p_value + values, mask=values < E, other=0.0).to(tl.float32)
            at, there = columns[:, None] * E + values[None, :], inner[:, None] & (values < E)[None, :]
            b_memory = tl.load(p_memory + at, mask=there, other=0.0) + sources[:, None] * v[None, :]
            tl.store(p_memory + at, b_memory, mask=there)
            out = tl.sum(sinks[:, None] * b_memory, 0)
            tl.store(p_result + values, out.to(p_result.dtype.element_ty), mask=values < E)
    else:
        for tile in range(0, E, BLOCK_E):
            values = tile + tl.arange(0, BLOCK_E)
            zeros = tl.zeros([BLOCK_E], tl.float32).to(p_result.dtype.element_ty)
            tl.store(p_result + values, zeros, mask=values < E)
