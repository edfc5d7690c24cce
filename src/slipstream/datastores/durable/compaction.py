"""Compaction: merge several segments of a store into one without removed documents, now or in the background."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from slipstream.datastores.durable.contents import Contents
from slipstream.datastores.durable.disk import on_disk
from slipstream.datastores.durable.header import SourceEntry
from slipstream.datastores.durable.manifest import SegmentEntry
from slipstream.datastores.durable.mapping import watching
from slipstream.datastores.durable.memory import content_of
from slipstream.datastores.sparse.sort import Tokens

FAN = 4  # so many segments of similar size are merged
AT_ONCE = 16  # segments merged at a time, at most: their names and sums must fit into the new one's header


class Compaction:
    """Compaction of one store, one merge at a time."""

    def __init__(self, contents: Contents, segment_tokens: int) -> None:
        self._contents, self._segment_tokens = contents, segment_tokens
        self._one = threading.RLock()
        self._worker: threading.Thread | None = None

    def everything(self) -> None:
        """Merge into as few segments as possible."""
        self.wait()
        contents = self._contents
        with self._one:
            for collection in sorted({e.collection for e in contents.manifest.segments}):
                group: list[SegmentEntry] = []
                for entry in sorted(contents.entries(collection), key=lambda e: e.tokens):
                    if sum(e.tokens for e in group) + entry.tokens > self._segment_tokens or len(group) == AT_ONCE:
                        self.merge(group)
                        group = []
                    group.append(entry)
                self.merge(group)

    def in_background(self) -> None:
        """Start merging in the background if there are enough segments of similar size."""
        if (self._worker is not None and self._worker.is_alive()) or self._due() is None:
            return
        self._worker = threading.Thread(target=self._work, name="slipstream-compaction", daemon=True)
        self._worker.start()

    def wait(self) -> None:
        if (worker := self._worker) is not None and worker is not threading.current_thread():
            worker.join()

    def _work(self) -> None:
        try:
            while (group := self._due()) is not None:
                self.merge(group)
        except Exception as error:  # the store is unchanged; a background thread can only warn
            warnings.warn(f"{self._contents.folder}: background compaction gave up: {error}", stacklevel=2)

    def _due(self) -> list[SegmentEntry] | None:
        """Segments that should be merged next."""
        tiers: dict[tuple[str, int], list[SegmentEntry]] = {}
        for entry in self._contents.manifest.segments:
            tier = int(np.log(max(entry.tokens, 1)) / np.log(FAN))
            tiers.setdefault((entry.collection, tier), []).append(entry)
        for group in tiers.values():
            if len(group) >= FAN and sum(e.tokens for e in group[:FAN]) <= self._segment_tokens:
                return group[:FAN]
        return None

    def merge(self, group: Sequence[SegmentEntry]) -> None:
        """Merge several segments into one, without their removed documents."""
        contents = self._contents
        with self._one, on_disk(contents.folder):
            with contents.changing():
                latest = {e.name: e for e in contents.manifest.segments}
                if any(e.name not in latest for e in group):
                    return  # merged meanwhile
                group = [latest[e.name] for e in group]
                if not group or (len(group) == 1 and not group[0].removed):
                    return
                segments = [contents.segments[e.name] for e in group]
                name, contents.manifest = contents.manifest.named()
                m = contents.manifest
            documents: list[Tokens] = []
            sources: list[str] = []
            parts: list[SourceEntry] = []
            with watching(contents.folder):
                for entry, segment in zip(group, segments, strict=True):
                    for tokens, source in segment.documents(entry.removed):
                        documents.append(tokens)
                        sources.append(source)
                    removed = set(entry.removed)
                    parts += [s for s in segment.sources if s.name not in removed]
                known = by_name(parts)
                content = content_of(
                    documents, sources, known, group[0].collection, m.tokenizer, m.vocabulary, contents.dtype
                )
                documents.clear()
            origin = tuple((e.name, e.sum) for e in group)
            made = [contents.make_segment(name, content, origin)] if known else []
            with contents.changing():
                # Documents that were removed during the merge are still in the new segment.
                now = {e.name: e.removed for e in contents.manifest.segments}
                removed_since = {s for e in group for s in now[e.name] if s not in e.removed}
                names = {e.name for e in group}
                kept = tuple(e for e in contents.manifest.segments if e.name not in names)
                made = [(replace(entry, removed=tuple(sorted(removed_since))), segment) for entry, segment in made]
                contents.switch(replace(contents.manifest, segments=kept), made, origin)
                contents.publish()


def by_name(parts: Iterable[SourceEntry]) -> dict[str, SourceEntry]:
    """Each source once. Its documents may be in several segments or in memory."""
    found: dict[str, SourceEntry] = {}
    for part in parts:
        found[part.name] = _joined(found[part.name], part) if part.name in found else part
    return found


def _joined(a: SourceEntry, b: SourceEntry) -> SourceEntry:
    """Combine two entries of one source. The entry that is complete has the file's size and time. If both are, the one
    without a size counts: a repair lost documents, and the file must be read again. If none is, the one that got
    further counts."""
    ended = [s for s in (a, b) if s.complete]
    one = min(ended, key=lambda s: s.size) if ended else max((b, a), key=lambda s: (s.texts, s.tokens))
    return replace(one, documents=a.documents + b.documents)
