"""An LSTM classifier of time series: the recurrent method of the paper's table.

Shapes: B cases, N steps, C channels. A series is (C, N) to aeon and (N, C) to the network.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...integrations.aeon import FlowformerClassifier


class LSTMNetwork(nn.Module):
    """An LSTM, whose state after the last step is mapped to the outputs.

    >>> LSTMNetwork(3, 5)(torch.randn(2, 50, 3)).shape
    torch.Size([2, 5])
    """

    def __init__(
        self, num_features: int, num_outputs: int, *, embed_dim: int = 64, num_layers: int = 2, dropout: float = 0.1
    ) -> None:
        super().__init__()
        between_layers = dropout if num_layers > 1 else 0.0
        self.lstm = nn.LSTM(num_features, embed_dim, num_layers, batch_first=True, dropout=between_layers)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(embed_dim, num_outputs)

    def forward(self, series: Tensor, mask: Tensor | None = None) -> Tensor:
        """(B, N, C) to (B, num_outputs); mask (B, N) bool, True = a step. Padding has to come last."""
        states, _ = self.lstm(series)
        last = states[:, -1] if mask is None else states[torch.arange(len(states), device=mask.device), mask.sum(1) - 1]
        return self.head(self.dropout(last))


class LSTMClassifier(FlowformerClassifier):
    """Classifies time series with an LSTM of the width and depth of `FlowformerClassifier`, trained as that is.

    The paper does not state the sizes of its LSTM.

    Args: as of `FlowformerClassifier`, less what belongs to attention.

    >>> series = [np.random.randn(3, length) for length in (20, 35, 28, 31)]
    >>> LSTMClassifier(n_epochs=1).fit(series, np.array(["a", "b", "a", "b"])).predict_proba(series).shape
    (4, 2)
    """

    def __init__(
        self,
        *,
        embed_dim: int = 64,
        num_layers: int = 2,
        dropout: float = 0.1,
        n_epochs: int = 50,
        batch_size: int = 16,
        learning_rate: float = 1e-3,
        weight_decay: float = 1e-2,
        class_weight: str | dict | None = None,
        early_stopping: bool = False,
        validation_fraction: float = 0.1,
        patience: int = 20,
        device: str = "auto",
        n_jobs: int | None = 1,
        random_state: int | np.random.RandomState | None = None,
        verbose: bool = False,
    ) -> None:
        super().__init__(
            embed_dim=embed_dim,
            num_layers=num_layers,
            dropout=dropout,
            n_epochs=n_epochs,
            batch_size=batch_size,
            learning_rate=learning_rate,
            weight_decay=weight_decay,
            class_weight=class_weight,
            early_stopping=early_stopping,
            validation_fraction=validation_fraction,
            patience=patience,
            device=device,
            n_jobs=n_jobs,
            random_state=random_state,
            verbose=verbose,
        )

    def _network(self, num_features: int, num_outputs: int, max_length: int) -> nn.Module:
        return LSTMNetwork(
            num_features, num_outputs, embed_dim=self.embed_dim, num_layers=self.num_layers, dropout=self.dropout
        )

    @classmethod
    def _get_test_params(cls, parameter_set: str = "default") -> list[dict[str, Any]]:
        return [{"embed_dim": 8, "num_layers": 1, "n_epochs": 2, "batch_size": 4}]
