"""Flow-Attention as torch modules. The submodules are imported lazily, on first access to one of their names."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .._utils import moved

if TYPE_CHECKING:
    from .attention import FlowAttention, RivalAttention, build_attention, independent_sinks, is_flow
    from .matrix import Degeneracy, MatrixMaps, matrix_maps, record_matrices
    from .multihead import FlowMultiheadAttention
    from .positions import FairseqPositions, LearnedPositions, RotaryPositions, SinusoidalPositions, token_positions
    from .recording import record_maps
    from .swap import replace_attention
    from .transformer import FeedForward, FlowDecoder, FlowDecoderLayer, FlowEncoder, FlowEncoderLayer

_SUBMODULES = {
    "attention": (
        "FlowAttention",
        "RivalAttention",
        "build_attention",
        "independent_sinks",
        "is_flow",
    ),
    "matrix": (
        "Degeneracy",
        "MatrixMaps",
        "matrix_maps",
        "record_matrices",
    ),
    "multihead": ("FlowMultiheadAttention",),
    "positions": (
        "FairseqPositions",
        "LearnedPositions",
        "RotaryPositions",
        "SinusoidalPositions",
        "token_positions",
    ),
    "recording": ("record_maps",),
    "swap": ("replace_attention",),
    "transformer": (
        "FeedForward",
        "FlowDecoder",
        "FlowDecoderLayer",
        "FlowEncoder",
        "FlowEncoderLayer",
    ),
}
__all__ = [
    "Degeneracy",
    "FairseqPositions",
    "FeedForward",
    "FlowAttention",
    "FlowDecoder",
    "FlowDecoderLayer",
    "FlowEncoder",
    "FlowEncoderLayer",
    "FlowMultiheadAttention",
    "LearnedPositions",
    "MatrixMaps",
    "RivalAttention",
    "RotaryPositions",
    "SinusoidalPositions",
    "build_attention",
    "independent_sinks",
    "is_flow",
    "matrix_maps",
    "record_maps",
    "record_matrices",
    "replace_attention",
    "token_positions",
]
_renamed = moved(__name__, {"sinks_apart": f"{__name__}.independent_sinks"})


def __getattr__(name: str) -> Any:
    submodule = next((submodule for submodule, names in _SUBMODULES.items() if name in names), None)
    if submodule is None:
        return _renamed(name)
    globals()[name] = value = getattr(importlib.import_module(f".{submodule}", __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
