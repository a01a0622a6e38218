"""The registered operators of the torch backend, as seen by compilers, tracers and profilers, and their autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from ..common import Mask, Masks, Options, State, empty_result, is_exporting
from ..library import VARIANT, NoForwardMode, differentiate, distinct, register, register_vmap
from ..state import empty_state
from ..variant import FlowVariant
from .bidirectional import Flows, empty_flows
from .bidirectional import backward as bidirectional_backward
from .bidirectional import forward as bidirectional_forward
from .bidirectional import graph as bidirectional_graph
from .causal import backward as causal_backward
from .causal import empty_starts
from .causal import forward as causal_forward
from .causal import graph as causal_graph

if TYPE_CHECKING:
    from ..bounds import Lengths

Result = TypeVar("Result")


def refusals(*_: Any) -> list[str]:
    """No reasons: this backend can run every call."""
    return []


def by_name(query: Tensor) -> bool:
    """False: this backend runs every call that no faster one can."""
    return False


def bidirectional(query: Tensor, key: Tensor, value: Tensor, masks: Masks, options: Options) -> Tensor:
    """See `flow_attention`."""
    if is_exporting() or not options.variant.has_operator:
        with torch.autocast(query.device.type, enabled=False):
            return bidirectional_graph(query, key, value, masks, options)
    tensors = query, key, value, *masks
    result: Tensor = _apply(_Bidirectional, _EagerBidirectional, tensors, *options.as_args())[0]
    return result


def causal(query: Tensor, key: Tensor, value: Tensor, mask: Mask, options: Options) -> Tensor:
    """See `flow_attention`."""
    return recurrent(query, key, value, mask, None, options)[0]


def recurrent(
    query: Tensor, key: Tensor, value: Tensor, mask: Mask, state: State | None, options: Options
) -> tuple[Tensor, State]:
    """The result and the state after the last token; see `flow_attention_recurrent`."""
    if state is None:
        state = empty_state(query, value, options.variant)
    if is_exporting() or not options.variant.has_operator:
        with torch.autocast(query.device.type, enabled=False):
            return causal_graph(query, key, value, mask, state, options)
    tensors = query, key, value, mask, *state
    result, *rest = _apply(_Causal, _EagerCausal, tensors, *options.as_args())
    return result, tuple(rest[:3])


def packed(query: Tensor, key: Tensor, value: Tensor, lengths: Lengths, is_causal: bool, options: Options) -> Tensor:
    """See `flow_attention_varlen`."""
    if is_exporting() or not options.variant.has_operator:
        # imported here and in the functions below, so that importing the package stays fast
        from .packed import graph

        with torch.autocast(query.device.type, enabled=False):
            return graph(query, key, value, lengths, is_causal, options)
    tensors, longest = (query, key, value, *lengths[:2]), lengths[2:]
    result: Tensor = _apply(_Packed, _EagerPacked, tensors, *longest, is_causal, *options.as_args())[0]
    return result


def _apply(
    function: type[torch.autograd.Function],
    eager: type[torch.autograd.Function],
    tensors: tuple[Tensor | None, ...],
    *options: Any,
) -> Any:
    # Dynamo traces no autograd function that defines jvp
    if torch.compiler.is_compiling():
        return function.apply(*distinct(*tensors), *options)
    return eager.apply(*tensors, *options)


def _bidirectional(
    query: Tensor, key: Tensor, value: Tensor, query_mask: Mask, key_mask: Mask, *options: Any
) -> tuple[Tensor, ...]:
    result, flows = bidirectional_forward(query, key, value, (query_mask, key_mask), _options(*options))
    return result, *flows


def _bidirectional_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    masks, flows, options = (rest[0], rest[1]), Flows(*rest[2:8]), _options(*rest[8:])
    return bidirectional_backward(grad, query, key, value, masks, flows, options)


def _causal(query: Tensor, key: Tensor, value: Tensor, mask: Mask, *rest: Any) -> tuple[Tensor, ...]:
    state, options = rest[:3], _options(*rest[3:])
    result, end, starts = causal_forward(query, key, value, mask, state, options)
    return result, *end, *starts


def _causal_backward(
    grad: Tensor, grad_sums: Tensor, grad_memory: Tensor, grad_scalars: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    grad_end, (query, key, value, mask) = (grad_sums, grad_memory, grad_scalars), rest[:4]
    starts, options = rest[4:7], _options(*rest[7:])
    *grads, grad_start = causal_backward(grad, grad_end, query, key, value, mask, starts, options)
    return *grads, *grad_start


def _packed(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Tensor:
    from .packed import forward

    lengths, is_causal, options = rest[:4], rest[4], _options(*rest[5:])
    return forward(query, key, value, lengths, is_causal, options)


def _packed_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    from .packed import backward

    lengths, is_causal, options = rest[:4], rest[4], _options(*rest[5:])
    return backward(grad, query, key, value, lengths, is_causal, options)


def _options(scale: float, *variant: Any) -> Options:
    return Options(scale, FlowVariant(*variant))


def _fake_bidirectional(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return empty_result(query, value.shape[-1]), *empty_flows(query, key, value)


def _fake_causal(query: Tensor, key: Tensor, value: Tensor, mask: Mask, *state_and_rest: Any) -> tuple[Tensor, ...]:
    state = state_and_rest[:3]
    starts, result = empty_starts(query, state), empty_result(query, value.shape[-1])
    return result, *(torch.empty_like(part) for part in state), *starts


def _fake_gradients(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(x) for x in (query, key, value))


def _fake_causal_backward(
    grad: Tensor, grad_sums: Tensor, grad_memory: Tensor, grad_scalars: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    query, key, value = rest[:3]
    return tuple(torch.empty_like(x) for x in (query, key, value, grad_sums, grad_memory, grad_scalars))


def _fake_packed(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Tensor:
    return query.new_empty(*query.shape[:2], value.shape[-1])


def _without_autocast(implementation: Callable[..., Result]) -> Callable[..., Result]:
    """Disable autocast in an implementation, since it would round the sums."""

    def run(*args: Any) -> Result:
        device = args[0].device.type
        if not torch.is_autocast_enabled(device):
            return implementation(*args)
        with torch.autocast(device, enabled=False):
            return implementation(*args)

    return run


_INPUTS = "Tensor query, Tensor key, Tensor value"
_MASKS = "Tensor? query_mask, Tensor? key_mask"
_STATE = "Tensor sums, Tensor memory, Tensor scalars"
_LENGTHS = "Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, bool is_causal"
# prefixed, since `competition` and `allocation` are also names of arguments in VARIANT
_FLOWS = ", ".join(f"Tensor kept_{name}" for name in Flows._fields)
_bidirectional_operator = register(
    f"bidirectional({_INPUTS}, {_MASKS}, {VARIANT}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _without_autocast(_bidirectional),
    _fake_bidirectional,
)
_bidirectional_backward_operator = register(
    f"bidirectional_backward(Tensor grad, {_INPUTS}, {_MASKS}, {_FLOWS}, {VARIANT}) -> (Tensor, Tensor, Tensor)",
    _without_autocast(_bidirectional_backward),
    _fake_gradients,
)
_causal_operator = register(
    f"causal({_INPUTS}, Tensor? mask, {_STATE}, {VARIANT}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _without_autocast(_causal),
    _fake_causal,
)
_causal_backward_operator = register(
    f"causal_backward(Tensor grad, Tensor grad_sums, Tensor grad_memory, Tensor grad_scalars, {_INPUTS}, Tensor? mask, "
    f"{_STATE}, {VARIANT}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _without_autocast(_causal_backward),
    _fake_causal_backward,
)
_packed_operator = register(
    f"packed({_INPUTS}, {_LENGTHS}, {VARIANT}) -> Tensor", _without_autocast(_packed), _fake_packed
)
_packed_backward_operator = register(
    f"packed_backward(Tensor grad, {_INPUTS}, {_LENGTHS}, {VARIANT}) -> (Tensor, Tensor, Tensor)",
    _without_autocast(_packed_backward),
    _fake_gradients,
)

# the batch is dimension 0, but 1 in the states before each segment
register_vmap("bidirectional", (0,) * 5, (0,) * 7)
register_vmap("bidirectional_backward", (0,) * 12, (0,) * 3)
register_vmap("causal", (0,) * 7, (0,) * 4 + (1,) * 3)
register_vmap("causal_backward", (0,) * 8 + (1,) * 3, (0,) * 6)
# packed tokens have no batch: the mapped dimension is merged with the heads, which all have the same lengths
register_vmap("packed", (1, 1, 1, None, None), (1,))
register_vmap("packed_backward", (1, 1, 1, 1, None, None), (1, 1, 1))


def _differentiable(
    operator: Callable[..., tuple[Tensor, ...]], backward_operator: Callable[..., Any], saved: int, results: int = 1
) -> Any:
    """The methods forward, setup_context and backward of an autograd function for an operator.

    Args:
        saved: the number of leading inputs that are saved for the backward operator. Inputs after them are the tensors
            of a state, if any, and options.
        results: the number of outputs with gradients: the result and the tensors of a state. The others are saved.
    """

    def forward(*inputs: Any) -> tuple[Tensor, ...]:
        return operator(*inputs)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(*inputs[:saved], *output[results:])
        ctx.mark_non_differentiable(*output[results:])
        ctx.options = inputs[saved + results - 1 :]

    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gradients = differentiate(backward_operator, *grads[:results], *ctx.saved_tensors, *ctx.options)
        return *gradients[:3], *(None for _ in range(saved - 3)), *gradients[3:], *(None for _ in ctx.options)

    return staticmethod(forward), staticmethod(setup_context), staticmethod(backward)


class _Bidirectional(torch.autograd.Function):
    generate_vmap_rule = True
    forward, setup_context, backward = _differentiable(
        _bidirectional_operator, _bidirectional_backward_operator, saved=5
    )


class _Causal(torch.autograd.Function):
    generate_vmap_rule = True
    forward, setup_context, backward = _differentiable(_causal_operator, _causal_backward_operator, saved=4, results=4)


class _Packed(torch.autograd.Function):
    generate_vmap_rule = True
    forward, setup_context, backward = _differentiable(
        lambda *inputs: (_packed_operator(*inputs),), _packed_backward_operator, saved=5
    )


class _EagerBidirectional(NoForwardMode, _Bidirectional):
    pass


class _EagerCausal(NoForwardMode, _Causal):
    pass


class _EagerPacked(NoForwardMode, _Packed):
    pass
