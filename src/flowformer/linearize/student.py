"""`linearize`, and the `Student` it returns."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedModel

from ..integrations.transformers.cache import NAME
from ..integrations.transformers.linearized_heads import KEPT_SOFTMAX, FlowHeads
from ..integrations.transformers.served import attach_heads, attention_layers, is_flow, parts_of, prepare
from .config import LinearizeConfig

if TYPE_CHECKING:
    from .transfer import Report, TransferReport


def linearize(model: PreTrainedModel, tokenizer: Any = None, config: LinearizeConfig | None = None) -> Student:
    """Replace the softmax attention of a transformers model by Flow-Attention, in place.

    All weights are kept and nothing is trained yet; train the student with `Student.transfer`. Models that look up
    their attention function by name (`attn_implementation`) are served; others are refused.

    Args:
        model: a decoder or an encoder with softmax attention.
        tokenizer: tokenizer of the model. None loads one from `model.name_or_path` when text is passed to `transfer`.
        config: the new attention; None is `LinearizeConfig()`.

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
    """Refuse quantised weights. If the weights were dequantised on loading (GGUF), drop the quantization config."""
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
    """A model with Flow-Attention that can be distilled from its softmax original.

    Attributes that a Student lacks are looked up on `model`.

    Args:
        model: the model with Flow-Attention.
        tokenizer: tokenizer of the model, or None.
        softmax: attn_implementation of the teacher.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: Any, softmax: str) -> None:
        self.model, self.softmax = model, softmax
        self._tokenizer = tokenizer
        self.config_of_exchange = LinearizeConfig()
        self.trained = False
        self.merged = False  # whether LoRA updates were merged into the weights, which are then not the teacher's

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
        """The new parameters of each attention layer, without the layers in `keep_layers`."""
        return [layer.flow for layer in self.layers if layer.flow != KEPT_SOFTMAX]  # type: ignore[misc]

    @property
    def is_decoder(self) -> bool:
        """Whether any attention layer is causal."""
        return any(getattr(layer, "is_causal", False) is True for layer in self.layers)

    @property
    def is_language_model(self) -> bool:
        """Whether the model predicts the next token. Other models are trained to match the teacher's outputs."""
        return self.is_decoder and self.model.get_output_embeddings() is not None

    @property
    def longest(self) -> int:
        """Largest number of tokens the model has positions for; sys.maxsize if unlimited."""
        config = self.model.config.get_text_config()
        positions = getattr(config, "max_position_embeddings", None)
        if not isinstance(positions, int) or positions < 1:
            return sys.maxsize
        # RoBERTa and similar models number their first token padding_idx + 1
        padding = getattr(self.model, "_flow_padding", None)
        return positions if padding is None else positions - padding - 1

    @property
    def tokenizer(self) -> Any:
        """The tokenizer passed to `linearize`, or else the one found at `model.name_or_path`; None if there is none."""
        if self._tokenizer is None and self.model.name_or_path:
            try:
                self._tokenizer = AutoTokenizer.from_pretrained(self.model.name_or_path)
            except (OSError, ValueError, KeyError, ImportError):
                return None
        return self._tokenizer

    def exchange(self, config: LinearizeConfig) -> None:
        """Give every attention layer fresh `FlowHeads`. After training, a different exchange is refused."""
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
        """Remove the `FlowHeads` from every layer, and the exchange from the configs."""
        for part in parts_of(self.model):
            vars(part.config).pop("flow_attention", None)
        for layer in self.layers:
            if hasattr(layer, "flow"):
                del layer.flow

    def takes(self, argument: str) -> bool:
        """Whether the model's forward has this argument."""
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
        """Distil the softmax model into this student: first each attention layer alone, then the whole model.

        Stage 1 runs the teacher only. Each attention layer computes Flow-Attention from the teacher's queries, keys and
        values and learns to reproduce the softmax result. Stage 2 runs teacher and student on the same rows; the
        student learns the teacher's next-token distribution, or its last hidden states if the model has no head. The
        teacher is the same weights with softmax and without the LoRA updates. At the end the updates are merged into
        the weights, after which the teacher no longer exists.

        Args:
            texts: documents (strings, or 1-d tensors of token ids), or batches (dictionaries of model inputs, such as
                {"pixel_values": …}).
            config: None is the config passed to `linearize`.
            evaluate: held-out documents on which teacher and student are compared after each stage.
            folder: where to write checkpoints, the log, tensorboard curves and the results page; None writes nothing.
            resume: continue from the checkpoint in the folder, if there is one.
            report: called with a dict for each update and each finished stage.
        """
        from .transfer import transfer

        return transfer(self, texts, config or self.config_of_exchange, evaluate, folder, resume, report)

    def save_pretrained(self, path: str | Path, **options: Any) -> None:
        """Save model and tokenizer.

        Import flowformer.integrations.transformers before loading them with `from_pretrained`.
        """
        self.model.save_pretrained(path, **options)
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(path)
