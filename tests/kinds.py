"""Families of which `make test-fast` tries one of each kind, and `make test` all."""

import pytest

# What others do, these do too: windows, experts, biases, kinds of positions, parallel blocks, sinks, softcapping.
KINDS = {"llama", "qwen2-sliding", "gemma2", "gpt2", "gpt_neox", "bloom", "falcon", "mixtral", "smollm3", "gpt_oss"}


def of_each_kind(families):
    return [family if family in KINDS else pytest.param(family, marks=pytest.mark.slow) for family in families]
