"""The plan of a causal call."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

import torch
import triton

from ...state import num_sums
from ..features import CENTRES, fast
from ..hardware import num_sms
from ..launch import Argument, Kernel
from ..plan import Plan, Signatures, Strides, Tuning, aligned, block_size, variant_of
from . import backward_flows, backward_qk, backward_v, forward_flows, forward_output
from .launch_table import config
from .planes import FORWARD_PLANES, GRAD_PLANES, PLANES, RENORMALIZED_PLANES

SEGMENTS_PER_SM = 4  # over all heads: two waves of two programs
BUSY_SHARE = 0.75  # share of the SMs above which whole heads count as busy, so that only long ones are split
# minimum tokens per segment, below and above that share
MIN_SEGMENT, MIN_BUSY_SEGMENT = 256, 2048
NEGLIGIBLE_EPS = 2.0**-14  # an ε that vanishes when added to bfloat16 features of about 1/2, even several times


def _is_uniform(dim: int, value_dim: int) -> bool:
    """Whether queries, keys and values have the same width: for these ptxas 12.8 compiles wgmma correctly."""
    return block_size(dim) == block_size(value_dim) >= 64


class CausalPlan(Plan):
    """The plan of one pass.

    Args:
        tensors: the signatures of query, key, value, mask, bounds, powers, then of the state, or in a backward pass of
            the gradients of result and last state, of the state's scalars, of the result and of what the forward pass
            kept.
        longest: tokens of the longest sequence.
        keep: whether there is a backward pass.
        options: what `flat_options` returns.

    Attributes:
        state: sizes of the three tensors of a state in one buffer.
        start: the same for the gradient of the first state, then sizes of the parts of the powers' gradient.
    """

    # whether the tokens are one rank's part of a sequence: its first segment then also has a past
    is_cut = False

    def __init__(self, tensors: Signatures, device: torch.device, longest: int, keep: bool, *options: Any) -> None:
        scale, variant = options[0], variant_of(options)
        (shape, _, dtype, _), (key_shape, *_), (value_shape, *_), _, bounds, powers, *_ = tensors
        (batch, heads, length, dim), key_heads, value_dim = shape, key_shape[1], value_shape[3]
        # operands of several widths need kernels without wgmma, see `launch.Launches`
        super().__init__(wgmma=_is_uniform(dim, value_dim))
        self.rows = heads * (batch if bounds is None else bounds[0][0] - 1)
        self.segments = segment_count(self.rows, longest, device)
        self.is_split = self.segments > 1 or self.is_cut
        self.config = config(dtype, dim, value_dim, variant.feature_map)
        self.size = segment_chunks(longest, self.segments, self.config.chunk) * self.config.chunk
        self.plane = batch * heads * length
        self.eps, self.flow_eps = variant.eps, variant.flow_eps
        self.clamp = math.inf if variant.clamp is None else variant.clamp
        # a scale of None compiles kernels without the multiplication
        self.tokens = heads, heads // key_heads, length, self.size, self.segments, None if scale == 1 else scale
        self.block_d, self.block_e = block_size(dim), block_size(value_dim)
        self.tile_d, self.tile_e = min(self.block_d, self.config.tile), min(self.block_e, self.config.tile)
        self.feature_tiles, self.value_tiles = triton.cdiv(dim, self.tile_d), triton.cdiv(value_dim, self.tile_e)
        # with fewer than sixteen features rounding errors do not average out
        is_bf16 = dtype == torch.bfloat16 and device.type == "cuda" and dim >= 16
        self.features = {
            "D": dim,
            "BLOCK_D": self.block_d,
            "MAP": variant.feature_map,
            # float16 is computed as float32: it is more precise than the fast sigmoid, its range too small for the sums
            "FAST": is_bf16 and fast(dtype, device),
            "PRECISION": "bf16" if is_bf16 else "tf32x3" if device.type == "cuda" else "ieee",
        }
        self.values = {"E": value_dim, "BLOCK_E": self.tile_e}
        self.is_renormalized, self.renormalize = variant.renormalize, {"RENORMALIZE": variant.renormalize}
        self.competition = {"COMPETITION": variant.competition, **self.renormalize}
        self.roles = {**self.competition, "ALLOCATION": variant.allocation != "none"}
        self.raised = {"RAISED": self.features["PRECISION"] != "bf16" or self.eps > NEGLIGIBLE_EPS}
        # for W; None compiles to no kernel parameter
        self.competing_eps = variant.flow_eps if variant.renormalize else None
        self.keep, self.split = {"KEEP": keep}, {"SPLIT": self.is_split}
        # REVERSE and BALANCE of each launch of gradient_kernel: those for dQ, then the one for dK
        tiled = [(0, "measure"), (0, "measured")] if dtype == torch.bfloat16 else [(0, "none")]
        for_queries = [(0, "own")] if self.feature_tiles == 1 else tiled
        # whether scaling q changes R (or qS/W) only through ε, which vanishes in bfloat16
        invariant = variant.renormalize or variant.allocation == "none"
        invariant = invariant and max(variant.eps, variant.flow_eps) < NEGLIGIBLE_EPS
        self.centre = CENTRES[variant.feature_map] if invariant and dtype == torch.bfloat16 else 0.0
        # dK uses what was measured for dQ; with centred features that is another quantity
        shares = variant.renormalize and not self.centre and for_queries[-1][1] != "none"
        self.gradients = [*for_queries, (1, "measured" if shares else "none")]

        rows, segments, tiles = self.rows, self.segments, self.value_tiles
        self.width = dim * value_dim
        self.state = state_sizes(rows, dim, value_dim, num_sums(variant))
        self.start = [*self.state, *powers_size(rows, segments, powers is not None)]
        self.kept = kept_sizes(shape, value_dim, rows, longest, segments, self.config.chunk, keep, num_sums(variant))
        sums, memories = self.kept[1], self.kept[3]
        vectors = 2 * rows * segments * dim
        competing = vectors // 2 if variant.renormalize else 0
        # per segment Σk and Σq, Σk/O and Σq/I, log Σ exp(Ô), S; per token Î and Ô; per chunk Σk/O and Σq/I; per segment
        # Σ c k
        sizes = vectors, vectors, rows * segments, memories, 2 * self.plane, 2 * (sums // num_sums(variant)), competing
        self.forward_scratch = [aligned(size) for size in sizes] if self.is_split else []
        # per token the planes; per chunk the gradients after it; per segment dΣk and dΣq, and Z
        planes = GRAD_PLANES.value + 2 * tiles
        if any(balance == "measured" for _, balance in self.gradients):
            planes += 2 * self.feature_tiles
        backward = [planes * self.plane, sums, vectors, rows * segments * tiles]
        if self.is_split:
            # d(Σk/O) and d(Σq/I), Σ (k + ε) exp(Ô − L_end)/D, dS, dS after each segment, and d(Σ c k)
            backward += [vectors * tiles, vectors // 2, memories, memories, competing * tiles]
        self.backward_scratch = [aligned(size) for size in backward]

    def forward(
        self,
        query: Argument,
        key: Argument,
        value: Argument,
        positions: Argument | None,
        bounds: Argument | None,
        powers: Argument | None,
        sums: Argument | None,
        memory: Argument | None,
        scalars: Argument | None,
        result: Argument,
        kept: Argument,
        end: Argument,
        scratch: Argument,
    ) -> Iterator[Kernel]:
        """The kernels of a forward pass, from its inputs and the buffers it allocates."""
        flows, chunk_sums, logs, memories = kept.split(self.kept)
        end_sums, end_memory, end_scalars = end.split(self.state)
        config, kinds = self.config, self.split | self.keep
        partial = conserved = local_flows = local_sums = competing = None
        if self.is_split:
            partial, conserved, totals, increments, local_flows, local_sums, competing = scratch.split(
                self.forward_scratch
            )
            yield self._kernel(
                forward_flows.sums_kernel,
                config.sums,
                (query, key, positions, bounds, partial),
                (query, key),
                (*self.tokens, self.eps),
                self.features,
            )
        yield self._kernel(
            forward_flows.flows_kernel,
            config.flows,
            (
                query, key, positions, bounds, powers, sums, scalars, partial, conserved, flows, chunk_sums,
                local_flows, local_sums, logs, end_sums, end_scalars,
            ),
            (query, key),
            (self.plane, *self.tokens, self.eps, self.flow_eps, self.clamp),
            self.features | self.roles | kinds,
        )  # fmt: skip
        if self.is_split:
            yield self._kernel(
                forward_flows.conserve_kernel,
                config.sums,
                (
                    key, positions, bounds, powers, sums, scalars, conserved, flows, chunk_sums, local_flows,
                    local_sums, totals, end_sums,
                ),
                (key,),
                (self.plane, *self.tokens, self.eps, self.clamp),
                self.features | self.competition | self.keep,
            )  # fmt: skip
            yield self._kernel(
                forward_output.memory_kernel,
                config.memory,
                (
                    key, value, positions, bounds, powers, scalars, flows, totals, logs, end_scalars, increments,
                    *self._renormalized(competing),
                ),
                (key, value),
                (self.plane, *self.tokens, self.eps, self.clamp),
                self.features | self.values | self.competition | {"CENTRE": self.centre},
                tiles=self.value_tiles,
            )  # fmt: skip
            yield self._scan(increments, memory, memories, end_memory, reverse=False)
        yield self._kernel(
            forward_output.output_kernel,
            config.output,
            (
                query, key, value, result, positions, bounds, powers, sums, scalars, memory, conserved, flows,
                local_flows, logs, memories, end_memory, *self._renormalized(competing, chunk_sums, end_sums),
            ),
            (query, key, value, result),
            (self.plane, *self.tokens, self.eps, self.competing_eps, self.clamp),
            self.features | self.values | self.roles | self.raised | kinds,
            tiles=self.value_tiles,
        )  # fmt: skip

    def backward(
        self,
        query: Argument,
        key: Argument,
        value: Argument,
        positions: Argument | None,
        bounds: Argument | None,
        powers: Argument | None,
        grad: Argument,
        grad_end: Argument | None,
        scalars: Argument | None,
        result: Argument,
        kept: Argument,
        grad_query: Argument,
        grad_key: Argument,
        grad_value: Argument,
        start: Argument,
        scratch: Argument,
    ) -> Iterator[Kernel]:
        """The kernels of a backward pass, from its inputs and the buffers it allocates."""
        flows, chunk_sums, logs, memories = kept.split(self.kept)
        start_sums, start_memory, start_scalars, *grad_powers = start.split(self.start)
        grad_sums, grad_memory, grad_scalars = (None, None, None) if grad_end is None else grad_end.split(self.state)
        grads, after, partial, carried, *of_segments = scratch.split(self.backward_scratch)
        no_powers: list[Argument | None] = [None]
        config, kinds = self.config, self.competition | self.split
        features = self.features | {"TILES": self.value_tiles}
        tokens, extras = (query, key, value, grad, result, grad_value), (positions, bounds, powers, scalars)
        grad_memories, conserved, reaching, competing = grad_memory, None, None, None
        if self.is_split:
            conserved, reaching, increments, grad_memories, competing = of_segments
            yield self._kernel(
                backward_v.grad_memory_kernel,
                config.grad_memory,
                (
                    query, grad, result, positions, bounds, powers, flows, grads, increments, conserved,
                    *self._renormalized(competing),
                ),
                (query, grad, result),
                (self.plane, *self.tokens, self.eps),
                features | self.values | self.renormalize,
                tiles=self.value_tiles,
            )  # fmt: skip
            yield self._scan(increments, grad_memory, grad_memories, start_memory, reverse=True)
        yield self._kernel(
            backward_v.value_gradient_kernel,
            config.value_gradient,
            (
                *tokens, *extras, flows, grads, logs, grad_memories, start_memory, carried, conserved, reaching,
                *self._renormalized(competing, grad_sums),
            ),
            tokens,
            (self.plane, *self.tokens, self.eps, self.clamp),
            features | self.values | self.raised | kinds,
            tiles=self.value_tiles,
        )  # fmt: skip
        yield self._kernel(
            backward_flows.flow_gradient_kernel,
            config.flow_gradient,
            (
                query, key, *extras, grad_sums, grad_scalars, flows, grads, logs, carried, conserved, reaching, partial,
                after, start_sums, start_scalars, *self._renormalized(competing), *(grad_powers or no_powers),
            ),
            (query, key),
            (self.plane, *self.tokens, self.eps, self.clamp),
            features | kinds,
        )  # fmt: skip
        sides = (query, key, grad, value, grad_query, memories), (key, query, value, grad, grad_key, grad_memories)
        for reverse, balance in self.gradients:
            *strided, states = sides[reverse]
            constants = {
                "BLOCK_D": self.tile_d,
                "E": self.values["E"],
                "BLOCK_E": self.block_e,
                # the sums of the last state change when q is scaled, so they must have no gradient, unless qS/W is used
                "CENTRE": 0.0
                if reverse or (self._has_end_gradient(grad_end) and not self.is_renormalized)
                else self.centre,
            }
            yield self._kernel(
                backward_qk.gradient_kernel,
                config.gradient,
                (
                    *strided, positions, bounds, scalars, grad_sums, flows, grads, chunk_sums, states, partial, after,
                    start_sums,
                ),
                strided,
                (self.plane, *self.tokens, self.eps),
                features | constants | self.renormalize | self.raised | {"BALANCE": balance, "REVERSE": reverse},
                tiles=self.feature_tiles,
            )  # fmt: skip

    def _has_end_gradient(self, grad_end: Argument | None) -> bool:
        """Whether the state after the last token of the sequence may have a gradient."""
        return grad_end is not None

    def _renormalized(self, *arguments: Argument | None) -> Sequence[Argument | None]:
        """Arguments for renormalised variants only; None compiles to no kernel parameter."""
        return arguments if self.is_renormalized else [None] * len(arguments)

    def _kernel(
        self,
        function: Any,
        tuning: Tuning,
        arguments: Sequence[Argument | None],
        strided: Iterable[Argument],
        numbers: Sequence[Any],
        constants: dict[str, Any],
        tiles: int = 1,
    ) -> Kernel:
        """A kernel for every head, segment and tile, which takes the strides of `strided`, then `numbers`."""
        strides = Strides.of((x.tensor.shape, x.tensor.stride()) for x in strided)
        constants = constants | strides.constants | {"C": self.config.chunk, "STAGES": tuning.stages}
        grid = self.rows, self.segments, tiles
        return Kernel(
            function, grid, arguments, (*strides.numbers, *numbers), constants, tuning.warps, smaller=({"STAGES": 1},)
        )

    def _scan(self, *arguments: Argument | None, reverse: bool) -> Kernel:
        """Sums the memories of the segments before each segment, in reverse after it."""
        block = min(256, triton.next_power_of_2(self.width))
        constants = {"WIDTH": self.width, "BLOCK": block, "REVERSE": reverse}
        grid = self.rows, triton.cdiv(self.width, block), 1
        return Kernel(forward_output.scan_kernel, grid, arguments, (self.segments,), constants)


def segment_count(rows: int, longest: int, device: torch.device) -> int:
    """The number of segments of each of `rows` heads; symbolic if the arguments are."""
    sms = num_sms(device)
    if rows > sms:
        # do not split: a second segment only re-reads tokens
        return 1
    most = SEGMENTS_PER_SM * sms // torch.sym_max(rows, 1)
    tokens = MIN_SEGMENT if rows < BUSY_SHARE * sms else MIN_BUSY_SEGMENT
    return cast("int", torch.sym_max(1, torch.sym_min(most, (longest + tokens - 1) // tokens)))


def segment_chunks(longest: int, segments: int, chunk: int) -> int:
    return cast("int", torch.sym_max(1, (longest + segments * chunk - 1) // (segments * chunk)))


def state_sizes(rows: int, dim: int, value_dim: int, sums: int) -> list[int]:
    """Sizes of the three tensors of a state in one buffer, each aligned; a state has 4 or 5 `sums`."""
    return [aligned(size) for size in (sums * rows * dim, rows * dim * value_dim, 3 * rows)]


def powers_size(rows: int, segments: int, has_powers: bool) -> list[int]:
    """Sizes of what follows the gradient of the first state: the parts of dτ and dγ of each segment."""
    return [2 * rows * segments] if has_powers else []


def kept_sizes(
    shape: Sequence[int], value_dim: int, rows: int, longest: int, segments: int, chunk: int, keep: bool, sums: int
) -> list[int]:
    """Sizes of the planes of flows, the sums before chunks (only if kept), logs and memories."""
    batch, heads, length, dim = shape
    planes = (PLANES if sums == 4 else RENORMALIZED_PLANES) if keep else FORWARD_PLANES
    chunks = segments * segment_chunks(longest, segments, chunk) if keep else 0
    sizes = planes.value * batch * heads * length, sums * rows * chunks * dim, rows * (segments + 1)
    return [aligned(size) for size in (*sizes, rows * segments * dim * value_dim)]
