"""Reader of stories260K, a small pretrained model in the file format of llama2.c."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import torch
import transformers
from torch import Tensor


def load(path: Path) -> transformers.LlamaForCausalLM:
    """Return the model in `path` as a Llama of transformers."""
    data = path.read_bytes()
    dim, hidden, layers, heads, key_heads, vocabulary, length = struct.unpack("<7i", data[:28])
    numbers, start = torch.from_numpy(np.frombuffer(data, np.float32, offset=28).copy()), 0

    def read(*shape: int) -> Tensor:
        nonlocal start
        size = torch.Size(shape).numel()
        start += size
        return numbers[start - size : start].view(shape)

    def reorder_rotary(weight: Tensor, count: int) -> Tensor:
        """Reorder the features of each head: llama2.c rotates the pairs (2i, 2i + 1), transformers (i, i + D/2)."""
        return weight.view(layers, count, -1, 2, dim).transpose(2, 3).reshape(weight.shape)

    config = transformers.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=dim,
        intermediate_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        max_position_embeddings=length,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    )
    weights, width = {"model.embed_tokens.weight": read(vocabulary, dim)}, dim * key_heads // heads
    parts = {
        "input_layernorm": read(layers, dim),
        "self_attn.q_proj": reorder_rotary(read(layers, dim, dim), heads),
        "self_attn.k_proj": reorder_rotary(read(layers, width, dim), key_heads),
        "self_attn.v_proj": read(layers, width, dim),
        "self_attn.o_proj": read(layers, dim, dim),
        "post_attention_layernorm": read(layers, dim),
        "mlp.gate_proj": read(layers, hidden, dim),
        "mlp.down_proj": read(layers, dim, hidden),
        "mlp.up_proj": read(layers, hidden, dim),
    }
    for name, stacked in parts.items():
        weights |= {f"model.layers.{index}.{name}.weight": each for index, each in enumerate(stacked)}
    weights["model.norm.weight"] = read(dim)
    model = transformers.LlamaForCausalLM(config)
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert set(missing) <= {"lm_head.weight"}
    assert not unexpected
    return model.eval()
