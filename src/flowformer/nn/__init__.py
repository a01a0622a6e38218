"""Flow-Attention as modules."""

from .attention import FlowAttention, RivalAttention, build_attention, is_flow, record_maps, sinks_apart
from .matrix import Degeneracy, MatrixMaps, matrix_maps, record_matrices
from .multihead import FlowMultiheadAttention
from .positions import FairseqPositions, LearnedPositions, RotaryPositions, SinusoidalPositions, token_positions
from .swap import replace_attention
from .transformer import FeedForward, FlowDecoder, FlowDecoderLayer, FlowEncoder, FlowEncoderLayer

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
    "is_flow",
    "matrix_maps",
    "record_maps",
    "record_matrices",
    "replace_attention",
    "sinks_apart",
    "token_positions",
]
