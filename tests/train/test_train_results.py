"""Results: what differs from a recipe is said, and runs are collected from folders, tables and pages."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from finished_runs import write_run
from helpers import ROOT

from flowformer.models.counts import count
from flowformer.models.vision import FlowformerVision
from flowformer.train import recipes, report, results
from flowformer.train.config import to_dict
from flowformer.train.methods.config import configure
from flowformer.train.overrides import override
from flowformer.train.record import read_log
from flowformer.train.results import collect, differences, write_csv


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

    def test_the_order_of_options_is_no_difference(self):
        """Their runs have the same folder, and belong into the same table."""
        options = ["hidden_dim=64", "best=0.1"]
        both = [configure("d4rl/hopper-medium", "bc", order).to_dict() for order in (options, options[::-1])]
        assert differences(both[0]) == differences(both[1])


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

    def test_a_table_of_an_earlier_version(self, vowels, tmp_path):
        """Without the columns that were added since."""
        added = {"half_target_final", "half_target_best", "note", "environment"}
        rows = collect([vowels])
        with (tmp_path / "earlier.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, [name for name in rows[0] if name not in added], extrasaction="ignore")
            writer.writeheader()
            writer.writerows(rows)
        shutil.rmtree(vowels / "uea")
        assert collect([tmp_path / "earlier.csv"]) == rows

    def test_a_page_is_as_good_as_its_folders(self, vowels, tmp_path):
        """With the curves, which a CSV does not have."""
        rows = collect([vowels])
        *_, page = report.write(rows, tmp_path / "first")
        shutil.rmtree(vowels / "uea")
        assert collect([page]) == rows
        *_, again = report.write(rows, tmp_path / "again", sources=[page])
        assert again.read_text() == page.read_text()
        assert '"training loss": [[' in again.read_text()

    @pytest.mark.parametrize("order", [1, -1])
    def test_a_page_without_curves_takes_none_from_another(self, vowels, tmp_path, order):
        """As of a machine that knew the runs of the other from a CSV."""
        rows = collect([vowels])
        *_, full = report.write(rows, tmp_path / "full")
        write_csv(rows, tmp_path / "rows.csv")
        shutil.rmtree(vowels / "uea")
        *_, bare = report.write(collect([tmp_path / "rows.csv"]), tmp_path / "bare")
        sources = [full, bare][::order]
        assert '"training loss": [[' not in bare.read_text()
        assert report.page(collect(sources), {}, sources) == full.read_text()

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

    def test_pages_in_capitals(self, vowels, tmp_path):
        *_, page = report.write(collect([vowels]), tmp_path / "out")
        assert collect([page.rename(tmp_path / "RESULTS.HTML")])

    def test_other_pages_are_refused(self, vowels, tmp_path):
        *_, page = report.write(collect([vowels]), tmp_path / "out")
        text = page.read_text()
        for damaged in (
            "",
            text.partition('id="data"')[0],
            text.replace('"runs"', "runs"),
            text.replace('"runs"', '"r"'),
            text.replace('"facts"', '"f"'),
            text.replace('"curves"', '"c"'),
            '<script type="application/json" id="data">[1]</script>',
        ):
            page.write_text(damaged)
            with pytest.raises(ValueError, match=r"results\.html is no page of results, or damaged"):
                collect([page])
        page.write_text(text.replace('"best_chosen_on": "test"', '"best_chosen_on": "luck"'))
        with pytest.raises(ValueError, match=r"seed 0.*column best_chosen_on is 'luck'; accepted: valid, test"):
            collect([page])

    @pytest.mark.parametrize(
        ("name", "content"),
        [("provenance.json", None), ("result.json", ""), ("result.json", "{}")]
        + [
            ("config.json", config)
            for config in ('{"recipe": null}', '{"recipe": "uea/JapaneseVowels", "optimiser": ""}')
        ],
    )
    def test_a_damaged_run_is_named(self, vowels, name, content):
        path = next(vowels.rglob(name))
        path.unlink() if content is None else path.write_text(content)
        with pytest.raises(ValueError, match=rf"{path.parent.name} cannot be read: .* Copy it again"):
            collect([vowels])

    @pytest.mark.parametrize("line", ["null", "[]", "{}", '"x"', '{"kind": "train", "step": 1, "loss": null}'])
    def test_damaged_lines_of_a_log_are_dropped(self, vowels, tmp_path, line):
        log = next(vowels.rglob("log.jsonl"))
        records = read_log(log.parent)
        with log.open("a") as file:
            file.write(line)
        assert read_log(log.parent) == records
        report.write(collect([vowels]), tmp_path / "out")

    def test_a_folder_that_cannot_be_read_is_named(self, vowels, monkeypatch):
        """Its runs would be missing from the tables. Checkpoints that a running queue deletes meanwhile would not."""
        scandir, error = os.scandir, PermissionError(13, "Permission denied")

        def closed(path):
            if os.fspath(path).endswith("uea"):
                raise error
            return scandir(path)

        monkeypatch.setattr(os, "scandir", closed)
        with pytest.raises(PermissionError):
            collect([vowels])
        error = FileNotFoundError()
        assert collect([vowels]) == []

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
        assert "uea/JapaneseVowels" in report.markdown(rows)
        assert [path.name for path in report.write(rows, tmp_path / "out")][:2] == ["results.csv", "results.md"]

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
            from flowformer.train import report
            from flowformer.train.results import collect
            assert report.markdown(collect([Path({str(path)!r})]))
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


def test_multiply_adds_include_the_products_between_tokens():
    rows, counts = {}, {}
    for name in ("flow", "softmax", "linear"):
        config = override(recipes.get("cifar10"), [f"attention={name}"])
        rows[name] = results._multiply_adds(config)
        with torch.device("meta"):
            counts[name] = count(FlowformerVision(config.model), torch.empty(1, 3, 32, 32))
    assert rows == {name: each.total for name, each in counts.items()}
    assert len(set(rows.values())) == 3
