"""FlowState: what it holds, and that a copied, selected or saved one continues alike."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from helpers import random_inputs

from flowformer import FlowState, flow_attention_recurrent


def assert_equal_states(state, other):
    for part, expected in zip(state.pack(), other.pack(), strict=True):
        assert torch.equal(part, expected)


@pytest.fixture
def state():
    mask = torch.arange(9) < torch.tensor([[9], [4]])
    return flow_attention_recurrent(*random_inputs(value_dim=3), key_mask=mask)[1]


def test_empty_is_no_state():
    inputs = random_inputs(value_dim=3)
    state = FlowState.empty(2, 3, 4, 3, dtype=torch.float64)
    result, end = flow_attention_recurrent(*inputs, state)
    expected, expected_end = flow_attention_recurrent(*inputs)
    assert torch.equal(result, expected)
    assert_equal_states(end, expected_end)
    assert state.count.tolist() == [0, 0]


def test_properties(state):
    assert state.count.tolist() == [9, 4]
    assert state.count.dtype == torch.int64
    shapes = [tuple(x.shape) for x in (state.key_sum, state.conserved_query_sum, state.memory, state.log_sum_exp)]
    assert shapes == [(2, 3, 4), (2, 3, 4), (2, 3, 4, 3), (2, 3)]
    _, key, _ = random_inputs(value_dim=3)
    torch.testing.assert_close(state.key_sum[0], key[0].sigmoid().sum(-2))
    query = random_inputs(value_dim=3)[0]
    torch.testing.assert_close(state.query_sum[1], query[1, :, :4].sigmoid().sum(-2))
    assert state.device == torch.device("cpu")
    assert state.dtype == torch.float64


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_dtype(dtype):
    result, state = flow_attention_recurrent(*random_inputs(dtype=dtype))
    assert result.dtype == dtype
    assert state.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_select_repeats_rows_as_beam_search_does(state):
    beams = state.select(torch.tensor([1, 0, 1]))
    assert beams.count.tolist() == [4, 9, 4]
    token = [x[:, :, :1] for x in random_inputs(value_dim=3, seed=5)]
    result, _ = flow_attention_recurrent(*(x[[1, 0, 1]] for x in token), beams)
    expected, _ = flow_attention_recurrent(*token, state)
    torch.testing.assert_close(result, expected[[1, 0, 1]])


def test_select_carries_gradients():
    inputs = [x.requires_grad_() for x in random_inputs()]
    _, state = flow_attention_recurrent(*inputs)
    state.select(torch.tensor([1, 1])).memory.sum().backward()
    assert (inputs[2].grad[0] == 0).all()
    assert (inputs[2].grad[1] != 0).all()


def test_zero_rows_start_over(state):
    """A slot of a running batch is given to a new sequence; its neighbours go on."""
    token = [x[:, :, :1] for x in random_inputs(value_dim=3, seed=5)]
    result, end = flow_attention_recurrent(*token, state.zero_rows(torch.tensor([True, False])))
    fresh, _ = flow_attention_recurrent(*token)
    going, _ = flow_attention_recurrent(*token, state)
    torch.testing.assert_close(result, torch.stack([fresh[0], going[1]]))
    assert end.count.tolist() == [1, 5]
    assert state.count.tolist() == [9, 4]


def test_clone_is_apart(state):
    copied = state.clone()
    assert_equal_states(copied, state)
    copied.memory.zero_()
    assert (state.memory != 0).all()


def test_detach_cuts_the_history():
    _, state = flow_attention_recurrent(*(x.requires_grad_() for x in random_inputs()))
    assert all(part.requires_grad for part in state.pack()[:2])
    assert not any(part.requires_grad for part in state.detach().pack())
    assert state.detach().memory.data_ptr() == state.memory.data_ptr()


def test_to(state):
    assert state.to(dtype=torch.float32).dtype == torch.float32
    assert all(part.dtype == torch.float32 for part in state.to(dtype=torch.float32).pack())
    assert state.to("meta").device == torch.device("meta")
    assert_equal_states(state.to("cpu"), state)


def test_pack_is_not_a_copy(state):
    parts = state.pack()
    assert [part is x for part, x in zip(parts, (state.sums, state.memory, state.scalars), strict=True)] == [True] * 3
    assert_equal_states(FlowState.unpack(parts), state)


def test_packed_parts_survive_a_file(state):
    file = io.BytesIO()
    torch.save(state.pack(), file)
    file.seek(0)
    assert_equal_states(FlowState.unpack(torch.load(file)), state)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"])
def test_copies_continue_alike(state, copied):
    token = [x[:, :, :1] for x in random_inputs(value_dim=3, seed=5)]
    assert_equal_states(copied(state), state)
    result, expected = (flow_attention_recurrent(*token, each)[0] for each in (copied(state), state))
    assert torch.equal(result, expected)
