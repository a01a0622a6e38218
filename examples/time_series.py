"""Classify time series of unequal length. Synthetic data: noisy waves of three frequencies, 40 to 80 steps long."""

import torch
import torch.nn.functional as F

from flowformer.models.timeseries import FlowformerTimeSeries, TimeSeriesConfig


def batch(size):
    labels = torch.randint(3, (size,))
    angle = torch.arange(80) * (labels[:, None] + 2) / 8 + torch.rand(size, 1)
    series = torch.stack([angle.sin(), angle.cos()], -1) + 0.5 * torch.randn(size, 80, 2)
    return series, torch.arange(80) < torch.randint(40, 81, (size, 1)), labels


torch.manual_seed(0)
model = FlowformerTimeSeries(TimeSeriesConfig(2, 3, max_length=80, embed_dim=32, num_heads=4, mlp_dim=64))
optimizer = torch.optim.RAdam(model.parameters(), lr=2e-3)
for step in range(60):
    series, mask, labels = batch(32)
    loss = F.cross_entropy(model(series, mask), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 9:
        print(f"step {step + 1}: loss {loss.item():.3f}")
series, mask, labels = batch(200)
with torch.no_grad():
    scores = model.eval()(series, mask)
print(f"accuracy {(scores.argmax(1) == labels).float().mean():.2f} on 200 new series")
