"""AWAC: advantage-weighted actor-critic, learnt offline from recorded transitions.

It is written here and not taken from d3rlpy, whose releases pin gymnasium to 1.0.0 and install the unmaintained gym.

Shapes: B steps, S numbers of a state, A of an action.
"""

from __future__ import annotations

from copy import deepcopy
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...data.offline_rl import Windows
from .mlp import MLPConfig, MLPPolicy, descend, mlp


class Transitions(NamedTuple):
    """Steps with their rewards and next states."""

    states: Tensor  # (B, S)
    actions: Tensor  # (B, A)
    rewards: Tensor  # (B,)
    next_states: Tensor  # (B, S)
    goes_on: Tensor  # (B,), 0 where the episode ended, 1 elsewhere

    @classmethod
    def of(cls, windows: Windows) -> Transitions:
        """All steps whose next state is recorded or does not matter, as after an end; not those cut off by a limit."""
        steps = torch.arange(len(windows))
        is_last = steps == windows.ends - 1
        kept = steps[~is_last | windows.terminated]
        if not len(kept):
            raise ValueError("no step has a next state, and none ends its episode: there is nothing to learn from.")
        following = torch.where(is_last, steps, steps + 1)[kept]
        return cls(
            windows.states[kept],
            windows.actions[kept],
            windows.rewards[kept],
            windows.states[following],
            (~windows.terminated[kept]).float(),
        )


class AWAC:
    """Advantage-weighted actor-critic (Nair et al., 2020), offline.

    Two critics learn Q by temporal differences, bootstrapped from the minimum of their target networks at an action of
    the actor. The actor, a Gaussian around tanh, maximises the likelihood of recorded actions weighted by
    exp(advantage / temperature), where the advantage is Q of the action less Q of an action of its own. Evaluation
    takes the mean of the Gaussian.

    Args:
        windows: the recorded episodes.
        device: where to learn.
        hidden_dim: width of the four hidden layers of the actor and the two of each critic.
        batch_size, learning_rate: steps of an update, and of Adam.
        temperature: of the weights: a large one clones all actions, a small one only the best.
        discount: of later rewards.
        target_rate: of the moving average that the target networks are.
        max_weight: no weight is larger.
    """

    def __init__(
        self,
        windows: Windows,
        device: torch.device,
        *,
        hidden_dim: int = 256,
        batch_size: int = 1024,
        learning_rate: float = 3e-4,
        temperature: float = 1.0,
        discount: float = 0.99,
        target_rate: float = 0.005,
        max_weight: float = 100.0,
    ) -> None:
        self.data = Transitions(*(values.to(device) for values in Transitions.of(windows)))
        self.batch_size, self.temperature, self.discount = batch_size, temperature, discount
        self.target_rate, self.max_weight = target_rate, max_weight
        state_dim, action_dim = self.data.states.shape[1], self.data.actions.shape[1]
        self.model = MLPPolicy(MLPConfig(state_dim, action_dim, hidden_dim, num_layers=4)).to(device)
        self.log_std = nn.Parameter(torch.zeros(action_dim, device=device))
        self.critics = nn.ModuleList(
            nn.Sequential(mlp(state_dim + action_dim, hidden_dim, 2), nn.Linear(hidden_dim, 1)) for _ in range(2)
        ).to(device)
        self.slow_critics = deepcopy(self.critics).requires_grad_(False)
        self.actor_optimizer = torch.optim.Adam([*self.model.parameters(), self.log_std], learning_rate)
        self.critic_optimizer = torch.optim.Adam(self.critics.parameters(), learning_rate)

    def update(self) -> Tensor:
        """One update of the critics, then of the actor; returns the loss of the actor."""
        rows = torch.randint(len(self.data.states), (self.batch_size,), device=self.data.states.device)
        batch = Transitions(*(values[rows] for values in self.data))
        descend(self.critic_optimizer, self.critic_loss(batch))
        loss = self.actor_loss(batch)
        descend(self.actor_optimizer, loss)
        with torch.no_grad():
            for slow, fast in zip(self.slow_critics.parameters(), self.critics.parameters(), strict=True):
                slow.lerp_(fast, self.target_rate)
        return loss.detach()

    def critic_loss(self, batch: Transitions) -> Tensor:
        with torch.no_grad():
            future = self.values(self.slow_critics, batch.next_states, self.actor(batch.next_states).sample()).amin(0)
            target = batch.rewards + self.discount * batch.goes_on * future
        return F.mse_loss(self.values(self.critics, batch.states, batch.actions), target.expand(2, -1))

    def actor_loss(self, batch: Transitions) -> Tensor:
        likelihood = self.actor(batch.states).log_prob(batch.actions).sum(-1)
        return -(self.weights(batch) * likelihood).mean()

    @torch.no_grad()
    def weights(self, batch: Transitions) -> Tensor:
        """exp(advantage / temperature), (B,), at most `max_weight`."""
        own = self.actor(batch.states).sample()
        recorded, chosen = (self.values(self.critics, batch.states, a).amin(0) for a in (batch.actions, own))
        return ((recorded - chosen) / self.temperature).exp().clamp_max(self.max_weight)

    def actor(self, states: Tensor) -> torch.distributions.Normal:
        return torch.distributions.Normal(self.model(states), self.log_std.clamp(-6, 0).exp())

    @staticmethod
    def values(critics: nn.ModuleList, states: Tensor, actions: Tensor) -> Tensor:
        """(2, B), the estimate of each critic."""
        pairs = torch.cat([states, actions], -1)
        return torch.stack([critic(pairs)[:, 0] for critic in critics])
