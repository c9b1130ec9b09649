"""What OpenAI requires of replies, written by hand from its SDKs' types, and the order of its streams.

Required keys, their types, and nothing that OpenAI does not have: a key too many breaks strict clients as surely as one
too few. Where the schema lets a key be absent but the API always sends it (`logprobs` of a chunk), it is required.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jsonschema import Draft202012Validator

Schema = Mapping[str, Any]

TEXT: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}
NULL: Schema = {"type": "null"}


def maybe(schema: Schema) -> Schema:
    """That, or null."""
    return {"anyOf": [schema, NULL]}


def const(*values: str) -> Schema:
    """One of these texts."""
    return {"enum": list(values)}


def items(schema: Schema, least: int = 0) -> Schema:
    """A list of it."""
    return {"type": "array", "items": schema, "minItems": least}


def closed(required: Mapping[str, Schema], optional: Mapping[str, Schema] | None = None) -> Schema:
    """An object with these keys and no others."""
    keys = {**required, **(optional or {})}
    return {"type": "object", "properties": keys, "required": list(required), "additionalProperties": False}


_COUNTS = {"type": "object", "additionalProperties": COUNT}
USAGE = closed(
    {"prompt_tokens": COUNT, "completion_tokens": COUNT, "total_tokens": COUNT},
    {"prompt_tokens_details": _COUNTS, "completion_tokens_details": _COUNTS},
)
_TOKEN = {
    "token": TEXT,
    "logprob": {"type": "number"},
    "bytes": maybe(items(COUNT)),
}
_LOGPROBS = maybe(
    items(closed({**_TOKEN, "top_logprobs": items(closed(_TOKEN))})),
)
LOGPROBS = maybe(closed({"content": _LOGPROBS, "refusal": _LOGPROBS}))
REASON = const("stop", "length", "tool_calls", "content_filter", "function_call")
TIER = maybe(const("auto", "default", "flex", "scale", "priority"))
FUNCTION = closed({"name": TEXT, "arguments": TEXT})
CALL = {
    "oneOf": [
        closed({"id": TEXT, "type": const("function"), "function": FUNCTION}),
        closed({"id": TEXT, "type": const("custom"), "custom": closed({"name": TEXT, "input": TEXT})}),
    ]
}
MESSAGE = closed(
    {"role": const("assistant"), "content": maybe(TEXT), "refusal": maybe(TEXT)},
    {
        "tool_calls": items(CALL, 1),
        "annotations": items({"type": "object"}),
        "audio": maybe({"type": "object"}),
        "function_call": FUNCTION,
        "reasoning_content": TEXT,  # not OpenAI's: what reasoning servers send, passed through
    },
)
_HEAD = {"id": TEXT, "created": COUNT, "model": TEXT}
_TAIL = {"service_tier": TIER, "system_fingerprint": TEXT}
CHAT_COMPLETION = closed(
    {
        **_HEAD,
        "object": const("chat.completion"),
        "choices": items(
            closed({"index": COUNT, "message": MESSAGE, "finish_reason": REASON, "logprobs": LOGPROBS}), 1
        ),
        "usage": USAGE,
    },
    _TAIL,
)
_CALL_DELTA = closed(
    {"index": COUNT},
    {"id": TEXT, "type": const("function"), "function": closed({}, {"name": TEXT, "arguments": TEXT})},
)
_DELTA = closed(
    {},
    {
        "role": const("assistant"),
        "content": maybe(TEXT),
        "refusal": maybe(TEXT),
        "tool_calls": items(_CALL_DELTA, 1),
        "reasoning_content": TEXT,
    },
)
CHAT_CHUNK = closed(
    {
        **_HEAD,
        "object": const("chat.completion.chunk"),
        "choices": items(
            closed({"index": COUNT, "delta": _DELTA, "finish_reason": maybe(REASON), "logprobs": LOGPROBS})
        ),
    },
    {**_TAIL, "usage": maybe(USAGE), "obfuscation": TEXT},
)
ERROR = closed({"error": closed({"message": TEXT, "type": TEXT, "param": maybe(TEXT), "code": maybe(TEXT)})})
_MODEL = {"id": TEXT, "object": const("model"), "created": COUNT, "owned_by": TEXT}
MODELS = closed({"object": const("list"), "data": items(closed(_MODEL), 1)})
MODEL = closed(_MODEL, {"baton": {"type": "object"}})  # ours: context, prices and abilities
EMBEDDINGS = closed(
    {
        "object": const("list"),
        "data": items(
            closed(
                {
                    "object": const("embedding"),
                    "index": COUNT,
                    "embedding": {"anyOf": [items({"type": "number"}, 1), TEXT]},
                }
            ),
            1,
        ),
        "model": TEXT,
        "usage": closed({"prompt_tokens": COUNT, "total_tokens": COUNT}),
    }
)
COMPLETION = closed(
    {
        **_HEAD,
        "object": const("text_completion"),
        "choices": items(
            closed(
                {
                    "index": COUNT,
                    "text": TEXT,
                    "logprobs": maybe({"type": "object"}),
                    "finish_reason": maybe(const("stop", "length", "content_filter")),
                }
            )
        ),
    },
    {"usage": maybe(USAGE), "system_fingerprint": TEXT},
)
_PART = {
    "oneOf": [
        closed(
            {"type": const("output_text"), "text": TEXT, "annotations": items({"type": "object"})},
            {"logprobs": items(closed({**_TOKEN, "top_logprobs": items(closed(_TOKEN))}))},
        ),
        closed({"type": const("refusal"), "refusal": TEXT}),
    ]
}
_STATUS = const("in_progress", "completed", "incomplete")
OUTPUT_ITEM = {
    "oneOf": [
        closed(
            {
                "type": const("message"),
                "id": TEXT,
                "role": const("assistant"),
                "status": _STATUS,
                "content": items(_PART),
            },
            {"phase": maybe(const("commentary", "final_answer"))},
        ),
        closed(
            {"type": const("function_call"), "call_id": TEXT, "name": TEXT, "arguments": TEXT},
            {"id": TEXT, "status": _STATUS},
        ),
        closed({"type": const("custom_tool_call"), "call_id": TEXT, "name": TEXT, "input": TEXT}, {"id": TEXT}),
        closed(
            {"type": const("reasoning"), "id": TEXT, "summary": items({"type": "object"})},
            {"content": items({"type": "object"}), "encrypted_content": maybe(TEXT), "status": _STATUS},
        ),
    ]
}
_RESPONSE_USAGE = closed(
    {
        "input_tokens": COUNT,
        "input_tokens_details": _COUNTS,
        "output_tokens": COUNT,
        "output_tokens_details": _COUNTS,
        "total_tokens": COUNT,
    }
)
_OBJECT: Schema = {"type": "object"}
_NUMBER: Schema = {"type": "number"}
RESPONSE = closed(
    {
        "id": TEXT,
        "object": const("response"),
        "created_at": {"type": "number"},
        "status": const("completed", "failed", "in_progress", "cancelled", "queued", "incomplete"),
        "error": maybe(closed({"code": TEXT, "message": TEXT})),
        "incomplete_details": maybe(closed({"reason": const("max_output_tokens", "content_filter")})),
        "instructions": {"anyOf": [TEXT, NULL, items(_OBJECT)]},
        "model": TEXT,
        "tools": items(_OBJECT),
        "output": items(OUTPUT_ITEM),
        "parallel_tool_calls": {"type": "boolean"},
        "metadata": maybe({"type": "object", "additionalProperties": TEXT}),
        "tool_choice": {"anyOf": [TEXT, _OBJECT]},
        "temperature": maybe(_NUMBER),
        "top_p": maybe(_NUMBER),
        "presence_penalty": _NUMBER,
        "frequency_penalty": _NUMBER,
    },
    {
        "usage": maybe(_RESPONSE_USAGE),
        "background": maybe({"type": "boolean"}),
        "completed_at": maybe(_NUMBER),
        "max_output_tokens": maybe(COUNT),
        "max_tool_calls": maybe(COUNT),
        "previous_response_id": maybe(TEXT),
        "prompt": maybe(_OBJECT),
        "prompt_cache_key": maybe(TEXT),
        "prompt_cache_retention": maybe(TEXT),
        "reasoning": maybe(_OBJECT),
        "safety_identifier": maybe(TEXT),
        "service_tier": TIER,
        "store": {"type": "boolean"},
        "text": _OBJECT,
        "top_logprobs": maybe(COUNT),
        "truncation": maybe(const("auto", "disabled")),
        "user": maybe(TEXT),
    },
)
_AT = {"item_id": TEXT, "output_index": COUNT}
_IN_PART = {**_AT, "content_index": COUNT}
_BARE = {"token": TEXT, "logprob": _NUMBER}  # no bytes here, unlike everywhere else
_LOGPROB_LIST = {"logprobs": items(closed({**_BARE, "top_logprobs": items(closed(_BARE))}))}
_EVENTS: Mapping[str, Mapping[str, Schema]] = {
    **{
        f"response.{name}": {"response": RESPONSE}
        for name in ("created", "queued", "in_progress", "completed", "incomplete", "failed")
    },
    "response.output_item.added": {"output_index": COUNT, "item": OUTPUT_ITEM},
    "response.output_item.done": {"output_index": COUNT, "item": OUTPUT_ITEM},
    "response.content_part.added": {**_IN_PART, "part": _PART},
    "response.content_part.done": {**_IN_PART, "part": _PART},
    "response.output_text.delta": {**_IN_PART, "delta": TEXT, **_LOGPROB_LIST},
    "response.output_text.done": {**_IN_PART, "text": TEXT, **_LOGPROB_LIST},
    "response.refusal.delta": {**_IN_PART, "delta": TEXT},
    "response.refusal.done": {**_IN_PART, "refusal": TEXT},
    "response.function_call_arguments.delta": {**_AT, "delta": TEXT},
    "response.function_call_arguments.done": {**_AT, "arguments": TEXT, "name": TEXT},
    "response.custom_tool_call_input.delta": {**_AT, "delta": TEXT},
    "response.custom_tool_call_input.done": {**_AT, "input": TEXT},
    "response.reasoning_text.delta": {**_IN_PART, "delta": TEXT},
    "response.reasoning_text.done": {**_IN_PART, "text": TEXT},
    "error": {"code": maybe(TEXT), "message": TEXT, "param": maybe(TEXT)},
}
RESPONSE_EVENTS: Mapping[str, Schema] = {
    name: closed({"type": const(name), "sequence_number": COUNT, **keys}, {"obfuscation": TEXT})
    for name, keys in _EVENTS.items()
}


def problems(schema: Schema, body: Any) -> list[str]:
    """What is wrong with `body`, each with its place; empty where nothing is."""
    found = Draft202012Validator(schema).iter_errors(body)
    return [f"{error.json_path}: {error.message[:300]}" for error in found]


def chat_stream_problems(text: str, *, usage: bool) -> list[str]:
    """What is wrong with the whole body of a chat stream that succeeded, keys and order."""
    events = [event for event in text.split("\n\n") if event and not event.startswith(":")]
    if not events or events[-1] != "data: [DONE]":
        return [f"the stream ends in {events[-1:]}, not in [DONE]"]
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-1]]
    found = [f"{number}{what}" for number, chunk in enumerate(chunks) for what in problems(CHAT_CHUNK, chunk)]
    if found:
        return found
    found += [f"`{name}` changes" for name in ("id", "created", "model") if len({c[name] for c in chunks}) != 1]
    found += _usage_problems(chunks, usage)
    for index in {choice["index"] for chunk in chunks for choice in chunk["choices"]}:
        mine = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
        found += [f"choice {index}: {what}" for what in _choice_problems(mine)]
    return found


def _usage_problems(chunks: Sequence[Mapping[str, Any]], usage: bool) -> list[str]:
    if not usage:
        said = any("usage" in chunk for chunk in chunks)
        empty = any(not chunk["choices"] for chunk in chunks)
        return ["usage that nobody asked for"] * said + ["a chunk without choices"] * empty
    last = chunks[-1]
    right = all("usage" in c and c["usage"] is None and c["choices"] for c in chunks[:-1])
    return [] if right and last["choices"] == [] and last["usage"] else ["usage is not in one last chunk of its own"]


def _choice_problems(choices: Sequence[Mapping[str, Any]]) -> list[str]:
    first, last = choices[0], choices[-1]
    found = [] if first["delta"].get("role") == "assistant" else ["the role does not come first"]
    found += [] if "refusal" in first["delta"] and "content" in first["delta"] else ["the first delta lacks its keys"]
    found += ["the role comes twice"] * any("role" in choice["delta"] for choice in choices[1:])
    found += ["finish_reason before the end"] * any(choice["finish_reason"] for choice in choices[:-1])
    return found + ([] if last["finish_reason"] and last["delta"] == {} else ["no finish of its own"])


def response_stream_problems(text: str) -> list[str]:
    """What is wrong with the whole body of a Responses stream: each event by its type, names, numbers, one ending."""
    events = [event for event in text.split("\n\n") if event and not event.startswith(":")]
    found, kinds = [], []
    for number, event in enumerate(events):
        name, _, data = event.partition("\n")
        body = json.loads(data.removeprefix("data: "))
        kinds.append(body.get("type"))
        if name != f"event: {body.get('type')}":
            found.append(f"{number}: named {name!r}, of type {body.get('type')}")
        schema = RESPONSE_EVENTS.get(str(body.get("type")))
        found += [f"{number}: unknown type {body.get('type')}"] if schema is None else problems(schema, body)
        if body.get("sequence_number") != number:
            found.append(f"{number}: numbered {body.get('sequence_number')}")
    endings = {"response.completed", "response.incomplete", "response.failed", "error"}
    if kinds[:2] != ["response.created", "response.in_progress"] or kinds[-1] not in endings:
        found.append(f"begins {kinds[:2]}, ends {kinds[-1:]}")
    return found
