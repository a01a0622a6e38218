"""Windows of trajectories, from D4RL's files and from Minari."""

from __future__ import annotations

import h5py
import numpy as np
import pytest
import torch

from flowformer import data
from flowformer.data.environments import ENVIRONMENTS
from flowformer.data.offline_rl import Episode, Windows

# steps of three episodes and of one that never ends
LENGTHS, REST = (5, 1, 3), 2
STEPS = sum(LENGTHS)


def arrays(timeouts=(1,)):
    """Rewards 1, 2, 3, …; episodes end by a terminal, those in `timeouts` by a timeout."""
    count = STEPS + REST
    noise = np.random.default_rng(0)
    terminals, limits = np.zeros(count, bool), np.zeros(count, bool)
    for episode, end in enumerate(np.cumsum(LENGTHS)):
        (limits if episode in timeouts else terminals)[end - 1] = True
    return {
        "observations": noise.normal(3, 2, (count, 4)).astype(np.float32),
        "actions": noise.uniform(-1, 1, (count, 2)).astype(np.float32),
        "rewards": np.arange(1, count + 1, dtype=np.float32),
        "terminals": terminals,
        "timeouts": limits,
    }


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        for key, value in content.items():
            file[key] = value


@pytest.fixture
def folder(tmp_path):
    write(tmp_path / "d4rl" / "hopper_medium_replay-v2.hdf5", arrays())
    return tmp_path


class TestD4RL:
    def test_a_window_from_every_step_that_is_in_an_episode(self, folder):
        train, valid, test, info = data.load("d4rl/hopper-medium-replay", folder, window=3, partial=True)
        assert (len(train), valid, len(test)) == (STEPS, None, 0)
        assert [int(case["mask"].sum()) for case in train] == [3, 3, 3, 2, 1, 1, 3, 2, 1]
        assert [case["timesteps"].tolist() for case in train][2:7] == [
            [2, 3, 4],
            [3, 4, 0],
            [4, 0, 0],
            [0] * 3,
            [0, 1, 2],
        ]
        assert (info.num_features, info.num_actions, info.max_length) == (4, 2, 3)

    @pytest.mark.parametrize("window", [0, -1, 2.5])
    def test_a_window_without_steps_is_refused(self, folder, window):
        with pytest.raises(ValueError, match=f"window must be a positive whole number, got {window}"):
            data.load("d4rl/hopper-medium-replay", folder, window=window, partial=True)

    def test_values(self, folder):
        train = data.load("d4rl/hopper-medium-replay", folder, window=3, partial=True).train
        raw = {key: torch.from_numpy(value[:STEPS]) for key, value in arrays().items()}
        states = (raw["observations"] - raw["observations"].mean(0)) / (raw["observations"].std(0, correction=0) + 1e-6)
        ends = [5, 5, 5, 5, 5, 6, 9, 9, 9]
        for start, (case, end) in enumerate(zip(train, ends, strict=True)):
            steps = slice(start, min(start + 3, end))
            mask = case["mask"]
            torch.testing.assert_close(case["states"][mask], states[steps])
            torch.testing.assert_close(case["actions"][mask], raw["actions"][steps])
            to_go = [raw["rewards"][i:end].sum() / 1000 for i in range(steps.start, steps.stop)]
            torch.testing.assert_close(case["returns_to_go"][mask, 0], torch.tensor(to_go))
            for key in ("states", "actions", "returns_to_go", "timesteps"):
                assert (case[key][~mask] == 0).all()
                assert len(case[key]) == 3
        torch.testing.assert_close(train.state_mean, raw["observations"].mean(0))
        assert train.returns.tolist() == [15, 6, 24]

    def test_batches(self, folder):
        train = data.load("d4rl/hopper-medium-replay", folder, partial=True).train
        batch = data.collate([train[i] for i in (0, 4)])
        shapes = {key: tuple(value.shape) for key, value in batch.items()}
        assert shapes == {
            "returns_to_go": (2, 20, 1),
            "states": (2, 20, 4),
            "actions": (2, 20, 2),
            "timesteps": (2, 20),
            "mask": (2, 20),
        }
        assert batch["mask"].sum(1).tolist() == [5, 1]

    def test_medium_expert_may_be_two_files(self, tmp_path):
        for quality in ("medium", "expert"):
            write(tmp_path / "d4rl" / f"hopper_{quality}-v5sac.hdf5", arrays())
        train, _, _, info = data.load("d4rl/hopper-medium-expert", tmp_path, version="v5sac")
        assert len(train) == 2 * STEPS
        assert "v5sac" in info.differs
        with pytest.raises(data.MissingDataError, match=r"hopper_medium_expert-v2\.hdf5"):
            data.load("d4rl/hopper-medium-expert", tmp_path)

    @pytest.mark.parametrize("damage", ["cut", "short", "short timeouts", "key", "endless", "text"])
    def test_a_damaged_file_is_named(self, folder, damage):
        path = folder / "d4rl" / "hopper_medium_replay-v2.hdf5"
        content = arrays()
        match damage:
            case "cut":
                path.write_bytes(path.read_bytes()[:-500])
            case "short":
                write(path, content | {"actions": content["actions"][:-1]})
            case "short timeouts":
                write(path, content | {"timeouts": content["timeouts"][:-1]})
            case "key":
                del content["timeouts"]
                write(path, content)
            case "endless":
                write(path, content | {"terminals": content["timeouts"] * 0, "timeouts": content["timeouts"] * 0})
            case "text":
                path.write_text("<html>not found</html>")
        with pytest.raises(data.DamagedDataError, match=r"hopper_medium_replay-v2\.hdf5 is damaged"):
            data.load("d4rl/hopper-medium-replay", folder, partial=True)

    @pytest.mark.parametrize("key", ["observations", "actions", "rewards"])
    def test_numbers_that_are_none_are_refused(self, folder, key):
        """In the steps after the last episode they do no harm."""
        content, path = arrays(), folder / "d4rl" / "hopper_medium_replay-v2.hdf5"
        content[key][STEPS] = np.nan
        write(path, content)
        data.load("d4rl/hopper-medium-replay", folder, partial=True)
        content[key][6] = np.inf
        write(path, content)
        part = {"observations": "states"}.get(key, key)
        message = rf"d4rl/hopper-medium-replay is damaged: the {part} of episode 2 hold NaN or infinite numbers"
        with pytest.raises(data.DamagedDataError, match=message):
            data.load("d4rl/hopper-medium-replay", folder, partial=True)

    def test_windows_need_steps(self):
        with pytest.raises(ValueError, match="got no episodes"):
            Windows([], 3)
        empty = Episode(np.zeros((0, 2)), np.zeros((0, 1)), np.zeros(0), True)
        with pytest.raises(ValueError, match="episode 0 has no steps"):
            Windows([empty], 3)

    @pytest.mark.parametrize("sizes", [(5, 4, 4), (4, 3, 4), (4, 4, 3)])
    def test_windows_need_a_state_and_an_action_for_each_reward(self, sizes):
        """Minari has one state more, which would shift the states of all later episodes."""
        states, actions, rewards = sizes
        whole = Episode(np.zeros((4, 2)), np.zeros((4, 1)), np.zeros(4), True)
        odd = Episode(np.zeros((states, 2)), np.zeros((actions, 1)), np.zeros(rewards), True)
        with pytest.raises(ValueError, match=f"episode 1 has {states} states, {actions} actions and {rewards} rewards"):
            Windows([whole, odd], 3)

    def test_a_file_that_is_not_whole_is_refused_or_labelled(self, folder, monkeypatch):
        name = "hopper-medium-replay"
        with pytest.raises(data.DamagedDataError, match=r"it has 9 steps, the published data has 402,000"):
            data.load(f"d4rl/{name}", folder)
        assert data.load(f"d4rl/{name}", folder, partial=True).info.differs == (
            "hopper_medium_replay-v2.hdf5: 9 steps instead of 402,000; hopper_medium_replay-v2.hdf5: 3 episodes "
            "instead of 2,041"
        )
        monkeypatch.setitem(ENVIRONMENTS["hopper"].sizes, "medium-replay", (9, 4))
        with pytest.raises(data.DamagedDataError, match=r"it has 3 episodes, the published data has 4"):
            data.load(f"d4rl/{name}", folder)
        monkeypatch.setitem(ENVIRONMENTS["hopper"].sizes, "medium-replay", (9, 3))
        assert data.load(f"d4rl/{name}", folder).info.differs == ""

    def test_sizes_count_complete_episodes(self, tmp_path, monkeypatch):
        """D4RL's medium-expert leaves out the steps after the last episode of medium; the two files have them."""
        medium, expert = arrays(), arrays()
        trimmed = {key: np.concatenate((medium[key][:STEPS], expert[key])) for key in medium}
        write(tmp_path / "one" / "d4rl" / "hopper_medium_expert-v2.hdf5", trimmed)
        write(tmp_path / "two" / "d4rl" / "hopper_medium-v2.hdf5", medium)
        write(tmp_path / "two" / "d4rl" / "hopper_expert-v2.hdf5", expert)
        monkeypatch.setitem(ENVIRONMENTS["hopper"].sizes, "medium-expert", (2 * STEPS, 2 * len(LENGTHS)))
        one, two = (data.load("d4rl/hopper-medium-expert", tmp_path / folder) for folder in ("one", "two"))
        assert one.info.differs == two.info.differs == ""
        assert all(torch.equal(part, two.train.steps[key]) for key, part in one.train.steps.items())

    def test_a_size_for_every_set(self):
        """As counted by the released Decision Transformer, which leaves out what follows the last complete episode."""
        sets = {name: record.sizes for name, record in data.RECORDS.items() if name.startswith("d4rl/")}
        assert len(sets) == 9
        assert sets["d4rl/hopper-medium-expert"] == {"steps": 1_999_400, "episodes": 3213}
        assert sets["d4rl/walker2d-medium-expert"] == {"steps": 1_999_209, "episodes": 2190}
        assert all(sizes["steps"] and sizes["episodes"] for sizes in sets.values())

    @pytest.mark.parametrize(
        ("name", "version", "environment"),
        [
            ("walker2d", "v2", "Walker2d-v4"),
            ("halfcheetah", "v4rl", "HalfCheetah-v4"),
            ("hopper", "v5sac", "Hopper-v5"),
        ],
    )
    def test_what_is_played_has_the_physics_of_the_data(self, tmp_path, name, version, environment):
        write(tmp_path / "d4rl" / f"{name}_medium-{version}.hdf5", arrays())
        info = data.load(f"d4rl/{name}-medium", tmp_path, version=version, partial=True).info
        assert info.environment == environment


class TestMinari:
    @pytest.fixture
    def minari_folder(self, tmp_path, monkeypatch):
        import gymnasium
        import minari
        from minari.data_collector import EpisodeBuffer

        monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
        content = arrays()
        buffers, start = [], 0
        for number, length in enumerate(LENGTHS):
            steps = slice(start, start + length)
            # Minari also keeps the state after the last step
            states = np.concatenate((content["observations"][steps], np.full((1, 4), 99, np.float32)))
            buffers.append(
                EpisodeBuffer(
                    id=number,
                    observations=list(states),
                    actions=list(content["actions"][steps]),
                    rewards=list(content["rewards"][steps]),
                    terminations=[False] * (length - 1) + [True],
                    truncations=[False] * length,
                )
            )
            start += length
        box = gymnasium.spaces.Box
        minari.create_dataset_from_buffers(
            "tiny/hopper-v0",
            buffers,
            observation_space=box(-100, 100, (4,), np.float32),
            action_space=box(-1, 1, (2,), np.float32),
            algorithm_name="none",
            author="nobody",
            author_email="nobody@example.org",
            code_permalink="https://example.org",
            description="a test",
        )
        return tmp_path

    def test_is_the_same_as_d4rl(self, minari_folder, folder):
        from_minari = data.load("minari/tiny/hopper-v0", minari_folder, window=3)
        from_d4rl = data.load("d4rl/hopper-medium-replay", folder, window=3, partial=True)
        for one, other in zip(from_minari.train, from_d4rl.train, strict=True):
            for key in other:
                torch.testing.assert_close(one[key], other[key])
        assert "Minari" in from_minari.info.differs

    def test_missing_and_damaged(self, minari_folder):
        with pytest.raises(data.MissingDataError, match="minari download tiny/walker-v0"):
            data.load("minari/tiny/walker-v0", minari_folder)
        (path,) = (minari_folder / "minari").rglob("*.hdf5")
        path.write_bytes(path.read_bytes()[:100])
        with pytest.raises(data.DamagedDataError, match="tiny/hopper-v0"):
            data.load("minari/tiny/hopper-v0", minari_folder)

    @pytest.mark.filterwarnings("ignore::UserWarning")
    def test_discrete_actions_are_refused(self, tmp_path, monkeypatch):
        import minari
        from minari.data_collector import EpisodeBuffer

        monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
        states = list(np.zeros((3, 4), np.float32))
        buffer = EpisodeBuffer(0, 0, None, states, [0, 1], [1.0, 1.0], [False, True], [False] * 2, {})
        minari.create_dataset_from_buffers("cartpole/tiny-v0", [buffer], env="CartPole-v1")
        with pytest.raises(TypeError, match=r"minari/cartpole/tiny-v0 has Discrete\(2\).*read_episodes"):
            data.load("minari/cartpole/tiny-v0", tmp_path)
