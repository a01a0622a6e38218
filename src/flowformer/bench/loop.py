"""Overhead of the training loop: the loop of a recipe, compared with its bare model on the same batches.

    flowformer bench loop                                     # lra/text and lra/listops
    flowformer bench loop --synthetic                         # with synthetic data in the same format
    flowformer bench loop lra/listops --set precision=tf32 workers=8

The loop reads, pads and moves its batches, logs, and draws its random numbers. The bare model runs only forward,
backward and optimiser, on batches that are already on the device. "Data alone" is batches per second without a model.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from accelerate.utils import send_to_device
from torch.utils.data import Subset

from .. import data
from ..data import Splits
from ..train import recipes, tasks
from ..train.config import TrainConfig
from ..train.evaluation import dataset_size
from ..train.loop import Trainer
from ..train.optim import build_optimiser
from ..train.overrides import override
from ..train.record import device_name, peak_memory

LOG_EVERY = 10
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class LoopTiming:
    recipe: str
    device: str
    precision: str
    batch_size: int
    tokens_per_step: float
    bare_steps_per_second: float
    loop_steps_per_second: float
    share_in_model: float
    tokens_per_second: float
    data_batches_per_second: float
    bare_memory_mib: float
    loop_memory_mib: float


def listops(folder: Path) -> None:
    data.prepare("lra/listops", folder, sizes={"train": 1000, "val": 32, "test": 32}, workers=1)


def reviews(folder: Path) -> None:
    """Write synthetic reviews with the lengths of the real ones: median 970 bytes, mean 1300, few beyond 4000."""
    draw = random.Random(0)
    for part in ("train", "test"):
        for mood in ("neg", "pos"):
            home = folder / "aclImdb" / part / mood
            home.mkdir(parents=True)
            for i in range(250):
                length = max(50, int(draw.lognormvariate(6.88, 0.72)))
                (home / f"{i}_5.txt").write_bytes(bytes(draw.choices(range(97, 123), k=length)))


SYNTHETIC: dict[str, Callable[[Path], None]] = {"lra/text": reviews, "lra/listops": listops}


def measure(config: TrainConfig, splits: Splits, steps: int, warmup: int) -> LoopTiming:
    """Time data alone, bare model and loop, one after another: `steps` updates each, after `warmup` updates."""
    config = replace(
        config, steps=warmup + steps, eval_every=warmup + steps, checkpoint_every=warmup + steps, log_every=LOG_EVERY
    )
    few = range(config.batch_size)
    part = Subset(splits.test, few[: dataset_size(splits.test)])
    logged = {}

    def report(record):
        if record["kind"] == "train":  # logging has just synchronised the device
            logged[record["step"]] = time.perf_counter()

    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(config, Path(folder), splits._replace(valid=part, test=part), None, False, report)
        device, task = trainer.accelerator.device, trainer.task
        started, batches = 0.0, []
        for batch in trainer.batches(0):
            batches.append(batch)
            if len(batches) == warmup * config.accumulate:
                started = time.perf_counter()
        _wait(device)
        data_seconds = time.perf_counter() - started
        tokens = sum(int(task.tokens(batch)) for batch in batches[warmup * config.accumulate :])
        bare_seconds, bare_memory = _bare(trainer.config, batches, warmup, device)
        _reset_peak(device)
        trainer.run()
    loop_seconds = logged[warmup + steps] - logged[warmup]
    return LoopTiming(
        config.recipe,
        device_name(device),
        config.precision,
        config.batch_size,
        tokens / steps,
        steps / bare_seconds,
        steps / loop_seconds,
        bare_seconds / loop_seconds,
        tokens / loop_seconds,
        steps * config.accumulate / data_seconds,
        bare_memory,
        peak_memory(device),
    )


def _bare(config: TrainConfig, batches: list[tasks.Batch], warmup: int, device: torch.device) -> tuple[float, float]:
    """Seconds of the updates after the warm-up, and peak memory in MiB."""
    task = tasks.get(config.task)
    counts = [float(task.count(batch)) for batch in batches]
    batches = [send_to_device(batch, device) for batch in batches]
    objective = tasks.Objective(task.build(config), task, config).to(device)
    optimiser = build_optimiser(objective, config.optimiser, device, capturable=config.graphs)
    if config.compile:
        objective.compile()
    dtype = AUTOCAST.get(config.precision)
    _reset_peak(device)
    started = 0.0
    for step in range(len(batches) // config.accumulate):
        if step == warmup:
            _wait(device)
            started = time.perf_counter()
        parts = slice(step * config.accumulate, (step + 1) * config.accumulate)
        count = max(1.0, sum(counts[parts]))
        for batch in batches[parts]:
            with nullcontext() if dtype is None else torch.autocast(device.type, dtype):
                loss = objective(batch)
            (loss / count).backward()
        if config.optimiser.clip is not None:
            torch.nn.utils.clip_grad_norm_(objective.parameters(), config.optimiser.clip)
        optimiser.step()
        optimiser.zero_grad()
    _wait(device)
    return time.perf_counter() - started, peak_memory(device)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def show(row: LoopTiming) -> str:
    return "\n".join(
        (
            f"{row.recipe}, batch {row.batch_size}, {row.tokens_per_step:,.0f} tokens a step, {row.precision}, "
            f"{row.device}",
            f"  bare model  {row.bare_steps_per_second:10.2f} steps/s  {row.bare_memory_mib:10,.0f} MiB",
            f"  loop        {row.loop_steps_per_second:10.2f} steps/s  {row.loop_memory_mib:10,.0f} MiB  "
            f"{row.tokens_per_second:,.0f} tokens/s",
            f"  data alone  {row.data_batches_per_second:10.2f} batches/s",
            f"  of the step, {row.share_in_model:.1%} is the model",
        )
    )


def main(arguments: list[str] | None = None) -> list[LoopTiming]:
    parser = argparse.ArgumentParser(
        "flowformer bench loop", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipes", nargs="*", default=list(SYNTHETIC), metavar="RECIPE")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="as of flowformer train")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--warmup", type=int, default=20, help=f"a multiple of {LOG_EVERY}")
    parser.add_argument("--synthetic", action="store_true", help=f"make up the data of {' or '.join(SYNTHETIC)}")
    parser.add_argument("--data", type=Path, help="the folder of all data sets")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    if options.warmup < LOG_EVERY or options.warmup % LOG_EVERY:
        parser.error(f"--warmup must be a multiple of {LOG_EVERY}, got {options.warmup}.")
    if options.synthetic and not set(options.recipes) <= set(SYNTHETIC):
        parser.error(f"--synthetic knows {', '.join(SYNTHETIC)}, got {', '.join(options.recipes)}.")
    rows = []
    for name in options.recipes:
        with tempfile.TemporaryDirectory() as folder:
            config = override(recipes.get(name), options.set)
            if options.synthetic:
                SYNTHETIC[name](Path(folder))
                config = override(config, ["partial=true"])
            splits = data.load(config.data, folder if options.synthetic else options.data, **config.data_options)
            rows.append(measure(config, splits, options.steps, options.warmup))
        print(json.dumps(asdict(rows[-1])) if options.json else show(rows[-1]), flush=True)
    return rows


if __name__ == "__main__":
    main()
