"""An MLP policy, and helpers of the methods that train one.

Shapes: B steps, S state dimension, A action dimension.
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
    """Config of `MLPPolicy`.

    Args:
        state_dim, action_dim: S and A.
        hidden_dim, num_layers: width and number of the hidden layers.
    """

    state_dim: int
    action_dim: int
    hidden_dim: int = 256
    num_layers: int = 2
    max_timestep: ClassVar[int] = sys.maxsize  # the policy ignores time steps, so episodes may have any length
    discrete_actions: ClassVar[bool] = False


class MLPPolicy(FlowModel):
    """A policy that sees only the current state. `act` is called as in `FlowformerDecision`, by the same environments.

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
        """Map states (B, S) to actions (B, A) between -1 and 1."""
        return self.action_head(self.hidden(states)).tanh()

    def new_rollout(self, batch_size: int, *, window: int | None = None) -> RecurrentRollout:
        """The rollout to start `act` with. The policy has no memory, so the window is ignored."""
        weight = self.action_head.weight
        timestep = torch.zeros(batch_size, dtype=torch.long, device=weight.device)
        return RecurrentRollout([], weight.new_zeros(batch_size, self.config.action_dim), timestep)

    @torch.no_grad()
    def act(self, return_to_go: Tensor, state: Tensor, rollout: RecurrentRollout) -> tuple[Tensor, RecurrentRollout]:
        """One action for each environment; the return-to-go is ignored."""
        return self(state), rollout


def mlp(in_dim: int, hidden_dim: int, num_layers: int) -> nn.Sequential:
    """Hidden layers with ReLU, without an output layer."""
    widths = [in_dim, *[hidden_dim] * num_layers]
    layers = [[nn.Linear(widths[i], widths[i + 1]), nn.ReLU()] for i in range(num_layers)]
    return nn.Sequential(*(part for layer in layers for part in layer))


def descend(optimizer: torch.optim.Optimizer, loss: Tensor, max_norm: float | None = None) -> None:
    """Run backward, clip the gradient to norm max_norm if given, and take one optimiser step."""
    optimizer.zero_grad()
    loss.backward()
    if max_norm is not None:
        nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], max_norm)
    optimizer.step()
