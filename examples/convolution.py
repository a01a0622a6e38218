"""Train a language model of bytes with a causal convolution before each attention, and print its bits per byte.

    python examples/convolution.py FILE --attention flow --width 4

The last 5 % of the file are for evaluation. --width 0 leaves the convolution out.
"""

import argparse
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from flowformer.models.lm import FlowformerLM, LMConfig


class Convolved(nn.Module):
    """An attention that reads, in place of each token, a weighted sum of it and the tokens just before it.

    For training and evaluation: there is no state, which would have to hold the last tokens.
    """

    def __init__(self, attention, width):
        super().__init__()
        self.attention = attention
        self.convolution = nn.Conv1d(attention.embed_dim, attention.embed_dim, width, groups=attention.embed_dim)
        nn.init.normal_(self.convolution.weight, std=0.1)
        nn.init.zeros_(self.convolution.bias)
        with torch.no_grad():
            self.convolution.weight[..., -1] += 1  # at first nearly the token itself

    def forward(self, query, key_mask=None):
        if key_mask is not None:
            query = query.masked_fill(~key_mask[..., None], 0)  # padding before a sequence is not its past
        past = self.convolution.kernel_size[0] - 1
        return self.attention(self.convolution(F.pad(query.mT, (past, 0))).mT, key_mask=key_mask)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--attention", default="flow")
    parser.add_argument("--width", type=int, default=4)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--embed-dim", type=int, default=256)
    options = parser.parse_args()

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    text = torch.frombuffer(bytearray(options.file.read_bytes()), dtype=torch.uint8).to(device, torch.long)
    train, test = text.split([len(text) * 95 // 100, len(text) - len(text) * 95 // 100])
    if len(test) < options.length:
        parser.error(f"the last 5 % of the file are {len(test)} bytes, fewer than --length {options.length}.")
    sizes = {"embed_dim": options.embed_dim, "num_heads": 4, "mlp_dim": 4 * options.embed_dim}
    config = LMConfig(vocab_size=256, num_layers=3, max_length=options.length, attention=options.attention, **sizes)
    model = FlowformerLM(config)
    if options.width:
        for layer in model.decoder.layers:
            layer.attention = Convolved(layer.attention, options.width)
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.98), weight_decay=0.01)
    warmup = max(1, options.steps // 4)
    rate = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup, math.sqrt(warmup / (step + 1)))
    )
    window = torch.arange(options.length, device=device)
    for step in range(1, options.steps + 1):
        starts = torch.randint(len(train) - options.length, (max(1, 4096 // options.length), 1), device=device)
        with torch.autocast(device, torch.bfloat16):
            loss = model.loss(train[starts + window])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        rate.step()
        if step % max(1, options.steps // 12) == 0:
            print(f"update {step}: {loss.item() / math.log(2):.3f} bits per byte in training", flush=True)

    windows = test[: len(test) // options.length * options.length].view(-1, options.length)
    with torch.no_grad(), torch.autocast(device, torch.bfloat16):
        losses = [model.eval().loss(part) * len(part) for part in windows.split(8)]
    print(f"evaluation: {sum(losses).item() / len(windows) / math.log(2):.3f} bits per byte")


if __name__ == "__main__":
    main()
