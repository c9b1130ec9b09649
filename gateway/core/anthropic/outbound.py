"""Anthropic's Messages API as the wire to a worker: chat bodies become its requests. Pure.

What a chat body carries of Anthropic's own (`core/anthropic/native.py`) is sent as it is. Properties that chat does not
have stay. A property that this API cannot have is refused by name, as nothing would do what it asks.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gateway.core.anthropic.native import BETAS, BLOCK, BLOCKS, CACHE, IS_ERROR, filled
from gateway.core.anthropic.reply import input_of
from gateway.core.openai.chat import HINTS
from gateway.core.openai.options import INPUT
from gateway.core.openai.parts import TEXT_TYPES
from gateway.errors import UpstreamRefused

Block = dict[str, Any]
JSON_TOOL = "baton_json_reply"  # stands for a reply in JSON, with models that have no other way
_DROPPED = ("messages", "prompt", "stream_options", "store", "metadata", "user", "verbosity", BETAS, *HINTS)
_CHANGED = (
    *("max_tokens", "max_completion_tokens", "stop", "tools", "tool_choice", "parallel_tool_calls"),
    *("functions", "function_call", "response_format", "reasoning_effort"),
)
_IDLE: Mapping[str, tuple[Any, ...]] = {  # what this API cannot have, with the values that ask for nothing
    **dict.fromkeys(("seed", "prediction", "audio", "web_search_options", "suffix"), ()),
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "logprobs": (False, 0),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
}
_DATA = re.compile(r"data:([^;,]+)[^,]*;base64,", re.IGNORECASE)
_NO_SCHEMAS = re.compile(r"claude-(v?[0-3]|instant|(opus|sonnet)-4(-0|-20\d{6}|@|$))")  # whose replies keep to none
_HEARS_SYSTEM = re.compile(r"claude-(opus-4-8|(opus|sonnet|haiku)-[5-9]|fable|mythos)")
_UNSCHEMED = frozenset(
    (
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minLength", "maxLength"),
        *("maxItems", "uniqueItems", "minContains", "maxContains", "minProperties", "maxProperties"),
    )
)  # keywords that Anthropic refuses; Baton checks the reply by them all the same
_NAMED = ("properties", "$defs", "definitions")  # keywords whose values are schemas by name
_EMPTY: Mapping[str, Any] = {"type": "object", "properties": {}}


def to_request(chat: Mapping[str, Any]) -> Block:
    """A chat request's body, or one of text completions, as one of the Messages API. Raises UpstreamRefused, which
    names the property that the API cannot have."""
    for name, idle in _IDLE.items():
        if chat.get(name) is not None and chat[name] not in idle:
            raise _refused(name)
    messages = chat["messages"] if "messages" in chat else _of_prompt(chat.get("prompt"))
    first = next(
        (at for at, one in enumerate(messages) if one.get("role") not in ("system", "developer")), len(messages)
    )
    system = [block for message in messages[:first] for block in _blocks(message.get("content"))]
    body = {name: value for name, value in chat.items() if name not in (*_DROPPED, *_CHANGED, *_IDLE)}
    body["max_tokens"] = chat.get("max_completion_tokens") or chat.get("max_tokens")
    if "stop_sequences" not in body and (stops := [stop for stop in _stops(chat.get("stop")) if stop.strip()]):
        body["stop_sequences"] = stops
    body |= {"system": _short(system)} if system else {}
    hears_system = _HEARS_SYSTEM.match(str(chat.get("model"))) is not None
    body["messages"] = _turns(messages[first:], hears_system=hears_system)
    return body | _tools(chat, body) | ({} if body["messages"] else {"messages": [_EMPTY_TURN]})


_EMPTY_TURN: Mapping[str, Any] = {"role": "user", "content": "."}  # of a request that holds only what a system says


def _refused(name: str) -> UpstreamRefused:
    return UpstreamRefused(f"`{name}` cannot be sent to this worker", param=name, dispatched=False)


def _of_prompt(prompt: Any) -> list[Block]:
    prompt = prompt[0] if isinstance(prompt, list) and len(prompt) == 1 else prompt
    if not isinstance(prompt, str):
        raise _refused("prompt")
    return [{"role": "user", "content": prompt}]


def _stops(stop: Any) -> Sequence[str]:
    return [stop] if isinstance(stop, str) else stop or ()


# ---------------------------------------------------------------- tools and formats


def _tools(chat: Mapping[str, Any], body: Mapping[str, Any]) -> Block:
    """`tools`, `tool_choice` and `output_config`."""
    tools = [_tool(tool) for tool in chat.get("tools") or ()]
    tools += [_tool({"type": "function", "function": function}) for function in chat.get("functions") or ()]
    choice = _choice(chat.get("tool_choice", chat.get("function_call")))
    if isinstance(choice.get("names"), list):
        names = choice.pop("names")
        tools = [tool for tool in tools if tool.get("name") in names]
    if not tools and (called := list(_called(body["messages"]))):  # Anthropic wants tools beside their calls
        tools, choice = [{"name": name, "input_schema": _EMPTY} for name in called], {"type": "none"}
    schema = _schema(chat.get("response_format"))
    fields: Block = {}
    if schema is not None and _takes_schemas(chat) and schema:
        format_ = {"type": "json_schema", "schema": _plain_schema(schema)}
        fields["output_config"] = {**body.get("output_config", {}), "format": format_}
    elif schema is not None:
        free = "thinking" in body or choice.get("type") == "none"
        choice = {"type": "auto"} if free else {"type": "any"} if tools else {"type": "tool", "name": JSON_TOOL}
        what = "Call this with your whole reply; say nothing besides."
        tools = [*tools, {"name": JSON_TOOL, "description": what, "input_schema": {**_EMPTY, **schema}}]
    if tools and chat.get("parallel_tool_calls") is False and choice.get("type") != "none":
        choice = {"type": "auto", **choice, "disable_parallel_tool_use": True}
    return fields | ({"tools": tools} if tools else {}) | ({"tool_choice": choice} if tools and choice else {})


def _takes_schemas(chat: Mapping[str, Any]) -> bool:
    return _NO_SCHEMAS.match(str(chat.get("model"))) is None


def _tool(tool: Mapping[str, Any]) -> Block:
    function = tool.get("function")
    if not isinstance(function, Mapping):
        return dict(tool)  # one of Anthropic's own
    names = ("description", "strict") if function.get("strict") else ("description",)
    fields = {name: function[name] for name in names if function.get(name) is not None}
    schema = {"type": "object", **(function.get("parameters") or _EMPTY)}
    cache = {name: tool[name] for name in (CACHE,) if name in tool}
    return {"name": function["name"], **fields, "input_schema": schema, **cache, **tool.get(BLOCK, {})}


def _choice(choice: Any) -> Block:
    if isinstance(choice, str):
        return {"type": {"required": "any"}.get(choice, choice)}
    if not isinstance(choice, Mapping):
        return {}
    if choice.get("type") == "allowed_tools":
        allowed = choice["allowed_tools"]
        names = [tool[tool["type"]]["name"] for tool in allowed["tools"]]
        return {"type": "any" if allowed["mode"] == "required" else "auto", "names": names}
    inner = choice.get("function", choice)
    return {"type": "tool", "name": inner.get("name")}


def _called(turns: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    blocks = (block for turn in turns if isinstance(turn["content"], list) for block in turn["content"])
    names = (block.get("name") for block in blocks if block.get("type") == "tool_use")
    yield from dict.fromkeys(name for name in names if isinstance(name, str))


def _schema(format_: Any) -> Mapping[str, Any] | None:
    """The schema of a format; empty where it is any JSON object, None where it is text."""
    if not isinstance(format_, Mapping) or format_.get("type") not in ("json_schema", "json_object"):
        return None
    schema = (format_.get("json_schema") or {}).get("schema")
    return schema if isinstance(schema, Mapping) else {}


def _plain_schema(schema: Any) -> Any:
    """The schema without the keywords that Anthropic refuses, its objects closed, as it wants them."""
    if isinstance(schema, list):
        return [_plain_schema(one) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    plain: Block = {}
    for name, value in schema.items():
        if name in _NAMED and isinstance(value, Mapping):
            plain[name] = {key: _plain_schema(one) for key, one in value.items()}
        elif name in ("enum", "const", "default", "examples"):
            plain[name] = value
        elif name not in _UNSCHEMED and not (name == "minItems" and value not in (0, 1)):
            plain[name] = _plain_schema(value)
    if plain.get("type") == "object" or "properties" in plain:
        plain["additionalProperties"] = False
    return plain


# ---------------------------------------------------------------- turns


def _turns(messages: Sequence[Mapping[str, Any]], *, hears_system: bool) -> list[Block]:
    """The turns of a conversation, those of one role in one. What a system says between turns stays its own where the
    model takes that, which is between a user's turn and the reply to it; elsewhere the user says it."""
    turns: list[Block] = []
    for at, message in enumerate(messages):
        role, blocks = _turn(message)
        if not blocks:
            continue
        if role == "system":
            answered = at + 1 == len(messages) or messages[at + 1].get("role") == "assistant"
            heard = hears_system and answered and bool(turns) and turns[-1]["role"] != "assistant"
            role = "system" if heard else "user"
        if turns and turns[-1]["role"] == role:
            turns[-1]["content"] += blocks
        else:
            turns.append({"role": role, "content": blocks})
    if turns and turns[-1]["role"] == "assistant":
        _trim(turns[-1]["content"])
    return [{**turn, "content": _short(turn["content"])} for turn in turns]


def _short(blocks: list[Block]) -> list[Block] | str:
    """A single plain text as a string."""
    return blocks[0]["text"] if len(blocks) == 1 and blocks[0].keys() == {"type", "text"} else blocks


def _trim(blocks: list[Block]) -> None:
    """Take the white space off the end of a reply that the worker is to continue: Anthropic refuses it."""
    last = blocks[-1]
    if last.get("type") == "text":
        blocks[-1] = {**last, "text": str(last.get("text")).rstrip()}


def _turn(message: Mapping[str, Any]) -> tuple[str, list[Block]]:
    role, content = message.get("role"), message.get("content")
    if role == "assistant":
        return "assistant", list(_reply(message))
    if role in ("tool", "function"):
        call_id = message.get("tool_call_id") or _function_id(message.get("name"))
        inner = content if isinstance(content, str) else _blocks(content)
        extras = {name: message[name] for name in (CACHE, IS_ERROR) if message.get(name)}
        return "user", [{"type": "tool_result", "tool_use_id": call_id, "content": inner, **extras}]
    return ("system" if role in ("system", "developer") else "user"), _blocks(content)


def _reply(message: Mapping[str, Any]) -> Iterator[Block]:
    """The blocks of an assistant message: in the order of its layout, else thinking, text and calls."""
    thoughts = [dict(block) for block in message.get("thinking_blocks") or ()]
    calls = [_call(call.get("function") or {}, call.get("id")) for call in message.get("tool_calls") or ()]
    if isinstance(function := message.get("function_call"), Mapping):
        calls.append(_call(function, _function_id(function.get("name"))))
    if BLOCKS in message:
        yield from (block for block in filled(message[BLOCKS], thoughts, calls) if block.get("text") != "")
        return
    yield from thoughts
    yield from _blocks(message.get("content"))
    yield from _blocks(message.get("refusal"))
    yield from calls


def _call(function: Mapping[str, Any], call_id: Any) -> Block:
    value = input_of(str(function.get("arguments") or ""))
    return {"type": "tool_use", "id": call_id, "name": function.get("name"), INPUT: value}


def _function_id(name: Any) -> str:
    """The id of a call in the older form, which has none: one of a name is open at a time."""
    return "call_" + re.sub(r"[^a-zA-Z0-9_-]", "_", str(name))[:64]


def _blocks(content: Any) -> list[Block]:
    """The blocks of a content, without empty texts, which Anthropic refuses."""
    parts: Sequence[Mapping[str, Any]] = content or ()
    if isinstance(content, str):
        parts = [{"type": "text", "text": content}]
    blocks = [part[BLOCK] if BLOCK in part else _block(part) for part in parts]
    return [block for block in blocks if block and (block["type"] != "text" or str(block.get("text")).strip())]


def _block(part: Mapping[str, Any]) -> Block:
    cache = {name: part[name] for name in (CACHE,) if name in part}
    match part.get("type"):
        case "text":
            return {"type": "text", "text": part.get("text"), **cache}
        case "refusal":
            return {"type": "text", "text": part.get("refusal")}
        case "image_url":
            return {"type": "image", "source": _source(str(part["image_url"].get("url"))), **cache}
        case "file":
            file = part["file"]
            name = {"title": file["filename"]} if file.get("filename") else {}
            return {"type": "document", "source": _document(str(file.get("file_data"))), **name, **cache}
    raise _refused("messages")


def _source(link: str) -> Block:
    if head := _DATA.match(link):
        return {"type": "base64", "media_type": head[1].lower(), "data": link[head.end() :]}
    return {"type": "url", "url": link}


def _document(link: str) -> Block:
    """The source of a file: a PDF as it is, any text as text."""
    head = _DATA.match(link)
    if head is None or not head[1].lower().startswith(TEXT_TYPES):
        return _source(link)
    try:
        text = base64.b64decode(link[head.end() :]).decode("utf-8", "replace")
    except (binascii.Error, ValueError):
        raise _refused("messages") from None
    return {"type": "text", "media_type": "text/plain", "data": text}
