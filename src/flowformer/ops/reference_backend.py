"""`reference.py` as a backend: shared key heads are repeated, packed sequences are computed one by one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import reference
from .common import Mask, Masks, Options, State

if TYPE_CHECKING:
    from .bounds import Lengths


def refusals(*_: Any) -> list[str]:
    """No reasons: this backend can run every call."""
    return []


def by_name(query: Tensor) -> bool:
    """True: this backend needs far more memory than the others."""
    return True


def bidirectional(query: Tensor, key: Tensor, value: Tensor, masks: Masks, options: Options) -> Tensor:
    key, value = reference.repeat_heads(query, key), reference.repeat_heads(query, value)
    with torch.autocast(query.device.type, enabled=False):
        return reference.bidirectional(query, key, value, *masks, **options.as_keywords())


def causal(query: Tensor, key: Tensor, value: Tensor, mask: Mask, options: Options) -> Tensor:
    return recurrent(query, key, value, mask, None, options)[0]


def recurrent(
    query: Tensor, key: Tensor, value: Tensor, mask: Mask, state: State | None, options: Options
) -> tuple[Tensor, State]:
    key, value = reference.repeat_heads(query, key), reference.repeat_heads(query, value)
    with torch.autocast(query.device.type, enabled=False):
        return reference.causal(query, key, value, mask, state, **options.as_keywords())


def packed(query: Tensor, key: Tensor, value: Tensor, lengths: Lengths, is_causal: bool, options: Options) -> Tensor:
    from .bounds import starts_and_lengths

    sinks, sources = starts_and_lengths(query.shape[0], key.shape[0], lengths, is_causal)
    parts, stop = [], 0
    for start_q, length_q, start_k, length_k in zip(*sinks, *sources, strict=True):
        q = query[start_q : start_q + length_q].transpose(0, 1)[None]
        k, v = (x[start_k : start_k + length_k].transpose(0, 1)[None] for x in (key, value))
        out = causal(q, k, v, None, options) if is_causal else bidirectional(q, k, v, (None, None), options)
        parts.append(out[0].transpose(0, 1))
        stop = start_q + length_q
    rest = query.new_zeros(query.shape[0] - stop, query.shape[1], value.shape[-1])
    return torch.cat([*parts, rest])
