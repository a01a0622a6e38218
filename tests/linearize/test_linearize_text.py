"""Tokenisation, and batches of packed and padded rows."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from language import LLAMA, documents
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from flowformer.linearize import LinearizeConfig, linearize
from flowformer.linearize.text import (
    UPDATES_PER_GROUP,
    PackedRows,
    PaddedRows,
    checksum,
    language_documents,
    special_token,
    special_tokens_around,
    tokenize,
    with_special_tokens,
)
from flowformer.linearize.transfer import make_batches


def test_rows_are_packed_documents():
    rows = PackedRows(with_special_tokens(documents(7), [], [1]), 10, 3)
    stream = torch.cat([torch.cat([each, torch.tensor([1])]) for each in documents(7)])
    assert torch.equal(rows.tokens.flatten().long(), stream[: rows.tokens.numel()])
    begins = rows.positions == 0
    assert begins[:, 0].all()
    assert torch.equal(rows.positions[:, 1:][~begins[:, 1:]], (rows.positions[:, :-1] + 1)[~begins[:, 1:]])
    counted = [int(i) for step in range(len(rows)) for i in rows.rows(step, 2)]
    assert sorted(counted[: len(rows)]) == list(range(len(rows))) == sorted(counted[len(rows) :])
    assert counted[: len(rows)] != counted[len(rows) :]
    shares = [rows.batch(5, 4, rank, 2)["input_ids"] for rank in (0, 1)]
    assert sorted(torch.cat(shares).tolist()) == sorted(rows.batch(5, 4)["input_ids"].tolist())


def test_sentences_of_an_update_have_similar_lengths():
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 50, (UPDATES_PER_GROUP * 4,), generator=generator).tolist()
    sentences = PaddedRows([torch.full((length,), 5) for length in lengths], 99, 0, [], [], 3)
    updates = [sentences.rows(step, 4).tolist() for step in range(2 * UPDATES_PER_GROUP)]
    for epoch in (updates[:UPDATES_PER_GROUP], updates[UPDATES_PER_GROUP:]):
        assert sorted(row for rows in epoch for row in rows) == list(range(len(sentences)))
        ranges = sorted((min(lengths[row] for row in rows), max(lengths[row] for row in rows)) for rows in epoch)
        assert all(before[1] <= after[0] for before, after in pairwise(ranges))
    assert updates[:UPDATES_PER_GROUP] != updates[UPDATES_PER_GROUP:]
    assert updates[:UPDATES_PER_GROUP] != sorted(updates[:UPDATES_PER_GROUP], key=lambda rows: lengths[rows[0]])
    shares = [sentences.batch(5, 4, rank, 2)["input_ids"].ne(0).sum().item() for rank in (0, 1)]
    assert sum(shares) == sentences.batch(5, 4)["attention_mask"].sum()


def test_text_needs_a_tokenizer_and_is_cut_into_pieces(monkeypatch):
    def tokenizer(texts, add_special_tokens):
        assert not add_special_tokens
        return {"input_ids": [[ord(letter) for letter in text] for text in texts]}

    monkeypatch.setattr("flowformer.linearize.text.PIECE_SIZE", 5)
    text = "one\ntwo, three and four\n\nfive"
    (tokens,) = tokenize([text, ""], tokenizer, 128)
    assert "".join(map(chr, tokens.tolist())) == text
    with pytest.raises(TypeError, match="got int"):
        tokenize([3], tokenizer, 128)


@pytest.mark.parametrize("token", [-1, 17])
def test_special_tokens_that_the_model_does_not_know_are_refused(token):
    """A user may add a token to the tokenizer without resizing the embeddings of the model."""
    tokenizer = SimpleNamespace(pad_token_id=token)
    assert special_token(tokenizer, LLAMA, "eos") == 1
    with pytest.raises(ValueError, match=f"the pad token is {token}, but the model knows 17"):
        special_token(tokenizer, LLAMA, "pad")


@pytest.mark.parametrize("architecture", ["llama", "opt"])
def test_only_padded_rows_need_a_token_of_padding(architecture):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "eos_token_id": 1}
    other = {"opt": {"word_embed_proj_dim": 16, "ffn_dim": 16}, "llama": {"intermediate_size": 16}}[architecture]
    config = AutoConfig.for_model(architecture, vocab_size=17, pad_token_id=None, **sizes, **other)
    student = linearize(AutoModelForCausalLM.from_config(config))
    student.model.config.pad_token_id = 17
    options = LinearizeConfig(length=8)
    if architecture == "llama":
        assert isinstance(make_batches(student, documents(3), options), PackedRows)
    else:
        with pytest.raises(ValueError, match="the pad token is 17, but the model knows 17"):
            make_batches(student, documents(3), options)


SPECIALS = {"<pad>": 0, "<bos>": 1, "<eos>": 2}


def tokenizer_of(template: str) -> PreTrainedTokenizerFast:
    letters = {letter: len(SPECIALS) + i for i, letter in enumerate("abcdefgh")}
    tokenizer = Tokenizer(models.WordLevel(SPECIALS | letters, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=list(SPECIALS.items()))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")


@pytest.mark.parametrize(
    ("template", "before", "after"),
    [("$A", [], []), ("<bos> $A", [1], []), ("<bos> $A <eos>", [1], [2]), ("<bos> <bos> $A <eos>", [1, 1], [2])],
)
def test_documents_have_the_tokens_that_the_tokenizer_puts_around_them(template, before, after):
    """Encoders get the tokens before and after; language models those before, and the end-of-text token."""
    tokenizer = tokenizer_of(template)
    assert special_tokens_around(tokenizer) == (before, after)
    (text,) = tokenize(["head"], tokenizer, 11)
    assert text.tolist() == [10, 7, 3, 6]
    rows = PaddedRows([text, text[:1]], 4 + len(before + after), 0, before, after, 0)
    assert [row.tolist() for row in rows.tensors()] == [[*before, *text.tolist(), *after], [*before, 10, *after]]
    (document,) = language_documents([text], tokenizer, LLAMA)
    assert document.tolist() == [*before, *text.tolist(), 2]
    assert torch.equal(language_documents([document], tokenizer, LLAMA)[0], document)


def test_the_checksum_of_a_strided_tensor_is_that_of_its_copy():
    """Batches from the caller may hold views, such as a column."""
    column = torch.arange(6).view(3, 2)[:, 0]
    assert checksum([column]) == checksum([column.clone()]) != checksum([column + 1])


def test_documents_without_a_tokenizer_end_as_the_config_says():
    for end, expected in ((3, [3]), ([4, 3], [4]), (None, [])):
        config = LlamaConfig(vocab_size=17, eos_token_id=end)
        assert language_documents([torch.tensor([5, 6])], None, config)[0].tolist() == [5, 6, *expected]
