"""Train a byte-level language model on this package's own source for a few seconds, then let it write."""

import inspect

import torch

import flowformer.ops.reference
from flowformer.models.lm import FlowformerLM, LMConfig

torch.manual_seed(0)
text = torch.tensor(list(inspect.getsource(flowformer.ops.reference).encode()))
model = FlowformerLM(LMConfig(vocab_size=256, num_layers=2, embed_dim=64, num_heads=4, mlp_dim=256, dropout=0.0))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
print(f"{len(text)} bytes, {model.num_parameters()} parameters")
for step in range(81):
    starts = torch.randint(len(text) - 128, (8,))
    loss = model.loss(text[starts[:, None] + torch.arange(128)])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 40 == 0:
        print(f"step {step}: {loss / torch.log(torch.tensor(2.0)):.2f} bits a byte")

prompts = [b"def ", b"    return "]  # of unequal length: the shorter one is padded
longest = max(map(len, prompts))
tokens = torch.tensor([list(prompt.ljust(longest)) for prompt in prompts])
mask = torch.tensor([[i < len(prompt) for i in range(longest)] for prompt in prompts])
new = model.eval().generate(tokens, mask, max_new_tokens=60, temperature=0.7, top_p=0.9)
for prompt, row in zip(prompts, new.tolist(), strict=True):
    print(repr((prompt + bytes(row)).decode(errors="replace")))
