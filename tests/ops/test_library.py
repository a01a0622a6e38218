"""The op among torch's tools: operator checks, compile, export and ONNX."""

from __future__ import annotations

import io
from unittest.mock import patch

import onnxruntime
import pytest
import torch
from helpers import random_inputs, with_gradients
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.export import Dim
from torch.utils._python_dispatch import TorchDispatchMode

from flowformer import FlowState, FlowVariant, flow_attention, flow_attention_recurrent, flow_attention_varlen
from flowformer.ops.state import empty_state

KINDS = pytest.mark.parametrize("is_causal", [False, True], ids=["bidirectional", "causal"])
SOME_VARIANTS = {"default": FlowVariant(), "clamp, softmax": FlowVariant(clamp=0.9, allocation="softmax")}


def close(value, truth, tolerance=1e-12):
    torch.testing.assert_close(value, truth, rtol=tolerance, atol=tolerance)


def prefix_mask(length, *sizes):
    return torch.arange(length) < torch.tensor(sizes)[:, None]


def operator_arguments(name, variant, masked=False, shared=1, turned=False, length=5):
    """Arguments as the autograd functions pass them, with powers if the variant is renormalised."""
    query, key, value = random_inputs(2, 2 * shared, length, key_heads=2, value_dim=3, dtype=torch.float32)
    if turned:
        query, key, value = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (query, key, value))
    mask = prefix_mask(length, length, length // 2) if masked else None
    options = 0.7, *variant.as_args()
    state = empty_state(query, value, variant)
    bounds = torch.tensor([0, 2, length])
    lengths = bounds, bounds, length, length, False
    packed = tuple(x[0].transpose(0, 1) for x in (query, key, value))
    grad = torch.ones(*query.shape[:3], 3)
    rest = 0, 0, *options, variant.renormalize
    extras = None, None, torch.rand(2, 2 * shared) if variant.renormalize else None
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
        case "native_bidirectional":
            return query, key, value, mask, mask, *extras, *rest
        case "native_bidirectional_backward":
            _, *flows = torch.ops.flowformer.native_bidirectional(query, key, value, mask, mask, *extras, *rest)
            return grad, query, key, value, mask, mask, *extras, *flows, *rest
        case "native_causal":
            return query, key, value, mask, *state, *extras, *rest
        case "native_causal_backward":
            inputs = query, key, value, mask, *state, *extras
            *outputs, records = torch.ops.flowformer.native_causal(*inputs, *rest)
            return grad, *(torch.zeros_like(part) for part in outputs[1:]), *inputs, records, *rest
        case "packed":
            return *packed, *lengths, *options
        case "packed_backward":
            return grad[0].transpose(0, 1), *packed, *lengths, *options


OPERATORS = ["bidirectional", "bidirectional_backward", "causal", "causal_backward", "packed", "packed_backward"]
NATIVE_OPERATORS = ["native_bidirectional", "native_bidirectional_backward", "native_causal", "native_causal_backward"]


class TestOperators:
    @pytest.mark.parametrize("variant", SOME_VARIANTS.values(), ids=SOME_VARIANTS)
    @pytest.mark.parametrize("name", OPERATORS)
    def test_opcheck(self, name, variant):
        torch.library.opcheck(getattr(torch.ops.flowformer, name), operator_arguments(name, variant))

    @pytest.mark.parametrize("backend", ["native"])
    @pytest.mark.parametrize("renormalize", [False, True])
    @pytest.mark.parametrize("name", NATIVE_OPERATORS)
    def test_opcheck_of_native_operators(self, name, renormalize, backend):
        torch.library.opcheck(
            getattr(torch.ops.flowformer, name),
            operator_arguments(name, FlowVariant(renormalize=renormalize)),
            # not test_aot_dispatch_dynamic, which compares outputs: room for states of later segments is not written
            test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
        )

    @pytest.mark.parametrize(
        "case",
        [{"masked": True}, {"shared": 2}, {"turned": True}, {"length": 0}],
        ids=["masked", "shared", "(B, N, H, D)", "no tokens"],
    )
    @pytest.mark.parametrize("name", [*OPERATORS[:4], *NATIVE_OPERATORS])
    def test_fake_has_the_shapes_and_strides_of_the_real(self, name, case):
        torch.library.opcheck(
            getattr(torch.ops.flowformer, name),
            operator_arguments(name, FlowVariant(), **case),
            test_utils=("test_schema", "test_faketensor"),
        )

    def test_whoever_observes_operators_sees_them(self):
        """Else the implementation is called directly; a dispatch mode, a profiler, a trace and a subclass see more."""

        class Names(TorchDispatchMode):
            def __init__(self):
                super().__init__()
                self.seen = []

            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                self.seen.append(str(func))
                return func(*args, **(kwargs or {}))

        query, key, value = (x.requires_grad_() for x in random_inputs(1, 2, 5))
        with Names() as names:
            flow_attention(query, key, value, backend="torch").sum().backward()
        assert {"flowformer.bidirectional.default", "flowformer.bidirectional_backward.default"} <= set(names.seen)
        with torch.profiler.profile() as profile:
            flow_attention(query, key, value, is_causal=True, backend="torch").sum().backward()
        seen = {event.name for event in profile.events()}
        assert {"flowformer::causal", "flowformer::causal_backward"} <= seen
        with pytest.warns(torch.jit.TracerWarning):
            traced = torch.jit.trace(
                lambda *x: flow_attention(*x, backend="triton"),
                random_inputs(1, 2, 5, dtype=torch.float32),
                check_trace=False,
            )
        assert "flowformer::triton_bidirectional" in str(traced.graph)
        mode = FakeTensorMode()
        assert isinstance(flow_attention(*(mode.from_tensor(x) for x in (query, key, value))), FakeTensor)
        with patch.object(torch.autograd, "_profiler_enabled", return_value=False) as asked:
            flow_attention(query, key, value)
        assert asked.called

    def test_every_operator_is_checked(self):
        names = {name.removeprefix("flowformer::") for name in torch._C._dispatch_get_all_op_names() if "flowf" in name}
        assert {name for name in names if "triton" not in name} == {*OPERATORS, *NATIVE_OPERATORS}


MASK = prefix_mask(70, 70, 30)
BOUNDS = torch.tensor([0, 0, 30, 70])


def learned(query):
    """Powers that depend on the query, and options for them."""
    return {"variant": FlowVariant(renormalize=True), "powers": query.mean((0, 2, 3)).expand(2, -1)}


CALLS = {
    "bidirectional": lambda *x: flow_attention(*x),
    "bidirectional, masked": lambda *x: flow_attention(*x, query_mask=MASK, key_mask=MASK, scale=0.5),
    "causal": lambda *x: flow_attention(*x, is_causal=True),
    "causal, masked": lambda *x: flow_attention(*x, is_causal=True, key_mask=MASK, variant="core"),
    "one tensor for all": lambda query, *rest: flow_attention(query, query, query) + 0 * sum(rest),
    "shared heads": lambda query, key, value: flow_attention(query, key[:, :1], value[:, :1], enable_gqa=True),
    "continued": lambda *x: flow_attention_recurrent(*x, flow_attention_recurrent(*x)[1])[0],
    "powers": lambda *x: flow_attention(*x, **learned(x[0])),
    "powers, continued": lambda *x: flow_attention_recurrent(
        *x, flow_attention_recurrent(*x, **learned(x[0]))[1], **learned(x[0])
    )[0],
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

    @pytest.mark.parametrize(
        "name",
        ["bidirectional", "causal", "one tensor for all", "shared heads", "continued", "powers", "powers, continued"],
    )
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

    def test_every_size_may_vary(self):
        compiled = torch.compile(flow_attention, backend="eager", fullgraph=True, dynamic=True)
        for dim in (6, 9, 16):
            inputs = torch.randn(3, 2, 3, 5, dim)
            close(compiled(*inputs), flow_attention(*inputs))

    def test_one_graph_for_every_mask(self):
        counter = CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(
            lambda x, mask: flow_attention(x, x, x, query_mask=mask, key_mask=mask), backend=counter, fullgraph=True
        )
        x = random_inputs(sinks=9)[0]
        for sizes in ((9, 9), (9, 3), (0, 5)):
            compiled(x, prefix_mask(9, *sizes))
        assert counter.frame_count == 1

    def test_the_scale_may_vary(self):
        x = random_inputs()[0]
        compiled = torch.compile(lambda scale: flow_attention(x, x, x, scale=scale), backend="eager", fullgraph=True)
        for scale in (0.5, 0.25, 2.0):  # symbolic from the second on
            close(compiled(scale), flow_attention(x, x, x, scale=scale))

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
