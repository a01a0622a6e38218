"""One token at a time by the kernel of its own, in the interpreter on the CPU and on the device where there is one."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from helpers import CAUSAL_KERNEL_VARIANTS, oracle, random_inputs, relative_error

from flowformer import FlowVariant
from flowformer.ops.common import Options
from flowformer.ops.state import FlowState
from flowformer.ops.triton.causal import op as kernels
from flowformer.ops.triton.decode import decode

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DEFAULT = FlowVariant()


def inputs_of(**options):
    return random_inputs(dtype=torch.float32, device=DEVICE, **options)


@pytest.mark.parametrize("variant", CAUSAL_KERNEL_VARIANTS.values(), ids=CAUSAL_KERNEL_VARIANTS)
def test_decoding_token_by_token_is_the_parallel_form(variant):
    inputs = inputs_of(batch=2, heads=2, key_heads=1, sinks=5, dim=5, value_dim=3)
    truth = oracle(*inputs, is_causal=True, variant=variant)
    _, end = kernels.recurrent(*inputs, None, None, Options(1.0, variant))
    state = FlowState.empty(2, 2, 5, 3, variant=variant, device=DEVICE).pack()
    pointers = [part.data_ptr() for part in state]
    steps = [decode(*(x[:, :, t : t + 1] for x in inputs), None, state, Options(1.0, variant)) for t in range(5)]
    assert relative_error(torch.cat(steps, 2), truth) < 1e-6
    assert pointers == [part.data_ptr() for part in state]
    for part, expected in zip(state, end, strict=True):
        torch.testing.assert_close(part, expected, rtol=1e-5, atol=1e-6)


def test_decoding_leaves_masked_rows_alone():
    inputs = inputs_of(batch=2, heads=2, sinks=6)
    _, state = kernels.recurrent(*(x[:, :, :5] for x in inputs), None, None, Options(1.0, DEFAULT))
    before = [part.clone() for part in state]
    mask = torch.tensor([[True], [False]], device=DEVICE)
    token = [x[:, :, 5:].masked_fill(~mask[..., None, None], torch.nan) for x in inputs]
    result = decode(*token, mask, state, Options(1.0, DEFAULT))
    assert not result[1].any()
    assert all(torch.equal(part[1], old[1]) for part, old in zip(state, before, strict=True))
    assert relative_error(result[:1], oracle(*inputs, is_causal=True)[:1, :, 5:]) < 1e-6


def test_decode_says_what_it_takes():
    inputs = inputs_of(batch=1, heads=2, sinks=2)
    state = FlowState.empty(1, 2, 4, device=DEVICE).pack()
    with pytest.raises(ValueError, match="one token a call, got 2"):
        decode(*inputs, None, state, Options(1.0, DEFAULT))
    with pytest.raises(ValueError, match="contiguous"):
        decode(*(x[:, :, :1] for x in inputs), None, (state[0], state[1].mT, state[2]), Options(1.0, DEFAULT))


@pytest.mark.parametrize("variant", CAUSAL_KERNEL_VARIANTS.values(), ids=CAUSAL_KERNEL_VARIANTS)
def test_one_token_at_a_time_leaves_the_states_before_it(variant):
    inputs = inputs_of(batch=2, heads=2, key_heads=1, sinks=4, dim=5, value_dim=3)
    whole, end = kernels.recurrent(*inputs, None, None, Options(1.0, variant))
    state, results = None, []
    for t in range(4):
        before = None if state is None else [x.clone() for x in state]
        result, after = kernels.recurrent(*(x[:, :, t : t + 1] for x in inputs), None, state, Options(1.0, variant))
        assert state is None or all(torch.equal(x, y) for x, y in zip(state, before, strict=True))
        results, state = [*results, result], after
    torch.testing.assert_close(torch.cat(results, 2), whole, rtol=1e-5, atol=1e-6)
    for part, other in zip(state, end, strict=True):
        torch.testing.assert_close(part, other, rtol=1e-5, atol=1e-5)
