"""Sampled speculation has the target's distribution: by enumeration, and by counting with stated power."""

import itertools
import math
from collections import Counter
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from scipy.special import chdtri, chndtr

from families import tiny_model
from slipstream import LLM
from slipstream.accept import Match, Rejection, residual, verify
from slipstream.drafters._beams import draw
from slipstream.evaluate.replay import TextTarget
from slipstream.sampling import Sampler, Sampling, _bits, noise_key
from slipstream.targets import Scores, Want
from slipstream.tree import TokenTree, _connected, fuse

V = 4
PLAIN = Sampling(temperature=1.0)


class Undecided(Exception):
    """The script ends before a decision with these probabilities."""

    def __init__(self, probabilities):
        self.options = [i for i, p in enumerate(probabilities) if p > 0]


class Scripted(Sampler):
    """A sampler whose every decision is written down beforehand; `weight` is the probability that it comes so."""

    def __init__(self, script):
        super().__init__(PLAIN, [0])
        self._script, self.weight = list(script), 1.0

    def _decide(self, probabilities):
        if not self._script:
            raise Undecided(probabilities)
        taken = self._script.pop(0)
        self.weight *= probabilities[taken]
        return taken

    def distribution(self, row):
        return row.clone()

    def sample(self, row):
        return self._decide(row.numpy())

    def drawn(self, weights):
        self._weights = weights  # of the last draw that may be
        return torch.zeros(2, dtype=weights.dtype)

    def taken(self, token, mass):  # noqa: ARG002
        return self._decide((self._weights / self._weights.sum()).tolist())

    def flip(self, probability, draw):  # noqa: ARG002
        p = min(1.0, probability)
        return bool(self._decide([1 - p, p]))


class Table:
    """Scores of a target that depends on the path alone."""

    captured = decided = None

    def __init__(self, tree, law):
        self._rows = [torch.from_numpy(law(tree.tokens[tree.path_to(i)][1:].tolist())) for i in range(len(tree))]

    def logits(self, node):
        return self._rows[node]

    def token(self, node, sampler):
        return sampler.sample(self.logits(node))


def outcomes(rule, tree, law):
    """{emitted tokens: probability} over every decision the rule can take."""
    found, scripts, table = {}, [()], Table(tree, law)
    while scripts:
        script = scripts.pop()
        sampler = Scripted(script)
        try:
            verdict = verify(rule, tree, table, sampler, lambda _: False)
        except Undecided as fork:
            scripts += [(*script, i) for i in fork.options]
            continue
        emitted = (*tree.tokens[verdict.path[1:]].tolist(), verdict.bonus)
        found[emitted] = found.get(emitted, 0.0) + sampler.weight
    return found


def completed(found, law, depth):
    """The joint law of the next `depth` tokens: what was emitted, then plain sampling."""
    joint = {}
    for emitted, weight in found.items():
        for rest in itertools.product(range(V), repeat=max(0, depth - len(emitted))):
            text, p = list(emitted[:depth]), weight
            for token in rest:
                p *= law(text)[token]
                text.append(token)
            joint[tuple(text)] = joint.get(tuple(text), 0.0) + p
    return joint


def total_variation(one, other):
    return 0.5 * sum(abs(one.get(k, 0) - other.get(k, 0)) for k in {*one, *other})


def random_law(seed, support=(V, V, V)):
    """A distribution for every text, with zeros here and there; support: tokens possible at each depth at most."""

    @cache
    def law(*text):
        rng = np.random.default_rng([seed, len(text), *text])
        p = rng.dirichlet(np.full(V, 0.7))
        p[p < 0.05] = 0
        p[np.argsort(-p)[support[len(text)] :]] = 0
        return p / p.sum()

    return lambda text: law(*text)


def shapes():
    """Every tree of depth 2: up to 3 children of the root, each with up to 2 of its own."""
    for width in range(4):
        yield from itertools.product(range(3), repeat=width)


def draws(q, count):
    """Every ordered draw without replacement, with its probability; fewer where q has fewer tokens to give."""
    for tokens in itertools.permutations(np.flatnonzero(q), min(count, int(np.count_nonzero(q)))):
        left, p = 1.0, 1.0
        for token in tokens:
            p *= q[token] / left
            left -= q[token]
        yield tokens, p


def drawn_trees(shape, q_law):
    """Every sampled tree of this shape: children drawn from q without replacement, in draw order."""
    q0 = q_law([])
    for firsts, p in draws(q0, len(shape)):
        options = [list(draws(q_law([t]), k)) for t, k in zip(firsts, shape, strict=False)]
        for seconds in itertools.product(*options):
            tokens, parents, rows, q = [9, *firsts], [-1] + [0] * len(firsts), [0] + [-1] * len(firsts), [q0]
            weight = p
            for i, (chosen, chance) in enumerate(seconds):
                weight *= chance
                if chosen:
                    rows[i + 1] = len(q)
                    q.append(q_law([firsts[i]]))
                tokens += chosen
                parents += [i + 1] * len(chosen)
                rows += [-1] * len(chosen)
            yield (
                TokenTree.build(tokens, parents, q=torch.tensor(np.array(q)), q_row=rows, source="q"),
                weight,
            )


def same(tree):
    """All of a tree that a rule looks at."""
    rows = None if tree.q is None else (tree.q.numpy().tobytes(), tree.q_row.tobytes())
    return tree.tokens.tobytes(), tree.parents.tobytes(), rows


def joint_over_drafts(rule, trees, law, known):
    """known: {what a rule saw: the law of what came}, kept from call to call."""
    joint, total = {}, 0.0
    for tree, weight in trees:
        total += weight
        seen = same(tree)
        if seen not in known:
            known[seen] = completed(outcomes(rule, tree, law), law, 3)
        for text, p in known[seen].items():
            joint[text] = joint.get(text, 0.0) + weight * p
    return joint, total


CHANGES = {
    "as drawn": lambda t: t,
    "pruned by token": lambda t: t.prune(t.tokens != 2),
    "top-k": lambda t: t.with_score((1 / (2.0 + t.tokens)).astype(np.float32)).top_k(2),
    "fused": lambda t: fuse([t, TokenTree.from_continuations(9, [[1, 3], [0]], source="other")]),
    "cut": lambda t: t.cut(1),
}


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("rule", [Match(), Rejection()], ids=["match", "rejection"])
def test_the_joint_law_is_the_targets_for_every_shape(rule, change):
    law, q_law = random_law(1), random_law(2, support=(V, 2))
    truth, known = completed({(): 1.0}, law, 3), {}
    for shape in shapes():
        trees = [(CHANGES[change](t), w) for t, w in drawn_trees(shape, q_law)]
        joint, total = joint_over_drafts(rule, trees, law, known)
        assert math.isclose(total, 1, abs_tol=1e-12)
        assert total_variation(joint, truth) < 1e-12, shape


def test_keeping_q_after_pruning_would_be_wrong():
    """The classic way to lose losslessness, so that the test above is known to see it."""
    law, q_law = random_law(1), random_law(2, support=(V, 2))
    truth = completed({(): 1.0}, law, 3)
    trees = []
    for tree, weight in drawn_trees((0, 0), q_law):
        kept = _connected(tree.parents, tree.tokens != 2)
        trees.append((replace(tree.prune(kept), q=tree.q, q_row=tree.q_row[kept]), weight))
    joint, _ = joint_over_drafts(Rejection(), trees, law, {})
    assert total_variation(joint, truth) > 1e-3


# ---- counting on a real (tiny) model

CELLS = 27  # texts of three tokens over a vocabulary of three
LEVEL, POWER = 0.01, 0.99
PROMPT, SEED, TEMPERATURE = [1, 2, 0], 3, 0.6  # peaked: the draft model is wrong often enough


class Remembered(TextTarget):
    """A real target that answers a text it has scored before from memory: it is a function of the text."""

    def __init__(self, target):
        self.target, self.rows = target, {}
        self.vocabulary, self.context = target.vocabulary, target.context

    def row(self, text):
        if text not in self.rows:
            slot = self.target.open()
            *_, last = self.target.prefill(slot, list(text), Want())
            self.rows[text] = last.logits(0).clone()
            self.target.close(slot)
        return self.rows[text]

    def prefill(self, slot, tokens, want):  # noqa: ARG002
        slot.tokens += tokens
        yield Scores(self.row(tuple(slot.tokens))[None], {}, np.array([slot.length - 1]))

    def score(self, slots, trees, want, known=0):  # noqa: ARG002
        found = []
        for slot, tree in zip(slots, trees, strict=True):
            slot.tree = tree
            texts = [(*slot.tokens, *tree.tokens[tree.path_to(i)].tolist()) for i in range(known, len(tree))]
            found.append(
                Scores(torch.stack([self.row(t) for t in texts]), {}, slot.length + tree.depths[known:], known)
            )
        return found


def three_token_law(rows):
    law = {(): 1.0}
    for _ in range(3):
        p = {text: torch.softmax(rows(text).double() / TEMPERATURE, -1).tolist() for text in law}
        law = {(*text, token): law[text] * p[text][token] for text in law for token in range(3)}
    assert len(law) == CELLS
    return law


def samples_needed(distance):
    """For a Pearson test at LEVEL to see a total variation of this distance with POWER: a total variation d means a
    noncentrality of at least 4 d² n, whatever the cells (Cauchy-Schwarz)."""
    n, critical = 1000, chdtri(CELLS - 1, LEVEL)
    while 1 - chndtr(critical, CELLS - 1, 4 * distance**2 * n) < POWER:
        n = int(n * 1.05)
    return n


def fits(texts, law):
    """Whether texts are distributed as the law says, by Pearson's test."""
    seen = Counter(texts)
    assert set(seen) <= set(law)
    excess = sum((seen[text] - p * len(texts)) ** 2 / (p * len(texts)) for text, p in law.items())
    return excess < chdtri(CELLS - 1, LEVEL)


@pytest.fixture(scope="module")
def tiny_pair():
    """A target and a draft model over three tokens."""
    size = {"vocab_size": 3, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return [tiny_model("llama", seed=seed, **size, eos_token_id=None) for seed in (0, 1)]


@pytest.fixture(scope="module")
def rows(tiny_pair):
    """rows(text) -> the target's logits behind the prompt and this text, by the model itself."""

    @cache
    def row(text):
        with torch.no_grad():
            return tiny_pair[0](input_ids=torch.tensor([[*PROMPT, *text]])).logits[0, -1]

    return row


def drafted(tiny_pair, rule, count):
    """The first `count` answers of four tokens, the second and third of which come from a tree of two levels."""
    llm = LLM(tiny_pair[0], drafter="model", draft_model=tiny_pair[1], mode="sample", depth=2, width=2)
    llm.engine.target = Remembered(llm.target)
    llm.engine.drafter.draft = Remembered(llm.engine.drafter.draft)
    options = {"seed": SEED, "temperature": TEMPERATURE, "max_new_tokens": 4, "accept": rule}
    requests = (llm.request(PROMPT, sample=i, **options) for i in range(count))
    done = [sequence for sequence in llm.engine.run(requests) if sequence.finish]
    assert sum(sequence.stats.accepted for sequence in done) > count  # drafts were really used, at both levels
    return {sequence.request.sample: tuple(sequence.tokens) for sequence in done}


def plainly(rows, samples):
    """(samples, 4) answers without an engine or a sampler: the noise of all of them at once, by its definition."""
    texts, tokens = np.empty((samples, 0), np.int64), np.arange(3, dtype=np.uint64)
    for position in range(len(PROMPT), len(PROMPT) + 4):
        keys = np.array([[noise_key(SEED, sample, position)] for sample in range(samples)], np.uint64)
        gumbel = -np.log(-np.log((_bits(keys, tokens) + 0.5) / 2**32))
        logits = {text: rows(text).double().numpy() / TEMPERATURE for text in {*map(tuple, texts.tolist())}}
        chosen = [logits[tuple(text)] for text in texts.tolist()] + gumbel
        texts = np.c_[texts, chosen.argmax(1)]
    return [tuple(text) for text in texts.tolist()]


@pytest.mark.slow
def test_texts_are_distributed_as_the_target_says_and_match_changes_none(tiny_pair, rows):
    """Drafted texts are the very ones that are drawn plainly, so counting those, which is quicker, counts both."""
    plain = plainly(rows, samples_needed(0.025))
    assert fits([text[:3] for text in plain], three_token_law(rows))
    for sample, text in drafted(tiny_pair, "match", 1000).items():
        assert text == plain[sample]


@pytest.mark.slow
def test_texts_are_distributed_as_the_target_says_under_rejection(tiny_pair, rows):
    """Mistakes in drawing, in rejecting and in keeping apart their noise are larger than this distance, see
    docs/log/layout.md. What the rule itself does is enumerated above."""
    texts = drafted(tiny_pair, "rejection", samples_needed(0.04))
    assert fits([text[:3] for text in texts.values()], three_token_law(rows))


@pytest.mark.parametrize("gap", [400.0, 570.0, 720.0, 800.0])
def test_what_q_can_not_hold_is_not_drawn(gap):
    """A draw whose probability is lost to rounding would be accepted with certainty: nothing is left of q to divide by.
    As with a temperature of 0.01."""
    logits = torch.tensor([[[0.0, -gap, -2 * gap]]])
    tokens, p, q = draw(logits, torch.tensor([7]), torch.ones(1), 3)
    assert tokens[0, 0, 0] == 0
    rest = 1 - q.double().sum()
    assert abs(float(rest)) < 1e-12
    kept = q[0, 0] > 0
    assert (p[0, 0][:2] > 0).tolist() == [True, bool(kept[1])]
    left, _ = residual(torch.stack([torch.tensor([1e-9, 1e-200, 1.0], dtype=torch.float64), q[0, 0]]), 0)
    assert float(left[1].sum()) == pytest.approx(1.0 if kept[1] else 0.0)
