"""`flowformer reproduce`: a queue that survives its processes, and never loses or repeats what is finished."""

from __future__ import annotations

import errno
import importlib.util
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path

import pytest
from helpers import ROOT
from rich.console import Console
from rich.text import Text
from typer.testing import CliRunner

from flowformer.cli import app
from flowformer.cli.progress import queue_progress
from flowformer.train import claims, recipes, reproduce, tables
from flowformer.train.config import TrainConfig
from flowformer.train.loop import Interrupted
from flowformer.train.paper import paper_score
from flowformer.train.record import read_log

TINY = ["embed_dim=16", "num_heads=2", "mlp_dim=32", "num_layers=1"]
CELL = ["--cells", "uea/JapaneseVowels/flow"]


def flowformer(*arguments, fails=False):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert (result.exit_code != 0) == fails, result.output
    return result.output if not fails else " ".join(result.output.split())


PROGRAMS = []


def program(*arguments):
    command = [sys.executable, "-m", "flowformer.cli", "reproduce", *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    PROGRAMS.append(subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL))
    return PROGRAMS[-1]


@pytest.fixture(autouse=True, scope="module")
def _no_program_is_left():
    yield
    for process in PROGRAMS:
        process.kill()  # its runs notice
        process.wait()


def wait_for(condition, seconds=300):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


class TestTables:
    def test_every_cell_has_a_recipe_and_a_method(self):
        for table in tables.select("all"):
            for cell in table.cells():
                config = cell.config(3)
                assert config.seed == 3
                assert config.recipe == cell.recipe
                assert (
                    config.model.attention if isinstance(config, TrainConfig) else config.method
                ) == cell.method.name

    def test_every_recipe_is_in_a_table(self):
        assert {cell.column.recipe for table in tables.select("all") for cell in table.cells()} == set(recipes.names())

    @pytest.mark.parametrize(
        ("table", "methods", "columns"), [(tables.UEA, 14, 10), (tables.LRA, 16, 5), (tables.D4RL, 8, 9)]
    )
    def test_every_number_of_the_paper_has_its_cell(self, table, methods, columns):
        scores = {cell.name: cell.paper() for cell in table.cells() if cell.paper() is not None}
        assert len(scores) == methods * columns
        averages = [table.paper_average(m, [c for c in table.columns if not c.stands_in]) for m in table.methods]
        assert sum(average is not None for average in averages) == methods

    def test_what_stands_in_is_never_beside_the_paper(self):
        for table in tables.select("all"):
            for cell in table.cells():
                assert cell.paper() is None or not cell.column.stands_in

    def test_the_performer_of_the_arena_has_relu_features(self):
        labels = {method.name: method.label for method in tables.LRA.methods}
        assert labels["performer-relu"] == "Performer"
        assert paper_score("lra/text", "performer-relu") == 65.40
        assert paper_score("lra/text", "performer") is None

    def test_the_evaluation_that_the_released_commands_report(self):
        """The best epoch of time series and images; the model with the best validation loss of WikiText-103."""
        best = {table.name for table in tables.select("all") if table.compared == "best"}
        assert best == {
            "uea",
            "imagenet",
            "imagenet-deit",
            "imagenet-vit",
            "wikitext103",
            "removals",
            "defaults-uea",
            "figures",
        }

    def test_an_average_over_some_columns_is_of_the_same_columns(self):
        flow = tables.Method("Flowformer", "flow")
        some = [column for column in tables.UEA.columns if column.label in ("JapaneseVowels", "Handwriting")]
        assert tables.UEA.paper_average(flow, some) == pytest.approx((98.9 + 33.8) / 2)
        assert tables.UEA.paper_average(flow, tables.UEA.columns) == 73.0

    def test_unknown(self):
        with pytest.raises(ValueError, match="did you mean 'uea'"):
            tables.select("uae")


class TestList:
    def test_states(self, tmp_path):
        listed = json.loads(flowformer("reproduce", "uea", "--list", "--json", "--out", tmp_path, "--data", tmp_path))
        by_name = {job["name"]: job for job in listed}
        assert by_name["uea/JapaneseVowels/flow"]["state"] == "to do"
        assert by_name["uea/JapaneseVowels/flow"]["paper"] == 98.9
        assert by_name["uea/Heartbeat/flow"]["state"] == "missing data: UEA Heartbeat"
        assert sum(job["name"] == "uea/JapaneseVowels/flow" for job in listed) == 5, "seeds of the table"
        assert [job["seed"] for job in listed] == sorted(job["seed"] for job in listed), "each cell once, then again"
        assert listed[0]["name"].endswith("/flow"), "the most telling first"
        assert "98.9" in flowformer("reproduce", "uea", *CELL, "--list", "--out", tmp_path)

    @pytest.mark.parametrize("width", [200, 30])
    def test_every_column_in_any_terminal(self, tmp_path, monkeypatch, width):
        monkeypatch.setattr("flowformer.cli.tables.console", Console(width=width))
        output = flowformer("reproduce", "uea", "--seeds", 1, "--list", "--out", tmp_path, "--data", tmp_path)
        header, *lines = output.splitlines()
        jobs = reproduce.jobs("uea", tmp_path, data_dir=tmp_path)
        assert header.split() == ["state", "seed", "paper", "minutes", "cell"]
        assert {line.split()[-1] for line in lines if "uea/" in line} == {job.name for job in jobs}
        assert any(line.split() == ["to", "do", "0", "98.9", "0.6", "uea/JapaneseVowels/flow"] for line in lines)
        assert "missing data: UEA Heartbeat: 16 cells" in lines
        assert any("flowformer data list" in line for line in lines)

    def test_minutes_that_are_left(self, tmp_path):
        def left(*arguments):
            return flowformer("reproduce", *arguments, "--list", "--out", tmp_path).splitlines()[-1]

        cells = ["--cells", "uea/JapaneseVowels/*", "--seeds", 1]
        assert "About 10 minutes are left on an H200, or 1 with eight runs" in left("uea", *cells)
        assert "or 10 with eight runs" in left("speed"), "nothing runs beside a benchmark"
        finished = tmp_path / "speed" / reproduce.SPEED
        finished.parent.mkdir()
        finished.touch()
        assert "minutes" not in left("speed")

    def test_the_benchmark_among_all_tables(self, tmp_path):
        assert [job.name for job in reproduce.jobs("all", tmp_path, cells=["speed/lra"])] == ["speed/lra"]

    def test_another_experiment_is_not_beside_the_paper(self, tmp_path):
        def papers(*overrides):
            chosen = {"cells": ["*/Handwriting/flow"], "overrides": overrides}
            return {job.paper for job in reproduce.jobs("uea", tmp_path, **chosen)}

        assert papers() == papers("precision=bf16") == papers("epochs=100") == {33.8}
        assert papers("optimiser.lr=0.0001") == {None}

    def test_a_missing_package_blocks_its_cells_alone(self, tmp_path, monkeypatch):
        find = importlib.util.find_spec
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "timm" else find(name))
        reproduce._missing_data.cache_clear()
        try:
            vision = {job.state() for job in reproduce.jobs("vision", tmp_path, data_dir=tmp_path)}
            assert vision == {"missing package: timm"}
            assert reproduce.jobs("uea", tmp_path, cells=["*Vowels/flow"], data_dir=tmp_path)[0].state() == "to do"
            monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "xgboost" else find(name))
            states = {job.name: job.state() for job in reproduce.jobs("uea", tmp_path, cells=["*Vowels/*"])}
            assert states["uea/JapaneseVowels/xgboost"] == "missing package: xgboost"
            assert states["uea/JapaneseVowels/rocket"] == "to do"
        finally:
            reproduce._missing_data.cache_clear()

    def test_a_method_has_minutes_of_its_own(self, tmp_path):
        cells = ["d4rl/hopper-medium/bc *", "d4rl/hopper-medium/flow *"]
        planned = reproduce.jobs("rl", tmp_path, cells=cells, seeds=1)
        assert [job.minutes for job in planned] == [30, 4, 4]

    def test_methods_take_no_options_of_an_attention(self, tmp_path):
        cells = ["uea/JapaneseVowels/reformer", "uea/JapaneseVowels/dtw"]
        planned = reproduce.jobs("uea", tmp_path, cells=cells, seeds=1, overrides=["attention_options.rounds=2"])
        assert [any("rounds" in word for word in job.command) for job in planned] == [False, True]

    def test_nothing_can_run(self, tmp_path):
        cells = ["--cells", "uea/Heartbeat/*", "--data", tmp_path, "--out", tmp_path / "queue"]
        shown = flowformer("reproduce", "uea", *cells, fails=True)
        assert "missing data: UEA Heartbeat" in shown
        assert "none of these cells can run. Where to get data: flowformer data list" in shown

    def test_tables_share_runs(self, tmp_path):
        together = reproduce.jobs("all", tmp_path, data_dir=tmp_path)
        assert len({job.folder for job in together}) == len(together)

    def test_a_shared_run_is_started_with_its_first_table(self, tmp_path):
        """The Flowformer of the Long-Range Arena is also in tables of ablations, which come later."""
        lra, every = (
            [
                job.folder
                for job in reproduce.jobs(table, tmp_path, seeds=1, data_dir=tmp_path)
                if "flow-seed" in job.folder.name
            ]
            for table in ("lra", "all")
        )
        first = every.index(lra[0])
        assert every[first : first + len(lra)] == lra

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["uae"], "did you mean 'uea'"),
            (["uea", "--cells", "*Japanse*"], "no cell of uea matches '*Japanse*'"),
            (["uea", *CELL, "stepps=3"], "did you mean 'steps'"),
            (["uea", "--cells", "*/dtw", "stepps=3"], "did you mean 'steps'"),
            (["uea", "--cells", "*/dtw", "*/lstm"], "'*/lstm' is no override; accepted: key=value"),
            (["uea", *CELL, "--minutes", "0"], "minutes must be more than 0"),
            (["uea", *CELL, "--minutes", "nan"], "minutes must be more than 0"),
            (["speed", "precision=tf32"], "speed is a benchmark, which takes no overrides and no seeds"),
            (["uea", "--seeds", 10**11], "less than or equal to 1000"),
            (["speed", "--seeds", 2], "speed is a benchmark, which takes no overrides and no seeds"),
            (["uea", *CELL, "seed=3"], "'seed=3' would make different cells the same run"),
            (["uea", *CELL, "attention=flow"], "'attention=flow' would make different cells the same run"),
        ],
    )
    def test_a_mistake_is_one_sentence(self, tmp_path, arguments, message):
        output = flowformer("reproduce", *arguments, "--out", tmp_path, fails=True)
        assert message in output
        assert "Traceback" not in output


def test_speeds_are_a_table(tmp_path):
    (tmp_path / "queue/speed").mkdir(parents=True)
    shutil.copy(ROOT / "results/lra-speed-h200.csv", tmp_path / "queue/speed" / reproduce.SPEED)
    printed = flowformer("reproduce", "speed", "--out", tmp_path / "queue")
    assert "## Speed on NVIDIA H200, steps per second" in printed
    headings, flow = (
        next(line for line in printed.splitlines() if name in line) for name in ("1,024 tokens", "| flow |")
    )
    assert headings.split(" | ")[2] == "inference, 2,048 tokens"
    assert flow.split(" | ")[2] == "160.7<br>0.90 times softmax<br>paper 3.81"
    assert flow in flowformer("results", tmp_path / "queue", "--out", tmp_path / "out")
    assert "Speed on NVIDIA H200" in (tmp_path / "out/results.html").read_text()
    both = flowformer("results", ROOT / "results/lra-speed-cpu.csv", ROOT / "results/reproduce.csv")
    assert "## Speed on x86_64" in both
    assert "## UEA time series" in both


KILLED = ["uea", *CELL, "--seeds", 3, "--pack", 3]
CHANGES = [*TINY, "steps=240", "eval_every=120", "checkpoint_every=20"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The runs of a table, one after another in this process, never disturbed."""
    out = tmp_path_factory.mktemp("whole")
    for each in reproduce.jobs("uea", out, cells=CELL[1:], seeds=3, overrides=CHANGES):
        flowformer(*each.command)
    return out


def numbers(out):
    """All that a table says, but for times, folders and commands."""
    rows = json.loads(flowformer("results", out, "--json"))
    keep = ("recipe", "attention", "seed", "overrides", "final", "best", "best_step", "parameters", "checksum")
    runs = sorted(path.parent for path in out.rglob("result.json"))
    logs = [[(r["step"], r["loss"]) for r in read_log(run) if r["kind"] == "train"] for run in runs]
    return (
        [{name: row[name] for name in keep} for row in rows],
        logs,
        [(run / "final/model.safetensors").read_bytes() for run in runs],
    )


def test_kill_9_changes_nothing(whole, tmp_path):
    """Of the queue, in the middle of three packed runs; then the same command."""
    process = program(*KILLED, *CHANGES, "--out", tmp_path)
    # of a fixed depth, since runs delete earlier checkpoints meanwhile
    wait_for(lambda: len({path.parents[1] for path in tmp_path.glob("uea/*/*/checkpoints/step-*")}) == 3)
    process.kill()
    process.wait()
    assert not list(tmp_path.glob("uea/*/*/result.json"))
    flowformer("reproduce", *KILLED, *CHANGES, "--out", tmp_path)
    assert numbers(tmp_path) == numbers(whole)
    assert (tmp_path / "results.html").exists()
    assert not list(tmp_path.rglob("checkpoints")), "finished runs keep none"
    text = (tmp_path / "results.md").read_text()
    assert "± " in text
    assert "## UEA time series, accuracy in %: model.embed_dim=16" in text
    assert "paper 98.9" not in text, "it is not the recipe"


def test_what_a_table_of_results_has_is_not_run_again(whole, tmp_path):
    flowformer("results", whole, "--out", tmp_path / "carried")
    queue = ["reproduce", *KILLED, *CHANGES, "--out", tmp_path / "queue"]
    carried = ["--known", tmp_path / "carried" / "results.csv"]
    assert [job["state"] for job in json.loads(flowformer(*queue, "--list", "--json"))] == ["to do"] * 3
    output = flowformer(*queue, *carried)
    assert "0 of 3 runs to do" in output
    assert (tmp_path / "queue" / "results.csv").read_text() == (tmp_path / "carried" / "results.csv").read_text()
    other = json.loads(flowformer(*queue, *carried, "steps=241", "--list", "--json"))
    assert [job["state"] for job in other] == ["to do"] * 3, "another experiment"
    table = tmp_path / "carried" / "results.csv"
    table.write_text(table.read_text().replace("-seed", "-renamed"))
    assert {job["state"] for job in json.loads(flowformer(*queue, *carried, "--list", "--json"))} == {"done"}


ENDLESS = [*TINY, "steps=1000000", "checkpoint_every=1000000"]


def on_their_way(out):
    """The number of runs that made an update."""
    return sum(path.stat().st_size > 0 for path in out.rglob("log.jsonl"))


def test_the_time_is_kept(tmp_path, monkeypatch):
    """Every unfinished run has a checkpoint, and the same command goes on."""
    jobs = reproduce.jobs("uea", tmp_path, cells=CELL[1:], seeds=2, overrides=ENDLESS)

    class Clock:
        """29 of the 30 minutes are over when both runs are on their way."""

        sleep = time.sleep

        @staticmethod
        def monotonic():
            return time.monotonic() + (29.05 * 60 if on_their_way(tmp_path) == 2 else 0)

    monkeypatch.setattr(reproduce, "time", Clock)
    seen = []
    made = reproduce.Queue(jobs, tmp_path, pack=2, minutes=30, watch=lambda *state: seen.append(state))
    made.run()
    assert made.stopped == "the 30 minutes are over"
    assert not made.failed
    assert {len(state) for state in seen} == {3}
    assert seen[0] == (dict.fromkeys((job.label for job in jobs), 0.0), 0, 2)
    assert len(list(tmp_path.rglob("step-*/progress.json"))) == 2
    assert all(job.state().startswith("to do from step-") for job in jobs)


UPDATES = {"kind": "train", "step": 30, "epoch": 1.5, "loss": 0.5}


@pytest.mark.parametrize(
    ("config", "records", "share"),
    [
        ({"steps": 40, "epochs": None}, [{**UPDATES, "step": 10}, UPDATES], 0.75),
        ({"steps": None, "epochs": 6}, [UPDATES], 0.25),
        ({"options": {"steps": 60}}, [UPDATES] * 200, 0.5),
        ({"options": {}}, [{"kind": "progress", "step": 30, "done": 0.6}], 0.6),
        ({"steps": 40}, [], 0.0),
        ({"options": {}}, [{"kind": "eval", "split": "test", "step": 0, "accuracy": 0.9}], 0.0),
        ({"steps": 40}, [30], 0.0),
        ([], [UPDATES], 0.0),
    ],
    ids=[
        "updates",
        "epochs",
        "method",
        "epochs of a method",
        "starting",
        "method without updates",
        "damaged log",
        "damaged config",
    ],
)
def test_share_of_a_run_that_is_done(tmp_path, config, records, share):
    assert reproduce.share_done(tmp_path) == 0
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "log.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    assert reproduce.share_done(tmp_path) == share


def test_progress_of_a_queue_in_a_terminal():
    terminal = Console(force_terminal=True, width=100, file=io.StringIO())
    with queue_progress(terminal) as watch:
        watch({"a/flow, seed 0": 0.25, "b/flow, seed 0": 0.5}, 0, 3)
        watch({"b/flow, seed 0": 0.75, "b/flow, seed 1": 0.0}, 1, 3)
    shown = Text.from_ansi(terminal.file.getvalue()).plain
    bars = re.findall(r"(\S.*\S) +[━╸╺]+ +(\d+)%", shown)
    assert bars[-3:] == [("1 of 3 runs done", "58"), ("b/flow, seed 0", "75"), ("b/flow, seed 1", "0")]
    with queue_progress(Console(file=io.StringIO())) as watch:
        assert watch is None


def test_sigterm_leaves_checkpoints(tmp_path, monkeypatch):
    class Clock:
        """The queue gets its signal while it waits for a run that is on its way."""

        monotonic = time.monotonic

        @staticmethod
        def sleep(seconds):
            if on_their_way(tmp_path):
                signal.raise_signal(signal.SIGTERM)
            time.sleep(seconds)

    monkeypatch.setattr(reproduce, "time", Clock)
    long = ["uea", *CELL, "--seeds", "1", "--pack", "1", *ENDLESS]
    result = CliRunner().invoke(app, ["reproduce", *long, "--out", str(tmp_path)])
    assert result.exit_code == 130
    assert len(list(tmp_path.rglob("step-*/progress.json"))) == 1
    assert claims.owner(next(Path(tmp_path).rglob("checkpoints")).parent) is None


def queue(tmp_path, *jobs):
    return reproduce.Queue(list(jobs), tmp_path, pack=1)


def job(tmp_path, *command, name="a"):
    folder = tmp_path / name
    return reproduce.Job(name, 0, folder, command, folder / "result.json", 1.0)


def test_a_method_without_checkpoints_that_is_stopped_has_not_failed(tmp_path):
    (job,) = reproduce.jobs("uea", tmp_path, cells=["uea/JapaneseVowels/dtw"], seeds=1)
    claims.reserve(job.folder)
    said = []
    queue = reproduce.Queue([job], tmp_path, pack=1, say=said.append, stopped="it was asked to")
    queue._running[subprocess.Popen(["sleep", "60"])] = job
    queue._stop(time.monotonic() + 60)
    assert said == [f"stopped: {job.label}, which wrote no checkpoint and starts over"]
    assert not queue.failed
    assert job.state() == "to do"


def test_a_method_that_is_stopped_leaves_a_checkpoint(tmp_path, monkeypatch):
    class Clock:
        monotonic = time.monotonic

        @staticmethod
        def sleep(seconds):
            if reproduce.share_done(endless.folder):
                signal.raise_signal(signal.SIGTERM)
            time.sleep(seconds)

    monkeypatch.setattr(reproduce, "time", Clock)
    command = ("fit", "uea/JapaneseVowels", "lstm", "embed_dim=8", "n_epochs=100000", "--out", str(tmp_path / "a"))
    endless, said = job(tmp_path, *command), []
    with pytest.raises(Interrupted):
        reproduce.Queue([endless], tmp_path, pack=1, say=said.append).run()
    assert said[-1] == f"stopped: {endless.label}, with a checkpoint"
    assert endless.state().startswith("to do from step-")


def write_checkpoints(job, *names):
    for name in names:
        (job.folder / "checkpoints" / name).mkdir(parents=True)
        (job.folder / "checkpoints" / name / "progress.json").touch()


def test_a_run_that_is_stopped_while_it_starts_resumes_from_its_checkpoint(tmp_path):
    """No signal handler is installed yet, so it writes no other checkpoint."""
    starting, said = job(tmp_path), []
    write_checkpoints(starting, "step-04", "step-12")
    claims.reserve(starting.folder)
    made = reproduce.Queue([starting], tmp_path, pack=1, say=said.append, stopped="it was asked to")
    made._running[subprocess.Popen(["sleep", "60"])] = starting
    made._stop(time.monotonic() + 60)
    assert said == [f"stopped: {starting.label}, which wrote no checkpoint and resumes from step-12"]


@pytest.mark.parametrize(
    ("written", "start"), [([], "starts over"), (["step-04", "step-12"], "resumes from step-12")], ids=["none", "two"]
)
def test_a_run_that_does_not_stop_in_time_is_killed(tmp_path, written, start):
    deaf, said = subprocess.Popen(["sh", "-c", "trap '' TERM; echo; exec sleep 60"], stdout=subprocess.PIPE), []
    assert deaf.stdout.readline()
    running = job(tmp_path)
    claims.reserve(running.folder)
    write_checkpoints(running, *written)
    made = reproduce.Queue([running], tmp_path, pack=1, say=said.append, stopped="it was asked to")
    made._running[deaf] = running
    made._stop(time.monotonic())
    assert deaf.returncode == -signal.SIGKILL
    assert said == [f"killed: {running.label}, which wrote no checkpoint in time and {start}"]


def test_a_second_ctrl_c_does_not_wait_for_checkpoints(tmp_path, monkeypatch):
    class Clock:
        """Ctrl-C whenever the queue waits."""

        monotonic = time.monotonic

        @staticmethod
        def sleep(seconds):
            signal.raise_signal(signal.SIGINT)

    made = reproduce.Queue([job(tmp_path)], tmp_path, pack=1, minutes=0.1)
    deaf = subprocess.Popen(["sh", "-c", "trap '' TERM; echo; exec sleep 60"], stdout=subprocess.PIPE)
    deaf.stdout.readline()  # the trap is set
    made._running[deaf] = made.jobs.pop()
    monkeypatch.setattr(reproduce, "time", Clock)
    try:
        with pytest.raises(KeyboardInterrupt) as stopped:
            made.run()
        assert stopped.type is KeyboardInterrupt, "Interrupted is what is raised after the wait"
        assert deaf.poll() is None
    finally:
        deaf.kill()
        deaf.communicate()


def test_a_failed_run_stops_no_other(tmp_path, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # as in a CI: it does not hide the reason
    made = queue(tmp_path, job(tmp_path, "train", "uea/Nothing"), job(tmp_path, "--help", name="b"))
    made.run()
    assert made.failed["a, seed 0"].startswith("unknown recipe 'uea/Nothing'")
    assert "it ended with code 0" in made.failed["b, seed 0"]
    assert made.jobs[0].state().startswith("failed: unknown recipe")


def test_a_full_disk_is_said_before_anything_is_started(tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(reproduce.shutil, "disk_usage", lambda path: usage(1, 1, 2**20))
    made = queue(tmp_path, job(tmp_path, "env"))
    with pytest.raises(OSError, match="1 MiB left, too little for checkpoints"):
        made.run()
    assert not list(tmp_path.iterdir()), "not even a reservation, which may not fit"


def test_a_disk_without_space_for_one_more_run_fails_no_other(tmp_path, monkeypatch):
    """The first was just started: it dies of the signal, without a checkpoint."""
    usage = namedtuple("usage", "total used free")
    space = iter([2**40, 2**20])
    monkeypatch.setattr(reproduce.shutil, "disk_usage", lambda path: usage(1, 1, next(space)))
    made = reproduce.Queue([job(tmp_path, "train", "x"), job(tmp_path, "train", "x", name="b")], tmp_path, pack=2)
    with pytest.raises(OSError, match="too little for checkpoints"):
        made.run()
    assert not made.failed
    assert [each.state() for each in made.jobs] == ["to do", "to do"]


def test_a_run_that_is_stopped_by_itself_is_left(tmp_path, monkeypatch):
    """As by a signal to its process alone."""
    worker = tmp_path / "worker"
    worker.write_text("#!/bin/sh\nexit 130\n")
    worker.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(worker))
    output = flowformer("reproduce", "uea", *CELL, "--seeds", 1, "--out", tmp_path / "queue")
    assert "1 runs are left: they were stopped one by one. Run the same command to resume." in output


def test_a_disk_that_fills_up_stops_the_queue(tmp_path, monkeypatch):
    monkeypatch.setattr(reproduce, "_failure_reason", lambda log, code: os.strerror(errno.ENOSPC))
    monkeypatch.setattr(sys, "executable", "false")
    made = queue(tmp_path, job(tmp_path, "train", "x"), job(tmp_path, "train", "x", name="b"))
    made.run()
    assert "is full" in made.stopped
    assert list(made.failed) == ["a, seed 0"], "the second was not started"


def test_runs_of_another_machine_are_left_to_it(tmp_path):
    made = queue(tmp_path, job(tmp_path, "env"))
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / claims.CLAIM).write_text(json.dumps({"token": "x", "pid": 1, "host": "far", "machine": "far"}))
    made.run()
    assert made.stopped == "the last 1 are run by far"
    assert made.jobs[0].state() == "running on far, process 1"
