"""Two short trainings that differ only in the backend end at the same loss."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from flowformer import flow_attention


class Tagger(nn.Module):
    """Says for each token whether another of its kind is there: nothing to learn without attention."""

    def __init__(self, backend: str, is_causal: bool) -> None:
        super().__init__()
        self.embed, self.qkv, self.head = nn.Embedding(8, 32), nn.Linear(32, 96), nn.Linear(32, 1)
        self.backend, self.is_causal = backend, is_causal

    def forward(self, tokens):
        x = self.embed(tokens)
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        attended = flow_attention(q, k, v, is_causal=self.is_causal, backend=self.backend)
        return self.head(x + attended.transpose(1, 2).flatten(2)).squeeze(-1)


def losses(backend: str, is_causal: bool) -> list[float]:
    torch.manual_seed(0)
    model = Tagger(backend, is_causal)
    optimiser = torch.optim.Adam(model.parameters(), lr=3e-3)
    history = []
    for _ in range(60):
        tokens = torch.randint(8, (16, 10))
        same = tokens[:, :, None] == tokens[:, None, :]
        seen = same.tril(-1) if is_causal else same & ~torch.eye(10, dtype=torch.bool)
        loss = nn.functional.binary_cross_entropy_with_logits(model(tokens), seen.any(-1).float())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        history.append(loss.item())
    return history


@pytest.mark.parametrize("is_causal", [False, True], ids=["bidirectional", "causal"])
def test_backends_train_alike(is_causal):
    ours, oracle = losses("torch", is_causal), losses("reference", is_causal)
    assert sum(ours[-10:]) < 0.95 * sum(ours[:10]), "the model must learn, or the comparison says nothing"
    assert ours == pytest.approx(oracle, rel=1e-4)
