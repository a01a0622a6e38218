"""The quicker interpreter of `quick_interpreter.py` computes what Triton's does, and refuses what it refuses."""

from __future__ import annotations

import pytest
import torch
from helpers import random_inputs, with_gradients

pytest.importorskip("triton")

import quick_interpreter
import triton
from triton import language as tl
from triton.runtime.interpreter import InterpreterError

from flowformer import FlowVariant
from flowformer.ops.common import Options
from flowformer.ops.triton.causal import op as causal

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are not interpreted here")


@triton.jit
def combine(p_x, p_y, OPERATION: tl.constexpr):
    x, y = tl.load(p_x + tl.arange(0, 2)), tl.load(p_y + tl.arange(0, 2))
    if OPERATION == "add":
        x = x + y
    elif OPERATION == "sub":
        x = x - y
    else:
        x = x * y
    tl.store(p_x + tl.arange(0, 2), x)


@pytest.mark.parametrize(("operation", "y"), [("add", 1), ("sub", -1), ("mul", 2)])
def test_an_overflow_is_noticed(operation, y):
    x, y = torch.tensor([2**31 - 2, 5], dtype=torch.int32), torch.full((2,), y, dtype=torch.int32)
    if operation != "mul":
        combine[(1,)](x, y, operation)
        assert x.tolist() == [2**31 - 1, 6]
    with pytest.raises(InterpreterError, match=f"int32 overflow detected for operation {operation}"):
        combine[(1,)](x, y, operation)


def test_a_kernel_computes_the_same(monkeypatch):
    inputs = random_inputs(batch=1, heads=1, sinks=5, dim=5, value_dim=3, dtype=torch.bfloat16)

    def attend(query, key, value):
        return causal.causal(query, key, value, None, Options(1.0, FlowVariant()))

    quick = with_gradients(attend, inputs)
    for owner, name, original in quick_interpreter.REPLACED:
        assert getattr(owner, name) is not original
        monkeypatch.setattr(owner, name, original)
    for ours, theirs in zip(quick, with_gradients(attend, inputs), strict=True):
        assert torch.equal(ours, theirs)
