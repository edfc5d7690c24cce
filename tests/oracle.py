"""A drafter that knows the answer and lies now and then: deep right paths, wrong branches, wrong endings."""

import numpy as np

from slipstream import Drafter, DraftSession, Proposal, TokenTree


class Oracle(Drafter):
    """truths: the texts (prompt and answer) that will be asked for."""

    def __init__(self, target, truths, seed=0):
        super().__init__(target, None, None)
        self.truths, self.seed = truths, seed

    def begin(self, request):
        (truth,) = {tuple(t) for t in self.truths if t[: len(request.tokens)] == request.tokens}
        return OracleSession(self, truth, np.random.default_rng(self.seed))


class OracleSession(DraftSession):
    def __init__(self, drafter, truth, rng):
        self.drafter, self.truth, self.rng, self.read = drafter, truth, rng, 0

    def observe(self, seen):
        self.read += len(seen.tokens)

    def propose(self, root, budget):
        vocabulary = self.drafter.target.vocabulary
        right = list(self.truth[self.read + 1 : self.read + 1 + budget.depth])
        lies = []
        for _ in range(4):
            cut = int(self.rng.integers(0, len(right) + 1))
            tail = self.rng.integers(0, vocabulary, self.rng.integers(1, 4)).tolist()
            lies.append((right[:cut] + tail)[: budget.depth])
        honest = right[: int(self.rng.integers(0, len(right) + 1))]
        drafts = [lies[0], honest, *lies[1:]]
        tree = TokenTree.from_continuations(root, [d for d in drafts if d], source="oracle")
        return Proposal(tree.top_k(budget.nodes))
