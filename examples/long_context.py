"""Train on sequences that are split over processes: torchrun --nproc-per-node 4 examples/long_context.py

Synthetic data: one symbol is more frequent than the others in the first half of a sequence; the second half repeats it.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from flowformer.models.lm import FlowformerLM, LMConfig

LENGTH, SYMBOLS, STEPS = 1024, 8, 30


class Loss(nn.Module):
    """The loss as a forward pass, which is what DDP wraps."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, tokens):
        return self.model.loss(tokens)


def batch(size, step):
    random = torch.Generator().manual_seed(step)  # the same on every rank
    symbol = torch.randint(SYMBOLS, (size, 1), generator=random)
    noise = torch.randint(SYMBOLS, (size, LENGTH), generator=random)
    frequent = torch.rand(size, LENGTH, generator=random) < 0.3
    return torch.where(frequent | (torch.arange(LENGTH) >= LENGTH // 2), symbol, noise)


device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
part = slice(LENGTH * rank // ranks, LENGTH * (rank + 1) // ranks)

torch.manual_seed(0)
config = LMConfig(vocab_size=SYMBOLS, num_layers=2, embed_dim=32, num_heads=2, mlp_dim=64, dropout=0.0)
model = FlowformerLM(config).to(device)
model.cut_sequences(dist.group.WORLD)
loss_of = DistributedDataParallel(Loss(model))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for step in range(STEPS):
    loss = loss_of(batch(4, step)[:, part].to(device))
    optimizer.zero_grad()
    (loss * ranks).backward()  # DDP averages over ranks; multiply by their number to get the sum
    optimizer.step()
    if rank == 0 and step % 10 == 9:
        print(f"step {step + 1}: loss {loss.item():.3f} of {LENGTH} tokens, {part.stop - part.start} on this rank")
dist.barrier()
dist.destroy_process_group()
