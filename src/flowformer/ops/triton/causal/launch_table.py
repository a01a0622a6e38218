"""Launch table of the causal kernels, tuned on an H200."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..plan import Tuning


class Config(NamedTuple):
    """How the kernels of one dtype and head dimension are launched."""

    chunk: int  # tokens per product
    tile: int  # values or features per program, if several programs share a head
    sums: Tuning  # the kernels that need φ and little else
    memory: Tuning
    flows: Tuning
    output: Tuning
    grad_memory: Tuning
    value_gradient: Tuning
    flow_gradient: Tuning
    gradient: Tuning


def _same(chunk: int, tile: int, warps: int, stages: int) -> Config:
    return Config(chunk, tile, *[Tuning(warps, stages)] * 8)


CONFIGS = {
    (torch.bfloat16, 64): Config(
        chunk=64,
        tile=64,
        sums=Tuning(4, 3),
        memory=Tuning(4, 3),
        flows=Tuning(4, 3),
        output=Tuning(4, 3),
        grad_memory=Tuning(4, 4),
        value_gradient=Tuning(4, 3),
        flow_gradient=Tuning(4, 3),
        gradient=Tuning(4, 1),
    ),
    (torch.bfloat16, 128): _same(64, 128, 8, 1),
    (torch.bfloat16, 256): _same(32, 64, 8, 1),
    # float32 takes twice the registers and shared memory, and float16 is multiplied as float32
    (torch.float16, 64): _same(16, 64, 4, 1),
    (torch.float16, 128): _same(16, 64, 8, 1),
    (torch.float16, 256): _same(16, 32, 8, 1),
    (torch.float32, 64): _same(16, 64, 4, 1),
    (torch.float32, 128): _same(16, 32, 8, 1),
    (torch.float32, 256): _same(16, 32, 8, 1),
}


def config(dtype: torch.dtype, dim: int, value_dim: int, feature_map: str) -> Config:
    size = next(size for size in (64, 128, 256) if max(dim, value_dim) <= size)
    found = CONFIGS[dtype, size]
    if found.chunk > 32 and not (dim == value_dim == size and feature_map == "sigmoid"):
        # a longer chunk needs wgmma
        found = found._replace(chunk=32)
    return found
