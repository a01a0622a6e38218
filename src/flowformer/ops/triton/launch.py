"""Launch cache: the kernels of a call are compiled once, in parallel, then replayed with new pointers.

Triton re-specialises the arguments of every launch, which costs more than a short kernel. The first call of a plan
therefore records the compiled kernels, and later calls only fill in pointers and the stream (`replay.py`).
"""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from . import replay

# fused multiply-add, with which the kernels were measured; not the default from Triton 3.10 on
_FUSED = {"enable_fp_fusion": True}

# Kernels are not specialised for lengths and strides; `plan.Strides` passes what they may rely on as constants.
_TENSORS = ("q", "k", "v", "g", "r", "dk", "dv", "own", "other", "left", "right", "out")
_RUNTIME = {f"{tensor}_{axis}" for tensor in _TENSORS for axis in ("batch", "head", "token")}
_RUNTIME |= {"sinks", "sources", "heads", "shared", "length", "size", "segments", "plane"}


def kernel(function: Callable[..., None]) -> Any:
    """Jits a kernel without specialising it for lengths and strides."""
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    return triton.jit(function, do_not_specialize=[name for name in names if name in _RUNTIME])


class Argument(NamedTuple):
    """A tensor of a call, or a part of a flat one.

    Identified by position, not by identity: two arguments may alias in one call and not in the next.
    """

    tensor: Tensor
    position: int  # among the tensors of the call
    start: int = 0  # offset of the part in the tensor, in bytes

    def split(self, sizes: Sequence[int]) -> list[Argument]:
        parts = self.tensor.split_with_sizes(list(sizes))
        starts = itertools.accumulate((part.nbytes for part in parts), initial=self.start)
        return [Argument(part, self.position, start) for part, start in zip(parts, starts, strict=False)]


def arguments(tensors: Iterable[Tensor | None]) -> list[Any]:
    """An Argument for each tensor, None for one that is not passed; the plan knows which may be None."""
    return [None if x is None else Argument(x, position) for position, x in enumerate(tensors)]


class Kernel(NamedTuple):
    """A kernel and its launch parameters."""

    function: Any
    grid: tuple[int, int, int]
    arguments: Sequence[Argument | None]  # its first parameters
    numbers: Sequence[Any]  # the parameters between these and the constants
    constants: Mapping[str, Any]  # the rest of its parameters, by name
    warps: int = 4
    smaller: Sequence[Mapping[str, Any]] = ()  # replacements for constants, tried in turn until shared memory suffices


class Launches:
    """The kernels of one plan: compiled at its first call, replayed at later ones.

    Args:
        wgmma: whether matrix products may use Hopper's warp-group instructions. If operands of several widths are live
            at once, ptxas 12.8 (Triton 3.6) lets some of them read uniform registers that were never written (check:
            compile with wgmma=True and run `tests/machine_code.py`, which finds such reads in the SASS).
    """

    def __init__(self, wgmma: bool = True) -> None:
        self.wgmma = wgmma
        self._constants: list[Mapping[str, Any]] | None = None
        self._replay: Callable[[Sequence[Any]], None] | None = None

    def __call__(
        self,
        tensors: Sequence[Any],
        describe: Callable[..., Iterable[Kernel]],
        ahead: Callable[[], Iterable[Kernel]] | None = None,
    ) -> None:
        """Launches the kernels that `describe` returns for the tensors; all tensors but the first may be None.

        Args:
            ahead: the kernels of the backward pass that will follow, compiled in parallel with these.
        """
        with device_of(tensors[0]):
            if self._replay is not None:
                self._replay(tensors)
                return
            kernels = list(describe(*arguments(tensors)))
            if self._constants is None:
                following = () if ahead is None else list(ahead())
                self._constants = fit([*kernels, *following], tensors[0].device, self.wgmma)[: len(kernels)]
            kernels = [kernel._replace(constants=c) for kernel, c in zip(kernels, self._constants, strict=True)]
            compiled = []
            for kernel in kernels:
                compiled.append(_launch(kernel))
            # the interpreter compiles nothing
            if None not in compiled:
                self._replay = replay.program(kernels, compiled, tensors[0].device.index)


def fit(kernels: Sequence[Kernel], device: torch.device, wgmma: bool) -> list[Mapping[str, Any]]:
    """Compiles kernels in parallel. Returns: the constants of each, replaced if shared memory is too small."""
    constants = [kernel.constants for kernel in kernels]
    if not isinstance(kernels[0].function, triton.JITFunction):
        return constants
    available = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
    smaller = [iter(kernel.smaller) for kernel in kernels]
    pending = list(range(len(kernels)))
    while pending:
        needed = _compile([kernels[i]._replace(constants=constants[i]) for i in pending], wgmma)
        pending = [i for i, size in zip(pending, needed, strict=True) if size > available]
        for i in pending:
            replacement = next(smaller[i], None)
            if replacement is None:
                name = kernels[i].function.__name__
                raise RuntimeError(f"{name} does not fit the {available} bytes of shared memory of {device}.")
            constants[i] = {**constants[i], **replacement}
    return constants


_compiling = threading.Lock()  # for the environment variable of `_without_wgmma`, which affects the whole process


def _compile(kernels: Sequence[Kernel], wgmma: bool) -> list[int]:
    """Compiles kernels without running them. Returns: the bytes of shared memory that each needs."""
    with _compiling, nullcontext() if wgmma else _without_wgmma():
        forks = Forks()
        forks.submit(replay.module)
        # an exception inside the mode would leave it active for good, so errors are raised by `result` below
        with triton.AsyncCompileMode(forks, ignore_errors=True):
            compiled = [
                kernel.function.warmup(*_values(kernel), **_options(kernel), grid=kernel.grid) for kernel in kernels
            ]
            forks.join()
    # a kernel that was compiled before is returned as such, not as a future
    compiled = [each.result() if hasattr(each, "result") else each for each in compiled]
    return [each.metadata.shared for each in compiled]


class Forks(Executor):
    """Compiles each kernel in a child process, which fills Triton's disk cache, then in this one from the cache.

    Triton compiles under the GIL, so threads would not run in parallel. Children are forked, as by torch's data
    loaders, and never touch the GPU.
    """

    SECONDS = 120  # after which children count as hung and are killed; their functions run only in this process

    def __init__(self) -> None:
        self._running: list[tuple[int, Callable[[], Any], Future[Any]]] = []

    # Triton submits a function alone, where an Executor also takes its arguments
    def submit(self, function: Callable[[], Any], /) -> Future[Any]:  # type: ignore[override]
        future: Future[Any] = Future()
        with warnings.catch_warnings():
            # Python warns that another thread may hold a lock: at worst the child hangs
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if child == 0:
            with suppress(BaseException):
                compiled = function()
                if hasattr(compiled, "src"):
                    # Triton 3.6 compiles a C launcher for every signature; without this, at the first launch
                    triton.runtime.driver.active.launcher_cls(compiled.src, compiled.metadata)
            os._exit(0)
        self._running.append((child, function, future))
        return future

    def join(self) -> None:
        """Wait for the children, then run all functions in this process."""
        end = time.monotonic() + self.SECONDS
        for child, function, future in self._running:
            while os.waitpid(child, os.WNOHANG) == (0, 0):
                if time.monotonic() > end:
                    os.kill(child, signal.SIGKILL)
                time.sleep(0.002)
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)


@contextmanager
def _without_wgmma() -> Iterator[None]:
    before = os.environ.get("DISABLE_MMA_V3")
    os.environ["DISABLE_MMA_V3"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["DISABLE_MMA_V3"]
        else:
            os.environ["DISABLE_MMA_V3"] = before


def _values(kernel: Kernel) -> list[Any]:
    return [*(None if x is None else x.tensor for x in kernel.arguments), *kernel.numbers]


def _options(kernel: Kernel) -> dict[str, Any]:
    return {**kernel.constants, **_FUSED, "num_warps": kernel.warps}


def _launch(kernel: Kernel) -> Any:
    """Triton's own launch. Returns: the compiled kernel, None in the interpreter."""
    return kernel.function[kernel.grid](*_values(kernel), **_options(kernel))


def device_of(x: Tensor) -> AbstractContextManager[object]:
    """Makes the device of x the current one, which Triton launches on."""
    elsewhere = x.is_cuda and x.device.index != torch.cuda.current_device()
    return torch.cuda.device(x.device) if elsewhere else nullcontext()
