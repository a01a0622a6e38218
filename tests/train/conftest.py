"""A finished run of a second, and folders of runs."""

from __future__ import annotations

import signal

import pytest
from finished_runs import write_run
from tiny_training import CONFIG, SERIES, KilledError

from flowformer.train.loop import train


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """An uninterrupted run."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    return folder, train(CONFIG, folder, splits=SERIES)


@pytest.fixture
def vowels(tmp_path):
    """Three seeds of Flow-Attention, one of softmax attention, and two runs that are not the recipe."""
    for seed, (final, best) in enumerate([(0.98, 0.99), (0.97, 0.98), (0.99, 1.0)]):
        write_run(tmp_path, "uea/JapaneseVowels", "flow", seed, final, best)
    write_run(tmp_path, "uea/JapaneseVowels", "softmax", 0, 0.95)
    write_run(tmp_path, "uea/JapaneseVowels", "flow", 0, 0.5, overrides=["epochs=2", "optimiser.lr=0.1"])
    write_run(tmp_path, "uea/JapaneseVowels", "softmax", 1, 0.96, overrides=["precision=tf32"])
    return tmp_path


@pytest.fixture
def deadly_signals():
    """Ctrl-C and SIGTERM end a test that does not handle them, instead of the process of all tests."""

    def handle(number, frame):
        raise KilledError

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
