"""How kernels are launched, and launched again: what Triton finds out about every argument of every call takes longer
than the kernel of a short sequence, and is the same for every call of one plan."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


def launch(
    kernel: Any,
    grid: tuple[int, int, int],
    tensors: Sequence[Tensor | None],
    numbers: Sequence[Any],
    constants: Mapping[str, Any],
    device: torch.device,
    **settings: Any,
) -> Callable[..., None] | None:
    """Runs a kernel; what it returns runs it again with other tensors of the same kinds.

    Args:
        tensors: the first arguments of the kernel.
        numbers: those between the tensors and the constants.
        constants: by name, all that follow.
        settings: of Triton, such as num_warps.

    Returns: None in the interpreter, which has nothing to remember.
    """
    compiled = kernel[grid](*tensors, *numbers, **constants, **settings)
    if compiled is None:
        return None
    run = compiled.run
    rest = *numbers, *(constants[name] for name in kernel.arg_names[len(tensors) + len(numbers) :])
    # without the hooks of profilers
    head = compiled.function, compiled.packed_metadata, None, None, None

    def again(*tensors: Tensor | None) -> None:
        stream = torch._C._cuda_getCurrentRawStream(device.index)
        # Triton would ask the driver about each tensor
        run(*grid, stream, *head, *[None if x is None else x.data_ptr() for x in tensors], *rest)

    return again


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


@functools.cache
def processors(device: torch.device) -> int:
    """How many programs run at once, if each takes all of a processor; on a CPU, which only interprets, a few."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
