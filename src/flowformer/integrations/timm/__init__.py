"""Flow-Attention in timm: an attention class for timm's transformers, and registered models.

    timm.create_model("vit_small_patch16_224", attn_layer=TimmFlowAttention)
    timm.create_model("flowformer_patch4_224")

Importing this package registers the models. Their weights have the same names as in `flowformer.models.vision`.
"""

try:
    import timm.models  # noqa: F401
except Exception as error:  # a torchvision built for another torch raises RuntimeError
    raise ImportError(
        "flowformer.integrations.timm needs timm and a torchvision that fits torch: pip install 'flowformer[timm]'."
    ) from error

from ..._utils import moved
from .attention import TimmFlowAttention
from .flowformer import TimmFlowDeiT, TimmFlowformer

__all__ = ["TimmFlowAttention", "TimmFlowDeiT", "TimmFlowformer"]

_MODELS = (
    "deit_base_flow_patch16_224",
    "deit_small_flow_patch16_224",
    "deit_tiny_flow_patch16_224",
    "flowformer_16heads_patch4_224",
    "flowformer_patch2_32",
    "flowformer_patch4_224",
)
# names of earlier versions; FlowAttention was renamed because `flowformer.nn.FlowAttention` is another class
__getattr__ = moved(
    __name__,
    {"FlowAttention": f"{__name__}.TimmFlowAttention", **{name: f"{__name__}.flowformer.{name}" for name in _MODELS}},
)
