"""The plan of a bidirectional call."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import triton

from ..features import fast
from ..hardware import MAX_DIM, is_hopper, num_sms
from ..launch import Argument, Kernel
from ..plan import Plan, Signatures, Strides, aligned, block_size, variant_of
from . import backward, forward
from .launch_table import tunings
from .records import record_size

MEMORY_SIZE = 128 * 128  # elements of S that one program holds; a larger S is tiled along E
MEMORY_SIZE_IEEE = 64 * 64  # products without tensor cores keep their operands in registers
CHUNK = 1024  # elements of S that one program of a finishing kernel sums
MIN_SEGMENT_FEATURES = 128 * 64  # tokens times features of the smallest useful segment
LONG_SEGMENT = 1024  # minimum tokens per segment if not all programs run at once, since each segment costs a record
ROUND_COST = 0.05  # overhead of each wave of programs, relative to the time of a full one
INTERPRETED = not isinstance(forward.sums_kernel, triton.JITFunction)


class BidirectionalPlan(Plan):
    """The plan of one pass.

    Args:
        tensors: the signatures of query, key, value and result, or in a backward pass of query, key, value, the
            gradient of the result and the gradients of query, key, value; then of both masks, both bounds, the powers.
        longest: tokens of the longest sequence.
        keep: whether there is a backward pass.
        float32_precision: see `precision.py`; None for other dtypes.
        options: what `flat_options` returns.
    """

    is_cut = False  # whether the tokens are one rank's part of a sequence: then no segment is a whole head

    def __init__(
        self,
        tensors: Signatures,
        device: torch.device,
        longest: int,
        keep: bool,
        float32_precision: str | None,
        *options: Any,
    ) -> None:
        super().__init__()
        scale, variant = options[0], variant_of(options)
        tensors, (_, _, bounds, _, powers) = tensors[:-5], tensors[-5:]
        (batch, heads, sinks, dim), (_, key_heads, sources, _), value_shape = (shape for shape, *_ in tensors[:3])
        dtype, value_dim = tensors[0][2], value_shape[-1]
        self.records = heads * (batch if bounds is None else bounds[0][0] - 1)
        self.key_records = self.records * key_heads // heads
        block_d = block_size(dim)
        precision = _precision(dtype, dim, float32_precision)
        memory_size = MEMORY_SIZE_IEEE if precision == "ieee" else MEMORY_SIZE
        block_e = min(block_size(value_dim), memory_size // block_d)
        # programs per SM, limited by the size of S that each holds
        occupancy = next(count for count, size in ((4, 32), (2, 64), (1, MAX_DIM)) if block_d * block_e <= size**2)
        self.segments = segment_count(self.records, longest, dim, occupancy * num_sms(device))
        self.is_whole = self.segments == 1 and not self.is_cut
        self.chunks, self.tiles = -(-dim * value_dim // CHUNK), -(-value_dim // block_e)
        # number of partial sums of ⟨S, dS⟩ per head
        self.products = self.tiles if self.is_whole else self.chunks

        self.tunings = tunings(dim, value_dim, precision, INTERPRETED or is_hopper(device))
        if heads != key_heads:
            # data that is loaded for each query head cannot be pipelined over blocks
            self.tunings = self.tunings | {"grad_source": self.tunings["grad_source"]._replace(stages=1)}
        strides = Strides.of(tensor[:2] for tensor in tensors)
        self.strides = [strides.numbers[i : i + 3] for i in range(0, len(strides.numbers), 3)]
        self.sinks, self.sources = (sinks, heads, self.segments), (sources, heads, self.segments)
        self.scale, self.eps, self.flow_eps = scale, variant.eps, variant.flow_eps
        self.clamp = math.inf if variant.clamp is None else variant.clamp

        self.dims = {"D": dim, "E": value_dim}
        self.tokens = self.dims | strides.constants
        self.tokens |= {"BLOCK_D": block_d, "MAP": variant.feature_map, "FAST": fast(dtype, device)}
        self.tiled = self.tokens | {"BLOCK_E": block_e, "PRECISION": precision}
        self.can_multiply_by_identity = precision in ("bf16", "bf16x3") and block_d <= 128
        self.shared, self.keep, self.whole = {"SHARED": heads // key_heads}, {"KEEP": keep}, {"WHOLE": self.is_whole}
        self.competition, self.allocation = {"COMPETITION": variant.competition}, {"ALLOCATION": variant.allocation}
        self.rescale, self.signed = {"RESCALE": variant.rescale}, {"SIGNED": powers is not None}
        self.is_renormalized = variant.renormalize

        per_sink, _, per_source, _, records, _, vectors = kept = kept_sizes(
            batch * heads, self.records, sinks, sources, dim, value_dim, variant.renormalize
        )
        partial = 0 if self.is_whole else self.records * self.segments * record_size(dim, value_dim)
        parts = 0 if self.is_whole or not variant.renormalize else self.records * self.segments * dim
        self.kept = kept if keep else []
        # without a backward pass, I, the records and Σ c k are scratch, and α, O, Ô and W are not stored
        self.forward_scratch = [partial, parts] if keep else [per_sink, 0, 0, 0, records, 0, vectors, partial, parts]
        powers_parts = 0 if powers is None else 2 * self.records * self.segments
        self.backward_scratch = [
            per_sink, per_source, per_source, records, aligned(self.records * self.products), partial,
            *(aligned(size) for size in (vectors, parts, powers_parts)),
        ]  # fmt: skip

    def forward(
        self,
        query: Argument,
        key: Argument,
        value: Argument,
        query_mask: Argument | None,
        key_mask: Argument | None,
        query_bounds: Argument | None,
        key_bounds: Argument | None,
        powers: Argument | None,
        result: Argument,
        kept: Argument,
        scratch: Argument,
    ) -> Iterator[Kernel]:
        parts = *kept.split(self.kept), *scratch.split(self.forward_scratch)
        incoming, allocation, outgoing, conserved_outgoing, records, *rest = parts
        *competing_sums, partial, own_parts = rest
        if self.is_whole:
            partial, own_parts = records, competing_sums[1]
        competing_flow, competing, competing_parts = self._renormalized(*competing_sums, own_parts)
        extras = query_mask, key_mask, query_bounds, key_bounds
        (q, k, v, r), flow = self.strides, (self.scale, self.eps, self.flow_eps)
        all_tokens = (*q, *k, self.sinks[0], *self.sources)
        yield self._kernel(
            "sums", (query, key, *extras, partial), (*all_tokens, self.scale), self.tokens | self.shared, programs=2
        )
        yield self._kernel(
            "flows",
            (query, key, *extras, partial, incoming, outgoing),
            (*all_tokens, *flow),
            self.tokens | self.shared | self.keep,
            programs=2,
        )
        yield self._kernel(
            "memory",
            (key, value, key_mask, key_bounds, powers, partial, conserved_outgoing, competing_parts),
            (*k, *v, *self.sources, *flow, self.clamp),
            self.tiled | self.shared | self.keep | self.competition | self.whole | self.rescale,
            programs=self.tiles,
        )
        if not self.is_whole:
            yield self._finish(
                forward.finish_kernel,
                (partial, records, competing_parts, competing),
                self.competition | self.rescale | self.signed | {"VECTORS": triton.next_power_of_2(4 * self.dims["D"])},
            )
        yield self._kernel(
            "result",
            (query, result, query_mask, query_bounds, powers, records, incoming, allocation, competing, competing_flow),
            (*q, *r, *self.sinks, *flow),
            self.tiled | self.keep | self.allocation,
        )

    def backward(
        self,
        query: Argument,
        key: Argument,
        value: Argument,
        grad: Argument,
        grad_query: Argument,
        grad_key: Argument,
        grad_value: Argument,
        query_mask: Argument | None,
        key_mask: Argument | None,
        query_bounds: Argument | None,
        key_bounds: Argument | None,
        powers: Argument | None,
        kept: Argument,
        scratch: Argument,
    ) -> Iterator[Kernel]:
        incoming, allocation, outgoing, conserved_outgoing, records, *competing_sums = kept.split(self.kept)
        overlap, grad_outgoing, grad_conserved, grad_records, products, partial, *rest = scratch.split(
            self.backward_scratch
        )
        *grad_sums, powers_parts = rest
        if self.is_whole:
            partial, grad_sums[1] = grad_records, grad_sums[0]
        competing_flow, competing, grad_competing, grad_competing_parts = self._renormalized(
            *competing_sums, *grad_sums
        )
        flow, grad_powers = competing_flow or incoming, None if powers is None else powers_parts
        sources = key_mask, key_bounds, powers, records, partial, grad_records, grad_competing
        per_source = outgoing, conserved_outgoing, grad_outgoing, grad_conserved
        q, k, v, g, dq, dk, dv = self.strides
        yield self._kernel(
            "grad_memory",
            (
                query, grad, query_mask, query_bounds, powers, records, partial, flow, allocation, overlap, competing,
                grad_competing_parts, grad_powers, products,
            ),
            (*q, *g, *self.sinks, self.scale, self.eps),
            self.tiled | self.allocation | self.whole,
            programs=self.tiles,
        )  # fmt: skip
        if not self.is_whole:
            yield self._finish(
                backward.grad_finish_kernel,
                (partial, records, grad_records, competing, grad_competing_parts, grad_competing, products),
                {"BLOCK_D": self.tokens["BLOCK_D"]},
            )
        yield self._kernel(
            "grad_competition",
            (key, value, *sources, products, grad_powers, *per_source),
            (*k, *v, *self.sources, self.products, self.scale, self.eps, self.clamp),
            self.tiled | self.shared | self.competition | {"PRODUCTS": triton.next_power_of_2(self.products)},
        )
        yield self._kernel(
            "grad_query",
            (
                query, grad, grad_query, query_mask, query_bounds, powers, records, partial, incoming, allocation,
                overlap, competing, competing_flow,
            ),
            (*q, *g, *dq, *self.sinks, self.scale, self.eps),
            self.tiled | self.allocation,
        )  # fmt: skip
        yield self._kernel(
            "grad_source",
            (key, value, grad_key, grad_value, *sources, *per_source),
            (*k, *v, *dk, *dv, *self.sources, self.scale, self.eps, self.clamp),
            self.tiled | self.shared | self.competition,
            heads=self.key_records,
        )

    def _renormalized(self, *arguments: Argument) -> Sequence[Argument | None]:
        """Arguments for renormalised variants only; None compiles to no kernel parameter."""
        return arguments if self.is_renormalized else [None] * len(arguments)

    def _kernel(
        self,
        name: str,
        arguments: tuple[Argument | None, ...],
        numbers: tuple[Any, ...],
        constants: Mapping[str, Any],
        programs: int = 1,
        heads: int | None = None,
    ) -> Kernel:
        """A kernel with `programs` for each segment of each head."""
        module = backward if name.startswith("grad_") else forward
        tuning = self.tunings[name]
        eye = tuning.eye and self.can_multiply_by_identity
        constants = {**constants, "BLOCK": tuning.block, "STAGES": tuning.stages, "EYE": eye}
        blocks = (tuning.block >> halvings for halvings in range(1, 5))
        smaller = [{"STAGES": 1}, *({"BLOCK": block} for block in blocks if block >= 16)]
        grid = (self.records if heads is None else heads) * self.segments, programs, 1
        return Kernel(getattr(module, f"{name}_kernel"), grid, arguments, numbers, constants, tuning.warps, smaller)

    def _finish(self, function: Any, arguments: tuple[Argument | None, ...], constants: dict[str, Any]) -> Kernel:
        """A kernel that sums the records of a head's segments."""
        constants = self.dims | {"CHUNK": CHUNK} | constants
        return Kernel(function, (self.records, self.chunks, 1), arguments, (self.segments,), constants)


def _precision(dtype: torch.dtype, dim: int, float32_precision: str | None) -> str:
    """How matrices are multiplied, see `precision.py`."""
    precision = float32_precision or {torch.float16: "bf16x3", torch.bfloat16: "bf16"}[dtype]
    if precision == "bf16" and dim < 8:
        # with so few features rounding errors do not average out
        precision = "bf16x3"
    if INTERPRETED:
        precision = "rounded" if precision == "bf16" else "ieee"
    return precision


def segment_count(records: int, longest: int, dim: int, slots: int) -> int:
    """The number of segments per head that leaves the fewest of `slots` concurrent programs idle."""

    def filled(segments: int) -> float:
        rounds = -(-records * segments // slots)
        return records * segments / slots / rounds - ROUND_COST * rounds

    shortest = MIN_SEGMENT_FEATURES // min(max(dim, 8), 64)
    most = max(min(slots // records, longest // shortest), min(8 * slots // records, longest // LONG_SEGMENT))
    return max(range(1, max(1, most) + 1), key=filled)


def kept_sizes(
    rows: int, records: int, sinks: int, sources: int, dim: int, value_dim: int, renormalize: bool
) -> list[int]:
    """Sizes of I, α, O, Ô, the records and, if renormalised, W and Σ c k; symbolic if the lengths are."""
    sinks, sources = aligned(rows * sinks), aligned(rows * sources)
    competing = [sinks, aligned(records * dim)] if renormalize else [0, 0]
    return [sinks, sinks, sources, sources, aligned(records * record_size(dim, value_dim)), *competing]
