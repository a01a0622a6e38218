"""What several test files share: inputs, the variants worth testing, and the oracle with its gradients."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from flowformer import FlowVariant
from flowformer.bench.errors import relative_error as relative_error  # the error rule, shared with the fuzzer
from flowformer.ops import reference

ROOT = Path(__file__).parents[1]
PARITY = ROOT / "tests" / "parity"  # vectors made by the authors' code

# every feature map, competition and allocation at least once, and what interacts with them
VARIANTS = {
    "default": FlowVariant(),
    "paper": FlowVariant.named("paper"),
    "core": FlowVariant.named("core"),
    "vision": FlowVariant.named("vision"),
    "tight clamp": FlowVariant(clamp=0.9),
    "elu+1": FlowVariant(feature_map="elu+1"),
    "relu": FlowVariant(feature_map="relu"),
    "sigmoid competition": FlowVariant(competition="sigmoid", clamp=1.0),
    "no competition": FlowVariant(competition="none"),
    "softmax allocation": FlowVariant(allocation="softmax"),
    "softmax allocation, paper": FlowVariant(allocation="softmax", rescale=False),
    "no allocation": FlowVariant(allocation="none"),
    "plain linear": FlowVariant(competition="none", allocation="none"),
    "renormalized": FlowVariant(renormalize=True),
    "renormalized, sigmoid competition": FlowVariant(renormalize=True, competition="sigmoid", clamp=0.9, flow_eps=1e-3),
}
# those that kernels compute
CAUSAL_KERNEL_VARIANTS = {name: variant for name, variant in VARIANTS.items() if variant.allocation != "softmax"}


def random_inputs(
    batch=2,
    heads=3,
    sinks=9,
    sources=None,
    dim=4,
    value_dim=None,
    key_heads=None,
    dtype=torch.float64,
    device="cpu",
    seed=0,
) -> tuple[Tensor, Tensor, Tensor]:
    """query (B, H, N, D), key (B, H_kv, M, D), value (B, H_kv, M, E), drawn on the CPU so that devices agree."""
    generator = torch.Generator().manual_seed(seed)
    sources, key_heads = sources or sinks, key_heads or heads
    shapes = (heads, sinks, dim), (key_heads, sources, dim), (key_heads, sources, value_dim or dim)
    return tuple(
        torch.randn(batch, *shape, generator=generator, dtype=torch.float64).to(device, dtype) for shape in shapes
    )


def oracle(
    query, key, value, *, is_causal=False, query_mask=None, key_mask=None, scale=1.0, variant=VARIANTS["default"]
):
    """The reference in float64, key heads repeated."""
    shared = query.shape[1] // key.shape[1]
    query, key, value = (x.double() for x in (query, key, value))
    key, value = key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1)
    if is_causal:
        mask = query_mask if key_mask is None else key_mask if query_mask is None else query_mask & key_mask
        return reference.causal(query, key, value, mask, None, scale, **asdict(variant))[0]
    return reference.bidirectional(query, key, value, query_mask, key_mask, scale, **asdict(variant))


def with_gradients(function, inputs, grad_seed=1) -> list[Tensor]:
    """The result of function(*inputs) and the gradients of the inputs under a random cotangent."""
    leaves = [x.detach().clone(memory_format=torch.preserve_format).requires_grad_() for x in inputs]
    result = function(*leaves)
    generator = torch.Generator().manual_seed(grad_seed)
    cotangent = torch.randn(result.shape, generator=generator, dtype=torch.float64).to(result.device, result.dtype)
    return [result.detach(), *torch.autograd.grad(result, leaves, cotangent, materialize_grads=True)]


def randomized(module: nn.Module, std: float) -> nn.Module:
    """In float64, evaluating. Fresh modules have zero biases, unit norms and tiny scales, which would hide mistakes."""
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=std)
    return module.double().eval()


def assert_like_gradients(model: nn.Module, rounded: Tensor, exact: Tensor) -> None:
    """The gradients of a loss in low precision are those of the exact one, all parameters taken together."""
    parameters = list(model.parameters())
    found, truth = (
        torch.cat([x.float().flatten() for x in torch.autograd.grad(loss, parameters, materialize_grads=True)])
        for loss in (rounded, exact)
    )
    assert (found - truth).norm() < 0.05 * truth.norm()


def allocated(function) -> tuple[int, int]:
    """The largest and the highest number of bytes that function() holds at once, besides what is there before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        function()
    events = [event for event in record.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = highest = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        highest = max(highest, held)
    return max(event.nbytes() for event in events), highest


def assert_same(ours, truth, names, tolerance=1e-12):
    """Each tensor differs by no more than that share of its norm, or of 1."""
    for name, value, expected in zip(names, ours, truth, strict=True):
        assert value.shape == expected.shape, name
        error, size = (value - expected).norm().item(), max(expected.norm().item(), 1)
        assert error <= tolerance * size, f"{name}: error {error:.1e} in {size:.1e}"
