"""Linearizing a small pretrained language model; needs its weights, stories260K.bin of llama2.c."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import stories
import torch

from flowformer.linearize import LinearizeConfig, linearize

WEIGHTS = Path(os.environ.get("FLOWFORMER_WEIGHTS", "weights")) / "stories260K.bin"
pytestmark = pytest.mark.skipif(not WEIGHTS.exists(), reason="set FLOWFORMER_WEIGHTS to the folder of stories260K.bin")


def test_a_story_teller_is_made_linear():
    model = stories.load(WEIGHTS)
    torch.manual_seed(0)
    sampled = model.generate(torch.ones(72, 1, dtype=torch.long), do_sample=True, max_new_tokens=199, top_k=0)
    with torch.no_grad():
        assert model(sampled, labels=sampled).loss < 2.2
    config = LinearizeConfig(
        length=128,
        batch_size=8,
        transfer_tokens=20_000,
        lora_tokens=20_000,
        lora_rank=8,
        lora_lr=1e-3,
        precision="fp32",
    )
    student = linearize(model, None, config)
    report = student.transfer(list(sampled[:64]), config, evaluate=list(sampled[64:]))
    exchanged, transferred, tuned = (stage.scores["perplexity"] for stage in report.stages)
    assert tuned < 0.8 * exchanged
    assert transferred < 1.05 * exchanged
    options = {"max_new_tokens": 40, "do_sample": False}
    again = student.generate(sampled[:2, :9], use_cache=False, **options)
    assert torch.equal(student.generate(sampled[:2, :9], **options), again)
