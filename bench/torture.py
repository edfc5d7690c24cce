"""Whether a store keeps everything that it acknowledged, under kills and faults:

    python bench/torture.py [PART…] [--count N] [--seconds S] [--seed N]

kills       a writer that is killed at any moment
interrupts  a writer whose calls are interrupted by Ctrl-C, and which continues
power       a power failure: each file keeps what was synced, and some of what was written since
faults      bytes and whole files that change: flipped, truncated, deleted, out of date, another store's
full        a disk that sometimes refuses to write
live        files that are truncated or overwritten while they are read
crafted     files with correct checksums and impossible contents

The expected contents are tracked in a model next to the store. Everything runs in forked processes, to notice crashes.
Each part prints a line of JSON; the last line is JSON of all.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import fuzz_files
from slipstream.datastores.durable import store as store_module
from slipstream.datastores.durable.manifest import COPY, NAME
from slipstream.datastores.durable.pages import PAGE
from slipstream.datastores.durable.repair import repair
from slipstream.datastores.durable.store import Store
from slipstream.datastores.sparse.search import SearchShape
from slipstream.errors import SlipstreamError

SOURCES, SMALL, VOCABULARY = 7, 1500, 60_000
BOTH = ("default", "other")
Told = Counter[str]


# ---- what must be there


def numbered(i: int) -> tuple[np.ndarray, str, str]:
    """Document i, unlike all others: its tokens, its source and its collection."""
    return np.random.default_rng(i).integers(0, VOCABULARY, 3 + i % 40), f"s{i % SOURCES}", BOTH[i % 2]


def after(documents: frozenset[int], call: tuple[str, ...]) -> frozenset[int]:
    if call[0] == "append":
        return documents | {int(i) for i in call[1:]}
    if call[0] == "remove":
        return frozenset(i for i in documents if list(numbered(i)[1:]) != list(call[1:]))
    return documents


def contents(store: Store) -> Counter[Any]:
    return Counter((c, tuple(d.tolist())) for c in BOTH for d in store.documents(c))


def as_contents(documents: frozenset[int]) -> Counter[Any]:
    return Counter((c, tuple(t.tolist())) for t, _, c in map(numbered, documents))


def next_call(rng: random.Random, i: int) -> tuple[str, ...]:
    what = rng.choices("aerfcn", (50, 10, 6, 20, 12, 2))[0]
    if what == "a":
        return ("append", str(i))
    if what == "e":
        return ("append", *(str(i + 2 * k) for k in range(rng.randint(2, 6))))  # of one collection
    if what == "r":
        return ("remove", f"s{rng.randrange(SOURCES)}", rng.choice(BOTH))
    return ({"f": "flush", "c": "compact", "n": "note"}[what],)


def do(store: Store, call: tuple[str, ...]) -> None:
    if call[0] == "append":
        documents = [numbered(int(i)) for i in call[1:]]
        store.extend((store_module.Document(t, s) for t, s, _ in documents), documents[0][2])
    elif call[0] == "note":
        store.note(x=1)
    else:
        getattr(store, call[0])(*call[1:])


def grown(i: int, call: tuple[str, ...]) -> int:
    """The number of the next document."""
    return max([i, *(int(n) + 1 for n in call[1:])]) if call[0] == "append" else i


def check(folder: Path, states: list[frozenset[int]]) -> frozenset[int]:
    """The one of the states that a store is in: as a reader sees it, and then as a writer does."""
    with Store.open(folder) as store:
        seen = contents(store)
    with Store.open(folder, write=True, segment_tokens=SMALL) as store:
        found = contents(store)
        assert store.verify() == [], store.verify()
        matching = [s for s in states if as_contents(s) == found]
        assert matching, f"lost {as_contents(states[0]) - found}, made up {found - as_contents(states[0])}"
        assert seen == found, f"a reader missed {found - seen}, and saw {seen - found}"
        for i in sorted(matching[0])[-2:]:
            tokens, _, collection = numbered(i)
            tree = store.draft(tokens[:-1].astype(np.int32), SearchShape(), collection).tree
            assert tree.child(0, tokens[-1]) is not None, f"document {i} is not found"
    return matching[0]


# ---- parts: each does one trial


class Kills:
    """One store for some trials, so that it grows old."""

    def __init__(self, scratch: Path) -> None:
        self.scratch, self.left = scratch, 0

    def __call__(self, rng: random.Random) -> Told:
        if self.left == 0:
            self.folder, self.documents, self.i, self.left = self.scratch / "killed", frozenset[int](), 0, 60
            shutil.rmtree(self.folder, ignore_errors=True)
            Store.create(self.folder, VOCABULARY, segment_tokens=SMALL).close()
        self.left -= 1
        read, write = os.pipe()
        seed, child = rng.random(), os.fork()
        if child == 0:
            os.close(read)
            self._write(seed, write)
        os.close(write)
        begun = b""
        while not begun:  # it has opened the store
            begun = os.read(read, 1 << 16)
        time.sleep(rng.random() ** 2 * rng.choice((0.003, 0.03, 0.1, 0.3)))
        os.kill(child, signal.SIGKILL)
        while part := os.read(read, 1 << 16):
            begun += part
        os.close(read)
        os.waitpid(child, 0)
        states, told = [self.documents], Counter(kills=1)
        for line in begun.decode().splitlines()[1:]:
            if line == "ok":
                states, told["acknowledged"] = [states[-1]], told["acknowledged"] + 1
            else:
                call = tuple(line.split())
                self.i = grown(self.i, call)
                states = [states[-1], after(states[-1], call)]
                doing = call[0]
        told[f"in {doing}" if len(states) > 1 else "between"] += 1
        self.documents = check(self.folder, states)
        return told

    def _write(self, seed: float, pipe: int) -> None:
        rng, i = random.Random(seed), self.i
        store = Store.open(self.folder, write=True, segment_tokens=SMALL)
        os.write(pipe, b"open\n")
        while True:
            call = next_call(rng, i)
            i = grown(i, call)
            os.write(pipe, " ".join(call).encode() + b"\n")
            do(store, call)
            os.write(pipe, b"ok\n")


def interrupts(rng: random.Random, scratch: Path) -> Told:
    """One process that is interrupted again and again, and goes on with the same object."""
    folder, told = scratch / "interrupted", Counter[str]()
    shutil.rmtree(folder, ignore_errors=True)
    store = Store.create(folder, VOCABULARY, segment_tokens=SMALL)
    documents, i = frozenset[int](), 0
    for _ in range(40):
        call = next_call(rng, i)
        i = grown(i, call)
        try:
            signal.signal(signal.SIGALRM, signal.default_int_handler)
            signal.setitimer(signal.ITIMER_REAL, max(1e-6, rng.random() ** 2 * rng.choice((0.001, 0.01, 0.04))))
            do(store, call)
            signal.setitimer(signal.ITIMER_REAL, 0)
            documents = after(documents, call)
        except KeyboardInterrupt:
            signal.setitimer(signal.ITIMER_REAL, 0)
            told["interrupts"] += 1
            told[f"in {call[0]}"] += 1
            states = [documents, after(documents, call)]
            found = contents(store)
            matching = [s for s in states if as_contents(s) == found]
            assert matching, (
                f"in {call}: hid {as_contents(documents) - found}, made up {found - as_contents(states[1])}"
            )
            documents = matching[0]
    store.close()
    check(folder, [documents])
    return told


class Disk:
    """What would be left of a folder if the power failed: of each file what it was at its last sync, or what it is, or
    some pages of each; of the folder the names at its last sync, or those of now."""

    def __init__(self, folder: Path, check: Callable[[Disk], None]) -> None:
        self.folder, self.check, self.quiet = folder, check, False
        self.names: dict[str, int] = {}
        self.bytes: dict[int, bytes] = {}
        self.open: dict[int, int] = {}
        for name in ("fsync", "fdatasync", "pwrite", "ftruncate", "rename", "unlink"):
            setattr(os, name, self._watched(name, getattr(os, name)))

    def _watched(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def watch(first: Any, *rest: Any, **options: Any) -> Any:
            result = call(first, *rest, **options)
            if not self.quiet and self._is_ours(first):
                self.quiet = True
                if name in ("fsync", "fdatasync"):
                    self._synced(first)
                self.check(self)
                self.quiet = False
            return result

        return watch

    def _is_ours(self, file: Any) -> bool:
        path = Path(os.readlink(f"/proc/self/fd/{file}") if isinstance(file, int) else file)
        return self.folder in (path, path.parent)

    def _synced(self, file: int) -> None:
        there = os.fstat(file)
        if there.st_ino == self.folder.stat().st_ino:
            self.names = self.live_names()
            return
        if there.st_ino not in self.open:
            self.open[there.st_ino] = os.open(f"/proc/self/fd/{file}", os.O_RDONLY)
        self.bytes[there.st_ino] = os.pread(self.open[there.st_ino], there.st_size, 0)

    def live_names(self) -> dict[str, int]:
        return {e.name: e.inode() for e in os.scandir(self.folder) if e.is_file() and e.name != "lock"}

    def image(self, rng: random.Random) -> dict[str, bytes]:
        found = {}
        for name, inode in (self.live_names() if rng.random() < 0.5 else self.names).items():
            path = f"/proc/self/fd/{self.open[inode]}" if inode in self.open else self.folder / name
            old, new = self.bytes.get(inode, b""), Path(path).read_bytes()
            pages = [rng.random() < 0.5 for _ in range(-(-max(len(old), len(new)) // PAGE))]
            kind = rng.choice(("old", "new", "pages"))
            if kind == "pages":
                cut = [(new if p else old)[n * PAGE : (n + 1) * PAGE] for n, p in enumerate(pages)]
                found[name] = b"".join(part.ljust(PAGE, b"\0") for part in cut[:-1]) + (cut[-1] if cut else b"")
            else:
                found[name] = old if kind == "old" else new
        return found


def power(rng: random.Random, scratch: Path) -> Told:
    """A few calls, with failures at random moments in them."""
    folder, copy, told = scratch / "powered", scratch / "copy", Counter[str]()
    shutil.rmtree(folder, ignore_errors=True)
    documents, i = [frozenset[int]()], 0

    def failed(disk: Disk) -> None:
        if rng.random() > 0.06:
            return
        image = disk.image(rng)
        if NAME not in image:
            return
        shutil.rmtree(copy, ignore_errors=True)
        copy.mkdir()
        for name, content in image.items():
            (copy / name).write_bytes(content)
        check(copy, documents)
        told["power failures"] += 1

    disk = Disk(folder, failed)
    store_module.Compaction.in_background = lambda _: None  # type: ignore[method-assign]
    store = Store.create(folder, VOCABULARY, segment_tokens=SMALL)
    for _ in range(25):
        call = next_call(rng, i)
        i = grown(i, call)
        documents[:] = [documents[-1], after(documents[-1], call)]
        do(store, call)
        documents[:] = [documents[-1]]
    disk.quiet = True
    store.close()
    return told


class Faults:
    """A store with a past, another store like it, and a copy that went its own way."""

    def __init__(self, scratch: Path) -> None:
        self.scratch, self.folder = scratch, scratch / "whole"
        self.past: list[dict[str, bytes]] = []
        store = Store.create(self.folder, VOCABULARY, segment_tokens=SMALL)
        store_module.Compaction.in_background = lambda _: None  # type: ignore[method-assign]
        documents = frozenset[int]()
        self.ever: set[int] = set()
        for i in range(60):
            do(store, ("append", str(i)))
            documents = after(documents, ("append", str(i)))
            if i in (15, 30, 45):
                store.flush()
            if i == 40:
                do(store, ("remove", "s3", "other"))
                documents = after(documents, ("remove", "s3", "other"))
            if i == 46:
                store.compact()
            if i % 4 == 0:
                self.past.append(_files(self.folder))
            if i == 57:
                self.copy = shutil.copytree(self.folder, scratch / "apart")
        self.ever, self.documents = set(range(60)), documents
        store.close()
        with Store.open(self.copy, write=True, segment_tokens=SMALL) as apart:
            for i in range(1000, 1003):
                do(apart, ("append", str(i)))
        twin = scratch / "twin"
        with Store.create(twin, VOCABULARY, segment_tokens=SMALL) as other:
            for i in range(2000, 2060):
                do(other, ("append", str(i)))
                if i in (2015, 2030, 2045):
                    other.flush()
                if i == 2046:
                    other.compact()
        self.others = [_files(twin), _files(self.copy)]
        self.right = contents(Store.open(self.folder))
        self.queries = [numbered(i)[0][:2].astype(np.int32) for i in range(0, 60, 4)]
        self.answers = self._answers(Store.open(self.folder))

    def _answers(self, store: Store) -> list[list[int]]:
        shape = SearchShape(matches=100, nodes=200, exact=True)
        return [sorted(store.draft(q, shape, c).tree.tokens.tolist()) for q in self.queries for c in BOTH]

    def damage(self, folder: Path, rng: random.Random) -> tuple[str, str]:
        files = sorted(p for p in folder.iterdir() if p.is_file() and p.name != "lock")
        path = rng.choice(files)
        kind = rng.choice(("flip", "flips", "burst", "cut", "zeros", "gone", "older", "older", "twin", "apart", "swap",
                           "manifests", "folder", "grow"))  # fmt: skip
        data = bytearray(path.read_bytes())
        at = rng.randrange(max(1, len(data)))
        if kind in ("flip", "flips", "burst"):
            places = [at] if kind == "flip" else [rng.randrange(max(1, len(data))) for _ in range(5)]
            for place in range(at, min(len(data), at + 300)) if kind == "burst" else places:
                if data:
                    data[place] ^= rng.randrange(1, 256)
        elif kind == "cut":
            del data[at:]
        elif kind == "zeros":
            first = at // PAGE * PAGE
            data[first : first + PAGE] = bytes(len(data[first : first + PAGE]))
        elif kind == "grow":
            data += rng.randbytes(100)
        elif kind == "swap":
            other = rng.choice(files)
            data, theirs = bytearray(other.read_bytes()), bytes(data)
            other.write_bytes(theirs)
        elif kind == "manifests":
            older = rng.choice(self.past)
            for name in (NAME, COPY):
                (folder / name).write_bytes(older[name])
            return kind, NAME
        elif kind in ("older", "twin", "apart"):
            there = self.past if kind == "older" else self.others[:1] if kind == "twin" else self.others[1:]
            names = [f[n] for f in there for n in f if n == path.name or (n[0] == "0" and n[-4:] == path.name[-4:])]
            if not names:
                return self.damage(folder, rng)
            data = bytearray(rng.choice(names))
        if kind in ("gone", "folder"):
            path.unlink()
            if kind == "folder":
                path.mkdir()
            return kind, path.name
        path.write_bytes(data)
        return kind, path.name

    def __call__(self, rng: random.Random) -> Told:
        folder = self.scratch / "damaged"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self.folder, folder)
        kind, name = self.damage(folder, rng)
        what = f"{kind} {name}"
        refused = False
        try:
            store = Store.open(folder)
            found, answers = contents(store), self._answers(store)
            assert found == self.right, f"{what}: lost {self.right - found}, made up {found - self.right}"
            assert answers == self.answers, f"{what}: drafts differ"
        except SlipstreamError:
            refused = True
        again = shutil.copytree(folder, self.scratch / "again", dirs_exist_ok=False)
        try:
            with Store.open(again, write=True, segment_tokens=SMALL) as store:
                store.append([1, 2, 3], "new")
                found = contents(store)
                found.subtract({("default", (1, 2, 3)): 1})
                assert +found == self.right, f"{what}, writing: lost {self.right - found}, made up {found - self.right}"
        except SlipstreamError:
            refused = True
        shutil.rmtree(again)
        if kind == "folder":
            return Counter(faults=1, refused=int(refused))
        report = repair(folder)
        with Store.open(folder, write=True, segment_tokens=SMALL) as store:
            kept, wrong = contents(store), store.verify()
        assert wrong == [], f"{what}: after repair {wrong}"
        # A log of the copy has the same id, and what both have is ours: so all of it is kept.
        known = as_contents(frozenset(self.ever | {1000, 1001, 1002} if kind == "apart" else self.ever))
        assert not kept - known, f"{what}: repair made up {kept - known}"
        lost = (self.right - kept).total()
        if name in (NAME, COPY, "log.end") and kind != "swap":
            assert lost == 0, f"{what}: repair lost {lost}"
        if lost:
            assert report.sentences, f"{what}: {lost} are lost without a word"
        return Counter({"faults": 1, "refused": int(refused), "lost some": int(lost > 0), f"kind {kind}": 1})


def _files(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file() and p.name != "lock"}


def full(rng: random.Random, scratch: Path) -> Told:
    """Writes fail for a while, again and again; what returned is there, what raised is not."""
    folder, told, left = scratch / "full", Counter[str](), [0, 0]
    shutil.rmtree(folder, ignore_errors=True)
    store = Store.create(folder, VOCABULARY, segment_tokens=SMALL)
    store_module.Compaction.in_background = lambda _: None  # type: ignore[method-assign]

    def failing(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any, **options: Any) -> Any:
            left[0] -= 1
            if left[0] < 0 and left[1] > 0:
                left[1] -= 1
                raise OSError(errno.ENOSPC, "No space left on device")
            return call(*given, **options)

        return run

    real = {n: getattr(os, n) for n in ("pwrite", "fsync", "fdatasync", "posix_fallocate")}
    for name, call in real.items():
        setattr(os, name, failing(call))
    documents, i = frozenset[int](), 0
    for _ in range(40):
        call = next_call(rng, i)
        i = grown(i, call)
        left[:] = rng.randrange(12), rng.choice((0, 1, 3))
        try:
            do(store, call)
            documents = after(documents, call)
        except SlipstreamError:
            told["full disks"] += 1
        left[1] = 0
        found = contents(store)
        assert found == as_contents(documents), (
            f"{call}: {found - as_contents(documents)}, {as_contents(documents) - found}"
        )
    for name, call in real.items():
        setattr(os, name, call)
    store.close()
    check(folder, [documents])
    return told


def live(rng: random.Random, scratch: Path) -> Told:
    """A reader that has read everything once; then its files change. After a refresh it answers right or refuses."""
    whole = scratch / "whole"
    folder = scratch / "live"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(whole, folder)
    store, told = Store.open(folder), Counter(live=1)
    right = contents(store)
    queries = [numbered(i)[0][:2].astype(np.int32) for i in range(0, 60, 3)]

    def answers() -> list[list[int]]:
        shape = SearchShape(matches=100, nodes=200)
        return [store.draft(q, shape, c).tree.tokens.tolist() for q in queries for c in BOTH]

    before = answers()
    path = rng.choice(sorted(folder.glob("*.seg")))
    size = path.stat().st_size
    kind = rng.choice(("cut", "overwrite", "overwrite", "replace"))
    if kind == "cut":
        os.truncate(path, rng.randrange(size))
        try:  # before a refresh it may be wrong about what it checked, but it must live
            answers()
        except SlipstreamError:
            told["seen at once"] += 1
    elif kind == "overwrite":
        with path.open("r+b") as file:
            for _ in range(rng.choice((1, 50, 500))):
                file.seek(rng.randrange(size))
                file.write(rng.randbytes(rng.choice((1, 8, PAGE))))
            file.truncate(size)
    else:
        data = path.read_bytes()
        path.unlink()
        path.write_bytes(data[: rng.randrange(size)])
    try:
        store.refresh()
        assert answers() == before, f"{kind} {path.name}: wrong drafts"
        assert contents(store) == right, f"{kind} {path.name}: wrong documents"
    except SlipstreamError:
        told["refused"] += 1
    return told


# ---- running them


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART")
    parser.add_argument("--count", type=int, default=100, help="trials of each part")
    parser.add_argument("--seconds", type=float, default=1e9, help="and no longer than that for each part")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="slipstream-torture-") as name:
        scratch = Path(name)
        kills, faults = Kills(scratch), Faults(scratch)
        made = scratch / "made"
        fuzz_files.make_store(made)
        parts: dict[str, Callable[[random.Random], Told]] = {
            "kills": kills,
            "interrupts": lambda rng: interrupts(rng, scratch),
            "power": lambda rng: power(rng, scratch),
            "faults": faults,
            "full": lambda rng: full(rng, scratch),
            "live": lambda rng: live(rng, scratch),
            "crafted": lambda rng: fuzz_files.trial(made, scratch, rng.getrandbits(40), share=1.0) + Counter(crafted=1),
        }
        if unknown := set(given.parts) - set(parts):
            sys.exit(f"no part {', '.join(sorted(unknown))}: there are {', '.join(parts)}")
        faults(random.Random(0))  # compiles, before anything is forked
        results = [run(n, parts[n], given) for n in given.parts or parts]
    failures = sum(len(r["failures"]) for r in results)
    print(json.dumps({"torture": {r["part"]: r["trials"] for r in results}, "seed": given.seed, "failures": failures}))
    sys.exit(bool(failures))


def run(name: str, part: Callable[[random.Random], Told], given: argparse.Namespace) -> dict[str, Any]:
    start, counts, failures, trials = time.monotonic(), Counter[str](), [], 0
    while trials < given.count and time.monotonic() - start < given.seconds:
        seed = f"{given.seed} {name} {trials}"
        if name == "kills":  # it forks by itself, and remembers what must be there
            try:
                status, told, said = 0, part(random.Random(seed)), ""
            except Exception as error:
                status, told, said = 1, Counter[str](), repr(error)
                part.left = 0  # type: ignore[attr-defined]
        else:
            status, told, said = fuzz_files.forked(lambda s=seed: part(random.Random(s)))
        trials += 1
        counts += told
        if status:
            failures.append({"trial": trials - 1, "ended": status, "said": said[-700:]})
            print(f"{name} {trials - 1}: ended with {status}\n{said[-1500:]}", file=sys.stderr, flush=True)
    seconds = round(time.monotonic() - start)
    told_all = {"part": name, "trials": trials, "seconds": seconds, **counts, "failures": failures}
    print(json.dumps(told_all), flush=True)
    return told_all


if __name__ == "__main__":
    main()
