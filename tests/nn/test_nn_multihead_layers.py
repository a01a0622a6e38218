"""FlowMultiheadAttention inside torch's own transformer layers, which in evaluation would run softmax kernels."""

from __future__ import annotations

import copy
import io
from functools import partial

import pytest
import torch
from helpers import randomized
from torch import Tensor, nn

from flowformer import FlowMultiheadAttention, FlowVariant
from flowformer.nn import independent_sinks

WIDTH, HEADS = 12, 4


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def tokens(length=9) -> Tensor:
    return torch.randn(2, length, WIDTH, dtype=torch.float64)


def build(**options) -> FlowMultiheadAttention:
    return FlowMultiheadAttention(WIDTH, HEADS, batch_first=True, dtype=torch.float64, **options)


def square_mask(length):
    return nn.Transformer.generate_square_subsequent_mask(length, dtype=torch.float64)


def through_a_file(module):
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, through_a_file], ids=["deepcopy", "pickle"])
def test_a_copy_is_the_same_and_still_keeps_softmax_off(copied):
    layer = encoder_layer()
    layer.self_attn.variant = FlowVariant(clamp=1.0)
    other, x = copied(layer), tokens()
    assert other.self_attn.variant == FlowVariant(clamp=1.0)
    assert other.self_attn.in_proj_weight is not layer.self_attn.in_proj_weight
    with torch.no_grad():
        assert torch.equal(other(x), layer(x))


def encoder_layer(**options) -> nn.TransformerEncoderLayer:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 16, batch_first=True, dtype=torch.float64, **options)
    layer.self_attn = FlowMultiheadAttention(WIDTH, HEADS, batch_first=True, dtype=torch.float64)
    return randomized(layer, 0.5)


def by_hand(layer, x, **options):
    def attend(x):
        return layer.self_attn(x, x, x, need_weights=False, **options)[0]

    def mlp(x):
        return layer.linear2(layer.activation(layer.linear1(x)))

    if layer.norm_first:
        x = x + attend(layer.norm1(x))
        return x + mlp(layer.norm2(x))
    x = layer.norm1(x + attend(x))
    return layer.norm2(x + mlp(x))


@pytest.fixture
def kernels(monkeypatch):
    """The calls of torch's own softmax kernels, which the layers make without asking the attention module."""
    calls = []

    def spy(name, original, *args):
        calls.append(name)
        return original(*args)

    for name in ("_transformer_encoder_layer_fwd", "_native_multi_head_attention"):
        monkeypatch.setattr(torch, name, partial(spy, name, getattr(torch, name)))
    return calls


@torch.no_grad()
def test_softmax_takes_the_fast_path_where_flow_must_not(kernels):
    """The premise of the tests below: with torch's own attention the very same calls do reach the kernels."""
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 16, batch_first=True, dtype=torch.float64).eval()
    layer(tokens())
    assert kernels == ["_transformer_encoder_layer_fwd"]


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("padded", [False, True])
@torch.no_grad()
def test_an_encoder_layer_runs_flow_in_eval_mode(kernels, norm_first, activation, padded):
    layer, x = encoder_layer(norm_first=norm_first, activation=activation), tokens()
    mask = torch.arange(9) >= torch.tensor([[9], [5]]) if padded else None
    result = layer(x, src_key_padding_mask=mask)
    assert not kernels
    torch.testing.assert_close(result, by_hand(layer, x, key_padding_mask=mask), rtol=1e-12, atol=1e-12)
    softmax = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, dtype=torch.float64)
    softmax.load_state_dict(layer.self_attn.state_dict())
    layer.self_attn = softmax
    assert not torch.allclose(layer(x, src_key_padding_mask=mask), result, atol=0.1)


@torch.no_grad()
def test_an_encoder_layer_is_causal_with_a_mask_or_a_hint():
    layer, x = encoder_layer(), tokens()
    expected = by_hand(layer, x, is_causal=True)
    assert torch.equal(layer(x, src_mask=square_mask(9)), expected)
    assert torch.equal(layer(x, src_mask=square_mask(9), is_causal=True), expected)


def test_an_encoder_layer_compiles_as_one_graph():
    layer, x = encoder_layer(), tokens()
    mask = torch.arange(9) >= torch.tensor([[9], [5]])
    torch.compiler.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    result = compiled(x, src_key_padding_mask=mask)
    torch.testing.assert_close(result, layer(x, src_key_padding_mask=mask), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("padded", [False, True])
@torch.no_grad()
def test_an_encoder_runs_flow_in_eval_mode(kernels, padded):
    with pytest.warns(UserWarning, match="_qkv_same_embed_dim was not True"):
        encoder = nn.TransformerEncoder(encoder_layer(), 2)
    encoder, x = randomized(encoder, 0.5), tokens()
    mask = torch.arange(9) >= torch.tensor([[9], [5]]) if padded else None
    result = encoder(x, src_key_padding_mask=mask)
    assert not kernels
    expected = x
    for layer in encoder.layers:
        expected = by_hand(layer, expected, key_padding_mask=mask)
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)
    if padded:
        torch.testing.assert_close(result[1:, :5], encoder(x[1:, :5]), rtol=1e-12, atol=1e-12)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("norm_first", [False, True])
@torch.no_grad()
def test_an_encoder_that_makes_nested_tensors(norm_first, kernels):
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 16, batch_first=True, dtype=torch.float64, norm_first=norm_first)
    encoder, x = randomized(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), 0.5), tokens()
    for each in encoder.layers:
        each.self_attn = randomized(build(), 0.5)
    encoder.use_nested_tensor = True
    mask = torch.arange(9) >= torch.tensor([[9], [5]])
    seen = []
    encoder.layers[1].self_attn.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].is_nested))
    result = encoder(x, src_key_padding_mask=mask)
    assert not kernels
    assert seen == [True]
    expected = x
    for each in encoder.layers:
        expected = by_hand(each, expected, key_padding_mask=mask)
    torch.testing.assert_close(result[~mask], expected[~mask], rtol=1e-12, atol=1e-12)
    encoder.use_nested_tensor = False
    torch.testing.assert_close(encoder(x, src_key_padding_mask=mask), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("hint", [None, True])
def test_a_compiled_encoder_takes_the_causal_mask(hint):
    encoder = nn.TransformerEncoder(encoder_layer(), 2, enable_nested_tensor=False)
    encoder, x = randomized(encoder, 0.5), tokens()
    torch.compiler.reset()
    compiled = torch.compile(encoder, backend="aot_eager")
    expected = x
    for layer in encoder.layers:
        expected = by_hand(layer, expected, is_causal=True)
    found = compiled(x, mask=square_mask(9), is_causal=hint)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    one_graph = torch.compile(encoder.layers[0], backend="aot_eager", fullgraph=True)
    expected = by_hand(encoder.layers[0], x, is_causal=True)
    torch.testing.assert_close(one_graph(x, src_mask=square_mask(9)), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("padded", [False, True])
@torch.no_grad()
def test_a_decoder_layer_runs_flow(kernels, padded):
    layer = nn.TransformerDecoderLayer(WIDTH, HEADS, 16, batch_first=True, dtype=torch.float64)
    layer.self_attn, layer.multihead_attn = build(), build(variant=independent_sinks())
    layer, x, memory = randomized(layer, 0.5), tokens(6), tokens()
    masks = [None, None]
    if padded:
        masks = [torch.arange(n) >= torch.tensor([[n], [4]]) for n in (6, 9)]

    def run(x):
        return layer(
            x,
            memory,
            tgt_mask=square_mask(x.shape[1]),
            tgt_key_padding_mask=None if masks[0] is None else masks[0][:, : x.shape[1]],
            memory_key_padding_mask=masks[1],
        )

    attended = layer.norm1(x + layer.self_attn(x, x, x, key_padding_mask=masks[0], is_causal=True)[0])
    crossed = layer.multihead_attn(attended, memory, memory, key_padding_mask=masks[1])[0]
    attended = layer.norm2(attended + crossed)
    expected = layer.norm3(attended + layer.linear2(layer.linear1(attended).relu()))
    torch.testing.assert_close(run(x), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(run(x)[:, :3], run(x[:, :3]), rtol=1e-12, atol=1e-12)
    assert not kernels
