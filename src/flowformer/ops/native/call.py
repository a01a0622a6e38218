"""The arguments of a call into the library, laid out as `call.h` declares them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_double, c_int64, c_void_p
from typing import TYPE_CHECKING, ClassVar, get_args

import torch
from torch import Tensor

from ..common import Mask
from ..variant import Competition
from .build import library

if TYPE_CHECKING:
    from ..varlen import Bounds

DTYPES = (torch.float32, torch.float64, torch.bfloat16)
# in the order of the enumerations of `call.h`
FEATURE_MAPS, COMPETITIONS, ALLOCATIONS = ("sigmoid", "elu+1", "relu"), get_args(Competition), ("sigmoid", "none")
STATE = ("sums", "memory", "scalars")
LINE = 64  # bytes of a cache line, to which records are padded


class Rows(ctypes.Structure):
    _fields_: ClassVar = [("data", c_void_p), ("batch", c_int64), ("head", c_int64), ("token", c_int64)]

    @classmethod
    def of(cls, x: Tensor) -> Rows:
        """Of (B, H, N, D), features contiguous."""
        return cls(x.data_ptr(), *x.stride()[:3])


class Call(ctypes.Structure):
    _fields_: ClassVar = [
        *((name, c_int64) for name in ("dtype", "threads", "sequences", "heads", "shared")),
        *((name, c_int64) for name in ("sinks", "sources", "dim", "value_dim")),
        *((name, c_void_p) for name in ("sink_bounds", "source_bounds")),
        *((name, Rows) for name in ("query", "key", "value", "result")),
        *((name, Rows) for name in ("grad", "grad_query", "grad_key", "grad_value")),
        *((name, c_void_p) for name in ("query_mask", "key_mask")),
        *((name, Rows) for name in ("sink_flows", "source_flows")),
        *((name, c_int64) for name in ("sink_plane", "source_plane")),
        *((name, c_void_p) for name in ("records", "sums", "memory", "scalars")),
        *((name, c_void_p) for name in ("end_sums", "end_memory", "end_scalars")),
        *((name, c_void_p) for name in ("grad_end_sums", "grad_end_memory", "grad_end_scalars")),
        *((name, c_void_p) for name in ("grad_sums", "grad_memory", "grad_scalars")),
        *((name, c_int64) for name in ("feature_map", "competition", "allocation", "rescale")),
        *((name, c_double) for name in ("scale", "clamp", "eps", "flow_eps")),
    ]

    def set_state(self, names: str, state: Sequence[Tensor | None]) -> None:
        """Names with a place for sums, memory and scalars; None where there is no state."""
        for part, x in zip(STATE, state, strict=True):
            setattr(self, names.format(part), None if x is None else x.data_ptr())

    def set_flows(self, sink_flows: Tensor, source_flows: Tensor, records: Tensor) -> None:
        """Flows are (2, B, H, N)."""
        self.sink_flows = Rows(sink_flows.data_ptr(), *sink_flows.stride()[1:])
        self.source_flows = Rows(source_flows.data_ptr(), *source_flows.stride()[1:])
        self.sink_plane, self.source_plane = sink_flows.stride(0), source_flows.stride(0)
        self.records = records.data_ptr()

    def run(self, function: str) -> None:
        if getattr(library(), function)(ctypes.byref(self)):
            raise MemoryError("Flow-Attention could not allocate its buffers.")


def new_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    masks: Sequence[Mask],
    bounds: Sequence[Bounds],
    scale: float,
    feature_map: str,
    competition: str,
    allocation: str,
    clamp: float | None,
    eps: float,
    flow_eps: float,
    rescale: bool,
) -> Call:
    """A call without results.

    Args:
        masks, bounds: contiguous; those of the queries and those of the keys.
    """
    batch, heads, sinks, dim = query.shape
    call = Call(
        dtype=DTYPES.index(query.dtype),
        threads=torch.get_num_threads(),
        sequences=batch if bounds[0] is None else bounds[0].shape[0] - 1,
        heads=heads,
        shared=heads // max(key.shape[1], 1),
        sinks=sinks,
        sources=key.shape[2],
        dim=dim,
        value_dim=value.shape[3],
        query=Rows.of(query),
        key=Rows.of(key),
        value=Rows.of(value),
        feature_map=FEATURE_MAPS.index(feature_map),
        competition=COMPETITIONS.index(competition),
        allocation=ALLOCATIONS.index(allocation),
        rescale=rescale,
        scale=scale,
        clamp=float("inf") if clamp is None else clamp,
        eps=eps,
        flow_eps=flow_eps,
    )
    call.query_mask, call.key_mask = (None if mask is None else mask.data_ptr() for mask in masks)
    call.sink_bounds, call.source_bounds = (None if ends is None else ends.data_ptr() for ends in bounds)
    return call


def padded(size: int, dtype: torch.dtype) -> int:
    """In whole cache lines of the dtype of sums."""
    numbers = LINE // dtype.itemsize
    return (size + numbers - 1) // numbers * numbers


def with_rows(x: Tensor) -> Tensor:
    """x, or a copy whose features are contiguous."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
