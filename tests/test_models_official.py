"""The authors' weights in our models: their outputs, and clear words about weights that do not fit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from flowformer.models import official

PARITY = Path(__file__).parent / "parity"


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
