"""Dropout on the weights of softmax attention, where the published configs have it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flowformer import baselines
from flowformer.models import DecisionConfig, FlowformerClassifier, FlowformerDecision
from flowformer.models.classifier import PRESETS
from flowformer.train import recipes
from flowformer.train.overrides import override


@pytest.mark.parametrize("is_causal", [False, True])
def test_drops_sources_in_training_and_keeps_the_mean(is_causal):
    attention = baselines.build("softmax", num_heads=2, head_dim=4, weight_dropout=0.25)
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 2, 30, 4).unbind()
    value, mask = torch.ones(1, 2, 30, 1), torch.ones(1, 30, dtype=torch.bool)
    mask[:, -5:] = False
    for masks in ({}, {"key_mask": mask}):
        drawn = torch.stack([attention(q, k, value, is_causal=is_causal, **masks) for _ in range(400)])
        assert drawn.std(0).min() > 0.01, "each row loses something"
        torch.testing.assert_close(drawn.mean(0), torch.ones_like(drawn[0]), rtol=0, atol=0.15)
        quiet = attention.eval()(q, k, value, is_causal=is_causal, **masks)
        torch.testing.assert_close(quiet, torch.ones_like(quiet))
        attention.train()


def test_must_be_a_share():
    with pytest.raises(ValueError, match=r"weight_dropout must be at least 0 and below 1, got 1\.0"):
        baselines.build("softmax", num_heads=2, head_dim=4, weight_dropout=1.0)


@pytest.mark.parametrize(
    ("task", "rate"), [("listops", 0.1), ("text", 0.1), ("retrieval", 0.1), ("image", 0.2), ("pathfinder", 0.1)]
)
def test_models_of_the_long_range_arena_have_it_for_softmax_only(task, rate):
    config = replace(PRESETS[task], embed_dim=16, qkv_dim=8, num_heads=2, mlp_dim=8)
    model = FlowformerClassifier(replace(config, attention="softmax"))
    assert {layer.attention.mechanism.weight_dropout for layer in model.layers} == {rate}
    for attention in ("flow", "linear"):
        FlowformerClassifier(replace(config, attention=attention))


def test_no_dropout_means_none_unless_told():
    config = replace(PRESETS["text"], embed_dim=16, mlp_dim=8, attention="softmax", dropout=0.0)
    (layer,) = FlowformerClassifier(config).layers
    assert layer.attention.mechanism.weight_dropout == 0.0
    (layer,) = FlowformerClassifier(replace(config, attention_options={"weight_dropout": 0.5})).layers
    assert layer.attention.mechanism.weight_dropout == 0.5


def test_the_decision_transformer_has_that_of_gpt_2():
    model = FlowformerDecision(DecisionConfig(3, 2, embed_dim=16, num_heads=2, mlp_dim=8, attention="softmax"))
    assert {layer.attention.mechanism.weight_dropout for layer in model.decoder.layers} == {0.1}


def test_overrides_of_a_recipe_stay_unambiguous():
    model = override(recipes.get("lra/image"), ["attention=softmax", "dropout=0.4", "attention_dropout=0.3"]).model
    assert (model.dropout, model.attention_dropout) == (0.4, 0.3)
