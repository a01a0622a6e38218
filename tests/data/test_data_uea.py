"""Series of the UEA archive."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

from flowformer import data
from flowformer.data import uea

HEADER = "# a comment\n@problemName Tiny\n@timeStamps false\n@missing true\n@univariate false\n@dimensions 2\n"
TRAIN = (
    HEADER + "@equalLength false\n@classLabel true cat dog\n@data\n1,2,3,4:0,0,1,1:dog\n5,6:1,0:cat\n?,8,?:2,?,4:dog\n"
)
TEST = HEADER + "@equalLength false\n@classLabel true cat dog\n@data\n1,2,3,4,5,6:1,1,1,1,1,1:cat\n7:7:dog\n"


@pytest.fixture
def tiny(tmp_path):
    folder = tmp_path / "uea" / "Tiny"
    folder.mkdir(parents=True)
    (folder / "Tiny_TRAIN.ts").write_text(TRAIN)
    (folder / "Tiny_TEST.ts").write_text(TEST)
    return tmp_path


def test_japanese_vowels_come_with_aeon(tmp_path):
    """Sizes of the archive; standardised over all training steps, test steps with the same numbers."""
    train, valid, test, info = data.load("uea/JapaneseVowels", tmp_path)
    assert (len(train), valid, len(test)) == (270, None, 370)
    assert (info.num_classes, info.num_features, info.max_length, info.differs) == (9, 12, 26, "")
    steps = torch.cat([case["series"] for case in train])
    torch.testing.assert_close(steps.mean(0), torch.zeros(12), atol=1e-6, rtol=0)
    torch.testing.assert_close(steps.std(0), torch.ones(12), atol=1e-6, rtol=0)
    assert torch.stack([case["label"] for case in train]).bincount().tolist() == [30] * 9
    # three test series are longer than any training series
    assert max(len(case["series"]) for case in test) == 26
    assert max(len(case["series"]) for case in data.load("uea/JapaneseVowels", tmp_path, max_length=29).test) == 29


def test_values_classes_and_gaps(tiny):
    train, _, test, info = data.load("uea/Tiny", tiny)
    raw = [np.array([[1, 0], [2, 0], [3, 1], [4, 1]]), np.array([[5, 1], [6, 0]]), np.array([[8, 2], [8, 3], [8, 4]])]
    steps = np.concatenate(raw)
    for case, expected, label in zip(train, raw, (1, 0, 1), strict=True):
        scaled = (expected - steps.mean(0)) / steps.std(0, ddof=1)
        torch.testing.assert_close(case["series"], torch.tensor(scaled, dtype=torch.float32))
        assert case["label"] == label
    assert [len(case["series"]) for case in test] == [4, 1]
    assert (info.num_classes, info.num_features, info.max_length) == (2, 2, 4)


def test_a_channel_without_values_is_zero(tiny):
    path = tiny / "uea" / "Tiny" / "Tiny_TRAIN.ts"
    path.write_text(TRAIN.replace("5,6:1,0:cat", "?,?:1,0:cat"))
    series = data.load("uea/Tiny", tiny).train[1]["series"]
    assert series.isfinite().all()
    assert series[0, 0] == series[1, 0]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("5,6:1,0:cat\n?,8,?:2,?,4:dog\n", "5,6:1,"),  # cut short
        ("5,6:1,0:cat", "5,6:1,0:cow"),
        ("5,6:1,0:cat", "5,x:1,0:cat"),
        ("5,6:1,0:cat", "5,6:1:cat"),
        ("5,6:1,0:cat", "5,inf:1,0:cat"),
        ("@data", ""),
    ],
)
def test_a_damaged_file_is_named(tiny, old, new):
    path = tiny / "uea" / "Tiny" / "Tiny_TRAIN.ts"
    path.write_text(TRAIN.replace(old, new))
    with pytest.raises(data.DamagedDataError, match=r"Tiny_TRAIN\.ts"):
        data.load("uea/Tiny", tiny)


def test_a_length_must_be_positive(tiny):
    with pytest.raises(ValueError, match="max_length must be a positive whole number, got 0"):
        data.load("uea/Tiny", tiny, max_length=0)


def test_parts_must_belong_together(tiny):
    path = tiny / "uea" / "Tiny" / "Tiny_TEST.ts"
    path.write_text(TEST.replace("cat dog", "cat dog emu"))
    with pytest.raises(data.DamagedDataError, match="do not belong together"):
        data.load("uea/Tiny", tiny)


def test_a_published_set_must_be_complete(tiny):
    (tiny / "uea" / "Tiny").rename(tiny / "uea" / "Heartbeat")
    for path in (tiny / "uea" / "Heartbeat").iterdir():
        path.rename(path.with_name(path.name.replace("Tiny", "Heartbeat")))
    with pytest.raises(data.DamagedDataError, match="3 cases, the published data has 204"):
        data.load("uea/Heartbeat", tiny)
    info = data.load("uea/Heartbeat", tiny, partial=True).info
    assert info.differs == ("Heartbeat_TRAIN.ts: 3 cases instead of 204; Heartbeat_TEST.ts: 2 cases instead of 205")


def test_a_half_unpacked_set_is_missing(tiny):
    (tiny / "uea" / "Tiny" / "Tiny_TEST.ts").unlink()
    with pytest.raises(data.MissingDataError, match=r"Tiny_TEST\.ts"):
        data.load("uea/Tiny", tiny)


def test_reads_what_aeon_reads(tiny):
    """Its reader is the reference; training does without it, and without all that it brings along."""
    datasets = pytest.importorskip("aeon.datasets")
    home = uea.record("JapaneseVowels").files(tiny)["TRAIN"].parent
    for path in (home / "JapaneseVowels_TRAIN.ts", tiny / "uea" / "Tiny" / "Tiny_TEST.ts"):
        series, labels, classes = uea._read(path)
        expected, names, header = datasets.load_from_ts_file(str(path), return_meta_data=True)
        assert classes == header["class_values"]
        assert [classes[label] for label in labels] == list(names)
        for ours, theirs in zip(series, expected, strict=True):
            np.testing.assert_array_equal(ours, theirs.T)


def test_needs_no_aeon(tiny, monkeypatch):
    monkeypatch.setitem(sys.modules, "aeon", None)
    monkeypatch.setitem(sys.modules, "aeon.datasets", None)
    assert len(data.load("uea/Tiny", tiny).train) == 3
