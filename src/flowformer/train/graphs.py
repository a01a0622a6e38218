"""Updates as CUDA graphs: the host launches an update at once instead of kernel by kernel.

A small model leaves the GPU idle while the host launches its kernels. An update whose batch has a layout that came
before is captured, and replayed from then on: the same kernels in the same order with the same random numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .tasks import Batch

EAGER = 8  # updates of a layout before it is captured: Triton compiles in the first, and a capture has to pay off
MOST = 256  # layouts


class Captured(NamedTuple):
    graph: torch.cuda.CUDAGraph
    batch: Batch  # whose memory the graph reads


class GraphedUpdates:
    """Calls `update` for a batch, or replays what it did for a batch of that layout.

    Args:
        update: forward, backward, optimiser; it must leave the gradients in place, and wait for nothing.
        forget: sets the gradients to None.
    """

    def __init__(self, update: Callable[[Batch], None], forget: Callable[[], None]) -> None:
        self.update, self.forget = update, forget
        self._seen: Counter[tuple] = Counter()
        self._captured: dict[tuple, Captured] = {}
        self._pool = torch.cuda.graph_pool_handle()  # updates follow each other: their memory may be the same

    def __call__(self, batch: Batch) -> None:
        layout = tuple((name, x.shape, x.dtype) for name, x in batch.items())
        captured = self._captured.get(layout)
        if captured is None and (self._seen[layout] < EAGER or len(self._captured) == MOST):
            self._seen[layout] += 1
            self.update(batch)
            self.forget()
            return
        if captured is None:
            captured = self._captured[layout] = self._capture(batch)
        for name, x in batch.items():
            captured.batch[name].copy_(x, non_blocking=True)
        captured.graph.replay()

    def _capture(self, batch: Batch) -> Captured:
        graph, fixed = torch.cuda.CUDAGraph(), {name: _placeholder(x) for name, x in batch.items()}
        self.forget()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, pool=self._pool):
            self.update(fixed)
        self.forget()  # the graph keeps their memory
        return Captured(graph, fixed)


def _placeholder(x: Tensor) -> Tensor:
    return torch.empty_like(x, device="cuda")
