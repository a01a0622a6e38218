"""The rivals that attend by blocks: each equals its pattern written out as a dense matrix, and keeps what it claims."""

from __future__ import annotations

import pytest
import torch
from helpers import random_inputs, relative_error, with_gradients
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from flowformer import baselines, nn
from flowformer.baselines.bigbird import BigBirdAttention
from flowformer.baselines.local import LocalAttention
from flowformer.baselines.longformer import LongformerAttention
from flowformer.baselines.reformer import ReformerAttention
from flowformer.baselines.sinkhorn import SinkhornAttention
from flowformer.baselines.sparse import SparseAttention

HEADS, DIM, LONGEST = 3, 4, 64


def softmax(q, k, v, seen):
    """The dense formula; a query that sees nothing gives 0."""
    logits = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~seen, -torch.inf)
    return torch.nan_to_num(logits.softmax(-1), 0.0) @ v


def pairs(length, sees):
    return torch.tensor([[bool(sees(i, j)) for j in range(length)] for i in range(length)]).reshape(length, length)


def dense_local(attention, q, k, v, past, sources):
    seen = pairs(q.shape[2], lambda i, j: i // attention.window == j // attention.window)
    return softmax(q, k, v, seen & past & sources)


def dense_sparse(attention, q, k, v, past, sources):
    stride, summary = attention.stride, attention.summary
    if attention.pattern == "strided":
        seen = pairs(q.shape[2], lambda i, j: abs(i - j) < stride or (i - j) % stride == 0)
    else:
        seen = pairs(q.shape[2], lambda i, j: i // stride == j // stride or j % stride >= stride - summary)
    return softmax(q, k, v, seen & past & sources)


def dense_longformer(attention, q, k, v, past, sources):
    half, count = attention.window / 2, attention.global_tokens
    seen = pairs(q.shape[2], lambda i, j: abs(i - j) <= half or i < count or j < count)
    return softmax(q, k, v, seen & past & sources)


def random_blocks(attention, head, block, blocks):
    """Draws without replacement from what the block does not see anyway."""
    others = [b for b in range(1, blocks - 1) if abs(b - block) > attention.window // 2]
    draws = attention.draws[head, block].tolist()
    return [others.pop(draw % len(others)) for draw in draws if others]


def dense_bigbird(attention, q, k, v, past, sources):
    length, size = q.shape[2], attention.block
    blocks = -(-length // size)
    seen = torch.zeros(HEADS, length, length, dtype=torch.bool)
    for head in range(HEADS):
        for block in range(blocks):
            near = {b for b in range(blocks) if abs(b - block) <= attention.window // 2}
            near |= {0, blocks - 1, *random_blocks(attention, head, block, blocks)}
            if block in (0, blocks - 1):
                near = set(range(blocks))
            for other in near:
                seen[head, block * size : (block + 1) * size, other * size : (other + 1) * size] = True
    return softmax(q, k, v, seen & past & sources)


def dense_sinkhorn(attention, q, k, v, past, sources):
    batch, _, length, _ = q.shape
    size = attention.block
    blocks = -(-length // size)
    sources = sources.expand(batch, 1, length, length)[:, 0, 0]
    k, v = (x * sources[:, None, :, None] for x in (k, v))
    rows = []
    for b in range(batch):
        for h in range(HEADS):
            described = torch.stack([block.sum(0) for block in k[b, h].split(size)])
            sort = torch.exp(
                (described @ attention.hidden[h]).clamp(min=0) @ attention.scores[h][:, :blocks] / attention.temperature
            )
            for _ in range(attention.iterations):
                sort = sort / sort.sum(1, keepdim=True)
                sort = sort / sort.sum(0, keepdim=True)
            for t in range(blocks):
                own = slice(t * size, min((t + 1) * size, length))
                keys, values, there = [k[b, h, own]], [v[b, h, own]], [sources[b, own]]
                for place in range(size):
                    members = [s for s in range(blocks) if s * size + place < length]
                    if not members:
                        continue
                    at = [s * size + place for s in members]
                    keys.append(sort[t, members][None] @ k[b, h, at])
                    values.append(sort[t, members][None] @ v[b, h, at])
                    there.append(sources[b, at].any()[None])
                rows.append(softmax(q[b, h, own], torch.cat(keys), torch.cat(values), torch.cat(there)))
    return torch.cat(rows).reshape(batch, HEADS, length, -1)


def reformer_pairs(attention, shared, is_causal):
    """Which pairs of tokens of one head, (N, D), meet in any round, for that head's directions (R, F, D)."""

    def meets(directions):
        scores = shared @ directions.mT
        bucket = torch.cat([scores, -scores], -1).argmax(-1).tolist()
        order = sorted(range(len(bucket)), key=lambda i: (bucket[i], i))
        place = {token: at for at, token in enumerate(order)}

        def sees(i, j):
            if is_causal:
                near = 0 <= place[i] - place[j] <= attention.chunk
            else:
                near = place[i] // attention.chunk - place[j] // attention.chunk in (0, 1)
            return bucket[i] == bucket[j] and near

        return pairs(len(bucket), sees)

    return lambda directions: torch.stack([meets(d) for d in directions]).any(0)


def dense_reformer(attention, q, k, v, past, sources):
    shared = q
    length = q.shape[2]
    is_causal = length > 1 and not past[0, 1]
    directions = attention.directions.vectors.unflatten(0, (HEADS, attention.rounds))
    seen = torch.stack(
        [
            torch.stack([reformer_pairs(attention, shared[b, h], is_causal)(directions[h]) for h in range(HEADS)])
            for b in range(q.shape[0])
        ]
    )
    seen = seen & past & sources
    # oneself only where there is nobody else
    itself = torch.eye(length, dtype=torch.bool)
    seen = torch.where((seen & ~itself).any(-1, keepdim=True), seen & ~itself, seen)
    return softmax(shared, shared / shared.norm(dim=-1, keepdim=True), v, seen)


CASES = {
    "local": (LocalAttention, {"window": 4}, dense_local),
    "sparse, fixed": (SparseAttention, {"stride": 4, "summary": 2}, dense_sparse),
    "sparse, strided": (SparseAttention, {"stride": 4, "pattern": "strided"}, dense_sparse),
    "longformer": (LongformerAttention, {"window": 4}, dense_longformer),
    "longformer, no global token": (LongformerAttention, {"window": 6, "global_tokens": 0}, dense_longformer),
    "longformer, many global tokens": (LongformerAttention, {"window": 2, "global_tokens": 5}, dense_longformer),
    "bigbird": (BigBirdAttention, {"block": 2}, dense_bigbird),
    "bigbird, wide": (BigBirdAttention, {"block": 3, "window": 5, "random": 1}, dense_bigbird),
    "sinkhorn": (SinkhornAttention, {"block": 4}, dense_sinkhorn),
    "reformer": (ReformerAttention, {"chunk": 4, "buckets": 6}, dense_reformer),
    "reformer, one round": (ReformerAttention, {"chunk": 3, "rounds": 1, "buckets": 2}, dense_reformer),
}


def build(case, init=0, **options):
    mechanism, defaults, _ = CASES[case]
    torch.manual_seed(init)
    shape = {"num_heads": HEADS, "head_dim": DIM, "max_length": LONGEST}
    return mechanism(**{**shape, **defaults, **options}).double().eval()


def dense(case, inputs, is_causal, key_mask=None):
    length = inputs[0].shape[2]
    past = torch.ones(length, length, dtype=torch.bool)
    sources = torch.ones(1, 1, 1, 1, dtype=torch.bool) if key_mask is None else key_mask[:, None, None, :]
    return CASES[case][2](build(case), *inputs, past.tril() if is_causal else past, sources)


def directions_of(case):
    return [False, True] if build(case).causal else [False]


BOTH_WAYS = [
    pytest.param(case, is_causal, id=f"{case}, {'causal' if is_causal else 'bidirectional'}")
    for case in CASES
    for is_causal in directions_of(case)
]


@pytest.mark.parametrize("length", [1, 2, 8, 13, 30])
@pytest.mark.parametrize(("case", "is_causal"), BOTH_WAYS)
def test_equals_the_dense_formula(case, is_causal, length):
    inputs = random_inputs(heads=HEADS, dim=DIM, sinks=length, value_dim=5)
    ours = with_gradients(lambda *x: build(case)(*x, is_causal=is_causal), inputs)
    truth = with_gradients(lambda *x: dense(case, x, is_causal), inputs)
    for value, expected in zip(ours, truth, strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("case", "is_causal"), BOTH_WAYS)
def test_some_sources_masked(case, is_causal):
    inputs = random_inputs(heads=HEADS, dim=DIM, sinks=13)
    key_mask = torch.rand(2, 13, generator=torch.Generator().manual_seed(0)) < 0.6
    # a masked source says nothing, not even through the vector that Reformer makes of query and key
    inputs = [x.masked_fill(~key_mask[:, None, :, None] & (n > 0), 0) for n, x in enumerate(inputs)]
    ours = with_gradients(lambda *x: build(case)(*x, is_causal=is_causal, key_mask=key_mask), inputs)
    truth = with_gradients(lambda *x: dense(case, x, is_causal, key_mask), inputs)
    torch.testing.assert_close(ours[0], truth[0], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(ours[1], truth[1], rtol=1e-10, atol=1e-12)
    for value, expected in zip(ours[2:], truth[2:], strict=True):
        kept = key_mask[:, None, :, None].expand_as(value)
        torch.testing.assert_close(value[kept], expected[kept], rtol=1e-10, atol=1e-12)
        assert (value[~kept] == 0).all()


@pytest.mark.parametrize(("case", "is_causal"), BOTH_WAYS)
def test_padded_is_alone(case, is_causal):
    inputs = random_inputs(batch=4, heads=HEADS, dim=DIM, sinks=23)
    mask = torch.ones(4, 23, dtype=torch.bool)
    mask[0, 14:] = mask[1, :9] = mask[2, 3:11] = mask[3] = False  # right, left, inside, all
    padding = ~mask[:, None, :, None]
    padded = [x.masked_fill(padding, torch.nan) for x in inputs]
    ours = with_gradients(
        lambda *x: build(case)(*x, is_causal=is_causal, query_mask=mask, key_mask=mask), padded, grad_seed=1
    )
    cotangent = torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert all((x[3] == 0).all() for x in ours)
    for row in range(3):
        alone = [x[row : row + 1, :, mask[row]].clone().requires_grad_() for x in inputs]
        result = build(case)(*alone, is_causal=is_causal)
        gradients = torch.autograd.grad(result, alone, cotangent[row : row + 1, :, mask[row]], materialize_grads=True)
        for value, expected in zip(ours, (result, *gradients), strict=True):
            torch.testing.assert_close(value[row, :, mask[row]], expected[0], rtol=1e-10, atol=1e-12)
            assert (value[row, :, ~mask[row]] == 0).all()


@pytest.mark.parametrize(("case", "is_causal"), BOTH_WAYS)
def test_no_source_gives_zero(case, is_causal):
    inputs = [x.requires_grad_() for x in random_inputs(heads=HEADS, dim=DIM)]
    key_mask = torch.zeros(2, 9, dtype=torch.bool)
    key_mask[0, 3] = True
    result = build(case)(*inputs, is_causal=is_causal, key_mask=key_mask)
    assert (result[1] == 0).all()
    assert (result[0] != 0).any()
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(result.sum(), inputs, materialize_grads=True))


@pytest.mark.parametrize("case", [case for case in CASES if build(case).causal])
def test_causal_does_not_leak(case):
    inputs = random_inputs(heads=HEADS, dim=DIM, sinks=41)
    for cut in (1, 18, 40):
        changed = [torch.cat([x[:, :, :cut], 3 * torch.randn_like(x[:, :, cut:])], 2) for x in inputs]
        ours, theirs = (build(case)(*x, is_causal=True)[:, :, :cut] for x in (inputs, changed))
        # the future moves the tokens of Reformer within the chunks: other sums of the same numbers
        tolerance = 1e-14 if "reformer" in case else 0
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("case", CASES)
def test_what_is_not_claimed_is_an_error(case):
    attention = build(case)
    q, k, v = random_inputs(heads=HEADS, dim=DIM, sinks=5, sources=7)
    with pytest.raises(NotImplementedError, match=f"{attention.name} attention does not support: cross"):
        attention(q, k, v)
    if not attention.causal:
        with pytest.raises(NotImplementedError, match=f"{attention.name} attention does not support: causal"):
            attention(k, k, v, is_causal=True)


EXACT = {
    "local": {"window": 20},
    "sparse, fixed": {"stride": 4, "summary": 4},
    "sparse, strided": {"stride": 1},
    "longformer": {"window": 40},
    "longformer, many global tokens": {"window": 2, "global_tokens": 20},
    "bigbird": {"window": 19},
    "bigbird, wide": {"window": 1, "random": 5},
    "sinkhorn": {"block": 20},
}


@pytest.mark.parametrize("case", EXACT)
def test_becomes_softmax_attention(case):
    inputs = random_inputs(heads=HEADS, dim=DIM, sinks=20)
    truth = baselines.build("softmax", num_heads=HEADS, head_dim=DIM)(*inputs)
    assert relative_error(build(case, **EXACT[case])(*inputs), truth) < 1e-12
    assert relative_error(build(case)(*inputs), truth) > 1e-2


def test_many_rounds_of_hashing_become_softmax_attention():
    query, _, value = random_inputs(heads=HEADS, dim=DIM, sinks=20)
    query = query + 2  # all in one direction: no pair is far apart, and some round brings it together
    result = build("reformer", rounds=64, buckets=2, chunk=20)(query, query, value)
    others = ~torch.eye(20, dtype=torch.bool)
    truth = softmax(query, query / query.norm(dim=-1, keepdim=True), value, others)
    assert relative_error(result, truth) < 1e-12


def test_queries_and_keys_of_reformer_are_one():
    query, key, value = random_inputs(heads=HEADS, dim=DIM, sinks=20)
    attention = build("reformer")
    assert torch.equal(attention(query, key, value), attention(query, query, value))


def test_the_sort_is_doubly_stochastic():
    attention = build("sinkhorn", iterations=100)
    key = random_inputs(heads=HEADS, dim=DIM, sinks=24)[1].unflatten(2, (6, 4))
    lengths = torch.tensor([24, 10])
    sort = attention.sort(key, lengths)
    ones = torch.ones_like(sort[..., 0])
    torch.testing.assert_close(sort.sum(-1), ones, rtol=0, atol=1e-6)
    torch.testing.assert_close(sort.sum(-2), ones, rtol=0, atol=1e-6)
    assert (sort[1, :, :3, 3:] == 0).all()
    assert torch.equal(sort[1, 0, 3:, 3:], torch.eye(3, dtype=torch.float64))


def test_a_certain_sort_puts_one_block_beside_another():
    attention = build("sinkhorn")
    beside = [2, 3, 1, 0]
    with torch.no_grad():
        attention.hidden.copy_(torch.eye(4))
        attention.scores[..., :4] = torch.eye(4)[beside]
    query, key, value = random_inputs(heads=HEADS, dim=4, sinks=16)
    key = 100 * torch.eye(4, dtype=torch.float64).repeat_interleave(4, 0).expand_as(key)
    query = query / 100
    seen = pairs(16, lambda i, j: j // 4 in (i // 4, beside[i // 4]))
    assert relative_error(attention(query, key, value), softmax(query, key, value, seen)) < 1e-12


def test_the_sorter_learns_and_is_noisy_only_in_training():
    inputs = random_inputs(heads=HEADS, dim=DIM, sinks=24)
    attention = build("sinkhorn")
    attention(*inputs).square().sum().backward()
    assert all(p.grad.norm() > 1e-6 for p in attention.parameters())
    assert torch.equal(attention(*inputs), attention(*inputs))
    attention.train()
    assert not torch.equal(attention(*inputs), attention(*inputs))
    sort = attention.sort(inputs[1].unflatten(2, (6, 4)), torch.tensor([24, 24]))
    torch.testing.assert_close(sort.sum(-2), torch.ones_like(sort[..., 0]))


def test_blocks_of_bigbird_are_distinct():
    attention = build("bigbird", window=3, random=3)
    blocks, last = torch.arange(20), torch.tensor([19, 11])[:, None, None]
    seen, counts = attention.blocks_seen(blocks, last)
    for row, end in enumerate((19, 11)):
        for block in range(1, end):
            for head in range(HEADS):
                kept = seen[row, head, block][counts[row, head, block]].tolist()
                assert len(kept) == len(set(kept)) == 8 - (block == 1) - (block == end - 1)
                assert set(kept) >= {0, block - 1, block, block + 1, end}
                assert max(kept) == end
    draws = [build("bigbird", init=seed).blocks_seen(blocks, last)[0] for seed in range(40)]
    drawn = torch.stack(draws)[:, 0, :, 9, 5:].flatten().bincount(minlength=20)
    # block 9 sees 0, 8, 9, 10 and 19: the 15 others are drawn, each 24 times on average
    assert (drawn[[0, 8, 9, 10, 19]] == 0).all()
    assert drawn.sum() == 40 * HEADS * 3
    assert drawn[[*range(1, 8), *range(11, 19)]].min() >= 8


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that any operation gave, views of few numbers aside."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(x, torch.Tensor):
                self.numel = max(self.numel, min(x.numel(), x.untyped_storage().nbytes() // x.element_size()))
        return result


def largest(name, length, **options):
    attention = baselines.build(name, num_heads=1, head_dim=4, max_length=2048, **options)
    inputs = [x.requires_grad_() for x in random_inputs(batch=1, heads=1, sinks=length, dtype=torch.float32)]
    mask = torch.ones(1, length, dtype=torch.bool)
    with sdpa_kernel(SDPBackend.MATH), Largest() as mode:
        attention(*inputs, query_mask=mask, key_mask=mask).sum().backward()
    return mode.numel


@pytest.mark.parametrize("pattern", ["fixed", "strided"])
def test_memory_of_sparse_attention_grows_with_the_length_times_its_root(pattern):
    short, long = (largest("sparse", n * n, pattern=pattern, stride=n, summary=4) for n in (16, 32))
    assert long <= 8.5 * short


@pytest.mark.parametrize("case", CASES)
def test_state_dict_round_trip(case):
    inputs = random_inputs(heads=HEADS, dim=DIM, sinks=30)
    saved = build(case)
    other = build(case, init=9)
    truth = saved(*inputs)
    assert not saved.state_dict() or not torch.equal(other(*inputs), truth)
    other.load_state_dict(saved.state_dict())
    assert torch.equal(other(*inputs), truth)


def test_hashes_repeat_and_are_redrawn():
    inputs = random_inputs(heads=HEADS, dim=DIM, sinks=30)
    ours, theirs = build("reformer"), build("reformer")
    first = ours(*inputs)
    assert torch.equal(first, theirs(*inputs))
    ours.redraw()
    assert not torch.equal(ours(*inputs), first)
    theirs.redraw()
    assert torch.equal(ours(*inputs), theirs(*inputs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", [case for case in CASES if "," not in case])
def test_low_precision(case, dtype):
    # what the softmax sees is rounded once, the result once: a few roundings, whatever the length
    inputs = random_inputs(heads=HEADS, dim=DIM, sinks=60, dtype=dtype)
    if "reformer" in case:
        inputs = inputs[0], inputs[0], inputs[2]  # the same hashes at every precision
    result = build(case)(*inputs)
    assert result.dtype == dtype
    assert relative_error(result, build(case)(*(x.double() for x in inputs))) < 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize("case", CASES)
def test_empty(case):
    inputs = [
        torch.zeros(shape, dtype=torch.float64) for shape in ((2, HEADS, 0, DIM), (2, HEADS, 0, DIM), (2, HEADS, 0, 6))
    ]
    assert build(case)(*inputs).shape == (2, HEADS, 0, 6)
    inputs = random_inputs(heads=HEADS, dim=DIM)
    assert build(case)(*(x[:0] for x in inputs)).shape == (0, HEADS, 9, DIM)


@pytest.mark.parametrize("name", sorted({mechanism.name for mechanism, _, _ in CASES.values()}))
def test_takes_the_place_of_flow_attention(name):
    layer = nn.FlowEncoderLayer(24, 4, attention=name, max_length=256)
    x = torch.randn(2, 150, 24, requires_grad=True)
    layer(x, torch.ones(2, 150, dtype=torch.bool)).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())


@pytest.mark.parametrize("name", ["bigbird", "sinkhorn"])
def test_lengths_beyond_the_maximum(name):
    attention = baselines.build(name, num_heads=1, head_dim=4, max_length=8)
    x = torch.zeros(1, 1, 9, 4)
    with pytest.raises(ValueError, match=f"{name} attention was built for at most 8 tokens, got 9"):
        attention(x, x, x)


@pytest.mark.parametrize("name", ["bigbird", "reformer", "sinkhorn"])
def test_maximum_is_asked_for(name):
    with pytest.raises(ValueError, match=f"{name} attention .*max_length, got None"):
        baselines.build(name, num_heads=1, head_dim=4)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("local", {"window": 0}, "window must be a positive whole number, got 0"),
        ("sparse", {"pattern": "random"}, "unknown pattern 'random' of sparse attention; accepted: 'fixed', 'strided'"),
        ("sparse", {"stride": 0}, "stride must be a positive whole number, got 0"),
        ("sparse", {"stride": 4, "summary": 5}, "a block of stride 4 has no 5 summary tokens"),
        ("longformer", {"window": 3}, "needs an even window, half of it on each side, got 3"),
        ("longformer", {"global_tokens": -1}, "needs 0 or more global_tokens, got -1"),
        ("bigbird", {"window": 2}, "needs an odd window, centred on the block of the queries, got 2"),
        ("bigbird", {"random": -1}, "needs 0 or more random blocks, got -1"),
        ("sinkhorn", {"iterations": 0}, "iterations must be a positive whole number, got 0"),
        ("sinkhorn", {"temperature": 0.0}, "needs a positive temperature, got 0.0"),
        ("reformer", {"rounds": 0}, "rounds must be a positive whole number, got 0"),
        ("reformer", {"buckets": 3}, "needs an even number of buckets, 2 or more, got 3"),
    ],
)
def test_options_that_make_no_sense(name, options, message):
    with pytest.raises(ValueError, match=message):
        baselines.build(name, num_heads=1, head_dim=4, max_length=8, **options)
