"""Helpers of the benchmarks: time, peak memory, a memory limit, and a description of the machine."""

from __future__ import annotations

import csv
import importlib.metadata
import os
import platform
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

# without this, the memory profiler logs every start
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

import torch

from .. import __version__
from .._utils import git_commit


def milliseconds(run: Callable[[], object], device: str) -> float:
    if device == "cuda":
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop)
    start_time = time.perf_counter()
    run()
    return (time.perf_counter() - start_time) * 1e3


def captured(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """Capture a run as a CUDA graph, after a warm-up run on a side stream."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def graph_milliseconds(run: Callable[[], object], repeats: int) -> float:
    """The median time of a run replayed as a CUDA graph, that is without host overhead."""
    graph = captured(run)
    # flush the L2 cache, which would still hold data of the previous replay
    flush = torch.empty(2**28, dtype=torch.uint8, device="cuda")
    times = []
    for _ in range(repeats):
        flush.zero_()
        times.append(milliseconds(graph.replay, "cuda"))
    return statistics.median(times)


def host_microseconds(run: Callable[[], object], repeats: int) -> float:
    """The median time until a call returns, without waiting for the GPU."""
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        times.append((time.perf_counter() - start) * 1e6)
    return statistics.median(times)


def launches(run: Callable[[], object]) -> int:
    """The number of kernels that a run launches."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events())


def peak_bytes(run: Callable[[], object], device: str) -> int:
    """Peak memory of a run, above the memory allocated before it."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    held = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


def percentiles(times: list[float]) -> tuple[float, float, float]:
    """The median, the 20th and the 80th percentile; for a single time, all three are that time."""
    if len(times) == 1:  # `statistics.quantiles` raises on it before Python 3.13
        return times[0], times[0], times[0]
    fifths = statistics.quantiles(times, n=5, method="inclusive")
    return statistics.median(times), fifths[0], fifths[-1]


@contextmanager
def limited_memory(device: str, gib: float | None = None) -> Iterator[None]:
    """Limit memory inside the context: allocations beyond the limit raise an error that `is_out_of_memory` recognises.

    Args:
        gib: the limit; on a CPU, in addition to what the process already uses. None is all memory of a GPU, and four
            fifths of the available memory on a CPU (no limit on systems other than Linux).
    """
    if device == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(1.0 if gib is None else min(1.0, gib * 2**30 / total))
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
    elif sys.platform == "linux":
        import resource

        limit = 0.8 * _kib("/proc/meminfo", "MemAvailable") * 2**10 if gib is None else gib * 2**30
        soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (_kib("/proc/self/status", "VmData") * 2**10 + int(limit), hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
    elif gib is None:
        yield
    else:
        raise NotImplementedError(f"memory of a CPU can be limited on Linux only, got a limit of {gib} GiB. Pass none.")


def _kib(path: str, name: str) -> int:
    (found,) = re.findall(rf"{name}:\s+(\d+) kB", Path(path).read_text())
    return int(found)


def is_out_of_memory(error: BaseException) -> bool:
    # the CPU allocator and cuBLAS raise plain RuntimeErrors
    by_message = any(text in str(error) for text in ("DefaultCPUAllocator", "CUBLAS_STATUS_ALLOC_FAILED"))
    return by_message or isinstance(error, (torch.OutOfMemoryError, MemoryError))


@contextmanager
def csv_file(path: Path | None, row_type: type, facts: dict[str, str]) -> Iterator[Callable[[Any], None]]:
    """Yield a function that writes a row, a dataclass, and flushes it, so that a killed run keeps its rows.

    Args:
        path: None writes nothing.
        facts: columns with the same value in every row.
    """
    if path is None:
        yield lambda row: None
        return
    with path.open("w", newline="", buffering=1) as file:
        writer = csv.writer(file)
        writer.writerow([*(field.name for field in fields(row_type)), *facts])
        yield lambda row: writer.writerow([*asdict(row).values(), *facts.values()])


def machine(device: str, dtype: str) -> dict[str, str]:
    """Device, versions and commit of a benchmark, for every row of its table."""
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine(),
        "threads": str(torch.get_num_threads()),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "flowformer": __version__,
        "commit": git_commit(),
        "dtype": dtype,
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not there"
