"""What stands beside the messages of a chat request and is more than one value: tools, formats, options. Pure.

Each reader gives the object as it may be passed on, without unknown properties, or raises BadRequest with the path.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gateway.core.openai.shapes import (
    FLAG,
    FREE_TEXT,
    OBJECT,
    Known,
    Reader,
    array,
    bad,
    either,
    mapping,
    missing,
    one_of,
    text,
    whole,
)
from gateway.core.openai.structured import check_schema

_NAME_PATTERN = r"[a-zA-Z0-9_-]+"
_NAME = text(64, _NAME_PATTERN), "1 to 64 letters, digits, _ or -"
_FUNCTION: Known = {"name": _NAME, "description": FREE_TEXT, "parameters": OBJECT, "strict": FLAG}
_CUSTOM: Known = {"name": _NAME, "description": FREE_TEXT, "format": OBJECT}
_NAMED: Known = {"name": (text(64), "a string")}
_GRAMMAR: Known = {"definition": FREE_TEXT, "syntax": (one_of("lark", "regex"), "lark or regex")}
_TOOL: Known = {
    "type": (one_of("function", "custom"), "function or custom"),
    "function": OBJECT,
    "custom": OBJECT,
}
_CHOICE: Known = {
    "type": (one_of("function", "custom", "allowed_tools"), "function, custom or allowed_tools"),
    "function": OBJECT,
    "custom": OBJECT,
    "allowed_tools": OBJECT,
}
_ALLOWED: Known = {
    "mode": (one_of("auto", "required"), "auto or required"),
    "tools": (array(1, 128, dict), "a list of 1 to 128 tools"),
}
_FORMAT: Known = {
    "type": (one_of("text", "json_object", "json_schema"), "text, json_object or json_schema"),
    "json_schema": OBJECT,
}
_SCHEMA: Known = {"name": _NAME, "description": FREE_TEXT, "schema": OBJECT, "strict": FLAG}
_STREAM: Known = {"include_usage": FLAG, "include_obfuscation": FLAG}
_PREDICTION: Known = {
    "type": (one_of("content"), "content"),
    "content": (either(text(2**31), array(1, 1024, dict)), "a string or a list of text parts"),
}
_TEXT_PART: Known = {"type": (one_of("text"), "text"), "text": FREE_TEXT}
_AUDIO: Known = {
    "format": (one_of("wav", "aac", "mp3", "flac", "opus", "pcm16"), "wav, aac, mp3, flac, opus or pcm16"),
    "voice": (either(text(128), mapping), "a voice's name, or an object with its id"),
}
_SEARCH: Known = {
    "search_context_size": (one_of("low", "medium", "high"), "low, medium or high"),
    "user_location": OBJECT,
}
_LOCATION: Known = {"type": (one_of("approximate"), "approximate"), "approximate": OBJECT}
_PLACE: Known = {name: (text(256), "a string") for name in ("city", "country", "region", "timezone")}
_CACHE: Known = {"mode": (one_of("implicit", "explicit"), "implicit or explicit"), "ttl": (one_of("30m"), "30m")}


def _tools(raw: list[Any], reader: Reader) -> list[dict[str, Any]]:
    return [_tool(tool, f"tools[{at}]", reader) for at, tool in enumerate(raw)]


def _tool(raw: Any, where: str, reader: Reader) -> dict[str, Any]:
    tool = reader.object(raw, where, _TOOL, ("type",))
    kind = tool["type"]
    if kind not in tool:
        raise missing(f"{where}.{kind}")
    known = _CUSTOM if kind == "custom" else _FUNCTION
    made = reader.object(tool[kind], f"{where}.{kind}", known, ("name",))
    if "format" in made:
        made["format"] = _custom_format(made["format"], f"{where}.custom.format", reader)
    return {"type": kind, kind: made}


def _custom_format(raw: Any, where: str, reader: Reader) -> dict[str, Any]:
    known: Known = {"type": (one_of("text", "grammar"), "text or grammar"), "grammar": OBJECT}
    made = reader.object(raw, where, known, ("type",))
    if made["type"] == "grammar":
        if "grammar" not in made:
            raise missing(f"{where}.grammar")
        spot = f"{where}.grammar"
        made["grammar"] = reader.object(made["grammar"], spot, _GRAMMAR, ("definition", "syntax"))
    return made


def _tool_choice(raw: Any, reader: Reader) -> Any:
    if isinstance(raw, str):
        return raw
    choice = reader.object(raw, "tool_choice", _CHOICE, ("type",))
    kind = choice["type"]
    if kind not in choice:
        raise missing(f"tool_choice.{kind}")
    if kind != "allowed_tools":
        return {"type": kind, kind: reader.object(choice[kind], f"tool_choice.{kind}", _NAMED, ("name",))}
    where = "tool_choice.allowed_tools"
    allowed = reader.object(choice[kind], where, _ALLOWED, ("mode", "tools"))
    allowed["tools"] = [_pointer(tool, f"{where}.tools[{at}]", reader) for at, tool in enumerate(allowed["tools"])]
    return {"type": kind, kind: allowed}


def _pointer(raw: Any, where: str, reader: Reader) -> dict[str, Any]:
    tool = reader.object(raw, where, _TOOL, ("type",))
    kind = tool["type"]
    if kind not in tool:
        raise missing(f"{where}.{kind}")
    return {"type": kind, kind: reader.object(tool[kind], f"{where}.{kind}", _NAMED, ("name",))}


def _functions(raw: list[Any], reader: Reader) -> list[dict[str, Any]]:
    known = {name: rule for name, rule in _FUNCTION.items() if name != "strict"}
    return [reader.object(function, f"functions[{at}]", known, ("name",)) for at, function in enumerate(raw)]


def _function_call(raw: Any, reader: Reader) -> Any:
    return raw if isinstance(raw, str) else reader.object(raw, "function_call", _NAMED, ("name",))


def _response_format(raw: Any, reader: Reader) -> dict[str, Any]:
    made = reader.object(raw, "response_format", _FORMAT, ("type",))
    if made["type"] != "json_schema":
        return {"type": made["type"]}
    if "json_schema" not in made:
        raise missing("response_format.json_schema")
    schema = reader.object(made["json_schema"], "response_format.json_schema", _SCHEMA, ("name",))
    if schema.get("strict"):
        if "schema" not in schema:
            raise missing("response_format.json_schema.schema")
        check_schema(schema["schema"], "response_format.json_schema.schema")
    return {"type": "json_schema", "json_schema": schema}


def _prediction(raw: Any, reader: Reader) -> dict[str, Any]:
    made = reader.object(raw, "prediction", _PREDICTION, ("type", "content"))
    if isinstance(made["content"], list):
        where = "prediction.content"
        made["content"] = [
            reader.object(part, f"{where}[{at}]", _TEXT_PART, ("type", "text"))
            for at, part in enumerate(made["content"])
        ]
    return made


def _audio(raw: Any, reader: Reader) -> dict[str, Any]:
    made = reader.object(raw, "audio", _AUDIO, ("format", "voice"))
    if isinstance(made["voice"], dict):
        made["voice"] = reader.object(made["voice"], "audio.voice", {"id": (text(256), "a string")}, ("id",))
    return made


def _web_search(raw: Any, reader: Reader) -> dict[str, Any]:
    made = reader.object(raw, "web_search_options", _SEARCH)
    if "user_location" in made:
        where = "web_search_options.user_location"
        place = reader.object(made["user_location"], where, _LOCATION, ("type", "approximate"))
        place["approximate"] = reader.object(place["approximate"], f"{where}.approximate", _PLACE)
        made["user_location"] = place
    return made


def _modalities(raw: list[Any], reader: Reader) -> list[Any]:
    for at, name in enumerate(raw):
        if name not in ("text", "audio"):
            raise bad(f"modalities[{at}]", "text or audio", "invalid_value")
    return raw


def _logit_bias(raw: Mapping[str, Any], reader: Reader) -> Mapping[str, Any]:
    for token in raw:
        if whole(token) is None:
            raise bad("logit_bias", "token ids (whole numbers, as strings) to biases", "invalid_value")
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
