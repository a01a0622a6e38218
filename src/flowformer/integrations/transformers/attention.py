"""The attention function and the mask function behind `attn_implementation="flow_attention"`.

Shapes: B batch, H query heads, H_kv key/value heads, N tokens, D query and key features, E value features, R sequences
packed into a batch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

from ...ops import flow_attention, flow_attention_recurrent, flow_attention_varlen
from ...ops.common import is_exporting
from .cache import NAME, FlowCacheLayer
from .context import group_of
from .linearized_heads import KEPT_SOFTMAX, FlowHeads
from .served import ATTENDS_ELSEWHERE, current_cache, is_cross_attention, refuse
from .softmax import Tokens, softmax_attention, window_attention

if TYPE_CHECKING:
    from ...ops.context.exchange import Group

OR_MASK = "or_masks.<locals>.or_mask"


def flow_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs,
) -> tuple[Tensor, None]:
    """Compute Flow-Attention; registered with transformers as an attention function.

    Args:
        query: (B, H, N, D).
        key, value: (B, H_kv, N, D) and (B, H_kv, N, E) where H_kv divides H; with a cache, the new tokens only.
        attention_mask: the result of `flow_attention_mask`.
        dropout: applied to the result, since Flow-Attention has no matrix of attention weights.
        scaling: factor on softmax scores; used only by kept softmax layers and windows, see `Exchange`.
        is_causal: None reads `module.is_causal`.
        kwargs: cu_seq_lens_q and cu_seq_lens_k are the bounds (R + 1,) of packed sequences; softcap is used like
            `scaling`.

    Returns: (B, N, H, E), and None in place of the attention weights.
    """
    heads, group = getattr(module, "flow", None), group_of(module)
    past = None if heads == KEPT_SOFTMAX else _cache_layer(module)
    tokens = tokens_of(module, query, key, attention_mask, is_causal, past, kwargs)
    if group is not None and (past is not None or tokens.bounds is not None):
        raise NotImplementedError(
            "sequences cut over ranks take no cache and no packed sequences. Pass use_cache=False and rows with a mask."
        )
    if heads == KEPT_SOFTMAX:
        result = softmax_attention(query, key, value, tokens, scaling, kwargs.get("softcap"))
    elif heads is None:
        result = _flow(query, key, value, tokens, past, {"group": group})
    else:
        result = exchanged_attention(heads, query, key, value, tokens, scaling, kwargs.get("softcap"), past, group)
    return F.dropout(result.transpose(1, 2), dropout, module.training).contiguous(), None


def exchanged_attention(
    heads: FlowHeads,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tokens: Tokens,
    scaling: float | None,
    softcap: float | None,
    past: FlowCacheLayer | None = None,
    group: Group | None = None,
) -> Tensor:
    """Compute the attention of a linearized layer, (B, H, N, E).

    Flow-Attention with the learned features and powers is mixed with softmax attention in the window, if there is one.
    """
    q, k = heads.features(query, key)
    count = None if past is None or past.state is None else past.state.count
    result = _flow(q, k, value, tokens, past, {"variant": heads.variant, "powers": heads.powers, "group": group})
    window = heads.exchange.window
    if window:
        visible = tokens.num_visible(query, count)
        if past is not None and past.state is not None:
            key, value, mask = past.remember(key, value, tokens.mask, window - 1)
            tokens = tokens._replace(mask=mask)
        near, log_near, inside = window_attention(query, key, value, tokens, window, scaling, softcap)
        share = heads.near_share(query, log_near, visible - inside)[..., None].to(result.dtype)
        result = share * near + (1 - share) * result
    return result if heads.gain is None else result * heads.gain[:, None, None].to(result.dtype)


def _flow(query, key, value, tokens: Tokens, past: FlowCacheLayer | None, options: dict[str, Any]) -> Tensor:
    """Compute Flow-Attention of padded or packed tokens, or continue from a cache, (B, H, N, E)."""
    new = query.shape[2]
    options = {"enable_gqa": query.shape[1] != key.shape[1], **options}
    if tokens.bounds is not None:
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))  # (B·N, H, D)
        options |= {"is_causal": tokens.is_causal}
        result = flow_attention_varlen(q, k, v, tokens.bounds, tokens.bounds, new, new, **options)
        result = result.unflatten(0, (len(query), -1)).transpose(1, 2)
    elif past is not None and tokens.is_causal:
        mask = None if tokens.mask is None else tokens.mask[:, -new:]
        state = None if past.state is None else past.state.to(query.device)
        result, state = flow_attention_recurrent(query, key, value, state, key_mask=mask, **options)
        past.advance(state, new)
        return result
    else:
        options |= {"is_causal": tokens.is_causal, "key_mask": tokens.mask}
        query_mask = tokens.mask if new == key.shape[2] else None
        result = flow_attention(query, key, value, query_mask=query_mask, **options)
    if past is not None:
        past.advance(None, new)
    return result


def tokens_of(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    is_causal: bool | None,
    past: FlowCacheLayer | None,
    options: dict[str, Any],
) -> Tokens:
    """Combine layer, mask and arguments into direction, padding and bounds of the tokens; raise if not supported."""
    layer_is_causal, shape = getattr(module, "is_causal", None), () if mask is None else mask.shape
    # the mask function knows the pattern; `module.is_causal` is wrong in some models (AIMv2, Step 3.7)
    if len(shape) == 3 and shape[1] > 1:
        is_causal = False
    elif not layer_is_causal and len(shape) in (1, 3):
        is_causal = True
    elif is_causal is None:
        is_causal = layer_is_causal
    _check(module, query, key, mask, is_causal, past, options)
    packed_q, packed_k = options.get("cu_seq_lens_q"), options.get("cu_seq_lens_k")
    if mask is not None and mask.dim() == 1:
        packed_q = packed_k = mask
    if (packed_q is None) != (packed_k is None):
        raise ValueError("packed sequences need cu_seq_lens_q and cu_seq_lens_k, got one of them.")
    if mask is not None and mask.dim() > 1:
        mask = mask.flatten(1)  # (B, 1, N) or (B, N, 1) → (B, N)
        mask = None if mask.stride(-1) == 0 else mask.bool()  # stride 0: one expanded number, no padding
    if packed_q is None:
        return Tokens(bool(is_causal), mask)
    if mask is not None and mask.dim() > 1:
        check_packed_mask(mask)
    return Tokens(bool(is_causal), bounds=packed_q)


def flow_attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable = causal_mask_function,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    **kwargs,
) -> Tensor | None:
    """Convert the mask pattern of a model into what `flow_attention_forward` takes; called once for all layers.

    Returns, by pattern:
        causal: the padding mask (B, 1, N), bool; without padding, a single True expanded to that shape.
        all pairs of tokens, built from other patterns: the padding mask (B, N, 1), expanded likewise.
        plain bidirectional, or cross-attention: the padding mask (B, N) or None; the layer decides the direction.
        several causal sequences per row, packed or in chunks: their bounds (R + 1,) in the flattened batch.
        any other pattern: raises NotImplementedError.
    """
    if attention_mask is not None and attention_mask.shape[1] != kv_length:
        raise ValueError(
            f"attention_mask must cover the tokens in the cache and the new ones, {(batch_size, kv_length)}, got "
            f"{tuple(attention_mask.shape)}."
        )
    is_causal = _is_causal(mask_function)
    # if lengths differ and the pattern is not causal this is cross-attention, which the attention function refuses
    is_plain = mask_function in (causal_mask_function, bidirectional_mask_function)
    is_plain = is_plain or (q_length != kv_length and not is_causal)
    if not is_plain and is_exporting():
        raise NotImplementedError(
            f"{NAME} cannot look for packed sequences, chunks or windows in an exported graph. Pass an attention_mask "
            "to say that rows are not packed; models with chunks or windows are not exported."
        )
    positions = torch.arange(kv_length, device=device).expand(batch_size, kv_length)
    starts = None if is_plain else _starts(mask_function, positions)
    if is_plain or (starts is not None and not starts[:, 1:].any()):
        if is_plain and not is_causal:
            return attention_mask
        if attention_mask is None:
            attention_mask = torch.ones((), dtype=torch.bool, device=device).expand(batch_size, kv_length)
        if is_causal:
            return attention_mask[:, None]
        return attention_mask[..., None] if kv_length > 1 else attention_mask  # (B, 1, 1) would be causal
    if q_length != kv_length:
        raise NotImplementedError(
            f"{NAME} cannot continue packed sequences or chunks from a cache: a state has no place where it begins "
            "again. Pass use_cache=False, or a text no longer than a chunk or window of the model."
        )
    if starts is None or (attention_mask is not None and not attention_mask.all()):
        raise NotImplementedError(
            f"{NAME} takes padding, or packed sequences and chunks without padding. This model asks for another "
            "pattern, such as a sliding window shorter than the input, which has no linear form."
        )
    if not is_causal:
        raise NotImplementedError(
            f"{NAME} cannot tell the layers of this model that packed sequences are bidirectional. Pass a sequence a "
            "row, and an attention_mask."
        )
    return bounds(starts)


def _factory_name(mask_function: Callable) -> str:
    """Return the qualified name of a mask function; for a closure it contains the function that made it."""
    return f"{mask_function.__module__}.{mask_function.__qualname__}".removeprefix("transformers.masking_utils.")


def _is_causal(mask_function: Callable) -> bool:
    """Whether a pattern is causal: the causal one, an intersection with a causal one, or a union of causal ones."""
    if mask_function in (causal_mask_function, bidirectional_mask_function):
        return mask_function is causal_mask_function
    closure = inspect.getclosurevars(mask_function).nonlocals
    parts = (closure["mask_function"],) if "mask_function" in closure else closure.get("mask_functions", ())
    return (all if _factory_name(mask_function) == OR_MASK else any)(map(_is_causal, parts))


def _starts(mask_function: Callable, positions: Tensor) -> Tensor | None:
    """Mark the tokens (B, N) at which a sequence starts that sees no other sequence; None for an unknown pattern.

    Patterns are closures. They are recognised by the function of transformers that made them, and read from the
    variables of the closure.

    Args:
        positions: (B, N), the token indices that the pattern compares.
    """
    length = positions.shape[1]
    starts = (torch.arange(length, device=positions.device) == 0).expand_as(positions)
    if mask_function in (causal_mask_function, bidirectional_mask_function):
        return starts
    factory = _factory_name(mask_function)
    closure = inspect.getclosurevars(mask_function).nonlocals
    if factory == "and_masks.<locals>.and_mask":
        parts = [_starts(part, positions) for part in closure["mask_functions"]]
        return None if any(part is None for part in parts) else torch.stack(cast(list[Tensor], parts)).any(0)
    if factory == OR_MASK:
        return starts if any(_is_all_pairs(part, positions) for part in closure["mask_functions"]) else None
    if factory == "remap_positions_for_packed_sequence.<locals>.inner_mask":
        # since transformers 5.23, in addition to packed_sequence_mask_function
        return _starts(closure["mask_function"], closure["position_ids"].expand_as(positions))
    if factory == "sliding_window_overlay.<locals>.inner_mask":
        # some models without windows create the mask anyway, with sliding_window = 0
        return starts if closure["sliding_window"] >= length or closure["sliding_window"] == 0 else None
    if factory == "sliding_window_bidirectional_overlay.<locals>.inner_mask":
        return starts if closure["sliding_window"] >= length - 1 else None
    if factory.endswith("._bidirectional_window_overlay.<locals>.inner_mask"):  # Gemma 3 and models derived from it
        return starts if closure["sliding_window"] >= length else None
    if factory == "packed_sequence_mask_function.<locals>.inner_mask":
        sequence = closure["packed_sequence_mask"].expand_as(positions)
    elif factory == "chunked_overlay.<locals>.inner_mask":
        index = positions - closure["left_padding"].to(positions.device)[:, None]
        sequence = index.clamp_min(0) // closure["chunk_size"]  # left padding is masked out: any chunk will do
    else:
        # a result without dimensions does not depend on the pair of tokens: the pattern is constant
        pair = torch.zeros(4, 1, dtype=torch.long, device=positions.device)
        constant = mask_function(*pair)
        return starts if isinstance(constant, Tensor) and constant.dim() == 0 and constant else None
    # where positions restart another packed sequence begins; elsewhere a decrease means interleaved sequences
    change, is_next = sequence.diff(), positions.diff() == 1
    return starts | F.pad(change != 0, (1, 0)) if (change >= 0)[is_next].all() else None


def _is_all_pairs(mask_function: Callable, positions: Tensor) -> bool:
    """Whether all tokens see each other; the union with any other pattern is then the same pattern."""
    starts = None if _is_causal(mask_function) else _starts(mask_function, positions)
    return starts is not None and not starts[:, 1:].any()


def check_packed_mask(mask: Tensor) -> None:
    """Refuse a padding mask that is passed together with the bounds of packed sequences."""
    if not mask.all():
        raise ValueError(
            "got cu_seq_lens_q and an attention_mask with padding. Pack sequences without padding, or pass the mask "
            "alone."
        )


def bounds(starts: Tensor) -> Tensor:
    """Return the bounds (R + 1,) of the sequences of a flattened batch.

    Args:
        starts: (B, N) bool, True at the first token of each sequence.

    >>> bounds(torch.tensor([[True, False, True], [True, False, False]])).tolist()
    [0, 2, 3, 6]
    """
    return F.pad(starts.flatten().nonzero()[:, 0], (0, 1), value=starts.numel()).int()


def _cache_layer(module: nn.Module) -> FlowCacheLayer | None:
    """Return the layer of the cache that belongs to this call, or None without a cache.

    Hooks in `served.py` record the cache and the index of the layer: the attention function gets neither.
    """
    cache: Any = current_cache()
    if cache is None:
        return None
    index, cache._flow_layer = getattr(cache, "_flow_layer", None), None
    layer = None if index is None else cache.layers[index]
    if layer is None:
        raise NotImplementedError(
            f"{type(module).__name__} cannot decode with {NAME}: it attends twice, or with the keys of another layer, "
            "but a cache holds one FlowState a layer. Pass use_cache=False."
        )
    if not isinstance(layer, FlowCacheLayer):
        raise TypeError(
            f"got a {type(cache).__name__} without a state for this {type(module).__name__}: keys and values alone "
            f"lack the sums over past queries that {NAME} needs. Pass FlowCache(model.config), or no cache: generate "
            "and the model make one."
        )
    if layer.length and layer.state is None:
        raise ValueError(
            "got the cache of packed or bidirectional tokens, which have no state to continue from. Pass "
            "use_cache=False, and the tokens before again."
        )
    return layer


def _check(module: nn.Module, query: Tensor, key: Tensor, mask: Tensor | None, is_causal, past, options) -> None:
    """Raise on a layer or a call that Flow-Attention does not support."""
    if is_cross_attention(module):
        raise refuse(type(module), ATTENDS_ELSEWHERE)
    for name in ("position_bias", "s_aux", "indices", "block_indices"):
        if options.get(name) is not None:
            raise NotImplementedError(
                f"got {name}, which adds to the weights of a softmax or chooses among them; {NAME} has none. Choose "
                "another attn_implementation."
            )
    window = options.get("sliding_window")
    if window and window < query.shape[2] + (0 if past is None else past.length):
        raise refuse(type(module), f"its window of {window} is shorter than the input, which has no linear form")
    if is_causal is None:
        raise refuse(type(module), "it does not say whether it is causal")
    if is_causal and query.shape[2] != key.shape[2] and getattr(module, "flow", None) != KEPT_SOFTMAX:
        raise NotImplementedError(
            f"got {query.shape[2]} queries and {key.shape[2]} keys: {NAME} cannot decode from a cache of keys and "
            "values, which lacks the sums over past queries. Pass FlowCache(model.config), or use_cache=False."
        )
    if mask is not None and (mask.dim() > 3 or (mask.dim() == 3 and 1 not in mask.shape[1:])):
        raise ValueError(
            f"{NAME} takes a padding mask (batch, length), got {tuple(mask.shape)}: a mask of pairs of tokens has no "
            "linear form."
        )
