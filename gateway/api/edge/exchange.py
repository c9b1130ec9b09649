"""One request on a connection of uvicorn's, and its reply, in front of uvicorn's own cycle.

A reply that is there as a whole leaves in one write, and so does the head of a stream with its first piece. What has
been received is read without a wait, and the client's departure is a future: neither costs a task or a timer.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

from starlette.types import ASGIApp, Message
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

UNUSUAL = (b"connection", b"transfer-encoding")  # headers that uvicorn's own `send` has rules for
BODILESS_STATUSES = (204, 304)


class ClientMessages:
    """ASGI's `receive` of one request."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._departure: asyncio.Future[None] | None = None

    async def __call__(self) -> Message:
        """The next message."""
        message: Any = await self._cycle.receive()
        return cast(Message, message)

    @property
    def is_whole(self) -> bool:
        """Whether all of the body has been received, so that its first read does not wait."""
        return not self._cycle.more_body

    def whole_body(self) -> bytearray | None:
        """The body, where all of it has been received and nothing was read of it; None: call this object for it."""
        cycle = self._cycle
        if cycle.more_body or cycle.disconnected or cycle.response_complete or cycle.waiting_for_100_continue:
            return None
        cycle.flow.resume_reading()
        cycle.message_event.clear()
        body, cycle.body = cycle.body, bytearray()
        return body

    def departure(self) -> asyncio.Future[None]:
        """What is done once the client has left. One caller at a time; it may cancel it."""
        self._departure = departure = asyncio.get_running_loop().create_future()
        if self._cycle.disconnected:
            departure.set_result(None)
        return departure

    def leave(self) -> None:
        """Note that the client has left."""
        if self._departure is not None and not self._departure.done():
            self._departure.set_result(None)


class Exchange:
    """The application for one request: `receiver` is what it receives."""

    def __init__(self, cycle: RequestResponseCycle, app: Any) -> None:
        self.receiver = ClientMessages(cycle)
        self._cycle = cycle
        self._app: ASGIApp = app
        self._start: Message | None = None  # of the reply, until its first piece is there

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """ASGI."""
        await self._app(scope, self.receiver, self._send)

    async def _send(self, message: Any) -> None:
        start, self._start = self._start, None
        if start is None and message["type"] == "http.response.start" and not self._cycle.response_started:
            self._start = message
            return
        if start is not None:
            if message["type"] == "http.response.body" and self._write(start, message):
                return
            await self._cycle.send(start)  # type: ignore[arg-type]
        await self._cycle.send(message)

    def _write(self, start: Message, message: Message) -> bool:
        """Write the head and the first piece as one. False where the reply is not one of the usual kinds."""
        cycle, status = self._cycle, start["status"]
        if cycle.disconnected or cycle.flow.write_paused or not cycle.keep_alive:
            return False
        if cycle.scope["method"] == "HEAD" or status in BODILESS_STATUSES:
            return False
        pieces, length = [STATUS_LINE[status]], None
        headers = [*cycle.default_headers, *start.get("headers", ())]
        for name, value in headers:
            if name in UNUSUAL:
                return False
            if name == b"content-length":
                length = value
            pieces += (name, b": ", value, b"\r\n")
        body, more = message.get("body", b""), message.get("more_body", False)
        if (length is None) != more or (length is not None and int(length) != len(body)) or not body:
            return False
        if more:
            pieces += (b"transfer-encoding: chunked\r\n\r\n", b"%x\r\n" % len(body), body, b"\r\n")
            cycle.chunked_encoding = True
        else:
            pieces += (b"\r\n", body)
        head = b"".join(pieces[1 : 1 + 4 * len(headers)])
        if head.count(b"\r") + head.count(b"\n") != 2 * len(headers) or b"\0" in head:
            raise RuntimeError("a header of the reply has a line break in it")
        cycle.response_started, cycle.waiting_for_100_continue = True, False
        cycle.transport.write(b"".join(pieces))
        if not more:
            cycle.response_complete = True
            cycle.message_event.set()
            cycle.on_response()
        return True
