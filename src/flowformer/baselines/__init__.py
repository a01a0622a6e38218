"""The attentions that Flow-Attention is compared with, by name, under the calling convention of `flow_attention`."""

from .linear import LinearAttention
from .registry import Mechanism, build, names
from .softmax import SoftmaxAttention

__all__ = ["LinearAttention", "Mechanism", "SoftmaxAttention", "build", "names"]
