"""Encode documents as tokens, on all cores and in bounded memory, with a given tokenizer."""

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

_PIECE = 1_000_000  # characters encoded at once: the tokenizer needs about a hundred bytes per token
# Where a text can be cut without changing its tokens: a single line end between two visible characters. Pre-tokenizers
# look beyond a line end only for more white space, and some for a slash.
_SEAM = re.compile(r"(?<=\S)\n(?=[^\s/])")


def batches(
    documents: Iterable[T], characters: int = 4_000_000, size: Callable[[Any], int] = text_size
) -> Iterator[list[T]]:
    """Groups of documents with at most so many characters together; a longer document is a group of its own."""
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
    """A tokenizer.json without transformers: the part of a fast tokenizer that an Encoder needs."""

    is_fast = True

    def __init__(self, path: Path) -> None:
        self.backend_tokenizer = tokenizers.Tokenizer.from_file(str(path))

    def get_vocab(self) -> dict[str, int]:
        return self.backend_tokenizer.get_vocab(with_added_tokens=True)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.backend_tokenizer.decode([int(i) for i in ids], skip_special_tokens=False))


class Encoder:
    """Encodes documents, on all cores if the tokenizer is a fast one."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._backend: Any = None
        if getattr(tokenizer, "is_fast", False):
            # A copy without truncation: transformers leaves the truncation of its last call on.
            self._backend = copy.deepcopy(tokenizer.backend_tokenizer)
            self._backend.no_truncation()
            self._backend.no_padding()
        self._line_end = self._ids(["\n"])[0]

    def encode(self, documents: Sequence[Document]) -> list[np.ndarray]:
        """The token ids of each document, int32 [tokens], without special tokens except a chat template's."""
        texts = [self._text(document) for document in documents]
        pieces = [(i, piece) for i, text in enumerate(texts) for piece in _pieces(text)]
        parts: list[list[np.ndarray]] = [[] for _ in texts]
        whole: set[int] = set()  # documents that the cuts changed: they are encoded again as a whole
        for batch in batches(pieces, size=lambda pair: len(pair[1])):
            for (i, _), ids in zip(batch, self._ids([piece for _, piece in batch]), strict=True):
                lead = len(self._line_end) if parts[i] else 0  # later pieces begin with the previous line end
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
            # The fast one does not compute offsets. Older versions of tokenizers lack it.
            encode = getattr(self._backend, "encode_batch_fast", self._backend.encode_batch)
            rows = [encoding.ids for encoding in encode(texts, add_special_tokens=False)]
        return [np.array(row, np.int32) for row in rows]

    def _text(self, document: Document) -> str:
        text = document if isinstance(document, str) else self._render(document)
        try:
            text.encode()
        except UnicodeEncodeError:  # a lone surrogate, which JSON can hold and tokenizers refuse
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return text

    def _render(self, messages: list[dict[str, str]]) -> str:
        if getattr(self.tokenizer, "chat_template", None):
            try:
                return str(self.tokenizer.apply_chat_template(messages, tokenize=False))
            except Exception:  # many templates refuse system messages, or an assistant's message first
                pass
        return "\n\n".join(message["content"] for message in messages)


def _pieces(text: str) -> Iterator[str]:
    """A long text cut at line ends; each later piece begins with the line end before it.

    Some tokenizers mark the beginning of a text. The mark comes before that line end, and both are removed.
    """
    start = 0
    while len(text) - start > _PIECE and (seam := _SEAM.search(text, start + _PIECE)):
        yield "\n" * bool(start) + text[start : seam.end()]
        start = seam.end()
    yield "\n" * bool(start) + text[start:]


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """16 hex digits that are equal if every text gets the same ids, in any process.

    The sha256 of the vocabulary, as sorted lines of token and id; and for a fast tokenizer, of its backend's JSON from
    the added tokens on, which leaves out version, truncation and padding. The chat template does not count, since it
    does not change the ids of a text.
    """
    lines = sorted(f"{token}\t{number}\n" for token, number in tokenizer.get_vocab().items())
    digest = hashlib.sha256("".join(lines).encode("utf-8", "surrogatepass"))
    if getattr(tokenizer, "is_fast", False):
        # Cut as text, since parsing a megabyte of merges takes ten times as long. Inside a JSON string the quotes would
        # be escaped, so the search can't match too early.
        description = tokenizer.backend_tokenizer.to_str()
        digest.update(description[max(0, description.find('"added_tokens":')) :].encode())
    return digest.hexdigest()[:16]
