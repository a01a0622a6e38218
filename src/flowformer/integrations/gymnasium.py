"""The Decision Flowformer in gymnasium: a policy for vector environments, its evaluation, and minari's episodes.

Shapes: B environments, T steps, S numbers of a state, A of an action, E episodes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..models.decision import FlowformerDecision, RecurrentRollout, WindowRollout

try:
    import numpy as np
    from gymnasium.envs.registration import EnvSpec
    from gymnasium.spaces import Box, Space
    from gymnasium.vector import AutoresetMode, VectorEnv
except Exception as error:  # a broken package may raise anything
    raise ImportError("flowformer.integrations.gymnasium needs gymnasium: pip install 'flowformer[rl]'.") from error

# D4RL's returns of a random and of an expert policy, which score 0 and 100
REFERENCE_RETURNS = {
    "hopper": (-20.272305, 3234.3),
    "halfcheetah": (-280.178953, 12135.0),
    "walker2d": (1.629008, 4592.3),
}
RETURN_SCALE = 1000.0  # what the paper divides returns by


class DecisionPolicy:
    """Acts in vector environments, whatever their autoreset mode; each environment has a past of its own.

        policy.reset(envs)
        observations, _ = envs.reset()
        while True:
            observations, rewards, terminations, truncations, _ = envs.step(policy.act(observations))
            policy.observe(rewards, terminations, truncations)

    With AutoresetMode.DISABLED, also reset the environments that have ended: `envs.reset(options={"reset_mask": …})`.

    Args:
        model: in evaluation mode, unless its dropout is wanted.
        target_return: what an episode is asked to bring, in the units of the environment.
        return_scale: what returns were divided by in training.
        state_mean, state_std: (S,) of the states in training; None are 0 and 1.
        window: None carries a state over the whole episode; a number looks at as many steps, as the paper does with 20.

    >>> import gymnasium
    >>> from flowformer.models.decision import PRESETS
    >>> envs = gymnasium.make_vec("Hopper-v5", num_envs=2)
    >>> policy = DecisionPolicy(FlowformerDecision(PRESETS["hopper"]).eval(), 3600)
    >>> policy.reset(envs)
    >>> policy.act(envs.reset(seed=0)[0]).shape
    (2, 3)
    """

    def __init__(
        self,
        model: FlowformerDecision,
        target_return: float,
        *,
        return_scale: float = RETURN_SCALE,
        state_mean: np.ndarray | None = None,
        state_std: np.ndarray | None = None,
        window: int | None = None,
    ) -> None:
        self.model = model
        self.target_return = target_return
        self.return_scale = return_scale
        self.state_mean = np.zeros(model.config.state_dim) if state_mean is None else np.asarray(state_mean)
        self.state_std = np.ones(model.config.state_dim) if state_std is None else np.asarray(state_std)
        self.window = window
        self._rollout: RecurrentRollout | WindowRollout | None = None
        for name in ("state_mean", "state_std"):
            if getattr(self, name).shape != (model.config.state_dim,):
                raise ValueError(
                    f"{name} must have shape {(model.config.state_dim,)}, got {getattr(self, name).shape}."
                )

    def reset(self, envs: VectorEnv) -> None:
        """Begin anew in all of these environments, which need not be those of before."""
        mode, config, weight = _autoreset_mode(envs), self.model.config, self.model.action_head.weight
        _check_space(envs.single_observation_space, "state_dim", config.state_dim)
        space = _check_space(envs.single_action_space, "action_dim", config.action_dim)
        _check_length(envs.spec, config.max_timestep)
        self._bounds = torch.as_tensor(space.low).to(weight), torch.as_tensor(space.high).to(weight)
        self._dtype = space.dtype
        self._rollout = self.model.new_rollout(envs.num_envs, window=self.window)
        self._return_to_go = np.full(envs.num_envs, float(self.target_return))
        self._resets_next_step = mode is AutoresetMode.NEXT_STEP
        self._resetting = np.zeros(envs.num_envs, dtype=bool)

    def act(self, observations: np.ndarray) -> np.ndarray:
        """The actions (B, A) for observations (B, S), inside the bounds of the action space."""
        rollout = self._playing()
        weight = self.model.action_head.weight
        state = torch.as_tensor((observations - self.state_mean) / self.state_std).to(weight)
        return_to_go = torch.as_tensor(self._return_to_go / self.return_scale).to(weight)
        action, rollout = self.model.act(return_to_go, state, rollout)
        action = action.clamp(*self._bounds)
        self._rollout = replace(rollout, action=action)
        return action.float().cpu().numpy().astype(self._dtype)

    def observe(self, rewards: np.ndarray, terminations: np.ndarray, truncations: np.ndarray) -> np.ndarray:
        """Take in what a step brought; where an episode has ended, the past is forgotten and the target is asked anew.

        Args: (B,) each, as `envs.step` returns them.

        Returns: (B,) bool, where a step was taken: with AutoresetMode.NEXT_STEP, the step after the end of an episode
        is none. It brings the first observation of the next episode, ignores the action and has no reward.
        """
        rollout = self._playing()
        ended = terminations | truncations
        played = ~self._resetting
        # at the end already, since the model may not count any further, and once more after the step that is none
        begins = ended | self._resetting
        self._return_to_go = np.where(begins, self.target_return, self._return_to_go - rewards)
        if begins.any():
            self._rollout = rollout.reset(torch.from_numpy(begins).to(rollout.timestep.device))
        self._resetting = ended & self._resets_next_step
        return played

    def _playing(self) -> RecurrentRollout | WindowRollout:
        if self._rollout is None:
            raise RuntimeError("the policy is in no environment yet. Call reset(envs) first.")
        return self._rollout


@dataclass(frozen=True, eq=False)
class Evaluation:
    """The episodes that `evaluate` played: their returns and lengths, (E,), in the environment of this id."""

    environment: str
    returns: np.ndarray
    lengths: np.ndarray

    @property
    def scores(self) -> np.ndarray:
        """(E,), see `normalised_score`."""
        return normalised_score(self.environment, self.returns)


def evaluate(policy: DecisionPolicy, envs: VectorEnv, episodes: int, *, seed: int | None = None) -> Evaluation:
    """Play a number of episodes, the model in evaluation mode.

    How many each environment plays is settled before: taking the first that end would prefer short ones. Returns,
    lengths and their order are the same in every autoreset mode.

    Args:
        envs: of any autoreset mode; left open, in the midst of some episode.
        seed: environment i is seeded with seed + i.
    """
    if episodes < 1:
        raise ValueError(f"episodes must be positive, got {episodes}.")
    training = policy.model.training
    policy.model.eval()
    try:
        return _evaluate(policy, envs, episodes, seed)
    finally:
        policy.model.train(training)


def _evaluate(policy: DecisionPolicy, envs: VectorEnv, episodes: int, seed: int | None) -> Evaluation:
    policy.reset(envs)
    observations, _ = envs.reset(seed=seed)
    wanted = [len(range(row, episodes, envs.num_envs)) for row in range(envs.num_envs)]
    finished: list[list[tuple[float, int]]] = [[] for _ in wanted]
    returns, lengths = np.zeros(envs.num_envs), np.zeros(envs.num_envs, dtype=int)
    while any(len(row) < number for row, number in zip(finished, wanted, strict=True)):
        observations, rewards, terminations, truncations, _ = envs.step(policy.act(observations))
        played = policy.observe(rewards, terminations, truncations)
        returns += rewards
        lengths += played
        ended = terminations | truncations
        for row in np.flatnonzero(ended):
            finished[row].append((float(returns[row]), int(lengths[row])))
        returns[ended], lengths[ended] = 0, 0
        if ended.any() and _autoreset_mode(envs) is AutoresetMode.DISABLED:
            observations, _ = envs.reset(options={"reset_mask": ended})
    counted = [episode for row, number in zip(finished, wanted, strict=True) for episode in row[:number]]
    name = "unknown" if envs.spec is None else envs.spec.id
    return Evaluation(name, *(np.array(part) for part in zip(*counted, strict=True)))


def normalised_score(environment: str, returns: np.ndarray) -> np.ndarray:
    """100 · (return − random) / (expert − random), with D4RL's reference returns.

    They were measured in older versions of these environments: compare scores of one version only.

    >>> normalised_score("Hopper-v5", np.array([3234.3]))
    array([100.])
    """
    name = environment.rpartition("/")[2].partition("-")[0].lower()
    if name not in REFERENCE_RETURNS:
        raise ValueError(
            f"there are no reference returns for {environment!r}; accepted: any version of "
            f"{', '.join(REFERENCE_RETURNS)}. For a minari dataset with its own, use minari.get_normalized_score."
        )
    random, expert = REFERENCE_RETURNS[name]
    return 100 * (returns - random) / (expert - random)


class Trajectory(NamedTuple):
    """An episode in the order of `FlowformerDecision.forward`, in float32."""

    returns_to_go: Tensor  # (T,)
    states: Tensor  # (T, S)
    actions: Tensor  # (T, A)


class Recording(NamedTuple):
    """Episodes as the model is trained on them, and what their states were standardised with."""

    trajectories: list[Trajectory]
    state_mean: np.ndarray  # (S,)
    state_std: np.ndarray  # (S,)


def read_episodes(episodes: Iterable[Any], *, return_scale: float = RETURN_SCALE) -> Recording:
    """The recorded episodes of a minari dataset, as trajectories for `FlowformerDecision.loss`.

    Args:
        episodes: a minari.MinariDataset, or any of its EpisodeData.
        return_scale: what returns are divided by; they are not discounted.
    """
    recorded = list(episodes)
    if not recorded:
        raise ValueError("got no episodes.")
    for episode in recorded:
        for name in ("observations", "actions"):
            value = getattr(episode, name)
            if getattr(value, "ndim", None) != 2:
                raise TypeError(
                    f"{name} must be arrays of shape (steps, numbers), got {type(value).__name__} of shape "
                    f"{getattr(value, 'shape', None)}. Flatten them, as gymnasium.spaces.flatten does."
                )
    # an episode holds one observation more than actions: the last, in which nothing was done
    states = [episode.observations[: len(episode.actions)] for episode in recorded]
    together = np.concatenate(states).astype(np.float64)
    mean, std = together.mean(0), together.std(0) + 1e-6
    trajectories = []
    for episode, state in zip(recorded, states, strict=True):
        returns_to_go = np.cumsum(episode.rewards[::-1], dtype=np.float64)[::-1] / return_scale
        parts = returns_to_go.copy(), (state - mean) / std, episode.actions
        trajectories.append(Trajectory(*(torch.tensor(part, dtype=torch.float32) for part in parts)))
    return Recording(trajectories, mean, std)


def _autoreset_mode(envs: VectorEnv) -> AutoresetMode:
    if not isinstance(envs, VectorEnv):
        raise TypeError(
            f"the policy acts in a gymnasium.vector.VectorEnv, got {type(envs).__name__}. Make one with "
            "gymnasium.make_vec, or with gymnasium.vector.SyncVectorEnv([lambda: env])."
        )
    mode = envs.metadata.get("autoreset_mode")
    if not isinstance(mode, AutoresetMode):
        raise ValueError(
            f"{envs} does not say how it resets: metadata['autoreset_mode'] is {mode!r}; accepted: an AutoresetMode."
        )
    return mode


def _check_space(space: Space, name: str, dim: int) -> Box:
    if not isinstance(space, Box) or space.shape != (dim,):
        raise ValueError(f"a model with {name}={dim} needs a space Box of shape {(dim,)}, got {space}.")
    return space


def _check_length(spec: EnvSpec | None, max_timestep: int) -> None:
    if spec is None:
        return
    # make_vec keeps a limit of its own among the arguments, and the registered one in its place
    longest = spec.kwargs.get("max_episode_steps", spec.max_episode_steps)
    if longest is not None and longest > max_timestep:
        raise ValueError(
            f"episodes of {spec.id} may have {longest} steps, but config.max_timestep is {max_timestep}. Make the "
            "environments with max_episode_steps, or train a model that counts further."
        )
