"""lookahead: its window and pool against a transcription of the published code, and what that code lacks."""

import itertools

import numpy as np
import pytest

from families import graphs
from slipstream import LLM
from slipstream.budget import Budget, step_budget
from slipstream.drafters.base import Seen
from slipstream.drafters.lookahead import Lookahead, Pool, Trie, Window
from slipstream.errors import OptionError
from slipstream.request import Request
from slipstream.tree import TokenTree, fuse

SHAPES = [(5, 7, 7), (5, 15, 15), (3, 1, 1), (4, 2, 3), (7, 5, 2)]


class Published:
    """As `jacobi_greedy_search_multilevel` of hao-ai-lab/LookaheadDecoding does with ALWAYS_FWD_ONE: all of a step in
    one flat list, a mask and positions beside it."""

    def __init__(self, level, window_size, guess_set_size, first):
        self.level, self.window_size, self.guess_set_size = level, window_size, guess_set_size
        self.past_tokens = [list(first), *[None] * (level - 2)]
        self.fill_level, self.token_map = 0, {}

    def step(self, text, root, model):
        """text: what is read already. model(tokens) -> the token after them."""
        sizes = [len(tokens) for tokens in self.past_tokens[: self.fill_level + 1]]
        flat = [root, *itertools.chain(*self.past_tokens[: self.fill_level + 1])]
        positions = [0, *range(1, 1 + sizes[0])]
        for ll in range(1, self.fill_level + 1):
            offset = sizes[0] + 1 - sizes[ll]
            positions += range(ll + offset, ll + offset + sizes[ll])
        mask = self.mask(sizes, len(flat))
        seen = [sorted((positions[j], flat[j]) for j in np.flatnonzero(row)) for row in mask]
        assert all([p for p, _ in row] == list(range(len(row))) for row in seen)
        results = [model([*text, *(token for _, token in row)]) for row in seen[len(flat) - sizes[-1] :]]
        if self.past_tokens[1] is None:
            self.past_tokens[0] = self.past_tokens[0][1:]
            self.past_tokens[1] = results
            self.fill_level += 1
        elif self.past_tokens[self.level - 2] is None:
            for level in range(self.fill_level + 1):
                self.past_tokens[level] = self.past_tokens[level][1:]
            self.past_tokens[self.fill_level + 1] = results[1:]
            self.fill_level += 1
        else:
            self.update(root, results)
            self.past_tokens[0] = self.past_tokens[1][1:]
            for level in range(1, self.level - 2):
                self.past_tokens[level] = self.past_tokens[level + 1]
            self.past_tokens[self.level - 2] = results

    def mask(self, sizes, rows):
        if len(sizes) == 1:
            return np.tri(rows, dtype=bool)
        mask, tiny = np.zeros((rows, rows), dtype=bool), sizes[-1]
        for ll in range(len(sizes)):
            block = slice(tiny * ll, tiny * (ll + 1))
            mask[block, :tiny] = np.tri(tiny, dtype=bool)
            for row in range(1, ll + 1):
                mask[block, tiny * row : tiny * (row + 1)] |= np.eye(tiny, dtype=bool)
        return mask

    def update(self, root, results):
        for i in range(self.window_size):
            first = root if i == 0 else self.past_tokens[0][i - 1]
            tup = (*(self.past_tokens[ll][i] for ll in range(1, self.level - 1)), results[i])
            known = self.token_map.setdefault(first, [])
            if tup in known:
                known.remove(tup)
            elif len(known) == self.guess_set_size:
                known.pop(0)
            known.append(tup)


def model(tokens):
    """Of few tokens, and every position counts a little."""
    a, b, c = ([0, 0, 0, *tokens])[-3:]
    return (3 * a + 5 * b + 7 * c + (len(tokens) % 11 == 0)) % 13


def walk(tree, text):
    """What the target accepts: the path, and the token after it."""
    path = [0]
    while True:
        token = model([*text, *tree.tokens[path].tolist()])
        child = tree.child(path[-1], token)
        if child is None:
            return path, token
        path.append(child)


def chosen(tree, text):
    return lambda nodes: np.array([model([*text, *tree.tokens[tree.path_to(node)].tolist()]) for node in nodes])


@pytest.mark.slow
@pytest.mark.parametrize(("ngram", "window", "guesses"), SHAPES)
def test_window_and_pool_are_the_published_ones(ngram, window, guesses, tiny):
    drafter = Lookahead(LLM(tiny("llama"), drafter="none").target, None, Lookahead.Options(ngram, window, guesses))
    text, root = [1, 2, 3, 4, 5], 6
    request = Request(text, max_new_tokens=10_000, max_draft=drafter.default_draft)
    session = drafter.begin(request)
    session.observe(Seen(text, 0))
    published, tokens = None, 0
    for _ in range(300):
        tree = proposed(session, root, Budget(drafter.default_draft, 1000))
        if published is None:
            published = Published(ngram, window, guesses, session.window.levels[0])
        tree.check(13, root)
        assert len(tree) - 1 <= drafter.default_draft
        known = published.token_map.get(root, [])
        assert all(contains(tree, ngram) for ngram in known)
        published.step(text, root, model)
        session.choices(tree, chosen(tree, text))
        levels = [level for level in published.past_tokens if level is not None]
        assert session.window.levels == levels
        for first, known in published.token_map.items():
            assert session.pool.about(first) == known[::-1]
        path, bonus = walk(tree, text)
        accepted = tree.tokens[path].tolist()
        session.observe(Seen(accepted, len(text)))
        text, root, tokens = [*text, *accepted], bonus, tokens + len(path)
    assert window == 1 or tokens > 330  # it finds what repeats


def proposed(session, root, budget):
    """As the engine verifies it."""
    proposal = session.propose(root, budget)
    return proposal.tree if proposal.beside is None else fuse([budget.limit(proposal.tree), proposal.beside])


def contains(tree, tokens):
    node = 0
    for token in tokens:
        node = tree.child(node, token)
        if node is None:
            return False
    return True


def test_a_window_of_one_level_after_another_by_hand():
    """ngram 4, two columns: level 0 begins three wide, without the root's own column."""
    window = Window(4, [11, 12, 13])
    draft = Trie(10)
    assert window.put(draft) == [1, 2, 3]
    assert window.shift(10, [21, 22, 23]) == []
    assert window.levels == [[12, 13], [21, 22, 23]]
    draft = Trie(20)
    last = window.put(draft)  # 21 after the root, 22 after 20 12, 23 after 20 12 13
    assert [draft.tokens[node] for node in last] == [21, 22, 23]
    assert [draft.tokens[draft.parents[node]] for node in last] == [20, 12, 13]
    assert window.shift(20, [31, 32, 33]) == []
    assert window.levels == [[13], [22, 23], [32, 33]]
    draft = Trie(30)
    last = window.put(draft)
    assert [draft.tokens[node] for node in last] == [32, 33]
    assert window.shift(30, [42, 43]) == [(30, (22, 32, 42)), (13, (23, 33, 43))]
    assert window.levels == [[23], [32, 33], [42, 43]]


def test_a_window_becomes_narrower_and_wider_at_its_end():
    """Also while it has not all of its levels yet: what the columns that stay hold stays."""
    narrow, wide = Window(4, [11, 12]), Window(4, [11, 12, 13, 14, 15])
    for step in range(6):
        assert (narrow.width, wide.width) == (1, 4)
        wide.widen(-3, [[]] * len(wide.levels))
        assert wide.levels == narrow.levels
        assert wide.shift(step, [20 + step] * len(wide.levels[-1])) == narrow.shift(
            step, [20 + step] * len(narrow.levels[-1])
        )
        wide.widen(3, [[1, 2, 3]] * len(wide.levels))
        draft = Trie(step)
        assert len(wide.put(draft)) == len(wide.levels[-1]) == len(narrow.levels[-1]) + 3


@pytest.mark.parametrize("beside", [0, 2, 3, 10, 11, 12, 1000])
def test_its_window_has_no_more_nodes_than_its_budget_says(beside, tiny):
    drafter = LLM(tiny("llama"), drafter="lookahead").engine.drafter
    session = drafter.begin(Request([1, 2, 3], max_new_tokens=100, max_draft=55))
    session.observe(Seen([1, 2, 3], 0))
    rng, sizes = np.random.default_rng(0), []
    for root in range(30):
        budget = Budget(55, 55, beside if root % 3 else int(rng.integers(0, 30)))
        proposal = session.propose(root % 7, budget)
        if root % 3:
            sizes.append(len(proposal.beside) - 1 if proposal.beside else 0)
        tree = fuse([proposal.tree, proposal.beside]) if proposal.beside else proposal.tree
        session.choices(tree, chosen(tree, [1, 2, 3]))
    columns = min(7, (beside + 1) // 4)
    assert max(sizes) <= (beside if columns else 0)
    assert max(sizes) >= 2 * columns
    assert any(session.pool.about(root) for root in range(13))


def test_what_was_not_verified_stays_a_guess_and_is_no_ngram():
    window = Window(3, [11, 12])
    window.shift(10, [21, 22])
    assert window.shift(20, [None, 32]) == [(12, (22, 32))]
    assert window.levels == [[22], [21, 32]]


def test_the_pool_keeps_the_latest():
    pool = Pool(2)
    for tokens in ((1, 2), (3, 4), (1, 2), (5, 6)):
        pool.add(9, tokens)
    assert pool.about(9) == [(5, 6), (1, 2)]
    assert pool.about(8) == []


def test_alike_nodes_are_one_node():
    draft = Trie(5)
    assert draft.add(0, (7, 8)) == [1, 2]
    assert draft.add(0, (7, 9)) == [1, 3]
    assert draft.child(0, 7) == 1
    assert draft.parents == [-1, 0, 1, 1]


@pytest.mark.parametrize("most", [0, 1, 4, 8, 16, 31, 54, 55, 200])
def test_it_keeps_to_what_a_request_allows(most, tiny):
    drafter = LLM(tiny("llama"), drafter="lookahead").engine.drafter
    session = drafter.begin(Request([1, 2, 3], max_new_tokens=100, max_draft=most))
    session.observe(Seen([1, 2, 3], 0))
    root, widest = 4, 0
    for i in range(40):
        tree = proposed(session, root, step_budget(most, 1000, 1000))
        assert len(tree) - 1 <= most
        widest = max(widest, len(tree) - 1)
        session.choices(tree, chosen(tree, [1, 2, 3]))
        session.observe(Seen([root], 3 + i))
        root = (root + 1) % 13
    assert widest > most / 4 or most < 8 or most > 55


def test_its_default_is_what_its_window_needs(tiny):
    llm = LLM(tiny("llama"), drafter="lookahead", ngram=5, window=15, guesses=15)
    assert llm.request([1, 2, 3]).max_draft == 119
    assert llm.request([1, 2, 3], max_draft=7).max_draft == 7


def test_a_draft_that_was_cut_or_fused_moves_the_window_on_too(tiny):
    drafter = LLM(tiny("llama"), drafter="lookahead", ngram=3, window=4).engine.drafter
    sessions = [drafter.begin(Request([1, 2, 3], max_new_tokens=100, max_draft=100)) for _ in range(2)]
    for step in range(20):
        trees = []
        for session in sessions:
            if not step:
                session.observe(Seen([1, 2, 3], 0))
            trees.append(proposed(session, 4 + step % 3, Budget(100, 100)))
        assert trees[0].tokens.tolist() == trees[1].tokens.tolist()
        sessions[0].choices(trees[0], chosen(trees[0], [1, 2, 3]))
        order = [0, *range(len(trees[1]) - 1, 0, -1)]  # the same nodes, numbered anew where that is possible
        kept = sorted(order, key=lambda node: (trees[1].depths[node], -node))
        number = {node: i for i, node in enumerate(kept)}
        parents = [-1, *(number[int(trees[1].parents[node])] for node in kept[1:])]
        other = TokenTree.build(trees[1].tokens[kept], parents)
        sessions[1].choices(other, chosen(other, [1, 2, 3]))
        assert sessions[0].window.levels == sessions[1].window.levels
    tree = proposed(sessions[0], 4, Budget(100, 100))
    before = [list(level) for level in sessions[0].window.levels]
    alone = TokenTree.root(4)
    sessions[0].choices(alone, chosen(alone, [1, 2, 3]))
    assert len(tree) > 1
    assert sessions[0].window.levels == [before[1][1:], before[1]]  # nothing of the last level was verified


def test_seeds_count(tiny):
    drafter = LLM(tiny("llama"), drafter="lookahead").engine.drafter

    def first(**options):
        session = drafter.begin(Request([*range(2, 40)], max_new_tokens=9, max_draft=55, **options))
        session.observe(Seen([*range(2, 40)], 0))
        session.propose(1, Budget(55, 55))
        return session.window.levels[0]

    assert first(seed=1) == first(seed=1)
    assert first(seed=1) != first(seed=2)
    assert first(seed=1) != first(seed=1, sample=1)
    assert first(seed=-1)


def test_ngrams_pass_from_one_request_to_the_next_only_if_asked_and_within_a_collection(tiny):
    for shared in (False, True):
        drafter = LLM(tiny("llama"), drafter="lookahead", shared=shared).engine.drafter
        requests = [Request([1], max_new_tokens=9, collection=name) for name in ("a", "a", "b")]
        one, other, foreign = map(drafter.begin, requests)
        one.pool.add(3, (4, 5, 6, 7))
        assert bool(other.pool.about(3)) == shared
        assert not foreign.pool.about(3)


REPEATING = [5, 6, 7, 8] * 6


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"temperature": 0.7, "seed": 3}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("fixed", [False, True], ids=["ordinary", "fixed"])
def test_texts_are_plain_decodings_in_fewer_steps(fixed, options, tiny):
    """Where steps choose tokens themselves, the window's are drawn by the same noise as the text's."""
    llm = LLM(tiny("llama"), drafter="lookahead")
    if fixed:
        llm.target = llm.engine.target = llm.engine.drafter.target = graphs(tiny("llama"))
    prompts = [REPEATING, [3, 4], [9, 9, 9, 1]]
    plain = LLM(tiny("llama"), drafter="none").generate(prompts, max_new_tokens=60, ignore_eos=True, **options)
    found = llm.generate(prompts, max_new_tokens=60, ignore_eos=True, **options)
    assert [r.tokens for r in found] == [r.tokens for r in plain]
    if not options:
        assert sum(r.stats.steps for r in found) < sum(r.stats.steps for r in plain)


def test_processors_never_see_the_window(tiny):
    """They are called for what may be emitted, as often as without drafts."""
    lengths = []

    def processor(history, logits):
        lengths.append(history.shape[-1])
        return logits

    options = {"max_new_tokens": 30, "ignore_eos": True, "processors": [processor]}
    plain = LLM(tiny("llama"), drafter="none").generate(REPEATING, **options)
    called, lengths[:] = list(lengths), []
    found = LLM(tiny("llama"), drafter="lookahead").generate(REPEATING, **options)
    assert found.tokens == plain.tokens
    assert lengths == called


@pytest.mark.parametrize("options", [{"ngram": 2}, {"window": 0}, {"guesses": 0}])
def test_shapes_that_cannot_be_are_refused(options, tiny):
    with pytest.raises(OptionError, match="at least"):
        LLM(tiny("llama"), drafter="lookahead", **options)


def test_pools_of_the_collections_used_last_are_shared(tiny, monkeypatch):
    """Clients name collections, perhaps one for each request."""
    monkeypatch.setattr("slipstream.drafters.lookahead.COLLECTIONS", 2)
    drafter = LLM(tiny("llama"), drafter="lookahead", shared=True).engine.drafter
    first, *_ = [drafter.begin(Request([1], 9, collection=name)).pool for name in ("a", "b", "a", "c")]
    assert list(drafter._pools) == ["a", "c"]
    assert drafter.begin(Request([1], 9, collection="a")).pool is first
