"""The fields that clients may send. Any other field is refused by name."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Temperature = Annotated[float, Field(ge=0, le=2)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
TokenIds = list[Annotated[int, Field(ge=0)]]


class Strict(BaseModel):
    """Takes no unknown fields, and neither "1" nor true for a number."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Body(Strict):
    """The body of a call."""

    @model_validator(mode="before")
    @classmethod
    def proper(cls, given: Any) -> Any:
        """Refuse NaN and half surrogate pairs: Python's JSON parser takes them, but they can't be encoded again. A
        field that is null counts as left out, as in OpenAI's API."""
        try:
            json.dumps(given, ensure_ascii=False, allow_nan=False).encode()
        except UnicodeEncodeError as error:
            raise ValueError("the body has half a surrogate pair in it, which is no text") from error
        except ValueError as error:
            raise ValueError("the body has a number in it that is not finite, which is no JSON") from error
        except RecursionError as error:
            raise ValueError("the body is nested too deeply") from error
        except TypeError:  # bytes: not sent as JSON, which pydantic reports
            return given
        return {k: v for k, v in given.items() if v is not None} if isinstance(given, dict) else given


class TextPart(Strict):
    type: Literal["text", "input_text", "output_text"]
    text: str
    annotations: list[Any] | None = None  # as in output that is sent back
    logprobs: list[Any] | None = None


class FunctionCall(Strict):
    name: str
    arguments: str = "{}"


class SentCall(Strict):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[SentCall] | None = None
    tool_call_id: str | None = None
    refusal: None = None  # OpenAI's clients send it back as null


class Function(Strict):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    type: Literal["function"]
    function: Function


class NamedFunction(Strict):
    name: str


class NamedTool(Strict):
    type: Literal["function"]
    function: NamedFunction


class JsonSchema(Strict):
    name: str = "answer"
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class Format(Strict):
    """The format of the answer: text, any JSON object, or JSON that follows a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StreamOptions(Strict):
    include_usage: bool = False


class Prediction(Strict):
    type: Literal["content"]
    content: str | list[TextPart]


class Wishes(Strict):
    """Reports of slipstream's own that a client asks for: `slipstream: {…}` in the body."""

    stats: bool = False  # tokens per step, whether the text is exact, counts by drafter
    sources: bool = False  # in a stream: the drafter of each token


class Sampled(Body):
    """Fields of all endpoints that generate text."""

    model: str | None = None
    temperature: Temperature = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    seed: int | None = None
    stream: bool = False
    user: str | None = None  # has no effect
    metadata: dict[str, str] | None = None  # has no effect either
    # Slipstream's own.
    max_draft: Annotated[int, Field(ge=0, le=127)] | None = None
    drafters: list[str] | None = None
    accept: Literal["match", "rejection", "typical", "lenient"] = "match"
    collection: Annotated[str, Field(max_length=200)] | None = None
    priority: int = 0
    slipstream: Wishes = Field(default_factory=Wishes)


class Completed(Sampled):
    """Fields of chats and of completions."""

    n: Annotated[int, Field(ge=1, le=64)] = 1
    stop: str | Annotated[list[str], Field(max_length=16)] | None = None
    stop_token_ids: TokenIds = []
    ignore_eos: bool = False
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    logit_bias: Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=1024)] | None = None
    stream_options: StreamOptions | None = None
    prediction: Prediction | None = None
    response_format: Format | None = None


class ChatRequest(Completed):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: Literal[True] | None = None


class CompletionRequest(Completed):
    prompt: str | TokenIds | list[str] | list[TokenIds]
    max_tokens: Annotated[int, Field(ge=1)] | None = 16
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: Literal[False] = False
    best_of: Literal[1] | None = None


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseText(Strict):
    format: ResponseFormat = Field(default_factory=lambda: ResponseFormat())


class InputMessage(Strict):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    id: str | None = None  # as in output that is sent back
    status: Literal["in_progress", "completed", "incomplete"] | None = None


class ResponseRequest(Sampled):
    input: str | Annotated[list[InputMessage], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    text: ResponseText = Field(default_factory=ResponseText)
    store: Literal[False] | None = None


class TokenizeRequest(Body):
    """Either `prompt` or `messages`."""

    model_config = ConfigDict(json_schema_extra={"oneOf": [{"required": ["prompt"]}, {"required": ["messages"]}]})

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool = True


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: TokenIds
