"""Methods of the time-series table that are no attention: aeon's checks, what each computes, seeds and lengths."""

from __future__ import annotations

import csv
import json
import math
import os
import pickle
import signal

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from aeon.testing.estimator_checking import parametrize_with_checks
from sklearn.model_selection import GridSearchCV
from sklearn.svm import SVC
from tiny_training import KilledError
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from typer.testing import CliRunner

from flowformer.cli import app
from flowformer.integrations.aeon import NetworkEstimator
from flowformer.train import checkpoints, paper, recipes
from flowformer.train.loop import Interrupted
from flowformer.train.methods import fit
from flowformer.train.methods.classifiers import classifier, classifiers
from flowformer.train.methods.config import METHODS, configure
from flowformer.train.methods.lstm import LSTMClassifier, LSTMNetwork
from flowformer.train.methods.tcn import CausalConv, TCNClassifier, TemporalEncoder, draw_triplet, triplet_loss
from flowformer.train.methods.xgboost import XGBoostClassifier
from flowformer.train.reproduce import share_done

SMALL = {
    "dtw": {},
    "rocket": {"n_kernels": 100},
    "xgboost": {"n_estimators": 10},
    "lstm": {"embed_dim": 16, "num_layers": 1, "n_epochs": 20, "learning_rate": 2e-2},
    "tcn": {
        "channels": 16,
        "depth": 2,
        "last_channels": 32,
        "representation_dim": 32,
        "n_steps": 150,
        "n_negatives": 4,
        "learning_rate": 3e-3,
    },
}
NAMES = pytest.mark.parametrize("name", SMALL)


def waves(count=60, seed=0, lengths=(12, 24)):
    """Series of noise and unequal length, slow waves in one class and fast ones in the other."""
    random = np.random.RandomState(seed)
    labels = np.arange(count) % 2
    series = []
    for label in labels:
        times = np.arange(random.randint(*lengths)) + random.uniform(0, 3)
        series.append(np.stack([np.sin((0.4, 1.6)[label] * times), np.zeros_like(times)]))
    return [case + 0.1 * random.randn(*case.shape) for case in series], np.array(["slow", "fast"])[labels]


def small(name, **options):
    return classifier(name, **{"random_state": 0, **SMALL[name], **options})


@pytest.fixture(scope="module")
def fitted():
    """Each classifier, fitted once."""
    X, y = waves()
    return {name: small(name).fit(X, y) for name in SMALL}


@parametrize_with_checks([LSTMClassifier, TCNClassifier, XGBoostClassifier])
def test_aeon_checks(check):
    check()


class TestByName:
    def test_names(self):
        assert classifiers() == list(SMALL)
        with pytest.raises(
            ValueError, match=r"unknown classifier 'rockt' \(did you mean 'rocket'\?\); accepted: dtw, "
        ):
            classifier("rockt")

    @NAMES
    def test_learns_from_series_of_unequal_length(self, fitted, name):
        X_test, y_test = waves(seed=1, lengths=(14, 22))
        assert fitted[name].score(X_test, y_test) >= 0.9
        assert fitted[name].predict_proba(X_test).shape == (60, 2)

    @pytest.mark.parametrize(("name", "short"), [("rocket", {}), ("lstm", {"n_epochs": 2}), ("tcn", {"n_steps": 10})])
    def test_same_seed_same_result(self, name, short):
        X, y = waves()
        between = [np.stack([np.sin(w * np.arange(15)), np.zeros(15)]) for w in np.linspace(0.4, 1.6, 300)]
        first, again, other = (
            small(name, random_state=seed, **short).fit(X, y).predict_proba(between) for seed in (0, 0, 1)
        )
        np.testing.assert_array_equal(first, again)
        assert not np.array_equal(first, other)

    @NAMES
    def test_a_case_does_not_see_the_others(self, fitted, name):
        X = waves(8, seed=2)[0]
        together = fitted[name].predict_proba(X)
        alone = np.concatenate([fitted[name].predict_proba([x]) for x in X])
        np.testing.assert_allclose(together, alone, rtol=0, atol=1e-5)

    @pytest.mark.parametrize("name", ["rocket", "xgboost"])
    def test_one_length_is_that_of_the_longest_training_series(self, fitted, name):
        longest = max(x.shape[1] for x in waves()[0])
        X = waves(8, seed=2, lengths=(longest + 2, longest + 9))[0]
        cut = [x[:, :longest] for x in X]
        np.testing.assert_array_equal(fitted[name].predict_proba(X), fitted[name].predict_proba(cut))
        short = [x[:, :10] for x in X]
        filled = [np.pad(x, ((0, 0), (0, longest - 10))) for x in short]
        np.testing.assert_array_equal(fitted[name].predict_proba(short), fitted[name].predict_proba(filled))

    def test_published_sizes(self):
        rocket = classifier("rocket").classifier
        assert rocket.n_kernels == 10_000
        tcn = classifier("tcn").get_params()
        published = {"channels": 40, "depth": 10, "last_channels": 160, "representation_dim": 320, "n_negatives": 10}
        assert published.items() <= tcn.items()

    @pytest.mark.filterwarnings("ignore:unsafe cast")
    def test_dtw_is_the_nearest_series_over_all_channels_at_once(self):
        def warped(a, b):
            cost = np.full((a.shape[1] + 1, b.shape[1] + 1), np.inf)
            cost[0, 0] = 0
            for i, j in np.ndindex(a.shape[1], b.shape[1]):
                step = ((a[:, i] - b[:, j]) ** 2).sum()
                cost[i + 1, j + 1] = step + min(cost[i, j], cost[i, j + 1], cost[i + 1, j])
            return cost[-1, -1]

        X, y = waves(20, seed=3)
        y = np.arange(20) % 5
        X_test = waves(10, seed=4)[0]
        nearest = [int(np.argmin([warped(x, case) for case in X])) for x in X_test]
        np.testing.assert_array_equal(classifier("dtw").fit(X, y).predict(X_test), y[nearest])

    def test_xgboost_takes_any_labels_and_flattened_series(self):
        import xgboost

        X, y = waves(lengths=(15, 16))
        ours = XGBoostClassifier(n_estimators=5, random_state=0).fit(np.stack(X), y)
        expected = xgboost.XGBClassifier(n_estimators=5).fit(np.stack(X).reshape(60, -1), (y == "slow").astype(int))
        np.testing.assert_allclose(ours.predict_proba(np.stack(X)), expected.predict_proba(np.stack(X).reshape(60, -1)))
        assert set(ours.predict(np.stack(X))) == {"fast", "slow"}


class TestLSTM:
    def test_reads_the_state_after_the_last_step(self):
        torch.manual_seed(0)
        network = LSTMNetwork(3, 2, embed_dim=5).eval()
        series, mask = torch.randn(2, 7, 3), torch.arange(7) < torch.tensor([[7], [4]])
        for row, length in enumerate((7, 4)):
            _, (states, _) = network.lstm(series[row : row + 1, :length])
            torch.testing.assert_close(network(series, mask)[row], network.head(states[-1, 0]))

    def test_is_trained_by_the_loop_of_the_flowformer(self, fitted):
        assert isinstance(fitted["lstm"].model_, LSTMNetwork)
        assert len(fitted["lstm"].loss_curve_) == 20
        assert fitted["lstm"].loss_curve_[-1] < 0.3 * fitted["lstm"].loss_curve_[0]


class TestEncoder:
    @pytest.mark.parametrize("length", [1, 4, 5, 8, 9, 30])
    def test_convolution_is_that_of_torch(self, length):
        """Also where taps reach beyond the first step and are left out."""
        torch.manual_seed(0)
        ours = CausalConv(3, 6, kernel_size=3, dilation=4)
        theirs = weight_norm(nn.Conv1d(3, 6, 3, dilation=4))
        theirs.parametrizations.weight.original0.data = torch.rand(6, 1, 1)
        theirs.parametrizations.weight.original1.data = torch.randn(6, 3, 3)
        ours.length.data, ours.direction.data = (each.data for each in theirs.parametrizations.weight.parameters())
        ours.bias.data = theirs.bias.data
        x = torch.randn(2, 3, length)
        torch.testing.assert_close(ours(x), theirs(F.pad(x, (8, 0))))

    @pytest.mark.parametrize(("depth", "kernel_size"), [(1, 3), (3, 2), (2, 3)])
    def test_a_step_sees_the_receptive_field_before_it_and_nothing_after(self, depth, kernel_size):
        torch.manual_seed(0)
        encoder = TemporalEncoder(1, channels=8, depth=depth, kernel_size=kernel_size, last_channels=8).double()
        field = 1 + 2 * (kernel_size - 1) * (2 ** (depth + 1) - 1)
        length, at = field + 10, field + 4
        x = torch.randn(1, 1, length, dtype=torch.float64, requires_grad=True)
        (gradient,) = torch.autograd.grad(encoder.blocks(x)[0, :, at].sum(), x)
        seen = gradient[0, 0].nonzero()[:, 0]
        assert (seen.min().item(), seen.max().item(), len(seen)) == (at - field + 1, at, field)

    def test_padded_is_alone(self):
        torch.manual_seed(0)
        encoder = TemporalEncoder(2, channels=8, depth=3, last_channels=8, representation_dim=4)
        series, mask = torch.randn(2, 9, 2), torch.arange(9) < torch.tensor([[9], [5]])
        together = encoder(series, mask)
        torch.testing.assert_close(together[1], encoder(series[1:, :5])[0])
        torch.testing.assert_close(together[0], encoder(series[:1])[0])


class TestTriplets:
    def test_loss(self):
        torch.manual_seed(0)
        anchor, positive, negatives = torch.randn(3, 4), torch.randn(3, 4), torch.randn(3, 2, 4)
        expected = 0.0
        for b in range(3):
            expected -= math.log(1 / (1 + math.exp(-float(anchor[b] @ positive[b])))) / 3
            for k in range(2):
                expected -= math.log(1 / (1 + math.exp(float(anchor[b] @ negatives[b, k])))) / 3
        assert triplet_loss(anchor, positive, negatives).item() == pytest.approx(expected, rel=1e-5)

    def test_pieces(self):
        """A positive lies in its anchor, an anchor in its series, a negative in another; all lengths occur."""
        torch.manual_seed(0)
        # 100 · series + step, so that a value says where it is from
        series = [100.0 * i + torch.arange(length)[:, None] for i, length in enumerate((4, 6, 5))]
        seen = {"anchor": set(), "positive": set(), "negative": set()}
        for _ in range(300):
            anchor, positive, negatives = draw_triplet(series, 1, 2)
            assert len(negatives) == 2
            for inner, outer in ((anchor, series[1]), (positive, anchor)):
                start = int(inner[0, 0] - outer[0, 0])
                assert torch.equal(inner, outer[start : start + len(inner)])
            for negative in negatives:
                whole = series[int(negative[0, 0]) // 100]
                start = int(negative[0, 0]) % 100
                assert torch.equal(negative, whole[start : start + len(negative)])
            seen["anchor"].add(len(anchor))
            seen["positive"].add(len(positive))
            seen["negative"] |= {(int(negative[0, 0]) // 100, len(negative)) for negative in negatives}
        assert seen["anchor"] == seen["positive"] == set(range(1, 7))
        assert seen["negative"] == {(0, n) for n in range(1, 5)} | {(2, n) for n in range(1, 6)}

    def test_a_single_series_is_its_own_other(self):
        series = [torch.arange(5.0)[:, None]]
        assert len(draw_triplet(series, 0, 3).negatives) == 3


class TestTCNClassifier:
    def test_loss_falls_below_that_of_chance(self, fitted):
        curve = fitted["tcn"].loss_curve_
        assert len(curve) == 150
        assert np.mean(curve[-20:]) < 0.98 * 5 * math.log(2)

    def test_representations_are_learnt_without_labels(self):
        X, y = waves(20)
        one, other = (small("tcn", n_steps=3).fit(X, labels) for labels in (y, np.roll(y, 1)))
        assert one.loss_curve_ == other.loss_curve_
        np.testing.assert_array_equal(one._predict_outputs(X), other._predict_outputs(X))

    def test_c_is_searched_where_there_are_enough_cases(self):
        random = np.random.RandomState(0)
        few, rare = np.arange(49) % 2, np.r_[np.zeros(60), np.ones(4)]
        for y in (few, rare):
            machine = TCNClassifier._machine(y, random)
            assert isinstance(machine, SVC)
            assert (machine.C, machine.kernel) == (np.inf, "rbf")
        search = TCNClassifier._machine(np.arange(50) % 2, random)
        assert isinstance(search, GridSearchCV)
        assert search.param_grid["C"] == [*(pytest.approx(10.0**i) for i in range(-4, 5)), np.inf]
        assert search.cv.n_splits == 5

    def test_pickle(self, fitted):
        copy, X = pickle.loads(pickle.dumps(fitted["tcn"])), waves(seed=1)[0]
        np.testing.assert_array_equal(copy.predict(X), fitted["tcn"].predict(X))

    def test_wrong_parameter(self):
        with pytest.raises(ValueError, match="n_negatives must be a positive whole number, got 0"):
            small("tcn", n_negatives=0).fit(*waves(8))


class TestResume:
    TINY_TCN = ("channels=4", "depth=1", "last_channels=8", "representation_dim=8")
    # the held-out loss is lowest after epoch 7
    STOPPED_EARLY = ("embed_dim=8", "n_epochs=12", "early_stopping=true", "patience=4", "learning_rate=0.2")

    @pytest.fixture
    def fitted(self, monkeypatch):
        """Parameters and losses of the networks that were fitted."""
        fitted = []

        def watched(self, model):
            store(self, model)
            losses = self.loss_curve_, getattr(self, "validation_loss_curve_", [])
            fitted.append((self.model_.state_dict(), losses))

        store = NetworkEstimator._store_model
        monkeypatch.setattr(NetworkEstimator, "_store_model", watched)
        return fitted

    @pytest.mark.parametrize(
        ("name", "options", "every", "message"),
        [
            ("lstm", ("embed_dim=8", "n_epochs=12"), 5, "stopped after 7 of 12 epochs."),
            ("lstm", STOPPED_EARLY, 5, "stopped after 7 of 12 epochs."),
            ("tcn", (*TINY_TCN, "n_steps=130"), 100, "stopped after 102 of 130 updates."),
        ],
        ids=["lstm", "lstm with early stopping", "tcn"],
    )
    @pytest.mark.parametrize(("error", "late"), [(Interrupted, 2), (KilledError, 0)], ids=["SIGTERM", "kill -9"])
    @pytest.mark.usefixtures("deadly_signals")
    def test_equals_the_uninterrupted_fit(self, tmp_path, fitted, name, options, every, message, error, late):
        def interrupt(event):
            if event["kind"] == "step" and event["step"] == every + 2:
                if error is KilledError:
                    raise KilledError
                os.kill(os.getpid(), signal.SIGTERM)

        config, run = configure("uea/JapaneseVowels", name, [*options, "device=cpu"], seed=5), tmp_path / "run"
        whole = fit.fit(config, tmp_path / "whole")
        with pytest.raises(error) as ended:
            fit.fit(config, run, report=interrupt)
        assert str(ended.value) == ("" if error is KilledError else message)
        saved = every + late
        assert checkpoints.latest(run / "checkpoints").name == f"step-{saved:08d}"
        assert share_done(run) == saved / int(message.split()[4])
        steps = []
        resumed = fit.fit(config, run, report=lambda event: steps.append(event["step"]))
        assert steps[:2] == [saved, saved + 1], "no round is made twice"
        assert resumed["final"] == whole["final"]
        (parameters, losses), (again, same_losses) = fitted
        assert losses == same_losses
        assert all(torch.equal(parameters[key], again[key]) for key in parameters)
        assert not (run / "checkpoints").exists()


def flowformer(*arguments, fails=False):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert (result.exit_code != 0) == fails, result.output
    return " ".join(result.output.split())


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "xgboost"
    arguments = ("fit", "uea/JapaneseVowels", "xgboost", "n_estimators=4", "--seed", 3, "--out", folder)
    return folder, json.loads(flowformer(*arguments, "--json"))


class TestCommand:
    def test_record(self, run):
        folder, result = run
        assert result["final"] == result["best"]
        assert 0.6 < result["final"]["accuracy"] < 1
        assert (result["seed"], result["best_chosen_on"], result["folder"]) == (3, "nothing", str(folder))
        config = json.loads((folder / "config.json").read_text())
        assert (config["rival"], config["options"], config["data"]) == (
            "xgboost",
            {"n_estimators": 4},
            "uea/JapaneseVowels",
        )

    def test_results_say_what_differs(self, run, tmp_path):
        folder, result = run
        output = flowformer("results", folder.parent, "--out", tmp_path)
        (row,) = csv.DictReader((tmp_path / "results.csv").open())
        assert (row["attention"], row["steps"]) == ("xgboost", "")
        assert (row["overrides"], row["paper"]) == ("options.n_estimators=4", ""), "the paper's has more of them"
        assert float(row["final"]) == pytest.approx(100 * result["final"]["accuracy"], abs=0.01)
        assert all(row[name] for name in ("checksum", "device", "commit", "command", "training_seconds"))
        assert "| uea/JapaneseVowels | xgboost | 3 | accuracy |" in output

    def test_prints_the_papers_number_beside_a_fit_as_published_only(self, tmp_path):
        output = flowformer("fit", "uea/JapaneseVowels", "dtw", "--out", tmp_path / "dtw")
        assert "paper │ 94.9" in output
        assert "Everything is in" in output
        output = flowformer("fit", "uea/JapaneseVowels", "xgboost", "n_estimators=1", "--out", tmp_path / "run")
        assert "86.5" not in output
        assert "Not the paper's experiment: options.n_estimators=1." in output

    def test_the_name_of_earlier_versions_still_works_but_is_not_shown(self, tmp_path):
        arguments = ("uea/JapaneseVowels", "xgboost", "n_estimators=1", "--json", "--out")
        old, new = (json.loads(flowformer(name, *arguments, tmp_path / name)) for name in ("rival", "fit"))
        assert old["final"] == new["final"]
        assert " rival " not in flowformer("--help")

    def test_a_run_that_is_there_is_left_alone(self, run):
        folder, _ = run
        arguments = ("fit", "uea/JapaneseVowels", "xgboost", "--out", folder)
        assert "has a run already. Choose another folder" in flowformer(*arguments, fails=True)
        assert "fit it again with flowformer fit" in flowformer("eval", folder, fails=True)
        flowformer("plot", folder, "--out", folder.parent / "curves.png")

    def test_a_fit_that_was_interrupted_starts_again(self, tmp_path):
        arguments = ("fit", "uea/JapaneseVowels", "xgboost", "--out", tmp_path / "run", "--json")
        flowformer(*arguments, "n_estimators=1")
        (tmp_path / "run" / "result.json").unlink()
        assert "has a run already" in flowformer(*arguments, "n_estimators=2", fails=True)
        assert json.loads(flowformer(*arguments, "n_estimators=1"))["attention"] == "xgboost"

    def test_a_misspelt_option_does_not_take_the_folder(self, tmp_path):
        arguments = ("fit", "uea/JapaneseVowels", "xgboost", "--out", tmp_path / "run", "--json")
        for wrong in ("n_estimator=1", "name=dtw"):
            assert f"xgboost has no option '{wrong.partition('=')[0]}'" in flowformer(*arguments, wrong, fails=True)
        assert json.loads(flowformer(*arguments, "n_estimators=1"))["attention"] == "xgboost"

    @pytest.mark.parametrize(
        ("method", "wrong", "message"),
        [
            ("xgboost", "n_estimators=abc", "n_estimators must be a whole number or null, got 'abc'"),
            ("xgboost", "learning_rate=true", "learning_rate must be a number or null, got True"),
            ("lstm", "early_stopping=1", "early_stopping must be true or false, got 1"),
            ("lstm", "n_epochs=1.5", "n_epochs must be a whole number, got 1.5"),
            ("rocket", "n_kernels=many", "n_kernels must be a whole number, got 'many'"),
            ("dtw", "distance_params=1", "distance_params must be an object or null, got 1"),
            ("dtw", "weights=3", "weights must be a text, got 3"),
        ],
    )
    def test_a_value_of_another_type_writes_nothing(self, tmp_path, method, wrong, message):
        folder = tmp_path / "run"
        assert message in flowformer("fit", "uea/JapaneseVowels", method, wrong, "--out", folder, fails=True)
        assert not (folder / "config.json").exists()

    def test_a_fit_that_failed_does_not_take_the_folder(self, tmp_path):
        arguments = ("fit", "uea/JapaneseVowels", "xgboost", "--out", tmp_path / "run", "--json")
        assert "learning_rate" in flowformer(*arguments, "learning_rate=-1", fails=True)
        result = json.loads(flowformer(*arguments, "n_estimators=1", "learning_rate=1"))
        assert result["attention"] == "xgboost", "a whole number is a number"

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["uea/JapaneseVowels", "rockt"], "did you mean 'rocket'"),
            (["uea/JapaneseVowels", "bc"], "accepted: dtw, rocket, xgboost, lstm, tcn"),
            (["lra/text", "dtw"], "flowformer train lra/text attention=NAME"),
            (["uea/JapaneseVowels", "rocket", "kernels"], "'kernels' is no option; accepted: key=value"),
            (
                ["uea/JapaneseVowels", "rocket", "kernels=3"],
                "rocket has no option 'kernels' (did you mean 'n_kernels'?)",
            ),
            (["uea/JapaneseVowels", "lstm", "epochs=3"], "lstm has no option 'epochs' (did you mean 'n_epochs'?)"),
            (["uea/JapaneseVowels", "lstm", "device=gpu"], "device 'gpu' is not there; accepted: auto, cpu"),
            (["uea/JapaneseVowels", "rocket", "seed=3"], "the seed is no option of rocket; pass it as --seed"),
            (["uea/JapaneseVowels", "rocket", "random_state=3"], "the seed is no option of rocket; pass it as --seed"),
            (["d4rl/hopper-medium", "bc", "seed=3"], "the seed is no option of bc; pass it as --seed"),
            (["d4rl/hopper-medium", "bc", "report=3"], "bc has no option 'report'; accepted: steps, device, best"),
            (["uea/JapaneseVowels", "rocket", "--seed", "-1"], "seed must be from 0 to 4294967295, got -1"),
            (["uea/Heartbeat", "rocket"], "UEA Heartbeat is missing"),
        ],
    )
    def test_a_mistake_is_one_sentence(self, tmp_path, arguments, message):
        assert message in flowformer("fit", *arguments, "--out", tmp_path / "run", "--data", tmp_path, fails=True)

    def test_every_config_has_a_folder_of_its_own(self):
        configs = [
            configure("uea/JapaneseVowels", name, options, seed=seed)
            for name, options, seed in (("dtw", [], 0), ("rocket", [], 0), ("rocket", ["n_kernels=9"], 0))
        ]
        configs.append(configure("uea/JapaneseVowels", "rocket", seed=1))
        assert len({config.name for config in configs}) == 4

    def test_runs_of_earlier_versions_keep_their_folders(self):
        """A queue finds its finished runs by the names of their folders, which are digests of the config."""
        config = configure("uea/JapaneseVowels", "rocket", ["n_kernels=100"], seed=1)
        assert config.name == "uea/JapaneseVowels/rocket-seed1-f8e4ad41"
        assert configure("d4rl/hopper-medium", "bc").name == "d4rl/hopper-medium/bc-seed0-735532f3"

    def test_methods_are_those_that_can_be_built(self):
        assert set(METHODS["series"]) == set(classifiers())


def test_averages_are_those_of_the_paper():
    """The rows were typed: their sums say whether they were typed right."""
    sets = [name for name in recipes.names() if name.startswith("uea/")]
    for name, average in {"dtw": 67.0, "xgboost": 66.0, "rocket": 72.5, "lstm": 48.6, "tcn": 70.3}.items():
        assert sum(paper.paper_score(each, name) for each in sets) / 10 == pytest.approx(average, abs=0.06)
    games = [name for name in recipes.names() if name.startswith("d4rl/")]
    for name, average in {"bc": 51.9, "awac": 50.1}.items():
        assert sum(paper.paper_score(each, name) for each in games) / 9 == pytest.approx(average, abs=0.06)
