"""Data in the memory of the device, and updates as CUDA graphs: faster ways to the same numbers."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from tiny_training import CONFIG, SERIES, losses, random_cases
from torch import nn
from torch.utils.data import Subset

from flowformer.data import DataInfo, Splits, collate
from flowformer.data.offline_rl import Episode, Windows
from flowformer.data.splits import Columns, FlatSequences
from flowformer.models.classifier import ClassifierConfig, FlowformerClassifier, SequenceEncoder
from flowformer.models.timeseries import FlowformerTimeSeries, TimeSeriesConfig
from flowformer.train import graphs, loop, resident
from flowformer.train.loop import train

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
FLAT = torch.randint(0, 256, (100,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
STARTS = torch.tensor([0, 10, 10, 60, 99, 30])
EARLY_STARTS = STARTS.clamp(max=80)
ROWS = FlatSequences(FLAT, STARTS, torch.tensor([10, 40, 41, 99, 100, 60]), shift=1)
DRAW = np.random.default_rng(0)
EPISODES = [Episode(DRAW.normal(size=(n, 3)), DRAW.normal(size=(n, 2)), DRAW.normal(size=n), True) for n in (2, 1, 4)]
DATASETS = {
    "series": SERIES.train,
    "rows": Columns(tokens=ROWS, label=torch.arange(6)),
    "pairs": Columns(first=ROWS, second=ROWS.take(torch.tensor([5, 4, 3, 2, 1, 0])), label=torch.arange(6)),
    "one length": Columns(tokens=FlatSequences(FLAT, EARLY_STARTS, EARLY_STARTS + 20), label=torch.arange(6)),
    "images": Columns(image=torch.randn(6, 3, 8, 8), label=torch.arange(6)),
    "windows": Windows(EPISODES, 3),
    "rows of a tensor": Columns(series=torch.randn(6, 30, 2), label=torch.arange(6)),
    "one tensor per case": Columns(tokens=list(torch.arange(60).view(6, 10)), label=list(torch.arange(6))),
    "cases of one size": Columns(image=list(torch.randn(6, 3, 4, 4)), extra=ROWS.take(torch.tensor([2] * 6))),
    **{task: random_cases(task)[0] for task in ("tokens", "language", "decision")},
}


@pytest.mark.parametrize("length", [None, 120])
@pytest.mark.parametrize("name", DATASETS)
def test_batches_are_those_of_collate(name, length):
    dataset = DATASETS[name]
    assert resident.fits(dataset)
    order = [(0, [1]), (1, [0, 2, 1]), (2, [5, 4, 5, 0]), (3, [3, 2])]
    batches = list(resident.batches(dataset, order, length, torch.device("cpu")))
    for (_, indices), batch in zip(order, batches, strict=True):
        expected = collate([dataset[i] for i in indices], length)
        assert set(batch) == set(expected)
        for key, x in expected.items():
            assert batch[key].dtype == x.dtype
            assert torch.equal(batch[key], x), key


def test_each_split_is_copied_once(tmp_path, monkeypatch):
    """However often it is evaluated; and the copy goes with the dataset."""
    copied = []

    class Counted(resident.DeviceColumns):
        def __init__(self, dataset, device):
            copied.append(device)
            super().__init__(dataset, device)

    monkeypatch.setattr(resident, "DeviceColumns", Counted)
    monkeypatch.setattr(resident, "applies", lambda dataset, config, device: True)
    train_set, test_set = (Columns(**SERIES.train.columns) for _ in range(2))
    splits = Splits(train_set, None, test_set, SERIES.info)
    train(replace(CONFIG, steps=8, eval_every=2, select_on="test"), tmp_path, splits=splits)
    assert len(copied) == 2, "train and test"
    list(resident.batches(test_set, [(0, [1])], None, torch.device("meta")))
    assert len(copied) == 3, "another device needs another copy"
    kept = len(resident._copies)
    del train_set, test_set, splits
    gc.collect()
    assert len(resident._copies) == kept - 2


def test_what_is_read_in_another_way_stays_where_it_is(monkeypatch):
    class Augmented(Columns):
        def __getitem__(self, index):
            return {"image": super().__getitem__(index)["image"].flip(-1)}

    assert not resident.fits(Augmented(image=torch.zeros(2, 3, 4, 4)))
    assert not resident.fits(Subset(SERIES.train, range(3)))
    monkeypatch.setattr(resident, "MAX_BYTES", 100)
    assert not resident.fits(SERIES.train)
    assert not resident.fits(DATASETS["windows"])


@pytest.mark.parametrize("changes", [{}, {"pad_full": True}, {"accumulate": 2}])
def test_training_is_the_same_bit_for_bit(tmp_path, monkeypatch, changes):
    config = replace(CONFIG, steps=8, **changes)
    train(config, tmp_path / "sent", splits=SERIES)
    monkeypatch.setattr(resident, "applies", lambda dataset, config, device: config.on_device)
    monkeypatch.setattr(loop, "load_batches", None)  # nothing is left for it
    result = train(config, tmp_path / "resident", splits=SERIES)
    assert losses(tmp_path / "resident") == losses(tmp_path / "sent")
    assert result["final"]["accuracy"] > 0.5


def test_graphs_need_a_gpu_and_one_part(tmp_path):
    wanted = "accumulate=1" if torch.cuda.is_available() else "a GPU, accumulate=1"
    with pytest.raises(ValueError, match=f"graphs=true needs {wanted}; pass graphs=false"):
        train(replace(CONFIG, graphs=True, accumulate=2), tmp_path, splits=SERIES)
    redrawn = replace(CONFIG.model, attention="performer", attention_options={"redraw_every": 1})
    with pytest.raises(ValueError, match=r"graphs=true needs .*redraw_every=none, since directions"):
        train(replace(CONFIG, graphs=True, model=redrawn), tmp_path, splits=SERIES)


def test_a_layout_is_captured_once_it_has_come_often(monkeypatch):
    """The bookkeeping, with a stand-in for CUDA that runs again what it was shown."""
    done, forgotten, capturing = [], [], []

    class Graph:
        def replay(self):
            done.append(("replayed", self.batch["x"].tolist()))

    def update(batch):
        if capturing:
            capturing[-1].batch = batch
        else:
            done.append(("computed", batch["x"].tolist()))

    @contextmanager
    def graph(made, pool, capture_error_mode):
        capturing.append(made)
        yield
        capturing.pop()

    for name, stand_in in (("CUDAGraph", Graph), ("graph", graph), ("graph_pool_handle", int)):
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(graphs, "_placeholder", torch.empty_like)
    monkeypatch.setattr(graphs, "EAGER_UPDATES", 2)
    updates = graphs.GraphedUpdates(update, lambda: forgotten.append(1))
    for i in range(4):
        updates({"x": torch.tensor([i])})
        updates({"x": torch.tensor([i, i])})
    updates({"x": torch.tensor([9.0])})  # another dtype is another layout
    expected = ["computed"] * 4 + ["replayed"] * 4 + ["computed"]
    assert [how for how, _ in done] == expected
    assert [x for _, x in done] == [[0], [0, 0], [1], [1, 1], [2], [2, 2], [3], [3, 3], [9.0]]
    assert len(forgotten) == 5 + 2 * 2, "after each computed update, and around each capture"


def test_graphs_need_shapes_that_do_not_change():
    classifier = FlowformerClassifier(ClassifierConfig(vocab_size=20, embed_dim=16, mlp_dim=24))
    time_series = FlowformerTimeSeries(TimeSeriesConfig(3, 2, 10, embed_dim=16, mlp_dim=24))
    models = nn.ModuleList([classifier, time_series])
    assert all(model.pack for model in models)
    graphs.fix_shapes(models)
    assert not any(model.pack for model in models)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("optimiser", ["adamw", "radam"])
def test_graphs_replay_the_same_updates(tmp_path, monkeypatch, optimiser):
    """With dropout, a schedule, a bound on the gradient and layouts that come and go; also after a resume."""
    captured = []
    capture = graphs.GraphedUpdates._capture
    monkeypatch.setattr(graphs.GraphedUpdates, "_capture", lambda *args: captured.append(1) or capture(*args))
    # the same arithmetic without graphs: RAdam's rectification in float32
    monkeypatch.setattr(torch.optim, "RAdam", partial(torch.optim.RAdam, capturable=True))
    monkeypatch.setattr(SequenceEncoder, "pack", False)
    cases, model, sizes = random_cases("tokens")
    splits = Splits(cases, None, cases, DataInfo("tiny", "0", max_length=12, **sizes))
    optimiser = replace(CONFIG.optimiser, name=optimiser, clip=0.5)
    changes = {"task": "tokens", "model": replace(model, dropout=0.1), "optimiser": optimiser, "select_on": "test"}
    config = replace(CONFIG, steps=120, batch_size=2, checkpoint_every=25, **changes)
    train(config, tmp_path / "eager", splits=splits)
    assert not captured
    train(replace(config, graphs=True), tmp_path / "graphs", splits=splits)
    assert captured
    assert losses(tmp_path / "graphs") == pytest.approx(losses(tmp_path / "eager"), rel=1e-4)

    class StopError(Exception):
        pass

    def stop(event):
        if event["kind"] == "step" and event["step"] == 90:
            raise StopError

    with pytest.raises(StopError):
        train(replace(config, graphs=True), tmp_path / "resumed", splits=splits, report=stop)
    train(replace(config, graphs=True), tmp_path / "resumed", splits=splits, resume=True)
    assert losses(tmp_path / "resumed") == pytest.approx(losses(tmp_path / "graphs"), rel=1e-4)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_graphs_replay_mixed_images(tmp_path, monkeypatch, compiled):
    """Images are mixed outside the graph, with weights drawn on the CPU for each batch."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    cases, model, sizes = random_cases("images")
    splits = Splits(cases, None, cases, DataInfo("tiny", "0", **sizes))
    changes = {"task": "images", "model": model, "mixup": 0.8, "cutmix": 1.0, "select_on": "test"}
    config = replace(CONFIG, steps=40, batch_size=2, compile=compiled, **changes)
    for capture in (False, True):
        train(replace(config, graphs=capture), tmp_path / str(capture), splits=splits)
    assert losses(tmp_path / "True") == pytest.approx(losses(tmp_path / "False"), rel=1e-4)


@pytest.mark.gpu
@needs_gpu
def test_resident_data_on_a_gpu(tmp_path):
    for on_device in (False, True):
        train(replace(CONFIG, on_device=on_device), tmp_path / str(on_device), splits=SERIES)
    assert losses(tmp_path / "True") == losses(tmp_path / "False")
