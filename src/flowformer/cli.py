"""The command line: `flowformer demo | train | rival | eval | reproduce | results | plot | recipes | data | …`."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

try:
    import typer
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.table import Table
except ImportError as missing:
    raise SystemExit(
        "the command line needs more than the library: pip install 'flowformer[train,ts,hf]'."
    ) from missing

if TYPE_CHECKING:
    from .train.loop import Report

app = typer.Typer(
    name="flowformer",
    help="Flow-Attention, from data to result. Start with [bold]flowformer demo[/bold].",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
data_app = typer.Typer(help="The data sets: what there is, what is missing, what is damaged.", no_args_is_help=True)
app.add_typer(data_app, name="data")
bench_app = typer.Typer(
    help="Time the attention beside its rivals, correctness first; each has a --help of its own.",
    no_args_is_help=True,
)
app.add_typer(bench_app, name="bench")
console, errors = Console(), Console(stderr=True)
_BEGUN = time.monotonic()  # before torch is imported, which takes a while

DataDir = Annotated[
    Path | None,
    typer.Option("--data", help="The folder of all data sets; else $FLOWFORMER_DATA, else ~/.cache/flowformer."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for a script, and nothing else.")]
# what a user can put right, as opposed to a mistake of ours
_PLAIN = (ValueError, TypeError, NotImplementedError, OSError, ImportError)
# what errors of the library advise, and how it is done here
_ADVICE = {
    "pass data_dir": "pass --data",
    "hoose another data_dir": "hoose another folder with --data",
    "pass partial=True": "train with data_options.partial=true",
    "Resume it, or choose another folder": "Resume it with --resume, or choose another folder with --out",
    "hoose another folder.": "hoose another folder with --out.",
}


_debug = False  # set by --debug, before any command runs


def _print_version(wanted: bool) -> None:
    if wanted:
        from . import __version__

        print(__version__)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version)
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error: flowformer --debug train ….")
    ] = False,
) -> None:
    global _debug
    _debug = debug


def _command(application: typer.Typer, name: str, **options: Any) -> Callable:
    """A command whose plain errors are one sentence, not a traceback."""

    def decorate(function: Callable) -> Callable:
        @functools.wraps(function)
        def run(*args, **kwargs):
            try:
                return function(*args, **kwargs)
            except _PLAIN as error:
                if _debug:
                    raise
                errors.print(f"[red]error:[/red] {escape(_advice(str(error)))}", soft_wrap=True)
                raise typer.Exit(1) from error

        application.command(name, **options)(run)
        return run

    return decorate


@_command(app, "demo")
def demo(
    out: Annotated[
        Path | None, typer.Option(help="Where to write; default runs/demo, or runs/demo-2 if that is there.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Train the paper's time-series Flowformer on JapaneseVowels, and softmax attention beside it, in a few minutes.

    640 recordings of nine speakers, which come with aeon: nothing is downloaded. The schedule has 8 of the
    paper's 100 epochs; [bold]flowformer train uea/JapaneseVowels[/bold] has them all.
    """
    from .train import demo as runs
    from .train.paper import paper_score

    folder = out or runs.unused(Path("runs/demo"))
    with _progress(as_json) as reporter:
        results = runs.run(folder, reporter)
    if as_json:
        print(json.dumps(results))
        return
    table = Table(
        "attention",
        "final epoch",
        "best epoch (chosen on the test set)",
        "paper",
        title="JapaneseVowels, test accuracy",
    )
    for name, result in results.items():
        published = paper_score("uea/JapaneseVowels", name)
        scores = (f"{100 * result[which]['accuracy']:.1f} %" for which in ("final", "best"))
        table.add_row(name, *scores, "" if published is None else f"{published} %")
    console.print(table)
    console.print("The paper trains for 100 epochs, these are 8, and reports the best epoch.")
    console.print(
        f"Checkpoints, configs and metrics: {folder}. Competition over time: {folder / runs.FIGURE}", soft_wrap=True
    )


@_command(app, "train")
def train(
    recipe: Annotated[str, typer.Argument(help="A name that [bold]flowformer recipes[/bold] lists.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Such as attention=softmax seed=1 steps=100.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The folder of the run; default runs/<recipe>/<config>.")] = None,
    data: DataDir = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest checkpoint, if there is one.")
    ] = False,
    as_published: Annotated[
        bool, typer.Option("--as-published", help="Do what the paper's code does, defects included.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Train a recipe.

    Ctrl-C leaves a checkpoint; the same command with --resume goes on from it, bit for bit. For several GPUs, run
    [bold]torchrun --nproc-per-node 4 -m flowformer.cli train …[/bold] or [bold]accelerate launch[/bold]; with
    parallel=fsdp each holds a shard of the model.
    """
    from .train import loop, recipes
    from .train.config import override

    name = recipe + recipes.PUBLISHED if as_published and not recipe.endswith(recipes.PUBLISHED) else recipe
    config = override(recipes.get(name), overrides or [])
    folder = out or Path("runs") / config.name
    try:
        with _progress(as_json) as reporter:
            result = loop.train(config, folder, data_dir=data, resume=resume, report=reporter(config.model.attention))
    except loop.Interrupted as stopped:
        errors.print(f"{stopped} To go on: the same command with --resume.")
        raise typer.Exit(130) from stopped
    if as_json:
        print(json.dumps({**result, "folder": str(folder)}))
    elif _is_main():
        _print_result(result, folder)


@_command(app, "rival")
def rival(
    recipe: Annotated[str, typer.Argument(help="A recipe of time series or reinforcement learning.")],
    name: Annotated[str, typer.Argument(help="dtw, rocket, xgboost, lstm or tcn; bc, awac or dt.")],
    options: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Such as n_kernels=1000 or steps=1000.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of everything random.")] = 0,
    out: Annotated[Path | None, typer.Option(help="The folder of the run; default runs/<recipe>/<config>.")] = None,
    data: DataDir = None,
    as_json: Json = False,
) -> None:
    """Fit a rival without attention on the data of a recipe: classical, recurrent, or of reinforcement learning.

    It is recorded like a run of [bold]flowformer train[/bold], which takes the rivals with attention:
    [bold]flowformer results[/bold] shows both.
    """
    from .train import rivals
    from .train.paper import paper_score, percent

    config = rivals.configure(recipe, name, options or [], seed=seed)
    folder = out or Path("runs") / config.name
    with _progress(as_json) as reporter:
        result = rivals.run(config, folder, data_dir=data, report=reporter(name))
    if as_json:
        print(json.dumps({**result, "folder": str(folder)}))
        return
    metric = result["metric"]
    published = paper_score(recipe, result["attention"])
    table = Table("", metric, title=f"{recipe}, test")
    table.add_row(name, percent(metric, result["final"][metric]))
    table.add_row("paper", "not in it" if published is None else str(published))
    console.print(table)
    console.print(f"{result['training_seconds']:.1f} s to fit. Everything is in {folder}.", soft_wrap=True)


@_command(app, "eval")
def evaluate(
    run: Annotated[Path, typer.Argument(help="The folder of a run.")],
    model: Annotated[str, typer.Option(help="Which of its models: final or best.")] = "final",
    split: Annotated[str, typer.Option(help="On what: test or valid.")] = "test",
    data: DataDir = None,
    as_json: Json = False,
) -> None:
    """Evaluate a trained model again."""
    from .train.results import evaluate_run

    scores = evaluate_run(run, model=model, split=split, data_dir=data)
    if as_json:
        print(json.dumps(scores))
        return
    table = Table("score", f"{model} model, {split} set")
    for name, value in scores.items():
        table.add_row(name, f"{value:.4f}")
    console.print(table)


@_command(app, "reproduce")
def reproduce(
    table: Annotated[str, typer.Argument(help="uea, lra, language, vision, rl, ablations, speed, figures or all.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="For every recipe, such as precision=tf32; results say so."),
    ] = None,
    cells: Annotated[
        list[str] | None, typer.Option(help="Only cells of such names: '*JapaneseVowels*', 'lra/text/*'. Repeatable.")
    ] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Runs of a cell; default as many as the table says.")] = None,
    minutes: Annotated[
        float | None, typer.Option(help="Stop before they are over, every unfinished run with a checkpoint.")
    ] = None,
    pack: Annotated[
        int | None, typer.Option(min=1, help="Runs side by side; default eight, or as many as the cores can feed.")
    ] = None,
    out: Annotated[Path, typer.Option(help="The folder of the queue, which machines may share.")] = Path(
        "runs/reproduce"
    ),
    data: DataDir = None,
    show: Annotated[bool, typer.Option("--list", help="Show the cells and their states, and run nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Run a table of the paper: every cell that is not done yet, several side by side, then the table beside theirs.

    Stop it, kill it, take the machine away: the same command goes on. Several machines may share the folder, or
    each do some cells; [bold]flowformer results[/bold] merges their folders.
    """
    from .train import reproduce as queue
    from .train import results, summary
    from .train.loop import Interrupted

    jobs = queue.jobs(table, out, cells=cells or (), seeds=seeds, overrides=overrides or (), data_dir=data)
    if show:
        _print_jobs(jobs, as_json)
        return
    say = functools.partial(errors.print if as_json else console.print, highlight=False, soft_wrap=True, markup=False)
    out.mkdir(parents=True, exist_ok=True)
    for reason, names in _blocked(jobs).items():
        say(f"{reason}: {', '.join(names)}")
    running = queue.Queue(jobs, out, pack or queue.default_pack(), minutes, _BEGUN, say)
    try:
        running.run()
    except Interrupted as stopped:
        errors.print(str(stopped))
        raise typer.Exit(130) from stopped
    finally:
        rows = results.collect([out])
        if rows:
            figures = results.draw_figures(rows, out / "figures", data)
            speeds = out / "speed" / queue.SPEED
            if speeds.exists():
                figures |= results.draw_speeds(speeds, out / "figures")
            written = summary.write(rows, out, figures)
    if rows:
        print(json.dumps(rows)) if as_json else print(summary.markdown(rows))
        say(f"Written: {', '.join(map(str, written))}")
    left = [job for job in jobs if job.blocked is None and not job.done.exists()]
    if running.stopped is not None:
        say(f"{len(left)} runs are left: {running.stopped}. The same command goes on.")
    if running.failed:
        raise ValueError(f"{len(running.failed)} runs failed; the same command tries again.")


def _blocked(jobs: list) -> dict[str, list[str]]:
    """What is missing, and the cells that miss it."""
    reasons: dict[str, list[str]] = {}
    for job in jobs:
        if job.blocked is not None and job.name not in reasons.setdefault(job.blocked, []):
            reasons[job.blocked].append(job.name)
    return reasons


def _print_jobs(jobs: list, as_json: bool) -> None:
    if as_json:
        names = ("name", "seed", "minutes", "paper")
        print(json.dumps([{**{n: getattr(job, n) for n in names}, "state": job.state()} for job in jobs]))
        return
    listed = Table("cell", "seed", "state", "paper", "minutes on an H200")
    for column in listed.columns:
        column.overflow = "fold"
    for job in jobs:
        listed.add_row(
            job.name,
            str(job.seed),
            escape(job.state()),
            "" if job.paper is None else str(job.paper),
            f"{job.minutes:g}",
        )
    console.print(listed)
    left = sum(job.minutes for job in jobs if job.blocked is None and not job.done.exists())
    console.print(f"{left:.0f} minutes are to do, eight side by side in {left / 8:.0f}.")


@_command(app, "results")
def results(
    runs: Annotated[
        list[Path] | None, typer.Argument(help="Folders with runs below them, or results.csv files; default runs.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write results.csv, results.md and results.html into this folder.")
    ] = None,
    data: DataDir = None,
    as_json: Json = False,
) -> None:
    """Collect finished runs into the paper's tables, beside its numbers; folders of several machines are merged.

    Numbers are means over seeds, of the final evaluation and of the best one. What differs from a recipe is said beside
    its number, which then stands alone.
    """
    from .train import summary
    from .train.results import collect, draw_figures

    sources = runs or [Path("runs")]
    rows = collect(sources)
    if not rows:
        raise ValueError(f"{', '.join(map(str, sources))} has no finished run, which is a folder with a result.json.")
    if out is not None:
        written = summary.write(rows, out, draw_figures(rows, out / "figures", data))
        errors.print(f"Written: {', '.join(map(str, written))}", soft_wrap=True, highlight=False)
    print(json.dumps(rows) if as_json else summary.markdown(rows))


@_command(app, "plot")
def plot(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs, or the CSV of a benchmark.")],
    out: Annotated[Path | None, typer.Option(help="The figure; default curves.png in the first folder.")] = None,
    maps: Annotated[
        bool, typer.Option("--maps", help="Competition and allocation of a model instead of curves.")
    ] = False,
    data: DataDir = None,
) -> None:
    """Draw the training curves of runs, the maps of a run, or the speeds of a benchmark."""
    from . import viz
    from .train.record import read_log
    from .train.results import draw_maps

    first = runs[0]
    if len(runs) > 1 and (maps or any(run.suffix == ".csv" for run in runs)):
        raise ValueError(
            f"got {len(runs)} arguments; accepted: several folders of runs, or one with --maps, or one CSV."
        )
    if first.suffix == ".csv":
        figure, name = viz.speed_figure(first), first.with_suffix(".png")
    elif maps:
        figure, name = draw_maps(first, data_dir=data), first / "maps.png"
    else:
        figure, name = viz.training_curves({str(run): read_log(run) for run in runs}), first / "curves.png"
    figure.savefig(out or name, dpi=110)
    console.print(f"{out or name}", soft_wrap=True)


@_command(app, "recipes")
def list_recipes(
    name: Annotated[str | None, typer.Argument(help="Show everything of this one.")] = None, as_json: Json = False
) -> None:
    """List the recipes, or show one: what it does, and every key that an override may set."""
    from .train import recipes
    from .train.config import keys, to_dict

    if name is None:
        if as_json:
            print(json.dumps(recipes.names()))
            return
        table = Table("recipe", "what it is", "updates or epochs", "batch")
        for each in recipes.names():
            config = recipes.get(each)
            length = f"{config.steps:,} updates" if config.steps is not None else f"{config.epochs} epochs"
            table.add_row(each, recipes.describe(each).splitlines()[0], length, str(config.batch_size))
        console.print(table)
        return
    config = recipes.get(name)
    if as_json:
        print(json.dumps(to_dict(config)))
        return
    console.print(recipes.describe(name), highlight=False)
    table = Table("key", "value")
    for key, value in keys(config).items():
        table.add_row(key, str(value))
    console.print(table)


@_command(data_app, "list")
def data_list(data: DataDir = None, as_json: Json = False) -> None:
    """List the data sets: which are there, and where to get the others."""
    from . import data as sets

    root = sets.store.root(data)
    sources = {name: sets.store.missing(functools.partial(sets.load, name, data)) for name in sets.names()}
    if as_json:
        listed = {
            name: {"there": True} if source is None else {"there": False, "get": source.get, "size": source.size}
            for name, source in sources.items()
        }
        print(json.dumps({"folder": str(root), "sets": listed}))
        return
    console.print(f"Looked for in {root}; flowformer data check NAME reads one.", soft_wrap=True)
    for name, source in sources.items():
        state = "there" if source is None else f"missing, {source.size}. {source.get}"
        # whole lines, so that an address can be copied
        console.print(f"  [bold]{name}[/bold]: {state}", highlight=False, soft_wrap=True)


@_command(data_app, "check")
def data_check(
    name: Annotated[str, typer.Argument(help="A name that [bold]flowformer data list[/bold] gives.")],
    data: DataDir = None,
    as_json: Json = False,
) -> None:
    """Read a data set from end to end, and say what it holds and how it differs from the paper's."""
    import dataclasses

    from . import data as sets

    splits = sets.load(name, data)
    parts = {part: getattr(splits, part) for part in ("train", "valid", "test")}
    facts = {
        **{part: None if dataset is None else len(dataset) for part, dataset in parts.items()},
        **dataclasses.asdict(splits.info),
    }
    if as_json:
        print(json.dumps(facts))
        return
    table = Table("", name)
    for key, value in facts.items():
        table.add_row(key, str(value))
    console.print(table)


@_command(data_app, "prepare")
def data_prepare(
    name: Annotated[str, typer.Argument(help="lra/listops or lra/pathfinder.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Such as seed=1 workers=8.")
    ] = None,
    data: DataDir = None,
) -> None:
    """Generate a data set that is made rather than collected; a stopped generation goes on where it was."""
    from . import data as sets

    options = {}
    for key, equals, value in (override.partition("=") for override in overrides or []):
        accepted = sets.generator_options(name)
        if not equals or key not in accepted:
            raise ValueError(f"got {key + equals + value!r}; accepted: key=value with a key of {', '.join(accepted)}.")
        try:
            options[key] = json.loads(value)
        except json.JSONDecodeError:
            raise ValueError(f"{key} must be a value as in JSON, such as {key}=1, got {value!r}.") from None
    if not console.is_terminal:
        sets.prepare(name, data, **options)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as bars:
        bar = bars.add_task(name, total=None)
        sets.prepare(name, data, progress=lambda done, total: bars.update(bar, completed=done, total=total), **options)


_PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


@_command(bench_app, "attention", context_settings=_PASS_ON)
def bench_attention(context: typer.Context) -> None:
    """Flow-Attention beside its authors' formulation and softmax attention: time, memory, and a token's decoding."""
    _run_benchmark("attention", context.args)


@_command(bench_app, "lra", context_settings=_PASS_ON)
def bench_lra(context: typer.Context) -> None:
    """The paper's efficiency table: steps per second of one model with every attention, beside the paper's ratios."""
    _run_benchmark("lra", context.args)


@_command(bench_app, "loop", context_settings=_PASS_ON)
def bench_loop(context: typer.Context) -> None:
    """How much of a training step is the model: the loop of a recipe beside its bare model on the same batches."""
    _run_benchmark("loop", context.args)


@_command(bench_app, "japanese-vowels", context_settings=_PASS_ON)
def bench_japanese_vowels(context: typer.Context) -> None:
    """The time-series classifier with its default settings beside aeon's RocketClassifier: accuracy and seconds."""
    _run_benchmark("japanese_vowels", context.args)


@_command(bench_app, "fuzz", context_settings=_PASS_ON)
def bench_fuzz(context: typer.Context) -> None:
    """Random calls of the backends against the float64 reference: values, gradients, memory, repeatability."""
    raise typer.Exit(_run_benchmark("fuzz", context.args))


def _run_benchmark(name: str, arguments: list[str]) -> Any:
    import importlib

    return importlib.import_module(f".bench.{name}", __package__).main(arguments)


@_command(app, "env")
def env(as_json: Json = False) -> None:
    """Say what is installed and what the attention would run on; put this into a report of a problem."""
    import importlib.metadata
    import platform

    import torch

    from . import __version__, baselines

    facts: dict[str, Any] = {
        "flowformer": __version__,
        "python": platform.python_version(),
        "system": platform.platform(),
    }
    for package in ("torch", "triton", "accelerate", "torchmetrics", "transformers", "timm", "aeon", "gymnasium"):
        try:
            facts[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            facts[package] = None
    facts["gpu"] = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    facts["threads"] = torch.get_num_threads()
    facts["attentions"] = ["flow", *baselines.names()]
    if as_json:
        print(json.dumps(facts))
        return
    table = Table("", "found")
    for key, value in facts.items():
        table.add_row(key, ", ".join(value) if isinstance(value, list) else str(value or "not there"))
    console.print(table)


@contextmanager
def _progress(quiet: bool) -> Iterator[Callable[[str], Report]]:
    """What makes a report for a run of a name: a live bar in a terminal, a line for each evaluation elsewhere."""
    if quiet or not _is_main():
        yield lambda label: lambda record: None
        return
    if not console.is_terminal:
        yield lambda label: functools.partial(_print_record, label)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.fields[note]}"), console=console) as bars:

        def reporter(label: str) -> Report:
            bar = bars.add_task(label, total=None, note="")

            def report(record: dict[str, Any]) -> None:
                if record["kind"] == "start":
                    bars.update(bar, total=record["steps"], completed=record["step"])
                elif record["kind"] == "step":
                    bars.update(bar, completed=record["step"])
                elif record["kind"] == "train":
                    bars.update(bar, note=f"loss {record['loss']:.3f}, {record['steps_per_second']:.1f} updates/s")
                else:
                    _print_record(label, record)

            return report

        yield reporter


def _print_record(label: str, record: dict[str, Any]) -> None:
    if record["kind"] == "eval":
        numbers = {key: value for key, value in record.items() if isinstance(value, float) and key != "epoch"}
        scores = ", ".join(f"{key} {value:.4f}" for key, value in numbers.items())
        place = f"{label}, epoch {record['epoch']:g}, update {record['step']}"
        console.print(f"{place}: {record['split']} {scores}", highlight=False, soft_wrap=True)
        console.file.flush()


def _print_result(result: dict[str, Any], folder: Path) -> None:
    from .train.paper import paper_score, percent

    metric = result["metric"]
    table = Table("", metric, "update", title=f"{result['recipe']}, {result['attention']}, test set")
    for which, label in (("final", "final"), ("best", f"best, chosen on {result['best_chosen_on']}")):
        table.add_row(label, percent(metric, result[which][metric]), str(result[which]["step"]))
    published = paper_score(result["recipe"], result["attention"])
    table.add_row("paper", "not in it" if published is None else str(published), "")
    console.print(table)
    speed = f"{result['steps_per_second']:.2f} updates/s, {result['peak_memory_mib']:.0f} MiB at most"
    console.print(
        f"{result['training_seconds']:.0f} s of training, {speed}. Everything is in {folder}.", soft_wrap=True
    )


def _is_main() -> bool:
    from .train.record import is_main

    return is_main()


def _advice(text: str) -> str:
    """An error of the library in the words of the command line."""
    for python, here in _ADVICE.items():
        text = text.replace(python, here)
    return text


if __name__ == "__main__":
    app()
