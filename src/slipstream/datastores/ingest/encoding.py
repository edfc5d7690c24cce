"""Encoding: documents as tokens, on all cores and in bounded memory. The tokenizer is given; nothing here loads one."""

from __future__ import annotations

import copy
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import tokenizers

from slipstream.datastores.ingest.records import Document, text_size

T = TypeVar("T")

_PIECE = 1_000_000  # characters encoded at once: the tokenizer needs about a hundred bytes for each of its tokens
# Where a text can be cut without changing its tokens: pre-tokenizers look past a line end only for more white space
# (and some for a slash), so a single one between two visible characters separates.
_SEAM = re.compile(r"(?<=\S)\n(?=[^\s/])")


def batches(
    documents: Iterable[T], characters: int = 4_000_000, size: Callable[[Any], int] = text_size
) -> Iterator[list[T]]:
    """The documents in groups of at most so many characters; a longer one is a group of its own."""
    batch: list[T] = []
    total = 0
    for document in documents:
        if batch and total + size(document) > characters:
            yield batch
            batch, total = [], 0
        batch.append(document)
        total += size(document)
    if batch:
        yield batch


class FileTokenizer:
    """A tokenizer.json by itself: as much of a fast tokenizer as an Encoder needs, without transformers."""

    is_fast = True

    def __init__(self, path: Path) -> None:
        self.backend_tokenizer = tokenizers.Tokenizer.from_file(str(path))

    def get_vocab(self) -> dict[str, int]:
        return self.backend_tokenizer.get_vocab(with_added_tokens=True)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.backend_tokenizer.decode([int(i) for i in ids], skip_special_tokens=False))


class Encoder:
    """Documents to tokens, on all cores where the tokenizer is a fast one."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._backend: Any = None
        if getattr(tokenizer, "is_fast", False):
            # A copy, since transformers leaves the truncation of its last call switched on in the original.
            self._backend = copy.deepcopy(tokenizer.backend_tokenizer)
            self._backend.no_truncation()
            self._backend.no_padding()
        self._line_end = self._ids(["\n"])[0]

    def encode(self, documents: Sequence[Document]) -> list[np.ndarray]:
        """The token ids of each document, int32 [tokens], without special tokens but those a chat template writes."""
        texts = [self._text(document) for document in documents]
        pieces = [(i, piece) for i, text in enumerate(texts) for piece in _pieces(text)]
        parts: list[list[np.ndarray]] = [[] for _ in texts]
        whole: set[int] = set()  # documents whose seams showed: encoded again in one go
        for batch in batches(pieces, size=lambda pair: len(pair[1])):
            for (i, _), ids in zip(batch, self._ids([piece for _, piece in batch]), strict=True):
                lead = len(self._line_end) if parts[i] else 0  # later pieces begin with a line end that isn't theirs
                if not np.array_equal(ids[:lead], self._line_end[:lead]):
                    whole.add(i)
                parts[i].append(ids[lead:])
        for i in whole:
            parts[i] = self._ids([texts[i]])
        return [np.concatenate(own) for own in parts]

    def _ids(self, texts: list[str]) -> list[np.ndarray]:
        if self._backend is None:
            rows = [self.tokenizer(t, add_special_tokens=False, verbose=False)["input_ids"] for t in texts]
        else:
            # The fast one spares the offsets; older versions of tokenizers don't have it.
            encode = getattr(self._backend, "encode_batch_fast", self._backend.encode_batch)
            rows = [encoding.ids for encoding in encode(texts, add_special_tokens=False)]
        return [np.array(row, np.int32) for row in rows]

    def _text(self, document: Document) -> str:
        text = document if isinstance(document, str) else self._render(document)
        try:
            text.encode()
        except UnicodeEncodeError:  # JSON can hold half a character, which no tokenizer takes
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return text

    def _render(self, messages: list[dict[str, str]]) -> str:
        if getattr(self.tokenizer, "chat_template", None):
            try:
                return str(self.tokenizer.apply_chat_template(messages, tokenize=False))
            except Exception:  # many templates refuse a system message, or a conversation the assistant opens
                pass
        return "\n\n".join(message["content"] for message in messages)


def _pieces(text: str) -> Iterator[str]:
    """A long text cut at line ends, the line end before it repeated at the beginning of each later piece.

    For some tokenizers mark where a text begins: so the mark comes before the line end, and goes with it.
    """
    start = 0
    while len(text) - start > _PIECE and (seam := _SEAM.search(text, start + _PIECE)):
        yield "\n" * bool(start) + text[start : seam.end()]
        start = seam.end()
    yield "\n" * bool(start) + text[start:]


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """16 hex digits that are equal where every text gets the same ids, in any process.

    The sha256 of the vocabulary, one line of token and id after the other, sorted; and for a fast tokenizer of its
    backend's JSON from the added tokens on, which is all of it but version, truncation and padding. The chat template
    has no part in it: it decides what is written, not its ids.
    """
    lines = sorted(f"{token}\t{number}\n" for token, number in tokenizer.get_vocab().items())
    digest = hashlib.sha256("".join(lines).encode("utf-8", "surrogatepass"))
    if getattr(tokenizer, "is_fast", False):
        # Cut as text: to parse a megabyte of merges takes ten times as long. Within a JSON string the mark would be
        # escaped, so it can't be found too early.
        description = tokenizer.backend_tokenizer.to_str()
        digest.update(description[max(0, description.find('"added_tokens":')) :].encode())
    return digest.hexdigest()[:16]
