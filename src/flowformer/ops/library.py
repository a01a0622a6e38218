"""The registration of operators, and code shared by their autograd functions.

A backend registers a forward and a backward operator, opaque to `torch.compile`, with fake implementations that return
every shape and stride. Its autograd functions call these operators, which costs half the host time of
`register_autograd`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Never

import torch
from torch import Tensor

# the last arguments in the schema of every operator, as returned by Options.as_args
VARIANT = (
    "float scale, str feature_map, str competition, str allocation, float? clamp, float eps, float flow_eps, "
    "bool rescale"
)

_library = torch.library.Library("flowformer", "DEF")


def register(schema: str, implementation: Callable[..., Any], fake: Callable[..., object]) -> Callable[..., Any]:
    """Register an operator flowformer::NAME with this schema on every device.

    Returns: a function that runs the operator. It calls the implementation directly unless something observes
        operators (`_is_observed`): torch's dispatcher takes 10 to 20 µs, as long as the rest of a short call.
    """
    name = schema.split("(")[0]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"flowformer::{name}", fake, lib=_library)
    operator = getattr(torch.ops.flowformer, name).default

    def run(*args: Any) -> Any:
        return operator(*args) if _is_observed(args) else implementation(*args)

    return run


_WITH_DATA = (Tensor, torch.nn.Parameter, type(None))
# torch.autograd.grad(is_grads_batched=True) maps the backward operators with a vmap that predates torch.func
_GRADS_BATCHED = torch._C._dispatch_key_parse("VmapMode")


def _is_observed(args: tuple[Any, ...]) -> bool:
    """Whether a compiler, tracer, transform, dispatch mode, profiler or tensor subclass must see the operator."""
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._are_functorch_transforms_active()
        or torch._C._dispatch_tls_is_dispatch_key_included(_GRADS_BATCHED)
        or torch._C._get_tracing_state() is not None
        or torch.autograd._profiler_enabled()
        or args[0].is_meta
        or any(type(x) not in _WITH_DATA for x in args[:4])
    )


def register_vmap(name: str, dims: tuple[int | None, ...], out_dims: tuple[int, ...]) -> None:
    """Register the vmap rule of an operator: merge the mapped dimension into the batch, run, and split the results.

    Args:
        dims: for each tensor argument, the dimension that the mapped one is merged into; None if it cannot be mapped.
        out_dims: for each result, the dimension that the mapped one is split off from.
    """

    def run(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
        tensors = []
        for x, mapped, dim in zip(args, in_dims, dims, strict=False):
            if x is None or (dim is None and mapped is None):
                tensors.append(x)
            elif dim is None:
                raise NotImplementedError("torch.vmap cannot map cu_seqlens: pack the mapped sequences, too.")
            else:
                x = x.movedim(mapped, dim) if mapped is not None else torch.stack([x] * info.batch_size, dim)
                tensors.append(x.flatten(dim, dim + 1))
        results = getattr(torch.ops.flowformer, name)(*tensors, *args[len(dims) :])
        results = (results,) if isinstance(results, Tensor) else results
        results = tuple(x.unflatten(dim, (info.batch_size, -1)) for x, dim in zip(results, out_dims, strict=True))
        return (results, out_dims) if len(out_dims) > 1 else (results[0], out_dims[0])

    torch.library.register_vmap(f"flowformer::{name}", run, lib=_library)


class NoForwardMode:
    """Mixin that raises in forward mode. For eager calls only: Dynamo traces no autograd function that defines jvp."""

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> Never:
        raise NotImplementedError(
            'Flow-Attention has no forward mode (jvp, jacfwd, hessian); use backend="reference", or jacrev.'
        )


class _DifferentiableOnce(torch.autograd.Function):
    """Runs a backward operator; raises on double backward."""

    generate_vmap_rule = True

    @staticmethod
    def forward(operator: Callable[..., tuple[Tensor, ...]], *args: Any) -> tuple[Tensor, ...]:
        return operator(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Never:
        raise RuntimeError('Flow-Attention is differentiable once; for higher derivatives use backend="reference".')


def differentiate(operator: Callable[..., tuple[Tensor, ...]], *args: Any) -> tuple[Tensor, ...]:
    """The gradients from a backward operator, which raise on double backward.

    torch's once_differentiable does not: where the inputs require a second derivative but the cotangent does not, it
    silently treats the gradients as constants.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return operator(*args)
    gradients: tuple[Tensor, ...] = _DifferentiableOnce.apply(operator, *args)
    return gradients


def distinct(*tensors: Tensor | None) -> list[Tensor | None]:
    """The same tensors, with views for repeated ones: Dynamo traces no autograd function with a repeated argument."""
    if not torch.compiler.is_compiling():
        return list(tensors)
    result: list[Tensor | None] = []
    for x in tensors:
        result.append(x.view_as(x) if x is not None and any(x is each for each in result) else x)
    return result
