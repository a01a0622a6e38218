"""Flow-Attention as Triton kernels."""
