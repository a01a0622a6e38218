"""The cases of the fuzzer, and how they are drawn.

Properties that kernels are compiled for (dtype, widths, masks …) are drawn as a configuration; lengths, values and
everything else are drawn for each case of it, so that many cases share a compilation.
"""

from __future__ import annotations

import json
import math
from dataclasses import MISSING, asdict, dataclass, field, fields
from random import Random
from typing import Any, NamedTuple

from ..ops.variant import PRESETS, FlowVariant

KINDS = ("bidirectional", "causal", "recurrent", "packed", "packed_causal")
LAYOUTS = ("contiguous", "bnhd", "sliced", "offset", "expanded", "turned")
MASKS = ("random", "prefix", "suffix", "rows")
COMMON_DIMS = (16, 32, 64, 64, 128)
ODD_DIMS = (1, 2, 3, 5, 7, 8, 15, 17, 24, 31, 33, 40, 48, 63, 65, 72, 80, 96, 100, 127, 129, 160, 192, 255, 256)
BOUNDARIES = tuple(power + step for power in (16, 32, 64, 128, 256, 512, 1024, 2048) for step in (-1, 0, 1))


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call, described by plain values; as JSON, the argument of --case."""

    backend: str
    kind: str
    dtype: str
    dim: int
    value_dim: int
    heads: int
    key_heads: int
    batch: int = 1
    sinks: int = 0  # tokens of a sequence; for packed kinds, the tokens after the last sequence
    sources: int = 0
    lengths: list[int] = field(default_factory=list)  # of packed sequences
    source_lengths: list[int] = field(default_factory=list)
    cuts: list[int] = field(default_factory=list)  # where a recurrent sequence is cut
    past: int = 0  # tokens before a recurrent sequence, passed as its state
    query_mask: str | None = None
    key_mask: str | None = None
    junk: bool = False  # NaN in masked tokens
    layouts: list[str] = field(default_factory=lambda: ["contiguous"] * 3)
    grad_layout: str = "contiguous"
    amplitude: float = 1.0  # of queries and keys
    scale: float | None = None
    variant: dict[str, Any] = field(default_factory=dict)  # fields of FlowVariant that differ from the default
    powers: bool = False  # only for renormalised variants; they require a gradient if any input does
    # letters of the inputs that require a gradient: q, k, v, s (state); e if the loss depends on the end state, too
    gradients: str = "qkv"
    autocast: str | None = None  # "same": all inputs have `dtype`; "mixed": all but the query, which is float32
    seed: int = 0

    @property
    def is_packed(self) -> bool:
        return self.kind.startswith("packed")

    @property
    def is_causal(self) -> bool:
        return "bidirectional" != self.kind != "packed"

    def to_json(self) -> str:
        """The case as JSON, without fields that have their default."""
        given = asdict(self)
        for each in fields(self):
            default = each.default_factory() if each.default_factory is not MISSING else each.default
            if given[each.name] == default:
                del given[each.name]
        return json.dumps(given)

    @classmethod
    def from_json(cls, text: str) -> Case:
        given = json.loads(text)
        unknown = set(given) - {each.name for each in fields(cls)}
        if unknown:
            raise ValueError(f"a case has no {', '.join(sorted(unknown))}; accepted: what a failing case prints.")
        return cls(**given)


class Limits(NamedTuple):
    """Limits on the size of cases, so that a device can check many of them."""

    numbers: int  # in all inputs and the result together
    longest: int  # length of a sequence
    dim: int
    heads: int
    large: int  # length of a sequence in the few large cases; 0: no large cases


LIMITS = {
    "cuda": Limits(2**24, 2100, 256, 16, 70_000),
    "cpu": Limits(2**19, 2100, 256, 16, 20_000),
    "interpreter": Limits(2**11, 40, 24, 2, 0),
}


def draw_configuration(random: Random, backend: str, limits: Limits) -> dict[str, Any]:
    """The fields of a Case that kernels are compiled for."""
    kind = random.choice(KINDS)
    dtypes = ["float32", "bfloat16", "bfloat16", "float16"]
    dtype = random.choice(dtypes if backend == "triton" else [*dtypes, "float64"])
    dim = _dim(random, limits)
    key_heads = min(random.choice([1, 1, 2, 2, 3, 4]), limits.heads)
    shared = min(random.choice([1, 1, 1, 2, 3, 4]), limits.heads // key_heads)
    configuration: dict[str, Any] = {
        "backend": backend,
        "kind": kind,
        "dtype": dtype,
        "dim": dim,
        "value_dim": dim if random.random() < 0.5 else _dim(random, limits),
        "key_heads": key_heads,
        "heads": key_heads * shared,
        "layouts": [random.choice(LAYOUTS)] * 3 if random.random() < 0.7 else random.choices(LAYOUTS, k=3),
        "variant": (variant := _variant(random)),
        "powers": _takes_powers(variant) and random.random() < 0.7,
        "scale": random.choice([None, None, 1.0]),  # 1.0 is a placeholder: `draw_case` draws the number
        "gradients": random.choice(["", "qkv", "qkv", "qkv", "qkv"]),
    }
    if "packed" not in kind:
        masked = random.choice(["", "", "q", "k", "qk"])
        if kind != "recurrent":
            configuration["query_mask"] = "random" if "q" in masked else None
        configuration["key_mask"] = "random" if "k" in masked else None
    if random.random() < 0.15:
        configuration["autocast"] = "mixed" if dtype.endswith("16") and random.random() < 0.5 else "same"
    return configuration


def draw_case(random: Random, configuration: dict[str, Any], limits: Limits) -> Case:
    """A random case of a configuration."""
    case = dict(configuration)
    kind, dim = case["kind"], case["dim"]
    for name in ("query_mask", "key_mask"):
        if case.get(name):
            case[name], case["junk"] = random.choice(MASKS), random.random() < 0.5
    if case["scale"] is not None:
        case["scale"] = random.choice([dim**-0.5, dim**-0.25, 0.125, 0.5, 0.5, 2.0, -0.7, 0.02])
    case["amplitude"] = random.choice([0.01, 0.2, 1.0, 1.0, 3.0, round(10 ** random.uniform(-2, math.log10(30)), 3)])
    if case["gradients"]:
        some = [name for name in "qkv" if random.random() < 0.5]
        case["gradients"] = "".join(some) if some and random.random() < 0.3 else "qkv"
        case["grad_layout"] = random.choice(["contiguous", "constant", *LAYOUTS])
    case["seed"] = random.randrange(2**31)

    token = case["heads"] * dim + case["key_heads"] * (dim + case["value_dim"]) + case["heads"] * case["value_dim"]
    room = max(limits.numbers // token, 1)  # tokens within the limit
    large = limits.large and random.random() < 0.02
    longest = min(limits.large, 4 * room) if large else min(limits.longest, room)
    if kind.startswith("packed"):
        count = min(random.choice([0, 1, 2, 3, 5, 9, 17]), limits.heads + 1)
        for name in ("lengths", "source_lengths"):
            case[name] = [_length(random, max(longest // max(count, 1), 1)) for _ in range(count)]
        case["sinks"], case["sources"] = (random.choice([0, 0, 1, 5, 40]) for _ in range(2))
        if kind == "packed_causal":
            case["source_lengths"], case["sources"] = case["lengths"], case["sinks"]
        return Case(**case)
    length = random.randrange(longest // 2, longest + 1) if large else _length(random, longest)
    case["sinks"] = case["sources"] = length
    if kind == "bidirectional" and random.random() < 0.4:
        case["sources"] = _length(random, longest)
    batch = random.choice([1, 1, 2, 3, 4, 7]) if random.random() < 0.97 else 0
    case["batch"] = min(batch, max(room // max(length, case["sources"], 1), 1))
    if kind == "recurrent":
        count = min(random.choice([0, 1, 1, 2, 4]), length)
        cuts = [random.randint(0, length) for _ in range(count)]
        if cuts and random.random() < 0.5:  # two single tokens after the first cut, as in decoding
            cuts += [min(cuts[0] + step, length) for step in (1, 2)]
        case["cuts"] = sorted(cuts)
        case["past"] = random.choice([0, 0, 1, 7, 40])
        if case["gradients"]:
            case["gradients"] += "s" * (case["past"] > 0 and random.random() < 0.7) + "e" * (random.random() < 0.6)
    return Case(**case)


def _dim(random: Random, limits: Limits) -> int:
    choices = random.choice([COMMON_DIMS, ODD_DIMS, range(1, limits.dim + 1)])
    return random.choice([dim for dim in choices if dim <= limits.dim] or [limits.dim])


def _length(random: Random, longest: int) -> int:
    """A random length: near 0, next to a block boundary, or any."""
    choice = random.random()
    if choice < 0.08:
        return random.choice([0, 1, 1, 2])
    boundaries = [length for length in BOUNDARIES if length <= longest]
    if choice < 0.7 and boundaries:
        return random.choice(boundaries)
    return random.randint(0, longest)


def _variant(random: Random) -> dict[str, Any]:
    if random.random() < 0.4:
        # competition among heads exists only in the torch backend and has no causal form
        presets = [preset for preset in PRESETS.values() if preset.competitors == "tokens"]
        return _differences(random.choice(presets))
    return _differences(
        FlowVariant(
            feature_map=random.choice(["sigmoid", "sigmoid", "elu+1", "relu"]),
            competition=random.choice(["softmax", "softmax", "sigmoid", "none"]),
            allocation=random.choice(["sigmoid", "sigmoid", "softmax", "none"]),
            clamp=random.choice([None, None, 0.9, 1.0, 3.0, 10.0]),
            eps=random.choice([1e-6, 1e-6, 1e-4, 1e-2]),
            flow_eps=random.choice([0.0, 0.0, 1e-6, 1e-3]),
            rescale=random.random() < 0.7,
            renormalize=random.random() < 0.4,
        )
    )


def _takes_powers(variant: dict[str, Any]) -> bool:
    competes, allocates = variant.get("competition", "softmax"), variant.get("allocation", "sigmoid")
    return variant.get("renormalize", False) and competes != "sigmoid" and allocates != "softmax"


def _differences(variant: FlowVariant) -> dict[str, Any]:
    default = FlowVariant()
    return {key: value for key, value in variant.as_options().items() if value != getattr(default, key)}
