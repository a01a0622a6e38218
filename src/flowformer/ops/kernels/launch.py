"""How kernels are launched, and launched again: what Triton finds out about every argument of every call takes longer
than the kernel of a short sequence, and is the same for every call of one plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

MANY = 512  # kinds of calls, after which all are forgotten


class Kernel(NamedTuple):
    """A kernel and what it is launched with beside tensors."""

    function: Any
    grid: tuple[int, int, int]
    numbers: Sequence[Any]  # its arguments between the tensors and the constants
    constants: Mapping[str, Any]  # by name, all that follow
    warps: int = 4


class Launched:
    """Kernels that were launched before, by what tells their calls apart."""

    def __init__(self) -> None:
        self._again: dict[Any, Callable[..., None] | None] = {}

    def __call__(self, key: Any, tensors: Sequence[Tensor | None], describe: Callable[[], Kernel]) -> None:
        """Launches a kernel on these tensors, its first arguments; what it is, is asked for the first time only."""
        again = self._again.get(key)
        if again is not None:
            again(*tensors)
            return
        if len(self._again) >= MANY:
            self._again.clear()
        self._again[key] = launch(describe(), tensors)


def launch(kernel: Kernel, tensors: Sequence[Tensor | None]) -> Callable[..., None] | None:
    """Runs a kernel; what it returns runs it again with other tensors of the same kinds.

    Returns: None in the interpreter, which has nothing to remember.
    """
    function, grid, numbers, constants, warps = kernel
    compiled = function[grid](*tensors, *numbers, **constants, num_warps=warps)
    if compiled is None:
        return None
    run, device = compiled.run, next(x.device.index for x in tensors if x is not None)
    rest = *numbers, *(constants[name] for name in function.arg_names[len(tensors) + len(numbers) :])
    # without the hooks of profilers
    head = compiled.function, compiled.packed_metadata, None, None, None

    def again(*tensors: Tensor | None) -> None:
        stream = torch._C._cuda_getCurrentRawStream(device)
        # Triton would ask the driver about each tensor
        run(*grid, stream, *head, *[None if x is None else x.data_ptr() for x in tensors], *rest)

    return again


def signature(tensors: Iterable[Tensor | None]) -> tuple:
    """What Triton may have compiled a kernel for, of each tensor."""
    return tuple((x.shape, x.stride(), x.dtype, x.data_ptr() % 16) if x is not None else None for x in tensors)


def device_of(x: Tensor) -> AbstractContextManager:
    """Makes the device of x the current one, which Triton launches on."""
    elsewhere = x.is_cuda and x.device.index != torch.cuda.current_device()
    return torch.cuda.device(x.device) if elsewhere else nullcontext()


def dense(x: Tensor) -> Tensor:
    """x, or a copy of it where its rows are not dense or too far apart: a block of tokens is addressed in 32 bits."""
    return x if (x.stride(-1) == 1 or x.shape[-1] == 1) and x.stride(-2) < 2**22 else x.contiguous()


def contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def aligned(count):
    """Rounded up, so that what follows in memory is as aligned at every length; symbolic if the count is."""
    return (count + 3) // 4 * 4
