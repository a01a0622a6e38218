"""The time-series classifier: the authors' output from their weights, padding, and what every model must do."""

from __future__ import annotations

import runpy
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import PARITY, ROOT, assert_like_gradients
from torch import nn

from flowformer import baselines
from flowformer.models.timeseries import PRESETS, FlowformerTimeSeries, TimeSeriesConfig
from flowformer.nn import record_matrices
from flowformer.nn.packing import Packing

PARITY = PARITY / "timeseries_classifier.npz"
EXAMPLE = ROOT / "examples" / "time_series.py"
SMALL = TimeSeriesConfig(num_features=3, num_classes=5, max_length=12, embed_dim=16, num_heads=4, mlp_dim=32)
CONFIGS = {
    "flatten": SMALL,
    "mean": replace(SMALL, head="mean"),
    "any length": replace(SMALL, head="mean", positions="sinusoidal"),
}
LENGTHS = (12, 7, 1)
# what the authors call the parts of the model, and what we do
NAMES = {
    "project_inp.": "embedding.",
    "pos_enc.pe": "positions.weight",
    "encoder.attn_layers.": "layers.",
    "encoder.norm.": "norm.",
    "query_projection.": "q_proj.",
    "key_projection.": "k_proj.",
    "value_projection.": "v_proj.",
    "out_projection.": "out_proj.",
    "conv1.": "mlp.linear1.",
    "conv2.": "mlp.linear2.",
    "norm1.": "attention_norm.",
    "norm2.": "mlp_norm.",
    "output_layer.": "head.",
}


def build(config=SMALL, dtype=torch.float64, seed=0):
    torch.manual_seed(seed)
    return FlowformerTimeSeries(config).to(dtype).eval()


def random_series(batch=2, length=9, seed=0, dtype=torch.float64):
    return torch.randn(batch, length, 3, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def padded(fill=float("nan")):
    """Series, the batch of them with padding at the end, and its mask."""
    parts = [random_series(1, n, seed=n) for n in LENGTHS]
    batch = torch.cat([F.pad(part, (0, 0, 0, 12 - part.shape[1]), value=fill) for part in parts])
    return parts, batch, torch.arange(12) < torch.tensor(LENGTHS)[:, None]


every_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())


def authors():
    """Our model with the authors' weights, and the arrays of their run."""
    arrays = {key: torch.from_numpy(value) for key, value in np.load(PARITY).items()}
    state = {}
    for key, value in arrays.items():
        if key.startswith("weight."):
            name = key.removeprefix("weight.")
            for theirs, ours in NAMES.items():
                name = name.replace(theirs, ours)
            # positions have a batch of one in the middle, linear maps are convolutions of one step
            state[name] = value[:, 0] if name == "positions.weight" else value.squeeze(-1)
    config = TimeSeriesConfig(12, 9, 29, embed_dim=32, num_heads=4, mlp_dim=64, mask_padding=False)
    model = FlowformerTimeSeries(config).double()
    model.load_state_dict(state)
    return model.eval(), arrays


@torch.no_grad()
def test_output_is_that_of_the_authors():
    model, arrays = authors()
    result = model(arrays["x"], arrays["padding_mask"])
    torch.testing.assert_close(result, arrays["out"], rtol=1e-10, atol=1e-10)


@torch.no_grad()
def test_authors_switch_matters_for_padding_only():
    theirs, arrays = authors()
    ours = FlowformerTimeSeries(replace(theirs.config, mask_padding=True)).double().eval()
    ours.load_state_dict(theirs.state_dict())
    result = ours(arrays["x"], arrays["padding_mask"])
    whole = arrays["padding_mask"].all(1)
    assert 0 < whole.sum() < len(whole)
    torch.testing.assert_close(result[whole], arrays["out"][whole], rtol=1e-10, atol=1e-10)
    assert (result - arrays["out"])[~whole].abs().max() > 1e-6


def test_size_of_the_presets():
    width, mlp = 512, 2048
    layer = 4 * width * (width + 1) + mlp * (width + 1) + width * (mlp + 1) + 2 * 2 * width
    for name, config in PRESETS.items():
        channels, classes, length = config.num_features, config.num_classes, config.max_length
        expected = width * (channels + 1) + length * width + 2 * layer + 2 * width + classes * (length * width + 1)
        with torch.device("meta"):
            model = FlowformerTimeSeries(config)
        assert model.num_parameters() == expected, name
        assert (config.num_heads, config.dropout, model.layers[0].norm_first) == (8, 0.1, False)


def test_start_is_the_published_one():
    torch.manual_seed(0)
    model = FlowformerTimeSeries(replace(SMALL, num_features=64, max_length=100, embed_dim=64, mlp_dim=256))
    layer = model.layers[0]
    linears = [model.embedding, layer.attention.q_proj, layer.attention.out_proj, layer.mlp.linear1, layer.mlp.linear2]
    for values, bound in [(model.positions.weight, 0.02)] + [
        (values, linear.in_features**-0.5) for linear in [*linears, model.head] for values in linear.parameters()
    ]:
        assert values.abs().max() <= bound
        assert values.abs().max() > 0.5 * bound
        if values.numel() > 1000:  # uniform
            assert values.std().item() == pytest.approx(bound / 3**0.5, rel=0.05)


@pytest.mark.parametrize("attention", ["flow", "softmax", "linear"])
@every_config
def test_padded_batch_equals_its_parts(config, attention):
    model = build(replace(config, attention=attention))
    parts, batch, mask = padded()
    alone = torch.cat([model(part) for part in parts])
    together = model(batch, mask)
    torch.testing.assert_close(together, alone, rtol=1e-10, atol=1e-10)
    gradients = [torch.autograd.grad(result.square().sum(), list(model.parameters())) for result in (alone, together)]
    for expected, found in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@every_config
@torch.no_grad()
def test_gap_keeps_its_place_in_time(config):
    model = build(config)
    series, mask = random_series(), torch.arange(9).expand(2, 9) != 4
    result = model(series, mask)
    series[:, 4] = float("nan")
    assert torch.equal(model(series, mask), result)
    closed = torch.cat([series[:, :4], series[:, 5:]], 1)
    assert not torch.allclose(model(closed), result)


@pytest.mark.parametrize("attention", ["flow", *baselines.names()])
@every_config
def test_packed_equals_padded(config, attention):
    """Values and gradients of series whose padding, gaps included, is left out are those with it."""
    if attention != "flow" and not baselines.get(attention).bidirectional:
        pytest.skip("has no bidirectional form")
    torch.manual_seed(0)
    model = FlowformerTimeSeries(replace(config, attention=attention, dropout=0.0)).double()
    series = torch.randn(4, 11, config.num_features, dtype=torch.float64)
    mask = torch.arange(11) < torch.tensor([[11], [4], [1], [7]])
    mask[0, 2:6] = mask[3] = False  # a gap, and a series without a step
    results = []
    for pack in (True, False):
        model.pack = pack
        with patch.object(model, "_encode", wraps=model._encode) as encode:
            scores = model(series, mask)
        assert encode.call_args.args[0].shape[:2] == ((1, 12) if pack else (4, 11))
        parameters = list(model.parameters())
        results.append([scores, *torch.autograd.grad(scores.square().sum(), parameters, materialize_grads=True)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def test_what_cannot_be_packed_is_padded():
    """A batch that is nearly full, maps, matrices, and lengths that cannot be read."""
    model, mask = FlowformerTimeSeries(SMALL).eval(), torch.arange(11) < torch.tensor([[11], [4]])
    series = torch.randn(2, 11, SMALL.num_features)
    expected = model(series, mask)
    with patch.object(Packing, "pack") as pack:
        model(series, torch.ones_like(mask))
        _, maps = model(series, mask, return_maps=True)
        with record_matrices(model) as matrices:
            model(series, mask)
        each = torch.vmap(lambda x, kept: model(x[None], kept[None])[0])(series, mask)
    assert not pack.called
    assert maps[0].competition.shape == matrices[0].column_sums.shape == (2, SMALL.num_heads, 11)
    torch.testing.assert_close(each, expected, rtol=1e-4, atol=1e-6)


@every_config
@torch.no_grad()
def test_authors_switch_hides_padding_from_the_head_alone(config):
    model = build(replace(config, mask_padding=False))
    _, batch, mask = padded(fill=0.0)
    x = model.positions(model.embedding(batch) * 4)
    for layer in model.layers:
        x = layer(x)
    x = F.gelu(model.norm(x)) * mask[..., None]
    x = x.flatten(1) if config.head == "flatten" else x.sum(1) / mask.sum(1, keepdim=True)
    torch.testing.assert_close(model(batch, mask), model.head(x), rtol=1e-12, atol=1e-12)
    assert (model(batch, mask) - build(config)(batch, mask))[1:].abs().max() > 1e-4


@torch.no_grad()
def test_dropout_reaches_the_head():
    model = build(replace(SMALL, dropout=1.0)).train()
    assert torch.equal(model(random_series()), model.head.bias.expand(2, -1))


@every_config
@torch.no_grad()
def test_series_without_a_step_gives_the_bias_of_the_head(config):
    model, (_, batch, mask) = build(config), padded()
    result = model(batch, torch.zeros_like(mask))
    torch.testing.assert_close(result, model.head.bias.expand_as(result))


@torch.no_grad()
def test_mean_and_sinusoids_take_any_length():
    model = build(CONFIGS["any length"])
    assert model(random_series(length=40)).shape == (2, 5)
    names = [name for name, parameter in model.named_parameters() if 12 in parameter.shape]
    assert not names  # nothing has the size of a series


@pytest.mark.parametrize("attention", ["flow", "softmax", "linear"])
@every_config
def test_gradient_reaches_every_parameter(config, attention):
    model = build(replace(config, attention=attention)).train()
    model(random_series(length=12)).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name


@every_config
def test_bf16_autocast(config):
    model = build(config, torch.float32)
    series = random_series(dtype=torch.float32)
    exact = model(series)
    with torch.autocast("cpu", torch.bfloat16):
        result = model(series)
    assert result.dtype == torch.bfloat16
    assert (result.float() - exact).norm() < 0.05 * exact.norm()
    assert_like_gradients(model, result.float().square().sum(), exact.square().sum())


def test_gradient_checkpointing_changes_nothing():
    results = []
    for checkpointing in (False, True):
        model = build().train()
        model.gradient_checkpointing = checkpointing
        torch.manual_seed(1)  # of the dropout
        loss = model(random_series()).square().sum()
        loss.backward()
        results.append([loss.detach(), *(parameter.grad for parameter in model.parameters())])
    for plain, checkpointed in zip(*results, strict=True):
        torch.testing.assert_close(checkpointed, plain, rtol=1e-12, atol=1e-12)


@every_config
@torch.no_grad()
def test_compiled_model_gives_the_same(config):
    model = build(config)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    _, batch, mask = padded()
    torch.testing.assert_close(compiled(batch, mask), model(batch, mask), rtol=1e-12, atol=1e-12)


@every_config
@torch.no_grad()
def test_save_and_load_round_trip(config, tmp_path):
    config = replace(config, variant=replace(config.variant, clamp=1.0))
    model = build(config, torch.float32)
    model.save_pretrained(tmp_path)
    loaded = FlowformerTimeSeries.from_pretrained(tmp_path)
    assert loaded.config == config
    series = random_series(dtype=torch.float32)
    assert torch.equal(loaded(series), model(series))


@torch.no_grad()
def test_maps_of_each_layer():
    model = build()
    _, batch, mask = padded()
    result, maps = model(batch, mask, return_maps=True)
    torch.testing.assert_close(result, model(batch, mask), rtol=1e-12, atol=1e-14)
    assert [layer.competition.shape for layer in maps] == [(3, 4, 12)] * 2
    assert [layer.allocation.shape for layer in maps] == [(3, 4, 12)] * 2
    assert not maps[0].competition[1, :, 7:].any()  # padding competes for nothing
    with pytest.raises(ValueError, match="no Flow-Attention"):
        build(replace(SMALL, attention="softmax"))(batch, mask, return_maps=True)


@torch.no_grad()
def test_variant_reaches_the_attention():
    series = random_series()
    plain, paper = build(), build(replace(SMALL, variant=replace(SMALL.variant, rescale=False)))
    assert not torch.allclose(plain(series), paper(series))


@every_config
def test_one_output_regresses(config):
    # the mean of the first channel, of series of unequal length
    torch.manual_seed(0)
    model = FlowformerTimeSeries(replace(config, num_classes=1, dropout=0.0))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(60):
        series = torch.randn(32, 12, 3) + 2 * torch.randn(32, 1, 3)
        mask = torch.arange(12) < torch.randint(4, 13, (32, 1))
        target = (series[..., 0] * mask).sum(1) / mask.sum(1)
        loss = nn.functional.mse_loss(model(series, mask)[:, 0], target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-5:]) < 0.3 * sum(losses[:5])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 0}, "num_layers must be a positive whole number, got 0"),
        ({"num_features": -3}, "num_features must be a positive whole number, got -3"),
        ({"head": "flaten"}, "unknown head 'flaten' .did you mean 'flatten'.*accepted: flatten, mean"),
        ({"positions": "none"}, "accepted: learned, sinusoidal"),
    ],
)
def test_config_errors(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(SMALL, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"num_heads": 5}, "16 is not divisible by num_heads 5"), ({"attention": "liner"}, "did you mean 'linear'")],
)
def test_building_errors(changes, message):
    with pytest.raises(ValueError, match=message):
        FlowformerTimeSeries(replace(SMALL, **changes))


@pytest.mark.parametrize(
    ("series", "mask", "message"),
    [
        (torch.zeros(9, 3), None, r"\(batch, length, 3\).*got \(9, 3\)"),
        (torch.zeros(2, 9, 4), None, r"got \(2, 9, 4\)"),
        (torch.zeros(2, 0, 3), None, "length at least 1"),
        (torch.zeros(2, 13, 3), None, "13 steps, but max_length is 12"),
        (torch.zeros(2, 9, 3), torch.ones(2, 9), "must be bool"),
        (torch.zeros(2, 9, 3), torch.ones(2, 9, 1, dtype=torch.bool), r"got torch.bool of shape \(2, 9, 1\)"),
    ],
)
@pytest.mark.parametrize("config", [SMALL, CONFIGS["mean"]], ids=["flatten", "mean"])
def test_input_errors(config, series, mask, message):
    with pytest.raises(ValueError, match=message):
        build(config, torch.float32)(series, mask)


def test_example_runs(capsys):
    assert len(EXAMPLE.read_text().splitlines()) <= 30
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    accuracy = float(capsys.readouterr().out.split("accuracy ")[-1].split()[0])
    assert accuracy > 0.9
