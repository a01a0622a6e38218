"""Commands for several runs: reproduce, results, plot."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from .app import STARTED, DataDir, Json, advice, app, command, console, errors
from .progress import queue_progress

if TYPE_CHECKING:
    from ..nn import Degeneracy
    from ..train.reproduce import Job


@command(app, "reproduce")
def reproduce(
    table: Annotated[str, typer.Argument(help="uea, lra, language, vision, rl, ablations, speed, figures or all.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="For every recipe, such as precision=tf32; results say so."),
    ] = None,
    cells: Annotated[
        list[str] | None,
        typer.Option(help="Only cells whose name matches, as '*JapaneseVowels*' or 'lra/text/*'. Repeatable."),
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, max=1000, help="Runs of a cell; default as many as the table says.")
    ] = None,
    minutes: Annotated[
        float | None, typer.Option(help="Stop within so many minutes; unfinished trainings leave checkpoints.")
    ] = None,
    pack: Annotated[
        int | None, typer.Option(min=1, help="Runs at the same time; default eight, fewer on few cores.")
    ] = None,
    out: Annotated[
        Path, typer.Option(file_okay=False, help="The folder of the queue, which machines may share.")
    ] = Path("runs/reproduce"),
    known: Annotated[
        list[Path] | None,
        typer.Option(help="A results.csv or results.html, whose runs are in the tables and not run again. Repeatable."),
    ] = None,
    data: DataDir = None,
    show: Annotated[bool, typer.Option("--list", help="Show the cells and their states, and run nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Run the unfinished cells of a table of the paper, several at a time, and print it with the paper's numbers.

    The command may be stopped or killed at any time; run it again to resume. Several machines may share the folder, or
    each run some cells in a folder of its own; [bold]flowformer results[/bold] merges the folders.
    """
    from ..train import reproduce as queue
    from ..train.loop import Interrupted
    from ..train.results import collect

    finished = collect(known or ())
    jobs = queue.jobs(
        table, out, cells=cells or (), seeds=seeds, overrides=overrides or (), data_dir=data, finished=finished
    )
    if show:
        _print_jobs(jobs, as_json)
        return
    terminal = errors if as_json else console
    say = functools.partial(terminal.print, highlight=False, soft_wrap=True)
    out.mkdir(parents=True, exist_ok=True)
    for reason, names in _blocked(jobs).items():
        say(f"{reason}: {', '.join(names)}")
    running = queue.Queue(jobs, out, pack or queue.default_pack(), minutes, STARTED, say)
    try:
        with queue_progress(terminal) as running.watch:
            running.run()
    except Interrupted as stopped:
        errors.print(str(stopped))
        raise typer.Exit(130) from stopped
    finally:
        found = _Found([out, *(known or ())])
        if found:
            written = found.write(out, data)
    if found:
        found.print(as_json)
        say(f"Written: {', '.join(map(str, written))}")
    unfinished = [job for job in jobs if job.blocked is None and not job.is_done]
    if running.stopped is not None or len(unfinished) > len(running.failed):
        reason = running.stopped or "they were stopped one by one"
        say(f"{len(unfinished)} runs are left: {reason}. Run the same command to resume.")
    if running.failed:
        raise ValueError(f"{len(running.failed)} runs failed; run the same command to try them again.")
    if all(job.blocked is not None and not job.is_done for job in jobs):
        raise ValueError(f"none of these cells can run. {_HOW_TO_UNBLOCK}")


class _Found:
    """The finished runs and the tables of speeds of some sources. It is False if there are none.

    Args:
        sources: as for `collect`; also CSV files of `flowformer bench lra`.
    """

    def __init__(self, sources: list[Path]) -> None:
        from ..train import speeds
        from ..train.results import collect

        self.speed_files = [path for source in sources for path in speeds.find(source)]
        self.speeds = [speeds.read(path) for path in self.speed_files]
        self.sources = [source for source in sources if source not in self.speed_files]
        self.rows = collect(self.sources)

    def __bool__(self) -> bool:
        return bool(self.rows or self.speeds)

    def write(self, folder: Path, data: Path | None) -> list[Path]:
        """Write the tables, then draw the figures and add them; return the files."""
        from ..train import report

        report.write(self.rows, folder, {}, self.sources, self.speeds)  # first, since drawing may take minutes
        figures = self._draw(folder / "figures", data)
        return report.write(self.rows, folder, figures, self.sources, self.speeds)

    def _draw(self, folder: Path, data: Path | None) -> dict[str, Path]:
        """Draw the figures and return their paths by caption; print which are left out, and the reason."""
        from ..train.figures import draw_figures, draw_speeds

        figures, left_out = draw_figures(self.rows, folder, data)
        for caption, error in left_out.items():
            errors.print(f"A figure is left out, {caption}: {advice(error)}", soft_wrap=True, highlight=False)
        for path in self.speed_files:
            figures |= draw_speeds(path, folder)
        return figures

    def print(self, as_json: bool) -> None:
        from ..train import report

        print(json.dumps(self.rows) if as_json else report.markdown(self.rows, self.speeds))


_HOW_TO_UNBLOCK = (
    "Where to get data: flowformer data list, with the same --data. Packages: pip install 'flowformer[all]'."
)


def _blocked(jobs: list[Job]) -> dict[str, list[str]]:
    """Return the names of the cells that cannot run, grouped by the reason, such as missing data."""
    reasons: dict[str, list[str]] = {}
    for job in jobs:
        if job.blocked is not None and job.name not in reasons.setdefault(job.blocked, []):
            reasons[job.blocked].append(job.name)
    return reasons


# columns of `reproduce --list`
_COLUMNS: dict[str, Callable[[Job], str]] = {
    "state": lambda job: job.state().partition(":")[0],  # reasons after the colon are printed below the table
    "seed": lambda job: str(job.seed),
    "paper": lambda job: "" if job.paper is None else str(job.paper),
    "minutes": lambda job: f"{job.minutes:g}",
    "cell": lambda job: job.name,  # the longest text is in the last column, where a narrow terminal may wrap it
}


def _print_jobs(jobs: list[Job], as_json: bool) -> None:
    if as_json:
        names = ("name", "seed", "minutes", "paper")
        print(json.dumps([{**{n: getattr(job, n) for n in names}, "state": job.state()} for job in jobs]))
        return
    lines = [list(_COLUMNS), *([column(job) for column in _COLUMNS.values()] for job in jobs)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        padded = (text.ljust(width) for text, width in zip(line, widths, strict=True))
        console.print("  ".join(padded).rstrip(), soft_wrap=True, highlight=False)
    reasons = [f"{reason}: {len(cells)} cells" for reason, cells in _blocked(jobs).items()]
    failures = [f"{job.name}, seed {job.seed}, {job.state()}" for job in jobs if job.state().startswith("failed")]
    if reasons:
        reasons.append(_HOW_TO_UNBLOCK)
    for text in (*reasons, *failures):
        console.print(text, soft_wrap=True, highlight=False)
    todo = [job for job in jobs if job.blocked is None and not job.is_done]
    if todo:
        one, eight = (sum(job.minutes / (1 if job.alone else pack) for job in todo) for pack in (1, 8))
        console.print(f"About {one:.0f} minutes are left on an H200, or {eight:.0f} with eight runs at the same time.")


@command(app, "results")
def results(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Folders with runs below them, results.csv or results.html files, CSVs of bench lra; default runs."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(file_okay=False, help="Write results.csv, results.md and results.html into this folder."),
    ] = None,
    data: DataDir = None,
    as_json: Json = False,
) -> None:
    """Collect finished runs into the paper's tables, next to the paper's numbers; merges folders of several machines.

    Numbers are means over seeds, of the final evaluation and of the best one. Runs with overrides are in separate
    tables without the paper's numbers; a footnote marks overrides that change only the arithmetic, such as precision.
    An earlier results.html keeps the curves and figures of runs whose folders are gone.
    """
    sources = runs or [Path("runs")]
    found = _Found(sources)
    if not found:
        raise ValueError(f"{', '.join(map(str, sources))} has no finished run, which is a folder with a result.json.")
    if out is not None:
        written = found.write(out, data)
        errors.print(f"Written: {', '.join(map(str, written))}", soft_wrap=True, highlight=False)
    found.print(as_json)


@command(app, "plot")
def plot(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs, or the CSV of a benchmark.")],
    out: Annotated[Path | None, typer.Option(help="The figure; default curves.png in the first folder.")] = None,
    maps: Annotated[
        bool, typer.Option("--maps", help="Competition and allocation of a model instead of curves.")
    ] = False,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare",
            help="Source weights of the attention of each run on the same test examples, and how even they are.",
        ),
    ] = False,
    data: DataDir = None,
) -> None:
    """Draw the training curves of runs, the maps of a run, a comparison of attentions, or the speeds of a benchmark.

    A comparison also prints how even the attention of each layer is over test examples.
    """
    from .. import viz
    from ..train.figures import MEASURED_EXAMPLES, draw_comparison, draw_maps, measure_degeneracy
    from ..train.record import read_log

    first = runs[0]
    benchmark = any(run.suffix == ".csv" for run in runs)
    if (len(runs) > 1 and (maps or benchmark)) or maps + compare + benchmark > 1:
        raise ValueError(
            f"got {len(runs)} arguments; accepted: several folders of runs, also with --compare, or one with --maps, "
            "or one CSV."
        )
    if benchmark:
        figure, name = viz.speed_figure(first), first.with_suffix(".png")
    elif compare:
        figure, name = draw_comparison(runs, data_dir=data), first / "comparison.png"
    elif maps:
        figure, name = draw_maps(first, data_dir=data), first / "maps.png"
    else:
        figure, name = viz.training_curves({str(run): read_log(run) for run in runs}), first / "curves.png"
    path = out or name
    path = path if path.suffix else path.with_suffix(".png")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    console.print(f"{path}", soft_wrap=True)
    if compare:
        title = f"Attention weights of up to {MEASURED_EXAMPLES} test examples"
        _print_degeneracy(measure_degeneracy(runs, data_dir=data), title)


def _print_degeneracy(layers: dict[str, list[Degeneracy]], title: str) -> None:
    table = Table("attention", "layer", "evenness", "top tenth", title=title)
    for label, measured in layers.items():
        for number, (evenness, top_share) in enumerate(measured, 1):
            table.add_row(label, str(number), f"{evenness:.3f}", f"{100 * top_share:.1f} %")
        table.add_section()
    console.print(table)
    console.print(
        "Evenness: entropy of a sink's weights, 1 if they are uniform. Top tenth: share of all weight that goes to the "
        "tenth of the sources with the largest, rounded up to whole sources."
    )
