"""The Decision Flowformer: published sizes, padding, and rollouts with the recurrent state and with the window."""

from __future__ import annotations

import runpy
from dataclasses import replace

import pytest
import torch
from helpers import ROOT, assert_like_gradients
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from flowformer import FlowVariant
from flowformer.models.decision import PRESETS, DecisionConfig, FlowformerDecision

SMALL = DecisionConfig(
    state_dim=5,
    action_dim=3,
    num_layers=2,
    embed_dim=16,
    num_heads=2,
    mlp_dim=24,
    window=6,
    max_timestep=40,
    dropout=0.0,
)
SIDES = pytest.mark.parametrize("side", ["left", "right"])
DISCRETE = replace(SMALL, discrete_actions=True)
WINDOWS = pytest.mark.parametrize("window", [None, 4], ids=["recurrent", "window"])


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def randomized(config: DecisionConfig) -> FlowformerDecision:
    """Fresh models have zero biases and unit norms, which would hide mistakes."""
    model = FlowformerDecision(config)
    for name, parameter in model.named_parameters():
        nn.init.normal_(parameter, mean=float(name.endswith("norm.weight")), std=0.5)
    return model.double().eval()


def trajectories(batch=3, steps=7, dtype=torch.float64) -> tuple[torch.Tensor, ...]:
    """Returns-to-go, states, actions and timesteps cut from the middle of episodes."""
    shapes = (batch, steps), (batch, steps, SMALL.state_dim), (batch, steps, SMALL.action_dim)
    timesteps = torch.randint(20, (batch, 1)) + torch.arange(steps)
    return *(torch.randn(shape, dtype=dtype) for shape in shapes), timesteps


def padding(side, lengths, longest) -> torch.Tensor:
    place = torch.arange(longest)
    return torch.stack([place < n if side == "right" else place >= longest - n for n in lengths])


def gradients(loss, model) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters())))


def episode(model, returns, states, rollout):
    """The actions of a rollout that meets these returns and states, (B, T, A), and the rollout after."""
    actions = []
    for return_to_go, state in zip(returns.unbind(1), states.unbind(1), strict=True):
        action, rollout = model.act(return_to_go, state, rollout)
        actions.append(action)
    return torch.stack(actions, 1), rollout


@pytest.mark.parametrize(
    ("name", "size", "size_of_all_heads"),
    [("hopper", 2_631_683, 2_634_767), ("halfcheetah", 2_634_758, 2_639_384), ("walker2d", 2_634_758, 2_639_384)],
)
def test_size_of_the_published_model(name, size, size_of_all_heads):
    with torch.device("meta"):
        assert FlowformerDecision(PRESETS[name]).num_parameters() == size
        all_heads = FlowformerDecision(replace(PRESETS[name], predict_all=True))
        assert all_heads.num_parameters() == size_of_all_heads


def test_initialisation_is_the_published_one():
    model = FlowformerDecision(replace(PRESETS["hopper"], num_layers=1))
    layer = model.decoder.layers[0]
    for linear in (layer.attention.q_proj, layer.attention.out_proj, layer.mlp.linear1, layer.mlp.linear2):
        assert linear.weight.std().item() == pytest.approx(0.02, rel=0.05)
        assert not linear.bias.any()
    assert model.timesteps.weight.std().item() == pytest.approx(1.0, rel=0.05)
    # PyTorch's own: uniform, with the standard deviation (3 fan_in)^-1/2
    assert model.state_embedding.weight.std().item() == pytest.approx(33**-0.5, rel=0.05)
    assert model.action_head.weight.std().item() == pytest.approx(768**-0.5, rel=0.1)


def test_dropout_is_where_the_paper_has_it():
    model = FlowformerDecision(replace(SMALL, dropout=0.1))
    rates = {name: module.p for name, module in model.named_modules() if isinstance(module, nn.Dropout)}
    inner = {f"decoder.layers.{i}.mlp.activation_dropout": 0.0 for i in range(2)}
    outer = {f"decoder.layers.{i}.{part}.dropout": 0.1 for i in range(2) for part in ("attention", "mlp")}
    assert rates == {"dropout": 0.1} | inner | outer


@torch.no_grad()
def test_tokens_are_return_state_and_action_of_each_step():
    model = randomized(replace(SMALL, predict_all=True))
    returns, states, actions, timesteps = trajectories(1, 2)
    for name, parameter in model.decoder.named_parameters():
        if name.split(".")[-2] in ("out_proj", "linear2"):
            parameter.zero_()  # the layers add nothing, so that each prediction shows its own token
    time = model.timesteps.weight[timesteps]
    state_token = model.embedding_norm(model.state_embedding(states) + time)
    action_token = model.embedding_norm(model.action_embedding(actions) + time)
    found = model(returns, states, actions, timesteps)
    torch.testing.assert_close(found.action, model.action_head(model.norm(state_token)).tanh())
    torch.testing.assert_close(found.state, model.state_head(model.norm(action_token)))
    torch.testing.assert_close(found.return_to_go, model.return_head(model.norm(action_token))[..., 0])


@torch.no_grad()
def test_actions_see_the_past_and_their_own_return_and_state_only():
    model = randomized(SMALL)
    trajectory = trajectories(1, 4)
    before = model(*trajectory).action
    seen = []
    for part in range(3):
        changed = [x.clone() for x in trajectory]
        changed[part][:, 2] += 1
        seen.append([not torch.equal(a, b) for a, b in zip(before[0], model(*changed).action[0], strict=True)])
    assert seen == [[False, False, True, True], [False, False, True, True], [False, False, False, True]]


def test_bounded_actions():
    trajectory = trajectories()
    model = randomized(SMALL)
    free = randomized(replace(SMALL, bounded_actions=False))
    free.load_state_dict(model.state_dict())
    assert model(*trajectory).action.abs().max() < 1
    torch.testing.assert_close(free(*trajectory).action.tanh(), model(*trajectory).action)


def test_timesteps_are_counted_if_not_given():
    model = randomized(SMALL)
    *trajectory, _ = trajectories(2, 5)
    mask = padding("left", [5, 3], 5)
    torch.testing.assert_close(model(*trajectory).action, model(*trajectory, torch.arange(5).expand(2, 5)).action)
    counted = torch.tensor([[0, 1, 2, 3, 4], [0, 0, 0, 1, 2]])
    found = model(*trajectory, mask=mask).action[mask]
    torch.testing.assert_close(found, model(*trajectory, counted, mask).action[mask])


@pytest.mark.parametrize("predict_all", [False, True])
def test_gradients_reach_every_parameter(predict_all):
    model = FlowformerDecision(replace(SMALL, predict_all=predict_all))
    *trajectory, timesteps = trajectories(40, 7, torch.float32)
    loss = model.loss(*trajectory, timesteps)
    if predict_all:
        loss = sum(part.square().mean() for part in model(*trajectory, timesteps))
    for gradient in gradients(loss, model):
        assert gradient.isfinite().all()
        assert gradient.any()


def test_bf16_autocast():
    model = FlowformerDecision(SMALL)
    trajectory = trajectories(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model.loss(*trajectory)
        action, _ = episode(model, *trajectory[:2], model.new_rollout(3))
    exact = model.loss(*trajectory)
    torch.testing.assert_close(loss, exact, rtol=0.02, atol=0)
    assert_like_gradients(model, loss, exact)
    expected, _ = episode(model, *trajectory[:2], model.new_rollout(3))
    assert (action.float() - expected).norm() < 0.05 * expected.norm()


def test_gradient_checkpointing_changes_nothing():
    model = randomized(replace(SMALL, dropout=0.1)).train()
    trajectory, mask = trajectories(), padding("left", [7, 3, 5], 7)
    results = []
    for model.gradient_checkpointing in (False, True):
        torch.manual_seed(1)
        loss = model.loss(*trajectory, mask)
        results.append([loss, *gradients(loss, model)])
    torch.testing.assert_close(*results, rtol=0, atol=0)


@torch.no_grad()
def test_compiled_model_is_the_same():
    model = randomized(SMALL)
    trajectory, mask = trajectories(), padding("left", [7, 3, 5], 7)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    found, expected = compiled(*trajectory, mask), model(*trajectory, mask)
    torch.testing.assert_close(found.action, expected.action, rtol=1e-12, atol=1e-12)


@SIDES
def test_padded_batch_is_its_parts(side):
    model = randomized(SMALL)
    lengths = [7, 3, 1]
    trajectory, mask = trajectories(), padding(side, lengths, 7)
    loss = model.loss(*trajectory, mask)
    errors = []
    for i, present in enumerate(mask):
        part = [x[i][present][None] for x in trajectory]
        alone = model(*part).action
        torch.testing.assert_close(model(*trajectory, mask).action[i][present], alone[0], rtol=1e-10, atol=1e-10)
        errors.append((alone - part[2]).square().flatten())
    expected = torch.cat(errors).mean()
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(gradients(loss, model), gradients(expected, model), rtol=1e-10, atol=1e-10)


@SIDES
@pytest.mark.parametrize("part", [0, 1, 2], ids=["returns", "states", "actions"])
@pytest.mark.parametrize("attention", ["flow", "softmax"])
def test_nan_in_the_padding_changes_nothing(attention, part, side):
    model = randomized(replace(SMALL, attention=attention, predict_all=True))
    trajectory, mask = trajectories(), padding(side, [7, 3, 0], 7)
    damaged = [x.clone() for x in trajectory]
    damaged[part][~mask] = torch.nan
    results = []
    for each in (trajectory, damaged):
        predictions, loss = model(*each, mask), model.loss(*each, mask)
        total = loss + sum(x[mask].square().sum() for x in predictions)
        results.append([loss, *(x[mask] for x in predictions), *gradients(total, model)])
    torch.testing.assert_close(*results, rtol=0, atol=0)


@SIDES
def test_nan_in_the_padding_of_a_model_with_discrete_actions_changes_nothing(side):
    model = randomized(DISCRETE)
    (returns, states, _, timesteps), mask = trajectories(), padding(side, [7, 3, 0], 7)
    choices = torch.randint(DISCRETE.action_dim, mask.shape)
    damaged = (x.masked_fill(~mask.view(3, 7, *[1] * (x.dim() - 2)), torch.nan) for x in (returns, states))
    results = []
    for each in ((returns, states, choices), (*damaged, choices.masked_fill(~mask, -1))):
        loss = model.loss(*each, timesteps, mask)
        results.append([loss, *gradients(loss, model)])
    torch.testing.assert_close(*results, rtol=0, atol=0)


def test_loss_of_no_steps_is_zero():
    assert randomized(SMALL).loss(*trajectories(), torch.zeros(3, 7, dtype=torch.bool)) == 0


@torch.no_grad()
def test_recurrent_rollout_is_one_run_over_the_episode():
    model = randomized(SMALL)
    returns, states, *_ = trajectories(3, 12)
    actions, rollout = episode(model, returns, states, model.new_rollout(3))
    torch.testing.assert_close(actions, model(returns, states, actions).action, rtol=1e-10, atol=1e-10)
    assert rollout.timestep.tolist() == [12, 12, 12]


@torch.no_grad()
def test_window_rollout_is_a_run_over_the_last_steps():
    model = randomized(SMALL)
    returns, states, *_ = trajectories(3, 12)
    actions, _ = episode(model, returns, states, model.new_rollout(3, window=5))
    for now in range(12):
        last = slice(max(0, now - 4), now + 1)
        timesteps = torch.arange(12)[last].expand(3, -1)
        expected = model(returns[:, last], states[:, last], actions[:, last], timesteps).action[:, -1]
        torch.testing.assert_close(actions[:, now], expected, rtol=1e-10, atol=1e-10)


@torch.no_grad()
def test_rollouts_agree_within_a_window():
    model = randomized(SMALL)
    returns, states, *_ = trajectories(3, 12)
    recurrent, _ = episode(model, returns, states, model.new_rollout(3))
    window, _ = episode(model, returns, states, model.new_rollout(3, window=8))
    torch.testing.assert_close(recurrent[:, :8], window[:, :8], rtol=1e-10, atol=1e-10)
    assert (recurrent[:, 8:] - window[:, 8:]).abs().amax((0, 2)).min() > 1e-6


@torch.no_grad()
def test_window_of_one_step_forgets_everything():
    model = randomized(SMALL)
    returns, states, *_ = trajectories(2, 4)
    actions, _ = episode(model, returns, states, model.new_rollout(2, window=1))
    for now in range(4):
        step = slice(now, now + 1)
        alone = model(returns[:, step], states[:, step], actions[:, step], torch.full((2, 1), now)).action[:, 0]
        torch.testing.assert_close(actions[:, now], alone, rtol=1e-10, atol=1e-10)


@WINDOWS
@torch.no_grad()
def test_rows_begin_anew_on_their_own(window):
    model = randomized(SMALL)
    returns, states, *_ = trajectories(3, 9)
    kept, _ = episode(model, returns, states, model.new_rollout(3, window=window))
    _, rollout = episode(model, returns[:, :5], states[:, :5], model.new_rollout(3, window=window))
    rollout = rollout.reset(torch.tensor([False, True, False]))
    assert rollout.timestep.tolist() == [5, 0, 5]
    actions, _ = episode(model, returns[:, 5:], states[:, 5:], rollout)
    fresh, _ = episode(model, returns[:, 5:], states[:, 5:], model.new_rollout(3, window=window))
    torch.testing.assert_close(actions[[0, 2]], kept[[0, 2], 5:], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(actions[1], fresh[1], rtol=1e-10, atol=1e-10)


@WINDOWS
@torch.no_grad()
def test_another_action_may_be_taken(window):
    model = randomized(SMALL)
    returns, states, taken, _ = trajectories(2, 4)
    rollout = model.new_rollout(2, window=window)
    found = []
    for now in range(4):
        action, rollout = model.act(returns[:, now], states[:, now], rollout)
        rollout = replace(rollout, action=taken[:, now])
        found.append(action)
    expected = model(returns, states, taken).action
    torch.testing.assert_close(torch.stack(found, 1), expected, rtol=1e-10, atol=1e-10)


@torch.no_grad()
def test_a_step_costs_the_same_wherever_it_is():
    model = randomized(SMALL)
    returns, states, *_ = trajectories(2, 31)
    costs = []
    for past in (1, 30):
        _, rollout = episode(model, returns[:, :past], states[:, :past], model.new_rollout(2))
        with FlopCounterMode(display=False) as counter:
            model.act(returns[:, past], states[:, past], rollout)
        costs.append(counter.get_total_flops())
    assert costs[0] == costs[1] > 0


@pytest.mark.parametrize("attention", ["softmax", "linear"])
def test_rivals_take_the_place_of_flow_attention(attention):
    model = randomized(replace(SMALL, attention=attention))
    trajectory, mask = trajectories(), padding("left", [7, 3, 5], 7)
    assert all(gradient.isfinite().all() for gradient in gradients(model.loss(*trajectory, mask), model))
    with pytest.raises(NotImplementedError, match=rf"{attention} attention has no state.*window=6"):
        model.new_rollout(3)
    actions, _ = episode(model, *trajectory[:2], model.new_rollout(3, window=7))
    torch.testing.assert_close(actions, model(*trajectory[:2], actions).action, rtol=1e-10, atol=1e-10)


def test_maps_of_every_layer():
    model = randomized(SMALL)
    trajectory, mask = trajectories(2, 4), padding("left", [4, 2], 4)
    predictions, maps = model(*trajectory, mask, return_maps=True)
    torch.testing.assert_close(predictions.action, model(*trajectory, mask).action)
    assert [each.competition.shape for each in maps] == [(2, 2, 12)] * 2
    assert not maps[0].allocation[1, :, :6].any()


@torch.no_grad()
def test_saved_model_is_the_same(tmp_path):
    model = FlowformerDecision(replace(SMALL, predict_all=True, variant=FlowVariant.named("rl"))).eval()
    model.save_pretrained(tmp_path)
    loaded = FlowformerDecision.from_pretrained(tmp_path)
    assert loaded.config == model.config
    trajectory = trajectories(dtype=torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(loaded(*trajectory), model(*trajectory), strict=True))


def choices(batch=3, steps=7) -> tuple[torch.Tensor, ...]:
    """As `trajectories`, with discrete actions."""
    returns, states, _, timesteps = trajectories(batch, steps)
    return returns, states, torch.randint(SMALL.action_dim, (batch, steps)), timesteps


class TestDiscreteActions:
    @torch.no_grad()
    def test_are_one_hot_actions_with_logits(self):
        model, trajectory = randomized(DISCRETE), choices()
        returns, states, actions, timesteps = trajectory
        free = randomized(replace(SMALL, bounded_actions=False))
        free.load_state_dict(model.state_dict())
        one_hot = torch.eye(3, dtype=torch.float64)[actions]
        torch.testing.assert_close(model(*trajectory).action, free(returns, states, one_hot, timesteps).action)
        torch.testing.assert_close(model(returns, states, actions.int(), timesteps).action, model(*trajectory).action)

    @SIDES
    def test_padded_loss_is_the_cross_entropy_of_the_parts(self, side):
        model = randomized(DISCRETE)
        trajectory, mask = choices(), padding(side, [7, 3, 1], 7)
        trajectory[2][~mask] = -100  # padding need not be a choice
        logits, targets = [], []
        for i, present in enumerate(mask):
            part = [x[i][present][None] for x in trajectory]
            logits.append(model(*part).action[0])
            targets.append(part[2][0])
        expected = nn.functional.cross_entropy(torch.cat(logits), torch.cat(targets))
        loss = model.loss(*trajectory, mask)
        torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(gradients(loss, model), gradients(expected, model), rtol=1e-10, atol=1e-10)
        assert model.loss(*trajectory, torch.zeros_like(mask)) == 0
        whole = choices()
        torch.testing.assert_close(model.loss(*whole), model.loss(*whole, torch.ones_like(mask)))

    @pytest.mark.parametrize("window", [None, 12], ids=["recurrent", "window"])
    @torch.no_grad()
    def test_rollout_takes_the_likeliest_choice_of_one_run(self, window):
        model = FlowformerDecision(DISCRETE).double().eval()  # with larger weights, one choice is always the likeliest
        returns, states, *_ = choices(3, 12)
        actions, rollout = episode(model, returns, states, model.new_rollout(3, window=window))
        assert actions.dtype == rollout.action.dtype == torch.long
        assert torch.equal(actions, model(returns, states, actions).action.argmax(-1))
        assert len(actions.unique()) > 1
        rollout = rollout.reset(torch.tensor([True, False, False]))
        again, _ = episode(model, returns[:, :1], states[:, :1], rollout)
        assert again[0, 0] == actions[0, 0]

    @torch.no_grad()
    def test_compiled_and_saved_model_is_the_same(self, tmp_path):
        model = randomized(DISCRETE)
        trajectory, mask = choices(), padding("left", [7, 3, 5], 7)
        expected = model(*trajectory, mask).action
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(*trajectory, mask).action, expected, rtol=1e-12, atol=1e-12)
        model.save_pretrained(tmp_path)
        assert torch.equal(FlowformerDecision.from_pretrained(tmp_path)(*trajectory, mask).action, expected)

    @pytest.mark.parametrize("choice", [-1, 3])
    def test_a_choice_that_is_none_is_refused(self, choice):
        returns, states, actions, _ = choices()
        actions[0, 0] = choice
        with pytest.raises(ValueError, match=r"3 discrete actions takes 0 to 2, got (-1 to 2|0 to 3)"):
            randomized(DISCRETE)(returns, states, actions)

    def test_other_kinds_are_refused(self):
        returns, states, actions, _ = choices()
        for wrong in (actions.double(), torch.eye(3)[actions], actions > 0):
            with pytest.raises(ValueError, match=r"\(B, T\) integers, got"):
                randomized(DISCRETE).loss(returns, states, wrong)
        with pytest.raises(ValueError, match=r"\(B, T, 3\), got .*\(3, 7\) torch.int64"):
            randomized(SMALL)(returns, states, actions)


@pytest.mark.parametrize("name", ["state_dim", "action_dim", "num_layers", "window", "max_timestep"])
def test_config_errors(name):
    with pytest.raises(ValueError, match=f"{name} must be a positive whole number, got 0"):
        DecisionConfig(**{"state_dim": 5, "action_dim": 3} | {name: 0})


def test_call_errors():
    model = randomized(SMALL)
    returns, states, actions, timesteps = trajectories()
    with pytest.raises(ValueError, match=r"\(B, T, 5\) and \(B, T, 3\), got \(3, 7\), \(3, 7, 3\)"):
        model(returns, actions, actions)
    with pytest.raises(ValueError, match=r"got \(3, 7, 1\)"):
        model(returns[..., None], states, actions)
    with pytest.raises(ValueError, match=r"the mask must be bool of shape \(3, 7\), got torch.float64"):
        model(returns, states, actions, timesteps, torch.ones_like(returns))
    with pytest.raises(ValueError, match="only 40 learned ones"):
        model(returns, states, actions, timesteps + 40)
    with pytest.raises(ValueError, match="window must be positive"):
        model.new_rollout(3, window=0)
    with pytest.raises(
        ValueError, match=r"a rollout of 3 episodes takes .* \(3,\) and \(3, 5\), got \(2,\) and \(2, 5\)"
    ):
        model.act(returns[:2, 0], states[:2, 0], model.new_rollout(3))


def test_example_gets_what_it_asks_for(capsys):
    runpy.run_path(str(ROOT / "examples" / "offline_rl.py"))
    low, high, window = [float(line.split()[-1]) for line in capsys.readouterr().out.splitlines()[1:]]
    assert low < high - 3
    assert high == window
