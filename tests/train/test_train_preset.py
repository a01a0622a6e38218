"""preset=benchmark: the Long-Range Arena's own sizes of each rival."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from finished_runs import write_run

from flowformer.train import benchmark, config, recipes, reproduce, summary, tasks
from flowformer.train.overrides import override
from flowformer.train.results import collect

TASKS = ["listops", "text", "retrieval", "image", "pathfinder"]


def chosen(task, attention, *changes):
    return override(recipes.get(f"lra/{task}"), [f"attention={attention}", "preset=benchmark", *changes])


def with_length(run, length):
    """As on data of this length."""
    return replace(run, model=replace(run.model, max_length=length))


@pytest.mark.parametrize(
    ("task", "count"), [("listops", 8.95e6), ("text", 3.49e6), ("retrieval", 1.087e6), ("image", 248_458)]
)
def test_transformer_has_the_published_number_of_parameters(task, count):
    run = chosen(task, "softmax")
    if task == "text":
        run = with_length(run, 1000)
    with torch.device("meta"):
        model = tasks.get(run.task).build(run)
    assert model.num_parameters() == pytest.approx(count, rel=5e-3 if isinstance(count, float) else 0)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("attention", benchmark.OPTIONS)
def test_every_rival_of_every_task_builds_and_runs(task, attention):
    run = with_length(chosen(task, attention), 130)
    assert run.preset == "benchmark"
    model = tasks.get(run.task).build(run).eval()
    tokens = torch.randint(1, 16, (1, 130))
    with torch.no_grad():
        assert model(*[tokens] * (2 if task == "retrieval" else 1)).isfinite().all()


def test_runs_are_compared_with_the_paper(tmp_path):
    """Its scores of rivals are the benchmark's."""
    planned = reproduce.jobs("lra", tmp_path, cells=["lra/listops/*"], seeds=1, overrides=["preset=benchmark"])
    papers = {job.name.rpartition("/")[2]: job.paper for job in planned}
    assert set(papers) == {*benchmark.OPTIONS, "performer"}, "cells that the benchmark does not have are left out"
    assert (papers["linear"], papers["performer"], papers["performer-relu"]) == (16.13, 18.01, None)
    with pytest.raises(ValueError, match="none of these cells has preset=benchmark"):
        reproduce.jobs("uea", tmp_path, overrides=["preset=benchmark"])
    write_run(tmp_path, "lra/text", "longformer", 0, 0.63, overrides=["preset=benchmark"])
    write_run(tmp_path, "lra/text", "linear", 0, 0.63, overrides=["preset=benchmark", "precision=bf16"])
    (table,) = summary.fill(collect([tmp_path]))
    assert table.title == "Long-Range Arena, accuracy in %: preset=benchmark"
    assert [line.cells["Text"].paper for line in table.lines] == [65.9, 62.85]


def test_sizes_options_and_rates_are_those_of_the_attention_and_the_task():
    local, longformer = chosen("image", "local"), chosen("pathfinder", "longformer")
    assert (local.model.pooling, local.model.attention_options, local.model.num_heads) == ("mean", {"window": 64}, 2)
    assert (longformer.model.num_layers, longformer.model.dropout, longformer.optimiser.lr) == (2, 0.1, 1e-3)
    assert chosen("text", "local").model.attention_options == {"window": 50}
    assert chosen("listops", "performer").model.attention_options == {"features": 2}
    assert chosen("image", "sinkhorn").optimiser.weight_decay == 0.7
    assert chosen("text", "linformer").optimiser.lr == 0.05


def test_what_is_set_besides_is_kept_in_any_order():
    for order in (1, -1):
        changes = ["attention=linformer", "preset=benchmark", "num_layers=3", "rank=8", "lr=0.1"][::order]
        run = override(recipes.get("lra/text"), changes)
        assert (run.model.num_layers, run.model.attention_options, run.optimiser.lr) == (3, {"rank": 8}, 0.1)
        assert run.model.num_heads == 4
    assert config.from_dict(config.to_dict(run)) == run


@pytest.mark.parametrize(
    ("name", "attention", "message"),
    [
        ("uea/Heartbeat", "softmax", "uea/Heartbeat is not of the Long-Range Arena"),
        ("lra/text", "flow", "the benchmark has no flow attention for text"),
        ("lra/text", "performer", "no performer attention for text; accepted: attention=.*, performer-relu, "),
        ("lra/image", "cosformer", "accepted: attention=softmax, local, "),
    ],
)
def test_what_the_benchmark_does_not_have_is_an_error(name, attention, message):
    with pytest.raises(ValueError, match=message):
        override(recipes.get(name), [f"attention={attention}", "preset=benchmark"])
    with pytest.raises(ValueError, match="did you mean 'benchmark'"):
        override(recipes.get(name), ["preset=benchmarc"])


def test_the_published_recipe_and_the_stand_in_take_it_too():
    for name in ("lra/retrieval@published", "acl"):
        assert override(recipes.get(name), ["attention=softmax", "preset=benchmark"]).model.mlp_dim == 512
