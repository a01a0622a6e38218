"""Bidirectional Flow-Attention of one rank's part of the sequence: the kernels, with exchanges between them.

Kernels sum the records of all segments of a head (`records.py`). Sums of other ranks are therefore added to the record
of the first segment, and the next kernel includes them.

Shapes: query (B, H, N, D), key (B, H_kv, M, D), value (B, H_kv, M, E), masks (B, N) and (B, M), of this rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...common import Mask, Powers, differentiate, empty_result, without_autocast
from ...variant import FlowVariant
from ..plan import contiguous, dense, empty, options_of, plan_of, variant_of
from ..precision import float32_precision
from ..stages import Exchange, Stages
from .plan import BidirectionalPlan
from .records import CONSERVED_KEY_SUM, CONSERVED_QUERY_SUM, KEY_SUM, MASS, QUERY_SUM, REFERENCE, SOURCES, record_size

LEAST = torch.finfo(torch.float32).min


class CutPlan(BidirectionalPlan):
    """The plan of a rank's part, whose kernels are launched in stages."""

    is_cut = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.stages = Stages()


# the first kernel of each stage
FORWARD = 0, 1, 2, 3  # sums; flows; memory; finish and result
BACKWARD = 0, 1, 3, 4  # grad_memory; grad_finish and grad_competition; grad_query; grad_source


class Records:
    """The records of all segments (B, H, T, ...), and Σ c k of each (B, H, T, D) if the result is renormalised."""

    def __init__(self, query: Tensor, value: Tensor, records: Tensor, competing: Tensor, renormalize: bool) -> None:
        (batch, heads, _, self.dim), self.memory_size = query.shape, query.shape[3] * value.shape[3]
        width = record_size(self.dim, value.shape[3])
        segments = records.numel() // max(batch * heads * width, 1)
        self.all = records.view(batch, heads, segments, width)
        self.memory = [self.all[..., : self.memory_size]]
        if renormalize:  # Σ c k as one more column of S
            self.memory.append(competing[: batch * heads * segments * self.dim].view(batch, heads, segments, self.dim))

    def vectors(self, first: Any, count: int) -> Tensor:
        start = self.memory_size + first.value * self.dim
        return self.all[..., start : start + count * self.dim]

    def scalars(self, first: Any, count: int) -> Tensor:
        start = self.memory_size + 4 * self.dim + first.value
        return self.all[..., start : start + count]

    def add_others(self, exchange: Exchange, *numbers: Tensor) -> None:
        """Adds the other ranks' sums of these numbers, (B, H, T, ...), to the first segment."""
        own = torch.cat([x.sum(2) for x in numbers], -1)
        others = (exchange.total(own) - own).split_with_sizes([x.shape[-1] for x in numbers], -1)
        for x, other in zip(numbers, others, strict=True):
            x[:, :, :1] += other[:, :, None]

    def merge_memory(self, exchange: Exchange, variant: FlowVariant, is_signed: bool) -> None:
        """Puts S of all ranks into the record of the first segment."""
        memory, reference, mass = torch.cat(self.memory, -1), self.scalars(REFERENCE, 1), self.scalars(MASS, 1)
        if variant.competition == "softmax":
            # the softmax over this rank's sources, and its normaliser
            most = reference.amax(2, keepdim=True) if reference.shape[2] else reference.sum(2, keepdim=True)
            weight = (reference - most).exp()
            own_mass = (weight * mass).sum(2)
            memory = (weight * memory).sum(2) / own_mass.clamp_min(torch.finfo(own_mass.dtype).tiny)
            logs = torch.where(own_mass > 0, most[:, :, 0] + own_mass.log(), LEAST)
            memory, logs = exchange.softmax_total(memory, logs, weighted=True)
        else:
            memory, logs = exchange.total(memory.sum(2)), torch.zeros_like(reference.sum(2))
        mass.zero_()
        # reference of a segment without mass; without powers Ô, and therefore its logarithm, is not negative
        reference.fill_(LEAST if is_signed else 0.0)
        mass[:, :, :1], reference[:, :, :1] = 1.0, logs[:, :, None]
        for part, total in zip(
            self.memory, memory.split_with_sizes([x.shape[-1] for x in self.memory], -1), strict=True
        ):
            part.zero_()
            part[:, :, :1] = total[:, :, None]


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_mask: Mask,
    key_mask: Mask,
    scale: float,
    variant: FlowVariant,
    exchange: Exchange,
    powers: Powers,
) -> Tensor:
    """The result for this rank's queries, (B, H, N, E); the gradient of the powers is this rank's share."""
    leaves = query, key, value, powers
    keep = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in leaves)
    inputs = query, key, value, query_mask, key_mask, powers, exchange, keep, *options_of(scale, variant)
    if keep:
        result: Tensor = _Attend.apply(*inputs)
        return result
    with without_autocast(query):
        return _forward(*inputs)[0]


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        with without_autocast(inputs[0]):
            result, kept = _forward(*inputs)
        ctx.save_for_backward(*inputs[:6], kept)
        ctx.exchange, ctx.options = inputs[6], inputs[8:]
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        with without_autocast(grad):
            *grads, of_powers = differentiate(_backward, grad, *ctx.saved_tensors, ctx.exchange, *ctx.options)
        has_powers = ctx.saved_tensors[5] is not None
        return *grads, None, None, of_powers if has_powers else None, None, None, *(None for _ in ctx.options)


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_mask: Mask,
    key_mask: Mask,
    powers: Powers,
    exchange: Exchange,
    keep: bool,
    *options: Any,
) -> tuple[Tensor, Tensor]:
    query, key, value, variant = dense(query), dense(key), dense(value), variant_of(options)
    result = empty_result(query, value.shape[3])
    extras = contiguous(query_mask), contiguous(key_mask), None, None, contiguous(powers)
    plan = _plan((query, key, value, result), extras, keep, options)
    sizes = [0, 0] if plan is None else plan.forward_scratch
    kept, scratch = empty([] if plan is None else plan.kept, query.device), empty(sizes, query.device)
    inputs = query, key, value, *extras, result, kept, scratch
    run = itertools.repeat(None) if plan is None else plan.stages(inputs, plan.forward, FORWARD)
    *_, partial, competing = scratch.split_with_sizes(sizes)
    records = Records(query, value, partial, competing, variant.renormalize)
    next(run)
    records.add_others(exchange, records.vectors(KEY_SUM, 2), records.scalars(SOURCES, 2))
    next(run)
    records.add_others(exchange, records.vectors(CONSERVED_KEY_SUM, 2))
    next(run)
    records.merge_memory(exchange, variant, powers is not None)
    next(run)
    return result, kept


def _backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_mask: Mask,
    key_mask: Mask,
    powers: Powers,
    kept: Tensor,
    exchange: Exchange,
    *options: Any,
) -> tuple[Tensor, ...]:
    """The gradients of query, key, value and powers; without powers the last is empty."""
    grads = [torch.empty_like(x) for x in (query, key, value)]
    outs = [dense(x) for x in grads]
    tensors = *(dense(x) for x in (query, key, value, grad)), *outs
    extras = contiguous(query_mask), contiguous(key_mask), None, None, contiguous(powers)
    plan = _plan(tensors, extras, True, options)
    sizes = [0] * 9 if plan is None else plan.backward_scratch
    scratch = empty(sizes, query.device)
    inputs = *tensors, *extras, kept, scratch
    run = itertools.repeat(None) if plan is None else plan.stages(inputs, plan.backward, BACKWARD)
    *_, partial, _, competing, of_powers = scratch.split_with_sizes(sizes)
    records = Records(query, value, partial, competing, variant_of(options).renormalize)
    next(run)
    records.add_others(exchange, *records.memory, records.vectors(CONSERVED_KEY_SUM, 1))
    next(run)
    # d(Σq/I) and dΣq; dΣk, stored next to it, comes with the next kernel
    records.add_others(exchange, records.vectors(QUERY_SUM, 1), records.vectors(CONSERVED_QUERY_SUM, 1))
    next(run)
    records.add_others(exchange, records.vectors(KEY_SUM, 1))
    next(run)
    grad_powers = of_powers[:0]
    if powers is not None:
        parts = of_powers[: 2 * records.all.shape[:3].numel()]
        grad_powers = parts.view(*records.all.shape[:3], 2).sum((0, 2)).t().contiguous()
    return *(x if x is out else x.copy_(out) for x, out in zip(grads, outs, strict=True)), grad_powers


def _plan(
    tensors: tuple[Tensor, ...], extras: tuple[Tensor | None, ...], keep: bool, options: Sequence[Any]
) -> CutPlan | None:
    """None if this rank has no sequence: it launches nothing, but must take part in the exchanges."""
    query, key = tensors[:2]
    if not query.shape[0] * query.shape[1]:
        return None
    precision = float32_precision() if query.dtype == torch.float32 else None
    return plan_of(CutPlan, (*tensors, *extras), max(query.shape[2], key.shape[2]), keep, precision, *options)
