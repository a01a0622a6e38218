"""`flowformer fit`: fit a method without attention on the data of a recipe, recorded like a run of `flowformer train`.

A method is evaluated only once, after the fit, so there is no best evaluation to select.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

import numpy as np
import torch
from torch import Tensor

from ... import data
from ..._utils import check_between, check_choice, check_options, is_whole, write_atomically
from ...data import Splits
from .. import recipes, tasks
from ..claims import claimed
from ..config import MAX_SEED, TrainConfig
from ..loop import CONFIG, RESULT, Report
from ..loop import train as train_recipe
from ..overrides import KINDS, override
from ..record import RunLog, peak_memory, provenance, write_provenance

METHODS = {"series": ("dtw", "rocket", "xgboost", "lstm", "tcn"), "decision": ("bc", "awac", "dt")}
_NETWORKS = ("lstm", "tcn", "bc", "awac")
_LOG_EVERY = 1000
# the key of the method in config.json; it must not change, since folders are named after a digest of that file
_METHOD_KEY = "rival"
_JSON_KINDS = {**KINDS, dict: "an object", NoneType: "null"}
_FOLDER_TAKEN = "{} has a run already. Choose another folder."


@dataclass(frozen=True)
class MethodConfig:
    """A method on the data of a recipe.

    Args:
        recipe: name of the recipe.
        method: name of the method, one of `METHODS`.
        task, data, data_options: as in the config of the recipe.
        episodes: number of episodes to play, `final_episodes` of the recipe.
        options: options of the method.
        seed: seed of all random numbers.
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
        """Folder name of the run, unique to the config."""
        digest = hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()[:8]
        return f"{self.recipe}/{self.method}-seed{self.seed}-{digest}"

    def to_dict(self) -> dict[str, Any]:
        """The content of config.json."""
        return {_METHOD_KEY if name == "method" else name: value for name, value in dataclasses.asdict(self).items()}


def method_of(fields: dict[str, Any]) -> str | None:
    """The method of a run without attention; None for a training run.

    Args:
        fields: the content of config.json.
    """
    return fields.get(_METHOD_KEY)


def configure(
    recipe: str, method: str, assignments: Sequence[str] = (), *, seed: int = 0
) -> MethodConfig | TrainConfig:
    """The config for `fit`. That of the Decision Transformer is the recipe's, with softmax attention.

    Args:
        recipe: the name of a recipe of time series or reinforcement learning.
        method: see `METHODS`.
        assignments: options of the method, each as key=value with a JSON value. The data options of the recipe, and
            final_episodes, are also accepted.

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
    if any(assignment.partition("=")[0] in ("seed", "random_state") for assignment in assignments):
        raise ValueError(f"the seed is no option of {method}; pass it as --seed, or as the argument seed.")
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


def _option(assignment: str) -> tuple[str, Any]:
    key, equals, text = assignment.partition("=")
    if not equals:
        raise ValueError(f"{assignment!r} is no option; accepted: key=value, such as n_kernels=1000.")
    try:
        return key, json.loads(text)
    except json.JSONDecodeError:
        return key, text
