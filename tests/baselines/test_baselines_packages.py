"""The rivals against the packages that have them: the same weights and inputs give the same values and gradients.

Where a package differs from the paper it is set up to be the same thing, or compared where both must agree; the comment
says which. cosFormer, Sinkhorn, the Synthesizer, SOFT and RFA have no maintained package: their formulas are written
out in the other tests of the rivals.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import random_inputs, with_gradients
from linformer import LinformerSelfAttention
from local_attention import LocalAttention
from nystrom_attention import NystromAttention
from performer_pytorch import performer_pytorch
from reformer_pytorch.reformer_pytorch import LSHAttention
from torch.func import functional_call
from transformers import BigBirdConfig, BigBirdModel, LongformerConfig, NystromformerConfig, ReformerConfig, YosoConfig
from transformers.models.big_bird.modeling_big_bird import BigBirdBlockSparseAttention
from transformers.models.longformer.modeling_longformer import LongformerSelfAttention
from transformers.models.nystromformer.modeling_nystromformer import NystromformerSelfAttention
from transformers.models.reformer.modeling_reformer import LSHSelfAttention
from transformers.models.yoso import modeling_yoso

from flowformer import baselines

BATCH, HEADS, DIM = 2, 2, 4
WIDTH = HEADS * DIM
CONFIG = {"hidden_size": WIDTH, "num_attention_heads": HEADS, "attention_probs_dropout_prob": 0.0}
EXACT = {"rtol": 1e-9, "atol": 1e-11}


def build(name, **options):
    torch.manual_seed(0)
    return baselines.build(name, num_heads=HEADS, head_dim=DIM, max_length=256, **options).double()


def tokens(length, width=WIDTH, batch=BATCH):
    return torch.randn(batch, length, width, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def projected(x, weights, *names, heads=HEADS):
    """x (B, N, W) through the linear maps of these names, each (B, H, N, D)."""
    return [
        F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias")).unflatten(-1, (heads, -1)).transpose(1, 2)
        for name in names
    ]


def joined(result, mask=None):
    result = result.transpose(1, 2).flatten(2)
    return result if mask is None else result * mask[..., None]


def assert_same(values, truths, **tolerance):
    for value, truth in zip(values, truths, strict=True):
        torch.testing.assert_close(value, truth, **tolerance)


def assert_agree(module, x, theirs, ours, **tolerance):
    """As functions of x and of the weights of the package's module, by name."""
    names, weights = zip(*module.named_parameters(), strict=True)
    values, truths = (
        with_gradients(lambda x, *weights, f=function: f(x, dict(zip(names, weights, strict=True))), [x, *weights])
        for function in (ours, theirs)
    )
    assert_same(values, truths, **tolerance)


def padded(length, padding):
    """A batch of one whole sequence and one with padding at the end."""
    return torch.arange(length) < torch.tensor([[length], [length - padding]])


def random_weights(module):
    torch.manual_seed(2)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return module.double().eval()


@pytest.mark.parametrize("padding", [0, 2])
def test_bigbird_of_transformers(padding):
    length, block = 30, 3
    config = BigBirdConfig(**CONFIG, block_size=block, num_random_blocks=2, max_position_embeddings=length)
    module, mechanism = random_weights(BigBirdBlockSparseAttention(config)), build("bigbird", block=block, random=2)
    # theirs draws blocks in training alone, from numpy's global numbers: it gets ours
    blocks, last = torch.arange(length // block), torch.tensor([length // block - 1])[:, None, None]
    seen, counts = mechanism.blocks_seen(blocks, last)
    assert counts[0, :, 1:-1, -2:].all()
    module._bigbird_block_rand_mask_with_head = lambda **_: np.asarray(seen[0, :, 1:-1, -2:])
    # padding stays in the last block, which is global: theirs keeps a block of padding as the global one
    mask = padded(length, padding)
    masks = BigBirdModel.create_masks_for_block_sparse_attn(mask.double(), block)
    blocked, band, rows, columns = masks

    def theirs(x, weights):
        return functional_call(module, weights, (x, band, rows, columns, blocked, blocked))[0]

    def ours(x, weights):
        heads = projected(x, weights, "query", "key", "value")
        return joined(mechanism(*heads, query_mask=mask, key_mask=mask))

    assert_agree(module, tokens(length), theirs, ours, **EXACT)


@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize("global_tokens", [0, 3])
def test_longformer_of_transformers(monkeypatch, global_tokens, padding):
    # it takes its softmax in float32, where what float64 masks with is infinite
    softmax = F.softmax
    monkeypatch.setattr(F, "softmax", lambda x, dim, dtype: softmax(x, dim))
    length, window = 24, 6
    module = random_weights(LongformerSelfAttention(LongformerConfig(**CONFIG, attention_window=[window]), 0))
    # ours has no projections for global tokens alone
    for name in ("query", "key", "value"):
        setattr(module, f"{name}_global", getattr(module, name))
    mechanism, mask = build("longformer", window=window, global_tokens=global_tokens), padded(length, padding)
    is_global = torch.arange(length).expand(BATCH, -1) < global_tokens
    kinds = -10000.0 * ~mask + 10000.0 * is_global

    def theirs(x, weights):
        return functional_call(module, weights, (x, kinds, ~mask, is_global, global_tokens > 0))[0] * mask[..., None]

    def ours(x, weights):
        heads = projected(x, weights, "query", "key", "value")
        return joined(mechanism(*heads, query_mask=mask, key_mask=mask))

    assert_agree(module, tokens(length), theirs, ours, **EXACT)


def test_nystromformer_of_transformers():
    length, landmarks = 24, 6
    config = NystromformerConfig(
        **CONFIG, num_landmarks=landmarks, segment_means_seq_len=length, conv_kernel_size=5, max_position_embeddings=64
    )
    module = random_weights(NystromformerSelfAttention(config))
    # else one matrix of the batch decides where the inverses of all begin
    module.init_option = "exact"
    mechanism = build("nystromformer", landmarks=landmarks, convolution=5)

    # no mask: its landmarks are averages with the padding
    def theirs(x, weights):
        return functional_call(module, weights, (x,))[0]

    def ours(x, weights):
        heads = projected(x, weights, "query", "key", "value")
        return joined(functional_call(mechanism, {"convolution": weights["conv.weight"]}, tuple(heads)))

    assert_agree(module, tokens(length), theirs, ours, **EXACT)


def nystrom_attention(module, mechanism, mask):
    def theirs(x, weights):
        return functional_call(module, weights, (x,), {"mask": mask}) * (1 if mask is None else mask[..., None])

    def ours(x, weights):
        q, k, v = (
            F.linear(x, weights["to_qkv.weight"]).unflatten(-1, (3 * module.heads, -1)).transpose(1, 2).chunk(3, 1)
        )
        masks = {"query_mask": mask, "key_mask": mask}
        result = joined(functional_call(mechanism, {"convolution": weights["res_conv.weight"]}, (q, k, v), masks))
        result = F.linear(result, weights["to_out.0.weight"], weights["to_out.0.bias"])
        return result if mask is None else result * mask[..., None]

    return theirs, ours


def test_nystrom_attention():
    # one matrix of the batch decides where the inverses of all begin: there is one
    options = {"dim_head": DIM, "heads": 1, "num_landmarks": 6, "residual_conv_kernel": 5}
    module = random_weights(NystromAttention(WIDTH, **options))
    torch.manual_seed(0)
    mechanism = baselines.build("nystromformer", num_heads=1, head_dim=DIM, landmarks=6, convolution=5).double()
    assert_agree(module, tokens(24, batch=1), *nystrom_attention(module, mechanism, None), **EXACT)


def test_nystrom_attention_with_padding():
    # its segments are of places, ours of tokens: a whole segment is padding, and ours has one landmark less. There it
    # inverts a matrix with one more row, which is the same once the inverse has converged
    options = {"dim_head": DIM, "heads": HEADS, "num_landmarks": 6, "residual_conv_kernel": 5}
    module = random_weights(NystromAttention(WIDTH, **options, pinv_iterations=40, eps=1e-30))
    mechanism = build("nystromformer", landmarks=5, steps=40, convolution=5)
    mask = torch.arange(24).expand(BATCH, -1) < 20
    assert_agree(module, tokens(24), *nystrom_attention(module, mechanism, mask), **EXACT)


@pytest.mark.parametrize("length", [20, 13])
@pytest.mark.parametrize("one_map", [False, True], ids=["two maps", "one map"])
def test_linformer(length, one_map):
    module = random_weights(LinformerSelfAttention(WIDTH, 20, k=5, heads=HEADS, share_kv=one_map))
    mechanism = build("linformer", rank=5, shared=one_map)
    names = ("to_q", "to_k", "to_k") if one_map else ("to_q", "to_k", "to_v")

    def theirs(x, weights):
        return functional_call(module, weights, (x,))

    def ours(x, weights):
        projection = torch.stack([weights["proj_k"]] if one_map else [weights["proj_k"], weights["proj_v"]])
        result = joined(functional_call(mechanism, {"projection": projection}, tuple(projected(x, weights, *names))))
        return F.linear(result, weights["to_out.weight"], weights["to_out.bias"])

    assert_agree(module, tokens(length), theirs, ours, **EXACT)


@pytest.mark.parametrize("padding", [0, 5])
def test_yoso_of_transformers(monkeypatch, padding):
    # the expectation needs no kernels, which it would fetch and compile where it can
    monkeypatch.setattr(modeling_yoso, "is_ninja_available", lambda: False)
    config = YosoConfig(**CONFIG, use_expectation=True, hash_code_len=9, conv_window=None)
    module, mechanism = random_weights(modeling_yoso.YosoSelfAttention(config)), build("yoso")
    mask = padded(21, padding)

    def theirs(x, weights):
        return functional_call(module, weights, (x, -10000.0 * ~mask))[0]

    def ours(x, weights):
        heads = projected(x, weights, "query", "key", "value")
        return joined(mechanism(*heads, query_mask=mask, key_mask=mask))

    assert_agree(module, tokens(21), theirs, ours, **EXACT)


@pytest.mark.parametrize("is_causal", [False, True], ids=["bidirectional", "causal"])
def test_performer_pytorch(is_causal):
    mechanism, inputs = build("performer", features=11), random_inputs(heads=HEADS, dim=DIM, sinks=20)
    # its small constant in every feature is left out
    features = partial(performer_pytorch.softmax_kernel, projection_matrix=mechanism.directions()[0], eps=0.0)
    attend = partial(performer_pytorch.causal_linear_attention_noncuda, eps=0.0)
    attend = attend if is_causal else performer_pytorch.linear_attention

    def theirs(q, k, v):
        return attend(features(q, is_query=True), features(k, is_query=False), v)

    ours = with_gradients(partial(mechanism, is_causal=is_causal), inputs)
    assert_same(ours, with_gradients(theirs, inputs), **EXACT)


@pytest.mark.parametrize("is_causal", [False, True], ids=["bidirectional", "causal"])
def test_relu_features_of_performer_pytorch(is_causal):
    inputs = random_inputs(heads=HEADS, dim=DIM, sinks=20)
    # without scaling, as in the Long-Range Arena
    features = partial(performer_pytorch.generalized_kernel, projection_matrix=None, normalize_data=False)
    attend = partial(performer_pytorch.causal_linear_attention_noncuda, eps=0.0)
    attend = attend if is_causal else performer_pytorch.linear_attention
    ours = with_gradients(partial(build("performer-relu"), is_causal=is_causal), inputs)
    assert_same(ours, with_gradients(lambda q, k, v: attend(features(q), features(k), v), inputs), **EXACT)


@pytest.mark.parametrize("is_causal", [False, True], ids=["bidirectional", "causal"])
def test_local_attention(is_causal):
    # its windows look at their neighbours unless told not to; only a mask hides what it fills the last window with
    module = LocalAttention(5, causal=is_causal, look_backward=0, look_forward=0, autopad=True)
    inputs = random_inputs(batch=3, heads=HEADS, dim=DIM, sinks=23)
    key_mask = torch.rand(3, 23, generator=torch.Generator().manual_seed(0)) < 0.6
    key_mask[:, ::5] = True  # where a query sees nothing, theirs takes the mean of all
    ours = with_gradients(partial(build("local", window=5), is_causal=is_causal, key_mask=key_mask), inputs)
    assert_same(ours, with_gradients(partial(module, mask=key_mask), inputs), **EXACT)


@pytest.mark.parametrize("rounds", [1, 3])
def test_reformer_pytorch(rounds):
    length, chunk = 32, 4
    options = {"allow_duplicate_attention": False, "attend_across_buckets": False}  # as in the paper
    module = LSHAttention(bucket_size=chunk, n_hashes=rounds, random_rotations_per_head=True, **options).double()
    mechanism = build("reformer", chunk=chunk, rounds=rounds, buckets=length // chunk)
    rotations = torch.randn(HEADS, DIM, rounds, length // chunk // 2, dtype=torch.float64)
    mechanism.directions.vectors = rotations.permute(0, 2, 3, 1).flatten(0, 1)
    shared, _, value = random_inputs(heads=HEADS, dim=DIM, sinks=length)

    def theirs(shared, value):
        with pytest.MonkeyPatch.context() as patch:  # it draws rotations at every call: it gets ours
            patch.setattr(torch, "randn", lambda *_, **__: rotations.repeat(BATCH, 1, 1, 1))
            return module(shared.flatten(0, 1), value.flatten(0, 1))[0].unflatten(0, (BATCH, HEADS))

    ours = with_gradients(lambda shared, value: mechanism(shared, shared, value), [shared, value])
    # it adds 1e-9 to the number of rounds in which a pair meets
    assert_same(ours, with_gradients(theirs, [shared, value]), rtol=1e-8, atol=1e-8)


def full_buckets(rotations, size):
    """Tokens (B, H, 4·size, D) of which each bucket of a round gets `size`, and no pair meets in two rounds.

    Args:
        rotations: (H, D, R, 2), of R rounds with four buckets.
    """
    heads, dim, rounds, _ = rotations.shape
    generator = torch.Generator().manual_seed(3)
    many = torch.randn(heads, 4000, dim, generator=generator, dtype=torch.float64)
    scores = torch.einsum("hnd,hdrf->hnrf", many, rotations)
    buckets = torch.cat([scores, -scores], -1).argmax(-1)  # (H, 4000, R)
    places = torch.cartesian_prod(torch.arange(4), torch.arange(size))[:, :rounds].reshape(-1, rounds)
    rows = []
    for _ in range(BATCH):
        order = torch.randperm(len(places), generator=generator)
        for head in range(heads):
            taken = [(buckets[head] == place).all(-1).nonzero()[:, 0] for place in places[order]]
            chosen = torch.stack([found[int(torch.randint(len(found), (), generator=generator))] for found in taken])
            rows.append(many[head, chosen])
    return torch.stack(rows).unflatten(0, (BATCH, heads))


@pytest.mark.parametrize("is_causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("rounds", [1, 2])
def test_reformer_of_transformers(rounds, is_causal):
    # theirs also sees what other buckets have in the chunk and counts a pair once for every round: both agree where a
    # bucket fills a chunk, and no pair meets twice
    chunk = 4
    config = ReformerConfig(
        hidden_size=WIDTH,
        num_attention_heads=HEADS,
        attention_head_size=DIM,
        attn_layers=["lsh"],
        lsh_attn_chunk_length=chunk,
        lsh_num_chunks_before=0,
        lsh_attention_probs_dropout_prob=0.0,
        num_hashes=rounds,
        num_buckets=4,
        hash_seed=25,
        is_decoder=is_causal,
    )
    module = random_weights(LSHSelfAttention(config))
    module._len_norm = partial(module._len_norm, epsilon=0.0)
    with torch.random.fork_rng():
        torch.manual_seed(config.hash_seed)
        rotations = torch.randn(HEADS, DIM, rounds, 2, dtype=torch.float64)
    mechanism = build("reformer", chunk=chunk, rounds=rounds, buckets=4)
    mechanism.directions.vectors = rotations.permute(0, 2, 3, 1).flatten(0, 1)
    # padding fills a chunk of its own
    x = tokens(20)
    mask = torch.ones(BATCH, 20, dtype=torch.bool)
    mask[0, 16:] = mask[1, [0, 3, 4, 11]] = False
    x[mask] = joined(full_buckets(rotations, chunk)).flatten(0, 1)
    torch.nn.init.eye_(module.query_key.weight)

    def theirs(x, weights):
        with torch.random.fork_rng():  # it seeds torch's numbers
            return functional_call(module, weights, (x, mask)).hidden_states * mask[..., None]

    def ours(x, weights):
        shared, value = projected(x, weights, "query_key", "value")
        shared = shared * DIM**0.5  # theirs does not divide the products by √d
        return joined(mechanism(shared, shared, value, is_causal=is_causal, query_mask=mask, key_mask=mask))

    assert_agree(module, x, theirs, ours, **EXACT)
