"""Which backend runs a call: the first in the list that neither refuses it nor waits for its name."""

from __future__ import annotations

import pytest
import torch

from flowformer import FlowVariant, explain, flow_attention
from flowformer.ops import backends
from flowformer.ops.triton import op as triton_op

X = torch.randn(1, 2, 5, 4)


def backend(name, refuses=(), by_name=False):
    """A backend whose result is its name."""
    return backends.BACKENDS["torch"]._replace(
        name=name, refusals=lambda *_: list(refuses), by_name=lambda _: by_name, bidirectional=lambda *_: name
    )


@pytest.fixture
def entries(monkeypatch):
    def replace(*entries):
        monkeypatch.setattr(backends, "BACKENDS", {entry.name: entry for entry in entries})

    return replace


def test_the_first_that_can_runs(entries):
    entries(backend("native"), backend("torch"))
    assert flow_attention(X, X, X) == "native"
    entries(backend("native", refuses=["no such instruction"]), backend("slow", by_name=True), backend("torch"))
    assert flow_attention(X, X, X) == "torch"
    assert flow_attention(X, X, X, backend="slow") == "slow"
    with pytest.raises(NotImplementedError, match="'native' cannot run this: no such instruction"):
        flow_attention(X, X, X, backend="native")
    assert [line.strip() for line in explain(X, X, X).splitlines()[1:]] == [
        "native: no, no such instruction",
        "slow: only by name, memory-linear, runs everywhere",
        "torch: yes, memory-linear, runs everywhere",
    ]


def test_interpreted_kernels_run_only_by_name(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(triton_op, "HAS_TRITON", True)
    assert backends.choose(None, X, X, X, False, FlowVariant()).name != "triton"
    assert backends.choose("triton", X, X, X, False, FlowVariant()).name == "triton"
    assert "triton: only by name, fused kernels" in explain(X, X, X)


@pytest.mark.parametrize("backend", ["native"])
def test_is_the_backend_of_the_cpu(backend):
    """With no choice made, CPU tensors go to the native backend, bit for bit."""
    inputs = [torch.randn(2, 3, 9, 4) for _ in range(3)]
    assert torch.equal(flow_attention(*inputs), flow_attention(*inputs, backend=backend))
