"""The benchmark's numbers are right: a target whose every answer is known gives exactly the predicted ones."""

import json
import time

import numpy as np
import pytest
import torch

from slipstream import LLM, DraftSession, OptionError, Proposal, TokenTree
from slipstream.cli.bench import chosen_contestants, sweep_contestants
from slipstream.drafters.base import Drafter
from slipstream.engine import Engine
from slipstream.evaluate.compare import compare_files
from slipstream.evaluate.contestants import Answer, Contestant, Decoding, Ours, Peer, until_end
from slipstream.evaluate.measure import Item, MeasuredRun, measure
from slipstream.evaluate.metrics import speedup, summarise
from slipstream.evaluate.replay import Recording, Replayed, TextTarget, record
from slipstream.evaluate.report import table
from slipstream.evaluate.run import BenchPlan, benchmark, make_recording, replay
from slipstream.evaluate.workloads import Prompt
from slipstream.request import Request
from slipstream.targets import Scores, open_target

V = 100
PATTERN = [2, 0, 3]  # how many drafted tokens are right, step after step
DEPTH, WRONG = 4, 99


def truth(position):
    return position * 7 % 97


class Clockwork(TextTarget):
    """Says truth(position) at every position, in exactly known time."""

    vocabulary, context = V, 10_000

    def __init__(self, seconds=0.002, sleep=time.sleep):
        self.seconds, self.sleep, self.calls = seconds, sleep, []

    def prefill(self, slot, tokens, want):  # noqa: ARG002
        slot.tokens += tokens
        yield self._scores(np.array([slot.length - 1]))

    def score(self, slots, trees, want, known=0):  # noqa: ARG002
        self.calls.append([len(t) for t in trees])
        for slot, tree in zip(slots, trees, strict=True):
            slot.tree = tree
        return [self._scores(slot.length + tree.depths) for slot, tree in zip(slots, trees, strict=True)]

    def _scores(self, positions):
        self.sleep(self.seconds)
        rows = torch.zeros(len(positions), V)
        rows[torch.arange(len(positions)), torch.tensor([truth(p + 1) for p in positions])] = 1
        return Scores(rows, {}, positions)


class Pattern(Drafter):
    """Chains of DEPTH tokens of which the pattern says how many are right, and one wrong branch at the root."""

    def begin(self, request):
        return PatternSession(len(request.tokens))


class Clock:
    """Time passes when somebody sleeps."""

    now = 0.0

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


class PatternSession(DraftSession):
    def __init__(self, position):
        self.position, self.step = position, 0

    def observe(self, seen):
        self.position = seen.position + len(seen.tokens)

    def propose(self, root, budget):  # noqa: ARG002
        right = PATTERN[self.step % len(PATTERN)]
        self.step += 1
        chain = [truth(self.position + 1 + i) if i < right else WRONG for i in range(DEPTH)]
        return Proposal(TokenTree.from_continuations(root, [chain, [WRONG - 1]], source="pattern"))


def test_a_known_pattern_gives_exactly_the_predicted_numbers(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("slipstream.engine.perf_counter", clock)
    target = Clockwork(sleep=clock.sleep)
    engine = Engine(target, Pattern(target, None, None), "pattern")
    list(engine.run([Request([1, 2, 3], max_new_tokens=9)]))  # compile first
    target.calls.clear()
    # 1 token from the prompt, then (2 + 1) + (0 + 1) + (3 + 1) = 8 per round: 4 rounds make 33
    start = clock()
    *_, sequence = engine.run([Request([1, 2, 3], max_new_tokens=33)])
    clock.sleep(0.001)  # that nobody measures
    seconds = clock() - start
    assert sequence.tokens == [truth(p) for p in range(3, 36)]
    answer = Answer(sequence.tokens, seconds, sequence.stats.first_token_seconds, sequence.stats)
    (row,) = summarise([MeasuredRun("pattern", "i", "c", 0, answer, True, 0)])
    steps = 1 + 4 * 3
    nodes = 12 * (DEPTH + 1)
    # the very last step is cut by the token limit: four tokens are left, so the draft may be three deep
    assert target.calls[-1] == [1 + 3 + 1]
    nodes -= 1
    assert row.tokens_per_step == 33 / steps
    assert row.node_yield == 4 * 5 / nodes
    assert row.acceptance_rate == 4 * 5 / (12 * DEPTH - 1)
    assert row.accepted_lengths == {0: 1 + 4, 2: 4, 3: 4}
    assert len(target.calls) == 12
    assert (row.texts_equal, row.texts_compared) == (1, 1)
    assert row.unaccounted == pytest.approx(0.001 / seconds)
    assert sum(row.ms_per_step.values()) == pytest.approx(1e3 * seconds / steps)
    assert row.ms_per_step["verify"] == pytest.approx(2.0)


def run(contestant, item, repeat, seconds, tokens=10, category="c", equal=True, group=None):
    answer = Answer([0] * tokens, seconds, seconds / 10)
    return MeasuredRun(contestant, item, category, repeat, answer, equal, item if group is None else group)


def test_speedups_are_of_seconds_per_token_with_a_bootstrap_over_items():
    base = [run("none", f"i{i}", r, 2.0) for i in range(8) for r in range(3)]
    fast = [run("x", f"i{i}", r, 1.0) for i in range(8) for r in range(3)]
    exact = speedup(fast, base)
    assert (exact.value, exact.low, exact.high) == (2.0, 2.0, 2.0)
    mixed = [run("x", f"i{i}", 0, 1.0 if i % 2 else 2.0) for i in range(8)]
    ratio = speedup(mixed, base)
    assert ratio.value == pytest.approx(16 / 12)
    assert 1.0 < ratio.low < ratio.value < ratio.high < 2.0
    hiccup = [*fast, run("x", "i0", 3, 100.0)]  # one bad repeat of many does not count
    assert speedup(hiccup, base).value == 2.0
    longer = [run("x", f"i{i}", 0, 2.0, tokens=20) for i in range(8)]
    assert speedup(longer, base).value == 2.0


def test_items_that_were_answered_together_are_one_measurement():
    def runs(contestant, seconds):
        return [run(contestant, f"{g}.{i}", 0, s, group=g) for g, s in enumerate(seconds) for i in range(4)]

    together = speedup(runs("x", (1.0, 2.0, 1.5)), runs("none", (2.0, 2.0, 2.0)))
    whole = [run("x", str(g), 0, 4 * s, tokens=40) for g, s in enumerate((1.0, 2.0, 1.5))]
    alone = speedup(whole, [run("none", str(g), 0, 8.0, tokens=40) for g in range(3)])
    assert together.low < together.value < together.high
    assert (together.value, together.low, together.high) == (alone.value, alone.low, alone.high)
    assert (together.items, alone.items) == (12, 3)
    items = [Item(str(i), "c", [1], [1]) for i in range(3)]
    measured = measure([Listed("A", [])], items, Decoding(), repeats=2, batch=2)
    assert [one.group for one in measured] == [0, 0, 1] * 2


def test_rows_cover_all_items_and_each_category():
    runs = [
        run(n, f"{c}{i}", r, s, category=c)
        for n, s in (("none", 2.0), ("x", 1.0))
        for c in "ab"
        for i in (0, 1)
        for r in (0, 1)
    ]
    rows = {(r.contestant, r.category): r for r in summarise(runs)}
    assert list(rows) == [("none", "all"), ("x", "all"), ("none", "a"), ("x", "a"), ("none", "b"), ("x", "b")]
    assert rows["x", "all"].answers == 8
    assert rows["x", "b"].tokens_per_second == 10.0
    assert rows["x", "a"].speedup["none"].value == 2.0
    assert [rows["x", c].speedup["none"].items for c in ("all", "a", "b")] == [4, 2, 2]  # questions, not repeats
    shown = [cell for column in table(list(rows.values())).columns for cell in column.cells]
    assert shown.count("2.00-2.00 (2)") == 2  # an interval from two questions says so
    assert "hf" not in rows["x", "a"].speedup


def test_a_differing_text_is_counted_never_hidden():
    rows = summarise([run("x", "a", 0, 1.0), run("x", "b", 0, 1.0, equal=False), run("x", "c", 0, 1.0, equal=None)])
    assert (rows[0].texts_equal, rows[0].texts_compared) == (1, 2)


class Listed(Contestant):
    def __init__(self, name, order):
        self.name, self.order = name, order

    def answers(self, prompts, decoding):  # noqa: ARG002
        self.order.append(self.name)
        return [Answer([1], 0.1, 0.01) for _ in prompts]


def test_contestants_are_warmed_up_and_take_turns_to_go_first():
    order = []
    items = [Item(str(i), "c", [1], [1]) for i in range(3)]
    runs = list(measure([Listed(n, order) for n in "ABC"], items, Decoding(), repeats=2))
    assert "".join(order[:3]) == "ABC"
    rounds = ["".join(order[i : i + 3]) for i in range(3, len(order), 3)]
    assert rounds == ["ABC", "BCA", "CAB", "BCA", "CAB", "ABC"]
    assert len(runs) == 18


def test_the_whole_benchmark_on_a_real_model(shallow, tmp_path):
    plan = BenchPlan(
        [Prompt("a", "greeting", ("Hi!",)), Prompt("b", "talk", ("Name a river.", "And another."))],
        ("none", "pld", "hf", "hf-pld"),
        decoding=Decoding(max_new_tokens=4),
        repeats=1,
    )
    seen = []
    rows, document = benchmark(plan, shallow.model, shallow.tokenizer, lambda *p: seen.append(p), options={"limit": 2})
    overall = {r.contestant: r for r in rows if r.category == "all"}
    assert set(overall) == {"none", "pld", "hf", "hf-pld"}
    assert overall["none"].tokens_per_step == 1.0
    assert overall["pld"].texts_equal == overall["pld"].texts_compared == overall["hf"].texts_equal
    assert all(0 <= overall[name].unaccounted < 1 for name in ("none", "pld"))
    assert document["complete"]
    assert document["provenance"]["dtype"] == "float32"
    assert seen[-1][0] == "measuring"
    assert seen[-1][1] == seen[-1][2]
    assert json.loads(json.dumps(document)) == document
    path = tmp_path / "a.json"
    path.write_text(json.dumps(document))
    assert all("too little was measured to tell" in said for said in compare_files(path, path) if " none " in said)


def test_an_interrupted_run_keeps_what_it_measured(shallow):
    plan = BenchPlan([Prompt("a", "c", ("Hello!",))], ("none", "pld"), decoding=Decoding(max_new_tokens=3), repeats=3)

    def stop(stage, done, of):  # noqa: ARG001
        if stage == "measuring" and done == 3:
            raise KeyboardInterrupt

    rows, document = benchmark(plan, shallow.model, shallow.tokenizer, stop)
    assert document["missing"] == "interrupted after 3 of 6 answers"
    assert sum(r.answers for r in rows if r.category == "all") == 3


def test_a_category_that_not_everybody_came_to_is_reported_for_the_others(shallow):
    prompts = [Prompt("a", "c", ("Hello!",)), Prompt("b", "d", ("Hi!",))]
    plan = BenchPlan(prompts, ("none", "pld"), decoding=Decoding(max_new_tokens=3), repeats=1)

    def stop(stage, done, of):  # noqa: ARG001
        if stage == "measuring" and done == 3:
            raise KeyboardInterrupt

    rows, document = benchmark(plan, shallow.model, shallow.tokenizer, stop)
    assert document["missing"] == "interrupted after 3 of 4 answers"
    assert sorted(row.category for row in rows) == ["all", "all", "c", "c", "d"]


def test_batches_give_the_same_texts_and_share_the_time(tiny):
    llm = LLM(tiny("llama"), drafter="pld")
    llm.tokenizer = None
    ours, hf = Ours("pld", llm), Peer("hf", tiny("llama"))
    prompts, decoding = [[5, 6, 7, 5, 6], [40, 41], [11, 12, 13, 11]], Decoding(max_new_tokens=12)
    alone = [ours.answer(p, decoding).tokens for p in prompts]
    start = time.perf_counter()
    together = ours.answers(prompts, decoding)
    seconds = time.perf_counter() - start
    assert [a.tokens for a in together] == alone == [a.tokens for a in hf.answers(prompts, decoding)]
    stages = sum(a.stats.draft_seconds + a.stats.verify_seconds + a.stats.host_seconds for a in together)
    assert 0 < stages <= sum(a.seconds for a in together) <= seconds
    for peer in (Peer("hf-pld", tiny("llama")), Peer("hf-assisted", tiny("llama"), tiny("llama"))):
        found = [peer.answer(p, decoding) for p in prompts]
        assert [a.tokens for a in found] == alone
        assert all(0 < a.first_token_seconds < a.seconds for a in found)
    with pytest.raises(OptionError, match="one prompt at a time"):
        Peer("hf-pld", tiny("llama")).answers(prompts, decoding)
    assert until_end([5, 2, 0, 0], frozenset({2})) == [5, 2]


def test_sweeps_name_their_contestants():
    names, options = sweep_contestants(["none", "pld", "hf"], ["length=2,8", "candidates=1"])
    assert names == ["none", "pld length=2 candidates=1", "pld length=8 candidates=1", "hf"]
    assert options["pld length=8 candidates=1"] == {"length": 8, "candidates": 1}
    with pytest.raises(OptionError, match="has such an option"):
        sweep_contestants(["pld"], ["speed=1"])


def test_only_contestants_that_nobody_asked_for_are_left_out():
    assert chosen_contestants("none, pld ,hf-pld", True, False, 1) == ["none", "pld", "hf-pld"]
    assert chosen_contestants("none,pld,hf,hf-pld", False, False, 2) == ["none", "pld", "hf"]
    assert chosen_contestants("none,pld,hf,hf-pld", False, True, 1) == ["none", "pld"]
    assert chosen_contestants("none,hf", True, True, 1) == ["none", "hf"]


def test_comparisons_say_what_changed_beyond_noise(tmp_path):
    def written(name, value, low, high, items=8, repeats=3):
        ratio = {"value": value, "low": low, "high": high}
        row = {"contestant": "pld", "category": "all", "tokens_per_second": 10 * value, "spread": [9, 11]}
        document = {
            "benchmark": "slipstream",
            "provenance": {"dtype": "float32"},
            "decoding": {},
            "missing": None,
            "items": items,
            "repeats": repeats,
            "rows": [{**row, "speedup": {"none": ratio}}],
        }
        path = tmp_path / name
        path.write_text("some table first\n" + json.dumps(document))
        return path

    old, new, same = written("a", 1.5, 1.4, 1.6), written("b", 2.0, 1.8, 2.2), written("c", 1.6, 1.5, 1.7)
    assert next(compare_files(old, new)).endswith("1.50 → 2.00 × plain: FASTER")
    assert next(compare_files(new, old)).endswith("SLOWER")
    assert next(compare_files(old, same)).endswith("no difference beyond noise")
    once = written("once", 2.0, 2.0, 2.0)
    for pair in ((old, once), (once, new), (once, once)):
        assert next(compare_files(*pair)).endswith("too little was measured to tell")
    fewer = written("fewer", 1.5, 1.4, 1.6, items=2, repeats=1)
    warned = list(compare_files(old, fewer))
    assert warned[:2] == ["not the same items: 8 and 2", "not the same repeats: 3 and 1"]
    (tmp_path / "d").write_text("{}")
    with pytest.raises(OptionError, match="not a benchmark's document"):
        next(compare_files(old, tmp_path / "d"))


def test_what_cannot_be_measured_is_refused(tiny):
    with pytest.raises(OptionError, match="nothing to measure"):
        BenchPlan([])
    with pytest.raises(OptionError, match="each contestant runs once"):
        BenchPlan([Prompt("a", "c", ("x",))], ("pld", "pld"))
    with pytest.raises(OptionError, match="no contestants were named"):
        BenchPlan([Prompt("a", "c", ("x",))], ())
    with pytest.raises(OptionError, match=r"no contestant is called nope: there are .*pld.*hf-assisted"):
        BenchPlan([Prompt("a", "c", ("x",))], ("pld length=4", "nope"))
    with pytest.raises(OptionError, match="hf-pld answers one prompt at a time"):
        BenchPlan([Prompt("a", "c", ("x",))], ("hf", "hf-pld"), batch=2)
    with pytest.raises(OptionError, match="hf-assisted needs a draft model"):
        Peer("hf-assisted", tiny("llama"))


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "top_p": 0.95, "seed": 7}], ids=["greedy", "sampled"])
def test_replayed_numbers_equal_live_ones(shallow, tmp_path, sampling, monkeypatch):
    """Acceptance does not need the target: M, histogram and nodes are those of the live run."""
    monkeypatch.setattr("slipstream.evaluate.replay.timed", lambda *_: {1: [0.01], 8: [0.02], 64: [0.04]})
    prompts = [
        Prompt("a", "list", ("List the numbers from 1 to 9, then list them again.",)),
        Prompt("b", "greeting", ("Hi!",)),
    ]
    plan = BenchPlan(prompts, ("none", "pld"), decoding=Decoding(max_new_tokens=16, **sampling), repeats=1)
    live, _ = benchmark(plan, shallow.model, shallow.tokenizer, lambda *_: None)
    assert any(length for row in live for length in row.accepted_lengths)  # there is something to compare
    make_recording(plan, shallow.model, shallow.tokenizer, lambda *_: None).save(tmp_path / "kept")
    recording = Recording.load(tmp_path / "kept")
    again, document = replay(recording, ["none", "pld"], {}, lambda *_: None, repeats=1)
    for one, other in zip(live, again, strict=True):
        for name in ("tokens", "tokens_per_step", "acceptance_rate", "node_yield", "accepted_lengths", "texts_equal"):
            assert getattr(one, name) == getattr(other, name), (one.contestant, one.category, name)
    assert document["provenance"]["replayed"] is True
    assert (recording.seconds(1), recording.seconds(64)) == (0.01, 0.04)
    assert 0.01 < recording.seconds(3) < 0.02
    with pytest.raises(OptionError, match="can't be replayed"):
        replay(recording, ["hf"], {}, lambda *_: None, repeats=1)
    with pytest.raises(OptionError, match="no whole recording"):
        Recording.load(tmp_path)


def test_an_interrupted_replay_keeps_what_it_measured():
    items = [Item("a", "c", [5, 6, 7, 5, 6], [7, 5, 6])]
    recording = Recording(items, {1: 0.01, 8: 0.02, 64: 0.04}, Decoding(max_new_tokens=3), 100, 1000, "tiny", {})

    def stop(stage, done, of):  # noqa: ARG001
        if done == 3:
            raise KeyboardInterrupt

    rows, document = replay(recording, ["none", "pld"], {}, stop, repeats=2)
    assert document["missing"] == "interrupted after 3 of 4 answers"
    assert sum(row.answers for row in rows) == 3


def test_hidden_states_are_replayed_too(tiny, tmp_path):
    """A drafter that reads hidden states sees the recorded ones."""
    target = open_target(tiny("llama"))
    tokens, plain = [5, 6, 7, 8], [1, 2, 3, 4, 5]
    recording = record(target, "tiny", [Item("a", "c", tokens, plain)], Decoding(max_new_tokens=5), layers=(1, 3))
    recording.save(tmp_path)
    contestant = Replayed("none", Recording.load(tmp_path))
    shown = []

    class Watcher(Pattern):
        layers = (1, 3)

        def begin(self, request):  # noqa: ARG002
            session = PatternSession(0)
            session.observe = shown.append
            session.propose = lambda root, _: Proposal(TokenTree.chain(root, [2, 3, 9]))
            return session

    contestant.engine.drafter = Watcher(contestant.target, None, None)
    answer = contestant.answer(tokens, Decoding(max_new_tokens=5))
    assert answer.tokens == plain
    assert answer.stats.accepted == 2
    with torch.no_grad():
        states = tiny("llama")(input_ids=torch.tensor([tokens + plain]), output_hidden_states=True).hidden_states
    for seen in shown:
        rows = slice(seen.position, seen.position + len(seen.tokens))
        torch.testing.assert_close(seen.hidden[3], states[3][0, rows], rtol=0, atol=1e-4)
