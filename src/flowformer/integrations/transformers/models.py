"""The Flowformer as transformers models: without a head, and with heads for text tasks.

Shapes: B batch, N tokens, W width, R sequences packed into a batch, L tokens of the longest of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.initialization import guard_torch_init_functions
from transformers.modeling_layers import GenericForQuestionAnswering, GenericForTokenClassification
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    CausalLMOutputWithPast,
    MaskedLMOutput,
    SequenceClassifierOutputWithPast,
)
from transformers.utils.generic import can_return_tuple

from ...models.lm import FlowformerLM
from ...nn import LearnedPositions
from ...ops import FlowState, FlowVariant
from ...ops.bounds import PaddedSequences, check_bounds
from .attention import bounds, check_packed_mask
from .cache import FlowCacheLayer
from .config import FlowformerConfig
from .context import group_of
from .served import warn_no_weights


class FlowformerPreTrainedModel(PreTrainedModel):
    """Base class of the Flowformer models: config, initialisation and gradient checkpointing."""

    config_class = FlowformerConfig
    config: FlowformerConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["FlowDecoderLayer"]  # noqa: RUF012
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012
    _is_stateful = True

    def _set_gradient_checkpointing(
        self,
        enable: bool = True,
        gradient_checkpointing_func: Callable = FlowformerLM.checkpoint,
        every_n_layers: int = 1,
    ) -> None:
        """Apply `activation_checkpointing_enable` to FlowformerLM, whose layers are not transformers layers."""
        for module in self.modules():
            if isinstance(module, FlowformerLM):
                module.gradient_checkpointing = enable
                module.checkpoint, module.checkpoint_every = gradient_checkpointing_func, every_n_layers

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.LayerNorm | LearnedPositions):
            module.reset_parameters()
        elif isinstance(module, nn.Linear | nn.Embedding):
            gpt = self.config.initialisation == "gpt"
            nn.init.normal_(module.weight, std=0.02 if gpt else self.config.hidden_size**-0.5)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def initialize_weights(self) -> None:
        super().initialize_weights()
        # FlowformerLM initialises modules by role, which `_init_weights` cannot see; the guard skips loaded weights
        with guard_torch_init_functions():
            for module in self.modules():
                if isinstance(module, FlowformerLM):
                    module.reset_parameters()


class FlowformerModel(FlowformerPreTrainedModel):
    """A Flowformer without a head; its layers are a `flowformer.models.FlowformerLM`, the submodule `lm`.

    >>> config = FlowformerConfig(vocab_size=11, hidden_size=16, num_attention_heads=2, intermediate_size=32)
    >>> FlowformerModel(config)(torch.tensor([[3, 1, 4]])).last_hidden_state.shape
    torch.Size([1, 3, 16])
    """

    def __init__(self, config: FlowformerConfig) -> None:
        super().__init__(config)
        self.lm = FlowformerLM(config.lm_config())
        for layer in self.lm.decoder.layers:
            layer.attention.is_causal = config.is_causal  # type: ignore[union-attr]
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.lm.embedding

    def set_input_embeddings(self, value) -> None:
        self.lm.embedding = value

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        cu_seq_lens_q: Tensor | None = None,
        **kwargs,
    ) -> BaseModelOutputWithPast:
        """Return the hidden states after all layers, (B, N, W).

        Args:
            input_ids or inputs_embeds: (B, N) token ids, or (B, N, W).
            attention_mask: (B, past + N), 0 at padding, on either side.
            position_ids: (B, N); None counts the tokens of each sequence. Without a mask and a cache, positions that
                restart mark packed sequences, as `DataCollatorWithFlattening` makes them.
            past_key_values: the cache returned by the previous call, or `DynamicCache(config=model.config)`.
            use_cache: whether to return a cache; None is config.use_cache in eval mode, and False in training, for
                packed sequences and for bidirectional models.
            cu_seq_lens_q: (R + 1,), the bounds of packed sequences.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("pass either input_ids or inputs_embeds.")
        if kwargs.get("output_attentions", self.config.output_attentions):
            warn_no_weights()
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        x = self.lm.embedding(input_ids) if inputs_embeds is None else inputs_embeds
        if position_ids is not None:
            position_ids = position_ids.expand(x.shape[:2])
            if cu_seq_lens_q is None and attention_mask is None and past_key_values is None:
                starts = F.pad(position_ids.diff() != 1, (1, 0), value=True)
                cu_seq_lens_q = bounds(starts) if starts[:, 1:].any() else None
        if group_of(self) is not None:
            if use_cache or past_key_values is not None or cu_seq_lens_q is not None:
                raise NotImplementedError("sequences cut over ranks take no cache and no packed sequences.")
            use_cache = False
        if cu_seq_lens_q is not None:
            if use_cache or past_key_values is not None:
                raise ValueError("got packed sequences and a cache. Pass use_cache=False, or pad the sequences.")
            if attention_mask is not None:
                check_packed_mask(attention_mask)
            cache = None
            x, hidden_states = self._run_packed(x, cu_seq_lens_q, position_ids, output_hidden_states)
        else:
            cache = self._cache(past_key_values, use_cache, len(x))
            mask = None if attention_mask is None else self._mask(attention_mask, x, cache)
            x, hidden_states = self._run(x, mask, position_ids, cache, output_hidden_states)
        return BaseModelOutputWithPast(
            last_hidden_state=x,
            past_key_values=cache,
            hidden_states=tuple(hidden_states) if output_hidden_states else None,
        )

    def _cache(self, cache: Cache | None, use_cache: bool | None, batch: int) -> Cache | None:
        """Check the given cache, or create one if it is wanted."""
        if use_cache is None:
            use_cache = self.config.use_cache and self.config.is_causal and not self.training
        if cache is None and not use_cache:
            return None
        if not self.config.is_causal:
            raise ValueError("got a cache or use_cache=True, but a model with is_causal=False has no past to keep.")
        cache = DynamicCache(config=self.config) if cache is None else cache
        layers = getattr(cache, "layers", ())
        if not layers or not all(isinstance(layer, FlowCacheLayer) for layer in layers):
            raise TypeError(
                f"got a {type(cache).__name__} that cannot hold the state of Flow-Attention. Pass "
                "DynamicCache(config=model.config), or no cache: the model then makes its own."
            )
        if layers[0].batch_size not in (-1, batch):
            raise ValueError(f"got a cache of {layers[0].batch_size} sequences and tokens of {batch}.")
        return cache

    def _mask(self, mask: Tensor, x: Tensor, cache: Cache | None) -> Tensor:
        """Return the padding mask of the new tokens, (B, N) bool, True at tokens."""
        batch, new = x.shape[:2]
        past = 0 if cache is None else cache.get_seq_length()
        if mask.shape not in ((batch, new), (batch, past + new)):
            raise ValueError(
                f"attention_mask must be (batch, length) = {(batch, past + new)}, got {tuple(mask.shape)}: it covers "
                "the tokens in the cache and the new ones, and a mask of pairs of tokens has no linear form."
            )
        return mask[:, mask.shape[1] - new :].bool()

    def _run(self, x, mask, positions, cache, output_hidden_states) -> tuple[Any, list[Any]]:
        """Run the layers on embeddings (B, N, W); return the result after the final norm, and all hidden states.

        The hidden states are the inputs of the layers, if `output_hidden_states`, followed by the result.
        """
        inputs: list[Tensor] | None = [] if output_hidden_states else None
        states = None
        if cache is not None:
            states = [self._new_state(x) if layer.state is None else layer.state for layer in cache.layers]
        x, states = self.lm.run_layers(x, mask, positions=positions, states=states, inputs=inputs)
        if states is not None:
            for layer, state in zip(cache.layers, states, strict=True):
                layer.advance(state, x.shape[1])
        return x, [*(inputs or ()), x]

    def _new_state(self, x: Tensor) -> FlowState:
        """Return the empty state for embeddings (B, N, W).

        Its dtype follows from x, since quantised layers have no floating-point weights.
        """
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        heads = self.config.num_attention_heads
        sizes, variant = (len(x), heads, self.config.hidden_size // heads), FlowVariant(**self.config.variant)
        return FlowState.empty(*sizes, variant=variant, device=x.device, dtype=dtype)

    def _run_packed(self, x: Tensor, cu_seqlens: Tensor, positions, output_hidden_states) -> tuple[Any, list[Any]]:
        """`_run` on packed sequences: each becomes a padded row."""
        count, longest = x.shape[:2].numel(), int(cu_seqlens.diff().max())
        check_bounds(count, count, (cu_seqlens, cu_seqlens, longest, longest), self.config.is_causal)
        rows = PaddedSequences.all(cu_seqlens, longest)
        positions = None if positions is None else positions.flatten()[rows.tokens]
        padded = x.flatten(0, 1)[rows.tokens]
        padded, hidden_states = self._run(padded, rows.mask, positions, None, output_hidden_states)

        def pack(result: Tensor) -> Tensor:  # (R, L, W) → (B, N, W)
            flat = result.new_zeros(x.shape).flatten(0, 1)
            return flat.index_put((rows.tokens[rows.mask],), result[rows.mask]).view(x.shape)

        return pack(padded), [pack(each) for each in hidden_states]


class _WithLMHead(FlowformerPreTrainedModel):
    """A `FlowformerModel` with a language-model head, whose weight is tied to the embedding."""

    _tied_weights_keys = {"lm_head.weight": "model.lm.embedding.weight"}  # noqa: RUF012

    def __init__(self, config: FlowformerConfig) -> None:
        super().__init__(config)
        self.model = FlowformerModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def _score(self, x: Tensor, labels: Tensor | None, **kwargs) -> tuple[Any, Any]:
        """Return the loss (None without labels) and the logits of hidden states (B, N, W)."""
        logits = self.lm_head(x)
        if labels is None:
            return None, logits
        return self.loss_function(logits, labels, vocab_size=self.config.vocab_size, **kwargs), logits


class FlowformerForCausalLM(_WithLMHead, GenerationMixin):
    """A language model that generates each token at a constant cost, whatever the length of the text.

    >>> config = FlowformerConfig(vocab_size=11, hidden_size=16, num_attention_heads=2, intermediate_size=32)
    >>> FlowformerForCausalLM(config).eval().generate(torch.tensor([[3, 1, 4]]), max_new_tokens=5).shape
    torch.Size([1, 8])
    """

    def __init__(self, config: FlowformerConfig) -> None:
        if not config.is_causal:
            raise ValueError("FlowformerForCausalLM needs is_causal=True: its tokens must not see the next one.")
        super().__init__(config)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs,
    ) -> CausalLMOutputWithPast:
        """Return the logits of the next token, (B, N, vocab_size).

        Args:
            labels: (B, N), the input tokens, with -100 at positions that are not scored; shifted inside.
            logits_to_keep: number of last tokens to score, 0 for all; or their indices.
            All others: as for `FlowformerModel`.
        """
        outputs = self.model(
            input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, use_cache, **kwargs
        )
        scored = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        loss, logits = self._score(outputs.last_hidden_state[:, scored], labels, **kwargs)
        return CausalLMOutputWithPast(loss, logits, outputs.past_key_values, outputs.hidden_states)


class FlowformerForMaskedLM(_WithLMHead):
    """A masked language model; needs is_causal=False.

    >>> config = FlowformerConfig(vocab_size=11, hidden_size=16, num_attention_heads=2, is_causal=False)
    >>> FlowformerForMaskedLM(config)(torch.tensor([[3, 1, 4]])).logits.shape
    torch.Size([1, 3, 11])
    """

    def __init__(self, config: FlowformerConfig) -> None:
        if config.is_causal:
            raise ValueError("FlowformerForMaskedLM needs is_causal=False: its tokens must see those on both sides.")
        super().__init__(config)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs,
    ) -> MaskedLMOutput:
        """Return the logits of the token at each position, (B, N, vocab_size).

        Args:
            labels: (B, N), the original tokens at masked positions, -100 elsewhere.
            All others: as for `FlowformerModel`.
        """
        outputs = self.model(input_ids, attention_mask, position_ids, inputs_embeds=inputs_embeds, **kwargs)
        loss, logits = self._score(outputs.last_hidden_state, labels, **kwargs)
        return MaskedLMOutput(loss, logits, outputs.hidden_states)


class FlowformerForTokenClassification(GenericForTokenClassification, FlowformerPreTrainedModel):
    """A classifier of tokens; with is_causal=False each token sees both sides.

    >>> config = FlowformerConfig(vocab_size=11, hidden_size=16, num_attention_heads=2, num_labels=3, is_causal=False)
    >>> FlowformerForTokenClassification(config)(torch.tensor([[3, 1, 4]])).logits.shape
    torch.Size([1, 3, 3])
    """


class FlowformerForQuestionAnswering(GenericForQuestionAnswering, FlowformerPreTrainedModel):
    """Scores every token as start and end of an answer; with is_causal=False each token sees both sides.

    >>> config = FlowformerConfig(vocab_size=11, hidden_size=16, num_attention_heads=2, is_causal=False)
    >>> FlowformerForQuestionAnswering(config)(torch.tensor([[3, 1, 4]])).start_logits.shape
    torch.Size([1, 3])
    """

    def get_input_embeddings(self) -> nn.Module:
        return self.model.get_input_embeddings()

    def set_input_embeddings(self, value) -> None:
        self.model.set_input_embeddings(value)


class FlowformerForSequenceClassification(FlowformerPreTrainedModel):
    """A classifier of sequences by their last token, or with is_causal=False by the mean over tokens.

    >>> config = FlowformerConfig(vocab_size=11, hidden_size=16, num_attention_heads=2, num_labels=3, is_causal=False)
    >>> FlowformerForSequenceClassification(config)(torch.tensor([[3, 1, 4]])).logits.shape
    torch.Size([1, 3])
    """

    def __init__(self, config: FlowformerConfig) -> None:
        super().__init__(config)
        self.model = FlowformerModel(config)
        self.score = nn.Linear(config.hidden_size, cast(int, config.num_labels), bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs,
    ) -> SequenceClassifierOutputWithPast:
        """Return the logits of the classes, (B, num_labels).

        Args:
            attention_mask: (B, N); None masks out config.pad_token_id.
            labels: (B,) classes, or (B, num_labels) numbers or booleans, depending on config.problem_type.
            All others: as for `FlowformerModel`. Packed sequences are refused: a row has one label.
        """
        if kwargs.get("cu_seq_lens_q") is not None:
            raise ValueError("got packed sequences, but a row has one label. Pass padded rows with attention_mask.")
        tokens = input_ids if inputs_embeds is None else inputs_embeds[..., 0]  # (B, N)
        if attention_mask is None and tokens is not None:
            pad = self.config.pad_token_id if inputs_embeds is None else None
            attention_mask = torch.ones_like(tokens, dtype=torch.bool) if pad is None else tokens != pad
        outputs = self.model(input_ids, attention_mask, inputs_embeds=inputs_embeds, **{**kwargs, "use_cache": False})
        x, mask = outputs.last_hidden_state, cast(Tensor, attention_mask).bool()
        if self.config.is_causal:
            last = (mask * torch.arange(x.shape[1], device=x.device)).argmax(1)
            pooled = x[torch.arange(len(x), device=x.device), last]
        else:
            pooled = x.masked_fill(~mask[..., None], 0).sum(1) / mask.sum(1, keepdim=True).clamp_min(1)
        logits = self.score(pooled)
        loss = None
        if labels is not None:
            loss = self.loss_function(labels=labels, pooled_logits=logits, config=self.config)
        return SequenceClassifierOutputWithPast(loss, logits, hidden_states=outputs.hidden_states)
