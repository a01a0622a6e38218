"""The paper's efficiency table, from the CSV that `flowformer bench lra` writes."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .paper import OOM

SPEED = "lra-speed.csv"  # name of the file in the folder of a queue
_COLUMNS = {
    "attention",
    "length",
    "mode",
    "batch",
    "status",
    "steps_per_second",
    "largest_batch",
    "ratio",
    "paper_steps_per_second",
    "paper_ratio",
    "device",
    "dtype",
}


@dataclass(frozen=True)
class SpeedTable:
    """Steps per second of one model with each attention.

    Args:
        title: title with the hardware.
        note: how to read the numbers.
        headings: the mode and the number of tokens of each column.
        lines: the cells of each attention, each as lines of text, the speed first; None if it was not measured.
    """

    title: str
    note: str
    headings: list[str]
    lines: list[tuple[str, list[list[str] | None]]]
    average_label: None = None

    def grid(self) -> tuple[list[str], list[tuple[str, list[list[str] | None]]]]:
        return self.headings, self.lines


def find(source: Path) -> Iterator[Path]:
    """The tables of speeds at or below a folder; or the file itself, if it is one."""
    if source.is_dir():
        # not rglob, which fails if a queue that is running deletes a checkpoint meanwhile
        yield from sorted(Path(folder) / SPEED for folder, _, files in os.walk(source) if SPEED in files)
    elif source.is_file() and source.suffix == ".csv":
        with source.open(newline="", encoding="utf-8", errors="replace") as file:
            if set(next(csv.reader(file), [])) >= _COLUMNS:
                yield source


def read(path: Path) -> SpeedTable:
    """Read a table of speeds."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        columns = sorted({(row["mode"], int(row["length"])) for row in rows})
        cells = {(row["attention"], row["mode"], int(row["length"])): _texts(row) for row in rows}
        first = rows[0]
    except (ValueError, TypeError, LookupError) as error:
        raise ValueError(
            f"{path} is no table of speeds, or damaged. Copy it again, delete it, or measure again: flowformer bench "
            f"lra --out {path}."
        ) from error
    names = list(dict.fromkeys(row["attention"] for row in rows))
    note = (
        f"The byte-level text model with four layers, batch {first['batch']}, {first['dtype']}. Below the speed: its "
        "ratio to softmax attention at the same length, and the paper's ratio to its Transformer. The paper does not "
        "state task, batch and model, and its Transformer stores the matrix of weights."
    )
    return SpeedTable(
        f"Speed on {first['device']}, steps per second",
        note,
        [f"{mode}, {length:,} tokens" for mode, length in columns],
        [(name, [cells.get((name, *column)) for column in columns]) for name in names],
    )


def _texts(row: dict[str, str]) -> list[str]:
    """The lines of a cell: the speed, or why there is none; our ratio; the paper's."""
    is_measured = row["status"] == "ok"
    texts = [f"{float(row['steps_per_second']):.1f}" if is_measured else row["status"].partition(":")[0]]
    if row["status"] == OOM and row["largest_batch"] not in ("", "0"):
        texts.append(f"fits with batch {row['largest_batch']}")
    if row["ratio"] and row["attention"] != "softmax":
        texts.append(f"{float(row['ratio']):.2f} times softmax")
    if row["paper_steps_per_second"] == OOM:
        texts.append(f"paper {OOM}")
    elif row["paper_ratio"] and row["attention"] != "softmax":
        texts.append(f"paper {float(row['paper_ratio']):.2f}")
    return texts
