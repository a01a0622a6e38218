"""The Flowformer as models of transformers: bare, and with the heads that tasks on text need.

Shapes: B batch, N tokens, W width, R sequences packed into a batch, L the longest of them.
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
from ...ops.bounds import PaddedSequences
from .attention import bounds, check_packed_mask
from .cache import FlowCacheLayer
from .config import FlowformerConfig
from .context import group_of
from .served import warn_no_weights


class FlowformerPreTrainedModel(PreTrainedModel):
    """What the models share: their config, initialisation, and what they can do."""

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
        """What `activation_checkpointing_enable` chooses, for layers that are not those of transformers."""
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
        # the published scheme initialises the whole model at once; the guard skips loaded weights
        with guard_torch_init_functions():
            for module in self.modules():
                if isinstance(module, FlowformerLM):
                    module.reset_parameters()


class FlowformerModel(FlowformerPreTrainedModel):
    """The layers of `flowformer.models.FlowformerLM`, which is its `lm`, without a head.

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
        """The tokens after all layers.

        Args:
            input_ids or inputs_embeds: (B, N) integers or (B, N, W).
            attention_mask: (B, past + N), 0 where there is padding, on either side.
            position_ids: (B, N); None counts the tokens of each sequence. Where they start over and there is no mask,
                another sequence begins, as `DataCollatorWithFlattening` packs them.
            past_key_values: of the call before, or `DynamicCache(config=model.config)`.
            use_cache: whether to return the states; None is config.use_cache, but not in training and not packed.
            cu_seq_lens_q: (R + 1,), the bounds of sequences packed one after another.
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
        """Which of the new tokens take part, (B, N) bool."""
        batch, new = x.shape[:2]
        past = 0 if cache is None else cache.get_seq_length()
        if mask.shape not in ((batch, new), (batch, past + new)):
            raise ValueError(
                f"attention_mask must be (batch, length) = {(batch, past + new)}, got {tuple(mask.shape)}: it covers "
                "the tokens in the cache and the new ones, and a mask of pairs of tokens has no linear form."
            )
        return mask[:, mask.shape[1] - new :].bool()

    def _run(self, x, mask, positions, cache, output_hidden_states) -> tuple[Any, list[Any]]:
        """The layers on embeddings (B, N, W): the normed result, and if asked the input of each layer before it."""
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
        """The state of sequences (B, N, W) that have not begun; quantised layers have no weights to tell its dtype."""
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        heads = self.config.num_attention_heads
        sizes, variant = (len(x), heads, self.config.hidden_size // heads), FlowVariant(**self.config.variant)
        return FlowState.empty(*sizes, variant=variant, device=x.device, dtype=dtype)

    def _run_packed(self, x: Tensor, cu_seqlens: Tensor, positions, output_hidden_states) -> tuple[Any, list[Any]]:
        """`_run` on packed sequences, each padded to a row of its own for the layers."""
        rows = PaddedSequences.all(cu_seqlens, int(cu_seqlens.diff().max()))
        positions = None if positions is None else positions.flatten()[rows.tokens]
        padded = x.flatten(0, 1)[rows.tokens]
        padded, hidden_states = self._run(padded, rows.mask, positions, None, output_hidden_states)

        def pack(result: Tensor) -> Tensor:  # (R, L, W) → (B, N, W)
            flat = result.new_zeros(x.shape).flatten(0, 1)
            return flat.index_put((rows.tokens[rows.mask],), result[rows.mask]).view(x.shape)

        return pack(padded), [pack(each) for each in hidden_states]


class _WithLMHead(FlowformerPreTrainedModel):
    """A `FlowformerModel` and a map to the vocabulary, which is tied to its embedding."""

    _tied_weights_keys = {"lm_head.weight": "model.lm.embedding.weight"}  # noqa: RUF012

    def __init__(self, config: FlowformerConfig) -> None:
        super().__init__(config)
        self.model = FlowformerModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def _score(self, x: Tensor, labels: Tensor | None, **kwargs) -> tuple[Any, Any]:
        """The loss, None without labels, and the logits."""
        logits = self.lm_head(x)
        if labels is None:
            return None, logits
        return self.loss_function(logits, labels, vocab_size=self.config.vocab_size, **kwargs), logits


class FlowformerForCausalLM(_WithLMHead, GenerationMixin):
    """A language model whose every token costs the same to generate, whatever came before.

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
        """Scores of every word as the next one.

        Args:
            labels: (B, N), the tokens themselves, -100 where nothing is scored; they are shifted here.
            logits_to_keep: how many of the last tokens to score, 0 for all, or their indices.
            All others: as for `FlowformerModel`.
        """
        outputs = self.model(
            input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, use_cache, **kwargs
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        loss, logits = self._score(outputs.last_hidden_state[:, kept], labels, **kwargs)
        return CausalLMOutputWithPast(loss, logits, outputs.past_key_values, outputs.hidden_states)


class FlowformerForMaskedLM(_WithLMHead):
    """Predicts masked tokens from those on both sides; needs is_causal=False.

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
        """Scores of every word in the place of each token.

        Args:
            labels: (B, N), the words that were masked out, -100 where nothing is scored.
            All others: as for `FlowformerModel`.
        """
        outputs = self.model(input_ids, attention_mask, position_ids, inputs_embeds=inputs_embeds, **kwargs)
        loss, logits = self._score(outputs.last_hidden_state, labels, **kwargs)
        return MaskedLMOutput(loss, logits, outputs.hidden_states)


class FlowformerForTokenClassification(GenericForTokenClassification, FlowformerPreTrainedModel):
    """Classifies every token; with is_causal=False from those on both sides of it.

    >>> config = FlowformerConfig(vocab_size=11, hidden_size=16, num_attention_heads=2, num_labels=3, is_causal=False)
    >>> FlowformerForTokenClassification(config)(torch.tensor([[3, 1, 4]])).logits.shape
    torch.Size([1, 3, 3])
    """


class FlowformerForQuestionAnswering(GenericForQuestionAnswering, FlowformerPreTrainedModel):
    """Scores every token as the first and as the last of an answer; with is_causal=False from both sides of it.

    >>> config = FlowformerConfig(vocab_size=11, hidden_size=16, num_attention_heads=2, is_causal=False)
    >>> FlowformerForQuestionAnswering(config)(torch.tensor([[3, 1, 4]])).start_logits.shape
    torch.Size([1, 3])
    """

    def get_input_embeddings(self) -> nn.Module:
        return self.model.get_input_embeddings()

    def set_input_embeddings(self, value) -> None:
        self.model.set_input_embeddings(value)


class FlowformerForSequenceClassification(FlowformerPreTrainedModel):
    """Classifies sequences by their last token, or, with is_causal=False, by the mean of their tokens.

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
        """The scores of the labels, (B, num_labels).

        Args:
            attention_mask: (B, N); None is all tokens but config.pad_token_id.
            labels: (B,) classes, or (B, num_labels) numbers or booleans, as config.problem_type says.
            All others: as for `FlowformerModel`, but no packed sequences, which would share a label.
        """
        if kwargs.get("cu_seq_lens_q") is not None:
            raise ValueError("got packed sequences, but a row has one label. Pass padded rows with attention_mask.")
        given = input_ids if inputs_embeds is None else inputs_embeds[..., 0]
        if attention_mask is None and given is not None:
            pad = self.config.pad_token_id if inputs_embeds is None else None
            attention_mask = torch.ones_like(given, dtype=torch.bool) if pad is None else given != pad
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
