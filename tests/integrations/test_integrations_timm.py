"""timm: the registered models keep timm's contract."""

from __future__ import annotations

import importlib.util
import re
import sys
from functools import partial

import pytest
import timm
import torch
from helpers import ROOT, randomized
from timm.optim import param_groups_layer_decay, param_groups_weight_decay
from torch import nn

import flowformer.integrations.timm as integration
from flowformer.integrations.timm import TimmFlowAttention as FlowAttention
from flowformer.integrations.timm import TimmFlowDeiT, TimmFlowformer
from flowformer.integrations.timm import flowformer as models
from flowformer.models.vision import DeiTConfig, FlowformerDeiT, FlowformerVision, VisionConfig, VisionLayer

MODELS = {
    "flowformer_patch4_224": "patch_embed.0",
    "flowformer_16heads_patch4_224": "patch_embed.0",
    "flowformer_patch2_32": "patch_embed.0",
    "deit_tiny_flow_patch16_224": "patch_embed",
    "deit_small_flow_patch16_224": "patch_embed",
    "deit_base_flow_patch16_224": "patch_embed",
}
SMALL = {
    "flowformer_patch2_32": {"image_size": 16, "patch_size": 2, "channels": (8, 16), "depths": (1, 2), "num_heads": 2},
    "deit_tiny_flow_patch16_224": {"image_size": 32, "patch_size": 8, "embed_dim": 12, "depth": 3, "num_heads": 3},
}
BOTH = pytest.mark.parametrize("name", SMALL)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def small(name: str, **options) -> nn.Module:
    """A registered model made small."""
    return randomized(timm.create_model(name, **{"drop_path_rate": 0.0} | SMALL[name] | options), 0.3)


def images(batch=2, rows=32, columns=32) -> torch.Tensor:
    return torch.randn(batch, 3, rows, columns, dtype=torch.float64)


def test_models_are_registered():
    assert set(MODELS) <= set(timm.list_models("flowformer_*") + timm.list_models("deit_*_flow_*"))
    with pytest.raises(RuntimeError, match="No pretrained weights"):
        timm.create_model("flowformer_patch2_32", pretrained=True)


@pytest.mark.parametrize(("name", "first_conv"), MODELS.items())
def test_default_cfg_describes_the_model(name, first_conv):
    with torch.device("meta"):
        model = timm.create_model(name)
    cfg, weights = model.default_cfg, model.state_dict()
    assert cfg["first_conv"] == first_conv
    assert weights[f"{first_conv}.weight"].shape[1] == cfg["input_size"][0]
    assert weights[f"{cfg['classifier']}.weight"].shape[0] == cfg["num_classes"] == model.num_classes
    assert model.config.image_size == cfg["input_size"][1]
    assert timm.data.resolve_model_data_config(model)["input_size"] == cfg["input_size"]


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("flowformer_patch4_224", 43_311_304), ("deit_small_flow_patch16_224", 22_050_664)],
)
def test_published_sizes(name, parameters):
    with torch.device("meta"):
        assert sum(each.numel() for each in timm.create_model(name).parameters()) == parameters


@pytest.mark.parametrize(
    ("name", "model_class", "config_class"),
    [
        ("flowformer_patch2_32", FlowformerVision, VisionConfig),
        ("deit_tiny_flow_patch16_224", FlowformerDeiT, DeiTConfig),
    ],
)
@torch.no_grad()
def test_models_are_those_of_this_package(name, model_class, config_class):
    ours = model_class(config_class(num_classes=7, dropout=0.2, drop_path=0.3, **SMALL[name])).double()
    model = small(name, num_classes=7, proj_drop_rate=0.2, drop_path_rate=0.3)
    model.load_state_dict(ours.state_dict(), strict=True)
    x = images(2, 32, 48)
    torch.manual_seed(1)
    expected = ours.train()(x)
    torch.manual_seed(1)
    torch.testing.assert_close(model.train()(x), expected, rtol=0, atol=0)
    ours.eval(), model.eval()
    torch.testing.assert_close(model(x), ours(x), rtol=0, atol=0)
    torch.testing.assert_close(model.features(x), ours.features(x), rtol=0, atol=0)
    found, maps = model(x, return_maps=True)
    torch.testing.assert_close(found, ours(x), rtol=0, atol=0)
    assert len(maps) == 3


@pytest.mark.parametrize("through", ["state dict", "file"])
@torch.no_grad()
def test_deit_is_timms_with_flow_attention(through, tmp_path):
    options = {"patch_size": 8, "embed_dim": 12, "num_heads": 3, "num_classes": 7}
    theirs = timm.create_model(
        "deit_tiny_patch16_224", img_size=32, depth=3, attn_layer=FlowAttention, **options
    ).double()
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.3)
    if through == "file":
        torch.save(theirs.state_dict(), tmp_path / "deit.pth")
        model = timm.create_model(
            "deit_tiny_flow_patch16_224",
            num_classes=7,
            dtype=torch.float64,
            checkpoint_path=tmp_path / "deit.pth",
            **SMALL["deit_tiny_flow_patch16_224"],
        ).eval()
    else:
        model = small("deit_tiny_flow_patch16_224", num_classes=7)
        model.load_state_dict(theirs.state_dict(), strict=True)
    x = images()
    torch.testing.assert_close(model(x), theirs.eval()(x), rtol=1e-10, atol=1e-10)
    options = {"indices": [0, 2], "norm": True, "return_prefix_tokens": True}
    found, expected = model.forward_intermediates(x, **options), theirs.forward_intermediates(x, **options)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@torch.no_grad()
def test_timms_weights_of_another_size_and_head(tmp_path):
    """As timm loads them: a file for a model with other classes, channels and image size."""
    options = {"patch_size": 8, "embed_dim": 12, "num_heads": 3, "depth": 3}
    theirs = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=1000, **options)
    torch.save(theirs.state_dict(), tmp_path / "vit.pth")
    model = timm.create_model(
        "deit_tiny_flow_patch16_224",
        pretrained=True,
        pretrained_cfg_overlay={"file": str(tmp_path / "vit.pth")},
        num_classes=3,
        in_chans=1,
        img_size=(48, 64),
        **options,
    )
    assert torch.equal(model.class_token, theirs.cls_token[0, 0])
    assert torch.equal(model.layers[2].mlp.linear1.weight, theirs.blocks[2].mlp.fc1.weight)
    torch.testing.assert_close(model.patch_embed.weight, theirs.patch_embed.proj.weight.sum(1, keepdim=True))
    assert model.positions.weight.shape == (1 + 6 * 8, 12)
    assert torch.equal(model.positions.weight[0], theirs.pos_embed[0, 0])
    assert model(torch.randn(2, 1, 48, 64)).shape == (2, 3)


@torch.no_grad()
def test_timms_square_grid_of_as_many_cells_is_interpolated():
    options = {"patch_size": 8, "embed_dim": 12, "num_heads": 3, "depth": 3}
    theirs = timm.create_model("vit_tiny_patch16_224", img_size=32, **options)
    model = timm.create_model("deit_tiny_flow_patch16_224", img_size=(16, 64), **options)
    expected = timm.layers.resample_abs_pos_embed(theirs.pos_embed, (2, 8), (4, 4), antialias=False)[0]
    model.load_state_dict(theirs.state_dict())
    torch.testing.assert_close(model.positions.weight, expected)
    # its own weights are of its own grid
    again = timm.create_model("deit_tiny_flow_patch16_224", img_size=(16, 64), **options)
    again.load_state_dict(model.state_dict())
    assert torch.equal(again.positions.weight, model.positions.weight)


@torch.no_grad()
def test_what_has_no_place_is_not_dropped():
    theirs = timm.create_model("deit3_small_patch16_224", img_size=32, patch_size=8, embed_dim=12, num_heads=3, depth=3)
    with pytest.raises(RuntimeError, match=r"blocks.0.ls1.gamma"):
        small("deit_tiny_flow_patch16_224").load_state_dict(theirs.state_dict())


@torch.no_grad()
def test_the_stem_of_the_hierarchical_model_takes_timms_patches():
    theirs = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=8, num_heads=2, depth=1)
    model = small("flowformer_patch2_32").float()
    head = model.head.weight.clone()
    result = model.load_state_dict(theirs.state_dict(), strict=False)
    assert {"norm.weight", "head.weight", "stages.0.0.mlp_norm.weight", "patch_embed.1.weight"} <= set(
        result.missing_keys
    )
    assert not any(name.startswith(("patch_embed.0", "positions")) for name in result.missing_keys)
    assert all(name.startswith("blocks.") for name in result.unexpected_keys)
    expected = timm.layers.resample_patch_embed(theirs.patch_embed.proj.weight, [2, 2])
    assert torch.equal(model.patch_embed[0].weight, expected)
    table = model.positions.interpolated(theirs.pos_embed[0, 1:], (4, 4), (8, 8))
    assert torch.equal(model.positions.weight, table)
    assert torch.equal(model.head.weight, head)
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict(theirs.state_dict())
    wide = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=12, num_heads=2, depth=1)
    with pytest.raises(ValueError, match=r"\(8, 3\) channels out and in.*channels=\(12, …\)"):
        model.load_state_dict(wide.state_dict(), strict=False)


@pytest.mark.parametrize("size", [48, (16, 48)], ids=str)
@BOTH
@torch.no_grad()
def test_another_image_size_changes_the_table_and_not_the_result(name, size):
    model, other = small(name), small(name, image_size=size)
    rows, columns = (size, size) if isinstance(size, int) else size
    x = images(2, rows, columns)
    expected, weights = model(x), model.state_dict()
    other.load_state_dict(weights, strict=True)
    torch.testing.assert_close(other(x), expected, rtol=1e-11, atol=1e-11)
    nested = nn.ModuleDict({"inner": small(name, image_size=size)})
    nested.load_state_dict({f"inner.{key}": value for key, value in weights.items()}, strict=True)
    torch.testing.assert_close(nested["inner"](x), expected, rtol=1e-11, atol=1e-11)
    model.set_input_size(img_size=size)
    torch.testing.assert_close(model(x), expected, rtol=1e-11, atol=1e-11)
    assert model.config == other.config
    assert model.positions.weight.shape == other.positions.weight.shape
    torch.testing.assert_close(model.positions.weight, other.positions.weight, rtol=1e-11, atol=1e-11)


@BOTH
def test_patches_keep_their_size(name):
    model = small(name)
    side = model.config.patch_size
    model.set_input_size(patch_size=(side, side))
    with pytest.raises(NotImplementedError, match=f"{side} × {side} pixels, got patch_size 5"):
        model.set_input_size(patch_size=5)
    with pytest.raises(ValueError, match="positive multiple"):
        model.set_input_size(img_size=(33, 32))
    assert model.positions.weight.requires_grad


@BOTH
@torch.no_grad()
def test_images_need_not_be_square(name, tmp_path):
    sizes = {key: value for key, value in SMALL[name].items() if key != "image_size"}
    model = timm.create_model(name, img_size=[16, 48], dtype=torch.float64, **sizes).eval()
    assert model.config.grid == (16 // model.config.patch_size, 48 // model.config.patch_size)
    x = images(2, 16, 48)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert again.config == model.config
    torch.testing.assert_close(again(x), model(x), rtol=0, atol=0)


@BOTH
@torch.no_grad()
def test_intermediate_layers_by_dinos_name(name):
    model, x = small(name), images()
    maps = model.forward_intermediates(x, [0, 1], norm=True, intermediates_only=True)
    found = model.get_intermediate_layers(x, [0, 1], reshape=True, norm=True)
    torch.testing.assert_close(found, maps, rtol=0, atol=0)
    (last,) = model.get_intermediate_layers(x, return_prefix_tokens=True)
    last = last[0] if isinstance(last, tuple) else last
    expected = model.forward_intermediates(x, 1, intermediates_only=True, output_fmt="NLC")
    torch.testing.assert_close([last], expected, rtol=0, atol=0)


@torch.no_grad()
def test_feature_maps_of_the_stages():
    model = small("flowformer_patch2_32", features_only=True, out_indices=(0, 1))
    maps = model(images(2, 16, 24))
    assert [tuple(each.shape) for each in maps] == [(2, 8, 8, 12), (2, 16, 4, 6)]
    assert model.feature_info.channels() == [8, 16]
    assert model.feature_info.reduction() == [2, 4]
    assert model.feature_info.module_name() == ["stages.0", "stages.1"]


@torch.no_grad()
def test_the_backbone_has_four_maps_by_default():
    with torch.device("meta"):
        model = timm.create_model("flowformer_patch4_224", features_only=True, depths=(1, 1, 1, 1))
        maps = model(torch.empty(1, 3, 64, 32))
    assert [tuple(each.shape) for each in maps] == [(1, 96, 16, 8), (1, 192, 8, 4), (1, 384, 4, 2), (1, 768, 2, 1)]


@BOTH
@torch.no_grad()
def test_feature_maps_are_the_tokens_on_their_way(name):
    model, x = small(name), images()
    seen = []
    for info in model.feature_info:
        module = model.get_submodule(info["module"])
        layer = module[-1] if isinstance(module, nn.ModuleList) else module
        layer.register_forward_hook(lambda _, inputs, output: seen.append(output))
    maps = model.forward_intermediates(x, intermediates_only=True, output_fmt="NLC", return_prefix_tokens=True)
    maps = [torch.cat(each[::-1], 1) if isinstance(each, tuple) else each for each in maps]
    torch.testing.assert_close(maps, seen, rtol=0, atol=0)


@BOTH
@torch.no_grad()
def test_forward_intermediates(name):
    model, x = small(name), images()
    tokens, maps = model.forward_intermediates(x, norm=True)
    torch.testing.assert_close(tokens, model.forward_features(x), rtol=0, atol=0)
    side, last = int(maps[-1].shape[-1]), tokens[:, model.num_prefix_tokens :]
    torch.testing.assert_close(maps[-1], last.transpose(1, 2).unflatten(2, (side, side)), rtol=0, atol=0)
    every = model.forward_intermediates(x, intermediates_only=True)
    assert len(every) == len(model.feature_info)
    for indices, expected in ((1, every[-1:]), ([0, -1], [every[0], every[-1]]), ([0], every[:1])):
        found = model.forward_intermediates(x, indices, intermediates_only=True)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    with pytest.raises(ValueError, match="unknown output_fmt 'NHWC'"):
        model.forward_intermediates(x, output_fmt="NHWC")


@BOTH
@torch.no_grad()
def test_stopping_early_computes_no_more_than_needed(name):
    model, x = small(name), images()
    calls = []
    layers = model.stages[-1] if name.startswith("flowformer") else model.layers[-1:]
    for layer in layers:
        layer.register_forward_hook(lambda *_: calls.append(1))
    expected = model.forward_intermediates(x, [0], intermediates_only=True)
    assert calls
    calls.clear()
    found = model.forward_intermediates(x, [0], intermediates_only=True, stop_early=True)
    assert not calls
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@BOTH
@torch.no_grad()
def test_pruned_model_gives_the_same_maps(name):
    model, x = small(name), images()
    expected = model.forward_intermediates(x, [-2], intermediates_only=True)
    taken = model.prune_intermediate_layers([-2], prune_norm=True)
    assert taken == [len(SMALL[name].get("depths", range(3))) - 2]
    found = model.forward_intermediates(x, taken, intermediates_only=True)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert len(model.feature_info) == taken[0] + 1
    layers = [key for key, module in model.named_modules() if isinstance(module, VisionLayer)]
    assert layers == [
        f"stages.{i}.{i}" if name.startswith("flowformer") else f"layers.{i}" for i in range(taken[0] + 1)
    ]
    assert len(model.patch_embed) == 1 if name.startswith("flowformer") else True
    assert isinstance(model.norm, nn.Identity)
    assert isinstance(model.get_classifier(), nn.Identity)


@BOTH
def test_classifier_may_be_reset(name):
    model, x = small(name, num_classes=7), images()
    features = model.forward_head(model.forward_features(x), pre_logits=True)
    torch.testing.assert_close(model(x), model.get_classifier()(features), rtol=0, atol=0)
    model.reset_classifier(5)
    assert model(x).shape == (2, 5)
    assert model.head.weight.dtype == torch.float64
    assert model.config.num_classes == model.num_classes == 5
    model.reset_classifier(0)
    torch.testing.assert_close(model(x), features, rtol=0, atol=0)
    model.reset_classifier(0, "")
    torch.testing.assert_close(model(x), model.forward_features(x), rtol=0, atol=0)
    assert small(name, num_classes=0)(x).shape == (2, model.num_features)


@BOTH
def test_dropout_of_the_features(name):
    model, x = small(name, num_classes=0, drop_rate=0.5), images()
    features, dropped = model(x), model.train()(x)
    kept = dropped != 0
    assert 0 < kept.double().mean() < 1
    torch.testing.assert_close(dropped[kept], 2 * features[kept])


@torch.no_grad()
def test_pooling():
    model, x = small("deit_tiny_flow_patch16_224"), images()
    tokens = model.forward_features(x)
    expected = {"token": tokens[:, 0], "avg": tokens[:, 1:].mean(1), "max": tokens[:, 1:].amax(1)}
    for name, value in expected.items():
        model.reset_classifier(0, name)
        torch.testing.assert_close(model(x), value, rtol=0, atol=0)
    with pytest.raises(ValueError, match=r"unknown global_pool 'token'.*accepted: '', 'avg', 'max', 'avgmax'"):
        small("flowformer_patch2_32", global_pool="token")


def training_step(model: nn.Module, x: torch.Tensor) -> tuple[int, list[torch.Tensor]]:
    """How many tensors the forward pass keeps, and the loss and gradients."""
    torch.manual_seed(1)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(0) or tensor, lambda tensor: tensor):
        loss = model(x).square().mean()
    return len(kept), [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


@BOTH
def test_gradient_checkpointing_keeps_less_and_changes_nothing(name):
    model, x = small(name, drop_path_rate=0.3).train(), images()
    kept, expected = training_step(model, x)
    model.set_grad_checkpointing()
    kept_less, found = training_step(model, x)
    assert kept_less < kept
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@BOTH
def test_positions_and_class_token_have_no_weight_decay(name):
    model = small(name)
    groups = param_groups_weight_decay(model, 0.05, no_weight_decay_list=model.no_weight_decay())
    free = {id(parameter) for group in groups if not group["weight_decay"] for parameter in group["params"]}
    names = {key for key, parameter in model.named_parameters() if id(parameter) in free}
    assert "positions.weight" in names
    assert all("norm" in key or key.endswith((".bias", "layer_scale")) for key in names - model.no_weight_decay())


@pytest.mark.parametrize("coarse", [False, True])
@BOTH
def test_learning_rates_fall_from_the_head_to_the_stem(name, coarse):
    model = small(name)
    order = timm.models.group_parameters(model, model.group_matcher(coarse), reverse=True)
    assert set(order) == {key for key, _ in model.named_parameters()}
    last = "stages.1.1" if name.startswith("flowformer") else "layers.2"
    first = last.replace("stages.1.1", "stages.0.0").replace("layers.2", "layers.0")
    stem, begin, end, head = (
        order[key] for key in ("positions.weight", f"{first}.mlp_norm.weight", f"{last}.mlp_norm.weight", "head.weight")
    )
    assert stem < begin < end < head
    assert order["norm.weight"] == end if not coarse or name.startswith("deit") else order["norm.weight"] >= end
    scales = [group["lr_scale"] for group in param_groups_layer_decay(model, layer_decay=0.5)]
    assert min(scales) < max(scales) == 1


@BOTH
@torch.no_grad()
def test_compiled_model_is_the_same(name):
    model, x = small(name), images()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), model(x), rtol=1e-12, atol=1e-12)


@BOTH
def test_arguments_have_timms_names(name):
    options = {"in_chans": 1, "num_classes": 4, "drop_rate": 0.1, "proj_drop_rate": 0.2, "drop_path_rate": 0.3}
    sizes = SMALL[name] | {"img_size": (48, 48)}
    sizes.pop("image_size")
    model = timm.create_model(name, **options, **sizes, dtype=torch.float64, attention="softmax")
    config = model.config
    assert (config.in_channels, config.num_classes, config.dropout, config.drop_path) == (1, 4, 0.2, 0.3)
    assert (config.image_size, config.attention, model.head_drop.p) == (48, "softmax", 0.1)
    assert model(torch.randn(1, 1, 48, 48, dtype=torch.float64)).shape == (1, 4)
    with pytest.raises(ValueError, match=r"positive multiple of .* pixels, got \(32, 33\)"):
        timm.create_model(name, img_size=(32, 33))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("right", ["drop_rate", "img_size", "global_pool", "num_heads"])
def test_an_unknown_argument_is_refused_with_the_nearest(name, right):
    """By create_model and by the function that it calls alike."""
    for create in (partial(timm.create_model, name), getattr(models, name)):
        with pytest.raises(TypeError, match=rf"has no argument '{right}s' \(did you mean '{right}'\?\)"):
            create(**{f"{right}s": 4})


@pytest.mark.parametrize("classes", [0, 4])
@torch.no_grad()
def test_saved_model_is_the_same(classes, tmp_path):
    model, x = small("flowformer_patch2_32", num_classes=classes), images()
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(TimmFlowformer.from_pretrained(tmp_path)(x), model(x), rtol=0, atol=0)


@pytest.mark.parametrize("reset", [False, True])
@torch.no_grad()
def test_saved_model_keeps_pooling_and_dropout(reset, tmp_path):
    model, x = small("deit_tiny_flow_patch16_224", global_pool="" if reset else "avg", drop_rate=0.25), images()
    if reset:
        model.reset_classifier(5, "avg")
    model.double().eval().save_pretrained(tmp_path)
    again = TimmFlowDeiT.from_pretrained(tmp_path)
    assert (again.global_pool, again.head_drop.p) == ("avg", 0.25)
    torch.testing.assert_close(again(x), model(x), rtol=0, atol=0)


def test_each_class_takes_its_own_config():
    with pytest.raises(TypeError, match="TimmFlowDeiT takes a DeiTConfig, got VisionConfig"):
        TimmFlowDeiT(VisionConfig())


def test_broken_timm_gives_one_sentence(tmp_path, monkeypatch):
    (tmp_path / "timm.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "timm"]:
        monkeypatch.delitem(sys.modules, name)
    spec = importlib.util.spec_from_file_location("flowformer.integrations.another", integration.__file__)
    with pytest.raises(ImportError, match=r"pip install 'flowformer\[timm\]'"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_examples_of_the_page(capsys):
    examples = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "timm.md").read_text(), re.DOTALL)
    assert examples
    for example in examples:
        assert len(example.splitlines()) <= 20
        exec(compile(example, "docs/timm.md", "exec"), {})
    printed = capsys.readouterr().out
    assert "loss 2." in printed
    assert "[(2, 96, 24, 16), (2, 192, 12, 8), (2, 384, 6, 4), (2, 768, 3, 2)] [4, 8, 16, 32]" in printed
    assert "torch.Size([2, 5]) torch.Size([2, 192, 6, 4])" in printed
