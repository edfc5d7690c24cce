"""The glossary of reports, a sentence or two for each term. The full definitions are in docs/benchmarks.md."""

from __future__ import annotations

import re
from html import escape

NO_SPACES = str.maketrans(" ", "-")  # in an element's id

GLOSSARY = {
    "contestant": "Who answered: a drafter of this engine, or transformers’ own ways (hf, hf-pld, hf-assisted). "
    "none is this engine without drafts: plain decoding.",
    "answers": "How many answers the row is made of: questions times repeats.",
    "tokens": "Tokens that those answers have together.",
    "tokens/s": "Tokens per second of the whole call, the prompt included: the median over the repeats, "
    "and the slowest and the fastest of them.",
    "speed-up": "Seconds per token of the other contestant divided by this one’s, on the same questions: "
    "2 is twice as fast, below 1 is slower.",
    "95%": "Where the speed-up would lie in 95 of 100 such benchmarks, judged by drawing questions and repeats anew. "
    "After “of” stands how many questions that is from: an interval of two can say little.",
    "tokens per step": "Tokens that one forward of the target gives. Plain decoding has exactly 1.",
    "ms per step": "Milliseconds from one forward of the target to the next, all that belongs to it included.",
    "acceptance": "Accepted drafted tokens divided by the depth of the drafted trees: 1 would be drafts that are "
    "always right to the end.",
    "node yield": "Accepted drafted tokens divided by all nodes verified. A tree can only keep one path, so a wide one "
    "has a low yield.",
    "kept per step": "How many of the drafted tokens the target agreed with. It adds one token of its own to them.",
    "draft": "Milliseconds per step that drafting took.",
    "verify": "Milliseconds per step that the target’s forward took.",
    "host": "Milliseconds per step for deciding, committing and showing the drafter what was accepted.",
    "unaccounted": "Milliseconds per step, and their share, that no clock covers: statistics, streaming, the call. "
    "Below zero, the clocks overlap and together cover more than 100% of the time.",
    "first token": "Milliseconds until the first token is decided, the prompt included: the median over the answers.",
    "same texts": "Answers whose tokens are exactly those of plain decoding, of those compared.",
    # Of a plan.
    "ahead": "How many tokens ahead it drafts, γ: the depth that is fastest.",
    "rows": "Rows that a step computes for a sequence: the last token, and the drafted ones.",
    "α": "The chance that a drafted token is accepted, given that all before it were. One number for all depths.",
    "c": "What a drafted token takes, as a share of a plain step.",
    "operations": "How many times as much is computed per token as in plain decoding.",
    # Of a load.
    "rate": "Requests per second that were offered. They come at random, whatever became of the earlier ones.",
    "sent": "Requests sent, and how many of their prompts had been asked before in this run: a server that keeps what "
    "it answered is faster on those.",
    "answered": "Requests whose answer came to its end.",
    "refused": "Requests that the server told to come again later, with status 429.",
    "failed": "Requests that ended in any other way: another status, a cut connection, an answer that can’t be read.",
    "time to first token": "Milliseconds from when a request was due to the first token of its answer. Waiting counts.",
    "time per token": "Milliseconds per token after the first: of each answer the mean, over the answers p50 and p99.",
    "p50": "Half of the answers were faster, half were slower.",
    "p99": "One answer of a hundred was slower. Of fewer than a hundred answers it is nearly the slowest.",
    "tokens/s in all": "Tokens of all answers, divided by the seconds from the beginning to the last answer’s end.",
    "late": "Milliseconds that requests were sent late, p99: large where this machine, not the server, was too slow.",
}


def term(word: str, shown: str, place: str, at: float = 0) -> str:
    """A term with its explanation as a tooltip. at: where the tooltip begins, in percent."""
    name = f"{place}-{word.translate(NO_SPACES)}"
    return (
        f'<span class="term" tabindex="0" aria-describedby="{name}">{shown}'
        f'<span class="tip" role="tooltip" id="{name}" style="--at: {at:.0f}%">{escape(GLOSSARY[word])}</span></span>'
    )


def explained(text: str, place: str) -> str:
    """Replace [word|as shown] in a text by terms of the glossary. The text must be trusted."""
    return re.sub(r"\[(.+?)\|(.+?)\]", lambda found: term(found[1], found[2], place), text)
