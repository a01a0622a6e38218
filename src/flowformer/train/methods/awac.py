"""AWAC: advantage-weighted actor-critic, learnt offline from recorded transitions.

d3rlpy also has AWAC, but its releases pin gymnasium to 1.0.0 and install the unmaintained gym.

Shapes: B steps, S state dimension, A action dimension.
"""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..._utils import check_between, check_positive
from ...data.offline_rl import Windows
from .mlp import MLPConfig, MLPPolicy, descend, mlp

if TYPE_CHECKING:
    from .resume import Part

_LOG_STD = -6.0, 0.0  # bounds of the logarithm of the actor's standard deviation, as in the authors' code


class Transitions(NamedTuple):
    """Transitions between states, with actions and rewards."""

    states: Tensor  # (B, S)
    actions: Tensor  # (B, A)
    rewards: Tensor  # (B,)
    next_states: Tensor  # (B, S)
    goes_on: Tensor  # (B,), 0 where the episode ended, 1 elsewhere

    @classmethod
    def of(cls, windows: Windows) -> Transitions:
        """All steps, except the last step of each truncated episode: its next state is needed, but not recorded."""
        steps = torch.arange(len(windows))
        is_last = steps == windows.ends - 1
        usable = steps[~is_last | windows.terminated]
        if not len(usable):
            raise ValueError("no step has a next state, and none ends its episode: there is nothing to learn from.")
        following = torch.where(is_last, steps, steps + 1)[usable]
        return cls(
            windows.states[usable],
            windows.actions[usable],
            windows.rewards[usable],
            windows.states[following],
            (~windows.terminated[usable]).float(),
        )


class AWAC:
    """Advantage-weighted actor-critic (Nair et al., 2020), offline, with the settings of the authors' code for MuJoCo.

    Two critics learn Q by temporal differences, with the minimum of their target networks at an action sampled from the
    actor as the value of the next state. The actor, a Gaussian whose mean is a tanh, maximises the log-likelihood of
    the recorded actions weighted by exp(advantage / temperature), which is normalised over the batch. The advantage is
    Q of the recorded action minus Q of an action sampled from the actor. Evaluation uses the mean of the Gaussian.

    The authors do not standardise states, which we do for all methods.

    Args:
        windows: the recorded episodes.
        device: the device for training.
        hidden_dim: width of the four hidden layers of the actor and the two of each critic.
        batch_size: transitions in one update.
        learning_rate: learning rate of Adam.
        weight_decay: weight of the actor's L2 penalty.
        temperature: temperature of the weights: a large one clones all actions, a small one only the best.
        discount: discount factor of rewards.
        target_rate: update rate of the target networks, moving averages of the critics.
    """

    def __init__(
        self,
        windows: Windows,
        device: torch.device,
        *,
        hidden_dim: int = 256,
        batch_size: int = 1024,
        learning_rate: float = 3e-4,
        weight_decay: float = 1e-4,
        temperature: float = 2.0,
        discount: float = 0.99,
        target_rate: float = 0.005,
    ) -> None:
        check_positive(hidden_dim=hidden_dim, batch_size=batch_size)
        check_between(0, 1, discount=discount, target_rate=target_rate)
        if not temperature > 0:
            raise ValueError(f"temperature must be more than 0, got {temperature}.")
        self.data = Transitions(*(values.to(device) for values in Transitions.of(windows)))
        self.batch_size, self.temperature, self.discount = batch_size, temperature, discount
        self.target_rate = target_rate
        state_dim, action_dim = self.data.states.shape[1], self.data.actions.shape[1]
        self.model = MLPPolicy(MLPConfig(state_dim, action_dim, hidden_dim, num_layers=4)).to(device)
        self.std_logits = nn.Parameter(torch.zeros(action_dim, device=device))
        self.critics = nn.ModuleList(
            nn.Sequential(mlp(state_dim + action_dim, hidden_dim, 2), nn.Linear(hidden_dim, 1)) for _ in range(2)
        ).to(device)
        self.slow_critics = deepcopy(self.critics).requires_grad_(False)
        self.actor_optimizer = torch.optim.Adam(
            [*self.model.parameters(), self.std_logits], learning_rate, weight_decay=weight_decay
        )
        self.critic_optimizer = torch.optim.Adam(self.critics.parameters(), learning_rate)

    @property
    def parts(self) -> dict[str, Part]:
        return {
            "model": self.model,
            "std_logits": nn.ParameterList([self.std_logits]),
            "critics": self.critics,
            "slow_critics": self.slow_critics,
            "actor_optimizer": self.actor_optimizer,
            "critic_optimizer": self.critic_optimizer,
        }

    def update(self) -> Tensor:
        """Update the critics, then the actor, and return the loss of the actor."""
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
            future = self.values(self.slow_critics, batch.next_states, self.actor(batch.next_states).rsample()).amin(0)
            target = batch.rewards + self.discount * batch.goes_on * future
        return F.mse_loss(self.values(self.critics, batch.states, batch.actions), target.expand(2, -1))

    def actor_loss(self, batch: Transitions) -> Tensor:
        policy = self.actor(batch.states)
        likelihood = policy.log_prob(batch.actions).sum(-1)
        return -(self.weights(batch, policy.rsample()) * likelihood).mean()

    @torch.no_grad()
    def weights(self, batch: Transitions, sampled: Tensor) -> Tensor:
        """The weights of the log-likelihood, (B,), of mean 1.

        Args:
            sampled: (B, A), actions that the actor chose.
        """
        recorded_q, sampled_q = (self.values(self.critics, batch.states, a).amin(0) for a in (batch.actions, sampled))
        return ((recorded_q - sampled_q) / self.temperature).softmax(0) * len(recorded_q)

    def actor(self, states: Tensor) -> torch.distributions.Normal:
        low, high = _LOG_STD
        # not clamp, whose gradient is zero at a bound and beyond: the deviation would never leave it
        log_std = low + (high - low) * self.std_logits.sigmoid()
        # validation would synchronise the device; so would `sample`, instead of which `rsample` is called
        return torch.distributions.Normal(self.model(states), log_std.exp(), validate_args=False)

    @staticmethod
    def values(critics: nn.ModuleList, states: Tensor, actions: Tensor) -> Tensor:
        """The estimate of each critic, (2, B)."""
        pairs = torch.cat([states, actions], -1)
        return torch.stack([critic(pairs)[:, 0] for critic in critics])
