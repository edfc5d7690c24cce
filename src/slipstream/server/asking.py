"""Turns the bodies that clients send into requests for the engine."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from slipstream.errors import OptionError, PromptError
from slipstream.llm import LLM
from slipstream.request import Request, Step
from slipstream.server import schema as s
from slipstream.server.backend import Asked, Limits
from slipstream.server.errors import Refused
from slipstream.server.tool_calls import forced_schema, form_of
from slipstream.text import Detokenizer


class SourceWatch:
    """Records which drafter proposed each token of an answer, as its request's `watch`. None: the model's own token."""

    def __init__(self) -> None:
        self.names: list[str | None] = []

    def __call__(self, step: Step) -> None:
        proposed = step.tree.proposed_by()
        for node in step.verdict.path[1:]:
            self.names.append("+".join(name for name, nodes in proposed.items() if nodes[node]) or None)
        self.names.append(None)


class Asking:
    """Turns bodies into requests. Tokenising takes time, so this runs in a thread beside the event loop."""

    def __init__(self, llm: LLM, limits: Limits) -> None:
        if llm.tokenizer is None:
            raise OptionError("a server needs the model's tokenizer: load the model with tokenizer=…")
        self.llm, self.limits = llm, limits
        self.template = llm.tokenizer.chat_template
        if isinstance(self.template, Mapping):  # several templates, by name
            self.template = self.template.get("tool_use") or self.template.get("default")

    def __call__(self, body: s.Sampled) -> tuple[Asked, list[Request]]:
        """What is known of a body's answers before they begin, and the request for each answer."""
        match body:
            case s.ChatRequest():
                return self._chat(body)
            case s.CompletionRequest():
                return self._completion(body)
            case s.ResponseRequest():
                return self._response(body)
        raise AssertionError(f"{type(body).__name__} asks for no answer")

    def _chat(self, body: s.ChatRequest) -> tuple[Asked, list[Request]]:
        tools = [tool.model_dump(exclude_none=True) for tool in body.tools or []]
        choice: Any = body.tool_choice
        if isinstance(choice, s.NamedTool):
            choice = choice.model_dump()
        if choice is not None and not tools and choice != "none":
            raise Refused(400, "tool_choice without tools: name the tools too", "tool_choice", "invalid_value")
        offered = [] if choice == "none" else tools
        parser = form_of(self.template) if offered else None
        if offered and parser is None:
            raise Refused(
                400,
                "this model's chat template has no tools, or writes calls in a form that is not known here: leave out "
                "tools, or serve another model",
                "tools",
                "unsupported_parameter",
            )
        options = self._options(body)
        forced = forced_schema(offered, choice)
        if forced is not None:
            if "json_schema" in options:
                raise Refused(400, "response_format and a forced tool call exclude each other", "response_format")
            options["json_schema"] = forced
        if body.top_logprobs is not None and not body.logprobs:
            raise Refused(400, "top_logprobs needs logprobs: true", "top_logprobs", "invalid_value")
        if body.logprobs:
            options["logprobs"] = body.top_logprobs or 0
        tokens = self.encode([as_message(m) for m in body.messages], offered)
        asked, requests = self._ask(body, [tokens], body.max_completion_tokens or body.max_tokens, options)
        return replace(asked, parser=parser, forced=forced is not None), requests

    def _completion(self, body: s.CompletionRequest) -> tuple[Asked, list[Request]]:
        prompts: Sequence[Any] = body.prompt if isinstance(body.prompt, list) else [body.prompt]
        if prompts and isinstance(prompts[0], int):
            prompts = [prompts]
        if not prompts:
            raise Refused(400, "prompt is empty", "prompt", "invalid_value")
        options = self._options(body)
        if body.logprobs is not None:
            options["logprobs"] = body.logprobs
        options["template"] = False  # the answer continues the prompt
        read = [p if isinstance(p, list) else self.llm.tokenizer(p)["input_ids"] for p in prompts]
        return self._ask(body, read, body.max_tokens, options)

    def _response(self, body: s.ResponseRequest) -> tuple[Asked, list[Request]]:
        messages = [{"role": "system", "content": body.instructions}] if body.instructions else []
        if isinstance(body.input, str):
            messages.append({"role": "user", "content": body.input})
        else:
            messages += [{"role": role_of(m.role), "content": text_of(m.content) or ""} for m in body.input]
        options = self._sampling(body)
        wanted = body.text.format
        if wanted.type == "json_schema" and wanted.schema_ is None:
            raise Refused(400, "text.format.schema is missing", "text.format.schema", "missing_required_parameter")
        if wanted.type != "text":
            options["json_schema"] = wanted.schema_ if wanted.type == "json_schema" else {"type": "object"}
        return self._ask(body, [self.encode(messages, [])], body.max_output_tokens, options)

    def tokens(self, body: s.TokenizeRequest) -> list[int]:
        if body.messages is not None:
            return self.encode([as_message(m) for m in body.messages], [])
        return list(self.llm.tokenizer(body.prompt, add_special_tokens=body.add_special_tokens)["input_ids"])

    def encode(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any]) -> list[int]:
        """The tokens of a conversation, as the model's chat template writes it."""
        tokenizer = self.llm.tokenizer
        if not tokenizer.chat_template:
            raise Refused(400, "this model has no chat template: use /v1/completions", "messages")
        try:
            text = tokenizer.apply_chat_template(
                list(messages), tools=list(tools) or None, add_generation_prompt=True, tokenize=False
            )
            text.encode()  # fails on half surrogate pairs, which the arguments of calls may contain
        except Exception as error:
            raise Refused(400, f"the model's chat template refused the messages: {error}", "messages") from error
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    def _ask(
        self, body: s.Sampled, prompts: Sequence[list[int]], longest: int | None, options: dict[str, Any]
    ) -> tuple[Asked, list[Request]]:
        limits, context = self.limits, self.llm.target.context
        count, requests = len(prompts) * getattr(body, "n", 1), list[Request]()
        if count > max(1, limits.waiting):
            message = f"{count} answers: this server takes {limits.waiting} at once at most"
            raise Refused(400, message, "prompt" if len(prompts) > 1 else "n", "invalid_value")
        for tokens in prompts:
            if limits.prompt is not None and len(tokens) > limits.prompt:
                message = f"the prompt has {len(tokens)} tokens, this server reads {limits.prompt}: shorten it"
                raise Refused(400, message, "messages", "context_length_exceeded")
            most = min(limits.tokens, max(1, context - len(tokens)))
            if longest is not None and longest > limits.tokens:
                message = f"{longest} tokens asked for, this server answers with {limits.tokens} at most"
                raise Refused(400, message, "max_tokens", "invalid_value")
            options["max_new_tokens"] = most if longest is None else longest
            requests += self.llm.requests(tokens, n=getattr(body, "n", 1), **options)
        if body.stream and body.slipstream.sources:
            for request in requests:
                assert isinstance(request.stop, Detokenizer)
                request.stop.by_token, request.watch = True, SourceWatch()
        prompt_tokens = sum(len(tokens) for tokens in {tuple(tokens) for tokens in prompts})
        return Asked(len(requests), prompt_tokens, predicted=len(requests[0].prediction or [])), requests

    def _sampling(self, body: s.Sampled) -> dict[str, Any]:
        options: dict[str, Any] = {
            "temperature": body.temperature,
            "top_p": body.top_p,
            "top_k": body.top_k,
            "min_p": body.min_p,
            "seed": body.seed,
            "max_draft": body.max_draft,
            "drafters": body.drafters,
            "accept": body.accept,
        }
        if body.collection is not None:
            options["collection"] = body.collection
        return options

    def _options(self, body: s.Completed) -> dict[str, Any]:
        options = self._sampling(body) | {
            "stop": body.stop,
            "stop_tokens": body.stop_token_ids,
            "ignore_eos": body.ignore_eos,
            "presence_penalty": body.presence_penalty,
            "frequency_penalty": body.frequency_penalty,
            "logit_bias": bias_of(body.logit_bias),
        }
        if body.repetition_penalty is not None:
            options["repetition_penalty"] = body.repetition_penalty
        if body.prediction is not None:
            options["prediction"] = text_of(body.prediction.content)
        wanted = body.response_format
        if wanted is not None and wanted.type != "text":
            if wanted.type == "json_schema" and wanted.json_schema is None:
                place = "response_format.json_schema"
                raise Refused(400, f"{place} is missing", place, "missing_required_parameter")
            options["json_schema"] = wanted.json_schema.schema_ if wanted.json_schema else {"type": "object"}
        return options


def role_of(role: str) -> str:
    """The role in the words of chat templates, which have no "developer"."""
    return "system" if role == "developer" else role


def text_of(content: str | Sequence[s.TextPart] | None) -> str | None:
    return content if content is None or isinstance(content, str) else "".join(part.text for part in content)


def as_message(message: s.Message) -> dict[str, Any]:
    """A message in the form that chat templates read: the arguments of calls are objects, not JSON text."""
    found: dict[str, Any] = {"role": role_of(message.role), "content": text_of(message.content) or ""}
    if message.name is not None:
        found["name"] = message.name
    if message.tool_call_id is not None:
        found["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        found["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": arguments_of(call)},
            }
            for call in message.tool_calls
        ]
    return found


def arguments_of(call: s.SentCall) -> Any:
    try:
        return json.loads(call.function.arguments)
    except (ValueError, RecursionError) as error:
        raise PromptError(f"the arguments of the call {call.id} are not JSON: {error}") from error


def bias_of(given: Mapping[str, float] | None) -> dict[int, float] | None:
    if given is None:
        return None
    if wrong := [key[:20] for key in given if not key.isascii() or not key.isdigit() or len(key) > 20]:
        raise Refused(400, f"logit_bias names {wrong[:5]}: its keys are token ids", "logit_bias", "invalid_value")
    return {int(key): value for key, value in given.items()}
