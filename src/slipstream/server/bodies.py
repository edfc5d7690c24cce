"""The bodies that clients receive: whole answers, and the events of streams, in the format of OpenAI's API."""

from __future__ import annotations

import json
import secrets
from codecs import getincrementaldecoder
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from time import time
from typing import Any

from slipstream.counts import Counts
from slipstream.server import schema as s
from slipstream.server.backend import Asked, Chunk, Logprob, Spelled
from slipstream.server.tool_calls import CallArguments, CallBegins, Content, Delta, ToolCall, read_call
from slipstream.stats import Stats

DONE = "data: [DONE]\n\n"
# The drafter's own message is not sent, since it may name files of the server.
NOT_KEPT = "the drafter failed after the answer, and may not have kept it; the server's log says why"
LOWEST = -9999.0  # log probability: JSON has no minus infinity, and this is what OpenAI's API writes
encode = json.JSONEncoder(ensure_ascii=False).encode  # one encoder: `json.dumps` would make one for every event


def event(body: Mapping[str, Any], name: str | None = None) -> str:
    """One server-sent event."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {encode(body)}\n\n"


@dataclass
class Choice:
    """One answer, put together from its chunks."""

    index: int
    asked: Asked
    streamed: bool = False  # log probabilities are sent with their chunks, and not kept
    text: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    finish: str = ""
    stats: Stats | None = None  # set by the last chunk

    def __post_init__(self) -> None:
        self._parser = self.asked.parser() if self.asked.parser is not None else None
        self._forced = ""
        self._reported = 0  # characters that `pieces` has returned
        self._decode = getincrementaldecoder("utf-8")("replace").decode
        self._end = 0  # of the tokens that `offsets` was called with, in characters

    def take(self, chunk: Chunk) -> list[Delta]:
        """Add a chunk. Returns its deltas: content, and pieces of calls."""
        if not self.streamed:
            self.logprobs += chunk.logprobs
        deltas = self._deltas(chunk)
        for delta in deltas:
            match delta:
                case Content():
                    self.text += delta.text
                case CallBegins():
                    self.calls.append(ToolCall(delta.name, ""))
                case CallArguments():
                    last = self.calls[delta.index]
                    self.calls[delta.index] = ToolCall(last.name, last.arguments + delta.piece)
        if chunk.finish is not None:
            self.stats = chunk.stats
            self.finish = "tool_calls" if self.calls and chunk.finish == "stop" else chunk.finish
        return deltas

    def _deltas(self, chunk: Chunk) -> list[Delta]:
        if self.asked.forced:
            self._forced += chunk.text
            if chunk.finish is None:
                return []
            call = read_call(self._forced)
            if call is None:  # the answer ended before the call was whole
                return [Content(self._forced)]
            return [CallBegins(0, call.name), CallArguments(0, call.arguments)]
        if self._parser is None:
            return [Content(chunk.text)] if chunk.text else []
        return [*self._parser.feed(chunk.text), *(self._parser.finish() if chunk.finish is not None else [])]

    def offsets(self, new: Sequence[Logprob]) -> list[int]:
        """Where the next tokens begin in the text. A character of several tokens belongs to the last of them. To be
        called once for each token, in order."""
        found = []
        for each in new:
            found.append(self._end)
            token = each.token
            self._end += len(self._decode(token.text.encode() if token.raw is None else token.raw))
        return found

    def pieces(self, chunk: Chunk) -> list[dict[str, Any]]:
        """A chunk's text token by token, with the drafter of each."""
        found, start = [], self._reported
        for end, source in chunk.sources:
            at, to = self._reported - start, max(self._reported, end) - start
            if to > at:
                found.append({"text": chunk.text[at:to], "source": source})
            self._reported = start + to
        if rest := chunk.text[self._reported - start :]:
            found.append({"text": rest, "source": None})
            self._reported += len(rest)
        return found


def usage(choices: Sequence[Choice]) -> dict[str, Any]:
    """Numbers of tokens. A prompt is counted once for all its answers, as in OpenAI's API."""
    stats = [c.stats for c in choices if c.stats is not None]
    new = sum(each.new_tokens for each in stats)
    details: dict[str, Any] = {}
    if choices[0].asked.predicted:
        accepted = sum(each.by_source.get("prediction", {}).get("accepted", 0) for each in stats)
        predicted = choices[0].asked.predicted * len(stats)
        details["completion_tokens_details"] = {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": max(0, predicted - accepted),
        }
    prompt = choices[0].asked.prompt_tokens
    return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new, **details}


def own_stats(choices: Sequence[Choice]) -> dict[str, Any]:
    """The statistics for clients that ask for them with `slipstream: {"stats": true}`."""
    found, counts = [c.stats for c in choices if c.stats is not None], Counts()
    for each in found:
        counts.add(each)
    return {
        "tokens_per_step": round(counts.new_tokens / counts.steps, 4) if counts.steps else 0.0,
        "exact": all(each.exact for each in found),
        "by_source": counts.by_source,
        **({"warnings": [NOT_KEPT]} if any(each.warnings for each in found) else {}),
    }


def chat_logprobs(found: Sequence[Logprob]) -> dict[str, Any]:
    def entry(token: Spelled, logprob: float) -> dict[str, Any]:
        raw = None if token.raw is None else list(token.raw)
        return {"token": token.text, "logprob": max(LOWEST, logprob), "bytes": raw}

    return {
        "content": [
            entry(each.token, each.logprob) | {"top_logprobs": [entry(*alternative) for alternative in each.top]}
            for each in found
        ],
        "refusal": None,
    }


def key_of(token: Spelled) -> str:
    """A token as a key: parts of characters must differ, and are written as OpenAI does."""
    partial = "\ufffd" in token.text and token.raw is not None
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.raw or b"") if partial else token.text


def completion_logprobs(found: Sequence[Logprob], offsets: list[int]) -> dict[str, Any]:
    return {
        "tokens": [each.token.text for each in found],
        "token_logprobs": [max(LOWEST, each.logprob) for each in found],
        "top_logprobs": [{key_of(token): max(LOWEST, logprob) for token, logprob in each.top} for each in found],
        "text_offset": offsets,
    }


class Chat:
    """The bodies of /v1/chat/completions."""

    whole, part, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def __init__(self, model: str, body: s.Completed) -> None:
        self.body = body
        self.head = {"id": f"{self.prefix}-{secrets.token_hex(12)}", "created": int(time()), "model": model}
        # The beginning of every chunk's event.
        self._begins = f'data: {encode({**self.head, "object": self.part})[:-1]}, "choices": ['

    def answer(self, choices: Sequence[Choice]) -> dict[str, Any]:
        found = {
            **self.head,
            "object": self.whole,
            "choices": [self.choice(c) for c in choices],
            "usage": usage(choices),
        }
        if self.body.slipstream.stats:
            found["slipstream"] = own_stats(choices)
        return found

    def choice(self, choice: Choice) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": choice.text or None if choice.calls else choice.text}
        if choice.calls:
            message["tool_calls"] = [call_body(call) for call in choice.calls]
        found = {"index": choice.index, "message": message, "finish_reason": choice.finish, "logprobs": None}
        if isinstance(self.body, s.ChatRequest) and self.body.logprobs:
            found["logprobs"] = chat_logprobs(choice.logprobs)
        return found

    async def events(
        self, chunks: AsyncIterator[tuple[Choice, Chunk]], choices: Sequence[Choice]
    ) -> AsyncIterator[str]:
        for choice in choices:
            yield self.chunk(choice.index, self.opening())
        async for choice, chunk in chunks:
            deltas = choice.take(chunk)
            bodies = [self.delta(delta) for delta in deltas]
            extras = self.extras(choice, chunk)
            logprobs = self.logprobs(choice, chunk)
            for i, body in enumerate(bodies or ([{}] if extras or logprobs else [])):
                yield self.chunk(choice.index, body, logprobs if i == 0 else None, None, extras if i == 0 else None)
            if chunk.finish is not None:
                last = {"stats": own_stats([choice])} if self.body.slipstream.stats else None
                yield self.chunk(choice.index, self.closing(), None, choice.finish, last)
        options = self.body.stream_options
        if options is not None and options.include_usage:
            yield event({**self.head, "object": self.part, "choices": [], "usage": usage(choices)})
        yield DONE

    def extras(self, choice: Choice, chunk: Chunk) -> dict[str, Any] | None:
        return {"tokens": choice.pieces(chunk)} if self.body.slipstream.sources else None

    def logprobs(self, choice: Choice, chunk: Chunk) -> Any:  # noqa: ARG002
        wanted = isinstance(self.body, s.ChatRequest) and self.body.logprobs and chunk.logprobs
        return chat_logprobs(chunk.logprobs) if wanted else None

    def opening(self) -> dict[str, Any]:
        return {"role": "assistant", "content": ""}

    def closing(self) -> dict[str, Any]:
        return {}

    def delta(self, delta: Delta) -> dict[str, Any]:
        match delta:
            case Content():
                return {"content": delta.text}
            case CallBegins():
                return {"tool_calls": [{"index": delta.index, **call_body(ToolCall(delta.name, ""))}]}
            case CallArguments():
                return {"tool_calls": [{"index": delta.index, "function": {"arguments": delta.piece}}]}

    def chunk(self, index: int, delta: Any, logprobs: Any = None, finish: str | None = None, extras: Any = None) -> str:
        return self.sent({"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}, extras)

    def sent(self, choice: dict[str, Any], extras: Any) -> str:
        """A chunk as an event."""
        more = f', "slipstream": {encode(extras)}' if extras else ""
        return f"{self._begins}{encode(choice)}]{more}}}\n\n"


class Completion(Chat):
    """The bodies of /v1/completions."""

    whole, part, prefix = "text_completion", "text_completion", "cmpl"

    def choice(self, choice: Choice) -> dict[str, Any]:
        found = {"index": choice.index, "text": choice.text, "finish_reason": choice.finish, "logprobs": None}
        if isinstance(self.body, s.CompletionRequest) and self.body.logprobs is not None:
            found["logprobs"] = completion_logprobs(choice.logprobs, choice.offsets(choice.logprobs))
        return found

    def logprobs(self, choice: Choice, chunk: Chunk) -> Any:
        return completion_logprobs(chunk.logprobs, choice.offsets(chunk.logprobs)) if chunk.logprobs else None

    def opening(self) -> Any:
        return ""

    def closing(self) -> Any:
        return ""

    def delta(self, delta: Delta) -> Any:
        return delta.text if isinstance(delta, Content) else ""

    def chunk(self, index: int, delta: Any, logprobs: Any = None, finish: str | None = None, extras: Any = None) -> str:
        return self.sent({"index": index, "text": delta or "", "logprobs": logprobs, "finish_reason": finish}, extras)


class Response:
    """The bodies of /v1/responses."""

    def __init__(self, model: str, body: s.ResponseRequest) -> None:
        self.body, self.id, self.item = body, f"resp_{secrets.token_hex(12)}", f"msg_{secrets.token_hex(12)}"
        self.model, self.created = model, int(time())

    def answer(self, choices: Sequence[Choice], status: str | None = None) -> dict[str, Any]:
        (choice,) = choices
        cut = choice.finish == "length"
        done = status is None
        found: dict[str, Any] = {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "model": self.model,
            "status": status or ("incomplete" if cut else "completed"),
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if done and cut else None,
            "instructions": self.body.instructions,
            "max_output_tokens": self.body.max_output_tokens,
            "metadata": self.body.metadata or {},
            "output": [self.message(choice)] if done else [],
            "parallel_tool_calls": False,
            "temperature": self.body.temperature,
            "text": {"format": self.body.text.format.model_dump(by_alias=True, exclude_none=True)},
            "tool_choice": "auto",
            "tools": [],
            "top_p": self.body.top_p,
            "usage": self.usage(choices) if done else None,
        }
        if done and self.body.slipstream.stats:
            found["slipstream"] = own_stats(choices)
        return found

    def usage(self, choices: Sequence[Choice]) -> dict[str, Any]:
        counted = usage(choices)
        return {
            "input_tokens": counted["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": counted["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": counted["total_tokens"],
        }

    def message(self, choice: Choice, empty: bool = False) -> dict[str, Any]:
        """empty: the answer has not begun."""
        content = [] if empty else [self.part(choice.text)]
        status = "in_progress" if empty else "incomplete" if choice.finish == "length" else "completed"
        return {"id": self.item, "type": "message", "role": "assistant", "status": status, "content": content}

    def part(self, text: str) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    async def events(
        self, chunks: AsyncIterator[tuple[Choice, Chunk]], choices: Sequence[Choice]
    ) -> AsyncIterator[str]:
        number = -1

        def numbered(kind: str, **more: Any) -> str:
            nonlocal number
            number += 1
            return event({"type": kind, "sequence_number": number, **more}, kind)

        (choice,) = choices
        place = {"item_id": self.item, "output_index": 0, "content_index": 0}
        yield numbered("response.created", response=self.answer(choices, "in_progress"))
        yield numbered("response.in_progress", response=self.answer(choices, "in_progress"))
        yield numbered("response.output_item.added", output_index=0, item=self.message(choice, empty=True))
        yield numbered("response.content_part.added", **place, part=self.part(""))
        async for _, chunk in chunks:
            for delta in choice.take(chunk):
                if isinstance(delta, Content):
                    yield numbered("response.output_text.delta", **place, delta=delta.text, logprobs=[])
        yield numbered("response.output_text.done", **place, text=choice.text, logprobs=[])
        yield numbered("response.content_part.done", **place, part=self.part(choice.text))
        yield numbered("response.output_item.done", output_index=0, item=self.message(choice))
        last = "response.incomplete" if choice.finish == "length" else "response.completed"
        yield numbered(last, response=self.answer(choices))


def call_body(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}
