"""Competition and allocation of a model, drawn with the series or images that they were computed from.

Shapes: B examples, N tokens, C channels, Y × X pixels, H heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from matplotlib.artist import Artist
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from torch import Tensor

from ..models import FlowformerDeiT, FlowformerTimeSeries, FlowformerVision
from ..models.base import FlowModel
from ..ops import FlowMaps


@torch.no_grad()
def over_time(
    model: FlowformerTimeSeries,
    series: Tensor,
    mask: Tensor | None = None,
    *,
    titles: Sequence[str] = (),
    layer: int = -1,
    columns: int = 3,
) -> Figure:
    """Draw time series, and below each the competition (as sources) and allocation (as sinks) of its steps.

    Lines are means over the heads, bands range from the lowest to the highest head. Competition uses the left axis and
    allocation the right one, with the same scales in all panels.

    Args:
        series: (B, N, C), one panel per series.
        mask: (B, N) bool, True = takes part.
        titles: one per panel, or empty.
        layer: index of the layer.
        columns: number of panels in a row.
    """
    maps, description = _layer_maps(_compute_maps(model, series, mask), layer)
    present = torch.ones(series.shape[:2], dtype=torch.bool) if mask is None else mask.cpu()
    columns = min(columns, len(series))
    rows = -(-len(series) // columns)
    figure = Figure(figsize=(4.6 * columns, 3.2 * rows + 0.6), layout="constrained")
    figure.suptitle(description, fontsize=10)
    panels = figure.subplots(
        2 * rows, columns, squeeze=False, sharex="col", gridspec_kw={"height_ratios": [2, 1.4] * rows}
    )
    scales = [_axis_limits(values, present) for values in (maps.competition, maps.allocation)]
    handles: dict[str, Artist] = {}
    for i in range(rows * columns):
        above, below = panels[2 * (i // columns), i % columns], panels[2 * (i // columns) + 1, i % columns]
        if i >= len(series) or not present[i].any():
            above.set_axis_off()
            below.set_axis_off()
            continue
        steps = range(int(present[i].sum()))
        above.plot(steps, series[i].cpu()[present[i]].numpy(), linewidth=0.8, alpha=0.7)
        above.set_title(titles[i] if titles else "", fontsize=10)
        for axis, name, side, values, scale, colour in (
            (below, "competition", "left", maps.competition[i], scales[0], "tab:red"),
            (below.twinx(), "allocation", "right", maps.allocation[i], scales[1], "tab:blue"),
        ):
            values = values.float().cpu()[:, present[i]]  # (H, N)
            heads = len(values)
            mean = f"{name} ({side} scale)" + (f", mean of {heads} heads" if heads > 1 else "")
            (handles[mean],) = axis.plot(steps, values.mean(0).numpy(), color=colour)
            if heads > 1:
                low, high = values.amin(0).numpy(), values.amax(0).numpy()
                band = axis.fill_between(steps, low, high, color=colour, alpha=0.15, linewidth=0)
                handles[f"{name}, lowest to highest head"] = band
            axis.set_ylim(scale)
            axis.tick_params(axis="y", labelcolor=colour, labelsize=7)
            axis.set_ylabel(name, color=colour, fontsize=8)
        below.set_xlabel("step", fontsize=8)
        below.tick_params(axis="x", labelbottom=True, labelsize=7)  # sharex hides these, but the last row may be empty
    figure.legend(handles.values(), handles.keys(), fontsize=8, ncols=2, loc="outside lower center")
    return figure


@torch.no_grad()
def over_images(
    model: FlowformerVision | FlowformerDeiT,
    images: Tensor,
    shown: Tensor,
    *,
    titles: Sequence[str] = (),
    layer: int = -1,
) -> Figure:
    """Draw images, and next to each the competition (as sources) and allocation (as sinks) of its patches.

    Maps are means over the heads; the colour scale below each column is the same for all images.

    Args:
        images: (B, 3, Y, X), inputs of the model.
        shown: (B, 3, Y, X), the same images as they are drawn, with values from 0 to 1.
        titles: one per image, or empty.
        layer: index of the layer.
    """
    maps, description = _layer_maps(_compute_maps(model, images), layer)
    figure = Figure(figsize=(6.3, 2.1 * len(images) + 0.9), layout="constrained")
    figure.suptitle(description, fontsize=10)
    panels = image_panels(figure, shown, 3, titles)
    for column, (name, values) in enumerate((("competition", maps.competition), ("allocation", maps.allocation)), 1):
        means = values.float().mean(1).cpu()  # (B, N)
        smooth, grids = over_pixels(means, *images.shape[2:])
        scale = Normalize(float(grids.min()), float(grids.max()))
        for panel, picture in zip(panels[:, column], smooth, strict=True):
            panel.imshow(picture.numpy(), cmap="inferno", norm=scale, alpha=0.6)
            panel.set_title(name, fontsize=9)
        bar = figure.colorbar(
            ScalarMappable(scale, "inferno"), ax=panels[:, column], location="bottom", alpha=0.6, shrink=0.9
        )
        bar.set_label(f"{name}, mean of the heads", fontsize=8)
        bar.ax.tick_params(labelsize=7)
        bar.ax.locator_params(nbins=4)
    return figure


def image_panels(figure: Figure, shown: Tensor, columns: int, titles: Sequence[str]) -> Any:
    """Add a row of panels for each image (B, 3, Y, X); each panel shows the image, the first one has the title."""
    panels = figure.subplots(len(shown), columns, squeeze=False)
    for i, row in enumerate(panels):
        for panel in row:
            panel.imshow(shown[i].permute(1, 2, 0).clamp(0, 1).cpu().numpy())
            panel.set_axis_off()
        row[0].set_title(titles[i] if titles else "", fontsize=9)
    return panels


def over_pixels(values: Tensor, height: int, width: int) -> tuple[Tensor, Tensor]:
    """Interpolate values of tokens (B, N) to the pixels of their images.

    Returns:
        the interpolated values (B, Y, X), and the values on the grid of the tokens (B, rows, columns).
    """
    rows, columns, leading = _grid(values.shape[1], height, width)
    grids = values[:, leading:].reshape(len(values), 1, rows, columns)
    return F.interpolate(grids, (height, width), mode="bilinear")[:, 0], grids[:, 0]


def _compute_maps(model: FlowModel, *inputs: Tensor | None) -> list[FlowMaps]:
    """Return the maps of all layers in evaluation mode; a model in training mode is set back to it."""
    was_training = model.training
    model.eval()
    try:
        return model(*inputs, return_maps=True)[1]
    finally:
        model.train(was_training)


def _layer_maps(maps: list[FlowMaps], layer: int) -> tuple[FlowMaps, str]:
    """Return the maps of a layer, and a description of the layer."""
    if not -len(maps) <= layer < len(maps):
        raise ValueError(
            f"the model has {len(maps)} layers; accepted: from {-len(maps)} to {len(maps) - 1}, got {layer}."
        )
    heads = maps[layer].competition.shape[1]
    return maps[layer], f"layer {layer % len(maps) + 1} of {len(maps)}, {heads} head{'s' if heads > 1 else ''}"


def _axis_limits(values: Tensor, present: Tensor) -> tuple[float, float]:
    """Return the range of values (B, H, N) over the steps that are present, (B, N) bool, with a margin."""
    valid = values.float().cpu().movedim(1, 2)[present]  # (steps, H)
    low, high = float(valid.min()), float(valid.max())
    margin = 0.05 * (high - low) or 0.5
    return low - margin, high + margin


def _grid(tokens: int, height: int, width: int) -> tuple[int, int, int]:
    """Return the rows and columns of an image's grid of tokens, and the number of tokens before it (class token).

    >>> _grid(16, 32, 32), _grid(197, 224, 224)
    ((4, 4, 0), (14, 14, 1))
    """
    for leading in (0, 1):
        rows = round(((tokens - leading) * height / width) ** 0.5)
        if rows and rows * round(rows * width / height) == tokens - leading:
            return rows, round(rows * width / height), leading
    raise ValueError(f"{tokens} tokens are no grid over an image of {height} × {width} pixels.")
