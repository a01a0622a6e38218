"""A finished run of a second."""

from __future__ import annotations

import pytest
from tiny_training import CONFIG, SERIES

from flowformer.train.loop import train


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """An uninterrupted run."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    return folder, train(CONFIG, folder, splits=SERIES)
