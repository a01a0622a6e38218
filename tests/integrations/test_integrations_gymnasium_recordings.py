"""Recorded episodes of minari and D4RL: read as trajectories, trained on, and played."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import gymnasium
import h5py
import minari
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict
from helpers import ROOT
from minari.data_collector import EpisodeBuffer
from torch.nn.utils.rnn import pad_sequence

from flowformer.integrations.gymnasium import DecisionPolicy, evaluate, read_episodes
from flowformer.models.decision import PRESETS, DecisionConfig, FlowformerDecision


@pytest.fixture(autouse=True)
def _seed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # MuJoCo writes its log where it runs
    torch.manual_seed(0)


def recorded_cart_pole(folder: Path, monkeypatch, steps: int, episodes: int) -> minari.MinariDataset:
    """A minari dataset of every other episode played at random, and the others by pushing where the pole falls to."""
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(folder))
    env, random = gymnasium.make("CartPole-v1", max_episode_steps=steps), np.random.default_rng(0)
    buffers = []
    for i in range(episodes):
        observations, actions, results = [env.reset(seed=i)[0]], [], []
        while not results or not any(results[-1][1:]):
            falls = int(observations[-1][2] + observations[-1][3] > 0)
            actions.append(falls if i % 2 else int(random.integers(2)))
            observation, *result, _ = env.step(actions[-1])
            observations.append(observation)
            results.append(result)
        rewards, terminations, truncations = (list(part) for part in zip(*results, strict=True))
        buffers.append(EpisodeBuffer(i, i, None, observations, actions, rewards, terminations, truncations, {}))
    return minari.create_dataset_from_buffers("cartpole/mixed-v0", buffers, env=env.spec)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_cart_pole_trains(tmp_path, monkeypatch):
    """From minari's file to a policy that balances as long as it is asked to."""
    steps = 60
    data = read_episodes(recorded_cart_pole(tmp_path, monkeypatch, steps, 30), return_scale=steps)
    recorded = [trajectory.returns_to_go[0].item() * steps for trajectory in data.trajectories]
    assert np.mean(recorded[::2]) < 30 < np.mean(recorded[1::2])
    assert all(trajectory.actions.dtype == torch.long for trajectory in data.trajectories)
    batch = [pad_sequence(part, batch_first=True) for part in zip(*data.trajectories, strict=True)]
    lengths = torch.tensor([len(trajectory.actions) for trajectory in data.trajectories])
    mask = torch.arange(batch[0].shape[1]) < lengths[:, None]
    sizes = {"num_layers": 1, "embed_dim": 32, "num_heads": 2, "mlp_dim": 64, "max_timestep": steps, "dropout": 0.0}
    model = FlowformerDecision(DecisionConfig(4, 2, discrete_actions=True, **sizes))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(40):
        optimizer.zero_grad()
        loss = model.loss(*batch, mask=mask)
        loss.backward()
        optimizer.step()
    envs = gymnasium.make_vec("CartPole-v1", num_envs=4, max_episode_steps=steps)
    scale = {"return_scale": steps, "state_mean": data.state_mean, "state_std": data.state_std}
    low, high = (
        evaluate(DecisionPolicy(model, asked, **scale), envs, 8, seed=0).returns.mean() for asked in (8, steps)
    )
    assert high > 50
    assert low < high - 15


def d4rl_file(path: Path) -> list[EpisodeBuffer]:
    """Episodes of Hopper at random, and two steps of one that does not end, as D4RL writes them."""
    env = gymnasium.make("Hopper-v5", max_episode_steps=10)
    env.action_space.seed(0)
    rows, lengths = [], []
    for i in range(4):
        state, length, over = env.reset(seed=i)[0], 0, False
        while not over and (i < 3 or length < 2):
            action = env.action_space.sample()
            following, reward, terminated, truncated, _ = env.step(action)
            rows.append((state, action, reward, terminated, truncated))
            state, length, over = following, length + 1, terminated or truncated
        lengths.append(length)
    keys = ("observations", "actions", "rewards", "terminals", "timeouts")
    with h5py.File(path, "w") as file:
        for key, column in zip(keys, zip(*rows, strict=True), strict=True):
            file[key] = np.array(column)
    return lengths[:3]


def test_episodes_of_d4rl(tmp_path):
    path = tmp_path / "hopper_medium-v2.hdf5"
    lengths = d4rl_file(path)
    data = read_episodes(path)
    assert [len(trajectory.actions) for trajectory in data.trajectories] == lengths
    with h5py.File(path) as file:
        opened, raw = read_episodes(file), {key: file[key][:] for key in file}
        assert file.id.valid, "what the caller opened stays open"
    start = 0
    for trajectory, again, length in zip(data.trajectories, opened.trajectories, lengths, strict=True):
        part = slice(start, start + length)
        states = trajectory.states.numpy() * data.state_std + data.state_mean
        np.testing.assert_allclose(states, raw["observations"][part], rtol=1e-4, atol=1e-4)
        np.testing.assert_array_equal(trajectory.actions, raw["actions"][part])
        np.testing.assert_allclose(trajectory.returns_to_go[0], raw["rewards"][part].sum() / 1000, rtol=1e-5)
        assert all(torch.equal(one, other) for one, other in zip(trajectory, again, strict=True))
        start += length
    for one in (str(path), path):
        assert len(read_episodes(one).trajectories) == 3


def test_errors_of_d4rl_files(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"no file .*hoper\.hdf5; accepted: a file of D4RL.*minari.load_dataset"
    ):
        read_episodes(tmp_path / "hoper.hdf5")
    with pytest.raises(FileNotFoundError, match=r"pass minari\.load_dataset\(id\)"):
        read_episodes("mujoco/hopper/medium-v0")
    with h5py.File(tmp_path / "main_data.hdf5", "w") as file:
        file["episode_0/actions"] = np.zeros((3, 2))
    with pytest.raises(ValueError, match=r"main_data.hdf5 is .*not of D4RL: it has no observations.*, but episode_0"):
        read_episodes(tmp_path / "main_data.hdf5")
    with pytest.raises(TypeError, match=r"those of minari, got int; accepted: a minari.MinariDataset"):
        read_episodes([3])


def recorded_hopper(folder: Path, monkeypatch, name: str = "mujoco/hopper/medium-v0") -> list[EpisodeBuffer]:
    """Three episodes of random actions, written as a minari dataset into a folder."""
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(folder))
    env = gymnasium.make("Hopper-v5")
    env.action_space.seed(0)
    buffers = []
    for i in range(3):
        observations, actions, steps = [env.reset(seed=i)[0]], [], []
        while not steps or not any(steps[-1][1:]):
            actions.append(env.action_space.sample())
            observation, *step, _ = env.step(actions[-1])
            observations.append(observation)
            steps.append(step)
        rewards, terminations, truncations = (list(part) for part in zip(*steps, strict=True))
        buffers.append(EpisodeBuffer(i, i, None, observations, actions, rewards, terminations, truncations, {}))
    minari.create_dataset_from_buffers(name, buffers, env="Hopper-v5")
    return buffers


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_episodes_of_minari(tmp_path, monkeypatch):
    buffers = recorded_hopper(tmp_path, monkeypatch)
    dataset = minari.load_dataset("mujoco/hopper/medium-v0")
    data = read_episodes(dataset, return_scale=10.0)
    states = torch.cat([trajectory.states for trajectory in data.trajectories])
    torch.testing.assert_close(states.mean(0), torch.zeros(11), atol=1e-4, rtol=0)
    torch.testing.assert_close(states.std(0, correction=0), torch.ones(11), atol=1e-3, rtol=0)
    model = FlowformerDecision(replace(PRESETS["hopper"], num_layers=1, embed_dim=16, num_heads=2, mlp_dim=16)).eval()
    policy = DecisionPolicy(model, 0.0, return_scale=10.0, state_mean=data.state_mean, state_std=data.state_std)
    for buffer, trajectory in zip(buffers, data.trajectories, strict=True):
        steps = len(buffer.actions)
        assert len(buffer.observations) == steps + 1
        returns = [sum(buffer.rewards[i:]) / 10 for i in range(steps)]
        torch.testing.assert_close(trajectory.returns_to_go, torch.tensor(returns, dtype=torch.float32))
        torch.testing.assert_close(trajectory.actions, torch.tensor(np.stack(buffer.actions)))
        raw = trajectory.states.double() * torch.tensor(data.state_std) + torch.tensor(data.state_mean)
        torch.testing.assert_close(raw, torch.tensor(np.stack(buffer.observations[:-1])), rtol=1e-4, atol=1e-4)
        # a policy sees what training saw: asked for the return of the episode, it answers as the model does
        policy.target_return = returns[0] * 10
        policy.reset(gymnasium.make_vec("Hopper-v5", num_envs=1))
        found = policy.act(np.stack(buffer.observations[:1]))
        expected = model(*(part[None] for part in trajectory)).action[:, 0].detach()
        np.testing.assert_allclose(found, expected.numpy(), rtol=1e-4, atol=1e-5)
    assert len(read_episodes(dataset.filter_episodes(lambda episode: episode.id == 1)).trajectories) == 1


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_examples_of_the_page(tmp_path, monkeypatch, capsys):
    recorded_hopper(tmp_path, monkeypatch)
    examples = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "gymnasium.md").read_text(), re.DOTALL)
    assert len(examples) == 4
    d4rl_file(tmp_path / "hopper_medium-v2.hdf5")
    for example in examples:
        assert len(example.splitlines()) <= 20
        exec(compile(example, "docs/gymnasium.md", "exec"), {})
    assert re.search(r"Hopper-v5: return -?\d+, normalised -?\d+\.\d", capsys.readouterr().out)


def test_errors_of_recordings():
    with pytest.raises(ValueError, match="got no episodes"):
        read_episodes([])
    with pytest.raises(ValueError, match="return_scale must be positive and finite, got 0"):
        read_episodes([], return_scale=0)
    space = Dict({"goal": Box(-1, 1, (2,))})
    flags = np.zeros(4, dtype=bool)
    goals = minari.EpisodeData(0, space.sample(), np.zeros((4, 1)), np.zeros(4), flags, flags, {})
    with pytest.raises(TypeError, match=r"observations must be arrays.*got dict.*gymnasium.spaces.flatten"):
        read_episodes([goals])
    numbers = minari.EpisodeData(0, np.zeros((5, 2)), np.zeros(4), np.zeros(4), flags, flags, {})
    with pytest.raises(TypeError, match=r"actions must be arrays .*\(steps,\) integers, got ndarray of shape \(4,\)"):
        read_episodes([numbers])
    whole = {"observations": np.zeros((5, 2)), "actions": np.zeros((4, 1)), "rewards": np.zeros(4)}
    for name, value, message in (
        ("observations", np.zeros((3, 2)), r"as many rewards and observations as actions; got actions \(4, 1\)"),
        ("rewards", np.zeros((4, 1)), r"rewards \(4, 1\)"),
        ("actions", np.zeros((0, 1)), "at least one step"),
        ("observations", np.full((5, 2), np.nan), "NaN or infinite"),
        ("rewards", np.full(4, np.inf), "NaN or infinite"),
    ):
        parts = whole | {name: value}
        with pytest.raises(ValueError, match=message):
            read_episodes([minari.EpisodeData(0, **parts, terminations=flags, truncations=flags, infos={})])
