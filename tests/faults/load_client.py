"""A client for load: its own process, little processor time a request, and a count of every reply.

    python -m tests.faults.load_client < ORDER.json   →   what came, as one JSON object on standard output

An order: `targets` [[host, port], …] taken in turns, `key`, `bodies` (sent in turns), `seconds`, and how:
`in_flight` n   closed: so many at a time, the next as soon as one has come
`rate` n        open: so many a second whatever comes back, as people out there would
`streams` n     so many streams, opened over `opening_s`, each of which must say "0 1 2 …" without a gap
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Coroutine
from itertools import cycle
from typing import Any, cast

import uvloop

IDLE_S = 10.0  # after this a connection is not used again: the gateway may be closing it
GRACE_S = 60.0  # for requests in flight at the end
ROLLOUT, RETRY, OVERHEAD = b"x-baton-rollout-id: ", b"retry-after: ", b"x-baton-overhead-ms: "
EXPERIENCE = b"x-baton-experience: "
Done = Callable[["Connection"], None]


def header(head: bytes, name: bytes) -> str:
    """A header's value, or nothing."""
    at = head.find(name)
    return head[at + len(name) : head.index(b"\r\n", at)].decode() if at >= 0 else ""


class Connection(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self) -> None:
        self._data = b""
        self._head = b""
        self._length = -1
        self._done: Done | None = None
        self.transport: asyncio.Transport | None = None
        self.target = 0
        self.status, self.began_s, self.took_s, self.idle_since_s = 0, 0.0, 0.0, 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def ask(self, request: bytes, done: Done) -> None:
        """Send it; `done` is called once the reply is whole, or with status 0 where the connection broke."""
        assert self.transport is not None
        self._data, self._head, self._length, self._done, self.status = b"", b"", -1, done, 0
        self.began_s = time.monotonic()
        self.transport.write(request)

    @property
    def open(self) -> bool:
        return self.transport is not None and not self.transport.is_closing()

    def header(self, name: bytes) -> str:
        return header(self._head + b"\r\n", name)

    @property
    def body(self) -> bytes:
        return self._data

    def data_received(self, data: bytes) -> None:
        self._data += data
        if not self._head:
            end = self._data.find(b"\r\n\r\n")
            if end < 0:
                return
            self._head, self._data = self._data[:end], self._data[end + 4 :]
            length = self.header(b"content-length: ")
            self._length = int(length) if length else -1
        whole = len(self._data) >= self._length if self._length >= 0 else self._data.endswith(b"0\r\n\r\n")
        if whole:
            self.status = int(self._head[9:12])
            self._end()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end()

    def _end(self) -> None:
        done, self._done = self._done, None
        if done is not None:
            self.idle_since_s = time.monotonic()
            self.took_s = self.idle_since_s - self.began_s
            done(self)


class Crowd:
    """All clients, and their replies."""

    def __init__(self, order: dict[str, Any]) -> None:
        self.order = order
        self.targets = [(str(host), int(port)) for host, port in order["targets"]]
        self._idle: list[deque[Connection]] = [deque() for _ in self.targets]
        bodies = [json.dumps(body).encode() for body in order["bodies"]]
        self._requests = [cycle([self._request(*target, body) for body in bodies]) for target in self.targets]
        self.took_ms: defaultdict[str, list[float]] = defaultdict(list)
        self.overhead_ms: list[float] = []
        self.ids: list[str] = []
        self.each_second: Counter[int] = Counter()
        self.examples: dict[str, str] = {}
        self.blind: dict[str, str] = {}  # rollouts whose replies say that experience was stale or missing
        self.no_retry_after = self.under_way = self.most_under_way = 0
        self.chunks = 0
        self.until_s = 0.0
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> dict[str, Any]:
        """Carry the order out."""
        began_s = time.monotonic()
        self.until_s = began_s + self.order["seconds"]
        if "streams" in self.order:
            await self._streams(self.order["streams"], self.order["opening_s"])
        elif "rate" in self.order:
            await self._open(self.order["rate"])
        else:
            await self._closed(self.order["in_flight"])
        lasted_s = min(time.monotonic(), self.until_s) - began_s
        await self._quiet()
        shown = ("ids", "took_ms", "overhead_ms", "examples", "blind", "no_retry_after", "most_under_way", "chunks")
        good = sum(n for at, n in self.each_second.items() if at < self.order["seconds"])
        return {name: getattr(self, name) for name in shown} | {
            "statuses": {status: len(took) for status, took in self.took_ms.items()},
            "seconds": lasted_s,
            "good_in_time": good,
            "cpu_s": time.process_time(),
        }

    # ------------------------------------------------------------ closed and open

    async def _closed(self, in_flight: int) -> None:
        def again(one: Connection) -> None:
            self._count(one)
            if time.monotonic() >= self.until_s:
                return
            if one.open:
                self._send(one, again)
            else:
                self._begin(self._fresh(one.target, again))

        await asyncio.gather(*(self._fresh(n % len(self.targets), again) for n in range(in_flight)))
        await asyncio.sleep(self.until_s - time.monotonic())

    async def _open(self, rate: float) -> None:
        def back(one: Connection) -> None:
            self._count(one)
            if one.open:
                self._idle[one.target].append(one)

        began_s, sent = time.monotonic(), 0
        while (now_s := time.monotonic()) < self.until_s:
            while sent < (now_s - began_s) * rate:
                target = sent % len(self.targets)
                sent += 1
                if (one := self._rested(target)) is not None:
                    self._send(one, back)
                else:
                    self._begin(self._fresh(target, back))
            await asyncio.sleep(0.002)

    def _rested(self, target: int) -> Connection | None:
        """Return the connection used last, so that those below it grow old and close."""
        idle, fresh_s = self._idle[target], time.monotonic() - IDLE_S
        while idle and (not idle[0].open or idle[0].idle_since_s < fresh_s):
            old = idle.popleft()
            if old.transport is not None:
                old.transport.close()
        while idle:
            one = idle.pop()
            if one.open:
                return one
        return None

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _fresh(self, target: int, done: Done) -> None:
        loop = asyncio.get_running_loop()
        began_s = time.monotonic()
        try:
            _, one = await loop.create_connection(Connection, *self.targets[target])
        except OSError as error:
            self.took_ms["0"].append((time.monotonic() - began_s) * 1000)
            self.examples["0"] = repr(error)
            return
        one.target = target
        self._send(one, done, began_s)

    def _send(self, one: Connection, done: Done, began_s: float | None = None) -> None:
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        one.ask(next(self._requests[one.target]), done)
        one.began_s = one.began_s if began_s is None else began_s

    def _count(self, one: Connection) -> None:
        self.under_way -= 1
        status = str(one.status)
        self.took_ms[status].append(one.took_s * 1000)
        if one.status == 200:
            self.ids.append(one.header(ROLLOUT))
            self.overhead_ms.append(float(one.header(OVERHEAD) or 0))
            if said := one.header(EXPERIENCE):
                self.blind[one.header(ROLLOUT)] = said
            self.each_second[int(one.idle_since_s - self.until_s + self.order["seconds"])] += 1
            return
        at_s = one.idle_since_s - self.until_s + self.order["seconds"]
        self.examples.setdefault(status, f"at {at_s:.2f} s: {one.body[:400].decode(errors='replace')}")
        if one.status in (429, 503) and not one.header(RETRY):
            self.no_retry_after += 1

    async def _quiet(self) -> None:
        """Wait until no request is in flight. One without a reply by then has status "never"."""
        late_s = time.monotonic() + GRACE_S
        while (self.under_way or self._tasks) and time.monotonic() < late_s:
            await asyncio.sleep(0.01)
        if self.under_way:
            self.took_ms["never"] = [0.0] * self.under_way

    # ------------------------------------------------------------ streams

    async def _streams(self, streams: int, opening_s: float) -> None:
        async def one(number: int) -> None:
            await asyncio.sleep(opening_s * number / streams)
            began_s, target = time.monotonic(), number % len(self.targets)
            status = await self._stream(target)
            self.took_ms[status].append((time.monotonic() - began_s) * 1000)

        await asyncio.gather(*(one(number) for number in range(streams)))

    async def _stream(self, target: int) -> str:
        """Return the status of a stream, or a word for its fault."""
        request = next(self._requests[target])
        reader, writer = await asyncio.open_connection(*self.targets[target])
        try:
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            if (status := head[9:12].decode()) != "200":
                self.examples.setdefault(status, (await reader.read(400)).decode(errors="replace"))
                return status
            self.under_way += 1
            self.most_under_way = max(self.most_under_way, self.under_way)
            said = await self._said(reader)
            self.under_way -= 1
        except (OSError, asyncio.IncompleteReadError) as error:
            self.examples.setdefault("0", repr(error))
            return "0"
        finally:
            writer.close()
        wanted = self.order["tokens"]
        if said != list(range(wanted)):
            self.examples.setdefault("200 with a gap", repr(said)[:400])
            return "200 with a gap"
        self.ids.append(header(head, ROLLOUT))
        return "200"

    async def _said(self, reader: asyncio.StreamReader) -> list[int]:
        """The numbers of a chunked event stream, in the order in which they came."""
        said: list[int] = []
        rest = b""
        while size := int(await reader.readuntil(b"\r\n"), 16):
            rest += (await reader.readexactly(size + 2))[:-2]
            *events, rest = rest.split(b"\n\n")
            for each in events:
                if each.startswith(b"data: {"):
                    for choice in json.loads(each[6:]).get("choices") or ():
                        content = choice["delta"].get("content") or ""
                        said += [int(word) for word in content.split()]
                        self.chunks += bool(content)
        await reader.readuntil(b"\r\n")
        return said

    def _request(self, host: str, port: int, body: bytes) -> bytes:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {host}:{port}\r\nauthorization: Bearer {self.order['key']}"
        return f"{head}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


if __name__ == "__main__":
    json.dump(uvloop.run(Crowd(json.load(sys.stdin)).run()), sys.stdout)
