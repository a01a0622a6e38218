"""Moved to `flowformer.train.methods`, since these classifiers are no attentions; the old imports still work."""

from .._utils import names_from

__getattr__ = names_from(
    __name__,
    {
        "flowformer.train.methods.classifiers": ("classifier", "classifiers"),
        "flowformer.train.methods.lstm": ("LSTMClassifier", "LSTMNetwork"),
        "flowformer.train.methods.tcn": ("TCNClassifier",),
        "flowformer.train.methods.xgboost": ("XGBoostClassifier",),
    },
)
