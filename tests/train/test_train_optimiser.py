"""Which parameters decay, and how often a run is evaluated."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tiny_training import CONFIG, SERIES

from flowformer.train import recipes, record, tasks
from flowformer.train.loop import train
from flowformer.train.optim import build_optimiser


@pytest.mark.parametrize("name", ["imagenet/hierarchical", "imagenet/deit-s", "cifar10"])
def test_positions_biases_norms_and_class_tokens_do_not_decay(name):
    config = recipes.get(name)
    with torch.device("meta"):
        model = tasks.get(config.task).build(config)
    groups = build_optimiser(model, config.optimiser, torch.device("cpu")).param_groups
    rates = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    assert len(rates) == len(list(model.parameters()))
    for parameter, tensor in model.named_parameters():
        spared = tensor.dim() == 1 or parameter == "positions.weight"
        assert rates[id(tensor)] == (0.0 if spared else 0.05), parameter


def test_every_parameter_decays_where_the_release_spares_none():
    config = recipes.get("imagenet/vit-b")
    with torch.device("meta"):
        model = tasks.get(config.task).build(config)
    (group,) = build_optimiser(model, config.optimiser, torch.device("cpu")).param_groups
    assert group["weight_decay"] == 0.3
    assert len(group["params"]) == len(list(model.parameters()))


def test_evaluates_every_second_epoch(tmp_path):
    config = replace(CONFIG, eval_every=None, eval_epochs=2, epochs=5, steps=None)  # of six updates each
    train(config, tmp_path / "run", splits=SERIES)
    evaluated = [r["epoch"] for r in record.read_log(tmp_path / "run") if r["kind"] == "eval" and "model" not in r]
    assert evaluated == [2, 4, 5]
