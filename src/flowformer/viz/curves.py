"""Curves: of training runs over their updates, and of benchmarks over the length."""

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
    """Time of forward and backward together over the length, from the CSV of a benchmark; one panel a kind."""
    times: dict[str, dict[str, list[tuple[int, float]]]] = defaultdict(lambda: defaultdict(list))
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            length = re.search(r"N(\d+)", row["shape"])
            if length is None:
                raise ValueError(f"{path} is no benchmark of attention: the shape {row['shape']!r} has no length.")
            times[row["kind"]][row["contestant"]].append((int(length[1]), float(row["both_ms"])))
    if not times:
        raise ValueError(f"{path} has no rows.")
    figure = Figure(figsize=(5 * len(times), 3.6), layout="constrained")
    for panel, (kind, contestants) in zip(figure.subplots(1, len(times), squeeze=False)[0], times.items(), strict=True):
        for name, points in contestants.items():
            panel.plot(*zip(*sorted(points), strict=True), marker=".", label=name)
        panel.set(title=kind, xscale="log", yscale="log", xlabel="tokens", ylabel="forward + backward, ms")
        panel.legend(fontsize=8)
    return figure
