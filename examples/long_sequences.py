"""Classify sequences of up to 1000 tokens. Synthetic data: noise with one of four symbols at 10 % of the positions."""

import torch
import torch.nn.functional as F

from flowformer.models.classifier import ClassifierConfig, FlowformerClassifier


def batch(size):
    labels = torch.randint(4, (size,))
    tokens = torch.randint(5, 257, (size, 1000)).where(torch.rand(size, 1000) > 0.1, labels[:, None] + 1)
    return tokens * (torch.arange(1000) < torch.randint(500, 1001, (size, 1))), labels  # 0 is padding


torch.manual_seed(0)
model = FlowformerClassifier(ClassifierConfig(num_classes=4, embed_dim=32, mlp_dim=64))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for step in range(50):
    tokens, labels = batch(16)
    loss = F.cross_entropy(model(tokens), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 9:
        print(f"step {step + 1}: loss {loss.item():.3f}")
tokens, labels = batch(32)
scores, maps = model.eval()(tokens, return_maps=True)
won = maps[0].competition.mean(1)[:, 1:]  # by each token; the learned one before them is left out
print(f"competition: symbols {won[(tokens > 0) & (tokens < 5)].mean():.2f}, noise {won[tokens > 4].mean():.2f}")
print(f"accuracy {(scores.argmax(1) == labels).float().mean():.2f} on 32 new sequences")
