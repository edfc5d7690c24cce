"""magicdec: a part of a text's keys says what the model says with everything else hidden; which part that is."""

import copy
import threading

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from families import FAMILIES, graphs, tiny_model
from kinds import of_each_kind
from slipstream import LLM
from slipstream.budget import Budget
from slipstream.drafters import make
from slipstream.drafters.magicdec import by_block, chosen_blocks, pooled
from slipstream.engine import Engine
from slipstream.errors import DrafterError, OptionError
from slipstream.kernels.sizes import PAGE
from slipstream.request import Request
from slipstream.targets import Want, open_target, watching
from slipstream.targets.masks import additive_masks, mask_kinds
from slipstream.tree import TokenTree

TEXT = [1 + 17 * i % 60 for i in range(40)]
TREE = TokenTree.build([4, 5, 6, 7, 8], [-1, 0, 0, 1, 2])
KEPT = [0, 1, 9, 10, 11, 25, 36, 37, 38, 39]
ALL = {"shortest": 0, "keys": 0.999, "sinks": 1, "window": 1}  # of a short text, rounded: every token


@pytest.fixture(scope="module")
def long():
    """A model that reads more than a few pages."""
    return tiny_model("llama", max_position_embeddings=1024)


def read(target, text):
    slot = target.open()
    for _ in target.prefill(slot, text, Want()):
        pass
    return slot


@torch.inference_mode()
def brute(model, text, kept, tree):
    """(n, V) logits after a tree: all keys of the text are there, and a mask hides those that were not kept."""
    cache = DynamicCache()
    model(
        input_ids=torch.tensor([text]),
        past_key_values=cache,
        use_cache=True,
        position_ids=torch.arange(len(text))[None],
    )
    see = np.zeros((1, len(tree), len(text) + len(tree)), np.bool_)
    see[:, :, kept] = True
    see[0, :, len(text) :] = tree.mask
    query = len(text) + tree.depths[None].astype(np.int64)
    key = np.concatenate([np.arange(len(text)), query[0]])[None]
    kinds = mask_kinds(model.config.get_text_config())
    return model(
        input_ids=torch.from_numpy(tree.tokens[None].astype(np.int64)),
        attention_mask=additive_masks(kinds, see, query, key, model.dtype, model.device),
        position_ids=torch.from_numpy(query),
        past_key_values=cache,
        use_cache=True,
    ).logits[0]


@pytest.mark.parametrize(
    "family", of_each_kind(f for f in FAMILIES if f != "bloom")
)  # whose bias follows a key's place
def test_a_part_says_what_the_text_says_with_the_rest_hidden(family, tiny):
    model = tiny(family)
    target = open_target(model)
    slot = read(target, TEXT)
    part = target.select(slot, KEPT)
    (first,) = target.score([part], [TREE.cut(1)], Want())
    early = first.every().clone()
    (rest,) = target.score([part], [TREE], Want(), known=3)
    expected = brute(model, TEXT, KEPT, TREE)
    close = {"rtol": 0, "atol": 1e-4 * float(expected.std())}
    torch.testing.assert_close(torch.cat([early, rest.every()]), expected, **close)
    if family in ("llama", "gpt2"):  # and it is not what all of the text says
        (whole,) = target.score([slot], [TREE], Want())
        assert not torch.allclose(whole.every(), expected, **close)


def test_a_bias_by_position_keeps_the_position(tiny):
    """Bloom: hidden from the beginning on, a text's end is a text of its own, further on."""
    target = open_target(tiny("bloom"))
    slot = read(target, TEXT)
    part = target.select(slot, range(len(TEXT)))
    (one,), (other,) = (target.score([s], [TREE], Want()) for s in (part, slot))
    torch.testing.assert_close(one.every(), other.every(), rtol=0, atol=1e-4)


def test_pages_are_shared_and_say_what_copies_say(long):
    """After an accepted branch whose keys were not yet moved, and with drafts that go over a page's end."""
    text = [1 + 17 * i % 60 for i in range(505)]
    pages, copies = graphs(long), open_target(long)
    slots = []
    for target in (pages, copies):
        slot = read(target, text)
        target.score([slot], [TREE], Want(rows=8))
        target.commit(slot, [0, 2, 4])
        slots.append(slot)
    paged, plain = slots
    chain = TokenTree.chain(9, [3, 4, 5, 6, 7, 8, 9, 10])
    kept = [*range(128), *range(384, 508)]
    before = pages.arena.free
    part, copied = pages.select(paged, [0, 3]), copies.select(plain, kept)
    assert part.position == copied.position == 508
    for known, upto in ((0, 3), (3, 9)):
        tree = TokenTree.chain(9, [3, 4, 5, 6, 7, 8, 9, 10][: upto - 1])
        (a,), (b,) = pages.extend([part], [tree], [known], Want()), copies.extend([copied], [tree], [known], Want())
        torch.testing.assert_close(a.every(), b.every(), rtol=0, atol=1e-4)
    assert pages.arena.free == before - 1  # the one that the text itself goes on in
    assert part.pages[:2] == [paged.pages[0], paged.pages[3]]
    for target, one in ((pages, part), (copies, copied)):
        target.close(one)
    (a,), (b,) = (t.score([s], [chain], Want(rows=16)) for t, s in ((pages, paged), (copies, plain)))
    torch.testing.assert_close(a.every(), b.every(), rtol=0, atol=1e-4)
    pages.close(paged)
    assert pages.arena.free == pages.arena.pages - 1


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "bloom"])
def test_attention_is_told_as_the_model_computes_it(family, tiny):
    eager = copy.deepcopy(tiny(family))
    eager.set_attn_implementation("eager")
    with torch.inference_mode():
        weights = eager(input_ids=torch.tensor([TEXT]), output_attentions=True).attentions
    expected = sum(layer[0, :, -6:].sum((0, 1)) for layer in weights)
    targets = [open_target(tiny(family)), *([graphs(tiny(family))] if family != "bloom" else [])]
    for target in targets:
        slot = read(target, TEXT)
        found = target.attended(slot, 6)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-3)
        assert slot.tokens == TEXT
        target.close(slot)


def root_weights(model, tokens):
    """(length,) what the last token attends to, over all layers and heads: the whole softmax, in float64."""
    eager = copy.deepcopy(model).to("cpu", torch.float64)
    eager.set_attn_implementation("eager")
    with torch.inference_mode():
        layers = eager(input_ids=torch.tensor([tokens]), output_attentions=True).attentions
    return sum(layer[0, :, -1].sum(0) for layer in layers)


@pytest.mark.parametrize("family", of_each_kind(["llama", "mistral", "gemma2", "bloom", "qwen2-sliding"]))
def test_a_verification_tells_what_its_root_attends_to(family, tiny):
    """Of two texts, one of which is longer than a page and was told an accepted branch before; a third does not ask."""
    texts, path = [[1 + (17 + j) * i % 60 for i in range(n)] for j, n in enumerate((190, 40, 70))], [0, 2, 4]
    targets = [open_target(tiny(family)), *([graphs(tiny(family))] if family != "bloom" else [])]
    for target in targets:
        slots = [read(target, text) for text in texts]
        target.score(slots, [TREE] * 3, Want())
        target.commit(slots[0], path)
        (quiet, *_) = target.score(slots, [TREE] * 3, Want())
        quiet = quiet.every().clone()
        for slot in slots[:2]:
            slot.wants_attention = True
        (loud, *_) = target.score(slots, [TREE] * 3, Want())
        torch.testing.assert_close(loud.every(), quiet, rtol=0, atol=0)  # asking changes nothing else
        for slot in slots[:2]:
            expected = root_weights(tiny(family), [*slot.tokens, int(TREE.tokens[0])])
            expected = torch.from_numpy(by_block(expected.float(), target.block))
            torch.testing.assert_close(slot.attended, expected, rtol=0, atol=2e-4)
        assert slots[2].attended is None
        assert not any(slot.wants_attention for slot in slots)
        told = slots[0].attended.clone()
        target.score(slots, [TREE] * 3, Want())
        assert torch.equal(slots[0].attended, told)  # whoever asks is told once


def test_other_threads_are_not_watched(tiny):
    """Another model may run there at the same time."""
    other = open_target(tiny("qwen2"))
    with watching.watching(1, 99) as seen:
        thread = threading.Thread(target=read, args=(other, TEXT))
        thread.start()
        thread.join()
        assert seen.layers == 0
        read(open_target(tiny("llama")), TEXT)
        assert seen.layers > 0


@pytest.mark.slow
def test_what_was_told_selects(tiny, long):
    """The first draft knows nothing; the next one has what the verification attended to, by token or by page."""
    for target, length, first, next_ in (
        (open_target(tiny("llama")), 200, [0, 195, 196, 197, 198, 199], [0, 69, 70, 71, 72, 199]),  # pooled over five
        (graphs(long), 900, [0, 3, 4, 5, 6, 7], [0, 2, 4, 5, 6, 7]),
    ):
        slot, size = read(target, [1 + 17 * i % 60 for i in range(length)]), target.block
        drafter = make("magicdec", target, None, selection="attended", shortest=0, keys=6 * size, sinks=1, window=1)
        session = drafter.begin(Request(slot.tokens, 9))
        session.follow(slot)
        assert session._blocks(slot) == first
        target.score([slot], [TREE], Want())
        assert len(slot.attended) == length // size + 1  # the root is told of too
        slot.attended = torch.zeros(length // size + 1)
        slot.attended[2 if size == PAGE else 70] = 1.0
        assert session._blocks(slot) == next_
        target.close(slot)


def weights_at(length, *places, size=1):
    """Much is attended to there, so that neighbours count too; by block."""
    found = torch.zeros(length)
    found[list(places)] = 1.0
    return by_block(pooled(found), size)


@pytest.mark.parametrize(
    ("length", "size", "keys", "sinks", "window", "weights", "expected"),
    [
        (10, 1, 5, 2, 2, None, [0, 1, 7, 8, 9]),  # sinks and the latest
        (10, 1, 0.5, 2, 1, None, [0, 1, 7, 8, 9]),  # the same as a share
        (10, 1, 99, 2, 1, None, list(range(10))),  # no more than there is
        (10, 1, 1, 2, 2, None, [0, 1, 8, 9]),  # what must be there, however few are wanted
        (1, 1, 4, 2, 2, None, [0]),
        (500, 128, 300, 16, 32, None, [0, 2, 3]),  # blocks, rounded up
        (512, 128, 128, 0, 1, None, [3]),  # the block that the text ends in
        (385, 128, 128, 0, 2, None, [2, 3]),  # a window over two blocks
        (20, 1, 7, 1, 1, weights_at(20, 10), [0, 8, 9, 10, 11, 12, 19]),  # pooled over five
        (900, 128, 512, 16, 32, weights_at(800, 300, 420, 421, size=128), [0, 3, 6, 7]),  # told before the text went on
    ],
)
def test_what_is_selected(length, size, keys, sinks, window, weights, expected):
    assert chosen_blocks(length, size, keys, sinks, window, weights) == expected


@pytest.mark.parametrize("selection", ["streaming", "snapkv", "attended"])
@pytest.mark.parametrize("options", [{}, {"temperature": 0.9, "seed": 3}], ids=["greedy", "sampled"])
def test_with_all_keys_every_draft_is_right(selection, options, tiny):
    """Keys at wrong positions, or of other tokens, would guess wrong."""
    mode = {"mode": "sample", "width": 1} if options else {}
    llm = LLM(tiny("llama"), drafter="magicdec", selection=selection, **ALL, **mode)
    result = llm.generate(TEXT, max_new_tokens=25, ignore_eos=True, **options)
    assert result.stats.accepted == result.stats.nodes_verified > 15
    assert (
        result.tokens
        == LLM(tiny("llama"), drafter="none").generate(TEXT, max_new_tokens=25, ignore_eos=True, **options).tokens
    )


def engine_texts(target, drafter, requests, batch):
    texts = {id(s.request): s.tokens for s in Engine(target, drafter, max_batch=batch).run(requests)}
    return [texts[id(r)] for r in requests]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"mode": "beam", "width": 2, "selection": "attended"}])
def test_on_pages_sequences_draft_together_and_end_by_themselves(options, long, monkeypatch):
    """Texts of one, three and four pages, answers of different lengths."""
    prompts = [[1 + (17 + j) * i % 60 for i in range(n)] for j, n in enumerate((60, 380, 400))]
    lengths, levels = (5, 14, 9), []

    def requests():
        return [Request(p, n, max_draft=8) for p, n in zip(prompts, lengths, strict=True)]

    expected = engine_texts(graphs(long), make("none", graphs(long)), requests(), 1)
    target = graphs(long)
    for name in ("extend", "draft_chains"):  # a level, or all of them
        made = getattr(target, name)
        counted = lambda slots, *given, made=made: levels.append(len(slots)) or made(slots, *given)  # noqa: E731
        monkeypatch.setattr(target, name, counted)
    drafter = make("magicdec", target, None, shortest=64, keys=256, **options)
    free = target.arena.free
    assert engine_texts(target, drafter, requests(), 3) == expected
    assert levels.count(2) > 2  # the short one is not drafted for until it has 64 tokens
    assert target.arena.free == free
    assert not any(target.arena._rows)


def test_a_text_that_was_put_back_is_drafted_for_again(tiny):
    target = open_target(tiny("llama"))
    engine = Engine(target, make("magicdec", target, None, **ALL))
    plain = engine_texts(target, make("none", target), [Request(TEXT, 20, max_draft=8)], 1)
    reading = engine.read(Request(TEXT, 20, max_draft=8))
    engine.read_on([reading])
    sequence = reading.sequence
    engine.step([sequence])
    engine.put_back(sequence)
    assert sequence.session.silent
    engine.read_on([engine.reread(sequence)])
    while sequence.finish is None:
        engine.step([sequence])
    assert [sequence.tokens] == plain
    assert sequence.stats.accepted == sequence.stats.nodes_verified > 8


def test_where_pages_run_out_nothing_is_drafted(long, monkeypatch):
    target = graphs(long)
    drafter, slot = make("magicdec", target, None, shortest=0, keys=128), read(target, TEXT[:32] * 12)  # three pages
    session = drafter.begin(Request(slot.tokens, 9))
    session.follow(slot)
    assert len(session.propose(7, Budget(8, 8)).tree) == 5
    target.arena.shorten(slot, slot.length)
    monkeypatch.setattr(target.arena, "_free", [])
    assert len(session.propose(7, Budget(8, 8)).tree) == 1
    target.close(slot)
    assert not any(target.arena._rows)


def test_short_texts_are_left_alone(tiny):
    llm = LLM(tiny("llama"), drafter="magicdec", shortest=50, keys=8)
    result = llm.generate(TEXT, max_new_tokens=30, ignore_eos=True)
    assert 0 < result.stats.drafts <= result.stats.steps - 10
    assert LLM(tiny("llama"), drafter="magicdec").generate(TEXT, max_new_tokens=9).stats.nodes_verified == 0


def test_auto_asks_it_by_name_and_only_about_long_texts(tiny, monkeypatch):
    llm, asked = LLM(tiny("llama"), drafter="auto", drafters="suffix, magicdec"), []
    part = llm.engine.drafter.parts["magicdec"]
    propose = part.propose
    monkeypatch.setattr(part, "propose", lambda *given: asked.append(1) or propose(*given))
    expected = llm.generate(TEXT, max_new_tokens=12, ignore_eos=True).tokens
    assert not asked
    monkeypatch.setattr("slipstream.drafters.magicdec.MagicDecSession.silent", False)
    assert llm.generate(TEXT, max_new_tokens=12, ignore_eos=True).tokens == expected
    assert asked


def test_what_it_cannot_do_is_refused_by_name(tiny):
    with pytest.raises(DrafterError, match="ordinary attention"):
        LLM(tiny("mamba"), drafter="magicdec")
    with pytest.raises(DrafterError, match="selection='streaming'"):
        LLM(tiny("falcon"), drafter="magicdec", selection="snapkv")
    for wrong in ({"selection": "best"}, {"keys": 0}, {"window": 0}, {"depth": 0}, {"mode": "x"}):
        with pytest.raises(OptionError, match=next(iter(wrong))):
            LLM(tiny("llama"), drafter="magicdec", **wrong)
