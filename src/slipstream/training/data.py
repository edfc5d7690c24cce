"""Training data: files of `collect` as arrays, the held-out split, and batches in an order that depends on the seed.

A row of a batch holds one text, truncated to a length and padded on the right. Causal attention never looks to the
right, so no mask is needed. Texts of similar length share a batch.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.errors import OptionError

HELD_OUT = 0.02  # of the texts
FIRST = 2  # index of the first token that can be predicted: 0 is read, 1 is the root
_POOL = 64  # as many batches of texts are sorted by length together
_STEP = 32  # rows are padded to a multiple of this, to have few shapes


@dataclass(frozen=True)
class Texts:
    tokens: NDArray[np.int32]  # of all texts, one after the other
    counted: NDArray[np.bool_]  # whether predictions of this token count
    starts: NDArray[np.int64]  # (texts + 1,)

    def __len__(self) -> int:
        return len(self.starts) - 1

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        return np.diff(self.starts)

    @cached_property
    def guesses(self) -> NDArray[np.int64]:
        """How many counted tokens each text has."""
        return np.add.reduceat(self.counted, self.starts[:-1], dtype=np.int64)

    def text(self, number: int) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """Its tokens, and which of them count."""
        span = slice(self.starts[number], self.starts[number + 1])
        return self.tokens[span], self.counted[span]

    def fingerprint(self) -> str:
        digest = hashlib.sha256(self.tokens.tobytes())
        digest.update(self.counted.tobytes() + self.starts.tobytes())
        return digest.hexdigest()[:16]

    def frequent(self, size: int, vocabulary: int) -> NDArray[np.int64]:
        """The ids of the most frequent counted tokens, ascending."""
        found = np.bincount(self.tokens[self.counted], minlength=vocabulary)
        return np.sort(np.argsort(-found, kind="stable")[:size])

    def batch(self, texts: Sequence[int] | NDArray[np.int64]) -> Batch:
        longest = int(self.lengths[list(texts)].max())
        width = -(-longest // _STEP) * _STEP
        tokens = np.zeros((len(texts), width), np.int64)
        counted = np.zeros((len(texts), width), bool)
        for row, text in enumerate(texts):
            tokens[row, : self.lengths[text]], counted[row, : self.lengths[text]] = self.text(text)
        rows, columns = counted.nonzero()
        return Batch(
            torch.from_numpy(tokens), torch.from_numpy(rows * width + columns), torch.from_numpy(columns.copy())
        )


@dataclass(frozen=True)
class Batch:
    tokens: torch.Tensor  # (b, t)
    places: torch.Tensor  # (n,) indices of the counted tokens in the flattened batch
    columns: torch.Tensor  # (n,) indices of the counted tokens within their rows

    def to(self, device: torch.device) -> Batch:
        """Copy to a device, to a GPU without waiting."""
        parts = (self.tokens, self.places, self.columns)
        if device.type == "cuda":
            parts = tuple(part.pin_memory() for part in parts)  # type: ignore[assignment]
        return Batch(*(part.to(device, non_blocking=True) for part in parts))

    def aims(self, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
        """For every counted token, the flat index where it is predicted at this depth (n,), and whether that is within
        its row (n,). If not, the index is 0."""
        back = FIRST + depth
        reaches = self.columns >= back
        return torch.where(reaches, self.places - back, 0), reaches


def read_texts(
    paths: Sequence[Path],
    vocabulary: int,
    model: str | None = None,
    length: int = 1024,
    count_all: bool = False,
) -> tuple[Texts, Texts]:
    """The texts to train on, and the held-out ones: those with the largest hashes of their ids.

    vocabulary: number of token ids. model: which must have written the texts; None: any. length: tokens of a text at
    most. count_all: also count tokens that the target only read.
    """
    if length <= FIRST:
        raise OptionError(f"length={length} is out of range: rows need at least {FIRST + 1} tokens")
    kept: list[tuple[float, NDArray[np.int32], NDArray[np.bool_]]] = []
    for place, line in _lines(paths):
        name, tokens, counted = _text(place, line, vocabulary, model, count_all)
        counted[:FIRST] = False
        if counted[:length].any():
            kept.append((_share(name), tokens[:length], counted[:length]))
    if len(kept) < 2:
        raise OptionError(
            f"{', '.join(map(str, paths))}: {len(kept)} texts with answers within {length} tokens, at least 2 are "
            "needed: collect more with `slipstream collect`, or raise the length"
        )
    last = max(share for share, _, _ in kept)
    held = [share >= min(1 - HELD_OUT, last) for share, _, _ in kept]
    if all(held):
        held[0] = False
    sides = [[text[1:] for text, out in zip(kept, held, strict=True) if out is side] for side in (False, True)]
    return put_together(sides[0]), put_together(sides[1])


def _lines(paths: Sequence[Path]) -> Iterator[tuple[str, Any]]:
    for path in paths:
        try:
            with path.open("rb") as file:
                for number, line in enumerate(file, 1):
                    if not line.endswith(b"\n"):
                        warnings.warn(f"{path}, line {number} is cut off and was left out", stacklevel=2)
                        continue
                    try:
                        yield f"{path}, line {number}", json.loads(line)
                    except ValueError as error:
                        raise OptionError(
                            f"{path}, line {number}: not JSON ({error}): give a file that `slipstream collect` wrote"
                        ) from error
        except OSError as error:
            raise OptionError(
                f"{path} can't be read ({error.strerror}): give a file that `slipstream collect` wrote"
            ) from error


def _text(
    place: str, line: Any, vocabulary: int, model: str | None, count_all: bool
) -> tuple[str, NDArray[np.int32], NDArray[np.bool_]]:
    try:
        name, author = str(line["id"]), str(line["model"])
        tokens = np.array(line["tokens"], np.int32)
        answers = np.array(line["answers"], np.int64).reshape(-1, 2)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        has = ", ".join(line) if isinstance(line, dict) else type(line).__name__
        raise OptionError(
            f"{place}: found {has}; needed are id, tokens, answers and model, as `slipstream collect` writes them"
        ) from error
    if model is not None and author != model:
        raise OptionError(
            f"{place} was written by {author}, but the head is for {model}: heads learn from their own target's words. "
            "Collect with it, or train all the same with --any-author"
        )
    if tokens.size and not 0 <= tokens.min() <= tokens.max() < vocabulary:
        raise OptionError(
            f"{place} holds the id {max(tokens.max(), -tokens.min())}, but the model has ids from 0 to "
            f"{vocabulary - 1}: the text was written with another tokenizer; collect with this model"
        )
    counted = np.full(len(tokens), count_all)
    for begin, end in answers:
        if not 0 <= begin <= end <= len(tokens):
            raise OptionError(f"{place}: an answer from {begin} to {end} in {len(tokens)} tokens: collect it again")
        counted[begin:end] = True
    return name, tokens, counted


def _share(name: str) -> float:
    """A hash of an id, from 0 to 1."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "big") / 2**48


def put_together(kept: Sequence[tuple[NDArray[np.int32], NDArray[np.bool_]]]) -> Texts:
    """Texts from pairs of tokens and which of them count."""
    starts = np.cumsum([0, *(len(tokens) for tokens, _ in kept)], dtype=np.int64)
    return Texts(np.concatenate([t for t, _ in kept]), np.concatenate([c for _, c in kept]), starts)


class Order:
    """The batches of all epochs, one after the other, by number. Each is an array of texts' numbers."""

    def __init__(self, texts: Texts, batch_tokens: int, seed: int) -> None:
        self.texts, self.batch_tokens, self.seed = texts, batch_tokens, seed
        self._epoch, self._begin = 0, 0  # of the current batches: their epoch, the number of the first
        self._batches = self.epoch(0)

    def epoch(self, number: int) -> list[NDArray[np.int64]]:
        """The batches of one epoch: every text once, in random order, similar lengths together."""
        random = np.random.default_rng((self.seed, number))
        shuffled = random.permutation(len(self.texts))
        pool = max(1, _POOL * self.batch_tokens // max(1, int(self.texts.lengths.mean())))
        batches: list[NDArray[np.int64]] = []
        for start in range(0, len(shuffled), pool):
            some = shuffled[start : start + pool]
            batches += cut(some[np.argsort(self.texts.lengths[some], kind="stable")], self.texts, self.batch_tokens)
        return [batches[i] for i in random.permutation(len(batches))]

    def __getitem__(self, place: int) -> NDArray[np.int64]:
        """Fast if numbers are asked for in ascending order."""
        if place < self._begin:
            self._epoch, self._begin, self._batches = 0, 0, self.epoch(0)
        while place >= self._begin + len(self._batches):
            self._begin += len(self._batches)
            self._epoch += 1
            self._batches = self.epoch(self._epoch)
        return self._batches[place - self._begin]

    def until(self, epochs: int) -> int:
        """Number of batches in so many epochs."""
        return sum(len(self.epoch(number)) for number in range(epochs))


def cut(texts: NDArray[np.int64], of: Texts, batch_tokens: int) -> Iterator[NDArray[np.int64]]:
    """Divide texts, sorted by length, into batches of at most `batch_tokens` tokens, padding included. A longer text is
    a batch of its own."""
    begin = 0
    for end in range(1, len(texts) + 1):
        width = -(-int(of.lengths[texts[end - 1]]) // _STEP) * _STEP
        if end - begin > 1 and (end - begin) * width > batch_tokens:
            yield texts[begin : end - 1]
            begin = end - 1
    if begin < len(texts):
        yield texts[begin:]
