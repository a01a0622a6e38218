"""What the tests of training share: tiny data of every task, and a run of a second on series easy to tell apart."""

from __future__ import annotations

import torch

from flowformer.data import DataInfo, Splits
from flowformer.data.splits import Columns
from flowformer.models import ClassifierConfig, DecisionConfig, LMConfig, TimeSeriesConfig, VisionConfig
from flowformer.train import record
from flowformer.train.config import Optimiser, Schedule, TrainConfig


def waves(cases, seed):
    """Series of 8 to 12 steps; the class is the sign of their mean."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(2, (cases,), generator=generator)
    lengths = torch.randint(8, 13, (cases,), generator=generator).tolist()
    series = [
        torch.randn(length, 2, generator=generator) + 2.0 * label - 1
        for length, label in zip(lengths, labels.tolist(), strict=True)
    ]
    return Columns(series=series, label=labels)


SERIES = Splits(
    waves(48, 0), waves(24, 1), waves(24, 2), DataInfo("waves", "0", num_classes=2, num_features=2, max_length=12)
)
CONFIG = TrainConfig(
    recipe="waves",
    task="series",
    data="waves",
    model=TimeSeriesConfig(2, 2, 12, embed_dim=16, num_layers=1, num_heads=2, mlp_dim=32),
    optimiser=Optimiser("radam", lr=2e-2, clip=4.0),
    schedule=Schedule("cosine", warmup=2),
    steps=24,
    batch_size=8,
    eval_every=6,
    log_every=1,
    checkpoint_every=5,
)


def losses(folder):
    return [each["loss"] for each in record.read_log(folder) if each["kind"] == "train"]


class StopError(Exception):
    pass


class KilledError(BaseException):
    """The end of a process without notice."""


def stop_after(step):
    def report(event):
        if event["kind"] == "step" and event["step"] == step:
            raise StopError

    return report


def random_cases(task):
    """A tiny dataset of the form of a task, a model for it, and what the data says of itself."""
    g = torch.Generator().manual_seed(0)
    label = torch.randint(2, (8,), generator=g)
    tokens = [torch.randint(1, 11, (n,), generator=g) for n in (9, 12, 7, 12, 5, 12, 12, 8)]
    small = {"embed_dim": 16, "num_layers": 1, "num_heads": 2}
    if task == "tokens":
        model = ClassifierConfig(11, 2, 12, mlp_dim=16, **small)
        return Columns(tokens=tokens, label=label), model, {"num_classes": 2, "vocab_size": 11, "padding_id": 0}
    if task == "pairs":
        model = ClassifierConfig(11, 2, 12, mlp_dim=16, pooling="first", **small)
        columns = Columns(first=tokens, second=tokens[::-1], label=label)
        return columns, model, {"num_classes": 2, "vocab_size": 11, "padding_id": 0}
    if task == "images":
        model = VisionConfig(16, 2, 3, 2, channels=(8, 16), depths=(1, 1), num_heads=2)
        return Columns(image=torch.randn(8, 3, 16, 16, generator=g), label=label), model, {"num_classes": 2}
    if task == "language":
        model = LMConfig(11, mlp_dim=32, **small)
        return Columns(tokens=tokens), model, {"vocab_size": 11}
    model = DecisionConfig(3, 2, mlp_dim=32, window=12, **small)
    columns = Columns(
        returns_to_go=torch.randn(8, 12, 1, generator=g),
        states=torch.randn(8, 12, 3, generator=g),
        actions=torch.rand(8, 12, 2, generator=g) - 0.5,
        timesteps=torch.arange(12).expand(8, -1),
        mask=torch.arange(12) < torch.randint(1, 13, (8, 1), generator=g),
    )
    return columns, model, {"num_features": 3, "num_actions": 2, "environment": "Hopper-v4"}
