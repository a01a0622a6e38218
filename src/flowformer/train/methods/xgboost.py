"""Boosted trees over flattened time series, with the package xgboost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ..._utils import optional_import
from ...integrations.aeon import BaseClassifier


@dataclass(kw_only=True, eq=False, repr=False)
class XGBoostClassifier(BaseClassifier):
    """Classifies time series by boosted trees; each step of each channel is a feature.

    The paper does not state its settings; the defaults are those of the library. All series must have the
    same length; `classifier("xgboost")` pads or truncates them.

    Args:
        n_estimators, max_depth, learning_rate: number, depth and weight of the trees; None is the library's default.
        n_jobs: threads, -1 for all cores.
        random_state: seed of the trees.
    """

    _tags: ClassVar[dict[str, Any]] = {
        "X_inner_type": "numpy3D",
        "capability:multivariate": True,
        "capability:multithreading": True,
        "python_dependencies": "xgboost",
    }

    n_estimators: int | None = None
    max_depth: int | None = None
    learning_rate: float | None = None
    n_jobs: int | None = 1
    random_state: int | np.random.RandomState | None = None

    def __post_init__(self) -> None:
        super().__init__()

    def _fit(self, X: np.ndarray, y: np.ndarray) -> XGBoostClassifier:
        random = optional_import("sklearn.utils", "ts").check_random_state(self.random_state)
        self.trees_ = optional_import("xgboost", "ts").XGBClassifier(
            n_estimators=self.n_estimators,
            max_depth=self.max_depth,
            learning_rate=self.learning_rate,
            n_jobs=self.n_jobs,
            random_state=random.randint(np.iinfo(np.int32).max),
        )
        self.trees_.fit(X.reshape(len(X), -1), np.searchsorted(self.classes_, y))
        return self

    def _predict(self, X: np.ndarray) -> np.ndarray:
        return self.classes_[self._predict_proba(X).argmax(1)]

    def _predict_proba(self, X: np.ndarray) -> np.ndarray:
        return self.trees_.predict_proba(X.reshape(len(X), -1))

    @classmethod
    def _get_test_params(cls, parameter_set: str = "default") -> list[dict[str, Any]]:
        return [{"n_estimators": 2}]
