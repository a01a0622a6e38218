"""The learned parameters of a linearized attention layer: feature projections, powers, gain, and window weights.

Shapes: B batch, H query heads, H_kv key/value heads, N tokens, D head dimension.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import initialization as init

from ..._utils import check_kinds, check_literals, check_options, is_whole
from ...ops import FlowVariant, checks

Features = Literal["none", "projection", "hedgehog"]
RENORMALIZED = FlowVariant(renormalize=True)
KEPT_SOFTMAX = "softmax"  # value of `layer.flow` for layers in keep_layers


@dataclass(frozen=True)
class Exchange:
    """The attention that replaces softmax in a model; saved as `flow_attention` in the model's config.

    Args:
        features: the feature map φ. "projection": a learned matrix per head, initially the identity, followed by the
            variant's feature map. "hedgehog": softmax([x, −x]) of the projection x, with twice as many features.
            "none": the variant's feature map alone.
        variant: variant of Flow-Attention. Its feature map is not used with hedgehog features, which are positive.
        powers: learn the exponents of competition and allocation per head. They start at 0, which is plain linear
            attention. Needs a variant with `renormalize`.
        gain: learn a factor per head on the result, initially 1.
        window: mix the result with a softmax over the tokens less than `window` away; 0 disables it.
        keep_layers: indices, from 0, of the attention layers that stay softmax.
    """

    features: Features = "hedgehog"
    variant: FlowVariant = RENORMALIZED
    powers: bool = True
    gain: bool = False
    window: int = 0
    keep_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_literals(self)
        check_kinds(self)
        variant = FlowVariant(**self.variant) if isinstance(self.variant, dict) else checks.variant(self.variant)
        object.__setattr__(self, "variant", variant)
        if not isinstance(self.keep_layers, Iterable) or not all(map(is_whole, self.keep_layers)):
            raise ValueError(f"keep_layers must be whole numbers, such as (0, 3), got {self.keep_layers!r}.")
        object.__setattr__(self, "keep_layers", tuple(sorted({int(index) for index in self.keep_layers})))
        if self.powers and not variant.renormalize:
            raise ValueError(f"powers=True needs a variant with renormalize=True, got {variant}. Pass powers=False.")
        if variant.competitors == "heads":
            raise ValueError('an exchange cannot have competitors="heads": heads of keys may be shared.')
        if self.window < 0:
            raise ValueError(f"window must be 0 for none, or a number of tokens, got {self.window}.")

    @classmethod
    def of(cls, config: Any) -> Exchange | None:
        """Read the exchange from the config of a model; None if it runs Flow-Attention without learned parameters."""
        saved = getattr(config, "flow_attention", None)
        if saved is None:
            return None
        check_options("flow_attention of the config", saved, [field.name for field in fields(cls)])
        return cls(**saved)

    def to_dict(self) -> dict[str, Any]:
        """All fields as values that config.json can store."""
        return asdict(self) | {"keep_layers": list(self.keep_layers)}


class FlowHeads(nn.Module):
    """The learned parameters of a linearized attention layer, its submodule `flow`.

    Initially the layer is linear attention with the features of the exchange, or, without `powers`, the variant itself.
    """

    # set during stage 1 of `flowformer.linearize`
    learns: bool = False  # whether the attention function runs the backward pass of `error`
    error: Tensor | None = None  # error of the last forward pass relative to softmax attention

    def __init__(self, exchange: Exchange, heads: int, key_heads: int, head_dim: int, **factory: Any) -> None:
        super().__init__()
        self.exchange, self.sizes = exchange, (heads, key_heads, head_dim)
        positive = exchange.features == "hedgehog"  # ReLU does not change positive features
        self.variant = replace(exchange.variant, feature_map="relu") if positive else exchange.variant

        def parameter(wanted: bool, *shape: int) -> nn.Parameter | None:
            return nn.Parameter(torch.empty(*shape, **factory)) if wanted else None

        projects = exchange.features != "none"
        self.query_projection = parameter(projects, heads, head_dim, head_dim)
        self.key_projection = parameter(projects, key_heads, head_dim, head_dim)
        self.powers = parameter(exchange.powers, 2, heads)
        self.gain = parameter(exchange.gain, heads)
        self.far = parameter(exchange.window > 0, heads, head_dim + 1)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise all parameters. The init functions of transformers skip parameters loaded from a checkpoint."""
        for projection in (self.query_projection, self.key_projection):
            if projection is not None:
                identity = torch.eye(self.sizes[2], device=projection.device, dtype=projection.dtype)
                init.copy_(projection, identity.expand_as(projection))
        if self.gain is not None:
            init.ones_(self.gain)
        for parameter in (self.powers, self.far):
            if parameter is not None:
                init.zeros_(parameter)

    def features(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Map queries (B, H, N, D) and keys (B, H_kv, N, D) to the features passed to `flow_attention`."""
        given = query.shape[1], key.shape[1], query.shape[3]
        if given != self.sizes:
            raise ValueError(
                f"this attention layer has (heads, key heads, head_dim) = {given}, but its config says {self.sizes}. "
                "A model whose layers differ from its config cannot be linearized."
            )
        return self._map(query, self.query_projection), self._map(key, self.key_projection)

    def _map(self, x: Tensor, projection: Tensor | None) -> Tensor:
        """Apply the projection of each head, and softmax([x, −x]) for hedgehog features."""
        if projection is None:
            return x
        x = x @ projection.to(x.dtype)
        if self.exchange.features == "projection":
            return x
        softmax_dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        return torch.cat([x, -x], -1).softmax(-1, dtype=softmax_dtype).to(x.dtype)

    def near_share(self, query: Tensor, log_near: Tensor, outside: Tensor) -> Tensor:
        """Return the weight of the window in the result, (B, H, N); the flow has the rest.

        A softmax over all tokens gives the window the weight s_in / (s_in + s_out), where s_in and s_out are the sums
        of exponentiated scores inside and outside the window. log(s_out / number of tokens outside) is learned as a
        linear function of the query, initially 0. Without tokens outside the weight is 1: exactly softmax.

        Args:
            log_near: (B, H, N), log s_in.
            outside: (B, N), number of visible tokens outside the window.
        """
        assert self.far is not None
        weight, bias = self.far[:, :-1, None].to(query.dtype), self.far[:, -1, None]
        log_far = (query @ weight)[..., 0] + bias + outside[:, None].to(log_near.dtype).log()
        return (log_near - log_far).sigmoid()

    def extra_repr(self) -> str:
        return f"{self.exchange}"


def sizes_of(layer: nn.Module, config: Any) -> tuple[int, int, int]:
    """Return the heads, key heads and head_dim of an attention layer, from its attributes or else from its config."""

    def first(*names: str) -> int | None:
        values = (getattr(owner, name, None) for owner in (layer, config) for name in names)
        return next((value for value in values if isinstance(value, int) and value > 0), None)

    heads = first("num_attention_heads", "num_heads", "n_head")
    if heads is None:
        raise NotImplementedError(
            f"cannot tell how many heads {type(layer).__name__} has: neither it nor its config has num_attention_heads."
        )
    groups = getattr(layer, "num_key_value_groups", None)
    key_heads = heads // groups if isinstance(groups, int) and groups > 0 else first("num_key_value_heads") or heads
    # in multi-head latent attention, `head_dim` counts the rotary features only; qk_head_dim counts all
    head_dim = first("qk_head_dim", "head_dim", "attention_head_size") or config.hidden_size // heads
    return heads, key_heads, head_dim
