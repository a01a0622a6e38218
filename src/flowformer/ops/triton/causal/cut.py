"""Causal Flow-Attention of one rank's part of the sequence: the kernels, with exchanges between them.

With several segments, kernels compute the sums before each segment in dependent levels, starting from the state before
the first token. Each level of this state is exchanged after the kernel that computes this rank's part of it, and
written into the state for the following kernels:

    sums [Σk, Σq, count]  flows [Σk/O, Σq/I]  conserve [log Σ exp(Ô)]  memory [S, Σ c k]  scan, output

Gradients from later ranks are added to the gradient of the state after the last token:

    grad_memory [dS, d(Σ c k)]  scan, value_gradient [Z] [d(Σk/O), d(Σq/I)]  flow_gradient [dΣk, dΣq]  gradient

Z is defined in `backward_v.py`. Its correction of d(Σq/I) needs no kernel: it is a product of numbers per segment.

Shapes: query (B, H, N, D), key (B, H_kv, N, D), value (B, H_kv, N, E), mask (B, N), of this rank; T segments. The three
tensors of a state are those of `FlowState`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...common import Inputs, Mask, Options, Powers, State, empty_result, without_autocast
from ...library import differentiate
from ...state import empty_state, num_sums
from ..launch import Argument
from ..numerics import LOG_ZERO
from ..plan import contiguous, dense, empty, flat_options, plan_of, variant_of
from ..stages import Exchange, Stages
from .op import add_shared, key_gradients, positions_of, powers_gradient, state_views
from .plan import CausalPlan, state_sizes
from .planes import COMPETING_SUM, COUNT, STATE_LOG_OUTGOING

# the first kernel of each stage
FORWARD = 0, 1, 2, 3, 4  # sums; flows; conserve; memory; scan and output
BACKWARD = 0, 1, 3, 4  # grad_memory; scan and value_gradient; flow_gradient; gradient, of dQ and of dK


class CutPlan(CausalPlan):
    """The plan of a rank's part, whose kernels are launched in stages.

    Args:
        with_end: whether the state after the last token of the last rank may have a gradient.
    """

    is_cut = True

    def __init__(self, tensors: Any, device: torch.device, longest: int, keep: bool, with_end: bool, *options: Any):
        super().__init__(tensors, device, longest, keep, *options)
        self.with_end, self.stages = with_end, Stages(self.launches.wgmma)

    def _has_end_gradient(self, grad_end: Argument | None) -> bool:
        return self.with_end


def _flow_sums(state: Sequence[Tensor]) -> list[Tensor]:
    """Σk and Σq, (B, H, 2, D)."""
    return [state[0][..., :2, :]]


def _counted_flow_sums(state: Sequence[Tensor]) -> list[Tensor]:
    """Σk and Σq, (B, H, 2, D), and the count (B, H, 1)."""
    return [*_flow_sums(state), state[2][..., COUNT.value : COUNT.value + 1]]


def _conserved_sums(state: Sequence[Tensor]) -> list[Tensor]:
    """Σk/O and Σq/I, (B, H, 2, D)."""
    return [state[0][..., 2:4, :]]


def _memory(state: Sequence[Tensor]) -> list[Tensor]:
    """S (B, H, D, E), and Σ c k (B, H, 1, D); (B, H, 0, D) if the variant has none."""
    return [state[1], state[0][..., COMPETING_SUM.value :, :]]


def _log(state: Sequence[Tensor]) -> Tensor:
    """log Σ exp(Ô), (B, H)."""
    return state[2][..., STATE_LOG_OUTGOING.value]


def _join(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([x.flatten(2) for x in parts], -1)


def _add(joined: Tensor, parts: Sequence[Tensor]) -> None:
    """Add numbers in the form of `_join` to the parts of a state, in place."""
    sizes = [math.prod(x.shape[2:]) for x in parts]
    for x, own in zip(parts, joined.split_with_sizes(sizes, -1), strict=True):
        x.add_(own.view_as(x))


def attend(
    inputs: Inputs, mask: Mask, state: State | None, options: Options, exchange: Exchange, with_end: bool
) -> tuple[Tensor, State]:
    """The result for this rank's tokens, and the state after the last token of the last rank if `with_end`.

    Args:
        state: the state before the first token of the first rank, equal on every rank; None is an empty state. Its
            gradient is computed on the first rank, and is 0 on the others.
        options: if it has powers, their gradient is this rank's term of the sum over ranks.
        with_end: whether to return the last state; otherwise () is returned, and its gradient is not exchanged.
    """
    leaves = *inputs, *((None, None, None) if state is None else state), options.powers
    keep = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in leaves)
    # without tokens there is nothing to mask, and the kernels would read the last position
    mask = mask if inputs[0].shape[2] else None
    arguments = *leaves, mask, exchange, keep, with_end, *flat_options(options)
    if keep:
        result, *end = _Attend.apply(*arguments)
        return result, tuple(end)
    with without_autocast(inputs[0]):
        result, end, _ = _forward(*arguments)
    return result, tuple(end)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        query, key, value, _, _, first_scalars, powers, mask, exchange, _, with_end, *options = inputs
        with without_autocast(query):
            result, end, saved = _forward(*inputs)
        ctx.save_for_backward(query, key, value, mask, powers, result, *saved)
        ctx.has_state, ctx.options = first_scalars is not None, (exchange, with_end, *options)
        # gradients of unused outputs stay None instead of zeros
        ctx.set_materialize_grads(False)
        return result, *end

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *of_end: Tensor | None) -> Any:
        query, _, _, _, powers, result, *_ = ctx.saved_tensors
        grads_of_end = of_end or (None, None, None)
        if grad is None:
            grad = torch.zeros_like(result)
        with without_autocast(query):
            all_grads = differentiate(_backward, grad, *grads_of_end, *ctx.saved_tensors, *ctx.options)
        *grads, sums, memory, scalars, of_powers = all_grads
        state = (sums, memory, scalars) if ctx.has_state else (None, None, None)
        return *grads, *state, None if powers is None else of_powers, *(None for _ in range(2 + len(ctx.options)))


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    first_sums: Tensor | None,
    first_memory: Tensor | None,
    first_scalars: Tensor | None,
    powers: Powers,
    mask: Mask,
    exchange: Exchange,
    keep: bool,
    with_end: bool,
    *options: Any,
) -> tuple[Tensor, list[Tensor], tuple[Tensor | None, ...]]:
    """The result, the last state (empty unless `with_end`), and what the backward pass needs besides the inputs."""
    query, key, value, powers, variant = dense(query), dense(key), dense(value), contiguous(powers), variant_of(options)
    given = [x for x in (first_sums, first_memory, first_scalars) if x is not None]
    before = [x.clone(memory_format=torch.contiguous_format) for x in given] or list(empty_state(query, value, variant))
    end = [x.clone() for x in before] if with_end else []
    first_log = torch.where(before[2][..., COUNT.value] > 0, _log(before), LOG_ZERO.value)
    dim, value_dim = query.shape[3], value.shape[3]
    result = empty_result(query, value_dim)
    inputs = query, key, value, mask, None, powers, *before
    plan = plan_of(CutPlan, inputs, query.shape[2], keep, with_end, *options)
    kept, own_end, scratch = (empty(x, query.device) for x in (plan.kept, plan.state, plan.forward_scratch))
    inputs = query, key, value, positions_of(mask), None, powers, *before
    run = plan.stages((*inputs, result, kept, own_end, scratch), plan.forward, FORWARD)
    segments, parts = (*query.shape[:2], plan.segments), scratch.split_with_sizes(plan.forward_scratch)
    flow_sums, conserved_sums, logs, memories, _, _, competing_sums = parts

    def pass_on(level: Callable[..., list[Tensor]], *own: Tensor) -> None:
        """Exchange this rank's sums of one level: add those of earlier ranks to `before`, those of all to `end`."""
        earlier, total = exchange.before(_join(own), with_end)
        _add(earlier, level(before))
        if total is not None:
            _add(total, level(end))

    next(run)
    count = torch.full_like(before[2][..., :1], query.shape[2])
    if mask is not None:
        count = mask.sum(-1, dtype=count.dtype)[:, None, None].expand_as(count)
    pass_on(_counted_flow_sums, _view(flow_sums, *segments, 2, dim).sum(2), count)
    next(run)
    pass_on(_conserved_sums, _view(conserved_sums, *segments, 2, dim).sum(2))
    next(run)
    running = None
    if variant.competition == "softmax":
        running = exchange.running_log(_view(logs, *segments).logsumexp(2), first_log.clamp_min(LOG_ZERO.value))
        _log(before).copy_(running[exchange.rank])
        if with_end:
            _log(end).copy_(torch.where(end[2][..., COUNT.value] > 0, running[-1], -torch.inf))
    next(run)
    pass_on(
        _memory,
        _view(memories, *segments, dim, value_dim).sum(2),
        _view(competing_sums, *segments, num_sums(variant) - 4, dim).sum(2),
    )
    next(run)
    return result, end, (before[2], kept, running)


def _backward(
    grad: Tensor,
    of_sums: Tensor | None,
    of_memory: Tensor | None,
    of_scalars: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask,
    powers: Powers,
    result: Tensor,
    scalars: Tensor,
    kept: Tensor,
    running: Tensor | None,
    exchange: Exchange,
    with_end: bool,
    *options: Any,
) -> tuple[Tensor, ...]:
    """The gradients of query, key, value, the three tensors of the first state and the powers.

    Without powers the last is empty.
    """
    grad, query, key, value, powers = dense(grad), dense(query), dense(key), dense(value), contiguous(powers)
    (batch, _, _, dim), value_dim, sums = query.shape, value.shape[3], num_sums(variant_of(options))
    grad_query, (grad_key, grad_value) = torch.empty_like(query), key_gradients(query, key, value, query.device)
    grad_after = grad.new_zeros(sum(state_sizes(batch * query.shape[1], dim, value_dim, sums)), dtype=torch.float32)
    rest = None, powers, grad, grad_after, scalars, result, kept
    plan = plan_of(CutPlan, (query, key, value, mask, *rest), query.shape[2], True, with_end, *options)
    start, scratch = empty(plan.start, query.device), empty(plan.backward_scratch, query.device)
    tensors = query, key, value, positions_of(mask), *rest, grad_query, grad_key, grad_value, start, scratch
    run = plan.stages(tensors, plan.backward, BACKWARD)
    parts = scratch.split_with_sizes(plan.backward_scratch)
    _, _, flow_sums, carried, conserved_sums, reaching, memories, _, competing_sums = parts
    after, first = (state_views(x, query, batch, value_dim, sums) for x in (grad_after, start))
    of_end = None
    if with_end:
        given = zip((of_sums, of_memory, of_scalars), after, strict=True)
        of_end = [torch.zeros_like(like) if x is None else x for x, like in given]
        after[2].copy_(of_end[2])  # gradients of unused logarithms pass through

    def take(level: Callable[..., list[Tensor]], *own: Tensor) -> None:
        """Exchange this rank's gradients of one level: add those of later ranks and of the last state to `after`."""
        _add(exchange.after(_join(own), None if of_end is None else _join(level(of_end))), level(after))

    next(run)
    segments, tiles = (*query.shape[:2], plan.segments), plan.value_tiles
    take(
        _memory,
        _view(memories, *segments, dim, value_dim).sum(2),
        _view(competing_sums, tiles, *segments, sums - 4, dim).sum((0, 3)),
    )
    next(run)
    own = _view(conserved_sums, *segments, tiles, 2, dim).sum((2, 3))
    if running is not None:
        logs = _view(kept.split_with_sizes(plan.kept)[2], *query.shape[:2], plan.segments + 1)
        # Z before each segment from Z before later ones; L is non-decreasing up to rounding
        decay = (logs[..., :, None] - logs[..., None, :]).clamp_max(0).exp().triu()
        later = (decay[..., :-1] * _view(carried, *segments, tiles).sum(-1)[..., None, :]).sum(-1)
        # Z is the gradient of −L
        grad_log = exchange.log_after(-later[..., 0], None if of_end is None else _log(of_end), running)
        _log(after).copy_(grad_log)
        later = later - decay[..., -1] * grad_log[..., None]
        own[..., 1, :] -= (_view(reaching, *segments, dim) * later[..., 1:, None]).sum(2)
    take(_conserved_sums, own)
    next(run)
    take(_flow_sums, _view(flow_sums, *segments, 2, dim).sum(2))
    next(run)
    if exchange.rank:
        # only the first rank has a gradient of the first state
        first[0].zero_()
        first[1].zero_()
        if running is not None:
            _log(first).zero_()
    of_powers = start[:0] if powers is None else powers_gradient(start, query, batch, value_dim, sums)
    return grad_query, add_shared(grad_key, key), add_shared(grad_value, value), *first, of_powers


def _view(part: Tensor, *shape: int) -> Tensor:
    """A part of a buffer without its alignment padding."""
    return part[: math.prod(shape)].view(shape)
