"""What steps should take by what they read and compute: a roofline over batch and context.

A step takes as long as the slower of the two: weights and keys through memory, or products through the cores. Nothing
else is counted, so a measured step takes longer; ratios say where drafting with fewer keys can pay at all.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Machine:
    bandwidth: float  # bytes per second
    compute: float  # floating-point operations per second


@dataclass(frozen=True)
class Sizes:
    """Of a model, as a step meets it."""

    weights: float  # numbers that every step reads: all but the input embedding
    width: int  # bytes of a number
    key_bytes: float  # keys and values of a token, all layers
    per_key: float  # operations of a row for each key that it reads, all layers: 4 × query heads × their size


def step_seconds(sizes: Sizes, machine: Machine, batch: int, context: float, rows: int = 1) -> float:
    """Of one forward: `batch` sequences, each with so many rows over so many keys."""
    read = sizes.weights * sizes.width + batch * context * sizes.key_bytes
    computed = batch * rows * (2 * sizes.weights + context * sizes.per_key)
    return max(read / machine.bandwidth, computed / machine.compute)


def modelled_speedup(
    target: Sizes,
    draft: Sizes,
    machine: Machine,
    batch: int,
    context: float,
    keys: float,
    depth: int,
    tokens: float,
) -> float:
    """How much faster than plain decoding. keys: that the draft reads of a text. depth: tokens that it drafts, each by
    a forward. tokens: that a step gives with them, the bonus token included."""
    plain = step_seconds(target, machine, batch, context)
    drafting = depth * step_seconds(draft, machine, batch, min(keys, context))
    return tokens * plain / (drafting + step_seconds(target, machine, batch, context, depth + 1))
