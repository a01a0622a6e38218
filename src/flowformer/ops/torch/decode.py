"""One token of causal Flow-Attention: `causal_segment.py` without chunks, whose overhead would dominate a single step.

Shapes: G heads, D features, E values. The state is that of `reference.py`, one row a head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..common import Mask, Options, State
from .gates import competing_flow, gate, split_powers


def step(q: Tensor, k: Tensor, v: Tensor, valid: Mask, state: State, options: Options) -> tuple[Tensor, State]:
    """The result R (G, E) and the state after the token.

    Args:
        q, k: features (G, D), 0 where `valid` (G,) is False.
        v: (G, E).
    """
    variant, (sums, memory, scalars) = options.variant, state
    count, log_outgoing, log_incoming = scalars.unbind(-1)
    tokens = count + (1 if valid is None else valid)
    position = tokens.clamp_min(1)  # D

    # sinks and sources are treated alike: Σk and Σq give I and O, then Σk/O and Σq/I give Î and Ô
    sink_and_source, source_and_sink = torch.stack([q, k], 1), torch.stack([k, q], 1)  # (G, 2, D)
    raised, eps = sink_and_source + variant.eps, variant.eps

    def flows(total: Tensor) -> Tensor:
        return ((raised * (total + eps)).sum(-1) + variant.flow_eps) / position[:, None]

    totals = sums[:, :2] + source_and_sink
    inverse = flows(totals).reciprocal()  # 1/I, 1/O
    conserved_totals = sums[:, 2:4] + source_and_sink * inverse.flip(-1)[..., None]
    conserved_incoming, conserved_outgoing = flows(conserved_totals).unbind(-1)

    tau, gamma = split_powers(options.powers, axes=0)
    bounded = competing_flow(conserved_outgoing, variant, tau)
    if variant.competition == "softmax":
        share, log_outgoing = _share(bounded, log_outgoing, count, valid)
        competition = share * position
    else:
        competition = gate(bounded, variant.competition)
    if variant.allocation == "softmax":
        share, log_incoming = _share(conserved_incoming, log_incoming, count, valid)
        allocation = share * position
    else:
        allocation = gate(conserved_incoming, variant.allocation, gamma)
    if valid is not None:
        allocation = allocation.masked_fill(~valid, 0)

    contribution = k * competition[:, None]
    memory = torch.baddbmm(memory, contribution[..., None], v[:, None])
    all_totals, received = [totals, conserved_totals], allocation * inverse[:, 0]
    if variant.renormalize:
        competing = sums[:, 4] + contribution
        received = allocation * position / (((q + eps) * (competing + eps)).sum(-1) + variant.flow_eps)
        all_totals.append(competing[:, None])
    received = received / position
    result = torch.bmm(q[:, None], memory)[:, 0] * received[:, None]
    state = torch.cat(all_totals, 1), memory, torch.stack([tokens, log_outgoing, log_incoming], -1)
    return result, state


def _share(flow: Tensor, log_sum: Tensor, count: Tensor, valid: Mask) -> tuple[Tensor, Tensor]:
    """exp(flow) / Σ exp(flow), Σ up to this token, and log Σ exp(flow), which a masked token does not change."""
    # the logarithms of an empty state are ignored
    log_sum = torch.where(count > 0, log_sum, -torch.inf)
    total = torch.logaddexp(log_sum, flow)
    return (flow - total).exp(), total if valid is None else torch.where(valid, total, log_sum)
