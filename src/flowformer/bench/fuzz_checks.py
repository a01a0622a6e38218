"""The checks of the fuzzer on a case.

Values and gradients must obey the error rule; two runs must give the same bits, and so must a run in which all
allocated memory starts as NaN; a call must not write outside its allocations or change its inputs.
"""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from ..ops import FlowState, flow_attention, flow_attention_recurrent, flow_attention_varlen, reference
from ..ops.common import joint_mask
from ..ops.variant import FlowVariant
from .errors import FORWARD, GRADIENT, ROUNDING, measure
from .fuzz_cases import Case
from .fuzz_memory import Guard, guarded_copy

# numbers in the N × M matrices of the reference; above this, the oracle computes in pieces or without the matrices
QUADRATIC = {"cpu": 2**21, "cuda": 2**25}
PIECE = 256  # tokens
OUTPUTS = ("result", "sums", "memory", "scalars")
GRADIENTS = ("d_query", "d_key", "d_value", "d_sums", "d_memory", "d_scalars")


class Inputs(NamedTuple):
    """The arguments of a case, each tensor in guarded memory."""

    query: Tensor
    key: Tensor
    value: Tensor
    query_mask: Tensor | None
    key_mask: Tensor | None
    state: tuple[Tensor, ...] | None
    powers: Tensor | None
    bounds: tuple[Tensor, Tensor] | None
    buffers: list[Tensor]
    random: torch.Generator

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        return self.query, self.key, self.value, *(self.state or ()), *(() if self.powers is None else (self.powers,))

    def parts(self, leaves: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor], Tensor | None]:
        """Split leaves into query, key and value; the state (empty without one); the powers (None without them)."""
        count = 0 if self.state is None else 3
        return leaves[:3], leaves[3 : 3 + count], None if self.powers is None else leaves[-1]

    @property
    def gradients(self) -> tuple[str, ...]:
        """The names of the gradients of the leaves."""
        return GRADIENTS[: 3 if self.state is None else 6] + (() if self.powers is None else ("d_powers",))


def check(case: Case, device: str) -> dict[str, Any]:
    """A record of the case: the verdict, the reasons, and the error of each tensor.

    Verdicts: "pass"; "fail"; "refused" by the backend; "memory" if the device has too little. Three more mark
    violations of the error rule that are not faults:
    - "kink": moving the clamp by a rounding error has the same effect (the gradient is discontinuous at the clamp);
    - "conditioned": a rounding error of Ô has the same effect (it is amplified by the exponential of a large flow), or
      a rounding error of inputs and upstream gradients (⟨dR, v⟩ of a single token may be a small sum of large terms),
      or of Σ c dc (which cancels dc where one source has all the weight);
    - "cancelled": the gradient is a difference of two terms with no significant digit left.
    """
    start = time.perf_counter()
    record: dict[str, Any] = {"case": case.to_json(), "kind": case.kind, "backend": case.backend}
    try:
        verdict, reasons, errors = _check(case, device)
        record |= {"verdict": verdict, "why": "; ".join(reasons), "errors": errors}
    except NotImplementedError as refusal:
        record |= {"verdict": "refused", "why": str(refusal)}
    except torch.OutOfMemoryError as error:
        # raised by the oracle, or because other workers hold the memory
        torch.cuda.empty_cache()
        record |= {"verdict": "memory", "why": str(error).splitlines()[0]}
    except Exception as error:
        record |= {"verdict": "fail", "why": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
    return record | {"seconds": round(time.perf_counter() - start, 3)}


def _check(case: Case, device: str) -> tuple[str, list[str], dict[str, Any]]:
    inputs = make_inputs(case, device)
    dtype = getattr(torch, case.dtype)
    exact = [x.to(dtype).double() for x in inputs.leaves[:3]] + [x.double() for x in inputs.leaves[3:]]
    with torch.no_grad():
        outputs = _exact(case, inputs, exact)
    cotangents = _cotangents(case, inputs, outputs) if case.gradients else {}
    before = [buffer.clone() for buffer in inputs.buffers]

    def run() -> dict[str, Tensor]:
        letters = "qkvsss"[: len(inputs.leaves) - case.powers]
        wanted = [*(letter in case.gradients for letter in letters), *([bool(case.gradients)] * case.powers)]
        return _with_gradients(lambda leaves: _call(case, inputs, leaves), inputs, inputs.leaves, wanted, cotangents)

    def oracle(tensors: Sequence[Tensor], of: Case = case, upstream: Mapping[str, Tensor] = cotangents):
        wanted = [bool(case.gradients)] * len(tensors)
        return _with_gradients(lambda leaves: _exact(of, inputs, leaves), inputs, tensors, wanted, upstream)

    reasons = []
    results, again = run(), run()
    with Guard() as guard:
        poisoned = run()
    for what, others in (("two runs differ", again), ("memory poisoned with NaN makes a difference", poisoned)):
        names = [name for name in results if not _same_bits(results[name], others[name])]
        if names:
            reasons.append(f"{what} in {', '.join(names)}")
    if guard.touched():
        reasons.append("memory outside of an allocation was written")
    if not all(torch.equal(old, new) for old, new in zip(before, inputs.buffers, strict=True)):
        reasons.append("an input was changed")

    truths = oracle(exact)
    # for float64 inputs, plain PyTorch is the oracle itself: use the error of float32, which shows how well conditioned
    # the sums are
    coarse = torch.float32 if dtype == torch.float64 else dtype
    plain = oracle([x.to(coarse if i < 3 else torch.float32) for i, x in enumerate(exact)])
    whole = math.sqrt(sum(x.norm().item() ** 2 for name, x in truths.items() if name in GRADIENTS))
    # Triton's interpreter truncates float32 to bfloat16
    truncates = case.backend == "triton" and device == "cpu" and dtype == torch.bfloat16
    errors: dict[str, Any] = {}
    broken: list[str] = []
    for name, result in results.items():
        if result.shape != truths[name].shape:
            reasons.append(f"{name} has shape {tuple(result.shape)}, not {tuple(truths[name].shape)}")
            continue
        value, other, truth = _comparable(case, name, result, plain[name], truths[name])
        factor, size = (GRADIENT, whole) if name.startswith("d_") else (FORWARD, None)
        error = measure(value, other, truth, factor, dtype, size, truncates, name in ("d_scalars", "d_powers"))
        errors[name] = {"relative": error.relative, "ratio": error.ratio}
        if not error.obeys:
            broken.append(name)
    if results["result"].dtype != dtype:
        reasons.append(f"the result is {results['result'].dtype}, not {dtype}")
    rules = [f"{name} is off by {errors[name]['relative']:.2g}, {errors[name]['ratio']:.2g} times what the rule allows"
             for name in broken]  # fmt: skip
    if broken and not reasons:
        sizes = {name: truths[name].double().norm().item() for name in broken}
        excess = {name: sizes[name] * errors[name]["relative"] * (1 - 1 / errors[name]["ratio"]) for name in broken}
        excuse = _excuse(case, inputs, exact, cotangents, oracle, truths, excess)
        if excuse:
            return excuse, rules, errors
    return "fail" if reasons or rules else "pass", reasons + rules, errors


def _excuse(case, inputs, exact, cotangents, oracle, truths, excess: dict[str, float]) -> str | None:
    """The verdict on errors that exceed the rule by `excess`; None if they are a failure."""
    dtype = getattr(torch, case.dtype)
    rounding = torch.finfo(dtype).eps / 2
    clamp = _variant(case).clamp
    if clamp is not None:
        # a flow is a sum in float32 at best, so it may be off by a few rounding errors
        off = FORWARD * ROUNDING if dtype == torch.float32 else rounding
        above, below = (
            oracle(exact, replace(case, variant={**case.variant, "clamp": clamp * (1 + d)})) for d in (off, -off)
        )
        jumps = {name: (above[name] - below[name]).norm().item() for name in excess}
        # factor 2: in a gradient of state or powers the jumps of several flows may cancel
        if all(excess[name] <= jumps[name] * (1 if name in GRADIENTS[:3] else 2) for name in excess):
            return "kink"
    random = torch.Generator().manual_seed(case.seed)

    def rounded(x: Tensor, off: float) -> Tensor:
        return x * (1 + off * (torch.randint(2, x.shape, generator=random).to(x) * 2 - 1))

    bounded = reference._clamped
    off = ROUNDING if dtype == torch.float32 else rounding / 16
    with patch.object(reference, "_clamped", lambda flow, **variant: bounded(rounded(flow, off), **variant)):
        of_flows = oracle(exact)
    of_inputs = oracle([rounded(x, rounding) for x in exact], upstream={
        name: rounded(grad.double(), rounding) for name, grad in cotangents.items()
    })  # fmt: skip
    # this sum is float32 even for half-precision inputs
    share = min(off, ROUNDING)
    with patch.object(Tensor, "softmax", lambda x, dim: _RoundedSoftmax.apply(x, dim, share)):
        of_softmax = oracle(exact)
    # torch's logcumsumexp over a thousand tokens exceeds the rule in float64
    with patch.object(Tensor, "logcumsumexp", _running_logarithm):
        of_logarithms = oracle(exact)
    for others in (of_flows, of_inputs, of_softmax, of_logarithms):
        if all(excess[name] <= GRADIENT * (others[name] - truths[name]).norm().item() for name in excess):
            return "conditioned"
    if set(excess) <= {"d_query", "d_key"}:
        noise = _noise(case, inputs, exact, cotangents)
        if all(max(excess[name], truths[name].norm().item()) <= noise[name] for name in excess):
            return "cancelled"
    return None


def _running_logarithm(x: Tensor, dim: int) -> Tensor:
    """logcumsumexp by one cumulative sum of exponentials, which is more accurate unless small ones come first."""
    top = x.detach().amax(dim, keepdim=True)
    return (x - top).exp().cumsum(dim).clamp_min(torch.finfo(x.dtype).tiny).log() + top


class _RoundedSoftmax(torch.autograd.Function):
    """A softmax y whose gradient, y (dy − Σ y dy), is computed with a relative error in the sum."""

    @staticmethod
    def forward(ctx, x: Tensor, dim: int, off: float) -> Tensor:
        ctx.dim, ctx.off = dim, off
        result = torch.softmax(x, dim)
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        (result,) = ctx.saved_tensors
        total = (result * grad).sum(ctx.dim, keepdim=True)
        return result * (grad - total * (1 + ctx.off)), None, None


def _noise(case: Case, inputs: Inputs, exact: Sequence[Tensor], cotangents: Mapping[str, Tensor]) -> dict[str, float]:
    """Eight rounding errors of the terms in the gradients of query and key: through φ(q)φ(k)ᵀ and through the flows.

    A rounding error is one of the dtype, or of a float32 sum over the tokens if that is larger.
    """
    uses: list[Tensor] = []
    features = reference._features

    def record(x: Tensor, *args: Any, **variant: Any) -> Tensor:
        uses.append(x.view_as(x))
        return features(uses[-1], *args, **variant)

    with patch.object(reference, "_features", record):
        outputs = dict(zip(OUTPUTS, _exact(case, inputs, [x.detach().requires_grad_() for x in exact]), strict=False))
    ends = [(outputs[name], grad.double()) for name, grad in cotangents.items() if outputs[name].requires_grad]
    grads = torch.autograd.grad([x for x, _ in ends], uses, [grad for _, grad in ends], allow_unused=True)
    longest = max([case.past + case.sinks, case.sources, *case.lengths, *case.source_lengths])
    rounding = max(torch.finfo(getattr(torch, case.dtype)).eps / 2, 2**-24 * math.sqrt(longest))
    # the reference takes the features of the query, then of the key
    terms = {"d_query": grads[0::2], "d_key": grads[1::2]}
    return {
        name: 8 * rounding * math.sqrt(sum(x.norm().item() ** 2 for x in parts if x is not None))
        for name, parts in terms.items()
    }


def make_inputs(case: Case, device: str) -> Inputs:
    """Random arguments of the case, determined by its seed."""
    random = torch.Generator().manual_seed(case.seed)
    dtype, buffers = getattr(torch, case.dtype), []
    rows = () if case.is_packed else (case.batch,)
    sinks, sources = sum(case.lengths) + case.sinks, sum(case.source_lengths) + case.sources
    shapes = (
        (case.heads, sinks, case.dim),
        (case.key_heads, sources, case.dim),
        (case.key_heads, sources, case.value_dim),
    )

    def put(values: Tensor, layout: str = "contiguous") -> Tensor:
        tensor, buffer = guarded_copy(values, layout, device, case.seed % 2)
        buffers.append(buffer)
        return tensor

    mask_layout = "turned" if case.seed % 5 == 0 else "contiguous"
    masks = [
        None if kind is None else put(_mask(kind, case.batch, length, random), mask_layout)
        for kind, length in ((case.query_mask, case.sinks), (case.key_mask, case.sources))
    ]
    joint = None
    if case.is_causal and not case.is_packed:
        joint = joint_mask(*masks)
    tensors = []
    for index, (shape, layout) in enumerate(zip(shapes, case.layouts, strict=True)):
        values = torch.randn(*rows, *shape, generator=random) * (case.amplitude if index < 2 else 1)
        mask = joint if case.is_causal else masks[min(index, 1)]
        if case.junk and mask is not None and layout != "expanded":
            values = values.masked_fill(~mask.cpu()[:, None, :, None], torch.nan)
        input_dtype = torch.float32 if case.autocast == "mixed" and index == 0 else dtype
        # packed tokens come before heads
        tensors.append(put((values.transpose(0, 1) if case.is_packed else values).to(input_dtype), layout))
    powers = None
    if case.powers:
        # τ in [−1, 2] and γ in [0, 2]; both are 1 in the paper
        drawn = torch.rand(2, case.heads, generator=random)
        drawn = torch.stack([3 * drawn[0] - 1, 2 * drawn[1]])
        powers = put(drawn.to(torch.float64 if dtype == torch.float64 else torch.float32))
    state = None
    if case.past:
        past = [torch.randn(case.batch, case.heads, case.past, size, generator=random, dtype=torch.float64)
                for size in (case.dim, case.dim, case.value_dim)]  # fmt: skip
        scaled = past[0] * case.amplitude, past[1] * case.amplitude, past[2]
        learned = None if powers is None else powers.double().cpu()
        _, parts = reference.causal(*scaled, None, None, _scale(case), powers=learned, **_variant(case).as_options())
        sums = torch.float64 if dtype == torch.float64 else torch.float32
        turned = "turned" if "turned" in case.layouts else "contiguous"
        state = tuple(put(part.to(sums), turned) for part in parts)
    bounds = None
    if case.is_packed:
        ends = [[0, *accumulate(lengths)] for lengths in (case.lengths, case.source_lengths)]
        index_dtype = torch.int32 if case.seed % 3 else torch.int64
        bounds = put(torch.tensor(ends[0], dtype=index_dtype)), put(torch.tensor(ends[1], dtype=index_dtype))
    return Inputs(tensors[0], tensors[1], tensors[2], masks[0], masks[1], state, powers, bounds, buffers, random)


def _call(case: Case, inputs: Inputs, leaves: Sequence[Tensor]) -> list[Tensor]:
    """The outputs of the public API: the result and, for a recurrent call, the three tensors of the state."""
    (query, key, value), state, powers = inputs.parts(leaves)
    options: dict[str, Any] = {
        "scale": case.scale,
        "enable_gqa": case.heads != case.key_heads,
        "variant": _variant(case),
        "powers": powers,
        "backend": case.backend,
    }
    device = query.device.type
    dtype = getattr(torch, case.dtype)
    autocast = torch.bfloat16 if dtype in (torch.float32, torch.float64) else dtype
    with torch.autocast(device, autocast) if case.autocast else nullcontext():
        if inputs.bounds is not None:
            slack = 37 if case.seed % 4 == 0 else 0  # max_seqlen may exceed the longest length
            longest = max(case.lengths, default=0) + slack, max(case.source_lengths, default=0) + slack
            options["is_causal"] = case.is_causal
            return [flow_attention_varlen(query, key, value, *inputs.bounds, *longest, **options)]
        if case.kind != "recurrent":
            options |= {"is_causal": case.is_causal, "query_mask": inputs.query_mask, "key_mask": inputs.key_mask}
            return [flow_attention(query, key, value, **options)]
        carried = FlowState(*state) if state else None
        if not state and case.seed % 4 == 0:
            sums = torch.float64 if dtype == torch.float64 else torch.float32
            sizes = case.batch, case.heads, case.dim, case.value_dim
            carried = FlowState.empty(*sizes, variant=_variant(case), device=query.device, dtype=sums)
        parts = []
        for start, stop in pairwise([0, *case.cuts, case.sinks]):
            mask = None if inputs.key_mask is None else inputs.key_mask[:, start:stop]
            q, k, v = (x[:, :, start:stop] for x in (query, key, value))
            part, carried = flow_attention_recurrent(q, k, v, carried, key_mask=mask, **options)
            parts.append(part)
        return [torch.cat(parts, 2), *(carried.pack() if carried else ())]


def _exact(case: Case, inputs: Inputs, leaves: Sequence[Tensor]) -> list[Tensor]:
    """The outputs of `_call` by the reference, in the dtype of the leaves; a recurrent sequence is not cut."""
    (query, key, value), state, powers = inputs.parts(leaves)
    scale, variant = _scale(case), _variant(case)
    if not case.is_packed:
        if not case.is_causal:
            masks = inputs.query_mask, inputs.key_mask
            return [exact_bidirectional(query, key, value, *masks, scale, variant, powers)]
        mask = joint_mask(inputs.query_mask, inputs.key_mask)
        result, end = exact_causal(query, key, value, mask, tuple(state) or None, scale, variant, powers)
        return [result, *end] if case.kind == "recurrent" else [result]
    parts = []
    starts, source_starts = accumulate([0, *case.lengths]), accumulate([0, *case.source_lengths])
    for at, length, first, count in zip(starts, case.lengths, source_starts, case.source_lengths, strict=False):
        q = query[at : at + length].transpose(0, 1)[None]
        k, v = (x[first : first + count].transpose(0, 1)[None] for x in (key, value))
        if case.is_causal:
            result, _ = exact_causal(q, k, v, None, None, scale, variant, powers)
        else:
            result = exact_bidirectional(q, k, v, None, None, scale, variant, powers)
        parts.append(result[0].transpose(0, 1))
    return [torch.cat([*parts, query.new_zeros(case.sinks, case.heads, case.value_dim)])]


def exact_bidirectional(
    query, key, value, query_mask, key_mask, scale: float, variant: FlowVariant, powers: Tensor | None = None
) -> Tensor:
    """`reference.bidirectional` with grouped heads; for large inputs without the N × M matrix."""
    key, value = reference.repeat_heads(query, key), reference.repeat_heads(query, value)
    options = {**variant.as_options(), "powers": powers}
    if math.prod(query.shape[:3]) * key.shape[2] <= QUADRATIC[query.device.type]:
        return reference.bidirectional(query, key, value, query_mask, key_mask, scale, **options)
    maps = reference.bidirectional_maps(query, key, query_mask, key_mask, scale, **options)
    q = reference._features(query, query_mask, scale, **options)
    k = reference._features(key, key_mask, scale, **options)
    incoming = maps.incoming
    if variant.renormalize:
        incoming = reference._flow(q, (k * maps.competition[..., None]).sum(-2, keepdim=True), **options)
    received = torch.where(incoming > 0, maps.allocation / incoming, 0)
    memory = k.mT @ (reference._valid(value, key_mask) * maps.competition[..., None])
    return (q @ memory * received[..., None]).to(query.dtype)


def exact_causal(
    query, key, value, mask, state, scale: float, variant: FlowVariant, powers: Tensor | None = None
) -> tuple[Tensor, tuple]:
    """`reference.causal` with grouped heads; for large inputs in pieces that pass the state on."""
    key, value = reference.repeat_heads(query, key), reference.repeat_heads(query, value)
    batch, heads, length, _ = query.shape
    piece = PIECE if batch * heads * length**2 > QUADRATIC[query.device.type] else max(length, 1)
    results = []
    for start in range(0, max(length, 1), piece):
        tokens = slice(start, start + piece)
        part = None if mask is None else mask[:, tokens]
        q, k, v = (x[:, :, tokens] for x in (query, key, value))
        result, state = reference.causal(q, k, v, part, state, scale, powers=powers, **variant.as_options())
        results.append(result)
    return torch.cat(results, 2), state


def _with_gradients(
    function: Callable[[Sequence[Tensor]], list[Tensor]],
    inputs: Inputs,
    leaves: Sequence[Tensor],
    wanted: Sequence[bool],
    cotangents: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """The outputs by name, and the gradients of the leaves for which `wanted` is True."""
    parts = zip(inputs.gradients, leaves, wanted, strict=True)
    named = {name: x.detach().requires_grad_(want) for name, x, want in parts}
    outputs = dict(zip(OUTPUTS, function(list(named.values())), strict=False))
    chosen = {name: x for name, x in named.items() if x.requires_grad}
    ends = [name for name, x in outputs.items() if name in cotangents and x.requires_grad]
    found: Sequence[Tensor | None] = [None] * len(chosen)
    if chosen and ends:
        upstream = [cotangents[name].to(outputs[name].dtype) for name in ends]
        found = torch.autograd.grad(
            [outputs[name] for name in ends], list(chosen.values()), upstream, allow_unused=True
        )
    gradients = {
        name: torch.zeros_like(x) if grad is None else grad
        for (name, x), grad in zip(chosen.items(), found, strict=True)
    }
    return {name: x.detach() for name, x in outputs.items()} | gradients


def _cotangents(case: Case, inputs: Inputs, outputs: Sequence[Tensor]) -> dict[str, Tensor]:
    """Random upstream gradients of the result and, if the loss depends on it, of the end state, in their dtypes."""
    named = dict(zip(OUTPUTS, outputs, strict=False))
    if "e" not in case.gradients:
        named = {"result": named["result"]}
    dtype = getattr(torch, case.dtype)
    cotangents = {}
    for name, output in named.items():
        output_dtype = dtype if name == "result" or dtype == torch.float64 else torch.float32
        values = torch.randn(output.shape, generator=inputs.random).to(output_dtype)
        if name == "scalars":
            # the count has no gradient, nor does a sum that the variant does not use or that is empty
            values[..., 0] = 0
            values[..., 1] *= case.variant.get("competition", "softmax") == "softmax"
            values[..., 2] *= case.variant.get("allocation", "sigmoid") == "softmax"
            values = torch.where(output.isfinite().cpu(), values, 0)
        cotangents[name], buffer = guarded_copy(values, case.grad_layout, output.device, 0)
        inputs.buffers.append(buffer)
    return cotangents


def _comparable(case: Case, name: str, value: Tensor, plain: Tensor, truth: Tensor) -> Iterator[Tensor]:
    """The three tensors in float64, 0 for sums that the variant does not use and values that overflow the dtype."""
    largest = torch.finfo(value.dtype).max
    value, plain, truth = value.double(), plain.double(), truth.double()
    if name.endswith("scalars"):
        unused = [
            name.startswith("d_"),
            case.variant.get("competition", "softmax") != "softmax",
            case.variant.get("allocation", "sigmoid") != "softmax",
        ]
        left_out = torch.tensor(unused, device=value.device).expand_as(truth)
        # both are the logarithm of an empty sum
        left_out = left_out | ((truth == -torch.inf) & (value == -torch.inf))
    else:
        left_out = truth.abs() > largest
    return (x.masked_fill(left_out, 0) for x in (value, plain, truth))


def _mask(kind: str, batch: int, length: int, random: torch.Generator) -> Tensor:
    if kind == "random":
        return torch.rand(batch, length, generator=random) < 0.7
    if kind == "rows":
        return (torch.rand(batch, 1, generator=random) < 0.5).repeat(1, length)
    kept = (torch.rand(batch, 1, generator=random) * (length + 1)).long()
    token = torch.arange(length)
    return token < kept if kind == "prefix" else token >= length - kept


def _same_bits(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[one.dtype.itemsize]
    return torch.equal(one.contiguous().view(integer), other.contiguous().view(integer))


def _scale(case: Case) -> float:
    return 1.0 if case.scale is None else case.scale


def _variant(case: Case) -> FlowVariant:
    return FlowVariant(**case.variant)
