"""The tasks: batches, losses and metrics of each family of the paper. The loop is independent of models and data.

Shapes: B batch, N tokens or steps, T steps of a trajectory.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy

from .._utils import check_choice, optional_import
from ..data import DataInfo, Splits
from ..data.environments import environment_of
from ..models import (
    FlowformerClassifier,
    FlowformerDecision,
    FlowformerDeiT,
    FlowformerLM,
    FlowformerPairClassifier,
    FlowformerTimeSeries,
    FlowformerVision,
)
from ..models.base import FlowModel
from ..models.lm import IGNORED
from ..models.vision import VisionLayer
from ..nn import FlowDecoderLayer, FlowEncoderLayer
from .config import TrainConfig

Batch = dict[str, Tensor]
_LAYERS = (FlowEncoderLayer, FlowDecoderLayer, VisionLayer)


@dataclass(frozen=True)
class Task:
    """A task: its models, their inputs, and how their outputs are scored.

    Args:
        models: the model classes; the class of a config selects one of them.
        inputs: keys of a batch in the order of the model's arguments; the argument of a missing key is None.
        metric: name of the score that selects the best evaluation.
        higher_is_better: whether the best score is the largest.
    """

    models: tuple[type[FlowModel], ...]
    inputs: tuple[str, ...]
    metric: str
    higher_is_better: bool
    # field of the model's config → field of DataInfo from which it is filled in
    sizes: ClassVar[dict[str, str]] = {
        "num_classes": "num_classes",
        "vocab_size": "vocab_size",
        "num_features": "num_features",
        "max_length": "max_length",
        "padding_id": "padding_id",
    }

    # keys of a batch that the loss needs besides the inputs
    targets: ClassVar[tuple[str, ...]] = ()

    def check_data(self, splits: Splits) -> None:
        """Raise unless the data have the keys that the task needs."""
        example = splits.train[0]
        absent = [key for key in (*self.inputs, *self.targets) if key not in example and not key.endswith("mask")]
        if absent:
            raise ValueError(
                f"{splits.info.name} has {', '.join(example)}, but the task needs {', '.join(absent)}. Pass data of "
                "the same kind as the recipe's."
            )

    def fitted(self, config: TrainConfig, info: DataInfo) -> TrainConfig:
        """The config with the model sizes that the data determine."""
        known = {field.name for field in dataclasses.fields(config.model)}
        sizes = {
            name: getattr(info, source)
            for name, source in self.sizes.items()
            if name in known and (getattr(info, source) is not None or name == "padding_id")
        }
        return replace(config, model=replace(config.model, **sizes))

    def build(self, config: TrainConfig) -> FlowModel:
        for model in self.models:
            if isinstance(config.model, model.config_class):
                return model(config.model)
        accepted = ", ".join(model.config_class.__name__ for model in self.models)
        raise TypeError(f"the task {config.task!r} takes a {accepted}, got a {type(config.model).__name__}.")

    def arguments(self, batch: Batch) -> list[Tensor | None]:
        return [batch.get(key) for key in self.inputs]

    def augmented(self, batch: Batch, config: TrainConfig) -> Batch:
        """A batch for training, with random changes that concern several of its examples."""
        return batch

    def count(self, batch: Batch) -> Tensor:
        """The number of terms in the loss of a batch: examples, tokens, or components of actions."""
        raise NotImplementedError

    def loss(self, model: Any, batch: Batch, config: TrainConfig) -> Tensor:
        """The sum of the losses of a batch."""
        raise NotImplementedError

    def part(self, batch: Batch, rank: int, size: int) -> Batch:
        """The part of a batch for rank `rank`, if sequences are cut over `size` ranks."""
        raise NotImplementedError

    def evaluate(self, model: Any, splits: Splits, config: TrainConfig, *, last: bool = True) -> dict[str, Any] | None:
        """The scores of a model, if they are not metrics over a dataset; None if `metrics` computes them.

        Args:
            last: whether this is the last evaluation of the run.
        """
        return None

    def metrics(self, config: TrainConfig) -> dict[str, Metric]:
        """The metrics of an evaluation, which `update` accumulates."""
        raise NotImplementedError

    def predict(self, model: Any, batch: Batch) -> Tensor:
        """The output of the model that `update` needs."""
        raise NotImplementedError

    def update(self, metrics: dict[str, Metric], predicted: Tensor, batch: Batch) -> None:
        """Add a batch, and its output of `predict`, to the metrics."""
        raise NotImplementedError

    def tokens(self, batch: Batch) -> int | Tensor:
        """The number of tokens of a batch without padding; as a tensor on the device, to avoid a synchronisation."""
        # each sequence of a pair has its own mask, and only if it is padded
        masks = {"first": "first_mask", "second": "second_mask"} if "first" in batch else {self.inputs[0]: "mask"}
        return sum(
            batch[mask].sum() if mask in batch else math.prod(batch[key].shape[:2]) for key, mask in masks.items()
        )


class Classification(Task):
    """Classification with one label per example; in training, images may be mixed (mixup, cutmix)."""

    targets: ClassVar[tuple[str, ...]] = ("label",)

    def augmented(self, batch: Batch, config: TrainConfig) -> Batch:
        if not (config.mixup or config.cutmix):
            return batch
        image, label = _mix(batch["image"], batch["label"], config)
        return {**batch, "image": image, "label": label}

    def count(self, batch: Batch) -> Tensor:
        # filled on the device: a copy from the host would synchronise
        return torch.full((), float(len(batch["label"])), device=batch["label"].device)

    def loss(self, model: Any, batch: Batch, config: TrainConfig) -> Tensor:
        label = batch["label"]
        smoothing = 0.0 if label.is_floating_point() else config.label_smoothing  # mixed labels are smoothed already
        logits = model(*self.arguments(batch))
        return F.cross_entropy(logits.float(), label, reduction="sum", label_smoothing=smoothing)

    def metrics(self, config: TrainConfig) -> dict[str, Metric]:
        classes = config.model.num_classes  # type: ignore[union-attr]  # the task's models have it
        metrics: dict[str, Metric] = {"accuracy": _accuracy(classes), "loss": _Mean()}
        if classes > 100:
            metrics["top5"] = _accuracy(classes, top_k=5)
        return metrics

    def predict(self, model: Any, batch: Batch) -> Tensor:
        return model(*self.arguments(batch)).float()

    def update(self, metrics: dict[str, Metric], predicted: Tensor, batch: Batch) -> None:
        label = batch["label"]
        for name, metric in metrics.items():
            if name == "loss":
                metric.update(F.cross_entropy(predicted, label, reduction="sum"), len(label))
            else:
                metric.update(predicted, label)

    def tokens(self, batch: Batch) -> int | Tensor:
        return len(batch["image"]) if "image" in batch else super().tokens(batch)


def _accuracy(classes: int, top_k: int = 1) -> Metric:
    # validating each batch would synchronise the device
    return MulticlassAccuracy(classes, top_k=top_k, average="micro", validate_args=False)


class LanguageModelling(Task):
    """Prediction of the next token. "perplexity" is per token, "bits" is the same loss in bits per token."""

    def count(self, batch: Batch) -> Tensor:
        return (self._targets(batch) != IGNORED).sum().float()

    def loss(self, model: Any, batch: Batch, config: TrainConfig) -> Tensor:
        return model.loss(batch["tokens"][:, :-1], self._targets(batch), reduction="sum")

    def part(self, batch: Batch, rank: int, size: int) -> Batch:
        length = batch["tokens"].shape[1] - 1
        start, stop = length * rank // size, length * (rank + 1) // size
        # the target of the last token is the first token of the next rank
        part = {key: batch[key][:, start : stop + 1] for key in ("tokens", "mask") if key in batch}
        return part | {key: batch[key] - start for key in ("context",) if key in batch}

    def metrics(self, config: TrainConfig) -> dict[str, Metric]:
        return {"loss": _Mean(), "bits": _Mean(), "perplexity": _Perplexity()}

    def predict(self, model: Any, batch: Batch) -> Tensor:
        return model.loss(batch["tokens"][:, :-1], self._targets(batch), reduction="sum")

    def update(self, metrics: dict[str, Metric], predicted: Tensor, batch: Batch) -> None:
        count = self.count(batch)
        metrics["loss"].update(predicted, count)
        metrics["bits"].update(predicted / math.log(2), count)
        metrics["perplexity"].update(predicted, count)

    @staticmethod
    def _targets(batch: Batch) -> Tensor:
        """The target of each token, (B, N): the next token; IGNORED for padding and for the context of evaluations."""
        targets = batch["tokens"][:, 1:]
        if "mask" in batch:
            targets = targets.masked_fill(~batch["mask"][:, 1:], IGNORED)
        if "context" in batch:
            position = torch.arange(targets.shape[1], device=targets.device)
            targets = targets.masked_fill(position < batch["context"][:, None], IGNORED)
        return targets


class _Mean(Metric):
    """The mean over all batches and ranks: the sum of the totals divided by the sum of the counts.

    Used instead of torchmetrics.MeanMetric, which checks each batch for NaN and so synchronises the device.
    """

    total: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in ("total", "count"):
            self.add_state(name, torch.zeros(()), "sum")

    def update(self, total: Tensor, count: Tensor | int) -> None:
        self.total += total
        self.count += count

    def compute(self) -> Tensor:
        return self.total / self.count


class _Perplexity(_Mean):
    """The exponential of a mean loss."""

    def compute(self) -> Tensor:
        return super().compute().exp()


class Decision(Task):
    """Prediction of actions in trajectories, trained with the squared error and evaluated by playing episodes."""

    sizes: ClassVar[dict[str, str]] = {"state_dim": "num_features", "action_dim": "num_actions", "window": "max_length"}

    def check_data(self, splits: Splits) -> None:
        super().check_data(splits)
        # what cannot be played or scored raises here, not at the first evaluation
        environment_of(splits.info.environment)
        environments(splits.info.environment, 1).close()

    def arguments(self, batch: Batch) -> list[Tensor | None]:
        returns, *others = super().arguments(batch)
        assert returns is not None
        return [returns.flatten(1), *others]  # (B, T, 1) → (B, T)

    def count(self, batch: Batch) -> Tensor:
        return (batch["mask"].sum() * batch["actions"].shape[-1]).float()

    def loss(self, model: Any, batch: Batch, config: TrainConfig) -> Tensor:
        error = (model(*self.arguments(batch)).action.float() - batch["actions"]).square()
        return error.masked_fill(~batch["mask"][..., None], 0).sum()

    def evaluate(self, model: Any, splits: Splits, config: TrainConfig, *, last: bool = True) -> dict[str, Any]:
        """Play episodes with the paper's target return of the environment, and with half of it.

        The scores include the environment, the number of episodes, and a "note" if a target return is above the returns
        of all episodes in the data, so that the model never saw such returns in training.
        """
        from ..integrations.gymnasium import DecisionPolicy, evaluate

        episodes = config.final_episodes if last else config.episodes
        environment = splits.info.environment
        target = environment_of(environment).target_return
        train: Any = splits.train
        best = float(train.returns.max())
        scores: dict[str, Any] = {"environment": environment, "episodes": episodes}
        unseen = [f"{each:.0f}" for each in (target, target / 2) if each > best]
        if unseen:
            scores["note"] = (
                f"target return {' and '.join(unseen)} above every episode of the data, the best {best:.0f}"
            )
        for key, target_return in (("score", target), ("score_half_target", target / 2)):
            envs = environments(environment, episodes)
            policy = DecisionPolicy(
                model,
                target_return,
                state_mean=train.state_mean.numpy(),
                state_std=train.state_std.numpy(),
                window=config.model.window,  # type: ignore[union-attr]  # the task's models have it
            )
            played = evaluate(policy, envs, episodes, seed=config.seed + 100)
            envs.close()
            scores[key] = float(played.scores.mean())
            scores[f"{key}_deviation"] = float(played.scores.std())
        return scores


def environments(name: str, episodes: int) -> Any:
    """A vector environment with one sub-environment per episode, at most a hundred."""
    gymnasium = optional_import("gymnasium", "rl")
    with warnings.catch_warnings():
        # gymnasium warns that v4 is out of date, but D4RL's data was recorded with its physics
        warnings.filterwarnings("ignore", message=".*is out of date", category=DeprecationWarning)
        try:
            return gymnasium.make_vec(name, num_envs=min(episodes, 100))
        except gymnasium.error.DependencyNotInstalled as error:
            raise ImportError(f"{name} cannot be played: {error}; pip install 'flowformer[rl]' brings it.") from error


TASKS: dict[str, Task] = {
    "tokens": Classification((FlowformerClassifier,), ("tokens", "mask"), "accuracy", True),
    "pairs": Classification(
        (FlowformerPairClassifier,), ("first", "second", "first_mask", "second_mask"), "accuracy", True
    ),
    "series": Classification((FlowformerTimeSeries,), ("series", "mask"), "accuracy", True),
    "images": Classification((FlowformerVision, FlowformerDeiT), ("image",), "accuracy", True),
    "language": LanguageModelling((FlowformerLM,), ("tokens", "mask"), "perplexity", False),
    "decision": Decision(
        (FlowformerDecision,), ("returns_to_go", "states", "actions", "timesteps", "mask"), "score", True
    ),
}


def get(name: str) -> Task:
    check_choice("task", name, TASKS)
    return TASKS[name]


class Objective(nn.Module):
    """A model and its loss as one module, so that DDP, FSDP and torch.compile see a single forward.

    Args:
        context: the ranks over which the sequences of a batch are cut. Each of them gets the whole batch and returns
            its whole loss, but the gradient of its own part only.
    """

    def __init__(self, model: FlowModel, task: Task, config: TrainConfig, context: DeviceMesh | None = None) -> None:
        super().__init__()
        self.model, self.task, self.config, self.context = model, task, config, context
        if context is not None:
            cast(FlowformerLM, model).cut_sequences(context)
        # accelerate wraps modules of these classes as FSDP units
        self._no_split_modules = sorted({type(part).__name__ for part in model.modules() if isinstance(part, _LAYERS)})

    def forward(self, batch: Batch) -> Tensor:
        """Return the sum of the losses in training mode, else the output that the metrics need."""
        if self.context is not None:
            batch = self.task.part(batch, self.context.get_local_rank(), self.context.size())
        if self.training:
            return self.task.loss(self.model, batch, self.config)
        return self.task.predict(self.model, batch)


def _mix(images: Tensor, label: Tensor, config: TrainConfig) -> tuple[Tensor, Tensor]:
    """Apply mixup or cutmix to a batch; return the mixed images and their soft labels."""
    if len(images) % 2:
        raise ValueError(
            f"mixup and cutmix mix images in pairs, got a micro-batch of {len(images)}. Pass a batch_size that gives "
            "every process and micro-batch an even number."
        )
    classes = config.model.num_classes  # type: ignore[union-attr]  # the task's models have it
    mixup = optional_import("timm.data.mixup", "timm")
    mix = mixup.Mixup(config.mixup, config.cutmix, label_smoothing=config.label_smoothing, num_classes=classes)
    # timm mixes image i with image B - 1 - i, in place
    return mix(images.clone(), label)
