"""Checkpoints that a crash cannot spoil: written aside, flushed to the disk, then renamed in one move."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator  # type: ignore[import-untyped]

_PROGRESS = "progress.json"


def write_text(path: Path, text: str) -> None:
    """Write a file so that it is either the old one or the new one, whenever the machine stops."""
    aside = path.with_name(f".{path.name}.part")
    with aside.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)


def save(accelerator: Accelerator, folder: Path, step: int, progress: dict[str, Any], keep: int) -> Path:
    """Write parameters, optimiser, scaler, random numbers and progress as folder/step-…; all processes call it."""
    final = folder / f"step-{step:08d}"
    aside = folder / f".{final.name}.part"
    if accelerator.is_main_process:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
    accelerator.wait_for_everyone()
    accelerator.save_state(str(aside))
    (aside / f"random-{accelerator.process_index}.sha256").write_text(_random_digest())
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        (aside / _PROGRESS).write_text(json.dumps({**progress, "processes": accelerator.num_processes}))
        for path in [*aside.rglob("*"), aside]:
            _flush(path)
        shutil.rmtree(final, ignore_errors=True)
        os.replace(aside, final)
        _flush(folder)
        for old in _complete(folder)[:-keep]:
            shutil.rmtree(old)
    accelerator.wait_for_everyone()
    return final


def latest(folder: Path) -> Path | None:
    """The newest complete checkpoint; what a crash left half-written has another name and is not looked at."""
    complete = _complete(folder)
    return complete[-1] if complete else None


def restore(accelerator: Accelerator, checkpoint: Path) -> dict[str, Any]:
    """Put everything back as `save` found it, and return the progress."""
    progress = json.loads((checkpoint / _PROGRESS).read_text())
    if progress.pop("processes") != accelerator.num_processes:
        raise ValueError(
            f"{checkpoint} was written by another number of processes than {accelerator.num_processes}. Resume with as "
            "many: the random numbers of each are part of the run."
        )
    accelerator.load_state(str(checkpoint))
    # the engine goes on in silence if it cannot read the random numbers, and the run would be another one
    if _random_digest() != (checkpoint / f"random-{accelerator.process_index}.sha256").read_text():
        raise RuntimeError(f"the random numbers of {checkpoint} could not be restored; resume with the same versions.")
    return progress


def _complete(folder: Path) -> list[Path]:
    return sorted(path.parent for path in folder.glob(f"step-*/{_PROGRESS}"))


def _random_digest() -> str:
    return hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest()


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
