"""Flow-Attention, as the paper prints it: the oracle of every test. Needs nothing but torch, so copy it freely.

Sources (keys and values, index j) send flow to sinks (queries, index i) through capacities q_i·k_j, the features
q = φ(Q) and k = φ(K). Fixing what each sink receives makes sources compete; fixing what each source sends tells how
much a sink may take.

Shapes: B batch, H heads, N sinks, M sources, D features, E values. Masks are bool, True = takes part.
Everything is plain autograd, in float64 for float64 inputs and in float32 for all others.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

Mask = Tensor | None  # (B, N) bool; None where every token takes part


class FlowMaps(NamedTuple):
    """What flows where: a number for every head and token, 0 for a token that is masked out."""

    incoming: Tensor  # I, (B, H, N)
    outgoing: Tensor  # O, (B, H, M)
    conserved_incoming: Tensor  # Î, (B, H, N)
    conserved_outgoing: Tensor  # Ô, (B, H, M)
    competition: Tensor  # c, (B, H, M)
    allocation: Tensor  # α, (B, H, N)


def bidirectional(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_mask: Mask = None,
    key_mask: Mask = None,
    scale: float = 1.0,
    **variant: Any,
) -> Tensor:
    """R = α ⊙ (q kᵀ / I) (c ⊙ V) for query (B, H, N, D), key (B, H, M, D), value (B, H, M, E)."""
    weights = bidirectional_weights(query, key, query_mask, key_mask, scale, **variant)
    return (weights @ _valid(value, key_mask)).to(query.dtype)


def bidirectional_weights(
    query: Tensor, key: Tensor, query_mask: Mask = None, key_mask: Mask = None, scale: float = 1.0, **variant: Any
) -> Tensor:
    """The matrix W (B, H, N, M) with R = W V. Its rows do not sum to one: allocation decides how much a sink takes.

    With `renormalize` they sum to α: I gives way to what a sink receives from competing sources, ⟨q, Σ c k⟩.
    """
    maps = bidirectional_maps(query, key, query_mask, key_mask, scale, **variant)
    q, k = _features(query, query_mask, scale, **variant), _features(key, key_mask, scale, **variant)
    incoming = maps.incoming
    if variant.get("renormalize"):
        incoming = _flow(q, (k * maps.competition[..., None]).sum(-2, keepdim=True), **variant)
    received = torch.where(incoming > 0, maps.allocation / incoming, 0)
    return (q @ k.mT) * received[..., None] * maps.competition[..., None, :]


def bidirectional_maps(
    query: Tensor, key: Tensor, query_mask: Mask = None, key_mask: Mask = None, scale: float = 1.0, **variant: Any
) -> FlowMaps:
    """Algorithm 1: the flows before and after conservation, and the competition and allocation they lead to.

    `powers` (2, H) are exponents of each head: c = m·softmax(τ Ô) and α = sigmoid(Î)^γ; the paper's are 1.
    """
    q, k = _features(query, query_mask, scale, **variant), _features(key, key_mask, scale, **variant)
    sinks, sources = _columns(query_mask, q), _columns(key_mask, k)
    n, m = sinks.sum(-1, keepdim=True).to(q.dtype), sources.sum(-1, keepdim=True).to(q.dtype)

    incoming = _flow(q, k.sum(-2, keepdim=True), **variant)
    outgoing = _flow(k, q.sum(-2, keepdim=True), **variant)
    conserved_incoming = _flow(q, (k / outgoing[..., None]).sum(-2, keepdim=True), **variant)
    conserved_outgoing = _flow(k, (q / incoming[..., None]).sum(-2, keepdim=True), **variant)

    rescale = variant.get("rescale", True)
    match variant.get("competition", "softmax"):
        case "softmax":
            flow = _clamped(conserved_outgoing, **variant) * _power(0, **variant)
            flow = flow.masked_fill(~sources, torch.finfo(q.dtype).min)
            axis = 1 if variant.get("competitors") == "heads" else -1
            competition = flow.softmax(axis) * (m if rescale else 1)
        case "sigmoid":
            competition = _clamped(conserved_outgoing, **variant).sigmoid()
        case "none":
            competition = torch.ones_like(outgoing)
    match variant.get("allocation", "sigmoid"):
        case "sigmoid":
            flow = conserved_incoming * (n / m.clamp_min(1) if rescale else 1)
            allocation = flow.sigmoid() ** _power(1, **variant)
        case "softmax":
            flow = conserved_incoming.masked_fill(~sinks, torch.finfo(q.dtype).min)
            allocation = flow.softmax(-1) * (n if rescale else 1)
        case "none":
            allocation = torch.ones_like(incoming)
    return _masked_maps(
        incoming, outgoing, conserved_incoming, conserved_outgoing, competition, allocation, sinks, sources
    )


def causal(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask = None,
    state: tuple[Tensor, ...] | None = None,
    scale: float = 1.0,
    **variant: Any,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Algorithm 2, continued from `state`: the result (B, H, N, E) and the state after the last token.

    The state of a head is everything the future needs of the past, in three tensors:
    sums (B, H, 4, D) = Σk, Σq, Σk/O, Σq/I; memory (B, H, D, E) = Σ kᵀ c V; and scalars (B, H, 3) = the count of
    tokens, log Σ exp(Ô), and log Σ exp(Î), of which the last only serves `allocation="softmax"`.
    With `renormalize` there is a fifth sum, Σ c k; with `powers`, τ Ô stands in the place of Ô.
    """
    maps, sums, scalars = _causal_maps(query, key, mask, state, scale, **variant)
    q, k, v = _features(query, mask, scale, **variant), _features(key, mask, scale, **variant), _valid(value, mask)
    position = _position(_columns(mask, q), state)
    contribution = k * maps.competition[..., None]
    incoming = maps.incoming
    if variant.get("renormalize"):
        before = torch.zeros_like(sums[..., 0, :]) if state is None else state[0][..., 4, :]
        competing_sum = _running_sum(before, contribution)
        incoming = _flow(q, competing_sum[..., 1:, :], **variant) / position
        sums = torch.cat([sums, competing_sum[..., -1:, :]], -2)
    received = torch.where(incoming > 0, maps.allocation / incoming, 0) / position
    result = ((q @ contribution.mT).tril() * received[..., None]) @ v
    memory = contribution.mT @ v
    if state is not None:
        result = result + (q @ state[1]) * received[..., None]
        memory = memory + state[1]
    return result.to(query.dtype), (sums, memory, scalars)


def causal_weights(query: Tensor, key: Tensor, mask: Mask = None, scale: float = 1.0, **variant: Any) -> Tensor:
    """The lower-triangular matrix W (B, H, N, N) with R = W V."""
    maps = causal_maps(query, key, mask, None, scale, **variant)
    q, k = _features(query, mask, scale, **variant), _features(key, mask, scale, **variant)
    position, incoming = _position(_columns(mask, q), None), maps.incoming
    if variant.get("renormalize"):
        incoming = _flow(q, (k * maps.competition[..., None]).cumsum(-2), **variant) / position
    received = torch.where(incoming > 0, maps.allocation / incoming, 0) / position
    return (q @ k.mT).tril() * received[..., None] * maps.competition[..., None, :]


def causal_maps(
    query: Tensor,
    key: Tensor,
    mask: Mask = None,
    state: tuple[Tensor, ...] | None = None,
    scale: float = 1.0,
    **variant: Any,
) -> FlowMaps:
    """Algorithm 2: the maps, each token seeing only itself and the past."""
    return _causal_maps(query, key, mask, state, scale, **variant)[0]


def _causal_maps(
    query: Tensor, key: Tensor, mask: Mask, state: tuple[Tensor, ...] | None, scale: float, **variant: Any
) -> tuple[FlowMaps, Tensor, Tensor]:
    q, k = _features(query, mask, scale, **variant), _features(key, mask, scale, **variant)
    valid = _columns(mask, q)
    position = _position(valid, state)  # D
    if state is None:
        before: tuple[Tensor, ...] = (q.new_zeros(*q.shape[:2], q.shape[-1]),) * 4
        count = q.new_zeros(q.shape[:2])
        log_outgoing = log_incoming = torch.full_like(count, -torch.inf)
    else:
        before = state[0].unbind(-2)
        count, log_outgoing, log_incoming = state[2].unbind(-1)
        count = count.detach()

    key_sum = _running_sum(before[0], k)
    query_sum = _running_sum(before[1], q)
    incoming = _flow(q, key_sum[..., 1:, :], **variant) / position
    outgoing = _flow(k, query_sum[..., 1:, :], **variant) / position
    conserved_key_sum = _running_sum(before[2], k / outgoing[..., None])
    conserved_query_sum = _running_sum(before[3], q / incoming[..., None])
    conserved_incoming = _flow(q, conserved_key_sum[..., 1:, :], **variant) / position
    conserved_outgoing = _flow(k, conserved_query_sum[..., 1:, :], **variant) / position

    # exp(Ô) may overflow: carry the log of the running sum instead
    bounded = _clamped(conserved_outgoing, **variant)
    match variant.get("competition", "softmax"):
        case "softmax":
            share, log_outgoing = _running_softmax(bounded * _power(0, **variant), valid, log_outgoing, count)
            competition = position * share
        case "sigmoid":
            competition = bounded.sigmoid()
        case "none":
            competition = torch.ones_like(outgoing)
    match variant.get("allocation", "sigmoid"):
        case "sigmoid":
            allocation = conserved_incoming.sigmoid() ** _power(1, **variant)
        case "softmax":
            share, log_incoming = _running_softmax(conserved_incoming, valid, log_incoming, count)
            allocation = position * share
        case "none":
            allocation = torch.ones_like(incoming)
    maps = _masked_maps(
        incoming, outgoing, conserved_incoming, conserved_outgoing, competition, allocation, valid, valid
    )

    sums = [key_sum, query_sum, conserved_key_sum, conserved_query_sum]
    scalars = [count + valid.sum(-1), log_outgoing, log_incoming]
    return maps, torch.stack([part[..., -1, :] for part in sums], -2), torch.stack(scalars, -1)


def _flow(x: Tensor, total: Tensor, *, eps: float = 1e-6, flow_eps: float = 0.0, **_: Any) -> Tensor:
    return ((x + eps) * (total + eps)).sum(-1) + flow_eps


def _clamped(flow: Tensor, *, clamp: float | None = None, **_: Any) -> Tensor:
    return flow if clamp is None else flow.clamp(-clamp, clamp)


def _power(index: int, *, powers: Tensor | None = None, **_: Any) -> Tensor | float:
    """The exponent of the competition (0) or of the allocation (1) of each head, (H, 1)."""
    return 1.0 if powers is None else powers[index, :, None]


def _features(
    x: Tensor, mask: Mask, scale: float, *, feature_map: str = "sigmoid", eps: float = 1e-6, **_: Any
) -> Tensor:
    x = _valid(x, mask) * scale
    match feature_map:
        case "sigmoid":
            x = x.sigmoid()
        case "elu+1":
            x = F.elu(x) + 1
        case "relu":
            x = x.relu()
        case "relu+eps":
            x = x.relu() + eps
    return _valid(x, mask)


def _valid(x: Tensor, mask: Mask) -> Tensor:
    """In the dtype of the sums, with the padding emptied: even a NaN there takes part in nothing."""
    x = x if x.dtype == torch.float64 else x.float()
    return x if mask is None else x.masked_fill(~mask[:, None, :, None], 0)


def _columns(mask: Mask, x: Tensor) -> Tensor:
    """Which tokens are there, (B, 1, N)."""
    return x.new_ones(x.shape[0], 1, x.shape[-2], dtype=torch.bool) if mask is None else mask[:, None]


def _position(valid: Tensor, state: tuple[Tensor, ...] | None) -> Tensor:
    """D: how many tokens there are up to and including this one."""
    position = valid.cumsum(-1).to(torch.float32 if state is None else state[2].dtype)
    if state is not None:
        position = position + state[2][..., :1].detach()
    return position.clamp_min(1)


def _running_sum(start: Tensor, x: Tensor) -> Tensor:
    """The sum before the first token and after each, (B, H, 1 + N, D)."""
    return torch.cat([start[..., None, :], x], -2).cumsum(-2)


def _running_softmax(flow: Tensor, valid: Tensor, start: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """The share of each token in exp(flow) summed up to it, and the logarithm of the sum after the last."""
    # finite where nothing has come yet: the gradient of a logarithm of nothing is NaN
    nothing = torch.finfo(flow.dtype).min
    flow = flow.masked_fill(~valid, nothing)
    start = torch.where(count > 0, start, nothing)
    log_sum = torch.cat([start[..., None], flow], -1).logcumsumexp(-1)
    end = torch.where(count + valid.sum(-1) > 0, log_sum[..., -1], -torch.inf)
    return (flow - log_sum[..., 1:]).exp(), end


def repeat_heads(query: Tensor, x: Tensor) -> Tensor:
    """x (B, H_kv, M, D) with each head repeated for the query heads that share it: grouped heads, the plain way."""
    shared = query.shape[1] // max(x.shape[1], 1)
    return x if shared == 1 else x.repeat_interleave(shared, 1)


def _masked_maps(
    incoming: Tensor,
    outgoing: Tensor,
    conserved_incoming: Tensor,
    conserved_outgoing: Tensor,
    competition: Tensor,
    allocation: Tensor,
    sinks: Tensor,
    sources: Tensor,
) -> FlowMaps:
    return FlowMaps(
        incoming.masked_fill(~sinks, 0),
        outgoing.masked_fill(~sources, 0),
        conserved_incoming.masked_fill(~sinks, 0),
        conserved_outgoing.masked_fill(~sources, 0),
        competition.masked_fill(~sources, 0),
        allocation.masked_fill(~sinks, 0),
    )
