"""The demo: the paper's time-series Flowformer on JapaneseVowels, and softmax attention trained the same way."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from .. import data
from .._utils import write_atomically
from . import recipes
from .config import Schedule, TrainConfig
from .figures import draw_maps
from .loop import Report, train

ATTENTIONS = ("flow", "softmax")
FIGURE = "competition.png"


def config(attention: str) -> TrainConfig:
    """The recipe with 8 instead of 100 epochs, cosine decay of the learning rate, and evaluations every other epoch."""
    full = recipes.get("uea/JapaneseVowels")
    return replace(
        full,
        model=replace(full.model, attention=attention),
        schedule=Schedule("cosine", warmup=17),
        epochs=8,
        eval_every=34,
    )


def unused(folder: Path) -> Path:
    """The folder if it does not exist, else the first of folder-2, folder-3 and so on that does not exist."""
    number, chosen = 2, folder
    while chosen.exists():
        number, chosen = number + 1, folder.with_name(f"{folder.name}-{number}")
    return chosen


def run(folder: Path, report: Callable[[str], Report]) -> dict[str, dict[str, Any]]:
    """Train with each attention, and draw the competition that Flow-Attention has learned.

    Args:
        folder: where to write: a subfolder with the run of each attention, the figure, and demo.json with both results.
        report: returns for the name of an attention the callback for the records of its run, see `train`.

    Returns: the result of each attention.
    """
    if any((folder / name).exists() for name in ATTENTIONS):
        raise FileExistsError(f"{folder} has a demo already. Choose another folder.")
    splits = data.load("uea/JapaneseVowels")
    results = {name: train(config(name), folder / name, splits=splits, report=report(name)) for name in ATTENTIONS}
    draw_maps(folder / "flow", splits=splits).savefig(folder / FIGURE, dpi=110)
    write_atomically(folder / "demo.json", json.dumps(results, indent=2) + "\n")
    return results
