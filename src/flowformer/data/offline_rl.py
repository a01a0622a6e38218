"""Offline reinforcement learning: windows of trajectories from D4RL's HDF5 files or from Minari.

States are standardised with the statistics of the data set, and returns are divided by 1000. The test part is empty,
since policies are evaluated in the environment; `Windows` has the statistics that this needs.

Shapes: T steps of a window, S dimension of a state, A dimension of an action, M steps of all episodes.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from .._utils import check_positive, optional_import
from . import store
from .environments import ENVIRONMENTS
from .splits import Columns, DataInfo, Item, Splits
from .store import DataSet

RETURN_SCALE = 1000.0  # divisor of the returns, as in the paper


class Episode(NamedTuple):
    """One trajectory of T steps: states (T, S), actions (T, A), rewards (T,).

    `terminated` is False if the episode was truncated by a time limit.
    """

    states: np.ndarray
    actions: np.ndarray
    rewards: np.ndarray
    terminated: bool


class Windows(Dataset[Item]):
    """Windows of consecutive steps of an episode, one starting at each step.

    A window that the end of the episode cuts short is padded at the end with zeros.

    Args:
        episodes: the trajectories.
        window: T, number of steps of a window.

    Attributes:
        state_mean, state_std: (S,), statistics with which the states were standardised.
        returns: return of each episode.
        states, actions, rewards, timesteps: (M, …), the steps of all episodes one after another.
        returns_to_go: (M, 1), sum of the rewards from each step to the end of its episode, divided by `RETURN_SCALE`.
        steps: those of the tensors above that windows are cut from, by key.
        ends: (M,), index after the last step of each step's episode.
        terminated: (M,), True for the last step of an episode that was not truncated by a time limit.
    """

    def __init__(self, episodes: list[Episode], window: int) -> None:
        check_positive(window=window)
        _check_episodes(episodes)
        self.window = window
        lengths = torch.tensor([len(episode.rewards) for episode in episodes])
        self.ends = lengths.cumsum(0).repeat_interleave(lengths)
        self.timesteps = torch.cat([torch.arange(length) for length in lengths.tolist()])
        states, self.actions = (
            torch.from_numpy(np.concatenate(part)).float()
            for part in zip(*((episode.states, episode.actions) for episode in episodes), strict=True)
        )
        self.state_mean, self.state_std = states.mean(0), states.std(0, correction=0) + 1e-6
        self.states = (states - self.state_mean) / self.state_std
        self.rewards = torch.from_numpy(np.concatenate([episode.rewards for episode in episodes])).float()
        self.terminated = torch.zeros(len(self.ends), dtype=torch.bool)
        self.terminated[lengths.cumsum(0) - 1] = torch.tensor([bool(episode.terminated) for episode in episodes])
        to_go = [np.cumsum(episode.rewards[::-1], dtype=np.float64)[::-1] for episode in episodes]
        self.returns = torch.tensor([rewards[0] for rewards in to_go])
        self.returns_to_go = torch.from_numpy(np.concatenate(to_go) / RETURN_SCALE).float()[:, None]
        self.steps = {key: getattr(self, key) for key in ("returns_to_go", "states", "actions", "timesteps")}

    def __len__(self) -> int:
        return len(self.timesteps)

    def steps_of_best(self, share: float) -> Tensor:
        """Return the indices of all steps of the episodes with the highest returns.

        Args:
            share: fraction of the episodes to select; the count is rounded and at least 1.
        """
        count = max(1, round(share * len(self.returns)))
        is_best = torch.zeros(len(self.returns), dtype=torch.bool)
        is_best[self.returns.topk(count).indices] = True
        _, episodes = torch.unique_consecutive(self.ends, return_inverse=True)  # (M,), index of each step's episode
        return is_best[episodes].nonzero()[:, 0]

    def __getitem__(self, index: int) -> Item:
        steps = slice(index, min(index + self.window, int(self.ends[index])))
        length = steps.stop - steps.start

        def padded(values: Tensor) -> Tensor:
            return torch.cat((values[steps], values.new_zeros(self.window - length, *values.shape[1:])))

        return {key: padded(values) for key, values in self.steps.items()} | {
            "mask": torch.arange(self.window) < length
        }


def _check_episodes(episodes: list[Episode]) -> None:
    if not episodes:
        raise ValueError("got no episodes; accepted: at least one.")
    for number, episode in enumerate(episodes):
        if not len(episode.rewards):
            raise ValueError(f"episode {number} has no steps. Leave it out.")
        sizes = [len(part) for part in (episode.states, episode.actions, episode.rewards)]
        if len(set(sizes)) > 1:
            raise ValueError(
                f"episode {number} has {sizes[0]} states, {sizes[1]} actions and {sizes[2]} rewards; accepted: as many "
                "of each, so without the state after the last action."
            )
        for part in ("states", "actions", "rewards"):
            if not np.isfinite(getattr(episode, part)).all():
                raise ValueError(f"the {part} of episode {number} hold NaN or infinite numbers. Leave it out.")


def d4rl(name: str, folder: Path, *, partial: bool = False, window: int = 20, version: str = "v2") -> Splits:
    """Read a D4RL data set such as "hopper-medium-replay" from folder/d4rl/hopper_medium_replay-v2.hdf5.

    Args:
        window: T, number of steps of a window.
        version: version in the file's name; the paper's data are "v2". Files of versions that begin with "v5" were
            recorded in gymnasium's v5 environments. All others, D4RL's included, have the physics of gymnasium's v4;
            v5 changed the friction of Walker2d's feet.
    """
    environment = name.partition("-")[0]
    paths = list(d4rl_record(name).require(folder, version=version).values())
    episodes = [episode for path in paths for episode in read_d4rl(path)]
    if version == "v2":
        counts = {"steps": sum(len(episode.rewards) for episode in episodes), "episodes": len(episodes)}
        published = d4rl_record(name).sizes
        differs = store.notes(
            *(store.complete(paths[0], what, counts[what], published[what], partial=partial) for what in counts)
        )
    else:
        differs = f"version {version} of the files, not D4RL's v2"
    environment_id = f"{ENVIRONMENTS[environment].id}-{'v5' if version.startswith('v5') else 'v4'}"
    return _splits(f"d4rl/{name}", episodes, store.checksum(paths), differs, window, environment_id)


def minari(name: str, folder: Path, *, partial: bool = False, window: int = 20) -> Splits:
    """Read a Minari data set such as "mujoco/hopper/medium-v0" from folder/minari/<name>.

    Args:
        partial: has no effect, since the sizes of Minari's data sets are not checked.
        window: T, number of steps of a window.
    """
    files = minari_record(name).require(folder)["data"]
    home = files.parent
    try:
        data = optional_import("minari", "rl").MinariDataset(files)
        _check_spaces(name, data.observation_space, data.action_space)
        episodes = [
            Episode(
                np.asarray(episode.observations)[: len(episode)],
                np.asarray(episode.actions),
                episode.rewards,
                episode.terminations[-1],
            )
            for episode in data.iterate_episodes()
        ]
    except (OSError, KeyError, ValueError) as error:
        raise store.DamagedDataError(f"{home} is damaged: {error}") from error
    paths = sorted(path for path in home.rglob("*") if path.is_file())
    environment_id = "" if data.spec.env_spec is None else data.spec.env_spec.id
    return _splits(f"minari/{name}", episodes, store.checksum(paths), "Minari, not D4RL's v2", window, environment_id)


def _check_spaces(name: str, *spaces: Any) -> None:
    for space in spaces:
        if type(space).__name__ != "Box" or len(space.shape) != 1:
            raise TypeError(
                f"minari/{name} has {space}; accepted: observations and actions in a Box of one axis. For discrete "
                "actions, train on flowformer.integrations.gymnasium.read_episodes, as docs/gymnasium.md does."
            )


def _splits(name: str, episodes: list[Episode], checksum: str, differs: str, window: int, environment: str) -> Splits:
    check_positive(window=window)
    try:
        train = Windows(episodes, window)
    except ValueError as error:
        raise store.DamagedDataError(f"{name} is damaged: {error}") from error
    info = DataInfo(
        name,
        checksum,
        num_features=train.states.shape[1],
        num_actions=train.actions.shape[1],
        max_length=window,
        environment=environment,
        differs=differs,
    )
    return Splits(train, None, Columns(mask=torch.empty(0, window, dtype=torch.bool)), info)


def read_d4rl(source: Any) -> list[Episode]:
    """Read the complete episodes of a D4RL file; steps after the end of the last one are left out.

    Args:
        source: the path of the file, or the file opened with h5py.
    """
    keys = ("observations", "actions", "rewards", "terminals", "timeouts")
    path = source if isinstance(source, Path) else source.filename
    try:
        with optional_import("h5py", "rl").File(source) if isinstance(source, Path) else nullcontext(source) as file:
            absent = [key for key in keys if key not in file]
            if absent:
                raise ValueError(f"it has no {', '.join(absent)}, but {', '.join(list(file)[:5]) or 'nothing'}.")
            states, actions, rewards, terminals, timeouts = (file[key][:] for key in keys)
    except (OSError, TypeError, ValueError) as error:
        raise store.DamagedDataError(f"{path} is damaged or not of D4RL: {error}") from error
    sizes = {len(values) for values in (states, actions, rewards, terminals, timeouts)}
    ends = np.union1d(np.flatnonzero(terminals), np.flatnonzero(timeouts)) + 1
    if len(sizes) != 1 or not len(ends):
        raise store.DamagedDataError(
            f"{path} is damaged: {', '.join(keys)} must have as many steps each and an episode must end, got "
            f"{sorted(sizes)} steps and {len(ends)} ends."
        )
    return [
        Episode(states[start:end], actions[start:end], rewards[start:end], terminals[end - 1])
        for start, end in zip([0, *ends[:-1]], ends, strict=True)
    ]


def d4rl_record(name: str) -> DataSet:
    """Return the record of a D4RL data set such as "hopper-medium-replay"."""
    environment, _, quality = name.partition("-")
    steps, episodes = ENVIRONMENTS[environment].sizes.get(quality, (None, None))
    file = f"{environment}_{quality.replace('-', '_')}-v2.hdf5"
    return DataSet(
        f"d4rl/{name}",
        store.Source(
            f"D4RL {name}",
            f"Download http://rail.eecs.berkeley.edu/datasets/offline_rl/gym_mujoco_v2/{file} and put it into "
            "{folder}/d4rl.",
            "60 to 800 MB",
        ),
        files=partial(_d4rl_files, environment, quality),
        reader=partial(d4rl, name),
        sizes={"steps": steps, "episodes": episodes},
    )


def _d4rl_files(environment: str, quality: str, folder: Path, version: str = "v2") -> dict[str, Path]:
    """Return the path of the file; if "medium-expert" has no file, those of "medium" and "expert", if both exist."""

    def path(part: str) -> Path:
        return folder / "d4rl" / f"{environment}_{part.replace('-', '_')}-{version}.hdf5"

    parts = {part: path(part) for part in ("medium", "expert")}
    if quality == "medium-expert" and not path(quality).exists() and all(part.exists() for part in parts.values()):
        return parts
    return {quality: path(quality)}


def minari_record(name: str) -> DataSet:
    """Return the record of a Minari data set such as "mujoco/hopper/medium-v0"."""
    return DataSet(
        f"minari/{name}",
        store.Source(
            f"Minari {name}", f"Run MINARI_DATASETS_PATH={{folder}}/minari minari download {name}.", "100 MB to 1 GB"
        ),
        files=lambda folder: {"data": folder / "minari" / name / "data"},
        reader=partial(minari, name),
    )


RECORDS = tuple(
    d4rl_record(f"{name}-{quality}") for name, environment in ENVIRONMENTS.items() for quality in environment.sizes
)
