"""Recipes on sequences cut over ranks, with DDP or FSDP2 over the other dimension of the mesh, equal one process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from processes import run_ranks

from flowformer.data import DataInfo, Splits
from flowformer.data.splits import Columns
from flowformer.models.lm import FlowformerLM, LMConfig
from flowformer.train.config import Optimiser, TrainConfig
from flowformer.train.loop import train
from flowformer.train.record import read_log

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")


def recipe(**changes):
    """Ten updates of a recipe with eight texts of unequal lengths; the first tokens of a test text are context."""
    random = torch.Generator().manual_seed(0)
    texts = [torch.randint(1, 11, (n,), generator=random) for n in (9, 13, 7, 13, 3, 13, 13, 2)]
    given = Columns(tokens=texts, context=torch.tensor([3, 0, 2, 5, 0, 9, 1, 1]))
    splits = Splits(Columns(tokens=texts), None, given, DataInfo("texts", "0", vocab_size=11))
    options = {"steps": 10, "batch_size": 4, "log_every": 1, "eval_every": 10, "select_on": "test"}
    model = LMConfig(vocab_size=11, num_layers=2, embed_dim=8, num_heads=2, mlp_dim=16, dropout=0.0)
    config = TrainConfig("texts", "language", "texts", model, Optimiser(lr=2e-2, clip=1.0), **options, **changes)
    return config, splits


RECIPES = {
    "ddp": {"parallel": "context", "context_parallel_size": 2},
    "fsdp": {"parallel": "fsdp", "context_parallel_size": 2, "accumulate": 2},
}


def work(rank, folder):
    for name, changes in RECIPES.items():
        config, splits = recipe(**changes)
        train(config, f"{folder}/{name}", splits=splits)
    try:
        train(recipe(context_parallel_size=3)[0], f"{folder}/three", splits=splits)
    except ValueError as error:
        return str(error)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """The folder of the runs, and what each rank returned."""
    return run_ranks(work, 4, tmp_path_factory)


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one") / "run"
    config, splits = recipe()
    train(config, folder, splits=splits)
    return folder


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_on_cut_sequences_equals_one_process(ranks, one_process, name):
    folder = ranks[0] / name
    for ours, truth in zip(read_log(folder), read_log(one_process), strict=True):
        assert ours["loss"] == pytest.approx(truth["loss"], rel=1e-5)
        if ours["kind"] == "train":
            rate = truth["tokens_per_second"] / truth["steps_per_second"]
            assert ours["tokens_per_second"] / ours["steps_per_second"] == pytest.approx(rate), "each token counts once"
    ours, truth = (FlowformerLM.from_pretrained(each / "final").state_dict() for each in (folder, one_process))
    for key, value in truth.items():
        torch.testing.assert_close(ours[key], value, rtol=1e-3, atol=1e-5)


def test_recipe_needs_as_many_processes_as_share_a_sequence(ranks):
    assert "context_parallel_size=3 needs a multiple of 3 processes, got 4" in ranks[1][0]
