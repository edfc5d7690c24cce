"""Tool calls: content and calls are told apart in a growing text, and nothing of it is lost."""

import json
import random
import time

import pytest

from slipstream.errors import OptionError
from slipstream.server.tool_calls import (
    CallArguments,
    CallBegins,
    Content,
    Hermes,
    Llama,
    ToolCall,
    forced_schema,
    form_of,
    read_call,
)

PARIS = '{"name": "weather", "arguments": {"city": "Paris"}}'
OSLO = '{"name": "weather", "parameters": {"city": "Oslo"}}'
PARIS_CALL = ToolCall("weather", '{"city": "Paris"}')
OSLO_CALL = ToolCall("weather", '{"city": "Oslo"}')


def tagged(call=PARIS):
    return f"<tool_call>\n{call}\n</tool_call>"


def deltas(parser, pieces):
    """All deltas in their order, neighbouring content joined."""
    joined = []
    for delta in [*(delta for piece in pieces for delta in parser.feed(piece)), *parser.finish()]:
        if isinstance(delta, Content) and joined and isinstance(joined[-1], Content):
            joined[-1] = Content(joined[-1].text + delta.text)
        else:
            joined.append(delta)
    return joined


def parse(text, parser):
    """The content and the calls of a whole answer, by a fresh parser."""
    content, names, arguments = "", [], []
    for delta in [*parser.feed(text), *parser.finish()]:
        match delta:
            case Content():
                content += delta.text
            case CallBegins():
                names.append(delta.name)
                arguments.append("")
            case CallArguments():
                arguments[delta.index] += delta.piece
    return content, [ToolCall(*call) for call in zip(names, arguments, strict=True)]


# Worked examples


def test_hermes_calls_with_content_around_them():
    assert parse(tagged(), Hermes()) == ("", [PARIS_CALL])
    assert parse(f"Let me look.\n{tagged()}", Hermes()) == ("Let me look.", [PARIS_CALL])
    assert parse(f"\n\n{tagged()}\n{tagged(OSLO)}\n", Hermes()) == ("", [PARIS_CALL, OSLO_CALL])
    assert parse(f"{tagged()}\nThat is all. ", Hermes()) == ("That is all. ", [PARIS_CALL])
    assert parse(f"<tool_call>{PARIS}</tool_call>", Hermes()) == ("", [PARIS_CALL])


def test_content_on_both_sides_of_a_call_does_not_run_together():
    assert parse(f"First.\n{tagged()}\nThen.", Hermes()) == ("First.\n\nThen.", [PARIS_CALL])


def test_llama_calls_are_the_whole_answer():
    assert parse(OSLO, Llama()) == ("", [OSLO_CALL])
    assert parse(f"\n <|python_tag|> {OSLO}\n", Llama()) == ("", [OSLO_CALL])
    assert parse(f"<|python_tag|>{PARIS}; {OSLO}", Llama()) == ("", [PARIS_CALL, OSLO_CALL])
    assert parse('{"type": "function", "name": "f", "parameters": {}}', Llama()) == ("", [ToolCall("f", "{}")])


@pytest.mark.parametrize(
    "text",
    [
        "",
        " \n",
        "Hello. ",
        f"Look: {OSLO}",
        f"{OSLO} is how one calls it.",
        f"{OSLO}{OSLO}",
        f"{OSLO};",
        f"{OSLO}; and",
        OSLO[:-1],
        f'{OSLO}; {{"name": "wea',
        '{"answer": 42}',
        '{"name": "Ada"}',
        '{"name": "f", "parameters": [1]}',
        '[{"name": "f", "parameters": {}}]',
        "<|python_tag|>",
        "<|python",
        "<|python_tag|>print(1)",
        f"<|python_tag|><|python_tag|>{OSLO}",
        "{'name': 'f', 'parameters': {}}",
        tagged(),
    ],
)
def test_anything_else_from_llama_is_content(text):
    assert parse(text, Llama()) == (text, [])


def test_deltas_come_as_soon_as_they_are_known():
    parser = Hermes()
    assert parser.feed("See") == [Content("See")]
    assert parser.feed(" <tool") == []  # may become a call
    assert parser.feed("box>") == [Content(" <toolbox>")]
    assert parser.feed('<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call') == []
    assert parser.feed(">") == [CallBegins(0, "f"), CallArguments(0, '{"a": 1}')]
    assert parser.feed('<tool_call>{"name" = ') == [Content('<tool_call>{"name" =')]  # no object goes on like this
    assert parser.feed("...") == [Content(" ...")]
    assert parser.finish() == []

    parser = Llama()
    assert parser.feed(" {") == []
    assert parser.feed("x") == [Content(" {x")]
    assert parser.feed("y") == [Content("y")]
    assert parser.finish() == []


# What is no call


@pytest.mark.parametrize(
    "text",
    [
        "a < b, <tool, <tool_call, </tool_call>",
        "<tool_call>",
        "<tool_call></tool_call>",
        "<tool_call>\n\n</tool_call> ",
        "<tool_call>weather(Paris)</tool_call>",
        f"<tool_call>\n{PARIS}\n",
        f"<tool_call>\n{PARIS}\n</tool_call",
        f"<tool_call>\n{PARIS[:-1]}\n</tool_call>",
        tagged(PARIS + "}"),
        tagged(PARIS + PARIS),
        tagged("[]"),
        tagged("{}"),
        tagged('{"name": "f"}'),
        tagged('{"arguments": {}}'),
        tagged('{"name": "", "arguments": {}}'),
        tagged('{"name": 3, "arguments": {}}'),
        tagged('{"name": "f", "arguments": "{}"}'),
        tagged('{"name": "f", "arguments": {"a": 1,}}'),
        tagged('{"name": "f", "arguments": {"a": [1}]}'),
        tagged('{"name": "f", "arguments": {"a": "b" "c"}}'),
        tagged('{"name": "f", "arguments": {"a": "unclosed}}'),
        tagged('{"name": "f", "arguments": {"a": NaN}}'),
        tagged('{"name": "f", "arguments": {"a": -Infinity}}'),
        tagged('{"name": "f", "arguments": {"a": 1e999}}'),
        tagged('{"name": "f", "arguments": {"a": 1 2}}'),
        tagged('{"name": "f", "arguments": {"a": truth}}'),
        tagged('{"name": "f", "arguments": {"a": "\\x"}}'),
        tagged('{"name": "\\ud800", "arguments": {}}'),
        tagged('{"name": "f", "arguments": {"a": %s}}' % ("9" * 5000)),
        tagged('{"name": "f", "arguments": {"a": %s}}' % ("[" * 200_000 + "]" * 200_000)),
    ],
    ids=lambda text: text[:60],
)
def test_a_malformed_call_is_content(text):
    assert parse(text, Hermes()) == (text, [])
    assert parse(f"  {text}!\n", Hermes()) == (f"  {text}!\n", [])


@pytest.mark.parametrize("bad", ["<tool_call>", "<tool_call>{", '<tool_call>{"a": "', "<tool_call>no</tool_call>\n"])
def test_a_call_behind_a_malformed_one_is_found(bad):
    content, calls = parse(bad + tagged(), Hermes())
    assert (content, calls) == (bad.rstrip(), [PARIS_CALL])


# What arguments may hold


@pytest.mark.parametrize("parser", [Hermes, Llama])
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"a": {"b": [{"c": {}}, [[]], "}"]}},
        {"html": "</tool_call><tool_call>"},
        {"html": tagged()},
        {"quote": '"\\"}', "tail\\": "\\"},
        {"text": "Zürich 東京 🙂\n\t"},
        {"n": [0, -1, 1.5e-7, 12345678901234567890, True, False, None]},
    ],
    ids=str,
)
def test_arguments_come_back_as_they_were(parser, arguments):
    for ascii_only in (True, False):
        for indent in (None, 2):
            written = json.dumps({"name": "f", "arguments": arguments}, ensure_ascii=ascii_only, indent=indent)
            content, [call] = parse(tagged(written) if parser is Hermes else written, parser())
            assert (content, call.name, json.loads(call.arguments)) == ("", "f", arguments)
            assert call.arguments == json.dumps(arguments, ensure_ascii=False)


def test_line_breaks_inside_strings_are_taken_as_they_stand():
    _, [call] = parse(tagged('{"name": "run", "arguments": {"code": "a = 1\nb = 2"}}'), Hermes())
    assert json.loads(call.arguments) == {"code": "a = 1\nb = 2"}


def test_arguments_can_always_be_encoded():
    _, [call] = parse(tagged('{"name": "f", "arguments": {"half": "é\\ud83d"}}'), Hermes())
    assert json.loads(call.arguments.encode()) == {"half": "é\ud83d"}
    assert "é" in call.arguments


# Laws


PARTS = [
    tagged(),
    tagged(OSLO),
    tagged(json.dumps({"name": "f", "arguments": {"s": 'a "quoted" </tool_call> \\ {'}})),
    tagged('{"name": 3}'),
    f"<tool_call>{PARIS}",
    PARIS,
    OSLO,
    ";",
    "<|python_tag|>",
    "<tool_call>",
    "</tool_call>",
    "<tool",
    '{"',
    '"',
    "\\",
    "}",
    "[1, ",
    " ",
    "\n",
    "Hello",
    "é🙂",
]


@pytest.mark.parametrize("parser", [Hermes, Llama])
def test_the_pieces_a_text_comes_in_do_not_matter(parser):
    rng = random.Random(0)
    for _ in range(1000):
        text = "".join(rng.choices(PARTS, k=rng.randint(1, 6)))
        if rng.random() < 0.3:
            text = text[: rng.randint(0, len(text))]  # an answer cut short
        cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randint(1, 12)))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        at_once = deltas(parser(), [text])
        assert deltas(parser(), pieces) == at_once, pieces
        assert deltas(parser(), text) == at_once, text  # one character at a time


def test_nothing_is_lost():
    """The parts that are no calls come out in their order, but for whitespace, and the others as calls."""
    rng = random.Random(0)
    plain = ["Hi", "a <tool b", " \n", "<tool_call>", "</tool_call>", '{"x": "', "<tool_call>" + PARIS[:-1]]
    calls = {tagged(): PARIS_CALL, tagged(OSLO): OSLO_CALL}
    for _ in range(1000):
        parts = rng.choices([*plain, *calls], k=7)
        content, found = parse("".join(parts), Hermes())
        assert "".join(content.split()) == "".join("".join(part for part in parts if part not in calls).split()), parts
        assert found == [calls[part] for part in parts if part in calls], parts


def test_calls_are_numbered_and_each_begins_before_its_arguments():
    found = deltas(Hermes(), f"{tagged()}, {tagged(OSLO)}")
    assert found == [
        CallBegins(0, "weather"),
        CallArguments(0, '{"city": "Paris"}'),
        Content(","),
        CallBegins(1, "weather"),
        CallArguments(1, '{"city": "Oslo"}'),
    ]


def test_a_degenerate_answer_takes_no_time():
    """Small models repeat themselves without end: each character is read a bounded number of times."""
    for loop in ("<tool_call>", "<tool_call>{", '<tool_call>{"a": "', "<tool", '{"a": [', "\n"):
        for parser in (Hermes, Llama):
            text = loop * (40_000 // len(loop))
            started = time.thread_time()  # of the processor, whoever else uses it
            assert parse(text, parser()) == (text, [])
            assert time.thread_time() - started < 5


def test_text_without_calls_is_never_held_back_but_for_whitespace_and_beginnings_of_tags():
    parser = Hermes()
    for character in "if a<b: print('<tool')":
        given = parser.feed(character)
        assert given or character.isspace() or character in "<tool"


# Which form a model writes


QWEN = r"""{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {{- "# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with function signatures within <tools></tools> XML tags:\n<tools>" }}
    {%- for tool in tools %}
        {{- "\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\n</tools>\n\nFor each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:\n<tool_call>\n{\"name\": <function-name>, \"arguments\": <args-json-object>}\n</tool_call><|im_end|>\n" }}
{%- endif %}"""  # noqa: E501

LLAMA = r"""{%- if tools is not none and not tools_in_user_message %}
    {{- 'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.' }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
    {%- endfor %}
{%- endif %}"""

PLAIN = """{% for message in messages %}
{{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""


def test_the_form_is_known_by_the_template():
    assert form_of(QWEN) is Hermes
    assert form_of(LLAMA) is Llama
    assert form_of("{% if tools %}{{ '<|python_tag|>' }}{% endif %}") is Llama


def test_a_template_without_tools_or_with_an_unknown_form_has_none():
    assert form_of(None) is None
    assert form_of(PLAIN) is None
    assert form_of(PLAIN + "{{ message['tool_calls'] }}") is None
    assert form_of("[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]") is None
    assert form_of("{{ tools }}<tool_call>\n<function=example>\n<parameter=x>") is None  # Qwen3-Coder


# Forced calls


CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "The weather.", "parameters": CITY}},
    {"type": "function", "function": {"name": "now"}},
]
WEATHER_SCHEMA = {
    "type": "object",
    "properties": {"name": {"const": "weather"}, "arguments": CITY},
    "required": ["name", "arguments"],
    "additionalProperties": False,
}
NOW_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"const": "now"},
        "arguments": {"type": "object", "properties": {}, "additionalProperties": False},
    },
    "required": ["name", "arguments"],
    "additionalProperties": False,
}


def named(name):
    return {"type": "function", "function": {"name": name}}


def test_the_schema_allows_the_chosen_calls_only():
    assert forced_schema(TOOLS, "required") == {"anyOf": [WEATHER_SCHEMA, NOW_SCHEMA]}
    assert forced_schema(TOOLS, named("now")) == {"anyOf": [NOW_SCHEMA]}
    for free in ("auto", "none", None):
        assert forced_schema(TOOLS, free) is None


def test_arguments_are_an_object_even_if_the_parameters_do_not_say_so():
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {}}}}}
    [call] = forced_schema([tool], "required")["anyOf"]
    assert call["properties"]["arguments"] == {"type": "object", "properties": {"a": {}}}


@pytest.mark.parametrize(
    ("tools", "choice", "says"),
    [
        (TOOLS, named("wether"), "'wether': there are weather, now"),
        (TOOLS, "sometimes", "'sometimes' is unknown: give auto, none, required or"),
        (TOOLS, {"type": "function"}, "is unknown: give auto"),
        ([], "required", "needs tools, found none"),
        ([], named("f"), "needs tools, found none"),
        ([{"name": "f"}], "required", "found the tool {'name': 'f'}: give each as"),
        ([{"type": "function", "function": {"name": "f", "parameters": []}}], "required", "found the tool"),
    ],
)
def test_wrong_choices_and_tools_are_refused(tools, choice, says):
    with pytest.raises(OptionError) as refused:
        forced_schema(tools, choice)
    assert says in str(refused.value)


def test_a_grammar_follows_the_schema_and_the_definitions_of_its_tools():
    """References (`#/$defs/...`), as pydantic writes them, lead into the tool's own parameters."""
    llguidance = pytest.importorskip("llguidance")
    node = {"type": "object", "properties": {"next": {"$ref": "#/$defs/Node"}}, "additionalProperties": False}
    parameters = {
        "type": "object",
        "properties": {"head": {"$ref": "#/$defs/Node"}},
        "required": ["head"],
        "$defs": {"Node": node},
    }
    tools = [*TOOLS, {"type": "function", "function": {"name": "walk", "parameters": parameters}}]
    grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(forced_schema(tools, "required")))
    assert not llguidance.LLMatcher.validate_grammar(grammar)

    def accepts(text):
        matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), grammar)
        return matcher.try_consume_tokens(list(text.encode())) == len(text.encode()) and matcher.is_accepting()

    assert accepts(PARIS)
    assert accepts('{"name": "now", "arguments": {}}')
    assert accepts('{"name": "walk", "arguments": {"head": {"next": {"next": {}}}}}')
    assert not accepts('{"name": "walk", "arguments": {"head": {"next": 3}}}')
    assert not accepts('{"name": "now", "arguments": {"city": "Paris"}}')
    assert not accepts('{"name": "weather", "arguments": {}}')
    assert not accepts('{"name": "other", "arguments": {}}')
    assert not accepts('{"name": "now", "arguments": {}, "more": 1}')
    assert not accepts('{"name": "now"}')


def test_a_forced_answer_is_a_call_unless_it_was_cut_short():
    assert read_call(PARIS) == PARIS_CALL
    assert read_call(f" {PARIS}\n") == PARIS_CALL
    for length in range(len(PARIS)):
        assert read_call(PARIS[:length]) is None
