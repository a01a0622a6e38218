"""replace_attention: Flow-Attention in models that were built with torch's attention, weights kept."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers import randomized
from torch import nn
from torch.nn.utils import parametrizations

from flowformer import FlowMultiheadAttention, FlowVariant, replace_attention
from flowformer.nn import independent_sinks

WIDTH, HEADS = 12, 4


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


class Block(nn.Module):
    """The encoder block of many vision models: pre-norm, one attention, an MLP."""

    def __init__(self):
        super().__init__()
        self.ln_1 = nn.LayerNorm(WIDTH)
        self.self_attention = nn.MultiheadAttention(WIDTH, HEADS, dropout=0.1, batch_first=True)
        self.ln_2 = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH))

    def forward(self, x):
        y = self.ln_1(x)
        y, _ = self.self_attention(y, y, y, need_weights=False)
        x = x + y
        return x + self.mlp(self.ln_2(x))


class Vision(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 4, 4)
        self.class_token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.layers = nn.Sequential(Block(), Block())
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, images):
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = self.layers(torch.cat([self.class_token.expand(len(x), -1, -1), x], 1))
        return self.head(x[:, 0])


def attentions(model):
    return [module for module in model.modules() if isinstance(module, nn.MultiheadAttention)]


def test_a_whole_model_keeps_its_parameters_and_trains_on():
    model, images = Vision(), torch.randn(4, 3, 16, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    before, softmax = dict(model.named_parameters()), model(images)
    assert replace_attention(model) is model
    after = dict(model.named_parameters())
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)
    assert all(type(module) is FlowMultiheadAttention for module in attentions(model))
    assert not torch.allclose(model(images), softmax)

    old = {name: parameter.detach().clone() for name, parameter in after.items()}
    losses = []
    for _ in range(20):
        loss = nn.functional.cross_entropy(model(images), torch.arange(4))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    assert not any(torch.equal(parameter, old[name]) for name, parameter in after.items())


def test_the_state_dict_still_fits_both():
    model = Vision()
    swapped = replace_attention(copy.deepcopy(model))
    assert list(swapped.state_dict()) == list(model.state_dict())
    model.load_state_dict(swapped.state_dict())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bias": False},
        {"kdim": 5, "vdim": 7},
        {"add_bias_kv": True, "add_zero_attn": True, "batch_first": True},
        {"dropout": 0.25, "dtype": torch.float64},
    ],
    ids=str,
)
def test_the_root_itself(options):
    old = nn.MultiheadAttention(WIDTH, HEADS, **options).eval()
    new = replace_attention(old, variant="core")
    assert type(new) is FlowMultiheadAttention
    assert new.variant == FlowVariant.named("core")
    assert not new.training
    assert list(new.state_dict()) == list(old.state_dict())
    assert all(ours is theirs for ours, theirs in zip(new.parameters(), old.parameters(), strict=True))
    for name in ("embed_dim", "num_heads", "head_dim", "dropout", "batch_first", "kdim", "vdim", "add_zero_attn"):
        assert getattr(new, name) == getattr(old, name), name

    fresh = FlowMultiheadAttention(WIDTH, HEADS, **options, variant="core").eval()
    fresh.load_state_dict(old.state_dict())
    widths = WIDTH, options.get("kdim", WIDTH), options.get("vdim", WIDTH)
    inputs = [torch.randn(6, 2, width, dtype=options.get("dtype")) for width in widths]
    torch.testing.assert_close(new(*inputs), fresh(*inputs), rtol=0, atol=0)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(("device", "dtype"), [("cpu", torch.bfloat16), ("meta", torch.float64)])
def test_dtype_device_and_mode_are_kept(training, device, dtype):
    model = replace_attention(Block().to(device, dtype).train(training))
    assert {(p.device.type, p.dtype) for p in model.parameters()} == {(device, dtype)}
    assert {module.training for module in model.modules()} == {training}


def test_frozen_parameters_stay_frozen():
    model = Block()
    model.self_attention.in_proj_weight.requires_grad_(False)
    replace_attention(model)
    assert not model.self_attention.in_proj_weight.requires_grad
    assert model.self_attention.in_proj_bias.requires_grad


def test_the_random_state_is_not_touched():
    model, state = Vision(), torch.get_rng_state()
    replace_attention(model)
    assert torch.equal(torch.get_rng_state(), state)


def test_shared_modules_stay_shared():
    block = Block()
    model = nn.ModuleDict({"first": block, "again": block, "attention": block.self_attention})
    model["tied"] = nn.MultiheadAttention(WIDTH, HEADS)
    model["tied"].in_proj_weight = block.self_attention.in_proj_weight
    replace_attention(model)
    assert model["first"] is model["again"]
    assert model["attention"] is block.self_attention
    assert type(model["attention"]) is type(model["tied"]) is FlowMultiheadAttention
    assert model["tied"] is not model["attention"]
    assert model["tied"].in_proj_weight is model["attention"].in_proj_weight


def test_what_is_replaced_already_is_left_alone():
    model = nn.ModuleList([FlowMultiheadAttention(WIDTH, HEADS, variant="rl"), nn.MultiheadAttention(WIDTH, HEADS)])
    kept = model[0]
    replace_attention(model, variant="core")
    assert model[0] is kept
    assert [module.variant.clamp for module in model] == [10.0, 1.0]


def transformer(**options) -> nn.Transformer:
    model = nn.Transformer(WIDTH, HEADS, 2, 2, 16, batch_first=True, dtype=torch.float64, **options)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    return model.eval()


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True", "ignore:The PyTorch API of nested tensors")
@torch.no_grad()
def test_an_encoder_in_evaluation_mode_runs_flow(norm_first):
    encoder = transformer(norm_first=norm_first).encoder
    x = torch.randn(2, 9, WIDTH, dtype=torch.float64)
    mask = torch.arange(9) >= torch.tensor([[9], [5]])
    softmax = encoder(x, src_key_padding_mask=mask)
    replace_attention(encoder)
    result = encoder(x, src_key_padding_mask=mask)
    with torch.enable_grad():  # needs gradients: torch never takes its fast path
        slow = encoder(x, src_key_padding_mask=mask)
    valid = ~mask
    assert torch.equal(result[valid], slow[valid])
    assert not torch.allclose(result[valid], softmax[valid], atol=1e-3)
    torch.testing.assert_close(result[1:, :5], encoder(x[1:, :5]), rtol=1e-11, atol=1e-11)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True", "ignore:The PyTorch API of nested tensors")
@torch.no_grad()
def test_a_transformer_decodes_without_seeing_the_future():
    model = replace_attention(transformer(), variant="rl")
    source, target = (torch.randn(2, n, WIDTH, dtype=torch.float64) for n in (9, 6))
    padding = torch.arange(9) >= torch.tensor([[9], [5]])

    def run(target):
        causal = nn.Transformer.generate_square_subsequent_mask(target.shape[1], dtype=torch.float64)
        return model(
            source,
            target,
            tgt_mask=causal,
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
            tgt_is_causal=True,
        )

    torch.testing.assert_close(run(target[:, :4]), run(target)[:, :4], rtol=1e-11, atol=1e-11)
    for layer in model.decoder.layers:
        assert layer.self_attn.variant == FlowVariant.named("rl")
        assert layer.multihead_attn.variant == independent_sinks("rl")
    assert all(layer.self_attn.variant == FlowVariant.named("rl") for layer in model.encoder.layers)


def test_nothing_to_replace_is_an_error():
    for model in (nn.Linear(3, 3), FlowMultiheadAttention(WIDTH, HEADS)):
        with pytest.raises(ValueError, match=f"no torch.nn.MultiheadAttention in {type(model).__name__}"):
            replace_attention(model)


def test_subclasses_are_refused_before_anything_changes():
    class Relative(nn.MultiheadAttention):
        pass

    model = nn.Sequential(nn.MultiheadAttention(WIDTH, HEADS), nn.Sequential(Relative(WIDTH, HEADS)))
    with pytest.raises(ValueError, match=r"1\.0 is a Relative, a subclass of torch.nn.MultiheadAttention"):
        replace_attention(model)
    assert type(model[0]) is nn.MultiheadAttention
    with pytest.raises(ValueError, match="the model is a Relative"):
        replace_attention(Relative(WIDTH, HEADS))


def test_parametrized_attention_is_refused():
    model = Block()
    parametrizations.weight_norm(model.self_attention, "in_proj_weight")
    with pytest.raises(ValueError, match="self_attention is a ParametrizedMultiheadAttention"):
        replace_attention(model)


def test_an_unknown_variant_changes_nothing():
    model = Block()
    with pytest.raises(ValueError, match="unknown variant 'fast'"):
        replace_attention(model, variant="fast")
    assert type(model.self_attention) is nn.MultiheadAttention


@torch.no_grad()
def test_a_memory_as_long_as_the_target_is_still_a_memory():
    """Padding of the memory says nothing about the target, whose tokens must not be left out with it."""
    layer = nn.TransformerDecoderLayer(WIDTH, 2, 16, batch_first=True, dtype=torch.float64)
    layer = replace_attention(randomized(layer, 0.5))
    target, memory = torch.randn(2, 2, 7, WIDTH, dtype=torch.float64)
    mask = torch.arange(7) >= torch.tensor([[7], [4]])
    result = layer(target, memory, memory_key_padding_mask=mask)
    torch.testing.assert_close(result[1:], layer(target[1:], memory[1:, :4]), rtol=1e-11, atol=1e-12)
