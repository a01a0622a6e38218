"""aeon estimators for classification and regression of time series, based on `FlowformerTimeSeries`.

Shapes: B cases, N steps, C channels. A series is (C, N) to aeon and (N, C) to the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._utils import check_positive, moved, rounds
from ..data.splits import pad
from ..models import FlowformerTimeSeries, TimeSeriesConfig

try:
    from aeon.classification import BaseClassifier
    from aeon.regression import BaseRegressor
    from aeon.utils.validation import check_n_jobs
    from sklearn.utils import check_random_state
    from sklearn.utils.class_weight import compute_class_weight
except Exception as error:  # a broken installation raises more than ImportError
    raise ImportError("flowformer.integrations.aeon needs aeon: pip install 'flowformer[ts]'.") from error

Loss = Callable[[Tensor, Tensor], Tensor]
Series = list[Tensor]  # each (N, C)


class ResumableTraining:
    """The rounds of training, in a plain loop or in one with checkpoints.

    Attributes: `loop`, the `train.methods.resume.ResumableLoop` of `flowformer fit`; None for a plain loop.
    """

    # not a field of the dataclasses below: it is no hyperparameter, and the `reset` of aeon's `fit` would clear it
    loop: Any = None
    verbose: bool

    def _rounds(
        self, count: int, name: str, parts: Mapping[str, Any], every: int
    ) -> AbstractContextManager[Iterable[int]]:
        """Arguments as in `ResumableLoop.rounds`; a plain loop needs no parts."""
        if self.loop is None:
            return nullcontext(rounds(count, name.capitalize(), self.verbose))
        return self.loop.rounds(count, name, parts, every)


@dataclass(kw_only=True, eq=False, repr=False)
class NetworkEstimator(ResumableTraining):
    """Base class of estimators with a network: standardisation of series, device, seeding and threads.

    Estimators are dataclasses, so that `__init__` has the signature from which scikit-learn reads the parameters.
    """

    batch_size: int = 16
    learning_rate: float = 1e-3
    device: str = "auto"
    n_jobs: int | None = 1
    random_state: int | np.random.RandomState | None = None
    verbose: bool = False
    _tags: ClassVar[dict[str, Any]] = {
        "X_inner_type": ["np-list", "numpy3D"],
        "capability:multivariate": True,
        "capability:unequal_length": True,
        "capability:multithreading": True,
        "algorithm_type": "deeplearning",
        "python_dependencies": "torch",
    }

    def __post_init__(self) -> None:
        super().__init__()  # the __init__ of aeon's base class, which follows this class in the MRO

    def _prepare(self, X: Iterable[np.ndarray]) -> Series:
        """Standardise the training series; store their mean and deviation for the series of `predict`."""
        cases = [np.asarray(x, dtype=float) for x in X]
        _check_finite(cases)
        self.channel_mean_, self.channel_scale_ = _mean_and_scale(np.concatenate(cases, axis=1).T)
        self._n_jobs = check_n_jobs(self.n_jobs)
        return self._standardise(cases)

    @contextmanager
    def _seeded(self, random: np.random.RandomState) -> Iterator[None]:
        """Inside the block, seed torch from `random` and set its threads; restore both afterwards."""
        device = self._device()
        with _threads(self._n_jobs), torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(random.randint(np.iinfo(np.int32).max))
            yield

    def _store_model(self, model: nn.Module) -> None:
        # on the CPU, so that the pickled estimator loads on machines without a GPU
        self.model_ = model.cpu().eval()

    def _predict_outputs(self, X: Iterable[np.ndarray]) -> Tensor:
        """Return the outputs of the model for X, (B, num_outputs) in float64."""
        model = deepcopy(self.model_).to(self._device())
        with _threads(self._n_jobs):
            return self._outputs(model, self._standardise(X)).cpu().double()

    @torch.no_grad()
    def _outputs(self, model: nn.Module, series: Series) -> Tensor:
        model.eval()
        device = next(model.parameters()).device
        starts = range(0, len(series), self.batch_size)
        return torch.cat([model(*pad(series[i : i + self.batch_size], device)) for i in starts])

    def _standardise(self, X: Iterable[np.ndarray]) -> Series:
        # check again: a large float64 may overflow in float32
        series = [torch.from_numpy((x.T - self.channel_mean_) / self.channel_scale_).float() for x in X]
        _check_finite([each.T.numpy() for each in series])
        return series

    def _device(self) -> torch.device:
        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        try:
            device = torch.device(self.device)
            torch.empty(0, device=device)
        # torch built without CUDA raises AssertionError
        except (RuntimeError, TypeError, AssertionError, NotImplementedError) as error:
            raise ValueError(
                f'cannot compute on device={self.device!r}: {str(error).splitlines()[0]} Accepted: "auto" (a GPU if '
                'there is one), "cpu", "cuda", "cuda:1" and so on, "mps".'
            ) from error
        return device


@dataclass(kw_only=True, eq=False, repr=False)
class TrainedEstimator(NetworkEstimator):
    """Base class of estimators that train one network from end to end."""

    embed_dim: int = 64
    num_layers: int = 2
    dropout: float = 0.1
    n_epochs: int = 50
    weight_decay: float = 1e-2
    early_stopping: bool = False
    validation_fraction: float = 0.1
    patience: int = 20

    @property
    def _positive_parameters(self) -> tuple[str, ...]:
        """Names of the parameters that must be positive whole numbers."""
        return "embed_dim", "num_layers", "n_epochs", "batch_size", "patience"

    def _train(self, X: Iterable[np.ndarray], target: Tensor, strata: np.ndarray, num_outputs: int, loss: Loss) -> None:
        """Train a network on X and store it as `model_`.

        Args:
            target: (B,) or (B, num_outputs).
            strata: (B,), strata of which the validation split holds out equal shares.
            loss: function of the outputs and the target.
        """
        for name in self._positive_parameters:
            check_positive(**{name: getattr(self, name)})
        if not 0 < self.validation_fraction < 1:
            raise ValueError(f"validation_fraction must be between 0 and 1, got {self.validation_fraction}.")
        series = self._prepare(X)
        random = check_random_state(self.random_state)
        held_out = self._hold_out(strata, random)
        with self._seeded(random):
            model = self._network(len(self.channel_mean_), num_outputs, max(map(len, series)))
            model = model.to(self._device(), torch.float32)  # the dtype of the series, whatever torch's default dtype
            self._optimise(model, series, target.to(self._device()), loss, held_out)
        self._store_model(model)

    def _network(self, num_features: int, num_outputs: int, max_length: int) -> nn.Module:
        """Build the network to train: maps series (B, N, C) and a mask (B, N) or None to (B, num_outputs)."""
        raise NotImplementedError

    def _optimise(self, model: nn.Module, series: Series, target: Tensor, loss: Loss, held_out: Tensor) -> None:
        """Train for all epochs; with early stopping, restore the weights of the epoch with the lowest held-out loss."""
        train, validation = (~held_out).nonzero()[:, 0], held_out.nonzero()[:, 0]
        optimizer = torch.optim.AdamW(model.parameters(), self.learning_rate, weight_decay=self.weight_decay)
        steps = int(self.n_epochs) * -(-len(train) // self.batch_size)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.learning_rate, total_steps=steps)
        self.loss_curve_: list[float] = []
        self.validation_loss_curve_: list[float] = []
        best: dict[str, Any] = {}
        parts = {
            "model": model,
            "optimizer": optimizer,
            "schedule": schedule,
            "loss_curve": self.loss_curve_,
            "validation_loss_curve": self.validation_loss_curve_,
            "best": best,
        }
        with self._rounds(int(self.n_epochs), "epochs", parts, every=5) as epochs:
            for _ in epochs:
                model.train()
                total = 0.0
                for rows in train[torch.randperm(len(train))].split(self.batch_size):
                    batch_loss = loss(model(*pad([series[i] for i in rows], target.device)), target[rows])
                    optimizer.zero_grad()
                    batch_loss.backward()
                    # the authors' limit for the UEA datasets
                    nn.utils.clip_grad_norm_(model.parameters(), 4.0)
                    optimizer.step()
                    schedule.step()
                    total += batch_loss.item() * len(rows)
                self.loss_curve_.append(total / len(train))
                if not np.isfinite(total):
                    raise ValueError(
                        f"the loss became {total} in epoch {len(self.loss_curve_)}. Lower learning_rate, now "
                        f"{self.learning_rate:g}."
                    )
                if self.early_stopping:
                    outputs = self._outputs(model, [series[i] for i in validation])
                    self.validation_loss_curve_.append(loss(outputs, target[validation]).item())
                    since_best = len(self.validation_loss_curve_) - 1 - int(np.argmin(self.validation_loss_curve_))
                    if since_best == 0:
                        best.update(deepcopy(model.state_dict()))
                    elif since_best == self.patience:
                        break
        if self.early_stopping:
            model.load_state_dict(best)

    def _hold_out(self, strata: np.ndarray, random: np.random.RandomState) -> Tensor:
        """Return which cases to hold out for early stopping, (B,) bool: a share of each stratum, never all of it."""
        count = len(strata)
        held_out = torch.zeros(count, dtype=torch.bool)
        if self.early_stopping:
            order = random.permutation(count)
            order = order[np.argsort(strata[order], kind="stable")]
            chosen = np.diff(np.floor(self.validation_fraction * np.arange(count + 1))) > 0
            not_first = np.diff(strata[order], prepend=np.nan) == 0
            held_out[order[chosen & not_first]] = True
            if not held_out.any():
                raise ValueError(
                    f"early stopping would hold out none of the {count} cases. Raise validation_fraction, now "
                    f"{self.validation_fraction:g}, or set early_stopping=False."
                )
        return held_out


@dataclass(kw_only=True, eq=False, repr=False)
class _FlowEstimator(TrainedEstimator):
    """An estimator whose network is `FlowformerTimeSeries`."""

    num_heads: int = 8
    mlp_dim: int | None = None
    attention: str = "flow"

    @property
    def _positive_parameters(self) -> tuple[str, ...]:
        return (*super()._positive_parameters, "num_heads", *(() if self.mlp_dim is None else ("mlp_dim",)))

    def _network(self, num_features: int, num_outputs: int, max_length: int) -> nn.Module:
        config = TimeSeriesConfig(
            num_features=num_features,
            num_classes=num_outputs,
            max_length=max_length,
            embed_dim=self.embed_dim,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            mlp_dim=4 * self.embed_dim if self.mlp_dim is None else self.mlp_dim,
            dropout=self.dropout,
            # head and positions that accept longer series than the training data
            head="mean",
            positions="sinusoidal",
            attention=self.attention,
        )
        return FlowformerTimeSeries(config)

    @classmethod
    def _get_test_params(cls, parameter_set: str = "default") -> list[dict[str, Any]]:
        """Return the parameters that aeon's estimator checks use."""
        small = {"embed_dim": 8, "num_layers": 1, "num_heads": 2, "n_epochs": 2, "batch_size": 4}
        return [small, {**small, "early_stopping": True, "validation_fraction": 0.3, "patience": 1}]


@dataclass(kw_only=True, eq=False, repr=False)
class NetworkClassifier(TrainedEstimator, BaseClassifier):
    """Base class of classifiers that train a network by cross-entropy."""

    class_weight: str | dict | None = None

    def _fit(self, X: Iterable[np.ndarray], y: np.ndarray) -> Self:
        labels = np.searchsorted(self.classes_, y)
        weight = torch.from_numpy(compute_class_weight(self.class_weight, classes=self.classes_, y=y)).float()

        def loss(scores: Tensor, target: Tensor) -> Tensor:
            # divided by the number of cases, not by their weight, which is 0 if all classes of a batch have weight 0
            return F.cross_entropy(scores, target, weight.to(scores.device), reduction="sum") / len(target)

        self._train(X, torch.from_numpy(labels), labels, self.n_classes_, loss)
        return self

    def _predict(self, X: Iterable[np.ndarray]) -> np.ndarray:
        return self.classes_[self._predict_outputs(X).argmax(1).numpy()]

    def _predict_proba(self, X: Iterable[np.ndarray]) -> np.ndarray:
        return self._predict_outputs(X).softmax(1).numpy()


@dataclass(kw_only=True, eq=False, repr=False)
class FlowformerTimeSeriesClassifier(_FlowEstimator, NetworkClassifier):
    """Classifies time series with Flow-Attention, as an aeon and scikit-learn estimator.

    Series may have several channels and different lengths, also longer than in training. Channels are standardised with
    mean and deviation of the training data.

    Args:
        embed_dim, num_layers, num_heads, dropout: width, depth, heads and dropout of the encoder.
        mlp_dim: inner width of the feed-forward networks; None means 4 · embed_dim.
        attention: "flow", or the name of a rival attention; `flowformer.baselines.names` lists them.
        n_epochs, batch_size: passes over the training cases, and cases per batch.
        learning_rate: peak learning rate of AdamW; the schedule (OneCycleLR) warms up and anneals to almost 0.
        weight_decay: weight decay of AdamW.
        class_weight: None, "balanced", or a dict from label to weight.
        early_stopping: hold out `validation_fraction` of the training cases, stop when their loss has not fallen for
            `patience` epochs, and restore the weights with the lowest loss. False trains on all cases for all epochs.
        device: torch device, such as "cuda:1"; "auto" is a GPU if one is available, else the CPU.
        n_jobs: threads on the CPU, -1 for all cores. Small models are fastest on one thread.
        random_state: seed of initialisation, dropout, shuffling and validation split. The same integer gives the same
            result.
        verbose: show a progress bar, if rich is installed.

    Attributes after `fit`: `model_` (on the CPU, in evaluation mode), `channel_mean_` and `channel_scale_` (C,),
    `loss_curve_` and, with early stopping, `validation_loss_curve_`, one number per epoch; `classes_`, `n_classes_`.

    >>> import numpy as np
    >>> series = [np.random.randn(3, length) for length in (20, 35, 28, 31)]
    >>> classifier = FlowformerTimeSeriesClassifier(embed_dim=16, n_epochs=1)
    >>> classifier.fit(series, np.array(["a", "b", "a", "b"])).predict_proba(series).shape
    (4, 2)
    """


@dataclass(kw_only=True, eq=False, repr=False)
class FlowformerTimeSeriesRegressor(_FlowEstimator, BaseRegressor):
    """Predicts a number from a time series with Flow-Attention, as an aeon and scikit-learn estimator.

    Series may have several channels and different lengths, also longer than in training. Channels and target are
    standardised with mean and deviation of the training data; the loss is the mean squared error.

    Args: as for `FlowformerTimeSeriesClassifier`, without class_weight.

    Attributes after `fit`: as for `FlowformerTimeSeriesClassifier`, but `target_mean_` and `target_scale_` in place of
    the classes.

    >>> import numpy as np
    >>> series = [np.random.randn(3, length) for length in (20, 35, 28, 31)]
    >>> regressor = FlowformerTimeSeriesRegressor(embed_dim=16, n_epochs=1).fit(series, np.array([0.5, 1.0, 2.0, 4.0]))
    >>> regressor.predict(series).shape
    (4,)
    """

    def _fit(self, X: Iterable[np.ndarray], y: np.ndarray) -> Self:
        self.target_mean_, self.target_scale_ = _mean_and_scale(y)
        target = torch.from_numpy((y - self.target_mean_) / self.target_scale_).float()
        self._train(X, target[:, None], np.zeros(len(y)), 1, F.mse_loss)
        return self

    def _predict(self, X: Iterable[np.ndarray]) -> np.ndarray:
        return self._predict_outputs(X)[:, 0].numpy() * self.target_scale_ + self.target_mean_


# names of earlier versions, renamed because `flowformer.models.FlowformerClassifier` is another class
__getattr__ = moved(
    __name__,
    {
        "FlowformerClassifier": f"{__name__}.FlowformerTimeSeriesClassifier",
        "FlowformerRegressor": f"{__name__}.FlowformerTimeSeriesRegressor",
    },
)


def _check_finite(cases: Iterable[np.ndarray]) -> None:
    """Raise unless all cases (C, N) are finite: one infinite step would dominate the result of its series."""
    for i, case in enumerate(cases):
        if not np.isfinite(case).all():
            channel, step = np.argwhere(~np.isfinite(case))[0]
            raise ValueError(
                f"X must be finite, also in float32 after standardisation, but case {i} has {case[channel, step]} in "
                f"channel {channel} at step {step}. Replace it, or leave the case out."
            )


def _mean_and_scale(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and standard deviation over the first axis, with deviation 1 for constant columns."""
    # max > min instead of std > 0: rounding gives constants a deviation of about 1e-17
    return values.mean(0), np.where(values.max(0) > values.min(0), values.std(0), 1.0)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Set the number of torch's CPU threads inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
