"""The store survives: writers that are killed, disks that forget, files that rot, readers that never stop."""

import itertools
import json
import os
import random
import shutil
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import store_jobs
from slipstream.datastores.durable import store as store_module
from slipstream.datastores.durable.compaction import Compaction
from slipstream.datastores.durable.contents import Contents
from slipstream.datastores.durable.pages import PAGE
from slipstream.datastores.durable.store import Store
from slipstream.datastores.sparse.search import SearchShape, draft

KILLS = 90  # `bench/torture.py` does many more
FAULTS = 120


class Model:
    """What must be in a store after some calls."""

    def __init__(self):
        self.documents = set()  # numbers

    def after(self, call):
        """The numbers after one more call, which may not have returned."""
        what, *rest = call.split()
        if what == "append":
            return self.documents | {int(rest[0])}
        if what == "remove":
            return {i for i in self.documents if list(store_jobs.numbered(i)[1:]) != rest}
        return self.documents


def contents(store):
    """(collection, tokens) of every document."""
    return Counter((c, tuple(d.tolist())) for c in ("default", "other") for d in store.documents(c))


def as_contents(numbers):
    found = [store_jobs.numbered(i) for i in numbers]
    return Counter((collection, tuple(tokens.tolist())) for tokens, _, collection in found)


# ---- killed


def test_a_killed_writer_loses_nothing_it_acknowledged(forker, tmp_path):
    rng, doing, begun = random.Random(0), Counter(), 0
    typical = {"a": 0.0003, "f": 0.002, "c": 0.005}  # seconds
    for kill in range(KILLS):
        if kill % 30 == 0:  # a young store from time to time
            folder, model = tmp_path / f"store{kill}", Model()
            Store.create(folder, 60_000, segment_tokens=store_jobs.SMALL).close()
        phase = "afc"[kill % 3]
        moment = phase, rng.randrange(30), rng.random() * typical[phase]
        forker.start("write", kill=moment, folder=str(folder), seed=kill, first=begun)
        call = None
        for line in forker.lines():
            if line != "ok":
                call = line
                begun += line.startswith("append")
            else:
                model.documents, call = model.after(call), None
        assert forker.ended == -9
        doing[forker.doing] += 1
        with Store.open(folder, write=True, segment_tokens=store_jobs.SMALL) as store:
            assert store.verify() == []
            found = contents(store)
            states = [model.documents, model.after(call)] if call else [model.documents]
            matching = [state for state in states if as_contents(state) == found]
            assert matching, (
                f"kill {kill} in {call}: {found - as_contents(states[0])}, {as_contents(states[0]) - found}"
            )
            model.documents = matching[0]
            for i in sorted(model.documents)[-3:]:
                tokens, _, collection = store_jobs.numbered(i)
                tree = store.draft(tokens[:-1].astype(np.int32), SearchShape(), collection).tree
                assert tree.child(0, tokens[-1]) is not None
    assert doing.total() == KILLS
    assert min(doing[phase] for phase in "afc") >= KILLS / 8, doing


# ---- power failures


# What a disk may have of a file: of what it was at its last fsync and what it is now, either, or some pages of each.
LEFT = {
    "old": lambda old, _: old,
    "new": lambda _, new: new,
    "new first page": lambda old, new: new[:PAGE] + old[PAGE:],
    "old first page": lambda old, new: old[:PAGE] + new[PAGE:],
}


class Disk:
    """Remembers what would be left of a folder if the power failed now: of each file what it was at its last fsync, of
    the folder the names at its last fsync; each of them perhaps newer than that, since a disk may always do more."""

    def __init__(self, folder, monkeypatch, check):
        self.folder, self.check, self.quiet = folder, check, False
        self.names, self.bytes = {}, {}  # durable: name -> inode, inode -> content
        self.open = {}  # inode -> a descriptor, so that no inode is used twice and unlinked files can be read
        for name in ("fsync", "fdatasync", "pwrite", "ftruncate", "rename", "unlink"):
            monkeypatch.setattr(os, name, self.watched(name, getattr(os, name)))

    def watched(self, name, call):
        def watch(first, *rest, **options):
            result = call(first, *rest, **options)
            if not self.quiet and self.is_ours(first):
                self.quiet = True
                if name in ("fsync", "fdatasync"):
                    self.synced(first)
                self.check(self)
                self.quiet = False
            return result

        return watch

    def is_ours(self, file):
        path = Path(os.readlink(f"/proc/self/fd/{file}") if isinstance(file, int) else file)
        return path == self.folder or path.parent == self.folder

    def synced(self, file):
        there = os.fstat(file)
        if there.st_ino == self.folder.stat().st_ino:
            self.names = self.live_names()
        else:
            if there.st_ino not in self.open:
                self.open[there.st_ino] = os.open(f"/proc/self/fd/{file}", os.O_RDONLY)
            self.bytes[there.st_ino] = os.pread(self.open[there.st_ino], there.st_size, 0)

    def live_names(self):
        return {e.name: e.inode() for e in os.scandir(self.folder) if e.name != "lock"}

    def image(self, live_names, left):
        """{name: content} in one of the states the disk may be in."""
        image = {}
        for name, inode in (self.live_names() if live_names else self.names).items():
            path = f"/proc/self/fd/{self.open[inode]}" if inode in self.open else self.folder / name
            image[name] = LEFT[left](self.bytes.get(inode, b""), Path(path).read_bytes())
        return image

    def close(self):
        for file in self.open.values():
            os.close(file)


@pytest.mark.slow
def test_a_power_failure_at_any_moment_loses_nothing_acknowledged(tmp_path, monkeypatch):
    folder, model, call, checked = tmp_path / "store", Model(), [None], set()
    monkeypatch.setattr(store_module, "MEMORY_TOKENS", 300)
    monkeypatch.setattr(Compaction, "in_background", lambda _: None)  # `compact` does the same in this thread

    def check(disk):
        states = [as_contents(model.documents)] + ([as_contents(model.after(call[0]))] if call[0] else [])
        visible = contents_of_runs(store) if store else Counter()
        for choice in itertools.product((False, True), LEFT):
            image = disk.image(*choice)
            key = hash((tuple(sorted(image.items())), call[0], tuple(sorted(model.documents))))
            if key in checked or "store.json" not in image:
                continue
            checked.add(key)
            copy = tmp_path / "copy"
            shutil.rmtree(copy, ignore_errors=True)
            copy.mkdir()
            for name, content in image.items():
                (copy / name).write_bytes(content)
            with Store.open(copy, write=True) as again:
                found = contents(again)
                assert again.verify() == []
            assert found in states, f"{choice} in {call[0]}"
            forgotten = Counter() if (call[0] or "").startswith("remove") else visible - found
            assert not forgotten, f"{choice} in {call[0]}: a search could see what the disk may forget"

    store = None
    disk = Disk(folder, monkeypatch, check)
    store = Store.create(folder, 60_000, segment_tokens=5000)
    rng = random.Random(3)
    for i in range(30):
        calls = [(f"append {i}", lambda i=i: append(store, i))]
        if rng.random() < 0.1:
            source, collection = f"s{rng.randrange(store_jobs.SOURCES)}", rng.choice(("default", "other"))
            calls.append((f"remove {source} {collection}", lambda s=source, c=collection: store.remove(s, c)))
        if i % 10 == 9:
            calls.append(("flush", store.flush))
        if i % 15 == 14:
            calls.append(("compact", store.compact))
        for text, function in calls:
            call[0] = text
            function()
            model.documents, call[0] = model.after(text), None
            disk.quiet = True
            check(disk)
            disk.quiet = False
    assert len(checked) > 150
    disk.close()


def append(store, i):
    tokens, source, collection = store_jobs.numbered(i)
    store.append(tokens, source, collection)


def contents_of_runs(store):
    """Like `contents`, of what a search sees now."""
    found = Counter()
    for collection in store.collections:
        for run in store.runs(collection).runs:
            ends = np.flatnonzero(run.tokens == np.iinfo(run.tokens.dtype).max)
            for start, end in zip(ends[:-1] + 1, ends[1:], strict=True):
                if end > start and np.searchsorted(run.dead, start, side="right") % 2 == 0:
                    found[collection, tuple(run.tokens[start:end].tolist())] += 1
    return found


# ---- rotten files


def test_a_damaged_store_refuses_or_answers_right_and_can_be_repaired(forker, tmp_path):
    store_jobs.make_example(tmp_path / "store")
    seeds = list(range(FAULTS))
    seed, wrong, outcomes = None, [], []
    while seeds:
        forker.start("faults", folder=str(tmp_path / "store"), seeds=seeds)
        for line in forker.lines():
            if line.startswith("seed"):
                seed = int(line.split()[1])
            elif line.startswith("wrong"):
                wrong.append(line[:500])
            else:
                outcomes.append(json.loads(line.split(" ", 1)[1]))
        if forker.ended != 0:
            wrong.append(f"seed {seed}: the process ended with {forker.ended}")
        seeds = [s for s in seeds if s > seed] if forker.ended else []
    assert not wrong, "\n".join(wrong)
    assert len(outcomes) == FAULTS
    # Both must have happened often for this to mean something: damage that was seen, and documents that were saved.
    assert sum(bool(refusals) for _, refusals, _ in outcomes) > FAULTS / 2
    assert sum(lost > 0 for _, _, lost in outcomes) > FAULTS / 10
    told = {refusal for _, refusals, _ in outcomes for refusal in refusals}
    assert all("store repair" in refusal for refusal in told), told


# ---- readers


def test_readers_see_every_document_once_and_in_order_while_a_writer_appends_and_compacts(
    forker, tmp_path, monkeypatch
):
    monkeypatch.setattr(store_module, "MEMORY_TOKENS", 90)  # a flush every 15 documents
    count, folder, stop = 1000, tmp_path / "store", tmp_path / "stop"
    expected, failures, published, publish = store_jobs.counted(count), [], [0], Contents.publish

    def look_at_every_snapshot(self):
        """Threads may miss one that lasts for microseconds."""
        publish(self)
        try:
            published.append(store_jobs.seen(self.runs("default"), expected))
        except BaseException as error:
            failures.append(error)

    monkeypatch.setattr(Contents, "publish", look_at_every_snapshot)
    store = Store.create(folder, 2000, segment_tokens=100_000)
    forker.start("read", folder=str(folder), stop=str(stop), count=count)
    lines = forker.lines()
    assert next(lines) == "ready"
    done, looks = [0, False], [0, 0]

    def watch(number):
        rng, last = np.random.default_rng(number), 0
        try:
            while not done[1]:
                least = done[0]
                now = store_jobs.look(store.runs(), expected, rng, draft)
                assert now >= max(last, least), f"{now} documents after {last}, {least} were acknowledged"
                last, looks[number] = now, looks[number] + 1
                time.sleep(0.001)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=watch, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for i in range(count):
        store.append(expected[i])
        done[0] = i + 1
        if i == count // 2:
            store.compact()
    store.compact()
    done[1] = True
    for thread in threads:
        thread.join()
    stop.touch()
    told = list(lines)
    assert failures == []
    assert published == sorted(published)
    assert forker.ended == 0, "the reading process saw something wrong; it says what above"
    assert int(told[-1].split()[1]) == count
    assert min(*looks, int(told[-1].split()[0])) > 20
    assert store.verify() == []
    store.close()
