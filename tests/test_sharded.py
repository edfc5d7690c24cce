"""A store that is filled in shards: the same segments as those of one machine, whoever dies."""

import json
import os
import shutil
from collections import Counter
from functools import partial

import numpy as np
import pytest

from slipstream.datastores.durable.pages import PAGE
from slipstream.datastores.durable.segment import Segment
from slipstream.datastores.durable.store import Store
from slipstream.datastores.ingest import sharded
from slipstream.datastores.ingest.encoding import Encoder
from slipstream.datastores.ingest.ingest import cuts, ingest
from slipstream.datastores.ingest.sharded import ingest_sharded
from slipstream.datastores.ingest.sources import find_sources
from slipstream.errors import StoreError
from slipstream.workers import Here

SEGMENT = 3000


class Letters:
    """A tokenizer: each letter is a token."""

    is_fast = False

    def __call__(self, text, **_):
        return {"input_ids": [ord(c) % 250 for c in text]}


def segments(folder):
    """All bytes of a store's segments but the ids of the store and its log, which are random, and the generation."""
    found = []
    with Store.open(folder) as store:
        assert store.verify() == []
        for entry in store.manifest.segments:
            segment = Segment(folder / entry.name)
            header = {k: v for k, v in segment.header.items() if k not in ("store", "generation", "made_from")}
            found.append((json.dumps(header), segment.path.read_bytes()[PAGE:-PAGE]))
    return found


def text(rng, size):
    return "".join(map(chr, rng.integers(97, 110, size)))


@pytest.fixture
def sources(tmp_path):
    """Empty ones, short ones, some with texts longer than a segment, and equal ones."""
    rng = np.random.default_rng(0)
    there = tmp_path / "texts"
    there.mkdir()
    for i in range(30):
        (there / f"{i:02}.txt").write_text(text(rng, int(rng.integers(0, 900))))
    long = [{"text": text(rng, size)} for size in (10, 2 * SEGMENT + 5, 700, 1, 10)]
    (there / "15.jsonl").write_text("\n".join(map(json.dumps, [*long, long[0], long[2]])))
    (there / "16.txt").write_text("")
    shutil.copy(there / "03.txt", there / "29.txt")
    return find_sources([there])


def local(folder, sources, **options):
    with Store.create(folder, 256, "print", segment_tokens=SEGMENT) as store:
        return ingest(store, sources, Encoder(Letters()), **options)


def in_shards(folder, sources, workers, **options):
    open_store = partial(Store.open, folder, True) if folder.exists() else partial(Store.create, folder, 256, "print")
    with open_store(segment_tokens=SEGMENT) as store:
        return ingest_sharded(store, sources, workers, **options)


def here():
    return Here(partial(Encoder, Letters()))


@pytest.mark.parametrize("deduplicate", [False, True])
@pytest.mark.parametrize("shard_bytes", [2000, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 1 << 30))])
def test_shards_make_the_segments_of_one_machine(tmp_path, sources, deduplicate, shard_bytes):
    options = {"deduplicate": deduplicate, "collection": "c"}
    one = local(tmp_path / "one", sources, **options)
    many = in_shards(tmp_path / "many", sources, here(), shard_bytes=shard_bytes, **options)
    assert one == many
    assert (one.duplicates > 0) == deduplicate
    assert segments(tmp_path / "one") == segments(tmp_path / "many")
    assert len(segments(tmp_path / "one")) > 5
    assert not (tmp_path / "many" / sharded.FOLDER).exists()


def test_cuts_depend_on_lengths_alone():
    rng = np.random.default_rng(1)
    lengths = rng.integers(0, 9, 200).tolist()
    whole = list(cuts(lengths, 20))
    parts, used = [], 0
    for begin in range(0, 200, 7):  # as they come in batches, of which each begins with what the last one left
        some = lengths[begin : begin + 7]
        found = list(cuts(some, 20, used))
        parts += [begin + end for end in found]
        used = sum(some[found[-1] :]) if found else used + sum(some)
    assert whole == parts
    assert all(sum(lengths[a:b]) <= 20 < sum(lengths[a : b + 1]) for a, b in zip([0, *whole], whole, strict=False))


class Mortal(Here):
    """Dies after so many pieces of work: the caller is interrupted, as when all machines go."""

    def __init__(self, lives):
        super().__init__(partial(Encoder, Letters()))
        self.lives, self.did = lives, Counter()

    def submit(self, work, *given):
        if not self.lives:
            raise KeyboardInterrupt
        self.lives -= 1
        self.did[work.__name__] += 1
        return super().submit(work, *given)


def test_an_interrupted_build_does_nothing_twice_that_was_done(tmp_path, sources, monkeypatch):
    local(tmp_path / "one", sources)
    encoded = Counter()
    encode = Encoder.encode
    monkeypatch.setattr(Encoder, "encode", lambda self, texts: encoded.update(texts) or encode(self, texts))
    for lives in (0, 3, 9, 17, 25):
        with pytest.raises(KeyboardInterrupt):
            in_shards(tmp_path / "many", sources, Mortal(lives), shard_bytes=1000)
        assert Store.open(tmp_path / "many").info()["tokens"] == 0
    in_shards(tmp_path / "many", sources, here(), shard_bytes=1000)
    assert segments(tmp_path / "one") == segments(tmp_path / "many")
    once = Counter()
    monkeypatch.setattr(Encoder, "encode", lambda self, texts: once.update(texts) or encode(self, texts))
    in_shards(tmp_path / "other", sources, here(), shard_bytes=1000)
    assert encoded == once


@pytest.mark.parametrize(
    "step", ["link", *(pytest.param(step, marks=pytest.mark.slow) for step in ("switch", "rmtree"))]
)
def test_interrupted_at_its_end_it_goes_on(tmp_path, sources, monkeypatch, step):
    """While segments get their names, before the manifest names them, and before the files on the way are removed."""
    local(tmp_path / "one", sources)
    target = {
        "link": "slipstream.datastores.durable.contents.os.link",
        "switch": "slipstream.datastores.durable.contents.write_manifest",
        "rmtree": "slipstream.datastores.ingest.sharded.shutil.rmtree",
    }[step]
    Store.create(tmp_path / "many", 256, "print", segment_tokens=SEGMENT).close()
    with monkeypatch.context() as patched:
        patched.setattr(target, interrupted(after=2 if step == "link" else 0, then=os.link))
        with pytest.raises(KeyboardInterrupt):
            in_shards(tmp_path / "many", sources, here(), shard_bytes=1000)
    told = in_shards(tmp_path / "many", sources, here(), shard_bytes=1000)
    assert told.known == (len(sources) if step == "rmtree" else 0)
    assert segments(tmp_path / "one") == segments(tmp_path / "many")
    assert not (tmp_path / "many" / "orphans").exists()
    assert not (tmp_path / "many" / sharded.FOLDER).exists()


def interrupted(after, then):
    calls = iter(range(after))

    def call(*given, **named):
        if next(calls, None) is None:
            raise KeyboardInterrupt
        return then(*given, **named)

    return call


def test_a_changed_source_is_read_again(tmp_path, sources):
    with pytest.raises(KeyboardInterrupt):
        in_shards(tmp_path / "many", sources, Mortal(12), shard_bytes=1000)
    sources[0].path.write_text("now it says something else")
    again = find_sources([sources[0].path.parent])
    in_shards(tmp_path / "many", again, here(), shard_bytes=1000)
    local(tmp_path / "one", again)
    assert segments(tmp_path / "one") == segments(tmp_path / "many")


def test_what_one_machine_began_is_not_gone_on_with_in_shards(tmp_path, sources):
    local(tmp_path / "one", sources[:3])
    with pytest.raises(StoreError, match="begun by one machine alone"):
        in_shards(tmp_path / "one", sources, here())


def test_a_damaged_part_is_told(tmp_path, sources):
    with pytest.raises(KeyboardInterrupt):
        in_shards(tmp_path / "many", sources, Mortal(12), shard_bytes=1000)
    for path in (tmp_path / "many" / sharded.FOLDER).glob("*.tokens"):
        path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(StoreError, match=r"is damaged or gone .* delete it, and build again"):
        in_shards(tmp_path / "many", sources, here(), shard_bytes=1000)
