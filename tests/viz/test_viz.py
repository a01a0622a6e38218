"""Figures: what is drawn, what it is called, and that nothing is drawn where there is nothing."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from flowformer import viz
from flowformer.models import DeiTConfig, FlowformerDeiT, FlowformerTimeSeries, TimeSeriesConfig
from flowformer.viz.page import POINTS, curves, results_page

CURVES = """kind,shape,contestant,forward_ms,both_ms,device,dtype
causal,B1 H2 N1024 d64,ours,1.5,4.0,H200,bfloat16
causal,B1 H2 N512 d64,ours,1,2.0,H200,bfloat16
causal,B1 H2 N512 d64,others,3,,H200,bfloat16
causal,B8 H2 N2048 d64,ours,9,9.0,H200,bfloat16
"""
BARS = """attention,length,mode,batch,status,steps_per_second,paper_ratio,device,dtype,compiled
softmax,1024,training,32,ok,10.0,1.0,H200,float32,False
flow,1024,training,32,ok,30.0,2.25,H200,float32,False
flow,2048,inference,32,ok,30.0,,H200,float32,False
"""


def drawn(figure):
    return [axis for axis in figure.axes if axis.axison]


def legend(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def written(tmp_path, content):
    (tmp_path / "times.csv").write_text(content)
    return tmp_path / "times.csv"


class TestSpeed:
    def test_only_the_length_differs_along_a_line(self, tmp_path):
        forward, other_forward, both, other_both = viz.speed_curves(written(tmp_path, CURVES)).axes
        assert forward.get_title() == "causal\nH200, bfloat16, B1 H2 d64"
        assert other_forward.get_title() == "causal\nH200, bfloat16, B8 H2 d64"
        assert [line.get_label() for line in forward.lines] == ["ours", "others"]
        assert [list(line.get_xdata()) for line in forward.lines] == [[512, 1024], [512]]
        assert [list(line.get_ydata()) for line in forward.lines] == [[1, 1.5], [3]]
        assert [list(line.get_ydata()) for line in both.lines] == [[2, 4]], "what did not fit has no time"
        assert [list(line.get_xdata()) for line in (*other_forward.lines, *other_both.lines)] == [[2048]] * 2

    def test_a_panel_without_a_time_is_not_drawn(self, tmp_path):
        rows = "kind,shape,contestant,forward_ms,both_ms\ncausal,B1N512,ours,1.0,\n"
        (panel,) = drawn(viz.speed_curves(written(tmp_path, rows)))
        assert panel.get_ylabel() == "forward, ms"

    @pytest.mark.parametrize("row", ["", "causal,B1N512,ours,,\n"])
    def test_no_times(self, tmp_path, row):
        with pytest.raises(ValueError, match="has no rows with a time"):
            viz.speed_curves(written(tmp_path, f"kind,shape,contestant,forward_ms,both_ms\n{row}"))

    def test_bars_say_what_they_are_of(self, tmp_path):
        figure = viz.speed_figure(written(tmp_path, BARS))
        assert figure.get_suptitle() == "H200, float32, batch 32"
        assert legend(figure) == ["softmax attention", "where the paper's ratio to it lies"]
        assert [axis.get_title() for axis in drawn(figure)] == ["training, 1,024 tokens", "inference, 2,048 tokens"]

    def test_a_table_of_results_is_no_benchmark(self, tmp_path):
        path = written(tmp_path, "recipe,attention,steps_per_second\nlra/text,flow,3\n")
        with pytest.raises(ValueError, match=r"times\.csv is no benchmark's CSV: it lacks kind.*flowformer bench lra"):
            viz.speed_figure(path)


class TestTraining:
    TRAINED = ({"kind": "train", "step": 1, "loss": 2.0}, {"kind": "train", "step": 2, "loss": 1.0})
    EVALUATED = ({"kind": "eval", "split": "test", "step": 2, "epoch": 1, "accuracy": 0.5},)

    def test_panels_and_legend(self):
        figure = viz.training_curves({"run": [*self.TRAINED, *self.EVALUATED], "dtw": list(self.EVALUATED)})
        loss, accuracy = figure.axes
        assert (loss.get_title(), accuracy.get_title()) == ("training loss", "evaluation accuracy")
        assert [list(line.get_ydata()) for line in loss.lines] == [[2, 1]]
        assert len(accuracy.lines) == 2
        assert legend(figure) == ["run", "dtw"]

    def test_only_scores_have_panels(self):
        """Evaluations by episodes also record what was played."""
        played = {"kind": "eval", "split": "test", "step": 2, "epoch": 1.5, "environment": "Hopper-v4", "episodes": 10}
        (panel,) = viz.training_curves({"run": [{**played, "note": "target return above", "score": 1.5}]}).axes
        assert panel.get_title() == "evaluation score"

    def test_what_nobody_recorded_has_no_panel(self):
        (panel,) = viz.training_curves({"dtw": list(self.EVALUATED)}).axes
        assert panel.get_title() == "evaluation accuracy"
        (panel,) = viz.training_curves({"run": list(self.TRAINED[:1])}).axes
        assert panel.lines[0].get_marker() == ".", "a line of one point is not seen"
        with pytest.raises(ValueError, match="run: nothing is recorded yet"):
            viz.training_curves({"run": []})


@pytest.mark.parametrize("updates", [2, 300, 301, 1000])
def test_a_long_curve_of_the_page_ends_with_its_last_point(updates):
    log = [{"kind": "train", "step": step, "loss": 1 / step} for step in range(1, updates + 1)]
    page = results_page("title", [], [{"name": "run", "facts": {}, "curves": curves(log)}], {})
    data = json.loads(page.partition('id="data">')[2].partition("</script>")[0])
    points = data["runs"][0]["curves"]["training loss"]
    assert len(points) == -(-updates // -(-updates // POINTS)) <= POINTS
    assert points == sorted(points)
    assert points[-1] == [updates, 1 / updates]


class TestOverTime:
    @staticmethod
    def figure(heads=2, layer=-1, mask=True):
        torch.manual_seed(0)
        sizes = {"embed_dim": 8, "num_heads": heads, "num_layers": 3, "mlp_dim": 8}
        model = FlowformerTimeSeries(TimeSeriesConfig(num_features=2, num_classes=2, max_length=9, **sizes)).eval()
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.5)
        series, lengths = torch.randn(4, 9, 2), torch.tensor([[9], [4], [0], [7]])
        present = torch.arange(9) >= 9 - lengths  # padding on the left
        figure = viz.over_time(model, series, present if mask else None, layer=layer)
        maps = model(series, present if mask else None, return_maps=True)[1][layer]
        return figure, present, maps

    def test_legend_says_what_line_and_band_are(self):
        figure, *_ = self.figure()
        assert figure.get_suptitle() == "layer 3 of 3, 2 heads"
        assert legend(figure) == [
            "competition (left scale), mean of 2 heads",
            "competition, lowest to highest head",
            "allocation (right scale), mean of 2 heads",
            "allocation, lowest to highest head",
        ]
        figure, *_ = self.figure(heads=1, layer=0)
        assert figure.get_suptitle() == "layer 1 of 3, 1 head"
        assert legend(figure) == ["competition (left scale)", "allocation (right scale)"]
        assert not any(axis.collections for axis in figure.axes), "one head has no band"

    @pytest.mark.parametrize("mask", [True, False])
    def test_values_and_one_scale_for_all_panels(self, mask):
        figure, present, maps = self.figure(mask=mask)
        there = [i for i in range(4) if not mask or present[i].any()]
        for name, values in (("competition", maps.competition), ("allocation", maps.allocation)):
            axes = [axis for axis in drawn(figure) if axis.get_ylabel() == name]
            assert len(axes) == len(there), "an example without a step is not drawn"
            assert len({axis.get_ylim() for axis in axes}) == 1
            for axis, i in zip(axes, there, strict=True):
                steps = present[i] if mask else slice(None)
                expected = values[i].mean(0)[steps].detach()
                torch.testing.assert_close(torch.tensor(axis.lines[0].get_ydata()), expected)
        lines = [axis for axis in drawn(figure) if len(axis.lines) == 2]
        assert [len(axis.lines[0].get_ydata()) for axis in lines] == ([9, 4, 7] if mask else [9] * 4)
        assert len(drawn(figure)) == 3 * len(there)

    def test_a_model_in_training_stays_in_training(self):
        """Drawing uses evaluation mode, without dropout, but does not switch dropout off for the next update."""
        torch.manual_seed(0)
        sizes = {"embed_dim": 8, "num_heads": 2, "num_layers": 1, "mlp_dim": 8}
        model = FlowformerTimeSeries(TimeSeriesConfig(num_features=2, num_classes=2, max_length=9, **sizes))
        series = torch.randn(1, 9, 2)
        curves = [viz.over_time(model.train(mode), series).axes[1].lines[0].get_ydata() for mode in (False, True)]
        assert (curves[0] == curves[1]).all()
        assert model.training

    def test_a_layer_that_is_not_there(self):
        with pytest.raises(ValueError, match=r"the model has 3 layers; accepted: from -3 to 2, got 3"):
            self.figure(layer=3)


def test_images_have_one_scale_for_each_map():
    torch.manual_seed(0)
    model = FlowformerDeiT(DeiTConfig(32, patch_size=8, num_classes=3, embed_dim=16, depth=2, num_heads=2))
    images = torch.rand(3, 3, 32, 32)
    figure = viz.over_images(model, images, images, titles=["a", "b", "c"])
    assert figure.get_suptitle() == "layer 2 of 2, 2 heads"
    *panels, competition, allocation = figure.axes
    labels = [bar.get_xlabel() for bar in (competition, allocation)]
    assert labels == ["competition, mean of the heads", "allocation, mean of the heads"]
    for column, bar in ((1, competition), (2, allocation)):
        norms = [panel.images[1].norm for panel in panels[column::3]]
        assert len(norms) == 3
        assert all(norm is norms[0] for norm in norms)
        assert bar.get_xlim() == (norms[0].vmin, norms[0].vmax)
