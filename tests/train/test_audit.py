"""The numbers in the audit that are computed from the paper's tables."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt
from pathlib import Path
from statistics import fmean

import pytest
import torch

from flowformer.models import FlowformerClassifier
from flowformer.models.counts import count
from flowformer.models.vision import DEIT_PRESETS, PRESETS, FlowformerDeiT, FlowformerVision
from flowformer.train import recipes
from flowformer.train.overrides import override
from flowformer.train.paper import paper_average, paper_figure, paper_score

AUDIT = (Path(__file__).parents[2] / "docs/audit.md").read_text(encoding="utf-8")
TEST_CASES = {
    "lra": {"listops": 2000, "text": 25_000, "retrieval": 17_437, "image": 10_000, "pathfinder": 20_000},
    "uea": {
        "EthanolConcentration": 263,
        "FaceDetection": 3524,
        "Handwriting": 850,
        "Heartbeat": 205,
        "JapaneseVowels": 370,
        "PEMS-SF": 173,
        "SelfRegulationSCP1": 293,
        "SelfRegulationSCP2": 180,
        "SpokenArabicDigits": 2199,
        "UWaveGestureLibrary": 320,
    },
}
GAMES = [f"d4rl/{env}-{q}" for env in ("hopper", "halfcheetah", "walker2d") for q in ("medium", "medium-replay")]
GAMES += [f"d4rl/{env}-medium-expert" for env in ("hopper", "halfcheetah", "walker2d")]


def evidence(claim: str) -> str:
    (line,) = (line for line in AUDIT.splitlines() if line.startswith(f"| {claim}"))
    return line


def lead(family: str, name: str, rival: str) -> tuple[float, float]:
    """By how many points flow leads a rival on a task, and the standard error of that."""
    scores = [paper_score(f"{family}/{name}", method) for method in ("flow", rival)]
    cases = TEST_CASES[family][name]
    return scores[0] - scores[1], sqrt(sum(score * (100 - score) / cases for score in scores))


def average_lead(family: str, rival: str) -> tuple[float, float]:
    leads = [lead(family, name, rival) for name in TEST_CASES[family]]
    return fmean(each for each, _ in leads), sqrt(sum(error**2 for _, error in leads)) / len(leads)


def average(family: str, method: str, figure: str = "score") -> float:
    games = GAMES if family == "d4rl" else [f"{family}/{name}" for name in TEST_CASES[family]]
    return fmean(paper_figure(game, method, figure) for game in games)


def test_all_five_tasks_of_the_arena():
    line = evidence("LRA: better than the Transformer")
    for name in ("retrieval", "pathfinder", "listops", "image", "text"):
        points, error = lead("lra", name, "softmax")
        assert f"{name}" in line.lower()
        assert f"+{points:.2f} ({'SE ' if name == 'retrieval' else ''}{error:.2f})" in line
        assert (points > 2 * error) == (name in ("retrieval", "pathfinder"))
    assert round(lead("lra", "text", "softmax")[0] / 100 * 25_000) == 5


@pytest.mark.parametrize(
    ("task", "ours", "benchmark"),
    [("pathfinder", "396,034", "26,530"), ("listops", "2.65", "8.95"), ("text", "1.12", "3.49")],
)
def test_sizes_in_the_arena(task, ours, benchmark):
    line = evidence("LRA: a fair comparison")
    sizes = {"listops": {"vocab_size": 17}, "text": {"vocab_size": 257}, "pathfinder": {"vocab_size": 256}}
    classes = 10 if task == "listops" else 2
    for overrides, printed in (([], ours), (["attention=softmax", "preset=benchmark"], benchmark)):
        config = override(recipes.get(f"lra/{task}"), overrides).model
        with torch.device("meta"):
            parameters = FlowformerClassifier(replace(config, num_classes=classes, **sizes[task])).num_parameters()
        assert printed == (f"{parameters:,}" if task == "pathfinder" else f"{parameters / 1e6:.2f}")
        assert printed in line


def test_ablations_of_the_arena():
    leads = {name: average_lead("lra", f"flow-{name}") for name in ("without-competition", "without-allocation")}
    line = evidence("LRA: competition and allocation raise")
    assert all(f"{points:.2f}" in line and f"SE {error:.2f}" in line for points, error in leads.values())
    line = evidence("LRA: sigmoid is the best")
    for name in ("flow", "flow-relu", "flow-elu+1"):
        assert f"{average('lra', name):.2f}" in line
    for name in ("flow-relu", "flow-elu+1"):
        points, error = average_lead("lra", name)
        assert points < 2 * error
        assert f"SE {error:.2f}" in line
    pairs = [paper_average("lra", f"flow-{pair}") for pair in ("sigmoid-sigmoid", "sigmoid-softmax", "softmax-softmax")]
    assert f"56.48, the next {max(pairs):.2f}" in evidence("LRA: softmax for competition")


def test_perplexities_of_the_ablations():
    line = evidence("WikiText-103: competition")
    for name in ("competition", "allocation"):
        without = paper_score("wikitext103", f"flow-without-{name}")
        assert f"{without - paper_score('wikitext103', 'flow'):.1f} for {name} ({without} without)" in line


def test_multiply_adds():
    def counts(model_class, config, attention):
        with torch.device("meta"):
            model = model_class(replace(config, attention=attention))
        return count(model, torch.empty(1, 3, 224, 224))

    flow, softmax = (counts(FlowformerVision, PRESETS["imagenet"], name) for name in ("flow", "softmax"))
    line = evidence("ImageNet: 6.3")
    assert f"{flow.layers / 2**30:.1f}" == "6.3"
    assert f"{flow.total / 1e9:.2f} billion" in line
    assert f"softmax attention {softmax.total / 1e9:.2f}" in line
    flow, softmax = (counts(FlowformerDeiT, DEIT_PRESETS["deit-s"], name) for name in ("flow", "softmax"))
    line = evidence("DeiT-S: 4.6")
    assert f"{softmax.total / 1e9:.2f} includes" in line
    assert f"{flow.layers / 1e9:.2f} does not; with them it is {flow.total / 1e9:.2f}" in line


def test_averages_of_the_archive():
    line = evidence("UEA: best average of all methods | not significant")
    assert f"{average('uea', 'flow'):.2f};" in line
    wins = {}
    for rival in ("rocket", "linear", "softmax"):
        points, error = average_lead("uea", rival)
        assert f"−{points:.2f}" in line
        assert f"{error:.1f}" == "1.0"
        wins[rival] = sum(lead("uea", name, rival)[0] > 0 for name in TEST_CASES["uea"])
    assert wins == {"softmax": 10, "linear": 6, "rocket": 7}


def test_returns():
    scores = {method: average("d4rl", method) for method in ("flow", "softmax")}
    spreads = [paper_figure(game, method, "deviation") for game in GAMES for method in ("flow", "softmax")]
    error = sqrt(sum(spread**2 / 3 for spread in spreads)) / len(GAMES)
    assert f"+{scores['flow'] - scores['softmax']:.1f}, SE {error:.1f}" in evidence("D4RL: better")


def test_misprints():
    line = evidence("Printed averages")
    for family, method in (("lra", "sinkhorn"), ("uea", "longformer"), ("uea", "performer")):
        assert f"{average(family, method):.2f}" in line
        assert str(paper_average(family, method)) in line
        assert abs(average(family, method) - paper_average(family, method)) > 0.15
    assert f"{average('d4rl', 'cosformer', 'deviation'):.1f}, not 7.6" in line
