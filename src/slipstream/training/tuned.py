"""What is known of a run of `tune`: its settings, what each phase took, and what came of it. Kept as tuned.json."""

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
    store: str | None = None  # a datastore whose answers are learnt from; None: fresh ones
    collection: str = "default"  # of the store
    start: str | None = None  # a head to begin with; None: a fresh one
    share: float = 1.0  # of the time that it works in; it pauses for the rest
    sizes: dict[str, Any] = field(default_factory=dict)  # options of `train` for the head's sizes

    def __post_init__(self) -> None:
        name_sizes(self.head, self.sizes)
        for name in ("minutes", "max_new_tokens"):
            if getattr(self, name) is not None and not getattr(self, name) > 0:
                raise OptionError(f"{name}={getattr(self, name)} is out of range: it must be more than 0")
        check_share(self.share)


@dataclass
class Trial:
    """One prompt, by contestant."""

    kind: str  # own: a prompt like those it was trained on; else the category of a built-in one
    seconds: dict[str, float]  # per token
    same: bool  # whether all said the same
    tokens: dict[str, int] = field(default_factory=dict)
    steps: dict[str, int] = field(default_factory=dict)  # forwards of the target


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
    plan: Estimate | None = None  # what was expected, and the sizes that it was begun with

    def gain(self, over: str, kind: str | None = None) -> float:
        """How many times as fast `auto` with the head is: a geometric mean over the prompts (of a kind)."""
        return gained(self._of(kind), over)

    def interval(self, over: str, kind: str | None = None) -> tuple[float, float]:
        """The 95% interval of that: four prompts on a busy machine prove little."""
        return interval(self._of(kind), over)

    def at_least(self, over: str) -> float:
        """Its lower end."""
        return self.interval(over)[0]

    def tokens_per_step(self, who: str, kind: str | None = None) -> float | None:
        """None: not measured."""
        trials = [t for t in self._of(kind) if t.steps.get(who)]
        return sum(t.tokens[who] for t in trials) / sum(t.steps[who] for t in trials) if trials else None

    def kinds(self) -> list[str]:
        """Of the prompts that were tried: own ones first."""
        return sorted({t.kind for t in self.trials}, key=lambda kind: (kind != OWN, kind))

    def _of(self, kind: str | None) -> list[Trial]:
        return [t for t in self.trials if kind in (None, t.kind)]

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
        found.settings = settings  # more minutes may be given, and another share
        return found


def gained(trials: Sequence[Trial], over: str, who: str = "with") -> float:
    """How many times as fast one is as the other."""
    return float(np.exp(np.mean(_logs(trials, over, who)))) if trials else 0.0


def interval(trials: Sequence[Trial], over: str, who: str = "with") -> tuple[float, float]:
    """Its 95% interval, by drawing prompts anew."""
    if not trials:
        return 0.0, 0.0
    logs = _logs(trials, over, who)
    means = np.random.default_rng(0).choice(logs, (2000, len(logs))).mean(1)
    low, high = np.exp(np.quantile(means, (0.025, 0.975)))
    return float(low), float(high)


def _logs(trials: Sequence[Trial], over: str, who: str) -> list[float]:
    return [float(np.log(t.seconds[over] / t.seconds[who])) for t in trials]
