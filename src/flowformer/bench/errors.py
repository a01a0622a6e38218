"""The error rule of tests and fuzzer: how far a result may be from the float64 oracle.

The error of a result may be at most twice the error of the same computation in plain PyTorch at the same dtype, and
three times for a gradient. A correctly rounded result always passes, and so do a few rounding errors of the sums.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

FORWARD, GRADIENT = 2, 3
# a few rounding errors of float32
ROUNDING = 3e-7


class Error(NamedTuple):
    """How far a tensor is from the truth."""

    relative: float  # ‖value − truth‖ / ‖truth‖, 0 where both are 0
    ratio: float  # error / allowed error, at most 1 if the rule is obeyed; NaN or inf if the value is not finite

    @property
    def obeys(self) -> bool:
        return self.ratio <= 1


def relative_error(value: Tensor, truth: Tensor) -> float:
    """‖value − truth‖ / ‖truth‖ in float64. NaN stays NaN: check `error <= tolerance`, which is then False."""
    value, truth = value.double().cpu(), truth.double().cpu()
    return ((value - truth).norm() / truth.norm().clamp_min(1e-300)).item()


def measure(
    value: Tensor,
    plain: Tensor,
    truth: Tensor,
    factor: int,
    dtype: torch.dtype,
    whole: float | None = None,
    truncates: bool = False,
    is_sum: bool = False,
) -> Error:
    """The error of a value, compared with the error of plain PyTorch.

    Args:
        factor: FORWARD or GRADIENT.
        plain: PyTorch's result. For float64 inputs pass the float32 result, whose error is scaled: in float64,
            plain PyTorch is the oracle itself.
        dtype: of the inputs; one rounding to it is allowed.
        whole: the norm that rounding errors of sums are relative to; None is the norm of the truth. For gradients, pass
            the norm of all gradients: one of them may be zero by cancellation (all of dQ and dK where N = 1).
        truncates: the value was rounded toward zero, with twice the error of rounding to nearest.
        is_sum: the value is a gradient of the scalars of a state or of the powers, to which every token contributes.
    """
    truth = truth.double()
    error, plain_error, size = ((x.double() - truth).norm().item() for x in (value, plain, torch.zeros_like(truth)))
    unit = torch.finfo(dtype).eps / (1 if truncates else 2)
    # float64 has 29 more bits than float32; minus two, since the truth is rounded too
    scale = 2**-27 if dtype == torch.float64 else 2 if truncates else 1
    rounding = ROUNDING * scale * (size if whole is None else whole)
    if whole is not None and unit > 2**-24:
        # in half precision, the terms that cancel in a gradient of zero were rounded: allow a sixteenth of a rounding
        # error of `whole`, and half of one for a sum over all tokens
        rounding = max(rounding, unit / (2 if is_sum else 16) * whole)
    # max ignores NaN in its second argument: if the plain result is NaN, only rounding errors are allowed
    allowed = max(unit * size + factor * rounding, factor * scale * plain_error)
    relative = error / size if size else 0.0 if error == 0 else float("inf")
    ratio = error / allowed if allowed else 0.0 if error == 0 else float("inf")
    return Error(relative, ratio)
