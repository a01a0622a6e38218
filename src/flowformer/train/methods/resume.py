"""The training loop of a fit that continues where it was interrupted, with the same result bit for bit."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch

from .. import checkpoints
from ..claims import Claim
from ..loop import Interrupted, Report, stop_requests
from ..record import RunLog


class Stateful(Protocol):
    """A module, an optimiser or a schedule."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: Any, /) -> Any: ...


Part = Stateful | list[Any] | dict[str, Any]


class ResumableLoop:
    """Counts the rounds of training, updates or epochs, with a log and checkpoints in the folder of the run.

    Args:
        folder: the folder of the run; its newest checkpoint is read.
        device: the device for training.
        claim: the claim of the folder.
        report: as in `loop.train`.

    Attributes: `step`, the number of rounds so far; `seconds`, the time spent on them; `log` and `report`.
    """

    def __init__(self, folder: Path, device: torch.device, claim: Claim, report: Report) -> None:
        self._folder, self._device = folder / "checkpoints", device
        self._claim, self.report = claim, report
        self.step, self.seconds = 0, 0.0
        self._saved: dict[str, Any] | None = None
        newest = checkpoints.latest(self._folder)
        if newest is not None:
            self._saved, progress = checkpoints.load_state(newest)
            self.step, self.seconds = progress["step"], progress["seconds"]
        self.log = RunLog(folder, self.step, active=True)

    @contextmanager
    def rounds(self, count: int, name: str, parts: Mapping[str, Part], every: int) -> Iterator[Iterable[int]]:
        """The numbers of the rounds to do, up to `count`.

        Args:
            name: what a round is, in the plural, such as "updates".
            parts: all that a round changes, apart from random states. The first round finds them restored.
            every: number of rounds between checkpoints. There is also one after the last round.

        Raises `Interrupted` after Ctrl-C or SIGTERM, once a checkpoint is written.
        """
        if self._saved is not None:
            self._restore(parts, self._saved)
            self._saved = None
        self.report({"kind": "start", "step": self.step, "steps": count})
        with stop_requests() as stop_requested:
            yield self._numbers(count, name, parts, every, stop_requested)

    def _numbers(
        self, count: int, name: str, parts: Mapping[str, Part], every: int, stop_requested: Callable[[], bool]
    ) -> Iterator[int]:
        start = time.perf_counter() - self.seconds
        while self.step < count:
            yield self.step + 1
            self._claim.check()
            self.step += 1
            self.seconds = time.perf_counter() - start
            self.report({"kind": "step", "step": self.step})
            stop = stop_requested()
            if stop or self.step == count or self.step % every == 0:
                self.log.write({"kind": "progress", "step": self.step, "done": self.step / count})
                self._save(parts)
            if stop:
                raise Interrupted(f"stopped after {self.step} of {count} {name}.")

    def _save(self, parts: Mapping[str, Part]) -> None:
        random = {"cpu": torch.get_rng_state()}
        if self._device.type == "cuda":
            random["cuda"] = torch.cuda.get_rng_state(self._device)
        states = {name: part if isinstance(part, (list, dict)) else part.state_dict() for name, part in parts.items()}
        progress = {"step": self.step, "seconds": self.seconds}
        checkpoints.save_state({"parts": states, "random": random}, self._folder, progress)

    def _restore(self, parts: Mapping[str, Part], saved: dict[str, Any]) -> None:
        for name, part in parts.items():
            state = saved["parts"][name]
            if isinstance(part, list):
                part[:] = state
            elif isinstance(part, dict):
                part.update(state)
            else:
                part.load_state_dict(state)
        random = saved["random"]
        torch.set_rng_state(random["cpu"])
        # a checkpoint from a machine without a GPU has no random state of one: that of the seed stays
        if self._device.type == "cuda" and "cuda" in random:
            torch.cuda.set_rng_state(random["cuda"], self._device)
