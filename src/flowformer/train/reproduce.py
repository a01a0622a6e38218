"""A queue that runs the tables of the paper; its only state is the folders of its runs.

A run is a command, `flowformer train` or `flowformer fit`, in a folder named after its config. A finished run has a
result.json, a running one a claim with a heartbeat. Every other run is pending, and starts from its newest checkpoint
if there is one. A queue can therefore be stopped and restarted, and any number of processes can share its folder.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import torch

from .. import data
from .._utils import check_positive, cores, suggestion, write_atomically
from . import checkpoints, claims, tables
from .benchmark import options_of
from .loop import Interrupted, stop_requests
from .methods.config import METHODS
from .record import CONFIG, RESULT
from .record import LOG as RECORDS
from .results import BENCHMARK, Identity, Row, identity, planned_identity, same_experiment
from .speeds import SPEED
from .tables import Cell

LOG = "worker.log"
ERROR = "error.txt"
MIN_FREE_BYTES = 256 * 2**20  # disk space for a few checkpoints
_POLL = 0.2  # seconds between checks of the running jobs
_START = 20.0  # seconds that a run takes to start; with less time left, no run is started
# packages that tasks, data sets and methods need
_PACKAGES = {
    "decision": ("gymnasium", "mujoco", "h5py"),
    "images": ("timm", "PIL"),
    "lra/pathfinder": ("PIL",),
    **dict.fromkeys(METHODS["series"], ("aeon",)),
    "xgboost": ("aeon", "xgboost"),
}
_TAIL = 4096  # bytes at the end of a log that hold its last record
_NO_SPACE = "No space left on device"
Say = Callable[[str], None]
Watch = Callable[[dict[str, float], int, int], None]


@dataclass(frozen=True)
class Job:
    """A run of a cell with a seed, or the speed benchmark.

    Args:
        name: name of the cell.
        folder: folder of the run.
        command: arguments of `flowformer`.
        done: file that exists once the job is finished.
        minutes: approximate duration.
        paper: the paper's score; None if it has none, or the run is another experiment.
        alone: whether no other job may run at the same time, as for a benchmark.
        blocked: message that names the missing package or data; None if the job can run.
        is_known: whether a table of results contains the run, so that the job is done.
    """

    name: str
    seed: int
    folder: Path
    command: tuple[str, ...]
    done: Path
    minutes: float
    paper: float | None = None
    alone: bool = False
    blocked: str | None = None
    is_known: bool = False

    @property
    def is_done(self) -> bool:
        return self.is_known or self.done.exists()

    @property
    def label(self) -> str:
        return f"{self.name}, seed {self.seed}"

    def state(self) -> str:
        """The state in words: "done", "running on …", "missing …", "failed: …", or "to do" with its checkpoint."""
        if self.is_done:
            return "done"
        owner = claims.owner(self.folder)
        if owner is not None:
            return f"running on {owner['host']}, process {owner['pid']}"
        if self.blocked is not None:
            return self.blocked
        if (self.folder / ERROR).exists():
            return f"failed: {(self.folder / ERROR).read_text(encoding='utf-8').strip()}"
        checkpoint = checkpoints.latest(self.folder / "checkpoints")
        return "to do" if checkpoint is None else f"to do from {checkpoint.name}"


def jobs(
    table: str,
    out: Path,
    *,
    cells: Sequence[str] = (),
    seeds: int | None = None,
    overrides: Sequence[str] = (),
    data_dir: Path | None = None,
    finished: Iterable[Row] = (),
) -> list[Job]:
    """The runs of a table, in the order in which to start them: the first seed of every cell, then the second.

    Args:
        table: one of `tables.TABLES`, or "all".
        out: the folder of the queue.
        cells: patterns such as "*JapaneseVowels*" or "lra/text/*"; a cell must match one of them, if there are any.
        seeds: number of seeds of each cell; None for the number that the table has.
        overrides: key=value each, applied to every recipe; results are labelled with them. With preset=benchmark, only
            cells are run that the Long-Range Arena has.
        data_dir: the folder of all data sets.
        finished: rows of finished runs, on this or another machine, which do not run again.
    """
    for assignment in overrides:
        if assignment.partition("=")[0] in ("seed", "attention", "model.attention"):
            raise ValueError(
                f"{assignment!r} would make different cells the same run; leave it out. Choose cells by their names, "
                "and how many runs each has by seeds."
            )
    chosen = [cell for each in tables.select(table) for cell in each.cells()]
    if not chosen and (overrides or seeds):
        raise ValueError(f"{table} is a benchmark, which takes no overrides and no seeds; leave them out.")
    speed = [_speed(out)] if table in ("speed", tables.ALL) else []
    known = [*dict.fromkeys(cell.name for cell in chosen), *(job.name for job in speed)]
    for pattern in cells:
        if not any(_matches(name, [pattern]) for name in known):
            raise ValueError(
                f"no cell of {table} matches {pattern!r}{suggestion(pattern, known)}; accepted: a name or a pattern, "
                f"such as '*/flow'. flowformer reproduce {table} --list shows the {len(known)} names."
            )
    finished_runs = {identity(row) for row in finished}
    prioritised = [
        (seed, _priority(cell), _job(cell, seed, out, overrides, data_dir, finished_runs))
        for cell in chosen
        if _matches(cell.name, cells) and (BENCHMARK not in overrides or cell.method.name in options_of(cell.recipe))
        for seed in range(seeds or cell.seeds)
    ]
    if BENCHMARK in overrides and not prioritised:
        raise ValueError(f"none of these cells has {BENCHMARK}, which the rivals of the Long-Range Arena have.")
    unique: dict[Path, Job] = {}
    for _, _, job in sorted(prioritised, key=lambda each: each[:2]):
        unique.setdefault(job.folder, job)  # a run of two tables is started with the first of them
    return [*unique.values(), *(job for job in speed if _matches(job.name, cells))]


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return not patterns or any(fnmatch(name, pattern) for pattern in patterns)


def _priority(cell: Cell) -> int:
    name = cell.method.name
    return tables.PRIORITY.index(name) if name in tables.PRIORITY else len(tables.PRIORITY)


def _job(
    cell: Cell,
    seed: int,
    out: Path,
    overrides: Sequence[str],
    data_dir: Path | None,
    finished_runs: Collection[Identity],
) -> Job:
    recipe, method = cell.recipe, cell.method.name
    assignments = cell.assignments(overrides)
    config = cell.config(seed, overrides)
    folder = out / config.name
    blocked = _missing_package(config.task, config.data, method) or _missing_data(
        config.data, json.dumps(config.data_options), data_dir
    )
    if cell.is_attention:
        arguments = ["train", recipe, f"attention={method}", f"seed={seed}", *assignments, "--resume"]
    else:
        arguments = ["fit", recipe, method, *assignments, "--seed", str(seed)]
    if data_dir is not None:
        arguments += ["--data", str(data_dir)]
    command = (*arguments, "--out", str(folder), "--json")
    planned = planned_identity(config)
    minutes, paper = cell.minutes, cell.paper() if same_experiment(planned.overrides) else None
    is_known = planned in finished_runs
    return Job(cell.name, seed, folder, command, folder / RESULT, minutes, paper, blocked=blocked, is_known=is_known)


def _missing_package(*needing: str) -> str | None:
    """A message that names the packages that are not installed but needed, or None.

    Args:
        needing: names of a task, a data set and a method.
    """
    packages = dict.fromkeys(package for name in needing for package in _PACKAGES.get(name, ()))
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    return f"missing package: {', '.join(missing)}" if missing else None


@cache
def _missing_data(name: str, options: str, data_dir: Path | None) -> str | None:
    """A message that names the missing data, or None. The options are JSON, since a cache needs hashable arguments."""
    source = data.missing(name, data_dir, **json.loads(options))
    return None if source is None else f"missing data: {source.name}"


def _speed(out: Path) -> Job:
    folder = out / "speed"
    command = ("bench", "lra", "--out", str(folder / f".{SPEED}"))
    return Job("speed/lra", 0, folder, command, folder / SPEED, 10, alone=True)


@dataclass
class Queue:
    """Runs jobs in parallel until they are done or the time is over.

    Args:
        jobs: the jobs, in the order in which to start them.
        out: the folder of the queue.
        pack: number of jobs that run at the same time.
        minutes: time limit, by which all jobs have stopped, with a checkpoint if they are trained; None for no limit.
        begun: start of the time limit by `time.monotonic`; None for the start of `run`.
        say: called with a line for each event.
        watch: called several times a second with the label of each running job and the share of it that is done, and
            the numbers of finished jobs and of all that this call found to do.

    Attributes: `failed`, the error message of each failed job by its label; `stopped`, why the queue stopped before its
    jobs were done, or None.
    """

    jobs: list[Job]
    out: Path
    pack: int
    minutes: float | None = None
    begun: float | None = None
    say: Say = print
    watch: Watch | None = None
    failed: dict[str, str] = field(default_factory=dict)
    stopped: str | None = None
    _running: dict[subprocess.Popen, Job] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_positive(pack=self.pack)
        if self.minutes is not None and not self.minutes > 0:
            raise ValueError(f"minutes must be more than 0, got {self.minutes}.")

    def run(self) -> None:
        """Run all jobs.

        After Ctrl-C or SIGTERM, wait for the checkpoints of running jobs and raise `Interrupted`. A second Ctrl-C ends
        the wait; the jobs still write their checkpoints.
        """
        begun = time.monotonic() if self.begun is None else self.begun
        limit = float("inf") if self.minutes is None else begun + 60 * self.minutes
        # jobs finish their current update or evaluation before they write a checkpoint
        stop_at = limit if self.minutes is None else limit - min(60.0, 15 * self.minutes)
        for job in self.jobs:
            if job.done.exists() and claims.owner(job.folder) is None:
                _delete_checkpoints(job)
        todo = [job for job in self.jobs if job.blocked is None and not job.is_done]
        waiting = deque(todo)
        self.say(f"{len(waiting)} of {len(self.jobs)} runs to do, {self.pack} side by side, in {self.out}")
        with stop_requests() as interrupted:
            try:
                while waiting or self._running:
                    self._reap(waiting)
                    if self.stopped is None:
                        self.stopped = self._reason_to_stop(interrupted, stop_at)
                    if self.stopped is not None or not self._start(waiting, stop_at):
                        break
                    if self.watch is not None:
                        shares = {job.label: share_done(job.folder) for job in self._running.values()}
                        self.watch(shares, sum(job.is_done for job in todo), len(todo))
                    time.sleep(_POLL)
            finally:
                self._stop(limit)
        if interrupted():
            raise Interrupted("stopped; run the same command to resume.")

    def _reason_to_stop(self, interrupted: Callable[[], bool], stop_at: float) -> str | None:
        if interrupted():
            return "it was asked to"
        if time.monotonic() >= stop_at:
            return f"the {self.minutes:g} minutes are over"
        if any(_NO_SPACE in message for message in self.failed.values()):
            return f"the disk of {self.out} is full; free some space"
        return None

    def _start(self, waiting: deque[Job], stop_at: float) -> bool:
        """Start jobs until `pack` are running. Return False if there is no job left to start or to wait for."""
        others = []  # jobs that other processes have claimed, and their owners
        while waiting and len(self._running) < self.pack and time.monotonic() + _START < stop_at:
            job = waiting[0]
            if self._running and (job.alone or any(each.alone for each in self._running.values())):
                break
            waiting.popleft()
            if job.done.exists():
                continue
            self._check_space()
            owner = claims.reserve(job.folder)
            if owner is not None:
                others.append((job, owner))
            elif job.done.exists():  # another machine finished it just now
                claims.unreserve(job.folder)
            else:
                self._launch(job)
        waiting.extend(job for job, _ in others)
        if self._running:
            return True
        if not waiting:
            return False
        if not others:
            self.stopped = f"the {self.minutes:g} minutes are nearly over"
            return False
        # wait for claims of this machine and for those that may be about to expire; another machine may take hours
        soon = [owner for _, owner in others if owner["here"] or owner["silent"] > 3 * claims.HEARTBEAT]
        if others and not soon:
            hosts = ", ".join(sorted({owner["host"] for _, owner in others}))
            self.stopped = f"the last {len(others)} are run by {hosts}"
        return bool(soon)

    def _check_space(self) -> None:
        """Raise if the disk has no space for checkpoints; first, since a full disk does not even take a reservation."""
        free = shutil.disk_usage(self.out).free
        if free < MIN_FREE_BYTES:
            self.stopped = f"the disk of {self.out} is full"  # so that runs that stop early have not failed
            raise OSError(
                f"the disk of {self.out} has {free / 2**20:.0f} MiB left, too little for checkpoints. Free some space; "
                "then run the same command to resume: nothing that was finished is lost."
            )

    def _launch(self, job: Job) -> None:
        (job.folder / ERROR).unlink(missing_ok=True)
        threads = str(max(1, cores() // self.pack))
        with (job.folder / LOG).open("w") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "flowformer.cli", *job.command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # a dumb terminal, so that FORCE_COLOR adds no escape sequences to the log
                env={"OMP_NUM_THREADS": threads, **os.environ, "TERM": "dumb", claims.PARENT: str(os.getpid())},
                start_new_session=True,  # only this process gets Ctrl-C; it then stops its jobs by SIGTERM
            )
        self._running[process] = job

    def _reap(self, waiting: deque[Job]) -> None:
        for process, job in list(self._running.items()):
            code = process.poll()
            if code is None:
                continue
            del self._running[process]
            claims.unreserve(job.folder)
            unfinished = job.folder / f".{job.done.name}"
            if code == 0 and unfinished.exists():
                unfinished.replace(job.done)
            if job.done.exists():
                _delete_checkpoints(job)
                done = sum(each.is_done for each in self.jobs)
                self.say(f"done: {job.label} ({done} of {len(self.jobs)})")
            elif code == 130:
                self.say(f"stopped: {job.label}, with a checkpoint")
            elif self.stopped is not None and code == -signal.SIGTERM:
                self.say(f"stopped: {job.label}, which wrote no checkpoint and {_restart(job)}")
            elif claims.owner(job.folder) is not None:
                waiting.append(job)
            else:
                self.failed[job.label] = message = _failure_reason(job.folder / LOG, code)
                self.say(f"failed: {job.label}: {message}")
                with contextlib.suppress(OSError):
                    write_atomically(job.folder / ERROR, f"{message}\n")

    def _stop(self, limit: float) -> None:
        """Send SIGTERM to running jobs, wait for their checkpoints, and kill the jobs that do not stop in time."""
        for process in self._running:
            process.send_signal(signal.SIGTERM)
        while self._running and time.monotonic() < limit - min(5.0, 0.05 * 60 * (self.minutes or 100)):
            self._reap(deque())
            time.sleep(_POLL)
        for process, job in self._running.items():
            process.kill()
            process.wait()
            claims.unreserve(job.folder)
            self.say(f"killed: {job.label}, which wrote no checkpoint in time and {_restart(job)}")
        self._running.clear()


def _delete_checkpoints(job: Job) -> None:
    """Delete the checkpoints of a finished job, which would take most of the disk space of a queue."""
    shutil.rmtree(job.folder / "checkpoints", ignore_errors=True)


def share_done(folder: Path) -> float:
    """The share of a run that is done, from its log: 0 for a run that has just started, or logs no updates."""
    try:
        with (folder / RECORDS).open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL))
            last = json.loads(log.read().splitlines()[-1])
        if "done" in last:
            return float(last["done"])
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        updates = config.get("steps") or config.get("options", {}).get("steps")
        return last["step"] / updates if updates else last["epoch"] / config["epochs"]
    except (OSError, ValueError, LookupError, TypeError, AttributeError):  # no damaged file may end the queue
        return 0.0


def _restart(job: Job) -> str:
    """Where the next start of a job begins, in words."""
    earlier = checkpoints.latest(job.folder / "checkpoints")
    return "starts over" if earlier is None else f"resumes from {earlier.name}"


def default_pack() -> int:
    """Default number of parallel jobs: models are small, so a GPU holds eight, and each keeps one core busy."""
    return min(8, max(1, cores() // 2)) if torch.cuda.is_available() else min(8, cores())


def _failure_reason(log: Path, code: int) -> str:
    """The reason why a run failed: the last error in its log, else its exit code and the last line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    for line in reversed(lines):
        if line.startswith("error:"):
            return line.removeprefix("error:").strip()
    ended = f"it was ended by {signal.Signals(-code).name}" if code < 0 else f"it ended with code {code}"
    return f"{ended}; {lines[-1] if lines else 'it said nothing'} (all of it is in {log})"
