"""Generation speed of a language model, early and late in a text, compared with softmax attention and a KV cache.

    flowformer bench decode --csv decode.csv                     # batches of 1 and 64 after 1K, 8K and 64K tokens
    flowformer bench decode --batches 1 --positions 1024 8192 --vocab 256

The model is the paper's for language, six layers of width 512, with a vocabulary of GPT-2's size. A step embeds one
token of each sequence, runs the layers, maps to the vocabulary and takes the likeliest token, which is the next input.
Flow-Attention reads and writes its state; softmax attention writes a key and a value into a cache allocated for the
whole text and attends to the part before the position, without a mask, by `F.scaled_dot_product_attention`. The text
before the position is read by Flow-Attention in parts; the cache of softmax attention holds random numbers, since its
time does not depend on them.

Modes: "eager"; "compiled", by torch.compile; "graph", the eager step replayed as a CUDA graph. First each attention's
steps are checked against one run over the same tokens.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..models.lm import PRESETS, FlowformerLM
from ..nn import FlowDecoderLayer
from .measure import captured, csv_file, is_out_of_memory, machine, milliseconds, percentiles

MODEL = replace(PRESETS["wikitext103"], dropout=0.0)
GPT2_VOCABULARY = 50257
ATTENTIONS = ("flow", "softmax")
CHECKED_TOKENS = 24
PREFILL = 1024  # tokens of a text that Flow-Attention reads at once
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}  # of the logits, relative


@dataclass(frozen=True)
class DecodeSpeed:
    attention: str
    mode: str
    batch: int
    position: int  # tokens before the one that is decoded
    status: str  # "ok" or "OOM"
    tokens_per_second: float | None = None
    p20: float | None = None
    p80: float | None = None
    cache_mib: float | None = None


class CachedSoftmax(nn.Module):
    """Softmax attention of one new token at `position` to itself and the cached tokens before it."""

    keys: Tensor
    values: Tensor

    def __init__(self, batch: int, heads: int, length: int, head_dim: int, like: Tensor) -> None:
        super().__init__()
        for name in ("keys", "values"):
            cache = torch.randn(batch, heads, length, head_dim, dtype=like.dtype, device=like.device)
            self.register_buffer(name, cache, persistent=False)
        self.position = length - 1

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **_: object) -> Tensor:
        stop = self.position + 1
        self.keys[:, :, self.position : stop] = key
        self.values[:, :, self.position : stop] = value
        return F.scaled_dot_product_attention(query, self.keys[:, :, :stop], self.values[:, :, :stop])


class Decoder:
    """A model that has read part of a text. `step` decodes one token in place, so that a CUDA graph can replay it.

    Args:
        position: the number of tokens read before the first step.
    """

    def __init__(self, attention: str, batch: int, position: int, options: argparse.Namespace) -> None:
        torch.manual_seed(0)
        config = replace(MODEL, vocab_size=options.vocab, attention=attention)
        self.model = FlowformerLM(config).to(options.device, options.dtype).eval()
        self.token = torch.randint(options.vocab, (batch, 1), device=options.device)
        self.position = torch.full((batch, 1), position, device=options.device)
        self.states = self.model.new_states(batch) if attention == "flow" else None
        self.caches: list[CachedSoftmax] = []
        if self.states is None:
            like = self.model.embedding.weight
            for layer in cast(list[FlowDecoderLayer], self.model.decoder.layers):
                heads, head_dim = layer.attention.num_heads, layer.attention.head_dim
                self.caches.append(CachedSoftmax(batch, heads, position + 1, head_dim, like))
                layer.attention.mechanism = self.caches[-1]
        else:
            for start in range(0, position, PREFILL):
                size = batch, min(PREFILL, position - start)
                self.read(torch.randint(options.vocab, size, device=options.device))

    @property
    def cache_bytes(self) -> int:
        parts = [x for cache in self.caches for x in (cache.keys, cache.values)]
        parts += [part for state in self.states or () for part in state.pack()]
        return sum(part.numel() * part.element_size() for part in parts)

    @torch.no_grad()
    def read(self, tokens: Tensor) -> Tensor:
        """Append tokens (B, N) to the text. Returns: the logits after the last one, (B, V)."""
        x = self.model.embedding(tokens)
        if self.states is None:
            x, _ = self.model.run_layers(x, positions=self.position)
        else:
            x, states = self.model.run_layers(x, states=self.states)
            assert states is not None
            for old, new in zip(self.states, states, strict=True):
                for part, changed in zip(old.pack(), new.pack(), strict=True):
                    part.copy_(changed)
        return self.model._logits(x[:, -1])

    def step(self) -> None:
        self.token.copy_(self.read(self.token).argmax(-1, keepdim=True))


def check(attention: str, options: argparse.Namespace) -> str | None:
    """A message if the logits of single steps differ from those of one parallel call, else None."""
    decoder = Decoder(attention, 2, CHECKED_TOKENS if attention == "softmax" else 0, options)
    tokens = torch.randint(options.vocab, (2, CHECKED_TOKENS), device=options.device)
    found = []
    for i in range(CHECKED_TOKENS):
        decoder.position.fill_(i)
        for cache in decoder.caches:
            cache.position = i
        found.append(decoder.read(tokens[:, i : i + 1]))
    whole = FlowformerLM(decoder.model.config).double().eval()
    whole.load_state_dict(decoder.model.state_dict())
    with torch.no_grad():
        expected = whole(tokens.cpu())
    error = ((torch.stack(found, 1).double().cpu() - expected).norm() / expected.norm()).item()
    allowed = TOLERANCE[options.dtype]
    return None if error <= allowed else f"the logits are off by {error:.1e}, allowed {allowed:.0e}"


def prepared(decoder: Decoder, mode: str) -> Callable[[], object]:
    """A function that runs one step in this mode, after a warm-up."""
    step: Callable[[], object] = decoder.step
    if mode == "compiled":
        torch.compiler.reset()  # models of other positions would count towards the recompilation limit
        step = torch.compile(decoder.step, dynamic=False)
    for _ in range(3):
        step()
    return captured(step).replay if mode == "graph" else step


def measure(attention: str, mode: str, batch: int, position: int, options: argparse.Namespace) -> DecodeSpeed:
    try:
        decoder = Decoder(attention, batch, position, options)
        step = prepared(decoder, mode)
        times = [milliseconds(step, options.device) for _ in range(options.steps)]
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return DecodeSpeed(attention, mode, batch, position, "OOM")
    median, fast, slow = (1e3 * batch / time for time in percentiles(times))
    return DecodeSpeed(attention, mode, batch, position, "ok", median, slow, fast, decoder.cache_bytes / 2**20)


def run(options: argparse.Namespace) -> Iterator[DecodeSpeed]:
    for batch in options.batches:
        for position in options.positions:
            for mode in options.modes:
                for attention in ATTENTIONS:
                    yield measure(attention, mode, batch, position, options)


def progress(row: DecodeSpeed) -> str:
    prefix = f"batch {row.batch}, after {row.position:,} tokens, {row.attention}, {row.mode}: "
    if row.status != "ok":
        return prefix + row.status
    return (
        f"{prefix}{row.tokens_per_second:,.0f} tokens/s ({row.p20:,.0f}–{row.p80:,.0f}), {row.cache_mib:,.1f} MiB kept"
    )


def table(rows: list[DecodeSpeed]) -> str:
    """Tokens per second of Flow-Attention and softmax attention, and their ratio, for each mode, batch and position."""
    found = {(row.mode, row.batch, row.position, row.attention): row.tokens_per_second for row in rows}
    lines = [f"{'mode':10}{'batch':>7}{'position':>10}{'flow':>12}{'softmax':>12}{'ratio':>8}"]
    for mode, batch, position in dict.fromkeys(key[:3] for key in found):
        flow, softmax = (found[mode, batch, position, attention] for attention in ATTENTIONS)
        speeds = "".join(f"{'OOM' if speed is None else f'{speed:,.0f}':>12}" for speed in (flow, softmax))
        ratio = f"{flow / softmax:8.2f}" if flow and softmax else ""
        lines.append(f"{mode:10}{batch:7}{position:10,}{speeds}{ratio}")
    return "\n".join(lines)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "flowformer bench decode", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    has_cuda = torch.cuda.is_available()
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if has_cuda else "cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default bfloat16 on a GPU, else float32")
    parser.add_argument("--modes", choices=("eager", "compiled", "graph"), nargs="+", help="default all the device has")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--positions", type=int, nargs="+", default=[1024, 8192, 65536])
    parser.add_argument("--vocab", type=int, default=GPT2_VOCABULARY, help="words of the vocabulary")
    parser.add_argument("--steps", type=int, default=50, help="how many steps are timed")
    parser.add_argument("--csv", type=Path, help="where to write the rows")
    options = parser.parse_args(arguments)
    if min(options.vocab, options.steps, *options.batches, *options.positions) < 1:
        parser.error("--vocab, --steps, --batches and --positions must be positive.")
    if options.modes is None:
        options.modes = ["eager", "compiled"] + ["graph"] * (options.device == "cuda")
    if "graph" in options.modes and options.device != "cuda":
        parser.error("--modes graph needs --device cuda: a CPU has no CUDA graphs.")
    options.dtype = getattr(torch, options.dtype or ("bfloat16" if options.device == "cuda" else "float32"))
    return options


def main(arguments: list[str] | None = None) -> list[DecodeSpeed]:
    options = parse(arguments)
    say = partial(print, file=sys.stderr, flush=True)
    facts = machine(options.device, str(options.dtype).removeprefix("torch."))
    say(", ".join(f"{name} {value}" for name, value in facts.items()))
    for attention in ATTENTIONS:
        if wrong := check(attention, options):
            sys.exit(f"{attention}: {wrong}")
    rows = []
    with csv_file(options.csv, DecodeSpeed, facts) as write:
        for row in run(options):
            rows.append(row)
            write(row)
            say(progress(row))
    print(table(rows))
    return rows


if __name__ == "__main__":
    main()
