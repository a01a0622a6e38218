"""Train a small four-stage Flowformer to find the quarter of a noisy image that has a square. Seconds on a CPU."""

import torch
import torch.nn.functional as F

from flowformer.models.counts import count
from flowformer.models.vision import FlowformerVision, VisionConfig

torch.manual_seed(0)
model = FlowformerVision(VisionConfig(32, num_classes=4, channels=(16, 32, 48, 64), depths=(1, 1, 1, 1), num_heads=2))
print(count(model, torch.empty(1, 3, 32, 32)))


def images(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    x, quarters = 0.5 * torch.randn(number, 3, 32, 32), torch.randint(4, (number,))
    for image, quarter, (y, z) in zip(x, quarters, torch.randint(9, (number, 2)), strict=True):
        image[:, 16 * (quarter // 2) + y :, 16 * (quarter % 2) + z :][:, :8, :8] += 1
    return x, quarters


optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
for _ in range(40):
    x, quarters = images(32)
    loss = F.cross_entropy(model(x), quarters)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
x, quarters = images(256)
accuracy = (model.eval()(x).argmax(-1) == quarters).float().mean()
print(f"last loss {loss.item():.3f}, accuracy on 256 new images {accuracy.item():.2f}")
