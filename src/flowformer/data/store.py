"""Where data lives, and what is said when it is missing, damaged or incomplete."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path


class MissingDataError(FileNotFoundError):
    """A data set is not there; the message says what to get, how large it is and where to put it."""

    source: Source


class DamagedDataError(ValueError):
    """A file cannot be what its name says: cut short, garbled or incomplete; the message names it."""


@dataclass(frozen=True)
class Source:
    """Where a data set comes from.

    Args:
        name: of the data set.
        get: how to get it: a download and what to do with it, or the command that generates it.
        size: on disk, in words.
    """

    name: str
    get: str
    size: str


def root(data_dir: str | os.PathLike[str] | None = None) -> Path:
    """The folder of all data sets: the argument, else $FLOWFORMER_DATA, else ~/.cache/flowformer."""
    chosen = data_dir or os.environ.get("FLOWFORMER_DATA") or Path.home() / ".cache" / "flowformer"
    return Path(chosen).expanduser()


class _FoundError(Exception):
    """What a reader looked for is there, and nobody asked to read it."""


_looking = ContextVar("looking", default=False)


def require(source: Source, *paths: Path) -> None:
    """Raises `MissingDataError` for the first of the paths that does not exist."""
    for path in paths:
        if not path.exists():
            error = MissingDataError(
                f"{source.name} is missing: there is no {path}. {source.get} It takes {source.size}. If you have it "
                "elsewhere, pass data_dir or set FLOWFORMER_DATA to the folder that holds all data sets."
            )
            error.source = source
            raise error
    if _looking.get():
        raise _FoundError


def missing(read: Callable[[], object]) -> Source | None:
    """Where to get what a reader does not find; None if it is there. Stops before anything is read."""
    token = _looking.set(True)
    try:
        read()
    except _FoundError:
        pass
    except MissingDataError as error:
        return error.source
    finally:
        _looking.reset(token)
    return None


def complete(path: Path, what: str, found: int, published: int | None, *, partial: bool = False) -> str:
    """In words, how a count differs from the published one; fewer raise `DamagedDataError` unless `partial`."""
    if published is None or found == published:
        return ""
    if found < published and not partial:
        raise DamagedDataError(
            f"{path} is incomplete: it has {found:,} {what}, the published data has {published:,}. Get it again, or "
            "pass partial=True to use what is there, labelled as different from the published data."
        )
    return f"{path.name}: {found:,} {what} instead of {published:,}"


def notes(*differences: str) -> str:
    """Differences in words, joined; empty ones are left out."""
    return "; ".join(filter(None, differences))


def checksum(paths: Iterable[Path]) -> str:
    """SHA-256 over the names and contents of files, in order; the first 16 hexadecimal digits."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            digest.update(path.name.encode() + b"\0" + hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:16]
