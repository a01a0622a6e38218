"""FlowAttention: the projections around the functional op, its masks, its state, and what it refuses."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import VARIANTS, oracle, randomized, with_gradients
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from flowformer import FlowAttention, FlowState, FlowVariant, flow_maps
from flowformer.baselines.softmax import SoftmaxAttention
from flowformer.nn import RivalAttention, build_attention, independent_sinks, record_maps
from flowformer.nn.packing import Packing
from flowformer.ops.variant import ABLATIONS

WIDTH, HEADS = 12, 3


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def build(**options) -> FlowAttention:
    """With biases that are not zero, so that a forgotten one shows."""
    module = FlowAttention(WIDTH, HEADS, **{"dtype": torch.float64, **options})
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return module


def tokens(batch=2, length=7, width=WIDTH, dtype=torch.float64) -> torch.Tensor:
    return torch.randn(batch, length, width, dtype=dtype)


def by_hand(module, query, key, value, **options):
    heads = [
        F.linear(x, p.weight, p.bias).view(*x.shape[:2], module.num_heads, module.head_dim).transpose(1, 2)
        for x, p in zip((query, key, value), (module.q_proj, module.k_proj, module.v_proj), strict=True)
    ]
    result = oracle(*heads, is_causal=module.is_causal, variant=module.variant, **options)
    joined = result.transpose(1, 2).reshape(*query.shape[:2], -1)
    return F.linear(joined, module.out_proj.weight, module.out_proj.bias)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"bias": False}, {"head_dim": 5}, {"variant": "core"}, {"scale": 0.3}], ids=str
)
def test_equals_projections_around_the_op(is_causal, options):
    module, x = build(is_causal=is_causal, **options), tokens()
    parameters = tuple(module.parameters())
    result, expected = module(x), by_hand(module, x, x, x, scale=options.get("scale", 1.0))
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)
    cotangent = torch.randn_like(result)
    grads, truth = (torch.autograd.grad(y, parameters, cotangent) for y in (result, expected))
    torch.testing.assert_close(grads, truth, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", VARIANTS)
def test_passes_the_variant_on(name):
    module, x = build(variant=VARIANTS[name]), tokens()
    torch.testing.assert_close(module(x), by_hand(module, x, x, x), rtol=1e-10, atol=1e-12)


def test_cross_attention_with_widths_of_its_own():
    module = build(kdim=5, vdim=9, head_dim=6)
    query, key, value = tokens(), tokens(length=4, width=5), tokens(length=4, width=9)
    assert module.k_proj.weight.shape == (18, 5)
    assert module.v_proj.weight.shape == (18, 9)
    torch.testing.assert_close(module(query, key, value), by_hand(module, query, key, value))


def test_the_value_of_cross_attention_is_the_key_unless_given():
    module, query, memory = build(), tokens(), tokens(length=4)
    assert torch.equal(module(query, memory), module(query, memory, memory))


def test_naming_the_query_as_key_is_self_attention():
    module, x = build(is_causal=True), tokens()
    mask = torch.tensor([[True] * 7, [False] * 2 + [True] * 5])
    assert torch.equal(module(x, key_mask=mask), module(x, x, x, query_mask=mask))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("mask_name", ["query_mask", "key_mask"])
def test_padded_equals_alone(is_causal, side, mask_name):
    module, lengths = build(is_causal=is_causal), (7, 4, 1)
    x = tokens(batch=3)
    place = torch.arange(7)
    mask = torch.stack([place < n if side == "right" else place >= 7 - n for n in lengths])
    x[~mask] = torch.nan
    padded = module(x, **{mask_name: mask})
    for row, keep in enumerate(mask):
        alone = module(x[row, keep][None])[0]
        torch.testing.assert_close(padded[row, keep], alone, rtol=1e-12, atol=1e-12)
        assert torch.equal(padded[row, ~keep], module.out_proj.bias.expand(int((~keep).sum()), -1))


def test_two_masks_of_self_attention_both_leave_out():
    module, x = build(), tokens(batch=1)
    left, right = torch.arange(7)[None] >= 2, torch.arange(7)[None] < 6
    both = module(x, query_mask=left, key_mask=right)
    torch.testing.assert_close(both[:, 2:6], module(x[:, 2:6]), rtol=1e-12, atol=1e-12)


def test_masks_of_cross_attention_stay_apart():
    module, query, memory = build(), tokens(batch=1), tokens(batch=1, length=5)
    query_mask, key_mask = torch.arange(7)[None] < 6, torch.arange(5)[None] >= 2
    result = module(query, memory, query_mask=query_mask, key_mask=key_mask)
    torch.testing.assert_close(result[:, :6], module(query[:, :6], memory[:, 2:]), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("cuts", [(1, 1, 1, 1, 1, 1, 1), (3, 4), (7,), (0, 6, 1)], ids=str)
def test_split_with_state_equals_whole(cuts):
    module, x = build(is_causal=True), tokens()

    def in_parts(x):
        state, parts = module.new_state(2), []
        for part in x.split(cuts, dim=1):
            result, state = module(part, state=state)
            parts.append(result)
        return torch.cat(parts, 1)

    whole, split = with_gradients(module, [x]), with_gradients(in_parts, [x])
    torch.testing.assert_close(split, whole, rtol=1e-10, atol=1e-12)


def test_left_padded_prompts_decode_as_alone():
    module, x = build(is_causal=True), tokens(batch=2, length=6)
    mask = torch.tensor([[True] * 5, [False] * 3 + [True] * 2])
    _, state = module(x[:, :5], key_mask=mask, state=module.new_state(2))
    assert state.count.tolist() == [5, 2]
    last, _ = module(x[:, 5:], state=state)
    torch.testing.assert_close(last[0], module(x[:1])[0, 5:], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(last[1], module(x[1:, 3:])[0, 2:], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("dtype", "kept"), [(torch.float64, torch.float64), (torch.float32, torch.float32), (torch.bfloat16, torch.float32)]
)
def test_new_state_fits_the_module(dtype, kept):
    module = build(is_causal=True, head_dim=5, dtype=dtype)
    state = module.new_state(4)
    assert isinstance(state, FlowState)
    assert state.memory.shape == (4, HEADS, 5, 5)
    assert state.dtype == kept
    result, after = module(tokens(batch=4, dtype=dtype), state=state)
    assert (result.dtype, after.dtype, after.count.tolist()) == (dtype, kept, [7] * 4)


def test_independent_sinks_hides_the_other_queries():
    query, memory = tokens(), tokens(length=4)
    apart, together = build(variant=independent_sinks("rl")), build(variant="rl")
    assert apart.variant == FlowVariant(competition="none", allocation="none", clamp=10.0)
    torch.testing.assert_close(apart(query, memory)[:, :3], apart(query[:, :3], memory), rtol=1e-12, atol=1e-12)
    assert not torch.allclose(together(query, memory)[:, :3], together(query[:, :3], memory), atol=1e-4)


def test_dropout_acts_on_the_result_in_training_only():
    module, x = build(dropout=0.5), tokens()
    kept = module.train()(x)
    result = module.eval()(x)
    dropped = kept == 0
    assert 0.2 < dropped.double().mean() < 0.8
    torch.testing.assert_close(kept[~dropped], 2 * result[~dropped])


def test_dtype_and_device_reach_every_parameter():
    module = FlowAttention(WIDTH, HEADS, kdim=5, device="meta", dtype=torch.bfloat16)
    assert {(p.device.type, p.dtype) for p in module.parameters()} == {("meta", torch.bfloat16)}
    assert module.to_empty(device="cpu").reset_parameters() is None
    assert module(*(tokens(width=w, dtype=torch.bfloat16) for w in (WIDTH, 5, WIDTH))).dtype == torch.bfloat16


def test_reset_parameters_starts_over():
    module = build()
    module.reset_parameters()
    bound = (6 / (WIDTH + WIDTH)) ** 0.5
    for projection in (module.q_proj, module.k_proj, module.v_proj, module.out_proj):
        assert not projection.bias.any()
        assert 0.8 * bound < projection.weight.abs().max() <= bound


def test_state_dict_round_trip():
    module, x = build(kdim=5, bias=False), tokens()
    other = build(kdim=5, bias=False)
    key, value = tokens(width=5), tokens()
    assert list(module.state_dict()) == [f"{name}_proj.weight" for name in ("q", "k", "v", "out")]
    assert not torch.equal(other(x, key, value), module(x, key, value))
    other.load_state_dict(module.state_dict())
    assert torch.equal(other(x, key, value), module(x, key, value))


@pytest.mark.parametrize("is_causal", [False, True])
def test_autocast_rounds_projections_and_not_sums(is_causal):
    module, x = build(is_causal=is_causal, dtype=torch.float32), tokens(length=300, dtype=torch.float32)
    exact = module(x)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = module(x)
        rounded.float().square().sum().backward()
    assert rounded.dtype == torch.bfloat16
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in module.parameters())
    torch.testing.assert_close(rounded.float(), exact, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("is_causal", [False, True])
def test_compiles_as_one_graph(is_causal):
    module, x = build(is_causal=is_causal), tokens()
    mask = torch.tensor([[True] * 7, [False] * 2 + [True] * 5])
    torch.compiler.reset()
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    parameters = tuple(module.parameters())
    results = [f(x, key_mask=mask) for f in (compiled, module)]
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)
    grads = [torch.autograd.grad(y.square().sum(), parameters) for y in results]
    torch.testing.assert_close(*grads, rtol=1e-10, atol=1e-12)


def test_decoding_compiles_as_one_graph():
    module, x = build(is_causal=True), tokens()
    torch.compiler.reset()
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    state, parts = module.new_state(2), []
    for part in x.split(1, dim=1):
        result, state = compiled(part, state=state)
        parts.append(result)
    torch.testing.assert_close(torch.cat(parts, 1), module(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((10, 3), {}, r"embed_dim 10 is not divisible by num_heads 3.*head_dim"),
        ((0, 3), {}, r"must be positive, got 0, 3 and None"),
        ((12, 0), {}, r"must be positive, got 12, 0 and None"),
        ((12, 3), {"head_dim": 0}, r"must be positive, got 12, 3 and 0"),
        ((12, 3), {"variant": "vison"}, r"'vison' \(did you mean 'vision'\?\)"),
        ((12, 3), {"dropout": 1.5}, r"between 0 and 1, but got 1.5"),
    ],
    ids=str,
)
def test_refuses_to_be_built(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        FlowAttention(*arguments, **options)


def test_a_variant_is_a_variant_or_a_name():
    with pytest.raises(TypeError, match="FlowVariant or the name of one, got dict"):
        FlowAttention(12, 3, variant={"clamp": 1.0})


X = torch.zeros(2, 7, WIDTH, dtype=torch.float64)


@pytest.mark.parametrize(
    ("options", "arguments", "message"),
    [
        ({}, {"query": X, "value": X}, "got a value but no key"),
        ({}, {"query": X, "state": FlowState.empty(2, HEADS, 4)}, "only causal attention has.*is_causal=True"),
        ({"is_causal": True}, {"query": X, "key": X + 1}, "causal attention is self-attention"),
        ({}, {"query": X[..., :-1]}, r"\(embed_dim, kdim, vdim\) = \(12, 12, 12\), got shapes \(2, 7, 11\)"),
        ({"kdim": 5}, {"query": X, "key": X + 1}, r"\(12, 5, 12\), got shapes"),
        ({}, {"query": X[0]}, r"must all have 3 dimensions, got shapes \(7, 12\)"),
        ({}, {"query": X, "key": X[0]}, r"must all have 3 dimensions"),
        (
            {},
            {"query": X, "key_mask": torch.ones(2, 6, dtype=torch.bool)},
            r"must have shape .* \(2, 7\), got \(2, 6\)",
        ),
        ({}, {"query": X, "key": X[:1]}, "same batch size"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refuses_input(options, arguments, message):
    with pytest.raises(ValueError, match=message):
        build(**options)(**arguments)


def test_refuses_a_state_of_another_shape():
    module = build(is_causal=True)
    with pytest.raises(ValueError, match=r"\(2, 3, 4, 4\)"):
        module(X, state=module.new_state(1))


def test_recorded_maps_are_those_of_the_call():
    model = nn.Sequential(FlowAttention(24, 4), FlowAttention(24, 4, is_causal=True)).double()
    x = torch.randn(2, 9, 24, dtype=torch.float64)
    with record_maps(model) as maps:
        result = model(x)
    assert len(maps) == 2
    first = model[0]
    q, k = (proj(x).unflatten(-1, (4, 6)).transpose(1, 2) for proj in (first.q_proj, first.k_proj))
    assert torch.equal(maps[0].competition, flow_maps(q, k).competition)
    assert torch.equal(result, model(x))
    assert len(maps) == 2, "nothing is recorded after the block"


def test_recording_goes_on_after_an_inner_block():
    attention, x = FlowAttention(24, 4), torch.randn(2, 9, 24)
    with record_maps(attention) as outer:
        with record_maps(attention) as inner:
            attention(x)
        attention(x[:1])
    assert [maps.competition.shape[0] for maps in inner + outer] == [2, 1]


def test_maps_that_are_not_recorded():
    attention, x = FlowAttention(12, 3, is_causal=True), torch.randn(1, 5, 12)
    with record_maps(attention) as maps:
        with pytest.raises(NotImplementedError, match="maps of a sequence with a state"):
            attention(x, state=attention.new_state(1))
        with pytest.raises(NotImplementedError, match="maps of packed sequences"):
            attention(x, cu_seqlens=torch.tensor([0, 2, 5]))
        attention.group = object()
        with pytest.raises(NotImplementedError, match="maps of a sequence cut over ranks"):
            attention(x)
    assert not maps


def test_recording_a_model_without_flows_is_an_error():
    with pytest.raises(ValueError, match="has no Flow-Attention"), record_maps(nn.Linear(3, 3)):
        pass


@pytest.mark.parametrize("name", ABLATIONS)
def test_ablations_by_name(name):
    ablated = build_attention(name, 24, 4, variant="rl").variant
    assert ablated != FlowVariant.named("rl")
    assert ablated.clamp == 10
    x = torch.randn(2, 9, 24)
    assert build_attention(name, 24, 4)(x).shape == x.shape


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("rotary_base", [None, 100.0])
def test_shared_key_heads_are_repeated_ones(is_causal, rotary_base):
    options = {"is_causal": is_causal, "rotary_base": rotary_base, "head_dim": 4, "dtype": torch.float64}
    grouped = randomized(FlowAttention(12, 6, num_kv_heads=2, **options), 0.5)
    assert grouped.k_proj.weight.shape == grouped.v_proj.weight.shape == (8, 12)
    whole, weights = FlowAttention(12, 6, **options).eval(), grouped.state_dict()
    for name in ("k_proj", "v_proj"):
        for part in ("weight", "bias"):
            heads = weights[f"{name}.{part}"].unflatten(0, (2, 4))
            weights[f"{name}.{part}"] = heads.repeat_interleave(3, 0).flatten(0, 1)
    whole.load_state_dict(weights, strict=True)
    x, mask = torch.randn(2, 7, 12, dtype=torch.float64), torch.arange(7) < torch.tensor([[7], [4]])
    torch.testing.assert_close(grouped(x, key_mask=mask), whole(x, key_mask=mask), rtol=1e-11, atol=1e-12)
    with record_maps(grouped) as maps:
        grouped(x)
    assert maps[0].competition.shape == (2, 6, 7)
    assert "num_kv_heads=2" in repr(grouped)
    if is_causal:
        first, state = grouped(x[:, :3], state=grouped.new_state(2))
        second, _ = grouped(x[:, 3:], state=state)
        torch.testing.assert_close(torch.cat([first, second], 1), whole(x), rtol=1e-11, atol=1e-12)


def test_rivals_share_key_heads():
    attention = RivalAttention(12, 6, name="softmax", num_kv_heads=2)
    assert attention.k_proj.weight.shape == (4, 12)
    assert attention(torch.randn(2, 5, 12)).shape == (2, 5, 12)


@pytest.mark.parametrize("number", [0, 4, 7])
def test_key_heads_divide_query_heads(number):
    with pytest.raises(ValueError, match=f"num_kv_heads must divide num_heads 6, got {number}"):
        FlowAttention(12, 6, num_kv_heads=number)


class TestRotary:
    def build(self, **options) -> FlowAttention:
        return randomized(FlowAttention(12, 3, rotary_base=50.0, **options), 0.5)

    def test_is_a_rotation_before_the_op(self):
        module, x = self.build(), torch.randn(2, 7, 12, dtype=torch.float64)
        q, k, v = (getattr(module, f"{name}_proj")(x).unflatten(-1, (3, 4)).transpose(1, 2) for name in ("q", "k", "v"))
        angle = torch.arange(7.0, dtype=torch.float64)[:, None] / 50.0 ** torch.tensor([0, 0.5], dtype=torch.float64)
        turn = torch.polar(torch.ones_like(angle), angle)
        q, k = (torch.complex(*y.chunk(2, -1)) * turn for y in (q, k))
        q, k = (torch.cat([y.real, y.imag], -1) for y in (q, k))
        expected = module.out_proj(oracle(q, k, v).transpose(1, 2).flatten(2))
        torch.testing.assert_close(module(x), expected, rtol=1e-11, atol=1e-12)
        shuffled = torch.randperm(7)
        assert not torch.allclose(module(x[:, shuffled]), module(x)[:, shuffled])

    @pytest.mark.parametrize("is_causal", [False, True])
    @pytest.mark.parametrize("side", ["left", "right"])
    def test_padded_equals_alone(self, is_causal, side):
        module, x = self.build(is_causal=is_causal), torch.randn(2, 7, 12, dtype=torch.float64)
        place = torch.arange(7)
        mask = torch.stack([place < 7, place < 4 if side == "right" else place >= 3])
        padded = module(x, key_mask=mask)
        torch.testing.assert_close(padded[1, mask[1]], module(x[1:, mask[1]])[0], rtol=1e-11, atol=1e-12)

    @pytest.mark.parametrize("padded", [False, True])
    def test_split_equals_whole(self, padded):
        module, x = self.build(is_causal=True), torch.randn(2, 7, 12, dtype=torch.float64)
        mask = torch.arange(7) >= torch.tensor([[0], [2]]) if padded else torch.ones(2, 7, dtype=torch.bool)
        results, state = [], module.new_state(2)
        for part, valid in zip(x.split([3, 1, 3], 1), mask.split([3, 1, 3], 1), strict=True):
            result, state = module(part, key_mask=valid if padded else None, state=state)
            results.append(result)
        whole = module(x, key_mask=mask)
        torch.testing.assert_close(torch.cat(results, 1), whole, rtol=1e-11, atol=1e-12)

    def test_refuses(self):
        x = torch.randn(1, 5, 12, dtype=torch.float64)
        with pytest.raises(ValueError, match="head_dim must be even, got 3"):
            FlowAttention(12, 4, rotary_base=100.0)
        with pytest.raises(ValueError, match="must be positive, got -1"):
            FlowAttention(12, 3, rotary_base=-1.0)
        with pytest.raises(ValueError, match="rotary positions"):
            self.build()(x, torch.randn(1, 5, 12, dtype=torch.float64))


def test_gradients_of_each_sample():
    module, x = randomized(FlowAttention(12, 3), 0.5), torch.randn(3, 5, 12, dtype=torch.float64)
    parameters = dict(module.named_parameters())

    def loss(parameters, sample):
        return torch.func.functional_call(module, parameters, (sample[None],)).square().sum()

    found = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x)
    for i in range(3):
        expected = torch.func.grad(loss)(parameters, x[i])
        torch.testing.assert_close({name: each[i] for name, each in found.items()}, expected, rtol=1e-10, atol=1e-12)


def test_maps_on_the_meta_device():
    module = FlowAttention(12, 3, device="meta")
    with record_maps(module) as maps:
        module(torch.empty(2, 5, 12, device="meta"))
    assert maps[0].competition.shape == (2, 3, 5)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("rotary_base", [None, 100.0])
def test_packed_sequences_are_a_loop_over_them(is_causal, rotary_base):
    torch.manual_seed(0)
    attention = FlowAttention(16, 4, num_kv_heads=2, is_causal=is_causal, rotary_base=rotary_base, dtype=torch.float64)
    x, bounds = torch.randn(1, 12, 16, dtype=torch.float64), [0, 3, 3, 4, 10]
    result = attention(x, cu_seqlens=torch.tensor(bounds), max_seqlen=7)
    for start, stop in pairwise(bounds):
        torch.testing.assert_close(result[:, start:stop], attention(x[:, start:stop]))
    assert result.shape == x.shape
    assert (result[:, 10:] == attention.out_proj.bias).all()


@pytest.mark.parametrize("name", ["softmax", "cosformer", "linformer", "local"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_packed_sequences_of_a_rival_are_a_loop_over_them(name, is_causal):
    if name == "linformer" and is_causal:
        pytest.skip("linformer has no causal form")
    torch.manual_seed(0)
    options = {"num_kv_heads": 2, "is_causal": is_causal, "max_length": 7, "dtype": torch.float64}
    attention = RivalAttention(16, 4, name=name, **options).eval()
    x, bounds = torch.randn(1, 12, 16, dtype=torch.float64), [0, 3, 3, 4, 10]
    result = attention(x, cu_seqlens=torch.tensor(bounds), max_seqlen=7)
    for start, stop in pairwise(bounds):
        torch.testing.assert_close(result[:, start:stop], attention(x[:, start:stop]))
    assert result.shape == x.shape
    assert (result[:, 10:] == attention.out_proj.bias).all()


def test_packed_sequences_of_a_rival_are_padded_to_the_longest():
    """Not to the length of the row, for which it may have no parameters."""
    attention, x = RivalAttention(16, 4, name="linformer", max_length=6), torch.randn(1, 10, 16)
    result = attention(x, cu_seqlens=torch.tensor([0, 6, 10]))
    torch.testing.assert_close(result, torch.cat([attention(x[:, :6]), attention(x[:, 6:])], 1))


@pytest.mark.parametrize(
    ("bounds", "longest", "message"),
    [
        ([0, 9], None, "cu_seqlens_q must be an int32 or int64 tensor, got list"),
        (torch.tensor([0.0, 9.0]), None, r"cu_seqlens_q must be an int32 or int64 tensor, got torch\.float32"),
        (torch.tensor([], dtype=torch.int64), None, r"cu_seqlens_q must have shape \(sequences \+ 1,\), got \(0,\)"),
        (torch.tensor([[0, 9]]), None, r"cu_seqlens_q must have shape \(sequences \+ 1,\), got \(1, 2\)"),
        (torch.tensor([0, 9]), 9.0, "max_seqlen_q must be an int, got float"),
    ],
)
def test_bounds_that_a_rival_cannot_read(bounds, longest, message):
    attention = RivalAttention(16, 4, name="linear")
    with pytest.raises((TypeError, ValueError), match=message):
        attention(torch.randn(1, 9, 16), cu_seqlens=bounds, max_seqlen=longest)


def test_lengths_of_packed_sequences_are_not_captured(monkeypatch):
    """The graph would replay them for other sequences; if earlier calls read them, nothing else would stop it."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(NotImplementedError, match="got cu_seqlens while a CUDA graph is captured"):
        Packing.from_bounds(SimpleNamespace(is_cuda=True), 9, 9)


def test_softmax_within_packed_sequences_does_not_pad(monkeypatch):
    """As in low precision on a GPU; the causal form exists only there."""
    attention = RivalAttention(16, 4, name="softmax", num_kv_heads=2, dtype=torch.float64)
    x, bounds = torch.randn(1, 12, 16, dtype=torch.float64, requires_grad=True), torch.tensor([0, 3, 4, 10])
    padded = attention(x, cu_seqlens=bounds)
    monkeypatch.setattr(SoftmaxAttention, "attends_packed", lambda *args: True)
    with sdpa_kernel(SDPBackend.MATH), patch.object(Packing, "unpack", side_effect=AssertionError):
        packed = attention(x, cu_seqlens=bounds)
    gradients = (torch.autograd.grad(result.square().sum(), x)[0] for result in (packed, padded))
    torch.testing.assert_close(packed, padded)
    torch.testing.assert_close(*gradients)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("head_dim", [16, 64, 256])
def test_softmax_within_packed_sequences_on_a_gpu(is_causal, head_dim):
    torch.manual_seed(0)
    attention = RivalAttention(64, 4, head_dim=head_dim, name="softmax", is_causal=is_causal).cuda()
    x, bounds = torch.randn(1, 800, 64, device="cuda"), torch.tensor([0, 300, 301, 700], device="cuda")
    expected = attention(x, cu_seqlens=bounds, max_seqlen=400)
    with torch.autocast("cuda", torch.bfloat16), patch.object(Packing, "unpack") as unpack:
        result = attention(x, cu_seqlens=bounds, max_seqlen=400)
    assert not unpack.called
    assert (result - expected).norm() < 0.01 * expected.norm()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_checkpoints_of_softmax_within_packed_sequences_on_a_gpu():
    """The nested tensors inside are computed again in the backward pass."""
    torch.manual_seed(0)
    attention = RivalAttention(64, 4, name="softmax").cuda()
    x, bounds = torch.randn(1, 700, 64, device="cuda", requires_grad=True), torch.tensor([0, 300, 700], device="cuda")
    gradients = []
    for forward in (attention, partial(checkpoint, attention, use_reentrant=False)):
        with torch.autocast("cuda", torch.bfloat16):
            result = forward(x, cu_seqlens=bounds, max_seqlen=400)
        gradients.append(torch.autograd.grad(result.float().square().sum(), x)[0])
    assert (gradients[1] - gradients[0]).norm() < 0.01 * gradients[0].norm()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_softmax_pads_packed_sequences_if_flash_attention_is_off():
    attention = RivalAttention(64, 4, name="softmax", dtype=torch.bfloat16, device="cuda")
    x, bounds = torch.randn(1, 800, 64, device="cuda").bfloat16(), torch.tensor([0, 300, 301, 700], device="cuda")
    expected = attention(x, cu_seqlens=bounds, max_seqlen=400)
    with sdpa_kernel(SDPBackend.MATH), patch.object(SoftmaxAttention, "attend_packed") as packed:
        result = attention(x, cu_seqlens=bounds, max_seqlen=400)
    assert not packed.called
    assert (result - expected).norm() < 0.01 * expected.norm()


@pytest.mark.parametrize(("capability", "is_on"), [((7, 5), True), ((8, 0), False), ((9, 0), True)])
def test_softmax_attends_within_packed_sequences_where_flash_attention_runs(monkeypatch, capability, is_on):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.backends.cuda, "flash_sdp_enabled", lambda: is_on)
    heads = SimpleNamespace(is_cuda=True, device="cuda:0", dtype=torch.float16, shape=(1, 4, 9, 64))
    assert SoftmaxAttention().attends_packed(heads, heads, [4, 5]) == (capability >= (8, 0) and is_on)


@pytest.mark.parametrize(
    ("dtype", "widths", "lengths"),
    [
        (torch.float32, (64, 64), [4, 5]),
        (torch.float16, (60, 60), [4, 5]),
        (torch.float16, (264, 264), [4, 5]),
        (torch.float16, (64, 32), [4, 5]),
        (torch.float16, (64, 64), [9, 0]),
        (torch.float16, (64, 64), []),
    ],
)
def test_softmax_pads_what_flash_attention_does_not_take(monkeypatch, dtype, widths, lengths):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.backends.cuda, "flash_sdp_enabled", lambda: True)
    query, value = (SimpleNamespace(is_cuda=True, device="cuda:0", dtype=dtype, shape=(1, 4, 9, x)) for x in widths)
    assert not SoftmaxAttention().attends_packed(query, value, lengths)


def test_lengths_are_read_for_each_call_on_a_cpu():
    """Where bounds may share memory with a NumPy array."""
    attention, x = RivalAttention(16, 4, name="linear"), torch.randn(1, 9, 16)
    bounds = np.array([0, 3, 9])
    shared = torch.from_numpy(bounds)
    attention(x, cu_seqlens=shared)
    bounds[1] = 1  # the second sequence is longer than those before
    torch.testing.assert_close(attention(x, cu_seqlens=shared)[:, 1:], attention(x[:, 1:]))


@pytest.mark.parametrize("name", ["flow", "linear"])
def test_packed_sequences_are_the_query_alone(name):
    attention, x, bounds = build_attention(name, 16, 4), torch.randn(1, 5, 16), torch.tensor([0, 2, 5])
    with pytest.raises(ValueError, match="another argument"):
        attention(x, cu_seqlens=bounds, key_mask=torch.ones(1, 5, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"\(1, tokens, width\), got \(2, 5, 16\)"):
        attention(x.expand(2, 5, 16), cu_seqlens=bounds)
    with pytest.raises(ValueError, match="no cu_seqlens"):
        attention(x, max_seqlen=5)
    with pytest.raises(ValueError, match="beyond the 5 tokens"):
        attention(x, cu_seqlens=torch.tensor([0, 2, 6]), max_seqlen=6)


def test_packed_sequences_have_no_maps():
    attention, x, bounds = FlowAttention(16, 4), torch.randn(1, 5, 16), torch.tensor([0, 2, 5])
    with record_maps(attention), pytest.raises(NotImplementedError, match="maps of packed"):
        attention(x, cu_seqlens=bounds)


def test_the_scale_is_that_of_every_way_to_attend():
    scaled, plain = build(is_causal=True, scale=0.3), build(is_causal=True)
    plain.load_state_dict(scaled.state_dict())
    with torch.no_grad():
        for projection in (plain.q_proj, plain.k_proj):
            projection.weight.mul_(0.3)
            projection.bias.mul_(0.3)
    x = tokens(1)

    def attend(module):
        with record_maps(module) as maps:
            whole = module(x)
        packed = module(x, cu_seqlens=torch.tensor([0, 3, 7], dtype=torch.int32))
        continued, _ = module(x, state=module.new_state(1))
        return whole, packed, continued, *maps[0]

    torch.testing.assert_close(attend(scaled), attend(plain), rtol=1e-12, atol=1e-12)
    assert "scale=0.3" in repr(scaled)
