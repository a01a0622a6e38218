"""Teacher and student: how each runs, what the student's attention and outputs learn, and its low-rank updates.

Both are one set of weights: the teacher is what they are with softmax and without the low-rank update.

Shapes: B rows, N tokens, H heads, E values, V words.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.pytorch_utils import Conv1D

from .._utils import optional_import
from ..integrations.transformers.attention import exchanged_attention, flow_attention_mask, tokens_of
from ..integrations.transformers.cache import NAME as FLOW
from ..integrations.transformers.linearized_heads import FlowHeads
from ..integrations.transformers.served import is_flow, parts_of
from ..integrations.transformers.softmax import softmax_attention
from .config import LinearizeConfig
from .divergence import kl_divergence

if TYPE_CHECKING:
    from .student import Student

NAME = "flow_attention_transfer"


def transfer_attention_forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """The softmax attention of the teacher; the layer's heads learn its result from the same queries, keys and values.

    Their gradient is taken here, so that the graph of one layer at a time is in memory. Arguments are those of
    `flow_attention_forward`; the teacher has no dropout.
    """
    scaling, softcap = options.get("scaling"), options.get("softcap")
    tokens = tokens_of(module, query, key, attention_mask, options.get("is_causal"), None, options)
    taught = softmax_attention(query, key, value, tokens, scaling, softcap)
    heads = getattr(module, "flow", None)
    if isinstance(heads, FlowHeads):
        query, key, value = query.detach(), key.detach(), value.detach()
        with torch.set_grad_enabled(heads.learns):
            learned = exchanged_attention(heads, query, key, value, tokens, scaling, softcap)
            error = relative_error(learned, taught.detach(), tokens.mask)
            if heads.learns:
                error.backward()
        heads.error = error.detach()
    return taught.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, transfer_attention_forward)
AttentionMaskInterface.register(NAME, flow_attention_mask)


def relative_error(value: Tensor, truth: Tensor, mask: Tensor | None) -> Tensor:
    """Σ (value − truth)² / Σ (truth − its mean over tokens)², for (B, H, N, E) with mask (B, N)."""
    value, truth = (x.transpose(1, 2).flatten(2) for x in (value.float(), truth.float()))
    value, truth = (x.flatten(0, 1) if mask is None else x[mask] for x in (value, truth))
    spread = (truth - truth.mean(0)).square().sum()
    return (value - truth).square().sum() / spread.clamp_min(torch.finfo(spread.dtype).tiny)


@contextmanager
def attention_of(model: nn.Module, name: str) -> Iterator[None]:
    """Run the layers with Flow-Attention by another attn_implementation."""
    configs = [part.config for part in parts_of(model) if is_flow(part.config)]  # type: ignore[arg-type]
    before = [config._attn_implementation for config in configs]
    try:
        for config in configs:
            config._attn_implementation_internal = name
        yield
    finally:
        for config, implementation in zip(configs, before, strict=True):
            config._attn_implementation_internal = implementation


class Pair:
    """Teacher and student, two ways to run one set of weights."""

    def __init__(self, student: Student, config: LinearizeConfig) -> None:
        self.student, self.model = student, student.model
        self.adapter: Any = None
        device = self.model.device
        bf16 = config.precision == "bf16" or (config.precision == "auto" and device.type == "cuda")
        self.precision = lambda: torch.autocast(device.type, torch.bfloat16) if bf16 else nullcontext()
        self.caches = student.takes("use_cache")

    def _run(self, batch: dict[str, Tensor]) -> Tensor:
        inputs = {name: x.to(self.model.device) for name, x in batch.items()}
        if self.caches:
            inputs["use_cache"] = False  # type: ignore[assignment]
        with self.precision():
            outputs = self.model(**inputs)
        logits = getattr(outputs, "logits", None)
        result: Tensor = outputs[0] if logits is None else logits
        return result

    @torch.no_grad()
    def taught(self, batch: dict[str, Tensor]) -> Tensor:
        """What the teacher says: logits (B, N, V), or the last hidden states of a model without a head."""
        without = nullcontext() if self.adapter is None else self.adapter.disable_adapter()
        with attention_of(self.model, self.student.softmax), without:
            return self._run(batch)

    def learned(self, batch: dict[str, Tensor]) -> Tensor:
        """What the student says."""
        return self._run(batch)

    def keeps_apart(self) -> bool:
        """Whether documents packed into a row do not see each other, neither with softmax nor with Flow-Attention.

        Some models do not read the positions by which a document begins, and recurrent layers carry one into the next.
        A document sees another if it has a gradient with respect to its embeddings.
        """
        if not self.student.takes("position_ids"):
            return False
        tokens = torch.arange(8)[None] % self.model.config.get_text_config().vocab_size
        batch = {"input_ids": tokens, "position_ids": torch.arange(4).repeat(2)[None]}
        embedded: list[Tensor] = []

        def begin_graph(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            embedded.append(output.detach().requires_grad_())
            return embedded[-1].clone()  # some models scale it in place

        hook = self.model.get_input_embeddings().register_forward_hook(begin_graph)
        try:
            for attention in (self.student.softmax, FLOW):
                with torch.enable_grad(), attention_of(self.model, attention):
                    second = self._run(batch)[:, 4:].sum()
                (gradient,) = torch.autograd.grad(second, embedded[-1])
                if gradient[:, :4].any():
                    return False
        finally:
            hook.remove()
        return True

    def errors(self, batch: dict[str, Tensor], learns: bool) -> list[Tensor]:
        """The error of each attention on the teacher's inputs; if it learns, its gradients are added."""
        heads = self.student.heads
        for each in heads:
            each.learns = learns
        with torch.no_grad(), attention_of(self.model, NAME):
            self._run(batch)
        return [each.error for each in heads]  # type: ignore[misc]

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        """How far the student is from the teacher: KL per token, or the relative error of hidden states."""
        taught, learned = self.taught(batch), self.learned(batch)
        mask = batch.get("attention_mask")
        if mask is not None and taught.dim() == 3:
            mask = mask.to(taught.device).bool()
            taught, learned = taught[mask], learned[mask]
        if getattr(self.model, "get_output_embeddings", lambda: None)() is not None:
            return kl_divergence(learned.flatten(0, -2), taught.flatten(0, -2))
        taught, learned = (x.float().flatten(0, -2) for x in (taught, learned))
        return (taught - learned).square().sum() / (taught - taught.mean(0)).square().sum()

    def add_lora(self, rank: int, layers: str, seed: int = 0) -> None:
        """Low-rank updates of linear layers, of those of attention or of all; they begin as nothing."""
        peft = optional_import("peft", "hf")
        head = self.model.get_output_embeddings() if hasattr(self.model, "get_output_embeddings") else None
        owners = self.student.layers if layers == "attention" else [self.model]
        chosen = {id(m) for owner in owners for m in owner.modules() if isinstance(m, nn.Linear | Conv1D)} - {id(head)}
        targets = [name for name, module in self.model.named_modules() if id(module) in chosen]
        options = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets)
        with torch.random.fork_rng():
            torch.manual_seed(seed)  # one factor is random: the same on all ranks, and after an interruption
            self.adapter = peft.get_peft_model(self.model, options)

    def merge(self) -> None:
        if self.adapter is not None:
            self.student.model = self.model = self.adapter.merge_and_unload()
            self.adapter = None
