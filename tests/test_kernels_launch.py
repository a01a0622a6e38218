"""A kernel that was launched once is launched again with what it was compiled for, and only its tensors change."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from flowformer.ops.kernels.launch import MANY, Kernel, Launched, signature

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


@pytest.fixture(autouse=True)
def stream(monkeypatch):
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: STREAM, raising=False)


def describe(jitted):
    # constants may come in any order
    return lambda: Kernel(jitted, (4, 2, 1), (100,), {"SECOND": 2, "FIRST": 1}, warps=8)


def test_only_the_first_launch_asks_triton():
    jitted, launched, tensors = Jitted(), Launched(), [torch.randn(3) for _ in range(2)]
    for x in tensors:
        launched("a kind", (x, None), describe(jitted))
    constants = {"FIRST": 1, "SECOND": 2, "num_warps": 8}
    assert jitted.launches == [((4, 2, 1), (tensors[0], None, 100), constants)]
    head = STREAM, "compiled", "metadata", None, None, None
    assert jitted.runs == [(4, 2, 1, *head, tensors[1].data_ptr(), None, 100, 1, 2)]


def test_other_kinds_are_launched_anew_and_many_are_forgotten():
    jitted, launched, x = Jitted(), Launched(), torch.randn(3)
    for kind in [*range(MANY + 1), MANY, 0]:
        launched(kind, (x, None), describe(jitted))
    assert len(jitted.launches) == MANY + 2
    assert len(jitted.runs) == 1


def test_a_signature_is_all_that_triton_compiles_for():
    x = torch.randn(4, 8)
    assert signature([x, None]) == signature([x.clone(), None])
    others = x.double(), x[:, :4], x.t(), x[:3], x.flatten()[1:29].view(4, 7), None
    assert len({signature([each]) for each in (x, *others)}) == len(others) + 1
    # where a tensor begins decides how wide it may be loaded
    flat = torch.randn(40)
    assert signature([flat[:32]]) != signature([flat[1:33]])
