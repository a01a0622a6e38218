"""FlowMultiheadAttention: Flow-Attention in the place of `torch.nn.MultiheadAttention`.

Shapes: B batch, N queries (sinks), M keys (sources), H heads, D head_dim, W = H·D.
"""

from __future__ import annotations

from dataclasses import asdict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops import FlowVariant, checks, flow_attention, reference
from .attention import check_tokens, split_heads

_DEFAULT = FlowVariant()


class FlowMultiheadAttention(nn.MultiheadAttention):
    """Flow-Attention behind the arguments, results and state dict of `torch.nn.MultiheadAttention`.

    It loads the state dict of an `nn.MultiheadAttention` and the other way round, and runs inside torch's transformer
    layers, whose own softmax kernels it keeps off. What differs from softmax:
        - `dropout` acts on the result, after the output projection: there is no matrix of weights to drop from.
        - Padding takes part in nothing. Where query and key are one tensor it is left out of the queries too.
        - `add_bias_kv` and `add_zero_attn` add sources that every query sees; they need is_causal=False.
        - Queries share the sources they compete for, so without is_causal a result depends on the other queries,
          also in cross-attention. Where a query must not see those after it, as in a decoder that attends to a
          memory, use `variant=sinks_apart(variant)`; `replace_attention` does so in nn.TransformerDecoderLayer.

    Args: as for `torch.nn.MultiheadAttention`, and
        variant: a FlowVariant or the name of one.

    >>> attention = FlowMultiheadAttention(32, 4, batch_first=True)
    >>> attention.load_state_dict(nn.MultiheadAttention(32, 4).state_dict())
    <All keys matched successfully>
    >>> x = torch.randn(2, 10, 32)
    >>> result, weights = attention(x, x, x)
    >>> result.shape, weights.shape
    (torch.Size([2, 10, 32]), torch.Size([2, 10, 10]))
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        variant: FlowVariant | str = _DEFAULT,
    ) -> None:
        if num_heads > 0 and embed_dim % num_heads:
            raise ValueError(f"embed_dim must be divisible by num_heads, got {embed_dim} and {num_heads}.")
        super().__init__(
            embed_dim,
            num_heads,
            dropout=dropout,
            bias=bias,
            add_bias_kv=add_bias_kv,
            add_zero_attn=add_zero_attn,
            kdim=kdim,
            vdim=vdim,
            batch_first=batch_first,
            device=device,
            dtype=dtype,
        )
        self.variant = checks.variant(variant)

    def _reset_parameters(self) -> None:
        self._qkv_same_embed_dim = self.in_proj_weight is not None
        super()._reset_parameters()
        # nn.TransformerEncoderLayer in eval mode takes the weights and computes softmax itself, and
        # nn.TransformerEncoder makes nested tensors for it, unless the module says that its projections are separate
        self._qkv_same_embed_dim = False

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend, with the layouts and conventions of `torch.nn.MultiheadAttention.forward`.

        Args:
            query: (N, embed_dim), (N, B, embed_dim), or with batch_first (B, N, embed_dim).
            key, value: likewise with M tokens of width kdim and vdim.
            key_padding_mask: (B, M), or (M,) without a batch: True, or -inf in a float mask, is left out.
            need_weights: also return the matrix W that Flow-Attention implies, R = W V. It costs N × M numbers, which
                the result does not need, and its rows do not sum to one.
            attn_mask: (N, M), the causal mask or one that blocks nothing, as bool (True blocks) or float (-inf blocks).
            average_attn_weights: return the mean of W over the heads.
            is_causal: each token sees itself and the past; attn_mask is then not looked at, and may be None.

        Returns: the result in the layout of the query, and W as (B, N, M) or, per head, (B, H, N, M), without B where
        the query has none; None without need_weights. Added sources stand last in W.
        """
        if query.is_nested or key.is_nested or value.is_nested:
            raise NotImplementedError(
                "got a nested tensor; accepted: padded tensors with a key_padding_mask. Inside an "
                "nn.TransformerEncoder that was built with another attention, set use_nested_tensor = False, as "
                "replace_attention does."
            )
        check_tokens(query, key, value, (self.embed_dim, self.kdim, self.vdim), ranks=(3, 2))
        is_batched, is_self_attention = query.dim() == 3, query is key

        q, k, v = self._project(query, key, value)  # (B, N, W), (B, M, W), (B, M, W)
        key_mask = _kept(key_padding_mask, k.shape[:2] if is_batched else k.shape[1:2])
        if key_mask is not None and not is_batched:
            key_mask = key_mask[None]
        query_mask = key_mask if is_self_attention else None
        if not is_causal and attn_mask is not None:
            is_causal = _is_causal_mask(attn_mask, (q.shape[1], k.shape[1]))
        k, v, key_mask = self._add_sources(k, v, key_mask, is_causal)

        q, k, v = (split_heads(x, self.num_heads) for x in (q, k, v))
        result = flow_attention(
            q, k, v, is_causal=is_causal, query_mask=query_mask, key_mask=key_mask, variant=self.variant
        )
        result = result.transpose(1, 2).flatten(2)
        result = result if self.batch_first or not is_batched else result.transpose(0, 1)
        result = F.dropout(self.out_proj(result), self.dropout, self.training)
        weights = self._weights(q, k, is_causal, query_mask, key_mask) if need_weights else None
        if weights is not None and average_attn_weights:
            weights = weights.mean(1)
        if is_batched:
            return result, weights
        return result[0], None if weights is None else weights[0]

    def extra_repr(self) -> str:
        return f"{self.embed_dim}, num_heads={self.num_heads}, batch_first={self.batch_first}, variant={self.variant}"

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        if self.in_proj_weight is None:
            weights = self.q_proj_weight, self.k_proj_weight, self.v_proj_weight
        else:
            weights = self.in_proj_weight.chunk(3)
        if self.in_proj_weight is not None and query is key and key is value:
            projected = F.linear(query, self.in_proj_weight, self.in_proj_bias).chunk(3, -1)
        else:
            projected = tuple(map(F.linear, (query, key, value), weights, biases))
        if query.dim() == 2:
            return [x[None] for x in projected]
        return [x if self.batch_first else x.transpose(0, 1) for x in projected]

    def _add_sources(
        self, k: Tensor, v: Tensor, key_mask: Tensor | None, is_causal: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        keys = [] if self.bias_k is None else [self.bias_k]
        values = [] if self.bias_v is None else [self.bias_v]
        if self.add_zero_attn:
            keys, values = [*keys, k.new_zeros(1, 1, k.shape[-1])], [*values, v.new_zeros(1, 1, v.shape[-1])]
        if not keys:
            return k, v, key_mask
        if is_causal:
            raise NotImplementedError(
                "add_bias_kv and add_zero_attn add sources that have no place in a sequence; causal attention accepts "
                "neither. Build the module without them, or use is_causal=False."
            )
        k = torch.cat([k, *(each.to(k.dtype).expand(k.shape[0], 1, -1) for each in keys)], 1)
        v = torch.cat([v, *(each.to(v.dtype).expand(v.shape[0], 1, -1) for each in values)], 1)
        return k, v, None if key_mask is None else F.pad(key_mask, (0, len(keys)), value=True)

    def _weights(
        self, q: Tensor, k: Tensor, is_causal: bool, query_mask: Tensor | None, key_mask: Tensor | None
    ) -> Tensor:
        options = asdict(self.variant)
        with torch.autocast(q.device.type, enabled=False):
            if is_causal:
                weights = reference.causal_weights(q, k, key_mask, **options)
            else:
                weights = reference.bidirectional_weights(q, k, query_mask, key_mask, **options)
        return weights.to(q.dtype)


def _kept(key_padding_mask: Tensor | None, shape: torch.Size) -> Tensor | None:
    """Which keys take part, from a mask of torch's convention: True or -inf is left out."""
    if key_padding_mask is None:
        return None
    if key_padding_mask.shape != shape:
        raise ValueError(f"key_padding_mask must have shape {tuple(shape)}, got {tuple(key_padding_mask.shape)}.")
    if key_padding_mask.dtype == torch.bool:
        return ~key_padding_mask
    if not key_padding_mask.is_floating_point():
        raise TypeError(f"key_padding_mask must be bool or float, got {key_padding_mask.dtype}. Pass mask.bool().")
    kept = key_padding_mask == 0
    if _is_readable(key_padding_mask) and not (kept | key_padding_mask.isneginf()).all():
        raise NotImplementedError(
            "a float key_padding_mask may hold 0 (takes part) and -inf (left out) only: other values would bias the "
            "keys of a softmax, and there is none here."
        )
    return kept


def _is_causal_mask(attn_mask: Tensor, shape: tuple[int, int]) -> bool:
    """Whether the mask is the causal one (True) or blocks nothing (False); there is no linear form of any other."""
    if not _is_readable(attn_mask):
        raise NotImplementedError(
            "the values of attn_mask cannot be read while the graph is compiled or captured. Pass is_causal=True for "
            "the causal mask, or attn_mask=None for no mask."
        )
    if attn_mask.shape == shape:
        blocked = attn_mask if attn_mask.dtype == torch.bool else attn_mask.isneginf()
        if bool((blocked | (attn_mask == 0)).all()):
            if not bool(blocked.any()):
                return False
            if shape[0] == shape[1] and bool((blocked == torch.ones_like(blocked).triu(1)).all()):
                return True
    raise NotImplementedError(
        f"attn_mask of shape {tuple(attn_mask.shape)} is neither the causal mask of shape {shape} nor empty, and a "
        "general matrix of queries by keys has no linear form. Pass is_causal=True for the causal mask, and padding as "
        "key_padding_mask."
    )


def _is_readable(x: Tensor) -> bool:
    return not torch.compiler.is_compiling() and not (x.is_cuda and torch.cuda.is_current_stream_capturing())
