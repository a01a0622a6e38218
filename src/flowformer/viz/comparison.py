"""The paper's comparison of attentions: the weights of the sources, for the same images or series, side by side.

Shapes: B examples, N tokens, C channels, Y × X pixels, H heads, L layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from ..models.base import FlowModel
from ..nn import Degeneracy, is_flow, record_maps, record_matrices
from .maps import image_panels, over_pixels


@torch.no_grad()
def source_weights(model: FlowModel, *inputs: Any, layer: int = -1) -> Tensor:
    """The weight of each source, (B, N), averaged over the heads, as plotted in the paper.

    For Flow-Attention this is the competition; for others the total weight that a source gets from all sinks.

    Args:
        model: with any attention, in evaluation mode.
        inputs: what the model takes.
        layer: whose weights.
    """
    if is_flow(model.config.attention):
        with record_maps(model) as flows:
            model(*inputs)
        return flows[layer].competition.float().mean(1)
    with record_matrices(model) as matrices:
        model(*inputs)
    return matrices[layer].column_sums.float().mean(1)


def degeneracies(models: Mapping[str, FlowModel], *inputs: Any, top: float = 0.1) -> dict[str, list[Degeneracy]]:
    """How degenerate the attention of each model is in each layer, by name; see `nn.MatrixMaps.degeneracy`.

    Args:
        models: by the name to give them, in evaluation mode.
        inputs: what they take.
    """
    found = {}
    for name, model in models.items():
        with torch.no_grad(), record_matrices(model) as matrices:
            model(*inputs)
        found[name] = [maps.degeneracy(top) for maps in matrices]
    return found


def compare_over_images(
    models: Mapping[str, FlowModel], images: Tensor, shown: Tensor, *, titles: Sequence[str] = (), layer: int = -1
) -> Figure:
    """Images, and beside each the weights of its patches in every model, each map scaled from minimum to maximum.

    Args:
        models: by the name above their column, as {"Flowformer": …, "Transformer": …}.
        images: (B, 3, Y, X), as the models take them.
        shown: (B, 3, Y, X) from 0 to 1, as a reader sees them.
        titles: one per image, or none.
        layer: whose weights.
    """
    weights = {name: source_weights(model, images, layer=layer).cpu() for name, model in models.items()}
    figure = Figure(figsize=(2.1 * (1 + len(models)), 2.2 * len(images)), layout="constrained")
    panels = image_panels(figure, shown, 1 + len(models), titles)
    for column, (name, values) in zip(panels.T[1:], weights.items(), strict=True):
        column[0].set_title(name, fontsize=9)
        smooth, _ = over_pixels(values, *images.shape[2:])
        for panel, picture in zip(column, smooth, strict=True):
            panel.imshow(picture.numpy(), cmap="inferno", alpha=0.6)
    return figure


def compare_over_time(
    models: Mapping[str, FlowModel],
    series: Tensor,
    mask: Tensor | None = None,
    *,
    titles: Sequence[str] = (),
    layer: int = -1,
) -> Figure:
    """Time series, and below each the weights of its steps in every model, relative to the mean over the steps.

    Args:
        models: by the name in the legend.
        series: (B, N, C), a column of panels each.
        mask: (B, N) bool, True = takes part.
        titles: one per series, or none.
        layer: whose weights.
    """
    weights = {name: source_weights(model, series, mask, layer=layer).cpu() for name, model in models.items()}
    lengths = [series.shape[1]] * len(series) if mask is None else mask.sum(1).tolist()
    figure = Figure(figsize=(3.6 * len(series), 1.3 * (1.5 + len(models))), layout="constrained")
    heights = [1.5, *(1.0 for _ in models)]
    panels = figure.subplots(
        1 + len(models), len(series), squeeze=False, sharex="col", gridspec_kw={"height_ratios": heights}
    )
    for i, column in enumerate(panels.T):
        steps = range(lengths[i])
        column[0].plot(steps, series[i, : lengths[i]].cpu().numpy(), linewidth=0.8, alpha=0.7)
        column[0].set_title(titles[i] if titles else "", fontsize=10)
        for number, (panel, (name, values)) in enumerate(zip(column[1:], weights.items(), strict=True)):
            row = values[i, : lengths[i]]
            panel.plot(steps, (row / row.mean()).numpy(), color=f"C{number}")
            panel.axhline(1, color="grey", linewidth=0.6, linestyle=":")
            panel.set_ylabel(name, fontsize=8)
            panel.tick_params(labelsize=7)
        column[-1].set_xlabel("step", fontsize=8)
    return figure
