"""The Long-Range Arena's settings for each rival attention, which `preset=benchmark` applies to a recipe.

The paper copies the scores of its rivals from that benchmark, where depth, width and number of heads differ between
the rivals, and from the Flowformer. Without the preset, a recipe has one size for all attentions.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from ..models import ClassifierConfig
from .config import TrainConfig


class Sizes(NamedTuple):
    num_layers: int
    num_heads: int
    embed_dim: int
    qkv_dim: int
    mlp_dim: int


# options of the attentions that the benchmark compares
OPTIONS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "local": {"window": 50},
    "linear": {},
    "reformer": {"rounds": 1, "buckets": 10},
    "sparse": {"stride": 50, "summary": 10},
    "sinkhorn": {"block": 50},
    "linformer": {"rank": 16},
    "performer-relu": {},
    "synthesizer": {"dot_product": True},
    "longformer": {"window": 512, "global_tokens": 0},
    "bigbird": {"block": 64, "window": 3, "random": 3},
}
# tasks in which all rivals have the same size
SHARED = {
    "listops": Sizes(4, 8, 512, 512, 1024),
    "text": Sizes(4, 4, 256, 256, 1024),
    "retrieval": Sizes(4, 4, 128, 128, 512),
}
_WIDE = Sizes(1, 8, 128, 64, 128)
IMAGE = {
    **dict.fromkeys(("softmax", "linear", "sparse", "linformer", "performer-relu", "synthesizer"), _WIDE),
    "local": Sizes(1, 2, 128, 64, 128),
    "reformer": Sizes(4, 8, 64, 32, 64),
    "sinkhorn": Sizes(1, 1, 32, 32, 64),
    "longformer": Sizes(4, 4, 128, 64, 128),
    "bigbird": Sizes(1, 4, 128, 64, 128),
}
PATHFINDER = {
    "softmax": Sizes(4, 4, 32, 16, 32),
    "local": Sizes(2, 4, 64, 32, 64),
    "linear": Sizes(1, 2, 128, 64, 128),
    "reformer": Sizes(2, 8, 64, 32, 64),
    "sparse": Sizes(1, 8, 32, 16, 32),
    "sinkhorn": Sizes(2, 4, 32, 16, 64),
    "linformer": Sizes(1, 2, 32, 16, 32),
    "performer-relu": Sizes(4, 8, 32, 16, 32),
    "synthesizer": Sizes(2, 4, 64, 32, 64),
    "longformer": Sizes(2, 2, 32, 16, 32),
    "bigbird": Sizes(4, 2, 64, 32, 64),
}
# other differences from the recipe
MODEL: dict[tuple[str, str], dict[str, Any]] = {
    ("image", "local"): {"pooling": "mean"},
    ("image", "longformer"): {"pooling": "mean"},
    ("image", "sinkhorn"): {"dropout": 0.1},
    ("pathfinder", "local"): {"dropout": 0.1},
    ("pathfinder", "longformer"): {"dropout": 0.1},
}
WEIGHT_DECAY = {("image", "sinkhorn"): 0.7}
RATES = {"listops": 0.05, "text": 0.05, "retrieval": 0.05, "image": 5e-4, "pathfinder": 1e-3}


def options_of(recipe: str) -> dict[str, dict[str, Any]]:
    """The options of each attention that the benchmark has for a recipe; empty for recipes of other data."""
    task = _task(recipe)
    if task not in RATES:
        return {}
    # the benchmark's Performer has two random features on ListOps, and ReLU features (performer-relu) elsewhere
    return {**OPTIONS, "performer": {"features": 2}} if task == "listops" else OPTIONS


def _task(recipe: str) -> str:
    return {"acl": "retrieval"}.get(recipe, recipe.partition("@")[0].removeprefix("lra/"))


def benchmark(config: TrainConfig) -> TrainConfig:
    """Return the config with the benchmark's model size, attention options and learning rate for its attention.

    Defects of the benchmark's code are not reproduced: blocks are contiguous, and BigBird on images has four heads,
    which the benchmark sets under a misspelt key. Positions and padding stay as in the recipe.
    """
    task, model, options = _task(config.recipe), config.model, options_of(config.recipe)
    if not options or not isinstance(model, ClassifierConfig):
        raise ValueError(
            f"{config.recipe} is not of the Long-Range Arena; preset=benchmark is for {', '.join(RATES)} and acl."
        )
    if model.attention not in options:
        raise ValueError(
            f"the benchmark has no {model.attention} attention for {task}; accepted: attention={', '.join(options)}."
        )
    chosen = dict(options[model.attention])
    if task in SHARED:
        sizes = SHARED[task]
    else:
        sizes = {"image": IMAGE, "pathfinder": PATHFINDER}[task][model.attention]
        chosen |= {"local": {"window": 64}, "sinkhorn": {"block": 64}}.get(model.attention, {})
    model_changes = MODEL.get((task, model.attention), {})
    decay = WEIGHT_DECAY.get((task, model.attention), config.optimiser.weight_decay)
    return replace(
        config,
        preset="benchmark",
        model=replace(model, **sizes._asdict(), **model_changes, attention_options=chosen),
        optimiser=replace(config.optimiser, lr=RATES[task], weight_decay=decay),
    )
