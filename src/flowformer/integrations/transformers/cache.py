"""FlowCacheLayer: the state of Flow-Attention in a cache of transformers."""

from __future__ import annotations

from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from ...ops import FlowState

NAME = "flow_attention"


class FlowCacheLayer(CacheLayerMixin):
    """What a layer keeps of the past: a `FlowState`, of the same size whatever the length.

    The recurrent cache layer of transformers treats a state without a convolution state as missing, and can neither
    repeat nor count its rows.
    """

    _layer_type = NAME
    supports_early_init = False

    def __init__(self, **sizes) -> None:
        super().__init__()
        self.state: FlowState | None = None
        self.length = 0

    def advance(self, state: FlowState, tokens: int) -> None:
        """Keep the state after `tokens` more, padding included: `generate` counts columns."""
        self.state = state
        self.length += tokens

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
        self.state, self.length = None, 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self.state is not None:
            self.state = self.state.select(beam_idx)

    batch_select_indices = reorder_cache

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.state is not None:
            self.state = FlowState(*(part.repeat_interleave(repeats, 0) for part in self.state.pack()))

    def offload(self) -> None:
        if self.state is not None:
            self.device = self.state.device
            self.state = self.state.to("cpu")

    def prefetch(self) -> None:
        if self.state is not None:
            self.state = self.state.to(getattr(self, "device", None))

    def crop(self, tokens_to_remove: int) -> None:
        raise NotImplementedError(
            "a state of constant size cannot forget its last tokens. Keep a copy.deepcopy of the cache to come back to."
        )

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise NotImplementedError("Flow-Attention caches sums, not keys and values; see FlowCacheLayer.advance.")

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        raise NotImplementedError("Flow-Attention caches sums, not keys and values; see FlowCacheLayer.advance.")
