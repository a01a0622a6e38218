"""Curves of training runs over their updates and of benchmarks over the length; bars of steps per second."""

from __future__ import annotations

import csv
import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

_NOT_SCORES = ("kind", "split", "step", "epoch", "model")


def training_curves(logs: Mapping[str, list[dict[str, Any]]]) -> Figure:
    """The loss and every score of runs over their updates.

    Args:
        logs: the records of each run, by the name it has in the legend.
    """
    scores = [
        name
        for name in dict.fromkeys(key for log in logs.values() for record in log for key in record)
        if name not in _NOT_SCORES and any(r["kind"] == "eval" and name in r for log in logs.values() for r in log)
    ]
    figure = Figure(figsize=(4.2 * (1 + len(scores)), 3.2), layout="constrained")
    panels = figure.subplots(1, 1 + len(scores), squeeze=False)[0]
    for i, (name, log) in enumerate(logs.items()):
        colour = f"C{i}"
        updates = [record for record in log if record["kind"] == "train"]
        panels[0].plot([r["step"] for r in updates], [r["loss"] for r in updates], color=colour, label=name)
        for panel, score in zip(panels[1:], scores, strict=True):
            found = [r for r in log if r["kind"] == "eval" and score in r and "model" not in r]
            panel.plot([r["step"] for r in found], [r[score] for r in found], color=colour, marker=".", label=name)
    for panel, title in zip(panels, ("training loss", *(f"evaluation {score}" for score in scores)), strict=True):
        panel.set_title(title, fontsize=10)
        panel.set_xlabel("update")
    panels[0].legend(fontsize=8)
    return figure


def speed_curves(path: Path) -> Figure:
    """Time over the length, from the CSV of a benchmark; a column a kind, forward above forward and backward."""
    steps = {"forward_ms": "forward, ms", "both_ms": "forward + backward, ms"}
    times: dict[str, dict[str, list[tuple[int, dict]]]] = defaultdict(lambda: defaultdict(list))
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            length = re.search(r"N(\d+)", row["shape"])
            if length is None:
                raise ValueError(f"{path} is no benchmark of attention: the shape {row['shape']!r} has no length.")
            times[row["kind"]][row["contestant"]].append((int(length[1]), row))
    if not times:
        raise ValueError(f"{path} has no rows.")
    figure = Figure(figsize=(5 * len(times), 6.4), layout="constrained")
    columns = figure.subplots(2, len(times), squeeze=False, sharex="col").T
    for panels, (kind, contestants) in zip(columns, times.items(), strict=True):
        for panel, (step, label) in zip(panels, steps.items(), strict=True):
            for name, points in contestants.items():
                lengths, rows = zip(*sorted(points, key=lambda point: point[0]), strict=True)
                panel.plot(lengths, [float(row[step]) for row in rows], marker=".", label=name)
            panel.set(xscale="log", yscale="log", ylabel=label)
        panels[0].set(title=kind)
        panels[0].legend(fontsize=8)
        panels[1].set(xlabel="tokens")
    return figure


def speed_bars(path: Path) -> Figure:
    """Steps per second of every attention, from the CSV of `flowformer bench lra`; a panel for each mode and length.

    A dashed line continues softmax attention. A diamond is where the paper's ratio to it puts an attention.
    """
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    if not rows:
        raise ValueError(f"{path} has no rows.")
    modes, lengths, names = (list(dict.fromkeys(row[key] for row in rows)) for key in ("mode", "length", "attention"))
    cells = {(row["mode"], row["length"], row["attention"]): row for row in rows}

    def number(mode: str, length: str, name: str, column: str) -> float:
        return float(cells.get((mode, length, name), {}).get(column) or 0)

    names.sort(key=lambda name: number(modes[-1], lengths[-1], name, "steps_per_second"))
    size = 1.5 + 2.6 * len(lengths), 0.8 + 0.2 * len(modes) * (2 + len(names))
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(len(modes), len(lengths), squeeze=False, sharey=True)
    for mode, line in zip(modes, panels, strict=True):
        for length, panel in zip(lengths, line, strict=True):
            speeds = [number(mode, length, name, "steps_per_second") for name in names]
            colours = ["C1" if name == "flow" else "C7" if name == "softmax" else "C0" for name in names]
            panel.barh(names, speeds, color=colours)
            softmax = number(mode, length, "softmax", "steps_per_second")
            if softmax:
                panel.axvline(softmax, color="C7", linestyle="--", linewidth=1)
            for i, name in enumerate(names):
                row = cells.get((mode, length, name))
                if row is not None and row["status"] != "ok":
                    panel.text(0, i, f" {row['status'].partition(':')[0]}", va="center", fontsize=7)
                if softmax and (ratio := number(mode, length, name, "paper_ratio")):
                    panel.plot(ratio * softmax, i, "kd", markersize=3)
            panel.set_title(f"{mode}, {int(length):,} tokens", fontsize=9)
            panel.tick_params(labelsize=8)
    for panel in panels[-1]:
        panel.set_xlabel("steps per second", fontsize=8)
    figure.suptitle("dashed: softmax attention; diamond: where the paper's ratio to it lies", fontsize=9)
    return figure


def speed_figure(path: Path) -> Figure:
    """The figure of a benchmark's CSV, bars or curves, whichever its columns are for."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no {path}; accepted: the CSV that a benchmark wrote with --csv or --out.")
    with path.open(newline="") as file:
        columns = next(csv.reader(file), [])
    if "steps_per_second" in columns:
        return speed_bars(path)
    missing = {"kind", "contestant", "shape", "forward_ms", "both_ms"}.difference(columns)
    if missing:
        raise ValueError(f"{path} is no benchmark's CSV: it lacks {', '.join(sorted(missing))}.")
    return speed_curves(path)
