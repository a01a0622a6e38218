"""Evaluation of a model on a dataset, in training or again after the run."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from torch import nn
from torch.utils.data import Dataset

from .. import data
from .._utils import check_choice, read_json
from ..data import Splits
from . import resident, tasks
from .batches import load_batches
from .config import TrainConfig, load
from .engine import Share, build_accelerator
from .methods.config import method_of
from .record import CONFIG


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


def evaluate_run(
    run: Path, *, model: str = "final", split: str = "test", data_dir: str | Path | None = None
) -> dict[str, Any]:
    """Evaluate a model of a run again, in the precision of the run, and return its scores.

    Args:
        run: the folder of the run.
        model: "final" or "best".
        split: "test" or "valid".
        data_dir: the folder of all data sets.
    """
    config, task, trained = open_run(run, model)
    splits = data.load(config.data, data_dir, **config.data_options)
    check_choice("split", split, ("test", "valid"))
    dataset = getattr(splits, split)
    if dataset is None:
        raise ValueError(f"{config.data} has no validation part; accepted: test.")
    accelerator = build_accelerator(replace(config, parallel="ddp"))
    objective = accelerator.prepare(tasks.Objective(trained, task, config)).eval()
    played = task.evaluate(trained, splits, config)
    share = Share(accelerator.process_index, accelerator.num_processes)
    return (
        evaluate(accelerator, objective, dataset, config, padded_length(config, splits), share)
        if played is None
        else played
    )


def open_run(run: Path, model: str) -> tuple[Any, tasks.Task, Any]:
    """The config, the task and the trained model of a run."""
    if not (run / CONFIG).is_file():
        raise FileNotFoundError(f"{run} has no {CONFIG}; accepted: the folder of a run.")
    method = method_of(read_json(run / CONFIG))
    if method is not None:
        raise NotImplementedError(f"{run} has the scores of {method}, but no model: fit it again with flowformer fit.")
    config = load(run / CONFIG)
    task = tasks.get(config.task)
    check_choice("model", model, ("final", "best"))
    try:
        return config, task, type(task.build(config)).from_pretrained(run / model)
    except FileNotFoundError as error:
        written = "when the run ends" if model == "final" else "at the first evaluation"
        raise FileNotFoundError(
            f"{run} has no {model} model yet: it is written {written}. Go on with the run: flowformer train "
            f"{config.recipe} with its overrides, --out {run} and --resume."
        ) from error
