"""Nested tensors, jagged or strided, as packed sequences and back.

Shapes: B sequences of j tokens each, T tokens in all.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Sequences(NamedTuple):
    """The tokens of a nested tensor (B, j, ...) as packed sequences."""

    tokens: Tensor  # (T, ...)
    cu_seqlens: Tensor  # (B + 1,)
    max_seqlen: int
    layout: torch.layout

    @classmethod
    def of(cls, x: Any, layout: str = "(batch, j, width)", jagged_dim: int = 1) -> Sequences:
        """The packed sequences of a nested tensor.

        Args:
            layout: the expected shape, for error messages.
            jagged_dim: the dimension whose size differs between sequences.
        """
        if not x.is_nested:
            raise ValueError(f"query, key and value must all be nested or none, got one of shape {tuple(x.shape)}.")
        if x.dim() != layout.count(",") + 1:
            raise ValueError(f"a nested tensor must have the shape {layout}, got {x.dim()} dimensions.")
        if x.layout == torch.strided:
            parts = [part.movedim(jagged_dim - 1, 0) for part in x.unbind()]
            lengths = torch.tensor([part.shape[0] for part in parts])
            bounds = F.pad(lengths.cumsum(0), (1, 0)).to(x.device)
            return cls(torch.cat(parts), bounds, max(lengths.tolist(), default=0), x.layout)
        if x._ragged_idx != jagged_dim:
            raise ValueError(f"a nested tensor must have the shape {layout} with j tokens, got {tuple(x.shape)}.")
        x = x.transpose(1, jagged_dim)
        x = x if x.lengths() is None else x.contiguous()  # lengths are set if there are gaps between the sequences
        return cls(x.values(), x.offsets(), x._get_max_seqlen(), x.layout)

    def nested(self, tokens: Tensor) -> Tensor:
        """Convert tokens (T, ...) to a nested tensor (B, j, ...) with these lengths and this layout."""
        if self.layout == torch.strided:
            return torch.nested.as_nested_tensor(list(tokens.split(self.cu_seqlens.diff().tolist())))
        return torch.nested.nested_tensor_from_jagged(tokens, self.cu_seqlens, max_seqlen=self.max_seqlen)


def check_same_lengths(first: Sequences, second: Sequences, names: str) -> None:
    a, b = first.cu_seqlens, second.cu_seqlens
    if a is not b and not torch.equal(a, b):
        raise ValueError(
            f"{names} must have the same lengths, got {a.diff().tolist()} and {b.diff().tolist()} tokens a sequence."
        )
