"""Attention modules: Flow-Attention with its projections, and rival attentions with the same interface.

Shapes: B batch, N queries (sinks), M keys (sources), H heads, H_kv key heads, D head_dim, W = H·D.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from inspect import Parameter
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._utils import check_choice, check_options
from ..ops import (
    FlowMaps,
    FlowState,
    FlowVariant,
    checks,
    flow_attention,
    flow_attention_recurrent,
    flow_attention_varlen,
    flow_maps,
)
from ..ops.common import joint_mask
from ..ops.reference import repeat_heads
from ..ops.variant import ABLATIONS
from .packing import Packing
from .positions import RotaryPositions, token_positions

if TYPE_CHECKING:
    from ..ops.context.exchange import Group

_DEFAULT = FlowVariant()
# options of Flow-Attention by name, in the form in which `baselines.options` has those of rivals
FLOW_OPTIONS = {"scale": Parameter("scale", Parameter.KEYWORD_ONLY, default=None, annotation=float | None)}


class ProjectedAttention(nn.Module):
    """Base class of multi-head attention modules: the projections of queries, keys, values and result.

    Args:
        embed_dim: width of the queries and of the result.
        num_heads: H.
        kdim, vdim: width of keys and values; None means embed_dim.
        head_dim: D; None means embed_dim / num_heads. The inner width H·D may differ from embed_dim.
        num_kv_heads: H_kv, key/value heads, each shared by H / H_kv query heads; None means num_heads.
        bias: whether the four projections have a bias.
        dropout: on the result, after the output projection: Flow-Attention has no weight matrix to apply dropout to.
        is_causal: each token sees itself and the past; self-attention only.

    `q_proj` or `k_proj` is None if the mechanism does not read queries or keys, see `Mechanism.reads`.
    """

    q_proj: nn.Linear | None
    k_proj: nn.Linear | None
    v_proj: nn.Linear
    out_proj: nn.Linear

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        kdim: int | None = None,
        vdim: int | None = None,
        head_dim: int | None = None,
        num_kv_heads: int | None = None,
        bias: bool = True,
        dropout: float = 0.0,
        is_causal: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if embed_dim < 1 or num_heads < 1 or (head_dim is not None and head_dim < 1):
            raise ValueError(
                f"embed_dim, num_heads and head_dim must be positive, got {embed_dim}, {num_heads} and {head_dim}."
            )
        if head_dim is None and embed_dim % num_heads:
            raise ValueError(
                f"embed_dim {embed_dim} is not divisible by num_heads {num_heads}. Choose another number of heads, or "
                "pass head_dim: the inner width need not be embed_dim."
            )
        if num_kv_heads is not None and (num_kv_heads < 1 or num_heads % num_kv_heads):
            raise ValueError(f"num_kv_heads must divide num_heads {num_heads}, got {num_kv_heads}.")
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kdim = embed_dim if kdim is None else kdim
        self.vdim = embed_dim if vdim is None else vdim
        self.head_dim = embed_dim // num_heads if head_dim is None else head_dim
        self.is_causal = is_causal
        inner_dim, kv_dim = num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.q_proj = nn.Linear(embed_dim, inner_dim, bias=bias, device=device, dtype=dtype)
        self.k_proj = nn.Linear(self.kdim, kv_dim, bias=bias, device=device, dtype=dtype)
        self.v_proj = nn.Linear(self.vdim, kv_dim, bias=bias, device=device, dtype=dtype)
        self.out_proj = nn.Linear(inner_dim, embed_dim, bias=bias, device=device, dtype=dtype)
        self.dropout = nn.Dropout(dropout)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the projections: Xavier-uniform weights, zero biases."""
        for projection in self.projections():
            nn.init.xavier_uniform_(projection.weight)
            if projection.bias is not None:
                nn.init.zeros_(projection.bias)

    def projections(self) -> list[nn.Linear]:
        """The projections that are not None, the output projection last."""
        candidates = self.q_proj, self.k_proj, self.v_proj, self.out_proj
        return [projection for projection in candidates if projection is not None]

    def extra_repr(self) -> str:
        shared = "" if self.num_kv_heads == self.num_heads else f", num_kv_heads={self.num_kv_heads}"
        heads = f"num_heads={self.num_heads}{shared}, head_dim={self.head_dim}"
        return f"{self.embed_dim}, {heads}, is_causal={self.is_causal}"

    def _project(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        query_mask: Tensor | None,
        key_mask: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
        """Return q (B, H, N, D), k and v (B, H_kv, M, D), and the masks of queries and keys."""
        if key is None and value is not None:
            raise ValueError("got a value but no key. Pass both, or neither for self-attention.")
        is_self_attention = key is None or key is query
        if self.is_causal and not is_self_attention:
            raise ValueError(
                "got a key of its own, but causal attention is self-attention. Pass the query alone, or build the "
                "module with is_causal=False for cross-attention."
            )
        key = query if key is None else key
        value = key if value is None else value
        check_tokens(query, key, value, (self.embed_dim, self.kdim, self.vdim))
        if is_self_attention:
            query_mask = key_mask = joint_mask(query_mask, key_mask)
        v = split_heads(self.v_proj(value), self.num_kv_heads)
        q = self._project_heads(self.q_proj, query, v, self.num_heads)
        k = self._project_heads(self.k_proj, key, v, self.num_kv_heads)
        return q, k, v, query_mask, key_mask

    def _project_heads(self, projection: nn.Linear | None, tokens: Tensor, like: Tensor, heads: int) -> Tensor:
        if projection is None:
            # the mechanism reads the shape only
            return like.new_zeros(()).expand(len(tokens), heads, tokens.shape[1], self.head_dim)
        return split_heads(projection(tokens), heads)

    def _merge_heads(self, result: Tensor) -> Tensor:
        joined: Tensor = self.dropout(self.out_proj(result.transpose(1, 2).flatten(2)))
        return joined


class FlowAttention(ProjectedAttention):
    """Multi-head Flow-Attention with projections, linear in the length of the sequence.

    Takes the arguments of `ProjectedAttention`, and:

    Args:
        variant: a FlowVariant or the name of one.
        scale: factor of queries and keys before φ; None is 1, as in the paper.
        rotary_base: base of the `RotaryPositions` applied to queries and keys; None applies none. Positions count the
            unmasked tokens, including those already in the state. Self-attention only.
        learn_powers: whether the `powers` of `flow_attention` are learned. They start at 0, where the module equals
            linear attention. Needs a variant with renormalize=True.
        group: process group over whose ranks the sequences are split, as for `flow_attention`; rotary positions
            continue from rank to rank.

    >>> attention = FlowAttention(32, 4, is_causal=True)
    >>> x = torch.randn(2, 10, 32)
    >>> whole = attention(x)
    >>> _, state = attention(x[:, :9], state=attention.new_state(2))
    >>> last, state = attention(x[:, 9:], state=state)
    >>> torch.allclose(last, whole[:, 9:], atol=1e-6)
    True
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        variant: FlowVariant | str = _DEFAULT,
        scale: float | None = None,
        rotary_base: float | None = None,
        learn_powers: bool = False,
        group: Group | None = None,
        **options: Any,
    ) -> None:
        super().__init__(embed_dim, num_heads, **options)
        self.variant = checks.variant(variant, self.is_causal)
        self.scale = scale
        if learn_powers and not self.variant.renormalize:
            raise ValueError(f"learn_powers needs a variant with renormalize=True, got {self.variant}.")
        self.powers = nn.Parameter(self.v_proj.weight.new_zeros(2, num_heads)) if learn_powers else None
        self.rotary = None if rotary_base is None else RotaryPositions(self.head_dim, rotary_base)
        self.group = group
        self._recorded: list[FlowMaps] | None = None

    def reset_parameters(self) -> None:
        super().reset_parameters()
        powers: nn.Parameter | None = getattr(self, "powers", None)  # the base class calls this before powers are set
        if powers is not None:
            nn.init.zeros_(powers)

    def new_state(self, batch_size: int) -> FlowState:
        """The empty state of `batch_size` sequences, for the first call; each call returns the state for the next."""
        weight = self.v_proj.weight
        dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
        sizes = batch_size, self.num_heads, self.head_dim
        return FlowState.empty(*sizes, variant=self.variant, device=weight.device, dtype=dtype)

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        *,
        query_mask: Tensor | None = None,
        key_mask: Tensor | None = None,
        state: FlowState | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
    ) -> Tensor | tuple[Tensor, FlowState]:
        """Attend from the queries to the keys, or to the queries themselves if no key is passed.

        Args:
            query: (B, N, embed_dim), or a jagged nested tensor without masks.
            key: (B, M, kdim). None, or the same tensor object as the query, means self-attention. Any other tensor
                means cross-attention, whatever its length, with separate masks for queries and keys.
            value: (B, M, vdim); None means that the key is also the value.
            query_mask, key_mask: (B, N) and (B, M) bool, True = takes part. In self-attention the two masks are
                combined, and a masked token is neither a query nor a key.
            state: the state of the preceding tokens, from `new_state` or from the previous call; causal only.
            cu_seqlens, max_seqlen: bounds and longest length of packed sequences in a query (1, T, embed_dim), as for
                `flow_attention_varlen`; self-attention only. If max_seqlen is None, T is used.

        Returns: (B, N, embed_dim), and with a state also the state after the last token. For a query that is masked, or
        has no unmasked source, the result is the bias of the output projection.
        """
        check_packed(query, (key, value, query_mask, key_mask, state), cu_seqlens, max_seqlen)
        if state is not None and not self.is_causal:
            raise ValueError("got a state, which only causal attention has. Build FlowAttention with is_causal=True.")
        if self._recorded is not None:
            self._check_recordable(state, cu_seqlens)
        if cu_seqlens is not None:
            return self._attend_packed(query, cu_seqlens, max_seqlen)
        q, k, v, query_mask, key_mask = self._project(query, key, value, query_mask, key_mask)
        if self.rotary is not None:
            q, k = self._rotated(q, k, query, key, key_mask, state)
        shared: dict[str, Any] = {"key_mask": key_mask, **self._attention_options()}
        if state is not None:
            result, state = flow_attention_recurrent(q, k, v, state, **shared)
            return self._merge_heads(result), state
        options = {"is_causal": self.is_causal, "query_mask": query_mask, **shared}
        if self._recorded is not None:
            map_options = {name: option for name, option in options.items() if name != "group"}
            self._recorded.append(flow_maps(q, k, **map_options))
        return self._merge_heads(flow_attention(q, k, v, **options))

    def _check_recordable(self, state: FlowState | None, cu_seqlens: Tensor | None) -> None:
        """Raise if the maps of a call with these arguments cannot be recorded."""
        if cu_seqlens is not None:
            raise NotImplementedError("the maps of packed sequences are not recorded; pad, and pass a mask.")
        if state is not None:
            raise NotImplementedError("the maps of a sequence with a state are not recorded; pass all its tokens.")
        if self.group is not None:
            raise NotImplementedError("the maps of a sequence cut over ranks are not recorded; use one rank.")

    def _attend_packed(self, query: Tensor, cu_seqlens: Tensor, max_seqlen: int | None) -> Tensor:
        q, k, v, *_ = self._project(query, None, None, None, None)
        if self.rotary is not None:
            token = torch.arange(query.shape[1], device=query.device)
            sequence = torch.searchsorted(cu_seqlens, token, right=True) - 1
            positions = token - cu_seqlens[sequence]
            if self.group is not None:
                # the appended 0 is the length of the filler tokens after the last sequence, which belong to none
                from ..ops.context.exchange import tokens_before

                before = tokens_before(cu_seqlens.diff(append=cu_seqlens[-1:]), self.group)
                positions = positions + before[sequence]
            q, k = self.rotary(q, positions), self.rotary(k, positions)
        longest = query.shape[1] if max_seqlen is None else max_seqlen
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
        options: dict[str, Any] = {"is_causal": self.is_causal, **self._attention_options()}
        result = flow_attention_varlen(q, k, v, cu_seqlens, cu_seqlens, longest, longest, **options)
        return self._merge_heads(result.transpose(0, 1)[None])

    def _attention_options(self) -> dict[str, Any]:
        options = {"scale": self.scale, "variant": self.variant, "powers": self.powers, "group": self.group}
        return {"enable_gqa": True, **options}

    def _rotated(
        self, q: Tensor, k: Tensor, query: Tensor, key: Tensor | None, mask: Tensor | None, state: FlowState | None
    ) -> tuple[Tensor, Tensor]:
        """Apply the rotary positions to queries and keys."""
        assert self.rotary is not None
        if key is not None and key is not query:
            raise ValueError(
                "got a key of its own, but rotary positions are those of one sequence: pass the query alone."
            )
        if query.is_nested:
            raise NotImplementedError("rotary positions of nested tensors are not implemented; pad, and pass a mask.")
        positions = None
        if mask is not None or state is not None or self.group is not None:
            mask = query.new_ones(query.shape[:2], dtype=torch.bool) if mask is None else mask
            past = None if state is None else state.count
            positions = token_positions(mask, past, self.group)
        return self.rotary(q, positions), self.rotary(k, positions)

    def extra_repr(self) -> str:
        scale = "" if self.scale is None else f", scale={self.scale}"
        return f"{super().extra_repr()}{scale}, variant={self.variant}"


class RivalAttention(ProjectedAttention):
    """A rival attention of `flowformer.baselines` with the projections of `FlowAttention` that it reads.

    Takes the arguments of `ProjectedAttention`, and:

    Args:
        name: name of the rival; `baselines.names` lists them.
        max_length: the longest sequence, for rivals whose parameters depend on it.
        attention_options: options of the rival; `baselines.options` lists them.

    >>> attention = RivalAttention(32, 4, name="local", attention_options={"window": 5})
    >>> attention(torch.randn(2, 10, 32)).shape
    torch.Size([2, 10, 32])
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        name: str,
        max_length: int | None = None,
        attention_options: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        from .. import baselines  # imported here, since most programs use no rival

        super().__init__(embed_dim, num_heads, **options)
        self.mechanism = baselines.build(
            name, num_heads=num_heads, head_dim=self.head_dim, max_length=max_length, **(attention_options or {})
        )
        for part, projection in {"query": "q_proj", "key": "k_proj"}.items():
            if part not in self.mechanism.reads:
                setattr(self, projection, None)
        weight = self.v_proj.weight
        self.mechanism.to(device=weight.device, dtype=weight.dtype)

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        *,
        query_mask: Tensor | None = None,
        key_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
    ) -> Tensor:
        """Attend, with the arguments of `FlowAttention.forward` except `state`.

        Packed sequences are padded first, unless the mechanism attends within them. Their lengths are read on the host.
        On a GPU, calls with the same `cu_seqlens` read them once: after writing to it in a way that torch does not
        count, such as `torch.distributed.broadcast`, pass a clone.
        """
        check_packed(query, (key, value, query_mask, key_mask), cu_seqlens, max_seqlen)
        q, k, v, query_mask, key_mask = self._project(query, key, value, query_mask, key_mask)
        if cu_seqlens is None:
            return self._merge_heads(self._attend(q, k, v, query_mask, key_mask))
        tokens = query.shape[1]
        longest = tokens if max_seqlen is None else max_seqlen
        checks.cu_seqlens(query, cu_seqlens, cu_seqlens, longest, longest)
        packing = Packing.from_bounds(cu_seqlens, tokens, longest)
        result = self._attend_packed(q, k, v, packing)
        # filler tokens after the last sequence attend to nothing: their result is 0
        return self._merge_heads(F.pad(result, (0, 0, 0, tokens - result.shape[2])))

    def _attend_packed(self, q: Tensor, k: Tensor, v: Tensor, packing: Packing) -> Tensor:
        """Attend within packed sequences (1, H, T, D); the result leaves filler tokens out."""
        count = sum(packing.lengths)
        if self.mechanism.attends_packed(q, v, packing.lengths):
            q, k, v = (x[0, :, :count].transpose(0, 1) for x in (q, repeat_heads(q, k), repeat_heads(q, v)))
            bounds, lengths = packing.cu_seqlens, packing.lengths
            packed = self.mechanism.attend_packed(q, k, v, bounds, lengths, is_causal=self.is_causal)
            return packed.transpose(0, 1)[None]
        q, k, v = (packing.unpack(x.transpose(1, 2), packing.max_seqlen).transpose(1, 2) for x in (q, k, v))
        mask = packing.unpack(q.new_ones(1, count, dtype=torch.bool), packing.max_seqlen)
        return packing.pack(self._attend(q, k, v, mask, mask).transpose(1, 2)).transpose(1, 2)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, query_mask: Tensor | None, key_mask: Tensor | None) -> Tensor:
        k, v = repeat_heads(q, k), repeat_heads(q, v)
        result: Tensor = self.mechanism(q, k, v, is_causal=self.is_causal, query_mask=query_mask, key_mask=key_mask)
        return result


def build_attention(
    name: str,
    embed_dim: int,
    num_heads: int,
    *,
    variant: FlowVariant | str = _DEFAULT,
    max_length: int | None = None,
    attention_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> FlowAttention | RivalAttention:
    """Build Flow-Attention, one of its ablations, or a rival attention by name.

    Names are "flow", the keys of `ABLATIONS` (in a name with two activations, the first is the competition's), and
    `baselines.names()`. `variant` applies to Flow-Attention only, `max_length` to rivals only. `attention_options` are
    some of `FLOW_OPTIONS`, or of the rival's `baselines.options`.

    >>> type(build_attention("flow", 32, 4)).__name__, type(build_attention("linear", 32, 4)).__name__
    ('FlowAttention', 'RivalAttention')
    """
    if is_flow(name):
        chosen = attention_options or {}
        check_options(f"{name} attention", chosen, FLOW_OPTIONS)
        variant = replace(checks.variant(variant), **ABLATIONS.get(name, {}))
        return FlowAttention(embed_dim, num_heads, variant=variant, **chosen, **options)
    check_choice("attention", name, attention_names())
    return RivalAttention(
        embed_dim, num_heads, name=name, max_length=max_length, attention_options=attention_options, **options
    )


def attention_names() -> list[str]:
    """The names that `build_attention` accepts."""
    from .. import baselines

    return ["flow", *ABLATIONS, *baselines.names()]


def is_flow(name: str) -> bool:
    """Whether the name stands for Flow-Attention or one of its ablations."""
    return name == "flow" or name in ABLATIONS


def independent_sinks(variant: FlowVariant | str = _DEFAULT) -> FlowVariant:
    """Return the variant without competition and allocation, so that a sink's result does not depend on other sinks.

    Both use flows summed over all sinks, including later ones. Without them, R = (φ(Q)/I) (φ(K)ᵀ V), which an
    autoregressive decoder can use for cross-attention to a memory.

    >>> independent_sinks("rl").competition
    'none'
    """
    return replace(checks.variant(variant), competition="none", allocation="none")


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    heads: Tensor = x.unflatten(-1, (num_heads, -1)).transpose(1, 2)  # (B, N, W) → (B, H, N, D)
    return heads


def check_packed(query: Tensor, others: tuple[object, ...], cu_seqlens: Tensor | None, max_seqlen: int | None) -> None:
    """Raise if packed sequences are combined with arguments that they do not support, or have the wrong shape."""
    if cu_seqlens is None:
        if max_seqlen is not None:
            raise ValueError("got max_seqlen but no cu_seqlens. Packed sequences need both bounds and longest length.")
    elif any(x is not None for x in others):
        raise ValueError("got cu_seqlens and another argument; packed sequences are passed as the query alone.")
    elif query.dim() != 3 or query.shape[0] != 1:
        raise ValueError(f"packed sequences must have shape (1, tokens, width), got {tuple(query.shape)}.")


def check_tokens(
    query: Tensor, key: Tensor, value: Tensor, widths: tuple[int, int, int], ranks: tuple[int, ...] = (3,)
) -> None:
    if query.is_nested and query.layout == torch.strided:
        raise NotImplementedError(
            "got a strided nested tensor; accepted: a jagged one, torch.nested.nested_tensor(…, layout=torch.jagged)."
        )

    # formatted only for an error: in a graph with dynamic lengths the shapes cannot be printed
    def shapes() -> str:
        return ", ".join(str(tuple(x.shape)) for x in (query, key, value))

    if query.dim() not in ranks or not query.dim() == key.dim() == value.dim():
        accepted = " or all ".join(map(str, ranks))
        raise ValueError(f"query, key and value must all have {accepted} dimensions, got shapes {shapes()}.")
    if (query.shape[-1], key.shape[-1], value.shape[-1]) != widths:
        raise ValueError(
            f"query, key and value must have widths (embed_dim, kdim, vdim) = {widths}, got shapes {shapes()}."
        )
