"""The training loop: updates with gradient accumulation, clipping and mixed precision; evaluations, logs, checkpoints.

A resumed run equals an uninterrupted one, bit for bit. The learning rate and the order of the data depend only on the
seed and the step, so a checkpoint holds the parameters, the optimiser state, the random states and the step.
"""

from __future__ import annotations

import json
import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import send_to_device, set_seed
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor

from .. import data
from .._utils import write_atomically
from ..data import Splits
from . import checkpoints, claims, resident, tasks
from .batches import MicroBatches, SeededItems, load_batches, steps_per_epoch
from .config import TrainConfig, to_dict
from .config import load as load_config
from .engine import build_accelerator, build_share, check_graphs
from .evaluation import dataset_size, evaluate, padded_length
from .graphs import GraphedUpdates, fix_shapes
from .optim import build_optimiser
from .record import CONFIG, RESULT, RunLog, check_same_data, is_main, peak_memory, provenance, write_provenance

LAYOUT = ("parallel", "context_parallel_size")  # may change when a run is resumed
Report = Callable[[dict[str, Any]], None]


class Interrupted(KeyboardInterrupt):
    """The run received Ctrl-C or SIGTERM and wrote a checkpoint to resume from."""


@dataclass
class Progress:
    """The state of a run besides parameters, optimiser and random states; part of every checkpoint.

    Args:
        step: number of updates so far.
        seconds: time spent on updates, without evaluations.
        loss, tokens: sums since the last line of the log.
        logged_step, logged_seconds: step and seconds at the last line of the log.
        best: the evaluation record with the best score; None before the first evaluation.
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
    """Train and evaluate a model, and return the result, which is also written to result.json.

    Args:
        config: the config, such as `recipes.get` returns it.
        folder: where the run writes config.json, provenance.json, log.jsonl, tensorboard/, checkpoints/, result.json,
            and the models `final` and `best`, which `from_pretrained` reads.
        splits: the data; None loads the data set of the config from data_dir.
        resume: continue from the newest checkpoint in the folder, if there is one.
        report: called with every record of the log, and with {"kind": "step"} after each update.

    Raises `Interrupted` after Ctrl-C or SIGTERM, once a checkpoint is written, and `claims.FolderInUseError` if another
    process trains in the folder.
    """
    with claims.claimed(Path(folder), is_main()) as claim:
        return Trainer(config, Path(folder), splits, data_dir, resume, report, claim).run()


class Trainer:
    """A run: `__init__` sets it up, `run` is the loop."""

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
        self.accelerator = build_accelerator(config)
        self.folder, self.report, self.claim = folder, report, claim
        self.splits = data.load(config.data, data_dir, **config.data_options) if splits is None else splits
        self.task = tasks.get(config.task)
        self.task.check_data(self.splits)
        self.config = config = self.task.fitted(config, self.splits.info)
        self.steps_per_epoch = steps_per_epoch(dataset_size(self.splits.train), config)
        self.steps = config.total_steps(self.steps_per_epoch)
        self.share = build_share(config, self.accelerator)
        micro_batches = config.accumulate * self.share.size
        if config.batch_size % micro_batches:
            raise ValueError(
                f"batch_size {config.batch_size} cannot be split into {config.accumulate} micro-batches for each of "
                f"{self.share.size} shares of the processes; pass a multiple of {micro_batches}."
            )
        if config.select_on == "valid" and self.splits.valid is None:
            raise ValueError(
                f"{config.data} has no validation part. Pass select_on=test; the best evaluation is then labelled as "
                "chosen on the test set."
            )
        if config.graphs:
            check_graphs(config, self.accelerator)
        if self.accelerator.is_fsdp2 and config.task == "decision":
            raise NotImplementedError("episodes need the whole model, which parallel=fsdp shards; pass parallel=ddp.")
        checkpoint = checkpoints.latest(folder / "checkpoints")
        self._check_folder(resume, checkpoint)
        set_seed(config.seed)
        objective = tasks.Objective(self.task.build(config), self.task, config, self.share.context)
        if config.graphs:
            fix_shapes(objective)
        optimiser = build_optimiser(objective, config.optimiser, self.accelerator.device, capturable=config.graphs)
        if config.compile:
            objective.compile()
        self.objective, self.optimiser = self.accelerator.prepare(objective, optimiser)
        # from here on each rank has its own seed: dropout differs between ranks, the initial parameters above do not
        set_seed(config.seed, device_specific=True)
        self.progress = Progress()
        if checkpoint is not None:
            restored = checkpoints.restore(self.accelerator, self.objective, self.optimiser, checkpoint, config.seed)
            self.progress = Progress(**restored)
        self._prepare_folder(resumed=checkpoint is not None)
        self.log = RunLog(folder, self.progress.step, self.accelerator.is_main_process)

    def run(self) -> dict[str, Any]:
        config, progress = self.config, self.progress
        self.report({"kind": "start", "step": progress.step, "steps": self.steps, "config": to_dict(config)})
        # Accumulated on the device, and read only for the log. A checkpoint holds the sums over all ranks, so only
        # rank 0 starts from them.
        is_rank_0 = self.accelerator.is_main_process
        self._loss = torch.tensor(progress.loss if is_rank_0 else 0.0, device=self._device)
        self._tokens = torch.tensor(progress.tokens if is_rank_0 else 0, device=self._device)
        if config.graphs:
            self._rate = torch.tensor(config.optimiser.lr, device=self._device)
            for group in self.optimiser.param_groups:
                group["lr"] = self._rate
            self._graphed = GraphedUpdates(lambda batch: self._compute([batch]), self.optimiser.optimizer.zero_grad)
        batches = self.batches(progress.step)
        final: dict[str, Any] | None = None
        try:
            with stop_requests() as stop_requested:
                while progress.step < self.steps:
                    started = time.perf_counter()
                    self._update([next(batches) for _ in range(config.accumulate)])
                    if self.claim is not None:
                        self.claim.check()
                    last = progress.step == self.steps
                    if last or progress.step % config.log_every == 0:
                        self._log_update(started)
                    else:
                        progress.seconds += time.perf_counter() - started
                    self.report({"kind": "step", "step": progress.step})
                    if last or progress.step % (config.eval_every or config.eval_epochs * self.steps_per_epoch) == 0:
                        final = self._evaluate_and_keep_best()
                    stop = self._any_rank(stop_requested())
                    if last or stop or progress.step % config.checkpoint_every == 0:
                        self._save()
                    if stop and not last:
                        raise Interrupted(f"stopped at update {progress.step} of {self.steps}.")
            return self._finish(final)
        finally:
            self.log.close()

    def _update(self, micro_batches: list[tasks.Batch]) -> None:
        """One optimiser step over the micro-batches of gradient accumulation.

        The loss is the mean over all examples, or tokens, of all micro-batches and ranks, even if their sizes differ.
        """
        config, progress = self.config, self.progress
        micro_batches = [
            self.task.augmented(send_to_device(batch, self._device, non_blocking=True), config)
            for batch in micro_batches
        ]
        rate = config.schedule.rate(config.optimiser.lr, progress.step, self.steps)
        if config.graphs:
            self._rate.fill_(rate)
            self._graphed(micro_batches[0])
        else:
            for group in self.optimiser.param_groups:
                group["lr"] = rate
            self._compute(micro_batches)
            self.optimiser.optimizer.zero_grad()
        progress.step += 1

    def _compute(self, micro_batches: list[tasks.Batch]) -> None:
        """Run forward, backward and optimiser step, without synchronising the device."""
        config, accelerator = self.config, self.accelerator
        count = torch.stack([self.task.count(batch) for batch in micro_batches]).sum()
        if accelerator.num_processes > 1:
            count = accelerator.reduce(count * self.share.counts)
        count = count.clamp_min(1)
        for i, batch in enumerate(micro_batches):
            self._tokens += self.task.tokens(batch) * self.share.counts
            last = i == len(micro_batches) - 1
            with nullcontext() if last else accelerator.no_sync(self.objective):
                with accelerator.autocast():
                    loss = self.objective(batch) / count
                # DDP averages over ranks; multiply by the world size to get the sum
                accelerator.backward(loss * accelerator.num_processes)
            self._loss += loss.detach() * self.share.counts
        if config.optimiser.clip is not None:
            accelerator.clip_grad_norm_(self.objective.parameters(), config.optimiser.clip)
        # Bypass accelerate's wrapper unless fp16 needs its GradScaler: it probes for optional imports on every step
        optimiser = self.optimiser if accelerator.scaler else self.optimiser.optimizer
        optimiser.step()

    def _log_update(self, started: float) -> None:
        progress = self.progress
        sums = torch.stack([self._loss, self._tokens.to(self._loss)])
        loss, tokens = self.accelerator.reduce(sums).tolist()  # synchronises, so that the time includes the kernels
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
        if not math.isfinite(loss):
            self._check_parameters(loss)
        self._loss.zero_()
        self._tokens.zero_()
        progress.logged_step, progress.logged_seconds = progress.step, progress.seconds

    def _check_parameters(self, loss: float) -> None:
        """Raise if a parameter is NaN or infinite, since no later update can repair it."""
        shards = (p.to_local() if isinstance(p, DTensor) else p for p in self.objective.parameters())
        not_finite = torch.tensor(0.0, device=self._device)
        for shard in shards:
            not_finite += 1 - shard.isfinite().all().to(not_finite)
        if self.accelerator.reduce(not_finite).item():
            config = self.config
            raise FloatingPointError(
                f"the run diverged: at update {self.progress.step} the loss is {loss} and parameters are not finite. "
                f"Train again in another folder with an optimiser.lr below {config.optimiser.lr:g}"
                + (", or a smaller optimiser.clip." if config.precision == "float32" else ", or precision=float32.")
            )

    def _evaluate_and_keep_best(self) -> dict[str, Any]:
        record = self._evaluate(self.config.select_on)
        best = self.progress.best
        sign = 1 if self.task.higher_is_better else -1
        if best is not None and math.isnan(best[self.task.metric]):
            best = None  # NaN compares as False, so no later score would replace it
        if best is None or sign * record[self.task.metric] > sign * best[self.task.metric]:
            self.progress.best = record
            self._write_model("best")
        return record

    def _evaluate(self, split: str, **labels: Any) -> dict[str, Any]:
        """Evaluate the model on a split, write the record to the log, and return it."""
        last = self.progress.step == self.steps
        scores = self.task.evaluate(self._unwrapped().model, self.splits, self.config, last=last)
        if scores is None:
            dataset = getattr(self.splits, split)
            length = padded_length(self.config, self.splits)
            scores = evaluate(self.accelerator, self.objective, dataset, self.config, length, self.share)
        epoch = round(self.progress.step / self.steps_per_epoch, 4)
        record = {"kind": "eval", "split": split, "step": self.progress.step, "epoch": epoch, **labels, **scores}
        self.log.write(record)
        self.report(record)
        return record

    def _finish(self, final: dict[str, Any] | None) -> dict[str, Any]:
        """Save the final model, evaluate it and the best one on the test set, and write the result."""
        config = self.config
        self._write_model("final")
        best = self.progress.best
        assert best is not None
        if config.select_on == "valid":
            final = self._evaluate("test", model="final")
            self._read_model("best")
            best = {**self._evaluate("test", model="best"), "step": best["step"], "epoch": best["epoch"]}
        elif final is None:  # resumed after the last update
            final = self._evaluate("test")
        labels = ("kind", "split", "model")
        result = {
            "recipe": config.recipe,
            "attention": config.model.attention,
            "seed": config.seed,
            "metric": self.task.metric,
            "final": {key: value for key, value in final.items() if key not in labels},
            "best": {key: value for key, value in best.items() if key not in labels},
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
        sums = torch.stack([self._loss, self._tokens.to(self._loss)])
        loss, tokens = self.accelerator.reduce(sums).tolist()
        self.progress.loss, self.progress.tokens = loss, round(tokens)
        folder, progress = self.folder / "checkpoints", asdict(self.progress)
        checkpoints.save(self.accelerator, self.objective, self.optimiser, folder, progress, self.config.keep)

    def _write_model(self, name: str) -> None:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state: dict[str, Any] = get_model_state_dict(self._unwrapped(), options=options)
        if self.accelerator.is_main_process:
            with torch.device("meta"):  # allocates no memory and draws no random numbers
                whole = tasks.Objective(self.task.build(self.config), self.task, self.config)
            # Clone, since an uneven shard is a view of a larger tensor, which would be saved as a whole.
            whole.load_state_dict({name: value.clone() for name, value in state.items()}, assign=True)
            whole.model.save_pretrained(self.folder / name)

    def _read_model(self, name: str) -> None:
        self.accelerator.wait_for_everyone()
        model = type(self._unwrapped().model).from_pretrained(self.folder / name)
        state = tasks.Objective(model, self.task, self.config).state_dict()
        if self.accelerator.is_fsdp2:
            self.objective.reshard()  # FSDP2 leaves the root's parameters unsharded after a forward without backward
        set_model_state_dict(self._unwrapped(), state, options=StateDictOptions(full_state_dict=True))

    def _unwrapped(self) -> tasks.Objective:
        return self.accelerator.unwrap_model(self.objective)

    @property
    def _device(self) -> torch.device:
        return self.accelerator.device

    def batches(self, start: int) -> Iterator[tasks.Batch]:
        """The micro-batches of this rank, starting at step `start`."""
        dataset, config = self.splits.train, self.config
        order = MicroBatches(dataset_size(dataset), config, start, self.steps, self.share.rank, self.share.size)
        length = padded_length(config, self.splits)
        if resident.applies(dataset, config, self._device):
            return resident.batches(dataset, order, length, self._device)
        items = SeededItems(dataset, config.seed)
        return load_batches(items, order, partial(data.collate, length=length), config.workers, self._device)

    def _any_rank(self, stop: bool) -> bool:
        """Whether `stop` is True on any rank. Several ranks check only every `log_every` steps, to save reductions."""
        if self.accelerator.num_processes == 1:
            return stop
        if self.progress.step % self.config.log_every:
            return False
        return bool(self.accelerator.reduce(torch.tensor(float(stop), device=self._device)).item())

    def _check_folder(self, resume: bool, checkpoint: Path | None) -> None:
        """Raise if the folder has a run that must not be overwritten, or one that cannot be resumed."""
        if checkpoint is None:
            if (self.folder / RESULT).exists():
                raise FileExistsError(
                    f"{self.folder} has a finished run without checkpoints, as flowformer reproduce leaves one. Delete "
                    "it to train it anew, or choose another folder."
                )
            return
        if not resume:
            raise FileExistsError(f"{self.folder} has a run already. Resume it, or choose another folder.")
        saved = to_dict(load_config(self.folder / CONFIG))
        current = to_dict(self.config)
        different = [key for key in current if current[key] != saved.get(key) and key not in LAYOUT]
        if different:
            raise ValueError(
                f"{self.folder} has a run of another config: {', '.join(different)} differ. Resume it with the config "
                "it was started with, or choose another folder."
            )
        check_same_data(self.folder, self.config.data, self.splits.info)

    def _prepare_folder(self, resumed: bool) -> None:
        if self.accelerator.is_main_process:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_atomically(self.folder / CONFIG, json.dumps(to_dict(self.config), indent=2) + "\n")
            facts = provenance(self.splits.info, self._device, self.accelerator.num_processes)
            write_provenance(self.folder, facts, resumed=resumed)
        self.accelerator.wait_for_everyone()


@contextmanager
def stop_requests() -> Iterator[Callable[[], bool]]:
    """Turn Ctrl-C and SIGTERM into a flag that the loop checks between updates; a second Ctrl-C interrupts at once."""
    requested = False

    def handle(number: int, frame: Any) -> None:
        nonlocal requested
        if requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        requested = True

    try:
        previous = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # only the main thread may handle signals
        previous = {}
    try:
        yield lambda: requested
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
