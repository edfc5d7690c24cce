"""A corpus for benchmarks: about 100M tokens of Python code, and whole held-out packages for queries.

python bench/corpus.py

corpus.json lists the wheels. They are fetched with pip, deduplicated, tokenised with the embedded model's tokenizer and
cached as arrays in the user's cache folder, which takes minutes the first time. Only wheels are used, since fetching an
sdist with pip runs its build. The standard library is that of the running Python, so another version gives another
corpus; the fingerprint is a digest of the arrays.
"""

from __future__ import annotations

import hashlib
import json
import platform
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from slipstream.errors import DamagedError, OptionError, StoreError
from slipstream.kept import cache_folder
from slipstream.loading import embedded
from slipstream.loading.embedded import Progress

LIST = Path(__file__).with_suffix(".json")
SEED = 0  # of the order of documents
LARGEST = 1_000_000  # bytes: longer files are tables
WINDOW = 5  # lines
SEEN = 0.5  # share of a file's windows
ARRAYS = ("tokens", "starts", "held_tokens", "held_starts")


@dataclass(frozen=True)
class Corpus:
    """Documents laid end to end: number d is tokens[starts[d] : starts[d + 1]].

    The store's are in shuffled order, so its first million tokens are a fair sample of the whole.
    """

    tokens: np.ndarray  # (T,) the smallest unsigned type that holds the vocabulary
    starts: np.ndarray  # (D + 1,) int64
    held_tokens: np.ndarray
    held_starts: np.ndarray
    fingerprint: str


def load(progress: Progress | None = None) -> Corpus:
    """The corpus, mapped from the cache folder; made first where it isn't there."""
    place = folder()
    if not (place / "facts.json").is_file():
        _make(place, progress or (lambda _stage, _share: None))
    arrays = {name: np.load(place / f"{name}.npy", mmap_mode="r") for name in ARRAYS}
    return Corpus(**arrays, fingerprint=facts()["fingerprint"])


def queries(corpus: Corpus, count: int, seed: int, *, context: int = 32, continuation: int = 10) -> np.ndarray:
    """Places to ask at, (count, 2): a held-out document, and the position in it of the first token to foretell.

    Uniform among all positions with so many tokens before them and after them in their document; none comes twice.
    """
    choices = np.maximum(np.diff(corpus.held_starts) - context - continuation + 1, 0)  # by document
    ends = np.cumsum(choices)
    if not 0 < count <= ends[-1]:
        raise OptionError(f"count={count} is out of range: the held-out documents have 1 to {ends[-1]} such positions")
    picks = np.random.default_rng(seed).choice(ends[-1], count, replace=False)
    documents = np.searchsorted(ends, picks, side="right")
    return np.stack([documents, picks - (ends - choices)[documents] + context], axis=1)


def facts() -> dict[str, Any]:
    """What was counted when the corpus was made."""
    return json.loads((folder() / "facts.json").read_text("utf-8"))


def folder() -> Path:
    """Where the arrays are: a name for everything that decides their content."""
    wheels = [(p["sha256"], p["held_out"]) for p in _listed()["packages"]]
    recipe = [wheels, platform.python_version(), SEED, LARGEST, WINDOW, SEEN]
    digest = hashlib.sha256(json.dumps(recipe).encode() + (embedded.ensure() / "tokenizer.json").read_bytes())
    return cache_folder() / "corpus" / digest.hexdigest()[:16]


def _listed() -> dict[str, Any]:
    return json.loads(LIST.read_text("utf-8"))


def _make(place: Path, progress: Progress) -> None:
    start = perf_counter()
    place.parent.mkdir(parents=True, exist_ok=True)
    # Held-out packages last: where a file of theirs repeats the store it is the query that goes.
    packages = sorted(_listed()["packages"], key=lambda p: p["held_out"])
    texts = list(_stdlib())
    away = [False] * len(texts)
    for done, package in enumerate(packages):
        progress("fetch", done / len(packages))
        texts += _wheel(_fetch(package))
        away += [package["held_out"]] * (len(texts) - len(away))
    progress("fetch", 1)
    repeated = _near_duplicates(texts, progress)
    documents = _tokenise(texts, progress)  # the repeated too: to say how many tokens they are

    held = np.array(away)
    order = np.random.default_rng(SEED).permutation(len(texts))
    arrays = {}
    for prefix, part in (("", ~held & ~repeated), ("held_", held & ~repeated)):
        chosen = [documents[i] for i in order if part[i]]
        arrays[f"{prefix}tokens"] = np.concatenate(chosen)
        arrays[f"{prefix}starts"] = np.cumsum([0, *map(len, chosen)], dtype=np.int64)
    sizes = np.array([len(d) for d in documents])
    counted = {
        "packages": sum(not p["held_out"] for p in packages),
        "held_out_packages": [p["name"] for p in packages if p["held_out"]],
        "files": len(arrays["starts"]) - 1,
        "held_out_files": len(arrays["held_starts"]) - 1,
        "files_removed": int(repeated.sum()),
        "tokens_removed": int(sizes[repeated].sum()),
        "tokens": len(arrays["tokens"]),
        "held_out_tokens": len(arrays["held_tokens"]),
        "python": platform.python_version(),
        "fingerprint": hashlib.sha256(b"".join(arrays[name] for name in ARRAYS)).hexdigest()[:16],
        "seconds": round(perf_counter() - start, 1),
    }
    with tempfile.TemporaryDirectory(dir=place.parent, prefix=".making-") as made:
        whole = Path(made) / "corpus"
        whole.mkdir()
        for name in ARRAYS:
            np.save(whole / f"{name}.npy", arrays[name])
        (whole / "facts.json").write_text(json.dumps(counted, indent=1) + "\n", "utf-8")
        whole.rename(place)  # whole or not at all


def _fetch(package: dict[str, Any]) -> Path:
    """The package's wheel, in the cache folder and checked."""
    path = cache_folder() / "corpus" / "wheels" / package["file"]
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as into:
            # A fixed platform and Python: the same wheel whichever interpreter asks.
            pure = "--no-deps --only-binary :all: --platform any --implementation py --abi none --python-version 3.13"
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", *pure.split()]
            ran = subprocess.run([*command, "--dest", into, package["pip"]], capture_output=True, text=True)
            if not (Path(into) / path.name).is_file():
                said = [line for line in ran.stderr.splitlines() if line.startswith("ERROR")] or ["nothing"]
                raise StoreError(
                    f"{path.name} could not be fetched: `pip download {package['pip']}` said: {said[-1]}. Put the file "
                    f"into {path.parent} by hand, or run this where pip reaches PyPI"
                )
            (Path(into) / path.name).rename(path)
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != package["sha256"]:
        raise DamagedError(
            f"{path} has the sha256 {found}, and {LIST.name} lists {package['sha256']}: delete the file and run this "
            "again to fetch it anew"
        )
    return path


def _wheel(path: Path) -> Iterator[str]:
    with zipfile.ZipFile(path) as wheel:
        for member in sorted(wheel.infolist(), key=lambda m: m.filename):
            if member.filename.endswith(".py") and member.file_size <= LARGEST:
                yield from _text(wheel.read(member))


def _stdlib() -> Iterator[str]:
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        # Installed packages aren't part of it, and _sysconfigdata holds the paths of the machine it was built on.
        foreign = {"site-packages", "dist-packages"} & set(path.relative_to(root).parts)
        if not foreign and not path.name.startswith("_sysconfigdata") and path.stat().st_size <= LARGEST:
            yield from _text(path.read_bytes())


def _text(data: bytes) -> Iterator[str]:
    """The text, unless there is none or it isn't UTF-8 (test data of parsers and linters)."""
    try:
        text = data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError:
        return
    if text.strip():
        yield text


def _near_duplicates(texts: Sequence[str], progress: Progress) -> np.ndarray:
    """Which files repeat earlier ones, (files,) bool: at least half of their windows occurred before.

    A window is five lines in a row, without blank ones and without indentation. A changed line spoils five windows, so
    half of them is about one changed line in eight when the changes are scattered. All earlier files count together:
    a file patched up from several is a repetition too. A file of fewer lines is one window.
    """
    windows = []
    for number, text in enumerate(texts):
        if number % 1000 == 0:
            progress("compare", number / len(texts))
        lines = [line for line in map(str.strip, text.split("\n")) if line]
        digests = b"".join(hashlib.blake2b(line.encode(), digest_size=8).digest() for line in lines)
        hashes = np.frombuffer(digests.ljust(8 * WINDOW, b"\0"), "<u8")
        rolled = np.zeros(len(hashes) - WINDOW + 1, np.uint64)
        for k in range(WINDOW):
            rolled = rolled * np.uint64(0x9E3779B97F4A7C15) + hashes[k : k + len(rolled)]
        windows.append(np.unique(rolled))
    counts = np.array([len(w) for w in windows])
    owner = np.repeat(np.arange(len(windows)), counts)
    _, first, same = np.unique(np.concatenate(windows), return_index=True, return_inverse=True)
    earlier = owner[first][same] < owner
    progress("compare", 1)
    return np.bincount(owner, earlier, minlength=len(windows)) >= SEEN * counts


def _tokenise(texts: Sequence[str], progress: Progress) -> list[np.ndarray]:
    tokenizer = Tokenizer.from_file(str(embedded.ensure() / "tokenizer.json"))
    tokenizer.encode_special_tokens = True  # "<|im_end|>" in a source file is text, not the end of a turn
    kind = np.min_scalar_type(tokenizer.get_vocab_size() - 1)
    documents: list[np.ndarray] = []
    while len(documents) < len(texts):
        progress("tokenise", len(documents) / len(texts))
        batch = texts[len(documents) : len(documents) + 256]
        encoded = tokenizer.encode_batch_fast(batch, add_special_tokens=False)
        documents += [np.array(e.ids, kind) for e in encoded]
    progress("tokenise", 1)
    return documents


def main() -> None:
    def show(stage: str, share: float) -> None:
        print(f"\r{stage:9}{share:4.0%}", end="\n" if share == 1 else "", file=sys.stderr, flush=True)

    corpus = load(show)
    print(f"kept in {folder()}")
    same = corpus.fingerprint == _listed()["reference"]["fingerprint"]
    print(json.dumps({"benchmark": "corpus", **facts(), "same_as_reference": same}))


if __name__ == "__main__":
    main()
