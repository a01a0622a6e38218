"""The causal Triton kernels: in the interpreter on the CPU, on the device itself where there is one."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import asdict

import pytest
import torch

pytest.importorskip("triton")

from helpers import CAUSAL_KERNEL_VARIANTS, oracle, random_inputs, relative_error, with_gradients

from flowformer import FlowVariant
from flowformer.ops import reference
from flowformer.ops.state import FlowState
from flowformer.ops.torch import op as torch_op
from flowformer.ops.triton.causal import op as kernels
from flowformer.ops.triton.causal import plan as causal_plan
from flowformer.ops.triton.plan import cached_plan, dense, options_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DEFAULT = FlowVariant()
# below this an error is a few roundings of float32, whoever makes them
ROUNDING = 3e-7


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Chunks and segments of a few tokens, so that short sequences have several; the device keeps its own chunks."""
    if DEVICE == "cpu":
        table = {key: _small(config) for key, config in causal_plan.CONFIGS.items()}
        monkeypatch.setattr(causal_plan, "CONFIGS", table)
    monkeypatch.setattr(causal_plan, "MIN_SEGMENT", 16)
    many_sms(monkeypatch, 1000)
    cached_plan.cache_clear()
    yield
    cached_plan.cache_clear()


def _small(config):
    return config._replace(chunk=16, tile=16)


def many_sms(monkeypatch, count):
    monkeypatch.setattr(causal_plan, "num_sms", lambda device: count)


def segments(monkeypatch, count, rows):
    monkeypatch.setattr(causal_plan, "SEGMENTS_PER_SM", count)
    monkeypatch.setattr(causal_plan, "BUSY_SHARE", 2)
    many_sms(monkeypatch, rows)
    cached_plan.cache_clear()


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


def inputs_of(dtype=torch.float32, **options):
    return random_inputs(dtype=dtype, device=DEVICE, **options)


def run(mask=None, variant=DEFAULT, scale=1.0, of=kernels.recurrent):
    return lambda q, k, v: of(q, k, v, mask, None, scale, variant)[0]


def assert_as_exact_as_torch(results, torch_results, truths):
    """The error rule: at most twice the error of plain torch at the same dtype, three times for gradients."""
    for index, (result, other, truth) in enumerate(zip(results, torch_results, truths, strict=True)):
        error, allowed = relative_error(result, truth), max(relative_error(other, truth), ROUNDING)
        assert error <= (3 if index else 2) * allowed, (index, error, allowed)


def check(inputs, mask=None, variant=DEFAULT, scale=1.0):
    results = with_gradients(run(mask, variant, scale), inputs)
    others = with_gradients(run(mask, variant, scale, torch_op.recurrent), inputs)
    truths = with_gradients(
        lambda q, k, v: oracle(q, k, v, is_causal=True, key_mask=mask, scale=scale, variant=variant),
        [x.double() for x in inputs],
    )
    assert results[0].dtype == inputs[0].dtype
    assert_as_exact_as_torch(results, others, truths)
    return results


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


@pytest.mark.parametrize("key", causal_plan.CONFIGS, ids=lambda key: f"{key[0]}-{key[1]}".removeprefix("torch."))
def test_every_configuration_of_the_table(key, monkeypatch):
    dtype, width = key
    if DEVICE == "cpu":
        # the interpreter needs the table's tiles, not the whole width: two tiles of values and of features
        config = causal_plan.CONFIGS[key]
        monkeypatch.setitem(causal_plan.CONFIGS, (dtype, 64), config)
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


def cut_in_two(cut, causal):
    def together(query, key, value):
        parts, state = [], None
        for tokens in (slice(None, cut), slice(cut, None)):
            part, state = causal(*(x[:, :, tokens] for x in (query, key, value)), None, state, 1.0, DEFAULT)
            parts.append(part)
        sums, memory, scalars = state
        # the gradient must reach the past also through the state after the last token
        return torch.cat([torch.cat(parts, 2).flatten(), sums.flatten(), memory.flatten(), scalars[..., 1].flatten()])

    return together


def reference_causal(query, key, value, mask, state, scale, variant):
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    return reference.causal(query, key, value, mask, state, scale, **asdict(variant))


@pytest.mark.parametrize("cut", [1, 19])
@pytest.mark.parametrize("count", [1, 2])
def test_a_sequence_can_be_cut_anywhere(cut, count, monkeypatch):
    segments(monkeypatch, count, 1)
    check_cut(cut, inputs_of(batch=1, heads=1, sinks=37))


@pytest.mark.parametrize("count", [1, 3])
def test_heads_and_tiles_share_a_state(count, monkeypatch):
    segments(monkeypatch, count, 2)
    check_cut(11, inputs_of(batch=1, heads=2, key_heads=1, sinks=12 + 16 * count, dim=17, value_dim=40))


def test_more_segments_than_are_added_up_at_once(monkeypatch):
    segments(monkeypatch, 20, 1)
    check_cut(5, inputs_of(batch=1, heads=1, sinks=5 + 19 * 16))


def check_cut(cut, inputs):
    results = with_gradients(cut_in_two(cut, kernels.recurrent), inputs)
    others = with_gradients(cut_in_two(cut, torch_op.recurrent), inputs)
    truths = with_gradients(cut_in_two(cut, reference_causal), [x.double() for x in inputs])
    assert_as_exact_as_torch(results, others, truths)


def test_gradient_of_the_state_alone(monkeypatch):
    segments(monkeypatch, 2, 2)
    query, key, value = inputs_of(batch=1, heads=2, sinks=20)
    _, start = torch_op.recurrent(*inputs_of(batch=1, heads=2, sinks=5, seed=3), None, None, 1.0, DEFAULT)

    def ends(causal, dtype):
        leaves = [x.detach().to(dtype).requires_grad_() for x in start]
        _, end = causal(*(x.to(dtype) for x in (query, key, value)), None, tuple(leaves), 1.0, DEFAULT)
        return torch.autograd.grad(end[0].sum() + end[1].square().sum() + end[2][..., 1].sum(), leaves)

    for grad, truth in zip(ends(kernels.recurrent, torch.float32), ends(reference_causal, torch.float64), strict=True):
        torch.testing.assert_close(grad.double(), truth, rtol=1e-4, atol=1e-5)


def test_padding_leaves_the_state_as_it_is(monkeypatch):
    segments(monkeypatch, 2, 2)
    inputs = inputs_of(batch=2, heads=1, sinks=30)
    mask = torch.ones(2, 30, dtype=torch.bool, device=DEVICE)
    mask[0, 11:] = False
    _, padded = kernels.recurrent(*inputs, mask, None, 1.0, DEFAULT)
    _, alone = kernels.recurrent(*(x[:1, :, :11] for x in inputs), None, None, 1.0, DEFAULT)
    for one, other in zip(padded, alone, strict=True):
        torch.testing.assert_close(one[:1], other, rtol=1e-5, atol=1e-6)
    assert FlowState.unpack(padded).count.tolist() == [11, 30]


def packed_inputs(tokens, **options):
    return [x[0].transpose(0, 1).contiguous() for x in inputs_of(batch=1, sinks=tokens, **options)]


def test_packed_sequences_are_the_loop_over_them(monkeypatch):
    segments(monkeypatch, 2, 8)
    bounds = torch.tensor([0, 1, 1, 9, 33], dtype=torch.int32, device=DEVICE)
    inputs = packed_inputs(36, heads=2, key_heads=1, value_dim=3)

    def packed(query, key, value):
        return kernels.packed(query, key, value, (bounds, bounds, 24, 24), 1.0, DEFAULT)

    def loop(of):
        def function(query, key, value):
            parts = [
                run(of=of)(*(x[start:stop].transpose(0, 1)[None] for x in (query, key, value)))[0].transpose(0, 1)
                for start, stop in ((0, 1), (1, 9), (9, 33))
            ]
            return torch.cat([*parts, query.new_zeros(3, 2, 3)])

        return function

    results = with_gradients(packed, inputs)
    assert_as_exact_as_torch(
        results,
        with_gradients(loop(torch_op.recurrent), inputs),
        with_gradients(loop(torch_op.recurrent), [x.double() for x in inputs]),
    )
    assert all(not x[33:].any() for x in results)


def test_packed_survives_any_bounds(monkeypatch):
    """Inside a CUDA graph nobody can look at the bounds."""
    monkeypatch.setattr(kernels, "check_bounds", lambda *_, **__: None)
    inputs = packed_inputs(40, heads=1)
    bounds = torch.tensor([-3, 90, 17, 2**40], device=DEVICE)
    results = with_gradients(lambda q, k, v: kernels.packed(q, k, v, (bounds, bounds, 40, 40), 1.0, DEFAULT), inputs)
    assert [x.shape for x in results] == [inputs[2].shape, *(x.shape for x in inputs)]
    assert all(x.isfinite().all() for x in results)


def test_packed_refuses_keys_that_are_bound_otherwise():
    inputs = packed_inputs(40, heads=1)
    bounds, others = (torch.tensor([0, x, 40], device=DEVICE) for x in (10, 11))
    with pytest.raises(ValueError, match="as many queries as keys in each sequence"):
        kernels.packed(*inputs, (bounds, others, 40, 40), 1.0, DEFAULT)


@pytest.mark.parametrize("feature_map", ["sigmoid", "elu+1"])
@pytest.mark.parametrize("dim", [64, 80])
def test_small_inputs_keep_their_gradients(feature_map, dim, monkeypatch):
    """Features are then nearly φ(0): without an allocation, all of dQ is what remains after they cancel."""
    segments(monkeypatch, 2, 1)
    sinks = 777 if DEVICE == "cuda" else 20
    query, key, value = inputs_of(torch.bfloat16, batch=1, heads=1, sinks=sinks, dim=dim)
    given = query * 0.2, key * 0.2, value
    variant = FlowVariant(feature_map=feature_map, allocation="none", competition="none")
    ours = with_gradients(lambda q, k, v: kernels.causal(q, k, v, None, 0.125, variant), given)
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


@contextmanager
def poisoned_memory():
    """Deterministic torch fills what `empty` returns with NaN."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert torch.empty(8).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def test_every_element_is_written(monkeypatch):
    """Fresh memory is NaN here, so that a number nobody wrote shows."""
    segments(monkeypatch, 2, 1)
    inputs = inputs_of(batch=1, heads=1, sinks=35, dim=5, value_dim=3)
    expected = with_gradients(cut_in_two(18, kernels.recurrent), inputs)
    with poisoned_memory():
        results = with_gradients(cut_in_two(18, kernels.recurrent), inputs)
    assert all(torch.equal(one, other) for one, other in zip(results, expected, strict=True))


@pytest.mark.parametrize("shape", [(0, 2, 5), (2, 0, 5), (2, 2, 0)])
def test_nothing_in_nothing_out(shape):
    batch, heads, length = shape
    query, key, value = (torch.randn(batch, heads, length, 4, device=DEVICE, requires_grad=True) for _ in range(3))
    result, state = kernels.recurrent(query, key, value, None, None, 1.0, DEFAULT)
    assert result.shape == (batch, heads, length, 4)
    assert not state[0].any()
    assert not state[2][..., 0].any()
    gradients = torch.autograd.grad(result.sum() + state[1].sum(), (query, key, value))
    assert [x.shape for x in gradients] == [query.shape] * 3


@pytest.mark.parametrize("count", [1, 3])
def test_without_gradients_less_is_kept_and_the_result_is_the_same(count, monkeypatch):
    segments(monkeypatch, count, 2)
    inputs = inputs_of(batch=1, heads=2, sinks=16 * count + 1)
    for variant in (DEFAULT, FlowVariant(competition="none"), FlowVariant(allocation="none")):
        _, start = kernels.recurrent(*inputs_of(batch=1, heads=2, sinks=5, seed=3), None, None, 1.0, variant)
        result, end = kernels.recurrent(*(x.requires_grad_() for x in inputs), None, start, 1.0, variant)
        with torch.no_grad():
            other, other_end = kernels.recurrent(*inputs, None, start, 1.0, variant)
        assert torch.equal(result, other)
        assert all(torch.equal(one, two) for one, two in zip(end, other_end, strict=True))


def test_the_operators_pass_opcheck():
    query, key, value = inputs_of(batch=1, heads=1, sinks=5)
    options = options_of(1.0, DEFAULT)
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


gpu = pytest.mark.gpu
needs_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")


@gpu
@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [1000, 4096])
def test_long_sequences(length, dtype):
    check(inputs_of(dtype, batch=1, heads=2, sinks=length, dim=64))


@gpu
@needs_gpu
def test_compiles_without_graph_breaks():
    inputs = inputs_of(torch.bfloat16, batch=2, heads=2, sinks=130, dim=64)
    compiled = torch.compile(run(), fullgraph=True)
    for one, other in zip(with_gradients(compiled, inputs), with_gradients(run(), inputs), strict=True):
        assert torch.equal(one, other)


@gpu
@needs_gpu
def test_captured_in_a_graph_on_another_stream():
    inputs = inputs_of(torch.bfloat16, batch=2, heads=2, sinks=1000, dim=64)
    expected = run()(*inputs)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        assert torch.equal(run()(*inputs), expected)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run()(*inputs)
    result.fill_(torch.nan)
    graph.replay()
    assert torch.equal(result, expected)


@gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_on_a_device_that_is_not_the_current_one():
    inputs = inputs_of(torch.bfloat16, batch=2, heads=2, sinks=130, dim=64)
    elsewhere = [x.to("cuda:1") for x in inputs]
    # the second time, the kernels are launched again
    for _ in range(2):
        for one, other in zip(with_gradients(run(), elsewhere), with_gradients(run(), inputs), strict=True):
            assert one.device.index == 1
            assert torch.equal(one.cpu(), other.cpu())


@gpu
@needs_gpu
def test_a_million_tokens():
    inputs = [torch.randn(1, 16, 2**20, 64, device=DEVICE, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    result, state = kernels.recurrent(*inputs, None, None, 1.0, DEFAULT)
    gradients = torch.autograd.grad(result, inputs, torch.ones_like(result))
    assert all(x.isfinite().all() for x in (result, *gradients))
    assert FlowState.unpack(state).count.item() == 2**20
    # the first tokens do not know how many follow
    torch.testing.assert_close(result[:, :, :512], run()(*(x[:, :, :512] for x in inputs)), rtol=2e-2, atol=2e-3)


@gpu
@needs_gpu
def test_more_elements_than_32_bits_count():
    shape = 33, 16, 2**16, 64
    inputs = [torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) for _ in range(3)]
    with torch.no_grad():
        result = run()(*inputs)
        alone = run()(*(x[-1:] for x in inputs))
    torch.testing.assert_close(result[-1:], alone, rtol=2e-2, atol=2e-3)
