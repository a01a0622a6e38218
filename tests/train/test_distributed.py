"""A model on the kernels trains in several processes: shared batches and shared weights give the gradients of one."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from forks import START_METHOD
from torch import nn

from flowformer import flow_attention

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo"),
    # with a GPU every process would need one of its own
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton's interpreter"),
]


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.inputs, self.outputs = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x, is_causal):
        q, k, v = (each.unflatten(-1, (2, 4)).transpose(1, 2) for each in self.inputs(x).chunk(3, -1))
        out = flow_attention(q, k, v, is_causal=is_causal, backend="triton")
        return self.outputs(out.transpose(1, 2).flatten(2))


def gradients(wrap, x):
    """Of both directions, with the weights of one seed."""
    torch.manual_seed(0)
    model = Attention()
    wrapped = wrap(model)
    for is_causal in (False, True):
        wrapped(x, is_causal).square().mean().backward()
    return [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in model.parameters()]


def sharded(model):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    return fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def work(rank, store, results):
    import quick_interpreter

    quick_interpreter.install()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    x = batch()[2 * rank : 2 * rank + 2]
    found = {
        name: gradients(wrap, x) for name, wrap in {"DDP": nn.parallel.DistributedDataParallel, "FSDP": sharded}.items()
    }
    if rank == 0:
        torch.save(found, results)
    dist.barrier()
    dist.destroy_process_group()
    # a thread of gloo that has not ended yet would abort a process that tidies up
    os._exit(0)


def batch():
    return torch.randn(4, 10, 8, generator=torch.Generator().manual_seed(1))


def test_two_processes_have_the_gradients_of_one(tmp_path):
    # the kernels in Triton's interpreter, which the children find in the environment
    arguments = str(tmp_path / "store"), str(tmp_path / "results")
    torch.multiprocessing.start_processes(work, arguments, nprocs=2, start_method=START_METHOD)
    whole = gradients(lambda model: model, batch())
    found = torch.load(tmp_path / "results")
    assert set(found) == {"DDP", "FSDP"}
    for name, parts in found.items():
        for part, true in zip(parts, whole, strict=True):
            torch.testing.assert_close(part, true, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")
