"""Compiles the C++ sources of this folder on first use and loads the library.

The library exports plain C functions and uses no headers of torch or Python, so it compiles in seconds and works with
any version of either. It is stored in torch's folder for compiled extensions, under a hash of everything that it
depends on: sources, flags and platform.
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
# -march comes after the arguments in $CXX and overrides theirs: -march=native would be wrong for the other machines
# that share the folder
FLAGS = ("-std=c++17", "-O3", "-march=x86-64", "-mfma", "-fPIC", "-shared", "-pthread")
# flags by the CPU capability that torch reports (ATEN_CPU_CAPABILITY=avx2 lowers it); one library is built for each
WIDTHS = {"AVX2": ("-mavx2",), "AVX512": ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl")}
CHECKSUM = hashlib.sha256().digest_size  # bytes, appended to the library file
COMPILERS = ("c++", "g++", "clang++")
FOLDER_HINT = "set TORCH_EXTENSIONS_DIR to use another folder"
FUNCTIONS = ("bidirectional_forward", "bidirectional_backward", "causal_forward", "causal_backward")


def failure(narrow: bool = False) -> str | None:
    """The reason why the library is not available; None if it is. Builds the library if necessary.

    Args:
        narrow: use vectors of 32 bytes even if the CPU has wider ones.
    """
    return _load(narrow)[1]


# Dynamo calls `failure` while tracing and treats the result as a constant. torch.compiler.assume_constant_result sets
# the same attribute, but imports Dynamo, which takes longer than all of this package.
failure._dynamo_marked_constant = True  # type: ignore[attr-defined]


def library(narrow: bool) -> ctypes.CDLL:
    """The loaded library, with the functions of `library.cpp`."""
    loaded, reason = _load(narrow)
    if loaded is None:
        raise RuntimeError(f"the native library is not available: {reason}.")
    return loaded


@functools.cache
def _load(narrow: bool) -> tuple[ctypes.CDLL | None, str | None]:
    """The library, or the reason why it is not available; the other one is None."""
    width = _width(narrow)
    if sys.platform != "linux":
        return None, f"the native code is built on Linux only, not on {sys.platform}"
    if width not in WIDTHS:
        return None, f"this CPU has no AVX2 (torch finds {width})"
    try:
        loaded = ctypes.CDLL(str(_library_file(width)))
        for function in FUNCTIONS:
            getattr(loaded, function).argtypes = [ctypes.c_char_p]
    except _BuildError as error:
        return None, str(error)
    except (OSError, AttributeError) as error:  # AttributeError: the library has no such function
        return None, f"the native code could not be built or loaded: {error} ({FOLDER_HINT})"
    return loaded, None


def _width(narrow: bool) -> str:
    """A key of `WIDTHS`, or another capability that torch reports if the CPU has no AVX2."""
    capability = torch.backends.cpu.get_cpu_capability()
    return "AVX2" if narrow and capability in WIDTHS else capability


class _BuildError(Exception):
    pass


def _library_file(width: str) -> Path:
    """The path of the library, which is compiled unless it exists."""
    flags = FLAGS + WIDTHS[width]
    path = _folder() / f"{_digest(flags)}.so"
    if _is_complete(path):
        return path
    compiler = _compiler()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:
        _lock(lock.fileno())
        if not _is_complete(path):
            _compile(compiler, flags, path)
    return path


def _is_complete(path: Path) -> bool:
    """Whether the file exists and ends with its checksum: loading a truncated file would kill the process by SIGBUS."""
    try:
        content = path.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(content[:-CHECKSUM]).digest() == content[-CHECKSUM:]


def _compile(compiler: list[str], flags: tuple[str, ...], path: Path) -> None:
    logging.getLogger(__name__).warning("flowformer compiles its CPU code, once, in about 15 s: %s", path)
    # compiled in a temporary folder and moved when it is complete: some file systems have no locks, so another process
    # may be compiling the same file
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        part = Path(folder) / path.name
        command = [*compiler, *flags, str(SOURCES / "library.cpp"), "-o", str(part)]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
        if done.returncode:
            lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
            # collect2 only reports that the linker failed; the linker's own message is in an earlier line
            first = next((line for line in lines if "error" in line and not line.startswith("collect2")), lines[0])
            raise _BuildError(f"{shlex.join(compiler)} could not compile the native code ({first})")
        part.write_bytes((content := part.read_bytes()) + hashlib.sha256(content).digest())
        part.replace(path)


def _compiler() -> list[str]:
    """The compiler command and its arguments: $CXX, such as "ccache g++", or the first of COMPILERS that exists."""
    requested = os.environ.get("CXX", "").strip()
    for command in [requested] if requested else COMPILERS:
        with contextlib.suppress(ValueError):  # no closing quotation mark
            program, *arguments = shlex.split(command)
            if (path := shutil.which(program)) is not None:
                return [path, *arguments]
    raise _BuildError(f"there is no C++ compiler ({f'CXX={requested}' if requested else ', '.join(COMPILERS)})")


def _folder() -> Path:
    if extensions := os.environ.get("TORCH_EXTENSIONS_DIR"):
        return Path(extensions) / "flowformer"
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError as error:  # the user has no home folder
        raise _BuildError(f"there is no home folder to keep the native code in ({FOLDER_HINT})") from error
    return cache / "torch_extensions" / "flowformer"


def _digest(flags: tuple[str, ...]) -> str:
    digest = hashlib.sha256(repr((flags, os.environ.get("CXX"), platform.machine(), platform.libc_ver())).encode())
    for source in [*sorted(SOURCES.glob("*.h")), SOURCES / "library.cpp"]:
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def _lock(file: int) -> None:
    """Lock the file, waiting for other processes: two builds at once would be correct, but one would be wasted."""
    import fcntl  # not on every platform

    # some network file systems have no locks
    with contextlib.suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_EX)
