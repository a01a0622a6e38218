"""The kernel of the gradients of queries and keys, the last of the causal backward pass.

The four flows of a token and its part of S pass their gradients on to q and k: as sums over what came before a token
and over what comes after it, which `causal_backward.py` leaves for each chunk, and inside a chunk by products.

Shapes are those of `causal_backward.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .causal_forward import load_memory
from .causal_parts import (
    GRAD_CONSERVED_INCOMING,
    GRAD_CONSERVED_OUTGOING,
    GRAD_INCOMING,
    GRAD_OUTGOING,
    GRAD_PLANES,
    INVERSE_INCOMING,
    INVERSE_OUTGOING,
    RUNTIME,
    across,
    inside_of,
    load_count,
    load_features,
    load_rows,
    load_tiles,
    load_vector,
    load_weights,
    locate,
    place,
    settled,
    store_rows,
    store_vector,
    sum_segments,
    triangle,
    truncated,
    within,
)
from .features import centred_feature, feature_gradient


@triton.jit(do_not_specialize=RUNTIME)
def gradient_kernel(
    own, other, left, right, grad_own, positions, bounds, state_scalars, grad_sums, flows, grads, sums, memories,
    partial, after, start_sums,
    a_batch, a_head, a_token, b_batch, b_head, b_token, u_batch, u_head, u_token, m_batch, m_head, m_token, r_batch,
    r_head, r_token,
    plane, heads, shared, length, size, segments, scale, eps,
    D: tl.constexpr, BLOCK_D: tl.constexpr, E: tl.constexpr, BLOCK_E: tl.constexpr, C: tl.constexpr,
    MAP: tl.constexpr, FAST: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
    TILES: tl.constexpr, BALANCE: tl.constexpr, RAISED: tl.constexpr, REVERSE: tl.constexpr, CENTRE: tl.constexpr,
    STAGES: tl.constexpr, ALIGN: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    """dQ, from left to right with S; in reverse dK, from right to left with dS: the same with in and out exchanged.

    Row i of a chunk is the token whose gradient it is, column j one it met. RAISED says that the features are precise
    enough for the ε of what was met inside a chunk to be seen.

    What dQ gets by way of I takes away what it gets by way of S; R is rounded, and ⟨dR, R⟩ is not quite ⟨q, dq⟩ of that
    part. So I takes away what is there to the last digit. BALANCE says who knows it: the program, which has all
    features ("own"), or an earlier launch that did nothing else ("measured", after "measure"). Where nothing is rounded
    it is as good as it is ("none").

    Without an allocation nothing changes when q is scaled, so ⟨q, dq⟩ = 0, and where inputs are small and φ is nearly
    φ(0) in all features, dq is a small remainder of terms that cancel. CENTRE is then φ(0), 0 otherwise: products take
    φ − φ(0), which bfloat16 holds as exactly as any number, and ⟨q, dq⟩ = 0 gives what all features have in common.
    """
    batch, head, start, first, last = locate(bounds, heads, length, size)
    a_token = D if DENSE else a_token * ALIGN
    b_token = D if DENSE else b_token * ALIGN
    u_token = E if DENSE else u_token * ALIGN
    m_token = E if DENSE else m_token * ALIGN
    r_token = D if DENSE else r_token * ALIGN
    plane = tl.cast(plane, tl.int64)
    row, segment, tile = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    own_head, other_head = head, head // shared
    if REVERSE:
        own_head, other_head = other_head, own_head
    own += (batch * a_batch + own_head * a_head) * ALIGN
    other += (batch * b_batch + other_head * b_head) * ALIGN
    left += (batch * u_batch + own_head * u_head) * ALIGN
    right += (batch * m_batch + other_head * m_head) * ALIGN
    grad_own += (batch * r_batch + head * r_head) * ALIGN
    flows += (batch * heads + head) * length
    grads += (batch * heads + head) * length
    count = load_count(state_scalars)
    columns, tokens = tile * BLOCK_D + tl.arange(0, BLOCK_D), tl.arange(0, C)
    index = row * segments + segment
    sums += index * (size // C) * (4 * D)
    after += index * (size // C) * (4 * D)
    lower = triangle(C, False)
    memory = tl.zeros([BLOCK_D, BLOCK_E], tl.float32)
    if memories is not None:
        memory += load_memory(memories + index * (D * E), 0, D, BLOCK_D, E, BLOCK_E, tile)
        if CENTRE != 0:
            # any row, the same for all tiles
            row_of_first = load_vector(memories, index * D, tl.arange(0, BLOCK_E), E)
            memory = tl.where((columns < D)[:, None], memory - row_of_first[None, :], 0.0)
    OWN_INVERSE: tl.constexpr = INVERSE_OUTGOING if REVERSE else INVERSE_INCOMING
    OTHER_INVERSE: tl.constexpr = INVERSE_INCOMING if REVERSE else INVERSE_OUTGOING
    OWN_FLOW: tl.constexpr = GRAD_OUTGOING if REVERSE else GRAD_INCOMING
    OTHER_FLOW: tl.constexpr = GRAD_INCOMING if REVERSE else GRAD_OUTGOING
    OWN_CONSERVED: tl.constexpr = GRAD_CONSERVED_OUTGOING if REVERSE else GRAD_CONSERVED_INCOMING
    OTHER_CONSERVED: tl.constexpr = GRAD_CONSERVED_INCOMING if REVERSE else GRAD_CONSERVED_OUTGOING
    MEASURED: tl.constexpr = GRAD_PLANES + 2 * TILES
    # dQ is a small difference of large terms: rounded but once, they would cost it two bits
    HALVES: tl.constexpr = tl.bfloat16 == DOT and REVERSE == 0
    mine = 1 - REVERSE
    later = load_vector(grad_sums, row * 4 + mine, columns, D)
    later += sum_segments(partial, segment + 1, segments, segments, columns, mine, D)
    if segment == 0:
        own_sum = load_vector(partial, index * 2 + mine, columns, D)
        store_vector(start_sums, row * 4 + mine, columns, later + own_sum, D)

    chunks = tl.cdiv(last - first, C).to(tl.int32)
    for step in tl.range(0, chunks, num_stages=STAGES):
        chunk = chunks - 1 - step if REVERSE else step
        base = first + chunk * C
        rows, keep, position = place(positions, batch, length, base, tokens, start, last, count)
        if CENTRE != 0:
            a = load_rows(own, base, rows, a_token, keep, positions, tile, D, BLOCK_D)
            phi = tl.where((columns < D)[None, :], centred_feature(a, scale, MAP) + CENTRE, 0.0)
            b = load_rows(other, base, rows, b_token, keep, positions, tile, D, BLOCK_D)
            b = centred_feature(b, scale, MAP).to(DOT)
        else:
            a, _ = load_features(
                own, base, rows, a_token, keep, positions, tile, scale, eps, D, BLOCK_D, MAP, FAST, DOT
            )
            b, _ = load_features(
                other, base, rows, b_token, keep, positions, tile, scale, eps, D, BLOCK_D, MAP, FAST, DOT
            )
        u = load_rows(left, base, rows, u_token, keep, positions, 0, E, BLOCK_E).to(DOT)
        m = load_rows(right, base, rows, m_token, keep, positions, 0, E, BLOCK_E).to(tl.float32)
        at, grads_at, inside = flows + base + tokens, grads + base + tokens, inside_of(tokens, base, last)
        take, give = load_weights(at, plane, keep)
        if REVERSE:
            take, give = give, take
        inverse = tl.load(at + OWN_INVERSE * plane, mask=inside, other=0.0)
        other_inverse = settled(tl.load(at + OTHER_INVERSE * plane, mask=inside, other=0.0))
        flow = tl.load(grads_at + OWN_FLOW * plane, mask=inside, other=0.0)
        other_flow = settled(tl.load(grads_at + OTHER_FLOW * plane, mask=inside, other=0.0))
        conserved = tl.load(grads_at + OWN_CONSERVED * plane, mask=inside, other=0.0)
        other_conserved = settled(tl.load(grads_at + OTHER_CONSERVED * plane, mask=inside, other=0.0))
        # needed last, but no load moves across the barriers of the products
        before = load_vector(sums, chunk * 4 + REVERSE, columns, D)
        before_conserved = load_vector(sums, chunk * 4 + 2 + REVERSE, columns, D)
        after_sum = later + load_vector(after, chunk * 4 + 2 * REVERSE, columns, D)
        after_conserved = load_vector(after, chunk * 4 + 1 + 2 * REVERSE, columns, D)
        if BALANCE != "none":
            overlap = load_tiles(grads_at + GRAD_PLANES * plane, plane, keep, TILES)

        given = (m * give[:, None]).to(DOT)
        met = across(u, given, PRECISION) * take[:, None]
        high = memory
        if HALVES:
            high = truncated(memory)
        gradient = across(u, high.to(DOT), PRECISION)
        if HALVES:
            gradient = tl.dot(u, tl.trans((memory - high).to(DOT)), gradient, input_precision=PRECISION)
        gradient *= take[:, None]
        memory = tl.dot(tl.trans(b), given, memory, input_precision=PRECISION)
        if not REVERSE:
            high = met
            if HALVES:
                high = truncated(met)
                low = within(met - high, lower, FAST, DOT)
                gradient = tl.dot(low, b, gradient, input_precision=PRECISION)
            gradient = tl.dot(within(high, lower, FAST, DOT), b, gradient, input_precision=PRECISION)
            if CENTRE == 0:
                if BALANCE == "measured":
                    found = load_tiles(grads_at + MEASURED * plane, plane, keep, tl.cdiv(D, BLOCK_D))
                else:
                    found = tl.sum(gradient * a.to(tl.float32), 1)
                if BALANCE == "measure":
                    tl.store(grads_at + (MEASURED + tile) * plane, found, mask=inside)
                elif BALANCE != "none":
                    flow -= (found - overlap) * inverse / position
        from_later = inverse[:, None] * other_conserved[None, :] + other_flow[None, :]
        if REVERSE:
            from_later += met
        from_earlier = conserved[:, None] * other_inverse[None, :]
        if positions is not None:
            from_earlier += flow[:, None] * tl.where(keep, 1.0, 0.0)[None, :]
        else:
            # what lies behind the last token is never earlier than one that is stored
            from_earlier += flow[:, None]
        weights = tl.where(tokens[:, None] == tokens[None, :], from_later + from_earlier, from_later)
        weights = tl.where(tokens[:, None] > tokens[None, :], from_earlier, weights)
        gradient = tl.dot(weights.to(DOT), b, gradient, input_precision=PRECISION)
        if RAISED:
            once = inverse * tl.cumsum(other_conserved, 0, reverse=True) + tl.cumsum(other_flow, 0, reverse=True)
            gradient += eps * once[:, None]
        gradient += flow[:, None] * settled(before)[None, :] + conserved[:, None] * settled(before_conserved)[None, :]
        gradient += inverse[:, None] * settled(after_conserved)[None, :] + settled(after_sum)[None, :]
        if CENTRE != 0:
            found, total = tl.sum(gradient * phi, 1), tl.sum(phi, 1)
            TILES_D: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
            if BALANCE == "measure":
                tl.store(grads_at + (MEASURED + tile) * plane, found, mask=inside)
                tl.store(grads_at + (MEASURED + TILES_D + tile) * plane, total, mask=inside)
            else:
                if BALANCE == "measured":
                    found = load_tiles(grads_at + MEASURED * plane, plane, inside, TILES_D)
                    total = load_tiles(grads_at + (MEASURED + TILES_D) * plane, plane, inside, TILES_D)
                # saturated features may all be 0, and so are then their gradients
                gradient -= (found / tl.maximum(total, 1e-20))[:, None]
            gradient = feature_gradient(gradient, phi, MAP)
        else:
            gradient = feature_gradient(gradient, a.to(tl.float32), MAP)
        if scale is not None:
            gradient *= scale
        if positions is not None:
            gradient = tl.where(keep[:, None], gradient, 0.0)
        if BALANCE != "measure":
            store_rows(grad_own, base, tokens, r_token, inside, tile, gradient, D, BLOCK_D)
