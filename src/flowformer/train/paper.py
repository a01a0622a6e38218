"""The paper's numbers, to stand beside ours: accuracies in percent, perplexity, normalised returns."""

from __future__ import annotations

from .recipes import PUBLISHED

# the names of attentions here, in the order of the columns below
_LRA = ["listops", "text", "retrieval", "image", "pathfinder"]
_LRA_SCORES = {
    "local": (15.82, 52.98, 53.39, 41.46, 66.63),
    "linear": (16.13, 65.90, 53.09, 42.34, 75.30),
    "reformer": (37.27, 56.10, 53.40, 38.07, 68.50),
    "sparse": (17.07, 63.58, 59.59, 44.24, 71.71),
    "sinkhorn": (33.67, 61.20, 53.83, 41.23, 67.45),
    "linformer": (35.70, 53.94, 52.27, 38.56, 76.34),
    "performer": (18.01, 65.40, 53.82, 42.77, 77.05),
    "synthesizer": (36.99, 61.68, 54.67, 41.61, 69.45),
    "longformer": (35.63, 62.85, 56.89, 42.22, 69.71),
    "softmax": (36.37, 64.27, 57.46, 42.44, 71.40),
    "bigbird": (36.05, 64.02, 59.29, 40.83, 74.87),
    "cosformer": (37.90, 63.41, 61.36, 43.17, 70.33),
    "flow": (38.70, 64.29, 62.24, 43.20, 73.95),
}
_WIKITEXT = {
    "softmax": 33.0,
    "linear": 38.4,
    "reformer": 33.6,
    "performer": 37.5,
    "rfa": 33.6,
    "cosformer": 34.1,
    "flow": 30.8,
}
_IMAGENET = {
    "softmax": 78.7,
    "linear": 79.0,
    "reformer": 79.6,
    "longformer": 77.6,
    "performer": 78.1,
    "nystromformer": 77.2,
    "yoso": 79.0,
    "soft": 79.2,
    "cosformer": 68.3,
    "flow": 80.6,
}
_DEIT = {"softmax": 79.8, "flow": 80.0}
_UEA_ATTENTIONS = ["softmax", "linear", "reformer", "longformer", "performer", "yoso", "soft", "cosformer", "flow"]
_UEA = {
    "EthanolConcentration": (32.7, 31.9, 31.9, 32.3, 31.2, 31.2, 32.3, 33.5, 33.8),
    "FaceDetection": (67.3, 67.0, 68.6, 62.6, 67.0, 67.3, 64.8, 67.1, 67.6),
    "Handwriting": (32.0, 34.7, 27.4, 39.6, 32.1, 30.9, 28.9, 34.7, 33.8),
    "Heartbeat": (76.1, 76.6, 77.1, 78.0, 75.6, 76.5, 77.1, 75.6, 77.6),
    "JapaneseVowels": (98.7, 99.2, 97.8, 98.9, 98.1, 98.6, 98.3, 99.2, 98.9),
    "PEMS-SF": (82.1, 82.1, 82.7, 83.8, 80.9, 85.2, 83.2, 80.9, 83.8),
    "SelfRegulationSCP1": (92.2, 92.5, 90.4, 90.1, 91.5, 91.1, 91.1, 91.8, 92.5),
    "SelfRegulationSCP2": (53.9, 56.7, 56.7, 55.6, 56.7, 53.9, 55.0, 55.6, 56.1),
    "SpokenArabicDigits": (98.4, 98.0, 97.0, 94.4, 98.4, 98.9, 98.4, 98.8, 98.8),
    "UWaveGestureLibrary": (85.6, 85.0, 85.6, 87.5, 85.3, 88.4, 85.6, 85.0, 86.6),
}
_D4RL_ATTENTIONS = ["softmax", "linear", "reformer", "performer", "cosformer", "flow"]
_D4RL = {
    "halfcheetah-medium-expert": (83.8, 78.2, 81.5, 85.1, 85.5, 90.8),
    "hopper-medium-expert": (104.0, 107.2, 104.2, 93.5, 98.1, 109.9),
    "walker2d-medium-expert": (107.7, 67.2, 71.4, 72.6, 100.5, 108.0),
    "halfcheetah-medium": (42.4, 42.3, 42.2, 42.1, 42.1, 42.2),
    "hopper-medium": (64.2, 58.7, 59.9, 59.7, 59.8, 66.9),
    "walker2d-medium": (70.6, 57.9, 65.8, 63.3, 71.4, 71.7),
    "halfcheetah-medium-replay": (34.6, 32.1, 33.6, 31.7, 32.8, 34.7),
    "hopper-medium-replay": (79.7, 74.3, 66.1, 64.6, 59.3, 75.5),
    "walker2d-medium-replay": (62.9, 62.1, 50.1, 61.3, 60.5, 62.0),
}

_SCORES: dict[str, dict[str, float]] = {
    **{f"lra/{task}": {name: row[i] for name, row in _LRA_SCORES.items()} for i, task in enumerate(_LRA)},
    "wikitext103": _WIKITEXT,
    "imagenet/hierarchical": _IMAGENET,
    "imagenet/deit-s": _DEIT,
    **{f"uea/{name}": dict(zip(_UEA_ATTENTIONS, row, strict=True)) for name, row in _UEA.items()},
    **{f"d4rl/{name}": dict(zip(_D4RL_ATTENTIONS, row, strict=True)) for name, row in _D4RL.items()},
}


def paper_score(recipe: str, attention: str) -> float | None:
    """What the paper prints for a recipe and an attention; None where it prints nothing.

    Its Long-Range Arena rivals are not trained by the authors but copied from that benchmark, with other sizes.

    >>> paper_score("uea/JapaneseVowels", "flow"), paper_score("cifar10", "flow")
    (98.9, None)
    """
    return _SCORES.get(recipe.removesuffix(PUBLISHED), {}).get(attention)


def percent(metric: str, value: float) -> str:
    """A score as the paper writes it.

    >>> percent("accuracy", 0.9891), percent("perplexity", 30.81)
    ('98.91', '30.81')
    """
    return f"{100 * value if metric in ('accuracy', 'top5') else value:.2f}"
