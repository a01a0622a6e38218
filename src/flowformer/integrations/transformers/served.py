"""Check which transformers models can run Flow-Attention, prepare those, and refuse the others.

A model whose attention is hard-coded accepts any `attn_implementation` silently and keeps computing softmax, often
without a causal mask. transformers has no hook to refuse it, so this file patches methods of `PreTrainedModel`,
`PreTrainedConfig` and the caches; with any other attention they behave as before.
"""

from __future__ import annotations

import inspect
import re
import threading
import warnings
from collections.abc import Callable, Iterator
from functools import wraps
from types import CodeType
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel, StaticCache
from transformers.cache_utils import Cache
from transformers.generation.continuous_batching import ContinuousMixin

from ...nn import token_positions
from .cache import NAME, FlowCacheLayer, with_states
from .context import check_labels, check_padding, group_of
from .linearized_heads import KEPT_SOFTMAX, Exchange, FlowHeads, sizes_of

if TYPE_CHECKING:
    from ...ops.context.exchange import Group

# names in the code of a layer that looks up its attention function
LOOKUPS = {"ALL_ATTENTION_FUNCTIONS", "get_interface"}
CROSS_ATTENTION = re.compile(r"cross_?att|encoder_att|enc_?dec_?att|encoder_decoder_att", re.IGNORECASE)
# model types with other layers that ignore the mask: recurrences carry left padding into the tokens, convolutions
# mix in padding on either side
RECURRENT, CONVOLUTIONAL = {"recurrent_gemma"}, {"sam3_lite_text_text_model"}
ATTENDS_ELSEWHERE = (
    "attends to another sequence, as a decoder attends to an encoder: sums over all queries would show a token those "
    "after it. flowformer.nn.FlowDecoderLayer has a cross-attention that does not"
)


def is_flow(config: PreTrainedConfig | None) -> bool:
    """Whether a model with this config runs Flow-Attention instead of its original attention."""
    return config is not None and config._attn_implementation == NAME and config.model_type != "flowformer"


def is_cross_attention(layer: nn.Module, name: str = "") -> bool:
    """Whether a layer attends to another sequence, judged by its name, class and attributes."""
    is_of_decoder = getattr(layer, "is_decoder", False) is True and getattr(layer, "is_causal", None) is False
    says_so = getattr(layer, "is_cross_attention", False) is True
    return is_of_decoder or says_so or bool(CROSS_ATTENTION.search(f"{name} {type(layer).__name__}"))


def attention_layers(module: nn.Module, config: Any = None, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield (name, layer) of the layers that run Flow-Attention.

    These are the modules whose class name contains Attention or Attn, without another such module inside. Heads that
    pool tokens by attention are skipped: they do not depend on attn_implementation.
    """
    own = getattr(module, "config", None)
    config = own if isinstance(own, PreTrainedConfig) else config
    if re.search("Pool|AttnAdapter", type(module).__name__):
        return
    inner = [pair for key, child in module.named_children() for pair in attention_layers(child, config, key)]
    yield from inner
    is_attention = isinstance(module, nn.MultiheadAttention) or re.search("Attention|Attn", type(module).__name__)
    if not inner and is_attention and is_flow(config):
        yield name, module


def looks_up_its_attention(layer: type[nn.Module]) -> bool:
    """Whether the code of a layer looks up its attention function in transformers."""
    for cls in layer.__mro__[: layer.__mro__.index(nn.Module)]:
        for member in vars(cls).values():
            code = getattr(inspect.unwrap(member), "__code__", None) if callable(member) else None
            if code is not None and not LOOKUPS.isdisjoint(_names(code)):
                return True
    return False


def _names(code: CodeType) -> set[str]:
    """Return the global and attribute names used in a code object and in the functions inside it."""
    inner = (_names(const) for const in code.co_consts if isinstance(const, CodeType))
    return set(code.co_names).union(*inner)


def refuse(model: type | str, reason: str) -> NotImplementedError:
    """Return the error for a model that cannot run Flow-Attention."""
    name = model if isinstance(model, str) else model.__name__
    return NotImplementedError(
        f"{NAME} cannot serve {name}: {reason}. Choose another attn_implementation, for one part of a composite model "
        f'as in {{"": "{NAME}", "vision_config": "sdpa"}}; docs/transformers.md lists the model types that are served.'
    )


def check_class(model: type[PreTrainedModel]) -> None:
    """Refuse a model class whose file never looks up its attention function, before it is built."""
    if not model._can_set_attn_implementation():
        raise refuse(model, "it computes its attention itself and would go on with softmax")


def check_layers(model: PreTrainedModel) -> int:
    """Refuse a model with a layer that Flow-Attention cannot replace; return the number of layers it replaces."""
    if is_flow(model.config) and "decoder_input_ids" in inspect.signature(model.forward).parameters:
        raise refuse(type(model), f"its decoder {ATTENDS_ELSEWHERE}")
    layers = list(attention_layers(model))
    for name, layer in layers:
        kind = type(layer).__name__
        if is_cross_attention(layer, name):
            raise refuse(type(model), f"{kind} ({name}) {ATTENDS_ELSEWHERE}")
        if not looks_up_its_attention(type(layer)):
            raise refuse(type(model), f"{kind} ({name}) computes its attention itself and would go on with softmax")
        if hasattr(layer, "prepare_dynamic_mask") or any("Indexer" in type(m).__name__ for m in layer.modules()):
            raise refuse(type(model), f"{kind} ({name}) chooses keys for every query, which has no linear form")
    return len(layers)


def parts_of(model: PreTrainedModel) -> list[PreTrainedModel]:
    """Return the model and all models inside it."""
    return [part for part in model.modules() if isinstance(part, PreTrainedModel)]


def asks_for_flow(model: PreTrainedModel) -> bool:
    """Whether any part of a model is configured to run Flow-Attention."""
    return any(is_flow(part.config) for part in parts_of(model))


def check_model(model: PreTrainedModel) -> None:
    """Refuse a model configured for Flow-Attention that has no layer to replace, or one that cannot be replaced."""
    if asks_for_flow(model) and not check_layers(model):
        raise refuse(type(model), "it has no attention layer to replace")


def attach_heads(model: PreTrainedModel, **factory: Any) -> None:
    """Attach `FlowHeads`, or the mark of kept softmax, to each attention layer, if the config has an exchange.

    Args:
        factory: device and dtype of the parameters.
    """
    exchange = Exchange.of(model.config)
    if exchange is None:
        return
    layers = [layer for _, layer in attention_layers(model)]
    unknown = [index for index in exchange.keep_layers if not 0 <= index < len(layers)]
    if unknown:
        raise ValueError(f"keep_layers names {unknown}, but {type(model).__name__} has {len(layers)} attention layers.")
    for index, layer in enumerate(layers):
        if index in exchange.keep_layers:
            layer.flow = KEPT_SOFTMAX  # type: ignore[assignment]
        elif not hasattr(layer, "flow"):
            layer.flow = FlowHeads(exchange, *sizes_of(layer, getattr(layer, "config", model.config)), **factory)


def prepare(model: PreTrainedModel) -> None:
    """Install the hooks by which positions follow the padding mask and attention layers find their cache."""
    # generate then refuses methods that remove tokens from the cache, such as assisted decoding
    model._is_stateful = True
    for _, layer in attention_layers(model):
        if not hasattr(layer, "_finds_flow_cache"):
            layer.register_forward_pre_hook(_before_attention, with_kwargs=True)
            layer.register_forward_hook(_after_attention, always_call=True)
        layer._finds_flow_cache = True  # type: ignore[assignment]
    names = list(inspect.signature(model.forward).parameters)
    inner_mask = any("attention_mask" in inspect.signature(part.forward).parameters for part in parts_of(model)[1:])
    # models with get_rope_index compute positions from the mask themselves; others leave it to a model inside, which
    # has its own hook
    sets_positions = hasattr(model, "get_rope_index") or (inner_mask and "position_ids" not in names)
    if not hasattr(model, "_flow_arguments"):
        model.register_forward_pre_hook(_before_forward, with_kwargs=True)
    model._flow_arguments = [] if sets_positions else names  # type: ignore[assignment]
    # RoBERTa and similar models number their first token padding_idx + 1; ESM with rotary positions starts at 0
    like_roberta = (part for part in model.modules() if hasattr(part, "create_position_ids_from_inputs_embeds"))
    tables = (part for part in like_roberta if getattr(part, "position_embedding_type", "") != "rotary")
    model._flow_padding = next((part.padding_idx for part in tables), None)  # type: ignore[assignment]


_thread = threading.local()  # threads may share a model, each with its own cache


def current_cache() -> Cache | None:
    """Return the cache that was passed to the attention layer that is running in this thread, or None."""
    return getattr(_thread, "cache", None)


def _before_attention(layer: Any, args: tuple, kwargs: dict[str, Any]) -> None:
    """Record the cache for the attention function, which transformers does not pass it.

    The hook stays when another attn_implementation is set, hence the check.
    """
    caches = (x for x in (*args, *kwargs.values()) if isinstance(x, Cache))
    _thread.cache = next(caches, None) if is_flow(getattr(layer, "config", None)) else None


def _after_attention(layer: Any, args: tuple, output: Any) -> None:
    """Forget the cache: a later call without one must not find it."""
    _thread.cache = None


def _before_forward(model: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
    """Pass positions that count only tokens, as `generate` does, if the caller passed a mask but no positions.

    The feature map is applied after the rotary embedding, so that Flow-Attention depends on absolute positions. Without
    this hook a sequence padded on the left would differ from the same sequence alone.
    """
    if not is_flow(model.config):
        return None
    if kwargs.get("output_attentions"):
        warn_no_weights()
    names = model._flow_arguments
    arguments = dict(zip(names, args, strict=False)) | kwargs
    group = group_of(model)
    if group is not None:
        check_labels(model, arguments.get("labels"))
        if "use_cache" in names and arguments.get("use_cache") is None:
            kwargs = kwargs | {"use_cache": False}
    positions = _positions(model, arguments, group)
    if positions is None:
        return args, kwargs
    index = names.index("position_ids")
    if index < len(args):
        return (*args[:index], positions, *args[index + 1 :]), kwargs
    return args, kwargs | {"position_ids": positions}


def _positions(model: Any, arguments: dict[str, Any], group: Group | None) -> Tensor | None:
    """Return the positions (B, N) of the new tokens; None if the caller passed them or the model computes them."""
    tokens = arguments.get("input_ids") if arguments.get("inputs_embeds") is None else arguments["inputs_embeds"]
    mask = arguments.get("attention_mask")
    if isinstance(mask, Tensor):
        check_padding(mask)
    if arguments.get("position_ids") is not None or tokens is None:
        return None
    new, names = tokens.shape[1], model._flow_arguments
    if group is not None:
        if "position_ids" not in names:
            raise refuse(type(model), "it takes no position_ids, which go on from rank to rank")
        mask = tokens.new_ones(tokens.shape[:2]) if mask is None else mask
    if not isinstance(mask, Tensor) or mask.dim() != 2 or len(mask) != len(tokens):
        return None
    if mask.shape[1] != new and (arguments.get("past_key_values") is None or mask.shape[1] < new):
        return None
    if model.config.model_type in CONVOLUTIONAL and not mask.all():
        raise refuse(type(model), "it takes padding for tokens. Pass rows of one length")
    if "position_ids" not in names or model.config.model_type in RECURRENT:
        if not mask[:, 0].all():
            raise refuse(type(model), "it takes padding on the left for tokens. Pad on the right")
        return None
    positions, padding_idx = token_positions(mask.bool(), None, group), model._flow_padding
    if padding_idx is not None:
        positions = padding_idx + (positions + 1) * mask.long()
    return positions[:, -new:]  # the mask also covers the tokens in the cache


def warn_no_weights() -> None:
    """Warn that output_attentions returns nothing."""
    warnings.warn(
        "Flow-Attention has no matrix of attention weights: output_attentions=True returns none. "
        "flowformer.flow_maps shows which tokens give and take.",
        stacklevel=3,
    )


def extends(owner: type, name: str) -> Callable[[Callable], Callable]:
    """Replace a method of transformers by the decorated function, which gets the original as its first argument."""

    def replace(function: Callable) -> Callable:
        original = vars(owner)[name]
        method = original.__func__ if isinstance(original, classmethod) else original

        @wraps(method)
        def extended(*args, **kwargs):
            return function(method, *args, **kwargs)

        setattr(owner, name, classmethod(extended) if isinstance(original, classmethod) else extended)
        return function

    return replace


@extends(PreTrainedModel, "get_correct_attn_implementation")
def choose(original: Callable, model: PreTrainedModel, *args, **kwargs) -> str:
    """Refuse a model class before it is built."""
    chosen = original(model, *args, **kwargs)
    if chosen == NAME and model.config.model_type != "flowformer":
        check_class(type(model))
    return chosen


@extends(PreTrainedModel, "post_init")
def finish(original: Callable, model: PreTrainedModel) -> None:
    """Check and prepare a model at the end of its constructor."""
    if asks_for_flow(model):
        check_layers(model)
    if is_flow(model.config):
        attach_heads(model)
        prepare(model)
    original(model)


def _is_part() -> bool:
    """Whether the current call runs inside the constructor of another model."""
    frames = (info.frame for info in inspect.stack(0))
    return any(f.f_code.co_name == "__init__" and isinstance(f.f_locals.get("self"), PreTrainedModel) for f in frames)


@extends(PreTrainedModel, "_initialize_weights")
def initialize(original: Callable, model: PreTrainedModel, module: nn.Module, *args, **kwargs) -> None:
    """Initialise `FlowHeads` that are missing from a checkpoint."""
    if isinstance(module, FlowHeads) and not getattr(module, "_is_hf_initialized", False):
        module.reset_parameters()
    original(model, module, *args, **kwargs)


@extends(PreTrainedModel, "_from_config")
@extends(PreTrainedModel, "from_pretrained")
def build(original: Callable, cls: type[PreTrainedModel], *args, **kwargs) -> Any:
    """Refuse a model that cannot run Flow-Attention once it is complete, with a message that says why."""
    try:
        built = original(cls, *args, **kwargs)
    except KeyError as error:
        if error.args != (NAME,):
            raise
        raise refuse(cls, "it chooses its attention from a list of its own") from error
    model = built[0] if isinstance(built, tuple) else built  # a tuple with output_loading_info=True
    if asks_for_flow(model) and not _is_part():  # a part of another model may have no attention
        check_model(model)
    return built


@extends(PreTrainedModel, "set_attn_implementation")
def set_attn_implementation(original: Callable, model: PreTrainedModel, choice: str | dict, *args, **kwargs) -> None:
    """Check and prepare a model whose attention is changed; a refused model keeps its attention."""
    parts = parts_of(model)
    before = [(part.config, part.config._attn_implementation) for part in parts]
    try:
        original(model, choice, *args, **kwargs)
        choices = choice if isinstance(choice, dict) else {"": choice} | dict.fromkeys(model.config.sub_configs, choice)
        for key, wanted in choices.items():
            config = getattr(model.config, key, None) if key else model.config
            if wanted == NAME and config is not None and config._attn_implementation != NAME:
                # transformers only warns and leaves the attention unchanged
                raise refuse(type(model), f"{key or 'it'} computes its attention itself and would go on with softmax")
        check_model(model)
    except Exception:
        for config, implementation in before:
            config._attn_implementation_internal = implementation
        raise
    for part in parts:
        if is_flow(part.config):
            attach_heads(part, device=part.device)
            prepare(part)
        else:
            vars(part).pop("_is_stateful", None)  # set by `prepare`


@extends(PreTrainedConfig, "_remove_keys_not_serialized")
def save_choice(original: Callable, config: PreTrainedConfig, fields: dict[str, Any]) -> None:
    """Save attn_implementation in config.json if it is Flow-Attention; transformers reads it, but does not write it."""
    choice = _choice(fields)
    if choice is not None:
        fields["attn_implementation"] = choice
    original(config, fields)


def _choice(fields: dict[str, Any]) -> str | dict | None:
    """Return the attn_implementation to save; None if neither the config nor one inside it uses Flow-Attention."""
    own = fields.get("attn_implementation")  # set if these fields were processed before
    if "_attn_implementation_internal" in fields:
        own = NAME if fields["_attn_implementation_internal"] == NAME else None
    parts = {key: _choice(part) for key, part in fields.items() if isinstance(part, dict) and "model_type" in part}
    if isinstance(own, dict) or all(part == own for part in parts.values()):
        return own
    return {"": own, **parts} if any([own, *parts.values()]) else None


@extends(StaticCache, "__init__")
@extends(DynamicCache, "__init__")
def keep_states(original: Callable, cache: Any, *args, **kwargs) -> None:
    """Put FlowCacheLayers into every cache made for a model with Flow-Attention, including those `generate` makes."""
    original(cache, *args, **kwargs)
    config = inspect.signature(original).bind(cache, *args, **kwargs).arguments.get("config")
    decoder = None if config is None else config.get_text_config(decoder=True)
    if is_flow(decoder):
        exchange = Exchange.of(decoder)
        cache.layers = with_states(cache.layers, () if exchange is None else exchange.keep_layers)


@extends(Cache, "update")
def note_layer(original: Callable, cache: Any, key: Tensor, value: Tensor, layer_idx: int, *args, **kwargs) -> Any:
    """Record the layer index for the attention function. One module may run as several layers, each with its state."""
    layer = cache.layers[layer_idx] if layer_idx < len(cache.layers) else None
    if isinstance(layer, FlowCacheLayer) and current_cache() is not cache:
        raise TypeError(
            f"got a {type(cache).__name__} of Flow-Attention for another attention: its states hold no keys and "
            "values. Pass DynamicCache(config=model.config), or no cache: generate and the model make one. If the "
            f"config was changed after the model was built, call model.set_attn_implementation({NAME!r}) instead."
        )
    cache._flow_layer = layer_idx
    return original(cache, key, value, layer_idx, *args, **kwargs)


@extends(ContinuousMixin, "init_continuous_batching")
def refuse_continuous_batching(original: Callable, model: Any, *args, **kwargs) -> Any:
    """Refuse continuous batching, whose paged cache holds keys and values only."""
    if is_flow(model.config) or NAME in (getattr(model.config, "layer_types", None) or ()):
        raise NotImplementedError(
            "continuous batching keeps pages of keys and values, full or of a window, and has no place for the sums "
            "of Flow-Attention. Use generate with prompts padded on the left."
        )
    return original(model, *args, **kwargs)
