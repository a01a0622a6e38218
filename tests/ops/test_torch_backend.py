"""The memory-linear backend says what the reference says, everywhere, and does so cleanly."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from helpers import VARIANTS, allocated, oracle, random_inputs, with_gradients

from flowformer import FlowState, FlowVariant, flow_attention, flow_attention_recurrent, flow_attention_varlen

KINDS = pytest.mark.parametrize("is_causal", [False, True], ids=["bidirectional", "causal"])
EVERY_VARIANT = pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
# at 1e-6, ReLU's flows span ten orders of magnitude and no two orders of summation agree to twelve digits
CONDITIONED = {**VARIANTS, "relu": replace(VARIANTS["relu"], eps=1e-3)}
EVERY_CONDITIONED_VARIANT = pytest.mark.parametrize("variant", CONDITIONED.values(), ids=CONDITIONED)
NAMES = ("result", "grad_query", "grad_key", "grad_value")


def assert_same(ours, truth, names=NAMES, tolerance=1e-12):
    for name, value, expected in zip(names, ours, truth, strict=True):
        assert value.shape == expected.shape, name
        error, size = (value - expected).norm().item(), max(expected.norm().item(), 1)
        assert error <= tolerance * size, f"{name}: error {error:.1e} in {size:.1e}"


def assert_is_oracle(inputs, **options):
    ours = with_gradients(lambda *x: flow_attention(*x, backend="torch", enable_gqa=True, **options), inputs)
    assert_same(ours, with_gradients(lambda *x: oracle(*x, **options), inputs))


@KINDS
class TestEqualsReference:
    @pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 1000])
    def test_length(self, length, is_causal):
        assert_is_oracle(random_inputs(batch=1, heads=2, sinks=length, dim=8, value_dim=5), is_causal=is_causal)

    @pytest.mark.parametrize("length", [1023, 1025, 2300])
    def test_several_segments(self, length, is_causal):
        inputs = random_inputs(batch=1, heads=1, sinks=length, dim=3)
        assert_is_oracle(inputs, is_causal=is_causal, variant=FlowVariant(allocation="softmax"))

    @pytest.mark.parametrize(
        ("dim", "value_dim"),
        [(1, 1), (1, 8), (2, 3), (3, 2), (7, 16), (8, 1), (16, 64), (33, 7), (64, 33), (128, 256), (256, 128)],
    )
    def test_head_dim(self, dim, value_dim, is_causal):
        assert_is_oracle(random_inputs(1, 2, 70, dim=dim, value_dim=value_dim), is_causal=is_causal)

    @EVERY_CONDITIONED_VARIANT
    @pytest.mark.parametrize("length", [5, 131])
    def test_variant(self, variant, length, is_causal):
        assert_is_oracle(random_inputs(sinks=length, value_dim=6), is_causal=is_causal, variant=variant, scale=0.6)

    @EVERY_CONDITIONED_VARIANT
    def test_masked_variant(self, variant, is_causal):
        query_mask, key_mask = (torch.rand(2, 2, 70, generator=torch.Generator().manual_seed(0)) > 0.4).unbind(0)
        query_mask[0, 0] = key_mask[0, 0] = query_mask[1, -1] = key_mask[1, -1] = False
        assert_is_oracle(
            random_inputs(sinks=70), is_causal=is_causal, variant=variant, query_mask=query_mask, key_mask=key_mask
        )

    @pytest.mark.parametrize(("batch", "heads"), [(2, 5), (5, 2), (1, 1), (3, 1)])
    def test_several_blocks_of_heads(self, batch, heads, is_causal):
        assert_is_oracle(random_inputs(batch, heads, 500, dim=128), is_causal=is_causal)

    @pytest.mark.parametrize("key_heads", [1, 2, 3])
    def test_shared_key_heads(self, key_heads, is_causal):
        mask = torch.arange(66) < torch.tensor([[66], [40]])
        inputs = random_inputs(heads=6, key_heads=key_heads, sinks=66, value_dim=3)
        assert_is_oracle(inputs, is_causal=is_causal)
        assert_is_oracle(inputs, is_causal=is_causal, query_mask=mask, key_mask=mask)


@pytest.mark.parametrize(("sinks", "sources"), [(1, 7), (7, 1), (5, 64), (130, 9), (65, 1000)])
@EVERY_CONDITIONED_VARIANT
def test_cross_attention(sinks, sources, variant):
    assert_is_oracle(random_inputs(1, 2, sinks, sources), variant=variant)


@EVERY_CONDITIONED_VARIANT
@pytest.mark.parametrize("past", [0, 1, 70], ids="past {}".format)
@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
def test_state(variant, past, masked):
    """Values and gradients through the state that comes in and the state that goes out."""
    inputs = random_inputs(sinks=67, value_dim=3)
    state = FlowState.empty(2, 3, 4, 3, variant=variant, dtype=torch.float64)
    if past:
        _, state = flow_attention_recurrent(*random_inputs(sinks=past, value_dim=3, seed=1), variant=variant)
    mask = torch.rand(2, 67, generator=torch.Generator().manual_seed(2)) > 0.5 if masked else None

    def run(backend):
        leaves = [x.detach().clone().requires_grad_() for x in (*inputs, *state.pack())]
        result, end = flow_attention_recurrent(
            *leaves[:3], FlowState.unpack(leaves[3:]), key_mask=mask, variant=variant, backend=backend
        )
        outputs = [result, *end.pack()]
        # −∞ stays where a variant keeps no logarithm: it carries no gradient
        outputs[3] = torch.where(outputs[3].isfinite(), outputs[3], 0.0)
        generator = torch.Generator().manual_seed(3)
        cotangents = [torch.randn(x.shape, generator=generator, dtype=x.dtype) for x in outputs]
        return [*outputs, *torch.autograd.grad(outputs, leaves, cotangents)]

    outputs = ("result", "sums", "memory", "scalars")
    grads = [f"grad_{name}" for name in ("query", "key", "value", "sums", "memory", "scalars")]
    assert_same(run("torch"), run("reference"), (*outputs, *grads))


@KINDS
@EVERY_VARIANT
class TestCorners:
    @pytest.mark.parametrize("shape", [(0, 2, 5), (2, 2, 0), (0, 1, 0), (2, 0, 5)], ids=str)
    def test_nothing(self, variant, is_causal, shape):
        inputs = [torch.randn(*shape, dim) for dim in (4, 4, 3)]
        result, *grads = with_gradients(
            lambda *x: flow_attention(*x, is_causal=is_causal, variant=variant, backend="torch"), inputs
        )
        assert result.shape == (*shape, 3)
        assert [grad.shape for grad in grads] == [x.shape for x in inputs]

    def test_fully_masked_sequence_gives_zero_with_zero_gradients(self, variant, is_causal):
        mask = torch.tensor([[False] * 9, [True] * 9])
        tensors = with_gradients(
            lambda *x: flow_attention(
                *x, is_causal=is_causal, query_mask=mask, key_mask=mask, variant=variant, backend="torch"
            ),
            random_inputs(dtype=torch.float32),
        )
        for name, x in zip(NAMES, tensors, strict=True):
            assert (x[0] == 0).all(), name
            assert x[1].isfinite().all(), name
            assert (x[1] != 0).any(), name

    def test_extreme_inputs(self, variant, is_causal):
        """Constant, zero, saturated: the error stays that of the reference at the same dtype."""
        options = {"is_causal": is_causal, "variant": variant}
        for content, dtype, length, inputs in extreme_inputs():
            if content == "constant" and variant.clamp == 1:
                continue  # Ô is 1, so rounding decides on which side of the clamp it is, and whether it has a gradient
            ours, plain = (
                with_gradients(lambda *x, backend=backend: flow_attention(*x, **options, backend=backend), inputs)
                for backend in ("torch", "reference")
            )
            truths = with_gradients(lambda *x: oracle(*x, **options), [x.double() for x in inputs])
            for name, x, other, truth in zip(NAMES, ours, plain, truths, strict=True):
                rounding = 5 * max(torch.finfo(dtype).eps * truth.norm(), (other.double() - truth).norm())
                # gradients of queries and keys that cancel to nothing are as large as what they cancel from is rounded
                assert (x.double() - truth).norm() <= rounding + 1e-6, (name, content, dtype, length)


def extreme_inputs():
    """What they are, dtype, length, and query, key and value."""
    for length, dtype in itertools.product((1, 70), (torch.float32, torch.bfloat16, torch.float16)):
        query, key, value = random_inputs(sinks=length, dim=8, dtype=dtype)
        yield "hot features", dtype, length, (1e4 * query.sign(), 1e4 * key.sign(), value)
        yield "zero", dtype, length, tuple(torch.zeros_like(x) for x in (query, key, value))
        if dtype == torch.float32:
            yield "hot", dtype, length, tuple(1e4 * x.sign() for x in (query, key, value))
            yield "constant", dtype, length, tuple(torch.full_like(x, 0.3) for x in (query, key, value))
            yield "very negative", dtype, length, (-30 * query.abs(), -30 * key.abs(), value)


class TestEmptySides:
    @EVERY_VARIANT
    def test_no_sources(self, variant):
        query, key, value = random_inputs(sinks=5)
        result, *grads = with_gradients(
            lambda *x: flow_attention(*x, variant=variant, backend="torch"), (query, key[:, :, :0], value[:, :, :0])
        )
        assert result.shape == query.shape
        assert (result == 0).all()
        assert (grads[0] == 0).all()

    @EVERY_VARIANT
    def test_no_sinks(self, variant):
        query, key, value = random_inputs(sinks=5)
        result, *grads = with_gradients(
            lambda *x: flow_attention(*x, variant=variant, backend="torch"), (query[:, :, :0], key, value)
        )
        assert result.shape == (2, 3, 0, 4)
        assert (grads[1] == 0).all()
        assert (grads[2] == 0).all()

    @EVERY_VARIANT
    def test_every_source_masked(self, variant):
        key_mask = torch.tensor([[False] * 9, [True] * 9])
        tensors = with_gradients(
            lambda *x: flow_attention(*x, key_mask=key_mask, variant=variant, backend="torch"), random_inputs()
        )
        for name, x in zip(NAMES, tensors, strict=True):
            assert (x[0] == 0).all(), name
            assert (x[1] != 0).any(), name

    def test_no_new_tokens_leave_the_state_as_it_is(self):
        inputs = random_inputs(sinks=5)
        _, state = flow_attention_recurrent(*inputs, backend="torch")
        result, end = flow_attention_recurrent(*(x[:, :, :0] for x in inputs), state, backend="torch")
        assert result.shape == (2, 3, 0, 4)
        assert all(torch.equal(a, b) for a, b in zip(state.pack(), end.pack(), strict=True))


def every_call(inputs, variant):
    """Each way to run the backend, with masks and states, as (name, function of three leaves)."""
    length = inputs[0].shape[2]
    mask = torch.arange(length) < torch.tensor([[length], [length // 2]])
    bounds = torch.tensor([0, 0, length // 3, length])
    _, state = flow_attention_recurrent(*inputs, variant=variant, backend="torch")
    options = {"variant": variant, "backend": "torch"}
    calls = {
        "recurrent": lambda *x: flow_attention_recurrent(*x, state, key_mask=mask, **options)[0],
    }
    for is_causal in (False, True):
        kind = "causal" if is_causal else "bidirectional"
        both = {"is_causal": is_causal, **options}
        calls[kind] = lambda *x, both=both: flow_attention(*x, **both)
        calls[f"{kind}, masked"] = lambda *x, both=both: flow_attention(*x, query_mask=mask, key_mask=mask, **both)
        calls[f"{kind}, packed"] = lambda *x, both=both: flow_attention_varlen(
            *(part[0].transpose(0, 1) for part in x), bounds, bounds, length, length, **both
        )
    return calls.items()


@pytest.fixture
def poisoned_memory():
    """Fresh memory holds NaN, in everything that torch allocates without filling."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(5).isnan().all()
    assert torch.zeros(5).new_empty(5).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@EVERY_VARIANT
@pytest.mark.parametrize("length", [1, 67, 1100])
def test_no_fresh_memory_is_read(poisoned_memory, variant, length):
    for name, call in every_call(random_inputs(sinks=length), variant):
        poisoned = with_gradients(call, random_inputs(sinks=length))
        torch.use_deterministic_algorithms(False)
        expected = with_gradients(call, random_inputs(sinks=length))
        torch.use_deterministic_algorithms(True)
        assert all(map(torch.equal, poisoned, expected)), name


@EVERY_VARIANT
def test_deterministic(variant):
    inputs = random_inputs(sinks=300, heads=4, key_heads=4, dtype=torch.float32)
    for name, call in every_call(inputs, variant):
        for once, again in zip(with_gradients(call, inputs), with_gradients(call, inputs), strict=True):
            assert torch.equal(once, again), name


@EVERY_VARIANT
def test_nothing_that_was_passed_is_changed(variant):
    inputs = random_inputs(sinks=67, dtype=torch.float32)
    copies = [x.clone() for x in inputs]
    _, state = flow_attention_recurrent(*inputs, variant=variant, backend="torch")
    before = state.clone()
    for _ in range(2):
        leaves = [x.requires_grad_() for x in inputs]
        result, _ = flow_attention_recurrent(*leaves, state, variant=variant, backend="torch")
        result = result + sum(flow_attention(*leaves, is_causal=c, variant=variant, backend="torch") for c in (0, 1))
        cotangent = torch.ones_like(result)
        torch.autograd.grad(result, leaves, cotangent)
        assert (cotangent == 1).all()
    assert all(torch.equal(x, copy) for x, copy in zip(inputs, copies, strict=True))
    assert all(torch.equal(x, copy) for x, copy in zip(state.pack(), before.pack(), strict=True))


@KINDS
class TestMemory:
    @pytest.mark.parametrize("variant", ["default", "softmax allocation", "tight clamp", "elu+1"])
    def test_linear(self, is_causal, variant):
        """Neither N × N nor N × D × E numbers are ever stored: no tensor is larger than an input, and few are."""
        inputs = [x.requires_grad_() for x in random_inputs(1, 2, 20000, dim=16, dtype=torch.float32)]

        def train():
            result = flow_attention(*inputs, is_causal=is_causal, variant=VARIANTS[variant], backend="torch")
            result.backward(torch.ones_like(result))

        largest, highest = allocated(train)
        assert largest == inputs[0].nbytes
        assert highest <= 12 * inputs[0].nbytes

    def test_little_is_kept_for_the_backward_pass(self, is_causal):
        inputs = [x.requires_grad_() for x in random_inputs(1, 2, 20000, dim=16, dtype=torch.float32)]
        kept = {}

        def keep(x):
            kept[x.data_ptr()] = x.nbytes
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            flow_attention(*inputs, is_causal=is_causal, backend="torch")
        assert 3 * inputs[0].nbytes <= sum(kept.values()) <= 4 * inputs[0].nbytes

    def test_packed_sequences_are_not_padded_to_the_longest(self, is_causal):
        """One long sequence and many short ones take the memory of their tokens."""
        bounds = torch.tensor([0, *range(1, 200), 8199])
        inputs = [x[0].transpose(0, 1).requires_grad_() for x in random_inputs(1, 2, 8199, dim=16)]

        def train():
            flow_attention_varlen(
                *inputs, bounds, bounds, 8000, 8000, is_causal=is_causal, backend="torch"
            ).sum().backward()

        _, highest = allocated(train)
        assert highest <= 20 * inputs[0].nbytes


@KINDS
class TestAutograd:
    @pytest.mark.parametrize("asked", [(0,), (1,), (2,), (0, 2), ()], ids=["query", "key", "value", "two", "none"])
    def test_only_what_is_asked_for(self, is_causal, asked):
        inputs = random_inputs()
        truth = with_gradients(lambda *x: flow_attention(*x, is_causal=is_causal, backend="torch"), inputs)
        for i in asked:
            inputs[i].requires_grad_()
        result = flow_attention(*inputs, is_causal=is_causal, backend="torch")
        assert result.requires_grad == bool(asked)
        assert torch.equal(result.detach(), truth[0])
        if asked:
            generator = torch.Generator().manual_seed(1)
            result.backward(torch.randn(result.shape, generator=generator, dtype=result.dtype))
        for i, x in enumerate(inputs):
            assert torch.equal(x.grad, truth[1 + i]) if i in asked else x.grad is None

    def test_no_graph_without_grad_mode(self, is_causal):
        inputs = [x.requires_grad_() for x in random_inputs()]
        with torch.no_grad():
            assert not flow_attention(*inputs, is_causal=is_causal, backend="torch").requires_grad
        with torch.inference_mode():
            assert flow_attention(*inputs, is_causal=is_causal, backend="torch").is_inference()

    @pytest.mark.parametrize("loss", [torch.sum, torch.norm], ids=["linear", "curved"])
    def test_second_derivative_is_refused(self, is_causal, loss):
        """A penalty on the gradient must not lose its own gradient in silence."""
        inputs = [x.requires_grad_() for x in random_inputs()]
        result = flow_attention(*inputs, is_causal=is_causal, backend="torch")
        grads = torch.autograd.grad(loss(result), inputs, create_graph=True)
        penalty = sum(grad.square().sum() for grad in grads)
        with pytest.raises(RuntimeError, match=r"once|reference"):
            torch.autograd.grad(loss(result) + penalty, inputs)

    def test_cotangent_with_any_strides(self, is_causal):
        """An expanded or transposed cotangent, as sum() and (B, N, H, E) models give, counts as its dense copy."""
        leaves = [x.requires_grad_() for x in random_inputs()]
        result = flow_attention(*leaves, is_causal=is_causal, backend="torch")
        for cotangent in (torch.ones(()).double().expand_as(result), result.detach().mT.contiguous().mT):
            ours = torch.autograd.grad(result, leaves, cotangent, retain_graph=True)
            dense = torch.autograd.grad(result, leaves, cotangent.contiguous(), retain_graph=True)
            assert_same(ours, dense, NAMES[1:], tolerance=1e-14)

    def test_same_tensor_as_query_key_and_value(self, is_causal):
        x = random_inputs()[0]
        ours = with_gradients(lambda x: flow_attention(x, x, x, is_causal=is_causal, backend="torch"), [x])
        assert_same(ours, with_gradients(lambda x: oracle(x, x, x, is_causal=is_causal), [x]), ("result", "grad"))


def test_only_the_gradient_of_a_part_of_the_state():
    inputs = random_inputs()
    _, state = flow_attention_recurrent(*inputs, backend="torch")
    memory = state.memory.clone().requires_grad_()
    grads = []
    for backend in ("torch", "reference"):
        result, _ = flow_attention_recurrent(*inputs, FlowState(state.sums, memory, state.scalars), backend=backend)
        grads += torch.autograd.grad(result.sum(), memory)
    assert_same(grads[:1], grads[1:], ("grad_memory",))
