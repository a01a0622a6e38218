"""The causal Triton kernels: in the interpreter on the CPU, on the device itself where there is one."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from causal_kernels import DEFAULT, DEVICE, check, inputs_of, many_sms, run, segments
from causal_kernels import small_chunks as small_chunks  # a fixture of every test
from helpers import CAUSAL_KERNEL_VARIANTS, oracle, relative_error, with_gradients

from flowformer import FlowVariant
from flowformer.ops.common import Options
from flowformer.ops.state import FlowState
from flowformer.ops.triton.causal import launch_table
from flowformer.ops.triton.causal import op as kernels
from flowformer.ops.triton.causal import plan as causal_plan
from flowformer.ops.triton.plan import cached_plan, dense, flat_options


@pytest.mark.parametrize(
    ("rows", "longest", "expected"),
    [
        (16, 300, 2),  # too short for more
        (16, 2**18, 33),  # as many as run in two rounds
        (64, 16384, 8),
        (100, 2048, 1),  # most processors have a head
        (100, 16384, 5),
        (133, 2**18, 1),
    ],
)
def test_heads_are_cut_where_they_are_few_and_long(rows, longest, expected, monkeypatch):
    monkeypatch.undo()
    many_sms(monkeypatch, 132)
    assert causal_plan.segment_count(rows, longest, torch.device("cuda")) == expected


@pytest.mark.parametrize("name", CAUSAL_KERNEL_VARIANTS)
def test_values_and_gradients_are_the_oracles(name, monkeypatch):
    segments(monkeypatch, 2, 1)
    check(inputs_of(batch=1, heads=1, sinks=36), variant=CAUSAL_KERNEL_VARIANTS[name], scale=0.7)


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("length", [2, 16, 50])
def test_any_length_in_any_number_of_segments(length, count, monkeypatch):
    segments(monkeypatch, count, 1)
    check(inputs_of(batch=1, heads=1, sinks=length, dim=3, value_dim=5))


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(("dim", "value_dim"), [(1, 1), (8, 3), (17, 40), (80, 16)])
def test_head_dimensions_large_and_small_and_odd(dim, value_dim, count, monkeypatch):
    segments(monkeypatch, count, 1)
    check(inputs_of(batch=1, heads=1, sinks=34, dim=dim, value_dim=value_dim))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_obeys_the_error_rule(dtype, monkeypatch):
    segments(monkeypatch, 2, 1)
    check(inputs_of(dtype, batch=1, heads=1, sinks=40, dim=8))


@pytest.mark.parametrize("key", launch_table.CONFIGS, ids=lambda key: f"{key[0]}-{key[1]}".removeprefix("torch."))
def test_every_configuration_of_the_table(key, monkeypatch):
    dtype, width = key
    if DEVICE == "cpu":
        # the interpreter needs the table's tiles, not the whole width: two tiles of values and of features
        config = launch_table.CONFIGS[key]
        monkeypatch.setitem(launch_table.CONFIGS, (dtype, 64), config)
        check(inputs_of(dtype, batch=1, heads=1, sinks=20, dim=20, value_dim=18))
        return
    for length in (63, 64, 65, 1000):
        check(inputs_of(dtype, batch=1, heads=2, sinks=length, dim=width, value_dim=width))
    # whole heads, few of them and more than there are processors
    many_sms(monkeypatch, 1)
    cached_plan.cache_clear()
    for heads in (2, 200):
        check(inputs_of(dtype, batch=1, heads=heads, sinks=130, dim=width, value_dim=width))


def test_one_token_alone_is_its_value_gated(monkeypatch):
    inputs = inputs_of(batch=2, heads=2, sinks=1)
    result, *gradients = with_gradients(run(), inputs)
    truth, *expected = with_gradients(lambda q, k, v: oracle(q, k, v, is_causal=True), [x.double() for x in inputs])
    assert relative_error(result, truth) < 1e-6
    # dQ and dK of a single token are zero but for ε, so the gradients are judged together
    together, truth = (torch.cat([x.flatten() for x in each]) for each in (gradients, expected))
    assert relative_error(together, truth) < 1e-5


def padded_masks(batch, length):
    mask = torch.ones(batch, length, dtype=torch.bool, device=DEVICE)
    mask[0, :7] = False
    mask[1, 20:] = False
    return mask


@pytest.mark.parametrize("count", [1, 2])
def test_a_padded_sequence_is_the_sequence_alone(count, monkeypatch):
    segments(monkeypatch, count, 2)
    mask = padded_masks(2, 34)
    inputs = inputs_of(batch=2, heads=1, sinks=34)
    poisoned = [x.masked_fill(~mask[:, None, :, None], torch.nan) for x in inputs]
    for row in range(2):
        alone = with_gradients(run(), [x[row : row + 1, :, mask[row]] for x in inputs], grad_seed=2)
        cotangent = torch.zeros_like(inputs[2][:1])
        generator = torch.Generator().manual_seed(2)
        cotangent[:, :, mask[row]] = torch.randn(alone[0].shape, generator=generator, dtype=torch.float64).to(cotangent)
        leaves = [x[row : row + 1].clone().requires_grad_() for x in poisoned]
        result = run(mask[row : row + 1])(*leaves)
        padded = [result.detach(), *torch.autograd.grad(result, leaves, cotangent)]
        for one, other in zip(padded, alone, strict=True):
            torch.testing.assert_close(one[:, :, mask[row]], other, rtol=1e-5, atol=1e-6)
            assert not one[:, :, ~mask[row]].any()


def test_masks_with_holes_and_without_any_token(monkeypatch):
    segments(monkeypatch, 2, 3)
    mask = torch.ones(3, 36, dtype=torch.bool, device=DEVICE)
    mask[0, ::3] = False
    mask[1] = False
    inputs = inputs_of(batch=3, heads=1, sinks=36, value_dim=20)
    assert all(not x[1].any() for x in check(inputs, mask))


def test_query_heads_share_key_heads(monkeypatch):
    segments(monkeypatch, 2, 4)
    check(inputs_of(batch=1, heads=4, key_heads=2, sinks=17, value_dim=3))


def test_autocast_changes_nothing():
    """Kernels are not under its control, and what is added up for shared key heads keeps its dtype."""
    inputs = inputs_of(torch.bfloat16, batch=1, heads=2, key_heads=1, sinks=17)
    apart = with_gradients(run(), inputs)
    with torch.autocast(DEVICE, torch.float16 if DEVICE == "cuda" else torch.bfloat16):
        under = with_gradients(run(), inputs)
    assert [x.dtype for x in under] == [torch.bfloat16] * 4
    for ours, other in zip(under, apart, strict=True):
        torch.testing.assert_close(ours, other, rtol=0, atol=0)


@pytest.mark.parametrize("feature_map", ["sigmoid", "elu+1"])
@pytest.mark.parametrize("dim", [64, 80])
def test_small_inputs_keep_their_gradients(feature_map, dim, monkeypatch):
    """Features are then nearly φ(0): without an allocation, all of dQ is what remains after they cancel."""
    segments(monkeypatch, 2, 1)
    sinks = 777 if DEVICE == "cuda" else 20
    query, key, value = inputs_of(torch.bfloat16, batch=1, heads=1, sinks=sinks, dim=dim)
    given = query * 0.2, key * 0.2, value
    variant = FlowVariant(feature_map=feature_map, allocation="none", competition="none")
    ours = with_gradients(lambda q, k, v: kernels.causal(q, k, v, None, Options(0.125, variant)), given)
    truths = with_gradients(
        lambda q, k, v: oracle(q, k, v, is_causal=True, variant=variant, scale=0.125), [x.double() for x in given]
    )
    for mine, truth in zip(ours, truths, strict=True):
        assert relative_error(mine, truth) < 0.03


@pytest.mark.parametrize("magnitude", [0.0, 1e4])
def test_extreme_inputs(magnitude, monkeypatch):
    segments(monkeypatch, 2, 1)
    query, key, value = inputs_of(batch=1, heads=1, sinks=33)
    given = query * magnitude, key * magnitude, value
    results = with_gradients(run(), given)
    truths = with_gradients(lambda q, k, v: oracle(q, k, v, is_causal=True), [x.double() for x in given])
    for index in (0, 3):
        assert relative_error(results[index], truths[index]) < 1e-5, index
    # features that are equal or saturated have gradients below the rounding of what they cancel from
    for index in (1, 2):
        torch.testing.assert_close(results[index].double(), truths[index], rtol=0, atol=1e-5)


def test_exp_of_the_flows_may_overflow(monkeypatch):
    """relu features of very unequal size drive Ô far beyond what exp can hold."""
    segments(monkeypatch, 2, 1)
    query, key, value = inputs_of(batch=1, heads=1, sinks=34, dim=2)
    key = key.abs() * torch.logspace(-3, 3, 34, device=DEVICE)[:, None]
    variant = FlowVariant(feature_map="relu")
    truth = oracle(query.abs(), key, value, is_causal=True, variant=variant)
    assert relative_error(run(variant=variant)(query.abs(), key, value), truth) < 1e-4


def test_strides_are_kept_and_cost_nothing(monkeypatch):
    segments(monkeypatch, 2, 2)
    inputs = inputs_of(batch=1, heads=2, sinks=17)
    expected = with_gradients(run(), inputs)
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs]
    results = with_gradients(run(), turned)
    assert results[0].transpose(1, 2).is_contiguous()
    assert all(torch.equal(one, other) for one, other in zip(results, expected, strict=True))
    spread = [torch.stack([x, x], -1)[..., 0] for x in inputs]
    assert torch.equal(run()(*spread), expected[0])


def test_twice_the_same_bits(monkeypatch):
    segments(monkeypatch, 2, 1)
    inputs = inputs_of(batch=1, heads=1, sinks=33)
    first, second = with_gradients(run(), inputs), with_gradients(run(), inputs)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


@pytest.mark.parametrize("shape", [(0, 2, 5), (2, 0, 5), (2, 2, 0)])
def test_nothing_in_nothing_out(shape):
    batch, heads, length = shape
    query, key, value = (torch.randn(batch, heads, length, 4, device=DEVICE, requires_grad=True) for _ in range(3))
    result, state = kernels.recurrent(query, key, value, None, None, Options(1.0, DEFAULT))
    assert result.shape == (batch, heads, length, 4)
    assert not state[0].any()
    assert not state[2][..., 0].any()
    gradients = torch.autograd.grad(result.sum() + state[1].sum(), (query, key, value))
    assert [x.shape for x in gradients] == [query.shape] * 3


def test_the_operators_pass_opcheck():
    query, key, value = inputs_of(batch=1, heads=1, sinks=5)
    options = flat_options(Options(1.0, DEFAULT))
    tests = ("test_schema", "test_faketensor")
    for keep in (False, True):
        inputs = query, key, value, None, None, None, 5, keep, None, None, None, None, *options
        torch.library.opcheck(torch.ops.flowformer.triton_causal.default, inputs, test_utils=tests)
    result, end, kept = torch.ops.flowformer.triton_causal(*inputs)
    torch.library.opcheck(
        torch.ops.flowformer.triton_causal_backward.default,
        (result, end, query, key, value, None, None, 5, None, None, result, kept, *options),
        test_utils=tests,
    )
    state = FlowState.empty(1, 1, 4, device=DEVICE).pack()
    token = [x[:, :, :1].contiguous() for x in (query, key, value)]
    torch.library.opcheck(
        torch.ops.flowformer.triton_decode.default, (*token, None, None, *state, *options), test_utils=tests
    )


def test_rows_too_far_apart_for_32_bits_are_copied():
    far = torch.empty_strided((1, 1, 2, 4), (1, 1, 2**22, 1), device=DEVICE)
    assert dense(far).stride() == (8, 8, 4, 1)
    near = torch.empty(1, 3, 2, 4, device=DEVICE).transpose(1, 2)
    assert dense(near) is near
