"""Launches the kernels of one rank's part of a sequence in stages, with exchanges between them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

from torch import Tensor

from .launch import Kernel, Launches, arguments


class Exchange(Protocol):
    """The interface of `context/exchange.py` that the kernels use."""

    rank: int

    def total(self, x: Tensor) -> Tensor: ...

    def softmax_total(self, x: Tensor, logs: Tensor, weighted: bool) -> tuple[Tensor, Tensor]: ...

    def before(self, x: Tensor, with_total: bool) -> tuple[Tensor, Tensor | None]: ...

    def after(self, x: Tensor, of_total: Tensor | None) -> Tensor: ...

    def running_log(self, x: Tensor, first: Tensor) -> Tensor: ...

    def log_after(self, x: Tensor, of_total: Tensor | None, running: Tensor) -> Tensor: ...


class Stages:
    """The kernels of one plan, launched up to each exchange; see `Launches`."""

    def __init__(self, wgmma: bool = True) -> None:
        self._wgmma = wgmma
        self._launches: list[Launches] = []

    def __call__(
        self, tensors: Sequence[Any], describe: Callable[..., Iterable[Kernel]], starts: Sequence[int]
    ) -> Iterator[None]:
        """Launches one stage after another.

        Args:
            describe: returns the kernels of all stages for the tensors.
            starts: the index of the first kernel of each stage.
        """
        for index, (first, last) in enumerate(itertools.pairwise([*starts, None])):

            def kernels(*given: Any, first: int | None = first, last: int | None = last) -> Iterator[Kernel]:
                return itertools.islice(describe(*given), first, last)

            def following(last: int | None = last) -> Iterator[Kernel]:
                return itertools.islice(describe(*arguments(tensors)), last, None)

            if index == len(self._launches):
                self._launches.append(Launches(self._wgmma))
            # all kernels are compiled in parallel, before the first exchange
            self._launches[index](tensors, kernels, following if index == 0 else None)
            yield
