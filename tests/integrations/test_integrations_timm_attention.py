"""timm: the attention class is the op between timm's own parameters, in any of timm's models that takes one."""

from __future__ import annotations

from functools import partial

import pytest
import timm
import torch
from helpers import VARIANTS, oracle, randomized
from timm.data.naflex_transforms import patchify_image
from timm.layers import set_exportable, set_fused_attn
from torch import nn

from flowformer.integrations.timm import TimmFlowAttention as FlowAttention
from flowformer.integrations.timm import attention as integration


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def small_vit(name="vit_small_patch16_224", **options) -> nn.Module:
    return timm.create_model(name, img_size=32, depth=2, embed_dim=24, num_heads=3, num_classes=5, **options)


def attention(**options) -> FlowAttention:
    return randomized(FlowAttention(12, num_heads=3, **options), 0.5)


def expected_attention(module: FlowAttention, x: torch.Tensor, variant=VARIANTS["default"], **options) -> torch.Tensor:
    q, k, v = (part.unflatten(2, (3, -1)).transpose(1, 2) for part in module.qkv(x).chunk(3, -1))
    result = oracle(module.q_norm(q), module.k_norm(k), v, variant=variant, **options)
    result = module.norm(result.transpose(1, 2).flatten(2))
    if module.gate is not None:
        result = result * torch.sigmoid(module.gate(x))
    return module.proj(result)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"qkv_bias": True, "qk_norm": True, "scale_norm": True, "norm_layer": nn.LayerNorm},
        {"attn_head_dim": 6, "dim_out": 7, "gated": True, "proj_bias": False},
    ],
    ids=["plain", "norms", "gate"],
)
@torch.no_grad()
def test_attention_is_the_op_between_timms_parameters(options, is_causal):
    module, x = attention(**options), torch.randn(2, 5, 12, dtype=torch.float64)
    expected = expected_attention(module, x, is_causal=is_causal)
    torch.testing.assert_close(module(x, is_causal=is_causal), expected, rtol=1e-10, atol=1e-10)


@torch.no_grad()
def test_a_subclass_says_the_variant():
    class Vision(FlowAttention):
        variant = "vision"

    stock = attention()
    module = Vision(12, num_heads=3, dtype=torch.float64).eval()
    module.load_state_dict(stock.state_dict())
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    expected = expected_attention(module, x, VARIANTS["vision"])
    torch.testing.assert_close(module(x), expected, rtol=1e-10, atol=1e-10)
    assert not torch.allclose(module(x), stock(x))
    assert "vision" in repr(small_vit(attn_layer=Vision))


@torch.no_grad()
def test_masked_tokens_take_part_in_nothing():
    module, x = attention(), torch.randn(2, 5, 12, dtype=torch.float64)
    mask = torch.tensor([[True] * 5, [True, True, False, True, False]])
    found = module(x, attn_mask=mask[:, None, None])
    for i in range(2):
        torch.testing.assert_close(found[i, mask[i]], module(x[i : i + 1, mask[i]])[0], rtol=1e-10, atol=1e-10)
    one_for_all = module(x, attn_mask=mask[1:, None, None])
    torch.testing.assert_close(one_for_all[1], found[1], rtol=0, atol=0)
    torch.testing.assert_close(one_for_all[0, mask[1]], module(x[:1, mask[1]])[0], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("left_out", [False, -torch.inf, -1e9, torch.finfo(torch.float32).min], ids=str)
@pytest.mark.parametrize("pairs", [False, True])
@torch.no_grad()
def test_masks_of_pairs_and_masks_to_add_are_masks_of_tokens(left_out, pairs):
    module, x = attention(), torch.randn(2, 5, 12, dtype=torch.float64)
    tokens = torch.tensor([[True] * 5, [True, True, False, True, False]])
    expected = module(x, attn_mask=tokens[:, None, None])
    mask = (tokens[:, :, None] & tokens[:, None])[:, None] if pairs else tokens[:, None, None]
    if left_out is not False:
        mask = torch.zeros(mask.shape).masked_fill(~mask, left_out)
    torch.testing.assert_close(module(x, attn_mask=mask), expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    "mask",
    [
        torch.ones(2, 1, 5, 5, dtype=torch.bool).tril(),
        torch.ones(2, 3, 5, 5, dtype=torch.bool),
        torch.ones(2, 5, dtype=torch.bool),
        torch.full((2, 1, 1, 5), -1.0),
    ],
    ids=["causal", "heads", "two dimensions", "bias"],
)
def test_masks_without_a_linear_form_are_refused(mask):
    with pytest.raises(NotImplementedError, match=r"no matrix of weights.*a mask of tokens, of shape \(2, 1,"):
        attention()(torch.randn(2, 5, 12, dtype=torch.float64), attn_mask=mask)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("swin_tiny_patch4_window7_224", {}),
        ("caformer_s18", {}),
        ("vit_base_patch16_xp_224", {}),
        ("naflexvit_base_patch16_gap", {"rope_type": "axial"}),
    ],
)
def test_models_that_would_run_their_own_attention_are_refused(name, options):
    with torch.device("meta"), pytest.raises(NotImplementedError, match=rf"{name} does not take.*docs/timm.md"):
        timm.models.create_model(name, attn_layer=FlowAttention, **options)
    with torch.device("meta"):
        assert timm.create_model(name, **options)


@pytest.mark.parametrize("name", ["eca_resnet33ts", "mobilevit_s", "eca_nfnet_l0"])
def test_channel_attention_is_refused(name):
    with torch.device("meta"), pytest.raises(TypeError, match="weighs the channels of a ConvNet"):
        timm.create_model(name, attn_layer=FlowAttention)


def test_other_attention_classes_are_left_alone():
    assert not any(isinstance(module, FlowAttention) for module in small_vit(attn_layer="attn").modules())


@pytest.mark.parametrize("key_only", [False, True])
@torch.no_grad()
def test_naflex_vit(key_only):
    """Images of unequal size, as patches: padded ones equal each alone, and all patches valid equal no mask."""
    model = timm.create_model(
        "naflexvit_base_patch16_gap",
        attn_layer=FlowAttention,
        depth=2,
        embed_dim=24,
        num_heads=3,
        num_classes=5,
        patch_size=4,
        use_key_only_attn_mask=key_only,
    )
    model = randomized(model, 0.3)
    images = torch.randn(2, 3, 12, 16, dtype=torch.float64)
    patches = torch.stack([patchify_image(image, (4, 4))[0] for image in images])
    coordinates = torch.stack(torch.meshgrid(torch.arange(3), torch.arange(4), indexing="ij"), -1).flatten(0, 1)
    coordinates, valid = coordinates.expand(2, -1, -1).clone(), torch.ones(2, 12, dtype=torch.bool)

    def run(patches, coordinates, valid):
        return model({"patches": patches, "patch_coord": coordinates, "patch_valid": valid})

    whole = run(patches, coordinates, valid)
    torch.testing.assert_close(whole, model(images), rtol=1e-6, atol=1e-6)  # timm interpolates positions in float32
    # the second image has two rows
    valid[1, 8:] = False
    coordinates[1, 8:] = 0
    padded = run(patches, coordinates, valid)
    torch.testing.assert_close(padded[0], whole[0], rtol=1e-11, atol=1e-11)
    alone = run(patches[1:, :8], coordinates[1:, :8], valid[1:, :8])
    torch.testing.assert_close(padded[1:], alone, rtol=1e-11, atol=1e-11)


def test_dropout_acts_on_the_result():
    module = FlowAttention(12, num_heads=3, attn_drop=0.5)
    seen = []
    module.proj.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    x = torch.randn(4, 50, 12)
    module(x)
    module.eval()(x)
    dropped = seen[0] == 0
    assert dropped.float().mean().item() == pytest.approx(0.5, abs=0.05)
    torch.testing.assert_close(seen[0][~dropped], 2 * seen[1][~dropped])


@pytest.mark.parametrize("switch", [partial(set_fused_attn, False), partial(set_exportable, True)])
def test_timms_switches_choose_plain_torch(switch, monkeypatch):
    backends = []

    def flow_attention(query, key, value, *, backend, **_):
        backends.append(backend)
        return value

    monkeypatch.setattr(integration, "flow_attention", flow_attention)
    try:
        switch()
        FlowAttention(12, num_heads=3)(torch.randn(1, 4, 12))
    finally:
        set_fused_attn(True)
        set_exportable(False)
    FlowAttention(12, num_heads=3)(torch.randn(1, 4, 12))
    assert backends == ["torch", None]


@torch.no_grad()
def test_exported_model_is_the_same():
    model = small_vit(attn_layer=FlowAttention).eval()
    x = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(torch.export.export(model, (x,)).module()(x), model(x))


@pytest.mark.parametrize("name", ["vit_small_patch16_224", "deit_small_patch16_224", "vit_base_patch16_clip_224"])
def test_parameters_are_those_of_the_stock_model(name):
    with torch.device("meta"):
        stock, flow = timm.create_model(name), timm.create_model(name, attn_layer=FlowAttention)
    shapes = {key: value.shape for key, value in stock.state_dict().items()}
    assert {key: value.shape for key, value in flow.state_dict().items()} == shapes
    assert sum(isinstance(module, FlowAttention) for module in flow.modules()) == 12


def test_weights_of_the_stock_model_load():
    stock, flow = small_vit(qk_norm=True), small_vit(qk_norm=True, attn_layer=FlowAttention)
    flow.load_state_dict(stock.state_dict(), strict=True)
    x = torch.randn(2, 3, 32, 32)
    assert not torch.allclose(flow.eval()(x), stock.eval()(x))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_vit_small_trains_a_step(checkpointing):
    model = timm.create_model("vit_small_patch16_224", attn_layer=FlowAttention, img_size=64, depth=2, num_classes=5)
    model.set_grad_checkpointing(checkpointing)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    x, labels = torch.randn(4, 3, 64, 64), torch.arange(4)
    losses = []
    for _ in range(2):
        loss = nn.functional.cross_entropy(model(x), labels)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
        assert all(parameter.grad.any() for parameter in model.parameters())
        optimizer.step()
    assert losses[1] < losses[0]


def test_bf16_autocast_with_norms_of_queries_and_keys():
    model = small_vit(attn_layer=FlowAttention, qk_norm=True)
    x = torch.randn(2, 3, 32, 32)
    with torch.autocast("cpu", torch.bfloat16):
        found = model(x)
    torch.testing.assert_close(found.float(), model(x), rtol=0.05, atol=0.05)
    found.float().square().sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_a_partial_is_no_class():
    with pytest.raises(TypeError, match="must be a class"):
        small_vit(attn_layer=partial(FlowAttention, gated=True))
