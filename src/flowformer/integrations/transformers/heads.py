"""Deprecation shim, no code: what linearized heads learn is in `linearized_heads`."""

from ..._utils import moved

_HOME = f"{__package__}.linearized_heads"
__getattr__ = moved(__name__, {name: f"{_HOME}.{name}" for name in ("Exchange", "FlowHeads")})
