"""The command line, from a recipe to figures, on the data that aeon brings along."""

from __future__ import annotations

import csv
import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from accelerate.state import AcceleratorState
from typer.testing import CliRunner

from flowformer import __version__
from flowformer.cli import app
from flowformer.cli.app import command as registered
from flowformer.cli.progress import progress
from flowformer.train import demo, evaluation, paper, recipes
from flowformer.train.config import to_dict
from flowformer.train.figures import measure_degeneracy
from flowformer.train.methods.config import configure
from flowformer.train.overrides import override
from flowformer.train.recipes import names
from flowformer.train.results import comparable_score

TINY = ["embed_dim=16", "num_heads=2", "mlp_dim=32", "num_layers=1", "steps=4", "eval_every=2"]


def flowformer(*arguments, fails=False):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert (result.exit_code != 0) == fails, result.output
    return result.output if not fails else " ".join(result.output.split())


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "vowels"
    result = json.loads(flowformer("train", "uea/JapaneseVowels", *TINY, "--out", folder, "--json"))
    return folder, result


def test_where_and_how_episodes_were_played(capsys):
    scores = {"score": 3.5, "environment": "Hopper-v4", "note": "target return 3600 above every episode"}
    with progress(quiet=False) as reporter:
        reporter("flow")({"kind": "eval", "split": "test", "step": 8, "epoch": 0.5, **scores})
    printed = capsys.readouterr().out
    assert printed == (
        "flow, epoch 0.5, update 8: test score 3.5000; Hopper-v4; target return 3600 above every episode\n"
    )


class TestTrain:
    def test_result(self, run):
        folder, result = run
        assert result["steps"] == 4
        assert result["best_chosen_on"] == "test"
        assert result["folder"] == str(folder)
        assert json.loads((folder / "config.json").read_text())["model"]["embed_dim"] == 16

    def test_without_a_terminal_prints_lines(self, tmp_path):
        output = flowformer("train", "uea/JapaneseVowels", *TINY, "attention=linear", "--out", tmp_path / "run")
        assert "linear, epoch 0.1176, update 2: test accuracy" in output
        assert "best, chosen on test" in output
        assert "99.2" not in output, "the paper's number of linear attention, trained for longer"
        assert "Not the paper's experiment: model.embed_dim=16" in " ".join(output.split())

    def test_the_papers_number_stands_beside_its_own_experiment(self):
        recipe = recipes.get("uea/JapaneseVowels")
        for overrides, number in (([], 98.9), (["precision=bf16", "seed=3"], 98.9), (["epochs=8"], None)):
            assert comparable_score(to_dict(override(recipe, overrides)), "flow") == number

    def test_as_published(self, tmp_path):
        flowformer("train", "uea/JapaneseVowels", *TINY, "--as-published", "--out", tmp_path / "run")
        config = json.loads((tmp_path / "run/config.json").read_text())
        assert config["recipe"] == "uea/JapaneseVowels@published"
        assert not config["model"]["mask_padding"]

    def test_a_run_that_is_there_is_resumed_or_refused(self, run):
        folder, result = run
        output = flowformer("train", "uea/JapaneseVowels", *TINY, "--out", folder, fails=True)
        assert "Resume it with --resume, or choose another folder with --out." in output
        other = flowformer("train", "uea/JapaneseVowels", *TINY, "seed=1", "--out", folder, "--resume", fails=True)
        assert (
            "seed differ. Resume it with the config it was started with, or choose another folder with --out." in other
        )
        again = json.loads(flowformer("train", "uea/JapaneseVowels", *TINY, "--out", folder, "--json", "--resume"))
        assert again["final"] == result["final"]

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["uea/JapanesVowels"], "did you mean 'uea/JapaneseVowels'"),
            (["uea/JapaneseVowels", "stepps=3"], "did you mean 'steps'"),
            (["uea/JapaneseVowels", "learning_rate=0.1"], "did you mean 'optimiser.lr'"),
            (["uea/JapaneseVowels", "steps=3.5"], "steps must be a whole number, got '3.5'"),
            (["uea/JapaneseVowels", "attention=softmx"], "did you mean 'softmax'"),
            (["uea/Heartbeat"], "UEA Heartbeat is missing"),
        ],
    )
    def test_a_mistake_is_one_sentence(self, tmp_path, arguments, message):
        output = flowformer("train", *arguments, "--out", tmp_path / "run", "--data", tmp_path, fails=True)
        assert message in output
        assert "Traceback" not in output


class TestAfterwards:
    def test_eval_repeats_the_result(self, run):
        folder, result = run
        for model in ("final", "best"):
            scores = json.loads(flowformer("eval", folder, "--model", model, "--json"))
            assert scores["accuracy"] == pytest.approx(result[model]["accuracy"])
            assert scores["loss"] == pytest.approx(result[model]["loss"], rel=1e-5)

    def test_eval_has_the_precision_of_the_run(self, tmp_path):
        result = json.loads(
            flowformer("train", "uea/JapaneseVowels", *TINY, "precision=bf16", "--out", tmp_path / "run", "--json")
        )
        AcceleratorState._reset_state(reset_partial_state=True)  # as in a new process
        scores = json.loads(flowformer("eval", tmp_path / "run", "--json"))
        assert scores["loss"] == pytest.approx(result["final"]["loss"], rel=1e-6)

    def test_eval_of_what_is_not_there(self, run, tmp_path):
        assert "has no config.json" in flowformer("eval", tmp_path, fails=True)
        (tmp_path / "stopped").mkdir()
        (tmp_path / "stopped/config.json").write_text((run[0] / "config.json").read_text())
        for arguments in (["eval"], ["plot", "--maps"]):
            output = flowformer(*arguments, tmp_path / "stopped", fails=True)
            assert "stopped has no final model yet: it is written when the run ends." in output
            assert "flowformer train uea/JapaneseVowels with its overrides" in output
        output = flowformer("eval", tmp_path / "stopped", "--model", "best", fails=True)
        assert "no best model yet: it is written at the first evaluation" in output
        assert "did you mean 'best'" in flowformer("eval", run[0], "--model", "bets", fails=True)
        assert "has no validation part" in flowformer("eval", run[0], "--split", "valid", fails=True)

    def test_eval_of_episodes(self, monkeypatch):
        """Their scores say what was played, in words."""
        played = {"environment": "Hopper-v4", "episodes": 3, "score": 1.25}
        monkeypatch.setattr(evaluation, "evaluate_run", lambda *args, **options: played)
        output = flowformer("eval", "run")
        for text in ("Hopper-v4", " 3 ", "1.2500"):
            assert text in output

    def test_eval_of_a_folder_inside_a_run(self, run):
        output = flowformer("eval", run[0] / "final", fails=True)
        assert "config.json is not the config of a run: its keys are model," in output
        assert "Pass the folder of a run" in output

    @pytest.mark.parametrize(
        ("damage", "message"),
        [
            (lambda fields: fields.pop("model"), "it lacks 'model'"),
            (lambda fields: fields["model"].update({"class": "Later"}), "unknown class of models 'Later'"),
            (lambda fields: fields.update(later=1), "TrainConfig has no 'later'"),
        ],
    )
    def test_eval_of_a_run_of_another_version(self, run, tmp_path, damage, message):
        fields = json.loads((run[0] / "config.json").read_text())
        damage(fields)
        (tmp_path / "config.json").write_text(json.dumps(fields))
        output = flowformer("eval", tmp_path, fails=True)
        assert f"{tmp_path / 'config.json'} cannot be read: {message}" in output
        assert "Read it with the version that made it" in output

    def test_names_of_files_are_printed_as_they_are(self, run, tmp_path):
        path = tmp_path / "a:b:c.png"
        assert flowformer("plot", run[0], "--out", path) == f"{path}\n"

    def test_plot(self, run, tmp_path):
        folder, _ = run
        flowformer("plot", folder, "--out", tmp_path / "curves.png")
        assert flowformer("plot", folder, "--out", tmp_path / "[bold]new" / "curves").endswith("[bold]new/curves.png\n")
        assert (tmp_path / "[bold]new" / "curves.png").is_file()
        flowformer("plot", folder, "--maps", "--out", tmp_path / "maps.png")
        for name in ("curves.png", "maps.png"):
            assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")

    def test_plot_of_what_is_no_figure(self, run, tmp_path):
        folder, _ = run
        flowformer("results", folder.parent, "--out", tmp_path)
        output = flowformer("plot", tmp_path / "results.csv", fails=True)
        assert "results.csv is no benchmark's CSV" in output
        assert "lacks" in output
        mixed = ([folder, folder, "--maps"], [folder, "--maps", "--compare"], ["a.csv", "--compare"])
        for several in (["a.csv", "b.csv"], [folder, "a.csv"], *mixed):
            assert "accepted: several folders of runs, also with --compare, or one with --maps" in flowformer(
                "plot", *several, fails=True
            )

    def test_comparison_of_attentions(self, run, tmp_path):
        folder, _ = run
        flowformer("train", "uea/JapaneseVowels", *TINY, "attention=linear", "--out", tmp_path / "linear", "--json")
        output = flowformer("plot", folder, tmp_path / "linear", "--compare", "--out", tmp_path / "both.png")
        assert (tmp_path / "both.png").read_bytes().startswith(b"\x89PNG")
        measured = measure_degeneracy([folder, tmp_path / "linear"])
        lines = [re.findall(r"[\w.]+", line) for line in output.splitlines() if line.startswith("│")]
        assert lines == [
            [name, "1", f"{layer.evenness:.3f}", f"{100 * layer.top_share:.1f}"] for name, (layer,) in measured.items()
        ]
        assert [line[0] for line in lines] == ["flow", "linear"]
        config = json.loads((tmp_path / "linear/config.json").read_text())
        (tmp_path / "linear/config.json").write_text(json.dumps({**config, "data_options": {"partial": True}}))
        output = flowformer("plot", folder, tmp_path / "linear", "--compare", fails=True)
        assert "runs must be on the same data to be compared" in output

    def test_results(self, run, tmp_path):
        folder, result = run
        output = flowformer("results", folder.parent, "--out", tmp_path / "results")
        (row,) = csv.DictReader((tmp_path / "results/results.csv").open())
        assert (row["recipe"], row["attention"]) == ("uea/JapaneseVowels", "flow")
        assert row["paper"] == "", "a run with overrides is not what the paper describes"
        assert "model.embed_dim=16" in row["overrides"].split()
        assert row["folder"] == str(folder)
        assert float(row["final"]) == pytest.approx(100 * result["final"]["accuracy"], abs=0.01)
        assert all(row[name] for name in ("checksum", "device", "commit", "command", "training_seconds"))
        assert "| uea/JapaneseVowels | flow | 0 | accuracy | model.embed_dim=16" in output
        assert json.loads(flowformer("results", folder.parent, "--json"))[0]["final"] == float(row["final"])
        assert (tmp_path / "results/results.html").read_text().startswith("<!DOCTYPE html>")
        assert "no finished run" in flowformer("results", tmp_path / "results", fails=True)

    def test_results_without_the_data_of_a_figure(self, run, tmp_path):
        """Tables, CSV and page are written all the same."""
        folder, _ = run
        output = flowformer("results", folder.parent, "--out", tmp_path / "results", "--data", tmp_path / "tpyo")
        assert "A figure is left out, uea/JapaneseVowels, model.embed_dim=16" in output
        assert f"UEA JapaneseVowels is missing: there is no {tmp_path}/tpyo/uea" in output
        assert "pass --data or set FLOWFORMER_DATA" in output
        for name in ("results.csv", "results.md", "results.html"):
            assert (tmp_path / "results" / name).is_file()
        assert not list((tmp_path / "results").rglob("*.png"))


class TestWords:
    """The command line speaks of its own options, not of arguments of functions."""

    def test_data_that_is_elsewhere(self, tmp_path):
        output = flowformer("data", "check", "enwik8", "--data", tmp_path, fails=True)
        assert "pass --data or set FLOWFORMER_DATA" in output
        (tmp_path / "enwik8").write_text("too short")
        output = flowformer("data", "check", "enwik8", "--data", tmp_path, fails=True)
        assert "or train with data_options.partial=true to use what is there" in output

    def test_a_slip_in_data_is_not_hidden_by_the_copy_of_aeon(self, tmp_path):
        train = ["train", "uea/JapaneseVowels", *TINY, "--out", tmp_path / "run"]
        for command in (["data", "check", "uea/JapaneseVowels"], train):
            output = flowformer(*command, "--data", tmp_path / "tpyo", fails=True)
            assert f"UEA JapaneseVowels is missing: there is no {tmp_path}/tpyo/uea" in output
        listed = json.loads(flowformer("data", "list", "--json", "--data", tmp_path / "tpyo"))["sets"]
        assert f"{tmp_path}/tpyo, which does not exist" in flowformer("data", "list", "--data", tmp_path / "tpyo")
        assert not listed["uea/JapaneseVowels"]["there"]

    @pytest.mark.parametrize(
        ("option", "message"),
        [
            ("progress=1", "got 'progress=1'; accepted: key=value with a key of seed, sizes, workers"),
            ("sizes=[10,2,2]", 'got [10, 2, 2]; accepted: such as {"train": 960, "val": 20, "test": 20}'),
            ("sizes=[...]", "sizes must be a value as in JSON, such as sizes=1, got '[...]'"),
            ("sizes", "got 'sizes'; accepted: key=value"),
            ("seed=1.5", "seed must be a whole number, got 1.5"),
        ],
    )
    def test_prepare(self, tmp_path, option, message):
        output = flowformer("data", "prepare", "lra/listops", option, "--data", tmp_path, fails=True)
        assert message in output
        assert not list(tmp_path.iterdir()), "nothing is claimed for what cannot be made"

    def test_prepare_of_a_set_that_is_not_generated(self, tmp_path):
        output = flowformer("data", "prepare", "lra/text", "--data", tmp_path, fails=True)
        assert "flowformer data list says where to get the others" in output

    def test_prepare_where_other_data_is(self, tmp_path):
        few = 'sizes={"train": 2, "val": 1, "test": 1}'
        flowformer("data", "prepare", "lra/listops", few, "workers=1", "--data", tmp_path)
        output = flowformer("data", "prepare", "lra/listops", few, "seed=1", "--data", tmp_path, fails=True)
        assert "Delete the folder, or choose another folder with --data." in output

    def test_a_package_that_is_missing(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "accelerate", None)
        for module in ("engine", "evaluation"):
            monkeypatch.delitem(sys.modules, f"flowformer.train.{module}")
        assert "pip install 'flowformer[train,ts,hf]'" in flowformer("eval", "run", fails=True)

    def test_the_command_line_itself_is_missing(self):
        code = "import sys; sys.modules['typer'] = None; import flowformer.cli"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
        assert done.returncode == 1
        assert "Traceback" not in done.stderr
        assert "pip install 'flowformer[train,ts,hf]'" in done.stderr

    @pytest.mark.skipif(sys.platform != "linux", reason="torch has GNU OpenMP on Linux")
    @pytest.mark.parametrize(
        ("given", "spins"),
        [({}, "3000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "passive"}, "0")],
    )
    def test_threads_spin_briefly_unless_the_user_says_otherwise(self, given, spins):
        kept = {key: value for key, value in os.environ.items() if key not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
        done = subprocess.run(
            [sys.executable, "-m", "flowformer.cli", "env"],
            env=kept | given | {"OMP_DISPLAY_ENV": "verbose"},
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        )
        assert f"GOMP_SPINCOUNT = '{spins}'" in done.stderr

    def test_a_reader_that_has_gone_is_no_error(self):
        def write():
            raise BrokenPipeError

        with pytest.raises(BrokenPipeError):
            registered(typer.Typer(), "write")(write)()

    def test_version(self):
        assert flowformer("--version").strip() == __version__

    def test_debug_shows_where_it_happened(self, tmp_path):
        arguments = ["data", "check", "enwik8", "--data", str(tmp_path)]
        result = CliRunner().invoke(app, ["--debug", *arguments])
        assert isinstance(result.exception, FileNotFoundError)
        assert isinstance(CliRunner().invoke(app, arguments).exception, SystemExit)

    def test_the_recorded_command_can_be_run_again(self, run, monkeypatch, tmp_path):
        words = [
            "flowformer",
            "train",
            "uea/JapaneseVowels",
            *TINY,
            "--out",
            "my run; ls",
        ]
        monkeypatch.setattr(sys, "argv", words)
        flowformer(*words[1:-1], tmp_path / words[-1])
        recorded = json.loads((tmp_path / words[-1] / "provenance.json").read_text())["command"]
        assert shlex.split(recorded) == words


class TestLists:
    def test_recipes(self):
        assert json.loads(flowformer("recipes", "--json")) == names()
        assert "lra/text" in flowformer("recipes")
        assert all(f" {name} " in flowformer("recipes") for name in names()), "a name is cut off"
        shown = flowformer("recipes", "lra/text")
        assert "model.attention" in shown
        assert "released code cuts reviews at 1000 bytes" in shown

    def test_data(self, tmp_path):
        listed = json.loads(flowformer("data", "list", "--json", "--data", tmp_path))["sets"]
        assert listed["uea/JapaneseVowels"] == {"there": True}
        assert listed["enwik8"]["get"].startswith("Download http")
        # found, not read: what is in it does not matter
        (tmp_path / "enwik8").write_text("too short")
        assert json.loads(flowformer("data", "list", "--json", "--data", tmp_path))["sets"]["enwik8"] == {"there": True}
        shown = flowformer("data", "list", "--data", tmp_path).splitlines()
        assert "  enwik8: there" in shown
        assert any(line.startswith("  ptb: missing, 6 MB. Download") for line in shown)
        facts = json.loads(flowformer("data", "check", "uea/JapaneseVowels", "--json"))
        assert (facts["train"], facts["test"], facts["valid"], facts["num_classes"]) == (270, 370, None, 9)
        assert "is missing" in flowformer("data", "check", "uea/PEMS-SF", "--data", tmp_path, fails=True)

    def test_env(self):
        facts = json.loads(flowformer("env", "--json"))
        assert {"flowformer", "torch", "gpu", "attentions"} <= set(facts)
        assert "softmax" in facts["attentions"]

    @pytest.mark.parametrize("command", ["demo", "train", "eval", "plot", "recipes", "results", "env"])
    def test_help(self, command):
        assert command in flowformer("--help")
        assert "Usage" in flowformer(command, "--help")


def test_demo(tmp_path, monkeypatch):
    """All but the length and the size of the real one."""
    full = demo.config

    def small(attention):
        config = full(attention)
        model = replace(config.model, embed_dim=16, num_heads=2, mlp_dim=32)
        return replace(config, model=model, epochs=1)

    monkeypatch.setattr(demo, "config", small)
    output = flowformer("demo", "--out", tmp_path / "demo")
    assert "final epoch" in output
    assert "98.9 %" in output
    for name in ("flow/final/model.safetensors", "flow/config.json", "softmax/result.json", "demo.json", demo.FIGURE):
        assert (tmp_path / "demo" / name).is_file(), name
    assert "has a demo already. Choose another folder with --out." in flowformer(
        "demo", "--out", tmp_path / "demo", fails=True
    )


def test_the_demo_deletes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    written = []
    monkeypatch.setattr(demo, "run", lambda folder, report: written.append(folder) or {})
    for expected in ("runs/demo", "runs/demo-2", "runs/demo-3"):
        flowformer("demo")
        assert written[-1] == Path(expected)
        written[-1].mkdir(parents=True)
        (written[-1] / "mine.txt").write_text("kept")
    assert len(list(tmp_path.rglob("mine.txt"))) == 3


def test_the_demo_is_the_recipe_but_shorter():
    short, recipe = demo.config("flow"), recipes.get("uea/JapaneseVowels")
    assert replace(short, epochs=recipe.epochs, schedule=recipe.schedule, eval_every=None) == recipe
    assert replace(demo.config("softmax").model, attention="flow") == short.model


class TestPaper:
    def test_averages_are_those_of_the_paper(self):
        """The rows were typed: their sums say whether they were typed right."""
        tasks = [name for name in names() if name.startswith("lra/")]
        averages = {
            "flow": 56.48,
            "softmax": 54.39,
            "linear": 50.55,
            "reformer": 50.67,
            "bigbird": 55.01,
            "cosformer": 55.23,
        }
        for attention, average in averages.items():
            assert sum(paper.paper_score(task, attention) for task in tasks) / 5 == pytest.approx(average, abs=0.006)
        sets = [name for name in names() if name.startswith("uea/")]
        for attention, average in {"flow": 73.0, "softmax": 71.9, "linear": 72.4, "cosformer": 72.2}.items():
            assert sum(paper.paper_score(each, attention) for each in sets) / 10 == pytest.approx(average, abs=0.06)
        games = [name for name in names() if name.startswith("d4rl/")]
        for attention, average in {"flow": 73.5, "softmax": 72.2, "linear": 64.4, "cosformer": 67.8}.items():
            assert sum(paper.paper_score(each, attention) for each in games) / 9 == pytest.approx(average, abs=0.06)

    def test_everything_that_is_printed_beside_scores(self):
        lra = [name for name in names() if name.startswith("lra/")]
        for attention in ("flow-without-competition", "flow-without-allocation", "flow-elu+1", "flow-relu"):
            mean = sum(paper.paper_score(task, attention) for task in lra) / 5
            assert mean == pytest.approx(paper.paper_average("lra", attention), abs=0.006)
        assert paper.paper_score("wikitext103", "rfa-gate") == 31.3
        assert paper.paper_score("wikitext103", "flow-without-allocation") == 32.2
        figures = ("score", "top5", "parameters", "flops")
        assert [paper.paper_figure("imagenet/deit-s", "softmax", each) for each in figures] == [79.8, 95.0, 22, 4.6]
        assert [paper.paper_figure("imagenet/vit-l", "softmax", each) for each in figures] == [76.5, None, 307, 190.7]
        games = [name for name in names() if name.startswith("d4rl/")]
        # that of cosFormer is printed as 7.6, which is Performer's
        for attention, average in {
            "softmax": 2.6,
            "linear": 6.5,
            "reformer": 2.9,
            "performer": 7.6,
            "flow": 2.9,
        }.items():
            deviations = [paper.paper_figure(each, attention, "deviation") for each in games]
            assert sum(deviations) / 9 == pytest.approx(average, abs=0.06)

    def test_what_is_not_in_it(self):
        assert paper.paper_score("cifar10", "flow") is None
        assert paper.paper_score("lra/text", "rfa") is None


DOCS = Path(__file__).parent.parent
COMMANDS = re.findall(
    r"(?:`|^)flowformer ([a-z][^`\n]*)",
    "\n".join(map(Path.read_text, [DOCS / "README.md", *DOCS.glob("docs/*.md")])),
    re.M,
)


@pytest.mark.parametrize("command", sorted(set(COMMANDS)))
def test_what_the_documentation_says_is_there(command):
    """Commands of the README and the docs: each exists, and takes its recipe, its method and its overrides."""
    match command.split():
        case ["train", recipe, *overrides]:
            override(recipes.get(recipe), overrides)
        case ["fit" | "rival", recipe, name, *_] if recipe.islower() or "/" in recipe:
            configure(recipe, name, [], seed=0)
        case words:
            names = [word for word in words if re.fullmatch("[a-z]+", word)]
            assert "usage" in flowformer(*names, "--help").lower()
