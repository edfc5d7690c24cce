"""Training texts from a datastore: the answers that `--learn` appended to it.

A store has answers without their prompts. So training uses the answers alone, and the trial continues their beginnings.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.datastores.durable.store import LEARNED, Store
from slipstream.datastores.ingest.encoding import tokenizer_fingerprint
from slipstream.errors import OptionError, StoreError
from slipstream.heads.base import Lender
from slipstream.training.own_prompts import HELD_OUT
from slipstream.user_files import write_text

ANSWERS, HELD = "answers.jsonl", "held.jsonl"
MOST = 50_000  # answers used, the newest: minutes of training read no more, and they resemble future ones most
FEWEST = 10  # answers needed, one of which is for the trial
SHORTEST = 16  # tokens of an answer at least, since half of it is the trial's prompt
OPENING = 256  # tokens of an answer that are the trial's prompt, at most


def take_answers(store: Path, collection: str, model: Any, tokenizer: Any, folder: Path) -> int:
    """Write the store's answers into the folder, every tenth one for the trial. Returns how many are to train on."""
    with Store.open(store, tokenizer=tokenizer_fingerprint(tokenizer)) as opened:
        check_vocabulary(opened, Lender.of(model).vocab_size)
        found = different(opened.documents(collection, LEARNED))
        others = ", ".join(opened.collections) or "none"
    if len(found) < FEWEST:
        raise OptionError(
            f"{store} holds {len(found)} different answers of {SHORTEST} tokens or more in the collection "
            f"{collection!r}, at least {FEWEST} are needed: let `--learn` append some first, or name another "
            f"--collection (there are: {others})"
        )
    author = Lender.of(model).name
    items = list(found.items())
    learnt = [
        {"id": name, "tokens": tokens, "answers": [[0, len(tokens)]], "model": author}
        for i, (name, tokens) in enumerate(items)
        if (i + 1) % HELD_OUT
    ]
    _write(folder / HELD, [tokens for i, (_, tokens) in enumerate(items) if not (i + 1) % HELD_OUT])
    _write(folder / ANSWERS, learnt)  # last: if this file exists, all files do
    return len(learnt)


def count_tokens(folder: Path) -> int:
    """Number of tokens of the answers to train on."""
    with (folder / ANSWERS).open(encoding="utf-8") as lines:
        return sum(len(json.loads(line)["tokens"]) for line in lines)


def openings(folder: Path) -> list[list[int]]:
    """The prompts of the trial: the first halves of the held-out answers."""
    lines = (folder / HELD).read_text(encoding="utf-8").splitlines()
    return [tokens[: min(len(tokens) // 2, OPENING)] for tokens in map(json.loads, lines)]


def different(documents: Any) -> dict[str, list[int]]:
    """The newest answers that are long enough, each once, by a hash of their tokens."""
    found: dict[str, list[int]] = {}
    for tokens in documents:
        if len(tokens) >= SHORTEST:
            name = _name(tokens)
            found.pop(name, None)  # a repeated answer counts as new
            found[name] = tokens.tolist()
            if len(found) > MOST:
                del found[next(iter(found))]
    return found


def check_vocabulary(store: Store, vocabulary: int) -> None:
    """Raise if the store has token ids that the model doesn't have: its tokenizer may be unknown."""
    if store.manifest.vocabulary > vocabulary:
        raise StoreError(
            f"{store.folder} holds ids up to {store.manifest.vocabulary - 1}, the model knows {vocabulary} ids: the "
            "store was made with another tokenizer"
        )


def _name(tokens: NDArray[Any]) -> str:
    return hashlib.sha256(np.asarray(tokens, np.int32).tobytes()).hexdigest()[:16]


def _write(file: Path, lines: Sequence[Any]) -> None:
    write_text(file, "".join(json.dumps(line) + "\n" for line in lines))
