"""`attn_implementation="flow_attention"`: every model either runs Flow-Attention or is refused before training."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import transformers
from small_transformers import small_model
from sweep_transformers import watched
from tiny_transformers import LEFT, PROMPTS, assert_close, randomized
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    or_masks,
    packed_sequence_mask_function,
    sliding_window_causal_mask_function,
)

from flowformer import flow_attention
from flowformer.integrations.transformers import flow_attention_forward, flow_attention_mask

NAME = "flow_attention"
TEXT = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24,
    "vocab_size": 23, "pad_token_id": 0,
}  # fmt: skip
LLAMA = transformers.LlamaConfig(**TEXT, num_key_value_heads=2)
BERT = transformers.BertConfig(**TEXT)
CLIP = transformers.CLIPConfig(
    text_config=TEXT | {"eos_token_id": 2, "bos_token_id": 1},
    vision_config=TEXT | {"image_size": 8, "patch_size": 4},
)
# without the checks each of these silently ran softmax, most without their causal mask, or crashed
HARD_CODED = [
    "bloom", "codegen", "xglm", "gpt_neox_japanese", "mvp", "deberta", "mpnet", "xlnet", "xlm", "flaubert", "wavlm",
    "openai-gpt", "cvt", "mobilevit", "imagegpt", "megatron-bert", "falcon", "gptj", "data2vec-vision", "big_bird",
    "convbert", "canine", "mpt", "longformer", "bigbird_pegasus", "resnet", "mamba", "fnet",
]  # fmt: skip


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def flow_model(config, auto=AutoModel, **options) -> nn.Module:
    """Build a model of transformers with Flow-Attention and random weights."""
    return randomized(auto.from_config(copy.deepcopy(config), attn_implementation=NAME, **options))


@pytest.mark.parametrize("model_type", HARD_CODED)
def test_a_model_that_would_run_softmax_is_refused_however_it_is_asked(model_type, tmp_path):
    model, _ = small_model(model_type)
    with pytest.raises(NotImplementedError, match=f"{NAME} cannot serve .*docs/transformers.md"):
        type(model)._from_config(copy.deepcopy(model.config), attn_implementation=NAME)
    model.save_pretrained(tmp_path)
    with pytest.raises(NotImplementedError, match=f"{NAME} cannot serve"):
        type(model).from_pretrained(tmp_path, attn_implementation=NAME)
    with pytest.raises(NotImplementedError, match=f"{NAME} cannot serve"):
        model.set_attn_implementation(NAME)
    assert model.config._attn_implementation == "eager"


def test_a_model_with_its_own_list_of_attentions_is_refused():
    with pytest.raises(NotImplementedError, match="cannot serve SamModel: it chooses its attention from a list"):
        AutoModel.from_config(transformers.SamConfig(), attn_implementation=NAME)


def test_a_part_without_attention_is_no_reason_to_refuse():
    vision = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 8, 8, 8], depths=[1, 1, 1, 1])
    vision.hidden_size = 8
    config = transformers.LlavaConfig(
        vision_config=vision.to_dict(), text_config=LLAMA.to_dict(), image_token_index=22, vision_feature_layer=-1
    )
    config._attn_implementation = NAME
    for model in (AutoModel.from_config(copy.deepcopy(config)), transformers.LlavaModel(config)):
        assert model.language_model.config._attn_implementation == NAME
    with pytest.raises(NotImplementedError, match="ResNetModel: it has no attention layer to replace"):
        AutoModel.from_config(copy.deepcopy(vision), attn_implementation=NAME)


def test_a_layer_that_does_not_say_whether_it_is_causal_is_refused():
    q = torch.randn(1, 2, 5, 4)
    with pytest.raises(NotImplementedError, match="cannot serve Identity: it does not say whether it is causal"):
        flow_attention_forward(nn.Identity(), q, q, q, None)


def test_a_refusal_leaves_the_model_as_it_was():
    bart = AutoModel.from_config(transformers.BartConfig(**SEQUENCE_TO_SEQUENCE), attn_implementation="eager")
    with pytest.raises(NotImplementedError, match="BartModel: its decoder attends to another sequence"):
        bart.set_attn_implementation(NAME)
    assert {bart.config._attn_implementation, bart.encoder.config._attn_implementation} == {"eager"}


SEQUENCE_TO_SEQUENCE = {
    "vocab_size": 23, "d_model": 16, "encoder_layers": 2, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip


def test_the_encoder_half_of_an_encoder_decoder_is_served():
    """The encoder of BART, and the Whisper classifier, which has no decoder."""
    from transformers.models.bart.modeling_bart import BartEncoder

    config = transformers.BartConfig(**SEQUENCE_TO_SEQUENCE)
    config._attn_implementation = NAME
    encoder = randomized(BartEncoder(config))
    mask = LEFT.flip(1)
    together = encoder(PROMPTS, attention_mask=mask).last_hidden_state[mask.bool()]
    alone = [encoder(row[keep][None]).last_hidden_state[0] for row, keep in zip(PROMPTS, mask.bool(), strict=True)]
    assert_close(together, torch.cat(alone))
    with pytest.raises(NotImplementedError, match="Pad on the right"):
        encoder(PROMPTS, attention_mask=LEFT)
    sizes = SEQUENCE_TO_SEQUENCE | {"max_source_positions": 10, "num_mel_bins": 4}
    whisper = transformers.WhisperForAudioClassification._from_config(
        transformers.WhisperConfig(**sizes), attn_implementation=NAME
    )
    assert whisper(torch.randn(2, 4, 20)).logits.isfinite().all()


def test_a_part_that_cannot_be_set_is_refused():
    model, _ = small_model("blip")
    with pytest.raises(NotImplementedError, match="cannot serve BlipModel: text_config computes its attention itself"):
        model.set_attn_implementation({"text_config": NAME})
    assert model.config.text_config._attn_implementation == "eager"


def test_one_part_of_a_composite_model(tmp_path):
    model = AutoModel.from_config(copy.deepcopy(CLIP), attn_implementation={"": "eager", "text_config": NAME})
    assert model.text_model.config._attn_implementation == NAME
    assert model.vision_model.config._attn_implementation != NAME
    model.save_pretrained(tmp_path)
    loaded = AutoModel.from_pretrained(tmp_path)
    assert loaded.text_model.config._attn_implementation == NAME
    assert loaded.vision_model.config._attn_implementation != NAME


@pytest.mark.parametrize("config", [LLAMA, CLIP], ids=["llama", "clip"])
def test_the_choice_is_saved_with_the_model(config, tmp_path):
    model = AutoModel.from_config(copy.deepcopy(config), attn_implementation=NAME).eval()
    model.save_pretrained(tmp_path)
    loaded = AutoModel.from_pretrained(tmp_path)
    inputs = {"input_ids": PROMPTS} | ({"pixel_values": torch.randn(3, 3, 8, 8)} if config is CLIP else {})
    assert torch.equal(loaded(**inputs)[0], model(**inputs)[0])
    softmax = AutoModel.from_pretrained(tmp_path, attn_implementation="sdpa")
    assert (softmax(**inputs)[0] - model(**inputs)[0]).abs().max() > 1e-4
    softmax.save_pretrained(tmp_path)
    assert "attn_implementation" not in AutoConfig.from_pretrained(tmp_path).to_json_string()


@pytest.mark.parametrize(
    "config",
    [
        LLAMA,
        transformers.GPT2Config(vocab_size=23, n_embd=16, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2),
        BERT,
        transformers.RobertaConfig(**TEXT),
        transformers.EsmConfig(**TEXT, mask_token_id=3, position_embedding_type="rotary"),
    ],
    ids=lambda config: config.model_type,
)
@pytest.mark.parametrize("mask", [LEFT, LEFT.flip(1)], ids=["left", "right"])
@pytest.mark.parametrize("positional", [False, True])
def test_positions_follow_the_mask(config, mask, positional):
    """Without position_ids, a sequence padded on either side gives the result of the sequence alone."""
    model = flow_model(config)
    if positional and config.model_type == "gpt2":
        together = model(PROMPTS, None, mask)
    else:
        together = model(PROMPTS, mask) if positional else model(PROMPTS, attention_mask=mask)
    alone = [model(row[keep][None]).last_hidden_state[0] for row, keep in zip(PROMPTS, mask.bool(), strict=True)]
    assert_close(together.last_hidden_state[mask.bool()], torch.cat(alone))


def test_positions_that_are_passed_stay():
    model = flow_model(LLAMA)
    positions = 3 + torch.arange(7)[None]
    masked = model(PROMPTS, attention_mask=torch.ones_like(PROMPTS), position_ids=positions).last_hidden_state
    assert_close(masked, model(PROMPTS, position_ids=positions).last_hidden_state)
    assert (masked - model(PROMPTS).last_hidden_state).abs().max() > 1e-3


def test_output_attentions_warns():
    model = flow_model(BERT)
    with pytest.warns(UserWarning, match="no matrix of attention weights"):
        model(PROMPTS, output_attentions=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(PROMPTS)


def test_another_attention_afterwards_is_untouched():
    model = flow_model(LLAMA)
    stock = randomized(AutoModel.from_config(copy.deepcopy(LLAMA)))
    model.set_attn_implementation("sdpa")
    left = {"attention_mask": LEFT}
    assert_close(model(PROMPTS, **left).last_hidden_state, stock(PROMPTS, **left).last_hidden_state)


@pytest.mark.parametrize(
    "pattern",
    [
        or_masks(sliding_window_causal_mask_function(3), lambda b, h, q, k: k < 1),
        lambda b, h, q, k: (k <= q) & ((q - k) % 2 == 0),
        lambda b, h, q, k: (k <= q) & (k != 5),
        and_masks(causal_mask_function, lambda b, h, q, k: q - k != 3),
        and_masks(causal_mask_function, lambda b, h, q, k: torch.tensor(False)),
        or_masks(causal_mask_function, lambda b, h, q, k: k < 3),
        and_masks(causal_mask_function, packed_sequence_mask_function(torch.tensor([[0, 1, 0, 1, 0, 1, 0]]))),
        sliding_window_causal_mask_function(6),
    ],
    ids=["sink and window", "dilated", "skips a token", "skips a distance", "empty", "prefix", "interleaved", "window"],
)
def test_a_pattern_that_is_not_known_is_refused(pattern):
    with pytest.raises(NotImplementedError, match="no linear form"):
        flow_attention_mask(batch_size=1, q_length=7, kv_length=7, mask_function=pattern)


def test_a_window_as_long_as_the_input_is_causal():
    mask = flow_attention_mask(1, 7, 7, mask_function=sliding_window_causal_mask_function(7))
    assert mask.shape == (1, 1, 7)
    assert mask.stride() == (0, 0, 0)
    assert flow_attention_mask(1, 7, 7, mask_function=bidirectional_mask_function) is None


KINDS = ["sliding_attention", "full_attention"]
EMBEDDING_GEMMA = transformers.Gemma3TextConfig(
    **TEXT, num_key_value_heads=2, head_dim=8, layer_types=KINDS, use_bidirectional_attention=True, sliding_window=14
)  # sliding_window becomes 14 / 2 + 1 = 8


@pytest.mark.parametrize("mask", [None, LEFT, LEFT.flip(1)], ids=["whole", "left", "right"])
def test_embedding_gemma_is_bidirectional(mask):
    """The masks of EmbeddingGemma are unions of the causal pattern with all pairs, or with a bidirectional window."""
    model = flow_model(EMBEDDING_GEMMA)
    assert model.config.sliding_window == 8
    with watched(PROMPTS.shape[1], sees_ahead=True, keep=None if mask is None else mask.bool()) as errors:
        together = model(PROMPTS, attention_mask=mask).last_hidden_state
    assert len(errors) == 2
    assert max(errors.values()) < 1e-12
    keep = torch.ones_like(PROMPTS).bool() if mask is None else mask.bool()
    alone = [model(row[kept][None]).last_hidden_state[0] for row, kept in zip(PROMPTS, keep, strict=True)]
    assert_close(together[keep], torch.cat(alone))


def test_embedding_gemma_takes_one_token_but_continues_no_cache():
    model = flow_model(EMBEDDING_GEMMA)
    outputs = model(PROMPTS[:, :1])
    assert_close(outputs.last_hidden_state, model(PROMPTS[:, :1], use_cache=False).last_hidden_state)
    with pytest.raises(ValueError, match="no state to continue from"):
        model(PROMPTS[:, 1:], past_key_values=outputs.past_key_values)


def test_embedding_gemma_beyond_its_window_is_refused():
    model = flow_model(EMBEDDING_GEMMA)
    with pytest.raises(NotImplementedError, match="sliding window shorter than the input"):
        model(PROMPTS.repeat(1, 2))


def test_packed_sequences_of_embedding_gemma_are_refused():
    model = flow_model(EMBEDDING_GEMMA)
    with pytest.raises(NotImplementedError, match="packed sequences are bidirectional"):
        model(PROMPTS, position_ids=torch.tensor([[0, 1, 2, 0, 1, 2, 3]]), use_cache=False)


def test_a_layer_that_does_not_know_of_its_bidirectional_mask_is_bidirectional():
    """Layers of Step 3.7 have is_causal=True and may get the bidirectional masks of EmbeddingGemma."""
    layer = nn.Identity()
    layer.is_causal = True
    q = torch.randn(3, 2, 7, 4, dtype=torch.float64)
    everywhere = or_masks(causal_mask_function, lambda *pair: torch.tensor(True))
    for padding in (None, LEFT.flip(1).bool()):
        mask = flow_attention_mask(3, 7, 7, mask_function=everywhere, attention_mask=padding)
        result, _ = flow_attention_forward(layer, q, q, q, mask)
        assert_close(result.transpose(1, 2), flow_attention(q, q, q, query_mask=padding, key_mask=padding))


def test_a_layer_that_does_not_know_of_its_causal_mask_is_causal():
    """Layers of AIMv2 have is_causal=False and get a causal mask, with or without padding."""
    layer = nn.Identity()
    layer.is_causal = False
    q = torch.randn(3, 2, 7, 4, dtype=torch.float64)
    for padding in (None, LEFT.flip(1).bool()):
        mask = flow_attention_mask(3, 7, 7, mask_function=causal_mask_function, attention_mask=padding)
        result, _ = flow_attention_forward(layer, q, q, q, mask, is_causal=False)
        assert_close(result.transpose(1, 2), flow_attention(q, q, q, is_causal=True, query_mask=padding))
    one = flow_attention_mask(3, 1, 1, mask_function=causal_mask_function)
    result, _ = flow_attention_forward(nn.Identity(), *(q[:, :, :1] for _ in range(3)), one)
    assert_close(result.transpose(1, 2), flow_attention(*(q[:, :, :1] for _ in range(3)), is_causal=True))
    cached = flow_attention_mask(3, 1, 7, q_offset=6, mask_function=causal_mask_function)
    with pytest.raises(NotImplementedError, match="cannot decode from a cache"):
        flow_attention_forward(layer, q[:, :, :1], q, q, cached, is_causal=False)


def test_a_compiled_model_is_the_model():
    """With a mask the model is one graph; without one transformers looks for packed sequences, a graph break."""
    model = flow_model(LLAMA)
    for options in ({}, {"attention_mask": LEFT}):
        compiled = torch.compile(model, backend="eager", fullgraph=bool(options))
        expected = model(PROMPTS, use_cache=False, **options).last_hidden_state
        assert_close(compiled(PROMPTS, use_cache=False, **options).last_hidden_state, expected)


def test_an_exported_model_takes_a_mask():
    """Without a mask transformers looks for packed sequences, which depends on data and cannot be exported."""
    model, mask = flow_model(LLAMA), torch.ones_like(PROMPTS)
    exported = torch.export.export(model, (PROMPTS,), {"attention_mask": mask, "use_cache": False}).module()
    expected = model(PROMPTS, attention_mask=LEFT, use_cache=False).last_hidden_state
    assert_close(exported(PROMPTS, attention_mask=LEFT, use_cache=False).last_hidden_state, expected)
    with pytest.raises(NotImplementedError, match="Pass an attention_mask"):
        torch.export.export(model, (PROMPTS,), {"use_cache": False})


def test_packed_rows_of_unequal_bounds():
    packed = and_masks(causal_mask_function, packed_sequence_mask_function(torch.tensor([[0, 0, 1, 1], [0, 1, 1, 2]])))
    assert flow_attention_mask(2, 4, 4, mask_function=packed).tolist() == [0, 2, 4, 5, 7, 8]


def test_continuous_batching_is_refused():
    model = AutoModelForCausalLM.from_config(copy.deepcopy(LLAMA), attn_implementation=NAME)
    with pytest.raises(NotImplementedError, match="pages of keys and values"):
        model.generate_batch([[3, 1, 4]], max_new_tokens=2)


def test_training_does_not_leak_the_future():
    """On random tokens the loss of a causal model stays near their entropy; a leak of the future would lower it."""
    model = AutoModelForCausalLM.from_config(copy.deepcopy(LLAMA), attn_implementation=NAME)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(30):
        tokens = torch.randint(23, (16, 12))
        loss = model(tokens, labels=tokens, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss > 3.0  # ln 23 = 3.14
