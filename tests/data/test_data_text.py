"""Text to predict, by words and by bytes."""

from __future__ import annotations

import pytest
import torch

from flowformer import data

SETS = {"wikitext103": ("wikitext-103", "wiki.{}.tokens"), "ptb": ("ptb", "ptb.{}.txt")}
TRAIN = " the cat \n \n the <unk> the dog \n the cat \n"


@pytest.fixture(params=SETS)
def named(request, tmp_path):
    folder, pattern = SETS[request.param]
    (tmp_path / folder).mkdir()
    for part, text in (("train", TRAIN), ("valid", " the emu \n"), ("test", " dog cat the \n \n")):
        (tmp_path / folder / pattern.format(part)).write_text(text, encoding="utf-8")
    return request.param, tmp_path, tmp_path / folder / pattern


def words_of(dataset):
    return [[dataset.vocabulary[i] for i in case["tokens"]] for case in dataset]


class TestWords:
    def test_vocabulary_by_frequency_then_letters(self, named):
        name, folder, _ = named
        train, _, _, info = data.load(name, folder, partial=True, length=4)
        assert train.vocabulary == ["<pad>", "<s>", "</s>", "<unk>", "the", "cat", "dog"]
        assert (info.vocab_size, info.padding_id, info.max_length) == (8, 0, 4)

    def test_every_token_is_predicted_once(self, named):
        name, folder, _ = named
        train, valid, test, _ = data.load(name, folder, partial=True, length=4)
        # 12 tokens: three whole cases; each starts where the last ended
        assert words_of(train) == [
            ["</s>", "the", "cat", "</s>", "</s>"],
            ["</s>", "the", "<unk>", "the", "dog"],
            ["dog", "</s>", "the", "cat", "</s>"],
        ]
        assert words_of(valid) == [["</s>", "the", "<unk>", "</s>"]]
        assert words_of(test) == [["</s>", "dog", "cat", "the", "</s>"], ["</s>", "</s>"]]

    def test_training_drops_a_short_rest(self, named):
        name, folder, _ = named
        splits = data.load(name, folder, partial=True, length=5)
        assert [len(case["tokens"]) for case in splits.train] == [6, 6]
        assert [len(case["tokens"]) for case in data.load(name, folder, partial=True, length=100).train] == [13]

    def test_counts_include_ends_of_lines(self, named):
        name, folder, _ = named
        published = {"wikitext103": "103,227,021", "ptb": "929,589"}[name]
        with pytest.raises(data.DamagedDataError, match=f"12 tokens, the published data has {published}"):
            data.load(name, folder)
        assert (
            f"train.{'tokens' if name != 'ptb' else 'txt'}: 12 tokens"
            in data.load(name, folder, partial=True).info.differs
        )

    def test_a_damaged_file_is_named(self, named):
        name, folder, pattern = named
        path = pattern.with_name(pattern.name.format("valid"))
        path.write_bytes(b"caf\xc3")
        with pytest.raises(data.DamagedDataError, match=path.name.replace(".", r"\.")):
            data.load(name, folder, partial=True)


class TestContext:
    @pytest.mark.parametrize(("length", "context"), [(5, 0), (5, 3), (5, 4), (300, 100)])
    @pytest.mark.parametrize("size", [200, 201, 203])
    def test_every_byte_is_predicted_once_with_its_context(self, tmp_path, length, context, size):
        content = bytes(i % 251 for i in range(20 * size))
        (tmp_path / "enwik8").write_bytes(content)
        test = data.load("enwik8", tmp_path, partial=True, length=length, context=context).test
        part, scored = content[19 * size :], []
        for case in test:
            seen = case["context"].item() if context else 0
            tokens = case["tokens"].tolist()
            assert len(tokens) <= length + 1
            # what is predicted first has all the context, or all there is
            assert seen == min(context, len(scored))
            assert tokens[0] == part[len(scored) - seen]
            scored += tokens[1 + seen :]
        assert bytes(scored) == part[1:]

    @pytest.mark.parametrize("context", [-1, 4, 5])
    def test_must_leave_something_to_predict(self, tmp_path, context):
        (tmp_path / "enwik8").write_bytes(b"0123456789" * 10)
        with pytest.raises(ValueError, match=f"context must be from 0 to length - 1 = 3, got {context}"):
            data.load("enwik8", tmp_path, partial=True, length=4, context=context)


class TestEnwik8:
    def test_ninety_five_five(self, tmp_path):
        (tmp_path / "enwik8").write_bytes(bytes(range(200)))
        train, valid, test, info = data.load("enwik8", tmp_path, partial=True, length=9)
        assert torch.cat([case["tokens"][1:] for case in train]).tolist() == list(range(1, 172))
        assert [case["tokens"].tolist() for case in valid] == [list(range(180, 190))]
        assert [case["tokens"].tolist() for case in test] == [list(range(190, 200))]
        assert (info.vocab_size, info.padding_id) == (256, None)
        assert info.differs == "not in the paper; enwik8: 200 bytes instead of 100,000,000"

    def test_a_cut_file_is_refused(self, tmp_path):
        (tmp_path / "enwik8").write_bytes(b"x" * 99)
        with pytest.raises(data.DamagedDataError, match="enwik8 is incomplete: it has 99 bytes"):
            data.load("enwik8", tmp_path)

    def test_a_file_that_is_too_short_to_split_is_refused(self, tmp_path):
        (tmp_path / "enwik8").write_bytes(b"x" * 20)
        with pytest.raises(data.DamagedDataError, match="enwik8 is too short: of 20 bytes, 1 are for validation"):
            data.load("enwik8", tmp_path, partial=True)

    def test_a_length_is_positive(self, tmp_path):
        (tmp_path / "enwik8").write_bytes(b"x" * 99)
        with pytest.raises(ValueError, match="length must be a positive whole number, got 0"):
            data.load("enwik8", tmp_path, partial=True, length=0)

    def test_a_file_of_the_right_size_only_is_refused(self, tmp_path):
        (tmp_path / "enwik8").write_bytes(b"x" * 100_000_000)
        with pytest.raises(data.DamagedDataError, match="not the published checksum"):
            data.load("enwik8", tmp_path)
