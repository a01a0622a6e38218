"""Linearized attention layers: learned features, powers and gain, softmax windows, kept softmax layers."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
import transformers
from tiny_transformers import LEFT, PROMPTS, assert_close, assert_cuts_give_the_logits, randomized, with_gradients
from transformers import AutoModel, AutoModelForCausalLM

from flowformer import FlowVariant, flow_attention
from flowformer.integrations.transformers import FlowCache, FlowCacheLayer
from flowformer.integrations.transformers.linearized_heads import Exchange, FlowHeads
from flowformer.integrations.transformers.softmax import Tokens, softmax_attention, window_attention

TINY = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 24}
TEXT = TINY | {"vocab_size": 23, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
CONFIGS = {
    "llama": transformers.LlamaConfig(**TEXT, num_key_value_heads=2),
    "gemma2": transformers.Gemma2Config(**TEXT, num_key_value_heads=2, head_dim=8, sliding_window=64),
    "gpt2": transformers.GPT2Config(vocab_size=23, n_embd=16, n_layer=3, n_head=4, bos_token_id=1, eos_token_id=2),
    "lfm2": transformers.Lfm2Config(
        **TEXT, num_key_value_heads=2, layer_types=["full_attention", "conv", "full_attention"]
    ),
    "bert": transformers.BertConfig(**TEXT),
    "vit": transformers.ViTConfig(**TINY, image_size=8, patch_size=4, num_channels=1),
}
EXCHANGES = {
    "hedgehog": Exchange(),
    "projection, gain": Exchange(features="projection", gain=True),
    "paper": Exchange(features="none", variant=FlowVariant(), powers=False),
    "window": Exchange(window=3),
    "kept": Exchange(keep_layers=(1,)),
    "all": Exchange(features="projection", window=2, keep_layers=(0, 2), gain=True),
}
EVERY_EXCHANGE = pytest.mark.parametrize("exchange", EXCHANGES.values(), ids=EXCHANGES)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def exchanged(name: str, exchange: Exchange, auto=AutoModelForCausalLM):
    """Build a model with this exchange and random weights."""
    config = copy.deepcopy(CONFIGS[name])
    config.flow_attention = exchange.to_dict()
    model = randomized(auto.from_config(config, attn_implementation="flow_attention"))
    if hasattr(model, "generation_config"):
        model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model


@EVERY_EXCHANGE
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
@pytest.mark.parametrize("mask", [None, LEFT, LEFT.flip(1)], ids=["even", "left-padded", "right-padded"])
def test_any_cut_of_a_sequence_gives_its_logits(name, exchange, mask):
    assert_cuts_give_the_logits(exchanged(name, exchange), mask, FlowCache)


def test_kept_layers_are_counted_without_recurrent_ones():
    model = exchanged("lfm2", Exchange(keep_layers=(1,)))
    cache = FlowCache(model.config)
    parts = [model(part, past_key_values=cache).logits for part in PROMPTS.split(1, 1)]
    assert_close(torch.cat(parts, 1), model(PROMPTS, use_cache=False).logits)
    assert [isinstance(layer, FlowCacheLayer) for layer in cache.layers] == [True, False, False]


@EVERY_EXCHANGE
@pytest.mark.parametrize("padded", [False, True], ids=["even", "left-padded"])
def test_generation_equals_recomputation(exchange, padded):
    model = exchanged("llama", exchange)
    inputs = {"inputs": PROMPTS, "max_new_tokens": 6, "num_beams": 2, "do_sample": False}
    inputs |= {"attention_mask": LEFT} if padded else {}
    expected = model.generate(**inputs, use_cache=False)
    assert torch.equal(model.generate(**inputs), expected)
    assert torch.equal(model.generate(**inputs, prefill_chunk_size=3), expected)
    assert torch.equal(model.generate(**inputs, cache_implementation="static"), expected)
    cached = model.generate(**inputs, return_dict_in_generate=True).past_key_values
    kinds = [isinstance(layer, FlowCacheLayer) for layer in cached.layers]
    assert kinds == [index not in exchange.keep_layers for index in range(3)]


@EVERY_EXCHANGE
@pytest.mark.parametrize("mask", [LEFT, LEFT.flip(1)], ids=["left", "right"])
@pytest.mark.parametrize("name", ["llama", "bert"])
def test_a_padded_batch_is_each_sequence_alone(name, exchange, mask):
    model = exchanged(name, exchange, AutoModel)
    together = model(PROMPTS, attention_mask=mask).last_hidden_state[mask.bool()]
    alone = [model(row[keep][None]).last_hidden_state[0] for row, keep in zip(PROMPTS, mask.bool(), strict=True)]
    assert_close(together, torch.cat(alone))
    for value, truth in zip(with_gradients(model, together), with_gradients(model, torch.cat(alone)), strict=True):
        torch.testing.assert_close(value, truth, rtol=1e-7, atol=1e-7 * (1 + truth.abs().max().item()))


@EVERY_EXCHANGE
def test_packed_sequences_are_a_loop(exchange):
    model = exchanged("llama", exchange)
    lengths = [4, 1, 6]
    tokens = torch.randint(1, 23, (1, sum(lengths)))
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    alone = torch.cat([model(part, use_cache=False).logits for part in tokens.split(lengths, 1)], 1)
    packed = model(tokens.expand(2, -1), position_ids=positions.expand(2, -1), use_cache=False).logits
    assert_close(packed, alone.expand(2, -1, -1))
    first = with_gradients(model, packed[:1])
    for value, truth in zip(first, with_gradients(model, alone), strict=True):
        torch.testing.assert_close(value, truth, rtol=1e-7, atol=1e-7 * (1 + truth.abs().max().item()))


@EVERY_EXCHANGE
def test_the_future_does_not_leak(exchange):
    model = exchanged("llama", exchange)
    changed = torch.cat([PROMPTS[:, :4], PROMPTS[:, 4:].flip(1)], 1)
    assert_close(model(PROMPTS).logits[:, :4], model(changed).logits[:, :4])


@pytest.mark.parametrize("name", ["llama", "gemma2", "bert", "gpt2"])
@pytest.mark.parametrize("mask", [None, LEFT.flip(1)], ids=["even", "right-padded"])
def test_a_window_as_long_as_the_text_is_softmax(name, mask):
    for exchange in (Exchange(window=7), Exchange(window=64), Exchange(keep_layers=(0, 1, 2))):
        model = exchanged(name, exchange, AutoModel)
        softmax = AutoModel.from_config(copy.deepcopy(CONFIGS[name]), attn_implementation="eager").double().eval()
        softmax.load_state_dict(model.state_dict(), strict=False)
        kept = torch.ones_like(PROMPTS, dtype=torch.bool) if mask is None else mask.bool()
        result = model(PROMPTS, attention_mask=mask).last_hidden_state
        expected = softmax(PROMPTS, attention_mask=mask).last_hidden_state
        torch.testing.assert_close(
            result[kept], expected[kept], rtol=1e-5, atol=1e-5
        )  # transformers computes the softmax in float32


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("window", [1, 3, 64])
@pytest.mark.parametrize("past", [0, 1])
def test_the_window_is_a_masked_softmax(is_causal, window, past):
    past = past * (window - 1) if is_causal else 0
    n, m = 10, 10 + past
    query, key, value = (torch.randn(2, h, t, 4, dtype=torch.float64) for h, t in ((4, n), (2, m), (2, m)))
    mask = torch.rand(2, m) < 0.8
    distance = torch.arange(past, m)[:, None] - torch.arange(m)
    near = (distance < window) & (distance >= 0 if is_causal else distance > -window)
    scores = 0.7 * query @ key.repeat_interleave(2, 1).mT
    scores = scores.masked_fill(~(near & mask[:, None, None]), -torch.inf)
    expected = scores.softmax(-1).nan_to_num() @ value.repeat_interleave(2, 1)
    result, log_sum, inside = window_attention(query, key, value, Tokens(is_causal, mask), window, 0.7)
    assert_close(result, expected)
    some = inside > 0
    assert_close(log_sum.movedim(1, 2)[some], scores.logsumexp(-1).movedim(1, 2)[some])
    assert torch.equal(inside, (near & mask[:, None]).sum(-1))


@pytest.mark.parametrize("softcap", [None, 1.5])
def test_softmax_of_a_query_without_keys_is_zero(softcap):
    x = torch.randn(2, 2, 5, 4, requires_grad=True)
    mask = LEFT[1:, :5].bool()
    result = softmax_attention(x, x, x, Tokens(True, mask), None, softcap)
    assert not result[~mask[:, None].expand(-1, 2, -1)].any()
    result.sum().backward()
    assert x.grad.isfinite().all()


def test_a_fresh_exchange_is_linear_attention():
    query, key, value = (torch.randn(2, h, 9, 4, dtype=torch.float64) for h in (4, 2, 2))
    heads = FlowHeads(Exchange(features="projection"), 4, 2, 4, dtype=torch.float64)
    q, k = heads.features(query, key)
    options = {"is_causal": True, "enable_gqa": True}
    linear = FlowVariant(competition="none", allocation="none")
    expected = flow_attention(query, key, value, variant=linear, **options)
    assert_close(flow_attention(q, k, value, variant=heads.variant, powers=heads.powers, **options), expected)
    q, k = FlowHeads(Exchange(), 4, 2, 4, dtype=torch.float64).features(query, key)
    assert_close(q, torch.cat([query, -query], -1).softmax(-1))
    assert k.shape == (2, 2, 9, 8)


@EVERY_EXCHANGE
def test_saving_and_loading(exchange, tmp_path):
    model = exchanged("llama", exchange)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    assert loaded.config._attn_implementation == "flow_attention"
    # rotary frequencies are rounded in one model and not in the other
    torch.testing.assert_close(loaded(PROMPTS).logits, model(PROMPTS).logits, rtol=1e-5, atol=1e-5)
    assert Exchange.of(loaded.config) == exchange


def test_weights_of_a_softmax_model_start_at_the_identity(tmp_path):
    """Parameters missing from a checkpoint are initialised by `reset_parameters`, not left uninitialised."""
    AutoModelForCausalLM.from_config(CONFIGS["llama"]).save_pretrained(tmp_path)
    config = copy.deepcopy(CONFIGS["llama"])
    config.flow_attention = replace(EXCHANGES["all"], keep_layers=()).to_dict()
    model = AutoModelForCausalLM.from_pretrained(tmp_path, config=config, attn_implementation="flow_attention")
    for layer in model.model.layers:
        fresh = FlowHeads(layer.self_attn.flow.exchange, *layer.self_attn.flow.sizes)
        for name, parameter in layer.self_attn.flow.named_parameters():
            assert torch.equal(parameter, fresh.get_parameter(name)), name


def test_vit():
    model = exchanged("vit", Exchange(window=3, gain=True), AutoModel)
    result = model(torch.randn(2, 1, 8, 8, dtype=torch.float64)).last_hidden_state
    grads = with_gradients(model, result)
    assert all(grad.isfinite().all() for grad in grads)


def test_the_cache_of_a_window_keeps_only_the_window():
    model = exchanged("llama", Exchange(window=4))
    cache = FlowCache(model.config)
    for part in torch.randint(3, 23, (2, 50)).split(10, 1):
        model(part, past_key_values=cache)
        for x in cache.layers[0].recent:
            assert x.shape[2] == 3
            assert x.untyped_storage().nbytes() == x.numel() * x.element_size()


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"features": "hedgehogs"}, ValueError, "hedgehog"),
        ({"window": -1}, ValueError, "window"),
        ({"variant": FlowVariant()}, ValueError, "renormalize"),
        ({"variant": "lra", "powers": False}, ValueError, "heads"),
    ],
)
def test_bad_exchanges_are_refused(options, error, words):
    with pytest.raises(error, match=words):
        Exchange(**options)


def test_layers_that_are_not_there_cannot_be_kept():
    with pytest.raises(ValueError, match=r"\[3\].*3 attention layers"):
        exchanged("llama", Exchange(keep_layers=(3,)))
    config = copy.deepcopy(CONFIGS["llama"])
    config.flow_attention = {"windw": 3}
    with pytest.raises(ValueError, match="windw"):
        AutoModel.from_config(config, attn_implementation="flow_attention")
