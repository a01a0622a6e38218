"""The backends of Flow-Attention, in order of preference, and which of them runs a call."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from .._utils import suggestion
from . import reference_backend
from .common import Mask, Masks, Options, State
from .native import op as native_op
from .torch import op as torch_op
from .triton import op as triton_op
from .variant import FlowVariant

if TYPE_CHECKING:
    from .bounds import Lengths


class Backend(NamedTuple):
    """One implementation of Flow-Attention.

    `refusals` returns the reasons why the backend cannot run a call, empty if it can. `by_name` returns whether calls
    with this query run on the backend only if it is requested by name. The other functions implement those of
    `interface.py`, on checked arguments.
    """

    name: str
    note: str  # a short description, for `explain`
    refusals: Callable[[Tensor, Tensor, Tensor, bool, FlowVariant], list[str]]
    by_name: Callable[[Tensor], bool]
    bidirectional: Callable[[Tensor, Tensor, Tensor, Masks, Options], Tensor]
    causal: Callable[[Tensor, Tensor, Tensor, Mask, Options], Tensor]
    recurrent: Callable[[Tensor, Tensor, Tensor, Mask, State | None, Options], tuple[Tensor, State]]
    packed: Callable[[Tensor, Tensor, Tensor, Lengths, bool, Options], Tensor]

    @classmethod
    def of(cls, name: str, note: str, module: ModuleType) -> Backend:
        """The backend whose functions are those of the module."""
        return cls(name, note, *(getattr(module, function) for function in cls._fields[2:]))


def choose(
    name: str | None, query: Tensor, key: Tensor, value: Tensor, is_causal: bool, variant: FlowVariant
) -> Backend:
    """The backend of that name; without a name, the first that can compute this call."""
    if name is None:
        for backend in BACKENDS.values():
            if not backend.by_name(query) and not backend.refusals(query, key, value, is_causal, variant):
                return backend
    if name not in BACKENDS:
        accepted = ", ".join(map(repr, BACKENDS))
        raise ValueError(
            f"unknown backend {name!r}{suggestion(name, BACKENDS)}; accepted: {accepted}, or None for the best."
        )
    reasons = BACKENDS[name].refusals(query, key, value, is_causal, variant)
    if reasons:
        raise NotImplementedError(
            f"backend {name!r} cannot run this: {'; '.join(reasons)}. backend=None takes one that can."
        )
    return BACKENDS[name]


def verdicts(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, variant: FlowVariant) -> list[str]:
    """One line per backend: whether it can run this call, and if not, why."""
    lines = []
    for backend in BACKENDS.values():
        reasons = backend.refusals(query, key, value, is_causal, variant)
        if reasons:
            lines.append(f"{backend.name}: no, {'; '.join(reasons)}")
        else:
            lines.append(f"{backend.name}: {'only by name' if backend.by_name(query) else 'yes'}, {backend.note}")
    return lines


# in order of preference
BACKENDS = {
    backend.name: backend
    for backend in (
        Backend.of("triton", "fused kernels", triton_op),
        Backend.of("native", "C++ for CPUs", native_op),
        Backend.of("torch", "memory-linear, runs everywhere", torch_op),
        Backend.of("reference", "keeps matrices of N × M numbers", reference_backend),
    )
}
