"""Transformer encoder and decoder layers with Flow-Attention, and stacks of them.

Shapes: B batch, N tokens, M tokens of a memory, W width (embed_dim).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from ..ops import FlowState, FlowVariant
from .attention import FlowAttention, RivalAttention, build_attention, independent_sinks

_DEFAULT = FlowVariant()
_ACTIVATIONS: dict[str, type[nn.Module]] = {"gelu": nn.GELU, "relu": nn.ReLU}


class FeedForward(nn.Module):
    """Two linear maps of each token with an activation between them.

    Args:
        embed_dim, mlp_dim: width of the tokens, and inner width.
        activation: "gelu", "relu", or a callable.
        dropout: on the result.
        activation_dropout: after the activation; None means `dropout`.

    >>> FeedForward(8, 32)(torch.randn(2, 5, 8)).shape
    torch.Size([2, 5, 8])
    """

    def __init__(
        self,
        embed_dim: int,
        mlp_dim: int,
        *,
        activation: str | Callable[[Tensor], Tensor] = "gelu",
        dropout: float = 0.0,
        activation_dropout: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if isinstance(activation, str):
            if activation not in _ACTIVATIONS:
                raise ValueError(
                    f"unknown activation {activation!r}; accepted: {', '.join(_ACTIVATIONS)}, or a callable."
                )
            activation = _ACTIVATIONS[activation]()
        self.linear1 = nn.Linear(embed_dim, mlp_dim, device=device, dtype=dtype)
        self.activation = activation
        self.activation_dropout = nn.Dropout(dropout if activation_dropout is None else activation_dropout)
        self.linear2 = nn.Linear(mlp_dim, embed_dim, device=device, dtype=dtype)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = self.dropout(self.linear2(self.activation_dropout(self.activation(self.linear1(x)))))
        return x


class _Layer(nn.Module):
    """Base class of the layers: self-attention and a feed-forward network, each with pre-norm or post-norm."""

    is_causal: ClassVar[bool]

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        mlp_dim: int | None = None,
        *,
        head_dim: int | None = None,
        activation: str | Callable[[Tensor], Tensor] = "gelu",
        dropout: float = 0.0,
        activation_dropout: float | None = None,
        norm_first: bool = True,
        attention_bias: bool = True,
        eps: float = 1e-5,
        attention: str = "flow",
        attention_options: Mapping[str, Any] | None = None,
        max_length: int | None = None,
        variant: FlowVariant | str = _DEFAULT,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.norm_first = norm_first
        self.attention = build_attention(
            attention,
            embed_dim,
            num_heads,
            attention_options=attention_options,
            max_length=max_length,
            head_dim=head_dim,
            bias=attention_bias,
            dropout=dropout,
            is_causal=self.is_causal,
            variant=variant,
            device=device,
            dtype=dtype,
        )
        self.mlp = FeedForward(
            embed_dim,
            4 * embed_dim if mlp_dim is None else mlp_dim,
            activation=activation,
            dropout=dropout,
            activation_dropout=activation_dropout,
            device=device,
            dtype=dtype,
        )
        self.attention_norm = nn.LayerNorm(embed_dim, eps=eps, device=device, dtype=dtype)
        self.mlp_norm = nn.LayerNorm(embed_dim, eps=eps, device=device, dtype=dtype)

    def _residual(self, norm: nn.Module, branch: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return x + branch(norm(x)) if self.norm_first else norm(x + branch(x))

    def extra_repr(self) -> str:
        return f"norm_first={self.norm_first}"


class FlowEncoderLayer(_Layer):
    """A transformer encoder layer: bidirectional self-attention and a feed-forward network.

    Args:
        embed_dim, num_heads: as for `FlowAttention`.
        mlp_dim: inner width of the feed-forward network; None means 4 · embed_dim.
        head_dim, variant: as for `FlowAttention`.
        activation: "gelu", "relu", or a callable.
        dropout: on the results of attention and feed-forward network, before they are added to the residual stream.
        activation_dropout: inside the feed-forward network; None means `dropout`.
        norm_first: True for pre-norm, x + f(norm(x)); False for post-norm, norm(x + f(x)).
        attention_bias: whether the projections of the attention have a bias.
        eps: epsilon of the layer norms.
        attention: "flow", or the name of a rival attention; `baselines.names` lists them.
        attention_options: options of the attention, see `build_attention`.
        max_length: the longest sequence, for rivals whose parameters depend on it.

    >>> FlowEncoderLayer(32, 4)(torch.randn(2, 10, 32)).shape
    torch.Size([2, 10, 32])
    """

    is_causal = False

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
    ) -> Tensor:
        """Return the tokens x (B, N, W) after the layer.

        Args:
            mask: (B, N) bool, True = takes part.
            cu_seqlens, max_seqlen: bounds and longest length of packed sequences x (1, T, W), as for `FlowAttention`.
        """
        attend = partial(self.attention, key_mask=mask, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen)
        x = self._residual(self.attention_norm, attend, x)
        return self._residual(self.mlp_norm, self.mlp, x)


class FlowDecoderLayer(_Layer):
    """A transformer decoder layer: causal self-attention, optional cross-attention to a memory, feed-forward network.

    Cross-attention to the memory has no competition and no allocation (`independent_sinks`): both use sums over all
    queries, through which a token would depend on later ones.

    Args:
        memory_dim: width of the memory; None builds a layer without cross-attention.
        All others: as for `FlowEncoderLayer`.

    >>> layer = FlowDecoderLayer(32, 4, memory_dim=16)
    >>> layer(torch.randn(2, 10, 32), torch.randn(2, 7, 16)).shape
    torch.Size([2, 10, 32])
    """

    is_causal = True

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        mlp_dim: int | None = None,
        *,
        memory_dim: int | None = None,
        attention: str = "flow",
        variant: FlowVariant | str = _DEFAULT,
        **options: Any,
    ) -> None:
        super().__init__(embed_dim, num_heads, mlp_dim, attention=attention, variant=variant, **options)
        self.cross_attention: FlowAttention | RivalAttention | None = None
        if memory_dim is not None:
            self_attention = self.attention
            factory: dict[str, Any] = {key: options.get(key) for key in ("device", "dtype")}
            self.cross_attention = build_attention(
                attention,
                embed_dim,
                num_heads,
                kdim=memory_dim,
                vdim=memory_dim,
                head_dim=self_attention.head_dim,
                bias=self_attention.v_proj.bias is not None,
                dropout=self_attention.dropout.p,
                variant=independent_sinks(variant),
                max_length=options.get("max_length"),
                attention_options=options.get("attention_options"),
                **factory,
            )
            self.cross_norm = nn.LayerNorm(embed_dim, eps=self.attention_norm.eps, **factory)

    def new_state(self, batch_size: int) -> FlowState:
        """The empty state of `batch_size` sequences."""
        if not isinstance(self.attention, FlowAttention):
            raise NotImplementedError(
                f"{self.attention.mechanism.name} attention has no state of constant size; run the whole sequence."
            )
        return self.attention.new_state(batch_size)

    def forward(
        self,
        x: Tensor,
        memory: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        state: FlowState | None = None,
    ) -> Tensor | tuple[Tensor, FlowState]:
        """Return the tokens after the layer, and with a state also the state after the last token.

        Args:
            x: (B, N, W), the tokens; with a state, only the new ones.
            memory: (B, M, memory_dim), for a layer built with memory_dim.
            mask, memory_mask: (B, N) and (B, M) bool, True = takes part.
            state: the state of the preceding tokens, from `new_state` or from the previous call.
        """
        if (memory is None) != (self.cross_attention is None):
            raise ValueError(
                "got no memory, but the layer was built with memory_dim."
                if memory is None
                else "got a memory, but the layer was built without memory_dim. Pass its width to FlowDecoderLayer."
            )

        def attend(x: Tensor) -> Tensor:
            nonlocal state
            if state is None:
                x = self.attention(x, key_mask=mask)
            else:
                x, state = self.attention(x, key_mask=mask, state=state)
            return x

        x = self._residual(self.attention_norm, attend, x)
        if self.cross_attention is not None:
            x = self._residual(self.cross_norm, partial(self.cross_attention, key=memory, key_mask=memory_mask), x)
        x = self._residual(self.mlp_norm, self.mlp, x)
        return x if state is None else (x, state)


class FlowEncoder(nn.Module):
    """A stack of encoder layers, and an optional norm after the last.

    >>> encoder = FlowEncoder([FlowEncoderLayer(32, 4) for _ in range(2)], norm=nn.LayerNorm(32))
    >>> encoder(torch.randn(2, 10, 32), mask=torch.ones(2, 10, dtype=torch.bool)).shape
    torch.Size([2, 10, 32])
    """

    def __init__(self, layers: Iterable[nn.Module], norm: nn.Module | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.norm = norm

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the tokens x (B, N, W) after all layers; mask (B, N) bool, True = takes part."""
        for layer in self.layers:
            x = layer(x, mask)
        return x if self.norm is None else self.norm(x)


class FlowDecoder(nn.Module):
    """A stack of decoder layers, and an optional norm after the last.

    >>> decoder = FlowDecoder([FlowDecoderLayer(32, 4) for _ in range(2)], norm=nn.LayerNorm(32))
    >>> x = torch.randn(2, 10, 32)
    >>> _, states = decoder(x[:, :9], states=decoder.new_states(2))
    >>> last, states = decoder(x[:, 9:], states=states)
    >>> torch.allclose(last, decoder(x)[:, 9:], atol=1e-5)
    True
    """

    def __init__(self, layers: Iterable[FlowDecoderLayer], norm: nn.Module | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.norm = norm

    def new_states(self, batch_size: int) -> list[FlowState]:
        """The empty states of `batch_size` sequences, one per layer."""
        return [cast(FlowDecoderLayer, layer).new_state(batch_size) for layer in self.layers]

    def forward(
        self,
        x: Tensor,
        memory: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        states: Sequence[FlowState] | None = None,
    ) -> Tensor | tuple[Tensor, list[FlowState]]:
        """Return the tokens after all layers, and with states also the states after the last token.

        Args:
            x, memory, mask, memory_mask: as for `FlowDecoderLayer`.
            states: one per layer, from `new_states` or from the previous call.
        """
        if states is not None and len(states) != len(self.layers):
            raise ValueError(
                f"got {len(states)} states for {len(self.layers)} layers; pass one a layer, as new_states."
            )
        new_states = []
        for i, layer in enumerate(self.layers):
            state = None if states is None else states[i]
            x = layer(x, memory, mask=mask, memory_mask=memory_mask, state=state)
            if states is not None:
                x, new_state = x
                new_states.append(new_state)
        x = x if self.norm is None else self.norm(x)
        return x if states is None else (x, new_states)
