"""The attention class for timm's transformers, and the check that a model takes it.

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
    """Flow-Attention in the place of `timm.layers.Attention`: same arguments, same names of parameters.

    Only `num_heads` has no default: the `attn_layer` of a ConvNet, which is built without it, weighs channels.

    Weights of a softmax model load as they are. Fine-tune afterwards: this is a different function. `attn_drop` acts
    on the result, before the projection: there is no matrix of weights to drop from. timm's switches for fused
    attention and for export choose between our kernels and plain torch.

    timm takes a class here, not a partial: for another variant set `variant` in a subclass.

    >>> TimmFlowAttention(32, num_heads=4)(torch.randn(2, 10, 32)).shape
    torch.Size([2, 10, 32])
    """

    variant: ClassVar[FlowVariant | str] = _DEFAULT

    def __init__(self, dim: int, num_heads: int | None = None, **options) -> None:
        if num_heads is None:
            raise TypeError(
                "TimmFlowAttention needs num_heads, and this model gives none: its attn_layer weighs the channels of a "
                f"ConvNet, where Flow-Attention is no substitute. {_SERVED}"
            )
        super().__init__(dim, num_heads, **options)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """The tokens x (B, N, W) after attention.

        Args:
            attn_mask: which tokens take part; a masked token takes part in nothing. (B, 1, 1, N) or (1, 1, 1, N), or
                the pairs of tokens that both take part, (B, 1, N, N); bool, True = takes part, or a float mask to add.
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
        gate = getattr(self, "gate", None)  # timm has it since 1.0.28
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


_SERVED = (
    "The families that take attn_layer=TimmFlowAttention are those of timm's own attention class: vision_transformer, "
    "vision_transformer_hybrid, deit, naflexvit and vitamin (a table is in docs/timm.md)."
)


def check_attention(model: nn.Module, name: str) -> None:
    """Raise unless every block of a model that was asked for Flow-Attention has it."""
    attentions = [module for module in model.modules() if isinstance(module, Attention)]
    if not attentions or not all(isinstance(module, TimmFlowAttention) for module in attentions):
        raise _not_served(name)


def _not_served(name: str) -> NotImplementedError:
    return NotImplementedError(
        f"{name} does not take attn_layer=TimmFlowAttention: it would run its own attention. {_SERVED}"
    )


def _check_created_models() -> None:
    """Make timm.create_model check the models it was asked to build with TimmFlowAttention.

    Up to timm 1.0.30 Swin and others silently ignore arguments they do not know and would keep their own attention.
    create_model looks up its entry points in the registry that is wrapped here, however create_model was imported.
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
                raise _not_served(model_name) from error
            check_attention(model, model_name)
            return model

        return checked

    _factory.model_entrypoint = entrypoint


_check_created_models()
