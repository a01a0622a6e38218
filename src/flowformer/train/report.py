"""The report of finished runs: the filled tables as Markdown and as a page, with a CSV of the runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .._utils import write_atomically
from .record import LOG, read_log
from .results import Row, has_folder, identity, is_page, write_csv
from .speeds import SpeedTable
from .summary import Filled, FilledTable, fill


def markdown(rows: list[Row], speeds: Iterable[SpeedTable] = ()) -> str:
    """The filled tables, then a list of all runs with their differences from the recipe; the CSV has more columns."""
    blocks = ["# Results"]
    shown: list[FilledTable | SpeedTable] = [*fill(rows), *speeds]
    for table in shown:
        headings, lines = table.grid()
        cells = [[name, *("<br>".join(_texts(cell)) for cell in line)] for name, line in lines]
        blocks += [f"## {table.title}", table.note, _markdown_table(["", *headings], cells)]
    if rows:
        blocks += ["## Runs", _markdown_table(list(_RUN_COLUMNS.values()), [_run(row) for row in rows])]
    return "\n\n".join(blocks)


_RUN_COLUMNS = {
    "recipe": "recipe",
    "attention": "attention",
    "seed": "seed",
    "metric": "metric",
    "overrides": "differs from the recipe",
    "final": "final",
    "best": "best",
    "paper": "paper",
    "training_seconds": "training, s",
    "device": "device",
    "folder": "folder",
}


def _run(row: Row) -> list[str]:
    """The cells of a run in the list of runs."""
    values = {
        **row,
        "final": f"{row['final']:.2f}",
        "best": f"{row['best']:.2f}",
        "training_seconds": f"{row['training_seconds'] or 0:.0f}",
    }
    return ["" if values[name] is None else str(values[name]) for name in _RUN_COLUMNS]


def _markdown_table(headings: list[str], lines: list[list[str]]) -> str:
    rows = ([text.replace("|", "\\|") for text in line] for line in [headings, ["---"] * len(headings), *lines])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def write(
    rows: list[Row],
    folder: Path,
    figures: Mapping[str, Path] | None = None,
    sources: Iterable[Path] = (),
    speeds: Sequence[SpeedTable] = (),
) -> list[Path]:
    """Write results.csv, with a row per run; results.md, with the tables; and results.html, with tables and curves.

    Args:
        rows: the runs, from `collect`.
        figures: images for the HTML page by their captions.
        sources: where the runs come from, as for `collect`; pages among them keep the curves of runs without a folder,
            and figures that are not drawn anew.
        speeds: further tables, of benchmarks.

    Returns: the files that were written; without matplotlib there is no HTML page.
    """
    folder.mkdir(parents=True, exist_ok=True)
    csv, text, html = (folder / f"results.{kind}" for kind in ("csv", "md", "html"))
    write_csv(rows, csv)
    write_atomically(text, markdown(rows, speeds) + "\n")
    try:
        write_atomically(html, page(rows, figures or {}, sources, speeds))
    except ImportError:
        return [csv, text]
    return [csv, text, html]


def page(
    rows: list[Row], figures: Mapping[str, Path], sources: Iterable[Path] = (), speeds: Iterable[SpeedTable] = ()
) -> str:
    """The page of results as HTML."""
    from ..viz.page import curves, read_page, results_page

    earlier = [read_page(path) for path in sources if is_page(path)]
    earlier_runs = [run for each in earlier for run in each.runs]
    kept = {identity(run["facts"]): run["curves"] for run in reversed(earlier_runs) if run["curves"]}
    images = {caption: image for each in reversed(earlier) for caption, image in each.figures.items()}
    images |= {caption: path.read_bytes() for caption, path in figures.items()}
    numbers = {id(row): i for i, row in enumerate(rows)}
    tables: list[dict[str, Any]] = []
    shown: list[FilledTable | SpeedTable] = [*fill(rows), *speeds]
    for table in shown:
        headings, lines = table.grid()
        tables.append(
            {
                "title": table.title,
                "note": table.note,
                "headings": ["", *headings],
                "lines": [(name, [_page_cell(cell, numbers) for cell in line]) for name, line in lines],
                "last": table.average_label,
            }
        )
    every = [
        (
            row["recipe"],
            [
                {"text": text, "value": row[name] if isinstance(row[name], int | float) else text, "runs": [number]}
                for name, text in list(zip(_RUN_COLUMNS, _run(row), strict=True))[1:]
            ],
        )
        for number, row in enumerate(rows)
    ]
    headings = list(_RUN_COLUMNS.values())
    tables.append({"title": "Runs", "note": "Each finished run.", "headings": headings, "lines": every})
    runs = [
        {
            "name": f"{row['recipe']}, {row['attention']}, seed {row['seed']}: "
            f"final {row['final']:.2f}, best {row['best']:.2f}",
            "facts": {name: str(value) for name, value in row.items() if value not in (None, "")},
            "curves": (
                curves(read_log(Path(row["folder"])))
                if has_folder(row) and (Path(row["folder"]) / LOG).is_file()
                else kept.get(identity(row), {})
            ),
        }
        for row in rows
    ]
    return results_page("Flowformer: results", tables, runs, images)


def _texts(cell: Filled | list[str] | None) -> list[str]:
    return cell.texts if isinstance(cell, Filled) else cell or []


def _page_cell(cell: Filled | list[str] | None, numbers: dict[int, int]) -> dict[str, Any] | None:
    if cell is None:
        return None
    text, *below = _texts(cell)
    if isinstance(cell, Filled):
        return {"text": text, "below": below, "value": cell.score.mean, "runs": [numbers[id(row)] for row in cell.runs]}
    value = float(text) if text[0].isdigit() else None  # None for a text such as OOM
    return {"text": text, "below": below, "value": value, "runs": []}
