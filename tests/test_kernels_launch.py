"""Kernels that ran once run again with what they were compiled for, and only their tensors change."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from flowformer.ops.kernels.launch import Kernel, Launches, signature

STREAM = 7


class Jitted:
    """Stands for a kernel of Triton: it records what it is launched with, and what its compiled form is run with."""

    arg_names = ("x", "mask", "length", "FIRST", "SECOND")

    def __init__(self):
        self.launches, self.runs = [], []

    def __getitem__(self, grid):
        def run(*args):
            self.runs.append(args)

        def launch(*args, **constants):
            self.launches.append((grid, args, constants))
            return SimpleNamespace(run=run, function="compiled", packed_metadata="metadata")

        return launch


class Interpreted(Jitted):
    def __getitem__(self, grid):
        launch = super().__getitem__(grid)
        return lambda *args, **constants: launch(*args, **constants) and None


@pytest.fixture(autouse=True)
def stream(monkeypatch):
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: STREAM, raising=False)


def kernel(jitted, *arguments):
    # constants may come in any order
    return Kernel(jitted, (4, 2, 1), arguments, (100,), {"SECOND": 2, "FIRST": 1}, warps=8)


def test_only_the_first_launch_asks_triton():
    jitted, launches, tensors = Jitted(), Launches(), [torch.randn(3) for _ in range(2)]
    for x in tensors:
        launches((x, None), lambda *arguments: [kernel(jitted, *arguments)])
    constants = {"FIRST": 1, "SECOND": 2, "num_warps": 8}
    assert jitted.launches == [((4, 2, 1), (tensors[0], None, 100), constants)]
    head = STREAM, "compiled", "metadata", None, None, None
    assert jitted.runs == [(4, 2, 1, *head, tensors[1].data_ptr(), None, 100, 1, 2)]


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


def test_the_interpreter_remembers_nothing():
    interpreted, launches = Interpreted(), Launches()
    for _ in range(2):
        launches((torch.randn(3), None), lambda *arguments: [kernel(interpreted, *arguments)])
    assert len(interpreted.launches) == 2
    assert not interpreted.runs


def test_a_signature_is_all_that_triton_compiles_for():
    x = torch.randn(4, 8)
    assert signature([x, None]) == signature([x.clone(), None])
    others = x.double(), x[:, :4], x.t(), x[:3], x.flatten()[1:29].view(4, 7), None
    assert len({signature([each]) for each in (x, *others)}) == len(others) + 1
    # where a tensor begins decides how wide it may be loaded
    flat = torch.randn(40)
    assert signature([flat[:32]]) != signature([flat[1:33]])
