"""Idempotency-Key around any route that spends: a repeated request gets the first reply again, and spends nothing.

A route calls `answer` once it knows the key and the body, and does its work in the function `serve`. The request that
`serve` gets never reports that the client has left, because the work goes on for a client that asks again. The reply
passes through here on its way out and is stored before its last byte is sent.

    return await self.idempotency.answer(request, who, body, lambda request: self._serve(request, who, body))
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from fastapi import Request, Response
from starlette.types import Message, Receive, Scope, Send

from gateway.api.edge.access import CLIENT_CLOSED_REQUEST
from gateway.api.edge.headers import header_map
from gateway.api.edge.stack import never_gone, reply, unless_gone
from gateway.core.access.idempotency import (
    CHARS_MAX,
    IDEMPOTENCY_HEADER,
    REPLAY_HEADER,
    digest_of,
    fingerprint_of,
    is_final,
    replay_headers,
)
from gateway.core.access.keys import Principal
from gateway.errors import BadRequest, BatonError, Conflict, Unavailable
from gateway.service.ports.turns import ReplyStore, Slot, StoredReply

log = logging.getLogger("baton")
Serve = Callable[[Request], Awaitable[Response]]
QUEUE_MESSAGES_MAX = 8  # a client that reads more slowly holds the reply back, until it leaves
KEEP_RETRY_S = 1.0


@dataclass(slots=True)
class Idempotency:
    """`lease_s`: time after which a request that never ended no longer counts as being served; it is longer than any
    request's wall-clock, so that its money is settled by then. `keep_s`: time for which a reply is stored. A reply over
    `reply_bytes_max` is not stored."""

    replies: ReplyStore
    lease_s: float
    keep_s: float
    reply_bytes_max: int
    abandoned: int = 0  # requests whose clients have left, while their work goes on
    _served: set[asyncio.Task[None]] = field(default_factory=set)

    async def answer(self, request: Request, principal: Principal, body: Any, serve: Serve) -> Response:
        """The reply of `serve`; for a repeated Idempotency-Key, its first reply.

        Raises BadRequest for a malformed key, IdempotencyReused (422), IdempotencyRunning (409), Conflict where the
        first reply was not stored, Unavailable while the store is away.
        """
        key = header_map(request.scope).get(IDEMPOTENCY_HEADER)
        if key is None:
            return await serve(request)
        if not 0 < len(key) <= CHARS_MAX:
            raise BadRequest(f"`Idempotency-Key` must have 1 to {CHARS_MAX} characters", param="Idempotency-Key")
        slot = Slot(principal.public_id, digest_of(key), fingerprint_of(request.url.path, body), str(uuid4()))
        turn = _Turn(self, slot, keeps=principal.log_mode == "full")
        task = asyncio.create_task(turn.run(request, serve))
        self._served.add(task)
        task.add_done_callback(self._served.discard)
        return await turn.response(request.receive)

    async def drain(self, timeout_s: float) -> None:
        """Wait until the replies of open requests are stored, at most `timeout_s`."""
        if self._served:
            await asyncio.wait(self._served, timeout=timeout_s)

    async def sweep(self, limit: int) -> int:
        """Delete up to `limit` replies that are older than `keep_s`; return how many."""
        return await self.replies.sweep(self.keep_s, limit)


class _Turn:
    """One request under an Idempotency-Key: served in a task of its own, relayed while the client listens."""

    def __init__(self, rules: Idempotency, slot: Slot, *, keeps: bool) -> None:
        self._rules = rules
        self._slot = slot
        self._keeps = keeps  # whether replies to this key may be stored
        self._messages: asyncio.Queue[Message | None] = asyncio.Queue(QUEUE_MESSAGES_MAX)  # None: the reply broke off
        self._answering = asyncio.Event()
        self._refusal: Exception | None = None
        self._left = self._ended = False
        self._open = False  # whether this request has claimed the slot and not stored a reply
        self._status = 0
        self._headers: dict[str, str] = {}
        self._body: bytearray | None = bytearray()

    # ------------------------------------------------------------ the client's side

    async def response(self, receive: Receive) -> Response:
        """The reply for the client. Raises the error that refused the request."""
        await unless_gone(receive, self._answering.wait(), self.leave)
        if self._refusal is not None:
            raise self._refusal
        return _RelayedReply(self) if self._answering.is_set() else Response(status_code=CLIENT_CLOSED_REQUEST)

    def leave(self) -> None:
        """Note that the client has left: nothing waits for it any more, and the work goes on."""
        if not self._left and not self._ended:
            self._rules.abandoned += 1
        self._left = True
        while not self._messages.empty():
            self._messages.get_nowait()

    async def relay(self, send: Send) -> None:
        """Send the reply on, to its end. Raises BatonError where it breaks off."""
        more = True
        while more:
            message = await self._messages.get()
            if message is None:
                raise BatonError("the reply broke off")
            more = message["type"] != "http.response.body" or message.get("more_body", False)
            await send(message)

    # ------------------------------------------------------------ the work

    async def run(self, request: Request, serve: Serve) -> None:
        """Claim the slot, serve, store the reply. Errors go to the client; only CancelledError is raised."""
        try:
            await self._run(request, serve)
        finally:
            self._ended = True
            self._rules.abandoned -= self._left

    async def _run(self, request: Request, serve: Serve) -> None:
        try:
            response = await self._claim(request, serve)
            self._answering.set()
            await response(request.scope, never_gone, self._send)
        except Exception as error:  # boundary: every error goes to the client
            if not self._answering.is_set():
                self._refusal = error
                self._answering.set()
            else:
                log.error("a reply under an Idempotency-Key broke off", exc_info=error)
                await self._put(None)
        finally:
            if self._open:  # the reply has no end; the request must not spend again
                await self._settle(
                    StoredReply(self._status, replay_headers(self._headers), None) if self._status else None
                )

    async def _claim(self, request: Request, serve: Serve) -> Response:
        rules = self._rules
        try:
            stored = await rules.replies.claim(self._slot, rules.lease_s, rules.keep_s)
        except Unavailable as away:
            raise Unavailable(
                f"Idempotency-Key cannot be honoured now ({away.message}); retry, or send the request without it.",
                code="idempotency_unavailable",
                headers={"retry-after": "1"},
            ) from away
        if stored is not None:
            return _replay(stored)
        self._open = True
        try:
            return await serve(Request(request.scope, never_gone))
        except BatonError as error:
            return reply(error, request.scope)

    async def _send(self, message: Message) -> None:
        """ASGI `send`: collect the reply, and store it before its last byte leaves."""
        if message["type"] == "http.response.start":
            self._status = message["status"]
            self._headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in message["headers"]}
        elif message["type"] == "http.response.body":
            self._collect(message.get("body", b""))
            if self._open and not message.get("more_body", False):
                await self._end()
        await self._put(message)

    def _collect(self, piece: bytes) -> None:
        if self._body is not None:
            self._body += piece
            if not self._keeps or len(self._body) > self._rules.reply_bytes_max:
                self._body = None

    async def _end(self) -> None:
        body = None if self._body is None else bytes(self._body)
        final = is_final(self._status, self._headers)
        await self._settle(StoredReply(self._status, replay_headers(self._headers), body) if final else None)

    async def _settle(self, stored: StoredReply | None) -> None:
        """Store the reply; without one, release the slot. While the store is away, try again until the lease ends."""
        self._open = False
        try:
            await self._write(stored)
        except Unavailable as away:
            log.warning("a reply is not kept for its Idempotency-Key yet: %s", away.message)
            later = asyncio.create_task(self._write_later(stored))
            self._rules._served.add(later)
            later.add_done_callback(self._rules._served.discard)

    async def _write(self, stored: StoredReply | None) -> None:
        replies = self._rules.replies
        await (replies.release(self._slot) if stored is None else replies.keep(self._slot, stored))

    async def _write_later(self, stored: StoredReply | None) -> None:
        tries = max(1, int(self._rules.lease_s / KEEP_RETRY_S))
        for _ in range(tries):
            await asyncio.sleep(KEEP_RETRY_S)
            try:
                await self._write(stored)
            except Unavailable:
                continue
            return
        log.error("a reply was not kept for its Idempotency-Key: the same request again will be carried out again")

    async def _put(self, message: Message | None) -> None:
        if not self._left:
            await self._messages.put(message)


class _RelayedReply(Response):
    """A reply that the task of a turn makes."""

    def __init__(self, turn: _Turn) -> None:
        super().__init__()
        self._turn = turn

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        try:
            await unless_gone(receive, self._turn.relay(send), self._turn.leave)
        finally:
            self._turn.leave()


def _replay(reply: StoredReply) -> Response:
    """The first reply again. Raises Conflict where its body was not stored."""
    if reply.body is None:
        rollout = reply.headers.get("x-baton-rollout-id")
        raise Conflict(
            f"The request that brought this Idempotency-Key was carried out (rollout {rollout}, "
            f"status {reply.status}), and its reply was not kept; send a new key to have it done again.",
            param="Idempotency-Key",
            code="idempotent_reply_not_kept",
            headers={"x-should-retry": "false", REPLAY_HEADER: "true"},
        )
    headers = {**reply.headers, REPLAY_HEADER: "true"}
    if reply.status >= 400:
        headers["x-should-retry"] = "false"  # a retry would get the same error
    return Response(reply.body, reply.status, headers)
