"""The language model: published sizes and weights, padding, and generation from the recurrent state."""

from __future__ import annotations

import math
import runpy
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import ROOT, assert_like_gradients
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from flowformer import FlowVariant
from flowformer.models import lm
from flowformer.models.lm import IGNORED, PRESETS, FlowformerLM, LMConfig, draw, next_tokens
from flowformer.nn import FlowAttention, record_maps

SMALL = LMConfig(vocab_size=23, num_layers=2, embed_dim=16, num_heads=2, mlp_dim=24, dropout=0.0)
GPT = replace(
    PRESETS["gpt"], vocab_size=23, num_layers=2, embed_dim=16, num_heads=2, mlp_dim=24, max_length=64, dropout=0.0
)
STYLES = pytest.mark.parametrize("config", [SMALL, GPT], ids=["paper", "gpt"])
SIDES = pytest.mark.parametrize("side", ["left", "right"])


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def randomized(config: LMConfig) -> FlowformerLM:
    """Fresh models have zero biases and unit norms, which would hide mistakes, and say one word again and again."""
    model = FlowformerLM(config)
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        nn.init.normal_(parameter, mean=float(name.endswith("norm.weight")), std=1.0 if parameter.dim() > 1 else 0.2)
    return model.double().eval()


def random_tokens(*shape) -> torch.Tensor:
    return torch.randint(SMALL.vocab_size, shape)


def padding(side, lengths, longest) -> torch.Tensor:
    place = torch.arange(longest)
    return torch.stack([place < n if side == "right" else place >= longest - n for n in lengths])


def gradients(loss, model) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters())))


def test_size_of_the_published_model():
    with torch.device("meta"):
        model = FlowformerLM(PRESETS["wikitext103"])
    assert model.num_parameters() == 156_000_256
    assert model.num_parameters() - model.embedding.weight.numel() == 18_915_328


def test_size_of_the_gpt_module():
    with torch.device("meta"):
        model = FlowformerLM(PRESETS["gpt"])
    # the authors count 124M without the head
    assert model.num_parameters() - model.head.weight.numel() == 124_439_808


@STYLES
def test_initialisation_is_the_published_one(config):
    config = replace(config, embed_dim=64, mlp_dim=256, num_layers=8, vocab_size=500)
    model = FlowformerLM(config)
    layer = model.decoder.layers[0]
    q, out, first, last = (
        layer.attention.q_proj,
        layer.attention.out_proj,
        layer.mlp.linear1,
        layer.mlp.linear2,
    )
    if config.initialisation == "gpt":
        stds = {"embedding": 0.02, "q": 0.02, "out": 0.02, "first": 0.02, "last": 0.02 / 4}
        assert model.head.weight.std().item() == pytest.approx(0.02, rel=0.05)
        assert not any(linear.bias.any() for linear in (q, out, first, last))
    else:
        # Xavier of a square matrix is uniform with variance gain²/W, PyTorch's own uniform with 1/(3 fan_in)
        stds = {"embedding": 1 / 8, "q": (1 / 128) ** 0.5, "out": 1 / 8, "first": (1 / 192) ** 0.5}
        stds["last"] = (1 / 768) ** 0.5
        assert not out.bias.any()
        assert all(0 < linear.bias.abs().max() <= 1 / 8 for linear in (q, first))
    found = {"embedding": model.embedding.weight, "q": q.weight, "out": out.weight}
    found |= {"first": first.weight, "last": last.weight}
    assert {name: weight.std().item() for name, weight in found.items()} == pytest.approx(stds, rel=0.05)
    assert torch.equal(model.norm.weight, torch.ones(64))


def test_dropout_is_where_the_paper_has_it():
    model = FlowformerLM(replace(SMALL, dropout=0.1))
    rates = {name: module.p for name, module in model.named_modules() if isinstance(module, nn.Dropout)}
    inner = {f"decoder.layers.{i}.mlp.activation_dropout": 0.0 for i in range(2)}
    outer = {f"decoder.layers.{i}.{part}.dropout": 0.1 for i in range(2) for part in ("attention", "mlp")}
    assert rates == {"dropout": 0.1} | inner | outer


def gpt_weights() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The authors' tokens and logits, and their weights under our names."""
    renamed = {
        "transformer.wte.": "embedding.",
        "transformer.wpe.": "positions.",
        "transformer.h.": "decoder.layers.",
        "transformer.ln_f.": "norm.",
        "lm_head.": "head.",
        "ln_1.": "attention_norm.",
        "ln_2.": "mlp_norm.",
        "attn.": "attention.",
        "query_projection.": "q_proj.",
        "key_projection.": "k_proj.",
        "value_projection.": "v_proj.",
        "out_projection.": "out_proj.",
        "c_fc.": "linear1.",
        "c_proj.": "linear2.",
    }
    arrays = {key: torch.from_numpy(value) for key, value in np.load(ROOT / "tests/parity/gpt_tiny.npz").items()}
    weights = {}
    for key in [key for key in arrays if key.startswith("weight.")]:
        name = key.removeprefix("weight.")
        for theirs, ours in renamed.items():
            name = name.replace(theirs, ours)
        weights[name] = arrays.pop(key)
    return arrays, weights


@torch.no_grad()
def test_gpt_module_gives_the_authors_logits():
    data, weights = gpt_weights()
    config = replace(PRESETS["gpt"], vocab_size=31, num_layers=2, embed_dim=32, num_heads=4, mlp_dim=128, max_length=40)
    model = FlowformerLM(config).double().eval()
    model.load_state_dict(weights)
    torch.testing.assert_close(model(data["idx"]), data["logits"], rtol=1e-10, atol=1e-10)


@torch.no_grad()
def test_embedding_is_tied_and_scaled():
    model = randomized(replace(SMALL, num_layers=1))
    tokens = random_tokens(1, 5)
    for name, parameter in model.decoder.named_parameters():
        if name.split(".")[-2] in ("out_proj", "linear2"):
            parameter.zero_()  # the layers add nothing
    embedded = model.positions(model.embedding.weight[tokens] * 4)  # √16
    torch.testing.assert_close(model(tokens), model.norm(embedded) @ model.embedding.weight.T)


@STYLES
def test_gradients_reach_every_parameter(config):
    model = FlowformerLM(config)
    # half of the sources of a fresh clamped model sit at the bound
    for gradient in gradients(model.loss(random_tokens(2, 9)), model):
        assert gradient.isfinite().all()
        assert gradient.any()


def test_bf16_autocast():
    model = FlowformerLM(SMALL)
    tokens = random_tokens(2, 9)
    with torch.autocast("cpu", torch.bfloat16):
        logits, loss = model(tokens), model.loss(tokens)
        generated = model.eval().generate(tokens, max_new_tokens=3)
    assert logits.dtype == torch.bfloat16
    assert loss.dtype == torch.float32
    assert generated.shape == (2, 3)
    exact = model.loss(tokens)
    torch.testing.assert_close(loss, exact, rtol=0.02, atol=0)
    assert_like_gradients(model, loss, exact)


@torch.no_grad()
def test_bf16_model_generates_from_its_float32_state():
    model = FlowformerLM(SMALL).bfloat16().eval()
    assert model.generate(random_tokens(2, 5), max_new_tokens=3).shape == (2, 3)


def test_gradient_checkpointing_changes_nothing():
    model = randomized(replace(SMALL, dropout=0.1)).train()
    tokens, mask = random_tokens(2, 9), padding("left", [9, 5], 9)
    results = []
    for model.gradient_checkpointing in (False, True):
        torch.manual_seed(1)
        loss = model.loss(tokens, mask=mask)
        results.append([loss, *gradients(loss, model)])
    torch.testing.assert_close(*results, rtol=0, atol=0)


@pytest.mark.parametrize("backward_inside", [True, False])
def test_layers_that_record_maps_are_not_checkpointed(backward_inside):
    """Recomputation would record the maps twice, or save other tensors than the first run, which torch refuses."""
    model = randomized(SMALL).train()
    model.gradient_checkpointing = True
    with record_maps(model) as maps:
        loss = model.loss(random_tokens(2, 9))
        if backward_inside:
            loss.backward()
    if not backward_inside:
        loss.backward()
    assert len(maps) == SMALL.num_layers


@torch.no_grad()
def test_compiled_model_is_the_same():
    model = randomized(SMALL)
    tokens, mask = random_tokens(2, 9), padding("left", [9, 5], 9)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(tokens, mask), model(tokens, mask), rtol=1e-12, atol=1e-12)


@STYLES
@SIDES
def test_nan_in_the_padding_of_embeddings_changes_nothing(side, config):
    model = randomized(config)
    mask = padding(side, [7, 3, 0], 7)
    embeddings = model.embedding(random_tokens(3, 7)).detach()
    parameters = list(model.decoder.parameters())
    results = []
    for each in (embeddings, embeddings.masked_fill(~mask[..., None], torch.nan)):
        hidden = model.run_layers(each, mask)[0][mask]
        results.append([hidden, *torch.autograd.grad(hidden.square().sum(), parameters)])
    torch.testing.assert_close(*results, rtol=0, atol=0)


@SIDES
@STYLES
def test_padded_batch_is_its_parts(config, side):
    model = randomized(config)
    lengths = [7, 3, 1]
    tokens, mask = random_tokens(3, 7), padding(side, lengths, 7)
    logits, total = model(tokens, mask), model.loss(tokens, mask=mask, reduction="sum")
    parts = [row[present][None] for row, present in zip(tokens, mask, strict=True)]
    for row, present, part in zip(logits, mask, parts, strict=True):
        torch.testing.assert_close(row[present], model(part)[0], rtol=1e-10, atol=1e-10)
    alone = torch.stack([model.loss(part, reduction="sum") for part in parts]).sum()
    torch.testing.assert_close(total, alone, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(gradients(total, model), gradients(alone, model), rtol=1e-10, atol=1e-10)


@torch.no_grad()
def test_no_token_sees_those_after_it():
    model = randomized(SMALL)
    tokens = random_tokens(2, 9)
    changed = torch.cat([tokens[:, :6], (tokens[:, 6:] + 1) % 23], 1)
    assert torch.equal(model(tokens)[:, :6], model(changed)[:, :6])


@STYLES
@torch.no_grad()
def test_states_continue_a_text(config):
    model = randomized(config)
    tokens, mask = random_tokens(2, 12), padding("left", [12, 8], 12)
    whole, states, parts = model(tokens, mask), model.new_states(2), []
    for part in (slice(0, 3), slice(3, 4), slice(4, 12)):
        logits, states = model(tokens[:, part], mask[:, part], states=states)
        parts.append(logits)
    torch.testing.assert_close(torch.cat(parts, 1)[mask], whole[mask], rtol=1e-10, atol=1e-10)
    assert states[0].count.tolist() == [12, 8]


def test_loss_is_cross_entropy_of_the_next_token():
    model = randomized(SMALL)
    tokens = random_tokens(2, 9)
    expected = F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    torch.testing.assert_close(model.loss(tokens), expected)
    targets = random_tokens(2, 9).masked_fill(torch.rand(2, 9) < 0.5, IGNORED)
    expected = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    torch.testing.assert_close(model.loss(tokens, targets), expected)
    assert model.loss(tokens, torch.full_like(tokens, IGNORED)) == 0
    assert model.loss(tokens[:, :1]) == model.loss(tokens[:, :0]) == model.loss(tokens[:0]) == 0
    assert model.loss(tokens.int()) == model.loss(tokens)


def test_padding_scores_nothing():
    tokens = torch.tensor([[0, 5, 6, 7], [5, 6, 0, 0]])
    mask = torch.tensor([[False, True, True, True], [True, True, False, False]])
    assert next_tokens(tokens, mask).tolist() == [[-100, 6, 7, -100], [6, -100, -100, -100]]
    model = randomized(SMALL)
    targets = random_tokens(2, 4)
    expected = model.loss(tokens, targets.masked_fill(~mask, IGNORED), mask=mask)
    torch.testing.assert_close(model.loss(tokens, targets, mask=mask), expected)


def test_loss_in_pieces_is_the_loss(monkeypatch):
    model = randomized(SMALL)
    tokens = random_tokens(2, 9)
    whole = model.loss(tokens)
    monkeypatch.setattr(lm, "LOGITS_AT_ONCE", 4 * SMALL.vocab_size)
    # a CUDA graph cannot capture what reads the random state
    monkeypatch.setattr(torch, "get_rng_state", None)
    pieces = model.loss(tokens)
    torch.testing.assert_close(pieces, whole)
    torch.testing.assert_close(gradients(pieces, model), gradients(whole, model))


@SIDES
@STYLES
def test_greedy_tokens_are_those_of_the_whole_prefix(config, side):
    model = randomized(config)
    prompts, mask = random_tokens(4, 9), padding(side, [9, 4, 1, 6], 9)
    fast = model.generate(prompts, mask, max_new_tokens=20)
    assert torch.equal(fast, model.generate(prompts, mask, max_new_tokens=20, recompute=True))
    for row, prompt, present in zip(fast, prompts, mask, strict=True):
        text = prompt[present][None]
        for token in row:
            assert model(text)[0, -1].argmax() == token
            text = torch.cat([text, token.reshape(1, 1)], 1)
    assert len(fast.unique()) > 3  # not one word again and again


@pytest.mark.parametrize("prefill", [1, 4, 9, 100])
@SIDES
def test_prompt_may_run_in_pieces(side, prefill):
    model = randomized(SMALL)
    prompts, mask = random_tokens(3, 9), padding(side, [9, 2, 5], 9)
    whole = model.generate(prompts, mask, max_new_tokens=8)
    assert torch.equal(model.generate(prompts, mask, max_new_tokens=8, prefill=prefill), whole)


@torch.no_grad()
def test_a_token_costs_the_same_wherever_it_is():
    model = FlowformerLM(SMALL).eval()
    costs, shapes = [], []
    for past in (3, 300):
        _, states = model(random_tokens(2, past), states=model.new_states(2))
        with FlopCounterMode(display=False) as counter:
            _, states = model(random_tokens(2, 1), states=states)
        costs.append(counter.get_total_flops())
        shapes.append([part.shape for state in states for part in state.pack()])
    assert costs[0] == costs[1] > 0
    assert shapes[0] == shapes[1]


def test_generation_ends_at_eos(monkeypatch):
    drawn = torch.tensor([[1, 9, 3, 4, 5], [7, 8, 6, 9, 5]])
    model = FlowformerLM(SMALL)
    for eos, expected in ((None, drawn), (5, drawn), (9, torch.tensor([[1, 9, 9, 9], [7, 8, 6, 9]]))):
        columns = iter(drawn.unbind(1))
        monkeypatch.setattr(lm, "draw", lambda *_, columns=columns: next(columns))
        assert torch.equal(model.generate(random_tokens(2, 4), max_new_tokens=5, eos=eos), expected)


def test_sampling():
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().expand(2000, 4)
    generator = torch.Generator().manual_seed(0)

    def frequencies(**options):
        return draw(logits, generator=generator, **options).bincount(minlength=4) / 2000

    torch.testing.assert_close(frequencies(), logits[0].exp(), rtol=0, atol=0.05)
    cold = (logits[0] / 0.5).softmax(-1)
    torch.testing.assert_close(frequencies(temperature=0.5), cold, rtol=0, atol=0.05)
    assert (frequencies(top_k=2) > 0).tolist() == [True, True, False, False]
    assert (frequencies(top_k=9) > 0).all()
    assert (frequencies(top_p=0.75) > 0).tolist() == [True, True, False, False]
    assert (frequencies(top_p=0.85) > 0).tolist() == [True, True, True, False]
    assert (frequencies(top_p=0.01) > 0).tolist() == [True, False, False, False]
    assert (frequencies(temperature=0) > 0).tolist() == [True, False, False, False]


def test_generation_samples_with_its_generator():
    model = randomized(SMALL)
    prompts = random_tokens(2, 5)

    def sample(seed, **options):
        generator = torch.Generator().manual_seed(seed)
        return model.generate(prompts, max_new_tokens=20, generator=generator, temperature=2.0, **options)

    assert torch.equal(sample(1), sample(1))
    assert not torch.equal(sample(1), sample(2))
    assert torch.equal(sample(1), sample(1, recompute=True))
    assert torch.equal(sample(1, top_k=1), model.generate(prompts, max_new_tokens=20))


@pytest.mark.parametrize("attention", ["softmax", "linear"])
def test_rivals_take_the_place_of_flow_attention(attention):
    model = randomized(replace(SMALL, attention=attention))
    prompts, mask = random_tokens(3, 6), padding("right", [6, 2, 4], 6)
    assert all(gradient.isfinite().all() for gradient in gradients(model.loss(prompts, mask=mask), model))
    with pytest.raises(NotImplementedError, match=rf"{attention} attention has no state.*recompute=True"):
        model.generate(prompts, mask, max_new_tokens=5)
    together = model.generate(prompts, mask, max_new_tokens=5, recompute=True)
    for row, prompt, present in zip(together, prompts, mask, strict=True):
        alone = model.generate(prompt[present][None], max_new_tokens=5, recompute=True)
        assert torch.equal(row, alone[0])
    with pytest.raises(ValueError, match="no flows to record"):
        model(prompts, return_maps=True)


def test_maps_of_every_layer():
    model = randomized(SMALL)
    tokens, mask = random_tokens(2, 7), padding("left", [7, 4], 7)
    logits, maps = model(tokens, mask, return_maps=True)
    torch.testing.assert_close(logits, model(tokens, mask))
    assert [each.competition.shape for each in maps] == [(2, 2, 7)] * 2
    assert [each.allocation.shape for each in maps] == [(2, 2, 7)] * 2
    assert not maps[0].competition[1, :, :3].any()
    with pytest.raises(ValueError, match="whole sequences only"):
        model(tokens, states=model.new_states(2), return_maps=True)


@STYLES
@torch.no_grad()
def test_saved_model_is_the_same(config, tmp_path):
    model = FlowformerLM(replace(config, variant=FlowVariant(clamp=2.0))).eval()
    model.save_pretrained(tmp_path)
    loaded = FlowformerLM.from_pretrained(tmp_path)
    assert loaded.config == model.config
    tokens = random_tokens(2, 6)
    assert torch.equal(loaded(tokens), model(tokens))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"activation": "gelu_tan"}, r"unknown activation 'gelu_tan' \(did you mean 'gelu_tanh'\?\)"),
        ({"positions": "rotary"}, "unknown positions 'rotary'; accepted: sinusoidal, fairseq, learned"),
        ({"initialisation": "bert"}, "unknown initialisation 'bert'; accepted: fairseq, gpt"),
        ({"positions": "learned"}, "learned positions need max_length"),
        ({"vocab_size": 0}, "vocab_size must be a positive whole number, got 0"),
    ],
)
def test_config_errors(options, message):
    with pytest.raises(ValueError, match=message):
        LMConfig(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens must be a positive whole number, got 0"),
        ({"prefill": 0}, "prefill must be a positive whole number, got 0"),
        ({"temperature": -1.0}, "got temperature -1.0"),
        ({"temperature": 1.0, "top_k": 0}, "top_k 0"),
        ({"temperature": 1.0, "top_p": 1.5}, "top_p 1.5"),
        ({"top_k": 5}, "temperature 0 draws nothing"),
        ({"prompt_mask": torch.zeros(2, 4, dtype=torch.bool)}, "at least one token"),
        ({"prompt_mask": torch.ones(2, 3, dtype=torch.bool)}, r"the mask must be bool.*\(2, 4\)"),
        ({"prompt_mask": torch.ones(2, 4)}, "got torch.float32"),
        ({"prompt": torch.zeros(2, 0, dtype=torch.long)}, "at least one token"),
    ],
)
def test_generation_errors(options, message):
    model = FlowformerLM(SMALL)
    with pytest.raises(ValueError, match=message):
        model.generate(**{"prompt": random_tokens(2, 4), "max_new_tokens": 3} | options)


def test_call_errors():
    model = FlowformerLM(GPT)
    with pytest.raises(TypeError, match=r"must be \(batch, length\) integers, got torch.float32"):
        model(torch.randn(2, 4))
    with pytest.raises(ValueError, match="must have one shape"):
        model.loss(random_tokens(2, 4), random_tokens(2, 3))
    with pytest.raises(ValueError, match="unknown reduction 'none'"):
        model.loss(random_tokens(2, 4), reduction="none")
    with pytest.raises(ValueError, match="only 64 learned ones"):
        model.generate(random_tokens(1, 60), max_new_tokens=10)
    with pytest.raises(TypeError, match="takes a LMConfig, got dict"):
        FlowformerLM({"vocab_size": 5})


def test_example_learns(capsys):
    runpy.run_path(str(ROOT / "examples" / "language.py"))
    lines = capsys.readouterr().out.splitlines()
    bits = [float(line.split()[2]) for line in lines if line.startswith("step")]
    assert bits[-1] < 4.5 < math.log2(256) < bits[0]
    assert lines[-2].startswith("'def ")


def test_example_with_a_convolution(tmp_path, monkeypatch, capsys):
    example = runpy.run_path(str(ROOT / "examples" / "convolution.py"))
    layer = example["Convolved"](FlowAttention(8, 2, is_causal=True), width=4)
    tokens = torch.randn(1, 10, 8)
    changed = tokens.clone()
    changed[:, 6:] += 1
    assert torch.equal(layer(tokens)[:, :6], layer(changed)[:, :6])
    assert not torch.allclose(layer(tokens)[:, 6], layer(changed)[:, 6])
    # padding before a sequence is not read as its past
    mask = torch.arange(10)[None] >= 4
    torch.testing.assert_close(layer(tokens, key_mask=mask)[:, 4:], layer(tokens[:, 4:]))
    text = tmp_path / "text"
    text.write_bytes(b"0123456789" * 800)
    monkeypatch.setattr(sys, "argv", ["convolution.py", str(text), "--length=32", "--steps=12", "--embed-dim=32"])
    example["main"]()
    *updates, evaluation = capsys.readouterr().out.splitlines()
    bits = [float(line.split()[2]) for line in updates]
    assert bits[-1] < bits[0] - 1
    assert float(evaluation.split()[1]) < bits[-1]
    # a few updates of an attention that needs the longest sequence
    sys.argv[-2:] = ["--steps=3", "--attention=cosformer"]
    example["main"]()
    assert capsys.readouterr().out.startswith("update 1: ")
    # refused before it trains
    sys.argv[2:] = ["--length=512"]
    with pytest.raises(SystemExit):
        example["main"]()
    output = capsys.readouterr()
    assert not output.out
    assert "the last 5 % of the file are 400 bytes, fewer than --length 512" in output.err
