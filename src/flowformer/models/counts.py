"""How large a model is, and how many multiply-adds it takes: as papers count, and all of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode

from .._utils import check_choice, optional_import
from ..ops.torch import op  # noqa: F401, registers the operators

# what linear maps and convolutions come down to; products between tokens have a batch of matrices on either side
_LAYERS = (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.convolution)
# the Transformers of the paper's vision table and their names in timm: the sizes printed for ViT are those at 384 × 384
TIMM_MODELS = {
    "vit-b": "vit_base_patch16_384",
    "vit-l": "vit_large_patch16_384",
    "deit-s": "deit_small_patch16_224",
}


@dataclass(frozen=True)
class Counts:
    """The numbers of a model for one input.

    Args:
        parameters: numbers in the parameters, tied ones counted once.
        layers: multiply-adds of linear maps and convolutions. Counters that look at modules see these only, and so
            do the paper's figures.
        attention: multiply-adds of all other products, those between tokens.
    """

    parameters: int
    layers: int
    attention: int

    @property
    def total(self) -> int:
        """All multiply-adds."""
        return self.layers + self.attention

    def __str__(self) -> str:
        return (
            f"{self.parameters / 1e6:.2f} M parameters, {self.total / 1e6:.1f} M multiply-adds, "
            f"{self.attention / 1e6:.1f} M of them in attention"
        )


def count(model: nn.Module, *inputs: Tensor) -> Counts:
    """Count the parameters and the multiply-adds of model(*inputs); nothing is computed, only shapes are followed.

    Activations, norms, softmax and other work element by element are not multiply-adds. A token of Flow-Attention takes
    2·D of them for the flows and D·E for the product with the memory, per head, once as a source and once as a sink.

    Args:
        model: any module.
        inputs: tensors of the right shapes, whatever their values. For the cost of one input, pass a batch of one.

    >>> from flowformer.nn import FlowAttention
    >>> count(FlowAttention(32, 4), torch.empty(1, 10, 32))
    Counts(parameters=4224, layers=40960, attention=6400)
    """
    flow_operators = dict.fromkeys((torch.ops.flowformer.bidirectional, torch.ops.flowformer.causal), _flow_attention)
    state = {name: x.to("meta") for name, x in (*model.named_parameters(), *model.named_buffers())}
    with torch.no_grad(), FlopCounterMode(display=False, custom_mapping=flow_operators) as counter:
        functional_call(model, state, tuple(x.to("meta") for x in inputs))
    operations = counter.get_flop_counts()["Global"]  # two a multiply-add
    layers = sum(operations.get(operator, 0) for operator in _LAYERS) // 2
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return Counts(parameters, layers, counter.get_total_flops() // 2 - layers)


def count_timm(name: str) -> Counts:
    """The numbers of a Transformer of the paper's vision table: timm's model, for one image of its size.

    Args:
        name: "vit-b", "vit-l" or "deit-s".

    >>> print(count_timm("deit-s"))
    22.05 M parameters, 4598.9 M multiply-adds, 357.7 M of them in attention
    """
    check_choice("model", name, TIMM_MODELS)
    timm = optional_import("timm", "timm")
    with torch.device("meta"):
        model: Any = timm.create_model(TIMM_MODELS[name])
    return count(model, torch.empty(1, *model.pretrained_cfg["input_size"]))


count_rival = count_timm  # the name of earlier versions


def _flow_attention(query, key, value, *_, **__) -> int:
    """Operations, two a multiply-add, of Flow-Attention between tensors of these shapes."""
    batch, heads, sinks, dim = query
    return 2 * batch * heads * (sinks + key[2]) * dim * (2 + value[3])
