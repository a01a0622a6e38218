"""The variant of the code released for the Long-Range Arena: φ = ReLU + ε, and heads that compete for each source."""

from __future__ import annotations

import re

import pytest
import torch
from helpers import ROOT, random_inputs, relative_error, with_gradients

from flowformer import (
    FlowVariant,
    explain,
    flow_attention,
    flow_attention_recurrent,
    flow_attention_varlen,
    flow_maps,
)
from flowformer.models import ClassifierConfig, FlowformerClassifier
from flowformer.nn import FlowAttention
from flowformer.ops.triton import op
from flowformer.ops.variant import PRESETS
from flowformer.train import recipes

LRA = FlowVariant.named("lra")
VARIANTS = {
    "lra": LRA,
    "sigmoid": FlowVariant(competitors="heads"),
    "to the letter": FlowVariant(competitors="heads", rescale=False, clamp=1.0, flow_eps=1e-6),
}
BACKENDS = pytest.mark.parametrize("backend", ["torch", "reference"])


def released(query, key, value):
    """What the release writes, in its order of axes: batch, source, head. (B, H, N, D) come in and go out."""
    eps = 1e-6
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    q, k = q.relu() + eps, k.relu() + eps
    sinks, sources = q.shape[1], k.shape[1]

    def flow(x, total):
        return ((x + eps) * (total[:, None] + eps)).sum(-1)  # (B, N, H)

    incoming, outgoing = 1 / flow(q, k.sum(1)), 1 / flow(k, q.sum(1))
    conserved_incoming = flow(q, (k * outgoing[..., None]).sum(1)) * (sinks / sources)
    conserved_outgoing = flow(k, (q * incoming[..., None]).sum(1))
    competition = conserved_outgoing.softmax(-1) * sources
    memory = torch.einsum("bshd,bshe->bhde", k, v * competition[..., None])
    result = torch.einsum("bnhd,bhde,bnh->bnhe", q, memory, incoming)
    return (result * conserved_incoming.sigmoid()[..., None]).transpose(1, 2)


@BACKENDS
@pytest.mark.parametrize("sources", [9, 5])
def test_computes_what_the_release_computes(backend, sources):
    inputs = random_inputs(heads=4, dim=6, value_dim=5, sinks=9, sources=sources)
    ours = with_gradients(lambda *x: flow_attention(*x, variant="lra", backend=backend), inputs)
    for value, truth in zip(ours, with_gradients(released, inputs), strict=True):
        torch.testing.assert_close(value, truth, rtol=1e-10, atol=1e-12)


def test_is_another_function_than_competition_of_tokens():
    inputs = random_inputs(heads=4, dim=8, sinks=64)
    heads, tokens = (flow_attention(*inputs, variant=variant) for variant in ("lra", FlowVariant(feature_map="relu")))
    assert heads.abs().mean() > 8 * tokens.abs().mean(), "about m/H = 16 times as large"
    competition = flow_maps(*inputs[:2], variant="lra").competition
    torch.testing.assert_close(competition.sum(1), torch.full_like(competition[:, 0], 64.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("name", VARIANTS)
def test_torch_equals_the_reference(name, dtype):
    inputs = random_inputs(heads=4, dim=7, value_dim=3, sinks=70, sources=33, dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    masks = {"query_mask": torch.rand(2, 70, generator=generator) < 0.7}
    masks["key_mask"] = torch.rand(2, 33, generator=generator) < 0.7
    ours, truth = (
        with_gradients(lambda *x, b=b: flow_attention(*x, **masks, variant=VARIANTS[name], backend=b), x)
        for b, x in (("torch", inputs), ("reference", [x.double() for x in inputs]))
    )
    for value, true in zip(ours, truth, strict=True):
        assert value.dtype == dtype
        assert relative_error(value, true) < 50 * torch.finfo(dtype).eps


@BACKENDS
@pytest.mark.parametrize("name", VARIANTS)
def test_padded_is_alone(name, backend):
    inputs = random_inputs(heads=3, dim=4, sinks=12)
    mask = torch.ones(2, 12, dtype=torch.bool)
    mask[1, :3] = mask[1, 9:] = False
    padded = [x.masked_fill(~mask[:, None, :, None], torch.nan) for x in inputs]
    options = {"variant": VARIANTS[name], "backend": backend}
    together = flow_attention(*padded, query_mask=mask, key_mask=mask, **options)
    assert (together[1, :, ~mask[1]] == 0).all()
    for row in range(2):
        alone = flow_attention(*(x[row : row + 1, :, mask[row]] for x in inputs), **options)
        torch.testing.assert_close(together[row, :, mask[row]], alone[0], rtol=1e-11, atol=1e-12)


@BACKENDS
def test_packed_is_a_loop(backend):
    bounds = torch.tensor([0, 5, 5, 12])
    inputs = [torch.randn(14, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(i)) for i in range(3)]

    def loop(*x):
        parts = [
            flow_attention(*(each[a:b].transpose(0, 1)[None] for each in x), variant=LRA)[0].transpose(0, 1)
            for a, b in ((0, 5), (5, 12))
        ]
        return torch.cat([*parts, x[0].new_zeros(2, 3, 4)])

    packed = with_gradients(
        lambda *x: flow_attention_varlen(*x, bounds, bounds, 7, 7, variant=LRA, backend=backend), inputs
    )
    for value, truth in zip(packed, with_gradients(loop, inputs), strict=True):
        torch.testing.assert_close(value, truth, rtol=1e-10, atol=1e-12)
    with pytest.raises(ValueError, match="max_seqlen_q is 6"):
        flow_attention_varlen(*inputs, bounds, bounds, 6, 6, variant=LRA, backend=backend)


@BACKENDS
def test_grouped_heads_are_repeated_heads(backend):
    query, key, value = random_inputs(heads=6, dim=4, sinks=11)
    key, value = key[:, :2], value[:, :2]
    grouped = flow_attention(query, key, value, enable_gqa=True, variant=LRA, backend=backend)
    repeated = (x.repeat_interleave(3, 1) for x in (key, value))
    torch.testing.assert_close(grouped, flow_attention(query, *repeated, variant=LRA), rtol=1e-11, atol=1e-13)


@BACKENDS
@pytest.mark.parametrize("shape", [(0, 2, 5, 4), (2, 0, 5, 4), (2, 2, 0, 4)])
def test_nothing_gives_nothing(shape, backend):
    x = torch.zeros(shape)
    assert flow_attention(x, x, x, variant=LRA, backend=backend).shape == shape


def test_other_tokens_of_the_batch_and_autocast_change_nothing():
    inputs = random_inputs(heads=4, dim=8, sinks=20, dtype=torch.float32)
    whole = flow_attention(*inputs, variant=LRA)
    torch.testing.assert_close(whole[:1], flow_attention(*(x[:1] for x in inputs), variant=LRA))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(flow_attention(*inputs, variant=LRA), whole)


def test_compiles_whole():
    inputs = random_inputs(heads=2, dim=4, sinks=8, dtype=torch.float32)
    compiled = torch.compile(lambda *x: flow_attention(*x, variant="lra"), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(*inputs), flow_attention(*inputs, variant="lra"))


@pytest.mark.parametrize("is_causal", [False, True])
def test_relu_with_epsilon_has_the_gradients_of_the_reference(is_causal):
    variant = FlowVariant(feature_map="relu+eps", eps=1e-3)
    inputs = random_inputs(heads=2, dim=5, sinks=70)
    inputs[0][:, :, ::3] = -1.0  # no feature but ε
    inputs[1][:, :, 1] = 0.0
    ours, truth = (
        with_gradients(lambda *x, b=b: flow_attention(*x, is_causal=is_causal, variant=variant, backend=b), inputs)
        for b in ("torch", "reference")
    )
    for value, true in zip(ours, truth, strict=True):
        torch.testing.assert_close(value, true, rtol=1e-9, atol=1e-11)


class TestRefusals:
    x = torch.randn(1, 2, 4, 8)

    def test_there_is_no_causal_form(self):
        bounds = torch.tensor([0, 4])
        for call in (
            lambda: flow_attention(self.x, self.x, self.x, is_causal=True, variant="lra"),
            lambda: flow_attention(self.x, self.x, self.x, is_causal=True, variant="lra", backend="reference"),
            lambda: flow_attention_recurrent(self.x, self.x, self.x, variant="lra"),
            lambda: flow_maps(self.x, self.x, is_causal=True, variant="lra"),
            lambda: flow_attention_varlen(*[self.x[0].mT.mT] * 3, bounds, bounds, 4, 4, is_causal=True, variant="lra"),
            lambda: FlowAttention(16, 2, is_causal=True, variant="lra"),
        ):
            with pytest.raises(NotImplementedError, match=r'competitors="heads".*is bidirectional only'):
                call()

    @pytest.mark.parametrize("variant", [FlowVariant(competitors="heads"), FlowVariant(feature_map="relu+eps"), LRA])
    def test_the_kernels_refuse(self, variant, monkeypatch):
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        monkeypatch.setattr(op, "HAS_TRITON", True)
        with pytest.raises(NotImplementedError, match="the kernels have no competitors"):
            flow_attention(self.x, self.x, self.x, variant=variant, backend="triton")
        assert "triton: no, the kernels have no competitors" in explain(self.x, self.x, self.x, variant=variant)

    def test_unknown_competitors(self):
        with pytest.raises(ValueError, match="unknown competitors 'head'"):
            FlowVariant(competitors="head")


def test_a_model_trains_with_it_and_comes_back_from_a_folder(tmp_path):
    torch.manual_seed(0)
    model = FlowformerClassifier(ClassifierConfig(11, 2, 12, embed_dim=16, mlp_dim=16, variant=LRA))
    tokens = torch.randint(1, 11, (3, 9))
    model(tokens).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    model.eval().save_pretrained(tmp_path)
    again = FlowformerClassifier.from_pretrained(tmp_path)
    assert again.config.variant == LRA
    assert torch.equal(again(tokens), model(tokens))


def test_the_documentation_names_every_variant():
    page = (ROOT / "docs" / "variants.md").read_text()
    (names,) = re.findall(r"`FlowVariant\.named\((.*?)\)`", page)
    assert re.findall(r'"(.*?)"', names) == list(PRESETS)


def test_published_recipes_of_the_long_range_arena_have_it():
    for name in (name for name in recipes.names() if name.startswith("lra/")):
        assert recipes.get(f"{name}@published").model.variant == LRA
        assert recipes.get(name).model.variant == FlowVariant()
