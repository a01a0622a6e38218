"""The arguments of a call into the library, in the order of `Call` in `call.h`."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, get_args

import torch
from torch import Tensor

from ..common import Mask, Powers
from ..variant import Competition
from .build import library

if TYPE_CHECKING:
    from ..bounds import Bounds

DTYPES = (torch.float32, torch.float64, torch.bfloat16)
# in the order of the enumerations of `call.h`
FEATURE_MAPS, COMPETITIONS, ALLOCATIONS = ("sigmoid", "elu+1", "relu"), get_args(Competition), ("sigmoid", "none")
LINE = 64  # bytes of a cache line; records are padded to whole lines

_CALL = struct.Struct("=65q4d")
_NO_ROWS = 0, 0, 0, 0


def run(
    function: str,
    inputs: tuple[Tensor, Tensor, Tensor],
    outputs: Sequence[Tensor | None],
    bounds: Sequence[Bounds],
    masks: Sequence[Mask],
    kept: Tensor,
    states: Sequence[Tensor | None],
    powers: Sequence[Powers],
    scale: float,
    feature_map: str,
    competition: str,
    allocation: str,
    clamp: float | None,
    eps: float,
    flow_eps: float,
    rescale: bool,
    renormalize: bool,
) -> None:
    """Call a function of `library.cpp`.

    Args:
        inputs: query, key and value, (B, H, N, D), features contiguous.
        outputs: the result, the gradient of the result, and the gradients of query, key and value; features contiguous.
        bounds, masks: contiguous; of the queries, then of the keys.
        kept: buffer that the forward pass writes for the backward pass.
        states: twelve contiguous tensors: sums, memory and scalars of the state before the tokens, of the state after
            them, of the gradient of the state after, and of the gradient of the state before.
        powers: contiguous; the powers (2, H), and their gradients for each sequence, (2, B, H).
    """
    query, key, value = inputs
    batch, heads, sinks, dim = query.shape
    value_dim = value.shape[3]
    numbers = [
        DTYPES.index(query.dtype),
        torch.get_num_threads(),
        batch if bounds[0] is None else bounds[0].shape[0] - 1,
        heads,
        heads // max(key.shape[1], 1),
        sinks,
        key.shape[2],
        dim,
        value_dim,
    ]
    for x in (*inputs, *outputs):
        numbers += _NO_ROWS if x is None else (x.data_ptr(), *x.stride()[:3])
    numbers += [0 if x is None else x.data_ptr() for x in (*bounds, *masks, kept, *states, *powers)]
    numbers += FEATURE_MAPS.index(feature_map), COMPETITIONS.index(competition), ALLOCATIONS.index(allocation)
    numbers += rescale, renormalize
    arguments = _CALL.pack(*numbers, scale, float("inf") if clamp is None else clamp, eps, flow_eps)
    if getattr(library(is_narrow(query.dtype, dim, value_dim)), function)(arguments):
        raise MemoryError("Flow-Attention could not allocate its buffers.")


def is_narrow(dtype: torch.dtype, dim: int, value_dim: int) -> bool:
    """Whether rows of sums fit into 32 bytes: with vectors of 64 bytes, half of the work would be wasted."""
    most = 4 if dtype == torch.float64 else 8
    return all(each <= most for each in (dim, value_dim))  # not by max, which Dynamo does not evaluate while tracing


def padded(size: int, dtype: torch.dtype) -> int:
    """The size, in numbers of this dtype, rounded up to whole cache lines."""
    numbers = LINE // dtype.itemsize
    return (size + numbers - 1) // numbers * numbers


def with_rows(x: Tensor) -> Tensor:
    """x, or a copy if its features are not contiguous or its memory has the opposite sign (`torch.Tensor.is_neg`)."""
    # Dynamo does not trace is_neg; in a compiled graph, torch's dispatcher resolves negated views
    is_negated = not torch.compiler.is_compiling() and x.is_neg()
    return x if x.stride(-1) == 1 and not is_negated else x.resolve_neg().contiguous()
