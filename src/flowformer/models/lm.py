"""The decoder language model: trained in parallel, generating at the same cost per token whatever came before.

Shapes: B batch, N tokens, W width (embed_dim), V words of the vocabulary.
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
IGNORED = -100  # as a target: not scored
LOGITS_AT_ONCE = 2**27  # a loss over the vocabulary of WikiText-103 would otherwise keep gigabytes

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
    """A language model; the default is the paper's for WikiText-103.

    Args:
        vocab_size: V.
        num_layers, embed_dim, num_heads, mlp_dim: depth, W, heads, inner width of the feed-forward networks.
        activation: of the feed-forward networks; "gelu_tanh" is the approximation of GPT-2.
        positions: "sinusoidal", or "fairseq", sinusoids in the order of the released command, which have no longest
            length; or "learned", a table of `max_length` positions.
        max_length: the longest sequence, for learned positions and for rivals whose parameters depend on it.
        scale_embedding: whether embeddings are multiplied by √W.
        tie_embedding: whether the last map to the vocabulary is the embedding.
        initialisation: "fairseq", as the paper's model, or "gpt", as the authors' GPT module.
        dropout: on the embeddings, and on the results of attention and feed-forward networks.
        attention: "flow", or the name of a rival as `baselines.names` lists them.
        attention_options: of the rival, as `baselines.options` lists them.
        variant: the reading of Flow-Attention.
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
    """Pre-norm decoder layers between an embedding and a map back to the vocabulary.

    >>> model = FlowformerLM(LMConfig(vocab_size=11, num_layers=2, embed_dim=16, num_heads=2, mlp_dim=32)).eval()
    >>> prompts = torch.tensor([[3, 1, 4, 1], [5, 9, 0, 0]])
    >>> mask = torch.tensor([[True, True, True, True], [True, True, False, False]])
    >>> model(prompts, mask).shape, model.generate(prompts, mask, max_new_tokens=5).shape
    (torch.Size([2, 4, 11]), torch.Size([2, 5]))
    """

    config_class = LMConfig
    config: LMConfig
    checkpoint_every = 1  # of the layers, with `gradient_checkpointing`

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
        """From now on the tokens passed are this rank's part of sequences cut over the ranks of the group, in order.

        Args:
            group: as for `flow_attention`; None is whole sequences again.
        """
        if group is not None and not is_flow(self.config.attention):
            raise NotImplementedError(
                f"{self.config.attention} attention cannot be cut over ranks; accepted: Flow-Attention."
            )
        self.group = group
        for layer in cast(list[FlowDecoderLayer], self.decoder.layers):
            layer.attention.group = group

    def reset_parameters(self) -> None:
        """The published initialisation that the config names; norms, positions and parameters of rivals stay."""
        gpt = self.config.initialisation == "gpt"
        for table in (self.embedding, self.head):
            if table is not None:
                nn.init.normal_(table.weight, std=0.02 if gpt else self.config.embed_dim**-0.5)
        for layer in cast(list[FlowDecoderLayer], self.decoder.layers):
            attention, mlp = layer.attention, layer.mlp
            *projections, _ = attention.projections()
            for linear in [*attention.projections(), mlp.linear1, mlp.linear2]:
                if gpt:
                    nn.init.normal_(linear.weight, std=0.02)
                    nn.init.zeros_(linear.bias)
                else:
                    linear.reset_parameters()
            if gpt:
                # of the two maps into the residual stream, the release scales down this one only
                nn.init.normal_(mlp.linear2.weight, std=0.02 / math.sqrt(2 * self.config.num_layers))
            else:
                for linear in projections:
                    nn.init.xavier_uniform_(linear.weight, gain=2**-0.5)
                nn.init.xavier_uniform_(attention.out_proj.weight)
                nn.init.zeros_(attention.out_proj.bias)

    def new_states(self, batch_size: int) -> list[FlowState]:
        """The states, one a layer, of `batch_size` sequences that have not begun."""
        return self.decoder.new_states(batch_size)

    def forward(
        self,
        tokens: Tensor,
        mask: Tensor | None = None,
        *,
        states: Sequence[FlowState] | None = None,
        return_maps: bool = False,
    ):
        """Scores of every word as the next one.

        Args:
            tokens: (B, N) integers; with states, those that come after.
            mask: (B, N) bool, True = a token; padding on either side.
            states: one a layer, of `new_states` or of the call before.
            return_maps: also return the flows of each layer.

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
        """Cross-entropy of the next tokens, in nats; the exponential of its mean is the perplexity.

        Large logits are computed in pieces, and recomputed in the backward pass.

        Args:
            tokens, mask: as for `forward`.
            targets: (B, N), what each token should predict, IGNORED (-100) where nothing is scored; None is the token
                after it. Padding scores nothing.
            reduction: "mean" over the scored tokens, 0 if there are none, or "sum".

        Where sequences are cut over ranks, the loss is that of all ranks, on each of them. Its gradient is what this
        rank's tokens contribute: sum the gradients of the ranks. DDP averages them, so multiply by their number.
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
            total = torch.stack(
                [checkpoint(self._negative_log_likelihood, *piece, use_reentrant=False) for piece in pieces]
            ).sum()
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
        """Continue prompts, each token at the same cost. Dropout is on unless the model is in evaluation mode.

        Args:
            prompt: (B, N) integers.
            prompt_mask: (B, N) bool, True = a token, for prompts of unequal length, padded on either side.
            max_new_tokens: how many to add.
            temperature: divides the logits before a token is drawn; 0 takes the likeliest.
            top_k: draw from the k likeliest only.
            top_p: draw from the fewest of the likeliest that hold this much of the probability.
            eos: the token after which a sequence is over, and with which it is filled.
            prefill: how many tokens of the prompt run at once, to bound memory; None is all.
            recompute: run the whole prefix again for each token: slow, and the only way for a rival without a state.
            generator: of the random numbers.

        Returns: (B, T) integers, the new tokens alone; T is max_new_tokens, or less if every sequence is over.
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
            raise ValueError("every prompt needs at least one token, if only one that begins a text.")
        states = None if recompute else self.new_states(len(prompt))
        size = prompt.shape[1] if recompute or prefill is None else prefill
        for start in range(0, prompt.shape[1], size):
            part = slice(start, start + size)
            x, states = self._hidden(prompt[:, part], None if mask is None else mask[:, part], states)
        new_tokens: list[Tensor] = []
        over = torch.zeros(len(prompt), dtype=torch.bool, device=prompt.device)
        while True:
            token = draw(self._logits(x[:, -1]), temperature, top_k, top_p, generator)
            if eos is not None:
                token = token.masked_fill(over, eos)
                over |= token == eos
            new_tokens.append(token)
            if len(new_tokens) == max_new_tokens or (eos is not None and over.all()):
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
        """All that comes between the embedding and the head.

        Args:
            x: (B, N, W), embedded tokens.
            mask, states: as for `forward`.
            positions: (B, N); None counts the tokens of each sequence, after those that the states have seen.
            inputs: gets the input of each layer appended, (B, N, W).

        Returns: what the head reads, (B, N, W), and with states the states after the last token.
        """
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
        """What the head reads, (B, N, W), and with states the new ones."""
        _check_tokens(tokens, mask)
        return self.run_layers(self.embedding(tokens), mask, states=states)

    def _logits(self, x: Tensor) -> Tensor:
        return F.linear(x, self.embedding.weight) if self.head is None else self.head(x)

    def _negative_log_likelihood(self, x: Tensor, targets: Tensor) -> Tensor:
        logits = self._logits(x)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")


def next_tokens(tokens: Tensor, mask: Tensor | None = None, group: Group | None = None) -> Tensor:
    """The token after each token, IGNORED where there is none: at the end, and where either is padding.

    With a group, the token after the last is the first of the next rank that has tokens.

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
    """The same sequences with all their padding before them, so that each ends in the last column.

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
    """One token a row, (B,), from logits (B, V): the likeliest if the temperature is 0, else at random."""
    if temperature == 0:
        return logits.argmax(-1)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    if top_k is not None and top_k < logits.shape[-1]:
        least = logits.topk(top_k).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    probabilities = logits.softmax(-1)
    if top_p is not None:
        ordered, order = probabilities.sort(-1, descending=True)
        # a token stays if those likelier do not hold top_p yet; so the likeliest always does
        likelier = ordered.cumsum(-1) - ordered
        probabilities = probabilities.scatter(-1, order, ordered.masked_fill(likelier >= top_p, 0))
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
