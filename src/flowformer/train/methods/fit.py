"""`flowformer fit`: fit a method without attention on the data of a recipe, recorded like a run of `flowformer train`.

A method is evaluated only once, after the fit, so there is no best evaluation to select.
"""

from __future__ import annotations

import json
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
from .. import tasks
from ..claims import claimed
from ..config import TrainConfig
from ..loop import Report
from ..loop import train as train_recipe
from ..overrides import KINDS
from ..record import CONFIG, RESULT, RunLog, peak_memory, provenance, write_provenance
from .config import MethodConfig

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
    fit starts over; only the Decision Transformer continues from its newest checkpoint.

    Args:
        config: the config, from `configure`.
        folder: the folder of the run.
        data_dir: the folder of all data sets.
        report: as in `loop.train`.
    """
    if isinstance(config, TrainConfig):
        if (folder / RESULT).exists():
            raise FileExistsError(_FOLDER_TAKEN.format(folder))
        return train_recipe(config, folder, data_dir=data_dir, resume=True, report=report)
    with claimed(folder):
        return _fit(config, folder, data_dir, report)


def _fit(config: MethodConfig, folder: Path, data_dir: str | Path | None, report: Report) -> dict[str, Any]:
    config_file, text = folder / CONFIG, json.dumps(config.to_dict(), indent=2) + "\n"
    if (folder / RESULT).exists() or (config_file.exists() and config_file.read_text() != text):
        raise FileExistsError(_FOLDER_TAKEN.format(folder))
    _check_options(config)
    splits = data.load(config.data, data_dir, **config.data_options)
    device = _device(config)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(config_file, text)
    write_provenance(folder, provenance(splits.info, device, 1))
    log = RunLog(folder, 0, active=True)

    steps = config.options.get("steps")
    report({"kind": "start", "step": 0, "steps": steps})
    try:
        if config.task == "series":
            scores, facts = _classify(config, splits)
        else:
            scores, facts = _play(config, splits, log, report)
        log.write({"kind": "eval", "split": "test", "step": steps or 0, **scores})
    except Exception:
        config_file.unlink()  # a fit that failed does not reserve the folder, unlike one that was interrupted
        raise
    finally:
        log.close()
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


def _classify(config: MethodConfig, splits: Splits) -> tuple[dict[str, float], dict[str, Any]]:
    from .classifiers import classifier

    (series, labels), (test_series, test_labels) = (_cases(part) for part in (splits.train, splits.test))
    estimator = classifier(config.method, random_state=config.seed, **config.options)
    start = time.perf_counter()
    estimator.fit(series, labels)
    seconds = time.perf_counter() - start
    accuracy = float(np.mean(estimator.predict(test_series) == test_labels))
    return {"accuracy": accuracy}, _training_facts(getattr(estimator, "model_", None), seconds)


def _play(config: MethodConfig, splits: Splits, log: RunLog, report: Report) -> tuple[dict[str, Any], dict[str, Any]]:
    from ...integrations.gymnasium import evaluate
    from .policies import policy

    environment = splits.info.environment
    envs = tasks.environments(environment, config.episodes)  # first, so that a missing package raises before training
    start = time.perf_counter()

    def after_update(step: int, loss: Tensor) -> None:
        report({"kind": "step", "step": step})
        if step % _LOG_EVERY == 0:
            rate = step / (time.perf_counter() - start)
            record = {"kind": "train", "step": step, "loss": loss.item(), "steps_per_second": rate}
            log.write(record)
            report(record)

    windows: Any = splits.train
    learnt_policy = policy(config.method, windows, seed=config.seed, report=after_update, **config.options)
    seconds = time.perf_counter() - start
    played = evaluate(learnt_policy, envs, config.episodes, seed=config.seed + 100)
    envs.close()
    scores = {
        "environment": environment,
        "episodes": config.episodes,
        "score": float(played.scores.mean()),
        "score_deviation": float(played.scores.std()),
    }
    return scores, _training_facts(learnt_policy.model, seconds)


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
