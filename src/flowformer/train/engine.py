"""Set-up of accelerate and of the process groups for the devices, precision and parallelism of a config."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from .config import TrainConfig

_AUTOCAST = ("bf16", "fp16")


def build_accelerator(config: TrainConfig) -> Accelerator:
    # accelerate keeps global state, and a process may train more than once with different settings
    AcceleratorState._reset_state(reset_partial_state=True)
    torch.set_float32_matmul_precision("high" if config.precision == "tf32" else "highest")
    plugin = None
    if config.parallel == "fsdp" and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        # the default policy does not cast: autocast sets the precision, as with one process
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap", mixed_precision_policy=MixedPrecisionPolicy()
        )
    accelerator = Accelerator(
        cpu=without_gpu(),
        mixed_precision=config.precision if config.precision in _AUTOCAST else "no",
        fsdp_plugin=plugin,
    )
    if config.precision == "fp16" and accelerator.device.type == "cpu":
        raise ValueError(
            "a run in fp16 needs a GPU, both to train and to evaluate; on a CPU, train one with precision=bf16 or "
            "float32."
        )
    if plugin is not None and accelerator.distributed_type == DistributedType.MULTI_CPU:
        # accelerate enables FSDP on GPUs only, though FSDP2 runs on CPUs too
        for state in (AcceleratorState, PartialState):
            state._shared_state.update(distributed_type=DistributedType.FSDP, fsdp_plugin=plugin)
    return accelerator


def without_gpu() -> bool:
    """The argument `cpu` of Accelerator: without cpu=True it ignores the ranks of torchrun on a machine without GPU."""
    return not torch.accelerator.is_available()


@dataclass(frozen=True)
class Share:
    """The part of a batch that this rank computes: some of the examples and, with context parallelism, a part of each.

    Args:
        rank, size: index and number of the parts into which the examples are split (data parallelism).
        context: the ranks that split each sequence; None for whole sequences.
    """

    rank: int
    size: int
    context: DeviceMesh | None = None

    @property
    def counts(self) -> bool:
        """Whether this rank adds its examples to sums: of the ranks that split a sequence, only the first does."""
        return self.context is None or self.context.get_local_rank() == 0


def build_share(config: TrainConfig, accelerator: Accelerator) -> Share:
    """The share of this rank. Ranks that split a sequence are consecutive, so that one machine can hold them."""
    processes = accelerator.num_processes
    size = config.context_parallel_size or (processes if config.parallel == "context" else 1)
    if processes % size:
        raise ValueError(
            f"context_parallel_size={size} needs a multiple of {size} processes, got {processes}. Start as many with "
            f"torchrun --nproc-per-node {size} -m flowformer.cli train, or leave context_parallel_size out."
        )
    if size == 1:
        return Share(accelerator.process_index, processes)
    names = ("data", "context")
    mesh = dist.init_device_mesh(accelerator.device.type, (processes // size, size), mesh_dim_names=names)
    return Share(mesh.get_local_rank("data"), processes // size, mesh["context"])


def check_graphs(config: TrainConfig, accelerator: Accelerator) -> None:
    """Raise unless the config and the device allow CUDA graphs."""
    redraw_every = config.model.attention_options.get("redraw_every")
    obstacles = {
        "a GPU": accelerator.device.type != "cuda",
        "one process": accelerator.num_processes > 1,
        "accumulate=1": config.accumulate > 1,
        "another precision than fp16": config.precision == "fp16",
        "redraw_every=none, since directions are drawn on the CPU": redraw_every is not None,
    }
    missing = [need for need, unmet in obstacles.items() if unmet]
    if missing:
        raise ValueError(f"graphs=true needs {', '.join(missing)}; pass graphs=false.")
