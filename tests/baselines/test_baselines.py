"""The rivals by name: what each can do, what it has parameters for, and what the documentation says of them."""

from __future__ import annotations

import re

import pytest
import torch
from helpers import ROOT, random_inputs

from flowformer import baselines, nn
from flowformer.models import FlowformerLM, LMConfig
from flowformer.ops.variant import ABLATIONS
from flowformer.train import recipes
from flowformer.train.overrides import override

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


@pytest.mark.parametrize("name", [name for name in baselines.names() if baselines.get(name).causal])
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
