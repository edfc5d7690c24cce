"""The cases of bench/fuzz.py: one per seed, with the model, the drafter, the requests and how they are made."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any

from fuzz_lab import CONTEXT, ORACLE, VARIANTS, VOCABULARY, targets
from slipstream import drafters

WAYS = {"generate": 30, "several": 8, "batch": 22, "stream": 14, "abandoned": 10, "chat": 16}
THREADS = {"threads": 15}
CASES = 1_000_000  # of one run, at most: a case's seed is the run's seed times this, and its number
WORDS = ("ab", "cd", "é", "🙂", "hello", " a", "1", ",", '{"a":1}', "zz", "c", "\n", "ef")
STOPS = ("a", "ab", "b", "é", "🙂", "cé", " a", "fe", "op", "zq", "ab a")
GRAMMARS = (
    {"regex": "[a-d]{2,12}"},
    {"regex": '(ab|cd|é)+"?'},
    {"json_schema": {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}},
)


@dataclass
class Ask:
    """One request: a prompt (tokens, or a turn of a chat as text), its options, and where to break off."""

    prompt: Any
    options: dict[str, Any]
    leave: int | None = None  # pieces after which a stream is left
    cancel: bool = False  # by cancelling it; else by leaving the loop


@dataclass
class Case:
    seed: int
    family: str
    fixed: bool  # steps of fixed shape
    drafter: str
    variant: int
    way: str
    asks: list[Ask] = field(default_factory=list)
    count: int = 1  # answers to each
    system: str | None = None  # of a chat
    behind: list[Ask] = field(default_factory=list)  # asked on the same LLM afterwards

    @property
    def run(self) -> int:
        return self.seed // CASES


def draw(seed: int, threads: bool) -> Case:
    rng = Random(seed)
    family, fixed = rng.choice(targets())
    name = rng.choice([*drafters.names(), ORACLE])
    ways = WAYS | (THREADS if threads else {})
    (way,) = rng.choices([*ways], [*ways.values()])
    case = Case(seed, family, fixed, name, rng.randrange(VARIANTS), way)
    if way == "chat":
        case.system = rng.choice([None, "ab", "be é"])
        case.asks = [Ask(words(rng, 5), options(rng)) for _ in range(rng.randint(2, 4))]
        for ask in case.asks:
            if rng.random() < 0.35:
                leave(rng, ask)
        return case
    count = {"batch": rng.randint(2, 6), "threads": rng.randint(2, 4)}.get(way, 1)
    shared = options(rng)
    case.asks = [Ask(prompt(rng), shared if way == "batch" else options(rng)) for _ in range(count)]
    if way == "batch":
        if rng.random() < 0.3:  # the same prompt twice: the second is a fork of the first
            case.asks[-1].prompt = case.asks[0].prompt
        if rng.random() < 0.5:  # a seed for each
            for ask in case.asks:
                ask.options = ask.options | {"seed": rng.randrange(1 << 32)}
    if way == "several":
        case.count = rng.randint(2, 4)
    if way == "abandoned":
        leave(rng, case.asks[0])
    if way == "abandoned" or (way != "threads" and rng.random() < 0.4):  # somebody asks behind it
        case.behind = [Ask(prompt(rng), options(rng))]
    return case


def leave(rng: Random, ask: Ask) -> None:
    ask.leave, ask.cancel = rng.randint(1, 6), rng.random() < 0.5


def words(rng: Random, most: int) -> str:
    return "".join(rng.choice(WORDS) for _ in range(rng.randint(1, most)))


def prompt(rng: Random) -> list[int]:
    """Random, of few different tokens, repeating, one that the store answers, or about as long as the context."""
    length = rng.choice([1, 2, 5, 12, 20, 30, 45, 47, 48, 49, 60, 97, 140, 300])
    if rng.random() < 0.04:
        length = CONTEXT - rng.choice([0, 1, 2, 3, 8, 20])
    kind = rng.choice(["random", "few", "repeating", "repeating", "answered"])
    if kind == "answered":
        return [rng.randint(4, 7)]
    tokens = range(3, VOCABULARY) if kind == "random" else [rng.randint(0, VOCABULARY - 1) for _ in range(4)]
    if kind == "repeating":
        phrase = [rng.randint(3, VOCABULARY - 1) for _ in range(rng.randint(1, 9))]
        return (phrase * length)[:length]
    return [rng.choice(tokens) for _ in range(length)]


def some(rng: Random, share: float, **values: Any) -> dict[str, Any]:
    return values if rng.random() < share else {}


def options(rng: Random) -> dict[str, Any]:
    """Of one request."""
    tokens = [rng.randint(3, VOCABULARY - 1) for _ in range(5)]
    o: dict[str, Any] = {"max_new_tokens": rng.choice([1, 2, 3, 7, 12, 16, 24, 40]), "seed": rng.randrange(1 << 32)}
    if rng.random() < 0.55:
        o["temperature"] = rng.choice([0.3, 0.8, 1.0, 1.5])
        o |= some(rng, 0.4, top_k=rng.choice([1, 2, 5, 40, 100]))
        o |= some(rng, 0.4, top_p=rng.choice([0.3, 0.9, 0.95]))
        o |= some(rng, 0.2, min_p=rng.choice([0.02, 0.2]))
    o |= some(rng, 0.25, repetition_penalty=rng.choice([0.7, 1.1, 1.5]))
    o |= some(rng, 0.15, presence_penalty=rng.choice([-0.5, 0.4, 1.0]))
    o |= some(rng, 0.15, frequency_penalty=rng.choice([-0.3, 0.2, 0.8]))
    o |= some(rng, 0.12, logit_bias={t: rng.choice([-100.0, -2.0, 1.5, 5.0]) for t in tokens[:3]})
    o |= some(rng, 0.06, logit_bias={t: 30.0 for t in (0, tokens[0])})  # a text of two tokens alone
    o |= some(rng, 0.12, bad_words=[[tokens[0]], tokens[1:3], tokens[2:5]][: rng.randint(1, 3)])
    o |= some(rng, 0.15, stop=rng.sample(STOPS, rng.randint(1, 2)))
    o |= some(rng, 0.10, stop_tokens=tokens[3:])
    o |= some(rng, 0.40, ignore_eos=True)
    o |= some(rng, 0.15, logprobs=rng.choice([0, 1, 5]))
    o |= some(rng, 0.60, max_draft=rng.choice([0, 1, 2, 3, 7, 8, 16, 31, 40, 64]))
    o |= some(rng, 0.12, accept="rejection")
    o |= some(rng, 0.02, accept=rng.choice(["typical", "lenient"]))
    o |= some(rng, 0.03, **rng.choice(GRAMMARS))
    o |= some(rng, 0.10, collection="other")
    return o


def predicted(rng: Random, answer: list[int]) -> list[int]:
    """An answer that is known beforehand, more or less."""
    edited = list(answer)
    for _ in range(rng.randint(0, 3)):
        place = rng.randint(0, len(edited))
        edited[place : place + rng.randint(0, 4)] = [rng.randrange(VOCABULARY) for _ in range(rng.randint(0, 4))]
    return edited
