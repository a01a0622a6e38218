"""The Decision Transformer, trained in a plain loop."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...data.offline_rl import Windows
from ...data.splits import collate
from ...models.decision import DecisionConfig, FlowformerDecision
from .mlp import descend


class DecisionTransformer:
    """The model of the paper with softmax attention, with the settings of the recipes "d4rl/…".

    Windows are drawn with replacement. `flowformer train d4rl/… attention=softmax` goes through them in epochs, with
    checkpoints and evaluations on the way.

    Args:
        windows: the recorded episodes.
        device: where to learn.
        batch_size, learning_rate, warmup: windows of an update, the rate, and the updates over which it rises.
        sizes: of `DecisionConfig`.
    """

    def __init__(
        self,
        windows: Windows,
        device: torch.device,
        *,
        batch_size: int = 64,
        learning_rate: float = 1e-3,
        warmup: int = 10_000,
        **sizes: Any,
    ) -> None:
        self.windows, self.device, self.batch_size = windows, device, batch_size
        dims = windows.states.shape[1], windows.actions.shape[1]
        config = DecisionConfig(*dims, window=windows.window, attention="softmax", **sizes)
        self.model = FlowformerDecision(config).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), learning_rate, weight_decay=1e-4)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: min(1, step / warmup))

    def update(self) -> Tensor:
        rows = torch.randint(len(self.windows), (self.batch_size,)).tolist()
        batch = {key: value.to(self.device) for key, value in collate([self.windows[i] for i in rows]).items()}
        returns_to_go = batch.pop("returns_to_go")[..., 0]
        loss = self.model.loss(returns_to_go, **batch)
        descend(self.optimizer, loss, max_norm=0.25)
        self.schedule.step()
        return loss.detach()
