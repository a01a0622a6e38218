"""How kernels are launched, and launched again: what Triton finds out about every argument of every call takes longer
than the kernels of a short sequence, and is the same for all calls of one kind."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

MANY = 512  # kinds of calls, after which the oldest is forgotten


class Argument(NamedTuple):
    """A tensor of a call, or a piece of a flat one, known by its place: two may be one tensor, but not next time."""

    tensor: Tensor
    place: int  # among the tensors of the call
    start: int = 0  # bytes before it

    def split(self, sizes: Sequence[int]) -> list[Argument]:
        parts = self.tensor.split_with_sizes(list(sizes))
        starts = accumulate((part.nbytes for part in parts), initial=self.start)
        return [Argument(part, self.place, start) for part, start in zip(parts, starts, strict=False)]


class Kernel(NamedTuple):
    """A kernel and what it is launched with."""

    function: Any
    grid: tuple[int, int, int]
    arguments: Sequence[Argument | None]  # its first
    numbers: Sequence[Any]  # those between the tensors and the constants
    constants: Mapping[str, Any]  # by name, all that follow
    warps: int = 4


class Launches:
    """The kernels of calls of one kind: described and compiled for the first of them, then only launched."""

    def __init__(self) -> None:
        self._again: Callable[[Sequence[Any]], None] | None = None

    def __call__(self, tensors: Sequence[Any], describe: Callable[..., Iterable[Kernel]]) -> None:
        """Launches what `describe` makes of the tensors, of which all but the first may be None, one after another."""
        with device_of(tensors[0]):
            if self._again is not None:
                self._again(tensors)
            else:
                self._again = launch(tensors, describe)


def launch(tensors: Sequence[Any], describe: Callable[..., Iterable[Kernel]]) -> Callable[[Sequence[Any]], None] | None:
    """Runs kernels; what it returns runs them again with other tensors of the same kinds.

    Returns: None in the interpreter, which has nothing to remember.
    """
    arguments = (None if x is None else Argument(x, place) for place, x in enumerate(tensors))
    recorded = [_launch(kernel) for kernel in describe(*arguments)]
    if None in recorded:
        return None
    device = tensors[0].device.index

    def again(tensors: Sequence[Any]) -> None:
        # Triton would ask the driver about each tensor
        pointers = [0 if x is None else x.data_ptr() for x in tensors]
        stream = torch._C._cuda_getCurrentRawStream(device)
        for run, values, slots in recorded:
            values = values.copy()
            values[STREAM] = stream
            for slot, place, start in slots:
                values[slot] = pointers[place] + start
            run(*values)

    return again


STREAM = 3  # where a launcher of Triton takes it, after the grid


def _launch(kernel: Kernel):
    """Runs a kernel: its launcher, the values that it takes, and which of them are where in which tensor."""
    function, grid, arguments, numbers, constants, warps = kernel
    tensors = [None if x is None else x.tensor for x in arguments]
    compiled = function[grid](*tensors, *numbers, **constants, num_warps=warps)
    if compiled is None:
        return None
    # no stream yet, and without the hooks of profilers
    values = [*grid, None, compiled.function, compiled.packed_metadata, None, None, None]
    slots = [(slot, *x[1:]) for slot, x in enumerate(arguments, len(values)) if x is not None]
    names = function.arg_names[len(tensors) + len(numbers) :]
    return compiled.run, [*values, *(None for _ in tensors), *numbers, *(constants[name] for name in names)], slots


def empty(sizes: Sequence[int], device: torch.device) -> Tensor:
    """Uninitialised numbers, in one tensor: to ask for several takes longer than a kernel runs."""
    return torch.empty(sum(sizes), dtype=torch.float32, device=device)


def signature(tensors: Iterable[Tensor | None]) -> tuple:
    """What Triton may have compiled a kernel for, of each tensor."""
    return tuple([None if x is None else (x.shape, x.stride(), x.dtype, x.data_ptr() % 16) for x in tensors])


def device_of(x: Tensor) -> AbstractContextManager:
    """Makes the device of x the current one, which Triton launches on."""
    elsewhere = x.is_cuda and x.device.index != torch.cuda.current_device()
    return torch.cuda.device(x.device) if elsewhere else nullcontext()


def dense(x: Tensor) -> Tensor:
    """x, or a copy of it where its rows are not dense or too far apart: a block of tokens is addressed in 32 bits."""
    *_, row, column = x.stride()
    return x if (column == 1 or x.shape[-1] == 1) and row < 2**22 else x.contiguous()


def contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def aligned(count):
    """Rounded up, so that what follows in memory is as aligned at every length; symbolic if the count is."""
    return (count + 3) // 4 * 4
