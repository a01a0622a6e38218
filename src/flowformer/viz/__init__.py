"""Figures: the paper's maps of a trained model, training curves, and speeds of benchmarks. Requires matplotlib."""

from .comparison import compare_over_images, compare_over_time, degeneracies, source_weights
from .curves import speed_bars, speed_curves, speed_figure, training_curves
from .maps import over_images, over_time

__all__ = [
    "compare_over_images",
    "compare_over_time",
    "degeneracies",
    "over_images",
    "over_time",
    "source_weights",
    "speed_bars",
    "speed_curves",
    "speed_figure",
    "training_curves",
]
