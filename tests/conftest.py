"""Settings for every test."""

import os

import torch

# the workers of pytest-xdist would otherwise fight for the cores
torch.set_num_threads(1)
# Triton reads this when it is imported, which any test may be the first to do
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
