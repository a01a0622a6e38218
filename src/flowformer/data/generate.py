"""Helpers for generating synthetic data sets in parts.

Parts are written in parallel and each one atomically, so that an interrupted generation can be resumed.
"""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from .._utils import check_positive, cores, write_atomically

Progress = Callable[[int, int], None]


def claim(home: Path, parameters: Mapping[str, object]) -> None:
    """Create a folder and record the parameters of its data in generated.json.

    A folder already recorded with the same parameters is accepted, so that generation can be resumed.

    Raises:
        ValueError: the folder holds data of other parameters, or files that were not generated.
    """
    record = home / "generated.json"
    expected = json.dumps(dict(parameters), indent=1) + "\n"
    if record.exists():
        existing = record.read_text()
        if existing != expected:
            raise ValueError(
                f"{home} holds data generated with other parameters, {json.loads(existing)} instead of "
                f"{dict(parameters)}. Delete the folder, or choose another data_dir."
            )
        return
    if home.exists() and any(home.iterdir()):
        raise ValueError(f"{home} holds data that were not generated here. Choose another data_dir.")
    home.mkdir(parents=True, exist_ok=True)
    write_atomically(record, expected)


def check_whole(name: str, value: object) -> None:
    """Raise unless the value is an integer."""
    if not isinstance(value, int):
        raise ValueError(f"{name} must be a whole number, got {value!r}.")


def run(make: Callable[[int], object], parts: Sequence[int], workers: int | None, progress: Progress | None) -> None:
    """Call make(part) for each part, in `workers` processes; None means one process per core."""
    workers = cores() if workers is None else workers
    check_positive(workers=workers)
    workers = min(workers, len(parts))
    report = progress or (lambda done, total: None)
    if workers <= 1:
        for done, part in enumerate(parts, 1):
            make(part)
            report(done, len(parts))
        return
    # spawn: forking a process that has threads may deadlock
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        futures = [pool.submit(make, part) for part in parts]
        try:
            for done, future in enumerate(as_completed(futures), 1):
                future.result()
                report(done, len(parts))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
