"""The native backend: what it refuses, its operators, and their autograd."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..common import VARIANT, Mask, State, differentiate, distinct, empty_result, register, sum_dtype
from ..torch import op as torch_op
from ..variant import FlowVariant
from .build import failure
from .call import ALLOCATIONS, DTYPES, Rows, new_call, padded, set_flows, set_masks, with_rows

if TYPE_CHECKING:
    from ..varlen import Lengths

MAX_DIM = 256


def refusals(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, variant: FlowVariant) -> list[str]:
    """Why the native code cannot compute this; empty where it can."""
    if query.device.type != "cpu":
        return [f"tensors on {query.device} (the native code is for CPUs)"]
    if torch.compiler.is_exporting():
        return ["an exported graph cannot hold native code"]
    if torch._C._are_functorch_transforms_active():
        return ["torch.func transforms it by the operators of the torch backend"]
    reasons = []
    if is_causal:
        reasons.append("causal attention")
    if query.dtype not in DTYPES:
        reasons.append(f"{query.dtype} (the native code takes float32, float64 and bfloat16)")
    dims = query.shape[-1], value.shape[-1]
    if not all(1 <= dim <= MAX_DIM for dim in dims):
        reasons.append(f"head dimensions {dims[0]} and {dims[1]} (the native code takes 1 to {MAX_DIM})")
    if not variant.has_operator:
        reasons.append('competitors="heads" and renormalize=True')
    if variant.allocation not in ALLOCATIONS:
        reasons.append(f'allocation="{variant.allocation}" (the native code takes "sigmoid" and "none")')
    if not reasons and (reason := failure()) is not None:
        reasons.append(reason)
    return reasons


def by_name(query: Tensor) -> bool:
    """Never only by name."""
    return False


def bidirectional(
    query: Tensor, key: Tensor, value: Tensor, query_mask: Mask, key_mask: Mask, scale: float, variant: FlowVariant
) -> Tensor:
    """See `flow_attention`."""
    tensors = with_rows(query), with_rows(key), with_rows(value), query_mask, key_mask
    options = scale, *variant.as_args()
    if torch.compiler.is_compiling():
        result: Tensor = _Bidirectional.apply(*distinct(*tensors), *options)[0]
    else:
        result = _EagerBidirectional.apply(*tensors, *options)[0]
    return result


def causal(query: Tensor, key: Tensor, value: Tensor, mask: Mask, scale: float, variant: FlowVariant) -> Tensor:
    """See `flow_attention`."""
    raise NotImplementedError


def recurrent(
    query: Tensor, key: Tensor, value: Tensor, mask: Mask, state: State | None, scale: float, variant: FlowVariant
) -> tuple[Tensor, State]:
    """See `flow_attention_recurrent`."""
    raise NotImplementedError


def packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Lengths,
    is_causal: bool,
    scale: float,
    variant: FlowVariant,
) -> Tensor:
    """See `flow_attention_varlen`."""
    return torch_op.packed(query, key, value, lengths, is_causal, scale, variant)


# inputs and outputs are those of the operators at the end of this file
class _Bidirectional(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        outputs: tuple[Tensor, ...] = torch.ops.flowformer.native_bidirectional(*inputs)
        ctx.save_for_backward(*inputs[:5], *outputs[1:])
        ctx.mark_non_differentiable(*outputs[1:])
        ctx.options = inputs[5:]
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        operator = torch.ops.flowformer.native_bidirectional_backward
        grads = differentiate(operator, grads[0], *ctx.saved_tensors, *ctx.options)
        return *grads, None, None, *(None for _ in ctx.options)


class _EagerBidirectional(torch_op._NoForwardMode, _Bidirectional):
    pass


def _bidirectional(
    query: Tensor, key: Tensor, value: Tensor, query_mask: Mask, key_mask: Mask, *options: Any
) -> tuple[Tensor, ...]:
    outputs = _fake_bidirectional(query, key, value)
    call = new_call(query, key, value, *options)
    masks = set_masks(call, query_mask, key_mask)
    call.result = Rows.of(outputs[0])
    set_flows(call, *outputs[1:])
    call.run("bidirectional_forward")
    del masks
    return outputs


def _bidirectional_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, query_mask: Mask, key_mask: Mask, *rest: Any
) -> tuple[Tensor, ...]:
    flows, options, grad = rest[:3], rest[3:], with_rows(grad)
    call = new_call(query, key, value, *options)
    masks = set_masks(call, query_mask, key_mask)
    shared = call.shared > 1
    # of shared key heads, one for each query head, to be added up
    grads = torch.empty_like(query), *(_per_query_head(x, call.heads) if shared else torch.empty_like(x) for x in (key, value))
    call.grad = Rows.of(grad)
    call.grad_query, call.grad_key, call.grad_value = map(Rows.of, grads)
    set_flows(call, *flows)
    call.run("bidirectional_backward")
    del masks
    if shared:
        grad_key, grad_value = (
            torch.empty_like(x).copy_(y.unflatten(1, x.shape[1:2] + (-1,)).sum(2)) for x, y in zip((key, value), grads[1:])
        )
        return grads[0], grad_key, grad_value
    return grads


def _per_query_head(x: Tensor, heads: int) -> Tensor:
    return x.new_empty(x.shape[0], heads, *x.shape[2:], dtype=sum_dtype(x))


def _fake_bidirectional(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, ...]:
    batch, heads, sinks, dim = query.shape
    dtype = sum_dtype(query)
    width, value_width = padded(dim, dtype), padded(value.shape[-1], dtype)
    # a few numbers of each token, and the sums of each head, padded
    sizes = (2, batch, heads, sinks), (2, batch, heads, key.shape[2]), (batch, heads, (4 + value_width) * width)
    return empty_result(query, value.shape[-1]), *(query.new_empty(size, dtype=dtype) for size in sizes)


def _fake_gradients(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(x) for x in (query, key, value))


_INPUTS = "Tensor query, Tensor key, Tensor value, Tensor? query_mask, Tensor? key_mask"
_FLOWS = "Tensor sink_flows, Tensor source_flows, Tensor records"
register(
    f"native_bidirectional({_INPUTS}, {VARIANT}) -> (Tensor, Tensor, Tensor, Tensor)",
    _bidirectional,
    _fake_bidirectional,
)
register(
    f"native_bidirectional_backward(Tensor grad, {_INPUTS}, {_FLOWS}, {VARIANT}) -> (Tensor, Tensor, Tensor)",
    _bidirectional_backward,
    _fake_gradients,
)
