"""What the vendors' local servers share: a script, real HTTP on a free loopback port, and what was seen."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


@dataclass(frozen=True)
class ToolCall:
    """A function the model calls, with its arguments as an object."""

    id: str
    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class Script:
    """What the model answers, in no vendor's terms. `reason`: stop, length or tool_calls.

    `status` ≠ 200 answers an error instead; `hang_s` waits before the first byte, `gap_s` between stream events;
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


@dataclass(frozen=True)
class Seen:
    """One request as it arrived."""

    path: str
    headers: Mapping[str, str]
    body: Mapping[str, Any]


class Upstream:
    """A vendor's server. Subclasses say how a script looks on the wire."""

    key_header = "authorization"
    key_prefix = "Bearer "

    def __init__(self, key: str) -> None:
        self.key = key
        self.script = Script()
        self.seen: list[Seen] = []
        self.disconnected = asyncio.Event()
        self.url = ""

    def whole(self, seen: Seen) -> Mapping[str, Any]:
        """The body of a reply that is not streamed."""
        raise AssertionError("a vendor says how")

    def events(self, seen: Seen) -> Iterator[bytes]:
        """The events of a streamed reply, framed for the wire."""
        raise AssertionError("a vendor says how")

    def error(self, status: int, message: str) -> Mapping[str, Any]:
        """The body of an error."""
        raise AssertionError("a vendor says how")

    def complaint(self, seen: Seen) -> str | None:
        """What the vendor would refuse about this request (400), if anything."""
        return None

    def streams(self, seen: Seen) -> bool:
        """Whether the request asks for a stream."""
        return bool(seen.body.get("stream"))

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer one request by the script."""
        seen = Seen(str(request.rel_url), {k.lower(): v for k, v in request.headers.items()}, await request.json())
        self.seen.append(seen)
        try:
            return await self._answer(request, seen)
        except (asyncio.CancelledError, ConnectionError):
            self.disconnected.set()
            raise

    async def _answer(self, request: web.Request, seen: Seen) -> web.StreamResponse:
        script = self.script
        if seen.headers.get(self.key_header) != self.key_prefix + self.key:
            return web.json_response(self.error(401, f"bad key {self.key}"), status=401)
        if complaint := self.complaint(seen):
            return web.json_response(self.error(400, complaint), status=400)
        await asyncio.sleep(script.hang_s)
        if script.status != 200:
            body = self.error(script.status, script.message)
            return web.json_response(body, status=script.status, headers=dict(script.headers))
        if not self.streams(seen):
            return web.json_response(self.whole(seen))
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for number, event in enumerate(self.events(seen)):
            if number == script.cut_after:
                assert request.transport is not None
                request.transport.abort()
                return response
            if number == script.ends_early:
                break
            await response.write(event)
            await asyncio.sleep(script.gap_s)
        await response.write_eof()
        return response

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[Upstream]:
        """Serve on a free port of loopback until the context ends."""
        app = web.Application()
        app.router.add_post("/{tail:.*}", self.handle)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{port}"
        try:
            yield self
        finally:
            await runner.cleanup()


def data(payload: Mapping[str, Any] | str, name: str | None = None) -> bytes:
    """One server-sent event."""
    text = payload if isinstance(payload, str) else json.dumps(payload)
    return (f"event: {name}\n" if name else "").encode() + f"data: {text}\n\n".encode()


def words(text: str) -> list[str]:
    """The text in the pieces it is streamed in."""
    return [word if index == 0 else f" {word}" for index, word in enumerate(text.split(" "))] if text else []
