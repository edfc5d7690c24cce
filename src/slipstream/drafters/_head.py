"""HeadDrafter: the base of all drafters with a trained head.

A draft is one function of tensors, whose shapes don't depend on the request: from the last states and the roots to
packed nodes, which are copied to the host once. There the draft is cut to each request's budget.

On a GPU a draft can be queued right after the step whose states it reads, for all sequences of the step together. The
paths that the host will accept, and the tokens after them, are then computed on the device (`ops.walk`). Once the host
has verified the step, it compares the draft's inputs with the real ones. If any sequence's differ, it drafts again.
"""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipstream.drafters.base import BatchedSession, Drafter, DraftSession, Hidden, Proposal, Seen
from slipstream.errors import DrafterError, OptionError
from slipstream.heads import Head, load_head, registry
from slipstream.heads.base import Lender
from slipstream.heads.checkpoint import find_folder
from slipstream.heads.packing import unpack, unpack_first
from slipstream.kernels.ops import walk
from slipstream.sampling import noise_key
from slipstream.targets.captured.function import Captured, Pending
from slipstream.targets.captured.graph_target import BATCHES, bucket
from slipstream.targets.captured.modules import StandIns
from slipstream.tree import TokenTree

if TYPE_CHECKING:
    from slipstream.budget import Budget
    from slipstream.request import Request
    from slipstream.targets.base import Target
    from slipstream.targets.captured.fixed_step import FixedStep

MODES = ("best", "sample")
SMALL = 2  # nodes of a small draft: heads that draft token by token make it in notably less time than a full one


@dataclass(frozen=True)
class HeadOptions:
    drafter_path: Any = None  # a folder, a hub id or a Head in memory; None: the model's own, registered or shipped
    mode: str = "best"  # best: the head's most probable tokens; sample: drawn from it, where the request draws
    first: int = 0  # so many of its most probable first tokens are named beside the tree, for rasd to prune by

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise OptionError(f"mode={self.mode!r} is unknown: there are {', '.join(MODES)}")


class HeadDrafter(Drafter):
    """Subclasses define `best`, and for mode=sample `draws`: from a batch's inputs to nodes."""

    kind: ClassVar[str]
    generates = True
    sizes: tuple[int, ...] = ()
    rereads: int | None = 0  # a session needs the last state alone, and a prompt's last token is always read
    Options = HeadOptions
    # mode=sample: number and length of chains. Their first tokens are drawn without replacement.
    width: int
    length: int
    ordered: bool = False  # whether `best` returns nodes in order of their paths' probabilities
    max_states: int = 1  # states that a draft reads at most

    def __init__(self, target: Target, tokenizer: Any, options: Any) -> None:
        super().__init__(target, tokenizer, options)
        self.head, self.folder = open_head(self.kind, options.drafter_path, target)
        self.named = options.drafter_path is not None  # by the user; `auto` tells those that it found by itself
        self.first = options.first
        self.source = self.kind  # its name in trees; `auto` renames several heads of one kind
        self.names = self.own_names()  # captures read this tensor, so a swap writes into it
        self.layers = self.head.layers(self.head.lender.layers)
        self.device = next(self.head.parameters()).device
        self.fixed = self.device.type == "cuda"  # whether all drafts have one shape, so that one capture serves all
        self.most = sys.maxsize  # nodes that budgets keep of a draft, at most: no more need to be found
        within: Callable[[], AbstractContextManager[None]] = nullcontext
        if self.fixed:
            within = StandIns(self.head).in_place  # the kernels of the target's own steps
        self.captured = Captured(lambda *given: self.best(*self.inputs(*given)), self.device, within)
        self.captured_draws = Captured(
            lambda table, states, *noise: self.draws(*self.inputs(table, states), *noise), self.device, within
        )
        self.captured_ahead = Captured(self._ahead_of_host, self.device, within)

    def begin(self, request: Request) -> HeadSession:
        return HeadSession(self, request)

    def release(self) -> None:
        for captured in (self.captured, self.captured_draws, self.captured_ahead):
            captured.clear()

    @torch.inference_mode()
    def swap(self, new: Head, folder: Path | None) -> None:
        """Use another head's weights, of the same shape, from the next draft on. They are copied in place, so that
        captures stay valid."""
        if self.fixed:
            torch.cuda.synchronize(self.device)  # a draft may be under way
        mine, its = self.head.state_dict(), new.state_dict()
        for name, tensor in mine.items():
            tensor.copy_(its[name])
        self.head.refresh()
        names = self.own_names()
        if self.names is not None and names is not None:
            self.names.copy_(names)
        self.folder = folder

    def own_names(self) -> Tensor | None:
        """(V',) the token id of each id that the head predicts; None: they are the same."""
        return self.head.draft_ids

    def propose(
        self, sessions: Sequence[DraftSession], roots: Sequence[int], budgets: Sequence[Budget]
    ) -> list[Proposal]:
        mine = cast(Sequence[HeadSession], sessions)
        proposals = [Proposal(tree) for tree in TokenTree.roots(roots)]
        able = [i for i, b in enumerate(budgets) if b.nodes > 0 and b.depth > 0 and mine[i].ready]
        for drawn, grow in ((False, self._guessed), (True, self._drawn)):
            every = [i for i in able if mine[i].draws == drawn]
            for begin in range(0, len(every), BATCHES[-1]):
                group = every[begin : begin + BATCHES[-1]]
                found = grow([mine[i] for i in group], [roots[i] for i in group], [budgets[i] for i in group])
                for i, proposal in zip(group, found, strict=True):
                    proposals[i] = proposal
        return proposals

    @torch.inference_mode()
    def draft_ahead(self, sessions: Mapping[int, DraftSession], step: FixedStep) -> None:
        mine = cast(Mapping[int, HeadSession], sessions)
        able = {number: session for number, session in mine.items() if session.startable}
        if not 0 < len(able) <= BATCHES[-1]:
            return
        roots = step.roots[list(able)]
        batch = bucket(len(able), BATCHES)
        known = self.known(list(able.values()), batch)
        table = np.full((batch, 1 + known.shape[1]), roots[0], np.int64)  # padding walks as the first sequence does
        table[: len(able), 0], table[:, 1:] = roots, known
        i, layers = step.inputs, dict.fromkeys(self.layers)
        still = i.ids, i.depths, i.parents, step.chosen, *(step.hidden[layer] for layer in layers)
        pending = self.captured_ahead.start(torch.from_numpy(table), still=still)
        for line, session in enumerate(able.values()):
            session.ahead = Ahead(pending, line)

    # ---- on the device

    def inputs(self, table: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        """The inputs of `best` and `draws`: the last states (b, ·) and the roots (b,).

        table: see `make_table`. states: joined, (b, m, ·); or all states of a step, (n, H) for each layer."""
        return self._select_states(table[:, 2:], states)[:, 0], table[:, 1]

    def _ahead_of_host(self, given: Tensor, *of_step: Tensor) -> Tensor:
        """(b, ·) int32: the table that the host will make if it accepts what the step chose, and the draft's nodes.
        given: the row of each sequence's root in the step, and `known`."""
        ids, depths, parents, chosen, *states = of_step
        table = torch.cat((given[:, 1:], walk(ids, depths, parents, chosen, given[:, 0], self.max_states)), 1)
        return torch.cat((table.int(), self.best(*self.inputs(table, *states)).flatten(1)), 1)

    def _select_states(self, rows: Tensor, states: tuple[Tensor, ...]) -> Tensor:
        """(b, m, ·) the joined states that the head reads. rows (b, m): their rows in the step."""
        if states[0].dim() == 3:
            return states[0]
        layers = dict.fromkeys(self.layers)  # without repetitions: a head may read one layer twice
        return self.head.join({layer: h[rows] for layer, h in zip(layers, states, strict=True)})

    @abstractmethod
    def best(self, *inputs: Tensor) -> Tensor:
        """(b, 3, n): nodes in the format of `pack`, followed by the `first` tokens."""

    @abstractmethod
    def draws(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        """inputs: those of `best`, then noise keys (b, length) int64 by depth, and temperatures (b,) float64.

        Returns chains (b, 2, width·length) in the format of `pack_chains`, followed by the `first` tokens; and q
        (b, 1 + (length - 1)·width, V) float64: one row for the root's children, then for each depth one row per chain.
        """

    # ---- on the host

    def known(self, sessions: Sequence[HeadSession], batch: int) -> NDArray[np.int64]:  # noqa: ARG002
        """(b, ·) the beginning of the next draft's table, to which the step under way adds the rest; padded to `batch`
        sequences."""
        return np.empty((batch, 0), np.int64)

    def make_table(self, sessions: Sequence[HeadSession], roots: Sequence[int], batch: int, from_step: bool) -> Tensor:  # noqa: ARG002
        """(b, 3) int64, padded to `batch` sequences, in the format of `ops.walk`: the number of states (1), the root,
        and the state's row in its step. from_step: whether states are read from the step's own tensors."""
        table = np.ones((batch, 3), np.int64)
        table[: len(roots), 1] = roots
        table[: len(roots), 2] = [session.place for session in sessions]
        return torch.from_numpy(table)

    @torch.inference_mode()
    def joined(self, sessions: Sequence[HeadSession], table: Tensor) -> Tensor:
        """(b, m, ·) the states as one tensor, where they are not read from the step's own tensors."""
        states = [session.state for session in sessions]
        return torch.stack(states + states[:1] * (len(table) - len(states)))[:, None]

    def _guessed(
        self, sessions: Sequence[HeadSession], roots: Sequence[int], budgets: Sequence[Budget]
    ) -> list[Proposal]:
        batch = bucket(len(sessions), BATCHES)
        if not self.fixed:
            self.most = max(budget.nodes for budget in budgets)
        nodes = self._started(sessions, roots, batch)
        if nodes is None:
            step_states = sessions[0].step_states() if batch == 1 else ()
            table = self.make_table(sessions, roots, batch, bool(step_states))
            if step_states:
                nodes = self.captured.fetch(table, still=step_states).numpy()
            else:
                nodes = self.captured.fetch(table, self.joined(sessions, table)).numpy()
        proposals = []
        for i, (session, root, budget) in enumerate(zip(sessions, roots, budgets, strict=True)):
            session.drafted(root)
            tree = budget.limit(unpack(root, nodes[i], self.source, budget.nodes if self.ordered else None))
            proposals.append(Proposal(tree, unpack_first(nodes[i]) if self.first else None))
        return proposals

    def _started(self, sessions: Sequence[HeadSession], roots: Sequence[int], batch: int) -> NDArray[np.int32] | None:
        """(b, 3, n) the nodes of the draft that was queued after the step, if it has all of these sequences, and its
        inputs were those that the host knows now."""
        ahead = [session.ahead for session in sessions if session.ahead is not None and session.step_states()]
        if len(ahead) < len(sessions):
            return None
        table = self.make_table(sessions, roots, batch, True)[: len(sessions)].numpy()  # while the draft is made
        found = ahead[0].pending.wait().numpy()[[one.line for one in ahead]]
        width = table.shape[1]
        same = (found[:, :width] == table).all()
        return found[:, width:].reshape(len(sessions), 3, -1) if same else None

    @torch.inference_mode()
    def _drawn(
        self, sessions: Sequence[HeadSession], roots: Sequence[int], budgets: Sequence[Budget]
    ) -> list[Proposal]:
        batch = bucket(len(sessions), BATCHES)
        padded = [*sessions, *[sessions[0]] * (batch - len(sessions))]
        keys = np.array([s.keys(self.length) for s in padded], np.uint64).view(np.int64)
        heat = np.array([s.request.sampling.temperature for s in padded])
        table = self.make_table(sessions, roots, batch, False)
        noise = torch.from_numpy(keys), torch.from_numpy(heat)
        chains, q = self.captured_draws(table, self.joined(sessions, table), *noise)
        below = chains.cpu().numpy()
        proposals = []
        for i, session in enumerate(sessions):
            session.drafted(roots[i])
            tree = self._tree_of_draws(roots[i], below[i], q[i] if session.keeps_q else None, budgets[i])
            proposals.append(Proposal(tree, unpack_first(below[i])))
        return proposals

    def _tree_of_draws(self, root: int, packed: NDArray[np.int32], q: Tensor | None, budget: Budget) -> TokenTree:
        """As many chains, and as much of each, as the budget has room for. This must not depend on the tokens: q holds
        only if the tree's shape was chosen without looking at the draws."""
        chains = packed[:, : self.width * self.length].reshape(2, self.width, self.length)
        tokens, p = chains[0], chains[1].view(np.float32)  # (width, length)
        length = min(self.length, budget.depth, budget.nodes)
        width = min(budget.nodes // length, int((p[:, 0] > 0).sum()))  # q may have fewer tokens than `width`
        chain = np.repeat(np.arange(width), length)
        depth = np.tile(np.arange(length), width)
        number = 1 + np.arange(width * length)
        row = np.where(depth < length - 1, 1 + depth * self.width + chain, -1)
        return TokenTree.build(
            np.concatenate([[root], tokens[:width, :length].ravel()]),
            np.concatenate([[-1], np.where(depth == 0, 0, number - 1)]),
            source=self.source,
            raw=np.concatenate([[1.0], p[:width, :length].ravel()]),
            q=None if q is None else q.clone(),  # the next draft may write into the same memory
            q_row=None if q is None else np.concatenate([[0], row]),
        )


class Ahead(NamedTuple):
    """One sequence's line of the draft that was queued after the last step, for all that took part in it."""

    pending: Pending  # (b, ·) see `_ahead_of_host`
    line: int


class HeadSession(BatchedSession):
    """One sequence: the state that chose its root, and its noise."""

    drafter: HeadDrafter

    def __init__(self, drafter: HeadDrafter, request: Request) -> None:
        self.drafter, self.request = drafter, request
        self.draws = drafter.options.mode == "sample" and not request.sampling.greedy
        self.keeps_q = self.draws and request.accept.needs_q
        self.read = 0  # observed tokens of the text
        self.hidden = Hidden()  # the state that the head reads: the last one observed
        self.ahead: Ahead | None = None  # the draft that was queued after the last step, if any

    def observe(self, seen: Seen) -> None:
        self.read = seen.position + len(seen.tokens)
        self.hidden = seen.hidden.end(1) if seen.hidden else seen.hidden

    @property
    def ready(self) -> bool:
        """Whether the state that chose the root was observed."""
        return bool(self.hidden)

    @property
    def state(self) -> Tensor:
        """(·,) joined."""
        return self.drafter.head.join(self.hidden)[0]

    @property
    def place(self) -> int:
        """The state's row in its step."""
        assert self.hidden.rows is not None, "the last row is one row"
        return self.hidden.rows[0]

    def step_states(self) -> tuple[Tensor, ...]:
        """All states of the step, (n, H) for each layer, if a capture may read them from the step's own tensors; else
        empty."""
        return tuple(self.hidden.tensors.values()) if self.hidden.lasting else ()

    @property
    def unstarted(self) -> bool:
        return self.ahead is None

    @property
    def startable(self) -> bool:
        """Whether a draft can be queued behind the step that runs now."""
        return not self.draws

    def keep(self) -> None:
        self.ahead = None

    def pause(self) -> None:
        """Drop the queued draft, since the next one overwrites its result; copy the state."""
        self.drop_ahead()
        self.hidden = self.hidden.safe().end(1) if self.hidden else self.hidden

    def drafted(self, root: int) -> None:
        """Called after a draft was made from this root."""

    def drop_ahead(self) -> None:
        """Drop the queued draft. It must have ended first: its capture may be freed next."""
        if self.ahead is not None:
            self.ahead.pending.wait()
        self.ahead = None

    def close(self) -> None:
        self.drop_ahead()

    def keys(self, depths: int) -> list[int]:
        """The noise keys of the tokens after the root, by depth."""
        stream = "draft" if self.keeps_q else ""
        r = self.request
        return [noise_key(r.seed, r.sample, self.read + depth, stream) for depth in range(1, depths + 1)]


def open_head(kind: str, source: Any, target: Any) -> tuple[Head, Path | None]:
    """The head that drafts for this target, bound to it, and the folder it came from."""
    model = getattr(target, "model", None)
    if model is None:
        raise DrafterError(
            f"drafter {kind!r} reads the hidden states of a model, and a {type(target).__name__} has none: "
            "use it with a model"
        )
    if source is None:
        source = own_head(kind, model)
    if isinstance(source, Head):
        head, folder, called = source.bind(model), None, "the given head"
    else:
        folder = find_folder(source)
        head, called = load_head(folder, model), str(source)
    if head.kind != kind:
        raise DrafterError(f"{called} is of the kind {head.kind}: use it with drafter={head.kind!r}")
    its, place = next(head.parameters()).device, model.get_output_embeddings().weight.device
    if its != place:
        raise DrafterError(f"{called} is on {its}, its target on {place}: move it there with head.to({str(place)!r})")
    return head, folder


def own_head(kind: str, model: Any) -> Path:
    """The folder of a head of this kind that is registered for this model, or shipped with slipstream."""
    for known, folder in registry.heads_for(model):
        if known == kind:
            return folder
    others = [registry.made_for(folder) for known, folder in registry.shipped() if known == kind]
    known = f"the one that comes with slipstream is for {others[0]}" if others else "none comes with slipstream"
    raise DrafterError(
        f"drafter {kind!r} needs a head for {Lender.of(model).name}; {known}. Name one with "
        f"drafter_path=<folder or hub id>, or train it: slipstream collect, then slipstream train {kind}"
    )
