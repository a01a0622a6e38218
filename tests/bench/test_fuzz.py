"""The fuzzer: a seeded slice of it, what it draws, and that it finds faults that are planted."""

from __future__ import annotations

import itertools
import json
import os
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from helpers import VARIANTS, random_inputs, relative_error, with_gradients

from flowformer.bench import fuzz, fuzz_cases, fuzz_checks
from flowformer.bench.fuzz_cases import LIMITS, Case, Limits, draw_case, draw_configuration
from flowformer.ops import backends, reference

CASE = Case(backend="torch", kind="bidirectional", dtype="float32", dim=4, value_dim=3, heads=2, key_heads=1, sinks=9,
            sources=7)  # fmt: skip
TINY = Limits(numbers=2**9, longest=20, dim=8, heads=1, large=0)


def run(cases):
    """Checks each; a failure shows the line that runs it again."""
    counts = dict.fromkeys(("pass", "refused", "kink", "conditioned", "cancelled"), 0)
    for case in cases:
        record = fuzz_checks.check(case, "cpu")
        assert record["verdict"] in counts, f"{record['why']}\nflowformer bench fuzz --case '{case.to_json()}'"
        counts[record["verdict"]] += 1
    return counts


@pytest.mark.parametrize(("backend", "passed"), [("torch", 58), ("native", 38)])
def test_backend_passes_a_slice(monkeypatch, backend, passed):
    monkeypatch.setitem(LIMITS, "cpu", Limits(numbers=2**15, longest=300, dim=256, heads=8, large=0))
    configurations = itertools.islice(fuzz.draw(0, "cpu", [backend], 2), 30)
    counts = run(case for cases in configurations for case in cases)
    assert counts["pass"] >= passed


def test_logarithms_that_excuse_are_closer_than_those_of_torch():
    """The oracle's own running logarithm is off by more than the rule allows in float64, over a thousand tokens."""
    x = 1 + torch.rand(1800, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) / 5
    truth = np.log(np.cumsum(np.exp(x.numpy().astype(np.longdouble))))
    torchs, ours = (
        abs(found.numpy() - truth).max() for found in (x.logcumsumexp(0), fuzz_checks._running_logarithm(x, 0))
    )
    assert ours < 3e-15 < torchs


def test_kernels_pass_a_slice_in_the_interpreter(monkeypatch):
    pytest.importorskip("triton")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("Triton compiles here: the slice for a GPU is another test")
    monkeypatch.setitem(LIMITS, "interpreter", TINY)
    passed: set[str] = set()
    for (case,) in itertools.islice(fuzz.draw(0, "cpu", ["triton"], 1), 60):
        if case.kind not in passed and case.gradients and max(case.sinks, *case.lengths, 0) > 1 and run([case])["pass"]:
            passed.add(case.kind)
    assert passed == set(fuzz_cases.KINDS)


def test_kernels_pass_a_slice_of_powers_in_the_interpreter(monkeypatch):
    pytest.importorskip("triton")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("Triton compiles here: the slice for a GPU is another test")
    monkeypatch.setitem(LIMITS, "interpreter", TINY)
    passed: set[str] = set()
    for (case,) in itertools.islice(fuzz.draw(1, "cpu", ["triton"], 1), 400):
        if case.powers and case.kind not in passed and case.gradients and max(case.sinks, *case.lengths, 0) > 1:
            counts = run([case])
            if counts["pass"]:
                passed.add(case.kind)
    assert passed == set(fuzz_cases.KINDS)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_minute_on_a_gpu(tmp_path, capsys):
    out = tmp_path / "cases.jsonl"
    arguments = ["--device", "cuda", "--seconds", "60", "--workers", "4", "--cases", "100000", "--out", str(out)]
    assert fuzz.main(arguments) == 0, capsys.readouterr().out
    verdicts = [json.loads(line)["verdict"] for line in out.read_text().splitlines()]
    assert verdicts.count("pass") >= 20


@pytest.mark.parametrize("name", VARIANTS)
def test_oracles_without_a_matrix_are_the_reference(name, monkeypatch):
    random = torch.Generator().manual_seed(0)
    variant, masks = VARIANTS[name], (torch.rand(2, 2, 30, generator=random) < 0.7).unbind()
    inputs = random_inputs(2, 4, 30, key_heads=2, value_dim=3)

    def bidirectional(*x):
        return fuzz_checks.exact_bidirectional(*x, *masks, 0.7, variant)

    def causal(*x):
        return fuzz_checks.exact_causal(*x, masks[0], None, 0.7, variant)[0]

    for function in (bidirectional, causal):
        monkeypatch.setitem(fuzz_checks.QUADRATIC, "cpu", 2**30)
        whole = with_gradients(function, inputs)
        monkeypatch.setitem(fuzz_checks.QUADRATIC, "cpu", 0)
        monkeypatch.setattr(fuzz_checks, "PIECE", 7)
        for part, expected in zip(with_gradients(function, inputs), whole, strict=True):
            assert expected.any()
            assert relative_error(part, expected) < 1e-9


def test_everything_a_caller_can_vary_is_drawn():
    cases = [case for cases in itertools.islice(fuzz.draw(0, "cpu", ["torch"], 8), 250) for case in cases]
    assert {case.kind for case in cases} == set(fuzz_cases.KINDS)
    assert {case.dtype for case in cases} == {"float64", "float32", "bfloat16", "float16"}
    assert {layout for case in cases for layout in case.layouts} == set(fuzz_cases.LAYOUTS)
    assert {case.grad_layout for case in cases} == {*fuzz_cases.LAYOUTS, "constant"}
    for side in ("query_mask", "key_mask"):
        assert {getattr(case, side) for case in cases} == {None, *fuzz_cases.MASKS}
    assert {case.autocast for case in cases} == {None, "same", "mixed"}
    assert {*"qkvse"} == {letter for case in cases for letter in case.gradients}
    assert {"", "q", "kv"} <= {case.gradients for case in cases}
    for name, choices in {
        "feature_map": {"elu+1", "relu"},
        "competition": {"sigmoid", "none"},
        "allocation": {"softmax", "none"},
        "rescale": {False},
        "renormalize": {True},
    }.items():
        assert {case.variant[name] for case in cases if name in case.variant} == choices
    for is_causal in (False, True):
        assert any(case.powers and case.gradients for case in cases if case.is_causal == is_causal)
    assert any(case.powers and case.past for case in cases)
    lengths = {length for case in cases for length in (case.sinks, case.sources, *case.lengths, *case.source_lengths)}
    assert {0, 1, *fuzz_cases.BOUNDARIES} <= lengths
    assert max(lengths) > 5000
    assert {0, 1} <= {case.batch for case in cases}
    dims = {(case.dim, case.value_dim) for case in cases}
    assert min(map(min, dims)) < 4
    assert max(map(max, dims)) == 256
    assert any(case.heads > case.key_heads > 1 for case in cases)
    assert any(case.lengths and not all(case.lengths) for case in cases)  # an empty sequence among others
    assert any(case.kind.startswith("packed") and case.sinks for case in cases)  # tokens after the last
    assert any(right - left == 1 for case in cases for left, right in itertools.pairwise(case.cuts))
    assert min(case.amplitude for case in cases) == 0.01
    assert max(case.amplitude for case in cases) > 20


def test_cases_depend_on_the_seed_alone():
    first, second, other = (list(itertools.islice(fuzz.draw(seed, "cpu", ["torch"], 3), 20)) for seed in (5, 5, 6))
    assert first == second != other


def test_a_case_survives_json():
    random = fuzz.Random(1)
    for _ in range(50):
        case = draw_case(random, draw_configuration(random, "torch", TINY), TINY)
        assert Case.from_json(case.to_json()) == case
    with pytest.raises(ValueError, match="no lenght"):
        Case.from_json('{"lenght": 3}')


class Scaled(torch.autograd.Function):
    """The identity, with a gradient that is 5 % too large."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return 1.05 * grad


def _wrong(result, query):
    return 1.05 * result


def _wrong_gradient(result, query):
    return Scaled.apply(result)


def _random(result, query):
    return result * (1 + 1e-5 * torch.rand(()))


def _unwritten(result, query):
    """Reads a number that nobody wrote, which is finite unless it is poisoned."""
    return result + torch.where(torch.empty(1).isnan(), 1, 0)


def _out_of_bounds(result, query):
    held = torch.empty(result.shape).copy_(result)
    end = held.storage_offset() + held.numel()
    if held.untyped_storage().nbytes() > end * held.itemsize:  # the guarded run alone has room to write to
        held.data.as_strided((1,), (1,), end).zero_()
    return held


def _changed_input(result, query):
    query.data[..., -1, 0] += 1  # as a kernel does it, which autograd does not see
    return result


def _crash(result, query):
    raise RuntimeError("out of resource")


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        (_wrong, "result is off by"),
        (_wrong_gradient, "d_query is off by"),
        (_random, "two runs differ in result"),
        (_unwritten, "poisoned"),
        (_out_of_bounds, "outside of an allocation"),
        (_changed_input, "an input was changed"),
        (_crash, "out of resource"),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_planted_fault_is_found(fault, why, dtype, monkeypatch, capsys):
    honest = backends.BACKENDS["torch"]

    def bidirectional(query, *rest):
        return fault(honest.bidirectional(query, *rest).float(), query).to(query.dtype)

    case = replace(CASE, dtype=dtype)
    assert fuzz_checks.check(case, "cpu")["verdict"] == "pass"
    monkeypatch.setitem(backends.BACKENDS, "torch", honest._replace(bidirectional=bidirectional))
    record = fuzz_checks.check(case, "cpu")
    if (fault, dtype) == (_random, "bfloat16"):
        assert record["verdict"] == "pass"  # the difference is rounded away
        return
    assert record["verdict"] == "fail"
    assert why in record["why"]
    assert fuzz.main(["--device", "cpu", "--case", case.to_json()]) == 1
    assert why in capsys.readouterr().out


@pytest.mark.parametrize(("moved", "verdict"), [(0.0, "pass"), (2**-9, "kink"), (0.05, "fail")])
def test_a_flow_on_the_wrong_side_of_its_clamp_is_no_failure(moved, verdict, monkeypatch):
    """Of small inputs every Ô is near 1: with clamp=1, a rounding decides whether it has a gradient."""
    honest = backends.BACKENDS["torch"]

    def bidirectional(*args):
        *inputs, options = args
        return honest.bidirectional(*inputs, options._replace(variant=replace(options.variant, clamp=1 + moved)))

    monkeypatch.setitem(backends.BACKENDS, "torch", honest._replace(bidirectional=bidirectional))
    case = replace(CASE, dtype="bfloat16", sinks=60, sources=60, amplitude=0.05, variant={"clamp": 1.0})
    record = fuzz_checks.check(case, "cpu")
    assert record["verdict"] == verdict, record["why"]


def test_a_gradient_that_is_zero_by_cancellation_passes():
    """One token alone: dQ and dK are 0, and what is computed is rounding."""
    for kind in ("bidirectional", "causal"):
        case = Case(backend="torch", kind=kind, dtype="float32", dim=5, value_dim=3, heads=2, key_heads=2, sinks=1,
                    sources=1, variant={"competition": "none", "allocation": "none"})  # fmt: skip
        record = fuzz_checks.check(case, "cpu")
        assert record["verdict"] == "pass", record["why"]
        assert record["errors"]["d_value"]["relative"] < 1e-6


@pytest.mark.parametrize(("off", "verdict"), [(0.0, "pass"), (3e-7, "conditioned"), (1e-5, "fail")])
def test_a_rounding_of_a_large_flow_is_no_failure(off, verdict, monkeypatch):
    """With few sources, Ô is in the hundreds, and its exponential off by as many roundings."""
    case = replace(CASE, sinks=300, sources=2, dim=16, amplitude=0.01, gradients="", variant={"rescale": False})
    honest, clamped = backends.BACKENDS["torch"], reference._clamped

    def bidirectional(*args):
        signs = torch.tensor([1.0, -1.0])
        with patch.object(reference, "_clamped", lambda flow, **variant: clamped(flow * (1 + off * signs), **variant)):
            return backends.BACKENDS["reference"].bidirectional(*args)

    monkeypatch.setitem(backends.BACKENDS, "torch", honest._replace(bidirectional=bidirectional))
    record = fuzz_checks.check(case, "cpu")
    assert record["verdict"] == verdict, record["why"]


@pytest.mark.parametrize(("roundings", "verdict"), [(0.0, "pass"), (2.0, "conditioned"), (8.0, "fail")])
def test_a_rounding_of_an_input_is_no_failure(roundings, verdict, monkeypatch):
    """Of a single token, ⟨dR, v⟩ is a small sum of large terms: a rounding of v changes dK by many of its own."""
    case = Case(backend="torch", kind="causal", dtype="bfloat16", dim=119, value_dim=119, heads=2, key_heads=2, batch=3,
                sinks=1, sources=1, query_mask="random", key_mask="random", amplitude=0.01, seed=1928957182,
                variant={"feature_map": "relu", "flow_eps": 1e-3})  # fmt: skip
    honest = backends.BACKENDS["torch"]

    def causal(query, key, value, *args):
        signs = torch.randint(2, value.shape, generator=torch.Generator().manual_seed(0)) * 2 - 1
        moved = value.double() * (1 + roundings * 2**-9 * signs)
        return honest.causal(query.double(), key.double(), moved, *args).to(query.dtype)

    monkeypatch.setitem(backends.BACKENDS, "torch", honest._replace(causal=causal))
    record = fuzz_checks.check(case, "cpu")
    assert record["verdict"] == verdict, record["why"]


@pytest.mark.parametrize(("off", "verdict"), [(0.0, "pass"), (1e-7, "conditioned"), (1e-6, "fail")])
def test_a_rounding_of_the_sum_in_the_gradient_of_a_softmax_is_no_failure(off, verdict, monkeypatch):
    """One of five sources takes all, and dÔ is 0: a rounding of Σ c dc is all that is left of it."""
    case = Case(backend="torch", kind="bidirectional", dtype="float32", dim=96, value_dim=64, heads=1, key_heads=1,
                sinks=2000, sources=5, grad_layout="constant", amplitude=3.0, variant={"allocation": "none"},
                gradients="qk", seed=2)  # fmt: skip
    honest = backends.BACKENDS["torch"]

    def bidirectional(*args):
        with patch.object(torch.Tensor, "softmax", lambda x, dim: fuzz_checks._RoundedSoftmax.apply(x, dim, off)):
            return backends.BACKENDS["reference"].bidirectional(*(x.double() for x in args[:3]), *args[3:]).float()

    monkeypatch.setitem(backends.BACKENDS, "torch", honest._replace(bidirectional=bidirectional))
    record = fuzz_checks.check(case, "cpu")
    assert record["verdict"] == verdict, record["why"]


@pytest.mark.parametrize(("roundings", "verdict"), [(0.0, "pass"), (7.0, "cancelled"), (20.0, "fail")])
def test_a_gradient_of_which_no_digit_is_left_is_no_failure(roundings, verdict, monkeypatch):
    """One token alone: dQ is the difference of two terms that are equal but for ε, in roundings of which it may err."""
    case = Case(backend="torch", kind="bidirectional", dtype="bfloat16", dim=64, value_dim=8, heads=2, key_heads=2,
                sinks=1, sources=1, variant={"allocation": "none"})  # fmt: skip
    inputs = fuzz_checks.make_inputs(case, "cpu")
    exact = [x.double() for x in inputs.leaves]
    cotangents = fuzz_checks._cotangents(case, inputs, fuzz_checks._exact(case, inputs, exact))
    error = roundings / 8 * fuzz_checks._noise(case, inputs, exact, cotangents)["d_query"]
    honest = backends.BACKENDS["torch"]

    def bidirectional(query, *args):
        query = query.clone()
        if query.requires_grad:
            query.register_hook(lambda grad: grad + error / grad.numel() ** 0.5)
        return honest.bidirectional(query, *args)

    monkeypatch.setitem(backends.BACKENDS, "torch", honest._replace(bidirectional=bidirectional))
    record = fuzz_checks.check(case, "cpu")
    assert record["verdict"] == verdict, record["why"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--backends", "torch,tirton"], "did you mean 'triton'"),
        (["--device", "cuda"], "torch finds none"),
    ],
)
def test_a_mistake_is_explained(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        fuzz.main(arguments)
    assert message in capsys.readouterr().err


def test_a_refused_case_is_not_a_failure():
    case = replace(CASE, backend="triton", dtype="float64")
    assert fuzz_checks.check(case, "cpu")["verdict"] == "refused"


def test_not_a_number_stays_the_largest_error(capsys):
    summary = fuzz.Summary("cpu", None)
    for ratio in (0.5, float("nan"), 0.25):
        record = {"case": CASE.to_json(), "kind": CASE.kind, "backend": CASE.backend, "verdict": "pass"}
        summary.add(record | {"errors": {"result": {"relative": 0.0, "ratio": ratio}}})
    summary.print()
    assert "torch    float32   result    nan" in capsys.readouterr().out


def _dying_work(connection, device):
    """Dies of the third case."""
    for _ in range(2):
        case = Case.from_json(connection.recv())
        record = {"case": case.to_json(), "kind": case.kind, "backend": case.backend, "verdict": "pass", "why": ""}
        connection.send((record, False))
    connection.recv()
    os._exit(3)


def test_a_case_that_kills_its_process_is_named_and_the_run_goes_on(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(fuzz, "_work", _dying_work)
    out = tmp_path / "cases.jsonl"
    assert fuzz.main(["--device", "cpu", "--backends", "torch", "--cases", "5", "--out", str(out)]) == 1
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [record["verdict"] for record in records] == ["pass", "pass", "died", "pass", "pass"]
    cases = [case.to_json() for case in next(fuzz.draw(0, "cpu", ["torch"], 12))][:5]
    assert [record["case"] for record in records] == cases
    printed = capsys.readouterr().out
    assert f"flowformer bench fuzz --device cpu --case '{cases[2]}'" in printed
    assert "ended with status 3" in printed
