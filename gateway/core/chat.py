"""OpenAI's chat-completions request, as far as Baton reads it. Pure.

`FIELDS` is the whole story of a request body: which properties are known, what makes a value acceptable, and what
becomes of it. `read` Baton acts on it itself; `last` it goes to the worker whose reply the client gets; `refused` it
could redirect or unlock something and is always a 400. Anything else is dropped and counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from gateway.errors import BadRequest

Fate = Literal["read", "last"]
Check = Callable[[Any], bool]
ROLES = ("developer", "system", "user", "assistant", "tool", "function")
PARTS = ("text", "refusal", "image_url", "input_audio", "file")


def _number(low: float, high: float) -> Check:
    return lambda v: isinstance(v, int | float) and not isinstance(v, bool) and low <= v <= high


def _integer(low: int, high: int) -> Check:
    return lambda v: isinstance(v, int) and not isinstance(v, bool) and low <= v <= high


def _text(chars_max: int) -> Check:
    return lambda v: isinstance(v, str) and len(v) <= chars_max


def _one_of(*names: str) -> Check:
    return lambda v: v in names if isinstance(v, str) else False


def _list(length_max: int, kind: type) -> Check:
    return lambda v: isinstance(v, list) and len(v) <= length_max and all(isinstance(item, kind) for item in v)


def _object(v: Any) -> bool:
    return isinstance(v, dict)


def _bool(v: Any) -> bool:
    return isinstance(v, bool)


def _stop(v: Any) -> bool:
    return isinstance(v, str) or (_list(4, str)(v) and len(v) >= 1)


def _tool_choice(v: Any) -> bool:
    return _object(v) or _one_of("none", "auto", "required")(v)


def _logit_bias(v: Any) -> bool:
    return _object(v) and len(v) <= 4096 and all(_number(-100, 100)(bias) for bias in v.values())


def _metadata(v: Any) -> bool:
    return (
        _object(v)
        and len(v) <= 16
        and all(isinstance(k, str) and len(k) <= 64 and isinstance(t, str) and len(t) <= 512 for k, t in v.items())
    )


def _response_format(v: Any) -> bool:
    return _object(v) and v.get("type") in ("text", "json_object", "json_schema")


TOKENS_MAX = 10_000_000

FIELDS: dict[str, tuple[Fate, Check, str]] = {
    # name: (fate, check, what a good value is)
    "model": ("read", _text(256), "a model name, see /v1/models"),
    "messages": ("read", lambda v: isinstance(v, list), "a list of messages"),
    "stream": ("read", _bool, "true or false"),
    "stream_options": ("read", _object, "an object"),
    "metadata": ("read", _metadata, "up to 16 pairs of strings (64 / 512 characters)"),
    "user": ("read", _text(512), "a string"),
    "safety_identifier": ("read", _text(512), "a string"),
    "store": ("read", _bool, "true or false"),
    "service_tier": ("read", _text(64), "a string"),
    "prompt_cache_key": ("read", _text(512), "a string"),
    "prompt_cache_retention": ("read", _text(64), "a string"),
    "n": ("last", _integer(1, 128), "an integer from 1 to 128"),
    "max_tokens": ("last", _integer(1, TOKENS_MAX), "an integer above 0"),
    "max_completion_tokens": ("last", _integer(1, TOKENS_MAX), "an integer above 0"),
    "temperature": ("last", _number(0, 2), "a number from 0 to 2"),
    "top_p": ("last", _number(0, 1), "a number from 0 to 1"),
    "frequency_penalty": ("last", _number(-2, 2), "a number from -2 to 2"),
    "presence_penalty": ("last", _number(-2, 2), "a number from -2 to 2"),
    "seed": ("last", _integer(-(2**63), 2**63 - 1), "an integer"),
    "stop": ("last", _stop, "a string, or up to 4 of them"),
    "logprobs": ("last", _bool, "true or false"),
    "top_logprobs": ("last", _integer(0, 20), "an integer from 0 to 20"),
    "logit_bias": ("last", _logit_bias, "token ids to numbers from -100 to 100"),
    "response_format": ("last", _response_format, "an object whose type is text, json_object or json_schema"),
    "tools": ("last", _list(128, dict), "up to 128 tools"),
    "tool_choice": ("last", _tool_choice, "none, auto, required or an object"),
    "parallel_tool_calls": ("last", _bool, "true or false"),
    "functions": ("last", _list(128, dict), "up to 128 functions"),
    "function_call": ("last", lambda v: isinstance(v, str | dict), "a string or an object"),
    "reasoning_effort": (
        "last",
        _one_of("none", "minimal", "low", "medium", "high", "xhigh"),
        "none, minimal, low, medium, high or xhigh",
    ),
    "verbosity": ("last", _one_of("low", "medium", "high"), "low, medium or high"),
    "prediction": ("last", _object, "an object"),
    "modalities": ("last", _list(4, str), 'a list such as ["text"]'),
    "audio": ("last", _object, "an object"),
    "web_search_options": ("last", _object, "an object"),
}

REFUSED = frozenset(
    {
        "api_base", "api_key", "api_version", "azure_endpoint", "base_url", "custom_llm_provider", "extra_body",
        "extra_headers", "extra_query", "fallbacks", "litellm_params", "mock_response", "num_retries", "organization",
        "request_timeout", "timeout", "user_config",
    }
)  # fmt: skip
REFUSED_PREFIXES = ("aws_", "vertex_", "azure_")


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A request that may be served. `params` is what the last step's worker gets beside the messages."""

    model: str
    messages: tuple[Mapping[str, Any], ...]
    params: Mapping[str, Any]
    stream: bool = False
    include_usage: bool = False
    metadata: Mapping[str, str] = field(default_factory=dict)
    end_user: str | None = None
    dropped: tuple[str, ...] = ()  # unknown properties that were left out

    @property
    def output_tokens(self) -> int | None:
        """The client's own bound on completion tokens, if any."""
        bound: int | None = self.params.get("max_completion_tokens", self.params.get("max_tokens"))
        return bound

    @property
    def choices(self) -> int:
        """`n`."""
        return int(self.params.get("n", 1))


def parse_request(body: object, *, messages_max: int, strict: bool = False) -> ChatRequest:
    """A decoded JSON body → ChatRequest. Raises BadRequest naming the field, and what a good value is."""
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object", code="invalid_type")
    for name in body:
        if name in REFUSED or name.startswith(REFUSED_PREFIXES):
            raise BadRequest(f"`{name}` is not accepted from clients; leave it out", param=name, code="refused_field")
    dropped = tuple(sorted(name for name in body if name not in FIELDS))
    if strict and dropped:
        raise BadRequest(f"Unknown parameter: '{dropped[0]}'.", param=dropped[0], code="unknown_parameter")
    known = {name: value for name, value in body.items() if name in FIELDS and value is not None}
    for name, value in known.items():
        _, check, good = FIELDS[name]
        if not check(value):
            raise BadRequest(f"`{name}` must be {good}", param=name, code="invalid_type")
    for name in ("model", "messages"):
        if name not in known:
            raise BadRequest(f"Missing required parameter: '{name}'.", param=name, code="missing_required_parameter")
    options = known.get("stream_options", {})
    return ChatRequest(
        model=known["model"],
        messages=_messages(known["messages"], messages_max),
        params={name: value for name, value in known.items() if FIELDS[name][0] == "last"},
        stream=known.get("stream", False),
        include_usage=options.get("include_usage") is True,
        metadata=known.get("metadata", {}),
        end_user=known.get("safety_identifier") or known.get("user") or None,
        dropped=dropped,
    )


def _messages(raw: Sequence[Any], messages_max: int) -> tuple[Mapping[str, Any], ...]:
    if not raw:
        raise BadRequest("[] is too short - 'messages'", param="messages", code="empty_array")
    if len(raw) > messages_max:
        raise BadRequest(f"`messages` holds {len(raw)}; at most {messages_max} are accepted", param="messages")
    for index, message in enumerate(raw):
        _message(message, f"messages[{index}]")
    return tuple(raw)


def _message(message: Any, where: str) -> None:
    if not isinstance(message, dict):
        raise BadRequest(f"`{where}` must be an object", param=where, code="invalid_type")
    role = message.get("role")
    if role not in ROLES:
        raise BadRequest(
            f"`{where}.role` must be one of {', '.join(ROLES)}", param=f"{where}.role", code="invalid_value"
        )
    content = message.get("content")
    if content is None:
        if role == "assistant":
            return
        raise BadRequest(f"`{where}.content` is missing", param=f"{where}.content", code="missing_required_parameter")
    if isinstance(content, str):
        return
    if not isinstance(content, list) or not all(isinstance(p, dict) and p.get("type") in PARTS for p in content):
        good = f"a string, or a list of parts of type {', '.join(PARTS)}"
        raise BadRequest(f"`{where}.content` must be {good}", param=f"{where}.content", code="invalid_type")
    for index, part in enumerate(content):
        if part["type"] == "text" and not isinstance(part.get("text"), str):
            spot = f"{where}.content[{index}].text"
            raise BadRequest(f"`{spot}` must be a string", param=spot, code="invalid_type")
