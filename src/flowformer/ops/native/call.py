"""The arguments of a call into the library, laid out as `call.h` declares them."""

from __future__ import annotations

import ctypes
from ctypes import c_double, c_int64, c_void_p
from typing import Any, ClassVar, get_args

import torch
from torch import Tensor

from ..common import Mask
from ..variant import Competition, FeatureMap
from .build import library

DTYPES = (torch.float32, torch.float64, torch.bfloat16)
FEATURE_MAPS, COMPETITIONS, ALLOCATIONS = get_args(FeatureMap), get_args(Competition), ("sigmoid", "none")
VECTOR = 32  # bytes


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
        ("records", c_void_p),
        *((name, c_int64) for name in ("feature_map", "competition", "allocation", "rescale")),
        *((name, c_double) for name in ("scale", "clamp", "eps", "flow_eps")),
    ]

    def run(self, function: str) -> None:
        if getattr(library(), function)(ctypes.byref(self)):
            raise MemoryError("Flow-Attention could not allocate its buffers.")


def new_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    feature_map: str,
    competition: str,
    allocation: str,
    clamp: float | None,
    eps: float,
    flow_eps: float,
    rescale: bool,
) -> Call:
    batch, heads, sinks, dim = query.shape
    call = Call(
        DTYPES.index(query.dtype),
        torch.get_num_threads(),
        batch,
        heads,
        heads // max(key.shape[1], 1),
        sinks,
        key.shape[2],
        dim,
        value.shape[3],
    )
    call.query, call.key, call.value = Rows.of(query), Rows.of(key), Rows.of(value)
    call.feature_map = FEATURE_MAPS.index(feature_map)
    call.competition, call.allocation = COMPETITIONS.index(competition), ALLOCATIONS.index(allocation)
    call.scale, call.clamp = scale, float("inf") if clamp is None else clamp
    call.eps, call.flow_eps, call.rescale = eps, flow_eps, rescale
    return call


def set_masks(call: Call, query_mask: Mask, key_mask: Mask) -> tuple[Any, ...]:
    """Returns what must live until the call is over."""
    masks = [None if mask is None else mask.contiguous() for mask in (query_mask, key_mask)]
    call.query_mask, call.key_mask = (None if mask is None else mask.data_ptr() for mask in masks)
    return tuple(masks)


def set_flows(call: Call, sink_flows: Tensor, source_flows: Tensor, records: Tensor) -> None:
    """Flows are (2, B, H, N)."""
    call.sink_flows = Rows(sink_flows.data_ptr(), *sink_flows.stride()[1:])
    call.source_flows = Rows(source_flows.data_ptr(), *source_flows.stride()[1:])
    call.sink_plane, call.source_plane, call.records = sink_flows[0].numel(), source_flows[0].numel(), records.data_ptr()


def padded(size: int, dtype: torch.dtype) -> int:
    """In whole vectors of the dtype of sums."""
    lanes = VECTOR // dtype.itemsize
    return (size + lanes - 1) // lanes * lanes


def with_rows(x: Tensor) -> Tensor:
    """x, or a copy whose features are contiguous."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
