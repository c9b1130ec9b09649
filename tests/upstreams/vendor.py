"""What the servers of model vendors share: a script in no vendor's terms, and the key they want."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from tests.upstreams.server import Reply, Request, Server, event_stream, json_reply


@dataclass(frozen=True)
class ToolCall:
    """A function the model calls, with its arguments as an object."""

    id: str
    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class Script:
    """What the model answers. `reason`: stop, length or tool_calls.

    `status` ≠ 200 answers an error instead; `hang_s` passes before the first byte, `gap_s` between stream events;
    `cut_after` closes the connection after so many stream events, `ends_early` ends the stream in good form there.
    """

    text: str = ""
    tool_calls: Sequence[ToolCall] = ()
    reason: str = "stop"
    prompt_tokens: int = 12
    completion_tokens: int = 7
    status: int = 200
    message: str = "no"
    headers: Mapping[str, str] = field(default_factory=dict)
    hang_s: float = 0.0
    gap_s: float = 0.0
    cut_after: int | None = None
    ends_early: int | None = None


class Vendor(Server):
    """A vendor's server. Subclasses say how a script looks on the wire."""

    key_header = "authorization"
    key_prefix = "Bearer "

    def __init__(self, key: str) -> None:
        super().__init__(self.answer)
        self.key = key
        self.script = Script()

    def whole(self, request: Request) -> Mapping[str, Any]:
        """The body of a reply that is not streamed."""
        raise AssertionError("a vendor says how")

    def events(self, request: Request) -> Iterator[bytes]:
        """The events of a streamed reply."""
        raise AssertionError("a vendor says how")

    def error(self, status: int, message: str) -> Mapping[str, Any]:
        """The body of an error."""
        raise AssertionError("a vendor says how")

    def complaint(self, request: Request) -> str | None:
        """What the vendor would refuse about this request (400), if anything."""
        return None

    def streams(self, request: Request) -> bool:
        """Whether the request asks for a stream."""
        return bool(request.body.get("stream"))

    async def answer(self, request: Request) -> Reply:
        """Answer one request by the script."""
        script = self.script
        if request.headers.get(self.key_header) != self.key_prefix + self.key:
            return json_reply(self.error(401, f"bad key {self.key}"), 401)
        if complaint := self.complaint(request):
            return json_reply(self.error(400, complaint), 400)
        await asyncio.sleep(script.hang_s)
        if script.status != 200:
            return json_reply(self.error(script.status, script.message), script.status, script.headers)
        if not self.streams(request):
            return json_reply(self.whole(request))
        last = script.ends_early if script.cut_after is None else script.cut_after
        return event_stream(islice(self.events(request), last), script.gap_s, cut=script.cut_after is not None)


def words(text: str) -> list[str]:
    """The text in the pieces it is streamed in."""
    return [word if index == 0 else f" {word}" for index, word in enumerate(text.split(" "))] if text else []
