"""The benchmark of decoding: its rows, its check of correctness, and what it refuses."""

from __future__ import annotations

import csv
from dataclasses import replace

import pytest
import torch

from flowformer.bench import decode

SMALL = ["--device", "cpu", "--vocab", "31", "--steps", "3"]


@pytest.fixture(autouse=True)
def _small_model(monkeypatch):
    monkeypatch.setattr(decode, "MODEL", replace(decode.MODEL, num_layers=2, embed_dim=16, num_heads=2, mlp_dim=32))


def test_a_row_for_each_attention_batch_and_position(tmp_path, capsys):
    path = tmp_path / "decode.csv"
    modes = ["--modes", "eager", "--batches", "1", "3", "--positions", "5", "40", "--csv", str(path)]
    rows = decode.main([*SMALL, *modes])
    places = [(row.batch, row.position, row.attention) for row in rows]
    assert places == [(b, p, a) for b in (1, 3) for p in (5, 40) for a in ("flow", "softmax")]
    assert all(row.status == "ok" and 0 < row.p20 <= row.tokens_per_second <= row.p80 for row in rows)
    kept = {(row.attention, row.batch, row.position): row.cache_mib for row in rows}
    assert kept["flow", 1, 5] == kept["flow", 1, 40], "the state does not grow"
    assert kept["softmax", 1, 40] * 6 == pytest.approx(kept["softmax", 1, 5] * 41)
    assert [row["attention"] for row in csv.DictReader(path.open())] == ["flow", "softmax"] * 4
    assert len(capsys.readouterr().out.splitlines()) == 1 + 4


@pytest.mark.parametrize("attention", decode.ATTENTIONS)
def test_steps_are_checked_against_one_run(attention, monkeypatch):
    options = decode.parse(SMALL)
    assert decode.check(attention, options) is None
    run_layers = decode.FlowformerLM.run_layers

    def forgetful(self, x, mask=None, *, positions=None, states=None):
        x, new_states = run_layers(self, x, mask, positions=positions, states=states)
        return x, new_states and [state.zero_rows(torch.tensor([True, False])) for state in new_states]

    monkeypatch.setattr(decode.FlowformerLM, "run_layers", forgetful)
    monkeypatch.setattr(decode.CachedSoftmax, "forward", lambda self, query, key, value, **_: value)
    assert "the logits are off by" in decode.check(attention, options)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("attention", decode.ATTENTIONS)
def test_a_replayed_step_is_the_step(attention):
    options = decode.parse(["--device", "cuda", "--vocab", "31", "--dtype", "float32"])
    eager, graphed = (decode.Decoder(attention, 2, 40, options) for _ in range(2))
    replay = decode.prepared(graphed, "graph")
    for _ in range(4):  # to warm up, and once more before the capture
        eager.step()
    for _ in range(5):
        assert torch.equal(eager.token, graphed.token)
        eager.step()
        replay()


def test_what_does_not_fit_is_marked(monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(decode.Decoder, "read", full)
    row = decode.measure("flow", "eager", 1, 5, decode.parse(SMALL))
    assert (row.status, row.tokens_per_second) == ("OOM", None)
    assert "OOM" in decode.table([row, replace(row, attention="softmax", status="ok", tokens_per_second=3.0)])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--modes", "graph"], "a CPU has no CUDA graphs"),
        (["--steps", "0"], "must be positive"),
        (["--positions", "0"], "must be positive"),
    ],
)
def test_refusals(arguments, message, capsys):
    with pytest.raises(SystemExit):
        decode.parse([*SMALL, *arguments])
    assert message in capsys.readouterr().err
