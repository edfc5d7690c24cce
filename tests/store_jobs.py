"""What the store's tests run in other processes, where it can be killed or crash by itself.

One process loads and compiles everything and then becomes each job by forking, which takes milliseconds.
"""

import gc
import json
import mmap
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from functools import cache
from pathlib import Path

import numpy as np

from patience import PATIENCE
from slipstream.datastores.durable import follow as replica
from slipstream.datastores.durable.pages import PAGE
from slipstream.datastores.durable.repair import repair
from slipstream.datastores.durable.segment import Segment
from slipstream.datastores.durable.store import Document, Store
from slipstream.datastores.sparse.search import SearchShape
from slipstream.errors import SlipstreamError

PHASE = mmap.mmap(-1, 16)  # shared with the forked jobs: what one is doing, and how often it has begun something


class Forker:
    def __init__(self):
        self.process = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def start(self, job, kill=None, **arguments):
        """Begin a job. kill: (what it is doing, how often it has begun something, seconds after that)."""
        self.process.stdin.write(json.dumps([job, kill, arguments]).encode() + b"\n")
        self.process.stdin.flush()

    def lines(self):
        """What the job says until it ends; then `ended` is how, and `doing` what it was doing."""
        for line in self.process.stdout:
            if line.startswith(b"ended "):
                _, ended, self.doing = line.decode().split()
                self.ended = int(ended)
                return
            yield line.decode().rstrip("\n")
        raise AssertionError("the forking process died")

    def close(self):
        self.process.stdin.close()
        self.process.wait(PATIENCE)


def serve():
    os.fsync = os.fdatasync = os.fstat  # jobs are killed, the machine is not: see conftest.py
    warm_up()
    gc.collect()
    gc.freeze()  # or each job's collector goes through all of it, and copies the pages
    for line in sys.stdin.buffer:
        job, kill, arguments = json.loads(line)
        PHASE[:] = b"-" + bytes(15)
        child = os.fork()
        if child == 0:
            try:
                {"write": write, "read": read, "faults": faults, "follow": follow, "replicate": replicate}[job](
                    **arguments
                )
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        status = None
        while kill is not None and status is None:
            if PHASE[0] == ord(kill[0]) and int.from_bytes(PHASE[8:16], "little") >= kill[1]:
                time.sleep(kill[2])
                break
            time.sleep(0.0001)
            status = os.waitpid(child, os.WNOHANG)[1] if os.waitid(os.P_PID, child, QUIETLY) else None
        doing = chr(PHASE[0])
        if status is None:
            if kill is not None:
                os.kill(child, signal.SIGKILL)  # it is not waited for yet, so its number is still its own
            status = os.waitpid(child, 0)[1]
        say(f"ended {os.waitstatus_to_exitcode(status)} {doing}")


QUIETLY = os.WEXITED | os.WNOHANG | os.WNOWAIT


def warm_up():
    """Compile all that the jobs will use. Threads must not outlive this: a fork would not copy them."""
    with tempfile.TemporaryDirectory() as folder:
        make_example(Path(folder) / "store")
        for write in (False, True):
            answers(Path(folder) / "store", write)
        store = Store.open(Path(folder) / "store")
        store.verify()


def say(line):
    os.write(1, line.encode() + b"\n")


def doing(what):
    PHASE[8:16] = (int.from_bytes(PHASE[8:16], "little") + 1).to_bytes(8, "little")
    PHASE[0] = ord(what)


# ---- a writer, to be killed

SOURCES = 7
SMALL = 1500  # tokens of a segment


@cache  # tests compare with the same ones again and again
def numbered(i):
    """Document i, unlike all others: its tokens, its source and its collection."""
    tokens = np.random.default_rng(i).integers(0, 60_000, 3 + i % 40)
    return tokens, f"s{i % SOURCES}", ("default", "other")[i % 2]


def write(folder, seed, first):
    """Append, remove, flush and compact for ever. Says what it begins, and `ok` when that has returned."""
    rng, i = random.Random(seed), first
    store = Store.open(folder, write=True, segment_tokens=SMALL)
    while True:
        what = rng.choices("arfc", (60, 6, 20, 14))[0]
        doing(what)
        if what == "a":
            tokens, source, collection = numbered(i)
            say(f"append {i}")
            store.append(tokens, source, collection)
            i += 1
        elif what == "r":
            source, collection = f"s{rng.randrange(SOURCES)}", rng.choice(("default", "other"))
            say(f"remove {source} {collection}")
            store.remove(source, collection)
        elif what == "f":
            say("flush")
            store.flush()
        else:
            say("compact")
            store.compact()
        say("ok")


# ---- a reader beside a writer

LENGTH = 6


def counted(count):
    """(count, LENGTH) documents that carry their number in their first two tokens."""
    i = np.arange(count)
    more = [(i * p + p) % 997 + 1000 for p in (17, 257, 31, 101)]
    return np.stack([i // 500, 500 + i % 500, *more], axis=1)


def seen(runs, expected):
    """How many documents are in a snapshot: the first so many, each once, as they were written."""
    parts = [run.tokens[run.tokens != np.iinfo(run.tokens.dtype).max] for run in runs.runs]
    rows = np.concatenate([np.empty(0, np.int64), *parts]).reshape(-1, LENGTH).astype(np.int64)
    numbers = rows[:, 0] * 500 + rows[:, 1] - 500
    rows = rows[np.argsort(numbers)]
    assert np.array_equal(rows, expected[: len(rows)]), f"not the first {len(rows)} documents"
    return len(rows)


def look(runs, expected, rng, draft):
    """Search for the beginnings of documents that a snapshot has, and of some that it may not have yet."""
    count = seen(runs, expected)
    for i in rng.integers(0, len(expected), 5):
        found = draft(runs, expected[i, :2].astype(np.int32), SearchShape(longest=2, shortest=2, length=4))
        told = found.tree.tokens[1:].tolist()
        assert told == (expected[i, 2:].tolist() if i < count else []), f"document {i} of {count}: {told}"
    return count


def read(folder, stop, count):
    """Look until told to stop. Says how often it looked and how much it saw in the end."""
    from slipstream.datastores.sparse.search import draft

    expected, rng, last, looks = counted(count), np.random.default_rng(0), 0, 0
    store = Store.open(folder)
    say("ready")
    while True:
        ending = Path(stop).exists()
        store.refresh()
        now = look(store.runs(), expected, rng, draft)
        assert now >= last, f"{now} documents after {last}"
        last, looks = now, looks + 1
        if ending:
            say(f"{looks} {last}")
            return


def follow(folder, text):
    """Search whenever the next file `asked…` appears, without opening the store again."""
    store = Store.open(folder)
    say("ready")
    for turn in range(2):
        while not (Path(folder) / f"asked{turn}").exists():
            time.sleep(0.001)
        store.refresh()
        say(json.dumps(store.draft(np.array(text, np.int32), SearchShape()).tree.tokens.tolist()))


def replicate(source, target):
    """Follow a store once."""
    doing("r")
    replica.follow(source, target)


# ---- faults

VOCABULARY = 300
COLLECTIONS = ("default", "other", "plain")  # nothing is removed from the last
QUERIES = [np.random.default_rng(i).integers(0, VOCABULARY, 1 + i % 3).astype(np.int32) for i in range(12)]


def make_example(folder):
    """A small store that has all there is: collections, sources, segments, what was removed before and after the last
    flush, a source that was read to its end, and a log."""
    rng = np.random.default_rng(7)
    with Store.create(folder, VOCABULARY, "print", segment_tokens=20_000) as store:
        for part in range(2):
            for collection in COLLECTIONS[: 2 + part]:
                documents = [rng.integers(0, VOCABULARY, rng.integers(1, 400)) for _ in range(12 + 10 * part)]
                documents[0] = np.concatenate(QUERIES)
                store.extend([Document(d, f"s{i % 5}") for i, d in enumerate(documents)], collection)
                store.extend([Document((), "s2", (10, 20))], collection)
            store.flush()
            if part == 0:
                store.remove("s1")
        for i in range(9):
            store.append(rng.integers(0, VOCABULARY, 30), f"s{i % 5}", COLLECTIONS[i % 3])
        store.remove("s3", "other")
        store.append(rng.integers(0, VOCABULARY, 50), "s3", "other")


def documents(store, removed=False):
    """Of each collection. removed: also those that wait for compaction."""
    found = {c: [tuple(d.tolist()) for d in store.documents(c)] for c in COLLECTIONS}
    for entry in store.manifest.segments if removed else ():
        gone = [d for d, source in store.contents.segments[entry.name].documents() if source in entry.removed]
        found[entry.collection] += [tuple(d.tolist()) for d in gone]
    return {c: sorted(d) for c, d in found.items()}


def answers(folder, write=False):
    """What every call says, or that it refused."""
    told = {}

    def ask(name, call):
        try:
            told[name] = call()
        except SlipstreamError as error:
            told[name] = f"refused: {type(error).__name__}: {error}"
        return told[name]

    def tree(query, collection):
        """Paths and scores, which don't depend on how documents are spread over segments as long as nothing is cut."""
        tree = store.draft(query, SearchShape(matches=4096, nodes=4096, length=4), collection).tree
        paths = [(query[-1],)]
        for token, parent in zip(tree.tokens[1:].tolist(), tree.parents[1:].tolist(), strict=True):
            paths.append((*paths[parent], token))
        return sorted(zip(paths, np.round(tree.score, 4).tolist(), strict=True))

    def open_store():
        return Store.open(folder, write, segment_tokens=20_000)

    store = ask("open", open_store)
    if isinstance(store, str):
        return told
    told["open"] = "open"
    if write:
        ask("append", lambda: store.append(QUERIES[0], "new"))
        ask("remove", lambda: store.remove("s4"))
        ask("flush", store.flush)
        ask("compact", store.compact)
    for collection in COLLECTIONS:
        for i, query in enumerate(QUERIES):
            ask(f"draft {collection} {i}", lambda q=query, c=collection: tree(q, c))
        ask(f"sources {collection}", lambda c=collection: sorted(map(str, store.sources(c).values())))
    ask("documents", lambda: documents(store))
    ask("collections", lambda: store.collections)
    ask("info", lambda: {k: v for k, v in store.info().items() if "bytes" not in k})
    store.close()
    return told


def damage(folder, rng):
    """Change some bytes, or cut a file off, or remove it. Says what was done: [(file, byte or None)]."""
    files = sorted(p for p in folder.iterdir() if p.is_file())
    kind = rng.choices(("flip", "flips", "burst", "cut", "gone"), (50, 15, 10, 22, 3))[0]
    done = []
    for _ in range(rng.randint(2, 6) if kind == "flips" else 1):
        path = rng.choice(files)
        size = path.stat().st_size
        at = rng.randrange(max(size, 1)) if rng.random() < 0.7 else min(rng.randrange(16), max(size - 1, 0))
        if kind == "gone":
            path.unlink()
        elif kind == "cut":
            os.truncate(path, at)
        elif size:
            with path.open("r+b") as file:
                for place in range(at, min(size, at + (300 if kind == "burst" else 1))):
                    file.seek(place)
                    byte = file.read(1)[0] ^ rng.randrange(1, 256)
                    file.seek(place)
                    file.write(bytes([byte]))
        done.append((path.name, at))
    return kind, done


def faults(folder, seeds):
    """Damage copies of a store; each call must say what it said before, or refuse. Then repair them."""
    folder = Path(folder)
    with Store.open(folder) as store:
        originals = documents(store)
        present = documents(store, removed=True)
    right = {write: answers(copy(folder, f"right{write}"), write) for write in (False, True)}
    assert not [a for told in right.values() for a in told.values() if str(a).startswith("refused")]
    for seed in seeds:
        say(f"seed {seed}")
        damaged = copy(folder, "damaged")
        kind, done = damage(damaged, random.Random(seed))
        refusals = set()
        for write in (False, True):
            told = answers(copy(damaged, "again") if write else damaged, write)
            refused = {name: answer for name, answer in told.items() if str(answer).startswith("refused")}
            refusals |= {answer.replace(str(folder.parent), "") for answer in refused.values()}
            if "remove" in refused:  # then the rest answers for another store
                continue
            for name, answer in told.items():
                if name not in refused and answer != right[write][name] and not (name == "info" and refused):
                    say(f"wrong {seed} {kind} {done}: {name}")
        report = repair(damaged)
        with Store.open(damaged, write=True) as store:
            kept, wrong = documents(store), store.verify()
            store.append(QUERIES[1])
        if wrong:
            say(f"wrong {seed} {kind} {done}: after repair {wrong}")
        # A removal that is lost with the log, or with both manifests, is undone.
        hit = {name for name, _ in done}
        undone = any(name.endswith(".log") for name in hit) or hit >= {"store.json", "store.copy.json"}
        made_up = {c: Counter(kept[c]) - Counter((present if undone else originals)[c]) for c in kept}
        if any(made_up.values()):
            say(f"wrong {seed} {kind} {done}: repair made up documents {made_up}")
        if report.kept != sum(map(len, kept.values())):
            say(f"wrong {seed} {kind} {done}: repair counted {report.kept}")
        lost = sum((Counter(originals[c]) - Counter(kept[c])).total() for c in kept)
        if (
            lost > report.lost and not undone
        ):  # it may be less: how many of a segment were removed before is lost with it
            say(f"wrong {seed} {kind} {done}: {lost} documents are lost, repair told {report.lost}")
        if kind == "flip" and lost > may_lose(folder, *done[0]):
            say(f"wrong {seed} {kind} {done}: {lost} documents are lost")
        say("outcome " + json.dumps([kind, sorted(refusals), lost]))


def may_lose(folder, name, at):
    """How many documents one changed byte can cost: those in its page of a segment's tokens, or one record of a log."""
    if name.endswith(".log"):
        return 1 if at >= PAGE else 0
    if not name.endswith(".seg"):
        return 0
    segment = Segment(folder / name)
    section = next((s for s, (offset, size) in segment.header["sections"].items() if offset <= at < offset + size), "")
    if section in ("sources", "documents"):  # if sources were removed, which documents are theirs is not known any more
        return 0 if segment.collection == "plain" else len(segment.starts)
    if section != "tokens":
        return 0
    offset, _ = segment.header["sections"]["tokens"]
    first = (at - offset) // PAGE * PAGE // segment.dtype.itemsize
    last = first + PAGE // segment.dtype.itemsize
    return int(((segment.starts < last) & (segment.ends > first)).sum())


def copy(folder, name):
    there = folder.parent / name
    shutil.rmtree(there, ignore_errors=True)
    return Path(shutil.copytree(folder, there))


if __name__ == "__main__":
    serve()
