"""Causal Flow-Attention of one rank's part of the sequence: the state of the earlier ranks, level by level.

Shapes: query (B, H, N, D), key (B, H_kv, N, D), value (B, H_kv, N, E), mask (B, N), of this rank; the three tensors of
a state are those of `FlowState`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..common import Inputs, Mask, Options, Powers, State, sum_dtype, without_autocast
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
    part = Part.of(inputs, mask, options, exchange, with_end, recurrent)
    with without_autocast(query):
        (*sums, count), (*end_sums, end_count) = _flow_sums(part, first)
        conserved, end_conserved = _conserved_sums(part, first, sums, count)
        sums += conserved.unbind(-2)
        end_sums += end_conserved.unbind(-2)
        logs, end_logs = _log_sums(part, first, sums, count, end_count)
        scalars = torch.cat([count, logs], -1)
        memory, end_memory = _memory(part, first, sums, scalars)
        if variant.renormalize:
            memory, competing = _without_last(memory)
            end_memory, end_competing = _without_last(end_memory)
            sums.append(competing)
            end_sums.append(end_competing)
        result = torch.cat(part.run(part.values, sums, memory, scalars)[0], 1)
        if not with_end:
            return result, ()
        return result, (torch.stack(end_sums, -2), end_memory, torch.cat([end_count, end_logs], -1))


class Part(NamedTuple):
    """This rank's inputs in groups of heads, with methods that run the backend and exchange sums with other ranks."""

    queries: tuple[Tensor, ...]
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    powers: Sequence[Powers]
    key_heads: int  # H_kv
    mask: Mask
    options: Options
    exchange: Exchange
    with_end: bool
    recurrent: Recurrent

    @classmethod
    def of(
        cls, inputs: Inputs, mask: Mask, options: Options, exchange: Exchange, with_end: bool, recurrent: Recurrent
    ) -> Part:
        key_heads = inputs[1].shape[1]
        # split once: a split for each level would add up gradients of all heads instead of one group
        queries, keys, values = (_head_groups(x, key_heads) for x in inputs)
        powers = [None] * len(keys) if options.powers is None else _head_groups(options.powers, key_heads)
        return cls(queries, keys, values, powers, key_heads, mask, options, exchange, with_end, recurrent)

    def feature_sum(self, groups: Sequence[Tensor]) -> Tensor:
        return torch.cat([_FeatureSum.apply(x, self.mask, self.options) for x in groups], 1)

    def before(self, x: Tensor, start: Tensor, constants: int = 0) -> tuple[Tensor, Tensor]:
        """start plus the sum of x over earlier ranks, and start plus the sum over all ranks."""
        prefix, total = _Before.apply(x, self.exchange, self.with_end, constants)
        return start + prefix, start + total

    def run(
        self, values: Sequence[Tensor], sums: list[Tensor], memory: Tensor, scalars: Tensor, **changes: Any
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Run the backend from a state, with changes of the variant.

        Returns: the results of each group of heads, and the state of all heads after the last token.
        """
        changed = replace(self.options.variant, **changes)
        sums = [*sums, *[torch.zeros_like(sums[0])] * (num_sums(changed) - len(sums))]
        states = zip(*(_head_groups(x, self.key_heads) for x in (torch.stack(sums, -2), memory, scalars)), strict=True)
        groups = zip(self.queries, self.keys, values, states, self.powers, strict=True)
        outputs = [
            self.recurrent(
                q, k, v, self.mask, state, Options(self.options.scale, changed, power if changed.renormalize else None)
            )
            for q, k, v, state, power in groups
        ]
        results, ends = zip(*outputs, strict=True)
        return list(results), [torch.cat(x, 1) for x in zip(*ends, strict=True)]

    def run_flows(self, sums: list[Tensor], count: Tensor, **changes: Any) -> list[Tensor]:
        """The state after the last token, from empty logarithms, without the memory: values do not enter the flows."""
        no_values = [torch.zeros_like(v[..., :1]) for v in self.values]
        no_memory = torch.zeros_like(sums[0])[..., None]
        no_logs = count.new_full((*count.shape[:-1], 2), torch.finfo(count.dtype).min)
        return self.run(no_values, sums, no_memory, torch.cat([count, no_logs], -1), **changes)[1]


def _flow_sums(part: Part, first: State) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Σk, Σq and the number of tokens, before this rank's tokens and after those of all ranks."""
    tokens, dim = part.queries[0].shape[2:]
    key_sum, query_sum = part.feature_sum(part.keys), part.feature_sum(part.queries)
    key_sum = repeat_heads(query_sum, key_sum)
    count = torch.zeros_like(key_sum[..., :1]) + (tokens if part.mask is None else part.mask.sum(-1)[:, None, None])
    local = torch.cat([key_sum, query_sum, count], -1)
    start = torch.cat([first[0][..., :2, :].flatten(2), first[2][..., :1].detach()], -1)
    for totals in part.before(local, start, constants=1):
        key_sum, query_sum, count = totals.split([dim, dim, 1], -1)
        yield key_sum, query_sum, count.detach()


def _conserved_sums(part: Part, first: State, sums: list[Tensor], count: Tensor) -> tuple[Tensor, Tensor]:
    """Σk/O and Σq/I, (B, H, 2, D), before this rank's tokens and after those of all ranks."""
    local, *_ = part.run_flows(sums, count, competition="none", allocation="none", renormalize=False)
    return part.before(local[..., 2:, :], first[0][..., 2:4, :])


def _log_sums(part: Part, first: State, sums: list[Tensor], count: Tensor, end_count: Tensor) -> tuple[Tensor, Tensor]:
    """log Σ exp(Ô) and log Σ exp(Î), (B, H, 2), before this rank's tokens and after those of all ranks.

    A logarithm that the variant does not use stays that of the first state.
    """
    variant, first_logs = part.options.variant, first[2][..., 1:]
    used = slice(int(variant.competition != "softmax"), 1 + int(variant.allocation == "softmax"))
    start = torch.where(first[2][..., :1] > 0, first_logs, torch.finfo(first_logs.dtype).min)
    before = end = start[..., used]
    if "softmax" in (variant.competition, variant.allocation):
        *_, local = part.run_flows(sums, count)
        before, end = _LogBefore.apply(local[..., 1:][..., used], before, part.exchange, part.with_end)
    end = torch.where(end_count > 0, end, -torch.inf)
    logs, end_logs = (
        torch.cat([others[..., : used.start], x, others[..., used.stop :]], -1)
        for others, x in ((start, before), (first_logs, end))
    )
    return logs, end_logs


def _memory(part: Part, first: State, sums: list[Tensor], scalars: Tensor) -> tuple[Tensor, Tensor]:
    """S before this rank's tokens and after those of all ranks, with Σ c k as last column if it is renormalised."""
    start = first[1]
    _, (end_sums, local, _) = part.run(part.values, sums, torch.zeros_like(start), scalars, allocation="none")
    if part.options.variant.renormalize:
        local, start = (torch.cat([x, row[..., 4, :, None]], -1) for x, row in ((local, end_sums), (start, first[0])))
    return part.before(local, start)


def _head_groups(x: Tensor, key_heads: int) -> tuple[Tensor, ...]:
    """Split (B, H or H_kv, ...) into groups of heads; query heads stay with the key head that they share."""
    groups: tuple[Tensor, ...] = x.split(-(-key_heads // HEAD_GROUPS) * (x.shape[1] // key_heads), 1)
    return groups


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
