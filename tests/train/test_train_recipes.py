"""Every recipe from files of the published formats to a result: a few updates of a small model, on few examples."""

from __future__ import annotations

import json
import random
import re

import h5py
import numpy as np
import pytest
import torch
from PIL import Image
from small_data import write_cifar10

from flowformer.train import loop, recipes, record
from flowformer.train.overrides import override

SMALL = ["embed_dim=16", "num_heads=2", "mlp_dim=32", "num_layers=1"]
SMALL_VISION = ["channels=8,16,32,64", "depths=1,1,1,1", "num_heads=2"]


def listops(folder):
    home = folder / "lra_release/listops-1000"
    home.mkdir(parents=True)
    for part in ("train", "val", "test"):
        rows = [f"( ( [MAX {i} ) {'3 ' * i}] )\t{max(i, 3)}" for i in range(1, 9)]
        (home / f"basic_{part}.tsv").write_text("\r\n".join(["Source\tTarget", *rows, ""]))


def text(folder):
    for part in ("train", "test"):
        for mood in ("neg", "pos"):
            home = folder / "aclImdb" / part / mood
            home.mkdir(parents=True)
            for i in range(4):
                (home / f"{i}_3.txt").write_text(f"{mood} " * (i + 1))


def pairs(folder, home):
    (folder / home).mkdir(parents=True)
    for part in ("train", "eval", "test"):
        lines = [f"{i % 2}.0\tA\tB\t{'first ' * (i + 1)}\tsecond\n" for i in range(8)]
        (folder / home / f"new_aan_pairs.{part}.tsv").write_text("".join(lines))


def pathfinder(folder):
    home = folder / "lra_release/pathfinder32/curv_contour_length_14"
    (home / "metadata").mkdir(parents=True)
    (home / "imgs/0").mkdir(parents=True)
    rows = []
    for i in range(10):
        Image.fromarray(np.full((32, 32), 20 * i, np.uint8)).save(home / f"imgs/0/sample_{i}.png")
        rows.append(f"imgs/0 sample_{i}.png {i} {i % 2} 1.0 14 4 2 0.5 1 1\n")
    (home / "metadata/0.npy").write_text("".join(rows))


def words(folder, pattern):
    path = folder / pattern
    path.parent.mkdir(parents=True)
    for part in ("train", "valid", "test"):
        (path.parent / path.name.format(part)).write_text(" the cat sat on the mat \n" * 20)


def imagenet(folder):
    noise = np.random.default_rng(0)
    for part in ("train", "val"):
        for name in ("n01440764", "n01443537"):
            home = folder / "imagenet" / part / name
            home.mkdir(parents=True)
            for i in range(4):
                Image.fromarray(noise.integers(0, 256, (40, 40, 3), np.uint8)).save(home / f"{name}_{i}.JPEG", "jpeg")


def series(folder, name):
    home = folder / "uea" / name
    home.mkdir(parents=True)
    header = f"@problemName {name}\n@timeStamps false\n@missing false\n@univariate false\n@dimensions 2\n"
    header += "@equalLength false\n@classLabel true a b\n@data\n"
    noise = random.Random(0)
    for part in ("TRAIN", "TEST"):
        cases = []
        for i in range(8):
            channels = (",".join(f"{noise.random():.3f}" for _ in range(4 + i)) for _ in range(2))
            cases.append(":".join((*channels, "ab"[i % 2])))
        (home / f"{name}_{part}.ts").write_text(header + "\n".join(cases) + "\n")


def trajectories(folder, name, states, actions):
    (folder / "d4rl").mkdir()
    noise = np.random.default_rng(0)
    ends = np.zeros(60, bool)
    ends[29::30] = True
    with h5py.File(folder / "d4rl" / f"{name}-v2.hdf5", "w") as file:
        file["observations"] = noise.normal(size=(60, states)).astype(np.float32)
        file["actions"] = noise.uniform(-1, 1, (60, actions)).astype(np.float32)
        file["rewards"] = noise.uniform(size=60).astype(np.float32)
        file["terminals"], file["timeouts"] = ends, np.zeros(60, bool)


# of each family one recipe of each kind: how to write its files, and what makes it small
CASES = {
    "lra/listops": (listops, SMALL),
    "lra/text": (text, SMALL),
    "lra/retrieval": (lambda folder: pairs(folder, "lra_release/tsv_data"), SMALL),
    "acl": (lambda folder: pairs(folder, "acl"), SMALL),
    "lra/image": (write_cifar10, [*SMALL, "qkv_dim=8"]),
    "lra/pathfinder": (pathfinder, [*SMALL, "qkv_dim=8"]),
    "wikitext103": (
        lambda folder: words(folder, "wikitext-103/wiki.{}.tokens"),
        [*SMALL, "data_options.length=8", "data_options.context=4", "accumulate=2"],
    ),
    "enwik8": (
        lambda folder: (folder / "enwik8").write_bytes(b"the cat sat " * 100),
        [*SMALL, "data_options.length=16"],
    ),
    "ptb": (lambda folder: words(folder, "ptb/ptb.{}.txt"), [*SMALL, "data_options.length=8"]),
    "imagenet/hierarchical": (imagenet, [*SMALL_VISION, "size=32", "image_size=32"]),
    "imagenet/deit-s": (imagenet, ["embed_dim=16", "depth=1", "num_heads=2", "size=32", "image_size=32"]),
    "imagenet/vit-b": (
        imagenet,
        ["embed_dim=16", "depth=1", "num_heads=2", "size=32", "image_size=32", "accumulate=2"],
    ),
    "cifar10": (write_cifar10, SMALL_VISION),
    "uea/Heartbeat": (lambda folder: series(folder, "Heartbeat"), SMALL),
    "d4rl/hopper-medium-replay": (
        lambda folder: trajectories(folder, "hopper_medium_replay", 11, 3),
        [*SMALL, "episodes=2", "final_episodes=3"],
    ),
    "d4rl/walker2d-medium": (
        lambda folder: trajectories(folder, "walker2d_medium", 17, 6),
        [*SMALL, "episodes=1", "final_episodes=1"],
    ),
}


@pytest.mark.parametrize("attention", ["flow", "softmax"])
@pytest.mark.parametrize("name", CASES)
def test_runs_from_files_to_a_result(tmp_path, name, attention):
    write, changes = CASES[name]
    write(tmp_path)
    shared = [
        "steps=3",
        "batch_size=4",
        "eval_every=2",
        "log_every=1",
        "workers=0",
        "partial=true",
        f"attention={attention}",
    ]
    config = override(recipes.get(name), [*changes, *shared])
    result = loop.train(config, tmp_path / "run", data_dir=tmp_path)
    for which in ("final", "best"):
        assert np.isfinite(result[which][result["metric"]])
    assert result["final"]["step"] == 3
    facts = json.loads((tmp_path / "run/provenance.json").read_text())
    assert facts["checksum"]
    assert facts["differs"]
    if name.startswith("d4rl"):
        environment = {"hopper": "Hopper-v4", "walker2d": "Walker2d-v4"}[name.split("/")[1].split("-")[0]]
        assert facts["environment"] == result["final"]["environment"] == environment
        played = [each["episodes"] for each in record.read_log(tmp_path / "run") if each["kind"] == "eval"]
        assert played == [config.episodes, config.final_episodes]
        # the rewards of these episodes are below 1, and their sum below 30
        assert re.fullmatch(
            r"target return \d+ and \d+ above every episode of the data, the best 1\d", result["final"]["note"]
        )


def test_the_cases_are_of_every_family():
    families = {name.partition("/")[0] for name in recipes.names()}
    assert {name.partition("/")[0] for name in CASES} == families


@pytest.mark.parametrize("name", ["lra/listops", "lra/text", "uea/Heartbeat"])
def test_as_published_padding_changes_the_result(tmp_path, name):
    """The paper's way is another computation, not only another label."""
    write, changes = CASES[name]
    write(tmp_path)
    shared = ["steps=1", "batch_size=4", "eval_every=1", "log_every=1", "workers=0", "partial=true", "dropout=0"]
    losses = []
    for recipe in (name, f"{name}@published"):
        config = override(recipes.get(recipe), [*changes, *shared])
        loop.train(config, tmp_path / recipe, data_dir=tmp_path)
        losses.append(json.loads((tmp_path / recipe / "log.jsonl").read_text().splitlines()[0])["loss"])
    assert losses[0] != pytest.approx(losses[1], rel=1e-4)
    assert torch.isfinite(torch.tensor(losses)).all()
