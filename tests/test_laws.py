"""The laws, over every drafter there is × every architecture × greedy and sampled × alone and in a batch.

Nothing here knows a drafter by name: a new file in drafters/ is tried by the same lines.
"""

from contextlib import nullcontext, suppress
from functools import lru_cache

import pytest
import torch

from families import FAMILIES, STATEFUL
from oracle import Oracle
from slipstream import LLM, drafters
from slipstream.drafters import _capabilities as can
from slipstream.engine import Engine
from together import Together
from trials import trials

PROMPTS = [[5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 5, 6], [40], [11, 12, 11, 12, 11, 13, 50, 51, 52, 50]]
NEW = 9  # beyond the windows of 6; `bench/fuzz.py` writes longer texts
QUICK = ("llama", "mamba")  # trees and plain decoding, everything by itself; `make test-fast` tries some of it
BRANCHLESS = "qwen3_next"  # chains, on a copied state: alone too
EVERY = [
    pytest.param(family, marks=() if family in QUICK else pytest.mark.slow, id=family)
    for family in (*FAMILIES, *STATEFUL)
]
SAMPLED = {"temperature": 0.9, "top_k": 40, "top_p": 0.95, "seed": 7}


@pytest.fixture(scope="module")
def plain(tiny):
    """plain(family, greedy) -> what each prompt gets from transformers when greedy, from `none` when sampled."""
    known = {}

    def answers(family, greedy):
        if (family, greedy) not in known:
            model = tiny(family)
            if greedy:
                texts = []
                for prompt in PROMPTS:
                    ids = torch.tensor([prompt])
                    out = model.generate(
                        ids,
                        attention_mask=torch.ones_like(ids),
                        max_new_tokens=NEW,
                        do_sample=False,
                        use_cache=True,
                    )
                    texts.append(out[0, len(prompt) :].tolist())
            else:
                llm = LLM(model, drafter="none")
                texts = [llm.generate(p, max_new_tokens=NEW, **SAMPLED).tokens for p in PROMPTS]
            known[family, greedy] = texts
        return known[family, greedy]

    return answers


@pytest.fixture(scope="module")
def drafting(tiny):
    """drafting(family, name) -> the model behind each trial of a drafter; kept for greedy and sampled texts."""

    @lru_cache(maxsize=1)
    def made(family, name):
        llms = []
        for trial in trials(name, tiny(family)):
            with refusals(family):
                llms.append(LLM(tiny(family), drafter=name, **trial))
        return llms

    return made


def refusals(family):
    """A drafter may refuse a model that can't branch, and says so."""
    return suppress(drafters.DrafterError) if family in STATEFUL else nullcontext()


def options(greedy):
    return {"max_new_tokens": NEW, **({} if greedy else SAMPLED)}


@pytest.mark.parametrize("greedy", [True, False], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", drafters.names())
@pytest.mark.parametrize("family", ["llama", pytest.param("mamba", marks=pytest.mark.slow)])
def test_the_text_does_not_depend_on_the_drafter(family, name, greedy, plain, drafting):
    expected = plain(family, greedy)
    for llm in drafting(family, name):
        assert llm.generate(PROMPTS[0], **options(greedy)).tokens == expected[0]
        assert [r.tokens for r in llm.generate(PROMPTS, **options(greedy))] == expected


@pytest.mark.slow
@pytest.mark.parametrize("name", drafters.names())
@pytest.mark.parametrize("family", [family for family in (*FAMILIES, *STATEFUL) if family not in QUICK])
def test_nor_on_any_architecture(family, name, tiny, plain, drafting, together):
    """Greedy and sampled texts of all drafters in one batch, whose forwards are those of either."""
    expected = plain(family, True) + plain(family, False)
    if family == BRANCHLESS:
        for llm in drafting(family, name):
            assert llm.generate(PROMPTS[0], **options(True)).tokens == expected[0]
    texts, failure = together(family)
    if failure is not None or any(found != expected for found in texts[name]):
        for found in drafted(tiny(family), family, [name])[name]:
            assert found == expected
        raise failure or AssertionError(f"{name} is right by itself, but not in a batch with the other drafters")


@pytest.fixture(scope="module")
def together(tiny):
    """together(family) -> what `drafted` says of all drafters at once, and what it failed with."""

    @lru_cache(maxsize=1)
    def answers(family):
        try:
            return drafted(tiny(family), family, drafters.names()), None
        except Exception as failure:
            return {}, failure

    return answers


def drafted(model, family, names):
    """{name: by trial, what each prompt gets, greedy and sampled}, of several drafters in one batch."""
    llm, asked, pairs = LLM(model, drafter="none"), {name: [] for name in names}, []
    for name in names:
        for trial in trials(name, model):
            with refusals(family):
                drafter = drafters.make(name, llm.target, **trial)
                room = can.default_draft(drafter, llm.target)
                own = [llm.request(p, max_draft=room, **options(g)) for g in (True, False) for p in PROMPTS]
                asked[name].append(own)
                pairs += [(request, drafter) for request in own]
    engine = Engine(llm.target, Together(llm.target, pairs), max_batch=len(pairs))
    texts = {id(sequence.request): sequence.tokens for sequence in engine.run([request for request, _ in pairs])}
    return {name: [[texts[id(request)] for request in own] for own in asked[name]] for name in names}


@pytest.mark.parametrize("greedy", [True, False], ids=["greedy", "sampled"])
@pytest.mark.parametrize("family", EVERY)
def test_nor_on_deep_right_and_wrong_drafts(family, greedy, tiny, plain):
    expected = plain(family, greedy)
    llm = LLM(tiny(family), drafter="none")
    llm.engine.drafter = Oracle(llm.target, [p + e for p, e in zip(PROMPTS, expected, strict=True)])
    results = llm.generate(PROMPTS, **options(greedy))
    assert [r.tokens for r in results] == expected
    if llm.target.chains:  # it did speculate: deep, and often right
        assert sum(r.stats.accepted for r in results) > 0.2 * sum(map(len, expected))


@pytest.mark.parametrize("rule", ["match", "rejection"])
def test_lossless_rules_agree_when_greedy(rule, tiny, plain):
    expected = plain("llama", True)
    llm = LLM(tiny("llama"), drafter="none")
    llm.engine.drafter = Oracle(llm.target, [p + e for p, e in zip(PROMPTS, expected, strict=True)])
    assert [r.tokens for r in llm.generate(PROMPTS, accept=rule, **options(True))] == expected


def test_answers_of_one_prompt_differ_and_equal_those_drawn_alone(tiny):
    llm = LLM(tiny("llama"), drafter="pld")
    group = llm.generate(PROMPTS[0], n=4, **options(False))
    assert len({tuple(r.tokens) for r in group}) == 4
    for i, r in enumerate(group):
        request = llm.request(PROMPTS[0], sample=i, **options(False))
        *_, alone = llm.engine.run([request])
        assert alone.tokens == r.tokens


def test_a_full_batch_refills_from_the_waiting(tiny, plain):
    llm = LLM(tiny("llama"), drafter="pld", max_batch=2)
    expected = plain("llama", True)
    assert [r.tokens for r in llm.generate(PROMPTS * 3, **options(True))] == expected * 3
