"""How the bidirectional kernels are launched: fixed tables by head dimension and precision, measured on an H200."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Shape(NamedTuple):
    """How one kernel is launched."""

    block: int  # tokens at once
    warps: int
    stages: int  # blocks of tokens under way
    eye: bool = True  # whether tokens enter through a matrix product, see `blocks.features`


KERNELS = (
    "sums",
    "flows",
    "memory",
    "result",
    "grad_memory",
    "grad_competition",
    "grad_query",
    "grad_source",
)


def _table(*shapes: tuple) -> dict[str, Shape]:
    return {name: Shape(*shape) for name, shape in zip(KERNELS, shapes, strict=True)}


# by the larger of the two head dimensions, up to the one given
HALF = {
    16: _table(
        (256, 4, 1, False),
        (256, 4, 1, False),
        (64, 4, 3),
        (128, 4, 3),
        (256, 4, 3),
        (128, 4, 3),
        (128, 4, 2),
        (128, 4, 3),
    ),
    64: _table(
        (32, 4, 3, False),
        (64, 4, 3),
        (64, 4, 3),
        (128, 4, 3),
        (64, 4, 3),
        (64, 4, 3),
        (64, 4, 3),
        (64, 4, 3),
    ),
    128: _table(
        (64, 4, 3, False),
        (64, 4, 3, False),
        (128, 8, 2),
        (128, 8, 3),
        (64, 8, 1),
        (64, 8, 3),
        (64, 8, 3),
        (64, 8, 1),
    ),
    256: _table((32, 4, 1), (32, 4, 1), (32, 8, 1), (32, 8, 1), (32, 8, 1), (32, 8, 1), (32, 8, 1), (32, 8, 1)),
}
# float32 takes twice the registers and shared memory
FLOAT = {
    64: _table(*[(32, 4, 1)] * len(KERNELS)),
    256: _table(*[(16, 8, 1)] * len(KERNELS)),
}


def bidirectional(dim: int, value_dim: int, dtype: torch.dtype, is_hopper: bool = True) -> dict[str, Shape]:
    table = FLOAT if dtype == torch.float32 else HALF
    shapes = next(shapes for size, shapes in table.items() if size >= max(dim, value_dim))
    # other chips have less shared memory
    return shapes if is_hopper else {name: shape._replace(stages=1) for name, shape in shapes.items()}
