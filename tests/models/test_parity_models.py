"""Whole models of the authors' code, rebuilt from our blocks with their weights: the same outputs in float64.

The files under tests/parity hold what the authors' code returned in evaluation mode for random weights.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import PARITY
from torch import nn

from flowformer.nn import FlowDecoder, FlowDecoderLayer, FlowEncoder, FlowEncoderLayer, LearnedPositions

# what the authors call the parts of a model, and what we do
NAMES = {
    "attn_layers.": "layers.",
    "attn.": "attention.",
    "query_projection.": "q_proj.",
    "key_projection.": "k_proj.",
    "value_projection.": "v_proj.",
    "out_projection.": "out_proj.",
    "attention.proj.": "attention.out_proj.",
    "norm1.": "attention_norm.",
    "norm2.": "mlp_norm.",
    "ln_1.": "attention_norm.",
    "ln_2.": "mlp_norm.",
    "conv1.": "mlp.linear1.",
    "conv2.": "mlp.linear2.",
    "fc1.": "linear1.",
    "fc2.": "linear2.",
    "c_fc.": "linear1.",
    "c_proj.": "linear2.",
}


class Weights(dict):
    """The state dict of the authors' model. What is taken is gone: nothing may be left in the end."""

    def load_into(self, module: nn.Module, prefix: str) -> nn.Module:
        ours = {}
        for key in [key for key in self if key.startswith(prefix)]:
            name, value = key.removeprefix(prefix), self.pop(key)
            for theirs, our in NAMES.items():
                name = name.replace(theirs, our)
            if name.endswith(("qkv.weight", "qkv.bias")):
                ours |= {name.replace("qkv", f"{c}_proj"): part for c, part in zip("qkv", value.chunk(3), strict=True)}
            else:
                ours[name] = value.squeeze(-1)  # the authors' time-series layers write linear maps as convolutions
        if (gamma := ours.pop("gamma", None)) is not None:  # the scale of the second branch joins its last map
            for name in ("mlp.linear2.weight", "mlp.linear2.bias"):
                ours[name] = torch.einsum("w, w... -> w...", gamma, ours[name])
        module.double().load_state_dict(ours)
        return module.eval()

    def linear(self, x, name):
        return F.linear(x, self.pop(f"{name}.weight"), self.pop(f"{name}.bias", None))


def load(name):
    arrays = {key: torch.from_numpy(value) for key, value in np.load(PARITY / f"{name}.npz").items()}
    return arrays, Weights({key[7:]: value for key, value in arrays.items() if key.startswith("weight.")})


def timeseries_classifier(variant):
    """Post-norm encoder whose attention sees the padding too; all tokens, padding emptied, are classified at once."""
    data, weights = load("timeseries_classifier")
    x = weights.linear(data["x"], "project_inp") * 32**0.5 + weights.pop("pos_enc.pe").transpose(0, 1)
    layers = [FlowEncoderLayer(32, 4, 64, norm_first=False, variant=variant) for _ in range(2)]
    encoder = weights.load_into(FlowEncoder(layers, norm=nn.LayerNorm(32)), "encoder.")
    x = F.gelu(encoder(x)) * data["padding_mask"][..., None]
    return weights.linear(x.flatten(1), "output_layer"), data["out"], weights


def vision_tiny(variant):
    """Four stages of pre-norm layers, 12 heads in each, on ever coarser grids; the mean of the tokens is classified."""
    data, weights = load("vision_tiny")
    x = data["x"]
    for stage, (width, depth) in enumerate([(24, 1), (36, 1), (48, 2), (60, 1)]):
        patch = f"patch_embed.{stage}.proj"
        x = F.conv2d(x, weights.pop(f"{patch}.weight"), weights.pop(f"{patch}.bias"), stride=2 if stage else 4)
        grid = x.shape[2:]
        x = x.flatten(2).transpose(1, 2)
        x = x if stage else x + weights.pop("pos_embed")
        for i in range(depth):
            layer = FlowEncoderLayer(width, 12, eps=1e-6, variant=variant)
            x = weights.load_into(layer, f"blocks.{stage}.{i}.")(x)
        x = x.transpose(1, 2).unflatten(2, grid)
    norm = weights.load_into(nn.LayerNorm(60, eps=1e-6), "norm.")
    return weights.linear(norm(x.flatten(2).transpose(1, 2)).mean(1), "head"), data["out"], weights


def gpt_tiny(variant, steps=(40,)):
    """Pre-norm causal decoder with a learned position table, run in as many parts as there are steps."""
    data, weights = load("gpt_tiny")
    x = weights.pop("transformer.wte.weight")[data["idx"]]
    x = weights.load_into(LearnedPositions(40, 32), "transformer.wpe.")(x)
    layers = [
        weights.load_into(FlowDecoderLayer(32, 4, activation=nn.GELU("tanh"), variant=variant), f"transformer.h.{i}.")
        for i in range(2)
    ]
    decoder = FlowDecoder(layers, norm=weights.load_into(nn.LayerNorm(32), "transformer.ln_f."))
    parts, states = [], decoder.new_states(len(x))
    for part in x.split(steps, dim=1):
        part, states = decoder(part, states=states)
        parts.append(part)
    return weights.linear(torch.cat(parts, 1), "lm_head"), data["logits"], weights


MODELS = {"timeseries": timeseries_classifier, "vision": vision_tiny, "core": gpt_tiny}


@pytest.mark.parametrize("preset", MODELS)
@torch.no_grad()
def test_output_is_that_of_the_authors(preset):
    result, expected, left = MODELS[preset](preset)
    assert result.dtype == torch.float64
    torch.testing.assert_close(result, expected, rtol=1e-10, atol=1e-10)
    assert not left


@pytest.mark.parametrize("preset", MODELS)
@torch.no_grad()
def test_no_other_preset_gives_that_output(preset):
    # the models are small enough for their clamps to act
    other = {"timeseries": "core", "vision": "core", "core": "language"}[preset]
    result, expected, _ = MODELS[preset](other)
    assert (result - expected).abs().max() > 1e-8


@pytest.mark.parametrize("steps", [(1,) * 40, (25, 1, 14)], ids=["token by token", "in parts"])
@torch.no_grad()
def test_decoding_gives_the_authors_logits(steps):
    result, expected, _ = gpt_tiny("core", steps)
    torch.testing.assert_close(result, expected, rtol=1e-10, atol=1e-10)
