"""A teacher that has learned something."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from language import LLAMA, documents

from flowformer.linearize.text import PackedRows, framed


@pytest.fixture(scope="session")
def trained() -> transformers.LlamaForCausalLM:
    """A decoder of some thousand parameters that has learned the language of `documents`."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(copy.deepcopy(LLAMA))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    rows = PackedRows(framed(documents(200), [], [1]), 24, 0)
    for step in range(60):
        batch = rows.batch(step, 16)
        loss = model(**batch, labels=batch["input_ids"], use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 1.5
    return model.eval()


@pytest.fixture
def teacher(trained):
    return copy.deepcopy(trained)
