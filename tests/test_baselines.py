"""The laws that each rival attention claims to keep; softmax and linear against their dense formulas."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from helpers import random_inputs, relative_error, with_gradients

from flowformer import baselines, nn


def dense_softmax(q, k, v, seen):
    return (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~seen, -torch.inf).softmax(-1) @ v


def dense_linear(q, k, v, seen):
    weights = ((F.elu(q) + 1) @ (F.elu(k) + 1).mT).masked_fill(~seen, 0)
    return weights @ v / (weights.sum(-1, keepdim=True) + 1e-6)


DENSE = {"softmax": dense_softmax, "linear": dense_linear}
HEADS, DIM = 3, 4
MASKED = [name for name in baselines.names() if baselines.get(name).masks]
BIDIRECTIONAL = [name for name in baselines.names() if baselines.get(name).bidirectional]
CAUSAL = [name for name in baselines.names() if baselines.get(name).causal]


def build(name):
    torch.manual_seed(0)
    return baselines.build(name, num_heads=HEADS, head_dim=DIM, max_length=256).double().eval()


def seen_by(inputs, is_causal, key_mask=None):
    seen = torch.ones(inputs[0].shape[2], inputs[1].shape[2], dtype=torch.bool)
    seen = seen.tril() if is_causal else seen
    return seen if key_mask is None else seen & key_mask[:, None, None, :]


@pytest.mark.parametrize("is_causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 130])
@pytest.mark.parametrize("name", DENSE)
def test_equals_the_dense_formula(name, length, is_causal):
    inputs = random_inputs(heads=HEADS, dim=DIM, sinks=length)
    ours = with_gradients(lambda *x: build(name)(*x, is_causal=is_causal), inputs)
    dense = with_gradients(lambda *x: DENSE[name](*x, seen_by(inputs, is_causal)), inputs)
    for value, truth in zip(ours, dense, strict=True):
        torch.testing.assert_close(value, truth, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", DENSE)
def test_cross_attention(name):
    inputs = random_inputs(heads=HEADS, dim=DIM, sinks=5, sources=11, value_dim=6)
    assert relative_error(build(name)(*inputs), DENSE[name](*inputs, seen_by(inputs, False))) < 1e-12


@pytest.mark.parametrize(
    ("name", "is_causal"),
    [(name, False) for name in MASKED if name in BIDIRECTIONAL] + [(name, True) for name in MASKED if name in CAUSAL],
)
def test_padded_is_alone(name, is_causal):
    inputs = random_inputs(heads=HEADS, dim=DIM, sinks=9)
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[0, 6:] = mask[1, :4] = False
    padded = [x.masked_fill(~mask[:, None, :, None], 100.0) for x in inputs]
    result = build(name)(*padded, is_causal=is_causal, query_mask=mask, key_mask=mask)
    for row in range(2):
        alone = build(name)(*(x[row : row + 1, :, mask[row]] for x in inputs), is_causal=is_causal)
        assert relative_error(result[row, :, mask[row]], alone[0]) < 1e-12
        assert (result[row, :, ~mask[row]] == 0).all()


@pytest.mark.parametrize("name", [name for name in MASKED if name in BIDIRECTIONAL])
def test_no_source_gives_zero(name):
    inputs = [x.requires_grad_() for x in random_inputs(heads=HEADS, dim=DIM)]
    key_mask = torch.zeros(2, 9, dtype=torch.bool)
    key_mask[0, 3] = True
    result = build(name)(*inputs, key_mask=key_mask)
    assert (result[1] == 0).all()
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(result.sum(), inputs, materialize_grads=True))


@pytest.mark.parametrize("name", CAUSAL)
def test_causal_does_not_leak(name):
    inputs = random_inputs(heads=HEADS, dim=DIM, sinks=80)
    changed = [torch.cat([x[:, :, :40], torch.randn_like(x[:, :, 40:])], 2) for x in inputs]
    ours, theirs = (build(name)(*x, is_causal=True)[:, :, :40] for x in (inputs, changed))
    # later tokens may change the order of a sum, as they do where Reformer sorts, but not what is summed
    assert relative_error(ours, theirs) < 1e-14


# what some formulas leave out by design: SOFT has queries for keys, and a Synthesizer looks at fewer still
UNUSED = {"soft": {"k_proj"}, "synthesizer": {"q_proj", "k_proj"}, "synthesizer-dense": {"k_proj"}}


@pytest.mark.parametrize("name", baselines.names())
def test_takes_the_place_of_flow_attention(name):
    layer = (nn.FlowEncoderLayer if name in BIDIRECTIONAL else nn.FlowDecoderLayer)(
        24, 4, attention=name, max_length=16
    )
    x = torch.randn(2, 10, 24, requires_grad=True)
    layer(x, mask=torch.ones(2, 10, dtype=torch.bool) if name in MASKED else None).sum().backward()
    for parameter, tensor in layer.named_parameters():
        if parameter.split(".")[1] not in UNUSED.get(name, ()):
            assert tensor.grad is not None, parameter
            assert tensor.grad.isfinite().all(), parameter


def test_the_table_of_what_each_can_do():
    table = baselines.capabilities().splitlines()
    assert table[0] == "| attention | bidirectional | causal | masks | cross |"
    assert "| `bigbird` | yes | no | yes | no |" in table
    assert len(table) == 2 + len(baselines.names())


@pytest.mark.parametrize("name", baselines.names())
def test_nothing_gives_nothing(name):
    empty = torch.randn(2, HEADS, 0, DIM, dtype=torch.float64)
    assert build(name)(empty, empty, empty, is_causal=name not in BIDIRECTIONAL).shape == empty.shape


@pytest.mark.parametrize("name", CAUSAL)
def test_has_no_state(name):
    with pytest.raises(NotImplementedError, match=f"{name} attention has no state"):
        nn.FlowDecoderLayer(24, 4, attention=name, max_length=16).new_state(2)


def test_unknown_name():
    with pytest.raises(ValueError, match=r"unknown attention 'softmx' \(did you mean 'softmax'\?\); accepted: flow, "):
        nn.build_attention("softmx", 24, 4)


def test_what_a_rival_cannot_do_is_an_error():
    class Limited(baselines.SoftmaxAttention):
        name, causal, masks, cross = "limited", False, False, False

    q, k, v = random_inputs(sinks=5, sources=7)
    with pytest.raises(NotImplementedError, match="limited attention does not support: masks, cross"):
        Limited()(q, k, v, key_mask=torch.ones(2, 7, dtype=torch.bool))
    with pytest.raises(NotImplementedError, match="limited attention does not support: causal"):
        Limited()(k, k, v, is_causal=True)
