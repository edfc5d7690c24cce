"""Families of which `make test-fast` tries one of each kind, and `make test` all."""

import pytest

# Windows, biases, experts, kinds of positions, blocks in parallel, normalised queries, scaled residuals, sinks,
# softcapping: one of each.
KINDS = {"llama", "qwen2-sliding", "qwen3", "gemma2", "gpt2", "gpt_neox", "bloom", "falcon", "mixtral", "smollm3"}
KINDS |= {"granite", "gpt_oss"}


def of_each_kind(families):
    return [family if family in KINDS else pytest.param(family, marks=pytest.mark.slow) for family in families]
