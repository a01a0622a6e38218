"""The laws that each rival attention claims to keep; softmax and linear against their dense formulas."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from helpers import ROOT, allocated, random_inputs, relative_error, with_gradients
from torch.nn.attention import SDPBackend, sdpa_kernel

from flowformer import baselines, nn
from flowformer.models import FlowformerLM, LMConfig
from flowformer.ops.variant import ABLATIONS
from flowformer.train import recipes
from flowformer.train.config import override


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
LINEAR = [name for name in baselines.names() if baselines.get(name).linear]


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


def peak_bytes(name, is_causal, length, is_training):
    """The most that is held at once, besides inputs and parameters."""
    attention = baselines.build(name, num_heads=1, head_dim=8, max_length=length).train(is_training)
    inputs = [x.requires_grad_(is_training) for x in random_inputs(1, 1, length, dim=8, dtype=torch.float32)]
    mask = torch.ones(1, length, dtype=torch.bool)

    def run():
        result = attention(*inputs, is_causal=is_causal, query_mask=mask, key_mask=mask)
        if is_training:
            result.sum().backward()

    # fused kernels would hide what a pattern takes without them
    with sdpa_kernel(SDPBackend.MATH):
        return allocated(run)[1]


@pytest.mark.parametrize("is_training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize(
    ("name", "is_causal"),
    # YOSO-E visits all pairs, and holds a block of them at a time
    [(name, False) for name in [*LINEAR, "yoso"] if name in BIDIRECTIONAL]
    + [(name, True) for name in [*LINEAR, "yoso"] if name in CAUSAL],
)
def test_four_times_the_tokens_take_four_times_the_memory(name, is_causal, is_training):
    short, long = (peak_bytes(name, is_causal, length, is_training) for length in (2048, 8192))
    assert long <= 4.5 * short


def test_what_does_not_claim_to_be_linear():
    assert set(baselines.names()) - set(LINEAR) == {"softmax", "sparse", "synthesizer", "synthesizer-dense", "yoso"}
    assert peak_bytes("softmax", False, 2048, False) > 15 * peak_bytes("softmax", False, 512, False)


@pytest.mark.parametrize("name", baselines.names())
def test_takes_the_place_of_flow_attention(name):
    layer = (nn.FlowEncoderLayer if name in BIDIRECTIONAL else nn.FlowDecoderLayer)(
        24, 4, attention=name, max_length=16
    )
    x = torch.randn(2, 10, 24, requires_grad=True)
    layer(x, mask=torch.ones(2, 10, dtype=torch.bool) if name in MASKED else None).sum().backward()
    for parameter, tensor in layer.named_parameters():
        assert tensor.grad is not None, parameter
        assert tensor.grad.isfinite().all(), parameter


# SOFT and Reformer have queries for keys, and a Synthesizer looks at fewer still
UNREAD = {
    "reformer": {"k_proj"},
    "soft": {"k_proj"},
    "synthesizer": {"q_proj", "k_proj"},
    "synthesizer-dense": {"k_proj"},
}


@pytest.mark.parametrize("name", baselines.names())
def test_there_is_no_projection_that_nothing_reads(name):
    attention = nn.build_attention(name, 24, 4, max_length=16)
    assert {part for part, module in attention.named_children() if module is None} == set()
    missing = {part for part in ("q_proj", "k_proj", "v_proj", "out_proj") if getattr(attention, part) is None}
    assert missing == UNREAD.get(name, set())
    mechanism = sum(p.numel() for p in attention.mechanism.parameters())
    assert sum(p.numel() for p in attention.parameters()) == (4 - len(missing)) * (24 * 24 + 24) + mechanism
    x = random_inputs(heads=HEADS, dim=DIM, sinks=20)
    other = [x[0] + (name == "synthesizer"), torch.zeros_like(x[1]), x[2]]
    is_causal = name not in BIDIRECTIONAL
    unread = torch.equal(build(name)(*x, is_causal=is_causal), build(name)(*other, is_causal=is_causal))
    assert unread == (name in UNREAD)


@pytest.mark.parametrize("name", ["synthesizer", "synthesizer-dense"])
def test_the_dot_product_of_a_synthesizer_reads_queries_and_keys(name):
    attention = nn.build_attention(name, 24, 4, max_length=16, attention_options={"dot_product": True})
    assert len(attention.projections()) == 4
    attention(torch.randn(2, 10, 24)).sum().backward()
    assert all(p.grad is not None for p in attention.parameters())


@pytest.mark.parametrize("name", [name for name in baselines.names() if baselines.get(name).cross])
def test_cross_attention_to_another_number_of_tokens(name):
    attention = nn.build_attention(name, 24, 4, max_length=16, kdim=10, vdim=6)
    assert attention(torch.randn(2, 9, 24), torch.randn(2, 12, 10), torch.randn(2, 12, 6)).shape == (2, 9, 24)


def test_the_table_of_what_each_can_do():
    table = baselines.capabilities().splitlines()
    assert table[0] == "| attention | bidirectional | causal | masks | cross | linear |"
    assert "| `bigbird` | yes | no | yes | no | yes |" in table
    assert "| `softmax` | yes | yes | yes | yes | no |" in table
    assert len(table) == 2 + len(baselines.names())


class TestDocs:
    page = (ROOT / "docs" / "rivals.md").read_text()

    def test_print_the_table_of_what_each_can_do(self):
        assert f"\n\n{baselines.capabilities()}\n\n" in self.page

    def test_print_the_options(self):
        rows = [
            (
                name,
                ", ".join(f"`{option}={parameter.default}`" for option, parameter in baselines.options(name).items()),
            )
            for name in baselines.names()
        ]
        table = "\n".join(f"| `{name}` | {options or 'none'} |" for name, options in rows)
        assert f"| attention | options |\n| --- | --- |\n{table}\n\n" in self.page

    def test_name_the_ablations(self):
        assert set(re.findall(r"`(flow-[^`]+)`", self.page)) == set(ABLATIONS)

    def test_code_runs(self, capsys):
        for code in re.findall(r"```python\n(.*?)```", self.page, re.DOTALL):
            exec(compile(code, "docs/rivals.md", "exec"), {})
        assert capsys.readouterr().out.splitlines() == [
            "torch.Size([2, 2])",
            "torch.Size([2, 8, 1000, 64])",
            "torch.Size([2, 4, 30]) torch.Size([2, 4, 30])",
            "{'flow': 2, 'softmax': 2, 'linear': 2, 'cosformer': 2}",
        ]

    def test_command_is_accepted(self):
        commands = re.findall(r"`flowformer train (\S+) (.*?)`", self.page)
        chosen = [override(recipes.get(name), changes.split()).model.attention_options for name, changes in commands]
        assert chosen == [{"rank": 16}, {"window": 512, "global_tokens": 0}]


@pytest.mark.parametrize("name", ABLATIONS)
def test_ablations_are_flow_attention_with_a_state(name):
    torch.manual_seed(0)
    model = FlowformerLM(
        LMConfig(vocab_size=11, num_layers=2, embed_dim=16, num_heads=2, mlp_dim=16, attention=name)
    ).eval()
    prompt = torch.tensor([[3, 1, 4]])
    truth = model.generate(prompt, max_new_tokens=5, recompute=True)
    assert torch.equal(model.generate(prompt, max_new_tokens=5), truth)


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
    with pytest.raises(ValueError, match=r"unknown attention 'flow-relo' \(did you mean 'flow-relu'\?\); accepted: "):
        nn.build_attention("flow-relo", 24, 4)
    with pytest.raises(
        ValueError, match=r"unknown attention 'lineer' \(did you mean 'linear'\?\); accepted: bigbird, "
    ):
        baselines.get("lineer")


def test_what_a_rival_cannot_do_is_an_error():
    class Limited(baselines.SoftmaxAttention):
        name, causal, masks, cross = "limited", False, False, False

    q, k, v = random_inputs(sinks=5, sources=7)
    with pytest.raises(NotImplementedError, match="limited attention does not support: masks, cross"):
        Limited()(q, k, v, key_mask=torch.ones(2, 7, dtype=torch.bool))
    with pytest.raises(NotImplementedError, match=r"does not support: causal\. These do: cosformer, linear, "):
        Limited()(k, k, v, is_causal=True)
