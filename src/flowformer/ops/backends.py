"""The implementations of Flow-Attention, what each refuses, and which one runs."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from dataclasses import asdict
from typing import NamedTuple

import torch
from torch import Tensor

from . import library, reference, varlen
from .variant import FlowVariant, nearest

# found, not imported, which would take longer than the rest of the package
HAS_TRITON = importlib.util.find_spec("triton") is not None


class Backend(NamedTuple):
    """One implementation: what it is, why it would refuse, and whether it runs only when asked for by name."""

    name: str
    note: str
    refusals: Callable[[Tensor, Tensor, Tensor, bool, FlowVariant], list[str]]
    bidirectional: Callable[..., Tensor]
    causal: Callable[..., Tensor]
    recurrent: Callable[..., tuple]
    packed: Callable[..., Tensor]
    by_name: bool = False


def choose(
    name: str | None, query: Tensor, key: Tensor, value: Tensor, is_causal: bool, variant: FlowVariant
) -> Backend:
    """The backend of that name, or the first that can run where there is no name."""
    if name is None:
        # Triton's interpreter would run the kernels on a CPU, but only to test them
        if query.device.type == "cuda" and not _triton_refusals(query, key, value, is_causal, variant):
            return BACKENDS["triton"]
        return BACKENDS["torch"]
    if name not in BACKENDS:
        accepted = ", ".join(map(repr, BACKENDS))
        raise ValueError(
            f"unknown backend {name!r}{nearest(name, BACKENDS)}; accepted: {accepted}, or None for the best."
        )
    reasons = BACKENDS[name].refusals(query, key, value, is_causal, variant)
    if reasons:
        raise NotImplementedError(
            f"backend {name!r} cannot run this: {'; '.join(reasons)}. backend=None takes one that can."
        )
    return BACKENDS[name]


def verdicts(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, variant: FlowVariant) -> list[str]:
    """For each backend, whether it can run, and why not."""
    lines = []
    for backend in BACKENDS.values():
        reasons = backend.refusals(query, key, value, is_causal, variant)
        if reasons:
            lines.append(f"{backend.name}: no, {'; '.join(reasons)}")
        else:
            lines.append(f"{backend.name}: {'only by name' if backend.by_name else 'yes'}, {backend.note}")
    return lines


def _none(*_) -> list[str]:
    return []


def _triton_refusals(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, variant: FlowVariant) -> list[str]:
    if query.device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return [f"tensors on {query.device} (the kernels need a GPU)"]
    if not HAS_TRITON:
        return ["triton is not installed"]
    if torch.compiler.is_exporting():
        return ["an exported graph cannot hold the kernels"]
    from .kernels import hardware

    return hardware.refusals(query, value, variant)


def _kernels(is_causal: bool):
    # here, since Triton takes longer to import than the rest of the package
    if is_causal:
        from .kernels import causal

        return causal
    from .kernels import bidirectional

    return bidirectional


def _triton_bidirectional(*args) -> Tensor:
    return _kernels(is_causal=False).bidirectional(*args)


def _triton_causal(*args) -> Tensor:
    return _kernels(is_causal=True).causal(*args)


def _triton_recurrent(*args) -> tuple:
    return _kernels(is_causal=True).recurrent(*args)


def _triton_packed(query, key, value, lengths, is_causal, scale, variant) -> Tensor:
    return _kernels(is_causal).packed(query, key, value, lengths, scale, variant)


def _reference_bidirectional(query, key, value, query_mask, key_mask, scale, variant) -> Tensor:
    key, value = reference.repeat_heads(query, key), reference.repeat_heads(query, value)
    with torch.autocast(query.device.type, enabled=False):
        return reference.bidirectional(query, key, value, query_mask, key_mask, scale, **asdict(variant))


def _torch_causal(query, key, value, mask, scale, variant) -> Tensor:
    return library.causal(query, key, value, mask, None, scale, variant)[0]


def _reference_causal(query, key, value, mask, scale, variant) -> Tensor:
    return _reference_recurrent(query, key, value, mask, None, scale, variant)[0]


def _reference_recurrent(query, key, value, mask, state, scale, variant) -> tuple:
    key, value = reference.repeat_heads(query, key), reference.repeat_heads(query, value)
    with torch.autocast(query.device.type, enabled=False):
        return reference.causal(query, key, value, mask, state, scale, **asdict(variant))


def _reference_packed(query, key, value, lengths, is_causal, scale, variant) -> Tensor:
    sinks, sources = varlen.starts_and_lengths(query.shape[0], key.shape[0], lengths, is_causal)
    parts, stop = [], 0
    for (start_q, length_q), (start_k, length_k) in zip(
        zip(*sinks, strict=True), zip(*sources, strict=True), strict=True
    ):
        q = query[start_q : start_q + length_q].transpose(0, 1)[None]
        k, v = (x[start_k : start_k + length_k].transpose(0, 1)[None] for x in (key, value))
        if is_causal:
            out = _reference_causal(q, k, v, None, scale, variant)
        else:
            out = _reference_bidirectional(q, k, v, None, None, scale, variant)
        parts.append(out[0].transpose(0, 1))
        stop = start_q + length_q
    rest = query.new_zeros(query.shape[0] - stop, query.shape[1], value.shape[-1])
    return torch.cat([*parts, rest])


# in the order of preference
BACKENDS = {
    backend.name: backend
    for backend in (
        Backend(
            "triton",
            "fused kernels",
            _triton_refusals,
            _triton_bidirectional,
            _triton_causal,
            _triton_recurrent,
            _triton_packed,
        ),
        Backend(
            "torch",
            "memory-linear, runs everywhere",
            _none,
            library.bidirectional,
            _torch_causal,
            library.causal,
            library.packed,
        ),
        Backend(
            "reference",
            "keeps matrices of N × M numbers",
            _none,
            _reference_bidirectional,
            _reference_causal,
            _reference_recurrent,
            _reference_packed,
            by_name=True,
        ),
    )
}
