"""The Decision Flowformer in gymnasium: a policy for environments, its evaluation, and reading of recorded episodes.

Shapes: B environments, T steps, S state dimension, A action dimension, E episodes.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._utils import check_positive
from ..data.environments import environment_of
from ..data.offline_rl import RETURN_SCALE, Episode, read_d4rl
from ..models.decision import FlowformerDecision, RecurrentRollout, WindowRollout

try:
    import numpy as np
    from gymnasium import Env, Wrapper
    from gymnasium.envs.registration import EnvSpec
    from gymnasium.spaces import Box, Discrete, Space
    from gymnasium.vector import AutoresetMode, VectorEnv
    from gymnasium.wrappers import Autoreset
except Exception as error:  # a broken package may raise anything
    raise ImportError("flowformer.integrations.gymnasium needs gymnasium: pip install 'flowformer[rl]'.") from error


class DecisionPolicy:
    """Policy for an environment, or for a vector of environments with any autoreset mode.

        policy.reset(envs)
        observations, _ = envs.reset()
        while True:
            observations, rewards, terminations, truncations, _ = envs.step(policy.act(observations))
            policy.observe(rewards, terminations, truncations)

    With AutoresetMode.DISABLED, also reset the environments that have ended: `envs.reset(options={"reset_mask": …})`.
    For a single environment, arrays have no environment axis: an observation (S,), one action, one reward.
    Observations are a Box of shape (S,); actions a Box of shape (A,), or Discrete(A) if the model has discrete actions.

    Args:
        model: in evaluation mode, unless you want dropout.
        target_return: the return-to-go at the start of an episode, in the units of the environment.
        return_scale: divisor of the returns in training.
        state_mean, state_std: (S,), mean and deviation of the training states; None means 0 and 1.
        window: None uses recurrent states over the whole episode; a number uses that many last steps, 20 in the paper.

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
        _check_scale("return_scale", return_scale)
        _check_scale("state_std", self.state_std)
        _check_finite("target_return", target_return)
        _check_finite("state_mean", self.state_mean)

    def reset(self, envs: VectorEnv | Env) -> None:
        """Start new episodes in `envs`, which may differ from the environments used before."""
        mode, config, weight = _autoreset_mode(envs), self.model.config, self.model.action_head.weight
        self._is_vector = isinstance(envs, VectorEnv)
        if isinstance(envs, VectorEnv):
            observation_space, action_space = envs.single_observation_space, envs.single_action_space
        else:
            observation_space, action_space = envs.observation_space, envs.action_space
        _check_observations(observation_space, config.state_dim)
        _check_actions(action_space, config.action_dim, config.discrete_actions)
        _check_length(envs.spec, config.max_timestep)
        self._action_space = action_space
        if isinstance(action_space, Box):
            self._exact_bounds = action_space.low, action_space.high
            self._bounds = torch.as_tensor(action_space.low).to(weight), torch.as_tensor(action_space.high).to(weight)
        count = _num_envs(envs)
        self._rollout = self.model.new_rollout(count, window=self.window)
        self._return_to_go = np.full(count, float(self.target_return))
        self._resets_next_step = mode is AutoresetMode.NEXT_STEP
        self._resetting = np.zeros(count, dtype=bool)

    def act(self, observations: np.ndarray) -> np.ndarray:
        """Return the actions for observations (B, S): (B, A) within the bounds of the action space, or (B,) choices."""
        rollout = self._current_rollout()
        weight = self.model.action_head.weight
        observations = np.asarray(observations) if self._is_vector else np.asarray(observations)[None]
        if observations.shape[-1:] != self.state_mean.shape:  # numpy would broadcast a last axis of 1
            raise ValueError(f"an observation must have shape {self.state_mean.shape}, got {observations.shape[1:]}.")
        _check_finite("observations", observations)
        state = torch.as_tensor((observations - self.state_mean) / self.state_std).to(weight)
        return_to_go = torch.as_tensor(self._return_to_go / self.return_scale).to(weight)
        action, rollout = self.model.act(return_to_go, state, rollout)
        if isinstance(self._action_space, Discrete):
            actions = action.cpu().numpy() + self._action_space.start
        else:
            action = action.clamp(*self._bounds)
            if np.issubdtype(self._action_space.dtype, np.integer):
                action = action.round()  # the cast to the integer dtype below would truncate
            # clip again in float64: the dtype of the model may round a bound to a value outside the space
            actions = action.cpu().double().numpy().clip(*self._exact_bounds)
        self._rollout = replace(rollout, action=action)
        actions = actions.astype(self._action_space.dtype)
        return actions if self._is_vector else actions[0]

    def observe(
        self, rewards: np.ndarray | float, terminations: np.ndarray | bool, truncations: np.ndarray | bool
    ) -> np.ndarray:
        """Record the results of a step. For episodes that have ended, clear the past and reset the return-to-go.

        Args: (B,) each, as `envs.step` returns them.

        Returns: (B,) bool, False where `envs.step` took no step. With AutoresetMode.NEXT_STEP, the call after the end
        of an episode resets the environment instead, and returns the first observation of the next episode.
        """
        rollout = self._current_rollout()
        count = len(self._resetting)
        for name, value in (("rewards", rewards), ("terminations", terminations), ("truncations", truncations)):
            if np.shape(value) != (count,) and (self._is_vector or np.shape(value) != ()):
                raise ValueError(f"{name} of {count} environments must have shape {(count,)}, got {np.shape(value)}.")
        _check_finite("rewards", rewards)
        ended = np.atleast_1d(np.logical_or(terminations, truncations))
        played = ~self._resetting
        # clear the past when an episode ends, since timesteps must stay below max_timestep; and once more after the
        # call that only resets, for which `act` has recorded an action
        starts_episode = ended | self._resetting
        self._return_to_go = np.where(starts_episode, self.target_return, self._return_to_go - rewards)
        if starts_episode.any():
            self._rollout = rollout.reset(torch.from_numpy(starts_episode).to(rollout.timestep.device))
        self._resetting = ended & self._resets_next_step
        return played if self._is_vector else played[0]

    def _current_rollout(self) -> RecurrentRollout | WindowRollout:
        if self._rollout is None:
            raise RuntimeError("the policy is in no environment yet. Call reset(envs) first.")
        return self._rollout


@dataclass(frozen=True, eq=False)
class Evaluation:
    """Result of `evaluate`: returns and lengths (E,) of the episodes, and the id of the environment."""

    environment: str
    returns: np.ndarray
    lengths: np.ndarray

    @property
    def scores(self) -> np.ndarray:
        """The normalised score of each episode, (E,), see `normalised_score`."""
        return normalised_score(self.environment, self.returns)


def evaluate(policy: DecisionPolicy, envs: VectorEnv | Env, episodes: int, *, seed: int | None = None) -> Evaluation:
    """Play a number of episodes with the model in evaluation mode.

    Each environment plays a fixed number of episodes: counting the first to end would favour short episodes. Returns,
    lengths and their order do not depend on the autoreset mode.

    Args:
        envs: one environment, or a vector with any autoreset mode. It is not closed, and may be left within an episode.
        seed: environment i is seeded with seed + i.
    """
    check_positive(episodes=episodes)
    training = policy.model.training
    policy.model.eval()
    try:
        return _evaluate(policy, envs, episodes, seed)
    finally:
        policy.model.train(training)


def _evaluate(policy: DecisionPolicy, envs: VectorEnv | Env, episodes: int, seed: int | None) -> Evaluation:
    policy.reset(envs)
    observations, _ = envs.reset(seed=seed)
    count = _num_envs(envs)
    quota = [len(range(row, episodes, count)) for row in range(count)]
    finished: list[list[tuple[float, int]]] = [[] for _ in quota]
    returns, lengths = np.zeros(count), np.zeros(count, dtype=int)
    while any(len(row) < number for row, number in zip(finished, quota, strict=True)):
        observations, rewards, terminations, truncations, _ = envs.step(policy.act(observations))
        rewards = np.asarray(rewards, dtype=float)
        played = policy.observe(rewards, terminations, truncations)
        returns += rewards
        lengths += played
        ended = np.atleast_1d(np.logical_or(terminations, truncations))
        for row in np.flatnonzero(ended):
            finished[row].append((float(returns[row]), int(lengths[row])))
        returns[ended], lengths[ended] = 0, 0
        if ended.any() and _autoreset_mode(envs) is AutoresetMode.DISABLED:
            options = {"reset_mask": ended} if isinstance(envs, VectorEnv) else None
            observations, _ = envs.reset(options=options)
    counted = [episode for row, number in zip(finished, quota, strict=True) for episode in row[:number]]
    name = "unknown" if envs.spec is None else envs.spec.id
    return Evaluation(name, *(np.array(part) for part in zip(*counted, strict=True)))


def normalised_score(environment: str, returns: np.ndarray) -> np.ndarray:
    """Return 100 · (return − random) / (expert − random), with D4RL's reference returns.

    The references were measured in older versions of the environments: compare only scores of the same version.

    >>> normalised_score("Hopper-v5", np.array([3234.3]))
    array([100.])
    """
    reference = environment_of(environment)
    return 100 * (returns - reference.random_return) / (reference.expert_return - reference.random_return)


class Trajectory(NamedTuple):
    """An episode as arguments of `FlowformerDecision.forward`, in float32; discrete actions in int64."""

    returns_to_go: Tensor  # (T,)
    states: Tensor  # (T, S)
    actions: Tensor  # (T, A), or (T,) choices, counted from 0


class Recording(NamedTuple):
    """Episodes for training, and the mean and deviation with which their states were standardised."""

    trajectories: list[Trajectory]
    state_mean: np.ndarray  # (S,)
    state_std: np.ndarray  # (S,)


def read_episodes(episodes: Iterable[Any] | str | os.PathLike[str], *, return_scale: float = RETURN_SCALE) -> Recording:
    """Read recorded episodes as trajectories for `FlowformerDecision.loss`.

    Args:
        episodes: a minari.MinariDataset or an iterable of its EpisodeData; or a D4RL file, as a path or opened with
            h5py. An unfinished episode at the end of a D4RL file is left out.
        return_scale: divisor of the returns, which are not discounted. Pass the same to `DecisionPolicy`.
    """
    _check_scale("return_scale", return_scale)
    recorded = _load_episodes(episodes)
    if not recorded:
        raise ValueError("got no episodes.")
    if not all(np.isfinite(part).all() for episode in recorded for part in episode[:3]):
        raise ValueError("the episodes hold NaN or infinite numbers. Leave out those that do.")
    # a Discrete action space of a minari dataset may start at another number than 0
    start = getattr(getattr(episodes, "action_space", None), "start", 0)
    all_states = np.concatenate([episode.states for episode in recorded]).astype(np.float64)
    mean, std = all_states.mean(0), all_states.std(0) + 1e-6
    trajectories = []
    for states, actions, rewards, _ in recorded:
        returns_to_go = np.cumsum(rewards[::-1], dtype=np.float64)[::-1] / return_scale
        parts = torch.tensor(returns_to_go.copy()).float(), torch.tensor((states - mean) / std).float()
        encoded = torch.tensor(actions - start).long() if actions.ndim == 1 else torch.tensor(actions).float()
        trajectories.append(Trajectory(*parts, encoded))
    return Recording(trajectories, mean, std)


def _load_episodes(episodes: Any) -> list[Episode]:
    """Load the episodes from any source that `read_episodes` accepts."""
    if isinstance(episodes, (str, os.PathLike)):
        path = Path(episodes).expanduser()
        if not path.is_file():
            raise FileNotFoundError(
                f"there is no file {path}; accepted: a file of D4RL such as hopper_medium-v2.hdf5. For a dataset of "
                "minari, pass minari.load_dataset(id)."
            )
        return read_d4rl(path)
    if hasattr(episodes, "filename"):  # an open h5py file; isinstance would need h5py, which is optional
        return read_d4rl(episodes)
    recorded = []
    for episode in episodes:
        if not hasattr(episode, "observations"):
            raise TypeError(
                f"episodes must be those of minari, got {type(episode).__name__}; accepted: a minari.MinariDataset, "
                "its EpisodeData, or a file of D4RL."
            )
        observations, actions = episode.observations, episode.actions
        _check_recorded("observations", observations)
        _check_recorded("actions", actions, discrete=True)
        steps, rewards = len(actions), np.asarray(episode.rewards)
        if not steps or rewards.shape != (steps,) or len(observations) < steps:
            raise ValueError(
                f"an episode needs at least one step, and as many rewards and observations as actions; got actions "
                f"{actions.shape}, rewards {rewards.shape} and observations {observations.shape}."
            )
        # minari stores one observation more than actions: the one after the last step
        recorded.append(Episode(observations[:steps], actions, rewards, False))
    return recorded


def _check_recorded(name: str, value: Any, discrete: bool = False) -> None:
    numbers = isinstance(value, np.ndarray) and value.ndim == 2
    choices = isinstance(value, np.ndarray) and value.ndim == 1 and np.issubdtype(value.dtype, np.integer)
    if not numbers and not (discrete and choices):
        accepted = "(steps, numbers), or (steps,) integers" if discrete else "(steps, numbers)"
        raise TypeError(
            f"{name} must be arrays of shape {accepted}, got {type(value).__name__} of shape "
            f"{getattr(value, 'shape', None)}. Flatten them, as gymnasium.spaces.flatten does."
        )


def _check_finite(name: str, value: Any) -> None:
    if not np.isfinite(value).all():
        raise ValueError(f"{name} must be finite, got {value}.")


def _check_scale(name: str, value: Any) -> None:
    if not (np.isfinite(value).all() and np.greater(value, 0).all()):
        raise ValueError(f"{name} must be positive and finite, got {value}.")


def _num_envs(envs: VectorEnv | Env) -> int:
    return envs.num_envs if isinstance(envs, VectorEnv) else 1


def _autoreset_mode(envs: VectorEnv | Env) -> AutoresetMode:
    if isinstance(envs, Env):
        return _single_autoreset_mode(envs)
    if not isinstance(envs, VectorEnv):
        raise TypeError(
            f"the policy acts in a gymnasium.Env or a gymnasium.vector.VectorEnv, got {type(envs).__name__}. Make one "
            "with gymnasium.make or gymnasium.make_vec."
        )
    mode = envs.metadata.get("autoreset_mode")
    if not isinstance(mode, AutoresetMode):
        raise ValueError(
            f"{envs} does not say how it resets: metadata['autoreset_mode'] is {mode!r}; accepted: an AutoresetMode."
        )
    return mode


def _single_autoreset_mode(env: Env) -> AutoresetMode:
    """The autoreset mode of a single environment: NEXT_STEP with the Autoreset wrapper, else DISABLED."""
    while isinstance(env, Wrapper):
        if isinstance(env, Autoreset):
            return AutoresetMode.NEXT_STEP
        env = env.env
    return AutoresetMode.DISABLED


def _check_observations(space: Space, dim: int) -> None:
    if not isinstance(space, Box) or space.shape != (dim,):
        raise ValueError(
            f"a model with state_dim={dim} needs observations in a Box of shape {(dim,)}, got {space}. "
            "gymnasium.wrappers.FlattenObservation makes other spaces a Box."
        )


def _check_actions(space: Space, dim: int, discrete: bool) -> None:
    if discrete:
        fits, wanted = isinstance(space, Discrete) and space.n == dim, f"discrete actions needs Discrete({dim})"
    else:
        fits, wanted = isinstance(space, Box) and space.shape == (dim,), f"needs actions in a Box of shape {(dim,)}"
    if not fits:
        hint = "" if discrete else " For discrete actions, build the model with discrete_actions=True."
        raise ValueError(f"a model with action_dim={dim} {wanted}, got {space}.{hint}")


def _check_length(spec: EnvSpec | None, max_timestep: int) -> None:
    if spec is None:
        return
    # make_vec stores a limit in spec.kwargs, and leaves the registered limit in spec.max_episode_steps
    longest = spec.kwargs.get("max_episode_steps", spec.max_episode_steps)
    if longest is not None and longest > max_timestep:
        raise ValueError(
            f"episodes of {spec.id} may have {longest} steps, but config.max_timestep is {max_timestep}. Make the "
            "environments with max_episode_steps, or train a model with a larger max_timestep."
        )
