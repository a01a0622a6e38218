"""Language modelling: WikiText-103 and Penn Treebank by words, enwik8 by bytes.

A case is {"tokens" (L + 1,)}: the model predicts token i + 1 from tokens 0 to i. All training cases have this length
(unless the data are shorter than one case); the last case of a validation or test part may be shorter, so that every
token is predicted once.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from .._utils import check_positive
from . import store
from .splits import Columns, DataInfo, FlatSequences, Splits
from .store import DataSet

SPECIAL = ("<pad>", "<s>", "</s>", "<unk>")
_END = SPECIAL.index("</s>")
_UNKNOWN = SPECIAL.index("<unk>")
_PARTS = ("train", "valid", "test")


class TextCases(Columns):
    """Cases of consecutive tokens; `vocabulary` is the word of each id, or None if tokens are bytes."""

    def __init__(self, vocabulary: list[str] | None, **columns: Tensor | FlatSequences) -> None:
        super().__init__(**columns)
        self.vocabulary = vocabulary


def wikitext103(folder: Path, *, partial: bool = False, length: int = 512, context: int = 0) -> Splits:
    """Read WikiText-103 by words from folder/wikitext-103/wiki.<part>.tokens.

    The vocabulary has every word of the training part.

    Args:
        length: L, the number of tokens that a case reads.
        context: number of tokens that a validation or test case reads again after the previous case. Such cases have a
            key "context" (), and only the predictions from this position on are scored. The paper uses 400 of 512.
    """
    return _load_words(WIKITEXT103, folder, "", partial, length, context)


def ptb(folder: Path, *, partial: bool = False, length: int = 512, context: int = 0) -> Splits:
    """Read Mikolov's version of the Penn Treebank by words from folder/ptb/ptb.<part>.txt.

    Args: see `wikitext103`.
    """
    return _load_words(PTB, folder, "not in the paper", partial, length, context)


def enwik8(folder: Path, *, partial: bool = False, length: int = 512, context: int = 0) -> Splits:
    """Read the first 100 MB of Wikipedia by bytes from the file folder/enwik8, split 90 / 5 / 5 %.

    Args: see `wikitext103`.
    """
    path = ENWIK8.require(folder)["all"]
    data = path.read_bytes()
    differs = store.complete(path, "bytes", len(data), ENWIK8.sizes["all"], partial=partial)
    if not differs and hashlib.md5(data, usedforsecurity=False).hexdigest() != "a1fa5ffddb56f4953e226637dabbb36a":
        raise store.DamagedDataError(f"{path} is damaged: it has the right size but not the published checksum.")
    flat = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    train, valid, test = flat.tensor_split([len(flat) * 90 // 100, len(flat) * 95 // 100])
    if len(valid) < 2:
        raise store.DamagedDataError(f"{path} is too short: of {len(flat)} bytes, {len(valid)} are for validation.")
    info = DataInfo(
        "enwik8",
        store.checksum([path]),
        vocab_size=256,
        max_length=length,
        differs=store.notes("not in the paper", differs),
    )
    return Splits(_cases(train, length), _cases(valid, length, context), _cases(test, length, context), info)


# sizes are in tokens, including one for the end of each line
WIKITEXT103 = DataSet(
    "wikitext103",
    store.Source(
        "WikiText-103",
        "Download wikitext-103-v1.zip and unpack it, so that {folder}/wikitext-103/wiki.train.tokens is there.",
        "540 MB",
    ),
    files=lambda folder: {part: folder / "wikitext-103" / f"wiki.{part}.tokens" for part in _PARTS},
    reader=wikitext103,
    sizes={"train": 103_227_021, "valid": 217_646, "test": 245_569},
)
PTB = DataSet(
    "ptb",
    store.Source(
        "Penn Treebank",
        "Download simple-examples.tgz of Mikolov's RNNLM and put data/ptb.{train,valid,test}.txt into {folder}/ptb.",
        "6 MB",
    ),
    files=lambda folder: {part: folder / "ptb" / f"ptb.{part}.txt" for part in _PARTS},
    reader=ptb,
    sizes={"train": 929_589, "valid": 73_760, "test": 82_430},
)
ENWIK8 = DataSet(
    "enwik8",
    store.Source("enwik8", "Download http://mattmahoney.net/dc/enwik8.zip and unpack it as {folder}/enwik8.", "100 MB"),
    files=lambda folder: {"all": folder / "enwik8"},
    reader=enwik8,
    sizes={"all": 100_000_000},  # bytes
)
RECORDS = (WIKITEXT103, ENWIK8, PTB)


def _load_words(record: DataSet, folder: Path, differs: str, partial: bool, length: int, context: int) -> Splits:
    paths = record.require(folder)
    counts = Counter(chain.from_iterable(_read_lines(paths["train"])))
    for word in SPECIAL:
        counts.pop(word, None)
    # words of equal frequency are sorted alphabetically, so that ids are reproducible
    vocabulary = [*SPECIAL, *sorted(counts, key=lambda word: (-counts[word], word))]
    ids = {word: index for index, word in enumerate(vocabulary)}
    differences, parts = [differs], []
    for part, path in paths.items():
        # start with </s>, so that the first word is predicted too
        tokens = array("i", [_END])
        for words in _read_lines(path):
            tokens.extend([ids.get(word, _UNKNOWN) for word in words])
        differences.append(store.complete(path, "tokens", len(tokens) - 1, record.sizes[part], partial=partial))
        flat = torch.frombuffer(tokens, dtype=torch.int32)
        parts.append(_cases(flat, length, None if part == "train" else context, vocabulary))
    info = DataInfo(
        record.name,
        store.checksum(paths.values()),
        # rounded up to a multiple of 8 for tensor cores, as in the published vocabulary
        vocab_size=-(-len(vocabulary) // 8) * 8,
        padding_id=0,
        max_length=length,
        differs=store.notes(*differences),
    )
    train, valid, test = parts
    return Splits(train, valid, test, info)


def _read_lines(path: Path) -> Iterator[list[str]]:
    """Yield the words of each line, followed by </s>."""
    with path.open(encoding="utf-8") as file:
        try:
            for line in file:
                yield [*line.split(), "</s>"]
        except UnicodeDecodeError as error:
            raise store.DamagedDataError(f"{path} is damaged: {error}") from error


def _cases(flat: Tensor, length: int, context: int | None = None, vocabulary: list[str] | None = None) -> TextCases:
    """Cut tokens into cases of `length` + 1 tokens that overlap by `context` + 1.

    Args:
        flat: (T,), all tokens of a part.
        context: None for training: cases overlap by one token, and a shorter last case is dropped.
    """
    check_positive(length=length)
    if not 0 <= (context or 0) < length:
        raise ValueError(f"context must be from 0 to length - 1 = {length - 1}, got {context}.")
    step = length - (context or 0)
    firsts = torch.arange(0, len(flat) - 1, step)  # first input token of each case after its context
    ends = (firsts + step + 1).clamp(max=len(flat))
    if context is None and len(ends) > 1 and ends[-1] - firsts[-1] <= length:
        firsts, ends = firsts[:-1], ends[:-1]
    if not context:
        return TextCases(vocabulary, tokens=FlatSequences(flat, firsts, ends))
    starts = (firsts - context).clamp(min=0)
    return TextCases(vocabulary, tokens=FlatSequences(flat, starts, ends), context=firsts - starts)
