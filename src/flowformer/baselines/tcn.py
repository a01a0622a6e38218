"""Deprecation shim, no code: the TCN is `flowformer.train.methods.tcn`."""

from .._utils import moved

__getattr__ = moved(
    __name__,
    {
        "CausalBlock": "flowformer.train.methods.tcn.CausalBlock",
        "CausalConv": "flowformer.train.methods.tcn.CausalConv",
        "TemporalEncoder": "flowformer.train.methods.tcn.TemporalEncoder",
        "Triplet": "flowformer.train.methods.tcn.Triplet",
        "draw_triplet": "flowformer.train.methods.tcn.draw_triplet",
        "triplet_loss": "flowformer.train.methods.tcn.triplet_loss",
    },
)
