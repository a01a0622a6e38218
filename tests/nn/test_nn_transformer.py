"""Encoder and decoder blocks, their stacks, and positions."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from helpers import randomized, with_gradients
from torch import nn

from flowformer import FlowVariant
from flowformer.nn import (
    FairseqPositions,
    FeedForward,
    FlowDecoder,
    FlowDecoderLayer,
    FlowEncoder,
    FlowEncoderLayer,
    LearnedPositions,
    SinusoidalPositions,
    independent_sinks,
    token_positions,
)

WIDTH, HEADS, MEMORY = 12, 3, 5
NORMS = pytest.mark.parametrize("norm_first", [True, False], ids=["pre-norm", "post-norm"])


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def encoder(layers=2, **options) -> FlowEncoder:
    return randomized(FlowEncoder([FlowEncoderLayer(WIDTH, HEADS, **options) for _ in range(layers)]), 0.5)


def decoder(layers=2, **options) -> FlowDecoder:
    return randomized(
        FlowDecoder([FlowDecoderLayer(WIDTH, HEADS, **options) for _ in range(layers)], norm=nn.LayerNorm(WIDTH)), 0.5
    )


def tokens(batch=2, length=7, width=WIDTH) -> torch.Tensor:
    return torch.randn(batch, length, width, dtype=torch.float64)


def padding(side, lengths, longest):
    place = torch.arange(longest)
    return torch.stack([place < n if side == "right" else place >= longest - n for n in lengths])


@pytest.mark.parametrize(
    ("activation", "function"),
    [("gelu", F.gelu), ("relu", F.relu), (nn.GELU("tanh"), lambda x: F.gelu(x, approximate="tanh")), (F.silu, F.silu)],
    ids=["gelu", "relu", "module", "function"],
)
def test_feed_forward_by_hand(activation, function):
    module, x = randomized(FeedForward(WIDTH, 20, activation=activation), 0.5), tokens()
    inner = function(x @ module.linear1.weight.T + module.linear1.bias)
    torch.testing.assert_close(module(x), inner @ module.linear2.weight.T + module.linear2.bias)


def test_feed_forward_refuses_an_unknown_activation():
    with pytest.raises(ValueError, match="unknown activation 'swish'; accepted: gelu, relu, or a callable"):
        FeedForward(WIDTH, 20, activation="swish")


@NORMS
def test_encoder_layer_by_hand(norm_first):
    layer = randomized(FlowEncoderLayer(WIDTH, HEADS, norm_first=norm_first), 0.5)
    x, mask = tokens(), padding("left", (7, 4), 7)
    if norm_first:
        attended = x + layer.attention(layer.attention_norm(x), key_mask=mask)
        expected = attended + layer.mlp(layer.mlp_norm(attended))
    else:
        attended = layer.attention_norm(x + layer.attention(x, key_mask=mask))
        expected = layer.mlp_norm(attended + layer.mlp(attended))
    torch.testing.assert_close(layer(x, mask), expected, rtol=1e-12, atol=1e-12)


@NORMS
def test_decoder_layer_by_hand(norm_first):
    layer = randomized(FlowDecoderLayer(WIDTH, HEADS, memory_dim=MEMORY, norm_first=norm_first), 0.5)
    x, memory = tokens(), tokens(length=4, width=MEMORY)
    mask, memory_mask = padding("right", (7, 3), 7), padding("left", (2, 4), 4)
    if norm_first:
        expected = x + layer.attention(layer.attention_norm(x), key_mask=mask)
        normed = layer.cross_norm(expected)
        expected = expected + layer.cross_attention(normed, memory, key_mask=memory_mask)
        expected = expected + layer.mlp(layer.mlp_norm(expected))
    else:
        expected = layer.attention_norm(x + layer.attention(x, key_mask=mask))
        expected = layer.cross_norm(expected + layer.cross_attention(expected, memory, key_mask=memory_mask))
        expected = layer.mlp_norm(expected + layer.mlp(expected))
    result = layer(x, memory, mask=mask, memory_mask=memory_mask)
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("stack", [FlowEncoder, FlowDecoder])
@pytest.mark.parametrize("norm", [None, nn.LayerNorm(WIDTH)], ids=["no norm", "norm"])
def test_a_stack_is_its_layers_and_a_norm(stack, norm):
    kind = FlowEncoderLayer if stack is FlowEncoder else FlowDecoderLayer
    module, x = randomized(stack([kind(WIDTH, HEADS) for _ in range(2)], norm), 0.5), tokens()
    expected = module.layers[1](module.layers[0](x))
    torch.testing.assert_close(module(x), expected if norm is None else norm(expected))


@NORMS
@pytest.mark.parametrize("build", [encoder, decoder])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_equals_alone(norm_first, build, side):
    module, x, mask = build(norm_first=norm_first), tokens(3), padding(side, (7, 4, 1), 7)
    padded = module(x, mask=mask)
    for row in range(3):
        alone = module(x[row, mask[row]][None])[0]
        torch.testing.assert_close(padded[row, mask[row]], alone, rtol=1e-10, atol=1e-11)


def test_an_encoder_does_not_know_the_order():
    module, x, order = encoder(), tokens(), torch.randperm(7)
    torch.testing.assert_close(module(x[:, order]), module(x)[:, order], rtol=1e-11, atol=1e-12)


def test_the_memory_of_a_decoder_padded_equals_alone():
    module, x, memory = decoder(memory_dim=MEMORY), tokens(), tokens(length=6, width=MEMORY)
    mask = padding("right", (6, 2), 6)
    padded = module(x, memory, memory_mask=mask)
    torch.testing.assert_close(padded[1:], module(x[1:], memory[1:, :2]), rtol=1e-10, atol=1e-11)


@NORMS
@pytest.mark.parametrize("memory_dim", [None, MEMORY])
@pytest.mark.parametrize("variant", ["core", FlowVariant(allocation="softmax")], ids=str)
def test_a_decoder_does_not_see_the_future(norm_first, memory_dim, variant):
    module = decoder(norm_first=norm_first, memory_dim=memory_dim, variant=variant)
    x, memory = tokens().requires_grad_(), None if memory_dim is None else tokens(length=4, width=MEMORY)
    (grad,) = torch.autograd.grad(module(x, memory)[:, 3].square().sum(), x)
    assert not grad[:, 4:].any()
    assert grad[:, :4].abs().amin() > 0


def test_cross_attention_keeps_the_rest_of_the_variant():
    layer = FlowDecoderLayer(WIDTH, HEADS, memory_dim=MEMORY, variant=FlowVariant(feature_map="relu", eps=1e-3))
    assert layer.attention.variant == FlowVariant(feature_map="relu", eps=1e-3)
    assert layer.cross_attention.variant == independent_sinks(FlowVariant(feature_map="relu", eps=1e-3))


@NORMS
@pytest.mark.parametrize("memory_dim", [None, MEMORY])
@pytest.mark.parametrize("cuts", [(1,) * 7, (4, 3)], ids=str)
def test_a_decoder_in_parts_equals_whole(norm_first, memory_dim, cuts):
    module = decoder(norm_first=norm_first, memory_dim=memory_dim)
    inputs = [tokens()] if memory_dim is None else [tokens(), tokens(length=4, width=MEMORY)]

    def in_parts(x, memory=None):
        states, parts = module.new_states(2), []
        for part in x.split(cuts, dim=1):
            part, states = module(part, memory, states=states)
            parts.append(part)
        assert [state.count.tolist() for state in states] == [[7, 7]] * 2
        return torch.cat(parts, 1)

    whole, split = with_gradients(module, inputs), with_gradients(in_parts, inputs)
    torch.testing.assert_close(split, whole, rtol=1e-9, atol=1e-11)


def test_left_padded_prompts_decode_as_alone():
    module, positions = decoder(), SinusoidalPositions(WIDTH)
    x, mask = tokens(), padding("left", (6, 2), 6)
    prompt = positions(x[:, :6], token_positions(mask))
    _, states = module(prompt, mask=mask, states=module.new_states(2))
    new = token_positions(torch.ones(2, 1, dtype=torch.bool), past=states[0].count)
    last, _ = module(positions(x[:, 6:], new), states=states)
    torch.testing.assert_close(last[:1], module(positions(x[:1]))[:, 6:], rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(last[1:], module(positions(x[1:, 4:]))[:, 2:], rtol=1e-11, atol=1e-12)


@NORMS
@pytest.mark.parametrize("memory_dim", [None, MEMORY])
def test_gradients_reach_every_parameter(norm_first, memory_dim):
    options = {"norm_first": norm_first, "activation": "relu"}
    if memory_dim is None:
        module = encoder(**options)
        result = module(tokens())
    else:
        module = decoder(**options, memory_dim=memory_dim)
        result = module(tokens(), tokens(length=4, width=memory_dim))
    (result * torch.randn_like(result)).sum().backward()
    assert all(p.grad is not None and p.grad.norm() > 1e-6 for p in module.parameters())


def test_options_reach_their_parts():
    layer = FlowDecoderLayer(
        WIDTH,
        HEADS,
        20,
        memory_dim=MEMORY,
        head_dim=6,
        dropout=0.3,
        activation_dropout=0.1,
        eps=1e-3,
        attention_bias=False,
    )
    for attention in (layer.attention, layer.cross_attention):
        assert (attention.head_dim, attention.dropout.p, attention.q_proj.bias) == (6, 0.3, None)
    assert (layer.mlp.dropout.p, layer.mlp.activation_dropout.p, layer.mlp.linear1.out_features) == (0.3, 0.1, 20)
    assert {norm.eps for norm in (layer.attention_norm, layer.cross_norm, layer.mlp_norm)} == {1e-3}
    plain = FlowEncoderLayer(WIDTH, HEADS, dropout=0.3)
    assert (plain.mlp.activation_dropout.p, plain.mlp.linear1.out_features) == (0.3, 4 * WIDTH)


@pytest.mark.parametrize("kind", [FlowEncoderLayer, FlowDecoderLayer])
def test_dtype_and_device_reach_every_parameter(kind):
    options = {"memory_dim": MEMORY} if kind is FlowDecoderLayer else {}
    layer = kind(WIDTH, HEADS, device="meta", dtype=torch.bfloat16, **options)
    assert {(p.device.type, p.dtype) for p in layer.parameters()} == {("meta", torch.bfloat16)}


def test_dropout_is_off_in_evaluation():
    module, x = encoder(dropout=0.5), tokens()
    assert torch.equal(module(x), module(x))
    module.train()
    assert not torch.equal(module(x), module(x))


def test_blocks_compile_as_one_graph():
    torch.compiler.reset()
    x, memory, mask = tokens(), tokens(length=4, width=MEMORY), padding("left", (7, 4), 7)
    module = encoder(layers=1)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, mask=mask), module(x, mask=mask), rtol=1e-11, atol=1e-12)
    module = decoder(layers=1, memory_dim=MEMORY)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, memory, mask=mask), module(x, memory, mask=mask), rtol=1e-11, atol=1e-12)
    states = compiled(x, memory, states=module.new_states(2))[1]
    expected = module(x, memory, states=module.new_states(2))[1]
    torch.testing.assert_close([s.memory for s in states], [s.memory for s in expected], rtol=1e-11, atol=1e-12)


def test_a_memory_goes_with_memory_dim():
    with pytest.raises(ValueError, match="got no memory, but the layer was built with memory_dim"):
        decoder(memory_dim=MEMORY)(tokens())
    with pytest.raises(ValueError, match=r"got a memory, but .* without memory_dim"):
        decoder()(tokens(), tokens())


def test_states_go_with_layers():
    module = decoder()
    with pytest.raises(ValueError, match="got 1 states for 2 layers"):
        module(tokens(), states=module.new_states(2)[:1])


@pytest.mark.parametrize("width", [1, 2, 7, 8])
@pytest.mark.parametrize("base", [10000.0, 100.0])
def test_sinusoids_by_hand(width, base):
    table = SinusoidalPositions(width, base)(torch.zeros(2, 50, width, dtype=torch.float64))
    for p in range(50):
        for i in range(width):
            angle = p / base ** ((i - i % 2) / width)
            expected = math.cos(angle) if i % 2 else math.sin(angle)
            assert table[1, p, i].item() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("width", [1, 2, 3, 7, 8])
@pytest.mark.parametrize("base", [10000.0, 100.0])
def test_sinusoids_of_fairseq_by_hand(width, base):
    """Half of the width is sines, half cosines; wavelengths from 2π to 2π·base; the first token stands at 2."""
    table = FairseqPositions(width, base)(torch.zeros(2, 50, width, dtype=torch.float64))
    half = width // 2
    for p in range(50):
        for i in range(width):
            angle = (p + 2) / base ** (i % max(half, 1) / max(half - 1, 1))
            expected = 0.0 if i >= 2 * half else math.sin(angle) if i < half else math.cos(angle)
            assert table[1, p, i].item() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sinusoids_of_any_length_are_added_in_the_dtype_of_the_tokens(dtype):
    positions, far = SinusoidalPositions(8), torch.tensor([0, 3, 100_000])
    exact = positions(torch.ones(1, 3, 8, dtype=torch.float64), far)
    result = positions(torch.ones(1, 3, 8, dtype=dtype), far)
    assert result.dtype == dtype
    eps = torch.finfo(dtype).eps
    # at 10⁵ the angle itself is rounded
    torch.testing.assert_close(result.double(), exact, rtol=2 * eps, atol=2 * eps + 1e5 * 2**-23)


def test_sinusoids_have_no_parameters():
    assert not SinusoidalPositions(8).state_dict()


def learned(length=16, width=WIDTH) -> LearnedPositions:
    return randomized(LearnedPositions(length, width), 0.5)


POSITIONS = pytest.mark.parametrize(
    "build",
    [lambda: SinusoidalPositions(WIDTH), lambda: FairseqPositions(WIDTH), learned],
    ids=["sinusoidal", "fairseq", "learned"],
)


@POSITIONS
def test_positions_of_left_padding_equal_alone(build):
    module, x, mask = build(), tokens(3), padding("left", (7, 4, 1), 7)
    shifted = module(x, token_positions(mask))
    for row in range(3):
        assert torch.equal(shifted[row, mask[row]], module(x[row, mask[row]][None])[0])


@POSITIONS
def test_positions_may_be_shared_by_the_batch(build):
    module, x = build(), tokens()
    assert torch.equal(module(x, torch.arange(7)), module(x))
    assert torch.equal(module(x[:, 3:], torch.arange(3, 7)), module(x)[:, 3:])


def test_token_positions_count_on_from_the_past():
    mask = torch.tensor([[False, True, True], [True, True, True]])
    assert token_positions(mask, past=torch.tensor([10, 2])).tolist() == [[10, 10, 11], [2, 3, 4]]


def test_learned_positions_by_hand():
    module, x = learned(), tokens()
    torch.testing.assert_close(module(x), x + module.weight[:7])
    index = torch.tensor([[15, 0, 3, 3, 1, 2, 9]] * 2)
    torch.testing.assert_close(module(x, index), x + module.weight[index])
    module(x, index).sum().backward()
    assert module.weight.grad[:, 0].nonzero().flatten().tolist() == [0, 1, 2, 3, 9, 15]


def test_learned_positions_start_small():
    module = LearnedPositions(200, 50, std=0.1, dtype=torch.float64)
    assert module.weight.dtype == torch.float64
    assert module.weight.std().item() == pytest.approx(0.1, rel=0.05)
    assert module.weight.mean().abs() < 0.005


def test_a_learned_table_ends():
    module = learned(length=6)
    for arguments in ((tokens(),), (tokens(length=2), torch.tensor([0, 6]))):
        with pytest.raises(ValueError, match=r"got 7 positions, but there are only 6.*SinusoidalPositions"):
            module(*arguments)


@pytest.mark.parametrize(
    ("error", "arguments", "message"),
    [
        (ValueError, (tokens(width=5),), r"\(batch, length, 12\), got \(2, 7, 5\)"),
        (ValueError, (tokens()[0],), r"\(batch, length, 12\), got \(7, 12\)"),
        (TypeError, (tokens(), torch.ones(7)), "must be integers, got torch.float32"),
        (TypeError, (tokens(), torch.ones(2, 7).bool()), r"For a mask pass token_positions\(mask\)"),
        (ValueError, (tokens(), torch.arange(6)), r"must have shape \(7,\) or \(2, 7\), got \(6,\)"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@POSITIONS
def test_positions_refuse(build, error, arguments, message):
    with pytest.raises(error, match=message):
        build()(*arguments)
