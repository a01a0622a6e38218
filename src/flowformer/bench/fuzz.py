"""Random calls of Flow-Attention against the float64 reference: `flowformer bench fuzz`.

Needs only torch, and Triton for the kernels; run as `python -m flowformer.bench.fuzz`, it works without the packages of
the command line. On a CPU the kernels run in Triton's interpreter, with short sequences.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import multiprocessing
import os
import shlex
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from random import Random
from typing import IO, Any

import torch

from .._utils import suggestion
from ..ops.backends import BACKENDS
from .fuzz_cases import LIMITS, Case, draw_case, draw_configuration
from .fuzz_checks import check

FAILURES = ("fail", "died", "hang")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the fuzzer. Returns: the exit status, 1 if a case failed."""
    options = _parse(arguments)
    if options.device == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")  # must be set before Triton is imported
    if options.case is not None:
        record = check(Case.from_json(options.case), options.device)
        print(record.pop("traceback", ""), end="")
        print(json.dumps(record, indent=2))
        return int(record["verdict"] in FAILURES)
    with contextlib.ExitStack() as stack:
        out = stack.enter_context(options.out.open("a")) if options.out else None
        summary = Summary(options.device, out)
        drawn = draw(options.seed, options.device, options.backends, options.shapes)
        with contextlib.suppress(KeyboardInterrupt):
            _run(drawn, options, summary)
    summary.print()
    return int(summary.failures > 0)


def draw(seed: int, device: str, backends: Sequence[str], shapes: int) -> Iterator[list[Case]]:
    """Yield lists of cases without end, each of one configuration, determined by the arguments alone."""
    index = 0
    while True:
        random = Random(f"{seed}, {index}")
        backend = backends[index % len(backends)]
        limits = LIMITS["interpreter" if device == "cpu" and backend == "triton" else device]
        configuration = draw_configuration(random, backend, limits)
        yield [draw_case(random, configuration, limits) for _ in range(shapes)]
        index += 1


class Summary:
    """The counts of verdicts and the largest errors; also writes one line per case to a file, if given."""

    def __init__(self, device: str, out: IO[str] | None) -> None:
        self.device, self.out, self.start = device, out, time.monotonic()
        self.verdicts: Counter[tuple[str, str, str]] = Counter()
        self.worst: dict[tuple[str, str, str], tuple[float, str]] = {}
        self.cases = self.failures = 0
        self.reported = self.start

    def add(self, record: dict[str, Any]) -> None:
        self.cases += 1
        self.verdicts[record["backend"], record["kind"], record["verdict"]] += 1
        for name, error in record.get("errors", {}).items():
            key = record["backend"], json.loads(record["case"])["dtype"], name
            largest, _ = self.worst.get(key, (-1.0, ""))
            if not (math.isnan(largest) or error["ratio"] <= largest):  # NaN is worse than every number
                self.worst[key] = error["ratio"], record["case"]
        if record["verdict"] in FAILURES:
            self.failures += 1
            print(f"{record['verdict']}: {record['why']}\n  {self.command(record['case'])}", flush=True)
        if self.out is not None:
            self.out.write(json.dumps(record) + "\n")
            self.out.flush()

    def command(self, case: str) -> str:
        return f"flowformer bench fuzz --device {self.device} --case {shlex.quote(case)}"

    def progress(self, cases: int, end: float) -> None:
        now = time.monotonic()
        if now - self.reported >= 10 and self.cases:
            self.reported = now
            speed = self.cases / (now - self.start)
            left = min(end - now, (cases - self.cases) / speed)
            line = f"{self.cases} cases, {self.failures} failed, {speed:.1f} cases/s, {left:.0f} s left"
            print(line, file=sys.stderr, flush=True)

    def print(self) -> None:
        print(f"{self.cases} cases in {time.monotonic() - self.start:.0f} s, {self.failures} failed")
        for (backend, kind, verdict), count in sorted(self.verdicts.items()):
            print(f"  {backend:8} {kind:14} {verdict:8} {count}")
        print("largest error / allowed error:")
        for (backend, dtype, name), (ratio, case) in sorted(self.worst.items()):
            print(f"  {backend:8} {dtype:9} {name:9} {ratio:.3g}  {case}")


class Worker:
    """A child process that checks one case after another, so that a case that crashes does not end the run."""

    def __init__(self, device: str) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, other = context.Pipe()
        self.process = context.Process(target=_work, args=(other, device), daemon=True)
        self.process.start()
        other.close()
        self.queue: deque[Case] = deque()
        self.case: Case | None = None
        self.since = 0.0

    def next(self) -> None:
        """Send the next case of the queue to the process."""
        self.case, self.since = self.queue.popleft(), time.monotonic()
        self.connection.send(self.case.to_json())

    def stop(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()


def _work(connection: Connection, device: str) -> None:
    torch.set_num_threads(1)
    while True:
        record = check(Case.from_json(connection.recv()), device)
        lost = device == "cuda" and "traceback" in record and _context_is_lost()
        connection.send((record, lost))
        if lost:
            return


def _context_is_lost() -> bool:
    """Whether the CUDA context is lost: after an error such as an illegal address every further call fails."""
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def _run(drawn: Iterator[list[Case]], options: argparse.Namespace, summary: Summary) -> None:
    end = time.monotonic() + options.seconds
    started = 0
    workers: list[Worker] = []

    def start_next(worker: Worker) -> None:
        nonlocal started
        if started >= options.cases or time.monotonic() >= end:
            worker.case = None
            return
        if not worker.queue:
            worker.queue.extend(next(drawn))
        worker.next()
        started += 1

    try:
        for _ in range(options.workers):
            workers.append(Worker(options.device))
            start_next(workers[-1])
        while any(worker.case for worker in workers) and time.monotonic() < end:
            summary.progress(options.cases, end)
            ready = wait([worker.connection for worker in workers if worker.case], timeout=1)
            for index, worker in enumerate(workers):
                if worker.case is None:
                    continue
                verdict, why = None, ""
                if worker.connection in ready:
                    try:
                        record, lost = worker.connection.recv()
                        summary.add(record)
                        if not lost:
                            start_next(worker)
                            continue
                    except (EOFError, ConnectionError):
                        worker.process.join(5)
                        verdict, why = "died", f"the process ended with status {worker.process.exitcode}"
                elif time.monotonic() - worker.since > options.limit:
                    verdict, why = "hang", f"not done after {options.limit:g} s"
                else:
                    continue
                if verdict is not None:
                    case = worker.case
                    summary.add(
                        {
                            "case": case.to_json(),
                            "kind": case.kind,
                            "backend": case.backend,
                            "verdict": verdict,
                            "why": why,
                            "seconds": round(time.monotonic() - worker.since, 3),
                        }
                    )
                worker.stop()
                workers[index] = Worker(options.device)
                workers[index].queue = worker.queue
                start_next(workers[index])
    finally:
        for worker in workers:
            worker.stop()


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "flowformer bench fuzz", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cuda", "cpu"])
    parser.add_argument(
        "--backends",
        type=lambda text: text.split(","),
        default=["triton", "torch"],
        help="which to call, separated by commas; default triton,torch",
    )
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this time")
    parser.add_argument("--cases", type=int, default=1000, help="stop after this many cases")
    parser.add_argument("--seed", type=int, default=0, help="of the cases: the same seed draws the same ones")
    parser.add_argument("--shapes", type=int, default=12, help="cases of each compiled configuration")
    parser.add_argument("--workers", type=int, default=1, help="processes side by side")
    parser.add_argument("--limit", type=float, default=300, help="seconds after which a case counts as hanging")
    parser.add_argument("--out", type=Path, help="append a JSON line for each case to this file")
    parser.add_argument("--case", help="run this case alone, as a failure prints it")
    options = parser.parse_args(arguments)
    for name in options.backends:
        if name not in BACKENDS:
            parser.error(f"unknown backend {name!r}{suggestion(name, BACKENDS)}; accepted: {', '.join(BACKENDS)}.")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda needs a GPU, and torch finds none; --device cpu runs kernels in the interpreter.")
    return options


if __name__ == "__main__":
    sys.exit(main())
