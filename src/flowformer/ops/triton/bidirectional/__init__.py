"""Bidirectional Flow-Attention as Triton kernels."""
