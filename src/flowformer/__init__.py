"""Flow-Attention: attention in linear time, as easy to call as `F.scaled_dot_product_attention`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from . import nn as nn
    from . import ops as ops
    from .nn import FlowAttention, FlowMultiheadAttention, replace_attention
    from .ops import (
        FlowMaps,
        FlowState,
        FlowVariant,
        explain,
        flow_attention,
        flow_attention_recurrent,
        flow_attention_varlen,
        flow_maps,
    )

__version__ = "1.0.0rc1"

__all__ = [
    "FlowAttention",
    "FlowMaps",
    "FlowMultiheadAttention",
    "FlowState",
    "FlowVariant",
    "explain",
    "flow_attention",
    "flow_attention_recurrent",
    "flow_attention_varlen",
    "flow_maps",
    "replace_attention",
]
_SUBPACKAGES = ("nn", "ops")  # not in __all__: `from flowformer import *` would replace torch's nn
_IN_NN = ("FlowAttention", "FlowMultiheadAttention", "replace_attention")


def __getattr__(name: str):
    if name not in __all__ and name not in _SUBPACKAGES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in _SUBPACKAGES:
        value = importlib.import_module(f".{name}", __name__)
    else:
        value = getattr(importlib.import_module(".nn" if name in _IN_NN else ".ops", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_SUBPACKAGES})
