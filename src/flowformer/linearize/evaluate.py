"""Comparison of student and teacher: perplexity, KL divergence and top-1 agreement; for encoders, embeddings.

Shapes: B rows, N tokens, T tokens of the held-out text, V vocabulary size, W width, S sentences.
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
from .text import PaddedRows, language_documents, special_token, special_tokens_around, tokenize

if TYPE_CHECKING:
    from .student import Student

Logits = Callable[[dict[str, Tensor]], Tensor]
MAX_SENTENCES = 2000  # all pairs are compared, which costs S²


class TeacherAndStudent(Protocol):
    """Forward passes that return logits (B, N, V), or hidden states (B, N, W), of a batch."""

    def teacher_output(self, batch: dict[str, Tensor]) -> Tensor: ...

    def student_output(self, batch: dict[str, Tensor]) -> Tensor: ...


@dataclass(frozen=True)
class HeldOut:
    """Held-out text.

    Args:
        tokens: (T,), all documents concatenated, for language models; else None.
        words: number of words in `tokens`; 0 if unknown.
        sentences: one row per document, for all other models; else None.
        length: tokens per scored window. All windows but the first begin with length // 2 tokens of context.
        batch_size: windows or sentences per forward pass.
    """

    tokens: Tensor | None
    words: int
    sentences: PaddedRows | None
    length: int
    batch_size: int

    @classmethod
    def of(cls, student: Student, texts: Iterable[str | Tensor], config: LinearizeConfig) -> HeldOut:
        """Tokenise the texts for this student, limited to config.evaluate_tokens."""
        check_reads_text(student, "evaluate")
        texts = list(texts)
        tokenizer, model_config = student.tokenizer, student.model.config
        documents = tokenize(texts, tokenizer, model_config.get_text_config().vocab_size)
        if not documents:
            raise ValueError("there is no text to evaluate on: no document has a token.")
        if not student.is_language_model:
            pad = special_token(tokenizer, model_config, "pad") or 0
            total = torch.tensor([min(len(document), config.length) for document in documents]).cumsum(0)
            count = min(max(int((total <= config.evaluate_tokens).sum()), 1), MAX_SENTENCES)
            sentences = PaddedRows(
                documents[:count], config.length, pad, *special_tokens_around(tokenizer), config.seed
            )
            return cls(None, 0, sentences, config.length, config.batch_size)
        stream = torch.cat(language_documents(documents, tokenizer, model_config))
        strings = [text for text in texts if isinstance(text, str)]
        words = sum(len(text.split()) for text in strings) if len(strings) == len(texts) else 0
        tokens = stream[: config.evaluate_tokens]
        if len(tokens) < 2:
            raise ValueError(f"the text to evaluate on has {len(tokens)} tokens; at least 2 are needed.")
        return cls(tokens, round(words * len(tokens) / len(stream)), None, config.length, config.batch_size)

    def windows(self) -> Iterator[tuple[Tensor, int]]:
        """Yield windows (B, N) of the tokens, each with the index of its first scored token."""
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
    """Refuse documents for a model without text input; `argument` names the argument of `transfer` they came from."""
    if not student.takes("input_ids"):
        raise TypeError(
            f"{type(student.model).__name__} reads no text, got documents as {argument}. Learn from batches of its "
            "inputs, such as texts=[{'pixel_values': …}], without evaluate."
        )


@torch.no_grad()
def compare(pair: TeacherAndStudent, held_out: HeldOut) -> dict[str, float]:
    """Return the scores of teacher and student on the held-out text."""
    return _compare_predictions(pair, held_out) if held_out.sentences is None else _compare_embeddings(pair, held_out)


def _compare_predictions(pair: TeacherAndStudent, held_out: HeldOut) -> dict[str, float]:
    """Perplexity, KL(teacher ‖ student) and top-1 agreement over the next-token predictions."""
    totals = dict.fromkeys(("teacher", "student", "kl", "agreement"), 0.0)
    count = 0
    for tokens, start in held_out.windows():
        batch = {"input_ids": tokens}
        teacher, student = (
            run(batch)[:, start - 1 : -1].float().log_softmax(-1) for run in (pair.teacher_output, pair.student_output)
        )
        targets = tokens[:, start:].to(teacher.device)
        totals["teacher"] -= teacher.gather(-1, targets[..., None]).sum().item()
        totals["student"] -= student.gather(-1, targets[..., None]).sum().item()
        totals["kl"] += F.kl_div(student, teacher, reduction="sum", log_target=True).item()
        totals["agreement"] += (teacher.argmax(-1) == student.argmax(-1)).sum().item()
        count += targets.numel()
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
    """Mean cosine of the sentence embeddings, and rank correlation of their pairwise similarities."""
    sentences, size = held_out.sentences, held_out.batch_size
    assert sentences is not None
    embeddings: tuple[list[Tensor], list[Tensor]] = [], []
    for rows in sentences.lengths.argsort().split(size):
        batch = sentences.padded(rows)
        for chunks, run in zip(embeddings, (pair.teacher_output, pair.student_output), strict=True):
            result = run(batch).float()  # (B, N, W), or (B, W) if the head pools the tokens
            chunks.append(result if result.dim() == 2 else mean_of_tokens(result, batch["attention_mask"]))
    teacher, student = (torch.cat(chunks) for chunks in embeddings)
    return {
        "cosine": F.cosine_similarity(teacher, student).mean().item(),
        "rank correlation": rank_correlation(*(similarities(x) for x in (teacher, student))),
    }


def mean_of_tokens(hidden: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of the hidden states over the tokens of each sentence, (B, W)."""
    mask = mask.to(hidden.device, hidden.dtype)[..., None]
    return (hidden * mask).sum(1) / mask.sum(1).clamp_min(1)


def similarities(embeddings: Tensor) -> Tensor:
    """Return the cosine similarity of every pair of sentences, (S·(S − 1)/2,)."""
    unit = F.normalize(embeddings, dim=-1)
    cosines = unit @ unit.mT
    rows, columns = torch.triu_indices(len(unit), len(unit), 1, device=unit.device)
    return cosines[rows, columns]


def rank_correlation(first: Tensor, second: Tensor) -> float:
    """Return Spearman's rank correlation; ties get arbitrary distinct ranks.

    >>> rank_correlation(torch.tensor([1.0, 5.0, 3.0]), torch.tensor([2.0, 9.0, 4.0]))
    1.0
    """
    ranks = torch.stack([x.argsort().argsort().double() for x in (first, second)])
    return round(torch.corrcoef(ranks)[0, 1].item(), 9) if len(first) > 1 else math.nan


@torch.no_grad()
def cloze_accuracy(logits: Logits, texts: Iterable[str], tokenizer: Any) -> float:
    """Return the fraction of texts whose last word is predicted exactly, token by token, from the words before it."""
    correct, prefix = [], special_tokens_around(tokenizer)[0]
    for text in texts:
        before, _, word = text.rstrip().rpartition(" ")
        context, last = (tokenizer(part, add_special_tokens=False)["input_ids"] for part in (before, " " + word))
        if not context or not word:
            continue
        tokens = torch.tensor([[*prefix, *context, *last]])
        guess = logits({"input_ids": tokens})[0, -len(last) - 1 : -1].argmax(-1)
        correct.append(guess.tolist() == last)
    if not correct:
        raise ValueError("no text has a word with another before it.")
    return sum(correct) / len(correct)


@torch.no_grad()
def generation_speed(model: Any, positions: Iterable[int], batch_size: int = 1, tokens: int = 20) -> list[dict]:
    """Measure greedy generation and cache size at each position of a random text.

    Args:
        model: a transformers decoder, with softmax or with Flow-Attention.
        positions: in increasing order. The text up to each position is prefilled in parts of 1024 tokens.
        tokens: tokens generated and timed at each position.

    Returns: a dict per position: position, tokens_per_second (summed over the batch) and cache_bytes.
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
        for index in range(tokens + 2):  # the first two warm up
            if index == 2:
                _synchronize(device)
                began = time.perf_counter()
            token = model(token, past_key_values=cache).logits[:, -1:].argmax(-1)
        _synchronize(device)
        speed = batch_size * tokens / (time.perf_counter() - began)
        length += tokens + 2
        rows.append({"position": position, "tokens_per_second": speed, "cache_bytes": cache_bytes(cache)})
    return rows


def cache_bytes(cache: Any) -> int:
    """Return the bytes held by the tensors of a cache."""
    tensors = []
    for layer in cache.layers:
        tensors += [getattr(layer, "keys", None), getattr(layer, "values", None)]
        if isinstance(layer, FlowCacheLayer):
            tensors += [*(() if layer.state is None else layer.state.pack()), *layer.recent]
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            tensors += [*layer.conv_states.values(), *layer.recurrent_states.values()]
    return sum(x.untyped_storage().nbytes() for x in tensors if x is not None)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
