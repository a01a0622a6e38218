"""Text as batches: documents packed into rows, or padded side by side.

A batch is a function of its number alone, so that an interrupted run goes on with the next one.

Shapes: B rows, N tokens.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

PIECE = 100_000  # characters that are tokenised at once
NEARBY = 32  # updates among which sentences are sorted by length


def tokenize(texts: Iterable[str | Tensor], tokenizer: Any, words: int) -> list[Tensor]:
    """The tokens of each document, without special tokens; documents may be tokens already.

    Args:
        words: how many the model knows.
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
        # a piece ends with a line where there is one: few tokens reach over its end
        pieces = re.findall(rf"(?s).{{1,{PIECE}}}(?:\n|\Z)|.{{1,{PIECE}}}", text)
        found = tokenizer(pieces, add_special_tokens=False)["input_ids"] if pieces else []
        documents.append(torch.tensor([token for piece in found for token in piece], dtype=torch.long))
    documents = [document for document in documents if len(document)]
    for document in documents:
        least, largest = int(document.min()), int(document.max())
        if least < 0 or largest >= words:
            raise ValueError(
                f"a document has token {least if least < 0 else largest}, but the model knows {words}, from 0 on. Is "
                "the tokenizer another model's?"
            )
    return documents


def special_token(tokenizer: Any, config: Any, name: str) -> int | None:
    """A token such as "eos", of the tokenizer or else of the config of the model."""
    found = [getattr(owner, f"{name}_token_id", None) for owner in (tokenizer, config)]
    found = [token[0] if isinstance(token, list) and token else token for token in found]  # a config may have several
    token = next((token for token in found if isinstance(token, int)), None)
    words = config.get_text_config().vocab_size
    if token is not None and not 0 <= token < words:
        raise ValueError(
            f"the {name} token is {token}, but the model knows {words}, from 0 on. Pass the model's own tokenizer, "
            f"correct {name}_token_id, or resize the embeddings of the model."
        )
    return token


def around(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The tokens that a tokenizer puts before and after a text, such as [CLS] and [SEP]; none without a tokenizer."""
    if tokenizer is None:
        return [], []
    whole, text = (tokenizer("a", add_special_tokens=special)["input_ids"] for special in (True, False))
    if whole == text:
        return [], []
    starts = [start for start in range(len(whole)) if whole[start : start + len(text)] == text]
    if not starts:
        raise ValueError(f"cannot tell which tokens this {type(tokenizer).__name__} puts before and after a text.")
    return whole[: starts[0]], whole[starts[0] + len(text) :]


def framed(documents: list[Tensor], before: list[int], after: list[int]) -> list[Tensor]:
    """Documents between these tokens, which are not added where they are already."""

    def frame(document: Tensor) -> Tensor:
        first = [] if document[: len(before)].tolist() == before else before
        last = [] if document[len(document) - len(after) :].tolist() == after else after
        return torch.cat([torch.tensor(first, dtype=torch.long), document, torch.tensor(last, dtype=torch.long)])

    return [frame(document) for document in documents]


def language_documents(documents: list[Tensor], tokenizer: Any, config: Any) -> list[Tensor]:
    """Documents as language models read them: after what the tokenizer puts first, and with the token of their end."""
    end = special_token(tokenizer, config, "eos")
    return framed(documents, around(tokenizer)[0], [] if end is None else [end])


def checksum(tensors: Iterable[Tensor]) -> int:
    """Of their bytes."""
    result = 0
    for tensor in tensors:
        result = zlib.crc32(tensor.cpu().flatten().view(torch.uint8).numpy().data, result)
    return result


class PackedRows:
    """Rows of `length` tokens of documents one after another, with the positions of each token in its document.

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
        place = torch.arange(length).expand(rows, length)
        self.tokens = stream.view(rows, length)
        self.positions = (place - torch.where(starts, place, 0).cummax(-1).values).int()
        self.seed = seed

    def __len__(self) -> int:
        return len(self.tokens)

    def tensors(self) -> Iterator[Tensor]:
        yield from (self.tokens, self.positions)

    def batch(self, step: int, size: int, rank: int = 0, ranks: int = 1) -> dict[str, Tensor]:
        """The rows of update `step` that are those of this rank."""
        rows = self.rows(step, size)[rank::ranks]
        return {"input_ids": self.tokens[rows].long(), "position_ids": self.positions[rows].long()}

    def rows(self, step: int, size: int) -> Tensor:
        """The numbers of the rows of an update: every epoch has an order of its own."""
        return _rows(len(self), step, size, self.seed)


class PaddedRows:
    """Documents cut to `length` tokens and padded side by side, where hidden states are learned or packed documents
    would see each other.

    Rows of an update have similar lengths: padding costs as much as tokens.

    Args:
        before, after: tokens around each document, such as [CLS] and [SEP].
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
        self.documents = framed([document[:room] for document in documents], before, after)
        self.lengths = torch.tensor([len(document) for document in self.documents])
        self.pad, self.seed = pad, seed

    def __len__(self) -> int:
        return len(self.documents)

    def tensors(self) -> Iterator[Tensor]:
        yield from self.documents

    def batch(self, step: int, size: int, rank: int = 0, ranks: int = 1) -> dict[str, Tensor]:
        """The documents of update `step` that are those of this rank."""
        return self.padded(self.rows(step, size)[rank::ranks])

    def padded(self, rows: Tensor) -> dict[str, Tensor]:
        """Documents side by side, and which of their tokens are no padding."""
        chosen = [self.documents[row] for row in rows.tolist()]
        pad = torch.nn.utils.rnn.pad_sequence
        tokens = pad(chosen, batch_first=True, padding_value=self.pad)
        mask = pad([torch.ones_like(document) for document in chosen], batch_first=True)
        return {"input_ids": tokens, "attention_mask": mask}

    def rows(self, step: int, size: int) -> Tensor:
        """The numbers of the documents of an update: those of nearby updates, sorted by length and dealt out again."""
        group, place = divmod(step, NEARBY)
        rows = _rows(len(self), group, NEARBY * size, self.seed)
        order = torch.randperm(NEARBY, generator=torch.Generator().manual_seed(self.seed * 1_000_003 + group))
        return rows[self.lengths[rows].argsort(stable=True)].view(NEARBY, size)[order[place]]


class GivenBatches:
    """Inputs of a model as they are, such as {"pixel_values": …}: one for each update, again and again."""

    def __init__(self, batches: list[Mapping[str, Tensor]]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def tensors(self) -> Iterator[Tensor]:
        for inputs in self.batches:
            yield from inputs.values()

    def batch(self, step: int, size: int, rank: int = 0, ranks: int = 1) -> dict[str, Tensor]:
        inputs = self.batches[step % len(self)]
        return {name: x[rank::ranks] for name, x in inputs.items()}


Batches = PackedRows | PaddedRows | GivenBatches


def _rows(count: int, step: int, size: int, seed: int) -> Tensor:
    places = torch.arange(step * size, (step + 1) * size)
    orders = {
        epoch: torch.randperm(count, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch))
        for epoch in range(int(places[0]) // count, int(places[-1]) // count + 1)
    }
    return torch.stack([orders[place // count][place % count] for place in places.tolist()])
