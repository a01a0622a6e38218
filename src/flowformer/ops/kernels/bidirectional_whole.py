"""All passes of bidirectional Flow-Attention over a head in one launch, for heads that one program can have to itself.

A short sequence takes a GPU less time than the host needs for five launches. With enough heads to keep the GPU busy
nothing is gained by cutting them into segments, and the program of a head can go from pass to pass on its own.
"""

from __future__ import annotations

import triton.language as tl

from .bidirectional_backward import grad_competition, grad_finish_chunk, grad_memory, grad_query, grad_source
from .bidirectional_forward import finish_chunk, flows, kernel, memory, result, sums


@kernel
def forward(
    query, key, value, out, query_mask, key_mask, query_bounds, key_bounds, partial, records,
    incoming, allocation, outgoing, conserved_outgoing,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, r_batch, r_head, r_row,
    sinks, sources, heads, scale, eps, flow_eps, clamp,
    SHARED: tl.constexpr, KEEP: tl.constexpr, COMPETITION: tl.constexpr, ALLOCATION: tl.constexpr,
    RESCALE: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    ALIGN: tl.constexpr, MAP: tl.constexpr, FAST: tl.constexpr, MULTIPLY: tl.constexpr, CHUNK: tl.constexpr,
    VECTORS: tl.constexpr, SUMS: tl.constexpr, FLOWS: tl.constexpr, MEMORY: tl.constexpr, RESULT: tl.constexpr,
):  # fmt: skip
    """SUMS, FLOWS, MEMORY and RESULT are (EYE, BLOCK, STAGES) of the passes."""
    sums(
        query, key, query_mask, key_mask, query_bounds, key_bounds, partial,
        q_batch, q_head, q_row, k_batch, k_head, k_row, sinks, sources, heads, 1, scale,
        SHARED, D, E, BLOCK_D, ALIGN, MAP, FAST, SUMS[0], SUMS[1], SUMS[2], True,
    )  # fmt: skip
    # what its threads have written, they see from here on
    tl.debug_barrier()
    flows(
        query, key, query_mask, key_mask, query_bounds, key_bounds, partial, incoming, outgoing,
        q_batch, q_head, q_row, k_batch, k_head, k_row, sinks, sources, heads, 1, scale, eps, flow_eps,
        SHARED, KEEP, D, E, BLOCK_D, ALIGN, MAP, FAST, FLOWS[0], FLOWS[1], FLOWS[2], True,
    )  # fmt: skip
    tl.debug_barrier()
    memory(
        key, value, key_mask, key_bounds, partial, conserved_outgoing,
        k_batch, k_head, k_row, v_batch, v_head, v_row, sources, heads, 1, scale, eps, flow_eps, clamp,
        SHARED, KEEP, COMPETITION, D, E, BLOCK_D, BLOCK_E, ALIGN, MAP, FAST, MEMORY[0], MULTIPLY, MEMORY[1], MEMORY[2],
    )  # fmt: skip
    tl.debug_barrier()
    for chunk in range(0, tl.cdiv(D * E, CHUNK)):
        finish_chunk(partial, records, chunk, 1, COMPETITION, RESCALE, D, E, CHUNK, VECTORS)
    tl.debug_barrier()
    result(
        query, out, query_mask, query_bounds, records, incoming, allocation,
        q_batch, q_head, q_row, r_batch, r_head, r_row, sinks, heads, 1, scale, eps, flow_eps,
        KEEP, ALLOCATION, D, E, BLOCK_D, BLOCK_E, ALIGN, MAP, FAST, RESULT[0], MULTIPLY, RESULT[1], RESULT[2], True,
    )  # fmt: skip


@kernel
def backward(
    query, key, value, grad, out_query, out_key, out_value, query_mask, key_mask, query_bounds, key_bounds,
    records, partial, grads, products, incoming, allocation, exchange, outgoing, conserved_outgoing,
    grad_outgoing, grad_conserved,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, g_batch, g_head, g_row,
    dq_batch, dq_head, dq_row, dk_batch, dk_head, dk_row, dv_batch, dv_head, dv_row,
    sinks, sources, heads, scale, eps, clamp,
    COMPETITION: tl.constexpr, ALLOCATION: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr, ALIGN: tl.constexpr, MAP: tl.constexpr, FAST: tl.constexpr, MULTIPLY: tl.constexpr,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
    MEMORY: tl.constexpr, SHARE: tl.constexpr, QUERY: tl.constexpr, SOURCE: tl.constexpr,
):  # fmt: skip
    """Where no key head is shared. MEMORY, SHARE, QUERY and SOURCE are (EYE, BLOCK, STAGES) of the passes."""
    grad_memory(
        query, grad, query_mask, query_bounds, records, partial, incoming, allocation, exchange,
        q_batch, q_head, q_row, g_batch, g_head, g_row, sinks, heads, 1, scale, eps,
        ALLOCATION, D, E, BLOCK_D, BLOCK_E, ALIGN, MAP, FAST, MEMORY[0], MULTIPLY, MEMORY[1], MEMORY[2],
    )  # fmt: skip
    tl.debug_barrier()
    chunks = tl.cdiv(D * E, CHUNK)
    for chunk in range(0, chunks):
        grad_finish_chunk(partial, records, grads, products, chunk, chunks, 1, D, E, CHUNK, BLOCK_D)
    tl.debug_barrier()
    grad_competition(
        key, value, key_mask, key_bounds, records, partial, grads, products, outgoing, conserved_outgoing,
        grad_outgoing, grad_conserved,
        k_batch, k_head, k_row, v_batch, v_head, v_row, sources, heads, 1, chunks, scale, eps, clamp,
        1, COMPETITION, CHUNKS, D, E, BLOCK_D, BLOCK_E, ALIGN, MAP, FAST, SHARE[0], MULTIPLY, SHARE[1], SHARE[2],
    )  # fmt: skip
    tl.debug_barrier()
    grad_query(
        query, grad, out_query, query_mask, query_bounds, records, partial, incoming, allocation, exchange,
        q_batch, q_head, q_row, g_batch, g_head, g_row, dq_batch, dq_head, dq_row, sinks, heads, 1, scale, eps,
        ALLOCATION, D, E, BLOCK_D, BLOCK_E, ALIGN, MAP, FAST, QUERY[0], MULTIPLY, QUERY[1], QUERY[2], True,
    )  # fmt: skip
    tl.debug_barrier()
    grad_source(
        key, value, out_key, out_value, key_mask, key_bounds, records, partial, grads, outgoing, conserved_outgoing,
        grad_outgoing, grad_conserved,
        k_batch, k_head, k_row, v_batch, v_head, v_row, dk_batch, dk_head, dk_row, dv_batch, dv_head, dv_row,
        sources, heads, 1, scale, eps, clamp,
        1, COMPETITION, D, E, BLOCK_D, BLOCK_E, ALIGN, MAP, FAST, SOURCE[0], MULTIPLY, SOURCE[1], SOURCE[2], True,
    )  # fmt: skip
