"""Competition and allocation, drawn over what they are of.

Shapes: B examples, N tokens, C channels, Y × X pixels, H heads.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor

from ..models import FlowformerDeiT, FlowformerTimeSeries, FlowformerVision


@torch.no_grad()
def over_time(
    model: FlowformerTimeSeries,
    series: Tensor,
    mask: Tensor | None = None,
    *,
    titles: Sequence[str] | None = None,
    layer: int = -1,
    columns: int = 3,
) -> Figure:
    """Time series, and below each how its steps compete as sources and what they take as sinks.

    Args:
        series: (B, N, C), a panel each.
        mask: (B, N) bool, True = takes part.
        titles: one a panel.
        layer: whose maps; the mean over the heads is drawn, and how far the heads are apart.
        columns: panels side by side.
    """
    maps = model.eval()(series, mask, return_maps=True)[1][layer]
    lengths = [series.shape[1]] * len(series) if mask is None else mask.sum(1).tolist()
    rows = -(-len(series) // columns)
    figure = Figure(figsize=(4.2 * columns, 3.2 * rows), layout="constrained")
    panels = figure.subplots(
        2 * rows, columns, squeeze=False, sharex="col", gridspec_kw={"height_ratios": [2, 1.4] * rows}
    )
    for i in range(rows * columns):
        above, below = panels[2 * (i // columns), i % columns], panels[2 * (i // columns) + 1, i % columns]
        if i >= len(series):
            above.set_axis_off()
            below.set_axis_off()
            continue
        steps = range(int(lengths[i]))
        above.plot(steps, series[i, : lengths[i]].cpu().numpy(), linewidth=0.8, alpha=0.7)
        above.set_title("" if titles is None else titles[i], fontsize=10)
        allocation = below.twinx()
        for axis, values, colour in (
            (below, maps.competition[i, :, : lengths[i]], "tab:red"),
            (allocation, maps.allocation[i, :, : lengths[i]], "tab:blue"),
        ):
            values = values.float().cpu()  # (H, N)
            axis.plot(steps, values.mean(0).numpy(), color=colour)
            axis.fill_between(steps, values.amin(0).numpy(), values.amax(0).numpy(), color=colour, alpha=0.15)
            axis.tick_params(axis="y", labelcolor=colour, labelsize=7)
        below.set_ylabel("competition", color="tab:red", fontsize=8)
        allocation.set_ylabel("allocation", color="tab:blue", fontsize=8)
        below.set_xlabel("step", fontsize=8)
    return figure


@torch.no_grad()
def over_images(
    model: FlowformerVision | FlowformerDeiT,
    images: Tensor,
    shown: Tensor,
    *,
    titles: Sequence[str] | None = None,
    layer: int = -1,
) -> Figure:
    """Images, and beside each how its patches compete as sources and what they take as sinks.

    Args:
        images: (B, 3, Y, X), as the model takes them.
        shown: (B, 3, Y, X) from 0 to 1, as a reader sees them.
        titles: one an image.
        layer: whose maps; the mean over the heads is drawn.
    """
    maps = model.eval()(images, return_maps=True)[1][layer]
    figure = Figure(figsize=(6.3, 2.1 * len(images)), layout="constrained")
    panels = figure.subplots(len(images), 3, squeeze=False)
    height, width = images.shape[2:]
    for i, row in enumerate(panels):
        picture = shown[i].permute(1, 2, 0).clamp(0, 1).cpu().numpy()
        for panel, values, name in zip(
            row, (None, maps.competition[i], maps.allocation[i]), ("", "competition", "allocation"), strict=True
        ):
            panel.imshow(picture)
            panel.set_axis_off()
            panel.set_title(name if values is not None or titles is None else titles[i], fontsize=9)
            if values is None:
                continue
            mean = values.float().mean(0)
            rows, columns, leading = _grid(len(mean), height, width)
            grid = mean[leading:].reshape(1, 1, rows, columns).cpu()
            smooth = F.interpolate(grid, (height, width), mode="bilinear")[0, 0].numpy()
            panel.imshow(smooth, cmap="inferno", alpha=0.6)
    return figure


def _grid(tokens: int, height: int, width: int) -> tuple[int, int, int]:
    """Rows and columns of the tokens of an image, and how many tokens come before them.

    >>> _grid(16, 32, 32), _grid(197, 224, 224)
    ((4, 4, 0), (14, 14, 1))
    """
    for leading in (0, 1):
        rows = round(((tokens - leading) * height / width) ** 0.5)
        if rows and rows * round(rows * width / height) == tokens - leading:
            return rows, round(rows * width / height), leading
    raise ValueError(f"{tokens} tokens are no grid over an image of {height} × {width} pixels.")
