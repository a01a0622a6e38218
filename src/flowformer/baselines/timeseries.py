"""Deprecation shim, no code: DTW, Rocket, XGBoost, LSTM and TCN are in `train/methods`, by name in `classifiers.py`."""

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
