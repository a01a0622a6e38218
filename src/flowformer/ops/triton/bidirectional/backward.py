"""The backward kernels of bidirectional Flow-Attention, in the order of their launches.

Programs and records are as in `forward.py`; gradients are summed in records too. Math: docs/kernels.md.

Shapes: grad (B, H, N, E) is dR; per token (B·H, N) or (B·H, M), float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..features import feature_gradient
from ..launch import kernel
from ..numerics import clamped, sigmoid
from ..powers import competing_flow, load_gamma, load_tau, raised_allocation
from ..precision import dot_split, dot_tn
from .records import (
    CONSERVED_KEY_SUM,
    CONSERVED_QUERY_SUM,
    FACTOR,
    INVERSE_MASS,
    KEY_SUM,
    QUERY_SUM,
    RATIO,
    REFERENCE,
    load_vector,
    record_at,
    scalar_at,
    sum_segments,
    sum_vector,
    vector_at,
)
from .tokens import (
    identity,
    load_features,
    load_memory,
    load_rows,
    load_valid,
    locate_head,
    locate_tokens,
    store_rows,
    token_at,
)


@kernel
def grad_memory_kernel(
    p_query, p_grad, p_query_mask, p_query_bounds, p_powers, p_records, p_partial, p_incoming, p_allocation, p_overlap,
    p_competing, p_grad_competing, p_grad_powers, p_products,
    q_batch, q_head, q_token, g_batch, g_head, g_token, sinks, heads, segments, scale, eps,
    ALLOCATION: tl.constexpr, WHOLE: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr, ALIGN: tl.constexpr, DENSE: tl.constexpr, MAP: tl.constexpr, FAST: tl.constexpr,
    EYE: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Pass 1: dS = Σ α μ/I · qᵀ dR, the overlap ⟨dR, R⟩ of each sink, and d(Σk/O) = Σ dÎ (q + ε).

    Grid:   (records · segments, tiles of E).
    Reads:  Q, dR; I, α; the finished record of the head. If the result is renormalised, `incoming` is W, and Σ c k
            (`competing`).
    Writes: ⟨dR, R⟩ (B·H, N); dS and d(Σk/O) of each segment's record in `partial`; of a WHOLE head also ⟨S, dS⟩, one
            number for each tile, into `products`. If the result is renormalised, d(Σ c k) of each segment
            (`grad_competing`); with powers, the part dγ = Σ ⟨dR, R⟩ log σ of the segment (`grad_powers`, records ·
            segments, 2).
    """
    q_token = D if DENSE else q_token * ALIGN
    g_token = E if DENSE else g_token * ALIGN
    segment, sequence, head, record, row = locate_head(segments, heads, p_query_bounds is not None, False)
    p_records = record_at(p_records, record, D, E)
    p_own = record_at(p_partial, record * segments + segment, D, E)
    first, count = locate_tokens(p_query_bounds, sequence, sinks, segment, segments, BLOCK)
    p_query = token_at(p_query, sequence, head, first, q_batch * ALIGN, q_head * ALIGN, q_token, p_query_bounds)
    p_grad = token_at(p_grad, sequence, head, first, g_batch * ALIGN, g_head * ALIGN, g_token, p_query_bounds)
    mask_start = sequence * sinks + first
    p_incoming += row * sinks + first
    p_allocation += row * sinks + first
    p_overlap += row * sinks + first

    columns, values, offset = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E), tl.arange(0, BLOCK)
    b_eye = identity(p_query, columns, EYE)
    b_high, b_low = load_memory(p_records, columns[None, :], values[:, None], D, E, PRECISION)
    factor, ratio = tl.load(scalar_at(p_records, FACTOR, D, E)), tl.load(scalar_at(p_records, RATIO, D, E))
    gamma = None
    if p_powers is not None:
        gamma = load_gamma(p_powers, head, heads)
    b_grad_memory = tl.zeros((BLOCK_D, BLOCK_E), tl.float32)
    b_weighted = tl.zeros((BLOCK, BLOCK_D), tl.float32)
    weights = tl.zeros((BLOCK,), tl.float32)
    b_competing = tl.zeros((BLOCK, BLOCK_D), tl.float32)
    competing_weights, grad_gamma = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    # the overlap needs all tiles of E: the program of the first tile computes it
    stop = E
    if E > BLOCK_E:
        stop = tl.where(tl.program_id(1) == 0, E, 0)
    for start in tl.range(0, count, BLOCK, num_stages=STAGES):
        valid = load_valid(p_query_mask, mask_start, start, offset, count)
        b_query = load_features(p_query, q_token, start, offset, valid, columns, b_eye, scale, D, MAP, FAST, EYE)
        sigma, allocation = _load_allocation(p_allocation + start + offset, valid, gamma)
        incoming = tl.load(p_incoming + start + offset, mask=valid, other=1.0)
        received = allocation * factor / incoming
        overlap = tl.zeros((BLOCK,), tl.float32)
        b_grad = load_rows(p_grad, g_token, start, offset, valid, tl.program_id(1) * BLOCK_E + values, E)
        for tile in tl.range(0, stop, BLOCK_E, num_stages=1):
            b_each = b_grad
            if E > BLOCK_E:
                b_each = load_rows(p_grad, g_token, start, offset, valid, tile + values, E)
                b_high, b_low = load_memory(p_records, columns[None, :], tile + values[:, None], D, E, PRECISION)
            b_product = dot_split(b_each, b_high, b_low, tl.zeros((BLOCK, BLOCK_D), tl.float32), PRECISION)
            overlap += tl.sum(b_query * b_product, 1)
        b_grad_memory = dot_tn(b_query * received[:, None], b_grad, b_grad_memory, PRECISION)
        overlap *= received
        if tl.program_id(1) == 0:
            tl.store(p_overlap + start + offset, overlap, mask=offset < count - start)
        if ALLOCATION == "sigmoid":
            weight = ratio * (1 - sigma) * overlap
            if gamma is not None:
                weight *= gamma
                grad_gamma += tl.where(valid, overlap * tl.log(tl.where(valid, sigma, 1.0)), 0.0)
            b_weighted += b_query * weight[:, None]
            weights += weight
        if p_grad_competing is not None:
            weight = -factor * overlap / incoming
            b_competing += b_query * weight[:, None]
            competing_weights += weight
    values += tl.program_id(1) * BLOCK_E
    index = columns[:, None] * E + values[None, :]
    inside = (columns < D)[:, None] & (values < E)[None, :]
    tl.store(p_own + index, b_grad_memory, mask=inside)
    if p_grad_competing is not None:
        grad_competing = tl.sum(b_competing, 0) + eps * tl.sum(competing_weights, 0)
        if tl.program_id(1) == 0:
            p_to = p_grad_competing + (record * segments + segment) * D + columns
            tl.store(p_to, grad_competing, mask=columns < D)
            if gamma is not None:
                tl.store(p_grad_powers + (record * segments + segment) * 2 + 1, tl.sum(grad_gamma, 0))
    if WHOLE:
        product = tl.sum(b_grad_memory * tl.load(p_records + index, mask=inside, other=0.0))
        if p_grad_competing is not None:
            competing = tl.load(p_competing + record * D + columns, mask=columns < D, other=0.0)
            product += tl.where(tl.program_id(1) == 0, tl.sum(competing * grad_competing, 0), 0.0)
        tl.store(p_products + record * tl.num_programs(1) + tl.program_id(1), product)
    if tl.program_id(1) == 0:
        p_key_sum = vector_at(p_own, CONSERVED_KEY_SUM, D, E) + columns
        tl.store(p_key_sum, tl.sum(b_weighted, 0) + eps * tl.sum(weights, 0), mask=columns < D)


@triton.jit
def _load_allocation(p_allocation, valid, gamma):
    """σ(r Î), or 1 without allocation, and α = σ^γ, 0 where masked."""
    sigma = tl.load(p_allocation, mask=valid, other=0.0)
    allocation = sigma
    if gamma is not None:
        allocation = tl.where(valid, raised_allocation(tl.where(valid, sigma, 1.0), gamma), 0.0)
    return sigma, allocation


@kernel
def grad_finish_kernel(
    p_partial, p_records, p_grads, p_competing, p_competing_parts, p_grad_competing, p_products, segments,
    D: tl.constexpr, E: tl.constexpr, CHUNK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """dS and d(Σk/O) of each head from the records of its segments. Launched only if heads have several segments.

    Grid:   (records, chunks of S).
    Reads:  `partial`, the records of all segments of the head; S; if the result is renormalised, Σ c k (`competing`)
            and its gradient of each segment (`competing_parts`).
    Writes: dS and d(Σk/O) in `grads`, one record per head; ⟨S, dS⟩, one number per chunk, into `products`; if the
            result is renormalised, d(Σ c k) of the head (`grad_competing`).
    """
    p_partial = record_at(p_partial, tl.program_id(0).to(tl.int64) * segments, D, E)
    p_records = record_at(p_records, tl.program_id(0).to(tl.int64), D, E)
    p_grads = record_at(p_grads, tl.program_id(0).to(tl.int64), D, E)
    index = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    grad_memory = sum_segments(p_partial, segments, index, D * E, 4, D, E)
    tl.store(p_grads + index, grad_memory, mask=index < D * E)
    product = tl.sum(grad_memory * tl.load(p_records + index, mask=index < D * E, other=0.0), 0)
    if p_competing is not None:
        columns, head = tl.arange(0, BLOCK_D), tl.program_id(0).to(tl.int64)
        grad_competing = tl.zeros((BLOCK_D,), tl.float32)
        for segment in range(0, segments):
            p_each = p_competing_parts + (head * segments + segment) * D + columns
            grad_competing += tl.load(p_each, mask=columns < D, other=0.0)
        if tl.program_id(1) == 0:
            tl.store(p_grad_competing + head * D + columns, grad_competing, mask=columns < D)
            competing = tl.load(p_competing + head * D + columns, mask=columns < D, other=0.0)
            product += tl.sum(competing * grad_competing, 0)
    tl.store(p_products + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), product)
    if tl.program_id(1) == 0:
        columns = tl.arange(0, BLOCK_D)
        vector = sum_vector(p_partial, CONSERVED_KEY_SUM, segments, columns, D, E)
        tl.store(vector_at(p_grads, CONSERVED_KEY_SUM, D, E) + columns, vector, mask=columns < D)


@triton.jit
def _competition(flow, clamp, tau, reference, inverse, COMPETITION: tl.constexpr):
    """c/μ of each source, from its Ô and the scalars of its head."""
    flow = competing_flow(flow, clamp, tau)
    if COMPETITION == "softmax":
        return tl.exp(flow - reference) * inverse
    elif COMPETITION == "sigmoid":
        return sigmoid(flow, False) * inverse
    else:
        return tl.zeros_like(flow) + inverse


@kernel
def grad_competition_kernel(
    p_key, p_value, p_key_mask, p_key_bounds, p_powers, p_records, p_partial, p_grads, p_grad_competing, p_products,
    p_grad_powers, p_outgoing, p_conserved_outgoing, p_grad_outgoing, p_grad_conserved,
    k_batch, k_head, k_token, v_batch, v_head, v_token, sources, heads, segments, products, scale, eps, clamp,
    SHARED: tl.constexpr, COMPETITION: tl.constexpr, PRODUCTS: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, ALIGN: tl.constexpr, DENSE: tl.constexpr, MAP: tl.constexpr,
    FAST: tl.constexpr, EYE: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Pass 2: dÔ and dO of each source, and the sums d(Σq/I) = Σ dÔ (k + ε) and dΣq = Σ dO (k + ε).

    Grid:   (records · segments,). A program loops over tiles of E.
    Reads:  K, V; O, Ô; dS, d(Σk/O) and the parts of ⟨S, dS⟩ of the head (`products` of them); if the result
            is renormalised, d(Σ c k) (`grad_competing`).
    Writes: dO and dÔ (B·H, M); d(Σq/I) and dΣq of each segment's record in `partial`; with powers, the part
            dτ = Σ d(τ Ô) Ô of the segment (`grad_powers`, records · segments, 2).
    """
    k_token = D if DENSE else k_token * ALIGN
    v_token = E if DENSE else v_token * ALIGN
    segment, sequence, head, record, row = locate_head(segments, heads, p_key_bounds is not None, False)
    p_records = record_at(p_records, record, D, E)
    p_grads = record_at(p_grads, record, D, E)
    p_own = record_at(p_partial, record * segments + segment, D, E)
    first, count = locate_tokens(p_key_bounds, sequence, sources, segment, segments, BLOCK)
    p_key = token_at(p_key, sequence, head // SHARED, first, k_batch * ALIGN, k_head * ALIGN, k_token, p_key_bounds)
    p_value = token_at(p_value, sequence, head // SHARED, first, v_batch * ALIGN, v_head * ALIGN, v_token, p_key_bounds)
    mask_start = sequence * sources + first
    p_outgoing += row * sources + first
    p_conserved_outgoing += row * sources + first
    p_grad_outgoing += row * sources + first
    p_grad_conserved += row * sources + first

    columns, values, offset = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E), tl.arange(0, BLOCK)
    b_eye = identity(p_key, columns, EYE)
    b_high, b_low = load_memory(p_grads, columns[None, :], values[:, None], D, E, PRECISION)
    reference = tl.load(scalar_at(p_records, REFERENCE, D, E))
    inverse = tl.load(scalar_at(p_records, INVERSE_MASS, D, E))
    index = tl.arange(0, PRODUCTS)
    product = tl.sum(tl.load(p_products + record * products + index, mask=index < products, other=0.0), 0)
    grad_conserved_key_sum = load_vector(p_grads, CONSERVED_KEY_SUM, columns, D, E)
    b_weighted = tl.zeros((BLOCK, BLOCK_D), tl.float32)
    weights = tl.zeros((BLOCK,), tl.float32)
    b_weighted_conserved = tl.zeros((BLOCK, BLOCK_D), tl.float32)
    weights_conserved = tl.zeros((BLOCK,), tl.float32)
    grad_tau = tl.zeros((BLOCK,), tl.float32)
    tau = None
    if p_powers is not None:
        tau = load_tau(p_powers, head)
    if p_grad_competing is not None:
        grad_competing = tl.load(p_grad_competing + record * D + columns, mask=columns < D, other=0.0)
    for start in tl.range(0, count, BLOCK, num_stages=STAGES):
        valid = load_valid(p_key_mask, mask_start, start, offset, count)
        inside = offset < count - start
        b_key = load_features(p_key, k_token, start, offset, valid, columns, b_eye, scale, D, MAP, FAST, EYE)
        outgoing = tl.load(p_outgoing + start + offset, mask=valid, other=1.0)
        weight = tl.where(valid, -tl.sum(b_key * grad_conserved_key_sum[None, :], 1) / outgoing / outgoing, 0.0)
        tl.store(p_grad_outgoing + start + offset, weight, mask=inside)
        b_weighted += b_key * weight[:, None]
        weights += weight
        if COMPETITION != "none":
            # ⟨V, k dS⟩, which is dc
            grad_share = tl.zeros((BLOCK,), tl.float32)
            for tile in tl.range(0, E, BLOCK_E, num_stages=1):
                b_value = load_rows(p_value, v_token, start, offset, valid, tile + values, E)
                if E > BLOCK_E:
                    b_high, b_low = load_memory(p_grads, columns[None, :], tile + values[:, None], D, E, PRECISION)
                b_product = dot_split(b_value, b_high, b_low, tl.zeros((BLOCK, BLOCK_D), tl.float32), PRECISION)
                grad_share += tl.sum(b_key * b_product, 1)
            flow = tl.load(p_conserved_outgoing + start + offset, mask=valid, other=0.0)
            share = _competition(flow, clamp, tau, reference, inverse, COMPETITION)
            if p_grad_competing is not None:
                grad_share += tl.sum(b_key * grad_competing[None, :], 1)
            if COMPETITION == "softmax":
                weight = share * (grad_share - product)
                if tau is not None:
                    grad_tau += tl.where(valid, weight * clamped(flow, -clamp, clamp), 0.0)
                    weight *= tau
            else:
                weight = share * grad_share * (1.0 - sigmoid(clamped(flow, -clamp, clamp), False))
            weight = tl.where(valid & (tl.abs(flow) <= clamp), weight, 0.0)
            tl.store(p_grad_conserved + start + offset, weight, mask=inside)
            b_weighted_conserved += b_key * weight[:, None]
            weights_conserved += weight
    if tau is not None:
        tl.store(p_grad_powers + (record * segments + segment) * 2, tl.sum(grad_tau, 0))
    p_query_sum = vector_at(p_own, QUERY_SUM, D, E) + columns
    tl.store(p_query_sum, tl.sum(b_weighted, 0) + eps * tl.sum(weights, 0), mask=columns < D)
    p_query_sum = vector_at(p_own, CONSERVED_QUERY_SUM, D, E) + columns
    tl.store(p_query_sum, tl.sum(b_weighted_conserved, 0) + eps * tl.sum(weights_conserved, 0), mask=columns < D)


@kernel
def grad_query_kernel(
    p_query, p_grad, p_out, p_query_mask, p_query_bounds, p_powers, p_records, p_partial, p_incoming, p_allocation,
    p_overlap, p_competing, p_competing_flow,
    q_batch, q_head, q_token, g_batch, g_head, g_token, r_batch, r_head, r_token, sinks, heads, segments, scale, eps,
    ALLOCATION: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    ALIGN: tl.constexpr, DENSE: tl.constexpr, MAP: tl.constexpr, FAST: tl.constexpr, EYE: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Pass 3: dQ, and dΣk = Σ dI (q + ε).

    Grid:   (records · segments,), heads in reverse. A program loops over tiles of E.
    Reads:  Q, dR; I, α, ⟨dR, R⟩; the finished record of the head; dΣq and d(Σq/I) of all its segments in `partial`; if
            the result is renormalised, W and Σ c k (`competing_flow`, `competing`).
    Writes: dQ (B, H, N, D); dΣk of each segment's record in `partial`.
    """
    q_token = D if DENSE else q_token * ALIGN
    g_token = E if DENSE else g_token * ALIGN
    r_token = D if DENSE else r_token * ALIGN
    segment, sequence, head, record, row = locate_head(segments, heads, p_query_bounds is not None, True)
    p_records = record_at(p_records, record, D, E)
    p_partial = record_at(p_partial, record * segments, D, E)
    first, count = locate_tokens(p_query_bounds, sequence, sinks, segment, segments, BLOCK)
    p_query = token_at(p_query, sequence, head, first, q_batch * ALIGN, q_head * ALIGN, q_token, p_query_bounds)
    p_grad = token_at(p_grad, sequence, head, first, g_batch * ALIGN, g_head * ALIGN, g_token, p_query_bounds)
    p_out = token_at(p_out, sequence, head, first, r_batch * ALIGN, r_head * ALIGN, r_token, p_query_bounds)
    mask_start = sequence * sinks + first
    p_incoming += row * sinks + first
    p_allocation += row * sinks + first
    p_overlap += row * sinks + first

    columns, values, offset = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E), tl.arange(0, BLOCK)
    b_eye = identity(p_query, columns, EYE)
    b_high, b_low = load_memory(p_records, columns[None, :], values[:, None], D, E, PRECISION)
    key_sum = load_vector(p_records, KEY_SUM, columns, D, E) + eps
    conserved_key_sum = load_vector(p_records, CONSERVED_KEY_SUM, columns, D, E) + eps
    grad_query_sum = sum_vector(p_partial, QUERY_SUM, segments, columns, D, E)
    grad_conserved_query_sum = sum_vector(p_partial, CONSERVED_QUERY_SUM, segments, columns, D, E)
    factor, ratio = tl.load(scalar_at(p_records, FACTOR, D, E)), tl.load(scalar_at(p_records, RATIO, D, E))
    b_weighted = tl.zeros((BLOCK, BLOCK_D), tl.float32)
    weights = tl.zeros((BLOCK,), tl.float32)
    gamma = None
    if p_powers is not None:
        gamma = load_gamma(p_powers, head, heads)
    if p_competing is not None:
        p_competing_flow += row * sinks + first
        competing_sum = tl.load(p_competing + record * D + columns, mask=columns < D, other=0.0) * factor + eps
    for start in tl.range(0, count, BLOCK, num_stages=STAGES):
        valid = load_valid(p_query_mask, mask_start, start, offset, count)
        b_query = load_features(p_query, q_token, start, offset, valid, columns, b_eye, scale, D, MAP, FAST, EYE)
        inverse = 1.0 / tl.load(p_incoming + start + offset, mask=valid, other=1.0)
        sigma, allocation = _load_allocation(p_allocation + start + offset, valid, gamma)
        overlap = tl.load(p_overlap + start + offset, mask=valid, other=0.0)
        if p_competing is not None:
            # I then only appears in Σq/I
            weight = -tl.sum(b_query * grad_conserved_query_sum[None, :], 1) * inverse * inverse
            inverse_received = 1.0 / tl.load(p_competing_flow + start + offset, mask=valid, other=1.0)
        else:
            weight = -(overlap + tl.sum(b_query * grad_conserved_query_sum[None, :], 1) * inverse) * inverse
            inverse_received = inverse
        weight = tl.where(valid, weight, 0.0)
        b_weighted += b_query * weight[:, None]
        weights += weight

        b_gradient = tl.zeros((BLOCK, BLOCK_D), tl.float32)
        for tile in tl.range(0, E, BLOCK_E, num_stages=1):
            b_grad = load_rows(p_grad, g_token, start, offset, valid, tile + values, E)
            if E > BLOCK_E:
                b_high, b_low = load_memory(p_records, columns[None, :], tile + values[:, None], D, E, PRECISION)
            b_gradient = dot_split(b_grad, b_high, b_low, b_gradient, PRECISION)
        # scale and mask of padding: cheaper per token than per element
        chain = tl.where(valid, scale, 0.0)
        b_gradient = b_gradient * (allocation * factor * inverse_received * chain)[:, None]
        b_gradient += (weight * chain)[:, None] * key_sum[None, :]
        b_gradient += (inverse * chain)[:, None] * grad_conserved_query_sum[None, :]
        b_gradient += chain[:, None] * grad_query_sum[None, :]
        if ALLOCATION == "sigmoid":
            declined = ratio * (1 - sigma) * overlap * chain
            if gamma is not None:
                declined *= gamma
            b_gradient += declined[:, None] * conserved_key_sum[None, :]
        if p_competing is not None:
            b_gradient -= (overlap * inverse_received * chain)[:, None] * competing_sum[None, :]
        b_gradient = feature_gradient(b_gradient, b_query, MAP)
        store_rows(p_out, r_token, start, offset, offset < count - start, columns, b_gradient, D, PRECISION)
    grad_key_sum = tl.sum(b_weighted, 0) + eps * tl.sum(weights, 0)
    tl.store(vector_at(record_at(p_partial, segment, D, E), KEY_SUM, D, E) + columns, grad_key_sum, mask=columns < D)


@triton.jit
def _load_head(p_record, p_grads, columns, eps, D: tl.constexpr, E: tl.constexpr):
    """Σq + ε, Σq/I + ε, d(Σk/O), the reference and 1/Z of a query head."""
    query_sum = load_vector(p_record, QUERY_SUM, columns, D, E) + eps
    conserved_query_sum = load_vector(p_record, CONSERVED_QUERY_SUM, columns, D, E) + eps
    grad_conserved_key_sum = load_vector(p_grads, CONSERVED_KEY_SUM, columns, D, E)
    reference = tl.load(scalar_at(p_record, REFERENCE, D, E))
    inverse = tl.load(scalar_at(p_record, INVERSE_MASS, D, E))
    return query_sum, conserved_query_sum, grad_conserved_key_sum, reference, inverse


@kernel
def grad_source_kernel(
    p_key, p_value, p_grad_key, p_grad_value, p_key_mask, p_key_bounds, p_powers, p_records, p_partial, p_grads,
    p_grad_competing, p_outgoing, p_conserved_outgoing, p_grad_outgoing, p_grad_conserved,
    k_batch, k_head, k_token, v_batch, v_head, v_token, dk_batch, dk_head, dk_token, dv_batch, dv_head, dv_token,
    sources, heads, segments, scale, eps, clamp,
    SHARED: tl.constexpr, COMPETITION: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr, ALIGN: tl.constexpr, DENSE: tl.constexpr, MAP: tl.constexpr, FAST: tl.constexpr,
    EYE: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Pass 4: dK and dV of a key head, summed over the query heads that share it.

    Grid:   (key heads of all sequences · segments,), heads in reverse. A program loops over tiles of E and over the
            SHARED query heads.
    Reads:  K, V; O, Ô, dO, dÔ; records and gradients of the query heads; dΣk of all their segments in `partial`; if the
            result is renormalised, d(Σ c k) (`grad_competing`).
    Writes: dK (B, H_kv, M, D) and dV (B, H_kv, M, E).
    """
    k_token = D if DENSE else k_token * ALIGN
    v_token = E if DENSE else v_token * ALIGN
    dk_token = D if DENSE else dk_token * ALIGN
    dv_token = E if DENSE else dv_token * ALIGN
    segment, sequence, head, record, row = locate_head(segments, heads // SHARED, p_key_bounds is not None, True)
    first, count = locate_tokens(p_key_bounds, sequence, sources, segment, segments, BLOCK)
    p_key = token_at(p_key, sequence, head, first, k_batch * ALIGN, k_head * ALIGN, k_token, p_key_bounds)
    p_value = token_at(p_value, sequence, head, first, v_batch * ALIGN, v_head * ALIGN, v_token, p_key_bounds)
    p_grad_key = token_at(p_grad_key, sequence, head, first, dk_batch * ALIGN, dk_head * ALIGN, dk_token, p_key_bounds)
    p_grad_value = token_at(
        p_grad_value, sequence, head, first, dv_batch * ALIGN, dv_head * ALIGN, dv_token, p_key_bounds
    )
    mask_start = sequence * sources + first
    # pointers for the first query head that shares this key head
    p_records = record_at(p_records, record * SHARED, D, E)
    p_grads = record_at(p_grads, record * SHARED, D, E)
    p_partial = record_at(p_partial, record * SHARED * segments, D, E)
    p_outgoing += row * SHARED * sources + first
    p_conserved_outgoing += row * SHARED * sources + first
    p_grad_outgoing += row * SHARED * sources + first
    p_grad_conserved += row * SHARED * sources + first

    columns, values, offset = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E), tl.arange(0, BLOCK)
    b_eye = identity(p_key, columns, EYE)
    b_high, b_low = load_memory(p_grads, columns[:, None], values[None, :], D, E, PRECISION)
    b_high_t, b_low_t = load_memory(p_grads, columns[None, :], values[:, None], D, E, PRECISION)
    query_sum, conserved_query_sum, grad_conserved_key_sum, reference, inverse = _load_head(
        p_records, p_grads, columns, eps, D, E
    )
    grad_key_sum = tl.zeros((BLOCK_D,), tl.float32)
    for member in range(SHARED):
        p_member = record_at(p_partial, member * segments, D, E)
        grad_key_sum += sum_vector(p_member, KEY_SUM, segments, columns, D, E)
    for start in tl.range(0, count, BLOCK, num_stages=STAGES):
        valid = load_valid(p_key_mask, mask_start, start, offset, count)
        inside = offset < count - start
        b_key = load_features(p_key, k_token, start, offset, valid, columns, b_eye, scale, D, MAP, FAST, EYE)
        chain = tl.where(valid, scale, 0.0)
        b_grad_key = chain[:, None] * grad_key_sum[None, :]
        for tile in tl.range(0, E, BLOCK_E, num_stages=1):
            b_value = load_rows(p_value, v_token, start, offset, valid, tile + values, E)
            b_grad_value = tl.zeros((BLOCK, BLOCK_E), tl.float32)
            # not pipelined: dS of several heads does not fit into shared memory
            for member in tl.range(0, SHARED, num_stages=1):
                if SHARED > 1:
                    p_record, p_member = record_at(p_records, member, D, E), record_at(p_grads, member, D, E)
                    query_sum, conserved_query_sum, grad_conserved_key_sum, reference, inverse = _load_head(
                        p_record, p_member, columns, eps, D, E
                    )
                if E > BLOCK_E or SHARED > 1:
                    p_own = record_at(p_grads, member, D, E)
                    b_high, b_low = load_memory(p_own, columns[:, None], tile + values[None, :], D, E, PRECISION)
                    b_high_t, b_low_t = load_memory(p_own, columns[None, :], tile + values[:, None], D, E, PRECISION)
                token = member * tl.cast(sources, tl.int64) + start + offset
                flow = tl.load(p_conserved_outgoing + token, mask=valid, other=0.0)
                tau = None
                if p_powers is not None:
                    tau = load_tau(p_powers, head * SHARED + member)
                share = tl.where(valid, _competition(flow, clamp, tau, reference, inverse, COMPETITION), 0.0)
                b_zero = tl.zeros((BLOCK, BLOCK_E), tl.float32)
                b_grad_value += dot_split(b_key, b_high, b_low, b_zero, PRECISION) * share[:, None]
                b_zero = tl.zeros((BLOCK, BLOCK_D), tl.float32)
                b_grad_key += dot_split(b_value, b_high_t, b_low_t, b_zero, PRECISION) * (share * chain)[:, None]
                if tile == 0:
                    if p_grad_competing is not None:
                        p_vector = p_grad_competing + (record * SHARED + member) * D + columns
                        grad_competing = tl.load(p_vector, mask=columns < D, other=0.0)
                        b_grad_key += (share * chain)[:, None] * grad_competing[None, :]
                    inverse_outgoing = chain / tl.load(p_outgoing + token, mask=valid, other=1.0)
                    weight = chain * tl.load(p_grad_outgoing + token, mask=valid, other=0.0)
                    b_grad_key += (
                        inverse_outgoing[:, None] * grad_conserved_key_sum[None, :]
                        + weight[:, None] * query_sum[None, :]
                    )
                    if COMPETITION != "none":
                        weight = chain * tl.load(p_grad_conserved + token, mask=valid, other=0.0)
                        b_grad_key += weight[:, None] * conserved_query_sum[None, :]
            store_rows(p_grad_value, dv_token, start, offset, inside, tile + values, b_grad_value, E, PRECISION)
        b_grad_key = feature_gradient(b_grad_key, b_key, MAP)
        store_rows(p_grad_key, dk_token, start, offset, inside, columns, b_grad_key, D, PRECISION)
