"""The kernel of dQ and dK, the last of the causal backward pass.

q and k get gradients through the four flows of a token and through S: from earlier and later chunks as sums, which
`flows_kernel` and `flow_gradient_kernel` have stored for each chunk, and inside a chunk by products.

Shapes as in `forward_flows.py`; `grads` are the planes of `planes.py`. Math: docs/kernels.md.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..features import centred_feature, feature_gradient
from ..launch import kernel
from ..precision import dot, dot_nt, operand, truncate
from .gates import competing_gradient, load_tiles, load_weights
from .planes import (
    AFTER_COMPETING_SUM,
    AFTER_CONSERVED_KEY_SUM,
    AFTER_CONSERVED_QUERY_SUM,
    AFTER_KEY_SUM,
    AFTER_QUERY_SUM,
    COMPETING_SUM,
    CONSERVED_KEY_SUM,
    CONSERVED_QUERY_SUM,
    GRAD_CONSERVED_INCOMING,
    GRAD_CONSERVED_OUTGOING,
    GRAD_INCOMING,
    GRAD_OUTGOING,
    GRAD_PLANES,
    INVERSE_INCOMING,
    INVERSE_OUTGOING,
    KEY_SUM,
    QUERY_SUM,
)
from .sums import load_count, load_memory, load_vector, store_vector, sum_segments
from .tokens import (
    inside_of,
    load_features,
    load_rows,
    locate,
    locate_chunk,
    mask_triangle,
    materialize,
    store_rows,
    triangle,
)


@triton.jit
def _without_common(
    b_gradient, b_phi, p_measured, plane, tile, inside, D: tl.constexpr, BLOCK_D: tl.constexpr, BALANCE: tl.constexpr
):
    """Adds a constant to all features of dq such that ⟨q, dq⟩ = 0."""
    projection, total = tl.sum(b_gradient * b_phi, 1), tl.sum(b_phi, 1)
    TILES_D: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    if BALANCE == "measure":
        tl.store(p_measured + tile * plane, projection, mask=inside)
        tl.store(p_measured + (TILES_D + tile) * plane, total, mask=inside)
    else:
        if BALANCE == "measured":
            projection = load_tiles(p_measured, plane, inside, TILES_D)
            total = load_tiles(p_measured + TILES_D * plane, plane, inside, TILES_D)
        # saturated features may all be 0; their gradients then are 0 too
        b_gradient -= (projection / tl.maximum(total, 1e-20))[:, None]
    return b_gradient


@kernel
def gradient_kernel(
    p_own, p_other, p_left, p_right, p_grad_own, p_positions, p_bounds, p_state_scalars, p_grad_sums, p_flows, p_grads,
    p_sums, p_memories, p_partial, p_after, p_start_sums,
    own_batch, own_head, own_token, other_batch, other_head, other_token, left_batch, left_head, left_token,
    right_batch, right_head, right_token, out_batch, out_head, out_token,
    plane, heads, shared, length, size, segments, scale, eps,
    D: tl.constexpr, BLOCK_D: tl.constexpr, E: tl.constexpr, BLOCK_E: tl.constexpr, C: tl.constexpr,
    MAP: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr,
    RENORMALIZE: tl.constexpr, TILES: tl.constexpr, BALANCE: tl.constexpr, RAISED: tl.constexpr,
    REVERSE: tl.constexpr, CENTRE: tl.constexpr, STAGES: tl.constexpr, ALIGN: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    """dQ, from left to right with S; in REVERSE dK, from right to left with dS.

    The same with incoming and outgoing exchanged: own, other, left, right are Q, K, dR, V; in REVERSE K, Q, V, dR.

    Grid:   (B·H, segments, tiles of D). One program walks over one segment in chunks of C tokens.
    Reads:  Q, K, V, dR; planes of `flows` and `grads`; `sums` before and `after` each chunk (B·H, T, chunks, 4, D);
            S before each segment, in REVERSE dS after it; dΣk and dΣq of each segment (`partial`).
    Writes: dQ (B, H, N, D), in REVERSE dK for every query head; the gradient of Σk, in REVERSE Σq, of the first state.

    In the C × C tiles, row i is the token whose gradient is computed, column j a token it is paired with. RAISED: the
    features are precise enough for the ε of tokens of the same chunk to matter.

    RENORMALIZE adds one outer product: dW (Σ c k + ε) for a sink, c d(Σ c k) for a source.

    BALANCE: the gradient of q through I, or W if RENORMALIZE, cancels most of the gradient through S. R is rounded,
    so ⟨dR, R⟩ differs from the exact value and the cancellation is inexact; ⟨q, dq⟩ of the part through S is therefore
    recomputed, by this program if it holds all features ("own"), or by a separate launch ("measure") before the one
    that uses it ("measured"). "none" if nothing is rounded. With RENORMALIZE, dK is a difference of the same kind, and
    uses what was measured for dQ.

    CENTRE: without an allocation R does not change when q is scaled, so ⟨q, dq⟩ = 0. Where inputs are small, φ is
    nearly φ(0) in all features, and dq is a small difference of large terms. CENTRE is then φ(0), otherwise 0: products
    use φ − φ(0), which bfloat16 represents accurately, and ⟨q, dq⟩ = 0 determines the component common to all features.
    With RENORMALIZE, this holds for the gradient through S and W alone, with or without allocation; the common
    component of the other gradients is added.
    """
    batch, head, start, first, last = locate(p_bounds, heads, length, size)
    own_token = D if DENSE else own_token * ALIGN
    other_token = D if DENSE else other_token * ALIGN
    left_token = E if DENSE else left_token * ALIGN
    right_token = E if DENSE else right_token * ALIGN
    out_token = D if DENSE else out_token * ALIGN
    plane = tl.cast(plane, tl.int64)
    row, segment, tile = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    index_own, index_other = head, head // shared
    if REVERSE:
        index_own, index_other = index_other, index_own
    p_own += (batch * own_batch + index_own * own_head) * ALIGN
    p_other += (batch * other_batch + index_other * other_head) * ALIGN
    p_left += (batch * left_batch + index_own * left_head) * ALIGN
    p_right += (batch * right_batch + index_other * right_head) * ALIGN
    p_grad_own += (batch * out_batch + head * out_head) * ALIGN
    p_flows += (batch * heads + head) * length
    p_grads += (batch * heads + head) * length
    count = load_count(p_state_scalars)
    columns, tokens = tile * BLOCK_D + tl.arange(0, BLOCK_D), tl.arange(0, C)
    index = row * segments + segment
    SUMS: tl.constexpr = 5 if RENORMALIZE else 4
    p_sums += index * (size // C) * (SUMS * D)
    p_after += index * (size // C) * (SUMS * D)
    b_lower = triangle(C, False)
    b_memory = tl.zeros([BLOCK_D, BLOCK_E], tl.float32)
    if p_memories is not None:
        b_memory += load_memory(p_memories + index * (D * E), 0, D, BLOCK_D, E, BLOCK_E, tile)
        if CENTRE != 0:
            # features and S are centred: any row would do, but it must be the same in all tiles
            first_row = load_vector(p_memories, index * D, tl.arange(0, BLOCK_E), E)
            b_memory = tl.where((columns < D)[:, None], b_memory - first_row[None, :], 0.0)
    OWN_INVERSE: tl.constexpr = INVERSE_OUTGOING if REVERSE else INVERSE_INCOMING
    OTHER_INVERSE: tl.constexpr = INVERSE_INCOMING if REVERSE else INVERSE_OUTGOING
    OWN_FLOW: tl.constexpr = GRAD_OUTGOING if REVERSE else GRAD_INCOMING
    OTHER_FLOW: tl.constexpr = GRAD_INCOMING if REVERSE else GRAD_OUTGOING
    OWN_CONSERVED: tl.constexpr = GRAD_CONSERVED_OUTGOING if REVERSE else GRAD_CONSERVED_INCOMING
    OTHER_CONSERVED: tl.constexpr = GRAD_CONSERVED_INCOMING if REVERSE else GRAD_CONSERVED_OUTGOING
    MEASURED: tl.constexpr = GRAD_PLANES + 2 * TILES
    # dQ is a small difference of large terms: as one bfloat16 each, their rounding would cost it two bits
    SPLIT_OPERANDS: tl.constexpr = (PRECISION == "bf16" or PRECISION == "rounded") and REVERSE == 0
    # flows of later tokens were computed from sums that include this token
    OWN_SUM: tl.constexpr = KEY_SUM if REVERSE else QUERY_SUM
    AFTER_OWN: tl.constexpr = AFTER_KEY_SUM if REVERSE else AFTER_QUERY_SUM
    AFTER_OWN_CONSERVED: tl.constexpr = AFTER_CONSERVED_KEY_SUM if REVERSE else AFTER_CONSERVED_QUERY_SUM
    OTHER_SUM: tl.constexpr = QUERY_SUM if REVERSE else KEY_SUM
    OTHER_CONSERVED_SUM: tl.constexpr = CONSERVED_QUERY_SUM if REVERSE else CONSERVED_KEY_SUM
    later = load_vector(p_grad_sums, row * SUMS + OWN_SUM, columns, D)
    later += sum_segments(p_partial, segment + 1, segments, segments, columns, OWN_SUM, D)
    if segment == 0:
        grad_sum = load_vector(p_partial, index * 2 + OWN_SUM, columns, D)
        store_vector(p_start_sums, row * SUMS + OWN_SUM, columns, later + grad_sum, D)

    chunks = tl.cdiv(last - first, C).to(tl.int32)
    for step in tl.range(0, chunks, num_stages=STAGES):
        chunk = chunks - 1 - step if REVERSE else step
        base = first + chunk * C
        rows, keep, position = locate_chunk(p_positions, batch, length, base, tokens, start, last, count)
        if CENTRE != 0:
            b_own = load_rows(p_own, base, rows, own_token, keep, p_positions, tile, D, BLOCK_D)
            b_phi = tl.where((columns < D)[None, :], centred_feature(b_own, scale, MAP) + CENTRE, 0.0)
            b_other = load_rows(p_other, base, rows, other_token, keep, p_positions, tile, D, BLOCK_D)
            b_other = operand(centred_feature(b_other, scale, MAP), PRECISION)
        else:
            b_own, _ = load_features(
                p_own, base, rows, own_token, keep, p_positions, tile, scale, eps, D, BLOCK_D, MAP, FAST, PRECISION
            )
            b_other, _ = load_features(
                p_other, base, rows, other_token, keep, p_positions, tile, scale, eps, D, BLOCK_D, MAP, FAST, PRECISION
            )
        b_left = operand(load_rows(p_left, base, rows, left_token, keep, p_positions, 0, E, BLOCK_E), PRECISION)
        b_right = load_rows(p_right, base, rows, right_token, keep, p_positions, 0, E, BLOCK_E).to(tl.float32)
        p_flow, p_grad_flow, inside = p_flows + base + tokens, p_grads + base + tokens, inside_of(tokens, base, last)
        take, give = load_weights(p_flow, plane, keep, RENORMALIZE)
        if REVERSE:
            take, give = give, take
        inverse = tl.load(p_flow + OWN_INVERSE * plane, mask=inside, other=0.0)
        other_inverse = materialize(tl.load(p_flow + OTHER_INVERSE * plane, mask=inside, other=0.0))
        flow = tl.load(p_grad_flow + OWN_FLOW * plane, mask=inside, other=0.0)
        other_flow = materialize(tl.load(p_grad_flow + OTHER_FLOW * plane, mask=inside, other=0.0))
        conserved = tl.load(p_grad_flow + OWN_CONSERVED * plane, mask=inside, other=0.0)
        other_conserved = materialize(tl.load(p_grad_flow + OTHER_CONSERVED * plane, mask=inside, other=0.0))
        # needed last, but loaded here: the compiler does not move loads across the barriers of the products
        before = load_vector(p_sums, chunk * SUMS + OTHER_SUM, columns, D)
        before_conserved = load_vector(p_sums, chunk * SUMS + OTHER_CONSERVED_SUM, columns, D)
        after_sum = later + load_vector(p_after, chunk * SUMS + AFTER_OWN, columns, D)
        after_conserved = load_vector(p_after, chunk * SUMS + AFTER_OWN_CONSERVED, columns, D)
        if RENORMALIZE:
            if REVERSE:
                competing_sum = load_vector(p_after, chunk * SUMS + AFTER_COMPETING_SUM, columns, D)
            else:
                competing_sum = load_vector(p_sums, chunk * SUMS + COMPETING_SUM, columns, D)
        if REVERSE and BALANCE == "measured":
            overlap = load_tiles(p_grad_flow + MEASURED * plane, plane, keep, tl.cdiv(D, BLOCK_D))
        elif BALANCE != "none" or RENORMALIZE:
            overlap = load_tiles(p_grad_flow + GRAD_PLANES * plane, plane, keep, TILES)

        b_given = operand(b_right * give[:, None], PRECISION)
        if RENORMALIZE:
            # the term that cancels the products is not rounded, so their operands must not be either
            b_products = dot_nt(b_left, operand(b_right, PRECISION), PRECISION)
            b_products *= take[:, None] * materialize(give)[None, :]
        else:
            b_products = dot_nt(b_left, b_given, PRECISION) * take[:, None]
        if RENORMALIZE and CENTRE != 0:
            grad_competing = competing_gradient(p_flow, plane, keep, overlap)
            b_products += grad_competing[:, None] * materialize(give)[None, :]
        b_high = b_memory
        if SPLIT_OPERANDS:
            b_high = truncate(b_memory)
        b_gradient = dot_nt(b_left, operand(b_high, PRECISION), PRECISION)
        if SPLIT_OPERANDS:
            b_gradient = dot(b_left, tl.trans(operand(b_memory - b_high, PRECISION)), b_gradient, PRECISION)
        b_gradient *= take[:, None]
        b_memory = dot(tl.trans(b_other), b_given, b_memory, PRECISION)
        if not REVERSE:
            b_high = b_products
            if SPLIT_OPERANDS:
                b_high = truncate(b_products)
                b_low = mask_triangle(b_products - b_high, b_lower, FAST, PRECISION)
                b_gradient = dot(b_low, b_other, b_gradient, PRECISION)
            b_gradient = dot(mask_triangle(b_high, b_lower, FAST, PRECISION), b_other, b_gradient, PRECISION)
            if CENTRE == 0:
                if BALANCE == "measured":
                    projection = load_tiles(p_grad_flow + MEASURED * plane, plane, keep, tl.cdiv(D, BLOCK_D))
                else:
                    projection = tl.sum(b_gradient * b_own.to(tl.float32), 1)
                if BALANCE == "measure":
                    tl.store(p_grad_flow + (MEASURED + tile) * plane, projection, mask=inside)
                elif BALANCE != "none":
                    if RENORMALIZE:
                        overlap = projection
                        if BALANCE == "own":
                            tl.store(p_grad_flow + MEASURED * plane, projection, mask=inside)
                    else:
                        flow -= (projection - overlap) * inverse / position
            elif RENORMALIZE:
                b_gradient += grad_competing[:, None] * materialize(competing_sum)[None, :]
                b_gradient = _without_common(
                    b_gradient, b_phi, p_grad_flow + MEASURED * plane, plane, tile, inside, D, BLOCK_D, BALANCE
                )
        b_from_later = inverse[:, None] * other_conserved[None, :] + other_flow[None, :]
        if REVERSE:
            b_from_later += b_products
        b_from_earlier = conserved[:, None] * other_inverse[None, :]
        if p_positions is not None:
            b_from_earlier += flow[:, None] * tl.where(keep, 1.0, 0.0)[None, :]
        else:
            # repeated rows lie after the last token, so they are never earlier than a stored token
            b_from_earlier += flow[:, None]
        if RENORMALIZE and CENTRE == 0:
            grad_competing = competing_gradient(p_flow, plane, keep, overlap)
            if REVERSE:
                b_from_later += take[:, None] * materialize(grad_competing)[None, :]
            else:
                b_competing = grad_competing[:, None] * materialize(give)[None, :]
                if SPLIT_OPERANDS:
                    # cancels most of b_products, so it must not be rounded more than that
                    b_high = truncate(b_competing)
                    b_low = mask_triangle(b_competing - b_high, b_lower, FAST, PRECISION)
                    b_gradient = dot(b_low, b_other, b_gradient, PRECISION)
                    b_high = mask_triangle(b_high, b_lower, FAST, PRECISION)
                    b_gradient = dot(b_high, b_other, b_gradient, PRECISION)
                else:
                    b_from_earlier += b_competing
        b_weights = tl.where(tokens[:, None] == tokens[None, :], b_from_later + b_from_earlier, b_from_later)
        b_weights = tl.where(tokens[:, None] > tokens[None, :], b_from_earlier, b_weights)
        b_gradient = dot(operand(b_weights, PRECISION), b_other, b_gradient, PRECISION)
        if RENORMALIZE and CENTRE != 0:
            b_gradient += CENTRE * tl.sum(b_weights, 1)[:, None]
        if RAISED:
            eps_weight = inverse * tl.cumsum(other_conserved, 0, reverse=True) + tl.cumsum(other_flow, 0, reverse=True)
            if RENORMALIZE and REVERSE:
                eps_weight += take * tl.cumsum(grad_competing, 0, reverse=True)
            b_gradient += eps * eps_weight[:, None]
        b_gradient += (
            flow[:, None] * materialize(before)[None, :] + conserved[:, None] * materialize(before_conserved)[None, :]
        )
        b_gradient += inverse[:, None] * materialize(after_conserved)[None, :] + materialize(after_sum)[None, :]
        if RENORMALIZE and CENTRE == 0:
            b_gradient += (take if REVERSE else grad_competing)[:, None] * materialize(competing_sum)[None, :]
        if CENTRE != 0:
            if not RENORMALIZE:
                b_gradient = _without_common(
                    b_gradient, b_phi, p_grad_flow + MEASURED * plane, plane, tile, inside, D, BLOCK_D, BALANCE
                )
            b_gradient = feature_gradient(b_gradient, b_phi, MAP)
        else:
            b_gradient = feature_gradient(b_gradient, b_own.to(tl.float32), MAP)
        if scale is not None:
            b_gradient *= scale
        if p_positions is not None:
            b_gradient = tl.where(keep[:, None], b_gradient, 0.0)
        if BALANCE != "measure":
            store_rows(p_grad_own, base, tokens, out_token, inside, tile, b_gradient, D, BLOCK_D, PRECISION)
