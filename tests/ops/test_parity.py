"""Values and gradients of the authors' own code, in float64, to ten digits. `parity/index.json` lists the files."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import PARITY, relative_error

from flowformer import flow_attention, flow_attention_recurrent

FOLDER = PARITY
INDEX = json.loads((FOLDER / "index.json").read_text())
VARIANT = {"core_normal": "core", "core_causal": "core", "rl_causal": "rl", "ts_attention": "timeseries"}
PROJECTED = [name for name, entry in INDEX.items() if entry["kind"] in ("core_normal", "core_causal", "rl_causal")]
BARE = [name for name, entry in INDEX.items() if entry["kind"] == "ts_attention"]
BACKENDS = ["torch", "reference"]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def load(name):
    """The arrays of a file as tensors, and its entry in the index."""
    with np.load(FOLDER / INDEX[name]["file"]) as arrays:
        return {key: torch.from_numpy(arrays[key]) for key in arrays}, INDEX[name]


def close(value, truth):
    torch.testing.assert_close(value, truth, rtol=1e-10, atol=1e-10)


def project(data, entry, call):
    """The layer around the attention: three projections, heads, one projection. Returns (result, leaves by name)."""
    leaves = {
        name.removeprefix("weight."): x.requires_grad_() for name, x in data.items() if name.startswith("weight.")
    }
    leaves["x"] = data["x"].requires_grad_()
    leaves["y"] = data["y"].requires_grad_() if "grad_y" in data else leaves["x"]

    def linear(x, name):
        return F.linear(x, leaves[f"{name}_projection.weight"], leaves[f"{name}_projection.bias"])

    def heads(x):
        return x.unflatten(-1, (entry["h"], -1)).transpose(1, 2)

    query, key, value = linear(leaves["x"], "query"), linear(leaves["y"], "key"), linear(leaves["y"], "value")
    result = call(*map(heads, (query, key, value))).transpose(1, 2).flatten(2)
    return linear(result, "out"), leaves


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", PROJECTED)
def test_projected_attention(name, backend):
    data, entry = load(name)
    options = {"is_causal": "causal" in entry["kind"], "variant": VARIANT[entry["kind"]], "backend": backend}
    result, leaves = project(data, entry, lambda *x: flow_attention(*x, **options))
    close(result.detach(), data["out"])
    result.backward(data["grad_out"])
    expected = {key.removeprefix("grad.").removeprefix("grad_"): x for key, x in data.items() if key.startswith("grad")}
    del expected["out"]
    assert {"x", "query_projection.weight", "out_projection.bias"} <= set(expected)
    for key, grad in expected.items():
        close(leaves[key].grad, grad)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", BARE)
def test_bare_attention(name, backend):
    data, entry = load(name)
    leaves = [data[key].requires_grad_() for key in "qkv"]  # (B, N, H, D)
    query, key, value = (x.transpose(1, 2) for x in leaves)
    result = flow_attention(query, key, value, variant=VARIANT[entry["kind"]], backend=backend).transpose(1, 2)
    close(result.detach(), data["out"])
    result.backward(data["grad_out"])
    for leaf, key in zip(leaves, "qkv", strict=True):
        close(leaf.grad, data[f"grad_{key}"])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", [name for name in PROJECTED if "causal" in name])
def test_decoding(name, backend):
    """Token by token, the recurrent form says what the authors' parallel code says."""
    data, entry = load(name)

    def decode(query, key, value):
        state, results = None, []
        for t in range(query.shape[2]):
            token = (x[:, :, t : t + 1] for x in (query, key, value))
            result, state = flow_attention_recurrent(*token, state, variant=VARIANT[entry["kind"]], backend=backend)
            results.append(result)
        return torch.cat(results, 2)

    result, leaves = project(data, entry, decode)
    close(result.detach(), data["out"])
    result.backward(data["grad_out"])
    close(leaves["x"].grad, data["grad_x"])


@pytest.mark.parametrize("name", PROJECTED)
def test_kernels_in_float32(name):
    data, entry = load(name)
    data = {key: x.to(DEVICE, torch.float32) for key, x in data.items()}
    options = {"is_causal": "causal" in entry["kind"], "variant": VARIANT[entry["kind"]], "backend": "triton"}
    result, leaves = project(data, entry, lambda *x: flow_attention(*x, **options))
    result.backward(data["grad_out"])
    assert relative_error(result, data["out"]) < 1e-5
    assert relative_error(leaves["x"].grad, data["grad_x"]) < 1e-5


def test_the_clamp_of_the_authors_is_seen():
    """What tells "core" from the default is in the data: the hot file cannot be met without its clamp."""
    data, entry = load("core_normal_hot")
    result, _ = project(data, entry, lambda *x: flow_attention(*x))
    assert (result - data["out"]).abs().max() > 1e-3
