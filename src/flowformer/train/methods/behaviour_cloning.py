"""Behaviour cloning: supervised learning of the recorded actions, from all episodes or only the best."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from ..._utils import check_positive
from ...data.offline_rl import Windows
from .mlp import MLPConfig, MLPPolicy, descend

if TYPE_CHECKING:
    from .resume import Part


class BehaviourCloning:
    """Regression of the recorded actions on their states, by least squares.

    Args:
        windows: the recorded episodes.
        device: the device for training.
        best: fraction of the episodes to learn from, those with the highest returns. The "10 % BC" of the Decision
            Transformer's paper takes a tenth of the steps: fewer episodes, where the best ones are the longest.
        hidden_dim: width of the two hidden layers.
        batch_size: steps of episodes in one update.
        learning_rate: learning rate of Adam.
    """

    def __init__(
        self,
        windows: Windows,
        device: torch.device,
        *,
        best: float = 1.0,
        hidden_dim: int = 256,
        batch_size: int = 256,
        learning_rate: float = 3e-4,
    ) -> None:
        check_positive(hidden_dim=hidden_dim, batch_size=batch_size)
        if not 0 < best <= 1:
            raise ValueError(f"best must be a share of the episodes, above 0 and up to 1, got {best!r}.")
        steps = windows.steps_of_best(best)
        self.states, self.actions = windows.states[steps].to(device), windows.actions[steps].to(device)
        self.batch_size = batch_size
        self.model = MLPPolicy(MLPConfig(self.states.shape[1], self.actions.shape[1], hidden_dim)).to(device)
        self.optimizer = torch.optim.Adam(self.model.parameters(), learning_rate)

    @property
    def parts(self) -> dict[str, Part]:
        return {"model": self.model, "optimizer": self.optimizer}

    def update(self) -> Tensor:
        rows = torch.randint(len(self.states), (self.batch_size,), device=self.states.device)
        loss = F.mse_loss(self.model(self.states[rows]), self.actions[rows])
        descend(self.optimizer, loss)
        return loss.detach()
