"""The two older APIs that go to one worker as they are: `/v1/completions` and `/v1/embeddings`. Pure.

A text completion travels through the loop in the shape of a chat reply (`as_chat`, `chunk_as_chat`), so that streams,
money and the log need to know one shape alone; `text_completion` gives it back its own. Of embeddings the log keeps how
many there were, never the vectors.
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
from gateway.core.openai.reply import completion
from gateway.core.openai.shapes import (
    Check,
    array,
    bad,
    check_size,
    either,
    integer,
    missing,
    one_of,
    refuse_if_dangerous,
    text,
    unknown,
)
from gateway.errors import BadRequest, UpstreamProtocol

INPUTS_MAX = 2048
FLOAT_MAX = 3.4e38  # what base64 carries has four bytes a number
TOKENS_DEFAULT = 16  # of a text completion that says nothing of its length
Fields = Mapping[str, tuple[Fate, Check, str]]
_ONE_TEXT = text(2**31)


def _tokens(value: Any) -> str | None:
    """One text as token ids."""
    whole = array(1, 2**31, int)(value)
    return whole or ("invalid_type" if any(isinstance(one, bool) or one < 0 for one in value) else None)


def _many(value: Any) -> str | None:
    """Several texts, each a string or each token ids."""
    return array(1, INPUTS_MAX, (str, list))(value) or next(
        (code for one in value if (code := _ONE_TEXT(one) if isinstance(value[0], str) else _tokens(one))), None
    )


_TEXTS = either(_ONE_TEXT, _tokens, _many)
_TEXTS_GOOD = f"a string, token ids, or 1 to {INPUTS_MAX} of either"
_SHARED = ("model", "user", "metadata")
_SAMPLING = ("n", "temperature", "top_p", "frequency_penalty", "presence_penalty", "seed", "stop", "logit_bias")
COMPLETION_FIELDS: Fields = {
    "prompt": ("last", _TEXTS, _TEXTS_GOOD),
    **{name: CHAT_FIELDS[name] for name in (*_SHARED, "stream", "stream_options", *_SAMPLING)},
    "max_tokens": ("last", integer(0, TOKENS_MAX), f"an integer of at least 0; {TOKENS_DEFAULT} unless given"),
    "best_of": ("last", integer(1, 20), "an integer from 1 to 20, not below `n`"),
    "echo": ("last", CHAT_FIELDS["stream"][1], "true or false"),
    "logprobs": ("last", integer(0, 5), "an integer from 0 to 5"),
    "suffix": ("last", _ONE_TEXT, "a string"),
}
EMBEDDING_FIELDS: Fields = {
    "input": ("last", _TEXTS, _TEXTS_GOOD),
    **{name: CHAT_FIELDS[name] for name in _SHARED},
    "encoding_format": ("last", one_of("float", "base64"), "float or base64"),
    "dimensions": ("last", integer(1, 65_536), "an integer from 1 to 65536"),
}


def parse_completion(body: object, *, strict: bool = False) -> ChatRequest:
    """A body of `/v1/completions`. Raises BadRequest naming the field."""
    known, dropped = _known(body, COMPLETION_FIELDS, "prompt", strict)
    best_of = known.get("best_of", known.get("n", 1))
    if best_of < known.get("n", 1):
        raise bad("best_of", "at least `n`", "invalid_value")
    if known.get("stream") and best_of > known.get("n", 1):
        raise bad("best_of", "no more than `n` in a stream", "invalid_parameter_combination")
    if "stream_options" in known and not known.get("stream"):
        said = "Invalid value for 'stream_options': 'stream_options' is only allowed when 'stream' is true."
        raise BadRequest(said, param="stream_options", code="invalid_parameter_combination")
    return _request("completions", known, COMPLETION_FIELDS, dropped)


def parse_embedding(body: object, *, strict: bool = False) -> ChatRequest:
    """A body of `/v1/embeddings`. Raises BadRequest naming the field."""
    known, dropped = _known(body, EMBEDDING_FIELDS, "input", strict)
    if "" in (known["input"], *(known["input"] if isinstance(known["input"], list) else ())):
        raise bad("input", "without empty strings", "invalid_value")
    return _request("embeddings", known, EMBEDDING_FIELDS, dropped)


def _known(body: object, fields: Fields, needed: str, strict: bool) -> tuple[dict[str, Any], tuple[str, ...]]:
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object", code="invalid_type")
    check_size(body, None)
    for name in body:
        refuse_if_dangerous(name, name)
    dropped = tuple(sorted(name for name in body if name not in fields))
    if strict and dropped:
        raise unknown(dropped[0])
    known = {name: value for name, value in body.items() if name in fields and value is not None}
    for name, value in known.items():
        _, check, good = fields[name]
        if code := check(value):
            raise bad(name, good, code)
    for name in ("model", needed):
        if name not in known:
            raise missing(name)
    return known, dropped


def _request(endpoint: Endpoint, known: Mapping[str, Any], fields: Fields, dropped: tuple[str, ...]) -> ChatRequest:
    return ChatRequest(
        model=known["model"],
        messages=(),
        params={name: value for name, value in known.items() if fields[name][0] == "last"},
        stream=known.get("stream", False),
        include_usage=(known.get("stream_options") or {}).get("include_usage") is True,
        metadata=known.get("metadata", {}),
        end_user=known.get("user") or None,
        dropped=dropped,
        endpoint=endpoint,
    )


# ---------------------------------------------------------------- text completions


def as_chat(body: dict[str, Any]) -> dict[str, Any]:
    """A worker's text completion in the shape of a chat completion. Raises UpstreamProtocol where it is none."""
    return {**body, "choices": [_turned(choice, "message", {"role": "assistant"}) for choice in _choices(body)]}


def chunk_as_chat(chunk: dict[str, Any]) -> dict[str, Any]:
    """The same for a chunk of its stream."""
    if not chunk.get("choices"):
        return chunk
    return {**chunk, "choices": [_turned(choice, "delta", {}) for choice in _choices(chunk)]}


def _choices(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    choices = body.get("choices")
    if not (isinstance(choices, list) and choices and all(isinstance(choice, dict) for choice in choices)):
        raise UpstreamProtocol("the worker's reply has no choices with a text")
    return choices


def _turned(choice: dict[str, Any], part: str, begun: Mapping[str, Any]) -> dict[str, Any]:
    said = choice.get("text")
    if not isinstance(said, str | None) or (said is None and part == "message"):
        raise UpstreamProtocol("the worker's reply has no choices with a text")
    return {**{k: v for k, v in choice.items() if k != "text"}, part: {**begun, "content": said or ""}}


def text_completion(chat_body: Mapping[str, Any]) -> dict[str, Any]:
    """The client's reply: a chat completion of ours as a text completion."""
    choices = [
        {
            "text": choice["message"].get("content") or "",
            "index": choice["index"],
            "logprobs": choice.get("logprobs"),
            "finish_reason": choice["finish_reason"],
        }
        for choice in chat_body["choices"]
    ]
    kept = {name: chat_body[name] for name in ("id", "created", "model", "usage")}
    return kept | {"object": "text_completion", "choices": choices}


# ---------------------------------------------------------------- embeddings


def inputs_of(given: Any) -> int:
    """How many texts an `input` or a `prompt` holds."""
    return len(given) if isinstance(given, list) and isinstance(given[0], str | list) else 1


def checked_embeddings(body: dict[str, Any], request: Mapping[str, Any]) -> dict[str, Any]:
    """The body if it has one embedding for each input. Raises UpstreamProtocol."""
    data, wanted = body.get("data"), inputs_of(request["input"])
    if not isinstance(data, list) or len(data) != wanted:
        raise UpstreamProtocol(f"the worker's reply has not {wanted} embeddings")
    for item in data:
        _vector(item.get("embedding") if isinstance(item, dict) else None)
    return body


def _vector(embedding: Any) -> list[float]:
    """An embedding as numbers, whichever way it came."""
    if isinstance(embedding, str):
        try:
            raw = base64.b64decode(embedding, validate=True)
            embedding = list(struct.unpack(f"<{len(raw) // 4}f", raw))
        except (binascii.Error, ValueError, struct.error):
            raise UpstreamProtocol("the worker's reply holds an embedding that is not base64 of floats") from None
    good = isinstance(embedding, list) and embedding and all(_is_number(one) for one in embedding)
    if not good:
        raise UpstreamProtocol("the worker's reply holds an embedding that is no list of numbers")
    return embedding  # type: ignore[no-any-return]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= FLOAT_MAX


def _encoded(embedding: Any, encoding: str) -> Any:
    """In the encoding that was asked for: some servers know one alone."""
    if encoding == "float":
        return embedding if isinstance(embedding, list) else _vector(embedding)
    if isinstance(embedding, str):
        return embedding
    return base64.b64encode(struct.pack(f"<{len(embedding)}f", *embedding)).decode()


def embeddings(body: Mapping[str, Any], chat: ChatRequest, usage: Usage) -> dict[str, Any]:
    """The client's reply."""
    encoding = chat.params.get("encoding_format", "float")
    data = [
        {"object": "embedding", "index": index, "embedding": _encoded(item["embedding"], encoding)}
        for index, item in enumerate(sorted(body["data"], key=lambda item: _place(item.get("index"))))
    ]
    told = {"prompt_tokens": usage.prompt_tokens, "total_tokens": usage.prompt_tokens}
    return {"object": "list", "data": data, "model": chat.model, "usage": told}


def _place(index: Any) -> int:
    return index if isinstance(index, int) else 0


# ---------------------------------------------------------------- any reply


def reply_of(
    chat: ChatRequest, body: Mapping[str, Any], *, completion_id: str, created_s: int, usage: Usage
) -> dict[str, Any]:
    """What the client is told, in the shape of the API that it asked."""
    if chat.endpoint == "embeddings":
        return embeddings(body, chat, usage)
    said = completion(body, completion_id=completion_id, created_s=created_s, model=chat.model, usage=usage)
    return text_completion(said) if chat.endpoint == "completions" else said


def to_log(reply: dict[str, Any]) -> dict[str, Any]:
    """What the log keeps of it."""
    data = reply.get("data")
    return reply if data is None else {**reply, "data": [], "embeddings": len(data)}


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
