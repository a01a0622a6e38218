"""The paper's tables filled in: mean and deviation over seeds, final and best evaluation, and the paper's number.

The overrides of a run are split into its protocol, such as epochs=8, and its arithmetic, such as precision=tf32. Each
protocol has a table with all methods, the recipe's protocol first. There, each method has runs of a single arithmetic,
with a footnote if it differs from the recipe's, so that no mean mixes two kinds of runs. Runs in other arithmetic
follow in tables of further runs.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from .._utils import moved
from .paper import paper_average
from .recipes import PUBLISHED
from .results import Row, is_arithmetic, same_experiment
from .tables import DATA_OPTIONS, FIGURES, TABLES, Cell, Column, Evaluation, Method, Table

_SIZES = {"top5": "top-5", "parameters": "parameters, M", "flops": "FLOPs, G"}
_SUPERSCRIPTS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


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
    """The standard deviation: None for a single run; NaN if a run diverged, since `statistics` needs finite numbers."""
    if len(values) < 2:
        return None
    return statistics.stdev(values) if all(map(math.isfinite, values)) else math.nan


@dataclass(frozen=True)
class Filled:
    """A cell with runs, or an average over the cells of a line.

    Args:
        compared: which evaluation the paper reports.
        final, best: scores of the two evaluations over the runs.
        runs: the rows of the runs; empty for an average.
        paper, paper_deviation: the paper's numbers; None if it has none, or the runs are another experiment.
        half_target: the score of episodes that are played with half of the target return; None for other tasks.
    """

    compared: Evaluation
    final: Score
    best: Score
    runs: tuple[Row, ...]
    paper: float | None = None
    paper_deviation: float | None = None
    half_target: Score | None = None

    @property
    def score(self) -> Score:
        return self.best if self.compared == "best" else self.final

    @property
    def difference(self) -> float | None:
        return None if self.paper is None else self.score.mean - self.paper

    @property
    def other(self) -> str | None:
        """The evaluation that is not compared with the paper; None if both are the same."""
        if self.final == self.best:
            return None
        return f"final {self.final}" if self.compared == "best" else f"best {self.best}"

    @property
    def texts(self) -> list[str]:
        """The lines of the cell: our number, then the paper's, then our other evaluation and the other target."""
        seeds = f" ({len(self.runs)})" if len(self.runs) > 1 else ""
        texts = [f"{self.score}{seeds}"]
        if self.paper is not None:
            spread = "" if self.paper_deviation is None else f" ± {self.paper_deviation}"
            texts.append(f"paper {self.paper}{spread}, {self.difference:+.2f}")
        other_target = None if self.half_target is None else f"half target {self.half_target}"
        return [*texts, *(each for each in (self.other, other_target) if each is not None)]


@dataclass(frozen=True)
class Line:
    """A method in a table.

    Args:
        arithmetic: the overrides of the arithmetic that its runs share.
        cells: the cells by the label of their column.
        average: the average over the columns, or None.
        figures: further numbers by their headings, each as lines: our number, then the paper's.
    """

    method: Method
    arithmetic: str
    cells: dict[str, Filled]
    average: Filled | None
    figures: dict[str, list[str]]


@dataclass(frozen=True)
class FilledTable:
    """A table with the lines and columns that have a run of one protocol.

    Args:
        protocol: the overrides that change the experiment; empty for the recipe's protocol.
        arithmetic: in a table of further runs, the arithmetic of all its runs; None in the table of all methods, where
            footnotes name the arithmetic of each method.
    """

    table: Table
    protocol: str
    arithmetic: str | None
    columns: tuple[Column, ...]
    lines: tuple[Line, ...]

    @property
    def title(self) -> str:
        overrides = [self.protocol] if self.protocol else []
        if self.arithmetic is not None:
            overrides.append(self.arithmetic or "the recipe's arithmetic")
        return f"{self.table.title}: {', '.join(overrides)}" if overrides else self.table.title

    @property
    def cells(self) -> list[Filled]:
        return [cell for line in self.lines for cell in line.cells.values()]

    @property
    def runs(self) -> list[Row]:
        return [run for cell in self.cells for run in cell.runs]

    @property
    def footnotes(self) -> list[str]:
        """The arithmetic overrides that have a footnote."""
        marked = self.lines if self.arithmetic is None else ()
        return list(dict.fromkeys(line.arithmetic for line in marked if line.arithmetic))

    def label(self, line: Line) -> str:
        """The label of a line: its method, with the mark of its footnote."""
        if line.arithmetic not in self.footnotes:
            return line.method.label
        return f"{line.method.label} {_mark(self.footnotes.index(line.arithmetic))}"

    @property
    def average_label(self) -> str:
        counted = [column for column in self.columns if column in self.table.averaged]
        return "Avg" if len(counted) == len(self.table.averaged) else f"Avg of {len(counted)}"

    @property
    def note(self) -> str:
        """The text above the table: how to read its numbers, then each footnote as a paragraph."""
        chosen = {run["best_chosen_on"] for run in self.runs}
        sets = sorted({"test": "test", "valid": "validation"}[each] for each in chosen - {"nothing"})
        best = f"best evaluation, selected on the {' or '.join(sets)} set" if sets else "best evaluation"
        final = "final evaluation"
        compared, other = (best, final) if self.table.compared == "best" else (final, best)
        below = ["the paper's number and ours minus it"] if any(cell.paper is not None for cell in self.cells) else []
        if any(cell.other for cell in self.cells):
            below.append(f"the {other}")
        if any(cell.half_target for cell in self.cells):
            below.append("the score with half of the target return")
        sentences = [f"{compared.capitalize()}{'; below it ' if below else ''}{', then '.join(below)}."]
        if "nothing" in chosen and len(chosen) > 1:
            sentences.append("Methods without attention are evaluated once, at the end.")
        if any(len(cell.runs) > 1 for cell in self.cells):
            sentences.append("Mean ± standard deviation over seeds (number of seeds).")
        if self.table.remark and any(cell.paper is not None for cell in self.cells):
            sentences.append(self.table.remark)
        if PUBLISHED in self.protocol.split():
            sentences.append("These runs do what the released code does where it differs from the paper.")
        if not same_experiment(self.protocol):
            sentences.append("These runs are not the recipe's experiment, so the paper's numbers are left out.")
        if self.arithmetic is not None:
            sentences.append("Further runs: a table above has more of these methods, in other arithmetic.")
        environments = sorted({run["environment"] for run in self.runs if run["environment"]})
        if environments:
            sentences.append(f"Episodes are played in {', '.join(environments)}.")
        notes = {run["data"]: run["note"] for run in self.runs if run["note"]}
        sentences += [f"{name}: {note}." for name, note in sorted(notes.items())]
        differing: dict[str, set[str]] = {}
        for run in self.runs:
            if run["differs"]:
                differing.setdefault(run["differs"], set()).add(run["data"])
        sentences += [f"The data of {', '.join(sorted(names))} differ: {how}." for how, names in differing.items()]
        footnotes = [
            f"{_mark(i)} With {overrides}, which changes the arithmetic only."
            for i, overrides in enumerate(self.footnotes)
        ]
        return "\n\n".join([" ".join(sentences), *footnotes])

    def grid(self) -> tuple[list[str], list[tuple[str, list[Filled | list[str] | None]]]]:
        """The headings, and the label and cells of each line, in the paper's orientation."""
        averaged = any(line.average is not None for line in self.lines)
        names = [column.label for column in self.columns] + ([self.average_label] if averaged else [])

        def cell(line: Line, name: str) -> Filled | None:
            return line.cells.get(name) if name in line.cells or name != self.average_label else line.average

        if self.table.methods_across:
            headings = [self.label(line) for line in self.lines]
            return headings, [(name, [cell(line, name) for line in self.lines]) for name in names]
        headings = [_heading(self.table, column, figure) for column in self.columns for figure in _SIZES]
        extra = [heading for heading in headings if any(heading in line.figures for line in self.lines)]
        return [*names, *extra], [
            (self.label(line), [*(cell(line, name) for name in names), *(line.figures.get(each) for each in extra)])
            for line in self.lines
        ]


def _heading(table: Table, column: Column, figure: str) -> str:
    """The heading of a figure; in a table with several columns it names the column, since model sizes differ."""
    return _SIZES[figure] if len(table.columns) == 1 else f"{column.label}, {_SIZES[figure]}"


def _mark(footnote: int) -> str:
    return str(footnote + 1).translate(_SUPERSCRIPTS)


# the runs of a method in a table: by arithmetic, then by column
Runs = dict[str, dict[Column, list[Row]]]


def fill(rows: Iterable[Row]) -> list[FilledTable]:
    """The tables that have runs, except tables whose runs are all in earlier tables."""
    printed = [table for tables in TABLES.values() for table in tables if table != FIGURES]
    cells = [cell for table in printed for cell in table.cells()]
    by_table: dict[Table, dict[str, dict[Method, Runs]]] = {table: {} for table in printed}
    for row in rows:
        matches = [(cell, *_extra_overrides(cell, row)) for cell in cells if _belongs_to(cell, row)]
        # a row may match a cell with overrides and one without: it goes to the cells that explain most of its overrides
        nearest = min((len(protocol) for _, protocol, _ in matches), default=0)
        for cell, protocol, arithmetic in matches:
            if len(protocol) == nearest:
                method_runs = by_table[cell.table].setdefault(" ".join(protocol), {}).setdefault(cell.method, {})
                method_runs.setdefault(" ".join(arithmetic), {}).setdefault(cell.column, []).append(row)
    shown: set[int] = set()
    filled = []
    for table, protocols in by_table.items():
        for overrides in sorted(protocols):
            for each in _tables(table, overrides, protocols[overrides]):
                runs = {id(run) for run in each.runs}
                if not runs <= shown:
                    filled.append(each)
                shown |= runs
    return filled


def _belongs_to(cell: Cell, row: Row) -> bool:
    """Whether a run is of the recipe and method of a cell, and has all overrides of the cell."""
    has_overrides = _cell_overrides(cell) <= set(row["overrides"].split())
    is_of_recipe = row["recipe"] in (cell.recipe, f"{cell.recipe}{PUBLISHED}")
    return has_overrides and is_of_recipe and row["attention"] == cell.method.name


def _cell_overrides(cell: Cell) -> set[str]:
    """The overrides of a cell, as `results.differences` writes them."""
    return {
        each if cell.is_attention or each.startswith(DATA_OPTIONS) else f"options.{each}" for each in cell.overrides
    }


def _extra_overrides(cell: Cell, row: Row) -> tuple[list[str], list[str]]:
    """The overrides of a run that its cell does not have: those of the protocol, and those of the arithmetic."""
    extra = [each for each in row["overrides"].split() if each not in _cell_overrides(cell)]
    protocol = [] if row["recipe"] == cell.recipe else [PUBLISHED]
    protocol += [each for each in extra if not is_arithmetic(each)]
    return protocol, [each for each in extra if is_arithmetic(each)]


def _tables(table: Table, protocol: str, runs: dict[Method, Runs]) -> Iterator[FilledTable]:
    """The table of all methods, then one for each arithmetic with further runs."""
    chosen = {method: _fullest(runs[method]) for method in table.methods if method in runs}
    first = [(method, arithmetic, runs[method][arithmetic]) for method, arithmetic in chosen.items()]
    yield _table(table, protocol, None, first)
    further = [
        (method, arithmetic, cells)
        for method in chosen
        for arithmetic, cells in runs[method].items()
        if arithmetic != chosen[method]
    ]
    for each in sorted({arithmetic for _, arithmetic, _ in further}):
        yield _table(table, protocol, each, [entry for entry in further if entry[1] == each])


def _table(
    table: Table,
    protocol: str,
    arithmetic: str | None,
    entries: list[tuple[Method, str, dict[Column, list[Row]]]],
) -> FilledTable:
    """The table with these entries, each a method, its arithmetic, and its runs by column."""
    columns = tuple(column for column in table.columns if any(column in cells for _, _, cells in entries))
    lines = (_line(table, method, each, cells, columns, protocol) for method, each, cells in entries)
    return FilledTable(table, protocol, arithmetic, columns, tuple(lines))


def _fullest(runs: Runs) -> str:
    """The arithmetic with the most columns, then with the most runs; in a tie, the recipe's arithmetic."""
    return min(runs, key=lambda each: (-len(runs[each]), -sum(map(len, runs[each].values())), each))


def _line(
    table: Table,
    method: Method,
    arithmetic: str,
    runs: dict[Column, list[Row]],
    columns: Sequence[Column],
    protocol: str,
) -> Line:
    comparable = same_experiment(protocol)
    filled = {
        column: _cell(Cell(table, method, column), runs[column], comparable) for column in columns if column in runs
    }
    average = _average(table, method, filled, columns, comparable)
    figures = {
        heading: texts
        for column in filled
        for heading, texts in _figures(Cell(table, method, column), runs[column], comparable).items()
    }
    return Line(method, arithmetic, {column.label: x for column, x in filled.items()}, average, figures)


def _cell(cell: Cell, rows: list[Row], comparable: bool) -> Filled:
    final, best = (Score.of([row[which] for row in rows]) for which in ("final", "best"))
    paper, deviation = (cell.paper(), cell.paper("deviation")) if comparable else (None, None)
    half = [row[f"half_target_{cell.table.compared}"] for row in rows]
    half_target = None if None in half else Score.of(half)
    return Filled(cell.table.compared, final, best, tuple(rows), paper, deviation, half_target)


def _average(
    table: Table, method: Method, filled: dict[Column, Filled], columns: Sequence[Column], comparable: bool
) -> Filled | None:
    """The average over `Table.averaged`, as far as it has runs; None if the method lacks a column, or has only one."""
    counted = [column for column in columns if column in table.averaged]
    if table.family is None or len(counted) < 2 or any(column not in filled for column in counted):
        return None
    seeds = [{row["seed"]: row for row in filled[column].runs} for column in counted]
    shared = set.intersection(*(set(each) for each in seeds))
    same_seeds = all(len(each) == len(shared) for each in seeds)

    def score(which: str) -> Score:
        mean = statistics.fmean(getattr(filled[column], which).mean for column in counted)
        by_seed = [statistics.fmean(each[seed][which] for each in seeds) for seed in sorted(shared)]
        return Score(mean, _deviation(by_seed) if same_seeds else None)

    paper = table.paper_average(method, counted) if comparable else None
    deviation = paper_average(table.family, method.name, "deviation") if tuple(counted) == table.columns else None
    rounded = None if paper is None else round(paper, 2)
    return Filled(table.compared, score("final"), score("best"), (), rounded, None if paper is None else deviation)


def _figures(cell: Cell, rows: list[Row], comparable: bool) -> dict[str, list[str]]:
    """Top-5 accuracy, parameters and multiply-adds by their headings, each as lines: ours, then the paper's."""
    ours = {
        "top5": [row[f"top5_{cell.table.compared}"] for row in rows],
        "parameters": [row["parameters"] and row["parameters"] / 1e6 for row in rows],
        "flops": [row["multiply_adds"] and row["multiply_adds"] / 1e9 for row in rows],
    }
    shown: dict[str, list[str]] = {}
    for figure in cell.table.figures:
        values = [value for value in ours.get(figure, []) if value is not None]
        if values:
            paper = cell.paper(figure) if comparable else None
            heading = _heading(cell.table, cell.column, figure)
            mean = Score.of(values).mean
            shown[heading] = [
                f"{mean:.1f}" if mean >= 1 else f"{mean:.3f}",
                *([] if paper is None else [f"paper {paper}"]),
            ]
    return shown


__getattr__ = moved(__name__, {name: f"flowformer.train.report.{name}" for name in ("markdown", "page", "write")})
