"""Checks of the arguments of the functional API. Each message says what was passed, what is accepted, what to do."""

from __future__ import annotations

import math
from numbers import Real

import torch
from torch import Tensor

from .common import Options
from .state import FlowState, num_sums
from .variant import FlowVariant

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def attention_inputs(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = _tensors(query, key, value, 4, "(batch, heads, length, head_dim)")
    shapes = q, k, v = query.shape, key.shape, value.shape
    if not q[0] == k[0] == v[0]:
        raise ValueError(f"query, key and value need the same batch size, got {_named(*shapes)}.")
    if k[2] != v[2]:
        raise ValueError(f"key and value need the same length, got {_named(*shapes)}.")
    _heads(*shapes, enable_gqa)
    return query, key, value


def packed_inputs(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = _tensors(query, key, value, 3, "(tokens, heads, head_dim), all sequences one after another")
    shapes = query.shape, key.shape, value.shape
    if key.shape[0] != value.shape[0]:
        raise ValueError(f"key and value need the same number of tokens, got {_named(*shapes)}.")
    _heads(*shapes, enable_gqa)
    return query, key, value


def attention_masks(query: Tensor, key: Tensor, query_mask: Tensor | None, key_mask: Tensor | None) -> None:
    for name, mask, tokens in (("query_mask", query_mask, query), ("key_mask", key_mask, key)):
        if mask is None:
            continue
        if not isinstance(mask, Tensor):
            raise TypeError(f"{name} must be a bool tensor, got {type(mask).__name__}.")
        accepted = (tokens.shape[0], tokens.shape[2])
        if tuple(mask.shape) != accepted:
            matrix = mask.dim() >= 2 and tuple(mask.shape[-2:]) == (query.shape[2], key.shape[2])
            hint = (
                " A matrix of queries by keys has no linear form: pass which tokens are there, and is_causal=True for "
                "the triangular mask."
                if matrix
                else ""
            )
            raise ValueError(f"{name} must have shape (batch, length) = {accepted}, got {tuple(mask.shape)}.{hint}")
        if mask.dtype != torch.bool:
            raise TypeError(
                f"{name} must be bool, True = takes part, got {mask.dtype}. For a 0/1 mask pass mask.bool(); for an "
                "additive mask, mask == 0."
            )
        if mask.device != tokens.device:
            raise ValueError(f"{name} is on {mask.device}, but the tokens are on {tokens.device}.")


def causal_lengths(query: Tensor, key: Tensor) -> None:
    if query.shape[2] != key.shape[2]:
        raise ValueError(
            f"causal attention needs as many queries as keys, got {query.shape[2]} queries and {key.shape[2]} keys. "
            "To continue a sequence, pass the state of its past to flow_attention_recurrent; for cross-attention, use "
            "is_causal=False."
        )


def cu_seqlens(query: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int) -> None:
    """Check everything but the values of the bounds, since reading those would wait for the device."""
    for name, bounds in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if not isinstance(bounds, Tensor) or bounds.dtype not in (torch.int32, torch.int64):
            kind = bounds.dtype if isinstance(bounds, Tensor) else type(bounds).__name__
            raise TypeError(f"{name} must be an int32 or int64 tensor, got {kind}.")
        if bounds.dim() != 1 or bounds.shape[0] < 1:
            raise ValueError(f"{name} must have shape (sequences + 1,), got {tuple(bounds.shape)}.")
        if bounds.device != query.device:
            raise ValueError(f"{name} is on {bounds.device}, but the tokens are on {query.device}.")
    if cu_seqlens_q.shape != cu_seqlens_k.shape:
        raise ValueError(
            f"cu_seqlens_q and cu_seqlens_k must bound the same number of sequences, got {cu_seqlens_q.shape[0] - 1} "
            f"and {cu_seqlens_k.shape[0] - 1}."
        )
    for name, length in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        if not isinstance(length, (int, torch.SymInt)):
            raise TypeError(f"{name} must be an int, got {type(length).__name__}.")
        if length < 0:
            raise ValueError(f"{name} must not be negative, got {length}.")


def state(state: FlowState, query: Tensor, value: Tensor, variant: FlowVariant) -> None:
    if not isinstance(state, FlowState):
        raise TypeError(f"state must be a FlowState, got {type(state).__name__}. FlowState.unpack takes plain tensors.")
    batch, heads, _, dim = query.shape
    accepted = (batch, heads, dim, value.shape[-1])
    if tuple(state.memory.shape) != accepted:
        raise ValueError(
            f"the state is that of (batch, heads, key_dim, value_dim) = {tuple(state.memory.shape)}, but the tokens "
            f"have {accepted}. Heads are query heads; FlowState.select picks or repeats rows of a batch."
        )
    sums = num_sums(variant)
    if {state.sums.shape[-2], sums} == {4, 5}:
        raise ValueError(
            f"the state holds {state.sums.shape[-2]} sums over features, but this variant keeps {sums}: only a variant "
            "with renormalize=True keeps 5. Continue with the variant that the state was made by."
        )
    if state.sums.shape != (batch, heads, sums, dim) or state.scalars.shape != (batch, heads, 3):
        raise ValueError(
            f"the parts of the state do not belong together: sums {tuple(state.sums.shape)}, scalars "
            f"{tuple(state.scalars.shape)}; accepted: {(batch, heads, sums, dim)}, {(batch, heads, 3)}."
        )
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    if any(part.dtype != dtype for part in state.pack()):
        raise TypeError(
            f"the state of {query.dtype} tokens is kept in {dtype}, got {state.dtype}. Use state.to(dtype=…)."
        )
    if state.device != query.device:
        raise ValueError(f"the state is on {state.device}, but the tokens are on {query.device}. Use state.to(device).")


def _scale(scale: float | None) -> float:
    if scale is None:
        return 1.0
    if isinstance(scale, Tensor) or not isinstance(scale, (Real, torch.SymFloat, torch.SymInt)):
        raise TypeError(f"scale must be a number or None, got {type(scale).__name__}. Multiply query and key instead.")
    if not -math.inf < scale < math.inf:  # math.isfinite is not traced where the scale is symbolic
        raise ValueError(f"scale must be finite, got {scale}.")
    return float(scale)


def variant(variant: FlowVariant | str, is_causal: bool = False) -> FlowVariant:
    if isinstance(variant, str):
        variant = FlowVariant.named(variant)
    if not isinstance(variant, FlowVariant):
        raise TypeError(f"variant must be a FlowVariant or the name of one, got {type(variant).__name__}.")
    if is_causal and variant.competitors == "heads":
        raise NotImplementedError(
            'competitors="heads", as of the variant "lra", is bidirectional only: the released code has no causal '
            'form. Pass competitors="tokens" or is_causal=False.'
        )
    return variant


def options(
    scale: float | None, variant_or_name: FlowVariant | str, powers: Tensor | None, query: Tensor, is_causal: bool
) -> Options:
    chosen = variant(variant_or_name, is_causal)
    return Options(_scale(scale), chosen, _powers(powers, query, query.shape[1], chosen))


def _powers(powers: Tensor | None, query: Tensor, heads: int, variant: FlowVariant) -> Tensor | None:
    """The powers in the dtype of the sums."""
    if powers is None:
        return None
    if not isinstance(powers, Tensor) or not powers.is_floating_point():
        kind = powers.dtype if isinstance(powers, Tensor) else type(powers).__name__
        raise TypeError(f"powers must be a floating tensor (2, heads), got {kind}.")
    if tuple(powers.shape) != (2, heads):
        raise ValueError(
            f"powers must have shape (2, heads) = (2, {heads}), those of the competition and those of the allocation, "
            f"got {tuple(powers.shape)}."
        )
    if powers.device != query.device:
        raise ValueError(f"powers are on {powers.device}, but the tokens are on {query.device}.")
    if not variant.renormalize or variant.competition == "sigmoid" or variant.allocation == "softmax":
        raise ValueError(
            'powers need a variant with renormalize=True, competition="softmax" or "none" and allocation="sigmoid" or '
            f'"none", got {variant}.'
        )
    return powers.to(torch.float64 if query.dtype == torch.float64 else torch.float32)


def _tensors(query: Tensor, key: Tensor, value: Tensor, rank: int, layout: str) -> tuple[Tensor, Tensor, Tensor]:
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(x).__name__}.")
        if x.is_nested:
            raise NotImplementedError(
                f"got a nested {name}; accepted by flow_attention where query, key and value are all nested. Pass the "
                "tokens packed to flow_attention_varlen, or padded with masks."
            )
        if x.dim() != rank:
            raise ValueError(f"{name} must have {rank} dimensions, {layout}, got shape {tuple(x.shape)}.")
        if x.dtype not in DTYPES:
            raise TypeError(f"attention takes float64, float32, bfloat16 or float16, got {name} {x.dtype}.")
    if not query.device == key.device == value.device:
        given = f"query on {query.device}, key on {key.device}, value on {value.device}"
        raise ValueError(f"query, key and value must be on one device, got {given}.")
    if not query.dtype == key.dtype == value.dtype:
        # under autocast, norms return float32 and projections half precision: cast all to the latter, as SDPA does
        device = query.device.type
        if not torch.is_autocast_enabled(device):
            given = _named(query.dtype, key.dtype, value.dtype)
            raise TypeError(f"query, key and value need one dtype, got {given}.")
        dtype = torch.get_autocast_dtype(device)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    return query, key, value


def _heads(query: torch.Size, key: torch.Size, value: torch.Size, enable_gqa: bool) -> None:
    # heads are axis 1 of both padded and packed tensors
    heads, key_heads = query[1], key[1]
    if key_heads != value[1]:
        raise ValueError(f"key and value need the same number of heads, got {_named(query, key, value)}.")
    if heads != key_heads and not enable_gqa:
        raise ValueError(
            f"query and key need the same number of heads, got {_named(query, key, value)}. "
            "For key heads shared by several query heads pass enable_gqa=True."
        )
    if heads != key_heads and (key_heads == 0 or heads % key_heads):
        raise ValueError(f"with enable_gqa the key heads must divide the query heads, got {_named(query, key, value)}.")
    if query[-1] != key[-1]:
        raise ValueError(f"query and key need the same head dimension, got {_named(query, key, value)}.")
    if query[-1] == 0:
        raise ValueError(f"the head dimension must be at least 1, got {_named(query, key, value)}.")


def _named(query: object, key: object, value: object) -> str:
    query, key, value = (tuple(x) if isinstance(x, torch.Size) else x for x in (query, key, value))
    return f"query {query}, key {key}, value {value}"
