"""Figures of finished runs: maps of competition and allocation, comparisons of attentions, and speeds."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import data
from .._utils import atomic_file
from ..models.base import WEIGHTS_FILE
from . import speeds
from .config import TrainConfig, load
from .evaluation import dataset_size, open_run, padded_length
from .record import CONFIG
from .results import Row, has_folder
from .tables import FIGURES
from .tasks import Task

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ..nn import Degeneracy

MEASURED_EXAMPLES = 256  # of the test set, over which `measure_degeneracy` averages


@torch.no_grad()
def draw_maps(
    run: Path, *, model: str = "final", data_dir: str | Path | None = None, splits: data.Splits | None = None
) -> Figure:
    """Draw competition and allocation over one test example of each class, up to nine.

    Args:
        run, model, data_dir: as in `evaluate_run`.
        splits: the data; None loads the data set of the run from data_dir.
    """
    from .. import viz

    config, _, trained = open_run(run, model)
    titles, inputs = _examples(config, splits or data.load(config.data, data_dir, **config.data_options))
    draw: Callable[..., Figure] = viz.over_time if config.task == "series" else viz.over_images
    return draw(trained, *inputs, titles=titles)


@torch.no_grad()
def draw_comparison(runs: Sequence[Path], *, model: str = "final", data_dir: str | Path | None = None) -> Figure:
    """Draw the attention weights of each run over the same test examples, one of each class, up to nine.

    Args:
        runs: folders of runs on the same data.
        model, data_dir: as in `evaluate_run`.
    """
    from .. import viz

    opened = _open_compared(runs, model)
    config = next(iter(opened.values()))[0]
    titles, inputs = _examples(config, data.load(config.data, data_dir, **config.data_options))
    draw: Callable[..., Figure] = viz.compare_over_time if config.task == "series" else viz.compare_over_images
    return draw({label: trained for label, (_, _, trained) in opened.items()}, *inputs, titles=titles)


def measure_degeneracy(
    runs: Sequence[Path],
    *,
    model: str = "final",
    examples: int = MEASURED_EXAMPLES,
    data_dir: str | Path | None = None,
) -> dict[str, list[Degeneracy]]:
    """Measure how degenerate the attention of each run is in each layer; see `viz.degeneracies`.

    Args:
        runs, model, data_dir: as in `draw_comparison`.
        examples: number of test examples, at equal distances in the test set; a smaller one is measured as a whole.

    Returns: the layers of each run in the order they run, by the labels of `draw_comparison`.
    """
    from .. import viz

    opened = _open_compared(runs, model)
    config = next(iter(opened.values()))[0]
    splits = data.load(config.data, data_dir, **config.data_options)
    size = dataset_size(splits.test)
    count = min(examples, size)
    # the first ones would be of a few classes: many test sets are sorted by class
    measured = [splits.test[i * size // count] for i in range(count)]
    layers: dict[str, list[Degeneracy]] = {}
    for label, (config, task, trained) in opened.items():
        batch = data.collate(measured, padded_length(config, splits))
        layers |= viz.degeneracies({label: trained}, *task.arguments(batch))
    return layers


def _open_compared(runs: Sequence[Path], model: str) -> dict[str, tuple[Any, Task, Any]]:
    """The config, the task and the trained model of each run by its label; raises if they are on different data."""
    opened = [open_run(run, model) for run in runs]
    data_sets = {json.dumps([config.data, config.data_options], sort_keys=True) for config, _, _ in opened}
    if len(data_sets) > 1:
        raise ValueError(f"runs must be on the same data to be compared, got {', '.join(sorted(data_sets))}.")
    labels = attentions = [config.model.attention for config, _, _ in opened]
    for names in ([run.name for run in runs], runs):
        if len(set(labels)) < len(labels):
            labels = [f"{attention}, {name}" for attention, name in zip(attentions, names, strict=True)]
    return dict(zip(labels, opened, strict=True))


def _examples(config: TrainConfig, splits: data.Splits) -> tuple[list[str], tuple[Tensor | None, ...]]:
    """One test example of each class, up to nine: their titles, and the inputs of the drawing functions of `viz`."""
    if config.task not in ("series", "images"):
        raise NotImplementedError(f"maps are drawn over series and images, and {config.recipe} has neither.")
    examples: dict[int, Any] = {}
    for i in range(dataset_size(splits.test)):
        example = splits.test[i]
        examples.setdefault(int(example["label"]), example)
        if len(examples) == min(9, splits.info.num_classes or 9):
            break
    titles = [f"{config.data}, class {label}" for label in sorted(examples)]
    batch = data.collate([examples[label] for label in sorted(examples)])
    if config.task == "series":
        return titles, (batch["series"], batch.get("mask"))
    images = batch["image"]
    low, high = images.amin((2, 3), keepdim=True), images.amax((2, 3), keepdim=True)
    return titles, (images, (images - low) / (high - low))


def draw_figures(
    rows: list[Row], folder: Path, data_dir: str | Path | None = None
) -> tuple[dict[str, Path], dict[str, Exception]]:
    """Draw, for each recipe and set of overrides, the maps of Flow-Attention and its comparison with other attentions.

    Each attention is drawn from its first run. An image is named after its models, and kept if it exists.

    Args:
        rows: from `collect`; runs without a model, such as rows of a CSV or copies without weights, are left out.
        folder: where to write the images.
        data_dir: the folder of all data sets.

    Returns: the images by their captions, empty if matplotlib is not installed; and the errors of figures whose data,
    config, model or package is missing or damaged, by their captions.
    """
    figures: dict[str, Path] = {}
    failed: dict[str, Exception] = {}
    if importlib.util.find_spec("matplotlib") is None:
        return figures, failed
    for caption, runs in _runs_by_caption(rows).items():
        try:
            if any(load(run / CONFIG).task not in ("series", "images") for run in runs):
                continue
            # runs in different places may have the same name, and another run may have replaced an earlier one
            path = folder / f"{runs[0].parent.name}-{runs[0].name}-{_digest(map(_weights, runs))}.png"
            if not path.exists():
                folder.mkdir(parents=True, exist_ok=True)
                one = len(runs) == 1
                _save(draw_maps(runs[0], data_dir=data_dir) if one else draw_comparison(runs, data_dir=data_dir), path)
        except (OSError, ValueError, ImportError) as error:
            failed[caption] = error
        else:
            figures[caption] = path
    return figures, failed


def _runs_by_caption(rows: list[Row]) -> dict[str, list[Path]]:
    """The runs of each figure by its caption, flow first."""
    experiments: dict[str, dict[str, Path]] = {}
    for row in rows:
        if row["metric"] == "accuracy" and has_folder(row) and _weights(Path(row["folder"])).is_file():
            experiment = f"{row['recipe']}, {row['overrides']}" if row["overrides"] else row["recipe"]
            experiments.setdefault(experiment, {}).setdefault(row["attention"], Path(row["folder"]))
    figures = {}
    for experiment, runs in experiments.items():
        compared = [runs[method.name] for method in FIGURES.methods if method.name in runs]
        if "flow" in runs:
            figures[f"{experiment}: competition and allocation of the last layer"] = [runs["flow"]]
            if len(compared) > 1:
                figures[f"{experiment}: weights of the sources in the last layer"] = compared
    return figures


def _weights(run: Path) -> Path:
    return run / "final" / WEIGHTS_FILE


def draw_speeds(path: Path, folder: Path) -> dict[str, Path]:
    """Draw the CSV that `flowformer bench lra` wrote. Return the image by its caption; empty without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        return {}
    from .. import viz

    folder.mkdir(parents=True, exist_ok=True)
    image = folder / f"{path.stem}-{_digest([path])}.png"
    _save(viz.speed_figure(path), image)
    return {speeds.read(path).title: image}


def _save(figure: Figure, path: Path) -> None:
    """Write the image as a whole or not at all, since an image that exists is not drawn again."""
    with atomic_file(path, "wb") as file:
        figure.savefig(file, format="png", dpi=80)


def _digest(files: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:8]
