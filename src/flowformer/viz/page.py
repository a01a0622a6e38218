"""The results page: one self-contained HTML file with sortable tables, curves, figures and provenance.

Its layout, style and script are in page.html, in which `results_page` fills in the title and the data. `read_page`
reads the runs and the figures of a page back.
"""

from __future__ import annotations

import base64
import html
import json
import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from .curves import curve_points

POINTS = 300  # maximum number of points of a curve, which is more than a screen resolves
Curves = dict[str, list[list[float]]]  # points (update, value) by the name of the curve
_DATA = re.compile(r'<script type="application/json" id="data">(.*?)</script>', re.DOTALL)
_PNG = "data:image/png;base64,"


class Page(NamedTuple):
    """What a page keeps, as `results_page` took it."""

    runs: list[dict[str, Any]]
    figures: dict[str, bytes]


def results_page(
    title: str,
    tables: Sequence[Mapping[str, Any]],
    runs: Sequence[Mapping[str, Any]],
    figures: Mapping[str, bytes],
) -> str:
    """Return the page as HTML.

    Args:
        title: title of the page.
        tables: each with "title", "note" (paragraphs separated by empty lines), "headings" and "lines", and the name of
            a line that stays "last" when the table is sorted. A line is a name, which has the first heading, and its
            cells; a cell is None or has "text", "value" (to sort by; text is aligned to the left), "below" (smaller
            lines of text) and "runs" (indices into `runs`).
        runs: each with "name", "facts" (provenance to show) and "curves" (see `curves`).
        figures: PNG images by caption.
    """
    data = {
        "tables": _finite(tables),
        "runs": list(runs),
        "figures": [
            {"caption": caption, "source": _PNG + base64.b64encode(image).decode()}
            for caption, image in figures.items()
        ],
    }
    # escape "<", so that </script> in the data does not end the script element
    payload = json.dumps(data, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")
    template = resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    return template.replace("@title@", html.escape(title)).replace("@data@", payload)


def _finite(value: Any) -> Any:
    """Replace NaN and infinity, which diverged runs have and JSON cannot represent, by None, recursively."""
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_page(path: Path) -> Page:
    """Return the runs and the figures of a page."""
    found = _DATA.search(path.read_text(encoding="utf-8", errors="replace"))
    try:
        data = json.loads(found[1] if found else "")
        return Page(
            [{"name": run["name"], "facts": {**run["facts"]}, "curves": {**run["curves"]}} for run in data["runs"]],
            {each["caption"]: base64.b64decode(each["source"].removeprefix(_PNG)) for each in data["figures"]},
        )
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is no page of results, or damaged. Accepted: a results.html of flowformer results --out."
        ) from error


def curves(log: Sequence[Mapping[str, Any]]) -> Curves:
    """Return the training loss and each evaluation score of a log, without NaN and infinity."""
    every: Curves = defaultdict(list)
    for split, score, step, value in curve_points(log):
        if math.isfinite(value):
            every[f"{split} {score}"].append([step, value])
    return {name: _thinned(points) for name, points in every.items() if len(points) > 1}


def _thinned(points: list[list[float]]) -> list[list[float]]:
    """Keep every n-th point, at most `POINTS` of them, counted from the last one: it is the result of the run."""
    step = -(-len(points) // POINTS)
    return points[::-step][::-1]
