"""Guarded memory of the fuzzer: tensors between bands of known bytes, which reveal writes out of bounds."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

GUARD = 512  # bytes before and after a tensor; keeps the alignment of an allocation
FILL = 255  # bytes of ones are NaN in every float dtype


class Guard:
    """A context in which tensors allocated by Python code lie between guard bands and start as NaN.

    It patches torch's allocation functions, since torch's modes do not reach into registered operators.
    """

    def __init__(self) -> None:
        self.bands: list[Tensor] = []
        self._patches = ExitStack()

    def __enter__(self) -> Guard:
        for owner, names in ((torch, _TORCH), (Tensor, _TENSOR)):
            for name in names:
                self._patches.enter_context(patch.object(owner, name, self._guarded(getattr(owner, name))))
        return self

    def __exit__(self, *error: Any) -> None:
        self._patches.close()

    def _guarded(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def allocate(*args: Any, **kwargs: Any) -> Tensor:
            tensor = function(*args, **kwargs)
            guarded, buffer = guard(tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
            self.bands += [buffer[:GUARD], buffer[-GUARD:]]
            return guarded if "empty" in function.__name__ else guarded.copy_(tensor)

        return allocate

    def touched(self) -> bool:
        """Whether a guard band was overwritten."""
        return bool(self.bands) and not bool(torch.stack([(band == FILL).all() for band in self.bands]).all())


_TORCH = ("empty", "empty_like", "empty_strided", "zeros", "zeros_like", "full", "full_like")
_TENSOR = ("new_empty", "new_empty_strided", "new_zeros", "new_full", "clone")
_full, _empty = torch.full, torch.empty  # the unpatched functions


def guard(shape, stride, dtype: torch.dtype, device: torch.device | str, offset: int = 0) -> tuple[Tensor, Tensor]:
    """A tensor of FILL bytes between guard bands, and their buffer. The tensor starts `offset` numbers later."""
    span = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) if 0 not in shape else 0
    size = dtype.itemsize
    buffer = _full((2 * GUARD + (offset + span) * size,), FILL, dtype=torch.uint8, device=device)
    tensor = _empty(0, dtype=dtype, device=device)
    return tensor.set_(buffer.untyped_storage(), GUARD // size + offset, shape, stride), buffer


def guarded_copy(values: Tensor, layout: str, device: torch.device | str, expanded: int) -> tuple[Tensor, Tensor]:
    """The values in guarded memory with this layout, and its buffer. `expanded` is the axis with stride 0."""
    shape, rank = list(values.shape), values.dim()
    if layout == "expanded" and rank >= 3 and shape[expanded]:
        values = values.narrow(expanded, 0, 1)
        stride = list(torch.empty(values.shape, device="meta").stride())
        stride[expanded] = 0
    elif layout == "constant" and values.numel():  # the upstream gradient of a sum or a mean
        values = values.flatten()[:1].reshape([1] * rank)
        stride = [0] * rank
    elif layout == "bnhd" and rank >= 3:
        axes = (1, 2) if rank == 4 else (0, 1)
        stride = list(torch.empty(values.transpose(*axes).shape, device="meta").transpose(*axes).stride())
    elif layout == "turned" and rank >= 2:
        stride = list(torch.empty(values.mT.shape, device="meta").mT.stride())
    elif layout == "sliced" and rank >= 2:
        stride = list(torch.empty(*shape[:-1], 2 * shape[-1], device="meta").stride())
    else:
        stride = list(torch.empty(shape, device="meta").stride())
    tensor, buffer = guard(shape, stride, values.dtype, device, offset=1 if layout == "offset" else 0)
    if tensor.numel():
        tensor.as_strided(values.shape, stride).copy_(values)
    return tensor, buffer
