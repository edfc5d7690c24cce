"""The loop's edges: ends of texts, limits, processors, cancelling, and input that can't be served."""

import numpy as np
import pytest
import torch

from families import VOCABULARY, tiny_model
from oracle import Oracle
from slipstream import LLM, DraftSession, Proposal, TokenTree, drafters
from slipstream.drafters.base import Drafter
from slipstream.errors import (
    CacheFullError,
    ContextError,
    DrafterError,
    ModelError,
    NumericalError,
    OptionError,
    PromptError,
    SlipstreamError,
)
from slipstream.sequence import Kept

PROMPT = [5, 6, 7, 8, 9, 5, 6, 7]


@pytest.fixture
def llm(tiny):
    return LLM(tiny("llama"), drafter="none")


def with_oracle(llm, prompt=PROMPT, **options):
    """The same model with a drafter that knows what it will say."""
    plain = llm.generate(prompt, **options)
    llm.engine.drafter = Oracle(llm.target, [prompt + plain.tokens + [1] * 20])
    return plain


# ---- ends


@pytest.mark.parametrize("limit", [1, 2, 3, 7])
def test_max_new_tokens_cuts_exactly(llm, limit):
    long = with_oracle(llm, max_new_tokens=20, ignore_eos=True)
    short = llm.generate(PROMPT, max_new_tokens=limit, ignore_eos=True)
    assert short.tokens == long.tokens[:limit]
    assert short.finish_reason == "length"


def test_a_stop_token_ends_the_text_even_inside_a_draft(llm):
    long = with_oracle(llm, max_new_tokens=20, ignore_eos=True)
    for place in range(3, 9):
        result = llm.generate(PROMPT, max_new_tokens=20, ignore_eos=True, stop_tokens=[long.tokens[place]])
        first = long.tokens.index(long.tokens[place])
        assert result.tokens == long.tokens[: first + 1]
        assert result.finish_reason == "stop"


def test_the_context_is_filled_and_never_exceeded(tiny):
    llm = LLM(tiny("llama"), drafter="none")
    prompt = (PROMPT * 40)[: llm.target.context - 5]
    plain = with_oracle(llm, prompt, max_new_tokens=50, ignore_eos=True)
    fast = llm.generate(prompt, max_new_tokens=50, ignore_eos=True)
    assert fast.tokens == plain.tokens
    assert len(plain.tokens) == 6  # five positions are left, and the last of them still chooses a token
    assert plain.finish_reason == "length"


def test_a_budget_of_zero_is_plain_decoding(tiny):
    llm = LLM(tiny("llama"), drafter="pld")
    result = llm.generate(PROMPT, max_new_tokens=10, max_draft=0, ignore_eos=True)
    assert result.stats.tokens_per_step == 1
    assert result.stats.nodes_verified == 0


# ---- processors


class Recorder:
    """A stateful processor that writes down every call."""

    def __init__(self):
        self.calls = []

    def __call__(self, input_ids, scores):
        self.calls.append(input_ids[0].tolist())
        return scores


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "seed": 1}])
def test_a_processor_sees_the_calls_of_plain_decoding(llm, sampling):
    options = {"max_new_tokens": 12, "stop_tokens": [], **sampling}
    first, second = Recorder(), Recorder()
    plain = llm.generate(PROMPT, processors=[first], **options)
    with_oracle(llm, **options)
    fast = llm.generate(PROMPT, processors=[second], **options)
    assert fast.tokens == plain.tokens
    assert fast.stats.accepted > 0
    assert second.calls == first.calls
    assert [len(c) for c in first.calls] == list(range(len(PROMPT), len(PROMPT) + len(plain.tokens)))


def test_penalties_do_not_depend_on_the_draft(llm):
    options = {"max_new_tokens": 20, "repetition_penalty": 1.5, "frequency_penalty": 0.4, "bad_words": [[3], [4, 5]]}
    plain = with_oracle(llm, **options)
    fast = llm.generate(PROMPT, **options)
    assert fast.tokens == plain.tokens
    assert fast.stats.accepted > 0


def test_logprobs_are_those_of_plain_decoding(llm, tiny):
    options = {"max_new_tokens": 12, "logprobs": 3, "temperature": 0.8, "seed": 4}
    plain = with_oracle(llm, **options)
    fast = llm.generate(PROMPT, **options)
    assert fast.stats.accepted > 0
    with torch.no_grad():
        rows = tiny("llama")(input_ids=torch.tensor([PROMPT + plain.tokens])).logits[0].log_softmax(-1)
    for i, (one, other) in enumerate(zip(plain.logprobs, fast.logprobs, strict=True)):
        expected = rows[len(PROMPT) - 1 + i]
        assert one.token == other.token == plain.tokens[i]
        assert other.logprob == pytest.approx(float(expected[other.token]), abs=1e-4)
        assert list(one.top) == list(other.top) == expected.topk(3).indices.tolist()


# ---- statistics


def test_statistics_add_up(llm):
    plain = with_oracle(llm, max_new_tokens=20, ignore_eos=True)
    assert (plain.stats.steps, plain.stats.tokens_per_step, plain.stats.accepted) == (20, 1.0, 0)
    stats = llm.generate(PROMPT, max_new_tokens=20, ignore_eos=True).stats
    assert stats.new_tokens == stats.steps + stats.accepted == 20
    assert stats.by_source["oracle"] == {"proposed": stats.nodes_verified, "accepted": stats.accepted}
    assert stats.acceptance_rate == stats.accepted / stats.drafted_depth
    assert stats.node_yield == stats.accepted / stats.nodes_verified
    assert 0 < stats.draft_seconds + stats.verify_seconds <= stats.seconds
    assert set(stats.as_dict()) >= {"drafter", "tokens_per_second", "node_yield", "exact", "by_source"}


def test_lossy_rules_and_low_precision_are_not_called_exact(llm):
    assert llm.generate(PROMPT, max_new_tokens=2).stats.exact
    assert not llm.generate(PROMPT, max_new_tokens=2, accept="typical").stats.exact
    half = LLM(tiny_model("llama", dtype=torch.bfloat16), drafter="none")
    assert not half.generate(PROMPT, max_new_tokens=2).stats.exact


def test_a_batch_whose_members_change_each_others_bits_is_not_called_exact(llm, monkeypatch):
    monkeypatch.setattr(llm.target, "exact_together", False)
    assert llm.generate(PROMPT, max_new_tokens=2).stats.exact
    assert [r.stats.exact for r in llm.generate([PROMPT, PROMPT[:3]], max_new_tokens=2)] == [False, False]


# ---- cancelling


def test_cancel_ends_after_the_step_under_way(llm):
    request = llm.request(PROMPT, max_new_tokens=50, ignore_eos=True)
    seen = []
    for sequence in llm.engine.run([request]):
        seen.append(len(sequence.tokens))
        if len(seen) == 3:
            request.cancel()
    assert sequence.finish == "cancelled"
    assert len(sequence.tokens) == 4


def test_leaving_the_loop_frees_the_slots(llm):
    requests = [llm.request(PROMPT, max_new_tokens=50, ignore_eos=True) for _ in range(3)]
    for _ in llm.engine.run(requests):
        break
    assert all(slot is None for slot in llm.target._slots)


def test_an_error_frees_the_slots(llm):
    def broken(input_ids, scores):
        if input_ids.shape[1] > len(PROMPT) + 2:
            raise RuntimeError("a user's mistake")
        return scores

    with pytest.raises(RuntimeError, match="a user's mistake"):
        llm.generate([PROMPT, PROMPT[:3]], processors=[broken])
    assert all(slot is None for slot in llm.target._slots)


def test_a_prompt_that_cannot_be_read_leaves_nothing_open(llm):
    closed = []

    class Watcher(Reckless):
        def begin(self, request):
            session = super().begin(request)
            session.close = lambda: closed.append(session)
            return session

    def broken(*_):
        raise RuntimeError("a user's mistake")

    llm.engine.drafter = Watcher(llm.target, TokenTree.root)
    with pytest.raises(RuntimeError, match="a user's mistake"):
        llm.generate(PROMPT, processors=[broken])
    assert len(closed) == 1
    assert all(slot is None for slot in llm.target._slots)


def test_only_a_prompt_that_is_running_already_is_not_read_again(llm, monkeypatch):
    prompts, read, prefill = [PROMPT, [40, *PROMPT[1:]], [40, *PROMPT[1:]]], [], llm.target.prefill
    monkeypatch.setattr(
        llm.target, "prefill", lambda slot, new, want: read.append(len(new)) or prefill(slot, new, want)
    )
    alone = [llm.generate(prompt, max_new_tokens=8).tokens for prompt in prompts]
    read.clear()
    assert [result.tokens for result in llm.generate(prompts, max_new_tokens=8)] == alone
    assert read == [len(PROMPT), len(PROMPT), 1]  # the second is as long as the first, and another text


def test_a_prompt_is_read_again_in_its_own_pieces_where_a_state_can_not_be_cut(tiny, monkeypatch):
    llm, read = LLM(tiny("qwen3_next"), drafter="none"), []
    alone, prefill = llm.generate(PROMPT, max_new_tokens=6).tokens, llm.target.prefill
    monkeypatch.setattr(
        llm.target, "prefill", lambda slot, new, want: read.append(len(new)) or prefill(slot, new, want)
    )
    requests = [llm.request(PROMPT, max_new_tokens=6) for _ in range(2)]
    assert [s.tokens for s in llm.engine.run(requests) if s.finish is not None] == [alone] * 2
    assert read == [len(PROMPT)] * 2


# ---- bad input


@pytest.mark.parametrize(
    ("prompt", "options", "error", "says"),
    [
        ("", {}, PromptError, "without a tokenizer"),
        ([], {}, PromptError, "empty"),
        ([5, 99], {}, PromptError, r"0..63, found \[99\]"),
        ([5, -1, 2**70], {}, PromptError, rf"0..63, found \[-1, {2**70}\]"),
        ([5] * 256, {}, ContextError, "256 tokens, the model reads 256"),
        (PROMPT, {"max_new_tokens": 0}, PromptError, "max_new_tokens=0"),
        (PROMPT, {"logit_bias": {64: 1.0}}, OptionError, r"name \[64\]"),
        ({"role": "user"}, {}, PromptError, "mapping"),
        (PROMPT, {"max_draft": -1}, OptionError, "max_draft=-1"),
        (PROMPT, {"n": 0}, OptionError, "n=0"),
        (PROMPT, {"temprature": 1.0}, OptionError, "no option temprature"),
        (PROMPT, {"temperature": -1.0}, OptionError, "temperature=-1.0"),
        (PROMPT, {"accept": "hope"}, OptionError, "'hope' is unknown"),
        (PROMPT, {"stop": "x"}, OptionError, "need a tokenizer"),
        (PROMPT, {"seed": [1, 2]}, OptionError, "2 seeds for 1 prompts"),
        ([PROMPT, 3.5], {}, PromptError, "float"),
    ],
)
def test_bad_input_is_refused_with_a_reason(llm, prompt, options, error, says):
    with pytest.raises(error, match=says):
        llm.generate(prompt, **options)


def test_unknown_drafters_and_options_are_refused(tiny):
    with pytest.raises(DrafterError, match=r"'nope' is unknown: there are .*model, none, pld"):
        LLM(tiny("llama"), drafter="nope")
    with pytest.raises(OptionError, match="'pld' has no option speed: its options are max_ngram"):
        LLM(tiny("llama"), drafter="pld", speed=9)
    with pytest.raises(OptionError, match="draft_model"):
        LLM(tiny("llama"), drafter="model")
    with pytest.raises(OptionError, match="min_ngram"):
        LLM(tiny("llama"), drafter="pld", min_ngram=9)


def test_nan_logits_are_an_error_not_a_text():
    model = tiny_model("llama")
    with torch.no_grad():
        model.lm_head.weight[7] = torch.nan
    for options in ({}, {"temperature": 0.7}):
        with pytest.raises(NumericalError, match="NaN"):
            LLM(model, drafter="pld").generate(PROMPT, **options)


def test_a_smaller_vocabulary_cannot_draft(tiny):
    small = tiny_model("llama", vocab_size=VOCABULARY - 8)
    with pytest.raises(DrafterError, match="56 token ids, the target 64"):
        LLM(tiny("llama"), drafter="model", draft_model=small)


@pytest.mark.parametrize("accept", ["match", "rejection"])
def test_a_draft_with_fewer_padded_logits_still_drafts(tiny, accept):
    class Tokenizer:
        chat_template = None

        def __len__(self):
            return VOCABULARY - 8

        def get_vocab(self):
            return {str(i): i for i in range(VOCABULARY - 8)}

    small = tiny_model("llama", vocab_size=VOCABULARY - 8)
    llm = LLM(tiny("llama"), Tokenizer(), "model", draft_model=small, draft_tokenizer=Tokenizer(), mode="sample")
    llm.tokenizer = None
    result = llm.generate(PROMPT, max_new_tokens=40, ignore_eos=True, temperature=1.0, seed=1, accept=accept)
    assert result.stats.new_tokens == 40


@pytest.mark.slow
def test_a_larger_padded_vocabulary_drafts_only_what_the_target_knows(tiny):
    padded = tiny_model("llama", vocab_size=VOCABULARY + 8)
    plain = LLM(tiny("llama"), drafter="none").generate(PROMPT, max_new_tokens=20)
    for mode in ("greedy", "beam"):
        llm = LLM(tiny("llama"), drafter="model", draft_model=padded, mode=mode)
        assert llm.generate(PROMPT, max_new_tokens=20).tokens == plain.tokens


@pytest.mark.parametrize("prompt", [PROMPT, PROMPT * 3], ids=["short", "long"])
def test_a_draft_model_that_is_the_target_is_always_right(prompt, tiny):
    """It reads every token once: whole drafts are accepted, whose last token it has not read."""
    llm = LLM(tiny("llama"), drafter="model", draft_model=tiny("llama"))
    stats = llm.generate(prompt, max_new_tokens=40, ignore_eos=True).stats
    assert stats.accepted == stats.nodes_verified > 30


def test_where_a_draft_model_has_no_room_the_target_goes_on_alone(tiny, monkeypatch):
    """And what it missed, it reads later: once its cache has room, it is always right again."""
    llm = LLM(tiny("llama"), drafter="model", draft_model=tiny("llama"))
    plain = llm.generate(PROMPT * 3, max_new_tokens=40, ignore_eos=True).tokens
    extend, calls = llm.engine.drafter.draft.extend, []

    def full(*given):
        calls.append(given)
        if 3 < len(calls) < 9:
            raise CacheFullError("full")
        return extend(*given)

    monkeypatch.setattr(llm.engine.drafter.draft, "extend", full)
    found = llm.generate(PROMPT * 3, max_new_tokens=40, ignore_eos=True)
    assert found.tokens == plain
    assert len(calls) > 9
    assert found.stats.accepted == found.stats.nodes_verified > 20


def test_a_draft_model_with_a_short_context_stops_drafting(tiny):
    short = tiny_model("llama", max_position_embeddings=16)
    llm = LLM(tiny("llama"), drafter="model", draft_model=short)
    plain = LLM(tiny("llama"), drafter="none").generate(PROMPT, max_new_tokens=40, ignore_eos=True)
    assert llm.generate(PROMPT, max_new_tokens=40, ignore_eos=True).tokens == plain.tokens


class Reckless(Drafter):
    """Drafts whatever it is told to, budget or not."""

    def __init__(self, target, draft):
        super().__init__(target, None, None)
        self.draft = draft

    def begin(self, request):  # noqa: ARG002
        return RecklessSession(self.draft)


class RecklessSession(DraftSession):
    def __init__(self, draft):
        self.draft = draft

    def propose(self, root, budget):  # noqa: ARG002
        return Proposal(self.draft(root))


def test_a_draft_past_every_limit_is_cut(tiny):
    llm = LLM(tiny("llama"), drafter="none")
    plain = llm.generate(PROMPT, max_new_tokens=10, ignore_eos=True)
    llm.engine.drafter = Reckless(llm.target, lambda root: TokenTree.chain(root, [9] * 500))
    result = llm.generate(PROMPT, max_new_tokens=10, ignore_eos=True)
    assert result.tokens == plain.tokens
    assert result.stats.nodes_verified <= 16 * result.stats.steps


@pytest.mark.parametrize(
    ("draft", "says"),
    [
        (lambda root: TokenTree.chain(root, [VOCABULARY]), "0..63"),
        (lambda root: TokenTree.build([root, 1, 2], [-1, 2, 0]), "before their children"),
        (lambda root: TokenTree.chain((root + 1) % VOCABULARY, [1, 2]), "start with the root it was asked about"),
        (
            lambda root: TokenTree.build([root, 1], [-1, 0], q=torch.full((1, 8), 1 / 8), q_row=[0, -1]),
            "q must have 64 columns",
        ),
        (
            lambda root: TokenTree.build(
                [root, *range(40)],
                [-1] + [0] * 40,
                q=torch.full((1, VOCABULARY), 1 / VOCABULARY),
                q_row=[0] + [-1] * 40,
            ),
            "sampled draft of 40 nodes exceeds its budget of 16",
        ),
    ],
)
def test_a_drafters_mistake_is_an_error_not_a_wrong_text(tiny, draft, says):
    llm = LLM(tiny("llama"), drafter="none")
    llm.engine.drafter = Reckless(llm.target, draft)
    with pytest.raises(DrafterError, match=says):
        llm.generate(PROMPT)


def test_a_drafter_sees_the_hidden_states_it_asked_for(tiny):
    model, shown = tiny("llama"), []

    class Watcher(Reckless):
        layers = (1, 3)

        def begin(self, request):  # noqa: ARG002
            session = RecklessSession(self.draft)
            session.observe = shown.append
            return session

    llm = LLM(model, drafter="none")
    llm.engine.drafter = Watcher(llm.target, lambda root: TokenTree.chain(root, [9, 9]))
    result = llm.generate(PROMPT, max_new_tokens=6, ignore_eos=True)
    text = PROMPT + result.tokens
    assert [t for seen in shown for t in seen.tokens] == text[:-1]  # the last token is not read any more
    with torch.no_grad():
        states = model(input_ids=torch.tensor([text]), output_hidden_states=True).hidden_states
    for seen in shown:
        for layer in (1, 3):
            expected = states[layer][0, seen.position : seen.position + len(seen.tokens)]
            torch.testing.assert_close(seen.hidden[layer], expected, rtol=0, atol=1e-4)


def test_long_and_short_texts_share_a_batch_near_the_end_of_the_context(tiny):
    llm = LLM(tiny("llama"), drafter="none")
    prompts = [(PROMPT * 40)[: llm.target.context - 3], [40, 41]]
    plain = [llm.generate(p, max_new_tokens=20, ignore_eos=True).tokens for p in prompts]
    llm.engine.drafter = Oracle(llm.target, [p + t + [1] * 20 for p, t in zip(prompts, plain, strict=True)])
    assert [r.tokens for r in llm.generate(prompts, max_new_tokens=20, ignore_eos=True)] == plain


@pytest.mark.parametrize("family", ["mamba", "qwen3_next", "falcon-alibi"])
def test_a_kept_text_outlives_an_interrupted_step(family, tiny):
    """As in a chat whose answer was stopped by Ctrl-C inside a forward."""
    llm = LLM(tiny(family), drafter="pld")
    kept = Kept()
    list(llm.engine.run([llm.request(PROMPT[:5], max_new_tokens=3)], kept))
    calls = []

    def broken(input_ids, scores):
        calls.append(input_ids)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return scores

    with pytest.raises(KeyboardInterrupt):
        list(llm.engine.run([llm.request(PROMPT, processors=[broken])], kept))
    assert kept.slot is kept.session is None
    *_, again = llm.engine.run([llm.request(PROMPT, max_new_tokens=8)], kept)
    assert again.tokens == llm.generate(PROMPT, max_new_tokens=8).tokens


def test_one_bad_prompt_is_refused_before_any_is_answered(llm):
    seen = []
    with pytest.raises(ContextError):
        llm.generate([PROMPT, [5] * 300], processors=[lambda ids, scores: seen.append(ids) or scores])
    assert seen == []


def test_answers_can_be_drawn_again_one_by_one(llm):
    options = {"temperature": 1.0, "max_new_tokens": 8}
    for result in llm.generate(PROMPT, n=3, seed=5, **options):
        assert llm.generate(PROMPT, seed=result.seed, sample=result.sample, **options).tokens == result.tokens


def test_every_error_is_a_slipstream_error():
    assert all(issubclass(e, SlipstreamError) for e in (ContextError, DrafterError, ModelError, OptionError))


# ---- the registry


def test_outsiders_add_drafters_through_an_entry_point(monkeypatch, tiny):
    from importlib.metadata import EntryPoint

    mine = EntryPoint("outsider", "slipstream.drafters.none:NoDrafter", drafters.GROUP)
    monkeypatch.setattr(drafters, "entry_points", lambda group: [mine] if group == drafters.GROUP else [])
    drafters.names.cache_clear()
    drafters.added.cache_clear()
    try:
        assert "outsider" in drafters.names()
        assert LLM(tiny("llama"), drafter="outsider").generate(PROMPT, max_new_tokens=3).stats.drafter == "outsider"
    finally:
        drafters.names.cache_clear()
        drafters.added.cache_clear()


def test_prompt_lookup_finds_the_longest_and_latest_match(tiny):
    llm = LLM(tiny("llama"), drafter="pld", candidates=2, length=3)
    session = llm.engine.drafter.begin(None)
    from slipstream.budget import Budget
    from slipstream.drafters.base import Seen

    session.observe(Seen([1, 2, 3, 4, 9, 2, 3, 5, 7, 1, 2], 0))
    tree = session.propose(3, Budget(16, 16)).tree
    # "1 2 3" stood at the start and went on 4 9 2; "2 3" in the middle and went on 5 7 1
    paths = {tuple(tree.tokens[tree.path_to(i)].tolist()) for i in range(len(tree))}
    assert {(3, 4, 9, 2), (3, 5, 7, 1)} <= paths
    assert tree.score[tree.child(0, 4)] > tree.score[tree.child(0, 5)]
    assert session.propose(60, Budget(16, 16)).tree.tokens.tolist() == [60]
    assert np.all(session.propose(3, Budget(2, 16)).tree.parents == [-1, 0, 1])


# ---- states of prompts


class Watcher(Drafter):
    """Reads states, drafts nothing, and notes whether it was given states of each prompt."""

    layers = (1,)
    resting = 0

    def __init__(self, target):
        super().__init__(target, None, None)
        self.given = []

    def begin(self, request):  # noqa: ARG002
        return WatcherSession(self)


class WatcherSession(DraftSession):
    def __init__(self, drafter):
        self.drafter = drafter

    def observe(self, seen):
        if len(seen.tokens) > 1:  # a prompt
            self.drafter.given.append(bool(seen.hidden))

    def propose(self, root, budget):  # noqa: ARG002
        return Proposal(TokenTree.root(root))


@pytest.mark.parametrize("resting", [0, 5])
def test_under_load_a_drafter_that_rests_gets_no_states_of_prompts(llm, resting):
    llm.engine.drafter = drafter = Watcher(llm.target)
    drafter.resting = resting
    runs = [llm.engine.run(llm.requests([i, *PROMPT], max_new_tokens=5, ignore_eos=True)) for i in range(5, 10)]
    for run in runs:
        next(run)
    assert drafter.given == [True] * 4 + [not resting]
    assert [len(list(run)[-1].tokens) for run in runs] == [5] * 5
