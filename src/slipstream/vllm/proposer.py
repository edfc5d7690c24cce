"""Proposer: the class that vLLM loads, and calls for drafts after every step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from slipstream import drafters as registry
from slipstream.budget import Budget
from slipstream.budget.costs import Costs
from slipstream.datastores.live import EarlierAnswers
from slipstream.datastores.sparse.runs import token_type
from slipstream.drafters._piloted import PilotedDrafter
from slipstream.drafters.base import Drafter, Seen
from slipstream.drafters.rest import Rest
from slipstream.stopwatch import Stopwatch
from slipstream.vllm.options import ProposerOptions, read_options
from slipstream.vllm.steps import StepCosts
from slipstream.vllm.texts import KnownText, KnownTexts

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from slipstream.request import Request

REHEARSED = 12  # steps on a made-up text at the start, so that code is compiled before the first request


@dataclass(frozen=True)
class Served:
    """The model that vLLM runs, as drafters see it. It can't be called from here."""

    vocabulary: int
    trees: bool = False
    ahead: bool = False


@dataclass(frozen=True)
class Unnamed:
    """What retrieving drafters read of a request. vLLM does not identify requests, so all are of one collection."""

    collection: str = "default"


class Retrieval(PilotedDrafter):
    """Drafts from the text with earlier answers, and from stores; each is asked only where it pays."""

    def make_parts(self) -> dict[str, Drafter]:
        o: ProposerOptions = self.options
        shape = {"length": o.length, "nodes": o.nodes}
        parts: dict[str, Drafter] = {"suffix": registry.make("suffix", self.target, None, shared=o.shared, **shape)}
        for i, folder in enumerate(o.folders):
            rest = cast(Rest, registry.make("rest", self.target, None, store=folder, **shape))
            rest.source = f"rest-{i + 1}" if i else "rest"
            parts[rest.source] = rest
        return parts


class Proposer:
    """Drafts chains for vLLM: as many tokens as pay, which may be none."""

    def __init__(self, vllm_config: Any) -> None:
        speculative, model = vllm_config.speculative_config, vllm_config.model_config
        given = read_options(getattr(vllm_config, "additional_config", None))
        longest = speculative.num_speculative_tokens
        self.longest = min(given.length or longest, longest)
        self.context = model.max_model_len
        self.options = ProposerOptions(given.stores, given.shared, self.longest, given.nodes)
        self.vocabulary = model.get_vocab_size()
        self._prepare()
        self._rehearse()
        self._prepare()

    def _prepare(self) -> None:
        """Begin with no texts, no answers and no times of steps."""
        unknown = Costs({1: 1.0}, flat=True)  # until steps were measured
        self.drafter = Retrieval(Served(self.vocabulary), None, self.options, lambda: unknown)
        self.answers = EarlierAnswers(token_type(self.vocabulary), self.options.shared)
        self.drafter.attach(self.answers)
        self.texts, self.steps = KnownTexts(), StepCosts(self.longest)
        self._since: Stopwatch | None = None  # when the last drafts were returned

    def load_model(self, *_: Any, **__: Any) -> None:
        """Called by vLLM. There is no model to load."""

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: NDArray[Any],
        token_ids_cpu: NDArray[Any],
        slot_mappings: Any = None,  # noqa: ARG002  (vLLM's)
    ) -> list[list[int]]:
        """Drafts after a step, one per row. sampled_token_ids: the tokens that the step added to each text, none while
        its prompt is read. num_tokens_no_spec: (rows,) the text's length with these. token_ids_cpu: (rows, ·) its
        tokens."""
        taken = self._since.seconds() if self._since is not None else 0.0
        self.texts.step += 1
        rows = [i for i, sampled in enumerate(sampled_token_ids) if len(sampled)]
        there, steady = [], len(rows) == len(sampled_token_ids) and self._since is not None
        for i in rows:
            text, known = self._text(token_ids_cpu[i], int(num_tokens_no_spec[i]), len(sampled_token_ids[i]))
            there.append(text)
            steady = steady and known
        if steady and there:  # the step did nothing but continue these texts
            self._measured([1 + text.drafted for text in there], taken)
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        if there:
            for i, text, draft in zip(rows, there, self._drafts(there), strict=True):
                text.drafted, drafts[i] = len(draft), draft
                self.texts.put(text)
        for text in self.texts.gone():
            self._ended(text)
        self._since = Stopwatch()
        return drafts

    def _text(self, row: NDArray[Any], length: int, sampled: int) -> tuple[KnownText, bool]:
        """The text of a row, and whether it was known before. Its last token is the draft's root, not observed yet."""
        before = length - sampled
        text = self.texts.take(row, before)
        if text is None:
            session = self.drafter.begin(cast("Request", Unnamed()))
            session.observe(Seen(row[: length - 1].tolist(), 0))
            text = KnownText(np.array(row[:length], np.int32), length, before, session)
            return text, False
        text.session.observe(Seen(row[before - 1 : length - 1].tolist(), before - 1))
        text.grow(row, length)
        return text, True

    def _measured(self, rows: list[int], seconds: float) -> None:
        if self.steps.done:
            self.drafter.measured(rows, seconds)
            return
        self.steps.see(rows, seconds)
        if self.steps.done:
            self.drafter.pilot.costs = self.steps.costs()

    def _drafts(self, texts: list[KnownText]) -> list[list[int]]:
        roots = [int(text.tokens[text.length - 1]) for text in texts]
        room = [max(0, min(self.longest, self.context - text.length - 1)) for text in texts]
        if not self.steps.done:
            return [[r] * min(n, most) for r, n, most in zip(roots, self.steps.trial(len(texts)), room, strict=True)]
        budgets = [Budget(self.options.nodes if depth else 0, depth) for depth in room]
        found = self.drafter.propose([text.session for text in texts], roots, budgets)
        return [proposal.tree.tokens[1:].tolist() for proposal in found]

    def _ended(self, text: KnownText) -> None:
        text.session.close()
        if self.options.shared:
            self.answers.publish(Unnamed.collection, text.answer)

    def _rehearse(self) -> None:
        """Draft for a text that repeats, so that every source is asked, and something is found, at least once."""
        period = np.arange(8, dtype=np.int32) % self.vocabulary
        for batch in (1, 2):
            rows = np.tile(period, (batch, 16))
            self.steps.done, self.drafter.pilot.costs = True, Costs({1: 1.0, 64: 1.1}, flat=True)
            for step in range(REHEARSED):
                lengths = np.full(batch, 64 + step, np.int32)
                self.propose([[int(rows[0, 63 + step])]] * batch, lengths, rows)
            self.answers.publish(Unnamed.collection, period.tolist())
