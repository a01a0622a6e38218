"""Flow-Attention in plain torch: linear in time and memory, on any device, and in exported graphs."""
