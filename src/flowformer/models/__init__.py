"""The paper's five model families, built from `flowformer.nn`; `official` loads the authors' checkpoints into them."""

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
