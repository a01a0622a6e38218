"""Folders of finished runs, as `train` leaves them, without training, and tables of them."""

from __future__ import annotations

import json

from flowformer.train import recipes, summary
from flowformer.train.config import to_dict
from flowformer.train.overrides import override

FACTS = {
    "data": "some",
    "checksum": "0123",
    "differs": "",
    "device": "a GPU",
    "processes": 1,
    "threads": 1,
    "python": "3.12",
    "torch": "2.11",
    "accelerate": "1",
    "flowformer": "0.1",
    "commit": "abc",
    "command": "flowformer train </script> 'x y'",
}


def write_run(folder, recipe, attention="flow", seed=0, final=0.9, best=None, overrides=(), metric="accuracy", **more):
    """A finished run, as `train` leaves one."""
    config = override(recipes.get(recipe), [f"attention={attention}", f"seed={seed}", *overrides])
    run = folder / config.name
    run.mkdir(parents=True)
    scores = {"final": {metric: final, "step": 10}, "best": {metric: final if best is None else best, "step": 5}}
    for which, value in more.get("top5", {}).items():
        scores[which]["top5"] = value
    for which, values in more.get("scores", {}).items():
        scores[which] |= values
    result = {
        "recipe": config.recipe,
        "attention": attention,
        "seed": seed,
        "metric": metric,
        **scores,
        "best_chosen_on": config.select_on,
        "steps": 10,
        "parameters": more.get("parameters", 1000),
        "training_seconds": 1.5,
        "steps_per_second": 6.7,
        "peak_memory_mib": 100.0,
    }
    (run / "config.json").write_text(json.dumps(to_dict(config)))
    (run / "provenance.json").write_text(json.dumps({**FACTS, "data": recipe, **more.get("facts", {})}))
    (run / "result.json").write_text(json.dumps(result))
    log = [{"kind": "train", "step": i, "loss": 1 / i**6} for i in range(1, 11)]
    log += [{"kind": "eval", "split": "test", "step": i, "epoch": 0.5, metric: final} for i in (5, 10)]
    (run / "log.jsonl").write_text("".join(json.dumps(record) + "\n" for record in log))
    return run


def the(rows, name, title=""):
    """The table of a name, by default the one whose title is that of the paper's table."""
    found = {table.title: table for table in summary.fill(rows) if table.table.name == name}
    (paper,) = {table.table.title for table in found.values()}
    return found[f"{paper}: {title}" if title else paper]


def labelled(table):
    return {table.label(line): line for line in table.lines}
