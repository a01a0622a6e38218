"""The numbers in the audit and the README, computed from the paper's tables and from the committed runs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from math import ceil, log, log2, sqrt
from pathlib import Path
from statistics import fmean
from typing import Literal

import pytest
import torch

from flowformer import flow_attention
from flowformer.models import FlowformerClassifier
from flowformer.models.counts import count
from flowformer.models.vision import DEIT_PRESETS, PRESETS, FlowformerDeiT, FlowformerVision
from flowformer.train import recipes
from flowformer.train.overrides import override
from flowformer.train.paper import paper_average, paper_figure, paper_score, paper_speed
from flowformer.train.results import collect
from flowformer.train.summary import Filled, Line, Score, fill

ROOT = Path(__file__).parents[2]
AUDIT = (ROOT / "docs/audit.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
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


def lead_in_games(method: str, games: list[str]) -> tuple[float, float]:
    """By how many points a method leads the Decision Transformer, and the standard error of that."""
    points = fmean(paper_score(game, method) - paper_score(game, "softmax") for game in games)
    spreads = [paper_figure(game, each, "deviation") for game in games for each in (method, "softmax")]
    return points, sqrt(sum(spread**2 / 3 for spread in spreads)) / len(games)


def test_weights_of_a_result():
    torch.manual_seed(0)
    query, key = torch.randn(2, 2, 8, 1024, 64).double()
    weights = flow_attention(query, key, torch.ones(2, 8, 1024, 1).double())
    assert f"with Gaussian inputs to {weights.mean():.2f}, sigmoid(1)" in evidence("Flow is conserved")
    assert abs(weights.mean() - torch.tensor(1.0).sigmoid()) < 0.005


def test_all_five_tasks_of_the_arena():
    line = evidence("LRA: better than the Transformer")
    for name in ("retrieval", "pathfinder", "listops", "image", "text"):
        points, error = lead("lra", name, "softmax")
        assert f"{name}" in line.lower()
        assert f"+{points:.2f} ({'SE ' if name == 'retrieval' else ''}{error:.2f})" in line
        assert (points > 2 * error) == (name in ("retrieval", "pathfinder"))
    assert round(lead("lra", "text", "softmax")[0] / 100 * 25_000) == 5


def test_two_tasks_of_the_arena():
    line = evidence("LRA: the best on ListOps")
    for name, before in (("listops", "+0.80 (SE"), ("retrieval", "+0.88 (")):
        points, error = lead("lra", name, "cosformer")
        assert f"{before} {error:.2f}".replace("( ", "(") in line
        assert before.startswith(f"+{points:.2f}")
        assert points < 2 * error


def test_images():
    for model, rival, claim in (
        ("hierarchical", "softmax", "ImageNet: better than"),
        ("deit-s", "softmax", "DeiT-S: better with"),
        ("hierarchical", "reformer", "ImageNet: better than"),
    ):
        ours, theirs = (paper_score(f"imagenet/{model}", method) for method in ("flow", rival))
        error = sqrt((ours * (100 - ours) + theirs * (100 - theirs)) / 50_000)
        printed = f"+{ours - theirs:.1f}"
        assert (f"{printed}, SE {error:.2f}" if rival == "softmax" else f"Reformer, {printed}") in evidence(claim)
        assert (ours - theirs > 2 * error) == (model == "hierarchical")
    top5 = [paper_figure("imagenet/deit-s", method, "top5") for method in ("softmax", "flow")]
    assert "from {} to {}".format(*top5) in evidence("DeiT-S: better with")


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


def test_speeds_beside_performer():
    line = evidence("LRA: faster in training")

    def leads(mode):
        """By how many percent flow is faster than Performer at each length."""
        speeds = [[paper_speed(name, mode, 1024 * k) for name in ("flow", "performer")] for k in range(1, 5)]
        return [100 * (flow / performer - 1) for flow, performer in speeds]

    training = [f"{lead:+.1f}".replace("-", "−") for lead in leads("training")]
    assert f"{', '.join(training[:3])} and {training[3]} % in training" in line
    inference = [-lead for lead in leads("inference")]
    assert f"{min(inference):.1f} to {max(inference):.1f} % slower in inference" in line


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
    points, error = lead_in_games("flow", GAMES)
    assert f"+{points:.1f}, SE {error:.1f}" in evidence("D4RL: better")
    line = evidence("D4RL: other efficient attentions")
    fewer = [game for game in GAMES if game != "d4rl/walker2d-medium-expert"]
    without = []
    for method in ("performer", "reformer", "linear", "cosformer"):
        points, error = lead_in_games(method, GAMES)
        assert f"−{-points:.1f} ({'SE ' if method == 'performer' else ''}{error:.1f})" in line
        without.append(f"{-lead_in_games(method, fewer)[0]:.1f}")
    assert f"the first three are {without[0]}, {without[1]} and {without[2]} behind" in line


def test_misprints():
    line = evidence("Printed averages")
    for family, method in (("lra", "sinkhorn"), ("uea", "longformer"), ("uea", "performer")):
        assert f"{average(family, method):.2f}" in line
        assert str(paper_average(family, method)) in line
        assert abs(average(family, method) - paper_average(family, method)) > 0.15
    assert f"{average('d4rl', 'cosformer', 'deviation'):.1f}, not 7.6" in line


@cache
def measured(table: str, protocol: str = "", arithmetic: str | None = None) -> dict[str, Line]:
    """The lines of a table of our runs, by the label of their method."""
    every = fill(collect([ROOT / "results/reproduce.csv"]))
    (found,) = (x for x in every if (x.table.name, x.protocol, x.arithmetic) == (table, protocol, arithmetic))
    return {line.method.label: line for line in found.lines}


def bound(cells: Iterable[Filled]) -> str:
    """The largest distance from the paper's numbers, rounded up."""
    return f"{ceil(10 * max(abs(each.difference) for each in cells) - 1e-9) / 10:.1f}"


def average_of(method: str) -> Filled:
    average = measured("uea")[method].average
    assert average is not None
    return average


def test_results_in_the_readme():
    def row(label: str, cells: list[Filled | None]) -> str:
        texts = ["" if x is None else f" {x.score.mean:.1f} / {x.paper:.1f}" for x in cells]
        return f"| {label} |{' |'.join(texts)} |"

    methods = ("Flowformer", "Transformer", "Linear Trans.")
    assert row("UEA time series, mean of 6", [average_of(each) for each in methods]) in README
    for label, column in (("ListOps (regenerated data)", "ListOps"), ("Text", "Text")):
        assert row(f"LRA {label}", [measured("lra")[each].cells.get(column) for each in methods]) in README
    rocket = average_of("Rocket")
    assert f"reaches {rocket.score.mean:.1f} on the same six sets (paper: {rocket.paper:.1f})" in README


def test_measured_averages_of_the_archive():
    flow, softmax, linear = map(average_of, ("Flowformer", "Transformer", "Linear Trans."))
    rocket, dtw = map(average_of, ("Rocket", "DTW"))
    line = evidence("UEA: best average of all methods | refuted")
    assert f"Rocket reaches {rocket.score.mean:.1f} and 1-nearest-neighbour DTW {dtw.score.mean:.1f}" in line
    assert f"flow reaches {flow.score.mean:.1f}" in line
    assert f"reports {rocket.paper:.1f} and {dtw.paper:.1f} for Rocket and DTW" in line
    for name, column in (("Rocket", "SpokenArabicDigits"), ("DTW", "Handwriting")):
        each = measured("uea")[name].cells[column]
        assert f"{name} {each.paper} on {column} (ours {each.score.mean:.1f})" in line
    others = [each for name, each in measured("uea")["DTW"].cells.items() if name != "Handwriting"]
    assert f"within {bound(others)} of the paper's" in line
    assert f"reaches {linear.score.mean:.1f} and softmax {softmax.score.mean:.1f}" in line
    assert f"(paper {linear.paper:.1f} and {softmax.paper:.1f})" in line
    assert f"{flow.final.mean:.1f} instead of {flow.score.mean:.1f}" in evidence("UEA: test accuracy")


def five(method: str, which: Literal["final", "best"]) -> list[Score]:
    """The scores of the data sets with three seeds."""
    cells = measured("uea")[method].cells
    return [getattr(each, which) for name, each in cells.items() if name != "SpokenArabicDigits"]


def mean_of_five(method: str, which: Literal["final", "best"]) -> float:
    return fmean(score.mean for score in five(method, which))


def lead_over(rival: str, which: Literal["final", "best"]) -> str:
    """How much flow is better on average, with the standard error over three seeds."""
    scores = [*five("Flowformer", which), *five(rival, which)]
    error = sqrt(sum(score.deviation**2 / 3 for score in scores)) / 5
    return f"{mean_of_five('Flowformer', which) - mean_of_five(rival, which):.1f} ± {error:.1f}"


def test_measured_lead_over_the_transformer():
    flow, softmax = (measured("uea")[method].cells for method in ("Flowformer", "Transformer"))
    leads = {name: flow[name].score.mean - softmax[name].score.mean for name in flow}
    line = evidence("UEA: better than the Transformer")
    assert f"{fmean(leads.values()):.1f} points better over six sets" in line
    assert f"{leads['SpokenArabicDigits'] / 6:.1f} of these" in line
    assert f"{lead_over('Transformer', 'best')} better over the other five" in line
    assert f"By the last epoch {lead_over('Transformer', 'final')} better over these five" in line


def test_measured_recurrent_network():
    line, cells = evidence("UEA: recurrent"), measured("uea")["LSTM"].cells
    for each in cells.values():
        assert f"{each.score.mean:.1f}" in line
        assert f"{each.paper}" in line
    better = sum(each.difference > 0 for each in cells.values())
    assert f"{('no', 'one', 'two', 'three', 'four', 'five', 'six')[better]} of six" in line


def test_measured_attentions_on_japanese_vowels():
    line = evidence("UEA: the other efficient attentions")
    named = {"YOSO-E": "YOSO", "Transformer": "softmax", "Linear Trans.": "linear attention", "Flowformer": "flow"}
    lines = measured("uea") | measured("uea", "", "")  # flow, softmax and linear attention in float32
    attentions = [*named, "Longformer", "cosFormer", "Performer", "Reformer", "SOFT"]
    cells = {named.get(each, each): lines[each].cells["JapaneseVowels"] for each in attentions}
    for name, each in cells.items():
        assert f"{name} {each.score.mean:.1f} ({'paper ' if name == 'Longformer' else ''}{each.paper})" in line
        assert len(each.runs) == 3
    assert f"within {bound(cells.values())} of the paper" in line
    means = [each.score.mean for each in cells.values()]
    assert f"at most {('no', 'one', 'two', 'three')[round((max(means) - min(means)) * 3.7)]} of the 370" in line


def test_measured_learning_rate():
    line = evidence("UEA: absolute accuracy")
    names = {"flow": "Flowformer", "linear attention": "Linear Trans.", "softmax": "Transformer"}
    slow, released = (
        {name: measured("uea", protocol)[label].cells["Handwriting"] for name, label in names.items()}
        for protocol in ("optimiser.lr=0.0001", "")
    )
    for name, each in slow.items():
        verb, paper = ("reaches ", "paper ") if name == "flow" else ("", "")
        assert f"{name} {verb}{each.score.mean:.1f} ({paper}{released[name].paper})" in line
        assert len(each.runs) == 3
    assert all(4 < -each.difference < 5.5 for each in released.values())
    below = [max(each.score.mean - each.final.mean for each in cells.values()) for cells in (slow, released)]
    assert f"within {ceil(10 * below[0]) / 10} of the best instead of up to {below[1]:.1f} below it" in line
    others = [each for name, each in measured("uea")["Flowformer"].cells.items() if name != "Handwriting"]
    assert f"within {bound(others)} on the other sets" in line


def test_measured_clamp():
    slow = "optimiser.lr=0.0001 epochs=30"
    flow = measured("uea", slow)["Flowformer"].cells["Handwriting"].score.mean
    clamped = measured("defaults-uea", slow)["clamp 1"].cells["Handwriting"].score.mean
    line = evidence("Clamp of the released code")
    assert f"for 30 epochs: {clamped:.1f} and {flow:.1f}, one seed each" in line
    assert f"is {sqrt(clamped * (100 - clamped) / 850):.1f}." in line
    default, clamp = (measured("defaults-uea")[name].cells for name in ("default", "clamp 1"))

    def both(column: str, which: str) -> str:
        with_clamp, without = (getattr(cells[column], which) for cells in (clamp, default))
        return f"{with_clamp.mean:.1f}, and {without.mean:.1f} ± {without.deviation:.1f}"

    best, final = (both("Handwriting", which) for which in ("best", "final"))
    assert f"recipe's settings: {best} over three seeds (last epoch {final})" in line
    assert f"JapaneseVowels: {both('JapaneseVowels', 'best')}" in line


def test_measured_removals_on_the_archive():
    line = evidence("Without competition or allocation accuracy falls")
    removals = [f"Flowformer w/o {part}" for part in ("competition", "allocation")]
    best, final = (
        [f"{mean_of_five(label, which):.1f}" for label in ("Flowformer", *removals)] for which in ("best", "final")
    )
    assert "best epoch: {} for flow, {} without competition and {} without allocation".format(*best) in line
    (lead,) = {lead_over(label, "best") for label in removals}
    assert f"differences of {lead}. Last epoch: {final[0]}, {final[1]} and {final[2]}, " in line
    assert f"differences of {' and '.join(lead_over(label, 'final') for label in removals)} (±" in line


def test_measured_arena():
    scores = {name: measured("lra")[name].cells["ListOps"].score.mean for name in measured("lra")}
    flow, softmax, linear = (f"{scores[name]:.1f}" for name in ("Flowformer", "Transformer", "Linear Trans."))
    assert f"| {flow}, softmax {softmax}, linear attention {linear};" in evidence("LRA ListOps: 38.7")
    assert f"| {linear} with the recipe of the other rows" in evidence("LRA ListOps: linear attention fails")
    flow, softmax, linear = (
        measured("lra")[name].cells["Text"].score.mean for name in ("Flowformer", "Transformer", "Linear Trans.")
    )
    assert f"| {flow:.1f} after the last update" in evidence("LRA Text: 64.3")
    line = evidence("LRA Text: level with the Transformer")
    assert f"| {flow:.1f} for flow, {softmax:.1f} for softmax and {linear:.1f} for linear attention" in line
    assert f"difference is {100 * sqrt(2 * 0.65 * 0.35 / 25_000):.2f} |" in line


def test_measured_perplexities():
    flow, softmax, linear = (
        measured("language-stand-ins", "epochs=6")[name].cells["Penn Treebank"].score.mean
        for name in ("Flowformer", "Transformer", "Linear Trans.")
    )
    line = evidence("Language: lower perplexity")
    assert f"{flow:.1f} with flow, {softmax:.1f} with softmax and {linear:.1f} with linear attention" in line
    assert f"{100 * (log(flow) / log(softmax) - 1):.1f} % more bits per word than softmax" in line
    assert f"linear attention {100 * (log(linear) / log(softmax) - 1):.1f} %" in line


def test_measured_bits_of_a_byte():
    names = {"flow": "Flowformer", "linear": "Linear Trans.", "softmax": "Transformer"}
    runs = measured("language-stand-ins", "steps=4000 eval_every=2000")
    bits = {name: log2(runs[label].cells["enwik8"].score.mean) for name, label in names.items()}
    line = evidence("The same for bytes")
    assert f"{bits['flow']:.2f} bits per byte with flow, {bits['softmax']:.2f} with softmax" in line
    assert f"{bits['linear']:.2f} with linear attention" in line
    page = (ROOT / "results/enwik8.md").read_text(encoding="utf-8")
    assert f"| bits per byte | {' | '.join(f'{each:.3f}' for each in bits.values())} |" in page
    ratios = (f"{bits[name] / bits['softmax']:.2f}" for name in ("flow", "linear"))
    assert f"| relative to softmax | {' | '.join(ratios)} | 1 |" in page


def test_measured_returns():
    line, episodes = evidence("D4RL: level with the Decision Transformer"), measured("rl-stand-ins")
    few = measured("rl-stand-ins", "schedule.warmup=500 steps=5000 eval_every=5000")
    for label, name in (("Flowformer", "flow"), ("DT", "softmax"), ("Linear Trans.", "linear attention")):
        cell = few[label].cells["hopper medium"]
        assert f"{cell.score.mean:.1f} and {cell.half_target.mean:.1f} for {name}" in line
    methods = ("BC", "BC, best tenth of the episodes")
    whole, best = (episodes[label].cells["hopper medium"].score.mean for label in methods)
    assert f"reaches {whole:.1f} with all episodes and {best:.1f} with the best tenth" in line
    whole, best = (episodes[label].average.score.mean for label in methods)
    line = evidence("D4RL: behaviour cloning is far behind")
    assert f"reaches {whole:.1f} on average with all episodes and {best:.1f} with the best tenth" in line
    printed = [paper_average("d4rl", name) for name in ("flow", "softmax", "linear", "bc")]
    assert "({}, {}), linear attention far behind ({})".format(*printed) in AUDIT
    assert f"far behind ({printed[-1]})" in line


def test_measured_images():
    lines = measured("cifar10", "schedule.warmup=100 epochs=5")
    names = {"Full Attn.": "softmax", "Flowformer": "flow", "Linear Trans.": "linear attention"}
    scores = {names.get(label, label): line.cells["accuracy"].score.mean for label, line in lines.items()}
    line = evidence("Images: better than the Transformer")
    assert all(f"{score:.1f} with {name}" in line for name, score in scores.items())
    assert f"difference is {100 * sqrt(2 * 0.5 * 0.5 / 10_000):.1f}" in line
    printed = ", ".join(str(paper_score("imagenet/hierarchical", name)) for name in ("flow", "softmax", "cosformer"))
    assert f"cosFormer far behind (ImageNet: {printed})" in line
