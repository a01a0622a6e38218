"""Bidirectional Flow-Attention as Triton kernels: four passes forward, four backward, linear in time and memory.

A pass is a grid of heads × segments. Each program walks over the tokens of one segment of one head; what it adds up
goes to its own record in `partial`, and the next pass adds the records of a head in a fixed order, so that no result
depends on who came first: S by `finish` and dS by `grad_finish`, unless the head is one segment and its record whole.
Every second pass visits the heads in reverse, to find in the cache what the last one left.

    sums         Σk, Σq (reads Q, K)                       flows             I, O, Σk/O, Σq/I (reads Q, K)
    memory       Ô and S (reads K, V)                      result            Î, α, R (reads Q)
    grad_memory  dS, d(Σk/O) (reads Q, dR)                 grad_competition  dÔ, dO, d(Σq/I), dΣq (reads K, V)
    grad_query   dQ, dΣk (reads Q, dR)                     grad_source       dK, dV (reads K, V)

Shapes: B sequences, H query heads, H_kv key heads, N sinks, M sources, D features, E values.
A record is S (D, E), then four vectors (4, D), then four scalars, all float32:
    forward   S | Σk, Σq, Σk/O, Σq/I | m, n, reference, Σ exp(Ô − reference); once finished, μ, r, reference, 1/Z
    backward  dS | dΣk, dΣq, d(Σk/O), d(Σq/I) | unused
S is kept as a mean, S/μ, so that it does not grow with the length: c = μ exp(Ô − reference)/Z, and α = σ(r·Î).
Packed sequences are one row of a batch, (1, H, T, D), with the bounds of the sequences in it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import triton
from torch import Tensor

from ..common import VARIANT, differentiate, distinct, empty_result, register
from ..variant import FlowVariant
from ..varlen import Lengths, check_bounds
from . import bidirectional_backward, bidirectional_forward, configs
from .features import fast, float32_precision
from .hardware import MAX_DIM, is_hopper, num_sms
from .launch import (
    PLAN_CACHE_SIZE,
    Argument,
    Kernel,
    Launches,
    Strides,
    aligned,
    arguments,
    contiguous,
    dense,
    empty,
    signature,
)

MEMORY = 128 * 128  # numbers of S that one program holds, of float32 fewer; more are cut along E
CHUNK = 1024  # numbers of S that one program of a finishing kernel adds up
SHORTEST = 128 * 64  # features worth a segment of their own
LONG = 1024  # tokens of one where not all programs run at once: what they add up must be written and read again
ROUND = 0.05  # what each round of programs adds, of the time of a full one
INTERPRETED = not isinstance(bidirectional_forward.sums, triton.JITFunction)


def bidirectional(query, key, value, query_mask, key_mask, scale: float, variant: FlowVariant) -> Tensor:
    """R, (B, H, N, E), in the memory order of the query."""
    longest = max(query.shape[2], key.shape[2])
    return _apply(query, key, value, query_mask, key_mask, None, None, longest, scale, variant)


def packed(query, key, value, lengths: Lengths, scale: float, variant: FlowVariant) -> Tensor:
    """`bidirectional` of packed sequences, (T, H, E), which never asks the device for a length."""
    query, key, value = (x.transpose(0, 1)[None] for x in (query, key, value))
    result = _apply(query, key, value, None, None, *lengths[:2], max(lengths[2:]), scale, variant)
    return result[0].transpose(0, 1)


def _apply(query, key, value, query_mask, key_mask, query_bounds, key_bounds, longest, scale, variant) -> Tensor:
    keep = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    tensors = distinct(query, key, value, query_mask, key_mask, query_bounds, key_bounds)
    inputs = *tensors, longest, keep, scale, *variant.as_args()
    return _Bidirectional.apply(*inputs) if keep else torch.ops.flowformer.triton_bidirectional(*inputs)[0]


class _Bidirectional(torch.autograd.Function):
    # without setup_context, for which torch inspects the signature in every call
    @staticmethod
    def forward(ctx, *inputs):
        result, kept = torch.ops.flowformer.triton_bidirectional(*inputs)
        ctx.save_for_backward(*inputs[:7], kept)
        ctx.longest, ctx.options = inputs[7], inputs[9:]
        return result

    @staticmethod
    def backward(ctx, grad):
        backward = torch.ops.flowformer.triton_bidirectional_backward
        grads = differentiate(backward, grad, *ctx.saved_tensors, ctx.longest, *ctx.options)
        return *grads, *(None for _ in range(6 + len(ctx.options)))


def _forward(query, key, value, query_mask, key_mask, query_bounds, key_bounds, longest, keep, *options):
    if query_bounds is not None:
        lengths = query_bounds, key_bounds, longest, longest
        check_bounds(query.shape[2], key.shape[2], lengths, is_causal=False)
    query, key, value = dense(query), dense(key), dense(value)
    result = empty_result(query, value.shape[-1])
    nothing = _is_nothing(query, value, query_bounds)
    if nothing or query_bounds is not None:
        # a token that belongs to no sequence is written by nobody
        result.zero_()
    if nothing:
        return result, _empty_kept(query, key, value, query_bounds, keep)

    extras = contiguous(query_mask), contiguous(key_mask), query_bounds, key_bounds
    plan = _planned((query, key, value, result), extras, longest, keep, options)
    kept, scratch = empty(plan.kept, query.device), empty(plan.scratch, query.device)
    following = functools.partial(_following, query, key, value, result, kept, extras, longest, options)
    plan.launches((query, key, value, *extras, result, kept, scratch), plan.forward, following if keep else None)
    return result, kept


def _following(query, key, value, result, kept, extras, longest, options) -> Iterator[Kernel]:
    """The kernels of the backward pass, if gradients are laid out as what they are of."""
    tensors = query, key, value, result, query, key, value
    plan = _planned(tensors, extras, longest, True, options)
    tensors = *tensors, *extras, kept, empty(plan.scratch, torch.device("meta"))
    return plan.backward(*arguments(tensors))


def _backward(grad, query, key, value, query_mask, key_mask, query_bounds, key_bounds, kept, longest, *options):
    grads = [(torch.empty_like if query_bounds is None else torch.zeros_like)(x) for x in (query, key, value)]
    if _is_nothing(query, value, query_bounds):
        return tuple(x.zero_() for x in grads)
    outs = [dense(x) for x in grads]
    tensors = *(dense(x) for x in (query, key, value, grad)), *outs
    extras = contiguous(query_mask), contiguous(key_mask), query_bounds, key_bounds
    plan = _planned(tensors, extras, longest, True, options)
    plan.launches((*tensors, *extras, kept, empty(plan.scratch, query.device)), plan.backward)
    return tuple(x if x is out else x.copy_(out) for x, out in zip(grads, outs, strict=True))


def _is_nothing(query: Tensor, value: Tensor, bounds: Tensor | None) -> bool:
    """Whether there are no sinks, no sources, or no sequences."""
    return not (query.numel() and value.numel() and (bounds is None or bounds.shape[0] > 1))


def _fake_forward(query, key, value, query_mask, key_mask, query_bounds, key_bounds, longest, keep, *_):
    return empty_result(query, value.shape[-1]), _empty_kept(query, key, value, query_bounds, keep)


def _fake_backward(grad, query, key, value, *_):
    return tuple(torch.empty_like(x) for x in (query, key, value))


_INPUTS = (
    "Tensor query, Tensor key, Tensor value, Tensor? query_mask, Tensor? key_mask, Tensor? cu_seqlens_q, "
    "Tensor? cu_seqlens_k"
)
register(
    f"triton_bidirectional({_INPUTS}, SymInt longest, bool keep, {VARIANT}) -> (Tensor, Tensor)",
    _forward,
    _fake_forward,
)
register(
    f"triton_bidirectional_backward(Tensor grad, {_INPUTS}, Tensor kept, SymInt longest, {VARIANT})"
    " -> (Tensor, Tensor, Tensor)",
    _backward,
    _fake_backward,
)


@dataclass(frozen=True, slots=True)
class Plan:
    """What calls of one kind are launched with: to work that out anew takes longer than the launches themselves."""

    kept: list[int]  # how many numbers what the backward pass needs takes; none where there is no such pass
    scratch: list[int]  # and what only this one needs
    grids: dict[str, tuple[int, int, int]]
    numbers: dict[str, tuple]  # the arguments of a kernel after its tensors
    constants: dict[str, dict]
    shapes: dict[str, configs.Shape]
    whole: bool  # whether a head is one segment, whose record is that of the head
    launches: Launches = field(default_factory=Launches)

    def forward(self, query, key, value, query_mask, key_mask, query_bounds, key_bounds, result, kept, scratch):
        extras = query_mask, key_mask, query_bounds, key_bounds
        numbers = *kept.split(self.kept), *scratch.split(self.scratch)
        incoming, allocation, outgoing, conserved_outgoing, records, partial = numbers
        if self.whole:
            partial = records
        yield self._kernel("sums", query, key, *extras, partial)
        yield self._kernel("flows", query, key, *extras, partial, incoming, outgoing)
        yield self._kernel("memory", key, value, key_mask, key_bounds, partial, conserved_outgoing)
        if not self.whole:
            yield self._kernel("finish", partial, records)
        yield self._kernel("result", query, result, query_mask, query_bounds, records, incoming, allocation)

    def backward(
        self, query, key, value, grad, grad_query, grad_key, grad_value, query_mask, key_mask, query_bounds,
        key_bounds, kept, scratch,
    ):  # fmt: skip
        incoming, allocation, outgoing, conserved_outgoing, records = kept.split(self.kept)
        exchange, grad_outgoing, grad_conserved, grad_records, products, partial = scratch.split(self.scratch)
        if self.whole:
            partial = grad_records
        sinks = query_mask, query_bounds, records, partial, incoming, allocation, exchange
        sources = key_mask, key_bounds, records, partial, grad_records
        per_source = outgoing, conserved_outgoing, grad_outgoing, grad_conserved
        yield self._kernel("grad_memory", query, grad, *sinks, products)
        if not self.whole:
            yield self._kernel("grad_finish", partial, records, grad_records, products)
        yield self._kernel("grad_competition", key, value, *sources, products, *per_source)
        yield self._kernel("grad_query", query, grad, grad_query, *sinks)
        yield self._kernel("grad_source", key, value, grad_key, grad_value, *sources, *per_source)

    def _kernel(self, name: str, *arguments: Argument | None) -> Kernel:
        module = bidirectional_backward if name.startswith("grad_") else bidirectional_forward
        function, warps = getattr(module, name), self.shapes[name].warps if name in self.shapes else 4
        constants = self.constants[name]
        smaller = []
        if name in self.shapes:
            blocks = (self.shapes[name].block >> halvings for halvings in range(1, 5))
            smaller = [{"STAGES": 1}, *({"BLOCK": block} for block in blocks if block >= 16)]
        return Kernel(function, self.grids[name], arguments, self.numbers[name], constants, warps, smaller)


def _planned(tensors, extras, longest: int, keep: bool, options: tuple) -> Plan:
    # everything that Triton compiles for is in the key
    precision = float32_precision() if tensors[0].dtype == torch.float32 else None
    return _plan(signature(tensors), signature(extras), tensors[0].device, precision, longest, keep, options)


@functools.lru_cache(maxsize=PLAN_CACHE_SIZE)
def _plan(tensors, extras, device, precision, longest, keep, options) -> Plan:
    scale, variant = options[0], FlowVariant(*options[1:])
    (batch, heads, sinks, dim), (_, key_heads, sources, _), value_shape = (shape for shape, *_ in tensors[:3])
    dtype, bounds = tensors[0][2], extras[2]
    value_dim = value_shape[-1]
    records = heads * (batch if bounds is None else bounds[0][0] - 1)
    strides = Strides.of(tensor[:2] for tensor in tensors)
    block_d = max(16, triton.next_power_of_2(dim))
    shapes = configs.bidirectional(dim, value_dim, dtype, INTERPRETED or is_hopper(device))
    multiply = {torch.float32: precision, torch.float16: "bf16x3", torch.bfloat16: "bf16"}[dtype]
    if multiply == "bf16" and dim < 8:
        # the rounding of so few features does not average out
        multiply = "bf16x3"
    if INTERPRETED:
        multiply = "rounded" if multiply == "bf16" else "ieee"
    memory = MEMORY // {"tf32": 2, "ieee": 4}.get(multiply, 1)
    block_e = min(max(16, triton.next_power_of_2(value_dim)), memory // block_d)
    # how many programs fit on a processor, by the memory S that each holds
    fitting = next(count for count, size in ((4, 32), (2, 64), (1, MAX_DIM)) if block_d * block_e <= size**2)
    segments = segment_count(records, longest, dim, fitting * num_sms(device))
    is_whole = segments == 1
    chunks, tiles = -(-dim * value_dim // CHUNK), -(-value_dim // block_e)

    dims = {"D": dim, "E": value_dim}
    common = dims | {
        "BLOCK_D": block_d,
        **strides.constants,
        "MAP": variant.feature_map,
        "FAST": fast(dtype, device),
    }
    tiled = common | {"BLOCK_E": block_e, "MULTIPLY": multiply}
    shared, keeps, whole = {"SHARED": heads // key_heads}, {"KEEP": keep}, {"WHOLE": is_whole}
    competition, allocation = {"COMPETITION": variant.competition}, {"ALLOCATION": variant.allocation}
    rescale, pieces = {"RESCALE": variant.rescale}, tiles if is_whole else chunks
    constants = {
        "sums": common | shared,
        "flows": common | shared | keeps,
        "memory": tiled | shared | keeps | competition | whole | rescale,
        "result": tiled | keeps | allocation,
        "grad_memory": tiled | allocation | whole,
        "grad_competition": tiled | shared | competition | {"PIECES": triton.next_power_of_2(pieces)},
        "grad_query": tiled | allocation,
        "grad_source": tiled | shared | competition,
    }
    for name, shape in shapes.items():
        eye = shape.eye and multiply in ("bf16", "bf16x3") and block_d <= 128
        constants[name] |= {"BLOCK": shape.block, "STAGES": shape.stages, "EYE": eye}
    if heads != key_heads:
        # what is read anew for each query head need not be under way for several blocks
        constants["grad_source"]["STAGES"] = 1
    chunked = dims | {"CHUNK": CHUNK}
    vectors = triton.next_power_of_2(4 * dim)
    constants["finish"] = chunked | competition | rescale | {"VECTORS": vectors}
    constants["grad_finish"] = chunked | {"BLOCK_D": block_d}
    grids = dict.fromkeys(constants, (records * segments, 1, 1))
    grids["sums"] = grids["flows"] = (records * segments, 2, 1)
    grids["memory"] = grids["grad_memory"] = (records * segments, tiles, 1)
    grids["finish"] = grids["grad_finish"] = (records, chunks, 1)
    grids["grad_source"] = (records * key_heads // heads * segments, 1, 1)
    flow = scale, variant.eps, variant.flow_eps
    clamp = math.inf if variant.clamp is None else variant.clamp
    of_sinks, of_sources = (sinks, heads, segments), (sources, heads, segments)
    kept = _kept_sizes(batch * heads, records, sinks, sources, dim, value_dim)
    partial = 0 if is_whole else records * segments * _record_size(dim, value_dim)
    each = [strides.numbers[i : i + 3] for i in range(0, len(strides.numbers), 3)]
    if len(each) == 4:
        q, k, v, r = each
        # without a backward pass α, O and Ô are not there
        scratch = [partial] if keep else [kept[0], 0, 0, 0, kept[4], partial]
        numbers = {
            "sums": (*q, *k, sinks, *of_sources, scale),
            "flows": (*q, *k, sinks, *of_sources, *flow),
            "memory": (*k, *v, *of_sources, *flow, clamp),
            "finish": (segments,),
            "result": (*q, *r, *of_sinks, *flow),
        }
    else:
        q, k, v, g, gq, gk, gv = each
        scratch = [kept[0], kept[2], kept[2], kept[4], aligned(records * pieces), partial]
        numbers = {
            "grad_memory": (*q, *g, *of_sinks, scale, variant.eps),
            "grad_finish": (segments,),
            "grad_competition": (*k, *v, *of_sources, pieces, scale, variant.eps, clamp),
            "grad_query": (*q, *g, *gq, *of_sinks, scale, variant.eps),
            "grad_source": (*k, *v, *gk, *gv, *of_sources, scale, variant.eps, clamp),
        }
    return Plan(kept if keep else [], scratch, grids, numbers, constants, shapes, is_whole)


def segment_count(records: int, longest: int, dim: int, slots: int) -> int:
    """Into how many segments each head is cut where `slots` programs run at once: so many that few of them idle."""

    def filled(segments: int) -> float:
        rounds = -(-records * segments // slots)
        return records * segments / slots / rounds - ROUND * rounds

    shortest = SHORTEST // min(max(dim, 8), 64)
    most = max(min(slots // records, longest // shortest), min(8 * slots // records, longest // LONG))
    return max(range(1, max(1, most) + 1), key=filled)


def _kept_sizes(rows, records, sinks, sources, dim: int, value_dim: int) -> list:
    """How many numbers I, α, O, Ô and the records take; symbolic if the lengths are."""
    sinks, sources = aligned(rows * sinks), aligned(rows * sources)
    return [sinks, sinks, sources, sources, aligned(records * _record_size(dim, value_dim))]


def _empty_kept(query: Tensor, key: Tensor, value: Tensor, bounds: Tensor | None, keep: bool) -> Tensor:
    (batch, heads, sinks, dim), sources = query.shape, key.shape[2]
    records = heads * (batch if bounds is None else bounds.shape[0] - 1)
    sizes = _kept_sizes(batch * heads, records, sinks, sources, dim, value.shape[-1]) if keep else []
    return query.new_empty(sum(sizes), dtype=torch.float32)


def _record_size(dim: int, value_dim: int) -> int:
    return dim * (value_dim + 4) + 4
