"""FlowMultiheadAttention: a drop-in replacement for `torch.nn.MultiheadAttention`.

Shapes: B batch, N queries (sinks), M keys (sources), H heads, D head_dim, W = H·D.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops import FlowVariant, checks, flow_attention, flow_attention_varlen, reference
from ..ops.common import without_autocast
from ..ops.nested import Sequences, check_same_lengths
from .attention import check_tokens, independent_sinks, split_heads
from .masks import is_causal_mask, kept_tokens

_DEFAULT = FlowVariant()


class FlowMultiheadAttention(nn.MultiheadAttention):
    """Flow-Attention with the arguments, results and state dict of `torch.nn.MultiheadAttention`.

    The two classes load each other's state dicts. The module runs inside torch's transformer layers and disables their
    fast path, which computes softmax attention. Differences from softmax attention:

    - `dropout` acts on the result, after the output projection: there is no weight matrix to apply it to.
    - In self-attention, padding is masked out of the queries as well as the keys. `cross_attention` decides which
      calls are self-attention.
    - `add_bias_kv` and `add_zero_attn` add sources that every query sees; they need is_causal=False.
    - Competition and allocation use sums over all queries, so without is_causal a result depends on the other
      queries, also in cross-attention. If a query must not depend on later ones, as in a decoder that attends to a
      memory, use `variant=independent_sinks(variant)`; `replace_attention` does so in nn.TransformerDecoderLayer.

    Takes the arguments of `torch.nn.MultiheadAttention`, and:

    Args:
        variant: a FlowVariant or the name of one.
        cross_attention: True if keys and queries are different tokens, so that key_padding_mask does not apply to the
            queries; False if they are the same tokens. None decides in each call: query and key of equal length mean
            self-attention. Pass True for a memory that may be as long as the query; `replace_attention` does so in
            nn.TransformerDecoderLayer.

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
        cross_attention: bool | None = None,
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
        self.cross_attention = cross_attention

    def _reset_parameters(self) -> None:
        self._qkv_same_embed_dim = self.in_proj_weight is not None
        super()._reset_parameters()
        # False disables torch's fast path. In eval mode, nn.TransformerEncoderLayer would compute softmax attention
        # from the weights without calling this module, and nn.TransformerEncoder would make nested tensors for it.
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
            query: (N, embed_dim), (N, B, embed_dim), or with batch_first (B, N, embed_dim). A nested tensor, jagged or
                strided, (B, j, embed_dim), needs batch_first, need_weights=False and no masks.
            key, value: likewise with M tokens of width kdim and vdim.
            key_padding_mask: (B, M), or (M,) without a batch. True masks a token out; in a float mask -inf, finfo.min
                or -1e9 do, and all other values must be 0.
            need_weights: also return the matrix W with R = W V. It takes N × M memory, which the result alone does not
                need, and its rows do not sum to one.
            attn_mask: (N, M), the causal mask or one that blocks nothing, as bool (True blocks) or float (-inf blocks).
                A compiled graph accepts the causal mask only, and checks it at run time.
            average_attn_weights: return the mean of W over the heads.
            is_causal: each token sees itself and the past; attn_mask is then ignored, and may be None.

        Returns: the result in the layout of the query; and W, (B, N, M) or per head (B, H, N, M), without B if the
        query has no batch, None if need_weights is False. The sources of add_bias_kv and add_zero_attn are last in W.
        """
        if query.is_nested or key.is_nested or value.is_nested:
            masks = key_padding_mask, None if is_causal else attn_mask
            return self._attend_nested(query, key, value, masks, need_weights, is_causal), None
        check_tokens(query, key, value, (self.embed_dim, self.kdim, self.vdim), ranks=(3, 2))
        is_batched = query.dim() == 3

        q, k, v = self._project(query, key, value)  # (B, N, W), (B, M, W), (B, M, W)
        key_mask = kept_tokens(key_padding_mask, k.shape[:2] if is_batched else k.shape[1:2])
        if key_mask is not None and not is_batched:
            key_mask = key_mask[None]
        if not is_causal and attn_mask is not None:
            is_causal = is_causal_mask(attn_mask, (q.shape[1], k.shape[1]))
        query_mask = None
        if key_mask is not None and (is_causal or not self._is_cross_attention(query, key, value)):
            query_mask = key_mask
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

    def _attend_nested(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        masks: tuple[Tensor | None, ...],
        need_weights: bool,
        is_causal: bool,
    ) -> Tensor:
        has_added_sources = self.bias_k is not None or self.add_zero_attn
        if need_weights or has_added_sources or any(mask is not None for mask in masks):
            raise NotImplementedError(
                "a nested tensor has no padding and no matrix of weights: pass need_weights=False, no masks, and "
                "is_causal=True for the causal one; add_bias_kv and add_zero_attn need padded tensors."
            )
        if not self.batch_first:
            raise ValueError("got a nested tensor, whose first dimension is the batch. Build with batch_first=True.")
        sinks, sources, values = (Sequences.of(x) for x in (query, key, value))
        check_same_lengths(sources, values, "key and value")
        if is_causal:
            check_same_lengths(sinks, sources, "query and key of causal attention")
        packed = (x.tokens[None] for x in (sinks, sources, values))
        q, k, v = (x[0].unflatten(-1, (self.num_heads, -1)) for x in self._project(*packed))  # (T, H, D)
        lengths = sinks.cu_seqlens, sources.cu_seqlens, sinks.max_seqlen, sources.max_seqlen
        result = flow_attention_varlen(q, k, v, *lengths, is_causal=is_causal, variant=self.variant)
        return sinks.nested(F.dropout(self.out_proj(result.flatten(1)), self.dropout, self.training))

    def _is_cross_attention(self, query: Tensor, key: Tensor, value: Tensor) -> bool:
        if self.cross_attention is not None:
            return self.cross_attention
        length = 0 if query.dim() == 2 else 1 if self.batch_first else 0
        if query.shape[length] != key.shape[length]:
            return True
        if query is key or key is not value:
            return False
        # The key is also the value, but not the query: probably a memory. If sinks are independent, masking a query
        # would change only its own result, so treating the call as cross-attention is safe.
        if self.variant == independent_sinks(self.variant):
            return True
        raise ValueError(
            f"got a query and a key of {key.shape[length]} tokens each with a key_padding_mask, and the key is the "
            "value but not the query: are the padded tokens left out of the queries too? Build the module with "
            "cross_attention=False if query and key are the same tokens, with cross_attention=True if not, or set that "
            "attribute."
        )

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
        options = self.variant.as_options()
        with without_autocast(q):
            if is_causal:
                weights = reference.causal_weights(q, k, key_mask, **options)
            else:
                weights = reference.bidirectional_weights(q, k, query_mask, key_mask, **options)
        return weights.to(q.dtype)
