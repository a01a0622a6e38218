"""FlowVariant: it is frozen, copied as it is, and its names are what the releases compute."""

from __future__ import annotations

import copy
import pickle

import pytest

from flowformer import FlowVariant


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_are_equal(copied):
    variant = FlowVariant(clamp=2.0, competition="none", eps=1e-5)
    assert copied(variant) == variant
    assert hash(copied(variant)) == hash(variant)


def test_frozen():
    with pytest.raises(AttributeError):
        FlowVariant().clamp = 1.0


def test_names_are_what_the_releases_compute():
    assert FlowVariant.named("timeseries") == FlowVariant()
    assert FlowVariant.named("paper") == FlowVariant(rescale=False)
    clamps = {name: FlowVariant.named(name).clamp for name in ("core", "vision", "language", "rl")}
    assert clamps == {"core": 1, "vision": 1, "language": 5, "rl": 10}
