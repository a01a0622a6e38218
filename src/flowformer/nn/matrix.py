"""Column sums, row sums and row entropies of the attention matrix W, R = W V, without storing W.

Flow-Attention and its rivals are linear in the values. With the columns of an identity matrix as values, any of them
therefore returns the columns of W. We compute a block of C columns at a time.

Shapes: B batch, H heads, H_kv key heads, N sinks, M sources, C sources of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..ops import flow_attention
from ..ops.reference import repeat_heads
from .attention import FlowAttention, RivalAttention

BLOCK = 128


class MatrixMaps(NamedTuple):
    """Statistics of the absolute values of W (few mechanisms have negative weights); 0 for masked tokens."""

    column_sums: Tensor  # (B, H, M), total weight of each source over all sinks
    row_sums: Tensor  # (B, H, N), total weight of each sink over all sources
    row_entropies: Tensor  # (B, H, N), entropy of each row divided by its sum, in nats
    visible: Tensor  # (B, N), number of sources that each sink may attend to

    def degeneracy(self, top: float = 0.1) -> Degeneracy:
        """Measure how close the attention is to a plain mean over all sources.

        Args:
            top: the fraction of the sources, largest column sums first, that `top_share` covers; rounded up to whole
                sources, so a uniform share of few sources is above `top`.
        """
        is_counted = (self.row_sums > 0) & (self.visible > 1)[:, None]
        evenness = self.row_entropies / self.visible.clamp_min(2).to(self.row_entropies).log()[:, None]
        count = self.visible.amax(-1, keepdim=True)  # (B, 1), number of unmasked sources
        ordered = self.column_sums.sort(-1, descending=True).values
        is_top = torch.arange(ordered.shape[-1], device=ordered.device) < (count * top).ceil()
        total = ordered.sum(-1)
        share = ordered.masked_fill(~is_top[:, None], 0).sum(-1) / total.clamp_min(torch.finfo(total.dtype).tiny)
        return Degeneracy(evenness[is_counted].mean().item(), share[total > 0].mean().item())


class Degeneracy(NamedTuple):
    """How uniform an attention is. The paper calls it degenerate if near-uniform: evenness ≈ 1, top_share ≈ `top`.

    In uniform causal attention, top_share ≈ top · (1 − log top), since more sinks see early sources. Rows with a single
    visible source count for nothing in the evenness, which is NaN if there are no others.
    """

    evenness: float  # entropy of a row / entropy of a uniform row; mean over rows, heads and examples
    top_share: float  # column sums of the top sources / sum of all columns; mean over heads and examples


@torch.no_grad()
def matrix_maps(
    attend: Callable[[Tensor], Tensor],
    query: Tensor,
    key: Tensor,
    *,
    is_causal: bool = False,
    query_mask: Tensor | None = None,
    key_mask: Tensor | None = None,
    block: int = BLOCK,
) -> MatrixMaps:
    """Compute the exact statistics of an attention matrix, a block of its columns at a time.

    Args:
        attend: returns the result (B, H, N, E) for values (B, H_kv, M, E); must be linear in the values.
        query, key: (B, H, N, D) and (B, H_kv, M, D), already bound in `attend`; only shapes, dtype and device are read.
        is_causal: whether `attend` is causal; used for `visible` only.
        query_mask, key_mask: (B, N) and (B, M) bool, already applied by `attend`; used for `visible` only.
        block: C; time grows with M / C, memory with C.

    >>> q = k = torch.randn(1, 2, 5, 4)
    >>> softmax = lambda value: nn.functional.scaled_dot_product_attention(q, k, value)
    >>> matrix_maps(softmax, q, k).row_sums.round(decimals=4).unique()
    tensor([1.])
    """
    batch, heads, sinks, sources = *query.shape[:3], key.shape[2]
    columns = []
    row_sums = row_logs = query.new_zeros(batch, heads, sinks, dtype=torch.promote_types(query.dtype, torch.float32))
    for start in range(0, sources, block):
        identity = torch.eye(sources, min(block, sources - start), dtype=query.dtype, device=query.device).roll(
            start, 0
        )
        weights = attend(identity.expand(batch, key.shape[1], -1, -1)).to(row_sums.dtype).abs()  # (B, H, N, C)
        columns.append(weights.sum(2))
        row_sums = row_sums + weights.sum(-1)
        row_logs = row_logs + weights.xlogy(weights).sum(-1)
    # −Σ (w/S) log (w/S) = log S − (Σ w log w)/S
    divisor = row_sums.clamp_min(torch.finfo(row_sums.dtype).tiny)
    entropies = (divisor.log() - row_logs / divisor).clamp_min(0).masked_fill(row_sums == 0, 0)
    column_sums = torch.cat(columns, -1) if columns else row_sums.new_zeros(batch, heads, 0)
    return MatrixMaps(column_sums, row_sums, entropies, _visible(query, key, is_causal, query_mask, key_mask))


@contextmanager
def record_matrices(model: nn.Module, block: int = BLOCK) -> Iterator[list[MatrixMaps]]:
    """Collect the `MatrixMaps` of every attention of a model in evaluation mode, in the order they run.

    Each attention runs ⌈M / block⌉ more times.

    >>> attention = RivalAttention(32, 4, name="cosformer", max_length=10).eval()
    >>> with record_matrices(attention) as maps:
    ...     _ = attention(torch.randn(2, 10, 32))
    >>> maps[0].column_sums.shape
    torch.Size([2, 4, 10])
    """
    modules = [module for module in model.modules() if isinstance(module, FlowAttention | RivalAttention)]
    if not modules:
        raise ValueError(f"{type(model).__name__} has no attention of this package.")
    if model.training:
        raise ValueError("dropout and redrawn features are not part of a matrix: call model.eval() first.")
    maps: list[MatrixMaps] = []

    def record(module: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        maps.append(_module_maps(module, block, *args, **options))

    handles = [module.register_forward_pre_hook(record, with_kwargs=True) for module in modules]
    try:
        yield maps
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def _module_maps(
    module: FlowAttention | RivalAttention,
    block: int,
    query: Tensor,
    key: Tensor | None = None,
    value: Tensor | None = None,
    *,
    query_mask: Tensor | None = None,
    key_mask: Tensor | None = None,
    state: Any = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> MatrixMaps:
    if state is not None:
        raise ValueError("got a state; a matrix is that of whole sequences only.")
    if cu_seqlens is not None:
        raise ValueError("got packed sequences (cu_seqlens); for their matrices pass a padded batch with its mask.")
    q, k, _, query_mask, key_mask = module._project(query, key, value, query_mask, key_mask)
    options: dict[str, Any] = {"is_causal": module.is_causal, "query_mask": query_mask, "key_mask": key_mask}
    if isinstance(module, FlowAttention):
        if module.group is not None:
            raise NotImplementedError("the matrix of a sequence cut over ranks is not recorded; use one rank.")
        if module.rotary is not None:
            q, k = module._rotated(q, k, query, key, key_mask, None)
        attend = partial(flow_attention, q, k, **options, **module._attention_options())
    else:
        k = repeat_heads(q, k)
        attend = partial(module.mechanism.weigh, q, k, **options)
    return matrix_maps(attend, q, k, block=block, **options)


def _visible(query: Tensor, key: Tensor, is_causal: bool, query_mask: Tensor | None, key_mask: Tensor | None) -> Tensor:
    if key_mask is None:
        key_mask = torch.ones(len(key), key.shape[2], dtype=torch.bool, device=key.device)
    visible = key_mask.cumsum(-1) if is_causal else key_mask.sum(-1, keepdim=True).expand(-1, query.shape[2])
    return visible if query_mask is None else visible.masked_fill(~query_mask, 0)
