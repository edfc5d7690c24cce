"""The state of a run of `tune`: its settings, the time of each phase, and results. Saved as tuned.json."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.errors import OptionError
from slipstream.training.estimate import Estimate
from slipstream.training.loop import check_share
from slipstream.training.recipes import name_sizes
from slipstream.user_files import write_text

CONTESTANTS = ("plain", "without", "with")  # plain decoding, `auto` without the new head, `auto` with it
OWN = "own"  # the kind of prompts like those it was trained on


@dataclass(frozen=True)
class TuneSettings:
    minutes: float = 20.0
    head: str = "eagle3"
    max_new_tokens: int | None = None  # of an answer; None: as many as the time allows, 256 at most
    seed: int = 0
    store: str | None = None  # a datastore whose answers are trained on; None: generate answers
    collection: str = "default"  # of the store
    start: str | None = None  # a head to start from; None: a new one
    share: float = 1.0  # share of the time that it may use; it pauses for the rest
    sizes: dict[str, Any] = field(default_factory=dict)  # options of `train` for the head's sizes

    def __post_init__(self) -> None:
        name_sizes(self.head, self.sizes)
        for name in ("minutes", "max_new_tokens"):
            if getattr(self, name) is not None and not getattr(self, name) > 0:
                raise OptionError(f"{name}={getattr(self, name)} is out of range: it must be more than 0")
        check_share(self.share)


@dataclass
class Trial:
    """Results of one prompt, by contestant."""

    kind: str  # own: a prompt like those it was trained on; else the category of a built-in one
    seconds: dict[str, float]  # per token
    same: bool  # whether all gave the same answer
    tokens: dict[str, int] = field(default_factory=dict)
    steps: dict[str, int] = field(default_factory=dict)  # forwards of the target

    @classmethod
    def typical(cls, takes: Sequence[Trial]) -> Trial:
        """Several trials with one prompt as one: medians of seconds, sums of tokens and steps."""
        first = takes[0]
        return cls(
            first.kind,
            {who: float(np.median([take.seconds[who] for take in takes])) for who in first.seconds},
            all(take.same for take in takes),
            {who: sum(take.tokens[who] for take in takes) for who in first.tokens},
            {who: sum(take.steps[who] for take in takes) for who in first.steps},
        )


@dataclass
class Tuned:
    """The state of a run."""

    settings: TuneSettings
    model: str
    spent: dict[str, float] = field(default_factory=dict)  # seconds by phase
    prompts: int = 0
    accuracy: list[float] = field(default_factory=list)
    trials: list[Trial] = field(default_factory=list)
    registered: bool | None = None  # None: not decided yet
    plan: Estimate | None = None  # the estimate, and the sizes chosen by it

    def gain(self, over: str, kind: str | None = None) -> float:
        """The speed-up of `auto` with the head: a geometric mean over the prompts (of a kind)."""
        return gained(self._of(kind), over)

    def interval(self, over: str, kind: str | None = None) -> tuple[float, float]:
        """The 95% interval of `gain`."""
        return interval(self._of(kind), over)

    def at_least(self, over: str) -> float:
        """The lower end of `interval`."""
        return self.interval(over)[0]

    def tokens_per_step(self, who: str, kind: str | None = None) -> float | None:
        """None: not measured."""
        trials = [t for t in self._of(kind) if t.steps.get(who)]
        return sum(t.tokens[who] for t in trials) / sum(t.steps[who] for t in trials) if trials else None

    def kinds(self) -> list[str]:
        """The kinds of the prompts in the trial, own ones first."""
        return sorted({t.kind for t in self.trials}, key=lambda kind: (kind != OWN, kind))

    def _of(self, kind: str | None) -> list[Trial]:
        return [t for t in self.trials if kind in (None, t.kind)]

    def save(self, folder: Path) -> None:
        write_text(folder / "tuned.json", json.dumps(asdict(self), indent=1))

    @classmethod
    def open(cls, folder: Path, settings: TuneSettings, model: str) -> Tuned:
        """Load a run, or start a new one. Raise if the folder has a run with other settings."""
        try:
            known = json.loads((folder / "tuned.json").read_text(encoding="utf-8"))
            found = cls(
                **{
                    **known,
                    "settings": TuneSettings(**known["settings"]),
                    "trials": [Trial(**t) for t in known["trials"]],
                    "plan": Estimate(**known["plan"]) if known.get("plan") else None,
                }
            )
        except FileNotFoundError:
            return cls(settings, model)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise OptionError(f"{folder / 'tuned.json'} can't be read: {error}. Name another folder") from error
        if (replace(found.settings, minutes=settings.minutes, share=settings.share), found.model) != (settings, model):
            raise OptionError(
                f"{folder} holds a run for {found.model} with {found.settings}, not for {model} with {settings}: go on "
                "with the same, or name another folder"
            )
        found.settings = settings  # minutes and share may differ
        return found


def gained(trials: Sequence[Trial], over: str, who: str = "with") -> float:
    """The speed-up of one contestant over another."""
    return float(np.exp(np.mean(_logs(trials, over, who)))) if trials else 0.0


def interval(trials: Sequence[Trial], over: str, who: str = "with") -> tuple[float, float]:
    """The 95% interval of `gained`, by bootstrap over prompts."""
    if not trials:
        return 0.0, 0.0
    logs = _logs(trials, over, who)
    means = np.random.default_rng(0).choice(logs, (2000, len(logs))).mean(1)
    low, high = np.exp(np.quantile(means, (0.025, 0.975)))
    return float(low), float(high)


def _logs(trials: Sequence[Trial], over: str, who: str) -> list[float]:
    return [float(np.log(t.seconds[over] / t.seconds[who])) for t in trials]
