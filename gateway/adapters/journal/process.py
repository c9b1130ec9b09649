"""The shipper's process, `python -m gateway.adapters.journal.process SOCKET`: it reads the journal that a gateway
writes, and stores it. It keeps no state.

It reads what is before the order's end, which the gateway has on disk, and changes nothing in the journal's directory:
the mark, the deletion of segments and damage are the gateway's. It ends when its gateway closes the socket or dies.

Its priority is lower than the gateway's: a batch may wait for a processor, a request may not. At NICENESS it still has
a quarter of a processor that both want (sched(7): weights 335 and 1024), and storing a rollout takes a tenth of the
time that serving it does.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gateway.adapters.journal import segments
from gateway.adapters.journal.carriers import LINE_BYTES_MAX, NOTHING, BatchSize, Shipment
from gateway.adapters.journal.segments import Position
from gateway.adapters.journal.shipper import reason
from gateway.adapters.postgres.copies import LogRecord
from gateway.adapters.postgres.database import sync_engine
from gateway.adapters.postgres.writer import LogWriter
from gateway.core.loop.experience.likeness import HASHED, Embedding
from gateway.core.loop.experience.meaning import TABLE_FILE, by_meaning
from gateway.files import shipped

NICENESS = 5


@dataclass(frozen=True, slots=True)
class _Batch:
    """Records of one segment as rows, and the position after them. `damaged`: the bytes there are not a record."""

    records: Sequence[LogRecord]
    end: Position
    damaged: bool


class Batches:
    """Reads and stores batches of the journal in `directory`. Blocking. While PostgreSQL stores one, a thread reads the
    next."""

    def __init__(self, directory: Path, writer: LogWriter, size: BatchSize) -> None:
        self._directory = directory
        self._writer = writer
        self._size = size
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="reader")
        self._ahead: tuple[Position, Future[_Batch | None]] | None = None  # what is read, and from where

    def carry(self, start: Position, until: Position) -> Shipment:
        """Store the next batch. Raises Unavailable, and OSError if the disk cannot be read."""
        batch = self._take(start) or self._read(start, until)
        if batch is None:
            return Shipment(start, 0, False, NOTHING)
        if not batch.damaged and batch.end < until:
            self._ahead = batch.end, self._reader.submit(self._read, batch.end, until)
        delivery = self._writer.put(batch.records) if batch.records else NOTHING
        return Shipment(batch.end, len(batch.records), batch.damaged, delivery)

    def _take(self, start: Position) -> _Batch | None:
        """What was read ahead, if it begins there."""
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            return None
        with suppress(OSError):
            batch = ahead[1].result()
            return batch if ahead[0] == start else None
        return None

    def _read(self, start: Position, until: Position) -> _Batch | None:
        part = self._next(start, until)
        if part is None:
            return None
        position, end = part
        path, size = segments.segment_path(self._directory, position.segment), self._size
        chunk = segments.read(path, position.offset, end, records_max=size.records, bytes_max=size.bytes_)
        lost = [segments.damage(path, chunk.end, end).start] if chunk.bad else []
        return _Batch(self._writer.read(chunk.payloads + lost), Position(position.segment, chunk.end), chunk.bad)

    def _next(self, start: Position, until: Position) -> tuple[Position, int] | None:
        """The first position from `start` on with bytes before `until`, and the end of them in its segment."""
        for number in segments.numbers(self._directory):
            if start.segment <= number <= until.segment:
                offset = start.offset if number == start.segment else 0
                size = segments.segment_path(self._directory, number).stat().st_size
                end = min(size, until.offset) if number == until.segment else size
                if offset < end:
                    return Position(number, offset), end
        return None


def serve(place: str) -> None:
    """Connect to the gateway's socket and carry out orders until it closes."""
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(place)
        with link.makefile("rwb") as lines:
            batches = _batches(json.loads(lines.readline(LINE_BYTES_MAX)))
            while line := lines.readline(LINE_BYTES_MAX):
                lines.write(_reply(batches, json.loads(line)))
                lines.flush()


def _reply(batches: Batches, order: Mapping[str, Any]) -> bytes:
    try:
        return batches.carry(Position(*order["start"]), Position(*order["until"])).line()
    except Exception as error:  # boundary: the gateway reports it and orders again
        return json.dumps({"error": reason(error)}).encode() + b"\n"


def _batches(settings: Mapping[str, Any]) -> Batches:
    engine = sync_engine(settings["database_url"], connect_timeout_s=settings["connect_s"], may_rest=False)
    writer = LogWriter(engine, _embedding(settings["embedder"]))
    return Batches(Path(settings["directory"]), writer, BatchSize(settings["records"]))


def _embedding(name: str | None) -> Embedding | None:
    """The gateway's own embedding, by its name; None where an endpoint embeds."""
    if name is None:
        return None
    return HASHED if name == HASHED.name else by_meaning(shipped(TABLE_FILE))


if __name__ == "__main__":
    os.nice(NICENESS)
    serve(sys.argv[1])
