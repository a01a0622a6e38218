"""The aeon estimators: aeon's own checks, the laws of unequal lengths, seeds, splits and weights, life with sklearn."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import pickle
import re
import sys
import types

import numpy as np
import pytest
import torch
from aeon.datasets import load_japanese_vowels
from aeon.testing.estimator_checking import parametrize_with_checks
from aeon.transformations.collection import Normalizer
from helpers import ROOT
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline

from flowformer.integrations.aeon import FlowformerTimeSeriesClassifier as FlowformerClassifier
from flowformer.integrations.aeon import FlowformerTimeSeriesRegressor as FlowformerRegressor
from flowformer.models import FlowformerTimeSeries

SMALL = {"embed_dim": 16, "num_layers": 1, "num_heads": 2, "n_epochs": 3, "batch_size": 8, "random_state": 0}
STOPPING = {**SMALL, "early_stopping": True, "validation_fraction": 0.25}


@parametrize_with_checks([FlowformerClassifier, FlowformerRegressor])
def test_aeon_checks(check):
    check()


def waves(count=40, channels=3, seed=0, lengths=(12, 30)):
    """Series of noise and unequal length with a wave in the first channel or the second, and its amplitudes."""
    random = np.random.RandomState(seed)
    labels = np.arange(count) % 2
    amplitudes = random.uniform(0.5, 3, count)
    series = []
    for label, amplitude in zip(labels, amplitudes, strict=True):
        case = 0.1 * random.randn(channels, random.randint(*lengths))
        case[label % channels] += amplitude * np.sin(np.arange(case.shape[1]))
        series.append(case)
    return series, np.array(["first", "second"])[labels], amplitudes


@pytest.fixture(scope="module")
def fitted():
    X, y, _ = waves()
    return FlowformerClassifier(**SMALL).fit(X, y), X


class TestLearning:
    def test_classes_of_fresh_series(self):
        X, y, _ = waves()
        X_test, y_test, _ = waves(seed=1)
        classifier = FlowformerClassifier(**{**SMALL, "n_epochs": 30, "learning_rate": 5e-3}).fit(X, y)
        assert classifier.score(X_test, y_test) >= 0.95
        assert classifier.loss_curve_[-1] < 0.2 * classifier.loss_curve_[0]
        assert len(classifier.loss_curve_) == 30
        assert classifier.validation_loss_curve_ == []

    def test_numbers_of_fresh_series(self):
        X, _, y = waves(80)
        X_test, _, y_test = waves(seed=1)
        regressor = FlowformerRegressor(**{**SMALL, "n_epochs": 30, "learning_rate": 5e-3}).fit(X, 100 + 1e3 * y)
        assert regressor.score(X_test, 100 + 1e3 * y_test) >= 0.9


class TestLengths:
    def test_a_case_does_not_see_the_others(self, fitted):
        """Padded to the longest of its batch, a series is what it is alone."""
        classifier, X = fitted
        together = classifier.predict_proba(X)
        alone = np.concatenate([classifier.predict_proba([x]) for x in X])
        np.testing.assert_allclose(together, alone, rtol=0, atol=1e-6)

    def test_order_of_cases_is_kept(self, fitted):
        classifier, X = fitted
        np.testing.assert_allclose(
            classifier.predict_proba(X[::-1]), classifier.predict_proba(X)[::-1], rtol=0, atol=1e-6
        )

    def test_series_longer_than_in_training(self, fitted):
        classifier, _ = fitted
        assert np.isfinite(classifier.predict_proba([np.random.RandomState(0).randn(3, 500)])).all()

    def test_a_list_and_an_array_are_the_same(self):
        X, y, _ = waves(lengths=(20, 21))
        of_list, of_array = (FlowformerClassifier(**SMALL).fit(data, y) for data in (X, np.stack(X)))
        np.testing.assert_array_equal(of_list.predict_proba(X), of_array.predict_proba(np.stack(X)))

    def test_univariate_series_as_rows(self):
        X, y, _ = waves(channels=1, lengths=(20, 21))
        rows = np.stack(X)[:, 0]
        assert FlowformerClassifier(**SMALL).fit(rows, y).predict(rows).shape == (40,)

    def test_other_channels_than_in_training_raise(self, fitted):
        with pytest.raises(ValueError, match="number of channels"):
            fitted[0].predict([np.zeros((2, 20))])


class TestStandardisation:
    def test_units_of_a_channel_do_not_matter(self):
        X, y, _ = waves()
        units, offsets = np.array([[1e3], [1.0], [1e-3]]), np.array([[-7.0], [0.0], [5.0]])
        other = [x * units + offsets for x in X]
        probabilities = [FlowformerClassifier(**SMALL).fit(data, y).predict_proba(data) for data in (X, other)]
        np.testing.assert_allclose(*probabilities, rtol=0, atol=1e-4)

    def test_moments_are_those_of_the_training_data(self, fitted):
        classifier, X = fitted
        steps = np.concatenate(X, axis=1)
        np.testing.assert_allclose(classifier.channel_mean_, steps.mean(1))
        np.testing.assert_allclose(classifier.channel_scale_, steps.std(1))

    @pytest.mark.filterwarnings("ignore:Data seen by instance")
    def test_constant_channel_and_target(self):
        X, y, _ = waves()
        X = [np.concatenate([x, np.full_like(x[:1], 0.1)]) for x in X]
        classifier = FlowformerClassifier(**SMALL).fit(X, y)
        assert np.isfinite(classifier.predict_proba(X)).all()
        assert classifier.channel_scale_[-1] == 1  # the deviation of many 0.1 is 1e-17
        predicted = FlowformerRegressor(**SMALL).fit(X, np.full(40, 2.5)).predict(X)
        np.testing.assert_allclose(predicted, 2.5, atol=2)


class TestSeeds:
    @pytest.mark.parametrize("early_stopping", [False, True])
    def test_same_seed_same_result(self, early_stopping):
        X, y, _ = waves()
        classifier = FlowformerClassifier(**SMALL, early_stopping=early_stopping)
        first, again, other = (clone(classifier).set_params(random_state=seed).fit(X, y) for seed in (0, 0, 1))
        np.testing.assert_array_equal(first.predict_proba(X), again.predict_proba(X))
        assert (first.predict_proba(X) != other.predict_proba(X)).any()

    def test_the_default_dtype_of_torch_does_not_matter(self):
        X, y, _ = waves()
        torch.set_default_dtype(torch.float64)
        try:
            classifier = FlowformerClassifier(**SMALL).fit(X, y)
            assert {parameter.dtype for parameter in classifier.model_.parameters()} == {torch.float32}
            classifier.predict(X)
        finally:
            torch.set_default_dtype(torch.float32)

    def test_random_state_object_draws_on(self):
        X, y, _ = waves()
        random = np.random.RandomState(0)
        first, second = (FlowformerClassifier(**{**SMALL, "random_state": random}).fit(X, y) for _ in range(2))
        assert (first.predict_proba(X) != second.predict_proba(X)).any()

    def test_torch_and_numpy_seeds_of_the_caller_are_left_alone(self):
        X, y, _ = waves()
        before = torch.get_rng_state(), np.random.get_state()[1].copy()
        FlowformerClassifier(**SMALL).fit(X, y).predict(X)
        assert torch.equal(torch.get_rng_state(), before[0])
        np.testing.assert_array_equal(np.random.get_state()[1], before[1])

    def test_without_a_seed_fits_differ(self):
        X, y, _ = waves()
        first, second = (FlowformerClassifier(**{**SMALL, "random_state": None}).fit(X, y) for _ in range(2))
        assert (first.predict_proba(X) != second.predict_proba(X)).any()


class TestClassWeights:
    @staticmethod
    def chance_of_first(class_weight, y):
        X = waves(seed=3)[0]
        options = {**SMALL, "learning_rate": 1e-2, "class_weight": class_weight}
        return FlowformerClassifier(**options).fit(X, y).predict_proba(X)[:, 0].mean()

    def test_weight_raises_the_probability(self):
        # labels that have nothing to do with the series leave the model their frequency to learn
        y = np.random.RandomState(0).permutation(np.repeat(["first", "second"], [8, 32]))
        even, balanced, heavy = (self.chance_of_first(w, y) for w in (None, "balanced", {"first": 50, "second": 1}))
        assert even + 0.1 < balanced < heavy - 0.1

    def test_balanced_classes_need_no_weight(self):
        y = waves()[1]
        assert self.chance_of_first("balanced", y) == self.chance_of_first(None, y)

    def test_weight_zero_is_a_class_not_learnt(self):
        y = np.random.RandomState(0).permutation(np.repeat(["first", "second"], [4, 36]))
        assert self.chance_of_first({"second": 0.0}, y) > 0.5


class TestEarlyStopping:
    @staticmethod
    def held_out(estimator, strata):
        return estimator._hold_out(np.asarray(strata), np.random.RandomState(estimator.random_state)).numpy()

    def test_stops_and_returns_to_the_best(self):
        # noise can be learnt by heart only: the held-out loss soon rises
        X, y = waves()[0], np.random.RandomState(0).permutation(40) % 2
        options = {**STOPPING, "n_epochs": 60, "patience": 3, "learning_rate": 1e-2}
        classifier = FlowformerClassifier(**options).fit(X, y)
        curve = classifier.validation_loss_curve_
        assert len(curve) == len(classifier.loss_curve_) < 60
        assert len(curve) - 1 - np.argmin(curve) == 3
        rows = np.flatnonzero(self.held_out(classifier, y))
        chances = classifier.predict_proba([X[i] for i in rows])[np.arange(len(rows)), y[rows]]
        np.testing.assert_allclose(-np.log(chances).mean(), min(curve), rtol=1e-5)

    def test_what_is_held_out_does_not_train(self):
        """Other targets of the held-out cases change the loss that stops, not the one that trains."""
        X = waves()[0]
        y = np.arange(40) % 4 * 2.0 - 3  # mean and deviation are exact, so that no order of the sums shows
        options = {**STOPPING, "patience": 3}
        rows = np.flatnonzero(self.held_out(FlowformerRegressor(**options), np.zeros(40)))
        other = y.copy()
        other[rows] = np.roll(y[rows], 1)
        assert (other != y).any()
        first, second = (FlowformerRegressor(**options).fit(X, target) for target in (y, other))
        assert first.loss_curve_ == second.loss_curve_
        assert first.validation_loss_curve_ != second.validation_loss_curve_

    @pytest.mark.parametrize("fraction", [0.1, 0.25, 0.5, 0.8])
    def test_share_of_each_class(self, fraction):
        strata = np.random.RandomState(0).permutation(np.repeat([0, 1, 2], [100, 40, 20]))
        held_out = self.held_out(FlowformerClassifier(**{**STOPPING, "validation_fraction": fraction}), strata)
        for label, count in enumerate([100, 40, 20]):
            assert abs(held_out[strata == label].sum() - fraction * count) <= 1

    @pytest.mark.parametrize("fraction", [0.1, 0.5, 0.99])
    def test_every_class_is_trained_on(self, fraction):
        strata = np.array([0, 1, 1, 2, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3])
        held_out = self.held_out(FlowformerClassifier(**{**STOPPING, "validation_fraction": fraction}), strata)
        assert held_out.any()
        assert set(strata[~held_out]) == {0, 1, 2, 3}

    def test_too_few_cases_raise(self):
        X, y, _ = waves(4)
        with pytest.raises(ValueError, match=r"none of the 4 cases. Raise validation_fraction, now 0.1"):
            FlowformerClassifier(**{**STOPPING, "validation_fraction": 0.1}).fit(X, y)


class TestThreads:
    @pytest.mark.parametrize(("n_jobs", "threads"), [(1, 1), (3, 3), (-1, os.cpu_count())])
    def test_as_many_as_asked_then_as_before(self, n_jobs, threads, monkeypatch):
        seen = set()
        forward = FlowformerTimeSeries.forward

        def spy(*args):
            seen.add(torch.get_num_threads())
            return forward(*args)

        monkeypatch.setattr(FlowformerTimeSeries, "forward", spy)
        before = torch.get_num_threads()
        torch.set_num_threads(2)
        X, y, _ = waves(8)
        try:
            classifier = FlowformerClassifier(**SMALL, n_jobs=n_jobs).fit(X, y)
            assert seen == {threads}
            seen.clear()
            classifier.predict(X)
            assert seen == {threads}
            assert torch.get_num_threads() == 2
        finally:
            torch.set_num_threads(before)


class TestScikitLearn:
    def test_grid_search(self):
        X, y, _ = waves(24)
        search = GridSearchCV(
            FlowformerClassifier(**SMALL), {"embed_dim": [8, 16], "attention": ["flow", "softmax"]}, cv=2
        )
        search.fit(X, y)
        assert np.isfinite(search.cv_results_["mean_test_score"]).all()
        assert search.best_estimator_.model_.config.embed_dim == search.best_params_["embed_dim"]
        assert search.best_estimator_.model_.config.attention == search.best_params_["attention"]

    @pytest.mark.parametrize("estimator", [FlowformerClassifier, FlowformerRegressor])
    def test_cross_validation(self, estimator):
        X, labels, amplitudes = waves(24)
        y = labels if estimator is FlowformerClassifier else amplitudes
        assert np.isfinite(cross_val_score(estimator(**SMALL), X, y, cv=3)).all()

    def test_pipeline(self):
        X, y, _ = waves()
        pipeline = make_pipeline(Normalizer(), FlowformerClassifier(**SMALL)).fit(X, y)
        inner = FlowformerClassifier(**SMALL).fit(Normalizer().fit_transform(X), y)
        np.testing.assert_array_equal(pipeline.predict_proba(X), inner.predict_proba(Normalizer().fit_transform(X)))

    @pytest.mark.parametrize("estimator", [FlowformerClassifier, FlowformerRegressor])
    def test_parameters_are_kept_as_given(self, estimator):
        defaults = {name: p.default for name, p in inspect.signature(estimator).parameters.items()}
        assert estimator().get_params() == defaults
        random = np.random.RandomState(0)
        changed = {**SMALL, "random_state": random, "dropout": "wrong until fit"}
        kept = estimator(**changed).get_params()
        assert all(kept[name] is value for name, value in changed.items())

    def test_defaults_of_both_estimators_agree(self):
        classifier = FlowformerClassifier().get_params()
        del classifier["class_weight"]
        assert classifier == FlowformerRegressor().get_params()

    def test_pickle(self, fitted):
        classifier, X = fitted
        copy = pickle.loads(pickle.dumps(classifier))
        np.testing.assert_array_equal(copy.predict_proba(X), classifier.predict_proba(X))
        assert not copy.model_.training

    def test_unfitted_raises(self):
        with pytest.raises(NotFittedError):
            FlowformerClassifier().predict(waves(2)[0])

    @pytest.mark.parametrize(
        ("parameters", "message"),
        [
            ({"n_epochs": 0}, "n_epochs must be a positive whole number, got 0"),
            ({"n_epochs": 2.5}, "n_epochs must be a positive whole number, got 2.5"),
            ({"batch_size": 0}, "batch_size must be a positive whole number, got 0"),
            ({"patience": 0}, "patience must be a positive whole number, got 0"),
            ({"num_layers": 1.0}, "num_layers must be a positive whole number, got 1.0"),
            ({"embed_dim": "16"}, "embed_dim must be a positive whole number, got '16'"),
            ({"mlp_dim": 0.5}, "mlp_dim must be a positive whole number, got 0.5"),
            ({"device": "gpu"}, 'cannot compute on device=\'gpu\'.*accepted: "auto".*"cuda:1"'),
            ({"device": "cuda:99"}, "cannot compute on device='cuda:99'"),
            ({"device": None}, "cannot compute on device=None"),
            ({"validation_fraction": 1.0}, "validation_fraction must be between 0 and 1, got 1.0"),
            ({"embed_dim": 9}, "num_heads"),
            ({"attention": "fow"}, "flow"),
            ({"class_weight": "balance"}, "class_weight"),
        ],
        ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
    )
    def test_wrong_parameter_raises_in_fit(self, parameters, message):
        X, y, _ = waves(4)
        with pytest.raises(ValueError, match=re.compile(message, re.IGNORECASE)):
            FlowformerClassifier(**{**SMALL, **parameters}).fit(X, y)

    def test_numbers_of_numpy_are_whole_numbers_too(self):
        X, y, _ = waves(4)
        model = FlowformerClassifier(**{**SMALL, "n_epochs": np.int64(1), "embed_dim": np.int32(16)}).fit(X, y)
        assert len(model.predict(X)) == len(y)

    def test_training_that_breaks_raises(self):
        X, y, _ = waves(8)
        with pytest.raises(
            ValueError, match=r"the loss became (nan|inf) in epoch \d+\. Lower learning_rate, now 1e\+30"
        ):
            FlowformerClassifier(**{**SMALL, "learning_rate": 1e30}).fit(X, y)


class TestInfiniteValues:
    @pytest.mark.parametrize("estimator", [FlowformerClassifier, FlowformerRegressor])
    @pytest.mark.parametrize("value", [np.inf, -np.inf])
    def test_are_refused_in_fit_and_in_predict(self, estimator, value):
        X, labels, amplitudes = waves(8)
        y = labels if estimator is FlowformerClassifier else amplitudes
        fitted = estimator(**SMALL).fit(X, y)
        X[3][1, 2] = value
        message = f"X must be finite.*case 3 has {value} in channel 1 at step 2"
        for method in [fitted.predict, *([fitted.predict_proba] if estimator is FlowformerClassifier else [])]:
            with pytest.raises(ValueError, match=message):
                method(X)
        with pytest.raises(ValueError, match=message):
            estimator(**SMALL).fit(X, y)

    def test_a_number_that_float32_does_not_hold_is_one(self):
        X, y, _ = waves(8)
        fitted = FlowformerClassifier(**SMALL).fit(X, y)
        X[5][0, 0] = 1e300
        with pytest.raises(ValueError, match="case 5 has inf in channel 0 at step 0"):
            fitted.predict(X)


class TestProgress:
    def test_bar_if_asked(self, capsys):
        X, y, _ = waves(8)
        FlowformerClassifier(**SMALL).fit(X, y)
        assert capsys.readouterr().out == ""
        FlowformerClassifier(**SMALL, verbose=True).fit(X, y)
        assert "100%" in capsys.readouterr().out

    def test_none_without_rich(self, capsys, monkeypatch):
        monkeypatch.setitem(sys.modules, "rich.progress", None)
        X, y, _ = waves(8)
        assert FlowformerClassifier(**SMALL, verbose=True).fit(X, y).is_fitted
        assert capsys.readouterr().out == ""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_gpu_is_taken_and_left():
    X, y, _ = waves()
    first, again = (FlowformerClassifier(**SMALL).fit(X, y) for _ in range(2))
    assert first._device().type == "cuda"
    assert next(first.model_.parameters()).device.type == "cpu"
    np.testing.assert_array_equal(first.predict_proba(X), again.predict_proba(X))
    on_cpu = pickle.loads(pickle.dumps(first)).set_params(device="cpu")
    np.testing.assert_allclose(on_cpu.predict_proba(X), first.predict_proba(X), rtol=0, atol=1e-3)


def broken(name):
    raise RuntimeError("operator torchvision::nms does not exist")


@pytest.mark.parametrize("broken", [None, broken], ids=["missing", "broken"])
def test_without_aeon_one_sentence_names_the_extra(broken, monkeypatch):
    module = None
    if broken:
        module = types.ModuleType("aeon.classification")
        module.__getattr__ = broken
    monkeypatch.setitem(sys.modules, "aeon.classification", module)
    monkeypatch.delitem(sys.modules, "flowformer.integrations.aeon")
    with pytest.raises(ImportError, match=re.escape("needs aeon: pip install 'flowformer[ts]'.")):
        importlib.import_module("flowformer.integrations.aeon")


def test_example_of_the_page_learns():
    """JapaneseVowels after a few epochs, whose test set has longer series."""
    (code,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "aeon.md").read_text(), re.MULTILINE | re.DOTALL)
    assert code.count("\n") <= 20
    names: dict = {}
    exec(code, names)
    longest, longest_in_test = (max(x.shape[1] for x in names[part]) for part in ("X_train", "X_test"))
    assert longest_in_test > longest
    assert names["accuracy"] >= 0.9


def test_benchmark_measures_and_prints():
    from flowformer.bench import japanese_vowels as bench

    X, y, _ = waves()
    row = bench.measure(
        "small", lambda seed: FlowformerClassifier(**{**SMALL, "random_state": seed}), [0, 1], (X, y), (X, y)
    )
    assert len(row.seconds) == 2
    expected = [FlowformerClassifier(**{**SMALL, "random_state": seed}).fit(X, y).score(X, y) for seed in (0, 1)]
    assert row.accuracies == expected
    assert f"{100 * sum(expected) / 2:.2f}" in bench.table([row], [0, 1])
    X_rocket = bench.rocket(0)[0].fit_transform(load_japanese_vowels("test")[0])
    assert X_rocket.shape == (370, 12, bench.LONGEST)
