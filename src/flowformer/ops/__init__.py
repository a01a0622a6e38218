"""Flow-Attention as functions of tensors."""

from .interface import explain, flow_attention, flow_attention_recurrent, flow_attention_varlen, flow_maps
from .reference import FlowMaps
from .state import FlowState
from .variant import FlowVariant

__all__ = [
    "FlowMaps",
    "FlowState",
    "FlowVariant",
    "explain",
    "flow_attention",
    "flow_attention_recurrent",
    "flow_attention_varlen",
    "flow_maps",
]
