"""The tables of the paper filled in: means over seeds, the number of the paper, runs of other protocols apart."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
from finished_runs import labelled, the, write_run
from helpers import ROOT

from flowformer.train import report, speeds, summary, tables
from flowformer.train.config import TrainConfig, to_dict
from flowformer.train.results import collect, differences, write_csv


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
        rows, page = collect([ROOT / "results/reproduce.csv"]), ROOT / "results/reproduce.html"
        measured = [speeds.read(ROOT / f"results/lra-speed-{device}.csv") for device in ("h200", "cpu")]
        assert (ROOT / "docs/results.md").read_text() == report.markdown(rows, measured) + "\n", "run make results"
        assert page.read_text() == report.page(rows, {}, [page], measured), "run make results"

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

    def test_returns_name_the_environment_and_the_other_target(self, tmp_path):
        (column,) = (each for each in tables.RL_STAND_INS.columns if each.label == "walker2d medium")
        note = "target return 5000 above every episode of the data, the best 4098"
        scores = {which: {"score_half_target": half, "note": note} for which, half in (("final", 30), ("best", 99))}
        facts = {"facts": {"environment": "Walker2d-v4"}, "scores": scores}
        for seed in (0, 1):
            write_run(tmp_path, column.recipe, "flow", seed, 60, overrides=column.overrides, metric="score", **facts)
        write_csv(collect([tmp_path]), tmp_path / "results.csv")
        table = the(collect([tmp_path / "results.csv"]), "rl-stand-ins")
        assert table.lines[0].cells[column.label].texts == ["60.00 ± 0.00 (2)", "half target 30.00 ± 0.00"]
        assert "below it the score with half of the target return." in table.note
        assert f"Episodes are played in Walker2d-v4. {column.recipe}: {note}." in table.note

    def test_the_papers_average_has_its_deviation(self, tmp_path):
        for column in tables.D4RL.columns:
            write_run(tmp_path, column.recipe, "flow", 0, 70, metric="score")
        (line,) = the(collect([tmp_path]), "d4rl").lines
        assert line.average.texts == ["70.00", "paper 73.5 ± 2.9, -3.50"]

    def test_stand_ins_are_averaged_among_themselves(self, tmp_path):
        for column, score in zip(tables.RL_STAND_INS.columns[:2], (20, 40), strict=True):
            write_run(tmp_path, column.recipe, "flow", 0, score, overrides=column.overrides, metric="score")
        table = the(collect([tmp_path]), "rl-stand-ins")
        (line,) = table.lines
        assert table.average_label == "Avg of 2"
        assert (line.average.final.mean, line.average.paper) == (30, None), "the paper's average is of other data"

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
        assert sizes == [["95.0", "paper 94.9"], ["43.3", "paper 41"], ["6.9", "paper 6.3"]]

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
        write_run(tmp_path, "uea/Handwriting", facts={"differs": "one case more"})
        assert "The data of uea/Handwriting, uea/JapaneseVowels differ: one" in the(collect([tmp_path]), "uea").note


def test_markdown_names_every_run_with_its_folder(vowels):
    text = report.markdown(collect([vowels]))
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
    assert f"{score} ± nan (2)" in report.markdown(rows)

    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    text = re.search(r'id="data">(.*?)</script>', report.page(rows, {}))[1]
    page = json.loads(text, parse_constant=refuse)
    assert [len(run["curves"]["training loss"]) for run in page["runs"]] == [10, 10]


def test_names_break_neither_table_nor_page(tmp_path):
    write_run(tmp_path / "a|b", "uea/JapaneseVowels", facts={"device": "<!--<script>"})
    rows = collect([tmp_path])
    line = report.markdown(rows).splitlines()[-1]
    assert len(re.findall(r"(?<!\\)\|", line)) == 12, "eleven columns"
    assert "<!--" not in report.page(rows, {})
