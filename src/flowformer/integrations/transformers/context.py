"""Context parallelism for transformers models: each rank holds a contiguous part of every sequence.

The mesh and the sharded parameters of accelerate's `ParallelismConfig(cp_size=…)` can be used with it. accelerate's
`maybe_context_parallel` cannot: to balance causal softmax it gives each rank one piece from the start and one from the
end of a sequence, and it patches `scaled_dot_product_attention`, which Flow-Attention does not call.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss, ForMaskedLMLoss

from ...models.lm import IGNORED, FlowformerLM, next_tokens
from .cache import NAME
from .linearized_heads import KEPT_SOFTMAX, FlowHeads

if TYPE_CHECKING:
    from ...ops.context.exchange import Group

# endings of the class names that are accepted: models without a head, and models that score each token
SERVED = ("Model", "ForCausalLM", "ForMaskedLM")
# layers besides attention that mix the tokens of a sequence
MIXERS = re.compile("Mamba|SSM|Recurrent|ShortConv|DeltaNet|RWKV")


def cut_sequences(model: nn.Module, group: Group | None) -> None:
    """Make a model treat its inputs as this rank's part of longer sequences, which are cut over a group in rank order.

    Positions continue from rank to rank, and the target of a rank's last token is the first token of the next rank. The
    loss is this rank's share: its sum over the ranks is the mean over all tokens. Sum the gradients over the group; DDP
    and FSDP average them, so multiply the loss by the number of ranks.

    Args:
        model: a transformers model, wrapped or not: a Flowformer, or one with attn_implementation="flow_attention".
        group: as for `flow_attention`, such as `accelerator.torch_device_mesh["cp"]`; None returns to whole sequences.
    """
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    if not parts:
        raise TypeError(f"cut_sequences takes a model of transformers, got {type(model).__name__}.")
    if group is not None:
        from ...ops.context.exchange import process_group  # here, since torch may be built without torch.distributed

        process_group(group)
        _check(parts)
    for part in parts:
        part._flow_group = group  # type: ignore[assignment]
        vars(part).pop("_loss_function", None)
        if group is not None and _has_loss(part):
            part.loss_function = partial(_cut_loss, group, part.loss_function)
        for module in part.modules():
            if isinstance(module, FlowformerLM):
                module.cut_sequences(group)
            elif re.search("Attention|Attn", type(module).__name__):
                module._flow_group = group  # type: ignore[assignment]


def group_of(module: nn.Module) -> Group | None:
    """Return the group over which the sequences of a model or an attention layer are cut, or None."""
    check_order()
    return getattr(module, "_flow_group", None)


def check_order() -> None:
    """Refuse to run inside torch's context parallelism, which reorders the tokens."""
    if (getattr(F.scaled_dot_product_attention, "__module__", None) or "").startswith("torch.distributed"):
        raise NotImplementedError(
            "Flow-Attention cannot run inside torch's context_parallel, accelerate's maybe_context_parallel or a "
            "Trainer with cp_size: they rearrange tokens and serve scaled_dot_product_attention only. Call "
            "flowformer.integrations.transformers.cut_sequences(model, accelerator.torch_device_mesh['cp']) once, and "
            "pass each rank its part of the tokens; docs/long-context.md has an example."
        )


def check_padding(mask: Tensor | None) -> None:
    """Refuse padding with accelerate's cp_size, which drops the masks of attention layers."""
    accelerate = sys.modules.get("accelerate.state")
    config = None if accelerate is None else accelerate.AcceleratorState._shared_state.get("parallelism_config")
    if mask is not None and config is not None and config.cp_enabled and not mask.all():
        raise NotImplementedError(
            "got padding and accelerate's ParallelismConfig(cp_size=…), which drops the masks of attention layers. "
            "Pass rows of one length, or cut sequences over a mesh of your own, without cp_size."
        )


def check_labels(model: PreTrainedModel, labels: Tensor | None) -> None:
    """Refuse labels of a cut sequence if the model computes its own loss, which would cover this rank's tokens only."""
    if labels is not None and not _has_loss(model):
        raise NotImplementedError(
            f"{type(model).__name__} computes its loss itself, over the tokens of this rank alone. Pass no labels, and "
            "compute the loss from the logits."
        )


def _has_loss(model: PreTrainedModel) -> bool:
    """Whether a model calls `self.loss_function`, in `forward` or (Flowformer models) in `_score`."""
    methods = (type(model).forward, getattr(type(model), "_score", None))
    return any(m is not None and "loss_function" in inspect.unwrap(m).__code__.co_names for m in methods)


def _cut_loss(group: Group, function: Callable, logits: Tensor, labels: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Compute a loss of transformers whose targets cross rank boundaries, divided by the target count of all ranks."""
    from ...ops.context.exchange import sum_over_ranks

    if function is ForCausalLMLoss:
        targets = kwargs.pop("shift_labels", None)
        targets = next_tokens(labels, None, group) if targets is None else targets
        kwargs["shift_labels"] = targets.contiguous()
    elif function is ForMaskedLMLoss:
        targets = labels = labels.contiguous()
    else:
        raise NotImplementedError(
            f"{getattr(function, '__name__', function)} of sequences cut over ranks is not implemented. Pass no "
            "labels, and compute the loss from the logits."
        )
    if kwargs.get("num_items_in_batch") is None:
        kwargs["num_items_in_batch"] = sum_over_ranks((targets != IGNORED).sum(), group).clamp_min(1)
    return function(logits, labels, *args, **kwargs)


def _check(parts: list[PreTrainedModel]) -> None:
    """Raise if the sequences of a model cannot be cut."""
    for part in parts:
        name, config = type(part).__name__, part.config.get_text_config()
        if config.model_type != "flowformer" and config._attn_implementation != NAME:
            raise ValueError(
                f'{name} has attn_implementation="{config._attn_implementation}", which cannot be cut over ranks here; '
                f'build it with attn_implementation="{NAME}".'
            )
        reason = _obstacle(part, config)
        if reason is not None:
            raise NotImplementedError(f"the sequences of {name} cannot be cut over ranks: {reason}.")


def _obstacle(part: PreTrainedModel, config: Any) -> str | None:
    """Return why the sequences of a model cannot be cut, or None if they can."""
    if not type(part).__name__.endswith(SERVED):
        return f"it does more than score tokens; accepted: models whose names end with {', '.join(SERVED)}"
    if any(kind not in ("full_attention", NAME) for kind in getattr(config, "layer_types", None) or ()):
        return "it has layers other than full attention"
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        return "it has a sliding window"
    for module in part.modules():
        kind = type(module).__name__
        if isinstance(module, nn.Conv1d | nn.Conv2d | nn.RNNBase) or MIXERS.search(kind):
            return f"{kind} mixes tokens, too"
        heads = getattr(module, "flow", None)
        if heads == KEPT_SOFTMAX or (isinstance(heads, FlowHeads) and heads.exchange.window):
            return f"softmax attention is kept in {kind}"
    return None
