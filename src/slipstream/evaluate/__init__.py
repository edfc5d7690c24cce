"""Benchmarks: the same prompts with and without speculation, compared in one run."""
