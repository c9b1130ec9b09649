"""A TCP proxy with faults, which have the names of toxiproxy's toxics."""

from __future__ import annotations

import asyncio
import random
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass, field, replace

CHUNK_BYTES = 65_536
LINGER_OFF = struct.pack("ii", 1, 0)


@dataclass(frozen=True, slots=True)
class Toxics:
    """Faults of one direction. All may change while connections are open."""

    latency_s: float = 0.0
    jitter_s: float = 0.0  # added to the latency, evenly drawn
    bytes_per_s: float | None = None  # bandwidth
    slice_bytes: int | None = None  # so many at a time
    black_hole: bool = False  # swallowed, while the connection stays open
    reset_after: int | None = None  # RST once so many bytes of a connection have passed
    reset_on: bytes | None = None  # RST instead of passing on a piece that holds these
    half_close: bool = False  # FIN in this direction only, at the first byte


@dataclass(slots=True, eq=False)
class _Link:
    """One connection: both writers."""

    client: asyncio.StreamWriter
    server: asyncio.StreamWriter
    passed: dict[str, int] = field(default_factory=dict)


class FaultProxy:
    """Listens on loopback and forwards to `target`: (host, port), or the path of a Unix socket. `up` is for bytes from
    the client, `down` for those to it. `refuse`: a new connection is reset at once."""

    def __init__(self, target: tuple[str, int] | str) -> None:
        self.target = target
        self.up = self.down = Toxics()
        self.refuse = False
        self.port = 0
        self._links: set[_Link] = set()
        self._tasks: set[asyncio.Task[None]] = set()  # pumps
        self._serving: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> FaultProxy:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.close()
        self.cut()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, *self._serving, return_exceptions=True)
        await asyncio.sleep(0.01)  # transports close their sockets in the loop's next turns

    def set(self, **both: object) -> None:
        """The same toxics in both directions; those not named are healed."""
        self.up = self.down = replace(Toxics(), **both)  # type: ignore[arg-type]

    def heal(self) -> None:
        """Remove all toxics. Reset connections that lost bytes, since those cannot go on."""
        holed = self.up.black_hole or self.down.black_hole
        self.up, self.down, self.refuse = Toxics(), Toxics(), False
        if holed:
            self.cut()

    def cut(self) -> None:
        """Reset every open connection."""
        for link in list(self._links):
            reset(link.client)
            reset(link.server)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving = asyncio.create_task(self._accept(reader, writer))
        self._serving.add(serving)
        serving.add_done_callback(self._serving.discard)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.refuse:
            reset(writer)
            await closed(writer)
            return
        try:
            if isinstance(self.target, str):
                theirs, ours = await asyncio.open_unix_connection(self.target)
            else:
                theirs, ours = await asyncio.open_connection(*self.target)
        except OSError:
            reset(writer)
            await closed(writer)
            return
        link = _Link(writer, ours)
        self._links.add(link)
        pumps = [
            asyncio.create_task(self._pump(link, "up", reader, ours)),
            asyncio.create_task(self._pump(link, "down", theirs, writer)),
        ]
        self._tasks.update(pumps)
        await asyncio.gather(*pumps, return_exceptions=True)
        self._tasks.difference_update(pumps)
        self._links.discard(link)
        for end in (writer, ours):
            await closed(end)

    async def _pump(
        self, link: _Link, direction: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        try:
            while piece := await reader.read(CHUNK_BYTES):
                toxics: Toxics = getattr(self, direction)
                if toxics.reset_on is not None and toxics.reset_on in piece:
                    self.cut_one(link)
                    return
                if toxics.half_close:
                    break
                await self._through(link, direction, piece, toxics, writer)
            await self._out_of_the_hole(direction)
            if writer.can_write_eof():
                writer.write_eof()
        except OSError:  # a reset passes on, as on a wire
            await self._out_of_the_hole(direction)
            self.cut_one(link)

    async def _out_of_the_hole(self, direction: str) -> None:
        """The end of a connection falls into a black hole, too."""
        while getattr(self, direction).black_hole:
            await asyncio.sleep(0.02)

    async def _through(
        self, link: _Link, direction: str, piece: bytes, toxics: Toxics, writer: asyncio.StreamWriter
    ) -> None:
        if toxics.latency_s or toxics.jitter_s:
            await asyncio.sleep(toxics.latency_s + random.uniform(0, toxics.jitter_s))
        if toxics.reset_after is not None:
            left = toxics.reset_after - link.passed.get(direction, 0)
            if len(piece) >= left:
                writer.write(piece[: max(0, left)])
                await writer.drain()
                self.cut_one(link)
                return
        size = toxics.slice_bytes or len(piece)
        for at in range(0, len(piece), size):
            if getattr(self, direction).black_hole:
                return
            part = piece[at : at + size]
            writer.write(part)
            await writer.drain()
            link.passed[direction] = link.passed.get(direction, 0) + len(part)
            if toxics.bytes_per_s:
                await asyncio.sleep(len(part) / toxics.bytes_per_s)
            elif toxics.slice_bytes:
                await asyncio.sleep(0)

    def cut_one(self, link: _Link) -> None:
        """Reset both ends of one connection."""
        reset(link.client)
        reset(link.server)


async def closed(writer: asyncio.StreamWriter) -> None:
    """Close, and return once the socket is closed, so that the collector finds none to warn of."""
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()


def reset(writer: asyncio.StreamWriter) -> None:
    """Close with RST, as a crashed host's successor does."""
    sock = writer.get_extra_info("socket")
    if sock is not None and sock.family != socket.AF_UNIX and sock.fileno() >= 0:
        with suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_OFF)
    writer.transport.abort()
