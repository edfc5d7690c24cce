"""The laws can fail: each small mistake that would make speculation lossy is seen by the same comparison."""

import numpy as np
import pytest

import slipstream.engine
from oracle import Oracle
from slipstream import LLM, drafters
from slipstream.accept import Verdict, verify
from slipstream.targets import masks, trees

PROMPTS = [[5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 5, 6], [40, 41], [11, 12, 11, 12, 11, 13, 50]]


def one_token_too_many(rule, tree, scores, sampler, over):
    """Accept the next drafted node unseen."""
    verdict = verify(rule, tree, scores, sampler, over)
    children = tree.children(verdict.path[-1])
    if len(children) and verdict.bonus != tree.tokens[children[0]]:
        return Verdict([*verdict.path, int(children[0])], verdict.bonus)
    return verdict


def wrong_mask_bits(*args):
    """Every node sees the two nodes to its left, ancestors or not."""
    see = masks.visible(*args)
    (length, *_), (tree, *_) = args[0], args[1]
    for i in range(1, min(len(tree), see.shape[1])):
        see[0, i, length + max(0, i - 2) : length + i] = True
    return see


def wrong_position(self):
    """Nodes stand where they lie in the tree, not at their depth."""
    return np.arange(len(self), dtype=np.int32)


MUTATIONS = {
    "accept one token too many": (slipstream.engine, "verify", one_token_too_many),
    "wrong mask bits": (trees, "visible", wrong_mask_bits),
    "wrong position id": (slipstream.TokenTree, "depths", property(wrong_position)),
}


def texts(model):
    llm = LLM(model, drafter="none")
    plain, fast = [], []
    for prompt in PROMPTS:
        llm.engine.drafter = drafters.make("none", llm.target)
        plain.append(llm.generate(prompt, max_new_tokens=30, ignore_eos=True).tokens)
        llm.engine.drafter = Oracle(llm.target, [prompt + plain[-1] + [1] * 20])
        fast.append(llm.generate(prompt, max_new_tokens=30, ignore_eos=True).tokens)
    return plain, fast


@pytest.mark.slow
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_mutation_breaks_the_law(mutation, monkeypatch, tiny):
    plain, fast = texts(tiny("llama"))
    assert fast == plain
    place, name, replacement = MUTATIONS[mutation]
    monkeypatch.setattr(place, name, replacement)
    plain, fast = texts(tiny("llama"))
    assert fast != plain
