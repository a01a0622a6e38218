"""The Decision Transformer, trained in a plain loop."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..._utils import check_options, check_positive
from ...data.offline_rl import Windows
from ...models.decision import DecisionConfig, FlowformerDecision
from ..optim import Schedule
from ..resident import DeviceWindows
from .mlp import descend

if TYPE_CHECKING:
    from .resume import Part

_SET_HERE = "state_dim", "action_dim", "window", "attention"
_SIZES = [each.name for each in fields(DecisionConfig) if each.name not in _SET_HERE]


class DecisionTransformer:
    """The paper's model with softmax attention, trained with the settings of the recipes "d4rl/…".

    Windows are drawn with replacement, without checkpoints or evaluations during training. In contrast, `flowformer
    train d4rl/… attention=softmax` sees each window once per epoch, and has checkpoints and evaluations.

    Args:
        windows: the recorded episodes.
        device: the device for training.
        batch_size: windows in one update.
        learning_rate, warmup: learning rate, and number of updates over which it rises from 0.
        sizes: fields of `DecisionConfig`, except the sizes of the data and the attention.
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
        check_options("dt", sizes, ["batch_size", "learning_rate", "warmup", *_SIZES])
        check_positive(batch_size=batch_size)
        self.windows, self.count, self.batch_size = DeviceWindows(windows, device), len(windows), batch_size
        dims = windows.states.shape[1], windows.actions.shape[1]
        config = DecisionConfig(*dims, window=windows.window, attention="softmax", **sizes)
        self.model = FlowformerDecision(config).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), learning_rate, weight_decay=1e-4)
        factor = Schedule("constant", warmup=warmup).rate
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: factor(1.0, step, steps=0))

    @property
    def parts(self) -> dict[str, Part]:
        return {"model": self.model, "optimizer": self.optimizer, "schedule": self.schedule}

    def update(self) -> Tensor:
        batch = self.windows.take(torch.randint(self.count, (self.batch_size,)), None)
        returns_to_go = batch.pop("returns_to_go")[..., 0]
        loss = self.model.loss(returns_to_go, **batch)
        descend(self.optimizer, loss, max_norm=0.25)
        self.schedule.step()
        return loss.detach()
