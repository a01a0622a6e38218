"""Claims on the folders of runs: a file with an owner and a heartbeat, so that one process at a time works in a folder.

A claim holds across processes and machines that share the folder. It expires when its process is gone or its heartbeat
stops; another process may then take it over.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import socket
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from .._utils import naming

CLAIM = "claim.json"
HEARTBEAT = 5.0  # seconds between heartbeats
STALE = 120.0  # seconds without a heartbeat after which a claim expires
PARENT = "FLOWFORMER_PARENT"  # environment variable with the pid of the queue that started this process
_RESERVED = "reserved"


class FolderInUseError(OSError):
    """Another process works in the folder."""


class Claim:
    """A claim that this process holds.

    Attributes: `lost`, whether another process took the claim over because this one was suspended for more than `STALE`
    seconds; this process must then stop writing into the folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._path = folder, folder / CLAIM
        self._token = uuid.uuid4().hex
        self._done = threading.Event()
        self.lost = False
        _leave_if_orphaned()
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(self._path) as file:
            owner = _alive(file, folder)
            if owner is not None and not _is_for_us(owner):
                raise FolderInUseError(
                    f"{folder} is in use by process {owner['pid']} on {owner['host']}, whose last heartbeat was "
                    f"{owner['silent']:.0f} s ago. Wait for it, stop it, or choose another folder."
                )
            _write(file, {"token": self._token, "pid": os.getpid(), **_machine()})
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise if another process took the claim over."""
        if self.lost:
            raise FolderInUseError(
                f"another process took {self._folder} over while this one was suspended; this one stops."
            )

    def release(self) -> None:
        self._done.set()
        self._thread.join()
        with _locked(self._path) as file:
            if _read(file).get("token") == self._token:
                _write(file, {})

    def _beat(self) -> None:
        last = time.monotonic()
        while not self._done.wait(1.0):
            _leave_if_orphaned()
            if time.monotonic() - last < HEARTBEAT:
                continue
            last = time.monotonic()
            with suppress(OSError), _locked(self._path) as file:  # a network file system may be unreachable for a while
                if _read(file).get("token") != self._token:
                    self.lost = True
                    return
                os.utime(self._path)


def is_queued() -> bool:
    """Whether a queue started this process and reserved its folder."""
    return PARENT in os.environ


def reserve(folder: Path) -> dict[str, Any] | None:
    """Reserve a folder for a child process that is about to start, unless it has an owner, which is then returned.

    A reservation has no heartbeat, so it expires after `STALE` seconds unless the child claims the folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder / CLAIM) as file:
        owner = _alive(file, folder)
        if owner is None:
            _write(file, {"token": _RESERVED, "pid": os.getpid(), **_machine()})
        return owner


def unreserve(folder: Path) -> None:
    """Release a reservation that no child turned into a claim."""
    with _locked(folder / CLAIM) as file:
        claim = _read(file)
        if claim.get("token") == _RESERVED and claim["pid"] == os.getpid():
            _write(file, {})


@contextmanager
def claimed(folder: Path, active: bool = True) -> Iterator[Claim | None]:
    """Hold the claim of a folder; raises `FolderInUseError` if another process has it.

    Args:
        active: False does not claim the folder, for ranks other than 0.
    """
    claim = Claim(folder) if active else None
    try:
        yield claim
    finally:
        if claim is not None:
            claim.release()


def owner(folder: Path) -> dict[str, Any] | None:
    """The process that holds the claim of a folder, or None. The folder may be read-only.

    Returns: the host, the pid, whether it is on this machine (`here`), and the seconds since its heartbeat (`silent`).
    """
    try:
        file = (folder / CLAIM).open()
    except FileNotFoundError:
        return None
    with file:
        fcntl.flock(file, fcntl.LOCK_SH)
        return _alive(file, folder)


def _alive(file: IO[str], folder: Path) -> dict[str, Any] | None:
    """The owner that a claim file names, or None if there is none or its claim has expired."""
    claim = _read(file)
    if not claim:
        return None
    here = claim["machine"] == _machine()["machine"]
    silent = max(0.0, _now(folder) - os.fstat(file.fileno()).st_mtime)
    if silent > STALE or (here and not _is_running(claim["pid"])):
        return None
    return {**claim, "here": here, "silent": silent}


def _now(folder: Path) -> float:
    """The time by the clock of the file system, which all machines share; by the local clock in a read-only folder."""
    try:
        with tempfile.TemporaryFile(dir=folder) as probe:
            return os.fstat(probe.fileno()).st_mtime
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        return time.time()


def _is_for_us(owner: dict[str, Any]) -> bool:
    """Whether the parent of this process reserved the folder for it."""
    return owner["token"] == _RESERVED and owner["here"] and str(owner["pid"]) == os.environ.get(PARENT)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    with suppress(OSError):  # a zombie has ended, though its id still exists
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return True


def _machine() -> dict[str, str]:
    """The host, and an identifier of its boot and pid namespace, outside of which a pid may be another process."""
    parts = [socket.gethostname()]
    for path in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid"):
        with suppress(OSError):
            parts.append(os.readlink(path) if path.endswith("pid") else Path(path).read_text().strip())
    return {"host": parts[0], "machine": " ".join(parts)}


def _leave_if_orphaned() -> None:
    """Send SIGTERM to this process if the queue that started it is gone."""
    parent = os.environ.get(PARENT)
    if parent is not None and os.getppid() != int(parent):
        os.kill(os.getpid(), signal.SIGTERM)


@contextmanager
def _locked(path: Path) -> Iterator[IO[str]]:
    """Open the file under an exclusive lock, which the kernel releases if the process dies."""
    with naming(path), os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file
        file.flush()


def _read(file: IO[str]) -> dict[str, Any]:
    """The claim in a file; empty if it is damaged, as by a full disk, since nobody could release such a claim."""
    file.seek(0)
    try:
        claim = json.loads(file.read())
        return claim if isinstance(claim["pid"], int) and {"token", "host", "machine"} < claim.keys() else {}
    except (ValueError, TypeError, KeyError):
        return {}


def _write(file: IO[str], content: dict[str, Any]) -> None:
    file.seek(0)
    file.truncate()
    if content:
        file.write(json.dumps(content))
        file.flush()
