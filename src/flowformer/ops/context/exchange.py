"""The collectives of context parallelism, and a count of the bytes sent.

Sums are taken in rank order, so results are the same in every run with the same number of ranks, P.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

Group = dist.ProcessGroup | DeviceMesh
# Bytes over all ranks up to which every rank gets the numbers of all ranks in one collective. Above, each rank sums one
# slice of the numbers: two collectives, but 2(P − 1)/P times the bytes instead of P − 1 times.
GATHERED_BYTES = 2**15


@dataclass(eq=False)  # compared by identity: counters with equal numbers are still different counters
class Traffic:
    """Counters of what this rank has sent.

    Args:
        stages: exchanges; each depends on the one before.
        collectives: calls of torch.distributed; an exchange takes one or two.
        bytes: sent to other ranks.
        checks: bytes sent to compare the arguments of the ranks, not included in `bytes`.
    """

    stages: int = 0
    collectives: int = 0
    bytes: int = 0
    checks: int = 0


_open: list[Traffic] = []


@contextmanager
def traffic() -> Iterator[Traffic]:
    """Count what context parallelism sends from this rank, forward and backward.

    >>> with traffic() as sent:
    ...     pass
    >>> sent.stages
    0
    """
    count = Traffic()
    _open.append(count)
    try:
        yield count
    finally:
        _open.remove(count)


def process_group(group: Group) -> dist.ProcessGroup:
    """The process group of a group or of a one-dimensional mesh that contains this process."""
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            names = group.mesh_dim_names or ()
            raise ValueError(
                f"group must be a mesh with one dimension, got {group.ndim} with the names {tuple(names)}. Pass the "
                "dimension over which the sequence is cut, as in mesh['context']."
            )
        group = group.get_group()
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group must be a ProcessGroup or a DeviceMesh, got {type(group).__name__}.")
    if dist.get_rank(group) < 0:
        raise ValueError("this process is not a rank of the group.")
    return group


class Exchange:
    """Sums over the ranks of a group, of tensors (rows, ...) with one row per split sequence.

    Args:
        rows: the indices of the sequences that have tokens on this rank; None if all rows are on every rank.
        num_rows: the number of rows over all ranks; not used without `rows`.
    """

    def __init__(self, group: dist.ProcessGroup, rows: Tensor | None = None, num_rows: int = 0) -> None:
        self.group, self.rows, self.num_rows = group, rows, num_rows
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def total(self, x: Tensor) -> Tensor:
        """The sum of all ranks' x."""
        self._begin_stage()
        x = self._all_rows(x)
        return self._own_rows(self._join(self._collect(x.flatten()).sum(0), x))

    def softmax_total(self, x: Tensor, logs: Tensor, weighted: bool) -> tuple[Tensor, Tensor]:
        """The sum of all ranks' x (rows, H, ...), and log Σ exp of all ranks' logs (rows, H, L).

        If weighted, x was computed with a softmax over this rank's tokens, whose log-normaliser is logs[..., 0]; the
        terms are rescaled to those of a softmax over the tokens of all ranks.
        """
        self._begin_stage()
        x, logs = self._all_rows(x), self._all_rows(logs, torch.finfo(logs.dtype).min)
        received = self._collect(x.flatten(), logs.flatten())
        numbers, of_ranks = received.tensor_split([received.shape[1] - logs.numel()], 1)
        of_ranks = of_ranks.view(-1, *logs.shape)
        merged = of_ranks.logsumexp(0)
        if weighted:
            weights = (of_ranks - merged)[..., 0].exp().flatten(1)  # (P, rows·H)
            start = 0 if self._is_small(x) else self.rank * numbers.shape[1]
            number = torch.arange(start, start + numbers.shape[1], device=x.device)
            head = number.div(max(math.prod(x.shape[2:]), 1), rounding_mode="floor")
            # clamped, since the last slice is padded with zeros, which belong to no head
            numbers = numbers * weights[:, head.clamp_max(max(weights.shape[1] - 1, 0))]
        return self._own_rows(self._join(numbers.sum(0), x)), self._own_rows(merged)

    def before(self, x: Tensor, with_total: bool) -> tuple[Tensor, Tensor | None]:
        """The sum of x over earlier ranks and, if `with_total`, over all ranks."""
        return self._running(x, with_total, reverse=False)

    def after(self, x: Tensor, of_total: Tensor | None) -> Tensor:
        """The gradient of the argument of `before`, from the gradients of the two sums that it returned."""
        if of_total is None:
            return self._running(x, False, reverse=True)[0]
        after, total = self._running(torch.stack([x, of_total], 1), True, reverse=True)
        assert total is not None
        return after[:, 0] + total[:, 1]

    def running_log(self, x: Tensor, first: Tensor) -> Tensor:
        """log(exp(first) + Σ exp(x)), Σ over the ranks before each rank and at the end over all, (P + 1, rows, ...)."""
        every = self._gathered(x, torch.finfo(x.dtype).min)
        return torch.cat([first[None], every]).logcumsumexp(0)

    def log_after(self, x: Tensor, of_total: Tensor | None, running: Tensor) -> Tensor:
        """The gradient of this rank's running[rank + 1].

        Args:
            x, of_total: on every rank, the gradients of its running[rank] and of running[-1].
        """
        own = x[:, None] if of_total is None else torch.stack([x, of_total], 1)
        grads, end = self._gathered(own, 0.0), running[self.rank + 1]
        grad = ((end - running[self.rank + 1 : -1]).exp() * grads[self.rank + 1 :, :, 0]).sum(0)
        return grad if of_total is None else grad + (end - running[-1]).exp() * grads[:, :, 1].sum(0)

    def integers(self, x: Tensor) -> Tensor:
        """All ranks' x, (P, ...), for integers such as lengths of sequences."""
        return self._gather(x)

    def _running(self, x: Tensor, with_total: bool, reverse: bool) -> tuple[Tensor, Tensor | None]:
        """The sum of x over the ranks before this one, or after it if `reverse`, and the sum over all ranks."""
        self._begin_stage()
        x = self._all_rows(x)
        numbers = self._collect(x.flatten())
        if reverse:
            numbers = numbers.flip(0)
        running = F.pad(numbers, (0, 0, 1, 0)).cumsum(0)  # (P + 1, ...)
        before, total = running[:-1], running[-1]
        if reverse:
            before = before.flip(0)
        own = before[self.rank] if self._is_small(x) else self._swap(before).flatten()[: x.numel()]
        return self._own_rows(own.view_as(x)), self._own_rows(self._join(total, x)) if with_total else None

    def _gathered(self, x: Tensor, missing: float) -> Tensor:
        """All ranks' x, (P, rows, ...), with `missing` in rows that a rank does not have."""
        self._begin_stage()
        gathered = self._gather(self._all_rows(x, missing))
        return gathered if self.rows is None else gathered[:, self.rows]

    def _all_rows(self, x: Tensor, missing: float = 0.0) -> Tensor:
        """This rank's rows in a tensor with the rows of all ranks, `missing` in those of other ranks."""
        if self.rows is None:
            return x
        return x.new_full((self.num_rows, *x.shape[1:]), missing).index_copy_(0, self.rows, x)

    def _own_rows(self, x: Tensor) -> Tensor:
        return x if self.rows is None else x[self.rows]

    def _is_small(self, x: Tensor) -> bool:
        return self.size * x.nbytes <= GATHERED_BYTES

    def _collect(self, x: Tensor, extra: Tensor | None = None) -> Tensor:
        """The numbers that this rank sums, one row per rank: all of x if it is small, else one slice. `extra`, if any,
        is appended to every row in full."""
        if self._is_small(x):
            return self._gather(x if extra is None else torch.cat([x, extra]))
        slices = F.pad(x, (0, -len(x) % self.size)).view(self.size, -1)
        return self._swap(slices if extra is None else torch.cat([slices, extra.expand(self.size, -1)], 1))

    def _join(self, own: Tensor, like: Tensor) -> Tensor:
        """The whole sum in the shape of `like`, from the slices that the ranks have summed."""
        if not self._is_small(like):
            own = self._gather(own).flatten()[: like.numel()]
        return own.view_as(like)

    def _gather(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        gathered = x.new_empty(self.size, *x.shape)
        self._count((self.size - 1) * x.nbytes)
        if x.numel():
            self._run(dist.all_gather_into_tensor, gathered.view(-1), x.view(-1))
        return gathered

    def _swap(self, x: Tensor) -> Tensor:
        """Send row r of x (P, ...) to rank r. Returns: the rows received from all ranks, (P, ...)."""
        x = x.contiguous()
        received = torch.empty_like(x)
        self._count((self.size - 1) * x[0].nbytes)
        self._run(dist.all_to_all_single, received, x)
        return received

    def _run(self, collective: Callable[..., Any], received: Tensor, sent: Tensor) -> None:
        try:
            collective(received, sent, group=self.group)
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {self.rank} of the {self.size} that share a sequence got no answer: another rank has ended, or "
                f"did not make this call within the timeout of the group. {error}"
            ) from error

    @staticmethod
    def _begin_stage() -> None:
        for each in _open:
            each.stages += 1

    @staticmethod
    def _count(sent: int) -> None:
        for each in _open:
            each.collectives += 1
            each.bytes += sent


def tokens_before(counts: Tensor, group: Group) -> Tensor:
    """The number of tokens of each sequence on earlier ranks, (B,), from this rank's counts (B,)."""
    exchange = Exchange(process_group(group))
    return exchange.integers(counts)[: exchange.rank].sum(0)


def sum_over_ranks(x: Tensor, group: Group) -> Tensor:
    """The sum of all ranks' x, without a gradient."""
    return Exchange(process_group(group)).integers(x).sum(0)


def first_after(tokens: Tensor, missing: int, group: Group) -> Tensor:
    """The first column of the tokens (B, N) of the next rank that has tokens, (B,); `missing` if no later rank has."""
    exchange = Exchange(process_group(group))
    first = F.pad(tokens, (0, 1), value=missing)[:, 0].long()
    every = exchange.integers(torch.cat([first, first.new_tensor([tokens.shape[1]])]))[exchange.rank + 1 :]
    following: Tensor = next((rank[:-1] for rank in every if rank[-1] > 0), torch.full_like(first, missing))
    return following


_agreed: set[tuple[str, int]] = set()


def check_agreement(group: dist.ProcessGroup, device: torch.device, arguments: str, refused: bool = False) -> None:
    """Raise on every rank if the ranks call with different arguments, which would deadlock.

    On a CPU the ranks compare at every call. On other devices, where reading the result would synchronise, they compare
    when a rank sees these arguments for the first time: a later disagreement is detected only if the arguments are new
    to all ranks, and a refusal is not announced.

    Args:
        arguments: a description of the call, which must be equal on all ranks; if `refused`, the error of this rank.
        refused: this rank cannot make the call. The other ranks raise; the caller raises its own error.
    """
    digest = 0 if refused else int.from_bytes(hashlib.sha256(arguments.encode()).digest()[:7], "big") + 1
    key = (group.group_name, digest)
    if device.type != "cpu" and (refused or key in _agreed):
        return
    exchange = Exchange(group)
    digests = torch.empty(exchange.size, dtype=torch.int64, device=device)
    exchange._run(dist.all_gather_into_tensor, digests, torch.tensor([digest], device=device))
    for each in _open:
        each.checks += 8 * (exchange.size - 1)
    if (digests == digest).all() and not refused:
        _agreed.add(key)
        return
    descriptions: list[str] = [""] * exchange.size
    dist.all_gather_object(descriptions, arguments, group=group)
    if not refused:
        lines = "\n  ".join(f"rank {rank}: {each}" for rank, each in enumerate(descriptions))
        raise ValueError(
            "the ranks that share a sequence must make the same call, apart from the lengths of their parts; got\n  "
            + lines
        )
