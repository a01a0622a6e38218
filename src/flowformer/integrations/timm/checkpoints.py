"""Conversion of checkpoints for our timm models: from timm's ViT and DeiT, and from other image sizes.

Shapes: N tokens, P tokens before the cells of the grid (the class token), W width.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, cast

from timm.layers import resample_patch_embed
from torch import Tensor, nn

from ...models.vision import FlowformerVision

if TYPE_CHECKING:
    from .flowformer import _TimmModel

# names of the parts of a block, in timm and here
_BLOCK_PARTS = {
    "norm1": "attention_norm",
    "norm2": "mlp_norm",
    "attn.proj": "attention.out_proj",
    "mlp.fc1": "mlp.linear1",
    "mlp.fc2": "mlp.linear2",
}


def convert(weights: dict[str, Tensor], model: _TimmModel) -> dict[str, Tensor]:
    """Rename the weights to the names of `model`, and interpolate the positions to its image size.

    Weights of timm's ViT and DeiT fill all of a `deit_*_flow` model. In the hierarchical model they fill only the stem,
    that is the first patch embedding and the positions, which must have the same width; load them with strict=False.
    Unknown names are kept. Weights do not state their grid of positions: a square number of cells is assumed to be a
    square grid, except in weights with our names and as many cells as `model`, which are of its own grid.
    """
    is_timm = "pos_embed" in weights and "patch_embed.proj.weight" in weights
    if is_timm:
        weights = _convert_stem(weights, model) if isinstance(model, FlowformerVision) else _convert_deit(weights)
    name, leading = "positions.weight", model.positions.leading
    if name in weights and (is_timm or weights[name].shape[0] != model.positions.weight.shape[0]):
        cells = weights[name].shape[0] - leading
        side = math.isqrt(max(cells, 0))
        if side**2 == cells:
            weights = weights | {name: model.positions.interpolated(weights[name], (side, side), model.positions.grid)}
    return weights


def convert_hook(model, state_dict, prefix, *_) -> None:
    """Hook of load_state_dict that applies `convert`."""
    weights = {name.removeprefix(prefix): state_dict.pop(name) for name in list(state_dict) if name.startswith(prefix)}
    state_dict.update({f"{prefix}{name}": value for name, value in convert(weights, model).items()})


def _convert_deit(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    result: dict[str, Tensor] = {}
    for name, value in weights.items():
        block = re.fullmatch(r"blocks\.(\d+)\.(.+)\.(weight|bias)", name)
        if name == "cls_token":
            result["class_token"] = value[0, 0]
        elif name == "pos_embed":
            result["positions.weight"] = value[0]
        elif name.startswith("patch_embed.proj."):
            result[name.replace(".proj", "")] = value
        elif block is not None and block[2] == "attn.qkv":
            for each, part in zip("qkv", value.chunk(3), strict=True):
                result[f"layers.{block[1]}.attention.{each}_proj.{block[3]}"] = part
        elif block is not None and block[2] in _BLOCK_PARTS:
            result[f"layers.{block[1]}.{_BLOCK_PARTS[block[2]]}.{block[3]}"] = value
        else:
            result[name] = value
    return result


def _convert_stem(weights: dict[str, Tensor], model: FlowformerVision) -> dict[str, Tensor]:
    ours = cast(nn.Conv2d, model.patch_embed[0]).weight
    patches = weights["patch_embed.proj.weight"]
    if patches.shape[:2] != ours.shape[:2]:
        raise ValueError(
            f"the stem of the model has {tuple(ours.shape[:2])} channels out and in, and these weights "
            f"{tuple(patches.shape[:2])}. Build it with channels=({patches.shape[0]}, …), in_chans={patches.shape[1]}."
        )
    if patches.shape != ours.shape:
        patches = resample_patch_embed(patches, list(ours.shape[2:]))
    positions = weights["pos_embed"][0]
    prefix = positions.shape[0] - math.isqrt(positions.shape[0]) ** 2
    # blocks stay as unexpected keys, which strict loading reports; timm's last norm and head are dropped, since they
    # have the same names as ours but other widths
    blocks = {name: value for name, value in weights.items() if name.startswith("blocks.")}
    return {
        "positions.weight": positions[prefix:],
        "patch_embed.0.weight": patches,
        "patch_embed.0.bias": weights["patch_embed.proj.bias"],
        **blocks,
    }
