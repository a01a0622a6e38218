"""The options of a rival: on their way from a command or a config to the layers, and what random ones draw there."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tiny_training import losses

from flowformer import baselines, models, nn
from flowformer.baselines import Mechanism
from flowformer.data import DataInfo, Splits
from flowformer.data.splits import Columns
from flowformer.train import config as configs
from flowformer.train import recipes
from flowformer.train.config import Optimiser, TrainConfig
from flowformer.train.loop import train
from flowformer.train.overrides import keys, override

RANDOM = ["bigbird", "performer", "reformer", "rfa", "rfa-gate"]
SMALL = {"embed_dim": 16, "num_heads": 2}
MODELS = {
    models.FlowformerClassifier: models.ClassifierConfig(**SMALL, mlp_dim=16, max_length=32, num_layers=2),
    models.FlowformerPairClassifier: models.ClassifierConfig(**SMALL, mlp_dim=16, max_length=32, num_layers=2),
    models.FlowformerTimeSeries: models.TimeSeriesConfig(3, 5, 32, **SMALL, mlp_dim=16, num_layers=2),
    models.FlowformerLM: models.LMConfig(vocab_size=11, **SMALL, mlp_dim=16, num_layers=2, max_length=32),
    models.FlowformerDecision: models.DecisionConfig(4, 2, **SMALL, mlp_dim=16, num_layers=2),
    models.FlowformerVision: models.VisionConfig(8, 2, num_classes=2, channels=(16, 32), depths=(1, 1), num_heads=2),
    models.FlowformerDeiT: models.DeiTConfig(8, 2, num_classes=2, depth=2, **SMALL),
}


def mechanisms(model):
    return [module for module in model.modules() if isinstance(module, Mechanism)]


def build(model_class, attention, seed=0, **options):
    torch.manual_seed(seed)
    return model_class(replace(MODELS[model_class], attention=attention, attention_options=options))


def test_every_option_has_a_type_and_a_default():
    for name in baselines.names():
        for option, parameter in baselines.options(name).items():
            assert parameter.annotation is not parameter.empty, (name, option)
            assert parameter.default is not parameter.empty, (name, option)
    assert set(baselines.options("reformer")) == {"rounds", "chunk", "buckets", "redraw_every"}
    assert baselines.options("linear") == {}


@pytest.mark.parametrize("model_class", MODELS)
def test_reach_every_layer_and_are_saved(model_class, tmp_path):
    model = build(model_class, "local", window=7)
    assert [mechanism.window for mechanism in mechanisms(model)] == [7, 7]
    model.save_pretrained(tmp_path)
    loaded = model_class.from_pretrained(tmp_path)
    assert loaded.config == model.config
    assert [mechanism.window for mechanism in mechanisms(loaded)] == [7, 7]


def test_reach_the_cross_attention_of_a_decoder():
    options = {"features": 5}
    layer = nn.FlowDecoderLayer(16, 2, memory_dim=16, attention="performer", attention_options=options)
    assert [mechanism.directions().shape[1] for mechanism in mechanisms(layer)] == [5, 5]


def test_unknown_options():
    with pytest.raises(ValueError, match=r"no option 'rnk' \(did you mean 'rank'\?\); accepted: rank, shared\."):
        build(models.FlowformerClassifier, "linformer", rnk=3)
    with pytest.raises(ValueError, match=r"linear attention has no option 'rank'; accepted: none\."):
        build(models.FlowformerClassifier, "linear", rank=3)
    for name in ("flow", "flow-relu"):
        with pytest.raises(ValueError, match=rf"{name} attention has no option 'rank'; accepted: scale\."):
            build(models.FlowformerClassifier, name, rank=3)


class TestOverride:
    @pytest.mark.parametrize(
        ("assignments", "options"),
        [
            (["attention=linformer", "model.attention_options.rank=16"], {"rank": 16}),
            (["attention=linformer", "attention_options.rank=16", "shared=false"], {"rank": 16, "shared": False}),
            (["attention_options.pattern=strided", "model.attention=sparse"], {"pattern": "strided"}),
            (["attention=nystromformer", "convolution=none"], {"convolution": None}),
            (["attention=sinkhorn", "temperature=0.5"], {"temperature": 0.5}),
            (["attention=performer", "redraw_every=1000"], {"redraw_every": 1000}),
        ],
    )
    def test_reaches_the_config(self, assignments, options):
        config = override(recipes.get("lra/text"), assignments)
        assert config.model.attention_options == options
        assert configs.from_dict(configs.to_dict(config)) == config
        assert config.name != override(recipes.get("lra/text"), [f"attention={config.model.attention}"]).name

    def test_options_are_keys_with_their_defaults(self):
        known = keys(override(recipes.get("lra/text"), ["attention=linformer", "rank=16"]))
        found = {key: value for key, value in known.items() if "options" in key and key.startswith("model")}
        assert found == {"model.attention_options.rank": 16, "model.attention_options.shared": True}
        flow = {key: value for key, value in keys(recipes.get("lra/text")).items() if "attention_options" in key}
        assert flow == {"model.attention_options.scale": None}
        assert override(recipes.get("lra/text"), ["scale=0.125"]).model.attention_options == {"scale": 0.125}

    @pytest.mark.parametrize(
        ("assignments", "message"),
        [
            (
                ["attention=linformer", "attention_options.rnk=16"],
                r"no key 'attention_options.rnk' \(did you mean 'model.attention_options.rank'\?\); accepted: "
                r"model.attention_options.rank, model.attention_options.shared\.",
            ),
            (["attention_options.rank=16"], "lra/text has no key 'attention_options.rank'"),
            (["attention=linformer", "rank=few"], "rank must be a whole number, got 'few'"),
            (["attention=linformer", "attention_options=1"], "'attention_options' has parts; set one of model.att"),
        ],
    )
    def test_what_makes_no_sense(self, assignments, message):
        with pytest.raises(ValueError, match=message):
            override(recipes.get("lra/text"), assignments)


class TestRandomNumbers:
    @pytest.mark.parametrize("name", RANDOM)
    def test_layers_differ_and_repeat(self, name):
        model_class = models.FlowformerLM if name == "rfa-gate" else models.FlowformerTimeSeries

        def drawn(seed):
            layers = mechanisms(build(model_class, name, seed))
            return [layer.draws if name == "bigbird" else layer.directions() for layer in layers]

        first, second = drawn(0)
        assert not torch.isclose(first, second).any()
        assert all(map(torch.equal, drawn(0), (first, second)))
        assert not torch.isclose(drawn(1)[0], first).any()

    @pytest.mark.parametrize("name", RANDOM)
    def test_a_model_without_memory_takes_none(self, name):
        """Checkpoints are loaded into such a model, in the middle of a run."""
        before = torch.get_rng_state()
        with torch.device("meta"):
            empty = baselines.build(name, num_heads=2, head_dim=4, max_length=128)
        assert torch.equal(torch.get_rng_state(), before)
        full = baselines.build(name, num_heads=2, head_dim=4, max_length=128)
        empty.load_state_dict(full.state_dict(), assign=True)
        x = torch.randn(1, 2, 100, 4)
        is_causal = not full.bidirectional
        assert torch.equal(empty(x, x, x, is_causal=is_causal), full(x, x, x, is_causal=is_causal))


def test_a_resumed_run_redraws_as_the_whole_one(tmp_path):
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(2, (24,), generator=generator)
    cases = Columns(series=[torch.randn(9, 2, generator=generator) + label for label in labels], label=labels)
    splits = Splits(cases, cases, cases, DataInfo("noise", "0", num_classes=2, num_features=2, max_length=9))
    config = TrainConfig(
        recipe="noise",
        task="series",
        data="noise",
        model=models.TimeSeriesConfig(
            2, 2, 9, embed_dim=8, num_layers=2, num_heads=2, mlp_dim=8, attention="performer"
        ),
        optimiser=Optimiser(lr=1e-2),
        steps=7,
        batch_size=8,
        eval_every=7,
        log_every=1,
        checkpoint_every=4,
    )
    config = override(config, ["features=6", "redraw_every=3"])

    def stop(event):
        if event["kind"] == "step" and event["step"] == 5:
            raise KeyError("stop")

    train(config, tmp_path / "whole", splits=splits)
    with pytest.raises(KeyError, match="stop"):
        train(config, tmp_path / "run", splits=splits, report=stop)
    train(config, tmp_path / "run", splits=splits, resume=True)
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    train(override(config, ["redraw_every=none"]), tmp_path / "never", splits=splits)
    never = losses(tmp_path / "never")
    assert never[:3] == losses(tmp_path / "whole")[:3]
    assert never[3] != losses(tmp_path / "whole")[3]
