"""Multivariate time series of the UEA archive, read from .ts files.

Features are standardised with the statistics of the training series, missing values are interpolated within their
series. The archive has no validation part.

Shapes: N steps, C channels.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import torch

from .._utils import suggestion
from . import store
from .splits import Columns, DataInfo, Splits

# the ten sets of the paper: training and test cases
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


def load(
    name: str, folder: Path, *, partial: bool = False, bundled: bool = True, max_length: int | None = None
) -> Splits:
    """A set of the archive, from folder/uea/<name>/<name>_{TRAIN,TEST}.ts or from the few that aeon brings along.

    Args:
        bundled: whether those that aeon brings along will do.
        max_length: longer series are cut; None cuts test series at the longest training series, as the paper's code.
    """
    paths = _paths(name, folder, bundled)
    (train, train_labels, classes), (test, test_labels, test_classes) = map(_read, paths)
    if classes != test_classes or train[0].shape[1] != test[0].shape[1]:
        raise store.DamagedDataError(
            f"{paths[0]} has {train[0].shape[1]} channels and classes {classes}, but {paths[1]} has "
            f"{test[0].shape[1]} channels and classes {test_classes}. They do not belong together."
        )
    differs = [
        store.complete(path, "cases", len(cases), published, partial=partial)
        for path, cases, published in zip(paths, (train, test), SIZES.get(name, (None, None)), strict=True)
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


def _paths(name: str, folder: Path, bundled: bool) -> list[Path]:
    files = [f"{name}_{part}.ts" for part in ("TRAIN", "TEST")]
    local = folder / "uea" / name
    spec = importlib.util.find_spec("aeon") if bundled and not local.exists() else None
    if spec is not None and spec.origin is not None:
        brought = Path(spec.origin).parent / "datasets" / "data" / name
        if all((brought / file).exists() for file in files):
            return [brought / file for file in files]
    source = store.Source(
        f"UEA {name}{'' if name in SIZES else suggestion(name, SIZES)}",
        f"Download https://www.timeseriesclassification.com/aeon-toolkit/{name}.zip and unpack it into {local}.",
        "1 MB to 1 GB",
    )
    store.require(source, *(local / file for file in files))
    return [local / file for file in files]


def _read(path: Path) -> tuple[list[np.ndarray], list[int], list[str]]:
    """The series, each (N, C) without gaps, their labels, and the names of the classes.

    Training needs no more of aeon than its reader, which brings scikit-learn and numba along: this is the part of the
    format that the archive uses.
    """
    try:
        header, _, body = path.read_text().partition("@data")
        if "@timestamps true" in header.lower():
            raise ValueError("it has time stamps, which the archive's sets have not")
        (declared,) = (line.split() for line in header.splitlines() if line.lower().startswith("@classlabel"))
        classes = declared[2:]
        cases = [line.strip().split(":") for line in body.splitlines() if line.strip()]
        if not cases:
            raise ValueError("it has no cases")
        series = [_channels(channels) for *channels, _ in cases]
        if len({case.shape[1] for case in series}) != 1:
            raise ValueError("its cases differ in their number of channels")
        return series, [classes.index(label.strip()) for *_, label in cases], classes
    except (OSError, ValueError, IndexError) as error:
        raise store.DamagedDataError(f"{path} is damaged: {error}") from error


def _channels(texts: list[str]) -> np.ndarray:
    """(N, C) from numbers with commas between, a text a channel; ? is a gap."""
    channels = [np.array(text.replace("?", "nan").split(","), np.float64) for text in texts]
    return _filled(np.stack(channels, 1))


def _filled(series: np.ndarray) -> np.ndarray:
    """Missing values by linear interpolation, at the ends by the nearest value; a channel without any value is 0."""
    steps = np.arange(len(series))
    for channel in series.T:
        missing = np.isnan(channel)
        if missing.all():
            channel[:] = 0
        elif missing.any():
            channel[missing] = np.interp(steps[missing], steps[~missing], channel[~missing])
    return series
