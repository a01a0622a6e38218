"""Flow-Attention for models that exist: an attention function and a mask function of transformers.

Shapes: B batch, H heads, N tokens, D features, R sequences packed into a batch.
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
from .linearized_heads import KEPT, FlowHeads
from .served import ATTENDS_ELSEWHERE, current_cache, is_cross_attention, refuse
from .softmax import Tokens, softmax_attention, window_attention

if TYPE_CHECKING:
    from ...ops.context.exchange import Group

UNION = "or_masks.<locals>.or_mask"


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
    """Flow-Attention as an attention function of transformers.

    Args:
        query: (B, H, N, D).
        key, value: (B, H_kv, N, D) where H_kv divides H; with a cache those of the new tokens alone.
        attention_mask: what `flow_attention_mask` made.
        dropout: on the result: there is no matrix of weights to drop from.
        scaling: of the scores of a softmax; used only where one is kept, see `Exchange`.
        is_causal: None is what the module says.
        kwargs: cu_seq_lens_q and cu_seq_lens_k are the bounds of packed sequences.

    Returns: (B, N, H, D), and None for the weights.
    """
    heads, group = getattr(module, "flow", None), group_of(module)
    past = None if heads == KEPT else _past(module)
    tokens = tokens_of(module, query, key, attention_mask, is_causal, past, kwargs)
    if group is not None and (past is not None or tokens.bounds is not None):
        raise NotImplementedError(
            "sequences cut over ranks take no cache and no packed sequences. Pass use_cache=False and rows with a mask."
        )
    if heads == KEPT:
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
    """Flow-Attention with what its heads have learned, and a softmax in a window beside it, (B, H, N, E)."""
    q, k = heads.features(query, key)
    count = None if past is None or past.state is None else past.state.count
    result = _flow(q, k, value, tokens, past, {"variant": heads.variant, "powers": heads.powers, "group": group})
    window = heads.exchange.window
    if window:
        seen = tokens.seen(query, count)
        if past is not None and past.state is not None:
            key, value, mask = past.remember(key, value, tokens.mask, window - 1)
            tokens = tokens._replace(mask=mask)
        near, log_near, inside = window_attention(query, key, value, tokens, window, scaling, softcap)
        share = heads.near_share(query, log_near, seen - inside)[..., None].to(result.dtype)
        result = share * near + (1 - share) * result
    return result if heads.gain is None else result * heads.gain[:, None, None].to(result.dtype)


def _flow(query, key, value, tokens: Tokens, past: FlowCacheLayer | None, options: dict[str, Any]) -> Tensor:
    """Flow-Attention of tokens padded, packed, or continued from a cache, (B, H, N, E)."""
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
    """What the layer, its mask and the caller say of the tokens; raises on what is not served."""
    own, shape = getattr(module, "is_causal", None), () if mask is None else mask.shape
    # a layer may not know of the pattern it is given
    if len(shape) == 3 and shape[1] > 1:
        is_causal = False
    elif not own and len(shape) in (1, 3):
        is_causal = True
    elif is_causal is None:
        is_causal = own
    _check(module, query, key, mask, is_causal, past, options)
    packed_q, packed_k = options.get("cu_seq_lens_q"), options.get("cu_seq_lens_k")
    if mask is not None and mask.dim() == 1:
        packed_q = packed_k = mask
    if (packed_q is None) != (packed_k is None):
        raise ValueError("packed sequences need cu_seq_lens_q and cu_seq_lens_k, got one of them.")
    if mask is not None and mask.dim() > 1:
        mask = mask.flatten(1)  # (B, 1, N) or (B, N, 1) → (B, N)
        mask = None if mask.stride(-1) == 0 else mask.bool()
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
    """What `flow_attention_forward` needs to know of a mask, found once for all layers.

    Returns: the padding mask, bool: (B, 1, N) for a causal pattern, (B, N, 1) for one that comes down to all pairs of
    tokens; without padding, one number expanded. (B, N) or None for the plain bidirectional pattern and for that of
    cross-attention, which leave the direction to the layer. Where a row holds several causal sequences, packed or in
    chunks, their bounds (R + 1,). Any other pattern is an error.
    """
    if attention_mask is not None and attention_mask.shape[1] != kv_length:
        raise ValueError(
            f"attention_mask must cover the tokens in the cache and the new ones, {(batch_size, kv_length)}, got "
            f"{tuple(attention_mask.shape)}."
        )
    is_causal = _is_causal(mask_function)
    # where lengths differ and nothing is causal, queries attend to another sequence, which the attention refuses
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


def _made_by(mask_function: Callable) -> str:
    return f"{mask_function.__module__}.{mask_function.__qualname__}".removeprefix("transformers.masking_utils.")


def _is_causal(mask_function: Callable) -> bool:
    """Whether a pattern is causal, an intersection with one that is, or a union of such."""
    if mask_function in (causal_mask_function, bidirectional_mask_function):
        return mask_function is causal_mask_function
    given = inspect.getclosurevars(mask_function).nonlocals
    parts = (given["mask_function"],) if "mask_function" in given else given.get("mask_functions", ())
    return (all if _made_by(mask_function) == UNION else any)(map(_is_causal, parts))


def _starts(mask_function: Callable, positions: Tensor) -> Tensor | None:
    """Whether each token (B, N) begins a sequence that sees no other; None for a pattern that is not known.

    A pattern is known by the function of transformers that made it, and by what that function was given.

    Args:
        positions: (B, N), the indices that the pattern compares.
    """
    length = positions.shape[1]
    starts = (torch.arange(length, device=positions.device) == 0).expand_as(positions)
    if mask_function in (causal_mask_function, bidirectional_mask_function):
        return starts
    made_by = _made_by(mask_function)
    given = inspect.getclosurevars(mask_function).nonlocals
    if made_by == "and_masks.<locals>.and_mask":
        parts = [_starts(part, positions) for part in given["mask_functions"]]
        return None if any(part is None for part in parts) else torch.stack(cast(list[Tensor], parts)).any(0)
    if made_by == UNION:
        return starts if any(_joins_all(part, positions) for part in given["mask_functions"]) else None
    if made_by == "remap_positions_for_packed_sequence.<locals>.inner_mask":
        # since transformers 5.23, beside the pattern that keeps packed sequences apart
        return _starts(given["mask_function"], given["position_ids"].expand_as(positions))
    if made_by == "sliding_window_overlay.<locals>.inner_mask":
        # 0 is that of a model without windows, which makes the mask nevertheless
        return starts if given["sliding_window"] >= length or given["sliding_window"] == 0 else None
    if made_by == "sliding_window_bidirectional_overlay.<locals>.inner_mask":
        return starts if given["sliding_window"] >= length - 1 else None
    if made_by.endswith("._bidirectional_window_overlay.<locals>.inner_mask"):  # of Gemma 3 and its copies
        return starts if given["sliding_window"] >= length else None
    if made_by == "packed_sequence_mask_function.<locals>.inner_mask":
        sequence = given["packed_sequence_mask"].expand_as(positions)
    elif made_by == "chunked_overlay.<locals>.inner_mask":
        place = positions - given["left_padding"].to(positions.device)[:, None]
        sequence = place.clamp_min(0) // given["chunk_size"]  # padding, which is masked out, is of no chunk
    else:
        # a function of pairs whose result has no dimensions does not look at them
        pair = torch.zeros(4, 1, dtype=torch.long, device=positions.device)
        constant = mask_function(*pair)
        return starts if isinstance(constant, Tensor) and constant.dim() == 0 and constant else None
    # positions that do not go on are those of another packed sequence; elsewhere, sequences may not be interleaved
    change, goes_on = sequence.diff(), positions.diff() == 1
    return starts | F.pad(change != 0, (1, 0)) if (change >= 0)[goes_on].all() else None


def _joins_all(mask_function: Callable, positions: Tensor) -> bool:
    """Whether all tokens see each other, so that a union with any other pattern is this one."""
    starts = None if _is_causal(mask_function) else _starts(mask_function, positions)
    return starts is not None and not starts[:, 1:].any()


def check_packed_mask(mask: Tensor) -> None:
    """Refuse padding beside the bounds of packed sequences."""
    if not mask.all():
        raise ValueError(
            "got cu_seq_lens_q and an attention_mask with padding. Pack sequences without padding, or pass the mask "
            "alone."
        )


def bounds(starts: Tensor) -> Tensor:
    """Where the sequences of a flattened batch begin and end, (R + 1,), from whether each token (B, N) begins one.

    >>> bounds(torch.tensor([[True, False, True], [True, False, False]])).tolist()
    [0, 2, 3, 6]
    """
    return F.pad(starts.flatten().nonzero()[:, 0], (0, 1), value=starts.numel()).int()


def _past(module: nn.Module) -> FlowCacheLayer | None:
    """What the layer keeps of the tokens before these, or None without a cache; hooks find it, see `served.py`."""
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
    if is_causal and query.shape[2] != key.shape[2] and getattr(module, "flow", None) != KEPT:
        raise NotImplementedError(
            f"got {query.shape[2]} queries and {key.shape[2]} keys: {NAME} cannot decode from a cache of keys and "
            "values, which lacks the sums over past queries. Pass FlowCache(model.config), or use_cache=False."
        )
    if mask is not None and (mask.dim() > 3 or (mask.dim() == 3 and 1 not in mask.shape[1:])):
        raise ValueError(
            f"{NAME} takes a padding mask (batch, length), got {tuple(mask.shape)}: a mask of pairs of tokens has no "
            "linear form."
        )
