"""What the kernels refuse: the same gate for bidirectional and causal attention."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from flowformer import FlowVariant
from flowformer.ops.triton import hardware, op

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
def interpreter(monkeypatch):
    """Tensors on a CPU are interpreted, also on a machine with a GPU or without Triton."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(op, "HAS_TRITON", True)
    yield
    hardware.is_hopper.cache_clear()


def test_what_is_covered_is_not_refused():
    for dtype in op.DTYPES:
        assert op.refusals(tokens(dtype=dtype), tokens(dtype=dtype), tokens(dtype=dtype), False, DEFAULT) == []
    for competition in ("softmax", "sigmoid", "none"):
        assert op.refusals(tokens(), tokens(), tokens(), False, FlowVariant(competition=competition)) == []


def test_refusals_name_what_is_not_covered():
    double = tokens(dtype=torch.float64)
    assert "float64" in op.refusals(double, double, double, False, DEFAULT)[0]
    assert "softmax" in op.refusals(tokens(), tokens(), tokens(), False, FlowVariant(allocation="softmax"))[0]
    assert "8 and 257" in op.refusals(tokens(), tokens(), tokens(257), False, DEFAULT)[0]
    assert "257 and 8" in op.refusals(tokens(257), tokens(257), tokens(), False, DEFAULT)[0]


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
    reasons = op.refusals(x, x, x, False, DEFAULT)
    assert [word in reason for reason in reasons] == ([] if word is None else [True])


def test_what_is_missing_is_said_first(monkeypatch):
    monkeypatch.setattr(op, "HAS_TRITON", False)
    assert op.refusals(tokens(), tokens(), tokens(), False, DEFAULT) == ["triton is not installed"]
    monkeypatch.delenv("TRITON_INTERPRET")
    assert op.refusals(tokens(), tokens(), tokens(), False, DEFAULT) == ["tensors on cpu (the kernels need a GPU)"]
