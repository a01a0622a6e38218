"""Causal linear attention with exponential decay, computed in chunks.

Shapes: B batch, H heads, N tokens, D features, E values, T chunks of C tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .linear import CHUNK


def decayed_product(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> Tensor:
    """Return q_t · S_t for the state S_t = exp(log_decay_t) S_{t−1} + k_tᵀ v_t, (B, H, N, E).

    Log decays are summed only within a chunk: sums over the whole sequence would be large, and their differences
    inaccurate.

    Args:
        q, k, v: (B, H, N, D), (B, H, N, D) and (B, H, N, E).
        log_decay: (B, H, N), at most 0.
    """
    length = q.shape[2]
    chunk = min(CHUNK, max(length, 1))
    q, k, v = (F.pad(x, (0, 0, 0, -length % chunk)).unflatten(2, (-1, chunk)) for x in (q, k, v))  # (B, H, T, C, …)
    log = F.pad(log_decay, (0, -length % chunk)).unflatten(2, (-1, chunk)).cumsum(-1)  # (B, H, T, C)

    later = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).triu(1)
    inside = (log[..., :, None] - log[..., None, :]).masked_fill(later, -torch.inf).exp()  # (B, H, T, C, C)
    end = log[..., -1:]
    memory = (k * (end - log).exp()[..., None]).mT @ v  # (B, H, T, D, E)
    state, states = torch.zeros_like(memory[:, :, 0]), []  # states before each chunk
    for decay, added in zip(end.exp()[..., None].unbind(2), memory.unbind(2), strict=True):
        states.append(state)
        state = decay * state + added
    result = (q @ k.mT * inside) @ v + (q * log.exp()[..., None]) @ torch.stack(states, 2)
    return result.flatten(2, 3)[:, :, :length]
