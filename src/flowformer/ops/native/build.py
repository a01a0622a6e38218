"""Compiles the C++ sources of this folder on first use and loads the library.

The library has plain C functions and knows nothing of torch or Python, so it compiles in seconds and serves any version
of either. It lies where torch keeps compiled extensions, under a name made of everything that it depends on.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

SOURCES = Path(__file__).parent
# -march here, after the one that $CXX may have: "native" would be another CPU's where machines share the folder
FLAGS = ("-std=c++17", "-O3", "-march=x86-64", "-mfma", "-fPIC", "-shared", "-pthread")
# by what torch finds the CPU capable of; ATEN_CPU_CAPABILITY=avx2 makes it find less. Each is a library of its own.
WIDTHS = {"AVX2": ("-mavx2",), "AVX512": ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl")}
CHECKSUM = hashlib.sha256().digest_size  # bytes at the end of a library
COMPILERS = ("c++", "g++", "clang++")
CHANGE_FOLDER = "TORCH_EXTENSIONS_DIR names another folder for it"
FUNCTIONS = ("bidirectional_forward", "bidirectional_backward", "causal_forward", "causal_backward")


def failure(narrow: bool = False) -> str | None:
    """Why there is no library here; None if there is one, which is built if need be.

    Args:
        narrow: ask for vectors of 32 bytes where the CPU has wider ones, too.
    """
    return _load(narrow)[1]


# Dynamo calls it while tracing, as it would a function marked by torch.compiler.assume_constant_result, which cannot be
# used here: it imports Dynamo, which takes longer than all of this package
failure._dynamo_marked_constant = True  # type: ignore[attr-defined]


def library(narrow: bool) -> ctypes.CDLL:
    """The functions of `library.cpp`."""
    loaded, reason = _load(narrow)
    if loaded is None:
        raise RuntimeError(f"the native library is not there: {reason}.")
    return loaded


@functools.cache
def _load(narrow: bool) -> tuple[ctypes.CDLL | None, str | None]:
    """The library, or why there is none."""
    width = _width(narrow)
    if sys.platform != "linux":
        return None, f"the native code is built on Linux only, not on {sys.platform}"
    if width not in WIDTHS:
        return None, f"this CPU has no AVX2 (torch finds {width})"
    try:
        loaded = ctypes.CDLL(str(_built(width)))
        for function in FUNCTIONS:
            getattr(loaded, function).argtypes = [ctypes.c_char_p]
    except _BuildError as error:
        return None, str(error)
    except (OSError, AttributeError) as error:  # AttributeError: the library has no such function
        return None, f"the native code could not be built or loaded: {error} ({CHANGE_FOLDER})"
    return loaded, None


def _width(narrow: bool) -> str:
    """One of `WIDTHS`, or what else torch finds the CPU capable of."""
    found = torch.backends.cpu.get_cpu_capability()
    return "AVX2" if narrow and found in WIDTHS else found


class _BuildError(Exception):
    pass


def _built(width: str) -> Path:
    """The library file, compiled unless it is there already."""
    flags = FLAGS + WIDTHS[width]
    path = _folder() / f"{_digest(flags)}.so"
    if _is_whole(path):
        return path
    compiler = _compiler()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:
        _wait_for(lock.fileno())
        if not _is_whole(path):
            _compile(compiler, flags, path)
    return path


def _is_whole(path: Path) -> bool:
    """Whether the file is there and ends with its checksum: to load a truncated one kills the process by SIGBUS."""
    try:
        content = path.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(content[:-CHECKSUM]).digest() == content[-CHECKSUM:]


def _compile(compiler: list[str], flags: tuple[str, ...], path: Path) -> None:
    logging.getLogger(__name__).warning("flowformer compiles its CPU code, once, in about 15 s: %s", path)
    # moved to its place when it is complete; in a folder of its own, since the lock does not hold on every file system
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        part = Path(folder) / path.name
        command = [*compiler, *flags, str(SOURCES / "library.cpp"), "-o", str(part)]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
        if done.returncode:
            lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
            # collect2 only says that the linker, which has spoken before it, failed
            first = next((line for line in lines if "error" in line and not line.startswith("collect2")), lines[0])
            raise _BuildError(f"{shlex.join(compiler)} could not compile the native code ({first})")
        part.write_bytes((content := part.read_bytes()) + hashlib.sha256(content).digest())
        part.replace(path)


def _compiler() -> list[str]:
    """A command, such as that of $CXX, which may have arguments: "ccache g++"."""
    asked = os.environ.get("CXX", "").strip()
    for command in [asked] if asked else COMPILERS:
        with contextlib.suppress(ValueError):  # a quotation that does not end
            program, *arguments = shlex.split(command)
            if (found := shutil.which(program)) is not None:
                return [found, *arguments]
    raise _BuildError(f"there is no C++ compiler ({f'CXX={asked}' if asked else ', '.join(COMPILERS)})")


def _folder() -> Path:
    if extensions := os.environ.get("TORCH_EXTENSIONS_DIR"):
        return Path(extensions) / "flowformer"
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError as error:  # a user without a home
        raise _BuildError(f"there is no home folder to keep the native code in ({CHANGE_FOLDER})") from error
    return cache / "torch_extensions" / "flowformer"


def _digest(flags: tuple[str, ...]) -> str:
    digest = hashlib.sha256(repr((flags, os.environ.get("CXX"), platform.machine(), platform.libc_ver())).encode())
    for source in [*sorted(SOURCES.glob("*.h")), SOURCES / "library.cpp"]:
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def _wait_for(file: int) -> None:
    """Until no other process holds the file: two builds at once would be right, but wasted."""
    import fcntl  # not on every platform

    # some network file systems have no locks
    with contextlib.suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_EX)
