"""Training curves, and the speeds of benchmarks as curves over the sequence length or as bars."""

from __future__ import annotations

import csv
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure


def curve_points(log: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, str, int, float]]:
    """Yield (split, score, update, value) of each training loss, whose split is "training", and each evaluation score.

    Evaluations of a saved model after the training, which have a "model", are results, not points of a curve.

    Args:
        log: log records of a run.
    """
    for record in log:
        if record["kind"] == "train":
            yield "training", "loss", record["step"], record["loss"]
        elif record["kind"] == "eval" and "model" not in record:
            for score, value in record.items():
                if isinstance(value, float) and score != "epoch":
                    yield record["split"], score, record["step"], value


def training_curves(logs: Mapping[str, list[dict[str, Any]]]) -> Figure:
    """Draw the training loss and each evaluation score over the updates, one panel each with all runs.

    Args:
        logs: log records of each run, by its label in the legend.
    """
    panels: dict[str, dict[str, list[tuple[int, float]]]] = defaultdict(lambda: defaultdict(list))
    for name, log in logs.items():
        for split, score, step, value in curve_points(log):
            title = f"{split} {score}" if split == "training" else f"evaluation {score}"
            panels[title][name].append((step, value))
    if not panels:
        raise ValueError(f"{', '.join(logs)}: nothing is recorded yet, neither a loss nor an evaluation.")
    figure = Figure(figsize=(4.2 * len(panels), 3.2 + 0.2 * len(logs)), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    colours = {name: f"C{i}" for i, name in enumerate(logs)}
    titles = sorted(panels, key=lambda title: (title != "training loss", title))
    for axis, title in zip(axes, titles, strict=True):
        for name, points in panels[title].items():
            marker = "." if title != "training loss" or len(points) == 1 else None
            axis.plot(*zip(*points, strict=True), color=colours[name], marker=marker, label=name)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("update")
    # one legend for all panels, since a run may appear in only some of them
    handles = {label: handle for axis in axes for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), fontsize=8, loc="outside lower center")
    return figure


def speed_curves(path: Path) -> Figure:
    """Draw the time of each contestant over the sequence length, from the CSV of `flowformer bench attention`.

    The top row shows forward passes, the bottom row forward and backward passes. Each combination of kind of attention,
    other dimensions, device and dtype has its own column, so that only the length varies along a line.
    """
    steps = {"forward_ms": "forward, ms", "both_ms": "forward + backward, ms"}
    times: dict[str, dict[str, dict[str, list[tuple[int, float]]]]] = defaultdict(
        lambda: defaultdict(lambda: defaultdict(list))
    )
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            length = re.search(r"N(\d+)", row["shape"])
            if length is None:
                raise ValueError(f"{path} is no benchmark of attention: the shape {row['shape']!r} has no length.")
            others = " ".join(row["shape"].replace(length[0], " ").split())
            column = f"{row['kind']}\n{_conditions(row, others)}"
            for step in steps:
                if row[step]:  # empty if the run did not fit into memory
                    times[column][step][row["contestant"]].append((int(length[1]), float(row[step])))
    if not times:
        raise ValueError(f"{path} has no rows with a time.")
    figure = Figure(figsize=(5 * len(times), 6.8), layout="constrained")
    columns = figure.subplots(2, len(times), squeeze=False, sharex="col").T
    for panels, (title, parts) in zip(columns, times.items(), strict=True):
        for panel, (step, label) in zip(panels, steps.items(), strict=True):
            if not parts[step]:
                panel.set_axis_off()
                continue
            for name, points in parts[step].items():
                panel.plot(*zip(*sorted(points), strict=True), marker=".", label=name)
            panel.set(xscale="log", yscale="log", ylabel=label, xlabel="tokens")
            panel.tick_params(axis="x", labelbottom=True)  # sharex hides these labels, but the panel below may be empty
            panel.legend(fontsize=8)
        panels[0].set_title(title, fontsize=10)
    return figure


def speed_bars(path: Path) -> Figure:
    """Draw steps per second of each attention, from the CSV of `flowformer bench lra`, a panel per mode and length.

    The dashed line is the speed of softmax attention. A diamond is this speed times the paper's ratio of the attention
    to softmax.
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
    size = 1.5 + 2.6 * len(lengths), 1.1 + 0.2 * len(modes) * (2 + len(names))
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(len(modes), len(lengths), squeeze=False, sharey=True)
    for mode, line in zip(modes, panels, strict=True):
        for length, panel in zip(lengths, line, strict=True):
            if not any((mode, length, name) in cells for name in names):
                panel.set_axis_off()
                continue
            speeds = [number(mode, length, name, "steps_per_second") for name in names]
            colours = ["C1" if name == "flow" else "C7" if name == "softmax" else "C0" for name in names]
            panel.barh(names, speeds, color=colours)
            softmax = number(mode, length, "softmax", "steps_per_second")
            if softmax:
                panel.axvline(softmax, color="C7", linestyle="--", linewidth=1, label="softmax attention")
            for i, name in enumerate(names):
                row = cells.get((mode, length, name))
                if row is not None and row["status"] != "ok":
                    panel.text(0, i, f" {row['status'].partition(':')[0]}", va="center", fontsize=7)
                if softmax and (ratio := number(mode, length, name, "paper_ratio")):
                    panel.plot(ratio * softmax, i, "kd", markersize=3, label="where the paper's ratio to it lies")
            panel.set_title(f"{mode}, {int(length):,} tokens", fontsize=9)
            panel.set_xlabel("steps per second", fontsize=8)
            panel.tick_params(labelsize=8)
    handles = {
        label: handle for panel in panels.flat for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    if handles:
        figure.legend(handles.values(), handles.keys(), fontsize=8, ncols=2, loc="outside lower center")
    conditions = dict.fromkeys(_conditions(row, f"batch {row['batch']}" if row.get("batch") else "") for row in rows)
    figure.suptitle("; ".join(conditions), fontsize=9)
    return figure


def _conditions(row: Mapping[str, str], shape: str) -> str:
    """Describe the conditions of a row: those of device, dtype, compiled and shape that it has."""
    compiled = "compiled" if row.get("compiled") == "True" else ""
    return ", ".join(filter(None, (row.get("device"), row.get("dtype"), compiled, shape)))


_CURVES = ("kind", "contestant", "shape", "forward_ms", "both_ms")
_BARS = ("attention", "length", "mode", "status", "steps_per_second")


def speed_figure(path: Path) -> Figure:
    """Draw the CSV of a benchmark as bars or curves, depending on its columns."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no {path}; accepted: the CSV that a benchmark wrote with --csv or --out.")
    with path.open(newline="") as file:
        columns = next(csv.reader(file), [])
    if set(_BARS) <= set(columns):
        return speed_bars(path)
    missing = [column for column in _CURVES if column not in columns]
    if missing:
        raise ValueError(
            f"{path} is no benchmark's CSV: it lacks {', '.join(missing)}. Accepted: what flowformer bench attention "
            "wrote with --csv, or flowformer bench lra with --out."
        )
    return speed_curves(path)
