"""Commands that only print information: recipes, env."""

from __future__ import annotations

import importlib.metadata
import json
import platform
from typing import Annotated, Any

import typer
from rich.table import Column, Table

from .app import Json, app, command, console


@command(app, "recipes")
def list_recipes(
    name: Annotated[str | None, typer.Argument(help="Show all keys of this recipe.")] = None, as_json: Json = False
) -> None:
    """List the recipes, or show one: what it does, and every key that an override may set."""
    from ..train import recipes
    from ..train.config import to_dict
    from ..train.overrides import keys

    if name is None:
        if as_json:
            print(json.dumps(recipes.names()))
            return
        table = Table(Column("recipe", no_wrap=True), "what it is", "updates or epochs", "batch")
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
    table = Table(Column("key", no_wrap=True), "value")
    for key, value in keys(config).items():
        table.add_row(key, str(value))
    console.print(table)


@command(app, "env")
def env(as_json: Json = False) -> None:
    """Show versions and hardware, for bug reports."""
    import torch

    from .. import __version__
    from ..nn.attention import attention_names

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
    facts["attentions"] = attention_names()
    if as_json:
        print(json.dumps(facts))
        return
    table = Table("", "found")
    for key, value in facts.items():
        table.add_row(key, ", ".join(value) if isinstance(value, list) else str(value or "not there"))
    console.print(table)
