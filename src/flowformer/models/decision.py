"""Decision Flowformer: offline reinforcement learning as prediction of actions from past returns, states and actions.

A step of a trajectory is three tokens: the sum of the remaining rewards (return-to-go), the state, and the action. The
model predicts the action from the output at the state token, which sees this step's return and all earlier steps. Scale
inputs as in training: the paper divides returns by 1000 and standardises states.

Shapes: B trajectories, T steps, S state dimension, A action dimension, W width (embed_dim).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._utils import check_positive
from ..nn import FlowDecoder, FlowDecoderLayer, LearnedPositions, is_flow, token_positions
from ..nn.masks import zero_padding
from ..ops import FlowState, FlowVariant
from .base import FlowModel, options_with_dropout

_DEFAULT = FlowVariant()


@dataclass(frozen=True)
class DecisionConfig:
    """Config of `FlowformerDecision`; the defaults are the paper's.

    Args:
        state_dim, action_dim: S and A; with discrete_actions, A is the number of choices.
        num_layers, embed_dim, num_heads, mlp_dim: depth, W, heads, inner width of the feed-forward networks.
        window: number of steps in a training window, and in the paper's evaluation. The model itself reads it only for
            rivals whose parameters depend on the length.
        max_timestep: the longest episode, in steps.
        bounded_actions: whether actions lie in [-1, 1]; the action head then ends in a tanh.
        discrete_actions: whether an action is one of A choices, an integer from 0 to A - 1. The model then predicts
            logits, the loss is cross-entropy, `act` takes the likeliest choice, and bounded_actions is ignored.
        predict_all: also predict the next state and return; the paper has these heads but does not train them.
        dropout: on the embeddings, and on the results of attention and feed-forward networks.
        attention: "flow", or the name of a rival attention; `baselines.names` lists them.
        attention_dropout: on the weights of softmax attention; None means `dropout`. Ignored for other attentions.
        attention_options: options of the attention, see `build_attention`.
        variant: variant of Flow-Attention.
    """

    state_dim: int
    action_dim: int
    num_layers: int = 3
    embed_dim: int = 256
    num_heads: int = 4
    mlp_dim: int = 1024
    window: int = 20
    max_timestep: int = 1000
    bounded_actions: bool = True
    discrete_actions: bool = False
    predict_all: bool = False
    dropout: float = 0.1
    attention: str = "flow"
    attention_dropout: float | None = None
    attention_options: dict[str, Any] = field(default_factory=dict)
    variant: FlowVariant = _DEFAULT

    def __post_init__(self) -> None:
        sizes = ("state_dim", "action_dim", "num_layers", "window", "max_timestep")
        check_positive(**{name: getattr(self, name) for name in sizes})


# the environments of D4RL's Gym tasks
PRESETS = {
    "hopper": DecisionConfig(state_dim=11, action_dim=3),
    "halfcheetah": DecisionConfig(state_dim=17, action_dim=6),
    "walker2d": DecisionConfig(state_dim=17, action_dim=6),
}


class Predictions(NamedTuple):
    """The predictions for each step of a trajectory."""

    # (B, T, A), from the step's return and state and all earlier steps; logits if actions are discrete
    action: Tensor
    state: Tensor | None  # (B, T, S), state of the next step; None unless config.predict_all
    return_to_go: Tensor | None  # (B, T), return-to-go of the next step; None unless config.predict_all


@dataclass(frozen=True, eq=False)
class RecurrentRollout:
    """The past of `act` as recurrent states: the whole episode at constant size.

    `action`, (B, A) or (B,) choices, is the action of the previous step, and `timestep` (B,) counts the steps taken. If
    you execute another action than the model's, store it with dataclasses.replace(rollout, action=…).
    """

    flow_states: list[FlowState]
    action: Tensor
    timestep: Tensor

    def reset(self, rows: Tensor) -> RecurrentRollout:
        """Clear the past of the episodes where `rows` (B,) bool is True, for use at the end of an episode."""
        return RecurrentRollout(
            [state.zero_rows(rows) for state in self.flow_states], self.action, self.timestep.masked_fill(rows, 0)
        )


@dataclass(frozen=True, eq=False)
class WindowRollout:
    """The past of `act` as a window of the last T steps, the latest at the end, as in the paper.

    `trajectory` holds the arguments returns_to_go, states and actions of `forward`; `mask` (B, T) is True for the steps
    taken; `action` and `timestep` are as in `RecurrentRollout`.
    """

    trajectory: tuple[Tensor, Tensor, Tensor]
    mask: Tensor
    action: Tensor
    timestep: Tensor

    def reset(self, rows: Tensor) -> WindowRollout:
        """Clear the past of the episodes where `rows` (B,) bool is True, for use at the end of an episode."""
        mask = self.mask & ~rows[:, None]
        return WindowRollout(self.trajectory, mask, self.action, self.timestep.masked_fill(rows, 0))


class FlowformerDecision(FlowModel):
    """The Decision Flowformer: pre-norm decoder layers over the tokens of a trajectory.

    >>> model = FlowformerDecision(DecisionConfig(state_dim=4, action_dim=2, embed_dim=16, num_heads=2)).eval()
    >>> model(torch.zeros(3, 5), torch.randn(3, 5, 4), torch.randn(3, 5, 2)).action.shape
    torch.Size([3, 5, 2])
    >>> rollout = model.new_rollout(3)
    >>> action, rollout = model.act(torch.ones(3), torch.randn(3, 4), rollout)
    >>> action.shape, rollout.timestep.tolist()
    (torch.Size([3, 2]), [1, 1, 1])

    With discrete actions, which are choices from 0 to action_dim - 1:

    >>> config = DecisionConfig(state_dim=4, action_dim=2, discrete_actions=True, embed_dim=16, num_heads=2)
    >>> model = FlowformerDecision(config).eval()
    >>> model(torch.zeros(3, 5), torch.randn(3, 5, 4), torch.randint(2, (3, 5))).action.shape  # logits
    torch.Size([3, 5, 2])
    >>> model.act(torch.ones(3), torch.randn(3, 4), model.new_rollout(3))[0].shape
    torch.Size([3])
    """

    config_class = DecisionConfig
    config: DecisionConfig

    def __init__(self, config: DecisionConfig) -> None:
        super().__init__(config)
        width = config.embed_dim
        self.return_embedding = nn.Linear(1, width)
        self.state_embedding = nn.Linear(config.state_dim, width)
        self.action_embedding = nn.Linear(config.action_dim, width)
        self.timesteps = LearnedPositions(config.max_timestep, width, std=1.0)
        self.embedding_norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(config.dropout)
        self.decoder = FlowDecoder(
            FlowDecoderLayer(
                width,
                config.num_heads,
                config.mlp_dim,
                activation="relu",
                dropout=config.dropout,
                activation_dropout=0.0,
                attention=config.attention,
                attention_options=options_with_dropout(config),
                max_length=3 * config.window,
                variant=config.variant,
            )
            for _ in range(config.num_layers)
        )
        self.norm = nn.LayerNorm(width)
        self.action_head = nn.Linear(width, config.action_dim)
        self.state_head = nn.Linear(width, config.state_dim) if config.predict_all else None
        self.return_head = nn.Linear(width, 1) if config.predict_all else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the layers as GPT-2, as published; embeddings and heads keep PyTorch's initialisation."""
        for layer in cast(list[FlowDecoderLayer], self.decoder.layers):
            attention, mlp = layer.attention, layer.mlp
            for linear in [*attention.projections(), mlp.linear1, mlp.linear2]:
                nn.init.normal_(linear.weight, std=0.02)
                nn.init.zeros_(linear.bias)

    def forward(
        self,
        returns_to_go: Tensor,
        states: Tensor,
        actions: Tensor,
        timesteps: Tensor | None = None,
        mask: Tensor | None = None,
        *,
        return_maps: bool = False,
    ):
        """Predict the action of each step of trajectories from its return, its state and the earlier steps.

        Args:
            returns_to_go: (B, T).
            states, actions: (B, T, S) and (B, T, A), or with discrete actions (B, T) integers.
            timesteps: (B, T) integers, index of each step in its episode; None counts the unmasked steps from 0.
            mask: (B, T) bool, True = a step; padding may be on either side. Returns, states and actions of masked steps
                may hold any values, also NaN and invalid choices.
            return_maps: also return the flow maps of each layer, for 3 T tokens.

        Returns: Predictions, and with return_maps a list of FlowMaps.
        """
        if return_maps:
            return self._with_maps(returns_to_go, states, actions, timesteps, mask)
        self._check(returns_to_go, states, actions, mask)
        returns_to_go, states, actions = (zero_padding(x, mask) for x in (returns_to_go, states, actions))
        if timesteps is None:
            timesteps = token_positions(torch.ones_like(returns_to_go, dtype=torch.bool) if mask is None else mask)
        x = self._embed(returns_to_go, states, actions, timesteps.repeat_interleave(3, 1))
        x, _ = self._decode(x, None if mask is None else mask.repeat_interleave(3, 1), None)
        _, at_state, at_action = x.unflatten(1, (-1, 3)).unbind(2)  # (B, T, W)
        return Predictions(
            self._action(at_state),
            None if self.state_head is None else self.state_head(at_action),
            None if self.return_head is None else self.return_head(at_action)[..., 0],
        )

    def loss(
        self,
        returns_to_go: Tensor,
        states: Tensor,
        actions: Tensor,
        timesteps: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Return the mean squared error of the actions, or their cross-entropy if discrete, over the unmasked steps.

        The loss is 0 if all steps are masked. Args: as for `forward`.
        """
        predicted = self(returns_to_go, states, actions, timesteps, mask).action
        actions = zero_padding(actions, mask)
        if self.config.discrete_actions:
            error = F.cross_entropy(predicted.mT, actions.long(), reduction="none")[..., None]  # (B, T, 1)
        else:
            error = (predicted - actions).square()  # (B, T, A)
        if mask is None:
            return error.mean()
        total = error.masked_fill(~mask[..., None], 0).sum()
        return total / (mask.sum() * error.shape[-1]).clamp_min(1)

    def new_rollout(self, batch_size: int, *, window: int | None = None) -> RecurrentRollout | WindowRollout:
        """The initial rollout of `batch_size` episodes, for `act`.

        Args:
            window: None uses recurrent states: constant cost per step, and the model sees the whole episode. A number
                keeps that many steps and reruns the model over them, as the paper does with 20. Both give the same
                actions until the window is full. After that, the recurrent states hold a longer past than a model
                trained on windows has learnt to use.
        """
        weight = self.action_head.weight
        timestep = torch.zeros(batch_size, dtype=torch.long, device=weight.device)
        # (B,) integers if actions are discrete, else (B, A)
        action = timestep if self.config.discrete_actions else weight.new_zeros(batch_size, self.config.action_dim)
        if window is None:
            if not is_flow(self.config.attention):
                raise NotImplementedError(
                    f"{self.config.attention} attention has no state to carry. Pass window={self.config.window} to run "
                    'over the last steps each time, or use attention="flow".'
                )
            return RecurrentRollout(self.decoder.new_states(batch_size), action, timestep)
        if window < 1:
            raise ValueError(f"window must be positive, or None for the recurrent state, got {window}.")
        trajectory = (
            weight.new_zeros(batch_size, window),
            weight.new_zeros(batch_size, window, self.config.state_dim),
            action.new_zeros(batch_size, window, *action.shape[1:]),
        )
        mask = torch.zeros(batch_size, window, dtype=torch.bool, device=weight.device)
        return WindowRollout(trajectory, mask, action, timestep)

    @torch.no_grad()
    def act(self, return_to_go: Tensor, state: Tensor, rollout: RecurrentRollout | WindowRollout):
        """Choose one action for each episode.

        Args:
            return_to_go: (B,), the target return minus the rewards so far.
            state: (B, S).
            rollout: from `new_rollout`, from the previous call, or from the `reset` of either. It is not modified.

        Returns: the actions, (B, A) or (B,) choices, and the rollout for the next step. Dropout is on unless the model
        is in evaluation mode.
        """
        batch = len(rollout.timestep)
        accepted = (batch,), (batch, self.config.state_dim)
        if (tuple(return_to_go.shape), tuple(state.shape)) != accepted:
            raise ValueError(
                f"a rollout of {batch} episodes takes returns and states of shapes {accepted[0]} and {accepted[1]}, "
                f"got {tuple(return_to_go.shape)} and {tuple(state.shape)}."
            )
        step = return_to_go[:, None], state[:, None], rollout.action[:, None]
        if isinstance(rollout, RecurrentRollout):
            return self._act_recurrent(*step, rollout)
        return self._act_window(*step, rollout)

    def _act_recurrent(self, return_to_go: Tensor, state: Tensor, last_action: Tensor, rollout: RecurrentRollout):
        timestep = rollout.timestep
        times = torch.stack([timestep, timestep, (timestep - 1).clamp_min(0)], 1)
        # roll moves the previous action before return and state; the first step has none, so its token is masked
        x = self._embed(return_to_go, state, last_action, times).roll(1, 1)
        mask = F.pad((timestep > 0)[:, None], (0, 2), value=True)
        x, flow_states = self._decode(x, mask, rollout.flow_states)
        action = self._select_action(self._action(x[:, -1]))
        return action, RecurrentRollout(flow_states, action, timestep + 1)

    def _act_window(self, return_to_go: Tensor, state: Tensor, last_action: Tensor, rollout: WindowRollout):
        returns, states, actions = rollout.trajectory
        # the last slot held a zero while its action was being chosen; fill in the action that was taken
        past_actions = torch.cat([actions[:, :-1], last_action], 1)
        trajectory = (
            torch.cat([returns[:, 1:], return_to_go], 1),
            torch.cat([states[:, 1:], state], 1),
            torch.cat([past_actions[:, 1:], torch.zeros_like(last_action)], 1),
        )
        mask = F.pad(rollout.mask[:, 1:], (0, 1), value=True)
        offsets = torch.arange(1 - mask.shape[1], 1, device=mask.device)
        timesteps = (rollout.timestep[:, None] + offsets).clamp_min(0)
        action = self._select_action(self(*trajectory, timesteps, mask).action[:, -1])
        return action, WindowRollout(trajectory, mask, action, rollout.timestep + 1)

    def _embed(self, returns_to_go: Tensor, states: Tensor, actions: Tensor, times: Tensor) -> Tensor:
        """Embed return, state and action of each step as tokens (B, 3 T, W); `times` (B, 3 T) are their timesteps."""
        if self.config.discrete_actions:
            actions = self._one_hot(actions).to(states.dtype)
        tokens = [
            self.return_embedding(returns_to_go[..., None]),
            self.state_embedding(states),
            self.action_embedding(actions),
        ]
        x = self.timesteps(torch.stack(tokens, 2).flatten(1, 2), times)
        return self.dropout(self.embedding_norm(x))

    def _one_hot(self, choices: Tensor) -> Tensor:
        count = self.config.action_dim
        # on a GPU this check would synchronise every step; there one_hot itself fails
        if choices.device.type == "cpu" and not torch.compiler.is_compiling() and choices.numel():
            low, high = int(choices.min()), int(choices.max())
            if low < 0 or high >= count:
                raise ValueError(f"a model with {count} discrete actions takes 0 to {count - 1}, got {low} to {high}.")
        return F.one_hot(choices.long(), count)

    def _decode(self, x: Tensor, mask: Tensor | None, flow_states: Sequence[FlowState] | None):
        """Run the layers; return the hidden states (B, 3 T, W) and, with states, the new states."""
        if flow_states is None:
            for layer in self.decoder.layers:
                x = self._layer(layer, x, mask=mask)
        else:
            x, flow_states = self.decoder(x, mask=mask, states=flow_states)
        return self.norm(x), flow_states

    def _action(self, x: Tensor) -> Tensor:
        action = self.action_head(x)
        return action.tanh() if self.config.bounded_actions and not self.config.discrete_actions else action

    def _select_action(self, predicted: Tensor) -> Tensor:
        """Convert the prediction of `_action` to the action to take."""
        return predicted.argmax(-1) if self.config.discrete_actions else predicted

    def _check(self, returns_to_go: Tensor, states: Tensor, actions: Tensor, mask: Tensor | None) -> None:
        steps, config = tuple(returns_to_go.shape), self.config
        if config.discrete_actions:
            action_shape, action = steps, "(B, T) integers"
            is_valid_dtype = not actions.is_floating_point() and actions.dtype != torch.bool
        else:
            action_shape, action = (*steps, config.action_dim), f"(B, T, {config.action_dim})"
            is_valid_dtype = True
        accepted = (*steps, config.state_dim), action_shape
        if len(steps) != 2 or (tuple(states.shape), tuple(actions.shape)) != accepted or not is_valid_dtype:
            raise ValueError(
                f"returns, states and actions must be (B, T), (B, T, {config.state_dim}) and {action}, got {steps}, "
                f"{tuple(states.shape)} and {tuple(actions.shape)} {actions.dtype}."
            )
        if mask is not None and (mask.dtype != torch.bool or tuple(mask.shape) != steps):
            raise ValueError(f"the mask must be bool of shape {steps}, got {mask.dtype} {tuple(mask.shape)}.")
