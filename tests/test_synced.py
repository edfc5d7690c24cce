"""What is acknowledged is on the disk: no file takes its name before its bytes are there.

Other tests wait for no disk (see conftest.py). Here the calls are watched; what a power failure may leave of a store,
test_store_crash.py tries.
"""

import os
from functools import partial
from pathlib import Path

import pytest
import torch

from slipstream.datastores.dense.build import EmbedSettings, embed
from slipstream.datastores.durable.follow import follow
from slipstream.datastores.durable.pages import PAGE
from slipstream.datastores.durable.store import Document, Store
from slipstream.datastores.ingest.encoding import Encoder
from slipstream.datastores.ingest.sharded import ingest_sharded
from slipstream.datastores.ingest.sources import find_sources
from slipstream.heads import checkpoint
from slipstream.user_files import write_text
from slipstream.workers import Here
from test_sharded import Letters

MANIFESTS = ("store.json", "dense.json")  # what they name must be found where they are found


class Watch:
    """Notes what the disk was made to have of a folder, and who was hastier."""

    def __init__(self, folder, patch):
        self.folder = folder
        self.bytes, self.named, self.moved = {}, {}, []  # inode -> bytes, folder -> names; what was renamed to
        self.hasty = []
        for name in ("fsync", "fdatasync"):
            patch.setattr(os, name, self.sync)
        for name in ("rename", "replace"):
            patch.setattr(os, name, partial(self.move, getattr(os, name)))

    def sync(self, file):
        path = Path(os.readlink(f"/proc/self/fd/{file}"))
        if path.is_dir():
            self.named[path] = set(os.listdir(path))
        else:
            self.bytes[path.stat().st_ino] = path.read_bytes()

    def has(self, path, start=0):
        return self.bytes.get(path.stat().st_ino, b"")[start:] == path.read_bytes()[start:]

    def move(self, real, source, target, **options):
        source, target = Path(source), Path(target)
        if not target.is_relative_to(self.folder):  # compiled code is kept meanwhile
            return real(source, target, **options)
        if source.is_file() and not self.has(source):
            self.hasty.append(target.name)
        if target.name in MANIFESTS:
            self.hasty += sorted(self.unnamed())
        real(source, target, **options)
        self.moved.append(target)
        self.named.get(target.parent, set()).discard(target.name)  # until the folder is synced anew
        return None

    def unnamed(self):
        return {path.name for path in self.moved if path.exists() and path.name not in self.named.get(path.parent, ())}


@pytest.fixture
def watch(tmp_path, monkeypatch):
    return Watch(tmp_path, monkeypatch)


@pytest.fixture
def store(tmp_path):
    with Store.create(tmp_path / "store", 64) as store:
        yield store


@pytest.mark.parametrize(
    "call",
    [
        lambda store: store.append([1, 2, 3]),
        lambda store: store.extend([Document([1, 2]), Document([3, 4])]),
        lambda store: store.remove("old"),
    ],
    ids=["append", "extend", "remove"],
)
def test_what_a_store_acknowledged_is_in_its_log(watch, store, call):
    store.append([5, 6], "old")
    watch.bytes.clear()
    call(store)
    log = store.folder / store.manifest.log
    assert log.stat().st_size > PAGE  # whose first page says how far it goes, as a hint
    assert watch.has(log, PAGE)


def segments(store, tmp_path, tiny):  # noqa: ARG001
    store.append([1, 2, 3], "a")
    store.flush()
    store.append([4, 5, 6], "b")
    store.compact()


def follower(store, tmp_path, tiny):
    segments(store, tmp_path, tiny)
    follow(store.folder, tmp_path / "follower")


def shards(store, tmp_path, tiny):  # noqa: ARG001
    (tmp_path / "text").write_text("some words " * 20)
    with Store.create(tmp_path / "sharded", 256, "print") as other:
        ingest_sharded(other, find_sources([tmp_path / "text"]), Here(partial(Encoder, Letters())))


def vectors(store, tmp_path, tiny):  # noqa: ARG001
    store.extend([Document(range(1, 40))])
    store.flush()
    embed(store, [lambda: tiny("llama")], EmbedSettings())


def head(store, tmp_path, tiny):  # noqa: ARG001
    checkpoint.write(tmp_path / "head", {"a": 1}, {"weight": torch.ones(3)})


def text(store, tmp_path, tiny):  # noqa: ARG001
    write_text(tmp_path / "text", "words")


@pytest.mark.parametrize("write", [segments, follower, shards, vectors, head, text])
def test_no_file_takes_its_name_before_its_bytes_are_on_the_disk(watch, store, tmp_path, tiny, write):
    write(store, tmp_path, tiny)
    assert watch.moved
    assert watch.hasty == []
    if write not in (head, text):  # which promise that the file is whole, not that it is there already
        assert watch.unnamed() == set()
