"""The paper's figures from a trained model, and the curves of runs and benchmarks; needs matplotlib."""

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
