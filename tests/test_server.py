"""The server, by OpenAI's own client, a browser and bare sockets, around a real model."""

import asyncio
import http.client
import json
import re
import socket
import threading
import urllib.request
from time import monotonic, sleep

import openai
import pydantic
import pytest
import uvicorn
from starlette.testclient import TestClient

from patience import PATIENCE
from slipstream import LLM
from slipstream.server.app import Server
from slipstream.server.backend import Asked, Chunk, Limits, Logprob, Spelled
from slipstream.server.bodies import Choice, Completion, completion_logprobs
from slipstream.server.schema import CompletionRequest
from slipstream.server.tool_calls import Hermes

pytestmark = pytest.mark.slow

NAME = "the-model"
HI = [{"role": "user", "content": "Say hi."}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {"type": "object", "properties": {"city": {"enum": ["Bern", "Rome"]}}, "required": ["city"]},
        },
    }
]
TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools> Answer with <tool_call>{}</tool_call>.\n{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }}\n{% endfor %}"
    "assistant: "
)


class Running:
    """A server in a thread, at a port of its own."""

    def __init__(self, server):
        self.server = server
        config = uvicorn.Config(server.app, port=0, log_level="error", lifespan="on")
        self._uvicorn = uvicorn.Server(config)
        listening = config.bind_socket()
        self.port = listening.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=lambda: self._uvicorn.run(sockets=[listening]))
        self._thread.start()
        while not self._uvicorn.started:
            sleep(0.01)

    def close(self):
        self._uvicorn.should_exit = True
        self._thread.join()

    def client(self, key="none"):
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0)

    def post(self, path, body, key=None):
        """Status and JSON of the answer; the body may be text."""
        there = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        text = body if isinstance(body, str) else json.dumps(body)
        headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}".encode()} if key else {})
        there.request("POST", path, text.encode(), headers)
        answer = there.getresponse()
        return answer.status, json.loads(answer.read()), answer.headers


@pytest.fixture(scope="module")
def llm(babble):
    return LLM(babble.model, babble.tokenizer, "auto", drafters="suffix", max_batch=4)


@pytest.fixture(scope="module")
def running(llm):
    found = Running(Server(llm, NAME))
    yield found
    found.close()


@pytest.fixture(scope="module")
def client(running):
    return running.client()


def alone(llm, prompt=HI, **options):
    return llm.generate(prompt, **options)


def idle(running):
    """Nothing is left of what was asked."""
    end = monotonic() + PATIENCE
    while running.server.service.running or running.server.service.reading or running.server.service.waiting():
        assert monotonic() < end, "answers go on that nobody reads"
        sleep(0.01)


# ---- chats


def test_a_chat_is_the_model_s_own_answer(client, llm):
    answer = client.chat.completions.create(model=NAME, messages=HI, max_completion_tokens=24, temperature=0)
    expected = alone(llm, max_new_tokens=24)
    assert answer.choices[0].message.content == expected.text
    assert answer.choices[0].finish_reason == expected.finish_reason
    assert answer.usage.completion_tokens == len(expected.tokens)
    assert answer.usage.prompt_tokens == expected.stats.prompt_tokens
    assert (answer.model, answer.object) == (NAME, "chat.completion")


def test_a_stream_spells_the_same_and_counts_itself(client, llm):
    stream = client.chat.completions.create(
        model=NAME, messages=HI, max_tokens=24, temperature=0, stream=True, stream_options={"include_usage": True},
        extra_body={"slipstream": {"sources": True, "stats": True}},
    )  # fmt: skip
    chunks = list(stream)
    expected = alone(llm, max_new_tokens=24)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == expected.text
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == expected.finish_reason
    assert chunks[-1].usage.completion_tokens == len(expected.tokens)
    told = [c.model_extra["slipstream"] for c in chunks if "slipstream" in c.model_extra]
    pieces = [token for each in told for token in each.get("tokens", [])]
    assert "".join(piece["text"] for piece in pieces) == expected.text
    assert told[-1]["stats"]["tokens_per_step"] >= 1
    assert told[-1]["stats"]["exact"] is True


def test_several_sampled_answers_are_those_of_their_seed(client, llm):
    asked = {"model": NAME, "messages": HI, "max_tokens": 12, "temperature": 0.9, "top_p": 0.9, "seed": 3, "n": 3}
    expected = [r.text for r in llm.generate(HI, n=3, max_new_tokens=12, temperature=0.9, top_p=0.9, seed=3)]
    assert [c.message.content for c in client.chat.completions.create(**asked).choices] == expected
    texts = ["", "", ""]
    for chunk in client.chat.completions.create(**asked, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == expected


def test_stops_biases_and_log_probabilities(client, llm):
    plain = alone(llm, max_new_tokens=16)
    word = plain.text.split()[2]
    answer = client.chat.completions.create(model=NAME, messages=HI, max_tokens=16, temperature=0, stop=[word])
    assert answer.choices[0].message.content == plain.text[: plain.text.index(word)]
    assert answer.choices[0].finish_reason == "stop"
    banned = client.chat.completions.create(
        model=NAME, messages=HI, max_tokens=4, temperature=0, logit_bias={str(plain.tokens[0]): -100},
        logprobs=True, top_logprobs=2,
    )  # fmt: skip
    entries = banned.choices[0].logprobs.content
    assert not banned.choices[0].message.content.startswith(llm.tokenizer.decode(plain.tokens[0]))
    assert "".join(e.token for e in entries) == banned.choices[0].message.content
    assert all(len(e.top_logprobs) == 2 and e.logprob <= 0 for e in entries)
    streamed = client.chat.completions.create(
        model=NAME, messages=HI, max_tokens=4, temperature=0, logprobs=True, stream=True
    )
    assert len([e for c in streamed if c.choices[0].logprobs for e in c.choices[0].logprobs.content]) == 4


NUMBER = {"type": "object", "properties": {"number": {"enum": [1, 2]}}, "required": ["number"]}
SAME = [  # what the client is told, and what `generate` is
    ({"stop": ["e", "zz"]}, {"stop": ["e", "zz"]}),
    ({"logit_bias": {"30": 6, "31": -100}}, {"logit_bias": {30: 6, 31: -100}}),
    ({"presence_penalty": 1.5}, {"presence_penalty": 1.5}),
    ({"frequency_penalty": -0.5}, {"frequency_penalty": -0.5}),
    ({"temperature": 0.9, "top_p": 0.8, "seed": 5}, {"temperature": 0.9, "top_p": 0.8, "seed": 5}),
    ({"temperature": 1, "seed": 5, "extra_body": {"top_k": 5}}, {"temperature": 1, "seed": 5, "top_k": 5}),
    ({"temperature": 1, "seed": 5, "extra_body": {"min_p": 0.1}}, {"temperature": 1, "seed": 5, "min_p": 0.1}),
    ({"extra_body": {"repetition_penalty": 1.5}}, {"repetition_penalty": 1.5}),
    ({"extra_body": {"ignore_eos": True}}, {"ignore_eos": True}),
    ({"extra_body": {"max_draft": 0}}, {}),
    ({"extra_body": {"drafters": ["suffix"]}}, {}),
    ({"extra_body": {"accept": "rejection"}}, {}),
    ({"extra_body": {"collection": "mine", "priority": -1}}, {}),
    ({"user": "me", "metadata": {"for": "nothing"}}, {}),
    ({"response_format": {"type": "text"}}, {}),
    ({"response_format": {"type": "json_object"}}, {"json_schema": {"type": "object"}}),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": NUMBER, "strict": True}}},
        {"json_schema": NUMBER},
    ),
    ({"prediction": {"type": "content", "content": "Hi! How are you?"}}, {}),
]


@pytest.mark.parametrize(("asked", "options"), SAME, ids=lambda each: ",".join(each))
def test_every_wish_is_heard_whole_and_streamed(client, llm, asked, options):
    expected = alone(llm, max_new_tokens=16, **options)
    how = {"model": NAME, "messages": HI, "max_completion_tokens": 16, "temperature": 0} | asked
    how["extra_body"] = {**how.get("extra_body", {}), "slipstream": {"stats": True}}
    whole = client.chat.completions.create(**how)
    chunks = list(client.chat.completions.create(**how, stream=True, stream_options={"include_usage": True}))
    streamed = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert whole.choices[0].message.content == streamed == expected.text
    last = next(c for c in chunks if c.choices and c.choices[0].finish_reason)
    assert whole.choices[0].finish_reason == last.choices[0].finish_reason == expected.finish_reason
    assert whole.usage.completion_tokens == chunks[-1].usage.completion_tokens == len(expected.tokens)
    assert whole.model_extra["slipstream"]["exact"]
    assert last.model_extra["slipstream"]["stats"]["exact"]
    for usage in (whole.usage, chunks[-1].usage):
        assert (usage.completion_tokens_details is not None) == ("prediction" in asked)


def test_a_stream_ends_at_a_token_that_ends_it(client, llm):
    third = alone(llm, max_new_tokens=16).tokens[2]
    expected = alone(llm, max_new_tokens=16, stop_tokens=[third])
    for stream in (False, True):
        found = client.chat.completions.create(
            model=NAME, messages=HI, max_tokens=16, temperature=0, stream=stream, extra_body={"stop_token_ids": [third]}
        )
        text = "".join(c.choices[0].delta.content or "" for c in found) if stream else found.choices[0].message.content
        assert text == expected.text


def test_log_probabilities_of_a_stream_are_those_of_the_whole(client):
    chat = {"model": NAME, "messages": HI, "max_tokens": 8, "temperature": 0, "logprobs": True, "top_logprobs": 2}
    whole = client.chat.completions.create(**chat).choices[0].logprobs.content
    chunks = client.chat.completions.create(**chat, stream=True)
    assert [e for c in chunks if c.choices[0].logprobs for e in c.choices[0].logprobs.content] == whole
    text = {"model": NAME, "prompt": "The sea is", "max_tokens": 8, "temperature": 0, "logprobs": 2}
    whole = client.completions.create(**text).choices[0].logprobs
    parts = [c.choices[0].logprobs for c in client.completions.create(**text, stream=True) if c.choices[0].logprobs]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [each for part in parts for each in getattr(part, name)] == getattr(whole, name)


class City(pydantic.BaseModel):
    name: str
    inhabitants: int


def test_answers_that_follow_a_schema(smol, client):
    there = Running(Server(LLM(smol.model, smol.tokenizer, "pld"), NAME))  # one that comes to an end by itself
    try:
        answer = there.client().chat.completions.parse(
            model=NAME,
            messages=[{"role": "user", "content": "A city."}],
            max_tokens=48,
            temperature=0,
            response_format=City,
        )
    finally:
        there.close()
    assert isinstance(answer.choices[0].message.parsed, City)
    free = client.chat.completions.create(
        model=NAME, messages=HI, max_tokens=64, temperature=0, response_format={"type": "json_object"}
    )
    assert free.choices[0].message.content.startswith("{")


def test_a_prediction_is_drafted_and_counted(client, llm):
    expected = alone(llm, max_new_tokens=40)
    answer = client.chat.completions.create(
        model=NAME, messages=HI, max_tokens=40, temperature=0,
        prediction={"type": "content", "content": expected.text + " And more."},
    )  # fmt: skip
    assert answer.choices[0].message.content == expected.text
    counted = answer.usage.completion_tokens_details
    assert counted.accepted_prediction_tokens > 10  # of 39; how many others draft depends on what was learnt before
    assert counted.rejected_prediction_tokens > 0


# ---- tools


def test_a_forced_call_is_a_call(smol):
    tokenizer = type(smol.tokenizer).from_pretrained(smol.tokenizer.name_or_path)
    tokenizer.chat_template = TEMPLATE
    there = Running(Server(LLM(smol.model, tokenizer, "none"), NAME))
    try:
        client = there.client()
        for stream in (False, True):
            asked = {"model": NAME, "messages": HI, "tools": TOOLS, "tool_choice": "required", "max_tokens": 64}
            answer = client.chat.completions.create(**asked, temperature=0, stream=stream)
            if stream:
                chunks = list(answer)
                calls = [call for c in chunks for call in c.choices[0].delta.tool_calls or []]
                name = "".join(call.function.name or "" for call in calls)
                arguments = "".join(call.function.arguments or "" for call in calls)
                finish = chunks[-1].choices[0].finish_reason
            else:
                (call,) = answer.choices[0].message.tool_calls
                name, arguments, finish = call.function.name, call.function.arguments, answer.choices[0].finish_reason
                again = [*HI, answer.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
                assert client.chat.completions.create(model=NAME, messages=again, max_tokens=2).choices
            assert name == "weather"
            assert json.loads(arguments)["city"] in ("Bern", "Rome")
            assert finish == "tool_calls"
            assert called(client, {"type": "function", "function": {"name": "weather"}}, 32, stream) == ["weather"]
            assert called(client, "none", 2, stream) == called(client, "auto", 2, stream) == []  # it is free to talk
        with pytest.raises(openai.BadRequestError, match="weather"):
            client.chat.completions.create(
                model=NAME, messages=HI, tools=TOOLS, tool_choice={"type": "function", "function": {"name": "other"}}
            )
    finally:
        there.close()


def called(client, choice, tokens, stream):
    """The functions that an answer calls."""
    answer = client.chat.completions.create(
        model=NAME, messages=HI, tools=TOOLS, tool_choice=choice, max_tokens=tokens, temperature=0, stream=stream
    )
    if not stream:
        return [call.function.name for call in answer.choices[0].message.tool_calls or []]
    deltas = [call for chunk in answer for call in chunk.choices[0].delta.tool_calls or []]
    return [call.function.name for call in deltas if call.function.name]


def test_calls_are_told_from_content_while_they_come():
    choice, deltas = Choice(0, Asked(parser=Hermes)), []
    text = 'Let me see.\n<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
    for i, char in enumerate(text):
        last = i == len(text) - 1
        deltas += choice.take(Chunk(char, finish="stop" if last else None))
    assert choice.text == "Let me see."
    assert [(c.name, json.loads(c.arguments)) for c in choice.calls] == [("f", {"x": 1})]
    assert choice.finish == "tool_calls"


def test_log_probabilities_come_with_their_text():
    choice = Choice(0, Asked())
    choice.take(Chunk("a", [Logprob(Spelled("a", b"a"), -0.5, [(Spelled("a", b"a"), -0.5)])]))
    assert choice.logprobs[0].logprob == -0.5


def test_parts_of_characters_are_told_apart_by_their_bytes(client, llm):
    """A token may be half a character: its bytes, joined with those of the others, spell the text."""
    parts = llm.tokenizer("🏳", add_special_tokens=False)["input_ids"]
    asked = {"model": NAME, "messages": HI, "temperature": 0, "logprobs": True}
    spelled = b""
    for token in parts:
        said = client.chat.completions.create(max_tokens=1, logit_bias={str(token): 100.0}, **asked)
        (found,) = said.choices[0].logprobs.content
        spelled += bytes(found.bytes)
    assert spelled.decode() == "🏳"
    halves = [(Spelled("\ufffd", bytes([byte])), -1.0) for byte in "🏳".encode()]
    (top,) = completion_logprobs([Logprob(halves[0][0], -1.0, halves)], [0])["top_logprobs"]
    assert list(top) == ["bytes:\\xf0", "bytes:\\x9f", "bytes:\\x8f", "bytes:\\xb3"]


def test_where_a_token_stands_is_the_same_whole_and_streamed(client):
    """Though some text is held back, since it may be the beginning of a stop string."""
    asked = {"model": NAME, "prompt": "The sea is", "max_tokens": 12, "temperature": 0, "logprobs": 0}
    said = client.completions.create(**asked).choices[0].text
    asked["stop"] = [said[:2] + "@", said[3:7] + "@"]
    whole = client.completions.create(**asked).choices[0].logprobs.text_offset
    chunks = [c.choices[0].logprobs for c in client.completions.create(**asked, stream=True) if c.choices]
    assert [place for each in chunks if each for place in each.text_offset] == whole


def test_log_probabilities_of_a_stream_are_sent_and_not_kept():
    """Each token is looked at once, though a character may be of several."""
    pieces = [b"a", *(bytes([byte]) for byte in "🏳".encode()), b"bc", b"d"]
    found = [Logprob(Spelled(piece.decode(errors="replace"), piece), -1.0, []) for piece in pieces]
    body, streamed, whole = CompletionRequest(prompt="", logprobs=0), Choice(0, Asked(), True), Choice(0, Asked())
    made, places = Completion(NAME, body), []

    async def chunks():
        for each in found:
            yield streamed, Chunk(each.token.text, [each])

    async def read():
        async for event in made.events(chunks(), [streamed]):
            if event.startswith("data: {") and (logprobs := json.loads(event[6:])["choices"][0]["logprobs"]):
                places.extend(logprobs["text_offset"])

    asyncio.run(read())
    whole.take(Chunk("a🏳bcd", found))
    assert places == made.choice(whole)["logprobs"]["text_offset"] == [0, 1, 1, 1, 1, 2, 4]
    assert (len(streamed.logprobs), len(whole.logprobs)) == (0, len(found))


# ---- the other endpoints


def test_completions(client, llm):
    plain = llm.generate("The sea is", template=False, max_new_tokens=12)
    answer = client.completions.create(model=NAME, prompt="The sea is", max_tokens=12, temperature=0, logprobs=1)
    assert answer.choices[0].text == plain.text
    assert "".join(answer.choices[0].logprobs.tokens) == plain.text
    tokens = llm.tokenizer("The sea is")["input_ids"]
    both = client.completions.create(model=NAME, prompt=[tokens, tokens], max_tokens=12, temperature=0)
    assert [c.text for c in both.choices] == [plain.text] * 2
    stream = client.completions.create(model=NAME, prompt="The sea is", max_tokens=12, temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == plain.text


def test_responses(client, llm):
    expected = alone(llm, max_new_tokens=16).text
    answer = client.responses.create(model=NAME, input="Say hi.", max_output_tokens=16, temperature=0)
    assert answer.output_text == expected
    assert answer.status == "incomplete"
    assert answer.usage.output_tokens == 16
    kinds, text = [], ""
    for event in client.responses.create(model=NAME, input=HI, max_output_tokens=16, temperature=0, stream=True):
        kinds.append(event.type)
        text += event.delta if event.type == "response.output_text.delta" else ""
    assert text == expected
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.incomplete"


def test_a_response_goes_on_from_its_own_output(client, llm):
    """As OpenAI's guide does: what was put out is put in again."""
    said = client.responses.create(model=NAME, input=HI, max_output_tokens=8, temperature=0)
    again = [*HI, *said.output, {"role": "user", "content": "And now?"}]
    found = client.responses.create(model=NAME, input=again, max_output_tokens=8, temperature=0)
    messages = [*HI, {"role": "assistant", "content": said.output_text}, again[-1]]
    assert found.output_text == alone(llm, messages, max_new_tokens=8).text


def test_responses_take_instructions_and_a_schema(client, llm):
    messages = [{"role": "system", "content": "Be brief."}, *HI]
    expected = alone(llm, messages, max_new_tokens=12, json_schema=NUMBER, temperature=0.9, top_p=0.9, seed=2).text
    asked = {
        "model": NAME, "input": "Say hi.", "instructions": "Be brief.", "max_output_tokens": 12, "temperature": 0.9,
        "top_p": 0.9, "text": {"format": {"type": "json_schema", "name": "n", "schema": NUMBER}},
        "extra_body": {"seed": 2},
    }  # fmt: skip
    assert client.responses.create(**asked).output_text == expected
    events = list(client.responses.create(**asked, stream=True))
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == expected
    assert events[-1].response.output_text == expected


def test_models_tokens_and_health(client, running, llm):
    assert [m.id for m in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).id == NAME
    status, found, _ = running.post("/tokenize", {"prompt": "The sea"})
    assert (status, found["tokens"]) == (200, llm.tokenizer("The sea")["input_ids"])
    assert running.post("/detokenize", {"tokens": found["tokens"]})[1] == {"prompt": "The sea"}
    assert running.post("/tokenize", {"messages": HI})[1]["count"] > 10
    with urllib.request.urlopen(f"{running.url}/health", timeout=PATIENCE) as answer:
        assert json.load(answer) == {"status": "ok"}


def test_the_schema_knows_what_is_answered_to_mistakes(running):
    with urllib.request.urlopen(f"{running.url}/openapi.json", timeout=PATIENCE) as answer:
        paths = json.load(answer)["paths"]
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/tokenize"):
        assert set(paths[path]["post"]["responses"]) == {"200", "default"}  # and not FastAPI's 422


def test_metrics_count_what_was_done(client, running):
    def read():
        there = http.client.HTTPConnection("127.0.0.1", running.port)
        there.request("GET", "/metrics")
        text = there.getresponse().read().decode()
        return {name: float(value) for name, value in re.findall(r"^(slipstream_\w+)(?:\{[^}]*\})? (\S+)$", text, re.M)}

    idle(running)
    before = read()
    client.chat.completions.create(model=NAME, messages=HI, max_tokens=8, temperature=0)
    idle(running)
    after = read()
    assert after["slipstream_generation_tokens_total"] - before["slipstream_generation_tokens_total"] == 8
    assert after["slipstream_num_requests_running"] == 0
    assert (
        after["slipstream_time_to_first_token_seconds_count"]
        == before["slipstream_time_to_first_token_seconds_count"] + 1
    )


# ---- mistakes


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ("{bad", 400, "not JSON"),
        ({}, 400, "messages is missing"),
        ({"messages": []}, 400, "messages"),
        ({"messages": HI, "frobnicate": 1}, 400, "frobnicate is not supported"),
        ({"messages": HI, "echo": True}, 400, "echo is not supported"),
        ({"messages": HI, "temperature": "hot"}, 400, "temperature"),
        ({"messages": HI, "temperature": 3}, 400, "temperature"),
        ({"messages": HI, "temperature": "1"}, 400, "temperature"),
        ({"messages": HI, "max_tokens": True}, 400, "max_tokens"),
        ({"messages": HI, "stream": "yes"}, 400, "stream"),
        ({"messages": HI, "n": 0}, 400, "n: "),
        ({"messages": HI, "max_tokens": 10**6}, 400, "at most"),
        ({"messages": HI, "model": "other"}, 404, "there is no model 'other'"),
        ({"messages": HI, "tools": TOOLS}, 400, "no tools"),
        ({"messages": HI, "logit_bias": {"a": 1}}, 400, "token ids"),
        ({"messages": HI, "top_logprobs": 2}, 400, "logprobs"),
        ({"messages": HI, "drafters": ["nobody"]}, 400, "nobody"),
        ({"messages": HI, "response_format": {"type": "json_schema"}}, 400, "missing"),
        ({"messages": [{"role": "user", "content": "word " * 9000}]}, 400, "8192"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages"),
    ],
)
def test_mistakes_are_told_in_openai_s_words(running, body, status, said):
    found, answer, _ = running.post("/v1/chat/completions", body)
    assert found == status, answer
    assert said in answer["error"]["message"]
    assert set(answer["error"]) == {"message", "type", "param", "code"}


def test_too_many_and_too_much_are_refused(llm):
    there = Running(Server(llm, NAME, Limits(body=2000, waiting=0), key="sésame"))
    try:
        assert there.post("/v1/chat/completions", {"messages": HI})[0] == 401
        assert there.post("/v1/chat/completions", {"messages": HI}, key="wrong")[0] == 401
        status, answer, headers = there.post("/v1/chat/completions", {"messages": HI}, key="sésame")
        assert (status, headers["retry-after"]) == (429, "1"), answer
        large = {"messages": [{"role": "user", "content": "a" * 3000}]}
        assert there.post("/v1/chat/completions", large, key="sésame")[0] == 413
    finally:
        there.close()


# ---- many, and those who leave


def test_many_at_once_get_what_each_gets_alone(running, llm):
    client = openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)
    asked = [(f"Count from {i}.", {"temperature": 0.8 * (i % 2), "seed": i}) for i in range(6)]
    expected = [llm.generate([{"role": "user", "content": p}], max_new_tokens=6, **way).text for p, way in asked]

    async def ask(prompt, way):
        messages = [{"role": "user", "content": prompt}]
        stream = await client.chat.completions.create(model=NAME, messages=messages, max_tokens=6, stream=True, **way)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def main():
        return await asyncio.gather(*(ask(*each) for each in asked))

    assert asyncio.run(main()) == expected


@pytest.mark.parametrize("stream", [True, False])
def test_who_leaves_ends_the_answer(running, stream):
    there = socket.create_connection(("127.0.0.1", running.port))
    body = json.dumps({"messages": HI, "max_tokens": 2000, "ignore_eos": True, "stream": stream}).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    there.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    while not running.server.service.running:
        sleep(0.01)
    there.close()
    idle(running)


# ---- the page


def test_the_page_is_told_how_answers_ended_and_how_full_the_cache_is(llm, monkeypatch):
    server = Server(llm, NAME)
    server.service.counts.ended.update(stop=1, length=2, cancelled=3, failed=4, timeout=5)
    monkeypatch.setattr(type(llm.target), "filled", 0.25)
    with TestClient(server.app) as there:
        live = there.get("/live").json()
    ends = {name: live["totals"][name] for name in ("finished", "cancelled", "failed", "timeout")}
    assert ends == {"finished": 3, "cancelled": 3, "failed": 4, "timeout": 5}
    assert live["cache"] == {"used": 0.25}


def test_the_page_shows_an_answer_and_no_hostile_text_acts(running, browser):
    browser.complaints.clear()
    browser.open(f"{running.url}/")
    hostile = "<img src=x onerror=alert(1)> Say hi."
    browser.run(f"document.getElementById('prompt').value = {json.dumps(hostile)}")
    browser.run("document.getElementById('max-tokens').value = 12")
    browser.run("document.getElementById('send').click()")
    end = monotonic() + PATIENCE
    while "per step" not in browser.run("document.getElementById('outcome').textContent"):
        assert monotonic() < end, browser.run("document.body.innerText")
        sleep(0.1)
    assert browser.run("document.querySelectorAll('#answer .token').length") >= 8
    assert browser.run("document.querySelectorAll('img').length") == 0
    assert browser.run("document.getElementById('model').textContent") == NAME
    assert browser.run("document.getElementById('cache').textContent").endswith("%")
    assert not [c for c in browser.complaints if "favicon" not in str(c) and "Password" not in str(c)]
    browser.open("about:blank")  # or the page would go on asking a server that is gone
