"""How much may be drafted in one step."""

from __future__ import annotations

from typing import NamedTuple

from slipstream.errors import DrafterError
from slipstream.tree import TokenTree


class Budget(NamedTuple):
    nodes: int  # drafted nodes at most, without the root
    depth: int  # of the deepest node at most
    beside: int | None = None  # additional nodes at most, for a drafter that learns from them; None: no limit

    def upto(self, nodes: int, beside: int = 0) -> Budget:
        """This budget with at most so many nodes, and so many beside them."""
        return self._replace(nodes=min(self.nodes, nodes), beside=beside) if beside or nodes < self.nodes else self

    def limit(self, tree: TokenTree) -> TokenTree:
        """Cut a draft to the budget."""
        tree = tree.cut(self.depth)
        if len(tree) - 1 <= self.nodes:
            return tree
        if tree.q is not None:
            raise DrafterError(
                f"a sampled draft of {len(tree) - 1} nodes exceeds its budget of {self.nodes}: it must keep to the "
                "budget by itself, since choosing among draws changes what they are draws of"
            )
        return tree.top_k(self.nodes)


def step_budget(max_draft: int, tokens_left: int, positions_left: int) -> Budget:
    """What one step can use: a step emits one token more than it accepts, so the last token needs no draft."""
    depth = max(0, min(max_draft, tokens_left - 1, positions_left - 1))
    return Budget(max_draft if depth else 0, depth)
