"""The forward kernels of bidirectional Flow-Attention, in the order of their launches; see `bidirectional.py`."""

from __future__ import annotations

import triton
import triton.language as tl

from .blocks import (
    clamped,
    dot_parts,
    dot_transposed,
    features,
    identity,
    memory_tile,
    moved,
    place,
    raised,
    rounded,
    rows,
    span,
    total,
    valid_tokens,
)
from .features import sigmoid

_VARYING = {f"{tensor}_{axis}" for tensor in "qkvgr" for axis in ("batch", "head", "row")}
_VARYING |= {"sinks", "sources", "heads", "segments"}


def kernel(function):
    """Jits a kernel that is compiled once for all lengths and strides: `launch.Strides` says what is known of those."""
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    return triton.jit(function, do_not_specialize=[name for name in names if name in _VARYING])


@triton.jit
def _sum_of(
    x, stride, mask, mask_start, count, record, scale,
    VECTOR: tl.constexpr, COUNT: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, MAP: tl.constexpr,
    FAST: tl.constexpr, EYE: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    columns, offset = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK)
    eye = identity(x, columns, EYE)
    result = tl.zeros((BLOCK, BLOCK_D), tl.float32)
    tokens = tl.zeros((BLOCK,), tl.float32)
    for start in tl.range(0, count, BLOCK, num_stages=STAGES):
        valid = valid_tokens(mask, mask_start, start, offset, count)
        phi = features(x, stride, start, offset, valid, columns, eye, scale, D, MAP, FAST, EYE)
        weight = valid.to(tl.float32)
        result += phi * weight[:, None]
        tokens += weight
    tl.store(record + VECTOR + columns, tl.sum(result, 0), mask=columns < D)
    tl.store(record + COUNT, tl.sum(tokens, 0))


@kernel
def sums(
    query, key, query_mask, key_mask, query_bounds, key_bounds, partial,
    q_batch, q_head, q_row, k_batch, k_head, k_row, sinks, sources, heads, segments, scale,
    SHARED: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, ALIGN: tl.constexpr,
    DENSE: tl.constexpr, MAP: tl.constexpr, FAST: tl.constexpr, EYE: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Σq by one half of the programs and Σk by the other, and how many tokens they are of."""
    q_row = D if DENSE else q_row * ALIGN
    k_row = D if DENSE else k_row * ALIGN
    SIZE: tl.constexpr = D * E + 4 * D + 4
    segment, sequence, head, record, _ = place(segments, heads, query_bounds is not None, False)
    own = partial + (record * segments + segment) * SIZE
    if tl.program_id(1) == 0:
        first, count = span(query_bounds, sequence, sinks, segment, segments, BLOCK)
        query = moved(query, sequence, head, first, q_batch * ALIGN, q_head * ALIGN, q_row, query_bounds)
        _sum_of(
            query, q_row, query_mask, sequence * sinks + first, count, own, scale,
            D * E + D, D * E + 4 * D + 1, D, BLOCK_D, MAP, FAST, EYE, BLOCK, STAGES,
        )  # fmt: skip
    else:
        first, count = span(key_bounds, sequence, sources, segment, segments, BLOCK)
        key = moved(key, sequence, head // SHARED, first, k_batch * ALIGN, k_head * ALIGN, k_row, key_bounds)
        _sum_of(
            key, k_row, key_mask, sequence * sources + first, count, own, scale,
            D * E, D * E + 4 * D, D, BLOCK_D, MAP, FAST, EYE, BLOCK, STAGES,
        )  # fmt: skip


@triton.jit
def _flow_of(
    x, stride, mask, mask_start, count, records, segment, segments, flow, scale, eps, flow_eps,
    READ: tl.constexpr, WRITE: tl.constexpr, SIZE: tl.constexpr, KEEP: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, MAP: tl.constexpr, FAST: tl.constexpr, EYE: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    columns, offset = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK)
    eye = identity(x, columns, EYE)
    other = raised(total(records + READ, segments, SIZE, columns, D, 16), columns, eps, D)
    constant = eps * tl.sum(other, 0) + flow_eps
    result = tl.zeros((BLOCK, BLOCK_D), tl.float32)
    for start in tl.range(0, count, BLOCK, num_stages=STAGES):
        valid = valid_tokens(mask, mask_start, start, offset, count)
        phi = features(x, stride, start, offset, valid, columns, eye, scale, D, MAP, FAST, EYE)
        amount = tl.sum(phi * other[None, :], 1) + constant
        if KEEP:
            tl.store(flow + start + offset, amount, mask=offset < count - start)
        result += phi * tl.where(valid, 1.0 / amount, 0.0)[:, None]
    tl.store(records + segment * SIZE + WRITE + columns, tl.sum(result, 0), mask=columns < D)


@kernel
def flows(
    query, key, query_mask, key_mask, query_bounds, key_bounds, partial, incoming, outgoing,
    q_batch, q_head, q_row, k_batch, k_head, k_row, sinks, sources, heads, segments, scale, eps, flow_eps,
    SHARED: tl.constexpr, KEEP: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr,
    ALIGN: tl.constexpr, DENSE: tl.constexpr, MAP: tl.constexpr, FAST: tl.constexpr, EYE: tl.constexpr,
    BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """I and Σq/I by one half of the programs, O and Σk/O by the other."""
    q_row = D if DENSE else q_row * ALIGN
    k_row = D if DENSE else k_row * ALIGN
    SIZE: tl.constexpr = D * E + 4 * D + 4
    segment, sequence, head, record, row = place(segments, heads, query_bounds is not None, True)
    records = partial + record * segments * SIZE
    if tl.program_id(1) == 0:
        first, count = span(query_bounds, sequence, sinks, segment, segments, BLOCK)
        query = moved(query, sequence, head, first, q_batch * ALIGN, q_head * ALIGN, q_row, query_bounds)
        _flow_of(
            query, q_row, query_mask, sequence * sinks + first, count, records, segment, segments,
            incoming + row * sinks + first, scale, eps, flow_eps,
            D * E, D * E + 3 * D, SIZE, True, D, BLOCK_D, MAP, FAST, EYE, BLOCK, STAGES,
        )  # fmt: skip
    else:
        first, count = span(key_bounds, sequence, sources, segment, segments, BLOCK)
        key = moved(key, sequence, head // SHARED, first, k_batch * ALIGN, k_head * ALIGN, k_row, key_bounds)
        _flow_of(
            key, k_row, key_mask, sequence * sources + first, count, records, segment, segments,
            outgoing + row * sources + first, scale, eps, flow_eps,
            D * E + D, D * E + 2 * D, SIZE, KEEP, D, BLOCK_D, MAP, FAST, EYE, BLOCK, STAGES,
        )  # fmt: skip


@kernel
def memory(
    key, value, key_mask, key_bounds, partial, conserved_outgoing,
    k_batch, k_head, k_row, v_batch, v_head, v_row, sources, heads, segments, scale, eps, flow_eps, clamp,
    SHARED: tl.constexpr, KEEP: tl.constexpr, COMPETITION: tl.constexpr, WHOLE: tl.constexpr, RESCALE: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, ALIGN: tl.constexpr,
    DENSE: tl.constexpr, MAP: tl.constexpr, FAST: tl.constexpr, EYE: tl.constexpr, MULTIPLY: tl.constexpr,
    BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Ô, the mass exp(Ô − reference) of the sources, and S weighted by it; of a WHOLE head, its finished record."""
    k_row = D if DENSE else k_row * ALIGN
    v_row = E if DENSE else v_row * ALIGN
    SIZE: tl.constexpr = D * E + 4 * D + 4
    segment, sequence, head, record, row = place(segments, heads, key_bounds is not None, False)
    records = partial + record * segments * SIZE
    own = records + segment * SIZE
    first, count = span(key_bounds, sequence, sources, segment, segments, BLOCK)
    key = moved(key, sequence, head // SHARED, first, k_batch * ALIGN, k_head * ALIGN, k_row, key_bounds)
    value = moved(value, sequence, head // SHARED, first, v_batch * ALIGN, v_head * ALIGN, v_row, key_bounds)
    mask_start = sequence * sources + first
    conserved_outgoing += row * sources + first

    columns, offset = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK)
    values = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    eye = identity(key, columns, EYE)
    conserved_query_sum = raised(total(records + D * E + 3 * D, segments, SIZE, columns, D, 16), columns, eps, D)
    constant = eps * tl.sum(conserved_query_sum, 0) + flow_eps

    # Ô is not negative, and Σ_i q_i/I_i bounds it where φ ≤ 1: exp needs no reference unless the bound is large
    reference = tl.zeros((), tl.float32)
    if COMPETITION == "softmax":
        bound = clamp
        if MAP == "sigmoid":
            bound = tl.minimum(clamp, tl.sum(conserved_query_sum, 0) + constant)
        if bound > 40:
            for start in tl.range(0, count, BLOCK):
                valid = valid_tokens(key_mask, mask_start, start, offset, count)
                k = features(key, k_row, start, offset, valid, columns, eye, scale, D, MAP, FAST, EYE)
                flow = clamped(tl.sum(k * conserved_query_sum[None, :], 1) + constant, -clamp, clamp)
                reference = tl.maximum(reference, tl.max(tl.where(valid, flow, 0.0), 0))

    result = tl.zeros((BLOCK_D, BLOCK_E), tl.float32)
    mass = tl.zeros((BLOCK,), tl.float32)
    for start in tl.range(0, count, BLOCK, num_stages=STAGES):
        valid = valid_tokens(key_mask, mask_start, start, offset, count)
        k = features(key, k_row, start, offset, valid, columns, eye, scale, D, MAP, FAST, EYE)
        v = rows(value, v_row, start, offset, valid, values, E)
        flow = tl.sum(k * conserved_query_sum[None, :], 1) + constant
        if KEEP and tl.program_id(1) == 0:
            tl.store(conserved_outgoing + start + offset, flow, mask=offset < count - start)
        flow = clamped(flow, -clamp, clamp)
        if COMPETITION == "softmax":
            weight = tl.exp(flow - reference)
        elif COMPETITION == "sigmoid":
            weight = sigmoid(flow, False)
        else:
            weight = tl.full((BLOCK,), 1.0, tl.float32)
        weight = tl.where(valid, weight, 0.0)
        mass += weight
        result = dot_transposed(k * weight[:, None], v, result, MULTIPLY)
    scalars = own + D * E + 4 * D
    own += columns[:, None] * E + values[None, :]
    inside = (columns < D)[:, None] & (values < E)[None, :]
    if WHOLE:
        m, n = tl.load(scalars), tl.load(scalars + 1)
        inverse = _inverse(tl.sum(mass, 0), m, COMPETITION)
        tl.store(own, result * inverse, mask=inside)
        # all threads have loaded what one of them will store
        tl.debug_barrier()
        if tl.program_id(1) == 0:
            _store_scalars(scalars, m, n, reference, inverse, COMPETITION, RESCALE)
    else:
        tl.store(own, result, mask=inside)
        if tl.program_id(1) == 0:
            tl.store(scalars + 2, reference)
            tl.store(scalars + 3, tl.sum(mass, 0))


@triton.jit
def _inverse(mass, m, COMPETITION: tl.constexpr):
    """1/Z, of the mass of all sources of a head."""
    if COMPETITION != "softmax":
        mass = m
    return tl.where(mass > 0, 1.0 / mass, 0.0)


@triton.jit
def _store_scalars(scalars, m, n, reference, inverse, COMPETITION: tl.constexpr, RESCALE: tl.constexpr):
    tl.store(scalars, m if RESCALE or COMPETITION != "softmax" else 1.0)
    tl.store(scalars + 1, n / tl.maximum(m, 1.0) if RESCALE else 1.0)
    tl.store(scalars + 2, reference)
    tl.store(scalars + 3, inverse)


@kernel
def finish(
    partial, records, segments,
    COMPETITION: tl.constexpr, RESCALE: tl.constexpr, D: tl.constexpr, E: tl.constexpr, CHUNK: tl.constexpr,
    VECTORS: tl.constexpr,
):  # fmt: skip
    """The record of a head from those of its segments, of which there are several."""
    SIZE: tl.constexpr = D * E + 4 * D + 4
    partial += tl.program_id(0).to(tl.int64) * segments * SIZE
    records += tl.program_id(0).to(tl.int64) * SIZE
    m, n, mass, reference = 0.0, 0.0, 0.0, 0.0
    for start in range(0, segments, 16):
        segment = start + tl.arange(0, 16)
        kept = segment < segments
        scalars = partial + segment * SIZE + D * E + 4 * D
        m += tl.sum(tl.load(scalars, mask=kept, other=0.0), 0)
        n += tl.sum(tl.load(scalars + 1, mask=kept, other=0.0), 0)
        reference = tl.maximum(reference, tl.max(tl.load(scalars + 2, mask=kept, other=0.0), 0))

    index = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    result = tl.zeros((CHUNK,), tl.float32)
    for start in range(0, segments, 4):
        segment = start + tl.arange(0, 4)
        kept = segment < segments
        scalars = partial + segment * SIZE + D * E + 4 * D
        weight = tl.exp(tl.load(scalars + 2, mask=kept, other=0.0) - reference)
        mass += tl.sum(weight * tl.load(scalars + 3, mask=kept, other=0.0), 0)
        kept = kept[:, None] & (index < D * E)[None, :]
        part = tl.load(partial + segment[:, None] * SIZE + index[None, :], mask=kept, other=0.0)
        result += tl.sum(part * weight[:, None], 0)
    inverse = _inverse(mass, m, COMPETITION)
    tl.store(records + index, result * inverse, mask=index < D * E)
    if tl.program_id(1) == 0:
        columns = tl.arange(0, VECTORS)
        vectors = total(partial + D * E, segments, SIZE, columns, 4 * D, 4)
        tl.store(records + D * E + columns, vectors, mask=columns < 4 * D)
        _store_scalars(records + D * E + 4 * D, m, n, reference, inverse, COMPETITION, RESCALE)


@kernel
def result(
    query, out, query_mask, query_bounds, records, incoming, allocation,
    q_batch, q_head, q_row, r_batch, r_head, r_row, sinks, heads, segments, scale, eps, flow_eps,
    KEEP: tl.constexpr, ALLOCATION: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr, ALIGN: tl.constexpr, DENSE: tl.constexpr, MAP: tl.constexpr, FAST: tl.constexpr,
    EYE: tl.constexpr, MULTIPLY: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Î, α and R."""
    q_row = D if DENSE else q_row * ALIGN
    r_row = E if DENSE else r_row * ALIGN
    SIZE: tl.constexpr = D * E + 4 * D + 4
    segment, sequence, head, record, row = place(segments, heads, query_bounds is not None, True)
    records += record * SIZE
    first, count = span(query_bounds, sequence, sinks, segment, segments, BLOCK)
    query = moved(query, sequence, head, first, q_batch * ALIGN, q_head * ALIGN, q_row, query_bounds)
    out = moved(out, sequence, head, first, r_batch * ALIGN, r_head * ALIGN, r_row, query_bounds)
    mask_start = sequence * sinks + first
    incoming += row * sinks + first
    allocation += row * sinks + first

    columns, values, offset = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E), tl.arange(0, BLOCK)
    eye = identity(query, columns, EYE)
    high, low = memory_tile(records, columns[:, None], values[None, :], D, E, MULTIPLY)
    conserved_key_sum = tl.load(records + D * E + 2 * D + columns, mask=columns < D, other=0.0)
    conserved_key_sum = raised(conserved_key_sum, columns, eps, D)
    constant = eps * tl.sum(conserved_key_sum, 0) + flow_eps
    size, ratio = tl.load(records + D * E + 4 * D), tl.load(records + D * E + 4 * D + 1)
    for start in tl.range(0, count, BLOCK, num_stages=STAGES):
        valid = valid_tokens(query_mask, mask_start, start, offset, count)
        inside = offset < count - start
        q = features(query, q_row, start, offset, valid, columns, eye, scale, D, MAP, FAST, EYE)
        if ALLOCATION == "sigmoid":
            share = sigmoid((tl.sum(q * conserved_key_sum[None, :], 1) + constant) * ratio, False)
        else:
            share = tl.full((BLOCK,), 1.0, tl.float32)
        share = tl.where(valid, share, 0.0)
        if KEEP:
            tl.store(allocation + start + offset, share, mask=inside)
        received = share * size / tl.load(incoming + start + offset, mask=inside, other=1.0)
        for tile in tl.range(0, E, BLOCK_E, num_stages=1):
            if E > BLOCK_E:
                high, low = memory_tile(records, columns[:, None], tile + values[None, :], D, E, MULTIPLY)
            x = dot_parts(q, high, low, tl.zeros((BLOCK, BLOCK_E), tl.float32), MULTIPLY)
            tl.store(
                out + tl.cast(start, tl.int64) * r_row + (offset[:, None] * r_row + (tile + values)[None, :]),
                rounded(x * received[:, None], out, MULTIPLY),
                mask=inside[:, None] & (tile + values < E)[None, :],
            )
