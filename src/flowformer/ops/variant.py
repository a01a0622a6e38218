"""FlowVariant: which variant of Flow-Attention to compute, and presets for the paper and its released code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from .._utils import check_choice

FeatureMap = Literal["sigmoid", "elu+1", "relu", "relu+eps"]
Competition = Literal["softmax", "sigmoid", "none"]
Allocation = Literal["sigmoid", "softmax", "none"]
Competitors = Literal["tokens", "heads"]

_CHOICES = {
    "feature_map": get_args(FeatureMap),
    "competition": get_args(Competition),
    "allocation": get_args(Allocation),
    "competitors": get_args(Competitors),
}


@dataclass(frozen=True, slots=True)
class FlowVariant:
    """A variant of Flow-Attention; the default is the paper's, with the length factors of its released code.

    Args:
        feature_map: φ, the non-negative map of queries and keys; "relu+eps" adds `eps` to ReLU.
        competition: how sources compete: c = m·softmax(Ô), sigmoid(Ô), or 1 ("none").
        allocation: how sinks are gated: α = sigmoid(Î), n·softmax(Î), or 1 ("none").
        clamp: bounds Ô to ±clamp before the competition; the paper has no bound.
        eps: added to both sides of every dot product of the four flows. Must be positive, so that the result of a sink
            without incoming flow stays finite.
        flow_eps: added once more to each of the four flows, as the released vision code does.
        rescale: the factors m in c and n/m in α that make bidirectional attention independent of the length.
            False is Algorithm 1 to the letter. Causal attention follows Algorithm 2, which prints its factor D,
            either way.
        competitors: the axis of the softmax of the competition: the sources of a head ("tokens"), or the heads at a
            source ("heads"), as in the code released for the Long-Range Arena. With "heads", m·softmax sums to m at
            every source, so results are about m/H times as large. Bidirectional only, and only in the torch and
            reference backends.
        renormalize: divide by ⟨q, Σ c k⟩, the flow that a sink receives from competing sources, in place of I. The rows
            of the flow matrix then sum to α, as those of a softmax sum to 1. Without competition the two are equal.
            Required for `powers`, the learned exponents of c and α.

    >>> FlowVariant(clamp=1.0) == FlowVariant.named("core")
    True
    """

    feature_map: FeatureMap = "sigmoid"
    competition: Competition = "softmax"
    allocation: Allocation = "sigmoid"
    clamp: float | None = None
    eps: float = 1e-6
    flow_eps: float = 0.0
    rescale: bool = True
    competitors: Competitors = "tokens"
    renormalize: bool = False

    def __post_init__(self) -> None:
        for name, accepted in _CHOICES.items():
            check_choice(name, getattr(self, name), accepted)
        if self.clamp is not None and not self.clamp > 0:
            raise ValueError(f"clamp must be positive, or None for no bound, got {self.clamp!r}.")
        if not self.eps > 0:
            raise ValueError(f"eps must be positive, got {self.eps!r}: it keeps a sink that receives nothing finite.")
        if not self.flow_eps >= 0:
            raise ValueError(f"flow_eps must not be negative, got {self.flow_eps!r}.")

    @classmethod
    def named(cls, name: str) -> FlowVariant:
        """The variant of the paper or of one of its released implementations.

        >>> FlowVariant.named("rl").clamp
        10.0
        """
        check_choice("variant", name, PRESETS)
        return PRESETS[name]

    def as_options(self) -> dict[str, Any]:
        """The fields by name, as `reference.py` takes them. Dynamo of torch 2.11 does not trace dataclasses.asdict."""
        return {name: getattr(self, name) for name in self.__slots__}

    def as_args(self) -> tuple[Any, ...]:
        """The fields in order, as scalar arguments of a registered operator.

        The last two, `competitors` and `renormalize`, are left out, since not every operator supports them.
        """
        flows = self.clamp, self.eps, self.flow_eps, self.rescale
        return self.feature_map, self.competition, self.allocation, *flows

    @property
    def has_operator(self) -> bool:
        """Whether the torch backend has an operator for this variant; if not, it runs plain operators with autograd."""
        return self.competitors == "tokens" and not self.renormalize


# "core" also describes the released GPT module; the published time-series code has neither a clamp nor a mask.
PRESETS = {
    "paper": FlowVariant(rescale=False),
    "core": FlowVariant(clamp=1.0),
    "vision": FlowVariant(clamp=1.0, flow_eps=1e-6),
    "language": FlowVariant(clamp=5.0),
    "rl": FlowVariant(clamp=10.0),
    "timeseries": FlowVariant(),
    "lra": FlowVariant(feature_map="relu+eps", competitors="heads"),
}

# the paper's ablations: by name, the fields in which each differs from the full model
ABLATIONS: dict[str, dict[str, Any]] = {
    "flow-without-competition": {"competition": "none"},
    "flow-without-allocation": {"allocation": "none"},
    "flow-elu+1": {"feature_map": "elu+1"},
    "flow-relu": {"feature_map": "relu"},
    "flow-sigmoid-sigmoid": {"competition": "sigmoid"},
    "flow-sigmoid-softmax": {"competition": "sigmoid", "allocation": "softmax"},
    "flow-softmax-softmax": {"allocation": "softmax"},
}
