"""The native backend: C++ for CPUs, compiled on first use."""
