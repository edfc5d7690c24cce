"""Steps of fixed shape, as they are captured on a GPU, run here without capture: they say what forwards say."""

import copy
import itertools
from collections import deque
from functools import partial

import numpy as np
import pytest
import torch

from families import FAMILIES, graphs, tiny_model
from kinds import of_each_kind
from slipstream.accept import Match, verify
from slipstream.budget import Budget
from slipstream.drafters import make
from slipstream.drafters._piloted import PilotedSession
from slipstream.drafters.base import Drafter, Proposal
from slipstream.drafters.none import NoSession
from slipstream.engine import Engine
from slipstream.errors import ModelError
from slipstream.heads import HEADS
from slipstream.kernels.ops import move_keys, walk
from slipstream.request import Request
from slipstream.sampling import Sampler, Sampling
from slipstream.targets import Scores, Want
from slipstream.targets.cache import KeyValuePool, LayerShape
from slipstream.targets.captured.graph_target import GraphTarget, bucket
from slipstream.targets.captured.inputs import REACH, fill
from slipstream.targets.captured.modules import Angles, JointPart, Norm, StandIns, Whole
from slipstream.targets.choose import open_target
from slipstream.targets.trees import TreeTarget
from slipstream.tree import TokenTree

# Attention with terms of its own (a bias by place, sinks): these keep their ordinary forwards.
OTHERS = {"bloom", "falcon", "gpt_oss"}

GREEDY = Sampler(Sampling(), [])


def read(target, texts):
    slots = [target.open() for _ in texts]
    for slot, text in zip(slots, texts, strict=True):
        for _ in target.prefill(slot, text, Want()):
            pass
    return slots


@pytest.mark.parametrize("family", of_each_kind(f for f in FAMILIES if f not in OTHERS))
def test_fixed_steps_say_what_ordinary_forwards_say(family, tiny):
    """Two sequences in a batch padded to two, trees padded to eight rows, scattered paths committed between steps."""
    model = tiny(family)
    plain = open_target(model)
    assert type(plain) is TreeTarget
    fixed = graphs(model)
    texts = [[1, 2, 3, 4, 5] * 6, [7, 8, 9]]
    one, other = read(plain, texts), read(fixed, texts)
    wide = TokenTree.build([4, 5, 6, 7, 8, 9, 10], [-1, 0, 0, 1, 2, 4, 3])
    for trees, paths in [
        ([wide, TokenTree.build([3, 9], [-1, 0])], [[0, 2, 4, 5], [0]]),
        ([TokenTree.root(11), wide], [[0], [0, 1, 3]]),
        ([wide, wide], [[0, 1], [0, 2, 4]]),
    ]:
        expected = plain.score(one, trees, Want(samplers=(GREEDY,) * 2))
        found = fixed.score(other, trees, Want(rows=8, samplers=(GREEDY,) * 2))
        for a, b, tree in zip(expected, found, trees, strict=True):
            for node in range(len(tree)):
                torch.testing.assert_close(b.logits(node), a.logits(node), rtol=0, atol=1e-4 * float(a._logits.std()))
                assert b.token(node, GREEDY) == a.token(node, GREEDY)
        for slots, target in ((one, plain), (other, fixed)):
            for slot, path in zip(slots, paths, strict=True):
                target.commit(slot, path)
        assert [s.tokens for s in one] == [s.tokens for s in other]


@pytest.mark.slow
def test_a_text_may_have_many_pages(tiny):
    plain, fixed = open_target(tiny("llama")), graphs(tiny("llama"))
    (one,), (other,) = read(plain, [[5, 6, 7]]), read(fixed, [[5, 6, 7]])
    tree = TokenTree.build([4, 5, 6, 7], [-1, 0, 0, 2])
    for _ in range(60):
        (a,), (b,) = plain.score([one], [tree], Want()), fixed.score([other], [tree], Want(rows=8))
        torch.testing.assert_close(b.logits(3), a.logits(3), rtol=0, atol=1e-4)
        plain.commit(one, [0, 2, 3])
        fixed.commit(other, [0, 2, 3])
    assert len(other.pages) == 2


@pytest.mark.parametrize("count", [90, 140])
def test_a_path_may_be_as_long_as_the_step_has_rows(count, tiny):
    plain, fixed = open_target(tiny("llama")), graphs(tiny("llama"))
    (one,), (other,) = read(plain, [[5, 6, 7]]), read(fixed, [[5, 6, 7]])
    tree = TokenTree.chain(4, [i % 50 for i in range(count - 1)])
    for _ in range(2 if count < 100 else 1):
        (a,), (b,) = plain.score([one], [tree], Want()), fixed.score([other], [tree], Want())
        torch.testing.assert_close(b.logits(count - 1), a.logits(count - 1), rtol=0, atol=1e-4)
        plain.commit(one, range(count))
        fixed.commit(other, range(count))


def test_a_path_longer_than_the_next_step_reaches_is_carried_out(tiny):
    plain, fixed = open_target(tiny("llama")), graphs(tiny("llama"))
    (one,), (other,) = read(plain, [[5, 6, 7]]), read(fixed, [[5, 6, 7]])
    count = REACH + 8
    wide = TokenTree.build([4, 9, *(i % 50 for i in range(count))], [-1, 0, 0, *range(2, count + 1)])  # 9 is wrong
    small = TokenTree.build([3, 8, 9], [-1, 0, 0])
    for slot, target in ((one, plain), (other, fixed)):
        target.score([slot], [wide], Want())
        target.commit(slot, [0, *range(2, count + 2)])
    (a,), (b,) = plain.score([one], [small], Want()), fixed.score([other], [small], Want())
    assert len(b._logits) < REACH
    for node in range(3):
        torch.testing.assert_close(b.logits(node), a.logits(node), rtol=0, atol=1e-4)


def test_keys_move_over_one_another_and_no_more_than_asked():
    """Two sequences of which one accepted five nodes, the other one; behind that stands what an earlier step left."""
    keys, values = (torch.arange(12.0).repeat(1, 3, 1, 1)[..., None].clone() for _ in range(2))  # each its column
    integers = [[[3, 5, 6, 7, 9], [4, 8, 2, 11, 7]], [[3, 4, 5, 6, 7], [3, 5, 6, 7, 9]]]
    sources, places = (torch.tensor(columns, dtype=torch.int32) for columns in integers)
    move_keys(keys, values, torch.tensor([2, 0]), sources, places, torch.tensor([5, 1], dtype=torch.int32))
    for store in (keys, values):
        assert store[0, 2, 0, :, 0].tolist() == [0, 1, 2, 3, 5, 6, 7, 9, 8, 9, 10, 11]
        assert store[0, 1, 0, :, 0].tolist() == list(range(12))
        assert store[0, 0, 0, :, 0].tolist() == [0, 1, 2, 4, *range(4, 12)]


def test_hidden_states_come_along(tiny):
    plain, fixed = open_target(tiny("llama")), graphs(tiny("llama"))
    (one,), (other,) = read(plain, [[5, 6, 7]]), read(fixed, [[5, 6, 7]])
    tree, want = TokenTree.build([4, 5, 6], [-1, 0, 0]), Want(layers=(0, 2))
    (a,), (b,) = plain.score([one], [tree], want), fixed.score([other], [tree], want)
    for layer in want.layers:
        torch.testing.assert_close(b.hidden[layer][:3], a.hidden[layer], rtol=1e-5, atol=1e-5)


def test_buckets():
    assert [bucket(n, (1, 8, 16)) for n in (1, 2, 8, 9, 16, 17, 33)] == [1, 8, 8, 16, 16, 32, 48]
    assert np.diff([bucket(n, (1, 8, 16)) for n in range(1, 60)]).min() >= 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.9, "top_k": 40, "top_p": 0.95},
        {"temperature": 0.7, "min_p": 0.05, "repetition_penalty": 1.3},
        {"repetition_penalty": 1.2, "presence_penalty": 0.4, "frequency_penalty": 0.2, "logit_bias": {7: 2.0, 9: -3.0}},
        {"temperature": 0.9, "bad_words": ((7,), (8, 9))},
    ],
    ids=["sampled", "penalised", "penalised greedily", "outside the step"],
)
def test_tokens_are_drawn_within_the_step(options, tiny):
    """Texts of a batch that is refilled, drafted for and not, are those that the sampler draws from the logits."""
    model, sampling = tiny("llama"), Sampling(**options)
    plain, fixed = open_target(model), graphs(model)
    prompts = [[5, 6, 7, 8] * 4, [40], [11, 12, 11, 12, 11, 13], [3, 3, 3, 4]]

    def texts(target, name):
        requests = [Request(p, 40, sampling, seed=i) for i, p in enumerate(prompts)]
        sequences = {id(s.request): s for s in Engine(target, make(name, target), max_batch=2).run(requests)}
        return [sequences[id(r)].tokens for r in requests]

    expected = texts(plain, "none")
    assert texts(fixed, "none") == texts(fixed, "pld") == expected
    drew = {key[2] for key in fixed._steps}
    assert drew <= ({"best"} if "bad_words" in options else {"drawn", "drawn with history", "best"})
    assert ("drawn with history" in drew) == sampling.penalises


def test_a_draw_reads_no_logits(tiny, monkeypatch):
    target = graphs(tiny("llama"))
    monkeypatch.setattr("slipstream.sampling.Sampler.sample", lambda *_: pytest.fail("logits were read"))
    (slot,) = read(target, [[5, 6, 7]])
    sampler = Sampler(Sampling(temperature=1.0), [5, 6, 7, 8])
    (scores,) = target.score([slot], [TokenTree.root(8)], Want(samplers=(sampler,)))
    assert 0 <= scores.token(0, sampler) < target.vocabulary


def test_nodes_that_are_not_known_yet_are_drawn_with_their_own_noise(tiny):
    """As if the whole tree had been scored at once, beside another sequence."""
    target, options = graphs(tiny("llama")), [Sampling(temperature=1.0), Sampling(temperature=1.5, top_k=9)]
    slots = read(target, [[5, 6, 7], [9, 8]])
    trees = [TokenTree.chain(8, [4, 3, 2, 1]), TokenTree.chain(3, [7, 6, 5])]
    samplers = tuple(Sampler(sampling, [], seed) for seed, sampling in enumerate(options))
    whole = target.score(slots, trees, Want(samplers=samplers))
    expected = [[scores.token(node, samplers[i]) for node in (2, 3)] for i, scores in enumerate(whole)]
    rest = target.extend(slots, trees, [2, 1], Want(samplers=samplers))
    assert [[scores.token(node, samplers[i]) for node in (2, 3)] for i, scores in enumerate(rest)] == expected


def test_all_that_was_said_is_penalised_however_much_it_is_at_once(tiny):
    """As after the cache has moved: the step is told of the whole output, of which it has room for a part."""
    target, prompt = graphs(tiny("llama")), [5, 6, 7]
    said = [50] * (REACH + 2)
    (slot,) = read(target, [[*prompt, *said[:-1]]])
    (plain,) = target.score([slot], [TokenTree.root(50)], Want(samplers=(GREEDY,)))
    best = plain.token(0, GREEDY)
    assert best != 50
    for place in (0, 1, len(said) - 2):
        sampler = Sampler(Sampling(presence_penalty=100.0), prompt)
        for i, token in enumerate(said):
            sampler.push(best if i == place else token)
        expected = sampler.sample(plain.logits(0))
        (scores,) = target.score([slot], [TokenTree.root(50)], Want(samplers=(sampler,)))
        assert scores.token(0, sampler) == expected != best


def test_a_prompt_is_no_output_though_a_step_reads_it_as_a_tree(tiny):
    target, prompt = graphs(tiny("llama")), [50, 6, 7]
    sampler = Sampler(Sampling(presence_penalty=1e4, logit_bias={50: 1e3}), prompt)
    (scores,) = target.prefill(target.open(), prompt, Want(samplers=(sampler,)))
    assert scores.token(0, sampler) == 50


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "opt"])
@pytest.mark.parametrize("count", [2, 5, 70])
def test_pieces_of_several_texts_share_a_step(count, family, tiny):
    """Texts of all lengths, the first of which goes on: logits, states and choices are those of each alone."""
    target, rng = graphs(tiny(family)), np.random.default_rng(count)
    texts = [rng.integers(1, 60, 1 + 3 * i % 8).tolist() for i in range(count)]
    samplers = [GREEDY, Sampler(Sampling(temperature=0.9), [], seed=3)]
    want = Want((1,), samplers=tuple(samplers[i % 2] for i in range(count)))
    slots, alone = read(target, [[9, 8, 7]] + [[]] * (count - 1)), read(target, [[9, 8, 7]] + [[]] * (count - 1))
    together = target.read(slots, texts, want)
    found = [(s.logits(0).clone(), s.hidden[1], s.token(0, samplers[i % 2])) for i, s in enumerate(together)]
    for i, (slot, text) in enumerate(zip(alone, texts, strict=True)):
        (scores,) = target.read([slot], [text], want._replace(samplers=want.samplers[i : i + 1]))
        logits, states, token = found[i]
        assert slots[i].tokens == slot.tokens
        torch.testing.assert_close(logits, scores.logits(0), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(states, scores.hidden[1], rtol=1e-5, atol=1e-5)
        assert token == scores.token(0, samplers[i % 2])


@pytest.mark.parametrize("family", ["llama", "opt"])
@pytest.mark.parametrize("count", [1, 4, pytest.param(70, marks=pytest.mark.slow)])
def test_trees_and_pieces_of_texts_share_a_step(count, family, tiny):
    """Trees of all sizes, one as deep as it is long, and texts: logits, states and choices are those of each alone."""
    target, rng = graphs(tiny(family)), np.random.default_rng(count)
    trees = [TokenTree.chain(3, list(range(4, 40)))] + [random_tree(rng, 1 + i % 9) for i in range(count)]
    texts = [rng.integers(1, 60, 1 + 3 * i % 8).tolist() for i in range(count)]
    samplers = [GREEDY, Sampler(Sampling(temperature=0.9), [], seed=3)]
    want = Want((1,), samplers=tuple(samplers[i % 2] for i in range(1 + 2 * count)))
    begun = [[5, 6, 7][: 1 + i % 3] for i in range(1 + count)] + [[9] * (i % 4) for i in range(count)]
    together, alone = read_at_once(target, begun), read_at_once(target, begun)
    drafting, reading = together[: 1 + count], together[1 + count :]
    scored, read_along = target.score_and_read(drafting, trees, reading, texts, want)
    for i, (slot, tree, scores) in enumerate(zip(alone[: 1 + count], trees, scored, strict=True)):
        (own,) = target.score([slot], [tree], Want((1,), samplers=want.samplers[i : i + 1]))
        nodes, sampler = range(len(tree)), samplers[i % 2]
        torch.testing.assert_close(scores.every(), own.every(), rtol=1e-5, atol=1e-5)
        states = [s.hidden[1][s.rows(nodes)] for s in (scores, own)]
        torch.testing.assert_close(*states, rtol=1e-5, atol=1e-5)
        assert [scores.token(n, sampler) for n in nodes] == [own.token(n, sampler) for n in nodes]
    for i, (slot, text, scores) in enumerate(zip(alone[1 + count :], texts, read_along, strict=True), 1 + count):
        (own,) = target.read([slot], [text], Want((1,), samplers=want.samplers[i : i + 1]))
        torch.testing.assert_close(scores.logits(0), own.logits(0), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(scores.hidden[1], own.hidden[1], rtol=1e-5, atol=1e-5)
        assert scores.token(0, samplers[i % 2]) == own.token(0, samplers[i % 2])
        assert together[i].tokens == slot.tokens
    going = []  # and both go on alike
    for slots in (drafting, alone[: 1 + count]):
        for slot, tree in zip(slots, trees, strict=True):
            target.commit(slot, best_path(tree))
        going.append([s.logits(0).clone() for s in target.score(slots, [TokenTree.root(8)] * len(slots), Want())])
    for one, other in zip(*going, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def read_at_once(target, texts):
    """As `read`, in one step."""
    slots = [target.open() for _ in texts]
    some = [(slot, text) for slot, text in zip(slots, texts, strict=True) if text]
    target.read(*zip(*some, strict=True), Want(samplers=(GREEDY,) * len(some)))
    return slots


def best_path(tree):
    """From the root to the last node."""
    path = [len(tree) - 1]
    while path[0]:
        path.insert(0, int(tree.parents[path[0]]))
    return path


def test_prompts_are_read_together_and_those_alike_wait_for_a_copy(tiny, monkeypatch):
    """Six requests, of which two pairs ask the same: their texts are those of each alone."""
    target = graphs(tiny("llama"))
    engine, read, pieces = Engine(target, make("none", target, None)), target.read, []
    prompts = [[5, 6, 7], [8] * 40, [5, 6, 7], [9, 3], [8] * 40, [7] * 20]
    expected = [[*engine.run([Request(prompt, 6)])][-1].tokens for prompt in prompts]
    monkeypatch.setattr(target, "read", lambda s, p, want: pieces.append([*map(len, p)]) or read(s, p, want))
    asked = [Request(prompt, 6) for prompt in prompts]
    ended = {id(s.request): s.tokens for s in engine.run(asked)}
    assert [ended[id(request)] for request in asked] == expected
    assert pieces[:2] == [[3, 40], [1, 2, 1, 20]]
    pieces.clear()  # of other collections nobody learns by waiting, or by not having to read
    ended = {id(s.request): s.tokens for s in engine.run([Request([8] * 40, 6, collection=name) for name in "ab"])}
    assert list(ended.values()) == [expected[1]] * 2
    assert pieces[0] == [40, 40]


def random_tree(rng, count):
    """Few different tokens, so that siblings are equal now and then."""
    return TokenTree.build(rng.integers(0, 2, count), [-1, *(int(rng.integers(0, i)) for i in range(1, count))])


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("room", [1, 3, 8])
def test_a_step_knows_how_far_its_trees_will_be_accepted(room, count, tiny):
    """The walk on the device and the host's own come to the same."""
    target, rng = graphs(tiny("llama")), np.random.default_rng(room)
    slots = read(target, [[5, 6, 7]] * count)
    step, longest = target.step(target._shape(count, bucket(8 * count, (8, 32)), 8), (), "best"), 0
    rows = step.shape.rows
    for _ in range(40):
        trees = [random_tree(rng, int(rng.integers(1, 9))) for _ in slots]
        for slot in slots:
            target.arena.reach(slot, slot.length + 8)
        fill(step.host, target.arena.table, target.groups, slots, trees, [0] * count)
        step._device.copy_(step._host)
        step.chosen = torch.from_numpy(rng.integers(0, 2, (2, 1, rows)).astype(np.int32))
        i, begin = step.inputs, 0
        found = walk(i.ids, i.depths, i.parents, step.chosen, torch.from_numpy(step.roots), room).tolist()
        for tree, line in zip(trees, found, strict=True):
            end = begin + len(tree)
            scores = Scores(torch.empty(rows, 0), {}, np.zeros(len(tree), np.int64), begin=begin)
            scores.take(step.chosen[0, 0, begin:end].tolist(), None)
            verdict = verify(Match(), tree, scores, GREEDY, lambda _: False)
            kept = scores.rows(verdict.path)[-room:]
            following = step.chosen[0, 0, kept].tolist()
            longest = max(longest, len(verdict.path))
            blank = [0] * (room - len(kept))
            assert line == [len(kept), *blank, *following, *blank, *kept]
            assert following[-1] == verdict.bonus
            begin = end
    assert longest > 3


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"temperature": 0.8}], ids=["greedy", "drawn"])
@pytest.mark.parametrize("kind", ["redrafter", "eagle3", "medusa", "falcon", "dflash", "spire"])
def test_a_draft_that_was_started_behind_its_step_is_the_one_made_after_it(kind, options, tiny, monkeypatch):
    model = tiny("llama")
    target, head = graphs(model), HEADS[kind].fresh(model)

    def drafts(ahead):
        drafter = make(kind, target, None, drafter_path=head)
        drafter.fixed = True  # as on a GPU
        if not ahead:
            drafter.draft_ahead = lambda *_: None
        trees, late = [], []
        fetch = drafter.captured.fetch
        monkeypatch.setattr(drafter.captured, "fetch", lambda *a, **k: late.append(bool(k)) or fetch(*a, **k))
        request = Request(
            tokens=[5, 6, 7, 8], max_new_tokens=30, sampling=Sampling(**options), max_draft=7,
            watch=lambda step: trees.append((step.tree.tokens.tolist(), step.tree.parents.tolist())),
        )  # fmt: skip
        (*_, last) = Engine(target, drafter).run([request])
        return last.tokens, trees, late

    said, trees, late = drafts(ahead=True)
    same, again, later = drafts(ahead=False)
    assert (said, trees) == (same, again)
    assert len(later) > 2  # one after the prompt, one after each step
    assert late == later[:1]
    assert late == [False]


TEXTS = [[5, 6, 7, 8], [9, 3, 9, 3, 4], [40]]


def together(target, make_drafter, ahead, monkeypatch, lengths=(30, 30, 30), joins=0, **options):
    """Texts of a batch. Returns them, their trees, and by draft the size of its batch: of drafts made after their step,
    and of those started behind it. joins: the step of the first text after which the last one begins."""
    drafter = make_drafter()
    heads = [part for part in getattr(drafter, "parts", {"": drafter}).values() if hasattr(part, "captured_ahead")]
    late, started, trees = [], [], {}
    for head in heads:
        head.fixed = True  # as on a GPU
        if not ahead:
            head.draft_ahead = lambda *_: None
        fetch, start = head.captured.fetch, head.captured_ahead.start

        def fetched(table, *given, fetch=fetch, **how):
            late.append(len(table))
            return fetch(table, *given, **how)

        def queued(table, *given, start=start, **how):
            started.append(len(table))
            return start(table, *given, **how)

        monkeypatch.setattr(head.captured, "fetch", fetched)
        monkeypatch.setattr(head.captured_ahead, "start", queued)

    requests = list[Request]()
    waiting = deque[Request]()

    def note(number, step):
        trees.setdefault(number, []).append((step.tree.tokens.tolist(), step.tree.parents.tolist()))
        if number == 0 and len(trees[0]) == joins:
            waiting.append(requests[-1])

    for number, (text, length) in enumerate(zip(TEXTS, lengths, strict=True)):
        requests.append(Request(text, length, Sampling(**options), max_draft=7, watch=partial(note, number)))
    waiting += requests[:2] if joins else requests
    ended = {id(s.request): s.tokens for s in Engine(target, drafter, max_batch=3).run(waiting)}
    return [ended[id(request)] for request in requests], trees, late, started


def head_drafter(kind, target, model):
    head = HEADS[kind].fresh(model)
    return lambda: make(kind, target, None, drafter_path=head)


@pytest.mark.parametrize("options", [{}, {"temperature": 0.8}], ids=["greedy", "drawn"])
@pytest.mark.parametrize("kind", ["redrafter", "eagle3", pytest.param("dflash", marks=pytest.mark.slow)])
def test_behind_a_step_of_several_sequences_all_are_drafted_for_together(kind, options, tiny, monkeypatch):
    """The texts and trees are those of drafts made after the steps."""
    target = graphs(tiny("llama"))
    head = head_drafter(kind, target, tiny("llama"))
    said, trees, late, started = together(target, head, True, monkeypatch, **options)
    same, again, later, never = together(target, head, False, monkeypatch, **options)
    assert (said, trees) == (same, again)
    assert never == []
    assert len(later) > 3
    assert late == [4]  # after the prompts; padded to a batch of four
    assert set(started) <= {1, 2, 4}
    assert 4 in started


@pytest.mark.parametrize("kind", ["redrafter", "eagle3"])
def test_whoever_stays_is_drafted_for_behind_the_step_in_which_another_ends(kind, tiny, monkeypatch):
    target = graphs(tiny("llama"))
    head, how = head_drafter(kind, target, tiny("llama")), {"lengths": (30, 5, 17)}
    said, trees, late, _ = together(target, head, True, monkeypatch, **how)
    assert (said, trees) == together(target, head, False, monkeypatch, **how)[:2]
    assert [len(tokens) for tokens in said] == [30, 5, 17]
    assert late == [4]


@pytest.mark.parametrize("kind", ["redrafter", "eagle3"])
def test_when_a_sequence_joins_all_are_drafted_for_anew(kind, tiny, monkeypatch):
    target = graphs(tiny("llama"))
    head = head_drafter(kind, target, tiny("llama"))
    said, trees, late, _ = together(target, head, True, monkeypatch, joins=3)
    assert (said, trees) == together(target, head, False, monkeypatch, joins=3)[:2]
    assert late == [2, 4]  # after the first two prompts, and after the third


@pytest.mark.parametrize(
    "options",
    [
        {"depth": 3, "width": 8, "nodes": 16, "dynamic": False},
        pytest.param({"depth": 2, "width": 4}, marks=pytest.mark.slow),
    ],
)
def test_a_draft_of_no_fixed_width_is_not_taken_for_the_one_behind_its_step(options, tiny):
    """Token 0 looks like the padding of a wider table, which a text of nothing else meets at once."""
    model, sampling = tiny("gemma2"), Sampling(logit_bias={0: 100.0})
    target = graphs(model)
    drafter = make("eagle", target, None, drafter_path=HEADS["eagle"].fresh(model), **options)
    (*_, last) = Engine(target, drafter).run([Request([5, 6, 7, 8], 20, sampling, max_draft=40)])
    assert last.tokens == [0] * 20


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("texts", [TEXTS[:1], TEXTS], ids=["one", "several"])
def test_a_generator_drafts_behind_steps_where_drafting_overlaps(texts, overlap, tiny, monkeypatch):
    model = tiny("llama")
    target, head = graphs(model), HEADS["redrafter"].fresh(model)
    options = {"generator": "redrafter", "drafter_path": head, "retrievers": "pld", "overlap": overlap}
    drafter, late = make("rasd", target, None, **options), []
    fetch = drafter.generator.captured.fetch
    monkeypatch.setattr(drafter.generator.captured, "fetch", lambda *a, **k: late.append(1) or fetch(*a, **k))
    (*_, last) = Engine(target, drafter).run([Request(tokens=text, max_new_tokens=20) for text in texts])
    assert last.stats.steps > 3
    assert (len(late) == 1) == overlap


def test_a_draft_that_was_started_for_another_token_is_made_again(tiny):
    """What the host decides may be something else than what the device took for granted."""
    model = tiny("llama")
    target = graphs(model)
    drafter = make("redrafter", target, None, drafter_path=HEADS["redrafter"].fresh(model))
    engine = Engine(target, drafter)
    reading = engine.read(Request(tokens=[5, 6, 7], max_new_tokens=20))
    engine.read_on([reading])
    sequence = reading.sequence
    engine.step([sequence])
    session = sequence.session
    assert session.ahead is not None
    other = (sequence.root + 1) % target.vocabulary
    found = drafter.propose([session], [other], [Budget(7, 5)])[0].tree
    session.ahead = None
    fresh = drafter.propose([session], [other], [Budget(7, 5)])[0].tree
    assert found.tokens.tolist() == fresh.tokens.tolist()
    session.keep()
    assert session.ahead is None


@pytest.mark.parametrize("kind", ["redrafter", "eagle3"])
def test_if_one_sequence_went_another_way_all_are_drafted_for_anew(kind, tiny):
    target = graphs(tiny("llama"))
    drafter = head_drafter(kind, target, tiny("llama"))()
    drafter.fixed = True
    engine, budgets = Engine(target, drafter, max_batch=3), [Budget(7, 5)] * 3
    readings = [engine.read(Request(text, 20, max_draft=7)) for text in TEXTS]
    engine.read_on(readings)
    running = [reading.sequence for reading in readings]
    engine.step(running)
    sessions, roots = [s.session for s in running], [s.root for s in running]
    assert len({id(session.ahead.pending) for session in sessions}) == 1
    assert [session.ahead.line for session in sessions] == [0, 1, 2]
    assert drafter._started(sessions, roots, 4) is not None
    assert drafter._started(sessions[1:], roots[1:], 2) is not None
    other = [roots[0], (roots[1] + 1) % target.vocabulary, roots[2]]
    assert drafter._started(sessions, other, 4) is None
    found = [proposal.tree.tokens.tolist() for proposal in drafter.propose(sessions, other, budgets)]
    for session in sessions:
        session.keep()
    if kind == "redrafter":  # another kind's keys are written by now
        assert found == [p.tree.tokens.tolist() for p in drafter.propose(sessions, other, budgets)]
    assert [tokens[0] for tokens in found] == other


def whole_of(stand_ins, layer):
    return next(other.whole for *_, own, other in stand_ins._places if own is layer)


def test_layers_that_read_one_input_are_one_product(tiny):
    """Weights lie side by side, once for all targets of a model, and the model says the same by itself."""
    model = tiny("qwen2")
    before = model(torch.tensor([[1, 2, 3]])).logits
    others, stand_ins = StandIns(model), StandIns(model)
    attention = model.model.layers[0].self_attn
    for part in ("weight", "bias"):
        memory = {whole_of(each, attention.q_proj).get_buffer(part).data_ptr() for each in (others, stand_ins)}
        assert memory == {attention.q_proj.get_parameter(part).data_ptr()}
    assert attention.k_proj.weight.data_ptr() - attention.q_proj.weight.data_ptr() == attention.q_proj.weight.nbytes
    assert torch.equal(model(torch.tensor([[1, 2, 3]])).logits, before)
    calls = []
    with stand_ins.in_place(), torch.inference_mode():
        for layer in model.modules():
            if isinstance(layer, Whole):
                layer.register_forward_hook(lambda *_: calls.append(1))
        torch.testing.assert_close(model(torch.tensor([[1, 2, 3]])).logits, before, rtol=1e-5, atol=1e-5)
    assert type(attention.q_proj) is torch.nn.Linear
    assert len(calls) == 5 * model.config.num_hidden_layers  # asked five times, and computed twice
    wholes = {layer.whole for *_, layer in stand_ins._places if isinstance(layer, JointPart)}
    assert wholes
    assert all(whole.made is None for whole in wholes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_angles_come_from_a_table_bit_for_bit(tiny, dtype):
    rotary = tiny("llama").model.rotary_emb
    angles = Angles.like(rotary)
    x, positions = torch.zeros(1, dtype=dtype), torch.tensor([[40, 3], [0, 63]])
    for reached in (False, True):
        if reached:
            angles.reach(64, x)
        for one, other in zip(angles(x, positions), rotary(x, positions), strict=True):
            assert torch.equal(one, other)
    assert angles.table.shape == (64, 2, rotary.inv_freq.numel() * 2)


def test_angles_that_a_text_changes_are_left_alone(tiny):
    rotary = copy.deepcopy(tiny("llama").model.rotary_emb)
    rotary.rope_type = "dynamic"
    assert Angles.like(rotary) is None
    assert Angles.like(tiny("llama").model.norm) is None


USUAL = {"llama": 3, "qwen2": 3, "qwen2-sliding": 3, "mistral": 3, "smollm3": 2, "granite": 3}  # of three layers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", of_each_kind(f for f in FAMILIES if f not in OTHERS))
def test_layers_of_the_usual_form_are_known_by_what_they_say(family, dtype):
    assert len(graphs(tiny_model(family, dtype=dtype))._fused) == USUAL.get(family, 0)


@pytest.mark.parametrize(
    ("family", "changes"), [("llama", {"hidden_act": "gelu"}), ("granite", {"residual_multiplier": 0.5})]
)
def test_a_layer_that_says_something_else_keeps_its_own_code(family, changes):
    assert not graphs(tiny_model(family, **changes))._fused


def test_a_layer_that_somebody_watches_keeps_its_own_code():
    model = tiny_model("llama")
    calls = []
    model.model.layers[1].self_attn.register_forward_hook(lambda *_: calls.append(1))
    target = graphs(model)
    assert [layer.self_attn.layer_idx for layer, _ in target._fused] == [0, 2]
    calls.clear()
    read(target, [[5, 6, 7]])
    assert calls


def test_a_cache_grows_no_further_than_the_model_reads():
    pool = KeyValuePool([LayerShape(1, 4, 4, torch.float32, torch.device("cpu"))], longest=600)
    pool.reserve(1, 300)
    assert pool.capacity == 512
    pool.reserve(1, 600)
    assert pool.capacity == 768
    pool.reserve(1, 800)
    assert pool.capacity == 800
    held = pool.bytes
    with pytest.raises(ModelError, match=r"does not fit on cpu: 1 sequences × \d+ tokens × 32 bytes are [\d.]+ GiB"):
        pool.reserve(1, 1 << 45)
    assert pool.bytes == held


@pytest.mark.parametrize("family", of_each_kind(f for f in FAMILIES if f not in OTHERS))
def test_all_norms_have_stand_ins(family, tiny):
    """None is left that a step's number of rows could matter to."""
    model = copy.deepcopy(tiny(family))
    for parameter in model.parameters():
        parameter.data += 0.3 * torch.rand(parameter.shape, generator=torch.Generator().manual_seed(1))
    norms = [m for m in model.modules() if "Norm" in type(m).__name__]
    assert norms
    for layer in norms:
        same = Norm.like(layer)
        assert same is not None
        x = torch.randn(2, 5, len(layer.weight))
        torch.testing.assert_close(same(x), layer(x), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"mode": "beam", "width": 3}], ids=["greedy", "beam"])
def test_a_draft_model_reads_a_level_of_all_its_texts_in_one_step(options, tiny, monkeypatch):
    """Three sequences, each as far as it is: their drafts are those that each has alone, in as few steps."""
    model, draft = tiny("llama"), tiny_model("llama", seed=3)
    prompts, levels = [[5, 6, 7, 8], [40, 41] * 9, list(range(1, 31))], []

    def drafts(batch):
        target = graphs(model)
        drafter = make("model", target, None, draft_model=draft, depth=4, **options)
        drafter.draft = graphs(draft)
        for name in ("extend", "draft_chains"):  # a level, or all of them
            made = getattr(drafter.draft, name)
            counted = lambda slots, *given, made=made: levels.append(len(slots)) or made(slots, *given)  # noqa: E731
            monkeypatch.setattr(drafter.draft, name, counted)
        trees = [[] for _ in prompts]
        requests = [
            Request(p, 12, max_draft=8, watch=lambda step, mine=mine: mine.append(step.tree.tokens.tolist()))
            for p, mine in zip(prompts, trees, strict=True)
        ]
        texts = {id(s.request): s.tokens for s in Engine(target, drafter, max_batch=batch).run(requests)}
        return [texts[id(r)] for r in requests], trees

    alone, levels_alone = drafts(1), len(levels)
    levels.clear()
    assert drafts(3) == alone
    assert max(levels) == 3
    assert len(levels) < levels_alone
    assert any(len(tree) > 4 for trees in alone[1] for tree in trees)


# ---- the host works while the device does


@pytest.fixture
def plain_engine(tiny):
    target = graphs(tiny("llama"))
    return Engine(target, make("none", target), "none", max_batch=4)


def requests(*limits, **options):
    return [Request([7, 8 + i, 9], max_new_tokens=limit, seed=i, **options) for i, limit in enumerate(limits)]


def answers(engine, requests):
    """Of a list that is answered in batches, in its order."""
    found = {}
    for sequence in engine.run(requests):
        if sequence.finish is not None:
            found[requests.index(sequence.request)] = sequence
    return [found[i] for i in range(len(requests))]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"sampling": Sampling(temperature=0.9, top_k=20)}], ids=str)
def test_a_step_that_begins_before_the_last_ones_tokens_were_looked_at_changes_no_text(plain_engine, options):
    """Texts of a batch end at different steps, by a stop token or their limit, and others join: each is what it is
    alone, and no page stays behind."""
    limits, free = [30, 1, 2, 17, 40, 5, 24], plain_engine.target.arena.free
    alone = [answers(plain_engine, [request])[0].tokens for request in requests(*limits, **options)]
    stops = [tokens[len(tokens) // 2] for tokens in alone]
    alone = [tokens[: tokens.index(stop) + 1] for tokens, stop in zip(alone, stops, strict=True)]
    asked = requests(*limits, **options)
    for request, stop in zip(asked, stops, strict=True):
        request.stop = lambda token, stop=stop: "stop" if token == stop else None
    assert [sequence.tokens for sequence in answers(plain_engine, asked)] == alone
    assert plain_engine.target.arena.free == free


def test_tokens_are_taken_over_while_the_device_works(plain_engine, monkeypatch):
    told = []  # how many tokens texts had when a forward was begun, and when it was over
    real, running = GraphTarget.score, []

    def score(self, slots, trees, want, known=0):
        had = [len(sequence.tokens) for sequence in running]
        scores = real(self, slots, trees, want, known)
        told.append((had, [len(sequence.tokens) for sequence in running]))
        return scores

    monkeypatch.setattr(GraphTarget, "score", score)
    for sequence in plain_engine.run(requests(9, 9)):
        running += [sequence] if sequence not in running else []
    assert sum(after > before for before, after in told) >= 6, told


def test_texts_that_join_a_batch_do_not_hold_up_the_device(plain_engine, monkeypatch):
    """Every forward but the first begins before the one before it is verified."""
    proposed, propose = [], plain_engine.drafter.propose
    monkeypatch.setattr(plain_engine.drafter, "propose", lambda *given: proposed.append(given) or propose(*given))
    limits = [3, 9, 5, 4, 11, 6, 8, 2, 7]
    assert [len(sequence.tokens) for sequence in answers(plain_engine, requests(*limits))] == limits
    assert len(proposed) == 1


def test_steps_that_nobody_observed_are_made_up_for(tiny, monkeypatch):
    """While no part of `auto` is asked, steps are not observed one by one. Whoever is asked next sees each token once,
    and knows the whole text; others begin when they are asked."""
    target = graphs(tiny("llama"))
    drafter = make("auto", target, drafters="suffix,lookahead")
    engine, told, observed = Engine(target, drafter, "auto", max_batch=3), {}, [0]
    turns, begin, observe = itertools.count(), drafter.parts["suffix"].begin, PilotedSession.observe

    def begun(request):
        session = begin(request)
        seen = told.setdefault(id(request), [])
        session.observe = lambda step, real=session.observe: (
            seen.append((step.position, list(step.tokens))),
            real(step),
        )
        return session

    def noted(session, seen):
        observed[0] += session.begun
        observe(session, seen)

    drafter.parts["suffix"].begin = begun
    drafter.parts["lookahead"].begin = None  # never asked, so it never begins
    monkeypatch.setattr(PilotedSession, "observe", noted)
    asks = lambda *_: [drafter.pilot.sources()["suffix"]] if next(turns) % 2 else []  # noqa: E731
    monkeypatch.setattr(drafter.pilot, "asks", asks)
    monkeypatch.setattr(drafter.pilot, "decline", lambda *_: 6)
    asked = requests(40, 33, 27)
    texts = [sequence.tokens for sequence in answers(engine, asked)]
    plain = Engine(target, make("none", target), "none", max_batch=3)
    assert texts == [sequence.tokens for sequence in answers(plain, requests(40, 33, 27))]
    for request, text in zip(asked, texts, strict=True):
        seen = told[id(request)]
        places = list(itertools.accumulate((len(tokens) for _, tokens in seen), initial=0))
        assert [position for position, _ in seen] == places[:-1]
        whole = [*request.tokens, *text]
        assert [token for _, tokens in seen for token in tokens] == whole[: places[-1]]
        assert places[-1] > len(request.tokens) + len(text) // 2
    assert observed[0] < sum(map(len, texts)) / 2


def test_a_text_with_log_probabilities_is_looked_at_at_once(plain_engine, monkeypatch):
    monkeypatch.setattr(Engine, "_step_ahead", None)
    (sequence,) = answers(plain_engine, requests(4, logprobs=2))
    assert len(sequence.logprobs) == 4


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2"])
def test_chains_are_drafted_at_once_as_they_are_level_by_level(family, tiny):
    """Texts of different lengths, of which different numbers of tokens are unread; then what was accepted is committed,
    and they are drafted for again, one of them past a page's end."""
    plain, fixed = open_target(tiny(family)), graphs(tiny(family))
    texts, depth = [[1, 2, 3, 4, 5] * 25, [7, 8, 9], [11]], 4
    one, other = read(plain, texts), read(fixed, texts)
    chains = [[4], [3, 9, 6], [2, 2]]
    for accepted in ([3, 1, 2], [1, 4, 2]):
        found = fixed.draft_chains(other, chains, depth, fixed.vocabulary)
        for slot, chain, draft in zip(one, chains, found, strict=True):
            tokens = list(chain)
            for token, logp in draft:
                tree = TokenTree.chain(tokens[0], tokens[1:])
                said = torch.log_softmax(plain.score([slot], [tree], Want())[0].logits(len(tokens) - 1).float(), -1)
                assert said.argmax() == token
                assert logp == pytest.approx(float(said[token]), abs=1e-4)
                tokens.append(token)
        for slot, twin, chain, many in zip(one, other, chains, accepted, strict=True):
            path = range(min(len(chain) - 1 + many, len(twin.tree)))
            plain.score([slot], [twin.tree], Want())
            plain.commit(slot, path)
            fixed.commit(twin, path)
        assert [s.tokens for s in one] == [s.tokens for s in other]
        chains = [[5, 6, 7], [8], [1, 2, 3, 4]]
    assert len(other[0].pages) == 2


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_steps_of_long_texts_have_about_as_many_tiles_as_they_need(family, tiny, monkeypatch):
    """Attention divides its work by that number; nothing else changes."""
    fixed, tree = graphs(tiny(family)), TokenTree.chain(4, [5, 6])
    texts = [[1 + (j + i) % 50 for i in range(30)] for j in range(12)]
    slots, found = read(fixed, texts), []
    for length in (100, 30):
        monkeypatch.setattr("slipstream.targets.captured.graph_target.LONG", length)
        scores = fixed.score(slots, [tree] * 12, Want(samplers=(GREEDY,) * 12))
        found.append(([score.every().clone() for score in scores], [*fixed._steps][-1][0]))
    (one, usual), (other, few) = found
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert (usual.rows, usual.tiles) == (64, (64,))
    assert (few.rows, few.tiles) == (64, (16,))


def test_no_chain_is_drafted_past_the_context(tiny):
    fixed = graphs(tiny("llama"))
    (slot,) = read(fixed, [[i % 50 for i in range(fixed.context - 4)]])
    assert fixed.draft_chains([slot], [[3]], 4, fixed.vocabulary) is not None
    assert fixed.draft_chains([slot], [[3]], 5, fixed.vocabulary) is None


@pytest.mark.slow
@pytest.mark.parametrize("confidence", [0.0, 0.3])
def test_a_draft_model_drafts_the_same_chains_at_once(confidence, tiny, monkeypatch):
    target, draft = graphs(tiny("llama")), tiny_model("llama", seed=3)
    prompts = [[5, 6, 7, 8] * 3, [9, 10, 11], [1]]

    def answered(at_once):
        drafter = make("model", target, None, draft_model=draft, depth=4, confidence=confidence)
        drafter.draft, made = graphs(draft), []
        chains = drafter.draft.draft_chains
        count = lambda *given: made.append(chains(*given)) or made[-1]  # noqa: E731
        monkeypatch.setattr(drafter.draft, "draft_chains", count if at_once else lambda *_: None)
        trees = []
        requests = [Request(p, max_new_tokens=12) for p in prompts]
        for request in requests:
            request.watch = lambda step: trees.append(step.tree.tokens.tolist())
        ended = {id(s.request): s.tokens for s in Engine(target, drafter).run(requests) if s.finish is not None}
        assert bool(made) == at_once
        return [ended[id(request)] for request in requests], trees

    assert answered(True) == answered(False)


class Shy(Drafter):
    """Drafts a token for every other step, and hears what steps took."""

    def __init__(self, target):
        super().__init__(target, None, None)
        self.asked, self.told = 0, []

    def begin(self, request):  # noqa: ARG002
        return NoSession()

    def propose(self, sessions, roots, budgets):  # noqa: ARG002
        self.asked += 1
        return [Proposal(TokenTree.chain(r, [5]) if self.asked % 2 else TokenTree.root(r)) for r in roots]

    def measured(self, rows, forward, host):
        self.told.append((max(rows), forward, host))


def test_what_the_host_decides_is_no_part_of_a_forward(tiny, monkeypatch):
    """Plain steps that follow each other do not wait for it, and that is what drafts have to be better than."""
    target, now = graphs(tiny("llama")), [0.0]

    def taking(seconds, work):
        def timed(*given, **more):
            now[0] += seconds
            return work(*given, **more)

        return timed

    monkeypatch.setattr("slipstream.stopwatch.perf_counter", lambda: now[0])
    monkeypatch.setattr(target, "score", taking(1, target.score))
    monkeypatch.setattr("slipstream.engine.verify", taking(10, verify))
    drafter = Shy(target)
    for _ in Engine(target, drafter, max_batch=3).run(requests(8, 8, 8)):
        pass
    assert {forward for _, forward, _ in drafter.told} == {1.0}
    assert {host for *_, host in drafter.told} >= {30.0}
