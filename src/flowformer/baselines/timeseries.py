"""Moved to `flowformer.train.methods`, since these classifiers are no attentions; the old imports still work."""

from .._utils import moved

__getattr__ = moved(
    __name__,
    {
        "classifier": "flowformer.train.methods.classifiers.classifier",
        "classifiers": "flowformer.train.methods.classifiers.classifiers",
        "LSTMClassifier": "flowformer.train.methods.lstm.LSTMClassifier",
        "LSTMNetwork": "flowformer.train.methods.lstm.LSTMNetwork",
        "TCNClassifier": "flowformer.train.methods.tcn.TCNClassifier",
        "XGBoostClassifier": "flowformer.train.methods.xgboost.XGBoostClassifier",
    },
)
