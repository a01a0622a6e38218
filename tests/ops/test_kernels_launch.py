"""Kernels are compiled once, in a form that fits the device, and replayed with new pointers."""

from __future__ import annotations

import functools
import os
import time
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

import triton

from flowformer.ops.triton import launch
from flowformer.ops.triton.launch import Kernel, Launches
from flowformer.ops.triton.plan import Strides, signature

STREAM = 7


class Jitted:
    """Stands for a kernel of Triton: it records what it is compiled, launched and replayed with."""

    __name__ = "stand_in"
    arg_names = ("x", "mask", "length", "FIRST", "SECOND")

    def __init__(self, shared=lambda constants: 0):
        self.compiled, self.launches, self.runs, self.shared = [], [], [], shared

    def warmup(self, *args, grid, num_warps, **constants):
        self.compiled.append((constants, os.environ.get("DISABLE_MMA_V3")))
        return SimpleNamespace(metadata=SimpleNamespace(shared=self.shared(constants)))

    def __getitem__(self, grid):
        def run(*args):
            self.runs.append(args)

        def start(*args, **constants):
            self.launches.append((grid, args, constants))
            return SimpleNamespace(run=run, function="compiled", packed_metadata="metadata")

        return start


class Interpreted(Jitted):
    def __getitem__(self, grid):
        start = super().__getitem__(grid)
        return lambda *args, **constants: start(*args, **constants) and None


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    """A GPU with 100 bytes of shared memory, and a release of Triton that was replayed."""
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: STREAM, raising=False)
    properties = SimpleNamespace(shared_memory_per_block_optin=100)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(triton, "JITFunction", Jitted)
    monkeypatch.setattr(triton, "__version__", launch.REPLAYABLE[0] + "0")


def kernel(jitted, *arguments, **options):
    # constants may come in any order
    return Kernel(jitted, (4, 2, 1), arguments, (100,), {"SECOND": 2, "FIRST": 1}, warps=8, **options)


def test_only_the_first_launch_asks_triton():
    jitted, launches, tensors = Jitted(), Launches(), [torch.randn(3) for _ in range(2)]
    for x in tensors:
        launches((x, None), lambda *arguments: [kernel(jitted, *arguments)])
    constants = {"FIRST": 1, "SECOND": 2, "num_warps": 8}
    assert jitted.launches == [((4, 2, 1), (tensors[0], None, 100), constants)]
    head = STREAM, "compiled", "metadata", None, None, None
    assert jitted.runs == [(4, 2, 1, *head, tensors[1].data_ptr(), None, 100, 1, 2)]


@pytest.mark.parametrize("version", ["3.5.1", "3.7.0", "3.60.0", "4.0.0"])
def test_an_unknown_launcher_is_not_replayed(monkeypatch, version):
    monkeypatch.setattr(triton, "__version__", version)
    jitted, launches = Jitted(), Launches()
    for _ in range(3):
        launches((torch.randn(3), None), lambda *arguments: [kernel(jitted, *arguments)])
    assert len(jitted.launches) == 3
    assert not jitted.runs
    assert len(jitted.compiled) == 1


def test_kernels_run_in_their_order_and_pieces_lie_where_they_lay():
    jitted, launches = Jitted(), Launches()

    def describe(x, flat):
        first, nothing, second = flat.split([4, 0, 6])
        yield kernel(jitted, x, first)
        yield kernel(jitted, second, x)
        yield kernel(jitted, *second.split([2, 4])[1:], nothing)

    calls = [(torch.randn(2, 3), torch.randn(10)) for _ in range(2)]
    for x, flat in calls:
        launches((x, flat), describe)
    (x, flat), (y, other) = calls
    views = [args[:2] for _, args, _ in jitted.launches]
    assert [[part.shape for part in pair] for pair in views] == [[(2, 3), (4,)], [(6,), (2, 3)], [(4,), (0,)]]
    assert views[0][1].data_ptr() == flat.data_ptr()
    assert views[2][0].data_ptr() == flat.data_ptr() + 24
    at = other.data_ptr()
    assert [args[9:11] for args in jitted.runs] == [(y.data_ptr(), at), (at + 16, y.data_ptr()), (at + 24, at + 16)]


def test_tensors_that_were_one_need_not_be_again():
    jitted, launches = Jitted(), Launches()
    x, y, z = (torch.randn(3) for _ in range(3))
    for pair in ((x, x), (y, z)):
        launches(pair, lambda *arguments: [kernel(jitted, *arguments)])
    assert jitted.runs[0][9:11] == (y.data_ptr(), z.data_ptr())


def test_a_kernel_that_does_not_fit_is_made_smaller():
    jitted = Jitted(shared=lambda constants: 60 * constants["FIRST"] * constants["SECOND"])
    smaller = {"FIRST": 3}, {"FIRST": 1}, {"SECOND": 1}, {"SECOND": 0}
    fitted = launch.fit([kernel(jitted, smaller=smaller)], torch.device("cuda"), wgmma=True)
    assert fitted == [{"FIRST": 1, "SECOND": 1}]
    assert len(jitted.compiled) == 4


def test_a_kernel_that_cannot_fit_says_so():
    with pytest.raises(RuntimeError, match="stand_in does not fit the 100 bytes"):
        launch.fit([kernel(Jitted(shared=lambda _: 101), smaller=({"FIRST": 1},))], torch.device("cuda"), wgmma=True)


def test_kernels_without_wgmma_leave_the_environment_as_it_was(monkeypatch):
    for before in (None, "0"):
        if before is None:
            monkeypatch.delenv("DISABLE_MMA_V3", raising=False)
        else:
            monkeypatch.setenv("DISABLE_MMA_V3", before)
        for wgmma, inside in ((True, before), (False, "1")):
            jitted = Jitted()
            launch.fit([kernel(jitted)], torch.device("cuda"), wgmma)
            assert jitted.compiled[0][1] == inside
            assert os.environ.get("DISABLE_MMA_V3") == before


def test_kernels_of_the_following_call_are_compiled_too():
    jitted, following, launches = Jitted(), Jitted(), Launches()
    for _ in range(2):
        launches((torch.randn(3), None), lambda *x: [kernel(jitted, *x)], lambda: [kernel(following)] * 2)
    assert [len(each.compiled) for each in (jitted, following)] == [1, 2]
    assert not following.launches


def test_forks_run_a_function_in_a_child_and_then_here(tmp_path):
    def function(name):
        with (tmp_path / name).open("a") as file:
            file.write(f"{os.getpid()}\n")
        return name

    forks = launch.Forks()
    futures = [forks.submit(functools.partial(function, name)) for name in ("a", "b")]
    forks.join()
    assert [future.result() for future in futures] == ["a", "b"]
    for name in ("a", "b"):
        child, parent = (tmp_path / name).read_text().split()
        assert child != parent == str(os.getpid())


def test_forks_survive_children_that_fail_or_hang(monkeypatch):
    monkeypatch.setattr(launch.Forks, "SECONDS", 0.2)
    here, forks = os.getpid(), launch.Forks()
    hanging = forks.submit(lambda: time.sleep(60) if os.getpid() != here else "done")
    failing = forks.submit(lambda: 1 / 0)
    forks.join()
    assert hanging.result() == "done"
    with pytest.raises(ZeroDivisionError):
        failing.result()


def test_the_interpreter_remembers_nothing(monkeypatch):
    monkeypatch.setattr(triton, "JITFunction", type(None))
    interpreted, launches = Interpreted(), Launches()
    for _ in range(2):
        launches((torch.randn(3), None), lambda *arguments: [kernel(interpreted, *arguments)])
    assert len(interpreted.launches) == 2
    assert not interpreted.runs
    assert not interpreted.compiled


def test_a_signature_is_all_that_triton_compiles_for():
    x = torch.randn(4, 8)
    assert signature([x, None]) == signature([x.clone(), None])
    others = x.double(), x[:, :4], x.t(), x[:3], x.flatten()[1:29].view(4, 7), None
    assert len({signature([each]) for each in (x, *others)}) == len(others) + 1
    # where a tensor begins decides how wide it may be loaded
    flat = torch.randn(40)
    assert signature([flat[:32]]) != signature([flat[1:33]])


def strides(*tensors):
    return Strides.of((x.shape, x.stride()) for x in tensors)


def test_kernels_are_compiled_for_what_strides_have_in_common():
    def layouts(batch, heads, length, dim=64):
        rows = torch.empty(batch, heads, length, dim)
        return rows, torch.empty(batch, length, heads, dim).transpose(1, 2)

    for rows, transposed in (layouts(2, 3, 100), layouts(5, 8, 777), layouts(2, 7, 33)):
        assert strides(rows).constants == {"ALIGN": 16, "DENSE": True}
        assert strides(transposed).constants == {"ALIGN": 16, "DENSE": False}
        assert [16 * number for number in strides(rows, transposed).numbers] == [
            *rows.stride()[:3],
            *transposed.stride()[:3],
        ]
    # a token alone is nowhere from the next, and an expanded one is not dense
    assert strides(torch.empty(2, 1, 3, 64)[:, :, :1]).constants["DENSE"]
    assert not strides(torch.empty(2, 1, 1, 64).expand(2, 1, 5, 64)).constants["DENSE"]
    assert strides(torch.empty(2, 3, 5, 20)).constants == {"ALIGN": 4, "DENSE": True}
