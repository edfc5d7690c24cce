"""Estimate what fits into the given minutes, from a short measurement on this machine.

The measured costs decide how long answers and how large batches may be, and how many of each fit. On a CPU both shrink
until enough fit. If even the minimum does not fit, an error says so at once, with the minutes that would be needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from time import perf_counter
from typing import Any

import numpy as np
import torch

from slipstream.errors import OptionError
from slipstream.heads.base import Lender
from slipstream.llm import LLM
from slipstream.stopwatch import Stopwatch
from slipstream.training.collect import CollectSettings, converse
from slipstream.training.data import Texts
from slipstream.training.loop import Loop, TrainingPlan
from slipstream.training.losses import LABELS, Weights
from slipstream.training.processes import Processes
from slipstream.training.prompts import Question
from slipstream.training.recipes import find
from slipstream.training.teacher import Teacher
from slipstream.training.train import DRAFT_VOCAB, Lesson, make_head, start_from

# Shares of the time. Each answer is trained on many times, so training gets a little more than answering. The trial
# must be able to tell a gain of a tenth from noise.
ANSWERING, TRAINING, TRYING = 0.4, 0.45, 0.15

LENGTHS = (256, 192, 128, 96, 64)  # limits of an answer's tokens: the longest is used for which enough answers fit
BATCHES = (16384, 8192, 4096, 2048, 1024, 512)  # tokens of a batch: the largest is used for which enough steps fit
ON_GPU = 8192  # where all would fit: in equal time, more steps of this size teach more than fewer of the largest
ENOUGH_ANSWERS, ENOUGH_STEPS = 64, 200  # below these, shorter answers or smaller batches are tried
# A judgement, not a measurement: 32 answers within three minutes on two cores gave nothing beyond noise.
LEAST_ANSWERS, LEAST_STEPS, LEAST_TRIALS = 16, 50, 4

PROBE = 32  # tokens of some answers, generated to measure how often they end
ENDING, PRIOR_TOKENS = 0.0025, 200  # prior: the probability that an answer ends at a token, and its weight in tokens
PROMPT = 96  # tokens of a prompt in its template
WRITTEN = 96  # tokens that the model writes per prompt of its own; about half of the prompts are dropped
TRIED = 3 * 64  # tokens generated per prompt of the trial, by three contestants


@dataclass(frozen=True)
class Costs:
    """Measured costs on this machine, in seconds."""

    answering: float  # per token, with a batch of answers at a time
    alone: float  # per token of a single answer
    step: float  # per training step, apart from its tokens
    learning: float  # per token of a training step
    reading: float = 0.0  # per token of a prompt


@dataclass(frozen=True)
class Given:
    """What is known before the run begins."""

    prompts: int | None = None  # None: the model writes them when the built-in ones are used up
    builtin: int = 24
    turns: float = 1.0  # of a prompt
    ending: float = ENDING  # the probability that an answer ends at a token
    texts: int | None = None  # answers taken from a datastore; None: they are generated
    tokens: int = 0  # of these texts


@dataclass(frozen=True)
class Estimate:
    max_new_tokens: int  # of an answer; 0: answers come from a datastore
    batch_tokens: int
    answers: int  # to train on
    steps: int
    trials: int
    needed: float = 0.0  # minutes that the useful minimum needs

    def in_words(self, minutes: float) -> str:
        length = f" of at most {self.max_new_tokens} tokens" if self.max_new_tokens else ""
        return (
            f"in {minutes:g} minutes: about {self.answers:,} answers{length}, {self.steps:,} steps of at most "
            f"{self.batch_tokens:,} tokens, {self.trials} prompts in the trial"
        )


def estimate(costs: Costs, minutes: float, given: Given, max_new_tokens: int | None, small: bool) -> Estimate:
    """max_new_tokens: the user's; None: what fits. small: whether sizes may shrink, as on a CPU."""
    lengths = [max_new_tokens] if max_new_tokens else list(LENGTHS if small else LENGTHS[:1])
    if given.texts is not None:
        lengths = [0]
    batches = BATCHES if small else (ON_GPU,)
    seconds = 60 * minutes
    trainable = seconds * (TRAINING if given.texts is None else ANSWERING + TRAINING)
    length, answers = first_enough(
        [(n, answers_in(costs, seconds * ANSWERING, given, n)) for n in lengths], ENOUGH_ANSWERS
    )
    tokens = given.tokens if given.texts is not None else text_tokens(answers, given, length)
    batch, steps = first_enough([(n, int(trainable / step_seconds(costs, n, tokens))) for n in batches], ENOUGH_STEPS)
    trials = int(seconds * TRYING / (TRIED * costs.alone))
    return Estimate(length, batch, answers, steps, trials, needed(costs, given, lengths[-1], batches[-1]))


def first_enough(found: list[tuple[int, int]], enough: int) -> tuple[int, int]:
    """Of pairs (size, how many fit), the first with enough, else the last."""
    return next((pair for pair in found if pair[1] >= enough), found[-1])


def answers_in(costs: Costs, seconds: float, given: Given, length: int) -> int:
    if given.texts is not None:
        return given.texts
    each = answer_seconds(costs, given, length)
    found = int(seconds / each)
    if given.prompts is not None:
        return min(found, given.prompts)
    if found <= given.builtin:
        return found
    return given.builtin + int((seconds - given.builtin * each) / (each + WRITTEN * costs.answering))


def answer_seconds(costs: Costs, given: Given, length: int) -> float:
    return given.turns * (expected_length(length, given.ending) * costs.answering + PROMPT * costs.reading)


def expected_length(longest: int, ending: float) -> float:
    """Expected tokens of an answer that ends at each token with this probability."""
    return (1 - (1 - ending) ** longest) / ending if ending else float(longest)


def text_tokens(answers: int, given: Given, length: int) -> int:
    """Tokens of so many texts to train on, prompts included."""
    return round(answers * given.turns * (expected_length(length, given.ending) + PROMPT))


def step_seconds(costs: Costs, batch: int, tokens: int) -> float:
    """Seconds of a step. A batch can't have more tokens than there are."""
    return costs.step + costs.learning * max(1, min(batch, tokens))


def needed(costs: Costs, given: Given, length: int, batch: int) -> float:
    """Minutes that the minimum of everything needs."""
    share, tokens, answering = ANSWERING + TRAINING, given.tokens, 0.0
    if given.texts is None:
        share, tokens = TRAINING, text_tokens(LEAST_ANSWERS, given, length)
        answering = LEAST_ANSWERS * answer_seconds(costs, given, length) / ANSWERING
    training = LEAST_STEPS * step_seconds(costs, batch, tokens) / share
    return max(answering, training, LEAST_TRIALS * TRIED * costs.alone / TRYING) / 60


def check(found: Estimate, minutes: float, where: str, share: float = 1.0) -> None:
    """Raise if nothing useful fits into the minutes of work, which are this share of the time."""
    if minutes < found.needed:
        raise OptionError(
            f"{minutes / share:g} minutes are too few for a useful head on {where}: {found.answers} answers, "
            f"{found.steps} steps of training and {found.trials} prompts in the trial fit, at least {LEAST_ANSWERS}, "
            f"{LEAST_STEPS} and {LEAST_TRIALS} are needed. Give --minutes "
            f"{ceil(10 * found.needed / share) / 10:g} or more"
        )


# ---- the measurement


def ending(llm: LLM, questions: Sequence[Question]) -> float:
    """The probability that an answer ends at a token, estimated from the beginnings of some answers."""
    first = [Question(question.turns[:1], question.system) for question in questions]
    written = [talk.written for talk in converse(llm, first, CollectSettings(PROBE))]
    ended = sum(0 < tokens < PROBE for tokens in written)
    return (ended + ENDING * PRIOR_TOKENS) / (sum(written) + PRIOR_TOKENS)


def measure_answers(llm: LLM, batch: int) -> Costs:
    """Measure a few tokens of answers, alone and in a batch."""
    cpu = llm.model.device.type == "cpu"
    vocabulary, new, long = Lender.of(llm.model).vocab_size, 4 if cpu else 16, 64
    prompts = np.random.default_rng(0).integers(0, vocabulary, (batch, long)).tolist()

    def seconds(rows: int, read: int, tokens: int) -> float:
        """The less of two times, without what is compiled or captured meanwhile."""
        found = []
        for _ in range(2):
            watch = Stopwatch()
            llm.generate([prompt[:read] for prompt in prompts[:rows]], max_new_tokens=tokens, ignore_eos=True)
            found.append(watch.seconds())
        return min(found)

    seconds(1, 2, 2)
    if not cpu:  # steps are captured, which takes seconds once
        seconds(batch, 2, new)
    # The first token includes the time of the prompt, so the others are measured as a difference.
    reading = seconds(1, long, 1) / long
    alone = (seconds(1, 2, 1 + new) - seconds(1, 2, 1)) / new
    together = (seconds(batch, 2, 1 + new) - seconds(batch, 2, 1)) / (new * batch)
    return Costs(max(together, 1e-9), max(alone, 1e-9), 0.0, 0.0, reading)


def measure_steps(answers: Costs, model: Any, kind: str, start: str | None, own: dict[str, Any] | None = None) -> Costs:
    """Measure training steps of two sizes as well. own: the head's sizes."""
    low, high = (64, 256) if model.device.type == "cpu" else (1024, ON_GPU)
    fast, slow = step_costs(model, kind, start, (low, high), own)
    learning = max(slow - fast, 0.0) / (high - low) or slow / high
    return replace(answers, step=max(fast - low * learning, 0.0), learning=learning)


def step_costs(
    model: Any, kind: str, start: str | None, sizes: Sequence[int], own: dict[str, Any] | None = None
) -> list[float]:
    """Seconds of a training step on random tokens, for each size in tokens."""
    lesson, recipe = Lesson(kind), find(kind)
    vocabulary, likely = Lender.of(model).vocab_size, DRAFT_VOCAB.get(kind, 0)
    ids = torch.arange(likely) if 0 < likely < vocabulary else None
    head = make_head(model, lesson, 0, own or {}, ids) if start is None else start_from(start, model, lesson, {})
    depths, weights = recipe.depths_for(head), Weights(recipe, lesson.decay, LABELS[recipe.labels])
    teacher, processes = Teacher(model, head), Processes(str(model.device))
    found: list[float] = []
    for size in sizes:
        texts, plan = made_up(size, vocabulary), TrainingPlan(steps=2, batch_tokens=size)
        loop = Loop(head, teacher, weights, depths, texts, texts, plan, processes)
        if not found or model.device.type != "cpu":
            loop.train_step()  # kernels are chosen, memory is taken
        finish(model)
        begun = perf_counter()
        loop.train_step()
        finish(model)
        found.append(perf_counter() - begun)
    return found


def made_up(tokens: int, vocabulary: int, width: int = 64) -> Texts:
    rows = max(1, tokens // width)
    ids = np.random.default_rng(0).integers(0, vocabulary, rows * width).astype(np.int32)
    counted = np.ones((rows, width), bool)
    counted[:, : width // 4] = False  # a prompt
    return Texts(ids, counted.ravel(), np.arange(rows + 1, dtype=np.int64) * width)


def finish(model: Any) -> None:
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
