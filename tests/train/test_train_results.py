"""Results: what differs from a recipe is said, seeds are averaged, and the page works in a browser on its own."""

from __future__ import annotations

import csv
import errno
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
from helpers import ROOT
from matplotlib.figure import Figure

from flowformer.train import figures, recipes, summary, tables
from flowformer.train.config import TrainConfig, to_dict
from flowformer.train.figures import draw_speeds
from flowformer.train.overrides import override
from flowformer.train.results import collect, differences, write_csv

FACTS = {
    "data": "some",
    "checksum": "0123",
    "differs": "",
    "device": "a GPU",
    "processes": 1,
    "threads": 1,
    "python": "3.12",
    "torch": "2.11",
    "accelerate": "1",
    "flowformer": "0.1",
    "commit": "abc",
    "command": "flowformer train </script> 'x y'",
}


def write_run(folder, recipe, attention="flow", seed=0, final=0.9, best=None, overrides=(), metric="accuracy", **more):
    """A finished run, as `train` leaves one."""
    config = override(recipes.get(recipe), [f"attention={attention}", f"seed={seed}", *overrides])
    run = folder / config.name
    run.mkdir(parents=True)
    scores = {"final": {metric: final, "step": 10}, "best": {metric: final if best is None else best, "step": 5}}
    for which, value in more.get("top5", {}).items():
        scores[which]["top5"] = value
    result = {
        "recipe": config.recipe,
        "attention": attention,
        "seed": seed,
        "metric": metric,
        **scores,
        "best_chosen_on": config.select_on,
        "steps": 10,
        "parameters": more.get("parameters", 1000),
        "training_seconds": 1.5,
        "steps_per_second": 6.7,
        "peak_memory_mib": 100.0,
    }
    (run / "config.json").write_text(json.dumps(to_dict(config)))
    (run / "provenance.json").write_text(json.dumps({**FACTS, "data": recipe, **more.get("facts", {})}))
    (run / "result.json").write_text(json.dumps(result))
    log = [{"kind": "train", "step": i, "loss": 1 / i**6} for i in range(1, 11)]
    log += [{"kind": "eval", "split": "test", "step": i, "epoch": 0.5, metric: final} for i in (5, 10)]
    (run / "log.jsonl").write_text("".join(json.dumps(record) + "\n" for record in log))
    return run


@pytest.fixture
def vowels(tmp_path):
    """Three seeds of Flow-Attention, one of softmax attention, and two runs that are not the recipe."""
    for seed, (final, best) in enumerate([(0.98, 0.99), (0.97, 0.98), (0.99, 1.0)]):
        write_run(tmp_path, "uea/JapaneseVowels", "flow", seed, final, best)
    write_run(tmp_path, "uea/JapaneseVowels", "softmax", 0, 0.95)
    write_run(tmp_path, "uea/JapaneseVowels", "flow", 0, 0.5, overrides=["epochs=2", "optimiser.lr=0.1"])
    write_run(tmp_path, "uea/JapaneseVowels", "softmax", 1, 0.96, overrides=["precision=tf32"])
    return tmp_path


def the(rows, name, title=""):
    """The table of a name, by default the one whose title is that of the paper's table."""
    found = {table.title: table for table in summary.fill(rows) if table.table.name == name}
    (paper,) = {table.table.title for table in found.values()}
    return found[f"{paper}: {title}" if title else paper]


def labelled(table):
    return {table.label(line): line for line in table.lines}


class TestDifferences:
    @pytest.mark.parametrize("name", [*recipes.names(), "lra/text@published"])
    def test_a_recipe_has_none(self, name):
        for attention in ("flow", "softmax", "flow-without-competition"):
            config = override(
                recipes.get(name), [f"attention={attention}", "seed=3", "workers=0", "checkpoint_every=7"]
            )
            assert differences(to_dict(config)) == []

    def test_sizes_of_the_data_are_none(self):
        config = recipes.get("uea/JapaneseVowels")
        assert differences(to_dict(replace(config, model=replace(config.model, num_classes=9, num_features=12)))) == []

    def test_everything_else_is_one(self):
        changes = ["epochs=8", "model.dropout=0.5", "variant.clamp=1", "partial=true", "attention=flow"]
        config = override(recipes.get("uea/JapaneseVowels"), changes)
        assert set(differences(to_dict(config))) == {
            "model.variant.clamp=1.0",
            "model.dropout=0.5",
            "data_options.partial=True",
            "epochs=8",
        }

    def test_options_of_a_method(self):
        fields = {
            "recipe": "uea/JapaneseVowels",
            "rival": "rocket",
            "options": {"n_kernels": 9},
            "data_options": {"partial": False},
            "episodes": 100,
        }
        assert differences(fields) == ["options.n_kernels=9"]
        fields = {
            "recipe": "d4rl/hopper-medium",
            "rival": "bc",
            "options": {"steps": 100_000},
            "data_options": {"version": "v5sac"},
            "episodes": 100,
        }
        assert differences(fields) == ["data_options.version=v5sac"]
        assert differences({**fields, "episodes": 1}) == ["data_options.version=v5sac", "final_episodes=1"]


def is_ablation(table):
    return table.table in tables.TABLES["ablations"]


class TestTable:
    def test_mean_and_deviation_over_seeds_beside_the_paper(self, vowels):
        flow = labelled(the(collect([vowels]), "uea"))["Flowformer"].cells["JapaneseVowels"]
        assert (flow.final.mean, flow.final.deviation) == (pytest.approx(98), pytest.approx(1))
        assert (flow.best.mean, flow.paper, flow.difference) == (pytest.approx(99), 98.9, pytest.approx(0.1))
        assert flow.texts == ["99.00 ± 1.00 (3)", "paper 98.9, +0.10", "final 98.00 ± 1.00"]

    def test_another_experiment_is_another_table_without_the_paper(self, vowels):
        table = the(collect([vowels]), "uea", "optimiser.lr=0.1 epochs=2")
        (line,) = table.lines
        cell = line.cells["JapaneseVowels"]
        assert (cell.paper, cell.difference, len(cell.runs)) == (None, None, 1)
        assert "not the recipe's experiment" in table.note

    def test_other_arithmetic_is_the_same_experiment_and_never_mixed_with_the_rest(self, vowels):
        rows = collect([vowels])
        lines = labelled(the(rows, "uea"))
        assert list(lines) == ["Transformer", "Flowformer"], "the recipe's own arithmetic wins a tie"
        assert [run["overrides"] for run in lines["Transformer"].cells["JapaneseVowels"].runs] == [""]
        (line,) = the(rows, "uea", "precision=tf32").lines
        assert line.cells["JapaneseVowels"].paper == 98.7
        assert [run["overrides"] for run in line.cells["JapaneseVowels"].runs] == ["precision=tf32"]

    def test_a_method_has_its_fullest_arithmetic_beside_the_others(self, tmp_path):
        """An average needs every column in one arithmetic."""
        write_run(tmp_path, "uea/JapaneseVowels", "softmax", 0, 0.98)
        for name in ("JapaneseVowels", "Handwriting"):
            write_run(tmp_path, f"uea/{name}", "linear", 0, 0.5)
            write_run(tmp_path, f"uea/{name}", "softmax", 0, 0.9, overrides=["precision=tf32", "graphs=true"])
            write_run(tmp_path, f"uea/{name}", "flow", 0, 0.9, overrides=["epochs=8", "precision=bf16"])
            write_run(tmp_path, f"uea/{name}", "softmax", 0, 0.9, overrides=["epochs=8"])
        rows = collect([tmp_path])
        first = the(rows, "uea")
        lines = labelled(first)
        assert list(lines) == ["Transformer ¹", "Linear Trans."]
        assert lines["Transformer ¹"].average.final.mean == pytest.approx(90)
        assert lines["Transformer ¹"].average.paper == pytest.approx((98.7 + 32.0) / 2)
        assert first.note.endswith("\n\n¹ With precision=tf32 graphs=True, which changes the arithmetic only.")
        further = the(rows, "uea", "the recipe's arithmetic")
        assert list(labelled(further)) == ["Transformer"]
        assert "Further runs" in further.note
        assert list(labelled(the(rows, "uea", "epochs=8"))) == ["Transformer", "Flowformer ¹"]

    def test_every_run_of_a_table_is_shown_once(self):
        """On the committed results: no run is lost, and no heading holds overrides.

        Ablations repeat runs of other tables, to compare with them.
        """
        rows = collect([ROOT / "results/reproduce.csv"])
        filled = summary.fill(rows)
        shown = [run["folder"] for table in filled if not is_ablation(table) for run in table.runs]
        ablations = [run["folder"] for table in filled if is_ablation(table) for run in table.runs]
        added = [folder for folder in ablations if folder not in shown]
        assert sorted([*shown, *added]) == sorted(row["folder"] for row in rows)
        names = [name for table in filled for name in (*table.grid()[0], *(line for line, _ in table.grid()[1]))]
        assert not [name for name in names if "=" in name]

    def test_the_committed_tables_and_page_have_the_committed_runs(self):
        rows = collect([ROOT / "results/reproduce.csv"])
        assert (ROOT / "docs/results.md").read_text() == summary.markdown(rows) + "\n", "run make results"
        assert collect([ROOT / "results/reproduce.html"]) == rows, "run make results"

    def test_a_table_that_only_repeats_runs_is_left_out(self, tmp_path):
        write_run(tmp_path, "lra/text", "flow", 0, 0.64)
        assert [table.table.name for table in summary.fill(collect([tmp_path]))] == ["lra"]
        write_run(tmp_path, "lra/text", "flow-relu", 0, 0.63)
        assert [table.table.name for table in summary.fill(collect([tmp_path]))] == ["lra", "features"]

    def test_averages_are_over_the_columns_that_are_there(self, tmp_path):
        for name, score in (("JapaneseVowels", 0.99), ("Handwriting", 0.33)):
            for seed in (0, 1):
                write_run(tmp_path, f"uea/{name}", "flow", seed, score + 0.01 * seed)
        write_run(tmp_path, "uea/Handwriting", "softmax", 0, 0.3)
        table = the(collect([tmp_path]), "uea")
        flow, softmax = (next(line for line in table.lines if line.method.name == name) for name in ("flow", "softmax"))
        assert table.average_label == "Avg of 2"
        assert flow.average.final.mean == pytest.approx(66.5)
        assert flow.average.final.deviation == pytest.approx(2**0.5 / 2)
        assert flow.average.paper == pytest.approx((98.9 + 33.8) / 2)
        assert softmax.average is None, "it lacks a column"
        headings, lines = table.grid()
        assert headings == ["Transformer", "Flowformer"]
        assert [name for name, _ in lines] == ["Handwriting", "JapaneseVowels", "Avg of 2"]

    def test_stand_ins_are_not_averaged(self, tmp_path):
        for recipe in ("lra/text", "lra/listops", "acl"):
            write_run(tmp_path, recipe, "flow", 0, 0.6)
        table = the(collect([tmp_path]), "lra")
        (line,) = table.lines
        assert table.average_label == "Avg of 2"
        assert line.average.paper == pytest.approx((38.70 + 64.29) / 2, abs=0.01)
        assert line.cells["Retrieval on ACL papers"].paper is None

    def test_an_average_that_only_the_whole_paper_has(self, tmp_path):
        for column in tables.ACTIVATIONS.columns:
            write_run(tmp_path, column.recipe, "flow-sigmoid-softmax", 0, 0.5)
        (line,) = the(collect([tmp_path]), "activations").lines
        assert (line.average.paper, line.average.difference) == (53.11, pytest.approx(-3.11))

    def test_sizes_and_top5(self, tmp_path):
        sizes = {"top5": {"final": 0.94, "best": 0.95}, "parameters": 43_311_304}
        write_run(tmp_path, "imagenet/hierarchical", "flow", 0, 0.8, **sizes)
        headings, [(_, [score, *sizes])] = the(collect([tmp_path]), "imagenet").grid()
        assert headings == ["top-1", "top-5", "parameters, M", "FLOPs, G"]
        assert score.texts == ["80.00", "paper 80.6, -0.60"]
        assert sizes == [["95.0", "paper 94.9"], ["43.3", "paper 41"], ["6.8", "paper 6.3"]]

    def test_sizes_of_several_models(self, tmp_path):
        for model, parameters in (("b", 86_567_656), ("l", 304_326_632)):
            write_run(tmp_path, f"imagenet/vit-{model}", "softmax", parameters=parameters)
        headings, [(_, cells)] = the(collect([tmp_path]), "imagenet-vit").grid()
        sizes = dict(zip(headings, cells, strict=True))
        assert sizes["ViT-B, parameters, M"] == ["86.6", "paper 86"]
        assert sizes["ViT-L, parameters, M"] == ["304.3", "paper 307"]

    def test_deviations_of_the_paper(self, tmp_path):
        write_run(tmp_path, "d4rl/hopper-medium", "flow", 0, 60.0, metric="score")
        write_run(tmp_path, "d4rl/hopper-medium", "flow", 0, 50.0, overrides=["version=v5sac"], metric="score")
        rows = collect([tmp_path])
        (line,) = the(rows, "d4rl").lines
        assert line.cells["hopper medium"].texts == ["60.00", "paper 66.9 ± 2.5, -6.90"]
        (line,) = the(rows, "rl-stand-ins").lines
        assert line.cells["hopper medium"].texts == ["50.00"]

    def test_a_run_of_a_cell_is_in_that_cell(self):
        best = replace(tables.D4RL, methods=(tables.Method("best tenth", "bc", ("best=0.1",)),))
        for table in (*tables.select("all"), best):
            for cell in table.cells():
                config = cell.config(0)
                fields = to_dict(config) if isinstance(config, TrainConfig) else config.to_dict()
                row = {"recipe": config.recipe, "attention": cell.method.name}
                row["overrides"] = " ".join(differences(fields))
                assert summary._belongs_to(cell, row), cell.name
                assert summary._extra_overrides(cell, row) == ([], []), cell.name

    @pytest.mark.parametrize("more", [[], ["precision=tf32"], ["steps=5"]])
    def test_a_run_is_in_the_table_that_it_differs_from_least(self, tmp_path, more):
        write_run(tmp_path, "d4rl/hopper-medium", "flow", 0, 50.0, overrides=["version=v5sac", *more], metric="score")
        (table,) = summary.fill(collect([tmp_path]))
        assert (table.table.name, table.protocol) == ("rl-stand-ins", "steps=5" if "steps=5" in more else "")

    def test_the_released_code_is_a_row_beside_ours(self, tmp_path):
        write_run(tmp_path, "lra/text", "flow", 0, 0.64)
        write_run(tmp_path, "lra/text@published", "flow", 0, 0.65)
        (table,) = summary.fill(collect([tmp_path]))
        cells = {line.method.label: line.cells["Text"] for line in table.lines}
        assert {label: (cell.final.mean, cell.paper) for label, cell in cells.items()} == {
            "Flowformer": (64, 64.29),
            "Flowformer, as released": (65, 64.29),
        }

    def test_candidate_defaults_have_no_number_of_the_paper(self, tmp_path):
        for overrides in ([], ["scale=0.125"], ["clamp=1"]):
            write_run(tmp_path, "uea/JapaneseVowels", "flow", 0, 0.98, overrides=overrides)
        uea, defaults = summary.fill(collect([tmp_path]))
        assert [line.method.label for line in uea.lines] == ["Flowformer"]
        paper = {line.method.label: line.cells["JapaneseVowels"].paper for line in defaults.lines}
        assert paper == {"default": 98.9, "clamp 1": None, "scale 1/√D": None}

    def test_as_published_is_a_table_of_its_own_beside_the_paper(self, tmp_path):
        write_run(tmp_path, "lra/text", "softmax", 0, 0.64)
        write_run(tmp_path, "lra/text@published", "softmax", 0, 0.65)
        for title, score in (("", 64), ("@published", 65)):
            table = the(collect([tmp_path]), "lra", title)
            (line,) = table.lines
            assert (line.cells["Text"].final.mean, line.cells["Text"].paper) == (score, 64.27)
            assert ("what the released code does" in table.note) == bool(title)

    def test_the_note_says_which_evaluation_is_compared(self, tmp_path):
        write_run(tmp_path, "lra/listops", "flow", 0, 0.36, 0.37)
        note = the(collect([tmp_path]), "lra").note
        assert note.startswith("Final evaluation; below it the paper's number and ours minus it, then the best")
        assert "selected on the validation set" in note
        write_run(tmp_path, "uea/JapaneseVowels", "flow", 0, 0.36)
        note = the(collect([tmp_path]), "uea").note
        assert note == "Best evaluation, selected on the test set; below it the paper's number and ours minus it."

    def test_data_that_differ_are_named(self, tmp_path):
        write_run(tmp_path, "uea/JapaneseVowels", facts={"differs": "one case more"})
        assert "The data of uea/JapaneseVowels differ: one case more." in the(collect([tmp_path]), "uea").note


class TestCollect:
    def test_folders_of_several_machines_are_merged(self, vowels, tmp_path_factory):
        other = tmp_path_factory.mktemp("other")
        shutil.copytree(vowels / "uea", other / "uea")  # came back twice
        write_run(other, "uea/JapaneseVowels", "flow", 3, 0.98)
        rows = collect([vowels, other])
        assert len(rows) == 7
        assert len({row["folder"] for row in rows}) == 7

    def test_a_table_of_rows_is_as_good_as_its_folders(self, vowels, tmp_path):
        rows = collect([vowels])
        write_csv(rows, tmp_path / "kept.csv")
        shutil.rmtree(vowels / "uea")
        assert collect([tmp_path / "kept.csv"]) == rows
        assert len(list(csv.DictReader((tmp_path / "kept.csv").open()))) == 6
        (tmp_path / "other.csv").write_text("a,b\n1,2\n")
        with pytest.raises(ValueError, match="is no table of results: it lacks attention"):
            collect([tmp_path / "other.csv"])
        with pytest.raises(FileNotFoundError, match="accepted: a folder with runs below it"):
            collect([tmp_path / "nowhere"])

    def test_a_page_is_as_good_as_its_folders(self, vowels, tmp_path):
        """With the curves, which a CSV does not have."""
        rows = collect([vowels])
        *_, page = summary.write(rows, tmp_path / "first")
        shutil.rmtree(vowels / "uea")
        assert collect([page]) == rows
        *_, again = summary.write(rows, tmp_path / "again", sources=[page])
        assert again.read_text() == page.read_text()
        assert '"training loss": [[' in again.read_text()

    @pytest.mark.parametrize("order", [1, -1])
    def test_a_page_without_curves_takes_none_from_another(self, vowels, tmp_path, order):
        """As of a machine that knew the runs of the other from a CSV."""
        rows = collect([vowels])
        *_, full = summary.write(rows, tmp_path / "full")
        write_csv(rows, tmp_path / "rows.csv")
        shutil.rmtree(vowels / "uea")
        *_, bare = summary.write(collect([tmp_path / "rows.csv"]), tmp_path / "bare")
        sources = [full, bare][::order]
        assert '"training loss": [[' not in bare.read_text()
        assert summary.page(collect(sources), {}, sources) == full.read_text()

    def test_runs_behind_a_link_are_found_once(self, vowels, tmp_path_factory):
        """As of a folder that was moved to another disk; one link is to a folder above it."""
        queue = tmp_path_factory.mktemp("queue")
        (queue / "uea").symlink_to(vowels / "uea")
        assert len(collect([queue])) == 6
        (vowels / "uea" / "again").symlink_to(vowels)
        (vowels / "a link").symlink_to(vowels / "uea")
        assert [row["folder"] for row in collect([vowels])] == [
            row["folder"].replace(str(queue), str(vowels)) for row in collect([queue])
        ]

    def test_a_row_without_a_folder_replaces_no_run(self, vowels, tmp_path):
        rows = collect([vowels])
        write_csv([{**row, "folder": "", "device": "unknown"} for row in rows], tmp_path / "made.csv")
        assert collect([tmp_path / "made.csv", vowels]) == rows
        write_csv([{**row, "folder": "gone"} for row in rows], tmp_path / "gone.csv")
        merged = collect([tmp_path / "gone.csv", tmp_path / "made.csv"])
        assert {(row["folder"], row["device"]) for row in merged} == {("gone", "a GPU")}

    def test_a_quotation_mark_that_is_not_closed(self, vowels, tmp_path):
        path = tmp_path / "kept.csv"
        row = collect([vowels])[0]
        write_csv([{**row, "command": "", "seed": seed} for seed in range(2000)], path)
        header, first, *others = path.read_text().splitlines()
        path.write_text("\n".join([header, f'"{first}', *others]))
        with pytest.raises(ValueError, match=r"kept\.csv is damaged at or before line \d+: .* may not be closed"):
            collect([path])

    def test_other_pages_are_refused(self, vowels, tmp_path):
        *_, page = summary.write(collect([vowels]), tmp_path / "out")
        text = page.read_text()
        for damaged in (
            "",
            text.partition('id="data"')[0],
            text.replace('"runs"', "runs"),
            text.replace('"runs"', '"r"'),
        ):
            page.write_text(damaged)
            with pytest.raises(ValueError, match=r"results\.html is no page of results, or damaged"):
                collect([page])
        page.write_text(text.replace('"best_chosen_on": "test"', '"best_chosen_on": "luck"'))
        with pytest.raises(ValueError, match=r"seed 0.*column best_chosen_on is 'luck'; accepted: valid, test"):
            collect([page])

    @pytest.mark.parametrize("content", ["", "{}", None])
    def test_a_damaged_run_is_named(self, vowels, content):
        path = next(vowels.rglob("provenance.json"))
        path.unlink() if content is None else path.with_name("result.json").write_text(content)
        with pytest.raises(ValueError, match=rf"{path.parent.name} cannot be read: .* Copy it again"):
            collect([vowels])

    @pytest.mark.parametrize(
        "damage", [lambda row: row[:-9], lambda row: f"{row},9", lambda row: row.replace("0,", "zero,")]
    )
    def test_a_damaged_line_of_a_table_is_named(self, vowels, tmp_path, damage):
        path = tmp_path / "kept.csv"
        write_csv([{**row, "folder": "x"} for row in collect([vowels])], path)
        header, first, *others = path.read_text().splitlines()
        path.write_text("\n".join([header, first, damage(others[0])]))
        with pytest.raises(ValueError, match=r"kept\.csv, line 3 is damaged: .* or copy it again"):
            collect([path])

    @pytest.mark.parametrize(
        ("column", "value", "message"),
        [
            ("seed", "", "column seed is empty; accepted: a whole number"),
            ("seed", "1.5", "column seed is '1.5'; accepted: a whole number"),
            ("metric", "", "column metric is empty; accepted: a text"),
            ("recipe", "", "column recipe is empty; accepted: a text"),
            ("attention", "", "column attention is empty; accepted: a text"),
            ("final", "", "column final is empty; accepted: a number"),
            ("best", "good", "column best is 'good'; accepted: a number"),
            ("steps", "many", "column steps is 'many'; accepted: a whole number"),
            ("best_chosen_on", "", "column best_chosen_on is empty; accepted: valid, test, nothing"),
            ("best_chosen_on", "train", "column best_chosen_on is 'train'; accepted: valid, test, nothing"),
        ],
    )
    def test_a_wrong_value_of_a_table_is_named(self, vowels, tmp_path, column, value, message):
        path = tmp_path / "made.csv"
        first, second, *_ = collect([vowels])
        write_csv([first, {**second, column: value}], path)
        with pytest.raises(ValueError, match=rf"made\.csv, line 3 is damaged: {re.escape(message)}\. Correct it"):
            collect([path])

    def test_a_table_by_hand_needs_few_values(self, vowels, tmp_path):
        path = tmp_path / "made.csv"
        needed = ("recipe", "attention", "seed", "metric", "final", "best", "best_chosen_on")
        write_csv([{name: row[name] for name in needed} for row in collect([vowels])[:2]], path)
        path.write_text("\ufeff" + path.read_text())  # the byte order mark that a spreadsheet writes
        rows = collect([path])
        assert "uea/JapaneseVowels" in summary.markdown(rows)
        assert [path.name for path in summary.write(rows, tmp_path / "out")][:2] == ["results.csv", "results.md"]

    def test_a_run_without_a_seed_is_named(self, vowels):
        path = next(vowels.rglob("result.json"))
        result = json.loads(path.read_text())
        del result["seed"]
        path.write_text(json.dumps(result))
        with pytest.raises(ValueError, match=rf"{path.parent.name} cannot be read: column seed is empty"):
            collect([vowels])

    def test_a_table_is_read_without_the_packages_of_training(self):
        path = ROOT / "results/reproduce.csv"
        code = f"""if True:
            import sys
            from pathlib import Path
            from flowformer.train import summary
            from flowformer.train.results import collect
            assert summary.markdown(collect([Path({str(path)!r})]))
            print(sorted({{"accelerate", "matplotlib", "torchmetrics"}} & set(sys.modules)))
        """
        printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        assert printed == "[]\n"

    def test_half_a_run_is_no_result(self, vowels):
        rows = collect([vowels])
        for path in vowels.rglob("result.json"):
            path.rename(path.with_name(".result.json.part"))
            break
        assert len(collect([vowels])) == len(rows) - 1


def test_markdown_names_every_run_with_its_folder(vowels):
    text = summary.markdown(collect([vowels]))
    assert "## UEA time series, accuracy in %" in text
    assert "| 99.00 ± 1.00 (3)<br>paper 98.9, +0.10<br>final 98.00 ± 1.00 |" in text
    for row in collect([vowels]):
        assert row["folder"] in text
    widths = [line.count("|") for line in text.split("## Runs")[1].splitlines() if line.startswith("|")]
    assert len(set(widths)) == 1


@pytest.mark.parametrize("score", [float("nan"), float("inf")])
def test_a_run_that_diverged_is_shown(tmp_path, score):
    """It spoils neither the table nor the page, whose JSON has no such number."""
    for seed, final in enumerate((0.9, score)):
        run = write_run(tmp_path, "uea/JapaneseVowels", "flow", seed, final)
        with (run / "log.jsonl").open("a") as log:
            log.write('{"kind": "train", "step": 11, "loss": NaN}\n')
    rows = collect([tmp_path])
    assert f"{score} ± nan (2)" in summary.markdown(rows)

    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    text = re.search(r'id="data">(.*?)</script>', summary.page(rows, {}))[1]
    page = json.loads(text, parse_constant=refuse)
    assert [len(run["curves"]["training loss"]) for run in page["runs"]] == [10, 10]


def test_names_break_neither_table_nor_page(tmp_path):
    write_run(tmp_path / "a|b", "uea/JapaneseVowels", facts={"device": "<!--<script>"})
    rows = collect([tmp_path])
    line = summary.markdown(rows).splitlines()[-1]
    assert len(re.findall(r"(?<!\\)\|", line)) == 12, "eleven columns"
    assert "<!--" not in summary.page(rows, {})


class TestFigures:
    @pytest.fixture(autouse=True)
    def _draw_quickly(self, monkeypatch):
        """Maps that show the weights of the run."""

        def draw(run, data_dir):
            weights = (run / "final/model.safetensors").read_text()
            if weights == "damaged":
                raise ValueError("the weights are damaged")
            return Figure((len(weights) / 10, 1))

        monkeypatch.setattr(figures, "draw_maps", draw)

    @staticmethod
    def write_model(folder, weights, **options):
        run = write_run(folder, "uea/JapaneseVowels", **options)
        (run / "final").mkdir()
        (run / "final/config.json").write_text("{}")
        (run / "final/model.safetensors").write_text(weights)
        return run

    def test_a_run_has_its_own(self, tmp_path):
        """Not that of a run with the same name in another place, or of a run that was there before."""
        for place, epochs in (("a", 1), ("b", 2)):
            self.write_model(tmp_path / place, place * epochs, overrides=[f"epochs={epochs}"])
            (tmp_path / place / "uea/JapaneseVowels").rename(tmp_path / place / "runs")
            next((tmp_path / place / "runs").iterdir()).rename(tmp_path / place / "runs/run")
        drawn, _ = figures.draw_figures(collect([tmp_path]), tmp_path / "out")
        first, second = (path.read_bytes() for path in drawn.values())
        assert first != second
        (tmp_path / "a/runs/run/final/model.safetensors").write_text("later")
        again, _ = figures.draw_figures(collect([tmp_path]), tmp_path / "out")
        assert [path.read_bytes() == old for path, old in zip(again.values(), (first, second), strict=True)] == [
            False,
            True,
        ]

    def test_half_an_image_is_none(self, tmp_path, monkeypatch):
        """As on a full disk: it would never be drawn again."""
        self.write_model(tmp_path, "w")

        def fill(figure, file, **options):
            file.write(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with monkeypatch.context() as patched:
            patched.setattr(Figure, "savefig", fill)
            drawn, failed = figures.draw_figures(collect([tmp_path]), tmp_path / "out")
        assert (drawn, [error.errno for error in failed.values()]) == ({}, [errno.ENOSPC])
        assert not list((tmp_path / "out").iterdir())
        drawn, failed = figures.draw_figures(collect([tmp_path]), tmp_path / "out")
        assert (len(drawn), failed) == (1, {})

    def test_a_copy_without_weights_has_none(self, tmp_path):
        run = self.write_model(tmp_path, "w")
        (run / "final/model.safetensors").unlink()
        assert figures.draw_figures(collect([tmp_path]), tmp_path / "out") == ({}, {})

    def test_damaged_weights_cost_no_table(self, tmp_path):
        self.write_model(tmp_path, "damaged")
        drawn, failed = figures.draw_figures(collect([tmp_path]), tmp_path / "out")
        assert (drawn, [str(error) for error in failed.values()]) == ({}, ["the weights are damaged"])


def test_speeds_are_drawn(tmp_path):
    committed = ROOT / "results/lra-speed-cpu.csv"
    ((_, image),) = draw_speeds(committed, tmp_path / "figures").items()
    assert image.read_bytes().startswith(b"\x89PNG")


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
# what a user would do, and what can be seen then
USE = """
<script>
const section = [...document.querySelectorAll("section")].find(s => s.querySelector("h2")?.textContent === "Runs");
const heading = [...section.querySelectorAll("th")].find(h => h.textContent === "final");
const column = [...heading.parentNode.children].indexOf(heading);
const shown = () => [...section.querySelectorAll("tbody tr")].map(line => line.children[column].textContent).join(",");
heading.click();
const up = shown();
heading.click();
const down = shown();
document.querySelector("#tables td.runs").click();
document.body.dataset.seen = JSON.stringify({
  up, down, headings: [...heading.parentNode.children].map(h => h.textContent),
  aligned: [...section.querySelector("tbody tr").children].map(td => getComputedStyle(td).textAlign[0]).join(""),
  cut: [...document.querySelectorAll("#detail text")].filter(t => t.getBBox().x < 0).map(t => t.textContent),
  curves: document.querySelectorAll("#detail .curve").length,
  facts: [...document.querySelectorAll("#detail dt")].map(e => e.textContent).includes("commit"),
  command: document.querySelector("#detail").textContent.includes("</script> 'x y'".replace("\\\\", "")),
  figures: [...document.images].every(image => image.complete && image.naturalWidth > 0) && document.images.length,
  loaded: performance.getEntriesByType("resource").filter(entry => !entry.name.startsWith("data:")).length,
});
</script>
"""


@pytest.fixture
def page(vowels, tmp_path):
    Figure((1, 1)).savefig(tmp_path / "map.png")
    written = summary.write(collect([vowels]), tmp_path / "out", {"a map": tmp_path / "map.png"})
    assert [path.name for path in written] == ["results.csv", "results.md", "results.html"]
    return written[-1]


def test_page_needs_nothing_else(page):
    text = page.read_text()
    assert not re.search(r"""(?:src|href)\s*=\s*["'](?!data:)""", text)
    assert "@import" not in text
    assert "url(" not in text
    assert text.count("</script>") == 2, "what a command says ends no element"
    assert text.count("http") == text.count("http://www.w3.org/2000/svg")


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_page_in_a_browser(page, tmp_path):
    used = tmp_path / "used.html"
    used.write_text(page.read_text().replace("</body>", USE.replace("</script> 'x", "<\\/script> 'x") + "</body>"))
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    done = subprocess.run(
        [*command, "--virtual-time-budget=5000", "--dump-dom", used.as_uri()],
        capture_output=True,
        text=True,
        timeout=240,
    )
    seen = re.search(r'data-seen="([^"]*)"', done.stdout)
    assert seen, done.stderr[-2000:]
    found = json.loads(seen[1].replace("&quot;", '"').replace("&lt;", "<").replace("&gt;", ">"))
    assert found["up"] == "50.00,95.00,96.00,97.00,98.00,99.00"
    assert found["down"] == "99.00,98.00,97.00,96.00,95.00,50.00"
    assert found["headings"] == list(summary._RUN_COLUMNS.values())
    assert found["aligned"] == "llrlrrrrrll", "text to the left, numbers and empty cells to the right"
    assert found["cut"] == [], "labels of the axes are shown whole"
    assert found["curves"] > 0
    assert found["facts"]
    assert found["command"]
    assert found["figures"]
    assert found["loaded"] == 0
