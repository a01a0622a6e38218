"""The config of a method without attention on the data of a recipe; `fit` runs it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..._utils import check_between, check_choice
from .. import recipes
from ..config import MAX_SEED, TrainConfig
from ..overrides import override

METHODS = {"series": ("dtw", "rocket", "xgboost", "lstm", "tcn"), "decision": ("bc", "awac", "dt")}
# the key of the method in config.json; it must not change, since folders are named after a digest of that file
_METHOD_KEY = "rival"


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


def _option(assignment: str) -> tuple[str, Any]:
    key, equals, text = assignment.partition("=")
    if not equals:
        raise ValueError(f"{assignment!r} is no option; accepted: key=value, such as n_kernels=1000.")
    try:
        return key, json.loads(text)
    except json.JSONDecodeError:
        return key, text
