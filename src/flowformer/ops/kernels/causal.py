"""Causal Flow-Attention by Triton kernels: the operators, their autograd, and how the kernels are launched.

Shapes: query (B, H, N, D), key (B, H_kv, N, D), value (B, H_kv, N, E), or packed (T, H, D) and so on; mask (B, N) bool.
The three tensors of a state are those of `FlowState`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import library, torch_backend
from ..state import empty_state
from ..torch_causal import State
from ..variant import FlowVariant
from . import causal_backward, causal_forward, causal_parts
from .decode import decode
from .features import fast
from .launch import aligned, contiguous, dense, device_of, launch

PROGRAMS = 512  # segments of all heads together that keep a large GPU busy
ENOUGH = 100  # heads that keep it busy alone: a second segment would only read its tokens more often
SHORTEST = 256  # tokens worth a segment of their own
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


def config(query: Tensor, value: Tensor, feature_map: str) -> Config:
    width = max(query.shape[-1], value.shape[-1])
    size = next(size for size in (64, 128, 256) if width <= size)
    found = CONFIGS[query.dtype, size]
    if found.chunk > 32 and not (query.shape[-1] == value.shape[-1] == size and feature_map == "sigmoid"):
        # factors of several widths leave a warp group too few registers for their addresses: ptxas 12.8 then reads one
        # that it never wrote. The products of shorter chunks are those of single warps, and have no such addresses
        found = found._replace(chunk=32)
    return found


def refusals(query: Tensor, key: Tensor, value: Tensor, variant: FlowVariant) -> list[str]:
    """Why the causal kernels do not compute this; empty if they do."""
    reasons = []
    if query.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        reasons.append(f"the kernels take float32, bfloat16 and float16, not {query.dtype}")
    for name, x in (("query and key", query), ("value", value)):
        if not 1 <= x.shape[-1] <= 256:
            reasons.append(f"the kernels take head dimensions from 1 to 256, {name} have {x.shape[-1]}")
    if variant.competition == "sigmoid":
        reasons.append('the causal kernels have no competition="sigmoid"')
    if variant.allocation == "softmax":
        reasons.append('the causal kernels have no allocation="softmax"')
    return reasons


def causal(query, key, value, mask, state: State | None, scale: float, variant: FlowVariant) -> Tensor:
    """The result; see `flow_attention`."""
    return _call(query, key, value, mask, state, scale, variant)[0]


def recurrent(query, key, value, mask, state: State | None, scale: float, variant: FlowVariant) -> tuple[Tensor, State]:
    """The result and the state after the last token; see `flow_attention_recurrent`."""
    if query.shape[2] == 1 and not _needs_gradients(query, key, value, *(state or ())):
        parts = empty_state(query, value) if state is None else state
        sums, memory, scalars = (part.clone(memory_format=torch.contiguous_format) for part in parts)
        return decode(query, key, value, (sums, memory, scalars), scale, variant, mask), (sums, memory, scalars)
    result, end, _ = _call(query, key, value, mask, state, scale, variant)
    # apart from one another, since decoding writes into them
    sums, memory, scalars = (part.clone() for part in _state(end, query, query.shape[0], value.shape[3]))
    return result, (sums, memory, scalars)


def packed(query, key, value, lengths, scale: float, variant: FlowVariant) -> Tensor:
    """The result (T, H, E) of packed sequences; see `flow_attention_varlen`."""
    bounds, _, longest, _ = lengths
    query, key, value = library.distinct(*(x.transpose(0, 1)[None] for x in (query, key, value)))
    none = (None, None, None)
    result, *_ = _apply(query, key, value, None, bounds, longest, *none, scale, *variant.as_args())
    return result[0].transpose(0, 1)


def _call(query, key, value, mask, state, scale, variant):
    tensors = library.distinct(query, key, value, mask, *((None, None, None) if state is None else state))
    return _apply(*tensors[:4], None, query.shape[2], *tensors[4:], scale, *variant.as_args())


def _needs_gradients(*inputs) -> bool:
    return torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in inputs)


def _apply(*inputs):
    if _needs_gradients(*inputs):
        return _Causal.apply(*inputs)
    return torch.ops.flowformer.triton_causal(*inputs[:6], False, *inputs[6:])


class _Causal(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, mask, bounds, longest, sums, memory, scalars, *options):
        result, end, kept = torch.ops.flowformer.triton_causal(
            query, key, value, mask, bounds, longest, True, sums, memory, scalars, *options
        )
        ctx.save_for_backward(query, key, value, mask, bounds, scalars, result, kept)
        ctx.mark_non_differentiable(kept)
        # gradients that nobody asked for are None, and cost nothing
        ctx.set_materialize_grads(False)
        ctx.longest, ctx.options, ctx.has_state = longest, options, sums is not None
        return result, end, kept

    @staticmethod
    def backward(ctx, grad, grad_end, _):
        query, key, value, mask, bounds, scalars, result, kept = ctx.saved_tensors
        if grad is None:
            grad = torch.zeros_like(result)
        operator = torch.ops.flowformer.triton_causal_backward
        inputs = query, key, value, mask, bounds, ctx.longest, scalars
        *grads, start = library.differentiate(operator, grad, grad_end, *inputs, result, kept, *ctx.options)
        state = _state(start, query, query.shape[0], value.shape[3]) if ctx.has_state else (None, None, None)
        return *grads, None, None, None, *state, *(None for _ in ctx.options)


def _state(flat: Tensor, query: Tensor, batch: int, value_dim: int) -> list[Tensor]:
    """The three tensors of a state that lies in one."""
    heads, dim = query.shape[1], query.shape[3]
    shapes = (batch, heads, 4, dim), (batch, heads, dim, value_dim), (batch, heads, 3)
    parts = flat.split_with_sizes(state_sizes(batch * heads, dim, value_dim))
    return [part[: math.prod(shape)].view(shape) for part, shape in zip(parts, shapes, strict=True)]


class Plan:
    """What calls with inputs of the same shapes have in common, and the kernels compiled for them."""

    def __init__(self, query, key, value, bounds, longest, keep, scale, variant: FlowVariant):
        batch, heads, length, dim = query.shape
        self.rows = heads * (batch if bounds is None else bounds.numel() - 1)
        self.segments = segment_count(self.rows, longest)
        self.config = config(query, value, variant.feature_map)
        self.size = segment_chunks(longest, self.segments, self.config.chunk) * self.config.chunk
        self.plane = batch * heads * length
        self.clamp = float("inf") if variant.clamp is None else variant.clamp
        # without a scale, kernels are compiled to spare the product
        self.tokens = heads, heads // key.shape[1], length, self.size, self.segments, None if scale == 1 else scale
        self.block_d, self.block_e = _block(dim), _block(value.shape[-1])
        self.tile_d, self.tile_e = min(self.block_d, self.config.tile), min(self.block_e, self.config.tile)
        self.feature_tiles, self.value_tiles = triton.cdiv(dim, self.tile_d), triton.cdiv(value.shape[-1], self.tile_e)
        # fewer than sixteen features do not average the rounding of a product out
        half = query.dtype == torch.bfloat16 and query.is_cuda and dim >= 16
        self.features = {
            "D": dim,
            "BLOCK_D": self.block_d,
            "MAP": variant.feature_map,
            # float16 is finer than the fast sigmoid, and its range too small for the sums: it computes as float32 does
            "FAST": half and fast(query),
            "DOT": tl.bfloat16 if half else tl.float32,
            # three products of the tensor cores keep what one would lose of a float32
            "PRECISION": "tf32x3" if query.is_cuda else "ieee",
        }
        self.values = {"E": value.shape[-1], "BLOCK_E": self.tile_e}
        self.competition = {"COMPETITION": variant.competition != "none"}
        self.roles = {**self.competition, "ALLOCATION": variant.allocation != "none"}
        self.device = query.device
        self.launched: dict = {}
        # the launches for the gradients of queries, then of keys (in reverse), and how they are balanced
        tiled = [(0, "measure"), (0, "measured")] if query.dtype == torch.bfloat16 else [(0, "none")]
        self.gradients = [*([(0, "own")] if self.feature_tiles == 1 else tiled), (1, "none")]

        rows, segments, tiles = self.rows, self.segments, self.value_tiles
        self.width = dim * value.shape[-1]
        self.state = state_sizes(rows, dim, value.shape[-1])
        self.kept = kept_sizes(query, value, rows, longest, self.config.chunk, keep)
        sums, memories = self.kept[1], self.kept[3]
        vectors = 2 * rows * segments * dim
        # of segments Σk and Σq, Σk/O and Σq/I, log Σ exp(Ô) and S; of tokens Î and Ô; of chunks the sums before them
        forward = vectors, vectors, rows * segments, memories, 2 * self.plane, sums // 2
        self.forward_scratch = [aligned(size) for size in forward]
        # of tokens the planes; of chunks what comes after them; of segments the gradients of Σk and Σq, and Z
        planes = causal_backward.GRAD_PLANES.value + 2 * tiles
        if (0, "measure") in self.gradients:
            planes += self.feature_tiles
        backward = [planes * self.plane, sums, vectors, rows * segments * tiles]
        if segments > 1:
            # the gradients of Σk/O and Σq/I, what later ones reach it by, dS, and dS after it
            backward += [vectors * tiles, vectors // 2, memories, memories]
        self.backward_scratch = [aligned(size) for size in backward]

    def launch(self, kernel, shape: Shape, tensors: tuple, rest: Callable, *, tiles=1, name=()) -> None:
        """Runs a kernel on every head, segment and tile; `name` tells its uses apart.

        The first time, `rest` is asked for its numbers and its constants: they are the same in all calls of a plan.
        """
        again = self.launched.get((kernel, name))
        if again is not None:
            again(*tensors)
            return
        numbers, constants = rest()
        constants = {**constants, "C": self.config.chunk, "STAGES": shape.stages}
        grid, settings = (self.rows, self.segments, tiles), {"num_warps": shape.warps}
        self.launched[kernel, name] = launch(kernel, grid, tensors, numbers, constants, self.device, **settings)

    def scan(self, partial, begin, before, end, *, reverse: bool) -> None:
        """Adds up the memories of the segments before each, after each in reverse."""
        kernel, tensors = causal_forward.scan_kernel, (partial, begin, before, end)
        again = self.launched.get((kernel, ()))
        if again is not None:
            again(*tensors)
            return
        constants = {"WIDTH": self.width, "BLOCK": min(256, triton.next_power_of_2(self.width)), "REVERSE": reverse}
        grid = self.rows, triton.cdiv(self.width, constants["BLOCK"]), 1
        self.launched[kernel, ()] = launch(kernel, grid, tensors, (self.segments,), constants, self.device)

    def gradient(self, value_dim: int, reverse: int, balance: str, eps: float) -> dict:
        """The constants of the gradient of queries, or in reverse of keys."""
        constants = {"BLOCK_D": self.tile_d, "E": value_dim, "BLOCK_E": self.block_e, "BALANCE": balance}
        return constants | {"RAISED": self.features["DOT"] != tl.bfloat16 or eps > SMALL, "REVERSE": reverse}

    def empty(self, sizes: list[int]) -> tuple[Tensor, ...]:
        """Uninitialised numbers, in pieces of one tensor: to ask for several takes longer than a kernel runs."""
        return torch.empty(sum(sizes), dtype=torch.float32, device=self.device).split_with_sizes(sizes)


_plans: dict[tuple, Plan] = {}


def _plan(tensors, longest, keep, scale, variant) -> Plan:
    """The plan of a call, by everything a kernel could have been compiled for."""
    query, key, value, _, bounds = tensors[:5]
    seen = tuple((x.shape, x.stride(), x.dtype, x.data_ptr() % 16) if x is not None else None for x in tensors)
    place = query.device, longest, keep, scale, variant, PROGRAMS, ENOUGH, SHORTEST
    plan = _plans.get((seen, place))
    if plan is None:
        if len(_plans) >= 512:
            _plans.clear()
        plan = _plans[seen, place] = Plan(query, key, value, bounds, longest, keep, scale, variant)
    return plan


def forward(query, key, value, mask, bounds, longest, keep, sums, memory, scalars, scale, variant: FlowVariant):
    """The result, the state after it in one tensor, and what the backward pass needs, if it is to `keep` that."""
    query, key, value = dense(query), dense(key), dense(value)
    sums, memory, scalars = contiguous(sums), contiguous(memory), contiguous(scalars)
    if not query.numel():
        result, end, kept = empty_outputs(query, value, bounds, longest, keep, variant.feature_map)
        before = empty_state(query, value) if sums is None else (sums, memory, scalars)
        for part, old in zip(_state(end, query, _sequences(query, bounds), value.shape[3]), before, strict=True):
            part.copy_(old)
        return result, end, kept
    plan = _plan((query, key, value, mask, bounds, sums, memory, scalars), longest, keep, scale, variant)
    result = torch_backend.empty_result(query, value.shape[3])
    if bounds is not None:
        result.zero_()
    kept = torch.empty(sum(plan.kept), dtype=torch.float32, device=query.device)
    end = torch.empty(sum(plan.state), dtype=torch.float32, device=query.device)
    flows, chunk_sums, logs, memories = kept.split_with_sizes(plan.kept)
    end_sums, end_memory, end_scalars = end.split_with_sizes(plan.state)
    shapes, split = plan.config, plan.segments > 1
    positions = None if mask is None else _signed_positions(mask)
    inputs = query, key, positions, bounds
    features, kinds = plan.features, {"SPLIT": split, "KEEP": keep}
    partial = conserved = local_flows = local_sums = None
    with device_of(query):
        if split:
            partial, conserved, totals, increments, local_flows, local_sums = plan.empty(plan.forward_scratch)
            plan.launch(
                causal_forward.sums_kernel,
                shapes.sums,
                (*inputs, partial),
                lambda: ((*_strides(query, key), *plan.tokens, variant.eps), features),
            )
        plan.launch(
            causal_forward.flows_kernel,
            shapes.flows,
            (
                *inputs, sums, scalars, partial, conserved, flows, chunk_sums, local_flows, local_sums, logs, end_sums,
                end_scalars,
            ),
            lambda: (
                (plan.plane, *_strides(query, key), *plan.tokens, variant.eps, variant.flow_eps, plan.clamp),
                {**features, **plan.roles, **kinds},
            ),
        )  # fmt: skip
        if split:
            plan.launch(
                causal_forward.conserve_kernel,
                shapes.sums,
                (*inputs[1:], sums, scalars, conserved, flows, chunk_sums, local_flows, local_sums, totals, end_sums),
                lambda: (
                    (plan.plane, *_strides(key), *plan.tokens, variant.eps, plan.clamp),
                    {**features, **plan.competition, "KEEP": keep},
                ),
            )
            plan.launch(
                causal_forward.memory_kernel,
                shapes.memory,
                (key, value, positions, bounds, scalars, flows, totals, logs, end_scalars, increments),
                lambda: (
                    (plan.plane, *_strides(key, value), *plan.tokens, variant.eps, plan.clamp),
                    {**features, **plan.values, **plan.competition},
                ),
                tiles=plan.value_tiles,
            )
            plan.scan(increments, memory, memories, end_memory, reverse=False)
        plan.launch(
            causal_forward.output_kernel,
            shapes.output,
            (
                query, key, value, result, positions, bounds, sums, scalars, memory, conserved, flows, local_flows,
                logs, memories, end_memory,
            ),
            lambda: (
                (plan.plane, *_strides(query, key, value, result), *plan.tokens, variant.eps, plan.clamp),
                {**features, **plan.values, **plan.roles, **kinds},
            ),
            tiles=plan.value_tiles,
        )  # fmt: skip
    return result, end, kept


def backward(
    grad, grad_end, query, key, value, mask, bounds, longest, scalars, result, kept, scale, variant: FlowVariant
):
    """The gradients of query, key and value, and of the state before the first token."""
    grad, query, key, value = dense(grad), dense(query), dense(key), dense(value)
    grad_end, scalars = contiguous(grad_end), contiguous(scalars)
    (batch, heads, _, dim), value_dim = query.shape, value.shape[3]
    shared = heads // max(key.shape[1], 1)
    grad_query = torch.empty_like(query)
    # every query head writes its own; those that share a key head are added up in a fixed order afterwards
    grad_key, grad_value = (
        torch.empty_like(x) if shared == 1 else x.new_empty(batch, heads, *x.shape[2:]) for x in (key, value)
    )
    if bounds is not None:
        for x in (grad_query, grad_key, grad_value):
            x.zero_()
    if not query.numel():
        sizes = state_sizes(heads * _sequences(query, bounds), dim, value_dim)
        start = query.new_zeros(sum(sizes), dtype=torch.float32) if grad_end is None else grad_end.clone()
        return grad_query, torch.zeros_like(key), torch.zeros_like(value), start
    tensors = query, key, value, mask, bounds, grad, grad_end, scalars, result, kept
    plan = _plan(tensors, longest, True, scale, variant)
    start = torch.empty(sum(plan.state), dtype=torch.float32, device=query.device)
    start_sums, start_memory, start_scalars = start.split_with_sizes(plan.state)
    grad_sums = grad_memory = grad_scalars = None
    if grad_end is not None:
        grad_sums, grad_memory, grad_scalars = grad_end.split_with_sizes(plan.state)
    flows, chunk_sums, logs, memories = kept.split_with_sizes(plan.kept)
    grads, after, partial, carried, *apart = plan.empty(plan.backward_scratch)
    split, tiles, shapes, counted = plan.segments > 1, plan.value_tiles, plan.config, {"TILES": plan.value_tiles}
    positions = None if mask is None else _signed_positions(mask)
    inputs = query, key, positions, bounds, scalars
    features, kinds = plan.features | counted, {**plan.competition, "SPLIT": split}
    grad_memories, conserved, reaching = grad_memory, None, None
    with device_of(query):
        if split:
            conserved, reaching, increments, grad_memories = apart
            plan.launch(
                causal_backward.grad_memory_kernel,
                shapes.grad_memory,
                (query, grad, result, positions, bounds, flows, grads, increments, conserved),
                lambda: (
                    (plan.plane, *_strides(query, grad, result), *plan.tokens, variant.eps),
                    features | plan.values,
                ),
                tiles=tiles,
            )
            plan.scan(increments, grad_memory, grad_memories, start_memory, reverse=True)
        tokens = query, key, value, grad, result, grad_value
        plan.launch(
            causal_backward.value_gradient_kernel,
            shapes.value_gradient,
            (
                *tokens, *inputs[2:], flows, grads, logs, grad_memories, start_memory, carried, conserved, reaching,
            ),
            lambda: (
                (plan.plane, *_strides(*tokens), *plan.tokens, variant.eps, plan.clamp),
                features | plan.values | kinds,
            ),
            tiles=tiles,
        )  # fmt: skip
        plan.launch(
            causal_backward.flow_gradient_kernel,
            shapes.flow_gradient,
            (
                *inputs, grad_sums, grad_scalars, flows, grads, logs, carried, conserved, reaching, partial, after,
                start_sums, start_scalars,
            ),
            lambda: (
                (plan.plane, *_strides(query, key), *plan.tokens, variant.eps, plan.clamp),
                features | kinds,
            ),
        )  # fmt: skip
        sides = (query, key, grad, value, grad_query, memories), (key, query, value, grad, grad_key, grad_memories)
        for reverse, balance in plan.gradients:
            *sources, states = sides[reverse]
            plan.launch(
                causal_backward.gradient_kernel,
                shapes.gradient,
                (*sources, *inputs[2:], grad_sums, flows, grads, chunk_sums, states, partial, after, start_sums),
                lambda sources=sources, reverse=reverse, balance=balance: (
                    (plan.plane, *_strides(*sources), *plan.tokens, variant.eps),
                    features | plan.gradient(value_dim, reverse, balance, variant.eps),
                ),
                tiles=plan.feature_tiles,
                name=(reverse, balance),
            )
    if shared > 1:
        grad_key, grad_value = (x.unflatten(1, (-1, shared)).sum(2) for x in (grad_key, grad_value))
    return grad_query, grad_key, grad_value, start


def segment_count(rows, longest):
    """How many segments each of `rows` heads is cut into; symbolic if they are."""
    if rows >= ENOUGH:
        return 1
    fitting = PROGRAMS // torch.sym_max(rows, 1)
    return torch.sym_max(1, torch.sym_min(fitting, (longest + SHORTEST - 1) // SHORTEST))


def segment_chunks(longest, segments, chunk):
    return torch.sym_max(1, (longest + segments * chunk - 1) // (segments * chunk))


def state_sizes(rows, dim, value_dim) -> list[int]:
    """How many numbers the three tensors of a state take, each from an aligned one on."""
    return [aligned(size) for size in (4 * rows * dim, rows * dim * value_dim, 3 * rows)]


def kept_sizes(query, value, rows, longest, chunk, keep: bool) -> list[int]:
    """How many numbers the flows, sums, logs and memories of `causal_forward` take, the sums only if kept."""
    (batch, heads, length, dim), segments = query.shape, segment_count(rows, longest)
    planes = causal_parts.PLANES if keep else causal_parts.FORWARD_PLANES
    chunks = segments * segment_chunks(longest, segments, chunk) if keep else 0
    sizes = planes.value * batch * heads * length, 4 * rows * chunks * dim, rows * (segments + 1)
    return [aligned(size) for size in (*sizes, rows * segments * dim * value.shape[3])]


def empty_outputs(query, value, bounds, longest, keep, feature_map):
    """The result, the end state, and what is kept, uninitialised."""
    rows = query.shape[1] * _sequences(query, bounds)
    kept = kept_sizes(query, value, rows, longest, config(query, value, feature_map).chunk, keep)
    sizes = sum(state_sizes(rows, query.shape[3], value.shape[3])), sum(kept)
    end, kept = (query.new_empty(size, dtype=torch.float32) for size in sizes)
    return torch_backend.empty_result(query, value.shape[3]), end, kept


def _sequences(query: Tensor, bounds: Tensor | None):
    return query.shape[0] if bounds is None else bounds.shape[0] - 1


def _strides(*tensors: Tensor) -> list[int]:
    return [stride for x in tensors for stride in x.stride()[:3]]


def _signed_positions(mask: Tensor) -> Tensor:
    positions = mask.cumsum(1, dtype=torch.int32)
    return torch.where(mask, positions, -positions)


def _block(dim: int) -> int:
    # a product of the tensor cores has at least sixteen columns
    return max(16, triton.next_power_of_2(dim))


_variant = functools.lru_cache(FlowVariant)  # it checks what it is given, in every call


def _forward(*args):
    return forward(*[*args[:11], _variant(*args[11:])])


def _backward(*args):
    return backward(*[*args[:12], _variant(*args[12:])])


def _fake_forward(query, key, value, mask, bounds, longest, keep, sums, memory, scalars, scale, *variant):
    return empty_outputs(query, value, bounds, longest, keep, FlowVariant(*variant).feature_map)


def _fake_backward(grad, grad_end, query, key, value, mask, bounds, *_):
    start = sum(state_sizes(query.shape[1] * _sequences(query, bounds), query.shape[3], value.shape[3]))
    return *(torch.empty_like(x) for x in (query, key, value)), query.new_empty(start, dtype=torch.float32)


_INPUTS = "Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor? bounds, SymInt longest"
library.register(
    f"triton_causal({_INPUTS}, bool keep, Tensor? sums, Tensor? memory, Tensor? scalars, {library.VARIANT})"
    " -> (Tensor, Tensor, Tensor)",
    _forward,
    _fake_forward,
)
library.register(
    f"triton_causal_backward(Tensor grad, Tensor? grad_end, {_INPUTS}, Tensor? scalars, Tensor result, Tensor kept, "
    f"{library.VARIANT}) -> (Tensor, Tensor, Tensor, Tensor)",
    _backward,
    _fake_backward,
)
