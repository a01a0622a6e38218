"""The methods without attention of the paper's time-series table, by name, as aeon estimators.

DTW and Rocket are aeon's classifiers; XGBoost, the LSTM and the TCN have a file each in this folder. All need the extra
"ts".
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import is_dataclass
from typing import Any, get_type_hints

import numpy as np

from ..._utils import check_choice, check_options, optional_import
from ...integrations.aeon import BaseClassifier
from .lstm import LSTMClassifier
from .tcn import TCNClassifier
from .xgboost import XGBoostClassifier

# classes by the name of the method; aeon's modules are imported only when they are used
_CLASSES: dict[str, Callable[[], type[BaseClassifier]]] = {
    "dtw": lambda: optional_import("aeon.classification.distance_based", "ts").KNeighborsTimeSeriesClassifier,
    "rocket": lambda: optional_import("aeon.classification.convolution_based", "ts").RocketClassifier,
    "xgboost": lambda: XGBoostClassifier,
    "lstm": lambda: LSTMClassifier,
    "tcn": lambda: TCNClassifier,
}
_DEFAULTS: dict[str, dict[str, Any]] = {"dtw": {"distance": "dtw", "n_neighbors": 1}}
_ONE_LENGTH = ("rocket", "xgboost")


def _padded(classifier: BaseClassifier) -> BaseClassifier:
    """Wrap a classifier that needs series of one length: pad short series with zeros, and truncate long ones."""
    lengths = optional_import("aeon.transformations.collection.unequal_length", "ts")
    # after the padder, the shortest training series is as long as the longest
    steps = [lengths.Padder(error_on_long=False), lengths.Truncator()]
    return optional_import("aeon.classification.compose", "ts").ClassifierPipeline(steps, classifier)


def classifiers() -> list[str]:
    """The names that `classifier` accepts."""
    return list(_CLASSES)


def classifier_options(name: str) -> dict[str, Any]:
    """The options that `classifier` accepts for a name, with their types; Any if a type is not declared."""
    check_choice("classifier", name, _CLASSES)
    build = _CLASSES[name]()
    # fields of a dataclass have types from the modules of its base classes, which its __init__ cannot look up
    hints = get_type_hints(build if is_dataclass(build) else build.__init__)
    options = inspect.signature(build).parameters
    return {option: hints.get(option, Any) for option in options if option != "random_state"}


def classifier(name: str, *, random_state: int | np.random.RandomState | None = None, **options: Any) -> BaseClassifier:
    """Build a classifier by name, as an estimator of aeon: fit, predict, predict_proba, score.

    All take multivariate series of unequal length. "rocket" and "xgboost" need series of one length internally: as in
    the paper, shorter ones are padded with zeros to the longest training series, and longer test series are truncated.
    Zero is the mean of standardised series, such as those of `data.load`.

    Args:
        name: "dtw", aeon's nearest neighbour under dynamic time warping, all channels together; "rocket", aeon's with
            10,000 kernels; "xgboost", boosted trees over the flattened series; "lstm"; or "tcn", a support vector
            machine on representations learnt without labels.
        random_state: seed of the random numbers. "dtw" uses none.
        options: options of aeon's KNeighborsTimeSeriesClassifier or RocketClassifier, of `XGBoostClassifier`,
            `LSTMClassifier` or `TCNClassifier`.

    >>> series = [np.random.randn(3, length) for length in (20, 35, 28, 31)]
    >>> classifier("dtw").fit(series, np.array(["a", "b", "a", "b"])).predict(series)
    array(['a', 'b', 'a', 'b'], dtype='<U1')
    """
    check_options(name, options, classifier_options(name))
    build = _CLASSES[name]()
    seed = {"random_state": random_state} if "random_state" in inspect.signature(build).parameters else {}
    built = build(**_DEFAULTS.get(name, {}) | seed | options)
    return _padded(built) if name in _ONE_LENGTH else built
