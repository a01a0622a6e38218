"""The paper's five model families, on `flowformer.nn`; `official` reads the authors' weights into them."""

from .classifier import ClassifierConfig, FlowformerClassifier, FlowformerPairClassifier
from .counts import Counts, count
from .decision import DecisionConfig, FlowformerDecision
from .lm import FlowformerLM, LMConfig
from .timeseries import FlowformerTimeSeries, TimeSeriesConfig
from .vision import DeiTConfig, FlowformerDeiT, FlowformerVision, VisionConfig

__all__ = [
    "ClassifierConfig",
    "Counts",
    "DecisionConfig",
    "DeiTConfig",
    "FlowformerClassifier",
    "FlowformerDecision",
    "FlowformerDeiT",
    "FlowformerLM",
    "FlowformerPairClassifier",
    "FlowformerTimeSeries",
    "FlowformerVision",
    "LMConfig",
    "TimeSeriesConfig",
    "VisionConfig",
    "count",
]
