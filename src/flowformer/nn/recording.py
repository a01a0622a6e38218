"""Record the flow maps of the attentions inside a model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from ..ops import FlowMaps
from .attention import FlowAttention, ProjectedAttention, RivalAttention


@contextmanager
def record_maps(model: nn.Module) -> Iterator[list[FlowMaps]]:
    """Collect the flow maps of every Flow-Attention of a model, in the order they run.

    Inside a nested `record_maps` block, only the inner list receives maps.

    >>> import torch
    >>> attention = FlowAttention(32, 4)
    >>> with record_maps(attention) as maps:
    ...     _ = attention(torch.randn(2, 10, 32))
    >>> maps[0].competition.shape
    torch.Size([2, 4, 10])
    """
    modules = [module for module in model.modules() if isinstance(module, FlowAttention)]
    if not modules:
        raise ValueError(f"{type(model).__name__} has no Flow-Attention, and other attentions have no flows to record.")
    maps: list[FlowMaps] = []
    previous = [module._recorded for module in modules]
    for module in modules:
        module._recorded = maps
    try:
        yield maps
    finally:
        for module, recorded in zip(modules, previous, strict=True):
            module._recorded = recorded


def is_recording(model: nn.Module) -> bool:
    """Whether an attention of the model is inside `record_maps`."""
    return any(getattr(module, "_recorded", None) is not None for module in model.modules())


def is_observed(model: nn.Module) -> bool:
    """Whether an attention of the model records maps or has a forward hook; both expect a padded batch."""
    attentions: list[nn.Module] = [module for module in model.modules() if isinstance(module, ProjectedAttention)]
    mechanisms = [module.mechanism for module in attentions if isinstance(module, RivalAttention)]
    observable = attentions + mechanisms
    return is_recording(model) or any(each._forward_pre_hooks or each._forward_hooks for each in observable)
