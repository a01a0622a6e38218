"""The training loop: it learns, resumes bit for bit, survives a kill, and computes one thing however it is split."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch
from accelerate import Accelerator
from forks import FORKS
from helpers import ROOT
from tiny_training import CONFIG, SERIES, losses, random_cases
from torch.distributed.checkpoint import CheckpointException

from flowformer.data import DataInfo, Splits
from flowformer.models import (
    FlowformerTimeSeries,
)
from flowformer.train import checkpoints, record
from flowformer.train.config import Optimiser, Schedule
from flowformer.train.loop import Interrupted, Trainer, train


def evaluations(folder):
    return [each for each in record.read_log(folder) if each["kind"] == "eval"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """An uninterrupted run."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    return folder, train(CONFIG, folder, splits=SERIES)


class StopError(Exception):
    pass


def stop_after(step):
    def report(event):
        if event["kind"] == "step" and event["step"] == step:
            raise StopError

    return report


@pytest.mark.parametrize(
    ("program", "name"),
    [
        ("/lib/flowformer/cli/__main__.py", "flowformer"),  # python -m flowformer.cli, under torchrun too
        ("/bin/flowformer", "flowformer"),
        ("/mine/__main__.py", "__main__.py"),
    ],
)
def test_recorded_command_can_be_run(program, name, monkeypatch):
    monkeypatch.setattr(sys, "argv", [program, "train", "a b"])
    assert record._command() == f"{name} train 'a b'"


class TestRun:
    def test_learns(self, finished):
        folder, result = finished
        sequence = losses(folder)
        assert len(sequence) == 24
        assert sum(sequence[-4:]) < 0.5 * sum(sequence[:4])
        assert result["final"]["accuracy"] > 0.9

    def test_reports_final_and_best_of_the_test_set(self, finished):
        folder, result = finished
        assert result["best_chosen_on"] == "valid"
        assert result["final"]["step"] == 24
        by_valid = max((each for each in evaluations(folder) if each["split"] == "valid"), key=lambda e: e["accuracy"])
        assert result["best"]["step"] == by_valid["step"], "the first of the best on the validation set"
        tested = {each["model"]: each for each in evaluations(folder) if each["split"] == "test"}
        for which in ("final", "best"):
            assert result[which]["accuracy"] == tested[which]["accuracy"]

    def test_writes_what_a_result_needs(self, finished):
        folder, result = finished
        for name in (
            "config.json",
            "provenance.json",
            "log.jsonl",
            "result.json",
            "final/model.safetensors",
            "best/config.json",
        ):
            assert (folder / name).is_file(), name
        assert json.loads((folder / "result.json").read_text()) == result
        facts = json.loads((folder / "provenance.json").read_text())
        assert {"checksum", "differs", "device", "commit", "command", "torch"} <= set(facts)
        assert list((folder / "tensorboard").iterdir())
        assert {"steps_per_second", "tokens_per_second", "peak_memory_mib", "lr"} <= set(record.read_log(folder)[0])

    def test_does_not_touch_a_run_that_is_there(self, finished):
        folder, _ = finished
        with pytest.raises(FileExistsError, match="has a run already"):
            train(CONFIG, folder, splits=SERIES)

    def test_resuming_a_finished_run_changes_nothing(self, finished):
        folder, result = finished
        again = train(CONFIG, folder, splits=SERIES, resume=True)
        assert again["final"] == result["final"]
        assert again["best"] == result["best"]

    def test_same_seed_same_run_other_seed_other_run(self, tmp_path):
        short = replace(CONFIG, steps=3, schedule=Schedule("constant", warmup=2))
        for name, seed in (("a", 0), ("b", 0), ("c", 1)):
            train(replace(short, seed=seed), tmp_path / name, splits=SERIES)
        assert losses(tmp_path / "a") == losses(tmp_path / "b") != losses(tmp_path / "c")

    def test_evaluating_more_often_changes_no_update(self, finished, tmp_path):
        folder, _ = finished
        train(replace(CONFIG, eval_every=1, checkpoint_every=3), tmp_path / "often", splits=SERIES)
        assert losses(tmp_path / "often") == losses(folder)

    def test_without_a_validation_set_the_test_set_must_be_asked_for(self, tmp_path):
        splits = SERIES._replace(valid=None)
        with pytest.raises(ValueError, match=r"no validation part\. Pass select_on=test"):
            train(CONFIG, tmp_path / "run", splits=splits)
        result = train(replace(CONFIG, steps=4, eval_every=2, select_on="test"), tmp_path / "run", splits=splits)
        assert result["best_chosen_on"] == "test"
        scores = [each["accuracy"] for each in evaluations(tmp_path / "run")]
        assert result["best"]["accuracy"] == max(scores)
        assert result["final"]["accuracy"] == scores[-1]

    def test_a_run_that_diverges_stops(self, tmp_path):
        config = replace(CONFIG, optimiser=replace(CONFIG.optimiser, lr=1e38, clip=None))
        with pytest.raises(FloatingPointError, match=r"diverged: at update .* optimiser\.lr below 1e\+38"):
            train(config, tmp_path, splits=SERIES)
        assert not (tmp_path / "result.json").exists()

    def test_a_batch_without_a_finite_loss_is_survived(self, tmp_path, monkeypatch):
        """As an overflow in float16, after which the scaler leaves the parameters as they were."""
        update = Trainer._update

        def overflow(self, batches):
            update(self, batches)
            self._loss += torch.nan if self.progress.step == 3 else 0

        monkeypatch.setattr(Trainer, "_update", overflow)
        train(CONFIG, tmp_path, splits=SERIES)
        assert [math.isfinite(loss) for loss in losses(tmp_path)] == [step != 3 for step in range(1, 25)]


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

    def test_ctrl_c_spares_the_workers(self, tmp_path):
        """A terminal sends it to them too, and the update that is on its way needs them."""

        def interrupt(event):
            if event["kind"] == "step" and event["step"] == 2:
                for worker in multiprocessing.active_children():
                    os.kill(worker.pid, signal.SIGINT)

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
        (tmp_path / "log.jsonl").write_bytes(b'{"step": 1}\n\xff\x00{\n{"step": 3}\n{"st')
        assert record.read_log(tmp_path) == [{"step": 1}, {"step": 3}]

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


class TestSplitting:
    """An update is the same however it is computed."""

    CONFIG = replace(CONFIG, steps=6, drop_last=True, model=replace(CONFIG.model, dropout=0.0))

    def test_accumulated_parts(self, tmp_path):
        for parts in (1, 2, 4):
            train(replace(self.CONFIG, accumulate=parts), tmp_path / str(parts), splits=SERIES)
        assert losses(tmp_path / "2") == pytest.approx(losses(tmp_path / "1"), rel=1e-5)
        assert losses(tmp_path / "4") == pytest.approx(losses(tmp_path / "1"), rel=1e-5)

    def test_a_batch_that_cannot_be_shared(self, tmp_path):
        with pytest.raises(ValueError, match="pass a multiple of 3"):
            train(replace(self.CONFIG, accumulate=3), tmp_path / "run", splits=SERIES)

    def test_workers_change_nothing(self, tmp_path):
        for workers in (0, 2):
            train(replace(CONFIG, steps=3, eval_every=3, workers=workers), tmp_path / str(workers), splits=SERIES)
        assert losses(tmp_path / "0") == losses(tmp_path / "2")


# with uneven shares of the evaluation: 24 examples in batches of 5
PARALLEL = replace(
    CONFIG, steps=6, eval_batch_size=5, checkpoint_every=3, model=replace(CONFIG.model, dropout=0.0, num_layers=2)
)
DROPOUT = replace(PARALLEL, parallel="fsdp", model=replace(PARALLEL.model, dropout=0.2))


def parallel_runs():
    """What two processes run, and one for comparison: names, configs and data."""
    cases, model, sizes = random_cases("language")  # 11 words cannot be shared evenly
    texts = Splits(cases, None, cases, DataInfo("tiny", "0", max_length=12, **sizes))
    language = replace(PARALLEL, task="language", model=replace(model, dropout=0.0), select_on="test", steps=3)
    return {
        "series": (PARALLEL, SERIES),
        "accumulated": (replace(PARALLEL, accumulate=2), SERIES),
        "bf16": (replace(PARALLEL, precision="bf16"), SERIES),
        "language": (language, texts),
    }


def moved_runs():
    """What one process begins and two end, or the other way round: names, configs with two processes, and data."""
    runs = parallel_runs()
    config, texts = runs["language"]
    config = replace(config, steps=6, log_every=3, model=replace(config.model, dropout=0.0))
    moved = {parallel: (replace(PARALLEL, parallel=parallel), SERIES) for parallel in ("ddp", "fsdp")}
    return {**moved, "context": (replace(config, parallel="context"), texts)}


def stop_at_4(config, folder, splits):
    with pytest.raises(StopError):
        train(replace(config, checkpoint_every=4), folder, splits=splits, report=stop_after(5))


def in_two_processes(folder):
    for parallel in ("ddp", "fsdp"):
        for name, (config, splits) in parallel_runs().items():
            train(replace(config, parallel=parallel), folder / parallel / name, splits=splits)
    for name, (config, splits) in moved_runs().items():
        stop_at_4(config, folder / "2 to 1" / name, splits)
        train(replace(config, checkpoint_every=4), folder / "1 to 2" / name, splits=splits, resume=True)
    train(DROPOUT, folder / "whole", splits=SERIES)
    with pytest.raises(StopError):
        train(DROPOUT, folder / "resumed", splits=SERIES, report=stop_after(4))
    train(DROPOUT, folder / "resumed", splits=SERIES, resume=True)
    cases, model, sizes = random_cases("decision")
    decision = replace(CONFIG, task="decision", model=model, select_on="test", parallel="fsdp")
    with pytest.raises(NotImplementedError, match="pass parallel=ddp"):
        train(decision, folder / "decision", splits=Splits(cases, None, cases, DataInfo("tiny", "0", **sizes)))


def test_two_processes_compute_what_one_does(tmp_path):
    """Whole models and sharded ones; one test, since two processes take long to start."""
    folders = [str(ROOT / "tests"), os.path.dirname(__file__)]
    (tmp_path / "program.py").write_text(
        f"import sys, pathlib\nsys.path[:0] = {folders!r}\n"
        f"import test_train_loop\ntest_train_loop.in_two_processes(pathlib.Path({str(tmp_path)!r}))\n"
    )
    # as on a machine without a GPU
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    for name, (config, splits) in moved_runs().items():
        stop_at_4(replace(config, parallel="ddp"), tmp_path / "1 to 2" / name, splits)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*launch, str(tmp_path / "program.py")], env=environment, timeout=240, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-5000:]

    for name, (config, splits) in parallel_runs().items():
        alone = tmp_path / "one" / name
        train(config, alone, splits=splits)
        for parallel in ("ddp", "fsdp"):
            folder, rel = tmp_path / parallel / name, 1e-2 if name == "bf16" else 1e-5
            assert json.loads((folder / "provenance.json").read_text())["processes"] == 2
            assert losses(folder) == pytest.approx(losses(alone), rel=rel), folder
            for ours, theirs in zip(evaluations(folder), evaluations(alone), strict=True):
                assert ours["loss"] == pytest.approx(theirs["loss"], rel=10 * rel), folder
                assert ours.get("accuracy") == theirs.get("accuracy"), folder

    expected = FlowformerTimeSeries.from_pretrained(tmp_path / "one/series/final").state_dict()
    for parallel in ("ddp", "fsdp"):
        model = FlowformerTimeSeries.from_pretrained(tmp_path / parallel / "series/final")
        for key, value in model.state_dict().items():
            torch.testing.assert_close(value, expected[key], rtol=1e-3, atol=1e-5)

    for name, (config, splits) in moved_runs().items():
        config = replace(config, parallel="ddp", checkpoint_every=4)
        train(config, tmp_path / "moved" / name, splits=splits)
        train(config, tmp_path / "2 to 1" / name, splits=splits, resume=True)
        for way in ("1 to 2", "2 to 1"):
            folder = tmp_path / way / name
            assert losses(folder) == pytest.approx(losses(tmp_path / "moved" / name), rel=1e-5), folder
            record = json.loads((folder / "provenance.json").read_text())
            processes = [record["processes"], record["resumed"][0]["processes"]]
            assert way == "{} to {}".format(*processes)

    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    assert len(list(whole.glob("checkpoints/step-*/state/*.distcp"))) == 4, "two shards, two checkpoints"
    assert losses(resumed) == losses(whole)
    assert evaluations(resumed) == evaluations(whole)


def test_sharding_among_one_process_is_nothing(tmp_path):
    for parallel in ("ddp", "fsdp"):
        train(replace(CONFIG, steps=2, parallel=parallel), tmp_path / parallel, splits=SERIES)
    assert losses(tmp_path / "fsdp") == losses(tmp_path / "ddp")


def test_compiled_computes_the_same(tmp_path, monkeypatch):
    """All of the compiler but its last part, which takes minutes on a CPU."""
    compile, graphs = torch.nn.Module.compile, []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch.nn.Module, "compile", lambda module: compile(module, backend=count))
    torch._dynamo.reset()
    config = replace(TestSplitting.CONFIG, steps=4, eval_every=4)
    for compiled in (False, True):
        assert not graphs
        train(replace(config, compile=compiled), tmp_path / str(compiled), splits=SERIES)
    assert graphs
    assert losses(tmp_path / "True") == pytest.approx(losses(tmp_path / "False"), rel=1e-5)


def test_half_precision_is_close_or_refused(finished, tmp_path):
    train(replace(CONFIG, steps=4, precision="bf16", schedule=Schedule()), tmp_path / "bf16", splits=SERIES)
    train(replace(CONFIG, steps=4, schedule=Schedule()), tmp_path / "float32", splits=SERIES)
    close = losses(tmp_path / "float32")
    assert losses(tmp_path / "bf16") == pytest.approx(close, rel=2e-2)
    assert losses(tmp_path / "bf16") != pytest.approx(close, rel=1e-6), "it was in another precision"
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="fp16 needs a GPU, both to train and to evaluate; on a CPU, train one"):
            train(replace(CONFIG, precision="fp16"), tmp_path / "fp16", splits=SERIES)


@pytest.mark.parametrize("changes", [{"precision": "bf16"}, {"precision": "tf32"}, {"pad_full": True}])
def test_other_ways_to_compute_learn_too(tmp_path, changes):
    train(replace(CONFIG, steps=12, eval_every=12, **changes), tmp_path / "run", splits=SERIES)
    sequence = losses(tmp_path / "run")
    assert sum(sequence[-3:]) < sum(sequence[:3])
