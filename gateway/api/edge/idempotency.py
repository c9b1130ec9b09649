"""Idempotency-Key around any route that spends: the same request again gets the first one's reply, and spends nothing.

A route calls `answer` once it knows who asks and what, and does its work in the function it hands over, with the
request it is given there: that one never says that the client has left, because the work goes on for whoever asks
again. The reply passes through here on its way out and is kept before its last byte.

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

from gateway.api.edge.stack import CLIENT_CLOSED_REQUEST, reply, unless_gone
from gateway.core.access.idempotency import (
    CHARS_MAX,
    HEADER,
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
QUEUE_MESSAGES_MAX = 8  # a slower reader than this holds the reply back, while it is there
KEEP_RETRY_S = 1.0


@dataclass(slots=True)
class Idempotency:
    """`lease_s`: for so long a request that never ended counts as being served; above any request's wall clock, so that
    its money has been settled by then. `keep_s`: how long a reply is kept. Replies over `reply_bytes_max` are not."""

    replies: ReplyStore
    lease_s: float
    keep_s: float
    reply_bytes_max: int
    abandoned: int = 0  # requests whose clients have left, while their work goes on
    _served: set[asyncio.Task[None]] = field(default_factory=set)

    async def answer(self, request: Request, principal: Principal, body: Any, serve: Serve) -> Response:
        """What `serve` answers; with an Idempotency-Key, what it answered the first time.

        Raises BadRequest for a key that is none, IdempotencyReused (422), IdempotencyRunning (409), Conflict where the
        first reply was not kept, Unavailable while the store is away.
        """
        key = request.headers.get(HEADER)
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
        """Wait until the replies of open requests are kept."""
        if self._served:
            await asyncio.wait(self._served, timeout=timeout_s)

    async def sweep(self, limit: int) -> int:
        """Forget up to `limit` replies whose time is over; how many."""
        return await self.replies.sweep(self.keep_s, limit)


class _Turn:
    """One request under an Idempotency-Key: carried out in a task of its own, relayed while its client listens."""

    def __init__(self, rules: Idempotency, slot: Slot, *, keeps: bool) -> None:
        self._rules = rules
        self._slot = slot
        self._keeps = keeps  # whether this key's replies may lie in the database
        self._messages: asyncio.Queue[Message | None] = asyncio.Queue(QUEUE_MESSAGES_MAX)  # None: it broke off
        self._answering = asyncio.Event()
        self._refusal: Exception | None = None
        self._left = self._ended = False
        self._open = False  # whether the slot is ours and waits for its reply
        self._status = 0
        self._headers: dict[str, str] = {}
        self._body: bytearray | None = bytearray()

    # ------------------------------------------------------------ the client's side

    async def response(self, receive: Receive) -> Response:
        """What the client is sent. Raises what refused the request."""
        await unless_gone(receive, self._answering.wait(), self.leave)
        if self._refusal is not None:
            raise self._refusal
        return _Relayed(self) if self._answering.is_set() else Response(status_code=CLIENT_CLOSED_REQUEST)

    def leave(self) -> None:
        """The client has left: nothing waits for it any more, and the work goes on."""
        if not self._left and not self._ended:
            self._rules.abandoned += 1
        self._left = True
        while not self._messages.empty():
            self._messages.get_nowait()

    async def relay(self, send: Send) -> None:
        """Pass the reply on until its end. Raises BatonError where it breaks off."""
        more = True
        while more:
            message = await self._messages.get()
            if message is None:
                raise BatonError("the reply broke off")
            more = message["type"] != "http.response.body" or message.get("more_body", False)
            await send(message)

    # ------------------------------------------------------------ the work

    async def run(self, request: Request, serve: Serve) -> None:
        """Claim, serve, keep. Raises nothing but CancelledError: what went wrong is told to the client."""
        try:
            await self._run(request, serve)
        finally:
            self._ended = True
            self._rules.abandoned -= self._left

    async def _run(self, request: Request, serve: Serve) -> None:
        try:
            response = await self._claimed(request, serve)
            self._answering.set()
            await response(request.scope, _never, self._send)
        except Exception as error:  # boundary: whatever it was, the client is told
            if not self._answering.is_set():
                self._refusal = error
                self._answering.set()
            else:
                log.error("a reply under an Idempotency-Key broke off", exc_info=error)
                await self._put(None)
        finally:
            if self._open:  # it ended without an end: what it spent must not be spent again
                await self._settle(
                    StoredReply(self._status, replay_headers(self._headers), None) if self._status else None
                )

    async def _claimed(self, request: Request, serve: Serve) -> Response:
        rules = self._rules
        try:
            kept = await rules.replies.claim(self._slot, rules.lease_s, rules.keep_s)
        except Unavailable as away:
            raise Unavailable(
                f"Idempotency-Key cannot be honoured now ({away.message}); retry, or send the request without it.",
                code="idempotency_unavailable",
                headers={"retry-after": "1"},
            ) from away
        if kept is not None:
            return _replayed(kept)
        self._open = True
        try:
            return await serve(Request(request.scope, _never))
        except BatonError as error:
            return reply(error)

    async def _send(self, message: Message) -> None:
        """ASGI `send`: note what passes, keep the whole before its last byte leaves."""
        if message["type"] == "http.response.start":
            self._status = message["status"]
            self._headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in message["headers"]}
        elif message["type"] == "http.response.body":
            self._note(message.get("body", b""))
            if self._open and not message.get("more_body", False):
                await self._end()
        await self._put(message)

    def _note(self, piece: bytes) -> None:
        if self._body is not None:
            self._body += piece
            if not self._keeps or len(self._body) > self._rules.reply_bytes_max:
                self._body = None

    async def _end(self) -> None:
        body = None if self._body is None else bytes(self._body)
        final = is_final(self._status, self._headers)
        await self._settle(StoredReply(self._status, replay_headers(self._headers), body) if final else None)

    async def _settle(self, kept: StoredReply | None) -> None:
        """Keep the reply, or give the slot back. A store that is away now is tried again while the lease lasts."""
        self._open = False
        try:
            await self._written(kept)
        except Unavailable as away:
            log.warning("a reply is not kept for its Idempotency-Key yet: %s", away.message)
            later = asyncio.create_task(self._written_later(kept))
            self._rules._served.add(later)
            later.add_done_callback(self._rules._served.discard)

    async def _written(self, kept: StoredReply | None) -> None:
        replies = self._rules.replies
        await (replies.release(self._slot) if kept is None else replies.keep(self._slot, kept))

    async def _written_later(self, kept: StoredReply | None) -> None:
        tries = max(1, int(self._rules.lease_s / KEEP_RETRY_S))
        for _ in range(tries):
            await asyncio.sleep(KEEP_RETRY_S)
            try:
                await self._written(kept)
            except Unavailable:
                continue
            return
        log.error("a reply was not kept for its Idempotency-Key: the same request again will be carried out again")

    async def _put(self, message: Message | None) -> None:
        if not self._left:
            await self._messages.put(message)


class _Relayed(Response):
    """A reply that is being made elsewhere."""

    def __init__(self, turn: _Turn) -> None:
        super().__init__()
        self._turn = turn

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        try:
            await unless_gone(receive, self._turn.relay(send), self._turn.leave)
        finally:
            self._turn.leave()


def _replayed(kept: StoredReply) -> Response:
    """The first reply again. Raises Conflict where there is none to give."""
    if kept.body is None:
        rollout = kept.headers.get("x-baton-rollout-id")
        raise Conflict(
            f"The request that brought this Idempotency-Key was carried out (rollout {rollout}, status {kept.status}), "
            "and its reply was not kept; send a new key to have it done again.",
            param="Idempotency-Key",
            code="idempotent_reply_not_kept",
            headers={"x-should-retry": "false", REPLAY_HEADER: "true"},
        )
    headers = {**kept.headers, REPLAY_HEADER: "true"}
    if kept.status >= 400:
        headers["x-should-retry"] = "false"  # it would be the same error again
    return Response(kept.body, kept.status, headers)


async def _never() -> Message:
    """A `receive` on which nothing ever comes."""
    await asyncio.Event().wait()
    raise AssertionError("an event that nobody sets")
