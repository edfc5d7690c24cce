"""A server among clients that mean no good: wild bodies are refused in OpenAI's words, whoever leaves costs nothing."""

import asyncio
import json
import logging
import os
import re
import signal
import socket
import sys
import threading
from time import monotonic, sleep

import pytest
from starlette.testclient import TestClient

from patience import PATIENCE
from slipstream import LLM, OptionError
from slipstream.cli.serve import serve
from slipstream.server.app import Server
from slipstream.server.backend import Asked, Limits
from slipstream.server.bodies import Choice, own_stats
from slipstream.server.middleware import OPEN
from slipstream.server.run import listening
from slipstream.stats import Stats
from slipstream.text import Detokenizer

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def llm(babble):
    with LLM(babble.model, babble.tokenizer, drafter="suffix", max_batch=4) as found:
        yield found


@pytest.fixture(scope="module")
def server(llm):
    return Server(llm, "smol", Limits(body=1 << 20, tokens=400, waiting=8))


@pytest.fixture(scope="module")
def client(server):
    with TestClient(server.app) as found:  # what is raised through the server's own handlers is raised here
        yield found


def chat(**more):
    return {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, **more}


def raw(text):
    """A body of which a part can't be written by json.dumps."""
    return json.dumps(chat())[:-1] + "," + text + "}"


def refused(answer, status=400):
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def settled(server, *others):
    """Nothing runs, nothing waits, and every slot is free or holds a text that stays read, be it for others."""
    end = monotonic() + PATIENCE
    while (server.service.running or server.service.reading or server.service.waiting()) and monotonic() < end:
        sleep(0.02)
    with server.llm.engine.turn():
        assert not server.service.running
        assert not server.service.waiting()
        assert not server.llm.engine._open
        held = [slot for slot in server.llm.target._slots if slot is not None]
        assert len(held) == sum(len(each.service.kept) for each in (server, *others))


CALL = {"id": "x", "function": {"name": "f", "arguments": "[" * 100_000}}
WILD = {
    "NaN": raw('"temperature": NaN'),
    "infinite": raw('"temperature": 1e400'),
    "too many digits": raw('"seed": ' + "1" * 5000),
    "half a surrogate pair": raw('"user": "\\ud800"'),
    "half a pair in a schema": raw(
        '"response_format": {"type": "json_schema", "json_schema": {"schema": {"x": "\\ud800"}}}'
    ),
    "half a pair as a field": raw('"\\ud800": 1'),
    "deep": "[" * 200_000,
    "deep in a field": raw('"x": ' + "[" * 900 + "]" * 900),
    "deep arguments": json.dumps(chat() | {"messages": [{"role": "assistant", "tool_calls": [CALL]}]}),
    "cold": json.dumps(chat(temperature=1e-283, top_p=0.01, min_p=0.7, accept="rejection")),
    "a long id": json.dumps(chat(logit_bias={"1" * 5000: 1})),
    "many biases": json.dumps(chat(logit_bias={str(i): 1 for i in range(2000)})),
    "a penalty of nearly nothing": json.dumps(chat(repetition_penalty=1e-320)),
    "a schema in a circle": raw('"response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}}'),
    "a schema that can't be": json.dumps(
        chat(
            response_format={"type": "json_schema", "json_schema": {"schema": {"type": "string", "pattern": "(?<=a)b"}}}
        )
    ),
}


@pytest.mark.parametrize("body", WILD.values(), ids=WILD)
def test_a_wild_body_is_refused(client, server, body):
    error = refused(client.post(CHAT, content=body, headers={"content-type": "application/json"}))
    assert "<state>" not in error["message"]
    settled(server)


@pytest.mark.parametrize("value", ["NaN", '"\\ud800"'])
@pytest.mark.parametrize("stream", ["true", "false"])
def test_what_an_answer_repeats_can_be_written(client, value, stream):
    body = (
        f'{{"input": "Hi", "stream": {stream}, "text": {{"format": {{"type": "text", "schema": {{"a": {value}}}}}}}}}'
    )
    refused(client.post("/v1/responses", content=body, headers={"content-type": "application/json"}))


def test_a_refusal_is_no_failure_of_the_server(client, caplog):
    """Nothing of it in the log: a client could fill it."""
    with caplog.at_level(logging.WARNING):
        for more in (
            {"drafters": ["pld"]},
            {"prediction": {"type": "content", "content": "a"}},
            {"stop_token_ids": [10**9]},
        ):
            refused(client.post(CHAT, json=chat(**more)))
    assert not caplog.records


def test_more_answers_than_there_can_be_are_refused_before_they_are_made(client):
    body = {"prompt": ["a"] * 100_000, "n": 64, "max_tokens": 1}
    assert refused(client.post("/v1/completions", json=body))["param"] == "prompt"


def test_as_many_answers_as_may_wait_are_taken_and_no_more(client, server):
    """More than that could never be queued at once: to try again later would not help."""
    for body in ({"prompt": ["a"] * 8, "max_tokens": 1}, {"prompt": "a", "n": 8, "max_tokens": 1}):
        assert client.post("/v1/completions", json=body).status_code == 200
        settled(server)
    assert refused(client.post("/v1/completions", json={"prompt": ["a"] * 9, "max_tokens": 1}))["param"] == "prompt"
    assert refused(client.post(CHAT, json=chat(n=9)))["param"] == "n"


@pytest.mark.parametrize("path", ["/", "/live.js", "/live.css"])
def test_the_page_takes_no_parameters(client, path):
    plain = client.get(path)
    assert plain.status_code == 200
    assert client.get(f"{path}?page=x&text=y&kind=z").content == plain.content


@pytest.mark.parametrize("token", [10**6, 2**32, 10**30])
def test_ids_of_no_token_are_refused(client, token):
    error = refused(client.post("/v1/completions", json={"prompt": [1, token], "max_tokens": 1}))
    assert "prompt tokens must lie in" in error["message"]


def test_an_unknown_field_is_refused_by_its_name_whatever_that_is(client):
    for name in ("Temperature", "int", "body", "none"):
        assert refused(client.post(CHAT, json=chat(**{name: 1})))["param"] == name


def test_what_is_wrong_is_named_by_its_field(client):
    error = refused(client.post(CHAT, json=chat(stop=list("abcdefghijklmnopqrstuvw"))))
    assert error["param"] == "stop"
    assert "at most 16" in error["message"]
    error = refused(client.post(CHAT, json={"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}))
    assert error["param"] == "messages.0.content.0.type"


def test_null_is_left_out(client):
    body = chat(temperature=None, top_p=None, n=None, stop=None, stream=None, logprobs=None, presence_penalty=None)
    assert client.post(CHAT, json=body).status_code == 200


def test_a_body_that_grows_too_large_is_refused_by_that_name(client):
    pieces = (b" " * 65536 for _ in range(20))
    refused(client.post(CHAT, content=pieces, headers={"content-type": "application/json"}), 413)


def test_other_methods_are_told_which_there_are(client):
    answer = client.put(CHAT, json=chat())
    refused(answer, 405)
    assert answer.headers["allow"] == "POST"


def test_a_key_may_be_any_text_and_no_host_opens_the_door(llm):
    client = TestClient(Server(llm, "smol", key="schlüssel").app)
    for sent in ("", "Bearer wrong", "Bearer ключ", "Bearer schlussel"):
        refused(client.get("/v1/models", headers={"authorization": sent.encode()}), 401)
    for path in OPEN:
        refused(client.get("/v1/models", headers={"host": f"a{path}?"}), 401)
    assert client.get("/v1/models", headers={"authorization": "Bearer schlüssel".encode()}).status_code == 200


async def left_after(server, messages, body):
    """A call of the app whose client takes so many messages, then is gone."""
    taken = asyncio.Event()
    sent = json.dumps(body).encode()
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": CHAT,
        "raw_path": CHAT.encode(),
        "query_string": b"",
        "headers": [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(sent))],
    }
    asked, left = False, messages

    async def receive():
        nonlocal asked
        if not asked:
            asked = True
            return {"type": "http.request", "body": sent, "more_body": False}
        await taken.wait()
        return {"type": "http.disconnect"}

    async def send(message):  # noqa: ARG001
        nonlocal left
        left -= 1
        if left == 0:
            taken.set()
            await asyncio.sleep(
                2 * PATIENCE
            )  # as to a client that reads nothing more; once it is gone, nothing waits for it

    if messages == 0:
        taken.set()
    await asyncio.wait_for(server.app(scope, receive, send), PATIENCE)


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize(("stream", "messages"), [(False, 0), (True, 0), (True, 1), (True, 2), (True, 4)])
def test_whoever_leaves_ends_its_answers(llm, server, n, stream, messages):
    """Before anything was sent, behind the head, between events: nothing runs on."""
    own = Server(llm, "smol")

    async def leave():
        await left_after(own, messages, chat(max_tokens=400, ignore_eos=True, stream=stream, n=n))
        await asyncio.to_thread(settled, own, server)  # the loop goes on: what is delivered has somewhere to go

    asyncio.run(leave())
    assert own.service.counts.ended == {"cancelled": n}
    own.service.close()


def test_nothing_read_for_one_collection_is_found_by_another(llm):
    server = Server(llm, "smol")
    with TestClient(server.app) as client:
        long = [{"role": "user", "content": "Tell me of the sea. " * 12}]
        for collection, found in (("a", False), ("b", False), ("a", True)):
            before = server.service.counts.found_tokens
            assert client.post(CHAT, json=chat(messages=long, collection=collection)).status_code == 200
            assert (server.service.counts.found_tokens > before) == found


def test_counts_can_be_read_while_they_grow(server):
    """Many times, while answers of ever other kinds are counted."""
    service, stop, wrong = server.service, threading.Event(), []

    def grow():
        for i in range(2000):
            stats = Stats("x", exact=True, accepted_lengths={i % 50: 1})
            stats.by_source = {f"source {i}": {"proposed": 1, "accepted": 1}}
            with service._counting:
                service.counts.add(stats)
        stop.set()

    kept, before = service.counts, sys.getswitchinterval()
    service.counts = type(kept)()
    sys.setswitchinterval(1e-5)
    try:
        thread = threading.Thread(target=grow)
        thread.start()
        while not stop.is_set():
            try:
                service.so_far()
            except RuntimeError as error:
                wrong.append(error)
        thread.join()
    finally:
        sys.setswitchinterval(before)
        service.counts = kept
    assert not wrong


class Letters:
    """A tokenizer of one character a token."""

    def decode(self, tokens, skip_special_tokens=True):  # noqa: ARG002
        return "".join(map(chr, tokens))


@pytest.mark.parametrize("stop", [["bab"], ["ab", "bbbb"], ["aab", "ba", "b" * 100_000]])
def test_what_a_stop_string_may_take_back_is_not_shown(stop):
    """As the slow way has it: the longest end of the text that begins one of them."""
    for number in range(256):
        made, text = Detokenizer(Letters(), stop), ""
        for letter in f"{number:08b}".translate({48: "a", 49: "b"}):
            text += letter
            if made(ord(letter)) is not None:
                break
            ends = [size for size in range(len(text) + 1) if any(s.startswith(text[len(text) - size :]) for s in stop)]
            assert made.visible() == text[: len(text) - max(ends)]


def test_where_nobody_can_listen_is_said():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(OptionError, match=r"127\.0\.0\.1, port \d+: Address already in use"):
            listening("127.0.0.1", taken.getsockname()[1])
    for host in ("999.1.1.1", "a" * 70 + ".b"):
        with pytest.raises(OptionError, match="can't listen at"):
            listening(host, 0)


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_in_order(sent, forked):
    """Streams are told, the exit is a success, and the log has no traceback."""
    process = forked.start("serve", "--port", "0", "--drafter", "suffix", "--grace", "0.5")
    port = int(process.first_complaint().split("/v1")[0].rpartition(":")[2])
    body = json.dumps(chat(max_tokens=4000, ignore_eos=True, stream=True)).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    with connected(port) as talking:
        talking.sendall(head.encode() + body)
        found = b""
        while found.count(b"data:") < 3:
            found += talking.recv(65536)
        os.kill(process.pid, sent)
        while piece := talking.recv(65536):
            found += piece
    assert b"this server is shutting down" in found
    assert b"[DONE]" in found
    done = process.wait()
    assert done.returncode == 0
    assert "Traceback" not in done.stderr


def connected(port):
    """It listens a moment after it says so."""
    for _ in range(600):
        try:
            return socket.create_connection(("127.0.0.1", port), PATIENCE)
        except ConnectionRefusedError:
            sleep(0.1)
    raise AssertionError("nobody listens")


def test_whoever_reads_that_it_is_served_may_come_at_once(babble, monkeypatch):
    came = []

    def said(text, **_):
        port = int(re.search(r":(\d+)/v1", text)[1])
        socket.create_connection(("127.0.0.1", port), 5).close()
        came.append(port)
        os.kill(os.getpid(), signal.SIGTERM)

    command = sys.modules[serve.__module__]
    monkeypatch.setattr(command.err, "print", said)
    monkeypatch.setattr(command, "open_llm", lambda *_, **__: LLM(babble.model, babble.tokenizer, drafter="none"))
    serve(port=0)
    assert came


def test_that_something_failed_after_an_answer_is_told_with_its_stats_but_no_path():
    choice = Choice(0, Asked())
    choice.stats = Stats("rest", True, warnings=["rest: /home/me/store: no space left"])
    assert "/home" not in "".join(own_stats([choice])["warnings"])
    choice.stats.warnings.clear()
    assert "warnings" not in own_stats([choice])
