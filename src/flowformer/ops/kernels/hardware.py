"""What the kernels run on and what they compute: one gate for all of them."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ..variant import FlowVariant

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_DIM = 256
MAX_DIM_ELSEWHERE = 64  # on GPUs other than Hopper, which have less shared memory


def refusals(query: Tensor, value: Tensor, variant: FlowVariant) -> list[str]:
    """Why the kernels cannot compute this; empty where they can."""
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


@functools.cache
def num_sms(device: torch.device) -> int:
    """How many streaming multiprocessors there are; on a CPU, which only interprets the kernels, a few."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@functools.cache
def is_hopper(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device)[0] == 9
