"""The causal Triton kernels with a state: sequences cut anywhere, continued, and packed one after another."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import asdict

import pytest
import torch

pytest.importorskip("triton")

from causal_kernels import DEFAULT, DEVICE, assert_as_exact_as_torch, inputs_of, run, segments
from causal_kernels import small_chunks as small_chunks  # a fixture of every test
from helpers import with_gradients

from flowformer import FlowVariant
from flowformer.ops import reference
from flowformer.ops.common import Options
from flowformer.ops.state import FlowState
from flowformer.ops.torch import op as torch_op
from flowformer.ops.triton.causal import op as kernels


def cut_in_two(cut, causal):
    def together(query, key, value):
        parts, state = [], None
        for tokens in (slice(None, cut), slice(cut, None)):
            part, state = causal(*(x[:, :, tokens] for x in (query, key, value)), None, state, Options(1.0, DEFAULT))
            parts.append(part)
        sums, memory, scalars = state
        # the gradient must reach the past also through the state after the last token
        return torch.cat([torch.cat(parts, 2).flatten(), sums.flatten(), memory.flatten(), scalars[..., 1].flatten()])

    return together


def reference_causal(query, key, value, mask, state, options):
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    return reference.causal(query, key, value, mask, state, options.scale, **asdict(options.variant))


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
    _, start = torch_op.recurrent(*inputs_of(batch=1, heads=2, sinks=5, seed=3), None, None, Options(1.0, DEFAULT))

    def ends(causal, dtype):
        leaves = [x.detach().to(dtype).requires_grad_() for x in start]
        _, end = causal(*(x.to(dtype) for x in (query, key, value)), None, tuple(leaves), Options(1.0, DEFAULT))
        return torch.autograd.grad(end[0].sum() + end[1].square().sum() + end[2][..., 1].sum(), leaves)

    for grad, truth in zip(ends(kernels.recurrent, torch.float32), ends(reference_causal, torch.float64), strict=True):
        torch.testing.assert_close(grad.double(), truth, rtol=1e-4, atol=1e-5)


def test_padding_leaves_the_state_as_it_is(monkeypatch):
    segments(monkeypatch, 2, 2)
    inputs = inputs_of(batch=2, heads=1, sinks=30)
    mask = torch.ones(2, 30, dtype=torch.bool, device=DEVICE)
    mask[0, 11:] = False
    _, padded = kernels.recurrent(*inputs, mask, None, Options(1.0, DEFAULT))
    _, alone = kernels.recurrent(*(x[:1, :, :11] for x in inputs), None, None, Options(1.0, DEFAULT))
    for one, other in zip(padded, alone, strict=True):
        torch.testing.assert_close(one[:1], other, rtol=1e-5, atol=1e-6)
    assert FlowState.unpack(padded).count.tolist() == [11, 30]


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


@pytest.mark.parametrize("count", [1, 3])
def test_without_gradients_less_is_kept_and_the_result_is_the_same(count, monkeypatch):
    segments(monkeypatch, count, 2)
    inputs = inputs_of(batch=1, heads=2, sinks=16 * count + 1)
    for variant in (DEFAULT, FlowVariant(competition="none"), FlowVariant(allocation="none")):
        _, start = kernels.recurrent(*inputs_of(batch=1, heads=2, sinks=5, seed=3), None, None, Options(1.0, variant))
        result, end = kernels.recurrent(*(x.requires_grad_() for x in inputs), None, start, Options(1.0, variant))
        with torch.no_grad():
            other, other_end = kernels.recurrent(*inputs, None, start, Options(1.0, variant))
        assert torch.equal(result, other)
        assert all(torch.equal(one, two) for one, two in zip(end, other_end, strict=True))


def packed_inputs(tokens, **options):
    return [x[0].transpose(0, 1).contiguous() for x in inputs_of(batch=1, sinks=tokens, **options)]


def test_packed_sequences_are_the_loop_over_them(monkeypatch):
    segments(monkeypatch, 2, 8)
    bounds = torch.tensor([0, 1, 1, 9, 33], dtype=torch.int32, device=DEVICE)
    inputs = packed_inputs(36, heads=2, key_heads=1, value_dim=3)

    def packed(query, key, value):
        return kernels.packed(query, key, value, (bounds, bounds, 24, 24), Options(1.0, DEFAULT))

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
    results = with_gradients(
        lambda q, k, v: kernels.packed(q, k, v, (bounds, bounds, 40, 40), Options(1.0, DEFAULT)), inputs
    )
    assert [x.shape for x in results] == [inputs[2].shape, *(x.shape for x in inputs)]
    assert all(x.isfinite().all() for x in results)


def test_packed_refuses_keys_that_are_bound_otherwise():
    inputs = packed_inputs(40, heads=1)
    bounds, others = (torch.tensor([0, x, 40], device=DEVICE) for x in (10, 11))
    with pytest.raises(ValueError, match="as many queries as keys in each sequence"):
        kernels.packed(*inputs, (bounds, others, 40, 40), Options(1.0, DEFAULT))
