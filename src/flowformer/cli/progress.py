"""Progress of training runs in the terminal."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from .app import console

if TYPE_CHECKING:
    from ..train.loop import Report


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


def _print_record(label: str, record: dict[str, Any]) -> None:
    if record["kind"] == "eval":
        numbers = {key: value for key, value in record.items() if isinstance(value, float) and key != "epoch"}
        scores = ", ".join(f"{key} {value:.4f}" for key, value in numbers.items())
        when = f"{label}, epoch {record['epoch']:g}, update {record['step']}"
        console.print(f"{when}: {record['split']} {scores}", highlight=False, soft_wrap=True)
        console.file.flush()


def columns() -> tuple[TextColumn, BarColumn, MofNCompleteColumn, TimeRemainingColumn]:
    """Return the columns that all progress bars share: description, bar, count, remaining time."""
    return TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
