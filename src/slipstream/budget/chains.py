"""Chains in theory: how many tokens a step gives if every drafted token is accepted with the same chance."""

from __future__ import annotations


def expected_tokens(alpha: float, gamma: int) -> float:
    """Tokens of a step with a chain of γ, each accepted with α if those before it were: (1 - α^(γ+1)) / (1 - α)."""
    return gamma + 1.0 if alpha >= 1 else (1 - alpha ** (gamma + 1)) / (1 - alpha)
