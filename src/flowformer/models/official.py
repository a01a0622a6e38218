"""Loads the authors' checkpoints into our models, by renaming their weights.

Sizes come from the shapes of the weights. The number of heads, which no shape shows, is an argument with the published
value as default. Every model gets the variant of its release, so it computes the same function as the authors' code.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from .._utils import optional_import, suggestion
from ..nn import FlowAttention
from ..ops import FlowVariant
from .lm import FlowformerLM, LMConfig
from .timeseries import FlowformerTimeSeries, TimeSeriesConfig
from .vision import FlowformerVision, VisionConfig

Weights = Mapping[str, Tensor]
_Model = TypeVar("_Model", bound=nn.Module)

# names of the four projections of an attention, in the releases and here
_PROJECTIONS = {
    rf"{theirs}_projection\.": f"{ours}_proj."
    for theirs, ours in {"query": "q", "key": "k", "value": "v", "out": "out"}.items()
}


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """Read the state dict in a .safetensors, .pt or .pth file. Files with pickled code are refused (weights_only).

    Accepts a plain state dict, or a checkpoint that holds one under "state_dict" or "model". Removes the prefix
    "module." of data-parallel training, and the entries total_ops and total_params that a profiler left in the vision
    release. Also accepts the argparse.Namespace of command-line arguments in fairseq's checkpoints.
    """
    path = Path(path)
    if path.suffix == ".safetensors":
        content: Any = optional_import("safetensors.torch", "hf").load_file(path)
    else:
        with torch.serialization.safe_globals([argparse.Namespace]):
            content = torch.load(path, map_location="cpu", weights_only=True)
    for key in ("state_dict", "model"):
        content = content.get(key, content) if isinstance(content, dict) else content
    if not isinstance(content, dict):
        raise ValueError(
            f"{path} holds a {type(content).__name__}, not a state dict; accepted: a state dict, or a checkpoint that "
            'holds one under "state_dict" or "model".'
        )
    weights = {name.removeprefix("module."): value for name, value in content.items()}
    return {name: value for name, value in weights.items() if not name.endswith(("total_ops", "total_params"))}


def timeseries(weights: Weights, *, num_heads: int = 8) -> FlowformerTimeSeries:
    """Load the classifier of the time-series release."""
    source = _ReleaseWeights("time-series", weights)
    embed_dim, num_features = source["project_inp.weight"].shape
    max_length = source["pos_enc.pe"].shape[0]
    config = TimeSeriesConfig(
        num_features,
        source["output_layer.weight"].shape[0],
        max_length,
        embed_dim=embed_dim,
        num_heads=num_heads,
        **source.depth_and_mlp("encoder.attn_layers", "conv1"),
        # the release does not mask padding in the attention
        mask_padding=False,
        variant=FlowVariant.named("timeseries"),
    )
    names = {
        r"project_inp\.": "embedding.",
        r"pos_enc\.pe": "positions.weight",
        r"encoder\.norm\.": "norm.",
        r"encoder\.attn_layers\.": "layers.",
        r"conv(\d)\.": r"mlp.linear\1.",
        r"norm1\.": "attention_norm.",
        r"norm2\.": "mlp_norm.",
        r"output_layer\.": "head.",
        **_PROJECTIONS,
    }

    # the release has convolutions of width 1 instead of linear layers in its feed-forward networks, and positions of
    # shape (max_length, 1, W)
    def squeeze(name: str, x: Tensor) -> Iterable[tuple[str, Tensor]]:
        axis = {"positions.weight": 1}.get(name, -1)
        return [(name, x.squeeze(axis) if x.dim() == 3 else x)]

    return source.load(FlowformerTimeSeries(config), names, squeeze)


def vision(weights: Weights, *, num_heads: int = 12) -> FlowformerVision:
    """Load the hierarchical classifier of the vision release."""
    source = _ReleaseWeights("vision", weights)
    stages = source.count(r"patch_embed\.(\d+)\.")
    patches = [source[f"patch_embed.{i}.proj.weight"] for i in range(stages)]
    side = round(source["pos_embed"].shape[1] ** 0.5)
    config = VisionConfig(
        image_size=side * patches[0].shape[-1],
        patch_size=patches[0].shape[-1],
        in_channels=patches[0].shape[1],
        num_classes=source["head.weight"].shape[0],
        channels=tuple(patch.shape[0] for patch in patches),
        depths=tuple(source.count(rf"blocks\.{i}\.(\d+)\.") for i in range(stages)),
        num_heads=num_heads,
        mlp_ratio=source["blocks.0.0.mlp.fc1.weight"].shape[0] // patches[0].shape[0],
        variant=FlowVariant.named("vision"),
    )
    names = {
        r"pos_embed": "positions.weight",
        r"(patch_embed\.\d+)\.proj\.": r"\1.",
        r"blocks\.": "stages.",
        r"attn\.proj\.": "attention.out_proj.",
        r"attn\.": "attention.",
        r"norm1\.": "attention_norm.",
        r"norm2\.": "mlp_norm.",
        r"mlp\.fc": "mlp.linear",
        r"gamma": "layer_scale",
    }

    def split(name: str, x: Tensor) -> Iterable[tuple[str, Tensor]]:
        if ".qkv." in name:
            return [(name.replace("qkv", f"{c}_proj"), part) for c, part in zip("qkv", x.chunk(3), strict=True)]
        return [(name, x[0] if name == "positions.weight" else x)]

    return source.load(FlowformerVision(config), names, split)


def gpt(weights: Weights, *, num_heads: int = 12) -> FlowformerLM:
    """Load the language model of the authors' GPT module."""
    source = _ReleaseWeights("GPT", weights)
    vocab_size, embed_dim = source["transformer.wte.weight"].shape
    config = LMConfig(
        vocab_size,
        embed_dim=embed_dim,
        num_heads=num_heads,
        **source.depth_and_mlp("transformer.h", "mlp.c_fc"),
        activation="gelu_tanh",
        positions="learned",
        max_length=source["transformer.wpe.weight"].shape[0],
        scale_embedding=False,
        tie_embedding=False,
        initialisation="gpt",
        variant=FlowVariant.named("core"),
    )
    names = {
        r"transformer\.wte\.": "embedding.",
        r"transformer\.wpe\.": "positions.",
        r"transformer\.h\.": "decoder.layers.",
        r"transformer\.ln_f\.": "norm.",
        r"lm_head\.": "head.",
        r"attn\.": "attention.",
        r"ln_1\.": "attention_norm.",
        r"ln_2\.": "mlp_norm.",
        r"mlp\.c_fc\.": "mlp.linear1.",
        r"mlp\.c_proj\.": "mlp.linear2.",
        **_PROJECTIONS,
    }
    return source.load(FlowformerLM(config), names)


def language(weights: Weights, *, num_heads: int = 8) -> FlowformerLM:
    """Load the language model of the WikiText-103 release, a fairseq checkpoint.

    Token ids are those of fairseq's dictionary: 0 to 3 are <s>, <pad>, </s> and <unk>, followed by the words in the
    order of its dict.txt.
    """
    source = _ReleaseWeights("language", weights)
    embedding = source["decoder.embed_tokens.weight"]
    # fairseq saves tied weights twice
    head = weights.get("decoder.output_projection.weight", embedding)
    tied = torch.equal(head, embedding)
    unused = ["decoder.version", "decoder.embed_positions._float_tensor"]
    unused += ["decoder.output_projection.weight"] if tied else []
    source = _ReleaseWeights("language", {name: value for name, value in weights.items() if name not in unused})
    config = LMConfig(
        embedding.shape[0],
        embed_dim=embedding.shape[1],
        num_heads=num_heads,
        **source.depth_and_mlp("decoder.layers", "fc1"),
        positions="fairseq",
        tie_embedding=tied,
        variant=FlowVariant.named("language"),
    )
    names = {
        r"decoder\.embed_tokens\.": "embedding.",
        r"decoder\.output_projection\.": "head.",
        r"decoder\.layer_norm\.": "norm.",
        r"self_attn\.": "attention.",
        r"self_attn_layer_norm\.": "attention_norm.",
        r"final_layer_norm\.": "mlp_norm.",
        r"fc(\d)\.": r"mlp.linear\1.",
    }
    return source.load(FlowformerLM(config), names)


def rl_attention(weights: Weights, *, num_heads: int = 4) -> FlowAttention:
    """Load the causal attention of the reinforcement-learning release."""
    source = _ReleaseWeights("reinforcement-learning", weights)
    inner_dim, embed_dim = source["query_projection.weight"].shape
    attention = FlowAttention(
        embed_dim, num_heads, head_dim=inner_dim // num_heads, is_causal=True, variant=FlowVariant.named("rl")
    )
    return source.load(attention, _PROJECTIONS)


class _ReleaseWeights:
    """The weights of a checkpoint, with errors that name the release it should come from."""

    def __init__(self, release: str, weights: Weights) -> None:
        self.release, self.weights = release, weights

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.weights:
            raise KeyError(
                f"no {name!r} among the {len(self.weights)} weights{suggestion(name, self.weights)}: this is no "
                f"checkpoint of the {self.release} release."
            )
        return self.weights[name]

    def count(self, pattern: str) -> int:
        """The number of distinct values that the first group of the pattern matches in the names of the weights."""
        return len({match[1] for name in self.weights if (match := re.match(pattern, name))})

    def depth_and_mlp(self, layers: str, linear: str) -> dict[str, Any]:
        """Return num_layers and mlp_dim, the number of layers and the inner width of their feed-forward networks.

        Args:
            layers: name of the list of layers.
            linear: name, within a layer, of the first linear map of the feed-forward network.
        """
        depth = self.count(rf"{re.escape(layers)}\.(\d+)\.")
        return {"num_layers": depth, "mlp_dim": self[f"{layers}.0.{linear}.weight"].shape[0]}

    def load(
        self,
        model: _Model,
        names: Mapping[str, str],
        split: Callable[[str, Tensor], Iterable[tuple[str, Tensor]]] = lambda name, x: [(name, x)],
    ) -> _Model:
        """Load the weights into the model, in their dtype, and return it in evaluation mode.

        Missing, superfluous and misshapen weights are errors.

        Args:
            names: pattern -> replacement; applied to each name in order, at its start or after a dot.
            split: converts a renamed weight to one or several (name, weight) of the model.
        """
        ours: dict[str, Tensor] = {}
        origin: dict[str, str] = {}
        for theirs, value in self.weights.items():
            name = theirs
            for pattern, replacement in names.items():
                name = re.sub(rf"(?:^|(?<=\.)){pattern}", replacement, name)
            for part, x in split(name, value):
                ours[part], origin[part] = x, theirs
        expected = model.state_dict()
        for name, x in ours.items():
            if name not in expected:
                raise ValueError(
                    f"{origin[name]!r} has no place in our {type(model).__name__}{suggestion(name, expected)}: this "
                    f"is no checkpoint of the {self.release} release, or one of another version of it."
                )
            if x.shape != expected[name].shape:
                raise ValueError(
                    f"{origin[name]!r} is {tuple(x.shape)}, but {name!r} of our {type(model).__name__} is "
                    f"{tuple(expected[name].shape)}. The number of heads is an argument."
                )
        missing = sorted(expected.keys() - ours.keys())
        if missing:
            raise ValueError(
                f"the {self.release} checkpoint has no weight for {len(missing)} of ours: {', '.join(missing[:3])} …"
            )
        model.to(next(iter(ours.values())).dtype).load_state_dict(ours)
        return model.eval()
