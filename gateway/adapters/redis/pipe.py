"""Commands to Redis over one connection: those of one turn of the event loop leave in one write.

A command's deadline counts from the moment when its bytes were given to the socket. A reply that is in the socket's
buffer when the deadline passes is read, however late the event loop is. A connection on which a deadline passed gets
no new command: it closes once each of its commands has a reply or has failed, and the next command opens another one.
"""

from __future__ import annotations

import asyncio
import select
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, cast

import hiredis
from redis.asyncio.connection import SSLConnection, UnixDomainSocketConnection, parse_url

STALL_S = 0.02  # a timer that fires this much too late means that this process was stalled
UNREAD_S = 0.001  # until the event loop has read what waits in the socket's buffer
COMMANDS_MAX = 20_000  # without a reply, on one connection
HOST, PORT = "localhost", 6379
Part = str | int | bytes
_pack = cast(Callable[[tuple[Part, ...]], bytes], hiredis.pack_command)  # its own types ask for one argument


class RedisAway(Exception):
    """Redis did not answer with a result within the deadline."""


class RedisTooSlow(RedisAway):
    """The deadline passed without an answer."""


class LinkLost(RedisAway):
    """The connection closed before the answer came. Redis may have carried the command out."""


def packed(parts: Sequence[Part]) -> bytes:
    """Encode a command in RESP. A lone surrogate, which an end user's id may hold, is encoded like any character."""
    try:
        return _pack(tuple(parts))
    except UnicodeEncodeError:
        plain = tuple(part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part for part in parts)
        return _pack(plain)


class _Waiting:
    """A command without its reply. `due_s`: when it fails, by the event loop's clock; None until it is written."""

    __slots__ = ("due_s", "is_greeting", "is_second", "reply")

    def __init__(self, reply: asyncio.Future[Any], is_greeting: bool) -> None:
        self.reply = reply
        self.is_greeting = is_greeting  # whether the connection is of no use if Redis refuses it
        self.due_s: float | None = None
        self.is_second = False  # whether the deadline is its second one, because this process was stalled


class Pipe:
    """`deadline_s` bounds the wait for a reply, and the wait for a connection; at most `connections_max` connections
    are open. Connects at the first command."""

    def __init__(self, url: str, *, deadline_s: float, connections_max: int) -> None:
        self.deadline_s = deadline_s
        self.has_answered = True  # whether Redis answered the last command that ended
        self._place: dict[str, Any] = dict(parse_url(url))
        self._connections_max = connections_max
        self._link: RedisLink | None = None
        self._links: list[RedisLink] = []  # the last one is in use, the others have commands that wait
        self._is_closed = False

    def send(self, command: bytes) -> asyncio.Future[Any]:
        """Send a packed command. The future gets its reply (an error of Redis is a `hiredis.ReplyError`) or raises
        RedisAway. Raises RedisAway if too many commands wait, and after `close`."""
        link = self._link
        if self._is_closed:
            raise RedisAway("this gateway closed its connections")
        if link is None or not link.is_usable:
            link = self._link = self._open()
        return link.send(command)

    def close(self) -> None:
        """Close every connection; commands that wait fail, and later ones too."""
        self._is_closed = True
        for link in self._links:
            link.close()
        self._links.clear()
        self._link = None

    def _open(self) -> RedisLink:
        self._links = [link for link in self._links if not link.is_closed][-self._connections_max :]
        if len(self._links) == self._connections_max:
            self._links.pop(0).close()
        link = RedisLink(self)
        self._links.append(link)
        for parts in self._greeting():
            link.send(packed(parts), is_greeting=True)
        link.connecting = asyncio.get_running_loop().create_task(self._connect(link), name="connect to Redis")
        return link

    def _greeting(self) -> list[tuple[Part, ...]]:
        place = self._place
        parts: list[tuple[Part, ...]] = []
        if place.get("password") is not None:
            user = (place["username"],) if place.get("username") else ()
            parts.append(("AUTH", *user, place["password"]))
        if place.get("db"):
            parts.append(("SELECT", int(place["db"])))
        return parts

    async def _connect(self, link: RedisLink) -> None:
        """Open the connection. A time-out that is noticed too late, because this process was stalled, is tried again
        once."""
        now = asyncio.get_running_loop().time
        for is_last in (False, True):
            until_s = now() + self.deadline_s
            try:
                async with asyncio.timeout(self.deadline_s):
                    await self._connected(link)
                return
            except TimeoutError:
                if is_last or now() < until_s + STALL_S or not self.has_answered:
                    self.has_answered = False
                    link.close(RedisTooSlow(f"no connection within {self.deadline_s * 1000:.0f} ms"))
                    return
            except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: uvloop's, for a closed connection
                link.close(RedisAway(f"{type(error).__name__}: {error}"))
                return

    async def _connected(self, link: RedisLink) -> None:
        loop, place = asyncio.get_running_loop(), self._place
        kind = place.get("connection_class")
        if kind is UnixDomainSocketConnection:
            await loop.create_unix_connection(lambda: link, place["path"])
            return
        options = {name: value for name, value in place.items() if name.startswith("ssl_")}
        tls = SSLConnection(**options).ssl_context.get() if kind is SSLConnection else None
        await loop.create_connection(lambda: link, place.get("host", HOST), place.get("port", PORT), ssl=tls)


class RedisLink(asyncio.Protocol):
    """One connection. Commands that are sent before it is open leave once it is."""

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe
        self._loop = asyncio.get_running_loop()
        self._reader = hiredis.Reader()
        self._transport: asyncio.Transport | None = None
        self._unsent: list[bytes] = []  # of the last commands in `_waiting`
        self._waiting: deque[_Waiting] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._unread = select.poll()
        self.connecting: asyncio.Task[None] | None = None
        self.is_usable = True
        self.is_closed = False

    def send(self, command: bytes, *, is_greeting: bool = False) -> asyncio.Future[Any]:
        """Send the command with all others of this turn of the event loop, in one write. Raises RedisAway if too many
        wait."""
        if len(self._waiting) >= COMMANDS_MAX:
            raise RedisAway(f"{COMMANDS_MAX} commands wait for Redis")
        if not self._unsent and self._transport is not None:
            self._loop.call_soon(self._write)
        self._unsent.append(command)
        waiting = _Waiting(self._loop.create_future(), is_greeting)
        self._waiting.append(waiting)
        return waiting.reply

    def _write(self) -> None:
        """Write what is unsent, and start its deadlines."""
        count = len(self._unsent)
        if not count or self._transport is None:
            return
        self._transport.write(b"".join(self._unsent))
        self._unsent.clear()
        due_s = self._loop.time() + self._pipe.deadline_s
        for at in range(-count, 0):
            self._waiting[at].due_s = due_s
        if self._timer is None:
            self._check_at(due_s)

    # ---------------------------------------------------------------- the connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send what waits."""
        if self.is_closed:
            transport.close()
            return
        self._transport = cast(asyncio.Transport, transport)
        self._unread.register(transport.get_extra_info("socket").fileno(), select.POLLIN)
        self._write()

    def data_received(self, data: bytes) -> None:
        """Give each complete reply to its command. Close the connection if it is no Redis, or if Redis refuses the
        password or the database."""
        waiting = self._waiting
        try:
            self._reader.feed(data)
            while waiting and (reply := self._reader.gets()) is not False:
                each = waiting.popleft()
                if each.is_greeting and isinstance(reply, hiredis.ReplyError):
                    self.close(RedisAway(f"{type(reply).__name__}: {reply}"))
                elif not each.reply.done():
                    each.reply.set_result(reply)
        except hiredis.ProtocolError as error:
            self.close(RedisAway(f"not a reply of Redis: {error}"))
            return
        self._pipe.has_answered = True
        self._close_if_done()

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail every command that waits."""
        self.close(LinkLost(f"{type(exc).__name__}: {exc}" if exc else "Redis closed the connection"))

    def close(self, error: RedisAway | None = None) -> None:
        """Close the connection; commands that wait fail. Idempotent."""
        self.is_usable, was_closed, self.is_closed = False, self.is_closed, True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._unsent.clear()
        while self._waiting:
            _fail(self._waiting.popleft(), error or LinkLost("the connection was closed"))
        if was_closed:
            return
        if self._transport is not None:
            self._transport.abort()
        elif self.connecting is not None and self.connecting is not asyncio.current_task():
            self.connecting.cancel()

    def _close_if_done(self) -> None:
        if not self.is_usable and all(each.reply.done() for each in self._waiting):
            self.close()

    # ---------------------------------------------------------------- the deadline

    def _check_at(self, time_s: float) -> None:
        self._timer = self._loop.call_at(time_s, self._check, time_s)

    def _check(self, timer_s: float) -> None:
        """Fail the commands whose deadline has passed, unless their replies can be read now, or this process was
        stalled and Redis has answered so far."""
        self._timer = None
        now_s, head = self._loop.time(), self._head()
        if head is not None and head.due_s is not None and head.due_s <= now_s:
            if self._unread.poll(0):
                self._check_at(now_s + UNREAD_S)
                return
            if now_s - timer_s > STALL_S and self._pipe.has_answered and not head.is_second:
                self._give_second_deadline(now_s)
            else:
                self._fail_until(now_s)
            head = self._head()
        if head is not None and head.due_s is not None:
            self._check_at(head.due_s)

    def _head(self) -> _Waiting | None:
        """The first command whose caller still waits."""
        return next((each for each in self._waiting if not each.reply.done()), None)

    def _give_second_deadline(self, now_s: float) -> None:
        for each in self._waiting:
            if each.due_s is not None:
                each.due_s, each.is_second = now_s + self._pipe.deadline_s, True

    def _fail_until(self, now_s: float) -> None:
        """Fail what is due. The failed commands keep their places, because their replies may still come."""
        self._pipe.has_answered = self.is_usable = False
        error = RedisTooSlow(f"no answer within {self._pipe.deadline_s * 1000:.0f} ms")
        for each in self._waiting:
            if each.due_s is None or each.due_s > now_s:
                break
            _fail(each, error)
        self._close_if_done()


def _fail(waiting: _Waiting, error: RedisAway) -> None:
    if not waiting.reply.done():
        waiting.reply.set_exception(error)
        waiting.reply.exception()  # its caller may be gone
