"""The client of the suite: raw HTTP/1.1 over kept connections, so that it costs little beside what it measures."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any, cast
from urllib.parse import urlsplit

QUESTION = "How many grams are there in 51 kilograms? Give the amount as a plain number."
TOKENS_MAX = 64
GRACE_S = 30.0  # for requests in flight at the end
END_OF_CHUNKS, EVENTS, DONE = b"0\r\n\r\n", b"text/event-stream", b"data: [DONE]"
EXAMPLE_CHARS = 300


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go. `url` ends before `/chat/completions`."""

    url: str
    model: str
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        parts = urlsplit(self.url)
        return str(parts.hostname), int(parts.port or 80)

    def request(self, question: str = QUESTION, **more: Any) -> bytes:
        """The bytes of a chat completion. `more`: properties of the body."""
        messages = [{"role": "user", "content": question}]
        body = json.dumps({"model": self.model, "messages": messages, "max_tokens": TOKENS_MAX, **more}).encode()
        host, port = self.address
        fields = {"host": f"{host}:{port}", "content-type": "application/json", "content-length": str(len(body))}
        lines = [f"{name}: {value}" for name, value in (fields | dict(self.headers)).items()]
        head = "\r\n".join([f"POST {urlsplit(self.url).path}/chat/completions HTTP/1.1", *lines, "", ""])
        return head.encode() + body


@dataclass(slots=True)
class Replies:
    """What came back. Milliseconds by status; 0: no whole reply. `seconds`: the time that `good` counts."""

    took_ms: dict[int, list[float]] = field(default_factory=dict)
    seconds: float = 0.0
    good: int = 0  # replies with status 200 within `seconds`
    retry_after: int = 0  # refusals that say when to come back
    examples: dict[int, str] = field(default_factory=dict)
    head: bytes = b""  # of the last reply with status 200

    @property
    def statuses(self) -> Counter[int]:
        """How many replies had each status."""
        return Counter({status: len(took) for status, took in self.took_ms.items()})

    @property
    def requests(self) -> int:
        """How many requests were sent."""
        return self.statuses.total()

    @property
    def per_s(self) -> float:
        """Replies with status 200 a second."""
        return self.good / self.seconds if self.seconds else 0.0

    def count(self, one: Connection, in_time: bool) -> None:
        """Take one reply."""
        self.took_ms.setdefault(one.status, []).append((one.ended_s - one.began_s) * 1000)
        if one.status == 200:
            self.good += in_time
            self.head = one.head
        else:
            self.retry_after += b"\nretry-after:" in one.head.lower()
            self.examples.setdefault(one.status, one.body[:EXAMPLE_CHARS].decode(errors="replace"))


Done = Callable[["Connection"], None]


class Connection(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self) -> None:
        self.head = self.body = b""
        self.status, self.began_s, self.ended_s = 0, 0.0, 0.0
        self._pieces: list[bytes] = []
        self._length = -1
        self._size = 0
        self._done: Done | None = None
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    @property
    def open(self) -> bool:
        """Whether another request can be sent."""
        return self._transport is not None and not self._transport.is_closing()

    def ask(self, request: bytes, done: Done) -> None:
        """Send it; `done` is called once the reply is whole, or with status 0 where the connection broke."""
        assert self._transport is not None
        self.head, self.body, self.status, self._pieces, self._done = b"", b"", 0, [], done
        self._size, self._length = 0, -1
        self.began_s = time.perf_counter()
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        self._pieces.append(data)
        self._size += len(data)
        if not self.head and not self._read_head():
            return
        tail = self._pieces[-1] if len(self._pieces[-1]) >= 5 else b"".join(self._pieces)
        whole = self._size >= self._length if self._length >= 0 else tail.endswith(END_OF_CHUNKS)
        if whole:
            self.status = int(self.head[9:12])
            self._end()

    def _read_head(self) -> bool:
        together = b"".join(self._pieces)
        end = together.find(b"\r\n\r\n")
        if end < 0:
            return False
        self.head, rest = together[: end + 2], together[end + 4 :]
        self._pieces, self._size = [rest], len(rest)
        at = (lowered := self.head.lower()).find(b"\ncontent-length:")
        self._length = int(lowered[at + 16 : lowered.index(b"\r", at)]) if at >= 0 else -1
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        self._end()

    def close(self) -> None:
        """Hang up."""
        if self._transport is not None:
            self._transport.abort()

    def _end(self) -> None:
        done, self._done = self._done, None
        if done is not None:
            self.ended_s, self.body = time.perf_counter(), b"".join(self._pieces)
            if self.status == 200 and EVENTS in self.head.lower() and DONE not in self.body:
                self.status = 0  # a stream that ended in an error
            done(self)


class Crowd:
    """Clients of one target. They keep their connections between two calls of `closed` and `open`."""

    def __init__(self, address: tuple[str, int], requests: Sequence[bytes]) -> None:
        self._address = address
        self._requests = cycle(requests)
        self._idle: list[Connection] = []
        self._under_way = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._replies = Replies()
        self._until_s = self._last_s = 0.0

    async def closed(self, in_flight: int, seconds: float, spread_s: float = 0.0) -> Replies:
        """So many at a time, the next as soon as one has come, for `seconds` and until the last has come. The first
        ones are spread over `spread_s`: workers that take equally long would keep them in step."""
        self._begin(seconds)
        began_s = time.perf_counter()
        for _ in range(in_flight):
            self._send(self._again)
            if spread_s:
                await asyncio.sleep(spread_s / in_flight)
        await asyncio.sleep(max(0.0, self._until_s - time.perf_counter()))
        replies = await self._finish()
        # all of them in all of the time: requests may take as long as the round
        replies.good, replies.seconds = replies.statuses[200], self._last_s - began_s
        return replies

    async def open(self, rate: float, seconds: float) -> Replies:
        """So many a second whatever comes back, for `seconds`; `good` counts those that came back within them."""
        self._begin(seconds)
        began_s, sent = time.perf_counter(), 0
        while (now_s := time.perf_counter()) < self._until_s:
            while sent < (now_s - began_s) * rate:
                sent += 1
                self._send(lambda _: None)
            await asyncio.sleep(0.002)
        return await self._finish()

    def close(self) -> None:
        """Close every connection that rests."""
        while self._idle:
            self._idle.pop().close()

    def _begin(self, seconds: float) -> None:
        self._replies, self._until_s = Replies(seconds=seconds), time.perf_counter() + seconds

    async def _finish(self) -> Replies:
        late_s = time.perf_counter() + GRACE_S
        while self._under_way and time.perf_counter() < late_s:  # noqa: ASYNC110 - replies come by callbacks
            await asyncio.sleep(0.005)
        if self._under_way:
            self._replies.took_ms[0] = [*self._replies.took_ms.get(0, []), *[GRACE_S * 1000] * self._under_way]
            self._under_way = 0
        return self._replies

    def _again(self, _: Connection) -> None:
        if time.perf_counter() < self._until_s:
            self._send(self._again)

    def _send(self, then: Done) -> None:
        self._under_way += 1

        def done(one: Connection) -> None:
            self._under_way -= 1
            self._last_s = one.ended_s
            if one.open:
                self._idle.append(one)
            self._replies.count(one, one.ended_s <= self._until_s)
            then(one)

        while self._idle:
            if (one := self._idle.pop()).open:
                one.ask(next(self._requests), done)
                return
        task = asyncio.get_running_loop().create_task(self._fresh(done))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _fresh(self, done: Done) -> None:
        one, began_s = Connection(), time.perf_counter()
        try:
            await asyncio.get_running_loop().create_connection(lambda: one, *self._address)
        except OSError as error:
            one.body, one.began_s, one.ended_s = repr(error).encode(), began_s, time.perf_counter()
            done(one)
            return
        one.ask(next(self._requests), done)
        one.began_s = began_s
