"""A small artificial language, configs of small models for it, and the options of a short transfer."""

from __future__ import annotations

import torch
import transformers

WORDS = 17
LLAMA = transformers.LlamaConfig(
    vocab_size=WORDS,
    hidden_size=32,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    bos_token_id=0,
    eos_token_id=1,
)
BERT = transformers.BertConfig(
    vocab_size=WORDS, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, pad_token_id=0
)
VIT = transformers.ViTConfig(
    hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4
)
SHORT = {"length": 24, "batch_size": 4, "transfer_tokens": 3000, "lora_tokens": 3000, "lora_rank": 4}
SHORT |= {"transfer_lr": 1e-2, "lora_lr": 3e-3}


def documents(count: int, seed: int = 0) -> list[torch.Tensor]:
    """Random sequences in which each token has two possible successors."""
    generator = torch.Generator().manual_seed(seed)
    sequences = []
    for _ in range(count):
        tokens = [2]
        for turn in torch.randint(2, (int(torch.randint(9, 40, (), generator=generator)),), generator=generator):
            tokens.append(2 + (3 * tokens[-1] + 1 + 5 * int(turn)) % (WORDS - 2))
        sequences.append(torch.tensor(tokens))
    return sequences
