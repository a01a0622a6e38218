"""What the tests of the causal Triton kernels share: short chunks and segments, and the error rule."""

from __future__ import annotations

import pytest
import torch
from helpers import oracle, random_inputs, relative_error, with_gradients

from flowformer import FlowVariant
from flowformer.ops.common import Options
from flowformer.ops.torch import op as torch_op
from flowformer.ops.triton.causal import launch_table
from flowformer.ops.triton.causal import op as kernels
from flowformer.ops.triton.causal import plan as causal_plan
from flowformer.ops.triton.plan import cached_plan

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DEFAULT = FlowVariant()
# below this an error is a few roundings of float32, whoever makes them
ROUNDING = 3e-7


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Chunks and segments of a few tokens, so that short sequences have several; the device keeps its own chunks."""
    if DEVICE == "cpu":
        table = {key: _small(config) for key, config in launch_table.CONFIGS.items()}
        monkeypatch.setattr(launch_table, "CONFIGS", table)
    monkeypatch.setattr(causal_plan, "MIN_SEGMENT", 16)
    many_sms(monkeypatch, 1000)
    cached_plan.cache_clear()
    yield
    cached_plan.cache_clear()


def _small(config):
    return config._replace(chunk=16, tile=16)


def many_sms(monkeypatch, count):
    monkeypatch.setattr(causal_plan, "num_sms", lambda device: count)


def segments(monkeypatch, count, rows):
    monkeypatch.setattr(causal_plan, "SEGMENTS_PER_SM", count)
    monkeypatch.setattr(causal_plan, "BUSY_SHARE", 2)
    many_sms(monkeypatch, rows)
    cached_plan.cache_clear()


def inputs_of(dtype=torch.float32, **options):
    return random_inputs(dtype=dtype, device=DEVICE, **options)


def run(mask=None, variant=DEFAULT, scale=1.0, of=kernels.recurrent):
    return lambda q, k, v: of(q, k, v, mask, None, Options(scale, variant))[0]


def assert_as_exact_as_torch(results, torch_results, truths):
    """The error rule: at most twice the error of plain torch at the same dtype, three times for gradients."""
    for index, (result, other, truth) in enumerate(zip(results, torch_results, truths, strict=True)):
        error, allowed = relative_error(result, truth), max(relative_error(other, truth), ROUNDING)
        assert error <= (3 if index else 2) * allowed, (index, error, allowed)


def check(inputs, mask=None, variant=DEFAULT, scale=1.0):
    results = with_gradients(run(mask, variant, scale), inputs)
    others = with_gradients(run(mask, variant, scale, torch_op.recurrent), inputs)
    truths = with_gradients(
        lambda q, k, v: oracle(q, k, v, is_causal=True, key_mask=mask, scale=scale, variant=variant),
        [x.double() for x in inputs],
    )
    assert results[0].dtype == inputs[0].dtype
    assert_as_exact_as_torch(results, others, truths)
    return results
