"""Teacher and student: forward passes, losses and LoRA updates.

Teacher and student share one set of weights. The teacher runs with softmax attention and without the LoRA updates.

Shapes: B rows, N tokens, H heads, E value features, V vocabulary size.
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
    """Run the teacher's softmax attention, and train the layer's `FlowHeads` to reproduce its result.

    Both attentions get the same queries, keys and values. The backward pass of the heads runs here, so that only one
    layer's graph is in memory. Arguments are those of `flow_attention_forward`, without dropout.
    """
    scaling, softcap = options.get("scaling"), options.get("softcap")
    tokens = tokens_of(module, query, key, attention_mask, options.get("is_causal"), None, options)
    target = softmax_attention(query, key, value, tokens, scaling, softcap)
    heads = getattr(module, "flow", None)
    if isinstance(heads, FlowHeads):
        query, key, value = query.detach(), key.detach(), value.detach()
        with torch.set_grad_enabled(heads.learns):
            result = exchanged_attention(heads, query, key, value, tokens, scaling, softcap)
            error = relative_error(result, target.detach(), tokens.mask)
            if heads.learns:
                error.backward()
        heads.error = error.detach()
    return target.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, transfer_attention_forward)
AttentionMaskInterface.register(NAME, flow_attention_mask)


def relative_error(value: Tensor, truth: Tensor, mask: Tensor | None) -> Tensor:
    """Return Σ (value − truth)² / Σ (truth − mean of truth over tokens)² for (B, H, N, E) with a mask (B, N)."""
    value, truth = (x.transpose(1, 2).flatten(2) for x in (value.float(), truth.float()))
    value, truth = (x.flatten(0, 1) if mask is None else x[mask] for x in (value, truth))
    spread = (truth - truth.mean(0)).square().sum()
    return (value - truth).square().sum() / spread.clamp_min(torch.finfo(spread.dtype).tiny)


@contextmanager
def use_attention(model: nn.Module, name: str) -> Iterator[None]:
    """Switch the layers that run Flow-Attention to another attn_implementation inside the context."""
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
    """Teacher and student, which share one set of weights."""

    def __init__(self, student: Student, config: LinearizeConfig) -> None:
        self.student, self.model = student, student.model
        self.adapter: Any = None
        device = self.model.device
        bf16 = config.precision == "bf16" or (config.precision == "auto" and device.type == "cuda")
        self.precision = lambda: torch.autocast(device.type, torch.bfloat16) if bf16 else nullcontext()
        self.has_use_cache = student.takes("use_cache")

    def _run(self, batch: dict[str, Tensor]) -> Tensor:
        """Run the model without a cache; return its logits or, without a head, its first output."""
        inputs = {name: x.to(self.model.device) for name, x in batch.items()}
        if self.has_use_cache:
            inputs["use_cache"] = False  # type: ignore[assignment]
        with self.precision():
            outputs = self.model(**inputs)
        logits = getattr(outputs, "logits", None)
        result: Tensor = outputs[0] if logits is None else logits
        return result

    @torch.no_grad()
    def teacher_output(self, batch: dict[str, Tensor]) -> Tensor:
        """Return the teacher's logits (B, N, V), or the last hidden states of a model without a head."""
        without_lora = nullcontext() if self.adapter is None else self.adapter.disable_adapter()
        with use_attention(self.model, self.student.softmax), without_lora:
            return self._run(batch)

    def student_output(self, batch: dict[str, Tensor]) -> Tensor:
        """Return the student's logits, or the last hidden states of a model without a head."""
        return self._run(batch)

    def isolates_packed_documents(self) -> bool:
        """Whether packed documents do not see each other, neither with softmax nor with Flow-Attention.

        A document starts where `position_ids` restart. Some models ignore position_ids, and recurrent layers carry
        their state across the boundary. The test packs two documents: the second one sees the first if its output has
        a non-zero gradient with respect to the embeddings of the first.
        """
        if not self.student.takes("position_ids"):
            return False
        tokens = torch.arange(8)[None] % self.model.config.get_text_config().vocab_size
        batch = {"input_ids": tokens, "position_ids": torch.arange(4).repeat(2)[None]}
        embedded: list[Tensor] = []

        def begin_graph(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            embedded.append(output.detach().requires_grad_())
            return embedded[-1].clone()  # some models scale embeddings in place, which autograd refuses for a leaf

        hook = self.model.get_input_embeddings().register_forward_hook(begin_graph)
        try:
            for attention in (self.student.softmax, FLOW):
                with torch.enable_grad(), use_attention(self.model, attention):
                    second = self._run(batch)[:, 4:].sum()
                (gradient,) = torch.autograd.grad(second, embedded[-1])
                if gradient[:, :4].any():
                    return False
        finally:
            hook.remove()
        return True

    def errors(self, batch: dict[str, Tensor], learns: bool) -> list[Tensor]:
        """Return the relative error of each exchanged layer on the teacher's queries, keys and values.

        Args:
            learns: whether to add the gradients of the errors to the `.grad` of the heads.
        """
        heads = self.student.heads
        for each in heads:
            each.learns, each.error = learns, None
        with torch.no_grad(), use_attention(self.model, NAME):
            self._run(batch)
        errors = [each.error for each in heads if each.error is not None]
        if len(errors) < len(heads):
            modules = self.model.named_modules()
            names = [name for name, each in modules if isinstance(each, FlowHeads) and each.error is None]
            raise ValueError(
                f"the inputs do not run {len(names)} of the {len(heads)} attention layers to train, such as "
                f"{names[0].removesuffix('.flow')}. Pass batches with all inputs of {type(self.model).__name__}, or "
                "linearize only the part of it that reads these."
            )
        return errors

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        """Return KL(teacher ‖ student) per token, or the relative error of the hidden states without a head."""
        teacher, student = self.teacher_output(batch), self.student_output(batch)
        mask = batch.get("attention_mask")
        if mask is not None and teacher.dim() == 3:
            mask = mask.to(teacher.device).bool()
            teacher, student = teacher[mask], student[mask]
        if getattr(self.model, "get_output_embeddings", lambda: None)() is not None:
            return kl_divergence(student.flatten(0, -2), teacher.flatten(0, -2))
        teacher, student = (x.float().flatten(0, -2) for x in (teacher, student))
        # a single row, the output of a pooling head for one document, has no variance
        mean = teacher.mean(0) if len(teacher) > 1 else 0
        return (teacher - student).square().sum() / (teacher - mean).square().sum()

    def add_lora(self, rank: int, layers: str, seed: int = 0) -> None:
        """Add LoRA updates, initially zero, to the linear layers of attention or to all except the head."""
        peft = optional_import("peft", "hf")
        head = self.model.get_output_embeddings() if hasattr(self.model, "get_output_embeddings") else None
        owners = self.student.layers if layers == "attention" else [self.model]
        chosen = {id(m) for owner in owners for m in owner.modules() if isinstance(m, nn.Linear | Conv1D)} - {id(head)}
        targets = [name for name, module in self.model.named_modules() if id(module) in chosen]
        options = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets)
        with torch.random.fork_rng():
            # one of the two LoRA factors is random; it must be the same on all ranks and in a resumed run
            torch.manual_seed(seed)
            self.adapter = peft.get_peft_model(self.model, options)

    def merge(self) -> None:
        """Merge the LoRA updates into the weights."""
        if self.adapter is not None:
            self.student.model = self.model = self.adapter.merge_and_unload()
            self.student.merged = True
            self.adapter = None

    def discard_lora(self) -> None:
        """Remove the LoRA updates without merging them."""
        if self.adapter is not None:
            self.student.model = self.model = self.adapter.unload()
            self.adapter = None
