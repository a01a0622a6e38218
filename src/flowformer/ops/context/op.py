"""`flow_attention`, `flow_attention_recurrent` and `flow_attention_varlen` for sequences that are split over ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from .. import backends, checks
from ..bounds import Lengths, PaddedSequences, starts_and_lengths
from ..common import Mask, Masks, Options, State, joint_mask
from ..state import FlowState
from ..variant import FlowVariant
from . import bidirectional, causal, renormalized
from .exchange import Exchange, Group, check_agreement, process_group

_F = TypeVar("_F", bound=Callable[..., Any])


def _not_compiled(function: _F) -> _F:
    """Exclude a function from torch.compile: the exchanges read results on the host, which breaks the graph anyway."""
    return cast(_F, torch.compiler.disable(function))


class Arguments(NamedTuple):
    """The arguments that all calls share. They are checked here, so that all ranks learn of an error on one of them."""

    scale: float | None
    enable_gqa: bool
    variant: FlowVariant | str
    powers: Tensor | None
    backend: str | None
    group: Group

    def options(self, query: Tensor, is_causal: bool) -> Options:
        return checks.options(self.scale, self.variant, self.powers, query, is_causal)


@_not_compiled
def attention(query: Tensor, key: Tensor, value: Tensor, masks: Masks, is_causal: bool, arguments: Arguments) -> Tensor:
    """See `flow_attention`."""
    with _announce_refusals(arguments.group, query) as ranks:
        query, key, value = checks.attention_inputs(query, key, value, arguments.enable_gqa)
        checks.attention_masks(query, key, *masks)
        options = arguments.options(query, is_causal)
        if is_causal:
            checks.causal_lengths(query, key)
        chosen = backends.choose(arguments.backend, query, key, value, is_causal, options.variant)
    _check_same_call(ranks, query, key, value, query.shape[0], is_causal, options)
    if not is_causal:
        return _bidirectional(chosen, options)((query, key, value), masks, options, Exchange(ranks))
    return _causal(chosen)((query, key, value), joint_mask(*masks), None, options, Exchange(ranks), False)[0]


@_not_compiled
def recurrent(
    query: Tensor, key: Tensor, value: Tensor, key_mask: Mask, state: FlowState | None, arguments: Arguments
) -> tuple[Tensor, FlowState]:
    """See `flow_attention_recurrent`."""
    with _announce_refusals(arguments.group, query) as ranks:
        query, key, value = checks.attention_inputs(query, key, value, arguments.enable_gqa)
        checks.attention_masks(query, key, None, key_mask)
        checks.causal_lengths(query, key)
        options = arguments.options(query, True)
        if state is not None:
            checks.state(state, query, value, options.variant)
        chosen = backends.choose(arguments.backend, query, key, value, True, options.variant)
    packed = None if state is None else state.pack()
    differentiable = packed is not None and torch.is_grad_enabled() and any(part.requires_grad for part in packed)
    past = f"with{'out' if state is None else ''} a state{' that needs a gradient' if differentiable else ''}"
    _check_same_call(ranks, query, key, value, query.shape[0], True, options, past)
    result, end = _causal(chosen)((query, key, value), key_mask, packed, options, Exchange(ranks), True)
    return result, FlowState.unpack(end)


@_not_compiled
def packed(
    query: Tensor, key: Tensor, value: Tensor, lengths: Lengths, is_causal: bool, arguments: Arguments
) -> Tensor:
    """See `flow_attention_varlen`. Sequences with tokens on only one rank are computed there, without an exchange."""
    with _announce_refusals(arguments.group, query) as ranks:
        query, key, value = checks.packed_inputs(query, key, value, arguments.enable_gqa)
        checks.cu_seqlens(query, *lengths)
        options = arguments.options(query, is_causal)
        (starts_q, lengths_q), (starts_k, lengths_k) = starts_and_lengths(
            query.shape[0], key.shape[0], lengths, is_causal
        )
        chosen = backends.choose(arguments.backend, query, key, value, is_causal, options.variant)
    _check_same_call(ranks, query, key, value, len(starts_q), is_causal, options)

    tokens = torch.tensor([lengths_q, lengths_k], device=query.device).view(2, -1)
    exchange = Exchange(ranks)
    is_cut = ((exchange.integers(tokens) > 0).any(1).sum(0) > 1).tolist()
    cut = [i for i, each in enumerate(is_cut) if each]
    here = [i for i in cut if lengths_q[i] or lengths_k[i]]
    whole = [i for i, each in enumerate(is_cut) if not each]
    result = query.new_zeros(*query.shape[:2], value.shape[-1])
    if whole or not cut:
        sinks, sources = _tokens(starts_q, lengths_q, whole, query), _tokens(starts_k, lengths_k, whole, key)
        bounds = _bounds(lengths_q, whole, query), _bounds(lengths_k, whole, query), *lengths[2:]
        inputs = query[sinks], key[sources], value[sources]
        result = result.index_copy(0, sinks, chosen.packed(*inputs, bounds, is_causal, options))
    if cut:
        rows = torch.tensor([cut.index(i) for i in here], dtype=torch.long, device=query.device)
        exchange = Exchange(ranks, rows, len(cut))
        padded_q, padded_k = _padded(starts_q, lengths_q, here, query), _padded(starts_k, lengths_k, here, key)
        inputs = padded_q.pad(query), padded_k.pad(key), padded_k.pad(value)
        masks = padded_q.mask, padded_k.mask
        if is_causal:
            out, _ = _causal(chosen)(inputs, masks[0], None, options, exchange, False)
        else:
            out = _bidirectional(chosen, options)(inputs, masks, options, exchange)
        result = result.index_copy(0, padded_q.tokens[masks[0]], out.transpose(1, 2)[masks[0]])
    return result


def _bidirectional(backend: backends.Backend, options: Options) -> Callable[..., Tensor]:
    """The function that computes this rank's part: kernels for "triton", plain torch for all other backends."""
    if backend.name == "triton":
        from ..triton.bidirectional import cut

        return cut.attend
    return renormalized.attend if options.variant.renormalize else bidirectional.attend


def _causal(backend: backends.Backend) -> Callable[..., tuple[Tensor, State]]:
    """The function that computes this rank's part and, if requested, the last state."""
    if backend.name == "triton":
        from ..triton.causal import cut

        return cut.attend
    return partial(causal.attend, recurrent=backend.recurrent)


def _tokens(starts: list[int], lengths: list[int], chosen: list[int], x: Tensor) -> Tensor:
    """The indices of the packed tokens of the chosen sequences."""
    ranges = [torch.arange(starts[i], starts[i] + lengths[i], device=x.device) for i in chosen]
    return torch.cat([torch.arange(0, device=x.device), *ranges])


def _bounds(lengths: list[int], chosen: list[int], x: Tensor) -> Tensor:
    return torch.tensor([0, *(lengths[i] for i in chosen)], device=x.device).cumsum(0)


def _padded(starts: list[int], lengths: list[int], chosen: list[int], x: Tensor) -> PaddedSequences:
    """The chosen sequences as padded rows; unlike `PaddedSequences.of`, also for an empty list."""
    start, length = (
        torch.tensor([each[i] for i in chosen], dtype=torch.long, device=x.device)[:, None]
        for each in (starts, lengths)
    )
    position = torch.arange(max((lengths[i] for i in chosen), default=0), device=x.device)
    mask = position < length
    return PaddedSequences(torch.where(mask, start + position, 0), mask)


@contextmanager
def _announce_refusals(group: Group, query: Tensor) -> Iterator[dist.ProcessGroup]:
    """Announce an error in this rank's arguments to the other ranks, which would otherwise wait for this rank."""
    ranks = process_group(group)
    try:
        yield ranks
    except (TypeError, ValueError, NotImplementedError) as error:
        device = query.device if isinstance(query, Tensor) else torch.device("cpu")
        check_agreement(ranks, device, f"{type(error).__name__}: {error}", refused=True)
        raise


def _check_same_call(
    ranks: dist.ProcessGroup,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    batch: int,
    is_causal: bool,
    options: Options,
    *rest: str,
) -> None:
    """Raise on every rank if the calls of the ranks differ in more than their lengths."""
    grad = torch.is_grad_enabled()
    tensors = ", ".join(
        f"{name} of {x.shape[1]} heads of width {x.shape[-1]}{' that needs a gradient' * (grad and x.requires_grad)}"
        for name, x in (("query", query), ("key", key), ("value", value))
    )
    kind = "causal" if is_causal else "bidirectional"
    form = "packed" if query.dim() == 3 else "padded"
    arguments = f"{kind}, {batch} {form} sequences of {query.dtype}, {tensors}"
    if options.powers is not None:
        arguments += f", with powers{' that need a gradient' * (grad and options.powers.requires_grad)}"
    check_agreement(ranks, query.device, ", ".join([arguments, str(options.scale), str(options.variant), *rest]))
