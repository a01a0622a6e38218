"""Text as tokens, and as batches of rows."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from language import documents

from flowformer.linearize.text import NEARBY, PackedRows, Sentences, tokenize


def test_rows_are_packed_documents():
    rows = PackedRows(documents(7), 10, 1, 3)
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
    lengths = torch.randint(1, 50, (NEARBY * 4,), generator=generator).tolist()
    sentences = Sentences([torch.full((length,), 5) for length in lengths], 99, 0, None, None, 3)
    updates = [sentences.rows(step, 4).tolist() for step in range(2 * NEARBY)]
    for epoch in (updates[:NEARBY], updates[NEARBY:]):
        assert sorted(row for rows in epoch for row in rows) == list(range(len(sentences)))
        ranges = sorted((min(lengths[row] for row in rows), max(lengths[row] for row in rows)) for rows in epoch)
        assert all(before[1] <= after[0] for before, after in pairwise(ranges))
    assert updates[:NEARBY] != updates[NEARBY:]
    assert updates[:NEARBY] != sorted(updates[:NEARBY], key=lambda rows: lengths[rows[0]])
    shares = [sentences.batch(5, 4, rank, 2)["input_ids"].ne(0).sum().item() for rank in (0, 1)]
    assert sum(shares) == sentences.batch(5, 4)["attention_mask"].sum()


def test_text_needs_a_tokenizer_and_is_cut_into_pieces(monkeypatch):
    def tokenizer(texts, add_special_tokens):
        assert not add_special_tokens
        return {"input_ids": [[ord(letter) for letter in text] for text in texts]}

    monkeypatch.setattr("flowformer.linearize.text.PIECE", 5)
    text = "one\ntwo, three and four\n\nfive"
    (tokens,) = tokenize([text, ""], tokenizer)
    assert "".join(map(chr, tokens.tolist())) == text
    with pytest.raises(TypeError, match="got int"):
        tokenize([3], tokenizer)
