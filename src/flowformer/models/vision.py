"""Image classifiers: the paper's four-stage Flowformer, and DeiT with Flow-Attention.

Shapes: B images of C × Y × X pixels, N tokens (the cells of a grid, row by row), W width of a token.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..nn import FeedForward, build_attention
from ..ops import FlowMaps, FlowVariant
from .base import FlowModel

_DEFAULT = FlowVariant()
EPS = 1e-6  # epsilon of the layer norms
STD = 0.02  # initial standard deviation of linear layers, positions and class token


class _ImageConfig:
    """Base class of the configs: checks of the image size, and the grid of patches."""

    image_size: int | tuple[int, int]
    patch_size: int
    drop_path: float

    def __post_init__(self) -> None:
        if len(self._sides) != 2:
            raise ValueError(f"image_size must be one side, or height and width, got {self.image_size}.")
        if self.patch_size < 1 or any(side < 1 or side % self.stride for side in self._sides):
            raise ValueError(
                f"image_size must be a positive multiple of the side of a token of the last layer, {self.stride} "
                f"pixels, got {self.image_size} with patch_size {self.patch_size}."
            )
        if not 0 <= self.drop_path < 1:
            raise ValueError(f"drop_path must be at least 0 and below 1, got {self.drop_path!r}.")

    @property
    def stride(self) -> int:
        """Side in pixels of a token of the last layer. The sides of an image must be multiples of it."""
        return self.patch_size

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of the patches of an image."""
        rows, columns = self._sides
        return rows // self.patch_size, columns // self.patch_size

    @property
    def _sides(self) -> tuple[int, int]:
        return (self.image_size, self.image_size) if isinstance(self.image_size, int) else self.image_size


@dataclass(frozen=True)
class VisionConfig(_ImageConfig):
    """Config of `FlowformerVision`; the defaults are those of the released training script.

    Args:
        image_size: side, or height and width, of the images that the positions are learned for. For other sizes the
            positions are interpolated.
        patch_size: side of a patch, which is a token of the first stage. Each further stage halves the grid.
        channels, depths: width and number of layers of each stage.
        num_heads: heads of every stage. The released code has 12, the paper's table 16.
        mlp_ratio: inner width of the feed-forward networks / width of the tokens.
        layer_scale: initial value of the learned scales of the feed-forward branches.
        dropout: on the result of each branch and inside the feed-forward networks.
        drop_path: stochastic depth: probability of dropping a branch of the last layer; rises linearly from 0 at the
            first layer.
        attention: "flow", or the name of a rival attention; `baselines.names` lists them.
        attention_options: options of the attention, see `build_attention`.
    """

    image_size: int | tuple[int, int] = 224
    patch_size: int = 4
    in_channels: int = 3
    num_classes: int = 1000
    channels: tuple[int, ...] = (96, 192, 384, 768)
    depths: tuple[int, ...] = (3, 3, 10, 3)
    num_heads: int = 12
    mlp_ratio: int = 4
    layer_scale: float = 1e-5
    dropout: float = 0.0
    drop_path: float = 0.2
    attention: str = "flow"
    attention_options: dict[str, Any] = field(default_factory=dict)
    variant: FlowVariant = _DEFAULT

    def __post_init__(self) -> None:
        if len(self.channels) != len(self.depths) or not self.channels:
            raise ValueError(
                f"channels and depths must give one number a stage, got {self.channels} and {self.depths}."
            )
        super().__post_init__()

    @property
    def stride(self) -> int:
        return self.patch_size * 2 ** (len(self.channels) - 1)

    @property
    def width(self) -> int:
        """Width of the features that the head classifies."""
        return self.channels[-1]


@dataclass(frozen=True)
class DeiTConfig(_ImageConfig):
    """Config of `FlowformerDeiT`, without distillation; the defaults are DeiT-S.

    Args: as for `VisionConfig`, but with one width `embed_dim`, `depth` layers and no layer_scale.
    """

    image_size: int | tuple[int, int] = 224
    patch_size: int = 16
    in_channels: int = 3
    num_classes: int = 1000
    embed_dim: int = 384
    depth: int = 12
    num_heads: int = 6
    mlp_ratio: int = 4
    dropout: float = 0.0
    drop_path: float = 0.1
    attention: str = "flow"
    attention_options: dict[str, Any] = field(default_factory=dict)
    variant: FlowVariant = _DEFAULT

    @property
    def width(self) -> int:
        """Width of the features that the head classifies."""
        return self.embed_dim


PRESETS = {
    "imagenet": VisionConfig(),
    "imagenet-16-heads": VisionConfig(num_heads=16),
    # 32 × 32 images: grids of 16, 8, 4 and 2 cells per side; heads have at least 16 channels
    "cifar": VisionConfig(
        image_size=32,
        patch_size=2,
        num_classes=10,
        channels=(64, 128, 256, 512),
        depths=(2, 2, 6, 2),
        num_heads=4,
        drop_path=0.1,
    ),
}
DEIT_PRESETS = {
    "deit-ti": DeiTConfig(embed_dim=192, num_heads=3),
    "deit-s": DeiTConfig(),
    "deit-b": DeiTConfig(embed_dim=768, num_heads=12),
    # the Transformers of the paper's table, for training from scratch; the published ones were evaluated at 384 × 384
    "vit-b": DeiTConfig(embed_dim=768, num_heads=12, dropout=0.1, drop_path=0.0, attention="softmax"),
    "vit-l": DeiTConfig(embed_dim=1024, depth=24, num_heads=16, dropout=0.1, drop_path=0.0, attention="softmax"),
}


class DropPath(nn.Module):
    """Stochastic depth: drops a branch for random images of a training batch, and scales the others to keep the mean.

    >>> DropPath(0.1).eval()(torch.ones(1, 2, 3)).sum()
    tensor(6.)
    """

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, branch: Tensor) -> Tensor:
        if not self.training or self.rate == 0:
            return branch
        kept = branch.new_empty(branch.shape[0], 1, 1).bernoulli_(1 - self.rate)
        return branch * (kept / (1 - self.rate))

    def extra_repr(self) -> str:
        return f"{self.rate:.3f}"


class GridPositions(nn.Module):
    """Adds a learned position vector to each cell of a grid; for other grids, by bicubic interpolation.

    Args:
        grid: rows and columns.
        dim: W.
        leading: number of tokens before the cells, such as a class token; each has its own vector.

    >>> GridPositions((4, 4), 8)(torch.zeros(1, 12, 8), (2, 6)).shape
    torch.Size([1, 12, 8])
    """

    def __init__(self, grid: tuple[int, int], dim: int, leading: int = 0) -> None:
        super().__init__()
        self.grid = grid
        self.leading = leading
        self.weight = nn.Parameter(torch.empty(leading + grid[0] * grid[1], dim))
        nn.init.trunc_normal_(self.weight, std=STD)

    def forward(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        """Return the tokens x (B, N, W) plus their position vectors; `grid` is (rows, columns) of the cells in x."""
        return x + self.interpolated(self.weight, self.grid, grid)

    def resize(self, grid: tuple[int, int]) -> None:
        """Change the grid: interpolate the table once, and make the result the new parameter."""
        table = self.interpolated(self.weight.detach(), self.grid, grid)
        self.grid, self.weight = grid, nn.Parameter(table.clone(), requires_grad=self.weight.requires_grad)

    def interpolated(self, table: Tensor, old: tuple[int, int], new: tuple[int, int]) -> Tensor:
        """Interpolate the table (leading + cells, W) from the grid `old` to the grid `new`."""
        if old == new:
            return table
        leading, cells = table.split([self.leading, old[0] * old[1]])
        cells = cells.T.unflatten(1, old)[None]  # (1, W, rows, columns)
        cells = cells.to(torch.promote_types(cells.dtype, torch.float32))
        cells = F.interpolate(cells, new, mode="bicubic", align_corners=False)[0].flatten(1).T
        return torch.cat([leading, cells.to(leading.dtype)])

    def extra_repr(self) -> str:
        return f"{self.grid[0]} × {self.grid[1]}, {self.weight.shape[1]}, leading={self.leading}"


class VisionLayer(nn.Module):
    """A pre-norm transformer layer with drop path and, with `layer_scale`, a learned scale of the feed-forward branch.

    >>> VisionLayer(32, 4, layer_scale=1e-5)(torch.randn(2, 49, 32)).shape
    torch.Size([2, 49, 32])
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        mlp_ratio: int = 4,
        layer_scale: float | None = None,
        dropout: float = 0.0,
        drop_path: float = 0.0,
        attention: str = "flow",
        attention_options: Mapping[str, Any] | None = None,
        variant: FlowVariant = _DEFAULT,
        max_length: int | None = None,
    ) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(embed_dim, eps=EPS)
        self.attention = build_attention(
            attention,
            embed_dim,
            num_heads,
            dropout=dropout,
            variant=variant,
            max_length=max_length,
            attention_options=attention_options,
        )
        self.mlp_norm = nn.LayerNorm(embed_dim, eps=EPS)
        self.mlp = FeedForward(embed_dim, mlp_ratio * embed_dim, dropout=dropout)
        self.layer_scale = None if layer_scale is None else nn.Parameter(torch.full((embed_dim,), layer_scale))
        self.drop_path = DropPath(drop_path)
        _initialise(*self.attention.projections(), self.mlp.linear1, self.mlp.linear2)

    def forward(self, x: Tensor) -> Tensor:
        """Return the tokens x (B, N, W) after the layer."""
        x = x + self.drop_path(self.attention(self.attention_norm(x)))
        branch = self.mlp(self.mlp_norm(x))
        return x + self.drop_path(branch if self.layer_scale is None else self.layer_scale * branch)


class ImageClassifier(FlowModel):
    """Base class of the image classifiers: features of images, and a linear head."""

    def __init__(self, config: VisionConfig | DeiTConfig) -> None:
        super().__init__(config)
        self.norm = nn.LayerNorm(config.width, eps=EPS)
        self.head = nn.Linear(config.width, config.num_classes)
        _initialise(self.head)

    def intermediates(
        self, images: Tensor, taken: Collection[int] = (), last: int | None = None
    ) -> tuple[Tensor, list[tuple[Tensor, tuple[int, int]]]]:
        """Return the tokens before the last norm, and the tokens after selected stages (in a DeiT: layers).

        Args:
            images: as for `forward`.
            taken: indices of the stages to return.
            last: index of the stage to stop after; None runs all.

        Returns: the tokens (B, N, W), the class token of a DeiT first; and, for each selected stage, its tokens and
        the rows and columns of their grid.
        """
        raise NotImplementedError

    def features(self, images: Tensor) -> Tensor:
        """Return the vectors that the head classifies, (B, W)."""
        raise NotImplementedError

    def forward(self, images: Tensor, *, return_maps: bool = False) -> Tensor | tuple[Tensor, list[FlowMaps]]:
        """Return the logits (B, num_classes), and with `return_maps` also the flow maps of each layer.

        Args:
            images: (B, in_channels, Y, X), normalised as in training; both sides divisible by `config.stride`.
        """
        return self._with_maps(images) if return_maps else self.head(self.features(images))

    def _check(self, images: Tensor) -> None:
        stride, channels = self.config.stride, self.config.in_channels
        if images.dim() != 4 or images.shape[1] != channels:
            raise ValueError(f"images must have shape (batch, {channels}, height, width), got {tuple(images.shape)}.")
        if images.shape[2] % stride or images.shape[3] % stride or not images.shape[2] * images.shape[3]:
            raise ValueError(
                f"the sides of an image must be positive multiples of {stride}, got {images.shape[2]} × "
                f"{images.shape[3]}. Resize or crop it."
            )


class FlowformerVision(ImageClassifier):
    """The paper's hierarchical classifier: stages on successively coarser grids; the head classifies the mean token.

    >>> model = FlowformerVision(PRESETS["cifar"])
    >>> logits, maps = model(torch.randn(2, 3, 32, 32), return_maps=True)
    >>> logits.shape, [maps[i].competition.shape[-1] for i in (0, 2, 4, 10)]
    (torch.Size([2, 10]), [256, 64, 16, 4])
    """

    config_class = VisionConfig

    def __init__(self, config: VisionConfig) -> None:
        super().__init__(config)
        rows, columns = config.grid
        drop_paths = iter(_drop_path_rates(config.drop_path, sum(config.depths)))
        self.positions = GridPositions(config.grid, config.channels[0])
        self.patch_embed = nn.ModuleList()
        self.stages = nn.ModuleList()
        in_width, patch = config.in_channels, config.patch_size
        for width, depth in zip(config.channels, config.depths, strict=True):
            self.patch_embed.append(nn.Conv2d(in_width, width, patch, stride=patch))
            layers = [
                VisionLayer(
                    width,
                    config.num_heads,
                    mlp_ratio=config.mlp_ratio,
                    layer_scale=config.layer_scale,
                    dropout=config.dropout,
                    drop_path=next(drop_paths),
                    attention=config.attention,
                    attention_options=config.attention_options,
                    variant=config.variant,
                    max_length=rows * columns,
                )
                for _ in range(depth)
            ]
            self.stages.append(nn.ModuleList(layers))
            in_width, patch, rows, columns = width, 2, rows // 2, columns // 2

    def intermediates(
        self, images: Tensor, taken: Collection[int] = (), last: int | None = None
    ) -> tuple[Tensor, list[tuple[Tensor, tuple[int, int]]]]:
        self._check(images)
        x, outputs = images, []
        for i, (patch_embed, layers) in enumerate(zip(self.patch_embed, self.stages, strict=True)):
            x = patch_embed(x)
            grid = x.shape[2], x.shape[3]
            x = x.flatten(2).transpose(1, 2)  # (B, N, W)
            x = self.positions(x, grid) if i == 0 else x
            for layer in layers.children():
                x = self._layer(layer, x)
            if i in taken:
                outputs.append((x, grid))
            if i in (last, len(self.stages) - 1):
                break
            x = x.transpose(1, 2).unflatten(2, grid)  # (B, W, rows, columns)
        return x, outputs

    def features(self, images: Tensor) -> Tensor:
        """Return the mean token of the last stage, (B, W)."""
        return self.norm(self.intermediates(images)[0]).mean(1)


class FlowformerDeiT(ImageClassifier):
    """DeiT with Flow-Attention: one grid of patches, and a class token that the head classifies.

    >>> model = FlowformerDeiT(DeiTConfig(image_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=3))
    >>> model(torch.randn(2, 3, 32, 48)).shape
    torch.Size([2, 1000])
    """

    config_class = DeiTConfig

    def __init__(self, config: DeiTConfig) -> None:
        super().__init__(config)
        rows, columns = config.grid
        self.patch_embed = nn.Conv2d(config.in_channels, config.embed_dim, config.patch_size, stride=config.patch_size)
        self.class_token = nn.Parameter(torch.empty(config.embed_dim))
        nn.init.trunc_normal_(self.class_token, std=STD)
        self.positions = GridPositions(config.grid, config.embed_dim, leading=1)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(
            VisionLayer(
                config.embed_dim,
                config.num_heads,
                mlp_ratio=config.mlp_ratio,
                dropout=config.dropout,
                drop_path=drop_path,
                attention=config.attention,
                attention_options=config.attention_options,
                variant=config.variant,
                max_length=rows * columns + 1,
            )
            for drop_path in _drop_path_rates(config.drop_path, config.depth)
        )

    def intermediates(
        self, images: Tensor, taken: Collection[int] = (), last: int | None = None
    ) -> tuple[Tensor, list[tuple[Tensor, tuple[int, int]]]]:
        self._check(images)
        patches = self.patch_embed(images)
        grid = patches.shape[2], patches.shape[3]
        patches = patches.flatten(2).transpose(1, 2)
        class_token = self.class_token.expand(len(patches), 1, -1)
        x = self.dropout(self.positions(torch.cat([class_token, patches], 1), grid))  # (B, 1 + N, W)
        outputs = []
        for i, layer in enumerate(self.layers):
            x = self._layer(layer, x)
            if i in taken:
                outputs.append((x, grid))
            if i == last:
                break
        return x, outputs

    def features(self, images: Tensor) -> Tensor:
        """Return the class token after the last layer, (B, W)."""
        return self.norm(self.intermediates(images)[0][:, 0])


def _drop_path_rates(rate: float, depth: int) -> list[float]:
    """The drop-path rate of each layer: rises linearly from 0 to `rate`."""
    return [rate * i / max(depth - 1, 1) for i in range(depth)]


def _initialise(*linears: nn.Linear) -> None:
    for linear in linears:
        nn.init.trunc_normal_(linear.weight, std=STD)
        nn.init.zeros_(linear.bias)
