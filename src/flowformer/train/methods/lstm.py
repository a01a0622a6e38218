"""An LSTM classifier of time series, the recurrent method of the paper's table.

Shapes: B series, N steps, C channels. A series is (C, N) in aeon and (N, C) in the network.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...integrations.aeon import NetworkClassifier


class LSTMNetwork(nn.Module):
    """An LSTM with a linear map from its state after the last step to the outputs.

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
        """Map (B, N, C) to (B, num_outputs). The mask (B, N) is True for steps, False for padding at the end."""
        states, _ = self.lstm(series)
        last = states[:, -1] if mask is None else states[torch.arange(len(states), device=mask.device), mask.sum(1) - 1]
        return self.head(self.dropout(last))


@dataclass(kw_only=True, eq=False, repr=False)
class LSTMClassifier(NetworkClassifier):
    """Classifies time series with an LSTM.

    The paper does not state the sizes of its LSTM; width, depth and training are those of
    `FlowformerTimeSeriesClassifier`.

    Args: as in `FlowformerTimeSeriesClassifier`, without the options of attention.

    >>> import numpy as np
    >>> series = [np.random.randn(3, length) for length in (20, 35, 28, 31)]
    >>> LSTMClassifier(n_epochs=1).fit(series, np.array(["a", "b", "a", "b"])).predict_proba(series).shape
    (4, 2)
    """

    def _network(self, num_features: int, num_outputs: int, max_length: int) -> nn.Module:
        return LSTMNetwork(
            num_features, num_outputs, embed_dim=self.embed_dim, num_layers=self.num_layers, dropout=self.dropout
        )

    @classmethod
    def _get_test_params(cls, parameter_set: str = "default") -> list[dict[str, Any]]:
        return [{"embed_dim": 8, "num_layers": 1, "n_epochs": 2, "batch_size": 4}]
