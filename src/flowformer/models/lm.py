"""Decoder language model: trains on all tokens in parallel, generates at constant cost per token.

Shapes: B batch, N tokens, W width (embed_dim), V vocabulary size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .._utils import check_literals, check_positive
from ..nn import (
    FairseqPositions,
    FlowDecoder,
    FlowDecoderLayer,
    LearnedPositions,
    SinusoidalPositions,
    is_flow,
    token_positions,
)
from ..ops import FlowState, FlowVariant
from .base import FlowModel

if TYPE_CHECKING:
    from ..ops.context.exchange import Group

_DEFAULT = FlowVariant()
IGNORED = -100  # target that does not count in the loss
LOGITS_AT_ONCE = 2**27  # logits per piece of the loss; all logits over the vocabulary of WikiText-103 take gigabytes

Activation = Literal["relu", "gelu", "gelu_tanh"]
Positions = Literal["sinusoidal", "fairseq", "learned"]
Initialisation = Literal["fairseq", "gpt"]
_ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "gelu_tanh": partial(nn.GELU, "tanh"),
}


@dataclass(frozen=True)
class LMConfig:
    """Config of `FlowformerLM`; the default is the paper's model for WikiText-103.

    Args:
        vocab_size: V.
        num_layers, embed_dim, num_heads, mlp_dim: depth, W, heads, inner width of the feed-forward networks.
        activation: activation of the feed-forward networks; "gelu_tanh" is the approximation that GPT-2 uses.
        positions: "sinusoidal" or "fairseq" (`FairseqPositions`, as in the released training command), which take any
            length; or "learned", a table of `max_length` positions.
        max_length: the longest sequence, for learned positions and for rivals whose parameters depend on it.
        scale_embedding: whether embeddings are multiplied by √W.
        tie_embedding: whether the output layer shares the weight of the embedding.
        initialisation: "fairseq", as the paper's model, or "gpt", as the authors' GPT module.
        dropout: on the embeddings, and on the results of attention and feed-forward networks.
        attention: "flow", or the name of a rival attention; `baselines.names` lists them.
        attention_options: options of the attention, see `build_attention`.
        variant: variant of Flow-Attention.
    """

    vocab_size: int = 267744
    num_layers: int = 6
    embed_dim: int = 512
    num_heads: int = 8
    mlp_dim: int = 2048
    activation: Activation = "relu"
    positions: Positions = "sinusoidal"
    max_length: int | None = None
    scale_embedding: bool = True
    tie_embedding: bool = True
    initialisation: Initialisation = "fairseq"
    dropout: float = 0.1
    attention: str = "flow"
    attention_options: dict[str, Any] = field(default_factory=dict)
    variant: FlowVariant = _DEFAULT

    def __post_init__(self) -> None:
        check_literals(self)
        check_positive(vocab_size=self.vocab_size, num_layers=self.num_layers)
        if self.positions == "learned" and self.max_length is None:
            raise ValueError("learned positions need max_length, the longest sequence; sinusoidal ones do not.")


PRESETS = {
    "wikitext103": LMConfig(),
    # the authors' GPT module at the size of GPT-2
    "gpt": LMConfig(
        vocab_size=50257,
        num_layers=12,
        embed_dim=768,
        num_heads=12,
        mlp_dim=3072,
        activation="gelu_tanh",
        positions="learned",
        max_length=1024,
        scale_embedding=False,
        tie_embedding=False,
        initialisation="gpt",
        variant=FlowVariant.named("core"),
    ),
}


class FlowformerLM(FlowModel):
    """Language model of pre-norm decoder layers.

    >>> model = FlowformerLM(LMConfig(vocab_size=11, num_layers=2, embed_dim=16, num_heads=2, mlp_dim=32)).eval()
    >>> prompts = torch.tensor([[3, 1, 4, 1], [5, 9, 0, 0]])
    >>> mask = torch.tensor([[True, True, True, True], [True, True, False, False]])
    >>> model(prompts, mask).shape, model.generate(prompts, mask, max_new_tokens=5).shape
    (torch.Size([2, 4, 11]), torch.Size([2, 5]))
    """

    config_class = LMConfig
    config: LMConfig
    checkpoint_every = 1  # `gradient_checkpointing` applies to every nth layer

    def __init__(self, config: LMConfig) -> None:
        super().__init__(config)
        self.embedding = nn.Embedding(config.vocab_size, config.embed_dim)
        self.positions: nn.Module
        if config.max_length is not None and config.positions == "learned":
            self.positions = LearnedPositions(config.max_length, config.embed_dim)
        elif config.positions == "fairseq":
            self.positions = FairseqPositions(config.embed_dim)
        else:
            self.positions = SinusoidalPositions(config.embed_dim)
        self.dropout = nn.Dropout(config.dropout)
        self.decoder = FlowDecoder(
            FlowDecoderLayer(
                config.embed_dim,
                config.num_heads,
                config.mlp_dim,
                activation=_ACTIVATIONS[config.activation](),
                dropout=config.dropout,
                activation_dropout=0.0,
                attention=config.attention,
                attention_options=config.attention_options,
                max_length=config.max_length,
                variant=config.variant,
            )
            for _ in range(config.num_layers)
        )
        self.norm = nn.LayerNorm(config.embed_dim)
        self.head = None if config.tie_embedding else nn.Linear(config.embed_dim, config.vocab_size, bias=False)
        self.group: Group | None = None
        self.reset_parameters()

    def cut_sequences(self, group: Group | None) -> None:
        """Split sequences over a process group: each rank passes its part, in the order of the ranks, in later calls.

        Args:
            group: as for `flow_attention`; None means whole sequences again.
        """
        if group is not None and not is_flow(self.config.attention):
            raise NotImplementedError(
                f"{self.config.attention} attention cannot be cut over ranks; accepted: Flow-Attention."
            )
        self.group = group
        for layer in cast(list[FlowDecoderLayer], self.decoder.layers):
            layer.attention.group = group

    def reset_parameters(self) -> None:
        """Apply config.initialisation to the embedding and the linear layers, but not to a rival's own parameters."""
        is_gpt = self.config.initialisation == "gpt"
        for table in (self.embedding, self.head):
            if table is not None:
                nn.init.normal_(table.weight, std=0.02 if is_gpt else self.config.embed_dim**-0.5)
        for layer in cast(list[FlowDecoderLayer], self.decoder.layers):
            attention, mlp = layer.attention, layer.mlp
            *projections, _ = attention.projections()
            for linear in [*attention.projections(), mlp.linear1, mlp.linear2]:
                if is_gpt:
                    nn.init.normal_(linear.weight, std=0.02)
                    nn.init.zeros_(linear.bias)
                else:
                    linear.reset_parameters()
            if is_gpt:
                # GPT-2 scales both projections into the residual stream; the release scales only this one
                nn.init.normal_(mlp.linear2.weight, std=0.02 / math.sqrt(2 * self.config.num_layers))
            else:
                for linear in projections:
                    nn.init.xavier_uniform_(linear.weight, gain=2**-0.5)
                nn.init.xavier_uniform_(attention.out_proj.weight)
                nn.init.zeros_(attention.out_proj.bias)

    def new_states(self, batch_size: int) -> list[FlowState]:
        """The empty states of `batch_size` sequences, one per layer."""
        return self.decoder.new_states(batch_size)

    def forward(
        self,
        tokens: Tensor,
        mask: Tensor | None = None,
        *,
        states: Sequence[FlowState] | None = None,
        return_maps: bool = False,
    ):
        """Return the logits of the next token at every position.

        Args:
            tokens: (B, N) integers; with states, only the new tokens.
            mask: (B, N) bool, True = a token; padding may be on either side.
            states: one per layer, from `new_states` or from the previous call.
            return_maps: also return the flow maps of each layer.

        Returns: logits (B, N, V); with states also the states after the last token; with return_maps also a list of
        FlowMaps.
        """
        if return_maps:
            if states is not None:
                raise ValueError("got states and return_maps; the flows are recorded for whole sequences only.")
            return self._with_maps(tokens, mask)
        x, new_states = self._hidden(tokens, mask, states)
        logits = self._logits(x)
        return logits if states is None else (logits, new_states)

    def loss(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        reduction: Literal["mean", "sum"] = "mean",
    ) -> Tensor:
        """Return the cross-entropy of the next tokens, in nats; the exponential of its mean is the perplexity.

        More than LOGITS_AT_ONCE logits are computed in pieces, and recomputed in the backward pass.

        Args:
            tokens, mask: as for `forward`.
            targets: (B, N), the target of each token, or IGNORED (-100); None means the next token. Padding has no
                target.
            reduction: "mean" over the tokens with a target, 0 if there are none; or "sum".

        If sequences are split over ranks, every rank returns the loss over all ranks, but its gradient has only the
        contribution of this rank's tokens: sum the gradients over the ranks. DDP averages them; multiply by world size.
        """
        if reduction not in ("mean", "sum"):
            raise ValueError(f"unknown reduction {reduction!r}; accepted: mean, sum.")
        if targets is None:
            targets = next_tokens(tokens, mask, self.group)
        elif targets.shape != tokens.shape:
            raise ValueError(f"targets {tuple(targets.shape)} and tokens {tuple(tokens.shape)} must have one shape.")
        elif mask is not None:
            targets = targets.masked_fill(~mask, IGNORED)
        x = self._hidden(tokens, mask, None)[0].flatten(0, 1)
        targets = targets.flatten().long()
        size = max(1, LOGITS_AT_ONCE // self.config.vocab_size)
        if len(x) <= size:
            total = self._negative_log_likelihood(x, targets)
        else:
            pieces = zip(x.split(size), targets.split(size), strict=True)
            # the head draws no random numbers, and a CUDA graph cannot capture reading the random state
            score = partial(checkpoint, self._negative_log_likelihood, use_reentrant=False, preserve_rng_state=False)
            total = torch.stack([score(*piece) for piece in pieces]).sum()
        scored = (targets != IGNORED).sum()
        if self.group is not None:
            from ..ops.context.exchange import sum_over_ranks

            scored = sum_over_ranks(scored, self.group)
            total = total + sum_over_ranks(total.detach(), self.group) - total.detach()
        return total if reduction == "sum" else total / scored.clamp_min(1)

    @torch.no_grad()
    def generate(
        self,
        prompt: Tensor,
        prompt_mask: Tensor | None = None,
        *,
        max_new_tokens: int,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        eos: int | None = None,
        prefill: int | None = None,
        recompute: bool = False,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Continue prompts, at constant cost per token. Dropout is on unless the model is in evaluation mode.

        Args:
            prompt: (B, N) integers.
            prompt_mask: (B, N) bool, True = a token, for prompts of unequal length, padded on either side.
            max_new_tokens: number of tokens to generate.
            temperature: divides the logits before sampling; 0 takes the likeliest token.
            top_k: sample from the k likeliest tokens only.
            top_p: nucleus sampling: sample from the smallest set of likeliest tokens with at least this probability.
            eos: end-of-sequence token. A finished sequence is filled with it.
            prefill: number of prompt tokens that run at once, to bound memory; None means all.
            recompute: rerun the whole prefix for each token. Slow, but the only way for rivals, which have no state.
            generator: random number generator for sampling.

        Returns: (B, T) integers, the new tokens alone; T is max_new_tokens, or less if every sequence has finished.
        """
        if not recompute and not is_flow(self.config.attention):
            raise NotImplementedError(
                f"{self.config.attention} attention has no state to continue from: each token takes a run over the "
                'whole prefix. Pass recompute=True to do that, or use attention="flow".'
            )
        if self.group is not None:
            raise NotImplementedError("generate needs whole prompts; call cut_sequences(None) first.")
        check_positive(max_new_tokens=max_new_tokens, prefill=1 if prefill is None else prefill)
        _check_sampling(temperature, top_k, top_p)
        prompt, mask = pad_left(prompt, prompt_mask)
        if prompt.shape[1] == 0 or (mask is not None and not mask[:, -1].all()):
            raise ValueError("every prompt needs at least one token, such as a begin-of-text token.")
        states = None if recompute else self.new_states(len(prompt))
        size = prompt.shape[1] if recompute or prefill is None else prefill
        for start in range(0, prompt.shape[1], size):
            part = slice(start, start + size)
            x, states = self._hidden(prompt[:, part], None if mask is None else mask[:, part], states)
        new_tokens: list[Tensor] = []
        finished = torch.zeros(len(prompt), dtype=torch.bool, device=prompt.device)
        while True:
            token = draw(self._logits(x[:, -1]), temperature, top_k, top_p, generator)
            if eos is not None:
                token = token.masked_fill(finished, eos)
                finished |= token == eos
            new_tokens.append(token)
            if len(new_tokens) == max_new_tokens or (eos is not None and finished.all()):
                return torch.stack(new_tokens, 1)
            if states is None:
                prompt = torch.cat([prompt, token[:, None]], 1)
                mask = None if mask is None else F.pad(mask, (0, 1), value=True)
                x, _ = self._hidden(prompt, mask, None)
            else:
                x, states = self._hidden(token[:, None], None, states)

    def run_layers(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        *,
        positions: Tensor | None = None,
        states: Sequence[FlowState] | None = None,
        inputs: list[Tensor] | None = None,
    ) -> tuple[Tensor, list[FlowState] | None]:
        """Run everything between the embedding and the head: embedding scale, positions, dropout, layers, last norm.

        Args:
            x: (B, N, W), embedded tokens. Padding may hold any values, also NaN.
            mask, states: as for `forward`.
            positions: (B, N); None counts the tokens of each sequence, including those already in the states.
            inputs: list to which the input of each layer, (B, N, W), is appended.

        Returns: the hidden states that the head reads, (B, N, W); and the states after the last token, or None.
        """
        if mask is not None:
            # NaN in the padding would make gradients NaN: 0 · NaN is NaN
            x = x.masked_fill(~mask[..., None], 0)
        if self.config.scale_embedding:
            x = x * math.sqrt(self.config.embed_dim)
        if positions is None and (mask is not None or states is not None or self.group is not None):
            present = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if mask is None else mask
            past = None if states is None else states[0].count.to(x.device)
            positions = token_positions(present, past, self.group)
        x = self.dropout(self.positions(x, positions))
        new_states: list[FlowState] = []
        for i, layer in enumerate(self.decoder.layers):
            if inputs is not None:
                inputs.append(x)
            if states is None:
                x = self._layer(layer, x, mask=mask) if i % self.checkpoint_every == 0 else layer(x, mask=mask)
            else:
                x, state = layer(x, mask=mask, state=states[i])
                new_states.append(state)
        return self.norm(x), None if states is None else new_states

    def _hidden(self, tokens: Tensor, mask: Tensor | None, states: Sequence[FlowState] | None):
        """Embed the tokens and run the layers; return the hidden states (B, N, W) and the new states, or None."""
        _check_tokens(tokens, mask)
        return self.run_layers(self.embedding(tokens), mask, states=states)

    def _logits(self, x: Tensor) -> Tensor:
        return F.linear(x, self.embedding.weight) if self.head is None else self.head(x)

    def _negative_log_likelihood(self, x: Tensor, targets: Tensor) -> Tensor:
        logits = self._logits(x)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")


def next_tokens(tokens: Tensor, mask: Tensor | None = None, group: Group | None = None) -> Tensor:
    """Return the token after each token; IGNORED at the end of a sequence and where either of the two is padding.

    With a group, the last token of a rank is followed by the first token of the next rank that has tokens.

    >>> next_tokens(torch.tensor([[7, 8, 9]])).tolist()
    [[8, 9, -100]]
    """
    following = tokens[:, 1:]
    if mask is not None:
        following = following.masked_fill(~(mask[:, :-1] & mask[:, 1:]), IGNORED)
    following = F.pad(following, (0, 1), value=IGNORED)[:, : tokens.shape[1]]
    if group is None:
        return following
    from ..ops.context.exchange import first_after

    last = first_after(tokens if mask is None else tokens.masked_fill(~mask, IGNORED), IGNORED, group)[:, None]
    if mask is not None:
        last = last.masked_fill(~mask[:, -1:], IGNORED)
    return torch.cat([following[:, :-1], last.to(tokens.dtype)], 1)[:, : tokens.shape[1]]


def pad_left(tokens: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Move the padding of each sequence to its left, so that all sequences end in the last column.

    >>> pad_left(torch.tensor([[7, 8, 0]]), torch.tensor([[True, True, False]]))
    (tensor([[0, 7, 8]]), tensor([[False,  True,  True]]))
    """
    _check_tokens(tokens, mask)
    if mask is None:
        return tokens, None
    order = mask.to(torch.int8).argsort(dim=1, stable=True)
    return tokens.gather(1, order), mask.gather(1, order)


def draw(
    logits: Tensor,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Choose a token (B,) from each row of logits (B, V): the likeliest if the temperature is 0, else by sampling."""
    if temperature == 0:
        return logits.argmax(-1)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    if top_k is not None and top_k < logits.shape[-1]:
        threshold = logits.topk(top_k).values[:, -1:]
        logits = logits.masked_fill(logits < threshold, -torch.inf)
    probabilities = logits.softmax(-1)
    if top_p is not None:
        ordered, order = probabilities.sort(-1, descending=True)
        # keep a token if the likelier ones sum to less than top_p; the likeliest is always kept
        mass_before = ordered.cumsum(-1) - ordered
        probabilities = probabilities.scatter(-1, order, ordered.masked_fill(mass_before >= top_p, 0))
    return torch.multinomial(probabilities, 1, generator=generator)[:, 0]


def _check_tokens(tokens: Tensor, mask: Tensor | None) -> None:
    if tokens.dim() != 2 or tokens.is_floating_point() or tokens.dtype == torch.bool:
        raise TypeError(f"tokens must be (batch, length) integers, got {tokens.dtype} {tuple(tokens.shape)}.")
    if mask is not None and (mask.dtype != torch.bool or mask.shape != tokens.shape):
        raise ValueError(
            f"the mask must be bool, True = a token, and of the shape of the tokens, {tuple(tokens.shape)}; "
            f"got {mask.dtype} {tuple(mask.shape)}."
        )


def _check_sampling(temperature: float, top_k: int | None, top_p: float | None) -> None:
    if temperature < 0 or (top_k is not None and top_k < 1) or (top_p is not None and not 0 < top_p <= 1):
        raise ValueError(
            f"got temperature {temperature}, top_k {top_k}, top_p {top_p}; accepted: a temperature from 0, a top_k "
            "from 1, a top_p above 0 and up to 1."
        )
    if temperature == 0 and (top_k is not None or top_p is not None):
        raise ValueError("top_k and top_p say what to draw from, but temperature 0 draws nothing. Pass a temperature.")
