"""The authors' weights in our models: their outputs, and clear words about weights that do not fit."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import PARITY
from safetensors.torch import save_file
from torch import nn

from flowformer import FlowVariant
from flowformer.models import official
from flowformer.train import recipes


def load(name):
    arrays = {key: torch.from_numpy(value) for key, value in np.load(PARITY / f"{name}.npz").items()}
    return arrays, {key[7:]: value for key, value in arrays.items() if key.startswith("weight.")}


FAMILIES = {
    "timeseries_classifier": (official.timeseries, 4, ("x", "padding_mask"), "out"),
    "vision_tiny": (official.vision, 12, ("x",), "out"),
    "gpt_tiny": (official.gpt, 4, ("idx",), "logits"),
    "rl_causal": (official.rl_attention, 4, ("x",), "out"),
}


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_gives_the_authors_output(name):
    reader, num_heads, inputs, output = FAMILIES[name]
    arrays, weights = load(name)
    arguments = [arrays[key].bool() if key == "padding_mask" else arrays[key] for key in inputs]
    model = reader(weights, num_heads=num_heads)
    assert not model.training
    torch.testing.assert_close(model(*arguments), arrays[output], rtol=1e-10, atol=1e-10)


@torch.no_grad()
def test_the_gpt_module_generates():
    arrays, weights = load("gpt_tiny")
    model, prompt = official.gpt(weights, num_heads=4), arrays["idx"][:, :30]
    greedy = model.generate(prompt, max_new_tokens=10)
    assert torch.equal(greedy, model.generate(prompt, max_new_tokens=10, recompute=True))


@pytest.mark.parametrize("name", FAMILIES)
class TestStrict:
    def test_a_weight_too_many(self, name):
        reader, num_heads, *_ = FAMILIES[name]
        weights = {**load(name)[1], "extra.weight": torch.zeros(3)}
        with pytest.raises(ValueError, match=r"'extra\.weight' has no place in our"):
            reader(weights, num_heads=num_heads)

    def test_a_weight_too_few(self, name):
        reader, num_heads, *_ = FAMILIES[name]
        weights = load(name)[1]
        left_out = next(key for key in reversed(weights) if key.endswith("bias"))
        del weights[left_out]
        with pytest.raises((ValueError, KeyError), match=r"has no weight for 1 of ours|no '.*' among"):
            reader(weights, num_heads=num_heads)

    def test_a_weight_of_another_shape(self, name):
        reader, num_heads, *_ = FAMILIES[name]
        weights = load(name)[1]
        key = next(key for key in weights if key.endswith("bias"))
        weights[key] = torch.zeros(5)
        with pytest.raises(ValueError, match=rf"'{key}' is \(5,\), but "):
            reader(weights, num_heads=num_heads)

    def test_weights_of_another_model(self, name):
        reader, num_heads, *_ = FAMILIES[name]
        with pytest.raises(KeyError, match="this is no checkpoint of the"):
            reader(nn.Linear(2, 3).state_dict(), num_heads=num_heads)


def fairseq_weights(tied=True):
    """A tiny model with the names and the shapes of a fairseq checkpoint."""
    torch.manual_seed(0)
    width, inner, words = 16, 24, 13
    sizes = {"decoder.embed_tokens.weight": (words, width), "decoder.layer_norm.weight": (width,)}
    sizes["decoder.layer_norm.bias"] = (width,)
    for layer in range(2):
        home = f"decoder.layers.{layer}"
        for name in "kvq":
            sizes |= {
                f"{home}.self_attn.{name}_proj.weight": (width, width),
                f"{home}.self_attn.{name}_proj.bias": (width,),
            }
        sizes |= {f"{home}.self_attn.out_proj.weight": (width, width), f"{home}.self_attn.out_proj.bias": (width,)}
        sizes |= {f"{home}.fc1.weight": (inner, width), f"{home}.fc1.bias": (inner,)}
        sizes |= {f"{home}.fc2.weight": (width, inner), f"{home}.fc2.bias": (width,)}
        for norm in ("self_attn_layer_norm", "final_layer_norm"):
            sizes |= {f"{home}.{norm}.weight": (width,), f"{home}.{norm}.bias": (width,)}
    weights = {name: torch.randn(size, dtype=torch.float64) for name, size in sizes.items()}
    head = weights["decoder.embed_tokens.weight"] if tied else torch.randn(words, width, dtype=torch.float64)
    return weights | {
        "decoder.output_projection.weight": head.clone(),
        "decoder.version": torch.tensor([3.0]),
        "decoder.embed_positions._float_tensor": torch.zeros(1),
    }


def fairseq_logits(weights, tokens, heads):
    """The released model written out: fairseq's pre-norm decoder around the released attention."""

    def get(*names):
        return [weights[f"decoder.{name}.{part}"] for name in names for part in ("weight", "bias")]

    def norm(x, name):
        return nn.functional.layer_norm(x, x.shape[-1:], *get(name))

    embedding = weights["decoder.embed_tokens.weight"]
    length, width = tokens.shape[1], embedding.shape[1]
    frequency = torch.exp(torch.arange(width // 2, dtype=torch.float64) * -(np.log(10000) / (width // 2 - 1)))
    angle = (torch.arange(length, dtype=torch.float64) + 2)[:, None] * frequency
    x = embedding[tokens] * width**0.5 + torch.cat([angle.sin(), angle.cos()], 1)
    place = torch.arange(1, length + 1)
    for layer in range(2):
        home = f"layers.{layer}"
        normed = norm(x, f"{home}.self_attn_layer_norm")
        q, k, v = (
            nn.functional.linear(normed, *get(f"{home}.self_attn.{name}_proj"))
            .unflatten(-1, (heads, -1))
            .transpose(1, 2)
            for name in "qkv"
        )
        q, k, eps = q.sigmoid(), k.sigmoid(), 1e-6
        incoming = ((q + eps) * (k.cumsum(2) + eps)).sum(-1)
        outgoing = ((k + eps) * (q.cumsum(2) + eps)).sum(-1)
        taken = ((q + eps) * ((k * (place / outgoing)[..., None]).cumsum(2) + eps)).sum(-1) / place
        given = ((k + eps) * ((q * (place / incoming)[..., None]).cumsum(2) + eps)).sum(-1) / place
        given = given.clamp(-5, 5).exp()
        competition = given / given.cumsum(-1) * place
        mixed = ((q @ k.mT).tril() / incoming[..., None]) @ (v * competition[..., None]) * taken.sigmoid()[..., None]
        x = x + nn.functional.linear(mixed.transpose(1, 2).flatten(2), *get(f"{home}.self_attn.out_proj"))
        hidden = nn.functional.linear(norm(x, f"{home}.final_layer_norm"), *get(f"{home}.fc1")).relu()
        x = x + nn.functional.linear(hidden, *get(f"{home}.fc2"))
    return norm(x, "layer_norm") @ weights["decoder.output_projection.weight"].T


class TestLanguage:
    @pytest.mark.parametrize("tied", [True, False])
    @torch.no_grad()
    def test_computes_the_released_model(self, tied):
        weights = fairseq_weights(tied)
        model = official.language(weights, num_heads=4)
        assert (model.config.tie_embedding, model.config.num_layers, model.config.mlp_dim) == (tied, 2, 24)
        tokens = torch.randint(4, 13, (2, 9))
        torch.testing.assert_close(model(tokens), fairseq_logits(weights, tokens, 4), rtol=1e-9, atol=1e-9)
        greedy = model.generate(tokens, max_new_tokens=4)
        assert torch.equal(greedy, model.generate(tokens, max_new_tokens=4, recompute=True))

    def test_reads_a_checkpoint_with_the_arguments_of_the_command(self, tmp_path):
        path = tmp_path / "checkpoint_best.pt"
        content = {"args": argparse.Namespace(arch="transformer_lm"), "cfg": {"model": argparse.Namespace(lr=[1e-3])}}
        torch.save({**content, "model": fairseq_weights(), "extra_state": {"epoch": 3}}, path)
        read = official.read_weights(path)
        assert read.keys() == fairseq_weights().keys()
        assert isinstance(official.language(read, num_heads=4), nn.Module)

    def test_weights_that_do_not_fit(self):
        weights = fairseq_weights()
        with pytest.raises(ValueError, match=r"'decoder\.adaptive\.weight' has no place in our"):
            official.language({**weights, "decoder.adaptive.weight": torch.zeros(3)}, num_heads=4)
        del weights["decoder.layers.1.fc2.bias"]
        with pytest.raises(ValueError, match="has no weight for 1 of ours"):
            official.language(weights, num_heads=4)
        with pytest.raises(KeyError, match="this is no checkpoint of the language release"):
            official.language(load("gpt_tiny")[1])

    def test_the_published_recipe_is_that_model(self):
        published, default = (recipes.get(name).model for name in ("wikitext103@published", "wikitext103"))
        assert (published.positions, published.variant) == ("fairseq", FlowVariant.named("language"))
        assert default.positions == "sinusoidal"


class TestFiles:
    @pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
    def test_reads(self, suffix, tmp_path):
        weights = {f"module.{key}": value for key, value in load("gpt_tiny")[1].items()}
        weights["module.transformer.total_ops"] = torch.zeros(1)
        path = tmp_path / f"weights{suffix}"
        save_file(weights, path) if suffix == ".safetensors" else torch.save({"state_dict": weights, "epoch": 3}, path)
        read = official.read_weights(path)
        assert read.keys() == load("gpt_tiny")[1].keys()
        assert isinstance(official.gpt(read, num_heads=4), nn.Module)

    def test_pickled_code_is_not_run(self, tmp_path):
        class Trap:
            def __reduce__(self):
                return Path.touch, (tmp_path / "sprung",)

        torch.save({"state_dict": {"weight": Trap()}}, tmp_path / "weights.pt")
        with pytest.raises(Exception, match=r"weights_only"):
            official.read_weights(tmp_path / "weights.pt")
        assert not (tmp_path / "sprung").exists()

    @pytest.mark.parametrize("content", [[torch.ones(2)], {"state_dict": [torch.ones(2)]}])
    def test_a_file_without_a_state_dict(self, content, tmp_path):
        torch.save(content, tmp_path / "weights.pt")
        with pytest.raises(ValueError, match=r"weights\.pt holds a list, not a state dict"):
            official.read_weights(tmp_path / "weights.pt")
