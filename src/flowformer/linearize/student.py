"""`linearize`, and the student that it makes of a model."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedModel

from ..integrations.transformers.cache import NAME
from ..integrations.transformers.linearized_heads import KEPT, FlowHeads
from ..integrations.transformers.served import attach_heads, attention_layers, is_flow, parts_of, prepare
from .config import LinearizeConfig

if TYPE_CHECKING:
    from .transfer import Report, TransferReport


def linearize(model: PreTrainedModel, tokenizer: Any = None, config: LinearizeConfig | None = None) -> Student:
    """Exchange the softmax attention of a model of transformers for Flow-Attention, in place.

    All weights are kept and nothing is trained: the model has to learn what its attention does now, see
    `Student.transfer`. Any model is served whose attention transformers looks up by name; others are refused.

    Args:
        model: a decoder or an encoder, with its softmax attention.
        tokenizer: of the model; None looks for one where the model was loaded from, when text is to be read.
        config: what takes the place of softmax; None is the default.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = {"vocab_size": 11, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    >>> student = linearize(LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2)))
    >>> student.model.model.layers[0].self_attn.flow.exchange.features
    'hedgehog'
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"linearize takes a model of transformers, got {type(model).__name__}. For modules of torch there is "
            "flowformer.nn.replace_attention."
        )
    if model.config.model_type == "flowformer" or is_flow(model.config):
        raise ValueError(f"this {type(model).__name__} has Flow-Attention already; linearize takes a softmax model.")
    _check_weights(model)
    softmax = model.config._attn_implementation
    student = Student(model, tokenizer, softmax if softmax in ("sdpa", "eager") else "sdpa")
    model.set_attn_implementation(NAME)
    try:
        student.exchange(config or LinearizeConfig())
    except Exception:
        student.withdraw()
        model.set_attn_implementation(softmax)
        raise
    return student


def _check_weights(model: PreTrainedModel) -> None:
    """Refuse packed weights; forget that plain ones were packed in their file, as those of GGUF are."""
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is None:
        return
    if not all(parameter.is_floating_point() for parameter in model.parameters()):
        raise NotImplementedError(
            f"this {type(model).__name__} has quantised weights, into which nothing can be merged. Load it without a "
            "quantization_config; a GGUF file with GgufConfig(dequantize=True)."
        )
    quantizer.remove_quantization_config(model)


class Student:
    """A model with Flow-Attention that can learn from what it was before. What it lacks it takes from its model.

    Args:
        model: with the exchanged attention.
        softmax: the attn_implementation of its teacher.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: Any, softmax: str) -> None:
        self.model, self.softmax = model, softmax
        self._tokenizer = tokenizer
        self.config_of_exchange = LinearizeConfig()
        self.trained = False

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "model" not in vars(self):
            raise AttributeError(name)
        return getattr(self.model, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)

    def __repr__(self) -> str:
        exchange = self.config_of_exchange.exchange
        return f"Student({type(self.model).__name__}, {len(self.layers)} attention layers, {exchange})"

    @property
    def layers(self) -> list[nn.Module]:
        """The attention layers, in order."""
        return [layer for _, layer in attention_layers(self.model)]

    @property
    def heads(self) -> list[FlowHeads]:
        """What is learned of the attention of each layer that does not stay softmax."""
        return [layer.flow for layer in self.layers if layer.flow != KEPT]  # type: ignore[misc]

    @property
    def is_decoder(self) -> bool:
        """Whether its tokens see only those before them."""
        return any(getattr(layer, "is_causal", False) is True for layer in self.layers)

    @property
    def is_language_model(self) -> bool:
        """Whether it predicts the next token; of any other model, hidden states are what is learned."""
        return self.is_decoder and self.model.get_output_embeddings() is not None

    @property
    def longest(self) -> int:
        """How many tokens the model has positions for."""
        config = self.model.config.get_text_config()
        positions = getattr(config, "max_position_embeddings", None)
        if not isinstance(positions, int) or positions < 1:
            return sys.maxsize
        padding = getattr(self.model, "_flow_padding", None)  # RoBERTa and its like count from the one after it
        return positions if padding is None else positions - padding - 1

    @property
    def tokenizer(self) -> Any:
        """That of the model, or None where there is none."""
        if self._tokenizer is None and self.model.name_or_path:
            try:
                self._tokenizer = AutoTokenizer.from_pretrained(self.model.name_or_path)
            except (OSError, ValueError, KeyError, ImportError):
                return None
        return self._tokenizer

    def exchange(self, config: LinearizeConfig) -> None:
        """Give every attention layer new heads, as the config says; refused once they have learned."""
        if self.trained and config.exchange != self.config_of_exchange.exchange:
            raise ValueError(
                f"this student has learned with {self.config_of_exchange.exchange} and cannot go on with "
                f"{config.exchange}. Linearize the model again."
            )
        stacks = {id(part.config) for part in parts_of(self.model) if is_flow(part.config)}
        if config.keep_layers and len(stacks) > 1:
            raise NotImplementedError(
                f"keep_layers counts the layers of one stack, but {type(self.model).__name__} has {len(stacks)}. Keep "
                "whole parts instead: linearize the part that is to change."
            )
        self.config_of_exchange = config
        if self.trained:
            return
        self.withdraw()
        for part in parts_of(self.model):
            if is_flow(part.config) and any(attention_layers(part)):
                part.config.flow_attention = config.exchange.to_dict()
                attach_heads(part, device=part.device)
                prepare(part)
        if not self.heads:
            raise ValueError(f"keep_layers={config.keep_layers} keeps every attention layer: nothing is exchanged.")

    def withdraw(self) -> None:
        """Take the heads from every layer."""
        for part in parts_of(self.model):
            vars(part.config).pop("flow_attention", None)
        for layer in self.layers:
            if hasattr(layer, "flow"):
                del layer.flow

    def takes(self, argument: str) -> bool:
        """Whether the model has such an argument."""
        return argument in inspect.signature(self.model.forward).parameters

    def transfer(
        self,
        texts: Iterable[str | Tensor | Mapping[str, Tensor]],
        config: LinearizeConfig | None = None,
        *,
        evaluate: Iterable[str | Tensor] | None = None,
        folder: str | Path | None = None,
        resume: bool = False,
        report: Report | None = None,
    ) -> TransferReport:
        """Learn from the softmax model that this was: first each attention by itself, then all together.

        Stage 1 runs the teacher once; each attention layer gets the teacher's queries, keys and values and learns its
        result. Stage 2 runs teacher and student on the same rows, the teacher being the same weights with softmax and
        without the low-rank update; the student learns its distribution of the next token (encoders without a head:
        its last hidden states). Afterwards the update is merged into the weights: there is no teacher any more.

        Args:
            texts: documents: strings, or 1-d tensors of tokens. Or batches: dictionaries of inputs of the model, such
                as {"pixel_values": …}.
            config: None is that of `linearize`.
            evaluate: documents that are not learned from, on which teacher and student are compared after each stage.
            folder: for checkpoints, the log, curves for tensorboard and a page of results; None keeps nothing.
            resume: goes on from the checkpoint of the folder, if there is one.
            report: is called with a record of each event.
        """
        from .transfer import transfer

        return transfer(self, texts, config or self.config_of_exchange, evaluate, folder, resume, report)

    def save_pretrained(self, path: str | Path, **options: Any) -> None:
        """Save the model, which `from_pretrained` loads wherever flowformer.integrations.transformers is imported."""
        self.model.save_pretrained(path, **options)
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(path)
