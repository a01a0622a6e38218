"""Classifier or regressor of multivariate time series, as published for the UEA archive.

Shapes: B batch, N steps, C channels (num_features), W width (embed_dim).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._utils import check_literals, check_positive
from ..nn import FlowEncoderLayer, LearnedPositions, SinusoidalPositions
from ..nn.packing import Packing
from ..nn.recording import is_observed
from ..ops import FlowMaps, FlowVariant
from .base import FlowModel

_DEFAULT = FlowVariant()
Head = Literal["flatten", "mean"]
Positions = Literal["learned", "sinusoidal"]


@dataclass(frozen=True)
class TimeSeriesConfig:
    """Config of `FlowformerTimeSeries`; the defaults are the paper's.

    Args:
        num_features: channels of a series.
        num_classes: number of classes, or of regression targets.
        max_length: the longest series, for learned positions, the "flatten" head, and rivals whose parameters depend
            on it.
        embed_dim, num_layers, num_heads, mlp_dim: width, depth, heads, inner width of the feed-forward networks.
        dropout: on the embeddings, inside the feed-forward networks, on the results of both branches of a layer, and
            before the head.
        head: "flatten" is a linear map of all steps concatenated; "mean" is a linear map of their mean.
        positions: "learned" or "sinusoidal". With head="mean" and sinusoidal positions, series may have any length.
        mask_padding: whether padded steps are masked everywhere. False is the authors' code, where only the head masks
            them and attention does not.
        attention: "flow", or the name of a rival attention; `baselines.names` lists them.
        attention_options: options of the attention, see `build_attention`.
        variant: variant of Flow-Attention.
    """

    num_features: int
    num_classes: int
    max_length: int
    embed_dim: int = 512
    num_layers: int = 2
    num_heads: int = 8
    mlp_dim: int = 2048
    dropout: float = 0.1
    head: Head = "flatten"
    positions: Positions = "learned"
    mask_padding: bool = True
    attention: str = "flow"
    attention_options: dict[str, Any] = field(default_factory=dict)
    variant: FlowVariant = _DEFAULT

    def __post_init__(self) -> None:
        sizes = ("num_features", "num_classes", "max_length", "embed_dim", "num_layers", "num_heads", "mlp_dim")
        check_positive(**{name: getattr(self, name) for name in sizes})
        check_literals(self)


# the ten UEA sets of the paper: channels, classes, longest training series
PRESETS = {
    name: TimeSeriesConfig(*sizes)
    for name, sizes in {
        "EthanolConcentration": (3, 4, 1751),
        "FaceDetection": (144, 2, 62),
        "Handwriting": (3, 26, 152),
        "Heartbeat": (61, 2, 405),
        "JapaneseVowels": (12, 9, 29),
        "PEMS-SF": (963, 7, 144),
        "SelfRegulationSCP1": (6, 2, 896),
        "SelfRegulationSCP2": (7, 2, 1152),
        "SpokenArabicDigits": (13, 10, 93),
        "UWaveGestureLibrary": (3, 8, 315),
    }.items()
}


class FlowformerTimeSeries(FlowModel):
    """Classifies time series or predicts numbers from them, with a post-norm encoder and a linear head.

    Attributes:
        pack: whether batches with much padding are packed on a CPU, which saves time and memory.

    >>> model = FlowformerTimeSeries(TimeSeriesConfig(3, 5, max_length=50, embed_dim=32, mlp_dim=64))
    >>> mask = torch.arange(40) < torch.tensor([[40], [25]])  # a series of 40 steps and one of 25
    >>> model(torch.randn(2, 40, 3), mask).shape
    torch.Size([2, 5])
    """

    config_class = TimeSeriesConfig
    config: TimeSeriesConfig
    pack = True

    def __init__(self, config: TimeSeriesConfig) -> None:
        super().__init__(config)
        self.embedding = nn.Linear(config.num_features, config.embed_dim)
        self.positions: nn.Module = SinusoidalPositions(config.embed_dim)
        if config.positions == "learned":
            self.positions = LearnedPositions(config.max_length, config.embed_dim)
            nn.init.uniform_(self.positions.weight, -0.02, 0.02)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(
            FlowEncoderLayer(
                config.embed_dim,
                config.num_heads,
                config.mlp_dim,
                dropout=config.dropout,
                norm_first=False,
                attention=config.attention,
                attention_options=config.attention_options,
                max_length=config.max_length,
                variant=config.variant,
            )
            for _ in range(config.num_layers)
        )
        # the published model uses torch's default initialisation everywhere, also in the attention
        for module in self.layers.modules():
            if isinstance(module, nn.Linear):
                module.reset_parameters()
        self.norm = nn.LayerNorm(config.embed_dim)
        steps = config.max_length if config.head == "flatten" else 1
        self.head = nn.Linear(steps * config.embed_dim, config.num_classes)

    def forward(
        self, series: Tensor, mask: Tensor | None = None, *, return_maps: bool = False
    ) -> Tensor | tuple[Tensor, list[FlowMaps]]:
        """Return logits or predicted numbers (B, num_classes), and with `return_maps` also the flow maps of each layer.

        Args:
            series: (B, N, C), with N up to max_length unless the config allows any length.
            mask: (B, N) bool, True = takes part; None means all steps. Masked steps count as positions: pad at the end,
                and mask a gap where it occurs. Masked steps may hold any values, also NaN, unless mask_padding=False.
        """
        if return_maps:
            return self._with_maps(series, mask)
        self._check(series, mask)
        attention_mask = mask if self.config.mask_padding else None
        if attention_mask is not None:
            series = series.masked_fill(~attention_mask[..., None], 0)
        packing = None if attention_mask is None else self._packing(attention_mask)
        if packing is None:
            x = self._encode(series, None, mask=attention_mask)
        else:
            steps = torch.arange(series.shape[1]).expand(series.shape[:2])
            bounds = {"cu_seqlens": packing.cu_seqlens, "max_seqlen": packing.max_seqlen}
            x = packing.unpack(self._encode(packing.pack(series), packing.pack(steps), **bounds), series.shape[1])
        if mask is not None:
            x = x.masked_fill(~mask[..., None], 0)
        if self.config.head == "flatten":
            return self.head(F.pad(x, (0, 0, 0, self.config.max_length - x.shape[1])).flatten(1))
        return self.head(x.mean(1) if mask is None else x.sum(1) / mask.sum(1, keepdim=True).clamp_min(1))

    def _packing(self, mask: Tensor) -> Packing | None:
        # not on a GPU: waiting for the lengths there costs more than packing saves
        may_pack = self.pack and mask.device.type == "cpu"
        if not may_pack or is_observed(self.layers):
            return None
        return Packing.from_mask(mask)

    def _encode(self, series: Tensor, steps: Tensor | None, **options: Any) -> Tensor:
        """Encode each step of a padded or packed batch, (B, N, W); `options` are passed to the layers."""
        x = self.embedding(series) * self.config.embed_dim**0.5  # (B, N, W)
        x = self.dropout(self.positions(x, steps))
        for layer in self.layers:
            x = self._layer(layer, x, **options)
        return self.dropout(F.gelu(self.norm(x)))

    def _check(self, series: Tensor, mask: Tensor | None) -> None:
        config = self.config
        if series.dim() != 3 or series.shape[1] < 1 or series.shape[2] != config.num_features:
            raise ValueError(
                f"series must have shape (batch, length, {config.num_features}), length at least 1, got "
                f"{tuple(series.shape)}."
            )
        if series.shape[1] > config.max_length and (config.head == "flatten" or config.positions == "learned"):
            raise ValueError(
                f"got series of {series.shape[1]} steps, but max_length is {config.max_length}. Shorten the series, "
                'raise max_length, or use head="mean" with positions="sinusoidal", which take any length.'
            )
        if mask is not None and (mask.dtype != torch.bool or mask.shape != series.shape[:2]):
            raise ValueError(
                f"mask must be bool, True = takes part, of shape (batch, length) = {tuple(series.shape[:2])}, got "
                f"{mask.dtype} of shape {tuple(mask.shape)}."
            )
