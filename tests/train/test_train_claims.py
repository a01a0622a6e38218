"""Claims: one process at a time in a folder, and none for ever."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time

import pytest
from tiny_training import CONFIG, SERIES

from flowformer.train import checkpoints, claims
from flowformer.train.loop import train

HOLD = """
import sys, time
from pathlib import Path
from flowformer.train.claims import claimed
with claimed(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
    """A process that holds the claim of tmp_path."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()


def test_two_processes_in_one_folder(tmp_path, holder):
    with pytest.raises(claims.FolderInUseError, match=rf"in use by process {holder.pid} on .* choose another folder"):
        train(CONFIG, tmp_path, splits=SERIES)
    assert not (tmp_path / "config.json").exists(), "nothing was touched"
    found = claims.owner(tmp_path)
    assert (found["pid"], found["here"]) == (holder.pid, True)


def test_a_killed_process_holds_nothing(tmp_path, holder):
    holder.kill()
    # while it is a zombie, too
    deadline = time.monotonic() + 10
    while claims.owner(tmp_path) is not None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    with claims.claimed(tmp_path):
        assert claims.owner(tmp_path)["pid"] == os.getpid()
    assert claims.owner(tmp_path) is None


def test_another_machine_is_believed_until_it_is_silent(tmp_path):
    path = tmp_path / claims.CLAIM
    path.write_text(json.dumps({"token": "x", "pid": 1, "host": "elsewhere", "machine": "elsewhere 1"}))
    with pytest.raises(claims.FolderInUseError, match="process 1 on elsewhere"), claims.claimed(tmp_path):
        pass
    long_ago = time.time() - claims.STALE - 1
    os.utime(path, (long_ago, long_ago))
    with claims.claimed(tmp_path):
        pass


def test_the_owner_of_a_folder_that_may_only_be_read(tmp_path, holder, monkeypatch):
    """As when a queue of somebody else is listed."""

    def refuse(*args, **options):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(claims.os, "open", refuse)  # both write
    monkeypatch.setattr(claims.tempfile, "TemporaryFile", refuse)
    assert claims.owner(tmp_path)["pid"] == holder.pid
    assert claims.owner(tmp_path / "other") is None


def test_users_of_a_group_can_share_a_queue(tmp_path):
    before = os.umask(0o002)
    try:
        claims.reserve(tmp_path)
    finally:
        os.umask(before)
    assert (tmp_path / claims.CLAIM).stat().st_mode & 0o777 == 0o664


def test_a_heartbeat_keeps_the_claim(tmp_path, monkeypatch):
    monkeypatch.setattr(claims, "HEARTBEAT", 0.0)
    with claims.claimed(tmp_path):
        os.utime(tmp_path / claims.CLAIM, (0, 0))
        deadline = time.monotonic() + 10
        while claims.owner(tmp_path) is None:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_who_lost_the_claim_writes_nothing_more(tmp_path, monkeypatch):
    """As after a sleep, in which another process took the folder over."""
    monkeypatch.setattr(claims, "HEARTBEAT", 0.0)
    stolen = []

    def steal(event):
        if event["kind"] == "step" and event["step"] == 3:
            (tmp_path / claims.CLAIM).write_text(json.dumps({"token": "other", "pid": 1, "host": "h", "machine": "m"}))
            time.sleep(1.5)
            stolen.append((tmp_path / "log.jsonl").read_bytes())

    with pytest.raises(claims.FolderInUseError, match="over while this one was suspended"):
        train(CONFIG, tmp_path, splits=SERIES, report=steal)
    assert (tmp_path / "log.jsonl").read_bytes() == stolen[0]
    assert checkpoints.latest(tmp_path / "checkpoints") is None
    assert json.loads((tmp_path / claims.CLAIM).read_text())["token"] == "other", "it is not ours to release"


@pytest.mark.parametrize(
    "content", [b"", b'{"token": "x", "pi', b"\0\0", b"\xff", b"5", b'["pid"]', b'{"pid": 1}', b'{"token": "x"}']
)
def test_a_damaged_claim_holds_nothing(tmp_path, content):
    """As one that a full disk cut short."""
    (tmp_path / claims.CLAIM).write_bytes(content)
    assert claims.owner(tmp_path) is None
    with claims.claimed(tmp_path):
        assert (tmp_path / claims.CLAIM).read_bytes() != content


def test_a_damaged_checkpoint_says_what_to_do(tmp_path):
    class StopError(Exception):
        pass

    def stop(event):
        if event["kind"] == "step" and event["step"] == 12:
            raise StopError

    with pytest.raises(StopError):
        train(CONFIG, tmp_path, splits=SERIES, report=stop)
    newest = checkpoints.latest(tmp_path / "checkpoints")
    (weights,) = newest.glob("state/*.distcp")
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(
        checkpoints.DamagedCheckpointError,
        match=r"step-00000010 is damaged: state/\S+\.distcp changed .* goes on from step-00000005, with the same",
    ):
        train(CONFIG, tmp_path, splits=SERIES, resume=True)
    (newest / "progress.json").write_text("{")
    with pytest.raises(checkpoints.DamagedCheckpointError, match=r"progress\.json"):
        train(CONFIG, tmp_path, splits=SERIES, resume=True)


def test_a_folder_is_kept_for_a_process_that_is_starting(tmp_path):
    assert claims.reserve(tmp_path) is None
    taken = claims.reserve(tmp_path)
    assert (taken["pid"], taken["here"]) == (os.getpid(), True), "not even by the same queue a second time"
    with pytest.raises(claims.FolderInUseError), claims.claimed(tmp_path):
        pass
    command = [sys.executable, "-c", HOLD.replace("time.sleep(60)", ""), str(tmp_path)]
    started = {**os.environ, claims.PARENT: str(os.getpid())}
    assert subprocess.run(command, env=started, capture_output=True, text=True).stdout == "held\n"
    assert claims.owner(tmp_path) is None
    claims.reserve(tmp_path)
    claims.unreserve(tmp_path)
    assert claims.owner(tmp_path) is None


def test_a_run_whose_queue_is_gone_stops(tmp_path):
    """It does not even begin."""
    orphan = {**os.environ, claims.PARENT: "1"}
    done = subprocess.run([sys.executable, "-c", HOLD, str(tmp_path)], env=orphan, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (-15, "")
