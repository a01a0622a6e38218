"""A transfer on two ranks, which share the rows of each update, equals a transfer in one process."""

from __future__ import annotations

import copy
import signal

import pytest
import torch
import torch.distributed as dist
import transformers
from language import LLAMA, documents
from processes import run_ranks

from flowformer.linearize import LinearizeConfig, linearize
from flowformer.train.loop import Interrupted

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")


def transferred(**tokens):
    """Run a transfer; return the loss and the tokens of each stage, and the final weights."""
    torch.manual_seed(0)
    teacher = transformers.LlamaForCausalLM(copy.deepcopy(LLAMA))
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter *= 3  # fresh weights give nearly uniform attention
    config = LinearizeConfig(length=24, batch_size=4, lora_rank=2, precision="fp32", **tokens)
    student = linearize(teacher, None, config)
    report = student.transfer(documents(30), config)
    losses = [stage.loss for stage in report.stages if stage.loss is not None]
    return losses, [stage.tokens for stage in report.stages], student.state_dict()


def interrupted(rank):
    """Return the message of a transfer in which only rank 1 gets a signal, during its second update."""
    updates = []

    def report(record):
        updates.extend([record] * (record["kind"] == "train"))
        if rank == 1 and len(updates) == 2:
            signal.raise_signal(signal.SIGTERM)

    config = LinearizeConfig(length=24, batch_size=4, precision="fp32", lora_tokens=0)
    student = linearize(transformers.LlamaForCausalLM(copy.deepcopy(LLAMA)), None, config)
    try:
        student.transfer(documents(30), config, report=report)
    except Interrupted as error:
        return str(error)


def work(rank, _):
    """Run stage 2 alone, stage 1 alone, and a transfer that is interrupted."""
    return (
        transferred(transfer_tokens=0, lora_tokens=600),
        transferred(transfer_tokens=600, lora_tokens=0),
        interrupted(rank),
    )


def test_two_processes_learn_what_one_does(tmp_path_factory):
    """Stage 2 equals one process up to rounding.

    In stage 1 each rank divides its error by the variance of its own rows, so only equality between ranks is tested.
    """
    losses, tokens, weights = transferred(transfer_tokens=0, lora_tokens=600)
    ranks = run_ranks(work, 2, tmp_path_factory)[1]
    for (other_losses, other_tokens, other_weights), *_ in ranks:
        assert other_losses == pytest.approx(losses, rel=1e-4)
        assert losses[-1] > 1e-3
        assert other_tokens == tokens
        for name, weight in weights.items():
            torch.testing.assert_close(other_weights[name], weight, rtol=1e-3, atol=1e-5, msg=lambda m, n=name: n + m)
    torch.testing.assert_close(ranks[0][1], ranks[1][1], rtol=0, atol=0)


def test_a_signal_to_one_rank_stops_all_after_the_same_update(tmp_path_factory):
    ranks = run_ranks(work, 2, tmp_path_factory)[1]
    assert [rank[2] for rank in ranks] == ["stopped at update 2 of stage 'transfer'."] * 2
