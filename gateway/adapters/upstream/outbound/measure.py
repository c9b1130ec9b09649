"""The last look at a request that LiteLLM made, before it leaves: it has no more bytes than the body that was measured
allows. One that has more is not sent, and costs nothing."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from contextvars import ContextVar, Token
from typing import Any, Self

import httpx

from gateway.core.openai.tasks.fields import Sound
from gateway.errors import UpstreamRefused

BYTES_PER_REQUEST = 768  # what LiteLLM adds to any request: instructions, settings, tools that stand for a form
BYTES_PER_ITEM = 72  # what it adds to each message, part, tool and call
_ITEMS = ("messages", "tools", "functions", "content", "tool_calls")


class MoreThanMeasured(Exception):
    """A request that is larger than its body allows."""


class SendAllowance:
    """The bytes that each request of one call may have, in `with` blocks and in the tasks and threads that these start.
    `excess_bytes`: the size of a request that had more, else 0. `requests`: how many of them were let through."""

    def __init__(self, bytes_max: int) -> None:
        self.excess_bytes = self.requests = 0
        self._bytes_max = bytes_max
        self._tokens: list[Token[SendAllowance | None]] = []

    def __enter__(self) -> Self:
        self._tokens.append(_allowance.set(self))
        return self

    def __exit__(self, *_: object) -> None:
        _allowance.reset(self._tokens.pop())

    def check(self, request: httpx.Request) -> None:
        """Raises MoreThanMeasured."""
        size = int(request.headers.get("content-length") or 0)
        if size > self._bytes_max:
            self.excess_bytes = size
            raise MoreThanMeasured(f"a request of {size} bytes, {self._bytes_max} of which are paid for")
        self.requests += 1

    def refusal(self, worker: str) -> UpstreamRefused:
        """The error of a call that was not sent."""
        problem = f"LiteLLM makes {self.excess_bytes} bytes of this request for worker {worker}"
        return UpstreamRefused(f"{problem}, which is more than was held for; it was not sent", dispatched=False)


_allowance: ContextVar[SendAllowance | None] = ContextVar("allowance", default=None)


def guard(*transports: type[httpx.AsyncBaseTransport] | type[httpx.BaseTransport]) -> None:
    """Let these classes of httpx's transports send only what the allowance of a call has room for."""
    for transport in transports:
        name = "handle_async_request" if issubclass(transport, httpx.AsyncBaseTransport) else "handle_request"
        setattr(transport, name, _guarded(getattr(transport, name)))


def _guarded(send: Any) -> Any:
    @functools.wraps(send)
    def checked(self: Any, request: httpx.Request) -> Any:
        if (allowance := _allowance.get()) is not None:
            allowance.check(request)
        return send(self, request)

    return checked


def bytes_max(body: Mapping[str, Any]) -> int:
    """The most bytes that a vendor's form of a body may have: its own JSON as the widest serialiser writes it, and what
    LiteLLM adds to a request and to each of its items."""
    files = [value for value in body.values() if isinstance(value, Sound)]
    plain = {name: value for name, value in body.items() if not isinstance(value, Sound)}
    size = len(json.dumps(plain, default=str)) + sum(len(file.data) for file in files)
    return size + BYTES_PER_REQUEST + BYTES_PER_ITEM * _items(body)


def _items(holder: Mapping[str, Any]) -> int:
    lists: list[Sequence[Any]] = [value for name in _ITEMS if isinstance(value := holder.get(name), list | tuple)]
    return sum(1 + (_items(item) if isinstance(item, Mapping) else 0) for items in lists for item in items)
