"""The functional API: what the calls accept, what they return, and which backend computes them.

Shapes: B batch, H query heads, H_kv key heads, N queries (sinks), M keys (sources), D features, E values, T packed
tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import backends, checks, reference
from .common import joint_mask, without_autocast
from .reference import FlowMaps
from .state import FlowState
from .variant import FlowVariant

if TYPE_CHECKING:
    from .context.exchange import Group

_DEFAULT = FlowVariant()


def flow_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    is_causal: bool = False,
    query_mask: Tensor | None = None,
    key_mask: Tensor | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    variant: FlowVariant | str = _DEFAULT,
    powers: Tensor | None = None,
    backend: str | None = None,
    group: Group | None = None,
) -> Tensor:
    """Attention in linear time, with competition among sources and allocation to sinks.

    Computes R = α ⊙ (φ(Q)/I) (φ(K)ᵀ (c ⊙ V)), where the flows I, c and α come from sums over tokens: `reference.py`
    has the equations. Unlike softmax attention it needs no 1/√D: `scale` multiplies queries and keys before φ.

    Args:
        query: (B, H, N, D), float64, float32, bfloat16 or float16, any strides.
        key, value: (B, H, M, D) and (B, H, M, E), of the same dtype and device.
        is_causal: each token sees itself and the past (Algorithm 2); needs N = M. This is not the masked form of the
            bidirectional version.
        query_mask, key_mask: (B, N) and (B, M) bool, True = takes part. A padded token takes part in nothing, not even
            the counts, so a padded batch equals each of its sequences alone. In self-attention pass the mask of the
            padding as both. With is_causal a token is sink and source at once: either mask, or both, leaves it out.
        scale: None is 1, as in the paper.
        enable_gqa: key and value may have H_kv heads where H_kv divides H; query heads h·H/H_kv … share key head h.
        variant: a FlowVariant or the name of one: "paper", "core", "vision", "language", "rl", "timeseries", "lra".
        powers: (2, H), learned exponents of each head, for a variant with renormalize=True: τ of the competition,
            c = m·softmax(τ Ô), and γ of the allocation, α = sigmoid(Î)^γ. None is 1, as in the paper; 0 leaves linear
            attention, so that a model may begin there.
        backend: None takes the best that can run here; "triton", "native", "torch" or "reference" insists. See
            `explain`.
        group: a ProcessGroup, or a DeviceMesh with one dimension, over whose ranks the sequence is cut, in rank order:
            the tokens passed are this rank's part, of any length, also none. Every rank must make the call, and run
            its backward pass, with the same arguments but for the length.

    Returns: (B, H, N, E), in the dtype of the query. A query that is masked, or has no valid source, gives 0.

    Nested tensors of sequences of unequal length, (B, H, j, D), jagged or strided, are computed by
    `flow_attention_varlen` and give a nested tensor; they take no masks.

    Differentiable once, also under torch.vmap; for higher derivatives or forward mode use backend="reference".

    >>> q = k = v = torch.randn(1, 2, 5, 4)
    >>> flow_attention(q, k, v).shape
    torch.Size([1, 2, 5, 4])
    """
    if group is not None:
        # here, as in the other functions: torch.distributed is for few callers
        from .context import op

        given = op.Arguments(scale, enable_gqa, variant, powers, backend, group)
        return op.attention(query, key, value, (query_mask, key_mask), is_causal, given)
    if getattr(query, "is_nested", False):
        shared = {"scale": scale, "enable_gqa": enable_gqa, "variant": variant, "powers": powers, "backend": backend}
        return _nested_attention(query, key, value, (query_mask, key_mask), is_causal, **shared)
    query, key, value = checks.attention_inputs(query, key, value, enable_gqa)
    checks.attention_masks(query, key, query_mask, key_mask)
    options = checks.options(scale, variant, powers, query, is_causal)
    if is_causal:
        checks.causal_lengths(query, key)
    chosen = _choose(backend, query, key, value, is_causal, options.variant)
    if not is_causal:
        return chosen.bidirectional(query, key, value, (query_mask, key_mask), options)
    return chosen.causal(query, key, value, joint_mask(query_mask, key_mask), options)


def _nested_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    masks: tuple[Tensor | None, Tensor | None],
    is_causal: bool,
    **options: Any,
) -> Tensor:
    # here, since few callers pay for it
    from .nested import Sequences, check_same_lengths

    if any(mask is not None for mask in masks):
        raise ValueError("a nested tensor has no padding to mask; leave out query_mask and key_mask.")
    sinks, sources, values = (Sequences.of(x, "(batch, heads, j, head_dim)", 2) for x in (query, key, value))
    check_same_lengths(sources, values, "key and value")
    if is_causal:
        check_same_lengths(sinks, sources, "query and key of causal attention")
    result = flow_attention_varlen(
        sinks.tokens,
        sources.tokens,
        values.tokens,
        sinks.cu_seqlens,
        sources.cu_seqlens,
        sinks.max_seqlen,
        sources.max_seqlen,
        is_causal=is_causal,
        **options,
    )
    return sinks.nested(result).transpose(1, 2)


def flow_attention_recurrent(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    state: FlowState | None = None,
    *,
    key_mask: Tensor | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    variant: FlowVariant | str = _DEFAULT,
    powers: Tensor | None = None,
    backend: str | None = None,
    group: Group | None = None,
) -> tuple[Tensor, FlowState]:
    """Causal attention of any number of new tokens, continued from the state of their past.

    Cutting a sequence anywhere and passing the state on gives the same results and gradients as one run: prefill a
    prompt with many tokens, then decode with one token a call, each at the same cost whatever came before.

    Args:
        query, key, value: (B, H, N, D), (B, H, N, D), (B, H, N, E): the new tokens.
        state: of the tokens before; None where there are none. It is not changed.
        key_mask: (B, N) bool, True = takes part, for prompts of unequal length, padded left or right. A padded token
            leaves the state as it is.
        scale, enable_gqa, variant, powers, backend: as for `flow_attention`.
        group: as for `flow_attention`. All ranks pass the state of what was before the first rank's tokens, and get
            the state after the last rank's.

    Returns: the result (B, H, N, E) and the state after the last token.

    >>> q = k = v = torch.randn(1, 2, 5, 4)
    >>> whole = flow_attention(q, k, v, is_causal=True)
    >>> _, state = flow_attention_recurrent(q[:, :, :4], k[:, :, :4], v[:, :, :4])
    >>> last, state = flow_attention_recurrent(q[:, :, 4:], k[:, :, 4:], v[:, :, 4:], state)
    >>> torch.allclose(last, whole[:, :, 4:], atol=1e-6), state.count.item()
    (True, 5)
    """
    if group is not None:
        from .context import op

        given = op.Arguments(scale, enable_gqa, variant, powers, backend, group)
        return op.recurrent(query, key, value, key_mask, state, given)
    query, key, value = checks.attention_inputs(query, key, value, enable_gqa)
    checks.attention_masks(query, key, None, key_mask)
    checks.causal_lengths(query, key)
    options = checks.options(scale, variant, powers, query, True)
    if state is not None:
        checks.state(state, query, value, options.variant)
    chosen = _choose(backend, query, key, value, True, options.variant)
    packed = None if state is None else state.pack()
    result, end = chosen.recurrent(query, key, value, key_mask, packed, options)
    return result, FlowState.unpack(end)


def flow_attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    variant: FlowVariant | str = _DEFAULT,
    powers: Tensor | None = None,
    backend: str | None = None,
    group: Group | None = None,
) -> Tensor:
    """`flow_attention` of sequences packed one after another: equal to a loop over them, without padding.

    Args:
        query: (T, H, D), all sequences' tokens.
        key, value: (T', H, D) and (T', H, E).
        cu_seqlens_q, cu_seqlens_k: (B + 1,) int32 or int64, 0 followed by where each sequence ends. Tokens after the
            last end belong to no sequence and give 0.
        max_seqlen_q, max_seqlen_k: the longest length, or anything above it.
        is_causal, scale, enable_gqa, variant, powers, backend: as for `flow_attention`.
        group: as for `flow_attention`. All ranks bound the same sequences, those without a token on a rank as empty:
            a rank with the tokens start … stop of all passes cu_seqlens.clamp(start, stop) - start.

    Returns: (T, H, E). A sequence may be empty; queries of a sequence without keys give 0.

    >>> q = k = v = torch.randn(7, 2, 4)
    >>> bounds = torch.tensor([0, 3, 7])
    >>> flow_attention_varlen(q, k, v, bounds, bounds, 4, 4).shape
    torch.Size([7, 2, 4])
    """
    if group is not None:
        from .context import op

        given = op.Arguments(scale, enable_gqa, variant, powers, backend, group)
        lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        return op.packed(query, key, value, lengths, is_causal, given)
    query, key, value = checks.packed_inputs(query, key, value, enable_gqa)
    checks.cu_seqlens(query, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    options = checks.options(scale, variant, powers, query, is_causal)
    chosen = _choose(backend, query, key, value, is_causal, options.variant)
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    return chosen.packed(query, key, value, lengths, is_causal, options)


def flow_maps(
    query: Tensor,
    key: Tensor,
    *,
    is_causal: bool = False,
    query_mask: Tensor | None = None,
    key_mask: Tensor | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    variant: FlowVariant | str = _DEFAULT,
    powers: Tensor | None = None,
) -> FlowMaps:
    """The flows behind an attention: incoming, outgoing, both after conservation, competition and allocation.

    Competition says which sources matter, allocation how much each sink takes in: these are what the paper draws.

    Args: as for `flow_attention`.

    Returns: FlowMaps of (B, H, N) for sinks and (B, H, M) for sources, in float32 (float64 for float64 inputs), 0 where
    masked; differentiable.

    >>> q = k = torch.randn(1, 2, 5, 4)
    >>> flow_maps(q, k).conserved_outgoing.mean().item()  # n/m, whatever the input
    1.0...
    """
    query, key, _ = checks.attention_inputs(query, key, key, enable_gqa)
    checks.attention_masks(query, key, query_mask, key_mask)
    options = checks.options(scale, variant, powers, query, is_causal).as_keywords()
    key = reference.repeat_heads(query, key)
    with without_autocast(query):
        if not is_causal:
            return reference.bidirectional_maps(query, key, query_mask, key_mask, **options)
        checks.causal_lengths(query, key)
        return reference.causal_maps(query, key, joint_mask(query_mask, key_mask), **options)


def explain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    is_causal: bool = False,
    query_mask: Tensor | None = None,
    key_mask: Tensor | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    variant: FlowVariant | str = _DEFAULT,
    backend: str | None = None,
) -> str:
    """Which backend `flow_attention` would run with these arguments, and why not the others.

    >>> q = torch.randn(1, 2, 5, 4)
    >>> print(explain(q, q, q))
    flow_attention, bidirectional, query (1, 2, 5, 4), key (1, 2, 5, 4), torch.float32 on cpu: ...
      triton: ...
      native: ...
      torch: yes, memory-linear, runs everywhere
      reference: only by name, keeps matrices of N × M numbers
    """
    query, key, value = checks.attention_inputs(query, key, value, enable_gqa)
    checks.attention_masks(query, key, query_mask, key_mask)
    variant = checks.options(scale, variant, None, query, is_causal).variant
    if is_causal:
        checks.causal_lengths(query, key)
    kind = "causal" if is_causal else "bidirectional"
    shapes = f"query {tuple(query.shape)}, key {tuple(key.shape)}"
    chosen = backends.choose(backend, query, key, value, is_causal, variant)
    lines = [f"flow_attention, {kind}, {shapes}, {query.dtype} on {query.device}: {chosen.name}"]
    return "\n  ".join([*lines, *backends.verdicts(query, key, value, is_causal, variant)])


def _choose(backend: str | None, query: Tensor, *rest: Any) -> backends.Backend:
    # only the operators of the torch backend can be mapped
    if backend is None and query.is_cuda and torch._C._are_functorch_transforms_active():
        backend = "torch"
    return backends.choose(backend, query, *rest)
