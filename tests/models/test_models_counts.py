"""Parameters and multiply-adds: the published sizes of the vision models and their rivals, and how they are counted."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from torch import nn

from flowformer import baselines
from flowformer.models.counts import TIMM_MODELS, count, count_timm
from flowformer.models.vision import DEIT_PRESETS, PRESETS, DeiTConfig, FlowformerDeiT, FlowformerVision, VisionConfig
from flowformer.nn import FlowAttention, build_attention


def size_of(model_class, config):
    with torch.device("meta"):
        model = model_class(config)
    counts = count(model, torch.empty(1, 3, config.image_size, config.image_size))
    assert counts.parameters == model.num_parameters()
    return counts


@functools.cache
def hierarchical(attention):
    return size_of(FlowformerVision, replace(PRESETS["imagenet"], attention=attention))


@pytest.mark.parametrize(("preset", "attention"), [("imagenet", 100_402_176), ("imagenet-16-heads", 77_521_920)])
def test_size_of_the_hierarchical_model(preset, attention):
    counts = size_of(FlowformerVision, PRESETS[preset])
    assert counts.parameters == 43_311_304
    assert counts.layers == 6_778_140_672
    # the paper's 41 and 6.3 are in binary units, and without the products of the attention
    assert f"{counts.parameters / 2**20:.0f} {counts.layers / 2**30:.1f}" == "41 6.3"
    assert counts.attention == attention


def test_size_of_the_hierarchical_model_with_softmax_attention():
    counts = hierarchical("softmax")
    tokens_and_widths = [(3136, 96, 3), (784, 192, 3), (196, 384, 10), (49, 768, 3)]
    assert counts.attention == sum(depth * 2 * tokens**2 * width for tokens, width, depth in tokens_and_widths)
    assert f"{counts.total / 1e9:.2f}" == "13.46"  # the paper says 6.7


def test_size_of_the_hierarchical_model_with_rivals_that_share_queries_and_keys():
    for attention in ("soft", "reformer"):
        counts = hierarchical(attention)
        assert counts.parameters < 43_311_304 - 3e6
        assert (
            f"{counts.layers / 2**30:.1f}" == "5.8"
        )  # as the paper prints for SOFT; its 6.0 for Reformer has no source


def test_attention_of_each_rival_is_counted_as_its_own():
    names = "flow", "soft", "reformer", "longformer"
    flow, soft, reformer, longformer = (hierarchical(name).attention for name in names)
    # later stages are shorter than a window of longformer, which is cut to them
    assert flow < soft < longformer < reformer
    tokens, width, reach = 3136, 96, 256
    # the first stage: a block of C queries meets 3 C keys and the global token, which meets all, once each for the
    # logits and the values
    blocks = -(-tokens // reach)
    pairs = blocks * reach * (3 * reach + 1) + tokens
    stage = VisionConfig(channels=(96,), depths=(1,), attention="longformer")
    assert size_of(FlowformerVision, stage).attention == 2 * pairs * width


@pytest.mark.parametrize(
    ("preset", "parameters", "layers", "softmax"),
    [("deit-ti", 5_717_416, 1.07, 1.25), ("deit-s", 22_050_664, 4.24, 4.60), ("deit-b", 86_567_656, 16.85, 17.56)],
)
def test_size_of_deit(preset, parameters, layers, softmax):
    counts = size_of(FlowformerDeiT, DEIT_PRESETS[preset])
    assert counts.parameters == parameters
    assert counts.layers / 1e9 == pytest.approx(layers, abs=0.005)
    rival = size_of(FlowformerDeiT, replace(DEIT_PRESETS[preset], attention="softmax"))
    assert (rival.parameters, rival.layers) == (counts.parameters, counts.layers)
    assert rival.total / 1e9 == pytest.approx(softmax, abs=0.005)
    if preset == "deit-s":
        # the paper's 22 and 4.2 are decimal, the latter without the products of the attention
        assert f"{counts.parameters / 1e6:.0f} {counts.layers / 1e9:.1f} {counts.total / 1e9:.2f}" == "22 4.2 4.36"


def test_size_of_the_preset_for_small_images():
    counts = size_of(FlowformerVision, PRESETS["cifar"])
    assert 12e6 < counts.parameters < 12.5e6
    assert 0.16e9 < counts.total < 0.17e9


@pytest.mark.parametrize(
    ("model_class", "config"),
    [
        (FlowformerVision, VisionConfig(32, num_classes=5, channels=(8, 12), depths=(1, 2), num_heads=4)),
        (FlowformerDeiT, DeiTConfig(32, patch_size=8, num_classes=5, embed_dim=12, depth=3, num_heads=3)),
    ],
)
@pytest.mark.parametrize("attention", ["flow", "softmax", "linear"])
def test_counted_layers_are_the_calls_of_linear_maps_and_convolutions(model_class, config, attention):
    model, images = model_class(replace(config, attention=attention)), torch.randn(1, 3, 32, 32)
    seen = []

    def see(module, inputs, output):
        seen.append(output.numel() * module.weight[0].numel())

    hooks = [m.register_forward_hook(see) for m in model.modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    model(images)
    for hook in hooks:
        hook.remove()
    counts = count(model, images)
    assert counts.layers == sum(seen)
    assert counts.attention > 0
    assert counts.total == counts.layers + counts.attention
    twice = count(model, images.repeat(2, 1, 1, 1))
    assert (twice.layers, twice.attention) == (2 * counts.layers, 2 * counts.attention)
    assert model(images).device.type == "cpu"  # counting leaves the model as it was


@pytest.mark.parametrize("is_causal", [False, True])
def test_flow_attention_costs_as_much_as_its_definition(is_causal):
    tokens, heads, dim = 10, 2, 4
    counts = count(FlowAttention(8, heads, is_causal=is_causal), torch.empty(1, tokens, 8))
    flows, memory, result = 4 * tokens * dim, tokens * dim**2, tokens * dim**2
    assert counts.attention == heads * (flows + memory + result)


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("name", baselines.names())
def test_products_of_a_rival_are_not_linear_layers(name, heads):
    """Torch folds a batched product with one matrix into two dimensions, as it does with a linear layer."""
    tokens, is_causal = 10, not baselines.get(name).bidirectional
    attention = build_attention(name, 16, heads, max_length=tokens, is_causal=is_causal)
    linear = sum(tokens * projection.weight.numel() for projection in attention.projections())
    convolution = 35 * tokens * 16 if name == "nystromformer" else 0
    assert count(attention, torch.empty(1, tokens, 16)).layers == linear + convolution


def test_both_products_of_linformer_with_its_projection_are_of_the_attention():
    tokens, rank, dim = 10, 3, 16
    attention = build_attention("linformer", dim, 4, max_length=tokens, attention_options={"rank": rank})
    assert count(attention, torch.empty(1, tokens, dim)).attention == 4 * tokens * rank * dim


@pytest.mark.parametrize("name", ["performer", "reformer", "rfa"])
def test_random_directions_are_counted_in_training(name):
    options = {"redraw_every": 1}
    attention = build_attention(name, 16, 2, max_length=10, attention_options=options)
    x, calls = torch.randn(1, 10, 16), attention.mechanism.directions.calls
    attention(x)
    counts = count(attention.train(), x)
    assert counts == count(attention.eval(), x)
    assert attention.mechanism.directions.calls is calls
    assert calls == 1


@pytest.mark.parametrize(
    ("name", "small", "large"),
    [
        ("bigbird", {"block": 6}, {"block": 64}),
        ("local", {"window": 6}, {"window": 64}),
        ("longformer", {"window": 12}, {"window": 64}),
        ("nystromformer", {"landmarks": 6}, {"landmarks": 64}),
        ("reformer", {"chunk": 6, "buckets": 2}, {"chunk": 64, "buckets": 2}),
        ("sinkhorn", {"block": 6}, {"block": 64}),
        ("soft", {"landmarks": 6}, {"landmarks": 64}),
        ("sparse", {"stride": 6, "summary": 6}, {"stride": 64}),
        ("sparse", {"stride": 6, "pattern": "strided", "summary": 1}, {"stride": 64, "pattern": "strided"}),
    ],
)
def test_short_sequences_are_not_padded_to_a_block(name, small, large):
    def cost(options):
        attention = build_attention(name, 16, 2, max_length=100, attention_options=options)
        return count(attention, torch.empty(1, 6, 16)).total

    assert cost(large) == cost(small)


def test_bigbird_gathers_only_blocks_that_a_short_sequence_has():
    def cost(tokens, **options):
        attention = build_attention("bigbird", 16, 2, max_length=100, attention_options={"block": 4, **options})
        return count(attention, torch.empty(1, tokens, 16)).attention

    for blocks in range(1, 5):
        others = max(blocks - 3, 0)
        assert cost(4 * blocks) == cost(4 * blocks, window=2 * others + 1, random=others)


# the paper's columns: millions of parameters, billions of multiply-adds
@pytest.mark.parametrize(("name", "parameters", "operations"), [("vit-b", 86, 55.4), ("deit-s", 22, 4.6)])
def test_columns_of_the_paper(name, parameters, operations):
    counts = count_timm(name)
    assert int(counts.parameters / 1e6) == parameters
    assert counts.total / 1e9 == pytest.approx(operations, abs=0.1)


def test_vit_large_is_not_quite_what_the_paper_prints():
    """It prints 307 M parameters; timm's model, and ours of the same sizes, has 1 % fewer."""
    counts = count_timm("vit-l")
    assert counts.parameters == 304_715_752
    assert counts.parameters / 1e6 == pytest.approx(307, rel=0.01)
    assert counts.total / 1e9 == pytest.approx(190.7, rel=0.002)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("vit-b", {"image_size": 384, "embed_dim": 768, "num_heads": 12}),
        ("vit-l", {"image_size": 384, "embed_dim": 1024, "num_heads": 16, "depth": 24}),
        ("deit-s", {}),
    ],
)
def test_ours_with_softmax_is_as_large(name, sizes):
    config = DeiTConfig(attention="softmax", **sizes)
    assert size_of(FlowformerDeiT, config) == count_timm(name)


def test_unknown_name():
    with pytest.raises(ValueError, match=f"unknown model 'vit-s'.*; accepted: {', '.join(TIMM_MODELS)}"):
        count_timm("vit-s")
