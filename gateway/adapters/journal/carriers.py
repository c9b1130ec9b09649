"""What carries a batch of the journal to PostgreSQL: a process of its own, or a thread of this one.

The shipper orders a batch and gets a report. A carrier keeps nothing: an order whose report was lost is given again,
and the inserts are idempotent. The process connects to a socket of the gateway; each message is one line of JSON:

    gateway → process    the settings of the process, once: they may hold the password of the database
    gateway → process    an order: {"start": [segment, offset], "until": [segment, offset]}
    process → gateway    a report (the fields of `Shipment`), or {"error": "…"}
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from gateway.adapters.host.servers import remove_if_outside, socket_directory
from gateway.adapters.host.supervisor import Server
from gateway.adapters.journal.segments import Position
from gateway.adapters.journal.spool import MIB, Spool
from gateway.adapters.postgres.writer import Delivery, LogWriter
from gateway.errors import Unavailable

LINE_BYTES_MAX = 16 * MIB  # a batch of small records, all of them dead, with their reasons
ORDER_S = 120.0  # for one batch; its statements have limits of their own
CONNECT_S = 60.0
SOCKET = "shipper.sock"
PROGRAM = "gateway.adapters.journal.process"
NOTHING = Delivery([], [], 0)
Link = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass(frozen=True, slots=True)
class BatchSize:
    """The bounds of a batch; it has one record at least."""

    records: int = 500
    bytes_: int = 4 * MIB


@dataclass(frozen=True, slots=True)
class Shipment:
    """A batch that is in PostgreSQL: the position after it, the number of its records, and what became of them.
    `damaged`: the bytes at the position are not a record."""

    position: Position
    records: int
    damaged: bool
    delivery: Delivery

    def line(self) -> bytes:
        """The message."""
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def read(cls, message: Mapping[str, Any]) -> Shipment:
        """Inverse of `line`, parsed. Raises KeyError or TypeError."""
        fields = message["delivery"]
        delivery = Delivery([(kind, why) for kind, why in fields["dead"]], fields["rollouts_us"], fields["newest_us"])
        return cls(Position(*message["position"]), message["records"], message["damaged"], delivery)


class Carrier(Protocol):
    """Carries one batch at a time."""

    async def open(self) -> None:
        """Start, so that the first batch need not wait for it. Idempotent. Raises Unavailable."""

    async def carry(self, start: Position, until: Position) -> Shipment:
        """Carry records from `start` on and before `until`, of one segment at most. Raises Unavailable while
        PostgreSQL is away or the process is down, and OSError if the disk cannot be read."""

    async def close(self) -> None:
        """End. What was ordered and not reported may or may not be stored."""


class ThreadCarrier:
    """Carries in a thread of this process, the only one that uses `writer`."""

    def __init__(self, spool: Spool, writer: LogWriter, size: BatchSize | None = None) -> None:
        self._spool = spool
        self._writer = writer
        self._size = size or BatchSize()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="shipper")

    async def open(self) -> None:
        """The thread starts with the first batch."""

    async def carry(self, start: Position, until: Position) -> Shipment:
        """Read in a thread of the pool, parse and store in the own one."""
        batch = await self._spool.read(start, records_max=self._size.records, bytes_max=self._size.bytes_)
        delivery = NOTHING
        payloads = batch.payloads + ([batch.lost.start] if batch.lost else [])
        if payloads:
            loop = asyncio.get_running_loop()
            delivery = await loop.run_in_executor(self._thread, self._writer.store, payloads)
        return Shipment(batch.position, len(payloads), batch.lost is not None, delivery)

    async def close(self) -> None:
        """Wait for the batch in progress."""
        await asyncio.to_thread(self._thread.shutdown)


class ShipperProcess(Server):
    """`python -m PROGRAM SOCKET`, which connects to that socket and carries out orders."""

    def __init__(self, data_dir: Path) -> None:
        super().__init__("shipper", data_dir)
        self.sockets = socket_directory(self.data_dir, "shipper", SOCKET)
        self._link: Link | None = None
        self._linked = asyncio.Event()

    async def command(self) -> list[str]:
        """The gateway's own interpreter."""
        self.unlink()
        return [sys.executable, "-m", PROGRAM, str(self.sockets / SOCKET)]

    async def probe(self) -> bool:
        """Whether it has connected."""
        return self._link is not None

    def linked(self, link: Link) -> None:
        """Use this connection from now on."""
        self.unlink()
        self._link = link
        self._linked.set()

    def unlink(self) -> None:
        """Close the connection, if there is one."""
        self._linked.clear()
        if self._link is not None:
            self._link[1].close()
            self._link = None

    async def link(self) -> Link:
        """The connection. Raises Unavailable if the process does not connect."""
        with suppress(TimeoutError):
            async with asyncio.timeout(CONNECT_S):
                await self._linked.wait()
        if self._link is None:
            raise Unavailable(f"the shipper's process is down ({self.log_path})")
        return self._link

    def kill(self) -> None:
        """End it at once; it is started again."""
        self.unlink()
        if self.pid is not None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


class ProcessCarrier:
    """Carries in a process of its own, on a leash and restarted when it ends. `settings`: its first message. A process
    that gives no report within `order_s` is killed."""

    def __init__(self, data_dir: Path, settings: Mapping[str, Any], order_s: float = ORDER_S) -> None:
        self.process = ShipperProcess(data_dir)
        self._settings = json.dumps(settings).encode() + b"\n"
        self._order_s = order_s
        self._listener: asyncio.Server | None = None
        self._started = False

    async def open(self) -> None:
        """Start the process."""
        if not self._started:
            await self._listen()
            await self.process.start()
            self._started = True

    async def carry(self, start: Position, until: Position) -> Shipment:
        """Give the order and wait for the report."""
        await self.open()
        reader, writer = await self.process.link()
        try:
            writer.write(json.dumps({"start": start, "until": until}).encode() + b"\n")
            async with asyncio.timeout(self._order_s):
                message = json.loads(await reader.readline())
        except (OSError, ValueError) as error:  # TimeoutError is an OSError; an empty line is no JSON
            self.process.kill()
            raise Unavailable(f"the shipper's process gave no report ({type(error).__name__})") from None
        except asyncio.CancelledError:
            self.process.unlink()  # its report would be taken for the next order's
            raise
        if "error" in message:
            raise Unavailable(message["error"], code="store_unavailable")
        return Shipment.read(message)

    async def close(self) -> None:
        """End the process."""
        await self.process.stop()
        self.process.unlink()
        if self._listener is not None:
            self._listener.close()
        remove_if_outside(self.process.sockets, self.process.data_dir)

    async def _listen(self) -> None:
        place = self.process.sockets
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self._listener is None:
            (place / SOCKET).unlink(missing_ok=True)
            path = str(place / SOCKET)
            self._listener = await asyncio.start_unix_server(self._accept, path, limit=LINE_BYTES_MAX)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(self._settings)
        self.process.linked((reader, writer))
