"""The store by laws and worked examples: what is searched, what is kept apart, what is refused, what is repaired."""

import os
import shutil
import threading
from collections import Counter, defaultdict

import numpy as np
import pytest

from slipstream.datastores.durable import contents as contents_module
from slipstream.datastores.durable import lock as lock_module
from slipstream.datastores.durable import log as log_module
from slipstream.datastores.durable import state as state_module
from slipstream.datastores.durable import store as store_module
from slipstream.datastores.durable.compaction import Compaction
from slipstream.datastores.durable.lock import Lock
from slipstream.datastores.durable.log import DOCUMENT, PREFIX, RECORD, Record, salvage_log
from slipstream.datastores.durable.manifest import COPY, NAME, read_manifest
from slipstream.datastores.durable.pages import PAGE, checksum
from slipstream.datastores.durable.repair import repair
from slipstream.datastores.durable.segment import Segment
from slipstream.datastores.durable.store import Document, Store
from slipstream.datastores.durable.witness import SLOTS
from slipstream.datastores.sparse.runs import Run
from slipstream.datastores.sparse.search import FADE, TRUST, SearchShape
from slipstream.datastores.sparse.sort import DEPTH, sort_positions
from slipstream.errors import DamagedError, StoreError

EVERYTHING = SearchShape(matches=1 << 14, nodes=1 << 14, length=5)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "store"


@pytest.fixture
def store(folder):
    with Store.create(folder, 1000) as store:
        yield store


def children(store, text, collection="default"):
    """The tokens that followed the end of a text."""
    tree = store.draft(np.array(text, np.int32), EVERYTHING, collection).tree
    return sorted(tree.tokens[tree.children(0)].tolist())


def documents(store, collection="default"):
    return sorted(d.tolist() for d in store.documents(collection))


# ---- checksums


def slow_xxh64(data, seed):
    """XXH64 written down from its specification, without regard to speed."""
    prime = [
        0,
        11400714785074694791,
        14029467366897019727,
        1609587929392839161,
        9650029242287828579,
        2870177450012600261,
    ]
    mask = (1 << 64) - 1

    def rotate(x, r):
        return ((x << r) | (x >> (64 - r))) & mask

    def step(lane, word):
        return rotate((lane + word * prime[2]) & mask, 31) * prime[1] & mask

    rest = data
    if len(data) >= 32:
        lanes = [seed + prime[1] + prime[2], seed + prime[2], seed, seed - prime[1]]
        while len(rest) >= 32:
            lanes = [step(a & mask, int.from_bytes(rest[8 * i : 8 * i + 8], "little")) for i, a in enumerate(lanes)]
            rest = rest[32:]
        h = sum(rotate(lane, r) for lane, r in zip(lanes, (1, 7, 12, 18), strict=True)) & mask
        for lane in lanes:
            h = ((h ^ step(0, lane)) * prime[1] + prime[4]) & mask
    else:
        h = (seed + prime[5]) & mask
    h = (h + len(data)) & mask
    while len(rest) >= 8:
        h = (rotate(h ^ step(0, int.from_bytes(rest[:8], "little")), 27) * prime[1] + prime[4]) & mask
        rest = rest[8:]
    if len(rest) >= 4:
        h = (rotate(h ^ (int.from_bytes(rest[:4], "little") * prime[1] & mask), 23) * prime[2] + prime[3]) & mask
        rest = rest[4:]
    for byte in rest:
        h = rotate(h ^ (byte * prime[5] & mask), 11) * prime[1] & mask
    h = (h ^ (h >> 33)) * prime[2] & mask
    h = (h ^ (h >> 29)) * prime[3] & mask
    return h ^ (h >> 32)


def test_checksums_are_xxh64():
    assert checksum(b"") == 0xEF46DB3751D8E999
    assert checksum(b"abc") == 0x44BC2CF5AD770999
    data = np.random.default_rng(0).bytes(100)
    for length in range(101):
        for seed in (0, 1, 0x9E3779B97F4A7C15):
            assert checksum(data[:length], seed) == slow_xxh64(data[:length], seed), length


# ---- order


def naive_order(tokens):
    """Positions by their reversed contexts, DEPTH tokens of them, then by themselves."""
    sep = np.iinfo(tokens.dtype).max
    positions = np.array([p for p in range(DEPTH, len(tokens)) if sep not in (tokens[p], tokens[p - 1])], np.int64)
    contexts = [tokens[positions - d] for d in range(1, DEPTH + 1)]
    return positions[np.lexsort([positions, *contexts[::-1]])]


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
@pytest.mark.parametrize("length", [0, 1, 2, 7, 300, 3000])
@pytest.mark.parametrize("vocabulary", [1, 2, 50, 60_000])
def test_positions_are_sorted_by_what_precedes_them(dtype, length, vocabulary):
    rng = np.random.default_rng(length)
    some = [rng.integers(0, vocabulary, n) for n in (length, 1, length // 3, 2)]
    run = Run.of([*some, some[0]], dtype)  # a whole document twice: ties far beyond DEPTH
    assert np.array_equal(run.positions, naive_order(run.tokens))


@pytest.mark.parametrize("dtype", [np.uint16, pytest.param(np.uint32, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["random", "one token", "period", "copies"])
def test_long_texts_are_sorted_the_same_on_many_threads(dtype, kind):
    rng, length = np.random.default_rng(1), (1 << 17) + 1000
    text = {
        "random": rng.integers(0, 300, length),
        "one token": np.full(length, 7),
        "period": np.arange(length) % 3,
        "copies": np.tile(rng.integers(0, 300, 5000), length // 5000 + 1),
    }[kind]
    tokens = Run.of([text[:100], text], dtype).tokens
    assert np.array_equal(sort_positions(tokens, threads=3), naive_order(tokens))


# ---- search


def naive_draft(documents, text, shape):
    """All continuations of all matches: {path: (mass, depth)}, and how many matches have which length."""
    text, counts, mass = list(text), Counter(), defaultdict(float)
    for document in documents:
        for p in range(1, len(document)):
            n = 0
            while n < min(p, len(text), shape.longest) and document[p - 1 - n] == text[-1 - n]:
                n += 1
            if n < shape.shortest:
                continue
            counts[n] += 1
            continuation = tuple(document[p : p + shape.length])
            for end in range(len(continuation) + 1):
                mass[n, continuation[:end]] += TRUST**n
    levels = sorted(counts, reverse=True)
    if not shape.fill:
        levels = levels[:1]
    total = defaultdict(float)
    for (n, path), weight in mass.items():
        if n in levels:
            total[path] += weight
    return dict(total), levels, [counts[n] for n in levels]


def paths_of(tree):
    paths = [()]
    for token, parent in zip(tree.tokens[1:].tolist(), tree.parents[1:].tolist(), strict=True):
        paths.append((*paths[parent], token))
    return paths


def check_draft(found, documents, text, shape, count=True):
    mass, lengths, counts = naive_draft(documents, text, shape)
    if count:
        assert (found.lengths.tolist(), found.counts.tolist()) == (lengths, counts)
    paths = paths_of(found.tree)
    assert len(set(paths)) == len(paths) == min(shape.nodes, max(len(mass) - 1, 0)) + 1
    shares = [mass[p] / mass[p[:-1]] for p in paths[1:]]
    np.testing.assert_allclose(found.tree.score, [1, *shares], rtol=1e-5)
    # What was left out is worth no more than what was taken.
    worth = {p: m * FADE ** len(p) for p, m in mass.items() if p}
    left_out = [w for p, w in worth.items() if p not in set(paths)]
    assert max(left_out, default=0) <= min([worth[p] for p in paths[1:]], default=0) * (1 + 1e-9)


SHAPES = [
    EVERYTHING,
    SearchShape(longest=4, shortest=2, matches=1 << 14, nodes=1 << 14, length=3),
    SearchShape(longest=32, matches=1 << 14, nodes=10, length=8),
    SearchShape(matches=1 << 14, nodes=1 << 14, length=4, fill=False),
]


def memory_only(store, texts):
    for text in texts:
        store.append(text)


def segment_each(store, texts):
    for text in texts:
        store.append(text)
        store.flush()


def some_of_each(store, texts):
    for i, text in enumerate(texts):
        store.append(text)
        if i % 4 == 3 and i < len(texts) - 2:
            store.flush()


def compacted(store, texts):
    segment_each(store, texts)
    store.compact()


@pytest.mark.slow
@pytest.mark.parametrize("spread", [memory_only, segment_each, some_of_each, compacted])
@pytest.mark.parametrize("vocabulary", [1000, 70_000])
def test_a_search_is_the_naive_one_however_documents_are_spread(folder, spread, vocabulary):
    for seed in range(4):
        rng = np.random.default_rng(seed)
        letters = np.sort(rng.choice(vocabulary, 2 + seed, replace=False))
        texts = [letters[rng.integers(0, len(letters), rng.integers(1, 40))].tolist() for _ in range(18)]
        with Store.create(folder / str(seed), vocabulary) as store:
            spread(store, texts)
            for shape in SHAPES:
                for _ in range(12):
                    text = letters[rng.integers(0, len(letters), rng.integers(1, 40))]
                    if rng.random() < 0.3:
                        text[-1] = rng.integers(0, vocabulary)
                    check_draft(store.draft(text.astype(np.int32), shape), texts, text.tolist(), shape)


def test_fewer_matches_than_there_are_are_spread_over_all(folder):
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, 3, 60).tolist() for _ in range(20)]
    with Store.create(folder, 1000) as store:
        some_of_each(store, texts)
        for matches in (1, 5, 64):
            text, shape = np.array([0, 1, 2], np.int32), SearchShape(matches=matches, nodes=1 << 14)
            found = store.draft(text, shape)
            mass, lengths, counts = naive_draft(texts, text.tolist(), shape)
            assert found.lengths.tolist() == lengths[: len(found.lengths)]
            assert found.counts.tolist() == counts[: len(found.counts)]
            assert set(paths_of(found.tree)) <= set(mass)
            assert 1 <= len(found.tree.children(0)) <= matches


def test_matches_are_spread_evenly(store):
    for before in range(10, 20):  # by which they are sorted
        store.append([before, 3, 100 + before])
    tree = store.draft(np.array([3], np.int32), SearchShape(longest=1, matches=5)).tree
    assert sorted(tree.tokens[1:].tolist()) == [111, 113, 115, 117, 119]


def test_no_match_crosses_a_document(store):
    store.append([1, 2, 3])
    store.append([4, 5, 6])
    for _ in range(2):
        assert children(store, [3]) == []  # what follows it is another document
        assert children(store, [2]) == [3]
        found = store.draft(np.array([2, 3, 4], np.int32), EVERYTHING)
        assert found.lengths.tolist() == [1]  # not 2 3 4, though these lie one after the other
        assert found.tree.tokens.tolist() == [4, 5, 6]
        between = np.iinfo(np.uint16).max  # what stands between documents is no token of a text
        assert store.draft(np.array([between, 4], np.int32), EVERYTHING).lengths.tolist() == [1]
        store.flush()


# ---- adding


def test_an_append_is_found_at_once_and_after_opening_again(folder, store):
    assert children(store, [5, 6]) == []
    store.append([5, 6, 7], "a")
    assert children(store, [5, 6]) == [7]
    store.append([5, 6, 8], "b")
    assert children(store, [5, 6]) == [7, 8]
    store.flush()
    store.append([5, 6, 9], "b")
    store.close()
    for write in (False, True):
        with Store.open(folder, write) as again:
            assert children(again, [5, 6]) == [7, 8, 9]
            assert {s.name: s.documents for s in again.sources().values()} == {"a": 1, "b": 2}
            assert again.verify() == []


def test_a_reader_in_another_process_sees_an_append_after_refresh(folder, store, forker):
    store.append([5, 6, 7])
    forker.start("follow", folder=str(folder), text=[5, 6])
    lines = forker.lines()
    assert next(lines) == "ready"
    store.append([5, 6, 8])
    (folder / "asked0").touch()
    assert next(lines) in ("[6, 7, 8]", "[6, 8, 7]")
    store.compact()
    store.remove("")
    store.append([5, 6, 9])
    (folder / "asked1").touch()
    assert next(lines) == "[6, 9]"
    assert list(lines) == []


def test_a_reader_sees_acknowledged_records_only(folder, store):
    store.append([1, 2, 3])
    reader = Store.open(folder)
    log = folder / store.manifest.log
    payload = Record(DOCUMENT, "default", "", np.array([1, 2, 4], "<u2").tobytes()).payload()
    seed = (int(store.manifest.log_id, 16) + log.stat().st_size) % (1 << 64)
    with log.open("ab") as file:  # whole, but its writer did not get to say so
        file.write(RECORD.pack(b"\xa5SLR", len(payload), checksum(payload, seed)) + payload)
    reader.refresh()
    assert children(reader, [1, 2]) == [3]
    assert children(Store.open(folder), [1, 2]) == [3]
    store.close()
    with Store.open(folder, write=True) as again:  # the next writer takes it, and says so
        assert children(again, [1, 2]) == [3, 4]
        reader.refresh()
        assert children(reader, [1, 2]) == [3, 4]


def test_a_reader_holds_up_no_writer_while_it_parses_the_log(folder, store, monkeypatch):
    store.append([1, 2, 3])
    store.close()
    monkeypatch.setattr(lock_module, "READERS", 1)
    parse, turns = log_module._parsed, [0]

    def parsed(*given):
        Lock(folder).close()
        turns[0] += 1
        return parse(*given)

    monkeypatch.setattr(log_module, "_parsed", parsed)
    reader = Store.open(folder)
    reader.refresh()
    assert turns[0] > 0
    assert children(reader, [1, 2]) == [3]


def test_a_reader_sees_what_was_added_while_it_read_the_log(folder, store, monkeypatch):
    store.append([1, 2, 3])
    store.close()
    ask, left = log_module.no_writer, [1]

    def asked(there):
        if left:
            left.pop()
            with Store.open(folder, write=True) as late:
                late.append([1, 2, 4])
        return ask(there)

    monkeypatch.setattr(log_module, "no_writer", asked)
    assert children(Store.open(folder), [1, 2]) == [3, 4]


def test_a_reader_that_a_flush_overtakes_reads_the_next_manifest(folder, store, monkeypatch):
    store.append([1, 2, 3])
    parse, turns = state_module.parse_manifest, [0]

    def overtaken(*arguments):
        manifest = parse(*arguments)
        turns[0] += 1
        if turns[0] < 20:
            store.append([1, 2, 3 + turns[0]])
            store.flush()  # deletes the log that this manifest names
        return manifest

    monkeypatch.setattr(Compaction, "in_background", lambda _: None)
    monkeypatch.setattr(state_module, "parse_manifest", overtaken)
    reader = Store.open(folder)
    assert turns[0] >= 20
    assert children(reader, [1, 2]) == list(range(3, 23))


def test_a_reader_lets_go_of_merged_segments(folder, store):
    for i in range(3):
        store.append([1, i])
        store.flush()
    reader = Store.open(folder)
    store._compaction.merge(list(store.manifest.segments))
    reader.refresh()
    assert reader.manifest.segments == store.manifest.segments
    assert children(reader, [1]) == [0, 1, 2]


def test_what_lies_behind_a_torn_record_never_comes_back(folder, store):
    """Of a batch that the power cut off, the disk may have kept the second record and not the first."""
    store.close()
    log = folder / store.manifest.log
    with Store.open(folder, write=True) as again:
        again.extend([Document([1, 2]), Document([1, 3])])
    whole = log.read_bytes()
    half = len(whole) - PAGE - (len(whole) - PAGE) // 2
    torn = bytearray(whole)
    slot = PAGE.to_bytes(8, "little")
    for at in SLOTS:
        torn[at : at + 16] = slot + checksum(slot).to_bytes(8, "little")
    torn[PAGE + 20] ^= 1
    log.write_bytes(torn)
    (folder / "log.end").unlink()
    with Store.open(folder, write=True) as again:
        assert documents(again) == []
        again.append([1, 4])  # as long as the torn one
        assert again.contents.place.length == PAGE + half
    with Store.open(folder, write=True) as again:
        assert documents(again) == [[1, 4]]


def test_one_writer_and_many_readers(folder, store):
    store.append([1, 2, 3])
    with pytest.raises(StoreError, match=f"being written by process {os.getpid()}: there can be one writer"):
        Store.open(folder, write=True)
    with pytest.raises(StoreError, match="being written"):
        repair(folder)
    readers = [Store.open(folder) for _ in range(3)]
    assert [children(reader, [2]) for reader in readers] == [[3]] * 3
    with pytest.raises(StoreError, match="open for reading: open it with write=True"):
        readers[0].append([1])
    store.close()
    with pytest.raises(StoreError, match="open for reading"):
        store.append([1])
    Store.open(folder, write=True).close()


def test_threads_may_write_to_one_store(store, monkeypatch):
    monkeypatch.setattr(store_module, "MEMORY_TOKENS", 100)

    def write(number):
        for i in range(100):
            store.append([number, i, number], f"s{number}", f"c{number}")

    threads = [threading.Thread(target=write, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for n in range(3):
        assert documents(store, f"c{n}") == [[n, i, n] for i in range(100)]
    assert store.verify() == []


def test_tokens_are_as_wide_as_the_vocabulary_needs(tmp_path):
    for vocabulary, width in ((65_535, 16), (65_536, 32), (150_000, 32)):
        folder = tmp_path / str(vocabulary)
        with Store.create(folder, vocabulary) as store:
            store.append([1, vocabulary - 1, 2])
            assert children(store, [vocabulary - 1]) == [2]
            store.flush()
            assert children(store, [1]) == [vocabulary - 1]
            assert store.info()["width"] == width
            for bad in ([vocabulary], [-1], [1, 2, 1 << 40]):
                with pytest.raises(StoreError, match=rf"ids from 0 to {vocabulary - 1}, found \[{bad[-1]}\]"):
                    store.append(bad)
            assert documents(store) == [[1, vocabulary - 1, 2]]


def test_a_document_longer_than_a_segment_is_refused(folder):
    with Store.create(folder, 10, segment_tokens=50) as store:
        with pytest.raises(StoreError, match="document of 50 tokens is longer than a segment"):
            store.append([1] * 50)
        store.append([1] * 49)
        assert documents(store) == [[1] * 49]


def test_segments_that_are_too_long_are_refused(folder):
    with pytest.raises(StoreError, match="too long: at most 2147483648"):
        Store.create(folder, 10, segment_tokens=(1 << 31) + 1)
    assert not folder.exists()


def test_another_tokenizer_is_refused(folder):
    Store.create(folder, 1000, tokenizer="abc").close()
    Store.open(folder, tokenizer="abc").close()
    Store.open(folder).close()
    for write in (False, True):
        with pytest.raises(StoreError, match=r"another tokenizer \(fingerprint abc, yours is xyz\)"):
            Store.open(folder, write, tokenizer="xyz")
    Store.open(folder, write=True).close()  # the lock was given back


def test_a_store_is_not_made_over_another(folder, store):
    with pytest.raises(StoreError, match=r"being written|already holds"):
        Store.create(folder, 1000)
    store.append([1, 2, 3])
    store.flush()
    store.close()
    with pytest.raises(StoreError, match="already holds a datastore: add to it"):
        Store.create(folder, 1000)
    (folder / NAME).unlink()
    for _ in range(2):
        with pytest.raises(StoreError, match=r"holds a datastore without store\.json: `slipstream store repair`"):
            Store.create(folder, 1000)
        (folder / COPY).unlink(missing_ok=True)
    assert repair(folder).kept == 1


def test_names_may_be_any_bytes_up_to_their_limits(folder, store):
    odd = os.fsdecode(b"a\xff.txt")
    store.append([1, 2], odd, "ü" * 100)
    store.flush()
    store.append([3, 4], odd, "ü" * 100)
    with pytest.raises(StoreError, match="a name has 1 to 200 bytes"):
        store.append([1], "", "ü" * 101)
    with pytest.raises(StoreError, match="at most 65535 bytes"):
        store.append([1], "x" * 65_536)
    store.close()
    with Store.open(folder, write=True) as again:
        assert [s.name for s in again.sources("ü" * 100).values()] == [odd]
        assert again.remove(odd, "ü" * 100) == 2
        again.compact()
        assert again.verify() == []


def test_what_is_not_the_stores_stays(folder, store):
    store.close()
    (folder / "build.log").write_text("mine")
    (folder / "00000009.seg").write_text("left by a crash")
    (folder / "00000010.making").write_text("left by a crash")
    Store.open(folder, write=True).close()
    assert (folder / "build.log").exists()
    assert not list(folder.glob("0000001*")) + list(folder.glob("00000009*"))


@pytest.mark.slow
def test_many_small_segments_become_few(folder, monkeypatch):
    """However long the names are that the new segments' headers must hold."""
    long = "\x01" * 200
    with Store.create(folder, 1000, long) as store:
        monkeypatch.setattr(Compaction, "in_background", lambda _: None)
        for i in range(120):
            store.append([1, i], long, long)
            store.flush()
        assert len(store.manifest.segments) == 120
        store.compact()
        store.compact()
        assert len(store.manifest.segments) == 1
        assert documents(store, long) == [[1, i] for i in range(120)]
        assert store.verify() == []
        with pytest.raises(StoreError, match="a fingerprint has at most 200 bytes"):
            Store.create(folder / "other", 1000, long + "x")


def test_a_new_folder_is_durable_itself(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(store_module, "sync_folder", synced.append)
    Store.create(tmp_path / "a" / "b", 1000).close()
    assert synced == [tmp_path / "a", tmp_path]


# ---- collections


@pytest.mark.slow
def test_tenants_never_see_each_others_text(folder):
    rng = np.random.default_rng(0)
    tenants = {"one": (0, 500), "other": (500, 1000)}
    with Store.create(folder, 1000) as store:
        for i in range(40):
            for name, (low, high) in tenants.items():
                store.append(rng.integers(low, high, 50), f"s{i}", name)
            if i == 20:
                store.flush()
        proposed = Counter()
        for i in range(10_000):
            name = ("one", "other")[i % 2]
            low, high = tenants[name]
            if i % 100 < 2:
                store.append(rng.integers(low, high, 20), "live", name)
            if i == 5000:
                store.compact()
            asked = rng.integers(0, 1000, 3) if i % 5 == 0 else rng.integers(low, high, 3)
            drafted = store.draft(asked.astype(np.int32), SearchShape(), name).tree.tokens[1:]
            assert np.all((drafted >= low) & (drafted < high)), (i, name, drafted)
            proposed[name] += len(drafted)
        assert min(proposed.values()) > 10_000
        assert children(store, [5], "nobody") == []


# ---- removing


def holds(folder, tokens):
    """Whether a file of the store has these tokens."""
    return any(np.array(tokens, "<u2").tobytes() in p.read_bytes() for p in folder.iterdir())


def test_a_removed_source_is_gone_at_once_and_its_bytes_after_compaction(folder, store):
    secret = list(range(900, 930))
    store.append(secret, "secret")
    store.append([900, 1], "kept")
    store.flush()
    store.append(secret, "secret")
    reader = Store.open(folder)
    assert store.remove("secret") == 2
    assert store.remove("secret") == 0
    reader.refresh()
    for view in (store, reader, Store.open(folder)):
        assert children(view, [900]) == [1]
        assert children(view, secret[:5]) == []
        assert documents(view) == [[900, 1]]
        assert list(view.sources()) == ["kept"]
    assert store.info()["removed_documents"] == 1
    assert store.info()["documents"] == 1
    store.flush()  # the log that says so is gone now
    assert children(Store.open(folder), [900]) == [1]
    assert holds(folder, secret)
    store.compact()
    assert not holds(folder, secret)
    assert store.info()["removed_documents"] == 0
    assert children(store, [900]) == [1]
    assert children(Store.open(folder), [900]) == [1]
    assert store.verify() == []


def test_a_removed_source_can_be_added_again(folder, store):
    store.append([1, 2], "x")
    store.flush()
    store.remove("x")
    store.append([1, 3], "x")
    for step in (store.flush, store.compact, lambda: None):
        assert children(store, [1]) == [3]
        assert children(Store.open(folder), [1]) == [3]
        assert store.sources()["x"].documents == 1
        step()
    store.remove("x")
    assert children(store, [1]) == []
    store.compact()
    assert store.manifest.segments == ()


def test_what_is_removed_while_segments_are_merged_stays_removed(folder, store, monkeypatch):
    for i in range(3):
        store.append([1, 10 + i], "x")
        store.append([1, 20 + i], "y")
        store.flush()
    write = contents_module.write_segment

    def meanwhile(path, *rest):
        write(path, *rest)
        monkeypatch.setattr(contents_module, "write_segment", write)
        assert store.remove("x") == 3
        store.append([1, 30], "x")  # and comes again
        store.flush()

    store.flush()
    monkeypatch.setattr(contents_module, "write_segment", meanwhile)
    store.compact()
    for view in (store, Store.open(folder)):
        assert children(view, [1]) == [20, 21, 22, 30]
        assert view.sources()["x"].documents == 1
    store.compact()
    assert children(store, [1]) == [20, 21, 22, 30]
    assert store.verify() == []


def test_sources_remember_the_file_they_were(folder, store):
    store.extend([Document([1, 2], "a"), Document([3, 4], "a")])
    store.flush()
    store.extend([Document([5, 6], "a", completes=(100, 7)), Document((), "empty", completes=(0, 8))])
    for step in (store.flush, store.compact, lambda: None):
        for view in (store, Store.open(folder)):
            a, empty = view.sources()["a"], view.sources()["empty"]
            assert (a.documents, a.size, a.modified, a.complete) == (3, 100, 7, True)
            assert (empty.documents, empty.size, empty.modified, empty.complete) == (0, 0, 8, True)
        step()
    assert store.remove("empty") == 0
    assert "empty" not in store.sources()
    store.compact()
    assert list(Store.open(folder).sources()) == ["a"]


# ---- full disks


def failing(*_, **__):
    raise OSError(28, "No space left on device")


def test_a_full_disk_takes_nothing_back(folder, store, monkeypatch):
    store.append([1, 2])
    real = os.fdatasync
    monkeypatch.setattr(os, "fdatasync", failing)
    with pytest.raises(StoreError, match=r"nothing was added, since writing failed.*No space left"):
        store.extend([Document([1, 3]), Document([1, 4])])
    monkeypatch.setattr(os, "fdatasync", real)
    assert children(store, [1]) == [2]
    store.append([1, 5])  # as long as the first of those that failed: the second must not come back behind it
    assert children(store, [1]) == [2, 5]
    for place in ("write_segment", "write_manifest"):
        monkeypatch.setattr(contents_module, place, failing)
        for call in (store.flush, store.compact):
            with pytest.raises(StoreError, match=r"failed .*No space left.* not lost"):
                call()
        monkeypatch.undo()
        assert children(store, [1]) == [2, 5]
        store.append([1, 5], "again")
        assert store.remove("again") == 1
    assert children(Store.open(folder), [1]) == [2, 5]
    store.flush()
    monkeypatch.setattr(contents_module, "write_segment", failing)
    store.append([1, 6])
    with pytest.raises(StoreError, match="not lost"):
        store.compact()
    monkeypatch.undo()
    store.compact()
    store.close()
    with Store.open(folder, write=True) as again:
        assert children(again, [1]) == [2, 5, 6]
        assert again.verify() == []


# ---- damage: each kind by what it says. test_store_crash.py has random ones.


def example(folder):
    """A store of two segments and a log."""
    with Store.create(folder, 1000, "print") as store:
        for _ in range(2):
            for i in range(20):
                store.append(np.arange(500) + i, f"s{i % 2}")
            store.flush()
        store.append([1, 2, 3], "logged")
        store.append([4, 5, 6], "logged")
    return [folder / e.name for e in read_manifest(folder).segments], folder / read_manifest(folder).log


def change(path, at, data=None):
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 0x20]) if data is None else data)


def section(path, name):
    return Segment(path).header["sections"][name][0]


@pytest.mark.parametrize(
    ("part", "says"),
    [
        ("header", "does not begin with the header of a segment"),
        ("cut", "bytes instead of"),
        ("tokens", "page 0 of its tokens is damaged"),
        ("tokens_sums", "page 0 of its tokens is damaged"),
        ("positions", "page 0 of its positions is damaged"),
        ("keys", "page 0 of its keys is damaged"),
    ],
)
def test_a_damaged_segment_says_so_when_it_is_searched(folder, part, says):
    (path, _), _ = example(folder)
    if part == "cut":
        os.truncate(path, path.stat().st_size - 1)
    else:
        change(path, 30 if part == "header" else section(path, part))
    with pytest.raises(DamagedError, match=says) as error, Store.open(folder) as store:
        store.draft(np.array([10, 11], np.int32), EVERYTHING)
    assert path.name in str(error.value)
    assert "slipstream store repair" in str(error.value)


@pytest.mark.parametrize("part", ["sources", "documents"])
def test_a_damaged_table_says_so_when_it_is_needed(folder, part):
    (path, _), _ = example(folder)
    change(path, section(path, part))
    with Store.open(folder, write=True) as store:
        assert children(store, [499]) != []  # not needed to search
        with pytest.raises(DamagedError, match=f"its {part} are damaged; `slipstream store repair`"):
            list(store.documents())
        for call in (store.compact, lambda: store.remove("s0"))[: 2 if part == "sources" else 1]:
            with pytest.raises(DamagedError, match=f"its {part} are damaged"):
                call()
        assert [p for p in store.verify() if f"its {part} are damaged" in p]


def test_a_page_is_checked_however_far_a_continuation_reaches(folder):
    with Store.create(folder, 5000) as store:
        store.append(np.arange(5000))
        store.flush()
        path = folder / store.manifest.segments[0].name
    page = PAGE // 2
    change(path, section(path, "tokens") + PAGE)  # the token `page - DEPTH`
    first = page - DEPTH
    with Store.open(folder) as store:
        for reach in (1, 40, 100):
            text = np.array([first - reach - 1], np.int32)
            short = store.draft(text, SearchShape(length=1, longest=1)).tree.tokens if reach > 40 else None
            assert short is None or short.tolist() == [first - reach - 1, first - reach]
            with pytest.raises(DamagedError, match="page 1 of its tokens"):
                store.draft(text, SearchShape(length=reach + 1, nodes=200))


def test_a_damaged_log_says_so(folder):
    _, log = example(folder)
    size = log.stat().st_size
    whole = log.read_bytes()

    def says(match):
        for write in (False, True):
            with pytest.raises(DamagedError, match=match):
                Store.open(folder, write)
        log.write_bytes(whole)

    for at in (PAGE, PAGE + 5, PAGE + 10, size - 1):
        change(log, at)
        says(
            r"the record at byte \d+ is damaged or missing, and \d+ bytes were acknowledged; `slipstream store repair`"
        )
    os.truncate(log, size - 1)
    says("damaged or missing")
    change(log, 0)
    says("does not begin with the header of a log")
    for at in SLOTS:
        change(log, at)
    says("does not begin with the header of a log")
    log.unlink()
    says("the store's manifest names it, but there is no such file; `slipstream store repair`")
    # One slot alone is no loss, unless there is something behind the last whole record.
    for at in SLOTS:
        change(log, at)
        assert children(Store.open(folder), [4]) == [5]
        change(log, size - 1)
        says("damaged or missing")


def test_a_damaged_manifest_says_so(folder):
    segments, _ = example(folder)
    path = folder / NAME
    whole = path.read_bytes()
    for damaged, says in [
        (whole.replace(b"1000", b"1001"), "its checksum is wrong"),
        (whole[:-1], "is damaged"),
        (b"", "is damaged"),
        (b"[]", "is damaged"),
        (b"7", "is damaged"),
        (b"\xff", "is damaged"),
    ]:
        path.write_bytes(damaged)
        with pytest.raises(DamagedError, match=f"{NAME} is damaged: .*{says if says[:3] == 'its' else ''}"):
            Store.open(folder)
    path.unlink()
    with pytest.raises(DamagedError, match=r"has lost its store\.json: `slipstream store repair`"):
        Store.open(folder)
    (folder / COPY).unlink()
    with pytest.raises(StoreError, match=r"is no datastore: it has no store\.json"):
        Store.open(folder)
    with pytest.raises(StoreError, match="is no datastore: no such folder"):
        Store.open(folder / "nowhere")
    path.write_bytes(whole)
    segments[0].rename(folder / "elsewhere")
    with pytest.raises(DamagedError, match="names it, but there is no such file"):
        Store.open(folder)
    shutil.copy(segments[1], segments[0])
    change(segments[0], 0)
    with pytest.raises(DamagedError, match="header of a segment"):
        Store.open(folder)


def test_a_store_of_another_format_or_with_a_foreign_segment_is_refused(folder, tmp_path, monkeypatch):
    segments, _ = example(folder)
    with Store.create(tmp_path / "foreign", 900) as foreign:
        foreign.append([1, 2, 3])
        foreign.flush()
    shutil.copy(tmp_path / "foreign" / foreign.manifest.segments[0].name, segments[0])
    with pytest.raises(DamagedError, match="is not the segment that the manifest names"):
        Store.open(folder)
    monkeypatch.setattr("slipstream.datastores.durable.manifest.READABLE", (3,))
    monkeypatch.setattr("slipstream.datastores.durable.manifest.FORMAT", 3)
    for call in (Store.open, repair):
        with pytest.raises(StoreError, match="has format 2, this version reads 3: update slipstream"):
            call(folder)


def test_verify_finds_what_opening_does_not(folder):
    segments, _ = example(folder)
    assert Store.open(folder).verify() == []
    change(segments[0], section(segments[0], "positions"))
    change(segments[1], section(segments[1], "tokens") + PAGE)
    change(segments[1], segments[1].stat().st_size - PAGE)
    change(folder / COPY, 5)
    found = Store.open(folder).verify()
    for says in ("1 pages of its positions are damaged", "1 pages of its tokens", "second header", COPY):
        assert [p for p in found if says in p], says


# ---- repair


def test_repair_leaves_a_sound_store_alone(folder):
    example(folder)
    before = {p.name: p.read_bytes() for p in folder.glob("0*")}
    report = repair(folder)
    assert (report.kept, report.lost, report.set_aside, report.sentences) == (42, 0, (), ())
    assert {p.name: p.read_bytes() for p in folder.glob("0*")} == before
    with pytest.raises(StoreError, match="neither a manifest nor a segment"):
        repair(folder / "nowhere")


def test_repair_keeps_the_documents_in_whole_pages(folder):
    (path, _), _ = example(folder)
    original = path.read_bytes()
    change(path, section(path, "tokens") + PAGE + 100)
    lost = sum(start < 2 * PAGE // 2 and start + 500 > PAGE // 2 for start in range(DEPTH, 10_000, 501))
    report = repair(folder)
    assert (report.lost, report.kept) == (lost, 42 - lost)
    assert report.set_aside == (path.name,)
    assert (folder / "damaged" / path.name).read_bytes() != original
    with Store.open(folder, write=True) as store:
        assert store.verify() == []
        assert len(documents(store)) == 42 - lost
        # Both sources lost something: whoever adds them again must not take them for known.
        assert {(s.size, s.complete) for s in store.sources().values() if s.name != "logged"} == {(-1, True)}


def test_repair_of_a_cut_off_segment_keeps_what_is_left(folder):
    (path, _), _ = example(folder)
    os.truncate(path, section(path, "tokens") + 3 * PAGE + 17)
    left = sum(start + 500 <= 3 * PAGE // 2 for start in range(DEPTH, 10_000, 501))
    assert repair(folder).kept == 22 + left
    assert Store.open(folder).verify() == []


@pytest.mark.parametrize("part", ["header", "tokens_sums", "positions", "keys", "last page", "documents"])
def test_repair_loses_nothing_that_can_be_made_again(folder, part):
    (path, _), _ = example(folder)
    whole = documents(Store.open(folder))
    places = {"header": 100, "last page": path.stat().st_size - PAGE}
    change(path, places.get(part) or section(path, part))
    report = repair(folder)
    assert (report.kept, report.lost) == (42, 0)
    with Store.open(folder) as store:
        assert documents(store) == whole
        assert store.verify() == []
        assert set(store.sources()) == {"s0", "s1", "logged"}


def test_documents_whose_sources_are_lost_are_salvaged(folder):
    (path, _), _ = example(folder)
    whole = documents(Store.open(folder))
    change(path, section(path, "sources"))
    report = repair(folder)
    assert (report.kept, report.lost) == (42, 0)
    with Store.open(folder) as store:
        assert documents(store) == whole
        assert store.sources()["salvaged"].documents == 20


def test_repair_does_not_bring_removed_documents_back(folder):
    (path, _), _ = example(folder)
    with Store.open(folder, write=True) as store:
        store.remove("s0")
    change(path, section(path, "sources"))
    report = repair(folder)
    assert report.kept == 12  # none of that segment: which were removed can't be told
    assert any("can't be told" in sentence for sentence in report.sentences)
    assert Store.open(folder).verify() == []


def test_repair_of_a_log_keeps_every_whole_record(folder, store):
    for i in range(5):
        store.extend([Document([1, 10 + i], f"s{i}", completes=(5, 5))])
    store.close()
    log = folder / store.manifest.log
    change(log, PAGE + RECORD.size + PREFIX.size + 3)  # in the first record
    assert len(salvage_log(log)[0]) == 9
    report = repair(folder)
    assert report.kept == 4
    assert report.set_aside == (log.name,)
    with Store.open(folder) as again:
        assert documents(again) == [[1, 11], [1, 12], [1, 13], [1, 14]]
        assert {s.size for s in again.sources().values()} == {-1}
        assert again.verify() == []


def test_repair_makes_a_manifest_from_its_copy(folder):
    example(folder)
    with Store.open(folder, write=True) as store:
        store.remove("s0")
        store.note(what="a test")
    (folder / NAME).write_bytes(b"?")
    report = repair(folder)
    assert (report.kept, report.set_aside) == (22, (NAME,))
    with Store.open(folder) as store:
        assert store.manifest.notes == {"what": "a test"}
        assert store.verify() == []


def test_repair_makes_a_manifest_from_the_segments(folder):
    example(folder)
    whole = documents(Store.open(folder))
    for name in (NAME, COPY):
        (folder / name).unlink()
    report = repair(folder)
    assert report.kept == 42
    assert "from the segments" in report.sentences[0]
    with Store.open(folder, tokenizer="print") as store:
        assert documents(store) == whole
        assert store.manifest.tokenizer == "print"
        assert store.verify() == []


class Crash(BaseException):
    pass


def crash_after(patch, steps, names):
    """Let the given functions of `os` work so many times."""
    left = [steps]

    def crashing(real):
        def run(*arguments, **options):
            if left[0] == 0:
                raise Crash
            left[0] -= 1
            return real(*arguments, **options)

        return run

    for name in names:
        patch.setattr(os, name, crashing(getattr(os, name)))


@pytest.fixture(scope="module", params=["flush", "compact"])
def crashes(request, tmp_path_factory):
    """What a crash within a call may leave: a copy of the files for each step that finds them changed."""
    folder, left = tmp_path_factory.mktemp("crashes"), {}

    def leave():
        there = {path.name: path.read_bytes() for path in sorted((folder / "store").iterdir())}
        if hash(tuple(there.items())) not in left:
            left[hash(tuple(there.items()))] = shutil.copytree(folder / "store", folder / str(len(left)))

    def watched(real):
        return lambda *given, **options: leave() or real(*given, **options)

    with pytest.MonkeyPatch.context() as patch, Store.create(folder / "store", 1000) as store:
        patch.setattr(Compaction, "in_background", lambda _: None)
        for i in range(6):
            store.append([1, 2, 3], "same", ("default", "other")[i % 2])
            if i % 3 == 2:
                store.flush()
        store.append([4, i], "new")
        store.append([4, i], "new", "other")
        for name in ("fsync", "fdatasync", "rename", "unlink"):
            patch.setattr(os, name, watched(getattr(os, name)))
        getattr(store, request.param)()
        leave()
    assert len(left) > 10
    return left.values()


@pytest.mark.slow
@pytest.mark.parametrize("reopened", [False, True])
@pytest.mark.parametrize("lost", [(NAME, COPY), (NAME,), ()])
def test_after_a_crash_repair_counts_nothing_twice(crashes, folder, lost, reopened):
    """A crash at every step leaves files whose documents are in others too. With no manifest, headers must tell."""
    for left in crashes:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(left, folder)
        if reopened:
            Store.open(folder, write=True).close()
        for name in lost:
            (folder / name).unlink()
        report = repair(folder)
        assert (report.kept, report.lost) == (8, 0), left.name
        with Store.open(folder, write=True) as again:
            for collection in ("default", "other"):
                assert documents(again, collection) == [[1, 2, 3]] * 3 + [[4, 5]]
            assert again.verify() == []


def test_a_damaged_copy_of_what_is_whole_elsewhere_is_left_out(folder, tmp_path):
    """A merged segment beside those it was made from: whoever salvaged it too would have most documents twice."""
    with Store.create(folder, 1000) as store:
        for n in range(2):
            for i in range(20):
                store.append(np.arange(100) + 20 * n + i, f"s{i}")
            store.flush()
        parts = [shutil.copy(path, tmp_path) for path in folder.glob("*.seg")]
        store.compact()
        expected = documents(store)
    (merged,) = folder.glob("*.seg")
    assert len(parts) == 2
    assert len(expected) == 40
    for path in parts:
        shutil.copy(path, folder)
    for name in (NAME, COPY):
        (folder / name).unlink()
    change(merged, section(merged, "tokens"))
    report = repair(folder)
    assert (report.kept, report.lost) == (40, 0)
    with Store.open(folder) as again:
        assert documents(again) == expected
        assert again.verify() == []
    assert (folder / "damaged" / merged.name).exists()


def test_an_interrupted_repair_can_be_repeated(folder, tmp_path, monkeypatch):
    (path, _), log = example(folder)
    change(path, section(path, "tokens") + PAGE)
    change(log, PAGE + 3)
    damaged = {p.name: p.read_bytes() for p in (path, log)}
    expected = None
    for step in range(60):
        copy = shutil.copytree(folder, tmp_path / f"copy{step}")
        with monkeypatch.context() as patch:
            crash_after(patch, step, ("fsync", "rename", "unlink", "link"))
            try:
                repair(copy)
                crashed = False
            except Crash:
                crashed = True
        repair(copy)
        with Store.open(copy, write=True) as store:
            found = documents(store)
            assert store.verify() == []
        expected = expected or found
        assert found == expected
        aside = [p.read_bytes() for p in (copy / "damaged").iterdir()]
        assert all(content in aside for content in damaged.values()), step
        if not crashed:
            break
    assert not crashed
    assert step > 5


@pytest.mark.parametrize("part", ["segment", "log"])
def test_an_interrupted_repair_forgets_no_source_that_must_be_read_again(folder, monkeypatch, part):
    with Store.create(folder, 1000) as store:
        store.extend([Document(np.arange(500) + i, "file", read=(7, 7, i + 1, 0)) for i in range(20)])
        if part == "segment":
            store.extend([Document((), "file", (7, 7))])
        store.flush()
        store.extend([Document([1, i], "file", read=(7, 7, 21 + i, 0)) for i in range(2)] if part == "log" else [])
        log = folder / store.manifest.log
    (path,) = folder.glob("*.seg")
    if part == "segment":
        change(path, section(path, "tokens") + PAGE)
    else:
        change(log, PAGE + RECORD.size + PREFIX.size + 3)  # in the first of two records

    def crash(*_):
        raise Crash

    with monkeypatch.context() as patch:
        patch.setattr("slipstream.datastores.durable.repair.Store.open", crash)  # the new manifest is there by then
        with pytest.raises(Crash):
            repair(folder)
    for _ in range(2):
        file = Store.open(folder).sources()["file"]
        assert (file.size, file.complete) == (-1, True)
        repair(folder)


# ---- numbers


def test_info_counts(folder, store):
    for i in range(4):
        store.append([1, 2, 3], f"s{i % 2}", ("default", "other")[i % 2])
    store.flush()
    store.append([4, 5])
    store.remove("s0")
    told = store.info()
    assert told["tokens"] == 8
    assert told["documents"] == 3
    assert told["removed_documents"] == 2
    assert told["collections"] == {
        "default": {"tokens": 2, "documents": 1, "segments": 1},
        "other": {"tokens": 6, "documents": 2, "segments": 1},
    }
    assert told["bytes"] == sum(p.stat().st_size for p in folder.iterdir() if p.name not in ("lock", "log.end"))
    assert told["log_bytes"] == (folder / store.manifest.log).stat().st_size
    assert (told["width"], told["vocabulary"], told["tokenizer"]) == (16, 1000, "")
    assert Store.open(folder).info() == told
