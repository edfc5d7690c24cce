"""Run one benchmark, from options to document. An interrupted run keeps its measurements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from slipstream import drafters
from slipstream.drafters._capabilities import layers
from slipstream.errors import OptionError
from slipstream.evaluate.contestants import ALONE, PEERS, Contestant, Decoding, Ours, Peer
from slipstream.evaluate.measure import Item, MeasuredRun, measure, prepare
from slipstream.evaluate.metrics import Row, summarise
from slipstream.evaluate.replay import Recording, Replayed, record
from slipstream.evaluate.report import document, provenance
from slipstream.evaluate.workloads import Prompt
from slipstream.heads import HEADS
from slipstream.llm import LLM
from slipstream.targets import load_model

DEFAULT = ("none", "auto", "pld", "hf", "hf-pld")
Progress = Callable[[str, int, int], None]  # stage, done, of


@dataclass(frozen=True)
class BenchPlan:
    """What to measure."""

    prompts: Sequence[Prompt]
    contestants: Sequence[str] = DEFAULT
    drafter_options: dict[str, dict[str, Any]] = field(default_factory=dict)  # by contestant
    decoding: Decoding = field(default_factory=Decoding)
    repeats: int = 3
    batch: int = 1  # items answered together

    def __post_init__(self) -> None:
        if not self.prompts:
            raise OptionError("there is nothing to measure: no prompts were selected")
        if self.repeats < 1 or self.batch < 1:
            raise OptionError(f"repeats={self.repeats}, batch={self.batch}: both must be at least 1")
        if len(set(self.contestants)) != len(self.contestants):
            raise OptionError(f"each contestant runs once, found {', '.join(self.contestants)}")
        if not self.contestants:
            raise OptionError("there is nothing to measure: no contestants were named")
        known = (*drafters.names(), *PEERS)
        if unknown := [name for name in self.contestants if name.partition(" ")[0] not in known]:
            raise OptionError(f"no contestant is called {', '.join(unknown)}: there are {', '.join(known)}")
        if self.batch > 1 and (alone := [name for name in self.contestants if name in ALONE]):
            raise OptionError(f"{', '.join(alone)} answers one prompt at a time: leave it out of batches")


def benchmark(
    plan: BenchPlan,
    model: Any,
    tokenizer: Any,
    progress: Progress,
    draft_model: Any = None,
    options: dict[str, Any] | None = None,
) -> tuple[list[Row], dict[str, Any]]:
    """Measure. After Ctrl-C there is still a report; its document says what is missing."""
    plain = Ours("none", LLM(model, tokenizer, "none"))
    contestants = [_contestant(name, plan, plain, draft_model) for name in plan.contestants]
    items: list[Item] = []
    runs: list[MeasuredRun] = []
    turns = sum(len(p.turns) for p in plan.prompts)
    total = turns * len(contestants) * plan.repeats
    missing = None
    try:
        for item in prepare(plain, plan.prompts, plan.decoding):
            items.append(item)
            progress("asking plainly", len(items), turns)
        for run in measure(contestants, items, plan.decoding, plan.repeats, plan.batch):
            runs.append(run)
            progress("measuring", len(runs), total)
    except KeyboardInterrupt:
        missing = f"interrupted after {len(runs)} of {total} answers"
    rows = summarise(runs)
    about = provenance(plain.llm.name, plain.llm.target)
    return rows, document(
        rows, about, plain.llm.target.device, plan.decoding, len(items), plan.repeats, options or {}, missing
    )


def make_recording(plan: BenchPlan, model: Any, tokenizer: Any, progress: Progress) -> Recording:
    """Answer all prompts plainly and record the answers, with the hidden states that the plan's drafters need."""
    plain = Ours("none", LLM(model, tokenizer, "none"))
    turns = sum(len(p.turns) for p in plan.prompts)
    items: list[Item] = []
    for item in prepare(plain, plan.prompts, plan.decoding):
        items.append(item)
        progress("recording", len(items), turns)
    target = plain.llm.target
    heads = [
        drafters.make(n, target, tokenizer, **plan.drafter_options.get(n, {})) for n in plan.contestants if n in HEADS
    ]
    wanted = {layer for head in heads for layer in layers(head)}  # depends on the head's files
    return record(plain.llm.target, plain.llm.name, items, plan.decoding, sorted(wanted))


def replay(
    recording: Recording,
    names: Sequence[str],
    drafter_options: dict[str, dict[str, Any]],
    progress: Progress,
    repeats: int,
) -> tuple[list[Row], dict[str, Any]]:
    """Replay drafters against a recording, and measure what they would have had accepted and how long it would take.
    After Ctrl-C there is still a report; its document says what is missing."""
    if peers := [name for name in names if name in PEERS]:
        raise OptionError(f"{', '.join(peers)} can't be replayed: only drafters of this engine can")
    if not names:
        raise OptionError("there is nothing to replay: name drafters of this engine")
    contestants = [Replayed(name, recording, **drafter_options.get(name, {})) for name in names]
    total = len(recording.items) * len(contestants) * repeats
    runs: list[MeasuredRun] = []
    missing = None
    try:
        for run in measure(contestants, recording.items, recording.decoding, repeats):
            runs.append(run)
            progress("replaying", len(runs), total)
    except KeyboardInterrupt:
        missing = f"interrupted after {len(runs)} of {total} answers"
    rows = summarise(runs)
    target = contestants[0].target
    about = {**provenance(recording.model, target), "replayed": True}
    return rows, document(rows, about, target.device, recording.decoding, len(recording.items), repeats, {}, missing)


def _contestant(name: str, plan: BenchPlan, plain: Ours, draft_model: Any) -> Contestant:
    if name == "none":
        return plain
    if name in PEERS:
        return Peer(name, plain.llm.model, draft_model)
    drafter, _, _ = name.partition(" ")  # contestants of a sweep have names like "pld length=4"
    options = dict(plan.drafter_options.get(name, {}))
    if drafter == "model":
        options.setdefault("draft_model", draft_model)
        options.setdefault("draft_tokenizer", plain.llm.tokenizer)
    return Ours(name, LLM(plain.llm.model, plain.llm.tokenizer, drafter, **options))


def load_draft(name: str | None, dtype: str | None, device: str | None) -> Any:
    return load_model(name, dtype=dtype, device=device)[0] if name else None
