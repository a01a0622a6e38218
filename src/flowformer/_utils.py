"""Helpers for the whole package: hints for misspelt names, argument checks, optional imports, atomic writes,
progress bars.

This module imports only the standard library, and nothing slow, since `import flowformer` imports it.
"""

from __future__ import annotations

import difflib
import importlib
import json
import math
import os
import subprocess
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from numbers import Integral
from pathlib import Path
from typing import IO, Any, Literal, get_args, get_origin, get_type_hints

UNKNOWN = "unknown"


def suggestion(value: object, accepted: Iterable[str]) -> str:
    """Return a hint with the most similar accepted name, for an error message; empty if no name is similar.

    >>> suggestion("softmx", ["linear", "softmax"])
    " (did you mean 'softmax'?)"
    """
    match = difflib.get_close_matches(str(value), list(accepted), n=1)
    return f" (did you mean {match[0]!r}?)" if match else ""


def check_choice(what: str, value: str, accepted: Collection[str]) -> None:
    """Raise unless the value is one of the accepted ones.

    Args:
        what: noun for the value in the error message, such as "recipe" in "unknown recipe".
    """
    if value not in accepted:
        raise ValueError(f"unknown {what} {value!r}{suggestion(value, accepted)}; accepted: {', '.join(accepted)}.")


def check_literals(config: Any) -> None:
    """Raise unless every field of a dataclass with a Literal type holds one of its values."""
    for name, accepted in _literals(config.__class__).items():
        check_choice(name, getattr(config, name), accepted)


@cache
def _literals(kind: type) -> dict[str, tuple[str, ...]]:
    """Return the values of each field with a Literal type.

    Cached by class: a table of runs builds thousands of configs of a few classes.
    """
    return {name: get_args(hint) for name, hint in get_type_hints(kind).items() if get_origin(hint) is Literal}


def check_kinds(config: Any) -> None:
    """Raise unless every field of type bool or int holds such a value.

    Without the check, the string "no" from a command line would count as True.
    """
    for name, hint in get_type_hints(config.__class__).items():
        value = getattr(config, name)
        if hint is bool and not isinstance(value, bool):
            raise ValueError(f"{name} must be true or false, got {value!r}.")
        if hint is int and not is_whole(value):
            raise ValueError(f"{name} must be a whole number, got {value!r}.")


def is_whole(value: object) -> bool:
    """Whether the value is an integer and not a bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_options(owner: str, options: Iterable[str], accepted: Collection[str]) -> None:
    """Raise unless the names of all options are accepted.

    Args:
        owner: subject of the error message, such as "softmax attention" in "softmax attention has no option".
    """
    for option in options:
        if option not in accepted:
            raise ValueError(
                f"{owner} has no option {option!r}{suggestion(option, accepted)}; accepted: "
                f"{', '.join(accepted) or 'none'}."
            )


def check_positive(**values: object) -> None:
    """Raise unless each value is a whole number of at least 1."""
    for name, value in values.items():
        if not isinstance(value, Integral) or value < 1:
            raise ValueError(f"{name} must be a positive whole number, got {value!r}.")


def check_between(low: float, high: float, **values: float) -> None:
    """Raise unless low <= value <= high for each value; NaN raises too."""
    for name, value in values.items():
        if not low <= value <= high:
            accepted = f"at least {low}" if high == math.inf else f"from {low} to {high}"
            raise ValueError(f"{name} must be {accepted}, got {value}.")


def optional_import(module: str, extra: str) -> Any:
    """Import a module of an optional dependency; raise an ImportError that names the extra if it is not installed."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if error.name != package:
            raise
        raise ImportError(f"{package} is not installed; pip install 'flowformer[{extra}]' brings it.") from error


def moved(module: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a `__getattr__` for a module whose public names have moved.

    It issues a DeprecationWarning and returns the object from its new module.

    Args:
        module: `__name__` of the old module.
        homes: the full new name of each old name, such as {"AWAC": "flowformer.train.methods.awac.AWAC"}.
    """

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        home, _, new = homes[name].rpartition(".")
        warnings.warn(f"{module}.{name} is now {homes[name]}.", DeprecationWarning, stacklevel=2)
        return getattr(importlib.import_module(home), new)

    return find


def cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add the path to an error of the system that names no file, such as that of a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


@contextmanager
def atomic_file(path: Path, mode: str = "w", **options: Any) -> Iterator[IO[Any]]:
    """Open a temporary file for writing that replaces `path` when the context ends without an exception.

    If the process or the machine stops, `path` has either its old content or all of the new content. Text is written as
    UTF-8, whatever the locale.

    Args:
        mode, options: passed to `open`.
    """
    # a random name: threads, and machines that share the folder, may have the same process id
    temporary = path.with_name(f".{path.name}.{os.urandom(8).hex()}.part")
    try:
        with naming(path), temporary.open(mode, encoding=None if "b" in mode else "utf-8", **options) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace the content of a file atomically; see `atomic_file`."""
    with atomic_file(path, "wb" if isinstance(content, bytes) else "w") as file:
        file.write(content)


def read_json(path: Path) -> Any:
    """Read a JSON file; raise a ValueError that names the file if its content is not valid JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}.") from error


def rounds(count: int, name: str, verbose: bool) -> Iterable[int]:
    """Return range(count), with a progress bar if verbose and rich is installed."""
    if verbose:
        with suppress(ImportError):
            from rich.progress import track

            return track(range(count), description=name)
    return range(count)


def git_commit() -> str:
    """Return the abbreviated git commit of the checkout that the package runs from, with a + for uncommitted changes.

    Returns "unknown" for an installed package, even if it is installed inside another repository.
    """
    sources = Path(__file__).parents[1]
    if sources.name != "src" or not (sources.parent / ".git").exists():
        return UNKNOWN
    command = ["git", "describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, cwd=sources)
    except OSError:
        return UNKNOWN
    return result.stdout.strip() or UNKNOWN
