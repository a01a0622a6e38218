"""The backward kernels of bidirectional Flow-Attention, in the order of their launches; see `bidirectional.py`."""

from __future__ import annotations

import triton
import triton.language as tl

from .bidirectional_forward import kernel
from .blocks import (
    clamped,
    dot_parts,
    dot_transposed,
    features,
    identity,
    memory_tile,
    moved,
    place,
    rounded,
    rows,
    span,
    total,
    valid_tokens,
)
from .features import feature_gradient, sigmoid


@kernel
def grad_memory(
    query, grad, query_mask, query_bounds, records, partial, incoming, allocation, exchange, products,
    q_batch, q_head, q_row, g_batch, g_head, g_row, sinks, heads, segments, scale, eps,
    ALLOCATION: tl.constexpr, WHOLE: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr, ALIGN: tl.constexpr, DENSE: tl.constexpr, MAP: tl.constexpr, FAST: tl.constexpr,
    EYE: tl.constexpr, MULTIPLY: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dS = Σ w qᵀ dR with w = α μ/I, ⟨dR, R⟩ of every sink, and d(Σk/O) = Σ dÎ (q + ε); of a WHOLE head also ⟨S, dS⟩,
    tile by tile."""
    q_row = D if DENSE else q_row * ALIGN
    g_row = E if DENSE else g_row * ALIGN
    SIZE: tl.constexpr = D * E + 4 * D + 4
    segment, sequence, head, record, row = place(segments, heads, query_bounds is not None, False)
    records += record * SIZE
    own = partial + (record * segments + segment) * SIZE
    first, count = span(query_bounds, sequence, sinks, segment, segments, BLOCK)
    query = moved(query, sequence, head, first, q_batch * ALIGN, q_head * ALIGN, q_row, query_bounds)
    grad = moved(grad, sequence, head, first, g_batch * ALIGN, g_head * ALIGN, g_row, query_bounds)
    mask_start = sequence * sinks + first
    incoming += row * sinks + first
    allocation += row * sinks + first
    exchange += row * sinks + first

    columns, values, offset = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E), tl.arange(0, BLOCK)
    eye = identity(query, columns, EYE)
    high, low = memory_tile(records, columns[None, :], values[:, None], D, E, MULTIPLY)
    size, ratio = tl.load(records + D * E + 4 * D), tl.load(records + D * E + 4 * D + 1)
    result = tl.zeros((BLOCK_D, BLOCK_E), tl.float32)
    vector = tl.zeros((BLOCK, BLOCK_D), tl.float32)
    weights = tl.zeros((BLOCK,), tl.float32)
    for start in tl.range(0, count, BLOCK, num_stages=STAGES):
        valid = valid_tokens(query_mask, mask_start, start, offset, count)
        q = features(query, q_row, start, offset, valid, columns, eye, scale, D, MAP, FAST, EYE)
        share = tl.load(allocation + start + offset, mask=valid, other=0.0)
        received = share * size / tl.load(incoming + start + offset, mask=valid, other=1.0)
        seen = tl.zeros((BLOCK,), tl.float32)
        g = rows(grad, g_row, start, offset, valid, tl.program_id(1) * BLOCK_E + values, E)
        for tile in tl.range(0, E, BLOCK_E, num_stages=1):
            each = g
            if E > BLOCK_E:
                each = rows(grad, g_row, start, offset, valid, tile + values, E)
                high, low = memory_tile(records, columns[None, :], tile + values[:, None], D, E, MULTIPLY)
            x = dot_parts(each, high, low, tl.zeros((BLOCK, BLOCK_D), tl.float32), MULTIPLY)
            seen += tl.sum(q * x, 1)
        result = dot_transposed(q * received[:, None], g, result, MULTIPLY)
        seen *= received
        if tl.program_id(1) == 0:
            tl.store(exchange + start + offset, seen, mask=offset < count - start)
        if ALLOCATION == "sigmoid":
            weight = ratio * (1 - share) * seen
            vector += q * weight[:, None]
            weights += weight
    values += tl.program_id(1) * BLOCK_E
    index = columns[:, None] * E + values[None, :]
    inside = (columns < D)[:, None] & (values < E)[None, :]
    tl.store(own + index, result, mask=inside)
    if WHOLE:
        product = tl.sum(result * tl.load(records + index, mask=inside, other=0.0))
        tl.store(products + record * tl.num_programs(1) + tl.program_id(1), product)
    if tl.program_id(1) == 0:
        tl.store(own + D * E + 2 * D + columns, tl.sum(vector, 0) + eps * tl.sum(weights, 0), mask=columns < D)


@kernel
def grad_finish(
    partial, records, grads, products, segments,
    D: tl.constexpr, E: tl.constexpr, CHUNK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """dS and d(Σk/O) of a head from the records of its segments, which are several, and ⟨S, dS⟩ chunk by chunk."""
    SIZE: tl.constexpr = D * E + 4 * D + 4
    partial += tl.program_id(0).to(tl.int64) * segments * SIZE
    records += tl.program_id(0).to(tl.int64) * SIZE
    grads += tl.program_id(0).to(tl.int64) * SIZE
    index = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    result = total(partial, segments, SIZE, index, D * E, 4)
    tl.store(grads + index, result, mask=index < D * E)
    product = tl.sum(result * tl.load(records + index, mask=index < D * E, other=0.0), 0)
    tl.store(products + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), product)
    if tl.program_id(1) == 0:
        columns = tl.arange(0, BLOCK_D)
        vector = total(partial + D * E + 2 * D, segments, SIZE, columns, D, 16)
        tl.store(grads + D * E + 2 * D + columns, vector, mask=columns < D)


@triton.jit
def _competition(flow, clamp, reference, inverse, COMPETITION: tl.constexpr):
    """The share of each source, c/μ, from its Ô and the scalars of its head."""
    flow = clamped(flow, -clamp, clamp)
    if COMPETITION == "softmax":
        return tl.exp(flow - reference) * inverse
    elif COMPETITION == "sigmoid":
        return sigmoid(flow, False) * inverse
    else:
        return tl.zeros_like(flow) + inverse


@kernel
def grad_competition(
    key, value, key_mask, key_bounds, records, partial, grads, products, outgoing, conserved_outgoing, grad_outgoing,
    grad_conserved,
    k_batch, k_head, k_row, v_batch, v_head, v_row, sources, heads, segments, pieces, scale, eps, clamp,
    SHARED: tl.constexpr, COMPETITION: tl.constexpr, PIECES: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, ALIGN: tl.constexpr, DENSE: tl.constexpr, MAP: tl.constexpr,
    FAST: tl.constexpr, EYE: tl.constexpr, MULTIPLY: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dÔ and dO of every source, and what they add up to: d(Σq/I) and dΣq."""
    k_row = D if DENSE else k_row * ALIGN
    v_row = E if DENSE else v_row * ALIGN
    SIZE: tl.constexpr = D * E + 4 * D + 4
    segment, sequence, head, record, row = place(segments, heads, key_bounds is not None, False)
    records += record * SIZE
    grads += record * SIZE
    own = partial + (record * segments + segment) * SIZE
    first, count = span(key_bounds, sequence, sources, segment, segments, BLOCK)
    key = moved(key, sequence, head // SHARED, first, k_batch * ALIGN, k_head * ALIGN, k_row, key_bounds)
    value = moved(value, sequence, head // SHARED, first, v_batch * ALIGN, v_head * ALIGN, v_row, key_bounds)
    mask_start = sequence * sources + first
    outgoing += row * sources + first
    conserved_outgoing += row * sources + first
    grad_outgoing += row * sources + first
    grad_conserved += row * sources + first

    columns, values, offset = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E), tl.arange(0, BLOCK)
    eye = identity(key, columns, EYE)
    high, low = memory_tile(grads, columns[None, :], values[:, None], D, E, MULTIPLY)
    reference, inverse = tl.load(records + D * E + 4 * D + 2), tl.load(records + D * E + 4 * D + 3)
    piece = tl.arange(0, PIECES)
    product = tl.sum(tl.load(products + record * pieces + piece, mask=piece < pieces, other=0.0), 0)
    grad_conserved_key_sum = tl.load(grads + D * E + 2 * D + columns, mask=columns < D, other=0.0)
    vector = tl.zeros((BLOCK, BLOCK_D), tl.float32)
    weights = tl.zeros((BLOCK,), tl.float32)
    vector_conserved = tl.zeros((BLOCK, BLOCK_D), tl.float32)
    weights_conserved = tl.zeros((BLOCK,), tl.float32)
    for start in tl.range(0, count, BLOCK, num_stages=STAGES):
        valid = valid_tokens(key_mask, mask_start, start, offset, count)
        inside = offset < count - start
        k = features(key, k_row, start, offset, valid, columns, eye, scale, D, MAP, FAST, EYE)
        amount = tl.load(outgoing + start + offset, mask=valid, other=1.0)
        weight = tl.where(valid, -tl.sum(k * grad_conserved_key_sum[None, :], 1) / amount / amount, 0.0)
        tl.store(grad_outgoing + start + offset, weight, mask=inside)
        vector += k * weight[:, None]
        weights += weight
        if COMPETITION != "none":
            seen = tl.zeros((BLOCK,), tl.float32)
            for tile in tl.range(0, E, BLOCK_E, num_stages=1):
                v = rows(value, v_row, start, offset, valid, tile + values, E)
                if E > BLOCK_E:
                    high, low = memory_tile(grads, columns[None, :], tile + values[:, None], D, E, MULTIPLY)
                x = dot_parts(v, high, low, tl.zeros((BLOCK, BLOCK_D), tl.float32), MULTIPLY)
                seen += tl.sum(k * x, 1)
            flow = tl.load(conserved_outgoing + start + offset, mask=valid, other=0.0)
            share = _competition(flow, clamp, reference, inverse, COMPETITION)
            if COMPETITION == "softmax":
                weight = share * (seen - product)
            else:
                weight = share * seen * (1.0 - sigmoid(clamped(flow, -clamp, clamp), False))
            weight = tl.where(valid & (tl.abs(flow) <= clamp), weight, 0.0)
            tl.store(grad_conserved + start + offset, weight, mask=inside)
            vector_conserved += k * weight[:, None]
            weights_conserved += weight
    vectors = own + D * E + columns
    tl.store(vectors + D, tl.sum(vector, 0) + eps * tl.sum(weights, 0), mask=columns < D)
    tl.store(vectors + 3 * D, tl.sum(vector_conserved, 0) + eps * tl.sum(weights_conserved, 0), mask=columns < D)


@kernel
def grad_query(
    query, grad, out, query_mask, query_bounds, records, partial, incoming, allocation, exchange,
    q_batch, q_head, q_row, g_batch, g_head, g_row, r_batch, r_head, r_row, sinks, heads, segments, scale, eps,
    ALLOCATION: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    ALIGN: tl.constexpr, DENSE: tl.constexpr, MAP: tl.constexpr, FAST: tl.constexpr, EYE: tl.constexpr,
    MULTIPLY: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dQ, and dΣk = Σ dI (q + ε)."""
    q_row = D if DENSE else q_row * ALIGN
    g_row = E if DENSE else g_row * ALIGN
    r_row = D if DENSE else r_row * ALIGN
    SIZE: tl.constexpr = D * E + 4 * D + 4
    segment, sequence, head, record, row = place(segments, heads, query_bounds is not None, True)
    records += record * SIZE
    partial += record * segments * SIZE
    first, count = span(query_bounds, sequence, sinks, segment, segments, BLOCK)
    query = moved(query, sequence, head, first, q_batch * ALIGN, q_head * ALIGN, q_row, query_bounds)
    grad = moved(grad, sequence, head, first, g_batch * ALIGN, g_head * ALIGN, g_row, query_bounds)
    out = moved(out, sequence, head, first, r_batch * ALIGN, r_head * ALIGN, r_row, query_bounds)
    mask_start = sequence * sinks + first
    incoming += row * sinks + first
    allocation += row * sinks + first
    exchange += row * sinks + first

    columns, values, offset = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E), tl.arange(0, BLOCK)
    eye = identity(query, columns, EYE)
    high, low = memory_tile(records, columns[None, :], values[:, None], D, E, MULTIPLY)
    vectors = records + D * E + columns
    key_sum = tl.load(vectors, mask=columns < D, other=0.0) + eps
    conserved_key_sum = tl.load(vectors + 2 * D, mask=columns < D, other=0.0) + eps
    grad_query_sum = total(partial + D * E + D, segments, SIZE, columns, D, 16)
    grad_conserved_query_sum = total(partial + D * E + 3 * D, segments, SIZE, columns, D, 16)
    size, ratio = tl.load(records + D * E + 4 * D), tl.load(records + D * E + 4 * D + 1)
    vector = tl.zeros((BLOCK, BLOCK_D), tl.float32)
    weights = tl.zeros((BLOCK,), tl.float32)
    for start in tl.range(0, count, BLOCK, num_stages=STAGES):
        valid = valid_tokens(query_mask, mask_start, start, offset, count)
        q = features(query, q_row, start, offset, valid, columns, eye, scale, D, MAP, FAST, EYE)
        inverse = 1.0 / tl.load(incoming + start + offset, mask=valid, other=1.0)
        share = tl.load(allocation + start + offset, mask=valid, other=0.0)
        seen = tl.load(exchange + start + offset, mask=valid, other=0.0)
        weight = -(seen + tl.sum(q * grad_conserved_query_sum[None, :], 1) * inverse) * inverse
        weight = tl.where(valid, weight, 0.0)
        vector += q * weight[:, None]
        weights += weight

        x = tl.zeros((BLOCK, BLOCK_D), tl.float32)
        for tile in tl.range(0, E, BLOCK_E, num_stages=1):
            g = rows(grad, g_row, start, offset, valid, tile + values, E)
            if E > BLOCK_E:
                high, low = memory_tile(records, columns[None, :], tile + values[:, None], D, E, MULTIPLY)
            x = dot_parts(g, high, low, x, MULTIPLY)
        # the derivative of scale·x, and the padding, are cheaper here than for every number
        factor = tl.where(valid, scale, 0.0)
        x = x * (share * size * inverse * factor)[:, None] + (weight * factor)[:, None] * key_sum[None, :]
        x += (inverse * factor)[:, None] * grad_conserved_query_sum[None, :]
        x += factor[:, None] * grad_query_sum[None, :]
        if ALLOCATION == "sigmoid":
            x += (ratio * (1 - share) * seen * factor)[:, None] * conserved_key_sum[None, :]
        x = feature_gradient(x, q, MAP)
        tl.store(
            out + tl.cast(start, tl.int64) * r_row + (offset[:, None] * r_row + columns[None, :]),
            rounded(x, out, MULTIPLY),
            mask=(offset < count - start)[:, None] & (columns < D)[None, :],
        )
    vector_sum = tl.sum(vector, 0) + eps * tl.sum(weights, 0)
    tl.store(partial + segment * SIZE + D * E + columns, vector_sum, mask=columns < D)


@triton.jit
def _of_head(records, grads, columns, eps, D: tl.constexpr, E: tl.constexpr):
    """Σq + ε, Σq/I + ε, d(Σk/O), the reference and 1/Z of a query head."""
    vectors, scalars = records + D * E + columns, records + D * E + 4 * D
    query_sum = tl.load(vectors + D, mask=columns < D, other=0.0) + eps
    conserved_query_sum = tl.load(vectors + 3 * D, mask=columns < D, other=0.0) + eps
    grad_conserved_key_sum = tl.load(grads + D * E + 2 * D + columns, mask=columns < D, other=0.0)
    return query_sum, conserved_query_sum, grad_conserved_key_sum, tl.load(scalars + 2), tl.load(scalars + 3)


@kernel
def grad_source(
    key, value, out_key, out_value, key_mask, key_bounds, records, partial, grads, outgoing, conserved_outgoing,
    grad_outgoing, grad_conserved,
    k_batch, k_head, k_row, v_batch, v_head, v_row, g_batch, g_head, g_row, r_batch, r_head, r_row, sources, heads,
    segments, scale, eps, clamp,
    SHARED: tl.constexpr, COMPETITION: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr, ALIGN: tl.constexpr, DENSE: tl.constexpr, MAP: tl.constexpr, FAST: tl.constexpr,
    EYE: tl.constexpr, MULTIPLY: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dK and dV of a key head, summed over the query heads that share it."""
    k_row = D if DENSE else k_row * ALIGN
    v_row = E if DENSE else v_row * ALIGN
    g_row = D if DENSE else g_row * ALIGN
    r_row = E if DENSE else r_row * ALIGN
    SIZE: tl.constexpr = D * E + 4 * D + 4
    segment, sequence, head, record, row = place(segments, heads // SHARED, key_bounds is not None, True)
    first, count = span(key_bounds, sequence, sources, segment, segments, BLOCK)
    key = moved(key, sequence, head, first, k_batch * ALIGN, k_head * ALIGN, k_row, key_bounds)
    value = moved(value, sequence, head, first, v_batch * ALIGN, v_head * ALIGN, v_row, key_bounds)
    out_key = moved(out_key, sequence, head, first, g_batch * ALIGN, g_head * ALIGN, g_row, key_bounds)
    out_value = moved(out_value, sequence, head, first, r_batch * ALIGN, r_head * ALIGN, r_row, key_bounds)
    mask_start = sequence * sources + first
    # of the first query head that shares this key head
    records += record * SHARED * SIZE
    grads += record * SHARED * SIZE
    partial += record * SHARED * segments * SIZE
    outgoing += row * SHARED * sources + first
    conserved_outgoing += row * SHARED * sources + first
    grad_outgoing += row * SHARED * sources + first
    grad_conserved += row * SHARED * sources + first

    columns, values, offset = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E), tl.arange(0, BLOCK)
    eye = identity(key, columns, EYE)
    high, low = memory_tile(grads, columns[:, None], values[None, :], D, E, MULTIPLY)
    high_t, low_t = memory_tile(grads, columns[None, :], values[:, None], D, E, MULTIPLY)
    query_sum, conserved_query_sum, grad_conserved_key_sum, reference, mass = _of_head(
        records, grads, columns, eps, D, E
    )
    grad_key_sum = tl.zeros((BLOCK_D,), tl.float32)
    for other in range(SHARED):
        grad_key_sum += total(partial + other * segments * SIZE + D * E, segments, SIZE, columns, D, 16)
    for start in tl.range(0, count, BLOCK, num_stages=STAGES):
        valid = valid_tokens(key_mask, mask_start, start, offset, count)
        inside = offset < count - start
        k = features(key, k_row, start, offset, valid, columns, eye, scale, D, MAP, FAST, EYE)
        factor = tl.where(valid, scale, 0.0)
        x = factor[:, None] * grad_key_sum[None, :]
        for tile in tl.range(0, E, BLOCK_E, num_stages=1):
            v = rows(value, v_row, start, offset, valid, tile + values, E)
            y = tl.zeros((BLOCK, BLOCK_E), tl.float32)
            # not pipelined: several dS at once would not fit into shared memory
            for member in tl.range(0, SHARED, num_stages=1):
                if SHARED > 1:
                    query_sum, conserved_query_sum, grad_conserved_key_sum, reference, mass = _of_head(
                        records + member * SIZE, grads + member * SIZE, columns, eps, D, E
                    )
                if E > BLOCK_E or SHARED > 1:
                    own = grads + member * SIZE
                    high, low = memory_tile(own, columns[:, None], tile + values[None, :], D, E, MULTIPLY)
                    high_t, low_t = memory_tile(own, columns[None, :], tile + values[:, None], D, E, MULTIPLY)
                token = member * tl.cast(sources, tl.int64) + start + offset
                flow = tl.load(conserved_outgoing + token, mask=valid, other=0.0)
                share = tl.where(valid, _competition(flow, clamp, reference, mass, COMPETITION), 0.0)
                zero = tl.zeros((BLOCK, BLOCK_E), tl.float32)
                y += dot_parts(k, high, low, zero, MULTIPLY) * share[:, None]
                zero = tl.zeros((BLOCK, BLOCK_D), tl.float32)
                x += dot_parts(v, high_t, low_t, zero, MULTIPLY) * (share * factor)[:, None]
                if tile == 0:
                    inverse = factor / tl.load(outgoing + token, mask=valid, other=1.0)
                    weight = factor * tl.load(grad_outgoing + token, mask=valid, other=0.0)
                    x += inverse[:, None] * grad_conserved_key_sum[None, :] + weight[:, None] * query_sum[None, :]
                    if COMPETITION != "none":
                        weight = factor * tl.load(grad_conserved + token, mask=valid, other=0.0)
                        x += weight[:, None] * conserved_query_sum[None, :]
            tl.store(
                out_value + tl.cast(start, tl.int64) * r_row + (offset[:, None] * r_row + (tile + values)[None, :]),
                rounded(y, out_value, MULTIPLY),
                mask=inside[:, None] & (tile + values < E)[None, :],
            )
        x = feature_gradient(x, k, MAP)
        tl.store(
            out_key + tl.cast(start, tl.int64) * g_row + (offset[:, None] * g_row + columns[None, :]),
            rounded(x, out_key, MULTIPLY),
            mask=inside[:, None] & (columns < D)[None, :],
        )
