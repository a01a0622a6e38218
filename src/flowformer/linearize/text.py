"""Tokenisation, and batches of documents: packed into rows of equal length, or one padded row per document.

A batch depends only on the seed and its step number, so that a resumed run continues with the next batch.

Shapes: B rows, N tokens.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

PIECE_SIZE = 100_000  # most characters passed to the tokenizer at once
UPDATES_PER_GROUP = 32  # the rows of this many updates are sorted by length together


def tokenize(texts: Iterable[str | Tensor], tokenizer: Any, vocab_size: int) -> list[Tensor]:
    """Return the token ids of each document, without special tokens; empty documents are dropped.

    Args:
        texts: strings, or 1-d tensors of token ids.
        vocab_size: vocabulary size of the model; larger ids are refused.
    """
    documents = []
    for text in texts:
        if isinstance(text, Tensor):
            if text.dim() != 1 or text.is_floating_point():
                raise TypeError(
                    f"a document of tokens is a 1-d tensor of integers, got {text.dtype} {tuple(text.shape)}."
                )
            documents.append(text.long().cpu())
            continue
        if not isinstance(text, str):
            raise TypeError(f"a document is a string or a 1-d tensor of tokens, got {type(text).__name__}.")
        if tokenizer is None:
            raise ValueError(
                "got text but no tokenizer, and none lies beside the model. Pass linearize(model, tokenizer), or "
                "documents as 1-d tensors of tokens."
            )
        # pieces end at line ends where possible, since a token that spans two pieces would be split
        pieces = re.findall(rf"(?s).{{1,{PIECE_SIZE}}}(?:\n|\Z)|.{{1,{PIECE_SIZE}}}", text)
        tokenized = tokenizer(pieces, add_special_tokens=False)["input_ids"] if pieces else []
        documents.append(torch.tensor([token for piece in tokenized for token in piece], dtype=torch.long))
    documents = [document for document in documents if len(document)]
    for document in documents:
        least, largest = int(document.min()), int(document.max())
        if least < 0 or largest >= vocab_size:
            raise ValueError(
                f"a document has token {least if least < 0 else largest}, but the model knows {vocab_size}, from 0 on. "
                "Is the tokenizer another model's?"
            )
    return documents


def special_token(tokenizer: Any, config: Any, name: str) -> int | None:
    """Return the id of a special token such as "eos", from the tokenizer or else from the model's config."""
    candidates = [getattr(owner, f"{name}_token_id", None) for owner in (tokenizer, config)]
    # a config may list several
    candidates = [token[0] if isinstance(token, list) and token else token for token in candidates]
    token = next((token for token in candidates if isinstance(token, int)), None)
    vocab_size = config.get_text_config().vocab_size
    if token is not None and not 0 <= token < vocab_size:
        raise ValueError(
            f"the {name} token is {token}, but the model knows {vocab_size}, from 0 on. Pass the model's own "
            f"tokenizer, correct {name}_token_id, or resize the embeddings of the model."
        )
    return token


def special_tokens_around(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Return the tokens a tokenizer puts before and after a text, such as [CLS] and [SEP]; none without a tokenizer."""
    if tokenizer is None:
        return [], []
    whole, text = (tokenizer("a", add_special_tokens=special)["input_ids"] for special in (True, False))
    if whole == text:
        return [], []
    starts = [start for start in range(len(whole)) if whole[start : start + len(text)] == text]
    if not starts:
        raise ValueError(f"cannot tell which tokens this {type(tokenizer).__name__} puts before and after a text.")
    return whole[: starts[0]], whole[starts[0] + len(text) :]


def with_special_tokens(documents: list[Tensor], before: list[int], after: list[int]) -> list[Tensor]:
    """Put the tokens `before` and `after` around each document that does not have them already."""

    def surround(document: Tensor) -> Tensor:
        first = [] if document[: len(before)].tolist() == before else before
        last = [] if document[len(document) - len(after) :].tolist() == after else after
        return torch.cat([torch.tensor(first, dtype=torch.long), document, torch.tensor(last, dtype=torch.long)])

    return [surround(document) for document in documents]


def language_documents(documents: list[Tensor], tokenizer: Any, config: Any) -> list[Tensor]:
    """Add the tokens that the tokenizer puts before a text, and the end-of-text token."""
    end = special_token(tokenizer, config, "eos")
    return with_special_tokens(documents, special_tokens_around(tokenizer)[0], [] if end is None else [end])


def checksum(tensors: Iterable[Tensor]) -> int:
    """Return the CRC-32 of the bytes of all tensors."""
    result = 0
    for tensor in tensors:
        result = zlib.crc32(tensor.cpu().flatten().contiguous().view(torch.uint8).numpy().data, result)
    return result


class PackedRows:
    """Documents concatenated and cut into rows of `length` tokens; an incomplete last row is dropped.

    Positions count from 0 at the start of each document and of each row.

    >>> rows = PackedRows([torch.arange(5), torch.arange(10, 13)], length=4, seed=0)
    >>> rows.tokens.tolist(), rows.positions.tolist()
    ([[0, 1, 2, 3], [4, 10, 11, 12]], [[0, 1, 2, 3], [0, 0, 1, 2]])
    """

    def __init__(self, documents: list[Tensor], length: int, seed: int) -> None:
        total = sum(map(len, documents))
        rows = total // length
        if rows < 1:
            raise ValueError(
                f"the text has {total} tokens, but a row has {length}. Pass more text, or a shorter length."
            )
        stream = torch.cat(documents)[: rows * length].int()
        starts = torch.zeros(total, dtype=torch.bool)
        starts[torch.tensor([0, *map(len, documents[:-1])]).cumsum(0)] = True
        starts = starts[: rows * length].view(rows, length)
        starts[:, 0] = True
        column = torch.arange(length).expand(rows, length)
        self.tokens = stream.view(rows, length)
        self.positions = (column - torch.where(starts, column, 0).cummax(-1).values).int()
        self.seed = seed

    def __len__(self) -> int:
        return len(self.tokens)

    def tensors(self) -> Iterator[Tensor]:
        yield from (self.tokens, self.positions)

    def batch(self, step: int, size: int, rank: int = 0, ranks: int = 1) -> dict[str, Tensor]:
        """Return this rank's rows of update `step`.

        Args:
            size: rows per update, summed over all ranks.
        """
        rows = self.rows(step, size)[rank::ranks]
        return {"input_ids": self.tokens[rows].long(), "position_ids": self.positions[rows].long()}

    def rows(self, step: int, size: int) -> Tensor:
        """Return the row indices of an update. Each epoch is shuffled anew."""
        return _shuffled_rows(len(self), step, size, self.seed)


class PaddedRows:
    """One row per document, truncated to `length` tokens and padded.

    Used for models trained on hidden states, and for models in which packed documents would see each other. Rows of
    an update have similar lengths, since padding costs as much as tokens.

    Args:
        pad: id of the padding token.
        before, after: special tokens around each document, such as [CLS] and [SEP].
    """

    def __init__(
        self, documents: list[Tensor], length: int, pad: int, before: list[int], after: list[int], seed: int
    ) -> None:
        room = length - len(before) - len(after)
        if not documents or room < 1:
            raise ValueError(
                f"got {len(documents)} documents for rows of {length} tokens, {room} of which are for text; nothing to "
                "learn from."
            )
        self.documents = with_special_tokens([document[:room] for document in documents], before, after)
        self.lengths = torch.tensor([len(document) for document in self.documents])
        self.pad, self.seed = pad, seed

    def __len__(self) -> int:
        return len(self.documents)

    def tensors(self) -> Iterator[Tensor]:
        yield from self.documents

    def batch(self, step: int, size: int, rank: int = 0, ranks: int = 1) -> dict[str, Tensor]:
        """Return this rank's documents of update `step`, padded; size is summed over all ranks."""
        return self.padded(self.rows(step, size)[rank::ranks])

    def padded(self, rows: Tensor) -> dict[str, Tensor]:
        """Return the documents with these indices as padded input_ids with their attention_mask."""
        chosen = [self.documents[row] for row in rows.tolist()]
        pad = torch.nn.utils.rnn.pad_sequence
        tokens = pad(chosen, batch_first=True, padding_value=self.pad)
        mask = pad([torch.ones_like(document) for document in chosen], batch_first=True)
        return {"input_ids": tokens, "attention_mask": mask}

    def rows(self, step: int, size: int) -> Tensor:
        """Return the document indices of an update.

        The documents of UPDATES_PER_GROUP updates are sorted by length, cut into updates, and the updates shuffled.
        """
        group, index = divmod(step, UPDATES_PER_GROUP)
        rows = _shuffled_rows(len(self), group, UPDATES_PER_GROUP * size, self.seed)
        order = torch.randperm(
            UPDATES_PER_GROUP, generator=torch.Generator().manual_seed(self.seed * 1_000_003 + group)
        )
        return rows[self.lengths[rows].argsort(stable=True)].view(UPDATES_PER_GROUP, size)[order[index]]


class GivenBatches:
    """Batches of model inputs from the caller, such as {"pixel_values": …}: one per update, repeated cyclically."""

    def __init__(self, batches: list[Mapping[str, Tensor]]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def tensors(self) -> Iterator[Tensor]:
        for inputs in self.batches:
            yield from inputs.values()

    def batch(self, step: int, size: int, rank: int = 0, ranks: int = 1) -> dict[str, Tensor]:
        """Return this rank's rows of the batch of update `step`; `size` is not used."""
        inputs = self.batches[step % len(self)]
        return {name: x[rank::ranks] for name, x in inputs.items()}


Batches = PackedRows | PaddedRows | GivenBatches


def _shuffled_rows(count: int, step: int, size: int, seed: int) -> Tensor:
    """Return the indices of update `step` in an endless stream of shuffled epochs over `count` rows."""
    positions = torch.arange(step * size, (step + 1) * size)
    orders = {
        epoch: torch.randperm(count, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch))
        for epoch in range(int(positions[0]) // count, int(positions[-1]) // count + 1)
    }
    return torch.stack([orders[position // count][position % count] for position in positions.tolist()])
