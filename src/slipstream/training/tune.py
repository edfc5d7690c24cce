"""tune: train a head for a model, with no data but the model itself, and register it for `auto`.

The model writes prompts, unless some are given, and answers them; a head is trained on the answers. Then it is compared
with plain decoding and with `auto` without it, on held-out prompts, and registered if it is faster than both. All files
are in one folder, so that an interrupted run can continue in any phase:

    prompts.jsonl   the prompts, one per line
    answers.jsonl   as `collect` writes it, or from a datastore that `--learn` filled
    held.jsonl      in the second case: answers for the trial
    head/           as `train` writes it
    tuned.json      the plan, the time of each phase, and the results
    tune.html       the same as a page with charts, written whenever the run stops
"""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from time import perf_counter
from typing import Any

from slipstream.answers import Result
from slipstream.errors import ContextError, DrafterError, OptionError
from slipstream.evaluate.workloads import builtin
from slipstream.heads.base import Lender
from slipstream.heads.check import check_head
from slipstream.heads.registry import add, entries_for, heads_for, remove
from slipstream.llm import LLM
from slipstream.stopwatch import preparing
from slipstream.text import Prompt
from slipstream.training import checkpoint
from slipstream.training.collect import CollectSettings, collect, has_template
from slipstream.training.estimate import (
    ANSWERING,
    LEAST_TRIALS,
    TRAINING,
    TRYING,
    Costs,
    Estimate,
    Given,
    check,
    ending,
    estimate,
    measure_answers,
    measure_steps,
)
from slipstream.training.learned import ANSWERS, count_tokens, openings, take_answers
from slipstream.training.loop import TrainingPlan, Watch, pause
from slipstream.training.own_prompts import append, read_prompts, split, write_prompts
from slipstream.training.prompts import Question
from slipstream.training.recipes import find, name_sizes
from slipstream.training.train import Lesson, start_from, train
from slipstream.training.tune_page import write_page
from slipstream.training.tuned import OWN, Trial, Tuned, TuneSettings
from slipstream.user_files import held

LINES, LOOKS = 40, 12  # about how many losses and accuracies a run logs: enough for a readable curve
ROUNDS = 5  # times that the trial answers each prompt at most, while it has time: others may use the machine too
AGAIN = 6  # times that an answer of the trial is given at most until nothing is captured during it
LOG, EVALUATE = 20, 50  # steps between them, at most: few texts are held out, so an evaluation costs little

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Work:
    """What every phase needs."""

    model: Any
    tokenizer: Any
    folder: Path
    run: Tuned
    given: Sequence[Question]  # prompts; if there are none, the model writes them
    tell: Tell
    memory: float

    @property
    def head(self) -> Path:
        return self.folder / "head"

    @property
    def training_begun(self) -> bool:
        return (self.head / checkpoint.NAME).is_file()

    @property
    def first_questions(self) -> Sequence[Question]:
        """The given questions; if there are none, every other built-in one. The others are for the trial."""
        return self.given or [Question(prompt.turns[:1]) for prompt in builtin()[::2]]

    @property
    def batch(self) -> int:
        """Answers at a time. Fewer on a CPU, where every row of a step takes time, but not so few that a step's first
        row is most of it."""
        return 16 if self.model.device.type == "cpu" else 128

    def open_llm(self, drafter: str, beside: int = 0, of: int = 1, **options: Any) -> LLM:
        """beside: how many are open already, of those that share the memory."""
        each = self.memory / of
        return LLM(self.model, self.tokenizer, drafter, memory=each / (1 - beside * each), **options)

    def save(self) -> None:
        self.run.save(self.folder)

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Add the time of a block to a phase, even if it is interrupted."""
        clock = perf_counter()
        try:
            yield
        finally:
            self.run.spent[phase] = self.run.spent.get(phase, 0.0) + perf_counter() - clock


def tune(
    model: Any,
    tokenizer: Any,
    folder: Path,
    settings: TuneSettings,
    given: Sequence[Question] = (),
    tell: Tell = lambda _: None,
    watch: Watch | None = None,
    costs: Costs | None = None,
    memory: float = 0.9,
) -> Tuned:
    """given: prompts; if there are none, the model writes them. tell: called with messages about progress. watch:
    called after each step of training. costs: of this machine; None: measure them. memory: the share of a GPU's free
    memory for texts."""
    if tokenizer is None:
        raise OptionError("tune needs the model's tokenizer: it writes and reads prompts as text")
    folder.mkdir(parents=True, exist_ok=True)
    with held(folder):
        run = Tuned.open(folder, settings, Lender.of(model).name)
        remaining_phases(Work(model, tokenizer, folder, run, given, tell, memory), watch, costs)
    return run


def remaining_phases(work: Work, watch: Watch | None, costs: Costs | None) -> None:
    run, model, settings = work.run, work.model, work.run.settings
    if run.registered is not None:
        work.tell("this run is finished: here is what it found. To train another head, name another folder with --out")
    if not run.accuracy:  # refuse impossible settings before anything is saved
        if settings.start is not None:
            start_from(settings.start, model, Lesson(settings.head), settings.sizes)
        if settings.store is not None:
            take_from_store(work)
        if run.plan is None:
            with work.timed("preparing"):
                run.plan = make_estimate(work, costs)
    try:
        if not run.accuracy:
            # Once training has begun, no texts are added, even if more minutes were given.
            if settings.store is None and not work.training_begun:
                with work.timed("preparing"):
                    llm = work.open_llm("none", max_batch=work.batch)
                with llm:
                    answer(work, llm)
            learn(work, watch)
        if run.registered is None:
            run_trial(work)
            register_if_faster(work)
    finally:  # also if interrupted, to show how far it came
        work.save()
        write_page(run, model, work.folder)


def register_if_faster(work: Work) -> None:
    """Register the head if it is faster beyond noise. It replaces the head that training started from."""
    run, model, old = work.run, work.model, work.run.settings.start
    faster = run.at_least("without") > 1 and run.gain("plain") > 1
    if faster:
        add(work.head, model)
        if old is not None and str(Path(old).resolve()) in {entry.folder for entry in entries_for(model)}:
            remove(old)
    run.registered = faster


def planned(run: Tuned) -> Estimate:
    assert run.plan is not None  # `tune` has made one
    return run.plan


def make_estimate(work: Work, costs: Costs | None) -> Estimate:
    """Estimate what fits into the time, and report it; raise if that is too little for a useful head."""
    settings, model, batch = work.run.settings, work.model, work.batch
    work.tell("measuring what fits into the time")
    ready = work.first_questions
    with work.open_llm("none", max_batch=batch) as llm:
        answers = costs or measure_answers(llm, batch)
        if settings.store is not None:
            begin = Given(texts=work.run.prompts, tokens=count_tokens(work.folder))
        else:
            turns = sum(len(question.turns) for question in ready) / max(1, len(ready))
            ends = ending(llm, ready[:batch])
            begin = Given(prompts=len(work.given) or None, builtin=len(ready), turns=turns or 1.0, ending=ends)
    sizes = name_sizes(settings.head, settings.sizes)
    costs = costs or measure_steps(answers, model, settings.head, settings.start, sizes)
    working = settings.minutes * settings.share
    found = estimate(costs, working, begin, settings.max_new_tokens, model.device.type == "cpu")
    check(found, working, str(model.device), settings.share)
    work.tell(found.in_words(settings.minutes))
    return found


# ---- prompts and answers


def take_from_store(work: Work) -> None:
    """Take the answers that a datastore holds when the run begins."""
    if (work.folder / ANSWERS).exists():
        return
    store, collection = Path(str(work.run.settings.store)), work.run.settings.collection
    work.run.prompts = take_answers(store, collection, work.model, work.tokenizer, work.folder)
    work.tell(f"{work.run.prompts:,} answers from {store}")
    work.save()


def answer(work: Work, llm: LLM) -> None:
    """Write or take prompts and answer them, until the time of this phase is used up."""
    run, file = work.run, work.folder / "prompts.jsonl"
    collecting = CollectSettings(planned(run).max_new_tokens, seed=run.settings.seed)
    asked = read_prompts(file)
    known = {question.id for question in asked}
    source: Iterator[Question] = iter(q for q in work.first_questions if q.id not in known)
    if not work.given:
        source = chain(source, write_prompts(llm, asked, run.settings.seed))
    at_most = 60 * ANSWERING * run.settings.minutes
    while True:
        before = run.spent.get("answering", 0.0)
        with work.timed("answering"):
            # In the first turn: prompts that an interrupted run has not answered.
            clock = perf_counter()
            found = collect(llm, split(asked)[0], work.folder / ANSWERS, collecting)
            pause(perf_counter() - clock, run.settings.share)
        run.prompts = len(asked)
        work.save()
        part = min(1.0, run.spent["answering"] / at_most)
        if asked:
            work.tell(f"answering: {len(asked):,} prompts, {found.tokens:,} tokens more, {part:.0%} of its time")
        # Another round like this one would end nearer to the planned time, or further from it.
        if asked and run.spent["answering"] + (run.spent["answering"] - before) / 2 >= at_most:
            return
        with work.timed("answering"):
            clock = perf_counter()
            new = [q for q in islice(source, llm.engine.max_batch) if q.id not in known]
            pause(perf_counter() - clock, run.settings.share)
        if not new and not asked:
            raise OptionError(
                "no prompts: the model wrote none that end, and none were given. Name some with --prompts"
            )
        if not new:  # there are no more
            return
        append(file, new)
        asked += new
        known.update(question.id for question in new)


# ---- the head


def learn(work: Work, watch: Watch | None) -> None:
    run, going = work.run, work.training_begun
    work.tell("training")
    # What answering took too long is training's loss, what it left is its gain.
    left = (ANSWERING + TRAINING) * run.settings.minutes
    left -= (run.spent.get("preparing", 0.0) + run.spent.get("answering", 0.0)) / 60
    plan = TrainingPlan(
        minutes=max(left, TRAINING * run.settings.minutes / 2),
        rate=find(run.settings.head).rate,
        seed=run.settings.seed,
        share=run.settings.share,
        batch_tokens=planned(run).batch_tokens,
        log_every=max(1, min(LOG, planned(run).steps // LINES)),
        eval_every=max(1, min(EVALUATE, planned(run).steps // LOOKS)),
        save_every=max(1, planned(run).steps // LOOKS),  # a run that is killed goes on from there
    )
    if work.head.exists() and not going:  # killed before its first checkpoint: start training anew
        shutil.rmtree(work.head)
    lesson, sizes = Lesson(run.settings.head), name_sizes(run.settings.head, run.settings.sizes)
    data, start = [work.folder / ANSWERS], run.settings.start
    with work.timed("training"):
        done = train(work.model, data, work.head, lesson, plan, sizes, start=start, resume=going, watch=watch)
    run.accuracy = done.accuracy
    work.save()


def run_trial(work: Work) -> None:
    """The trial: plain decoding, `auto` as it was and `auto` with the head, in turns, on held-out prompts."""
    run = work.run
    run.trials = []  # drop those of an interrupted run, in which `auto` had learnt other things
    takes: dict[int, list[Trial]] = defaultdict(list)  # by prompt
    with ExitStack() as opened:
        clock, at_most = perf_counter(), 60 * TRYING * run.settings.minutes
        with work.timed("trying"):
            options = contestants(work)
            llms = {
                name: opened.enter_context(work.open_llm(**own, beside=i, of=len(options)))
                for i, (name, own) in enumerate(options.items())
            }
            asked = trial_prompts(work.folder, run, has_template(llms["plain"]))
            for number, (kind, prompt) in [*enumerate(asked)] * ROUNDS:
                try:
                    began = perf_counter()
                    found = compare(llms, kind, prompt)
                    pause(perf_counter() - began, run.settings.share)
                except ContextError:  # longer than the model's context
                    continue
                if min(found.tokens.values()) < 2:  # nothing was decoded after the first token: there is no speed
                    continue
                takes[number].append(found)
                run.trials = [Trial.typical(each) for each in takes.values()]
                gained = f"{run.gain('plain'):.2f} × plain, {run.gain('without'):.2f} × auto before"
                work.tell(f"trying: {len(run.trials)} prompts, {gained}")
                if len(run.trials) >= LEAST_TRIALS and perf_counter() - clock > at_most:
                    break


def contestants(work: Work) -> dict[str, dict[str, Any]]:
    """Options of an LLM for each. If training started from a head, `without` has that head, `with` the new one. As in
    `auto`, registered heads that can't be read are left out."""
    known, old = list[str](), work.run.settings.start
    for _, path in heads_for(work.model):
        try:
            check_head(path)
            known.append(str(path))
        except DrafterError as error:
            work.tell(f"the trial does without {path}: {error}")
    others = [path for path in known if old is None or Path(path) != Path(old).resolve()]
    before = known if old is None else [*others, old]
    return {
        "plain": {"drafter": "none"},
        "without": {"drafter": "auto", "heads": before},
        "with": {"drafter": "auto", "heads": [*others, str(work.head)]},
    }


def trial_prompts(folder: Path, run: Tuned, template: bool) -> list[tuple[str, Prompt]]:
    """Pairs of kind and prompt: own and built-in ones alternate. Where there are few of one kind, there are more of
    the other, so that there are at least as many as built-in ones for the trial."""

    def asked(said: str) -> Prompt:
        return [{"role": "user", "content": said}] if template else said

    own: list[tuple[str, Prompt]]
    if run.settings.store is not None:
        own = [(OWN, tokens) for tokens in openings(folder)]
    else:
        own = [(OWN, asked(q.turns[0])) for q in split(read_prompts(folder / "prompts.jsonl"))[1]]
    others = [(p.category, asked(p.turns[0])) for p in builtin()[1::2]]
    both = min(len(own), len(others))
    pairs = [each for pair in zip(own[:both], others[:both], strict=True) for each in pair]
    return pairs + (own[both:] + others[both:])[: max(0, len(others) - len(pairs))]


def settled(answer: Callable[[], Result]) -> Result:
    """The answer, given again if something was captured or compiled meanwhile: on a GPU one capture takes longer than
    the answer."""
    for _ in range(AGAIN):
        before, found = preparing.seconds, answer()
        if preparing.seconds == before:
            break
    return found


def compare(llms: dict[str, LLM], kind: str, prompt: Prompt) -> Trial:
    """Answer one prompt with every contestant."""
    results = {name: settled(partial(llm.generate, prompt, max_new_tokens=64)) for name, llm in llms.items()}
    texts = [result.tokens for result in results.values()]
    stats = {name: result.stats for name, result in results.items()}
    return Trial(
        kind,
        seconds={n: (s.seconds - s.first_token_seconds) / max(1, s.new_tokens - 1) for n, s in stats.items()},
        same=all(text == texts[0] for text in texts),
        tokens={name: s.new_tokens for name, s in stats.items()},
        steps={name: s.steps for name, s in stats.items()},
    )
