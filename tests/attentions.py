"""Every attention, with the options that make it worth testing: laws and dense formulas are stated over these."""

from __future__ import annotations

import pytest
import torch

from flowformer import FlowVariant, baselines, flow_attention

HEADS, DIM, LONGEST = 3, 4, 256


class Flow(torch.nn.Module):
    """Flow-Attention, built and called as a rival is."""

    name = "flow"
    bidirectional = causal = masks = cross = linear = True
    reads = "query", "key"

    def __init__(self, variant="default"):
        super().__init__()
        self.variant = FlowVariant() if variant == "default" else FlowVariant.named(variant)

    def forward(self, query, key, value, **options):
        return flow_attention(query, key, value, variant=self.variant, **options)


# a name before the comma, so that a rival can be listed with several options; small blocks, windows and ranks, so that
# short sequences have several of them
CASES = {name: {} for name in ["flow", *baselines.names()]} | {
    "flow, core": {"variant": "core"},
    "flow, vision": {"variant": "vision"},
    "linformer": {"rank": 5},
    "linformer, apart": {"rank": 5, "shared": False},
    "performer": {"features": 7},
    "synthesizer, dot product": {"dot_product": True},
    "nystromformer": {"landmarks": 6, "convolution": 5},
    "nystromformer, plain": {"landmarks": 6, "convolution": None},
    "yoso, convolution": {"convolution": 5},
    "soft": {"landmarks": 6},
    "soft, released": {"landmarks": 6, "landmark_norm": True, "convolution": 5},
    "rfa": {"features": 7},
    "rfa-gate": {"features": 7},
    "local": {"window": 4},
    "sparse": {"stride": 4, "summary": 2},
    "sparse, strided": {"stride": 4, "pattern": "strided"},
    "longformer": {"window": 4},
    "longformer, no global token": {"window": 6, "global_tokens": 0},
    "longformer, many global tokens": {"window": 2, "global_tokens": 5},
    "bigbird": {"block": 2},
    "bigbird, wide": {"block": 3, "window": 5, "random": 1},
    "sinkhorn": {"block": 4},
    "reformer": {"chunk": 4, "buckets": 6},
    "reformer, one round": {"chunk": 3, "rounds": 1, "buckets": 2},
}


def build(case, init=0, max_length=LONGEST, **options):
    """In float64, evaluating, with the parameters that it starts with."""
    name, options = case.partition(",")[0], {**CASES[case], **options}
    torch.manual_seed(init)
    if name == "flow":
        return Flow(**options)
    sizes = {"num_heads": HEADS, "head_dim": DIM, "max_length": max_length}
    return baselines.build(name, **sizes, **options).double().eval()


BUILT = {case: build(case) for case in CASES}
BIDIRECTIONAL = [case for case, module in BUILT.items() if module.bidirectional]
CAUSAL = [case for case, module in BUILT.items() if module.causal]
CROSS = [case for case, module in BUILT.items() if module.cross and module.bidirectional]
FORMS = [
    pytest.param(case, is_causal, id=f"{case}, {'causal' if is_causal else 'bidirectional'}")
    for case in CASES
    for is_causal in (False, True)
    if case in (CAUSAL if is_causal else BIDIRECTIONAL)
]


def with_all_gradients(function, module, inputs):
    """The result and the gradients of inputs and parameters, 0 for those that take no part."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    result = function(*leaves)
    cotangent = torch.randn(result.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    leaves += module.parameters()
    return [result.detach(), *torch.autograd.grad(result, leaves, cotangent.to(result), materialize_grads=True)]
