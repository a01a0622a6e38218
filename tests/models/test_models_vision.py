"""The image classifiers: the authors' outputs, and what every model must do."""

from __future__ import annotations

import math
import runpy
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import ROOT, VARIANTS, assert_like_gradients, oracle, randomized
from torch import nn

from flowformer import FlowVariant
from flowformer.models.vision import (
    DEIT_PRESETS,
    PRESETS,
    DeiTConfig,
    DropPath,
    FlowformerDeiT,
    FlowformerVision,
    GridPositions,
    VisionConfig,
    VisionLayer,
)

TINY = {
    FlowformerVision: VisionConfig(
        image_size=64, num_classes=5, channels=(8, 12, 16, 20), depths=(1, 1, 2, 1), num_heads=4
    ),
    FlowformerDeiT: DeiTConfig(image_size=32, patch_size=8, num_classes=5, embed_dim=12, depth=3, num_heads=3),
}
LENGTHS = {FlowformerVision: [256, 64, 16, 16, 4], FlowformerDeiT: [17, 17, 17]}
MODELS = pytest.mark.parametrize("model_class", TINY)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def build(model_class, **changes):
    return model_class(replace(TINY[model_class], **changes))


def batch(model, number=2, **options):
    return torch.randn(number, 3, *(2 * [model.config.image_size]), **options)


def loss_and_gradients(model, images):
    """Of the same draws each time."""
    torch.manual_seed(1)
    model.zero_grad()
    loss = F.cross_entropy(model(images), torch.arange(len(images)))
    loss.backward()
    return [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]


# what they compute


@torch.no_grad()
def test_hierarchical_model_gives_the_authors_output():
    arrays = {key: torch.from_numpy(value) for key, value in np.load(ROOT / "tests/parity/vision_tiny.npz").items()}
    names = {
        ".proj.": ".",
        "attn.": "attention.out_proj.",
        "blocks.": "stages.",
        "norm1.": "attention_norm.",
        "norm2.": "mlp_norm.",
        "fc1.": "linear1.",
        "fc2.": "linear2.",
        "gamma": "layer_scale",
        "pos_embed": "positions.weight",
    }
    weights = {}
    for key, value in arrays.items():
        if not key.startswith("weight."):
            continue
        key = key.removeprefix("weight.")
        for theirs, ours in names.items():
            key = key.replace(theirs, ours)
        if "qkv" in key:
            parts = zip("qkv", value.chunk(3), strict=True)
            weights |= {key.replace("out_proj.qkv", f"{name}_proj"): part for name, part in parts}
        else:
            weights[key] = value.squeeze(0) if key == "positions.weight" else value
    config = VisionConfig(
        image_size=64,
        num_classes=7,
        channels=(24, 36, 48, 60),
        depths=(1, 1, 2, 1),
        variant=FlowVariant.named("vision"),
    )
    model = FlowformerVision(config).double().eval()
    model.load_state_dict(weights)
    torch.testing.assert_close(model(arrays["x"]), arrays["out"], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("attention", ["softmax", "default", "vision"])
@torch.no_grad()
def test_deit_is_a_vision_transformer_with_another_attention(attention):
    """Patches, class token, positions, pre-norm layers, the norm and the class token: written out once more."""
    variant = {} if attention == "softmax" else {"attention": "flow", "variant": VARIANTS[attention]}
    model = randomized(build(FlowformerDeiT, **{"attention": attention} | variant), 0.3)
    images = batch(model, dtype=torch.float64)
    weights = dict(model.named_parameters())

    def linear(x, name):
        return F.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])

    def norm(x, name):
        return F.layer_norm(x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"], 1e-6)

    patches = images.unfold(2, 8, 8).unfold(3, 8, 8).permute(0, 2, 3, 1, 4, 5).reshape(2, 16, 3 * 64)
    patches = F.linear(patches, weights["patch_embed.weight"].flatten(1), weights["patch_embed.bias"])
    x = torch.cat([weights["class_token"].expand(2, 1, 12), patches], 1) + weights["positions.weight"]
    for i in range(3):
        y = norm(x, f"layers.{i}.attention_norm")
        q, k, v = (linear(y, f"layers.{i}.attention.{c}_proj").view(2, 17, 3, 4).transpose(1, 2) for c in "qkv")
        y = (q @ k.mT / 2).softmax(-1) @ v if attention == "softmax" else oracle(q, k, v, variant=model.config.variant)
        x = x + linear(y.transpose(1, 2).reshape(2, 17, 12), f"layers.{i}.attention.out_proj")
        y = F.gelu(linear(norm(x, f"layers.{i}.mlp_norm"), f"layers.{i}.mlp.linear1"))
        x = x + linear(y, f"layers.{i}.mlp.linear2")
    expected = linear(norm(x, "norm")[:, 0], "head")
    torch.testing.assert_close(model(images), expected, rtol=1e-10, atol=1e-10)


@MODELS
@torch.no_grad()
def test_batch_equals_its_images_alone(model_class):
    model = randomized(build(model_class), 0.3)
    images = batch(model, 3, dtype=torch.float64)
    alone = torch.cat([model(image[None]) for image in images])
    torch.testing.assert_close(model(images), alone, rtol=1e-10, atol=1e-10)


@MODELS
@pytest.mark.parametrize("size", [(32, 64), (96, 64), (32, 160)])
@torch.no_grad()
def test_images_of_other_sizes_differ_by_their_positions_only(model_class, size):
    model = randomized(build(model_class), 0.3)
    images = torch.randn(2, 3, *size, dtype=torch.float64)
    rolled = images.roll(model.config.stride, 3)  # whole tokens change places, in every stage
    assert (model(rolled) - model(images)).abs().max() > 1e-6
    positions = model.positions.weight
    positions.copy_(positions[:1].clone().expand_as(positions))
    torch.testing.assert_close(model(rolled), model(images), rtol=1e-10, atol=1e-10)


@torch.no_grad()
def test_one_token_is_left_of_the_smallest_image():
    model = FlowformerVision(replace(TINY[FlowformerVision], image_size=32)).eval()
    logits, maps = model(torch.randn(2, 3, 32, 32), return_maps=True)
    assert maps[-1].competition.shape == (2, 4, 1)
    assert logits.isfinite().all()


# positions, drop path, initialisation


def bicubic(old: int, new: int) -> torch.Tensor:
    """The weights (new, old) of a line of cells in a line of other cells, by the usual cubic kernel with a = −3/4."""
    weights = torch.zeros(new, old, dtype=torch.float64)
    for i in range(new):
        centre = (i + 0.5) * old / new - 0.5
        first = math.floor(centre) - 1
        for j in range(first, first + 4):
            t = abs(centre - j)
            near, far = 1.25 * t**3 - 2.25 * t**2 + 1, -0.75 * (t**3 - 5 * t**2 + 8 * t - 4)
            weights[i, min(max(j, 0), old - 1)] += near if t <= 1 else far
    return weights


@pytest.mark.parametrize("grid", [(12, 6), (4, 9), (1, 1)])
@torch.no_grad()
def test_positions_of_another_grid_are_interpolated(grid):
    positions = GridPositions((6, 6), 2, leading=1).double()
    leading, cells = positions.weight.split([1, 36])
    result = positions(torch.zeros(3, 1 + grid[0] * grid[1], 2, dtype=torch.float64), grid)
    rows, columns = (bicubic(6, n) for n in grid)
    expected = torch.einsum("yi, xj, ijw -> yxw", rows, columns, cells.view(6, 6, 2)).flatten(0, 1)
    torch.testing.assert_close(result, torch.cat([leading, expected]).expand(3, -1, -1), rtol=1e-10, atol=1e-10)


@torch.no_grad()
def test_positions_of_the_learned_grid_are_the_table():
    positions = GridPositions((3, 3), 2, leading=1)
    assert torch.equal(positions(torch.zeros(1, 10, 2), (3, 3))[0], positions.weight)


def test_interpolated_positions_keep_the_dtype_of_the_model():
    positions = GridPositions((4, 4), 3).bfloat16()
    result = positions(torch.zeros(1, 64, 3, dtype=torch.bfloat16), (8, 8))
    assert result.dtype == torch.bfloat16
    result.float().sum().backward()
    # each of the 16 vectors has its share of the 64 cells
    torch.testing.assert_close(positions.weight.grad.float().sum(0), torch.full((3,), 64.0), rtol=0.01, atol=0)


def test_drop_path_drops_whole_images_and_keeps_the_mean():
    drop_path, ones = DropPath(0.25), torch.ones(4000, 2, 3)
    result = drop_path(ones)
    assert torch.equal(result, result[:, :1, :1].expand_as(result))
    torch.testing.assert_close(result.unique(), torch.tensor([0, 4 / 3]))
    assert abs(result.mean().item() - 1) < 0.05
    assert drop_path.eval()(ones) is ones
    assert DropPath(0.0).train()(ones) is ones


def test_both_branches_of_a_layer_may_be_dropped():
    layer = VisionLayer(8, 2, drop_path=0.5)
    branches = {"attention": layer.attention.out_proj, "mlp": layer.mlp.linear2}
    for bias in (branch.bias for branch in branches.values()):
        nn.init.ones_(bias)
    for branch in branches.values():
        nn.init.zeros_(branch.weight)
    result = layer(torch.zeros(64, 3, 8))
    assert set(result.unique().tolist()) == {0.0, 2.0, 4.0}  # none, one, both kept and doubled
    assert torch.equal(layer.eval()(torch.zeros(1, 3, 8)), torch.full((1, 3, 8), 2.0))


@MODELS
def test_drop_path_rises_from_zero_in_even_steps(model_class):
    model = build(model_class, drop_path=0.4)
    rates = [layer.drop_path.rate for layer in model.modules() if isinstance(layer, VisionLayer)]
    assert rates == pytest.approx(torch.linspace(0, 0.4, len(LENGTHS[model_class])).tolist())


def test_initialisation_is_the_published_one():
    model = FlowformerVision(PRESETS["cifar"])
    for name, parameter in model.named_parameters():
        if name.endswith("layer_scale"):
            assert parameter.unique().tolist() == pytest.approx([1e-5])
        elif "norm" in name:
            assert parameter.unique().tolist() == [float(name.endswith("weight"))]
        elif "patch_embed" in name:
            bound = model.get_submodule(name.rsplit(".", 1)[0]).weight[0].numel() ** -0.5
            assert 0.8 * bound < parameter.abs().max() <= bound
        elif name.endswith("bias"):
            assert not parameter.any()
        else:
            assert parameter.std().item() == pytest.approx(0.02, rel=0.05), name


def test_class_token_and_its_position_start_near_zero():
    model = FlowformerDeiT(DEIT_PRESETS["deit-s"])
    for parameter in (model.class_token, model.positions.weight):
        assert parameter.std().item() == pytest.approx(0.02, rel=0.1)
    assert not any(layer.layer_scale is not None for layer in model.layers)


# what every model must do


@MODELS
def test_gradient_reaches_every_parameter(model_class):
    model = build(model_class, drop_path=0.0)
    model(batch(model)).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name


@MODELS
def test_autocast(model_class):
    model = randomized(build(model_class), 0.3).float()
    images = batch(model)
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(images)
    assert logits.dtype == torch.bfloat16
    exact = model(images)
    assert (logits - exact).norm() < 0.05 * exact.norm()
    assert_like_gradients(model, logits.float().square().sum(), exact.square().sum())


@MODELS
def test_gradient_checkpointing_changes_nothing(model_class):
    model = randomized(build(model_class, dropout=0.1, drop_path=0.5), 0.3).train()
    images = batch(model, dtype=torch.float64)
    expected = loss_and_gradients(model, images)
    runs: list[nn.Module] = []
    next(each for each in model.modules() if isinstance(each, VisionLayer)).register_forward_pre_hook(
        lambda layer, _: runs.append(layer)
    )
    model.gradient_checkpointing = True
    torch.testing.assert_close(loss_and_gradients(model, images), expected, rtol=0, atol=0)
    assert len(runs) == 2  # once forward, once more in the backward pass


@pytest.mark.parametrize(
    ("model_class", "sizes"),
    [(FlowformerVision, {"channels": (8, 12), "depths": (1, 1)}), (FlowformerDeiT, {"depth": 1})],
)
def test_compiled_model_is_the_same(model_class, sizes):
    """Every kind of layer once: compiling takes as long as there are layers."""
    model = randomized(build(model_class, **sizes), 0.3)
    images = batch(model, dtype=torch.float64)
    expected = loss_and_gradients(model, images)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(loss_and_gradients(compiled, images), expected, rtol=1e-10, atol=1e-10)


@MODELS
def test_saved_model_is_the_same(model_class, tmp_path):
    model = randomized(build(model_class, variant=FlowVariant.named("vision")), 0.3).float()
    images = batch(model)
    model.save_pretrained(tmp_path)
    loaded = model_class.from_pretrained(tmp_path)
    assert loaded.config == model.config
    assert not loaded.training
    state = loaded.state_dict()
    assert state.keys() == model.state_dict().keys()
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    assert torch.equal(loaded(images), model(images))


@MODELS
@pytest.mark.parametrize("attention", ["softmax", "linear"])
def test_rival_attention(model_class, attention):
    flow = randomized(build(model_class), 0.3)
    rival = build(model_class, attention=attention).double().eval()
    rival.load_state_dict(flow.state_dict())
    images = batch(flow, dtype=torch.float64)
    assert (rival(images) - flow(images)).abs().max() > 1e-6
    rival(images).sum().backward()
    with pytest.raises(ValueError, match="no Flow-Attention"):
        rival(images, return_maps=True)


@MODELS
def test_config_reaches_every_layer(model_class):
    variant = FlowVariant(clamp=0.5, allocation="none")
    model = build(model_class, variant=variant, mlp_ratio=2, dropout=0.3, in_channels=1)
    layers = [layer for layer in model.modules() if isinstance(layer, VisionLayer)]
    assert len(layers) == len(LENGTHS[model_class])
    for layer in layers:
        assert layer.attention.variant == variant
        assert layer.mlp.linear1.out_features == 2 * layer.mlp.linear1.in_features
        assert layer.attention.dropout.p == layer.mlp.dropout.p == layer.mlp.activation_dropout.p == 0.3
    assert model(torch.randn(1, 1, 64, 64)).shape == (1, 5)


def test_dropout_of_deit_drops_from_the_embedded_patches_too():
    model = randomized(build(FlowformerDeiT, dropout=1.0), 0.3).train()
    features = model.features(batch(model, dtype=torch.float64))
    assert torch.equal(features, model.norm.bias.expand(2, -1))  # nothing is left to norm


@MODELS
@torch.no_grad()
def test_maps_of_each_layer(model_class):
    model = randomized(build(model_class), 0.3)
    images = batch(model, dtype=torch.float64)
    logits, maps = model(images, return_maps=True)
    assert torch.equal(logits, model(images))
    heads = model.config.num_heads
    assert [tuple(each.competition.shape) for each in maps] == [(2, heads, n) for n in LENGTHS[model_class]]
    for each, length in zip(maps, LENGTHS[model_class], strict=True):
        total = each.competition.sum(-1)
        torch.testing.assert_close(total, torch.full_like(total, length))


@MODELS
def test_features_are_what_the_head_classifies(model_class):
    model = randomized(build(model_class), 0.3)
    images = batch(model, dtype=torch.float64)
    assert torch.equal(model.head(model.features(images)), model(images))


@MODELS
@pytest.mark.parametrize("shape", [(3, 64, 64), (2, 1, 64, 64)], ids=["no batch", "channels"])
def test_images_of_the_wrong_shape(model_class, shape):
    with pytest.raises(ValueError, match=r"\(batch, 3, height, width\), got \("):
        build(model_class)(torch.zeros(shape))


@MODELS
@pytest.mark.parametrize("size", [(64, 60), (4, 64), (0, 64)])
def test_images_that_are_no_whole_tokens(model_class, size):
    stride = {FlowformerVision: 32, FlowformerDeiT: 8}[model_class]
    with pytest.raises(ValueError, match=rf"multiples of {stride}, got {size[0]} × {size[1]}"):
        build(model_class)(torch.zeros(1, 3, *size))


@pytest.mark.parametrize(
    ("config_class", "changes", "message"),
    [
        (VisionConfig, {"image_size": 48}, "multiple of .*32 pixels, got 48"),
        (VisionConfig, {"image_size": 0}, "got 0"),
        (VisionConfig, {"patch_size": 0}, "patch_size 0"),
        (VisionConfig, {"depths": (3, 3, 10)}, r"one number a stage, got \(96, 192, 384, 768\) and \(3, 3, 10\)"),
        (VisionConfig, {"depths": (), "channels": ()}, "one number a stage"),
        (VisionConfig, {"drop_path": 1.0}, "drop_path must be at least 0 and below 1, got 1.0"),
        (DeiTConfig, {"image_size": 225}, "multiple of .*16 pixels, got 225"),
        (DeiTConfig, {"drop_path": -0.1}, "got -0.1"),
    ],
)
def test_config_errors(config_class, changes, message):
    with pytest.raises(ValueError, match=message):
        config_class(**changes)


@MODELS
def test_errors_of_the_attention_reach_the_user(model_class):
    with pytest.raises(ValueError, match="not divisible by num_heads 7"):
        build(model_class, num_heads=7)
    with pytest.raises(ValueError, match="did you mean 'softmax'"):
        build(model_class, attention="sofmax")


def test_each_model_takes_its_own_config():
    with pytest.raises(TypeError, match="FlowformerVision takes a VisionConfig, got DeiTConfig"):
        FlowformerVision(DEIT_PRESETS["deit-s"])
    with pytest.raises(TypeError, match="FlowformerDeiT takes a DeiTConfig, got VisionConfig"):
        FlowformerDeiT(PRESETS["cifar"])


def test_example(capsys):
    path = ROOT / "examples/vision.py"
    assert len(path.read_text().splitlines()) <= 30
    names = runpy.run_path(str(path))
    assert "M parameters" in capsys.readouterr().out
    assert names["accuracy"] > 0.9
