"""timm: the attention class is the op between timm's own parameters, in any of timm's models that takes one."""

from __future__ import annotations

from functools import partial

import pytest
import timm
import torch
from helpers import VARIANTS, oracle, randomized
from timm.layers import set_exportable, set_fused_attn
from torch import nn

import flowformer.integrations.timm as integration
from flowformer.integrations.timm import FlowAttention


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


@pytest.mark.parametrize(
    "mask",
    [torch.ones(2, 1, 5, 5, dtype=torch.bool), torch.ones(2, 5, dtype=torch.bool), torch.zeros(2, 1, 1, 5)],
    ids=["pairs", "two dimensions", "additive"],
)
def test_masks_without_a_linear_form_are_refused(mask):
    with pytest.raises(NotImplementedError, match=r"no matrix of weights.*accepted: bool of shape \(2, 1, 1, 5\)"):
        attention()(torch.randn(2, 5, 12, dtype=torch.float64), attn_mask=mask)


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
