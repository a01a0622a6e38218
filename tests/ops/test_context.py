"""A sequence cut over ranks equals the sequence on one rank: values, gradients, states, packed or padded.

Four processes run every case in one start, since starting them takes longer than the cases.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from helpers import ROOT, VARIANTS, assert_same, oracle, random_inputs, with_gradients
from processes import run_ranks
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

from flowformer import (
    FlowAttention,
    FlowState,
    FlowVariant,
    flow_attention,
    flow_attention_recurrent,
    flow_attention_varlen,
)
from flowformer.bench.context import predicted_bytes
from flowformer.bench.errors import FORWARD, GRADIENT, measure
from flowformer.bench.measure import peak_bytes
from flowformer.models.lm import FlowformerLM, LMConfig
from flowformer.ops.context import exchange
from flowformer.ops.triton.op import HAS_TRITON

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")

RANKS = 4
NAMES = ["result", "grad_query", "grad_key", "grad_value"]
# at 1e-6, ReLU's flows span ten orders of magnitude and no two orders of summation agree to twelve digits
EVERY_VARIANT = {
    **VARIANTS,
    "relu": FlowVariant(feature_map="relu", eps=1e-3),
    "relu+eps": FlowVariant(feature_map="relu+eps", eps=1e-3),
}


RENORMALIZED = FlowVariant(renormalize=True)


class Case(NamedTuple):
    """One call; rank r holds the tokens cuts[r] … cuts[r + 1]."""

    is_causal: bool = False
    variant: FlowVariant = FlowVariant()
    cuts: tuple[int, ...] = (0, 3, 3, 9, 13)  # the second rank has no token
    source_cuts: tuple[int, ...] | None = None  # those of the sources, if they are others
    masked: bool = True
    heads: tuple[int, int] = (4, 2)
    dims: tuple[int, int] = (5, 3)
    dtype: torch.dtype = torch.float64
    gathered_bytes: int = 2**15
    scale: float = 0.7
    powers: bool = False
    backend: str | None = None

    @property
    def ranks(self):
        return len(self.cuts) - 1

    def inputs(self):
        sinks, sources = self.cuts[-1], (self.source_cuts or self.cuts)[-1]
        heads, key_heads = self.heads
        dims = {"dim": self.dims[0], "value_dim": self.dims[1]}
        query, key, value = random_inputs(2, heads, 24, 24, key_heads=key_heads, dtype=self.dtype, **dims)
        return query[:, :, :sinks], key[:, :, :sources], value[:, :, :sources]

    def masks(self):
        query, key, _ = self.inputs()
        if not self.masked:
            return None, None
        random = torch.Generator().manual_seed(3)
        query_mask, key_mask = (torch.rand(2, x.shape[2], generator=random) > 0.4 for x in (query, key))
        # one sequence has no token on the last rank, and the other none but there
        query_mask[0, self.cuts[-2] :] = False
        query_mask[1, : self.cuts[-2]] = False
        return query_mask, query_mask if self.is_causal else key_mask

    def parts(self, rank):
        """The slices of the sinks and the sources of a rank."""
        return tuple(slice(*cuts[rank : rank + 2]) for cuts in (self.cuts, self.source_cuts or self.cuts))

    def run(self, rank, group):
        """The result and the gradients, of this rank's tokens."""
        exchange.GATHERED_BYTES = self.gathered_bytes
        sinks, sources = self.parts(rank)
        query_mask, key_mask = self.masks()
        query, key, value = self.inputs()
        cotangent = torch.randn(
            *query.shape[:3], value.shape[3], generator=torch.Generator().manual_seed(1), dtype=torch.float64
        ).to(self.dtype)
        parts = ((query, sinks), (key, sources), (value, sources))
        leaves = [x[:, :, part].clone().requires_grad_() for x, part in parts]
        powers = learned_powers(self.heads[0]).requires_grad_() if self.powers else None
        result = flow_attention(
            *leaves,
            powers=powers,
            is_causal=self.is_causal,
            query_mask=None if query_mask is None else query_mask[:, sinks],
            key_mask=None if key_mask is None else key_mask[:, sources],
            variant=self.variant,
            enable_gqa=True,
            scale=self.scale,
            backend=self.backend,
            group=group,
        )
        learned = [] if powers is None else [powers]
        return [result.detach(), *torch.autograd.grad(result, leaves + learned, cotangent[:, :, sinks])]


def learned_powers(heads):
    return 0.5 + torch.rand(2, heads, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


KINDS = {"bidirectional": False, "causal": True}
CASES = {}
for kind, is_causal in KINDS.items():
    for name, variant in EVERY_VARIANT.items():
        CASES[f"{kind}, {name}"] = Case(is_causal, variant)
    CASES |= {
        f"{kind}, in slices": Case(is_causal, gathered_bytes=0),
        f"{kind}, softmax allocation, in slices": Case(is_causal, VARIANTS["softmax allocation"], gathered_bytes=0),
        f"{kind}, plain linear, in slices": Case(is_causal, VARIANTS["plain linear"], gathered_bytes=0),
        f"{kind}, no mask": Case(is_causal, masked=False),
        f"{kind}, two ranks": Case(is_causal, cuts=(0, 8, 13)),
        f"{kind}, all on the last rank": Case(is_causal, cuts=(0, 0, 0, 0, 9)),
        f"{kind}, all on the first rank": Case(is_causal, cuts=(0, 9, 9, 9, 9), masked=False),
        f"{kind}, one token a rank": Case(is_causal, cuts=(0, 1, 2, 3, 4), masked=False),
        f"{kind}, no token": Case(is_causal, cuts=(0, 0, 0, 0, 0), masked=False),
        f"{kind}, many heads": Case(is_causal, heads=(10, 5)),
        f"{kind}, one head": Case(is_causal, heads=(1, 1), dims=(1, 1)),
        f"{kind}, wide": Case(is_causal, heads=(2, 1), dims=(33, 40), gathered_bytes=2**13),
        f"{kind}, float32": Case(is_causal, dtype=torch.float32),
        f"{kind}, bfloat16": Case(is_causal, dtype=torch.bfloat16),
        f"{kind}, float16, in slices": Case(is_causal, dtype=torch.float16, gathered_bytes=0),
    }
    CASES |= {
        f"{kind}, powers": Case(is_causal, RENORMALIZED, powers=True),
        f"{kind}, powers, in slices": Case(is_causal, RENORMALIZED, powers=True, gathered_bytes=0),
        f"{kind}, renormalized, no token": Case(is_causal, RENORMALIZED, cuts=(0, 0, 0, 0, 0), masked=False),
    }
CASES |= {
    "renormalized, heads compete": Case(variant=FlowVariant(renormalize=True, competitors="heads")),
    "bidirectional, heads compete": Case(variant=FlowVariant(competitors="heads")),
    "cross-attention": Case(source_cuts=(0, 7, 7, 8, 20)),
    "cross-attention, sinks and sources on different ranks": Case(cuts=(0, 5, 5, 9, 9), source_cuts=(0, 0, 6, 6, 11)),
    "cross-attention, no source": Case(source_cuts=(0, 0, 0, 0, 0)),
}

INTERPRETED = HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1"
KERNELS = {"dtype": torch.float32, "backend": "triton"}
if INTERPRETED:
    CASES |= {
        "kernels": Case(**KERNELS),
        "kernels, powers": Case(variant=RENORMALIZED, powers=True, masked=False, **KERNELS),
        "kernels, no token": Case(cuts=(0, 0, 0, 0, 0), masked=False, **KERNELS),
        "kernels, two ranks": Case(
            cuts=(0, 6, 13), source_cuts=(0, 0, 9), variant=VARIANTS["sigmoid competition"], **KERNELS
        ),
        "kernels, plain linear": Case(cuts=(0, 6, 13), variant=VARIANTS["plain linear"], masked=False, **KERNELS),
    }
    # the third of four ranks, and the second of two, have tokens in two segments
    FOUR = {"cuts": (0, 3, 3, 20, 24), "heads": (2, 1), **KERNELS}
    TWO = {"cuts": (0, 5, 24), "heads": (1, 1), **KERNELS}
    CASES |= {
        "causal kernels": Case(True, **FOUR),
        "causal kernels, clamped": Case(
            True, VARIANTS["tight clamp"], masked=False, gathered_bytes=0, **FOUR | {"heads": (1, 1)}
        ),
        "causal kernels, powers": Case(True, RENORMALIZED, powers=True, **FOUR | {"heads": (1, 1), "dims": (5, 20)}),
        "causal kernels, no token": Case(True, **FOUR | {"cuts": (0, 0, 0, 0, 0)}),
        "causal kernels, no softmax": Case(True, FlowVariant(competition="sigmoid", feature_map="elu+1"), **TWO),
        "causal kernels, half precision": Case(
            True, VARIANTS["plain linear"], masked=False, **TWO | {"dtype": torch.bfloat16}
        ),
    }

# where each packed sequence ends, and where the ranks' tokens do; tokens after the last end belong to no sequence
BOUNDS = torch.tensor([0, 2, 2, 7, 8, 21, 23])
SOURCE_BOUNDS = torch.tensor([0, 1, 4, 4, 12, 19, 20])
KERNEL_CUTS = (0, 3, 10, 24, 24)  # the last rank has no sequence
PACKED_CUTS = {"cut": (0, 3, 10, 18, 24), "whole": (0, 8, 8, 23, 24), "one rank": (0, 0, 24, 24, 24)}
STATE_VARIANTS = "default", "tight clamp", "softmax allocation", "sigmoid competition", "renormalized"
KERNEL_STATE_VARIANTS = "renormalized", "sigmoid competition"
STATE_CUTS = (0, 3, 3, 5, 8), (8, 12, 14, 14, 17)  # two calls, one after the other
LANGUAGE_MODEL = LMConfig(vocab_size=11, num_layers=2, embed_dim=8, num_heads=2, mlp_dim=16, dropout=0.0)


def packed(is_causal, cuts, rank=None, group=None, dtype=torch.float64, backend=None, heads=4):
    """Result and gradients of packed sequences, those of a rank or of all."""
    drawn = torch.randn(2, 24, 4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    sinks, sources = drawn[:, :, :heads].to(dtype)
    key, value = sources[:, : heads // 2], sources[:, heads // 2 :, :3]
    cotangent = torch.randn(24, heads, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    start, stop = (0, 24) if rank is None else cuts[rank : rank + 2]
    leaves = [x[start:stop].clone().requires_grad_() for x in (sinks, key, value)]
    bounds = [x.clamp(start, stop) - start for x in (BOUNDS, BOUNDS if is_causal else SOURCE_BOUNDS)]
    options = {"is_causal": is_causal, "enable_gqa": True, "backend": backend, "group": group}
    result = flow_attention_varlen(*leaves, *bounds, 24, 24, **options)
    return [result.detach(), *torch.autograd.grad(result, leaves, cotangent[start:stop])]


def first_state(renormalize, heads):
    random = torch.Generator().manual_seed(4)
    query, key, value = (torch.randn(2, heads, 6, 5, generator=random, dtype=torch.float64) for _ in range(3))
    # this variant fills both logarithms
    variant = replace(VARIANTS["softmax allocation"], renormalize=renormalize)
    return flow_attention_recurrent(query, key, value, variant=variant)[1].pack()


def recurrent(variant, given, rank=None, group=None, dtype=torch.float64, backend=None, heads=4):
    """Two calls with the state of the first passed on: results, gradients, and those of the state."""
    inputs = random_inputs(2, heads, 17, dim=5, dtype=dtype)
    parts = [slice(0, 8), slice(8, 17)] if rank is None else [slice(*cuts[rank : rank + 2]) for cuts in STATE_CUTS]
    leaves = [x[:, :, part].clone().requires_grad_() for part in parts for x in inputs]
    first = [x.to(dtype).requires_grad_() for x in first_state(variant.renormalize, heads)]
    options = {"variant": variant, "backend": backend, "group": group}
    one, state = flow_attention_recurrent(*leaves[:3], FlowState.unpack(first) if given else None, **options)
    two, state = flow_attention_recurrent(*leaves[3:], state, **options)
    outputs = [one, two, *state.pack()]
    random = torch.Generator().manual_seed(1)
    drawn = [torch.randn(2, heads, 17, 5, generator=random, dtype=torch.float64) for _ in parts]
    cotangents = [x[:, :, part].to(dtype) for x, part in zip(drawn, parts, strict=True)]
    for x in state.pack():
        cotangents.append(torch.randn(x.shape, generator=random, dtype=torch.float64).to(dtype))
        # every rank has the last state, and the loss counts it once
        if rank not in (None, 2):
            cotangents[-1].zero_()
    wanted = [*leaves, *first] if given else leaves
    # without a softmax and a first state, the logarithms are constants
    pairs = [(x, grad) for x, grad in zip(outputs, cotangents, strict=True) if x.requires_grad]
    return [x.detach() for x in outputs], torch.autograd.grad(
        [x for x, _ in pairs], wanted, [grad for _, grad in pairs]
    )


def trained(rank=None, group=None):
    """The weights of a small model after ten updates with the loss of the whole sequence."""
    torch.manual_seed(0)
    model = torch.nn.ModuleList([torch.nn.Linear(6, 36), torch.nn.Linear(12, 6)]).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    part = slice(None) if rank is None else slice(*(0, 4, 5, 12, 16)[rank : rank + 2])
    for step in range(10):
        x, target = torch.randn(2, 3, 16, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        q, k, v = model[0](x[:, part]).unflatten(-1, (3, 3, 4)).permute(2, 0, 3, 1, 4)
        result = flow_attention(q, k, v, is_causal=step % 2 == 0, group=group)
        loss = (model[1](result.transpose(1, 2).flatten(2)) - target[:, part]).square().sum() / target.numel()
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters() if group is not None else ():
            dist.all_reduce(parameter.grad, group=group)
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def trained_language_model(rank=None, group=None):
    """Losses and weights likewise; a target may lie on the next rank, or on one after it."""
    torch.manual_seed(0)
    model = FlowformerLM(LANGUAGE_MODEL).double()
    model.cut_sequences(group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    part = slice(None) if rank is None else slice(*(0, 4, 4, 9, 16)[rank : rank + 2])
    losses = []
    for step in range(4):
        tokens = torch.randint(11, (3, 16), generator=torch.Generator().manual_seed(step))
        mask = torch.arange(16) < torch.tensor([[16], [9], [3]]) if step % 2 else None
        loss = model.loss(tokens[:, part], mask=None if mask is None else mask[:, part])
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters() if group is not None else ():
            dist.all_reduce(parameter.grad, group=group)
        optimizer.step()
        losses.append(loss.detach())
    return [torch.stack(losses), *(parameter.detach() for parameter in model.parameters())]


def sharded(mesh=None):
    """Weights after three updates: parameters in shards over all ranks, the batch over one half of the mesh, the
    sequences over the other."""
    torch.manual_seed(0)
    model = FlowformerLM(LANGUAGE_MODEL).double()
    rows = part = slice(None)
    if mesh is not None:
        data, context = mesh.get_coordinate()
        rows, part = slice(data, data + 1), (slice(0, 5), slice(5, 12))[context]
        for layer in model.decoder.layers:
            fully_shard(layer, mesh=mesh._flatten("all"))
        fully_shard(model, mesh=mesh["all"])
        register_fsdp_forward_method(model, "loss")
        model.cut_sequences(mesh["context"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(3):
        tokens = torch.randint(11, (2, 12), generator=torch.Generator().manual_seed(step))
        loss = model.loss(tokens[rows, part], reduction="sum") / 22
        optimizer.zero_grad()
        # FSDP averages over ranks; multiply by their number to get the sum
        (loss if mesh is None else loss * RANKS).backward()
        optimizer.step()
    return [x.detach() if mesh is None else x.full_tensor().detach() for x in model.parameters()]


def rotary(rank=None, group=None):
    """A module with rotary positions, causal and padded, then bidirectional and packed."""
    torch.manual_seed(0)
    part = slice(None) if rank is None else slice(*(0, 5, 6, 6, 16)[rank : rank + 2])
    x = torch.randn(2, 16, 8, dtype=torch.float64)
    mask = torch.arange(16) < torch.tensor([[16], [7]])
    bounds = torch.tensor([0, 4, 13, 15])
    bounds = bounds if rank is None else bounds.clamp(part.start, part.stop) - part.start
    padded, packed = (
        FlowAttention(8, 2, is_causal=is_causal, rotary_base=100.0, group=group).double() for is_causal in (True, False)
    )
    return [padded(x[:, part], key_mask=mask[:, part]).detach(), packed(x[:1, part], cu_seqlens=bounds).detach()]


def refusal(group, query, **options):
    try:
        flow_attention(query, query, query, group=group, **options)
    except (TypeError, ValueError, RuntimeError) as error:  # NotImplementedError is a RuntimeError
        return f"{type(error).__name__}: {error}"
    return "no error"


def disagreements(rank, world):
    x, odd = torch.randn(2, 2, 3, 4), rank == 1
    yield "dtype", refusal(world, x.double() if odd else x)
    yield "batch", refusal(world, x[:1] if odd else x)
    yield "heads", refusal(world, x[:, :1] if odd else x)
    yield "width", refusal(world, x[..., :2] if odd else x)
    yield "variant", refusal(world, x, variant="rl" if odd else "core")
    yield "is_causal", refusal(world, x, is_causal=odd)
    yield "scale", refusal(world, x, scale=2.0 if odd else None)
    yield "gradient", refusal(world, x.clone().requires_grad_(odd))
    yield "mask", refusal(world, x, query_mask=torch.ones(2, 7 if odd else 3, dtype=torch.bool))


def misuses(world, mesh):
    x = torch.randn(1, 1, 2, 3, requires_grad=True)
    yield "mesh", refusal(mesh, x)
    yield "name", refusal("context", x)
    gradient = torch.autograd.grad(flow_attention(x, x, x, group=world).sum(), x, create_graph=True)[0]
    try:
        gradient.sum().backward()
    except RuntimeError as error:
        yield "twice", str(error)


def bytes_sent(group):
    """Of one layer, forward and backward, with 4 and with 40 tokens a rank."""
    exchange.GATHERED_BYTES = 2**15
    calls = [(is_causal, length, 4, None) for is_causal in KINDS.values() for length in (4, 40)]
    for is_causal, length, heads, backend in [*calls, (True, 4, 1, "triton")] if INTERPRETED else calls:
        x = torch.randn(1, heads, length, 32, requires_grad=True)
        with exchange.traffic() as sent:
            flow_attention(x, x, x, is_causal=is_causal, backend=backend, group=group).sum().backward()
        yield is_causal, heads, sent.stages, sent.bytes


def memory(rank, group):
    """The most that a causal call and its gradient hold on rank 0, inputs included, cut over ranks and alone."""
    leaves = [torch.randn(1, 8, 1024, 32, requires_grad=True) for _ in range(3)]

    def run(group=None):
        torch.autograd.grad(flow_attention(*leaves, is_causal=True, group=group).sum(), leaves)

    if rank:
        return run(group)
    return [4 * leaves[0].nbytes + peak_bytes(partial(run, each), "cpu") for each in (group, None)]


def work(rank, _):
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "context"))
    world, pair = dist.group.WORLD, mesh["context"]
    found = {}
    if INTERPRETED:
        from flowformer.ops.triton.bidirectional import plan
        from flowformer.ops.triton.causal import launch_table
        from flowformer.ops.triton.causal import plan as causal_plan

        # so that kernels add up the records of several segments, but not on every rank
        plan.segment_count = lambda records, longest, *_: 2 if longest > 3 else 1
        causal_plan.segment_count = lambda rows, longest, *_: 2 if longest > 3 else 1
        # and values of several tiles
        launch_table.CONFIGS = {key: config._replace(tile=16) for key, config in launch_table.CONFIGS.items()}
    for name, case in CASES.items():
        own = rank if case.ranks == RANKS else rank % 2
        if case.backend is not None and rank >= case.ranks:
            continue  # the second pair would do the same
        found[name] = case.run(own, world if case.ranks == RANKS else pair)
        if "in slices" in name or "float" in name:
            found[f"{name}, again"] = case.run(own, world if case.ranks == RANKS else pair)
    for kind, is_causal in KINDS.items():
        for where, cuts in PACKED_CUTS.items():
            found[f"packed, {kind}, {where}"] = packed(is_causal, cuts, rank, world)
    for name in STATE_VARIANTS:
        for given in (False, True):
            found["recurrent", name, given] = recurrent(VARIANTS[name], given, rank, world)
    if INTERPRETED:
        found["packed kernels"] = packed(True, KERNEL_CUTS, rank, world, heads=2, **KERNELS)
        for name in KERNEL_STATE_VARIANTS:
            found["recurrent kernels", name] = recurrent(VARIANTS[name], True, rank, world, heads=1, **KERNELS)
    found["trained"] = trained(rank, world)
    found["language model"] = trained_language_model(rank, world)
    found["sharded"] = sharded(mesh)
    found["rotary"] = rotary(rank, world)
    found["memory"] = memory(rank, world)
    found["bytes"] = list(bytes_sent(world))
    found["disagreements"] = dict(disagreements(rank, world))
    found["misuses"] = dict(misuses(world, mesh))
    dist.barrier()
    if rank < RANKS - 1:
        # the last rank has ended
        found["dead"] = refusal(world, torch.randn(1, 1, 2, 3))
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What each rank has found."""
    return run_ranks(work, RANKS, tmp_path_factory)[1]


@pytest.mark.parametrize("name", CASES)
def test_cut_equals_whole(found, name):
    case = CASES[name]
    parts = [found[rank][name][: len(NAMES)] for rank in range(case.ranks)]
    ours = [torch.cat(each, 2) for each in zip(*parts, strict=True)]
    if case.powers:  # each rank has its share of their gradient
        ours.append(sum(found[rank][name][-1] for rank in range(RANKS)))
    query_mask, key_mask = case.masks()
    options = {"query_mask": query_mask, "key_mask": key_mask, "scale": case.scale, "variant": case.variant}

    def whole(dtype):
        inputs = [x.to(dtype) for x in case.inputs()]
        if dtype == torch.float64 and not case.powers:
            return with_gradients(lambda *x: oracle(*x, is_causal=case.is_causal, **options), inputs)

        def run(*x, powers=None):
            # `test_renormalize.py` compares this backend with the equations
            return flow_attention(
                *x, powers=powers, is_causal=case.is_causal, enable_gqa=True, backend="reference", **options
            )

        if not case.powers:
            return with_gradients(run, inputs)
        learned = learned_powers(case.heads[0]).to(dtype)
        return with_gradients(lambda *x: run(*x[:3], powers=x[3]), [*inputs, learned])

    truth = whole(torch.float64)
    assert ours[0].dtype == case.dtype
    if case.dtype == torch.float64:
        assert_same(ours, truth, [*NAMES, "grad_powers"][: len(truth)])
        return
    assert_obeys(ours[:1], ours[1:], whole(case.dtype), truth, case.dtype)


def assert_obeys(results, gradients, plain, truth, dtype):
    """The error rule, of results and then of their gradients."""
    size = sum(x.norm() ** 2 for x in truth[len(results) :]).sqrt().item()
    for i, ours in enumerate([*results, *gradients]):
        factor, of = (FORWARD, None) if i < len(results) else (GRADIENT, size)
        error = measure(ours, plain[i], truth[i], factor, dtype, of)
        assert error.obeys, f"{i}: {error}"


def test_same_bits_in_every_run(found):
    again = [name for name in CASES if f"{name}, again" in found[0]]
    assert len(again) > 6
    for name in again:
        for rank in range(RANKS):
            for one, other in zip(found[rank][name], found[rank][f"{name}, again"], strict=True):
                assert torch.equal(one, other), name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", PACKED_CUTS)
def test_packed_sequences_begin_and_end_anywhere(found, kind, where):
    parts = [found[rank][f"packed, {kind}, {where}"] for rank in range(RANKS)]
    ours = [torch.cat(each) for each in zip(*parts, strict=True)]
    assert_same(ours, packed(KINDS[kind], PACKED_CUTS[where]), NAMES)


@pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter")
def test_packed_kernels(found):
    ours = [torch.cat(each) for each in zip(*(found[rank]["packed kernels"] for rank in range(RANKS)), strict=True)]
    plain, truth = (
        packed(True, KERNEL_CUTS, dtype=dtype, backend="reference", heads=2) for dtype in (torch.float32, torch.float64)
    )
    assert_obeys(ours[:1], ours[1:], plain, truth, torch.float32)


@pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter")
@pytest.mark.parametrize("name", KERNEL_STATE_VARIANTS)
def test_kernels_pass_a_state_from_call_to_call(found, name):
    ranks = [found[rank]["recurrent kernels", name] for rank in range(RANKS)]
    plain, truth = (
        [x for each in recurrent(VARIANTS[name], True, dtype=dtype, backend="reference", heads=1) for x in each]
        for dtype in (torch.float32, torch.float64)
    )
    for outputs, _ in ranks:
        for i in range(2, 5):  # every rank has the last state
            assert torch.equal(outputs[i], ranks[0][0][i])
    results = [torch.cat([outputs[i] for outputs, _ in ranks], 2) for i in range(2)] + ranks[0][0][2:]
    gradients = [torch.cat([grads[i] for _, grads in ranks], 2) for i in range(6)]
    gradients += [sum(grads[i] for _, grads in ranks) for i in range(6, 9)]
    assert_obeys(results, gradients, plain, truth, torch.float32)


@pytest.mark.parametrize("given", [False, True], ids=["from nothing", "from a state"])
@pytest.mark.parametrize("name", STATE_VARIANTS)
def test_state_is_passed_from_call_to_call(found, name, given):
    outputs, gradients = recurrent(VARIANTS[name], given)
    ranks = [found[rank]["recurrent", name, given] for rank in range(RANKS)]
    for i in range(2):
        assert_same([torch.cat([ours[i] for ours, _ in ranks], 2)], [outputs[i]], ["result"])
    for ours, _ in ranks:
        assert_same(ours[2:4], outputs[2:4], ["sums", "memory"])
        torch.testing.assert_close(ours[4], outputs[4], rtol=1e-12, atol=0)  # logarithms may be -inf
    for i in range(6):
        assert_same([torch.cat([ours[i] for _, ours in ranks], 2)], [gradients[i]], ["gradient"], 1e-11)
    # each rank has a copy of the first state, whose gradients add up
    for i in range(6, len(gradients)):
        assert_same([sum(ours[i] for _, ours in ranks)], [gradients[i]], ["gradient of the state"], 1e-11)


def test_training_equals_one_process(found):
    weights = trained()
    for rank in range(RANKS):
        assert_same(found[rank]["trained"], weights, ["weight", "bias"] * 2, 1e-10)


def test_training_a_language_model_equals_one_process(found):
    truth = trained_language_model()
    for rank in range(RANKS):
        assert_same(found[rank]["language model"], truth, ["loss"] + ["weight"] * (len(truth) - 1), 1e-10)


def test_sharded_parameters_and_cut_sequences_equal_one_process(found):
    truth = sharded()
    for rank in range(RANKS):
        assert_same(found[rank]["sharded"], truth, ["weight"] * len(truth), 1e-10)


def test_rotary_positions_go_on_from_rank_to_rank(found):
    ours = [torch.cat(each, 1) for each in zip(*(found[rank]["rotary"] for rank in range(RANKS)), strict=True)]
    assert_same(ours, rotary(), ["padded", "packed"])


def test_bytes_are_those_of_the_formula_at_any_length(found):
    for is_causal, heads, stages, sent in found[0]["bytes"]:
        assert stages == (8 if is_causal else 6)
        assert sent == predicted_bytes(heads, 32, 32, RANKS, is_causal)
    assert all(predicted_bytes(16, 64, 64, 8, is_causal) < 1e6 for is_causal in KINDS.values())


def test_memory_of_a_rank_is_that_of_its_tokens_alone(found):
    cut, alone = found[0]["memory"]
    assert cut < 1.2 * alone


@pytest.mark.parametrize(
    "what", ["dtype", "batch", "heads", "width", "variant", "is_causal", "scale", "gradient", "mask"]
)
def test_ranks_that_differ_raise_everywhere(found, what):
    messages = [found[rank]["disagreements"][what] for rank in range(RANKS)]
    for rank, message in enumerate(messages):
        if what == "mask" and rank == 1:
            assert message.startswith("ValueError: query_mask must have shape")
        else:
            assert message.startswith("ValueError: the ranks that share a sequence must make the same call")
            assert all(f"rank {other}: " in message for other in range(RANKS))


def test_misuse_is_named(found):
    messages = found[0]["misuses"]
    assert "mesh with one dimension, got 2 with the names ('data', 'context')" in messages["mesh"]
    assert "must be a ProcessGroup or a DeviceMesh, got str" in messages["name"]
    assert "differentiable once" in messages["twice"]


def test_dead_rank_ends_the_others_with_a_message(found):
    for rank in range(RANKS - 1):
        assert found[rank]["dead"].startswith(f"RuntimeError: rank {rank} of the 4 that share a sequence got no answer")


@pytest.mark.slow
def test_example_trains():
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "examples/long_context.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+) of 1024 tokens, 512 on this rank", done.stdout)]
    assert len(losses) == 3
    assert losses[-1] < losses[0]


def test_traffic_inside_traffic():
    with exchange.traffic() as outer:
        with exchange.traffic() as inner:
            exchange.Exchange._begin_stage()
        exchange.Exchange._begin_stage()
        with exchange.traffic() as empty:
            pass
        exchange.Exchange._begin_stage()
    assert (outer.stages, inner.stages, empty.stages) == (3, 1, 0)
