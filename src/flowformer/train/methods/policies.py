"""The methods of the paper's reinforcement-learning table, by name: learnt from recorded episodes.

Actions are expected in [-1, 1], as those of D4RL are. All need the extra "rl".
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from ..._utils import check_choice, check_options, check_positive
from ...data.offline_rl import Windows
from ...integrations.gymnasium import DecisionPolicy
from ...models.decision import FlowformerDecision
from .awac import AWAC
from .behaviour_cloning import BehaviourCloning
from .decision_transformer import DecisionTransformer


class Learner(Protocol):
    """What learns from recorded episodes: `model` is played, `update` improves it once and returns the loss."""

    model: Any

    def update(self) -> Tensor: ...


LEARNERS: dict[str, Callable[..., Learner]] = {"bc": BehaviourCloning, "awac": AWAC, "dt": DecisionTransformer}


def policies() -> list[str]:
    """What `policy` accepts."""
    return list(LEARNERS)


def policy(
    name: str,
    windows: Windows,
    *,
    target_return: float = 0.0,
    steps: int = 100_000,
    seed: int = 0,
    device: str = "auto",
    report: Callable[[int, Tensor], None] = lambda step, loss: None,
    **options: Any,
) -> DecisionPolicy:
    """Learn a policy from recorded episodes; `integrations.gymnasium.evaluate` plays what is returned.

    Args:
        name: "bc", behaviour cloning; "awac", advantage-weighted actor-critic; or "dt", the Decision Transformer.
        windows: the episodes, as `data.load("d4rl/…").train`.
        target_return: the return-to-go at the start of an episode, for "dt" only.
        steps: updates.
        seed: of everything random.
        device: where to learn and play; "auto" is a GPU if there is one.
        report: is called after each update with its number and its loss.
        options: of `BehaviourCloning`, `AWAC` or `DecisionTransformer`.
    """
    check_choice("policy", name, LEARNERS)
    known = inspect.getfullargspec(LEARNERS[name])
    if known.varkw is None:
        check_options(name, options, ["steps", "device", *known.kwonlyargs])
    check_positive(steps=steps)
    where = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
    with torch.random.fork_rng([where] if where.type == "cuda" else []):
        torch.manual_seed(seed)
        learner = LEARNERS[name](windows, where, **options)
        for step in range(1, steps + 1):
            report(step, learner.update())
    return DecisionPolicy(
        # all have what a policy asks of a model
        cast(FlowformerDecision, learner.model.eval()),
        target_return,
        state_mean=windows.state_mean.numpy(),
        state_std=windows.state_std.numpy(),
        window=windows.window,
    )
