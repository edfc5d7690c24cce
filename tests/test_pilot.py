"""The budget in a world whose costs and acceptance are known: how near it comes to the best that could be done."""

import itertools
from collections import Counter

import numpy as np
import pytest

from slipstream.budget.calibration import KEPT, Calibration
from slipstream.budget.costs import Costs
from slipstream.budget.pilot import Luck, Pilot
from slipstream.tree import TokenTree, fuse

# Milliseconds of a step by rows: two CPU cores in float32 and bfloat16, and a GPU, where rows cost next to nothing.
CURVES = {
    "float32": {1: 40, 2: 47, 4: 74, 8: 91, 16: 99, 32: 114, 64: 139},
    "bfloat16": {1: 35, 2: 42, 4: 42, 8: 42, 16: 44, 32: 56, 64: 65},
    "gpu": {1: 1.1, 8: 1.15, 16: 1.25, 32: 1.3, 64: 1.5},
}
LENGTH, LIMIT = 12, 32


class World:
    """A target with sources that draft chains. With probability `hit` the text begins with a source's chain, and goes
    on with it with probability `keep` per token; the sources' hits exclude each other."""

    def __init__(self, curve, seed=0):
        self.seconds = {rows: ms / 1e3 for rows, ms in CURVES[curve].items()}
        self.costs, self.rng = Costs(self.seconds), np.random.default_rng(seed)
        self.sources = {}  # name: (hit, keep, seconds)

    def texts(self, steps):
        """What the text goes on with at each step; 0 is nobody's token."""
        return [self.text() for _ in range(steps)]

    def text(self):
        draw = self.rng.random()
        for i, (hit, keep, _) in enumerate(self.sources.values()):
            if draw < hit:
                return [*self.chain(i)[: int(self.rng.geometric(1 - keep))], 0]
            draw -= hit
        return [0]

    def chain(self, source):
        return range(100 * (source + 1), 100 * (source + 1) + LENGTH)

    def run(self, pilot, texts, clock=lambda _step, _call, seconds: seconds):
        """(tokens, seconds) of every step. clock: what it shows of something that takes so long; call: its number among
        those of its kind."""
        log, calls = [], Counter()

        def shown(kind, seconds):
            calls[kind] += 1
            return clock(len(log), calls[kind], seconds)

        for text in texts:
            trees, drafting = [TokenTree.root(0)], {}
            for name in pilot.asks(self.sources, 1, lambda: pilot.expects([fuse(trees)], [LIMIT])):  # noqa: B023
                chain = self.chain(list(self.sources).index(name))
                trees.append(TokenTree.chain(0, chain, source=name, raw=[0.8] * LENGTH))
                drafting[name] = self.sources[name][2]
            fused = fuse(trees)
            counted = pilot.count({name: shown(name, seconds) for name, seconds in drafting.items()})
            (kept,) = pilot.choose([fused], [LIMIT], counted)
            truth = text(kept) if callable(text) else text
            accepted = node = 0
            while (child := kept.child(node, truth[accepted])) is not None:
                node, accepted = child, accepted + 1
            verifying = float(self.costs.seconds(len(kept)))
            pilot.learn(fused, truth)  # as the text that follows will show, whatever was verified
            pilot.charge(len(kept), 1, accepted + 1, shown(len(kept), verifying), pilot.spent(counted, 1))
            log.append((accepted + 1, verifying + sum(drafting.values())))
        return np.array(log)

    def best_fixed(self, texts):
        """Tokens per second of the best fixed choice in hindsight: how much of each source's chain to verify."""
        right = np.zeros((len(self.sources), LENGTH + 1))  # how often each length of each chain was right
        for text in texts:
            if text[0]:
                right[text[0] // 100 - 1, 1 : len(text)] += 1
        gains = np.cumsum(right, axis=1) / len(texts)
        best = 0.0
        for lengths in itertools.product(range(LENGTH + 1), repeat=len(self.sources)):
            drafting = sum(s[2] for s, n in zip(self.sources.values(), lengths, strict=True) if n)
            tokens = 1 + sum(gains[i, n] for i, n in enumerate(lengths))
            best = max(best, tokens / (drafting + float(self.costs.seconds(1 + sum(lengths)))))
        return best


def asked(pilot, name, expected=1.0):
    return name in pilot.asks([name], 1, lambda: expected)


def rate(log):
    return log[:, 0].sum() / log[:, 1].sum()


SOURCES = {
    "cheap and sometimes right": {"a": (0.4, 0.8, 0.0001)},
    "nearly always right": {"a": (0.95, 0.97, 0.0002)},
    "hardly ever right": {"a": (0.03, 0.3, 0.0003)},
    "good but dear": {"a": (0.9, 0.9, 0.030)},
    "one good and one useless": {"a": (0.6, 0.85, 0.0002), "b": (0.01, 0.1, 0.002)},
    "two that complement each other": {"a": (0.35, 0.7, 0.0001), "b": (0.4, 0.9, 0.0002)},
}


@pytest.mark.parametrize("sources", SOURCES)
@pytest.mark.parametrize("curve", CURVES)
def test_within_three_percent_of_the_best_fixed_choice(curve, sources):
    world = World(curve)
    world.sources = SOURCES[sources]
    texts = world.texts(6000)
    log = world.run(Pilot(Costs(world.seconds), list(world.sources)), texts)
    assert rate(log) > 0.97 * world.best_fixed(texts)


def wild(share, factor, seed=1):
    """Some of all times are many times as long."""
    rng = np.random.default_rng(seed)
    return lambda _step, _call, seconds: seconds * (factor if rng.random() < share else 1)


CLOCKS = {
    "the first calls of every kind load code": lambda _step, call, seconds: 5.0 if call <= 3 else seconds,
    "one in a hundred is a hundred times as long": wild(0.01, 100),
    "a pause of a second every fifty steps": lambda step, _, seconds: seconds + (1.0 if step % 50 == 49 else 0.0),
    "a neighbour for a while": lambda step, _, seconds: seconds * (2 if 500 < step < 1000 else 1),
}


@pytest.mark.parametrize("clock", CLOCKS)
@pytest.mark.parametrize("sources", SOURCES)
@pytest.mark.parametrize("curve", CURVES)
def test_a_bad_clock_costs_less_than_five_percent(curve, sources, clock):
    """What it shows and nobody spent on purpose must not change what is done."""
    world = World(curve)
    world.sources = SOURCES[sources]
    texts = world.texts(2000)
    good = world.run(Pilot(Costs(world.seconds), list(world.sources)), texts)
    bad = world.run(Pilot(Costs(world.seconds), list(world.sources)), texts, CLOCKS[clock])
    assert rate(bad) > 0.95 * rate(good)


def test_a_dear_source_is_asked_where_the_cheap_one_has_little_to_say():
    """At every other step the cheap one is right and sure of it; the dear one is right at all of them."""
    costs, dear = Costs({1: 0.040, 16: 0.044, 64: 0.060}), 0.020
    text = [*range(1, 9), 0]

    def rate_of(asks):
        pilot = Pilot(costs, ["cheap", "dear"])
        tokens = seconds = 0.0
        for step in range(3000):
            guess, score = (text[:8], 0.95) if step % 2 else ([50, 51], 0.1)
            cheap = TokenTree.chain(0, guess, source="cheap", raw=[score] * len(guess))
            asked = asks(pilot, cheap)
            fused = fuse([cheap, TokenTree.chain(0, text[:6], source="dear", raw=[0.9] * 6)] if asked else [cheap])
            drafting = {"cheap": 0.0001, **({"dear": dear} if asked else {})}
            (kept,) = pilot.choose([fused], [16], pilot.count(drafting))
            pilot.learn(fused, text)
            node = accepted = 0
            while (child := kept.child(node, text[accepted])) is not None:
                node, accepted = child, accepted + 1
            verifying = costs.seconds(len(kept))
            pilot.charge(len(kept), 1, accepted + 1, verifying, sum(drafting.values()))
            if step >= 500:
                tokens, seconds = tokens + accepted + 1, seconds + verifying + sum(drafting.values())
        return tokens / seconds

    never, always = rate_of(lambda *_: False), rate_of(lambda *_: True)
    by_need = rate_of(lambda pilot, cheap: asked(pilot, "dear", pilot.expects([cheap], [16])))
    assert by_need > 1.1 * max(never, always)


@pytest.mark.parametrize("curve", CURVES)
def test_regret_shrinks_after_a_switch(curve):
    world = World(curve)
    pilot = Pilot(Costs(world.seconds), ["a", "b"])
    for phase, sources in enumerate(
        [
            {"a": (0.9, 0.95, 0.0002), "b": (0.02, 0.2, 0.0002)},
            {"a": (0.02, 0.2, 0.0002), "b": (0.9, 0.95, 0.0002)},
            {"a": (0.02, 0.2, 0.0002), "b": (0.02, 0.2, 0.0002)},
            {"a": (0.9, 0.95, 0.0002), "b": (0.02, 0.2, 0.0002)},
        ]
    ):
        world.sources = sources
        texts = world.texts(3000)
        log = world.run(pilot, texts)
        early = 1 - rate(log[:300]) / world.best_fixed(texts[:300])
        late = 1 - rate(log[-1500:]) / world.best_fixed(texts[-1500:])
        assert late < 0.035, (phase, early, late)
        assert late < max(early, 0.01)


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("trust", [0, 20, 200])
def test_an_adversary_costs_less_than_three_percent(curve, trust):
    """Drafts are right until they are trusted, then wrong whenever one is verified."""
    world = World(curve)
    world.sources = {"a": (0.0, 0.0, 0.002)}
    right = [*range(100, 100 + LENGTH), 0]
    verified = 0

    def adversary(kept):
        nonlocal verified
        verified += len(kept) > 1
        return right if verified % (2 * trust + 1) < trust and len(kept) == 1 else [0]

    log = world.run(Pilot(Costs(world.seconds), ["a"]), [adversary] * 6000)
    assert rate(log) > 0.97 / world.seconds[1]


def test_a_batch_shares_its_rows_where_they_gain_most():
    """The step is as wide as the better draft deserves, and the worse one may use what is paid for anyway."""
    pilot = Pilot(Costs({rows: ms / 1e3 for rows, ms in CURVES["bfloat16"].items()}), ["a"])
    for _ in range(300):  # high scores are right, low ones wrong
        pilot.learn(TokenTree.chain(0, range(1, 9), source="a", raw=[0.95] * 8), list(range(1, 9)))
        pilot.learn(TokenTree.chain(0, [1], source="a", raw=[0.05]), [9])
    good = TokenTree.chain(0, range(1, 9), source="a", raw=[0.95] * 8)
    bad = TokenTree.chain(0, range(1, 9), source="a", raw=[0.05] * 8)
    one, other = pilot.choose([good, bad], [16, 16], {"a": 0.0})
    assert len(one) == 9
    assert len(other) <= len(one)
    assert pilot.last.rate > pilot.last.plain
    (alone,) = pilot.choose([bad], [16], {"a": 0.0})
    assert len(alone) == 1


def test_calibration_learns_what_scores_mean():
    calibration, rng = Calibration(), np.random.default_rng(0)
    for _ in range(4000):  # says 0.9 and is right in one of three
        tree = TokenTree.build([0, 1, 2], [-1, 0, 0], source="a", raw=[1.0, 0.9, 0.2])
        calibration.learn(tree, 0, [1] if rng.random() < 1 / 3 else [2])
    learnt = calibration.probability
    assert learnt[0, int(0.9 * 16)] == pytest.approx(1 / 3, abs=0.08)
    assert learnt[0, int(0.2 * 16)] == pytest.approx(2 / 3, abs=0.08)
    assert learnt[0, 10] == pytest.approx(0.8 * 10.5 / 16)  # of which nothing was seen
    known = calibration.labelled
    calibration.forget()
    assert calibration.labelled == pytest.approx(KEPT * known)
    assert calibration.probability[0, int(0.2 * 16)] == pytest.approx(2 / 3, abs=0.15)  # less sure, but not of less


def test_nodes_count_only_where_their_parents_were_right():
    calibration = Calibration()
    tree = TokenTree.build([0, 1, 2, 3, 4], [-1, 0, 1, 0, 3], source="a", raw=[1, 0.1, 0.3, 0.5, 0.7])
    calibration.learn(tree, 0, [1, 9])
    labelled = {
        place: tuple(calibration._counts[place]) for place in np.ndindex(4, 16) if calibration._counts[place][1]
    }
    assert labelled == {(0, 1): (1, 1), (1, 4): (0, 1), (0, 8): (0, 1)}  # the child of 3 was never asked about


def test_costs_follow_what_steps_take():
    costs = Costs({1: 1.0, 4: 1.6, 8: 2.0})
    assert costs.seconds(2) == pytest.approx(1.2)
    assert costs.seconds(16) == pytest.approx(2.8)
    assert Costs({1: 1.0, 8: 2.0}, padded=True).seconds(2) == 2.0
    costs.observe(1, 1, 1.0)
    for _ in range(200):
        costs.observe(4, 1, 3.0)
        costs.observe(1, 1, 1.0)
    assert costs.seconds(4) == pytest.approx(3.0, rel=0.02)
    assert costs.seconds(1) == pytest.approx(1.0, rel=0.001)
    costs.observe(1, 1, 100.0)  # somebody else's business
    assert costs.seconds(1) == pytest.approx(1.0, rel=0.001)
    with pytest.raises(ValueError, match="the time of one row"):
        Costs({2: 1.0})


@pytest.mark.parametrize("rows", [1, 16])
def test_any_step_says_how_fast_the_machine_is(rows):
    """It was busy when its costs were measured: steps that were never seen cost less than that too."""
    before = {1: 2.0, 4: 4.0, 16: 6.0}
    costs = Costs(before)
    for _ in range(20):
        costs.observe(rows, 1, before[rows] / 2)
    assert [costs.seconds(rows) for rows in before] == pytest.approx([1.0, 2.0, 3.0], rel=0.06)
    costs.observe(rows, 1, before[rows])  # once: hardly anything
    assert costs.seconds(4) == pytest.approx(2.0, rel=0.1)


def test_a_slow_first_step_is_not_how_fast_the_machine_is():
    """As when code is loaded, or brought onto a device."""
    costs = Costs({1: 1.0, 8: 1.1, 16: 1.2})
    costs.observe(1, 1, 2.9)
    assert costs.seconds(16) < 1.2 * 1.3
    for _ in range(20):
        costs.observe(16, 1, 1.2)
    assert [costs.seconds(rows) for rows in (1, 8, 16)] == pytest.approx([1.0, 1.1, 1.2], rel=0.15)


def test_costs_that_changed_for_good_are_believed_in_the_end():
    costs = Costs({1: 1.0, 8: 2.0})
    costs.observe(1, 1, 10.0)
    assert costs.seconds(1) == 1.0
    for _ in range(200):
        costs.observe(1, 1, 10.0)
    assert costs.seconds(1) == pytest.approx(10.0, rel=0.01)


def test_a_first_draft_that_loads_code_is_nobodys_loss():
    pilot = Pilot(Costs({1: 0.010, 64: 0.012}), ["a"])
    chain = TokenTree.chain(0, range(1, 5), source="a", raw=[0.9] * 4)
    counted = []
    for seconds in (5.0, 2.0, 4.0, 0.001, 1.0, *[0.001] * 3, 3.0):
        drafting = pilot.count({"a": seconds})
        counted.append(drafting["a"])
        (kept,) = pilot.choose([chain], [8], drafting)
        pilot.charge(len(kept), 1, 1 + len(kept), 0.010, drafting["a"])
    assert counted == pytest.approx([*[0.0] * 3, *[0.001] * 5, 0.0014])  # later on, an interruption counts a little
    assert asked(pilot, "a")


def test_a_source_that_was_slow_at_first_is_asked_again_soon():
    pilot = Pilot(Costs({1: 0.001, 64: 0.0012}), ["a"])
    chain = TokenTree.chain(0, range(1, 5), source="a", raw=[0.9] * 4)
    pilot.sources["a"].calibration.trust(20)
    steps, drafts = 0, 0
    while drafts < 6:
        steps += 1
        if asked(pilot, "a"):
            drafting = pilot.count({"a": 2.0 if drafts < 3 else 0.0001})
            pilot.choose([chain], [8], drafting)
            drafts += 1
    assert steps < 200
    assert pilot.sources["a"].pays


def test_gains_on_one_text_do_not_pay_for_losses_on_the_next():
    pilot = Pilot(Costs({1: 1.0, 64: 1.5}), ["a"])
    for another in (False, True):
        for _ in range(20):
            pilot.charge(8, 1, 4, pilot.costs.seconds(8), 0.0)
        if another:
            pilot.begin()
        for _ in range(27):
            pilot.charge(1, 1, 1, 1.0, 0.5)  # half a step of drafting for nothing
        assert pilot.resting == another
    pilot.begin()
    assert pilot.resting


def test_of_heads_the_better_one_is_asked_and_never_both():
    often = {"good": 0, "bad": 0}
    pilot, text = Pilot(Costs({1: 1.0, 64: 1.1}), list(often), heads=dict.fromkeys(often, ())), [1, 2, 3, 4, 5, 0]
    for _ in range(600):
        asked = list(pilot.asks(often, 1, lambda: 1.0))
        trees = [TokenTree.chain(0, text[:5] if name == "good" else [7, 8], source=name, raw=None) for name in asked]
        fused = fuse([TokenTree.root(0), *trees])
        (kept,) = pilot.choose([fused], [8], pilot.count(dict.fromkeys(asked, 0.5)))
        pilot.learn(fused, text)
        pilot.charge(len(kept), 1, min(len(kept), 6), pilot.costs.seconds(len(kept)), 0.5 * len(asked))
        assert len(asked) <= 1
        for name in asked:
            often[name] += 1
    assert often["good"] > 500
    assert often["bad"] < 60


def test_a_head_whose_whole_draft_takes_too_long_is_asked_for_as_much_as_pays():
    """Three rows cost little more than one, four nearly two: its first two tokens are all there is to gain."""
    often, text = {"head:2": 0, "head": 0}, [1, 2, 3, 4, 5, 0]
    costs = Costs({1: 1.0, 3: 1.1, 4: 1.8, 8: 2.5, 16: 4.0})
    pilot = Pilot(costs, ["head"], heads={"head": (2,)})
    assert pilot.sources["head:2"].calibration is pilot.sources["head"].calibration  # they say the same
    for _ in range(600):
        asked = list(pilot.asks(["head"], 1, lambda: 1.0))
        assert len(asked) <= 1
        drafts, seconds = [TokenTree.root(0)], {}
        for name in asked:
            often[name] += 1
            drafts.append(TokenTree.chain(0, text[: min(5, pilot.sources[name].most)], source="head", raw=None))
            seconds[name] = 0.15 if name == "head:2" else 0.9
        (kept,) = pilot.choose([fuse(drafts)], [8], pilot.count(seconds))
        pilot.learn(fuse(drafts), text)
        pilot.charge(len(kept), 1, len(kept), pilot.costs.seconds(len(kept)), sum(seconds.values()))
    assert often["head:2"] > 500
    assert often["head"] < 20


def test_what_cannot_be_right_together_is_not_expected_together():
    """Two sources, each nearly sure of another token: one of them at most will come."""
    pilot = Pilot(Costs({1: 1.0, 8: 1.0}), ["a", "b"])
    for name in "ab":
        pilot.sources[name].calibration.trust(1e6)
    sure, also = (
        TokenTree.chain(0, [token], source=name, raw=[p]) for token, name, p in ((1, "a", 0.9), (2, "b", 0.7))
    )
    pilot.choose([fuse([sure, also])], [8], {"a": 0.0, "b": 0.0})
    assert 1.9 < pilot.last.tokens <= 2.0
    assert pilot.expects([also], [8]) == pytest.approx(1.7, abs=0.04)


def test_whoever_takes_long_is_asked_beside_others_as_far_as_it_earns_it():
    """A store that is searched for a long time beside a head: where each knows what the other does not, both are asked,
    and where the head knows it too, it alone."""
    for alike in (False, True):
        often = {"store": 0, "head": 0}
        pilot = Pilot(Costs({1: 1.0, 64: 1.1}), list(often), heads={"head": ()})
        for step in range(600):
            text = [1, 2, 3, 4, 5, 0] if step % 2 else [6, 7, 8, 9, 0]
            trees = [TokenTree.root(0)]
            for name in pilot.asks(often, 1, lambda: pilot.expects([fuse(trees)], [16])):  # noqa: B023
                knows = step % 2 == (name == "head") or (name == "head" and alike)
                guess, score = (text[:4], 0.9) if knows else ([50, 51], 0.1)
                trees.append(TokenTree.chain(0, guess, source=name, raw=[score] * len(guess)))
                often[name] += step >= 300
            drafting = {name: 0.3 for tree in trees for name in tree.sources}
            fused = fuse(trees)
            (kept,) = pilot.choose([fused], [16], pilot.count(drafting))
            pilot.learn(fused, text)
            node = accepted = 0
            while (child := kept.child(node, text[accepted])) is not None:
                node, accepted = child, accepted + 1
            pilot.charge(len(kept), 1, accepted + 1, pilot.costs.seconds(len(kept)), sum(drafting.values()))
        assert often["head"] > (290 if alike else 140)
        assert often["store"] < 15 if alike else often["store"] > 290


def test_what_is_done_with_drafts_counts_for_whoever_is_asked_alone():
    pilot = Pilot(Costs({1: 1.0, 64: 1.1}), ["a", "b"])
    for _ in range(10):
        pilot.joined(1.0, batch=2)
    assert pilot.joining.seconds == 0.5
    right, wrong = TokenTree.chain(0, [1], source="a", raw=[0.9]), TokenTree.chain(0, [2], source="b", raw=[0.9])
    for _ in range(100):
        pilot.learn(fuse([right, wrong]), [1])
        pilot.count({"a": 0.0, "b": 0.0})
    pilot.choose([right], [8], {"a": 0.0})
    assert pilot.last.rate == pytest.approx(pilot.last.tokens / (0.5 + pilot.costs.seconds(2)))
    pilot.judge()
    assert pilot.sources["a"].advantage() == pytest.approx((pilot.last.rate - 1) / 2)  # half of the first look
    pilot.choose([fuse([right, wrong])], [8], {"a": 0.0, "b": 0.0})
    pilot.judge()
    assert 0 <= pilot.sources["b"].advantage() < 0.02  # without it there would be as much to do


@pytest.mark.parametrize("batch", [1, 3])
def test_a_source_is_worth_what_drafts_without_it_would_be_worth_less(batch):
    """Each is judged by its sequences' trees, some of which it has no part in."""
    costs, rng = Costs({1: 1.0, 8: 1.05, 32: 1.2}), np.random.default_rng(0)
    seconds = {"a": 0.03, "b": 0.04}

    def draft(source):
        tokens = 1 + rng.permutation(6)  # children of one parent are not the same
        parents = [-1, *(int(rng.integers(0, i)) for i in range(1, 7))]
        return TokenTree.build([0, *tokens], parents, source=source, raw=[np.nan, *rng.uniform(0.2, 1.0, 6)])

    def rate(drafts, spent):
        """With nothing but these, at best."""
        pilot = Pilot(costs, ["a", "b"])
        pilot.choose(drafts, [5] * batch, {"a": spent})
        return pilot.last.rate

    ours, theirs = ([draft(name) for _ in range(batch)] for name in "ab")
    theirs[-1] = TokenTree.root(0) if batch > 1 else theirs[-1]
    pilot = Pilot(costs, ["a", "b"])
    both = [fuse([a, b]) for a, b in zip(ours, theirs, strict=True)]
    for _ in range(4):  # the first three drafts are not counted
        pilot.choose(both, [5] * batch, pilot.count(seconds))
        pilot.judge()
    whole = rate(both, 0.07)
    assert pilot.sources["a"].advantage() == pytest.approx((whole / rate(theirs, 0.04) - 1) / 2)  # half of the first
    assert pilot.sources["b"].advantage() == pytest.approx((whole / rate(ours, 0.03) - 1) / 2)


def test_whoever_is_known_to_pay_is_judged_now_and_then():
    """And always, if it does not, or if nothing is verified."""
    pilot, good, bad = Pilot(Costs({1: 1.0, 8: 1.1}), ["a"]), [], []
    for asked, score in ((good, 0.9), (bad, 0.01)):
        pilot.sources["a"].renew()
        tree = TokenTree.chain(0, [1, 2, 3], source="a", raw=[score] * 3)
        for _ in range(40):
            pilot.choose([tree], [3], pilot.count({"a": 0.02}))
            pilot.judge()
            asked.append(pilot.sources["a"].asked[0])
    assert good[10] == 8  # of the first three drafts nothing was learnt
    assert good[-1] == 8 + 8  # drafts 12, 16, … 40
    assert bad[-1] == 40


def test_reading_a_text_is_not_what_a_draft_takes():
    pilot = Pilot(Costs({1: 0.010, 64: 0.012}), ["a"])
    for _ in range(10):
        pilot.count({"a": 0.002})
    source = pilot.sources["a"]
    for _ in range(3):  # whatever a text takes at first may be due to code that is loaded
        assert pilot.count({"a": 0.5}, new={"a"}) == {"a": pytest.approx(0.002)}
        assert source.reading == 0
    pilot.count({"a": 0.5}, new={"a"})
    assert (source.seconds, source.reading) == (pytest.approx(0.002), pytest.approx(0.498))
    pilot.choose([TokenTree.chain(0, [1], source="a", raw=[0.9])], [8], {"a": 0.002})
    pilot.judge()
    assert source.wait > 100  # but it is paid for before the next probe
    pilot.count({"a": 0.002})
    assert source.reading == 0
    assert pilot.count({"a": 0.001}, new={"a"}) == {"a": pytest.approx(0.0018)}  # with reading included: it takes less


def test_probes_do_not_keep_it_resting():
    pilot = Pilot(Costs({1: 1.0, 64: 1.5}), ["a"])
    while not pilot.resting:
        pilot.charge(8, 1, 1, 1.5, 2.0)
    rested = []
    for _ in range(400):
        pilot.charge(1, 1, 1, 1.0, 0.5)
        rested.append(pilot.resting)
    assert rested[0]
    assert not all(rested)


def test_a_level_that_is_new_is_judged_by_the_next_one():
    source = Pilot(Costs({1: 1.0}), ["a"]).sources["a"]
    source.advantages[1], source.advantages[3] = 0.5, -0.5
    found = []
    for source.level in range(5):
        found.append(source.advantage())
    assert found == [0.5, 0.5, 0.5, -0.5, -0.5]


def test_luck_is_what_came_of_what_was_promised():
    luck = Luck()
    assert luck.share == 1
    for _ in range(3):
        luck.see(2.0, 0.0)
    unlucky = luck.share
    assert unlucky < 0.5
    for _ in range(50):
        luck.see(1.0, 1.0)
    assert unlucky < luck.share < 1
    for _ in range(50):
        luck.see(1.0, 3.0)
    assert luck.share == 1  # a text that gives more than was promised is promised no more than others


@pytest.mark.parametrize("batch", [1, 3])
def test_less_is_verified_of_a_text_without_luck(batch):
    pilot = Pilot(Costs({1: 1.0, 64: 20.0}), ["a"])
    tree = TokenTree.chain(0, range(1, 9), source="a", raw=[0.9] * 8)
    for i in range(100):
        pilot.learn(tree, [1, 2, 3, 4, 5, 6, 7, 8] if i % 10 else [9])

    def nodes(share):
        return len(pilot.choose([tree] * batch, [8] * batch, {"a": 1e-6}, [share] * batch)[0]) - 1

    found = [nodes(share) for share in (1.0, 0.5, 0.1)]
    assert found[0] >= found[1] >= found[2] == 0 < found[0]
    assert len(pilot.choose([tree] * batch, [8] * batch, {"a": 1e-6})[0]) - 1 == found[0]


def test_a_draft_is_labelled_as_far_as_the_text_goes():
    """In pieces or at once, the same is learnt; and it ends as soon as the text has left the draft."""
    tree = TokenTree.build([0, 1, 2, 3, 9], [-1, 0, 1, 2, 0], source="a", raw=[1, 0.5, 0.5, 0.5, 0.1])
    once, twice = Pilot(Costs({1: 1.0}), ["a"]), Pilot(Costs({1: 1.0}), ["a"])
    assert not once.learn(tree, [1, 2, 3, 4])
    assert twice.learn(tree, [1])
    assert twice.learn(tree, [1, 2], 1)
    assert not twice.learn(tree, [1, 2, 3], 2)
    assert np.array_equal(once._counts, twice._counts)
    assert not twice.learn(tree, [7])


def test_a_source_that_costs_nothing_is_not_kept_waiting_long():
    """It says nothing that is right; one that takes as long as many steps is asked as rarely as that."""
    pilot, taken = Pilot(Costs({1: 1.0, 64: 64.0}), ["cheap", "dear"]), {"cheap": 1e-5, "dear": 0.5}
    often = dict.fromkeys(taken, 0)
    for _ in range(3000):
        asked = list(pilot.asks(taken, 1, lambda: 1.0))
        tree = fuse([TokenTree.root(0), *(TokenTree.chain(0, [1], source=name, raw=[0.9]) for name in asked)])
        pilot.choose([tree], [8], pilot.count({name: taken[name] for name in asked}))
        pilot.learn(tree, [2])
        for name in asked:
            often[name] += 1
    assert often["cheap"] == 3000
    # It is known to be hopeless by its first 4 drafts, 8 steps apart, then takes 0.5% of all time.
    assert often["dear"] == pytest.approx(4 + (3000 - 3 * 8) / (0.5 / 0.005), abs=2)


def test_a_draft_that_took_as_long_as_a_step_counts_as_long():
    """It is right about one token in each draft, which does not make up for two steps of drafting."""
    pilot, often = Pilot(Costs({1: 1.0, 64: 1.1}), ["a"]), 0
    for _ in range(1000):
        if asked(pilot, "a"):
            often += 1
            tree = TokenTree.chain(0, [1], source="a", raw=[0.99])
            (kept,) = pilot.choose([tree], [8], pilot.count({"a": 2.0}))
            pilot.learn(tree, [1])
            pilot.charge(len(kept), 1, len(kept), pilot.costs.seconds(len(kept)), 2.0)
    assert often <= 5 + 1000 * 0.02 / 2.0  # the first ones are not counted


def test_time_that_drafting_took_already_makes_no_node_worth_more():
    """A node that is right in two of five cases takes half a step. Beside a draft that took a whole one it looks good:
    1.4 tokens in 2.5 steps are more than 1 in 2. But a plain step gives more in that time."""
    pilot = Pilot(Costs({1: 0.040, 2: 0.060, 64: 2.0}), ["a"])
    tree = TokenTree.chain(0, [1], source="a", raw=[0.5])
    for i in range(500):
        pilot.learn(tree, [1 if i % 5 < 2 else 2])
    (kept,) = pilot.choose([tree], [8], {"a": 0.040})
    assert len(kept) == 1
    assert pilot.last.rate == pytest.approx(pilot.last.plain / 2)
    pilot = Pilot(Costs({1: 0.040, 2: 0.050, 64: 2.0}), ["a"])
    for i in range(500):
        pilot.learn(tree, [1 if i % 5 < 2 else 2])
    assert len(pilot.choose([tree], [8], {"a": 0.040})[0]) == 2


def test_what_lost_too_much_is_watched_but_not_verified():
    pilot = Pilot(Costs({1: 1.0, 4: 2.5, 64: 2.6}), ["a"])
    tree = TokenTree.chain(0, [1, 2, 3], source="a", raw=[0.9] * 3)
    for _ in range(50):
        pilot.learn(tree, [1, 2, 3])
        pilot.charge(1, 1, 1, 1.0, 0.0)
    for _ in range(9):
        assert len(pilot.choose([tree], [8], {"a": 1e-4})[0]) == 4
        pilot.charge(4, 1, 1, 2.5, 0.0)
    assert pilot.resting
    assert asked(pilot, "a")
    assert len(pilot.choose([tree], [8], {"a": 1e-4})[0]) == 1
    assert pilot.last.resting
    steps = 0
    while pilot.resting:
        pilot.charge(1, 1, 1, 1.0, 0.0)
        steps += 1
    assert 0 < steps < 100
    assert len(pilot.choose([tree], [8], {"a": 1e-4})[0]) == 4


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("curve", CURVES)
def test_no_other_way_to_share_a_steps_rows_gives_more_tokens_per_second(curve, padded):
    """All ways are tried. A step computes as many rows for each sequence as its widest tree has, so one common limit is
    as good as a limit for each."""
    rng = np.random.default_rng(0)
    for _ in range(10):
        costs = Costs({rows: ms / 1e3 for rows, ms in CURVES[curve].items()}, padded)
        pilot = Pilot(costs, ["a"])
        for score in (0.15, 0.55, 0.95):
            right = rng.random()
            for _ in range(60):
                pilot.learn(TokenTree.chain(0, [1], source="a", raw=[score]), [1 if rng.random() < right else 2])
        trees = []
        for _ in range(3):
            parents = [-1, *(int(rng.integers(0, i)) for i in range(1, 9))]
            raw = [np.nan, *rng.choice([0.15, 0.55, 0.95], 8)]
            trees.append(TokenTree.build(range(9), parents, source="a", raw=raw))
        kept = pilot.choose(trees, [8, 8, 5], {"a": 0.0})
        assert all(len(tree) - 1 <= limit for tree, limit in zip(kept, [8, 8, 5], strict=True))
        worths = [pilot._rank(tree, limit).worth for tree, limit in zip(trees, [8, 8, 5], strict=True)]
        best = max(
            sum(w[n] for w, n in zip(worths, nodes, strict=True)) / costs.seconds(1 + max(nodes), 3)
            for nodes in itertools.product(*(range(len(w)) for w in worths))
        )
        assert pilot.last.rate == pytest.approx(best)
        expected = sum(w[len(tree) - 1] for w, tree in zip(worths, kept, strict=True))
        assert expected / costs.seconds(max(map(len, kept)), 3) == pytest.approx(best)
        assert pilot.last.tokens == pytest.approx(expected)
