"""FlowformerConfig: the config of the Flowformer models of transformers."""

from __future__ import annotations

import sys
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import GenerationConfig, PreTrainedConfig

from ...models.lm import LMConfig
from ...ops import FlowVariant, checks
from .cache import NAME

# keys of a config.json that are neither fields nor attributes of a config
OTHER_OPTIONS = {
    "attn_implementation",
    "auto_map",
    "experts_implementation",
    "name_or_path",
    "quantization_config",
    "torch_dtype",
    "use_bfloat16",
}


@strict
class FlowformerConfig(PreTrainedConfig):
    """Config of a Flowformer; the default is the paper's language model for WikiText-103.

    Args:
        vocab_size, hidden_size, num_hidden_layers, num_attention_heads, intermediate_size: sizes of the model.
        hidden_act: "relu", "gelu" or "gelu_tanh".
        positions: "sinusoidal" or "fairseq" (sinusoids in another order), for any length; or "learned", a table of
            `max_position_embeddings` positions.
        scale_embedding: whether embeddings are multiplied by √hidden_size.
        initialisation: "fairseq", as in the paper's model, or "gpt", as in the authors' GPT module.
        dropout: on the embeddings, and on the results of attention and feed-forward networks.
        is_causal: False lets all tokens see each other, for classification.
        variant: variant of Flow-Attention: a FlowVariant, a dict of its fields, or the name of a preset. Variants with
            competitors="heads" are refused.

    >>> FlowformerConfig(hidden_size=64, num_attention_heads=4).lm_config().embed_dim
    64
    """

    model_type = "flowformer"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012

    vocab_size: int = 267744
    hidden_size: int = 512
    num_hidden_layers: int = 6
    num_attention_heads: int = 8
    intermediate_size: int = 2048
    hidden_act: str = "relu"
    positions: str = "sinusoidal"
    max_position_embeddings: int | None = None
    scale_embedding: bool = True
    initialisation: str = "fairseq"
    dropout: float | int = 0.1
    is_causal: bool = True
    variant: Any = None
    use_cache: bool = True
    tie_word_embeddings: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs) -> None:
        self._check_names(kwargs)
        variant = FlowVariant() if self.variant is None else self.variant
        variant = FlowVariant(**variant) if isinstance(variant, dict) else checks.variant(variant)
        if variant.competitors == "heads":
            raise NotImplementedError(
                "a Flowformer of transformers is built from decoder layers, also with is_causal=False, and takes no "
                f'variant with competitors="heads", got {variant}. flowformer.models.FlowformerClassifier does.'
            )
        if self.positions == "learned" and self.max_position_embeddings is None:
            raise ValueError(
                "learned positions need max_position_embeddings, the longest sequence; sinusoidal ones do not."
            )
        self.variant = variant.as_options()
        self.lm_config()
        super().__post_init__(**kwargs)

    def _check_names(self, options: dict[str, Any]) -> None:
        """Refuse a misspelt option: transformers would store it as an attribute without an error."""
        accepted = {field.name for field in fields(self)}
        known = accepted.union(dir(PreTrainedConfig), GenerationConfig().to_dict(), OTHER_OPTIONS)
        for name in options:
            if name not in known and not name.startswith("_"):
                nearest = get_close_matches(name, accepted, 1, 0.5)
                hint = f"did you mean {nearest[0]!r}?" if nearest else f"it takes {', '.join(sorted(accepted))}."
                raise TypeError(
                    f"FlowformerConfig got an unexpected option {name!r}; {hint} A value of your own needs a name that "
                    "begins with an underscore."
                )

    def to_dict(self) -> dict[str, Any]:
        """Return all options, and register the default LoRA layers of this model with PEFT.

        PEFT has no hook for this, but calls `to_dict` before it looks up the layers to adapt.
        """
        constants = sys.modules.get("peft.utils.constants")
        if constants is not None:
            like = constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING["llama"]
            for name, mapping in vars(constants).items():
                if name.endswith("_TARGET_MODULES_MAPPING") and mapping.get("llama") == like:
                    mapping[self.model_type] = like  # our layers have the same names as those of Llama
        return super().to_dict()

    @property
    def layer_types(self) -> list[str]:
        """The layer types, by which transformers chooses the cache layers."""
        return [NAME] * self.num_hidden_layers

    def validate_layer_type(self) -> None:
        """No-op: transformers checks against a fixed list of layer types, to which ours cannot be added."""

    def lm_config(self) -> LMConfig:
        """Return the equivalent config of `flowformer.models.FlowformerLM`, which holds all but the head."""
        # the ignores: these fields are plain str here, and LMConfig checks their values
        return LMConfig(
            vocab_size=self.vocab_size,
            num_layers=self.num_hidden_layers,
            embed_dim=self.hidden_size,
            num_heads=self.num_attention_heads,
            mlp_dim=self.intermediate_size,
            activation=self.hidden_act,  # type: ignore[arg-type]
            positions=self.positions,  # type: ignore[arg-type]
            max_length=self.max_position_embeddings,
            scale_embedding=self.scale_embedding,
            tie_embedding=True,
            initialisation=self.initialisation,  # type: ignore[arg-type]
            dropout=self.dropout,
            variant=FlowVariant(**self.variant),
        )
