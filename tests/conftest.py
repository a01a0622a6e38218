"""Settings for every test."""

import torch

# the workers of pytest-xdist would otherwise fight for the cores
torch.set_num_threads(1)
