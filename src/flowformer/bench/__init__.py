"""Benchmarks and the fuzzer: `flowformer bench …`."""
