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
from ..nn.attention import is_flow, is_observed
from ..nn.packing import Packing
from ..ops import FlowMaps, FlowVariant
from .base import FlowModel, options_with_dropout

_DEFAULT = FlowVariant()
Pooling = Literal["cls", "first", "mean"]
Positions = Literal["sinusoidal", "learned"]


@dataclass(frozen=True)
class ClassifierConfig:
    """What a classifier of token sequences is built from; the defaults are the paper's for bytes of text.

    Args:
        vocab_size: tokens are integers below it.
        num_classes: how many classes there are.
        max_length: the longest sequence, for learned positions and for rivals whose parameters depend on it.
        embed_dim, num_layers, num_heads, mlp_dim: of the encoder; mlp_dim is also the inner width of the head.
        qkv_dim: inner width of the attention; None is embed_dim.
        dropout: on embeddings and on both branches of a layer.
        positions: "sinusoidal", without a longest length, or "learned".
        pooling: what is classified: the state of a learned token put before the sequence ("cls"), the state of the
            sequence's own first token ("first"), or the mean of all states ("mean").
        padding_id: the token that is padding; None where all are data, such as pixels.
        mask_padding: padding takes part in nothing. False is the authors' code, where it takes part like any token,
            whatever mask is passed.
        attention: "flow", or the name of a rival as `baselines.names` lists them.
        attention_dropout: on the weights of softmax attention; None is `dropout`. No other attention has it.
        attention_options: of the rival, as `baselines.options` lists them.
        variant: of Flow-Attention. The default is the paper's; "lra" is that of the code its authors released for this
            benchmark, where φ = ReLU and heads compete instead of tokens.
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
    """What both classifiers share: tokens become one vector a sequence, and a head of `head_dims` maps vectors on.

    Attributes:
        pack: whether batches with much padding are computed without it, which saves time and memory. Set it to False
            for CUDA graphs: shapes then differ from batch to batch, and the host waits for the lengths.
    """

    config_class = ClassifierConfig
    config: ClassifierConfig
    pack = True

    def __init__(self, config: ClassifierConfig, head_dims: tuple[int, ...]) -> None:
        super().__init__(config)
        extra = int(config.pooling == "cls")
        self.embedding = nn.Embedding(config.vocab_size, config.embed_dim)  # starts as N(0, 1), as published
        self.cls = nn.Parameter(torch.zeros(config.embed_dim)) if config.pooling == "cls" else None
        self.positions = (
            LearnedPositions(config.max_length + extra, config.embed_dim)
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
                max_length=config.max_length + extra,
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
        maps = [nn.Linear(width, next_width) for width, next_width in pairwise(head_dims)]
        for linear in maps:
            _lecun_normal_(linear.weight)
            nn.init.zeros_(linear.bias)
        self.head = nn.Sequential(*(module for linear in maps for module in (linear, nn.ReLU())))[:-1]

    def encode(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """The vector of each sequence, (B, W), before the head.

        Args:
            tokens: (B, N) integers.
            mask: (B, N) bool, True = takes part; None is all tokens but config.padding_id. Padding may be on either
                side.
        """
        _check(tokens, mask)
        config = self.config
        if not config.mask_padding:
            mask = None
        elif mask is None and config.padding_id is not None:
            mask = tokens != config.padding_id
        if self.cls is not None:
            # its place; which token stands there does not matter
            tokens = F.pad(tokens, (1, 0))
            mask = mask if mask is None else F.pad(mask, (1, 0), value=True)
        if mask is not None and (packing := self._packing(mask)) is not None:
            return self._encode_packed(tokens, mask, packing)
        x = self._embed(tokens, None if mask is None else token_positions(mask))
        for layer in self.layers:
            x = self._layer(layer, x, mask)
        return self._pool(self.norm(x), mask)

    def _packing(self, mask: Tensor) -> Packing | None:
        may_pack = self.pack and is_flow(self.config.attention) and self.config.pooling != "mean"
        if not may_pack or is_observed(self.layers):
            return None
        packing = Packing.of(mask)
        # a sequence without tokens has none to pool
        return None if packing is None or 0 in packing.lengths else packing

    def _encode_packed(self, tokens: Tensor, mask: Tensor, packing: Packing) -> Tensor:
        """`encode` without the padding."""
        x = self._embed(packing.pack(tokens), packing.pack(token_positions(mask)))  # (1, T, W)
        for layer in self.layers:
            x = self._layer(layer, x, cu_seqlens=packing.cu_seqlens, max_seqlen=packing.max_seqlen)
        # the first token of each sequence is what is pooled
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
    """Classifies sequences of tokens: pre-norm encoder, pooling, one hidden layer.

    >>> model = FlowformerClassifier(ClassifierConfig(embed_dim=32, mlp_dim=64))
    >>> model(torch.randint(1, 257, (2, 100))).shape
    torch.Size([2, 2])
    """

    def __init__(self, config: ClassifierConfig) -> None:
        super().__init__(config, (config.embed_dim, config.mlp_dim, config.num_classes))

    def forward(
        self, tokens: Tensor, mask: Tensor | None = None, *, return_maps: bool = False
    ) -> Tensor | tuple[Tensor, list[FlowMaps]]:
        """The scores of the classes, (B, num_classes), and if asked the maps of each layer.

        Args:
            tokens, mask: as for `encode`.
            return_maps: with pooling "cls" the learned token is the first of the N + 1 in a map.
        """
        if return_maps:
            return self._with_maps(tokens, mask)
        return self.head(self.encode(tokens, mask))


class FlowformerPairClassifier(SequenceEncoder):
    """Classifies pairs of documents, each encoded on its own by the same encoder; two hidden layers see both vectors.

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
        """The scores of the classes, (B, num_classes), and if asked the maps of each layer.

        Args:
            first, second: (B, N) and (B, M) integers, the documents.
            first_mask, second_mask: as the mask of `encode`.
            return_maps: the maps of all layers for the first document, then those for the second.
        """
        if return_maps:
            return self._with_maps(first, second, first_mask, second_mask)
        return self.head(torch.cat([self.encode(first, first_mask), self.encode(second, second_mask)], -1))


def _lecun_normal_(weight: Tensor) -> None:
    """Variance 1/fan_in from a normal distribution cut at two of its deviations, as flax starts a dense layer."""
    std = weight.shape[1] ** -0.5 / 0.87962566103423978  # what the cut leaves of the deviation
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
