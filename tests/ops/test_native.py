"""The native backend: its numbers, its threads, and how it is built or done without."""

from __future__ import annotations

import _ctypes
import multiprocessing
import os
import shutil
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from helpers import VARIANTS, random_inputs, with_gradients

from flowformer import (
    FlowState,
    FlowVariant,
    explain,
    flow_attention,
    flow_attention_recurrent,
    flow_attention_varlen,
)
from flowformer.bench.errors import FORWARD, GRADIENT, measure
from flowformer.ops.native import build, call

KINDS = pytest.mark.parametrize("is_causal", [False, True], ids=["bidirectional", "causal"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=lambda x: str(x)[6:])
FORKS = multiprocessing.get_context("fork")
NATIVE_VARIANTS = {name: variant for name, variant in VARIANTS.items() if variant.allocation != "softmax"}
RENORMALIZED = FlowVariant(renormalize=True)
POWERED_VARIANTS = {
    "default": RENORMALIZED,
    "to the letter": replace(RENORMALIZED, rescale=False, clamp=0.9, flow_eps=1e-3),
    "no competition": replace(RENORMALIZED, competition="none"),
    "no allocation": replace(RENORMALIZED, allocation="none"),
}


def native(*inputs, **options):
    return attend(*inputs, backend="native", **options)


def attend(query, key, value, powers=None, **options):
    return flow_attention(query, key, value, powers=powers, enable_gqa=True, **options)


def powers_of(heads, dtype=torch.float64):
    """τ of either sign, and gates between open and twice the paper's."""
    return torch.stack([torch.linspace(-0.7, 1.9, heads), torch.linspace(2, 0, heads)]).to(dtype)


def assert_obeys(inputs, dtype, **options):
    """The error rule, for the result and the gradients; powers may follow query, key and value."""

    def cast(dtype):
        sums = torch.float64 if dtype == torch.float64 else torch.float32
        return [x.to(sums if index == 3 else dtype) for index, x in enumerate(inputs)]

    inputs = cast(dtype)
    ours = with_gradients(partial(native, **options), inputs)
    plain, truth = (
        with_gradients(partial(attend, backend="reference", **options), cast(each))
        for each in (torch.float32 if dtype == torch.float64 else dtype, torch.float64)
    )
    whole = torch.cat([x.flatten() for x in truth[1:4]]).norm().item()
    for index, (x, y, expected) in enumerate(zip(ours, plain, truth, strict=True)):
        assert x.dtype == (inputs[3].dtype if index == 4 else dtype)
        factor, size = (GRADIENT, whole) if index else (FORWARD, None)
        error = measure(x, y, expected, factor, dtype, size, is_sum=index == 4)
        assert error.obeys, f"tensor {index}: {error}"


@KINDS
@DTYPES
class TestNumbers:
    @pytest.mark.parametrize("variant", NATIVE_VARIANTS.values(), ids=NATIVE_VARIANTS)
    def test_variant(self, variant, dtype, is_causal):
        options = {"variant": variant, "is_causal": is_causal, "scale": 0.6}
        for length, dim in ((70, 4), (20, 40)):
            mask = torch.rand(2, length, generator=torch.Generator().manual_seed(0)) > 0.4
            inputs = random_inputs(sinks=length, dim=dim, value_dim=dim + 2)
            assert_obeys(inputs, dtype, query_mask=mask, key_mask=mask, **options)

    @pytest.mark.parametrize(
        ("dim", "value_dim"), [(1, 1), (1, 8), (3, 2), (7, 17), (33, 7), (64, 33), (255, 128), (128, 256)]
    )
    def test_head_dim(self, dim, value_dim, dtype, is_causal):
        assert_obeys(random_inputs(1, 2, 50, dim=dim, value_dim=value_dim), dtype, is_causal=is_causal)

    @pytest.mark.parametrize("length", [1, 2, 23, 24, 25, 48, 49, 385, 1537])
    def test_length(self, length, dtype, is_causal):
        assert_obeys(random_inputs(1, 2, length, dim=8, value_dim=5), dtype, is_causal=is_causal)

    def test_shared_heads(self, dtype, is_causal):
        assert_obeys(random_inputs(heads=6, key_heads=2, sinks=50), dtype, is_causal=is_causal)


@KINDS
@DTYPES
class TestPowers:
    """Learned exponents of renormalised variants, and their gradients."""

    @pytest.mark.parametrize("variant", POWERED_VARIANTS.values(), ids=POWERED_VARIANTS)
    def test_variant(self, variant, dtype, is_causal):
        options = {"variant": variant, "is_causal": is_causal, "scale": 0.6}
        for length, dim in ((70, 4), (20, 40)):
            mask = torch.rand(2, length, generator=torch.Generator().manual_seed(0)) > 0.4
            inputs = *random_inputs(sinks=length, dim=dim, value_dim=dim + 2), powers_of(3)
            assert_obeys(inputs, dtype, query_mask=mask, key_mask=mask, **options)

    @pytest.mark.parametrize(("length", "dim"), [(1, 8), (25, 7), (48, 33), (385, 5), (769, 8)])
    def test_length(self, length, dim, dtype, is_causal):
        inputs = *random_inputs(1, 2, length, dim=dim, value_dim=5, key_heads=1), powers_of(2)
        assert_obeys(inputs, dtype, is_causal=is_causal, variant=RENORMALIZED)


@DTYPES
@pytest.mark.parametrize(("sinks", "sources"), [(1, 7), (7, 1), (130, 9), (9, 1600), (47, 3), (5, 48)])
@pytest.mark.parametrize("dim", [4, 65])
def test_cross_attention(sinks, sources, dim, dtype):
    """Wide heads with few tokens take a path of their own."""
    assert_obeys(random_inputs(1, 2, sinks, sources, dim), dtype)


@DTYPES
@pytest.mark.parametrize(("sinks", "sources"), [(1, 7), (7, 1), (130, 90), (900, 1537), (47, 30), (5, 48)])
@pytest.mark.parametrize("dim", [4, 65])
def test_powers_of_cross_attention(sinks, sources, dim, dtype):
    """The mean of Ô is sinks / sources: where it is large, exp(τ Ô) has no accurate digits to compare."""
    assert_obeys((*random_inputs(1, 2, sinks, sources, dim), powers_of(2)), dtype, variant=RENORMALIZED)


def test_segments_do_not_lose_the_competition():
    """Nearly equal exp(Ô), summed up one after another, would be off by the length times a rounding."""
    query, key, value = random_inputs(1, 1, 900, dim=16)
    assert_obeys((query * 0.01, key * 0.01, value), torch.float32, is_causal=True, variant=FlowVariant(clamp=1.0))


@KINDS
class TestCorners:
    @pytest.mark.parametrize("shape", [(0, 2, 5), (2, 2, 0), (2, 0, 5)], ids=str)
    def test_nothing(self, shape, is_causal):
        inputs = [torch.randn(*shape, dim) for dim in (4, 4, 3)]
        result, *grads = with_gradients(lambda *x: native(*x, is_causal=is_causal), inputs)
        assert result.shape == (*shape, 3)
        assert [grad.shape for grad in grads] == [x.shape for x in inputs]

    def test_whole_rows_masked_hold_nan(self, is_causal):
        mask = torch.tensor([[False] * 9, [True] * 9])
        inputs = [x.masked_fill(~mask[:, None, :, None], torch.nan) for x in random_inputs(dtype=torch.float32)]
        options = {"query_mask": mask, "key_mask": mask, "is_causal": is_causal}
        for x in with_gradients(lambda *args: native(*args, **options), inputs):
            assert (x[0] == 0).all()
            assert x[1].isfinite().all()
            assert (x[1] != 0).any()

    def test_nan_is_not_hidden(self, is_causal):
        query, key, value = random_inputs(dtype=torch.float32)
        query[0, 0, 3, 1] = torch.nan
        result = native(query, key, value, is_causal=is_causal)
        assert result[0, 0, 3:].isnan().all()
        assert result[1].isfinite().all()

    @pytest.mark.parametrize("size", [0.0, 100.0, 1e4])
    @pytest.mark.parametrize("feature_map", ["sigmoid", "elu+1", "relu"])
    def test_saturated_features_stay_finite(self, size, feature_map, is_causal):
        query, key, value = random_inputs(sinks=60, dtype=torch.float32)
        variant = FlowVariant(feature_map=feature_map)
        inputs = size * query, -size * key, value
        for x in with_gradients(lambda *args: native(*args, is_causal=is_causal, variant=variant), inputs):
            assert x.isfinite().all()

    def test_windows_that_overlap(self, is_causal):
        """The axes of tokens and features have equal strides: torch.empty_like puts the shorter one last."""
        series = torch.randn(3, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64).unbind()

        def attend(*series, backend):
            windows = (x.as_strided((1, 2, 5, 12), (40, 20, 1, 1)) for x in series)
            return flow_attention(*windows, is_causal=is_causal, backend=backend)

        ours, truth = (with_gradients(partial(attend, backend=name), series) for name in ("native", "reference"))
        for x, y in zip(ours, truth, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-11)

    @pytest.mark.parametrize("step", [2, 1])
    def test_negated_view(self, is_causal, step):
        """Its memory has the opposite sign."""
        inputs = [x.mul(1j).conj().imag for x in random_inputs(dim=1, value_dim=1)]
        if step == 1:
            inputs = [x[..., 0].unsqueeze(-1) for x in inputs]
        assert inputs[0].is_neg()
        assert inputs[0].stride(-1) == step
        truth = native(*(x.resolve_neg() for x in inputs), is_causal=is_causal)
        assert torch.equal(native(*inputs, is_causal=is_causal), truth)


@pytest.mark.parametrize(("sinks", "sources"), [(5, 0), (0, 5)])
def test_nobody_to_attend_to(sinks, sources):
    query, key, value = random_inputs(sinks=5, dtype=torch.float32)
    for x in with_gradients(native, (query[:, :, :sinks], key[:, :, :sources], value[:, :, :sources])):
        assert (x == 0).all()


class TestThreads:
    @KINDS
    @pytest.mark.parametrize(("batch", "heads", "length"), [(3, 5, 200), (1, 1, 4000)], ids=["heads", "segments"])
    def test_as_many_as_there_are_give_the_same_bits(self, batch, heads, length, is_causal):
        inputs = random_inputs(batch, heads, length, dim=32, dtype=torch.float32)
        for powers in ((), (powers_of(heads, torch.float32),)):
            variant, runs = FlowVariant(renormalize=bool(powers)), []
            for threads in (1, 2, 5, 2):
                torch.set_num_threads(threads)
                function = partial(native, is_causal=is_causal, variant=variant)
                runs.append(with_gradients(function, (*inputs, *powers)))
            for run in runs[1:]:
                assert all(torch.equal(x, y) for x, y in zip(run, runs[0], strict=True))

    def test_callers_side_by_side(self):
        torch.set_num_threads(2)
        inputs = random_inputs(2, 8, 200, dim=32, dtype=torch.float32)
        truth = native(*inputs)
        with ThreadPoolExecutor(4) as pool:
            results = list(pool.map(lambda _: native(*inputs), range(40)))
        assert all(torch.equal(result, truth) for result in results)

    def test_a_forked_child_has_its_own(self):
        """The parent's threads are not there in a child: it must not wait for them."""
        torch.set_num_threads(2)
        inputs = random_inputs(2, 4, 300, dim=32, dtype=torch.float32)
        truth = native(*inputs)
        queue = FORKS.SimpleQueue()

        def compute():
            # nothing that torch computes by OpenMP, which does hang after a fork
            queue.put(native(*inputs).numpy().tobytes() == truth.numpy().tobytes())

        child = FORKS.Process(target=compute)
        child.start()
        child.join(30)
        if child.is_alive():
            child.kill()
        assert child.exitcode == 0
        assert queue.get()


def test_decoding_is_the_reference():
    """One token a call takes a path of its own."""
    past, token = random_inputs(sinks=30, dim=5, value_dim=7), random_inputs(sinks=1, dim=5, value_dim=7, seed=1)
    mask = torch.tensor([[True], [False]])
    powered = {"variant": RENORMALIZED, "powers": powers_of(3)}
    for options in ({}, {"variant": FlowVariant(clamp=0.9)}, {"variant": RENORMALIZED}, powered):
        _, state = flow_attention_recurrent(*past, backend="reference", **options)
        for one_mask in (None, mask):
            ours, truth = (
                flow_attention_recurrent(*token, state, backend=backend, key_mask=one_mask, **options)
                for backend in ("native", "reference")
            )
            pairs = zip((ours[0], *ours[1].pack()), (truth[0], *truth[1].pack()), strict=True)
            for x, y in pairs:
                torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("used", ["result", "state"])
def test_gradients_of_what_is_used(used):
    """Where nothing uses an output, autograd passes no gradient of it."""
    inputs, past = random_inputs(sinks=9), random_inputs(sinks=5, seed=1)

    def run(backend):
        leaves = [x.clone().requires_grad_() for x in inputs]
        _, state = flow_attention_recurrent(*past, backend=backend)
        result, end = flow_attention_recurrent(*leaves, state, backend=backend)
        # the scalars of the state stay unused
        total = result.sum() if used == "result" else end.sums.sum() + end.memory.square().sum()
        return torch.autograd.grad(total, leaves, allow_unused=True)

    for x, y in zip(run("native"), run("reference"), strict=True):
        torch.testing.assert_close(x, y if y is not None else torch.zeros_like(x), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("past", [0, 1, 70])
@pytest.mark.parametrize(
    ("variant", "powers"),
    [
        *((variant, ()) for variant in NATIVE_VARIANTS.values()),
        *((v, (powers_of(3),)) for v in POWERED_VARIANTS.values()),
    ],
    ids=[*NATIVE_VARIANTS, *(f"powers, {name}" for name in POWERED_VARIANTS)],
)
def test_gradients_through_states(variant, powers, past):
    """Of the state that comes in, from the state that goes out."""
    variant = replace(variant, eps=1e-3)
    inputs = random_inputs(sinks=67, value_dim=3)
    state = FlowState.empty(2, 3, 4, 3, variant=variant, dtype=torch.float64)
    if past:
        _, state = flow_attention_recurrent(*random_inputs(sinks=past, value_dim=3, seed=1), variant=variant)
    mask = torch.rand(2, 67, generator=torch.Generator().manual_seed(2)) > 0.3

    def run(backend):
        leaves = [x.detach().clone().requires_grad_() for x in (*inputs, *state.pack(), *powers)]
        learned = dict(zip(["powers"], leaves[6:], strict=False))
        result, end = flow_attention_recurrent(
            *leaves[:3], FlowState.unpack(leaves[3:6]), key_mask=mask, variant=variant, backend=backend, **learned
        )
        outputs = [result, end.sums, end.memory, torch.where(end.scalars.isfinite(), end.scalars, 0.0)]
        generator = torch.Generator().manual_seed(3)
        cotangents = [torch.randn(x.shape, generator=generator, dtype=x.dtype) for x in outputs]
        return [*outputs, *torch.autograd.grad(outputs, leaves, cotangents, materialize_grads=True)]

    for x, y in zip(run("native"), run("reference"), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-11)


@KINDS
def test_invalid_bounds_are_refused(is_causal):
    tokens, bounds = torch.randn(5, 2, 4), torch.tensor([0, 4, 3])
    with pytest.raises(ValueError, match="must not decrease"):
        flow_attention_varlen(tokens, tokens, tokens, bounds, bounds, 5, 5, is_causal=is_causal, backend="native")


def test_bounds_that_change_under_a_tensor_are_refused():
    array = np.array([0, 2, 5])
    tokens, bounds = torch.randn(5, 2, 4), torch.from_numpy(array)
    flow_attention_varlen(tokens, tokens, tokens, bounds, bounds, 5, 5, backend="native")
    array[1:] = 9
    with pytest.raises(ValueError, match="cu_seqlens_q"):
        flow_attention_varlen(tokens, tokens, tokens, bounds, bounds, 9, 9, backend="native")


@pytest.fixture
def narrow(monkeypatch):
    """The library for AVX2, on whatever CPU."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    build._load.cache_clear()
    yield
    build._load.cache_clear()


@KINDS
@DTYPES
@pytest.mark.parametrize(("length", "dim", "value_dim"), [(29, 64, 64), (50, 7, 17), (130, 33, 8), (385, 8, 65)])
@pytest.mark.parametrize("powers", [(), (powers_of(2),)], ids=["plain", "powers"])
def test_narrow_vectors(narrow, length, dim, value_dim, powers, dtype, is_causal):
    inputs = *random_inputs(1, 2, length, dim=dim, value_dim=value_dim), *powers
    assert_obeys(inputs, dtype, is_causal=is_causal, variant=FlowVariant(renormalize=bool(powers)))


@DTYPES
@KINDS
def test_narrow_heads_take_narrow_vectors(is_causal, dtype, monkeypatch):
    """Rows of 32 bytes, in the dtype of sums, on whatever CPU: its wider vectors would be half empty."""
    used, capability = [], build._width(narrow=False)
    monkeypatch.setattr(call, "library", lambda narrow: used.append(build._width(narrow)) or build.library(narrow))
    narrow = 4 if dtype == torch.float64 else 8
    for dim, value_dim in ((narrow, narrow), (narrow + 1, narrow), (1, narrow + 1)):
        native(*random_inputs(dim=dim, value_dim=value_dim, dtype=dtype), is_causal=is_causal)
    assert used == ["AVX2", capability, capability]


@KINDS
def test_differentiable_once(is_causal):
    leaves = [x.requires_grad_() for x in random_inputs()]
    grads = torch.autograd.grad(native(*leaves, is_causal=is_causal).sum(), leaves, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiable once"):
        grads[0].sum().backward()


@pytest.fixture
def rebuild(monkeypatch, tmp_path):
    """Forgets the library; builds go to an empty folder, by a compiler given as a shell script that knows $LIBRARY."""
    library = build._library_file("AVX2")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("LIBRARY", str(library))
    build._load.cache_clear()

    def use(script):
        compiler = tmp_path / "compiler"
        compiler.write_text(f'#!/bin/sh\n{script}\nfor out; do :; done; cp "$LIBRARY" "$out"\n')
        compiler.chmod(0o755)
        monkeypatch.setenv("CXX", str(compiler))

    yield use
    build._load.cache_clear()


class TestBuild:
    def refusal(self):
        x = torch.randn(1, 2, 5, 4)
        assert torch.equal(flow_attention(x, x, x), flow_attention(x, x, x, backend="torch"))
        assert "on cpu: torch" in explain(x, x, x)
        return next(line.strip() for line in explain(x, x, x).splitlines() if "native:" in line)

    def test_no_compiler(self, rebuild, monkeypatch):
        monkeypatch.setenv("CXX", "no-such-compiler")
        assert self.refusal() == "native: no, there is no C++ compiler (CXX=no-such-compiler)"
        with pytest.raises(NotImplementedError, match="there is no C\\+\\+ compiler"):
            native(*random_inputs())

    def test_compiler_with_arguments(self, rebuild, monkeypatch, tmp_path):
        rebuild(f'echo "$1" > {tmp_path}/log')
        monkeypatch.setenv("CXX", f"{os.environ['CXX']} -some-flag")
        assert build.failure(narrow=True) is None
        assert (tmp_path / "log").read_text() == "-some-flag\n"

    def test_native_code_of_another_cpu_is_not_asked_for(self, rebuild, monkeypatch, tmp_path):
        """The library may be loaded on another machine with the same vectors; the last -march counts."""
        rebuild(f'echo "$@" > {tmp_path}/log')
        monkeypatch.setenv("CXX", f"{os.environ['CXX']} -march=native")
        assert build.failure(narrow=True) is None
        flags = (tmp_path / "log").read_text().split()
        assert [flag for flag in flags if flag.startswith("-march=")][-1] == "-march=x86-64"

    def test_width_is_another_library(self):
        assert len({build._digest(flags) for flags in build.WIDTHS.values()}) == len(build.WIDTHS)

    def test_compiler_that_fails(self, rebuild, tmp_path):
        rebuild("echo some note >&2; echo vector.h: error: no such thing >&2; exit 1")
        assert self.refusal().endswith("could not compile the native code (vector.h: error: no such thing)")
        assert not list(tmp_path.rglob("*.so"))

    def test_compiler_that_fails_in_another_encoding(self, rebuild):
        rebuild("printf 'error: \\377\\n' >&2; exit 1")
        assert self.refusal().endswith("could not compile the native code (error: \N{REPLACEMENT CHARACTER})")

    def test_linker_that_fails(self, rebuild):
        rebuild("echo ld: No space left on device >&2; echo collect2: error: ld returned 1 exit status >&2; exit 1")
        assert self.refusal().endswith("could not compile the native code (ld: No space left on device)")

    def test_library_that_does_not_load(self, rebuild, monkeypatch, tmp_path):
        (tmp_path / "empty").touch()
        monkeypatch.setenv("LIBRARY", str(tmp_path / "empty"))
        rebuild("")
        assert "the native code could not be built or loaded" in self.refusal()

    def test_library_without_the_functions(self, rebuild, monkeypatch):
        monkeypatch.setenv("LIBRARY", _ctypes.__file__)
        rebuild("")
        assert "undefined symbol: bidirectional_forward" in self.refusal()

    @pytest.mark.parametrize("size", [0, 1000, -1])
    def test_truncated_library_is_built_again(self, rebuild, size):
        """To load it would kill the process."""
        rebuild("")
        whole = build._library_file("AVX2").read_bytes()
        build._library_file("AVX2").write_bytes(whole[:size])
        assert build._library_file("AVX2").read_bytes() == whole

    def test_no_home(self, rebuild, monkeypatch):
        for name in ("TORCH_EXTENSIONS_DIR", "XDG_CACHE_HOME", "HOME"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(os, "getuid", lambda: 2**31 - 2)  # of no user
        assert "there is no home folder to keep the native code in" in self.refusal()

    def test_folder_that_cannot_be_written(self, rebuild, monkeypatch, tmp_path):
        rebuild("")
        (tmp_path / "file").touch()
        monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "file"))
        assert "set TORCH_EXTENSIONS_DIR to use another folder" in self.refusal()

    def test_folder_with_spaces_and_letters_of_any_alphabet(self, rebuild, monkeypatch, tmp_path):
        rebuild("")
        monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "a folder, Ωδή"))
        assert build.failure(narrow=True) is None

    def test_cpu_without_avx2(self, rebuild, monkeypatch):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
        assert self.refusal() == "native: no, this CPU has no AVX2 (torch finds DEFAULT)"

    def test_other_systems(self, rebuild, monkeypatch):
        monkeypatch.setattr(build.sys, "platform", "darwin")
        assert "on Linux only, not on darwin" in self.refusal()

    def test_says_that_it_builds_and_builds_once(self, rebuild, caplog):
        rebuild("")
        assert build.failure(narrow=True) is None
        assert "compiles its CPU code, once" in caplog.text
        caplog.clear()
        build._load.cache_clear()
        assert build.failure(narrow=True) is None
        assert not caplog.text

    def test_two_processes_build_once(self, rebuild, tmp_path):
        rebuild(f"echo built >> {tmp_path}/log; sleep 0.3")
        children = [FORKS.Process(target=build._library_file, args=("AVX2",)) for _ in range(3)]
        for child in children:
            child.start()
        for child in children:
            child.join(30)
        assert [child.exitcode for child in children] == [0, 0, 0]
        assert (tmp_path / "log").read_text() == "built\n"

    def test_a_killed_build_leaves_nothing_in_the_way(self, rebuild, tmp_path):
        rebuild(f"touch {tmp_path}/begun; sleep 2")
        child = FORKS.Process(target=build._library_file, args=("AVX2",))
        child.start()
        while not (tmp_path / "begun").exists():
            time.sleep(0.01)
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        rebuild("")
        assert build.failure(narrow=True) is None

    def test_another_source_is_another_library(self, monkeypatch, tmp_path):
        before = build._digest(build.FLAGS)
        shutil.copytree(build.SOURCES, tmp_path / "native")
        monkeypatch.setattr(build, "SOURCES", tmp_path / "native")
        assert build._digest(build.FLAGS) == before
        with (tmp_path / "native" / "call.h").open("a") as file:
            file.write("// changed\n")
        assert build._digest(build.FLAGS) != before
