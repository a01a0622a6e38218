"""Kernels are compiled once, in a form that fits the device, and replayed with new pointers."""

from __future__ import annotations

import ctypes
import functools
import os
import struct
import time
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

import triton

from flowformer.ops.triton import launch, replay
from flowformer.ops.triton.launch import Kernel, Launches
from flowformer.ops.triton.plan import Strides, signature

STREAM = 7
SIGNATURE = {"x": "*fp32", "mask": "*i1", "length": "i32", "eps": "fp32", "FIRST": "constexpr", "SECOND": "constexpr"}
PTX = """
.visible .entry stand_in(
    .param .u64 .ptr .global .align 1 stand_in_param_0,
    .param .u64 .ptr .global .align 1 stand_in_param_1,
    .param .u32 stand_in_param_2,
    .param .f32 stand_in_param_3,
    .param .u64 .ptr .global .align 1 stand_in_param_4,
    .param .u64 .ptr .global .align 1 stand_in_param_5
)
.reqntid 256
{ ld.param.b64 %rd1, [stand_in_param_0]; }
"""
LAUNCH = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_void_p,
    *[ctypes.c_uint] * 7,
    ctypes.c_void_p,
    ctypes.POINTER(ctypes.c_void_p),
    ctypes.c_void_p,
)


class Jitted:
    """Stands for a kernel of Triton: it records what it is compiled and launched with."""

    __name__ = "stand_in"
    arg_names = tuple(SIGNATURE)
    ptx = PTX

    def __init__(self, shared=lambda constants: 0):
        self.compiled, self.launches, self.shared = [], [], shared

    def warmup(self, *args, grid, num_warps, enable_fp_fusion, **constants):
        self.compiled.append((constants, os.environ.get("DISABLE_MMA_V3")))
        return SimpleNamespace(metadata=SimpleNamespace(shared=self.shared(constants)))

    def __getitem__(self, grid):
        def start(*args, **constants):
            self.launches.append((grid, args, constants))
            passed = dict(zip(SIGNATURE, args, strict=False))
            absent = {name: "constexpr" for name, value in passed.items() if value is None}
            return SimpleNamespace(
                function=1234,
                src=SimpleNamespace(signature=SIGNATURE | absent),
                metadata=SimpleNamespace(shared=96, num_warps=constants["num_warps"], num_ctas=1),
                asm={"ptx": self.ptx if not absent else self.ptx.replace(PTX.splitlines()[3] + "\n", "")},
            )

        return start


class Interpreted(Jitted):
    def __getitem__(self, grid):
        start = super().__getitem__(grid)
        return lambda *args, **constants: start(*args, **constants) and None


class Driver:
    """Stands for the CUDA driver: it records the launches, refuses empty grids, and returns an error if any is left."""

    def __init__(self):
        self.launches, self.errors = [], []
        self.callback = LAUNCH(self.launch)

    def launch(self, function, x, y, z, threads, _, __, shared, stream, parameters, extra):
        if not x * y * z:
            return 1
        cells = [ctypes.string_at(parameters[index], 8) for index in range(6)]
        pointers = [int.from_bytes(cell, "little") for cell in cells]
        numbers = ctypes.c_int.from_buffer_copy(cells[2]).value, ctypes.c_float.from_buffer_copy(cells[3]).value
        self.launches.append(((function, x, y, z, threads, shared, stream, extra), pointers, numbers))
        return self.errors.pop(0) if self.errors else 0


@pytest.fixture(autouse=True)
def driver(monkeypatch):
    """A GPU with 100 bytes of shared memory."""
    driver = Driver()
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: STREAM, raising=False)
    properties = SimpleNamespace(shared_memory_per_block_optin=100)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(triton, "JITFunction", Jitted)
    address = ctypes.cast(driver.callback, ctypes.c_void_p).value
    monkeypatch.setattr(replay, "_launch_address", lambda: address)
    return driver


def kernel(jitted, *arguments, **options):
    # constants may come in any order
    return Kernel(jitted, (4, 2, 1), arguments, (100, 0.5), {"SECOND": 2, "FIRST": 1}, warps=8, **options)


def test_only_the_first_launch_asks_triton(driver):
    jitted, launches, calls = Jitted(), Launches(), [[torch.randn(3), torch.randn(3)] for _ in range(3)]
    for tensors in calls:
        launches(tensors, lambda *arguments: [kernel(jitted, *arguments)])
    constants = {"FIRST": 1, "SECOND": 2, "enable_fp_fusion": True, "num_warps": 8}
    assert jitted.launches == [((4, 2, 1), (*calls[0], 100, 0.5), constants)]
    assert len(driver.launches) == 2
    for (launched, pointers, numbers), tensors in zip(driver.launches, calls[1:], strict=True):
        assert launched == (1234, 4, 2, 1, 256, 96, STREAM, None)
        assert pointers[:2] == [x.data_ptr() for x in tensors]
        assert numbers == (100, 0.5)
        assert pointers[4:] == [0, 0]  # the memory that Triton's kernels may ask for


def test_an_empty_grid_is_not_launched(driver):
    """As of a packed batch without sequences."""
    jitted, launches = Jitted(), Launches()
    for _ in range(2):
        launches(
            (torch.randn(3), torch.randn(3)),
            lambda *arguments: [kernel(jitted, *arguments)._replace(grid=grid) for grid in ((4, 0, 1), (4, 2, 1))],
        )
    assert len(driver.launches) == 1


def test_a_tensor_that_is_not_passed_is_no_parameter():
    jitted, x = Jitted(), torch.randn(3)
    described = kernel(jitted, *launch.arguments((x, None)))
    _, *_, parameters, pointers = replay.describe(described, jitted[4, 2, 1](x, None, 100, 0.5, num_warps=8))
    assert parameters == bytes(8) + struct.pack("<i4xf4x", 100, 0.5) + bytes(16)
    assert pointers == struct.pack("<qqq", 0, 0, 0)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (".param .u32 stand_in_param_2", ".param .u64 stand_in_param_2"),  # another type
        (".param .u32 stand_in_param_2,", ""),  # one parameter fewer
        (".param .f32 stand_in_param_3", ".param .align 64 .b8 stand_in_param_3[128]"),  # a descriptor
        (",\n    .param .u64 .ptr .global .align 1 stand_in_param_5", ",\n .param .u32 stand_in_param_5"),
        (PTX, "; what another compiler than NVIDIA's makes"),
    ],
)
def test_a_kernel_with_other_parameters_is_launched_by_triton(driver, monkeypatch, old, new):
    monkeypatch.setattr(Jitted, "ptx", PTX.replace(old, new))
    assert Jitted.ptx != PTX
    jitted, launches = Jitted(), Launches()
    for _ in range(3):
        launches((torch.randn(3), torch.randn(3)), lambda *arguments: [kernel(jitted, *arguments)])
    assert len(jitted.launches) == 3
    assert not driver.launches
    assert len(jitted.compiled) == 1


def test_without_a_compiler_triton_launches(driver, monkeypatch):
    def build(*_):
        raise RuntimeError("Failed to find C compiler.")

    monkeypatch.setattr(replay, "compile_module_from_src", build)
    monkeypatch.setattr(replay, "module", functools.cache(replay.module.__wrapped__))
    jitted, launches = Jitted(), Launches()
    for _ in range(2):
        launches((torch.randn(3), torch.randn(3)), lambda *arguments: [kernel(jitted, *arguments)])
    assert len(jitted.launches) == 2
    assert not driver.launches


def test_a_thread_that_has_not_used_the_gpu_tries_again(driver, monkeypatch):
    synchronized = []
    monkeypatch.setattr(torch.cuda, "synchronize", synchronized.append)
    launches = Launches()
    driver.errors = [201]
    for _ in range(2):
        launches((torch.randn(3), torch.randn(3)), lambda *arguments: [kernel(Jitted(), *arguments)] * 2)
    assert len(driver.launches) == 3
    assert len(synchronized) == 1
    driver.errors = [0, 700]
    with pytest.raises(RuntimeError, match="refused to launch a kernel of Flow-Attention: error 700"):
        launches((torch.randn(3), torch.randn(3)), None)


def test_kernels_run_in_their_order_and_pieces_lie_where_they_lay(driver):
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
    expected = [[y.data_ptr(), at], [at + 16, y.data_ptr()], [at + 24, at + 16]]
    assert [pointers[:2] for _, pointers, _ in driver.launches] == expected


def test_tensors_that_were_one_need_not_be_again(driver):
    launches = Launches()
    x, y, z = (torch.randn(3) for _ in range(3))
    for pair in ((x, x), (y, z)):
        launches(pair, lambda *arguments: [kernel(Jitted(), *arguments)])
    assert driver.launches[0][1][:2] == [y.data_ptr(), z.data_ptr()]


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
