"""The Flowformer models of transformers: generation, cache, saving, loading and training."""

from __future__ import annotations

import copy
import importlib
import re
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import asdict

import pytest
import torch
import transformers
from helpers import ROOT
from tiny_transformers import (
    LEFT,
    PROMPTS,
    SIZES,
    STYLES,
    assert_close,
    assert_cuts_give_the_logits,
    language_model,
    randomized,
    with_gradients,
)
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    DataCollatorWithFlattening,
    DynamicCache,
    PreTrainedTokenizerFast,
    StaticCache,
    Trainer,
    TrainingArguments,
    pipeline,
)
from transformers.cache_utils import LinearAttentionLayer

from flowformer import FlowVariant
from flowformer.integrations.transformers import (
    FlowCacheLayer,
    FlowformerConfig,
    FlowformerForCausalLM,
    FlowformerForSequenceClassification,
    FlowformerModel,
)
from flowformer.models.lm import FlowformerLM

PAGE = ROOT / "docs" / "transformers.md"
BY_STYLE = pytest.mark.parametrize("style", STYLES)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def test_weights_and_logits_are_those_of_our_language_model():
    for style in STYLES:
        model = language_model(style)
        ours = FlowformerLM(model.config.lm_config()).double().eval()
        ours.load_state_dict(model.model.lm.state_dict())
        x = ours._hidden(PROMPTS, LEFT.bool(), None)[0]
        result = model(PROMPTS, attention_mask=LEFT, output_hidden_states=True)
        assert_close(result.logits[LEFT.bool()], model.lm_head(x)[LEFT.bool()])
        assert torch.equal(result.hidden_states[-1], model.model(PROMPTS, attention_mask=LEFT).last_hidden_state)
        assert len(result.hidden_states) == 3


@BY_STYLE
def test_fresh_weights_are_the_published_ones(style):
    sizes = {"hidden_size": 64, "intermediate_size": 256, "vocab_size": 500, "num_hidden_layers": 8}
    config = FlowformerConfig(**SIZES | STYLES[style] | sizes)
    model, ours = FlowformerForCausalLM(config), FlowformerLM(config.lm_config())
    stds = {name: p.std().item() for name, p in ours.named_parameters() if p.dim() > 1}
    assert {name: model.model.lm.get_parameter(name).std().item() for name in stds} == pytest.approx(stds, rel=0.1)
    assert model.lm_head.weight.std().item() == pytest.approx(stds["embedding.weight"], rel=0.1)
    assert torch.equal(model.model.lm.norm.weight, torch.ones(64))
    assert (model.lm_head.weight is model.model.lm.embedding.weight) == config.tie_word_embeddings


@BY_STYLE
@pytest.mark.parametrize("padded", [False, True], ids=["even", "left-padded"])
@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": False},
        {"do_sample": True, "top_k": 5},
        {"do_sample": False, "num_beams": 3},
        {"do_sample": False, "num_beams": 4, "num_return_sequences": 2, "length_penalty": 0.5},
        {"do_sample": True, "num_beams": 2},
        {"do_sample": True, "num_return_sequences": 3},
        {"do_sample": False, "prefill_chunk_size": 3},
        {"do_sample": False, "prefill_chunk_size": 3, "num_beams": 3},
        {"do_sample": False, "cache_implementation": "static"},
        {"do_sample": False, "eos_token_id": 12},
    ],
    ids=lambda options: "-".join(f"{k}={v}" for k, v in options.items()),
)
def test_generation_equals_recomputation(style, padded, options):
    model = language_model(style)
    inputs = {"attention_mask": LEFT} if padded else {}
    common = {"max_new_tokens": 8, "return_dict_in_generate": True, "output_logits": True}
    torch.manual_seed(3)
    cached = model.generate(PROMPTS, **inputs, **common, **options)
    recomputing = {k: v for k, v in options.items() if k not in ("prefill_chunk_size", "cache_implementation")}
    torch.manual_seed(3)
    recomputed = model.generate(PROMPTS, **inputs, **common, **recomputing, use_cache=False)
    assert cached.past_key_values is not None
    assert recomputed.past_key_values is None
    assert torch.equal(cached.sequences, recomputed.sequences)
    assert len(cached.sequences.unique(dim=0)) > 1
    assert_close(torch.stack(cached.logits), torch.stack(recomputed.logits))


def test_generation_of_a_padded_batch_is_that_of_each_prompt_alone():
    model = language_model()
    together = model.generate(PROMPTS, attention_mask=LEFT, max_new_tokens=8, do_sample=False)[:, 7:]
    for row, prompt, mask in zip(together, PROMPTS, LEFT.bool(), strict=True):
        alone = model.generate(prompt[mask][None], max_new_tokens=8, do_sample=False)
        assert torch.equal(row, alone[0, mask.sum() :])


def test_generation_from_embeddings():
    model = language_model()
    embeddings = model.get_input_embeddings()(PROMPTS)
    expected = model.generate(PROMPTS, max_new_tokens=5, do_sample=False)[:, 7:]
    assert torch.equal(model.generate(inputs_embeds=embeddings, max_new_tokens=5, do_sample=False), expected)


def test_generation_goes_on_from_a_kept_cache():
    model = language_model()
    expected = model.generate(PROMPTS, max_new_tokens=8, do_sample=False)
    cache = DynamicCache(config=model.config)
    first = model.generate(PROMPTS, max_new_tokens=4, do_sample=False, past_key_values=cache)
    assert cache.get_seq_length() == 10  # the last generated token was not fed back
    for each in (copy.deepcopy(cache), cache):
        assert torch.equal(model.generate(first, max_new_tokens=4, do_sample=False, past_key_values=each), expected)


@pytest.mark.parametrize("mask", [None, LEFT, LEFT.flip(1)], ids=["even", "left-padded", "right-padded"])
def test_any_cut_of_a_sequence_gives_its_logits(mask):
    assert_cuts_give_the_logits(language_model(), mask)


def test_a_packed_batch_is_a_loop_over_its_sequences():
    model = language_model()
    lengths = [4, 1, 6]
    tokens = torch.randint(1, 23, (1, sum(lengths)))
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    ends = torch.tensor([0, 4, 5, 11], dtype=torch.int32)
    alone = torch.cat([model(part, use_cache=False).logits for part in tokens.split(lengths, 1)], 1)
    expected = [alone, *with_gradients(model, alone)]
    for options in ({"position_ids": positions}, {"position_ids": positions, "cu_seq_lens_q": ends}):
        packed = model(tokens, **options, use_cache=False, output_hidden_states=True)
        for value, truth in zip([packed.logits, *with_gradients(model, packed.logits)], expected, strict=True):
            assert_close(value, truth)
        assert [tuple(x.shape) for x in packed.hidden_states] == [(1, 11, 16)] * 3
    assert (model(tokens, use_cache=False).logits - alone).abs().max() > 1e-3
    two_rows = model(tokens.expand(2, -1), position_ids=positions.expand(2, -1), use_cache=False).logits
    assert_close(two_rows, alone.expand(2, -1, -1))
    with pytest.raises(ValueError, match="packed sequences and a cache"):
        model(tokens, cu_seq_lens_q=ends, use_cache=True)
    mask = torch.ones_like(tokens)
    assert_close(model(tokens, cu_seq_lens_q=ends, attention_mask=mask, use_cache=False).logits, alone)
    mask[0, 2] = 0
    with pytest.raises(ValueError, match="cu_seq_lens_q and an attention_mask with padding"):
        model(tokens, cu_seq_lens_q=ends, attention_mask=mask, use_cache=False)


@pytest.mark.parametrize(
    ("bounds", "message"),
    [([3, 7], "must start at 0"), ([0, 5, 3, 7], "must not decrease"), ([0, 9], "beyond the 7 tokens")],
)
def test_wrong_bounds_of_packed_sequences_are_refused(bounds, message):
    with pytest.raises(ValueError, match=message):
        language_model()(PROMPTS[:1], cu_seq_lens_q=torch.tensor(bounds), use_cache=False)


def test_packed_sequences_keep_the_positions_that_are_passed():
    model, positions = language_model(), torch.tensor([[3, 4, 5, 6, 9, 10, 11]])
    parts = zip(PROMPTS[:1].split([4, 3], 1), positions.split([4, 3], 1), strict=True)
    alone = [model(tokens, position_ids=each, use_cache=False).logits for tokens, each in parts]
    packed = model(PROMPTS[:1], position_ids=positions, use_cache=False).logits
    assert_close(packed, torch.cat(alone, 1))


def test_logits_to_keep_and_tuples():
    model = language_model()
    whole = model(PROMPTS).logits
    assert_close(model(PROMPTS, logits_to_keep=2).logits, whole[:, -2:])
    assert_close(model(PROMPTS, logits_to_keep=torch.tensor([0, 3])).logits, whole[:, [0, 3]])
    assert torch.equal(model(PROMPTS, return_dict=False)[0], whole)


def test_the_loss_scores_the_next_token():
    model = language_model()
    labels = PROMPTS.masked_fill(LEFT == 0, -100)
    outputs = model(PROMPTS, attention_mask=LEFT, labels=labels)
    expected = nn.functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
    torch.testing.assert_close(outputs.loss.float(), expected)


def test_bfloat16_keeps_its_state_in_float32():
    model = language_model().bfloat16()
    outputs = model(PROMPTS, attention_mask=LEFT)
    assert outputs.logits.dtype == torch.bfloat16
    assert {part.dtype for layer in outputs.past_key_values.layers for part in layer.state.pack()} == {torch.float32}
    assert model.generate(PROMPTS, max_new_tokens=3).shape == (3, 10)


@pytest.mark.filterwarnings("error:.gradient_checkpointing_:FutureWarning")
def test_gradient_checkpointing_changes_nothing():
    model = language_model().train()
    plain = with_gradients(model, model(PROMPTS, attention_mask=LEFT).logits)
    # renamed in transformers 5.23
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable()
    calls = []
    model.model.lm.decoder.layers[0].register_forward_pre_hook(lambda *_: calls.append(1))
    for value, truth in zip(with_gradients(model, model(PROMPTS, attention_mask=LEFT).logits), plain, strict=True):
        assert_close(value, truth)
    assert len(calls) == 2  # the backward pass runs the layer again


@pytest.mark.skipif(not hasattr(transformers.PreTrainedModel, "activation_checkpointing_enable"), reason="since 5.23")
def test_options_of_checkpointing_are_honoured():
    model = language_model(num_hidden_layers=5).train()
    layers = model.model.lm.decoder.layers

    def runs() -> list[int]:
        """Count the runs of each layer in one forward and backward pass."""
        calls = []
        hooks = [layer.register_forward_pre_hook(lambda layer, _: calls.append(layer)) for layer in layers]
        model(PROMPTS, labels=PROMPTS).loss.backward()
        for hook in hooks:
            hook.remove()
        return [calls.count(layer) for layer in layers]

    contexts = []

    def context_fn():
        contexts.append(1)
        return nullcontext(), nullcontext()

    model.activation_checkpointing_enable({"use_reentrant": False, "context_fn": context_fn}, every_n_layers=2)
    assert runs() == [2, 1, 2, 1, 2]
    assert len(contexts) == 3
    model.activation_checkpointing_enable({"use_reentrant": True}, every_n_layers=3)
    assert runs() == [2, 1, 1, 2, 1]
    assert len(contexts) == 3
    model.activation_checkpointing_disable()
    assert runs() == [1] * 5
    model.activation_checkpointing_enable()
    assert runs() == [2] * 5


def test_training_makes_no_cache():
    model = language_model()
    assert model(PROMPTS).past_key_values is not None
    assert model.train()(PROMPTS).past_key_values is None


def test_resized_embeddings():
    model = language_model()
    before = model(PROMPTS).logits
    model.resize_token_embeddings(30)
    assert model.lm_head.weight is model.model.lm.embedding.weight
    assert model.config.vocab_size == 30
    assert_close(model(PROMPTS).logits[..., :23], before)
    assert model.generate(PROMPTS, max_new_tokens=2).shape == (3, 9)


def test_the_stock_layer_drops_the_state_and_ours_keeps_it():
    stock = transformers.Cache(layers=[LinearAttentionLayer()])
    stock.layers[0].update_recurrent_state(torch.ones(2, 3))
    assert not stock.has_previous_state(0)
    with pytest.raises(ValueError, match="only contain"):
        stock.get_seq_length()
    model = language_model()
    cache = model(PROMPTS, attention_mask=LEFT).past_key_values
    assert type(cache) is DynamicCache
    assert cache.get_seq_length() == 7
    assert cache.batch_size == 3
    assert cache.get_mask_sizes(2, 0) == (9, 0)
    assert cache.get_max_length() == -1
    assert not cache.is_compileable
    assert [layer.state.count.tolist() for layer in cache.layers] == [[7, 4, 1]] * 2


@pytest.mark.parametrize("make", [DynamicCache, lambda config: StaticCache(config, max_cache_len=20)])
def test_caches_of_the_library_hold_the_state(make):
    model = language_model()
    cache = make(config=model.config)
    assert cache.batch_size == -1
    assert all(isinstance(layer, FlowCacheLayer) for layer in cache.layers)
    model(PROMPTS[:, :4], past_key_values=cache)
    assert_close(model(PROMPTS[:, 4:], past_key_values=cache).logits, model(PROMPTS).logits[:, 4:])


@torch.no_grad()
def test_rows_of_the_cache_can_be_moved():
    model = language_model()
    cache = model(PROMPTS).past_key_values
    single = copy.deepcopy(cache)
    cache.reorder_cache(torch.tensor([2, 1, 0]))
    cache.batch_repeat_interleave(2)
    assert cache.batch_size == 6
    cache.batch_select_indices(torch.tensor([1, 4]))
    tokens = torch.tensor([[7], [8]])
    appended = torch.cat([PROMPTS[:1], tokens[:1]], 1)
    expected = model(torch.cat([PROMPTS[[2, 0]], tokens], 1)).logits[:, -1:]
    assert_close(model(tokens, past_key_values=cache).logits, expected)
    single.reset()
    assert single.get_seq_length() == 0
    assert_close(model(PROMPTS, past_key_values=single).logits, model(PROMPTS).logits)
    for layer in single.layers:
        layer.offload()
        layer.prefetch()
    assert_close(model(tokens[:1].expand(3, 1), past_key_values=single).logits[0], model(appended).logits[0, -1:])
    empty = DynamicCache(config=model.config)
    empty.reorder_cache(torch.tensor([1, 0]))
    empty.batch_repeat_interleave(2)
    assert empty.batch_size == -1


def test_unsupported_uses_of_a_cache_are_refused():
    model = language_model()
    cache = model(PROMPTS).past_key_values
    with pytest.raises(NotImplementedError, match="cannot forget"):
        cache.crop(-1)
    with pytest.raises(TypeError, match=r"DynamicCache that cannot hold.*config=model\.config"):
        model(PROMPTS, past_key_values=DynamicCache())
    with pytest.raises(ValueError, match="not supported with stateful"):
        model.generate(PROMPTS[:1], assistant_model=language_model(), max_new_tokens=2)


def test_config_survives_json(tmp_path):
    config = FlowformerConfig(**SIZES | STYLES["gpt"], num_labels=5)
    config.save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert type(loaded) is FlowformerConfig
    assert loaded.to_dict() == config.to_dict() | {"_name_or_path": str(tmp_path)}
    assert loaded.lm_config() == config.lm_config()
    assert loaded.lm_config().variant == FlowVariant.named("core")
    by_value = FlowformerConfig(**SIZES, variant=FlowVariant(clamp=2.0))
    assert by_value.variant == asdict(FlowVariant(clamp=2.0)) == FlowformerConfig(variant=by_value.variant).variant
    assert FlowformerConfig().lm_config().variant == FlowVariant()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hidden_act": "gelu_new"}, "unknown activation 'gelu_new'"),
        ({"positions": "learned"}, "learned positions need max_position_embeddings"),
        ({"variant": "cores"}, "did you mean 'core'"),
        ({"variant": "lra", "is_causal": False}, "takes no variant with competitors"),
        ({"num_hidden_layers": 0}, "must be a positive whole number"),
    ],
)
def test_a_wrong_config_is_refused_at_once(options, message):
    with pytest.raises(Exception, match=message):
        FlowformerConfig(**options)


@BY_STYLE
def test_saving_and_loading(style, tmp_path):
    model = language_model(style).float()
    model.save_pretrained(tmp_path)
    assert sorted(path.name for path in tmp_path.glob("*.safetensors")) == ["model.safetensors"]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is FlowformerForCausalLM
    assert not loaded.training
    assert torch.equal(loaded(PROMPTS).logits, model(PROMPTS).logits)
    assert (loaded.lm_head.weight is loaded.model.lm.embedding.weight) == model.config.tie_word_embeddings
    bare = AutoModel.from_pretrained(tmp_path)
    assert type(bare) is FlowformerModel
    assert torch.equal(bare(PROMPTS).last_hidden_state, model.model(PROMPTS).last_hidden_state)
    half = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert half(PROMPTS).logits.dtype == torch.bfloat16


def test_a_classifier_takes_the_weights_of_a_language_model(tmp_path):
    model = language_model("gpt").float()
    model.save_pretrained(tmp_path)
    classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=4)
    assert type(classifier) is FlowformerForSequenceClassification
    for name, parameter in model.model.named_parameters():
        assert torch.equal(classifier.model.get_parameter(name), parameter)
    assert 0 < classifier.score.weight.std() < 0.05


def test_importing_twice_registers_again():
    importlib.reload(sys.modules["flowformer.integrations.transformers"])
    assert type(AutoConfig.for_model("flowformer")) is FlowformerConfig


@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("mask", [LEFT, LEFT.flip(1)], ids=["left", "right"])
def test_classification_of_a_padded_batch_is_that_of_each_alone(is_causal, mask):
    config = FlowformerConfig(**SIZES | STYLES["paper"], is_causal=is_causal, num_labels=4)
    model = randomized(FlowformerForSequenceClassification(config))
    together = model(PROMPTS, attention_mask=mask)
    alone = torch.cat([model(row[keep][None]).logits for row, keep in zip(PROMPTS, mask.bool(), strict=True)])
    assert_close(together.logits, alone)
    for value, truth in zip(with_gradients(model, together.logits), with_gradients(model, alone), strict=True):
        assert_close(value, truth)
    assert torch.equal(model(PROMPTS.masked_fill(mask == 0, 0)).logits, model(PROMPTS * mask, mask).logits)
    embedded = model(inputs_embeds=model.get_input_embeddings()(PROMPTS), attention_mask=mask)
    assert_close(embedded.logits, together.logits)


def test_a_bidirectional_model_sees_the_future_and_keeps_no_cache():
    config = FlowformerConfig(**SIZES | STYLES["paper"], is_causal=False)
    model = randomized(FlowformerModel(config))
    changed = PROMPTS.clone()
    changed[:, -1] = 11
    assert (model(PROMPTS).last_hidden_state - model(changed).last_hidden_state)[:, 0].abs().max() > 1e-6
    causal = language_model().model
    assert torch.equal(causal(PROMPTS).last_hidden_state[:, :-1], causal(changed).last_hidden_state[:, :-1])
    assert model(PROMPTS).past_key_values is None
    with pytest.raises(ValueError, match="no past to keep"):
        model(PROMPTS, use_cache=True)
    with pytest.raises(ValueError, match="needs is_causal=True"):
        FlowformerForCausalLM(config)


def test_a_classifier_heeds_positions_and_refuses_packed_sequences():
    model = randomized(FlowformerForSequenceClassification(FlowformerConfig(**SIZES | STYLES["paper"], num_labels=4)))
    later = torch.arange(5, 12).expand_as(PROMPTS)
    x = model.model(PROMPTS, position_ids=later).last_hidden_state
    assert_close(model(PROMPTS, position_ids=later).logits, model.score(x[:, -1]))
    assert (model(PROMPTS).logits - model(PROMPTS, position_ids=later).logits).abs().max() > 1e-3
    assert len(model(PROMPTS, output_hidden_states=True).hidden_states) == len(model.model.lm.decoder.layers) + 1
    with pytest.raises(ValueError, match="a row has one label"):
        model(PROMPTS.reshape(1, -1), cu_seq_lens_q=torch.tensor([0, 7, 14, 21]))


def test_the_loss_of_a_classifier():
    model = randomized(FlowformerForSequenceClassification(FlowformerConfig(**SIZES | STYLES["paper"], num_labels=4)))
    labels = torch.tensor([0, 3, 1])
    outputs = model(PROMPTS, labels=labels)
    assert_close(outputs.loss, nn.functional.cross_entropy(outputs.logits, labels))


def test_wrong_inputs_are_refused():
    model = language_model()
    with pytest.raises(ValueError, match="either input_ids or inputs_embeds"):
        model()
    with pytest.raises(ValueError, match="either input_ids or inputs_embeds"):
        model(PROMPTS, inputs_embeds=model.get_input_embeddings()(PROMPTS))
    with pytest.raises(ValueError, match="no linear form"):
        model(PROMPTS, attention_mask=torch.ones(3, 1, 7, 7))
    with pytest.raises(ValueError, match=r"\(3, 7\), got \(3, 9\): it covers"):
        model(PROMPTS, attention_mask=torch.ones(3, 9))
    with pytest.raises(TypeError, match="got a tuple that cannot hold the state"):
        model(PROMPTS, past_key_values=())
    with pytest.raises(ValueError, match="a cache of 3 sequences and tokens of 1"):
        model(PROMPTS[:1], past_key_values=model(PROMPTS).past_key_values)


def test_a_step_of_the_trainer(tmp_path):
    model = FlowformerForCausalLM(FlowformerConfig(**SIZES | STYLES["paper"]))
    before = copy.deepcopy(model.state_dict())
    data = [{"input_ids": row.tolist(), "labels": row.tolist()} for row in PROMPTS]
    arguments = TrainingArguments(
        str(tmp_path), max_steps=1, per_device_train_batch_size=2, use_cpu=True, report_to=[], save_steps=1
    )
    trainer = Trainer(model, arguments, train_dataset=data, eval_dataset=data)
    assert trainer.train().training_loss > 0
    assert any(not torch.equal(before[name], weight) for name, weight in model.state_dict().items())
    assert trainer.evaluate()["eval_loss"] > 0
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-1")
    assert torch.equal(loaded(PROMPTS).logits, model.eval()(PROMPTS).logits)


def test_the_trainer_keeps_packed_sequences_apart(tmp_path):
    model = language_model().float()
    rows = [{"input_ids": row.tolist()} for row in (PROMPTS[0], PROMPTS[1, :3])]
    batch = DataCollatorWithFlattening()(rows)
    losses = [
        model(torch.tensor([row["input_ids"]]), labels=torch.tensor([row["input_ids"]])).loss
        * (len(row["input_ids"]) - 1)
        for row in rows
    ]
    torch.testing.assert_close(model(**batch).loss, sum(losses) / 8)


def test_text_generation_pipeline(tmp_path):
    words = ["[PAD]", "[BOS]", *"abcdefghijklmnopqrstu"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[PAD]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", bos_token="[BOS]", padding_side="left"
    )
    model = language_model()
    generate = pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu")
    prompts = ["a b c d", "e f"]
    options = {"max_new_tokens": 5, "do_sample": False, "return_full_text": False}
    alone = [generate(prompt, **options)[0]["generated_text"] for prompt in prompts]
    together = [each[0]["generated_text"] for each in generate(prompts, batch_size=2, **options)]
    assert together == alone
    assert all(len(text.split()) == 5 for text in alone)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    from_folder = pipeline("text-generation", str(tmp_path), device="cpu")
    assert from_folder(prompts[0], **options)[0]["generated_text"] == alone[0]


@pytest.mark.parametrize("breakage", ["raise RuntimeError('no such operator')", "__version__ = '4.0'"])
def test_a_missing_or_broken_transformers_names_the_extra(breakage, tmp_path):
    (tmp_path / "transformers.py").write_text(breakage)
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import flowformer.integrations.transformers"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "ImportError: flowformer.integrations.transformers needs transformers" in result.stderr
    assert "pip install 'flowformer[hf]'" in result.stderr


@pytest.mark.parametrize("code", re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL))
def test_the_page_runs(code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert len(code.splitlines()) <= 20
    exec(compile(code, str(PAGE), "exec"), {})
