"""Flow-Attention in the KV caches of transformers: the cache layer, and `FlowCache`, the cache of a model."""

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
# cache layers that hold keys and values; a FlowCacheLayer replaces them
KEYS_AND_VALUES = (DynamicLayer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer)


class FlowCacheLayer(CacheLayerMixin):
    """Cache layer of constant size: a `FlowState`, and the recent keys and values if there is a softmax window.

    transformers' own `LinearAttentionLayer` does not fit: it treats a recurrent state without a convolution state as
    missing, and cannot repeat or count the rows of the batch. Tensors are replaced, never changed in place, so that a
    shallow copy of this object is a snapshot.
    """

    _layer_type: str | None = NAME
    supports_early_init = False

    def __init__(self, **sizes) -> None:
        super().__init__()
        self.state: FlowState | None = None
        self.recent: tuple[Tensor, ...] = ()  # keys, values and mask of the softmax window
        self.length = 0

    def advance(self, state: FlowState | None, tokens: int) -> None:
        """Store the state after `tokens` more tokens.

        Args:
            state: None for packed or bidirectional tokens, which cannot be continued.
            tokens: number of new tokens including padding, as `generate` counts them.
        """
        self.state = state
        self.length += tokens

    def remember(self, key: Tensor, value: Tensor, mask: Tensor | None, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Append new tokens to the window; return keys, values and mask (B, N) of all, and keep the last `count`."""
        new = key.shape[2]
        valid = key.new_ones(len(key), new, dtype=torch.bool) if mask is None else mask[:, -new:]
        tokens = key, value, valid[:, None, :, None]
        if self.recent:
            tokens = tuple(torch.cat([old.to(x.device), x], 2) for old, x in zip(self.recent, tokens, strict=True))  # type: ignore[assignment]
        start = max(tokens[0].shape[2] - count, 0)
        self.recent = tuple(x[:, :, start:].clone() for x in tokens)  # a view would keep the whole tensor alive
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

    def _replace_tensors(self, change: Callable[[Tensor], Tensor]) -> None:
        """Replace every tensor by the result of a function."""
        if self.state is not None:
            self.state = FlowState(*map(change, self.state.pack()))
        self.recent = tuple(map(change, self.recent))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._replace_tensors(lambda x: x.index_select(0, beam_idx.to(x.device)))

    batch_select_indices = reorder_cache

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._replace_tensors(lambda x: x.repeat_interleave(repeats, 0))

    def offload(self) -> None:
        if self.state is not None:
            self.device = self.state.device
            self._replace_tensors(lambda x: x.to("cpu"))

    def prefetch(self) -> None:
        if hasattr(self, "device"):
            self._replace_tensors(lambda x: x.to(self.device))

    def crop(self, tokens_to_remove: int) -> None:
        raise NotImplementedError(
            "a state of constant size cannot forget its last tokens. Keep a copy.deepcopy of the cache, or a "
            "FlowCache.snapshot, to come back to."
        )

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """No-op: the attention function creates the first state."""

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Return the new keys and values unchanged: the attention function reads the state and calls `advance`."""
        return key_states, value_states


class HybridFlowCacheLayer(FlowCacheLayer, LinearAttentionLayer):  # type: ignore[misc]
    """Cache layer for attention and a recurrence in one layer, as in Falcon-H1 and Zaya."""

    _layer_type = None  # with a name, transformers would register this class instead of FlowCacheLayer
    lazy_initialization = LinearAttentionLayer.lazy_initialization  # type: ignore[assignment]

    def __init__(self, number_of_states: int) -> None:
        FlowCacheLayer.__init__(self)
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)

    def reset(self) -> None:
        FlowCacheLayer.reset(self)
        LinearAttentionLayer.reset(self)

    def _replace_tensors(self, change: Callable[[Tensor], Tensor]) -> None:
        super()._replace_tensors(change)
        for states in (self.conv_states, self.recurrent_states):
            states.update({index: change(x) for index, x in states.items() if x is not None})


class FlowCache(DynamicCache):
    """Cache of a model with attn_implementation="flow_attention"; its size does not depend on the number of tokens.

    `generate` and the model create an equivalent cache if none is passed. Create one yourself to continue a
    conversation, or to reuse the state of a prefix.

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
        """Return the current state, for `restore`. Only the states of recurrent layers are copied."""
        return [_copy_layer(layer) for layer in self.layers]

    def restore(self, snapshot: list[Any]) -> None:
        """Return to a snapshot of this cache, or of another cache of the same model."""
        if len(snapshot) != len(self.layers):
            raise ValueError(f"the snapshot is that of {len(snapshot)} layers, but the cache has {len(self.layers)}.")
        self.layers = [_copy_layer(layer) for layer in snapshot]

    def copy(self) -> FlowCache:
        """Return an independent cache with the same state."""
        other = copy.copy(self)
        other.restore(self.snapshot())
        return other


def _copy_layer(layer: Any) -> Any:
    """Return a copy that later tokens do not change. transformers' recurrent layers update tensors in place."""
    return copy.deepcopy(layer) if isinstance(layer, LinearAttentionCacheLayerMixin) else copy.copy(layer)


def with_states(layers: list[Any], kept: Collection[int]) -> list[Any]:
    """Replace the key/value layers of a cache: by FlowCacheLayers, or by DynamicLayers where softmax is kept.

    Args:
        kept: indices of the attention layers that keep softmax; recurrent layers are not counted.
    """
    index = itertools.count()
    return [_with_state(layer, next(index) in kept) if _is_attention(layer) else layer for layer in layers]


def _is_attention(layer: Any) -> bool:
    """Whether a cache layer belongs to an attention layer, with or without a recurrence beside it."""
    return type(layer) in KEYS_AND_VALUES or _is_hybrid(layer)


def _is_hybrid(layer: Any) -> bool:
    """Whether a cache layer holds both keys and values and the states of a recurrence."""
    return isinstance(layer, LinearAttentionCacheLayerMixin) and isinstance(layer, CacheLayerMixin)


def _with_state(layer: Any, keeps_softmax: bool) -> Any:
    """Return the cache layer that replaces a layer of keys and values."""
    if not _is_hybrid(layer):
        return DynamicLayer() if keeps_softmax else FlowCacheLayer()
    return (LinearAttentionAndFullAttentionLayer if keeps_softmax else HybridFlowCacheLayer)(layer.number_of_states)
