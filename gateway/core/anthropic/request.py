"""Anthropic's Messages request, as far as Baton reads it: converts it to a chat request. Pure.

`FIELDS` is the complete table of a request body: which properties are known, which values are acceptable, and what
happens to each. With fate `chat`, the property is translated to a chat request. With `native`, workers that speak
Anthropic's wire get it, and the reply names it if no such worker answers. With `read`, Baton itself acts on it. With
`dropped`, it is left out and named in `x-baton-dropped-fields`, as an unknown property is: the reply does not
depend on it. With `refused`, every value but null is a 400, because it asks for something that Baton does not do.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from gateway.core.anthropic.blocks import Turn, conversation, system_turn
from gateway.core.anthropic.effort import effort_of
from gateway.core.anthropic.native import BETAS, PARAM
from gateway.core.anthropic.thinking import Display
from gateway.core.anthropic.tools import chat_choice, chat_tools, with_natives
from gateway.core.openai.chat import (
    MEDIA_BYTES_MAX,
    STOPS_MAX,
    TOKENS_MAX,
    ChatRequest,
    HostedTools,
    parse_request,
)
from gateway.core.openai.shapes import (
    FLAG,
    FREE_TEXT,
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
    refuse_inside,
    text,
    unknown_parameter,
)
from gateway.errors import BadRequest, BatonError

Fate = Literal["chat", "native", "read", "dropped", "refused"]
VERSIONS = (
    "2023-06-01",
    "2026-10-21",
)  # of the API. The newer one has no sampling parameters; Baton takes them in both
EFFORTS = ("low", "medium", "high", "xhigh", "max")
THINKING = ("adaptive", "enabled", "between_tools", "disabled")
COUNTED = ("model", "messages")  # the properties that a request to count tokens needs
REQUIRED = (*COUNTED, "max_tokens")
FIELDS: dict[str, tuple[Fate, Check, str]] = {
    # name: (fate, check, description of a valid value)
    "model": ("read", text(256), "a model name, see /v1/models"),
    "messages": ("chat", array(1, 2**31), "a list of one or more messages"),
    "system": ("chat", any_of(text(2**31), array(0, 2**31)), "a string or a list of text blocks"),
    "max_tokens": ("chat", integer(1, TOKENS_MAX), "an integer above 0"),
    "stream": ("read", *FLAG),
    "metadata": ("chat", mapping, "an object; its `user_id` is a string of at most 512 characters"),
    "stop_sequences": ("chat", array(0, STOPS_MAX, str), f"up to {STOPS_MAX} strings"),
    "temperature": ("chat", number(0, 1), "a number from 0 to 1"),
    "top_p": ("chat", number(0, 1), "a number from 0 to 1"),
    "top_k": ("chat", integer(0, TOKENS_MAX), "an integer of at least 0"),
    "service_tier": ("chat", one_of("auto", "standard_only"), "auto or standard_only"),
    "tools": ("chat", array(0, 1024, dict), "a list of tools"),
    "tool_choice": ("chat", *OBJECT),
    "thinking": ("chat", mapping, f"an object whose type is {', '.join(THINKING)}"),
    "output_config": ("chat", mapping, f"an object; its `effort` is one of {', '.join(EFFORTS)}"),
    "output_format": ("chat", *OBJECT),  # the name of `output_config.format` while it was a beta
    "cache_control": ("native", *OBJECT),
    "context_management": ("native", *OBJECT),
    "diagnostics": ("dropped", *OBJECT),
    "speed": ("dropped", one_of("standard", "fast"), "standard or fast"),
    "inference_geo": ("dropped", text(64), "a string"),
    "user_profile_id": ("dropped", text(512), "a string"),
    "workspace_id": ("dropped", text(512), "a string"),
    "container": ("refused", mapping, "left out; Baton runs no containers"),
    "mcp_servers": ("refused", mapping, "left out; Baton connects to no MCP servers for a client"),
}
BETAS_MAX = 32
_BETA = re.compile(r"[a-z0-9.-]{1,64}")
_THINKING: Properties = {
    "type": (one_of(*THINKING), ", ".join(THINKING)),
    "budget_tokens": (integer(1, TOKENS_MAX), "an integer above 0"),
    "display": (one_of("summarized", "omitted"), "summarized or omitted"),
}
_OUTPUT: Properties = {"effort": (one_of(*EFFORTS), f"one of {', '.join(EFFORTS)}"), "format": OBJECT}
_FORMAT: Properties = {"type": (one_of("json_schema"), "json_schema"), "schema": OBJECT}
NAMES = {  # chat property → property of the Messages request, for errors about the chat request
    "response_format.json_schema.schema": "output_config.format.schema",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "safety_identifier": "metadata.user_id",
    "stop": "stop_sequences",
}


@dataclass(frozen=True, slots=True)
class MessageNames:
    """Knows which property each message and tool of a chat request was made from, so that an error names the client's
    property."""

    turns: tuple[Turn, ...]
    tools: tuple[int, ...]  # by the index of the function

    def reword(self, error: BatonError) -> BatonError:
        """Change an error about the chat request so that it names the property of the Messages request. Returns it."""
        chat_name = error.param or ""
        name = self.rename(chat_name)
        if name != chat_name:
            error.message, error.param = error.message.replace(chat_name, name), name
        return error

    def rename(self, chat_name: str) -> str:
        """The path of the client's property for the path of a chat property."""
        match = re.match(r"(messages|tools)\[(\d+)\](?:\.content\[(\d+)\])?(.*)", chat_name)
        if match is None:
            prefix = next((prefix for prefix in NAMES if chat_name.startswith(prefix)), None)
            return chat_name if prefix is None else NAMES[prefix] + chat_name[len(prefix) :]
        kind, at, part, rest = match[1], int(match[2]), match[3], match[4]
        if kind == "tools":
            path = rest.replace(".function", "", 1).replace(".parameters", ".input_schema", 1)
            return f"tools[{self.tools[at]}]{path}" if at < len(self.tools) else chat_name
        if at >= len(self.turns):
            return chat_name
        turn = self.turns[at]
        if part is None or int(part) >= len(turn.parts):
            return turn.where + (".content" if rest.startswith(".tool_calls") else rest)
        return turn.parts[int(part)] + (".source" if rest.startswith((".image_url", ".file")) else rest)


@dataclass(frozen=True, slots=True)
class MessageRequest:
    """A valid request: the chat request behind it, and what its reply has to know. `thinking`: whether the reply shows
    the worker's thinking, and how."""

    chat: ChatRequest
    names: MessageNames
    thinking: Display

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop sequences of the request."""
        return tuple(self.chat.params.get("stop", ()))


def parse_message_request(
    body: object,
    *,
    messages_max: int,
    strict: bool = False,
    media_bytes_max: int = MEDIA_BYTES_MAX,
    required: Sequence[str] = REQUIRED,
    vendor: Collection[str] = (),
    betas: str = "",
) -> MessageRequest:
    """Read a decoded JSON body. Raises BadRequest, which names the field and says what a valid value is.

    `strict` refuses unknown properties instead of dropping them. `media_bytes_max` bounds one image or file. `vendor`:
    the names of parameters that are not OpenAI's and that some worker takes; without `top_k` there it is dropped.
    `betas`: the header of that name.
    """
    reader = Reader(media_bytes_max)
    properties = _checked(body, reader)
    for name in required:
        if name not in properties:
            raise missing_parameter(name)
    if len(properties["messages"]) > messages_max:
        problem = f"`messages` holds {len(properties['messages'])}; at most {messages_max} are accepted"
        raise BadRequest(problem, param="messages", code="array_above_max_length")
    turns = [*system_turn(properties.get("system", ""), reader), *conversation(properties["messages"], reader)]
    tools, tool_indices, own_tools = chat_tools(properties.get("tools", ()), reader)
    names = MessageNames(tuple(turns), tuple(tool_indices))
    thinking = reader.object(properties.get("thinking", {"type": "disabled"}), "thinking", _THINKING, ("type",))
    params = _params(properties, tools, thinking, reader)
    if "top_k" in properties and "top_k" not in vendor:
        reader.drop("top_k")
    elif "top_k" in properties:
        params["top_k"] = properties["top_k"]
    chat_body = {"model": properties["model"], "messages": [turn.message for turn in turns], **params}
    try:  # a turn may be several messages
        chat = parse_request(chat_body, messages_max=2**31, media_bytes_max=media_bytes_max, vendor=("top_k",))
    except BadRequest as error:
        raise names.reword(error) from None
    dropped = (*reader.dropped, *map(names.rename, chat.dropped))
    if strict and dropped:
        raise unknown_parameter(dropped[0])
    messages = tuple(turn.with_native(message) for turn, message in zip(turns, chat.messages, strict=True))
    own_params = _native(properties, betas)
    if tools:
        own_params["tools"] = with_natives(chat.params["tools"], properties["tools"], tool_indices)
    chat = replace(chat, dropped=dropped, messages=messages, params={**chat.params, **own_params})
    types = tuple(dict.fromkeys(str(tool["type"]) for tool in own_tools))
    return MessageRequest(replace(chat, hosted=HostedTools(own_tools), left_out=types), names, _display(thinking))


def _native(body: Mapping[str, Any], betas: str) -> dict[str, Any]:
    """What workers that speak Anthropic's wire get in its own words, as a parameter of the chat request."""
    native = {name: body[name] for name, (fate, _, _) in FIELDS.items() if fate == "native" and name in body}
    native |= {name: body[name] for name in ("thinking",) if name in body}
    if config := {name: value for name, value in (body.get("output_config") or {}).items() if name != "format"}:
        native["output_config"] = config
    names = [name for name in map(str.strip, betas.split(",")) if _BETA.fullmatch(name)]
    refuse_inside(native, "")
    native |= {BETAS: names[:BETAS_MAX]} if names else {}
    return {PARAM: native} if native else {}


def _checked(body: object, reader: Reader) -> dict[str, Any]:
    """The known properties that are not null. Raises BadRequest; names in `reader` those that are left out."""
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object", code="invalid_type")
    check_size(body, None)
    for name in body:
        refuse_if_dangerous(name, name)
    reader.dropped += sorted(name for name in body if name not in FIELDS)
    properties = {name: value for name, value in body.items() if name in FIELDS and value is not None}
    for name, value in properties.items():
        fate, check, description = FIELDS[name]
        if fate == "refused" and value != []:
            problem = f"`{name}` is not supported: it must be {description}"
            raise BadRequest(problem, param=name, code="unsupported_parameter")
        if fate == "dropped":
            reader.drop(name)
        if fate != "refused" and (code := check(value)):
            raise bad_value(name, description, code)
    return properties


def _display(thinking: Mapping[str, Any]) -> Display:
    if thinking["type"] == "disabled":
        return "hidden"
    return "omitted" if thinking.get("display") == "omitted" else "shown"


def _params(
    body: Mapping[str, Any], tools: Sequence[Mapping[str, Any]], thinking: Mapping[str, Any], reader: Reader
) -> dict[str, Any]:
    same = ("stream", "max_tokens", "temperature", "top_p")
    params: dict[str, Any] = {name: body[name] for name in same if name in body}
    if body.get("stop_sequences"):
        params["stop"] = body["stop_sequences"]
    if "service_tier" in body:
        params["service_tier"] = "auto" if body["service_tier"] == "auto" else "default"
    metadata = reader.object(body.get("metadata", {}), "metadata", {"user_id": FREE_TEXT})
    params |= {"safety_identifier": metadata["user_id"]} if metadata.get("user_id") else {}
    params |= {"tools": list(tools)} if tools else {}
    params |= chat_choice(body["tool_choice"], tools, reader) if "tool_choice" in body else {}
    return params | _output_params(body, thinking, reader)


def _output_params(body: Mapping[str, Any], thinking: Mapping[str, Any], reader: Reader) -> dict[str, Any]:
    """`reasoning_effort` and `response_format` of a chat request."""
    config = reader.object(body.get("output_config", {}), "output_config", _OUTPUT)
    params: dict[str, Any] = {}
    budget = thinking.get("budget_tokens")
    if "effort" in config and thinking["type"] != "disabled":
        params["reasoning_effort"] = config["effort"]
    elif thinking["type"] == "enabled" and budget is not None:
        params["reasoning_effort"] = effort_of(budget)
    where = "output_config.format" if "format" in config else "output_format"
    if (raw := config.get("format", body.get("output_format"))) is not None:
        format_ = reader.object(raw, where, _FORMAT, ("type", "schema"))
        schema = {"name": "output", "schema": format_["schema"], "strict": True}
        params["response_format"] = {"type": "json_schema", "json_schema": schema}
    return params
