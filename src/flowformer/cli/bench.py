"""`flowformer bench`: each benchmark is a module of `flowformer.bench` that parses its own options."""

from __future__ import annotations

import importlib

import typer

from .app import app, command

bench_app = typer.Typer(
    help="Check and time Flow-Attention and its rivals; each benchmark has its own --help.",
    no_args_is_help=True,
)
app.add_typer(bench_app, name="bench")
# pass all arguments, --help included, to the benchmark's own parser
_PASS_ALL_ARGUMENTS = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
_BENCHMARKS = {
    "attention": "Flow-Attention beside its authors' formulation and softmax attention: time, memory, and a token's "
    "decoding.",
    "lra": "The paper's efficiency table: steps per second of one model with every attention, and the paper's ratios.",
    "decode": "A language model that generates: tokens per second early and late in a text, beside softmax attention "
    "with a cache of keys and values.",
    "loop": "How much of a training step is the model: the loop of a recipe beside its bare model on the same batches.",
    "japanese-vowels": "The time-series classifier with its default settings beside aeon's RocketClassifier: accuracy "
    "and seconds.",
    "context": "A sequence cut over processes: bytes and stages of the exchange beside their formula, and the time.",
    "fuzz": "Random calls of the backends against the float64 reference: values, gradients, memory, repeatability.",
}


def _add_benchmark(name: str, what_it_measures: str) -> None:
    @command(bench_app, name, context_settings=_PASS_ALL_ARGUMENTS, help=what_it_measures)
    def run(context: typer.Context) -> None:
        module = importlib.import_module(f"flowformer.bench.{name.replace('-', '_')}")
        status = module.main(context.args)
        if isinstance(status, int):  # only the fuzzer returns an exit status
            raise typer.Exit(status)


for _name, _text in _BENCHMARKS.items():
    _add_benchmark(_name, _text)
