"""The paper's comparison figures: Flow-Attention beside its rivals, on images and series."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

pytest.importorskip("matplotlib")
from flowformer.models import FlowformerTimeSeries, FlowformerVision, TimeSeriesConfig, VisionConfig
from flowformer.models.vision import DeiTConfig, FlowformerDeiT
from flowformer.nn import record_maps, record_matrices
from flowformer.viz import compare_over_images, compare_over_time, degeneracies, source_weights

ATTENTIONS = {"Flowformer": "flow", "Transformer": "softmax", "Linear": "linear", "cosFormer": "cosformer"}
SERIES = TimeSeriesConfig(3, 2, 20, embed_dim=16, num_layers=2, num_heads=2, mlp_dim=16)
IMAGES = VisionConfig(16, 2, 3, 2, channels=(8, 16), depths=(1, 1), num_heads=2)


def models(kind, config):
    torch.manual_seed(0)
    return {name: kind(replace(config, attention=attention)).eval() for name, attention in ATTENTIONS.items()}


def test_weights_are_competition_or_column_sums():
    series = torch.randn(2, 20, 3)
    both = models(FlowformerTimeSeries, SERIES)
    with torch.no_grad(), record_maps(both["Flowformer"]) as flows:
        both["Flowformer"](series)
    assert torch.equal(source_weights(both["Flowformer"], series), flows[-1].competition.mean(1))
    with torch.no_grad(), record_matrices(both["Linear"]) as matrices:
        both["Linear"](series)
    first = source_weights(both["Linear"], series, layer=0)
    assert torch.equal(first, matrices[0].column_sums.mean(1))
    torch.testing.assert_close(first.sum(1), torch.full((2,), 20.0), rtol=1e-4, atol=0)


def test_images_have_a_map_of_each_model():
    images = torch.randn(3, 3, 16, 16)
    figure = compare_over_images(models(FlowformerVision, IMAGES), images, images.sigmoid(), titles=["a", "b", "c"])
    panels = figure.axes
    assert len(panels) == 3 * 5
    assert [panel.get_title() for panel in panels[:5]] == ["a", *ATTENTIONS]
    assert [len(panel.images) for panel in panels[5:10]] == [1, 2, 2, 2, 2]
    maps = [panel.images[1].get_array() for panel in panels[1:5]]
    assert all(each.shape == (16, 16) for each in maps)
    assert len({float(each.std()) for each in maps}) == 4, "four attentions, four maps"


def test_a_class_token_is_left_out_of_the_grid():
    config = DeiTConfig(16, patch_size=4, num_classes=2, embed_dim=12, depth=1, num_heads=3)
    images = torch.randn(1, 3, 16, 16)
    figure = compare_over_images(models(FlowformerDeiT, config), images, images.sigmoid())
    assert len(figure.axes) == 5


def test_series_have_a_curve_of_each_model():
    series = torch.randn(2, 20, 3)
    mask = torch.ones(2, 20, dtype=torch.bool)
    mask[1, 15:] = False
    figure = compare_over_time(models(FlowformerTimeSeries, SERIES), series, mask, titles=["one", "two"])
    assert len(figure.axes) == 2 * 5
    curves = [panel.lines[0].get_ydata() for panel in figure.axes[2:]]
    assert [len(curve) for curve in curves] == [20, 15] * 4
    assert all(curve.mean() == pytest.approx(1, abs=1e-5) for curve in curves)
    assert [panel.get_ylabel() for panel in figure.axes[2::2]] == list(ATTENTIONS)


def test_padding_on_the_left_is_not_drawn():
    series = torch.randn(1, 20, 3)
    mask = torch.arange(20)[None] >= 8
    compared = models(FlowformerTimeSeries, SERIES)
    figure = compare_over_time(compared, series, mask)
    assert [list(line.get_ydata()) for line in figure.axes[0].lines] == series[0, 8:].T.tolist()
    for panel, model in zip(figure.axes[1:], compared.values(), strict=True):
        weights = source_weights(model, series, mask)[0, 8:]
        torch.testing.assert_close(torch.tensor(panel.lines[0].get_ydata()), weights / weights.mean())


def test_degeneracy_of_each_layer():
    found = degeneracies(models(FlowformerTimeSeries, SERIES), torch.randn(2, 20, 3))
    assert list(found) == list(ATTENTIONS)
    for layers in found.values():
        assert len(layers) == 2
        assert all(0 < layer.evenness <= 1 and 0.1 <= layer.top_share < 1 for layer in layers)
    assert len({layers[0] for layers in found.values()}) == 4


class TestDegeneracyOfPaddedSeries:
    LENGTHS = (20, 3, 11, 2, 7)

    @pytest.fixture
    def padded(self):
        torch.manual_seed(1)
        mask = torch.arange(20) < torch.tensor(self.LENGTHS)[:, None]
        return torch.randn(len(self.LENGTHS), 20, 3), mask

    def test_batches_are_as_one(self, padded):
        compared = models(FlowformerTimeSeries, SERIES)
        whole = degeneracies(compared, *padded, batch_size=len(self.LENGTHS))
        for name, layers in degeneracies(compared, *padded, batch_size=2).items():
            for layer, expected in zip(layers, whole[name], strict=True):
                assert layer == pytest.approx(expected, rel=1e-5)

    def test_padding_changes_nothing(self, padded):
        """Every row has the same weight in the evenness, and every series in the share of the top."""
        series, _ = padded
        compared = models(FlowformerTimeSeries, SERIES)
        del compared["cosFormer"]  # some of its rows have no weight, and are left out of the mean
        whole = degeneracies(compared, *padded, batch_size=2)
        alone = [degeneracies(compared, x[None, :n]) for x, n in zip(series, self.LENGTHS, strict=True)]
        for name, layers in whole.items():
            for i, layer in enumerate(layers):
                rows = sum(n * each[name][i].evenness for n, each in zip(self.LENGTHS, alone, strict=True))
                assert layer.evenness == pytest.approx(rows / sum(self.LENGTHS), rel=1e-5)
                shares = [each[name][i].top_share for each in alone]
                assert layer.top_share == pytest.approx(sum(shares) / len(shares), rel=1e-5)

    def test_uniform_attention_is_even(self, padded):
        model = models(FlowformerTimeSeries, SERIES)["Transformer"]
        for layer in model.layers:
            torch.nn.init.zeros_(layer.attention.q_proj.weight)
            torch.nn.init.zeros_(layer.attention.q_proj.bias)
        # the top tenth is 2 of 20, 1 of 3, 2 of 11, 1 of 2 and 1 of 7 sources
        share = (2 / 20 + 1 / 3 + 2 / 11 + 1 / 2 + 1 / 7) / 5
        for layer in degeneracies({"uniform": model}, *padded, batch_size=2)["uniform"]:
            assert layer == pytest.approx((1, share), rel=1e-5)


def test_a_stage_of_one_token_has_no_evenness():
    config = replace(IMAGES, image_size=4)
    (found,) = degeneracies({"flow": FlowformerVision(config).eval()}, torch.randn(2, 3, 4, 4)).values()
    assert 0 < found[0].evenness <= 1
    assert found[1] == pytest.approx((math.nan, 1), nan_ok=True)
