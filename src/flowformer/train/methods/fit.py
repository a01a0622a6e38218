"""`flowformer fit`: a method that is no attention, on the data of a recipe, recorded like a run of `flowformer train`.

A method is fitted once and evaluated once, when it is done: no evaluation is chosen.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ... import data
from ..._utils import check_between, check_choice, write_atomically
from ...data import Splits
from .. import recipes, tasks
from ..claims import claimed
from ..config import MAX_SEED, TrainConfig, override
from ..loop import CONFIG, RESULT, Report
from ..loop import train as train_recipe
from ..record import RunLog, peak_memory, provenance, write_provenance

METHODS = {"series": ("dtw", "rocket", "xgboost", "lstm", "tcn"), "decision": ("bc", "awac", "dt")}
_NETWORKS = ("lstm", "tcn", "bc", "awac")
_LOG_EVERY = 1000
# the key of the method in config.json; it must not change, since folders are named after a digest of that file
_KEY = "rival"
_TAKEN = "{} has a run already. Choose another folder."


@dataclass(frozen=True)
class MethodConfig:
    """A method on the data of a recipe.

    Args:
        recipe: its name.
        method: its name, one of `METHODS`.
        task, data, data_options: of the recipe.
        episodes: to play, as many as at the last evaluation of the recipe.
        options: of the method.
        seed: of everything random.
    """

    recipe: str
    method: str
    task: str
    data: str
    data_options: dict[str, Any]
    episodes: int
    options: dict[str, Any]
    seed: int

    def __post_init__(self) -> None:
        check_between(0, MAX_SEED, seed=self.seed)

    @property
    def name(self) -> str:
        """The folder of the run, a different one for every config."""
        digest = hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()[:8]
        return f"{self.recipe}/{self.method}-seed{self.seed}-{digest}"

    def to_dict(self) -> dict[str, Any]:
        """The content of config.json."""
        return {_KEY if name == "method" else name: value for name, value in dataclasses.asdict(self).items()}


def method_of(fields: dict[str, Any]) -> str | None:
    """The method that a config.json is of; None where it is of a recipe's training."""
    return fields.get(_KEY)


def configure(
    recipe: str, method: str, assignments: Sequence[str] = (), *, seed: int = 0
) -> MethodConfig | TrainConfig:
    """The config that `fit` takes. The Decision Transformer is the recipe itself, with softmax attention.

    Args:
        recipe: the name of a recipe of time series or reinforcement learning.
        method: see `METHODS`.
        assignments: options of the method, each as key=value with a value as in JSON; the recipe's options of its data,
            and final_episodes, are also accepted.

    >>> configure("uea/JapaneseVowels", "rocket", ["n_kernels=100"]).options
    {'n_kernels': 100}
    """
    config = recipes.get(recipe)
    if config.task not in METHODS:
        raise ValueError(
            f"no method is fitted on {recipe}; accepted: recipes uea/… and d4rl/…. To train an attention: flowformer "
            f"train {recipe} attention=NAME."
        )
    check_choice("method", method, METHODS[config.task])
    if method == "dt":
        return override(config, ["attention=softmax", f"seed={seed}", *assignments])
    shared = {*config.data_options, *(f"data_options.{key}" for key in config.data_options), "final_episodes"}
    of_recipe = [assignment for assignment in assignments if assignment.partition("=")[0] in shared]
    config = override(config, of_recipe)
    options = dict(_option(assignment) for assignment in assignments if assignment not in of_recipe)
    if config.task == "decision":
        options = {"steps": config.steps, **options}
    return MethodConfig(
        config.recipe, method, config.task, config.data, config.data_options, config.final_episodes, options, seed
    )


def fit(
    config: MethodConfig | TrainConfig,
    folder: Path,
    *,
    data_dir: str | Path | None = None,
    report: Report = lambda record: None,
) -> dict[str, Any]:
    """Fit, evaluate and write config.json, provenance.json, log.jsonl and result.json into a folder, as `train` does.

    A fit that was interrupted starts again; the Decision Transformer goes on from its newest checkpoint.

    Args:
        config: of `configure`.
        report: as of `loop.train`.
    """
    if isinstance(config, TrainConfig):
        if (folder / RESULT).exists():
            raise FileExistsError(_TAKEN.format(folder))
        return train_recipe(config, folder, data_dir=data_dir, resume=True, report=report)
    with claimed(folder):
        return _fit(config, folder, data_dir, report)


def _fit(config: MethodConfig, folder: Path, data_dir: str | Path | None, report: Report) -> dict[str, Any]:
    written, text = folder / CONFIG, json.dumps(config.to_dict(), indent=2) + "\n"
    if (folder / RESULT).exists() or (written.exists() and written.read_text() != text):
        raise FileExistsError(_TAKEN.format(folder))
    splits = data.load(config.data, data_dir, **config.data_options)
    device = _device(config)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(written, text)
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


def _classify(config: MethodConfig, splits: Splits) -> tuple[dict[str, float], dict[str, Any]]:
    from .classifiers import classifier

    (series, labels), (test_series, test_labels) = (_cases(part) for part in (splits.train, splits.test))
    estimator = classifier(config.method, random_state=config.seed, **config.options)
    start = time.perf_counter()
    estimator.fit(series, labels)
    seconds = time.perf_counter() - start
    accuracy = float(np.mean(estimator.predict(test_series) == test_labels))
    return {"accuracy": accuracy}, _facts(getattr(estimator, "model_", None), seconds)


def _play(config: MethodConfig, splits: Splits, log: RunLog, report: Report) -> tuple[dict[str, Any], dict[str, Any]]:
    from ...integrations.gymnasium import evaluate
    from .policies import policy

    environment = splits.info.environment
    envs = tasks.environments(environment, config.episodes)  # first, so that a missing package raises before training
    start = time.perf_counter()

    def updated(step: int, loss: Tensor) -> None:
        report({"kind": "step", "step": step})
        if step % _LOG_EVERY == 0:
            rate = step / (time.perf_counter() - start)
            record = {"kind": "train", "step": step, "loss": loss.item(), "steps_per_second": rate}
            log.write(record)
            report(record)

    windows: Any = splits.train
    learnt_policy = policy(config.method, windows, seed=config.seed, report=updated, **config.options)
    seconds = time.perf_counter() - start
    played = evaluate(learnt_policy, envs, config.episodes, seed=config.seed + 100)
    envs.close()
    scores = {
        "environment": environment,
        "episodes": config.episodes,
        "score": float(played.scores.mean()),
        "score_deviation": float(played.scores.std()),
    }
    return scores, _facts(learnt_policy.model, seconds)


def _facts(model: torch.nn.Module | None, seconds: float) -> dict[str, Any]:
    parameters = None if model is None else sum(p.numel() for p in model.parameters())
    return {"parameters": parameters, "training_seconds": round(max(seconds, 0.01), 2)}


def _cases(dataset: Any) -> tuple[list[np.ndarray], np.ndarray]:
    """Series as aeon takes them, each (channels, steps), and their labels."""
    cases = [dataset[i] for i in range(len(dataset))]
    return [case["series"].T.numpy() for case in cases], np.array([int(case["label"]) for case in cases])


def _device(config: MethodConfig) -> torch.device:
    """Where the method computes; only networks run on a GPU."""
    if config.method not in _NETWORKS:
        return torch.device("cpu")
    chosen = config.options.get("device", "auto")
    if chosen == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.empty(0, device=chosen).device
    except (RuntimeError, AssertionError) as error:  # the latter where torch is built without it
        raise ValueError(f"device {chosen!r} is not there; accepted: auto, cpu, or cuda with a GPU.") from error


def _option(assignment: str) -> tuple[str, Any]:
    key, equals, text = assignment.partition("=")
    if not equals:
        raise ValueError(f"{assignment!r} is no option; accepted: key=value, such as n_kernels=1000.")
    try:
        return key, json.loads(text)
    except json.JSONDecodeError:
        return key, text
