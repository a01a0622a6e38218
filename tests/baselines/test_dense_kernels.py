"""The rivals with kernels, landmarks and learned maps: equal to their dense formulas, and exact at their limits."""

from __future__ import annotations

import math
from functools import partial
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from attentions import CROSS, DIM, FORMS, HEADS, build, with_all_gradients
from helpers import random_inputs, randomized, relative_error, with_gradients

from flowformer import baselines
from flowformer.baselines import linformer, nystromformer, performer, soft, yoso
from flowformer.baselines.decay import decayed_product

# Dense formulas of one sequence without padding: every N × M number is written down. They take the module for its
# parameters and sizes alone.


def softmax(q, k, v, seen=True):
    return (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~torch.as_tensor(seen), -torch.inf).softmax(-1) @ v


def dense_linear(module, q, k, v, seen):
    weights = ((F.elu(q) + 1) @ (F.elu(k) + 1).mT) * seen
    return weights @ v / (weights.sum(-1, keepdim=True) + 1e-6)


def dense_linformer(module, q, k, v, seen):
    k = torch.einsum("mr,bhmd->bhrd", module.projection[0, : k.shape[2]], k)
    v = torch.einsum("mr,bhmd->bhrd", module.projection[-1, : v.shape[2]], v)
    return softmax(q, k, v)


def normalised(weights, v, least=0.0):
    return weights @ v / weights.sum(-1, keepdim=True).clamp_min(least)


def dense_performer(module, q, k, v, seen):
    q, k = q / q.shape[-1] ** 0.25, k / k.shape[-1] ** 0.25
    directions = module.directions.vectors[0]
    phi_q, phi_k = (torch.exp(x @ directions.mT) * torch.exp(-(x.norm(dim=-1, keepdim=True) ** 2) / 2) for x in (q, k))
    return normalised(torch.einsum("bhnr,bhmr->bhnm", phi_q, phi_k) * seen, v)


def dense_performer_relu(module, q, k, v, seen):
    return normalised(((q.relu() + 1e-3) @ (k.relu() + 1e-3).mT) * seen, v)


def dense_synthesizer(module, q, k, v, seen):
    if module.name == "synthesizer":
        logits = module.logits[:, : q.shape[2], : k.shape[2]]
    else:
        hidden = torch.einsum("bhnd,hde->bhne", q, module.hidden_weight) + module.hidden_bias
        logits = torch.einsum("bhne,hel->bhnl", hidden.relu(), module.logit_weight) + module.logit_bias
        logits = logits[..., : k.shape[2]]
    if module.dot_product:
        logits = logits + q @ k.mT / q.shape[-1] ** 0.5
    return logits.masked_fill(~seen, -torch.inf).softmax(-1) @ v


def dense_cosformer(module, q, k, v, seen):
    distance = torch.arange(q.shape[2], dtype=q.dtype)[:, None] - torch.arange(k.shape[2], dtype=q.dtype)
    weights = (q.relu() @ k.relu().mT) * torch.cos(math.pi / 2 * distance / module.max_length)
    return normalised(weights * seen, v, 1e-6)


def segments(x, count):
    """The mean of each segment; segment s has the tokens i with ⌊i·count/N⌋ = s."""
    length = x.shape[2]
    cuts = [-(-s * length // count) for s in range(count + 1)]
    return torch.stack([x[:, :, a:b].mean(2) for a, b in pairwise(cuts) if b > a], 2)


def dense_nystromformer(module, q, k, v, seen):
    q_landmarks, k_landmarks = segments(q, module.landmarks), segments(k, module.landmarks)
    first, between, last = (
        (x @ y.mT / q.shape[-1] ** 0.5).softmax(-1)
        for x, y in ((q, k_landmarks), (q_landmarks, k_landmarks), (q_landmarks, k))
    )
    scale = torch.linalg.matrix_norm(between, 1) * torch.linalg.matrix_norm(between, torch.inf)
    inverse, identity = between.mT / scale[..., None, None], torch.eye(between.shape[-1], dtype=q.dtype)
    for _ in range(module.steps):
        az = between @ inverse
        inverse = 0.25 * inverse @ (13 * identity - az @ (15 * identity - az @ (7 * identity - az)))
    return first @ inverse @ last @ v + convolved(module, v)


def convolved(module, v):
    """The depth-wise convolution of the values as a matrix of bands; 0 where there is none."""
    if module.convolution is None:
        return 0
    length, width = v.shape[2], module.convolution.shape[2]
    band = v.new_zeros(v.shape[1], length, length)
    for offset in range(width):
        shift = offset - width // 2
        size = length - abs(shift)
        if size > 0:
            band = band + module.convolution[:, 0, offset, 0, None, None] * torch.ones(size).double().diag(shift)
    return band @ v


def dense_yoso(module, q, k, v, seen):
    q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    cosine = q @ k.mT
    collision = (1 - torch.arccos(cosine.detach()) / math.pi) ** 9
    # the exponential of the same value and of slope τ/2
    weights = collision * torch.exp(4.5 * (cosine - cosine.detach()))
    return F.normalize((weights * seen) @ v, dim=-1) + convolved(module, v)


def dense_soft(module, q, k, v, seen):
    def kernel(x, y):
        return torch.exp(-((x[..., :, None, :] - y[..., None, :, :]) ** 2).sum(-1) / (2 * x.shape[-1] ** 0.5))

    landmarks = segments(q, module.landmarks)
    if module.landmark_norm is not None:
        # after the scale that both sides of the kernel have
        scale = q.shape[-1] ** 0.25
        landmarks = scale * F.gelu(module.landmark_norm(landmarks / scale))
    between = kernel(landmarks, landmarks)
    step = 1.8 / between.sum(-1).amax(-1)[..., None, None] ** 2
    between = between + 0.01 * torch.eye(between.shape[-1], dtype=q.dtype)
    inverse = step * between
    for _ in range(module.steps):
        inverse = 2 * inverse - inverse @ between @ inverse
    return kernel(q, landmarks) @ inverse @ kernel(landmarks, q) @ v + convolved(module, v)


def random_kernel(module, q, k):
    """Σ cos(w·(q̂ − k̂))/R."""
    w = module.sigma * module.directions.vectors
    difference = F.normalize(q, dim=-1)[..., :, None, :] - F.normalize(k, dim=-1)[..., None, :, :]
    return torch.einsum("bhnmd,hrd->bhnmr", difference, w).cos().mean(-1)


def dense_rfa(module, q, k, v, seen):
    return normalised(random_kernel(module, q, k) * seen, v, 1e-3)


def dense_gated_rfa(module, q, k, v, seen):
    gate = (k @ module.gate_weight + module.gate_bias).sigmoid()[..., 0]  # (B, H, N)
    rows = []
    weight = torch.zeros_like(gate)
    for t in range(gate.shape[2]):
        now = torch.eye(gate.shape[2], dtype=q.dtype)[t]
        weight = weight * gate[:, :, t, None] + now * (1 - gate[:, :, t, None])
        rows.append(weight)
    return normalised(random_kernel(module, q, k) * torch.stack(rows, 2), v, 1e-3)


DENSE = {
    "softmax": lambda module, *inputs: softmax(*inputs),
    "linear": dense_linear,
    "linformer": dense_linformer,
    "performer": dense_performer,
    "performer-relu": dense_performer_relu,
    "synthesizer": dense_synthesizer,
    "synthesizer-dense": dense_synthesizer,
    "cosformer": dense_cosformer,
    "nystromformer": dense_nystromformer,
    "yoso": dense_yoso,
    "soft": dense_soft,
    "rfa": dense_rfa,
    "rfa-gate": dense_gated_rfa,
}


def trained(case):
    """With parameters that are not those of the start, of which many are 0 or 1."""
    return randomized(build(case), 0.5)


def dense(module, inputs, is_causal):
    seen = torch.ones(inputs[0].shape[2], inputs[1].shape[2], dtype=torch.bool)
    return DENSE[module.name](module, *inputs, seen.tril() if is_causal else seen)


@pytest.mark.parametrize("length", [1, 2, 17, 64, 65, 131])
@pytest.mark.parametrize(("case", "is_causal"), [form for form in FORMS if form.values[0].partition(",")[0] in DENSE])
def test_equals_the_dense_formula(case, is_causal, length):
    module, inputs = trained(case), random_inputs(heads=HEADS, dim=DIM, sinks=length, value_dim=6)
    ours = with_all_gradients(lambda *x: module(*x, is_causal=is_causal), module, inputs)
    theirs = with_all_gradients(lambda *x: dense(module, x, is_causal), module, inputs)
    for value, truth in zip(ours, theirs, strict=True):
        torch.testing.assert_close(value, truth, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("case", [case for case in CROSS if case.partition(",")[0] in DENSE])
def test_cross_attention(case):
    module, inputs = trained(case), random_inputs(heads=HEADS, dim=DIM, sinks=5, sources=11, value_dim=6)
    assert relative_error(module(*inputs), dense(module, inputs, False)) < 1e-12


@pytest.mark.parametrize("case", ["linformer", "synthesizer", "synthesizer-dense", "cosformer"])
def test_lengths(case):
    with pytest.raises(ValueError, match=f"{case} attention depends on the position .* got None"):
        build(case, max_length=None)
    with pytest.raises(ValueError, match=f"{case} attention was built for at most 8 tokens, got 9"):
        build(case, max_length=8)(*random_inputs(heads=HEADS, dim=DIM))
    if case == "linformer":  # its queries have no position
        assert build(case, max_length=8)(*random_inputs(heads=HEADS, dim=DIM, sources=8)).shape == (2, HEADS, 9, DIM)


def test_bad_options():
    for kind in (nystromformer.NystromformerAttention, soft.SoftAttention):
        with pytest.raises(ValueError, match="landmarks must be a positive whole number, got 0"):
            kind(num_heads=HEADS, landmarks=0)
        with pytest.raises(ValueError, match="steps must be a positive whole number, got -1"):
            kind(num_heads=HEADS, steps=-1)
    for kind in (nystromformer.NystromformerAttention, yoso.YosoAttention, soft.SoftAttention):
        with pytest.raises(ValueError, match="positive odd width or None, got 4"):
            kind(num_heads=HEADS, convolution=4)
    with pytest.raises(ValueError, match="a convolution has a kernel for each head; pass num_heads"):
        yoso.YosoAttention(convolution=3)
    with pytest.raises(ValueError, match="hashes must be a positive whole number, got 0"):
        yoso.YosoAttention(hashes=0)
    with pytest.raises(ValueError, match="rank must be a positive whole number, got -3"):
        linformer.LinformerAttention(max_length=9, rank=-3)
    with pytest.raises(ValueError, match="landmark_norm has a weight for each feature of a head; pass head_dim"):
        soft.SoftAttention(num_heads=HEADS, landmark_norm=True)
    inputs = random_inputs(heads=HEADS, dim=DIM)
    with pytest.raises(NotImplementedError, match=r"yoso attention does not support: causal\. These do: (?!.*yoso)"):
        build("yoso, convolution")(*inputs, is_causal=True)
    with pytest.raises(ValueError, match="features must be a positive whole number, got 0"):
        performer.PerformerAttention(head_dim=DIM, features=0)
    with pytest.raises(ValueError, match="redraw_every must be a positive number of calls, or None for never, got 0"):
        performer.PerformerAttention(head_dim=DIM, redraw_every=0)


# where the approximations become exact


def test_linformer_with_the_identity_is_softmax():
    module, inputs = build("linformer", max_length=9, rank=9), random_inputs(heads=HEADS, dim=DIM)
    module.projection.data[:] = torch.eye(9)
    assert relative_error(module(*inputs), softmax(*inputs)) < 1e-12


@pytest.mark.parametrize("length", [9, 16])
def test_nystromformer_with_all_landmarks_is_softmax(length):
    module = build("nystromformer, plain", landmarks=16, steps=40)
    inputs = random_inputs(heads=HEADS, dim=DIM, sinks=length)
    assert relative_error(module(*inputs), softmax(*inputs)) < 1e-6


def test_soft_with_all_landmarks_is_the_gaussian_kernel():
    module = build("soft", landmarks=16, steps=60)
    module.ridge = 0.0
    q, k, v = random_inputs(heads=HEADS, dim=DIM)
    kernel = torch.exp(-(torch.cdist(q, q) ** 2) / (2 * DIM**0.5))
    assert relative_error(module(q, k, v), kernel @ v) < 1e-6


@pytest.mark.parametrize("is_causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("case", ["performer", "rfa"])
def test_random_features_converge_to_softmax(case, is_causal):
    q, k, v = random_inputs(heads=HEADS, dim=DIM, sinks=20)
    q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)  # as rfa does anyway
    scaled = (q * DIM**0.5, k) if case == "rfa" else (q, k)
    truth = F.scaled_dot_product_attention(*scaled, v, is_causal=is_causal)
    errors = []
    torch.manual_seed(0)
    for features in (64, 1024, 16384):
        module = baselines.build(case, num_heads=HEADS, head_dim=DIM, features=features).double()
        errors.append(relative_error(module(q, k, v, is_causal=is_causal), truth))
    # the error of an average falls as the root of its terms: by 4 each time
    assert errors[1] < errors[0] / 2
    assert errors[2] < errors[1] / 2
    assert errors[2] < 0.03


def test_cosformer_of_near_tokens_is_relu_attention():
    module, (q, k, v) = build("cosformer", max_length=10**7), random_inputs(heads=HEADS, dim=DIM)
    weights = q.relu() @ k.relu().mT
    assert relative_error(module(q, k, v), normalised(weights, v, 1e-6)) < 1e-10


def test_many_hashes_of_yoso_find_the_token_itself():
    q, _, v = random_inputs(heads=HEADS, dim=DIM)
    assert relative_error(build("yoso", hashes=1000)(q, q, v), F.normalize(v, dim=-1)) < 1e-6


def test_yoso_of_like_tokens_has_a_gradient():
    """Where the arc cosine has none."""
    module, (_, _, value) = build("yoso"), random_inputs(heads=HEADS, dim=DIM)
    inputs = torch.ones_like(value), torch.ones_like(value), value
    ours = with_gradients(module, inputs)
    for result, truth in zip(ours, with_gradients(lambda *x: dense(module, x, False), inputs), strict=True):
        torch.testing.assert_close(result, truth, rtol=1e-8, atol=1e-9)


def test_a_gate_that_forgets_all_leaves_the_token_itself():
    module, (q, k, v) = trained("rfa-gate"), random_inputs(heads=HEADS, dim=DIM)
    module.gate_weight.data.zero_()
    module.gate_bias.data.fill_(-40)
    assert relative_error(module(q, k, v, is_causal=True), v) < 1e-12


# numbers that would overflow or vanish


@pytest.mark.parametrize("is_causal", [False, True], ids=["bidirectional", "causal"])
def test_performer_with_large_inputs(is_causal):
    """Float32 cannot hold these features: the running maximum must."""
    module = performer.PerformerAttention(head_dim=DIM, features=32)
    q, k, v = random_inputs(heads=HEADS, dim=DIM, sinks=100)
    k = k + torch.linspace(0, 30, 100)[:, None]  # features shrink by e⁻⁹⁰⁰ along the sequence
    exact = module(q, k, v, is_causal=is_causal)
    result = module(*(x.float() for x in (q, k, v)), is_causal=is_causal)
    assert relative_error(result, exact) < 1e-3
    grow = module(*(x.float().flip(2) for x in (q, k, v)), is_causal=is_causal)
    assert relative_error(grow, module(*(x.flip(2) for x in (q, k, v)), is_causal=is_causal)) < 1e-3
    # padding must not set the maximum either
    mask = torch.arange(100).expand(2, -1) >= 60
    small = module(*(x.float() for x in (q, k, v)), is_causal=is_causal, key_mask=mask)
    assert relative_error(small, module(q, k, v, is_causal=is_causal, key_mask=mask)) < 1e-3


@pytest.mark.parametrize("is_causal", [False, True], ids=["bidirectional", "causal"])
def test_performer_where_features_of_queries_and_keys_do_not_overlap(is_causal):
    """The features that are large for a query are smaller than e⁻¹⁰⁰ of the largest for every key."""
    module = performer.PerformerAttention(head_dim=64, features=32)
    q, k, v = random_inputs(heads=HEADS, dim=64, sinks=100)
    inputs = [x.float() for x in (20 * q, 20 * k, v)]
    both = (with_gradients(partial(module, is_causal=is_causal), x) for x in (inputs, [x.double() for x in inputs]))
    for value, truth in zip(*both, strict=True):
        assert relative_error(value, truth) < 1e-3


@pytest.mark.parametrize("length", [1, 64, 65, 200])
def test_decayed_product_is_its_recurrence(length):
    q, k, v = random_inputs(heads=2, dim=3, sinks=length, value_dim=5)
    log_decay = -torch.rand(2, 2, length, dtype=torch.float64) * 3
    log_decay[..., length // 2] = -1e4  # forgets everything

    def recurrence(q, k, v, log_decay):
        state, rows = torch.zeros(2, 2, 3, 5, dtype=torch.float64), []
        for t in range(length):
            state = state * log_decay[:, :, t, None, None].exp() + k[:, :, t, :, None] * v[:, :, t, None, :]
            rows.append(q[:, :, t, None] @ state)
        return torch.cat(rows, 2)

    both = (with_gradients(f, (q, k, v, log_decay)) for f in (decayed_product, recurrence))
    for value, truth in zip(*both, strict=True):
        torch.testing.assert_close(value, truth, rtol=1e-10, atol=1e-11)
