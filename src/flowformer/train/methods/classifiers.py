"""The methods of the paper's time-series table that are no attention, by name, as aeon estimators.

DTW and Rocket are aeon's own classifiers; XGBoost, the LSTM and the TCN have a file each beside this one. All need the
extra "ts".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..._utils import check_choice, optional_import
from ...integrations.aeon import BaseClassifier
from .lstm import LSTMClassifier
from .tcn import TCNClassifier
from .xgboost import XGBoostClassifier


def _dtw(random_state: Any, **options: Any) -> BaseClassifier:
    neighbours = optional_import("aeon.classification.distance_based", "ts").KNeighborsTimeSeriesClassifier
    return neighbours(**{"distance": "dtw", "n_neighbors": 1, **options})


def _rocket(random_state: Any, **options: Any) -> BaseClassifier:
    rocket = optional_import("aeon.classification.convolution_based", "ts").RocketClassifier
    return _padded(rocket(random_state=random_state, **options))


def _padded(classifier: BaseClassifier) -> BaseClassifier:
    """For a classifier that takes one length: short series get zeros at the end, long ones lose theirs."""
    lengths = optional_import("aeon.transformations.collection.unequal_length", "ts")
    # after the padder, the shortest training series is as long as the longest
    steps = [lengths.Padder(error_on_long=False), lengths.Truncator()]
    return optional_import("aeon.classification.compose", "ts").ClassifierPipeline(steps, classifier)


_CLASSIFIERS: dict[str, Callable[..., BaseClassifier]] = {
    "dtw": _dtw,
    "rocket": _rocket,
    "xgboost": lambda random_state, **options: _padded(XGBoostClassifier(random_state=random_state, **options)),
    "lstm": LSTMClassifier,
    "tcn": TCNClassifier,
}


def classifiers() -> list[str]:
    """What `classifier` accepts."""
    return list(_CLASSIFIERS)


def classifier(name: str, *, random_state: int | np.random.RandomState | None = None, **options: Any) -> BaseClassifier:
    """A classifier by name, as an estimator of aeon: fit, predict, predict_proba, score.

    All take multivariate series of unequal length. "rocket" and "xgboost" need series of one length: as in the paper,
    shorter ones are padded with zeros to the longest training series, and longer test series are cut. Zero is the mean
    of standardised series, as those of `data.load` are.

    Args:
        name: "dtw", aeon's nearest neighbour under dynamic time warping, all channels together; "rocket", aeon's with
            10,000 kernels; "xgboost", boosted trees over the flattened series; "lstm"; or "tcn", a support vector
            machine on representations learnt without labels.
        random_state: seed of everything random. "dtw" has nothing random.
        options: of aeon's KNeighborsTimeSeriesClassifier or RocketClassifier, of `XGBoostClassifier`, `LSTMClassifier`
            or `TCNClassifier`.

    >>> series = [np.random.randn(3, length) for length in (20, 35, 28, 31)]
    >>> classifier("dtw").fit(series, np.array(["a", "b", "a", "b"])).predict(series)
    array(['a', 'b', 'a', 'b'], dtype='<U1')
    """
    check_choice("classifier", name, _CLASSIFIERS)
    return _CLASSIFIERS[name](random_state=random_state, **options)
