"""A small trained decoder, used as the teacher."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from language import LLAMA, documents

from flowformer.linearize.text import PackedRows, with_special_tokens


@pytest.fixture(scope="session")
def trained() -> transformers.LlamaForCausalLM:
    """A decoder with a few thousand parameters, trained on the language of `documents`."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(copy.deepcopy(LLAMA))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    rows = PackedRows(with_special_tokens(documents(200), [], [1]), 24, 0)
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
    """A copy of the trained decoder that the test may change."""
    return copy.deepcopy(trained)
