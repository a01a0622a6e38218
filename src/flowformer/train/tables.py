"""The tables of the paper as data: the recipe and the method of each cell, in the paper's layout.

To add a row, add a `Method`; to add a column, a `Column`. `reproduce` runs the cells, `summary` fills the tables in,
`report` writes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from .._utils import check_choice
from . import recipes
from .config import TrainConfig
from .methods.config import METHODS, MethodConfig, configure
from .overrides import ATTENTION_OPTIONS, override
from .paper import Figure, paper_average, paper_figure

DATA_OPTIONS = "data_options."
Evaluation = Literal["final", "best"]


@dataclass(frozen=True)
class Method:
    """A row: an attention, or a method without attention.

    Args:
        label: label in the paper.
        name: name of the attention, or of the method.
        overrides: overrides of the recipe; the paper has no number for a method with overrides.
        seeds: number of seeds of a cell; None for the number that the table has.
        published: whether the recipes follow the released code ("@published") instead of the paper.
        minutes: approximate duration of a run; None for that of the column.
    """

    label: str
    name: str
    overrides: tuple[str, ...] = ()
    seeds: int | None = None
    published: bool = False
    minutes: float | None = None


@dataclass(frozen=True)
class Column:
    """A data set.

    Args:
        label: label in the paper.
        recipe: name of the recipe.
        minutes: approximate duration of a run on an H200 that eight runs share.
        overrides: overrides of the recipe.
        stands_in: whether it replaces data that are not available; it is not compared with the paper.
    """

    label: str
    recipe: str
    minutes: float
    overrides: tuple[str, ...] = ()
    stands_in: bool = False


@dataclass(frozen=True)
class Table:
    """A table of the paper.

    Args:
        name: name of the table.
        title: title with the unit of the scores.
        columns, methods: the data sets and the methods.
        seeds: number of seeds of a cell.
        compared: which of our evaluations corresponds to the paper's score, the final or the best.
        family: key of the averages that the paper prints, see `paper_average`; None for a table without averages.
        figures: further numbers that the table shows.
        methods_across: whether methods are columns in the paper, and data sets rows.
        remark: a sentence on the paper's numbers.
    """

    name: str
    title: str
    columns: tuple[Column, ...]
    methods: tuple[Method, ...]
    seeds: int
    compared: Evaluation = "final"
    family: str | None = None
    figures: tuple[Figure, ...] = ()
    methods_across: bool = False
    remark: str = ""

    def cells(self) -> Iterator[Cell]:
        for method in self.methods:
            for column in self.columns:
                yield Cell(self, method, column)

    @property
    def averaged(self) -> tuple[Column, ...]:
        """The columns of the averages. Stand-ins are averaged only in a table of nothing else."""
        return tuple(column for column in self.columns if not column.stands_in) or self.columns

    def paper_average(self, method: Method, columns: Sequence[Column]) -> float | None:
        """The paper's average over some columns: as printed if these are all columns, else computed from its scores."""
        if method.overrides or any(column.stands_in for column in columns):
            return None
        if len(columns) == len(self.averaged) and self.family:
            return paper_average(self.family, method.name)
        scores = [paper_figure(column.recipe, method.name) for column in columns]
        known = [score for score in scores if score is not None]
        return sum(known) / len(known) if known and len(known) == len(scores) else None


@dataclass(frozen=True)
class Cell:
    """A method on a data set."""

    table: Table
    method: Method
    column: Column

    @property
    def recipe(self) -> str:
        return f"{self.column.recipe}{recipes.PUBLISHED if self.method.published else ''}"

    @property
    def name(self) -> str:
        return " ".join((f"{self.recipe}/{self.method.name}", *self.overrides))

    @property
    def overrides(self) -> tuple[str, ...]:
        return self.column.overrides + self.method.overrides

    @property
    def is_attention(self) -> bool:
        return not any(self.method.name in names for names in METHODS.values())

    @property
    def seeds(self) -> int:
        return self.method.seeds or self.table.seeds

    @property
    def minutes(self) -> float:
        return self.column.minutes if self.method.minutes is None else self.method.minutes

    def config(self, seed: int, overrides: Sequence[str] = ()) -> TrainConfig | MethodConfig:
        """The config of a run of the cell.

        Args:
            overrides: further overrides; a method without attention takes only those of the data.
        """
        chosen = self.assignments(overrides)
        if not self.is_attention:
            # raises for a key that the recipe does not have; options of an attention are checked with its cells
            override(recipes.get(self.recipe), [each for each in overrides if ATTENTION_OPTIONS not in each])
            return configure(self.recipe, self.method.name, chosen, seed=seed)
        attention = f"attention={self.method.name}"
        return override(recipes.get(self.recipe), [attention, f"seed={seed}", *chosen])

    def assignments(self, overrides: Sequence[str]) -> list[str]:
        """The overrides of the cell, and those of `overrides` that apply to it."""
        return [*self.overrides, *(each for each in overrides if self.is_attention or each.startswith(DATA_OPTIONS))]

    def paper(self, figure: Figure = "score") -> float | None:
        if self.column.stands_in or self.method.overrides:
            return None
        return paper_figure(self.recipe, self.method.name, figure)


# methods that run first, in this order
PRIORITY = ("flow", "softmax", "linear", "flow-without-competition", "flow-without-allocation")
_REMOVALS = (
    Method("Flowformer w/o competition", "flow-without-competition"),
    Method("Flowformer w/o allocation", "flow-without-allocation"),
)
_FLOW = Method("Flowformer", "flow")

UEA = Table(
    "uea",
    "UEA time series, accuracy in %",
    (
        Column("EthanolConcentration", "uea/EthanolConcentration", 2),
        Column("FaceDetection", "uea/FaceDetection", 5),
        Column("Handwriting", "uea/Handwriting", 0.6),
        Column("Heartbeat", "uea/Heartbeat", 1),
        Column("JapaneseVowels", "uea/JapaneseVowels", 0.6),
        Column("PEMS-SF", "uea/PEMS-SF", 0.8),
        Column("SelfRegulationSCP1", "uea/SelfRegulationSCP1", 1),
        Column("SelfRegulationSCP2", "uea/SelfRegulationSCP2", 1),
        Column("SpokenArabicDigits", "uea/SpokenArabicDigits", 3.7),
        Column("UWaveGestureLibrary", "uea/UWaveGestureLibrary", 0.6),
    ),
    (
        Method("DTW", "dtw", seeds=1),
        Method("XGBoost", "xgboost"),
        Method("Rocket", "rocket"),
        Method("LSTM", "lstm"),
        Method("Unsuper. (TCN)", "tcn"),
        Method("Transformer", "softmax"),
        Method("Linear Trans.", "linear"),
        Method("Reformer", "reformer"),
        Method("Longformer", "longformer"),
        Method("Performer", "performer"),
        Method("YOSO-E", "yoso"),
        Method("SOFT", "soft"),
        Method("cosFormer", "cosformer"),
        _FLOW,
        *_REMOVALS,
    ),
    seeds=5,
    compared="best",
    family="uea",
    methods_across=True,
)

_LRA_COLUMNS = (
    Column("ListOps", "lra/listops", 3.5),
    Column("Text", "lra/text", 5),
    Column("Retrieval", "lra/retrieval", 5),
    Column("Image", "lra/image", 6),
    Column("Pathfinder", "lra/pathfinder", 15),
)
LRA = Table(
    "lra",
    "Long-Range Arena, accuracy in %",
    (*_LRA_COLUMNS, Column("Retrieval on ACL papers", "acl", 5, stands_in=True)),
    (
        Method("Local Attention", "local", seeds=1),
        Method("Linear Trans.", "linear"),
        Method("Reformer", "reformer", seeds=1),
        Method("Sparse Trans.", "sparse", seeds=1),
        Method("Sinkhorn Trans.", "sinkhorn", seeds=1),
        Method("Linformer", "linformer", seeds=1),
        Method("Performer", "performer-relu", seeds=1),
        Method("Performer (FAVOR+)", "performer", seeds=1),
        Method("Synthesizer", "synthesizer", seeds=1),
        Method("Longformer", "longformer", seeds=1),
        Method("Transformer", "softmax"),
        Method("BigBird", "bigbird", seeds=1),
        Method("cosFormer", "cosformer", seeds=1),
        *_REMOVALS,
        _FLOW,
        Method("Flowformer, as released", "flow", seeds=1, published=True),
    ),
    seeds=3,
    family="lra",
    remark="The paper's scores of rivals, except cosFormer, are the benchmark's, of models as with preset=benchmark.",
)

_LANGUAGE_METHODS = (
    Method("Transformer", "softmax"),
    Method("Linear Trans.", "linear"),
    Method("Reformer", "reformer"),
    Method("Performer", "performer"),
    Method("TRF-Transformer", "rfa"),
    Method("TRF-Transformer-GATE", "rfa-gate"),
    Method("cosFormer", "cosformer"),
    *_REMOVALS,
    _FLOW,
)
WIKITEXT = Table(
    "wikitext103",
    "WikiText-103, perplexity",
    (Column("perplexity", "wikitext103", 600),),
    _LANGUAGE_METHODS,
    seeds=1,
    compared="best",
)
LANGUAGE_STAND_INS = Table(
    "language-stand-ins",
    "Other texts, perplexity: of a byte, of a word",
    (Column("enwik8", "enwik8", 60, stands_in=True), Column("Penn Treebank", "ptb", 5, stands_in=True)),
    _LANGUAGE_METHODS,
    seeds=1,
)

_VISION_METHODS = (
    Method("Full Attn.", "softmax"),
    Method("Linear Trans.", "linear"),
    Method("Reformer", "reformer"),
    Method("Longformer", "longformer"),
    Method("Performer", "performer"),
    Method("Nystromformer", "nystromformer"),
    Method("YOSO-E", "yoso"),
    Method("SOFT", "soft"),
    Method("cosFormer", "cosformer"),
    _FLOW,
)
_imagenet = partial(Table, seeds=1, compared="best", figures=("top5", "parameters", "flops"))
IMAGENET = _imagenet(
    "imagenet",
    "ImageNet-1K, top-1 accuracy in %",
    (Column("top-1", "imagenet/hierarchical", 20_000),),
    _VISION_METHODS,
)
DEIT = _imagenet(
    "imagenet-deit",
    "ImageNet-1K with DeiT-S, top-1 accuracy in %",
    (Column("top-1", "imagenet/deit-s", 10_000),),
    (Method("DeiT-S", "softmax"), Method("DeiT+Flowformer", "flow")),
)
VIT = _imagenet(
    "imagenet-vit",
    "ImageNet-1K with ViT, top-1 accuracy in %",
    (Column("ViT-B", "imagenet/vit-b", 20_000), Column("ViT-L", "imagenet/vit-l", 60_000)),
    (Method("ViT", "softmax"),),
    figures=("parameters", "flops"),
)
CIFAR10 = Table(
    "cifar10",
    "CIFAR-10 with a small four-stage model, accuracy in %",
    (Column("accuracy", "cifar10", 30, stands_in=True),),
    _VISION_METHODS,
    seeds=1,
    figures=("parameters", "flops"),
)

_RL_METHODS = (
    Method("BC", "bc", minutes=4),
    Method("AWAC", "awac"),
    Method("DT", "softmax"),
    Method("Linear Trans.", "linear"),
    Method("Reformer", "reformer"),
    Method("Performer", "performer"),
    Method("cosFormer", "cosformer"),
    _FLOW,
)


def _games(versions: dict[str, str | None]) -> tuple[Column, ...]:
    """The nine data sets.

    Args:
        versions: by environment, the version of data that we generated ourselves; None for the data of D4RL.
    """
    return tuple(
        Column(
            f"{environment} {quality}",
            f"d4rl/{environment}-{quality}",
            30,
            () if version is None else (f"{DATA_OPTIONS}version={version}",),
            stands_in=version is not None,
        )
        for quality in ("medium-expert", "medium", "medium-replay")
        for environment, version in versions.items()
    )


D4RL = Table(
    "d4rl",
    "D4RL, normalised return",
    _games({"halfcheetah": None, "hopper": None, "walker2d": None}),
    _RL_METHODS,
    seeds=3,
    family="d4rl",
    figures=("deviation",),
    methods_across=True,
)
RL_STAND_INS = Table(
    "rl-stand-ins",
    "Data of our own agents, normalised return",
    _games({"halfcheetah": "v4rl", "hopper": "v5sac", "walker2d": "v4rl"}),
    (_RL_METHODS[0], Method("BC, best tenth of the episodes", "bc", ("best=0.1",), minutes=4), *_RL_METHODS[1:]),
    seeds=3,
    family="d4rl",
    methods_across=True,
)

FEATURES = Table(
    "features",
    "Ablation of φ: Long-Range Arena, accuracy in %",
    _LRA_COLUMNS,
    (Method("elu(x) + 1", "flow-elu+1"), Method("ReLU", "flow-relu"), Method("sigmoid", "flow")),
    seeds=1,
    family="lra",
)
ACTIVATIONS = Table(
    "activations",
    "Ablation of competition and allocation: Long-Range Arena, accuracy in %",
    _LRA_COLUMNS,
    (
        Method("sigmoid, sigmoid", "flow-sigmoid-sigmoid"),
        Method("sigmoid, softmax", "flow-sigmoid-softmax"),
        Method("softmax, softmax", "flow-softmax-softmax"),
        Method("softmax, sigmoid", "flow"),
    ),
    seeds=1,
    family="lra",
)
REMOVALS = Table(
    "removals",
    "Without competition, without allocation: WikiText-103, perplexity",
    WIKITEXT.columns,
    (_FLOW, *_REMOVALS),
    seeds=1,
    compared="best",
)

_CANDIDATES = (
    Method("default", "flow"),
    Method("clamp 1", "flow", ("model.variant.clamp=1.0",)),
    Method("ε 1e-3", "flow", ("model.variant.eps=0.001",)),
    Method("scale 1/√D", "flow", ("model.attention_options.scale=0.125",)),
)


def _defaults(table: Table, *labels: str) -> Table:
    """Other defaults of Flow-Attention than ours, on some columns of a table; the models have D = 64."""
    return replace(
        table,
        name=f"defaults-{table.name}",
        title=f"Defaults of Flow-Attention: {table.title}",
        columns=tuple(column for column in table.columns if column.label in labels),
        methods=_CANDIDATES,
        family=None,
    )


DEFAULTS = (
    _defaults(LRA, "Text"),
    _defaults(UEA, "JapaneseVowels", "Handwriting"),
    _defaults(LANGUAGE_STAND_INS, "enwik8"),
)

# runs whose competition and allocation, or weights of the sources, are drawn; the paper's figures show
# SpokenArabicDigits and ImageNet-1K
FIGURES = Table(
    "figures",
    "Runs whose maps are drawn, accuracy in %",
    (
        Column("JapaneseVowels", "uea/JapaneseVowels", 0.6),
        Column("SelfRegulationSCP1", "uea/SelfRegulationSCP1", 1),
        Column("SpokenArabicDigits", "uea/SpokenArabicDigits", 3.7),
        Column("ImageNet-1K", "imagenet/hierarchical", 20_000),
        Column("CIFAR-10", "cifar10", 30, stands_in=True),
    ),
    (_FLOW, Method("Transformer", "softmax"), Method("Linear Trans.", "linear"), Method("cosFormer", "cosformer")),
    seeds=1,
    compared="best",
)

# names that `flowformer reproduce` accepts; "speed" is a benchmark without runs
TABLES: dict[str, tuple[Table, ...]] = {
    "uea": (UEA,),
    "lra": (LRA,),
    "language": (WIKITEXT, LANGUAGE_STAND_INS),
    "vision": (IMAGENET, DEIT, VIT, CIFAR10),
    "rl": (D4RL, RL_STAND_INS),
    "ablations": (FEATURES, ACTIVATIONS, REMOVALS, *DEFAULTS),
    "speed": (),
    "figures": (FIGURES,),
}
ALL = "all"


def select(name: str) -> list[Table]:
    """The tables of a name of `TABLES`, or all tables for "all".

    >>> [table.name for table in select("vision")]
    ['imagenet', 'imagenet-deit', 'imagenet-vit', 'cifar10']
    """
    accepted = [*TABLES, ALL]
    check_choice("table", name, accepted)
    return [table for key, tables in TABLES.items() if name in (key, ALL) for table in tables]
