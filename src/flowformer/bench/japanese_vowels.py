"""FlowformerTimeSeriesClassifier with default settings, compared with aeon's RocketClassifier, on JapaneseVowels.

    flowformer bench japanese-vowels

The data set is shipped with aeon: 270 training and 370 test series of 12 channels and 7 to 29 steps, nine speakers.
Both classifiers see only the training series and are scored once, after the fit. RocketClassifier needs equal lengths,
so its series are padded. Seconds are for `fit` and `predict` together on one thread, aeon's default, without
compilation.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import aeon
import numpy as np
import torch
from aeon.classification.convolution_based import RocketClassifier
from aeon.datasets import load_japanese_vowels
from aeon.transformations.collection.unequal_length import Padder
from sklearn.pipeline import make_pipeline

from ..integrations.aeon import FlowformerTimeSeriesClassifier

LONGEST = 29


class VowelsResult(NamedTuple):
    contestant: str
    accuracies: list[float]
    seconds: list[float]


def rocket(random_state: int):
    return make_pipeline(Padder(padded_length=LONGEST), RocketClassifier(random_state=random_state))


def flowformer(random_state: int):
    return FlowformerTimeSeriesClassifier(random_state=random_state, device="cpu")


def measure(name: str, build: Callable[[int], Any], seeds: list[int], train: tuple, test: tuple) -> VowelsResult:
    row = VowelsResult(name, [], [])
    for seed in seeds:
        start = time.perf_counter()
        predicted = build(seed).fit(*train).predict(test[0])
        row.seconds.append(time.perf_counter() - start)
        row.accuracies.append(float(np.mean(predicted == test[1])))
        print(f"{name}, seed {seed}: {row.accuracies[-1]:.2%} in {row.seconds[-1]:.1f} s", flush=True)
    return row


def table(rows: list[VowelsResult], seeds: list[int]) -> str:
    lines = [f"{'test accuracy, %':32}" + "".join(f"{f'seed {seed}':>9}" for seed in seeds) + "     mean   seconds"]
    for name, accuracies, seconds in rows:
        scores = "".join(f"{100 * score:9.2f}" for score in [*accuracies, statistics.mean(accuracies)])
        lines.append(f"{name:32}{scores}{statistics.mean(seconds):10.1f}")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> list[VowelsResult]:
    parser = argparse.ArgumentParser(
        "flowformer bench japanese-vowels", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    seeds = parser.parse_args(arguments).seeds
    print(f"CPU, one thread, torch {torch.__version__}, aeon {aeon.__version__}")
    train, test = load_japanese_vowels("train"), load_japanese_vowels("test")
    # compiles Rocket before the timing
    few = train[0][::30], train[1][::30]
    rocket(0).fit(*few).predict(few[0])
    rows = [
        measure("FlowformerTimeSeriesClassifier", flowformer, seeds, train, test),
        measure("RocketClassifier", rocket, seeds, train, test),
    ]
    print(table(rows, seeds))
    return rows


if __name__ == "__main__":
    main()
