"""Updates as CUDA graphs: one launch for a whole update instead of one for each kernel.

A small model leaves the GPU idle while the host launches its kernels. After `EAGER_UPDATES` batches of a layout (names,
shapes, dtypes), the next update is captured and then replayed: the same kernels in the same order, with the same random
numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..models.classifier import SequenceEncoder
from ..models.timeseries import FlowformerTimeSeries
from .tasks import Batch

EAGER_UPDATES = 8  # Triton compiles during the first one, and capturing rare layouts does not pay off
MAX_GRAPHS = 256


def fix_shapes(module: nn.Module) -> None:
    """Turn off packing, whose shapes depend on the padding: a graph needs fixed shapes."""
    for part in module.modules():
        if isinstance(part, SequenceEncoder | FlowformerTimeSeries):
            part.pack = False


class Captured(NamedTuple):
    graph: torch.cuda.CUDAGraph
    batch: Batch  # static inputs: the memory that the graph reads


class GraphedUpdates:
    """Calls `update` with a batch, or replays the graph of that batch's layout.

    Args:
        update: forward, backward, optimiser step; it must keep the gradients and not synchronise.
        zero_grad: sets the gradients to None.
    """

    def __init__(self, update: Callable[[Batch], None], zero_grad: Callable[[], None]) -> None:
        self.update, self.zero_grad = update, zero_grad
        self._seen: Counter[tuple] = Counter()
        self._captured: dict[tuple, Captured] = {}
        self._pool = torch.cuda.graph_pool_handle()  # graphs never run at the same time, so they share memory

    def __call__(self, batch: Batch) -> None:
        layout = tuple((name, x.shape, x.dtype) for name, x in batch.items())
        captured = self._captured.get(layout)
        if captured is None and (self._seen[layout] < EAGER_UPDATES or len(self._captured) == MAX_GRAPHS):
            self._seen[layout] += 1
            self.update(batch)
            self.zero_grad()
            return
        if captured is None:
            captured = self._captured[layout] = self._capture(batch)
        for name, x in batch.items():
            captured.batch[name].copy_(x, non_blocking=True)
        captured.graph.replay()

    def _capture(self, batch: Batch) -> Captured:
        graph, static_batch = torch.cuda.CUDAGraph(), {name: _placeholder(x) for name, x in batch.items()}
        self.zero_grad()
        torch.cuda.synchronize()
        # "thread_local": the thread of a DataLoader that pins memory would end a capture in the default mode
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            self.update(static_batch)
        self.zero_grad()  # the graph owns the memory of the gradients
        return Captured(graph, static_batch)


def _placeholder(x: Tensor) -> Tensor:
    return torch.empty_like(x, device="cuda")
