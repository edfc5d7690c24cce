"""`auto` on recorded texts, with the simulated clocks of several machines: python bench/budget.py PARTS --work FILE

PARTS: some of

record  plain decoding answers the prompts, and each shipped head drafts at every position of its answers
priors  acceptance in these recordings becomes the prior: budget/priors.json
play    `auto` and single drafters go through these texts. Drafts are real; steps and drafts take the times of a machine
        in MACHINES, without captures

This shows within seconds which drafters `auto` asks and what a change of the budget gains, where a measurement takes an
hour or a GPU. Simplifications: heads have read all of their text, and a machine's times don't vary.

For each machine, a line per contestant and the state of `auto`'s sources go to stderr; one JSON line last.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from gpu import known_of, tell
from slipstream import LLM, drafters, engine, stopwatch
from slipstream.budget import Budget
from slipstream.budget import calibration as calibration_module
from slipstream.budget.calibration import BINS, DEPTHS, PRIOR, Calibration
from slipstream.budget.costs import Costs
from slipstream.drafters import auto
from slipstream.drafters._head import SMALL
from slipstream.drafters.base import Drafter, DraftSession, Hidden, Proposal, Seen
from slipstream.engine import Engine
from slipstream.evaluate.contestants import Decoding, Ours
from slipstream.evaluate.measure import Item, prepare
from slipstream.evaluate.replay import Recited, Recording, ReplayTarget
from slipstream.evaluate.replay import record as recording_of
from slipstream.evaluate.workloads import builtin, read, select
from slipstream.request import Request
from slipstream.sampling import Sampler
from slipstream.targets import Scores, Slot, Want, load_model
from slipstream.tree import TokenTree

NOISE = 0.04  # of a time's logarithm
WARM = 2  # texts that everybody goes through beforehand


@dataclass(frozen=True)
class Machine:
    """Seconds, as measured for the embedded model; with AMX those of small drafts in proportion to whole ones."""

    steps: dict[int, float]  # by rows
    drafts: dict[str, float]
    reading: dict[str, float]  # of each token of a prompt, the first time that a head is asked about it
    # Of drafts that were started behind the step before: what the device takes from the step's end on, and the host.
    behind: dict[str, tuple[float, float]] = field(default_factory=dict)
    small: dict[str, float] = field(default_factory=dict)  # of drafts of two nodes, where these take less
    joint: float = 1e-4  # what `auto` takes to make something of drafts
    host: float = 1e-4  # and what everybody does behind a step, unless the next one is under way by then
    padded: bool = False
    singles: Sequence[str] = ()  # to compare with


MACHINES = {
    "two CPU cores, float32": Machine(
        {1: 0.0325, 2: 0.0365, 4: 0.048, 8: 0.060, 16: 0.064, 32: 0.080, 64: 0.124},
        {"suffix": 5e-5, "pld": 4e-5, "eagle3": 0.018, "redrafter": 0.016},
        {"eagle3": 1.2e-4},
        small={"eagle3": 0.0045, "redrafter": 0.0037},
        singles=("suffix:1", "pld:2", "eagle3:2"),
    ),
    "two CPU cores without AMX, float32": Machine(
        {1: 0.0625, 2: 0.0668, 3: 0.0689, 4: 0.114, 6: 0.12, 8: 0.136, 12: 0.158, 16: 0.212, 32: 0.244, 64: 0.248},
        {"suffix": 1.2e-4, "pld": 8e-5, "eagle3": 0.045, "redrafter": 0.044},
        {"eagle3": 1.2e-4},
        small={"eagle3": 0.011, "redrafter": 0.009},
        joint=2e-4,
        host=4e-4,
        singles=("suffix:2", "pld:2", "eagle3:2"),
    ),
    "two CPU cores, bfloat16": Machine(
        {1: 0.033, 2: 0.038, 4: 0.039, 8: 0.040, 16: 0.043, 32: 0.054, 64: 0.064},
        {"suffix": 5e-5, "pld": 4e-5, "eagle3": 0.013, "redrafter": 0.011},
        {"eagle3": 5e-5},
        small={"eagle3": 0.0033, "redrafter": 0.0028},
        singles=("suffix:15", "pld:7", "eagle3:15"),
    ),
    "H200": Machine(
        {1: 7.6e-4, 8: 8e-4, 16: 8.5e-4, 32: 9.8e-4, 64: 1.3e-3, 128: 1.7e-3},
        {"suffix": 3e-5, "pld": 3e-5, "eagle3": 3.5e-4, "redrafter": 3e-4},
        {"eagle3": 2e-6},
        {"eagle3": (1.8e-4, 9e-5), "redrafter": (1.4e-4, 9e-5)},
        joint=8e-5,
        host=5e-5,
        padded=True,
        singles=("suffix:15", "pld:15", "eagle3:15"),
    ),
    "H200, a model of 0.5B": Machine(
        {1: 8.6e-4, 8: 9.2e-4, 16: 1e-3, 32: 1.24e-3, 64: 1.5e-3, 128: 2.1e-3},
        {"suffix": 6e-5, "pld": 7e-5, "eagle3": 4e-4, "redrafter": 3.5e-4},
        {"eagle3": 2e-6},
        {"eagle3": (2e-4, 9e-5), "redrafter": (1.6e-4, 9e-5)},
        joint=1e-4,
        host=1.2e-4,
        padded=True,
        singles=("suffix:15", "pld:7"),
    ),
    "H200, slow host": Machine(
        {1: 7.8e-4, 8: 8.2e-4, 16: 8.9e-4, 32: 1.02e-3, 64: 1.3e-3, 128: 1.7e-3},
        {"suffix": 5e-5, "pld": 4e-5, "eagle3": 5.8e-4, "redrafter": 4.9e-4},
        {"eagle3": 3e-6},
        {"eagle3": (1.8e-4, 1.6e-4), "redrafter": (1.4e-4, 1.6e-4)},
        joint=1.2e-4,
        host=6e-5,
        padded=True,
        singles=("suffix:15", "pld:15", "eagle3:15"),
    ),
}
HEADS = ("eagle3", "redrafter")


@dataclass(frozen=True)
class Text:
    """A prompt, its answer, and each head's draft after every token of that: tokens, parents and probabilities."""

    category: str
    prompt: list[int]
    answer: list[int]
    drafts: dict[str, list[tuple[list[int], list[int], list[float]]]]


# ---- recording


def record(given: argparse.Namespace) -> None:
    model, tokenizer = load_model(given.model, dtype=given.dtype)
    plain = Ours("none", LLM(model, tokenizer, "none"))
    asked = [p for file in given.prompts for p in select(read(file), None, given.limit)]
    asked = [replace(p, turns=p.turns[:1]) for p in asked or select(builtin(), None, given.limit)]
    decoding = Decoding(max_new_tokens=given.tokens)
    items = []
    for item in prepare(plain, asked, decoding):
        items.append(item)
        tell(f"answered {len(items)} of {len(asked)}")
    shipped = HEADS if given.model is None else ()
    heads = {name: LLM(model, tokenizer, name).engine.drafter.layers for name in shipped}
    layers = sorted({layer for own in heads.values() for layer in own})
    whole = recording_of(plain.llm.target, plain.llm.name, items, decoding, layers)
    with given.work.open("w", encoding="utf-8") as file:
        for number, item in enumerate(items):
            drafts = {name: list(drafted(whole, number, name, model, tokenizer)) for name in heads}
            file.write(json.dumps([item.category, item.tokens, item.plain, drafts]) + "\n")
            tell(f"drafted {number + 1} of {len(items)}")


def drafted(
    whole: Recording, number: int, name: str, model: Any, tokenizer: Any
) -> Iterator[tuple[list[int], list[int], list[float]]]:
    target = ReplayTarget(whole, model)
    item = target.play(number)
    head = drafters.make(name, target, tokenizer)
    session = head.begin(Request(item.tokens, len(item.plain)))
    text, read_ = item.tokens + item.plain, len(item.tokens)
    states = {layer: whole.hidden[f"{number}.{layer}"] for layer in head.layers}
    session.observe(Seen(item.tokens, 0, Hidden({layer: h[:read_] for layer, h in states.items()})))
    for at in range(read_, len(text) - 1):
        tree = session.propose(text[at], Budget(31, 31)).tree
        yield tree.tokens.tolist(), tree.parents.tolist(), [1.0, *tree.raw[1:, 0].tolist()]
        session.keep()
        session.observe(Seen([text[at]], at, Hidden({layer: h[at : at + 1] for layer, h in states.items()})))


# ---- priors


def priors(given: argparse.Namespace) -> None:
    """By drafter, depth and bin: how often nodes were right; where few were seen, nearly what they say."""
    names = ("suffix", "pld", *HEADS)
    right, seen = np.zeros((2, len(names), DEPTHS, BINS))
    for text in texts_of(given):
        for i, name in enumerate(names):
            for place, tree in enumerate(drafts_of(text, name)):
                calibration = Calibration([name])
                calibration.bins[:] = 0.0
                calibration.learn(tree, text.answer[place + 1 :])
                found = calibration.bins[0]
                seen[i] += found[..., 1]
                right[i] += found[..., 0] * found[..., 1]
    said = (np.arange(BINS) + 0.5) / BINS
    believed = (right + PRIOR * said) / (seen + PRIOR)
    file = Path(calibration_module.__file__).with_name("priors.json")
    file.write_text(json.dumps(dict(zip(names, np.round(believed, 3).tolist(), strict=True))) + "\n")
    tell(f"{seen.sum():.0f} labels: {file}")


def drafts_of(text: Text, name: str) -> Iterator[TokenTree]:
    """What a drafter says after every token of an answer."""
    if name in HEADS:
        for tokens, parents, p in text.drafts[name]:
            yield TokenTree.build(tokens, parents, source=name, raw=p)
        return
    target = Player([text], MACHINES["H200"], Clock())
    session = drafters.make(name, target, None).begin(Request(text.prompt, len(text.answer)))
    session.observe(Seen(text.prompt, 0))
    for place, token in enumerate(text.answer[:-1]):
        yield session.propose(token, Budget(31, 31)).tree
        session.observe(Seen([token], len(text.prompt) + place))


# ---- playing


@dataclass
class Clock:
    now: float = 0.0
    noise: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def __call__(self) -> float:
        return self.now

    def pass_by(self, seconds: float) -> None:
        self.now += seconds * float(np.exp(self.noise.normal(0, NOISE)))


class Player(ReplayTarget):
    """Recites, in the time that the machine takes."""

    def __init__(self, texts: Sequence[Text], machine: Machine, clock: Clock) -> None:
        items = [Item(str(i), text.category, text.prompt, text.answer) for i, text in enumerate(texts)]
        super().__init__(Recording(items, machine.steps, Decoding(), 1 << 18, 1 << 20, "", {}, machine.padded))
        self.machine, self.clock = machine, clock
        self.ends = 0.0  # when the step under way does
        self.busy = 0.0  # until when the device drafts
        self.texts, self.text = texts, texts[0]
        self.widths = tuple(machine.steps) if machine.padded else ()

    def play(self, number: int) -> Item:
        self.text = self.texts[number]
        return super().play(number)

    def score(self, slots: Sequence[Slot], trees: Sequence[TokenTree], want: Want, known: int = 0) -> list[Scores]:
        begun = self.clock.now
        self.clock.pass_by(self._recording.seconds(max(map(len, trees))))
        if want.during is not None and self.machine.behind:
            self.ends, self.clock.now = self.clock.now, begun
            want.during(None)
            self.clock.now = max(self.ends, self.clock.now)
        return super().score(slots, trees, want, known)

    def chooses(self, sampler: Sampler | None) -> bool:  # noqa: ARG002
        return self.machine.padded  # captured steps do


class RecordedHead(Drafter):
    """Says what a head said."""

    generates = True

    def __init__(self, target: Player, name: str) -> None:
        super().__init__(target, None, None)
        self.name = name
        if name in target.machine.small:
            self.sizes = (SMALL,)

    def begin(self, request: Request) -> DraftSession:  # noqa: ARG002
        return RecordedSession(self)

    def draft_ahead(self, sessions: Mapping[int, DraftSession], step: Any) -> None:  # noqa: ARG002
        target, (mine,) = cast(Any, self.target), cast(Mapping[int, RecordedSession], sessions).values()
        target.busy = max(target.busy, target.ends) + target.machine.behind[self.name][0]
        mine.ready = target.busy


class RecordedSession(DraftSession):
    def __init__(self, head: RecordedHead) -> None:
        self.head, self.target = head, head.target
        self.read, self.caught_up = 0, False
        self.ready: float | None = None  # when the draft that was started behind the last step is there

    def observe(self, seen: Seen) -> None:
        self.read = seen.position + len(seen.tokens)

    @property
    def unstarted(self) -> bool:
        target: Any = self.target
        return bool(target.machine.behind) and self.ready is None

    def keep(self) -> None:
        """If nobody wanted it, the next step waits for it."""
        self.wait()

    def wait(self) -> None:
        target: Any = self.target
        target.clock.now = max(target.clock.now, self.ready or 0.0)
        self.ready = None

    def propose(self, root: int, budget: Budget) -> Proposal:
        target: Any = self.target
        text, name = target.text, self.head.name
        if not self.caught_up:
            target.clock.pass_by(target.machine.reading.get(name, 0.0) * len(text.prompt))
            self.caught_up = True
        if self.ready is None:
            machine = target.machine
            few = budget.nodes <= SMALL and name in machine.small
            target.clock.pass_by((machine.small if few else machine.drafts)[name])
        else:
            self.wait()
            target.clock.pass_by(target.machine.behind[name][1])
        at = self.read - len(text.prompt)
        if not 0 <= at < len(text.drafts[name]):
            return Proposal(TokenTree.root(root))
        tokens, parents, p = text.drafts[name][at]
        return Proposal(budget.limit(TokenTree.build(tokens, parents, source=name, raw=p)))


class PlayedAuto(auto.AutoDrafter):
    def make_parts(self) -> dict[str, Drafter]:
        target: Any = self.target
        own = {name: drafters.make(name, target, None) for name in ("suffix", "prediction")}
        parts = {name: timed(part, target.clock, target.machine.drafts.get(name, 0.0)) for name, part in own.items()}
        heads = {name: RecordedHead(target, name) for name in target.texts[0].drafts}
        return {"suffix": parts["suffix"], **heads, **parts}


def contestant(name: str, texts: Sequence[Text], machine: Machine, clock: Clock) -> Engine:
    target = Player(texts, machine, clock)
    drafter: Any
    if name in HEADS:
        drafter = RecordedHead(target, name)
    elif name == "auto":
        drafter = PlayedAuto(target, None, auto.AutoOptions())
        timed(drafter.pilot, clock, machine.joint, "choose")
    else:
        drafter = timed(drafters.make(name, target, None), clock, machine.drafts.get(name, 0.0))
    return timed(Engine(target, drafter, name), clock, machine.host, "_observe")  # left out where the next step runs


def timed(whose: Any, clock: Clock, seconds: float, what: str = "propose") -> Any:
    """Whose drafts, or something else, take so long."""
    inner = getattr(whose, what)

    def passing(*given: Any) -> Any:
        clock.pass_by(seconds)
        return inner(*given)

    setattr(whose, what, passing)
    return whose


def answer(runner: Any, number: int, nodes: int) -> float:
    """Seconds behind the first token."""
    item, emitted = runner.target.play(number), list[int]()

    def stop(token: int) -> str | None:
        emitted.append(token)
        return "stop" if len(emitted) == len(item.plain) else None

    request = Request(item.tokens, len(item.plain) + 1, accept=Recited(), stop=stop, max_draft=nodes)
    *_, sequence = runner.run([request])
    return float(sequence.stats.seconds - sequence.stats.first_token_seconds)


def texts_of(given: argparse.Namespace) -> list[Text]:
    return [Text(*json.loads(line)) for line in given.work.read_text(encoding="utf-8").splitlines()]


def play(given: argparse.Namespace) -> dict[str, Any]:
    texts = texts_of(given)
    report: dict[str, Any] = {"benchmark": "budget", "texts": len(texts)}
    for label in given.machines or MACHINES:
        machine = MACHINES[label]
        taken: dict[str, np.ndarray] = {}
        tell(label)
        there = [name for name in machine.singles if name.partition(":")[0] in {"suffix", "pld", *texts[0].drafts}]
        for name in ("none", "auto", *there):
            clock = Clock()
            engine.perf_counter = stopwatch.perf_counter = clock  # type: ignore[assignment, attr-defined]
            auto.costs_of = lambda target: Costs(target.machine.steps, target.machine.padded)  # type: ignore[assignment, attr-defined]
            drafter, _, nodes = name.partition(":")
            runner, most = contestant(drafter, texts, machine, clock), int(nodes or (31 if machine.padded else 16))
            for number in range(min(WARM, len(texts))):
                answer(runner, number, most)
            rounds = given.rounds if name == "auto" else 1
            taken[name] = np.median([[answer(runner, i, most) for i in range(len(texts))] for _ in range(rounds)], 0)
            if name != "none":
                report.setdefault(label, {})[name] = shown(name, taken["none"], taken[name], texts)
            if name == "auto":
                for source in runner.drafter.pilot.sources().values():  # type: ignore[attr-defined]
                    tell(f"      {known_of(source)}")
    return report


def shown(name: str, plain: np.ndarray, spent: np.ndarray, texts: Sequence[Text]) -> dict[str, float]:
    kinds = np.array([text.category for text in texts])
    by_kind = {kind: plain[kinds == kind].sum() / spent[kinds == kind].sum() for kind in dict.fromkeys(kinds.tolist())}
    lowest = min(by_kind, key=lambda kind: by_kind[kind])
    tell(f"  {name:12} {plain.sum() / spent.sum():.3f} × plain, lowest {by_kind[lowest]:.2f} ({lowest})")
    return {"all": round(plain.sum() / spent.sum(), 3), **{kind: round(r, 3) for kind, r in by_kind.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", choices=["record", "priors", "play", []], default=[])
    parser.add_argument("--work", type=Path, required=True, help="the file of recorded texts")
    parser.add_argument("--model", help="default: the embedded one")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--prompts", nargs="*", default=[], help="files; default: the built-in ones")
    parser.add_argument("--limit", type=int, default=26, help="prompts of each file, dealt out to its categories")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--machines", nargs="*", choices=MACHINES, help="default: all")
    parser.add_argument("--rounds", type=int, default=3, help="how often `auto` goes through all texts")
    given = parser.parse_args()
    if "record" in given.parts or not given.work.exists():
        record(given)
    if "priors" in given.parts:
        priors(given)
    if "play" in given.parts or not given.parts:
        print(json.dumps(play(given)))


if __name__ == "__main__":
    main()
