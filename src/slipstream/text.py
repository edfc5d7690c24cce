"""Between text and tokens: encodes prompts, decodes answers piece by piece, cuts them at stop strings."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from numbers import Integral
from typing import Any

from transformers import PreTrainedTokenizerFast

from slipstream.errors import OptionError, PromptError

Messages = Sequence[Mapping[str, Any]]
Prompt = str | Sequence[int] | Messages
PROMPTS = "a string, token ids or chat messages, or a list of these"
BYTES = bytes | bytearray | memoryview  # sequences of integers, but never meant as token ids


def split_batch(prompt: Prompt | Sequence[Prompt]) -> tuple[list[Prompt], bool]:
    """The prompts, and whether they were given as a list of several.

    One prompt is a string, token ids (a list, or a row of a tensor), or a list of chat messages; a list of these is a
    batch.
    """
    if isinstance(prompt, str):
        return [prompt], False
    if isinstance(prompt, Mapping):
        raise PromptError(f"a mapping with {list(prompt)} is no prompt: give a list of messages, or its 'input_ids'")
    items: Any = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    if isinstance(items, BYTES) or not isinstance(items, Iterable):
        raise PromptError(f"a prompt is {PROMPTS}; found {'bytes' if isinstance(items, BYTES) else repr(prompt)}")
    items = list(items)
    if not items:
        raise PromptError("the prompt is empty: give a string, token ids, chat messages, or a list of these")
    if alike(items, Integral) or alike(items, Mapping):
        return [items], False
    if alike(items, Sequence) and not any(isinstance(i, BYTES) for i in items):
        return items, True
    kinds = sorted({type(i).__name__ for i in items})
    raise PromptError(f"a prompt is {PROMPTS}; found a list of {kinds}")


def alike(items: Iterable[Any], kind: type) -> bool:
    """Whether all are instances of an abstract class. Each type is looked at once: for 4,096 token ids the lookups
    would take a millisecond."""
    return all(issubclass(one, kind) for one in set(map(type, items)))


def predictions(given: Any, count: int) -> list[Any]:
    """One prediction per prompt, from one for all or from a list."""
    if not isinstance(given, Sequence) or isinstance(given, str | bytes) or alike(given, Integral):
        return [given] * count
    if len(given) != count:
        raise OptionError(f"{len(given)} predictions for {count} prompts: give one, or one per prompt")
    return list(given)


def encode(prompt: Prompt, tokenizer: Any, template: bool = True) -> list[int]:
    """Token ids. A string is one user message to a model with a chat template, unless template is False."""
    if not isinstance(prompt, str) and alike(prompt, Integral):
        return list(map(int, prompt))  # type: ignore[arg-type]
    if tokenizer is None:
        raise PromptError("this model came without a tokenizer: give token ids, or load it with tokenizer=…")
    chat = not isinstance(prompt, str)
    if prompt == "":
        raise PromptError("the prompt is empty: give some text to answer or to continue")
    if chat or (template and tokenizer.chat_template):
        if not tokenizer.chat_template:
            raise PromptError("this model's tokenizer has no chat template: give a string instead of messages")
        messages = prompt if chat else [{"role": "user", "content": prompt}]
        try:
            text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        except Exception as error:
            raise PromptError(f"the chat template refused the messages: {error}") from error
        return tokenised(text, tokenizer, special=False)
    return tokenised(str(prompt), tokenizer)


def tokenised(text: str, tokenizer: Any, *, special: bool = True) -> list[int]:
    """The ids of a text's tokens, between the special ones that the tokenizer adds. Where transformers' method only
    calls the tokenizer of `tokenizers`, that one is called directly and not asked for more than ids: half the time."""
    kind, common = type(tokenizer), PreTrainedTokenizerFast
    if all(getattr(kind, name, None) is getattr(common, name) for name in ("__call__", "_encode_plus")):
        inner = tokenizer.backend_tokenizer
        cuts = inner.truncation is not None or inner.padding is not None  # as an earlier call left it
        if not cuts and inner.encode_special_tokens == tokenizer.split_special_tokens:
            return list(inner.encode_batch_fast([text], add_special_tokens=special)[0].ids)
    return list(tokenizer(text, add_special_tokens=special)["input_ids"])


def end_tokens(model: Any, tokenizer: Any) -> frozenset[int]:
    """All token ids that end an answer, by the generation config, the model's config and the tokenizer."""
    ends: set[int] = set()
    for place in (getattr(model, "generation_config", None), model.config.get_text_config(), tokenizer):
        ids = getattr(place, "eos_token_id", None)
        ends.update([ids] if isinstance(ids, int) else ids or [])
    return frozenset(ends)


class Detokenizer:
    """One answer's text as it grows. It is the request's `stop`, called once with every emitted token. Tokens are
    decoded when the text is read, or at once if there are stop strings."""

    def __init__(
        self,
        tokenizer: Any,
        stop: Iterable[str] = (),
        eos: frozenset[int] = frozenset(),
        after: Sequence[int] = (),
    ) -> None:
        """after: the last tokens of a text that the answer continues. Some tokenizers drop a text's first space."""
        self._tokenizer, self._eos = tokenizer, eos
        self._decode = decoder(tokenizer)
        self.by_token = False  # whether `lengths` is needed; set before the first token
        self._stop = tuple(s for s in stop if s)
        self._unread: list[int] = []  # tokens that are not decoded yet
        self._before = self._decode(list(after)) if after else ""  # decode(tokens[base:shown])
        if self._before.endswith("\ufffd"):  # within a character
            self._before, after = "", ()
        self._tokens = list(after)
        self._begin = len(self._tokens)  # the answer's first token
        # Tokens before _shown are in the text already. Those from _base on are decoded together, since a token's text
        # depends on the token before it (spaces, and characters of several tokens).
        self._base, self._shown = 0, self._begin
        self._text = ""  # complete characters only
        self._held = ""  # complete characters of tokens whose last character is incomplete
        self._lengths: list[int] = []
        self._stopped = False

    def __call__(self, token: int) -> str | None:
        self._unread.append(token)
        if self._stop:
            self._read()
        return "stop" if self._stopped or token in self._eos else None

    @property
    def text(self) -> str:
        """The text so far, complete characters only."""
        self._read()
        return self._text

    @property
    def lengths(self) -> list[int]:
        """After each token: the length of the text that is final. Only with `by_token`."""
        self._read()
        return self._lengths

    def visible(self) -> str:
        """The text that is final: without what may be the beginning of a stop string."""
        self._read()
        return self._certain()

    def finish(self) -> str:
        """The text if no token follows: incomplete characters are decoded as they are."""
        if self._tokenizer is None:
            return ""
        if len(self._tokens) == self._begin and not self._lengths:  # no part of it was read before
            said = [token for token in self._unread if token not in self._eos]
            return self._decode([*self._tokens, *said])[len(self._before) :]
        self._read()
        if self._stopped:
            return self._text
        return self._text + self._decode(self._tokens[self._base :])[len(self._before) :]

    def _read(self) -> None:
        unread, self._unread = self._unread, []
        if not (self._stop or self.by_token) and self._extend([t for t in unread if t not in self._eos]):
            return
        for token in unread:
            if token not in self._eos:
                known = len(self._text)
                if not self._extend([token]):
                    self._tokens.append(token)
                self._cut(known)
            self._lengths.append(len(self._certain()))

    def _certain(self) -> str:
        if self._stopped:
            return self._text
        end = len(self._text)
        for s in self._stop:
            # Only places of its first character: strings may be long, and this runs at every token.
            at = self._text.find(s[0], max(0, len(self._text) - len(s) + 1), end)
            while at >= 0 and not s.startswith(self._text[at:]):
                at = self._text.find(s[0], at + 1, end)
            end = at if at >= 0 else end
        return self._text[:end]

    def _extend(self, tokens: list[int]) -> bool:
        """Add what these say, all at once. Unless they end in the middle of a character: then there is nothing of them
        yet, but for stop strings in what is whole."""
        if not tokens or self._tokenizer is None:
            return True
        after = self._decode([*self._tokens[self._base :], *tokens])
        new = after[len(self._before) :]
        if not new or new.endswith("\ufffd"):
            self._held = new.rstrip("\ufffd")
            return False
        self._held = ""
        self._text += new
        self._base, self._shown = self._shown, len(self._tokens) + len(tokens)
        self._tokens += tokens
        self._before = self._decode(self._tokens[self._base :])
        return True

    def _cut(self, known: int) -> None:
        """Cut at the earliest stop string that ends after the first `known` characters."""
        text = self._text + self._held  # a stop string here ends the text, whatever the incomplete character becomes
        found = [text.find(s, max(0, known - len(s) + 1)) for s in self._stop]
        places = [place for place in found if place >= 0]
        if places:
            self._text, self._stopped = text[: min(places)], True


def decoder(tokenizer: Any) -> Callable[[list[int]], str]:
    """A function from tokens to text, without special tokens. It is called twice for every token of a stream. So where
    transformers' method only calls the tokenizer of `tokenizers`, that one is called directly: a third of the time."""
    plain = getattr(type(tokenizer), "_decode", None) is PreTrainedTokenizerFast._decode
    if plain and not tokenizer.clean_up_tokenization_spaces:
        return partial(tokenizer.backend_tokenizer.decode, skip_special_tokens=True)
    return lambda tokens: str(tokenizer.decode(tokens, skip_special_tokens=True))


def token_bytes(tokenizer: Any, token: int, text: str) -> bytes | None:
    """The bytes of one token, which may be a part of a character. text: the token as text. None: they are not known."""
    if "\ufffd" not in text:
        return text.encode()
    piece = tokenizer.convert_ids_to_tokens(token)
    if byte := re.fullmatch(r"<0x([0-9A-F]{2})>", piece):  # SentencePiece's byte tokens
        return bytes([int(byte[1], 16)])
    return bytes(_BYTES[c] for c in piece) if all(c in _BYTES for c in piece) else None


def _byte_level_alphabet() -> dict[str, int]:
    """Byte-level BPE writes printable bytes as themselves and the others as characters from 256 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTES = _byte_level_alphabet()
