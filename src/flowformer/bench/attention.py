"""Time and memory of Flow-Attention, the authors' formulation and other attentions, measured in one run.

    flowformer bench attention                              # the benchmark of the README, on this machine
    flowformer bench attention --shapes B2H8N512d64 B1H16N65536d64 --kinds causal --csv times.csv

First every contestant is checked against the float64 reference; those of this package must pass. Then all of them run
in turn, so that background load affects all alike. Output: median time with the 20th and 80th percentiles, peak
memory above the inputs and (for forward+backward) their gradients, and the speedup. On a GPU also the time as a CUDA
graph, the number of kernels and the host time; contestants there include the floor, the time of the minimum memory
traffic, and flash-linear-attention if it is installed. Finally, the time to decode a token early and late in a
sequence.
"""

from __future__ import annotations

import argparse
import math
import re
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import FlowVariant, flow_attention, flow_attention_recurrent
from ..baselines import LinearAttention
from ..ops import reference
from .measure import (
    csv_file,
    graph_milliseconds,
    host_microseconds,
    launches,
    machine,
    milliseconds,
    peak_bytes,
    percentiles,
)

KINDS = ("bidirectional", "causal")
DTYPES = ("float16", "bfloat16", "float32", "float64")
# CPU, GPU
SHAPES = (
    ["B2H8N512d64", "B2H8N1024d64", "B2H8N2048d64", "B2H8N4096d64", "B2H8N16384d64"],
    ["B32H8N1024d64", "B32H8N4096d64", "B8H16N2048d64", "B4H16N16384d64", "B1H16N262144d64", "B32H16N3136d8"],
)
# Algorithms 1 and 2 as printed, so that all contestants compute the same function
VARIANT = FlowVariant.named("paper")
EPS = VARIANT.eps


def authors_bidirectional(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Algorithm 1, line by line."""
    q, k = query.sigmoid(), key.sigmoid()
    incoming = ((q + EPS) * (k.sum(-2, keepdim=True) + EPS)).sum(-1, keepdim=True)
    outgoing = ((k + EPS) * (q.sum(-2, keepdim=True) + EPS)).sum(-1, keepdim=True)
    conserved_incoming = ((q + EPS) * ((k / outgoing).sum(-2, keepdim=True) + EPS)).sum(-1, keepdim=True)
    conserved_outgoing = ((k + EPS) * ((q / incoming).sum(-2, keepdim=True) + EPS)).sum(-1, keepdim=True)
    competition = conserved_outgoing.softmax(-2)
    allocation = conserved_incoming.sigmoid()
    return (q / incoming) @ (k.mT @ (competition * value)) * allocation


def authors_causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Algorithm 2, line by line, with its running sum of N matrices of D × E."""
    q, k = query.sigmoid(), key.sigmoid()
    position = torch.arange(1, q.shape[-2] + 1, device=q.device, dtype=q.dtype)[:, None]
    incoming = ((q + EPS) * (k.cumsum(-2) + EPS)).sum(-1, keepdim=True) / position
    outgoing = ((k + EPS) * (q.cumsum(-2) + EPS)).sum(-1, keepdim=True) / position
    conserved_incoming = ((q + EPS) * ((k / outgoing).cumsum(-2) + EPS)).sum(-1, keepdim=True) / position
    conserved_outgoing = ((k + EPS) * ((q / incoming).cumsum(-2) + EPS)).sum(-1, keepdim=True) / position
    competition = conserved_outgoing.exp() / conserved_outgoing.exp().cumsum(-2) * position
    allocation = conserved_incoming.sigmoid()
    memory = (k[..., None] * (competition * value)[..., None, :]).cumsum(-3)
    return ((q / incoming / position)[..., None, :] @ memory).squeeze(-2) * allocation


AUTHORS = {"bidirectional": authors_bidirectional, "causal": authors_causal}


def linear(length: int, dim: int) -> int:
    return dim


@dataclass(frozen=True)
class Contestant:
    name: str
    call: Callable[[Tensor, Tensor, Tensor], Tensor]
    is_flow: bool = True
    # numbers stored per token and head, by length and head dim; a contestant that does not fit into memory is skipped
    footprint: Callable[[int, int], int] = linear


def contestants(kind: str, backends: list[str]) -> list[Contestant]:
    is_causal = kind == "causal"
    flow = {each: partial(flow_attention, is_causal=is_causal, variant=VARIANT, backend=each) for each in backends}
    footprint = {
        "reference": lambda length, dim: length,
        "authors": lambda length, dim: dim * dim if is_causal else dim,
    }
    return [
        *(Contestant(f"flow {name}", call, footprint=footprint.get(name, linear)) for name, call in flow.items()),
        Contestant("authors eager", AUTHORS[kind], footprint=footprint["authors"]),
        Contestant("authors compiled", torch.compile(AUTHORS[kind], dynamic=False), footprint=footprint["authors"]),
        Contestant("sdpa", partial(F.scaled_dot_product_attention, is_causal=is_causal), is_flow=False),
        Contestant("linear", partial(LinearAttention(), is_causal=is_causal), is_flow=False),
        *(fla_contestants() if is_causal and torch.cuda.is_available() else []),
    ]


def chosen(field: list[Contestant], names: list[str]) -> list[Contestant]:
    """The contestants whose names begin with one of these."""
    found = [each for each in field if each.name.startswith(tuple(names))]
    if not found:
        sys.exit(f"no contestant begins with {' or '.join(names)}; there are {', '.join(each.name for each in field)}.")
    return found


def fla_contestants() -> list[Contestant]:
    """flash-linear-attention's causal linear attention without a normaliser: much less work than Flow-Attention."""
    try:
        from fla.ops.linear_attn import (
            chunk_linear_attn,
            fused_chunk_linear_attn,
        )
    except ImportError:
        return []

    def by_tokens(function):
        # fla takes (B, N, H, D); inputs are transposed and made contiguous before the timing starts
        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (x.view(x.shape[0], x.shape[2], x.shape[1], x.shape[3]) for x in (q, k, v))
            return function(q, k, v, normalize=False)[0].view(q.shape[0], q.shape[2], q.shape[1], v.shape[3])

        return call

    return [
        Contestant("fla chunk", by_tokens(chunk_linear_attn), is_flow=False),
        Contestant("fla fused", by_tokens(fused_chunk_linear_attn), is_flow=False),
    ]


@dataclass(frozen=True)
class AttentionTiming:
    kind: str
    contestant: str
    shape: str
    forward_ms: float
    forward_p20: float
    forward_p80: float
    both_ms: float
    both_p20: float
    both_p80: float
    forward_tensors: float  # peak memory above the inputs, in tensors of the size of an input
    both_tensors: float  # likewise above the inputs and their gradients
    # on a GPU: time of the kernels replayed as a CUDA graph, their number, and the host time of a call
    forward_graph_ms: float = math.nan
    both_graph_ms: float = math.nan
    forward_launches: float = math.nan
    both_launches: float = math.nan
    forward_host_us: float = math.nan
    both_host_us: float = math.nan


class InputShape(NamedTuple):
    batch: int
    heads: int
    length: int
    dim: int

    @classmethod
    def parse(cls, text: str) -> InputShape:
        match = re.fullmatch(r"B(\d+)H(\d+)N(\d+)d(\d+)", text)
        if match is None:
            raise argparse.ArgumentTypeError(f"a shape looks like B2H8N4096d64, got {text!r}")
        return cls(*map(int, match.groups()))

    def __str__(self) -> str:
        return f"B{self.batch} H{self.heads} N{self.length} d{self.dim}"


def inputs(shape: tuple[int, ...], device: str, dtype: torch.dtype) -> list[Tensor]:
    return [torch.randn(shape, device=device, dtype=dtype) for _ in range(4)]


def forward(call, q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> None:
    with torch.no_grad():
        call(q, k, v)


def forward_backward(call, q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> None:
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    torch.autograd.grad(call(*leaves), leaves, grad)


def check(kind: str, field: list[Contestant], heads: int, dim: int, device: str, dtype: torch.dtype) -> None:
    """Compare values and gradients of every contestant that computes Flow-Attention with the reference.

    Exits if a contestant of this package is wrong.
    """
    *qkv, grad = inputs((1, heads, 257, dim), device, dtype)
    oracle = {"bidirectional": reference.bidirectional, "causal": lambda *x, **o: reference.causal(*x, **o)[0]}[kind]

    def run(call, *tensors):
        leaves = [x.detach().requires_grad_() for x in tensors]
        result = call(*leaves)
        return [result, *torch.autograd.grad(result, leaves, grad.to(result.dtype))]

    truth = run(lambda *x: oracle(*x, **VARIANT.as_options()), *(x.double() for x in qkv))
    tolerance = {torch.float64: 1e-10, torch.float32: 1e-4}.get(dtype, 2e-2)
    for contestant in field:
        if not contestant.is_flow:
            continue
        for name, value, true in zip(
            ("result", "query", "key", "value"), run(contestant.call, *qkv), truth, strict=True
        ):
            error = ((value.double() - true).norm() / true.norm()).item()
            if not error <= tolerance:
                wrong = f"{contestant.name}, {kind}: the {name} is off by {error:.1e}, allowed {tolerance:.0e}"
                if contestant.name.startswith("flow"):
                    sys.exit(wrong)
                # a rival that accumulates in its own dtype may be less accurate
                print(wrong, flush=True)


def measure(kind: str, field: list[Contestant], shape: InputShape, options) -> list[AttentionTiming]:
    dtype, device = getattr(torch, options.dtype), options.device
    size = shape.batch * shape.heads * shape.length * dtype.itemsize
    field = [each for each in field if size * each.footprint(shape.length, shape.dim) <= options.memory * 2**30 / 8]
    tensors = inputs(shape, device, dtype)
    peaks = {}
    for each in list(field):
        for step in (forward_backward, forward):
            step(each.call, *tensors)  # compiles
            took = milliseconds(partial(step, each.call, *tensors), device)
            if took > 1e3 * options.limit:
                print(f"{each.name} is left out: one run takes {took / 1e3:.0f} s", flush=True)
                field.remove(each)
                break
            peaks[each.name, step] = peak_bytes(partial(step, each.call, *tensors), device)
    if not field:
        print(f"{shape}: every contestant is left out; raise --memory or --limit", flush=True)
        return []
    runs = [(each, step) for each in field for step in (forward, forward_backward)]
    times: dict[tuple, list[float]] = {(each.name, step): [] for each, step in runs}
    started = time.perf_counter()
    while len(times[runs[0][0].name, forward]) < options.repeats:
        for each, step in runs:
            fresh = inputs(shape, device, dtype)
            times[each.name, step].append(milliseconds(partial(step, each.call, *fresh), device))
        done = len(times[runs[0][0].name, forward])
        if done >= 5 and time.perf_counter() - started > options.seconds:
            break
    tensor = tensors[0].nbytes
    rows = [
        AttentionTiming(
            kind,
            each.name,
            str(shape),
            *percentiles(times[each.name, forward]),
            *percentiles(times[each.name, forward_backward]),
            peaks[each.name, forward] / tensor,
            peaks[each.name, forward_backward] / tensor - 3,
            *(gpu_measurements(each, tensors, options.repeats) if device != "cpu" else ()),
        )
        for each in field
    ]
    return rows if device == "cpu" else [*rows, floor(kind, shape, tensors)]


def gpu_measurements(contestant: Contestant, tensors: list[Tensor], repeats: int) -> list[float]:
    """GPU time, number of kernels and host time of a call, for forward and forward+backward."""
    runs = [partial(step, contestant.call, *tensors) for step in (forward, forward_backward)]
    return [
        *(replay_milliseconds(contestant.name, run, repeats) for run in runs),
        *(float(launches(run)) for run in runs),
        *(host_microseconds(run, repeats) for run in runs),
    ]


def replay_milliseconds(name: str, run: Callable[[], object], repeats: int) -> float:
    """The time of a run replayed as a CUDA graph; NaN for a rival that cannot be captured."""
    try:
        return graph_milliseconds(run, repeats)
    except RuntimeError as error:
        if name.startswith("flow"):
            raise
        # a rival may synchronise, which cannot be captured in a graph
        print(f"{name} cannot be replayed as a graph: {str(error).splitlines()[0]}", flush=True)
        return math.nan


def floor(kind: str, shape: InputShape, tensors: list[Tensor]) -> AttentionTiming:
    """The time of reading Q, K, V and writing R once; backward reads those and dR, and writes three gradients."""
    source, target = (torch.empty(2**30, dtype=torch.uint8, device="cuda") for _ in range(2))
    copies = [milliseconds(lambda: target.copy_(source), "cuda") for _ in range(12)]
    transfer = statistics.median(copies[2:]) * tensors[0].nbytes / (2 * source.nbytes)
    forward, both = 4 * transfer, 11 * transfer
    return AttentionTiming(kind, "floor", str(shape), forward, forward, forward, both, both, both, 1.0, 1.0)


def decode(options) -> dict[str, float]:
    """Time of one token early and late in a sequence, and the error of 1,000 steps against one parallel call."""
    dtype, device = getattr(torch, options.dtype), options.device
    step = (*options.shapes[0][:2], 1, options.shapes[0].dim)
    states = {}
    for past in (10, 100_000):
        # the state is the same however the prompt is split; short pieces need less memory
        state = None
        for piece in range(0, past, 10_000):
            q, k, v, *_ = inputs((*step[:2], min(10_000, past - piece), step[3]), device, dtype)
            _, state = flow_attention_recurrent(q, k, v, state)
        states[past] = state
    q, k, v, *_ = inputs(step, device, dtype)
    times: dict[int, list[float]] = {past: [] for past in states}
    with torch.no_grad():
        for _ in range(500):
            for past, state in states.items():
                times[past].append(milliseconds(partial(flow_attention_recurrent, q, k, v, state), device))

        q, k, v, *_ = inputs((*step[:2], 1000, step[3]), device, dtype)
        whole, state, parts = flow_attention(q, k, v, is_causal=True), None, []
        for t in range(1000):
            part, state = flow_attention_recurrent(q[:, :, t : t + 1], k[:, :, t : t + 1], v[:, :, t : t + 1], state)
            parts.append(part)
    return {
        **{f"ms after {past:,} tokens": statistics.median(each) for past, each in times.items()},
        "largest difference of 1,000 steps from one run": (torch.cat(parts, 2) - whole).abs().max().item(),
    }


def table(rows: list[AttentionTiming]) -> str:
    head = f"{'':48}{'forward ms':12}{'':12}{'forward+backward ms':28}{'peak memory, in inputs':26}"
    lines = [head + ("graph ms           launches    host us" if rows[0].forward_launches > 0 else "")]
    for row in rows:
        lines.append(
            f"{row.kind:14} {row.shape:20} {row.contestant:16}"
            f"{row.forward_ms:8.2f} ({row.forward_p20:.2f}–{row.forward_p80:.2f})".ljust(72)
            + f"{row.both_ms:8.2f} ({row.both_p20:.2f}–{row.both_p80:.2f})".ljust(28)
            + f"{row.forward_tensors:8.2f} {row.both_tensors:8.2f}".ljust(26)
            + (
                f"{row.forward_graph_ms:.3f} / {row.both_graph_ms:.3f}".ljust(19)
                + f"{row.forward_launches:.0f} / {row.both_launches:.0f}".ljust(12)
                + f"{row.forward_host_us:.0f} / {row.both_host_us:.0f}"
                if row.forward_launches > 0
                else ""
            )
        )
    return "\n".join(lines)


def speedups(rows: list[AttentionTiming], backend: str) -> str:
    """One line: how many times as fast as each other contestant the first backend is, forward+backward."""
    ours, *others = sorted(rows, key=lambda row: row.contestant != f"flow {backend}")
    times = ", ".join(f"{other.both_ms / ours.both_ms:.2f}× as fast as {other.contestant}" for other in others)
    return f"{ours.kind}, {ours.shape}, forward+backward: {ours.contestant} is {times}"


def parse(arguments: list[str] | None = None):
    parser = argparse.ArgumentParser(
        "flowformer bench attention", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    has_cuda = torch.cuda.is_available()
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if has_cuda else "cpu")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16" if has_cuda else "float32")
    shapes = list(map(InputShape.parse, SHAPES[has_cuda]))
    parser.add_argument("--shapes", type=InputShape.parse, nargs="+", default=shapes)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--backends", nargs="+", default=["triton", "torch"] if has_cuda else ["torch", "reference"])
    parser.add_argument("--contestants", nargs="+", metavar="NAME", help="only these, by how their names begin")
    parser.add_argument("--repeats", type=int, default=25, help="times each contestant runs at each length")
    parser.add_argument("--seconds", type=float, default=60, help="after which a length ends with at least 5 repeats")
    parser.add_argument("--limit", type=float, default=10, help="seconds; what takes more for one run is left out")
    parser.add_argument("--memory", type=float, default=16, help="GiB; what would need more is left out")
    parser.add_argument("--csv", type=Path, help="where to write the table")
    options = parser.parse_args(arguments)
    if options.repeats < 1:
        parser.error(f"--repeats must be at least 1, got {options.repeats}.")
    return options


def main(arguments: list[str] | None = None) -> list[AttentionTiming]:
    options = parse(arguments)
    facts = machine(options.device, options.dtype)
    print(", ".join(f"{name} {value}" for name, value in facts.items()))
    rows = []
    with csv_file(options.csv, AttentionTiming, facts) as write:
        for kind in options.kinds:
            field = contestants(kind, options.backends)
            if options.contestants:
                field = chosen(field, options.contestants)
            for shape in options.shapes:
                torch.compiler.reset()
                check(kind, field, shape.heads, shape.dim, options.device, getattr(torch, options.dtype))
                measured = measure(kind, field, shape, options)
                for row in measured:
                    write(row)
                if measured:
                    print(table(measured), speedups(measured, options.backends[0]), sep="\n", flush=True)
                rows += measured
    for name, value in decode(options).items():
        print(f"decode: {name}: {value:.3g}")
    return rows


if __name__ == "__main__":
    main()
