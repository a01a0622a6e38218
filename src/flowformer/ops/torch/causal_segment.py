"""Causal Flow-Attention of one block of heads over one segment of tokens, forward and backward.

A segment is cut into T chunks of C tokens. Inside a chunk, flows come from a C × C product, P = q kᵀ; earlier chunks
enter as sums. There are three levels, each computed from the previous one: Σk and Σq with the flows I and O; Σk/O and
Σq/I with the conserved flows; competition, allocation and the memory S.

Shapes: G heads of the block, T chunks, C tokens of a chunk, D features, E values. `state` is that of `reference.py`,
one row a head: sums (G, 4, D), memory (G, D, E), scalars (G, 3).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..common import Mask, Options, State, is_exporting
from ..variant import FlowVariant
from .gates import competing_flow, gate, split_powers


class SegmentInputs(NamedTuple):
    q: Tensor  # features, (G, T, C, D), 0 where masked, as all below
    k: Tensor
    v: Tensor  # (G, T, C, E)
    position: Tensor  # D, counted from 1, (G, T, C)
    valid: Mask  # (G, T, C)


class SegmentFlows(NamedTuple):
    """Everything that the forward pass computes except the result; the backward pass recomputes it."""

    lower: Tensor  # P where the source is not after the sink, (G, T, C, C)
    upper: Tensor  # P where the sink is not after the source, (G, T, C, C)
    sums: Tensor  # Σk, Σq, Σk/O, Σq/I, if renormalised Σ c k, before each chunk and after the last, (G, T + 1, 4, D)
    memory: Tensor  # S likewise, (G, T + 1, D, E)
    inverse_incoming: Tensor  # 1/I, (G, T, C), as all below
    inverse_outgoing: Tensor  # 1/O
    conserved_incoming: Tensor  # Î
    conserved_outgoing: Tensor  # Ô before the clamp
    competition: Tensor  # c, 0 where masked
    allocation: Tensor  # α, 0 where masked
    log_outgoing: Tensor | None  # the running log Σ exp(Ô), (G, 1 + T·C), from the state's on; None without softmax
    log_incoming: Tensor | None  # the running log Σ exp(Î), likewise
    received: Tensor  # α/I, or with `renormalize` α/⟨q, Σ c k⟩
    tokens: Tensor  # the count of tokens after the segment, (G,)


def _flows(inputs: SegmentInputs, state: State, options: Options) -> SegmentFlows:
    q, k, v, position, valid = inputs
    variant, (sums, memory, scalars) = options.variant, state
    count, log_outgoing, log_incoming = scalars.unbind(-1)
    products = q @ k.mT
    ones = products.new_ones(products.shape[-2:])
    lower, upper = products * ones.tril(), products * ones.triu()
    row_q, row_k = q.sum(-1), k.sum(-1)

    def flow(x: Tensor, before: Tensor, inside: Tensor, row: Tensor, rows: Tensor, start: Tensor) -> Tensor:
        outer = row + running_sum(rows, start.sum(-1))
        total = inside + (x * before[..., None, :]).sum(-1)
        return (total + variant.eps * outer + (q.shape[-1] * variant.eps**2 + variant.flow_eps)) / position

    key_sum = _before(k.sum(-2), sums[:, 0])
    query_sum = _before(q.sum(-2), sums[:, 1])
    inverse_incoming = flow(q, key_sum[:, :-1], lower.sum(-1), row_q, row_k, sums[:, 0]).reciprocal()
    inverse_outgoing = flow(k, query_sum[:, :-1], upper.sum(-2), row_k, row_q, sums[:, 1]).reciprocal()

    conserved_key_sum = _before((k * inverse_outgoing[..., None]).sum(-2), sums[:, 2])
    conserved_query_sum = _before((q * inverse_incoming[..., None]).sum(-2), sums[:, 3])
    inside = (lower * inverse_outgoing[..., None, :]).sum(-1)
    conserved_incoming = flow(q, conserved_key_sum[:, :-1], inside, row_q, row_k * inverse_outgoing, sums[:, 2])
    inside = (upper * inverse_incoming[..., None]).sum(-2)
    conserved_outgoing = flow(k, conserved_query_sum[:, :-1], inside, row_k, row_q * inverse_incoming, sums[:, 3])

    tau, gamma = split_powers(options.powers, axes=2)
    bounded = competing_flow(conserved_outgoing, variant, tau)
    running_outgoing: Tensor | None = None
    running_incoming: Tensor | None = None
    if variant.competition == "softmax":
        competition, running_outgoing = _running_softmax(bounded, valid, log_outgoing, count, position)
    else:
        competition = gate(bounded, variant.competition)
    if variant.allocation == "softmax":
        allocation, running_incoming = _running_softmax(conserved_incoming, valid, log_incoming, count, position)
    else:
        allocation = gate(conserved_incoming, variant.allocation, gamma)
    if valid is not None:
        competition, allocation = competition.masked_fill(~valid, 0), allocation.masked_fill(~valid, 0)

    contribution = k * competition[..., None]
    memories = _before(contribution.mT @ v, memory)
    all_sums, received = [key_sum, query_sum, conserved_key_sum, conserved_query_sum], allocation * inverse_incoming
    if variant.renormalize:
        competing_sum = _before(contribution.sum(-2), sums[:, 4])
        inside = (lower * competition[..., None, :]).sum(-1)
        received = allocation / flow(q, competing_sum[:, :-1], inside, row_q, row_k * competition, sums[:, 4])
        all_sums.append(competing_sum)
    total = count + (q.shape[1] * q.shape[2] if valid is None else valid.sum((-1, -2)))
    return SegmentFlows(
        lower,
        upper,
        torch.stack(all_sums, -2),
        memories,
        inverse_incoming,
        inverse_outgoing,
        conserved_incoming,
        conserved_outgoing,
        competition,
        allocation,
        running_outgoing,
        running_incoming,
        received,
        total,
    )


def forward(inputs: SegmentInputs, state: State, options: Options) -> tuple[Tensor, State]:
    """The result R (G, T, C, E), and the state after the segment. `backward` does not support powers (2, G)."""
    s = _flows(inputs, state, options)
    result = inputs.q @ s.memory[:, :-1] + (s.lower * s.competition[..., None, :]) @ inputs.v
    result *= (s.received / inputs.position)[..., None]
    logs = [
        start if running is None else torch.where(s.tokens > 0, running[:, -1], -torch.inf)
        for running, start in ((s.log_outgoing, state[2][:, 1]), (s.log_incoming, state[2][:, 2]))
    ]
    return result, (s.sums[:, -1], s.memory[:, -1], torch.stack([s.tokens, *logs], -1))


def backward(
    grad: Tensor, inputs: SegmentInputs, state: State, grad_state: State, options: Options
) -> tuple[Tensor, Tensor, Tensor, State]:
    """The gradients of the features q and k, of v, and of the state before the segment.

    Args:
        grad: the gradient of R.
        grad_state: the gradient of the state after the segment.
    """
    q, k, v, position, valid = inputs
    variant, s = options.variant, _flows(inputs, state, options)
    eps, before = variant.eps, s.sums[:, :-1, :, None]  # (G, T, 4, 1, D)
    inverse_in, inverse_out = s.inverse_incoming, s.inverse_outgoing
    received = s.received / position

    # R = α/(I D) · (q S + P c V), where S sums the earlier chunks, and P is `lower`
    grad_memory = _after((q * received[..., None]).mT @ grad, grad_state[1])
    grad_qs = grad @ s.memory[:, :-1].mT  # (G, T, C, D)
    grad_v_later = k @ grad_memory[:, 1:]  # (G, T, C, E)
    grad_products = grad @ v.mT
    shared = s.lower * grad_products
    grad_received = (shared * s.competition[..., None, :]).sum(-1) + (q * grad_qs).sum(-1)  # ⟨dR, q S⟩
    grad_competition = (shared * received[..., None]).sum(-2) + (grad_v_later * v).sum(-1)
    weights = received[..., None] * s.competition[..., None, :]
    grad_v = (s.lower * weights).mT @ grad + grad_v_later * s.competition[..., None]
    grad_products *= weights
    del shared, grad_v_later, weights  # frees memory: each is as large as an input

    grad_outgoing, grad_log_outgoing = _competition_gradient(grad_competition, s, valid, state, grad_state, variant)
    grad_allocation = grad_received * inverse_in / position
    grad_incoming, grad_log_incoming = _allocation_gradient(grad_allocation, s, valid, state, grad_state, variant)

    # through Î and Ô to 1/O and 1/I, then through O and I; every flow is divided by D
    conserved_in, conserved_out = grad_incoming / position, grad_outgoing / position
    after_conserved_key = _after((q * conserved_in[..., None]).sum(-2), grad_state[0][:, 2])
    after_conserved_query = _after((k * conserved_out[..., None]).sum(-2), grad_state[0][:, 3])
    rest_in, rest_out = eps * _running_back(conserved_in), eps * _running_back(conserved_out)
    grad_inverse_out = (s.lower * conserved_in[..., None]).sum(-2)
    grad_inverse_out += (k * (after_conserved_key[:, 1:, None] + rest_in[..., None])).sum(-1)
    grad_inverse_in = (s.upper * conserved_out[..., None, :]).sum(-1)
    grad_inverse_in += (q * (after_conserved_query[:, 1:, None] + rest_out[..., None])).sum(-1)
    flow_out = -grad_inverse_out * inverse_out * inverse_out / position
    flow_in = -(received * grad_received + grad_inverse_in * inverse_in) * inverse_in / position
    after_key = _after((q * flow_in[..., None]).sum(-2), grad_state[0][:, 0])
    after_query = _after((k * flow_out[..., None]).sum(-2), grad_state[0][:, 1])

    ones = torch.ones_like(flow_in)
    triangle = grad_products.new_ones(grad_products.shape[-2:])
    grad_products += _outer([conserved_in, flow_in], [inverse_out, ones])
    grad_products *= triangle.tril()
    grad_products += _outer([inverse_in, ones], [conserved_out, flow_out]) * triangle.triu()

    grad_q = grad_products @ k + grad_qs * received[..., None]
    grad_q += torch.stack([flow_in, conserved_in, inverse_in, ones], -1) @ torch.cat(
        [before[:, :, 0] + eps, before[:, :, 2] + eps, after_conserved_query[:, 1:, None], after_query[:, 1:, None]], -2
    )
    grad_q += (inverse_in * rest_out + eps * _running_back(flow_out))[..., None]
    grad_k = grad_products.mT @ q + (v @ grad_memory[:, 1:].mT) * s.competition[..., None]
    grad_k += torch.stack([flow_out, conserved_out, inverse_out, ones], -1) @ torch.cat(
        [before[:, :, 1] + eps, before[:, :, 3] + eps, after_conserved_key[:, 1:, None], after_key[:, 1:, None]], -2
    )
    grad_k += (inverse_out * rest_in + eps * _running_back(flow_in))[..., None]

    grad_sums = [
        after[:, 0] + eps * outer.sum((-1, -2))[:, None]
        for after, outer in (
            (after_key, flow_in),
            (after_query, flow_out),
            (after_conserved_key, conserved_in),
            (after_conserved_query, conserved_out),
        )
    ]
    grad_scalars = torch.stack([torch.zeros_like(s.tokens), grad_log_outgoing, grad_log_incoming], -1)
    return grad_q, grad_k, grad_v, (torch.stack(grad_sums, -2), grad_memory[:, 0], grad_scalars)


def _competition_gradient(
    grad: Tensor, s: SegmentFlows, valid: Mask, state: State, grad_state: State, variant: FlowVariant
) -> tuple[Tensor, Tensor]:
    """The gradients of Ô, and of log Σ exp(Ô) in the state before the segment."""
    grad_end = grad_state[2][:, 1]
    flow = s.conserved_outgoing
    match variant.competition:
        case "softmax":
            if variant.clamp is not None:
                flow = flow.clamp(-variant.clamp, variant.clamp)
            grad, grad_start = _running_softmax_gradient(
                grad, s.competition, flow, s.log_outgoing, valid, state[2][:, 0], s.tokens, grad_end
            )
        case "sigmoid":
            grad, grad_start = grad * s.competition * (1 - s.competition), grad_end
        case "none":
            return torch.zeros_like(grad), grad_end
    if variant.clamp is not None:
        grad = grad.masked_fill(s.conserved_outgoing.abs() > variant.clamp, 0)
    return grad, grad_start


def _allocation_gradient(
    grad: Tensor, s: SegmentFlows, valid: Mask, state: State, grad_state: State, variant: FlowVariant
) -> tuple[Tensor, Tensor]:
    """The gradients of Î, and of log Σ exp(Î) in the state before the segment."""
    grad_end = grad_state[2][:, 2]
    match variant.allocation:
        case "sigmoid":
            return grad * s.allocation * (1 - s.allocation), grad_end
        case "softmax":
            return _running_softmax_gradient(
                grad, s.allocation, s.conserved_incoming, s.log_incoming, valid, state[2][:, 0], s.tokens, grad_end
            )
        case "none":
            return torch.zeros_like(grad), grad_end


def _running_softmax(
    flow: Tensor, valid: Mask, start: Tensor, count: Tensor, position: Tensor
) -> tuple[Tensor, Tensor]:
    """D · exp(flow) / Σ exp(flow), Σ up to each token, (G, T, C), and the running log Σ exp(flow), (G, 1 + T·C)."""
    # the logarithm of an empty sum is finite, so that no difference of logarithms is NaN
    lowest = torch.finfo(flow.dtype).min
    if valid is not None:
        flow = flow.masked_fill(~valid, lowest)
    start = torch.where(count > 0, start, lowest)
    if is_exporting():
        by_chunks = _running_log_sum(start, flow)
        return position * (flow - by_chunks).exp(), by_chunks.flatten(1)
    log_sum = torch.cat([start[:, None], flow.flatten(1)], -1).logcumsumexp(-1)
    return position * (flow - log_sum[:, 1:].view_as(flow)).exp(), log_sum


def _running_softmax_gradient(
    grad: Tensor,
    share: Tensor,
    flow: Tensor,
    log_sum: Tensor | None,
    valid: Mask,
    count: Tensor,
    total: Tensor,
    grad_end: Tensor,
) -> tuple[Tensor, Tensor]:
    """The gradients of the flow and of the first logarithm.

    Args:
        grad, grad_end: the gradients of the shares and of the last logarithm.
        count, total: the count of tokens before and after the segment.
    """
    assert log_sum is not None  # `_flows` returns it for every softmax
    weight = (share * grad).flatten(1)
    grad_log = torch.cat([torch.zeros_like(weight[:, :1]), -weight], -1)
    grad_log[:, -1] += torch.where(total > 0, grad_end, 0)
    # Σ over later L of dL·exp(flow − L): by logarithms, since exp(−L) may overflow, and therefore separately for
    # positive and negative dL
    rising, falling = (
        (part.clamp_min(0).log() - log_sum).flip(-1).logcumsumexp(-1).flip(-1) for part in (grad_log, -grad_log)
    )
    flow = flow.flatten(1)
    grad_flow = weight + (flow + rising[:, 1:]).exp() - (flow + falling[:, 1:]).exp()
    grad_flow = grad_flow.view_as(grad)
    if valid is not None:
        grad_flow = grad_flow.masked_fill(~valid, 0)
    start = log_sum[:, 0]
    grad_start = (start + rising[:, 0]).exp() - (start + falling[:, 0]).exp()
    return grad_flow, torch.where(count > 0, grad_start, 0)


def _running_log_sum(start: Tensor, flow: Tensor) -> Tensor:
    """log(exp(start) + Σ exp(flow)), Σ up to each token, (G, T, C): first inside the chunks, then over the chunks.

    Only for exported graphs, where logcumsumexp is lowered to a form scaled by the overall maximum, which loses small
    early entries.
    """
    inside = _log_sum_of_pairs(flow)
    before = _log_sum_of_pairs(torch.cat([start[:, None], inside[..., -1]], 1))[:, :-1]
    return torch.logaddexp(inside, before[..., None])


def _log_sum_of_pairs(x: Tensor) -> Tensor:
    """log Σ exp(x) up to each entry of the last axis, by a triangular matrix of all pairs of entries."""
    later = x.new_ones(x.shape[-1], x.shape[-1], dtype=torch.bool).triu(1)
    return x[..., None, :].masked_fill(later, torch.finfo(x.dtype).min).logsumexp(-1)


def running_sum(x: Tensor, start: Tensor) -> Tensor:
    """start (G,) plus the sum of x (G, T, C) up to each token."""
    inside = x.cumsum(-1)
    return inside + _before(inside[..., -1:], start[:, None])[:, :-1]


def _running_back(x: Tensor) -> Tensor:
    """The sum of x (G, T, C) from each token on."""
    return x.flatten(1).flip(-1).cumsum(-1).flip(-1).view_as(x)


def _before(x: Tensor, start: Tensor) -> Tensor:
    """start (G, ...) plus the sum of the chunks x (G, T, ...) before each chunk and after the last, (G, T + 1, ...)."""
    return _sum_chunks(torch.cat([start[:, None], x], 1), torch.Tensor.tril)


def _after(x: Tensor, end: Tensor) -> Tensor:
    """end (G, ...) plus the sum of the chunks x (G, T, ...) from each chunk on, and end itself, (G, T + 1, ...)."""
    return _sum_chunks(torch.cat([x, end[:, None]], 1), torch.Tensor.triu)


def _sum_chunks(x: Tensor, triangle: Callable[[Tensor], Tensor]) -> Tensor:
    if is_exporting():
        return x.cumsum(1)
    # there are few chunks: a product with a triangle of ones is four times as fast as cumsum along a strided axis
    ones = x.new_ones(x.shape[1], x.shape[1])
    return (triangle(ones) @ x.flatten(2)).view(x.shape)


def _outer(columns: list[Tensor], rows: list[Tensor]) -> Tensor:
    """Σ column rowᵀ, (G, T, C, C)."""
    return torch.stack(columns, -1) @ torch.stack(rows, -2)
