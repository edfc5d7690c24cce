"""distill: train a draft model on its target's distributions, and compare it with plain decoding.

The draft is given, or made of layers of the target. At the end, the same prompts are answered by plain decoding, with
the draft before training and with the draft after it.

    config.json, model.safetensors, tokenizer files   the draft, for transformers
    log.jsonl                                         the log of training
    distilled.json                                    the results
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from slipstream.drafters.model import check_vocabularies
from slipstream.errors import OptionError
from slipstream.heads.base import Lender
from slipstream.llm import LLM
from slipstream.loading.models import load_model
from slipstream.targets import open_target
from slipstream.training import checkpoint, divergences
from slipstream.training.cutting import cut_out
from slipstream.training.data import Texts, read_texts
from slipstream.training.distill_loop import DistillLoop, OwnTexts
from slipstream.training.loop import TrainingPlan, Watch
from slipstream.training.payoff import MEMORY, Pair, measure_pair
from slipstream.training.processes import Processes
from slipstream.training.teacher import Speaker
from slipstream.training.train import run
from slipstream.training.tune import compare
from slipstream.training.tuned import Trial, gained, interval
from slipstream.user_files import write_text

RATE = 3e-4  # a third of the heads' learning rate, since a draft is trained already
TRIALS = 12  # prompts of the trial at most

Tell = Callable[[str], None]


@dataclass(frozen=True)
class DraftSource:
    """Where the draft comes from: a model, or layers of the target."""

    draft: str | None = None  # a folder or a hub id
    cut: str | None = None
    layers: int | None = None  # with a cut: how many

    def __post_init__(self) -> None:
        if (self.draft is None) == (self.cut is None):
            both = "both were given" if self.draft else "neither was given"
            raise OptionError(f"a draft comes from --draft FOLDER or from --cut first|last|even: {both}")
        if (self.cut is None) != (self.layers is None):
            raise OptionError("--cut and --layers go together: which layers of the target, and how many")

    def open(self, model: Any, tokenizer: Any) -> tuple[Any, Any]:
        """The draft in float32 on the target's device, and its tokenizer."""
        if self.cut is not None and self.layers is not None:
            return cut_out(model, self.cut, self.layers), tokenizer
        draft, own = load_model(self.draft, dtype="float32", device=model.device)
        return draft, own or tokenizer


@dataclass(frozen=True)
class Distillation:
    """The divergence, and the texts to train on."""

    divergence: str = "fkl"
    beta: float | None = None  # of jsd
    on_policy: float = 0.0  # the share of texts that the draft writes itself
    length: int = 1024  # tokens of a text at most
    count_all: bool = False  # also count tokens that the target only read
    any_author: bool = False  # also accept texts that another model wrote

    def __post_init__(self) -> None:
        divergences.find(self.divergence, self.beta)
        if not 0 <= self.on_policy <= 1:
            raise OptionError(f"on_policy={self.on_policy} is out of range: 0 takes the target's texts, 1 the draft's")
        if self.on_policy and self.count_all:
            raise OptionError("--count-all and --on-policy: the draft answers prompts, so prompts can't count as well")


@dataclass(frozen=True)
class Distilled:
    ratio: float  # time of a step of the draft, divided by one of the target
    depth: int  # tokens to draft, chosen by costs and acceptance
    before: dict[str, float]  # accuracy and overlap on held-out texts: acceptance rates, greedy and sampled
    after: dict[str, float]
    trials: list[Trial]  # of plain, before, after
    steps: int
    seconds: float
    parameters: int

    def gain(self, over: str) -> tuple[float, float, float]:
        """The speed-up of decoding with the draft, and its 95% interval."""
        return gained(self.trials, over, "after"), *interval(self.trials, over, "after")

    def tokens_per_step(self, who: str) -> float:
        steps = sum(trial.steps[who] for trial in self.trials)
        return sum(trial.tokens[who] for trial in self.trials) / max(1, steps)


def distill(
    model: Any,
    tokenizer: Any,
    data: Sequence[Path],
    folder: Path,
    source: DraftSource,
    lesson: Distillation,
    plan: TrainingPlan,
    *,
    resume: bool = False,
    force: bool = False,
    pair: Pair | None = None,
    processes: Processes | None = None,
    tell: Tell = lambda _: None,
    watch: Watch | None = None,
) -> Distilled:
    """Train a draft for a transformers model on files that `collect` wrote, into a new folder, in the model's
    precision. force: even if the draft can't pay. pair: costs of steps; None: measure them."""
    processes = processes or Processes(str(model.device))
    checkpoint.check_folder(folder, resume)
    processes.wait()  # the first process creates the folder after all have checked it
    name, vocabulary = Lender.of(model).name, Lender.of(model).vocab_size
    author = None if lesson.any_author else name
    texts, held_out = read_texts(data, vocabulary, author, lesson.length, lesson.count_all)
    draft, own_tokenizer = source.open(model, tokenizer)
    check_vocabularies(open_target(model, graphs=False), tokenizer, open_target(draft, graphs=False), own_tokenizer)
    draft.requires_grad_(True)
    # The finished draft has the target's precision, so costs and acceptance are measured in that.
    before = copy.deepcopy(draft).to(model.dtype)
    pair = pair or measure_pair(model, before)
    tell(f"a step of the draft takes {pair.ratio:.2f} of the target's")
    if not force:
        pair.check()
    own = OwnTexts(draft, own_tokenizer, lesson.on_policy, plan.seed)
    divergence = divergences.find(lesson.divergence, lesson.beta)
    loop = DistillLoop(Speaker(draft), Speaker(model), divergence, own, texts, held_out, plan, processes)
    setup = {
        "model": name,
        "dtype": str(model.dtype),
        "data": texts.fingerprint(),
        **asdict(source),
        **asdict(lesson),
        **plan.fixed(),
        "batches_per_step": processes.count * plan.accumulate,
    }
    first = once(loop.measured())

    def save() -> None:
        save_draft(draft, own_tokenizer, folder, model.dtype)

    try:
        run(loop, folder, setup, save, resume, watch)
    finally:
        own.close()
    last = once(loop.measured())
    depth = pair.best_depth(last["accuracy"])
    trials: list[Trial] = []
    if processes.rank == 0:
        tell("trying it")
        drafts = {"before": (before, pair.best_depth(first["accuracy"])), "after": (draft.to(model.dtype), depth)}
        trials = attempt(model, tokenizer, drafts, prompts(held_out))
    count = sum(p.numel() for p in loop.parameters)
    found = Distilled(pair.ratio, depth, first, last, trials, loop.step, loop.seconds, count)
    if processes.rank == 0:
        write_text(folder / "distilled.json", json.dumps({**setup, **asdict(found)}, indent=1))
        checkpoint.remove(folder)
    processes.wait()
    return found


def once(measured: dict[str, list[float]]) -> dict[str, float]:
    """The results of a draft model, which have one depth only."""
    return {name: values[0] for name, values in measured.items()}


def save_draft(draft: Any, tokenizer: Any, folder: Path, dtype: torch.dtype) -> None:
    """Write the draft as an ordinary folder of transformers."""
    copy.deepcopy(draft).to(dtype).save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def prompts(held_out: Texts) -> list[list[int]]:
    """The tokens before the answers of held-out texts."""
    found = []
    for number in range(min(TRIALS, len(held_out))):
        tokens, counted = held_out.text(number)
        found.append(tokens[: int(counted.argmax())].tolist())
    return found


def attempt(model: Any, tokenizer: Any, drafts: dict[str, tuple[Any, int]], inputs: Sequence[list[int]]) -> list[Trial]:
    """The trial: plain decoding and the drafts, each with its depth, in turns on every prompt."""
    llms = {"plain": LLM(model, tokenizer, "none", memory=MEMORY)}
    for name, (draft, depth) in drafts.items():
        llms[name] = LLM(model, tokenizer, "model", draft_model=draft, depth=depth, memory=MEMORY)
    try:
        compare(llms, "warm", inputs[0])  # warm-up: code is loaded, steps are captured
        trials = [compare(llms, "held out", tokens) for tokens in inputs]
    finally:
        for llm in llms.values():
            llm.close()
    return [trial for trial in trials if min(trial.tokens.values()) > 1]  # with one token there is no speed
