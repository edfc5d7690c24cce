"""auto: asks whoever earns it, fuses what they say, and verifies as much of it as pays."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from slipstream import drafters as registry
from slipstream.budget import Budget, usual_draft
from slipstream.budget.costs import costs_of
from slipstream.budget.drafting import JointDrafter, JointSession
from slipstream.budget.pilot import SETTLED, Choice, Luck, Pilot
from slipstream.datastores.dense import manifest as dense
from slipstream.drafters.base import Drafter, DraftSession, Hidden, Proposal, Seen
from slipstream.errors import DamagedError, DrafterError, OptionError, StoreError
from slipstream.heads import Head
from slipstream.heads.check import check_head
from slipstream.heads.drafting import HeadDrafter
from slipstream.heads.registry import heads_for
from slipstream.request import Request
from slipstream.sampling import Sampler, Sampling
from slipstream.target.base import Want
from slipstream.target.capture import Stopwatch
from slipstream.tree import TokenTree, fuse

if TYPE_CHECKING:
    from slipstream.target.steps import FixedStep

log = logging.getLogger("slipstream")

# Labels that some sources begin with, whatever the text: a head's probabilities were trained to be right, and whoever
# gives a prediction expects it to come true. What the others find is as good as the text is repetitive.
TRUST = 20


@dataclass(frozen=True)
class AutoOptions:
    drafters: str = ""  # names, separated by commas; empty: suffix, heads, and those that search the store
    heads: Any = ()  # folders of trained heads, separated by commas; empty: those registered for the model, or shipped
    draft_model: Any = None  # a smaller model with the same vocabulary, to be asked like a head
    store: Any = ""  # a store to draft from too: rest searches its text, and dresd its vectors where it has any
    learn: bool = False  # append to the store what the model says
    shared: int = 0  # tokens of earlier answers to draft from too

    def __post_init__(self) -> None:
        for name in self.names():
            if issubclass(registry.find(name), JointDrafter):
                raise OptionError(f"{name} asks others: leave it out of drafters=…")

    def names(self) -> list[str]:
        return listed(self.drafters)


class AutoDrafter(JointDrafter):
    """Several drafters at once, each asked as far as it earns its time."""

    Options = AutoOptions
    takes = ("prediction", "drafters")

    def __init__(self, target: Any, tokenizer: Any, options: AutoOptions) -> None:
        super().__init__(target, tokenizer, options)
        self.pilot = Pilot(costs_of(target), list(self.parts), target.trees, self._heads())
        for name in self._trusted():
            self.pilot.sources[name].calibration.trust(TRUST)
        self._step: tuple[int, int, float] | None = None  # batch, rows, seconds of the step that was verified last
        self._drafting = 0.0  # seconds that its drafts took
        self.emitted = 0  # and tokens that it gave
        self._unlearnt: Callable[[], None] | None = None  # what the last steps say, if nobody had time for it yet

        if getattr(target, "model", None) is not None:  # a recording has nothing to say to a text of no meaning
            self._rehearse()

    @torch.inference_mode()
    def _rehearse(self) -> None:
        """Ask everybody about a text of no meaning, before the first answer: then code is loaded or compiled, steps
        and drafts of one sequence are captured, and it is known what they take."""
        text = [1 + 389 * i % (self.target.vocabulary - 1) for i in range(12)] * 4
        text, root = text[: max(1, self.target.context // 2)], text[0]
        trial = Pilot(self.pilot.costs, list(self.parts), self.target.trees, self._heads())
        request = Request(text, max_new_tokens=32, prediction=text)
        sessions = {name: part.begin(request) for name, part in self.parts.items()}
        slot = self.target.open()
        for score in self.target.prefill(slot, text, Want(self.layers)):
            start, hidden = slot.length - len(next(iter(score.hidden.values()), text)), Hidden(score.hidden)
            for name, session in sessions.items():
                layers = self.parts[name].layers
                session.observe(Seen(text[start : slot.length], start, hidden.of(layers) if layers else Hidden()))
        limit = Budget(usual_draft(self.target), min(8, self.target.context - slot.length - 1))
        for _ in range(SETTLED):
            trees, drafting = [TokenTree.root(root)], {}
            for name, source in trial.sources.items():
                taken, budget = Stopwatch(), limit.upto(source.most)
                (found,) = self.parts[source.part].propose([sessions[source.part]], [root], [budget])
                drafting[name] = taken.seconds()
                trees.append(limit.limit(found.tree.cut(limit.depth)))
                trees[-1].check(self.target.vocabulary, root)
            whole = fuse(trees)
            (kept,) = trial.choose([whole], [limit.nodes], trial.count(drafting))
            trial.judge()
            trial.learn(whole, text[:1])
            kept.child(0, root)
        want = Want(self.layers, samplers=(Sampler(Sampling(), text),), behind=partial(self._behind, sessions))
        for rows in self.target.widths:
            if rows <= 1 + limit.nodes and slot.length + rows < self.target.context:
                self.target.score([slot], [TokenTree.chain(root, text[1:rows])], want)
        for session in sessions.values():
            session.close()
        self.target.close(slot)
        for name, source in self.pilot.sources.items():
            source.drafting = trial.sources[name].drafting

    def _behind(self, sessions: dict[str, DraftSession], step: FixedStep) -> None:
        for name in self._heads():
            self.parts[name].behind(sessions[name], step)

    def _heads(self) -> dict[str, tuple[int, ...]]:
        """Parts that are models of their own, and the sizes in which they may be asked."""
        return {name: part.sizes for name, part in self.parts.items() if part.generates}

    def _trusted(self) -> set[str]:
        return {name for name, part in self.parts.items() if part.generates or name == "prediction"}

    def make_parts(self) -> dict[str, Drafter]:
        """Searching a store takes longer than searching the text so far, so they are asked each for itself, unless
        nobody but suffix is there to do both."""
        o = self.options
        names = o.names() or ["suffix", *(["rest"] if o.store else [])]
        given: dict[str, Any] = {"store": o.store, "shared": o.shared, "learn": o.learn}
        parts = {}
        for name in names:
            alone = {"shared": o.shared} if name == "suffix" and "rest" in names else given
            parts[name] = self.make_part(name, alone)
        for name, options in self._models():
            try:
                part = registry.make(name.partition("-")[0], self.target, self.tokenizer, **options)
            except DrafterError as error:
                if o.heads or o.draft_model:
                    raise
                log.warning("auto does without %s: %s", name, error)  # nobody named it
                continue
            if isinstance(part, HeadDrafter):
                part.source = name
            parts[name] = part
        if not o.names() and has_vectors(o.store):
            try:
                parts["dresd"] = self.make_part("dresd", given)
            except DamagedError:
                raise
            except (DrafterError, StoreError) as error:  # nobody asked for it by name
                log.debug("auto does without dresd: %s", error)
        return parts | {"prediction": registry.make("prediction", self.target, self.tokenizer)}

    def _models(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Heads and the draft model, by the names that drafters= knows them by: eagle3, eagle3-2, …, model."""
        o, model = self.options, getattr(self.target, "model", None)
        heads: list[tuple[str, Any]] = []
        if given := listed(o.heads):
            heads = [(check_head(head).kind if not isinstance(head, Head) else head.kind, head) for head in given]
        elif model is not None and not o.names() and model.get_output_embeddings() is not None:
            heads = [*heads_for(model)]
        kinds = Counter[str]()
        for kind, head in heads:
            kinds[kind] += 1
            yield kind if kinds[kind] == 1 else f"{kind}-{kinds[kind]}", {"drafter_path": head}
        if o.draft_model:
            yield "model", {"draft_model": o.draft_model}

    @classmethod
    def trials(cls, model: Any) -> list[dict[str, Any]]:  # noqa: ARG003
        return [{"drafters": "pld, suffix"}]

    def begin(self, request: Request) -> DraftSession:
        names = set(self.parts) if request.drafters is None else set(request.drafters)
        if unknown := names - set(self.parts):
            raise OptionError(
                f"drafters names {', '.join(sorted(unknown))}: this model's auto asks {', '.join(self.parts)}"
            )
        self.pilot.begin()
        names.discard("prediction")
        if request.prediction:  # whoever gives one wants it to be used
            names.add("prediction")
            self.pilot.sources["prediction"].renew()
        for name in names - self._trusted():
            self.pilot.sources[name].calibration.forget()
        return AutoSession(self, {name: part.begin(request) for name, part in self.parts.items() if name in names})

    def learn(self, tree: TokenTree, followed: Sequence[int]) -> None:
        self.pilot.learn(tree, followed)

    @property
    def choice(self) -> Choice | None:
        """What was decided about the step that was proposed last."""
        return self.pilot.last

    def measured(self, batch: int, rows: int, seconds: float) -> None:
        self._step = batch, rows, seconds

    def behind(self, session: DraftSession, step: FixedStep) -> None:
        """Whoever was asked about this step will probably be asked about the next."""
        mine = cast(AutoSession, session)
        mine.ahead = True
        for name in mine.latest:
            if self.pilot.continues(name):
                self.parts[name].behind(mine.parts[name], step)
        self.pilot.judge()  # while the device works
        self._learn()

    def propose(
        self, sessions: Sequence[DraftSession], roots: Sequence[int], budgets: Sequence[Budget]
    ) -> list[Proposal]:
        mine, whole = cast(Sequence[AutoSession], sessions), Stopwatch()
        self._learn()
        self._unlearnt = partial(self._look_back, mine, roots, self._step, self._drafting, self.emitted)
        self._step, self._drafting, self.emitted = None, 0.0, 0
        if len(mine) > 1 or not self.target.ahead:
            self._learn()
        trees, limits = [TokenTree.root(root) for root in roots], [budget.nodes for budget in budgets]
        drafting: dict[str, float] = {}
        new: set[str] = set()
        able = [session.parts for session, limit in zip(mine, limits, strict=True) if limit]
        names = list(dict.fromkeys(chain.from_iterable(able)))
        late = {name for name, part in mine[0].parts.items() if part.late} if mine[0].ahead else set()
        said = min([session.said for session in mine])
        for name in self.pilot.asks(names, len(roots), lambda: self.pilot.expects(trees, limits), said, late):
            source = self.pilot.sources[name]
            part, most = source.part, source.most
            who = [i for i, session in enumerate(mine) if limits[i] and part in session.parts]
            taken = Stopwatch()
            for i in who:
                if mine[i].show(part):
                    new.add(name)
            found = self.parts[part].propose(
                [mine[i].parts[part] for i in who],
                [roots[i] for i in who],
                [budgets[i].upto(most) for i in who],
            )
            drafting[name] = taken.seconds()
            for i, proposal in zip(who, found, strict=True):
                draft = proposal.tree.cut(budgets[i].depth)
                trees[i] = fuse([trees[i], draft]) if len(trees[i]) > 1 else draft
        for session in mine:
            session.begun, session.ahead, session.promised = True, False, 0.0
        if not drafting:
            self.pilot.decline(len(roots))
            return [Proposal(tree) for tree in trees]
        asking = sum(drafting.values())
        drafting = self.pilot.count(drafting, new, late)
        self._drafting = self.pilot.spent(drafting, len(roots))
        kept = self.pilot.choose(trees, limits, drafting, [session.luck.share for session in mine])
        for session, tree, promised in zip(mine, trees, self.pilot.promised, strict=True):
            session.promised = promised
            session.proposed(tree)
        self.pilot.joined(whole.seconds() - asking, len(roots))
        return [Proposal(tree) for tree in kept]

    def _learn(self) -> None:
        work, self._unlearnt = self._unlearnt, None
        if work is not None:
            work()

    def _look_back(
        self,
        sessions: Sequence[AutoSession],
        roots: Sequence[int],
        step: tuple[int, int, float] | None,
        drafting: float,
        emitted: int,
    ) -> None:
        """What the last step cost and gained, and what the text says about drafts."""
        if step is not None:
            batch, rows, seconds = step
            self.pilot.charge(rows, batch, emitted, seconds, drafting)
        for session, root in zip(sessions, roots, strict=True):
            session.label(root)


class AutoSession(JointSession):
    """Drafts are judged token by token: of a long one that is right, something is known at once."""

    drafter: AutoDrafter

    def __init__(self, drafter: AutoDrafter, parts: dict[str, DraftSession]) -> None:
        super().__init__(drafter, parts)
        self.asked: set[str] = set()  # for the step that comes
        self.latest: set[str] = set()  # and for the one under way
        self.ahead = False  # whether drafts could be started behind that
        self.luck = Luck()
        self.promised = 0.0  # tokens that the step's tree is expected to give beyond one
        self._last: Seen | None = None  # the latest step's tokens and states
        self._shown: dict[str, int] = {}  # by source: tokens since the first root that it was shown
        self._judged: list[tuple[TokenTree, int, int]] = []  # drafts, the places of their roots, tokens known since

    @property
    def said(self) -> int:
        """Tokens since the first root."""
        return len(self._said)

    def observe(self, seen: Seen) -> None:
        """The prompt is for everybody, the rest for whoever is asked."""
        if not self.begun:
            super().observe(seen)
            return
        self.drafter.emitted += len(seen.tokens)
        if self.promised:
            self.luck.see(self.promised, len(seen.tokens) - 1)
        self._said += seen.tokens
        self._last = seen

    def show(self, name: str) -> bool:
        """One of them is asked: what it has not seen of the text. The states of all but the last step are gone; without
        them it knows less, but hardly guesses worse. Returns whether it is asked about this text for the first time."""
        first, last = name not in self._shown, self._last
        new = self._said[self._shown.get(name, 0) :]
        self._shown[name] = len(self._said)
        self.asked.add(name)
        if new and last is not None:
            part, layers = self.parts[name], self.drafter.parts[name].layers
            missed = len(new) - len(last.tokens) if layers else len(new)
            if missed:
                part.observe(Seen(new[:missed], last.position + len(last.tokens) - len(new)))
            if layers:
                part.observe(Seen(last.tokens, last.position, last.hidden.of(layers)))
        return first

    def keep(self) -> None:
        for name in self.asked:
            self.parts[name].keep()
        for name in self.latest - self.asked:
            self.parts[name].skip()
        self.latest, self.asked = self.asked, set()

    def pause(self) -> None:
        super().pause()
        if self._last is not None:
            self._last = replace(self._last, hidden=self._last.hidden.safe())

    def proposed(self, tree: TokenTree) -> None:
        if len(tree) > 1:
            self._judged.append((tree, len(self._said), 0))

    def label(self, root: int) -> None:
        still = []
        for tree, place, known in self._judged:
            followed = [*self._said[place:], root][1:]  # nothing, if the tree is about this root
            if not followed or self.drafter.pilot.learn(tree, followed, known):
                still.append((tree, place, len(followed)))
        self._judged = still

    def close(self) -> None:
        for tree, place, known in self._judged:
            self.drafter.pilot.learn(tree, self._said[place + 1 :], known)
        self._judged = []
        super().close()


def listed(given: Any) -> list[Any]:
    """Several, from a list, from one, or from a string that separates them by commas."""
    if isinstance(given, str):
        return [word.strip() for word in given.split(",") if word.strip()]
    return [given] if isinstance(given, Path | Head) else list(given)


def has_vectors(store: Any) -> bool:
    """Whether a store, open or a folder, was read by `slipstream store embed`."""
    return bool(store) and (Path(getattr(store, "folder", store)) / dense.FOLDER / dense.NAME).exists()
