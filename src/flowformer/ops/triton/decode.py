"""One token of causal Flow-Attention for every head, in one launch, with the state updated in place.

Shapes: query (B, H, 1, D), key (B, H_kv, 1, D), value (B, H_kv, 1, E), mask (B, 1) bool, powers (2, H); the state's
sums (B, H, 4, D), or with `renormalize` (B, H, 5, D), memory (B, H, D, E) and scalars (B, H, 3), as in `FlowState`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import triton
from torch import Tensor

from ..common import Mask, Options, Powers, State, empty_result
from ..library import register
from .decode_kernel import decode_kernel
from .launch import Argument, Kernel
from .plan import OPTIONS, Plan, Signatures, contiguous, flat_options, plan_of, variant_of


def decode(query: Tensor, key: Tensor, value: Tensor, mask: Mask, state: State, options: Options) -> Tensor:
    """The result (B, H, 1, E) of one more token. The state is updated in place, except in rows where mask is False.

    Not differentiable. The tensors of the state must be contiguous, since they are updated in place.
    """
    if query.shape[2] != 1:
        raise ValueError(f"decode takes one token a call, got {query.shape[2]}; pass several to causal with the state.")
    if not all(part.is_contiguous() for part in state):
        raise ValueError("decode changes the state in place, so its tensors must be contiguous; pass state.clone().")
    tensors = query, key, value, mask, options.powers, *state
    result: Tensor = torch.ops.flowformer.triton_decode(*tensors, *flat_options(options))
    return result


class DecodePlan(Plan):
    """The plan of one token.

    Args:
        tensors: the signatures of query, key, value, mask, powers, result, and of the three tensors of the state.
        options: what `flat_options` returns.
    """

    def __init__(self, tensors: Signatures, device: torch.device, *options: Any) -> None:
        super().__init__()
        scale, variant = options[0], variant_of(options)
        query, key, value, mask, _, result, *_ = tensors
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
            "RENORMALIZE": variant.renormalize,
        }

    def forward(self, *tensors: Argument | None) -> Iterator[Kernel]:
        yield Kernel(decode_kernel, self.grid, tensors, self.numbers, self.constants)


def _decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask,
    powers: Powers,
    sums: Tensor,
    memory: Tensor,
    scalars: Tensor,
    *options: Any,
) -> Tensor:
    result = empty_result(query, value.shape[-1])
    if not result.numel():
        return result
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    tensors = query, key, value, mask, contiguous(powers), result, sums, memory, scalars
    plan = plan_of(DecodePlan, tensors, *options)
    plan.launches(tensors, plan.forward)
    return result


def _fake_decode(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Tensor:
    return empty_result(query, value.shape[-1])


register(
    "triton_decode(Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor? powers, Tensor(a!) sums, "
    f"Tensor(b!) memory, Tensor(c!) scalars, {OPTIONS}) -> Tensor",
    _decode,
    _fake_decode,
)
