"""Renormalised results and learned powers by the Triton kernels, interpreted where there is no device."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest
import torch

pytest.importorskip("triton")

from helpers import random_inputs, relative_error, with_gradients

import flowformer.ops.triton.bidirectional.op  # noqa: F401  # registers its operators
from flowformer import FlowState, FlowVariant, explain, flow_attention
from flowformer.bench.errors import FORWARD, GRADIENT, ROUNDING, measure
from flowformer.ops import reference
from flowformer.ops.common import Options
from flowformer.ops.torch import op as torch_op
from flowformer.ops.triton import op as kernels
from flowformer.ops.triton.bidirectional import plan as bidirectional_plan
from flowformer.ops.triton.causal import launch_table
from flowformer.ops.triton.causal import op as causal_op
from flowformer.ops.triton.causal import plan as causal_plan
from flowformer.ops.triton.decode import decode
from flowformer.ops.triton.plan import cached_plan, flat_options

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RENORMALIZED = FlowVariant(renormalize=True)
VARIANTS = {
    "default": RENORMALIZED,
    "tight clamp": replace(RENORMALIZED, rescale=False, clamp=0.9, flow_eps=1e-3),
    "relu": replace(RENORMALIZED, feature_map="relu", eps=1e-3),
    "no competition": replace(RENORMALIZED, competition="none"),
    "no allocation": replace(RENORMALIZED, allocation="none"),
}
every_variant = pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
either_direction = pytest.mark.parametrize("is_causal", [False, True], ids=["bidirectional", "causal"])
whole_or_cut = pytest.mark.parametrize("count", [1, 2], ids=["whole", "cut"], indirect=True)


@pytest.fixture(autouse=True)
def count(request, monkeypatch):
    """Into how many segments each head is cut, with chunks of a few tokens; the device keeps its own chunks."""
    count = getattr(request, "param", 2)
    if DEVICE == "cpu":
        table = {key: config._replace(chunk=16, tile=16) for key, config in launch_table.CONFIGS.items()}
        monkeypatch.setattr(launch_table, "CONFIGS", table)
    for module in (causal_plan, causal_op):
        monkeypatch.setattr(module, "segment_count", lambda *_: count)
    monkeypatch.setattr(bidirectional_plan, "segment_count", lambda *_: count)
    cached_plan.cache_clear()
    yield count
    cached_plan.cache_clear()


def inputs_of(dtype=torch.float32, **options):
    return random_inputs(dtype=dtype, device=DEVICE, **options)


def powers_of(heads, tau=(-0.7, 1.9), gamma=(1.2, 0.0)):
    return torch.stack([torch.linspace(*tau, heads), torch.linspace(*gamma, heads)]).to(DEVICE)


def exact(query, key, value, mask, key_mask, is_causal, variant, powers=None, scale=1.0):
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    options = {**asdict(variant), "powers": powers}
    if is_causal:
        return reference.causal(query, key, value, mask, None, scale, **options)[0]
    return reference.bidirectional(query, key, value, mask, key_mask, scale, **options)


def check(given, is_causal, variant, mask=None, key_mask=None, scale=1.0, factors=(FORWARD, GRADIENT)):
    """The error rule: at most twice the error of plain torch at the same dtype, three times for gradients."""

    def run(backend):
        def call(query, key, value, powers=None):
            if is_causal:
                return backend.causal(query, key, value, mask, Options(scale, variant, powers))
            return backend.bidirectional(query, key, value, (mask, key_mask), Options(scale, variant, powers))

        return call

    results, others = with_gradients(run(kernels), given), with_gradients(run(torch_op), given)
    truths = with_gradients(
        lambda q, k, v, p=None: exact(q, k, v, mask, key_mask, is_causal, variant, p, scale),
        [x.double() for x in given],
    )
    assert_rule(results, others, truths, given[0].dtype, factors)
    return results


def assert_rule(results, others, truths, dtype, factors=(FORWARD, GRADIENT)):
    """The error rule of a result and its gradients, which are measured against the size of all of them."""
    size = torch.stack([truth.norm() for truth in truths[1:]]).norm().item()
    for index, (result, other, truth) in enumerate(zip(results, others, truths, strict=True)):
        factor, whole = (factors[1], size) if index else (factors[0], None)
        # every token contributes to the gradient of the powers
        error = measure(result, other, truth, factor, dtype, whole, is_sum=index == 4)
        assert error.obeys, (index, error)


@every_variant
@either_direction
@whole_or_cut
@pytest.mark.parametrize("has_powers", [False, True], ids=["plain", "powers"])
def test_values_and_gradients_are_the_oracles(variant, is_causal, has_powers):
    """Masks, shared key heads, several tiles of values."""
    given = inputs_of(batch=2, heads=2, key_heads=1, sinks=35, dim=5, value_dim=18)
    mask = torch.ones(2, 35, dtype=torch.bool, device=DEVICE)
    mask[0, :7] = mask[1, 20:] = False
    given = (*given, powers_of(2)) if has_powers else given
    check(given, is_causal, variant, mask, mask, 0.7)


@either_direction
@pytest.mark.parametrize(("dim", "value_dim"), [(1, 1), (17, 3), (34, 16)])
def test_head_dimensions_large_and_small_and_odd(dim, value_dim, is_causal):
    check((*inputs_of(batch=1, heads=1, sinks=34, dim=dim, value_dim=value_dim), powers_of(1)), is_causal, RENORMALIZED)


@either_direction
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_obeys_the_error_rule(dtype, is_causal):
    check((*inputs_of(dtype, batch=1, heads=1, sinks=40, dim=8), powers_of(1)), is_causal, RENORMALIZED)


def ends(causal, cut, variant):
    """The results and the last state of a sequence that is cut in two, together."""

    def together(query, key, value, powers):
        parts, state = [], None
        for tokens in (slice(None, cut), slice(cut, None)):
            q, k, v = (x[:, :, tokens] for x in (query, key, value))
            part, state = causal(q, k, v, None, state, Options(1.0, variant, powers))
            parts.append(part)
        sums, memory, scalars = state
        ends = [torch.cat(parts, 2), sums, memory]
        if variant.competition == "softmax":
            ends.append(scalars[..., 1])
        return torch.cat([x.flatten() for x in ends])

    return together


def reference_recurrent(query, key, value, mask, state, options):
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    named = {"scale": options.scale, "powers": options.powers, **asdict(options.variant)}
    return reference.causal(query, key, value, mask, state, **named)


@every_variant
@whole_or_cut
@pytest.mark.parametrize("cut", [1, 19])
def test_a_sequence_can_be_cut_anywhere(variant, cut):
    """Gradients reach the past and the powers through the state, which has one sum more."""
    given = (*inputs_of(batch=1, heads=2, key_heads=1, sinks=37, dim=5, value_dim=18), powers_of(2))
    results = with_gradients(ends(kernels.recurrent, cut, variant), given)
    others = with_gradients(ends(torch_op.recurrent, cut, variant), given)
    truths = with_gradients(ends(reference_recurrent, cut, variant), [x.double() for x in given])
    assert_rule(results, others, truths, torch.float32)


@either_direction
def test_packed_sequences_are_the_loop_over_them(is_causal):
    bounds = torch.tensor([0, 1, 1, 9, 33], dtype=torch.int32, device=DEVICE)
    given = [x[0].transpose(0, 1).contiguous() for x in inputs_of(batch=1, heads=2, key_heads=1, sinks=36, value_dim=3)]

    def packed(query, key, value, powers):
        lengths = bounds, bounds, 24, 24
        return kernels.packed(query, key, value, lengths, is_causal, Options(1.0, RENORMALIZED, powers))

    def loop(query, key, value, powers):
        parts = []
        for start, stop in ((0, 1), (1, 9), (9, 33)):
            q, k, v = (x[start:stop].transpose(0, 1)[None] for x in (query, key, value))
            parts.append(exact(q, k, v, None, None, is_causal, RENORMALIZED, powers)[0].transpose(0, 1))
        return torch.cat([*parts, query.new_zeros(3, 2, 3)])

    results = with_gradients(packed, (*given, powers_of(2)))
    truths = with_gradients(loop, [x.double() for x in (*given, powers_of(2))])
    for result, truth in zip(results, truths, strict=True):
        assert relative_error(result, truth) < 1e-5
    assert not results[0][33:].any()


@every_variant
@pytest.mark.parametrize("has_powers", [False, True], ids=["plain", "powers"])
def test_decoding_token_by_token_is_the_parallel_form(variant, has_powers):
    given = inputs_of(batch=2, heads=4, key_heads=2, sinks=9, dim=5, value_dim=3)
    powers = powers_of(4) if has_powers else None
    exact_powers = None if powers is None else powers.double()
    truth = exact(*(x.double() for x in given), None, None, True, variant, exact_powers)
    _, end = kernels.recurrent(*given, None, None, Options(1.0, variant, powers))
    state = FlowState.empty(2, 4, 5, 3, variant=variant, device=DEVICE).pack()
    steps = [decode(*(x[:, :, t : t + 1] for x in given), None, state, Options(1.0, variant, powers)) for t in range(9)]
    assert relative_error(torch.cat(steps, 2), truth) < 1e-6
    for part, expected in zip(state, end, strict=True):
        torch.testing.assert_close(part, expected, rtol=1e-5, atol=1e-6)


@either_direction
def test_powers_of_zero_leave_linear_attention(is_causal):
    given = inputs_of(batch=1, heads=2, sinks=35)
    linear = FlowVariant(competition="none", allocation="none")
    zeros = torch.zeros(2, 2, device=DEVICE)
    options = {"is_causal": is_causal, "backend": "triton"}
    result = flow_attention(*given, variant=RENORMALIZED, powers=zeros, **options)
    torch.testing.assert_close(result, flow_attention(*given, variant=linear, **options), rtol=1e-5, atol=1e-6)


@either_direction
@whole_or_cut
@pytest.mark.parametrize("tau", [-150.0, 150.0])
def test_exponents_far_from_zero(is_causal, tau):
    """τ Ô is then in the hundreds, of either sign, and so is its logarithmic sum."""
    given = (*inputs_of(batch=1, heads=1, sinks=35), powers_of(1, (tau, tau), (9.0, 9.0)))
    options = {"is_causal": is_causal, "variant": RENORMALIZED}
    results = with_gradients(lambda q, k, v, p: flow_attention(q, k, v, powers=p, backend="triton", **options), given)
    truths = with_gradients(
        lambda q, k, v, p: exact(q, k, v, None, None, is_causal, RENORMALIZED, p), [x.double() for x in given]
    )
    # a rounding of Ô is τ times as large in its exponential, and one source takes nearly all
    for result, truth in zip(results, truths, strict=True):
        assert relative_error(result, truth) < 30 * abs(tau) * ROUNDING


def test_the_gradients_of_one_token_cancel():
    """Its result is α v: dQ and dK are what ε leaves where large terms cancel."""
    query, key, value = (0.01 * x for x in inputs_of(batch=3, heads=2, sinks=1, dim=96))
    given = *(x.bfloat16() for x in (query, key, 100 * value)), powers_of(2)
    check(given, True, replace(RENORMALIZED, feature_map="relu", eps=1e-4), scale=2.0)


@either_direction
def test_a_row_without_a_source_gives_nothing(is_causal):
    given = (*inputs_of(batch=2, heads=1, sinks=20), powers_of(1, (-150.0, -150.0)))
    mask = torch.tensor([[True], [False]], device=DEVICE).expand(2, 20).contiguous()
    results = check(given, is_causal, RENORMALIZED, mask, mask, factors=(10, 20))
    assert all(not x[1].any() for x in results[:4])


def test_the_powers_alone_may_need_gradients():
    query, key, value = inputs_of(batch=1, heads=2, sinks=20)
    for is_causal in (False, True):
        powers = powers_of(2).requires_grad_()
        options = {"is_causal": is_causal, "variant": RENORMALIZED, "powers": powers}
        found, truth = (
            torch.autograd.grad(flow_attention(query, key, value, backend=backend, **options).square().sum(), powers)[0]
            for backend in ("triton", "reference")
        )
        torch.testing.assert_close(found, truth, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("feature_map", ["sigmoid", "elu+1"])
@pytest.mark.parametrize("variant", [RENORMALIZED, replace(RENORMALIZED, allocation="none")], ids=["gate", "no gate"])
@pytest.mark.parametrize("gamma", [0.0, 0.5])
def test_small_inputs_keep_their_gradients(feature_map, variant, gamma, monkeypatch):
    """Features are then nearly φ(0): where the gate is open, all of dQ is what remains after they cancel."""
    if DEVICE == "cpu":

        class Rounded(causal_plan.CausalPlan):
            """Multiplies as the device does."""

            def __init__(self, *args):
                super().__init__(*args)
                self.features["PRECISION"], self.raised = "rounded", {"RAISED": False}

        monkeypatch.setattr(causal_op, "CausalPlan", Rounded)
    sinks = 777 if DEVICE == "cuda" else 40
    query, key, value = inputs_of(torch.bfloat16, batch=1, heads=1, sinks=sinks, dim=64)
    variant = replace(variant, feature_map=feature_map)
    given = query * 0.2, key * 0.2, value, powers_of(1, (0.7, 0.7), (gamma, gamma))
    ours = with_gradients(lambda q, k, v, p: kernels.causal(q, k, v, None, Options(0.125, variant, p)), given)
    truths = with_gradients(
        lambda q, k, v, p: exact(q, k, v, None, None, True, variant, p, 0.125), [x.double() for x in given]
    )
    # dτ is a sum over flows that are all nearly 1
    for mine, truth in zip(ours[:4], truths[:4], strict=True):
        assert relative_error(mine, truth) < 0.03


@either_direction
def test_twice_the_same_bits_and_every_element_written(is_causal):
    given = (*inputs_of(batch=1, heads=2, key_heads=1, sinks=35, dim=5, value_dim=18), powers_of(2))

    def run():
        return with_gradients(
            lambda q, k, v, p: flow_attention(
                q, k, v, is_causal=is_causal, enable_gqa=True, variant=RENORMALIZED, powers=p, backend="triton"
            ),
            given,
        )

    first = run()
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills what `empty` returns with NaN
    try:
        second = run()
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


@either_direction
@pytest.mark.parametrize("shape", [(0, 2, 5), (2, 0, 5), (2, 2, 0)])
def test_nothing_in_nothing_out(shape, is_causal):
    batch, heads, length = shape
    given = [torch.randn(batch, heads, length, 4, device=DEVICE) for _ in range(3)]
    results = with_gradients(
        lambda q, k, v, p: flow_attention(
            q, k, v, is_causal=is_causal, variant=RENORMALIZED, powers=p, backend="triton"
        ),
        (*given, torch.ones(2, heads, device=DEVICE)),
    )
    assert [x.shape for x in results] == [given[0].shape] * 4 + [(2, heads)]
    assert not results[4].any()


def test_the_operators_pass_opcheck():
    query, key, value = inputs_of(batch=1, heads=2, sinks=5)
    powers, options, tests = powers_of(2), flat_options(Options(1.0, RENORMALIZED)), ("test_schema", "test_faketensor")
    operators = torch.ops.flowformer
    inputs = query, key, value, None, None, None, 5, True, None, None, None, powers, *options
    torch.library.opcheck(operators.triton_causal.default, inputs, test_utils=tests)
    result, end, kept = operators.triton_causal(*inputs)
    inputs = result, end, query, key, value, None, None, 5, powers, None, result, kept, *options
    torch.library.opcheck(operators.triton_causal_backward.default, inputs, test_utils=tests)
    inputs = query, key, value, None, None, None, None, powers, 5, True, *options
    torch.library.opcheck(operators.triton_bidirectional.default, inputs, test_utils=tests)
    result, kept = operators.triton_bidirectional(*inputs)
    inputs = result, query, key, value, None, None, None, None, powers, kept, 5, *options
    torch.library.opcheck(operators.triton_bidirectional_backward.default, inputs, test_utils=tests)
    state = FlowState.empty(1, 2, 4, variant=RENORMALIZED, device=DEVICE).pack()
    token = [x[:, :, :1].contiguous() for x in (query, key, value)]
    torch.library.opcheck(operators.triton_decode.default, (*token, None, powers, *state, *options), test_utils=tests)


@either_direction
def test_compiles_as_one_graph(is_causal):
    given = (*inputs_of(batch=1, heads=2, sinks=9), powers_of(2))

    def run(query, key, value, powers):
        return flow_attention(
            query, key, value, is_causal=is_causal, variant=RENORMALIZED, powers=powers, backend="triton"
        )

    compiled = torch.compile(run, fullgraph=True, backend="inductor" if DEVICE == "cuda" else "aot_eager")
    for mine, other in zip(with_gradients(compiled, given), with_gradients(run, given), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


def test_the_kernels_are_explained():
    query = inputs_of(batch=1, heads=2, sinks=5)[0]
    assert "triton: no" not in explain(query, query, query, variant=RENORMALIZED)
    refused = explain(query, query, query, variant=replace(RENORMALIZED, allocation="softmax"))
    assert 'triton: no, allocation="softmax"' in refused


gpu = pytest.mark.gpu
needs_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")


@gpu
@needs_gpu
@either_direction
@pytest.mark.parametrize("has_powers", [False, True], ids=["plain", "powers"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("dim", [64, 128])
@whole_or_cut
def test_long_sequences(is_causal, has_powers, dtype, dim):
    given = inputs_of(dtype, batch=1, heads=4, key_heads=2, sinks=1000, dim=dim)
    check((*given, powers_of(4)) if has_powers else given, is_causal, RENORMALIZED)


@gpu
@needs_gpu
@either_direction
def test_hedgehog_features_of_a_small_language_model(is_causal, monkeypatch):
    """Nine query heads share three key heads of 64; features are a softmax over 128."""
    monkeypatch.undo()
    cached_plan.cache_clear()
    query, key, value = inputs_of(batch=2, heads=9, key_heads=3, sinks=2048, dim=128, value_dim=64)
    given = *(x.softmax(-1).bfloat16() for x in (query, key)), value.bfloat16(), powers_of(9, (-0.5, 1.0), (0.0, 0.7))
    check(given, is_causal, replace(RENORMALIZED, feature_map="relu"))


@gpu
@needs_gpu
def test_packed_sequences_of_a_language_model(monkeypatch):
    monkeypatch.undo()
    cached_plan.cache_clear()
    lengths = [1, 700, 0, 2048, 63, 64, 65, 300]
    bounds = torch.tensor([0, *lengths], device=DEVICE).cumsum(0).int()
    given = [
        x[0].transpose(0, 1).contiguous()
        for x in inputs_of(torch.bfloat16, batch=1, heads=9, key_heads=3, sinks=sum(lengths), dim=64)
    ]
    given.append(powers_of(9))

    def run(backend):
        def call(query, key, value, powers):
            lengths = bounds, bounds, 2048, 2048
            return backend.packed(query, key, value, lengths, True, Options(1.0, RENORMALIZED, powers))

        return call

    truths = with_gradients(run(torch_op), [x.double() for x in given])
    results, others = with_gradients(run(kernels), given), with_gradients(run(torch_op), given)
    assert_rule(results, others, truths, torch.bfloat16)


@gpu
@needs_gpu
def test_captured_in_a_graph():
    given = inputs_of(torch.bfloat16, batch=2, heads=2, sinks=1000, dim=64)
    powers = powers_of(2)
    expected = kernels.causal(*given, None, Options(1.0, RENORMALIZED, powers))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = kernels.causal(*given, None, Options(1.0, RENORMALIZED, powers))
    result.fill_(torch.nan)
    graph.replay()
    assert torch.equal(result, expected)
