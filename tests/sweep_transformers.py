"""The sweep over the model types of transformers: which of them `attn_implementation="flow_attention"` serves.

`python tests/sweep_transformers.py` writes what it finds into docs/transformers.md.

Shapes: B batch, N tokens.
"""

from __future__ import annotations

import copy
import inspect
import re
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from small_transformers import PAD, UnavailableError, call, inputs_for, model_class, small_model
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

from flowformer import flow_attention
from flowformer.integrations.transformers import flow_attention_forward
from flowformer.integrations.transformers.served import attention_layers

NAME = "flow_attention"
PAGE = Path(__file__).parent.parent / "docs" / "transformers.md"
MARKERS = "<!-- written by tests/sweep_transformers.py -->", "<!-- to here -->"
# relative to the largest number; some models compute in float32 here and there
TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3}
# why a model is refused, by a part of the message
REFUSALS = {
    "computes its attention itself": "compute their attention themselves",
    "from a list of its own": "compute their attention themselves",
    "attends to another sequence": "attend to another sequence: encoder-decoders",
    "no attention layer": "have no attention layer",
    "which adds to the weights": "add to the weights of a softmax, or choose among them",
    "chooses keys": "add to the weights of a softmax, or choose among them",
    "no linear form": "mask pairs of tokens: biases of relative positions, windows",
    "whether it is causal": "do not say whether they are causal",
}


@dataclass
class Outcome:
    """What became of a model type: served, refused with our message, unavailable, or wrong; and in which group."""

    status: str
    group: str


def classify(model_type: str) -> Outcome:
    """Build the model small, ask for Flow-Attention, and hold it to what served means."""
    try:
        stock, inputs = small_model(model_type)
    except UnavailableError as error:
        return _refused_unseen(model_type) or Outcome("unavailable", str(error))
    _randomize(stock)
    try:
        model = type(stock)._from_config(copy.deepcopy(stock.config), attn_implementation=NAME).to(stock.dtype).eval()
    except Exception as error:
        return _refused(error, stock)
    model.load_state_dict(stock.state_dict())
    try:
        faults = list(_faults(stock, model, inputs))
    except Exception as error:
        return _refused(error)
    return Outcome("wrong", "; ".join(faults)) if faults else Outcome("served", _group(stock, inputs))


def _refused(error: Exception, stock: PreTrainedModel | None = None) -> Outcome:
    """Refused with our message, when the model is built as when its attention is set afterwards."""
    group = next((group for part, group in REFUSALS.items() if part in str(error)), None)
    if NAME not in str(error) or group is None:
        return Outcome("wrong", f"{type(error).__name__}: {error}")
    if stock is not None:
        try:
            stock.set_attn_implementation(NAME)
        except NotImplementedError:
            return Outcome("refused", group)
        return Outcome("wrong", f"set_attn_implementation takes what from_config refuses: {error}")
    return Outcome("refused", group)


def _refused_unseen(model_type: str) -> Outcome | None:
    """Whether a model that no rule can run is refused at any rate, before it is built."""
    try:
        with torch.device("meta"):
            model_class(model_type)._from_config(CONFIG_MAPPING[model_type](), attn_implementation=NAME)
    except Exception as error:
        outcome = _refused(error)
        return outcome if outcome.status == "refused" else None
    return None


def _randomize(model: PreTrainedModel) -> None:
    """Weights that hide nothing: fresh biases are 0 and norms 1. What stands for padding stays 0."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        for module in model.modules():
            if isinstance(module, nn.Embedding) and module.padding_idx is not None:
                module.weight[module.padding_idx] = 0


def _group(stock: PreTrainedModel, inputs: dict[str, Tensor]) -> str:
    sees_ahead = _direction(stock, inputs)
    if sees_ahead is None:
        return "images, sound and others"
    return "text, bidirectional" if sees_ahead else "text, causal"


def _faults(stock: PreTrainedModel, model: PreTrainedModel, inputs: dict[str, Tensor]) -> Iterator[str]:
    """What keeps a model from being served."""
    sees_ahead = _direction(stock, inputs)
    length = inputs["input_ids"].shape[1] if "input_ids" in inputs else 0
    with watched(length, sees_ahead) as errors:
        if not _result(model, _with_mask(stock, inputs)).isfinite().all():
            yield "the result is not finite"
    with watched() as others:
        _run_parts(model, errors)
    errors |= {layer: error for layer, error in others.items() if layer not in errors}
    if not errors:
        yield "no layer called Flow-Attention"
    for error in errors.values():
        if not error <= TOLERANCE[model.dtype]:
            yield f"a layer is {error:.2g} from the op"
    for part in _parts(model):
        missed = [layer for layer in _own_layers(part) if layer not in errors]
        if missed and len(missed) < len(_own_layers(part)):
            yield f"{len(missed)} layers of {type(part).__name__} did not call Flow-Attention"
    if sees_ahead is None:
        return
    if _direction(model, inputs) != sees_ahead:
        yield "it sees tokens ahead, or does not, unlike the model with its own attention"
    if _sees_ahead(model, inputs) and not _sees_ahead(stock, inputs):
        yield "without a mask it sees tokens ahead, unlike the model with its own attention"
    if "attention_mask" in _with_mask(stock, inputs):
        for kept in (slice(3, None), slice(0, -3)):
            yield from _padding_faults(model, inputs, kept, sees_ahead)


def _with_mask(model: PreTrainedModel, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The inputs, and a mask that keeps all tokens if the model takes one."""
    if "input_ids" not in inputs or "attention_mask" not in inspect.signature(model.forward).parameters:
        return inputs
    masked = inputs | {"attention_mask": torch.ones_like(inputs["input_ids"])}
    try:
        call(model, masked)
    except AttributeError:  # of a default config that lacks what the model then asks for
        return inputs
    return masked


def _padding_faults(model: PreTrainedModel, inputs: dict[str, Tensor], kept: slice, sees_ahead: bool) -> Iterator[str]:
    tokens = inputs["input_ids"]
    mask = torch.ones_like(tokens)
    mask[1] = 0
    mask[1, kept] = 1
    padded = inputs | {"input_ids": tokens.masked_fill(mask == 0, PAD), "attention_mask": mask}
    alone = {name: value[1:] for name, value in inputs.items()}
    alone |= {"input_ids": tokens[1:, kept], "attention_mask": mask[1:, kept]}
    side = "right" if kept.start == 0 else "left"
    try:
        with watched(tokens.shape[1], sees_ahead, mask.bool()) as errors:
            together = _result(model, padded)[1:, kept]
    except NotImplementedError as error:
        if re.search(r"takes padding (on the left )?for tokens", str(error)):
            return
        raise
    if not max(errors.values()) <= TOLERANCE[model.dtype]:
        yield f"padded on the {side}, a layer is {max(errors.values()):.2g} from the op"
    if not distance(together, _result(model, alone)) <= TOLERANCE[model.dtype]:
        yield f"padded on the {side}, it is {distance(together, _result(model, alone)):.2g} from the row alone"


def _parts(model: PreTrainedModel) -> list[PreTrainedModel]:
    return [part for part in model.modules() if isinstance(part, PreTrainedModel)]


def _own_layers(model: PreTrainedModel) -> set[nn.Module]:
    """The attention layers that are in no model inside it."""
    inside = {layer for part in _parts(model)[1:] for _, layer in attention_layers(part)}
    return {layer for _, layer in attention_layers(model)} - inside


def _run_parts(model: PreTrainedModel, reached: dict[nn.Module, float]) -> None:
    """Run the models inside that the inputs of the whole did not reach: encoders of images and of sound."""
    for part in _parts(model)[1:]:
        if all(layer in reached for _, layer in attention_layers(part)):
            continue
        for inputs in inputs_for(part):
            try:
                call(part, inputs)
            except Exception as error:
                if NAME in str(error):
                    raise


def _direction(model: PreTrainedModel, inputs: dict[str, Tensor]) -> bool | None:
    """Whether a model sees ahead, with a mask if it takes one: some are causal only then."""
    return _sees_ahead(model, _with_mask(model, inputs))


def _sees_ahead(model: PreTrainedModel, inputs: dict[str, Tensor]) -> bool | None:
    """Whether a token depends on the last one; None where there is no result for every token."""
    tokens = inputs.get("input_ids")
    if tokens is None:
        return None
    result = _result(model, inputs)
    if result.shape[:2] != tokens.shape:
        return None
    changed = torch.cat([tokens[:, :-1], tokens[:, -1:] + 1], 1)
    # experts in float32 may round differently when other tokens are with them; what attention passes on is larger
    return distance(result[:, :-1], _result(model, inputs | {"input_ids": changed})[:, :-1]) > 1e-6


def _result(model: PreTrainedModel, inputs: dict[str, Tensor]) -> Tensor:
    """The first tensor with a row for every token, or else the first there is."""
    found = list(_tensors(call(model, inputs)))
    shape = inputs["input_ids"].shape if "input_ids" in inputs else None
    return next((x for x in found if x.dim() > 2 and x.shape[:2] == shape), found[0])


def _tensors(output) -> Iterator[Tensor]:
    for value in output.values() if isinstance(output, dict) else output:
        if isinstance(value, Tensor) and value.is_floating_point():
            yield value
        elif isinstance(value, dict | tuple | list):
            yield from _tensors(value)


def distance(value: Tensor, truth: Tensor) -> float:
    """The largest difference, relative to the largest number; NaN stays NaN."""
    return ((value - truth).abs().max() / truth.abs().max().clamp_min(1)).item()


@contextmanager
def watched(length: int = 0, sees_ahead: bool | None = None, keep: Tensor | None = None) -> Iterator[dict]:
    """How far each layer that calls Flow-Attention is from the op on its queries, keys and values.

    A layer over as many tokens as the text has must have the direction and the mask (B, N) of the text.
    """
    errors: dict[nn.Module, float] = {}

    def forward(module, query, key, value, attention_mask, **options):
        result, weights = flow_attention_forward(module, query, key, value, attention_mask, **options)
        is_text = query.shape[2] == length and sees_ahead is not None
        is_causal = not sees_ahead if is_text else options.get("is_causal", getattr(module, "is_causal", None))
        mask = keep if is_text and keep is not None and len(keep) == len(query) else None
        grouped = query.shape[1] != key.shape[1]
        truth = flow_attention(
            query, key, value, is_causal=is_causal, query_mask=mask, key_mask=mask, enable_gqa=grouped
        )
        errors[module] = max(errors.get(module, 0.0), distance(result, truth.transpose(1, 2)))
        return result, weights

    ALL_ATTENTION_FUNCTIONS._global_mapping[NAME] = forward
    try:
        yield errors
    finally:
        ALL_ATTENTION_FUNCTIONS._global_mapping[NAME] = flow_attention_forward


def table(outcomes: dict[str, Outcome]) -> str:
    """The outcomes as the page shows them."""
    count = Counter(outcome.status for outcome in outcomes.values())
    rows = [
        f"transformers {transformers.__version__}, torch {torch.__version__.split('+')[0]}: of {len(outcomes)} model "
        f"types, {count['served'] + count['refused'] + count['wrong']} could be tried by rule: "
        f"**{count['served']} served, {count['refused']} refused, {count['wrong']} others**.",
        "",
        "| | types | |",
        "| --- | --- | --- |",
    ]
    for status in ("served", "refused"):
        for group in sorted({outcome.group for outcome in outcomes.values() if outcome.status == status}):
            types = sorted(name for name, outcome in outcomes.items() if outcome == Outcome(status, group))
            rows.append(f"| {status}: {group} | {len(types)} | {', '.join(types)} |")
    return "\n".join(rows)


def page_groups() -> dict[str, Outcome]:
    """The outcomes that the page shows."""
    rows = re.findall(r"^\| (served|refused): (.*?) \| \d+ \| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    return {name: Outcome(status, group) for status, group, names in rows for name in names.split(", ")}


def write(outcomes: dict[str, Outcome]) -> None:
    before, rest = PAGE.read_text().split(MARKERS[0])
    after = rest.split(MARKERS[1])[1]
    PAGE.write_text(f"{before}{MARKERS[0]}\n{table(outcomes)}\n{MARKERS[1]}{after}")


def sweep() -> dict[str, Outcome]:
    outcomes = {}
    for model_type in CONFIG_MAPPING_NAMES:
        outcomes[model_type] = classify(model_type)
        print(model_type, *vars(outcomes[model_type]).values(), flush=True)
    return outcomes


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    write(sweep())
