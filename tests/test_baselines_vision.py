"""The sizes of the rivals in the paper's vision table."""

from __future__ import annotations

import pytest
import torch

from flowformer.models import FlowformerDeiT
from flowformer.models.counts import VISION_RIVALS, count, count_rival
from flowformer.models.vision import DeiTConfig


# the paper's columns: millions of parameters, billions of multiply-adds
@pytest.mark.parametrize(("name", "parameters", "operations"), [("vit-b", 86, 55.4), ("deit-s", 22, 4.6)])
def test_columns_of_the_paper(name, parameters, operations):
    counts = count_rival(name)
    assert int(counts.parameters / 1e6) == parameters
    assert counts.total / 1e9 == pytest.approx(operations, abs=0.1)


def test_vit_large_is_not_quite_what_the_paper_prints():
    """It prints 307 M parameters; timm's model, and ours of the same sizes, has 1 % fewer."""
    counts = count_rival("vit-l")
    assert counts.parameters == 304_715_752
    assert counts.parameters / 1e6 == pytest.approx(307, rel=0.01)
    assert counts.total / 1e9 == pytest.approx(190.7, rel=0.002)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("vit-b", {"image_size": 384, "embed_dim": 768, "num_heads": 12}),
        ("vit-l", {"image_size": 384, "embed_dim": 1024, "num_heads": 16, "depth": 24}),
        ("deit-s", {}),
    ],
)
def test_ours_with_softmax_is_as_large(name, sizes):
    config = DeiTConfig(attention="softmax", **sizes)
    with torch.device("meta"):
        model = FlowformerDeiT(config)
    assert count(model, torch.empty(1, 3, config.image_size, config.image_size)) == count_rival(name)


def test_unknown_name():
    with pytest.raises(ValueError, match=f"unknown rival 'vit-s'; accepted: {', '.join(VISION_RIVALS)}"):
        count_rival("vit-s")
