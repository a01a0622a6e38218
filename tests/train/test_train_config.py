"""Configs, overrides, schedules and recipes."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from dataclasses import replace

import pytest
import torch

from flowformer import FlowVariant
from flowformer.train import config as configs
from flowformer.train import recipes, tasks
from flowformer.train.config import Schedule, TrainConfig
from flowformer.train.overrides import BY_DATA, keys, override

TEXT = recipes.get("lra/text")


class TestOverride:
    def test_full_and_short_names(self):
        config = override(TEXT, ["optimiser.lr=0.5", "clip=1", "attention=softmax", "seed=3"])
        assert (config.optimiser.lr, config.optimiser.clip, config.model.attention, config.seed) == (
            0.5,
            1.0,
            "softmax",
            3,
        )

    def test_leaves_the_original_alone(self):
        override(TEXT, ["steps=1", "data_options.max_length=7"])
        assert TEXT.steps == 20_000
        assert TEXT.data_options == {"max_length": 4000, "partial": False}

    @pytest.mark.parametrize(
        ("assignment", "path", "value"),
        [
            ("steps=none", "steps", None),
            ("compile=true", "compile", True),
            ("betas=0.8,0.9", "optimiser.betas", (0.8, 0.9)),
            ("precision=bf16", "precision", "bf16"),
            ("variant=core", "model.variant", FlowVariant.named("core")),
            ("variant.clamp=2", "model.variant.clamp", 2.0),
            ("data_options.max_length=10", "data_options.max_length", 10),
        ],
    )
    def test_values_have_the_type_of_the_field(self, assignment, path, value):
        config = override(replace(TEXT, epochs=1), [assignment.replace("variant.clamp", "model.variant.clamp")])
        assert keys(config)[path] == value

    @pytest.mark.parametrize(
        ("assignment", "message"),
        [
            ("stesp=10", "did you mean 'steps'"),
            ("optimiser.leraning=1", "lra/text has no key 'optimiser.leraning'"),
            ("atention=flow", "did you mean 'attention'"),
            ("steps", "accepted: key=value"),
            ("steps=ten", "steps must be a whole number, got 'ten'"),
            ("compile=yes", "compile must be true or false"),
            ("precision=bf61", "did you mean 'bf16'"),
            ("parallel=fdsp", "did you mean 'fsdp'"),
            (
                "parallel=context",
                "task 'tokens' with flow attention cannot be cut over ranks; accepted: language models",
            ),
            ("context_parallel_size=2", "Pass parallel=ddp or fsdp, without context_parallel_size"),
            ("context_parallel_size=0", "context_parallel_size must be a positive whole number"),
            ("schedule.name=cosin", "did you mean 'cosine'"),
            ("variant=cor", "did you mean 'core'"),
            ("name=x", "may be any of optimiser.name, schedule.name"),
            ("optimiser=adamw", "has parts; set one of optimiser.name"),
            ("steps=0", "steps must be a positive whole number"),
            ("model.num_heads=3", "not a positive multiple of num_heads"),
            ("attention=flwo", "did you mean 'flow'"),
            ("recipe=lra/image", "lra/text has no key 'recipe'"),
            ("model.max_length=9", "cannot be set: the data of lra/text determine it"),
            ("vocab_size=9", "cannot be set: the data of lra/text determine it"),
            ("betas=0.9", r"betas must be two numbers, each at least 0 and below 1, got \(0\.9,\)"),
            ("lr=nan", "lr must be at least 0, got nan"),
            ("clip=0", "clip must be more than 0, or None for no bound, got 0"),
            ("schedule.floor=-1", "floor must be at least 0, got -1"),
            ("seed=-1", "seed must be from 0 to 4294967295, got -1"),
            ("workers=-1", "workers must be at least 0, got -1"),
            ("label_smoothing=2", "label_smoothing must be from 0 to 1, got 2"),
            ("mixup=0.5", "mixup and cutmix are for images, and the task is 'tokens'"),
            ("epochs=3", "epochs has no effect in lra/text beside steps=20000, which comes first. Pass steps=none"),
            ("eval_epochs=3", "eval_epochs has no effect in lra/text beside eval_every=1000"),
        ],
    )
    def test_a_wrong_one_says_what_is_right(self, assignment, message):
        with pytest.raises(ValueError, match=message):
            override(TEXT, [assignment])

    def test_an_image_size_is_one_side_or_two(self):
        config = recipes.get("cifar10")
        assert override(config, ["image_size=64"]).model.image_size == 64
        for text in ("32,64", "(32,64)"):
            pair = override(config, [f"model.image_size={text}"])
            assert pair.model.image_size == (32, 64)
            assert configs.from_dict(configs.to_dict(pair)) == pair
        for wrong, message in (
            ("32,", r"image_size must be one side, or height and width, got \(32,\)"),
            ("32,32,3", r"one side, or height and width, got \(32, 32, 3\)"),
            ("32,x", "image_size must be a whole number, got 'x'"),
            ("x", "image_size must be a whole number, got 'x'"),
        ):
            with pytest.raises(ValueError, match=message):
                override(config, [f"image_size={wrong}"])

    def test_what_the_data_decide_is_no_key(self):
        """An override of it would be replaced without a word."""
        decided = {name for task in tasks.TASKS.values() for name in task.sizes}
        assert decided == set(BY_DATA)
        assert override(TEXT, ["max_length=7"]).data_options["max_length"] == 7, "the only one left of that name"

    @pytest.mark.parametrize("assignments", list(itertools.permutations(["steps=none", "epochs=3", "eval_every=none"])))
    def test_epochs_instead_of_steps(self, assignments):
        config = override(TEXT, assignments)
        assert (config.total_steps(10), config.eval_every) == (30, None)

    @pytest.mark.parametrize("assignments", list(itertools.permutations(["epochs=none", "steps=7"])))
    def test_steps_instead_of_epochs(self, assignments):
        config = override(recipes.get("uea/JapaneseVowels"), assignments)
        assert (config.steps, config.epochs) == (7, None)

    def test_a_run_needs_an_end(self):
        with pytest.raises(ValueError, match="pass steps or epochs"):
            override(TEXT, ["steps=none"])


class TestSchedule:
    def test_rsqrt(self):
        schedule = Schedule("rsqrt", warmup=1000)
        assert schedule.rate(0.005, 1000, 5000) == pytest.approx(1.58e-4, rel=1e-2), "the published peak"
        assert schedule.rate(0.005, 500, 5000) == pytest.approx(schedule.rate(0.005, 1000, 5000) / 2)
        assert schedule.rate(0.005, 4000, 5000) == pytest.approx(schedule.rate(0.005, 1000, 5000) / 2)

    def test_cosine(self):
        schedule = Schedule("cosine", warmup=10, start=0.1, floor=0.2)
        assert schedule.rate(1.0, 0, 100) == 0.1
        assert schedule.rate(1.0, 10, 100) == 1.0
        assert schedule.rate(1.0, 55, 101) == pytest.approx(0.6)
        assert schedule.rate(1.0, 98, 100) > 0.2
        assert schedule.rate(1.0, 99, 100) == pytest.approx(0.2), "the last update has the floor"
        assert Schedule("cosine", warmup=1, floor=0.2).rate(1.0, 1, 2) == 1.0, "a run that ends as it has warmed up"

    def test_inverse_sqrt(self):
        schedule = Schedule("inverse_sqrt", warmup=6000, start=1e-7)
        assert schedule.rate(1e-3, 0, 150_000) == 1e-7
        assert schedule.rate(1e-3, 6000, 150_000) == 1e-3
        assert schedule.rate(1e-3, 24_000, 150_000) == pytest.approx(5e-4)

    @pytest.mark.parametrize("name", ["constant", "rsqrt", "cosine", "inverse_sqrt"])
    def test_is_continuous_and_positive_after_the_start(self, name):
        rates = [Schedule(name, warmup=50).rate(1.0, step, 1000) for step in range(1000)]
        assert all(rate > 0 for rate in rates[1:-1])
        assert max(abs(a - b) for a, b in itertools.pairwise(rates)) < 0.021
        assert all(math.isfinite(rate) for rate in rates)

    @pytest.mark.parametrize("name", ["rsqrt", "inverse_sqrt"])
    def test_needs_a_warmup_to_be_finite(self, name):
        with pytest.raises(ValueError, match="pass at least 1"):
            Schedule(name)


PARAMETERS = {
    "lra/listops": 2.65e6,
    "lra/text": 1.12e6,
    "lra/retrieval": 1.09e6,
    "acl": 1.09e6,
    "lra/image": 248_458,
    "lra/pathfinder": 396_034,
    "wikitext103": 156.0e6,
    "imagenet/hierarchical": 43_311_304,
    "imagenet/deit-s": 22e6,
    "d4rl/hopper-medium": 2.64e6,
    "d4rl/halfcheetah-medium-replay": 2.64e6,
    "d4rl/walker2d-medium-expert": 2.64e6,
}


class TestRecipes:
    def test_one_for_each_cell_of_the_paper(self):
        names = recipes.names()
        assert sum(name.startswith("lra/") for name in names) == 5
        assert sum(name.startswith("uea/") for name in names) == 10
        assert sum(name.startswith("d4rl/") for name in names) == 9
        assert {name for name in names if name.startswith("imagenet/")} == {
            "imagenet/hierarchical",
            "imagenet/deit-s",
            "imagenet/vit-b",
            "imagenet/vit-l",
        }
        assert {"wikitext103", "enwik8", "ptb", "cifar10", "acl"} <= set(names)

    @pytest.mark.parametrize("name", recipes.names())
    @pytest.mark.parametrize("suffix", ["", recipes.PUBLISHED])
    def test_is_complete_and_survives_json(self, name, suffix):
        config = recipes.get(name + suffix)
        assert config.recipe == name + suffix
        assert configs.from_dict(json.loads(json.dumps(configs.to_dict(config)))) == config
        assert recipes.describe(name)

    @pytest.mark.parametrize(("name", "count"), PARAMETERS.items())
    def test_has_the_published_number_of_parameters(self, name, count):
        config = recipes.get(name)
        with torch.device("meta"):
            model = tasks.get(config.task).build(config)
        exact = isinstance(count, int)
        assert model.num_parameters() == pytest.approx(count, rel=0 if exact else 5e-3)

    @pytest.mark.parametrize(
        ("name", "features", "length", "classes"),
        [
            ("EthanolConcentration", 3, 1751, 4),
            ("FaceDetection", 144, 62, 2),
            ("Handwriting", 3, 152, 26),
            ("Heartbeat", 61, 405, 2),
            ("JapaneseVowels", 12, 29, 9),
            ("PEMS-SF", 963, 144, 7),
            ("SelfRegulationSCP1", 6, 896, 2),
            ("SelfRegulationSCP2", 7, 1152, 2),
            ("SpokenArabicDigits", 13, 93, 10),
            ("UWaveGestureLibrary", 3, 315, 8),
        ],
    )
    def test_has_the_parameters_that_the_time_series_code_describes(self, name, features, length, classes):
        """No count is published: width 512, two layers of four projections and two 1 × 1 convolutions, LayerNorms,
        learned positions, and a linear head over all steps."""
        norm = 2 * 512
        layer = 4 * (512 * 512 + 512) + (512 * 2048 + 2048) + (2048 * 512 + 512) + 2 * norm
        expected = (features * 512 + 512) + length * 512 + 2 * layer + norm + (length * 512 * classes + classes)
        config = recipes.get(f"uea/{name}")
        with torch.device("meta"):
            model = tasks.get(config.task).build(config)
        assert model.num_parameters() == expected

    @pytest.mark.parametrize("name", ["lra/listops", "lra/text", "lra/retrieval", "uea/Heartbeat"])
    def test_published_lets_padding_take_part(self, name):
        assert recipes.get(name).model.mask_padding
        published = recipes.get(f"{name}@published")
        assert not published.model.mask_padding
        assert published.pad_full

    def test_published_evaluates_and_draws_as_the_releases_do(self):
        assert [recipes.get(f"uea/Heartbeat{suffix}").eval_epochs for suffix in ("", "@published")] == [1, 2]
        assert [recipes.get(f"d4rl/hopper-medium{suffix}").replacement for suffix in ("", "@published")] == [
            False,
            True,
        ]

    def test_the_paper_trains_every_series_for_100_epochs(self):
        names = [name for name in recipes.names() if name.startswith("uea/")]
        assert {recipes.get(name).epochs for name in names} == {100}
        published = {name: recipes.get(f"{name}@published").epochs for name in names}
        assert published == dict.fromkeys(names, 100) | {"uea/PEMS-SF": 400}

    def test_deit_has_its_own_augmentation(self):
        config = recipes.get("imagenet/deit-s")
        assert (config.data_options["erase"], config.repeats, config.optimiser.clip) == (0.25, 3, None)
        assert (recipes.get("imagenet/hierarchical").data_options["erase"], config.mixup) == (0.0, 0.8)

    def test_published_chooses_on_the_test_set(self):
        assert (recipes.get("lra/listops").select_on, recipes.get("lra/listops@published").select_on) == (
            "valid",
            "test",
        )

    def test_unknown(self):
        with pytest.raises(ValueError, match="did you mean 'uea/JapaneseVowels'"):
            recipes.get("uea/JapanesVowels")

    def test_every_config_has_a_folder_of_its_own(self):
        changes = ([], ["seed=1"], ["lr=0.1"], ["attention=softmax"], ["model.variant.clamp=1"])
        assert len({override(TEXT, change).name for change in changes}) == len(changes)

    def test_a_new_field_does_not_rename_earlier_runs(self):
        newer = dataclasses.make_dataclass("Newer", [("added", int, 3)], bases=(TrainConfig,), frozen=True)
        fields = {field.name: getattr(TEXT, field.name) for field in dataclasses.fields(TEXT)}
        assert newer(**fields).name == TEXT.name != newer(**fields, added=4).name
