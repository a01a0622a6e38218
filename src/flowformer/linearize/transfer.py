"""Attention transfer and LoRA: the two stages of `Student.transfer`, with checkpoints and resuming."""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from .._utils import atomic_file, write_atomically
from ..integrations.transformers.linearized_heads import FlowHeads
from ..train.engine import without_gpu
from ..train.loop import Interrupted, stop_requests
from ..train.optim import Optimiser, build_optimiser
from ..train.record import LOG, RunLog
from .config import LinearizeConfig
from .evaluate import HeldOut, check_reads_text, compare
from .pair import Pair
from .text import (
    Batches,
    GivenBatches,
    PackedRows,
    PaddedRows,
    checksum,
    language_documents,
    special_token,
    special_tokens_around,
    tokenize,
)

if TYPE_CHECKING:
    from .student import Student

Report = Callable[[dict[str, Any]], None]
CHECKPOINT, PAGE = "transfer.pt", "results.md"
WARMUP = 0.02  # fraction of a stage
MAX_GRADIENT_NORM = 1.0  # gradient clipping in stage 2


@dataclass
class Stage:
    """Cost and results of a stage. The first one, "exchanged", is the student before training."""

    name: str
    steps: int = 0
    tokens: int = 0
    minutes: float = 0.0
    loss: float | None = None  # mean loss over the last 20 updates
    errors: list[float] = field(default_factory=list)  # per layer: squared error / variance of the softmax result
    scores: dict[str, float] = field(default_factory=dict)


@dataclass
class TransferReport:
    """The stages of a transfer, in order."""

    stages: list[Stage]

    def __str__(self) -> str:
        return page(self)


@dataclass
class Progress:
    """Current stage and position in it, and the finished stages; saved in every checkpoint."""

    stage: str = "transfer"
    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    stages: list[dict[str, Any]] = field(default_factory=list)


@torch.enable_grad()
def transfer(
    student: Student,
    texts: Iterable[str | Tensor | Mapping[str, Tensor]],
    config: LinearizeConfig,
    evaluate: Iterable[str | Tensor] | None,
    folder: str | Path | None,
    resume: bool,
    report: Report | None,
) -> TransferReport:
    """See `Student.transfer`."""
    if student.merged:
        raise ValueError(
            "the LoRA updates of this student are merged into its weights, so that its teacher no longer exists. "
            "Linearize the original model again."
        )
    config = replace(config, length=min(config.length, student.longest))
    student.exchange(config)
    if not _learned_parameters(student.model, with_lora=False):
        config = replace(config, transfer_tokens=0)
    batches = make_batches(student, texts, config)
    held_out = None if evaluate is None else HeldOut.of(student, evaluate, config)
    run = _Run(student, config, batches, held_out, None if folder is None else Path(folder), report)
    return run(resume)


def make_batches(student: Student, texts: Iterable[Any], config: LinearizeConfig) -> Batches:
    """Return documents as packed or padded rows, whichever the model can take, or given batches unchanged."""
    if isinstance(texts, str | Tensor | Mapping):
        raise TypeError(f"texts must be a list of documents, got one {type(texts).__name__}. Pass [text].")
    texts = list(texts)
    if texts and all(isinstance(text, Mapping) for text in texts):
        return GivenBatches(texts)
    check_reads_text(student, "texts")
    documents = tokenize(texts, student.tokenizer, student.model.config.get_text_config().vocab_size)
    if not documents:
        raise ValueError("there is no text to learn from: no document has a token.")
    tokenizer, model_config = student.tokenizer, student.model.config
    before, after = ([], []) if student.is_language_model else special_tokens_around(tokenizer)
    if student.is_language_model:
        documents = language_documents(documents, tokenizer, model_config)
        if Pair(student, config).isolates_packed_documents():
            return PackedRows(documents, config.length, config.seed)
        documents = [piece for document in documents for piece in document.split(config.length)]
    pad = special_token(tokenizer, model_config, "pad") or 0
    return PaddedRows(documents, config.length, pad, before, after, config.seed)


class _Run:
    """One call of `Student.transfer`: the training loop, checkpoints and the log."""

    def __init__(
        self,
        student: Student,
        config: LinearizeConfig,
        batches: Batches,
        held_out: HeldOut | None,
        folder: Path | None,
        report: Report | None,
    ) -> None:
        self.accelerator = Accelerator(cpu=without_gpu())
        ranks = self.accelerator.num_processes
        if ranks > 1:
            student.model.to(self.accelerator.device)
        if config.batch_size % ranks:
            raise ValueError(f"a batch of {config.batch_size} rows cannot be shared by {ranks} processes.")
        self.student, self.config, self.batches, self.held_out = student, config, batches, held_out
        self.folder, self.report = folder, report or (lambda record: None)
        self.progress = Progress()
        self.pair = Pair(student, config)

    def __call__(self, resume: bool) -> TransferReport:
        saved = self._open_folder(resume)
        model = self.student.model.eval()
        trainable = [parameter.requires_grad for parameter in model.parameters()]
        weights = list(model.parameters())
        try:
            with stop_requests() as self.stop_requested:
                if not self.progress.stages:
                    self._finish_stage(Stage("exchanged", errors=self._errors(0)))
                if self.progress.stage == "transfer":
                    self._train(self.config.transfer_lr, saved)
                    saved = None
                if self.config.lora_rank and self.config.lora_tokens:
                    self.pair.add_lora(self.config.lora_rank, self.config.lora_layers, self.config.seed)
                if self.progress.stage == "lora":
                    self._train(self.config.lora_lr, saved)
                elif saved is not None:  # the checkpoint of a finished transfer
                    self._load(saved)
            self.pair.merge()
        except BaseException:
            # saved with its LoRA layers, the model would have weights that from_pretrained does not know
            self.pair.discard_lora()
            raise
        finally:
            if self.log is not None:
                self.log.close()
            for weight, before in zip(weights, trainable, strict=True):
                weight.requires_grad_(before)
        self.student.model.eval()
        return TransferReport([Stage(**stage) for stage in self.progress.stages])

    def _open_folder(self, resume: bool) -> dict[str, Any] | None:
        """Check and create the folder; return the checkpoint to resume from, if there is one."""
        self.log = None
        if self.folder is None:
            if resume:
                raise ValueError("there is nothing to resume without a folder. Pass the folder of the transfer.")
            return None
        path, saved = self.folder / CHECKPOINT, None
        # the first 64 numbers of each weight: reading all of a large model takes long
        weights = (parameter.detach().flatten()[:64] for parameter in self.student.model.parameters())
        self.checksums = {"model": checksum(weights), "text": checksum(self.batches.tensors())}
        if (self.folder / LOG).exists() and not resume:
            raise FileExistsError(f"{self.folder} holds another transfer. Resume it, or choose another folder.")
        if not (self.folder / LOG).exists() and self.folder.is_dir() and any(self.folder.iterdir()):
            raise FileExistsError(f"{self.folder} has files that are no transfer's. Choose another folder.")
        if path.exists():
            saved = _read_checkpoint(path)
            current = self.config.to_dict() | {"minutes": None}
            if saved["config"] | {"minutes": None} != current:
                differ = [name for name in current if name != "minutes" and saved["config"].get(name) != current[name]]
                raise ValueError(f"{path} was written with another {', '.join(differ)}. Resume with the same config.")
            for name, written in saved.get("checksums", {}).items():
                if written != self.checksums[name]:
                    if name == "model" and self.student.trained:
                        raise ValueError(
                            f"{path} was written with another model. This student has been trained since: linearize "
                            "the original model again, then resume."
                        )
                    raise ValueError(f"{path} was written with another {name}. Resume with the same.")
            self.progress = Progress(**saved["progress"])
        self.accelerator.wait_for_everyone()  # rank 0 must not write before all ranks have checked the folder
        if self.accelerator.is_main_process:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_atomically(self.folder / "config.json", json.dumps(self.config.to_dict(), indent=2) + "\n")
        self.accelerator.wait_for_everyone()
        self.log = RunLog(self.folder, self._updates(), self.accelerator.is_main_process)
        return saved

    def _train(self, lr: float, saved: dict[str, Any] | None) -> None:
        """Train the current stage to its end.

        Args:
            saved: checkpoint to continue from.
        """
        progress, name = self.progress, self.progress.stage
        learned = _learned_parameters(self.student.model, with_lora=name == "lora")
        for parameter in self.student.model.parameters():
            parameter.requires_grad_(False)
        for parameter in learned.values():
            parameter.requires_grad_(True)
        optimizer = build_optimiser(
            nn.ParameterList(learned.values()), Optimiser(self.config.optimizer, lr), self.student.model.device
        )
        if saved is not None:
            self._load(saved)
            if saved["optimizer"] is not None:
                optimizer.load_state_dict(saved["optimizer"])
        self.student.trained = True
        recent_losses: deque[float] = deque(maxlen=20)
        last_checkpoint = time.monotonic()
        with self._checkpointing(name == "lora"):
            while (done := self._fraction_done()) < 1:
                began = time.monotonic()
                for group in optimizer.param_groups:
                    group["lr"] = lr * min(1.0, (done + 1e-3) / WARMUP) * (1 + math.cos(math.pi * done)) / 2
                optimizer.zero_grad()
                loss, tokens = self._update(name, list(learned.values()))
                if not math.isfinite(loss):
                    raise FloatingPointError(
                        f"the transfer diverged: the loss of update {progress.step + 1} of stage {name!r} is {loss}. "
                        f"Start again in another folder with a {name}_lr below {lr:g}"
                        + ("." if self.config.precision == "fp32" else ', or precision="fp32".')
                    )
                optimizer.step()
                recent_losses.append(loss)
                progress.step += 1
                progress.tokens += tokens
                progress.seconds += time.monotonic() - began
                self._record(loss, tokens / (time.monotonic() - began))
                if self._stop_agreed():
                    self._save(learned, optimizer)
                    raise Interrupted(f"stopped at update {progress.step} of stage {name!r}.")
                if time.monotonic() - last_checkpoint > 60 * self.config.checkpoint_minutes:
                    self._save(learned, optimizer)
                    last_checkpoint = time.monotonic()
        if progress.step:
            errors = self._errors(progress.step)
            mean = sum(recent_losses) / len(recent_losses) if recent_losses else None
            stage = Stage(name, progress.step, progress.tokens, progress.seconds / 60, mean, errors)
        else:  # no update was made: errors and scores are the previous stage's
            before = progress.stages[-1]
            stage = Stage(name, errors=before["errors"], scores=before["scores"])
        self._finish_stage(stage)
        self.progress.stage, self.progress.step = ("lora", 0) if name == "transfer" else ("done", 0)
        self.progress.tokens, self.progress.seconds = 0, 0.0
        self._save(learned, None)

    def _update(self, stage: str, parameters: list[nn.Parameter]) -> tuple[float, int]:
        """Compute the gradients of one update, averaged over ranks; return its loss and its number of tokens."""
        batch = self._batch(self.progress.step)
        if stage == "transfer":
            loss = torch.stack(self.pair.errors(batch, learns=True)).mean()
        else:
            loss = self.pair.loss(batch)
            loss.backward()
        if self.accelerator.num_processes > 1:
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad = self.accelerator.reduce(parameter.grad, "mean")
            loss = self.accelerator.reduce(loss.detach(), "mean")
        if stage == "lora":
            nn.utils.clip_grad_norm_(parameters, MAX_GRADIENT_NORM)
        tokens = batch.get("attention_mask", batch.get("input_ids", next(iter(batch.values()))))
        count = int(tokens.sum()) if "attention_mask" in batch else tokens.shape[0] * (tokens.shape[1:2] or (1,))[0]
        return loss.item(), count * self.accelerator.num_processes

    def _batch(self, step: int) -> dict[str, Tensor]:
        """Return this rank's rows of update `step`."""
        ranks = self.accelerator.num_processes
        return self.batches.batch(step, self.config.batch_size, self.accelerator.process_index, ranks)

    def _fraction_done(self) -> float:
        """Return the completed fraction of the stage, by tokens or by time; the same on all ranks."""
        config, progress = self.config, self.progress
        budgets = {"transfer": config.transfer_tokens, "lora": config.lora_tokens}
        if not budgets[progress.stage]:
            return 1.0
        done = progress.tokens / budgets[progress.stage]
        if config.minutes is not None:
            seconds = 60 * config.minutes * budgets[progress.stage] / sum(budgets.values())
            done = max(done, progress.seconds / seconds)
        if self.accelerator.num_processes > 1:
            done = self.accelerator.reduce(torch.tensor(done, device=self.accelerator.device), "mean").item()
        return done

    def _stop_agreed(self) -> bool:
        """Whether any rank got a signal to stop.

        Signals reach the ranks at different times. All must stop after the same update, or a rank would wait for the
        others in the reductions of the next one.
        """
        stop = self.stop_requested()
        if self.accelerator.num_processes > 1:
            flag = torch.tensor(float(stop), device=self.accelerator.device)
            stop = bool(self.accelerator.reduce(flag, "sum").item())
        return stop

    @contextmanager
    def _checkpointing(self, wanted: bool) -> Iterator[None]:
        """Enable gradient checkpointing inside the context, if `wanted` and if the config asks for it.

        transformers checkpoints only layers in training mode. All other modules stay in eval mode: with dropout the
        student would differ from the model that is evaluated.
        """
        if not wanted or not self.config.gradient_checkpointing:
            yield
            return
        model = self.student.model
        # transformers 5.23 renamed these methods and warns when the old names are called
        kind = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
        getattr(model, f"{kind}_checkpointing_enable")({"use_reentrant": False})
        for module in model.modules():
            module.training = hasattr(module, "gradient_checkpointing")
        try:
            yield
        finally:
            getattr(model, f"{kind}_checkpointing_disable")()
            model.eval()

    def _errors(self, step: int) -> list[float]:
        """Return the error of each exchanged layer on the rows of update `step`."""
        return [error.item() for error in self.pair.errors(self._batch(step), learns=False)]

    def _finish_stage(self, stage: Stage) -> None:
        """Evaluate on the held-out text, and write the stage to the log and the results page."""
        if self.held_out is not None and not stage.scores:
            stage.scores = compare(self.pair, self.held_out)
        record = {"kind": "stage", "split": "valid", "stage": stage.name, "step": self._updates()}
        self.progress.stages.append(asdict(stage))
        self.report(record | {"loss": stage.loss, "scores": stage.scores, "errors": stage.errors})
        if self.log is not None:
            self.log.write(record | stage.scores)
        if self.folder is not None and self.accelerator.is_main_process:
            report = TransferReport([Stage(**each) for each in self.progress.stages])
            write_atomically(self.folder / PAGE, page(report))

    def _record(self, loss: float, speed: float) -> None:
        """Report and log an update; speed is in tokens per second."""
        record = {"kind": "train", "stage": self.progress.stage, "step": self._updates(), "loss": loss}
        record |= {"tokens_per_second": speed, "done": self._fraction_done()}
        self.report(record)
        if self.log is not None:
            self.log.write(record)

    def _updates(self) -> int:
        """Return the number of updates over all stages, the x axis of the log."""
        return sum(stage["steps"] for stage in self.progress.stages) + self.progress.step

    def _save(self, learned: Mapping[str, Tensor], optimizer: torch.optim.Optimizer | None) -> None:
        """Write a checkpoint. Only trained parameters are saved: all other weights are those of the given model."""
        if self.folder is None or not self.accelerator.is_main_process:
            return
        content = {
            "config": self.config.to_dict(),
            "checksums": self.checksums,
            "progress": asdict(self.progress),
            "learned": {name: parameter.detach().cpu() for name, parameter in learned.items()},
            "optimizer": None if optimizer is None else optimizer.state_dict(),
        }
        with atomic_file(self.folder / CHECKPOINT, "wb") as file:
            torch.save(content, file)

    def _load(self, saved: dict[str, Any]) -> None:
        """Load the trained parameters of a checkpoint.

        A checkpoint from the end of stage 1 has no LoRA weights; stage 2 then starts from fresh ones.
        """
        with torch.no_grad():
            for name, parameter in self.student.model.named_parameters():
                if name in saved["learned"]:
                    parameter.copy_(saved["learned"][name])


def _read_checkpoint(path: Path) -> dict[str, Any]:
    """Read a checkpoint. torch's errors about a damaged file name neither the file nor the damage."""
    try:
        saved: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, UnpicklingError) as error:
        raise ValueError(f"{path} is damaged: {error}. Delete it; a resumed transfer then begins anew.") from error
    return saved


def _learned_parameters(model: nn.Module, with_lora: bool) -> dict[str, nn.Parameter]:
    """Return the trainable parameters by name: the `FlowHeads` and, in stage 2, the LoRA weights."""
    heads = {id(p) for module in model.modules() if isinstance(module, FlowHeads) for p in module.parameters()}
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if id(parameter) in heads or (with_lora and "lora_" in name)
    }


def page(report: TransferReport) -> str:
    """Return a Markdown table with one column per stage."""
    names = list(dict.fromkeys(name for stage in report.stages for name in stage.scores))
    rows = {
        "stage": [stage.name for stage in report.stages],
        "tokens": [f"{stage.tokens}" for stage in report.stages],
        "minutes": [f"{stage.minutes:.1f}" for stage in report.stages],
        "loss": ["" if stage.loss is None else f"{stage.loss:.4f}" for stage in report.stages],
        "error of attention": [f"{sum(stage.errors) / len(stage.errors):.3f}" for stage in report.stages],
    }
    # a resumed transfer may have been evaluated in some stages only
    for name in names:
        rows[name] = [f"{stage.scores[name]:.4f}" if name in stage.scores else "" for stage in report.stages]
    lines = [f"| {name} | " + " | ".join(cells) + " |" for name, cells in rows.items()]
    return "\n".join([lines[0], "| --- " * (1 + len(report.stages)) + "|", *lines[1:]]) + "\n"
