"""Code shared by the backends: the options of a call, the dtype of sums, masks, the allocation of results."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .variant import FlowVariant

Inputs = tuple[Tensor, Tensor, Tensor]  # query, key and value
Mask = Tensor | None  # (B, N) bool, True = takes part; None if every token does
Masks = tuple[Mask, Mask]  # query mask, key mask
Powers = Tensor | None  # (2, H), exponents of competition and allocation, for variants with renormalize; None means 1
State = tuple[Tensor, ...]  # sums, memory, scalars, as in `FlowState`


class Options(NamedTuple):
    """The options of a call, after the checks of `interface.py`."""

    scale: float
    variant: FlowVariant
    powers: Powers = None

    def as_args(self) -> tuple[Any, ...]:
        """The scalar arguments of an operator, as in `library.VARIANT`; powers are passed among its tensors."""
        return self.scale, *self.variant.as_args()

    def as_keywords(self) -> dict[str, Any]:
        """All options by name, as keyword arguments of the functions in `reference.py`."""
        return {"scale": self.scale, "powers": self.powers, **self.variant.as_options()}


def sum_dtype(x: Tensor) -> torch.dtype:
    """The dtype of sums, flows and states: float64 for float64 inputs, float32 for all others."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """A context without autocast, which would round the sums; a no-op for meta tensors, which have no autocast."""
    return nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)


def joint_mask(query_mask: Mask, key_mask: Mask) -> Mask:
    """The mask of tokens that are valid both as sinks and as sources."""
    if query_mask is None or key_mask is None:
        return key_mask if query_mask is None else query_mask
    return query_mask & key_mask


def valid_values(x: Tensor, mask: Mask) -> Tensor:
    """x (..., N, D) in the dtype of the sums, with the padding zeroed, so that NaN in the padding has no effect."""
    x = x.to(sum_dtype(x))
    return x if mask is None else x.masked_fill(~mask[..., None], 0)


def empty_result(query: Tensor, value_dim: int) -> Tensor:
    """Uninitialised (B, H, N, E) in the memory order of the query, so that joining the heads again needs no copy."""
    batch, heads, length, _ = query.shape
    if query.stride(1) < query.stride(2):
        return query.new_empty(batch, length, heads, value_dim).transpose(1, 2)
    return query.new_empty(batch, heads, length, value_dim)


def is_exporting() -> bool:
    """Whether torch.export traces. Under torch.compile of torch 2.11, torch.compiler.is_exporting() is true as well."""
    return bool(torch.compiler._is_exporting_flag)
