"""What holds for Flow-Attention whatever the input: conservation, symmetry, causality, and one result for one question
however it is asked. All backends obey.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import hypothesis
import pytest
import torch
from helpers import VARIANTS, oracle, random_inputs, relative_error, with_gradients
from hypothesis import Phase, settings
from hypothesis import strategies as st

from flowformer import flow_attention, flow_attention_recurrent, flow_attention_varlen, flow_maps

# the examples are small as drawn: shrinking a failure would take minutes and say no more
law = settings(max_examples=15, deadline=None, derandomize=True, database=None, phases=[Phase.generate])
BACKENDS = pytest.mark.parametrize("backend", ["native", "torch", "reference"])
KINDS = pytest.mark.parametrize("is_causal", [False, True], ids=["bidirectional", "causal"])

# at 1e-6, ReLU's flows span ten orders of magnitude and no two orders of summation agree to twelve digits
variants = st.sampled_from([*VARIANTS.values()]).map(
    lambda variant: replace(variant, eps=0.03) if variant.feature_map == "relu" else variant
)
seeds = st.integers(0, 1000)
lengths = st.integers(1, 12) | st.sampled_from([63, 64, 65, 70])
dims = st.integers(1, 9)


def given(*strategies, **named):
    """hypothesis.given, without the variants that the native backend refuses."""

    def decorate(test):
        @functools.wraps(test)
        def run(*args, **kwargs):
            try:
                test(*args, **kwargs)
            except NotImplementedError as error:
                hypothesis.assume("backend 'native' cannot run this" not in str(error))
                raise

        return hypothesis.given(*strategies, **named)(run)

    return decorate


class Inputs(tuple):
    """query, key and value, which print as their shapes."""

    def __repr__(self):
        return " ".join(str(tuple(x.shape)) for x in self)


@st.composite
def problems(draw, cross=False, batch=None):
    """query, key, value: as many sources as sinks unless cross."""
    sinks = draw(lengths)
    shape = batch or draw(st.integers(1, 3)), draw(st.integers(1, 3)), sinks, draw(lengths) if cross else sinks
    return Inputs(random_inputs(*shape, draw(dims), draw(dims), seed=draw(seeds)))


def random_mask(batch, length, seed):
    """(B, N), holes anywhere, and sometimes nothing left."""
    generator = torch.Generator().manual_seed(seed)
    share = torch.rand(batch, 1, generator=generator)
    return torch.rand(batch, length, generator=generator) < share


def close(value, truth, tolerance=1e-12):
    size = max(1, truth.abs().max().item()) if truth.numel() else 1
    torch.testing.assert_close(value, truth, rtol=tolerance, atol=tolerance * size)


def all_close(values, truths):
    for value, truth in zip(values, truths, strict=True):
        close(value, truth)


class TestConservation:
    @law
    @given(problems(cross=True), seeds, st.sampled_from(["sigmoid", "elu+1"]), st.booleans())
    def test_what_enters_is_what_leaves(self, inputs, seed, feature_map, masked):
        """Each source sends 1, so the sinks receive m; each sink takes 1, so the sources give n."""
        query, key, _ = inputs
        batch, _, sinks, _ = query.shape
        query_mask = random_mask(batch, sinks, seed) if masked else torch.ones(batch, sinks, dtype=torch.bool)
        key_mask = random_mask(batch, key.shape[2], seed + 1) if masked else torch.ones(batch, key.shape[2]).bool()
        maps = flow_maps(
            query,
            key,
            query_mask=query_mask,
            key_mask=key_mask,
            variant=replace(VARIANTS["default"], feature_map=feature_map, eps=1e-13),
        )
        n, m = query_mask.sum(-1).double(), key_mask.sum(-1).double()
        some = (n > 0) & (m > 0)
        received, given = maps.conserved_incoming.sum(-1), maps.conserved_outgoing.sum(-1)
        close(received[some], m[some, None].expand_as(received[some]), 1e-9)
        close(given[some], n[some, None].expand_as(given[some]), 1e-9)

    @law
    @given(problems(cross=True))
    def test_competition_shares_out_the_sources(self, inputs):
        """Σ c = m, so that competition moves attention and never adds any."""
        competition = flow_maps(*inputs[:2]).competition
        close(competition.mean(-1), torch.ones_like(competition[..., 0]))
        assert (competition > 0).all()


@BACKENDS
class TestSymmetry:
    @law
    @given(problems(cross=True), variants, seeds)
    def test_order_of_sinks(self, backend, inputs, variant, seed):
        query, key, value = inputs
        order = torch.randperm(query.shape[2], generator=torch.Generator().manual_seed(seed))
        result = flow_attention(query, key, value, variant=variant, backend=backend)
        close(flow_attention(query[:, :, order], key, value, variant=variant, backend=backend), result[:, :, order])

    @law
    @given(problems(cross=True), variants, seeds)
    def test_order_of_sources(self, backend, inputs, variant, seed):
        query, key, value = inputs
        order = torch.randperm(key.shape[2], generator=torch.Generator().manual_seed(seed))
        result = flow_attention(query, key, value, variant=variant, backend=backend)
        close(flow_attention(query, key[:, :, order], value[:, :, order], variant=variant, backend=backend), result)

    @law
    @given(problems(), variants, st.booleans())
    def test_linear_in_the_values(self, backend, inputs, variant, is_causal):
        query, key, value = inputs

        def attend(value):
            return flow_attention(query, key, value, is_causal=is_causal, variant=variant, backend=backend)

        close(attend(3 * value - value.flip(2)), 3 * attend(value) - attend(value.flip(2)))

    @law
    @given(problems(), variants, st.booleans())
    def test_scale_multiplies_queries_and_keys(self, backend, inputs, variant, is_causal):
        query, key, value = inputs
        options = {"is_causal": is_causal, "variant": variant, "backend": backend}
        close(
            flow_attention(query, key, value, scale=0.37, **options),
            flow_attention(0.37 * query, 0.37 * key, value, **options),
        )


@BACKENDS
class TestCausality:
    @law
    @given(problems(), variants, st.data())
    def test_the_past_does_not_see_the_future(self, backend, inputs, variant, data):
        now = data.draw(st.integers(0, inputs[0].shape[2]), "now")
        other = [torch.cat([x[:, :, :now], 7 * x[:, :, now:].flip(2) - 3], 2) for x in inputs]
        options = {"is_causal": True, "variant": variant, "backend": backend}
        close(flow_attention(*other, **options)[:, :, :now], flow_attention(*inputs, **options)[:, :, :now])

    @law
    @given(problems(), variants, st.data())
    def test_gradients_do_not_flow_into_the_future(self, backend, inputs, variant, data):
        now = data.draw(st.integers(1, inputs[0].shape[2]), "now")
        _, *grads = with_gradients(
            lambda *x: flow_attention(*x, is_causal=True, variant=variant, backend=backend)[:, :, :now], inputs
        )
        for grad in grads:
            assert (grad[:, :, now:] == 0).all()

    @law
    @given(problems(), variants, seeds)
    def test_a_prefix_is_itself(self, backend, inputs, variant, seed):
        """A prefix alone gives the prefix of the result, and its gradients, whatever follows."""
        prefix = 1 + seed % inputs[0].shape[2]
        alone = with_gradients(
            lambda *x: flow_attention(*x, is_causal=True, variant=variant, backend=backend),
            [x[:, :, :prefix] for x in inputs],
        )
        within = with_gradients(
            lambda *x: flow_attention(*x, is_causal=True, variant=variant, backend=backend)[:, :, :prefix], inputs
        )
        all_close([x[:, :, :prefix] for x in within], alone)


@BACKENDS
@KINDS
class TestPadding:
    @pytest.mark.parametrize("side", ["left", "right", "middle", "anywhere"])
    @law
    @given(problems(batch=3), variants, seeds)
    def test_padded_is_alone(self, backend, is_causal, side, inputs, variant, seed):
        """Each sequence of a padded batch is as if run alone, values and gradients; the padding may hold NaN."""
        length = inputs[0].shape[2]
        sizes = torch.randint(0, length + 1, (3, 1), generator=torch.Generator().manual_seed(seed))
        places = torch.arange(length)
        mask = {
            "left": places >= length - sizes,
            "right": places < sizes,
            "middle": (places < sizes // 2) | (places >= length - (sizes + 1) // 2),
            "anywhere": random_mask(3, length, seed),
        }[side]
        poisoned = [x.masked_fill(~mask[:, None, :, None], torch.nan) for x in inputs]
        options = {"is_causal": is_causal, "variant": variant, "backend": backend}
        cotangent = torch.randn(inputs[2].shape, generator=torch.Generator().manual_seed(seed)).double()

        def run(tensors, cotangent, **masks):
            leaves = [x.clone().requires_grad_() for x in tensors]
            result = flow_attention(*leaves, **masks, **options)
            return [result.detach(), *torch.autograd.grad(result, leaves, cotangent)]

        padded = run(poisoned, cotangent, query_mask=mask, key_mask=mask)
        for x in padded:
            assert (x.transpose(1, 2)[~mask] == 0).all()
        for row in range(3):
            kept = mask[row]
            alone = run([x[row : row + 1, :, kept] for x in inputs], cotangent[row : row + 1, :, kept])
            all_close([x[row : row + 1, :, kept] for x in padded], alone)


@BACKENDS
@law
@given(problems(cross=True, batch=2), variants, seeds)
def test_padded_cross_attention_is_alone(backend, inputs, variant, seed):
    """Sinks and sources each have their own padding."""
    query, key, value = inputs
    query_mask, key_mask = random_mask(2, query.shape[2], seed), random_mask(2, key.shape[2], seed + 1)
    result, *grads = with_gradients(
        lambda *x: (
            flow_attention(*x, query_mask=query_mask, key_mask=key_mask, variant=variant, backend=backend)
            * query_mask[:, None, :, None]
        ),
        (
            query.masked_fill(~query_mask[:, None, :, None], torch.nan),
            key.masked_fill(~key_mask[:, None, :, None], torch.nan),
            value.masked_fill(~key_mask[:, None, :, None], torch.nan),
        ),
    )
    for x, mask in zip((result, *grads), (query_mask, query_mask, key_mask, key_mask), strict=True):
        assert (x.transpose(1, 2)[~mask] == 0).all()
    for row in range(2):
        i, j = query_mask[row], key_mask[row]
        alone = flow_attention(
            query[row : row + 1, :, i], key[row : row + 1, :, j], value[row : row + 1, :, j],
            variant=variant, backend=backend,
        )  # fmt: skip
        all_close([result[row : row + 1, :, i]], [alone])


@BACKENDS
@KINDS
@law
@given(
    sizes=st.lists(st.tuples(st.integers(0, 9) | st.just(66), st.integers(0, 9)), min_size=1, max_size=5),
    variant=variants,
    seed=seeds,
    shared=st.integers(1, 2),
    spare=st.integers(0, 2),
    dtype=st.sampled_from([torch.int32, torch.int64]),
)
def test_packed_is_a_loop(backend, is_causal, sizes, variant, seed, shared, spare, dtype):
    """Sequences of any length, some empty, one after another; what comes after the last belongs to none."""
    sizes_q = [size for size, _ in sizes]
    sizes_k = sizes_q if is_causal else [size for _, size in sizes]
    total_q, total_k = sum(sizes_q) + spare, sum(sizes_k) + spare
    inputs = random_inputs(1, 2 * shared, 400, key_heads=2, value_dim=3, seed=seed)
    query, key, value = (x[0, :, :n].transpose(0, 1) for x, n in zip(inputs, (total_q, total_k, total_k), strict=True))
    bounds_q, bounds_k = (torch.tensor([0, *sizes]).cumsum(0).to(dtype) for sizes in (sizes_q, sizes_k))
    options = {"is_causal": is_causal, "enable_gqa": True, "variant": variant, "backend": backend}

    def packed(query, key, value):
        return flow_attention_varlen(query, key, value, bounds_q, bounds_k, max(sizes_q), max(sizes_k) + 1, **options)

    def loop(query, key, value):
        parts = []
        for a, b, c, d in zip(bounds_q, bounds_q[1:], bounds_k, bounds_k[1:], strict=False):
            q, k, v = (x.transpose(0, 1)[None] for x in (query[a:b], key[c:d], value[c:d]))
            parts.append(flow_attention(q, k, v, **options)[0].transpose(0, 1))
        return torch.cat([*parts, query.new_zeros(spare, query.shape[1], 3)])

    all_close(with_gradients(packed, (query, key, value)), with_gradients(loop, (query, key, value)))


@BACKENDS
class TestState:
    @law
    @given(problems(), variants, seeds, st.lists(st.integers(0, 70), min_size=1, max_size=3), st.booleans())
    def test_cut_anywhere_is_once(self, backend, inputs, variant, seed, cuts, masked):
        """A sequence in pieces, some of them empty, gives the results, the state and the gradients of one run."""
        length = inputs[0].shape[2]
        mask = random_mask(inputs[0].shape[0], length, seed) if masked else None
        cuts = sorted(cut % (length + 1) for cut in cuts)
        ends = []

        def run(cuts):
            def pieces(*x):
                state, results = None, []
                for start, stop in zip((0, *cuts), (*cuts, length), strict=True):
                    result, state = flow_attention_recurrent(
                        *(part[:, :, start:stop] for part in x),
                        state,
                        key_mask=None if mask is None else mask[:, start:stop],
                        variant=variant,
                        backend=backend,
                    )
                    results.append(result)
                ends.append(state.detach())
                # the loss sees the last state too, so that its gradients cross every cut
                return torch.cat([x.flatten() for x in (torch.cat(results, 2), state.sums, state.memory)])

            return with_gradients(pieces, inputs)

        all_close(run(cuts), run([]))
        # −∞ is the logarithm of nothing
        scalars, expected = (state.scalars.nan_to_num(neginf=0) for state in ends)
        close(scalars, expected)

    @law
    @given(problems(), variants)
    def test_token_by_token_is_parallel(self, backend, inputs, variant):
        def decode(*x):
            state, results = None, []
            for token in zip(*(part.split(1, 2) for part in x), strict=True):
                result, state = flow_attention_recurrent(*token, state, variant=variant, backend=backend)
                results.append(result)
            return torch.cat(results, 2)

        all_close(
            with_gradients(decode, inputs),
            with_gradients(lambda *x: flow_attention(*x, is_causal=True, variant=variant, backend=backend), inputs),
        )

    @law
    @given(problems(), variants, seeds)
    def test_a_padded_token_leaves_the_state_as_it_is(self, backend, inputs, variant, seed):
        """Prompts of unequal length, padded on either side, end in the state of each prompt alone."""
        mask = random_mask(inputs[0].shape[0], inputs[0].shape[2], seed)
        poisoned = [x.masked_fill(~mask[:, None, :, None], torch.nan) for x in inputs]
        _, state = flow_attention_recurrent(*poisoned, key_mask=mask, variant=variant, backend=backend)
        assert state.count.tolist() == mask.sum(-1).tolist()
        for row, kept in enumerate(mask):
            prompt = (x[row : row + 1, :, kept] for x in inputs)
            _, alone = flow_attention_recurrent(*prompt, variant=variant, backend=backend)
            for part, expected in zip(state.select(torch.tensor([row])).pack(), alone.pack(), strict=True):
                close(part, expected) if expected.isfinite().all() else close(part.exp(), expected.exp())


@BACKENDS
@KINDS
@law
@given(
    st.integers(1, 3),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 3]),
    lengths,
    dims,
    variants,
    seeds,
    st.booleans(),
)
def test_shared_heads_are_repeated_heads(
    backend, is_causal, batch, shared, key_heads, length, dim, variant, seed, masked
):
    inputs = random_inputs(batch, shared * key_heads, length, dim=dim, key_heads=key_heads, value_dim=2, seed=seed)
    mask = random_mask(batch, length, seed) if masked else None
    options = {"is_causal": is_causal, "query_mask": mask, "key_mask": mask, "variant": variant, "backend": backend}

    def repeated(query, key, value):
        key, value = key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1)
        return flow_attention(query, key, value, **options)

    all_close(
        with_gradients(lambda *x: flow_attention(*x, enable_gqa=True, **options), inputs),
        with_gradients(repeated, inputs),
    )


# each makes (B, H, N, D) of the same numbers, out of another piece of memory
LAYOUTS = {
    "(B, N, H, D)": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "(N, B, H, D)": lambda x: x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3),
    "(B, H, D, N)": lambda x: x.mT.contiguous().mT,
    "every other token": lambda x: torch.stack([x, torch.full_like(x, torch.nan)], 3).flatten(2, 3)[:, :, ::2],
    "slice of one projection": lambda x: torch.cat([x, x, x + torch.nan], -1)[..., : x.shape[-1]],
}


@BACKENDS
@KINDS
class TestStrides:
    @pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
    @law
    @given(problems(), variants)
    def test_layout_of_memory(self, backend, is_causal, layout, inputs, variant):
        options = {"is_causal": is_causal, "variant": variant, "backend": backend}

        def moved(*x):
            return flow_attention(*map(layout, x), **options)

        all_close(with_gradients(moved, inputs), with_gradients(lambda *x: flow_attention(*x, **options), inputs))

    @law
    @given(problems(), variants)
    def test_leaves_with_strides(self, backend, is_causal, inputs, variant):
        """The gradient of a strided leaf, not only of a view of a dense one."""
        options = {"is_causal": is_causal, "variant": variant, "backend": backend}
        strided = [LAYOUTS["(B, N, H, D)"](x) for x in inputs]
        all_close(
            with_gradients(lambda *x: flow_attention(*x, **options), strided),
            with_gradients(lambda *x: flow_attention(*x, **options), inputs),
        )

    @law
    @given(problems(batch=1), variants, st.sampled_from([0, 1, 2, 3]))
    def test_expanded(self, backend, is_causal, inputs, variant, axis):
        """One number standing for a whole axis: batch, heads, tokens or features."""
        options = {"is_causal": is_causal, "variant": variant, "backend": backend}
        shape = [3, *inputs[0].shape[1:3]]

        def expand(x):
            return x.narrow(axis, 0, 1).expand(*shape, x.shape[3])

        all_close(
            with_gradients(lambda *x: flow_attention(*(expand(part) for part in x), **options), inputs),
            with_gradients(lambda *x: flow_attention(*(expand(part).contiguous() for part in x), **options), inputs),
        )


@KINDS
@pytest.mark.parametrize("backend", ["native", "torch"])
def test_result_has_the_memory_order_of_the_query(is_causal, backend):
    """Heads that came out of one projection go into the next one without a copy."""
    inputs = random_inputs(sinks=7)
    assert flow_attention(*inputs, is_causal=is_causal, backend=backend).is_contiguous()
    turned = [LAYOUTS["(B, N, H, D)"](x) for x in inputs]
    assert flow_attention(*turned, is_causal=is_causal, backend=backend).transpose(1, 2).is_contiguous()


@KINDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=lambda x: str(x)[6:])
@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
def test_error_is_that_of_plain_torch(is_causal, dtype, variant, masked):
    """Rounding: at most twice the error of the reference at the same dtype, three times for the gradients."""
    inputs = random_inputs(batch=2, heads=2, sinks=200, dim=16, dtype=dtype)
    mask = random_mask(2, 200, seed=3) if masked else None
    options = {"is_causal": is_causal, "query_mask": mask, "key_mask": mask, "variant": variant}
    truth = with_gradients(lambda *x: oracle(*x, **options), [x.double() for x in inputs])
    ours, plain = (
        with_gradients(lambda *x, backend=backend: flow_attention(*x, backend=backend, **options), inputs)
        for backend in ("torch", "reference")
    )
    for x, y, expected, factor in zip(ours, plain, truth, (2, 3, 3, 3), strict=True):
        assert x.dtype == dtype
        assert relative_error(x, expected) <= factor * relative_error(y, expected)
