"""`/v1/completions` and `/v1/embeddings`, the two APIs whose requests go to one worker unplanned. Pure.

Inside the gateway a text completion has the form of a chat reply (`as_chat`, `chunk_as_chat`), so that streams, money
and the log handle one form only; `text_completion` converts it back. The log keeps the number of embeddings, never the
vectors.
"""

from __future__ import annotations

import base64
import binascii
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from gateway.core.money.amounts import Usage
from gateway.core.openai.chat import FIELDS as CHAT_FIELDS
from gateway.core.openai.chat import TOKENS_MAX, ChatRequest, Endpoint, Fate
from gateway.core.openai.finish import finish_reason
from gateway.core.openai.shapes import (
    Check,
    any_of,
    array,
    bad_value,
    check_size,
    integer,
    missing_parameter,
    one_of,
    refuse_if_dangerous,
    text,
    unknown_parameter,
)
from gateway.errors import BadRequest, UpstreamProtocol

INPUTS_MAX = 2048
FLOAT_MAX = 3.4e38  # base64 carries each number as a 4-byte float
TOKENS_DEFAULT = 16  # of a text completion without `max_tokens`
Fields = Mapping[str, tuple[Fate, Check, str]]
_ONE_TEXT = text(2**31)


def _tokens(value: Any) -> str | None:
    """Accept one text as token ids."""
    code = array(1, 2**31, int)(value)
    return code or ("invalid_type" if any(isinstance(token, bool) or token < 0 for token in value) else None)


def _text_list(value: Any) -> str | None:
    """Accept several texts, either all strings or all token ids."""
    check = _ONE_TEXT if isinstance(value, list) and value and isinstance(value[0], str) else _tokens
    return array(1, INPUTS_MAX, (str, list))(value) or next((code for item in value if (code := check(item))), None)


_TEXTS = any_of(_ONE_TEXT, _tokens, _text_list)
_TEXTS_DESCRIPTION = f"a string, token ids, or 1 to {INPUTS_MAX} of either"
_SHARED = ("model", "user", "metadata")
_SAMPLING = ("n", "temperature", "top_p", "frequency_penalty", "presence_penalty", "seed", "stop", "logit_bias")
COMPLETION_FIELDS: Fields = {
    "prompt": ("last", _TEXTS, _TEXTS_DESCRIPTION),
    **{name: CHAT_FIELDS[name] for name in (*_SHARED, "stream", "stream_options", *_SAMPLING)},
    "max_tokens": ("last", integer(0, TOKENS_MAX), f"an integer of at least 0; {TOKENS_DEFAULT} unless given"),
    "best_of": ("last", integer(1, 20), "an integer from 1 to 20, not below `n`"),
    "echo": ("last", CHAT_FIELDS["stream"][1], "true or false"),
    "logprobs": ("last", integer(0, 5), "an integer from 0 to 5"),
    "suffix": ("last", _ONE_TEXT, "a string"),
}
EMBEDDING_FIELDS: Fields = {
    "input": ("last", _TEXTS, _TEXTS_DESCRIPTION),
    **{name: CHAT_FIELDS[name] for name in _SHARED},
    "encoding_format": ("last", one_of("float", "base64"), "float or base64"),
    "dimensions": ("last", integer(1, 65_536), "an integer from 1 to 65536"),
}


def parse_completion(body: object, *, strict: bool = False) -> ChatRequest:
    """Read a body of `/v1/completions`. Raises BadRequest, which names the field."""
    properties, dropped = read_properties(body, COMPLETION_FIELDS, ("model", "prompt"), strict)
    best_of = properties.get("best_of", properties.get("n", 1))
    if best_of < properties.get("n", 1):
        raise bad_value("best_of", "at least `n`", "invalid_value")
    if properties.get("stream") and best_of > properties.get("n", 1):
        raise bad_value("best_of", "no more than `n` in a stream", "invalid_parameter_combination")
    if "stream_options" in properties and not properties.get("stream"):
        problem = "Invalid value for 'stream_options': 'stream_options' is only allowed when 'stream' is true."
        raise BadRequest(problem, param="stream_options", code="invalid_parameter_combination")
    return _request("completions", properties, COMPLETION_FIELDS, dropped)


def parse_embedding(body: object, *, strict: bool = False) -> ChatRequest:
    """Read a body of `/v1/embeddings`. Raises BadRequest, which names the field."""
    properties, dropped = read_properties(body, EMBEDDING_FIELDS, ("model", "input"), strict)
    if "" in (properties["input"], *(properties["input"] if isinstance(properties["input"], list) else ())):
        raise bad_value("input", "without empty strings", "invalid_value")
    return _request("embeddings", properties, EMBEDDING_FIELDS, dropped)


def read_properties(
    body: object, fields: Fields, required: Sequence[str], strict: bool
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """(known properties, names of the dropped ones) of a body. Raises BadRequest, which names the field."""
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object", code="invalid_type")
    check_size(body, None)
    for name in body:
        refuse_if_dangerous(name, name)
    dropped = tuple(sorted(name for name in body if name not in fields))
    if strict and dropped:
        raise unknown_parameter(dropped[0])
    properties = {name: value for name, value in body.items() if name in fields and value is not None}
    for name, value in properties.items():
        _, check, description = fields[name]
        if code := check(value):
            raise bad_value(name, description, code)
    for name in required:
        if name not in properties:
            raise missing_parameter(name)
    return properties, dropped


def _request(
    endpoint: Endpoint, properties: Mapping[str, Any], fields: Fields, dropped: tuple[str, ...]
) -> ChatRequest:
    return ChatRequest(
        model=properties["model"],
        messages=(),
        params={name: value for name, value in properties.items() if fields[name][0] == "last"},
        stream=properties.get("stream", False),
        include_usage=(properties.get("stream_options") or {}).get("include_usage") is True,
        metadata=properties.get("metadata", {}),
        end_user=properties.get("user") or None,
        dropped=dropped,
        endpoint=endpoint,
    )


# ---------------------------------------------------------------- text completions


def as_chat(body: dict[str, Any]) -> dict[str, Any]:
    """A worker's text completion in the form of a chat completion. Raises UpstreamProtocol if it is not one."""
    return {**body, "choices": [_chat_choice(choice, "message", {"role": "assistant"}) for choice in _choices(body)]}


def chunk_as_chat(chunk: dict[str, Any]) -> dict[str, Any]:
    """A chunk of a text completion's stream in the form of a chat chunk. Raises UpstreamProtocol if it is not one."""
    if not chunk.get("choices"):
        return chunk
    return {**chunk, "choices": [_chat_choice(choice, "delta", {}) for choice in _choices(chunk)]}


def _choices(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    choices = body.get("choices")
    if not (isinstance(choices, list) and choices and all(isinstance(choice, dict) for choice in choices)):
        raise UpstreamProtocol("the worker's reply has no choices with a text")
    return choices


def _chat_choice(choice: dict[str, Any], part: str, base: Mapping[str, Any]) -> dict[str, Any]:
    content = choice.get("text")
    if not isinstance(content, str | None) or (content is None and part == "message"):
        raise UpstreamProtocol("the worker's reply has no choices with a text")
    fields = {name: value for name, value in choice.items() if name != "text"}
    if "finish_reason" in fields:
        fields["finish_reason"] = finish_reason(fields["finish_reason"])
    return {**fields, part: {**base, "content": content or ""}}


def text_completion(chat_body: Mapping[str, Any]) -> dict[str, Any]:
    """The client's reply: Baton's chat completion in the form of a text completion."""
    choices = [
        {
            "text": choice["message"].get("content") or "",
            "index": choice["index"],
            "logprobs": choice.get("logprobs"),
            "finish_reason": choice["finish_reason"],
        }
        for choice in chat_body["choices"]
    ]
    head = {name: chat_body[name] for name in ("id", "created", "model", "usage")}
    return head | {"object": "text_completion", "choices": choices}


# ---------------------------------------------------------------- embeddings


def inputs_of(value: Any) -> int:
    """The number of texts in an `input` or a `prompt`."""
    return len(value) if isinstance(value, list) and isinstance(value[0], str | list) else 1


def check_embeddings(body: dict[str, Any], request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body without `choices` if it has one embedding for each input. Raises UpstreamProtocol."""
    data, inputs = body.get("data"), inputs_of(request["input"])
    if not isinstance(data, list) or len(data) != inputs:
        raise UpstreamProtocol(f"the worker's reply does not have {inputs} embeddings")
    for item in data:
        _vector(item.get("embedding") if isinstance(item, dict) else None)
    return {name: value for name, value in body.items() if name != "choices"}  # which only other replies have


def _vector(embedding: Any) -> list[float]:
    """An embedding as numbers, from a list or from base64. Raises UpstreamProtocol."""
    if isinstance(embedding, str):
        try:
            raw = base64.b64decode(embedding, validate=True)
            embedding = list(struct.unpack(f"<{len(raw) // 4}f", raw))
        except (binascii.Error, ValueError, struct.error):
            raise UpstreamProtocol("the worker's reply holds an embedding that is not base64 of floats") from None
    valid = isinstance(embedding, list) and embedding and all(_is_number(item) for item in embedding)
    if not valid:
        raise UpstreamProtocol("the worker's reply holds an embedding that is not a list of numbers")
    return embedding  # type: ignore[no-any-return]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= FLOAT_MAX


def _encode(embedding: Any, encoding: str) -> Any:
    """The embedding in the encoding that the client asked for: some servers offer only one."""
    if encoding == "float":
        return embedding if isinstance(embedding, list) else _vector(embedding)
    if isinstance(embedding, str):
        return embedding
    return base64.b64encode(struct.pack(f"<{len(embedding)}f", *embedding)).decode()


def embedding_list(body: Mapping[str, Any], chat: ChatRequest, usage: Usage) -> dict[str, Any]:
    """The client's reply to an embeddings request."""
    encoding = chat.params.get("encoding_format", "float")
    data = [
        {"object": "embedding", "index": index, "embedding": _encode(item["embedding"], encoding)}
        for index, item in enumerate(sorted(body["data"], key=lambda item: _position(item.get("index"))))
    ]
    tokens = {"prompt_tokens": usage.prompt_tokens, "total_tokens": usage.prompt_tokens}
    return {"object": "list", "data": data, "model": chat.model, "usage": tokens}


def _position(index: Any) -> int:
    return index if isinstance(index, int) else 0


def text_chunk(
    choices: Sequence[Mapping[str, Any]], *, completion_id: str, created_s: int, model: str
) -> dict[str, Any]:
    """One chunk of a text completion's stream."""
    return {
        "id": completion_id,
        "object": "text_completion",
        "created": created_s,
        "model": model,
        "choices": [
            {
                "text": (choice.get("delta") or {}).get("content") or "",
                "index": choice.get("index", 0),
                "logprobs": choice.get("logprobs"),
                "finish_reason": choice.get("finish_reason"),
            }
            for choice in choices
        ],
    }
