"""One line fuses a model: `python examples/quickstart.py`."""

import torch
from torch import nn

import fxfuse

model = nn.Sequential(nn.Linear(512, 512), nn.GroupNorm(8, 512), nn.Hardtanh(-2, 2)).eval()
fused = fxfuse.optimize(model)
print(fxfuse.report(fused))

x = torch.randn(32, 512)
torch.testing.assert_close(fused(x), model(x))
