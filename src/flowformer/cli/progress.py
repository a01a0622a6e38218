"""Progress of training runs, and of a queue of them, in the terminal."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

from .app import console

if TYPE_CHECKING:
    from ..train.loop import Report
    from ..train.reproduce import Watch


@contextmanager
def progress(quiet: bool) -> Iterator[Callable[[str], Report]]:
    """Yield a function that makes the `report` callback of a run from its label.

    The callback draws a progress bar in a terminal, else it prints one line per evaluation. It prints nothing if
    `quiet`, or on any rank but 0.
    """
    from ..train.record import is_main

    if quiet or not is_main():
        yield lambda label: lambda record: None
        return
    if not console.is_terminal:
        yield lambda label: functools.partial(_print_record, label)
        return
    with Progress(*columns(), TextColumn("{task.fields[note]}"), console=console) as bars:

        def reporter(label: str) -> Report:
            bar = bars.add_task(label, total=None, note="")

            def report(record: dict[str, Any]) -> None:
                if record["kind"] == "start":
                    bars.update(bar, total=record["steps"], completed=record["step"])
                elif record["kind"] == "step":
                    bars.update(bar, completed=record["step"])
                elif record["kind"] == "train":
                    bars.update(bar, note=f"loss {record['loss']:.3f}, {record['steps_per_second']:.1f} updates/s")
                else:
                    _print_record(label, record)

            return report

        yield reporter


@contextmanager
def queue_progress(terminal: Console) -> Iterator[Watch | None]:
    """Yield the `watch` callback of a queue, which draws a bar for it and one for each running job.

    Outside a terminal it is None.
    """
    if not terminal.is_terminal:
        yield None
        return
    look = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn()
    with Progress(*look, console=terminal, transient=True) as bars:
        whole = bars.add_task("", total=None)
        shown: dict[str, TaskID] = {}

        def watch(shares: dict[str, float], finished: int, count: int) -> None:
            for label in shown.keys() - shares.keys():
                bars.remove_task(shown.pop(label))
            for label, share in shares.items():
                if label not in shown:
                    shown[label] = bars.add_task(label, total=1.0)
                bars.update(shown[label], completed=share)
            description = f"{finished} of {count} runs done"
            bars.update(whole, description=description, total=count, completed=finished + sum(shares.values()))

        yield watch


def _print_record(label: str, record: dict[str, Any]) -> None:
    if record["kind"] == "eval":
        numbers = {key: value for key, value in record.items() if isinstance(value, float) and key != "epoch"}
        scores = ", ".join(f"{key} {value:.4f}" for key, value in numbers.items())
        when = f"{label}, epoch {record['epoch']:g}, update {record['step']}"
        facts = "".join(f"; {record[key]}" for key in ("environment", "note") if key in record)
        console.print(f"{when}: {record['split']} {scores}{facts}", highlight=False, soft_wrap=True)
        console.file.flush()


def columns() -> tuple[TextColumn, BarColumn, MofNCompleteColumn, TimeRemainingColumn]:
    """Return the columns that all progress bars share: description, bar, count, remaining time."""
    return TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
