"""Classifiers of long token sequences: the Long-Range Arena encoder, and its two-tower form for pairs of documents.

Shapes: B batch, N tokens, W width (embed_dim).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._utils import check_literals, check_positive
from ..nn import FlowEncoderLayer, LearnedPositions, SinusoidalPositions, token_positions
from ..nn.packing import Packing
from ..nn.recording import is_observed
from ..ops import FlowMaps, FlowVariant
from .base import FlowModel, options_with_dropout

_DEFAULT = FlowVariant()
Pooling = Literal["cls", "first", "mean"]
Positions = Literal["sinusoidal", "learned"]


@dataclass(frozen=True)
class ClassifierConfig:
    """Config of the classifiers of token sequences; the defaults are the paper's for byte-level text.

    Args:
        vocab_size: number of distinct tokens.
        num_classes: number of classes.
        max_length: the longest sequence, for learned positions and for rivals whose parameters depend on it.
        embed_dim, num_layers, num_heads, mlp_dim: width, depth, heads and inner width of the feed-forward networks;
            mlp_dim is also the inner width of the head.
        qkv_dim: inner width of the attention; None means embed_dim.
        dropout: on the embeddings, inside the feed-forward networks, and on the results of both branches of a layer.
        positions: "sinusoidal", which take any length, or "learned".
        pooling: the input of the head: the hidden state of a learned token before the sequence ("cls"), of the first
            token of the sequence ("first"), or the mean over the sequence ("mean").
        padding_id: the padding token; None if all tokens are data, such as pixels.
        mask_padding: whether padding is masked. False is the authors' code, which treats padding like any other token
            and ignores masks.
        attention: "flow", or the name of a rival attention; `baselines.names` lists them.
        attention_dropout: on the weights of softmax attention; None means `dropout`. Ignored for other attentions.
        attention_options: options of the attention, see `build_attention`.
        variant: variant of Flow-Attention. The default is the paper's. In "lra", the code that the authors released for
            this benchmark, φ is ReLU and heads compete instead of tokens.
    """

    vocab_size: int = 257
    num_classes: int = 2
    max_length: int = 1000
    embed_dim: int = 256
    qkv_dim: int | None = None
    mlp_dim: int = 1024
    num_layers: int = 1
    num_heads: int = 4
    dropout: float = 0.1
    positions: Positions = "sinusoidal"
    pooling: Pooling = "cls"
    padding_id: int | None = 0
    mask_padding: bool = True
    attention: str = "flow"
    attention_dropout: float | None = None
    attention_options: dict[str, Any] = field(default_factory=dict)
    variant: FlowVariant = _DEFAULT

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "num_classes", "max_length", "embed_dim", "mlp_dim", "num_layers", "num_heads")
        check_positive(**{name: getattr(self, name) for name in sizes})
        check_literals(self)
        if self.inner_dim < 1 or self.inner_dim % self.num_heads:
            raise ValueError(
                f"the inner width of the attention, {self.inner_dim}, is not a positive multiple of num_heads "
                f"{self.num_heads}. Choose another number of heads or set qkv_dim."
            )
        if self.padding_id is not None and not 0 <= self.padding_id < self.vocab_size:
            raise ValueError(
                f"padding_id {self.padding_id} is no token; accepted: 0 to {self.vocab_size - 1}, or None for none."
            )

    @property
    def inner_dim(self) -> int:
        return self.embed_dim if self.qkv_dim is None else self.qkv_dim


# the published Flowformer of each task; "retrieval" is for FlowformerPairClassifier
PRESETS = {
    "listops": ClassifierConfig(vocab_size=17, num_classes=10, max_length=2000, embed_dim=512, num_heads=2),
    "text": ClassifierConfig(),
    "retrieval": ClassifierConfig(max_length=4000, embed_dim=128, mlp_dim=512, num_layers=4, pooling="first"),
    "image": ClassifierConfig(
        vocab_size=256,
        num_classes=10,
        max_length=1024,
        embed_dim=128,
        qkv_dim=64,
        mlp_dim=128,
        dropout=0.3,
        attention_dropout=0.2,
        positions="learned",
        padding_id=None,
    ),
    "pathfinder": ClassifierConfig(
        vocab_size=256,
        max_length=1024,
        qkv_dim=128,
        mlp_dim=256,
        num_heads=8,
        dropout=0.2,
        attention_dropout=0.1,
        pooling="mean",
        padding_id=None,
    ),
}


class SequenceEncoder(FlowModel):
    """Base class of both classifiers: an encoder to one vector per sequence, and an MLP head of widths `head_dims`.

    Attributes:
        pack: whether batches with much padding are packed, which saves time and memory. Set it to False for CUDA
            graphs: packing waits for the lengths on the host, and shapes then differ from batch to batch.
    """

    config_class = ClassifierConfig
    config: ClassifierConfig
    pack = True

    def __init__(self, config: ClassifierConfig, head_dims: tuple[int, ...]) -> None:
        super().__init__(config)
        cls_tokens = int(config.pooling == "cls")
        self.embedding = nn.Embedding(config.vocab_size, config.embed_dim)  # initialised by N(0, 1), as published
        self.cls = nn.Parameter(torch.zeros(config.embed_dim)) if config.pooling == "cls" else None
        self.positions = (
            LearnedPositions(config.max_length + cls_tokens, config.embed_dim)
            if config.positions == "learned"
            else SinusoidalPositions(config.embed_dim)
        )
        self.dropout = nn.Dropout(config.dropout)
        layers = [
            FlowEncoderLayer(
                config.embed_dim,
                config.num_heads,
                config.mlp_dim,
                head_dim=config.inner_dim // config.num_heads,
                activation=nn.GELU("tanh"),
                dropout=config.dropout,
                attention_bias=False,
                eps=1e-6,
                attention=config.attention,
                attention_options=options_with_dropout(config),
                max_length=config.max_length + cls_tokens,
                variant=config.variant,
            )
            for _ in range(config.num_layers)
        ]
        for layer in layers:
            for linear in (layer.mlp.linear1, layer.mlp.linear2):
                nn.init.xavier_uniform_(linear.weight)
                nn.init.normal_(linear.bias, std=1e-6)
        self.layers = nn.ModuleList(layers)
        self.norm = nn.LayerNorm(config.embed_dim, eps=1e-6)
        linears = [nn.Linear(width, next_width) for width, next_width in pairwise(head_dims)]
        for linear in linears:
            _lecun_normal_(linear.weight)
            nn.init.zeros_(linear.bias)
        self.head = nn.Sequential(*(module for linear in linears for module in (linear, nn.ReLU())))[:-1]

    def encode(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return one vector per sequence, (B, W), the input of the head.

        Args:
            tokens: (B, N) integers.
            mask: (B, N) bool, True = takes part; None masks config.padding_id. Padding may be on either side.
        """
        _check(tokens, mask)
        config = self.config
        if not config.mask_padding:
            mask = None
        elif mask is None and config.padding_id is not None:
            mask = tokens != config.padding_id
        if self.cls is not None:
            # a placeholder: `_embed` replaces its embedding
            tokens = F.pad(tokens, (1, 0))
            mask = mask if mask is None else F.pad(mask, (1, 0), value=True)
        if mask is not None and (packing := self._packing(mask)) is not None:
            return self._encode_packed(tokens, mask, packing)
        x = self._embed(tokens, None if mask is None else token_positions(mask))
        for layer in self.layers:
            x = self._layer(layer, x, mask)
        return self._pool(self.norm(x), mask)

    def _packing(self, mask: Tensor) -> Packing | None:
        if not self.pack or self.config.pooling == "mean" or is_observed(self.layers):
            return None
        packing = Packing.from_mask(mask)
        # a sequence without tokens has no first token to pool
        return None if packing is None or 0 in packing.lengths else packing

    def _encode_packed(self, tokens: Tensor, mask: Tensor, packing: Packing) -> Tensor:
        """Encode packed sequences; same result as `encode` on the padded batch."""
        x = self._embed(packing.pack(tokens), packing.pack(token_positions(mask)))  # (1, T, W)
        for layer in self.layers:
            x = self._layer(layer, x, cu_seqlens=packing.cu_seqlens, max_seqlen=packing.max_seqlen)
        # poolings "cls" and "first" read only the first token of each sequence
        return self.norm(x[0, packing.cu_seqlens[:-1]])

    def _embed(self, tokens: Tensor, positions: Tensor | None) -> Tensor:
        x = self.embedding(tokens)  # (B, N, W)
        if self.cls is not None:
            is_first = torch.arange(x.shape[1], device=x.device) == 0 if positions is None else positions == 0
            x = torch.where(is_first[..., None], self.cls.to(x.dtype), x)
        return self.dropout(self.positions(x, positions))

    def _pool(self, x: Tensor, mask: Tensor | None) -> Tensor:
        if self.config.pooling == "mean":
            if mask is None:
                return x.mean(1)
            return x.masked_fill(~mask[..., None], 0).sum(1) / mask.sum(1, keepdim=True).clamp_min(1)
        if self.config.pooling == "cls" or mask is None:
            return x[:, 0]
        first = mask.int().argmax(1)
        return x[torch.arange(len(x), device=x.device), first]


class FlowformerClassifier(SequenceEncoder):
    """Classifies token sequences: pre-norm encoder, pooling, MLP head with one hidden layer.

    >>> model = FlowformerClassifier(ClassifierConfig(embed_dim=32, mlp_dim=64))
    >>> model(torch.randint(1, 257, (2, 100))).shape
    torch.Size([2, 2])
    """

    def __init__(self, config: ClassifierConfig) -> None:
        super().__init__(config, (config.embed_dim, config.mlp_dim, config.num_classes))

    def forward(
        self, tokens: Tensor, mask: Tensor | None = None, *, return_maps: bool = False
    ) -> Tensor | tuple[Tensor, list[FlowMaps]]:
        """Return the logits (B, num_classes), and with `return_maps` also the flow maps of each layer.

        Args:
            tokens, mask: as for `encode`.
            return_maps: with pooling "cls", a map has N + 1 tokens, the learned one first.
        """
        if return_maps:
            return self._with_maps(tokens, mask)
        return self.head(self.encode(tokens, mask))


class FlowformerPairClassifier(SequenceEncoder):
    """Classifies pairs of documents: one encoder for both, then an MLP head with two hidden layers on both vectors.

    >>> model = FlowformerPairClassifier(ClassifierConfig(embed_dim=32, mlp_dim=64, pooling="first"))
    >>> model(torch.randint(1, 257, (2, 100)), torch.randint(1, 257, (2, 80))).shape
    torch.Size([2, 2])
    """

    def __init__(self, config: ClassifierConfig) -> None:
        super().__init__(config, (2 * config.embed_dim, config.mlp_dim, config.mlp_dim // 2, config.num_classes))

    def forward(
        self,
        first: Tensor,
        second: Tensor,
        first_mask: Tensor | None = None,
        second_mask: Tensor | None = None,
        *,
        return_maps: bool = False,
    ) -> Tensor | tuple[Tensor, list[FlowMaps]]:
        """Return the logits (B, num_classes), and with `return_maps` also the flow maps of each layer.

        Args:
            first, second: (B, N) and (B, M) integers, the documents.
            first_mask, second_mask: as the mask of `encode`.
            return_maps: return the maps of all layers for the first document, then for the second.
        """
        if return_maps:
            return self._with_maps(first, second, first_mask, second_mask)
        return self.head(torch.cat([self.encode(first, first_mask), self.encode(second, second_mask)], -1))


def _lecun_normal_(weight: Tensor) -> None:
    """LeCun-normal initialisation as in flax: variance 1/fan_in, normal distribution truncated at two deviations."""
    std = weight.shape[1] ** -0.5 / 0.87962566103423978  # deviation of a standard normal truncated at ±2
    nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)


def _check(tokens: Tensor, mask: Tensor | None) -> None:
    if tokens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"tokens must be int32 or int64, got {tokens.dtype}. Pass tokens.long().")
    if tokens.dim() != 2 or tokens.shape[1] < 1:
        raise ValueError(f"tokens must have shape (batch, length), length at least 1, got {tuple(tokens.shape)}.")
    if mask is not None and (mask.dtype != torch.bool or mask.shape != tokens.shape):
        raise ValueError(
            f"mask must be bool, True = takes part, of the shape {tuple(tokens.shape)} of the tokens, got {mask.dtype} "
            f"of shape {tuple(mask.shape)}."
        )
