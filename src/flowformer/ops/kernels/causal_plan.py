"""How the causal kernels are launched: a table of configurations, and the plan of a kind of call."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..variant import FlowVariant
from . import causal_backward, causal_forward, causal_gradient, causal_parts
from .features import CENTRES, fast
from .hardware import num_sms
from .launch import Argument, Kernel, Launches
from .plan import PLAN_CACHE_SIZE, Strides, aligned, signature

SEGMENTS_PER_SM = 4  # of all heads together: two rounds of two programs
BUSY = 0.75  # share of the SMs that whole heads must occupy for only long ones to be cut
SHORTEST, LONG = 256, 2048  # tokens worth a segment of their own, where heads occupy fewer SMs than that, and else
SMALL = 2.0**-14  # an ε that bfloat16 features of about a half cannot hold, not even several times


class Shape(NamedTuple):
    """How one kernel is launched."""

    warps: int
    stages: int


class Config(NamedTuple):
    """How the kernels of one dtype and head dimension are launched."""

    chunk: int  # tokens that meet in one product
    tile: int  # values, or features, of one program where they are shared out
    sums: Shape  # the kernels that need φ and little else
    memory: Shape
    flows: Shape
    output: Shape
    grad_memory: Shape
    value_gradient: Shape
    flow_gradient: Shape
    gradient: Shape


def _same(chunk: int, tile: int, warps: int, stages: int) -> Config:
    return Config(chunk, tile, *[Shape(warps, stages)] * 8)


CONFIGS = {
    (torch.bfloat16, 64): Config(
        chunk=64,
        tile=64,
        sums=Shape(4, 3),
        memory=Shape(4, 3),
        flows=Shape(4, 3),
        output=Shape(4, 3),
        grad_memory=Shape(4, 4),
        value_gradient=Shape(4, 3),
        flow_gradient=Shape(4, 3),
        gradient=Shape(4, 1),
    ),
    (torch.bfloat16, 128): _same(64, 128, 8, 1),
    (torch.bfloat16, 256): _same(32, 64, 8, 1),
    # float32 takes twice the registers and shared memory, and float16 is multiplied as float32
    (torch.float16, 64): _same(16, 64, 4, 1),
    (torch.float16, 128): _same(16, 64, 8, 1),
    (torch.float16, 256): _same(16, 32, 8, 1),
    (torch.float32, 64): _same(16, 64, 4, 1),
    (torch.float32, 128): _same(16, 32, 8, 1),
    (torch.float32, 256): _same(16, 32, 8, 1),
}


def config(dtype: torch.dtype, dim: int, value_dim: int, feature_map: str) -> Config:
    size = next(size for size in (64, 128, 256) if max(dim, value_dim) <= size)
    found = CONFIGS[dtype, size]
    if found.chunk > 32 and not (dim == value_dim == size and feature_map == "sigmoid"):
        # a longer chunk needs wgmma
        found = found._replace(chunk=32)
    return found


def _is_uniform(dim: int, value_dim: int) -> bool:
    """Whether queries, keys and values are of one width: the shapes whose wgmma ptxas 12.8 addresses right."""
    return _block(dim) == _block(value_dim) >= 64


class Plan:
    """What calls of one kind have in common, and the kernels compiled for them.

    Args:
        tensors: the signature of query, key, value, mask, bounds and whatever else a kernel is compiled for.
    """

    def __init__(self, tensors: tuple, device: torch.device, longest: int, keep: bool, scale, variant: FlowVariant):
        (shape, _, dtype, _), (key_shape, *_), (value_shape, *_), _, bounds, *_ = tensors
        (batch, heads, length, dim), key_heads, value_dim = shape, key_shape[1], value_shape[3]
        self.rows = heads * (batch if bounds is None else bounds[0][0] - 1)
        self.segments = segment_count(self.rows, longest, device)
        self.config = config(dtype, dim, value_dim, variant.feature_map)
        self.size = segment_chunks(longest, self.segments, self.config.chunk) * self.config.chunk
        self.plane = batch * heads * length
        self.eps, self.flow_eps = variant.eps, variant.flow_eps
        self.clamp = float("inf") if variant.clamp is None else variant.clamp
        # without a scale, kernels are compiled to spare the product
        self.tokens = heads, heads // key_heads, length, self.size, self.segments, None if scale == 1 else scale
        self.block_d, self.block_e = _block(dim), _block(value_dim)
        self.tile_d, self.tile_e = min(self.block_d, self.config.tile), min(self.block_e, self.config.tile)
        self.feature_tiles, self.value_tiles = triton.cdiv(dim, self.tile_d), triton.cdiv(value_dim, self.tile_e)
        # fewer than sixteen features do not average the rounding of a product out
        on_gpu = device.type == "cuda"
        half = dtype == torch.bfloat16 and on_gpu and dim >= 16
        self.features = {
            "D": dim,
            "BLOCK_D": self.block_d,
            "MAP": variant.feature_map,
            # float16 is finer than the fast sigmoid, and its range too small for the sums: it computes as float32 does
            "FAST": half and fast(dtype, device),
            "DOT": tl.bfloat16 if half else tl.float32,
            # three products of the tensor cores keep what one would lose of a float32
            "PRECISION": "tf32x3" if on_gpu else "ieee",
        }
        self.values = {"E": value_dim, "BLOCK_E": self.tile_e}
        self.competition = {"COMPETITION": variant.competition}
        self.roles = {**self.competition, "ALLOCATION": variant.allocation != "none"}
        self.keep, self.split = {"KEEP": keep}, {"SPLIT": self.segments > 1}
        self.launches = Launches(wgmma=_is_uniform(dim, value_dim))
        # the launches for the gradients of queries, then of keys (in reverse), and how they are balanced
        tiled = [(0, "measure"), (0, "measured")] if dtype == torch.bfloat16 else [(0, "none")]
        self.gradients = [*([(0, "own")] if self.feature_tiles == 1 else tiled), (1, "none")]
        # scaling q changes nothing but by way of ε, which bfloat16 does not see
        invariant = variant.allocation == "none" and max(variant.eps, variant.flow_eps) < SMALL
        self.centre = CENTRES[variant.feature_map] if invariant and dtype == torch.bfloat16 else 0.0

        rows, segments, tiles = self.rows, self.segments, self.value_tiles
        self.width = dim * value_dim
        self.state = state_sizes(rows, dim, value_dim)
        self.kept = kept_sizes(shape, value_dim, rows, longest, segments, self.config.chunk, keep)
        sums, memories = self.kept[1], self.kept[3]
        vectors = 2 * rows * segments * dim
        # of segments Σk and Σq, Σk/O and Σq/I, log Σ exp(Ô) and S; of tokens Î and Ô; of chunks the sums before them
        forward = vectors, vectors, rows * segments, memories, 2 * self.plane, sums // 2
        self.forward_scratch = [aligned(size) for size in forward] if segments > 1 else []
        # of tokens the planes; of chunks what comes after them; of segments the gradients of Σk and Σq, and Z
        planes = causal_parts.GRAD_PLANES.value + 2 * tiles
        if (0, "measure") in self.gradients:
            planes += 2 * self.feature_tiles
        backward = [planes * self.plane, sums, vectors, rows * segments * tiles]
        if segments > 1:
            # the gradients of Σk/O and Σq/I, what later ones reach it by, dS, and dS after it
            backward += [vectors * tiles, vectors // 2, memories, memories]
        self.backward_scratch = [aligned(size) for size in backward]

    def forward(
        self, query, key, value, positions, bounds, sums, memory, scalars, result, kept, end, scratch
    ) -> Iterator[Kernel]:
        """The kernels of a forward pass. Arguments: as `causal.forward` has them, and what it allocates."""
        flows, chunk_sums, logs, memories = kept.split(self.kept)
        end_sums, end_memory, end_scalars = end.split(self.state)
        shapes, kinds = self.config, self.split | self.keep
        partial = conserved = local_flows = local_sums = None
        if self.segments > 1:
            partial, conserved, totals, increments, local_flows, local_sums = scratch.split(self.forward_scratch)
            yield self._kernel(
                causal_forward.sums_kernel,
                shapes.sums,
                (query, key, positions, bounds, partial),
                (query, key),
                (*self.tokens, self.eps),
                self.features,
            )
        yield self._kernel(
            causal_forward.flows_kernel,
            shapes.flows,
            (
                query, key, positions, bounds, sums, scalars, partial, conserved, flows, chunk_sums, local_flows,
                local_sums, logs, end_sums, end_scalars,
            ),
            (query, key),
            (self.plane, *self.tokens, self.eps, self.flow_eps, self.clamp),
            self.features | self.roles | kinds,
        )  # fmt: skip
        if self.segments > 1:
            yield self._kernel(
                causal_forward.conserve_kernel,
                shapes.sums,
                (
                    key, positions, bounds, sums, scalars, conserved, flows, chunk_sums, local_flows, local_sums,
                    totals, end_sums,
                ),
                (key,),
            (self.plane, *self.tokens, self.eps, self.clamp),
                self.features | self.competition | self.keep,
            )  # fmt: skip
            yield self._kernel(
                causal_forward.memory_kernel,
                shapes.memory,
                (key, value, positions, bounds, scalars, flows, totals, logs, end_scalars, increments),
                (key, value),
                (self.plane, *self.tokens, self.eps, self.clamp),
                self.features | self.values | self.competition | {"CENTRE": self.centre},
                tiles=self.value_tiles,
            )
            yield self._scan(increments, memory, memories, end_memory, reverse=False)
        yield self._kernel(
            causal_forward.output_kernel,
            shapes.output,
            (
                query, key, value, result, positions, bounds, sums, scalars, memory, conserved, flows, local_flows,
                logs, memories, end_memory,
            ),
            (query, key, value, result),
            (self.plane, *self.tokens, self.eps, self.clamp),
            self.features | self.values | self.roles | kinds,
            tiles=self.value_tiles,
        )  # fmt: skip

    def backward(
        self, query, key, value, positions, bounds, grad, grad_end, scalars, result, kept, grad_query, grad_key,
        grad_value, start, scratch,
    ) -> Iterator[Kernel]:  # fmt: skip
        """The kernels of a backward pass. Arguments: as `causal.backward` has them, and what it allocates."""
        flows, chunk_sums, logs, memories = kept.split(self.kept)
        start_sums, start_memory, start_scalars = start.split(self.state)
        grad_sums, grad_memory, grad_scalars = (None, None, None) if grad_end is None else grad_end.split(self.state)
        grads, after, partial, carried, *apart = scratch.split(self.backward_scratch)
        shapes, kinds = self.config, self.competition | self.split
        features = self.features | {"TILES": self.value_tiles}
        everything, extras = (query, key, value, grad, result, grad_value), (positions, bounds, scalars)
        grad_memories, conserved, reaching = grad_memory, None, None
        if self.segments > 1:
            conserved, reaching, increments, grad_memories = apart
            yield self._kernel(
                causal_backward.grad_memory_kernel,
                shapes.grad_memory,
                (query, grad, result, positions, bounds, flows, grads, increments, conserved),
                (query, grad, result),
                (self.plane, *self.tokens, self.eps),
                features | self.values,
                tiles=self.value_tiles,
            )
            yield self._scan(increments, grad_memory, grad_memories, start_memory, reverse=True)
        yield self._kernel(
            causal_backward.value_gradient_kernel,
            shapes.value_gradient,
            (*everything, *extras, flows, grads, logs, grad_memories, start_memory, carried, conserved, reaching),
            everything,
            (self.plane, *self.tokens, self.eps, self.clamp),
            features | self.values | kinds,
            tiles=self.value_tiles,
        )
        yield self._kernel(
            causal_backward.flow_gradient_kernel,
            shapes.flow_gradient,
            (
                query, key, *extras, grad_sums, grad_scalars, flows, grads, logs, carried, conserved, reaching, partial,
                after, start_sums, start_scalars,
            ),
            (query, key),
            (self.plane, *self.tokens, self.eps, self.clamp),
            features | kinds,
        )  # fmt: skip
        sides = (query, key, grad, value, grad_query, memories), (key, query, value, grad, grad_key, grad_memories)
        for reverse, balance in self.gradients:
            *tokens, states = sides[reverse]
            constants = {
                "BLOCK_D": self.tile_d,
                "E": self.values["E"],
                "BLOCK_E": self.block_e,
                # the sums of a state, which may have gradients of their own, do change with q
                "CENTRE": self.centre if not reverse and grad_end is None else 0.0,
            }
            raised = self.features["DOT"] != tl.bfloat16 or self.eps > SMALL
            yield self._kernel(
                causal_gradient.gradient_kernel,
                shapes.gradient,
                (*tokens, *extras, grad_sums, flows, grads, chunk_sums, states, partial, after, start_sums),
                tokens,
                (self.plane, *self.tokens, self.eps),
                features | constants | {"BALANCE": balance, "RAISED": raised, "REVERSE": reverse},
                tiles=self.feature_tiles,
            )

    def _kernel(
        self, function, shape: Shape, arguments, strided: Iterable[Argument], numbers, constants, tiles=1
    ) -> Kernel:
        """A kernel for every head, segment and tile, which takes the strides of `strided`, then `numbers`."""
        strides = Strides.of((x.tensor.shape, x.tensor.stride()) for x in strided)
        constants = constants | strides.constants | {"C": self.config.chunk, "STAGES": shape.stages}
        grid = self.rows, self.segments, tiles
        return Kernel(
            function, grid, arguments, (*strides.numbers, *numbers), constants, shape.warps, smaller=({"STAGES": 1},)
        )

    def _scan(self, *arguments: Argument | None, reverse: bool) -> Kernel:
        """Adds up the memories of the segments before each, after each in reverse."""
        block = min(256, triton.next_power_of_2(self.width))
        constants = {"WIDTH": self.width, "BLOCK": block, "REVERSE": reverse}
        grid = self.rows, triton.cdiv(self.width, block), 1
        return Kernel(causal_forward.scan_kernel, grid, arguments, (self.segments,), constants)


_plan = functools.lru_cache(maxsize=PLAN_CACHE_SIZE)(Plan)


def plan_of(tensors, longest: int, keep: bool, scale: float, variant: FlowVariant) -> Plan:
    """The plan of a call, by everything a kernel could have been compiled for."""
    return _plan(signature(tensors), tensors[0].device, longest, keep, scale, variant)


def segment_count(rows, longest, device: torch.device):
    """How many segments each of `rows` heads is cut into; symbolic if they are."""
    sms = num_sms(device)
    if rows > sms:
        # a second segment would only read its tokens more often
        return 1
    fitting = SEGMENTS_PER_SM * sms // torch.sym_max(rows, 1)
    tokens = SHORTEST if rows < BUSY * sms else LONG
    return torch.sym_max(1, torch.sym_min(fitting, (longest + tokens - 1) // tokens))


def segment_chunks(longest, segments, chunk):
    return torch.sym_max(1, (longest + segments * chunk - 1) // (segments * chunk))


def state_sizes(rows, dim, value_dim) -> list[int]:
    """How many numbers the three tensors of a state take, each from an aligned one on."""
    return [aligned(size) for size in (4 * rows * dim, rows * dim * value_dim, 3 * rows)]


def kept_sizes(shape, value_dim: int, rows, longest, segments, chunk: int, keep: bool) -> list[int]:
    """How many numbers the flows, sums, logs and memories of `causal_forward` take, the sums only if kept."""
    batch, heads, length, dim = shape
    planes = causal_parts.PLANES if keep else causal_parts.FORWARD_PLANES
    chunks = segments * segment_chunks(longest, segments, chunk) if keep else 0
    sizes = planes.value * batch * heads * length, 4 * rows * chunks * dim, rows * (segments + 1)
    return [aligned(size) for size in (*sizes, rows * segments * dim * value_dim)]


def _block(dim: int) -> int:
    # a product of the tensor cores has at least sixteen columns
    return max(16, triton.next_power_of_2(dim))
