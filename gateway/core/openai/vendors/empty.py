"""Replies that say nothing though nothing kept their worker from it: a failure that another attempt may mend. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gateway.core.money.amounts import Usage
from gateway.core.openai.finish import finish_reason
from gateway.core.openai.reply import TextChunk
from gateway.core.openai.vendors.usage import read_usage
from gateway.errors import UpstreamProtocol

_MAY_END = ("tool", "function", "assistant")  # roles after which a model may have nothing to add
_BROKEN = ("error", "abort", "aborted", "network_error", "insufficient_system_resource")  # no reason for silence
_MAY_STOP = ("stop", "logit_bias")  # properties that can end a reply before its first word


class EmptyReply(UpstreamProtocol):
    """A reply without a word, a call or a token. `usage`: what the worker reported, which is billed."""

    code = "empty_reply"
    kind = "empty"

    def __init__(self, worker: str, usage: Usage | None) -> None:
        super().__init__(f"worker {worker}'s reply is empty")
        self.usage = usage


def speaks(chunk: Mapping[str, Any]) -> bool:
    """Whether a chunk of a stream has something of a reply in it, or says why there is nothing."""
    if isinstance(chunk, TextChunk):
        return bool(chunk.choices[0].delta.content)
    return any(_says(choice, "delta") for choice in chunk.get("choices") or ())


def _says(choice: Mapping[str, Any], part: str) -> bool:
    word = choice.get("finish_reason")
    if word != "stop" and finish_reason(word) not in (None, "stop") and str(word).lower() not in _BROKEN:
        return True
    fields = choice.get(part) or {}
    return any(value for name, value in fields.items() if name != "role")


def check_whole(worker: str, reply: Mapping[str, Any], usage: Usage, request: Mapping[str, Any]) -> None:
    """Raises EmptyReply for a whole reply in which no choice says anything."""
    if not any(_says(choice, "message") for choice in reply.get("choices") or ()):
        _check(worker, usage, request)


def check_stream(worker: str, chunks: Sequence[Mapping[str, Any]], request: Mapping[str, Any]) -> None:
    """Raises EmptyReply for the chunks of a stream of which none says anything, UpstreamProtocol without any."""
    if not chunks:
        raise UpstreamProtocol(f"worker {worker}'s stream was empty")
    _check(worker, read_usage(chunks[-1]), request)


def _check(worker: str, usage: Usage | None, request: Mapping[str, Any]) -> None:
    """A worker that reports tokens has thought, and one that answers a tool's result may be done: to ask again would
    only cost."""
    messages = request.get("messages") or ()
    may_end = messages and messages[-1].get("role") in _MAY_END
    if (usage and usage.completion_tokens) or may_end or any(name in request for name in _MAY_STOP):
        return
    raise EmptyReply(worker, usage)
