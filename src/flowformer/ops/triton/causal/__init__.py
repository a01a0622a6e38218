"""Causal Flow-Attention as Triton kernels."""
