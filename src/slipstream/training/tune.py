"""tune: from a model alone to a head that `auto` asks for it.

The model writes prompts, unless some are given, and answers them; a head is trained on the answers. Then the head is
tried on prompts that it has not seen, against plain decoding and against `auto` without it, and registered if it pays.
All of that lies in one folder, so that an interrupted run goes on in whichever phase it was:

    prompts.jsonl   what was asked, one question a line
    answers.jsonl   as `collect` writes it
    head/           as `train` writes it
    tuned.json      what the plan was, what each phase took, and what came of it
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, islice
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from slipstream.errors import OptionError
from slipstream.evaluate.workloads import builtin
from slipstream.heads.base import Lender
from slipstream.heads.registry import add, heads_for
from slipstream.llm import LLM
from slipstream.training import checkpoint
from slipstream.training.collect import CollectSettings, collect, has_template
from slipstream.training.loop import TrainingPlan, Watch
from slipstream.training.prompts import Question
from slipstream.training.recipes import find
from slipstream.training.train import Lesson, train
from slipstream.user_files import write_text

# Of the time. Answers are what a head learns from, but each is read many times; the trial must tell a tenth from noise.
ANSWERING, TRAINING, TRYING = 0.4, 0.45, 0.15
DRAWN = 64  # prompts that the model writes at a time
HELD_OUT = 10  # every so many-th prompt is for the trial
WORDS = 4  # in a row: a prompt most of whose runs were there before is much the same
MARK = "\N{OBJECT REPLACEMENT CHARACTER}"

Tell = Callable[[str], None]


@dataclass(frozen=True)
class TuneSettings:
    minutes: float = 20.0
    head: str = "eagle3"
    max_new_tokens: int = 256  # of an answer
    seed: int = 0

    def __post_init__(self) -> None:
        find(self.head)
        for name in ("minutes", "max_new_tokens"):
            if not getattr(self, name) > 0:
                raise OptionError(f"{name}={getattr(self, name)} is out of range: it must be more than 0")


@dataclass
class Trial:
    """Seconds per token of one prompt, by contestant."""

    kind: str  # own: a prompt like those it was trained on; builtin
    seconds: dict[str, float]
    same: bool  # whether all said the same


@dataclass
class Tuned:
    """What is known of a run so far."""

    settings: TuneSettings
    model: str
    spent: dict[str, float] = field(default_factory=dict)  # seconds by phase
    prompts: int = 0
    accuracy: list[float] = field(default_factory=list)
    trials: list[Trial] = field(default_factory=list)
    registered: bool | None = None  # None: not decided yet

    def gain(self, over: str) -> float:
        """How many times as fast `auto` with the head is: a geometric mean over the prompts."""
        return float(np.exp(np.mean(self._logs(over)))) if self.trials else 0.0

    def at_least(self, over: str) -> float:
        """The lower end of the 95% interval of that: four prompts on a busy machine prove little."""
        logs = self._logs(over)
        if not logs:
            return 0.0
        means = np.random.default_rng(0).choice(logs, (2000, len(logs))).mean(1)
        return float(np.exp(np.quantile(means, 0.025)))

    def _logs(self, over: str) -> list[float]:
        return [float(np.log(t.seconds[over] / t.seconds["with"])) for t in self.trials]

    def save(self, folder: Path) -> None:
        write_text(folder / "tuned.json", json.dumps(asdict(self), indent=1))

    @classmethod
    def open(cls, folder: Path, settings: TuneSettings, model: str) -> Tuned:
        """As it was left; refused if it was begun for something else."""
        try:
            known = json.loads((folder / "tuned.json").read_text(encoding="utf-8"))
            found = cls(
                **{
                    **known,
                    "settings": TuneSettings(**known["settings"]),
                    "trials": [Trial(**t) for t in known["trials"]],
                }
            )
        except FileNotFoundError:
            return cls(settings, model)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise OptionError(f"{folder / 'tuned.json'} can't be read: {error}. Name another folder") from error
        if (replace(found.settings, minutes=settings.minutes), found.model) != (settings, model):
            raise OptionError(
                f"{folder} holds a run for {found.model} with {found.settings}, not for {model} with {settings}: go on "
                "with the same, or name another folder"
            )
        found.settings = settings  # more minutes may be given
        return found


def tune(
    model: Any,
    tokenizer: Any,
    folder: Path,
    settings: TuneSettings,
    given: Sequence[Question] = (),
    tell: Tell = lambda _: None,
    watch: Watch | None = None,
) -> Tuned:
    """given: prompts; without any the model writes them. tell: is told in words how far it is; watch: the training."""
    if tokenizer is None:
        raise OptionError("tune needs the model's tokenizer: it writes and reads prompts as text")
    folder.mkdir(parents=True, exist_ok=True)
    run = Tuned.open(folder, settings, Lender.of(model).name)
    if not run.accuracy:
        with LLM(model, tokenizer, "none", max_batch=batch_of(model)) as llm:
            answer(llm, folder, run, given, tell)
        learn(model, folder, run, tell, watch)
    if run.registered is None:
        attempt(model, tokenizer, folder, run, tell)
        run.registered = run.at_least("without") > 1 and run.gain("plain") > 1
        if run.registered:
            add(folder / "head", model)
        run.save(folder)
    return run


def batch_of(model: Any) -> int:
    """Answers at a time: on a CPU rows cost."""
    return 8 if model.device.type == "cpu" else 32


# ---- prompts and answers


def answer(llm: LLM, folder: Path, run: Tuned, given: Sequence[Question], tell: Tell) -> None:
    """Prompts are written, or taken, and answered, until its share of the time is over."""
    file, out = folder / "prompts.jsonl", folder / "answers.jsonl"
    collecting = CollectSettings(run.settings.max_new_tokens, seed=run.settings.seed)
    asked = read_prompts(file)
    known = {question.id for question in asked}
    ready = given or [Question(p.turns[:1]) for p in builtin()[::2]]
    source: Iterator[Question] = iter(q for q in ready if q.id not in known)
    if not given:
        source = chain(source, write_prompts(llm, asked, run.settings.seed))
    at_most = 60 * ANSWERING * run.settings.minutes
    while True:
        clock = perf_counter()
        found = collect(llm, split(asked)[0], out, collecting)  # the first time: those that an earlier run left
        run.prompts = len(asked)
        run.spent["answering"] = run.spent.get("answering", 0.0) + perf_counter() - clock
        run.save(folder)
        part = min(1.0, run.spent["answering"] / at_most)
        if asked:
            tell(f"answering: {len(asked):,} prompts, {found.tokens:,} tokens more, {part:.0%} of its time")
        if asked and part >= 1:
            return
        clock = perf_counter()
        new = [q for q in islice(source, llm.engine.max_batch) if q.id not in known]
        run.spent["answering"] += perf_counter() - clock
        if not new and not asked:
            raise OptionError(
                "no prompts: the model wrote none that end, and none were given. Name some with --prompts"
            )
        if not new:  # there are no more
            return
        append(file, new)
        asked += new
        known.update(question.id for question in new)


def write_prompts(llm: LLM, known: Sequence[Question], seed: int) -> Iterator[Question]:
    """What the model expects users to say: it goes on where its template lets the user speak, or after its first token
    where it has no template. Near-duplicates are left out; it ends when nearly all are."""
    opening, seen, barren = user_opening(llm), set[str](), 0
    for question in known:
        is_new(question.turns[0], seen)
    draw = len(known)
    while barren < 4:
        results = llm.generate(opening, n=DRAWN, seed=seed + draw, temperature=1.0, top_p=0.95, max_new_tokens=96)
        draw += 1 + DRAWN
        ended = [r.text.strip() for r in results if r.finish_reason == "stop" or not has_template(llm)]
        new = [text for text in ended if len(text.split()) >= 3 and is_new(text, seen)]
        barren = 0 if len(new) > DRAWN // 16 else barren + 1
        yield from (Question((text,)) for text in new)


def user_opening(llm: LLM) -> list[int]:
    """The tokens after which a user speaks."""
    if has_template(llm):
        text = llm.tokenizer.apply_chat_template([{"role": "user", "content": MARK}], tokenize=False)
        return list(llm.tokenizer(text[: text.index(MARK)], add_special_tokens=False)["input_ids"])
    first = llm.tokenizer.bos_token_id
    return [llm.tokenizer.eos_token_id if first is None else first]


def is_new(text: str, seen: set[str]) -> bool:
    """Whether half or more of its runs of words are new. They are seen then."""
    words = text.lower().split()
    runs = {" ".join(words[i : i + WORDS]) for i in range(max(1, len(words) - WORDS + 1))}
    fresh = 2 * len(runs - seen) >= len(runs) and bool(runs - seen)
    seen |= runs
    return fresh


def split(asked: Sequence[Question]) -> tuple[list[Question], list[Question]]:
    """Those to learn from, and those for the trial."""
    learnt = [q for i, q in enumerate(asked) if (i + 1) % HELD_OUT]
    return learnt, [q for i, q in enumerate(asked) if not (i + 1) % HELD_OUT]


def read_prompts(file: Path) -> list[Question]:
    """What a killed run left of its last line is left out."""
    try:
        lines = file.read_text(encoding="utf-8").split("\n")[:-1]
    except FileNotFoundError:
        return []
    return [Question(tuple(json.loads(line)["turns"]), json.loads(line)["system"]) for line in lines]


def append(file: Path, questions: Iterable[Question]) -> None:
    with file.open("a", encoding="utf-8") as out:
        for question in questions:
            out.write(json.dumps(asdict(question), ensure_ascii=False) + "\n")


# ---- the head


def learn(model: Any, folder: Path, run: Tuned, tell: Tell, watch: Watch | None) -> None:
    tell("training")
    clock, place = perf_counter(), folder / "head"
    plan = TrainingPlan(
        minutes=TRAINING * run.settings.minutes, rate=find(run.settings.head).rate, seed=run.settings.seed
    )
    going = (place / checkpoint.NAME).is_file()
    if place.exists() and not going:  # killed before its first checkpoint: nothing was learnt
        shutil.rmtree(place)
    done = train(model, [folder / "answers.jsonl"], place, Lesson(run.settings.head), plan, resume=going, watch=watch)
    run.accuracy = done.accuracy
    run.spent["training"] = run.spent.get("training", 0.0) + perf_counter() - clock
    run.save(folder)


def attempt(model: Any, tokenizer: Any, folder: Path, run: Tuned, tell: Tell) -> None:
    """Plain decoding, `auto` as it is and `auto` with the head take turns on prompts that it has not seen."""
    own = [("own", q) for q in split(read_prompts(folder / "prompts.jsonl"))[1]]
    others = [("builtin", Question(p.turns[:1])) for p in builtin()[1::2]]
    asked = [each for pair in zip(own, others, strict=False) for each in pair] or others
    known = [str(path) for _, path in heads_for(model)]
    makes: dict[str, dict[str, Any]] = {
        "plain": {"drafter": "none"},
        "without": {"drafter": "auto"},
        "with": {"drafter": "auto", "heads": [*known, str(folder / "head")]},
    }
    llms = {name: LLM(model, tokenizer, **options) for name, options in makes.items()}
    clock, at_most = perf_counter(), 60 * TRYING * run.settings.minutes
    for kind, question in asked:
        prompt: Any = question.turns[0]
        if has_template(llms["plain"]):
            prompt = [{"role": "user", "content": prompt}]
        taken, texts = dict[str, float](), []
        for name, llm in llms.items():
            result = llm.generate(prompt, max_new_tokens=64)
            taken[name] = (result.stats.seconds - result.stats.first_token_seconds) / max(1, len(result.tokens) - 1)
            texts.append(result.tokens)
        run.trials.append(Trial(kind, taken, all(text == texts[0] for text in texts)))
        gained = f"{run.gain('plain'):.2f} × plain, {run.gain('without'):.2f} × auto before"
        tell(f"trying: {len(run.trials)} prompts, {gained}")
        if len(run.trials) >= 4 and perf_counter() - clock > at_most:
            break
    run.spent["trying"] = perf_counter() - clock
    for llm in llms.values():
        llm.close()
