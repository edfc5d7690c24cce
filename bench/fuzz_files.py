"""Damaged and crafted files of stores: python bench/fuzz_files.py [--seconds S] [--seed N]

Every file of a small store, sparse and dense, is changed at random, truncated, spliced, or crafted: changed with all
checksums recomputed. Then everything that reads files is called. Each call must succeed or raise a SlipstreamError;
nothing may crash, hang or raise anything else. Runs in forked processes, so a crash is counted and the file is kept.
The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.datastores.durable.log import HEADER, MARK, RECORD, LogHead
from slipstream.datastores.durable.manifest import NAME
from slipstream.datastores.durable.pages import PAGE, checksum, page_sums
from slipstream.datastores.durable.repair import repair
from slipstream.datastores.durable.store import Document, Store
from slipstream.datastores.durable.witness import SLOTS, Witness
from slipstream.datastores.sparse.search import SearchShape
from slipstream.errors import SlipstreamError

VOCABULARY = 300
COLLECTIONS = ("default", "other")
QUERIES = [np.random.default_rng(i).integers(0, VOCABULARY, 1 + i % 3).astype(np.int32) for i in range(8)]
ODD = [
    0,
    1,
    2,
    -1,
    255,
    4095,
    4096,
    1 << 16,
    1 << 31,
    (1 << 32) - 1,
    1 << 40,
    1 << 62,
    "",
    "x",
    None,
    [],
    {},
    1.5,
    True,
]
HANG = 60  # seconds


def make_store(folder: Path, seed: int = 0) -> None:
    """Small, and with all there is: collections, sources, segments, removals before and after a flush, a log."""
    rng = np.random.default_rng(seed)
    with Store.create(folder, VOCABULARY, "print", segment_tokens=20_000) as store:
        for part in range(2):
            for collection in COLLECTIONS:
                documents = [rng.integers(0, VOCABULARY, rng.integers(1, 200)) for _ in range(12)]
                documents[0] = np.concatenate(QUERIES)
                store.extend([Document(d, f"s{i % 5}") for i, d in enumerate(documents)], collection)
                store.extend([Document((), "s2", (10, 20))], collection)
            store.flush()
            if part == 0:
                store.remove("s1")
        for i in range(9):
            store.append(rng.integers(0, VOCABULARY, 30), f"s{i % 5}", COLLECTIONS[i % 2])
        store.remove("s3", "other")
        store.append(rng.integers(0, VOCABULARY, 50), "s3", "other")


def make_vectors(folder: Path) -> None:
    """Parts, a transform and a chunk for the store's documents, of no model."""
    import torch

    from slipstream.datastores.dense import vectors as v
    from slipstream.datastores.dense.texts import TextIndex
    from slipstream.datastores.dense.transform import Moments
    from slipstream.datastores.dense.vector_manifest import Origin, VectorManifest, write_manifest

    with Store.open(folder) as store:
        dense = folder / "dense"
        dense.mkdir()
        generator = torch.Generator().manual_seed(0)
        moments = Moments(16)
        moments.add(torch.randn(100, 16, generator=generator))
        transform = moments.fit(8)
        manifest = VectorManifest(
            Origin("m", "0" * 16, "float32", 1, 16), VOCABULARY, 8, 64, 16, store=store.manifest.id
        )
        from dataclasses import replace
        from functools import partial

        manifest = replace(manifest, transform=v.write_transform(dense, transform))
        for collection in COLLECTIONS:
            documents = list(TextIndex(store.runs(collection)).documents())
            lengths = np.array([len(d) for _, d in documents], np.uint32)
            following = np.concatenate([d[1:-1].astype(np.uint32) for _, d in documents])
            rows = transform(torch.randn(len(following), 16, generator=generator)).half()
            digests = np.array([digest for digest, _ in documents], np.uint64)
            chunk = v.Chunk(collection, digests, lengths, following, rows)
            manifest = v.write_part(dense, manifest, collection, [partial(_pieces_of, chunk)])
        v.write_chunk(dense, chunk, "chunk", manifest.transform)
        write_manifest(dense, manifest)


def _pieces_of(chunk: Any) -> Any:
    from slipstream.datastores.dense.vectors import piece_of

    yield piece_of(chunk)


# ---- what is done to a file


def spoil(path: Path, rng: random.Random, others: list[bytes]) -> str:
    """Change a file at random; its checksums will tell."""
    data = bytearray(path.read_bytes())
    kind = rng.choice(("flip", "flips", "cut", "grow", "zeros", "splice", "other", "random"))
    at = rng.randrange(len(data) + 1)
    if kind in ("flip", "flips"):
        for _ in range(1 if kind == "flip" else rng.randint(2, 40)):
            if data:
                data[rng.randrange(len(data))] ^= rng.randrange(1, 256)
    elif kind == "cut":
        del data[at:]
    elif kind == "grow":
        data += rng.randbytes(rng.choice((1, 100, PAGE)))
    elif kind == "zeros":
        data[at : at + PAGE] = bytes(len(data[at : at + PAGE]))
    elif kind == "splice":
        other = rng.choice(others)
        data[at : at + 500] = other[at : at + 500]
    elif kind == "other":
        data = bytearray(rng.choice(others))
    else:
        data = bytearray(rng.randbytes(rng.choice((0, 7, 100, PAGE, 3 * PAGE))))
    path.write_bytes(data)
    return kind


def craft(path: Path, rng: random.Random) -> str:
    """Change a file, and make all its checksums right."""
    makers: dict[str, Callable[[bytearray, random.Random], bytes]] = {
        ".json": _craft_json, ".seg": _craft_segment, ".log": _craft_log, ".end": _craft_witness,
    }  # fmt: skip
    path.write_bytes(makers.get(path.suffix, _craft_vectors)(bytearray(path.read_bytes()), rng))
    return "crafted"


def _odd(rng: random.Random, value: Any) -> Any:
    if isinstance(value, int) and rng.random() < 0.5:
        return value + rng.choice((-1, 1, 8, -8, PAGE, -PAGE, 1 << 20))
    return rng.choice(ODD)


def _bend(body: Any, rng: random.Random) -> None:
    """Change a value somewhere within."""
    while True:
        if isinstance(body, dict) and body:
            key: Any = rng.choice(sorted(body))
        elif isinstance(body, list) and body:
            key = rng.randrange(len(body))
        else:
            return
        if isinstance(body[key], (dict, list)) and body[key] and rng.random() < 0.85:
            body = body[key]
            continue
        if rng.random() < 0.1 and isinstance(body, dict):
            del body[key]
        else:
            body[key] = _odd(rng, body[key])
        return


def _craft_json(data: bytearray, rng: random.Random) -> bytes:
    body = json.loads(data)
    body.pop("checksum", None)
    for _ in range(rng.randint(1, 2)):
        _bend(body, rng)
    return json.dumps({**body, "checksum": f"{checksum(json.dumps(body, sort_keys=True).encode()):016x}"}).encode()


def _page(magic: bytes, body: dict[str, Any]) -> bytes:
    text = json.dumps(body).encode()
    page = magic + len(text).to_bytes(4, "little") + checksum(text).to_bytes(8, "little") + text
    return page.ljust(PAGE, b"\0")[:PAGE]


def _numbers(data: bytearray, rng: random.Random, first: int, last: int) -> None:
    """Odd numbers into some bytes."""
    for _ in range(rng.randint(1, 20)):
        if last - first >= 8:
            at = rng.randrange(first, last - 7)
            width = rng.choice((2, 4, 8))
            at -= at % width
            number = rng.choice((0, 1, 31, (1 << 8 * width) - 1, rng.getrandbits(8 * width), 1 << (8 * width - 1)))
            data[at : at + width] = number.to_bytes(width, "little")


def _craft_segment(data: bytearray, rng: random.Random) -> bytes:
    header = json.loads(data[20 : 20 + int.from_bytes(data[8:12], "little")])
    sections = header["sections"]
    name = rng.choice(("positions", "keys", "tokens", "documents", "sources", "header"))
    if name == "sources":
        offset, size = sections[name]
        body = json.loads(data[offset : offset + size])
        _bend(body, rng)
        text = json.dumps(body).encode()[:size].ljust(size)
        data[offset : offset + size] = text
    elif name != "header":
        offset, size = sections[name]
        _numbers(data, rng, offset, offset + size)
    for section in ("tokens", "positions", "keys"):
        offset, size = sections[section]
        pages = np.frombuffer(data, np.uint8, -(-size // PAGE) * PAGE, offset)
        there = sections[section + "_sums"][0]
        sums = page_sums(pages).tobytes()
        data[there : there + len(sums)] = sums
    for section in header["checksums"]:
        offset, size = sections[section]
        header["checksums"][section] = f"{checksum(bytes(data[offset : offset + size])):016x}"
    if name == "header":
        _bend(header, rng)
    data[:PAGE] = data[-PAGE:] = _page(b"SLIPSEG1", header)
    return bytes(data)


def _craft_log(data: bytearray, rng: random.Random) -> bytes:
    head = LogHead.parse(bytes(data[:PAGE]))
    assert head is not None
    seed, out = int(head.log, 16), bytearray(data[:PAGE])
    for _ in range(rng.randint(1, 4)):
        collection = rng.choice((b"default", b"other", b"", b"\xff\xfe", b"\xed\xa0\x80"))
        source, body = rng.choice((b"s1", b"", b"\xc3")), rng.randbytes(rng.choice((0, 1, 2, 16, 31, 33, 64)))
        payload = bytes([rng.choice((0, 1, 2, 3, 4, 5, 255))])
        payload += len(collection).to_bytes(2, "little") + rng.choice((len(source), 60_000)).to_bytes(2, "little")
        payload += collection + source + body
        told = checksum(payload, (seed + len(out)) % (1 << 64))
        out += RECORD.pack(MARK, len(payload), told) + payload
    if rng.random() < 0.2:
        out[8 : HEADER.size] = rng.randbytes(HEADER.size - 8)
    slot = (len(out) if rng.random() < 0.8 else rng.getrandbits(rng.choice((13, 63)))).to_bytes(8, "little")
    for at in SLOTS:
        out[at : at + 16] = slot + checksum(slot).to_bytes(8, "little")
    return bytes(out)


def _craft_witness(data: bytearray, rng: random.Random) -> bytes:
    for at in SLOTS:
        if len(data) >= at + Witness.SLOT.size:
            _numbers(data, rng, at, at + Witness.SLOT.size - 8)
            end = at + Witness.SLOT.size
            data[end - 8 : end] = checksum(bytes(data[at : end - 8])).to_bytes(8, "little")
    return bytes(data)


def _craft_vectors(data: bytearray, rng: random.Random) -> bytes:
    facts = json.loads(data[20 : 20 + int.from_bytes(data[8:12], "little")])
    pages = (len(data) - PAGE) // (PAGE + 8)
    if rng.random() < 0.5:
        _bend(facts, rng)
    else:
        name = rng.choice(sorted(facts["arrays"]))
        offset, dtype, shape = facts["arrays"][name]
        _numbers(data, rng, offset, offset + int(np.prod(shape)) * np.dtype(dtype).itemsize)
        sums = page_sums(np.frombuffer(data, np.uint8, pages * PAGE, PAGE)).tobytes()
        data[(pages + 1) * PAGE :] = sums
        facts["sums"] = f"{checksum(sums):016x}"
    data[:PAGE] = _page(b"SLIPVEC1", facts)
    return bytes(data)


# ---- what is asked of it


def ask_everything(folder: Path) -> Counter[str]:
    """Call all that reads files. Only errors of our own may come."""
    told: Counter[str] = Counter()

    def ask(call: Callable[[], Any]) -> Any:
        try:
            answer = call()
            told["answered"] += 1
            return answer
        except SlipstreamError:
            told["refused"] += 1
            return None

    def drafts(store: Store) -> None:
        for collection in COLLECTIONS:
            for query in QUERIES:
                tree = store.draft(query, SearchShape(matches=200, nodes=200), collection).tree
                assert tree.tokens[1:].max(initial=0) < VOCABULARY, "a token of no vocabulary"

    for write in (False, True):
        store = ask(lambda w=write: Store.open(folder, w))
        if store is None:
            continue
        ask(lambda s=store: drafts(s))
        ask(lambda s=store: [list(s.documents(c)) for c in COLLECTIONS])
        ask(lambda s=store: [s.sources(c) for c in COLLECTIONS])
        ask(store.info)
        ask(store.refresh)
        if write:
            ask(lambda s=store: s.remove("s4"))
            ask(lambda s=store: s.append([1, 2, 3], "new"))
            ask(store.compact)
            ask(lambda s=store: drafts(s))
        else:
            ask(store.verify)
            if (folder / "dense").exists():
                ask(lambda s=store: _ask_vectors(s))
        store.close()
    ask(lambda: repair(folder))
    if (repaired := ask(lambda: Store.open(folder))) is not None:
        ask(lambda: drafts(repaired))
    return told


def _ask_vectors(store: Store) -> None:
    from slipstream.datastores.dense.nearest import Vectors
    from slipstream.datastores.dense.vectors import chunks

    vectors = Vectors(store)
    query = np.random.default_rng(0).standard_normal(vectors.manifest.dims).astype(np.float32)
    chunks(vectors.folder, "chunk", vectors.manifest)
    for collection in COLLECTIONS:
        view = vectors.view(collection)
        for root in (0, 5, VOCABULARY - 1, VOCABULARY, 1 << 20):
            for tokens in view.draft(query, root, 5, 10).tokens:
                assert tokens.max(initial=0) < VOCABULARY, "a token of no vocabulary"
        view.read(view.search_all(query, 5), 10)


# ---- trials


def trial(store: Path, scratch: Path, seed: int, share: float = 0.6) -> Counter[str]:
    """share: of the files that are crafted, and not only spoilt."""
    rng = random.Random(seed)
    folder = scratch / "store"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(store, folder)
    files = [p for p in sorted(folder.rglob("*")) if p.is_file() and p.name != "lock"]
    others = [p.read_bytes() for p in files]
    for _ in range(rng.choice((1, 1, 1, 2))):
        path = rng.choice(files)
        if rng.random() < share and path.stat().st_size:
            try:
                kind = craft(path, rng)
            except (ValueError, AssertionError, KeyError, TypeError, IndexError, OverflowError):
                kind = spoil(path, rng, others)  # it was changed before
        else:
            kind = spoil(path, rng, others)
    return ask_everything(folder) + Counter({f"kind {kind}": 1})


def forked(work: Callable[[], Counter[str]]) -> tuple[int, Counter[str], str]:
    """How a forked process ended, what it counted, and what it said if it failed."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        try:
            signal.alarm(HANG)
            os.write(write, json.dumps(work()).encode())
            os._exit(0)
        except BaseException:
            os.write(write, traceback.format_exc()[-3000:].encode())
            os._exit(1)
    os.close(write)
    said = b""
    while part := os.read(read, 1 << 16):
        said += part
    os.close(read)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return status, Counter(json.loads(said)) if status == 0 else Counter(), said.decode(errors="replace")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--each", type=int, default=20, help="trials of a forked process")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="slipstream-fuzz-") as scratch:
        store = Path(scratch) / "made"
        make_store(store)
        make_vectors(store)
        shutil.copytree(store, Path(scratch) / "warm")
        ask_everything(Path(scratch) / "warm")  # compiles, before anything is forked
        counts: Counter[str] = Counter()
        start, seed, failures = time.monotonic(), given.seed, []
        while time.monotonic() - start < given.seconds:

            def some(first: int = seed) -> Counter[str]:
                told: Counter[str] = Counter()
                for number in range(first, first + given.each):
                    Path(scratch, "seed").write_text(str(number))
                    told += trial(store, Path(scratch), number)
                return told

            status, told, said = forked(some)
            counts += told
            if status == 0:
                counts["files"] += given.each
                seed += given.each
            else:
                bad = int(Path(scratch, "seed").read_text())
                failures.append({"seed": bad, "ended": status, "said": said[-600:]})
                print(f"seed {bad}: ended with {status}\n{said}", file=sys.stderr, flush=True)
                counts["files"] += bad - seed + 1
                seed = bad + 1
        seconds = round(time.monotonic() - start)
        told_all = {"part": "fuzz_files", "seconds": seconds, "seed": given.seed, **counts, "failures": failures}
        assert (store / NAME).exists()
        print(json.dumps(told_all))
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
