"""Which models of transformers Flow-Attention serves, and what is done about those it does not.

A model whose attention is hard-coded accepts any `attn_implementation` silently and keeps computing softmax, often
without a causal mask. transformers has no hook to refuse it, so this file extends methods of `PreTrainedModel` and
`PreTrainedConfig`; with any other attention they behave as before.
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
from .linearized_heads import KEPT, Exchange, FlowHeads, sizes_of

if TYPE_CHECKING:
    from ...ops.context.exchange import Group

# by these names an attention layer finds the function that computes it
LOOKUPS = {"ALL_ATTENTION_FUNCTIONS", "get_interface"}
CROSS_ATTENTION = re.compile(r"cross_?att|encoder_att|enc_?dec_?att|encoder_decoder_att", re.IGNORECASE)
# model types with layers besides attention that see no mask: recurrent ones carry padding on the left along,
# convolutions mix padding on either side in
RECURRENT, CONVOLUTIONAL = {"recurrent_gemma"}, {"sam3_lite_text_text_model"}
ATTENDS_ELSEWHERE = (
    "attends to another sequence, as a decoder attends to an encoder: sums over all queries would show a token those "
    "after it. flowformer.nn.FlowDecoderLayer has a cross-attention that does not"
)


def is_flow(config: PreTrainedConfig | None) -> bool:
    """Whether a model with this config is to run Flow-Attention in place of its own attention."""
    return config is not None and config._attn_implementation == NAME and config.model_type != "flowformer"


def is_cross_attention(layer: nn.Module, name: str = "") -> bool:
    """Whether a layer attends to another sequence, by its name, its class or its `is_cross_attention`."""
    is_of_decoder = getattr(layer, "is_decoder", False) is True and getattr(layer, "is_causal", None) is False
    says_so = getattr(layer, "is_cross_attention", False) is True
    return is_of_decoder or says_so or bool(CROSS_ATTENTION.search(f"{name} {type(layer).__name__}"))


def attention_layers(module: nn.Module, config: Any = None, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The layers that are to run Flow-Attention: modules named attention that contain no other such module, by name.

    Heads that pool tokens by attention are the same whatever the attn_implementation, and are left out.
    """
    own = getattr(module, "config", None)
    config = own if isinstance(own, PreTrainedConfig) else config
    if re.search("Pool|AttnAdapter", type(module).__name__):
        return
    inner = [found for key, child in module.named_children() for found in attention_layers(child, config, key)]
    yield from inner
    is_attention = isinstance(module, nn.MultiheadAttention) or re.search("Attention|Attn", type(module).__name__)
    if not inner and is_attention and is_flow(config):
        yield name, module


def looks_up_its_attention(layer: type[nn.Module]) -> bool:
    """Whether the code of a layer asks transformers for the function that computes its attention."""
    for cls in layer.__mro__[: layer.__mro__.index(nn.Module)]:
        for member in vars(cls).values():
            code = getattr(inspect.unwrap(member), "__code__", None) if callable(member) else None
            if code is not None and not LOOKUPS.isdisjoint(_names(code)):
                return True
    return False


def _names(code: CodeType) -> set[str]:
    inner = (_names(const) for const in code.co_consts if isinstance(const, CodeType))
    return set(code.co_names).union(*inner)


def refuse(model: type | str, reason: str) -> NotImplementedError:
    name = model if isinstance(model, str) else model.__name__
    return NotImplementedError(
        f"{NAME} cannot serve {name}: {reason}. Choose another attn_implementation, for one part of a composite model "
        f'as in {{"": "{NAME}", "vision_config": "sdpa"}}; docs/transformers.md lists the model types that are served.'
    )


def check_class(model: type[PreTrainedModel]) -> None:
    """Refuse a model whose file never looks its attention up, before anything of it is built."""
    if not model._can_set_attn_implementation():
        raise refuse(model, "it computes its attention itself and would go on with softmax")


def check_layers(model: PreTrainedModel) -> int:
    """Refuse a model with a layer that Flow-Attention cannot replace. Returns how many layers it replaces."""
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
    """The model and those inside it."""
    return [part for part in model.modules() if isinstance(part, PreTrainedModel)]


def asks_for_flow(model: PreTrainedModel) -> bool:
    return any(is_flow(part.config) for part in parts_of(model))


def check_model(model: PreTrainedModel) -> None:
    """Refuse a whole model that asks for Flow-Attention and has no layer for it, or one that it cannot replace."""
    if asks_for_flow(model) and not check_layers(model):
        raise refuse(type(model), "it has no attention layer to replace")


def attach_heads(model: PreTrainedModel, **factory: Any) -> None:
    """Give each attention layer what the exchange in the config of the model says, if there is one.

    Args:
        factory: device and dtype of what is learned.
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
            layer.flow = KEPT  # type: ignore[assignment]
        elif not hasattr(layer, "flow"):
            layer.flow = FlowHeads(exchange, *sizes_of(layer, getattr(layer, "config", model.config)), **factory)


def prepare(model: PreTrainedModel) -> None:
    """Have the positions of a model follow its mask, and its attention layers find their cache."""
    model._is_stateful = True  # generate then refuses what would need to take tokens back
    for _, layer in attention_layers(model):
        if not hasattr(layer, "_finds_flow_cache"):
            layer.register_forward_pre_hook(_before_attention, with_kwargs=True)
            layer.register_forward_hook(_after_attention, always_call=True)
        layer._finds_flow_cache = True  # type: ignore[assignment]
    names = list(inspect.signature(model.forward).parameters)
    hands_on = any("attention_mask" in inspect.signature(part.forward).parameters for part in parts_of(model)[1:])
    # some models count by rules of their own that follow the mask, and some leave it to a model inside
    counts = hasattr(model, "get_rope_index") or (hands_on and "position_ids" not in names)
    if not hasattr(model, "_flow_arguments"):
        model.register_forward_pre_hook(_before_forward, with_kwargs=True)
    model._flow_arguments = [] if counts else names  # type: ignore[assignment]
    # RoBERTa and its like count from the position after that of padding, but rotary ones of ESM from 0
    like_roberta = (part for part in model.modules() if hasattr(part, "create_position_ids_from_inputs_embeds"))
    tables = (part for part in like_roberta if getattr(part, "position_embedding_type", "") != "rotary")
    model._flow_padding = next((part.padding_idx for part in tables), None)  # type: ignore[assignment]


_thread = threading.local()  # threads may share a model, but not a cache


def current_cache() -> Cache | None:
    """The cache that was passed to the attention layer at work."""
    return getattr(_thread, "cache", None)


def _before_attention(layer: Any, args: tuple, kwargs: dict[str, Any]) -> None:
    """Tell the attention function of the cache, which is passed to its layer only; hooks outlast Flow-Attention."""
    caches = (x for x in (*args, *kwargs.values()) if isinstance(x, Cache))
    _thread.cache = next(caches, None) if is_flow(getattr(layer, "config", None)) else None


def _after_attention(layer: Any, args: tuple, output: Any) -> None:
    _thread.cache = None


def _before_forward(model: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
    """Positions that follow the mask, as `generate` counts them, where the caller passed a mask and no positions.

    Features of queries and keys are not relative: after a rotation they depend on where counting begins, so that a
    sequence padded on the left would differ from the same sequence alone.
    """
    if not is_flow(model.config):
        return None
    if kwargs.get("output_attentions"):
        warn_no_weights()
    names = model._flow_arguments
    given = dict(zip(names, args, strict=False)) | kwargs
    group = group_of(model)
    if group is not None:
        check_labels(model, given.get("labels"))
        if "use_cache" in names and given.get("use_cache") is None:
            kwargs = kwargs | {"use_cache": False}
    positions = _positions(model, given, group)
    if positions is None:
        return args, kwargs
    place = names.index("position_ids")
    if place < len(args):
        return (*args[:place], positions, *args[place + 1 :]), kwargs
    return args, kwargs | {"position_ids": positions}


def _positions(model: Any, given: dict[str, Any], group: Group | None) -> Tensor | None:
    """The positions of the tokens, None where the caller or the model counts them."""
    tokens = given.get("input_ids") if given.get("inputs_embeds") is None else given["inputs_embeds"]
    mask = given.get("attention_mask")
    if isinstance(mask, Tensor):
        check_padding(mask)
    if given.get("position_ids") is not None or tokens is None:
        return None
    new, names = tokens.shape[1], model._flow_arguments
    if group is not None:
        if "position_ids" not in names:
            raise refuse(type(model), "it takes no position_ids, which go on from rank to rank")
        mask = tokens.new_ones(tokens.shape[:2]) if mask is None else mask
    if not isinstance(mask, Tensor) or mask.dim() != 2 or len(mask) != len(tokens):
        return None
    if mask.shape[1] != new and (given.get("past_key_values") is None or mask.shape[1] < new):
        return None
    if model.config.model_type in CONVOLUTIONAL and not mask.all():
        raise refuse(type(model), "it takes padding for tokens. Pass rows of one length")
    if "position_ids" not in names or model.config.model_type in RECURRENT:
        if not mask[:, 0].all():
            raise refuse(type(model), "it takes padding on the left for tokens. Pad on the right")
        return None
    positions, before = token_positions(mask.bool(), None, group), model._flow_padding
    if before is not None:
        positions = before + (positions + 1) * mask.long()
    return positions[:, -new:]  # those before are in the cache


def warn_no_weights() -> None:
    warnings.warn(
        "Flow-Attention has no matrix of attention weights: output_attentions=True returns none. "
        "flowformer.flow_maps shows which tokens give and take.",
        stacklevel=3,
    )


def extends(owner: type, name: str) -> Callable[[Callable], Callable]:
    """Replace a method of transformers by a function that takes the method it replaces as its first argument."""

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
    chosen = original(model, *args, **kwargs)
    if chosen == NAME and model.config.model_type != "flowformer":
        check_class(type(model))
    return chosen


@extends(PreTrainedModel, "post_init")
def finish(original: Callable, model: PreTrainedModel) -> None:
    if asks_for_flow(model):
        check_layers(model)
    if is_flow(model.config):
        attach_heads(model)
        prepare(model)
    original(model)


def _is_part() -> bool:
    """Whether the model at hand is built by the constructor of another, of which it will be a part."""
    frames = (info.frame for info in inspect.stack(0))
    return any(f.f_code.co_name == "__init__" and isinstance(f.f_locals.get("self"), PreTrainedModel) for f in frames)


@extends(PreTrainedModel, "_initialize_weights")
def initialize(original: Callable, model: PreTrainedModel, module: nn.Module, *args, **kwargs) -> None:
    if isinstance(module, FlowHeads) and not getattr(module, "_is_hf_initialized", False):
        module.reset_parameters()
    original(model, module, *args, **kwargs)


@extends(PreTrainedModel, "_from_config")
@extends(PreTrainedModel, "from_pretrained")
def build(original: Callable, cls: type[PreTrainedModel], *args, **kwargs) -> Any:
    try:
        built = original(cls, *args, **kwargs)
    except KeyError as error:
        if error.args != (NAME,):
            raise
        raise refuse(cls, "it chooses its attention from a list of its own") from error
    model = built[0] if isinstance(built, tuple) else built  # with output_loading_info there are two
    if asks_for_flow(model) and not _is_part():  # a part of another model may have no attention
        check_model(model)
    return built


@extends(PreTrainedModel, "set_attn_implementation")
def set_attn_implementation(original: Callable, model: PreTrainedModel, choice: str | dict, *args, **kwargs) -> None:
    parts = parts_of(model)
    before = [(part.config, part.config._attn_implementation) for part in parts]
    try:
        original(model, choice, *args, **kwargs)
        choices = choice if isinstance(choice, dict) else {"": choice} | dict.fromkeys(model.config.sub_configs, choice)
        for key, wanted in choices.items():
            config = getattr(model.config, key, None) if key else model.config
            if wanted == NAME and config is not None and config._attn_implementation != NAME:
                # transformers left it as it was, with no more than a warning
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
            vars(part).pop("_is_stateful", None)  # which `prepare` had set


@extends(PreTrainedConfig, "_remove_keys_not_serialized")
def save_choice(original: Callable, config: PreTrainedConfig, fields: dict[str, Any]) -> None:
    """Keep Flow-Attention in config.json, from where transformers reads it; it forgets the attn_implementation."""
    choice = _choice(fields)
    if choice is not None:
        fields["attn_implementation"] = choice
    original(config, fields)


def _choice(fields: dict[str, Any]) -> str | dict | None:
    """What a config saves as its attn_implementation: nothing unless it, or one inside it, is Flow-Attention."""
    own = fields.get("attn_implementation")  # of an earlier pass over the same fields
    if "_attn_implementation_internal" in fields:
        own = NAME if fields["_attn_implementation_internal"] == NAME else None
    parts = {key: _choice(part) for key, part in fields.items() if isinstance(part, dict) and "model_type" in part}
    if isinstance(own, dict) or all(part == own for part in parts.values()):
        return own
    return {"": own, **parts} if any([own, *parts.values()]) else None


@extends(StaticCache, "__init__")
@extends(DynamicCache, "__init__")
def keep_states(original: Callable, cache: Any, *args, **kwargs) -> None:
    """Have every cache that is made for a model with Flow-Attention hold states, also one that `generate` makes."""
    original(cache, *args, **kwargs)
    config = inspect.signature(original).bind(cache, *args, **kwargs).arguments.get("config")
    decoder = None if config is None else config.get_text_config(decoder=True)
    if is_flow(decoder):
        exchange = Exchange.of(decoder)
        cache.layers = with_states(cache.layers, () if exchange is None else exchange.keep_layers)


@extends(Cache, "update")
def note_layer(original: Callable, cache: Any, key: Tensor, value: Tensor, layer_idx: int, *args, **kwargs) -> Any:
    """Tell the attention function which layer of the cache its tokens belong to; a module may run for several."""
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
    if is_flow(model.config) or NAME in (getattr(model.config, "layer_types", None) or ()):
        raise NotImplementedError(
            "continuous batching keeps pages of keys and values, full or of a window, and has no place for the sums "
            "of Flow-Attention. Use generate with prompts padded on the left."
        )
    return original(model, *args, **kwargs)
