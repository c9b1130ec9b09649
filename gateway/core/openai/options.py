"""Reads the structured options of a chat request: tools, response format, audio, search, and the like. Pure.

Each reader returns its object without unknown properties, ready to send to a worker, or raises BadRequest with the
path of the first invalid value.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from gateway.core.openai.shapes import (
    FLAG,
    FREE_TEXT,
    OBJECT,
    Properties,
    Reader,
    any_of,
    array,
    bad_value,
    integer,
    mapping,
    missing_parameter,
    number,
    one_of,
    parse_digits,
    refuse_inside,
    text,
)
from gateway.core.openai.structured import check_schema

_NAME_PATTERN = r"[a-zA-Z0-9_-]+"
NAME_CHARS_MAX = 128  # of a tool: Anthropic's limit; a worker of another vendor is told a shorter one
TOOLS_MAX = 1024  # OpenAI takes 128; what a worker's vendor takes is asked when the worker is known
_NAME = text(NAME_CHARS_MAX, _NAME_PATTERN), f"1 to {NAME_CHARS_MAX} letters, digits, _ or -"
_FUNCTION: Properties = {"name": _NAME, "description": FREE_TEXT, "parameters": OBJECT, "strict": FLAG}
_CUSTOM: Properties = {"name": _NAME, "description": FREE_TEXT, "format": OBJECT}
_NAME_ONLY: Properties = {"name": (text(NAME_CHARS_MAX), "a string")}
_GRAMMAR: Properties = {"definition": FREE_TEXT, "syntax": (one_of("lark", "regex"), "lark or regex")}
_TOOL: Properties = {
    "type": (one_of("function", "custom"), "function or custom"),
    "function": OBJECT,
    "custom": OBJECT,
    "cache_control": OBJECT,  # not OpenAI's: Anthropic caches up to here
}
_CHOICE: Properties = {
    "type": (one_of("function", "custom", "allowed_tools"), "function, custom or allowed_tools"),
    "function": OBJECT,
    "custom": OBJECT,
    "allowed_tools": OBJECT,
}
_ALLOWED: Properties = {
    "mode": (one_of("auto", "required"), "auto or required"),
    "tools": (array(1, TOOLS_MAX, dict), f"a list of 1 to {TOOLS_MAX} tools"),
}
_FORMAT: Properties = {
    "type": (one_of("text", "json_object", "json_schema"), "text, json_object or json_schema"),
    "json_schema": OBJECT,
}
_SCHEMA: Properties = {
    "name": (text(64, _NAME_PATTERN), "1 to 64 letters, digits, _ or -"),
    "description": FREE_TEXT,
    "schema": OBJECT,
    "strict": FLAG,
}
_STREAM: Properties = {"include_usage": FLAG, "include_obfuscation": FLAG}
_PREDICTION: Properties = {
    "type": (one_of("content"), "content"),
    "content": (any_of(text(2**31), array(1, 1024, dict)), "a string or a list of text parts"),
}
_TEXT_PART: Properties = {"type": (one_of("text"), "text"), "text": FREE_TEXT}
_AUDIO: Properties = {
    "format": (one_of("wav", "aac", "mp3", "flac", "opus", "pcm16"), "wav, aac, mp3, flac, opus or pcm16"),
    "voice": (any_of(text(128), mapping), "a voice's name, or an object with its id"),
}
_SEARCH: Properties = {
    "search_context_size": (one_of("low", "medium", "high"), "low, medium or high"),
    "user_location": OBJECT,
}
_LOCATION: Properties = {"type": (one_of("approximate"), "approximate"), "approximate": OBJECT}
_PLACE: Properties = {name: (text(256), "a string") for name in ("city", "country", "region", "timezone")}
_CACHE: Properties = {"mode": (one_of("implicit", "explicit"), "implicit or explicit"), "ttl": (one_of("30m"), "30m")}


def _tools(raw: list[Any], reader: Reader) -> list[dict[str, Any]]:
    return [_tool(tool, f"tools[{at}]", reader) for at, tool in enumerate(raw)]


def _tool(raw: Any, where: str, reader: Reader) -> dict[str, Any]:
    tool = reader.object(raw, where, _TOOL, ("type",))
    kind = tool["type"]
    if kind not in tool:
        raise missing_parameter(f"{where}.{kind}")
    properties = _CUSTOM if kind == "custom" else _FUNCTION
    details = reader.object(tool[kind], f"{where}.{kind}", properties, ("name",))
    if "format" in details:
        details["format"] = _custom_format(details["format"], f"{where}.custom.format", reader)
    cache = {name: tool[name] for name in ("cache_control",) if name in tool}
    return {"type": kind, kind: details, **cache}


def _custom_format(raw: Any, where: str, reader: Reader) -> dict[str, Any]:
    properties: Properties = {"type": (one_of("text", "grammar"), "text or grammar"), "grammar": OBJECT}
    format_ = reader.object(raw, where, properties, ("type",))
    if format_["type"] == "grammar":
        if "grammar" not in format_:
            raise missing_parameter(f"{where}.grammar")
        spot = f"{where}.grammar"
        format_["grammar"] = reader.object(format_["grammar"], spot, _GRAMMAR, ("definition", "syntax"))
    return format_


def _tool_choice(raw: Any, reader: Reader) -> Any:
    if isinstance(raw, str):
        return raw
    choice = reader.object(raw, "tool_choice", _CHOICE, ("type",))
    kind = choice["type"]
    if kind not in choice:
        raise missing_parameter(f"tool_choice.{kind}")
    if kind != "allowed_tools":
        return {"type": kind, kind: reader.object(choice[kind], f"tool_choice.{kind}", _NAME_ONLY, ("name",))}
    where = "tool_choice.allowed_tools"
    allowed = reader.object(choice[kind], where, _ALLOWED, ("mode", "tools"))
    allowed["tools"] = [
        _tool_reference(tool, f"{where}.tools[{at}]", reader) for at, tool in enumerate(allowed["tools"])
    ]
    return {"type": kind, kind: allowed}


def _tool_reference(raw: Any, where: str, reader: Reader) -> dict[str, Any]:
    tool = reader.object(raw, where, _TOOL, ("type",))
    kind = tool["type"]
    if kind not in tool:
        raise missing_parameter(f"{where}.{kind}")
    return {"type": kind, kind: reader.object(tool[kind], f"{where}.{kind}", _NAME_ONLY, ("name",))}


def _functions(raw: list[Any], reader: Reader) -> list[dict[str, Any]]:
    properties = {name: value_rule for name, value_rule in _FUNCTION.items() if name != "strict"}
    return [reader.object(function, f"functions[{at}]", properties, ("name",)) for at, function in enumerate(raw)]


def _function_call(raw: Any, reader: Reader) -> Any:
    return raw if isinstance(raw, str) else reader.object(raw, "function_call", _NAME_ONLY, ("name",))


def _response_format(raw: Any, reader: Reader) -> dict[str, Any]:
    format_ = reader.object(raw, "response_format", _FORMAT, ("type",))
    if format_["type"] != "json_schema":
        return {"type": format_["type"]}
    if "json_schema" not in format_:
        raise missing_parameter("response_format.json_schema")
    schema = reader.object(format_["json_schema"], "response_format.json_schema", _SCHEMA, ("name",))
    if schema.get("strict"):
        if "schema" not in schema:
            raise missing_parameter("response_format.json_schema.schema")
        check_schema(schema["schema"], "response_format.json_schema.schema")
    return {"type": "json_schema", "json_schema": schema}


def _prediction(raw: Any, reader: Reader) -> dict[str, Any]:
    prediction = reader.object(raw, "prediction", _PREDICTION, ("type", "content"))
    if isinstance(prediction["content"], list):
        where = "prediction.content"
        prediction["content"] = [
            reader.object(part, f"{where}[{at}]", _TEXT_PART, ("type", "text"))
            for at, part in enumerate(prediction["content"])
        ]
    return prediction


def _audio(raw: Any, reader: Reader) -> dict[str, Any]:
    audio = reader.object(raw, "audio", _AUDIO, ("format", "voice"))
    if isinstance(audio["voice"], dict):
        audio["voice"] = reader.object(audio["voice"], "audio.voice", {"id": (text(256), "a string")}, ("id",))
    return audio


def _web_search(raw: Any, reader: Reader) -> dict[str, Any]:
    options = reader.object(raw, "web_search_options", _SEARCH)
    if "user_location" in options:
        where = "web_search_options.user_location"
        place = reader.object(options["user_location"], where, _LOCATION, ("type", "approximate"))
        place["approximate"] = reader.object(place["approximate"], f"{where}.approximate", _PLACE)
        options["user_location"] = place
    return options


def _modalities(raw: list[Any], reader: Reader) -> list[Any]:
    for at, name in enumerate(raw):
        if name not in ("text", "audio"):
            raise bad_value(f"modalities[{at}]", "text or audio", "invalid_value")
    return raw


def _logit_bias(raw: Mapping[str, Any], reader: Reader) -> Mapping[str, Any]:
    for token in raw:
        if parse_digits(token) is None:
            raise bad_value("logit_bias", "token ids (whole numbers, as strings) to biases", "invalid_value")
    return raw


DEEP: Mapping[str, Callable[[Any, Reader], Any]] = {
    "tools": _tools,
    "tool_choice": _tool_choice,
    "functions": _functions,
    "function_call": _function_call,
    "response_format": _response_format,
    "stream_options": lambda raw, reader: reader.object(raw, "stream_options", _STREAM),
    "prediction": _prediction,
    "audio": _audio,
    "web_search_options": _web_search,
    "prompt_cache_options": lambda raw, reader: reader.object(raw, "prompt_cache_options", _CACHE),
    "modalities": _modalities,
    "logit_bias": _logit_bias,
}


# ---------------------------------------------------------------- parameters of vendors

VENDOR_BYTES_MAX = 16_384  # of one parameter, as JSON
_TEMPLATE_ARGUMENTS = (  # of Hugging Face's `apply_chat_template`, which belong to the server
    *("chat_template", "conversation", "messages", "tools", "documents", "tokenize", "tokenizer_kwargs", "padding"),
    *("add_generation_prompt", "continue_final_message", "truncation", "max_length", "return_tensors", "return_dict"),
    "return_assistant_tokens_mask",
)
VENDOR: Properties = {
    "top_k": (integer(-1, 1_000_000), "an integer from -1"),
    "min_p": (number(0, 1), "a number from 0 to 1"),
    "top_a": (number(0, 1), "a number from 0 to 1"),
    "repetition_penalty": (number(0, 10), "a number from 0 to 10"),
    "chat_template_kwargs": (mapping, "an object of switches of the model's chat template"),
    "thinking": (mapping, 'an object such as {"type": "enabled", "budget_tokens": 2048}'),
    "reasoning": (mapping, 'an object such as {"effort": "low"}'),
    "provider": (mapping, "an object"),
}


def read_vendor_params(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of vendors in a request. Raises BadRequest with the path of the first invalid one, and for
    a name inside that could redirect a call."""
    for name, value in raw.items():
        check, description = VENDOR.get(name, (lambda value: None, ""))
        if code := check(value):
            raise bad_value(name, description, code)
        refuse_inside(value, name)
        if len(json.dumps(value)) > VENDOR_BYTES_MAX:
            raise bad_value(name, f"at most {VENDOR_BYTES_MAX} bytes of JSON", "string_above_max_length")
    for name in raw.get("chat_template_kwargs") or ():
        if name in _TEMPLATE_ARGUMENTS:
            raise bad_value(f"chat_template_kwargs.{name}", "left out: it is the server's own", "invalid_value")
    return dict(raw)


# ---------------------------------------------------------------- custom tools, for workers that know only functions

INPUT = "input"  # the one argument of a function that stands for a custom tool


def custom_names(params: Mapping[str, Any]) -> frozenset[str]:
    """The names of the custom tools among a request's tools."""
    return frozenset(tool["custom"]["name"] for tool in params.get("tools") or () if tool["type"] == "custom")


def custom_as_functions(body: Mapping[str, Any]) -> dict[str, Any]:
    """The body with custom tools, calls of them and choices among them as functions of one text."""
    changed = {**body, "messages": [_message_with_functions(message) for message in body["messages"]]}
    if "tools" in body:
        changed["tools"] = [_as_function(tool) for tool in body["tools"]]
    choice = body.get("tool_choice")
    if isinstance(choice, Mapping) and choice["type"] == "custom":
        changed["tool_choice"] = _reference(choice)
    elif isinstance(choice, Mapping) and choice["type"] == "allowed_tools":
        allowed = choice["allowed_tools"]
        changed["tool_choice"] = {
            **choice,
            "allowed_tools": {**allowed, "tools": list(map(_reference, allowed["tools"]))},
        }
    return changed


def _as_function(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    if tool["type"] != "custom":
        return tool
    custom = tool["custom"]
    grammar = (custom.get("format") or {}).get("grammar") or {}
    texts = [custom.get("description") or ""]
    if grammar.get("definition"):
        texts.append(f"The input follows this {grammar.get('syntax', 'lark')} grammar:\n{grammar['definition']}")
    text = {"type": "string", "description": "the whole input, as plain text"}
    parameters = {"type": "object", "properties": {INPUT: text}, "required": [INPUT], "additionalProperties": False}
    description = "\n\n".join(filter(None, texts))
    function = {"name": custom["name"], "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


def _reference(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"type": "function", "function": tool["custom"]} if tool["type"] == "custom" else tool


def _message_with_functions(message: Mapping[str, Any]) -> Mapping[str, Any]:
    calls = message.get("tool_calls")
    if not any(call["type"] == "custom" for call in calls or ()):
        return message
    return {**message, "tool_calls": [_call_as_function(call) for call in calls or ()]}


def _call_as_function(call: Mapping[str, Any]) -> Mapping[str, Any]:
    if call["type"] != "custom":
        return call
    arguments = json.dumps({INPUT: call["custom"]["input"]}, ensure_ascii=False)
    rest = {name: value for name, value in call.items() if name != "custom"}
    return {**rest, "type": "function", "function": {"name": call["custom"]["name"], "arguments": arguments}}


def custom_input(arguments: str) -> str | None:
    """The input of a custom tool, from the arguments of the function that stands for it; None: those are incomplete."""
    try:
        value = json.loads(arguments, strict=False)
    except (ValueError, RecursionError):
        return None
    text_input = value.get(INPUT) if isinstance(value, dict) else None
    return text_input if isinstance(text_input, str) else arguments
