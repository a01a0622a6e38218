"""FlowState: the recurrent state of causal Flow-Attention, whose size does not depend on the length of the past."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .variant import FlowVariant


@dataclass(frozen=True, eq=False)
class FlowState:
    """The seven sums that causal Flow-Attention carries from token to token, for B sequences of H heads.

    They are stored in three plain tensors, in float32 (float64 for float64 inputs):
        sums: (B, H, 4, D) = Σk, Σq, Σk/O, Σq/I; (B, H, 5, D) with Σ c k at the end if the variant has `renormalize`.
        memory: (B, H, D, E) = Σ kᵀ c V.
        scalars: (B, H, 3) = the count of tokens, log Σ exp(Ô), and log Σ exp(Î). The last is an eighth sum, used only
            by `allocation="softmax"`.
    A state whose count and sums are 0 is empty; its logarithms are then ignored.

    >>> state = FlowState.empty(batch=2, heads=4, key_dim=8)
    >>> state.count.tolist(), state.memory.shape
    ([0, 0], torch.Size([2, 4, 8, 8]))
    """

    sums: Tensor
    memory: Tensor
    scalars: Tensor

    @classmethod
    def empty(
        cls,
        batch: int,
        heads: int,
        key_dim: int,
        value_dim: int | None = None,
        *,
        variant: FlowVariant | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> FlowState:
        """The state before the first token of `batch` sequences.

        Args:
            heads: number of query heads.
            key_dim, value_dim: head dimensions D and E; a value_dim of None is key_dim.
            variant: None is the default variant.
        """
        if dtype not in (torch.float32, torch.float64):
            raise TypeError(
                f"a state is kept in torch.float32 or torch.float64, got {dtype}: its sums span many tokens."
            )
        value_dim = key_dim if value_dim is None else value_dim
        memory = torch.zeros(batch, heads, key_dim, value_dim, device=device, dtype=dtype)
        scalars = memory.new_full((batch, heads, 3), -torch.inf)
        scalars[..., 0] = 0
        return cls(memory.new_zeros(batch, heads, num_sums(variant), key_dim), memory, scalars)

    @classmethod
    def unpack(cls, tensors: tuple[Tensor, ...]) -> FlowState:
        """The state with the three tensors that `pack` returned."""
        return cls(*tensors)

    def pack(self) -> tuple[Tensor, Tensor, Tensor]:
        """The three tensors (sums, memory, scalars), not copied: for a cache, a checkpoint, or a collective."""
        return self.sums, self.memory, self.scalars

    @property
    def count(self) -> Tensor:
        """The number of tokens so far in each sequence, (B,) int64."""
        return self.scalars[:, 0, 0].long()

    @property
    def key_sum(self) -> Tensor:
        """Σk, (B, H, D)."""
        return self.sums[..., 0, :]

    @property
    def query_sum(self) -> Tensor:
        """Σq, (B, H, D)."""
        return self.sums[..., 1, :]

    @property
    def conserved_key_sum(self) -> Tensor:
        """Σk/O, (B, H, D)."""
        return self.sums[..., 2, :]

    @property
    def conserved_query_sum(self) -> Tensor:
        """Σq/I, (B, H, D)."""
        return self.sums[..., 3, :]

    @property
    def log_sum_exp(self) -> Tensor:
        """log Σ exp(Ô), (B, H): the denominator of the competition."""
        return self.scalars[..., 1]

    @property
    def device(self) -> torch.device:
        return self.memory.device

    @property
    def dtype(self) -> torch.dtype:
        return self.memory.dtype

    def clone(self) -> FlowState:
        """A copy, for example to roll back to in speculative decoding."""
        return FlowState(*(part.clone() for part in self.pack()))

    def detach(self) -> FlowState:
        """The same state detached from the autograd graph: truncates backpropagation through time."""
        return FlowState(*(part.detach() for part in self.pack()))

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> FlowState:
        if dtype not in (None, torch.float32, torch.float64):
            raise TypeError(
                f"a state is kept in torch.float32 or torch.float64, got {dtype}: its sums span many tokens."
            )
        return FlowState(*(part.to(device=device, dtype=dtype) for part in self.pack()))

    def select(self, rows: Tensor) -> FlowState:
        """The states of these rows, in this order: (R,) integer indices; repeats are allowed, as in beam search."""
        is_tensor = isinstance(rows, Tensor)
        if not is_tensor or rows.dtype == torch.bool or rows.is_floating_point() or rows.dim() != 1:
            raise TypeError(f"select takes a 1-d tensor of integer row indices, got {_kind(rows)}.")
        return FlowState(*(part.index_select(0, rows.to(part.device)) for part in self.pack()))

    def zero_rows(self, rows: Tensor) -> FlowState:
        """The same state, with the rows where `rows` (B,) bool is True reset to the empty state."""
        batch = self.memory.shape[0]
        if not isinstance(rows, Tensor) or rows.dtype != torch.bool or rows.shape != (batch,):
            raise TypeError(f"zero_rows takes a bool tensor of shape ({batch},), True = start over, got {_kind(rows)}.")
        empty = FlowState.empty(*self.memory.shape, device=self.device, dtype=self.dtype)
        rows = rows.to(self.device)[:, None, None]
        return FlowState(
            self.sums.masked_fill(rows[..., None], 0),
            self.memory.masked_fill(rows[..., None], 0),
            torch.where(rows, empty.scalars, self.scalars),
        )


def _kind(x: object) -> str:
    return f"{x.dtype} of shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__


def num_sums(variant: FlowVariant | None) -> int:
    """The number of sums over features in a state of this variant."""
    return 5 if variant is not None and variant.renormalize else 4


def empty_state(query: Tensor, value: Tensor, variant: FlowVariant | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """The packed state before the first token of a query (B, H, N, D) with values (B, H_kv, M, E)."""
    batch, heads, _, key_dim = query.shape
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    sizes = batch, heads, key_dim, value.shape[-1]
    return FlowState.empty(*sizes, variant=variant, device=query.device, dtype=dtype).pack()
