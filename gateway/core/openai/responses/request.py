"""OpenAI's Responses API, as far as Baton reads it: converts its requests to chat requests. Pure.

`FIELDS` is the complete table of a request body: which properties are known, which values are acceptable, and what
happens to each. With fate `chat`, the property is translated to a chat request. With `read`, Baton itself acts on it.
With `native`, it goes to workers that are asked by this API, and no chat request has it. With `refused`, every value
but the harmless one is a 400, because it asks for something that Baton does not do.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from gateway.core.openai.chat import (
    MEDIA_BYTES_MAX,
    NOTHING_HOSTED,
    TOKENS_MAX,
    ChatRequest,
    HostedTools,
    parse_request,
)
from gateway.core.openai.options import TOOLS_MAX
from gateway.core.openai.responses.items import PASSED, Item, check_calls, parse_items, to_messages, with_items
from gateway.core.openai.responses.tools import (
    NAME_CHARS_MAX,
    chat_tool_choice,
    chat_tools,
    chosen_hosted,
    hosted_tools,
    read_tools,
    shown_hosted,
)
from gateway.core.openai.shapes import (
    FLAG,
    OBJECT,
    Check,
    Properties,
    Reader,
    any_of,
    array,
    bad_value,
    check_size,
    integer,
    mapping,
    missing_parameter,
    number,
    one_of,
    refuse_if_dangerous,
    text,
    unknown_parameter,
)
from gateway.errors import BadRequest, BatonError

Fate = Literal["chat", "read", "native", "refused"]
INCLUDABLE = (
    "message.output_text.logprobs", "reasoning.encrypted_content", "message.input_image.image_url",
    "file_search_call.results", "web_search_call.results", "web_search_call.action.sources",
    "code_interpreter_call.outputs", "computer_call_output.output.image_url",
)  # fmt: skip
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


def _no_value(value: Any) -> str:
    return "unsupported_parameter"


def _conversation(value: Any) -> str | None:
    if isinstance(value, dict):
        return "invalid_value" if value.keys() != {"id"} else text(64)(value["id"])
    return text(64)(value)


def _includes(value: Any) -> str | None:
    codes = (one_of(*INCLUDABLE)(name) for name in value) if isinstance(value, list) else ("invalid_type",)
    return next((code for code in codes if code), None)


FIELDS: dict[str, tuple[Fate, Check, str]] = {
    # name: (fate, check, description of a valid value)
    "model": ("read", text(256), "a model name, see /v1/models"),
    "input": ("read", any_of(text(2**31), array(1, 2**31)), "a string or a list of items"),
    "instructions": ("read", text(2**31), "a string"),
    "previous_response_id": ("read", text(64), "the id of a stored response"),
    "store": ("read", *FLAG),
    "stream": ("read", *FLAG),
    "stream_options": ("chat", *OBJECT),
    "include": ("native", _includes, f"a list of: {', '.join(INCLUDABLE)}"),
    "metadata": ("chat", mapping, "up to 16 pairs of strings (64 / 512 characters)"),
    "user": ("chat", text(512), "a string"),
    "safety_identifier": ("chat", text(512), "a string"),
    "service_tier": ("chat", text(64), "a string"),
    "prompt_cache_key": ("chat", text(512), "a string"),
    "prompt_cache_retention": ("chat", text(64), "in_memory or 24h"),
    "prompt_cache_options": ("chat", *OBJECT),
    "temperature": ("chat", number(0, 2), "a number from 0 to 2"),
    "top_p": ("chat", number(0, 1), "a number from 0 to 1"),
    "presence_penalty": ("chat", number(-2, 2), "a number from -2 to 2"),
    "frequency_penalty": ("chat", number(-2, 2), "a number from -2 to 2"),
    "top_logprobs": ("chat", integer(0, 20), "an integer from 0 to 20"),
    "max_output_tokens": ("chat", integer(1, TOKENS_MAX), "an integer above 0"),
    "max_tool_calls": ("native", integer(1, TOKENS_MAX), "an integer above 0; it limits hosted tools"),
    "parallel_tool_calls": ("chat", *FLAG),
    "tools": ("chat", array(0, TOOLS_MAX), f"up to {TOOLS_MAX} tools"),
    "tool_choice": ("chat", any_of(text(64), mapping), "none, auto, required or an object"),
    "text": ("chat", mapping, "an object of `format` and `verbosity`"),
    "reasoning": ("chat", mapping, f"an object; its `effort` is one of {', '.join(EFFORTS)}"),
    "truncation": ("native", one_of("auto", "disabled"), "auto or disabled; Baton itself never cuts input"),
    "background": ("read", *FLAG),
    "conversation": ("read", _conversation, "the id of a conversation, or an object with its `id`"),
    "prompt": ("refused", _no_value, "left out; Baton keeps no prompt templates, send `instructions` and `input`"),
    "context_management": ("native", array(0, 8, dict), "a list of objects; Baton itself never compacts"),
    "moderation": ("refused", _no_value, "left out; Baton moderates nothing"),
    "access_programs": ("refused", _no_value, "left out; Baton has no access programs"),
    "image": ("refused", _no_value, "left out; Baton sends images to the worker unchanged"),
}
_SUMMARY = one_of("auto", "concise", "detailed"), "auto, concise or detailed"
_REASONING: Properties = {
    "effort": (one_of(*EFFORTS), f"one of {', '.join(EFFORTS)}"),
    "summary": _SUMMARY,
    "generate_summary": _SUMMARY,
    "context": (text(64), "a string"),
    "mode": (text(64), "a string"),
}
_CACHE: Properties = {"mode": (text(64), "a string"), "ttl": (text(64), "a string"), "prewarm": FLAG}
_TEXT: Properties = {"format": OBJECT, "verbosity": (one_of("low", "medium", "high"), "low, medium or high")}
_FORMAT: Properties = {
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
NAMES = {  # chat field → Responses field, for errors about a chat request that was made from a Responses request
    "max_completion_tokens": "max_output_tokens",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "verbosity": "text.verbosity",
    "logprobs": "include",
}


@dataclass(frozen=True, slots=True)
class ResponsesRequest:
    """A request whose own fields are valid. The conversation that it continues has not been read yet."""

    model: str
    items: Sequence[Item]
    body: Mapping[str, Any]  # the known properties as the client sent them
    dropped: tuple[str, ...] = ()  # paths of the unknown properties that were removed
    hosted: HostedTools = NOTHING_HOSTED
    vendor: Mapping[str, Any] = field(default_factory=dict)  # parameters that are not OpenAI's and that a worker takes

    @property
    def instructions(self) -> str | None:
        """The system message in front of the whole conversation. A continuation does not inherit it."""
        text: str | None = self.body.get("instructions")
        return text

    @property
    def previous(self) -> str | None:
        """The id of the response whose conversation this request continues, or None."""
        name: str | None = self.body.get("previous_response_id")
        return name

    @property
    def conversation(self) -> str | None:
        """The id of the conversation that this request is a turn of, or None."""
        reference = self.body.get("conversation")
        name: str | None = reference["id"] if isinstance(reference, Mapping) else reference
        return name

    @property
    def store(self) -> bool | None:
        """Whether the client wants the response stored; None: it did not say."""
        store: bool | None = self.body.get("store")
        return store


def parse_responses_request(
    body: object,
    *,
    items_max: int,
    strict: bool = False,
    media_bytes_max: int = MEDIA_BYTES_MAX,
    vendor: Collection[str] = (),
) -> ResponsesRequest:
    """Read a decoded JSON body. Raises BadRequest, which names the field and says what a valid value is.

    `strict` refuses unknown properties instead of dropping them. `media_bytes_max` bounds one image or file. `vendor`:
    the names of parameters that are not OpenAI's and that some worker takes.
    """
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object", code="invalid_type")
    check_size(body, None)
    for name in body:
        _refuse(name)
    extras = {name: body[name] for name in body if name not in FIELDS and name in vendor and body[name] is not None}
    reader = Reader(media_bytes_max, sorted(name for name in body if name not in FIELDS and name not in vendor))
    properties = {name: value for name, value in body.items() if name in FIELDS and value is not None}
    for name, value in properties.items():
        _, check, description = FIELDS[name]
        if code := check(value):
            raise bad_value(name, description, code)
    for name in ("model", "input"):
        if name not in properties:
            raise missing_parameter(name)
    if "conversation" in properties and "previous_response_id" in properties:
        problem = "Mutually exclusive parameters: `previous_response_id` and `conversation`; send one of them."
        raise BadRequest(problem, param="conversation", code="mutually_exclusive_parameters")
    items = parse_items(properties["input"], items_max, reader)
    tools = hosted_tools(properties.get("tools"))
    choice = chosen_hosted(properties.get("tool_choice"), tools, properties.get("tools") or ())
    properties |= {name: _DEEP[name](properties[name], reader) for name in _DEEP if name in properties}
    native, names = _native(properties)
    hosted = HostedTools(tools, choice, native, (*names, *_lacking_in_chat(items)))
    if tools:
        properties["hosted_tools"] = shown_hosted(tools)
    if strict and reader.dropped:
        raise unknown_parameter(reader.dropped[0])
    return ResponsesRequest(properties["model"], items, properties, tuple(reader.dropped), hosted, extras)


def _refuse(name: str) -> None:
    refuse_if_dangerous(name, name)
    if name in MOVED:
        problem = f"Unsupported parameter: '{name}'. In the Responses API, this parameter has moved to '{MOVED[name]}'."
        raise BadRequest(problem, param=name, code="unsupported_parameter")


def _native(body: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """(the parameters for workers of this API alone, the names of those without which a reply would be another)."""
    native = {name: body[name] for name, (fate, _, _) in FIELDS.items() if fate == "native" and name in body}
    reasoning = {"summary": body.get("reasoning", {}).get("generate_summary"), **body.get("reasoning", {})}
    names = [name for name in ("truncation", "context_management") if body.get(name) not in (None, "disabled", [])]
    if own := {name: reasoning[name] for name in ("context", "mode", "summary") if reasoning.get(name)}:
        native["reasoning"] = own
        names += [f"reasoning.{name}" for name in own]
    return native, names


def _lacking_in_chat(items: Sequence[Item]) -> list[str]:
    """The types of items that no chat message holds, and `phase` where a message has one."""
    phases = ["phase" for item in items if item["type"] == "message" and "phase" in item]
    return list(dict.fromkeys([*(str(item["type"]) for item in items if item["type"] in PASSED), *phases]))


def _text_config(raw: Any, reader: Reader) -> dict[str, Any]:
    config = reader.object(raw, "text", _TEXT)
    if "format" in config:
        config["format"] = reader.object(config["format"], "text.format", _FORMAT, ("type",))
        for name in ("name", "schema") if config["format"]["type"] == "json_schema" else ():
            if name not in config["format"]:
                raise missing_parameter(f"text.format.{name}")
    return config


def _cache_options(raw: Any, reader: Reader) -> dict[str, Any]:
    options = reader.object(raw, "prompt_cache_options", _CACHE)
    if options.pop("prewarm", False):
        spot = "prompt_cache_options.prewarm"
        problem = f"`{spot}` is not supported: Baton would answer the request and charge for it; leave it out"
        raise BadRequest(problem, param=spot, code="unsupported_parameter")
    return options


_DEEP = {
    "text": _text_config,
    "prompt_cache_options": _cache_options,
    "stream_options": lambda raw, reader: reader.object(raw, "stream_options", {"include_obfuscation": FLAG}),
    "reasoning": lambda raw, reader: reader.object(raw, "reasoning", _REASONING),
    "tools": read_tools,
}


@dataclass(frozen=True, slots=True)
class ParamNames:
    """Knows which property each message of a chat request was made from, so that an error names the client's
    property."""

    names: tuple[str, ...]  # by the index of the message

    def reword(self, error: BatonError) -> BatonError:
        """Change an error about the chat request so that it names the property of the Responses request. Returns it."""
        chat_name = error.param or ""
        message = re.match(r"messages\[(\d+)\](.*)", chat_name)
        if message is not None and int(message[1]) < len(self.names):
            name = self._path_inside(self.names[int(message[1])], message[2])
        elif chat_name == "messages":
            name = "input"
        else:
            prefix = next((prefix for prefix in NAMES if chat_name.startswith(prefix)), None)
            name = chat_name if prefix is None else NAMES[prefix] + chat_name[len(prefix) :]
        if name != chat_name:
            error.message, error.param = error.message.replace(chat_name, name), name
        return error

    def _path_inside(self, name: str, rest: str) -> str:
        """The path inside the item `name`. A content part has the same index in a message and in its item."""
        part = re.match(r"(\.content\[\d+\])(?:\.\w+(\.\w+))?", rest)
        if not name.startswith("input[") or part is None:
            return name
        return name + part[1] + (part[2] or "").replace(".url", ".image_url")


def chat_request(
    request: ResponsesRequest,
    items: Sequence[Item],
    history: Sequence[Mapping[str, Any]],
    *,
    messages_max: int,
    media_bytes_max: int = MEDIA_BYTES_MAX,
) -> tuple[ChatRequest, ParamNames]:
    """Convert a Responses request to a chat request; return it with the names of its messages' properties.

    `items` are its own items, with references resolved; `history` is the conversation that it continues, without the
    instructions of that one. Raises BadRequest, which names properties of the Responses request.
    """
    instructions = [{"role": "system", "content": request.instructions}] if request.instructions is not None else []
    new, item_indices = to_messages(items)
    if history and not new:  # an answer to the item of a hosted tool
        history = [*history[:-1], with_items(history[-1], items)]
    messages = [*instructions, *history, *new]
    text_input = "input" if isinstance(request.body["input"], str) else None
    names = ParamNames(
        ("instructions",) * len(instructions)
        + ("previous_response_id" if request.conversation is None else "conversation",) * len(history)
        + tuple(text_input or f"input[{index}]" for index in item_indices)
    )
    if not new and not history:
        raise BadRequest("`input` holds no message to answer; send one", param="input", code="empty_array")
    check_calls(messages)
    own = {name: value for name, value in request.body.items() if name != "tool_choice" or not request.hosted.choice}
    body = {**request.vendor, "model": request.model, "messages": messages, **_params(own)}
    known = tuple(request.vendor)
    try:
        chat = parse_request(body, messages_max=messages_max, media_bytes_max=media_bytes_max, vendor=known)
    except BadRequest as error:
        raise names.reword(error) from None
    types = [str(tool["type"])[:NAME_CHARS_MAX] for tool in request.hosted.tools]
    left_out, dropped = tuple(dict.fromkeys([*types, *request.hosted.items])), (*request.dropped, *chat.dropped)
    return replace(chat, dropped=dropped, hosted=request.hosted, left_out=left_out), names


def _params(body: Mapping[str, Any]) -> dict[str, Any]:
    same = (
        *("metadata", "user", "safety_identifier", "service_tier", "store", "stream", "temperature", "top_p"),
        *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"),
        *("presence_penalty", "frequency_penalty"),
    )
    params: dict[str, Any] = {name: body[name] for name in same if name in body}
    if "max_output_tokens" in body:
        params["max_completion_tokens"] = body["max_output_tokens"]
    if body.get("stream") and "stream_options" in body:
        params["stream_options"] = body["stream_options"]
    choice, tool_names = chat_tool_choice(body.get("tool_choice"), body.get("tools", ()))
    if body.get("tools"):
        params["tools"] = chat_tools(body["tools"], tool_names)
        params |= {} if choice is None else {"tool_choice": choice}
        params |= {"parallel_tool_calls": body["parallel_tool_calls"]} if "parallel_tool_calls" in body else {}
    if wants_logprobs(body):
        params |= {"logprobs": True, "top_logprobs": body.get("top_logprobs", 0)}
    return params | _text_params(body.get("text", {})) | _reasoning_params(body.get("reasoning", {}))


def wants_state(body: Mapping[str, Any]) -> bool:
    """Whether the reply is to have what its vendor needs back, as `encrypted_content` of a reasoning item."""
    return "reasoning.encrypted_content" in body.get("include", ())


def wants_logprobs(body: Mapping[str, Any]) -> bool:
    """Whether the request asks for log-probabilities of the reply's text."""
    return "message.output_text.logprobs" in body.get("include", ()) or bool(body.get("top_logprobs"))


def _text_params(config: Mapping[str, Any]) -> dict[str, Any]:
    params = {"verbosity": config["verbosity"]} if "verbosity" in config else {}
    format_ = config.get("format", {"type": "text"})
    if format_["type"] == "json_schema":
        schema = {name: value for name, value in format_.items() if name != "type"}
        return params | {"response_format": {"type": "json_schema", "json_schema": schema}}
    return params if format_["type"] == "text" else params | {"response_format": {"type": format_["type"]}}


def _reasoning_params(reasoning: Mapping[str, Any]) -> dict[str, Any]:
    return {"reasoning_effort": reasoning["effort"]} if "effort" in reasoning else {}
