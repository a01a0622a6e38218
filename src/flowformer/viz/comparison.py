"""The paper's comparison of attentions: source weights of several models on the same images or series.

Shapes: B examples, N tokens, C channels, Y × X pixels, H heads, L layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from ..models.base import FlowModel
from ..nn import Degeneracy, MatrixMaps, is_flow, record_maps, record_matrices
from .maps import image_panels, over_pixels


@torch.no_grad()
def source_weights(model: FlowModel, *inputs: Any, layer: int = -1) -> Tensor:
    """Return the weight of each source, (B, N), averaged over the heads, as plotted in the paper.

    For Flow-Attention this is the competition; for other attentions, the sum of a source's weights over all sinks.

    Args:
        model: a model with any attention, in evaluation mode.
        inputs: inputs of the model.
        layer: index of the layer.
    """
    if is_flow(model.config.attention):
        with record_maps(model) as flows:
            model(*inputs)
        return flows[layer].competition.float().mean(1)
    with record_matrices(model) as matrices:
        model(*inputs)
    return matrices[layer].column_sums.float().mean(1)


def degeneracies(
    models: Mapping[str, FlowModel], *inputs: Tensor | None, top: float = 0.1, batch_size: int = 16
) -> dict[str, list[Degeneracy]]:
    """Measure how degenerate the attention of each model is in each layer; see `nn.MatrixMaps.degeneracy`.

    Args:
        models: models by name, in evaluation mode.
        inputs: inputs of every model, None or with one row per example.
        top: fraction of the sources that count as the top, whose share of the total weight is measured.
        batch_size: examples at a time. It limits the memory, and the result does not depend on it.
    """
    count = next(len(x) for x in inputs if x is not None)
    by_model = {}
    for name, model in models.items():
        batches = []
        for start in range(0, count, batch_size):
            part = [x if x is None else x[start : start + batch_size] for x in inputs]
            with torch.no_grad(), record_matrices(model) as layers:
                model(*part)
            batches.append(layers)
        # joined, not averaged over batches: evenness is a mean over rows, of which long series have more
        joined = (MatrixMaps(*map(torch.cat, zip(*maps, strict=True))) for maps in zip(*batches, strict=True))
        by_model[name] = [maps.degeneracy(top) for maps in joined]
    return by_model


def compare_over_images(
    models: Mapping[str, FlowModel], images: Tensor, shown: Tensor, *, titles: Sequence[str] = (), layer: int = -1
) -> Figure:
    """Draw a row per image: the image, then the source weights of its patches in each model.

    Each map is scaled from its minimum to its maximum.

    Args:
        models: models by column title, such as {"Flowformer": …, "Transformer": …}, in evaluation mode.
        images: (B, 3, Y, X), inputs of the models.
        shown: (B, 3, Y, X), the same images as they are drawn, with values from 0 to 1.
        titles: one per image, or empty.
        layer: index of the layer.
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
    """Draw a column per time series: the series, then the source weights of its steps in each model.

    Weights are relative to their mean over the steps.

    Args:
        models: models by the label of their row, in evaluation mode.
        series: (B, N, C).
        mask: (B, N) bool, True = takes part.
        titles: one per series, or empty.
        layer: index of the layer.
    """
    weights = {name: source_weights(model, series, mask, layer=layer).cpu() for name, model in models.items()}
    present = torch.ones(series.shape[:2], dtype=torch.bool) if mask is None else mask.cpu()
    figure = Figure(figsize=(3.6 * len(series), 1.3 * (1.5 + len(models))), layout="constrained")
    heights = [1.5, *(1.0 for _ in models)]
    panels = figure.subplots(
        1 + len(models), len(series), squeeze=False, sharex="col", gridspec_kw={"height_ratios": heights}
    )
    for i, column in enumerate(panels.T):
        steps = range(int(present[i].sum()))
        column[0].plot(steps, series[i].cpu()[present[i]].numpy(), linewidth=0.8, alpha=0.7)
        column[0].set_title(titles[i] if titles else "", fontsize=10)
        for number, (panel, (name, values)) in enumerate(zip(column[1:], weights.items(), strict=True)):
            row = values[i, present[i]]
            panel.plot(steps, (row / row.mean()).numpy(), color=f"C{number}")
            panel.axhline(1, color="grey", linewidth=0.6, linestyle=":")
            panel.set_ylabel(name, fontsize=8)
            panel.tick_params(labelsize=7)
        column[-1].set_xlabel("step", fontsize=8)
    return figure
