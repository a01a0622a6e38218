"""The causal Triton kernels on a GPU: long sequences, compiled, captured in a graph, and beyond 32 bits."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from causal_kernels import DEFAULT, DEVICE, check, inputs_of, run
from causal_kernels import small_chunks as small_chunks  # a fixture of every test
from helpers import with_gradients

from flowformer.ops.common import Options
from flowformer.ops.state import FlowState
from flowformer.ops.triton.causal import op as kernels

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [1000, 4096])
def test_long_sequences(length, dtype):
    check(inputs_of(dtype, batch=1, heads=2, sinks=length, dim=64))


def test_compiles_without_graph_breaks():
    inputs = inputs_of(torch.bfloat16, batch=2, heads=2, sinks=130, dim=64)
    compiled = torch.compile(run(), fullgraph=True)
    for one, other in zip(with_gradients(compiled, inputs), with_gradients(run(), inputs), strict=True):
        assert torch.equal(one, other)


def test_captured_in_a_graph_on_another_stream():
    inputs = inputs_of(torch.bfloat16, batch=2, heads=2, sinks=1000, dim=64)
    expected = run()(*inputs)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        assert torch.equal(run()(*inputs), expected)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run()(*inputs)
    result.fill_(torch.nan)
    graph.replay()
    assert torch.equal(result, expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_on_a_device_that_is_not_the_current_one():
    inputs = inputs_of(torch.bfloat16, batch=2, heads=2, sinks=130, dim=64)
    elsewhere = [x.to("cuda:1") for x in inputs]
    # the second time, the kernels are launched again
    for _ in range(2):
        for one, other in zip(with_gradients(run(), elsewhere), with_gradients(run(), inputs), strict=True):
            assert one.device.index == 1
            assert torch.equal(one.cpu(), other.cpu())


def test_a_million_tokens():
    inputs = [torch.randn(1, 16, 2**20, 64, device=DEVICE, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    result, state = kernels.recurrent(*inputs, None, None, Options(1.0, DEFAULT))
    gradients = torch.autograd.grad(result, inputs, torch.ones_like(result))
    assert all(x.isfinite().all() for x in (result, *gradients))
    assert FlowState.unpack(state).count.item() == 2**20
    # the first tokens do not know how many follow
    torch.testing.assert_close(result[:, :, :512], run()(*(x[:, :, :512] for x in inputs)), rtol=2e-2, atol=2e-3)


def test_more_elements_than_32_bits_count():
    shape = 33, 16, 2**16, 64
    inputs = [torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) for _ in range(3)]
    with torch.no_grad():
        result = run()(*inputs)
        alone = run()(*(x[-1:] for x in inputs))
    torch.testing.assert_close(result[-1:], alone, rtol=2e-2, atol=2e-3)
