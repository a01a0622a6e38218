"""The image classifiers of this package as timm models: timm's methods, model registry and checkpoint loading.

Shapes: B images, N tokens, P tokens before the cells of the grid (the class token), W width, H heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, cast

import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.layers import global_pool_nlc
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models._features import feature_take_indices
from torch import Tensor, nn

from ..._utils import suggestion
from ...models.base import config_from
from ...models.vision import (
    DEIT_PRESETS,
    PRESETS,
    STD,
    DeiTConfig,
    FlowformerDeiT,
    FlowformerVision,
    GridPositions,
    ImageClassifier,
    VisionConfig,
)
from .checkpoints import convert, convert_hook

__all__ = ["TimmFlowDeiT", "TimmFlowformer"]  # register_model adds the models


class _TimmModel(ImageClassifier):
    """Base class that adds the methods timm expects of a model to an image classifier.

    Args:
        config: as for the classifier; num_classes=0 leaves out the head.
        global_pool: pooling of the tokens: "token" (the class token), "avg", "max", "avgmax", or "" for none; None is
            the default of the model.
        drop_rate: dropout on the features.
    """

    default_pool: ClassVar[str]
    num_prefix_tokens: ClassVar[int]
    feature_info: list[dict[str, Any]]
    positions: GridPositions
    norm: Any  # nn.LayerNorm, or nn.Identity after pruning
    head: Any  # nn.Linear, or nn.Identity if num_classes is 0

    def __init__(self, config: Any, *, global_pool: str | None = None, drop_rate: float = 0.0) -> None:
        super().__init__(replace(config, num_classes=max(config.num_classes, 1)))
        self.num_features = self.head_hidden_size = config.width
        self.num_classes = self.config.num_classes
        self.head_drop = nn.Dropout(drop_rate)
        self._set_pool(self.default_pool if global_pool is None else global_pool)
        self.register_load_state_dict_pre_hook(convert_hook)
        if config.num_classes == 0:
            self.reset_classifier(0)

    def _options(self) -> dict[str, Any]:
        return {"global_pool": self.global_pool, "drop_rate": self.head_drop.p}

    def _truncate(self, depth: int) -> None:
        """Remove the stages or layers after the first `depth`."""
        raise NotImplementedError

    def forward_features(self, x: Tensor) -> Tensor:
        """Return the tokens (B, P + N, W) after the last norm."""
        return self.norm(self.intermediates(x)[0])

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Return the logits for the tokens of `forward_features`, or with `pre_logits` the input of the head."""
        x = global_pool_nlc(x, pool_type=self.global_pool, num_prefix_tokens=self.num_prefix_tokens)
        x = self.head_drop(x)
        return x if pre_logits else self.head(x)

    def features(self, images: Tensor) -> Tensor:
        """Return the vectors that the head classifies, (B, W)."""
        return self.forward_head(self.forward_features(images), pre_logits=True)

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | Sequence[int] | None = None,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ):
        """Return the tokens after the last norm, and intermediate feature maps.

        Args:
            indices: entries of `feature_info` to return; a number means that many from the end, None means all.
            return_prefix_tokens: return each map as a pair with the class token, (B, P, W).
            norm: apply the last norm to the maps that have its width.
            stop_early: stop after the last of these maps; the returned tokens are then the tokens at that point.
            output_fmt: "NCHW", (B, W, rows, columns), or "NLC", (B, N, W).
            intermediates_only: return the maps without the tokens.
        """
        if output_fmt not in ("NCHW", "NLC"):
            raise ValueError(f"unknown output_fmt {output_fmt!r}; accepted: 'NCHW' and 'NLC'.")
        # cast for mypy: timm annotates a list but accepts any sequence
        taken, last = feature_take_indices(len(self.feature_info), cast(list[int], indices))
        maps: list[Any] = []
        result, selected = self.intermediates(x, taken, last if stop_early else None)
        for tokens, grid in selected:
            tokens = self.norm(tokens) if norm and tokens.shape[-1] == self.num_features else tokens
            prefix, cells = tokens[:, : self.num_prefix_tokens], tokens[:, self.num_prefix_tokens :]
            cells = cells if output_fmt == "NLC" else cells.transpose(1, 2).unflatten(2, grid).contiguous()
            maps.append((cells, prefix) if return_prefix_tokens and self.num_prefix_tokens else cells)
        return maps if intermediates_only else (self.norm(result), maps)

    def get_intermediate_layers(
        self,
        x: Tensor,
        n: int | Sequence[int] = 1,
        reshape: bool = False,
        return_prefix_tokens: bool = False,
        norm: bool = False,
    ) -> list[Any]:
        """Return feature maps, with DINO's method name and arguments.

        Args:
            n: number of entries of `feature_info` from the end, or their indices.
            reshape: (B, W, rows, columns) instead of (B, N, W).
            return_prefix_tokens, norm: as for `forward_intermediates`.
        """
        return self.forward_intermediates(
            x,
            n,
            return_prefix_tokens=return_prefix_tokens,
            norm=norm,
            output_fmt="NCHW" if reshape else "NLC",
            intermediates_only=True,
        )

    def set_input_size(
        self, img_size: int | tuple[int, int] | None = None, patch_size: int | tuple[int, int] | None = None
    ) -> None:
        """Change the image size: interpolate the positions once, and make the result the new parameter.

        Args:
            img_size: side, or height and width.
            patch_size: None or the patch size of the model, which cannot change.
        """
        patch = self.config.patch_size
        if patch_size not in (None, patch, (patch, patch)):
            raise NotImplementedError(
                f"the patches stay as they are, {patch} × {patch} pixels, got patch_size {patch_size}. Build a model "
                "with it, and load the weights into that."
            )
        if img_size is not None:
            self.config = replace(self.config, image_size=_image_size(img_size))
            self.positions.resize(self.config.grid)

    def prune_intermediate_layers(
        self, indices: int | Sequence[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Remove the parts that the feature maps at `indices` do not need; return non-negative indices."""
        taken, last = feature_take_indices(len(self.feature_info), cast(list[int], indices))
        self._truncate(last + 1)
        self.feature_info = self.feature_info[: last + 1]
        if prune_norm:
            self.norm = nn.Identity()
        if prune_head:
            self.reset_classifier(0, "")
        return taken

    def get_classifier(self) -> nn.Module:
        """Return the head."""
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the head, and the pooling if `global_pool` is given; num_classes=0 removes the head."""
        if global_pool is not None:
            self._set_pool(global_pool)
        self.config = replace(self.config, num_classes=num_classes)
        self.num_classes = num_classes
        self.head = nn.Identity()
        if num_classes:
            parameter = next(self.parameters())
            head = nn.Linear(self.num_features, num_classes, device=parameter.device, dtype=parameter.dtype)
            nn.init.trunc_normal_(head.weight, std=STD)
            nn.init.zeros_(head.bias)
            self.head = head.train(self.training)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Enable or disable gradient checkpointing of each layer."""
        self.gradient_checkpointing = enable

    def no_weight_decay(self) -> set[str]:
        """Names of parameters without weight decay; timm itself excludes one-dimensional parameters."""
        return {"positions.weight", "class_token"}

    def _set_pool(self, name: str) -> None:
        accepted = ("", "avg", "max", "avgmax") + ("token",) * bool(self.num_prefix_tokens)
        if name not in accepted:
            raise ValueError(
                f"unknown global_pool {name!r} for {type(self).__name__}; accepted: {', '.join(map(repr, accepted))}."
            )
        self.global_pool = name


class TimmFlowformer(_TimmModel, FlowformerVision):
    """`flowformer.models.FlowformerVision` with timm's methods; one feature map per stage.

    >>> model = TimmFlowformer(PRESETS["cifar"])
    >>> [tuple(each.shape) for each in model.forward_intermediates(torch.randn(1, 3, 32, 32), intermediates_only=True)]
    [(1, 64, 16, 16), (1, 128, 8, 8), (1, 256, 4, 4), (1, 512, 2, 2)]
    """

    config: VisionConfig
    default_pool = "avg"
    num_prefix_tokens = 0

    def __init__(self, config: VisionConfig, **options) -> None:
        super().__init__(config, **options)
        self.feature_info = [
            {"module": f"stages.{i}", "num_chs": width, "reduction": config.patch_size * 2**i}
            for i, width in enumerate(config.channels)
        ]

    def _truncate(self, depth: int) -> None:
        self.patch_embed = self.patch_embed[:depth]
        self.stages = self.stages[:depth]

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Return timm's patterns of parameter groups for layer-wise learning-rate decay."""
        fine = [(r"^patch_embed\.(\d+)", (0,)), (r"^stages\.(\d+)\.(\d+)", None), (r"^norm", (99999,))]
        return {
            "stem": r"^positions|^patch_embed\.0",
            "blocks": r"^(?:stages|patch_embed)\.(\d+)" if coarse else fine,
        }


class TimmFlowDeiT(_TimmModel, FlowformerDeiT):
    """`flowformer.models.FlowformerDeiT` with timm's methods; one feature map per layer.

    >>> model = TimmFlowDeiT(DeiTConfig(image_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=3), drop_rate=0.1)
    >>> model.forward_features(torch.randn(1, 3, 32, 32)).shape
    torch.Size([1, 17, 24])
    """

    config: DeiTConfig
    default_pool = "token"
    num_prefix_tokens = 1

    def __init__(self, config: DeiTConfig, **options) -> None:
        super().__init__(config, **options)
        self.feature_info = [
            {"module": f"layers.{i}", "num_chs": config.embed_dim, "reduction": config.patch_size}
            for i in range(config.depth)
        ]

    def _truncate(self, depth: int) -> None:
        self.layers = self.layers[:depth]

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Return timm's patterns of parameter groups for layer-wise learning-rate decay."""
        return {
            "stem": r"^class_token|^positions|^patch_embed",
            "blocks": [(r"^layers\.(\d+)", None), (r"^norm", (99999,))],
        }


# config fields that have another name in timm
_TIMM_TO_CONFIG = {
    "img_size": "image_size",
    "in_chans": "in_channels",
    "proj_drop_rate": "dropout",
    "drop_path_rate": "drop_path",
}
# further arguments of timm and `_build`, for the error about an unknown argument
_OTHER_ARGUMENTS = ("pretrained", "features_only", "out_indices", "global_pool", "drop_rate", "device", "dtype")


def _build(
    model_class: type[_TimmModel],
    preset: VisionConfig | DeiTConfig,
    *,
    global_pool: str | None = None,
    drop_rate: float = 0.0,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    **changes,
) -> _TimmModel:
    """Build a model from a preset; `changes` are config fields, under timm's names or ours."""
    accepted = (*_OTHER_ARGUMENTS, *_TIMM_TO_CONFIG, *vars(preset))
    for name in changes:
        if name not in accepted:
            raise TypeError(
                f"{model_class.__name__} has no argument {name!r}{suggestion(name, accepted)}; accepted: "
                f"{', '.join(accepted)}."
            )
    fields = {_TIMM_TO_CONFIG.get(name, name): value for name, value in changes.items()}
    if "image_size" in fields:
        fields["image_size"] = _image_size(fields["image_size"])
    config = config_from(type(preset), vars(preset) | fields)
    return model_class(config, global_pool=global_pool, drop_rate=drop_rate).to(device=device, dtype=dtype)


def _image_size(size: int | Sequence[int]) -> int | tuple[int, int]:
    """Normalise an image size: one number if both sides are equal."""
    if isinstance(size, int):
        return size
    rows, columns = size
    return rows if rows == columns else (rows, columns)


def _create(name: str, pretrained: bool, preset: VisionConfig | DeiTConfig, **options) -> nn.Module:
    model_class, num_maps = (TimmFlowformer, 4) if isinstance(preset, VisionConfig) else (TimmFlowDeiT, 3)
    feature_cfg = {"out_indices": options.pop("out_indices", num_maps), "feature_cls": "getter"}
    return build_model_with_cfg(
        partial(_build, model_class, preset),
        name,
        pretrained,
        feature_cfg=feature_cfg,
        pretrained_filter_fn=convert,
        **options,
    )


def _cfg(first_conv: str, **changes) -> dict[str, Any]:
    return {
        "num_classes": 1000,
        "input_size": (3, 224, 224),
        "pool_size": None,
        "crop_pct": 0.875,
        "interpolation": "bicubic",
        "mean": IMAGENET_DEFAULT_MEAN,
        "std": IMAGENET_DEFAULT_STD,
        "first_conv": first_conv,
        "classifier": "head",
        "paper_ids": "arXiv:2202.06258",
        "paper_name": "Flowformer: Linearizing Transformers with Conservation Flows",
    } | changes


_CIFAR = {"mean": (0.4914, 0.4822, 0.4465), "std": (0.2470, 0.2435, 0.2616), "crop_pct": 1.0}
default_cfgs = generate_default_cfgs(
    {
        "flowformer_patch4_224": _cfg("patch_embed.0", min_input_size=(3, 32, 32)),
        "flowformer_16heads_patch4_224": _cfg("patch_embed.0", min_input_size=(3, 32, 32)),
        "flowformer_patch2_32": _cfg(
            "patch_embed.0", num_classes=10, input_size=(3, 32, 32), min_input_size=(3, 16, 16), **_CIFAR
        ),
        "deit_tiny_flow_patch16_224": _cfg("patch_embed"),
        "deit_small_flow_patch16_224": _cfg("patch_embed"),
        "deit_base_flow_patch16_224": _cfg("patch_embed"),
    }
)


@register_model
def flowformer_patch4_224(pretrained: bool = False, **options) -> nn.Module:
    """The paper's four-stage model with 12 heads, as in the released code."""
    return _create("flowformer_patch4_224", pretrained, PRESETS["imagenet"], **options)


@register_model
def flowformer_16heads_patch4_224(pretrained: bool = False, **options) -> nn.Module:
    """The four-stage model with the 16 heads of the paper's table."""
    return _create("flowformer_16heads_patch4_224", pretrained, PRESETS["imagenet-16-heads"], **options)


@register_model
def flowformer_patch2_32(pretrained: bool = False, **options) -> nn.Module:
    """A smaller four-stage model for images of 32 × 32 pixels."""
    return _create("flowformer_patch2_32", pretrained, PRESETS["cifar"], **options)


@register_model
def deit_tiny_flow_patch16_224(pretrained: bool = False, **options) -> nn.Module:
    """DeiT-Ti with Flow-Attention."""
    return _create("deit_tiny_flow_patch16_224", pretrained, DEIT_PRESETS["deit-ti"], **options)


@register_model
def deit_small_flow_patch16_224(pretrained: bool = False, **options) -> nn.Module:
    """DeiT-S with Flow-Attention, as in the paper."""
    return _create("deit_small_flow_patch16_224", pretrained, DEIT_PRESETS["deit-s"], **options)


@register_model
def deit_base_flow_patch16_224(pretrained: bool = False, **options) -> nn.Module:
    """DeiT-B with Flow-Attention."""
    return _create("deit_base_flow_patch16_224", pretrained, DEIT_PRESETS["deit-b"], **options)
