"""The figures of runs, and the page of results, which works in a browser on its own."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess

import pytest
from finished_runs import write_run
from helpers import ROOT
from matplotlib.figure import Figure
from tiny_training import SERIES

from flowformer import data
from flowformer.models import FlowformerTimeSeries
from flowformer.train import figures, report, speeds
from flowformer.train.figures import draw_speeds
from flowformer.train.results import collect
from flowformer.viz import degeneracies
from flowformer.viz.page import read_page


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

    def test_attentions_are_compared(self, tmp_path, monkeypatch):
        """Those of the paper's figure, in its order, as far as they have run on the same terms."""
        compared = []
        monkeypatch.setattr(figures, "draw_comparison", lambda runs, data_dir: compared.append(runs) or Figure((1, 1)))
        options = [{"attention": name} for name in ("cosformer", "flow", "linear", "performer")]
        options.append({"attention": "softmax", "overrides": ["epochs=3"]})
        runs = [self.write_model(tmp_path, f"w{i}", **each) for i, each in enumerate(options)]
        drawn, failed = figures.draw_figures(collect([tmp_path]), tmp_path / "out")
        assert not failed
        assert [caption.partition(": ")[2] for caption in drawn] == [
            "competition and allocation of the last layer",
            "weights of the sources in the last layer",
        ]
        assert compared == [[runs[1], runs[2], runs[0]]]
        assert len(set(drawn.values())) == 2

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

    def test_a_row_without_a_folder_has_none(self, tmp_path, monkeypatch):
        """Not that of the run in the current folder, nor its curves."""
        run = self.write_model(tmp_path / "runs", "w")
        rows = [{**row, "folder": ""} for row in collect([tmp_path / "runs"])]
        monkeypatch.chdir(run)
        assert figures.draw_figures(rows, tmp_path / "out") == ({}, {})
        assert '"curves": {}' in report.page(rows, {})

    def test_damaged_weights_cost_no_table(self, tmp_path):
        self.write_model(tmp_path, "damaged")
        drawn, failed = figures.draw_figures(collect([tmp_path]), tmp_path / "out")
        assert (drawn, [str(error) for error in failed.values()]) == ({}, ["the weights are damaged"])

    @pytest.mark.parametrize("content", [None, "", "{}"])
    def test_a_damaged_config_costs_no_table(self, tmp_path, content):
        """The rows are from a CSV; the folder of the run is of another version, or was copied in part."""
        run = self.write_model(tmp_path / "runs", "w")
        rows = collect([tmp_path / "runs"])
        (run / "config.json").unlink() if content is None else (run / "config.json").write_text(content)
        drawn, failed = figures.draw_figures(rows, tmp_path / "out")
        assert not drawn
        assert all("config.json" in str(error) for error in failed.values())
        assert len(failed) == 1


class TestSpeeds:
    def test_are_drawn(self, tmp_path):
        committed = ROOT / "results/lra-speed-cpu.csv"
        ((_, image),) = draw_speeds(committed, tmp_path / "figures").items()
        assert image.read_bytes().startswith(b"\x89PNG")

    def test_of_what_did_not_fit(self, tmp_path):
        path = tmp_path / speeds.SPEED
        first, softmax, *_ = (ROOT / "results/lra-speed-h200.csv").read_text().splitlines()
        cells = dict(zip(first.split(","), softmax.split(","), strict=True))
        cells |= {
            "attention": "yoso",
            "status": "OOM",
            "largest_batch": "8",
            "ratio": "",
            "paper_steps_per_second": "OOM",
        }
        path.write_text(f"{first}\n{','.join(cells.values())}\n")
        assert speeds.read(path).lines == [("yoso", [["OOM", "fits with batch 8", "paper OOM"]])]
        assert '"text": "OOM"' in report.page([], {}, speeds=[speeds.read(path)])

    def test_beside_checkpoints_that_a_queue_deletes(self, tmp_path, monkeypatch):
        for name in ("checkpoints", "speed"):
            (tmp_path / name).mkdir()
        (tmp_path / "speed" / speeds.SPEED).touch()
        scandir = os.scandir

        def gone(path):
            if os.fspath(path).endswith("checkpoints"):
                raise FileNotFoundError
            return scandir(path)

        monkeypatch.setattr(os, "scandir", gone)
        assert list(speeds.find(tmp_path)) == [tmp_path / "speed" / speeds.SPEED]

    @pytest.mark.parametrize("content", ["", "attention\nflow\n"])
    def test_of_a_damaged_file(self, tmp_path, content):
        (tmp_path / speeds.SPEED).write_text(content)
        with pytest.raises(ValueError, match=r"lra-speed\.csv is no table of speeds, or damaged"):
            speeds.read(tmp_path / speeds.SPEED)


class TestDegeneracy:
    @pytest.fixture(autouse=True)
    def _waves(self, monkeypatch):
        monkeypatch.setattr(data, "load", lambda *args, **options: SERIES)

    def test_is_that_of_examples_from_the_whole_test_set(self, finished):
        folder, _ = finished
        model = FlowformerTimeSeries.from_pretrained(folder / "final")
        for examples, measured in ((8, range(0, 24, 3)), (figures.MEASURED_EXAMPLES, range(24))):
            batch = data.collate([SERIES.test[i] for i in measured])
            expected = degeneracies({"flow": model}, batch["series"], batch["mask"], batch_size=24)
            (layer,) = figures.measure_degeneracy([folder], examples=examples)["flow"]
            assert layer == pytest.approx(expected["flow"][0], rel=1e-5)

    def test_a_run_keeps_its_padding(self, finished, tmp_path):
        """The released code attends to padding, so its weights depend on the length of the batch."""
        assert len(SERIES.test[0]["series"]) < 12
        run = shutil.copytree(finished[0], tmp_path / "published")
        for path, key, value in (("config.json", "pad_full", True), ("final/config.json", "mask_padding", False)):
            fields = json.loads((run / path).read_text())
            assert key in fields
            (run / path).write_text(json.dumps({**fields, key: value}))
        model = FlowformerTimeSeries.from_pretrained(run / "final")
        batch = data.collate([SERIES.test[0]], 12)
        expected = degeneracies({"flow": model}, batch["series"], batch["mask"])
        # another run is padded as it was trained, whatever the order
        for runs in ([run, finished[0]], [finished[0], run]):
            measured = figures.measure_degeneracy(runs, examples=1)
            assert measured["flow, published"] == expected["flow"] != measured["flow, whole"]

    def test_runs_of_the_same_name(self, finished, tmp_path):
        folders = [shutil.copytree(finished[0], tmp_path / place / "run") for place in "ab"]
        assert list(figures.measure_degeneracy(folders)) == [f"flow, {folder}" for folder in folders]


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
const archive = document.querySelector("#tables table");
const names = () => [...archive.rows].slice(1).map(line => line.cells[0].textContent);
const sorted = [0, 1].map(() => { archive.querySelector("th").click(); return names(); });
document.querySelector("#tables td.runs").click();
document.body.dataset.seen = JSON.stringify({
  up, down, sorted, headings: [...heading.parentNode.children].map(h => h.textContent),
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
    write_run(tmp_path / "w", "uea/Handwriting", "flow", final=0.3)
    written = report.write(collect([vowels, tmp_path / "w"]), tmp_path / "out", {"a map": tmp_path / "map.png"})
    assert [path.name for path in written] == ["results.csv", "results.md", "results.html"]
    return written[-1]


def test_page_needs_nothing_else(page):
    text = page.read_text()
    assert not re.search(r"""(?:src|href)\s*=\s*["'](?!data:)""", text)
    assert "@import" not in text
    assert "url(" not in text
    assert text.count("</script>") == 2, "what a command says ends no element"
    assert text.count("http") == text.count("http://www.w3.org/2000/svg")


def test_a_page_keeps_the_figures_of_an_earlier_one(page, tmp_path):
    figure, again = tmp_path / "map.png", tmp_path / "again"
    drawn = figure.read_bytes()
    *_, later = report.write(collect([page]), again, {}, [page])
    assert read_page(later).figures == {"a map": drawn}
    Figure((2, 2)).savefig(figure)
    *_, later = report.write(collect([page]), again, {"a map": figure, "another": figure}, [later])
    assert list(read_page(later).figures) == ["a map", "another"]
    assert set(read_page(later).figures.values()) == {figure.read_bytes()} != {drawn}


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
    assert found["up"] == "30.00,50.00,95.00,96.00,97.00,98.00,99.00"
    assert found["down"] == "99.00,98.00,97.00,96.00,95.00,50.00,30.00"
    assert found["sorted"] == [
        ["Handwriting", "JapaneseVowels", "Avg of 2"],
        ["JapaneseVowels", "Handwriting", "Avg of 2"],
    ]
    assert found["headings"] == list(report._RUN_COLUMNS.values())
    assert found["aligned"] == "llrlrrrrrll", "text to the left, numbers and empty cells to the right"
    assert found["cut"] == [], "labels of the axes are shown whole"
    assert found["curves"] > 0
    assert found["facts"]
    assert found["command"]
    assert found["figures"]
    assert found["loaded"] == 0
