"""A server in two processes: what passes between the model's and the one that speaks HTTP, and what if one of them is
gone."""

import http.client
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from time import monotonic, sleep

import pytest
from starlette.testclient import TestClient

from patience import PATIENCE
from slipstream import LLM
from slipstream.jobs import Update
from slipstream.server.api import Api
from slipstream.server.backend import Chunk, Limits
from slipstream.server.engine_end import EngineEnd, Outbox
from slipstream.server.link import Ask, Cancel, News, Reply, Unpacking, messages, one_message, packed
from slipstream.server.local import Local
from slipstream.server.run import Front, listening
from slipstream.server.schema import ChatRequest, CompletionRequest

pytestmark = pytest.mark.slow

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
LIMITS = Limits(body=100_000, tokens=2000, waiting=8)


@pytest.fixture(scope="module")
def llm(babble):
    with LLM(babble.model, babble.tokenizer, drafter="suffix", max_batch=4) as found:
        yield found


@pytest.fixture
def local(llm):
    found = Local(llm, "babble", LIMITS)
    yield found
    found.shut()


class Pair:
    """The model in this process, HTTP in another one."""

    def __init__(self, llm):
        sock = listening("127.0.0.1", 0)
        self.port = sock.getsockname()[1]
        self.front, self.local = Front(sock), Local(llm, "babble", LIMITS)
        self.front.start(self.local, grace=PATIENCE)

    def send(self, path, body=None):
        """A connection on which that was asked."""
        there = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        text = body if body is None or isinstance(body, str) else json.dumps(body)
        there.request("GET" if body is None else "POST", path, text, {"content-type": "application/json"})
        return there

    def ask(self, path, body=None):
        """Status and text of the answer."""
        there = self.send(path, body)
        answer = there.getresponse()
        status, text = answer.status, answer.read().decode()
        there.close()
        return status, text


@pytest.fixture(scope="module")
def pair(llm):
    found = Pair(llm)
    with found.front:
        yield found
        found.front.stop()
        found.front.wait()
    found.local.shut()


def until(holds, told):
    end = monotonic() + PATIENCE
    while not holds():
        assert monotonic() < end, told
        sleep(0.01)


def chat(**more):
    return {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 12, "temperature": 0, **more}


def text(**more):
    return {"prompt": "The sea", "max_tokens": 12, "temperature": 0, **more}


EVERYTHING = {"stats": True, "sources": True}
ASKED = {
    "a chat": (CHAT, chat()),
    "a stream": (CHAT, chat(stream=True, stream_options={"include_usage": True})),
    "several": (CHAT, chat(n=3, temperature=1, seed=4)),
    "log probabilities": (CHAT, chat(logprobs=True, top_logprobs=2)),
    "a completion": (TEXT, text(prompt=["The sea", "The sea", "The land"], logprobs=1)),
    "a forced object": (CHAT, chat(response_format={"type": "json_object"}, seed=1)),
    "a prediction": (CHAT, chat(prediction={"type": "content", "content": "Hi"}, drafters=[])),
    "a response": ("/v1/responses", {"input": "Hi", "max_output_tokens": 5, "temperature": 0, "stream": True}),
    "tokens": ("/tokenize", {"prompt": "The sea"}),
    "their text": ("/detokenize", {"tokens": [100, 200]}),
    "new heads": ("/heads/reload", {}),
    "a field that is wrong": (CHAT, chat(temperature="hot")),
    "a model that is not there": (CHAT, chat(model="other")),
    "a field that the engine refuses": (CHAT, chat(drafters=["nobody"])),
    "too many": (TEXT, text(prompt=["a"] * 14)),
    "a prompt that is too long": (CHAT, chat(messages=[{"role": "user", "content": "word " * 9000}])),
    "a body that is too large": (CHAT, chat(user="x" * 200_000)),
    "what the template refuses": (CHAT, chat(tools=[{"type": "function", "function": {"name": "f"}}])),
}


@pytest.fixture(scope="module")
def one_process(llm):
    local = Local(llm, "babble", LIMITS)
    with TestClient(Api(local, LIMITS).app) as client:
        yield client


def without_names(value):
    """An answer but for what is drawn anew each time."""
    if isinstance(value, dict):
        return {k: without_names(v) for k, v in value.items() if k not in ("id", "item_id", "created", "created_at")}
    return [without_names(each) for each in value] if isinstance(value, list) else value


def as_a_whole(told):
    """The answer's events, pieces of text joined: how long they are depends on the time."""
    events = [json.loads(line[6:]) for line in told.splitlines() if line.startswith("data: {")]
    if not events:
        return without_names(json.loads(told))
    joined, rest = "", []
    for each in events:
        for choice in each.get("choices", ()):
            joined += choice["delta"].pop("content", "")
        joined += each.pop("delta", "") if isinstance(each.get("delta"), str) else ""
        each.pop("sequence_number", None)
        rest.append(without_names(each))
    return joined, [each for each, _ in itertools.groupby(rest)]


@pytest.mark.parametrize(("path", "body"), ASKED.values(), ids=ASKED)
def test_both_ways_answer_the_same(pair, one_process, path, body):
    status, told = pair.ask(path, body)
    other = one_process.post(path, json=body)
    assert status == other.status_code
    assert as_a_whole(told) == as_a_whole(other.text)


def test_a_stream_tells_whose_draft_each_token_was(pair):
    """One token after the other spells the answer, though several come at once."""
    _, told = pair.ask(CHAT, chat(stream=True, slipstream=EVERYTHING, max_tokens=40))
    events = [json.loads(line[6:]) for line in told.splitlines() if line.startswith("data: {")]
    content = "".join(choice["delta"].get("content", "") for e in events for choice in e["choices"])
    pieces = [token for e in events for token in e.get("slipstream", {}).get("tokens", ())]
    assert "".join(piece["text"] for piece in pieces) == content
    assert len(pieces) > 20
    by = events[-1]["slipstream"]["stats"]["by_source"]
    drafted = [piece for piece in pieces if piece["source"] is not None]
    assert bool(drafted) == any(each["accepted"] for each in by.values())


def test_what_is_told_of_the_service_is_told_through_the_link(pair):
    before = json.loads(pair.ask("/live")[1])["totals"]
    assert pair.ask(CHAT, chat())[0] == 200
    told = json.loads(pair.ask("/live")[1])
    assert told["totals"]["new_tokens"] - before["new_tokens"] == 12
    assert (told["model"], told["max_batch"], told["running"]) == ("babble", 4, [])
    status, metrics = pair.ask("/metrics")
    assert status == 200
    assert f"slipstream_generation_tokens_total {float(told['totals']['new_tokens'])}" in metrics


def test_who_leaves_ends_the_answer_at_the_engine(pair):
    service = pair.local.service
    cancelled = service.counts.ended.get("cancelled", 0)
    for n, stream in enumerate((True, False), 1):
        there = pair.send(CHAT, chat(max_tokens=2000, ignore_eos=True, stream=stream))
        until(lambda: service.running, "nobody begins")
        there.close()
        until(lambda: not service.busy, "an answer goes on that nobody reads")
        assert service.counts.ended["cancelled"] == cancelled + n


def test_a_protocol_that_sleeps_holds_up_no_answer(pair):
    """Nothing of it is lost."""
    service, whole = pair.local.service, chat(max_tokens=600, ignore_eos=True)
    _, expected = pair.ask(CHAT, whole)
    there = pair.send(CHAT, whole | {"stream": True})
    until(lambda: service.running, "nobody begins")
    os.kill(pair.front._process.pid, signal.SIGSTOP)
    try:
        until(lambda: not service.busy, "the engine waits")
    finally:
        os.kill(pair.front._process.pid, signal.SIGCONT)
    joined, _ = as_a_whole(there.getresponse().read().decode())
    assert joined == json.loads(expected)["choices"][0]["message"]["content"]
    there.close()


# ---- the link


def test_messages_come_whole_in_any_pieces():
    sent = [Cancel(1), [Reply(2, {"a": 1}, None), News(3, 0, Chunk("hi", finish="stop"))], Cancel(70_000)]
    stream = b"".join(map(packed, sent))
    for size in (1, 3, 8, 9, 1000):
        unpacking = Unpacking()
        pieces = [stream[i : i + size] for i in range(0, len(stream), size)]
        assert [message for piece in pieces for message in unpacking.feed(piece)] == sent


def small_sockets():
    """As little as they may hold."""
    ours, theirs = socket.socketpair()
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    return ours, theirs


def test_what_nobody_takes_waits_as_one_update_for_each_answer():
    """The socket is full: whoever puts something goes on."""
    ours, theirs = small_sockets()
    write = lambda address, update: News(*address, Chunk(update.text, finish=update.finish))  # noqa: E731
    outbox, words = Outbox(ours, write), [f"{i:0999} " for i in range(1000)]
    for i, word in enumerate(words):
        for answer in range(3):
            outbox.put((7, answer), Update(word, [i], [], [], "stop" if i == 999 else None))
        outbox.wake()
    found, ended, count = ["", "", ""], 0, 0
    coming = messages(theirs)
    while ended < 3:
        count += 1
        for number, answer, chunk in next(coming):
            assert number == 7
            found[answer] += chunk.text
            ended += chunk.finish is not None
    assert found == ["".join(words)] * 3
    assert count < 100
    theirs.close()
    until(lambda: outbox._gone or outbox.say(Reply(0, "x" * 10_000, None)), "it writes to nobody")
    with pytest.raises(RuntimeError, match="is gone"):  # by which the service ends its answers
        outbox.wake()
    ours.close()


class Link:
    """A far end, and the sockets that speak to it."""

    def __init__(self, local):
        self.local, (ours, self.socket) = local, small_sockets()
        self.socket.settimeout(PATIENCE)
        self.engine_end = EngineEnd(local, ours)

    def close(self):
        self.socket.close()
        assert self.engine_end.gone.wait(PATIENCE)


@pytest.fixture
def link(local):
    found = Link(local)
    yield found
    found.close()


LONG = ChatRequest(**chat(max_tokens=300, ignore_eos=True, stream=True))


def test_what_a_step_says_of_many_answers_comes_in_one_message(link, llm):
    with llm.engine.turn():  # nobody begins before all are there
        for number in range(4):
            link.socket.sendall(packed(Ask(number, LONG)))
        replied = set()
        while len(replied) < 4:
            replied |= {reply.number for reply in one_message(link.socket)}
    texts, together, ended = [""] * 4, 0, 0
    while ended < 4:
        letters = one_message(link.socket)
        together += len(letters) == 4
        for number, answer, chunk in letters:
            assert answer == 0
            texts[number] += chunk.text
            ended += chunk.finish is not None
    assert texts == [llm.generate("Hi", max_new_tokens=300, ignore_eos=True).text] * 4
    assert together > 1


def test_an_answer_is_written_whether_or_not_anybody_reads(link, llm):
    """With log probabilities it is much more than the socket holds."""
    asked = CompletionRequest(**text(max_tokens=60, ignore_eos=True, stream=True, logprobs=20))
    link.socket.sendall(packed(Ask(0, asked)))
    until(lambda: link.local.service.counts.ended, "the engine waits for a reader")
    chunks, letters = [], []
    while not (chunks and chunks[-1].finish):
        letters = one_message(link.socket)
        chunks += [letter.chunk for letter in letters if isinstance(letter, News)]
    expected = llm.generate("The sea", template=False, max_new_tokens=60, ignore_eos=True)
    assert "".join(chunk.text for chunk in chunks) == expected.text
    assert sum(len(chunk.logprobs) for chunk in chunks) == 60
    assert chunks[-1].stats.new_tokens == 60


@pytest.mark.parametrize("how", ["cancel", "cancel at once", "close"])
def test_a_cancelled_call_ends(link, how):
    service = link.local.service
    asked = ChatRequest(**chat(max_tokens=2000, ignore_eos=True, stream=True, n=2))
    link.socket.sendall(packed(Ask(5, asked)))
    if how != "cancel at once":
        until(lambda: len(service.running) == 2, "nobody begins")
    if how == "close":
        link.socket.close()
    else:
        link.socket.sendall(packed(Cancel(5)))
    until(lambda: service.counts.requests and not service.busy, "it goes on")
    assert service.counts.ended == {"cancelled": 2}
    until(lambda: not link.engine_end._calls or how == "close", "it is remembered")


# ---- processes that end


def served(forked, *words):
    """A server that runs, its port and the process that speaks HTTP."""
    started = forked.start("serve", "--port", "0", "--drafter", "suffix", *words)
    port = int(started.first_complaint().split("/v1")[0].rpartition(":")[2])
    (child,) = map(int, Path(f"/proc/{started.pid}/task/{started.pid}/children").read_text().split())
    return started, port, child


def streaming(port):
    there = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    body = json.dumps(chat(max_tokens=4000, ignore_eos=True, stream=True))
    there.request("POST", CHAT, body, {"content-type": "application/json"})
    assert there.getresponse().read(100)
    return there


def test_if_the_protocol_is_killed_the_server_says_so_and_ends(forked):
    started, port, child = served(forked)
    with socket.create_connection(("127.0.0.1", port), PATIENCE):
        there = streaming(port)
        os.kill(child, signal.SIGKILL)
        done = started.wait()
    there.close()
    assert done.returncode == 2
    assert "the process that speaks HTTP was killed by signal 9" in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


def test_if_the_model_s_process_is_killed_nothing_is_left_and_the_port_is_free(forked):
    started, port, child = served(forked)
    there = streaming(port)
    os.kill(started.pid, signal.SIGKILL)
    done = started.wait()  # its output ends when the other process has ended too
    there.close()
    assert "the process with the model is gone" in done.stderr
    until(lambda: not alive(child), "an orphan")
    listening("127.0.0.1", port).close()


def alive(process):
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_model_that_can_not_be_loaded_leaves_no_process(forked):
    done = forked.run("serve", "/nowhere", "--port", "0")
    assert done.returncode == 2
    assert "/nowhere" in done.stderr
    assert "process" not in done.stderr


def test_the_protocol_s_process_loads_no_model_library():
    code = "import slipstream.server.front, sys; print({'torch', 'transformers', 'numpy'} & sys.modules.keys())"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


def test_it_starts_no_thread_of_the_engine_to_be_stopped(llm):
    """Started and stopped without a request."""
    before = threading.active_count()
    pair = Pair(llm)
    with pair.front:
        pair.front.stop()
        pair.front.wait()
    pair.local.shut()
    until(lambda: threading.active_count() <= before, "threads are left")
