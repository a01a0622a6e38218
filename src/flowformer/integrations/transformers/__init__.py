"""Flow-Attention in Hugging Face transformers: the Flowformer models, and an attention function for other models.

Importing this package registers both: the Auto classes load the model type "flowformer", and models that look up their
attention function by name accept `attn_implementation="flow_attention"`.
"""

from __future__ import annotations

try:
    from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig
    from transformers.cache_utils import STATIC_LAYER_TYPE_MAPPING
    from transformers.models.auto import modeling_auto
except Exception as error:  # a broken installation raises more than ImportError
    raise ImportError(
        "flowformer.integrations.transformers needs transformers 5.14 or newer: pip install 'flowformer[hf]'."
    ) from error

from . import served as served
from .attention import flow_attention_forward, flow_attention_mask
from .cache import NAME, FlowCache, FlowCacheLayer
from .config import FlowformerConfig
from .context import cut_sequences
from .models import (
    FlowformerForCausalLM,
    FlowformerForMaskedLM,
    FlowformerForQuestionAnswering,
    FlowformerForSequenceClassification,
    FlowformerForTokenClassification,
    FlowformerModel,
)

__all__ = [
    "FlowCache",
    "FlowCacheLayer",
    "FlowformerConfig",
    "FlowformerForCausalLM",
    "FlowformerForMaskedLM",
    "FlowformerForQuestionAnswering",
    "FlowformerForSequenceClassification",
    "FlowformerForTokenClassification",
    "FlowformerModel",
    "cut_sequences",
    "flow_attention_forward",
    "flow_attention_mask",
]

AutoConfig.register(FlowformerConfig.model_type, FlowformerConfig, exist_ok=True)
for task, model in {
    "": FlowformerModel,
    "FOR_CAUSAL_LM_": FlowformerForCausalLM,
    "FOR_MASKED_LM_": FlowformerForMaskedLM,
    "FOR_QUESTION_ANSWERING_": FlowformerForQuestionAnswering,
    "FOR_SEQUENCE_CLASSIFICATION_": FlowformerForSequenceClassification,
    "FOR_TOKEN_CLASSIFICATION_": FlowformerForTokenClassification,
}.items():
    getattr(modeling_auto, f"MODEL_{task}MAPPING").register(FlowformerConfig, model, exist_ok=True)
    # Trainer, model cards and serving tools look up models by class name
    getattr(modeling_auto, f"MODEL_{task}MAPPING_NAMES")[FlowformerConfig.model_type] = model.__name__
AttentionInterface.register(NAME, flow_attention_forward)
# without a mask function of the same name transformers drops the padding mask
AttentionMaskInterface.register(NAME, flow_attention_mask)
STATIC_LAYER_TYPE_MAPPING[NAME] = FlowCacheLayer  # a StaticCache, too, holds FlowStates
