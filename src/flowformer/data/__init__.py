"""The paper's data sets by name: `load("lra/text")` gives map-style datasets of dicts of tensors.

Files are read where they lie, in the layouts in which they are published; see `store.root` for where that is. Items:

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
from .splits import DataInfo, Splits, collate
from .store import DamagedDataError, MissingDataError

__all__ = [
    "DamagedDataError",
    "DataInfo",
    "MissingDataError",
    "Splits",
    "collate",
    "generator_options",
    "load",
    "names",
    "prepare",
    "store",
]


def names() -> list[str]:
    """The names that `load` takes; other sets are "uea/<Set>" of the UEA archive and "minari/<id>"."""
    from . import offline_rl, uea

    return [
        *_loaders(),
        *(f"uea/{name}" for name in uea.SIZES),
        *(f"d4rl/{env}-{quality}" for env in offline_rl.ENVIRONMENTS for quality in offline_rl.QUALITIES),
    ]


def load(name: str, data_dir: str | os.PathLike[str] | None = None, *, partial: bool = False, **options: Any) -> Splits:
    """Reads a data set.

    Args:
        name: one of `names()`.
        data_dir: the folder of all data sets; None is $FLOWFORMER_DATA, else ~/.cache/flowformer.
        partial: accept fewer cases than published; `info.differs` then says so.
        options: of the loader of this set.

    Raises `MissingDataError` with what to download, `DamagedDataError` with the file that cannot be read.
    """
    from . import offline_rl, uea

    folder = store.root(data_dir)
    family, _, rest = name.partition("/")
    if name in _loaders():
        return _loaders()[name](folder, partial=partial, **options)
    if family == "uea" and rest:
        # a folder that was named and is not there is a slip, which a copy from elsewhere would hide
        bundled = data_dir is None or folder.is_dir()
        return uea.load(rest, folder, partial=partial, bundled=bundled, **options)
    if family == "d4rl" and rest.partition("-")[0] in offline_rl.ENVIRONMENTS:
        return offline_rl.d4rl(rest, folder, partial=partial, **options)
    if family == "minari" and rest:
        return offline_rl.minari(rest, folder, **options)
    raise ValueError(f"unknown data set {name!r}{suggestion(name, names())}; known are {', '.join(names())}.")


def prepare(
    name: str, data_dir: str | os.PathLike[str] | None = None, *, progress: Progress | None = None, **options: Any
) -> None:
    """Generates a data set that is made rather than collected: "lra/listops" or "lra/pathfinder".

    Args:
        name, data_dir: as of `load`.
        progress: called with the parts done and all parts.
        options: of `listops.generate` or `pathfinder.generate`.
    """
    from . import lra

    check_options(name, options, generator_options(name))
    generate, home = _generators()[name]
    generate(lra.release(store.root(data_dir)) / home, progress=progress, **options)


def generator_options(name: str) -> list[str]:
    """The options that `prepare` takes for a data set."""
    made = _generators()
    if name not in made:
        raise ValueError(
            f"only {' and '.join(made)} are generated, got {name!r}{suggestion(name, made)}. For any other set, "
            "load says what to download."
        )
    return [option for option in inspect.getfullargspec(made[name][0]).kwonlyargs if option != "progress"]


def _generators() -> dict[str, tuple[Any, str]]:
    """What generates a data set, and where in a release it lies."""
    from . import listops, pathfinder

    return {
        "lra/listops": (listops.generate, "listops-1000"),
        "lra/pathfinder": (pathfinder.generate, "pathfinder32/curv_contour_length_14"),
    }


def _loaders() -> dict[str, Any]:
    from . import lra, text, vision

    return {
        **{f"lra/{task}": getattr(lra, task) for task in ("listops", "text", "retrieval", "image", "pathfinder")},
        "acl": lra.acl,
        "wikitext103": text.wikitext103,
        "enwik8": text.enwik8,
        "ptb": text.ptb,
        "cifar10": vision.cifar10,
        "imagenet": vision.imagenet,
    }
