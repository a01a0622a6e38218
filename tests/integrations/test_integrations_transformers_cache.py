"""FlowCache: generation with Flow-Attention and a state of constant size in decoders of transformers."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import transformers
from tiny_transformers import LEFT, PROMPTS, assert_close, assert_cuts_give_the_logits, randomized
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedConfig, StaticCache

from flowformer.integrations.transformers import FlowCache, FlowCacheLayer
from flowformer.integrations.transformers.served import current_cache

TINY = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}
TEXT = TINY | {"vocab_size": 23, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
MODELS = {
    "llama": transformers.LlamaConfig(**TEXT, num_key_value_heads=2),
    "smollm3": transformers.SmolLM3Config(**TEXT, num_key_value_heads=2),
    "qwen2": transformers.Qwen2Config(**TEXT, num_key_value_heads=2),
    "qwen3": transformers.Qwen3Config(**TEXT, num_key_value_heads=2, head_dim=8),
    "mistral": transformers.MistralConfig(**TEXT, num_key_value_heads=4, sliding_window=64),
    "gemma": transformers.GemmaConfig(**TEXT, num_key_value_heads=1, head_dim=8),
    "gemma2": transformers.Gemma2Config(**TEXT, num_key_value_heads=2, head_dim=8, sliding_window=64),
    "gpt2": transformers.GPT2Config(vocab_size=23, n_embd=16, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2),
    "phi": transformers.PhiConfig(**TEXT, partial_rotary_factor=0.5),
    "gpt_neox": transformers.GPTNeoXConfig(**TEXT),
    "olmo2": transformers.Olmo2Config(**TEXT),
    "opt": transformers.OPTConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=4, ffn_dim=24, word_embed_proj_dim=16, vocab_size=23
    ),
}
EVERY_MODEL = pytest.mark.parametrize("name", MODELS)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def decoder(chosen: str | PreTrainedConfig):
    """Build a decoder with Flow-Attention from a config or the name of one."""
    config = copy.deepcopy(MODELS[chosen] if isinstance(chosen, str) else chosen)
    model = randomized(AutoModelForCausalLM.from_config(config, attn_implementation="flow_attention"))
    model.generation_config.eos_token_id = None  # no row stops early
    model.generation_config.pad_token_id = 0
    model.config._experts_implementation = "eager"  # the other implementations do not support float64
    return model


def assert_cache_changes_nothing(model, options=(), recomputed_options=(), **inputs):
    """Generate with and without the cache, and compare tokens and logits."""
    common = {"max_new_tokens": 6, "return_dict_in_generate": True, "output_logits": True}
    results = []
    for each in ({**dict(options)}, {**dict(recomputed_options), "use_cache": False}):
        torch.manual_seed(3)
        out = model.generate(**inputs, **common, **each)
        results.append(out)
    cached, recomputed = results
    assert all(isinstance(layer, FlowCacheLayer) for layer in cached.past_key_values.layers)
    assert torch.equal(cached.sequences, recomputed.sequences)
    assert_close(torch.stack(cached.logits), torch.stack(recomputed.logits))
    return cached


@EVERY_MODEL
@pytest.mark.parametrize("padded", [False, True], ids=["even", "left-padded"])
def test_greedy_generation_equals_recomputation(name, padded):
    inputs = {"attention_mask": LEFT} if padded else {}
    assert_cache_changes_nothing(decoder(name), {"do_sample": False}, {"do_sample": False}, inputs=PROMPTS, **inputs)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("padded", [False, True], ids=["even", "left-padded"])
@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": True, "top_k": 5},
        {"do_sample": False, "num_beams": 3},
        {"do_sample": True, "num_return_sequences": 3},
        {"do_sample": False, "prefill_chunk_size": 3},
        {"do_sample": False, "prefill_chunk_size": 3, "num_beams": 2, "num_return_sequences": 2},
        {"do_sample": False, "cache_implementation": "static"},
    ],
    ids=lambda options: "-".join(f"{k}={v}" for k, v in options.items()),
)
def test_every_way_to_generate_equals_recomputation(name, padded, options):
    inputs = {"attention_mask": LEFT} if padded else {}
    recomputed = {k: v for k, v in options.items() if k not in ("prefill_chunk_size", "cache_implementation")}
    assert_cache_changes_nothing(decoder(name), options, recomputed, inputs=PROMPTS, **inputs)


@EVERY_MODEL
@pytest.mark.parametrize("mask", [None, LEFT, LEFT.flip(1)], ids=["even", "left-padded", "right-padded"])
def test_any_cut_of_a_sequence_gives_its_logits(name, mask):
    assert_cuts_give_the_logits(decoder(name), mask, FlowCache)


def test_a_conversation_goes_on_from_its_cache():
    model = decoder("llama")
    options = {"max_new_tokens": 4, "do_sample": False}
    cache = FlowCache(model.config)
    answer = model.generate(PROMPTS, past_key_values=cache, **options)
    question = torch.cat([answer, PROMPTS.flip(1)], 1)
    expected = model.generate(question, use_cache=False, **options)
    assert torch.equal(model.generate(question, past_key_values=cache, **options), expected)


def test_a_prefix_is_shared_by_copies_and_snapshots():
    model = decoder("qwen3")
    cache = FlowCache(model.config)
    with torch.no_grad():
        model(PROMPTS[:, :4], past_key_values=cache)
        kept, other = cache.snapshot(), cache.copy()
        expected = model(PROMPTS, use_cache=False).logits[:, 4:]
        deep = copy.deepcopy(cache)
        model(PROMPTS[:, :3], past_key_values=cache)  # another continuation
        for each in (other, deep):
            assert_close(model(PROMPTS[:, 4:], past_key_values=each).logits, expected)
        for _ in range(2):
            cache.restore(kept)
            assert cache.get_seq_length() == 4
            assert_close(model(PROMPTS[:, 4:], past_key_values=cache).logits, expected)
    with pytest.raises(ValueError, match="1 layers"):
        cache.restore(kept[:1])


MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 4, "mamba_d_state": 8, "mamba_chunk_size": 8}
HYBRIDS = [
    transformers.FalconH1Config(**TEXT, num_key_value_heads=2, mamba_d_ssm=32, **MAMBA),
    transformers.ZayaConfig(**TEXT, num_key_value_heads=2),
]


@pytest.mark.parametrize(
    "config",
    [transformers.BambaConfig(**TEXT, num_key_value_heads=2, attn_layer_indices=[1], **MAMBA), *HYBRIDS],
    ids=lambda config: config.model_type,
)
def test_recurrent_layers_beside_the_attention_are_copied_too(config):
    """The recurrent layers of transformers update their states in place."""
    model = decoder(config)
    cache, token = FlowCache(model.config), PROMPTS[:, :1]
    with torch.no_grad():
        model(PROMPTS, past_key_values=cache)
        kept, other = cache.snapshot(), cache.copy()
        expected = model(token, past_key_values=cache).logits
        assert torch.equal(model(token, past_key_values=other).logits, expected)
        for _ in range(2):
            cache.restore(kept)
            assert torch.equal(model(token, past_key_values=cache).logits, expected)


@pytest.mark.parametrize("config", HYBRIDS, ids=lambda config: config.model_type)
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
def test_layers_with_a_recurrence_beside_their_attention_decode(config, options):
    model, options = decoder(config), {"do_sample": False, "max_new_tokens": 5, **options}
    cached = model.generate(PROMPTS, attention_mask=LEFT, return_dict_in_generate=True, **options)
    assert all(isinstance(layer, FlowCacheLayer) for layer in cached.past_key_values.layers)
    expected = model.generate(PROMPTS, attention_mask=LEFT, use_cache=False, **options)
    assert torch.equal(cached.sequences, expected)
    cache = cached.past_key_values
    cache.reset()
    assert torch.equal(model.generate(PROMPTS, attention_mask=LEFT, past_key_values=cache, **options), expected)


def test_a_module_that_runs_several_times_has_a_past_for_each():
    sizes = {"num_layers_per_stack": 2, "H_cycles": 2, "L_cycles": 2, "head_dim": 8}
    text = {name: value for name, value in TEXT.items() if name != "num_hidden_layers"}
    model = decoder(transformers.HrmTextConfig(**text, **sizes))
    assert_cache_changes_nothing(model, {"do_sample": False}, {"do_sample": False}, inputs=PROMPTS)


def test_layers_that_need_more_than_one_state_do_not_decode():
    model = decoder(transformers.DiffLlamaConfig(**TEXT, num_key_value_heads=2))  # attends twice
    with pytest.raises(NotImplementedError, match=r"one FlowState a layer\. Pass use_cache=False"):
        model.generate(PROMPTS, max_new_tokens=2)
    model.generate(PROMPTS, max_new_tokens=2, use_cache=False)


@pytest.mark.parametrize("length", [3, 9])
def test_a_mask_covers_the_cache_and_the_new_tokens(length):
    model = decoder("llama")
    cache = FlowCache(model.config)
    model(PROMPTS[:, :4], past_key_values=cache)
    with pytest.raises(ValueError, match=rf"\(3, 7\), got \(3, {length}\)"):
        model(PROMPTS[:, 4:], past_key_values=cache, attention_mask=torch.ones(3, length))


def test_memory_does_not_grow_with_the_text():
    model = decoder("llama").float()

    def numbers(tokens):
        cache = FlowCache(model.config)
        with torch.no_grad():
            for part in torch.randint(3, 23, (2, tokens)).split(40, 1):
                model(part, past_key_values=cache)
        assert cache.get_seq_length() == tokens
        held = [x for layer in cache.layers for x in vars(layer).values() if isinstance(x, torch.Tensor)]
        assert not held  # all tensors are in the state
        return sum(part.numel() for layer in cache.layers for part in layer.state.pack())

    assert numbers(5) == numbers(120)


def test_no_cache_is_kept_after_a_forward_pass():
    model = decoder("gpt2")
    model(PROMPTS, past_key_values=FlowCache(model.config))
    assert current_cache() is None


def test_threads_share_a_model():
    """While an attention layer runs, another thread runs the same model with another cache."""
    model = decoder("llama")
    whole, cache = model(PROMPTS, use_cache=False).logits, FlowCache(model.config)

    def interrupt(module, args):
        handle.remove()
        with ThreadPoolExecutor(1) as other:
            other.submit(model, PROMPTS, past_key_values=FlowCache(model.config)).result()

    handle = model.model.layers[0].self_attn.q_proj.register_forward_pre_hook(interrupt)
    parts = [model(part, past_key_values=cache).logits for part in PROMPTS.split(4, 1)]
    assert_close(torch.cat(parts, 1), whole)


def test_tokens_cannot_be_taken_back():
    model = decoder("llama")
    cache = FlowCache(model.config)
    model(PROMPTS, past_key_values=cache)
    with pytest.raises(NotImplementedError, match="snapshot"):
        cache.crop(-1)
    with pytest.raises(ValueError, match="stateful"):
        model.generate(PROMPTS[:1], assistant_model=decoder("llama"), max_new_tokens=3)


def test_caches_of_keys_and_values_are_refused():
    model = decoder("llama")
    with pytest.raises(TypeError, match=r"FlowCache\(model.config\)"):
        model(PROMPTS, past_key_values=DynamicCache())
    with pytest.raises(ValueError, match=r"sdpa|eager"):
        FlowCache(AutoModelForCausalLM.from_config(copy.deepcopy(MODELS["llama"])).config)
    for cache in (DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=9)):
        assert all(isinstance(layer, FlowCacheLayer) for layer in cache.layers)


def test_softmax_refuses_a_cache_of_states():
    """Softmax would silently see the new tokens only."""
    model = decoder("llama")
    softmax = AutoModelForCausalLM.from_config(copy.deepcopy(MODELS["llama"]))
    cache = FlowCache(model.config)
    model(PROMPTS, past_key_values=cache)
    model.set_attn_implementation("sdpa")
    for each, past in ((model, cache), (softmax.double(), FlowCache(decoder("llama").config))):
        with pytest.raises(TypeError, match=r"of Flow-Attention for another attention"):
            each(PROMPTS, past_key_values=past)
    expected = model.generate(PROMPTS[:1], do_sample=False, max_new_tokens=4, use_cache=False)
    generated = model.generate(PROMPTS[:1], do_sample=False, max_new_tokens=4, prompt_lookup_num_tokens=2)
    assert torch.equal(generated, expected)
    model.set_attn_implementation("flow_attention")
    assert_cache_changes_nothing(model, {"do_sample": False}, {"do_sample": False}, inputs=PROMPTS)


def test_other_models_keep_their_cache():
    model = AutoModelForCausalLM.from_config(copy.deepcopy(MODELS["llama"]))
    assert not any(isinstance(layer, FlowCacheLayer) for layer in model(PROMPTS).past_key_values.layers)


def test_a_window_that_the_text_outgrows_is_refused():
    config = copy.deepcopy(MODELS["mistral"])
    config.sliding_window = 9
    model = randomized(AutoModelForCausalLM.from_config(config, attn_implementation="flow_attention"))
    model.generate(PROMPTS, max_new_tokens=2, min_new_tokens=2)
    with pytest.raises(NotImplementedError, match="window"):
        model.generate(PROMPTS, max_new_tokens=5, min_new_tokens=5)


def test_a_cache_of_packed_sequences_is_not_continued():
    model = decoder("llama")
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3]])
    ends = torch.tensor([0, 3, 7], dtype=torch.int32)
    bounds = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 4, "max_length_k": 4}
    out = model(PROMPTS[:1], position_ids=positions, use_cache=True, **bounds)
    assert_close(out.logits[:, 3:], model(PROMPTS[:1, 3:], use_cache=False).logits)
    with pytest.raises(ValueError, match="packed"):
        model(PROMPTS[:1], past_key_values=out.past_key_values)


def test_a_cache_of_bidirectional_tokens_is_not_continued():
    model = decoder("llama")
    out = model(PROMPTS, is_causal=False)  # with a cache that the model creates
    assert_close(out.logits, model(PROMPTS, is_causal=False, use_cache=False).logits)
    with pytest.raises(ValueError, match="bidirectional"):
        model(PROMPTS, past_key_values=out.past_key_values)


def test_training_through_a_cache_gives_the_gradients_of_one_pass():
    model = decoder("llama").train()
    whole = model(PROMPTS, use_cache=False).logits
    expected = torch.autograd.grad(whole.square().sum(), list(model.parameters()))
    cache = FlowCache(model.config)
    parts = [model(part, past_key_values=cache).logits for part in PROMPTS.split(3, 1)]
    grads = torch.autograd.grad(torch.cat(parts, 1).square().sum(), list(model.parameters()))
    for value, truth in zip(grads, expected, strict=True):
        torch.testing.assert_close(value, truth, rtol=1e-7, atol=1e-7 * truth.abs().max().item())
