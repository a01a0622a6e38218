"""Locations and records of data sets, and the errors for missing, damaged or incomplete ones."""

from __future__ import annotations

import hashlib
import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from .splits import Splits


class MissingDataError(FileNotFoundError):
    """A data set is missing; the message says what to get, how large it is and where to put it."""


class DamagedDataError(ValueError):
    """A file is truncated, corrupt or incomplete; the message names it."""


@dataclass(frozen=True)
class Source:
    """Where a data set comes from.

    Args:
        name: of the data set.
        get: how to get it: a download and what to do with it, or the command that generates it. {folder} stands for the
            folder of all data sets.
        size: on disk, in words.
    """

    name: str
    get: str
    size: str

    def located(self, folder: Path) -> Source:
        """The source with the path of the folder filled in."""
        return replace(self, get=self.get.replace("{folder}", str(folder)))


def root(data_dir: str | os.PathLike[str] | None = None) -> Path:
    """The folder of all data sets: the argument, else $FLOWFORMER_DATA, else ~/.cache/flowformer."""
    chosen = data_dir or os.environ.get("FLOWFORMER_DATA") or Path.home() / ".cache" / "flowformer"
    return Path(chosen).expanduser()


@dataclass(frozen=True)
class DataSet:
    """A data set: its source, its files, and the functions that read or generate them.

    Args:
        name: as `load` takes it.
        source: where to get it.
        files: from the folder of all data sets to the files, or folders, that must be there; some options of the reader
            may decide which these are.
        reader: from that folder and the options of `load` to `Splits`.
        sizes: how many cases, or what else is counted, the published parts have; None is not known.
        generator: writes the files into their folder, for synthetic sets.
    """

    name: str
    source: Source
    files: Callable[..., dict[str, Path]]
    reader: Callable[..., Splits]
    sizes: Mapping[str, int | None] = field(default_factory=dict)
    generator: Callable[..., None] | None = None

    def missing(self, folder: Path, **options: Any) -> Path | None:
        """The first missing file.

        Args:
            options: of the reader; those that do not decide which files are read are ignored.
        """
        known = inspect.signature(self.files).parameters
        paths = self.files(folder, **{name: value for name, value in options.items() if name in known})
        return next((path for path in paths.values() if not path.exists()), None)

    def require(self, folder: Path, **options: Any) -> dict[str, Path]:
        """The files; raises `MissingDataError` if one is missing."""
        missing = self.missing(folder, **options)
        if missing is not None:
            source = self.source.located(folder)
            raise MissingDataError(
                f"{source.name} is missing: there is no {missing}. {source.get} It takes {source.size}. If you have it "
                "elsewhere, pass data_dir or set FLOWFORMER_DATA to the folder that holds all data sets."
            )
        return self.files(folder, **options)


def complete(path: Path, what: str, found: int, published: int | None, *, partial: bool = False) -> str:
    """A description of how a count differs from the published one; fewer raise `DamagedDataError` unless `partial`."""
    if not found:
        raise DamagedDataError(f"{path} has no {what}. Get it again.")
    if published is None or found == published:
        return ""
    if found < published and not partial:
        raise DamagedDataError(
            f"{path} is incomplete: it has {found:,} {what}, the published data has {published:,}. Get it again, or "
            "pass partial=True to use what is there, labelled as different from the published data."
        )
    return f"{path.name}: {found:,} {what} instead of {published:,}"


def notes(*differences: str) -> str:
    """Joins descriptions of differences; empty ones are left out."""
    return "; ".join(filter(None, differences))


def checksum(paths: Iterable[Path]) -> str:
    """SHA-256 over the names and contents of files, in order; the first 16 hexadecimal digits."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            digest.update(path.name.encode() + b"\0" + hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:16]
