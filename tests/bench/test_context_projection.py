"""The projection of context parallelism: its inputs, its formula, and the file of measurements."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch.distributed as dist

from flowformer.bench import context
from flowformer.bench import context_projection as projection

CAUSAL = projection.WHOLE["causal"]


def test_exchange_is_the_formula_on_the_page():
    """Eight ranks on NVLink, three steps a collective; the bytes are those that the op counts."""
    stages = context.exchanged_numbers(16, 64, 64, is_causal=True)
    collectives = sum(1 if context.is_gathered(summed, 8) else 2 for summed, _ in stages)
    bytes_sent = context.predicted_bytes(16, 64, 64, 8, is_causal=True)
    expected = 1e3 * (collectives * 3 * 5e-6 + bytes_sent / 450e9)
    assert projection.exchange(8, 16, 64, is_causal=True) == pytest.approx(expected)
    assert projection.exchange(1, 16, 64, is_causal=True) == 0


def test_one_rank_is_what_was_measured():
    for tokens, milliseconds in CAUSAL.items():
        assert projection.flow(tokens, 1, 16, 64, "causal", CAUSAL) == pytest.approx(milliseconds)
    assert projection.ring(65536, 1, 16, 64, "causal") == pytest.approx(70.9)
    assert projection.ring(65536, 1, 16, 64, "bidirectional") == pytest.approx(136.4)


def test_flow_is_linear_and_softmax_quadratic_in_the_length():
    longer = projection.LENGTHS[-1] * 2
    assert projection.flow(longer, 1, 16, 64, "causal", CAUSAL) == 2 * projection.flow(
        longer // 2, 1, 16, 64, "causal", CAUSAL
    )
    assert projection.ring(longer, 8, 16, 64, "causal") == pytest.approx(
        4 * projection.ring(longer // 2, 8, 16, 64, "causal")
    )


def test_short_blocks_of_a_ring_wait_for_the_link():
    """64 GPUs with 1,024 tokens each: keys and values take longer than their products."""
    sent = 64 * 2 * 15e-6 + 64 * 6 * (2 * 1024 * 16 * 64) / 50e9
    assert projection.ring(65536, 64, 16, 64, "causal") == pytest.approx(1e3 * sent)


@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")
def test_projects_from_a_file_of_measurements(tmp_path, capsys):
    path, sizes = tmp_path / "work.csv", ["--heads", "2", "--dim", "4"]
    assert context.main(["--work", str(path), "--lengths", "16", "32", "--repeats", "1", *sizes]) == 0
    assert not dist.is_initialized()
    measured = projection.read(path, 2, 4)
    assert set(measured) == set(context.KINDS)
    assert set(measured["causal"]) == {16, 32}
    capsys.readouterr()
    assert context.main(["--project", "--measured", str(path), *sizes]) == 0
    table = capsys.readouterr().out
    assert table.count("ms (efficiency)") == 4
    assert table.count("| 16,777,216 |") == 4
    with pytest.raises(ValueError, match="has no rows of 16 heads of width 64"):
        context.main(["--project", "--measured", str(path)])


def test_an_interrupted_measurement_keeps_its_rows(tmp_path, monkeypatch):
    def measure(kind, tokens, heads, dim, *rest):
        if tokens == 32:
            raise KeyboardInterrupt
        return context.RankWork(kind, tokens, 1.0, 2.0, 3, heads, dim)

    monkeypatch.setattr(context, "measure_work", measure)
    monkeypatch.setattr(dist, "init_process_group", lambda *args, **options: None)
    path = tmp_path / "work.csv"
    with pytest.raises(KeyboardInterrupt):
        context.main(["--work", str(path), "--lengths", "16", "32", "--heads", "2", "--dim", "4"])
    assert projection.read(path, 2, 4) == {"bidirectional": {16: 2.0}}


def test_other_sizes_need_measurements(capsys):
    with pytest.raises(ValueError, match="2 heads of width 4 need --measured"):
        context.main(["--project", "--heads", "2", "--dim", "4"])
    assert context.main(["--project"]) == 0
    assert "| 65,536 | 1.87 (100%) |" in capsys.readouterr().out


def test_a_result_that_is_not_a_number_fails(monkeypatch):
    assert context.worst_error([0.0, float("nan"), 1.0]) == float("inf")
    right = context.ContextTiming("causal", 2, 1024, 8, 8, 100, 100, 1.0, error=1e-7)
    for error, status in ((1e-7, 0), (float("nan"), 1), (float("inf"), 1)):
        monkeypatch.setattr(context, "measure", lambda *_, error=error: replace(right, error=error))
        assert context.main([]) == status
