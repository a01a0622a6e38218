"""Classical and recurrent rivals of the paper's time-series table, by name, as aeon estimators.

They need the extra "ts", and so are not part of `flowformer.baselines` itself, which needs nothing but torch.

Shapes: B cases, N steps, C channels. A series is (C, N) to aeon and (N, C) to a network.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from .._utils import check_positive, optional_import, suggestion
from ..integrations.aeon import BaseClassifier, FlowformerClassifier, NetworkEstimator, check_random_state, pad, rounds
from .tcn import TemporalEncoder, draw_triplet, triplet_loss


class LSTMNetwork(nn.Module):
    """An LSTM, whose state after the last step is mapped to the outputs.

    >>> LSTMNetwork(3, 5)(torch.randn(2, 50, 3)).shape
    torch.Size([2, 5])
    """

    def __init__(
        self, num_features: int, num_outputs: int, *, embed_dim: int = 64, num_layers: int = 2, dropout: float = 0.1
    ) -> None:
        super().__init__()
        between_layers = dropout if num_layers > 1 else 0.0
        self.lstm = nn.LSTM(num_features, embed_dim, num_layers, batch_first=True, dropout=between_layers)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(embed_dim, num_outputs)

    def forward(self, series: Tensor, mask: Tensor | None = None) -> Tensor:
        """(B, N, C) to (B, num_outputs); mask (B, N) bool, True = a step. Padding has to come last."""
        states, _ = self.lstm(series)
        last = states[:, -1] if mask is None else states[torch.arange(len(states), device=mask.device), mask.sum(1) - 1]
        return self.head(self.dropout(last))


class LSTMClassifier(FlowformerClassifier):
    """Classifies time series with an LSTM of the width and depth of `FlowformerClassifier`, trained as that is.

    The paper does not state the sizes of its LSTM.

    Args: as of `FlowformerClassifier`, less what belongs to attention.

    >>> series = [np.random.randn(3, length) for length in (20, 35, 28, 31)]
    >>> LSTMClassifier(n_epochs=1).fit(series, np.array(["a", "b", "a", "b"])).predict_proba(series).shape
    (4, 2)
    """

    def __init__(
        self,
        *,
        embed_dim: int = 64,
        num_layers: int = 2,
        dropout: float = 0.1,
        n_epochs: int = 50,
        batch_size: int = 16,
        learning_rate: float = 1e-3,
        weight_decay: float = 1e-2,
        class_weight: str | dict | None = None,
        early_stopping: bool = False,
        validation_fraction: float = 0.1,
        patience: int = 20,
        device: str = "auto",
        n_jobs: int | None = 1,
        random_state: int | np.random.RandomState | None = None,
        verbose: bool = False,
    ) -> None:
        super().__init__(
            embed_dim=embed_dim,
            num_layers=num_layers,
            dropout=dropout,
            n_epochs=n_epochs,
            batch_size=batch_size,
            learning_rate=learning_rate,
            weight_decay=weight_decay,
            class_weight=class_weight,
            early_stopping=early_stopping,
            validation_fraction=validation_fraction,
            patience=patience,
            device=device,
            n_jobs=n_jobs,
            random_state=random_state,
            verbose=verbose,
        )

    def _network(self, num_features: int, num_outputs: int, max_length: int) -> nn.Module:
        return LSTMNetwork(
            num_features, num_outputs, embed_dim=self.embed_dim, num_layers=self.num_layers, dropout=self.dropout
        )

    @classmethod
    def _get_test_params(cls, parameter_set: str = "default") -> list[dict[str, Any]]:
        return [{"embed_dim": 8, "num_layers": 1, "n_epochs": 2, "batch_size": 4}]


class TCNClassifier(NetworkEstimator, BaseClassifier):
    """Classifies time series by representations learnt without labels, see `tcn`, with a support vector machine.

    Sizes and training are those published with the method. So is the choice of the machine's C, by five-fold
    cross-validation among 10⁻⁴, …, 10⁴ and ∞; with fewer than 50 cases, or fewer than 5 of a class, it is ∞. Series may
    have lengths that differ. Channels are standardised by the training data. `predict_proba` is 1 for what is
    predicted.

    Args:
        channels, depth, kernel_size, last_channels, representation_dim: as of `tcn.TemporalEncoder`.
        n_steps, batch_size: updates of the encoder, and series of each.
        n_negatives: pieces of other series to tell each piece apart from.
        learning_rate: of Adam.
        device, n_jobs, random_state, verbose: as of `FlowformerClassifier`.

    Attributes after `fit`: `model_`, the encoder, `loss_curve_`, one number an update, and `machine_`.

    >>> series = [np.random.randn(3, length) for length in (20, 35, 28, 31)]
    >>> TCNClassifier(depth=2, n_steps=1).fit(series, np.array(["a", "b", "a", "b"])).predict(series).shape
    (4,)
    """

    _tags: ClassVar[dict[str, Any]] = {"capability:multithreading": True}

    def __init__(
        self,
        *,
        channels: int = 40,
        depth: int = 10,
        kernel_size: int = 3,
        last_channels: int = 160,
        representation_dim: int = 320,
        n_steps: int = 2000,
        batch_size: int = 10,
        n_negatives: int = 10,
        learning_rate: float = 1e-3,
        device: str = "auto",
        n_jobs: int | None = 1,
        random_state: int | np.random.RandomState | None = None,
        verbose: bool = False,
    ) -> None:
        self.channels = channels
        self.depth = depth
        self.kernel_size = kernel_size
        self.last_channels = last_channels
        self.representation_dim = representation_dim
        self.n_steps = n_steps
        self.batch_size = batch_size
        self.n_negatives = n_negatives
        self.learning_rate = learning_rate
        self.device = device
        self.n_jobs = n_jobs
        self.random_state = random_state
        self.verbose = verbose
        super().__init__()

    def _fit(self, X: Iterable[np.ndarray], y: np.ndarray) -> TCNClassifier:
        check_positive(n_steps=self.n_steps, batch_size=self.batch_size, n_negatives=self.n_negatives)
        series = self._prepare(X)
        random = check_random_state(self.random_state)
        with self._seeded(random):
            encoder = TemporalEncoder(
                len(self.channel_mean_),
                channels=self.channels,
                depth=self.depth,
                kernel_size=self.kernel_size,
                last_channels=self.last_channels,
                representation_dim=self.representation_dim,
            ).to(self._device())
            self._learn(encoder, series)
            represented = self._outputs(encoder, series).cpu().double().numpy()
        self._keep(encoder)
        self.machine_ = self._machine(y, random).fit(represented, y)
        return self

    def _learn(self, encoder: nn.Module, series: list[Tensor]) -> None:
        """Train the encoder to tell pieces of the same series from pieces of others."""
        optimizer = torch.optim.Adam(encoder.parameters(), self.learning_rate)
        batches: list[Tensor] = []
        self.loss_curve_: list[float] = []
        encoder.train()
        for _ in rounds(self.n_steps, "Updates", self.verbose):
            batches = batches or list(torch.randperm(len(series)).split(self.batch_size))
            triplets = [draw_triplet(series, index, self.n_negatives) for index in batches.pop().tolist()]
            anchors, positives, negatives = zip(*triplets, strict=True)
            pieces = [*anchors, *positives, *(piece for each in negatives for piece in each)]
            anchor, positive, others = encoder(*pad(pieces, self._device())).tensor_split(
                [len(triplets), 2 * len(triplets)]
            )
            loss = triplet_loss(anchor, positive, others.unflatten(0, (len(triplets), -1)))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            self.loss_curve_.append(loss.item())

    @staticmethod
    def _machine(y: np.ndarray, random: np.random.RandomState) -> Any:
        selection, svm = optional_import("sklearn.model_selection", "ts"), optional_import("sklearn.svm", "ts")
        # what cannot be separated would never come to an end with C = ∞
        machine = svm.SVC(C=np.inf, max_iter=100_000)
        if len(y) < 50 or np.unique(y, return_counts=True)[1].min() < 5:
            return machine
        folds = selection.StratifiedKFold(5, shuffle=True, random_state=random.randint(np.iinfo(np.int32).max))
        return selection.GridSearchCV(machine, {"C": [*10.0 ** np.arange(-4, 5), np.inf]}, cv=folds)

    def _predict(self, X: Iterable[np.ndarray]) -> np.ndarray:
        return self.machine_.predict(self._predict_outputs(X).numpy())

    @classmethod
    def _get_test_params(cls, parameter_set: str = "default") -> list[dict[str, Any]]:
        small = {"channels": 4, "depth": 2, "last_channels": 8, "representation_dim": 8}
        return [{**small, "n_steps": 3, "batch_size": 4, "n_negatives": 2}]


class XGBoostClassifier(BaseClassifier):
    """Classifies time series by boosted trees, with each step of each channel as a feature of its own.

    The paper does not state its settings; these are the library's. Series must have one length: see `classifier`.

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

    def __init__(
        self,
        *,
        n_estimators: int | None = None,
        max_depth: int | None = None,
        learning_rate: float | None = None,
        n_jobs: int | None = 1,
        random_state: int | np.random.RandomState | None = None,
    ) -> None:
        self.n_estimators = n_estimators
        self.max_depth = max_depth
        self.learning_rate = learning_rate
        self.n_jobs = n_jobs
        self.random_state = random_state
        super().__init__()

    def _fit(self, X: np.ndarray, y: np.ndarray) -> XGBoostClassifier:
        self.trees_ = optional_import("xgboost", "ts").XGBClassifier(
            n_estimators=self.n_estimators,
            max_depth=self.max_depth,
            learning_rate=self.learning_rate,
            n_jobs=self.n_jobs,
            random_state=check_random_state(self.random_state).randint(np.iinfo(np.int32).max),
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
    """A rival by name, as an estimator of aeon: fit, predict, predict_proba, score.

    All take multivariate series of unequal length. "dtw", "lstm" and "tcn" can do so by nature; "rocket" and "xgboost"
    cannot: as in the paper, their series are filled up with zeros to the longest one of training, and cut there. Zeros
    are the mean of series that are standardised, as those of `data.load` are.

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
    if name not in _CLASSIFIERS:
        raise ValueError(
            f"unknown classifier {name!r}{suggestion(name, _CLASSIFIERS)}; accepted: {', '.join(_CLASSIFIERS)}."
        )
    return _CLASSIFIERS[name](random_state=random_state, **options)
