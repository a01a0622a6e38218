"""Launch tables of the bidirectional kernels, tuned on an H200."""

from __future__ import annotations

from typing import Any

from ..plan import Tuning

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


def _table(*rows: tuple[Any, ...]) -> dict[str, Tuning]:
    """From (block, warps, stages, eye) of each kernel."""
    return {name: Tuning(row[1], row[2], row[0], *row[3:]) for name, row in zip(KERNELS, rows, strict=True)}


# by the larger of the two head dimensions, the first entry that is large enough: forward kernels, then backward kernels
HALF = {
    16: _table(
        (256, 4, 1, False), (256, 4, 1, False), (64, 4, 3), (128, 4, 3),
        (256, 4, 3), (128, 4, 3), (128, 4, 2), (128, 4, 3),
    ),
    64: _table(
        (32, 4, 3, False), (64, 4, 3), (64, 4, 3), (128, 4, 3),
        (64, 4, 3), (64, 4, 3), (64, 4, 3), (64, 4, 3),
    ),
    128: _table(
        (64, 4, 3, False), (64, 4, 3, False), (128, 8, 2), (128, 8, 3),
        (64, 8, 1), (64, 8, 3), (64, 8, 3), (64, 8, 1),
    ),
    256: _table((32, 4, 1), (32, 4, 1), (32, 8, 1), (32, 8, 1), (32, 8, 1), (32, 8, 1), (32, 8, 1), (32, 8, 1)),
}  # fmt: skip
# float32 takes twice the registers and shared memory
TF32 = {
    64: _table(*[(32, 4, 1)] * len(KERNELS)),
    128: _table((64, 8, 2), (32, 8, 1), (32, 8, 1), (64, 8, 2), (32, 8, 1), (64, 8, 2), (64, 8, 1), (64, 8, 2)),
    256: _table((32, 8, 1), (16, 8, 2), (32, 8, 2), (64, 8, 1), (64, 8, 1), (32, 8, 1), (16, 8, 1), (64, 8, 1)),
}
IEEE = {
    64: _table(*[(32, 4, 1)] * len(KERNELS)),
    256: _table((16, 8, 2), (16, 8, 2), (16, 8, 2), (16, 8, 1), (32, 4, 1), (32, 8, 1), (16, 4, 1), (32, 4, 1)),
}


TABLES = {"bf16": HALF, "bf16x3": HALF, "rounded": HALF, "tf32": TF32, "ieee": IEEE}


def tunings(dim: int, value_dim: int, precision: str, is_hopper: bool = True) -> dict[str, Tuning]:
    found = next(found for size, found in TABLES[precision].items() if size >= max(dim, value_dim))
    # other GPUs have less shared memory
    return found if is_hopper else {name: tuning._replace(stages=1) for name, tuning in found.items()}
