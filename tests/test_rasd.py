"""rasd: which retrieved continuations stay, what is fused, whom the budget favours, and who is asked when."""

import threading
from dataclasses import replace

import numpy as np
import pytest
import torch

from patience import PATIENCE
from slipstream import LLM, Drafter, DraftSession, Proposal, TokenTree, drafters
from slipstream.accept import Rejection
from slipstream.budget import Budget
from slipstream.budget.calibration import BINS, Calibration
from slipstream.drafters._capabilities import layers
from slipstream.drafters.base import Hidden, Seen
from slipstream.drafters.rasd import WIDER, RasdDrafter, beginning_with, best_of, side_by_side
from slipstream.errors import DrafterError, OptionError
from slipstream.heads import HEADS
from slipstream.heads.packing import pack, pack_first, unpack, unpack_first
from slipstream.request import Request
from slipstream.targets import open_target
from slipstream.tree import fuse
from test_distribution import completed, drawn_trees, joint_over_drafts, random_law, total_variation
from trials import blurred, trials

ROOT = 9
BIG = Budget(100, 20)
# The generator says 1 2 or 3, and would next think of 4; the text holds 1 2 5 6, 4 7 and 8 8.
DRAFT = TokenTree.build([ROOT, 1, 3, 2], [-1, 0, 0, 1], source="eagle", raw=[1, 0.6, 0.2, 0.5])
FIRST = (1, 3, 4)
FOUND = TokenTree.from_continuations(ROOT, [[1, 2, 5, 6], [4, 7], [8, 8]], weights=[2, 1, 1], source="pld")


class Fake(Drafter):
    """Says what `says` gives, and keeps what it was asked."""

    def __init__(self, says, first=None, layers=()):
        super().__init__(None, None, None)
        self.says, self.known, self.layers = says, first, layers
        self.asked, self.threads = [], []

    def begin(self, request):  # noqa: ARG002
        return FakeSession(self)


class FakeSession(DraftSession):
    def __init__(self, drafter):
        self.drafter, self.seen = drafter, []

    def observe(self, seen):
        self.seen.append(seen)

    def propose(self, root, budget):
        mine = self.drafter
        mine.asked.append((root, budget))
        mine.threads.append(threading.get_ident())
        tree = mine.says() if callable(mine.says) else mine.says
        return Proposal(tree, mine.known[: mine.first] if mine.known and mine.first else None)


@pytest.fixture
def joint(monkeypatch):
    """joint(generator, pld=…, **options) -> a rasd of fakes."""

    def make(generator, pld=None, suffix=None, **options):
        fakes = {"eagle": generator} | {k: v for k, v in {"pld": pld, "suffix": suffix}.items() if v is not None}

        def make_part(_, name, given):
            fakes[name].first = given.get("first", 0)
            return fakes[name]

        monkeypatch.setattr(RasdDrafter, "make_part", make_part)
        return drafters.make("rasd", None, generator="eagle", retrievers=",".join([*fakes][1:]), **options)

    return make


def session(drafter):
    return drafter.begin(Request([1, 2], 20))


def paths(tree):
    return {tuple(tree.tokens[tree.path_to(i)][1:].tolist()) for i in range(1, len(tree))}


def longest(tree, text):
    """How many tokens of the text the tree has."""
    node, count = 0, 0
    while count < len(text) and (node := tree.child(node, text[count])) is not None:
        count += 1
    return count


# ---- what becomes of the candidates


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({}, {(1, 2, 5), (1, 2, 5, 6), (4,), (4, 7)}),  # 8 is none of the likeliest three
        ({"top": 2}, {(1, 2, 5), (1, 2, 5, 6)}),  # and 4 none of the likeliest two
        ({"prune": False}, {(1, 2, 5), (1, 2, 5, 6), (4,), (4, 7), (8,), (8, 8)}),
    ],
)
def test_candidates_must_begin_as_the_generator_expects(joint, options, found):
    drafter = joint(Fake(DRAFT, FIRST), Fake(FOUND), **options)
    tree = session(drafter).propose(ROOT, BIG).tree
    assert paths(tree) == paths(DRAFT) | found
    assert len(tree) == 1 + len(paths(tree))  # nothing twice
    assert drafter.generator.first == (options.get("top", 10) if options.get("prune", True) else 0)


@pytest.mark.parametrize(("options", "goes"), [({"top": 2}, {(4,), (4, 7), (8,), (8, 8)}), ({"prune": False}, set())])
def test_a_generator_may_name_more_than_it_was_asked_for(joint, options, goes):
    drafter = joint(Fake(DRAFT, FIRST), Fake(FOUND), **options)
    drafter.generator.first = 100
    assert paths(session(drafter).propose(ROOT, BIG).tree) == (paths(DRAFT) | paths(FOUND)) - goes


def test_a_shared_prefix_is_credited_to_both(joint):
    tree = session(joint(Fake(DRAFT, FIRST), Fake(FOUND))).propose(ROOT, BIG).tree
    assert tree.sources == ("eagle", "pld")
    shared = tree.child(tree.child(0, 1), 2)
    assert tree.raw[shared].tolist() == [0.5, 1.0]
    assert np.isnan(tree.raw[tree.child(0, 3), 1])
    assert np.isnan(tree.raw[tree.child(0, 4), 0])


def test_a_generator_that_can_not_say_prunes_nothing(joint):
    tree = session(joint(Fake(DRAFT), Fake(FOUND))).propose(ROOT, BIG).tree
    assert paths(tree) == paths(DRAFT) | paths(FOUND)


def test_without_fusion_every_source_pays_for_its_own_nodes(joint):
    drafter = joint(Fake(DRAFT, FIRST), Fake(FOUND), fuse=False)
    tree = session(drafter).propose(ROOT, BIG).tree
    kept = beginning_with(FIRST, FOUND)
    assert len(tree) - 1 == (len(DRAFT) - 1) + (len(kept) - 1) == 9  # fused they would be 7
    assert paths(tree) == paths(DRAFT) | paths(kept)
    tree.check(100, ROOT)


def random_tree(rng, source, nodes=12):
    parents = [-1, *(int(rng.integers(0, i)) for i in range(1, nodes))]
    tree = TokenTree.build([ROOT, *rng.integers(0, 3, nodes - 1)], parents, source=source, raw=rng.random(nodes))
    return fuse([tree, TokenTree.root(ROOT)])  # no token twice below one parent


def test_what_stands_twice_changes_nothing_that_is_accepted():
    rng = np.random.default_rng(0)
    for _ in range(200):
        trees = [random_tree(rng, "a"), random_tree(rng, "b"), random_tree(rng, "c", 4)]
        both = side_by_side(trees)
        both.check(100, ROOT)
        assert len(both) - 1 == sum(len(tree) - 1 for tree in trees)
        for text in rng.integers(0, 3, (8, 6)).tolist():
            assert longest(both, text) == longest(fuse(trees), text) == max(longest(tree, text) for tree in trees)


def test_the_best_of_several_trees_are_whole_trees():
    rng = np.random.default_rng(1)
    for nodes in range(12):
        trees = [random_tree(rng, "a", 6), random_tree(rng, "b", 8)]
        kept = best_of(trees, nodes)
        assert sum(len(tree) - 1 for tree in kept) == min(nodes, sum(len(tree) - 1 for tree in trees))
        left = [set(t.value[1:].tolist()) - set(k.value[1:].tolist()) for t, k in zip(trees, kept, strict=True)]
        worst = min((v for k in kept for v in k.value[1:]), default=0)
        assert nodes == 0 or all(value <= worst for values in left for value in values)


# ---- the budget


@pytest.mark.parametrize("fused", [True, False])
def test_a_budget_is_kept(joint, fused):
    rng = np.random.default_rng(2)
    for nodes in range(9):
        for depth in range(1, 4):
            budget = Budget(nodes, depth)
            own = budget.limit(random_tree(rng, "eagle"))
            drafter = joint(Fake(own), Fake(random_tree(rng, "pld")), Fake(random_tree(rng, "suffix")), fuse=fused)
            tree = session(drafter).propose(ROOT, budget).tree
            assert len(tree) - 1 <= nodes
            assert tree.depth <= depth
            tree.check(100, ROOT)


def test_retrievers_may_offer_more_than_the_step_verifies(joint):
    drafter = joint(Fake(DRAFT, FIRST), Fake(FOUND))
    session(drafter).propose(ROOT, Budget(5, 3))
    assert drafter.parts["eagle"].asked == [(ROOT, Budget(5, 3))]
    assert drafter.parts["pld"].asked == [(ROOT, Budget(5 * WIDER, 3))]


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(("text", "wins"), [([ROOT, 1, 2], {(1,), (1, 2)}), ([ROOT, 5, 6], {(5,), (5, 6)})])
def test_whoever_was_right_gets_the_nodes(joint, text, wins, fused):
    """Both are as sure of themselves, and there is room for one of them: the text decides whose scores mean more."""
    generator = Fake(TokenTree.chain(ROOT, [1, 2], source="eagle", raw=[0.9, 0.9]))
    drafter = joint(generator, Fake(TokenTree.chain(ROOT, [5, 6], source="pld", raw=[0.9, 0.9])), fuse=fused)
    mine = session(drafter)
    mine.observe(Seen([1, 2], 0))
    for step in range(10):
        tree = mine.propose(ROOT, Budget(2, 2)).tree
        mine.observe(Seen(text, 2 + 3 * step))
    assert paths(tree) == wins


def test_every_token_that_follows_judges_a_draft_once(joint, monkeypatch):
    drafter, told = joint(Fake(DRAFT), pld=Fake(FOUND)), []
    monkeypatch.setattr(
        drafter, "learn", lambda _, followed, known: told.append((followed, known)) or len(followed) < 3
    )
    mine = session(drafter)
    mine.label(5)
    mine.proposed(TokenTree.chain(5, [6, 7, 8, 9]))
    for said, root in (([5, 6], 7), ([7], 8)):
        mine.observe(Seen(said, 0))
        mine.label(root)
    mine.proposed(TokenTree.chain(8, [1]))
    mine.observe(Seen([8, 9], 0))
    mine.close()
    assert told == [([6, 7], 0), ([6, 7, 8], 2), ([9], 0)]  # the last when the text ended


@pytest.mark.parametrize(("needs", "again"), [((0, 0), 0), ((1, 0), 1), ((0, 1), 1), ((None, 0), None)])
def test_as_much_is_shown_again_as_any_part_needs(needs, again, joint, monkeypatch):
    monkeypatch.setattr(Fake, "rereads", property(lambda fake: fake.known), raising=False)
    assert joint(*(Fake(DRAFT, first=need) for need in needs)).rereads == again


def test_what_was_not_verified_is_judged_too(joint):
    generator = Fake(TokenTree.chain(ROOT, [1], source="eagle", raw=[0.9]))
    drafter = joint(generator, Fake(TokenTree.chain(ROOT, [5], source="pld", raw=[0.1])))
    mine = session(drafter)
    mine.observe(Seen([1, 2], 0))
    assert paths(mine.propose(ROOT, Budget(1, 1)).tree) == {(1,)}
    mine.observe(Seen([ROOT, 5], 2))
    mine.close()
    fresh = Calibration(drafter.names).bins
    labelled = dict(zip(drafter.names, (drafter.calibration.bins - fresh)[..., 1].sum(axis=(1, 2)), strict=True))
    assert labelled == {"eagle": 1, "pld": 1}
    pld, place = drafter.names.index("pld"), (0, int(0.1 * BINS), 0)
    assert drafter.calibration.bins[pld][place] > fresh[pld][place]


# ---- beside each other


class Meeting:
    """Two parts that wait for each other: only if both are being asked at once do they get through."""

    def __init__(self, tree):
        self.tree, self.barrier = tree, threading.Barrier(2, timeout=PATIENCE)

    def __call__(self):
        self.barrier.wait()
        return self.tree


def test_retrieval_goes_on_while_the_generator_drafts(joint):
    meeting = Meeting(DRAFT)
    generator, retriever = Fake(meeting, FIRST), Fake(lambda: meeting() and FOUND)
    tree = session(joint(generator, retriever)).propose(ROOT, BIG).tree
    assert (4, 7) in paths(tree)
    assert generator.threads == [threading.get_ident()] != retriever.threads


def test_without_overlap_it_comes_after_and_says_the_same(joint):
    order = []
    generator = Fake(lambda: order.append("eagle") or DRAFT, FIRST)
    retriever = Fake(lambda: order.append("pld") or FOUND)
    alone = session(joint(generator, retriever, overlap=False)).propose(ROOT, BIG).tree
    assert order == ["eagle", "pld"]
    assert generator.threads == retriever.threads == [threading.get_ident()]
    beside = session(joint(generator, retriever)).propose(ROOT, BIG).tree
    assert (alone.tokens.tolist(), alone.parents.tolist()) == (beside.tokens.tolist(), beside.parents.tolist())
    assert np.array_equal(alone.raw, beside.raw, equal_nan=True)


def test_who_reads_states_is_not_asked_from_another_thread(joint):
    retriever = Fake(FOUND, layers=(3,))
    drafter = joint(Fake(DRAFT, FIRST), retriever)
    assert drafter.layers == (3,)
    assert (4, 7) in paths(session(drafter).propose(ROOT, BIG).tree)
    assert retriever.threads == [threading.get_ident()]


def test_a_failing_part_is_heard_of_and_the_next_step_goes_on(joint):
    trouble = iter([DrafterError("the store is gone"), None])

    def says():
        if error := next(trouble):
            raise error
        return FOUND

    mine = session(joint(Fake(DRAFT, FIRST), Fake(says)))
    with pytest.raises(DrafterError, match="the store is gone"):
        mine.propose(ROOT, BIG)
    assert (4, 7) in paths(mine.propose(ROOT, BIG).tree)


def test_a_generator_that_fails_leaves_nobody_reading(joint):
    began, ended = threading.Event(), []

    def fails():
        began.wait(5)
        raise DrafterError("no memory")

    def slow():
        began.set()
        ended.append(threading.Event().wait(0.05))
        return FOUND

    with pytest.raises(DrafterError, match="no memory"):
        session(joint(Fake(fails), Fake(slow))).propose(ROOT, BIG)
    assert ended


# ---- draws


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(("found", "keeps"), [([[1, 3], [0]], False), ([[9, 3]], True)], ids=["found", "pruned"])
def test_the_joint_law_under_rejection_is_the_targets(joint, found, keeps, fused):
    """Over every tree that the generator can draw: those that are fused lose q, and some of their nodes by what was
    drawn; those that nothing is added to keep it."""
    law, q_law = random_law(1), random_law(2, support=(4, 2))
    truth = completed({(): 1.0}, law, 3)
    first = tuple(np.argsort(-q_law([]))[:3].tolist())
    generator = Fake(None, first)
    mine = session(joint(generator, Fake(TokenTree.from_continuations(9, found, source="pld")), fuse=fused))
    for shape in [(1,), (0, 0), (1, 1), (2, 0)]:
        trees = []
        for tree, weight in drawn_trees(shape, q_law):
            raw = 1 / (2 + tree.tokens[:, None].astype(np.float32))
            generator.says = replace(tree, raw=raw, sources=("eagle",))
            made = mine.propose(9, Budget(3, 3)).tree
            assert (made.q is not None) is keeps
            trees.append((made, weight))
        joint_law, _ = joint_over_drafts(Rejection(), trees, law, {})
        assert total_variation(joint_law, truth) < 1e-12, shape


# ---- the likeliest first tokens


K = 20
FLAT = {  # options with which a drafter's whole tree is its K likeliest first tokens, in order
    "medusa": {"tree": [[rank] for rank in range(K)]},
    "redrafter": {"beams": K, "length": 1},
    "mlp": {"beams": K, "length": 1},
    "eagle": {"width": K, "depth": 1},
    "eagle3": {"width": K, "depth": 1},
    "model": {"mode": "beam", "width": K, "depth": 1},
}


def generator(kind, model, first=0, **options):
    if kind == "model":
        trial = trials("model", model)[0]
    else:
        given = {"draft_ids": range(0, 64, 2)} if kind == "eagle3" else {}  # one that can't guess every token
        head = HEADS[kind].fresh(model, **given)
        noise = torch.Generator().manual_seed(1)
        for weight in head.parameters():  # an untrained head may not care which token it reads
            weight.data += 0.3 * torch.randn(weight.shape, generator=noise)
        trial = {"drafter_path": head}
    return drafters.make(kind, open_target(model), **trial | options, first=first)


def proposals(drafter, prompts, **request):
    """What it drafts after each prompt, asked for all at once."""
    begun = []
    for i, prompt in enumerate(prompts):
        begun.append(drafter.begin(Request(prompt, 20, **request)))
        noise = torch.Generator().manual_seed(i)
        width = drafter.target.model.config.hidden_size
        hidden = {layer: torch.randn(len(prompt), width, generator=noise) for layer in layers(drafter)}
        begun[-1].observe(Seen(prompt, 0, Hidden(hidden)))
    return drafter.propose(begun, [5, 6, 7][: len(prompts)], [BIG] * len(prompts))


PROMPTS = [[1, 2, 3], [8, 9], [4, 4, 4, 4]]


@pytest.mark.parametrize("kind", FLAT)
def test_a_generator_names_its_likeliest_first_tokens(kind, tiny):
    model = tiny("llama")
    for expected, plain, few, many in zip(
        proposals(generator(kind, model, **FLAT[kind]), PROMPTS),
        proposals(generator(kind, model), PROMPTS),
        proposals(generator(kind, model, first=7), PROMPTS),
        proposals(generator(kind, model, first=K), PROMPTS),
        strict=True,
    ):
        tokens = expected.tree.tokens[1:].tolist()
        assert len(tokens) == K
        assert plain.first is None
        assert few.first == tuple(tokens[:7])
        assert many.first == tuple(tokens)
        for asked in (few, many):  # and drafts as ever
            assert asked.tree.tokens.tolist() == plain.tree.tokens.tolist()
            assert asked.tree.parents.tolist() == plain.tree.parents.tolist()
            assert asked.tree.raw[1:].tolist() == plain.tree.raw[1:].tolist()


@pytest.mark.parametrize("kind", FLAT)
def test_where_it_draws_it_names_them_all_the_same(kind, tiny):
    from slipstream.sampling import Sampling

    model, heat = tiny("llama"), {"sampling": Sampling(temperature=0.8), "accept": Rejection()}
    best = proposals(generator(kind, model, first=1000), PROMPTS)
    drawn = proposals(generator(kind, model, first=1000, mode="sample"), PROMPTS, **heat)
    plain = proposals(generator(kind, model, mode="sample"), PROMPTS, **heat)
    for one, other, without in zip(best, drawn, plain, strict=True):
        assert len(one.first) == (32 if kind == "eagle3" else 64)  # there are no more
        assert other.first[:32] == one.first[:32]  # what eagle3 can't guess has no order
        assert other.tree.q is not None
        assert other.tree.tokens.tolist() == without.tree.tokens.tolist()
        assert other.tree.raw[1:].tolist() == without.tree.raw[1:].tolist()
        assert torch.equal(other.tree.q, without.tree.q)


def test_first_tokens_travel_behind_the_nodes():
    nodes = pack(torch.tensor([[7, 8, 0]]), torch.tensor([[0, 1, -1]]), torch.tensor([[0.5, 0.25, 0.0]]))
    both = pack_first(nodes, torch.tensor([[30, 31]]))
    assert both.shape == (1, 3, 5)
    assert both[0, 0].tolist() == [7, 8, 0, 30, 31]
    assert unpack_first(both[0].numpy()) == (30, 31)
    assert unpack_first(nodes[0].numpy()) is None
    tree = unpack(9, both[0].numpy(), "x")
    assert tree.tokens.tolist() == [9, 7, 8]
    assert tree.parents.tolist() == [-1, 0, 1]


# ---- the whole


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["redrafter", "model"])
def test_both_kinds_of_drafts_are_verified_and_judged(kind, tiny):
    model = tiny("llama")
    head = blurred(model) if kind == "model" else HEADS[kind].fresh(model)
    repeating = [5, 6, 7, 8] * 10
    plain = LLM(model, drafter="none").generate(repeating, max_new_tokens=60)
    llm = LLM(model, drafter="rasd", generator=kind, drafter_path=head, retrievers="pld, suffix", top=50)
    result = llm.generate([repeating, repeating[:7], [40]], max_new_tokens=60)[0]
    assert result.tokens == plain.tokens
    assert all(result.stats.by_source[name]["proposed"] > 0 for name in (kind, "pld", "suffix"))
    drafter = llm.engine.drafter
    labelled = (drafter.calibration.bins - Calibration(drafter.names).bins)[..., 1].sum(axis=(1, 2))
    assert drafter.names == [kind, "pld", "suffix"]
    assert (labelled > 0).all()
    assert result.stats.by_source["suffix"]["accepted"] > 0


def test_drawn_drafts_can_be_rejected(tiny):
    model = tiny("llama")
    head = HEADS["medusa"].fresh(model)
    llm = LLM(model, drafter="rasd", generator="medusa", drafter_path=head, mode="sample", retrievers="suffix", top=50)
    result = llm.generate([5, 6, 7, 8] * 10, max_new_tokens=40, temperature=0.5, accept="rejection", seed=1)
    assert result.stats.exact
    assert {"medusa", "suffix"} <= set(result.stats.by_source)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"generator": "pld"}, "pld can't be a generator: name one of dflash, eagle, eagle3, falcon, .*, redrafter"),
        ({"retrievers": "pld, eagle"}, "eagle can't be a retriever: name some of dresd, pld"),
        ({"generator": "rasd"}, "rasd can't be a generator"),
        ({"retrievers": "auto"}, "auto can't be a retriever"),
        ({"retrievers": " ,"}, "rasd retrieves: name at least one of dresd"),
        ({"top": 0}, "top and length must be at least 1, found 0 and 16"),
        ({"length": 0}, "top and length must be at least 1, found 10 and 0"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, says, tiny):
    with pytest.raises(OptionError, match=says):
        LLM(tiny("llama"), drafter="rasd", **options)


def test_auto_does_not_ask_it(tiny):
    with pytest.raises(OptionError, match="rasd asks others"):
        LLM(tiny("llama"), drafter="auto", drafters="pld, rasd")


def test_without_a_head_it_says_what_is_missing(tiny):
    with pytest.raises(DrafterError, match="drafter_path="):
        LLM(tiny("llama"), drafter="rasd")
