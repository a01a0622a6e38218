"""Resuming a run: bit for bit, after Ctrl-C, a kill or damage, and not with what has changed."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import sys
import time
from dataclasses import replace

import pytest
import torch
from accelerate import Accelerator
from forks import FORKS
from tiny_training import CONFIG, SERIES, StopError, losses, stop_after
from torch.distributed.checkpoint import CheckpointException

from flowformer.train import checkpoints, record
from flowformer.train.config import Optimiser
from flowformer.train.loop import Interrupted, train


class TestResume:
    def test_keeps_the_record_of_the_start_and_adds_to_it(self, tmp_path, monkeypatch):
        folder = tmp_path / "run"

        def facts():
            return json.loads((folder / "provenance.json").read_text())

        for command, step in (("never-saved", 3), ("start", 6), ("second", 8)):
            monkeypatch.setattr(sys, "argv", [command])
            with pytest.raises(StopError):
                train(CONFIG, folder, splits=SERIES, resume=True, report=stop_after(step))
        assert facts()["command"] == "start", "a run without a checkpoint starts again"
        monkeypatch.setattr(sys, "argv", ["third"])
        train(CONFIG, folder, splits=SERIES, resume=True)
        assert facts()["command"] == "start"
        assert [each["command"] for each in facts()["resumed"]] == ["second", "third"]
        assert set(facts()["resumed"][0]) == set(facts()) - {"resumed"}

    @pytest.mark.parametrize("step", [3, 5, 12])
    def test_equals_the_uninterrupted_run(self, finished, tmp_path, step):
        """Stopped without notice: before the first checkpoint, at one, and between two."""
        folder = tmp_path / "run"
        with pytest.raises(StopError):
            train(CONFIG, folder, splits=SERIES, report=stop_after(step))
        result = train(CONFIG, folder, splits=SERIES, resume=True)
        assert losses(folder) == losses(finished[0])
        assert (result["final"], result["best"]) == (finished[1]["final"], finished[1]["best"])
        assert (folder / "final/model.safetensors").read_bytes() == (
            finished[0] / "final/model.safetensors"
        ).read_bytes()

    def test_with_sums_over_several_updates(self, tmp_path):
        """A checkpoint between two lines of the log."""
        config = replace(CONFIG, log_every=4, steps=8, checkpoint_every=3)
        train(config, tmp_path / "whole", splits=SERIES)
        with pytest.raises(StopError):
            train(config, tmp_path / "run", splits=SERIES, report=stop_after(6))
        train(config, tmp_path / "run", splits=SERIES, resume=True)
        assert losses(tmp_path / "run") == losses(tmp_path / "whole")

    def test_ctrl_c_leaves_a_checkpoint(self, finished, tmp_path):
        def interrupt(event):
            if event["kind"] == "step" and event["step"] == 7:
                os.kill(os.getpid(), signal.SIGINT)

        before = signal.getsignal(signal.SIGINT)  # a shell that starts tests in the background has it ignored
        with pytest.raises(Interrupted, match="stopped at update 7 of 24"):
            train(CONFIG, tmp_path / "run", splits=SERIES, report=interrupt)
        assert checkpoints.latest(tmp_path / "run/checkpoints").name == "step-00000007"
        assert signal.getsignal(signal.SIGINT) is before
        train(CONFIG, tmp_path / "run", splits=SERIES, resume=True)
        assert losses(tmp_path / "run") == losses(finished[0])

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_signals_spare_the_workers(self, tmp_path, number):
        """A terminal, `timeout` and Slurm send them to all processes, and the current update needs the workers."""

        def interrupt(event):
            if event["kind"] == "step" and event["step"] == 2:
                for worker in multiprocessing.active_children():
                    os.kill(worker.pid, number)

        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            train(replace(CONFIG, steps=12, workers=1), tmp_path / "run", splits=SERIES, report=interrupt)
        finally:
            signal.signal(signal.SIGINT, before)
        assert len(losses(tmp_path / "run")) == 12

    def test_with_another_config_is_refused(self, tmp_path):
        with pytest.raises(StopError):
            train(CONFIG, tmp_path / "run", splits=SERIES, report=stop_after(6))
        with pytest.raises(ValueError, match="optimiser differ"):
            train(replace(CONFIG, optimiser=Optimiser(lr=1.0)), tmp_path / "run", splits=SERIES, resume=True)

    def test_with_other_data_is_refused(self, tmp_path):
        with pytest.raises(StopError):
            train(CONFIG, tmp_path, splits=SERIES, report=stop_after(6))
        changed = SERIES._replace(info=replace(SERIES.info, checksum="changed"))
        with pytest.raises(ValueError, match=r"has other files than those .* checksum changed instead of"):
            train(CONFIG, tmp_path, splits=changed, resume=True)

    def test_a_half_written_checkpoint_is_not_looked_at(self, finished, tmp_path):
        folder = tmp_path / "run"
        with pytest.raises(StopError):
            train(CONFIG, folder, splits=SERIES, report=stop_after(6))
        (folder / "checkpoints/.step-00000006.part").mkdir()
        (folder / "checkpoints/.step-00000006.part/model.safetensors").write_bytes(b"half")
        (folder / "checkpoints/step-00000007").mkdir()
        assert checkpoints.latest(folder / "checkpoints").name == "step-00000005"
        with (folder / "log.jsonl").open("a") as log:
            log.write('{"kind": "train", "step": 6, "lo')
        train(CONFIG, folder, splits=SERIES, resume=True)
        assert losses(folder) == losses(finished[0])
        assert not list((folder / "checkpoints").glob(".*")), "the next checkpoint deletes it: it has the size of one"

    def test_a_rate_that_graphs_have_put_on_the_device(self, tmp_path):
        """Updates captured as CUDA graphs read the learning rate from a tensor; a run that resumes has none yet."""
        accelerator = Accelerator(cpu=True)

        def build():
            model = torch.nn.Linear(2, 2)
            return accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))

        model, optimiser = build()
        model(torch.ones(1, 2)).sum().backward()
        optimiser.step()
        optimiser.param_groups[0]["lr"] = torch.tensor(0.05)
        checkpoint = checkpoints.save(accelerator, model, optimiser, tmp_path, {"step": 1}, keep=1)
        other, fresh = build()
        checkpoints.restore(accelerator, other, fresh, checkpoint, seed=0)
        assert fresh.param_groups[0]["lr"] == pytest.approx(0.05)
        torch.testing.assert_close(other.state_dict(), model.state_dict())

    def test_lost_random_numbers_are_noticed(self, tmp_path, monkeypatch):
        with pytest.raises(StopError):
            train(CONFIG, tmp_path / "run", splits=SERIES, report=stop_after(6))
        monkeypatch.setattr(torch, "set_rng_state", lambda state: None)
        with pytest.raises(RuntimeError, match=r"random numbers .* could not be restored"):
            train(CONFIG, tmp_path / "run", splits=SERIES, resume=True)

    @pytest.mark.parametrize("resume", [False, True])
    def test_a_finished_run_without_checkpoints_is_not_overwritten(self, finished, tmp_path, resume):
        (tmp_path / "result.json").write_text("{}")
        with pytest.raises(FileExistsError, match="has a finished run without checkpoints"):
            train(CONFIG, tmp_path, splits=SERIES, resume=resume)
        assert (tmp_path / "result.json").read_text() == "{}"

    def test_a_checkpoint_that_cannot_be_written(self, tmp_path, monkeypatch):
        """As on a full disk, which the half of it would fill."""

        def fill(state, checkpoint_id, **options):
            checkpoint_id.mkdir()
            (checkpoint_id / "half").write_text("0")
            raise CheckpointException("", {0: (RuntimeError("unexpected pos 704"), None)})

        monkeypatch.setattr(checkpoints.dcp, "save", fill)
        with pytest.raises(
            OSError, match=r"step-00000005 could not be written: unexpected pos 704\. The disk has \d+ MiB"
        ):
            train(CONFIG, tmp_path, splits=SERIES)
        assert not list((tmp_path / "checkpoints").iterdir())

    def test_a_damaged_file_of_a_run_is_named(self, finished, tmp_path):
        for name in ("config.json", "provenance.json"):
            shutil.copytree(finished[0], tmp_path / name)
            (tmp_path / name / name).write_text('{"half')
            with pytest.raises(ValueError, match=rf"{name}/{name} is damaged: Unterminated string"):
                train(CONFIG, tmp_path / name, splits=SERIES, resume=True)

    def test_a_damaged_line_of_a_log_costs_no_other(self, tmp_path):
        stage = b'{"kind": "stage", "step": %d}\n'
        (tmp_path / "log.jsonl").write_bytes(stage % 1 + b"\xff\x00{\n" + stage % 3 + b'{"st')
        assert [each["step"] for each in record.read_log(tmp_path)] == [1, 3]

    def test_a_log_that_is_not_there(self, tmp_path):
        with pytest.raises(FileNotFoundError, match=r"has no log\.jsonl; accepted: the folder of a run"):
            record.read_log(tmp_path)

    def test_keeps_the_newest_checkpoints_only(self, finished):
        names = sorted(path.name for path in (finished[0] / "checkpoints").iterdir())
        assert names == ["step-00000020", "step-00000024"]


def run_alone(folder, changes):
    torch.set_num_threads(1)
    train(replace(CONFIG, steps=150, eval_every=50, **changes), folder, splits=SERIES, resume=True)


def in_a_process(folder, **changes):
    process = FORKS.Process(target=run_alone, args=(folder, changes))
    process.start()
    return process


def test_kill_9_and_resume_equals_the_uninterrupted_run(tmp_path):
    folder, whole = tmp_path / "killed", tmp_path / "whole"
    process = in_a_process(folder, checkpoint_every=10)
    log = folder / "log.jsonl"
    deadline = time.monotonic() + 300
    while not (log.exists() and log.read_text().count("\n") > 20):
        assert process.exitcode is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert 20 <= len(losses(folder)) < 150
    # as the first was, not in this process: where a long-lived one puts data may change the last bit of a sum
    for process in (in_a_process(folder, checkpoint_every=10), in_a_process(whole, checkpoint_every=1000)):
        process.join()
        assert process.exitcode == 0
    assert losses(folder) == losses(whole)
