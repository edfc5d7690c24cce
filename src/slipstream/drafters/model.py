"""model: a small causal language model with the target's vocabulary drafts, KV-cached like the target itself."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from slipstream.drafters.base import Drafter, DraftSession, Proposal, Seen
from slipstream.errors import DrafterError, OptionError
from slipstream.kernels.ops import best_tokens
from slipstream.sampling import Sampler, gumbel
from slipstream.tree import TokenTree

if TYPE_CHECKING:
    from slipstream.budget import Budget
    from slipstream.request import Request
    from slipstream.targets import Slot, Target

MODES = ("greedy", "sample", "beam")
RIDE_ALONG = 16  # unread tokens up to this many are read together with the root


@dataclass(frozen=True)
class DraftModelOptions:
    draft_model: Any = None  # a hub id, a folder, a GGUF file, or a model already in memory
    draft_tokenizer: Any = None  # of a model in memory, to compare vocabularies with
    mode: str = "greedy"  # greedy: its best tokens; sample: drawn as the request draws; beam: its best paths
    depth: int = 5  # tokens ahead
    width: int = 4  # beams, or alternatives drawn for the first token
    confidence: float = 0.0  # leave out tokens to which the draft model gives less than this
    draft_dtype: str | None = None  # as in load()
    first: int = 0  # so many of its most probable first tokens are named beside the tree, for rasd to prune by

    def __post_init__(self) -> None:
        if self.draft_model is None:
            raise OptionError("drafter 'model' needs one: draft_model=<hub id, folder, .gguf file or model object>")
        if self.mode not in MODES:
            raise OptionError(f"mode={self.mode!r} is unknown: there are {', '.join(MODES)}")
        if self.depth < 1 or self.width < 1:
            raise OptionError(f"depth and width must be at least 1, found {self.depth} and {self.width}")


class DraftModel(Drafter):
    """A smaller model of the same vocabulary."""

    generates = True
    Options = DraftModelOptions

    def __init__(self, target: Target, tokenizer: Any, options: DraftModelOptions) -> None:
        from slipstream.targets import load_model, open_target

        super().__init__(target, tokenizer, options)
        model, draft_tokenizer = options.draft_model, options.draft_tokenizer
        if isinstance(model, str | Path):
            model, draft_tokenizer = load_model(model, dtype=options.draft_dtype, device=target.device)
        self.draft = open_target(model)
        if not self.draft.trees:
            raise DrafterError(
                f"{type(model).__name__} can't draft: it keeps states that can't be extended level by level"
            )
        check_vocabularies(target, tokenizer, self.draft, draft_tokenizer)

    def begin(self, request: Request) -> DraftSession:
        return DraftModelSession(self, request)

    def propose(
        self, sessions: Sequence[DraftSession], roots: Sequence[int], budgets: Sequence[Budget]
    ) -> list[Proposal]:
        """Level by level, those of all sequences together."""
        mine = cast(Sequence[DraftModelSession], sessions)
        growing = [session.grow(root, budget) for session, root, budget in zip(mine, roots, budgets, strict=True)]
        found: list[Proposal | None] = [None] * len(mine)
        rows: dict[int, torch.Tensor | None] = dict.fromkeys(range(len(mine)))  # of those that are to go on
        while rows:
            trees: dict[int, Growing] = {}
            for i, logits in rows.items():
                try:
                    trees[i] = growing[i].send(logits)
                except StopIteration as end:
                    found[i] = end.value
            rows = dict(zip(trees, self._rows([mine[i].slot for i in trees], list(trees.values())), strict=True))
        return [proposal for proposal in found if proposal is not None]

    def _rows(self, slots: list[Slot], growing: list[Growing]) -> list[torch.Tensor]:
        """(new nodes, V) logits of each, over the target's vocabulary."""
        from slipstream.targets import Want

        if not growing:
            return []
        trees, known = [tree.tree() for tree in growing], [tree.scored for tree in growing]
        found = []
        for scores, tree in zip(self.draft.extend(slots, trees, known, Want()), growing, strict=True):
            tree.scored = len(tree.tokens)
            rows = scores.every().float()
            missing = self.target.vocabulary - rows.shape[1]  # padded sizes may differ either way
            found.append(torch.nn.functional.pad(rows, (0, missing), value=-torch.inf) if missing else rows)
        return found

    def release(self) -> None:
        self.draft.release()


class DraftModelSession(DraftSession):
    def __init__(self, drafter: DraftModel, request: Request) -> None:
        from slipstream.targets import Want

        self.drafter = drafter
        self.draft, self.options, self.first = drafter.draft, drafter.options, drafter.options.first
        self.vocabulary = drafter.target.vocabulary
        self.slot, self._want = self.draft.open(), Want()
        self._unread: list[int] = []  # part of the text, not yet of the draft model's cache
        self._lead = 0  # unread tokens that stand before the root in the slot's tree

        self._shared_noise = not request.accept.needs_q
        self._keep_q = request.accept.needs_q and self.options.mode == "sample" and not request.sampling.greedy
        # The draft model must not advance anybody's stateful processor.
        sampling = replace(
            request.sampling,
            processors=(),
            bad_words=(),
            repetition_penalty=1.0,
            presence_penalty=0.0,
            frequency_penalty=0.0,
        )
        self._sampler = Sampler(sampling, [], request.seed, request.sample)

    def observe(self, seen: Seen) -> None:
        accepted = list(seen.tokens)
        if (tree := self.slot.tree) is not None:
            # Keep the keys of what was drafted right; the tokens before the root are right by now.
            path = list(range(self._lead))
            node: int | None = self._lead if accepted and tree.tokens[self._lead] == accepted[0] else None
            while node is not None:
                path.append(node)
                accepted.pop(0)
                node = tree.child(node, accepted[0]) if accepted else None
            self.draft.commit(self.slot, path)
            self._unread = self._unread[self._lead :]
        self._unread += accepted

    def resume(self, other: DraftSession, tokens: list[int]) -> None:
        self.draft.close(self.slot)
        self.slot = self.draft.fork(cast(DraftModelSession, other).slot)
        known = self.slot.shared(tokens)
        self.draft.truncate(self.slot, known)
        self._unread = tokens[known:]

    def propose(self, root: int, budget: Budget) -> Proposal:
        return self.drafter.propose([self], [root], [budget])[0]

    def grow(self, root: int, budget: Budget) -> Generator[Growing, torch.Tensor | None, Proposal]:
        """A draft. Yields it whenever it needs the logits of its new nodes, (new nodes, V), to go on."""
        positions = self.draft.context - 1 - self.slot.length - len(self._unread)
        depth = min(budget.depth, self.options.depth, positions)
        if depth < 1 or budget.nodes < 1 or max([root, *self._unread]) >= self.draft.vocabulary:
            return Proposal(TokenTree.root(root))  # nothing asked for, or a text it can't read
        if len(self._unread) > RIDE_ALONG:
            for _ in self.draft.prefill(self.slot, self._unread, self._want):
                pass
            self._unread = []
        self._lead = len(self._unread)
        growing = Growing([*self._unread, root])
        position = self.slot.length + self._lead  # of the root
        rows = cast(torch.Tensor, (yield growing))[-1:]  # (1, V)
        likeliest = tuple(rows[0].topk(min(self.first, self.vocabulary)).indices.tolist()) if self.first else None
        frontier, value = [self._lead], torch.zeros(1)
        for level in range(1, depth + 1):
            room = budget.nodes - (len(growing.tokens) - 1 - self._lead)
            first = len(growing.tokens)
            value = self._grow(growing, frontier, value, rows, position + level, room)
            frontier = list(range(first, len(growing.tokens)))
            if not frontier or level == depth or len(growing.tokens) - 1 - self._lead >= budget.nodes:
                break
            rows = cast(torch.Tensor, (yield growing))
        return Proposal(growing.proposal(self._lead), likeliest)

    def close(self) -> None:
        self.draft.close(self.slot)

    def _grow(
        self,
        growing: Growing,
        frontier: list[int],
        value: torch.Tensor,
        rows: torch.Tensor,
        position: int,
        room: int,
    ) -> torch.Tensor:
        """One level of children for the frontier, whose rows (f, V) and path log-probabilities (f,) are given.
        Returns the children's path log-probabilities."""
        mode = self.options.mode
        if mode == "beam":
            return self._grow_beam(growing, frontier, value, rows, self.options.width, room)
        if mode == "greedy" and self._sampler.sampling.plain:  # a beam of one
            return self._grow_beam(growing, frontier, value, rows, 1, room)
        self._sampler.position = position
        values = []
        for node, row, above in zip(frontier, rows, value, strict=True):
            logits = self._sampler.warped(row)
            logp = torch.log_softmax(logits.double(), -1)
            if mode == "sample" and not self._sampler.sampling.greedy:
                many = self.options.width if node == self._lead else 1
                key = self._sampler.key("" if self._shared_noise else "draft")
                noisy = logits + gumbel(key, torch.arange(len(logits), device=logits.device))
                # The k largest, in order, are k draws without replacement.
                drawn = torch.topk(noisy, min(many, room, int(torch.isfinite(logp).sum())))
                tokens = drawn.indices.tolist()
                if self._keep_q:
                    growing.drawn_from(node, logp.exp())
            else:
                tokens = [int(logp.argmax())]
            for token in tokens[:room]:
                p = float(logp[token].exp())
                # What was drawn from q must stay, or it would no longer be a draw from q.
                if p < self.options.confidence and not self._keep_q:
                    break
                growing.add(token, node, p)
                values.append(float(above) + float(logp[token]))
                room -= 1
        return torch.tensor(values)

    def _grow_beam(
        self, growing: Growing, frontier: list[int], value: torch.Tensor, rows: torch.Tensor, width: int, room: int
    ) -> torch.Tensor:
        """The `width` best paths go on."""
        logp, ids = (x.cpu() for x in best_tokens(rows, min(width, rows.shape[1])))  # (f, width)
        paths = value[:, None] + logp
        best = torch.topk(paths.flatten(), min(width, room, paths.numel()))
        kept = []
        for place, flat in enumerate(best.indices.tolist()):
            beam, number = divmod(flat, logp.shape[1])
            p = float(logp[beam, number].exp())
            if p > 0 and p >= self.options.confidence:
                growing.add(int(ids[beam, number]), frontier[beam], p)
                kept.append(place)
        return best.values[kept]


class Growing:
    """A tree while it grows level by level: a chain of unread tokens, the root, then drafts."""

    def __init__(self, chain: list[int]) -> None:
        self.tokens, self.parents = list(chain), list(range(-1, len(chain) - 1))
        self.probability = [1.0] * len(chain)
        self.rows = [-1] * len(chain)  # of q, for the node's children
        self.q: list[torch.Tensor] = []
        self.scored = 0

    def add(self, token: int, parent: int, probability: float) -> None:
        self.tokens.append(token)
        self.parents.append(parent)
        self.probability.append(probability)
        self.rows.append(-1)

    def drawn_from(self, node: int, q: torch.Tensor) -> None:
        self.rows[node] = len(self.q)
        self.q.append(q)

    def tree(self) -> TokenTree:
        return TokenTree.build(self.tokens, self.parents)

    def proposal(self, root: int) -> TokenTree:
        """Without the chain before the root."""
        parents = np.array(self.parents[root:]) - root
        parents[0] = -1
        return TokenTree.build(
            self.tokens[root:],
            parents,
            source="model",
            raw=self.probability[root:],
            q=torch.stack(self.q) if self.q else None,
            q_row=self.rows[root:] if self.q else None,
        )


def check_vocabularies(target: Target, tokenizer: Any, draft: Target, draft_tokenizer: Any) -> None:
    """The same id must mean the same token to both. Padded sizes say nothing about that."""
    if draft.vocabulary < target.vocabulary and (tokenizer is None or len(tokenizer) > draft.vocabulary):
        raise DrafterError(
            f"the draft model knows {draft.vocabulary} token ids, the target {target.vocabulary}: "
            "they must share one vocabulary"
        )
    if tokenizer is None or draft_tokenizer is None:
        return
    ours, theirs = tokenizer.get_vocab(), draft_tokenizer.get_vocab()
    if ours == theirs:
        return
    by_id = {i: token for token, i in theirs.items()}
    different = [(i, token, by_id.get(i)) for token, i in ours.items() if by_id.get(i) != token]
    if different:
        i, token, other = min(different)
        raise DrafterError(
            f"the draft model has another vocabulary: {len(different)} of {len(ours)} token ids differ, the first is "
            f"{i}, {token!r} to the target and {other!r} to the draft model. Use one of the target's own family"
        )
