"""The paper's data sets by name: `load("lra/text")` gives map-style datasets of dicts of tensors.

Files are read in their published layout from the folder of `store.root`. Items:

    tokens     {"tokens" (N,) int64, "label" ()}
    pairs      {"first" (N,), "second" (N,), "label" ()}
    series     {"series" (N, C) float32, "label" ()}
    images     {"image" (3, Y, X) float32, "label" ()}
    language   {"tokens" (L + 1,)}: L tokens to read, each with the token after it to predict
    RL         {"returns_to_go" (T, 1), "states" (T, S), "actions" (T, A), "timesteps" (T,), "mask" (T,)}
"""

from __future__ import annotations

import inspect
import os
from typing import Any

from .._utils import check_options, suggestion
from . import store
from .generate import Progress
from .registry import RECORDS, find
from .splits import DataInfo, Splits, collate
from .store import DamagedDataError, DataSet, MissingDataError, Source

__all__ = [
    "RECORDS",
    "DamagedDataError",
    "DataInfo",
    "DataSet",
    "MissingDataError",
    "Source",
    "Splits",
    "collate",
    "find",
    "generator_options",
    "load",
    "missing",
    "names",
    "prepare",
    "store",
]


def names() -> list[str]:
    """List the names of all registered data sets.

    `load` also takes the names of other UEA, D4RL and Minari data sets, such as "minari/mujoco/hopper/medium-v0";
    `registry.FAMILIES` lists their forms.
    """
    return list(RECORDS)


def load(name: str, data_dir: str | os.PathLike[str] | None = None, *, partial: bool = False, **options: Any) -> Splits:
    """Read a data set.

    Args:
        name: one of `names()`, or the name of another UEA, D4RL or Minari data set.
        data_dir: the folder of all data sets; None means $FLOWFORMER_DATA, else ~/.cache/flowformer.
        partial: accept fewer cases than published; `info.differs` then describes the difference.
        options: options of the data set's reader function, such as `max_length`.

    Raises:
        MissingDataError: a file is missing; the message says what to download and where to put it.
        DamagedDataError: a file cannot be read or is incomplete; the message names it.
    """
    splits = find(name).reader(store.root(data_dir), partial=partial, **options)
    for part in ("train", "valid"):
        dataset: Any = getattr(splits, part)
        if dataset is not None and not len(dataset):
            raise DamagedDataError(
                f"{name} in {store.root(data_dir)} is too small: nothing is left for its {part} part."
            )
    return splits


def missing(name: str, data_dir: str | os.PathLike[str] | None = None, **options: Any) -> Source | None:
    """Return the source of a data set whose files are missing, or None if they all exist.

    Only checks that the files exist; their content is not read.

    Args:
        name, data_dir, options: see `load`.
    """
    record, folder = find(name), store.root(data_dir)
    return None if record.missing(folder, **options) is None else record.source.located(folder)


def prepare(
    name: str, data_dir: str | os.PathLike[str] | None = None, *, progress: Progress | None = None, **options: Any
) -> None:
    """Generate a synthetic data set: "lra/listops" or "lra/pathfinder".

    Args:
        name, data_dir: see `load`.
        progress: called after each part with the number of finished parts and the total number of parts.
        options: options of `listops.generate` or `pathfinder.generate`.
    """
    check_options(name, options, generator_options(name))
    record = find(name)
    assert record.generator is not None
    home = next(iter(record.files(store.root(data_dir)).values())).parent
    record.generator(home, progress=progress, **options)


def generator_options(name: str) -> list[str]:
    """List the options that `prepare` accepts for a data set."""
    generators = {record.name: record.generator for record in RECORDS.values() if record.generator is not None}
    if name not in generators:
        raise ValueError(
            f"only {' and '.join(generators)} are generated, got {name!r}{suggestion(name, generators)}; "
            "flowformer data list says where to get the others."
        )
    return [option for option in inspect.getfullargspec(generators[name]).kwonlyargs if option != "progress"]
