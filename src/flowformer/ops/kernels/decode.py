"""One token of causal Flow-Attention for every head, in one launch, with the state updated in place.

Shapes: query (B, H, 1, D), key (B, H_kv, 1, D), value (B, H_kv, 1, E), mask (B, 1) bool; the state's sums (B, H, 4, D),
memory (B, H, D, E) and scalars (B, H, 3), as in `FlowState`.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common import VARIANT, State, empty_result, register
from ..variant import FlowVariant
from .causal_parts import NOTHING, bounded, log_add
from .features import feature, sigmoid
from .launch import Kernel, Launches
from .plan import PLAN_CACHE_SIZE, signature


@triton.jit
def decode_kernel(
    query, key, value, mask, result, sums, memory, scalars,
    q_batch, q_head, k_batch, k_head, v_batch, v_head, r_batch, r_head, mask_batch,
    heads, shared, scale, eps, flow_eps, clamp,
    D: tl.constexpr, BLOCK_D: tl.constexpr, E: tl.constexpr, BLOCK_E: tl.constexpr, MAP: tl.constexpr,
    COMPETITION: tl.constexpr, ALLOCATION: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    batch, head = row // heads, row % heads
    columns = tl.arange(0, BLOCK_D)
    inner = columns < D
    result += batch * r_batch + head * r_head
    value += batch * v_batch + head // shared * v_head
    memory += row * (D * E)
    keep = True
    if mask is not None:
        keep = tl.load(mask + batch * mask_batch) != 0
    if keep:
        q = tl.load(query + batch * q_batch + head * q_head + columns, mask=inner, other=0.0)
        k = tl.load(key + batch * k_batch + head // shared * k_head + columns, mask=inner, other=0.0)
        q, k = feature(q, scale, MAP, False), feature(k, scale, MAP, False)
        vectors, log_sum = sums + row * (4 * D) + columns, scalars + row * 3 + 1
        seen, old_log = tl.load(log_sum - 1), tl.load(log_sum)
        position = seen + 1.0
        key_sum = tl.load(vectors, mask=inner, other=0.0) + k
        query_sum = tl.load(vectors + D, mask=inner, other=0.0) + q
        conserved_key = tl.load(vectors + 2 * D, mask=inner, other=0.0)
        conserved_query = tl.load(vectors + 3 * D, mask=inner, other=0.0)
        incoming = tl.sum(tl.where(inner, (q + eps) * (key_sum + eps), 0.0), 0) + flow_eps
        outgoing = tl.sum(tl.where(inner, (k + eps) * (query_sum + eps), 0.0), 0) + flow_eps
        conserved_key += k * (position / outgoing)
        conserved_query += q * (position / incoming)
        conserved_in = tl.sum(tl.where(inner, (q + eps) * (conserved_key + eps), 0.0), 0) + flow_eps
        conserved_out = tl.sum(tl.where(inner, (k + eps) * (conserved_query + eps), 0.0), 0) + flow_eps
        competition, log = 1.0, old_log
        flow = bounded(conserved_out / position, clamp)
        if COMPETITION == "softmax":
            log = log_add(flow, tl.where(seen > 0, old_log, NOTHING))
            competition = position * tl.exp(flow - log)
        elif COMPETITION == "sigmoid":
            competition = sigmoid(flow, False)
        received = 1.0 / incoming
        if ALLOCATION:
            received *= sigmoid(conserved_in / position, False)
        # threads hold copies of a vector: none may store before all have loaded
        tl.debug_barrier()
        tl.store(vectors, key_sum, mask=inner)
        tl.store(vectors + D, query_sum, mask=inner)
        tl.store(vectors + 2 * D, conserved_key, mask=inner)
        tl.store(vectors + 3 * D, conserved_query, mask=inner)
        tl.store(log_sum - 1, position)
        tl.store(log_sum, log)
        sinks, sources = tl.where(inner, q * received, 0.0), tl.where(inner, k * competition, 0.0)
        for tile in range(0, E, BLOCK_E):
            values = tile + tl.arange(0, BLOCK_E)
            v = tl.load(value + values, mask=values < E, other=0.0).to(tl.float32)
            at, there = columns[:, None] * E + values[None, :], inner[:, None] & (values < E)[None, :]
            updated = tl.load(memory + at, mask=there, other=0.0) + sources[:, None] * v[None, :]
            tl.store(memory + at, updated, mask=there)
            out = tl.sum(sinks[:, None] * updated, 0)
            tl.store(result + values, out.to(result.dtype.element_ty), mask=values < E)
    else:
        for tile in range(0, E, BLOCK_E):
            values = tile + tl.arange(0, BLOCK_E)
            nothing = tl.zeros([BLOCK_E], tl.float32).to(result.dtype.element_ty)
            tl.store(result + values, nothing, mask=values < E)


def decode(
    query: Tensor, key: Tensor, value: Tensor, state: State, scale: float, variant: FlowVariant,
    mask: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The result (B, H, 1, E) of one more token. The state is changed in place, except in rows where mask is False.

    Not differentiable. The tensors of the state must be contiguous: they are written where they lie.
    """
    if query.shape[2] != 1:
        raise ValueError(f"decode takes one token a call, got {query.shape[2]}; pass several to causal with the state.")
    if not all(part.is_contiguous() for part in state):
        raise ValueError("decode changes the state in place, so its tensors must be contiguous; pass state.clone().")
    return torch.ops.flowformer.triton_decode(query, key, value, mask, *state, scale, *variant.as_args())


@functools.lru_cache(maxsize=PLAN_CACHE_SIZE)
def _launches(kind) -> Launches:
    return Launches()


def _decode(query, key, value, mask, sums, memory, scalars, scale, *options):
    result = empty_result(query, value.shape[-1])
    if not result.numel():
        return result
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    tensors = query, key, value, mask, result, sums, memory, scalars
    launches = _launches((signature(tensors), query.device, scale, options))
    launches(tensors, lambda *arguments: [_kernel(arguments, tensors, scale, FlowVariant(*options))])
    return result


def _kernel(arguments, tensors, scale: float, variant: FlowVariant) -> Kernel:
    query, key, value, mask, result, *_ = tensors
    (batch, heads, _, dim), value_dim = query.shape, value.shape[-1]
    block = triton.next_power_of_2(dim)
    numbers = (
        *(stride for x in (query, key, value, result) for stride in x.stride()[:2]),
        0 if mask is None else mask.stride(0), heads, heads // key.shape[1], scale, variant.eps, variant.flow_eps,
        float("inf") if variant.clamp is None else variant.clamp,
    )  # fmt: skip
    constants = {
        "D": dim,
        "BLOCK_D": block,
        "E": value_dim,
        "BLOCK_E": min(triton.next_power_of_2(value_dim), max(1, 8192 // block)),
        "MAP": variant.feature_map,
        "COMPETITION": variant.competition,
        "ALLOCATION": variant.allocation != "none",
    }
    return Kernel(decode_kernel, (batch * heads, 1, 1), arguments, numbers, constants)


def _fake_decode(query, key, value, *_):
    return empty_result(query, value.shape[-1])


register(
    "triton_decode(Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor(a!) sums, Tensor(b!) memory, "
    f"Tensor(c!) scalars, {VARIANT}) -> Tensor",
    _decode,
    _fake_decode,
)
