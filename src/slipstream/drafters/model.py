"""model: a small causal language model with the target's vocabulary, with a key/value cache like the target's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from slipstream.drafters._levels import Grower, Growing, LevelSession, check_levels, grow_together
from slipstream.drafters.base import Drafter, DraftSession, Proposal, Seen
from slipstream.errors import CacheFullError, DrafterError, OptionError
from slipstream.tree import TokenTree

if TYPE_CHECKING:
    from slipstream.budget import Budget
    from slipstream.request import Request
    from slipstream.targets import Target

RIDE_ALONG = 16  # up to so many unread tokens are read together with the root


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
        check_levels(self)


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
        self.draft = open_target(model, memory=target.share)
        try:
            if not self.draft.trees:
                raise DrafterError(
                    f"{type(model).__name__} can't draft: it keeps states that can't be extended level by level"
                )
            check_vocabularies(target, tokenizer, self.draft, draft_tokenizer)
        except DrafterError:
            self.release()
            raise

    def begin(self, request: Request) -> DraftSession:
        return DraftModelSession(self, request)

    def propose(
        self, sessions: Sequence[DraftSession], roots: Sequence[int], budgets: Sequence[Budget]
    ) -> list[Proposal]:
        """Drafts level by level, all sequences together."""
        mine = cast(Sequence[DraftModelSession], sessions)
        growing = [session.grow(root, budget) for session, root, budget in zip(mine, roots, budgets, strict=True)]
        try:
            return grow_together(
                self.draft, growing, self.target.vocabulary, max(self.options.width, self.options.first)
            )
        except CacheFullError:  # the target may still have room
            for session in mine:
                session.slot.tree = None
            if len(mine) == 1:
                return [Proposal(TokenTree.root(roots[0]))]
            return [
                self.propose([one], [root], [budget])[0] for one, root, budget in zip(mine, roots, budgets, strict=True)
            ]

    def release(self) -> None:
        self.draft.release()


class DraftModelSession(LevelSession):
    def __init__(self, drafter: DraftModel, request: Request) -> None:
        from slipstream.targets import Want

        super().__init__(drafter.options, request, "model")
        self.drafter, self.draft = drafter, drafter.draft
        self.slot, self._want = self.draft.open(), Want()
        self._unread: list[int] = []  # tokens of the text that are not in the draft model's cache yet
        self._lead = 0  # unread tokens before the root in the slot's tree

    def observe(self, seen: Seen) -> None:
        accepted = list(seen.tokens)
        if (tree := self.slot.tree) is not None:
            # Keep the keys of drafted tokens that were accepted, and of the tokens before the root.
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

    def grow(self, root: int, budget: Budget) -> Grower:
        """Grow a draft."""
        positions = self.draft.context - 1 - self.slot.length - len(self._unread)
        depth = min(budget.depth, self.options.depth, positions)
        if depth < 1 or budget.nodes < 1 or max([root, *self._unread]) >= self.draft.vocabulary:
            return Proposal(TokenTree.root(root))  # no budget, or a token that the draft model does not have
        if len(self._unread) > RIDE_ALONG:
            known = self.slot.length
            try:
                for _ in self.draft.prefill(self.slot, self._unread, self._want):
                    pass
            finally:
                self._unread = self._unread[self.slot.length - known :]
        self._lead = len(self._unread)
        growing = Growing(self.slot, [*self._unread, root])
        return (yield from self.grow_levels(growing, depth, budget.nodes))

    def close(self) -> None:
        self.draft.close(self.slot)


def check_vocabularies(target: Target, tokenizer: Any, draft: Target, draft_tokenizer: Any) -> None:
    """Refuse a draft model to which ids mean other tokens. Different sizes alone may just be padding."""
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
