"""The paper's tables filled in: mean and deviation over seeds, final and best evaluation, and the paper's number."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._utils import write_atomically
from .recipes import PUBLISHED
from .record import LOG, read_log
from .results import Row, same_experiment, write_csv
from .tables import FIGURES, TABLES, Cell, Column, Method, Table

_SIZES = {"top5": "top-5", "parameters": "parameters, M", "flops": "FLOPs, G"}


@dataclass(frozen=True)
class Score:
    """The mean over runs and its standard deviation, None for a single run."""

    mean: float
    deviation: float | None = None

    @classmethod
    def of(cls, values: Sequence[float]) -> Score:
        return cls(statistics.fmean(values), _deviation(values))

    def __str__(self) -> str:
        spread = "" if self.deviation is None else f" ± {self.deviation:.2f}"
        return f"{self.mean:.2f}{spread}"


def _deviation(values: Sequence[float]) -> float | None:
    """None for a single run; NaN if a run diverged, since `statistics` takes finite numbers only."""
    if len(values) < 2:
        return None
    return statistics.stdev(values) if all(map(math.isfinite, values)) else math.nan


@dataclass(frozen=True)
class Filled:
    """A cell with runs, or an average over the cells of a row.

    Args:
        final, best: over the runs.
        runs: a row each; of an average, none.
        paper, paper_deviation: None where the paper has no number, or the runs are not what it describes.
        difference: of what the paper reports, to its number.
    """

    final: Score
    best: Score
    runs: tuple[Row, ...]
    paper: float | None
    difference: float | None
    paper_deviation: float | None = None

    def __str__(self) -> str:
        ours = str(self.final) if self.final == self.best else f"{self.final} / {self.best}"
        seeds = f" ({len(self.runs)})" if len(self.runs) > 1 else ""
        if self.paper is None or self.difference is None:
            return ours + seeds
        spread = "" if self.paper_deviation is None else f" ± {self.paper_deviation}"
        return f"{ours}{seeds}; paper {self.paper}{spread}, {self.difference:+.2f}"


@dataclass(frozen=True)
class Line:
    """A method in a table, with what differs from its recipes; cells are by the label of their column."""

    label: str
    method: Method
    cells: dict[str, Filled]
    average: Filled | None
    figures: dict[str, str]


@dataclass(frozen=True)
class FilledTable:
    """A table with the lines and columns that have a run."""

    table: Table
    columns: tuple[Column, ...]
    lines: tuple[Line, ...]

    @property
    def average_label(self) -> str:
        counted = [column for column in self.columns if not column.stands_in]
        whole = len(counted) == len([column for column in self.table.columns if not column.stands_in])
        return "Avg" if whole else f"Avg of {len(counted)}"

    @property
    def note(self) -> str:
        """The sentence above the table: how to read its numbers."""
        runs = [run for line in self.lines for cell in line.cells.values() for run in cell.runs]
        chosen = sorted({run["best_chosen_on"] for run in runs} - {"nothing"})
        selected = f", selected on the {' or '.join(chosen)} set" if chosen else ""
        sentences = [f"Final evaluation / best evaluation{selected}."]
        if any(len(cell.runs) > 1 for line in self.lines for cell in line.cells.values()):
            sentences.append("Mean ± standard deviation over seeds (number of seeds).")
        if any(cell.paper is not None for line in self.lines for cell in line.cells.values()):
            sentences.append(f"Below: the paper's number, and our {self.table.compared} minus it.")
        differing = {run["data"]: run["differs"] for run in runs if run["differs"]}
        sentences += [f"The data of {name} differ: {differs}." for name, differs in sorted(differing.items())]
        return " ".join(sentences)

    def grid(self) -> tuple[list[str], list[tuple[str, list[Filled | str | None]]]]:
        """Headings, and lines of cells, in the paper's orientation."""
        averaged = any(line.average is not None for line in self.lines)
        names = [column.label for column in self.columns] + ([self.average_label] if averaged else [])

        def cell(line: Line, name: str) -> Filled | None:
            return line.cells.get(name) if name in line.cells or name != self.average_label else line.average

        if self.table.methods_across:
            headings = [line.label for line in self.lines]
            return headings, [(name, [cell(line, name) for line in self.lines]) for name in names]
        extra = [figure for figure in _SIZES if any(figure in line.figures for line in self.lines)]
        headings = [*names, *(_SIZES[figure] for figure in extra)]
        return headings, [
            (line.label, [*(cell(line, name) for name in names), *(line.figures.get(each) for each in extra)])
            for line in self.lines
        ]


def fill(rows: Iterable[Row]) -> list[FilledTable]:
    """The tables that have runs."""
    printed = [table for tables in TABLES.values() for table in tables if table != FIGURES]
    cells = [cell for table in printed for cell in table.cells()]
    runs: dict[Cell, dict[str, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        homes = [(cell, _beyond(cell, row)) for cell in cells if _is_of(cell, row)]
        exact = [(cell, beyond) for cell, beyond in homes if not beyond]
        for cell, beyond in exact or homes:
            runs[cell][beyond].append(row)
    return [filled for filled in (_fill(table, runs) for table in printed) if filled.lines]


def _is_of(cell: Cell, row: Row) -> bool:
    own = set(cell.overrides) <= set(row["overrides"].split())
    return own and (row["recipe"].removesuffix(PUBLISHED), row["attention"]) == (cell.column.recipe, cell.method.name)


def _beyond(cell: Cell, row: Row) -> str:
    """The overrides of a run that its cell does not have."""
    more = [each for each in row["overrides"].split() if each not in cell.overrides]
    return " ".join(([PUBLISHED] if row["recipe"].endswith(PUBLISHED) else []) + more)


def _fill(table: Table, runs: dict[Cell, dict[str, list[Row]]]) -> FilledTable:
    mine = {cell: runs[cell] for cell in table.cells() if cell in runs}
    columns = tuple(column for column in table.columns if any(cell.column == column for cell in mine))
    lines = []
    for method in table.methods:
        of_method = {cell.column: found for cell, found in mine.items() if cell.method == method}
        for beyond in sorted({words for found in of_method.values() for words in found}):
            found = {column: by_words[beyond] for column, by_words in of_method.items() if beyond in by_words}
            filled = {
                column: _cell(Cell(table, method, column), found[column], same_experiment(beyond))
                for column in columns
                if column in found
            }
            label = f"{method.label} ({beyond})" if beyond else method.label
            average = _average(table, method, filled, columns, same_experiment(beyond))
            of_line = [row for each in found.values() for row in each]
            figures = _figures(Cell(table, method, columns[0]), of_line, same_experiment(beyond))
            lines.append(Line(label, method, {column.label: x for column, x in filled.items()}, average, figures))
    return FilledTable(table, columns, tuple(lines))


def _cell(cell: Cell, rows: list[Row], comparable: bool) -> Filled:
    scores = {which: Score.of([row[which] for row in rows]) for which in ("final", "best")}
    paper = cell.paper() if comparable else None
    difference = None if paper is None else scores[cell.table.compared].mean - paper
    deviation = cell.paper("deviation") if comparable else None
    return Filled(scores["final"], scores["best"], tuple(rows), paper, difference, deviation)


def _average(
    table: Table, method: Method, filled: dict[Column, Filled], columns: Sequence[Column], comparable: bool
) -> Filled | None:
    """The average over the columns that are no stand-ins; None if one of them has no run, or there is only one."""
    counted = [column for column in columns if not column.stands_in]
    if table.family is None or len(counted) < 2 or any(column not in filled for column in counted):
        return None
    seeds = [{row["seed"]: row for row in filled[column].runs} for column in counted]
    shared = set.intersection(*(set(each) for each in seeds))
    scores = {}
    for which in ("final", "best"):
        mean = statistics.fmean(getattr(filled[column], which).mean for column in counted)
        by_seed = [statistics.fmean(each[seed][which] for each in seeds) for seed in sorted(shared)]
        whole = all(len(each) == len(shared) for each in seeds)
        scores[which] = Score(mean, _deviation(by_seed) if whole else None)
    paper = table.paper_average(method.name, counted) if comparable else None
    difference = None if paper is None else scores[table.compared].mean - paper
    return Filled(scores["final"], scores["best"], (), None if paper is None else round(paper, 2), difference)


def _figures(cell: Cell, rows: list[Row], comparable: bool) -> dict[str, str]:
    """Top-5, parameters and multiply-adds, ours and the paper's."""
    ours = {
        "top5": [row[f"top5_{cell.table.compared}"] for row in rows],
        "parameters": [row["parameters"] and row["parameters"] / 1e6 for row in rows],
        "flops": [row["multiply_adds"] and row["multiply_adds"] / 1e9 for row in rows],
    }
    shown: dict[str, str] = {}
    for figure in cell.table.figures:
        values = [value for value in ours.get(figure, []) if value is not None]
        if values:
            paper = cell.paper(figure) if comparable else None
            shown[figure] = f"{Score.of(values).mean:.1f}" + ("" if paper is None else f"; paper {paper}")
    return shown


def markdown(rows: list[Row]) -> str:
    """The filled tables, then every run with what differs from its recipe; the CSV has the rest."""
    blocks = ["# Results"]
    for table in fill(rows):
        headings, lines = table.grid()
        cells = [
            [name, *("" if cell is None else str(cell).replace("; paper", "<br>paper") for cell in line)]
            for name, line in lines
        ]
        blocks += [f"## {table.table.title}", table.note, _markdown_table(["", *headings], cells)]
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
    "training_seconds": "s",
    "device": "device",
    "folder": "folder",
}


def _run(row: Row) -> list[str]:
    """The cells of a run in the list of runs."""
    values = {**row, "training_seconds": f"{row['training_seconds'] or 0:.0f}"}
    return ["" if values[name] is None else str(values[name]) for name in _RUN_COLUMNS]


def _markdown_table(headings: list[str], lines: list[list[str]]) -> str:
    rows = ([text.replace("|", "\\|") for text in line] for line in [headings, ["---"] * len(headings), *lines])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def write(rows: list[Row], folder: Path, figures: Mapping[str, Path] | None = None) -> list[Path]:
    """results.csv, a row a run; results.md, the tables; results.html, the tables with curves, figures and provenance.

    Args:
        figures: images of the page by their captions.

    Returns: what was written; without matplotlib there is no page.
    """
    folder.mkdir(parents=True, exist_ok=True)
    csv, text, html = (folder / f"results.{kind}" for kind in ("csv", "md", "html"))
    write_csv(rows, csv)
    write_atomically(text, markdown(rows) + "\n")
    try:
        write_atomically(html, page(rows, figures or {}))
    except ImportError:
        return [csv, text]
    return [csv, text, html]


def page(rows: list[Row], figures: Mapping[str, Path]) -> str:
    """The page of results as HTML."""
    from ..viz.page import results_page

    numbers = {id(row): i for i, row in enumerate(rows)}
    tables: list[dict[str, Any]] = []
    for table in fill(rows):
        headings, lines = table.grid()
        cells = [(name, [_page_cell(cell, table.table.compared, numbers) for cell in line]) for name, line in lines]
        tables.append({"title": table.table.title, "note": table.note, "headings": headings, "lines": cells})
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
    headings = list(_RUN_COLUMNS.values())[1:]
    tables.append({"title": "Runs", "note": "Each finished run.", "headings": headings, "lines": every})
    runs = [
        {
            "name": f"{row['recipe']}, {row['attention']}, seed {row['seed']}: {row['final']:.2f} / {row['best']:.2f}",
            "facts": {name: str(value) for name, value in row.items() if value not in (None, "")},
            "log": read_log(Path(row["folder"])) if (Path(row["folder"]) / LOG).is_file() else [],
        }
        for row in rows
    ]
    return results_page("Flowformer: results", tables, runs, figures)


def _page_cell(cell: Filled | str | None, compared: str, numbers: dict[int, int]) -> dict[str, Any] | None:
    if cell is None:
        return None
    text, _, paper = str(cell).partition("; ")
    if isinstance(cell, str):
        return {"text": text, "paper": paper, "value": float(text), "runs": []}
    runs = [numbers[id(row)] for row in cell.runs]
    return {"text": text, "paper": paper, "value": getattr(cell, compared).mean, "runs": runs}
