"""The five tasks of the Long-Range Arena as token sequences.

ListOps, retrieval and Pathfinder are read from folder/lra_release in the layout of the LRA release, text from aclImdb,
and images from CIFAR-10.

Shapes: M cases, N tokens of a case.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .._utils import check_positive, optional_import
from . import listops as listops_data
from . import pathfinder as pathfinder_data
from . import store, vision
from .splits import Columns, DataInfo, FlatSequences, Splits
from .store import DataSet

_RELEASE = "Download https://storage.googleapis.com/long-range-arena/lra_release.gz (8 GB) and unpack it in {folder}"
_PAIR_PARTS = ("train", "eval", "test")
_BYTES: dict[str, Any] = {"vocab_size": 257, "padding_id": 0}


def release(folder: Path) -> Path:
    """Return the folder with the files of the release; the archive unpacks to lra_release/lra_release."""
    nested = folder / "lra_release" / "lra_release"
    return nested if nested.exists() else folder / "lra_release"


def listops(folder: Path, *, partial: bool = False, max_length: int = 2000) -> Splits:
    """Read ListOps: the value of an expression of nested operations on digits, ten classes.

    Closing brackets are tokens; parentheses are dropped.

    Args:
        max_length: length to which longer expressions are cut; every published one is shorter than the default.
    """
    check_positive(max_length=max_length)
    paths = LISTOPS.require(folder)
    parts, differs = [], [_generation_note(paths["train"].parent)]
    for part, path in paths.items():
        tokens, ends, labels = _read_listops(path)
        differs.append(store.complete(path, "rows", len(labels), LISTOPS.sizes[part], partial=partial))
        starts = torch.cat((ends.new_zeros(1), ends[:-1]))
        parts.append(Columns(tokens=FlatSequences(tokens, starts, ends.minimum(starts + max_length)), label=labels))
    info = DataInfo(
        "lra/listops",
        store.checksum(paths.values()),
        num_classes=10,
        vocab_size=len(listops_data.VOCABULARY),
        padding_id=0,
        max_length=max_length,
        differs=store.notes(*differs),
    )
    train, valid, test = parts
    return Splits(train, valid, test, info)


def text(folder: Path, *, partial: bool = False, max_length: int = 4000) -> Splits:
    """Read film reviews as bytes, to be classified by sentiment, two classes.

    There is no validation part: the published code validates on the test part.

    Args:
        max_length: length to which longer reviews are cut; the published code uses 1000, the published text says 4000.
    """
    check_positive(max_length=max_length)
    folders = TEXT.require(folder)
    digest, differs, parts = hashlib.sha256(), [], []
    for part in ("train", "test"):
        reviews, labels = [], []
        for label, name in enumerate((f"{part}/neg", f"{part}/pos")):
            paths = sorted(folders[name].glob("*.txt"))
            differs.append(store.complete(folders[name], "reviews", len(paths), TEXT.sizes[name], partial=partial))
            for path in paths:
                review = path.read_bytes()
                if not review:
                    raise store.DamagedDataError(f"{path} is empty; unpack the reviews again.")
                digest.update(path.name.encode() + b"\0" + review)
                reviews.append(review[:max_length])
                labels.append(label)
        parts.append(Columns(tokens=_byte_sequences(reviews), label=torch.tensor(labels)))
    info = DataInfo(
        "lra/text",
        digest.hexdigest()[:16],
        num_classes=2,
        max_length=max_length,
        differs=store.notes(*differs),
        **_BYTES,
    )
    return Splits(parts[0], None, parts[1], info)


def retrieval(folder: Path, *, partial: bool = False, max_length: int = 4000) -> Splits:
    """Read AAN: pairs of papers of the ACL anthology as bytes; the label is whether one cites the other.

    Args:
        max_length: length to which longer papers are cut.
    """
    return _load_pairs(RETRIEVAL, folder, "", partial, max_length)


def acl(folder: Path, *, partial: bool = False, max_length: int = 4000) -> Splits:
    """Read pairs of open ACL papers from folder/acl: a small substitute for `retrieval` in the same format.

    Args: see `retrieval`.
    """
    differs = "a small stand-in for AAN from open ACL papers; not comparable with published numbers"
    return _load_pairs(ACL, folder, differs, partial, max_length)


def image(folder: Path, *, partial: bool = False) -> Splits:
    """Read CIFAR-10 as 1024 grey intensities in row-major order, ten classes.

    The last tenth of the training images is the validation part.
    """
    data = vision.read_cifar10(folder, partial=partial)
    tokens, labels = _grey(data.train[0]), data.train[1]
    train_size = len(labels) * 9 // 10
    info = DataInfo("lra/image", data.checksum, num_classes=10, vocab_size=256, max_length=1024, differs=data.differs)
    return Splits(
        Columns(tokens=_pixel_sequences(tokens[:train_size]), label=labels[:train_size]),
        Columns(tokens=_pixel_sequences(tokens[train_size:]), label=labels[train_size:]),
        Columns(tokens=_pixel_sequences(_grey(data.test[0])), label=data.test[1]),
        info,
    )


def pathfinder(folder: Path, *, partial: bool = False, contour_length: int = 14) -> Splits:
    """Read Pathfinder: whether a dashed path joins two discs in an image of 32 x 32 pixels, two classes.

    The images are split 80 / 10 / 10 % in the order of the files.

    Args:
        contour_length: number of dashes of a path. 14 is the published task; the release also has 9.
    """
    metadata = PATHFINDER.require(folder, contour_length=contour_length)["metadata"]
    home = metadata.parent
    lists = sorted(metadata.glob("*.npy"), key=lambda path: (len(path.stem), path.stem))
    cases = [case for path in lists for case in _read_metadata(path)]
    differs = [
        _generation_note(home),
        store.complete(home, "images", len(cases), PATHFINDER.sizes["metadata"], partial=partial),
    ]
    images = np.empty((len(cases), 1024), np.uint8)
    digest = hashlib.sha256()
    for row, (path, _) in zip(images, cases, strict=True):
        row[:] = _read_image(path)
        digest.update(row.tobytes())
    labels = torch.tensor([label for _, label in cases])
    digest.update(labels.numpy().tobytes())
    tokens = torch.from_numpy(images)
    ends = [0, len(cases) * 8 // 10, len(cases) * 9 // 10, len(cases)]
    parts = [
        Columns(tokens=_pixel_sequences(tokens[start:end]), label=labels[start:end]) for start, end in pairwise(ends)
    ]
    info = DataInfo(
        "lra/pathfinder",
        digest.hexdigest()[:16],
        num_classes=2,
        vocab_size=256,
        max_length=1024,
        differs=store.notes(*differs),
    )
    train, valid, test = parts
    return Splits(train, valid, test, info)


def _generation_note(home: Path) -> str:
    """Return a note with the seed if the files were generated instead of downloaded; else an empty string."""
    record = home / "generated.json"  # written by generate.claim
    if not record.exists():
        return ""
    return f"generated by the published parameters, seed {json.loads(record.read_text())['seed']}"


def _read_listops(path: Path) -> tuple[Tensor, Tensor, Tensor]:
    """Read all rows of a file: the tokens end to end (uint8), the end of each row, and the labels (M,)."""
    tokens, ends, labels, total, line = [], [], [], 0, 2
    with path.open("rb") as file:
        if file.readline().split() != [b"Source", b"Target"]:
            raise store.DamagedDataError(f"{path} is damaged: its first line is not the columns Source and Target.")
        while block := file.read(1 << 24) + file.readline():
            if not block.endswith(b"\n"):
                raise store.DamagedDataError(f"{path} is cut short: its last line does not end.")
            flat, rows, targets = listops_data.tokenise(block, f"{path}, from line {line}")
            tokens.append(torch.from_numpy(flat))
            ends.append(torch.from_numpy(rows) + total)
            labels.append(torch.from_numpy(targets))
            total, line = total + len(flat), line + len(rows)
    if not tokens:
        raise store.DamagedDataError(f"{path} is damaged: it has no rows.")
    return torch.cat(tokens), torch.cat(ends), torch.cat(labels)


def _load_pairs(record: DataSet, folder: Path, differs: str, partial: bool, max_length: int) -> Splits:
    check_positive(max_length=max_length)
    paths = record.require(folder)
    digest, differences, parts = hashlib.sha256(), [differs], []
    # the index of each distinct text: a paper occurs in many pairs, but is stored once
    texts: dict[bytes, int] = {}
    cases = {part: list(_read_pairs(path, digest, texts, max_length)) for part, path in paths.items()}
    for part, path in paths.items():
        differences.append(store.complete(path, "pairs", len(cases[part]), record.sizes[part], partial=partial))
    sequences = _byte_sequences(list(texts))
    for part in paths:
        labels, first, second = torch.tensor(cases[part]).T
        parts.append(Columns(first=sequences.take(first), second=sequences.take(second), label=labels))
    info = DataInfo(
        record.name,
        digest.hexdigest()[:16],
        num_classes=2,
        max_length=max_length,
        differs=store.notes(*differences),
        **_BYTES,
    )
    train, valid, test = parts
    return Splits(train, valid, test, info)


def _read_pairs(path: Path, digest, texts: dict[bytes, int], max_length: int) -> Iterator[tuple[int, int, int]]:
    """Yield the label and the indices of both texts of each pair; new texts are added to `texts`."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            digest.update(line)
            columns = line.rstrip(b"\r\n").split(b"\t")
            if len(columns) != 5 or columns[0] not in (b"0", b"1", b"0.0", b"1.0"):
                raise store.DamagedDataError(
                    f"{path}, line {number} is damaged: expected label 0 or 1, two ids and two texts with tabs "
                    f"between, got {len(columns)} columns, the first {columns[0][:20]!r}."
                )
            # some texts are empty: replace them by a blank, since a sequence needs at least one token
            first, second = (texts.setdefault(column[:max_length] or b" ", len(texts)) for column in columns[3:])
            yield int(columns[0][:1]), first, second


def _read_metadata(path: Path) -> Iterator[tuple[Path, int]]:
    """Yield the path and the label of each image that a metadata file lists."""
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        columns = line.split(b" ")
        if len(columns) < 4 or columns[3] not in (b"0", b"1"):
            raise store.DamagedDataError(
                f"{path}, line {number} is damaged: expected folder, file, number and label 0 or 1, got {line[:80]!r}."
            )
        yield path.parent.parent / columns[0].decode() / columns[1].decode(), int(columns[3])


def _read_image(path: Path) -> np.ndarray:
    """Read the grey intensities (1024,) of an image of 32 x 32 pixels."""
    try:
        with optional_import("PIL.Image", "train").open(path) as picture:
            pixels = np.asarray(picture.convert("L"))
    except (OSError, SyntaxError) as error:
        raise store.DamagedDataError(f"{path} is damaged or missing: {error}") from error
    if pixels.shape != (32, 32):
        raise store.DamagedDataError(f"{path} is {pixels.shape[0]} x {pixels.shape[1]} pixels, expected 32 x 32.")
    return pixels.reshape(-1)


def _byte_sequences(texts: list[bytes]) -> FlatSequences:
    """Store texts as token sequences; byte b has id b + 1, since 0 is padding."""
    ends = torch.tensor([len(text) for text in texts]).cumsum(0)
    starts = torch.cat((ends.new_zeros(1), ends[:-1]))
    return FlatSequences(torch.frombuffer(bytearray(b"".join(texts)), dtype=torch.uint8), starts, ends, shift=1)


def _pixel_sequences(images: Tensor) -> FlatSequences:
    """Store images (M, N) as token sequences."""
    starts = torch.arange(len(images)) * images.shape[1]
    return FlatSequences(images.reshape(-1), starts, starts + images.shape[1])


def _grey(images: Tensor) -> Tensor:
    """Convert (M, 3, 32, 32) uint8 to grey (M, 1024): luma of ITU-R 601, rounded as in the published pipeline."""
    weights = torch.tensor([0.2989, 0.5870, 0.1140])
    return torch.cat(
        [
            (torch.einsum("mcyx,c->myx", part.float(), weights) * (255.5 / 255)).byte().flatten(1)
            for part in images.split(1000)
        ]
    )


def _listops_files(folder: Path) -> dict[str, Path]:
    return {part: release(folder) / "listops-1000" / f"basic_{part}.tsv" for part in listops_data.SIZES}


def _pathfinder_files(folder: Path, contour_length: int = 14) -> dict[str, Path]:
    home = release(folder) / "pathfinder32" / f"curv_contour_length_{contour_length}"
    return {"metadata": home / "metadata"}


def _pair_files(home: Path) -> dict[str, Path]:
    return {part: home / f"new_aan_pairs.{part}.tsv" for part in _PAIR_PARTS}


_REVIEWS = ("train/neg", "train/pos", "test/neg", "test/pos")
LISTOPS = DataSet(
    "lra/listops",
    store.Source(
        "LRA ListOps",
        f"{_RELEASE}, or generate it: flowformer data prepare lra/listops.",
        "600 MB, or 300 MB generated",
    ),
    files=_listops_files,
    reader=listops,
    sizes=listops_data.SIZES,
    generator=listops_data.generate,
)
TEXT = DataSet(
    "lra/text",
    store.Source(
        "IMDb reviews",
        "Download https://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz and unpack it in {folder}.",
        "500 MB with the unlabelled reviews, which are not needed",
    ),
    files=lambda folder: {name: folder / "aclImdb" / name for name in _REVIEWS},
    reader=text,
    sizes=dict.fromkeys(_REVIEWS, 12_500),
)
RETRIEVAL = DataSet(
    "lra/retrieval",
    store.Source("LRA retrieval (AAN)", f"{_RELEASE}.", "8 GB, all of the release"),
    files=lambda folder: _pair_files(release(folder) / "tsv_data"),
    reader=retrieval,
    sizes={"train": 147_086, "eval": 18_090, "test": 17_437},
)
ACL = DataSet(
    "acl",
    store.Source(
        "acl",
        "Put new_aan_pairs.{train,eval,test}.tsv with columns label, id, id, text, text into {folder}/acl.",
        "130 MB",
    ),
    files=lambda folder: _pair_files(folder / "acl"),
    reader=acl,
    sizes=dict.fromkeys(_PAIR_PARTS),
)
IMAGE = replace(vision.CIFAR10, name="lra/image", reader=image)
PATHFINDER = DataSet(
    "lra/pathfinder",
    store.Source(
        "LRA Pathfinder32",
        f"{_RELEASE}, or generate it: flowformer data prepare lra/pathfinder.",
        "900 MB (200,000 small files)",
    ),
    files=_pathfinder_files,
    reader=pathfinder,
    sizes={"metadata": pathfinder_data.IMAGES},
    generator=pathfinder_data.generate,
)
RECORDS = (LISTOPS, TEXT, RETRIEVAL, IMAGE, PATHFINDER, ACL)
