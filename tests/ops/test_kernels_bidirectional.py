"""The Triton kernels of bidirectional attention against the oracle: on a GPU where there is one, else interpreted."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    # read when the kernels are imported
    os.environ["TRITON_INTERPRET"] = "1"

from helpers import CAUSAL_KERNEL_VARIANTS, VARIANTS, oracle, random_inputs, relative_error, with_gradients

from flowformer import FlowVariant
from flowformer.ops import bounds as packed_bounds
from flowformer.ops.common import Options
from flowformer.ops.torch import op as torch_op
from flowformer.ops.triton.bidirectional import cut, forward, launch_table, plan
from flowformer.ops.triton.bidirectional import op as kernels
from flowformer.ops.triton.bidirectional.plan import segment_count
from flowformer.ops.triton.plan import cached_plan, flat_options

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DEFAULT = FlowVariant()
SUPPORTED = CAUSAL_KERNEL_VARIANTS
needs_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
HALVES = [torch.bfloat16, torch.float16]
ALL = [torch.float32, *HALVES]


CUT, WHOLE = 12, 10**6
# a head that is one segment finishes its record where it is made
either = pytest.mark.parametrize("segments", [CUT, WHOLE], indirect=True, ids=["cut", "whole"])
planned = pytest.mark.parametrize("segments", [None], indirect=True, ids=["planned"])


@pytest.fixture(autouse=True)
def segments(request, monkeypatch):
    """Short segments, so that sums over segments are tested with few tokens, unless a test asks for others."""
    size = getattr(request, "param", CUT)
    if size is not None:
        monkeypatch.setattr(plan, "segment_count", lambda records, longest, *_: max(1, longest // size))
    cached_plan.cache_clear()
    yield
    cached_plan.cache_clear()


@pytest.mark.parametrize(
    ("records", "longest", "dim", "expected"),
    [
        (1, 100, 64, 1),  # too short to be cut
        (16, 2048, 64, 16),
        (16, 2**18, 64, 16),  # all programs run at once
        (256, 4096, 64, 1),  # already
        (100, 8192, 64, 5),  # two rounds of 250 programs, where one would be of 200
        (300, 4096, 64, 4),
        (300, 1024, 64, 1),
        (16, 16384, 8, 16),  # fewer features need more tokens
    ],
)
def test_segments_leave_few_processors_idle(records, longest, dim, expected):
    assert segment_count(records, longest, dim, slots=264) == expected


def inputs(**options):
    return random_inputs(**{"batch": 1, "heads": 1, "sinks": 33, "dtype": torch.float32, "device": DEVICE} | options)


def run(query, key, value, query_mask=None, key_mask=None, scale=1.0, variant=DEFAULT):
    return kernels.bidirectional(query, key, value, (query_mask, key_mask), Options(scale, variant))


def assert_as_exact(given, query_mask=None, key_mask=None, scale=1.0, variant=DEFAULT):
    """The error is at most 2× (3× for gradients) that of plain PyTorch at the same dtype."""

    def plain(q, k, v):
        return torch_op.bidirectional(q, k, v, (query_mask, key_mask), Options(scale, variant))

    def exact(q, k, v):
        return oracle(q, k, v, query_mask=query_mask, key_mask=key_mask, scale=scale, variant=variant)

    ours = with_gradients(lambda *x: run(*x, query_mask, key_mask, scale, variant), given)
    theirs = with_gradients(plain, given)
    compare(ours, theirs, with_gradients(exact, [x.double() for x in given]))


def compare(ours, theirs, truth):
    for i, (mine, other, true) in enumerate(zip(ours, theirs, truth, strict=True)):
        assert mine.dtype == other.dtype
        assert mine.shape == true.shape
        # what float32 rounds away in the sums is noise to both
        floor = 2e-7
        assert relative_error(mine, true) <= (3 if i else 2) * max(relative_error(other, true), floor), i


@either
@pytest.mark.parametrize("dtype", ALL)
@pytest.mark.parametrize(
    ("dim", "value_dim", "sinks", "sources"),
    [(1, 1, 5, 5), (3, 5, 40, 65), (8, 8, 65, 40), (16, 64, 130, 130), (80, 24, 33, 33)],
)
def test_error_is_that_of_plain_pytorch(dim, value_dim, sinks, sources, dtype):
    assert_as_exact(inputs(dim=dim, value_dim=value_dim, sinks=sinks, sources=sources, dtype=dtype))


@either
@pytest.mark.parametrize("name", SUPPORTED)
def test_variants(name):
    assert_as_exact(inputs(dim=8), scale=1.3, variant=SUPPORTED[name])


@pytest.mark.parametrize("name", ["tight clamp", "elu+1", "relu"])
def test_variants_in_half_precision(name):
    assert_as_exact(inputs(dim=16, heads=1, dtype=torch.bfloat16), variant=SUPPORTED[name])


@either
@pytest.mark.parametrize(
    ("precision", "size"),
    [(precision, size) for precision, table in launch_table.TABLES.items() for size in table if precision != "rounded"],
)
def test_every_launch_configuration(precision, size):
    assert launch_table.tunings(size, size, precision) is launch_table.TABLES[precision][size]
    dtype = {"bf16": torch.bfloat16, "bf16x3": torch.float16}.get(precision, torch.float32)
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    try:
        assert_as_exact(inputs(dim=size, sinks=25, dtype=dtype))
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False


@either
def test_more_values_than_one_program_holds():
    assert_as_exact(inputs(dim=200, value_dim=130, sinks=25, sources=13))


@either
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_padded_is_alone(side, dtype):
    lengths_q, lengths_k = (5, 70), (40, 9)
    query, key, value = inputs(batch=2, sinks=70, sources=40, dim=5, dtype=dtype)
    cut = [slice(-n, None) if side == "left" else slice(n) for n in (*lengths_q, *lengths_k)]
    query_mask, key_mask = (torch.zeros(2, x.shape[2], dtype=torch.bool, device=DEVICE) for x in (query, key))
    for row in range(2):
        query_mask[row, cut[row]] = True
        key_mask[row, cut[2 + row]] = True
    padded = [
        x.masked_fill(~mask[:, None, :, None], torch.nan)
        for x, mask in ((query, query_mask), (key, key_mask), (value, key_mask))
    ]
    results = with_gradients(lambda *x: run(*x, query_mask, key_mask), padded)
    generator = torch.Generator().manual_seed(1)
    cotangent = torch.randn(results[0].shape, generator=generator, dtype=torch.float64).to(DEVICE, dtype)
    masks = query_mask, query_mask, key_mask, key_mask
    for row in range(2):
        q, k, v = (x[row : row + 1, :, part].clone().requires_grad_() for x, part in
                   ((query, cut[row]), (key, cut[2 + row]), (value, cut[2 + row])))  # fmt: skip
        out = run(q, k, v)
        alone = [out, *torch.autograd.grad(out, (q, k, v), cotangent[row : row + 1, :, cut[row]])]
        for whole, part, mask in zip(results, alone, masks, strict=True):
            assert torch.equal(whole[row, :, ~mask[row]], torch.zeros_like(whole[row, :, ~mask[row]]))
            # where the segments are cut differs, and so does the rounding
            tolerance = 1e-5 if dtype == torch.float32 else 1e-2
            assert relative_error(whole[row, :, mask[row]], part[0]) < tolerance


@either
def test_masks_with_holes():
    given = inputs(batch=2, sinks=70, sources=50, dim=5)
    generator = torch.Generator().manual_seed(3)
    query_mask, key_mask = (torch.rand(2, n, generator=generator).lt(0.6).to(DEVICE) for n in (70, 50))
    assert_as_exact(given, query_mask, key_mask)


@either
def test_no_source_gives_zero_and_no_gradient():
    query, key, value = inputs(batch=2, sinks=9, dim=4)
    key_mask = torch.ones(2, 9, dtype=torch.bool, device=DEVICE)
    key_mask[1] = False
    for variant in (FlowVariant(), FlowVariant(rescale=False), FlowVariant(competition="none")):
        result, *grads = with_gradients(lambda *x, v=variant: run(*x, None, key_mask, variant=v), (query, key, value))
        assert result[0].abs().min() > 0
        assert torch.equal(result[1], torch.zeros_like(result[1]))
        assert all(torch.equal(x[1], torch.zeros_like(x[1])) for x in grads)
    query_mask = torch.zeros_like(key_mask)
    for out in with_gradients(lambda *x: run(*x, query_mask, key_mask), (query, key, value)):
        assert torch.equal(out, torch.zeros_like(out))


@pytest.mark.parametrize(
    "shape",
    [{"batch": 0}, {"sinks": 0}, {"sources": 0}, {"heads": 0, "key_heads": 0}, {"value_dim": 0}],
)
def test_empty(shape):
    sizes = {"batch": 1, "heads": 2, "key_heads": 2, "sinks": 5, "sources": 6, "value_dim": 3} | shape
    make = [(sizes["heads"], sizes["sinks"], 4), (sizes["key_heads"], sizes["sources"], 4)]
    make.append((sizes["key_heads"], sizes["sources"], sizes["value_dim"]))
    given = [torch.randn(sizes["batch"], *each, device=DEVICE) for each in make]
    for x in with_gradients(run, given):
        assert torch.equal(x, torch.zeros_like(x))


@either
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shared_heads_are_repeated_heads(dtype):
    query, key, value = inputs(heads=4, key_heads=2, sinks=20, sources=17, dim=5, value_dim=3, dtype=dtype)
    assert_as_exact((query, key, value))
    repeated = [x.repeat_interleave(2, 1) for x in (key, value)]
    assert torch.equal(run(query, key, value), run(query, *repeated))


@either
def test_packed_is_the_loop():
    bounds_q, bounds_k = [0, 40, 40, 41, 110], [0, 3, 50, 50, 90]
    query, key, value = (
        x[0].transpose(0, 1) for x in inputs(heads=2, key_heads=1, sinks=120, sources=95, dim=6, value_dim=3)
    )
    lengths = *(torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in (bounds_q, bounds_k)), 69, 47

    def loop(q, k, v):
        parts = []
        for i in range(4):
            sinks, sources = slice(bounds_q[i], bounds_q[i + 1]), slice(bounds_k[i], bounds_k[i + 1])
            part = oracle(*(x[s].transpose(0, 1)[None] for x, s in ((q, sinks), (k, sources), (v, sources))))
            parts.append(part[0].transpose(0, 1))
        return torch.cat([*parts, parts[0].new_zeros(10, 2, 3)])

    given = query, key, value
    ours = with_gradients(lambda *x: kernels.packed(*x, lengths, Options(1.0, DEFAULT)), given)
    torchs = with_gradients(lambda *x: torch_op.packed(*x, lengths, False, Options(1.0, DEFAULT)), given)
    truth = with_gradients(loop, [x.double() for x in given])
    assert torch.equal(ours[0][110:], torch.zeros_like(ours[0][110:]))
    assert torch.equal(ours[0][40:41], torch.zeros_like(ours[0][40:41]))
    compare(ours, torchs, truth)


def test_packed_bounds_beyond_the_tokens_read_nothing_beyond_them(monkeypatch):
    """Inside a CUDA graph nobody can look at the bounds."""
    monkeypatch.setattr(kernels, "check_bounds", lambda *_, **__: None)
    query, key, value = (x[0].transpose(0, 1) for x in inputs(sinks=20, dim=4))
    bounds = torch.tensor([7, -3, 10**6, 2, 2**31 - 1], dtype=torch.int32, device=DEVICE)
    result = kernels.packed(query, key, value, (bounds, bounds, 1, 1), Options(1.0, DEFAULT))
    assert result.shape == query.shape


def test_packed_without_a_sequence_gives_zero():
    given = [x[0].transpose(0, 1) for x in inputs(sinks=5, dim=4)]
    bounds = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    for out in with_gradients(lambda *x: kernels.packed(*x, (bounds, bounds, 0, 0), Options(1.0, DEFAULT)), given):
        assert torch.equal(out, torch.zeros_like(out))


def test_packed_longest_may_be_more_than_the_longest():
    query, key, value = (x[0].transpose(0, 1) for x in inputs(sinks=40, dim=4))
    bounds = torch.tensor([0, 13, 40], device=DEVICE)
    right, high = (
        kernels.packed(query, key, value, (bounds, bounds, longest, longest), Options(1.0, DEFAULT))
        for longest in (27, 100)
    )
    assert relative_error(high, right) < 1e-6


@pytest.mark.parametrize(
    ("bounds", "longest", "message"),
    [
        ([1, 20], 20, "must start at 0"),
        ([0, 12, 11], 20, "must not decrease"),
        ([0, 21], 21, "beyond the 20 tokens"),
        ([0, 20], 19, "a sequence of 20 tokens"),
    ],
)
def test_packed_refuses_bounds_that_make_no_sense(bounds, longest, message):
    given = [x[0].transpose(0, 1) for x in inputs(sinks=20, dim=4)]
    bounds = torch.tensor(bounds, device=DEVICE)
    with pytest.raises(ValueError, match=message):
        kernels.packed(*given, (bounds, bounds, longest, longest), Options(1.0, DEFAULT))


def test_packed_looks_at_bounds_that_replace_deleted_ones():
    """A new tensor may get the id of a deleted one."""
    bounds = torch.tensor([0, 2, 4])
    for _ in range(20):
        packed_bounds.check_bounds(4, 4, (bounds, torch.tensor([0, 2, 4]), 2, 2), False)
        with pytest.raises(ValueError, match="must not decrease"):
            packed_bounds.check_bounds(4, 4, (bounds, torch.tensor([0, 2, 1]), 2, 2), False)


def test_packed_looks_at_bounds_again_if_they_change(monkeypatch):
    looks = []
    found = packed_bounds.starts_and_lengths
    monkeypatch.setattr(packed_bounds, "starts_and_lengths", lambda *args: looks.append(args) or found(*args))
    given = [x[0].transpose(0, 1) for x in inputs(sinks=20, dim=4)]
    bounds = torch.tensor([0, 12, 20], device=DEVICE)
    for _ in range(3):
        kernels.packed(*given, (bounds, bounds, 20, 20), Options(1.0, DEFAULT))
    assert len(looks) == 1
    bounds[1] = 21
    with pytest.raises(ValueError, match="must not decrease"):
        kernels.packed(*given, (bounds, bounds, 20, 20), Options(1.0, DEFAULT))


@pytest.mark.parametrize("feature_map", ["sigmoid", "elu+1"])
def test_many_sinks_for_few_sources_do_not_overflow(feature_map):
    """Ô is n/m = 200 on average, so exp(Ô) is no float32, and turns the rounding of Ô into 200 times as much."""
    given, variant = inputs(sinks=400, sources=2, dim=4), FlowVariant(feature_map=feature_map)
    ours = with_gradients(lambda *x: run(*x, variant=variant), given)
    truth = with_gradients(lambda *x: oracle(*x, variant=variant), [x.double() for x in given])
    for mine, true in zip(ours, truth, strict=True):
        assert relative_error(mine, true) < 200 * 2**-22


@pytest.mark.parametrize("name", ["default", "relu", "elu+1"])
@pytest.mark.parametrize("dtype", ALL)
def test_saturated_inputs(name, dtype):
    for sign in (1, -1):
        query, key, value = inputs(sinks=20, dim=4, dtype=dtype)
        hot = 1e4 * query, sign * 1e4 * key.abs(), value
        variant = VARIANTS[name]
        ours = with_gradients(lambda *x, variant=variant: run(*x, variant=variant), hot)
        theirs = with_gradients(
            lambda *x, variant=variant: torch_op.bidirectional(*x, (None, None), Options(1.0, variant)), hot
        )
        truth = with_gradients(lambda *x, variant=variant: oracle(*x, variant=variant), [x.double() for x in hot])
        # where features are all 0 or all 1, the gradients of queries and keys are the rounding of what they cancel from
        compare(*([each[0], each[3]] for each in (ours, theirs, truth)))
        assert all(x.isfinite().all() for x in ours)


def test_strides_are_taken_as_they_are():
    query, key, value = inputs(batch=1, heads=2, dim=8, sinks=20)
    expected = with_gradients(run, (query, key, value))
    swapped = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (query, key, value)]
    shifted = [torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape) for x in (query, key, value)]
    mixed = torch.cat([query, query], -1)[..., :8], key.transpose(2, 3).contiguous().transpose(2, 3), value
    for given in (swapped, shifted, mixed):
        for mine, other in zip(with_gradients(run, given), expected, strict=True):
            assert torch.equal(mine, other)
    assert run(*swapped).transpose(1, 2).is_contiguous()
    assert run(query, key, value).is_contiguous()


def test_negated_view():
    """Its memory has the opposite sign."""
    query, key, value = random_inputs(dim=1, value_dim=1, dtype=torch.float32, device=DEVICE)
    negated = value.mul(1j).conj().imag
    assert negated.is_neg()
    options = Options(1.0, DEFAULT)
    truth = kernels.bidirectional(query, key, negated.resolve_neg(), (None, None), options)
    assert torch.equal(kernels.bidirectional(query, key, negated, (None, None), options), truth)


def test_gradient_of_a_sum():
    leaves = [x.requires_grad_() for x in inputs(dim=4)]
    expanded = torch.autograd.grad(run(*leaves).sum(), leaves)
    whole = torch.autograd.grad(run(*leaves), leaves, torch.ones_like(leaves[0]))
    assert all(torch.equal(x, y) for x, y in zip(expanded, whole, strict=True))


@either
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bitwise_repeatable(dtype):
    given = inputs(sinks=40, dim=8, heads=2, key_heads=1, dtype=dtype)
    first, second = with_gradients(run, given), with_gradients(run, given)
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


@either
def test_every_number_is_written(monkeypatch):
    """Fresh memory is NaN: what is read before it is written spoils the result."""
    given = inputs(sinks=40, sources=30, dim=5, value_dim=3, heads=2, key_heads=1)
    key_mask = torch.arange(30, device=DEVICE)[None] < 20
    expected = with_gradients(lambda *x: run(*x, None, key_mask), given)
    empty, new_empty, empty_like = torch.empty, torch.Tensor.new_empty, torch.empty_like
    monkeypatch.setattr(torch, "empty", lambda *a, **k: empty(*a, **k).fill_(torch.nan))
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *a, **k: new_empty(*a, **k).fill_(torch.nan))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: empty_like(*a, **k).fill_(torch.nan))
    poisoned = with_gradients(lambda *x: run(*x, None, key_mask), given)
    assert all(torch.equal(x, y) for x, y in zip(poisoned, expected, strict=True))


def test_inference_keeps_nothing():
    query, key, value = inputs(dim=4)
    inputs_and_length = query, key, value, None, None, None, None, None, 33
    options = flat_options(Options(1.0, DEFAULT))
    result, kept = torch.ops.flowformer.triton_bidirectional(*inputs_and_length, False, *options)
    assert kept.numel() == 0
    again, _ = torch.ops.flowformer.triton_bidirectional(*inputs_and_length, True, *options)
    assert torch.equal(result, again)


def test_operators_are_well_formed():
    given = tuple(x.requires_grad_(False) for x in inputs(sinks=9, dim=4))
    options = flat_options(Options(1.0, DEFAULT))
    args = *given, None, None, None, None, None, 9, True, *options
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.flowformer.triton_bidirectional.default, args, test_utils=checks)
    result, kept = torch.ops.flowformer.triton_bidirectional(*args)
    args = result, *given, None, None, None, None, None, kept, 9, *options
    torch.library.opcheck(torch.ops.flowformer.triton_bidirectional_backward.default, args, test_utils=checks)


class OneRank:
    """The exchange of a rank that has the whole sequence."""

    def total(self, x):
        return x

    def softmax_total(self, x, logs, weighted):
        return x, logs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_with_exchanges_between_them_are_those_without(dtype):
    """`test_context.py` has several ranks, but on a CPU only."""
    given = [x.to(dtype) for x in inputs(batch=2, heads=4, key_heads=2, sinks=70, dim=16)]
    mask = torch.rand(2, 70, device=DEVICE) > 0.3

    def cut_call(query, key, value):
        return cut.attend((query, key, value), (mask, mask), Options(0.7, FlowVariant()), OneRank())

    def whole_call(query, key, value):
        return kernels.bidirectional(query, key, value, (mask, mask), Options(0.7, FlowVariant()))

    for ours, whole in zip(with_gradients(cut_call, given), with_gradients(whole_call, given), strict=True):
        torch.testing.assert_close(ours, whole, rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=1e-5)


def test_compiles_as_one_graph():
    given = inputs(sinks=9, dim=4)
    compiled = torch.compile(run, fullgraph=True, backend="inductor" if DEVICE == "cuda" else "aot_eager")
    for mine, other in zip(with_gradients(compiled, given), with_gradients(run, given), strict=True):
        assert torch.equal(mine, other)


@planned
@pytest.mark.gpu
@needs_gpu
def test_a_million_tokens():
    query, key, value = (torch.randn(1, 16, 2**20, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    base = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    leaves = [x.requires_grad_() for x in (query, key, value)]
    result = run(*leaves)
    grads = torch.autograd.grad(result, leaves, torch.ones_like(result))
    # the result, its gradient, the three gradients of the inputs, and at most one more
    assert torch.cuda.max_memory_allocated() - base < 6 * query.nbytes
    sums = [x[:, :1, -1000:].double() for x in (result, *grads)]
    del result, grads
    one = [x[:, :1].detach().double() for x in leaves]
    del leaves, query, key, value
    truth = with_gradients(lambda *x: torch_op.bidirectional(*x, (None, None), Options(1.0, DEFAULT)), one)[0]
    assert relative_error(sums[0], truth[:, :, -1000:]) < 4e-3
    assert all(x.isfinite().all() for x in sums)


@planned
@pytest.mark.gpu
@needs_gpu
def test_more_than_two_to_the_31_elements():
    query = torch.randn(5, 16, 2**19, 64, device="cuda", dtype=torch.bfloat16)
    assert query.numel() > 2**31
    result = run(query, query, query)
    alone = run(*(query[-1:, -1:],) * 3)
    assert relative_error(result[-1:, -1:, -4096:], alone[:, :, -4096:]) < 4e-3


@pytest.mark.gpu
@needs_gpu
def test_cuda_graph_and_stream():
    given = inputs(sinks=1000, dim=64, dtype=torch.bfloat16)
    leaves = [x.requires_grad_() for x in given]
    expected = with_gradients(run, given)[0]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        assert torch.equal(run(*given), expected)
        run(*leaves).sum().backward()
        graph = torch.cuda.CUDAGraph()
        for x in leaves:
            x.grad = None
        with torch.cuda.graph(graph, stream=stream):
            result = run(*leaves)
            result.sum().backward()
    result.detach().zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(result, expected)
    grads = torch.autograd.grad(run(*leaves).sum(), leaves)
    assert all(torch.equal(x.grad, grad) for x, grad in zip(leaves, grads, strict=True))


@planned
@pytest.mark.gpu
@needs_gpu
def test_lengths_compile_once():
    given = inputs(sinks=100, dim=64, dtype=torch.bfloat16)
    run(*given)
    compiled = len(forward.sums_kernel.device_caches[0][0])
    for sinks in (101, 999, 4096, 5000):
        run(*inputs(sinks=sinks, dim=64, dtype=torch.bfloat16))
    assert len(forward.sums_kernel.device_caches[0][0]) == compiled
