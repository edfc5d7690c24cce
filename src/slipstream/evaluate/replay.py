"""Recordings: saved plain runs, against which any drafter can be tried without the target.

Under `match` the text does not depend on the drafts. So a replay accepts exactly the tokens that decoding would have
accepted. The drafter's time is measured; the target's comes from costs that were measured with the recording.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any, ClassVar

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from slipstream import drafters
from slipstream.accept import Rule
from slipstream.budget.costs import Costs
from slipstream.drafters import _capabilities as can
from slipstream.engine import Engine
from slipstream.errors import OptionError
from slipstream.evaluate.contestants import Answer, Contestant, Decoding
from slipstream.evaluate.measure import Item
from slipstream.request import Request, Step
from slipstream.sampling import Sampler, Sampling
from slipstream.targets import Scores, Slot, Target, Want
from slipstream.targets.timing import timed
from slipstream.tree import TokenTree

FORMAT, VERSION = "slipstream-recording", 1
TIMING, REPEATS = 20.0, 8  # seconds for timing steps, and repeats, both before and after states are read


@dataclass(frozen=True)
class Recording:
    items: list[Item]
    cost: dict[int, float]  # seconds of a forward, by rows
    decoding: Decoding
    vocabulary: int
    context: int
    model: str
    hidden: dict[str, torch.Tensor]  # "item number.layer": (tokens read, H)
    padded: bool = False  # steps are padded: rows cost as much as the next larger number measured

    def seconds(self, rows: int) -> float:
        """Seconds of a forward over so many rows, interpolated."""
        return self._costs.seconds(rows)

    @cached_property
    def _costs(self) -> Costs:
        return Costs(self.cost, self.padded)

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        save_file({k: v.contiguous() for k, v in self.hidden.items()}, folder / "hidden.safetensors")
        about = {f: getattr(self, f) for f in ("cost", "padded", "vocabulary", "context", "model")}
        items = [asdict(item) for item in self.items]
        about |= {"format": FORMAT, "version": VERSION, "decoding": asdict(self.decoding), "items": items}
        (folder / "recording.json").write_text(json.dumps(about), encoding="utf-8")  # last: it is complete now

    @classmethod
    def load(cls, folder: Path) -> Recording:
        try:
            about = json.loads((folder / "recording.json").read_text(encoding="utf-8"))
            hidden = load_file(folder / "hidden.safetensors")
        except (OSError, ValueError) as error:
            raise OptionError(f"{folder} holds no whole recording ({error}): make one with --record") from error
        if about.get("format") != FORMAT or about.get("version") != VERSION:
            raise OptionError(f"{folder} is no recording of version {VERSION}: make one with --record")
        return cls(
            items=[Item(**item) for item in about["items"]],
            cost={int(rows): seconds for rows, seconds in about["cost"].items()},
            decoding=Decoding(**about["decoding"]),
            vocabulary=about["vocabulary"],
            context=about["context"],
            model=about["model"],
            hidden=hidden,
            padded=about.get("padded", False),
        )


def record(
    target: Target, model: str, items: Sequence[Item], decoding: Decoding, layers: Sequence[int] = ()
) -> Recording:
    """Record items that were answered plainly, with the hidden states of these layers. Steps are timed before states
    are read and again behind them, since a machine may be slow for some seconds on end."""
    longest = max(items, key=lambda item: len(item.tokens)).tokens
    before, hidden = timed(target, longest, TIMING, REPEATS), {}
    for number, item in enumerate(items if layers else []):
        text = (item.tokens + item.plain)[:-1]  # the last token is never read
        slot = target.open()
        chunks = [scores.hidden for scores in target.prefill(slot, text, Want(tuple(layers)))]
        target.close(slot)
        for layer in layers:
            hidden[f"{number}.{layer}"] = torch.cat([chunk[layer] for chunk in chunks]).cpu()
    after = timed(target, longest, TIMING, REPEATS)
    cost = {rows: median(times + after.get(rows, [])) for rows, times in before.items()}
    padded = bool(target.widths)
    return Recording(list(items), cost, decoding, target.vocabulary, target.context, model, hidden, padded)


class Recited(Rule):
    """The recorded token comes next, whatever was drafted: the same as `match` when the text was recorded."""

    name: ClassVar[str] = "match"
    lossless: ClassVar[bool] = True

    def next_token(self, tree: TokenTree, node: int, scores: Scores, sampler: Sampler) -> int:  # noqa: ARG002
        return scores.token(node, sampler)


class TextTarget(Target):
    """A target whose only state is the text. Subclasses define `prefill` and `score`."""

    exact = True
    device = torch.device("cpu")
    dtype = torch.float32

    def open(self) -> Slot:
        return Slot()

    def close(self, slot: Slot) -> None:
        slot.tree = None

    def fork(self, slot: Slot) -> Slot:
        return Slot(tokens=list(slot.tokens))

    def truncate(self, slot: Slot, length: int) -> None:
        del slot.tokens[length:]

    def commit(self, slot: Slot, path: Sequence[int]) -> None:
        assert slot.tree is not None, "commit follows score"
        slot.tokens.extend(slot.tree.tokens[list(path)].tolist())


class ReplayTarget(TextTarget):
    """A target that returns the recorded text. Nodes off that text get scores too, which are never used."""

    def __init__(self, recording: Recording, model: Any = None) -> None:
        """model: for drafters that need its weights. It is never run."""
        self.vocabulary, self.context = recording.vocabulary, recording.context
        self._recording, self._states = recording, recording.hidden
        if model is not None:
            self.model, self.device, self.dtype = model, model.device, model.dtype
            self._states = {name: states.to(model.device) for name, states in recording.hidden.items()}
        self._text: list[int] = []
        self._number = 0

    @property
    def default_draft(self) -> int:
        """As on the machine where the texts were recorded, though nothing is padded here."""
        return 31 if self._recording.padded else super().default_draft

    def play(self, number: int) -> Item:
        """Choose the item to replay."""
        item = self._recording.items[number]
        self._number, self._text = number, item.tokens + item.plain
        return item

    def prefill(self, slot: Slot, tokens: Sequence[int], want: Want) -> Iterator[Scores]:
        start = slot.length
        slot.tokens.extend(tokens)
        hidden = {layer: self._hidden(layer)[start : slot.length] for layer in want.layers}
        yield self._scores(np.array([slot.length - 1]), hidden)

    def score(self, slots: Sequence[Slot], trees: Sequence[TokenTree], want: Want, known: int = 0) -> list[Scores]:
        assert known == 0
        found = []
        for slot, tree in zip(slots, trees, strict=True):
            slot.tree = tree
            positions = slot.length + tree.depths.astype(np.int64)
            read = np.minimum(positions, len(self._text) - 2)
            found.append(self._scores(positions, {layer: self._hidden(layer)[read] for layer in want.layers}))
        return found

    def _hidden(self, layer: int) -> torch.Tensor:
        key = f"{self._number}.{layer}"
        if key not in self._states:
            raise OptionError(f"the recording has no hidden states of layer {layer}: record again with this drafter")
        return self._states[key]

    def _scores(self, positions: np.ndarray, hidden: dict[int, torch.Tensor]) -> Scores:
        scores = Scores(torch.empty(len(positions), 0), hidden, positions)
        scores.take([int(self._text[min(p + 1, len(self._text) - 1)]) for p in positions], None)
        return scores


class Replayed(Contestant):
    """A drafter, replayed against a recording."""

    def __init__(
        self, name: str, recording: Recording, tokenizer: Any = None, model: Any = None, **options: Any
    ) -> None:
        self.name, self.recording = name, recording
        self.target = ReplayTarget(recording, model)
        drafter = drafters.make(name.partition(" ")[0], self.target, tokenizer, **options)
        self.engine = Engine(self.target, drafter, name)
        self.max_draft = can.default_draft(drafter, self.target)  # nodes of a step at most
        self.watch: Callable[[Step], None] | None = None  # called with every step
        self._numbers = {tuple(item.tokens): n for n, item in enumerate(recording.items)}

    def answers(self, prompts: Sequence[list[int]], decoding: Decoding) -> list[Answer]:
        return [self._answer(prompt, decoding) for prompt in prompts]

    def _answer(self, prompt: list[int], decoding: Decoding) -> Answer:
        number = self._numbers[tuple(prompt)]
        item = self.target.play(number)
        verify, emitted = [item.first_token_seconds], list[int]()

        def watch(step: Step) -> None:
            if step.draft_seconds:  # not the prompt's step
                verify.append(self.recording.seconds(len(step.tree)))
            if self.watch is not None:
                self.watch(step)

        def stop(token: int) -> str | None:  # where the recorded text ended
            emitted.append(token)
            return "stop" if len(emitted) == len(item.plain) else None

        request = Request(
            tokens=item.tokens,
            max_new_tokens=decoding.max_new_tokens,
            sampling=Sampling(temperature=decoding.temperature, top_p=decoding.top_p),
            accept=Recited(),
            seed=decoding.seed,
            max_draft=self.max_draft,
            stop=stop,
            watch=watch,
        )
        *_, sequence = self.engine.run([request])
        measured = sequence.stats
        seconds = measured.draft_seconds + measured.host_seconds + sum(verify)
        stats = replace(measured, verify_seconds=sum(verify), seconds=seconds, first_token_seconds=verify[0])
        return Answer(sequence.tokens, seconds, verify[0], stats)
