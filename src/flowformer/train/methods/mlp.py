"""A policy without memory, and what the methods that train one share.

Shapes: B steps, S numbers of a state, A of an action.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from ...models.base import FlowModel
from ...models.decision import RecurrentRollout


@dataclass(frozen=True)
class MLPConfig:
    """A policy without memory.

    Args:
        state_dim, action_dim: S and A.
        hidden_dim, num_layers: width and number of the hidden layers.
    """

    state_dim: int
    action_dim: int
    hidden_dim: int = 256
    num_layers: int = 2
    max_timestep: ClassVar[int] = sys.maxsize  # it does not count steps
    discrete_actions: ClassVar[bool] = False


class MLPPolicy(FlowModel):
    """An action from a state alone; `act` is that of `FlowformerDecision`, so that the same environments play it.

    >>> MLPPolicy(MLPConfig(state_dim=4, action_dim=2))(torch.randn(3, 4)).shape
    torch.Size([3, 2])
    """

    config_class = MLPConfig
    config: MLPConfig

    def __init__(self, config: MLPConfig) -> None:
        super().__init__(config)
        self.hidden = mlp(config.state_dim, config.hidden_dim, config.num_layers)
        self.action_head = nn.Linear(config.hidden_dim, config.action_dim)

    def forward(self, states: Tensor) -> Tensor:
        """(B, S) to (B, A), between -1 and 1."""
        return self.action_head(self.hidden(states)).tanh()

    def new_rollout(self, batch_size: int, *, window: int | None = None) -> RecurrentRollout:
        """What `act` begins with; there is no past to look back at, whatever the window."""
        weight = self.action_head.weight
        timestep = torch.zeros(batch_size, dtype=torch.long, device=weight.device)
        return RecurrentRollout([], weight.new_zeros(batch_size, self.config.action_dim), timestep)

    @torch.no_grad()
    def act(self, return_to_go: Tensor, state: Tensor, rollout: RecurrentRollout) -> tuple[Tensor, RecurrentRollout]:
        """One action for each environment, whatever the return that is wanted."""
        return self(state), rollout


def mlp(in_dim: int, hidden_dim: int, num_layers: int) -> nn.Sequential:
    """Hidden layers with ReLU; the output layer is the caller's."""
    widths = [in_dim, *[hidden_dim] * num_layers]
    layers = [[nn.Linear(widths[i], widths[i + 1]), nn.ReLU()] for i in range(num_layers)]
    return nn.Sequential(*(part for layer in layers for part in layer))


def descend(optimizer: torch.optim.Optimizer, loss: Tensor, max_norm: float | None = None) -> None:
    """One step of the optimiser, after clipping the gradient to max_norm."""
    optimizer.zero_grad()
    loss.backward()
    if max_norm is not None:
        nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], max_norm)
    optimizer.step()
