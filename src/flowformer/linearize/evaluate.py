"""What a student has kept of its teacher: perplexity, agreement and divergence; for encoders, embeddings.

Shapes: B rows, N tokens, V words, W width, S sentences.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from ..integrations.transformers.cache import FlowCacheLayer
from .config import LinearizeConfig
from .text import PaddedRows, around, language_documents, special_token, tokenize

if TYPE_CHECKING:
    from .student import Student

Logits = Callable[[dict[str, Tensor]], Tensor]
MOST_SENTENCES = 2000  # that are compared in pairs


class TeacherAndStudent(Protocol):
    """Two ways to get logits (B, N, V), or hidden states (B, N, W), of a batch."""

    def taught(self, batch: dict[str, Tensor]) -> Tensor: ...

    def learned(self, batch: dict[str, Tensor]) -> Tensor: ...


@dataclass(frozen=True)
class HeldOut:
    """Text that is not learned from.

    Args:
        tokens: (T,) all documents one after another, for language models.
        words: how many there are in that text, 0 where it is not known.
        sentences: for models without a head.
        length: of the windows that are scored; all but the first begin with length // 2 tokens of context.
    """

    tokens: Tensor | None
    words: int
    sentences: PaddedRows | None
    length: int
    batch_size: int

    @classmethod
    def of(cls, student: Student, texts: Iterable[str | Tensor], config: LinearizeConfig) -> HeldOut:
        check_reads_text(student, "evaluate")
        texts = list(texts)
        tokenizer, model_config = student.tokenizer, student.model.config
        documents = tokenize(texts, tokenizer, model_config.get_text_config().vocab_size)
        if not documents:
            raise ValueError("there is no text to evaluate on: no document has a token.")
        if not student.is_language_model:
            pad = special_token(tokenizer, model_config, "pad") or 0
            read = torch.tensor([min(len(document), config.length) for document in documents]).cumsum(0)
            count = min(max(int((read <= config.evaluate_tokens).sum()), 1), MOST_SENTENCES)
            sentences = PaddedRows(documents[:count], config.length, pad, *around(tokenizer), config.seed)
            return cls(None, 0, sentences, config.length, config.batch_size)
        stream = torch.cat(language_documents(documents, tokenizer, model_config))
        words = sum(len(text.split()) for text in texts if isinstance(text, str))
        kept = stream[: config.evaluate_tokens]
        if len(kept) < 2:
            raise ValueError(f"the text to evaluate on has {len(kept)} tokens; at least 2 are needed.")
        return cls(kept, round(words * len(kept) / len(stream)), None, config.length, config.batch_size)

    def windows(self) -> Iterator[tuple[Tensor, int]]:
        """Windows (B, N) of the tokens, and from which of their tokens on they are scored."""
        assert self.tokens is not None
        stride = max(self.length // 2, 1)
        first = self.tokens[: self.length]
        yield first[None], 1
        starts = range(stride, len(self.tokens) - self.length + 1, stride)
        rows = [self.tokens[start : start + self.length] for start in starts]
        for index in range(0, len(rows), self.batch_size):
            yield torch.stack(rows[index : index + self.batch_size]), self.length - stride
        scored = self.length + len(rows) * stride
        if scored < len(self.tokens):
            context = max(len(self.tokens) - self.length, 0)
            yield self.tokens[context:][None], scored - context


def check_reads_text(student: Student, argument: str) -> None:
    """Raise on documents that are passed as an argument of `transfer` to a model of other inputs."""
    if not student.takes("input_ids"):
        raise TypeError(
            f"{type(student.model).__name__} reads no text, got documents as {argument}. Learn from batches of its "
            "inputs, such as texts=[{'pixel_values': …}], without evaluate."
        )


@torch.no_grad()
def compare(pair: TeacherAndStudent, held_out: HeldOut) -> dict[str, float]:
    """The scores of teacher and student on the same text."""
    return _compare_words(pair, held_out) if held_out.sentences is None else _compare_embeddings(pair, held_out)


def _compare_words(pair: TeacherAndStudent, held_out: HeldOut) -> dict[str, float]:
    totals = dict.fromkeys(("teacher", "student", "kl", "agreement"), 0.0)
    count = 0
    for tokens, start in held_out.windows():
        batch = {"input_ids": tokens}
        taught, learned = (f(batch)[:, start - 1 : -1].float().log_softmax(-1) for f in (pair.taught, pair.learned))
        words = tokens[:, start:].to(taught.device)
        totals["teacher"] -= taught.gather(-1, words[..., None]).sum().item()
        totals["student"] -= learned.gather(-1, words[..., None]).sum().item()
        totals["kl"] += F.kl_div(learned, taught, reduction="sum", log_target=True).item()
        totals["agreement"] += (taught.argmax(-1) == learned.argmax(-1)).sum().item()
        count += words.numel()
    scores = {
        "teacher perplexity": math.exp(min(totals["teacher"] / count, 700.0)),
        "perplexity": math.exp(min(totals["student"] / count, 700.0)),
        "KL": totals["kl"] / count,
        "agreement": totals["agreement"] / count,
    }
    if held_out.words:
        scores["teacher perplexity by word"] = math.exp(min(totals["teacher"] / held_out.words, 700.0))
        scores["perplexity by word"] = math.exp(min(totals["student"] / held_out.words, 700.0))
    return scores


def _compare_embeddings(pair: TeacherAndStudent, held_out: HeldOut) -> dict[str, float]:
    sentences, size = held_out.sentences, held_out.batch_size
    assert sentences is not None
    embeddings: tuple[list[Tensor], list[Tensor]] = [], []
    for rows in sentences.lengths.argsort().split(size):
        batch = sentences.padded(rows)
        for found, run in zip(embeddings, (pair.taught, pair.learned), strict=True):
            result = run(batch).float()  # that of a head may have no tokens: a row for each sentence
            found.append(result if result.dim() == 2 else mean_of_tokens(result, batch["attention_mask"]))
    taught, learned = (torch.cat(found) for found in embeddings)
    return {
        "cosine": F.cosine_similarity(taught, learned).mean().item(),
        "rank correlation": rank_correlation(*(similarities(x) for x in (taught, learned))),
    }


def mean_of_tokens(hidden: Tensor, mask: Tensor) -> Tensor:
    """The embedding of each sentence, (B, W): the mean of its tokens."""
    mask = mask.to(hidden.device, hidden.dtype)[..., None]
    return (hidden * mask).sum(1) / mask.sum(1).clamp_min(1)


def similarities(embeddings: Tensor) -> Tensor:
    """The cosine of every pair of sentences, (S·(S − 1)/2,)."""
    unit = F.normalize(embeddings, dim=-1)
    cosines = unit @ unit.mT
    rows, columns = torch.triu_indices(len(unit), len(unit), 1, device=unit.device)
    return cosines[rows, columns]


def rank_correlation(first: Tensor, second: Tensor) -> float:
    """Spearman's correlation, ties broken by order.

    >>> rank_correlation(torch.tensor([1.0, 5.0, 3.0]), torch.tensor([2.0, 9.0, 4.0]))
    1.0
    """
    ranks = torch.stack([x.argsort().argsort().double() for x in (first, second)])
    return round(torch.corrcoef(ranks)[0, 1].item(), 9) if len(first) > 1 else math.nan


@torch.no_grad()
def cloze_accuracy(logits: Logits, texts: Iterable[str], tokenizer: Any) -> float:
    """How often the model guesses all tokens of the last word of a text from what is before it."""
    right, first = [], around(tokenizer)[0]
    for text in texts:
        before, _, word = text.rstrip().rpartition(" ")
        context, last = (tokenizer(part, add_special_tokens=False)["input_ids"] for part in (before, " " + word))
        if not context or not word:
            continue
        tokens = torch.tensor([[*first, *context, *last]])
        guess = logits({"input_ids": tokens})[0, -len(last) - 1 : -1].argmax(-1)
        right.append(guess.tolist() == last)
    if not right:
        raise ValueError("no text has a word with another before it.")
    return sum(right) / len(right)


@torch.no_grad()
def generation_speed(model: Any, positions: Iterable[int], batch_size: int = 1, tokens: int = 20) -> list[dict]:
    """Tokens per second of greedy generation at each position of a text, and the bytes of the cache there.

    Args:
        model: a decoder of transformers, with softmax or with Flow-Attention.
        positions: in rising order; the text up to there is read in parts of 1024 tokens.
        tokens: how many are generated at each position.
    """
    from transformers import DynamicCache

    device, words = model.device, model.config.get_text_config().vocab_size
    cache, length, rows = DynamicCache(config=model.config), 0, []
    generator = torch.Generator().manual_seed(0)
    for position in positions:
        while length < position:
            part = torch.randint(words, (batch_size, min(1024, position - length)), generator=generator)
            model(part.to(device), past_key_values=cache, logits_to_keep=1)
            length += part.shape[1]
        token = torch.zeros(batch_size, 1, dtype=torch.long, device=device)
        for index in range(tokens + 2):  # the first two are not timed
            if index == 2:
                _wait(device)
                began = time.perf_counter()
            token = model(token, past_key_values=cache).logits[:, -1:].argmax(-1)
        _wait(device)
        speed = batch_size * tokens / (time.perf_counter() - began)
        length += tokens + 2
        rows.append({"position": position, "tokens_per_second": speed, "cache_bytes": cache_bytes(cache)})
    return rows


def cache_bytes(cache: Any) -> int:
    """What the tensors of a cache hold."""
    tensors = []
    for layer in cache.layers:
        tensors += [getattr(layer, "keys", None), getattr(layer, "values", None)]
        if isinstance(layer, FlowCacheLayer):
            tensors += [*(() if layer.state is None else layer.state.pack()), *layer.recent]
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            tensors += [*layer.conv_states.values(), *layer.recurrent_states.values()]
    return sum(x.untyped_storage().nbytes() for x in tensors if x is not None)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
