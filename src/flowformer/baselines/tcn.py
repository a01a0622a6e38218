"""Moved to `flowformer.train.methods`, since the TCN is no attention; the old imports still work."""

from .._utils import names_from

__getattr__ = names_from(
    __name__,
    {
        "flowformer.train.methods.tcn": (
            "CausalBlock",
            "CausalConv",
            "TemporalEncoder",
            "Triplet",
            "draw_triplet",
            "triplet_loss",
        ),
    },
)
