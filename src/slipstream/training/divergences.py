"""Divergences between the distributions of a target and its draft: forward and reverse KL, Jensen-Shannon, total
variation.

Each takes log-probabilities of the target and of the draft (n, V) and gives (n,). Total variation is one minus the
share of drafted tokens that rejection sampling accepts: TV(p, q) = 1 - sum min(p, q).
"""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor, logaddexp

from slipstream.errors import OptionError

Divergence = Callable[[Tensor, Tensor], Tensor]


def forward_kl(p: Tensor, q: Tensor) -> Tensor:
    """KL(p, q): the draft should cover everything that is probable for the target."""
    return (p.exp() * (p - q)).sum(-1)


def reverse_kl(p: Tensor, q: Tensor) -> Tensor:
    """KL(q, p): the draft should avoid what is improbable for the target."""
    return forward_kl(q, p)


def jensen_shannon(p: Tensor, q: Tensor, beta: float = 0.5) -> Tensor:
    """b KL(p, m) + (1 - b) KL(q, m) with m = b p + (1 - b) q. Divided by b, or by 1 - b, it nears KL(p, q) as b nears
    0, and KL(q, p) as b nears 1."""
    middle = logaddexp(p + math.log(beta), q + math.log1p(-beta))
    return beta * forward_kl(p, middle) + (1 - beta) * forward_kl(q, middle)


def total_variation(p: Tensor, q: Tensor) -> Tensor:
    return (p.exp() - q.exp()).abs().sum(-1) / 2


NAMES = ("fkl", "rkl", "jsd", "tvd")


def find(name: str, beta: float | None = None) -> Divergence:
    """beta: for jsd only, 0.5 by default."""
    if name not in NAMES:
        raise OptionError(f"there is no divergence {name!r}: there are {', '.join(NAMES)}")
    if beta is not None and name != "jsd":
        raise OptionError(f"--beta belongs to jsd, not to {name}: leave it out")
    if beta is not None and not 0 < beta < 1:
        raise OptionError(f"beta={beta} is out of range: between 0 and 1; their limits are fkl and rkl")
    if name == "jsd":
        return lambda p, q: jensen_shannon(p, q, 0.5 if beta is None else beta)
    return {"fkl": forward_kl, "rkl": reverse_kl, "tvd": total_variation}[name]
