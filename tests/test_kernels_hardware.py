"""What the kernels refuse: the same gate for bidirectional and causal attention."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from flowformer import FlowVariant
from flowformer.ops.kernels import hardware

DEFAULT = FlowVariant()


def tokens(dim=8, dtype=torch.float32):
    return torch.empty(1, 1, 4, dim, dtype=dtype)


def on_gpu(monkeypatch, capability, dim=8):
    """A tensor that says it is on a GPU of this capability."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    hardware.is_hopper.cache_clear()
    shape = torch.Size((1, 1, 4, dim))
    return SimpleNamespace(dtype=torch.bfloat16, shape=shape, is_cuda=True, device=torch.device("cuda", 0))


@pytest.fixture(autouse=True)
def forget():
    yield
    hardware.is_hopper.cache_clear()


def test_what_is_covered_is_not_refused():
    for dtype in hardware.DTYPES:
        assert hardware.refusals(tokens(dtype=dtype), tokens(dtype=dtype), DEFAULT) == []
    for competition in ("softmax", "sigmoid", "none"):
        assert hardware.refusals(tokens(), tokens(), FlowVariant(competition=competition)) == []


def test_refusals_name_what_is_not_covered():
    assert "float64" in hardware.refusals(tokens(dtype=torch.float64), tokens(), DEFAULT)[0]
    assert "softmax" in hardware.refusals(tokens(), tokens(), FlowVariant(allocation="softmax"))[0]
    assert "8 and 257" in hardware.refusals(tokens(), tokens(257), DEFAULT)[0]
    assert "257 and 8" in hardware.refusals(tokens(257), tokens(), DEFAULT)[0]


@pytest.mark.parametrize(
    ("capability", "dim", "word"),
    [
        ((7, 5), 8, "older than Ampere"),
        ((8, 0), 64, None),
        ((8, 9), 65, "1 to 64"),
        ((10, 0), 128, "1 to 64"),
        ((9, 0), 256, None),
    ],
)
def test_gpus(monkeypatch, capability, dim, word):
    x = on_gpu(monkeypatch, capability, dim)
    reasons = hardware.refusals(x, x, DEFAULT)
    assert [word in reason for reason in reasons] == ([] if word is None else [True])
