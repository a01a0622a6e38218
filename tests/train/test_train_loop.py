"""The training loop: it learns, and computes one thing however it is split."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from helpers import ROOT
from tiny_training import CONFIG, SERIES, StopError, losses, random_cases, stop_after

from flowformer.data import DataInfo, Splits
from flowformer.models import (
    FlowformerTimeSeries,
)
from flowformer.train import loop, record
from flowformer.train.config import Schedule
from flowformer.train.loop import Trainer, train


def evaluations(folder):
    return [each for each in record.read_log(folder) if each["kind"] == "eval"]


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

    def test_a_best_evaluation_that_is_nan_is_replaced(self, tmp_path, monkeypatch):
        """A loss may overflow while the parameters are finite; the first finite score replaces it."""
        scores = iter([math.nan, 0.2, math.nan, 0.4, 0.3] + [0.0] * 9)
        monkeypatch.setattr(loop, "evaluate", lambda *arguments: {"accuracy": next(scores), "loss": 1.0})
        result = train(replace(CONFIG, eval_every=5), tmp_path, splits=SERIES)
        assert [each["step"] for each in evaluations(tmp_path) if each["split"] == "valid"] == [5, 10, 15, 20, 24]
        assert result["best"]["step"] == 20

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
