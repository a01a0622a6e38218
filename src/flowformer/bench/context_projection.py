"""Time of sequences split over many GPUs, projected from the measured work of one rank and a model of the links.

    flowformer bench context --work work.csv --lengths 65536 1048576    # on a GPU: the work of one rank, timed alone
    flowformer bench context --project --measured work.csv

With N tokens on P ranks, n = N/P, one layer forward and backward:

    time = work(n) + Σ over exchanges of collectives · latency · ⌈log₂ P⌉ + bytes / bandwidth

`work` is interpolated between measured lengths; exchanges and bytes are as counted by the op. Ring attention for
softmax passes keys and values around P − 1 times, overlapped with the previous block's work (Liu, Zaharia and Abbeel,
2023), and their gradients too in the backward pass:

    time = P · max(flops(n, n) / speed, latency + bytes / bandwidth), for each direction

Nothing here was measured on more than one GPU.
"""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from .context import exchanged_numbers, is_gathered

GPUS_PER_MACHINE = 8
LENGTHS = [2**16, 2**18, 2**20, 2**22, 2**24]
RANKS = [1, 2, 4, 8, 16, 32, 64, 128, 256]


@dataclass(frozen=True)
class Link:
    """Between two GPUs: latency in seconds, including the launch, and bandwidth in bytes per second one way."""

    latency: float
    bandwidth: float


# data sheets for the bandwidths (NVLink 4: 900 GB/s both ways; InfiniBand NDR: 400 Gb/s a GPU), assumed latencies
NVLINK, INFINIBAND = Link(5e-6, 450e9), Link(15e-6, 50e9)
# by number of tokens, milliseconds of one layer of 16 heads of width 64, forward and backward, bfloat16, on one H200:
# results/attention-length-h200.csv, replayed as CUDA graphs
WHOLE = {
    "bidirectional": {1024: 0.064, 4096: 0.114, 16384: 0.285, 65536: 0.968, 262144: 3.334},
    "causal": {1024: 0.123, 4096: 0.170, 16384: 0.566, 65536: 1.872, 262144: 6.719},
}
# flash attention in the same file, at 65,536 tokens: 3.5 times the products of the forward pass, half of them if causal
SOFTMAX_FLOPS = 3.5 * 4 * 16 * 64 * 65536**2
SOFTMAX_SPEED = {"bidirectional": SOFTMAX_FLOPS / 136.4e-3, "causal": SOFTMAX_FLOPS / 2 / 70.9e-3}


def link(ranks: int) -> Link:
    """NVLink inside a machine; beyond, InfiniBand for all messages."""
    return NVLINK if ranks <= GPUS_PER_MACHINE else INFINIBAND


def work(tokens: float, measured: dict[int, float]) -> float:
    """Milliseconds for a rank's tokens, interpolated or extrapolated; at least the time of the shortest measurement.

    >>> work(1000, {100: 1.0, 200: 2.0}), work(150, {100: 1.0, 200: 2.0}), work(1, {100: 1.0, 200: 2.0})
    (10.0, 1.5, 1.0)
    """
    points = sorted(measured.items())
    if tokens <= points[0][0]:
        return points[0][1]
    for (low, start), (high, stop) in pairwise(points):
        if tokens <= high:
            return start + (stop - start) * (tokens - low) / (high - low)
    most, longest = points[-1]
    return longest * tokens / most


def exchange(ranks: int, heads: int, dim: int, is_causal: bool) -> float:
    """Milliseconds of all exchanges of a forward and a backward pass."""
    if ranks == 1:
        return 0.0
    wire, seconds = link(ranks), 0.0
    for summed, plain in exchanged_numbers(heads, dim, dim, is_causal):
        gathered = is_gathered(summed, ranks)
        numbers = plain + (summed if gathered else 2 * -(-summed // ranks))
        seconds += (1 if gathered else 2) * wire.latency * math.ceil(math.log2(ranks))
        seconds += 4 * numbers * (ranks - 1) / wire.bandwidth
    return 1e3 * seconds


def flow(length: int, ranks: int, heads: int, dim: int, kind: str, measured: dict[int, float]) -> float:
    """Milliseconds of one layer of Flow-Attention."""
    return work(length / ranks, measured) + exchange(ranks, heads, dim, kind == "causal")


def ring(length: int, ranks: int, heads: int, dim: int, kind: str) -> float:
    """Milliseconds of one layer of softmax ring attention, with balanced causal blocks."""
    wire, tokens = link(ranks), length / ranks
    flops = 4 * heads * dim * tokens**2 * (0.5 if kind == "causal" else 1)
    tensor = 2 * tokens * heads * dim  # bytes of the keys of a rank in bfloat16
    seconds = 0.0
    # the backward pass has 2.5 times the FLOPs, and also sends the gradients of keys and values
    for products, tensors in ((1, 2), (2.5, 4)):
        send = wire.latency + tensors * tensor / wire.bandwidth if ranks > 1 else 0.0
        seconds += ranks * max(products * flops / SOFTMAX_SPEED[kind], send)
    return 1e3 * seconds


def read(path: Path | None, heads: int, dim: int) -> dict[str, dict[int, float]]:
    """The work of one rank by kind and tokens, from a file that `flowformer bench context --work` wrote.

    Without a file: the measured kernels on a whole sequence, available for one width only.
    """
    if path is None:
        if (heads, dim) != (16, 64):
            raise ValueError(f"{heads} heads of width {dim} need --measured; without it there are 16 of width 64.")
        return WHOLE
    measured: dict[str, dict[int, float]] = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            if (int(row["heads"]), int(row["dim"])) == (heads, dim):
                measured.setdefault(row["kind"], {})[int(row["tokens"])] = float(row["milliseconds"])
    if not measured:
        raise ValueError(f"{path} has no rows of {heads} heads of width {dim}, as --work writes them.")
    return measured


def tables(heads: int, dim: int, measured: dict[str, dict[int, float]]) -> str:
    """Markdown: milliseconds and efficiency, T(N, 1) / (P · T(N, P)), for lengths N and ranks P."""
    lines = []
    for kind, points in measured.items():
        for name in ("flow", "ring softmax"):
            times = {
                (n, p): flow(n, p, heads, dim, kind, points) if name == "flow" else ring(n, p, heads, dim, kind)
                for n in LENGTHS
                for p in RANKS
            }
            lines += [f"{name}, {kind}: ms (efficiency)", ""]
            lines += ["| tokens | " + " | ".join(map(str, RANKS)) + " |", "| --- |" + " --- |" * len(RANKS)]
            for n in LENGTHS:
                cells = (f"{_short(times[n, p])} ({times[n, 1] / (p * times[n, p]):.0%})" for p in RANKS)
                lines.append(f"| {n:,} | " + " | ".join(cells) + " |")
            lines.append("")
    return "\n".join(lines)


def _short(milliseconds: float) -> str:
    """Three digits, with a thousands separator.

    >>> _short(0.12345), _short(12345.6)
    ('0.123', '12,346')
    """
    return f"{milliseconds:,.0f}" if milliseconds >= 100 else f"{milliseconds:.3g}"
