"""The folder of all data sets, the record that describes one, and the errors for missing or damaged files."""

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
    """A file of a data set is missing; the message says what to download, its size and where to put it."""


class DamagedDataError(ValueError):
    """A file is truncated, corrupt or incomplete; the message names it."""


@dataclass(frozen=True)
class Source:
    """Instructions for obtaining a data set.

    Args:
        name: the data set's name in error messages, such as "LRA ListOps".
        get: instructions for the user: what to download and where to unpack it, or the command that generates it.
            {folder} is a placeholder for the folder of all data sets.
        size: size on disk as text, such as "180 MB".
    """

    name: str
    get: str
    size: str

    def located(self, folder: Path) -> Source:
        """Return a copy with {folder} replaced by the path of the folder of all data sets."""
        return replace(self, get=self.get.replace("{folder}", str(folder)))


def root(data_dir: str | os.PathLike[str] | None = None) -> Path:
    """Return the folder of all data sets: `data_dir`, else $FLOWFORMER_DATA, else ~/.cache/flowformer."""
    chosen = data_dir or os.environ.get("FLOWFORMER_DATA") or Path.home() / ".cache" / "flowformer"
    return Path(chosen).expanduser()


@dataclass(frozen=True)
class DataSet:
    """A data set: its source, its files, and the functions that read or generate them.

    Args:
        name: the name that `load` takes.
        source: how to obtain the files.
        files: function of the folder of all data sets that returns the required files or folders by key. It may also
            take those options of the reader that decide which files are read.
        reader: function of the folder of all data sets and the options of `load` that returns `Splits`.
        sizes: published size of each part, in cases, tokens, bytes or steps; None if unknown.
        generator: function that writes the files of a synthetic data set into their folder.
    """

    name: str
    source: Source
    files: Callable[..., dict[str, Path]]
    reader: Callable[..., Splits]
    sizes: Mapping[str, int | None] = field(default_factory=dict)
    generator: Callable[..., None] | None = None

    def missing(self, folder: Path, **options: Any) -> Path | None:
        """Return the first required path that does not exist, or None.

        Args:
            options: options of the reader; those that `files` does not take are ignored.
        """
        accepted = inspect.signature(self.files).parameters
        paths = self.files(folder, **{name: value for name, value in options.items() if name in accepted})
        return next((path for path in paths.values() if not path.exists()), None)

    def require(self, folder: Path, **options: Any) -> dict[str, Path]:
        """Return the required files by key; raise `MissingDataError` if one is missing."""
        missing = self.missing(folder, **options)
        if missing is not None:
            source = self.source.located(folder)
            raise MissingDataError(
                f"{source.name} is missing: there is no {missing}. {source.get} It takes {source.size}. If you have it "
                "elsewhere, pass data_dir or set FLOWFORMER_DATA to the folder that holds all data sets."
            )
        return self.files(folder, **options)


def complete(path: Path, what: str, found: int, published: int | None, *, partial: bool = False) -> str:
    """Compare a count with the published one and describe the difference; empty if there is none.

    Args:
        path: the file or folder in which the cases were counted.
        what: the unit of the counts, such as "images".
        found, published: the counts; `published` is None if unknown.
        partial: accept fewer than published. Otherwise, and for a count of 0, raise `DamagedDataError`.
    """
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
    """Join the non-empty descriptions of differences."""
    return "; ".join(filter(None, differences))


def checksum(paths: Iterable[Path]) -> str:
    """Return the first 16 hexadecimal digits of the SHA-256 over the names and contents of files, in this order."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            digest.update(path.name.encode() + b"\0" + hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:16]
