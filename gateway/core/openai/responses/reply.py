"""Converts a chat completion to OpenAI's Response object. Pure.

The log holds the completion; Baton makes the object from it each time, for the reply and for `GET /v1/responses/{id}`.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.core.openai import marks
from gateway.core.openai.finish import INCOMPLETE
from gateway.core.openai.responses.bodies import Names
from gateway.core.openai.responses.output import Output
from gateway.core.openai.responses.request import ResponsesRequest, wants_logprobs, wants_state
from gateway.core.openai.responses.tools import tool_names
from gateway.core.openai.vendor import MESSAGE_FIELDS, REASONING, sealed

TIERS = ("auto", "default", "flex", "scale", "priority", "fast", "ultrafast")
NOT_ECHOED = ("model", "input", "instructions", "stream", "stream_options", "store")
_NAME = re.compile(r"resp_[0-9a-f]{32}")
ECHOED_AS_GIVEN = (
    *("max_output_tokens", "max_tool_calls", "previous_response_id", "prompt_cache_key", "prompt_cache_retention"),
    *("safety_identifier", "user"),
)
_SAMPLING = {"temperature": 1, "top_p": 1, "presence_penalty": 0, "frequency_penalty": 0}  # with OpenAI's defaults


@dataclass(frozen=True, slots=True)
class Head:
    """The facts of a request that its Response object repeats. `echo`: the request's properties as the client sent
    them."""

    id: str
    created_s: int
    model: str
    instructions: str | None
    echo: Mapping[str, Any]
    stored: bool

    @property
    def hex(self) -> str:
        """The id without its prefix; the ids of its items contain it."""
        return self.id.removeprefix("resp_")

    @property
    def tool_names(self) -> Names:
        """The tools as the client names them, by their names in the chat request."""
        return tool_names(self.echo.get("tools") or ())


def is_response_id(text: str) -> bool:
    """Whether the text has the form of a response id."""
    return _NAME.fullmatch(text) is not None


def to_log(request: ResponsesRequest) -> dict[str, Any]:
    """The part of a stored response's request that the log keeps in addition to the messages."""
    echo = {name: value for name, value in request.body.items() if name not in NOT_ECHOED}
    return {**echo, "instructed": request.instructions is not None}


def head_of_log(request: Mapping[str, Any], response_id: str, created_s: int) -> Head:
    """The Head of a stored response, from its logged request."""
    form, messages = request["response"], request["messages"]
    instructions = messages[0]["content"] if form["instructed"] else None
    return Head(response_id, created_s, request["model"], instructions, form, stored=True)


def conversation_of_log(request: Mapping[str, Any], reply: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    """The messages of a stored response without its instructions, followed by its reply."""
    messages = list(request["messages"][1 if request["response"]["instructed"] else 0 :])
    message = _message(reply or {})
    reasoning = REASONING if marks.FIELD in message else ()
    names = ("content", "refusal", "tool_calls", *MESSAGE_FIELDS, *reasoning, marks.FIELD)
    answer = {name: message[name] for name in names if message.get(name)}
    content = None if answer.keys() & {"refusal", "tool_calls"} else ""  # of a turn of hosted tools alone
    return [*messages, {"role": "assistant", "content": content, **answer}] if answer else messages


def response_in_progress(head: Head) -> dict[str, Any]:
    """The Response object of a request that is still being served."""
    echo = head.echo
    text, reasoning = echo.get("text") or {}, echo.get("reasoning") or {}
    return {
        "id": head.id,
        "object": "response",
        "created_at": head.created_s,
        "status": "in_progress",
        "background": bool(echo.get("background")),
        "completed_at": None,
        "error": None,
        "incomplete_details": None,
        "instructions": head.instructions,
        "model": head.model,
        "output": [],
        "parallel_tool_calls": echo.get("parallel_tool_calls", True),
        "reasoning": {
            "effort": reasoning.get("effort"),
            "summary": reasoning.get("summary") or reasoning.get("generate_summary"),
        },
        "service_tier": "auto",
        "store": head.stored,
        "text": {"format": text.get("format") or {"type": "text"}, "verbosity": text.get("verbosity") or "medium"},
        "tool_choice": echo.get("tool_choice") or "auto",
        "tools": [*map(_tool, echo.get("tools") or ()), *(echo.get("hosted_tools") or ())],
        "top_logprobs": echo.get("top_logprobs", 0),
        "truncation": echo.get("truncation") or "disabled",
        "usage": None,
        "metadata": dict(echo.get("metadata") or {}),
        **_conversation(echo.get("conversation")),
        **{name: echo.get(name) for name in ECHOED_AS_GIVEN},
        **{name: float(echo.get(name, default)) for name, default in _SAMPLING.items()},
    }


def _conversation(value: Any) -> dict[str, Any]:
    """The conversation that the response belongs to, in OpenAI's form; nothing where there is none."""
    name = value.get("id") if isinstance(value, Mapping) else value
    return {"conversation": {"id": name}} if name else {}


def finished_response(
    head: Head, completion: Mapping[str, Any], completed_s: int, output: Sequence[Mapping[str, Any]] | None = None
) -> dict[str, Any]:
    """The Response object of a successful request. `output`: its items, if they have already been streamed."""
    reason = INCOMPLETE.get(_finish(completion))
    tier = completion.get("service_tier")
    return (
        response_in_progress(head)
        | _facts(head, completion)
        | {
            "status": "incomplete" if reason else "completed",
            "completed_at": None if reason else completed_s,
            "incomplete_details": {"reason": reason} if reason else None,
            "output": list(output_items(head, completion) if output is None else output),
            "service_tier": tier if tier in TIERS else "default",
            "usage": _usage(completion.get("usage") or {}),
        }
    )


def _facts(head: Head, completion: Mapping[str, Any]) -> dict[str, Any]:
    """What the worker's own Response object says of the request. Its tools count where they have the client's names."""
    facts = marks.facts(_message(completion))
    if any(tool["type"] == "namespace" for tool in head.echo.get("tools") or ()):
        facts.pop("tools", None)
    return facts


def failed_response(head: Head, error: Mapping[str, Any], output: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """The Response object of a request that failed. `error` is the object of an error reply."""
    kind, details = error.get("type"), {"message": error.get("message") or "the response could not be made"}
    code = "server_error"
    if kind in ("rate_limit_error", "insufficient_quota"):
        code = "rate_limit_exceeded"
    elif kind == "invalid_request_error":
        code = "invalid_prompt"
    details |= {"code": code, "type": kind, "param": error.get("param")}
    return response_in_progress(head) | {"status": "failed", "error": details, "output": list(output)}


def output_items(head: Head, completion: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The generated output as items, in the order of the worker's."""
    choice = _choice(completion)
    output = new_output(head)
    for piece in (*marks.pieces(choice), *sources(completion)):
        deque(output.choice(piece), 0)
    status = "incomplete" if _finish(completion) in INCOMPLETE else "completed"
    deque(output.end(status, state_in(head, completion)), 0)
    return output.items


def new_output(head: Head) -> Output:
    """The output of a response, before its first piece."""
    logprobs, sealing = wants_logprobs(head.echo), wants_state(head.echo)
    return Output(head.hex, head.tool_names, logprobs=logprobs, sealing=sealing)


def sources(completion: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What a search vendor names beside its choices (`search_results`, else the URLs of `citations`), as a piece of a
    choice with citations of its text; none where the message has its own."""
    found = completion.get("search_results") or completion.get("citations")
    named = [one if isinstance(one, Mapping) else {"url": one} for one in found] if isinstance(found, list) else []
    cited = [{"type": "url_citation", "url_citation": one} for one in named if isinstance(one.get("url"), str)]
    return [{"delta": {"annotations": cited}}] if cited and not _message(completion).get("annotations") else []


def state_in(head: Head, completion: Mapping[str, Any]) -> str | None:
    """What the vendor of a reply needs back, as one text, where the client wants it."""
    return sealed(_message(completion)) if wants_state(head.echo) else None


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool["type"] == "namespace":
        inner = [_tool(one) for one in tool["tools"]]
        return {"type": "namespace", "name": tool["name"], "description": tool.get("description", ""), "tools": inner}
    if tool["type"] == "custom":
        return {name: tool[name] for name in ("type", "name", "description", "format") if name in tool}
    names = ("name", "description", "parameters", "strict")
    return {"type": "function", **{name: tool.get(name) for name in names}}


def _usage(chat: Mapping[str, Any]) -> dict[str, Any]:
    input_tokens, output_tokens = chat.get("prompt_tokens") or 0, chat.get("completion_tokens") or 0
    input_details, output_details = chat.get("prompt_tokens_details") or {}, chat.get("completion_tokens_details") or {}
    return {
        "input_tokens": input_tokens,
        "input_tokens_details": {
            "cached_tokens": input_details.get("cached_tokens") or 0,
            "cache_write_tokens": input_details.get("cache_write_tokens") or 0,
        },
        "output_tokens": output_tokens,
        "output_tokens_details": {"reasoning_tokens": output_details.get("reasoning_tokens") or 0},
        "total_tokens": input_tokens + output_tokens,
    }


def _choice(completion: Mapping[str, Any]) -> Mapping[str, Any]:
    choices = completion.get("choices") or [{}]
    return choices[0] if isinstance(choices[0], Mapping) else {}


def _finish(completion: Mapping[str, Any]) -> str:
    reason = _choice(completion).get("finish_reason")
    return reason if isinstance(reason, str) else ""


def _message(completion: Mapping[str, Any]) -> Mapping[str, Any]:
    message = _choice(completion).get("message")
    return message if isinstance(message, Mapping) else {}
