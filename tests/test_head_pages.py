"""Where the target's keys are in pages, so are those of heads: whoever shares, cuts, copies or frees a text's pages
does it for the head's keys too. Drafts are those of a head that read the whole text by itself, in a row of its own."""

import random
from functools import cache

import pytest
import torch

from behind import compare_drafts
from families import VOCABULARY, graphs, tiny_model
from slipstream.drafters import make
from slipstream.drafters._eagle import FeatureSession
from slipstream.engine import Engine
from slipstream.errors import CacheFullError
from slipstream.heads import HEADS
from slipstream.heads.keys import KeyCache, PagedKeys
from slipstream.kernels.sizes import PAGE
from slipstream.request import Request
from slipstream.sampling import Sampling
from slipstream.sequence import Kept
from slipstream.targets.base import Want
from slipstream.targets.captured import arena

SIZES = {
    "eagle": {},
    "eagle3": {},
    "two layers": {"num_hidden_layers": 2},
    "window": {"windows": (40,)},
    "dflash": {"block": 5},
    "falcon": {"block": 2},
}
KINDS = {"two layers": "eagle3", "window": "eagle3"}
OPTIONS = {"depth": 3, "width": 3, "nodes": 8}
LONG = random.Random(0).choices(range(3, VOCABULARY), k=2 * PAGE + 50)


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama", max_position_embeddings=2048)


def random_head(kind, model):
    """A head whose every part matters."""
    head, numbers = HEADS[KINDS.get(kind, kind)].fresh(model, dtype=model.dtype, **SIZES[kind]), torch.Generator()
    numbers.manual_seed(1)
    with torch.no_grad():
        for weight in head.parameters():
            if weight.ndim == 2:
                weight.copy_(torch.randn(weight.shape, generator=numbers) * 0.2)
    return head


@pytest.fixture(scope="module")
def heads(model):
    """heads(kind) -> a head of this kind, made once."""
    return cache(lambda kind: random_head(kind, model))


def engine_of(kind, model, heads, *, pages=True, **options):
    target = graphs(model)
    target.paged = pages
    drafter = make(KINDS.get(kind, kind), target, None, drafter_path=heads(kind), **{**OPTIONS, **options})
    target.paged = True
    assert isinstance(drafter.cache, PagedKeys if pages else KeyCache)
    return Engine(target, drafter)


def begin(engine, tokens, count=12, copy_from=None, **options):
    """A sequence whose prompt was read, and the trees of its steps."""
    trees = []
    watch = lambda step: trees.append((step.tree.tokens.tolist(), step.tree.parents.tolist()))  # noqa: E731
    request = Request(tokens, count, max_draft=8, watch=watch, **options)
    reading = engine.read(request, copy_from=copy_from)
    known = reading.slot.length
    while reading.left:
        engine.read_on([reading])
        assert reading.error is None
    return reading.sequence, trees, known


def go_on(engine, *sequences, steps=1000):
    """Steps of all of them together, until they end."""
    for _ in range(steps):
        running = [sequence for sequence in sequences if sequence.finish is None]
        if not running:
            break
        engine.step(running)
        assert all(sequence.error is None for sequence in running)


def retire(engine, *sequences):
    for sequence in sequences:
        sequence.finish = sequence.finish or "cancelled"
    engine.retire(list(sequences))
    target = engine.target.arena
    assert target.free == target.pages - 1
    assert not any(target._rows)  # nothing leaks


@pytest.mark.parametrize("kind", SIZES)
def test_drafts_are_those_of_a_head_with_rows_of_its_own(kind, model, heads):
    """Prompts shorter and longer than a page, together, and one that grows into its next page."""
    found = []
    for pages in (True, False):
        engine = engine_of(kind, model, heads, pages=pages)
        begun = [begin(engine, LONG[:length], 20, seed=1) for length in (3, PAGE - 4, 2 * PAGE + 50)]
        generation = engine.drafter.cache.generation
        go_on(engine, *(sequence for sequence, _, _ in begun))
        assert engine.drafter.cache.generation == generation
        found.append([(sequence.tokens, trees) for sequence, trees, _ in begun])
        retire(engine, *(sequence for sequence, _, _ in begun))
    assert found[0] == found[1]


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_where_drafts_are_drawn_too(kind, model, heads):
    found = []
    for pages in (True, False):
        engine = engine_of(kind, model, heads, pages=pages, mode="sample")
        sequence, trees, _ = begin(engine, LONG, 20, seed=1, sampling=Sampling(temperature=0.8))
        go_on(engine, sequence)
        found.append((sequence.tokens, trees))
        retire(engine, sequence)
    assert found[0] == found[1]


@pytest.mark.parametrize("length", [PAGE - 1, PAGE, PAGE + 1, 2 * PAGE + 20])
@pytest.mark.parametrize("kind", ["eagle", "eagle3", "two layers", "dflash"])
def test_after_a_shared_prefix_drafts_are_those_of_a_text_that_was_read_whole(kind, length, model, heads):
    """From a text that goes on meanwhile, and whose drafts stay what they are too."""
    engine = engine_of(kind, model, heads)
    other = [*LONG[:length], *reversed(LONG[:30])]
    alone, expected, _ = begin(engine, other)
    go_on(engine, alone)
    retire(engine, alone)
    alone, undisturbed, _ = begin(engine, LONG, 40)
    go_on(engine, alone)
    retire(engine, alone)
    first, its, known = begin(engine, LONG, 40)
    assert known == 0
    go_on(engine, first, steps=3)
    second, found, known = begin(engine, other, copy_from=first)
    assert known == length - 1  # the last state is needed again, and a state is no key
    shared = len(set(first.slot.pages) & set(second.slot.pages))
    assert shared == (length - 1) // PAGE
    go_on(engine, first, second)
    assert (found, its) == (expected, undisturbed)
    retire(engine, first, second)


@pytest.mark.parametrize("kind", SIZES)
def test_a_text_that_was_put_back_drafts_as_one_that_was_read_whole(kind, model, heads):
    engine = engine_of(kind, model, heads)
    first, before, _ = begin(engine, LONG, 30)
    go_on(engine, first, steps=4)
    engine.put_back(first)
    other, _, _ = begin(engine, LONG[::-1], 3)  # writes to the pages that were freed
    abandoned = engine.reread(first)
    engine.abandon(abandoned)
    go_on(engine, other)
    engine.retire([other])
    count, written = len(before), list(first.tokens)
    reading = engine.reread(first)
    while reading.left:
        engine.read_on([reading])
    go_on(engine, first)
    retire(engine, first)
    fresh, expected, _ = begin(engine, LONG + written[:-1], 30 - len(written) + 1)
    go_on(engine, fresh)
    assert first.tokens == [*written[:-1], *fresh.tokens]
    assert before[count:] == expected[1:]  # but the one of the prompt's first token
    retire(engine, fresh)


@pytest.mark.parametrize("name", ["auto", "rasd"])
def test_of_several_drafters_those_with_keys_in_pages_read_a_text_again(name, model, heads, monkeypatch):
    target = graphs(model)
    more = {"generator": "eagle3", "drafter_path": heads("eagle3"), "retrievers": "suffix"} if name == "rasd" else {}
    if name == "auto":
        more = {"drafters": "suffix", "heads": [heads("eagle3")]}
    drafter = make(name, target, None, **more)
    assert drafter.in_pages
    engine, observed = Engine(target, drafter), []
    first, _, _ = begin(engine, LONG, 30)
    go_on(engine, first, steps=4)
    engine.put_back(first)
    plain = FeatureSession.observe
    monkeypatch.setattr(FeatureSession, "observe", lambda self, seen: observed.append(seen) or plain(self, seen))
    reading = engine.reread(first)
    while reading.left:
        engine.read_on([reading])
    again = [token for seen in observed for token in seen.tokens]
    assert again == [*LONG, *first.tokens[:-1]]
    assert [seen.position for seen in observed][:1] == [0]
    observed.clear()
    count = len(first.tokens) - 1
    go_on(engine, first)
    later = [token for seen in observed for token in seen.tokens]
    assert later == first.tokens[count : count + len(later)]  # nothing is shown twice
    assert name == "auto" or later
    retire(engine, first)


def test_states_that_were_missed_leave_no_trace_in_shared_pages(model, heads):
    """The n-th key of such a text lies before its n-th token, in a page that others may share: it is copied first."""
    found = []
    for pages in (True, False):
        engine = engine_of("eagle3", model, heads, pages=pages)
        first, its, _ = begin(engine, LONG, 60)
        session = first.session
        go_on(engine, first, steps=1)
        engine._pause_all_but(())
        session._drop_states()  # as if nobody had asked for some steps
        session.pairs = session.pairs[: PAGE // 2]
        go_on(engine, first, steps=2)
        second, others, _ = begin(engine, [*LONG, *first.tokens[:2], 5, 6, 7], 30, copy_from=first)
        assert second.session.length < second.slot.length - PAGE
        go_on(engine, first, second)
        found.append((its, others))
        retire(engine, first, second)
    assert found[0] == found[1]


def test_without_pages_to_copy_into_nothing_is_drafted_and_nothing_fails(model, heads, monkeypatch):
    engine = engine_of("eagle3", model, heads)
    sequence, trees, _ = begin(engine, LONG, 20)

    def full(*_):
        raise CacheFullError("full")

    with monkeypatch.context() as patched:
        patched.setattr(PagedKeys, "reach", full)
        go_on(engine, sequence, steps=3)
    assert all(len(tokens) == 1 for tokens, _ in trees[1:4])
    go_on(engine, sequence)
    assert max(len(tokens) for tokens, _ in trees) > 1
    retire(engine, sequence)


def test_more_sequences_than_are_drafted_for_together(model, heads, monkeypatch):
    monkeypatch.setattr("slipstream.drafters._eagle.BATCHES", (1, 2))
    monkeypatch.setattr("slipstream.drafters._head.BATCHES", (1, 2))
    found = []
    for pages in (True, False):
        engine = engine_of("eagle3", model, heads, pages=pages)
        begun = [begin(engine, LONG[start : start + 20], 12, seed=start) for start in range(5)]
        go_on(engine, *(sequence for sequence, _, _ in begun))
        found.append([trees for _, trees, _ in begun])
        retire(engine, *(sequence for sequence, _, _ in begun))
    assert found[0] == found[1]


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "dflash"])
def test_the_next_turn_of_a_chat_drafts_as_after_a_text_read_whole(kind, model, heads):
    engine, trees, kept = engine_of(kind, model, heads), [], Kept()

    def turn(tokens, kept=None):
        trees.clear()
        watch = lambda step: trees.append((step.tree.tokens.tolist(), step.tree.parents.tolist()))  # noqa: E731
        (*_, last) = engine.run([Request(tokens, 20, max_draft=8, watch=watch)], kept)
        return last.tokens, list(trees)

    text = LONG[: PAGE - 10]
    for _ in range(3):
        said, drafted = turn(text, kept)
        assert (said, drafted) == turn(text)
        text = [*text, *said[:-3], *LONG[::-1][:9]]
    engine.forget(kept)
    retire(engine)


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("drafted", [0, 1, 6])
def test_whoever_starts_from_a_text_does_not_wait_for_its_head(drafted, fixed, model, heads, monkeypatch):
    """Keys of the prefix that are there are not read again. Where drafts are captured, the target reads the last tokens
    once more rather than the head alone. Drafts are those of a text that was read whole."""
    engine, calls = engine_of("eagle3", model, heads), []
    engine.drafter.fixed = fixed
    document, one, other = LONG[: PAGE + 20], LONG[200:209], LONG[209:218]
    begun, _, _ = begin(engine, document, 4)
    go_on(engine, begun, steps=1)
    first, _, known = begin(engine, [*document, *one], 30, copy_from=begun)
    assert known == len(document) - 1
    go_on(engine, first, steps=drafted)
    read = engine.drafter.read
    monkeypatch.setattr(engine.drafter, "read", lambda session: (calls.append(session), read(session)))
    for prefix in (document, [*document, *one]):
        tokens = [*prefix, *other]
        calls.clear()
        second, trees, known = begin(engine, tokens, 12, copy_from=first)
        assert bool(calls) == (not fixed and not drafted and prefix is not document)
        assert known == (len(document) - 1 if fixed and not drafted else len(prefix) - 1)
        third, expected, _ = begin(engine, tokens, 12)
        go_on(engine, second)
        go_on(engine, third)
        assert trees == expected
        engine.retire([second, third])
    retire(engine, begun, first)


def test_of_several_drafters_the_one_that_has_read_least_decides_what_is_read_again(model, heads):
    target = graphs(model)
    engine = Engine(target, make("auto", target, None, drafters="suffix", heads=[heads("eagle3")]))
    first, _, _ = begin(engine, LONG, 30)
    first.session.parts["eagle3"].settled = lambda length: length - 5
    second, _, known = begin(engine, LONG, 30, copy_from=first)
    assert known == len(LONG) - 2 - 5
    go_on(engine, first, second)
    assert first.tokens == second.tokens
    retire(engine, first, second)


@pytest.mark.parametrize("pages", [True, False])
@pytest.mark.parametrize("kind", ["eagle", "eagle3", "dflash"])
def test_states_that_nobody_asked_for_are_taken_over_unread(kind, pages, model, heads, monkeypatch):
    engine, calls = engine_of(kind, model, heads, pages=pages), []
    monkeypatch.setattr(engine.target, "chunk", 100)  # so that the prompt's states come in several pieces
    first, _, _ = begin(engine, LONG, 30)
    first.session.skip()  # the chance to draft from them has passed
    read = engine.drafter.read
    monkeypatch.setattr(engine.drafter, "read", lambda session: (calls.append(session), read(session)))
    tokens = [*LONG[: PAGE + 20], 5, 6, 7]
    second, trees, known = begin(engine, tokens, copy_from=first)
    assert not calls
    assert known == PAGE + 19
    third, expected, _ = begin(engine, tokens)
    go_on(engine, second)
    go_on(engine, third)
    assert trees == expected
    retire(engine, first, second, third)


@pytest.mark.parametrize("pages", [True, False])
@pytest.mark.parametrize("kind", ["eagle", "eagle3", "dflash"])
def test_a_prompts_unread_states_are_of_their_own_tokens_though_more_text_was_taken_over(kind, pages, model, heads):
    """As in a chat, where nobody was asked about the answer before: its states were missed."""
    engine = engine_of(kind, model, heads, pages=pages)
    first, _, _ = begin(engine, LONG[:100], 30)
    first.session.skip()
    for _ in engine.target.prefill(first.slot, LONG[100:160], Want()):
        pass
    tokens = [*LONG[:160], 5, 6, 7]
    second, trees, known = begin(engine, tokens, copy_from=first)
    assert known == 159
    third = engine.read(Request(tokens, 12, max_draft=8))  # reads the text whole, and misses the same states
    for end, layers in ((100, engine.drafter.layers), (159, ()), (163, engine.drafter.layers)):
        piece = third.text[third.slot.length : end]
        (scores,) = engine.target.read([third.slot], [piece], Want(layers, samplers=(third.sequence.chooser,)))
        engine._record_piece(third, piece, scores)
    third.sequence.request.watch = lambda step: expected.append((step.tree.tokens.tolist(), step.tree.parents.tolist()))
    expected = []
    go_on(engine, second)
    go_on(engine, third.sequence)
    assert second.session.pairs == third.sequence.session.pairs
    assert trees[1:] == expected
    retire(engine, first, second, third.sequence)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["eagle", "eagle3", "dflash"])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("fixed", [False, True])
def test_whatever_happens_to_texts_drafts_are_those_of_rows(fixed, kind, seed, model, heads, monkeypatch):
    """Copied, put back, read again, ended, gone on with in changing company. fixed: as on a GPU, where drafts are
    started behind steps; they are those that are made after them."""
    found, started = [], compare_drafts(monkeypatch)
    for pages, ahead in ((True, True), (False, True), (True, False))[: 2 + fixed]:
        engine, rng = engine_of(kind, model, heads, pages=pages), random.Random(seed)
        engine.drafter.fixed = fixed
        if not ahead:
            engine.drafter.draft_ahead = lambda *_: None
        running, away, seen = [], [], []
        for _ in range(60):
            act = rng.choice(["begin", "copy", "copy", "step", "step", "step", "away", "back", "end"])
            if act == "begin" or (act == "copy" and not running):
                one, trees, _ = begin(engine, LONG[: rng.randint(1, len(LONG))], 90, seed=len(seen))
                running.append(one)
                seen.append((one, trees))
            elif act == "copy":
                other = rng.choice(running)
                whole = [*other.request.tokens, *other.tokens]
                tokens = [*whole[: rng.randint(1, len(whole))], *rng.choices(range(3, VOCABULARY), k=3)]
                one, trees, _ = begin(engine, tokens, 90, seed=len(seen), copy_from=other)
                running.append(one)
                seen.append((one, trees))
            elif act == "step" and running:
                some = rng.sample(running, rng.randint(1, len(running)))
                go_on(engine, *some, steps=rng.randint(1, 5))
            elif act == "away" and running:
                away.append(running.pop(rng.randrange(len(running))))
                engine.put_back(away[-1])
            elif act == "back" and away:
                running.append(away.pop())
                reading = engine.reread(running[-1])
                while reading.left:
                    engine.read_on([reading])
            elif act == "end" and running:
                gone = running.pop(rng.randrange(len(running)))
                gone.finish = "cancelled"
                engine.retire([gone])
            ended = [one for one in running if one.finish is not None]
            engine.retire(list(ended))
            running = [one for one in running if one not in ended]
        for one in away:
            one.finish = "cancelled"
        engine.retire(away)
        retire(engine, *running)
        found.append([(one.tokens, trees) for one, trees in seen])
    assert all(each == found[0] for each in found)
    assert (max(started, default=0) > 1) == fixed


# ---- the arena


def test_memory_is_divided_among_the_targets_layers_and_the_heads(model, heads, monkeypatch):
    """As long as no text is held. Captured steps, which refer to what was there before, are dropped."""
    target = graphs(model)
    budget = target.arena.bytes
    monkeypatch.setattr(arena.Arena, "_fitting", lambda self, held: budget // self.per_token // PAGE)  # noqa: ARG005
    slot = target.open()
    for _ in target.prefill(slot, LONG[:8], Want()):
        pass
    assert target._steps
    before, pages = next(target.arena.tensors())[0], target.arena.pages
    held = make("eagle", target, None, drafter_path=heads("eagle"))  # a text is held: it stays where it is
    assert target.arena.pages == pages
    assert next(target.arena.tensors())[0].data_ptr() == before.data_ptr()
    assert target.arena.bytes > budget
    held.release()
    assert target.arena.bytes == budget
    target.close(slot)
    drafter = make("eagle3", target, None, drafter_path=heads("eagle3"))
    assert target.arena.bytes <= budget
    assert target.arena.pages < pages
    assert not target._steps
    assert target.arena.generation == 1
    engine = Engine(target, drafter)
    sequence, _, _ = begin(engine, LONG)
    go_on(engine, sequence)
    retire(engine, sequence)
    # Another head moves everything again: what the first had captured refers to memory that is gone.
    cleared = []
    monkeypatch.setattr(drafter.captured, "clear", lambda: cleared.append(True))
    other = make("eagle3", target, None, drafter_path=heads("two layers"))
    sequence, _, _ = begin(engine, LONG)
    go_on(engine, sequence)
    assert cleared == [True]
    retire(engine, sequence)
    other.release()
    engine.close()
    assert not target.arena._added


@torch.inference_mode()
def test_a_heads_layers_are_copied_with_their_page_but_not_moved_with_drafts(model, heads):
    target = graphs(model)
    drafter = make("eagle3", target, None, drafter_path=heads("eagle3"))
    keys, values = drafter.cache.layers[0]
    one = target.open()
    target.arena.reach(one, PAGE + 8)
    one.tokens = LONG[: PAGE + 8]
    keys[0, :, target.arena.columns(one, 0, PAGE + 8)] = torch.arange(PAGE + 8.0)[None, :, None]
    two = target.fork(one)
    target.arena.reach(two, PAGE + 9)
    assert two.pages[0] == one.pages[0]
    assert two.pages[1] != one.pages[1]
    for slot in (one, two):
        at = target.arena.columns(slot, 0, PAGE + 8)
        assert keys[0, 0, at, 0].tolist() == list(range(PAGE + 8))
    before = values.clone()
    target.arena.move(target.arena.columns(two, PAGE + 1, 4), target.arena.columns(two, PAGE, 4))
    assert torch.equal(values, before)
    assert keys[0, 0, target.arena.columns(two, 0, PAGE + 8), 0].tolist() == list(range(PAGE + 8))
    for slot in (one, two):
        target.close(slot)
