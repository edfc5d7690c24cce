"""A load on a server: every request is sent whatever became of the others, and what became of it is counted."""

import asyncio
import json
import threading
from contextlib import contextmanager
from functools import partial
from itertools import count, repeat
from random import Random

import numpy as np
import pytest

from commands import command
from patience import PATIENCE
from slipstream import OptionError
from slipstream.cli.bench import parse_rates
from slipstream.evaluate import remote
from slipstream.evaluate.load import LoadPlan, arrivals, measure, offer, summarise
from slipstream.evaluate.load_report import decades, document, lines, remarks, write_page
from slipstream.evaluate.remote import Outcome, Server, ask, chat, events, find

# ---- a server whose every answer is known


class Fake:
    """Answers the n-th chat as `answer(n, body, writer)` does. The models' list and the warm-up are not counted."""

    def __init__(self, answer, owner="somebody", key=None):
        self.answer, self.owner, self.key = answer, owner, key
        self.bodies, self.numbers = [], count()

    async def __call__(self, reader, writer):
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            length = int(head.lower().partition("content-length:")[2].split()[0])
            body = json.loads(await reader.readexactly(length)) if length else None
            if self.key is not None and f"Authorization: Bearer {self.key}\r\n" not in head:
                whole(writer, {"error": {"message": "who are you?"}}, 401)
            elif head.startswith("GET /v1/models "):
                whole(writer, {"data": [{"id": "parrot", "owned_by": self.owner}, {"id": "other"}]})
            elif body["messages"][0]["content"] == "Say hello.":
                stream(writer, "hello")
            else:
                self.bodies.append(body)
                await self.answer(next(self.numbers), body, writer)
            await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()


@contextmanager
def serving(handler):
    """The address of a server in a thread of its own."""
    ready, where = threading.Event(), {}

    async def run():
        where["loop"], where["stop"] = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(handler, "127.0.0.1", 0)
        where["port"] = server.sockets[0].getsockname()[1]
        ready.set()
        await where["stop"].wait()
        server.close()

    thread = threading.Thread(target=asyncio.run, args=[run()])
    thread.start()
    assert ready.wait(PATIENCE)
    try:
        yield f"http://127.0.0.1:{where['port']}"
    finally:
        where["loop"].call_soon_threadsafe(where["stop"].set)
        thread.join(PATIENCE)


def head(writer, status=200, **headers):
    told = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
    writer.write(f"HTTP/1.1 {status} So\r\n{told}\r\n".encode())


def whole(writer, body, status=200):
    sent = json.dumps(body).encode()
    head(writer, status, Content_Length=len(sent), Content_Type="application/json")
    writer.write(sent)


def event(body):
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n".encode()


def piece(text, **more):
    return {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}], **more}


END = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
DONE = b"data: [DONE]\n\n"


def spoken(words, usage=None, per_step=None):
    """The events of an answer."""
    last = END | ({"slipstream": {"stats": {"tokens_per_step": per_step}}} if per_step else {})
    told = [{"choices": [{"delta": {"role": "assistant", "content": ""}}]}, *map(piece, words.split()), last]
    told += [{"choices": [], "usage": {"completion_tokens": usage}}] if usage else []
    return b"".join(map(event, told)) + DONE


def chunked(writer, sent):
    writer.write(f"{len(sent):x}\r\n".encode() + sent + b"\r\n")


def stream(writer, words, **more):
    head(writer, Transfer_Encoding="chunked", Content_Type="text/event-stream")
    chunked(writer, spoken(words, **more))
    writer.write(b"0\r\n\r\n")


async def speaks(_, body, writer):  # noqa: ARG001
    stream(writer, "one two three four", usage=4)


def offered(url, requests, times=None, **more):
    """All at once, unless times are given."""
    server = find(url, **more)
    bodies = repeat(chat(server, "Speak.", 8))
    run = offer(server, bodies, times or [0.0] * requests, lambda *_: None)
    return asyncio.run(asyncio.wait_for(run, PATIENCE))[0]


# ---- the numbers


def outcome(first, tokens=5, last=None, **more):
    due = 100.0
    last = due + first + 0.01 * (tokens - 1) if last is None else last
    return Outcome(due, due + 0.001, due + first, last, tokens, **({"ended": "answered"} | more))


def test_a_row_worked_by_hand():
    found = [
        Outcome(due=10.0, sent=10.5, first=12.0, last=14.0, tokens=5, steps=2.0, ended="answered"),
        Outcome(due=11.0, sent=11.0, first=12.0, last=13.0, tokens=3, steps=2.0, ended="answered"),
        Outcome(due=11.5, sent=11.5, ended="refused"),
        Outcome(due=12.0, sent=12.0, first=13.0, last=99.0, tokens=70, why="the connection was cut"),
    ]
    row = summarise(0.5, found, 4.0)
    assert [row[name] for name in ("sent", "answered", "refused", "failed")] == [4, 2, 1, 1]
    assert row["failures"] == {"the connection was cut": 1}
    assert row["first_token_ms"] == pytest.approx(
        {"p50": 1500.0, "p99": 1990.0}
    )  # 1 s and 2 s, from when they were due
    assert row["per_token_ms"] == pytest.approx({"p50": 500.0, "p99": 500.0})
    assert (row["tokens"], row["tokens_per_second"], row["tokens_per_step"]) == (8, 2.0, 2.0)


@pytest.mark.parametrize("answers", [1, 2, 99, 100, 1000])
def test_percentiles_are_numpys(answers):
    rng = np.random.default_rng(answers)
    firsts, gaps = rng.exponential(0.3, answers), rng.exponential(0.02, answers)
    found = [outcome(f, 9, last=100.0 + f + 8 * g) for f, g in zip(firsts, gaps, strict=True)]
    row = summarise(1.0, [*found, outcome(77.0, ended="failed"), outcome(88.0, ended="refused")], 30.0)
    for name, seconds in (("first_token_ms", firsts), ("per_token_ms", gaps)):
        p50, p99 = 1e3 * np.quantile(seconds, [0.5, 0.99])
        assert row[name] == pytest.approx({"p50": p50, "p99": p99}, rel=1e-6)


def test_what_nobody_answered_has_no_times():
    row = summarise(1.0, [Outcome(0.0, 0.0, ended="refused")], 1.0)
    assert row["first_token_ms"] == row["per_token_ms"] == {"p50": None, "p99": None}
    assert row["tokens_per_second"] == 0
    assert row["tokens_per_step"] is None
    assert summarise(1.0, [], 0.0)["sent"] == 0


def test_an_answer_of_one_token_has_no_time_behind_the_first():
    row = summarise(1.0, [outcome(0.2, tokens=1), outcome(0.2, tokens=0)], 1.0)
    assert row["per_token_ms"]["p50"] is None
    assert row["first_token_ms"]["p50"] == pytest.approx(200)


def test_arrivals_are_a_poisson_process_that_a_seed_repeats():
    times = arrivals(5.0, 2000.0, Random(3))
    assert times == arrivals(5.0, 2000.0, Random(3)) == sorted(times)
    assert times != arrivals(5.0, 2000.0, Random(4))
    assert 0 < times[0] <= times[-1] < 2000
    gaps = np.diff(times)
    assert len(times) == pytest.approx(10_000, abs=400)  # four standard deviations
    assert gaps.mean() == pytest.approx(gaps.std(), rel=0.05)
    assert (gaps < 0.2).mean() == pytest.approx(1 - np.exp(-1), abs=0.02)


# ---- one answer


def test_times_are_those_of_the_first_and_the_last_token():
    """The clock is read when a request is sent and whenever text comes, and at no other time."""
    clock = partial(next, iter([3.0, 5.0, 5.5, 6.5, 7.0]))

    async def answer(_, body, writer):  # noqa: ARG001
        stream(writer, "one two three four", usage=7, per_step=3.5)

    with serving(Fake(answer)) as url:
        server = find(url)
        found = asyncio.run(ask(server, chat(server, "Speak.", 8), 2.0, clock))
    assert found == Outcome(2.0, 3.0, 5.0, 7.0, tokens=7, steps=2.0, ended="answered", why=found.why)


def test_without_usage_events_are_counted():
    async def answer(_, body, writer):  # noqa: ARG001
        stream(writer, "one two three")

    with serving(Fake(answer)) as url:
        (found,) = offered(url, 1)
    assert (found.ended, found.tokens, found.steps) == ("answered", 3, None)


@pytest.mark.parametrize("way", ["chunked", "length", "until closed"])
@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_an_answer_is_the_same_however_it_is_sent(way, size):
    sent = b": still here\r\n\r\n" + spoken("één 二 three", usage=9).replace(b"\n", b"\r\n")

    async def answer(_, body, writer):  # noqa: ARG001
        how = {"chunked": {"Transfer_Encoding": "Chunked"}, "length": {"content_length": len(sent)}}
        head(writer, **how.get(way, {}))
        for start in range(0, len(sent), size):
            (chunked if way == "chunked" else type(writer).write)(writer, sent[start : start + size])
            await writer.drain()
        if way == "chunked":
            writer.write(b"0\r\n\r\n")

    with serving(Fake(answer)) as url:
        (found,) = offered(url, 1)
    assert (found.ended, found.tokens) == ("answered", 9)


def test_events_are_the_same_wherever_they_are_cut():
    sent = 'data: é\r\n\r\n:note\ndata:two\ndata: lines\n\nevent: x\nid: 3\n\ndata: {"a": 1}\n\ndata: cut'.encode()

    async def read(*pieces):
        async def give():
            for each in pieces:
                yield each

        return [data async for data in events(give())]

    wanted = ["é".encode(), b"two\nlines", b'{"a": 1}']
    for at in range(len(sent)):
        assert asyncio.run(read(sent[:at], sent[at:])) == wanted


# ---- the load


def test_requests_are_sent_whatever_became_of_the_earlier_ones():
    """Nobody is answered before the last one has asked: a loop that waits for answers would never end."""
    everyone = asyncio.Event()

    async def answer(n, body, writer):
        if n == 19:
            everyone.set()
        await everyone.wait()
        await speaks(n, body, writer)

    with serving(Fake(answer)) as url:
        found = offered(url, 20, times=[0.002 * i for i in range(20)])
    assert [each.ended for each in found] == ["answered"] * 20
    assert all(each.sent >= each.due for each in found)


async def cuts_at_once(_, body, writer):  # noqa: ARG001
    writer.transport.abort()


async def cuts_in_between(_, body, writer):  # noqa: ARG001
    head(writer, Transfer_Encoding="chunked")
    chunked(writer, event(piece("half")))
    writer.write(b"40\r\ndata: ")


async def cuts_between_chunks(_, body, writer):  # noqa: ARG001
    head(writer, Transfer_Encoding="chunked")
    chunked(writer, event(piece("half")))


async def stops_without_an_end(_, body, writer):  # noqa: ARG001
    head(writer)
    writer.write(event(piece("half")))


async def refuses(_, body, writer):  # noqa: ARG001
    whole(writer, {"error": {"message": "come later"}}, 429)


async def fails(_, body, writer):  # noqa: ARG001
    whole(writer, {"error": {"message": "out of memory"}}, 500)


async def fails_in_between(_, body, writer):  # noqa: ARG001
    head(writer)
    writer.write(event(piece("half")) + event({"error": {"message": "too slow"}}) + DONE)


async def speaks_no_json(_, body, writer):  # noqa: ARG001
    head(writer)
    writer.write(event(piece("half")) + b'data: {"choices": [\n\n' + DONE)


async def speaks_a_list(_, body, writer):  # noqa: ARG001
    head(writer)
    writer.write(event([1, 2]) + DONE)


async def nests_deeply(_, body, writer):  # noqa: ARG001
    head(writer)
    writer.write(b"data: " + b"[" * 200_000 + b"\n\n" + DONE)


async def speaks_no_http(_, body, writer):  # noqa: ARG001
    writer.write(b"220 mail.example.com ESMTP\r\n\r\n")


async def counts_badly(_, body, writer):  # noqa: ARG001
    head(writer, Transfer_Encoding="chunked")
    writer.write(b"many\r\n" + spoken("one two"))


async def tells_nonsense(_, body, writer):  # noqa: ARG001
    head(writer)
    numbers = {"usage": {"completion_tokens": 10**400}, "slipstream": {"stats": {"tokens_per_step": -1}}}
    odd = [{"choices": None}, {"choices": [None]}, {"choices": [{"delta": []}]}, {"usage": [], "slipstream": 3}, {}]
    writer.write(b"".join(map(event, [*odd, piece("one", **numbers), piece("two"), END])) + DONE)


CUT, UNREADABLE = "the connection was cut", "an answer that can't be read"
FAULTS = {
    cuts_at_once: CUT,
    cuts_in_between: CUT,
    cuts_between_chunks: CUT,
    stops_without_an_end: "the answer has no end",
    fails: "status 500: out of memory",
    fails_in_between: "an error instead of the rest",
    speaks_no_json: UNREADABLE,
    speaks_a_list: UNREADABLE,
    nests_deeply: UNREADABLE,
    speaks_no_http: UNREADABLE,
    counts_badly: UNREADABLE,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_counted_under_its_name(fault):
    with serving(Fake(fault)) as url:
        (found,) = offered(url, 1)
    assert (found.ended, found.why) == ("failed", FAULTS[fault])


def test_numbers_that_make_no_sense_are_not_believed():
    with serving(Fake(tells_nonsense)) as url:
        (found,) = offered(url, 1)
    assert (found.ended, found.tokens, found.steps) == ("answered", 2, None)


def test_an_answer_that_takes_too_long_is_given_up(monkeypatch):
    monkeypatch.setattr(remote, "PATIENCE", 0.05)

    async def answer(_, body, writer):  # noqa: ARG001
        await asyncio.sleep(PATIENCE)

    with serving(Fake(answer)) as url:
        server = find(url)
        found = asyncio.run(ask(server, chat(server, "Speak.", 8), 0.0))
    assert (found.ended, found.why) == ("failed", "no end within 0.05 s")


def test_faults_among_answers_are_all_counted_and_none_ends_the_load():
    ways = [*FAULTS, refuses, speaks, refuses, speaks, speaks]

    async def answer(n, body, writer):
        await ways[n](n, body, writer)

    with serving(Fake(answer)) as url:
        row = summarise(1.0, offered(url, len(ways)), 1.0)
    assert [row[name] for name in ("sent", "answered", "refused", "failed")] == [len(ways), 3, 2, len(FAULTS)]
    assert row["failures"][CUT] == 3
    assert sum(row["failures"].values()) == len(FAULTS)
    assert row["tokens"] == 12


def test_prompts_go_on_from_rate_to_rate_until_all_were_asked():
    fake, prompts = Fake(speaks), [f"question {i}" for i in range(7)]
    plan = LoadPlan(prompts, rates=(50.0, 100.0), seconds=0.1, max_new_tokens=3)
    told = []
    with serving(fake) as url:
        rows, missing = measure(plan, find(url), lambda *said: told.append(said))
    asked = [body["messages"][0]["content"] for body in fake.bodies]
    sent = [len(arrivals(rate, 0.1, Random(0))) for rate in plan.rates]
    assert missing is None
    assert [row["sent"] for row in rows] == [row["answered"] for row in rows] == sent
    assert sum(row["asked_before"] for row in rows) == sum(sent) - 7
    assert {asked.count(prompt) for prompt in prompts} <= {sum(sent) // 7, sum(sent) // 7 + 1}
    assert told == [(f"{r:g} requests/s", i + 1, n) for r, n in zip(plan.rates, sent, strict=True) for i in range(n)]
    assert all(b["temperature"] == 0 and b["stream"] and b["max_tokens"] == 3 for b in fake.bodies)


def test_an_interrupted_load_keeps_the_rates_it_finished():
    def progress(stage, *_):
        if stage == "100 requests/s":
            raise KeyboardInterrupt

    plan = LoadPlan(["Speak."], rates=(50.0, 100.0, 200.0), seconds=0.1)
    with serving(Fake(speaks)) as url:
        rows, missing = measure(plan, find(url), progress)
    assert [row["rate"] for row in rows] == [50.0]
    assert missing == "interrupted after 1 of 3 rates"


def test_only_a_slipstream_is_asked_for_its_steps():
    for owner, ours in (("slipstream", True), ("somebody", False)):
        fake = Fake(speaks, owner)
        with serving(fake) as url:
            offered(url, 1)
        assert ("slipstream" in fake.bodies[0]) == ours


# ---- who is there


def test_the_address_may_end_in_v1_and_a_model_may_be_named():
    with serving(Fake(speaks)) as url:
        for given in (url, f"{url}/", f"{url}/v1", f"{url}/v1/"):
            assert find(given).url == url
        assert find(url).model == "parrot"
        assert find(url, model="other").model == "other"
        with pytest.raises(OptionError, match=r"'third' is not served .* parrot, other"):
            find(url, model="third")


def test_the_key_is_sent():
    with serving(Fake(speaks, key="open")) as url:
        (found,) = offered(url, 1, key="open\n")
        assert found.ended == "answered"
        for key in (None, "closed"):
            with pytest.raises(OptionError, match="SLIPSTREAM_API_KEY"):
                find(url, key)


def test_an_address_with_nobody_there_is_refused():
    with serving(Fake(speaks)) as url:
        pass
    with pytest.raises(OptionError, match=r"does not answer .*refused.*slipstream serve"):
        find(url)


@pytest.mark.parametrize("url", ["", "127.0.0.1:8000", "ftp://there", "http://", "http://a:99999", "http://[::1"])
def test_what_is_no_address_is_refused(url):
    with pytest.raises(OptionError, match="is no address"):
        find(url)


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\n<!doctype html><p>Hello",
        b'HTTP/1.1 200 OK\r\n\r\n{"models": []}',
        b'HTTP/1.1 200 OK\r\n\r\n{"data": []}',
        b'HTTP/1.1 200 OK\r\n\r\n{"data": [3, {"id": []}]}',
        b"SSH-2.0-OpenSSH_9.2\r\n",
    ],
)
def test_what_is_no_server_of_the_api_is_refused(answer):
    async def handler(reader, writer):
        await reader.readuntil(b"\r\n\r\n")  # closed with something unread, a connection loses what was written
        writer.write(answer)
        writer.close()

    with serving(handler) as url, pytest.raises(OptionError, match=r"no server of OpenAI's API"):
        find(url)


def test_a_server_that_takes_no_chat_is_refused_before_the_load():
    class Fussy(Fake):
        async def __call__(self, reader, writer):
            if b"GET" in await reader.readuntil(b"\r\n\r\n"):
                whole(writer, {"data": [{"id": "parrot"}]})
            else:
                whole(writer, {"error": {"message": "temperature is fixed"}}, 400)
            writer.close()

    with (
        serving(Fussy(speaks)) as url,
        pytest.raises(OptionError, match=r"does not take a chat .*status 400: temperature is fixed"),
    ):
        measure(LoadPlan(["Speak."]), find(url), lambda *_: None)


def test_rates_are_numbers_above_zero():
    assert parse_rates("0.5, 1,2") == [0.5, 1.0, 2.0]
    for given in ("", "1,", "fast", "1;2"):
        with pytest.raises(OptionError, match="is no number"):
            parse_rates(given)
    for rate in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(OptionError, match="above 0"):
            LoadPlan(["Speak."], rates=[rate])
    for seconds in (0.1, -1.0, float("inf"), float("nan")):
        with pytest.raises(OptionError, match="not between 1 and"):
            LoadPlan(["Speak."], rates=[1.0], seconds=seconds)


# ---- what is told


def rows_of(*many):
    return [{**summarise(rate, found, 10.0), "asked_before": 0} for rate, found in many]


def test_the_page_has_a_mark_for_each_number_and_names_stay_text(tmp_path):
    rows = rows_of(
        (1.0, [outcome(0.2, steps=2.0)]), (4.0, [outcome(0.9, steps=2.0)]), (8.0, [Outcome(0, 0, why="<b>")])
    )
    server = Server("<script>", 80, False, "", model="<img src=x>")
    page = tmp_path / "page.html"
    write_page(document(LoadPlan(["Speak."]), server, rows, {}, "interrupted <i>"), page)
    shown = page.read_text()
    for name, marks in {"first": 4, "each": 4, "written": 3, "yield": 2}.items():
        figure = shown.partition(f'<figure id="{name}">')[2].partition('<div class="narrow">')[0]
        assert figure.count('class="mark"') == marks, name
    assert shown.count('<tr class="row">') == 3
    assert not any(tag in shown for tag in ("<script", "<img", "<i>", "<b>"))


def test_a_load_that_measured_nothing_has_a_page(tmp_path):
    for rows in ([], rows_of((1.0, []))):
        made = document(LoadPlan(["Speak."]), Server("there", 80, False, ""), rows, {}, "interrupted")
        write_page(made, tmp_path / "page.html")
        assert "Incomplete: interrupted." in (tmp_path / "page.html").read_text()


def test_a_machine_too_busy_to_send_in_time_is_told():
    late = Outcome(due=1.0, sent=1.5, ended="refused")
    assert "500 ms late" in remarks(rows_of((2.0, [late])))[0]
    assert remarks(rows_of((2.0, [outcome(0.2)]))) == []


def test_logarithmic_ticks_enclose_the_values():
    assert decades(12, 90) == [10, 20, 50, 100]
    assert decades(50, 50) == [50, 100]
    assert decades(0.3, 40_000) == [0.1, 1, 10, 100, 1000, 10_000, 100_000]
    assert decades(100, 1000) == [100, 200, 500, 1000]
    for width in (342, 540):
        assert "nan" not in lines([1.0], [], "ms", True, width)


def test_the_command_prints_a_table_and_ends_with_the_document(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("SLIPSTREAM_API_KEY", "open")
    (tmp_path / "ask.jsonl").write_text("\n".join(json.dumps({"question": f"{i}?", "answer": ""}) for i in range(5)))
    fake = Fake(speaks, "slipstream", key="open")
    words = ["--rates", "40,80", "--seconds", 0.1, "-n", 5, "--prompts", "ask.jsonl", "--limit", 3]
    with serving(fake) as url:
        code, _, said = command(
            "bench", "--serve", url, *words, "--html", "a.html", "--json", "a.json", folder=tmp_path
        )
    assert code == 0, said
    printed = capsys.readouterr().out.strip().splitlines()
    made = json.loads(printed[-1])
    assert made == json.loads((tmp_path / "a.json").read_text())
    assert (made["benchmark"], made["prompts"], made["complete"]) == ("slipstream load", 3, True)
    assert [row["rate"] for row in made["rows"]] == [40.0, 80.0]
    assert sum(row["answered"] for row in made["rows"]) == len(fake.bodies) > 0
    assert printed[0].split()[:2] == ["requests/s", "sent"]
    assert [line.split()[0] for line in printed[1:3]] == ["40", "80"]
    assert {body["max_tokens"] for body in fake.bodies} == {5}
    assert "<svg" in (tmp_path / "a.html").read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--serve", "http://127.0.0.1:1", "--repeats", 3], "--repeats has no effect on a server"),
        (["--serve", "http://127.0.0.1:1", "--rates", "1,fast"], "'fast' is no number"),
        (["--serve", "http://127.0.0.1:1"], "does not answer"),
        (["--rates", "1"], "--rates is for a load on a server"),
    ],
)
def test_mistakes_are_told_in_a_sentence(words, said):
    code, _, told = command("bench", *words)
    assert code == 2
    assert said in " ".join(told.split())


def test_our_own_server_answers_and_tells_its_steps(shallow):
    """A real model behind the real server."""
    uvicorn = pytest.importorskip("uvicorn")
    from slipstream.server.app import Server as Ours

    server = uvicorn.Server(uvicorn.Config(Ours(shallow, "smol").app, port=0, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            threading.Event().wait(0.05)
        found = offered(f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}", 3)
    finally:
        server.should_exit = True
        thread.join(PATIENCE)
    assert [each.ended for each in found] == ["answered"] * 3, [each.why for each in found]
    for each in found:
        assert 1 <= each.tokens <= 8
        assert 0 < each.steps <= each.tokens
        assert each.due <= each.sent <= each.first <= each.last
