"""The paper's efficiency table: steps per second of one model with every attention, all in one run.

    flowformer bench lra --out speed.csv --plot speed.png       # 1K to 4K tokens, batch 32
    flowformer bench lra --attentions flow softmax --lengths 256 512 --batch 2

The paper does not state task, batch and model of its table. Here the model is the byte-level text model that rivals
have in the Long-Range Arena: four layers, four heads, width 256 (the Flowformer of `lra/text` has only one layer). Only
the attention differs. Sequences have full length, so no mask is needed, and softmax attention can use its fastest path.
A training step is a forward pass, a backward pass and an AdamW update.

First, scores and gradients of every attention, on this device and in this dtype, are checked against float64 on the
CPU. Then each cell reports median steps per second with the 20th and 80th percentiles, peak memory above model and
optimiser, the ratio to softmax attention, and the paper's ratio. OOM marks a batch that does not fit, with the largest
one that does, found by halving. Rows are written as they are measured.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import baselines
from .._utils import suggestion
from ..models.classifier import PRESETS, FlowformerClassifier
from ..ops.variant import ABLATIONS
from ..train import claims
from ..train.paper import OOM, paper_speed, paper_speed_ratio
from .measure import csv_file, is_out_of_memory, limited_memory, machine, milliseconds, peak_bytes, percentiles

MODEL = replace(PRESETS["text"], num_layers=4, mask_padding=False)
MODES = ("inference", "training")
CHECKED_LENGTH = 256
# how far scores and gradients may be from float64; in bfloat16 Reformer's tokens change buckets
TOLERANCE = {"float32": (1e-3, 2e-2), "bfloat16": (0.1, 0.5)}


@dataclass(frozen=True)
class SpeedCell:
    attention: str
    length: int
    mode: str
    batch: int
    status: str  # "ok", "OOM", or "failed: " and the error
    steps_per_second: float | None = None
    p20: float | None = None
    p80: float | None = None
    peak_mib: float | None = None
    largest_batch: int | None = None  # that fits, found by halving
    ratio: float | None = None  # to softmax attention in the same mode and at the same length
    paper_steps_per_second: float | str | None = None
    paper_ratio: float | None = None


def attentions() -> list[str]:
    """Flow-Attention and every rival that can classify, softmax attention first: the others are compared with it."""
    rivals = [name for name in baselines.names() if baselines.get(name).bidirectional]
    return sorted(["flow", *rivals], key=lambda name: (name != "softmax", name != "flow"))


def attention(name: str) -> str:
    accepted = [*attentions(), *ABLATIONS]
    if name in accepted:
        return name
    if name in baselines.names():
        raise argparse.ArgumentTypeError(f"{name} attention is causal only, and this model is not.")
    raise argparse.ArgumentTypeError(
        f"unknown attention {name!r}{suggestion(name, accepted)}; accepted: {', '.join(accepted)}."
    )


def build(name: str, length: int, options) -> nn.Module:
    torch.manual_seed(0)
    # dropout on the weights of softmax attention would keep it from torch's fused kernel on a CPU
    config = replace(MODEL, max_length=length, attention=name, attention_dropout=0.0)
    return FlowformerClassifier(config).to(options.device)


def batch(size: int, length: int, device: str) -> tuple[Tensor, Tensor]:
    """Tokens without padding, (B, N), and their classes, (B,)."""
    tokens = torch.randint(1, MODEL.vocab_size, (size, length), device=device)
    return tokens, torch.randint(MODEL.num_classes, (size,), device=device)


def autocast(options):
    return torch.autocast(options.device, torch.bfloat16, enabled=options.dtype == "bfloat16")


def compiled(model: nn.Module, options) -> Callable[[Tensor], Tensor]:
    if not options.compile:
        return model
    torch.compiler.reset()  # models of other lengths would count towards the recompilation limit
    return torch.compile(model, dynamic=False)


def check(name: str, options) -> str | None:
    """A message if scores or gradients of an attention differ from float64 on the CPU, else None."""
    model = build(name, CHECKED_LENGTH, options).eval()
    exact = copy.deepcopy(model).cpu().double()
    tokens, classes = batch(2, CHECKED_LENGTH, "cpu")

    def run(model: nn.Module, call: Callable[[Tensor], Tensor], device: str, precision) -> tuple[Tensor, Tensor]:
        with precision:
            scores = call(tokens.to(device))
            loss = F.cross_entropy(scores, classes.to(device))
        loss.backward()
        gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        return scores.detach().double().cpu(), torch.cat(gradients).double().cpu()

    truth = run(exact, exact, "cpu", nullcontext())
    found = run(model, compiled(model, options), options.device, autocast(options))
    for what, value, true, allowed in zip(("scores", "gradients"), found, truth, TOLERANCE[options.dtype], strict=True):
        error = ((value - true).norm() / true.norm()).item()
        if not error <= allowed:
            return f"the {what} are off by {error:.1e}, allowed {allowed:.0e}"
    return None


def steps(model: nn.Module, options) -> dict[str, Callable[[Tensor, Tensor], None]]:
    """By mode, a function that runs one step on a batch."""
    call = compiled(model, options)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def inference(tokens: Tensor, classes: Tensor) -> None:
        with torch.no_grad(), autocast(options):
            call(tokens)

    def training(tokens: Tensor, classes: Tensor) -> None:
        with autocast(options):
            loss = F.cross_entropy(call(tokens), classes)
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()

    return {"inference": inference, "training": training}


def once(step: Callable[[Tensor, Tensor], None], size: int, length: int, options) -> None:
    step(*batch(size, length, options.device))


def measure(step: Callable[[Tensor, Tensor], None], size: int, length: int, options) -> dict[str, Any]:
    """Speed and peak memory of a step. The first one, which compiles and allocates, is not timed."""
    run = partial(step, *batch(size, length, options.device))
    run()
    peak = peak_bytes(run, options.device)
    times: list[float] = []
    start = time.perf_counter()
    # slow steps are repeated fewer times
    while (
        len(times) < 2
        or (elapsed := time.perf_counter() - start) < options.seconds
        or (len(times) < 5 and elapsed < 5 * options.seconds)
    ):
        times.append(milliseconds(run, options.device))
    median, fast, slow = (1e3 / each for each in percentiles(times))
    return {"steps_per_second": median, "p20": slow, "p80": fast, "peak_mib": peak / 2**20}


def attempt(call: Callable[[], Any], device: str) -> tuple[str, Any]:
    """("ok", result), or the status of a failure and None; frees the memory of a failed attempt."""
    try:
        return "ok", call()
    except Exception as error:  # a failing attention must not stop the others
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        status = OOM if is_out_of_memory(error) else f"failed: {reason}"
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
    return status, None


def cells(name: str, length: int, options) -> Iterator[SpeedCell]:
    """The rows of one attention at one length, without ratios."""
    status, model = attempt(partial(build, name, length, options), options.device)
    mode_steps = {} if model is None else steps(model, options)
    for mode in MODES:
        found, size = None, 0
        if model is not None:
            model.train(mode == "training")
            step = mode_steps[mode]
            status, found = attempt(partial(measure, step, options.batch, length, options), options.device)
            size = options.batch
            while status == OOM and (size := size // 2):
                model.zero_grad()  # some gradients may have been computed before memory ran out
                if attempt(partial(once, step, size, length, options), options.device)[0] == "ok":
                    break
        largest = size if status in ("ok", OOM) else None
        yield SpeedCell(name, length, mode, options.batch, status, largest_batch=largest, **found or {})


def run(options) -> Iterator[SpeedCell]:
    """All rows, ordered by length, so that rows to be compared are measured close together."""
    for length in options.lengths:
        softmax: dict[str, float | None] = {}
        for name in sorted(options.attentions, key=lambda name: name != "softmax"):
            for row in cells(name, length, options):
                if name == "softmax":
                    softmax[row.mode] = row.steps_per_second
                speed, softmax_speed = row.steps_per_second, softmax.get(row.mode)
                yield replace(
                    row,
                    ratio=speed / softmax_speed if speed and softmax_speed else None,
                    paper_steps_per_second=paper_speed(name, row.mode, length),
                    paper_ratio=paper_speed_ratio(name, row.mode, length),
                )


def progress(row: SpeedCell) -> str:
    prefix = f"{row.length:,} tokens, {row.attention}, {row.mode}: "
    if row.status == "ok":
        return (
            f"{prefix}{row.steps_per_second:.2f} steps/s ({row.p20:.2f}–{row.p80:.2f}), {row.peak_mib:,.0f} MiB at most"
        )
    return f"{prefix}{row.status}" + (f", fits with batch {row.largest_batch}" if row.largest_batch else "")


def table(rows: list[SpeedCell]) -> str:
    """One table per mode: attentions in rows, lengths in columns."""
    lengths, names = (list(dict.fromkeys(getattr(row, key) for row in rows)) for key in ("length", "attention"))
    found = {(row.mode, row.attention, row.length): row for row in rows}

    def cell(row: SpeedCell) -> str:
        ratio, paper = ("-" if each is None else f"{each:.2f}" for each in (row.ratio, row.paper_ratio))
        if row.paper_steps_per_second == OOM:
            paper = OOM
        if row.status == "ok":
            return f"{row.steps_per_second:8.2f} {ratio:>6} {paper:>6}"
        fits = f"(B{row.largest_batch})" if row.status == OOM else "-"
        return f"{row.status.partition(':')[0]:>8} {fits:>6} {paper:>6}"

    lines = ["Steps per second, times softmax attention, times the Transformer in the paper; (B…): the batch that fits"]
    for mode in MODES:
        lines.append(f"{mode:20}" + "".join(f"{f'{length:,} tokens':>24}" for length in lengths))
        for name in names:
            lines.append(f"{name:20}" + "".join(f"  {cell(found[mode, name, length])}" for length in lengths))
    return "\n".join(lines)


def parse(arguments: list[str] | None = None):
    parser = argparse.ArgumentParser(
        "flowformer bench lra", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    has_cuda = torch.cuda.is_available()
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if has_cuda else "cpu")
    parser.add_argument("--dtype", choices=TOLERANCE, help="bfloat16 is autocast, the default on a GPU")
    parser.add_argument("--compile", action="store_true", help="compile the models; each takes its time")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 3072, 4096])
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--attentions", type=attention, nargs="+", default=attentions(), metavar="NAME")
    parser.add_argument(
        "--seconds", type=float, default=1.0, help="how long a cell is timed; five slow steps may take five times that"
    )
    parser.add_argument(
        "--memory-limit",
        type=float,
        metavar="GIB",
        help="what needs more is out of memory; default all of a GPU, four fifths of what a CPU has free",
    )
    parser.add_argument("--out", type=Path, help="where to write the rows, a CSV")
    parser.add_argument("--plot", type=Path, help="where to draw them, a PNG; needs --out")
    parser.add_argument("--json", action="store_true", help="print JSON for a script instead of the table")
    options = parser.parse_args(arguments)
    if options.plot and not options.out:
        parser.error("--plot draws what --out has written: pass both.")
    if min(options.batch, *options.lengths) < 1:
        parser.error(f"--batch and --lengths must be positive, got {options.batch} and {options.lengths}.")
    options.dtype = options.dtype or ("bfloat16" if options.device == "cuda" else "float32")
    return options


def main(arguments: list[str] | None = None) -> list[SpeedCell]:
    options = parse(arguments)
    if options.out is None or not claims.is_queued():
        return _main(options)
    with claims.claimed(options.out.parent):
        return _main(options)


def _main(options: argparse.Namespace) -> list[SpeedCell]:
    if options.plot:
        from ..viz import speed_bars  # imported before the timing, since matplotlib may be missing
    say = partial(print, file=sys.stderr, flush=True)
    facts = {**machine(options.device, options.dtype), "compiled": str(options.compile)}
    say(", ".join(f"{name} {value}" for name, value in facts.items()))
    wrong = {}
    for name in options.attentions:
        status, reason = attempt(partial(check, name, options), options.device)
        if status != "ok" or reason:
            wrong[name] = reason or status
            say(f"{name} is left out: {wrong[name]}")
    options.attentions = [name for name in options.attentions if name not in wrong]
    rows = []
    with limited_memory(options.device, options.memory_limit), csv_file(options.out, SpeedCell, facts) as write:
        for row in run(options):
            rows.append(row)
            write(row)
            say(progress(row))
    print(json.dumps({"machine": facts, "rows": [asdict(row) for row in rows]}) if options.json else table(rows))
    if options.plot and rows:
        speed_bars(options.out).savefig(options.plot, dpi=110)
    failed = {**wrong, **{row.attention: row.status for row in rows if row.status not in ("ok", OOM)}}
    if failed:
        sys.exit("; ".join(f"{name}: {reason}" for name, reason in failed.items()))
    return rows


if __name__ == "__main__":
    main()
