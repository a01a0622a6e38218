"""One token of causal Flow-Attention for every head, in one launch, with the state updated in place.

Shapes: query (B, H, 1, D), key (B, H_kv, 1, D), value (B, H_kv, 1, E), mask (B, 1) bool; the state's sums (B, H, 4, D),
memory (B, H, D, E) and scalars (B, H, 3), as in `FlowState`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common import VARIANT, State, empty_result, register
from ..variant import FlowVariant
from .causal.planes import (
    CONSERVED_KEY_SUM,
    CONSERVED_QUERY_SUM,
    COUNT,
    KEY_SUM,
    QUERY_SUM,
    STATE_LOG_OUTGOING,
)
from .features import feature
from .launch import Argument, Kernel
from .numerics import LOG_ZERO, clamped, log_add, sigmoid
from .plan import Plan, plan_of


@triton.jit
def decode_kernel(
    p_query, p_key, p_value, p_mask, p_result, p_sums, p_memory, p_scalars,
    q_batch, q_head, k_batch, k_head, v_batch, v_head, r_batch, r_head, mask_batch,
    heads, shared, scale, eps, flow_eps, clamp,
    D: tl.constexpr, BLOCK_D: tl.constexpr, E: tl.constexpr, BLOCK_E: tl.constexpr, MAP: tl.constexpr,
    COMPETITION: tl.constexpr, ALLOCATION: tl.constexpr,
):  # fmt: skip
    """One token for every head, the state updated in place, except where the token is masked.

    Grid:   (B·H,). A program loops over tiles of E.
    Reads:  Q (B, H, 1, D), K (B, H_kv, 1, D), V (B, H_kv, 1, E), the mask (B, 1), the state.
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
        p_vectors, p_state = p_sums + row * (4 * D) + columns, p_scalars + row * 3
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
        if COMPETITION == "softmax":
            log = log_add(flow, tl.where(seen > 0, old_log, LOG_ZERO))
            competition = position * tl.exp(flow - log)
        elif COMPETITION == "sigmoid":
            competition = sigmoid(flow, False)
        received = 1.0 / incoming
        if ALLOCATION:
            received *= sigmoid(conserved_in / position, False)
        # several threads hold the same element of a vector: none may store before all have loaded
        tl.debug_barrier()
        tl.store(p_vectors + KEY_SUM * D, key_sum, mask=inner)
        tl.store(p_vectors + QUERY_SUM * D, query_sum, mask=inner)
        tl.store(p_vectors + CONSERVED_KEY_SUM * D, conserved_key, mask=inner)
        tl.store(p_vectors + CONSERVED_QUERY_SUM * D, conserved_query, mask=inner)
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


class DecodePlan(Plan):
    """The plan of one token.

    Args:
        tensors: the signatures of query, key, value, mask, result, and of the three tensors of the state.
        options: the scale, then what FlowVariant.as_args returns.
    """

    def __init__(self, tensors: tuple, device: torch.device, *options: Any) -> None:
        super().__init__()
        scale, variant = options[0], FlowVariant(*options[1:])
        query, key, value, mask, result, *_ = tensors
        (batch, heads, _, dim), key_heads, value_dim = query[0], key[0][1], value[0][-1]
        block = triton.next_power_of_2(dim)
        self.grid = batch * heads, 1, 1
        self.numbers = (
            *(stride for _, strides, *_ in (query, key, value, result) for stride in strides[:2]),
            0 if mask is None else mask[1][0], heads, heads // key_heads, scale, variant.eps, variant.flow_eps,
            math.inf if variant.clamp is None else variant.clamp,
        )  # fmt: skip
        self.constants = {
            "D": dim,
            "BLOCK_D": block,
            "E": value_dim,
            "BLOCK_E": min(triton.next_power_of_2(value_dim), max(1, 8192 // block)),
            "MAP": variant.feature_map,
            "COMPETITION": variant.competition,
            "ALLOCATION": variant.allocation != "none",
        }

    def forward(self, *tensors: Argument | None) -> Iterator[Kernel]:
        yield Kernel(decode_kernel, self.grid, tensors, self.numbers, self.constants)


def _decode(query, key, value, mask, sums, memory, scalars, *options):
    result = empty_result(query, value.shape[-1])
    if not result.numel():
        return result
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    tensors = query, key, value, mask, result, sums, memory, scalars
    plan = plan_of(DecodePlan, tensors, *options)
    plan.launches(tensors, plan.forward)
    return result


def _fake_decode(query, key, value, *_):
    return empty_result(query, value.shape[-1])


register(
    "triton_decode(Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor(a!) sums, Tensor(b!) memory, "
    f"Tensor(c!) scalars, {VARIANT}) -> Tensor",
    _decode,
    _fake_decode,
)
