"""Bidirectional Flow-Attention of one rank's part of the sequence: the kernels, with exchanges between them.

Kernels sum the records of all segments of a head (`records.py`). Sums of other ranks are therefore added to the record
of the first segment, and the next kernel includes them.

Shapes: query (B, H, N, D), key (B, H_kv, M, D), value (B, H_kv, M, E), masks (B, N) and (B, M), of this rank.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from ...common import Inputs, Masks, Options, empty_result, without_autocast
from ...library import differentiate
from ...variant import FlowVariant
from ..plan import FlatOptions, dense, empty, flat_options, plan_of, variant_of
from ..precision import float32_precision
from ..stages import Exchange, Stages
from .op import Extras
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
        """Replace the S of the first segment's record by the sum over all ranks, and clear the other segments.

        Args:
            is_signed: whether τ Ô may be negative.
        """
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


def attend(inputs: Inputs, masks: Masks, options: Options, exchange: Exchange) -> Tensor:
    """The result for this rank's queries, (B, H, N, E); the gradient of the powers is this rank's term of the sum over
    ranks."""
    keep = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (*inputs, options.powers))
    extras = Extras(*masks, None, None, options.powers)
    arguments = *inputs, *extras, exchange, keep, *flat_options(options)
    if keep:
        result: Tensor = _Attend.apply(*arguments)
        return result
    with without_autocast(inputs[0]):
        return _forward(*arguments)[0]


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        with without_autocast(inputs[0]):
            result, kept = _forward(*inputs)
        ctx.save_for_backward(*inputs[:8], kept)
        ctx.exchange, ctx.options = inputs[8], inputs[10:]
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        with without_autocast(grad):
            *grads, of_powers = differentiate(_backward, grad, *ctx.saved_tensors, ctx.exchange, *ctx.options)
        powers = of_powers if ctx.saved_tensors[7] is not None else None
        return *grads, None, None, None, None, powers, None, None, *(None for _ in ctx.options)


def _forward(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    extras, exchange, keep, options = Extras(*rest[:5]).contiguous(), rest[5], rest[6], rest[7:]
    query, key, value, variant = dense(query), dense(key), dense(value), variant_of(options)
    result = empty_result(query, value.shape[3])
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
    records.merge_memory(exchange, variant, extras.powers is not None)
    next(run)
    return result, kept


def _backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """The gradients of query, key, value and powers; without powers the last is empty."""
    extras, kept, exchange, options = Extras(*rest[:5]).contiguous(), rest[5], rest[6], rest[7:]
    grads = [torch.empty_like(x) for x in (query, key, value)]
    outs = [dense(x) for x in grads]
    tensors = *(dense(x) for x in (query, key, value, grad)), *outs
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
    if extras.powers is not None:
        parts = of_powers[: 2 * records.all.shape[:3].numel()]
        grad_powers = parts.view(*records.all.shape[:3], 2).sum((0, 2)).t().contiguous()
    return *(x if x is out else x.copy_(out) for x, out in zip(grads, outs, strict=True)), grad_powers


def _plan(tensors: tuple[Tensor, ...], extras: Extras, keep: bool, options: FlatOptions) -> CutPlan | None:
    """The plan of a call; None if this rank has no sequence: it launches nothing, but takes part in the exchanges."""
    query, key = tensors[:2]
    if not query.shape[0] * query.shape[1]:
        return None
    precision = float32_precision() if query.dtype == torch.float32 else None
    return plan_of(CutPlan, (*tensors, *extras), max(query.shape[2], key.shape[2]), keep, precision, *options)
