"""The paper's figures from a trained model, and the curves of runs and benchmarks; needs matplotlib."""

from .curves import speed_bars, speed_curves, speed_figure, training_curves
from .maps import over_images, over_time

__all__ = ["over_images", "over_time", "speed_bars", "speed_curves", "speed_figure", "training_curves"]
