"""The rivals that attend by blocks: each equals its pattern written out as a dense matrix."""

from __future__ import annotations

import pytest
import torch
from attentions import DIM, FORMS, HEADS, build
from helpers import random_inputs, relative_error, with_gradients
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from flowformer import baselines


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


DENSE = {
    "local": dense_local,
    "sparse": dense_sparse,
    "longformer": dense_longformer,
    "bigbird": dense_bigbird,
    "sinkhorn": dense_sinkhorn,
    "reformer": dense_reformer,
}
BOTH_WAYS = [form for form in FORMS if form.values[0].partition(",")[0] in DENSE]


def dense(case, inputs, is_causal, key_mask=None):
    length = inputs[0].shape[2]
    past = torch.ones(length, length, dtype=torch.bool)
    sources = torch.ones(1, 1, 1, 1, dtype=torch.bool) if key_mask is None else key_mask[:, None, None, :]
    return DENSE[case.partition(",")[0]](build(case), *inputs, past.tril() if is_causal else past, sources)


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


EXACT = {
    "local": {"window": 20},
    "sparse": {"stride": 4, "summary": 4},
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


def test_hashes_repeat_and_are_redrawn():
    inputs = random_inputs(heads=HEADS, dim=DIM, sinks=30)
    ours, theirs = build("reformer"), build("reformer")
    first = ours(*inputs)
    assert torch.equal(first, theirs(*inputs))
    ours.redraw()
    assert not torch.equal(ours(*inputs), first)
    theirs.redraw()
    assert torch.equal(ours(*inputs), theirs(*inputs))


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
