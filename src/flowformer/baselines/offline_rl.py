"""Rivals of the paper's reinforcement-learning table, by name: learnt from recorded episodes, played in environments.

They need the extra "rl", and so are not part of `flowformer.baselines` itself, which needs nothing but torch. Actions
are expected in [-1, 1], as those of D4RL are.

Shapes: B steps, S numbers of a state, A of an action.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._utils import suggestion
from ..data.offline_rl import Windows
from ..data.splits import collate
from ..integrations.gymnasium import DecisionPolicy
from ..models.base import FlowModel
from ..models.decision import DecisionConfig, FlowformerDecision, RecurrentRollout


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
        self.hidden = _mlp(config.state_dim, config.hidden_dim, config.num_layers)
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


class Learner(Protocol):
    """What learns from recorded episodes: `model` is played, `update` improves it once and returns the loss."""

    model: Any

    def update(self) -> Tensor: ...


class BehaviourCloning:
    """Regression of the recorded actions on their states, by least squares.

    Args:
        windows: the recorded episodes.
        device: where to learn.
        hidden_dim: width of the two hidden layers.
        batch_size, learning_rate: steps of an update, and of Adam.
    """

    def __init__(
        self,
        windows: Windows,
        device: torch.device,
        *,
        hidden_dim: int = 256,
        batch_size: int = 256,
        learning_rate: float = 3e-4,
    ) -> None:
        self.states, self.actions = windows.states.to(device), windows.actions.to(device)
        self.batch_size = batch_size
        self.model = MLPPolicy(MLPConfig(self.states.shape[1], self.actions.shape[1], hidden_dim)).to(device)
        self.optimizer = torch.optim.Adam(self.model.parameters(), learning_rate)

    def update(self) -> Tensor:
        rows = torch.randint(len(self.states), (self.batch_size,), device=self.states.device)
        loss = F.mse_loss(self.model(self.states[rows]), self.actions[rows])
        _descend(self.optimizer, loss)
        return loss.detach()


class Transitions(NamedTuple):
    """Steps with what came of them."""

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

    Two critics learn Q by temporal differences, from the smaller of their slow copies at an action of the actor. The
    actor, a Gaussian around tanh, makes recorded actions likely with weights exp(advantage / temperature), the
    advantage being Q of the action less Q of an action of its own. It is played without its noise.

    Args:
        windows: the recorded episodes.
        device: where to learn.
        hidden_dim: width of the four hidden layers of the actor and the two of each critic.
        batch_size, learning_rate: steps of an update, and of Adam.
        temperature: how far weights differ; from large to small, from cloning to the best actions only.
        discount: of later rewards.
        target_rate: share of a critic that its slow copy takes over with each update.
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
            nn.Sequential(_mlp(state_dim + action_dim, hidden_dim, 2), nn.Linear(hidden_dim, 1)) for _ in range(2)
        ).to(device)
        self.slow_critics = deepcopy(self.critics).requires_grad_(False)
        self.actor_optimizer = torch.optim.Adam([*self.model.parameters(), self.log_std], learning_rate)
        self.critic_optimizer = torch.optim.Adam(self.critics.parameters(), learning_rate)

    def update(self) -> Tensor:
        """One update of the critics, then of the actor; returns the loss of the actor."""
        rows = torch.randint(len(self.data.states), (self.batch_size,), device=self.data.states.device)
        batch = Transitions(*(values[rows] for values in self.data))
        _descend(self.critic_optimizer, self.critic_loss(batch))
        loss = self.actor_loss(batch)
        _descend(self.actor_optimizer, loss)
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
        """(2, B), what each critic says."""
        pairs = torch.cat([states, actions], -1)
        return torch.stack([critic(pairs)[:, 0] for critic in critics])


class DecisionTransformer:
    """The model of the paper with softmax attention, with the settings of the recipes "d4rl/…".

    Windows are drawn with replacement. `flowformer train d4rl/… attention=softmax` goes through them in epochs, with
    checkpoints and evaluations on the way.

    Args:
        windows: the recorded episodes.
        device: where to learn.
        batch_size, learning_rate, warmup: windows of an update, the rate, and the updates over which it rises.
        sizes: of `DecisionConfig`.
    """

    def __init__(
        self,
        windows: Windows,
        device: torch.device,
        *,
        batch_size: int = 64,
        learning_rate: float = 1e-3,
        warmup: int = 10_000,
        **sizes: Any,
    ) -> None:
        self.windows, self.device, self.batch_size = windows, device, batch_size
        dims = windows.states.shape[1], windows.actions.shape[1]
        config = DecisionConfig(*dims, window=windows.window, attention="softmax", **sizes)
        self.model = FlowformerDecision(config).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), learning_rate, weight_decay=1e-4)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: min(1, step / warmup))

    def update(self) -> Tensor:
        rows = torch.randint(len(self.windows), (self.batch_size,)).tolist()
        batch = {key: value.to(self.device) for key, value in collate([self.windows[i] for i in rows]).items()}
        returns_to_go = batch.pop("returns_to_go")[..., 0]
        loss = self.model.loss(returns_to_go, **batch)
        _descend(self.optimizer, loss, max_norm=0.25)
        self.schedule.step()
        return loss.detach()


LEARNERS: dict[str, Callable[..., Learner]] = {"bc": BehaviourCloning, "awac": AWAC, "dt": DecisionTransformer}


def policies() -> list[str]:
    """What `policy` accepts."""
    return list(LEARNERS)


def policy(
    name: str,
    windows: Windows,
    *,
    target_return: float = 0.0,
    steps: int = 100_000,
    seed: int = 0,
    device: str = "auto",
    report: Callable[[int, Tensor], None] = lambda step, loss: None,
    **options: Any,
) -> DecisionPolicy:
    """Learn a rival from recorded episodes; `integrations.gymnasium.evaluate` plays what is returned.

    Args:
        name: "bc", behaviour cloning; "awac", advantage-weighted actor-critic; or "dt", the Decision Transformer.
        windows: the episodes, as `data.load("d4rl/…").train`.
        target_return: what an episode is asked to bring; only "dt" listens.
        steps: updates.
        seed: of everything random.
        device: where to learn and play; "auto" is a GPU if there is one.
        report: is called after each update with its number and its loss.
        options: of `BehaviourCloning`, `AWAC` or `DecisionTransformer`.
    """
    if name not in LEARNERS:
        raise ValueError(f"unknown policy {name!r}{suggestion(name, LEARNERS)}; accepted: {', '.join(LEARNERS)}.")
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}.")
    where = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
    with torch.random.fork_rng([where] if where.type == "cuda" else []):
        torch.manual_seed(seed)
        learner = LEARNERS[name](windows, where, **options)
        for step in range(1, steps + 1):
            report(step, learner.update())
    return DecisionPolicy(
        # all have what a policy asks of a model
        cast(FlowformerDecision, learner.model.eval()),
        target_return,
        state_mean=windows.state_mean.numpy(),
        state_std=windows.state_std.numpy(),
        window=windows.window,
    )


def _mlp(in_dim: int, hidden_dim: int, num_layers: int) -> nn.Sequential:
    widths = [in_dim, *[hidden_dim] * num_layers]
    layers = [[nn.Linear(widths[i], widths[i + 1]), nn.ReLU()] for i in range(num_layers)]
    return nn.Sequential(*(part for layer in layers for part in layer))


def _descend(optimizer: torch.optim.Optimizer, loss: Tensor, max_norm: float | None = None) -> None:
    optimizer.zero_grad()
    loss.backward()
    if max_norm is not None:
        nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], max_norm)
    optimizer.step()
