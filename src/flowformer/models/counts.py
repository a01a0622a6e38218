"""Number of parameters and multiply-adds of a model, with and without the products between tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode

from .._utils import check_choice, optional_import
from ..ops.torch import op  # noqa: F401, registers the operators

# the operators of linear layers and convolutions; products between tokens are batched (bmm) and count as attention
_LINEAR = (torch.ops.aten.mm, torch.ops.aten.addmm)
_LAYERS = (*_LINEAR, torch.ops.aten.convolution)
# the Transformers of the paper's vision table and their names in timm; the paper's numbers for ViT are at 384 × 384
TIMM_MODELS = {
    "vit-b": "vit_base_patch16_384",
    "vit-l": "vit_large_patch16_384",
    "deit-s": "deit_small_patch16_224",
}


@dataclass(frozen=True)
class Counts:
    """Parameters and multiply-adds of a model for one input.

    Args:
        parameters: number of parameters, tied ones counted once.
        layers: multiply-adds of linear layers and convolutions. Counters based on module hooks count only these; the
            paper's figures do too.
        attention: multiply-adds of all other products, which are products between tokens.
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
    """Count the parameters and the multiply-adds of model(*inputs). The model runs on the meta device, without data.

    Elementwise operations, norms and softmax are not counted. Flow-Attention counts 2·D multiply-adds for the flows and
    D·E for the product with the D × E matrix φ(K)ᵀ V, per token and head, once as a source and once as a sink.

    Args:
        model: any module.
        inputs: tensors of the right shapes; their values are not read. For the cost of one input, pass a batch of one.

    >>> from flowformer.nn import FlowAttention
    >>> count(FlowAttention(32, 4), torch.empty(1, 10, 32))
    Counts(parameters=4224, layers=40960, attention=6400)
    """
    from ..baselines import Mechanism  # imported here, since most programs use no rival

    flow_operators = torch.ops.flowformer.bidirectional, torch.ops.flowformer.causal
    flow_counts = dict.fromkeys(flow_operators, _flow_attention_flops)
    state = {name: x.to("meta") for name, x in (*model.named_parameters(), *model.named_buffers())}
    with torch.no_grad(), FlopCounterMode(display=False, custom_mapping=flow_counts) as counter:
        functional_call(model, state, tuple(x.to("meta") for x in inputs))
    operations = counter.get_flop_counts()  # FLOPs, two per multiply-add, of each module and of all
    layers = sum(operations["Global"].get(operator, 0) for operator in _LAYERS) // 2
    # a rival has no linear layers: torch folds its batched products with one matrix, such as Linformer's, into mm
    for name, module in model.named_modules(prefix=type(model).__name__):
        if isinstance(module, Mechanism):
            layers -= sum(operations.get(name, {}).get(operator, 0) for operator in _LINEAR) // 2
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return Counts(parameters, layers, counter.get_total_flops() // 2 - layers)


def count_timm(name: str) -> Counts:
    """Count a Transformer of the paper's vision table: timm's model, for one image of its input size.

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


def _flow_attention_flops(query, key, value, *_, **__) -> int:
    """FLOPs (two per multiply-add) of Flow-Attention for tensors of these shapes."""
    batch, heads, sinks, dim = query
    return 2 * batch * heads * (sinks + key[2]) * dim * (2 + value[3])
