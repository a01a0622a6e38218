"""The methods of the paper's reinforcement-learning table, by name: policies learnt from recorded episodes.

Actions must be in [-1, 1], as in D4RL. All methods need the extra "rl".
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch import Tensor, nn

from ..._utils import check_choice, check_options, check_positive
from ...data.offline_rl import Windows
from ...integrations.gymnasium import DecisionPolicy
from ...models.decision import FlowformerDecision
from .awac import AWAC
from .behaviour_cloning import BehaviourCloning
from .decision_transformer import DecisionTransformer

if TYPE_CHECKING:
    from .resume import Part, ResumableLoop

_CHECK_EVERY = 1000  # updates between two checks of the parameters, which synchronise the device
_CHECKPOINT_EVERY = 5000  # updates between two checkpoints


class Learner(Protocol):
    """A method that learns from recorded episodes: `update` trains `model` for one step and returns the loss.

    `parts` is all that an update changes: modules, optimisers and schedules, by name.
    """

    model: Any

    @property
    def parts(self) -> dict[str, Part]: ...

    def update(self) -> Tensor: ...


LEARNERS: dict[str, Callable[..., Learner]] = {"bc": BehaviourCloning, "awac": AWAC, "dt": DecisionTransformer}


def policies() -> list[str]:
    """The names that `policy` accepts."""
    return list(LEARNERS)


def policy_options(name: str) -> dict[str, Any] | None:
    """The options that `policy` accepts for a name, with their types; None if the method checks its options itself."""
    check_choice("policy", name, LEARNERS)
    arguments = inspect.signature(LEARNERS[name], eval_str=True).parameters.values()
    if any(each.kind is each.VAR_KEYWORD for each in arguments):
        return None
    own = {each.name: each.annotation for each in arguments if each.kind is each.KEYWORD_ONLY}
    return {"steps": int, "device": str, **own}


def policy(
    name: str,
    windows: Windows,
    *,
    target_return: float | None = None,
    steps: int = 100_000,
    seed: int = 0,
    device: str = "auto",
    report: Callable[[int, Tensor], None] = lambda step, loss: None,
    loop: ResumableLoop | None = None,
    **options: Any,
) -> DecisionPolicy:
    """Learn a policy from recorded episodes, which `integrations.gymnasium.evaluate` can play.

    Args:
        name: "bc", behaviour cloning; "awac", advantage-weighted actor-critic; or "dt", the Decision Transformer.
        windows: the episodes, such as `data.load("d4rl/…").train`.
        target_return: the return-to-go at the start of an episode; needed by "dt", ignored by the others.
        steps: number of updates.
        seed: seed of all random numbers.
        device: the device for training and playing; "auto" is a GPU if there is one.
        report: called after each update with its number and its loss.
        loop: the loop of a fit in a folder, which has checkpoints; None for a plain loop.
        options: options of `BehaviourCloning`, `AWAC` or `DecisionTransformer`.
    """
    accepted = policy_options(name)
    if accepted is not None:
        check_options(name, options, accepted)
    check_positive(steps=steps)
    if name == "dt" and target_return is None:
        raise ValueError(
            "dt needs target_return, the return that its policy is to reach; the paper's for an environment is "
            'flowformer.data.environments.environment_of("Hopper-v5").target_return.'
        )
    where = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
    with torch.random.fork_rng([where] if where.type == "cuda" else []):
        torch.manual_seed(seed)
        learner = LEARNERS[name](windows, where, **options)
        plain = nullcontext(range(1, steps + 1))
        with plain if loop is None else loop.rounds(steps, "updates", learner.parts, _CHECKPOINT_EVERY) as numbers:
            for step in numbers:
                loss = learner.update()
                if step % _CHECK_EVERY == 0 or step == steps:
                    _check_parameters(name, learner.model, step)
                report(step, loss)
    return DecisionPolicy(
        # all models have the methods that DecisionPolicy calls
        cast(FlowformerDecision, learner.model.eval()),
        target_return or 0.0,  # read by the Decision Transformer only
        state_mean=windows.state_mean.numpy(),
        state_std=windows.state_std.numpy(),
        window=windows.window,
    )


def _check_parameters(name: str, model: nn.Module, step: int) -> None:
    if not all(parameter.isfinite().all() for parameter in model.parameters()):
        raise FloatingPointError(
            f"{name} diverged: at update {step} parameters are not finite. Pass a smaller learning_rate."
        )
