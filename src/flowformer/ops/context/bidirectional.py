"""Bidirectional Flow-Attention of one rank's part of the sequence: passes over its tokens between the exchanges.

Every pass loops over blocks of heads and recomputes their features, so that no intermediate is as large as an input.
Only a few numbers per token and the sums are saved for the backward pass.

Shapes: query (B, H, N, D), key (B, H_kv, M, D), value (B, H_kv, M, E), of this rank; numbers per token (B, H, N) or
(B, H, M); sums (B, H, 2, D).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..common import Inputs, Masks, Options, empty_result, sum_dtype, valid_values, without_autocast
from ..library import differentiate
from ..torch.bidirectional import MIN_BLOCKS
from ..torch.features import feature_gradient, features
from ..torch.flows import add_outer, at_least_one, dot, length_ratio, token_flows, weighted_sum
from ..torch.gates import competing_flow, gate
from ..torch.head_blocks import HeadBlock, empty_gradients, head_blocks
from ..variant import FlowVariant
from .exchange import Exchange


def attend(inputs: Inputs, masks: Masks, options: Options, exchange: Exchange) -> Tensor:
    """The result for this rank's queries, (B, H, N, E)."""
    result: Tensor = _Attend.apply(*inputs, Part(*inputs, *masks, options), exchange)
    return result


class Part(NamedTuple):
    """This rank's inputs, with methods that read a block of heads and allocate intermediates."""

    query: Tensor
    key: Tensor
    value: Tensor
    query_mask: Tensor | None
    key_mask: Tensor | None
    options: Options

    def blocks(self) -> Iterator[HeadBlock]:
        length = max(self.query.shape[2], self.key.shape[2])
        return head_blocks(self.query, self.key, self.value, length, MIN_BLOCKS)

    def sinks(self, block: HeadBlock) -> Tensor:
        return features(block.sinks(self.query), block.mask(self.query_mask), self.options)

    def sources(self, block: HeadBlock) -> Tensor:
        return features(block.sources(self.key), block.mask(self.key_mask), self.options)

    def values(self, block: HeadBlock) -> Tensor:
        return valid_values(block.sources(self.value), block.mask(self.key_mask))

    def new_empty(self, *shape: int) -> Tensor:
        return self.query.new_empty(*self.query.shape[:2], *shape, dtype=sum_dtype(self.query))

    def sink_numbers(self) -> Tensor:
        return self.new_empty(self.query.shape[2])

    def source_numbers(self) -> Tensor:
        return self.new_empty(self.key.shape[2])

    def vectors(self) -> Tensor:
        return self.new_empty(2, self.query.shape[3])

    def counts(self) -> Tensor:
        """The numbers of valid sinks and sources, (B, H, 2)."""
        counts = self.new_empty(2)
        for i, (mask, tokens) in enumerate(((self.query_mask, self.query), (self.key_mask, self.key))):
            counts[..., i] = tokens.shape[2] if mask is None else mask.sum(-1, keepdim=True)
        return counts


class Flows(NamedTuple):
    """What the forward pass saves for the backward pass."""

    inverse_incoming: Tensor  # 1/I, (B, H, N)
    inverse_outgoing: Tensor  # 1/O, (B, H, M)
    conserved_outgoing: Tensor  # Ô before the clamp, (B, H, M)
    allocation: Tensor  # α, (B, H, N), 0 where masked
    competition: Tensor  # c, (B, H, M), 0 where masked
    sums: Tensor  # Σk, Σq, (B, H, 2, D)
    conserved_sums: Tensor  # Σk/O, Σq/I, (B, H, 2, D)
    memory: Tensor  # S, (B, H, D, E)
    counts: Tensor  # n, m, (B, H, 2)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, part: Part, exchange: Exchange) -> Tensor:
        with without_autocast(query):
            result, flows = _forward(part, exchange)
        ctx.save_for_backward(query, key, value, part.query_mask, part.key_mask, *flows)
        ctx.options = part.options, exchange
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        with without_autocast(grad):
            return *differentiate(_saved_backward, grad, *ctx.saved_tensors, *ctx.options), None, None


def _saved_backward(grad: Tensor, *saved: Any) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value, query_mask, key_mask, *flows, options, exchange = saved
    part = Part(query, key, value, query_mask, key_mask, options)
    return _backward(grad, part, Flows(*flows), exchange)


def _forward(part: Part, exchange: Exchange) -> tuple[Tensor, Flows]:
    variant, dim = part.options.variant, part.query.shape[3]
    sums = part.vectors()
    for block in part.blocks():
        block.write_sinks(sums, torch.stack([part.sources(block).sum(-2), part.sinks(block).sum(-2)], 1))
    totals = exchange.total(torch.cat([sums.flatten(2), part.counts()], -1))
    sums, counts = totals[..., :-2].unflatten(-1, (2, dim)), totals[..., -2:]
    n, m = counts.split(1, -1)

    inverse_incoming, inverse_outgoing, conserved_sums = part.sink_numbers(), part.source_numbers(), part.vectors()
    for block in part.blocks():
        q, k = part.sinks(block), part.sources(block)
        key_sum, query_sum = block.sinks(sums).unbind(1)
        inverse_in, inverse_out = (
            token_flows(x, total, variant).reciprocal_() for x, total in ((q, key_sum), (k, query_sum))
        )
        block.write_sinks(inverse_incoming, inverse_in)
        block.write_sinks(inverse_outgoing, inverse_out)
        conserved = [weighted_sum(inverse_out, k), weighted_sum(inverse_in, q)]
        block.write_sinks(conserved_sums, torch.stack(conserved, 1))
    conserved_sums = exchange.total(conserved_sums)

    conserved_incoming, conserved_outgoing = part.sink_numbers(), part.source_numbers()
    for block in part.blocks():
        conserved_key_sum, conserved_query_sum = block.sinks(conserved_sums).unbind(1)
        block.write_sinks(conserved_incoming, token_flows(part.sinks(block), conserved_key_sum, variant))
        block.write_sinks(conserved_outgoing, token_flows(part.sources(block), conserved_query_sum, variant))
    bounded, log_outgoing = _log_sum(competing_flow(conserved_outgoing, variant), part.key_mask)
    conserved_incoming, log_incoming = _log_sum(conserved_incoming, part.query_mask)

    # the softmax over this rank's sources only; merged with the other ranks below
    over_tokens = variant.competition == "softmax" and variant.competitors == "tokens"
    match variant.competition:
        case "softmax" if over_tokens:
            competition = (bounded - log_outgoing[..., None]).exp()
        case "softmax":
            competition = bounded.softmax(1) * (m if variant.rescale else 1)
        case kind:
            competition = gate(bounded, kind)
    competition = _valid(competition, part.key_mask)
    memory = part.new_empty(dim, part.value.shape[3])
    for block in part.blocks():
        competing = part.values(block) * block.sinks(competition)[..., None]
        block.write_sinks(memory, part.sources(block).mT @ competing)

    logs = torch.stack([log_outgoing, log_incoming], -1)
    memory, merged = exchange.softmax_total(memory, logs, weighted=over_tokens)
    if over_tokens:
        factor = m if variant.rescale else torch.ones_like(m)
        competition = competition * ((logs - merged)[..., :1].exp() * factor)
        memory = memory * factor[..., None]
    if variant.allocation == "softmax":
        allocation = (conserved_incoming - merged[..., 1, None]).exp() * (n if variant.rescale else 1)
    else:
        allocation = gate(conserved_incoming * length_ratio(n, m, variant), variant.allocation)
    allocation = _valid(allocation, part.query_mask)

    result = empty_result(part.query, part.value.shape[3])
    for block in part.blocks():
        received = block.sinks(allocation) * block.sinks(inverse_incoming)
        block.write_sinks(result, (part.sinks(block) @ block.sinks(memory)) * received[..., None])
    flows = inverse_incoming, inverse_outgoing, conserved_outgoing, allocation, competition
    return result, Flows(*flows, sums, conserved_sums, memory, counts)


def _backward(grad: Tensor, part: Part, f: Flows, exchange: Exchange) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value, by the equations of `torch/bidirectional.py`."""
    variant, eps = part.options.variant, part.options.variant.eps
    n, m = f.counts.split(1, -1)
    received = f.allocation * f.inverse_incoming

    # R = α/I · q S
    grad_memory, alpha_dalpha = torch.empty_like(f.memory), part.sink_numbers()
    for block in part.blocks():
        q, received_grad = part.sinks(block), _received_grad(grad, received, part, block)
        block.write_sinks(grad_memory, q.mT @ received_grad)
        # ⟨dR, R⟩ is α dα
        block.write_sinks(alpha_dalpha, (q * (received_grad @ block.sinks(f.memory).mT)).sum(-1))
    totals = exchange.total(torch.cat([grad_memory.flatten(2), alpha_dalpha.sum(-1, keepdim=True)], -1))
    grad_memory, sum_alpha_dalpha = totals[..., :-1].view_as(f.memory), totals[..., -1:]

    # S = kᵀ c V
    c_dc = part.source_numbers()
    for block in part.blocks():
        grad_value = part.sources(block) @ block.sinks(grad_memory)
        block.write_sinks(c_dc, (grad_value * part.values(block)).sum(-1) * block.sinks(f.competition))
    match variant.competition:
        case "softmax" if variant.competitors == "heads":
            grad_outgoing = c_dc - f.competition * (c_dc.sum(1, keepdim=True) / _softmax_factor(m, variant))
        case "softmax":
            sum_c_dc = (f.memory * grad_memory).sum((-1, -2))[..., None]
            grad_outgoing = c_dc - f.competition * (sum_c_dc / _softmax_factor(m, variant))
        case "sigmoid":
            grad_outgoing = c_dc * (1 - f.competition)
        case "none":
            grad_outgoing = torch.zeros_like(c_dc)
    if variant.clamp is not None:
        grad_outgoing = grad_outgoing.masked_fill(f.conserved_outgoing.abs() > variant.clamp, 0)
    match variant.allocation:
        case "sigmoid":
            grad_incoming = alpha_dalpha * (1 - f.allocation) * length_ratio(n, m, variant)
        case "softmax":
            grad_incoming = alpha_dalpha - f.allocation * (sum_alpha_dalpha / _softmax_factor(n, variant))
        case "none":
            grad_incoming = torch.zeros_like(alpha_dalpha)

    # the conserved flows, then the flows that they are computed from
    conserved_grads = part.vectors()
    for block in part.blocks():
        rows = [
            weighted_sum(block.sinks(grad_incoming), part.sinks(block), eps),
            weighted_sum(block.sinks(grad_outgoing), part.sources(block), eps),
        ]
        block.write_sinks(conserved_grads, torch.stack(rows, 1))
    conserved_grads = exchange.total(conserved_grads)
    flow_in, flow_out, sum_grads = part.sink_numbers(), part.source_numbers(), part.vectors()
    for block in part.blocks():
        q, k = part.sinks(block), part.sources(block)
        inverse_in, inverse_out = block.sinks(f.inverse_incoming), block.sinks(f.inverse_outgoing)
        grad_conserved_key_sum, grad_conserved_query_sum = block.sinks(conserved_grads).unbind(1)
        grad_in = -(block.sinks(alpha_dalpha) + dot(q, grad_conserved_query_sum) * inverse_in) * inverse_in
        grad_out = -dot(k, grad_conserved_key_sum) * inverse_out * inverse_out
        block.write_sinks(flow_in, grad_in)
        block.write_sinks(flow_out, grad_out)
        rows = [weighted_sum(grad_in, q, eps), weighted_sum(grad_out, k, eps)]
        block.write_sinks(sum_grads, torch.stack(rows, 1))
    sum_grads = exchange.total(sum_grads)

    grad_query, grad_key, grad_value = empty_gradients(part.query, part.key, part.value)
    for block in part.blocks():
        q, k, memory_grad = part.sinks(block), part.sources(block), block.sinks(grad_memory)
        competition = block.sinks(f.competition)[..., None]
        key_sum, query_sum = block.sinks(f.sums).unbind(1)
        conserved_key_sum, conserved_query_sum = block.sinks(f.conserved_sums).unbind(1)
        grad_conserved_key_sum, grad_conserved_query_sum = block.sinks(conserved_grads).unbind(1)
        grad_key_sum, grad_query_sum = block.sinks(sum_grads).unbind(1)
        columns = [block.sinks(x) for x in (grad_incoming, f.inverse_incoming, flow_in)]
        grad_q = _received_grad(grad, received, part, block) @ block.sinks(f.memory).mT
        rows = [conserved_key_sum + eps, grad_conserved_query_sum, key_sum + eps, grad_query_sum]
        add_outer(grad_q, [*columns, torch.ones_like(columns[0])], rows)
        columns = [block.sinks(x) for x in (grad_outgoing, f.inverse_outgoing, flow_out)]
        grad_k = (part.values(block) * competition) @ memory_grad.mT
        rows = [conserved_query_sum + eps, grad_conserved_key_sum, query_sum + eps, grad_key_sum]
        add_outer(grad_k, [*columns, torch.ones_like(columns[0])], rows)
        block.write_sinks(grad_query, feature_gradient(grad_q, q, part.options))
        block.write_sources(grad_key, feature_gradient(grad_k, k, part.options))
        block.write_sources(grad_value, (k @ memory_grad) * competition)
    return grad_query, grad_key.to(part.key.dtype), grad_value.to(part.value.dtype)


def _received_grad(grad: Tensor, received: Tensor, part: Part, block: HeadBlock) -> Tensor:
    """dR α/I of a block of heads, (G, N, E)."""
    return valid_values(block.sinks(grad), block.mask(part.query_mask)) * block.sinks(received)[..., None]


def _log_sum(flow: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """The flow, with the lowest finite number where masked, and log Σ exp(flow), finite even without tokens."""
    lowest = torch.finfo(flow.dtype).min
    if mask is not None:
        flow = flow.masked_fill(~mask[:, None], lowest)
    return flow, flow.logsumexp(-1).clamp_min(lowest)


def _valid(x: Tensor, mask: Tensor | None) -> Tensor:
    return x if mask is None else x.masked_fill(~mask[:, None], 0)


def _softmax_factor(count: Tensor, variant: FlowVariant) -> Tensor | int:
    return at_least_one(count) if variant.rescale else 1
