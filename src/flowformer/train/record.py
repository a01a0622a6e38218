"""Records of a run: a log of JSON lines, tensorboard curves, and the provenance."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import resource
import shlex
import sys
from pathlib import Path
from typing import Any

import torch

from .. import __version__
from .._utils import git_commit, read_json, write_atomically
from ..data import DataInfo

# files of the folder of a run
CONFIG, LOG, PROVENANCE, RESULT = "config.json", "log.jsonl", "provenance.json", "result.json"


class RunLog:
    """The log of a run; also writes tensorboard curves if tensorboard is installed.

    Args:
        folder: the folder of the run.
        step: the step at which the run starts or resumes; records of later steps, left by a killed run, are removed.
        active: whether to write; False on all ranks but 0.
    """

    def __init__(self, folder: Path, step: int, active: bool) -> None:
        self._active = active
        if not active:
            return
        path = folder / LOG
        kept = [record for record in read_log(folder) if record["step"] <= step] if path.exists() else []
        write_atomically(path, "".join(json.dumps(record) + "\n" for record in kept))
        self._file = path.open("a")
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            self._curves = None
        else:
            self._curves = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1 if step else None)

    def write(self, record: dict[str, Any]) -> None:
        if not self._active:
            return
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        prefix = record.get("split", record["kind"])
        for name, value in record.items():
            if self._curves and isinstance(value, float):
                self._curves.add_scalar(f"{prefix}/{name}", value, record["step"])

    def close(self) -> None:
        if self._active:
            self._file.close()
            if self._curves:
                self._curves.close()


def read_log(folder: Path) -> list[dict[str, Any]]:
    """The records of a log. Damaged lines are dropped, such as the incomplete last line of a killed run."""
    if not (folder / LOG).is_file():
        raise FileNotFoundError(f"{folder} has no {LOG}; accepted: the folder of a run.")
    records = []
    for line in (folder / LOG).read_text(errors="replace").splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            record = json.loads(line)
            if _is_record(record):
                records.append(record)
    return records


def _is_record(value: Any) -> bool:
    """Whether a line of a log, read as JSON, has the fields that every record of its kind has."""
    if not (isinstance(value, dict) and isinstance(value.get("kind"), str) and isinstance(value.get("step"), int)):
        return False
    if value["kind"] == "train":
        return isinstance(value.get("loss"), float)
    return value["kind"] != "eval" or isinstance(value.get("split"), str)


def provenance(info: DataInfo, device: torch.device, processes: int) -> dict[str, Any]:
    """Where a result comes from: data, hardware, versions, commit, and the command, quoted for a shell."""
    return {
        "data": info.name,
        "checksum": info.checksum,
        "differs": info.differs,
        "environment": info.environment,
        "device": device_name(device),
        "processes": processes,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "accelerate": importlib.metadata.version("accelerate"),
        "flowformer": __version__,
        "commit": git_commit(),
        "command": _command(),
    }


def _command() -> str:
    """The command line of this process; `python -m flowformer.cli`, as torchrun runs it, becomes `flowformer`."""
    program = Path(sys.argv[0])
    is_ours = program.parts[-3:] == ("flowformer", "cli", "__main__.py")
    return shlex.join(["flowformer" if is_ours else program.name, *sys.argv[1:]])


def write_provenance(folder: Path, facts: dict[str, Any], *, resumed: bool = False) -> None:
    """Write provenance.json. After a resume, the facts of the start are kept and the new ones added to "resumed"."""
    path = folder / PROVENANCE
    if resumed and path.is_file():
        first = read_json(path)
        facts = {**first, "resumed": [*first.get("resumed", []), facts]}
    write_atomically(path, json.dumps(facts, indent=2) + "\n")


def check_same_data(folder: Path, name: str, info: DataInfo) -> None:
    """Raise unless a run that is resumed has the data that it was started with.

    Args:
        name: the name of the data in its config.
    """
    path = folder / PROVENANCE
    if path.is_file() and (expected := read_json(path)["checksum"]) != info.checksum:
        raise ValueError(
            f"{name} has other files than those {folder} was started with: checksum {info.checksum} instead of "
            f"{expected}. Resume it with the same data, or choose another folder."
        )


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()


def peak_memory(device: torch.device) -> float:
    """Peak memory in MiB: of the tensors on a GPU, or of the whole process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10


def is_main() -> bool:
    """Whether this process is rank 0; works before the process group is set up."""
    return os.environ.get("RANK", "0") == "0"
