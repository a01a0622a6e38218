"""The oracle itself: against the equations as plain loops, cases done by hand, and finite differences."""

from __future__ import annotations

import math
from dataclasses import asdict, replace

import pytest
import torch
from helpers import VARIANTS, random_inputs
from torch.autograd import gradcheck, gradgradcheck

from flowformer import FlowVariant
from flowformer.ops import reference

# ε large enough that a forgotten one shows in the third digit
LOUD = {name: replace(variant, eps=0.03) for name, variant in VARIANTS.items()}
MASK = torch.tensor([[True, False, True, True, False], [False, True, True, True, True]])


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def phi(row, scale, variant):
    """φ(scale·x) of one token, a list of D numbers."""
    maps = {
        "sigmoid": sigmoid,
        "elu+1": lambda x: x + 1 if x > 0 else math.exp(x),
        "relu": lambda x: max(x, 0.0),
    }
    return [maps[variant.feature_map](scale * x) for x in row]


def flow(a, b, variant):
    """⟨a, b⟩_ε"""
    return sum((x + variant.eps) * (y + variant.eps) for x, y in zip(a, b, strict=True)) + variant.flow_eps


def total(rows, divisors=None):
    divisors = divisors or [1] * len(rows)
    return [sum(row[c] / divisor for row, divisor in zip(rows, divisors, strict=True)) for c in range(len(rows[0]))]


def bounded(x, variant):
    return x if variant.clamp is None else min(max(x, -variant.clamp), variant.clamp)


def competition_of(outgoing, variant, factor):
    """c of each source among those of the list."""
    outgoing = [bounded(x, variant) for x in outgoing]
    if variant.competition == "softmax":
        return [factor * math.exp(x) / sum(map(math.exp, outgoing)) for x in outgoing]
    return [sigmoid(x) if variant.competition == "sigmoid" else 1.0 for x in outgoing]


def loop_bidirectional(Q, K, V, scale, variant):
    """Section 2 for one head: lists of n, m and m rows."""
    q, k = [phi(row, scale, variant) for row in Q], [phi(row, scale, variant) for row in K]
    n, m = len(q), len(k)
    I = [flow(row, total(k), variant) for row in q]  # noqa: E741
    O = [flow(row, total(q), variant) for row in k]  # noqa: E741
    conserved_in = [flow(row, total(k, O), variant) for row in q]
    conserved_out = [flow(row, total(q, I), variant) for row in k]
    c = competition_of(conserved_out, variant, m if variant.rescale else 1)
    if variant.allocation == "sigmoid":
        alpha = [sigmoid(x * (n / m if variant.rescale else 1)) for x in conserved_in]
    elif variant.allocation == "softmax":
        alpha = [(n if variant.rescale else 1) * math.exp(x) / sum(map(math.exp, conserved_in)) for x in conserved_in]
    else:
        alpha = [1.0] * n
    competing = total(k, [1 / x for x in c])  # Σ c k
    normalizer = [flow(row, competing, variant) for row in q] if variant.renormalize else I
    R = []
    for i in range(n):
        weights = [sum(a * b for a, b in zip(q[i], k[j], strict=True)) * c[j] for j in range(m)]
        R.append([alpha[i] / normalizer[i] * sum(weights[j] * V[j][e] for j in range(m)) for e in range(len(V[0]))])
    return R, (I, O, conserved_in, conserved_out, c, alpha)


def loop_causal(Q, K, V, scale, variant):
    """Section 3 for one head: every sum over s ≤ t written out again for each t."""
    q, k = [phi(row, scale, variant) for row in Q], [phi(row, scale, variant) for row in K]
    I, O, conserved_in, conserved_out, c, alpha, R = [], [], [], [], [], [], []  # noqa: E741
    for t in range(len(q)):
        D = t + 1
        I.append(flow(q[t], total(k[:D]), variant) / D)
        O.append(flow(k[t], total(q[:D]), variant) / D)
        conserved_in.append(flow(q[t], total(k[:D], O), variant) / D)
        conserved_out.append(flow(k[t], total(q[:D], I), variant) / D)
        c.append(competition_of(conserved_out, variant, D)[-1])
        if variant.allocation == "sigmoid":
            alpha.append(sigmoid(conserved_in[t]))
        elif variant.allocation == "softmax":
            alpha.append(D * math.exp(conserved_in[t]) / sum(map(math.exp, conserved_in)))
        else:
            alpha.append(1.0)
        weights = [sum(a * b for a, b in zip(q[t], k[s], strict=True)) * c[s] for s in range(D)]
        competing = total(k[:D], [1 / x for x in c])  # Σ c k
        normalizer = flow(q[t], competing, variant) / D if variant.renormalize else I[t]
        R.append([alpha[t] / (normalizer * D) * sum(weights[s] * V[s][e] for s in range(D)) for e in range(len(V[0]))])
    return R, (I, O, conserved_in, conserved_out, c, alpha)


def close(result, rows):
    torch.testing.assert_close(result, torch.tensor(rows, dtype=torch.float64), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("variant", LOUD.values(), ids=LOUD)
class TestLoops:
    def test_bidirectional(self, variant):
        inputs = random_inputs(batch=2, heads=2, sinks=3, sources=5, dim=2, value_dim=3)
        result = reference.bidirectional(*inputs, scale=0.7, **asdict(variant))
        maps = reference.bidirectional_maps(*inputs[:2], scale=0.7, **asdict(variant))
        for b, h in ((0, 0), (1, 1)):
            rows, flows = loop_bidirectional(*(x[b, h].tolist() for x in inputs), 0.7, variant)
            close(result[b, h], rows)
            for map, expected in zip(maps, flows, strict=True):
                close(map[b, h], expected)

    def test_causal(self, variant):
        inputs = random_inputs(batch=2, heads=2, sinks=5, dim=2, value_dim=3)
        result, _ = reference.causal(*inputs, scale=0.7, **asdict(variant))
        maps = reference.causal_maps(*inputs[:2], scale=0.7, **asdict(variant))
        for b, h in ((0, 0), (1, 1)):
            rows, flows = loop_causal(*(x[b, h].tolist() for x in inputs), 0.7, variant)
            close(result[b, h], rows)
            for map, expected in zip(maps, flows, strict=True):
                close(map[b, h], expected)

    def test_masked_bidirectional(self, variant):
        query, key, value = random_inputs(batch=2, sinks=5, heads=1, dim=2)
        query_mask = MASK.flip(1)
        result = reference.bidirectional(query, key, value, query_mask, MASK, **asdict(variant))
        for b in range(2):
            left = query[b, 0, query_mask[b]].tolist(), key[b, 0, MASK[b]].tolist(), value[b, 0, MASK[b]].tolist()
            close(result[b, 0, query_mask[b]], loop_bidirectional(*left, 1.0, variant)[0])
        assert (result[:, 0][~query_mask] == 0).all()

    def test_masked_causal(self, variant):
        inputs = random_inputs(batch=2, sinks=5, heads=1, dim=2)
        result, _ = reference.causal(*inputs, MASK, **asdict(variant))
        for b in range(2):
            close(result[b, 0, MASK[b]], loop_causal(*(x[b, 0, MASK[b]].tolist() for x in inputs), 1.0, variant)[0])
        assert (result[:, 0][~MASK] == 0).all()

    def test_causal_state(self, variant):
        inputs = random_inputs(batch=1, heads=1, sinks=5, dim=2, value_dim=3)
        Q, K, V = (x[0, 0].tolist() for x in inputs)
        rows, (I, O, conserved_in, conserved_out, c, _) = loop_causal(Q, K, V, 1.0, variant)  # noqa: E741
        q, k = [phi(row, 1.0, variant) for row in Q], [phi(row, 1.0, variant) for row in K]
        _, state = reference.causal(*(x[:, :, :2] for x in inputs), **asdict(variant))
        result, (sums, memory, scalars) = reference.causal(
            *(x[:, :, 2:] for x in inputs), state=state, **asdict(variant)
        )
        close(result[0, 0], rows[2:])
        competing = [total(k, [1 / x for x in c])] if variant.renormalize else []  # Σ c k
        close(sums[0, 0], [total(k), total(q), total(k, O), total(q, I), *competing])
        close(memory[0, 0], [[sum(k[s][d] * c[s] * V[s][e] for s in range(5)) for e in range(3)] for d in range(2)])
        assert scalars[0, 0, 0] == 5
        if variant.competition == "softmax":
            close(scalars[0, 0, 1], math.log(sum(math.exp(bounded(x, variant)) for x in conserved_out)))
        if variant.allocation == "softmax":
            close(scalars[0, 0, 2], math.log(sum(map(math.exp, conserved_in))))


class TestByHand:
    """Equal tokens share everything equally: competition is 1, allocation is sigmoid(1), the values are averaged."""

    @pytest.mark.parametrize(("sinks", "sources"), [(1, 1), (2, 2), (3, 2), (2, 7)])
    def test_bidirectional(self, sinks, sources):
        query, key = torch.zeros(1, 1, sinks, 3).double(), torch.zeros(1, 1, sources, 3).double()
        value = random_inputs(1, 1, sources, value_dim=2)[2]
        result = reference.bidirectional(query, key, value, eps=1e-15)
        mean = value.mean(-2, keepdim=True).expand_as(result)
        torch.testing.assert_close(result, sigmoid(1) * mean, rtol=1e-10, atol=0)
        maps = reference.bidirectional_maps(query, key, eps=1e-15)
        torch.testing.assert_close(maps.incoming, torch.full_like(maps.incoming, 0.75 * sources))
        torch.testing.assert_close(maps.outgoing, torch.full_like(maps.outgoing, 0.75 * sinks))
        torch.testing.assert_close(maps.conserved_incoming, torch.full_like(maps.incoming, sources / sinks))
        torch.testing.assert_close(maps.conserved_outgoing, torch.full_like(maps.outgoing, sinks / sources))

    def test_algorithm_1_to_the_letter(self):
        query, key = torch.zeros(1, 1, 2, 3).double(), torch.zeros(1, 1, 4, 3).double()
        value = random_inputs(1, 1, 4, value_dim=2)[2]
        result = reference.bidirectional(query, key, value, eps=1e-15, rescale=False)
        # c = 1/m and α = sigmoid(m/n)
        expected = sigmoid(2) * value.mean(-2, keepdim=True).expand_as(result) / 4
        torch.testing.assert_close(result, expected, rtol=1e-10, atol=0)

    def test_causal(self):
        query, value = torch.zeros(1, 1, 6, 3).double(), random_inputs(1, 1, 6, value_dim=2)[2]
        result, (sums, memory, scalars) = reference.causal(query, query, value, eps=1e-15)
        running_mean = value.cumsum(-2) / torch.arange(1, 7)[:, None]
        torch.testing.assert_close(result, sigmoid(1) * running_mean, rtol=1e-10, atol=0)
        # I = O = 3/4, so that k/O = 2/3; log Σ exp(1) = 1 + log 6
        close(sums[0, 0, :, 0], [3, 3, 4, 4])
        torch.testing.assert_close(memory, 0.5 * value.sum(-2, keepdim=True).expand(1, 1, 3, 2))
        torch.testing.assert_close(scalars[0, 0, :2], torch.tensor([6, 1 + math.log(6)]).double())

    def test_one_hot_features_route_values(self):
        """With ReLU features a sink only receives from sources of its own direction."""
        query = key = 3 * torch.eye(3).double()[None, None]
        value = random_inputs(1, 1, 3, value_dim=4)[2]
        result = reference.bidirectional(query, key, value, eps=1e-15, feature_map="relu")
        # each source goes to one sink alone: I = O = 9, Î = Ô = 1, c = 1
        torch.testing.assert_close(result, sigmoid(1) * value, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", ["bidirectional", "causal"])
def test_weights_times_values_is_the_result(kind):
    query, key, value = random_inputs(sinks=5)
    masks = (MASK.flip(1), MASK) if kind == "bidirectional" else (MASK,)
    weights = getattr(reference, f"{kind}_weights")(query, key, *masks)
    result = getattr(reference, kind)(query, key, value, *masks)
    torch.testing.assert_close(weights @ value, result if kind == "bidirectional" else result[0])
    if kind == "causal":
        assert (weights.triu(1) == 0).all()


def leaves(*tensors):
    return [x.detach().clone().requires_grad_() for x in tensors]


@pytest.mark.parametrize("variant", LOUD.values(), ids=LOUD)
class TestGradients:
    @pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
    def test_bidirectional(self, variant, masked):
        inputs = leaves(*random_inputs(batch=2, heads=1, sinks=5, dim=2, value_dim=1, seed=3))
        masks = (MASK.flip(1), MASK) if masked else (None, None)
        assert gradcheck(
            lambda *x: reference.bidirectional(*x, *masks, 0.7, **asdict(variant)), inputs, check_forward_ad=True
        )

    @pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
    def test_causal(self, variant, masked):
        inputs = leaves(*random_inputs(batch=2, heads=1, sinks=5, dim=2, value_dim=1, seed=3))
        mask = MASK if masked else None
        assert gradcheck(
            lambda *x: reference.causal(*x, mask, None, 0.7, **asdict(variant))[0], inputs, check_forward_ad=True
        )

    @pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
    def test_state(self, variant, masked):
        """Through the result and through the state that is passed on, from the tokens and from the state before."""
        options = asdict(variant)
        inputs = random_inputs(batch=2, heads=1, sinks=3, dim=2, value_dim=1, seed=3)
        past = random_inputs(batch=2, heads=1, sinks=2, dim=2, value_dim=1, seed=4)
        _, (sums, memory, scalars) = reference.causal(*past, **options)
        logs = torch.where(scalars[..., 1:].isfinite(), scalars[..., 1:], 0.5)
        mask = MASK[:, :3] if masked else None

        def function(query, key, value, sums, memory, logs):
            state = sums, memory, torch.cat([scalars[..., :1], logs], -1)
            result, end = reference.causal(query, key, value, mask, state, **options)
            return result, end[0], end[1], end[2][..., 1:]

        assert gradcheck(function, leaves(*inputs, sums, memory, logs))


@pytest.mark.parametrize("kind", ["bidirectional", "causal"])
def test_second_derivatives(kind):
    inputs = leaves(*random_inputs(batch=1, heads=1, sinks=3, dim=2, value_dim=1))

    def function(*x):
        result = getattr(reference, kind)(*x, eps=0.03)
        return result if kind == "bidirectional" else result[0]

    assert gradgradcheck(function, inputs)


@pytest.mark.parametrize("kind", ["bidirectional", "causal"])
@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_nothing_valid_gives_zero_with_zero_gradients(kind, variant):
    inputs = leaves(*random_inputs(batch=2, heads=1, sinks=5, dim=2))
    mask = torch.zeros(2, 5, dtype=torch.bool)
    masks = (mask, mask) if kind == "bidirectional" else (mask,)
    result = getattr(reference, kind)(*inputs, *masks, **asdict(variant))
    result = result if kind == "bidirectional" else result[0]
    assert (result == 0).all()
    for grad in torch.autograd.grad(result.sum(), inputs):
        assert (grad == 0).all()


@pytest.mark.parametrize("kind", ["bidirectional", "causal"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_low_precision_is_summed_in_float32(kind, dtype):
    inputs = random_inputs(dtype=dtype)
    result = getattr(reference, kind)(*inputs)
    wide = getattr(reference, kind)(*(x.float() for x in inputs))
    result, wide = (result, wide) if kind == "bidirectional" else (result[0], wide[0])
    assert result.dtype == dtype
    assert torch.equal(result, wide.to(dtype))


def test_default_options_are_those_of_the_default_variant():
    inputs = random_inputs()
    assert torch.equal(reference.bidirectional(*inputs), reference.bidirectional(*inputs, **asdict(FlowVariant())))
    assert torch.equal(reference.causal(*inputs)[0], reference.causal(*inputs, **asdict(FlowVariant()))[0])
