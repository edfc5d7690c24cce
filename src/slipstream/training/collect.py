"""collect: the target answers prompts, in batches, and its answers are saved as token ids to train on.

One JSON line per conversation, written when its last answer is complete:
    id       of the question, a hash of its content
    tokens   all token ids, including the chat template's
    answers  [begin, end) ranges of the tokens that the target wrote
    text     the answers as text
    model, sampling   the target, and how it was sampled
A stopped run is resumed with the questions that have no line yet; an incomplete last line is dropped.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from slipstream.answers import result
from slipstream.errors import ContextError, OptionError, PromptError
from slipstream.llm import LLM
from slipstream.request import Request
from slipstream.sequence import Sequence as Running
from slipstream.sequence import check_prompt
from slipstream.targets.base import shared
from slipstream.text import Prompt
from slipstream.training.prompts import Question
from slipstream.user_files import held
from slipstream.workers import Workers, results

Progress = Callable[[int, int, int], None]  # conversations done, of how many, tokens written
PORTION = 64  # conversations per job of a worker: several batches, so that free places in a batch are filled


@dataclass(frozen=True)
class CollectSettings:
    """How answers are sampled: the same for all lines of a file."""

    max_new_tokens: int = 512
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


@dataclass(frozen=True)
class Collected:
    conversations: int  # answered by this run
    tokens: int  # written by this run
    known: int  # in the file already
    too_long: int  # conversations whose first turn does not fit into the model's context


def collect(
    llm: LLM, questions: Sequence[Question], out: Path, settings: CollectSettings, progress: Progress | None = None
) -> Collected:
    """Answer the questions that have no line in `out` yet, and append to it, `max_batch` of the LLM at a time."""
    return _collect(llm.name, partial(converse, llm, settings=settings), questions, out, settings, progress)


def collect_shared(
    workers: Workers,
    questions: Sequence[Question],
    out: Path,
    settings: CollectSettings,
    progress: Progress | None = None,
    portion: int = PORTION,
) -> Collected:
    """Like `collect`, by workers that have loaded an LLM: each answers a portion of the questions at a time. The lines
    are the same, in another order."""
    name = workers.submit(_name).result()

    def answered(left: Sequence[Question]) -> Iterator[Talk]:
        jobs = ((left[i : i + portion], settings) for i in range(0, len(left), portion))
        for talks in results(workers, _answer, jobs):
            yield from talks

    return _collect(name, answered, questions, out, settings, progress)


def _name(llm: LLM) -> str:
    return llm.name


def _answer(llm: LLM, job: tuple[Sequence[Question], CollectSettings]) -> list[Talk]:
    return list(converse(llm, *job))


def _collect(
    model: str,
    answered: Callable[[Sequence[Question]], Iterable[Talk]],
    questions: Sequence[Question],
    out: Path,
    settings: CollectSettings,
    progress: Progress | None,
) -> Collected:
    """answered: runs the given conversations, and yields each when it has ended."""
    done = tokens = too_long = 0
    with out.open("a", encoding="utf-8") as file, held(out):
        known = resume(out, model, settings)
        left = [q for q in questions if q.id not in known]
        for talk in answered(left):
            if talk.answers:
                file.write(json.dumps(talk.line(model, settings), ensure_ascii=False) + "\n")
                file.flush()
                done, tokens = done + 1, tokens + talk.written
            else:
                too_long += 1
            if progress is not None:
                progress(len(questions) - len(left) + done + too_long, len(questions), tokens)
    return Collected(done, tokens, len(questions) - len(left), too_long)


BEGIN = b'{"id": "'  # of each line


def resume(out: Path, model: str, settings: CollectSettings) -> set[str]:
    """The ids in the file. An incomplete last line, from a killed run, is cut off."""
    if not out.exists():
        return set()
    ids: set[str] = set()
    whole = 0  # bytes of complete lines
    with out.open("rb+") as file:
        for number, line in enumerate(file, 1):
            cut_off = not line.endswith(b"\n")
            try:
                record = json.loads(line)
                name, *made = record["id"], record["model"], record["sampling"]
            except (ValueError, TypeError, KeyError) as error:
                if cut_off and isinstance(error, ValueError) and (whole or line.startswith(BEGIN[: len(line)])):
                    break
                raise OptionError(
                    f"{out}, line {number} was not written by `slipstream collect`: name another file with --out"
                ) from error
            if made != [model, asdict(settings)]:
                raise OptionError(
                    f"{out}, line {number} was written by {made[0]} with {made[1]}, not by {model} with "
                    f"{asdict(settings)}: go on with the same, or name another file with --out"
                )
            if cut_off:  # by one character
                break
            ids.add(name)
            whole += len(line)
        file.truncate(whole)
    return ids


@dataclass
class Talk:
    """One conversation in progress."""

    question: Question
    messages: list[dict[str, str]]
    tokens: list[int] = field(default_factory=list)
    answers: list[tuple[int, int]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    written: int = 0

    def ask(self, llm: LLM, settings: CollectSettings) -> Request | None:
        """The request for the next answer; None if there is no further turn, or no room for it in the context."""
        turns = self.question.turns if has_template(llm) else self.question.turns[:1]
        if len(self.texts) == len(turns):
            return None
        turn = turns[len(self.texts)]
        self.messages.append({"role": "user", "content": turn})
        prompt: Prompt = self.messages if has_template(llm) else turn
        # Each conversation has its own seed. With one seed, all would have the same noise at each position.
        digest = hashlib.sha256(f"{settings.seed} {self.question.id}".encode()).digest()
        request = llm.request(
            prompt,
            max_new_tokens=settings.max_new_tokens,
            temperature=settings.temperature,
            top_p=settings.top_p,
            seed=int.from_bytes(digest[:4], "big"),
            max_draft=0,
        )
        try:
            check_prompt(request, llm.target)
        except ContextError:
            return None
        return request

    def take(self, ended: Running) -> None:
        """Record an answer.

        A later turn's prompt contains the earlier answers as rendered from text by the template. Where its tokens
        differ from those that the target wrote (templates may leave out reasoning, and a text may have several
        tokenizations), those no longer count.
        """
        answer, asked = result(ended), ended.request.tokens
        same = shared(self.tokens, asked)
        self.answers = [(begin, min(end, same)) for begin, end in self.answers if begin < same]
        self.answers.append((len(asked), len(asked) + len(answer.tokens)))
        self.tokens = asked + answer.tokens
        self.texts.append(answer.text)
        self.messages.append({"role": "assistant", "content": answer.text})
        self.written += len(answer.tokens)

    def line(self, model: str, settings: CollectSettings) -> dict[str, Any]:
        return {
            "id": self.question.id,
            "tokens": self.tokens,
            "answers": self.answers,
            "text": "\n\n".join(self.texts),
            "model": model,
            "sampling": asdict(settings),
        }


def converse(llm: LLM, questions: Sequence[Question], settings: CollectSettings) -> Iterator[Talk]:
    """Run all conversations, `max_batch` of the LLM at a time, and yield each when it has ended. A free place is filled
    at once, by the next turn of the same conversation or by the next conversation."""
    left = deque(questions)
    waiting = deque[Request]()  # the engine takes them from here
    held: dict[int, Talk] = {}  # by their request
    over: list[Talk] = []

    def go_on(talk: Talk) -> None:
        request = talk.ask(llm, settings)
        if request is None:
            over.append(talk)
        else:
            held[id(request)] = talk
            waiting.appendleft(request)

    def fill() -> None:
        while left and len(held) < llm.engine.max_batch:
            go_on(begin(llm, left.popleft()))

    fill()
    for sequence in llm.engine.run(waiting):
        if sequence.finish is not None:
            talk = held.pop(id(sequence.request))
            talk.take(sequence)
            go_on(talk)
            fill()
        yield from over
        over.clear()
    yield from over


def begin(llm: LLM, question: Question) -> Talk:
    if question.system and not has_template(llm):
        raise PromptError(f"{llm.name} has no chat template, so a system message has no place: leave it out")
    return Talk(question, [{"role": "system", "content": question.system}] if question.system else [])


def has_template(llm: LLM) -> bool:
    """Whether there is a chat template. Without one, a model continues the first turn as text."""
    return bool(getattr(llm.tokenizer, "chat_template", None))
