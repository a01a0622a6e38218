"""`attn_implementation="flow_attention"` in encoders and decoders of transformers, and refused inputs."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from tiny_transformers import LEFT, PROMPTS, assert_close, randomized, with_gradients
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
)
from transformers.masking_utils import (
    chunked_causal_mask_function,
    create_causal_mask,
    create_chunked_causal_mask,
    create_sliding_window_causal_mask,
)

from flowformer import flow_attention
from flowformer.integrations.transformers import (
    flow_attention_forward,
    flow_attention_mask,
)

TINY = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}
TEXT = TINY | {"vocab_size": 23, "pad_token_id": 0}
ENCODERS = {
    "bert": transformers.BertConfig(**TEXT),
    "roberta": transformers.RobertaConfig(**TEXT),
}
DECODERS = {
    "llama": transformers.LlamaConfig(**TEXT, num_key_value_heads=2),
    "qwen3": transformers.Qwen3Config(**TEXT, num_key_value_heads=2, head_dim=8),
    "gpt2": transformers.GPT2Config(vocab_size=23, n_embd=16, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2),
    "mistral": transformers.MistralConfig(**TEXT, num_key_value_heads=4, sliding_window=64),
}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def flow_model(config, auto=AutoModel, **options) -> nn.Module:
    """Build a model of transformers with Flow-Attention and random weights."""
    return randomized(auto.from_config(copy.deepcopy(config), attn_implementation="flow_attention", **options))


@pytest.mark.parametrize("name", ENCODERS)
@pytest.mark.parametrize("mask", [LEFT, LEFT.flip(1)], ids=["left", "right"])
def test_a_padded_batch_in_an_encoder_is_each_sentence_alone(name, mask):
    model = flow_model(ENCODERS[name])
    first = 1 if name == "roberta" else 0  # its first position is pad_token_id + 1
    positions = first + (mask.cumsum(-1) - 1).clamp_min(0)
    together = model(PROMPTS, attention_mask=mask, position_ids=positions).last_hidden_state[mask.bool()]
    alone = [model(row[keep][None]).last_hidden_state[0] for row, keep in zip(PROMPTS, mask.bool(), strict=True)]
    assert_close(together, torch.cat(alone))
    for value, truth in zip(with_gradients(model, together), with_gradients(model, torch.cat(alone)), strict=True):
        assert_close(value, truth)


def test_the_attention_of_an_encoder_is_the_op():
    model = flow_model(transformers.BertConfig(**TEXT | {"num_hidden_layers": 1}))
    attention = model.encoder.layer[0].attention.self
    x = torch.randn(3, 7, 16, dtype=torch.float64)
    q, k, v = (f(x).unflatten(-1, (4, 4)).transpose(1, 2) for f in (attention.query, attention.key, attention.value))
    assert_close(attention(x, None)[0], flow_attention(q, k, v).transpose(1, 2).flatten(2))
    assert attention(x, None)[1] is None


def test_vit():
    config = transformers.ViTConfig(**TINY, image_size=8, patch_size=4, num_channels=1)
    model = flow_model(config).train()
    softmax = AutoModel.from_config(config).double()
    softmax.load_state_dict(model.state_dict())
    pixels = torch.randn(2, 1, 8, 8, dtype=torch.float64)
    result = model(pixels).last_hidden_state
    assert (result - softmax(pixels).last_hidden_state).abs().max() > 1e-3
    result.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for n, p in model.named_parameters() if "pooler" not in n)


def test_weights_of_an_existing_model_stay_as_they_are(tmp_path):
    stock = AutoModel.from_config(ENCODERS["bert"])
    stock.save_pretrained(tmp_path)
    model = AutoModel.from_pretrained(tmp_path, attn_implementation="flow_attention")
    assert model.config._attn_implementation == "flow_attention"
    assert {name: tuple(x.shape) for name, x in model.state_dict().items()} == {
        name: tuple(x.shape) for name, x in stock.state_dict().items()
    }
    assert all(torch.equal(x, stock.state_dict()[name]) for name, x in model.state_dict().items())
    stock.set_attn_implementation("flow_attention")
    assert torch.equal(stock.eval()(PROMPTS).last_hidden_state, model(PROMPTS).last_hidden_state)


@pytest.mark.parametrize("name", DECODERS)
def test_decoders_train_padded_and_packed(name):
    model = flow_model(DECODERS[name], AutoModelForCausalLM)
    right = LEFT.flip(1)
    together = model(PROMPTS, attention_mask=right, use_cache=False).logits[right.bool()]
    lengths = [7, 4, 1]
    parts = [row[:n][None] for row, n in zip(PROMPTS, lengths, strict=True)]
    alone = torch.cat([model(part, use_cache=False).logits[0] for part in parts])
    expected = [alone, *with_gradients(model, alone)]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    ends = torch.tensor([0, 7, 11, 12], dtype=torch.int32)
    kernel = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 7, "max_length_k": 7}
    packed = [
        model(torch.cat(parts, 1), position_ids=positions, use_cache=False, **options).logits[0]
        for options in ({}, kernel)
    ]
    for result in (together, *packed):
        for value, truth in zip([result, *with_gradients(model, result)], expected, strict=True):
            assert_close(value, truth)


@pytest.mark.parametrize("name", DECODERS)
def test_decoders_do_not_see_the_future_unless_asked_to(name):
    model = flow_model(DECODERS[name])
    changed = PROMPTS.clone()
    changed[:, -1] = 11
    difference = model(PROMPTS).last_hidden_state - model(changed).last_hidden_state
    assert not difference[:, :-1].any()
    assert difference[:, -1].any()
    if name != "gpt2":  # has no is_causal argument
        difference = [model(x, is_causal=False).last_hidden_state for x in (PROMPTS, changed)]
        assert (difference[0] - difference[1])[:, 0].abs().max() > 1e-6


@pytest.mark.parametrize("name", DECODERS)
def test_generation_is_greedy_choice_of_the_whole(name):
    model = flow_model(DECODERS[name], AutoModelForCausalLM)
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    tokens = model.generate(PROMPTS, max_new_tokens=3, **options)
    for step in (7, 8, 9):
        expected = model(tokens[:, :step], use_cache=False).logits[:, -1].argmax(-1)
        assert torch.equal(tokens[:, step], expected)


def test_a_window_is_refused_where_it_matters():
    model = flow_model(transformers.MistralConfig(**TEXT, num_key_value_heads=4, sliding_window=5))
    model(PROMPTS[:, :5], use_cache=False)
    with pytest.raises(NotImplementedError, match="sliding window"):
        model(PROMPTS, use_cache=False)
    encoder = flow_model(transformers.ModernBertConfig(**TEXT, local_attention=4, global_attn_every_n_layers=2))
    with pytest.raises(NotImplementedError, match="sliding window"):
        encoder(PROMPTS)


def test_chunks_are_sequences_of_their_own():
    chunks = chunked_causal_mask_function(3, torch.zeros(2, dtype=torch.int64))
    sizes = {"batch_size": 2, "q_length": 7, "kv_length": 7, "mask_function": chunks}
    assert flow_attention_mask(**sizes).tolist() == [0, 3, 6, 7, 10, 13, 14]
    no_padding = torch.ones(2, 7, dtype=torch.bool)
    assert flow_attention_mask(**sizes, attention_mask=no_padding).tolist() == [0, 3, 6, 7, 10, 13, 14]
    with pytest.raises(NotImplementedError, match="without padding"):
        flow_attention_mask(**sizes, attention_mask=LEFT[:2].bool())
    one = {**sizes, "mask_function": chunked_causal_mask_function(8, torch.zeros(2, dtype=torch.int64))}
    assert flow_attention_mask(**one).stride() == (0, 0, 0)  # causal, without padding
    assert torch.equal(flow_attention_mask(**one, attention_mask=LEFT[:2].bool()), LEFT[:2, None].bool())


@pytest.mark.parametrize("create", [create_causal_mask, create_chunked_causal_mask, create_sliding_window_causal_mask])
def test_bounds_of_packed_sequences_are_those_of_the_mask_that_softmax_gets(create):
    config = transformers.LlamaConfig(**TEXT)
    config.attention_chunk_size, config.sliding_window = 3, 12
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3]])
    masks = []
    for name in ("eager", "flow_attention"):
        config._attn_implementation = name
        masks.append(create(config, torch.zeros(2, 12, 16), None, None, position_ids=positions))
    visible, bounds = masks[0][:, 0] == 0, masks[1]
    sequence = torch.bucketize(torch.arange(24), bounds, right=True).view(2, 12)
    assert torch.equal(visible, (sequence[:, None] == sequence[:, :, None]) & torch.ones(12, 12).tril().bool())


def test_bounds_beside_padding_or_alone_are_refused():
    model, ends = flow_model(DECODERS["llama"]), torch.tensor([0, 7, 10, 14, 21], dtype=torch.int32)
    bounds = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
    with pytest.raises(ValueError, match="attention_mask with padding"):
        model(PROMPTS, attention_mask=LEFT, use_cache=False, **bounds)
    no_padding = model(PROMPTS, attention_mask=torch.ones_like(LEFT), use_cache=False, **bounds).last_hidden_state
    assert_close(no_padding, model(PROMPTS, use_cache=False, **bounds).last_hidden_state)
    for name in bounds:
        with pytest.raises(ValueError, match="need cu_seq_lens_q and cu_seq_lens_k"):
            model(PROMPTS, use_cache=False, **{name: ends})


def test_masks_of_pairs_of_tokens_are_refused():
    model = flow_model(ENCODERS["bert"])
    with pytest.raises(ValueError, match=r"got \(3, 1, 7, 7\).*no linear form"):
        model(PROMPTS, attention_mask=torch.ones(3, 1, 7, 7))
    prefix = flow_model(DECODERS["llama"])
    x = torch.zeros(3, 7, 16)
    with pytest.raises(NotImplementedError, match="no linear form"):
        create_causal_mask(prefix.config, x, None, None, or_mask_function=lambda b, h, q, k: k < 3)
    with pytest.raises(NotImplementedError, match="no linear form"):
        create_causal_mask(
            prefix.config, x, None, None, block_sequence_ids=torch.tensor([[0, 0, 0, -1, -1, -1, -1]] * 3)
        )


def test_encoder_decoders_are_refused():
    sizes = {"vocab_size": 23, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2}
    config = transformers.BartConfig(**sizes, decoder_attention_heads=2, encoder_ffn_dim=24, decoder_ffn_dim=24)
    with pytest.raises(NotImplementedError, match="attends to an encoder"):
        flow_model(config)(PROMPTS)
    with pytest.raises(NotImplementedError, match="attends to an encoder"):
        flow_model(transformers.BertConfig(**TEXT, is_decoder=True, add_cross_attention=True))(PROMPTS)
    q = torch.randn(1, 2, 5, 4)
    with pytest.raises(NotImplementedError, match="attends to an encoder"):
        flow_attention_forward(type("MllamaTextCrossAttention", (nn.Module,), {"is_causal": False})(), q, q, q, None)


def test_biases_on_a_softmax_are_refused():
    q = torch.randn(1, 2, 5, 4)
    for name in ("position_bias", "s_aux"):
        with pytest.raises(NotImplementedError, match=f"got {name}"):
            flow_attention_forward(nn.Identity(), q, q, q, None, **{name: torch.zeros(2)})


def test_attention_dropout_is_on_the_result_and_only_in_training():
    q = torch.randn(1, 2, 500, 4)
    module = nn.Identity()
    module.is_causal = False
    expected = flow_attention(q, q, q).transpose(1, 2)
    dropped, _ = flow_attention_forward(module.train(), q, q, q, None, dropout=0.5)
    assert dropped.is_contiguous()
    assert (dropped == 0).float().mean().item() == pytest.approx(0.5, abs=0.05)
    torch.testing.assert_close(dropped[dropped != 0], 2 * expected[dropped != 0])
    assert torch.equal(flow_attention_forward(module.eval(), q, q, q, None, dropout=0.5)[0], expected)
