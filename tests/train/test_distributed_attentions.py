"""Every attention and every model trains in two processes: DDP and FSDP2 give each parameter the gradient of one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from processes import run_ranks
from tiny_training import CONFIG, SERIES, random_cases
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from flowformer import baselines, data
from flowformer.models import DeiTConfig
from flowformer.nn import FlowDecoderLayer, FlowEncoderLayer
from flowformer.ops.variant import ABLATIONS
from flowformer.train import tasks

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")
ATTENTIONS = ["flow", *ABLATIONS, *baselines.names()]
MODELS = [*tasks.TASKS, "deit"]
WRAPPERS = ["ddp", "fsdp"]
STEPS = 2  # the first step without all gradients is noticed at the second


def attention(name):
    """A layer with the attention, and the loss of a share of a batch."""
    torch.manual_seed(0)
    kind = FlowEncoderLayer if name not in baselines.names() or baselines.get(name).bidirectional else FlowDecoderLayer
    layer = kind(16, 2, 32, attention=name, dropout=0.0, max_length=10)

    def loss(wrapped, step, rows):
        batch = torch.randn(4, 10, 16, generator=torch.Generator().manual_seed(step))
        return wrapped(batch[rows]).square().sum()

    return layer, loss


def model(name):
    """The model of a task and its loss, likewise."""
    torch.manual_seed(0)
    task = "images" if name == "deit" else name
    cases, config = (SERIES.train, CONFIG.model) if task == "series" else random_cases(task)[:2]
    if name == "deit":
        config = DeiTConfig(16, 8, 3, 2, embed_dim=16, depth=2, num_heads=2)
    config = replace(config, dropout=0.0, **{"drop_path": 0.0} if task == "images" else {})
    training = replace(CONFIG, task=task, model=config)
    objective = tasks.Objective(tasks.get(task).build(training), tasks.get(task), training)

    def loss(wrapped, step, rows):
        return wrapped(data.collate([cases[i] for i in range(4 * step, 4 * step + 4)[rows]]))

    return objective, loss


def gradients(built, wrap, rows):
    """Those of the last of a few steps, with the weights of one seed."""
    module, loss = built
    wrapped = wrap(module)
    for step in range(STEPS):
        module.zero_grad()
        loss(wrapped, step, rows).backward()
    return {name: tensor.grad for name, tensor in module.named_parameters()}


def shard(module):
    """Layers in shards of their own, as accelerate wraps them."""
    for part in module.modules():
        if part is not module and isinstance(part, tasks._LAYERS):
            fully_shard(part)
    return fully_shard(module)


def work(rank, _):
    wrappers, found = {"ddp": DistributedDataParallel, "fsdp": shard}, {}
    for build, names in ((attention, ATTENTIONS), (model, MODELS)):
        for name in names:
            for wrapper, wrap in wrappers.items():
                try:
                    grads = gradients(build(name), wrap, slice(2 * rank, 2 * rank + 2))
                except RuntimeError as error:
                    found[build.__name__, name, wrapper] = str(error)
                    continue
                whole = {key: grad.full_tensor() if wrapper == "fsdp" else grad for key, grad in grads.items()}
                found[build.__name__, name, wrapper] = whole
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return run_ranks(work, 2, tmp_path_factory)[1][0]


def check(found, build, name):
    whole = gradients(build(name), lambda module: module, slice(None))
    assert all(gradient is not None for gradient in whole.values())
    for wrapper in WRAPPERS:
        ours = found[build.__name__, name, wrapper]
        assert not isinstance(ours, str), f"{wrapper}: {ours}"
        assert whole.keys() == ours.keys()
        for parameter, truth in whole.items():
            # both average over the ranks
            torch.testing.assert_close(
                2 * ours[parameter], truth, rtol=1e-4, atol=1e-5, msg=lambda m, p=parameter, w=wrapper: f"{w} {p}: {m}"
            )


@pytest.mark.parametrize("name", ATTENTIONS)
def test_attention_in_two_processes_has_the_gradients_of_one(found, name):
    check(found, attention, name)


@pytest.mark.parametrize("name", MODELS)
def test_model_in_two_processes_has_the_gradients_of_one(found, name):
    check(found, model, name)
