"""Results: runs collected into a table beside the paper's numbers, and models of runs looked at again."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator  # type: ignore[import-untyped]

from .. import data
from ..ops.variant import nearest
from . import tasks
from .config import load
from .loop import CONFIG, PROVENANCE, RESULT, collate_for, evaluate
from .paper import paper_score, percent

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLUMNS = (
    "recipe",
    "attention",
    "seed",
    "metric",
    "final",
    "best",
    "best_chosen_on",
    "paper",
    "steps",
    "parameters",
    "training_seconds",
    "steps_per_second",
    "peak_memory_mib",
    "data",
    "checksum",
    "differs",
    "device",
    "processes",
    "torch",
    "flowformer",
    "commit",
    "command",
)


def collect(folder: Path) -> list[dict[str, Any]]:
    """A row for each finished run below a folder, with all that says where it comes from."""
    rows = []
    for path in sorted(folder.rglob(RESULT)):
        result = json.loads(path.read_text())
        facts = json.loads((path.parent / PROVENANCE).read_text())
        metric = result["metric"]
        scores = {which: percent(metric, result[which][metric]) for which in ("final", "best")}
        paper = paper_score(result["recipe"], result["attention"])
        row = {**facts, **result, **scores, "paper": "" if paper is None else paper}
        rows.append({name: row[name] for name in _COLUMNS})
    return sorted(rows, key=lambda row: (row["recipe"], row["attention"], row["seed"]))


def markdown(rows: list[dict[str, Any]]) -> str:
    """The rows as a table; the CSV has the rest."""
    lines = [
        "| recipe | attention | seed | metric | final | best | best chosen on | paper | data differ | device | s |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    names = ("recipe", "attention", "seed", "metric", "final", "best", "best_chosen_on", "paper", "differs", "device")
    for row in rows:
        cells = [*(str(row[name]) for name in names), f"{row['training_seconds']:.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def write(rows: list[dict[str, Any]], folder: Path) -> None:
    """results.csv and results.md."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "results.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, _COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    (folder / "results.md").write_text(markdown(rows) + "\n")


def evaluate_run(
    run: Path, *, model: str = "final", split: str = "test", data_dir: str | Path | None = None
) -> dict[str, float]:
    """The scores of a model of a run, computed anew.

    Args:
        run: the folder of the run.
        model: "final" or "best".
        split: "test" or "valid".
    """
    config, task, trained = _open(run, model)
    splits = data.load(config.data, data_dir, **config.data_options)
    dataset = getattr(splits, _one_of("split", split, ("test", "valid")))
    if dataset is None:
        raise ValueError(f"{config.data} has no validation part; accepted: test.")
    accelerator = Accelerator()
    objective = accelerator.prepare(tasks.Objective(trained, task, config)).eval()
    played = task.evaluate(trained, splits, config)
    return evaluate(accelerator, objective, dataset, config, collate_for(config, splits)) if played is None else played


@torch.no_grad()
def draw_maps(
    run: Path, *, model: str = "final", data_dir: str | Path | None = None, splits: data.Splits | None = None
) -> Figure:
    """Competition and allocation over one test example of each class, up to nine; arguments as of `evaluate_run`."""
    from .. import viz

    config, _, trained = _open(run, model)
    if config.task not in ("series", "images"):
        raise NotImplementedError(f"maps are drawn over series and images, and {config.recipe} has neither.")
    splits = splits or data.load(config.data, data_dir, **config.data_options)
    examples: dict[int, Any] = {}
    for i in range(len(splits.test)):  # type: ignore[arg-type]
        example = splits.test[i]
        examples.setdefault(int(example["label"]), example)
        if len(examples) == min(9, splits.info.num_classes or 9):
            break
    titles = [f"{config.data}, class {label}" for label in sorted(examples)]
    batch = data.collate([examples[label] for label in sorted(examples)])
    if config.task == "series":
        return viz.over_time(trained, batch["series"], batch.get("mask"), titles=titles)
    images = batch["image"]
    low, high = images.amin((2, 3), keepdim=True), images.amax((2, 3), keepdim=True)
    return viz.over_images(trained, images, (images - low) / (high - low), titles=titles)


def _open(run: Path, model: str) -> tuple[Any, tasks.Task, Any]:
    if not (run / CONFIG).is_file():
        raise FileNotFoundError(f"{run} has no {CONFIG}; accepted: the folder of a run.")
    rival = json.loads((run / CONFIG).read_text()).get("rival")
    if rival is not None:
        raise NotImplementedError(f"{run} has the scores of {rival}, but no model: fit it again with flowformer rival.")
    config = load(run / CONFIG)
    task = tasks.get(config.task)
    folder, trained = run / _one_of("model", model, ("final", "best")), type(task.build(config))
    try:
        return config, task, trained.from_pretrained(folder)
    except FileNotFoundError as error:
        written = "when the run ends" if model == "final" else "at the first evaluation"
        raise FileNotFoundError(
            f"{run} has no {model} model yet: it is written {written}. Go on with the run: flowformer train "
            f"{config.recipe} with its overrides, --out {run} and --resume."
        ) from error


def _one_of(what: str, value: str, accepted: tuple[str, ...]) -> str:
    if value not in accepted:
        raise ValueError(f"unknown {what} {value!r}{nearest(value, accepted)}; accepted: {', '.join(accepted)}.")
    return value
