"""Multivariate time series of the UEA archive, read from .ts files.

Channels are standardised with the statistics of the training series; missing values are interpolated within their
series. The archive has no validation part.

Shapes: N steps, C channels.
"""

from __future__ import annotations

import importlib.util
from functools import partial
from pathlib import Path

import numpy as np
import torch

from .._utils import check_positive, suggestion
from . import store
from .splits import Columns, DataInfo, Splits
from .store import DataSet

# numbers of training and test cases of the paper's ten data sets
SIZES = {
    "EthanolConcentration": (261, 263),
    "FaceDetection": (5890, 3524),
    "Handwriting": (150, 850),
    "Heartbeat": (204, 205),
    "JapaneseVowels": (270, 370),
    "PEMS-SF": (267, 173),
    "SelfRegulationSCP1": (268, 293),
    "SelfRegulationSCP2": (200, 180),
    "SpokenArabicDigits": (6599, 2199),
    "UWaveGestureLibrary": (120, 320),
}


def load(name: str, folder: Path, *, partial: bool = False, max_length: int | None = None) -> Splits:
    """Read a data set from folder/uea/<name>/<name>_{TRAIN,TEST}.ts, or from the few data sets shipped with aeon.

    Args:
        max_length: length to which longer series are cut; None means the length of the longest training series, as in
            the paper's code.
    """
    if max_length is not None:
        check_positive(max_length=max_length)
    published = record(name)
    paths = list(published.require(folder).values())
    (train, train_labels, classes), (test, test_labels, test_classes) = map(_read, paths)
    if classes != test_classes or train[0].shape[1] != test[0].shape[1]:
        raise store.DamagedDataError(
            f"{paths[0]} has {train[0].shape[1]} channels and classes {classes}, but {paths[1]} has "
            f"{test[0].shape[1]} channels and classes {test_classes}. They do not belong together."
        )
    differs = [
        store.complete(path, "cases", len(cases), count, partial=partial)
        for path, cases, count in zip(paths, (train, test), published.sizes.values(), strict=True)
    ]
    rows = np.concatenate(train)
    mean, deviation = rows.mean(0), rows.std(0, ddof=1) + np.finfo(float).eps
    length = max_length or max(map(len, train))

    def cases(series: list[np.ndarray], labels: list[int]) -> Columns:
        scaled = [torch.from_numpy((x[:length] - mean) / deviation).float() for x in series]
        return Columns(series=scaled, label=torch.tensor(labels))

    info = DataInfo(
        f"uea/{name}",
        store.checksum(paths),
        num_classes=len(classes),
        num_features=len(mean),
        max_length=length,
        differs=store.notes(*differs),
    )
    return Splits(cases(train, train_labels), None, cases(test, test_labels), info)


def record(name: str) -> DataSet:
    """Return the record of any data set of the archive, whether the paper uses it or not."""
    sizes = SIZES.get(name, (None, None))
    return DataSet(
        f"uea/{name}",
        store.Source(
            f"UEA {name}{'' if name in SIZES else suggestion(name, SIZES)}",
            f"Download https://www.timeseriesclassification.com/aeon-toolkit/{name}.zip and unpack it into "
            f"{{folder}}/uea/{name}.",
            "1 MB to 1 GB",
        ),
        files=partial(_files, name),
        reader=partial(load, name),
        sizes={"TRAIN": sizes[0], "TEST": sizes[1]},
    )


def _files(name: str, folder: Path) -> dict[str, Path]:
    """Return the paths of both parts: in folder/uea, or in aeon's installation if only that has the data set."""
    local = folder / "uea" / name
    # no fallback to aeon's copy if data_dir does not exist: it would hide the mistyped path
    mistyped = folder != store.root() and not folder.is_dir()
    spec = None if local.exists() or mistyped else importlib.util.find_spec("aeon")
    if spec is not None and spec.origin is not None:
        bundled = _part_files(Path(spec.origin).parent / "datasets" / "data" / name, name)
        if all(path.exists() for path in bundled.values()):
            return bundled
    return _part_files(local, name)


def _part_files(home: Path, name: str) -> dict[str, Path]:
    return {part: home / f"{name}_{part}.ts" for part in ("TRAIN", "TEST")}


def _read(path: Path) -> tuple[list[np.ndarray], list[int], list[str]]:
    """Read a .ts file: the series, each (N, C) without missing values, their labels, and the names of the classes.

    Supports only what the archive uses of the format. aeon's reader is not used because it would make training depend
    on scikit-learn and numba.
    """
    try:
        header, _, body = path.read_text(encoding="utf-8").partition("@data")
        if "@timestamps true" in header.lower():
            raise ValueError("it has time stamps, which the archive's sets have not")
        (declared,) = (line.split() for line in header.splitlines() if line.lower().startswith("@classlabel"))
        classes = declared[2:]
        cases = [line.strip().split(":") for line in body.splitlines() if line.strip()]
        if not cases:
            raise ValueError("it has no cases")
        series = [_parse_series(channels) for *channels, _ in cases]
        if len({case.shape[1] for case in series}) != 1:
            raise ValueError("its cases differ in their number of channels")
        if not all(np.isfinite(case).all() for case in series):
            raise ValueError("a value is infinite")
        return series, [classes.index(label.strip()) for *_, label in cases], classes
    except (OSError, ValueError, IndexError) as error:
        raise store.DamagedDataError(f"{path} is damaged: {error}") from error


def _parse_series(texts: list[str]) -> np.ndarray:
    """Parse a series (N, C) from the comma-separated values of each channel; ? is a missing value."""
    channels = [np.array(text.replace("?", "nan").split(","), np.float64) for text in texts]
    return _interpolate(np.stack(channels, 1))


def _interpolate(series: np.ndarray) -> np.ndarray:
    """Fill missing values of (N, C) in place: by linear interpolation, and by the nearest value at both ends.

    A channel without any value becomes 0.
    """
    steps = np.arange(len(series))
    for channel in series.T:
        missing = np.isnan(channel)
        if missing.all():
            channel[:] = 0
        elif missing.any():
            channel[missing] = np.interp(steps[missing], steps[~missing], channel[~missing])
    return series


RECORDS = tuple(map(record, SIZES))
