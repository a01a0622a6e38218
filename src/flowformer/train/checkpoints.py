"""Checkpoints that survive crashes: written under a temporary name, synced to disk, then renamed atomically."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

_PROGRESS = "progress.json"


class DamagedCheckpointError(ValueError):
    """A file of a checkpoint changed after it was written; the message names it and says how to go on."""


def save(accelerator: Accelerator, folder: Path, step: int, progress: dict[str, Any], keep: int) -> Path:
    """Write parameters, optimiser, scaler, random states and progress to folder/step-…; all ranks must call it."""
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
        facts = {**progress, "processes": accelerator.num_processes, "files": _digests(aside)}
        (aside / _PROGRESS).write_text(json.dumps(facts))
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
    """The newest complete checkpoint; one that a crash left incomplete still has its temporary name and is ignored."""
    complete = _complete(folder)
    return complete[-1] if complete else None


def restore(accelerator: Accelerator, checkpoint: Path) -> dict[str, Any]:
    """Restore what `save` wrote, and return the progress."""
    progress = _verified(checkpoint)
    if progress.pop("processes") != accelerator.num_processes:
        raise ValueError(
            f"{checkpoint} was not written by {accelerator.num_processes} processes. Resume with as many as before: "
            "each has random numbers of its own."
        )
    accelerator.load_state(str(checkpoint))
    # accelerate ignores random states that it cannot read; the run would then not be the same
    if _random_digest() != (checkpoint / f"random-{accelerator.process_index}.sha256").read_text():
        raise RuntimeError(f"the random numbers of {checkpoint} could not be restored; resume with the same versions.")
    return progress


def _verified(checkpoint: Path) -> dict[str, Any]:
    """The progress of a checkpoint, after a check of its files against their digests."""
    try:
        progress = json.loads((checkpoint / _PROGRESS).read_text())
        written, found = progress.pop("files"), _digests(checkpoint)
        damaged = [name for name in written if found.get(name) != written[name]]
    except (ValueError, KeyError):
        damaged = [_PROGRESS]
    if damaged:
        older = _complete(checkpoint.parent)[:-1]
        then = f"goes on from {older[-1].name}" if older else "begins anew"
        raise DamagedCheckpointError(
            f"{checkpoint} is damaged: {', '.join(damaged)} changed since it was written. Delete that folder; the run "
            f"then {then}, with the same result."
        )
    return progress


def _digests(folder: Path) -> dict[str, str]:
    """SHA-256 of every file, by its name below the folder."""
    digests = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != _PROGRESS:
            with path.open("rb") as file:
                digests[str(path.relative_to(folder))] = hashlib.file_digest(file, "sha256").hexdigest()
    return digests


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
