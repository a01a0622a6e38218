"""The matrix of an attention by its columns and rows: against the matrix itself, for Flow-Attention and every rival."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import random_inputs

from flowformer import FlowVariant, baselines, flow_attention
from flowformer.nn import FlowAttention, FlowEncoderLayer, build_attention, matrix_maps, record_matrices
from flowformer.ops import reference

LENGTH = 13


def entropy(weights):
    shares = weights / weights.sum(-1, keepdim=True).clamp_min(1e-300)
    return -(shares.xlogy(shares)).sum(-1)


def check(maps, weights):
    weights = weights.abs()
    close = {"rtol": 1e-9, "atol": 1e-9}
    torch.testing.assert_close(maps.column_sums, weights.sum(-2), **close)
    torch.testing.assert_close(maps.row_sums, weights.sum(-1), **close)
    torch.testing.assert_close(maps.row_entropies, entropy(weights), **close)


@pytest.mark.parametrize("block", [1, 5, 128])
@pytest.mark.parametrize("is_causal", [False, True])
def test_is_that_of_the_reference(is_causal, block):
    query, key, _ = random_inputs(heads=2, dim=4, sinks=LENGTH)
    mask = torch.ones(2, LENGTH, dtype=torch.bool)
    mask[1, 9:] = False
    masks = {"query_mask": mask, "key_mask": mask}
    maps = matrix_maps(
        lambda value: flow_attention(query, key, value, is_causal=is_causal, **masks),
        query,
        key,
        is_causal=is_causal,
        block=block,
        **masks,
    )
    if is_causal:
        weights = reference.causal_weights(query, key, mask)
    else:
        weights = reference.bidirectional_weights(query, key, mask, mask)
    check(maps, weights)
    seen = mask.cumsum(-1) if is_causal else mask.sum(-1, keepdim=True).expand(-1, LENGTH)
    assert torch.equal(maps.visible, seen.masked_fill(~mask, 0))
    assert (maps.row_entropies[1, :, 9:] == 0).all()


@pytest.mark.parametrize("name", baselines.names())
def test_every_rival_is_its_matrix_times_the_values(name):
    torch.manual_seed(0)
    mechanism = baselines.build(name, num_heads=2, head_dim=4, max_length=LENGTH).double().eval()
    is_causal = not mechanism.bidirectional
    query, key, value = random_inputs(heads=2, dim=4, sinks=LENGTH)
    identity = torch.eye(LENGTH, dtype=torch.float64).expand(2, 2, -1, -1)
    weights = mechanism.weigh(query, key, identity, is_causal=is_causal)
    weighted = mechanism.weigh(query, key, value, is_causal=is_causal)
    torch.testing.assert_close(weights @ value, weighted, rtol=1e-9, atol=1e-10)
    result = mechanism(query, key, value, is_causal=is_causal)
    assert torch.equal(result, torch.nn.functional.normalize(weighted, dim=-1) if name == "yoso" else weighted)
    maps = matrix_maps(lambda v: mechanism.weigh(query, key, v, is_causal=is_causal), query, key, block=4)
    check(maps, weights)


@pytest.mark.parametrize("name", ["flow", "softmax", "linear", "synthesizer", "soft"])
def test_is_recorded_in_a_model(name):
    torch.manual_seed(0)
    attention = build_attention(name, 16, 2, max_length=LENGTH).eval()
    mask = torch.ones(2, LENGTH, dtype=torch.bool)
    mask[0, :4] = False
    with record_matrices(attention, block=3) as maps:
        first = attention(torch.randn(2, LENGTH, 16), key_mask=mask)
    assert len(maps) == 1
    assert (maps[0].column_sums[0, :, :4] == 0).all()
    assert (maps[0].column_sums[0, :, 4:] > 0).all()
    assert not attention._forward_pre_hooks
    assert first.shape == (2, LENGTH, 16)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("flow", {}),
        ("flow", {"is_causal": True, "rotary_base": 100.0}),
        ("flow", {"learn_powers": True, "variant": FlowVariant(renormalize=True)}),
        ("flow", {"num_kv_heads": 2}),
        ("softmax", {"num_kv_heads": 2}),
    ],
    ids=["plain", "rotary", "powers", "grouped", "grouped rival"],
)
def test_is_that_of_the_module_with_all_its_options(name, options):
    """Where all values are 1, the result of a head is the sum of a row."""
    torch.manual_seed(0)
    attention = build_attention(name, 16, 4, **options).double().eval()
    for parameter in attention.parameters():
        torch.nn.init.normal_(parameter)
    torch.nn.init.zeros_(attention.v_proj.weight)
    torch.nn.init.ones_(attention.v_proj.bias)
    mask = torch.ones(2, LENGTH, dtype=torch.bool)
    mask[0, :4] = False
    results = []
    attention.out_proj.register_forward_pre_hook(lambda _, args: results.append(args[0]))
    with record_matrices(attention, block=3) as maps:
        attention(torch.randn(2, LENGTH, 16, dtype=torch.float64), key_mask=mask)
    rows = results[0].unflatten(-1, (4, -1))[..., 0].transpose(1, 2)
    torch.testing.assert_close(maps[0].row_sums, rows, rtol=1e-9, atol=1e-9)


def test_recording_needs_evaluation_an_attention_and_whole_sequences():
    attention = FlowAttention(8, 2, is_causal=True)
    with pytest.raises(ValueError, match=r"call model\.eval\(\) first"), record_matrices(attention):
        pass
    with pytest.raises(ValueError, match="Linear has no attention"), record_matrices(torch.nn.Linear(2, 2)):
        pass
    with record_matrices(attention.eval()), pytest.raises(ValueError, match="got a state"):
        attention(torch.randn(1, 1, 8), state=attention.new_state(1))
    with record_matrices(attention), pytest.raises(ValueError, match="got packed sequences"):
        attention(torch.randn(1, 5, 8), cu_seqlens=torch.tensor([0, 2, 5]), max_seqlen=3)


def test_a_layer_records_that_of_its_attention():
    layer, x = FlowEncoderLayer(8, 2).eval(), torch.randn(2, 5, 8)
    with record_matrices(layer) as of_layer:
        layer(x)
    with record_matrices(layer.attention) as of_attention:
        layer.attention(layer.attention_norm(x))
    assert torch.equal(of_layer[0].column_sums, of_attention[0].column_sums)


class TestDegeneracy:
    def of(self, weights, **options):
        weights = torch.as_tensor(weights, dtype=torch.float64)[None, None]
        query, key = weights.new_zeros(1, 1, weights.shape[2], 2), weights.new_zeros(1, 1, weights.shape[3], 2)
        return matrix_maps(lambda value: weights @ value, query, key, **options).degeneracy()

    def test_uniform_attention_is_degenerate(self):
        evenness, share = self.of(torch.full((7, 20), 0.05))
        assert evenness == pytest.approx(1)
        assert share == pytest.approx(0.1)

    def test_attention_to_one_source_is_not(self):
        weights = torch.zeros(7, 20)
        weights[:, 3] = 0.2  # rows need not sum to one
        evenness, share = self.of(weights)
        assert (evenness, share) == (pytest.approx(0, abs=1e-9), pytest.approx(1))

    def test_half_of_the_sources(self):
        weights = torch.zeros(7, 20)
        weights[:, ::2] = 1.0
        evenness, share = self.of(weights)
        assert evenness == pytest.approx(math.log(10) / math.log(20), rel=1e-12)
        assert share == pytest.approx(0.2)

    def test_causal_uniform_attention_is_degenerate_too(self):
        weights = torch.ones(20, 20).tril() / torch.arange(1, 21)[:, None]
        evenness, _ = self.of(weights, is_causal=True)
        assert evenness == pytest.approx(1)
        # but early sources have more sinks
        weights = torch.ones(1000, 1000).tril() / torch.arange(1, 1001)[:, None]
        assert self.of(weights, is_causal=True).top_share == pytest.approx(0.1 * (1 - math.log(0.1)), abs=1e-3)

    def test_padding_counts_for_nothing(self):
        query, key, _ = random_inputs(heads=2, dim=4, sinks=30)
        mask = (torch.arange(30) < 20).expand(2, -1)

        def of(q, k, **masks):
            return matrix_maps(lambda v: flow_attention(q, k, v, **masks), q, k, **masks).degeneracy()

        padded = of(query, key, query_mask=mask, key_mask=mask)
        assert padded == pytest.approx(of(query[:, :, :20], key[:, :, :20]))

    def test_no_tokens(self):
        empty = torch.zeros(1, 1, 0, 2)
        maps = matrix_maps(lambda value: flow_attention(empty, empty, value), empty, empty)
        assert maps.column_sums.shape == (1, 1, 0)

    def test_competition_makes_flow_attention_less_even(self):
        query, key, _ = random_inputs(heads=2, dim=8, sinks=64)
        query, key = 3 * query, 3 * key

        def of(variant):
            return matrix_maps(lambda v: flow_attention(query, key, v, variant=variant), query, key).degeneracy()

        assert of(FlowVariant()).evenness < of(FlowVariant(competition="none")).evenness < 1
