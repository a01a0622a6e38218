"""The op among torch's tools: operator checks, compile, export, ONNX, autocast, function transforms, and its state."""

from __future__ import annotations

import copy
import io
import pickle

import onnxruntime
import pytest
import torch
from helpers import random_inputs, with_gradients
from torch._dynamo.testing import CompileCounterWithBackend
from torch.export import Dim

from flowformer import FlowState, FlowVariant, flow_attention, flow_attention_recurrent, flow_attention_varlen
from flowformer.ops.state import empty_state

KINDS = pytest.mark.parametrize("is_causal", [False, True], ids=["bidirectional", "causal"])
SOME_VARIANTS = {"default": FlowVariant(), "clamp, softmax": FlowVariant(clamp=0.9, allocation="softmax")}


def close(value, truth, tolerance=1e-12):
    torch.testing.assert_close(value, truth, rtol=tolerance, atol=tolerance)


def prefix_mask(length, *sizes):
    return torch.arange(length) < torch.tensor(sizes)[:, None]


def operator_arguments(name, variant, masked=False, shared=1, turned=False, length=5):
    """Arguments as the autograd functions pass them."""
    query, key, value = random_inputs(2, 2 * shared, length, key_heads=2, value_dim=3, dtype=torch.float32)
    if turned:
        query, key, value = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (query, key, value))
    mask = prefix_mask(length, length, length // 2) if masked else None
    options = 0.7, *variant.as_args()
    state = empty_state(query, value)
    bounds = torch.tensor([0, 2, length])
    lengths = bounds, bounds, length, length, False
    packed = tuple(x[0].transpose(0, 1) for x in (query, key, value))
    grad = torch.ones(*query.shape[:3], 3)
    match name:
        case "bidirectional":
            return query, key, value, mask, mask, *options
        case "bidirectional_backward":
            _, *flows = torch.ops.flowformer.bidirectional(query, key, value, mask, mask, *options)
            return grad, query, key, value, mask, mask, *flows, *options
        case "causal":
            return query, key, value, mask, *state, *options
        case "causal_backward":
            _, *rest = torch.ops.flowformer.causal(query, key, value, mask, *state, *options)
            zeros = (torch.zeros_like(part) for part in rest[:3])
            return grad, *zeros, query, key, value, mask, *rest[3:], *options
        case "packed":
            return *packed, *lengths, *options
        case "packed_backward":
            return grad[0].transpose(0, 1), *packed, *lengths, *options


OPERATORS = ["bidirectional", "bidirectional_backward", "causal", "causal_backward", "packed", "packed_backward"]


class TestOperators:
    @pytest.mark.parametrize("variant", SOME_VARIANTS.values(), ids=SOME_VARIANTS)
    @pytest.mark.parametrize("name", OPERATORS)
    def test_opcheck(self, name, variant):
        torch.library.opcheck(getattr(torch.ops.flowformer, name), operator_arguments(name, variant))

    @pytest.mark.parametrize(
        "case",
        [{"masked": True}, {"shared": 2}, {"turned": True}, {"length": 0}],
        ids=["masked", "shared", "(B, N, H, D)", "no tokens"],
    )
    @pytest.mark.parametrize("name", OPERATORS[:4])
    def test_fake_has_the_shapes_and_strides_of_the_real(self, name, case):
        torch.library.opcheck(
            getattr(torch.ops.flowformer, name),
            operator_arguments(name, FlowVariant(), **case),
            test_utils=("test_schema", "test_faketensor"),
        )

    def test_every_operator_is_checked(self):
        names = {name.removeprefix("flowformer::") for name in torch._C._dispatch_get_all_op_names() if "flowf" in name}
        assert {name for name in names if "triton" not in name} == set(OPERATORS)


MASK = prefix_mask(70, 70, 30)
BOUNDS = torch.tensor([0, 0, 30, 70])
CALLS = {
    "bidirectional": lambda *x: flow_attention(*x),
    "bidirectional, masked": lambda *x: flow_attention(*x, query_mask=MASK, key_mask=MASK, scale=0.5),
    "causal": lambda *x: flow_attention(*x, is_causal=True),
    "causal, masked": lambda *x: flow_attention(*x, is_causal=True, key_mask=MASK, variant="core"),
    "one tensor for all": lambda query, *rest: flow_attention(query, query, query) + 0 * sum(rest),
    "shared heads": lambda query, key, value: flow_attention(query, key[:, :1], value[:, :1], enable_gqa=True),
    "continued": lambda *x: flow_attention_recurrent(*x, flow_attention_recurrent(*x)[1])[0],
    "packed": lambda *x: flow_attention_varlen(*(part[0].transpose(0, 1) for part in x), BOUNDS, BOUNDS, 40, 40),
    "reference": lambda *x: flow_attention(*x, is_causal=True, backend="reference"),
}


class TestCompile:
    @pytest.fixture(autouse=True)
    def fresh(self):
        torch._dynamo.reset()
        yield
        torch._dynamo.reset()

    @pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
    def test_full_graph(self, call):
        inputs = random_inputs(sinks=70)
        compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
        for value, truth in zip(with_gradients(compiled, inputs), with_gradients(call, inputs), strict=True):
            close(value, truth)

    def test_inductor(self):
        """What surrounds the op is fused by the default compiler, in one graph with it."""

        def block(query, key, value):
            gate = query.sigmoid()
            return flow_attention(query * gate, key, value, is_causal=True) * gate + flow_attention(query, key, value)

        inputs = random_inputs(sinks=5)
        compiled = torch.compile(block, fullgraph=True)
        for value, truth in zip(with_gradients(compiled, inputs), with_gradients(block, inputs), strict=True):
            close(value, truth)

    @pytest.mark.parametrize("name", ["bidirectional", "causal", "one tensor for all", "shared heads", "continued"])
    def test_one_graph_for_every_length(self, name):
        counter = CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(CALLS[name], backend=counter, fullgraph=True)
        for length in (5, 9, 64, 65, 1030):
            leaves = [x.requires_grad_() for x in random_inputs(1, 2, length)]
            for x in leaves:
                torch._dynamo.mark_dynamic(x, 2)
            result = compiled(*leaves)
            close(result, CALLS[name](*leaves))
            result.sum().backward()
        assert counter.frame_count == 1

    def test_one_graph_for_every_mask(self):
        counter = CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(
            lambda x, mask: flow_attention(x, x, x, query_mask=mask, key_mask=mask), backend=counter, fullgraph=True
        )
        x = random_inputs(sinks=9)[0]
        for sizes in ((9, 9), (9, 3), (0, 5)):
            compiled(x, prefix_mask(9, *sizes))
        assert counter.frame_count == 1

    def test_mistakes_are_still_said(self):
        """Checks run while tracing: a wrong shape does not become a wrong graph."""
        query, key, value = random_inputs()
        with pytest.raises(Exception, match="same head dimension"):
            torch.compile(flow_attention, backend="eager", fullgraph=True)(query, key[..., :2], value)


class Attend(torch.nn.Module):
    """A model that does nothing but attend."""

    def __init__(self, **options):
        super().__init__()
        self.options = options

    def forward(self, query, key, value, query_mask=None, key_mask=None):
        return flow_attention(query, key, value, query_mask=query_mask, key_mask=key_mask, **self.options)


class Continue(torch.nn.Module):
    def forward(self, query, key, value, sums, memory, scalars):
        result, state = flow_attention_recurrent(query, key, value, FlowState(sums, memory, scalars))
        return result, *state.pack()


# name: the module, how many key heads, whether masks are passed, whether keys have a length of their own
EXPORTS = {
    "bidirectional": (Attend(), 4, False, False),
    "cross": (Attend(variant="core", scale=0.5), 4, False, True),
    "causal": (Attend(is_causal=True), 4, False, False),
    "softmax allocation": (Attend(is_causal=True, variant=FlowVariant(allocation="softmax")), 4, False, False),
    "shared heads": (Attend(is_causal=True, enable_gqa=True), 2, False, False),
    "masked": (Attend(), 4, True, False),
    "masked, cross": (Attend(), 4, True, True),
    "masked, causal": (Attend(is_causal=True), 4, True, False),
}


def export_case(name, sinks, sources=None, dtype=torch.float64, batch=2):
    """The module, its arguments at these lengths, and which of their axes may change."""
    module, key_heads, masked, cross = EXPORTS[name]
    sources = sources if cross else sinks
    arguments = random_inputs(batch, 4, sinks, sources, 8, 6, key_heads, dtype)
    n = Dim("n")
    m = Dim("m") if cross else n
    dynamic = {"query": {2: n}, "key": {2: m}, "value": {2: m}, "query_mask": None, "key_mask": None}
    if masked:
        halves = [prefix_mask(length, length, length // 2)[:batch] for length in (sinks, sources)]
        arguments = *arguments, *halves
        dynamic |= {"query_mask": {1: n}, "key_mask": {1: m}}
    return module.eval(), arguments, {key: dynamic[key] for key in list(dynamic)[: len(arguments)]}


@pytest.mark.skipif(torch.__version__ < "2.15", reason="torch.export of 2.11 stops at guards of its own on strides")
class TestExport:
    @pytest.mark.parametrize("name", EXPORTS)
    def test_other_lengths(self, name):
        module, arguments, dynamic = export_case(name, 12, 20)
        program = torch.export.export(module, arguments, dynamic_shapes=dynamic)
        assert not any("flowformer" in str(node.target) for node in program.graph.nodes)
        for sinks, sources in ((12, 20), (7, 3), (64, 65), (200, 130)):
            _, arguments, _ = export_case(name, sinks, sources)
            close(program.module()(*arguments), module(*arguments))

    def test_state(self):
        """A step of generation, exported: the state goes in and comes out as plain tensors."""
        inputs = random_inputs(sinks=12)
        _, state = flow_attention_recurrent(*inputs)
        length = Dim("length")
        dynamic = ({2: length},) * 3 + (None,) * 3
        program = torch.export.export(Continue(), (*inputs, *state.pack()), dynamic_shapes=dynamic)
        for length in (3, 64, 100):
            arguments = *random_inputs(sinks=length, seed=1), *state.pack()
            for value, truth in zip(program.module()(*arguments), Continue()(*arguments), strict=True):
                finite = truth.isfinite()
                assert torch.equal(value.isfinite(), finite)
                close(value[finite], truth[finite])

    @pytest.mark.parametrize("is_causal", [False, True], ids=["bidirectional", "causal"])
    def test_packed(self, is_causal):
        class Packed(torch.nn.Module):
            def forward(self, query, key, value, bounds):
                return flow_attention_varlen(query, key, value, bounds, bounds, 50, 50, is_causal=is_causal)

        def arguments(*sizes):
            inputs = (x[0].transpose(0, 1) for x in random_inputs(1, 2, sum(sizes)))
            return *inputs, torch.tensor([0, *sizes]).cumsum(0)

        tokens, sequences = Dim("tokens"), Dim("bounds", min=3)
        dynamic = {"query": {0: tokens}, "key": {0: tokens}, "value": {0: tokens}, "bounds": {0: sequences}}
        program = torch.export.export(Packed(), arguments(5, 9, 2), dynamic_shapes=dynamic)
        for sizes in ((5, 9, 2), (50, 0, 1, 7), (3, 3)):
            close(program.module()(*arguments(*sizes)), Packed()(*arguments(*sizes)))


@pytest.mark.parametrize("name", ["bidirectional", "cross", "causal", "masked", "masked, causal"])
def test_onnx(name):
    """One ONNX graph for every length, run by another runtime."""
    module, arguments, dynamic = export_case(name, 12, 20, torch.float32)
    file = io.BytesIO()
    torch.onnx.export(
        module, arguments, dynamo=True, opset_version=18, dynamic_shapes=dynamic, external_data=False, verbose=False
    ).save(file)
    session = onnxruntime.InferenceSession(file.getvalue(), providers=["CPUExecutionProvider"])
    for sinks, sources in ((7, 31), (130, 65)):
        _, arguments, _ = export_case(name, sinks, sources, torch.float32)
        names = [x.name for x in session.get_inputs()]
        (result,) = session.run(None, dict(zip(names, (x.numpy() for x in arguments), strict=True)))
        close(torch.from_numpy(result), module(*arguments), tolerance=2e-5)


BACKENDS = pytest.mark.parametrize("backend", ["torch", "reference"])


@KINDS
class TestAutocast:
    @BACKENDS
    def test_takes_what_it_is_given(self, is_causal, backend):
        """Inputs of float32 stay float32 to the last digit: autocast rounds projections, not flows."""
        inputs = random_inputs(dtype=torch.float32)

        def attend(*x):
            return flow_attention(*x, is_causal=is_causal, backend=backend)

        def under_autocast(*x):
            with torch.autocast("cpu", torch.bfloat16):
                return attend(*x)

        for value, truth in zip(with_gradients(under_autocast, inputs), with_gradients(attend, inputs), strict=True):
            assert value.dtype == torch.float32
            assert torch.equal(value, truth)

    def test_backward_under_autocast(self, is_causal):
        leaves = [x.requires_grad_() for x in random_inputs(dtype=torch.float32)]
        result = flow_attention(*leaves, is_causal=is_causal, backend="torch").square().sum()
        truth = torch.autograd.grad(result, leaves, retain_graph=True)
        with torch.autocast("cpu", torch.bfloat16):
            grads = torch.autograd.grad(result, leaves)
        assert all(torch.equal(grad, expected) for grad, expected in zip(grads, truth, strict=True))

    @BACKENDS
    def test_mixed_inputs_are_rounded_alike(self, is_causal, backend):
        """A norm leaves float32, a projection bfloat16: what then meets is rounded, as SDPA's inputs are."""
        query, key, value = random_inputs(dtype=torch.float32)
        truth = flow_attention(*(x.bfloat16() for x in (query, key, value)), is_causal=is_causal, backend=backend)
        with torch.autocast("cpu", torch.bfloat16):
            result = flow_attention(query, key.bfloat16(), value.bfloat16(), is_causal=is_causal, backend=backend)
        assert result.dtype == torch.bfloat16
        assert torch.equal(result, truth)


@KINDS
class TestFunctionTransforms:
    def test_grad(self, is_causal):
        inputs = random_inputs()

        def loss(*x):
            return flow_attention(*x, is_causal=is_causal, backend="torch").square().sum()

        leaves = [x.clone().requires_grad_() for x in inputs]
        expected = torch.autograd.grad(loss(*leaves), leaves)
        for grad, truth in zip(torch.func.grad(loss, argnums=(0, 1, 2))(*inputs), expected, strict=True):
            close(grad, truth)

    @pytest.mark.parametrize("backend", ["torch", "reference"])
    def test_vmap_is_a_loop(self, is_causal, backend):
        query, key, value = random_inputs()
        queries, masks = torch.stack([query, 2 * query, -query], 1), torch.rand(2, 9, 3) > 0.3

        def attend(q, v, mask):
            return flow_attention(q, key, v, is_causal=is_causal, query_mask=mask, key_mask=mask, backend=backend)

        values = torch.stack([value, value + 1, value * 2], -1)
        found = torch.func.vmap(attend, in_dims=(1, -1, 2), out_dims=3)(queries, values, masks)
        truth = [attend(queries[:, i], values[..., i], masks[..., i]) for i in range(3)]
        close(found, torch.stack(truth, 3))
        twice = torch.func.vmap(torch.func.vmap(attend, in_dims=(0, None, None)), in_dims=(0, None, None))
        grid = torch.stack([torch.stack([query, query + 1]), torch.stack([2 * query, -query])])
        close(twice(grid, value, None)[1, 0], attend(2 * query, value, None))

    def test_gradients_of_each_sample(self, is_causal):
        inputs = random_inputs(batch=4)

        def loss(*x):
            return flow_attention(*(part[None] for part in x), is_causal=is_causal).square().sum()

        found = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1, 2)))(*inputs)
        leaves = [x.clone().requires_grad_() for x in inputs]
        # samples do not depend on one another, so the gradient of their sum has that of each
        truth = torch.autograd.grad(flow_attention(*leaves, is_causal=is_causal).square().sum(), leaves)
        for grad, expected in zip(found, truth, strict=True):
            close(grad, expected)

    def test_jacobian(self, is_causal):
        inputs = random_inputs(batch=1, heads=1, sinks=4, dim=2)

        def jacobians(backend):
            return torch.func.jacrev(
                lambda *x: flow_attention(*x, is_causal=is_causal, backend=backend), argnums=(0, 1, 2)
            )(*inputs)

        for found, truth in zip(jacobians("torch"), jacobians("reference"), strict=True):
            close(found, truth)

    def test_second_derivatives_under_vmap_are_refused(self, is_causal):
        inputs = random_inputs(batch=1, heads=1, sinks=4, dim=2)
        twice = torch.func.jacrev(torch.func.jacrev(lambda *x: flow_attention(*x, is_causal=is_causal).sum()))
        with pytest.raises(RuntimeError, match='differentiable once; for higher derivatives use backend="reference"'):
            twice(*inputs)

    def test_vmap_of_packed_sequences_is_a_loop(self, is_causal):
        inputs = [torch.randn(3, 9, heads, 4, dtype=torch.float64) for heads in (6, 2, 2)]
        bounds = torch.tensor([0, 4, 4, 9])

        def attend(*x):
            return flow_attention_varlen(*x, bounds, bounds, 5, 5, is_causal=is_causal, enable_gqa=True)

        close(torch.func.vmap(attend)(*inputs), torch.stack([attend(*x) for x in zip(*inputs, strict=True)]))
        grads = torch.func.vmap(torch.func.grad(lambda *x: attend(*x).square().sum(), (0, 1, 2)))(*inputs)
        leaves = [x[1].clone().requires_grad_() for x in inputs]
        for grad, truth in zip(grads, torch.autograd.grad(attend(*leaves).square().sum(), leaves), strict=True):
            close(grad[1], truth)
        with pytest.raises(NotImplementedError, match="cannot map cu_seqlens"):
            torch.func.vmap(
                lambda lengths: flow_attention_varlen(*(x[0] for x in inputs), lengths, lengths, 5, 5, enable_gqa=True)
            )(bounds.expand(2, -1))

    def test_vmap_of_new_tokens_is_a_loop(self, is_causal):
        del is_causal  # decoding is causal
        _, state = flow_attention_recurrent(*random_inputs())
        tokens = torch.stack([random_inputs(sinks=2, seed=seed)[0] for seed in range(3)])

        def attend(x):
            result, end = flow_attention_recurrent(x, x, x, state)
            return result, *end.pack()

        found = torch.func.vmap(attend)(tokens)
        truth = [attend(x) for x in tokens]
        for part, expected in zip(found, zip(*truth, strict=True), strict=True):
            close(part, torch.stack(expected))

    def test_forward_mode_is_refused_or_left_to_the_reference(self, is_causal):
        query, key, value = random_inputs()

        def push(backend):
            return torch.func.jvp(
                lambda q: flow_attention(q, key, value, is_causal=is_causal, backend=backend), (query,), (key,)
            )[1]

        with pytest.raises(NotImplementedError, match=r'has no forward mode.*use backend="reference"'):
            push("torch")
        step = 1e-6
        ahead, behind = (flow_attention(query + sign * step * key, key, value, is_causal=is_causal) for sign in (1, -1))
        close(push("reference"), (ahead - behind) / (2 * step), tolerance=1e-8)

    def test_checkpointing(self, is_causal):
        """Activation checkpointing computes the op again and gets the same bits."""
        inputs = random_inputs(dtype=torch.float32)

        def attend(*x):
            return flow_attention(*x, is_causal=is_causal, backend="torch")

        def checkpointed(*x):
            return torch.utils.checkpoint.checkpoint(attend, *x, use_reentrant=False)

        for value, truth in zip(with_gradients(checkpointed, inputs), with_gradients(attend, inputs), strict=True):
            assert torch.equal(value, truth)

    def test_meta_tensors(self, is_causal):
        """Shapes without numbers, as large models are first built."""
        query, key, value = (x.to("meta") for x in random_inputs(sinks=2000, value_dim=3))
        result = flow_attention(query, key, value, is_causal=is_causal)
        assert result.is_meta
        assert result.shape == (2, 3, 2000, 3)


class TestVariant:
    @pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
    def test_copies_are_equal(self, copied):
        variant = FlowVariant(clamp=2.0, competition="none", eps=1e-5)
        assert copied(variant) == variant
        assert hash(copied(variant)) == hash(variant)

    def test_frozen(self):
        with pytest.raises(AttributeError):
            FlowVariant().clamp = 1.0

    def test_names_are_what_the_releases_compute(self):
        assert FlowVariant.named("timeseries") == FlowVariant()
        assert FlowVariant.named("paper") == FlowVariant(rescale=False)
        clamps = {name: FlowVariant.named(name).clamp for name in ("core", "vision", "language", "rl")}
        assert clamps == {"core": 1, "vision": 1, "language": 5, "rl": 10}


def assert_equal_states(state, other):
    for part, expected in zip(state.pack(), other.pack(), strict=True):
        assert torch.equal(part, expected)


class TestState:
    @pytest.fixture
    def state(self):
        mask = prefix_mask(9, 9, 4)
        return flow_attention_recurrent(*random_inputs(value_dim=3), key_mask=mask)[1]

    def test_empty_is_no_state(self):
        inputs = random_inputs(value_dim=3)
        state = FlowState.empty(2, 3, 4, 3, dtype=torch.float64)
        result, end = flow_attention_recurrent(*inputs, state)
        expected, expected_end = flow_attention_recurrent(*inputs)
        assert torch.equal(result, expected)
        assert_equal_states(end, expected_end)
        assert state.count.tolist() == [0, 0]

    def test_properties(self, state):
        assert state.count.tolist() == [9, 4]
        assert state.count.dtype == torch.int64
        shapes = [tuple(x.shape) for x in (state.key_sum, state.conserved_query_sum, state.memory, state.log_sum_exp)]
        assert shapes == [(2, 3, 4), (2, 3, 4), (2, 3, 4, 3), (2, 3)]
        _, key, _ = random_inputs(value_dim=3)
        close(state.key_sum[0], key[0].sigmoid().sum(-2))
        query = random_inputs(value_dim=3)[0]
        close(state.query_sum[1], query[1, :, :4].sigmoid().sum(-2))
        assert state.device == torch.device("cpu")
        assert state.dtype == torch.float64

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
    def test_dtype(self, dtype):
        result, state = flow_attention_recurrent(*random_inputs(dtype=dtype))
        assert result.dtype == dtype
        assert state.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)

    def test_select_repeats_rows_as_beam_search_does(self, state):
        beams = state.select(torch.tensor([1, 0, 1]))
        assert beams.count.tolist() == [4, 9, 4]
        token = [x[:, :, :1] for x in random_inputs(value_dim=3, seed=5)]
        result, _ = flow_attention_recurrent(*(x[[1, 0, 1]] for x in token), beams)
        expected, _ = flow_attention_recurrent(*token, state)
        close(result, expected[[1, 0, 1]])

    def test_select_carries_gradients(self):
        inputs = [x.requires_grad_() for x in random_inputs()]
        _, state = flow_attention_recurrent(*inputs)
        state.select(torch.tensor([1, 1])).memory.sum().backward()
        assert (inputs[2].grad[0] == 0).all()
        assert (inputs[2].grad[1] != 0).all()

    def test_zero_rows_start_over(self, state):
        """A slot of a running batch is given to a new sequence; its neighbours go on."""
        token = [x[:, :, :1] for x in random_inputs(value_dim=3, seed=5)]
        result, end = flow_attention_recurrent(*token, state.zero_rows(torch.tensor([True, False])))
        fresh, _ = flow_attention_recurrent(*token)
        going, _ = flow_attention_recurrent(*token, state)
        close(result, torch.stack([fresh[0], going[1]]))
        assert end.count.tolist() == [1, 5]
        assert state.count.tolist() == [9, 4]

    def test_clone_is_apart(self, state):
        copied = state.clone()
        assert_equal_states(copied, state)
        copied.memory.zero_()
        assert (state.memory != 0).all()

    def test_detach_cuts_the_history(self):
        _, state = flow_attention_recurrent(*(x.requires_grad_() for x in random_inputs()))
        assert all(part.requires_grad for part in state.pack()[:2])
        assert not any(part.requires_grad for part in state.detach().pack())
        assert state.detach().memory.data_ptr() == state.memory.data_ptr()

    def test_to(self, state):
        assert state.to(dtype=torch.float32).dtype == torch.float32
        assert all(part.dtype == torch.float32 for part in state.to(dtype=torch.float32).pack())
        assert state.to("meta").device == torch.device("meta")
        assert_equal_states(state.to("cpu"), state)

    def test_pack_is_not_a_copy(self, state):
        parts = state.pack()
        assert [part is x for part, x in zip(parts, (state.sums, state.memory, state.scalars), strict=True)] == [
            True
        ] * 3
        assert_equal_states(FlowState.unpack(parts), state)

    def test_packed_parts_survive_a_file(self, state):
        file = io.BytesIO()
        torch.save(state.pack(), file)
        file.seek(0)
        assert_equal_states(FlowState.unpack(torch.load(file)), state)

    @pytest.mark.parametrize(
        "copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"]
    )
    def test_copies_continue_alike(self, state, copied):
        token = [x[:, :, :1] for x in random_inputs(value_dim=3, seed=5)]
        assert_equal_states(copied(state), state)
        result, expected = (flow_attention_recurrent(*token, each)[0] for each in (copied(state), state))
        assert torch.equal(result, expected)


def test_is_the_backend_of_the_cpu():
    """With no choice made, CPU tensors go to the memory-linear backend, bit for bit."""
    inputs = random_inputs(dtype=torch.float32)
    assert torch.equal(flow_attention(*inputs), flow_attention(*inputs, backend="torch"))
