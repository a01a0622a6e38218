"""The registered operators of the torch backend and their autograd: what compilers, tracers and profilers see.

A forward and a backward operator each, opaque to `torch.compile`, with fakes that know every shape and stride. The
autograd functions stand outside of the operators: that costs half the host time of `register_autograd`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import torch_backend, varlen
from .state import empty_state
from .torch_bidirectional import Flows
from .torch_causal import State
from .variant import FlowVariant

VARIANT = (
    "float scale, str feature_map, str competition, str allocation, float? clamp, float eps, float flow_eps, "
    "bool rescale"
)
_library = torch.library.Library("flowformer", "DEF")


def register(schema: str, implementation, fake) -> None:
    name = schema.split("(")[0]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))

    def run(*args):
        device = args[0].device.type
        if not torch.is_autocast_enabled(device):
            return implementation(*args)
        # the sums must not be rounded to what autocast would choose
        with torch.autocast(device, enabled=False):
            return implementation(*args)

    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"flowformer::{name}", fake, lib=_library)


def _bidirectional(query, key, value, query_mask, key_mask, scale, *variant):
    result, flows = torch_backend.bidirectional(query, key, value, query_mask, key_mask, scale, FlowVariant(*variant))
    return result, *flows


def _bidirectional_backward(grad, query, key, value, query_mask, key_mask, *rest):
    flows, scale, variant = Flows(*rest[:6]), rest[6], FlowVariant(*rest[7:])
    return torch_backend.bidirectional_backward(grad, query, key, value, query_mask, key_mask, flows, scale, variant)


def _causal(query, key, value, mask, sums, memory, scalars, scale, *variant):
    result, end, starts = torch_backend.causal(
        query, key, value, mask, (sums, memory, scalars), scale, FlowVariant(*variant)
    )
    return result, *end, *starts


def _causal_backward(grad, grad_sums, grad_memory, grad_scalars, query, key, value, mask, *rest):
    starts, scale, variant = rest[:3], rest[3], FlowVariant(*rest[4:])
    *grads, grad_start = torch_backend.causal_backward(
        grad, (grad_sums, grad_memory, grad_scalars), query, key, value, mask, starts, scale, variant
    )
    return *grads, *grad_start


def _packed(query, key, value, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, is_causal, scale, *variant):
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    return varlen.forward(query, key, value, lengths, is_causal, scale, FlowVariant(*variant))


def _packed_backward(grad, query, key, value, *rest):
    lengths, is_causal, scale, variant = rest[:4], rest[4], rest[5], FlowVariant(*rest[6:])
    return varlen.backward(grad, query, key, value, lengths, is_causal, scale, variant)


def _fake_bidirectional(query, key, value, *_):
    return torch_backend.empty_result(query, value.shape[-1]), *torch_backend.empty_flows(query, key, value)


def _fake_causal(query, key, value, mask, *state_and_rest):
    state = state_and_rest[:3]
    starts = torch_backend.empty_starts(query, state)
    result = torch_backend.empty_result(query, value.shape[-1])
    return result, *(torch.empty_like(part) for part in state), *starts


def _fake_gradients(grad, query, key, value, *_):
    return tuple(torch.empty_like(x) for x in (query, key, value))


def _fake_causal_backward(grad, grad_sums, grad_memory, grad_scalars, query, key, value, *_):
    return tuple(torch.empty_like(x) for x in (query, key, value, grad_sums, grad_memory, grad_scalars))


def _fake_packed(query, key, value, *_):
    return query.new_empty(*query.shape[:2], value.shape[-1])


_INPUTS = "Tensor query, Tensor key, Tensor value"
_MASKS = "Tensor? query_mask, Tensor? key_mask"
_STATE = "Tensor sums, Tensor memory, Tensor scalars"
_LENGTHS = "Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, bool is_causal"
_FLOWS = ", ".join(f"Tensor kept_{name}" for name in Flows._fields)  # the variant has a competition, too
register(
    f"bidirectional({_INPUTS}, {_MASKS}, {VARIANT}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _bidirectional,
    _fake_bidirectional,
)
register(
    f"bidirectional_backward(Tensor grad, {_INPUTS}, {_MASKS}, {_FLOWS}, {VARIANT}) -> (Tensor, Tensor, Tensor)",
    _bidirectional_backward,
    _fake_gradients,
)
register(
    f"causal({_INPUTS}, Tensor? mask, {_STATE}, {VARIANT}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _causal,
    _fake_causal,
)
register(
    f"causal_backward(Tensor grad, Tensor grad_sums, Tensor grad_memory, Tensor grad_scalars, {_INPUTS}, Tensor? mask, "
    f"{_STATE}, {VARIANT}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _causal_backward,
    _fake_causal_backward,
)
register(f"packed({_INPUTS}, {_LENGTHS}, {VARIANT}) -> Tensor", _packed, _fake_packed)
register(
    f"packed_backward(Tensor grad, {_INPUTS}, {_LENGTHS}, {VARIANT}) -> (Tensor, Tensor, Tensor)",
    _packed_backward,
    _fake_gradients,
)


class _Once(torch.autograd.Function):
    """Runs a backward operator; whoever differentiates through it is told that there is no second derivative."""

    @staticmethod
    def forward(operator, *args):
        return operator(*args)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *_):
        raise RuntimeError('Flow-Attention is differentiable once; for higher derivatives use backend="reference".')


def differentiate(operator, *args) -> tuple[Tensor, ...]:
    """The gradients from a backward operator.

    torch's once_differentiable treats them as constants, silently, where the inputs need a second derivative but the
    cotangent does not.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return operator(*args)
    return _Once.apply(operator, *args)


class _Bidirectional(torch.autograd.Function):
    @staticmethod
    def forward(query, key, value, query_mask, key_mask, *options):
        return torch.ops.flowformer.bidirectional(query, key, value, query_mask, key_mask, *options)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs[:5], *output[1:])
        ctx.mark_non_differentiable(*output[1:])
        ctx.options = inputs[5:]

    @staticmethod
    def backward(ctx, grad, *_):
        grads = differentiate(torch.ops.flowformer.bidirectional_backward, grad, *ctx.saved_tensors, *ctx.options)
        return *grads, None, None, *(None for _ in ctx.options)


class _Causal(torch.autograd.Function):
    @staticmethod
    def forward(query, key, value, mask, sums, memory, scalars, *options):
        return torch.ops.flowformer.causal(query, key, value, mask, sums, memory, scalars, *options)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs[:4], *output[4:])
        ctx.mark_non_differentiable(*output[4:])
        ctx.options = inputs[7:]

    @staticmethod
    def backward(ctx, *grads):
        grads = differentiate(torch.ops.flowformer.causal_backward, *grads[:4], *ctx.saved_tensors, *ctx.options)
        return *grads[:3], None, *grads[3:], *(None for _ in ctx.options)


class _Packed(torch.autograd.Function):
    @staticmethod
    def forward(query, key, value, cu_seqlens_q, cu_seqlens_k, *options):
        return torch.ops.flowformer.packed(query, key, value, cu_seqlens_q, cu_seqlens_k, *options)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs[:5])
        ctx.options = inputs[5:]

    @staticmethod
    def backward(ctx, grad):
        grads = differentiate(torch.ops.flowformer.packed_backward, grad, *ctx.saved_tensors, *ctx.options)
        return *grads, None, None, *(None for _ in ctx.options)


def distinct(*tensors: Tensor | None) -> list[Tensor | None]:
    """The same tensors, repeats as views: Dynamo does not trace an autograd function that is given one tensor twice."""
    if not torch.compiler.is_compiling():
        return list(tensors)
    result: list[Tensor | None] = []
    for x in tensors:
        result.append(x.view_as(x) if x is not None and any(x is each for each in result) else x)
    return result


def bidirectional(query, key, value, query_mask, key_mask, scale: float, variant: FlowVariant) -> Tensor:
    if torch.compiler.is_exporting() or variant.competitors == "heads":
        with torch.autocast(query.device.type, enabled=False):
            return torch_backend.bidirectional_graph(query, key, value, query_mask, key_mask, scale, variant)
    return _Bidirectional.apply(*distinct(query, key, value, query_mask, key_mask), scale, *variant.as_args())[0]


def causal(query, key, value, mask, state: State | None, scale: float, variant: FlowVariant) -> tuple[Tensor, State]:
    if state is None:
        state = empty_state(query, value)
    if torch.compiler.is_exporting():
        with torch.autocast(query.device.type, enabled=False):
            return torch_backend.causal_graph(query, key, value, mask, state, scale, variant)
    result, *rest = _Causal.apply(*distinct(query, key, value, mask, *state), scale, *variant.as_args())
    return result, tuple(rest[:3])


def packed(query, key, value, lengths: varlen.Lengths, is_causal: bool, scale: float, variant: FlowVariant) -> Tensor:
    if variant.competitors == "heads" and not torch.compiler.is_exporting():
        varlen.starts_and_lengths(query, key, lengths, is_causal)
    if torch.compiler.is_exporting() or variant.competitors == "heads":
        with torch.autocast(query.device.type, enabled=False):
            return varlen.graph(query, key, value, lengths, is_causal, scale, variant)
    tensors, longest = distinct(query, key, value, *lengths[:2]), lengths[2:]
    return _Packed.apply(*tensors, *longest, is_causal, scale, *variant.as_args())
