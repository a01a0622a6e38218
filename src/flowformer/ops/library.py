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


def register_vmap(name: str, dims: tuple[int | None, ...], out_dims: tuple[int, ...]) -> None:
    """Serve torch.vmap: the mapped dimension joins another one, the batch, and leaves it again in the results.

    Args:
        dims: which dimension of each tensor argument it joins; None for one that all share.
        out_dims: which dimension of each result it is in.
    """

    def run(info, in_dims, *args):
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

# the batch comes first, but in the states before each segment
register_vmap("bidirectional", (0,) * 5, (0,) * 7)
register_vmap("bidirectional_backward", (0,) * 12, (0,) * 3)
register_vmap("causal", (0,) * 7, (0,) * 4 + (1,) * 3)
register_vmap("causal_backward", (0,) * 8 + (1,) * 3, (0,) * 6)
# packed tokens have no batch: the mapped dimension joins the heads, which all have the same lengths
register_vmap("packed", (1, 1, 1, None, None), (1,))
register_vmap("packed_backward", (1, 1, 1, 1, None, None), (1, 1, 1))


class _Once(torch.autograd.Function):
    """Runs a backward operator; whoever differentiates through it is told that there is no second derivative."""

    generate_vmap_rule = True

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
    generate_vmap_rule = True

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
    generate_vmap_rule = True

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
    generate_vmap_rule = True

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


class _NoForwardMode:
    @staticmethod
    def jvp(ctx, *_):
        raise NotImplementedError(
            'Flow-Attention has no forward mode (jvp, jacfwd, hessian); use backend="reference", or jacrev.'
        )


class _EagerBidirectional(_NoForwardMode, _Bidirectional):
    pass


class _EagerCausal(_NoForwardMode, _Causal):
    pass


class _EagerPacked(_NoForwardMode, _Packed):
    pass


def _apply(function, eager, tensors, *options):
    """Dynamo traces no autograd function that has a jvp of its own."""
    if torch.compiler.is_compiling():
        return function.apply(*distinct(*tensors), *options)
    return eager.apply(*tensors, *options)


def bidirectional(query, key, value, query_mask, key_mask, scale: float, variant: FlowVariant) -> Tensor:
    if torch.compiler.is_exporting() or variant.competitors == "heads":
        with torch.autocast(query.device.type, enabled=False):
            return torch_backend.bidirectional_graph(query, key, value, query_mask, key_mask, scale, variant)
    tensors = query, key, value, query_mask, key_mask
    return _apply(_Bidirectional, _EagerBidirectional, tensors, scale, *variant.as_args())[0]


def causal(query, key, value, mask, state: State | None, scale: float, variant: FlowVariant) -> tuple[Tensor, State]:
    if state is None:
        state = empty_state(query, value)
    if torch.compiler.is_exporting():
        with torch.autocast(query.device.type, enabled=False):
            return torch_backend.causal_graph(query, key, value, mask, state, scale, variant)
    tensors = query, key, value, mask, *state
    result, *rest = _apply(_Causal, _EagerCausal, tensors, scale, *variant.as_args())
    return result, tuple(rest[:3])


def packed(query, key, value, lengths: varlen.Lengths, is_causal: bool, scale: float, variant: FlowVariant) -> Tensor:
    if variant.competitors == "heads" and not torch.compiler.is_exporting():
        varlen.starts_and_lengths(query.shape[0], key.shape[0], lengths, is_causal)
    if torch.compiler.is_exporting() or variant.competitors == "heads":
        with torch.autocast(query.device.type, enabled=False):
            return varlen.graph(query, key, value, lengths, is_causal, scale, variant)
    tensors, longest = (query, key, value, *lengths[:2]), lengths[2:]
    return _apply(_Packed, _EagerPacked, tensors, *longest, is_causal, scale, *variant.as_args())
