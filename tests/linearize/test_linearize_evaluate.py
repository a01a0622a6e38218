"""Evaluation of a student: scores, embeddings, generation speed and cache size."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from language import BERT, LLAMA, WORDS, documents
from transformers import AutoModel, AutoModelForCausalLM

from flowformer.integrations.transformers import FlowCache
from flowformer.linearize import LinearizeConfig, linearize
from flowformer.linearize.evaluate import HeldOut, cloze_accuracy, compare, generation_speed, rank_correlation
from flowformer.linearize.pair import Pair


def test_embeddings_of_all_sentences_are_compared_once():
    """Padding and the batch size do not change the scores."""
    student = linearize(AutoModel.from_config(copy.deepcopy(BERT)).eval())
    texts = documents(7, seed=5)
    scores = []
    for batch_size in (1, 3):
        config = LinearizeConfig(length=24, batch_size=batch_size)
        scores.append(compare(Pair(student, config), HeldOut.of(student, texts, config)))
    assert scores[0] == pytest.approx(scores[1], rel=1e-5)
    few = HeldOut.of(student, texts, LinearizeConfig(length=24, evaluate_tokens=50))
    assert few.sentences.lengths.sum() <= 50 < len(few.sentences) * 24 + 24


def test_evaluation_scores_every_token_once():
    class Uniform:
        def teacher_output(self, batch):
            self.tokens = batch["input_ids"]
            return torch.zeros(*self.tokens.shape, WORDS)

        def student_output(self, batch):
            return torch.zeros(*batch["input_ids"].shape, WORDS)

    for count in (2, 9, 10, 11, 57):
        held_out = HeldOut(torch.randint(WORDS, (count,)), 0, None, 10, 3)
        scored = sum(tokens[:, start:].numel() for tokens, start in held_out.windows())
        assert scored == count - 1
        scores = compare(Uniform(), held_out)
        assert scores["perplexity"] == pytest.approx(WORDS)
        assert scores["agreement"] == 1
        assert scores["KL"] == 0
    by_word = compare(Uniform(), HeldOut(torch.randint(WORDS, (21,)), 10, None, 10, 3))
    assert by_word["perplexity by word"] == pytest.approx(WORDS**2)
    assert rank_correlation(torch.arange(5.0), -torch.arange(5.0)) == -1


def test_words_are_unknown_if_a_document_is_tokens(teacher):
    def tokenizer(text, add_special_tokens):
        return {"input_ids": [3] if isinstance(text, str) else [[3] * len(piece) for piece in text]}

    student, tokens = linearize(teacher, tokenizer), torch.arange(2, WORDS)
    assert HeldOut.of(student, ["one two", "three"], LinearizeConfig()).words == 3
    assert HeldOut.of(student, ["one two", tokens], LinearizeConfig()).words == 0


def test_cloze_accuracy_is_the_share_of_last_words_that_are_guessed():
    def tokenizer(text, add_special_tokens):
        return {"input_ids": [7] * add_special_tokens + [ord(letter) for letter in text if letter != " "]}

    def logits(batch):
        """Logits of a model that expects token i + 1 to equal token i − 1."""
        tokens = batch["input_ids"]
        assert tokens[0, 0] == 7  # the tokenizer's first token
        return torch.nn.functional.one_hot(torch.cat([tokens[:, :1], tokens[:, :-1]], 1), 128).float()

    # the second text has one wrong letter; the last one has no word before its last word
    assert cloze_accuracy(logits, ["ab ab", "ab ac", "a b a", "a"], tokenizer) == pytest.approx(2 / 3)
    with pytest.raises(ValueError, match="no text has a word"):
        cloze_accuracy(logits, ["alone"], tokenizer)


def test_the_cache_of_a_student_does_not_grow(teacher):
    softmax = generation_speed(copy.deepcopy(teacher), [4, 40], batch_size=2, tokens=2)
    flow = generation_speed(linearize(teacher).model, [4, 40], batch_size=2, tokens=2)
    assert flow[0]["cache_bytes"] == flow[1]["cache_bytes"] > 0
    assert softmax[1]["cache_bytes"] > 3 * softmax[0]["cache_bytes"]
    assert all(row["tokens_per_second"] > 0 for row in softmax + flow)


def test_the_bytes_of_a_cache_include_recurrent_states():
    sizes = {k: getattr(LLAMA, k) for k in ("vocab_size", "hidden_size", "intermediate_size")}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    mamba = {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_ssm": 32, "mamba_d_state": 8, "mamba_n_groups": 1}
    for config, recurrent in (
        (transformers.Lfm2Config(**sizes, num_hidden_layers=2, layer_types=["conv", "full_attention"]), 2 * 32 * 3),
        (transformers.FalconH1Config(**sizes, num_hidden_layers=1, **mamba), 2 * (48 * 4 + 4 * 8 * 8)),
    ):
        student = linearize(AutoModelForCausalLM.from_config(config).eval())
        (flow,) = {row["cache_bytes"] for row in generation_speed(student.model, [4, 9], batch_size=2, tokens=2)}
        cache = FlowCache(student.config)
        with torch.no_grad():
            student(torch.ones(2, 3, dtype=torch.long), past_key_values=cache)
        assert flow == 4 * recurrent + sum(x.nbytes for x in cache.layers[-1].state.pack())
