"""The benchmark of the loop: it runs, on data of the published formats, and its numbers fit together."""

from __future__ import annotations

import json

import pytest
import torch

from flowformer import data
from flowformer.bench import loop as bench

SMALL = ["embed_dim=16", "mlp_dim=16", "batch_size=2", "workers=0"]


@pytest.mark.parametrize("changes", [[], ["accumulate=2", "precision=bf16", "clip=1"]])
def test_measures_and_prints(capsys, changes):
    arguments = ["--synthetic", "--steps", "10", "--warmup", "10", "--json", "--set", "data_options.max_length=64"]
    rows = bench.main(["lra/text", *arguments, *SMALL, *changes])
    (printed,) = map(json.loads, capsys.readouterr().out.splitlines())
    (row,) = rows
    assert printed["recipe"] == row.recipe == "lra/text"
    assert row.tokens_per_step == 2 * 64, "nearly every review is longer"
    assert row.share_in_model == pytest.approx(row.loop_steps_per_second / row.bare_steps_per_second)
    assert row.tokens_per_second == pytest.approx(row.loop_steps_per_second * row.tokens_per_step)
    assert min(row.data_batches_per_second, row.bare_memory_mib, row.loop_memory_mib) > 0
    assert f"{row.share_in_model:.1%} is the model" in bench.show(row)


def test_batches_after_the_warm_up_are_timed(monkeypatch):
    """With data that takes a second a batch, and a model that takes no time."""

    class Clock:
        now = 0.0

        @classmethod
        def perf_counter(cls):
            cls.now += 1e-6
            return cls.now

    def slow(trainer, start, batches=bench.Trainer.batches):
        for batch in batches(trainer, start):
            Clock.now += 1
            yield batch

    monkeypatch.setattr(bench, "time", Clock)
    monkeypatch.setattr(bench.Trainer, "batches", slow)
    arguments = ["--synthetic", "--steps", "4", "--warmup", "10", "--set", "data_options.max_length=16"]
    (row,) = bench.main(["lra/text", *arguments, *SMALL, "accumulate=2"])
    assert row.data_batches_per_second == pytest.approx(1, rel=1e-3)


def test_made_up_reviews_are_as_long_as_real_ones(tmp_path):
    bench.reviews(tmp_path)
    train = data.load("lra/text", tmp_path, partial=True).train
    lengths = torch.tensor([float(len(case["tokens"])) for case in train])
    assert lengths.median() == pytest.approx(970, rel=0.15)
    assert lengths.mean() == pytest.approx(1250, rel=0.15), "of the real ones, cut at 4000"


def test_made_up_expressions_are_the_published_ones(tmp_path):
    bench.listops(tmp_path)
    train = data.load("lra/listops", tmp_path, partial=True).train
    assert len(train) == 1000
    assert all(500 < len(case["tokens"]) < 2000 for case in train)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--warmup", "5"], "multiple of 10, got 5"), (["ptb", "--synthetic"], "knows lra/text, lra/listops, got ptb")],
)
def test_a_wrong_wish_is_explained(capsys, arguments, message):
    with pytest.raises(SystemExit):
        bench.main(arguments)
    assert message in capsys.readouterr().err
