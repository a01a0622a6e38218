"""The benchmarks measure what they say: contestants are right, memory is counted and ends, tables can be written."""

from __future__ import annotations

import csv
import json
import os
import re

import pytest
import torch
from typer.testing import CliRunner

from flowformer import baselines, viz
from flowformer.baselines import SoftmaxAttention
from flowformer.bench import attention as bench
from flowformer.bench import lra, measure
from flowformer.cli import app
from flowformer.train import claims
from flowformer.train.paper import paper_speed


@pytest.fixture
def field(request):
    # compiling takes longer than all the rest
    return [each for each in bench.contestants(request.param, ["torch", "reference"]) if "compiled" not in each.name]


@pytest.mark.parametrize("field", ["bidirectional", "causal"], indirect=True, ids=str)
def test_contestants_are_measured_and_written(field, request, tmp_path):
    kind = request.node.callspec.params["field"]
    options = bench.parse(["--shapes", "B1H2N32d8", "--repeats", "5", "--device", "cpu", "--dtype", "float32"])
    bench.check(kind, field, 2, 8, "cpu", torch.float32)
    rows = bench.measure(kind, field, options.shapes[0], options)
    assert [row.contestant for row in rows] == [each.name for each in field]
    assert all(row.forward_p20 <= row.forward_ms <= row.forward_p80 for row in rows)
    assert "authors eager" in bench.table(rows)
    assert re.search(
        r"flow torch is \d+\.\d\d× as fast as .*, \d+\.\d\d× as fast as sdpa", bench.speedups(rows, "torch")
    )
    with measure.csv_file(tmp_path / "times.csv", bench.AttentionTiming, measure.machine("cpu", "float32")) as write:
        for row in rows:
            write(row)
    with (tmp_path / "times.csv").open() as file:
        assert [line["contestant"] for line in csv.DictReader(file)] == [row.contestant for row in rows]


@pytest.mark.parametrize("limit", [["--memory", "0"], ["--limit", "0"]])
def test_a_shape_that_is_too_large_for_all_has_no_rows(monkeypatch, capsys, tmp_path, limit):
    monkeypatch.setattr(bench, "decode", lambda options: {})
    shape = [
        "--shapes",
        "B1H2N32d8",
        "--device",
        "cpu",
        "--dtype",
        "float32",
        "--contestants",
        "flow",
        "--kinds",
        "causal",
    ]
    assert bench.main([*shape, *limit, "--csv", str(tmp_path / "times.csv")]) == []
    assert "B1 H2 N32 d8: every contestant is left out" in capsys.readouterr().out


@pytest.mark.parametrize("field", ["bidirectional"], indirect=True)
def test_a_single_repeat_is_its_own_percentiles(field):
    options = bench.parse(["--shapes", "B1H2N32d8", "--repeats", "1", "--device", "cpu", "--dtype", "float32"])
    rows = bench.measure("bidirectional", field, options.shapes[0], options)
    assert all(row.forward_p20 == row.forward_ms == row.forward_p80 > 0 for row in rows)


def test_no_repeat_is_refused(capsys):
    with pytest.raises(SystemExit):
        bench.parse(["--repeats", "0"])
    assert "--repeats must be at least 1, got 0" in capsys.readouterr().err


@pytest.mark.parametrize("field", ["bidirectional"], indirect=True)
def test_a_wrong_contestant_of_ours_stops_the_run(field):
    wrong = bench.Contestant("flow wrong", lambda q, k, v: 1.01 * bench.authors_bidirectional(q, k, v))
    with pytest.raises(SystemExit, match="wrong, bidirectional: the result is off by"):
        bench.check("bidirectional", [*field, wrong], 2, 8, "cpu", torch.float32)


@pytest.mark.parametrize("field", ["bidirectional"], indirect=True)
def test_contestants_are_chosen_by_how_they_begin(field):
    assert [each.name for each in bench.chosen(field, ["authors", "sdpa"])] == ["authors eager", "sdpa"]
    with pytest.raises(SystemExit, match="no contestant begins with flsh; there are flow torch"):
        bench.chosen(field, ["flsh"])


@pytest.mark.parametrize("field", ["bidirectional"], indirect=True)
def test_a_wrong_rival_is_named(field, capsys):
    wrong = bench.Contestant("authors wrong", lambda q, k, v: 1.01 * bench.authors_bidirectional(q, k, v))
    bench.check("bidirectional", [*field, wrong], 2, 8, "cpu", torch.float32)
    assert "authors wrong, bidirectional: the result is off by" in capsys.readouterr().out


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_kernels_are_counted_and_timed_without_the_host():
    x = torch.randn(2**26, device="cuda")
    assert measure.launches(lambda: x.mul(2).add(1)) == 2
    # 512 MB take no chip less than 50 µs, and eight times as many take longer, whatever else runs there
    one, eight = (measure.graph_milliseconds(lambda n=n: [x.mul(2) for _ in range(n)], 9) for n in (1, 8))
    assert 0.05 < one < eight
    assert measure.host_microseconds(lambda: x.mul(2), 9) > 0


class TestMemory:
    def test_peak_counts_what_is_held_at_once(self):
        def run():
            for _ in range(3):
                a, b = torch.empty(1000), torch.empty(500)
                del a, b

        assert measure.peak_bytes(run, "cpu") == 6000

    def test_limit_ends_with_its_block(self):
        with measure.limited_memory("cpu", 0.25):
            with pytest.raises(RuntimeError) as caught:
                torch.empty(2**28)
            assert measure.is_out_of_memory(caught.value)
            assert torch.empty(2**20).numel() == 2**20
        assert torch.empty(2**28).numel() == 2**28

    def test_other_errors_are_not_out_of_memory(self):
        assert measure.is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory."))
        assert not measure.is_out_of_memory(RuntimeError("CUDA error: an illegal memory access was encountered"))


def cheap(*arguments, attentions=("flow", "softmax"), lengths=(64,), batch=4):
    shape = ["--lengths", *map(str, lengths), "--batch", str(batch), "--seconds", "0.01"]
    device = ["--device", "cpu", "--dtype", "float32"]
    return [*shape, *device, "--attentions", *attentions, *map(str, arguments)]


def read(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def broken(monkeypatch, function):
    """Softmax attention whose result, of the query and the true result, is another."""
    attend = SoftmaxAttention.attend
    monkeypatch.setattr(
        SoftmaxAttention, "attend", lambda self, query, *rest: function(query, attend(self, query, *rest))
    )


class TestLra:
    def test_from_models_to_a_chart(self, tmp_path, capsys):
        out, plot = tmp_path / "speed.csv", tmp_path / "speed.png"
        rows = lra.main(cheap("--out", out, "--plot", plot, lengths=(32, 64)))
        order = [(length, name, mode) for length in (32, 64) for name in ("softmax", "flow") for mode in lra.MODES]
        assert [(row.length, row.attention, row.mode) for row in rows] == order, "softmax first, to compare with"
        assert all(row.p20 <= row.steps_per_second <= row.p80 and row.peak_mib > 0 for row in rows)
        assert all((row.status, row.largest_batch) == ("ok", 4) for row in rows)
        for softmax, flow in zip([*rows[:2], *rows[4:6]], [*rows[2:4], *rows[6:]], strict=True):
            assert softmax.ratio == 1
            assert flow.ratio == flow.steps_per_second / softmax.steps_per_second
        written = read(out)
        assert [float(line["steps_per_second"]) for line in written] == [row.steps_per_second for row in rows]
        assert all(line[fact] for line in written for fact in ("device", "torch", "commit", "dtype", "threads"))
        assert plot.read_bytes().startswith(b"\x89PNG")
        assert "64 tokens" in capsys.readouterr().out

    def test_softmax_attention_drops_no_weights(self):
        model = lra.build("softmax", 32, lra.parse(cheap())).train()
        found = [module for module in model.modules() if isinstance(module, SoftmaxAttention)]
        assert found
        assert all(module.weight_dropout == 0 for module in found), "torch has no fused CPU kernel with dropout"
        assert any(isinstance(module, torch.nn.Dropout) and module.p > 0 for module in model.modules())

    def test_every_attention_of_the_paper_is_there(self):
        names = lra.attentions()
        assert names[0] == "softmax"
        in_paper = [name for name in ["flow", *baselines.names()] if paper_speed(name, "inference", 1024)]
        assert len(in_paper) == 13
        assert set(in_paper) <= set(names)
        assert "rfa-gate" not in names, "causal only"

    def test_ratios_stand_beside_the_papers(self, monkeypatch):
        speeds = {"softmax": 2.0, "flow": 6.0, "rfa": 1.0, "synthesizer": 1.0}

        def cells(name, length, options):
            return [lra.SpeedCell(name, length, mode, 2, "ok", steps_per_second=speeds[name]) for mode in lra.MODES]

        monkeypatch.setattr(lra, "cells", cells)
        rows = list(lra.run(lra.parse(cheap(attentions=speeds, lengths=(1024, 2000, 3072)))))
        found = {(row.attention, row.mode, row.length): row for row in rows}
        assert found["flow", "training", 1024].ratio == 3
        assert found["flow", "training", 1024].paper_ratio == 49.76 / 22.12
        assert found["flow", "inference", 2000].paper_ratio == 96.21 / 25.26
        assert found["flow", "inference", 3072].paper_steps_per_second == 95.65
        assert found["flow", "inference", 3072].paper_ratio is None, "the paper's Transformer has no speed there"
        assert found["synthesizer", "training", 2000].paper_steps_per_second == "OOM"
        assert found["synthesizer", "training", 2000].paper_ratio is None
        assert found["rfa", "training", 1024].paper_steps_per_second is None
        line = next(line for line in lra.table(rows).splitlines() if line.startswith("synthesizer"))
        assert line.split() == ["synthesizer", "1.00", "0.50", "0.80", "1.00", "0.50", "OOM", "1.00", "0.50", "OOM"]

    def test_out_of_memory_is_marked_and_the_run_goes_on(self, monkeypatch, tmp_path, capsys):
        def fits_four(query, result):
            if len(query) > 4:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return result

        broken(monkeypatch, fits_four)
        out = tmp_path / "speed.csv"
        softmax, _, flow, _ = lra.main(cheap("--out", out, "--plot", tmp_path / "speed.png", batch=8))
        assert (softmax.status, softmax.batch, softmax.largest_batch, softmax.steps_per_second) == ("OOM", 8, 4, None)
        assert (flow.status, flow.ratio) == ("ok", None), "nothing to compare with"
        assert [line["status"] for line in read(out)] == ["OOM", "OOM", "ok", "ok"]
        assert "OOM   (B4)" in capsys.readouterr().out

    def test_memory_really_ends_at_the_limit(self, monkeypatch):
        def hungry(query, result):
            torch.empty(len(query) * 2**26)  # 256 MiB a sequence, never touched
            return result

        broken(monkeypatch, hungry)
        rows = lra.main(cheap("--memory-limit", "0.4", attentions=["softmax"]))
        assert [(row.status, row.largest_batch) for row in rows] == [("OOM", 1), ("OOM", 1)]

    @pytest.mark.parametrize(
        ("what", "wrong"),
        [
            ("scores", lambda result: 1.1 * result),
            ("gradients", lambda result: result + 0.5 * (result - result.detach())),
        ],
    )
    def test_a_wrong_attention_is_left_out(self, monkeypatch, tmp_path, capsys, what, wrong):
        broken(monkeypatch, lambda query, result: result if query.dtype == torch.float64 else wrong(result))
        with pytest.raises(SystemExit, match=f"softmax: the {what} are off by"):
            lra.main(cheap("--out", tmp_path / "speed.csv"))
        assert f"softmax is left out: the {what}" in capsys.readouterr().err
        assert [line["attention"] for line in read(tmp_path / "speed.csv")] == ["flow", "flow"]

    def test_a_failure_costs_one_cell(self, monkeypatch, tmp_path):
        def fails_at_64(query, result):
            if query.shape[2] == 65:
                raise ValueError("no kernel\nfor this")
            return result

        broken(monkeypatch, fails_at_64)
        with pytest.raises(SystemExit, match="softmax: failed: ValueError: no kernel for this"):
            lra.main(cheap("--out", tmp_path / "speed.csv"))
        failed, _, flow, _ = read(tmp_path / "speed.csv")
        assert (failed["status"], failed["largest_batch"]) == ("failed: ValueError: no kernel for this", "")
        assert flow["status"] == "ok"

    def test_rows_are_there_before_the_next_is_measured(self, monkeypatch, tmp_path):
        out, cells, seen = tmp_path / "speed.csv", lra.cells, []

        def watched(name, length, options):
            seen.append([line["attention"] for line in read(out)])
            return cells(name, length, options)

        monkeypatch.setattr(lra, "cells", watched)
        monkeypatch.setattr(lra, "check", lambda name, options: None)
        lra.main(cheap("--out", out))
        assert seen == [[], ["softmax", "softmax"]]

    def test_a_queue_sees_that_it_runs(self, tmp_path, monkeypatch):
        """It holds the claim of its folder: a reservation has no heartbeat, so another queue would start it again."""
        owners = []
        claims.reserve(tmp_path)
        queue = {**json.loads((tmp_path / claims.CLAIM).read_text()), "pid": os.getppid()}
        (tmp_path / claims.CLAIM).write_text(json.dumps(queue))
        monkeypatch.setenv(claims.PARENT, str(os.getppid()))
        monkeypatch.setattr(lra, "check", lambda name, options: None)
        monkeypatch.setattr(lra, "run", lambda options: owners.append(claims.owner(tmp_path)["pid"]) or [])
        lra.main(cheap("--out", tmp_path / "speed.csv"))
        assert owners == [os.getpid()]

    def test_training_trains(self):
        options = lra.parse(cheap())
        model = lra.build("linear", 32, options).eval()
        before = [p.clone() for p in model.parameters()]
        steps, batch = lra.steps(model, options), lra.batch(2, 32, "cpu")
        steps["inference"](*batch)
        assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
        steps["training"](*batch)
        assert not any(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
        assert all(p.grad is None for p in model.parameters()), "else the next step holds them from its beginning"


class TestCommandLine:
    @pytest.fixture
    def flowformer(self):
        return lambda *arguments: CliRunner().invoke(app, ["bench", *arguments])

    def test_lists_the_benchmarks(self, flowformer):
        output = flowformer().output
        assert "attention" in output
        assert "lra" in output
        assert "fuzz" in output
        assert "'lra'" in flowformer("lar").output, "the nearest"

    @pytest.mark.parametrize(
        ("name", "option"),
        [
            ("attention", "--shapes"),
            ("lra", "--memory-limit"),
            ("loop", "--synthetic"),
            ("japanese-vowels", "--seeds"),
            ("fuzz", "--case"),
        ],
    )
    def test_options_go_to_the_script(self, flowformer, name, option):
        assert option in flowformer(name, "--help").output

    def test_json(self, flowformer):
        result = json.loads(flowformer("lra", "--json", *cheap(attentions=["flow"])).stdout)
        assert result["machine"]["dtype"] == "float32"
        assert [row["mode"] for row in result["rows"]] == list(lra.MODES)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["lra", "--attentions", "sofmax"], "did you mean 'softmax'"),
            (["lra", "--attentions", "rfa-gate"], "causal only"),
            (["lra", "--plot", "speed.png"], "pass both"),
            (["lra", "--batch", "0"], "must be positive"),
            # timed as a CPU is, without a synchronisation, it would seem to take no time
            (["attention", "--device", "cuda:0"], "invalid choice: 'cuda:0'"),
            (["attention", "--dtype", "bf16"], "invalid choice: 'bf16'"),
        ],
    )
    def test_a_mistake_is_one_sentence(self, flowformer, arguments, message):
        result = flowformer(*arguments)
        assert result.exit_code == 2
        assert message in result.output


class TestBars:
    CSV = """attention,length,mode,status,steps_per_second,paper_ratio
softmax,1024,training,ok,10.0,1.0
flow,1024,training,ok,30.0,2.25
soft,1024,training,OOM,,
"""

    def test_speeds_ratios_and_what_has_none(self, tmp_path):
        (tmp_path / "speed.csv").write_text(self.CSV)
        (panel,) = viz.speed_figure(tmp_path / "speed.csv").axes
        assert [bar.get_width() for bar in panel.patches] == [0, 10, 30], "the fastest on top"
        assert [text.get_text().strip() for text in panel.texts] == ["OOM"]
        softmax, *diamonds = panel.lines
        assert list(softmax.get_xdata()) == [10, 10]
        assert [list(each.get_xdata()) for each in diamonds] == [[10], [22.5]]

    def test_without_rows(self, tmp_path):
        (tmp_path / "speed.csv").write_text(self.CSV.partition("\n")[0] + "\n")
        with pytest.raises(ValueError, match="has no rows"):
            viz.speed_figure(tmp_path / "speed.csv")

    def test_the_other_benchmark_has_curves(self, tmp_path):
        rows = "kind,shape,contestant,forward_ms,both_ms\ncausal,B1H2N512d64,ours,1.0,2.0\n"
        (tmp_path / "times.csv").write_text(rows)
        panels = viz.speed_figure(tmp_path / "times.csv").axes
        assert [panel.get_title() for panel in panels] == ["causal\nB1H2 d64", ""]

    def test_what_is_no_benchmark_is_told_so(self, tmp_path):
        with pytest.raises(FileNotFoundError, match="accepted: the CSV that a benchmark wrote"):
            viz.speed_figure(tmp_path / "times.csv")
        (tmp_path / "times.csv").write_text("kind,shape,contestant,both_ms\n")
        with pytest.raises(ValueError, match="it lacks forward_ms"):
            viz.speed_figure(tmp_path / "times.csv")
