"""Results of finished runs: rows of a table, with their provenance.

Only a run of images needs more than its files: its model is built, on the meta device, to count its multiply-adds.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .._utils import atomic_file, moved, read_json
from ..models.counts import count
from ..ops import FlowVariant
from . import recipes
from .config import TrainConfig, from_dict, to_dict
from .methods.config import MethodConfig, method_of
from .overrides import KINDS, keys, override
from .paper import paper_score, percent
from .record import CONFIG, PROVENANCE, RESULT

Row = dict[str, Any]
_COLUMNS = (
    "recipe",
    "attention",
    "seed",
    "overrides",
    "metric",
    "final",
    "best",
    "best_chosen_on",
    "best_step",
    "paper",
    "top5_final",
    "top5_best",
    "half_target_final",
    "half_target_best",
    "note",
    "steps",
    "parameters",
    "multiply_adds",
    "training_seconds",
    "steps_per_second",
    "peak_memory_mib",
    "data",
    "checksum",
    "differs",
    "environment",
    "device",
    "processes",
    "torch",
    "flowformer",
    "commit",
    "command",
    "folder",
)
_NUMBERS = (
    "final",
    "best",
    "paper",
    "top5_final",
    "top5_best",
    "half_target_final",
    "half_target_best",
    "training_seconds",
    "steps_per_second",
    "peak_memory_mib",
)
_WHOLE = ("seed", "best_step", "steps", "parameters", "multiply_adds", "processes")
_KINDS = {**dict.fromkeys(_NUMBERS, float), **dict.fromkeys(_WHOLE, int)}  # of the columns that are not text
_REQUIRED = ("recipe", "attention", "seed", "metric", "final", "best", "best_chosen_on")
_NEEDED = (*_REQUIRED, "overrides", "paper", "data", "device", "commit", "folder")  # columns of every results.csv
_SELECTED_ON = ("valid", "test", "nothing")
# fields of a config in which runs of the same experiment may differ
_SAME_EXPERIMENT = (
    "seed",
    "workers",
    "parallel",
    "context_parallel_size",
    "on_device",
    "log_every",
    "checkpoint_every",
    "keep",
    "model.attention",
)
BENCHMARK = "preset=benchmark"
# fields that change only the arithmetic: runs that differ in them are compared with the paper, with a label
ARITHMETIC = ("precision", "compile", "graphs", "accumulate")


class Identity(NamedTuple):
    """What no two runs have in common, as text."""

    recipe: str
    attention: str
    overrides: str
    seed: str


def collect(sources: Iterable[Path]) -> list[Row]:
    """A row for each finished run; duplicates are dropped.

    Args:
        sources: folders with runs somewhere below them, CSV files that `write_csv` wrote, and pages (results.html).
    """
    collected: dict[Identity, Row] = {}
    for source in sources:
        if not source.exists():
            raise FileNotFoundError(
                f"there is no {source}; accepted: a folder with runs below it, a results.csv, or a results.html."
            )
        for row in _rows(source):
            first = collected.setdefault(identity(row), row)
            # if the same run is both a row of a file and a folder, keep the folder
            if not has_folder(first) and has_folder(row):
                first.update(row)
    return sorted(collected.values(), key=lambda row: (row["recipe"], row["attention"], row["overrides"], row["seed"]))


def identity(row: Row) -> Identity:
    """The identity of a row, also of one whose values are text."""
    return Identity(*(str(row.get(name, "")) for name in Identity._fields))


def planned_identity(config: TrainConfig | MethodConfig) -> Identity:
    """The identity of the row of a run with this config."""
    if isinstance(config, TrainConfig):
        fields, attention = to_dict(config), config.model.attention
    else:
        fields, attention = config.to_dict(), config.method
    row = {"recipe": config.recipe, "attention": attention, "seed": config.seed}
    return identity({**row, "overrides": " ".join(differences(fields))})


def is_page(source: Path) -> bool:
    return source.suffix.lower() == ".html" and not source.is_dir()


def has_folder(row: Row) -> bool:
    """Whether the folder of a run is there."""
    return row["folder"] != "" and Path(row["folder"]).is_dir()  # Path("") is the current folder


def _rows(source: Path) -> Iterable[Row]:
    if source.is_dir():
        return (_checked_row(run) for run in sorted(_runs(source)))
    return _read_page(source) if is_page(source) else _read_csv(source)


def _runs(source: Path) -> Iterable[Path]:
    """The folders with a result at or below a folder. Links to folders, such as those on another disk, are followed."""

    def fail(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):  # a queue that is running deletes checkpoints
            raise error

    visited = set()
    for name, folders, files in os.walk(source, onerror=fail, followlinks=True):
        real = os.path.realpath(name)
        if real in visited:  # a link to a folder above it would never end
            folders.clear()
            continue
        visited.add(real)
        folders.sort(key=lambda each: (os.path.islink(os.path.join(name, each)), each))  # folders before links to them
        if RESULT in files:
            yield Path(name)


def same_experiment(differences: str) -> bool:
    """Whether runs with these differences from a recipe are compared with the paper.

    The arithmetic may differ, and rivals in the Long-Range Arena may have the benchmark's sizes, as in the paper.

    >>> same_experiment("precision=tf32"), same_experiment("precision=tf32 epochs=8")
    (True, False)
    """
    return all(each in (recipes.PUBLISHED, BENCHMARK) or is_arithmetic(each) for each in differences.split())


def is_arithmetic(override: str) -> bool:
    """Whether an override changes only the arithmetic.

    >>> is_arithmetic("precision=tf32"), is_arithmetic("epochs=8")
    (True, False)
    """
    return override.partition("=")[0] in ARITHMETIC


def comparable_score(fields: dict[str, Any], attention: str) -> float | None:
    """The paper's score for a run; None if the paper has none, or the run is another experiment.

    Args:
        fields: the content of config.json of the run.
        attention: the attention or the method of the run.
    """
    same = same_experiment(" ".join(differences(fields)))
    return paper_score(fields["recipe"], attention) if same else None


def differences(fields: dict[str, Any]) -> list[str]:
    """The values of a config that differ from its recipe, each as key=value; seed and attention are left out.

    Args:
        fields: the content of a config.json.
    """
    if fields["recipe"].removesuffix(recipes.PUBLISHED) not in recipes.RECIPES:
        return []
    if method_of(fields) is not None:
        recipe = recipes.get(fields["recipe"])
        steps = {"steps": recipe.steps} if recipe.task == "decision" else {}
        defaults: dict[str, Any] = {
            "options": steps,
            "data_options": recipe.data_options,
            "episodes": recipe.final_episodes,
        }
        default, actual = (
            {f"{part}.{key}": source[part][key] for part in ("options", "data_options") for key in sorted(source[part])}
            | {"final_episodes": source["episodes"]}
            for source in (defaults, fields)
        )
        return [f"{key}={_text(value)}" for key, value in actual.items() if default.get(key) != value]
    config = from_dict(fields)
    preset = [BENCHMARK] if config.preset == "benchmark" else []
    default = keys(override(recipes.get(config.recipe), [f"attention={config.model.attention}", *preset]))
    return preset + [
        f"{key}={_text(value)}"
        for key, value in keys(config).items()
        if key not in _SAME_EXPERIMENT and not isinstance(value, FlowVariant) and default.get(key) != value
    ]


def _text(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple | list) else str(value).replace(" ", "")


def _checked_row(run: Path) -> Row:
    try:
        return _row(run)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        reason = f"it lacks {error}" if isinstance(error, KeyError) else str(error).rstrip(".")
        raise ValueError(
            f"{run} cannot be read: {reason}. Copy it again, read it with the version that made it, or delete it."
        ) from error


def _row(run: Path) -> Row:
    result, facts, fields = (read_json(run / name) for name in (RESULT, PROVENANCE, CONFIG))
    metric = result["metric"]
    row: Row = {**facts, **result}
    for which in ("final", "best"):
        row[which] = percent(metric, result[which][metric])
        top5 = result[which].get("top5")
        row[f"top5_{which}"] = None if top5 is None else percent("top5", top5)
        row[f"half_target_{which}"] = result[which].get("score_half_target")
    row["best_step"] = result["best"].get("step")
    row["note"] = result["final"].get("note")
    row["overrides"] = " ".join(differences(fields))
    row["multiply_adds"] = None if method_of(fields) else _multiply_adds(from_dict(fields))
    row["paper"] = comparable_score(fields, row["attention"])
    row["folder"] = str(run)
    return _typed({name: row.get(name) for name in _COLUMNS})


def _multiply_adds(config: TrainConfig) -> int | None:
    """All multiply-adds for one image; None for other tasks, whose inputs have no fixed length."""
    if config.task != "images":
        return None
    from . import tasks  # here, since it imports torchmetrics, which imports matplotlib

    size = config.model.image_size  # type: ignore[union-attr]  # the task's models have one
    rows, columns = size if isinstance(size, tuple) else (size, size)
    with torch.device("meta"):
        model = tasks.get(config.task).build(config)
    return count(model, torch.empty(1, 3, rows, columns)).total


def _typed(row: Row) -> Row:
    """Convert the numeric columns from text. Missing numbers become None, other missing values an empty text.

    Raises a ValueError that names the column of a required value that is missing, or of one that is not accepted.
    """
    return {name: _typed_value(name, "" if value is None else value) for name, value in row.items()}


def _typed_value(name: str, value: Any) -> Any:
    if value == "" and name not in _REQUIRED:
        return None if name in _KINDS else ""
    kind = _KINDS.get(name, str)
    try:
        typed = kind(value)
    except ValueError:
        typed = ""
    is_selection = name == "best_chosen_on"
    if typed == "" or (is_selection and typed not in _SELECTED_ON):
        accepted = ", ".join(_SELECTED_ON) if is_selection else KINDS[kind]
        raise ValueError(f"column {name} is {repr(value) if value else 'empty'}; accepted: {accepted}")
    return typed


def write_csv(rows: list[Row], path: Path) -> None:
    with atomic_file(path, newline="") as file:
        writer = csv.DictWriter(file, _COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def _read_csv(path: Path) -> Iterable[Row]:
    with path.open(newline="", encoding="utf-8-sig", errors="replace") as file:  # spreadsheets write a byte order mark
        reader = csv.DictReader(file)
        try:
            yield from _csv_rows(reader, path)
        except csv.Error as error:  # of a field that is too large, which may be all that follows a quotation mark
            raise ValueError(
                f"{path} is damaged at or before line {reader.line_num}: {error}. A quotation mark may not be closed. "
                "Correct it, or copy it again."
            ) from error


def _csv_rows(reader: csv.DictReader, path: Path) -> Iterable[Row]:
    missing = set(_NEEDED).difference(reader.fieldnames or ())
    if missing:
        raise ValueError(
            f"{path} is no table of results: it lacks {', '.join(sorted(missing))}. Accepted: a results.csv of "
            "flowformer results --out, also of an earlier version."
        )
    for row in reader:
        try:
            if None in row or None in row.values():
                raise ValueError(f"it does not have {len(reader.fieldnames or ())} columns, as the first line has")
            yield _typed({name: row.get(name) for name in _COLUMNS})
        except ValueError as error:
            raise ValueError(
                f"{path}, line {reader.line_num} is damaged: {error}. Correct it, or copy it again."
            ) from error


def _read_page(path: Path) -> Iterable[Row]:
    from ..viz.page import read_page  # here, since it imports matplotlib

    for run in read_page(path).runs:
        try:
            yield _typed({name: run["facts"].get(name) for name in _COLUMNS})
        except ValueError as error:
            raise ValueError(f"{path}, {run['name']}: {error}. Make the page again, or copy it again.") from error


__getattr__ = moved(
    __name__,
    {"evaluate_run": "flowformer.train.evaluation.evaluate_run"}
    | {
        name: f"flowformer.train.figures.{name}"
        for name in ("draw_comparison", "draw_figures", "draw_maps", "draw_speeds")
    },
)
