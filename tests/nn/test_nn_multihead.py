"""FlowMultiheadAttention: everything of nn.MultiheadAttention but the softmax."""

from __future__ import annotations

import inspect

import pytest
import torch
from helpers import VARIANTS, oracle, randomized
from torch import nn
from torch.func import functional_call, grad, vmap

from flowformer import FlowMultiheadAttention
from flowformer.nn import independent_sinks

WIDTH, HEADS = 12, 4
BUILDS = {
    "plain": {},
    "no bias": {"bias": False},
    "widths": {"kdim": 5, "vdim": 7},
    "widths, no bias": {"kdim": 5, "bias": False},
    "bias_kv": {"add_bias_kv": True},
    "zero": {"add_zero_attn": True},
    "everything": {"kdim": 5, "vdim": 7, "add_bias_kv": True, "add_zero_attn": True},
}


CAUSAL = torch.ones(9, 9).triu(1).bool()


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def build(**options) -> FlowMultiheadAttention:
    options = {"batch_first": True, "dtype": torch.float64, **options}
    return randomized(FlowMultiheadAttention(WIDTH, HEADS, **options), 0.5).to(options["dtype"])


def inputs(options, batch=2, sinks=6, sources=9):
    widths = WIDTH, options.get("kdim", WIDTH), options.get("vdim", WIDTH)
    lengths = sinks, sources, sources
    return tuple(torch.randn(batch, n, w, dtype=torch.float64) for n, w in zip(lengths, widths, strict=True))


def projected(module, query, key, value):
    """The heads (B, H, N, D) of batch-first inputs, added sources included."""
    weights = (
        module.in_proj_weight.chunk(3)
        if module.in_proj_weight is not None
        else (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    )
    biases = (0, 0, 0) if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
    q, k, v = (x @ w.T + b for x, w, b in zip((query, key, value), weights, biases, strict=True))
    ones = torch.ones(k.shape[0], 1, 1, dtype=k.dtype)
    if module.bias_k is not None:
        k, v = torch.cat([k, ones * module.bias_k], 1), torch.cat([v, ones * module.bias_v], 1)
    if module.add_zero_attn:
        k, v = (torch.cat([x, 0 * ones.expand(-1, 1, WIDTH)], 1) for x in (k, v))
    return [x.reshape(*x.shape[:2], HEADS, -1).transpose(1, 2) for x in (q, k, v)]


def joined(module, result):
    return module.out_proj(result.transpose(1, 2).flatten(2))


def square_mask(length, dtype=torch.float64):
    return nn.Transformer.generate_square_subsequent_mask(length, dtype=dtype)


@pytest.mark.parametrize("method", ["__init__", "forward"])
def test_signature_is_that_of_torch(method):
    ours, theirs = (
        inspect.signature(getattr(cls, method)).parameters for cls in (FlowMultiheadAttention, nn.MultiheadAttention)
    )
    assert list(ours) == [*theirs, *(["variant", "cross_attention"] if method == "__init__" else [])]
    for name, parameter in theirs.items():
        assert (ours[name].default, ours[name].kind) == (parameter.default, parameter.kind), name


@pytest.mark.parametrize("name", BUILDS)
def test_state_dict_goes_both_ways(name):
    ours, theirs = build(**BUILDS[name]), nn.MultiheadAttention(WIDTH, HEADS, **BUILDS[name], dtype=torch.float64)
    assert {k: v.shape for k, v in ours.state_dict().items()} == {k: v.shape for k, v in theirs.state_dict().items()}
    assert list(ours.state_dict()) == list(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    again = FlowMultiheadAttention(WIDTH, HEADS, **BUILDS[name], batch_first=True, dtype=torch.float64).eval()
    again.load_state_dict(theirs.state_dict())
    x = inputs(BUILDS[name])
    assert torch.equal(again(*x)[0], ours(*x)[0])


def test_starts_from_the_same_weights():
    torch.manual_seed(3)
    ours = FlowMultiheadAttention(WIDTH, HEADS, add_bias_kv=True)
    torch.manual_seed(3)
    theirs = nn.MultiheadAttention(WIDTH, HEADS, add_bias_kv=True)
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=0, atol=0)
    for module in (ours, theirs):
        torch.manual_seed(4)
        module._reset_parameters()
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=0, atol=0)


def test_dtype_and_device_reach_every_parameter():
    module = FlowMultiheadAttention(WIDTH, HEADS, add_bias_kv=True, kdim=5, device="meta", dtype=torch.bfloat16)
    assert {(p.device.type, p.dtype) for p in module.parameters()} == {("meta", torch.bfloat16)}


@pytest.mark.parametrize("name", BUILDS)
def test_equals_projections_around_the_op(name):
    module, x = build(**BUILDS[name]), inputs(BUILDS[name])
    result, _ = module(*x)
    expected = joined(module, oracle(*projected(module, *x), variant=module.variant))
    torch.testing.assert_close(result, expected, rtol=1e-11, atol=1e-12)
    parameters = tuple(module.parameters())
    cotangent = torch.randn_like(result)
    grads, truth = (torch.autograd.grad(y, parameters, cotangent) for y in (result, expected))
    torch.testing.assert_close(grads, truth, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("is_causal", [False, True])
def test_self_attention_of_every_variant(name, is_causal):
    module, (x, _, _) = build(variant=VARIANTS[name]), inputs({})
    heads = projected(module, x, x, x)
    expected = joined(module, oracle(*heads, is_causal=is_causal, variant=VARIANTS[name]))
    result, weights = module(x, x, x, is_causal=is_causal, average_attn_weights=False)
    torch.testing.assert_close(result, expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(joined(module, weights @ heads[2]), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", BUILDS)
def test_weights_times_values_is_the_result(name):
    options = BUILDS[name]
    module, x = build(**options), inputs(options)
    mask = torch.arange(9) >= torch.tensor([[9], [5]])
    result, weights = module(*x, key_padding_mask=mask, average_attn_weights=False)
    added = len({"add_bias_kv", "add_zero_attn"} & set(options))
    assert weights.shape == (2, HEADS, 6, 9 + added)
    assert not weights[1, :, :, 5:9].any()
    value = projected(module, *x)[2]
    torch.testing.assert_close(joined(module, weights @ value), result, rtol=1e-10, atol=1e-12)


def test_returned_pair():
    module, x = build(), inputs({})
    result, weights = module(*x, average_attn_weights=False)
    averaged = module(*x)
    assert torch.equal(averaged[0], result)
    assert averaged[1].shape == (2, 6, 9)
    torch.testing.assert_close(averaged[1], weights.mean(1))
    without = module(*x, need_weights=False)
    assert torch.equal(without[0], result)
    assert without[1] is None


def test_gradients_flow_through_the_weights():
    module, x = build(), inputs({})
    module(*x)[1].sum().backward()
    assert module.in_proj_weight.grad[: 2 * WIDTH].abs().min() > 0
    assert not module.in_proj_weight.grad[2 * WIDTH :].any()


@pytest.mark.parametrize("need_weights", [False, True])
def test_length_first_equals_batch_first(need_weights):
    module, x = build(), inputs({})
    mask = torch.arange(9) >= torch.tensor([[9], [5]])
    expected = module(*x, key_padding_mask=mask, need_weights=need_weights)
    module.batch_first = False
    result, weights = module(*(y.transpose(0, 1) for y in x), key_padding_mask=mask, need_weights=need_weights)
    assert result.shape == (6, 2, WIDTH)
    torch.testing.assert_close((result.transpose(0, 1), weights), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("batch_first", [False, True])
def test_without_a_batch(batch_first):
    module, x = build(batch_first=batch_first), inputs({}, batch=1)
    mask = torch.arange(9) >= 5
    layout = x if batch_first else [y.transpose(0, 1) for y in x]
    expected, expected_weights = module(*layout, key_padding_mask=mask[None], average_attn_weights=False)
    result, weights = module(*(y[0] for y in x), key_padding_mask=mask, average_attn_weights=False)
    assert (result.shape, weights.shape) == ((6, WIDTH), (HEADS, 6, 9))
    torch.testing.assert_close(result, expected.squeeze(0 if batch_first else 1), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(weights, expected_weights[0], rtol=1e-12, atol=1e-12)
    result, weights = module(*(y[0] for y in x), need_weights=False)
    assert (result.shape, weights) == ((6, WIDTH), None)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    "left_out",
    [
        torch.tensor(True),
        torch.tensor(-torch.inf, dtype=torch.float64),
        torch.tensor(-torch.inf),
        torch.tensor(-1e9),
        torch.tensor(-1e4, dtype=torch.float16),
        torch.tensor(torch.finfo(torch.float32).min),
        torch.tensor(torch.finfo(torch.float16).min, dtype=torch.float16),
        torch.tensor(torch.finfo(torch.bfloat16).min, dtype=torch.bfloat16),
    ],
    ids=lambda x: f"{x.dtype} {x.item():g}",
)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_equals_alone(is_causal, left_out, side):
    module, lengths = build(), (9, 4, 1)
    x = inputs({}, batch=3)[1]
    place = torch.arange(9)
    keep = torch.stack([place < n if side == "right" else place >= 9 - n for n in lengths])
    x[~keep] = torch.nan
    mask = torch.zeros(3, 9, dtype=left_out.dtype).masked_fill(~keep, left_out)
    padded, weights = module(x, x, x, key_padding_mask=mask, is_causal=is_causal)
    for row in range(3):
        alone = x[row, keep[row]][None]
        result, alone_weights = module(alone, alone, alone, is_causal=is_causal)
        torch.testing.assert_close(padded[row, keep[row]], result[0], rtol=1e-11, atol=1e-12)
        block = weights[row][keep[row]][:, keep[row]]
        torch.testing.assert_close(block, alone_weights[0], rtol=1e-11, atol=1e-12)
        torch.testing.assert_close(weights[row].sum(), block.sum(), rtol=1e-11, atol=0)


@pytest.mark.parametrize("name", ["bias_kv", "zero"])
def test_added_sources_are_not_padding(name):
    module, x = build(**BUILDS[name]), inputs({})[1]
    mask = torch.arange(9) >= torch.tensor([[9], [5]])
    padded, _ = module(x, x, x, key_padding_mask=mask)
    alone, _ = module(*[x[1:, :5]] * 3)
    torch.testing.assert_close(padded[1:, :5], alone, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("copied", ["none", "value", "all"])
@pytest.mark.parametrize("batch_first", [False, True])
def test_equal_lengths_make_it_self_attention(copied, batch_first):
    """Not that query and key are one object: a norm applied to each is self-attention, too."""
    module, x = build(batch_first=batch_first), inputs({})[1]
    mask = torch.arange(9) >= torch.tensor([[9], [5]])
    layout = x if batch_first else x.transpose(0, 1)
    arguments = {"none": (layout,) * 3, "value": (layout, layout, layout * 1), "all": [layout * 1 for _ in range(3)]}
    padded, _ = module(*arguments[copied], key_padding_mask=mask)
    part = layout[1:, :5] if batch_first else layout[:5, 1:]
    padded = padded[1:, :5] if batch_first else padded[:5, 1:]
    torch.testing.assert_close(padded, module(part, part, part)[0], rtol=1e-11, atol=1e-12)


def test_without_a_batch_equal_lengths_are_self_attention():
    module, x = build(batch_first=True), inputs({})[1][0]
    padded, _ = module(x * 1, x * 1, x * 1, key_padding_mask=torch.arange(9) >= 5)
    torch.testing.assert_close(padded[:5], module(*[x[:5]] * 3)[0], rtol=1e-11, atol=1e-12)


def test_cross_attention_of_equal_lengths_is_said_at_building():
    module, (_, memory, value) = build(cross_attention=True), inputs({})
    query = torch.randn_like(memory)
    mask = torch.arange(9) >= torch.tensor([[9], [5]])
    for values in (value, memory):
        alone, _ = module(query[1:], memory[1:, :5], values[1:, :5])
        result, _ = module(query, memory, values, key_padding_mask=mask)
        torch.testing.assert_close(result[1:], alone, rtol=1e-11, atol=1e-12)
    module.cross_attention = False
    result, _ = module(query, memory, memory, key_padding_mask=mask)
    alone, _ = module(query[1:, :5], memory[1:, :5], memory[1:, :5])
    torch.testing.assert_close(result[1:, :5], alone, rtol=1e-11, atol=1e-12)


def test_a_memory_as_long_as_the_query_needs_a_word():
    module, memory = build(), inputs({})[1]
    query, mask = torch.randn_like(memory), torch.arange(9) >= torch.tensor([[9], [5]])
    assert module(query, memory, memory)[0].shape == query.shape
    with pytest.raises(ValueError, match=r"a key of 9 tokens each.*cross_attention=False.*cross_attention=True"):
        module(query, memory, memory, key_padding_mask=mask)
    module = build(variant=independent_sinks())
    result, _ = module(query, memory, memory, key_padding_mask=mask)
    alone, _ = module(query[1:], memory[1:, :5], memory[1:, :5])
    torch.testing.assert_close(result[1:], alone, rtol=1e-11, atol=1e-12)


def test_padding_of_cross_attention_leaves_keys_out_only():
    module, (query, key, value) = build(), inputs({})
    mask = torch.arange(9) >= torch.tensor([[9], [5]])
    result, _ = module(query, key, value, key_padding_mask=mask)
    alone, _ = module(query[1:], key[1:, :5], value[1:, :5])
    torch.testing.assert_close(result[1:], alone, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(
    "mask",
    [
        square_mask(9),
        square_mask(9, torch.float32),
        torch.ones(9, 9).triu(1).bool(),
        torch.full((9, 9), -1e9).triu(1),
        torch.full((9, 9), torch.finfo(torch.float16).min, dtype=torch.float16).triu(1),
    ],
    ids=["float64", "float32", "bool", "-1e9", "finfo.min"],
)
def test_the_causal_mask_is_recognised(mask):
    module, x = build(), inputs({})[1]
    expected, expected_weights = module(x, x, x, is_causal=True)
    for options in ({"attn_mask": mask}, {"attn_mask": mask, "is_causal": True}):
        result, weights = module(x, x, x, **options)
        assert torch.equal(result, expected)
        assert torch.equal(weights, expected_weights)
    assert not weights.triu(1).any()
    assert not torch.allclose(expected, module(x, x, x)[0])
    changed = x.clone()
    changed[:, 5:] += 1
    torch.testing.assert_close(module(changed, changed, changed, attn_mask=mask)[0][:, :5], expected[:, :5])


@pytest.mark.parametrize("mask", [torch.zeros(6, 9), torch.zeros(6, 9, dtype=torch.bool)], ids=["float", "bool"])
def test_a_mask_that_blocks_nothing_is_none(mask):
    module, x = build(), inputs({})
    assert torch.equal(module(*x, attn_mask=mask)[0], module(*x)[0])


def test_one_token_is_not_taken_for_causal():
    module, x = build(), inputs({}, sinks=1, sources=1)[0]
    assert torch.equal(module(x, x, x, attn_mask=square_mask(1))[0], module(x, x, x)[0])


@pytest.mark.parametrize(
    "mask",
    [
        CAUSAL.T,
        CAUSAL.triu(2),
        ~torch.eye(9, dtype=torch.bool),
        torch.ones(9, 9, dtype=torch.bool),
        torch.zeros(9, 9).masked_fill(CAUSAL, -1.0),
        torch.randn(9, 9),
        CAUSAL[:8],
        CAUSAL.expand(2 * HEADS, -1, -1),
    ],
    ids=["transposed", "window", "diagonal", "all", "penalty", "bias", "shape", "per head"],
)
def test_other_masks_are_refused(mask):
    module, x = build(), inputs({})[1]
    with pytest.raises(NotImplementedError, match=r"no linear form. Pass is_causal=True.*key_padding_mask"):
        module(x, x, x, attn_mask=mask)


def test_dropout_acts_on_the_result_in_training_only():
    module, x = build(dropout=0.5), inputs({})
    result, kept = module.eval()(*x)[0], module.train()(*x)[0]
    dropped = kept == 0
    assert 0.2 < dropped.double().mean() < 0.8
    torch.testing.assert_close(kept[~dropped], 2 * result[~dropped])


@pytest.mark.parametrize("options", [{}, {"add_bias_kv": True, "add_zero_attn": True}], ids=str)
def test_autocast(options):
    module = build(**options, dtype=torch.float32)
    x = torch.randn(2, 200, WIDTH)
    exact, exact_weights = module(x, x, x)
    with torch.autocast("cpu", torch.bfloat16):
        result, weights = module(x, x, x)
    assert result.dtype == weights.dtype == torch.bfloat16
    torch.testing.assert_close(result.float(), exact, rtol=0.02, atol=0.02)
    torch.testing.assert_close(weights.float(), exact_weights, rtol=0.05, atol=1e-4)


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"need_weights": False}], ids=str)
def test_compiles_as_one_graph(options):
    module, x = build(), inputs({})[1]
    mask = torch.arange(9) >= torch.tensor([[9], [5]])
    torch.compiler.reset()
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    results = [f(x, x, x, key_padding_mask=mask, **options) for f in (compiled, module)]
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)
    parameters = tuple(module.parameters())
    grads = [torch.autograd.grad(y[0].square().sum(), parameters) for y in results]
    torch.testing.assert_close(*grads, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_float_padding_masks_compile(backend):
    module, x = build(), inputs({})[1]
    torch.compiler.reset()
    compiled = torch.compile(module, backend=backend, fullgraph=True)
    mask = torch.zeros(2, 9).masked_fill(torch.arange(9) >= torch.tensor([[9], [5]]), -1e9)
    results = [f(x, x, x, key_padding_mask=mask)[0] for f in (compiled, module)]
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)
    with pytest.raises(RuntimeError, match=r"may hold only 0 \(takes part\)"):
        compiled(x, x, x, key_padding_mask=torch.full((2, 9), -1.0))


@pytest.mark.parametrize("mask", [square_mask(9), CAUSAL], ids=["float", "bool"])
def test_causal_mask_tensors_compile(mask):
    module, x = build(), inputs({})[1]
    torch.compiler.reset()
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    expected = module(x, x, x, is_causal=True)
    torch.testing.assert_close(compiled(x, x, x, attn_mask=mask), expected, rtol=1e-12, atol=1e-12)
    for other in (torch.zeros_like(mask), mask.T):
        with pytest.raises(RuntimeError, match="attn_mask is not the causal mask"):
            compiled(x, x, x, attn_mask=other)
    with pytest.raises(NotImplementedError, match="no linear form"):
        module(x, x, x, attn_mask=mask[:8])


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"key_padding_mask": torch.zeros(2, 9, device="meta")}])
def test_weights_on_the_meta_device(options):
    module = build().to("meta")
    x = torch.empty(2, 9, WIDTH, dtype=torch.float64, device="meta")
    result, weights = module(x, x, x, **options)
    assert (result.shape, weights.shape) == ((2, 9, WIDTH), (2, 9, 9))


def test_gradients_of_each_sample():
    module, x = build(), inputs({})[1]
    parameters = dict(module.named_parameters())
    masks = torch.arange(9) >= torch.tensor([[9], [5]])

    def loss(parameters, sample, mask):
        call = functional_call(module, parameters, (sample, sample, sample, mask))
        return call[0].square().sum()

    found = vmap(grad(loss), in_dims=(None, 0, 0))(parameters, x, masks)
    for i in range(2):
        expected = grad(loss)(parameters, x[i], masks[i])
        torch.testing.assert_close({name: each[i] for name, each in found.items()}, expected, rtol=1e-10, atol=1e-12)
    with pytest.raises(NotImplementedError, match=r"under torch.vmap. Pass a bool padding mask"):
        vmap(grad(loss), in_dims=(None, 0, 0))(parameters, x, torch.zeros(2, 9))


def test_refuses_to_be_built():
    with pytest.raises(ValueError, match="divisible by num_heads, got 10 and 3"):
        FlowMultiheadAttention(10, 3)
    with pytest.raises(ValueError, match="greater than 0"):
        FlowMultiheadAttention(12, 0)
    with pytest.raises(ValueError, match="unknown variant 'soft'"):
        FlowMultiheadAttention(12, 3, variant="soft")


X = torch.zeros(2, 9, WIDTH, dtype=torch.float64)


@pytest.mark.parametrize(
    ("error", "arguments", "options", "message"),
    [
        (ValueError, (X, X[..., :5], X), {}, r"= \(12, 12, 12\), got shapes \(2, 9, 12\), \(2, 9, 5\), \(2, 9, 12\)"),
        (ValueError, (X[None],) * 3, {}, "must all have 3 or all 2 dimensions"),
        (ValueError, (X, X[0], X[0]), {}, "must all have 3 or all 2 dimensions"),
        (ValueError, (X, X, X), {"key_padding_mask": torch.zeros(9, 2).bool()}, r"shape \(2, 9\), got \(9, 2\)"),
        (TypeError, (X, X, X), {"key_padding_mask": torch.zeros(2, 9).long()}, r"bool or float, got torch.int64"),
        (NotImplementedError, (X, X, X), {"key_padding_mask": torch.ones(2, 9)}, r"only 0 \(takes part\)"),
        (ValueError, (X[:, :5], X, X), {"is_causal": True}, "as many queries as keys, got 5 queries and 9 keys"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refuses_input(error, arguments, options, message):
    with pytest.raises(error, match=message):
        build()(*arguments, **options)


@pytest.mark.parametrize("name", ["add_bias_kv", "add_zero_attn"])
def test_added_sources_have_no_place_in_a_sequence(name):
    with pytest.raises(NotImplementedError, match="add sources that have no place in a sequence"):
        build(**{name: True})(X, X, X, is_causal=True)
