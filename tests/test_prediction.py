"""A prediction is followed, left and found again; and it never changes a text."""

import pytest

from slipstream import LLM
from slipstream.budget import Budget
from slipstream.drafters.base import Seen
from slipstream.drafters.prediction import PredictionSession
from slipstream.errors import OptionError, PromptError
from slipstream.request import Request

PROMPT = [1, 2, 3]
TEXT = list(range(100, 160))  # every token stands in it once
NEW = [7, 8, 9, 10]


class Reader:
    """A text that is said whatever is drafted: what the session proposes at each place, and how much of it is right."""

    def __init__(self, prediction, text, nodes=16, least=0.0):
        """least: the raw score from which on a node is verified."""
        self.text, self.budget, self.least = text, Budget(nodes, nodes), least
        self.session = PredictionSession(Request(PROMPT, len(text), prediction=prediction))
        self.session.observe(Seen(PROMPT, 0))
        self.place = 0  # of the root
        self.steps = []  # (tokens accepted, nodes proposed)
        self.drafted = set()  # places of the text that were

    def step(self):
        tree = self.session.propose(self.text[self.place], self.budget).tree
        tree = tree.prune(tree.score >= self.least)
        node, path = 0, [self.text[self.place]]
        while self.place + len(path) < len(self.text):
            node = tree.child(node, self.text[self.place + len(path)])
            if node is None:
                break
            path.append(self.text[self.place + len(path)])
        self.session.observe(Seen(path, len(PROMPT) + self.place))
        self.drafted |= set(range(self.place + 1, self.place + len(path)))
        self.place += len(path)
        self.steps.append((len(path) - 1, len(tree) - 1))

    def run(self):
        while self.place < len(self.text):
            self.step()
        return [accepted for accepted, _ in self.steps]


def test_a_right_prediction_is_one_long_chain_after_another():
    reader = Reader(TEXT, TEXT)
    assert reader.run() == [16, 16, 16, 8]  # and the bonus token each time
    assert reader.steps[0] == (16, 16)


EDITED = {
    "insertion": (TEXT[:30] + NEW + TEXT[30:], 2),
    "deletion": (TEXT[:30] + TEXT[34:], 1),
    "replacement": (TEXT[:30] + NEW + TEXT[34:], 1),
    "a longer replacement": (TEXT[:30] + NEW + [11, 12] + TEXT[34:], 2),
    "another beginning": ([50, *TEXT[1:]], 0),
    "something before the beginning": ([50, 51, *TEXT], 1),
    "no beginning": (TEXT[5:], 1),
}


@pytest.mark.parametrize("name", EDITED)
def test_the_text_is_found_again_after(name):
    """With the first token after an edit at the latest, if not before: what was said may have been put in or stand for
    as much, which is tried before anything agrees."""
    text, most = EDITED[name]
    reader = Reader(TEXT, text, nodes=40)
    accepted = reader.run()
    edits = len(set(text) - set(TEXT))
    # Every step gives its accepted tokens and one more. Without any edit it takes 2 steps.
    assert len(accepted) <= 2 + edits + most, accepted
    assert sum(accepted) >= len(text) - edits - 2 - most


def test_copies_of_a_paragraph_are_told_apart_by_where_the_text_was():
    copy, marks = list(range(200, 260)), [31, 32, 33, 34, 35, 36]
    prediction = [t for mark in marks for t in [*copy, mark]]
    for number in (1, 4):
        start = number * (len(copy) + 1)
        for edit, back in ((NEW, 10), (NEW, 14), (NEW, 20), ([], 15)):  # put in, exchanged twice, left out
            text = prediction[: start + 10] + edit + prediction[start + back :]
            reader = Reader(prediction, text, nodes=40)
            reader.run()
            assert text.index(marks[number]) in reader.drafted, (number, edit, back)  # what follows this copy alone


def test_tokens_that_agree_by_accident_do_not_move_where_the_text_is_looked_for():
    """A phrase of the edit stands elsewhere too; afterwards the text goes on in one of two copies: the near one."""
    phrase, tail = [21, 22, 23, 24], list(range(300, 360))
    prediction = [*TEXT, 50, 51, 52, *tail, 61, *range(400, 440), *phrase, 53, 54, *tail, 62]
    text = [*TEXT, *phrase, 70, *tail, 61]
    reader = Reader(prediction, text, nodes=30, least=0.7)
    reader.run()
    assert text.index(61) in reader.drafted  # what follows the near copy


def test_while_nothing_agrees_little_is_offered():
    text = TEXT[:20] + list(range(500, 520))
    reader = Reader(TEXT, text, nodes=60)
    reader.run()
    offered = [nodes for _, nodes in reader.steps[1:]]
    assert max(offered[1:]) <= 16  # two places, eight tokens each


def test_behind_the_end_of_a_prediction_nothing_is_offered():
    reader = Reader(TEXT[:10], [*TEXT[:10], 50])
    reader.run()
    tree = PredictionSession(Request(PROMPT, 9, prediction=[])).propose(5, Budget(8, 8)).tree
    assert len(tree) == 1
    assert reader.steps[0] == (9, 9)


def test_a_budget_is_kept():
    for nodes, depth in ((1, 1), (5, 2), (3, 8)):
        session = PredictionSession(Request(PROMPT, 50, prediction=TEXT))
        for root in (100, 7, 8, 130, 131):  # followed, left, come back
            tree = session.propose(root, Budget(nodes, depth)).tree
            assert len(tree) - 1 <= nodes
            assert tree.depth <= depth
            session.observe(Seen([root], len(PROMPT)))


# ---- laws


def variants(tokens):
    """Predictions of a text, from right to wrong."""
    yield tokens
    yield tokens[:20] + tokens[30:]
    yield [*tokens[:20], 3, 4, 5, *tokens[20:]]
    yield [9, *tokens[5:]]
    yield tokens[::-1]
    yield [4]


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["prediction", "auto"])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "seed": 5}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("family", ["llama", "mamba"])
def test_no_prediction_changes_a_text(tiny, drafter, sampling, family):
    length = 60 if family == "llama" else 32  # each token of the other takes a forward of its own, whatever is drafted
    model, options = tiny(family), {"max_new_tokens": length, "ignore_eos": True, **sampling}
    plain = LLM(model, drafter="none").generate(PROMPT, **options)
    llm = LLM(model, drafter=drafter)
    for prediction in variants(plain.tokens):
        result = llm.generate(PROMPT, prediction=prediction, **options)
        assert result.tokens == plain.tokens
    if llm.target.chains:
        right = llm.generate(PROMPT, prediction=plain.tokens, **options)
        assert right.stats.by_source["prediction"]["accepted"] > 0


def test_each_prompt_of_a_batch_has_its_own(tiny):
    prompts, options = [[5, 6, 7], [40], [8, 9]], {"max_new_tokens": 40, "ignore_eos": True}
    plain = LLM(tiny("llama"), drafter="none").generate(prompts, **options)
    llm = LLM(tiny("llama"), drafter="prediction")
    answers = [r.tokens for r in plain]
    results = llm.generate(prompts, prediction=answers, **options)
    assert [r.tokens for r in results] == answers
    assert all(r.stats.steps <= 4 for r in results)
    mixed = LLM(tiny("llama"), drafter="auto").generate(prompts, prediction=[answers[0], None, answers[1]], **options)
    assert [r.tokens for r in mixed] == answers
    with pytest.raises(OptionError, match="2 predictions for 3 prompts"):
        llm.generate(prompts, prediction=["a", "b"])


def test_a_prediction_is_read_like_an_answer(smol):
    request = smol.request("Hello!", prediction="Hello there")
    assert request.prediction == smol.tokenizer("Hello there", add_special_tokens=False)["input_ids"]
    assert request.max_draft == 63
    assert smol.request("Hello!").max_draft == 16
    assert smol.request("Hello!", prediction="Hello there", max_draft=5).max_draft == 5


def test_wishes_that_would_be_ignored_are_refused(tiny):
    llm = LLM(tiny("llama"), drafter="pld")
    with pytest.raises(OptionError, match="makes no use of a prediction"):
        llm.generate(PROMPT, prediction=[1])
    with pytest.raises(OptionError, match="asks no other drafters"):
        llm.generate(PROMPT, drafters="suffix")
    with pytest.raises(OptionError, match="without a tokenizer"):
        llm.generate(PROMPT, prediction="text")
    with pytest.raises(PromptError, match="prediction tokens must lie in"):
        LLM(tiny("llama"), drafter="auto").generate(PROMPT, prediction=[10**6])
