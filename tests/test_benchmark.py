"""The benchmark measures what it says: contestants agree, memory is counted, the table can be written."""

from __future__ import annotations

import csv
import importlib.util
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "attention.py"


@pytest.fixture(scope="module")
def bench():
    spec = importlib.util.spec_from_file_location("bench_attention", SCRIPT)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def field(bench, request):
    # compiling takes longer than all the rest
    return [each for each in bench.contestants(request.param, ["torch", "reference"]) if "compiled" not in each.name]


@pytest.mark.parametrize("field", ["bidirectional", "causal"], indirect=True, ids=str)
def test_contestants_are_measured_and_written(bench, field, request, tmp_path):
    kind = request.node.callspec.params["field"]
    options = bench.parse(["--shapes", "B1H2N32d8", "--repeats", "5", "--device", "cpu", "--dtype", "float32"])
    bench.check(kind, field, 2, 8, "cpu", torch.float32)
    rows = bench.measure(kind, field, options.shapes[0], options)
    assert [row.contestant for row in rows] == [each.name for each in field]
    assert all(row.forward_p20 <= row.forward_ms <= row.forward_p80 for row in rows)
    assert "authors eager" in bench.table(rows)
    assert "flow torch is as fast as" in bench.speedups(rows, "torch")
    bench.write_csv(tmp_path / "times.csv", rows, bench.machine(options))
    with (tmp_path / "times.csv").open() as file:
        assert [line["contestant"] for line in csv.DictReader(file)] == [row.contestant for row in rows]


@pytest.mark.parametrize("field", ["bidirectional"], indirect=True)
def test_a_wrong_contestant_stops_the_run(bench, field):
    wrong = bench.Contestant("wrong", lambda q, k, v: 1.01 * bench.authors_bidirectional(q, k, v))
    with pytest.raises(SystemExit, match="wrong, bidirectional: the result is off by"):
        bench.check("bidirectional", [*field, wrong], 2, 8, "cpu", torch.float32)


def test_peak_memory_counts_what_is_held_at_once(bench):
    def run():
        for _ in range(3):
            a, b = torch.empty(1000), torch.empty(500)
            del a, b

    assert bench.peak_bytes(run, "cpu") == 6000
