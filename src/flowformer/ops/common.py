"""What the backends share: the options of a call, the dtype of sums, the allocation of results."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .variant import FlowVariant

Inputs = tuple[Tensor, Tensor, Tensor]  # query, key and value
Mask = Tensor | None  # (B, N) bool, True = takes part; None where every token does
Masks = tuple[Mask, Mask]  # those of the queries and of the keys
Powers = Tensor | None  # (2, H), exponents of competition and allocation, of a renormalised variant; None is 1
State = tuple[Tensor, ...]  # sums, memory, scalars, as in `FlowState`


class Options(NamedTuple):
    """What a call computes of its tensors, after the checks of `interface.py`."""

    scale: float
    variant: FlowVariant
    powers: Powers = None

    def as_args(self) -> tuple[Any, ...]:
        """The arguments of `library.VARIANT`; operators that know powers take them among their tensors."""
        return self.scale, *self.variant.as_args()

    def as_keywords(self) -> dict[str, Any]:
        """All of them by name, as `reference.py` takes them."""
        return {"scale": self.scale, "powers": self.powers, **self.variant.as_options()}


def sum_dtype(x: Tensor) -> torch.dtype:
    """What sums, flows and states are kept in, whatever the input."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """Keeps autocast from rounding what is computed inside; a meta tensor has no autocast to switch off."""
    return nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)


def joint_mask(query_mask: Mask, key_mask: Mask) -> Mask:
    """The mask of tokens that are sink and source at once."""
    if query_mask is None or key_mask is None:
        return key_mask if query_mask is None else query_mask
    return query_mask & key_mask


def valid_values(x: Tensor, mask: Mask) -> Tensor:
    """x (..., N, D) in the dtype of the sums, with the padding zeroed: even a NaN there takes part in nothing."""
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
