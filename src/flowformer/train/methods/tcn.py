"""The TCN: dilated causal convolutions trained without labels by a triplet loss, then a support vector machine.

The method of Franceschi, Dieuleveut and Jaggi, Unsupervised Scalable Representation Learning for Multivariate Time
Series (NeurIPS 2019), which the paper's table calls "Unsuper. (TCN)".

Shapes: B series, N steps, C channels, K negatives, R representation dimension.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..._utils import check_positive, optional_import
from ...data.splits import pad
from ...integrations.aeon import BaseClassifier, NetworkEstimator

SLOPE = 0.01  # negative slope of the leaky ReLUs


class CausalConv(nn.Module):
    """A dilated causal convolution with weight normalisation: the weights are stored as length and direction."""

    # torch's weight_norm makes modules that cannot be pickled, but estimators must be
    def __init__(self, in_channels: int, out_channels: int, kernel_size: int, dilation: int) -> None:
        super().__init__()
        start = nn.Conv1d(in_channels, out_channels, kernel_size)
        self.direction, self.bias = start.weight, start.bias
        self.length = nn.Parameter(start.weight.detach().norm(dim=(1, 2), keepdim=True))
        self.dilation = dilation

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, C, N) to (B, out_channels, N)."""
        weight = self.length * self.direction / self.direction.norm(dim=(1, 2), keepdim=True)
        # leave out taps that only ever see the zeros before the first step: in late layers these are most of the taps
        taps = min(weight.shape[-1], -(-x.shape[-1] // self.dilation))
        past = F.pad(x, ((taps - 1) * self.dilation, 0))
        return F.conv1d(past, weight[..., -taps:], self.bias, dilation=self.dilation)


class CausalBlock(nn.Module):
    """Two causal convolutions with a residual connection."""

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int, dilation: int) -> None:
        super().__init__()
        self.first = CausalConv(in_channels, out_channels, kernel_size, dilation)
        self.second = CausalConv(out_channels, out_channels, kernel_size, dilation)
        same = in_channels == out_channels
        self.residual = nn.Identity() if same else nn.Conv1d(in_channels, out_channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.leaky_relu(self.first(x), SLOPE)
        return F.leaky_relu(self.second(hidden), SLOPE) + self.residual(x)


class TemporalEncoder(nn.Module):
    """Encodes a series of any length as one vector: blocks of dilation 1, 2, 4, …, maximum over time, linear map.

    Args:
        num_features: C.
        channels: channels of all blocks but the last.
        depth: number of blocks before the last.
        kernel_size: kernel size of the convolutions.
        last_channels: channels of the last block.
        representation_dim: R.

    >>> TemporalEncoder(3)(torch.randn(2, 50, 3)).shape
    torch.Size([2, 320])
    """

    def __init__(
        self,
        num_features: int,
        *,
        channels: int = 40,
        depth: int = 10,
        kernel_size: int = 3,
        last_channels: int = 160,
        representation_dim: int = 320,
    ) -> None:
        super().__init__()
        widths = [num_features, *[channels] * depth, last_channels]
        self.blocks = nn.Sequential(
            *(CausalBlock(widths[i], widths[i + 1], kernel_size, 2**i) for i in range(depth + 1)),
        )
        self.head = nn.Linear(last_channels, representation_dim)

    def forward(self, series: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map (B, N, C) to (B, R). The mask (B, N) is True for steps, False for padding, which must be at the end."""
        x = self.blocks(series.mT)
        if mask is not None:
            x = x.masked_fill(~mask[:, None], -torch.inf)
        return self.head(x.amax(-1))


class Triplet(NamedTuple):
    """A subseries as anchor, a subseries of it as positive, and K subseries of other series, each (length, C)."""

    anchor: Tensor
    positive: Tensor
    negatives: list[Tensor]


def draw_triplet(series: Sequence[Tensor], index: int, num_negatives: int) -> Triplet:
    """Draw a triplet with its anchor from series[index]; lengths, positions and other series are uniformly random."""
    whole = series[index]
    positive_length = _uniform(1, len(whole))
    anchor = _subseries(whole, _uniform(positive_length, len(whole)))
    # if there is a single series, its negatives are from the same series
    steps = [_uniform(1, max(len(series) - 1, 1)) for _ in range(num_negatives)]
    others = [series[(index + step) % len(series)] for step in steps]
    return Triplet(
        anchor, _subseries(anchor, positive_length), [_subseries(other, _uniform(1, len(other))) for other in others]
    )


def triplet_loss(anchor: Tensor, positive: Tensor, negatives: Tensor) -> Tensor:
    """The mean over B of −log σ(a·p) − Σ_k log σ(−a·n_k), for representations (B, R), (B, R) and (B, K, R)."""
    near = F.logsigmoid((anchor * positive).sum(-1))
    far = F.logsigmoid(-(negatives * anchor[:, None]).sum(-1)).sum(-1)
    return -(near + far).mean()


@dataclass(kw_only=True, eq=False, repr=False)
class TCNClassifier(NetworkEstimator, BaseClassifier):
    """Classifies time series by a support vector machine on representations that a `TemporalEncoder` learns unlabelled.

    Sizes and training are those published with the method. So is the selection of C of the support vector machine, by
    five-fold cross-validation among 10⁻⁴, …, 10⁴ and ∞; with fewer than 50 series, or fewer than 5 of a class, C is ∞.
    Series may differ in length. Channels are standardised with the statistics of the training data. `predict_proba` is
    1 for the predicted class and 0 for all others.

    Args:
        channels, depth, kernel_size, last_channels, representation_dim: as in `TemporalEncoder`.
        n_steps, batch_size: number of updates of the encoder, and series in one update.
        n_negatives: number of negatives for each anchor, K.
        learning_rate: learning rate of Adam.
        device, n_jobs, random_state, verbose: as in `FlowformerTimeSeriesClassifier`.

    Attributes after `fit`: `model_`, the encoder; `loss_curve_`, the loss of each update; and `machine_`, the support
    vector machine.

    >>> series = [np.random.randn(3, length) for length in (20, 35, 28, 31)]
    >>> TCNClassifier(depth=2, n_steps=1).fit(series, np.array(["a", "b", "a", "b"])).predict(series).shape
    (4,)
    """

    _tags: ClassVar[dict[str, Any]] = {"capability:multithreading": True}

    channels: int = 40
    depth: int = 10
    kernel_size: int = 3
    last_channels: int = 160
    representation_dim: int = 320
    n_steps: int = 2000
    batch_size: int = 10
    n_negatives: int = 10

    def _fit(self, X: Iterable[np.ndarray], y: np.ndarray) -> TCNClassifier:
        check_positive(n_steps=self.n_steps, batch_size=self.batch_size, n_negatives=self.n_negatives)
        series = self._prepare(X)
        random = optional_import("sklearn.utils", "ts").check_random_state(self.random_state)
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
        self._store_model(encoder)
        self.machine_ = self._machine(y, random).fit(represented, y)
        return self

    def _learn(self, encoder: nn.Module, series: list[Tensor]) -> None:
        """Train the encoder with the triplet loss."""
        optimizer = torch.optim.Adam(encoder.parameters(), self.learning_rate)
        batches: list[Tensor] = []
        self.loss_curve_: list[float] = []
        encoder.train()
        parts = {"encoder": encoder, "optimizer": optimizer, "batches": batches, "loss_curve": self.loss_curve_}
        with self._rounds(self.n_steps, "updates", parts, every=100) as updates:
            for _ in updates:
                if not batches:
                    batches += torch.randperm(len(series)).split(self.batch_size)
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
        # max_iter, since with C = ∞ the solver does not converge on classes that are not separable
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


def _uniform(low: int, high: int) -> int:
    """A random whole number from low to high, both included."""
    return int(torch.randint(low, high + 1, ()))


def _subseries(series: Tensor, length: int) -> Tensor:
    """A subseries of the given length at a random position."""
    start = _uniform(0, len(series) - length)
    return series[start : start + length]
