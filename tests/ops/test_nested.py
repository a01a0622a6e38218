"""Nested tensors, jagged and strided: in and out of the op and the modules, equal to a loop over their sequences."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from flowformer import (
    FlowAttention,
    FlowMultiheadAttention,
    explain,
    flow_attention,
    flow_attention_recurrent,
    flow_maps,
)
from flowformer.nn import FlowEncoderLayer

LENGTHS = 3, 5, 1, 2
pytestmark = [
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
    pytest.mark.filterwarnings("ignore:.*is_fx_tracing"),
]
LAYOUTS = pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=["jagged", "strided"])
CAUSAL = pytest.mark.parametrize("is_causal", [False, True], ids=["bidirectional", "causal"])


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def parts(*shape: int, lengths=LENGTHS) -> list[torch.Tensor]:
    """Sequences (j, ...) of unequal length."""
    return [torch.randn(length, *shape, dtype=torch.float64, requires_grad=True) for length in lengths]


def nested(sequences, layout) -> torch.Tensor:
    return torch.nested.as_nested_tensor(list(sequences), layout=layout)


def heads(sequences, layout) -> torch.Tensor:
    """(B, H, j, D) from sequences (j, H, D)."""
    return nested(sequences, layout).transpose(1, 2)


def alone(query, key, value, **options) -> list[torch.Tensor]:
    inputs = zip(query, key, value, strict=True)
    return [flow_attention(*(x.transpose(0, 1)[None] for x in each), **options)[0] for each in inputs]


def assert_same(found: torch.Tensor, expected, leaves) -> None:
    """Values and gradients."""
    assert found.is_nested
    for result, truth in zip(found.unbind(), expected, strict=True):
        torch.testing.assert_close(result, truth, rtol=1e-11, atol=1e-12)
    grads = [torch.autograd.grad(sum(x.square().sum() for x in y), leaves) for y in (found.unbind(), expected)]
    torch.testing.assert_close(*grads, rtol=1e-10, atol=1e-11)


@LAYOUTS
@CAUSAL
@pytest.mark.parametrize("key_heads", [4, 2])
def test_attention_equals_a_loop(layout, is_causal, key_heads):
    query, key, value = parts(4, 3), parts(key_heads, 3), parts(key_heads, 5)
    options = {"is_causal": is_causal, "enable_gqa": True, "variant": "vision", "scale": 0.7}
    found = flow_attention(*(heads(x, layout) for x in (query, key, value)), **options)
    assert found.layout == layout
    assert_same(found, alone(query, key, value, **options), [*query, *key, *value])


@LAYOUTS
def test_lengths_of_keys_may_differ(layout):
    query, key, value = parts(4, 3), parts(4, 3, lengths=(2, 7, 3, 1)), parts(4, 5, lengths=(2, 7, 3, 1))
    found = flow_attention(*(heads(x, layout) for x in (query, key, value)))
    assert_same(found, alone(query, key, value), [*query, *key, *value])


@CAUSAL
def test_a_jagged_result_fits_its_query(is_causal):
    """The lengths are the same symbol, so that results and inputs can be added."""
    x = heads(parts(4, 3), torch.jagged)
    result = flow_attention(x, x, x, is_causal=is_causal)
    assert result.shape == x.shape
    assert (result + x).shape == x.shape


def test_tokens_left_out_of_a_jagged_tensor():
    padded = torch.randn(3, 8, 4, 3, dtype=torch.float64)
    starts, lengths = torch.tensor([0, 1, 2]), torch.tensor([3, 4, 5])
    x = torch.nested.narrow(padded, 1, starts, lengths, layout=torch.jagged).transpose(1, 2)
    sequences = [padded[i, i : 2 * i + 3] for i in range(3)]
    for result, truth in zip(flow_attention(x, x, x).unbind(), alone(*[sequences] * 3), strict=True):
        torch.testing.assert_close(result, truth, rtol=1e-11, atol=1e-12)


@LAYOUTS
@CAUSAL
def test_multihead_attention_equals_a_loop(layout, is_causal):
    module, x = FlowMultiheadAttention(12, 4, batch_first=True, dtype=torch.float64), parts(12)
    y = nested(x, layout)
    found, weights = module(y, y, y, need_weights=False, is_causal=is_causal)
    assert weights is None
    assert found.layout == layout
    assert_same(found, [module(each, each, each, is_causal=is_causal)[0] for each in x], [*x, *module.parameters()])


@LAYOUTS
def test_multihead_cross_attention_equals_a_loop(layout):
    module = FlowMultiheadAttention(12, 4, kdim=5, vdim=7, batch_first=True, dtype=torch.float64)
    query, key, value = parts(12), parts(5, lengths=(2, 7, 3, 1)), parts(7, lengths=(2, 7, 3, 1))
    found, _ = module(*(nested(x, layout) for x in (query, key, value)), need_weights=False)
    assert_same(found, [module(*each)[0] for each in zip(query, key, value, strict=True)], [*query, *key, *value])


@pytest.mark.parametrize(
    "module",
    [FlowAttention(12, 4), FlowAttention(12, 4, num_kv_heads=2, is_causal=True), FlowEncoderLayer(12, 4)],
    ids=["bidirectional", "causal", "layer"],
)
@pytest.mark.parametrize("compiled", [False, True])
def test_modules_take_jagged_tensors(module, compiled):
    module, x = module.double(), parts(12)
    torch.compiler.reset()
    run = torch.compile(module, backend="aot_eager", fullgraph=True) if compiled else module
    with torch.no_grad() if compiled else torch.enable_grad():
        found, expected = run(nested(x, torch.jagged)), [module(each[None])[0] for each in x]
    if not compiled:
        return assert_same(found, expected, [*x, *module.parameters()])
    torch.testing.assert_close(found.values(), torch.cat(expected), rtol=1e-11, atol=1e-12)


JAGGED = nested(parts(4, 3), torch.jagged)
SHORTER = nested(parts(4, 3, lengths=(3, 4, 1, 2)), torch.jagged).transpose(1, 2)
PLAIN = torch.zeros(4, 4, 5, 3, dtype=torch.float64)


@pytest.mark.parametrize(
    ("error", "arguments", "options", "message"),
    [
        (ValueError, [JAGGED] * 3, {}, r"shape \(batch, heads, j, head_dim\) with j tokens, got \(4, j"),
        (
            ValueError,
            [JAGGED.transpose(1, 2), PLAIN, PLAIN],
            {},
            r"all be nested or none, got one of shape \(4, 4",
        ),
        (
            NotImplementedError,
            [PLAIN, JAGGED.transpose(1, 2), PLAIN],
            {},
            "got a nested key; accepted by flow_attention",
        ),
        (
            ValueError,
            [JAGGED.transpose(1, 2), *[SHORTER] * 2],
            {"is_causal": True},
            r"\[3, 5, 1, 2\] and \[3, 4, 1, 2\]",
        ),
        (ValueError, [SHORTER, SHORTER, JAGGED.transpose(1, 2)], {}, "key and value must have the same lengths"),
        (ValueError, [SHORTER] * 3, {"key_mask": torch.ones(4, 5).bool()}, "no padding to mask"),
        (ValueError, [nested(parts(12), torch.jagged)] * 3, {}, r"\(batch, heads, j, head_dim\), got 3 dimensions"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refuses(error, arguments, options, message):
    with pytest.raises(error, match=message):
        flow_attention(*arguments, **options)


@pytest.mark.parametrize("function", [flow_attention_recurrent, explain, lambda q, k, _: flow_maps(q, k)])
def test_other_functions_say_where_nested_tensors_go(function):
    with pytest.raises(NotImplementedError, match=r"got a nested query.*flow_attention_varlen"):
        function(*[JAGGED.transpose(1, 2)] * 3)


def test_modules_refuse_what_has_no_meaning():
    x, strided = nested(parts(12), torch.jagged), nested(parts(12), torch.strided)
    module = FlowMultiheadAttention(12, 4, batch_first=True, dtype=torch.float64)
    with pytest.raises(NotImplementedError, match="pass need_weights=False, no masks"):
        module(x, x, x)
    with pytest.raises(NotImplementedError, match="pass need_weights=False, no masks"):
        module(x, x, x, need_weights=False, key_padding_mask=torch.zeros(4, 5, dtype=torch.bool))
    with pytest.raises(ValueError, match="batch_first=True"):
        FlowMultiheadAttention(12, 4, dtype=torch.float64)(x, x, x, need_weights=False)
    with pytest.raises(NotImplementedError, match=r"strided nested tensor; accepted: a jagged one"):
        FlowAttention(12, 4, dtype=torch.float64)(strided)
    with pytest.raises(NotImplementedError, match="rotary positions of nested tensors"):
        FlowAttention(12, 2, rotary_base=100.0, dtype=torch.float64)(x)


@torch.no_grad()
def test_a_transformer_of_torch_takes_jagged_tensors():
    layer = nn.TransformerEncoderLayer(12, 4, 16, batch_first=True, dtype=torch.float64).eval()
    layer.self_attn, x = FlowMultiheadAttention(12, 4, batch_first=True, dtype=torch.float64), parts(12)
    for result, each in zip(layer(nested(x, torch.jagged)).unbind(), x, strict=True):
        torch.testing.assert_close(result, layer(each[None])[0], rtol=1e-11, atol=1e-12)
