"""Flow-Attention for models that exist: an attention function and a mask function of transformers.

Shapes: B batch, H heads, N tokens, D features, R sequences packed into a batch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

from ...ops import flow_attention, flow_attention_varlen
from .cache import NAME
from .served import ATTENDS_ELSEWHERE, is_cross_attention, refuse


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
        key, value: (B, H_kv, N, D) where H_kv divides H.
        attention_mask: what `flow_attention_mask` made.
        dropout: on the result: there is no matrix of weights to drop from.
        scaling: not used. It keeps a softmax from saturating, and there is none.
        is_causal: None is what the module says.
        kwargs: cu_seq_lens_q and cu_seq_lens_k are the bounds of packed sequences.

    Returns: (B, N, H, D), and None for the weights.
    """
    own = getattr(module, "is_causal", None)
    if attention_mask is not None and attention_mask.dim() in (1, 3) and not own:
        is_causal = True  # a layer that does not know of the causal mask it is given
    elif is_causal is None:
        is_causal = own
    _check(module, query, key, attention_mask, is_causal, kwargs)
    options: dict[str, Any] = {"is_causal": is_causal, "enable_gqa": query.shape[1] != key.shape[1]}
    packed_q, packed_k = kwargs.get("cu_seq_lens_q"), kwargs.get("cu_seq_lens_k")
    if attention_mask is not None and attention_mask.dim() == 1:
        packed_q = packed_k = attention_mask
    if packed_q is not None and packed_k is not None:
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))  # (B·N, H, D)
        result = flow_attention_varlen(q, k, v, packed_q, packed_k, query.shape[2], key.shape[2], **options)
        result = result.unflatten(0, (len(query), -1))
    else:
        key_mask = None if attention_mask is None or attention_mask.stride(-1) == 0 else attention_mask.bool()
        key_mask = key_mask.squeeze(1) if key_mask is not None and key_mask.dim() == 3 else key_mask
        query_mask = key_mask if query.shape[2] == key.shape[2] else None
        result = flow_attention(query, key, value, query_mask=query_mask, key_mask=key_mask, **options).transpose(1, 2)
    return F.dropout(result, dropout, module.training).contiguous(), None


def flow_attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable = causal_mask_function,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **kwargs,
) -> Tensor | None:
    """What `flow_attention_forward` needs to know of a mask, found once for all layers.

    Returns: the padding mask, bool: (B, N), or None for no padding, and for a causal pattern (B, 1, N), which without
    padding is one number expanded. Where a row holds several sequences, packed or in chunks, their bounds (R + 1,).
    Any other pattern has no linear form and is an error.
    """
    is_plain = mask_function in (causal_mask_function, bidirectional_mask_function) or q_length != kv_length
    starts = None if is_plain or use_vmap else _starts(mask_function, batch_size, q_length, device)
    if is_plain or (starts is not None and not starts[:, 1:].any()):
        if not _is_causal(mask_function):
            return attention_mask
        if attention_mask is None:
            attention_mask = torch.ones((), dtype=torch.bool, device=device).expand(batch_size, kv_length)
        return attention_mask[:, None]
    if starts is None or (attention_mask is not None and not attention_mask.all()):
        raise NotImplementedError(
            f"{NAME} takes padding, or packed sequences and chunks without padding, causal or not. This model asks for "
            "another pattern, such as a sliding window shorter than the input, which has no linear form."
        )
    return bounds(starts)


def _is_causal(mask_function: Callable) -> bool:
    """Whether a pattern is causal, or an intersection with one that is."""
    if mask_function in (causal_mask_function, bidirectional_mask_function):
        return mask_function is causal_mask_function
    return any(map(_is_causal, inspect.getclosurevars(mask_function).nonlocals.get("mask_functions", ())))


def _starts(mask_function: Callable, batch_size: int, length: int, device: torch.device | str) -> Tensor | None:
    """Whether each token (B, N) begins a sequence that sees no other; None for a pattern that is not known.

    A pattern is known by the function of `masking_utils` that made it, and by what that function was given.
    """
    starts = (torch.arange(length, device=device) == 0).expand(batch_size, length)
    if mask_function in (causal_mask_function, bidirectional_mask_function):
        return starts
    made_by = f"{mask_function.__module__}.{mask_function.__qualname__}".removeprefix("transformers.masking_utils.")
    given = inspect.getclosurevars(mask_function).nonlocals
    if made_by == "and_masks.<locals>.and_mask":
        parts = [_starts(part, batch_size, length, device) for part in given["mask_functions"]]
        return None if any(part is None for part in parts) else torch.stack(cast(list[Tensor], parts)).any(0)
    if made_by == "sliding_window_overlay.<locals>.inner_mask":
        # 0 is that of a model without windows, which makes the mask nevertheless
        return starts if given["sliding_window"] >= length or given["sliding_window"] == 0 else None
    if made_by == "sliding_window_bidirectional_overlay.<locals>.inner_mask":
        return starts if given["sliding_window"] >= length - 1 else None
    if made_by == "packed_sequence_mask_function.<locals>.inner_mask":
        sequence = given["packed_sequence_mask"]
    elif made_by == "chunked_overlay.<locals>.inner_mask":
        place = torch.arange(length, device=device)[None] - given["left_padding"].to(device)[:, None]
        sequence = place.clamp_min(0) // given["chunk_size"]  # padding, which is masked out, is of no chunk
    else:
        return None
    change = sequence.expand(batch_size, length).diff()
    return starts | F.pad(change != 0, (1, 0)) if (change >= 0).all() else None  # else sequences are interleaved


def bounds(starts: Tensor) -> Tensor:
    """Where the sequences of a flattened batch begin and end, (R + 1,), from whether each token (B, N) begins one.

    >>> bounds(torch.tensor([[True, False, True], [True, False, False]])).tolist()
    [0, 2, 3, 6]
    """
    return F.pad(starts.flatten().nonzero()[:, 0], (0, 1), value=starts.numel()).int()


def _check(
    module: nn.Module, query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool | None, options: dict
) -> None:
    if is_cross_attention(module):
        raise refuse(type(module), ATTENDS_ELSEWHERE)
    for name in ("position_bias", "s_aux", "indices", "block_indices"):
        if options.get(name) is not None:
            raise NotImplementedError(
                f"got {name}, which adds to the weights of a softmax or chooses among them; {NAME} has none. Choose "
                "another attn_implementation."
            )
    window = options.get("sliding_window")
    if window and window < query.shape[2]:
        raise refuse(type(module), f"its window of {window} is shorter than the input, which has no linear form")
    if is_causal is None:
        raise refuse(type(module), "it does not say whether it is causal")
    if is_causal and query.shape[2] != key.shape[2]:
        raise NotImplementedError(
            f"got {query.shape[2]} queries and {key.shape[2]} keys: {NAME} cannot decode from a cache of keys and "
            "values, which lacks the sums over past queries. Pass use_cache=False, or use FlowformerForCausalLM of "
            "flowformer.integrations.transformers, whose cache keeps them."
        )
    if mask is not None and (mask.dim() > 3 or (mask.dim() == 3 and mask.shape[1] != 1)):
        raise ValueError(
            f"{NAME} takes a padding mask (batch, length), got {tuple(mask.shape)}: a mask of pairs of tokens has no "
            "linear form."
        )
