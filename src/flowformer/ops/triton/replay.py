"""Replays the kernels of a call: one call into C that fills in pointers and launches them all.

Triton's own launch takes longer than a short kernel. `replay.c` is compiled once, in the way of Triton's launchers,
and calls the driver. The parameters of a kernel are read from its PTX, so nothing is assumed about Triton's launcher.
"""

from __future__ import annotations

import ctypes
import functools
import re
import struct
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from triton.runtime.build import compile_module_from_src

THREADS = 32  # per warp
INVALID_CONTEXT = 201  # the driver's error code in a thread that has not used the GPU yet
# format of a packed number, by its type in Triton
_FORMATS = {"i1": "?", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "u8": "B", "u16": "H", "u32": "I", "u64": "Q"}
_FORMATS |= {"fp32": "f", "fp64": "d"}
_BYTES = {"b8": 1, "b16": 2, "b32": 4, "b64": 8}


@functools.cache
def module() -> Any:
    """The functions of `replay.c`; None without a C compiler."""
    try:
        return compile_module_from_src(Path(__file__).with_suffix(".c").read_text(), "flowformer_replay")
    except (OSError, RuntimeError, subprocess.SubprocessError):
        return None


def program(kernels: Sequence[Any], compiled: Sequence[Any], device: int) -> Callable[[Sequence[Any]], None] | None:
    """A function that launches `launch.Kernel`s again with the tensors of another call; None if that is not possible.

    Args:
        compiled: Triton's compiled kernel of each.
    """
    if module() is None:
        return None
    # the driver refuses an empty grid, which a packed batch without sequences has
    launched = [(kernel, each) for kernel, each in zip(kernels, compiled, strict=True) if all(kernel.grid)]
    described = [describe(kernel, each) for kernel, each in launched]
    if None in described:
        return None
    recorded = module().record(_launch_address(), described)
    # keeps references: Triton unloads kernels without one
    return functools.partial(_replay, module().replay, recorded, device, tuple(compiled))


def describe(kernel: Any, compiled: Any) -> tuple[Any, ...] | None:
    """A kernel in the form of `record` in `replay.c`; None if its parameters differ from its PTX, or it has no PTX."""
    metadata, signature = compiled.metadata, compiled.src.signature
    names = kernel.function.arg_names
    constants = [kernel.constants[name] for name in names[len(kernel.arguments) + len(kernel.numbers) :]]
    values = dict(zip(names, [*kernel.arguments, *kernel.numbers, *constants], strict=True))
    packed = pack(values, signature)
    parameters = ptx_parameters(compiled.asm.get("ptx", ""))
    scratch = parameters[len(packed) :]
    extras = ("global_scratch_size", "profile_scratch_size", "launch_cooperative_grid", "launch_pdl")
    plain = metadata.num_ctas == 1 and not any(getattr(metadata, name, 0) for name in extras)
    # Triton appends pointers to scratch memory, which these kernels do not use
    if not plain or parameters != [*(len(each) for _, each in packed), *(8 for _ in scratch)]:
        return None
    # eight bytes each; a shorter number takes the first ones
    cells = b"".join(each.ljust(8, b"\0") for _, each in packed) + bytes(8 * len(scratch))
    pointers = [
        struct.pack("<qqq", slot, values[name].position, values[name].start)
        for slot, (name, _) in enumerate(packed)
        if signature[name].startswith("*")
    ]
    threads = THREADS * metadata.num_warps
    return compiled.function, *kernel.grid, threads, metadata.shared, cells, b"".join(pointers)


def pack(values: Mapping[str, Any], signature: Mapping[str, str]) -> list[tuple[str, bytes]]:
    """Name and bytes of each parameter that is not a compile-time constant; pointers are 0."""
    return [
        (name, bytes(8) if signature[name].startswith("*") else struct.pack(f"<{_FORMATS[signature[name]]}", value))
        for name, value in values.items()
        if signature[name] != "constexpr"
    ]


def ptx_parameters(ptx: str) -> list[int]:
    """The size of each kernel parameter in bytes."""
    head = re.search(r"\.entry\s+[\w$]+\s*\((.*?)\)", ptx, re.DOTALL)
    kinds = re.findall(r"\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)", "" if head is None else head[1])
    return [_BYTES.get(re.sub("^[uspf]+", "b", kind), 0) for kind in kinds]


def _launch_address() -> int:
    address = ctypes.cast(ctypes.CDLL("libcuda.so.1").cuLaunchKernel, ctypes.c_void_p).value
    assert address is not None
    return address


def _replay(
    replay: Callable[..., int], recorded: Any, device: int, compiled: tuple[Any, ...], tensors: Sequence[Any]
) -> None:
    addresses = [0 if x is None else x.data_ptr() for x in tensors]
    error = replay(recorded, torch._C._cuda_getCurrentRawStream(device), *addresses)
    if error == INVALID_CONTEXT:
        torch.cuda.synchronize(device)  # sets the device's context in this thread
        error = replay(recorded, torch._C._cuda_getCurrentRawStream(device), *addresses)
    if error:
        raise RuntimeError(f"the CUDA driver refused to launch a kernel of Flow-Attention: error {error}.")
