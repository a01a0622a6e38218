"""The training loop: one update after another, evaluated, recorded, and resumable at any of them, bit for bit.

The learning rate and the order of the data are functions of the seed and of the number of the update alone. So a
checkpoint holds parameters, optimiser, random numbers and that number, and nothing else is needed to go on.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, PartialState  # type: ignore[import-untyped]
from accelerate.state import AcceleratorState  # type: ignore[import-untyped]
from accelerate.utils import (  # type: ignore[import-untyped]
    DistributedType,
    FullyShardedDataParallelPlugin,
    send_to_device,
    set_seed,
)
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.data import Dataset

from .. import data
from .._utils import write_atomically
from ..data import Splits
from ..models.vision import GridPositions
from ..nn import LearnedPositions
from . import checkpoints, claims, resident, tasks
from .config import TrainConfig, to_dict
from .config import load as load_config
from .graphs import GraphedUpdates
from .loader import batches as load_batches
from .order import Batches, SeededItems, steps_per_epoch
from .record import RunLog, is_main, peak_memory, provenance, write_provenance

CONFIG, RESULT = "config.json", "result.json"
_AUTOCAST = ("bf16", "fp16")
Report = Callable[[dict[str, Any]], None]


class Interrupted(KeyboardInterrupt):
    """The run was asked to stop, and did so with a checkpoint to resume from."""


@dataclass
class Progress:
    """What changes from update to update, besides parameters, optimiser and random numbers.

    Args:
        step: updates done.
        seconds: spent on updates, without evaluations.
        loss, tokens: summed since the last line of the log.
        logged_step, logged_seconds: where that line was.
        best: the evaluation record with the best score; None before the first.
    """

    step: int = 0
    seconds: float = 0.0
    loss: float = 0.0
    tokens: int = 0
    logged_step: int = 0
    logged_seconds: float = 0.0
    best: dict[str, Any] | None = None


def train(
    config: TrainConfig,
    folder: str | Path,
    *,
    splits: Splits | None = None,
    data_dir: str | Path | None = None,
    resume: bool = False,
    report: Report = lambda record: None,
) -> dict[str, Any]:
    """Train, evaluate and write everything into a folder; the result is also in its result.json.

    Args:
        config: of a recipe.
        folder: of the run. It gets config.json, provenance.json, log.jsonl, tensorboard/, checkpoints/, and the models
            `final` and `best`, which `from_pretrained` reads.
        splits: the data; None loads what the config names, from data_dir.
        resume: go on from the newest checkpoint in the folder, if there is one.
        report: is called with every record of the log, and with {"kind": "step"} after each update.

    Raises `Interrupted` after Ctrl-C or SIGTERM; the checkpoint is then written. Raises `claims.FolderInUseError` if
    another process trains in the folder.
    """
    with claims.claimed(Path(folder), is_main()) as claim:
        return Trainer(config, Path(folder), splits, data_dir, resume, report, claim).run()


class Trainer:
    """A run, set up; `run` is the loop."""

    def __init__(
        self,
        config: TrainConfig,
        folder: Path,
        splits: Splits | None,
        data_dir: str | Path | None,
        resume: bool,
        report: Report,
        claim: claims.Claim | None = None,
    ) -> None:
        self.accelerator = _accelerator(config)
        self.folder, self.report, self.claim = folder, report, claim
        self.splits = data.load(config.data, data_dir, **config.data_options) if splits is None else splits
        self.task = tasks.get(config.task)
        self.config = config = self.task.fitted(config, self.splits.info)
        self.steps_per_epoch = steps_per_epoch(_size(self.splits.train), config)
        self.steps = config.total_steps(self.steps_per_epoch)
        parts = config.accumulate * self.accelerator.num_processes
        if config.batch_size % parts:
            raise ValueError(
                f"batch_size {config.batch_size} cannot be shared by {self.accelerator.num_processes} processes in "
                f"{config.accumulate} parts each; pass a multiple of {parts}."
            )
        if config.select_on == "valid" and self.splits.valid is None:
            raise ValueError(
                f"{config.data} has no validation part. Pass select_on=test; the best evaluation is then labelled as "
                "chosen on the test set."
            )
        if config.graphs:
            _check_graphs(config, self.accelerator)
        if self.accelerator.is_fsdp2 and config.task == "decision":
            raise NotImplementedError("playing needs the whole model, which parallel=fsdp shards; pass parallel=ddp.")
        found = checkpoints.latest(folder / "checkpoints")
        self._check_folder(resume, found)
        set_seed(config.seed)
        objective = tasks.Objective(self.task.build(config), self.task, config)
        optimiser = build_optimiser(objective, config, self.accelerator.device)
        if config.compile:
            objective.compile()
        self.objective, self.optimiser = self.accelerator.prepare(objective, optimiser)
        # dropout is to differ between processes; the parameters above are not
        set_seed(config.seed, device_specific=True)
        self.progress = Progress()
        if found is not None:
            self.progress = Progress(**checkpoints.restore(self.accelerator, found))
        self._prepare_folder(resumed=found is not None)
        self.log = RunLog(folder, self.progress.step, self.accelerator.is_main_process)

    def run(self) -> dict[str, Any]:
        config, progress = self.config, self.progress
        self.report({"kind": "start", "step": progress.step, "steps": self.steps, "config": to_dict(config)})
        # sums that stay on the device until they are logged
        self._loss = torch.tensor(progress.loss, device=self._device)
        self._tokens = torch.tensor(progress.tokens, device=self._device)
        if config.graphs:
            self._rate = torch.tensor(config.optimiser.lr, device=self._device)
            for group in self.optimiser.param_groups:
                group["lr"] = self._rate
            self._graphed = GraphedUpdates(lambda batch: self._compute([batch]), self.optimiser.optimizer.zero_grad)
        batches = self.batches(progress.step)
        final: dict[str, Any] | None = None
        try:
            with _stop_requests() as stop_requested:
                while progress.step < self.steps:
                    started = time.perf_counter()
                    self._update([next(batches) for _ in range(config.accumulate)])
                    if self.claim is not None and self.claim.lost:
                        raise claims.FolderInUseError(
                            f"{self.folder} was taken over while this process slept; it stops here and writes nothing."
                        )
                    last = progress.step == self.steps
                    if last or progress.step % config.log_every == 0:
                        self._log_update(started)
                    else:
                        progress.seconds += time.perf_counter() - started
                    self.report({"kind": "step", "step": progress.step})
                    if last or progress.step % (config.eval_every or config.eval_epochs * self.steps_per_epoch) == 0:
                        final = self._evaluate_and_keep_best()
                    stop = self._agreed(stop_requested())
                    if last or stop or progress.step % config.checkpoint_every == 0:
                        self._save()
                    if stop and not last:
                        raise Interrupted(f"stopped at update {progress.step} of {self.steps}.")
            return self._finish(final)
        finally:
            self.log.close()

    def _update(self, parts: list[tasks.Batch]) -> None:
        """One update from the parts of a batch: the loss is a mean over all of them, in all processes."""
        config, progress = self.config, self.progress
        parts = [send_to_device(part, self._device, non_blocking=True) for part in parts]
        rate = config.schedule.rate(config.optimiser.lr, progress.step, self.steps)
        if config.graphs:
            self._rate.fill_(rate)
            self._graphed(parts[0])
        else:
            for group in self.optimiser.param_groups:
                group["lr"] = rate
            self._compute(parts)
            self.optimiser.optimizer.zero_grad()
        progress.step += 1

    def _compute(self, parts: list[tasks.Batch]) -> None:
        """All of an update that the device does; the host waits for none of it."""
        config, accelerator = self.config, self.accelerator
        count = torch.stack([self.task.count(part) for part in parts]).sum()
        if accelerator.num_processes > 1:
            count = accelerator.reduce(count)
        count = count.clamp_min(1)
        for i, part in enumerate(parts):
            self._tokens += self.task.tokens(part)
            last = i == len(parts) - 1
            with nullcontext() if last else accelerator.no_sync(self.objective):
                with accelerator.autocast():
                    loss = self.objective(part) / count
                # DDP averages over ranks; multiplied by their number it is the sum
                accelerator.backward(loss * accelerator.num_processes)
            self._loss += loss.detach()
        if config.optimiser.clip is not None:
            accelerator.clip_grad_norm_(self.objective.parameters(), config.optimiser.clip)
        # Bypass accelerate's wrapper unless fp16 needs its GradScaler: it probes for optional imports on every step
        optimiser = self.optimiser if accelerator.scaler else self.optimiser.optimizer
        optimiser.step()

    def _log_update(self, started: float) -> None:
        progress = self.progress
        sums = torch.stack([self._loss, self._tokens.to(self._loss)])
        loss, tokens = self.accelerator.reduce(sums).tolist()  # waits for the device, so the time is what it took
        progress.seconds += time.perf_counter() - started
        steps = progress.step - progress.logged_step
        seconds = max(progress.seconds - progress.logged_seconds, 1e-9)
        record = {
            "kind": "train",
            "step": progress.step,
            "epoch": round(progress.step / self.steps_per_epoch, 4),
            "loss": loss / steps,
            "lr": float(self.optimiser.param_groups[0]["lr"]),
            "steps_per_second": steps / seconds,
            "tokens_per_second": tokens / seconds,
            "peak_memory_mib": peak_memory(self._device),
        }
        self.log.write(record)
        self.report(record)
        self._loss.zero_()
        self._tokens.zero_()
        progress.logged_step, progress.logged_seconds = progress.step, progress.seconds

    def _evaluate_and_keep_best(self) -> dict[str, Any]:
        record = self._evaluate(self.config.select_on)
        best = self.progress.best
        sign = 1 if self.task.higher_is_better else -1
        if best is None or sign * record[self.task.metric] > sign * best[self.task.metric]:
            self.progress.best = record
            self._write_model("best")
        return record

    def _evaluate(self, split: str, **labels: Any) -> dict[str, Any]:
        """The metrics of the model on a split, recorded."""
        last = self.progress.step == self.steps
        scores = self.task.evaluate(self._unwrapped().model, self.splits, self.config, last=last)
        if scores is None:
            dataset = getattr(self.splits, split)
            length = padded_length(self.config, self.splits)
            scores = evaluate(self.accelerator, self.objective, dataset, self.config, length)
        epoch = round(self.progress.step / self.steps_per_epoch, 4)
        record = {"kind": "eval", "split": split, "step": self.progress.step, "epoch": epoch, **labels, **scores}
        self.log.write(record)
        self.report(record)
        return record

    def _finish(self, final: dict[str, Any] | None) -> dict[str, Any]:
        """Save the last model, and score it and the best one on the test set."""
        config = self.config
        self._write_model("final")
        best = self.progress.best
        if final is None:  # resumed after the last update
            final = self._evaluate(config.select_on)
        assert best is not None
        if config.select_on == "valid":
            final = self._evaluate("test", model="final")
            self._read_model("best")
            best = {**self._evaluate("test", model="best"), "step": best["step"], "epoch": best["epoch"]}
        plain = ("kind", "split", "model")
        result = {
            "recipe": config.recipe,
            "attention": config.model.attention,
            "seed": config.seed,
            "metric": self.task.metric,
            "final": {key: value for key, value in final.items() if key not in plain},
            "best": {key: value for key, value in best.items() if key not in plain},
            "best_chosen_on": config.select_on,
            "steps": self.steps,
            "parameters": self._unwrapped().model.num_parameters(),
            "training_seconds": round(self.progress.seconds, 2),
            "steps_per_second": round(self.steps / max(self.progress.seconds, 1e-9), 3),
            "peak_memory_mib": round(peak_memory(self._device), 1),
        }
        if self.accelerator.is_main_process:
            write_atomically(self.folder / RESULT, json.dumps(result, indent=2) + "\n")
        self.report({"kind": "end", "step": self.steps, **result})
        return result

    def _save(self) -> None:
        # each process goes on with the mean of all, which has the same sum
        sums = torch.stack([self._loss, self._tokens.to(self._loss)])
        loss, tokens = (self.accelerator.reduce(sums) / self.accelerator.num_processes).tolist()
        self.progress.loss, self.progress.tokens = loss, round(tokens)
        folder = self.folder / "checkpoints"
        checkpoints.save(self.accelerator, folder, self.progress.step, asdict(self.progress), self.config.keep)

    def _write_model(self, name: str) -> None:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state: dict[str, Any] = get_model_state_dict(self._unwrapped(), options=options)
        if self.accelerator.is_main_process:
            with torch.device("meta"):  # takes no memory, and no random numbers from the run
                whole = tasks.Objective(self.task.build(self.config), self.task, self.config)
            # what was sharded unevenly comes as part of something larger, which would be saved too
            whole.load_state_dict({name: value.clone() for name, value in state.items()}, assign=True)
            aside = self.folder / f".{name}.part"
            whole.model.save_pretrained(aside)
            (self.folder / name).mkdir(exist_ok=True)
            for path in aside.iterdir():
                path.replace(self.folder / name / path.name)
            aside.rmdir()

    def _read_model(self, name: str) -> None:
        self.accelerator.wait_for_everyone()
        model = type(self._unwrapped().model).from_pretrained(self.folder / name)
        state = tasks.Objective(model, self.task, self.config).state_dict()
        if self.accelerator.is_fsdp2:
            self.objective.reshard()  # what belongs to no layer stays together after an evaluation
        set_model_state_dict(self._unwrapped(), state, options=StateDictOptions(full_state_dict=True))

    def _unwrapped(self) -> tasks.Objective:
        return self.accelerator.unwrap_model(self.objective)

    @property
    def _device(self) -> torch.device:
        return self.accelerator.device

    def batches(self, start: int) -> Iterator[tasks.Batch]:
        """The batches of this process from an update on."""
        accelerator, dataset, config = self.accelerator, self.splits.train, self.config
        process, processes = accelerator.process_index, accelerator.num_processes
        order = Batches(_size(dataset), config, start, self.steps, process, processes)
        length = padded_length(config, self.splits)
        if _is_resident(dataset, config, self._device):
            return resident.batches(dataset, order, length, self._device)
        items = SeededItems(dataset, config.seed)
        return load_batches(items, order, partial(data.collate, length=length), config.workers, self._device)

    def _agreed(self, stop: bool) -> bool:
        """Whether any process was asked to stop; asked only now and then where that takes communication."""
        if self.accelerator.num_processes == 1:
            return stop
        if self.progress.step % self.config.log_every:
            return False
        return bool(self.accelerator.reduce(torch.tensor(float(stop), device=self._device)).item())

    def _check_folder(self, resume: bool, found: Path | None) -> None:
        if found is None:
            return
        if not resume:
            raise FileExistsError(f"{self.folder} has a run already. Resume it, or choose another folder.")
        saved = to_dict(load_config(self.folder / CONFIG))
        asked = to_dict(self.config)
        different = [key for key in asked if asked[key] != saved.get(key)]
        if different:
            raise ValueError(
                f"{self.folder} has a run of another config: {', '.join(different)} differ. Resume it with the config "
                "it was started with, or choose another folder."
            )

    def _prepare_folder(self, resumed: bool) -> None:
        if self.accelerator.is_main_process:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_atomically(self.folder / CONFIG, json.dumps(to_dict(self.config), indent=2) + "\n")
            facts = provenance(self.splits.info, self._device, self.accelerator.num_processes)
            write_provenance(self.folder, facts, resumed=resumed)
        self.accelerator.wait_for_everyone()


def padded_length(config: TrainConfig, splits: Splits) -> int | None:
    """The length to which every batch is padded; None is that of its longest case."""
    return splits.info.max_length if config.pad_full else None


def _is_resident(dataset: Dataset, config: TrainConfig, device: torch.device) -> bool:
    return config.on_device and device.type == "cuda" and resident.fits(dataset)


def evaluate(
    accelerator: Accelerator, objective: nn.Module, dataset: Dataset, config: TrainConfig, length: int | None
) -> dict[str, float]:
    """The metrics of a model on a whole dataset, each example counted once however many processes share it.

    Args:
        length: see `padded_length`.
    """
    task = tasks.get(config.task)
    metrics = {name: metric.to(accelerator.device) for name, metric in task.metrics(config).items()}
    size, process, processes = (
        config.eval_batch_size or config.batch_size,
        accelerator.process_index,
        accelerator.num_processes,
    )
    batches = [range(first, min(first + size, _size(dataset))) for first in range(0, _size(dataset), size)]
    # all processes run as often, since a sharded model needs all of them; who has nothing left runs an example again
    shares = [list(batch[process::processes]) or [batch[0]] for batch in batches]
    if _is_resident(dataset, config, accelerator.device):
        loader = resident.batches(dataset, enumerate(shares), length, accelerator.device)
    else:
        collate = partial(data.collate, length=length)
        loader = load_batches(dataset, shares, collate, config.workers, accelerator.device)
    was_training = objective.training
    objective.eval()
    with torch.no_grad(), accelerator.autocast():
        for whole, batch in zip(batches, loader, strict=True):
            batch = send_to_device(batch, accelerator.device, non_blocking=True)
            predicted = objective(batch)
            if process < len(whole):
                task.update(metrics, predicted, batch)
    objective.train(was_training)
    return {name: float(metric.compute()) for name, metric in metrics.items()}


def _accelerator(config: TrainConfig) -> Accelerator:
    """The engine: devices and processes, precision, and who holds which part of the model."""
    # a process may train more than once, each time in another way
    AcceleratorState._reset_state(reset_partial_state=True)
    torch.set_float32_matmul_precision("high" if config.precision == "tf32" else "highest")
    plugin = None
    if config.parallel == "fsdp" and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        # a policy that casts nothing: the precision is autocast's, as with one process
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap", mixed_precision_policy=MixedPrecisionPolicy()
        )
    accelerator = Accelerator(
        mixed_precision=config.precision if config.precision in _AUTOCAST else "no", fsdp_plugin=plugin
    )
    if config.precision == "fp16" and accelerator.device.type == "cpu":
        raise ValueError("precision fp16 needs a GPU; on a CPU, pass precision=bf16 or float32.")
    if plugin is not None and accelerator.distributed_type == DistributedType.MULTI_CPU:
        # the engine offers to shard on GPUs alone, though all that it calls runs on CPUs too
        for state in (AcceleratorState, PartialState):
            state._shared_state.update(distributed_type=DistributedType.FSDP, fsdp_plugin=plugin)
    return accelerator


def _check_graphs(config: TrainConfig, accelerator: Accelerator) -> None:
    obstacles = {
        "a GPU": accelerator.device.type != "cuda",
        "one process": accelerator.num_processes > 1,
        "accumulate=1": config.accumulate > 1,
        "another precision than fp16": config.precision == "fp16",
        "mixup=0 and cutmix=0, which draw on the CPU": bool(config.mixup or config.cutmix),
        "compile=false": config.compile,
    }
    missing = [need for need, unmet in obstacles.items() if unmet]
    if missing:
        raise ValueError(f"graphs=true needs {', '.join(missing)}; pass graphs=false.")


def _size(dataset: Dataset) -> int:
    return len(dataset)  # type: ignore[arg-type]


def build_optimiser(module: nn.Module, config: TrainConfig, device: torch.device) -> torch.optim.Optimizer:
    options = config.optimiser
    # the releases spare their tables of positions, though they are matrices
    positions = {
        id(p) for m in module.modules() if isinstance(m, LearnedPositions | GridPositions) for p in m.parameters()
    }
    decayed = [p for p in module.parameters() if options.decay == "all" or (p.dim() > 1 and id(p) not in positions)]
    chosen = {id(p) for p in decayed}
    others = [p for p in module.parameters() if id(p) not in chosen]
    groups = [{"params": decayed, "weight_decay": options.weight_decay}]
    if others:
        groups.append({"params": others, "weight_decay": 0.0})
    shared: dict[str, Any] = {"lr": options.lr, "betas": options.betas, "eps": options.eps}
    if config.graphs:
        shared["capturable"] = True
    if options.name == "radam":
        return torch.optim.RAdam(groups, decoupled_weight_decay=True, **shared)
    return torch.optim.AdamW(groups, fused=device.type == "cuda", **shared)


@contextmanager
def _stop_requests() -> Iterator[Callable[[], bool]]:
    """Ctrl-C and SIGTERM become a request that the loop sees between updates; a second Ctrl-C is not waited for."""
    requested = False

    def ask(number: int, frame: Any) -> None:
        nonlocal requested
        if requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        requested = True

    try:
        before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not the main thread: signals are not ours
        before = {}
    try:
        yield lambda: requested
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
