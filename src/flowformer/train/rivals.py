"""Rivals without attention on the data of a recipe, recorded as a run is: `results` puts them beside the others.

A rival is fitted once and evaluated once, when it is done: nothing is chosen.
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

from .. import data
from .._utils import suggestion, write_atomically
from ..data import Splits
from . import recipes, tasks
from .claims import claimed
from .config import TrainConfig, override
from .loop import CONFIG, PROVENANCE, RESULT, Report
from .loop import train as train_recipe
from .record import RunLog, peak_memory, provenance

_LOG_EVERY = 1000


@dataclass(frozen=True)
class RivalConfig:
    """A rival on the data of a recipe.

    Args:
        recipe: its name.
        rival: the name of the rival, as `rivals_of` lists them.
        task, data, data_options: of the recipe.
        episodes: to play, as many as at the last evaluation of the recipe.
        options: of the rival.
        seed: of everything random.
    """

    recipe: str
    rival: str
    task: str
    data: str
    data_options: dict[str, Any]
    episodes: int
    options: dict[str, Any]
    seed: int

    @property
    def name(self) -> str:
        """A folder name of its own for every config."""
        digest = hashlib.sha256(json.dumps(dataclasses.asdict(self), sort_keys=True).encode()).hexdigest()[:8]
        return f"{self.recipe}/{self.rival}-seed{self.seed}-{digest}"


def rivals_of(task: str) -> list[str]:
    """The names of the rivals without attention; none for tasks in which the paper has none."""
    if task == "series":
        from ..baselines.timeseries import classifiers

        return classifiers()
    if task == "decision":
        from ..baselines.offline_rl import policies

        return policies()
    return []


def configure(recipe: str, rival: str, assignments: Sequence[str] = (), *, seed: int = 0) -> RivalConfig | TrainConfig:
    """What `run` takes. The Decision Transformer is the recipe itself, with softmax attention.

    Args:
        recipe: the name of a recipe of time series or reinforcement learning.
        rival: see `rivals_of`.
        assignments: options of the rival, each as key=value with a value as in JSON; the recipe's options of its data,
            and final_episodes, are also accepted.

    >>> configure("uea/JapaneseVowels", "rocket", ["n_kernels=100"]).options
    {'n_kernels': 100}
    """
    config = recipes.get(recipe)
    accepted = rivals_of(config.task)
    if not accepted:
        raise ValueError(
            f"{recipe} has no rivals without attention. Those with one: flowformer train {recipe} attention=NAME."
        )
    if rival not in accepted:
        raise ValueError(f"unknown rival {rival!r}{suggestion(rival, accepted)}; accepted: {', '.join(accepted)}.")
    if rival == "dt":
        return override(config, ["attention=softmax", f"seed={seed}", *assignments])
    shared = {*config.data_options, *(f"data_options.{key}" for key in config.data_options), "final_episodes"}
    of_recipe = [assignment for assignment in assignments if assignment.partition("=")[0] in shared]
    config = override(config, of_recipe)
    options = dict(_option(assignment) for assignment in assignments if assignment not in of_recipe)
    if config.task == "decision":
        options = {"steps": config.steps, **options}
    return RivalConfig(
        config.recipe, rival, config.task, config.data, config.data_options, config.final_episodes, options, seed
    )


def run(
    config: RivalConfig | TrainConfig,
    folder: Path,
    *,
    data_dir: str | Path | None = None,
    report: Report = lambda record: None,
) -> dict[str, Any]:
    """Fit, evaluate and write config.json, provenance.json, log.jsonl and result.json into a folder, as `train` does.

    Args:
        config: of `configure`.
        report: as of `loop.train`.
    """
    if isinstance(config, TrainConfig):
        return train_recipe(config, folder, data_dir=data_dir, report=report)
    with claimed(folder):
        return _run(config, folder, data_dir, report)


def _run(config: RivalConfig, folder: Path, data_dir: str | Path | None, report: Report) -> dict[str, Any]:
    written, text = folder / CONFIG, json.dumps(dataclasses.asdict(config), indent=2) + "\n"
    # a fit that was broken off begins anew
    if (folder / RESULT).exists() or (written.exists() and written.read_text() != text):
        raise FileExistsError(f"{folder} has a run already. Choose another folder.")
    splits = data.load(config.data, data_dir, **config.data_options)
    device = _device(config)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(written, text)
    write_atomically(folder / PROVENANCE, json.dumps(provenance(splits.info, device, 1), indent=2) + "\n")
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
        "attention": config.rival,
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


def _classify(config: RivalConfig, splits: Splits) -> tuple[dict[str, float], dict[str, Any]]:
    from ..baselines.timeseries import classifier

    (series, labels), (test_series, test_labels) = (_cases(part) for part in (splits.train, splits.test))
    estimator = classifier(config.rival, random_state=config.seed, **config.options)
    start = time.perf_counter()
    estimator.fit(series, labels)
    seconds = time.perf_counter() - start
    accuracy = float(np.mean(estimator.predict(test_series) == test_labels))
    return {"accuracy": accuracy}, _facts(getattr(estimator, "model_", None), seconds)


def _play(config: RivalConfig, splits: Splits, log: RunLog, report: Report) -> tuple[dict[str, Any], dict[str, Any]]:
    from ..baselines.offline_rl import policy
    from ..integrations.gymnasium import evaluate

    start = time.perf_counter()

    def learnt(step: int, loss: Tensor) -> None:
        report({"kind": "step", "step": step})
        if step % _LOG_EVERY == 0:
            rate = step / (time.perf_counter() - start)
            record = {"kind": "train", "step": step, "loss": loss.item(), "steps_per_second": rate}
            log.write(record)
            report(record)

    windows: Any = splits.train
    rival = policy(config.rival, windows, seed=config.seed, report=learnt, **config.options)
    seconds = time.perf_counter() - start
    environment = splits.info.environment
    envs = tasks.environments(environment, config.episodes)
    played = evaluate(rival, envs, config.episodes, seed=config.seed + 100)
    envs.close()
    scores = {
        "environment": environment,
        "episodes": config.episodes,
        "score": float(played.scores.mean()),
        "score_deviation": float(played.scores.std()),
    }
    return scores, _facts(rival.model, seconds)


def _facts(model: torch.nn.Module | None, seconds: float) -> dict[str, Any]:
    parameters = None if model is None else sum(p.numel() for p in model.parameters())
    return {"parameters": parameters, "training_seconds": round(max(seconds, 0.01), 2)}


def _cases(dataset: Any) -> tuple[list[np.ndarray], np.ndarray]:
    """Series as aeon takes them, each (channels, steps), and their labels."""
    cases = [dataset[i] for i in range(len(dataset))]
    return [case["series"].T.numpy() for case in cases], np.array([int(case["label"]) for case in cases])


def _device(config: RivalConfig) -> torch.device:
    """Where the rival computes: those that are no networks know the CPU only."""
    if config.rival not in ("lstm", "tcn", "bc", "awac"):
        return torch.device("cpu")
    chosen = config.options.get("device", "auto")
    return torch.device(("cuda" if torch.cuda.is_available() else "cpu") if chosen == "auto" else chosen)


def _option(assignment: str) -> tuple[str, Any]:
    key, equals, text = assignment.partition("=")
    if not equals:
        raise ValueError(f"{assignment!r} is no option; accepted: key=value, such as n_kernels=1000.")
    try:
        return key, json.loads(text)
    except json.JSONDecodeError:
        return key, text
