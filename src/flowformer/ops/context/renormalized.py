"""Renormalised bidirectional Flow-Attention of one rank's part of the sequence: plain torch operators with autograd,
between differentiable exchanges.

Shapes: query (B, H, N, D), key (B, H_kv, M, D), value (B, H_kv, M, E), masks (B, N) and (B, M), of this rank.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..common import Inputs, Masks, Options, valid_values, without_autocast
from ..reference import repeat_heads
from ..torch.features import features
from ..torch.flows import length_ratio
from ..torch.gates import competing_flow, gate, split_powers
from ..variant import FlowVariant
from .bidirectional import _valid
from .causal import _Before, _LogBefore
from .exchange import Exchange


def attend(inputs: Inputs, masks: Masks, options: Options, exchange: Exchange) -> Tensor:
    """The result for this rank's queries, (B, H, N, E); the gradient of the powers is this rank's term of the sum over
    ranks."""
    (query, key, value), (query_mask, key_mask), variant = inputs, masks, options.variant

    def total(x: Tensor) -> Tensor:
        summed: Tensor = _Before.apply(x, exchange, True)[1]
        return summed

    with without_autocast(query):
        sinks, sources = (None if mask is None else mask[:, None] for mask in (query_mask, key_mask))
        q = features(query, sinks, options)
        k = repeat_heads(q, features(key, sources, options))
        v = repeat_heads(q, valid_values(value, sources))
        counts = torch.cat([_count(sinks, q), _count(sources, k)], -1)
        dim = q.shape[-1]
        sums = total(torch.cat([k.sum(-2), q.sum(-2), counts], -1))
        key_sum, query_sum, n, m = sums.split([dim, dim, 1, 1], -1)
        outgoing, incoming = _flow(k, query_sum, variant), _flow(q, key_sum, variant)
        conserved = total(torch.stack([(k / outgoing[..., None]).sum(-2), (q / incoming[..., None]).sum(-2)], -2))
        conserved_key_sum, conserved_query_sum = conserved.unbind(-2)
        conserved_incoming = _flow(q, conserved_key_sum, variant)
        conserved_outgoing = _flow(k, conserved_query_sum, variant)
        tau, gamma = split_powers(options.powers, axes=1)
        bounded = competing_flow(conserved_outgoing, variant, tau)
        match variant.competition:
            case "softmax" if variant.competitors == "heads":
                competition = bounded.softmax(1) * (m if variant.rescale else 1)
            case "softmax":
                competition = _softmax(bounded, sources, exchange) * (m if variant.rescale else 1)
            case kind:
                competition = gate(bounded, kind)
        if variant.allocation == "softmax":
            allocation = _softmax(conserved_incoming, sinks, exchange) * (n if variant.rescale else 1)
        else:
            allocation = gate(conserved_incoming * length_ratio(n, m, variant), variant.allocation, gamma)
        competing = k * _valid(competition, key_mask)[..., None]
        # Σ c k as one more column of S
        memory = total(torch.cat([competing.mT @ v, competing.sum(-2)[..., None]], -1))
        received = _valid(allocation, query_mask) / _flow(q, memory[..., -1], variant)
        return ((q @ memory[..., :-1]) * received[..., None]).to(query.dtype)


def _flow(x: Tensor, total: Tensor, variant: FlowVariant) -> Tensor:
    """(x + ε)·(total + ε) + ε', without storing x + ε."""
    total = total + variant.eps
    flow = (x @ total[..., None])[..., 0]
    return flow + (variant.eps * total.sum(-1, keepdim=True) + variant.flow_eps)


def _count(mask: Tensor | None, x: Tensor) -> Tensor:
    """The number of valid tokens, (B, H, 1)."""
    tokens = x.shape[2] if mask is None else mask.sum(-1, keepdim=True)
    return x.new_zeros(*x.shape[:2], 1) + tokens


def _softmax(flow: Tensor, mask: Tensor | None, exchange: Exchange) -> Tensor:
    """The softmax over the tokens of all ranks."""
    lowest = torch.finfo(flow.dtype).min
    flow = flow if mask is None else flow.masked_fill(~mask, lowest)
    logs = flow.logsumexp(-1, keepdim=True).clamp_min(lowest)
    merged: Tensor = _LogBefore.apply(logs, torch.full_like(logs, lowest), exchange, True)[1]
    return (flow - merged).exp()
