"""Checkpoints that survive crashes: written under a temporary name, synced to disk, then renamed atomically.

Parameters and optimiser state are written by torch.distributed.checkpoint, where each rank writes its shard, so that a
run can be resumed with another number of processes, with or without sharding. `save_state` and `load_state` are for
methods without attention, which train in one process.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator
from accelerate.checkpointing import load_accelerator_state, save_accelerator_state
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import set_seed
from torch import nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from .._utils import naming

_PROGRESS, _STATE, _STATE_FILE = "progress.json", "state", "state.pt"


class DamagedCheckpointError(ValueError):
    """A file of a checkpoint changed after it was written; the message names it and says how to continue."""


def save(
    accelerator: Accelerator,
    objective: nn.Module,
    optimiser: AcceleratedOptimizer,
    folder: Path,
    progress: dict[str, Any],
    keep: int,
) -> Path:
    """Write parameters, optimiser state, scaler, random states and progress to folder/step-…; all ranks must call it.

    Args:
        progress: JSON values, among them "step".
        keep: number of checkpoints to keep; older ones are deleted.
    """
    final, temporary = _paths(folder, progress)
    if accelerator.is_main_process:
        _make_temporary(temporary)
    accelerator.wait_for_everyone()
    try:
        with _without_warning():
            dcp.save(_state(objective, optimiser), checkpoint_id=temporary / _STATE, no_dist=not dist.is_initialized())
    except CheckpointException as failed:
        reason, _ = next(iter(failed.failures.values()))
        raise _unwritten(final, temporary, reason) from failed
    rank = accelerator.process_index
    # every rank saves its random states; the scaler is the same on all ranks, so rank 0 saves it
    scaler = accelerator.scaler if accelerator.is_main_process else None
    save_accelerator_state(str(temporary), [], [], [], [], rank, progress["step"], scaler)
    (temporary / f"random-{rank}.sha256").write_text(_random_digest())
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        _publish(temporary, final, {**progress, "processes": accelerator.num_processes}, keep)
    accelerator.wait_for_everyone()
    return final


def save_state(state: dict[str, Any], folder: Path, progress: dict[str, Any]) -> Path:
    """Write a state to folder/step-…, and delete the checkpoint before.

    Args:
        state: tensors, numbers, strings, and lists and dicts of them, as `state_dict` returns them.
        progress: JSON values, among them "step".
    """
    final, temporary = _paths(folder, progress)
    _make_temporary(temporary)
    # to memory first: torch's errors of a file that cannot be written do not say why
    content = io.BytesIO()
    torch.save(state, content)
    try:
        with naming(temporary / _STATE_FILE):
            (temporary / _STATE_FILE).write_bytes(content.getbuffer())
    except OSError as failed:
        raise _unwritten(final, temporary, failed) from failed
    _publish(temporary, final, progress, keep=1)
    return final


def load_state(checkpoint: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The state, on the CPU, and the progress that `save_state` wrote."""
    progress = _verified(checkpoint)
    return torch.load(checkpoint / _STATE_FILE, map_location="cpu", weights_only=True), progress


def latest(folder: Path) -> Path | None:
    """The newest complete checkpoint; one that a crash left incomplete still has its temporary name and is ignored."""
    complete = _complete(folder)
    return complete[-1] if complete else None


def restore(
    accelerator: Accelerator, objective: nn.Module, optimiser: AcceleratedOptimizer, checkpoint: Path, seed: int
) -> dict[str, Any]:
    """Restore the state that `save` wrote, and return the progress.

    If the number of processes has changed, every rank gets a new random state, drawn from the seed and the step.
    """
    progress = _verified(checkpoint)
    if not (checkpoint / _STATE).is_dir():
        raise ValueError(
            f"{checkpoint} has no folder {_STATE!r}: an earlier version wrote it. Resume with that version, or train "
            "in another folder."
        )
    state = _state(objective, optimiser)
    with _without_warning():
        dcp.load(state, checkpoint_id=checkpoint / _STATE, no_dist=not dist.is_initialized())
    set_state_dict(objective, optimiser.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimiser"])
    rank = accelerator.process_index
    load_accelerator_state(str(checkpoint), [], [], [], [], rank, accelerator.scaler)
    if progress.pop("processes") != accelerator.num_processes:
        digest = hashlib.sha256(f"{seed} {progress['step']}".encode()).digest()
        set_seed(int.from_bytes(digest[:3], "big"), device_specific=True)
    # accelerate ignores random states that it cannot read; the resumed run would then differ from an uninterrupted one
    elif _random_digest() != (checkpoint / f"random-{rank}.sha256").read_text():
        raise RuntimeError(f"the random numbers of {checkpoint} could not be restored; resume with the same versions.")
    return progress


def _paths(folder: Path, progress: dict[str, Any]) -> tuple[Path, Path]:
    """The final and the temporary path of a checkpoint."""
    final = folder / f"step-{progress['step']:08d}"
    return final, folder / f".{final.name}.part"


def _make_temporary(temporary: Path) -> None:
    for incomplete in temporary.parent.glob(".step-*.part"):  # left by a crash, perhaps at another step
        shutil.rmtree(incomplete, ignore_errors=True)
    temporary.mkdir(parents=True)


def _publish(temporary: Path, final: Path, progress: dict[str, Any], keep: int) -> None:
    """Add the progress and the digests of the files, sync all to disk, and give the checkpoint its final name."""
    (temporary / _PROGRESS).write_text(json.dumps({**progress, "files": _digests(temporary)}))
    for path in [*temporary.rglob("*"), temporary]:
        _sync(path)
    shutil.rmtree(final, ignore_errors=True)
    os.replace(temporary, final)
    _sync(final.parent)
    for old in _complete(final.parent)[:-keep]:
        shutil.rmtree(old)


def _unwritten(final: Path, temporary: Path, reason: object) -> OSError:
    """The error of a checkpoint that could not be written; deletes what there is of it, which may fill the disk."""
    free = shutil.disk_usage(final.parent).free
    shutil.rmtree(temporary, ignore_errors=True)
    return OSError(
        f"{final} could not be written: {reason}. The disk has {free / 2**20:.0f} MiB left. Free some space and "
        "resume: the run goes on from the checkpoint before."
    )


def _state(objective: nn.Module, optimiser: AcceleratedOptimizer) -> dict[str, Any]:
    """The parameters and the optimiser state, under names that do not depend on DDP, FSDP or torch.compile."""
    model, optimiser_state = get_state_dict(objective, optimiser.optimizer)
    groups: Any = optimiser_state["param_groups"]
    for group in groups:
        # with CUDA graphs the learning rate is a tensor on the device, except before the first update
        group["lr"] = float(group["lr"])
    return {"model": model, "optimiser": optimiser_state}


@contextmanager
def _without_warning() -> Iterator[None]:
    """Suppress torch's warning that a single process saves without a process group."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield


def _verified(checkpoint: Path) -> dict[str, Any]:
    """Check the files of a checkpoint against their digests, and return its progress."""
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
    """The SHA-256 digest of every file but progress.json, keyed by its path relative to the folder."""
    digests = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != _PROGRESS:
            with path.open("rb") as file:
                digests[str(path.relative_to(folder))] = hashlib.file_digest(file, "sha256").hexdigest()
    return digests


def _complete(folder: Path) -> list[Path]:
    """The complete checkpoints of a folder, oldest first."""
    return sorted(path.parent for path in folder.glob(f"step-*/{_PROGRESS}"))


def _random_digest() -> str:
    return hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
