"""The Triton backend: its refusals, and the functions that run the kernels.

Importing this file does not import Triton, which takes longer than the rest of the package; the first call does.
"""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..common import Mask, Masks, Options, State, is_exporting
from ..variant import FlowVariant
from .hardware import MAX_DIM, is_hopper

if TYPE_CHECKING:
    from ..bounds import Lengths

HAS_TRITON = importlib.util.find_spec("triton") is not None
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_DIM_ELSEWHERE = 64  # on GPUs other than Hopper, which have less shared memory


def refusals(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, variant: FlowVariant) -> list[str]:
    """Why the kernels cannot run this call; empty if they can."""
    if query.device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return [f"tensors on {query.device} (the kernels need a GPU)"]
    if not HAS_TRITON:
        return ["triton is not installed"]
    if is_exporting():
        return ["an exported graph cannot hold the kernels"]
    reasons = []
    if query.dtype not in DTYPES:
        reasons.append(f"{query.dtype} (the kernels take float32, bfloat16 and float16)")
    dims, largest = (query.shape[-1], value.shape[-1]), MAX_DIM
    if query.is_cuda and not is_hopper(query.device):
        largest = MAX_DIM_ELSEWHERE
        if torch.version.hip is None and torch.cuda.get_device_capability(query.device) < (8, 0):
            reasons.append("a GPU older than Ampere")
    if not all(1 <= dim <= largest for dim in dims):
        reasons.append(f"head dimensions {dims[0]} and {dims[1]} (the kernels take 1 to {largest} on this device)")
    if variant.competitors == "heads" or variant.feature_map == "relu+eps":
        reasons.append('the kernels have no competitors="heads" and no feature_map="relu+eps"')
    if variant.allocation == "softmax":
        reasons.append(
            'allocation="softmax" (its normaliser over the sinks would take one more pass, forward and backward; the '
            'kernels take "sigmoid" and "none")'
        )
    return reasons


def by_name(query: Tensor) -> bool:
    """Whether the kernels run only if requested by name: on a CPU, in Triton's interpreter, which is for tests."""
    return query.device.type != "cuda"


def bidirectional(query: Tensor, key: Tensor, value: Tensor, masks: Masks, options: Options) -> Tensor:
    """See `flow_attention`."""
    from .bidirectional.op import bidirectional

    return bidirectional(query, key, value, masks, options)


def causal(query: Tensor, key: Tensor, value: Tensor, mask: Mask, options: Options) -> Tensor:
    """See `flow_attention`."""
    from .causal.op import causal

    return causal(query, key, value, mask, options)


def recurrent(
    query: Tensor, key: Tensor, value: Tensor, mask: Mask, state: State | None, options: Options
) -> tuple[Tensor, State]:
    """See `flow_attention_recurrent`."""
    from .causal.op import recurrent

    return recurrent(query, key, value, mask, state, options)


def packed(query: Tensor, key: Tensor, value: Tensor, lengths: Lengths, is_causal: bool, options: Options) -> Tensor:
    """See `flow_attention_varlen`."""
    if is_causal:
        from .causal.op import packed
    else:
        from .bidirectional.op import packed
    return packed(query, key, value, lengths, options)
