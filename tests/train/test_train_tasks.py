"""The tasks: each learns its data, and its scores say what they claim."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tiny_training import CONFIG, losses, random_cases

from flowformer.data import DataInfo, Splits
from flowformer.train import tasks
from flowformer.train.config import Optimiser, Schedule
from flowformer.train.loop import train


@pytest.mark.parametrize("attention", ["flow", "softmax"])
@pytest.mark.parametrize("task", ["tokens", "pairs", "images", "language", "decision"])
def test_every_task_overfits_a_batch(tmp_path, monkeypatch, task, attention):
    cases, model, sizes = random_cases(task)
    info = DataInfo("tiny", "0", max_length=12, **sizes)
    if task == "decision":
        # what is played is an environment of its own; here only that its score is recorded
        monkeypatch.setattr(tasks.Decision, "evaluate", lambda self, *args, **options: {"score": 1.0})
    config = replace(
        CONFIG,
        task=task,
        model=replace(model, attention=attention, **({"dropout": 0.0} if task != "images" else {"drop_path": 0.0})),
        optimiser=Optimiser(lr=1e-2, weight_decay=0.01, decay="matrices"),
        schedule=Schedule(),
        steps=30,
        eval_every=30,
        select_on="test",
    )
    result = train(config, tmp_path / "run", splits=Splits(cases, None, cases, info))
    sequence = losses(tmp_path / "run")
    assert sequence[-1] < 0.8 * sequence[0]
    assert result["final"][result["metric"]] > 0


def test_mixed_images_have_soft_labels(tmp_path):
    cases, model, sizes = random_cases("images")
    info = DataInfo("tiny", "0", **sizes)
    config = replace(
        CONFIG, task="images", model=model, mixup=0.8, cutmix=1.0, label_smoothing=0.1, steps=3, select_on="test"
    )
    before = cases.columns["image"].clone()
    train(config, tmp_path / "run", splits=Splits(cases, None, cases, info))
    assert torch.equal(cases.columns["image"], before)
    assert all(loss < 2 for loss in losses(tmp_path / "run"))


def test_images_are_mixed_in_pairs(tmp_path):
    cases, model, sizes = random_cases("images")
    config = replace(CONFIG, task="images", model=model, mixup=0.8, batch_size=3, select_on="test")
    with pytest.raises(ValueError, match="mix images in pairs, got a micro-batch of 3"):
        train(config, tmp_path / "run", splits=Splits(cases, None, cases, DataInfo("tiny", "0", **sizes)))


@pytest.mark.parametrize("task", ["tokens", "language"])
def test_scores_do_not_depend_on_how_examples_are_batched(tmp_path, task):
    cases, model, sizes = random_cases(task)
    splits = Splits(cases, None, cases, DataInfo("tiny", "0", max_length=12, **sizes))
    config = replace(CONFIG, task=task, model=model, steps=1, select_on="test")
    scores = [train(replace(config, eval_batch_size=n), tmp_path / str(n), splits=splits)["final"] for n in (8, 3, 1)]
    for other in scores[1:]:
        assert other == pytest.approx(scores[0], rel=1e-5)


@pytest.mark.parametrize("task", ["tokens", "language"])
def test_nan_is_not_left_out_of_a_score(task):
    metrics = tasks.get(task).metrics(replace(CONFIG, model=random_cases(task)[1]))
    if task == "tokens":
        batch = {"label": torch.tensor([0, 1])}
        predicted = torch.tensor([[0.0, torch.nan], [0.0, 1.0]])
    else:
        batch, predicted = {"tokens": torch.tensor([[1, 2, 3]])}, torch.tensor(torch.nan)
    tasks.get(task).update(metrics, predicted, batch)
    assert metrics["loss"].compute().isnan()


def test_language_scores_each_token_once():
    """Cases with context: only what is new counts, and padding does not."""
    task = tasks.get("language")
    batch = {
        "tokens": torch.tensor([[1, 2, 3, 4], [5, 6, 7, 0]]),
        "mask": torch.tensor([[True] * 4, [True, True, True, False]]),
        "context": torch.tensor([2, 0]),
    }
    assert task._targets(batch).tolist() == [[-100, -100, 4], [6, 7, -100]]
    assert task.count(batch) == 3


@pytest.mark.parametrize("padded", [(), ("first",), ("second",), ("first", "second")])
def test_tokens_of_pairs_are_counted_without_padding(padded):
    masks = {f"{name}_mask": torch.tensor([[True] * 5, [True] * 3 + [False] * 2]) for name in padded}
    pairs = {name: torch.ones(2, 5, dtype=torch.long) for name in ("first", "second")}
    assert tasks.get("pairs").tokens({**pairs, **masks}) == 20 - 2 * len(padded)


@pytest.mark.parametrize(("task", "lacks"), [("series", "series"), ("pairs", "first, second"), ("decision", "states")])
def test_data_of_another_kind_are_refused(task, lacks):
    cases, _, _ = random_cases("tokens")
    with pytest.raises(ValueError, match=f"tiny has tokens, label, but the task needs .*{lacks}"):
        tasks.get(task).check_data(Splits(cases, None, cases, DataInfo("tiny", "0")))


def test_a_missing_simulator_is_said_before_the_updates(monkeypatch):
    gymnasium = pytest.importorskip("gymnasium")

    def refuse(*args, **options):
        raise gymnasium.error.DependencyNotInstalled("MuJoCo is not installed")

    monkeypatch.setattr(gymnasium, "make_vec", refuse)
    cases, _, _ = random_cases("decision")
    with pytest.raises(ImportError, match=r"Hopper-v4 cannot be played: MuJoCo .* pip install 'flowformer\[rl\]'"):
        tasks.get("decision").check_data(Splits(cases, None, cases, DataInfo("tiny", "0", environment="Hopper-v4")))


@pytest.mark.parametrize("environment", ["Ant-v5", ""], ids=["unknown", "none"])
def test_an_environment_without_target_returns_is_refused_before_the_updates(environment):
    """A dataset of minari need not name an environment."""
    cases, _, _ = random_cases("decision")
    with pytest.raises(ValueError, match=rf"no target and reference returns for '{environment}'"):
        tasks.get("decision").check_data(Splits(cases, None, cases, DataInfo("tiny", "0", environment=environment)))
