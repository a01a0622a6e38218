"""Random directions: what is drawn, that it repeats, and when training draws anew."""

from __future__ import annotations

import torch
from helpers import random_inputs, with_gradients
from torch.utils.checkpoint import checkpoint

from flowformer.baselines.directions import RandomDirections
from flowformer.baselines.performer import PerformerAttention

HEADS, DIM = 3, 4


def test_directions_are_orthogonal_and_gaussian():
    torch.manual_seed(0)
    vectors = RandomDirections(50, 8, 4).double()()
    for block in vectors.split(4, 1):
        product = block @ block.mT
        off = product - torch.diag_embed(product.diagonal(dim1=-2, dim2=-1))
        assert off.abs().max() < 1e-5
    assert vectors.mean((0, 1)).abs().max() < 0.2  # 400 vectors: no direction is favoured
    # squared lengths are χ² of 4 degrees: mean 4, variance 8
    lengths = vectors.square().sum(-1)
    assert abs(lengths.mean() - 4) < 0.5
    assert abs(lengths.var() - 8) < 2.5


def directions(seed, **options):
    torch.manual_seed(seed)
    return RandomDirections(2, 5, 4, **options)


def test_directions_repeat_and_are_redrawn():
    ours, same, other = (directions(seed) for seed in (0, 0, 1))
    assert torch.equal(ours(), same())
    assert not torch.equal(ours(), other())
    first = ours()
    ours.redraw()
    assert not torch.isclose(ours(), first).any()
    same.redraw()
    assert torch.equal(ours(), same())


def test_training_redraws_now_and_then():
    module = directions(0, redraw_every=3)
    calls = torch.stack([module() for _ in range(7)])
    assert [n for n in range(1, 7) if not torch.equal(calls[n], calls[n - 1])] == [3, 6]
    module.eval()
    assert all(torch.equal(module(), calls[6]) for _ in range(7))
    never = directions(0)
    assert all(torch.equal(never(), calls[0]) for _ in range(7))


def test_redraws_go_on_where_they_were_saved():
    module, other = directions(0, redraw_every=3), directions(1, redraw_every=3)
    for _ in range(4):
        module()
    other.load_state_dict(module.state_dict())
    assert all(torch.equal(module(), other()) for _ in range(9))


def test_a_redraw_leaves_the_graph_of_earlier_calls_alone():
    """The two documents of a pair go through one layer, and the gradient of both is that of what each saw."""
    module = PerformerAttention(head_dim=DIM, features=7, redraw_every=1).double()
    inputs = random_inputs(heads=HEADS, dim=DIM)
    saved = {name: x.clone() for name, x in module.state_dict().items()}
    both = with_gradients(lambda *x: module(*x) + module(*x), inputs)
    module.load_state_dict(saved)
    apart = [with_gradients(module, inputs) for _ in range(2)]
    for value, *parts in zip(both, *apart, strict=True):
        torch.testing.assert_close(value, sum(parts), rtol=1e-12, atol=1e-14)


def test_a_checkpointed_layer_sees_the_same_directions_again():
    module = PerformerAttention(head_dim=DIM, features=7, redraw_every=1).double()
    inputs = random_inputs(heads=HEADS, dim=DIM)
    saved = {name: x.clone() for name, x in module.state_dict().items()}
    plain = [with_gradients(module, inputs) for _ in range(3)]
    module.load_state_dict(saved)
    again = [with_gradients(lambda *x: checkpoint(module, *x, use_reentrant=False), inputs) for _ in range(3)]
    for values, truths in zip(again, plain, strict=True):
        assert all(map(torch.equal, values, truths))
    assert not torch.equal(plain[0][0], plain[1][0])
