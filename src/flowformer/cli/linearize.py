"""`flowformer linearize`: replace the softmax attention of a pretrained model and train the result."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markdown import Markdown
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from .app import Json, app, command, console, errors


@command(app, "linearize")
def linearize(
    model: Annotated[str, typer.Argument(help="A folder or name of transformers, or a GGUF file.")],
    text: Annotated[list[Path], typer.Option(help="A text file to train on. Repeatable.")],
    out: Annotated[Path, typer.Option(help="The folder of the run; the model is saved in its folder model.")],
    options: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Of LinearizeConfig, such as window=64 keep_layers=[0,4]."),
    ] = None,
    minutes: Annotated[
        float | None, typer.Option(help="How long to train; default is until the tokens of both stages are read.")
    ] = None,
    evaluate: Annotated[
        list[Path] | None,
        typer.Option("--eval", help="A text file to compare teacher and student on after each stage. Repeatable."),
    ] = None,
    encoder: Annotated[
        bool, typer.Option("--encoder", help="The model is an encoder: load it without a language-model head.")
    ] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the checkpoint in the folder.")] = False,
    as_json: Json = False,
) -> None:
    """Replace the softmax attention of a pretrained model by Flow-Attention, and train it to match the original.

    A file is one document for a decoder; for an encoder each of its lines is one. Ctrl-C leaves a checkpoint; the same
    command with --resume continues from it. For several GPUs run
    [bold]accelerate launch -m flowformer.cli linearize …[/bold].
    """
    from ..linearize import LinearizeConfig
    from ..linearize import linearize as linearize_model
    from ..train.loop import Interrupted
    from ..train.record import is_main

    config = LinearizeConfig.of([*(options or []), *([] if minutes is None else [f"minutes={minutes}"])])
    texts, held_out = ([_read(file) for file in files] for files in (text, evaluate or []))
    loaded, tokenizer = _load(model, encoder)
    student = linearize_model(loaded, tokenizer, config)
    if not encoder and not student.is_language_model:
        raise ValueError(f"{model} is an encoder, which does not predict the next token. Pass --encoder.")
    try:
        with _progress(as_json) as report:
            result = student.transfer(
                _documents(texts, encoder),
                config,
                evaluate=_documents(held_out, encoder) if evaluate else None,
                folder=out,
                resume=resume,
                report=report,
            )
    except Interrupted as stopped:
        errors.print(f"{stopped} Run the same command with --resume to continue.")
        raise typer.Exit(130) from stopped
    if not is_main():
        return
    student.save_pretrained(out / "model")
    if as_json:
        print(json.dumps({"folder": str(out), "stages": [vars(stage) for stage in result.stages]}))
        return
    console.print(Markdown(str(result)))
    console.print(f"The model is in {out / 'model'}, everything else in {out}.", soft_wrap=True)


def _load(model: str, encoder: bool) -> tuple[Any, Any]:
    """Load the model, onto a GPU if there is one, and its tokenizer; raise a ValueError if it has no tokenizer."""
    import torch
    from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

    folder, options = model, {}
    if model.endswith(".gguf"):
        folder, options = str(Path(model).parent), {"gguf_file": Path(model).name}
    loaded: Any = (AutoModel if encoder else AutoModelForCausalLM).from_pretrained(folder, **options)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, **options)
    except (OSError, ValueError) as error:
        raise ValueError(f"{model} has no tokenizer, which reading text needs: {error}") from error
    return loaded.to("cuda" if torch.cuda.is_available() else "cpu"), tokenizer


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is no text in UTF-8: {error}. Convert it, such as with iconv.") from error


def _documents(texts: list[str], lines: bool) -> list[str]:
    """Return the texts, or with `lines` their non-blank lines, as documents."""
    return [line for text in texts for line in text.splitlines() if line.strip()] if lines else texts


@contextmanager
def _progress(quiet: bool) -> Iterator[Any]:
    """Yield the `report` callback of a transfer: a progress bar in a terminal, else one line per stage.

    Yields None, for no output, if `quiet` or on any rank but 0.
    """
    from ..train.record import is_main

    def print_stage(record: dict[str, Any]) -> None:
        if record["kind"] == "stage":
            scores = ", ".join(f"{name} {value:.4f}" for name, value in record["scores"].items())
            error = sum(record["errors"]) / len(record["errors"])
            console.print(
                f"{record['stage']}, update {record['step']}: error {error:.3f} {scores}",
                highlight=False,
                soft_wrap=True,
            )
            console.file.flush()

    if quiet or not is_main():
        yield None
        return
    if not console.is_terminal:
        yield print_stage
        return
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TextColumn("{task.fields[note]}")
    with Progress(*columns, console=console) as bars:
        bar = bars.add_task("exchanged", total=1.0, note="")

        def report(record: dict[str, Any]) -> None:
            if record["kind"] == "train":
                note = f"loss {record['loss']:.3f}, {record['tokens_per_second']:.0f} tokens/s"
                bars.update(bar, description=record["stage"], completed=record["done"], note=note)
            else:
                print_stage(record)

        yield report
