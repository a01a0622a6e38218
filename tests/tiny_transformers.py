"""What the tests of transformers share: prompts of unequal length, weights that hide nothing, and comparisons."""

from __future__ import annotations

import torch
from torch import nn

from flowformer.integrations.transformers import FlowformerConfig, FlowformerForCausalLM

PROMPTS = torch.tensor([[3, 1, 4, 1, 5, 9, 2], [6, 5, 3, 5, 8, 9, 7], [9, 3, 2, 3, 8, 4, 6]])
LEFT = torch.tensor([[1, 1, 1, 1, 1, 1, 1], [0, 0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0, 1]])
SIZES = {
    "vocab_size": 23,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "pad_token_id": 0,
    "bos_token_id": 1,
}
STYLES = {
    "paper": {"dropout": 0.0},
    "gpt": {
        "dropout": 0.0,
        "hidden_act": "gelu_tanh",
        "positions": "learned",
        "max_position_embeddings": 64,
        "scale_embedding": False,
        "tie_word_embeddings": False,
        "initialisation": "gpt",
        "variant": "core",
    },
}


def randomized(model: nn.Module) -> nn.Module:
    """Fresh models have zero biases and unit norms, which would hide mistakes, and say one word again and again."""
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        nn.init.normal_(parameter, mean=float("norm.weight" in name.lower()), std=1.0 if parameter.dim() > 1 else 0.2)
    return model.double().eval()


def assert_close(value, truth):
    torch.testing.assert_close(value, truth, rtol=1e-9, atol=1e-9)


def assert_cuts_give_the_logits(model: nn.Module, mask: torch.Tensor | None, cache_class: type | None = None) -> None:
    """Any cut of the prompts, continued from a cache, gives the logits of the whole; None is what the model makes."""
    whole = model(PROMPTS, attention_mask=mask, use_cache=False)
    assert whole.past_key_values is None
    kept = torch.ones_like(PROMPTS, dtype=torch.bool) if mask is None else mask.bool()
    for cuts in ([7], [1] * 7, [3, 4], [2, 1, 4]):
        cache = None if cache_class is None else cache_class(model.config)
        start, parts = 0, []
        for size in cuts:
            seen = None if mask is None else mask[:, : start + size]
            tokens = PROMPTS[:, start : start + size]
            outputs = model(tokens, attention_mask=seen, past_key_values=cache, use_cache=True)
            cache, start = outputs.past_key_values, start + size
            parts.append(outputs.logits)
        assert cache.get_seq_length() == 7
        assert_close(torch.cat(parts, 1)[kept], whole.logits[kept])


def with_gradients(model: nn.Module, result: torch.Tensor) -> list[torch.Tensor]:
    torch.manual_seed(2)
    parameters = [p for p in model.parameters() if p.requires_grad]
    grads = torch.autograd.grad(result, parameters, torch.randn_like(result), allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, grads, strict=True)]


def language_model(style: str = "paper", **options) -> FlowformerForCausalLM:
    return randomized(FlowformerForCausalLM(FlowformerConfig(**SIZES | STYLES[style] | options)))
