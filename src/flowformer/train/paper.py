"""The paper's numbers, for comparison: accuracies in percent, perplexities, normalised returns, sizes, speeds."""

from __future__ import annotations

from typing import Literal

from .recipes import PUBLISHED

Figure = Literal["score", "deviation", "top5", "parameters", "flops"]

# columns of _LRA_SCORES; its rows are named after our attentions
_LRA = ["listops", "text", "retrieval", "image", "pathfinder"]
_LRA_SCORES = {
    "local": (15.82, 52.98, 53.39, 41.46, 66.63),
    "linear": (16.13, 65.90, 53.09, 42.34, 75.30),
    "reformer": (37.27, 56.10, 53.40, 38.07, 68.50),
    "sparse": (17.07, 63.58, 59.59, 44.24, 71.71),
    "sinkhorn": (33.67, 61.20, 53.83, 41.23, 67.45),
    "linformer": (35.70, 53.94, 52.27, 38.56, 76.34),
    # copied from the benchmark, whose Performer has ReLU features; for ListOps see _SCORES
    "performer-relu": (18.01, 65.40, 53.82, 42.77, 77.05),
    "synthesizer": (36.99, 61.68, 54.67, 41.61, 69.45),
    "longformer": (35.63, 62.85, 56.89, 42.22, 69.71),
    "softmax": (36.37, 64.27, 57.46, 42.44, 71.40),
    "bigbird": (36.05, 64.02, 59.29, 40.83, 74.87),
    "cosformer": (37.90, 63.41, 61.36, 43.17, 70.33),
    "flow-without-competition": (36.80, 63.48, 61.66, 42.39, 71.90),
    "flow-without-allocation": (37.00, 63.78, 61.33, 42.52, 73.26),
    "flow-elu+1": (38.65, 64.09, 61.76, 43.75, 71.80),
    "flow-relu": (38.45, 63.90, 62.17, 42.85, 72.96),
    "flow": (38.70, 64.29, 62.24, 43.20, 73.95),
}
OOM = "OOM"
# steps per second of inference, then of training, at 1K to 4K tokens
_LRA_SPEED: dict[str, tuple[float | str, ...]] = {
    "softmax": (81.83, 25.26, OOM, OOM, 22.12, 7.50, OOM, OOM),
    "local": (98.28, 96.51, 94.60, 95.60, 46.75, 43.05, 35.42, 30.34),
    "linear": (97.33, 96.14, 94.03, 93.69, 48.66, 48.78, 41.66, 35.44),
    "reformer": (60.92, 60.30, 39.37, 26.98, 46.07, 22.93, 14.34, 9.56),
    "sparse": (78.30, 23.33, OOM, OOM, 21.74, 7.30, OOM, OOM),
    "sinkhorn": (91.42, 92.21, 92.72, 80.67, 45.93, 36.21, 28.11, 23.83),
    "linformer": (96.56, 96.84, 94.74, 93.59, 45.57, 44.11, 37.28, 31.58),
    "performer": (99.60, 96.80, 96.52, 96.42, 47.34, 48.30, 41.00, 36.14),
    "synthesizer": (65.44, OOM, OOM, OOM, 5.16, OOM, OOM, OOM),
    "longformer": (73.56, OOM, OOM, OOM, 13.09, OOM, OOM, OOM),
    "bigbird": (82.50, 54.12, 37.83, 29.34, 27.34, 16.95, 12.00, 9.33),
    "cosformer": (96.46, 95.58, 95.19, 94.69, 46.50, 45.24, 39.49, 35.09),
    "flow": (98.83, 96.21, 95.65, 95.82, 49.76, 47.18, 41.93, 36.79),
}
_WIKITEXT = {
    "softmax": 33.0,
    "linear": 38.4,
    "reformer": 33.6,
    "performer": 37.5,
    "rfa": 33.6,
    "rfa-gate": 31.3,
    "cosformer": 34.1,
    "flow-without-competition": 31.2,
    "flow-without-allocation": 32.2,
    "flow": 30.8,
}
# top-1, top-5, millions of parameters, billions of multiply-adds
_IMAGENET: dict[str, tuple[float | None, ...]] = {
    "softmax": (78.7, 94.3, 41, 6.7),
    "linear": (79.0, 94.1, 41, 6.3),
    "reformer": (79.6, 94.7, 37, 6.0),
    "longformer": (77.6, 93.1, 38, 6.3),
    "performer": (78.1, 93.2, 41, 6.3),
    "nystromformer": (77.2, 93.0, 41, 6.3),
    "yoso": (79.0, 94.3, 41, 5.8),
    "soft": (79.2, 94.5, 37, 5.8),
    "cosformer": (68.3, 88.0, 41, 6.3),
    "flow": (80.6, 94.9, 41, 6.3),
}
_DEIT: dict[str, tuple[float | None, ...]] = {"softmax": (79.8, 95.0, 22, 4.6), "flow": (80.0, 94.8, 22, 4.2)}
_VIT: dict[str, tuple[float | None, ...]] = {"vit-b": (77.9, None, 86, 55.4), "vit-l": (76.5, None, 307, 190.7)}
# the first five are methods without attention, see `methods`
_UEA_COLUMNS = ["dtw", "xgboost", "rocket", "lstm", "tcn", "softmax", "linear", "reformer", "longformer", "performer"]
_UEA_COLUMNS += ["yoso", "soft", "cosformer", "flow"]
_UEA = {
    "EthanolConcentration": (32.3, 43.7, 45.2, 32.3, 28.9, 32.7, 31.9, 31.9, 32.3, 31.2, 31.2, 32.3, 33.5, 33.8),
    "FaceDetection": (52.9, 63.3, 64.7, 57.7, 52.8, 67.3, 67.0, 68.6, 62.6, 67.0, 67.3, 64.8, 67.1, 67.6),
    "Handwriting": (28.6, 15.8, 58.8, 15.2, 53.3, 32.0, 34.7, 27.4, 39.6, 32.1, 30.9, 28.9, 34.7, 33.8),
    "Heartbeat": (71.7, 73.2, 75.6, 72.2, 75.6, 76.1, 76.6, 77.1, 78.0, 75.6, 76.5, 77.1, 75.6, 77.6),
    "JapaneseVowels": (94.9, 86.5, 96.2, 79.7, 98.9, 98.7, 99.2, 97.8, 98.9, 98.1, 98.6, 98.3, 99.2, 98.9),
    "PEMS-SF": (71.1, 98.3, 75.1, 39.9, 68.8, 82.1, 82.1, 82.7, 83.8, 80.9, 85.2, 83.2, 80.9, 83.8),
    "SelfRegulationSCP1": (77.7, 84.6, 90.8, 68.9, 84.6, 92.2, 92.5, 90.4, 90.1, 91.5, 91.1, 91.1, 91.8, 92.5),
    "SelfRegulationSCP2": (53.9, 48.9, 53.3, 46.6, 55.6, 53.9, 56.7, 56.7, 55.6, 56.7, 53.9, 55.0, 55.6, 56.1),
    "SpokenArabicDigits": (96.3, 69.6, 71.2, 31.9, 95.6, 98.4, 98.0, 97.0, 94.4, 98.4, 98.9, 98.4, 98.8, 98.8),
    "UWaveGestureLibrary": (90.3, 75.9, 94.4, 41.2, 88.4, 85.6, 85.0, 85.6, 87.5, 85.3, 88.4, 85.6, 85.0, 86.6),
}
# normalised returns; those of attentions with their deviation over seeds
_D4RL = """
                               bc   awac     softmax      linear    reformer   performer   cosformer        flow
halfcheetah-medium-expert    55.2   42.8    83.8±3.3    78.2±3.2    81.5±1.6    85.1±2.1    85.5±2.9    90.8±0.4
hopper-medium-expert         52.5   55.8   104.0±2.5   107.2±0.9   104.2±9.8   93.5±13.9    98.1±7.4   109.9±1.0
walker2d-medium-expert      107.5   74.5   107.7±0.6   67.2±27.3    71.4±1.8    72.6±2.4  100.5±14.5   108.0±0.4
halfcheetah-medium           42.6   43.5    42.4±0.1    42.3±0.2    42.2±0.1    42.1±0.2    42.1±0.3    42.2±0.2
hopper-medium                52.9   57.0    64.2±1.1    58.7±0.4    59.9±0.7    59.7±7.5    59.8±3.8    66.9±2.5
walker2d-medium              75.3   72.4    70.6±3.2   57.9±10.6    65.8±4.9   63.3±10.7    71.4±1.2    71.7±2.5
halfcheetah-medium-replay    36.6   40.5    34.6±0.6    32.1±1.5    33.6±0.7    31.7±0.9    32.8±3.6    34.7±1.5
hopper-medium-replay         18.1   37.2    79.7±7.4    74.3±7.0    66.1±2.6   64.6±24.2   59.3±16.5   75.5±14.5
walker2d-medium-replay       26.0   27.0    62.9±5.0    62.1±7.4    50.1±3.5    61.3±6.7    60.5±9.9    62.0±3.1
"""


def _d4rl() -> dict[str, dict[str, tuple[float, float | None]]]:
    """Parse the table above into score and deviation by data set and method."""
    header, *rows = (line.split() for line in _D4RL.strip().splitlines())
    cells = {name: [cell.partition("±") for cell in row] for name, *row in rows}
    return {
        f"d4rl/{name}": {
            method: (float(score), float(deviation) if deviation else None)
            for method, (score, _, deviation) in zip(header, row, strict=True)
        }
        for name, row in cells.items()
    }


_SCORES: dict[str, dict[str, float]] = {
    **{f"lra/{task}": {name: row[i] for name, row in _LRA_SCORES.items()} for i, task in enumerate(_LRA)},
    "wikitext103": _WIKITEXT,
    **{f"uea/{name}": dict(zip(_UEA_COLUMNS, row, strict=True)) for name, row in _UEA.items()},
    **{name: {method: score for method, (score, _) in row.items()} for name, row in _d4rl().items()},
}
# there the benchmark's Performer has FAVOR+ with two features
_SCORES["lra/listops"]["performer"] = _SCORES["lra/listops"].pop("performer-relu")
_DEVIATIONS = {
    name: {method: deviation for method, (_, deviation) in row.items() if deviation is not None}
    for name, row in _d4rl().items()
}
_SIZED = {
    "imagenet/hierarchical": _IMAGENET,
    "imagenet/deit-s": _DEIT,
    **{f"imagenet/{name}": {"softmax": row} for name, row in _VIT.items()},
}
_SIZED_FIGURES: tuple[Figure, ...] = ("score", "top5", "parameters", "flops")

# as printed; for Sinkhorn, and in UEA for Longformer and Performer, that is not the mean of the row
_AVERAGES: dict[str, dict[str, float]] = {
    "lra": {
        "local": 46.06,
        "linear": 50.55,
        "reformer": 50.67,
        "sparse": 51.24,
        "sinkhorn": 51.29,
        "linformer": 51.36,
        "performer-relu": 51.41,
        "synthesizer": 52.88,
        "longformer": 53.46,
        "softmax": 54.39,
        "bigbird": 55.01,
        "cosformer": 55.23,
        "flow-without-competition": 55.25,
        "flow-without-allocation": 55.58,
        "flow-elu+1": 56.01,
        "flow-relu": 56.07,
        "flow-sigmoid-sigmoid": 52.36,
        "flow-sigmoid-softmax": 53.11,
        "flow-softmax-softmax": 55.41,
        "flow": 56.48,
    },
    "uea": dict(
        zip(
            _UEA_COLUMNS,
            (67.0, 66.0, 72.5, 48.6, 70.3, 71.9, 72.4, 71.5, 72.0, 71.9, 72.2, 71.5, 72.2, 73.0),
            strict=True,
        )
    ),
    "d4rl": {
        "bc": 51.9,
        "awac": 50.1,
        "softmax": 72.2,
        "linear": 64.4,
        "reformer": 63.9,
        "performer": 63.8,
        "cosformer": 67.8,
        "flow": 73.5,
    },
}
# as printed; for cosFormer, that is not the mean of the column
_AVERAGE_DEVIATIONS = {
    "d4rl": {"softmax": 2.6, "linear": 6.5, "reformer": 2.9, "performer": 7.6, "cosformer": 7.6, "flow": 2.9},
}


def paper_figure(recipe: str, attention: str, figure: Figure = "score") -> float | None:
    """A number that the paper prints for a recipe and an attention or method; None if it has no such number.

    In the Long-Range Arena, the authors copied the scores of the rivals from that benchmark, whose models have other
    sizes.

    Args:
        figure: the score; its deviation over seeds; top-5 accuracy in percent; millions of parameters; billions of
            multiply-adds, called FLOPs.

    >>> [paper_figure("imagenet/hierarchical", "flow", figure) for figure in ("top5", "parameters", "flops")]
    [94.9, 41, 6.3]
    """
    plain = recipe.removesuffix(PUBLISHED)
    if plain in _SIZED:
        row = dict(zip(_SIZED_FIGURES, _SIZED[plain].get(attention, ()), strict=False))
        return row.get(figure)
    known = {"score": _SCORES, "deviation": _DEVIATIONS}.get(figure, {})
    return known.get(plain, {}).get(attention)


def paper_score(recipe: str, attention: str) -> float | None:
    """The paper's score for a recipe and an attention or method; None if it has no such score.

    >>> paper_score("uea/JapaneseVowels", "flow"), paper_score("cifar10", "flow")
    (98.9, None)
    """
    return paper_figure(recipe, attention)


def paper_average(family: str, attention: str, figure: Literal["score", "deviation"] = "score") -> float | None:
    """The average that the paper prints, or its deviation over seeds, over all columns of "lra", "uea" or "d4rl".

    >>> paper_average("lra", "flow-sigmoid-softmax"), paper_average("d4rl", "flow", "deviation")
    (53.11, 2.9)
    """
    known = _AVERAGES if figure == "score" else _AVERAGE_DEVIATIONS
    return known.get(family, {}).get(attention)


def paper_speed(attention: str, mode: str, length: int) -> float | str | None:
    """Steps per second in the paper's efficiency table, "OOM" as printed there, or None if it has no such entry.

    They were measured on two RTX 2080 Ti; task, batch and model are not stated, so only ratios can be compared.

    Args:
        mode: "inference" or "training".
        length: number of tokens, 1 to 4 times 1000 or 1024.

    >>> [paper_speed(name, "training", 4096) for name in ("flow", "softmax", "rfa")]
    [36.79, 'OOM', None]
    """
    thousands = next((k for k in range(1, 5) if length in (1000 * k, 1024 * k)), None)
    if attention not in _LRA_SPEED or thousands is None:
        return None
    return _LRA_SPEED[attention][("inference", "training").index(mode) * 4 + thousands - 1]


def paper_speed_ratio(attention: str, mode: str, length: int) -> float | None:
    """The speed of an attention divided by that of the Transformer, both in the paper; None if either has no speed.

    >>> round(paper_speed_ratio("flow", "training", 2048), 2), paper_speed_ratio("flow", "training", 3072)
    (6.29, None)
    """
    speed, softmax = (paper_speed(name, mode, length) for name in (attention, "softmax"))
    return speed / softmax if isinstance(speed, float) and isinstance(softmax, float) else None


def percent(metric: str, value: float) -> str:
    """Format a score as the paper does, accuracies in percent.

    >>> percent("accuracy", 0.9891), percent("perplexity", 30.81)
    ('98.91', '30.81')
    """
    return f"{100 * value if metric in ('accuracy', 'top5') else value:.2f}"
