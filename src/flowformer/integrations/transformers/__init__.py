"""Flow-Attention in Hugging Face transformers: a language model of its own, and an attention for models that exist.

Importing this package registers both: `AutoModelForCausalLM` and its like know the model type "flowformer", and every
model that looks its attention up takes `attn_implementation="flow_attention"`.
"""

from __future__ import annotations

try:
    from transformers import (
        AttentionInterface,
        AttentionMaskInterface,
        AutoConfig,
        AutoModel,
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
    )
    from transformers.cache_utils import STATIC_LAYER_TYPE_MAPPING
except Exception as error:  # a broken installation raises more than ImportError
    raise ImportError(
        "flowformer.integrations.transformers needs transformers 5.14 or newer: pip install 'flowformer[hf]'."
    ) from error

from .attention import flow_attention_forward, flow_attention_mask
from .cache import NAME, FlowCacheLayer
from .config import FlowformerConfig
from .models import FlowformerForCausalLM, FlowformerForSequenceClassification, FlowformerModel

__all__ = [
    "FlowCacheLayer",
    "FlowformerConfig",
    "FlowformerForCausalLM",
    "FlowformerForSequenceClassification",
    "FlowformerModel",
    "flow_attention_forward",
    "flow_attention_mask",
]

AutoConfig.register(FlowformerConfig.model_type, FlowformerConfig, exist_ok=True)
AutoModel.register(FlowformerConfig, FlowformerModel, exist_ok=True)
AutoModelForCausalLM.register(FlowformerConfig, FlowformerForCausalLM, exist_ok=True)
AutoModelForSequenceClassification.register(FlowformerConfig, FlowformerForSequenceClassification, exist_ok=True)
AttentionInterface.register(NAME, flow_attention_forward)
# without a mask function of the same name the library drops the padding mask
AttentionMaskInterface.register(NAME, flow_attention_mask)
STATIC_LAYER_TYPE_MAPPING[NAME] = FlowCacheLayer  # the state has a constant size in any cache
