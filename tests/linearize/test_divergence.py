"""The chunked divergence against torch's, values and gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from flowformer.linearize import divergence
from flowformer.linearize.divergence import kl_divergence

WORDS = 11


def logits(tokens, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return tuple((4 * torch.randn(tokens, WORDS, generator=generator)).to(dtype) for _ in range(2))


def expected(student, teacher):
    return F.kl_div(student.log_softmax(-1), teacher.log_softmax(-1), reduction="batchmean", log_target=True)


def with_gradient(function, student, teacher):
    student = student.detach().requires_grad_()
    value = function(student, teacher)
    (3 * value).backward()
    return value.detach(), student.grad


@pytest.mark.parametrize("tokens", [1, 4, 9])
@pytest.mark.parametrize("chunk", [1, 3 * WORDS, 1000])  # one token at a time, a last chunk of another size, one chunk
def test_equals_the_divergence_of_torch(monkeypatch, tokens, chunk):
    monkeypatch.setattr(divergence, "CHUNK", chunk)
    student, teacher = logits(tokens)
    torch.testing.assert_close(
        with_gradient(kl_divergence, student, teacher), with_gradient(expected, student, teacher), rtol=1e-12, atol=0
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_rounded_once(dtype):
    student, teacher = logits(64, dtype)
    value, gradient = with_gradient(kl_divergence, student, teacher)
    exact, exact_gradient = with_gradient(expected, student.double(), teacher.double())
    assert value.dtype == torch.float32
    torch.testing.assert_close(value.double(), exact, rtol=1e-6, atol=0)
    assert gradient.dtype == dtype
    unit = torch.finfo(dtype).eps
    torch.testing.assert_close(gradient.double(), exact_gradient, rtol=2 * unit, atol=unit * exact_gradient.abs().max())


def test_only_the_student_learns():
    student, teacher = (x.requires_grad_() for x in logits(4))
    kl_divergence(student, teacher).backward()
    assert student.grad is not None
    assert teacher.grad is None


def test_keeps_logits_as_they_are():
    student, teacher = logits(4)
    before = student.clone(), teacher.clone()
    with_gradient(kl_divergence, student, teacher)
    assert torch.equal(student, before[0])
    assert torch.equal(teacher, before[1])
