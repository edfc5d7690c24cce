"""Callers of a server, in a separate process, so that their computation is not counted as the server's: see `Callers`.

They use plain HTTP, without torch or a client library, so that many callers cost little.
"""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from time import perf_counter
from typing import Any

TEXT = re.compile(rb'"(?:text|content)": ?"(?!")')  # the first that is not empty


async def ask(
    port: int, body: dict[str, Any], slow: bool = False, cut: int | None = None, path: str = "/v1/completions"
) -> dict[str, Any]:
    """One answer, streamed unless the body says otherwise. slow: a few bytes at a time; cut: the connection is closed
    after so many bytes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=4096 if slow else 1 << 16)
    streams = body.get("stream", True)
    sent = json.dumps({"stream": True, "stream_options": {"include_usage": True}, **body} if streams else body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(sent)}\r\n"
    clock, got, arrived = perf_counter(), bytearray(), list[tuple[float, int]]()
    writer.write(f"{head}Content-Type: application/json\r\n\r\n".encode() + sent)
    try:
        while piece := await reader.read(24 if slow else 1 << 16):
            got += piece
            arrived.append((perf_counter() - clock, len(got)))
            if cut is not None and len(got) > cut:
                break
            if slow:
                await asyncio.sleep(0.05)
    finally:
        writer.close()
    began = TEXT.search(got)
    lines = re.findall(rb"data: (\{.*\})", got) if streams else [bytes(got).partition(b"\r\n\r\n")[2]]
    events = [json.loads(line) for line in lines if line.endswith(b"}")]
    choices = [choice for event in events for choice in event.get("choices", ())]
    counted = next((event["usage"] for event in events if event.get("usage")), {})
    status = int(got.split(b" ", 2)[1]) if got else 0
    return {
        "status": status,
        "done": b"data: [DONE]\n\n" in got if streams else status == 200,
        "text": "".join(map(text_of, choices)),
        "finish": next((choice["finish_reason"] for choice in choices if choice["finish_reason"]), None),
        "errors": [event["error"]["message"] for event in events if "error" in event],
        "warnings": [w for e in events for w in e.get("slipstream", {}).get("stats", {}).get("warnings", ())],
        "tokens": counted.get("completion_tokens", 0),
        "predicted": counted.get("completion_tokens_details", {}),
        "first": next((time for time, length in arrived if began and length >= began.end()), 0.0),
        "seconds": arrived[-1][0] if arrived else 0.0,
    }


def text_of(choice: dict[str, Any]) -> str:
    """Of a completion, a chat's message or a piece of one."""
    return choice.get("text") or (choice.get("delta") or choice.get("message") or {}).get("content") or ""


class Callers:
    """A process that asks, told what by lines of JSON."""

    def __init__(self, port: int) -> None:
        self.port = port
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, bodies: list[dict[str, Any]], callers: int = 1, path: str = "/v1/chat/completions") -> dict[str, Any]:
        """These, by so many callers, each of which asks again as soon as it was answered: the `seconds` from the first
        request to the last answer, and the `answers` as `ask` tells them."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        asked = {"port": self.port, "bodies": bodies, "callers": callers, "path": path}
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        found = json.loads(self._process.stdout.readline())
        if failed := [answer for answer in found["answers"] if not answer["done"] or answer["errors"]]:
            raise SystemExit(f"{len(failed)} of {len(bodies)} answers failed, as with {failed[0]}")
        return found

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()


async def closed_loop(port: int, bodies: list[dict[str, Any]], callers: int, path: str) -> dict[str, Any]:
    left, answers = iter(enumerate(bodies)), dict[int, dict[str, Any]]()

    async def caller() -> None:
        for i, body in left:
            answers[i] = await ask(port, body, path=path)

    clock = perf_counter()
    await asyncio.gather(*(caller() for _ in range(callers)))
    return {"seconds": perf_counter() - clock, "answers": [answers[i] for i in range(len(bodies))]}


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(asyncio.run(closed_loop(**json.loads(line)))), flush=True)
