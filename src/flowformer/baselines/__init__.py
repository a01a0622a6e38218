"""The attentions that Flow-Attention is compared with, built by name and called like `flow_attention`.

Methods without attention, such as DTW or AWAC, are in `flowformer.train.methods`.
"""

from .bigbird import BigBirdAttention
from .cosformer import CosformerAttention
from .linear import LinearAttention
from .linformer import LinformerAttention
from .local import LocalAttention
from .longformer import LongformerAttention
from .nystromformer import NystromformerAttention
from .performer import PerformerAttention, PerformerReluAttention
from .reformer import ReformerAttention
from .registry import Mechanism, build, capabilities, get, names, options
from .rfa import GatedRFAAttention, RFAAttention
from .sinkhorn import SinkhornAttention
from .soft import SoftAttention
from .softmax import SoftmaxAttention
from .sparse import SparseAttention
from .synthesizer import DenseSynthesizerAttention, SynthesizerAttention
from .yoso import YosoAttention

__all__ = [
    "BigBirdAttention",
    "CosformerAttention",
    "DenseSynthesizerAttention",
    "GatedRFAAttention",
    "LinearAttention",
    "LinformerAttention",
    "LocalAttention",
    "LongformerAttention",
    "Mechanism",
    "NystromformerAttention",
    "PerformerAttention",
    "PerformerReluAttention",
    "RFAAttention",
    "ReformerAttention",
    "SinkhornAttention",
    "SoftAttention",
    "SoftmaxAttention",
    "SparseAttention",
    "SynthesizerAttention",
    "YosoAttention",
    "build",
    "capabilities",
    "get",
    "names",
    "options",
]
