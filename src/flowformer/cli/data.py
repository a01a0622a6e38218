"""`flowformer data`: list, check and prepare data sets."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated

import typer
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from .app import DataDir, Json, app, command, console
from .progress import columns

data_app = typer.Typer(help="List, check and generate data sets.", no_args_is_help=True)
app.add_typer(data_app, name="data")


@command(data_app, "list")
def data_list(data: DataDir = None, as_json: Json = False) -> None:
    """List the data sets: which are present, and where to get the others."""
    from .. import data as sets

    root = sets.store.root(data)
    sources = {name: sets.missing(name, data) for name in sets.names()}
    if as_json:
        listed = {
            name: {"there": True} if source is None else {"there": False, "get": source.get, "size": source.size}
            for name, source in sources.items()
        }
        print(json.dumps({"folder": str(root), "sets": listed}))
        return
    there = "" if root.is_dir() else ", which does not exist"
    console.print(f"Looked for in {root}{there}; flowformer data check NAME reads one.", soft_wrap=True)
    for name, source in sources.items():
        state = "there" if source is None else f"missing, {source.size}. {source.get}"
        # soft_wrap prints one line without breaks, so that a URL can be copied
        console.print(f"  [bold]{name}[/bold]: {escape(state)}", highlight=False, soft_wrap=True, markup=True)


@command(data_app, "check")
def data_check(
    name: Annotated[str, typer.Argument(help="A name that [bold]flowformer data list[/bold] gives.")],
    data: DataDir = None,
    as_json: Json = False,
) -> None:
    """Read a data set and show its sizes, and how it differs from the paper's. Images of ImageNet are not opened."""
    from .. import data as sets

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


@command(data_app, "prepare")
def data_prepare(
    name: Annotated[str, typer.Argument(help="lra/listops or lra/pathfinder.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Such as seed=1 workers=8.")
    ] = None,
    data: DataDir = None,
) -> None:
    """Generate a synthetic data set. If it is interrupted, the same command continues."""
    from .. import data as sets

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
    with Progress(*columns(), console=console) as bars:
        bar = bars.add_task(name, total=None)
        sets.prepare(name, data, progress=lambda done, total: bars.update(bar, completed=done, total=total), **options)
