"""`flowformer fit`: fit a method without attention on the data of a recipe, recorded like a run of `flowformer train`.

A method is evaluated only once, after the fit, so there is no best evaluation to select.
"""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

import numpy as np
import torch
from torch import Tensor

from ... import data
from ..._utils import check_options, is_whole, moved, write_atomically
from ...data import Splits
from .. import checkpoints, tasks
from ..claims import Claim, claimed
from ..config import TrainConfig
from ..loop import Report
from ..loop import train as train_recipe
from ..overrides import KINDS
from ..record import CONFIG, RESULT, check_same_data, peak_memory, provenance, write_provenance
from .config import MethodConfig
from .resume import ResumableLoop

_NETWORKS = ("lstm", "tcn", "bc", "awac")
_LOG_EVERY = 1000
_JSON_KINDS = {**KINDS, dict: "an object", NoneType: "null"}
_FOLDER_TAKEN = "{} has a run already. Choose another folder."


def fit(
    config: MethodConfig | TrainConfig,
    folder: Path,
    *,
    data_dir: str | Path | None = None,
    report: Report = lambda record: None,
) -> dict[str, Any]:
    """Fit and evaluate a method, and return the result.

    Writes config.json, provenance.json, log.jsonl and result.json into the folder, as `loop.train` does. An interrupted
    fit of a neural network ("bc", "awac", "dt", "lstm", "tcn") continues from its newest checkpoint, with the same
    result bit for bit; that of another method starts over. Only "dt" keeps its checkpoints when it is finished.

    Args:
        config: the config, from `configure`.
        folder: the folder of the run.
        data_dir: the folder of all data sets.
        report: as in `loop.train`.

    Raises `Interrupted` after Ctrl-C or SIGTERM during the updates of a neural network, once a checkpoint is written.
    """
    if isinstance(config, TrainConfig):
        if (folder / RESULT).exists():
            raise FileExistsError(_FOLDER_TAKEN.format(folder))
        return train_recipe(config, folder, data_dir=data_dir, resume=True, report=report)
    with claimed(folder) as claim:
        assert claim is not None
        return _fit(config, folder, data_dir, report, claim)


def _fit(
    config: MethodConfig, folder: Path, data_dir: str | Path | None, report: Report, claim: Claim
) -> dict[str, Any]:
    config_file, text = folder / CONFIG, json.dumps(config.to_dict(), indent=2) + "\n"
    saved = folder / "checkpoints"
    is_resumed = checkpoints.latest(saved) is not None
    has_other_run = config_file.read_text() != text if config_file.exists() else is_resumed
    if (folder / RESULT).exists() or has_other_run:
        raise FileExistsError(_FOLDER_TAKEN.format(folder))
    _check_options(config)
    splits = data.load(config.data, data_dir, **config.data_options)
    if is_resumed:
        check_same_data(folder, config.data, splits.info)
    device = _device(config)
    loop = ResumableLoop(folder, device, claim, report)
    write_atomically(config_file, text)
    write_provenance(folder, provenance(splits.info, device, 1), resumed=is_resumed)

    steps = config.options.get("steps")
    try:
        scores, facts = _classify(config, splits, loop) if config.task == "series" else _play(config, splits, loop)
        loop.log.write({"kind": "eval", "split": "test", "step": steps or 0, **scores})
    except Exception:
        # a fit that failed does not reserve the folder, unless it can be resumed or the folder is another process's
        if not claim.lost and checkpoints.latest(saved) is None:
            config_file.unlink()
        raise
    finally:
        loop.log.close()
    result = {
        "recipe": config.recipe,
        "attention": config.method,
        "seed": config.seed,
        "metric": tasks.get(config.task).metric,
        "final": scores,
        "best": scores,
        "best_chosen_on": "nothing",
        "steps": steps,
        **facts,
        "steps_per_second": None if steps is None else round(steps / facts["training_seconds"], 3),
        "peak_memory_mib": round(peak_memory(device), 1),
    }
    write_atomically(folder / RESULT, json.dumps(result, indent=2) + "\n")
    shutil.rmtree(saved, ignore_errors=True)
    return result


def _check_options(config: MethodConfig) -> None:
    """Raise unless the method has all options and their values are of the declared types."""
    if config.task == "series":
        from .classifiers import classifier_options

        accepted: dict[str, Any] | None = classifier_options(config.method)
    else:
        from .policies import policy_options

        accepted = policy_options(config.method)
    if accepted is not None:
        check_options(config.method, config.options, accepted)
        for option, value in config.options.items():
            _check_kind(option, value, accepted[option])


def _check_kind(option: str, value: Any, hint: Any) -> None:
    """Raise unless a JSON value is of the type that an option declares. A type that JSON does not have is not checked.

    Args:
        hint: the type, or a union of types.
    """
    alternatives = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    kinds = [each for each in alternatives if each in _JSON_KINDS]
    given = int if is_whole(value) else type(value)
    if kinds and given not in kinds and not (given is int and float in kinds):
        accepted = " or ".join(_JSON_KINDS[each] for each in kinds)
        raise ValueError(f"{option} must be {accepted}, got {value!r}.")


def _classify(config: MethodConfig, splits: Splits, loop: ResumableLoop) -> tuple[dict[str, float], dict[str, Any]]:
    from ...integrations.aeon import NetworkEstimator
    from .classifiers import classifier

    (series, labels), (test_series, test_labels) = (_cases(part) for part in (splits.train, splits.test))
    estimator = classifier(config.method, random_state=config.seed, **config.options)
    if isinstance(estimator, NetworkEstimator):
        estimator.loop = loop
    start = time.perf_counter() - loop.seconds
    estimator.fit(series, labels)
    seconds = time.perf_counter() - start
    accuracy = float(np.mean(estimator.predict(test_series) == test_labels))
    return {"accuracy": accuracy}, _training_facts(getattr(estimator, "model_", None), seconds)


def _play(config: MethodConfig, splits: Splits, loop: ResumableLoop) -> tuple[dict[str, Any], dict[str, Any]]:
    from ...integrations.gymnasium import evaluate
    from .policies import policy

    environment = splits.info.environment
    envs = tasks.environments(environment, config.episodes)  # first, so that a missing package raises before training

    def after_update(step: int, loss: Tensor) -> None:
        if step % _LOG_EVERY == 0:
            rate = step / max(loop.seconds, 1e-9)
            record = {"kind": "train", "step": step, "loss": loss.item(), "steps_per_second": rate}
            loop.log.write(record)
            loop.report(record)

    windows: Any = splits.train
    learnt = policy(config.method, windows, seed=config.seed, report=after_update, loop=loop, **config.options)
    played = evaluate(learnt, envs, config.episodes, seed=config.seed + 100)
    envs.close()
    scores = {
        "environment": environment,
        "episodes": config.episodes,
        "score": float(played.scores.mean()),
        "score_deviation": float(played.scores.std()),
    }
    return scores, _training_facts(learnt.model, loop.seconds)


def _training_facts(model: torch.nn.Module | None, seconds: float) -> dict[str, Any]:
    parameters = None if model is None else sum(p.numel() for p in model.parameters())
    return {"parameters": parameters, "training_seconds": round(max(seconds, 0.01), 2)}


def _cases(dataset: Any) -> tuple[list[np.ndarray], np.ndarray]:
    """The series in aeon's layout, each (channels, steps), and their labels."""
    cases = [dataset[i] for i in range(len(dataset))]
    return [case["series"].T.numpy() for case in cases], np.array([int(case["label"]) for case in cases])


def _device(config: MethodConfig) -> torch.device:
    """The device on which the method computes; only neural networks run on a GPU."""
    if config.method not in _NETWORKS:
        return torch.device("cpu")
    chosen = config.options.get("device", "auto")
    if chosen == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.empty(0, device=chosen).device
    except (RuntimeError, AssertionError) as error:  # AssertionError if torch is built without CUDA
        raise ValueError(f"device {chosen!r} is not there; accepted: auto, cpu, or cuda with a GPU.") from error


__getattr__ = moved(
    __name__, {name: f"flowformer.train.methods.config.{name}" for name in ("METHODS", "configure", "method_of")}
)
