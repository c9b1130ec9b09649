"""OpenAI's Responses API, as far as Baton reads it: a request → a chat request. Pure.

`FIELDS` is the whole story of a request body: which properties are known, what makes a value acceptable, and what
becomes of it. `chat` it is translated and goes the way of a chat request; `read` Baton acts on it; `echo` it is given
back in the reply and has no other effect; `refused` anything but its harmless value is a 400, because it asks for what
Baton does not do.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from gateway.core.openai.chat import MEDIA_BYTES_MAX, TOKENS_MAX, ChatRequest, parse_request
from gateway.core.openai.responses.items import Item, check_calls, parse_items, to_messages
from gateway.core.openai.responses.tools import chat_tool_choice, chat_tools, read_tools
from gateway.core.openai.shapes import (
    FLAG,
    OBJECT,
    Check,
    Known,
    Reader,
    array,
    bad,
    check_size,
    either,
    integer,
    mapping,
    missing,
    number,
    one_of,
    refuse_if_dangerous,
    text,
    unknown,
)
from gateway.errors import BadRequest, BatonError

Fate = Literal["chat", "read", "echo", "refused"]
INCLUDABLE = (
    "message.output_text.logprobs", "reasoning.encrypted_content", "message.input_image.image_url",
    "file_search_call.results", "web_search_call.results", "web_search_call.action.sources",
    "code_interpreter_call.outputs", "computer_call_output.output.image_url",
)  # fmt: skip
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


def _never(value: Any) -> str:
    return "unsupported_parameter"


def _only(harmless: Any) -> Check:
    return lambda value: None if value == harmless and type(value) is type(harmless) else "unsupported_parameter"


def _includes(value: Any) -> str | None:
    wrong = (one_of(*INCLUDABLE)(name) for name in value) if isinstance(value, list) else ("invalid_type",)
    return next((code for code in wrong if code), None)


FIELDS: dict[str, tuple[Fate, Check, str]] = {
    # name: (fate, check, what a good value is)
    "model": ("read", text(256), "a model name, see /v1/models"),
    "input": ("read", either(text(2**31), array(1, 2**31)), "a string or a list of items"),
    "instructions": ("read", text(2**31), "a string"),
    "previous_response_id": ("read", text(64), "the id of a stored response"),
    "store": ("read", *FLAG),
    "stream": ("read", *FLAG),
    "stream_options": ("chat", *OBJECT),
    "include": ("read", _includes, f"a list of: {', '.join(INCLUDABLE)}"),
    "metadata": ("chat", mapping, "up to 16 pairs of strings (64 / 512 characters)"),
    "user": ("chat", text(512), "a string"),
    "safety_identifier": ("chat", text(512), "a string"),
    "service_tier": ("chat", text(64), "a string"),
    "prompt_cache_key": ("chat", text(512), "a string"),
    "prompt_cache_retention": ("chat", text(64), "in_memory or 24h"),
    "prompt_cache_options": ("chat", *OBJECT),
    "temperature": ("chat", number(0, 2), "a number from 0 to 2"),
    "top_p": ("chat", number(0, 1), "a number from 0 to 1"),
    "top_logprobs": ("chat", integer(0, 20), "an integer from 0 to 20"),
    "max_output_tokens": ("chat", integer(1, TOKENS_MAX), "an integer above 0"),
    "max_tool_calls": (
        "echo",
        integer(1, TOKENS_MAX),
        "an integer above 0; it bounds hosted tools, and there are none",
    ),
    "parallel_tool_calls": ("chat", *FLAG),
    "tools": ("chat", array(0, 128), "up to 128 function tools"),
    "tool_choice": ("chat", either(text(64), mapping), "none, auto, required or an object"),
    "text": ("chat", mapping, "an object of `format` and `verbosity`"),
    "reasoning": ("chat", mapping, f"an object; its `effort` is one of {', '.join(EFFORTS)}"),
    "truncation": ("refused", _only("disabled"), "disabled: input is never cut; shorten it before you send it"),
    "background": ("refused", _only(False), "false: responses are made while you wait"),
    "conversation": ("refused", _never, "left out; continue with `previous_response_id`"),
    "prompt": ("refused", _never, "left out; no prompt templates are kept, send `instructions` and `input`"),
    "context_management": ("refused", _only([]), "left out; the conversation is never compacted"),
    "moderation": ("refused", _never, "left out; nothing is moderated here"),
    "access_programs": ("refused", _never, "left out; there are none here"),
    "image": ("refused", _never, "left out; images go to the worker as they are"),
}
_SUMMARY = one_of("auto", "concise", "detailed"), "auto, concise or detailed"
_REASONING: Known = {
    "effort": (one_of(*EFFORTS), f"one of {', '.join(EFFORTS)}"),
    "summary": _SUMMARY,
    "generate_summary": _SUMMARY,
}
_CACHE: Known = {"mode": (text(64), "a string"), "ttl": (text(64), "a string"), "prewarm": FLAG}
_TEXT: Known = {"format": OBJECT, "verbosity": (one_of("low", "medium", "high"), "low, medium or high")}
_FORMAT: Known = {
    "type": (one_of("text", "json_object", "json_schema"), "text, json_object or json_schema"),
    "name": (text(64), "a string of at most 64 characters"),
    "description": (text(10_000_000), "a string"),
    "schema": OBJECT,
    "strict": FLAG,
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
    "max_completion_tokens": "max_output_tokens",
    "response_format.json_schema": "text.format",
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


def parse_responses_request(
    body: object, *, items_max: int, strict: bool = False, media_bytes_max: int = MEDIA_BYTES_MAX
) -> ResponsesRequest:
    """A decoded JSON body → ResponsesRequest. Raises BadRequest naming the field, and what a good value is."""
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object", code="invalid_type")
    check_size(body, None)
    for name in body:
        _refuse(name)
    reader = Reader(media_bytes_max, sorted(name for name in body if name not in FIELDS))
    known = {name: value for name, value in body.items() if name in FIELDS and value is not None}
    for name, value in known.items():
        _, check, good = FIELDS[name]
        if code := check(value):
            raise bad(name, good, code)
    for name in ("model", "input"):
        if name not in known:
            raise missing(name)
    items = parse_items(known["input"], items_max, reader)
    known |= {name: _DEEP[name](known[name], reader) for name in _DEEP if name in known}
    if strict and reader.dropped:
        raise unknown(reader.dropped[0])
    return ResponsesRequest(known["model"], items, known, tuple(reader.dropped))


def _refuse(name: str) -> None:
    refuse_if_dangerous(name, name)
    if name in MOVED:
        said = f"Unsupported parameter: '{name}'. In the Responses API, this parameter has moved to '{MOVED[name]}'."
        raise BadRequest(said, param=name, code="unsupported_parameter")


def _text_config(raw: Any, reader: Reader) -> dict[str, Any]:
    made = reader.object(raw, "text", _TEXT)
    if "format" in made:
        made["format"] = reader.object(made["format"], "text.format", _FORMAT, ("type",))
        for name in ("name", "schema") if made["format"]["type"] == "json_schema" else ():
            if name not in made["format"]:
                raise missing(f"text.format.{name}")
    return made


def _cache_options(raw: Any, reader: Reader) -> dict[str, Any]:
    made = reader.object(raw, "prompt_cache_options", _CACHE)
    if made.pop("prewarm", False):
        spot = "prompt_cache_options.prewarm"
        said = f"`{spot}` is not supported: it would be answered, and paid for; leave it out"
        raise BadRequest(said, param=spot, code="unsupported_parameter")
    return made


_DEEP = {
    "text": _text_config,
    "prompt_cache_options": _cache_options,
    "stream_options": lambda raw, reader: reader.object(raw, "stream_options", {"include_obfuscation": FLAG}),
    "reasoning": lambda raw, reader: reader.object(raw, "reasoning", _REASONING),
    "tools": read_tools,
}


@dataclass(frozen=True, slots=True)
class Places:
    """Where the messages of a chat request came from, so that errors about them can be told to who never saw them."""

    names: tuple[str, ...]  # by index of the message: the property it was made of

    def reworded(self, error: BatonError) -> BatonError:
        """An error about the chat request, in the words of the Responses request it was made of."""
        path = error.param or ""
        inside = re.match(r"messages\[(\d+)\](.*)", path)
        if inside is not None and int(inside[1]) < len(self.names):
            new = self._inside(self.names[int(inside[1])], inside[2])
        elif path == "messages":
            new = "input"
        else:
            old = next((name for name in NAMES if path.startswith(name)), None)
            new = path if old is None else NAMES[old] + path[len(old) :]
        if new != path:
            error.message, error.param = error.message.replace(path, new), new
        return error

    def _inside(self, name: str, rest: str) -> str:
        """The path of a content part is the same in a message and in its item."""
        part = re.match(r"(\.content\[\d+\])(?:\.\w+(\.\w+))?", rest)
        if not name.startswith("input[") or part is None:
            return name
        return name + part[1] + (part[2] or "").replace(".url", ".image_url")


def chat_request(
    asked: ResponsesRequest,
    items: Sequence[Item],
    history: Sequence[Mapping[str, Any]],
    *,
    messages_max: int,
    media_bytes_max: int = MEDIA_BYTES_MAX,
) -> tuple[ChatRequest, Places]:
    """The chat request that a Responses request stands for, and where its messages came from. `items`: its own,
    references looked up; `history`: the conversation that it continues, without that one's instructions. Raises
    BadRequest in its own words."""
    head = [{"role": "system", "content": asked.instructions}] if asked.instructions is not None else []
    own, at = to_messages(items)
    messages = [*head, *history, *own]
    said = "input" if isinstance(asked.body["input"], str) else None
    places = Places(
        ("instructions",) * len(head)
        + ("previous_response_id",) * len(history)
        + tuple(said or f"input[{index}]" for index in at)
    )
    if not own and not history:
        raise BadRequest("`input` holds nothing that could be answered", param="input", code="empty_array")
    check_calls(messages)
    body = {"model": asked.model, "messages": messages, **_params(asked.body)}
    try:
        chat = parse_request(body, messages_max=messages_max, media_bytes_max=media_bytes_max)
    except BadRequest as error:
        raise places.reworded(error) from None
    return replace(chat, dropped=(*asked.dropped, *chat.dropped)), places


def _params(body: Mapping[str, Any]) -> dict[str, Any]:
    same = (
        *("metadata", "user", "safety_identifier", "service_tier", "store", "stream", "temperature", "top_p"),
        *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"),
    )
    params: dict[str, Any] = {name: body[name] for name in same if name in body}
    if "max_output_tokens" in body:
        params["max_completion_tokens"] = body["max_output_tokens"]
    if body.get("stream") and "stream_options" in body:
        params["stream_options"] = body["stream_options"]
    choice, only = chat_tool_choice(body.get("tool_choice"), body.get("tools", ()))
    if body.get("tools"):
        params["tools"] = chat_tools(body["tools"], only)
        params |= {} if choice is None else {"tool_choice": choice}
        params |= {"parallel_tool_calls": body["parallel_tool_calls"]} if "parallel_tool_calls" in body else {}
    if wants_logprobs(body):
        params |= {"logprobs": True, "top_logprobs": body.get("top_logprobs", 0)}
    return params | _text_params(body.get("text", {})) | _reasoning_params(body.get("reasoning", {}))


def wants_logprobs(body: Mapping[str, Any]) -> bool:
    """Whether the text of the reply carries log-probabilities."""
    return "message.output_text.logprobs" in body.get("include", ()) or bool(body.get("top_logprobs"))


def _text_params(config: Mapping[str, Any]) -> dict[str, Any]:
    params = {"verbosity": config["verbosity"]} if "verbosity" in config else {}
    wanted = config.get("format", {"type": "text"})
    if wanted["type"] == "json_schema":
        schema = {name: value for name, value in wanted.items() if name != "type"}
        return params | {"response_format": {"type": "json_schema", "json_schema": schema}}
    return params if wanted["type"] == "text" else params | {"response_format": {"type": wanted["type"]}}


def _reasoning_params(reasoning: Mapping[str, Any]) -> dict[str, Any]:
    return {"reasoning_effort": reasoning["effort"]} if "effort" in reasoning else {}
