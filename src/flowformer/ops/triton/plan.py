"""Plans: grids, constants and buffer sizes of all calls with one signature, cached because computing them takes longer
than the launches."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import torch
import triton
from torch import Tensor

from ..common import Options
from ..library import VARIANT
from ..variant import FlowVariant
from .launch import Launches

PLAN_CACHE_SIZE = 512
OPTIONS = f"{VARIANT}, bool renormalize"

Signatures = tuple[Any, ...]  # of `signature`: a tuple for each tensor, None for one that was not passed


class Tuning(NamedTuple):
    """How one kernel is launched."""

    warps: int
    stages: int  # blocks of tokens in the software pipeline
    block: int = 0  # tokens at once; causal kernels of one head all take `Config.chunk`
    eye: bool = True  # whether tokens are loaded through a product with the identity, see `tokens.load_features`


FlatOptions = Sequence[Any]  # of `flat_options`: the scale, then the fields of a FlowVariant


def flat_options(options: Options) -> FlatOptions:
    """The scalar arguments at the end of every operator's schema: `OPTIONS`."""
    return *options.as_args(), options.variant.renormalize


def variant_of(options: FlatOptions) -> FlowVariant:
    *fields, renormalize = options[1:]
    return replace(FlowVariant(*fields), renormalize=renormalize)


class Plan:
    """The kernels of a forward or a backward pass, and the sizes of their buffers.

    A subclass has methods `forward` and `backward`, which take the tensors of a call as `Argument`s and yield its
    kernels in order. A buffer is one float32 tensor, which `Argument.split` divides into parts of these sizes.

    Attributes:
        kept: sizes of what the forward pass saves for the backward pass; empty without one.
        forward_scratch, backward_scratch: sizes of what only one pass needs.
        launches: compiles the kernels at the first call, replays them at later ones.
    """

    kept: list[int]
    forward_scratch: list[int]
    backward_scratch: list[int]

    def __init__(self, wgmma: bool = True) -> None:
        self.launches = Launches(wgmma)


AnyPlan = TypeVar("AnyPlan", bound=Plan)


def plan_of(plan: Callable[..., AnyPlan], tensors: Sequence[Any], *options: Any) -> AnyPlan:
    """The plan of a call. Tensors and options are everything that kernels and buffers depend on."""
    found: AnyPlan = cached_plan(plan, signature(tensors), tensors[0].device, *options)
    return found


@functools.lru_cache(maxsize=PLAN_CACHE_SIZE)
def cached_plan(plan: Callable[..., Any], *key: Any) -> Any:
    return plan(*key)


def signature(tensors: Iterable[Tensor | None]) -> Signatures:
    """Shape, strides, dtype and alignment of each tensor: everything that Triton may specialise a kernel for."""
    return tuple([None if x is None else (x.shape, x.stride(), x.dtype, x.data_ptr() % 16) for x in tensors])


class Strides(NamedTuple):
    """The strides of batch, head and token of several tensors, as kernels take them.

    A kernel is compiled for properties that all strides share: `numbers` are in units of ALIGN, a power of two, and
    DENSE means that the stride of a token is its width.
    """

    numbers: list[int]
    constants: dict[str, Any]

    @classmethod
    def of(cls, tensors: Iterable[tuple[Sequence[int], Sequence[int]]]) -> Strides:
        """From pairs of shape (B, H, N, D) and stride."""
        tensors = list(tensors)
        # the stride of an axis of length 1 is never used
        strides = [
            [s if size > 1 else 0 for size, s in zip(shape[:3], stride[:3], strict=True)] for shape, stride in tensors
        ]
        bits = functools.reduce(operator.or_, itertools.chain(*strides), 16)
        align = bits & -bits
        dense = all(shape[2] <= 1 or stride[2] == shape[3] for shape, stride in tensors)
        return cls([s // align for s in itertools.chain(*strides)], {"ALIGN": align, "DENSE": dense})


def block_size(dim: int) -> int:
    """The width of a tile that holds `dim` columns; tensor cores need at least sixteen."""
    return max(16, int(triton.next_power_of_2(dim)))


def empty(sizes: Sequence[int], device: torch.device) -> Tensor:
    """An uninitialised buffer with parts of these sizes: one allocation costs less host time than several."""
    return torch.empty(sum(sizes), dtype=torch.float32, device=device)


def aligned(count: int) -> int:
    """Rounded up to 16 bytes, so that the alignment of the next part does not depend on the length; symbolic if the
    count is."""
    return (count + 3) // 4 * 4


def dense(x: Tensor) -> Tensor:
    """x, or a copy if a kernel cannot read its memory.

    That is if its rows are not dense, or too far apart (a block of tokens is addressed with 32 bits), or if the memory
    has the opposite sign (`torch.Tensor.is_neg`).
    """
    *_, row, column = x.stride()
    is_readable = (column == 1 or x.shape[-1] == 1) and row < 2**22 and not x.is_neg()
    return x if is_readable else x.resolve_neg().contiguous()


def contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()
