"""Causal Flow-Attention of one rank's part of the sequence: the state of the earlier ranks, level by level.

Shapes: query (B, H, N, D), key (B, H_kv, N, D), value (B, H_kv, N, E), mask (B, N), of this rank; the three tensors of
a state are those of `FlowState`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..common import Inputs, Mask, Options, State, sum_dtype, without_autocast
from ..library import differentiate
from ..reference import repeat_heads
from ..state import empty_state, num_sums
from ..torch.causal import MIN_BLOCKS
from ..torch.features import feature_gradient, features
from ..torch.head_blocks import head_blocks
from .exchange import Exchange

Recurrent = Callable[..., tuple[Tensor, State]]
# Every level runs over all tokens, and autograd adds up the gradients of the levels. With groups of heads, only the
# gradients of one group are held in addition to the sums.
HEAD_GROUPS = 4


def attend(
    inputs: Inputs,
    mask: Mask,
    state: State | None,
    options: Options,
    exchange: Exchange,
    with_end: bool,
    recurrent: Recurrent,
) -> tuple[Tensor, State]:
    """The result for this rank's tokens, and the state after the last token of the last rank if `with_end`.

    Args:
        state: the state before the first token of the first rank, equal on every rank; None is an empty state.
        options: if it has powers, their gradient is this rank's term of the sum over ranks.
        with_end: whether to return the last state; otherwise () is returned, and its gradient is not exchanged.
        recurrent: the backend's recurrent function.
    """
    (query, key, value), variant = inputs, options.variant
    if query.shape[2] == 0 and not variant.has_operator:
        # without tokens, plain operators build no autograd graph, but the other ranks wait for this rank's backward
        # pass: compute one masked token
        padded = F.pad(query, (0, 0, 0, 1)), F.pad(key, (0, 0, 0, 1)), F.pad(value, (0, 0, 0, 1))
        mask = torch.zeros(len(query), 1, dtype=torch.bool, device=query.device)
        result, end = attend(padded, mask, state, options, exchange, with_end, recurrent)
        return result[:, :, :0], end
    first = empty_state(query, value, variant) if state is None else state
    lowest = torch.finfo(first[0].dtype).min
    dim = query.shape[3]
    key_heads = key.shape[1]

    def split_heads(x: Tensor) -> tuple[Tensor, ...]:
        """Split (B, H or H_kv, ...) into groups of heads; query heads stay with the key head that they share."""
        groups: tuple[Tensor, ...] = x.split(-(-key_heads // HEAD_GROUPS) * (x.shape[1] // key_heads), 1)
        return groups

    queries, keys, values = map(split_heads, (query, key, value))
    # values do not enter the flows
    no_values = [torch.zeros_like(v[..., :1]) for v in values]
    powers = [None for _ in keys] if options.powers is None else split_heads(options.powers)

    def before(x: Tensor, start: Tensor, constants: int = 0) -> tuple[Tensor, Tensor]:
        """start plus the sum of x over earlier ranks, and start plus the sum over all ranks."""
        prefix, total = _Before.apply(x, exchange, with_end, constants)
        return start + prefix, start + total

    def run(
        values: Sequence[Tensor], sums: list[Tensor], memory: Tensor, scalars: Tensor, **changes: Any
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The results of each group of heads, and the state of all heads after the last token."""
        changed = replace(variant, **changes)
        sums = [*sums, *[torch.zeros_like(sums[0])] * (num_sums(changed) - len(sums))]
        parts = zip(*map(split_heads, (torch.stack(sums, -2), memory, scalars)), strict=True)
        outputs = [
            recurrent(q, k, v, mask, part, Options(options.scale, changed, power if changed.renormalize else None))
            for q, k, v, part, power in zip(queries, keys, values, parts, powers, strict=True)
        ]
        results, ends = zip(*outputs, strict=True)
        return list(results), [torch.cat(x, 1) for x in zip(*ends, strict=True)]

    def feature_sum(heads: Sequence[Tensor]) -> Tensor:
        return torch.cat([_FeatureSum.apply(x, mask, options) for x in heads], 1)

    with without_autocast(query):
        key_sum, query_sum = repeat_heads(query, feature_sum(keys)), feature_sum(queries)
        tokens = query.shape[2] if mask is None else mask.sum(-1)[:, None, None]
        count = torch.zeros_like(key_sum[..., :1]) + tokens
        local = torch.cat([key_sum, query_sum, count], -1)
        start = torch.cat([first[0][..., :2, :].flatten(2), first[2][..., :1].detach()], -1)
        flow_sums, end_flow_sums = (x.split([dim, dim, 1], -1) for x in before(local, start, constants=1))
        sums, count = list(flow_sums[:2]), flow_sums[2].detach()

        no_memory = torch.zeros_like(first[1][..., :1])
        empty_scalars = torch.cat([count, count.new_full((*count.shape[:-1], 2), lowest)], -1)
        plain = {"competition": "none", "allocation": "none", "renormalize": False}
        _, (local, *_) = run(no_values, sums, no_memory, empty_scalars, **plain)
        conserved, end_conserved = before(local[..., 2:, :], first[0][..., 2:4, :])
        sums += conserved.unbind(-2)

        logs = end_logs = torch.where(first[2][..., :1] > 0, first[2][..., 1:], lowest)
        # the logarithms that the variant uses: log Σ exp(Ô), log Σ exp(Î)
        used = slice(int(variant.competition != "softmax"), 1 + int(variant.allocation == "softmax"))
        if "softmax" in (variant.competition, variant.allocation):
            _, (*_, local) = run(no_values, sums, no_memory, empty_scalars)
            merged = _LogBefore.apply(local[..., 1:][..., used], logs[..., used], exchange, with_end)
            logs, end_logs = (torch.cat([logs[..., : used.start], x, logs[..., used.stop :]], -1) for x in merged)
        scalars = torch.cat([count, logs], -1)
        _, (end_sums, local, _) = run(values, sums, torch.zeros_like(first[1]), scalars, allocation="none")
        start = first[1]
        if variant.renormalize:  # Σ c k as one more column of S
            local, start = (
                torch.cat([x, row[..., 4, :, None]], -1) for x, row in ((local, end_sums), (start, first[0]))
            )
        memory, end_memory = before(local, start)
        if variant.renormalize:
            memory, competing = _without_last(memory)
            end_memory, end_competing = _without_last(end_memory)
            sums.append(competing)
        result = torch.cat(run(values, sums, memory, scalars)[0], 1)
        if not with_end:
            return result, ()
        end_sums = torch.cat([torch.stack(end_flow_sums[:2], -2), end_conserved], -2)
        if variant.renormalize:
            end_sums = torch.cat([end_sums, end_competing[..., None, :]], -2)
        count = end_flow_sums[2].detach()
        end_logs = torch.where(count > 0, end_logs, -torch.inf)
        # a logarithm that the variant does not use stays unchanged
        first_logs = first[2][..., 1:]
        end_logs = torch.cat([first_logs[..., : used.start], end_logs[..., used], first_logs[..., used.stop :]], -1)
        return result, (end_sums, end_memory, torch.cat([count, end_logs], -1))


def _without_last(memory: Tensor) -> tuple[Tensor, Tensor]:
    """S (B, H, D, E) and Σ c k (B, H, D), from a tensor with both."""
    return memory[..., :-1], memory[..., -1]


class _FeatureSum(torch.autograd.Function):
    """Σ φ(scale·x) over the tokens of x (B, H, N, D); saves only x for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Mask, options: Options) -> Tensor:
        ctx.save_for_backward(x, mask)
        ctx.options = options
        total = x.new_empty(*x.shape[:2], x.shape[3], dtype=sum_dtype(x))
        for block in head_blocks(x, x, x, x.shape[2], MIN_BLOCKS):
            block.write_sinks(total, features(block.sinks(x), block.mask(mask), options).sum(-2))
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return *differentiate(_feature_sum_gradient, grad, *ctx.saved_tensors, ctx.options), None, None


def _feature_sum_gradient(grad: Tensor, x: Tensor, mask: Mask, options: Options) -> tuple[Tensor]:
    grad_x = torch.empty_like(x)
    for block in head_blocks(x, x, x, x.shape[2], MIN_BLOCKS):
        feature = features(block.sinks(x), block.mask(mask), options)
        grad_feature = block.sinks(grad)[:, None].expand_as(feature)
        block.write_sinks(grad_x, feature_gradient(grad_feature, feature, options))
    return (grad_x,)


class _Before(torch.autograd.Function):
    """The sum of x over earlier ranks, and over all ranks; the gradient is summed over later ranks.

    Args:
        with_total: if False, the sum over all ranks is not needed, and zeros are returned in its place.
        constants: how many numbers at the end of the last axis have no gradient.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: Exchange, with_total: bool, constants: int = 0) -> tuple[Tensor, Tensor]:
        ctx.options = exchange, with_total, constants
        before, total = exchange.before(x, with_total)
        return before, torch.zeros_like(x) if total is None else total

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_total: Tensor) -> Any:
        return *differentiate(_before_gradient, grad, grad_total, *ctx.options), None, None, None


def _before_gradient(
    grad: Tensor, grad_total: Tensor, exchange: Exchange, with_total: bool, constants: int
) -> tuple[Tensor]:
    grad, grad_total = (x[..., : x.shape[-1] - constants] for x in (grad, grad_total))
    return (F.pad(exchange.after(grad, grad_total if with_total else None), (0, constants)),)


class _LogBefore(torch.autograd.Function):
    """log(exp(first) + Σ exp(x)) with Σ over earlier ranks, and with Σ over all ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, first: Tensor, exchange: Exchange, with_total: bool) -> tuple[Tensor, Tensor]:
        running = exchange.running_log(x, first)
        ctx.save_for_backward(x, running)
        ctx.exchange, ctx.with_total = exchange, with_total
        return running[exchange.rank], running[-1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_total: Tensor) -> Any:
        saved = *ctx.saved_tensors, ctx.exchange, ctx.with_total
        return *differentiate(_log_before_gradient, grad, grad_total, *saved), None, None


def _log_before_gradient(
    grad: Tensor, grad_total: Tensor, x: Tensor, running: Tensor, exchange: Exchange, with_total: bool
) -> tuple[Tensor, Tensor]:
    grad_x = exchange.log_after(grad, grad_total if with_total else None, running)
    grad_first = (running[0] - running[exchange.rank]).exp() * grad
    if with_total:
        grad_first = grad_first + (running[0] - running[-1]).exp() * grad_total
    return (x - running[exchange.rank + 1]).exp() * grad_x, grad_first
