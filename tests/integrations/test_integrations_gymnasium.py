"""gymnasium: a policy sees each episode as one run of the model over it, in every autoreset mode."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import Autoreset
from torch import nn

import flowformer.integrations.gymnasium as integration
from flowformer.integrations.gymnasium import DecisionPolicy, evaluate, normalised_score
from flowformer.models.decision import PRESETS, DecisionConfig, FlowformerDecision

LONGEST = 6
SMALL = DecisionConfig(
    state_dim=2, action_dim=1, num_layers=2, embed_dim=16, num_heads=2, mlp_dim=16, max_timestep=LONGEST, dropout=0.1
)
MEAN, STD = np.array([0.5, -0.5]), np.array([2.0, 0.5])
MODES = pytest.mark.parametrize("mode", list(AutoresetMode), ids=lambda mode: mode.name)
WINDOWS = pytest.mark.parametrize("window", [None, 3], ids=["recurrent", "window"])


class Game(gymnasium.Env):
    """Episodes of 1 to LONGEST steps, some cut off, whose states and rewards depend on all actions before."""

    observation_space = Box(-np.inf, np.inf, (2,), np.float64)
    action_space = Box(-0.1, 0.15, (1,), np.float32)

    def __init__(self, length: int | None = None) -> None:
        self.length = length

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = self.length or int(self.np_random.integers(1, LONGEST + 1))
        self.state = self.np_random.normal(size=2)
        return self.state, {}

    def step(self, action):
        self.left -= 1
        self.state = np.array([self.state[1] + action[0], np.sin(3 * self.state[0]) - action[0]])
        over, cut = self.left == 0, bool(self.state[0] > 0.5)
        return self.state, float(10 * action[0] + self.state[0]), over and not cut, over and cut, {}


class Choices(Game):
    """A game of three choices, which its space counts from 5."""

    action_space = Discrete(3, start=5)

    def step(self, action):
        assert self.action_space.contains(action), action
        return super().step([0.3 * (int(action) - 6)])


CHOOSING = replace(SMALL, action_dim=3, discrete_actions=True)


@pytest.fixture(autouse=True)
def _seed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # MuJoCo writes its log where it runs
    torch.manual_seed(0)


def randomized(config: DecisionConfig = SMALL) -> FlowformerDecision:
    """Fresh models have zero biases and unit norms, which would hide mistakes."""
    model = FlowformerDecision(config)
    for name, parameter in model.named_parameters():
        nn.init.normal_(parameter, mean=float(name.endswith("norm.weight")), std=0.5)
    # actions around 0, some inside the bounds of the game and some beyond either
    nn.init.zeros_(model.norm.bias)
    nn.init.zeros_(model.action_head.bias)
    nn.init.normal_(model.action_head.weight, std=0.1)
    return model.double().eval()


def policy_of(model: FlowformerDecision, window: int | None = None) -> DecisionPolicy:
    return DecisionPolicy(model, 20.0, return_scale=4.0, state_mean=MEAN, state_std=STD, window=window)


def games(mode: AutoresetMode, number: int = 3, **options) -> SyncVectorEnv:
    return SyncVectorEnv([lambda: Game(**options)] * number, autoreset_mode=mode)


@torch.no_grad()
def play_alone(model: FlowformerDecision, env: Game, window: int | None, **reset) -> tuple[float, int]:
    """Return and length of one episode in which each action is that of one run of the model over all steps so far."""
    state, _ = env.reset(**reset)
    steps, total = [], 0.0
    while True:
        steps.append([np.array([(20.0 - total) / 4.0]), (state - MEAN) / STD, np.zeros(1)])
        seen = steps if window is None else steps[-window:]
        returns, states, actions = (torch.tensor(np.stack(part))[None] for part in zip(*seen, strict=True))
        timesteps = torch.arange(len(steps))[None, -len(seen) :]
        action = model(returns[..., 0], states, actions, timesteps).action[0, -1].numpy()
        steps[-1][2] = action.clip(env.action_space.low, env.action_space.high)
        state, reward, terminated, truncated, _ = env.step(steps[-1][2].astype(np.float32))
        total += reward
        if terminated or truncated:
            return total, len(steps)


@WINDOWS
@MODES
def test_episodes_are_those_of_single_environments(mode, window):
    model = randomized()
    result = evaluate(policy_of(model, window), games(mode), episodes=10, seed=7)
    expected = []
    for row, number in enumerate((4, 3, 3)):
        env = Game()
        expected += [play_alone(model, env, window, **({"seed": 7 + row} if i == 0 else {})) for i in range(number)]
    returns, lengths = zip(*expected, strict=True)
    assert result.lengths.tolist() == list(lengths)
    assert LONGEST in lengths
    np.testing.assert_allclose(result.returns, returns, rtol=1e-6)


@WINDOWS
@MODES
def test_a_loop_by_hand(mode, window):
    """What the page says about a loop of one's own, for each row against a fresh policy alone in one environment."""
    model = randomized()
    envs, policy = games(mode), policy_of(model, window)
    policy.reset(envs)
    observations, _ = envs.reset(seed=3)
    actions = [[] for _ in range(3)]
    after_end = np.zeros(3, dtype=bool)
    while min(map(len, actions)) < 12:
        chosen = policy.act(observations)
        observations, rewards, terminations, truncations, _ = envs.step(chosen)
        played = policy.observe(rewards, terminations, truncations)
        assert played.tolist() == [not (mode is AutoresetMode.NEXT_STEP and each) for each in after_end]
        for row in np.flatnonzero(played):
            actions[row].append(chosen[row])
        after_end = terminations | truncations
        if mode is AutoresetMode.DISABLED and after_end.any():
            observations, _ = envs.reset(options={"reset_mask": after_end})
    for row in range(3):
        env, alone = games(AutoresetMode.SAME_STEP, 1), policy_of(model, window)
        alone.reset(env)
        observations, _ = env.reset(seed=3 + row)
        for action in actions[row]:
            chosen = alone.act(observations)
            np.testing.assert_allclose(chosen[0], action, rtol=1e-5)
            observations, *step, _ = env.step(chosen)
            alone.observe(*step)


def test_actions_lie_in_the_space_and_in_its_dtype():
    model, observations = randomized(), np.random.default_rng(0).normal(size=(50, 2))
    policy, envs = policy_of(model), games(AutoresetMode.SAME_STEP, 50)
    policy.reset(envs)
    found = policy.act(observations)
    states = torch.tensor((observations - MEAN) / STD)
    free, _ = model.act(torch.full((50,), 5.0, dtype=torch.float64), states, model.new_rollout(50))
    assert envs.action_space.contains(found)
    assert free.min() < -0.1
    assert free.max() > 0.15
    np.testing.assert_allclose(found, free.numpy().clip(-0.1, 0.15), rtol=1e-6)


@pytest.mark.parametrize(
    ("dtype", "space"),
    [(torch.bfloat16, Box(-0.1, 0.15, (1,))), (torch.float32, Box(-(2**31), 2**31 - 1, (1,), np.int32))],
    ids=["bfloat16", "int32"],
)
def test_bounds_that_the_dtype_of_the_model_rounds_up(dtype, space):
    """bfloat16 rounds 0.15 up, and float32 the largest int32, which would overflow to the smallest."""
    model, env = randomized(replace(SMALL, bounded_actions=False)).to(dtype), Game()
    nn.init.constant_(model.action_head.bias, 5e9)
    env.action_space = space
    policy = policy_of(model)
    policy.reset(env)
    action = policy.act(env.reset(seed=0)[0])
    assert space.contains(action)
    np.testing.assert_array_equal(action, space.high)


@MODES
def test_short_episodes_are_not_preferred(mode):
    envs = SyncVectorEnv([lambda: Game(1), lambda: Game(LONGEST)], autoreset_mode=mode)
    assert evaluate(policy_of(randomized()), envs, episodes=5).lengths.tolist() == [1, 1, 1, LONGEST, LONGEST]


def test_fewer_episodes_than_environments():
    assert len(evaluate(policy_of(randomized()), games(AutoresetMode.NEXT_STEP), episodes=2).returns) == 2


@pytest.mark.parametrize("training", [True, False])
def test_evaluation_has_no_dropout_and_leaves_the_mode(training):
    model = randomized()
    envs = games(AutoresetMode.SAME_STEP)
    expected = evaluate(policy_of(model), envs, episodes=3, seed=0).returns
    model.train(training)
    found = evaluate(policy_of(model), envs, episodes=3, seed=0).returns
    assert model.training is training
    np.testing.assert_array_equal(found, expected)
    envs.single_action_space = Discrete(2)
    with pytest.raises(ValueError, match="Box"):
        evaluate(policy_of(model), envs, episodes=1)
    assert model.training is training


def test_processes_of_their_own():
    model = randomized()
    envs = AsyncVectorEnv([Game] * 2, autoreset_mode=AutoresetMode.DISABLED)
    try:
        found = evaluate(policy_of(model), envs, episodes=5, seed=1)
    finally:
        envs.close()
    expected = evaluate(policy_of(model), games(AutoresetMode.NEXT_STEP, 2), episodes=5, seed=1)
    np.testing.assert_array_equal(found.lengths, expected.lengths)
    np.testing.assert_array_equal(found.returns, expected.returns)


@WINDOWS
@pytest.mark.parametrize("env", [Game, lambda: Autoreset(Game())], ids=["reset by the caller", "Autoreset"])
def test_a_single_environment_is_a_vector_of_one(env, window):
    policy = policy_of(randomized(), window)
    expected = evaluate(policy, games(AutoresetMode.SAME_STEP, 1), episodes=6, seed=3)
    found = evaluate(policy, env(), episodes=6, seed=3)
    np.testing.assert_array_equal(found.lengths, expected.lengths)
    np.testing.assert_array_equal(found.returns, expected.returns)
    assert len(set(expected.lengths)) > 1


def test_a_single_environment_has_no_axis_of_environments():
    env, policy = Game(length=2), policy_of(randomized())
    policy.reset(env)
    observation, _ = env.reset(seed=0)
    for ends in (False, True):
        action = policy.act(observation)
        assert env.action_space.contains(action)
        observation, reward, terminated, truncated, _ = env.step(action)
        assert policy.observe(reward, terminated, truncated) == np.True_
        assert (terminated or truncated) == ends


@WINDOWS
@MODES
def test_discrete_actions(mode, window):
    model = FlowformerDecision(CHOOSING).double().eval()
    policy = policy_of(model, window)
    result = evaluate(policy, SyncVectorEnv([Choices] * 2, autoreset_mode=mode), episodes=6, seed=7)
    alone = [evaluate(policy, Choices(), episodes=3, seed=7 + row) for row in range(2)]
    np.testing.assert_array_equal(result.returns, np.concatenate([each.returns for each in alone]))
    # what the policy does in the first step is what the model says of it
    env = Choices()
    policy.reset(env)
    state, _ = env.reset(seed=0)
    first = torch.tensor([[5.0]]).double(), torch.tensor((state - MEAN) / STD)[None, None], torch.zeros(1, 1).long()
    action = policy.act(state)
    assert env.action_space.contains(action)
    assert action == 5 + model(*first).action[0, 0].argmax()


@pytest.mark.parametrize(
    ("preset", "name"), [("hopper", "Hopper"), ("halfcheetah", "HalfCheetah"), ("walker2d", "Walker2d")]
)
def test_mujoco_in_every_mode(preset, name):
    model = randomized(replace(PRESETS[preset], num_layers=1, embed_dim=16, num_heads=2, mlp_dim=16, max_timestep=40))
    results = []
    for mode in AutoresetMode:
        vector_kwargs = {"autoreset_mode": mode}
        envs = gymnasium.make_vec(f"{name}-v5", num_envs=2, max_episode_steps=40, vector_kwargs=vector_kwargs)
        results.append(evaluate(DecisionPolicy(model, 3600.0), envs, episodes=4, seed=0))
        envs.close()
    assert results[0].environment == f"{name}-v5"
    assert results[0].lengths.max() == 40 or preset != "halfcheetah"
    for result in results[1:]:
        np.testing.assert_array_equal(result.lengths, results[0].lengths)
        np.testing.assert_allclose(result.returns, results[0].returns, rtol=1e-6)
    np.testing.assert_array_equal(results[0].scores, normalised_score(preset, results[0].returns))


@pytest.mark.parametrize(
    ("environment", "random", "expert"),
    [
        ("Hopper-v5", -20.272305, 3234.3),
        ("HalfCheetah-v5", -280.178953, 12135.0),
        ("mujoco/Walker2d-v4", 1.629008, 4592.3),
    ],
)
def test_normalised_scores(environment, random, expert):
    scores = normalised_score(environment, np.array([random, expert, (random + expert) / 2]))
    np.testing.assert_allclose(scores, [0, 100, 50], atol=1e-12)


def test_no_score_without_reference_returns():
    with pytest.raises(ValueError, match=r"reference returns for 'Ant-v5'; accepted: any version of HalfCheetah, Hop"):
        normalised_score("Ant-v5", np.zeros(1))
    result = evaluate(policy_of(randomized()), games(AutoresetMode.NEXT_STEP), episodes=1)
    with pytest.raises(ValueError, match="reference returns for 'unknown'"):
        _ = result.scores


def test_errors_of_environments():
    policy = policy_of(randomized())
    with pytest.raises(RuntimeError, match=r"Call reset\(envs\) first"):
        policy.act(np.zeros((3, 2)))
    with pytest.raises(RuntimeError, match=r"Call reset\(envs\) first"):
        policy.observe(np.zeros(3), np.zeros(3, dtype=bool), np.zeros(3, dtype=bool))
    with pytest.raises(TypeError, match=r"VectorEnv, got str.*gymnasium.make or gymnasium.make_vec"):
        policy.reset("Hopper-v5")
    envs = games(AutoresetMode.NEXT_STEP)
    with pytest.raises(ValueError, match=r"state_dim=3 needs observations in a Box of shape \(3,\), got Box"):
        DecisionPolicy(randomized(replace(SMALL, state_dim=3)), 1.0).reset(envs)
    with pytest.raises(ValueError, match=r"action_dim=2 needs actions in a Box of shape \(2,\), got Box"):
        DecisionPolicy(randomized(replace(SMALL, action_dim=2)), 1.0).reset(envs)
    with pytest.raises(ValueError, match=r"action_dim=1 needs .* got Discrete\(3, start=5\)\. .*discrete_actions=True"):
        policy.reset(Choices())
    for env, dim in ((Game(), 3), (Choices(), 2)):
        with pytest.raises(ValueError, match=rf"action_dim={dim} discrete actions needs Discrete\({dim}\), got"):
            DecisionPolicy(randomized(replace(CHOOSING, action_dim=dim)), 1.0).reset(env)
    policy.reset(envs)
    with pytest.raises(ValueError, match=r"an observation must have shape \(2,\), got \(1,\)"):
        policy.act(np.zeros((3, 1)))
    envs.metadata = {}
    with pytest.raises(ValueError, match="does not say how it resets"):
        policy.reset(envs)
    long = DecisionPolicy(randomized(replace(PRESETS["hopper"], num_layers=1, max_timestep=999)), 1.0)
    with pytest.raises(ValueError, match=r"Hopper-v5 may have 1000 steps, but config.max_timestep is 999"):
        long.reset(gymnasium.make_vec("Hopper-v5", num_envs=1))
    with pytest.raises(ValueError, match="episodes must be a positive whole number, got 0"):
        evaluate(policy, games(AutoresetMode.NEXT_STEP), episodes=0)
    with pytest.raises(ValueError, match=r"state_std must have shape \(2,\), got \(3,\)"):
        DecisionPolicy(randomized(), 1.0, state_std=np.ones(3))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target_return": np.nan}, "target_return must be finite, got nan"),
        ({"return_scale": 0}, "return_scale must be positive and finite, got 0"),
        ({"return_scale": -1.0}, "return_scale must be positive"),
        ({"state_std": np.array([1.0, 0.0])}, r"state_std must be positive and finite, got \[1. 0.\]"),
        ({"state_mean": np.array([np.inf, 0.0])}, "state_mean must be finite"),
    ],
)
def test_a_policy_of_numbers_that_are_none_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        DecisionPolicy(randomized(), **{"target_return": 1.0} | options)


@pytest.mark.parametrize(("part", "name"), [(0, "observations"), (1, "rewards")])
def test_an_environment_that_breaks_is_noticed(part, name):
    """NaN would become that of all actions and returns after it."""

    class Broken(Game):
        def step(self, action):
            result = list(super().step(action))
            result[part] = result[part] * np.nan
            return tuple(result)

    with pytest.raises(ValueError, match=f"{name} must be finite, got.*nan"):
        evaluate(policy_of(randomized()), Broken(length=2), 1)


def test_an_outcome_of_another_shape_is_refused():
    """numpy would repeat a column of rewards for every environment."""
    policy = policy_of(randomized())
    policy.reset(Game())
    policy.act(np.zeros(2))
    assert policy.observe(1.0, False, False) == policy.observe(np.ones(1), np.zeros(1, bool), False)
    for outcome, name in (((np.ones((1, 1)), False, False), "rewards"), ((1.0, False, np.zeros(2)), "truncations")):
        with pytest.raises(ValueError, match=rf"{name} of 1 environments must have shape \(1,\)"):
            policy.observe(*outcome)


def test_whole_numbers_are_rounded_to():
    model = randomized()
    nn.init.normal_(model.action_head.weight, std=2.0)

    def first_action(dtype, state):
        env = Game()
        env.action_space = Box(-9, 9, (1,), dtype)
        policy = policy_of(model)
        policy.reset(env)
        return policy.act(state)

    states = np.random.default_rng(0).normal(size=(9, 2))
    whole, exact = (np.array([first_action(dtype, state) for state in states]) for dtype in (np.int32, np.float32))
    assert np.array_equal(whole, np.rint(exact))
    assert not np.array_equal(whole, np.trunc(exact))


def test_broken_gymnasium_gives_one_sentence(tmp_path, monkeypatch):
    (tmp_path / "gymnasium.py").write_text("raise RuntimeError('broken')")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "gymnasium"]:
        monkeypatch.delitem(sys.modules, name)
    spec = importlib.util.spec_from_file_location("flowformer.integrations.another", integration.__file__)
    with pytest.raises(ImportError, match=r"pip install 'flowformer\[rl\]'"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
