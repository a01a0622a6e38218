"""The state of Flow-Attention in a cache of transformers: one layer's, and `FlowCache`, that of a whole model."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from ...ops import FlowState

NAME = "flow_attention"
# layers of keys and values, whose place the state takes
KEYS_AND_VALUES = (DynamicLayer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer)


class FlowCacheLayer(CacheLayerMixin):
    """What a layer keeps of the past: a `FlowState` and the tokens of a window, of the same size whatever the length.

    The recurrent cache layer of transformers treats a state without a convolution state as missing, and can neither
    repeat nor count its rows. States are never changed in place, so that a copy of this object is a snapshot.
    """

    _layer_type: str | None = NAME
    supports_early_init = False

    def __init__(self, **sizes) -> None:
        super().__init__()
        self.state: FlowState | None = None
        self.recent: tuple[Tensor, ...] = ()  # keys, values and mask of a window beside the state
        self.length = 0

    def advance(self, state: FlowState | None, tokens: int) -> None:
        """Keep the state after `tokens` more, padding included: `generate` counts columns.

        None is that of packed or bidirectional tokens, which have no state: nothing can continue from them.
        """
        self.state = state
        self.length += tokens

    def remember(self, key: Tensor, value: Tensor, mask: Tensor | None, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Keys, values and mask of the recent tokens and these; the last `count` of them are the next recent ones."""
        new = key.shape[2]
        valid = key.new_ones(len(key), new, dtype=torch.bool) if mask is None else mask[:, -new:]
        tokens = key, value, valid[:, None, :, None]
        if self.recent:
            tokens = tuple(torch.cat([old.to(x.device), x], 2) for old, x in zip(self.recent, tokens, strict=True))  # type: ignore[assignment]
        start = max(tokens[0].shape[2] - count, 0)
        self.recent = tuple(x[:, :, start:].clone() for x in tokens)  # a view would hold on to all of them
        return tokens[0], tokens[1], tokens[2][:, 0, :, 0]

    def get_seq_length(self) -> int:
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_max_length(self) -> int:
        return -1

    @property
    def batch_size(self) -> int:
        return -1 if self.state is None else len(self.state.memory)

    def reset(self) -> None:
        self.state, self.recent, self.length = None, (), 0

    def _change(self, change: Callable[[Tensor], Tensor]) -> None:
        """Apply a function to every tensor."""
        if self.state is not None:
            self.state = FlowState(*map(change, self.state.pack()))
        self.recent = tuple(map(change, self.recent))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._change(lambda x: x.index_select(0, beam_idx.to(x.device)))

    batch_select_indices = reorder_cache

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._change(lambda x: x.repeat_interleave(repeats, 0))

    def offload(self) -> None:
        if self.state is not None:
            self.device = self.state.device
            self._change(lambda x: x.to("cpu"))

    def prefetch(self) -> None:
        if hasattr(self, "device"):
            self._change(lambda x: x.to(self.device))

    def crop(self, tokens_to_remove: int) -> None:
        raise NotImplementedError(
            "a state of constant size cannot forget its last tokens. Keep a copy.deepcopy of the cache, or a "
            "FlowCache.snapshot, to come back to."
        )

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: the first state is made by the first tokens."""

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """The new keys and values as they are: the attention function reads the state and calls `advance`."""
        return key_states, value_states


class HybridFlowCacheLayer(FlowCacheLayer, LinearAttentionLayer):  # type: ignore[misc]
    """The state of Flow-Attention beside those of a recurrence in the same layer, as Falcon-H1 and Zaya have it."""

    _layer_type = None  # transformers would register this class in the place of its base
    lazy_initialization = LinearAttentionLayer.lazy_initialization  # type: ignore[assignment]

    def __init__(self, number_of_states: int) -> None:
        FlowCacheLayer.__init__(self)
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)

    def reset(self) -> None:
        FlowCacheLayer.reset(self)
        LinearAttentionLayer.reset(self)

    def _change(self, change: Callable[[Tensor], Tensor]) -> None:
        super()._change(change)
        for states in (self.conv_states, self.recurrent_states):
            states.update({index: change(x) for index, x in states.items() if x is not None})


class FlowCache(DynamicCache):
    """The past of a model with attn_implementation="flow_attention", of the same size whatever its length.

    `generate`, or the model, makes a cache that holds the same if none is passed. Make one yourself to continue a
    conversation, or to keep the state of a prefix and start from it again and again.

    >>> import torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = {"vocab_size": 11, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    >>> config = LlamaConfig(**sizes, num_attention_heads=2, attn_implementation="flow_attention")
    >>> model, cache = LlamaForCausalLM(config).eval(), FlowCache(config)
    >>> prefix, tokens = torch.tensor([[1, 2, 3]]), torch.tensor([[4]])
    >>> _ = model(prefix, past_key_values=cache)
    >>> after_prefix = cache.snapshot()
    >>> first = model(tokens, past_key_values=cache).logits
    >>> cache.restore(after_prefix)
    >>> torch.equal(model(tokens, past_key_values=cache).logits, first)
    True
    """

    def __init__(self, config: PreTrainedConfig, **options: Any) -> None:
        super().__init__(config=config, **options)
        if not any(isinstance(layer, FlowCacheLayer) for layer in self.layers):
            raise ValueError(
                f"a FlowCache is for models with attn_implementation={NAME!r}, got the config of a {config.model_type} "
                f"model with {config._attn_implementation!r}. Pass the config of such a model, or use DynamicCache."
            )

    def snapshot(self) -> list[Any]:
        """The past as it is now, to `restore`. Costs next to nothing but for recurrent layers beside the attention."""
        return [_kept(layer) for layer in self.layers]

    def restore(self, snapshot: list[Any]) -> None:
        """Come back to a snapshot, of this cache or of another one of the same model."""
        if len(snapshot) != len(self.layers):
            raise ValueError(f"the snapshot is that of {len(snapshot)} layers, but the cache has {len(self.layers)}.")
        self.layers = [_kept(layer) for layer in snapshot]

    def copy(self) -> FlowCache:
        """Another cache with the same past, from where the two go on apart."""
        other = copy.copy(self)
        other.restore(self.snapshot())
        return other


def _kept(layer: Any) -> Any:
    """A copy that later tokens leave as it is: recurrent layers of transformers change their tensors in place."""
    return copy.deepcopy(layer) if isinstance(layer, LinearAttentionCacheLayerMixin) else copy.copy(layer)


def with_states(layers: list[Any], kept: Collection[int]) -> list[Any]:
    """The layers of a cache, those of keys and values replaced by states, or by growing ones where softmax is kept.

    Args:
        kept: numbers of attention layers; recurrent layers between them are not counted.
    """
    number = itertools.count()
    return [_with_state(layer, next(number) in kept) if _attends(layer) else layer for layer in layers]


def _attends(layer: Any) -> bool:
    return type(layer) in KEYS_AND_VALUES or _is_hybrid(layer)


def _is_hybrid(layer: Any) -> bool:
    return isinstance(layer, LinearAttentionCacheLayerMixin) and isinstance(layer, CacheLayerMixin)


def _with_state(layer: Any, keeps_softmax: bool) -> Any:
    if not _is_hybrid(layer):
        return DynamicLayer() if keeps_softmax else FlowCacheLayer()
    return (LinearAttentionAndFullAttentionLayer if keeps_softmax else HybridFlowCacheLayer)(layer.number_of_states)
