"""The attention class for timm's transformers, and the check that a model uses it.

Shapes: B images, N tokens, W width, H heads, D head_dim.
"""

from __future__ import annotations

import re
from functools import wraps
from typing import ClassVar

import torch
from timm.layers import Attention
from timm.models import _factory
from torch import Tensor, nn

from ...nn.masks import HUGE, require
from ...ops import FlowVariant, flow_attention

_DEFAULT = FlowVariant()


class TimmFlowAttention(Attention):
    """Drop-in replacement for `timm.layers.Attention`: same arguments, same parameter names.

    Only `num_heads` has no default: ConvNets, whose `attn_layer` is channel attention, do not pass it, and must fail.

    Weights of a softmax model load unchanged. Fine-tune afterwards: this is a different function. `attn_drop` acts on
    the result, before the projection: there is no weight matrix to apply it to. timm's switches for fused attention and
    for export select between our kernels and plain torch.

    timm accepts a class here, not a functools.partial. For another variant, set `variant` in a subclass.

    >>> TimmFlowAttention(32, num_heads=4)(torch.randn(2, 10, 32)).shape
    torch.Size([2, 10, 32])
    """

    variant: ClassVar[FlowVariant | str] = _DEFAULT

    def __init__(self, dim: int, num_heads: int | None = None, **options) -> None:
        if num_heads is None:
            raise TypeError(
                "TimmFlowAttention needs num_heads, and this model gives none: its attn_layer weighs the channels of a "
                f"ConvNet, where Flow-Attention is no substitute. {_SUPPORTED_FAMILIES}"
            )
        super().__init__(dim, num_heads, **options)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Return the tokens x (B, N, W) after attention.

        Args:
            attn_mask: padding mask, bool (True = takes part) or float (0, or -inf = masked): over tokens, (B, 1, 1, N)
                or (1, 1, 1, N), or over pairs of unmasked tokens, (B, 1, N, N) or (1, 1, N, N). A masked token is
                neither a query nor a key.
            is_causal: each token sees itself and the past.
        """
        mask = None if attn_mask is None else _token_mask(attn_mask, x)
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)  # (B, H, N, D)
        result = flow_attention(
            self.q_norm(q),
            self.k_norm(k),
            v,
            is_causal=is_causal,
            query_mask=mask,
            key_mask=mask,
            variant=self.variant,
            backend=None if self.fused_attn else "torch",
        )
        result = self.norm(self.attn_drop(result.transpose(1, 2).flatten(2)))
        gate = getattr(self, "gate", None)  # exists since timm 1.0.28
        if gate is not None:
            result = result * gate(x).sigmoid()
        return self.proj_drop(self.proj(result))

    def extra_repr(self) -> str:
        return f"variant={self.variant}"


def _token_mask(attn_mask: Tensor, x: Tensor) -> Tensor:
    batch, length = x.shape[0], x.shape[1]
    shape = tuple(attn_mask.shape)
    accepted = (batch, 1, 1, length), (1, 1, 1, length), (batch, 1, length, length), (1, 1, length, length)
    message = (
        f"Flow-Attention has no matrix of weights to mask, got an attn_mask of {attn_mask.dtype} and shape {shape}; "
        f"accepted: a mask of tokens, of shape {accepted[0]}, or of the pairs whose tokens both take part, of shape "
        f"{accepted[2]}, as bool (True = takes part) or float (0, or -inf where left out). For a causal model pass "
        "is_causal=True."
    )
    if shape not in accepted:
        raise NotImplementedError(message)
    kept = attn_mask
    if attn_mask.dtype != torch.bool:
        kept = attn_mask == 0
        require((kept | (attn_mask <= -HUGE)).all(), message)
    if kept.shape[2] == 1:
        tokens = kept[:, 0, 0]
    else:
        pairs = kept[:, 0]
        tokens = pairs.diagonal(dim1=1, dim2=2)
        require((pairs == (tokens[:, :, None] & tokens[:, None])).all(), message)
    return tokens.expand(batch, length)


_SUPPORTED_FAMILIES = (
    "The families that take attn_layer=TimmFlowAttention are those of timm's own attention class: vision_transformer, "
    "vision_transformer_hybrid, deit, naflexvit and vitamin (a table is in docs/timm.md)."
)


def check_attention(model: nn.Module, name: str) -> None:
    """Raise unless all attention modules of the model are TimmFlowAttention."""
    attentions = [module for module in model.modules() if isinstance(module, Attention)]
    if not attentions or not all(isinstance(module, TimmFlowAttention) for module in attentions):
        raise _unsupported_model(name)


def _unsupported_model(name: str) -> NotImplementedError:
    return NotImplementedError(
        f"{name} does not take attn_layer=TimmFlowAttention: it would run its own attention. {_SUPPORTED_FAMILIES}"
    )


def _check_created_models() -> None:
    """Make timm.create_model check that models built with attn_layer=TimmFlowAttention use it.

    Up to timm 1.0.30, Swin and other models silently ignore unknown arguments and would keep their own attention. We
    wrap the registry lookup inside create_model, so that the check works however create_model was imported.
    """
    lookup = _factory.model_entrypoint

    @wraps(lookup)
    def entrypoint(model_name: str, *args, **kwargs):
        create = lookup(model_name, *args, **kwargs)

        @wraps(create)
        def checked(*args, **options):
            layer = options.get("attn_layer")
            if not (isinstance(layer, type) and issubclass(layer, TimmFlowAttention)):
                return create(*args, **options)
            try:
                model = create(*args, **options)
            except TypeError as error:
                if not re.search("unexpected keyword argument.*attn_layer", str(error)):
                    raise
                raise _unsupported_model(model_name) from error
            check_attention(model, model_name)
            return model

        return checked

    _factory.model_entrypoint = entrypoint


_check_created_models()
