"""Evaluation of a model on a dataset."""

from __future__ import annotations

from functools import partial

import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from torch import nn
from torch.utils.data import Dataset

from .. import data
from ..data import Splits
from . import resident, tasks
from .batches import load_batches
from .config import TrainConfig
from .engine import Share


def dataset_size(dataset: Dataset) -> int:
    return len(dataset)  # type: ignore[arg-type]  # map-style, so it has a length, which torch does not declare


def padded_length(config: TrainConfig, splits: Splits) -> int | None:
    """The length to which all batches are padded; None pads each batch to its longest example."""
    return splits.info.max_length if config.pad_full else None


def evaluate(
    accelerator: Accelerator,
    objective: nn.Module,
    dataset: Dataset,
    config: TrainConfig,
    length: int | None,
    share: Share,
) -> dict[str, float]:
    """The metrics of a model on a whole dataset. Every example counts once, whatever the number of ranks.

    Args:
        length: see `padded_length`.
        share: which examples this rank evaluates.
    """
    task = tasks.get(config.task)
    metrics = {name: metric.to(accelerator.device) for name, metric in task.metrics(config).items()}
    size = config.eval_batch_size or config.batch_size
    batches = [
        range(first, min(first + size, dataset_size(dataset))) for first in range(0, dataset_size(dataset), size)
    ]
    # FSDP needs every rank in each forward pass: a rank without examples evaluates one that is not counted
    shares = [list(batch[share.rank :: share.size]) or [batch[0]] for batch in batches]
    if resident.applies(dataset, config, accelerator.device):
        loader = resident.batches(dataset, enumerate(shares), length, accelerator.device)
    else:
        collate = partial(data.collate, length=length)
        loader = load_batches(dataset, shares, collate, config.workers, accelerator.device)
    was_training = objective.training
    objective.eval()
    with torch.no_grad(), accelerator.autocast():
        for whole, batch in zip(batches, loader, strict=True):
            batch = send_to_device(batch, accelerator.device, non_blocking=True)
            predicted = objective(batch)
            if share.rank < len(whole) and share.counts:
                task.update(metrics, predicted, batch)
    objective.train(was_training)
    return {name: float(metric.compute()) for name, metric in metrics.items()}
