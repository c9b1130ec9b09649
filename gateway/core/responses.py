"""OpenAI's Responses API, as far as Baton reads it: a request → a chat request. Pure.

`FIELDS` is the whole story of a request body: which properties are known, what makes a value acceptable, and what
becomes of it. `chat` it is translated and goes the way of a chat request; `read` Baton acts on it; `echo` it is given
back in the reply and has no other effect; `refused` anything but its harmless value is a 400, because it asks for what
Baton does not do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from gateway.core.chat import REFUSED, REFUSED_PREFIXES, TOKENS_MAX, ChatRequest, parse_request
from gateway.core.responses_items import Item, check_calls, parse_items, to_messages
from gateway.core.responses_tools import chat_tool_choice, chat_tools
from gateway.errors import BadRequest

Fate = Literal["chat", "read", "echo", "refused"]
Check = Callable[[Any], bool]
INCLUDABLE = (
    "message.output_text.logprobs", "reasoning.encrypted_content", "message.input_image.image_url",
    "file_search_call.results", "web_search_call.results", "web_search_call.action.sources",
    "code_interpreter_call.outputs", "computer_call_output.output.image_url",
)  # fmt: skip
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


def _text(chars_max: int) -> Check:
    return lambda v: isinstance(v, str) and len(v) <= chars_max


def _number(low: float, high: float) -> Check:
    return lambda v: isinstance(v, int | float) and not isinstance(v, bool) and low <= v <= high


def _integer(low: int, high: int) -> Check:
    return lambda v: isinstance(v, int) and not isinstance(v, bool) and low <= v <= high


def _object(v: Any) -> bool:
    return isinstance(v, dict)


def _bool(v: Any) -> bool:
    return isinstance(v, bool)


def _one_of(*names: str) -> Check:
    return lambda v: isinstance(v, str) and v in names


def _never(v: Any) -> bool:
    return False


def _includes(v: Any) -> bool:
    return isinstance(v, list) and all(isinstance(name, str) and name in INCLUDABLE for name in v)


def _reasoning(v: Any) -> bool:
    return _object(v) and v.get("effort") in (None, *EFFORTS)


def _text_config(v: Any) -> bool:
    verbosities = (None, "low", "medium", "high")
    return _object(v) and v.get("verbosity") in verbosities and isinstance(v.get("format", {}), dict | None)


FIELDS: dict[str, tuple[Fate, Check, str]] = {
    # name: (fate, check, what a good value is)
    "model": ("read", _text(256), "a model name, see /v1/models"),
    "input": ("read", lambda v: isinstance(v, str | list), "a string or a list of items"),
    "instructions": ("read", _text(1_048_576), "a string"),
    "previous_response_id": ("read", _text(64), "the id of a stored response"),
    "store": ("read", _bool, "true or false"),
    "stream": ("read", _bool, "true or false"),
    "stream_options": ("echo", _object, "an object"),
    "include": ("read", _includes, f"a list of: {', '.join(INCLUDABLE)}"),
    "metadata": ("chat", _object, "up to 16 pairs of strings (64 / 512 characters)"),
    "user": ("chat", _text(512), "a string"),
    "safety_identifier": ("chat", _text(512), "a string"),
    "service_tier": ("chat", _text(64), "a string"),
    "prompt_cache_key": ("chat", _text(512), "a string"),
    "prompt_cache_retention": ("chat", _one_of("in_memory", "in-memory", "24h"), "in_memory or 24h"),
    "prompt_cache_options": ("echo", lambda v: _object(v) and not v.get("prewarm"), "an object without `prewarm`"),
    "temperature": ("chat", _number(0, 2), "a number from 0 to 2"),
    "top_p": ("chat", _number(0, 1), "a number from 0 to 1"),
    "top_logprobs": ("chat", _integer(0, 20), "an integer from 0 to 20"),
    "max_output_tokens": ("chat", _integer(1, TOKENS_MAX), "an integer above 0"),
    "max_tool_calls": ("echo", _integer(1, TOKENS_MAX), "an integer above 0"),
    "parallel_tool_calls": ("chat", _bool, "true or false"),
    "tools": ("chat", lambda v: isinstance(v, list) and len(v) <= 128, "up to 128 function tools"),
    "tool_choice": ("chat", lambda v: isinstance(v, str | dict), "none, auto, required or an object"),
    "text": ("chat", _text_config, "an object of `format` and `verbosity` (low, medium or high)"),
    "reasoning": ("chat", _reasoning, f"an object whose `effort` is one of {', '.join(EFFORTS)}"),
    "truncation": ("refused", _one_of("disabled"), "disabled: input is never cut; shorten it before you send it"),
    "background": ("refused", lambda v: v is False, "false: responses are made while you wait"),
    "conversation": ("refused", _never, "left out; continue with `previous_response_id`"),
    "prompt": ("refused", _never, "left out; no prompt templates are kept, send `instructions` and `input`"),
    "context_management": ("refused", lambda v: v == [], "left out; the conversation is never compacted"),
    "moderation": ("refused", _never, "left out; nothing is moderated here"),
    "access_programs": ("refused", _never, "left out; there are none here"),
    "image": ("refused", _never, "left out; images go to the worker as they are"),
}

MOVED = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "verbosity": "text.verbosity",
    "functions": "tools",
    "function_call": "tool_choice",
    "logprobs": "include",
}
NAMES = {  # of a chat request's fields, in an error about one that was made of a Responses request
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "verbosity": "text.verbosity",
    "logprobs": "include",
}


@dataclass(frozen=True, slots=True)
class ResponsesRequest:
    """A request whose own fields are good. The conversation it continues is not known yet."""

    model: str
    items: Sequence[Item]
    body: Mapping[str, Any]  # the known properties as given
    dropped: tuple[str, ...] = ()  # unknown properties that were left out

    @property
    def instructions(self) -> str | None:
        """What stands before the whole conversation this time; not inherited."""
        text: str | None = self.body.get("instructions")
        return text

    @property
    def previous(self) -> str | None:
        """Id of the response whose conversation this one continues."""
        name: str | None = self.body.get("previous_response_id")
        return name

    @property
    def store(self) -> bool | None:
        """Whether the client wants it kept; None: it did not say."""
        wanted: bool | None = self.body.get("store")
        return wanted


def parse_responses_request(body: object, *, items_max: int, strict: bool = False) -> ResponsesRequest:
    """A decoded JSON body → ResponsesRequest. Raises BadRequest naming the field, and what a good value is."""
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object", code="invalid_type")
    for name in body:
        _refuse(name)
    dropped = tuple(sorted(name for name in body if name not in FIELDS))
    if strict and dropped:
        raise BadRequest(f"Unknown parameter: '{dropped[0]}'.", param=dropped[0], code="unknown_parameter")
    known = {name: value for name, value in body.items() if name in FIELDS and value is not None}
    for name, value in known.items():
        fate, check, good = FIELDS[name]
        if not check(value):
            code = "unsupported_parameter" if fate == "refused" else "invalid_type"
            raise BadRequest(f"`{name}` must be {good}", param=name, code=code)
    for name in ("model", "input"):
        if name not in known:
            raise BadRequest(f"Missing required parameter: '{name}'.", param=name, code="missing_required_parameter")
    return ResponsesRequest(known["model"], parse_items(known["input"], items_max), known, dropped)


def _refuse(name: str) -> None:
    if name in REFUSED or name.startswith(REFUSED_PREFIXES):
        raise BadRequest(f"`{name}` is not accepted from clients; leave it out", param=name, code="refused_field")
    if name in MOVED:
        text = f"Unsupported parameter: '{name}'. In the Responses API, this parameter has moved to '{MOVED[name]}'."
        raise BadRequest(text, param=name, code="unsupported_parameter")


def chat_request(
    asked: ResponsesRequest,
    items: Sequence[Item],
    history: Sequence[Mapping[str, Any]],
    *,
    messages_max: int,
    strict: bool = False,
) -> ChatRequest:
    """The chat request that a Responses request stands for. `items`: its own, references looked up; `history`: the
    conversation that it continues, without that one's instructions. Raises BadRequest in its own words."""
    head = [{"role": "system", "content": asked.instructions}] if asked.instructions is not None else []
    own = to_messages(items)
    messages = [*head, *history, *own]
    if not own and not history:
        raise BadRequest("`input` holds nothing that could be answered", param="input", code="empty_array")
    check_calls(messages)
    body = {"model": asked.model, "messages": messages, **_params(asked.body)}
    try:
        chat = parse_request(body, messages_max=messages_max, strict=strict)
    except BadRequest as error:
        raise _reworded(error) from None
    return replace(chat, dropped=asked.dropped)


def _params(body: Mapping[str, Any]) -> dict[str, Any]:
    same = (
        *("metadata", "user", "safety_identifier", "service_tier", "prompt_cache_key", "prompt_cache_retention"),
        *("temperature", "top_p", "stream"),
    )
    params: dict[str, Any] = {name: body[name] for name in same if name in body}
    if "max_output_tokens" in body:
        params["max_completion_tokens"] = body["max_output_tokens"]
    if body.get("tools"):
        choice, only = chat_tool_choice(body.get("tool_choice"), body["tools"])
        params["tools"] = chat_tools(body["tools"], only)
        params |= {} if choice is None else {"tool_choice": choice}
        params |= {"parallel_tool_calls": body["parallel_tool_calls"]} if "parallel_tool_calls" in body else {}
    else:
        chat_tool_choice(body.get("tool_choice"), [])
    if wants_logprobs(body):
        params |= {"logprobs": True, "top_logprobs": body.get("top_logprobs", 0)}
    return params | _text_params(body.get("text", {})) | _reasoning_params(body.get("reasoning", {}))


def wants_logprobs(body: Mapping[str, Any]) -> bool:
    """Whether the text of the reply carries log-probabilities."""
    return "message.output_text.logprobs" in body.get("include", ()) or bool(body.get("top_logprobs"))


def _text_params(text: Mapping[str, Any]) -> dict[str, Any]:
    params: dict[str, Any] = {} if text.get("verbosity") is None else {"verbosity": text["verbosity"]}
    wanted = text.get("format")
    if not wanted:
        return params
    kind = wanted.get("type")
    if kind not in ("text", "json_object", "json_schema"):
        spot = "text.format.type"
        raise BadRequest(f"`{spot}` must be text, json_object or json_schema", param=spot, code="invalid_value")
    if kind == "json_schema":
        for name, good in (("name", str), ("schema", dict)):
            if not isinstance(wanted.get(name), good):
                spot = f"text.format.{name}"
                raise BadRequest(
                    f"Missing required parameter: '{spot}'.", param=spot, code="missing_required_parameter"
                )
        names = ("name", "description", "schema", "strict")
        schema = {name: wanted[name] for name in names if wanted.get(name) is not None}
        return params | {"response_format": {"type": kind, "json_schema": schema}}
    return params if kind == "text" else params | {"response_format": {"type": kind}}


def _reasoning_params(reasoning: Mapping[str, Any]) -> dict[str, Any]:
    effort = reasoning.get("effort")
    return {} if effort is None else {"reasoning_effort": effort}


def _reworded(error: BadRequest) -> BadRequest:
    """An error about the chat request, in the words of the Responses request it was made of."""
    name = (error.param or "").split(".")[0].split("[")[0]
    if name not in NAMES:
        return error
    text = error.message.replace(str(error.param), NAMES[name])
    return BadRequest(text, param=NAMES[name], code=error.code, headers=error.headers)
