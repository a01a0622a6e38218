"""Shared by all commands: the typer application, common options, and how errors are printed."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

_INSTALL = "The command line needs more than the library: pip install 'flowformer[train,ts,hf]'."
try:
    import typer
    from rich.console import Console
    from rich.markup import escape
except ImportError as missing:
    raise SystemExit(f"{missing}. {_INSTALL}") from missing

app = typer.Typer(
    name="flowformer",
    help="Flow-Attention, from data to result. Start with [bold]flowformer demo[/bold].",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
# no markup and emoji, because names of files may contain [brackets] and :colons:
console, errors = Console(markup=False, emoji=False), Console(stderr=True, markup=False, emoji=False)
STARTED = time.monotonic()  # start of `reproduce --minutes`; taken here, before the slow import of torch

DataDir = Annotated[
    Path | None,
    typer.Option("--data", help="The folder of all data sets; else $FLOWFORMER_DATA, else ~/.cache/flowformer."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for a script, and nothing else.")]
# errors that a user can fix; any other exception is a bug and shows its traceback
_USER_ERRORS = (ValueError, TypeError, NotImplementedError, OSError, ImportError, FloatingPointError)
# advice in the library's error messages, which names Python arguments -> the same advice with command-line options
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
        from .. import __version__

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
    if "OMP_WAIT_POLICY" not in os.environ:
        # Threads that wait for each other spin before they sleep. GNU OpenMP's default of milliseconds slows training
        # down twenty times when another process uses one of two cores. Read when torch is imported.
        os.environ.setdefault("GOMP_SPINCOUNT", "3000")


def command(application: typer.Typer, name: str, **settings: Any) -> Callable:
    """Register a command. An error that the user can fix is printed as one sentence, without a traceback."""

    def decorate(function: Callable) -> Callable:
        @functools.wraps(function)
        def run(*args, **kwargs):
            try:
                return function(*args, **kwargs)
            except BrokenPipeError:  # e.g. `flowformer … | head`: typer handles it and exits silently
                raise
            except _USER_ERRORS as error:
                if _debug:
                    raise
                errors.print(f"[red]error:[/red] {escape(advice(error))}", soft_wrap=True, markup=True)
                raise typer.Exit(1) from error

        application.command(name, **settings)(run)
        return run

    return decorate


def advice(error: Exception) -> str:
    """Return the message of a library error, with advice that names command-line options instead of arguments."""
    text = f"{error}. {_INSTALL}" if isinstance(error, ModuleNotFoundError) else str(error)
    for library_advice, command_line_advice in _ADVICE.items():
        text = text.replace(library_advice, command_line_advice)
    return text
