"""Commands for a single run: demo, train, fit, eval."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from .app import DataDir, Json, app, command, console, errors
from .progress import progress


@command(app, "demo")
def demo(
    out: Annotated[
        Path | None, typer.Option(help="The folder to write to; default runs/demo, or runs/demo-2 if that exists.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Train the paper's time-series Flowformer on JapaneseVowels, and the same model with softmax, in a few minutes.

    The 640 recordings of nine speakers come with aeon, so nothing is downloaded. The demo trains for 8 epochs; the
    paper and [bold]flowformer train uea/JapaneseVowels[/bold] train for 100.
    """
    from ..train import demo as runs
    from ..train.paper import paper_score

    folder = out or runs.unused(Path("runs/demo"))
    with progress(as_json) as reporter:
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
    console.print("The paper trains for 100 epochs, the demo for 8. The paper reports the best epoch.")
    console.print(
        f"Checkpoints, configs and metrics: {folder}. Competition over time: {folder / runs.FIGURE}", soft_wrap=True
    )


@command(app, "train")
def train(
    recipe: Annotated[str, typer.Argument(help="A name that [bold]flowformer recipes[/bold] lists.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Such as attention=softmax seed=1 steps=100.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The folder of the run; default runs/<recipe>/<config>.")] = None,
    data: DataDir = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue from the newest checkpoint, if there is one.")
    ] = False,
    as_published: Annotated[
        bool, typer.Option("--as-published", help="Do what the paper's code does, defects included.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Train a recipe.

    Ctrl-C leaves a checkpoint; the same command with --resume continues from it, bit for bit. For several GPUs, run
    [bold]torchrun --nproc-per-node 4 -m flowformer.cli train …[/bold] or [bold]accelerate launch[/bold]; with
    parallel=fsdp each holds a shard of the model, with parallel=context a part of each sequence.
    """
    from ..train import loop, recipes
    from ..train.config import to_dict
    from ..train.overrides import override
    from ..train.record import is_main

    name = recipe + recipes.PUBLISHED if as_published and not recipe.endswith(recipes.PUBLISHED) else recipe
    config = override(recipes.get(name), overrides or [])
    folder = out or Path("runs") / config.name
    try:
        with progress(as_json) as reporter:
            result = loop.train(config, folder, data_dir=data, resume=resume, report=reporter(config.model.attention))
    except loop.Interrupted as stopped:
        errors.print(f"{stopped} Run the same command with --resume to continue.")
        raise typer.Exit(130) from stopped
    if not is_main():
        return
    if as_json:
        print(json.dumps({**result, "folder": str(folder)}))
    else:
        _print_result(result, to_dict(config), folder)


@command(app, "rival", hidden=True)  # former name of fit
@command(app, "fit")
def fit(
    recipe: Annotated[str, typer.Argument(help="A recipe of time series or reinforcement learning.")],
    method: Annotated[str, typer.Argument(help="dtw, rocket, xgboost, lstm or tcn; bc, awac or dt.")],
    options: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Such as n_kernels=1000, steps=1000 or best=0.1."),
    ] = None,
    seed: Annotated[int, typer.Option(help="The random seed.")] = 0,
    out: Annotated[Path | None, typer.Option(help="The folder of the run; default runs/<recipe>/<config>.")] = None,
    data: DataDir = None,
    as_json: Json = False,
) -> None:
    """Fit a method without attention, such as DTW, an LSTM or AWAC, on the data of a recipe.

    It is recorded like a run of [bold]flowformer train[/bold], which trains the attentions:
    [bold]flowformer results[/bold] shows both.
    """
    from ..train.config import TrainConfig, to_dict
    from ..train.loop import Interrupted
    from ..train.methods import fit as methods
    from ..train.methods.config import configure

    config = configure(recipe, method, options or [], seed=seed)
    folder = out or Path("runs") / config.name
    try:
        with progress(as_json) as reporter:
            result = methods.fit(config, folder, data_dir=data, report=reporter(method))
    except Interrupted as stopped:
        errors.print(f"{stopped} Run the same command to continue.")
        raise typer.Exit(130) from stopped
    if as_json:
        print(json.dumps({**result, "folder": str(folder)}))
        return
    _print_result(result, to_dict(config) if isinstance(config, TrainConfig) else config.to_dict(), folder)


@command(app, "eval")
def evaluate(
    run: Annotated[Path, typer.Argument(help="The folder of a run.")],
    model: Annotated[str, typer.Option(help="Which of its models: final or best.")] = "final",
    split: Annotated[str, typer.Option(help="The split to evaluate on: test or valid.")] = "test",
    data: DataDir = None,
    as_json: Json = False,
) -> None:
    """Evaluate a trained model again."""
    from ..train.evaluation import evaluate_run
    from ..train.record import is_main

    scores = evaluate_run(run, model=model, split=split, data_dir=data)
    if not is_main():
        return
    if as_json:
        print(json.dumps(scores))
        return
    table = Table("score", f"{model} model, {split} set")
    for name, value in scores.items():
        table.add_row(name, f"{value:.4f}" if isinstance(value, float) else str(value))
    console.print(table)


def _print_result(result: dict[str, Any], config: dict[str, Any], folder: Path) -> None:
    from ..train.paper import percent
    from ..train.results import comparable_score, differences, same_experiment

    metric, trained = result["metric"], result["best_chosen_on"] != "nothing"
    table = Table("", metric, *["update"] * trained, title=f"{result['recipe']}, {result['attention']}, test set")
    rows = {"final": "final", "best": f"best, chosen on {result['best_chosen_on']}"} if trained else {"final": "final"}
    for which, label in rows.items():
        table.add_row(label, percent(metric, result[which][metric]), *[str(result[which].get("step"))] * trained)
    published, changes = comparable_score(config, result["attention"]), " ".join(differences(config))
    comparable = same_experiment(changes)
    table.add_row("paper", str(published) if published is not None else "not in it" if comparable else "not comparable")
    console.print(table)
    if not comparable:
        console.print(f"Not the paper's experiment: {changes}.", soft_wrap=True, highlight=False)
    speed = result["steps_per_second"]
    cost = [f"{result['training_seconds']:.1f} s of training", f"{result['peak_memory_mib']:.0f} MiB at most"]
    if speed is not None:
        cost.insert(1, f"{speed:.2f} updates/s")
    console.print(f"{', '.join(cost)}. Everything is in {folder}.", soft_wrap=True)
