"""Results that are renormalised by the competing sources, and the learned powers of competition and allocation."""

from __future__ import annotations

import itertools
from dataclasses import asdict, replace

import pytest
import torch
from helpers import random_inputs, with_gradients

from flowformer import (
    FlowState,
    FlowVariant,
    flow_attention,
    flow_attention_recurrent,
    flow_attention_varlen,
    flow_maps,
)
from flowformer.nn import FlowAttention
from flowformer.ops import reference

RENORMALIZED = FlowVariant(renormalize=True)
VARIANTS = {
    "default": RENORMALIZED,
    "to the letter": replace(RENORMALIZED, rescale=False, clamp=0.9, flow_eps=1e-3),
    "relu": replace(RENORMALIZED, feature_map="relu", eps=1e-3),
    "no competition": replace(RENORMALIZED, competition="none"),
    "no allocation": replace(RENORMALIZED, allocation="none"),
}
EVERY_VARIANT = pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
EVERY_BACKEND = pytest.mark.parametrize("backend", ["native", "torch", "reference"])
BOTH_DIRECTIONS = pytest.mark.parametrize("is_causal", [False, True])


def powers_of(heads: int, dtype=torch.float64) -> torch.Tensor:
    return torch.linspace(-0.7, 1.9, 2 * heads, dtype=dtype).view(2, heads)


def close(value, truth, tolerance=1e-10):
    torch.testing.assert_close(value, truth, rtol=tolerance, atol=tolerance)


@BOTH_DIRECTIONS
def test_is_the_equation(is_causal):
    query, key, value = random_inputs(batch=1, heads=2, sinks=7)
    powers = powers_of(2)
    maps = flow_maps(query, key, is_causal=is_causal, variant=RENORMALIZED, powers=powers)
    weight = query.sigmoid() @ key.sigmoid().mT
    if is_causal:
        weight = weight.tril()
        # c is fixed when its source enters
        exponent = powers[0, :, None] * maps.conserved_outgoing
        position = torch.arange(1, 8)
        competition = position * (exponent - exponent.logcumsumexp(-1)).exp()
    else:
        competition = (powers[0, :, None] * maps.conserved_outgoing).exp()  # its normaliser cancels
    weight = weight * competition[..., None, :]
    allocation = maps.conserved_incoming.sigmoid() ** powers[1, :, None]
    expected = allocation[..., None] * (weight @ value) / weight.sum(-1, keepdim=True)
    result = flow_attention(query, key, value, is_causal=is_causal, variant=RENORMALIZED, powers=powers)
    close(result, expected, 1e-5)  # the equation has no ε


@BOTH_DIRECTIONS
def test_rows_sum_to_the_allocation(is_causal):
    query, key, _ = random_inputs(sinks=9)
    options = {**asdict(RENORMALIZED), "powers": powers_of(3)}
    if is_causal:
        weights, maps = (f(query, key, **options) for f in (reference.causal_weights, reference.causal_maps))
    else:
        weights = reference.bidirectional_weights(query, key, **options)
        maps = reference.bidirectional_maps(query, key, **options)
    close(weights.sum(-1), maps.allocation, 1e-5)


@EVERY_BACKEND
@BOTH_DIRECTIONS
def test_powers_of_zero_leave_linear_attention(backend, is_causal):
    inputs = random_inputs(sinks=70)
    linear = FlowVariant(competition="none", allocation="none")
    expected = flow_attention(*inputs, is_causal=is_causal, variant=linear, backend=backend)
    zeros = torch.zeros(2, 3, dtype=torch.float64)
    result = flow_attention(*inputs, is_causal=is_causal, variant=RENORMALIZED, powers=zeros, backend=backend)
    close(result, expected)


@EVERY_BACKEND
@BOTH_DIRECTIONS
def test_powers_of_one_are_no_powers(backend, is_causal):
    inputs = random_inputs(sinks=70)
    options = {"is_causal": is_causal, "variant": RENORMALIZED, "backend": backend}
    ones = torch.ones(2, 3, dtype=torch.float64)
    close(flow_attention(*inputs, powers=ones, **options), flow_attention(*inputs, **options))


@BOTH_DIRECTIONS
def test_without_competition_it_changes_nothing(is_causal):
    inputs, variant = random_inputs(sinks=70), FlowVariant(competition="none")
    expected = flow_attention(*inputs, is_causal=is_causal, variant=variant)
    close(flow_attention(*inputs, is_causal=is_causal, variant=replace(variant, renormalize=True)), expected)


@pytest.mark.parametrize("backend", ["native", "torch"])
@EVERY_VARIANT
@BOTH_DIRECTIONS
@pytest.mark.parametrize("length", [1, 5, 64, 130])
def test_gradients_of_everything_equal_the_oracle(variant, is_causal, length, backend):
    """The powers too; shared key heads, masks on both sides, values of another width."""
    inputs = random_inputs(heads=4, key_heads=2, sinks=length, dim=5, value_dim=3)
    mask = torch.ones(2, length, dtype=torch.bool)
    mask[1, length // 2 :] = False

    def run(backend):
        def call(query, key, value, powers):
            options = {"query_mask": mask, "key_mask": mask, "enable_gqa": True, "variant": variant}
            return flow_attention(
                query, key, value, is_causal=is_causal, powers=powers, backend=backend, scale=0.8, **options
            )

        return with_gradients(call, (*inputs, powers_of(4)))

    for value, truth in zip(run(backend), run("reference"), strict=True):
        close(value, truth, 1e-9)


def test_the_oracle_passes_gradcheck():
    inputs = (*random_inputs(batch=1, heads=2, sinks=4, dim=3), powers_of(2))
    inputs = [x.requires_grad_() for x in inputs]
    for is_causal in (False, True):

        def call(query, key, value, powers, is_causal=is_causal):
            options = {"is_causal": is_causal, "variant": RENORMALIZED, "backend": "reference"}
            return flow_attention(query, key, value, powers=powers, **options)

        assert torch.autograd.gradcheck(call, inputs)


@EVERY_BACKEND
@EVERY_VARIANT
@pytest.mark.parametrize("cuts", [[1, 1, 18, 50], [70], [64, 6], [3, 0, 67]])
def test_split_equals_whole(backend, variant, cuts):
    """Results, the gradients of inputs and powers, and the state at the end."""
    inputs = (*random_inputs(sinks=70), powers_of(3))

    def split(query, key, value, powers):
        state, results = None, []
        for q, k, v in zip(*(x.split(cuts, 2) for x in (query, key, value)), strict=True):
            out, state = flow_attention_recurrent(q, k, v, state, variant=variant, powers=powers, backend=backend)
            results.append(out)
        assert state.sums.shape == (2, 3, 5, 4)
        return torch.cat(
            [
                *results,
                *(part.flatten(2).mean(-1, keepdim=True)[..., None].expand(-1, -1, -1, 4) for part in state.pack()[:2]),
            ],
            2,
        )

    def whole(query, key, value, powers):
        result, state = flow_attention_recurrent(query, key, value, variant=variant, powers=powers, backend="reference")
        return torch.cat(
            [
                result,
                *(part.flatten(2).mean(-1, keepdim=True)[..., None].expand(-1, -1, -1, 4) for part in state.pack()[:2]),
            ],
            2,
        )

    for value, truth in zip(with_gradients(split, inputs), with_gradients(whole, inputs), strict=True):
        close(value, truth, 1e-9)


@EVERY_BACKEND
@BOTH_DIRECTIONS
def test_packed_equals_a_loop(backend, is_causal):
    lengths = [3, 0, 70, 1, 20]
    query, key, value = (x[0].transpose(0, 1) for x in random_inputs(batch=1, heads=4, key_heads=2, sinks=97))
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    options = {"is_causal": is_causal, "enable_gqa": True, "variant": RENORMALIZED, "backend": backend}

    def packed(query, key, value, powers):
        return flow_attention_varlen(query, key, value, bounds, bounds, 70, 70, powers=powers, **options)

    def loop(query, key, value, powers):
        parts = zip(*(x[:94].split(lengths) for x in (query, key, value)), strict=True)
        results = [
            flow_attention(*(x.transpose(0, 1)[None] for x in part), powers=powers, **options)[0].transpose(0, 1)
            for part in parts
        ]
        return torch.cat([*results, torch.zeros_like(query[94:])])  # the last tokens belong to no sequence

    inputs = query, key, value, powers_of(4)
    for result, truth in zip(with_gradients(packed, inputs), with_gradients(loop, inputs), strict=True):
        close(result, truth, 1e-9)


@EVERY_BACKEND
@BOTH_DIRECTIONS
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_equals_alone(backend, is_causal, side):
    inputs, powers = random_inputs(sinks=9), powers_of(3)
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[1, slice(0, 4) if side == "left" else slice(5, None)] = False
    options = {"is_causal": is_causal, "variant": RENORMALIZED, "powers": powers, "backend": backend}
    padded = flow_attention(
        *(x.masked_fill(~mask[:, None, :, None], torch.nan) for x in inputs), query_mask=mask, key_mask=mask, **options
    )
    alone = flow_attention(*(x[1:, :, mask[1]] for x in inputs), **options)
    close(padded[1:, :, mask[1]], alone)
    assert not padded[1, :, ~mask[1]].any()


@EVERY_BACKEND
def test_the_future_does_not_leak(backend):
    inputs = random_inputs(sinks=70)
    changed = tuple(torch.cat([x[:, :, :40], x[:, :, 40:] + 1], 2) for x in inputs)
    options = {"is_causal": True, "variant": RENORMALIZED, "powers": powers_of(3), "backend": backend}
    close(flow_attention(*inputs, **options)[:, :, :40], flow_attention(*changed, **options)[:, :, :40])


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [*itertools.product(["native", "torch"], [torch.float32, torch.bfloat16]), ("torch", torch.float16)],
)
@BOTH_DIRECTIONS
def test_saturated_inputs_stay_finite(backend, dtype, is_causal):
    query, key, value = random_inputs(sinks=70, dtype=dtype)
    inputs, powers = (1e4 * query, 1e4 * key, value), torch.tensor([[30.0, -30.0, 0.0], [9.0, -2.0, 0.0]])
    options = {"is_causal": is_causal, "backend": backend}
    for variant in (RENORMALIZED, VARIANTS["relu"]):
        for part in with_gradients(
            lambda *x, v=variant: flow_attention(*x[:3], variant=v, powers=x[3], **options).float(), (*inputs, powers)
        ):
            assert part.isfinite().all()


@EVERY_BACKEND
@BOTH_DIRECTIONS
def test_low_precision_follows_the_oracle(backend, is_causal):
    inputs = random_inputs(sinks=70, dtype=torch.bfloat16)
    powers = powers_of(3, torch.float32)
    result = flow_attention(*inputs, is_causal=is_causal, variant=RENORMALIZED, powers=powers, backend=backend)
    assert result.dtype == torch.bfloat16
    expected = flow_attention(
        *(x.double() for x in inputs), is_causal=is_causal, variant=RENORMALIZED, powers=powers, backend="reference"
    )
    torch.testing.assert_close(result.double(), expected, rtol=2e-2, atol=1e-2)


def test_second_derivatives_exist():
    query, key, value = (x.requires_grad_() for x in random_inputs(batch=1, heads=1, sinks=3, dim=2))
    assert torch.autograd.gradgradcheck(
        lambda *x: flow_attention(*x, is_causal=True, variant=RENORMALIZED, backend="torch"), (query, key, value)
    )


def test_compiles_and_exports():
    class Attend(torch.nn.Module):
        def forward(self, query, powers):
            return flow_attention(query, query, query, is_causal=True, variant=RENORMALIZED, powers=powers)

    query, powers = torch.randn(1, 2, 9, 4), torch.rand(2, 2)
    program = torch.export.export(Attend(), (query, powers), dynamic_shapes=({2: torch.export.Dim.AUTO}, None))
    longer = torch.randn(1, 2, 150, 4)
    torch.testing.assert_close(program.module()(longer, powers), Attend()(longer, powers))


def test_module_learns_from_linear_attention():
    torch.manual_seed(0)
    linear = FlowVariant(competition="none", allocation="none")
    module = FlowAttention(8, 2, is_causal=True, variant=RENORMALIZED, learn_powers=True).double()
    plain = FlowAttention(8, 2, is_causal=True, variant=linear).double()
    assert not plain.load_state_dict(module.state_dict(), strict=False).missing_keys
    x = torch.randn(2, 6, 8, dtype=torch.float64)
    close(module(x), plain(x))
    module(x).square().sum().backward()
    assert module.powers.grad.abs().min() > 0
    torch.nn.init.normal_(module.powers)
    state, parts = module.new_state(2), []
    for token in x.split(1, 1):
        out, state = module(token, state=state)
        parts.append(out)
    close(torch.cat(parts, 1), module(x))
    bounds = torch.tensor([0, 2, 6])
    close(module(x[:1], cu_seqlens=bounds)[:, 2:], module(x[:1, 2:]))
    module.reset_parameters()
    assert not module.powers.any()


X = torch.randn(2, 3, 5, 4)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"powers": torch.zeros(3)}, ValueError, r"\(2, 3\).*got \(3,\)"),
        ({"powers": torch.zeros(2, 3, dtype=torch.long)}, TypeError, "torch.int64"),
        ({"powers": [[0.0] * 3] * 2}, TypeError, "list"),
        ({"powers": torch.zeros(2, 3, device="meta")}, ValueError, "meta"),
        ({"powers": torch.zeros(2, 3), "variant": FlowVariant()}, ValueError, "renormalize=True"),
        ({"powers": torch.zeros(2, 3), "variant": replace(RENORMALIZED, allocation="softmax")}, ValueError, "softmax"),
    ],
)
def test_bad_powers_are_refused(options, error, words):
    with pytest.raises(error, match=words):
        flow_attention(X, X, X, **{"variant": RENORMALIZED, **options})


def test_a_state_of_another_variant_is_refused():
    for state, variant in (
        (FlowState.empty(2, 3, 4), RENORMALIZED),
        (FlowState.empty(2, 3, 4, variant=RENORMALIZED), FlowVariant()),
    ):
        with pytest.raises(ValueError, match="renormalize"):
            flow_attention_recurrent(X, X, X, state, variant=variant)
    with pytest.raises(ValueError, match="renormalize=True"):
        FlowAttention(8, 2, learn_powers=True)


def test_state_rows():
    _, state = flow_attention_recurrent(X, X, X, variant=RENORMALIZED)
    fresh = state.zero_rows(torch.tensor([True, False]))
    first, _ = flow_attention_recurrent(X, X, X, fresh, variant=RENORMALIZED)
    torch.testing.assert_close(first[0], flow_attention(X, X, X, is_causal=True, variant=RENORMALIZED)[0])
    torch.testing.assert_close(fresh.sums[1], state.sums[1])
