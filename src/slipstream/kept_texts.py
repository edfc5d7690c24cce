"""KeptTexts: texts of ended answers whose keys stay in the cache, found again by how they begin.

A text is known by a chain of hashes: one for each block of its tokens, which depends on all blocks before it too. So
what begins like a prompt is found in the time that the prompt is long, however many texts there are. Each hash goes
with the name of its collection: nobody finds what other collections asked.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from slipstream.engine import MIN_SHARED, Engine
from slipstream.request import Request
from slipstream.sequence import Kept

Block = tuple[str, int]  # collection, hash
Ids = NDArray[np.int64]


class KeptTexts:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._known: dict[Kept, tuple[list[Block], Ids]] = {}  # the most recently used last
        self._by_hash: dict[Block, dict[Kept, None]] = {}  # those that begin so; the latest last

    def __len__(self) -> int:
        return len(self._known)

    def __iter__(self) -> Iterator[Kept]:
        return iter(self._known)

    def keep(self, collection: str, text: Kept) -> None:
        """Keep a text. One that it begins with, such as an earlier turn of a conversation, is not needed any more."""
        assert text.slot is not None
        ids = np.array(text.slot.tokens, np.int64)
        chain = list(hashes(collection, ids))
        earlier, known = self._find(chain, ids)
        if earlier is not None and earlier.slot is not None and known == earlier.slot.length:
            self.forget(earlier)
        self._known[text] = chain, ids
        for each in chain:
            self._by_hash.setdefault(each, {})[text] = None

    def find(self, request: Request) -> tuple[Kept | None, int]:
        """The text that shares the longest prefix with a request's prompt, to within a block, and the prefix's length.
        The prompt's last token is always read."""
        ids = request.ids[:-1]
        return self._find(hashes(request.collection, ids), ids)

    def _find(self, chain: Iterable[Block], ids: Ids) -> tuple[Kept | None, int]:
        alike: dict[Kept, None] = {}
        for each in chain:
            if each not in self._by_hash:
                break
            alike = self._by_hash[each]
        if not alike:
            return None, 0
        text = next(reversed(alike))
        known = common(self._known[text][1], ids)
        return (text, known) if known >= MIN_SHARED else (None, 0)  # equal hashes of other tokens

    def use(self, text: Kept) -> None:
        """It counts as the most recently used one."""
        self._known[text] = self._known.pop(text)

    def take(self, text: Kept) -> None:
        """Whoever takes it frees its keys."""
        chain, _ = self._known.pop(text)
        for each in chain:
            texts = self._by_hash[each]
            del texts[text]
            if not texts:
                del self._by_hash[each]

    def forget(self, text: Kept) -> None:
        self.take(text)
        self._engine.forget(text)

    def shrink(self, at_most: int) -> None:
        """Forget the least recently used ones."""
        with self._engine.turn():  # several threads may close a service
            while len(self._known) > at_most:
                self.forget(next(iter(self._known)))


def hashes(collection: str, ids: Ids) -> Iterator[Block]:
    """One for each whole block of a text."""
    text, size, before = ids.tobytes(), MIN_SHARED * ids.itemsize, 0
    for end in range(size, len(text) + 1, size):
        before = hash((before, text[end - size : end]))
        yield collection, before


def common(one: Ids, other: Ids) -> int:
    """The length of the common prefix of two texts."""
    most = min(len(one), len(other))
    differ = one[:most] != other[:most]
    return int(differ.argmax()) if differ.any() else most
