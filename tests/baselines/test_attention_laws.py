"""The laws of attention, each stated once over Flow-Attention and every rival that claims it.

`tests/ops/test_laws.py` has those of Flow-Attention alone: conservation, its state, and packed sequences.
"""

from __future__ import annotations

import pytest
import torch
from attentions import BIDIRECTIONAL, BUILT, CASES, CAUSAL, CROSS, DIM, FORMS, HEADS, build, with_all_gradients
from helpers import allocated, random_inputs, randomized, relative_error
from torch.nn.attention import SDPBackend, sdpa_kernel

from flowformer import baselines, nn


def trained(case):
    """With parameters that are not those of the start, of which many are 0 or 1."""
    return randomized(build(case), 0.5)


def inputs_of(sinks, **options):
    return random_inputs(heads=HEADS, dim=DIM, sinks=sinks, **options)


def close(value, truth):
    torch.testing.assert_close(value, truth, rtol=1e-8, atol=1e-9)


def padded_batch(length):
    """Padded right, left, inside, and a row of padding alone."""
    mask = torch.ones(4, length, dtype=torch.bool)
    mask[0, -length // 3 :] = mask[1, : length // 2] = mask[2, 2::3] = mask[3] = False
    return mask


@pytest.mark.parametrize("length", [9, 70])
@pytest.mark.parametrize(("case", "is_causal"), FORMS)
def test_padded_is_alone(case, is_causal, length):
    """Values and all gradients; the padding holds NaN, and gives 0."""
    module, mask = trained(case), padded_batch(length)
    inputs = inputs_of(length, batch=4)

    def padded(*inputs):
        inputs = [torch.where(mask[:, None, :, None], x, torch.nan) for x in inputs]
        return module(*inputs, is_causal=is_causal, query_mask=mask, key_mask=mask)

    def alone(*inputs):
        rows = [torch.zeros_like(row) for row in inputs[2]]
        for row, there in enumerate(mask):
            if there.any():
                result = module(*(x[row : row + 1, :, there] for x in inputs), is_causal=is_causal)
                rows[row] = rows[row].index_add(1, there.nonzero()[:, 0], result[0])
        return torch.stack(rows)

    values, truths = (with_all_gradients(function, module, inputs) for function in (padded, alone))
    for value, truth in zip(values, truths, strict=True):
        close(value, truth)
    for value in values[:4]:
        assert (value.transpose(1, 2)[~mask] == 0).all()


@pytest.mark.parametrize("case", CROSS)
def test_padded_sources_of_another_sequence(case):
    module, mask = trained(case), padded_batch(12)
    query, key, value = inputs_of(7, batch=4, sources=12)
    result = module(query, key, value, key_mask=mask)
    for row, there in enumerate(mask[:3]):
        alone = module(query[row, None], key[row, None, :, there], value[row, None, :, there])
        assert relative_error(result[row], alone[0]) < 1e-12
    assert (result[3] == 0).all()


# a query is also a key, and may be a source where it is masked as a query
KEYS_ARE_QUERIES = {"reformer", "soft"}


@pytest.mark.parametrize(
    ("case", "is_causal"), [form for form in FORMS if BUILT[form.values[0]].name not in KEYS_ARE_QUERIES]
)
def test_masked_queries_may_be_nan(case, is_causal):
    """Without a mask of keys; neither the result nor any gradient depends on what a masked query holds."""
    module, mask = trained(case), padded_batch(9)
    inputs = inputs_of(9, batch=4)

    def masked(filling):
        def attend(query, key, value):
            query = torch.where(mask[:, None, :, None], query, filling)
            return module(query, key, value, is_causal=is_causal, query_mask=mask)

        return with_all_gradients(attend, module, inputs)

    for value, truth in zip(masked(torch.nan), masked(1.0), strict=True):
        close(value, truth)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("case", "is_causal"), FORMS)
def test_no_source_gives_zero_and_no_gradient(case, is_causal, dtype):
    """The queries of a row without sources are not masked: they find nothing."""
    module = trained(case).to(dtype)
    inputs = inputs_of(9, dtype=dtype)
    key_mask = torch.zeros(2, 9, dtype=torch.bool)
    key_mask[0, 3] = True
    values = with_all_gradients(lambda *x: module(*x, is_causal=is_causal, key_mask=key_mask), module, inputs)
    assert all((value[1] == 0).all() for value in values[:4])
    assert (values[0][0, :, 3] != 0).any()
    assert not is_causal or (values[0][0, :, :3] == 0).all()
    # so the parameters get what they get from the other row
    truths = with_all_gradients(
        lambda *x: torch.cat(
            [module(*(y[:1] for y in x), is_causal=is_causal, key_mask=key_mask[:1]), torch.zeros_like(x[2][1:])]
        ),
        module,
        inputs,
    )
    for value, truth in zip(values, truths, strict=True):
        torch.testing.assert_close(value, truth, rtol=1e-5, atol=1e-5 if dtype == torch.float32 else 1e-9)


@pytest.mark.parametrize("now", [1, 18, 70])
@pytest.mark.parametrize("case", CAUSAL)
def test_causal_does_not_leak(case, now):
    module, inputs = trained(case), inputs_of(81)
    changed = [torch.cat([x[:, :, :now], 9 * torch.randn_like(x[:, :, now:])], 2) for x in inputs]
    ours, theirs = (module(*x, is_causal=True) for x in (inputs, changed))
    # later tokens may change the order of a sum, as they do where Reformer sorts, but not what is summed
    torch.testing.assert_close(theirs[:, :, :now], ours[:, :, :now], rtol=1e-12, atol=1e-14)
    assert not torch.isclose(ours[:, :, now:], theirs[:, :, now:]).all()
    # and the past does not depend on how long the sequence grows
    close(module(*(x[:, :, :now] for x in inputs), is_causal=True), ours[:, :, :now])
    # nor does the future get a gradient from it
    values = with_all_gradients(lambda *x: module(*x, is_causal=True)[:, :, :now], module, inputs)
    for gradient in values[1:4]:
        torch.testing.assert_close(gradient[:, :, now:], torch.zeros_like(gradient[:, :, now:]), rtol=0, atol=1e-13)


# those that attend by the place of a token among the queries
PATTERNS = {"bigbird", "local", "longformer", "reformer", "sinkhorn", "sparse"}


@pytest.mark.parametrize("case", [case for case in CAUSAL if BUILT[case].name not in PATTERNS])
def test_causal_queries_stand_where_their_keys_do(case):
    module, mask = trained(case), padded_batch(70)
    inputs = inputs_of(70, batch=4)
    by_keys = module(*inputs, is_causal=True, key_mask=mask)
    by_both = module(*inputs, is_causal=True, query_mask=mask, key_mask=mask)
    there = mask[:, None].expand(-1, HEADS, -1)
    torch.testing.assert_close(by_keys[there], by_both[there])


# what averages or counts the queries of a sequence
COUNTS_QUERIES = {"flow", "nystromformer"}


@pytest.mark.parametrize("case", BIDIRECTIONAL)
def test_masks_of_queries_and_of_keys_differ(case):
    """Masking a query empties its row; the others change only where an attention averages or counts the queries."""
    module, inputs = trained(case), inputs_of(12)
    query_mask, key_mask = torch.ones(2, 12, dtype=torch.bool), torch.ones(2, 12, dtype=torch.bool)
    query_mask[:, -3:] = key_mask[:, :4] = False
    result = module(*inputs, query_mask=query_mask, key_mask=key_mask)
    assert (result[:, :, -3:] == 0).all()
    alone = module(*inputs, key_mask=key_mask)
    same = torch.allclose(result[:, :, :-3], alone[:, :, :-3], rtol=1e-10)
    assert same == (module.name not in COUNTS_QUERIES)
    changed = [x.index_fill(2, torch.arange(4), 7.0) for x in inputs[1:]]
    assert torch.equal(module(inputs[0], *changed, query_mask=query_mask, key_mask=key_mask), result)


# those that look at content alone
ORDERLESS = {"flow", "softmax", "linear", "performer", "performer-relu", "yoso", "rfa"}


@pytest.mark.parametrize("case", BIDIRECTIONAL)
def test_the_order_of_tokens(case):
    """Attentions without positions give each token the same wherever it stands; all others do not."""
    module, inputs = trained(case), inputs_of(20)
    order = torch.randperm(20, generator=torch.Generator().manual_seed(0))
    moved = module(*(x[:, :, order] for x in inputs))
    same = torch.allclose(moved, module(*inputs)[:, :, order], rtol=1e-9, atol=1e-11)
    assert same == (module.name in ORDERLESS and case != "yoso, convolution")


@pytest.mark.parametrize(("case", "is_causal"), FORMS)
def test_reads_what_it_says(case, is_causal):
    """Reformer and SOFT have queries for keys, and a Synthesizer looks at fewer still."""
    module, (query, key, value) = trained(case), inputs_of(20)
    result = module(query, key, value, is_causal=is_causal)
    other, another, _ = inputs_of(20, seed=1)
    others = {"query": (other, key), "key": (query, another)}
    for side, (other_query, other_key) in others.items():
        unread = torch.equal(module(other_query, other_key, value, is_causal=is_causal), result)
        assert unread == (side not in module.reads), side


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("case", "is_causal"), FORMS)
def test_low_precision(case, is_causal, dtype):
    module = trained(case).float()
    inputs = inputs_of(60, dtype=dtype)
    result, exact = (module(*(x.to(d) for x in inputs), is_causal=is_causal) for d in (dtype, torch.float64))
    assert result.dtype == dtype
    assert exact.dtype == torch.float64
    eps = torch.finfo(dtype).eps
    if module.name in {"softmax", *PATTERNS}:
        # what the softmax sees is rounded once, the result once: a few roundings, whatever the length
        assert relative_error(result, exact) < 4 * eps
    else:
        # all is summed in float32: the result is off by its own rounding, and by what these sums lose
        torch.testing.assert_close(result.double(), exact, rtol=eps, atol=2e-4)


@pytest.mark.parametrize(("case", "is_causal"), FORMS)
def test_large_inputs(case, is_causal):
    """Products of hundreds, as models reach them: nothing overflows, and nothing that counts vanishes."""
    query, key, value = (x.float() for x in inputs_of(70))
    inputs = 50 * query, 50 * key, value

    def attend(module, inputs):
        return with_all_gradients(lambda *inputs: module(*inputs, is_causal=is_causal), module, inputs)

    result, *grads = attend(build(case).float(), inputs)
    exact = attend(build(case), [x.double() for x in inputs])[0]
    # published elu + 1 rounds small features to 0, which makes linear attention wrong by 2 %
    assert (result - exact).norm() < 3e-2 * value.norm()
    assert all(grad.isfinite().all() for grad in grads)


@pytest.mark.parametrize(("case", "is_causal"), FORMS)
def test_vmap_is_a_loop(case, is_causal):
    module = trained(case)
    inputs = [torch.stack(x) for x in zip(inputs_of(13), inputs_of(13, seed=1), strict=True)]
    # torch warns that fused kernels are slow under vmap
    with sdpa_kernel(SDPBackend.MATH):
        found = torch.vmap(lambda *x: module(*x, is_causal=is_causal))(*inputs)
    close(found, torch.stack([module(*x, is_causal=is_causal) for x in zip(*inputs, strict=True)]))


@pytest.mark.parametrize("case", CASES)
def test_state_dict_round_trip(case):
    is_causal, inputs = case not in BIDIRECTIONAL, inputs_of(30)
    saved, other = trained(case), randomized(build(case, init=9), 0.5)
    if hasattr(saved, "redraw"):
        saved.redraw()
    for _ in range(2):
        truth = saved(*inputs, is_causal=is_causal)
        assert not saved.state_dict() or not torch.equal(other(*inputs, is_causal=is_causal), truth)
        other.load_state_dict(saved.state_dict())
        assert torch.equal(other(*inputs, is_causal=is_causal), truth)
        if not hasattr(saved, "redraw"):
            break
        # what is drawn next is part of the state
        other.redraw()
        saved.redraw()
        truth = saved(*inputs, is_causal=is_causal)
        assert torch.equal(other(*inputs, is_causal=is_causal), truth)
        other = randomized(build(case, init=10), 0.5)


@pytest.mark.parametrize(("case", "is_causal"), FORMS)
def test_nothing_gives_nothing(case, is_causal):
    module = build(case)
    inputs = inputs_of(9, value_dim=6)
    for empty in ([x[:, :, :0] for x in inputs], [x[:0] for x in inputs]):
        result = module(*empty, is_causal=is_causal)
        assert result.shape == (*empty[0].shape[:3], 6)


@pytest.mark.parametrize("case", CASES)
def test_what_is_not_claimed_is_an_error(case):
    module = build(case)
    query, key, value = inputs_of(5, sources=7)
    calls = {"cross": (query, False), "causal": (key, True), "bidirectional": (key, False)}
    for ability, (queries, is_causal) in calls.items():
        if not getattr(module, ability) and not (ability == "cross" and not module.bidirectional):
            with pytest.raises(NotImplementedError, match=f"{module.name} attention does not support: {ability}"):
                module(queries, key, value, is_causal=is_causal)


@pytest.mark.parametrize("name", ["flow", *baselines.names()])
def test_a_layer_takes_any_attention(name):
    """A padded batch in a layer is each sequence alone, and every parameter learns."""
    torch.manual_seed(0)
    kind = nn.FlowEncoderLayer if name in BIDIRECTIONAL else nn.FlowDecoderLayer
    layer = kind(24, 4, attention=name, max_length=160).double().eval()
    x = torch.randn(2, 150, 24, dtype=torch.float64)
    mask = torch.ones(2, 150, dtype=torch.bool)
    mask[1, 100:] = False
    result = layer(x, mask=mask)
    close(result[0], layer(x[:1])[0])
    close(result[1, :100], layer(x[1:, :100])[0])
    result[mask].square().sum().backward()
    for parameter, tensor in layer.named_parameters():
        assert tensor.grad is not None, parameter
        assert tensor.grad.isfinite().all(), parameter


def peak_bytes(name, is_causal, length, is_training):
    """The most that is held at once, besides inputs and parameters."""
    attention = BUILT["flow"] if name == "flow" else baselines.build(name, num_heads=1, head_dim=8, max_length=length)
    attention.train(is_training)
    inputs = [x.requires_grad_(is_training) for x in random_inputs(1, 1, length, dim=8, dtype=torch.float32)]
    mask = torch.ones(1, length, dtype=torch.bool)

    def run():
        result = attention(*inputs, is_causal=is_causal, query_mask=mask, key_mask=mask)
        if is_training:
            result.sum().backward()

    # fused kernels would hide what a pattern takes without them
    with sdpa_kernel(SDPBackend.MATH):
        return allocated(run)[1]


LINEAR = [name for name in baselines.names() if baselines.get(name).linear]


@pytest.mark.parametrize("is_training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize(
    ("name", "is_causal"),
    # YOSO-E visits all pairs, and holds a block of them at a time
    [(name, is_causal) for name in ["flow", *LINEAR, "yoso"] for is_causal in (False, True)
     if name in (CAUSAL if is_causal else BIDIRECTIONAL)],
)  # fmt: skip
def test_four_times_the_tokens_take_four_times_the_memory(name, is_causal, is_training):
    short, long = (peak_bytes(name, is_causal, length, is_training) for length in (1024, 4096))
    assert long <= 4.5 * short


def test_what_does_not_claim_to_be_linear():
    assert set(baselines.names()) - set(LINEAR) == {"softmax", "sparse", "synthesizer", "synthesizer-dense", "yoso"}
    assert peak_bytes("softmax", False, 2048, False) > 15 * peak_bytes("softmax", False, 512, False)
