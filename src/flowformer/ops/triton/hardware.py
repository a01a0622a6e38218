"""Properties of the device that the kernels depend on."""

from __future__ import annotations

import functools

import torch

MAX_DIM = 256  # of features and of values


@functools.cache
def num_sms(device: torch.device) -> int:
    """The number of streaming multiprocessors; a small number on a CPU, where the kernels are interpreted."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@functools.cache
def is_hopper(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device)[0] == 9
