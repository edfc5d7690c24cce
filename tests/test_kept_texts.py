"""Kept texts are found again by how they begin, and by nothing else."""

import random
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from families import graphs
from slipstream.drafters import make
from slipstream.engine import MIN_SHARED, Engine
from slipstream.kept_texts import KeptTexts
from slipstream.request import Request
from slipstream.sequence import Kept
from slipstream.service import Service
from slipstream.targets import open_target
from slipstream.targets.base import Slot, shared
from test_service import Listener


@pytest.fixture
def kept():
    freed = []
    found = KeptTexts(SimpleNamespace(forget=freed.append, turn=nullcontext))
    found.freed = freed
    return found


def text(tokens):
    return Kept(Slot(list(tokens)))


def test_the_longest_prefix_is_found_to_within_a_block(kept):
    """As comparing with every text would."""
    rng, texts = random.Random(0), []
    for _ in range(300):
        before = rng.choice(texts)[: rng.randrange(400)] if texts and rng.random() < 0.8 else []
        texts.append(before + [rng.randrange(50) for _ in range(rng.randrange(1, 300))])
        kept.keep("default", text(texts[-1]))
    held = [each.slot.tokens for each in kept]
    assert len(held) + len(kept.freed) == 300
    for _ in range(300):
        prompt = rng.choice(texts)[: rng.randrange(1, 500)] + [rng.randrange(50) for _ in range(rng.randrange(40))]
        most = max(shared(tokens, prompt[:-1]) for tokens in held)
        found, known = kept.find(Request(prompt, 1))
        assert most // MIN_SHARED * MIN_SHARED <= known <= most
        assert (found is None) == (known == 0)
        assert found is None or shared(found.slot.tokens, prompt[:-1]) == known


def test_what_another_collection_asked_is_not_found(kept):
    kept.keep("one", text(range(100)))
    assert kept.find(Request(list(range(90)), 1, collection="other")) == (None, 0)
    assert kept.find(Request(list(range(90)), 1, collection="one"))[1] == 89


def test_equal_hashes_of_other_tokens_are_not_believed(kept, monkeypatch):
    monkeypatch.setattr("slipstream.kept_texts.hashes", lambda _, tokens: iter(range(len(tokens) // MIN_SHARED)))
    kept.keep("default", text(range(100)))
    assert kept.find(Request(list(range(1, 90)), 1)) == (None, 0)


def test_the_earlier_turn_of_a_conversation_goes(kept):
    turns, other = [text(range(100)), text(range(200))], text([*range(60), 7])
    for each in (other, *turns):
        kept.keep("default", each)
    assert list(kept) == [other, turns[1]]
    assert kept.freed == [turns[0]]


def test_the_least_recently_used_text_goes_first_and_nothing_of_it_stays(kept):
    texts = [text([i] * 100) for i in range(4)]
    for each in texts:
        kept.keep("default", each)
    kept.use(texts[0])
    kept.shrink(2)
    assert kept.freed == [texts[1], texts[2]]
    kept.take(texts[3])  # by whoever goes on with it
    kept.shrink(0)
    assert kept.freed == [texts[1], texts[2], texts[0]]
    assert not kept._by_hash
    assert kept.find(Request([0] * 50, 1)) == (None, 0)


def test_conversations_of_many_callers_stay_read(tiny):
    """Each is found again at its next turn, and a system prompt that all begin with is read once."""
    target = graphs(tiny("llama"))
    service, rng = Service(Engine(target, make("none", target), "none", max_batch=8)), random.Random(2)
    system = [rng.randrange(1, 60) for _ in range(64)]
    texts = [[*system, *(rng.randrange(1, 60) for _ in range(40))] for _ in range(24)]
    for turn in range(3):
        before, found = sum(map(len, texts)), service.counts.found_tokens
        asked = [Listener(service, Request(tokens, 4)) for tokens in texts]
        assert {each.wait().finish for each in asked} == {"length"}
        texts = [[*tokens, *each.tokens, 5, 6, turn] for tokens, each in zip(texts, asked, strict=True)]
        read = before - (service.counts.found_tokens - found)
        assert read <= (64 + 24 * 40 + 8 * 64 if turn == 0 else 24 * 8)
    assert len(service.kept) == 24
    service.close()
    assert target.arena.free == target.arena.pages - 1


@pytest.mark.parametrize("paged", [False, True])
def test_callers_at_the_same_time_share_what_their_prompts_begin_with(tiny, paged):
    """Also without pages, where it is copied; and every text is the one that its prompt has alone."""
    target, rng = (graphs if paged else open_target)(tiny("llama")), random.Random(3)
    engine = Engine(target, make("suffix", target), "suffix", max_batch=8)
    system = [rng.randrange(1, 60) for _ in range(200)]
    prompts = [[*system, 5, i] for i in range(6)]
    alone = {tuple(s.request.tokens): s.tokens for p in prompts for s in engine.run([Request(p, 8)])}
    service = Service(engine)
    asked = [Listener(service, Request(prompt, 8)) for prompt in prompts]
    assert {each.wait().finish for each in asked} == {"length"}
    assert service.counts.found_tokens >= 5 * len(system)
    assert [each.tokens for each in asked] == [alone[tuple(prompt)] for prompt in prompts]
    service.close()
