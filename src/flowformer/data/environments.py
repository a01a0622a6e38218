"""The MuJoCo environments of the paper's reinforcement-learning table.

`offline_rl` reads their data, `integrations.gymnasium` runs the environments, `train.tasks` uses the target returns.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Environment:
    """A MuJoCo environment and D4RL's constants for it.

    Args:
        id: gymnasium's id without the version, such as "Hopper".
        target_return: the larger of the paper's two target returns; the smaller one is half of it.
        random_return, expert_return: D4RL's reference returns, normalised to scores 0 and 100.
        sizes: (steps, episodes) of each of D4RL's v2 files, by quality. Steps after the last complete episode are not
            counted: "medium" and "expert" have some, of which "medium-expert" repeats only those of "expert".
    """

    id: str
    target_return: float
    random_return: float
    expert_return: float
    sizes: dict[str, tuple[int, int]]


ENVIRONMENTS = {
    "halfcheetah": Environment(
        "HalfCheetah",
        12000.0,
        -280.178953,
        12135.0,
        {"medium": (1_000_000, 1000), "medium-replay": (202_000, 202), "medium-expert": (2_000_000, 2000)},
    ),
    "hopper": Environment(
        "Hopper",
        3600.0,
        -20.272305,
        3234.3,
        {"medium": (999_906, 2186), "medium-replay": (402_000, 2041), "medium-expert": (1_999_400, 3213)},
    ),
    "walker2d": Environment(
        "Walker2d",
        5000.0,
        1.629008,
        4592.3,
        {"medium": (999_995, 1190), "medium-replay": (302_000, 1093), "medium-expert": (1_999_209, 2190)},
    ),
}


def environment_of(name: str) -> Environment:
    """Return the environment with this gymnasium id, whatever its version.

    >>> environment_of("Walker2d-v4").target_return
    5000.0
    """
    environment = ENVIRONMENTS.get(name.rpartition("/")[2].partition("-")[0].lower())
    if environment is None:
        accepted = ", ".join(each.id for each in ENVIRONMENTS.values())
        raise ValueError(
            f"there are no target and reference returns for {name!r}; accepted: any version of {accepted}. For a "
            "minari dataset with its own, use minari.get_normalized_score."
        )
    return environment
