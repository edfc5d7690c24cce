"""A store that follows another is always in one whole state of it, whatever happens to whoever fetches."""

import random
import shutil

import fsspec
import numpy as np
import pytest

import store_jobs
from commands import command
from slipstream.datastores.durable import follow as follow_module
from slipstream.datastores.durable.follow import follow
from slipstream.datastores.durable.manifest import COPY, NAME, read_manifest
from slipstream.datastores.durable.store import Store
from slipstream.datastores.sparse.search import SearchShape
from slipstream.errors import DamagedError, StoreError

KILLS = 40


@pytest.fixture
def source(tmp_path):
    with Store.create(tmp_path / "source", 60_000, "print", {"model": "m"}, store_jobs.SMALL) as store:
        yield store


def grow(store, first, count=5):
    """Some documents, and a segment of them."""
    for i in range(first, first + count):
        tokens, name, collection = store_jobs.numbered(i)
        store.append(tokens, name, collection)
    store.flush()
    store._compaction.wait()


def state(folder):
    """All documents that a store has in segments, and which generation it is."""
    with Store.open(folder) as store:
        assert store.verify() == []
        found = {
            c: sorted((tuple(d.tolist()), name) for name in store.sources(c) for d in store.documents(c, name))
            for c in store.collections
        }
        return store.manifest.generation, found


def files(folder):
    return {path.name: path.read_bytes() for path in folder.glob("*.seg")}


def test_a_follower_has_what_the_other_has_in_segments(source, tmp_path):
    target = tmp_path / "target"
    for turn in range(6):
        grow(source, 10 * turn)
        if turn == 3:
            source.remove("s1")
            source.flush()
        before = state(source.folder)
        source.append([1, 2, 3], "in the log alone")
        done = follow(source.folder, target)
        assert done.changed
        assert done.generation == before[0]
        assert state(target) == before
        assert files(target) == files(source.folder)
        assert done.fetched <= len(files(target))
        assert not follow(source.folder, target).changed
        source.remove("in the log alone")
    source.compact()
    follow(source.folder, target)
    assert state(target) == state(source.folder)
    assert files(target) == files(source.folder)
    assert len(list(target.glob("*.log"))) == 1


def test_only_what_is_new_is_fetched(source, tmp_path):
    grow(source, 0)
    first = follow(source.folder, tmp_path / "target")
    source.append(np.arange(100), "new")
    source.flush()
    second = follow(source.folder, tmp_path / "target")
    assert (first.fetched, second.fetched) == (2, 1)
    assert second.bytes == (tmp_path / "target" / read_manifest(tmp_path / "target").segments[-1].name).stat().st_size


def test_a_reader_of_a_follower_sees_the_next_state_without_opening_it_again(source, tmp_path):
    grow(source, 0)
    follow(source.folder, tmp_path / "target")
    with Store.open(tmp_path / "target") as reader:
        source.append([7, 8, 9, 10], "new")
        source.compact()
        follow(source.folder, tmp_path / "target")
        assert reader.draft(np.array([7, 8], np.int32), SearchShape()).tree.tokens.tolist() == [8]
        reader.refresh()
        assert reader.draft(np.array([7, 8], np.int32), SearchShape()).tree.tokens.tolist() == [8, 9, 10]


@pytest.mark.slow
def test_a_killed_follower_leaves_a_whole_state(source, tmp_path, forker):
    """The source grows, forgets and merges between the kills, so that each has something to fetch and to delete."""
    target, rng, killed = tmp_path / "target", random.Random(0), 0
    states = {}
    for kill in range(KILLS):
        grow(source, 5 * kill)
        if kill % 7 == 6:
            source.remove(f"s{kill % store_jobs.SOURCES}", "other")
            source.compact()
        states[source.manifest.generation] = state(source.folder)[1]
        moment = ("r", 1, rng.random() ** 2 * 0.01)
        forker.start("replicate", kill=moment, source=str(source.folder), target=str(target))
        assert list(forker.lines()) == []
        killed += forker.ended == -9
        if (target / NAME).exists():
            generation, found = opened(target)
            assert found == states[generation]
    assert killed > KILLS / 8  # the others ended before
    follow(source.folder, target)
    assert state(target)[1] == states[source.manifest.generation]
    assert files(target) == files(source.folder)
    assert not list(target.glob("*.making"))


def opened(folder):
    """Like `state`, but the copy of the manifest and the witness may be a moment behind."""
    with Store.open(folder) as store:
        wrong = [w for w in store.verify() if "store.copy.json" not in w and "log.end" not in w]
        assert wrong == []
        found = {
            c: sorted((tuple(d.tolist()), name) for name in store.sources(c) for d in store.documents(c, name))
            for c in store.collections
        }
        return store.manifest.generation, found


def test_what_arrives_damaged_is_not_taken(source, tmp_path):
    grow(source, 0)
    follow(source.folder, tmp_path / "target")
    before = state(tmp_path / "target")
    grow(source, 10)
    copy = shutil.copytree(source.folder, tmp_path / "copy")
    path = max(copy.glob("*.seg"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(DamagedError, match="arrived damaged"):
        follow(copy, tmp_path / "target")
    assert state(tmp_path / "target") == before
    path.unlink()
    with pytest.raises(DamagedError, match="no such file"):
        follow(copy, tmp_path / "target")
    assert state(tmp_path / "target") == before


def test_a_follower_is_nobody_elses(source, tmp_path):
    grow(source, 0)
    follow(source.folder, tmp_path / "target")
    with pytest.raises(StoreError, match=r"follows .*: write there"):
        Store.open(tmp_path / "target", write=True)
    Store.create(tmp_path / "own", 60_000, "print").close()
    for place in (source.folder, tmp_path / "own"):
        with pytest.raises(StoreError, match=r"holds a store of its own|is being written"):
            follow(source.folder, place)
    with pytest.raises(StoreError, match="is no datastore"):
        follow(tmp_path / "nothing", tmp_path / "target")


def test_a_store_that_lost_its_manifest_is_not_overwritten(source, tmp_path):
    """It can be repaired; the files of a first following that was interrupted can't be mistaken for it."""
    grow(source, 0)
    with Store.create(tmp_path / "own", 60_000, "print") as own:
        own.append([1, 2, 3])
        own.flush()
    shutil.copytree(source.folder, tmp_path / "copy")  # of the same id, with a record that only its log has
    with Store.open(tmp_path / "copy", write=True) as copy:
        copy.append([4, 5, 6])
    for place, lost in (("own", NAME), ("own", COPY), ("copy", NAME), ("copy", COPY)):
        (tmp_path / place / lost).unlink()
        before = {path.name: path.read_bytes() for path in (tmp_path / place).glob("0*")}
        with pytest.raises(StoreError, match="store repair"):
            follow(source.folder, tmp_path / place)
        assert {path.name: path.read_bytes() for path in (tmp_path / place).glob("0*")} == before


def test_an_older_source_is_refused(source, tmp_path):
    grow(source, 0)
    backup = shutil.copytree(source.folder, tmp_path / "backup")
    grow(source, 10)
    follow(source.folder, tmp_path / "target")
    with pytest.raises(StoreError, match="put back from a backup"):
        follow(backup, tmp_path / "target")


def test_through_a_bucket(source, tmp_path):
    """A store is published behind a URL, and followed from there."""
    url = "memory://bucket/store"
    for turn in range(5):
        grow(source, 10 * turn)
        if turn == 3:
            source.compact()
        assert follow(source.folder, url).changed
        assert not follow(source.folder, url).changed
        follow(url, tmp_path / "target")
        assert state(tmp_path / "target") == state(source.folder)
    there = {name.rsplit("/")[-1] for name in fsspec.filesystem("memory").find("/bucket/store")}
    assert there == {NAME, *files(source.folder)}
    with Store.create(tmp_path / "other", 60_000) as other, pytest.raises(StoreError, match="holds another store"):
        follow(other.folder, url)


def test_a_source_that_merges_meanwhile_is_followed_to_its_next_state(source, tmp_path, monkeypatch):
    grow(source, 0)
    grow(source, 10)
    read = follow_module.parse_manifest

    def then_merges(path, data):
        monkeypatch.undo()
        manifest = read(path, data)
        source.compact()
        return manifest

    monkeypatch.setattr(follow_module, "parse_manifest", then_merges)
    assert follow(source.folder, tmp_path / "target").generation == source.manifest.generation
    assert state(tmp_path / "target") == state(source.folder)


def test_the_command(source, tmp_path):
    grow(source, 0)
    code, said, _ = command("store", "follow", source.folder, tmp_path / "target")
    assert (code, said.split(":")[1].split(",")[0]) == (0, " 2 segments")
    assert state(tmp_path / "target") == state(source.folder)
    code, _, complaint = command("store", "follow", source.folder, tmp_path / "t", "--every", 0)
    assert code == 2
    assert "it must be above 0" in complaint
