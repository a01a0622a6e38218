"""Kullback–Leibler divergence of a student's next-token distribution from its teacher's, in chunks of tokens.

Shapes: T tokens, V words of the vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CHUNK = 2**22  # logits that are held in float32 at once


def kl_divergence(student: Tensor, teacher: Tensor) -> Tensor:
    """The mean over tokens of KL(teacher ‖ student), for logits (T, V) in any floating dtype.

    Logits are the largest tensors of a language model with a large vocabulary, and log-softmax in float32 needs several
    copies of them. Here only one chunk is in float32 at a time, and the gradient is computed with it, in the dtype of
    the logits. The teacher gets no gradient.

    >>> logits = torch.tensor([[2.0, 0.0], [0.0, 1.0]])
    >>> kl_divergence(logits, logits).item()
    0.0
    """
    divergence: Tensor = _KLDivergence.apply(student, teacher)
    return divergence


class _KLDivergence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, student: Tensor, teacher: Tensor) -> Tensor:
        tokens, words = student.shape
        gradient = torch.empty_like(student) if ctx.needs_input_grad[0] else None
        dtype = torch.float64 if student.dtype == torch.float64 else torch.float32
        total = torch.zeros((), device=student.device, dtype=dtype)
        for start in range(0, tokens, size := max(1, CHUNK // words)):
            chunk = slice(start, start + size)
            log_student, log_teacher = (x[chunk].log_softmax(-1, dtype=dtype) for x in (student, teacher))
            probability = log_teacher.exp()
            total += (probability * (log_teacher - log_student)).sum()
            if gradient is not None:
                gradient[chunk] = log_student.exp_().sub_(probability).div_(tokens)
        ctx.save_for_backward(gradient)
        return total / tokens

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None]:
        (gradient,) = ctx.saved_tensors
        return None if gradient is None else gradient * grad.to(gradient.dtype), None
