"""Every attention trains in two processes: DDP finds a gradient for each parameter, that of the whole batch."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from flowformer import baselines
from flowformer.nn import FlowDecoderLayer, FlowEncoderLayer
from flowformer.ops.variant import ABLATIONS

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")
NAMES = ["flow", *ABLATIONS, *baselines.names()]
STEPS = 2  # the first step without all gradients is noticed at the second


def batch(step):
    return torch.randn(4, 10, 16, generator=torch.Generator().manual_seed(step))


def gradients(name, wrap, rows):
    """Those of the last of a few steps, with the weights of one seed."""
    torch.manual_seed(0)
    kind = FlowEncoderLayer if name not in baselines.names() or baselines.get(name).bidirectional else FlowDecoderLayer
    model = kind(16, 2, 32, attention=name, dropout=0.0, max_length=10)
    wrapped = wrap(model)
    for step in range(STEPS):
        model.zero_grad()
        wrapped(batch(step)[rows]).square().mean().backward()
    return {parameter: tensor.grad for parameter, tensor in model.named_parameters()}


def work(rank, store, results):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    found = {}
    for name in NAMES:
        try:
            found[name] = gradients(name, DistributedDataParallel, slice(2 * rank, 2 * rank + 2))
        except RuntimeError as error:
            found[name] = str(error)
    if rank == 0:
        torch.save(found, results)
    dist.barrier()
    dist.destroy_process_group()
    # a thread of gloo that has not ended yet would abort a process that tidies up
    os._exit(0)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    torch.multiprocessing.spawn(work, (str(folder / "store"), str(folder / "results")), nprocs=2)
    return torch.load(folder / "results")


@pytest.mark.parametrize("name", NAMES)
def test_two_processes_have_the_gradients_of_one(found, name):
    assert not isinstance(found[name], str), found[name]
    whole = gradients(name, lambda model: model, slice(None))
    assert whole.keys() == found[name].keys()
    for parameter, truth in whole.items():
        torch.testing.assert_close(
            found[name][parameter], truth, rtol=1e-4, atol=1e-6, msg=lambda m, p=parameter: p + m
        )
