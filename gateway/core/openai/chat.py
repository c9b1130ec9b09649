"""OpenAI's chat-completions request, as far as Baton reads it. Pure.

`FIELDS` is the complete table of a request body: which properties are known, which values are acceptable, and what
happens to each. With fate `read`, Baton itself acts on the property. With `last`, it goes to the worker whose reply the
client gets. With `refused`, the reply is a 400, because nothing here can do what the property asks.
`core/openai/shapes.py` lists the properties that could redirect a call or unlock something: they are a 400 at any
depth. Every other property is dropped and counted.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from gateway.core.openai.marks import HOSTED
from gateway.core.openai.messages import PARTS as PARTS
from gateway.core.openai.messages import ROLES as ROLES
from gateway.core.openai.messages import read_messages
from gateway.core.openai.options import DEEP, TOOLS_MAX, read_vendor_params
from gateway.core.openai.parts import media_kinds
from gateway.core.openai.reply import TIERS
from gateway.core.openai.shapes import (
    FLAG,
    OBJECT,
    Check,
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
    string_pairs,
    text,
    unknown_parameter,
)
from gateway.errors import BadRequest

Fate = Literal["read", "last", "refused"]
Endpoint = Literal[
    "chat", "completions", "embeddings", "moderations", "rerank", "images", "speech", "transcriptions", "translations"
]  # fmt: skip
TOKENS_MAX = 10_000_000
STOPS_MAX = 1024  # OpenAI takes 4 of them
MEDIA_BYTES_MAX = 8 << 20
HINTS = ("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention")  # a worker may ignore these


def _logit_bias(v: Any) -> str | None:
    if code := mapping(v):
        return code
    if len(v) > 4096:
        return "object_above_max_properties"
    return next((code for code in map(number(-100, 100), v.values()) if code), None)


FIELDS: dict[str, tuple[Fate, Check, str]] = {
    # name: (fate, check, description of a valid value)
    "model": ("read", text(256), "a model name, see /v1/models"),
    "messages": ("read", array(0, 2**31), "a list of messages"),
    "stream": ("read", *FLAG),
    "stream_options": ("read", *OBJECT),
    "metadata": ("read", string_pairs, "up to 16 pairs of strings (64 / 512 characters)"),
    "user": ("read", text(512), "a string"),
    "safety_identifier": ("read", text(512), "a string"),
    "store": ("read", *FLAG),
    "service_tier": ("read", one_of(*TIERS), ", ".join(TIERS[:-1]) + f" or {TIERS[-1]}"),
    "moderation": ("refused", mapping, "left out"),
    "prompt_cache_key": ("last", text(512), "a string"),
    "prompt_cache_options": ("last", *OBJECT),
    "prompt_cache_retention": ("last", one_of("in_memory", "24h"), "in_memory or 24h"),
    "n": ("last", integer(1, 128), "an integer from 1 to 128"),
    "max_tokens": ("last", integer(1, TOKENS_MAX), "an integer above 0"),
    "max_completion_tokens": ("last", integer(1, TOKENS_MAX), "an integer above 0"),
    "temperature": ("last", number(0, 2), "a number from 0 to 2"),
    "top_p": ("last", number(0, 1), "a number from 0 to 1"),
    "frequency_penalty": ("last", number(-2, 2), "a number from -2 to 2"),
    "presence_penalty": ("last", number(-2, 2), "a number from -2 to 2"),
    "seed": ("last", integer(-(2**63), 2**63 - 1), "an integer"),
    "stop": ("last", any_of(text(10_000), array(1, STOPS_MAX, str)), f"a string, or up to {STOPS_MAX} of them"),
    "logprobs": ("last", *FLAG),
    "top_logprobs": ("last", integer(0, 20), "an integer from 0 to 20"),
    "logit_bias": ("last", _logit_bias, "token ids to numbers from -100 to 100"),
    "response_format": ("last", mapping, "an object whose type is text, json_object or json_schema"),
    "tools": ("last", array(1, TOOLS_MAX, dict), f"1 to {TOOLS_MAX} tools"),
    "tool_choice": ("last", any_of(one_of("none", "auto", "required"), mapping), "none, auto, required or an object"),
    "parallel_tool_calls": ("last", *FLAG),
    "functions": ("last", array(1, TOOLS_MAX, dict), f"1 to {TOOLS_MAX} functions"),
    "function_call": ("last", any_of(one_of("none", "auto"), mapping), "none, auto or an object with a name"),
    "reasoning_effort": (
        "last",
        one_of("none", "minimal", "low", "medium", "high", "xhigh", "max"),
        "none, minimal, low, medium, high, xhigh or max",
    ),
    "verbosity": ("last", one_of("low", "medium", "high"), "low, medium or high"),
    "prediction": ("last", *OBJECT),
    "modalities": ("last", array(1, 2, str), 'a list such as ["text"]'),
    "audio": ("last", *OBJECT),
    "web_search_options": ("last", *OBJECT),
}


@dataclass(frozen=True, slots=True)
class HostedTools:
    """What a Responses request has that chat requests lack: tools that a worker's server runs, and the choice among
    them; parameters (`native`) of that API alone; the names of those, and of the types of such items (`items`)."""

    tools: tuple[Mapping[str, Any], ...] = ()
    choice: Mapping[str, Any] | str | None = None
    native: Mapping[str, Any] = field(default_factory=dict)
    items: tuple[str, ...] = ()

    def for_worker(self, types: Collection[str], items: Collection[str] | None) -> tuple[dict[str, Any], list[str]]:
        """(the part of the body for a worker whose server runs these types, the names of what it cannot get).
        `items`: the types of items that it takes; None where it is not asked by the Responses API."""
        tools = [tool for tool in self.tools if tool["type"] in types]
        lacking = [tool["type"] for tool in self.tools if tool["type"] not in types]
        lacking += [name for name in self.items if items is None or (name in HOSTED and name not in items)]
        sent: dict[str, Any] = {} if items is None else dict(self.native)
        if tools:
            sent["tools"] = tools
        if self.choice is not None:
            kind = self.choice["type"] if isinstance(self.choice, Mapping) else None
            if kind in types or (kind is None and tools):
                sent["tool_choice"] = self.choice
            else:
                lacking.append("tool_choice")
        return sent, list(dict.fromkeys(lacking))


NOTHING_HOSTED = HostedTools()


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A valid request. `params` go to the last step's worker together with the messages."""

    model: str
    messages: tuple[Mapping[str, Any], ...]
    params: Mapping[str, Any]
    stream: bool = False
    include_usage: bool = False
    obfuscate: bool = False
    metadata: Mapping[str, str] = field(default_factory=dict)
    end_user: str | None = None
    store: bool | None = None  # None: the client did not say
    dropped: tuple[str, ...] = ()  # paths of the unknown properties that were removed
    hosted: HostedTools = NOTHING_HOSTED
    left_out: tuple[str, ...] = ()  # names of what no worker gets of them
    endpoint: Endpoint = "chat"  # requests of the others (core/openai/texts.py) have no messages and go to one worker
    media: frozenset[str] = field(init=False, compare=False, repr=False)  # the kinds that the messages hold

    def __post_init__(self) -> None:
        object.__setattr__(self, "media", media_kinds(self.messages))

    @property
    def output_tokens(self) -> int | None:
        """The client's own limit on completion tokens, or None."""
        bound: int | None = self.params.get("max_completion_tokens", self.params.get("max_tokens"))
        return bound

    @property
    def choices(self) -> int:
        """The number of replies that a worker generates: the larger of `n` and `best_of`, for each prompt."""
        return choices_in(self.params)

    @property
    def needs(self) -> frozenset[str]:
        """The capabilities that a worker needs to serve this request, named as in a pool file's `cannot`."""
        if self.endpoint != "chat":
            return frozenset(self.params.keys() - {"max_tokens"})
        adaptable = ("n", "max_tokens", "max_completion_tokens", "service_tier", *HINTS)
        return self.media | (self.params.keys() - set(adaptable))

    @property
    def has_media(self) -> bool:
        """Whether sound, images or files are in the request, or wanted of the reply."""
        return "modalities" in self.params or bool(self.media)

    @property
    def needs_model(self) -> frozenset[str]:
        """The properties that only a model's reply can satisfy, and no tool worker's."""
        if self.endpoint != "chat":
            return frozenset()
        unused = {"tools"} if self.params.get("tool_choice") == "none" else set()
        unused |= {"functions"} if self.params.get("function_call") == "none" else set()
        names = {name for name, idle in _MODELS_ONLY.items() if name in self.params and self.params[name] not in idle}
        return frozenset(names - unused)


# What a program's text cannot have, with the values that ask for nothing.
_MODELS_ONLY: Mapping[str, tuple[Any, ...]] = {
    "tools": (),
    "tool_choice": ("none", "auto"),
    "functions": (),
    "function_call": ("none", "auto"),
    "n": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "stop": ([],),
    "audio": (),
    "modalities": (["text"],),
    "web_search_options": (),
}


def choices_in(body: Mapping[str, Any]) -> int:
    """The total number of replies that a body asks of a worker."""
    prompt, n, best_of = body.get("prompt"), body.get("n"), body.get("best_of")
    if prompt is None and n is None and best_of is None:
        return 1
    prompts = len(prompt) if isinstance(prompt, list) and isinstance(prompt[0], str | list) else 1
    return max(int(n or 1), int(best_of or 1)) * prompts


def parse_request(
    body: object,
    *,
    messages_max: int,
    strict: bool = False,
    media_bytes_max: int = MEDIA_BYTES_MAX,
    vendor: Collection[str] = (),
) -> ChatRequest:
    """Read a decoded JSON body. Raises BadRequest, which names the field and says what a valid value is.

    `strict` refuses unknown properties instead of dropping them. `media_bytes_max` bounds one image, sound or file.
    `vendor`: the names of parameters that are not OpenAI's and that some worker takes.
    """
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object", code="invalid_type")
    check_size(body, None)
    for name in body:
        refuse_if_dangerous(name, name)
    unknown = [name for name in body if name not in FIELDS]
    reader = Reader(media_bytes_max, sorted(name for name in unknown if name not in vendor))
    extras = {name: body[name] for name in unknown if name in vendor and body[name] is not None}
    properties = {name: value for name, value in body.items() if name in FIELDS and value is not None}
    _check_values(properties)
    for name in ("model", "messages"):
        if name not in properties:
            raise missing_parameter(name)
    messages = read_messages(properties["messages"], messages_max, reader)
    properties |= {name: DEEP[name](properties[name], reader) for name in DEEP if name in properties}
    for error in _conflicts(properties):
        raise error
    if strict and reader.dropped:
        raise unknown_parameter(reader.dropped[0])
    options = properties.get("stream_options", {})
    return ChatRequest(
        model=properties["model"],
        messages=messages,
        params={name: value for name, value in properties.items() if FIELDS[name][0] == "last"}
        | _bought_tier(properties)
        | read_vendor_params(extras),
        stream=properties.get("stream", False),
        include_usage=options.get("include_usage") is True,
        obfuscate=options.get("include_obfuscation") is True,
        metadata=properties.get("metadata", {}),
        end_user=properties.get("safety_identifier") or properties.get("user") or None,
        store=properties.get("store"),
        dropped=tuple(reader.dropped),
    )


def _bought_tier(properties: Mapping[str, Any]) -> dict[str, Any]:
    """The `service_tier` that a request pays for, or saves by. Only workers whose entry takes it get it."""
    tier = properties.get("service_tier")
    return {} if tier in (None, "auto", "default") else {"service_tier": tier}


def _check_values(properties: Mapping[str, Any]) -> None:
    for name, value in properties.items():
        fate, check, description = FIELDS[name]
        if fate == "refused":
            raise BadRequest(f"`{name}` is not supported here", param=name, code="unsupported_parameter")
        if code := check(value):
            raise bad_value(name, description, code)


def _conflicts(properties: Mapping[str, Any]) -> Iterator[BadRequest]:
    """Yield an error for each property that lacks another one, or that another one excludes."""
    for name, condition, holds in _NEEDS:
        if name in properties and not holds(properties):
            problem = f"Invalid value for '{name}': '{name}' is only allowed when {condition}."
            yield BadRequest(problem, param=name, code="invalid_parameter_combination")
    for name, other in (("max_tokens", "max_completion_tokens"), ("functions", "tools")):
        if name in properties and other in properties:
            problem = f"Setting '{name}' and '{other}' at the same time is not supported."
            yield BadRequest(problem, param=name, code="invalid_parameter_combination")
    if "audio" in properties.get("modalities", ()) and "audio" not in properties:
        yield missing_parameter("audio")
    for where, kind, name in _tool_names(properties):
        if name not in {tool[kind]["name"] for tool in properties.get("tools", ()) if tool["type"] == kind}:
            yield BadRequest(f"`{where}` names `{name}`, which is not in 'tools'", param=where, code="invalid_value")
    call = properties.get("function_call")
    if isinstance(call, dict) and call["name"] not in {function["name"] for function in properties["functions"]}:
        problem = f"`function_call` names `{call['name']}`, which is not in 'functions'"
        yield BadRequest(problem, param="function_call", code="invalid_value")


_NEEDS: tuple[tuple[str, str, Any], ...] = (
    ("stream_options", "'stream' is true", lambda properties: properties.get("stream") is True),
    ("top_logprobs", "'logprobs' is true", lambda properties: properties.get("logprobs") is True),
    ("tool_choice", "'tools' are specified", lambda properties: "tools" in properties),
    ("parallel_tool_calls", "'tools' are specified", lambda properties: "tools" in properties),
    ("function_call", "'functions' are specified", lambda properties: "functions" in properties),
)


def _tool_names(properties: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield (path, kind, name) of every tool that `tool_choice` names."""
    choice = properties.get("tool_choice")
    if not isinstance(choice, dict):
        return
    if choice["type"] != "allowed_tools":
        yield "tool_choice", choice["type"], choice[choice["type"]]["name"]
        return
    for at, tool in enumerate(choice["allowed_tools"]["tools"]):
        yield f"tool_choice.allowed_tools.tools[{at}]", tool["type"], tool[tool["type"]]["name"]
