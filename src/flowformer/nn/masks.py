"""Conversion of the attention masks of torch and timm to a token mask and a causal flag, which Flow-Attention takes.

A float mask is made to be added to the scores of a softmax: 0 keeps a token; -inf, finfo.min, -1e9 or -1e4 mask it out.
Any other value would be an additive bias, which linear attention cannot apply.
"""

from __future__ import annotations

import torch
from torch import Tensor

HUGE = 1e4  # values <= -HUGE mask a token out: exp(-HUGE) is 0 in every dtype


def kept_tokens(mask: Tensor | None, shape: torch.Size, name: str = "key_padding_mask") -> Tensor | None:
    """Convert torch's padding mask (True or hugely negative = padding) to a token mask (True = takes part)."""
    if mask is None:
        return None
    if mask.shape != shape:
        raise ValueError(f"{name} must have shape {tuple(shape)}, got {tuple(mask.shape)}.")
    if mask.dtype == torch.bool:
        return ~mask
    if not mask.is_floating_point():
        raise TypeError(f"{name} must be bool or float, got {mask.dtype}. Pass mask.bool().")
    kept, left_out = mask == 0, mask <= -HUGE
    require(
        (kept | left_out).all(),
        f"a float {name} may hold only 0 (takes part) and values from -inf to {-HUGE:g} (masked); other values would "
        "bias the scores of a softmax, which Flow-Attention does not have.",
    )
    return kept


def is_causal_mask(attn_mask: Tensor, shape: tuple[int, int]) -> bool:
    """Return True for the causal mask and False for a mask that blocks nothing; raise for any other mask.

    Where Python cannot read the values (see `is_readable`), a mask of the right shape is assumed to be causal, and an
    asynchronous assertion raises at run time if it is not.
    """
    message = (
        f"attn_mask of shape {tuple(attn_mask.shape)} is neither the causal mask of shape {shape} nor empty, and a "
        "general matrix of queries by keys has no linear form. Pass is_causal=True for the causal mask, and padding as "
        "key_padding_mask."
    )
    if attn_mask.shape != shape:
        raise NotImplementedError(message)
    blocked = attn_mask if attn_mask.dtype == torch.bool else attn_mask <= -HUGE
    is_mask = (blocked | (attn_mask == 0)).all()
    is_causal = is_mask & (blocked == torch.ones_like(blocked).triu(1)).all()
    if not is_readable(attn_mask):
        torch._assert_async(
            is_causal,
            "attn_mask is not the causal mask, the only one that a compiled or captured graph takes. Pass "
            "attn_mask=None where it blocks nothing; a general matrix of queries by keys has no linear form.",
        )
        return True
    if bool(is_mask) and not bool(blocked.any()):
        return False
    require(is_causal, message)
    return True


def require(condition: Tensor, message: str) -> None:
    """Raise unless the tensor is True. If Python cannot read it, add an assertion that raises when the graph runs."""
    if not is_readable(condition):
        torch._assert_async(condition, message)
        return
    try:
        holds = bool(condition)
    except RuntimeError as error:
        raise NotImplementedError("a mask cannot be checked under torch.vmap. Pass a bool padding mask.") from error
    if not holds:
        raise NotImplementedError(message)


def is_readable(x: Tensor) -> bool:
    """Whether Python can read the values: not in compiled code, in a CUDA graph capture, or on the meta device."""
    return not (torch.compiler.is_compiling() or x.is_meta or (x.is_cuda and torch.cuda.is_current_stream_capturing()))


def zero_padding(x: Tensor, mask: Tensor | None) -> Tensor:
    """x (B, N, …) with 0 where the mask (B, N) is False: NaN in padding would make gradients NaN, as 0 · NaN is NaN."""
    return x if mask is None else x.masked_fill(~mask.view(*mask.shape, *[1] * (x.dim() - 2)), 0)
