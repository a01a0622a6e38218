"""The methods of the reinforcement-learning table: what each learns, and that environments play them all alike."""

from __future__ import annotations

import json
import os
import shutil
import signal
from copy import deepcopy

import gymnasium
import h5py
import minari
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box
from gymnasium.vector import AutoresetMode
from minari.data_collector import EpisodeBuffer
from tiny_training import KilledError, losses
from typer.testing import CliRunner

from flowformer import data
from flowformer.cli import app
from flowformer.data.offline_rl import Episode, Windows
from flowformer.integrations.gymnasium import evaluate
from flowformer.train import checkpoints, claims
from flowformer.train.loop import Interrupted
from flowformer.train.methods import fit
from flowformer.train.methods import policies as methods
from flowformer.train.methods.awac import AWAC, Transitions
from flowformer.train.methods.behaviour_cloning import BehaviourCloning
from flowformer.train.methods.config import METHODS, configure
from flowformer.train.methods.decision_transformer import DecisionTransformer
from flowformer.train.methods.mlp import MLPConfig, MLPPolicy
from flowformer.train.methods.policies import policies, policy

CPU = torch.device("cpu")
TINY = {
    "bc": {"hidden_dim": 16, "device": "cpu"},
    "awac": {"hidden_dim": 16, "batch_size": 16, "device": "cpu"},
    "dt": {"embed_dim": 16, "num_heads": 2, "num_layers": 1, "mlp_dim": 16, "batch_size": 4, "warmup": 1},
}


@pytest.fixture(autouse=True)
def _seed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # MuJoCo writes its log where it runs
    torch.manual_seed(0)


def episodes(state_dim=11, action_dim=3, lengths=(4, 1, 3), ends=(True, True, False)):
    random = np.random.default_rng(0)
    return [
        Episode(
            random.normal(3, 2, (length, state_dim)),
            random.uniform(-1, 1, (length, action_dim)),
            random.normal(size=length),
            terminated,
        )
        for length, terminated in zip(lengths, ends, strict=True)
    ]


def record(folder, terminals, timeouts=()):
    """A file of D4RL with rewards 0, 1, 2, …, to the last end."""
    count = max(*terminals, *timeouts) + 1
    random = np.random.default_rng(0)
    (folder / "d4rl").mkdir()
    with h5py.File(folder / "d4rl" / "hopper_medium-v2.hdf5", "w") as file:
        file["observations"] = random.normal(size=(count, 11)).astype(np.float32)
        file["actions"] = random.uniform(-1, 1, (count, 3)).astype(np.float32)
        file["rewards"] = np.arange(count, dtype=np.float32)
        file["terminals"] = np.isin(np.arange(count), terminals)
        file["timeouts"] = np.isin(np.arange(count), timeouts)


def bandit():
    """One step in one state: seven of ten actions were -0.5 and brought nothing, three were 0.5 and brought 1."""
    actions = np.where(np.arange(100) % 10 < 7, -0.5, 0.5)
    return Windows([Episode(np.zeros((1, 2)), np.full((1, 1), a), np.array([a > 0]), True) for a in actions], 1)


def chain():
    """Two steps, and the action of the first decides whether the second brings 1, whatever is done there."""
    random = np.random.default_rng(0)
    recorded = []
    for i in range(100):
        first = -0.5 if i % 10 < 7 else 0.5
        states = np.array([[0.0], [np.sign(first)]])
        actions = np.array([[first], [random.choice([-0.5, 0.5])]])
        recorded.append(Episode(states, actions, np.array([0.0, float(first > 0)]), True))
    return Windows(recorded, 2)


def action_in(learnt, state):
    """What a policy does in a state, given as the environment gives it."""
    standard = torch.tensor((np.asarray(state) - learnt.state_mean) / learnt.state_std).float()
    return learnt.model.act(torch.zeros(1), standard[None], learnt.model.new_rollout(1))[0].item()


class TestBehaviourCloning:
    def test_is_the_mean_of_the_actions_in_a_state(self):
        learnt = policy("bc", bandit(), steps=400, hidden_dim=16, learning_rate=1e-2, device="cpu")
        assert action_in(learnt, [0.0, 0.0]) == pytest.approx(-0.2, abs=0.05)

    def test_of_the_best_episodes_is_their_mean(self):
        """Three of ten episodes bring a reward, all by the same action."""
        learnt = policy("bc", bandit(), steps=400, hidden_dim=16, learning_rate=1e-2, device="cpu", best=0.3)
        assert action_in(learnt, [0.0, 0.0]) == pytest.approx(0.5, abs=0.05)

    def test_best_takes_whole_episodes_by_their_returns(self):
        """Not by their length, nor by the rewards of single steps; at least one is taken."""
        rewards = [[9.0, -9.0], [1.0, 1.0, 1.0], [2.0]]
        windows = Windows(
            [Episode(np.zeros((len(r), 1)), np.zeros((len(r), 1)), np.array(r), True) for r in rewards], 2
        )
        assert windows.steps_of_best(0.01).tolist() == [2, 3, 4]
        assert windows.steps_of_best(0.67).tolist() == [2, 3, 4, 5]
        assert windows.steps_of_best(1.0).tolist() == [0, 1, 2, 3, 4, 5]

    @pytest.mark.parametrize("best", [0.0, 1.5, -0.1])
    def test_best_must_be_a_share(self, best):
        with pytest.raises(ValueError, match="best must be a share of the episodes"):
            BehaviourCloning(bandit(), CPU, best=best)

    def test_is_regression(self):
        """A policy that can be learnt is learnt, and the loss is the mean squared error."""
        random = np.random.default_rng(0)
        states = random.normal(size=(500, 2))
        windows = Windows([Episode(states, np.tanh(states @ [[1.0], [-0.5]]), np.zeros(500), True)], 5)
        learner = BehaviourCloning(windows, CPU, hidden_dim=32, batch_size=128, learning_rate=1e-2)
        before = learner.model(windows.states)
        torch.manual_seed(1)
        loss = learner.update()
        torch.manual_seed(1)
        rows = torch.randint(500, (128,))
        torch.testing.assert_close(loss, (before - windows.actions)[rows].square().mean())
        for _ in range(400):
            learner.update()
        assert (learner.model(windows.states) - windows.actions).square().mean() < 2e-3

    def test_size(self):
        model = BehaviourCloning(Windows(episodes(), 2), CPU).model
        assert [p.shape for p in model.parameters()][::2] == [(256, 11), (256, 256), (3, 256)]


class TestTransitions:
    def test_next_states_are_of_the_same_episode_and_cut_steps_are_left_out(self):
        windows = Windows(episodes(), 2)
        found = Transitions.of(windows)
        kept = [0, 1, 2, 3, 4, 5, 6]  # the last step of the last episode was cut off
        torch.testing.assert_close(found.states, windows.states[kept])
        torch.testing.assert_close(found.actions, windows.actions[kept])
        torch.testing.assert_close(found.rewards, windows.rewards[kept])
        assert found.goes_on.tolist() == [1, 1, 1, 0, 0, 1, 1]
        goes_on = found.goes_on.bool()
        torch.testing.assert_close(found.next_states[goes_on], windows.states[[1, 2, 3, 6, 7]])

    def test_ends_and_limits_of_d4rl(self, tmp_path):
        record(tmp_path, terminals=[3, 9], timeouts=[6])
        windows = data.load("d4rl/hopper-medium", tmp_path, partial=True).train
        assert windows.terminated.nonzero()[:, 0].tolist() == [3, 9]
        assert windows.rewards.tolist() == list(range(10))
        assert len(Transitions.of(windows).rewards) == 9

    @pytest.mark.filterwarnings("ignore::UserWarning")
    def test_ends_and_limits_of_minari(self, tmp_path, monkeypatch):
        monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
        buffers = [
            EpisodeBuffer(
                id=i,
                observations=list(np.zeros((3, 2), np.float32)),
                actions=list(np.zeros((2, 1), np.float32)),
                rewards=[0.0, 1.0],
                terminations=[False, ended],
                truncations=[False, not ended],
            )
            for i, ended in enumerate((True, False))
        ]
        spaces = {"observation_space": Box(-1, 1, (2,)), "action_space": Box(-1, 1, (1,))}
        minari.create_dataset_from_buffers("tiny/game-v0", buffers, **spaces)
        windows = data.load("minari/tiny/game-v0", tmp_path).train
        assert windows.terminated.tolist() == [False, True, False, False]

    def test_nothing_to_learn_from(self):
        with pytest.raises(ValueError, match="no step has a next state"):
            Transitions.of(Windows(episodes(lengths=(1, 1), ends=(False, False)), 2))


class TestAWAC:
    @pytest.fixture
    def learner(self):
        learner = AWAC(Windows(episodes(lengths=(40, 20, 9)), 2), CPU, hidden_dim=16, batch_size=8, temperature=0.3)
        torch.nn.init.normal_(learner.std_logits, std=0.5)
        for parameter in learner.critics.parameters():
            torch.nn.init.normal_(parameter, std=0.4)
        return learner

    @staticmethod
    def smaller_value(critics, states, actions):
        return torch.minimum(*(critic(torch.cat([states, actions], 1))[:, 0] for critic in critics))

    @staticmethod
    def deviation(learner):
        return (6 * learner.std_logits.sigmoid() - 6).exp()

    def sampled(self, learner, states, seed):
        torch.manual_seed(seed)
        return torch.normal(learner.model(states), self.deviation(learner).expand(len(states), -1))

    @torch.no_grad()
    def test_weights(self, learner):
        batch = learner.data
        sampled = self.sampled(learner, batch.states, 3)
        found = learner.weights(batch, sampled)
        advantage = self.smaller_value(learner.critics, batch.states, batch.actions)
        advantage = advantage - self.smaller_value(learner.critics, batch.states, sampled)
        expected = torch.exp(advantage / 0.3)
        torch.testing.assert_close(found, expected / expected.mean())
        assert found.min() < 0.5
        for critic in learner.critics:
            critic[-1].weight *= 1e4  # whose exponential overflows
        assert learner.weights(batch, sampled).mean() == pytest.approx(1)

    @torch.no_grad()
    def test_actor_loss(self, learner):
        batch = learner.data
        weights = learner.weights(batch, self.sampled(learner, batch.states, 3))
        torch.manual_seed(3)
        found = learner.actor_loss(batch)
        std = self.deviation(learner)
        error = (batch.actions - learner.model(batch.states)) / std
        likelihood = (-0.5 * error**2 - std.log() - 0.5 * np.log(2 * np.pi)).sum(1)
        torch.testing.assert_close(found, -(weights * likelihood).mean())

    def test_settings_are_those_of_the_authors(self):
        learner = AWAC(Windows(episodes(), 2), CPU)
        assert (learner.temperature, learner.batch_size, learner.discount, learner.target_rate) == (2, 1024, 0.99, 5e-3)
        (actor,), (critics,) = learner.actor_optimizer.param_groups, learner.critic_optimizer.param_groups
        assert (actor["lr"], actor["weight_decay"], critics["lr"], critics["weight_decay"]) == (3e-4, 1e-4, 3e-4, 0)
        assert [p.shape[0] for p in learner.model.parameters()][::2] == [256, 256, 256, 256, 3]
        assert [p.shape[0] for p in learner.critics[0].parameters()][::2] == [256, 256, 1]
        assert self.deviation(learner).tolist() == pytest.approx([np.exp(-3)] * 3)

    @torch.no_grad()
    def test_critic_loss(self, learner):
        batch = learner.data
        own = self.sampled(learner, batch.next_states, 3)
        torch.manual_seed(3)
        found = learner.critic_loss(batch)
        target = batch.rewards + 0.99 * batch.goes_on * self.smaller_value(learner.slow_critics, batch.next_states, own)
        pairs = torch.cat([batch.states, batch.actions], 1)
        errors = [(critic(pairs)[:, 0] - target).square().mean() for critic in learner.critics]
        torch.testing.assert_close(found, sum(errors) / 2)
        assert (batch.goes_on == 0).any()
        # after an end nothing more is to be had
        changed = torch.where(batch.goes_on[:, None] == 0, 7.0, batch.next_states)
        torch.manual_seed(3)
        torch.testing.assert_close(learner.critic_loss(batch._replace(next_states=changed)), found)

    def test_slow_critics_follow(self, learner):
        before = [parameter.clone() for parameter in learner.slow_critics.parameters()]
        learner.update()
        for slow, old, fast in zip(
            learner.slow_critics.parameters(), before, learner.critics.parameters(), strict=True
        ):
            torch.testing.assert_close(slow, 0.995 * old + 0.005 * fast)

    def test_the_deviation_of_the_actions_is_learnt(self):
        actions = np.random.default_rng(0).normal(0.2, 0.3, (500, 1))
        windows = Windows([Episode(np.zeros((1, 2)), a[None], np.zeros(1), True) for a in actions], 1)
        learner = AWAC(windows, CPU, hidden_dim=16, batch_size=128, learning_rate=3e-2)
        for _ in range(400):
            learner.update()
        learnt = learner.actor(windows.states[:1])
        assert learnt.mean.item() == pytest.approx(actions.mean(), abs=0.05)
        assert learnt.stddev.item() == pytest.approx(actions.std(), rel=0.15)

    def test_prefers_the_better_of_two_actions(self):
        options = {"hidden_dim": 16, "batch_size": 64, "learning_rate": 1e-2, "temperature": 0.1}
        learnt = policy("awac", bandit(), steps=300, device="cpu", **options)
        assert action_in(learnt, [0.0, 0.0]) > 0.4

    def test_looks_ahead(self):
        """What the first action is worth shows a step later only."""
        options = {"hidden_dim": 16, "batch_size": 64, "learning_rate": 1e-2, "temperature": 0.1, "target_rate": 0.1}
        learnt = policy("awac", chain(), steps=400, device="cpu", **options)
        assert action_in(learnt, [0.0]) > 0.35
        assert abs(action_in(learnt, [1.0])) < 0.35


class TestPolicies:
    def test_names(self):
        assert policies() == list(TINY)
        with pytest.raises(ValueError, match=r"unknown policy 'awc' \(did you mean 'awac'\?\); accepted: bc, awac, dt"):
            policy("awc", bandit())
        with pytest.raises(ValueError, match="steps must be a positive whole number, got 0"):
            policy("bc", bandit(), steps=0)
        with pytest.raises(ValueError, match="dt needs target_return"):
            policy("dt", bandit(), steps=1)
        with pytest.raises(ValueError, match=r"dt has no option 'embed_dims' \(did you mean 'embed_dim'\?\)"):
            policy("dt", bandit(), steps=1, target_return=1.0, embed_dims=8)
        with pytest.raises(ValueError, match=r"dt has no option 'attention' .*accepted: batch_size"):
            policy("dt", bandit(), steps=1, target_return=1.0, attention="flow")

    @pytest.mark.parametrize(
        ("name", "option", "message"),
        [
            *((name, {"batch_size": 0}, "batch_size must be a positive whole number, got 0") for name in TINY),
            *((name, {"hidden_dim": 0}, "hidden_dim must be a positive whole number") for name in ("bc", "awac")),
            ("awac", {"discount": 1.5}, "discount must be from 0 to 1, got 1.5"),
            ("awac", {"target_rate": -0.1}, "target_rate must be from 0 to 1"),
            ("awac", {"temperature": 0.0}, "temperature must be more than 0, got 0.0"),
        ],
    )
    def test_options_out_of_range_are_refused(self, name, option, message):
        """Batches without steps, for example, would train nothing."""
        with pytest.raises(ValueError, match=message):
            policy(name, bandit(), target_return=1.0, steps=1, **TINY[name] | option)

    @pytest.mark.parametrize("name", TINY)
    def test_a_policy_that_diverges_is_refused(self, name):
        """It would be played, and its actions would be NaN."""
        options = TINY[name] | {"learning_rate": 1e30} | ({"warmup": 0} if name == "dt" else {})
        with pytest.raises(FloatingPointError, match=rf"{name} diverged: at update 4 .* a smaller learning_rate"):
            policy(name, Windows(episodes(), 2), target_return=1.0, steps=4, **options)

    def test_the_decision_transformer_may_start_without_warmup(self):
        """The rate is then constant; with a warm-up it starts from 0."""
        for warmup, factors in ((0, [1, 1, 1, 1]), (2, [0, 0.5, 1, 1])):
            learner = DecisionTransformer(
                Windows(episodes(), 2), CPU, **{**TINY["dt"], "warmup": warmup}, learning_rate=0.01
            )
            rates = []
            for _ in factors:
                rates.append(learner.optimizer.param_groups[0]["lr"])
                learner.update()
            assert rates == pytest.approx([0.01 * factor for factor in factors])

    @pytest.mark.parametrize("name", TINY)
    def test_plays_the_same_episodes_in_every_autoreset_mode(self, name):
        learnt = policy(name, Windows(episodes(), 2), target_return=100.0, steps=3, **TINY[name])
        results = []
        for mode in AutoresetMode:
            envs = gymnasium.make_vec(
                "Hopper-v5", num_envs=2, max_episode_steps=25, vector_kwargs={"autoreset_mode": mode}
            )
            results.append(evaluate(learnt, envs, episodes=5, seed=0))
            envs.close()
        for result in results[1:]:
            np.testing.assert_array_equal(result.lengths, results[0].lengths)
            np.testing.assert_allclose(result.returns, results[0].returns, rtol=1e-6)

    def test_a_policy_without_memory_is_its_model(self):
        windows = Windows(episodes(), 2)
        learnt = policy("bc", windows, steps=3, **TINY["bc"])
        envs = gymnasium.make_vec("Hopper-v5", num_envs=3)
        learnt.reset(envs)
        observations, _ = envs.reset(seed=0)
        for ended in ([False] * 3, [True, False, True]):
            states = (torch.tensor(observations).float() - windows.state_mean) / windows.state_std
            found = learnt.act(observations)
            np.testing.assert_allclose(found, learnt.model(states).detach().numpy(), rtol=1e-4, atol=1e-6)
            learnt.observe(np.ones(3), np.array(ended), np.zeros(3, dtype=bool))

    @pytest.mark.parametrize("name", TINY)
    def test_same_seed_same_policy(self, name):
        before = torch.get_rng_state()
        first, again, other = (
            policy(name, Windows(episodes(), 2), target_return=1.0, steps=3, seed=seed, **TINY[name]).model.state_dict()
            for seed in (0, 0, 1)
        )
        assert all(torch.equal(first[key], again[key]) for key in first)
        assert not all(torch.equal(first[key], other[key]) for key in first)
        assert torch.equal(torch.get_rng_state(), before)

    def test_decision_transformer_is_ours_with_softmax(self):
        losses = []
        options = TINY["dt"] | {"report": lambda step, loss: losses.append((step, loss))}
        learnt = policy("dt", Windows(episodes(), 2), target_return=1.0, steps=60, **options)
        assert (learnt.model.config.attention, learnt.model.config.window, learnt.window) == ("softmax", 2, 2)
        assert [step for step, _ in losses] == list(range(1, 61))
        assert sum(loss for _, loss in losses[-10:]) < 0.7 * sum(loss for _, loss in losses[:10])

    def test_saved_policy(self, tmp_path):
        model = MLPPolicy(MLPConfig(3, 2, hidden_dim=8))
        model.save_pretrained(tmp_path / "model")
        states = torch.randn(4, 3)
        torch.testing.assert_close(MLPPolicy.from_pretrained(tmp_path / "model")(states), model(states))


@pytest.fixture
def folder(tmp_path):
    record(tmp_path, terminals=[19, 39, 59])
    return tmp_path


def kill():
    raise KilledError


SIGNALS = {
    number.name: lambda number=number: os.kill(os.getpid(), number) for number in (signal.SIGINT, signal.SIGTERM)
}


class TestResume:
    """Fits of twelve updates, with checkpoints after the fifth and the tenth."""

    @pytest.fixture(autouse=True)
    def _often(self, monkeypatch, deadly_signals):
        monkeypatch.setattr(methods, "_CHECKPOINT_EVERY", 5, raising=False)
        monkeypatch.setattr(fit, "_LOG_EVERY", 1)

    @pytest.fixture
    def played(self, monkeypatch):
        """The parameters of the policies that were played."""
        played = []

        def watched(policy, *args, **options):
            played.append({name: value.clone() for name, value in policy.model.state_dict().items()})
            return evaluate(policy, *args, **options)

        monkeypatch.setattr("flowformer.integrations.gymnasium.evaluate", watched)
        return played

    @staticmethod
    def fit(folder, name, run, step=None, end=kill, seed=3):
        """Fit in the folder of a run; at an update, call `end`."""
        options = ["steps=12", "batch_size=8", "hidden_dim=16", "device=cpu", "partial=true", "final_episodes=2"]
        config = configure("d4rl/hopper-medium", name, options, seed=seed)

        def report(event):
            if event["kind"] == "step" and event["step"] == step:
                end()

        return fit.fit(config, folder / run, data_dir=folder, report=report)

    def stopped(self, folder, name="bc", step=7):
        """The folder of a run that was interrupted."""
        with pytest.raises(Interrupted, match=f"stopped after {step} of 12 updates"):
            self.fit(folder, name, "run", step, SIGNALS["SIGTERM"])
        return folder / "run"

    @pytest.mark.parametrize("name", ["bc", "awac"])
    @pytest.mark.parametrize(
        ("end", "step", "start"),
        [
            ("SIGINT", 7, "step-00000007"),
            ("SIGTERM", 7, "step-00000007"),
            ("SIGTERM", 12, "step-00000012"),
            ("kill -9", 3, None),
            ("kill -9", 7, "step-00000005"),
        ],
    )
    def test_equals_the_uninterrupted_fit(self, folder, played, name, end, step, start):
        whole = self.fit(folder, name, "whole")
        before = signal.getsignal(signal.SIGTERM)
        with pytest.raises(Interrupted if end in SIGNALS else KilledError):
            self.fit(folder, name, "run", step, SIGNALS.get(end, kill))
        assert signal.getsignal(signal.SIGTERM) is before
        newest = checkpoints.latest(folder / "run" / "checkpoints")
        assert (newest and newest.name) == start
        events = []
        options = {"step": None if start is None else int(start[-8:]), "end": lambda: events.append("again")}
        resumed = self.fit(folder, name, "run", **options)
        assert not events, "no update is made twice"
        assert resumed["final"] == whole["final"]
        assert losses(folder / "run") == losses(folder / "whole")
        assert len(losses(folder / "run")) == 12
        assert len(played) == 2
        assert all(torch.equal(played[0][key], played[1][key]) for key in played[0])

    @pytest.mark.parametrize("name", TINY)
    def test_parts_are_all_that_an_update_changes(self, name):
        """A learner that gets the parts of another takes the same updates."""
        windows = Windows(episodes(lengths=(40, 20, 9)), 2)
        options = {key: value for key, value in TINY[name].items() if key != "device"}
        torch.manual_seed(0)
        first = methods.LEARNERS[name](windows, CPU, **options)
        for _ in range(3):
            first.update()
        other = methods.LEARNERS[name](windows, CPU, **options)
        for part, state in zip(other.parts.values(), first.parts.values(), strict=True):
            part.load_state_dict(deepcopy(state.state_dict()))
        found = []
        for learner in (first, other):
            torch.manual_seed(1)
            found.append([learner.update().item() for _ in range(3)])
        assert found[0] == found[1]

    def test_one_that_is_interrupted_while_it_plays_trains_no_more(self, folder, monkeypatch):
        whole = self.fit(folder, "bc", "whole")
        with monkeypatch.context() as patch:
            patch.setattr("flowformer.integrations.gymnasium.evaluate", lambda *args, **options: kill())
            with pytest.raises(KilledError):
                self.fit(folder, "bc", "run")
        monkeypatch.setattr(BehaviourCloning, "update", lambda self: kill())
        resumed = self.fit(folder, "bc", "run")
        assert resumed["final"] == whole["final"]
        assert resumed["training_seconds"] > 0

    def test_a_finished_fit_leaves_no_checkpoint(self, folder):
        run = self.stopped(folder)
        assert checkpoints.latest(run / "checkpoints") is not None
        self.fit(folder, "bc", "run")
        assert not (run / "checkpoints").exists()

    def test_the_record_of_the_start_is_kept(self, folder):
        run = self.stopped(folder)
        first = json.loads((run / "provenance.json").read_text())
        self.fit(folder, "bc", "run")
        facts = json.loads((run / "provenance.json").read_text())
        assert len(facts.pop("resumed")) == 1
        assert facts == first

    def test_time_of_updates_is_that_of_all_processes(self, folder):
        progress = next(self.stopped(folder).rglob("progress.json"))
        facts = json.loads(progress.read_text())
        progress.write_text(json.dumps({**facts, "seconds": facts["seconds"] + 1000}))
        assert 1000 < self.fit(folder, "bc", "run")["training_seconds"] < 2000

    def test_a_damaged_checkpoint_is_named(self, folder):
        whole = self.fit(folder, "bc", "whole")
        run = self.stopped(folder)
        (run / "checkpoints/step-00000007/state.pt").write_bytes(b"half")
        message = r"step-00000007 is damaged: state\.pt changed .* Delete that folder; the run then begins anew"
        with pytest.raises(checkpoints.DamagedCheckpointError, match=message):
            self.fit(folder, "bc", "run")
        shutil.rmtree(run / "checkpoints/step-00000007")
        assert self.fit(folder, "bc", "run")["final"] == whole["final"]

    def test_a_checkpoint_that_cannot_be_written(self, folder, monkeypatch):
        """As on a full disk. The one before is still there."""

        def fill(path, content):
            raise OSError(28, "No space left on device")

        def full():
            monkeypatch.setattr("pathlib.Path.write_bytes", fill)

        with pytest.raises(OSError, match=r"step-00000010 could not be written: .*No space left on device.* MiB left"):
            self.fit(folder, "bc", "run", 7, full)
        assert [path.name for path in (folder / "run/checkpoints").iterdir()] == ["step-00000005"]
        monkeypatch.undo()
        assert (folder / "run/config.json").exists(), "it can be resumed"

    def test_another_config_is_refused(self, folder):
        run = self.stopped(folder)
        with pytest.raises(FileExistsError, match="has a run already"):
            self.fit(folder, "bc", "run", seed=4)
        with pytest.raises(FileExistsError, match="has a run already"):
            self.fit(folder, "awac", "run")
        (run / "config.json").unlink()
        with pytest.raises(FileExistsError, match="has a run already"):
            self.fit(folder, "bc", "run", seed=4)

    def test_other_data_are_refused(self, folder):
        self.stopped(folder)
        shutil.rmtree(folder / "d4rl")
        record(folder, terminals=[19, 39])
        with pytest.raises(ValueError, match="has other files than those"):
            self.fit(folder, "bc", "run")

    def test_a_folder_that_another_process_took_over_is_left_to_it(self, folder):
        def take_over():
            (claim,) = taken
            claim.lost = True

        taken = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(claims.Claim, "_beat", lambda self: taken.append(self))
            with pytest.raises(claims.FolderInUseError, match="another process took"):
                self.fit(folder, "bc", "run", 2, take_over)
        assert (folder / "run" / "config.json").exists()

    @pytest.mark.parametrize("name", ["bc", "awac"])
    def test_command(self, folder, monkeypatch, name):
        learner = methods.LEARNERS[name]
        update, made = learner.update, []

        def counted(self):
            made.append(update(self))
            if len(made) == 7:
                SIGNALS["SIGTERM"]()
            return made[-1]

        monkeypatch.setattr(learner, "update", counted)
        options = ["steps=12", "batch_size=8", "hidden_dim=16", "partial=true", "final_episodes=2"]
        arguments = ["fit", "d4rl/hopper-medium", name, *options, "--data", str(folder), "--out", str(folder / "run")]
        stopped = CliRunner().invoke(app, arguments)
        assert stopped.exit_code == 130
        assert "stopped after 7 of 12 updates. Run the same command to continue." in stopped.output
        assert CliRunner().invoke(app, arguments).exit_code == 0
        assert len(made) == 12


class TestCommand:
    @staticmethod
    def flowformer(*arguments):
        result = CliRunner().invoke(app, [str(argument) for argument in arguments])
        assert result.exit_code == 0, result.output
        return result.output

    def test_methods_are_those_that_can_be_learnt(self):
        assert set(METHODS["decision"]) == set(policies())

    @pytest.mark.parametrize("name", ["bc", "awac"])
    def test_a_run_and_what_differs(self, folder, name):
        options = ("steps=2", "batch_size=8", "partial=true", "final_episodes=3")
        arguments = ("fit", "d4rl/hopper-medium", name, *options, "--data", folder)
        result = json.loads(self.flowformer(*arguments, "--out", folder / "run", "--json"))
        assert (result["attention"], result["metric"], result["steps"]) == (name, "score", 2)
        assert np.isfinite(result["final"]["score"])
        assert (result["final"]["environment"], result["final"]["episodes"]) == ("Hopper-v4", 3)
        table = self.flowformer("results", folder / "run")
        assert f"| d4rl/hopper-medium | {name} | 0 | score | " in table
        assert "options.batch_size=8 options.steps=2" in table
        assert "<br>paper" not in table, "it is not what the paper describes"

    @pytest.mark.parametrize(
        ("wrong", "message"),
        [
            ("batch_size=big", "batch_size must be a whole number, got 'big'"),
            ("best=all", "best must be a number, got 'all'"),
            ("steps=0", "steps must be a positive whole number, got 0"),
        ],
    )
    def test_a_wrong_value_does_not_take_the_folder(self, folder, wrong, message):
        arguments = ("fit", "d4rl/hopper-medium", "bc", "partial=true", "final_episodes=1", "--data", folder)
        failed = CliRunner().invoke(app, [str(each) for each in (*arguments, wrong, "--out", folder / "run")])
        assert message in " ".join(failed.output.split())
        assert not (folder / "run" / "config.json").exists()

    def test_decision_transformer_is_the_recipe(self, folder):
        options = (
            "steps=1",
            "embed_dim=16",
            "num_heads=2",
            "mlp_dim=16",
            "num_layers=1",
            "final_episodes=1",
            "workers=0",
        )
        options = (*options, "partial=true")
        arguments = ("fit", "d4rl/hopper-medium", "dt", *options, "--seed", 2, "--data", folder)
        result = json.loads(self.flowformer(*arguments, "--out", folder / "run", "--json"))
        assert (result["attention"], result["seed"], result["steps"]) == ("softmax", 2, 1)
        assert (folder / "run" / "final" / "model.safetensors").is_file()
        finished = CliRunner().invoke(app, [str(each) for each in (*arguments, "--out", folder / "run")])
        assert "has a run already. Choose another folder" in " ".join(finished.output.split())
        (folder / "run" / "result.json").unlink()
        again = json.loads(self.flowformer(*arguments, "--out", folder / "run", "--json"))
        assert again["final"]["score"] == result["final"]["score"], "it goes on from its checkpoint"

    def test_a_decision_transformer_that_is_interrupted(self, folder, monkeypatch):
        def stop(*args, **options):
            raise Interrupted("stopped at update 3 of 9.")

        monkeypatch.setattr(fit, "train_recipe", stop)
        arguments = [
            "fit",
            "d4rl/hopper-medium",
            "dt",
            "partial=true",
            "--data",
            str(folder),
            "--out",
            str(folder / "r"),
        ]
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 130
        assert "stopped at update 3 of 9. Run the same command to continue." in result.output
