"""Every model type of transformers, small: its config cut down by the names of its fields, and inputs by rule.

Shapes: B batch, N tokens.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

LARGEST = 30_000_000  # parameters; a model beyond that was not cut down
VOCABULARY = 64
PAD = 0

# what a field is cut down to, by the first pattern that its whole name matches
DEPTHS = {
    r"((num|n|encoder|decoder|vision|.*_num)_)?((hidden|encoder|decoder|attention)_)?(layers?|blocks)|depth": 2,
    r"(.*_)?vocab_size(_.*)?|codebook_size": VOCABULARY,
    r"(.*_)?max_(position_embeddings|source_positions|target_positions|seq_len|seq_length)|n_positions": 64,
    r"image_size|img_size": 32,
    r"num_(local_|routed_)?experts|n_routed_experts|moe_num_experts": 4,
    r"num_experts_per_tok|moe_k|moe_topk|top_k_experts": 2,
    r"n_group|topk_group|n_shared_experts|first_k_dense_replace": 1,
}
KEY_HEADS = r"(.*_)?num_(key_value|kv)_heads|multi_query_group_num"
HEAD_DIM = r"(.*_)?head_dim|d_kv|kv_channels|dim_head|attention_head_size|rotary_dim"
WIDTHS = {
    r"(num_|n_|encoder_|decoder_|.*num_)?(attention_)?heads?": 4,
    KEY_HEADS: 2,
    HEAD_DIM: 16,
    r"(.*_)?((hidden|embedding)_size|(hidden|embed|embedding|projection|proj|emb)_dim|d_model|n_embd)|dim": 64,
    r"(.*_)?(intermediate_size|ffn_dim|mlp_dim|d_ff|d_inner|n_inner|ffn_hidden_size)": 48,
    r"(q|kv|o)_lora_rank": 16,
    r"patch_size": 8,
}
ROTARY = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
HALF_ROTARY = ROTARY | {"partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_chunk_size": 8}
# what the default config leaves open, or what no rule cuts down
OVERRIDES = {
    "autoformer": {"prediction_length": 4},
    "bamba": MAMBA | {"attn_layer_indices": [1]},
    "esm": {"vocab_size": VOCABULARY, "mask_token_id": 3, "hidden_size": 64, "num_attention_heads": 4},
    "falcon_h1": MAMBA | {"mamba_n_heads": 4, "mamba_d_ssm": 64},
    "glm4v_moe_text": {"rope_parameters": HALF_ROTARY},
    "glm4v_text": {"rope_parameters": ROTARY},
    "glm_image_text": {"rope_parameters": ROTARY},
    "glm_ocr_text": {"rope_parameters": ROTARY},
    "granitemoehybrid": MAMBA | {"layer_types": ["mamba", "attention"]},
    "informer": {"prediction_length": 4},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "mllama_text_model": {"cross_attention_layers": [1]},
    "qwen2_5_omni_text": {"rope_parameters": ROTARY},
    "qwen2_5_vl_text": {"rope_parameters": ROTARY},
    "qwen2_vl_text": {"rope_parameters": ROTARY},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "sam3_lite_text_text_model": {"num_hidden_layers": 4},
    "time_series_transformer": {"prediction_length": 4},
}


class UnavailableError(Exception):
    """A model type that cannot be built small, or that does not run on inputs made by rule."""


def model_class(model_type: str) -> type[PreTrainedModel]:
    """The bare model of that type, or the first one with a head."""
    names = [name for name in vars(modeling_auto) if re.fullmatch(r"MODEL_(FOR_\w+_)?MAPPING", name)]
    for name in sorted(names, key=lambda name: name != "MODEL_MAPPING"):
        mapping = getattr(modeling_auto, name)
        if model_type in mapping._model_mapping:
            found = mapping[type(CONFIG_MAPPING[model_type]())]
            return found[0] if isinstance(found, tuple) else found
    raise UnavailableError("no class of its own: it is a part of other models")


def small_fields(config: PreTrainedConfig, rules: dict[str, int]) -> dict[str, Any]:
    """The fields of a config that the rules make smaller, those of the configs in it too."""
    fields: dict[str, Any] = {"pad_token_id": PAD} if hasattr(config, "pad_token_id") else {}
    specials = iter(range(VOCABULARY - 1, 2, -1))
    kinds = getattr(config, "layer_types", None) or []
    depth = max([2, *(kinds.index(kind) + 1 for kind in set(kinds))])  # a layer of each kind
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            fields[name] = small_fields(value, rules) | {"model_type": value.model_type}
        elif isinstance(value, dict) and "mrope_section" in value:
            half = int(16 * value.get("partial_rotary_factor", 1)) // 2
            fields[name] = value | {"mrope_section": [half - 2 * (half // 4), half // 4, half // 4]}
        elif name in ("depths", "image_size") and isinstance(value, list | tuple):
            fields[name] = type(value)(1 if name == "depths" else 32 for _ in value)
        elif isinstance(value, bool) or not isinstance(value, int) or name in fields:
            continue
        elif re.fullmatch(r"\w+_token_(id|index)", name) and value >= VOCABULARY:
            fields[name] = next(specials)
        else:
            size = next((size for pattern, size in rules.items() if re.fullmatch(pattern, name)), value)
            size = depth if name == "num_hidden_layers" and depth <= 8 else size
            if 0 < size < value:
                fields[name] = size
    return fields | OVERRIDES.get(config.model_type, {})


def small_configs(model_type: str) -> Iterator[PreTrainedConfig]:
    """Configs of that type, the smallest first; the sizes in one or another do not fit together."""
    default = CONFIG_MAPPING[model_type]()
    small = DEPTHS | WIDTHS
    as_many_keys = small | {KEY_HEADS: 4}
    own_head_dim = {pattern: size for pattern, size in small.items() if pattern != HEAD_DIM}
    for rules in (small, as_many_keys, own_head_dim, DEPTHS):
        try:
            config = type(default)(**small_fields(default, rules))
        except Exception:  # configs refuse sizes in many ways
            continue
        config._experts_implementation = "eager"  # the others have no float64
        yield config


def small_model(model_type: str) -> tuple[PreTrainedModel, dict[str, Tensor]]:
    """A small model of that type with its own attention, in float64 if it can, and inputs that it runs on."""
    reasons: list[str] = []
    try:
        cls = model_class(model_type)
        candidates = itertools.product(small_configs(model_type), (torch.float64, torch.float32))
        for config, dtype in candidates:
            try:
                with torch.device("meta"):
                    size = sum(parameter.numel() for parameter in cls(copy.deepcopy(config)).parameters())
                if size > LARGEST:
                    raise UnavailableError(f"{size} parameters")
                model = cls._from_config(copy.deepcopy(config), attn_implementation="eager").to(dtype).eval()
            except Exception as error:  # and so do models
                reasons.append(f"{type(error).__name__}: {error}")
                continue
            for inputs in inputs_for(model):
                try:
                    call(model, inputs)
                    return model, inputs
                except Exception as error:
                    reasons.append(f"{type(error).__name__}: {error}")
    except Exception as error:  # a package that is not installed, a default config that is not valid
        reasons.append(f"{type(error).__name__}: {error}")
    raise UnavailableError(reasons[0] if reasons else "its config cannot be cut down")


def call(model: PreTrainedModel, inputs: dict[str, Tensor]) -> Any:
    """Its outputs, without a cache."""
    if "use_cache" in inspect.signature(model.forward).parameters:
        inputs = inputs | {"use_cache": False}
    with torch.no_grad():
        return model(**inputs)


def inputs_for(model: PreTrainedModel, batch: int = 2, length: int = 8) -> Iterator[dict[str, Tensor]]:
    """What the model may take: tokens, images, sound, or two of them, the likeliest first."""
    generator = torch.Generator().manual_seed(3)

    def tokens() -> Tensor:
        return torch.randint(4, 32, (batch, length), generator=generator)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=model.dtype)

    def size(config: Any, name: str, default: int) -> int:
        value = getattr(config, name, default)
        return value if isinstance(value, int) else default

    config = model.config
    vision = getattr(config, "vision_config", config)
    edges = getattr(vision, "image_size", 32)
    height, width = edges if isinstance(edges, list | tuple) else [edges or 32] * 2
    channels, frames = size(vision, "num_channels", 3), 2 * size(config, "max_source_positions", 64)
    patch = size(vision, "temporal_patch_size", 1) * channels * size(vision, "patch_size", 8) ** 2
    bins = size(config, "num_mel_bins", 80)
    text, decoder = {"input_ids": tokens()}, {"decoder_input_ids": tokens()}
    image = {"pixel_values": noise(batch, channels, height, width)}
    video = noise(batch, size(config, "num_frames", 4), channels, height, width)
    sounds = [{"input_features": noise(batch, bins, frames)}, {"input_features": noise(batch, frames, bins)}]
    heard = {"input_features_mask": torch.ones(batch, frames, dtype=torch.long)}
    grid = {"grid_thw": torch.tensor([[1, 4, 4]] * batch)}
    candidates: list[dict[str, Tensor]] = [
        text,
        image,
        {"input_values": noise(batch, 4000)},
        *sounds,
        *(sound | heard for sound in sounds),
        text | image,
        *(source | decoder for source in (text, image, *sounds)),
        {"pixel_values": video},
        {"pixel_values_videos": video},
        text | {"bbox": torch.zeros(batch, length, 4, dtype=torch.long)},
        {"inputs_embeds": noise(batch, length, size(config, "hidden_size", 32))},
        {"pixel_values": noise(16 * batch, patch)} | grid,
        {"hidden_states": noise(16 * batch, patch)} | grid,
        {"input_values": noise(batch, 1, 4000)},
        {"input_values": noise(batch, size(config, "max_length", 64), bins)},
    ]
    names = set(inspect.signature(model.forward).parameters)
    yield from (each for each in candidates if set(each) <= names)
