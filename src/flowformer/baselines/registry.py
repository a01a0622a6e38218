"""The registry of rival attentions: the base class `Mechanism`, and functions to list and build them by name."""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from .._utils import check_choice, check_options
from ..ops.checks import attention_inputs, attention_masks, causal_lengths


class Mechanism(nn.Module):
    """An attention between projected heads; a subclass declares its capabilities and implements `attend`.

    Shapes are those of `flow_attention`: query (B, H, N, D), key (B, H, M, D), value (B, H, M, E), masks (B, N) and
    (B, M) bool, True = takes part. A query that is masked, or has no valid source, gives 0.
    """

    name: ClassVar[str]
    # capabilities; an instance may lose one through its options
    bidirectional: bool = True
    causal: bool = True
    masks: bool = True
    cross: bool = True  # queries and keys may differ in number
    linear: bool = False  # time and memory grow (nearly) linearly with the length
    # those of query and key that the result depends on; attention modules create no projection for the others
    reads: tuple[str, ...] = ("query", "key")

    def __init__(
        self, *, num_heads: int | None = None, head_dim: int | None = None, max_length: int | None = None
    ) -> None:
        """Accept all sizes, since `build` passes them to every rival: a subclass uses some and passes the others on."""
        super().__init__()

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        is_causal: bool = False,
        query_mask: Tensor | None = None,
        key_mask: Tensor | None = None,
    ) -> Tensor:
        return self._checked_call(self.attend, query, key, value, is_causal, query_mask, key_mask)

    def weigh(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        """Return the attention matrix times the values, before any step that is not linear in the values.

        Args: as for `forward`.
        """
        return self._checked_call(self.weighted, query, key, value, **options)

    def _checked_call(
        self, attend, query, key, value, is_causal: bool = False, query_mask=None, key_mask=None
    ) -> Tensor:
        """Call `attend` after checking that this mechanism supports the inputs; raise if it does not."""
        query, key, value = attention_inputs(query, key, value, enable_gqa=False)
        attention_masks(query, key, query_mask, key_mask)
        if is_causal:
            causal_lengths(query, key)
        requested = {
            "bidirectional": not is_causal,
            "causal": is_causal,
            "masks": query_mask is not None or key_mask is not None,
            "cross": query.shape[2] != key.shape[2],
        }
        missing = [ability for ability, is_needed in requested.items() if is_needed and not getattr(self, ability)]
        if missing:
            others = [name for name in names() if all(getattr(get(name), ability) for ability in missing)]
            others = [name for name in others if name != self.name]
            raise NotImplementedError(
                f"{self.name} attention does not support: {', '.join(missing)}. These do: {', '.join(others)}."
            )
        if query.shape[2] == 0 or key.shape[2] == 0:
            return query.new_zeros(*query.shape[:3], value.shape[-1])
        # without autocast, which would compute the sums over many tokens in low precision
        device = query.device.type
        with torch.autocast(device, enabled=False) if torch.amp.is_autocast_available(device) else nullcontext():
            result = attend(query, key, value, is_causal, query_mask, key_mask)
        return result if query_mask is None else result.masked_fill(~query_mask[:, None, :, None], 0)

    def attend(self, query, key, value, is_causal: bool, query_mask: Tensor | None, key_mask: Tensor | None) -> Tensor:
        """Return the result, (B, H, N, E); rows of masked queries may have any finite values."""
        raise NotImplementedError

    def attends_packed(self, query: Tensor, value: Tensor, lengths: list[int]) -> bool:
        """Whether `attend_packed` takes sequences of these lengths, dtype and device; otherwise they are padded."""
        return False

    def attend_packed(
        self, query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, lengths: list[int], *, is_causal: bool
    ) -> Tensor:
        """Attend within packed sequences.

        Args:
            query, key, value: (T, H, D), (T, H, D) and (T, H, E); the result is (T, H, E).
            cu_seqlens, lengths: (B + 1,) bounds of the sequences, which end with T, and their lengths.
        """
        raise NotImplementedError

    def weighted(
        self, query, key, value, is_causal: bool, query_mask: Tensor | None, key_mask: Tensor | None
    ) -> Tensor:
        """Return the result of `weigh` for checked inputs. Override it if `attend` is not linear in the values."""
        return self.attend(query, key, value, is_causal, query_mask, key_mask)


_REGISTRY: dict[str, type[Mechanism]] = {}
_M = TypeVar("_M", bound=type[Mechanism])


def register(mechanism: _M) -> _M:
    """Add a class to the registry under its `name`; a class decorator."""
    _REGISTRY[mechanism.name] = mechanism
    return mechanism


def names() -> list[str]:
    """List the names that `build` accepts.

    >>> "softmax" in names()
    True
    """
    return sorted(_REGISTRY)


def get(name: str) -> type[Mechanism]:
    """Return the class of a rival attention; its attributes are the capabilities."""
    check_choice("attention", name, names())
    return _REGISTRY[name]


def capabilities() -> str:
    """Return a Markdown table of the capabilities of each rival."""
    abilities = ("bidirectional", "causal", "masks", "cross", "linear")
    lines = [f"| attention | {' | '.join(abilities)} |", "| --- " * (1 + len(abilities)) + "|"]
    for name in names():
        marks = ("yes" if getattr(get(name), ability) else "no" for ability in abilities)
        lines.append(f"| `{name}` | {' | '.join(marks)} |")
    return "\n".join(lines)


def options(name: str) -> dict[str, inspect.Parameter]:
    """Return the options of a rival besides its sizes, with their types and defaults.

    >>> {option: parameter.default for option, parameter in options("linformer").items()}
    {'rank': 256, 'shared': True}
    """
    sizes = ("num_heads", "head_dim", "max_length")
    parameters = inspect.signature(get(name), eval_str=True).parameters
    return {
        option: parameter
        for option, parameter in parameters.items()
        if option not in sizes and parameter.kind is not parameter.VAR_KEYWORD
    }


def build(name: str, *, num_heads: int, head_dim: int, max_length: int | None = None, **chosen) -> Mechanism:
    """Build a rival attention by name.

    Args:
        num_heads, head_dim: H and D, used by rivals with parameters.
        max_length: longest sequence, required by rivals whose parameters depend on it.
        chosen: values for some of the rival's `options`.

    >>> build("linformer", num_heads=4, head_dim=8, max_length=100, rank=16).projection.shape
    torch.Size([1, 100, 16])
    """
    check_options(f"{name} attention", chosen, options(name))
    return get(name)(num_heads=num_heads, head_dim=head_dim, max_length=max_length, **chosen)
