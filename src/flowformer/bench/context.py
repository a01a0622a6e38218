"""Context parallelism on this machine: bytes that a rank sends in a forward and a backward pass, counted by the op.

    flowformer bench context                                  # 2 and 4 processes, gloo
    flowformer bench context --ranks 8 --lengths 8192         # a sequence of 8192 tokens split over 8 processes
    flowformer bench context --work work.csv                  # the work of one rank, timed alone on this device
    flowformer bench context --project                        # many GPUs, by the formulas of context_projection.py

Results and gradients are first compared with one process. The bytes sent are printed next to `predicted_bytes`, which
does not depend on the length. The processes that are timed share the cores of one machine.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import tempfile
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist

from ..ops import flow_attention
from ..ops.context.exchange import GATHERED_BYTES, traffic
from .errors import relative_error
from .measure import csv_file, machine, milliseconds, peak_bytes

KINDS = ("bidirectional", "causal")
TOLERANCE = 1e-5
TIMEOUT = timedelta(minutes=5)


@dataclass(frozen=True)
class ContextTiming:
    """Forward and backward pass of one call with a sequence split over ranks."""

    kind: str
    ranks: int
    length: int  # of the whole sequence
    stages: int
    collectives: int
    bytes_sent: int
    bytes_predicted: int
    milliseconds: float
    error: float  # against one process, the largest of the result's and the gradients'


def exchanged_numbers(heads: int, dim: int, value_dim: int, is_causal: bool) -> list[tuple[int, int]]:
    """For each exchange, forward and backward: how many numbers are summed, and how many are only sent to every rank.

    The exchanges are Σk, Σq and counts; Σk/O, Σq/I; one or two logarithms per head; S; and their gradients.

    >>> exchanged_numbers(16, 64, 64, is_causal=True)[:4]
    [(2064, 0), (2048, 0), (0, 16), (65536, 0)]
    """
    vectors, memory = 2 * heads * dim, heads * dim * value_dim
    if is_causal:
        forward = [(vectors, 0), (vectors, 0), (0, heads), (memory, 0)]
        return [(vectors + heads, 0), *forward[1:], *forward[::-1]]
    forward = [(vectors + 2 * heads, 0), (vectors, 0), (memory, 2 * heads)]
    return [*forward, (memory + heads, 0), (vectors, 0), (vectors, 0)]


def predicted_bytes(heads: int, dim: int, value_dim: int, ranks: int, is_causal: bool) -> int:
    """Bytes that a rank sends in one forward and backward pass, for one sequence with float32 sums.

    A sum of n numbers takes 4 n (P − 1) bytes if all ranks get all numbers, as for small n; otherwise each rank sums a
    slice of n/P numbers, which takes 2 · 4 n/P · (P − 1).

    >>> predicted_bytes(16, 64, 64, ranks=8, is_causal=False)
    976080
    """
    others, total = ranks - 1, 0
    for summed, plain in exchanged_numbers(heads, dim, value_dim, is_causal):
        numbers = summed if is_gathered(summed, ranks) else 2 * -(-summed // ranks)
        total += 4 * others * (numbers + plain)
    return total


def is_gathered(summed: int, ranks: int) -> bool:
    """Whether this many numbers are sent to every rank in one collective."""
    return ranks * 4 * summed <= GATHERED_BYTES


def measure(kind: str, ranks: int, length: int, heads: int, dim: int, repeats: int) -> ContextTiming:
    """Start the processes. Returns: the measurements of rank 0, with the largest error of all ranks."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_rank, (folder, kind, ranks, length, heads, dim, repeats), nprocs=ranks)
        return torch.load(Path(folder) / "timing", weights_only=False)


def worst_error(errors: list[float]) -> float:
    """The largest error; infinity if one is NaN, which max and gloo's reduction may drop.

    >>> worst_error([0.5, float("nan"), 0.25])
    inf
    """
    return max(math.inf if math.isnan(error) else error for error in errors)


def _rank(rank: int, folder: str, kind: str, ranks: int, length: int, heads: int, dim: int, repeats: int) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=TIMEOUT)
    torch.manual_seed(0)
    inputs, is_causal = torch.randn(4, 1, heads, length, dim).unbind(), kind == "causal"
    start, stop = length * rank // ranks, length * (rank + 1) // ranks
    *leaves, grad = (x[:, :, start:stop].clone() for x in inputs)

    def run(leaves, grad, group=None):
        leaves = [x.detach().requires_grad_() for x in leaves]
        result = flow_attention(*leaves, is_causal=is_causal, group=group)
        return result.detach(), *torch.autograd.grad(result, leaves, grad)

    with traffic() as sent:
        ours = run(leaves, grad, dist.group.WORLD)
    whole = run(inputs[:3], inputs[3])
    errors = [relative_error(x, y[:, :, start:stop]) for x, y in zip(ours, whole, strict=True)]
    worst = torch.tensor(worst_error(errors), dtype=torch.float64)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    del whole
    times = []
    for _ in range(repeats):
        dist.barrier()
        times.append(milliseconds(lambda: run(leaves, grad, dist.group.WORLD), "cpu"))
    if rank == 0:
        timing = ContextTiming(
            kind,
            ranks,
            length,
            sent.stages,
            sent.collectives,
            sent.bytes,
            predicted_bytes(heads, dim, dim, ranks, is_causal),
            statistics.median(times),
            worst.item(),
        )
        torch.save(timing, f"{folder}/timing")
    dist.barrier()
    # a gloo thread that is still running would abort a regular exit
    os._exit(0)


@dataclass(frozen=True)
class RankWork:
    """The work of one rank, forward and backward: milliseconds in a group, and without one (`alone`)."""

    kind: str
    tokens: int
    alone: float
    milliseconds: float
    peak_mib: int
    heads: int
    dim: int


def measure_work(
    kind: str, tokens: int, heads: int, dim: int, repeats: int, device: str, dtype: torch.dtype
) -> RankWork:
    """The work of one rank with this many tokens, in a group of one process, whose exchanges are copies."""
    inputs = torch.randn(4, 1, heads, tokens, dim, device=device, dtype=dtype).unbind()
    leaves = [x.requires_grad_() for x in inputs[:3]]

    def run(group=None):
        result = flow_attention(*leaves, is_causal=kind == "causal", group=group)
        torch.autograd.grad(result, leaves, inputs[3])

    times = {}
    for name, group in (("alone", None), ("milliseconds", dist.group.WORLD)):
        run(group)
        times[name] = statistics.median(milliseconds(partial(run, group), device) for _ in range(repeats))
    peak = peak_bytes(lambda: run(dist.group.WORLD), device) / 2**20
    return RankWork(kind, tokens, **times, peak_mib=round(peak), heads=heads, dim=dim)


def write_work(path: Path, options: argparse.Namespace) -> None:
    """Measure the work of one rank at all lengths, and write the file that --measured reads."""
    device, dtype, backend = (
        ("cuda", torch.bfloat16, "nccl") if torch.cuda.is_available() else ("cpu", torch.float32, "gloo")
    )
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    with csv_file(path, RankWork, machine(device, str(dtype).removeprefix("torch."))) as write:
        for kind, tokens in product(KINDS, options.lengths):
            work = measure_work(kind, tokens, options.heads, options.dim, options.repeats, device, dtype)
            write(work)
            print(", ".join(f"{name} {value}" for name, value in asdict(work).items()), flush=True)
    dist.destroy_process_group()


def main(arguments: list[str] | None = None) -> int:
    """Print the table. Returns: the exit status, 1 if a result is wrong or the bytes sent differ from the formula."""
    parser = argparse.ArgumentParser("flowformer bench context", description=__doc__.split("\n\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--work", type=Path, metavar="CSV", help="time the work of one rank alone, at these lengths")
    parser.add_argument("--project", action="store_true", help="project times on many GPUs; measures nothing")
    parser.add_argument("--measured", type=Path, metavar="CSV", help="what --work wrote, for --project")
    options = parser.parse_args(arguments)
    if options.work is not None:
        write_work(options.work, options)
        return 0
    if options.project:
        from . import context_projection as projection

        measured = projection.read(options.measured, options.heads, options.dim)
        print(projection.tables(options.heads, options.dim, measured))
        return 0
    print(f"One layer, forward and backward, {options.heads} heads of width {options.dim}, float32, gloo.\n")
    columns = ["kind", "ranks", "length", "stages", "collectives", "bytes sent", "formula", "ms", "error"]
    print("| " + " | ".join(columns) + " |\n|" + " --- |" * len(columns))
    failures = 0
    for kind in KINDS:
        for ranks in options.ranks:
            for length in options.lengths:
                timing = measure(kind, ranks, length, options.heads, options.dim, options.repeats)
                failures += not timing.error <= TOLERANCE or timing.bytes_sent != timing.bytes_predicted
                *first, ms, error = asdict(timing).values()
                print("| " + " | ".join(map(str, first)) + f" | {ms:.1f} | {error:.1e} |", flush=True)
    for kind in KINDS:
        formula = predicted_bytes(options.heads, options.dim, options.dim, 8, kind == "causal")
        print(f"\nBy the formula, a rank of 8 sends {formula:,} bytes ({kind}).")
    return int(failures > 0)
