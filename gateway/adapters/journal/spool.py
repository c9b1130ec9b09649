"""The write-ahead journal (port `Journal`): an event is on this host's disk before `append` returns.

Appenders queue; what came in one turn of the event loop, or during the commit before, is written with one write and one
fdatasync in a thread of its own, which wakes them all. The other side, used by the shipper: `read` from a position on,
`acknowledge` what is in PostgreSQL (the mark is durable before any segment is deleted), `set_aside` a damaged part.

    disk full            that append raises SpoolFull; the next one tries again
    queue or spool full  SpoolFull; new holds are refused first, so that requests under way can still be logged
    fsync failed         broken for good: every append raises Unavailable, `on_fatal` is called once
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from gateway.adapters.journal import segments
from gateway.adapters.journal.disk import DiskThread
from gateway.adapters.journal.segments import Damage, EventBatch, NoSpace, Position, Segment
from gateway.core.log.events import Event, canonical
from gateway.errors import SpoolFull, TooLarge, Unavailable

log = logging.getLogger("gateway.spool")
MIB = 2**20
LAG_STEP_S = 0.2
TORN = "no whole record, as a crash leaves them before anybody is told that they are written, or damage at the very end"


@dataclass(frozen=True, slots=True)
class SpoolLimits:
    """`reserve_bytes`: the last part of `total_bytes`, at most a quarter, reserved for requests that already hold
    money."""

    segment_bytes: int = 16 * MIB
    total_bytes: int = 4096 * MIB
    reserve_bytes: int = 64 * MIB
    queue_records: int = 10_000
    queue_bytes: int = 256 * MIB  # more than all bodies that are served at the same time
    batch_bytes: int = 4 * MIB
    record_bytes: int = 96 * MIB
    shipped_timeout_s: float = 5.0


class LogWatch(Protocol):
    """Callbacks for figures of the log. They run on the event loop and must not block."""

    def appended(self, records: int, bytes_: int, seconds: float) -> None: ...
    def spool_bytes(self, bytes_: int) -> None: ...
    def shipped(self, records: int, lag_s: float) -> None: ...
    def rollouts_stored(self, logged_us: Sequence[int]) -> None:
        """These rollouts of requests are in PostgreSQL: the time when each was logged, µs since 1970."""

    def retrying(self, error: str, wait_s: float) -> None: ...
    def dead_letter(self, kind: str | None, error: str) -> None: ...
    def damaged(self, what: str, path: str, bytes_: int) -> None:
        """`what`: torn (cut after a crash) | corrupt (set aside; records after the damage are in that file only)."""


class Quiet:
    """A watch that counts nothing."""

    def appended(self, records: int, bytes_: int, seconds: float) -> None: ...
    def spool_bytes(self, bytes_: int) -> None: ...
    def shipped(self, records: int, lag_s: float) -> None: ...
    def rollouts_stored(self, logged_us: Sequence[int]) -> None: ...
    def retrying(self, error: str, wait_s: float) -> None: ...
    def dead_letter(self, kind: str | None, error: str) -> None: ...
    def damaged(self, what: str, path: str, bytes_: int) -> None: ...


@dataclass(frozen=True, slots=True)
class _Queued:
    """The events of one `append`, and the future that it waits for."""

    blob: bytes
    records: int
    written: asyncio.Future[None]


class Spool:
    """Open with `Spool.open`. One per directory, one event loop."""

    def __init__(
        self, directory: Path, limits: SpoolLimits, watch: LogWatch, on_fatal: Callable[[BaseException], None]
    ) -> None:
        self.directory, self.limits, self.watch = directory, limits, watch
        self._on_fatal = on_fatal
        self._disk = DiskThread("spool")
        self._held = ExitStack()
        self._file: Segment | None = None  # touched in that thread only
        self._next = 1
        self._sizes: dict[int, int] = {}  # durable bytes of each segment on disk, oldest first
        self._durable = self._acked = Position(0, 0)
        self._queue: deque[_Queued] = deque()
        self._queued_bytes = 0
        self._closed = self._no_space = False  # the latter of the latest commit
        self._broken: BaseException | None = None
        self._idle, self._grown, self._acks = asyncio.Event(), asyncio.Event(), asyncio.Condition()
        self._idle.set()  # no commit is under way
        self._wanted = asyncio.Event()
        self._unshipped: deque[tuple[Position, float]] = deque()  # ends of commits, and when they came (monotonic s)
        self._mark = segments.ShippedMark(directory)
        self._is_locked = True

    @classmethod
    async def open(
        cls,
        directory: Path,
        limits: SpoolLimits | None = None,
        watch: LogWatch | None = None,
        on_fatal: Callable[[BaseException], None] = lambda error: None,
    ) -> Spool:
        """Lock the directory, cut a torn tail and open the last segment. Raises ConfigError if the directory is in
        use."""
        spool = cls(directory, limits or SpoolLimits(), watch or Quiet(), on_fatal)
        try:
            torn = await spool._disk.call(spool._load)
        except BaseException:  # boundary: the thread ends and the error goes on
            spool._disk.close()
            raise
        if torn:
            log.warning("cut %d bytes at the end of the journal in %s: %s", torn, directory, TORN)
            spool.watch.damaged("torn", str(directory), torn)
        return spool

    def _load(self) -> int:
        self._held.enter_context(segments.locked(self.directory))
        found, torn = segments.numbers(self.directory), 0
        if found:
            torn = segments.cut_torn_tail(segments.segment_path(self.directory, found[-1]))
        self._sizes = {n: segments.segment_path(self.directory, n).stat().st_size for n in found}
        self._acked = segments.read_mark(self.directory)
        aside = [number for ending in ("bad", "recovered") for number in segments.numbers(self.directory, ending)]
        taken = [*found, *aside, self._acked.segment]
        self._next = max(taken) + 1
        self._durable = Position(found[-1], self._sizes[found[-1]]) if found else self._acked
        if self._acked > self._durable or self._acked.offset > self._sizes.get(self._acked.segment, self._acked.offset):
            self._acked = Position(0, 0)  # the mark is from other segments: ship everything again
        if self._durable > self._acked:  # an earlier process wrote these
            oldest = segments.segment_path(self.directory, found[0]).stat().st_mtime
            self._unshipped.append((self._durable, time.monotonic() - max(0.0, time.time() - oldest)))
        return torn

    # ---------------------------------------------------------------- appending

    def append(self, *events: Event) -> asyncio.Future[None]:
        """Done once the events are durable, all or none of them. Cancelling it does not undo this. Raises SpoolFull
        (queue, spool or disk), TooLarge, Unavailable (closed, or broken by an fsync error)."""
        loop = asyncio.get_running_loop()
        written: asyncio.Future[None] = loop.create_future()
        try:
            records = [segments.encode(canonical(event)) for event in events]
            self._admit([len(record) for record in records], new_work=any(event.kind == "hold" for event in events))
        except Exception as error:  # boundary: whoever waits gets it
            written.set_exception(error)
            return written
        blob = b"".join(records)
        self._queue.append(_Queued(blob, len(records), written))
        self._queued_bytes += len(blob)
        if self._idle.is_set():
            self._idle.clear()
            loop.call_soon(self._commit)
        return written

    def _admit(self, sizes: Sequence[int], *, new_work: bool) -> None:
        limits, size = self.limits, sum(sizes)
        if self._broken is not None:
            raise Unavailable("the journal's disk failed; this gateway must be restarted", code="journal_broken")
        if self._closed:
            raise Unavailable("the journal is closed: the gateway is stopping", code="shutting_down")
        if (largest := max(sizes, default=0)) > limits.record_bytes:
            raise TooLarge(f"a log record of {largest} bytes is over the limit of {limits.record_bytes}")
        if len(self._queue) >= limits.queue_records or self._queued_bytes + size > limits.queue_bytes:
            raise SpoolFull("the journal's queue is full: its disk is too slow for this load")
        usable = limits.total_bytes - (min(limits.reserve_bytes, limits.total_bytes // 4) if new_work else 0)
        if self.bytes_on_disk + self._queued_bytes + size > usable:
            raise SpoolFull("the journal is full: PostgreSQL has been away for too long")

    @property
    def bytes_on_disk(self) -> int:
        """Bytes of all segments not yet deleted."""
        return sum(self._sizes.values())

    def _take(self) -> list[_Queued]:
        batch = [self._queue.popleft()]
        size = len(batch[0].blob)
        while self._queue and size + len(self._queue[0].blob) <= self.limits.batch_bytes:
            batch.append(self._queue.popleft())
            size += len(batch[-1].blob)
        self._queued_bytes -= size
        return batch

    def _commit(self) -> None:
        """Write what is queued, and again what has come meanwhile."""
        if not self._queue:
            self._idle.set()
            return
        batch = self._take()
        blob = b"".join(each.blob for each in batch)
        self._disk.run(partial(self._committed, batch, len(blob), time.monotonic()), self._write, blob)

    def _committed(
        self, batch: list[_Queued], size: int, began_s: float, position: Position | None, error: BaseException | None
    ) -> None:
        try:
            if position is not None:
                self._note(position)
                _settle(batch, None)
                self.watch.appended(sum(each.records for each in batch), size, time.monotonic() - began_s)
                self.watch.spool_bytes(self.bytes_on_disk)
            elif isinstance(error, NoSpace):
                self._no_space = True
                log.error("no space left for the journal in %s", self.directory)
                _settle(batch, SpoolFull("no space left on the journal's disk"))
            else:
                self._break(error or RuntimeError("the journal's writer ended"))
                _settle(batch, Unavailable("the journal's disk failed", code="journal_broken"))
        except BaseException as bug:  # boundary: after any error, no appender waits for ever
            self._break(bug)
            _settle(batch, Unavailable("the journal's writer failed", code="journal_broken"))
        self._commit()

    def _note(self, position: Position) -> None:
        """Everything before `position` is on disk now."""
        self._durable, self._no_space = position, False
        self._sizes[position.segment] = position.offset
        came_s = time.monotonic()
        if self._unshipped and came_s - self._unshipped[-1][1] <= LAG_STEP_S:
            came_s = self._unshipped.pop()[1]  # counted as that commit, which is older
        self._unshipped.append((position, came_s))
        self._grown.set()

    def _write(self, blob: bytes) -> Position:
        if self._file is not None and self._file.size >= self.limits.segment_bytes:
            self._close_file()
        if self._file is None:
            self._file = Segment(self.directory, self._next)
            self._next += 1
        self._file.append(blob)
        return Position(self._file.number, self._file.size)

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _break(self, error: BaseException) -> None:
        if self._broken is None:
            self._broken = error
            log.critical("the journal in %s is broken: %r", self.directory, error)
            waiting, self._queue = list(self._queue), deque()
            _settle(waiting, Unavailable("the journal's disk failed", code="journal_broken"))
            self._on_fatal(error)

    async def close(self) -> None:
        """Write what is queued, refuse new events, and unlock the directory. Idempotent."""
        self._closed = True
        await self._idle.wait()
        if self._is_locked:
            self._is_locked = False
            await self._disk.call(self._close_file)
            with suppress(OSError):  # without the mark, records are shipped again
                await self._disk.call(self._mark.close, self._acked)
            self._disk.close()
            self._held.close()

    # ---------------------------------------------------------------- shipping

    @property
    def durable(self) -> Position:
        """Everything before this position is on disk."""
        return self._durable

    @property
    def acknowledged(self) -> Position:
        """Everything before this position is in PostgreSQL."""
        return self._acked

    @property
    def lag_s(self) -> float:
        """Age of the oldest record that is not in PostgreSQL, in seconds, to LAG_STEP_S; 0.0 if there is none."""
        return time.monotonic() - self._unshipped[0][1] if self._unshipped else 0.0

    def has_room(self, disk_free_bytes_min: int) -> bool:
        """Whether a new request can be logged: the journal works and has room, and its disk that many bytes."""
        limits = self.limits
        usable = limits.total_bytes - min(limits.reserve_bytes, limits.total_bytes // 4)
        if self._broken is not None or self._closed or self.bytes_on_disk >= usable:
            return False
        return self.disk_free_bytes() >= (max(1, disk_free_bytes_min) if self._no_space else disk_free_bytes_min)

    def disk_free_bytes(self) -> int:
        """Bytes that this process may still write on the journal's disk. Raises OSError."""
        disk = os.statvfs(self.directory)
        return disk.f_bavail * disk.f_frsize

    async def read(self, position: Position, *, records_max: int, bytes_max: int) -> EventBatch:
        """Read records from `position` on, within one segment and the bounds; the batch is empty if there are none.
        Raises OSError if the disk cannot be read."""
        if (start := self._readable(position)) is None:
            return EventBatch([], position)
        path, until = segments.segment_path(self.directory, start.segment), self._sizes[start.segment]
        chunk = await asyncio.to_thread(
            partial(segments.read, path, start.offset, until, records_max=records_max, bytes_max=bytes_max)
        )
        lost = await asyncio.to_thread(segments.damage, path, chunk.end, until) if chunk.bad else None
        return EventBatch(chunk.payloads, Position(start.segment, chunk.end), lost)

    def _readable(self, position: Position) -> Position | None:
        if position.offset < self._sizes.get(position.segment, 0):
            return position
        later = [number for number in self._sizes if number > position.segment]
        return Position(min(later), 0) if later else None

    async def wait_unshipped(self) -> None:
        """Wait until there is something to ship. Only one reader may wait."""
        while self._durable <= self._acked:
            self._grown.clear()
            await self._grown.wait()

    async def wait_wanted(self, limit_s: float) -> None:
        """Wait `limit_s`, or until a caller waits for the log to be shipped."""
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._wanted.wait()
        self._wanted.clear()

    async def acknowledge(self, position: Position) -> None:
        """Everything before `position` is in PostgreSQL: store that durably, now and then, and before the segments in
        front of it are deleted. After a crash, what is behind the mark is shipped again, which is harmless."""
        done = [number for number in self._sizes if number < position.segment]
        if done or self._mark.is_old:
            await asyncio.to_thread(self._forget, position, done)
        for number in done:
            self._sizes.pop(number, None)
        async with self._acks:
            self._acked = position
            while self._unshipped and self._unshipped[0][0] <= position:
                self._unshipped.popleft()
            self._acks.notify_all()
        self.watch.spool_bytes(self.bytes_on_disk)

    def _forget(self, mark: Position, done: list[int]) -> None:
        try:
            self._mark.write(mark)
        except OSError as error:
            # On a full disk the mark may only fit after shipped segments are deleted. Without it, what is left is
            # shipped again after a restart, which is harmless.
            if error.errno not in segments.NO_SPACE:
                raise
        for number in done:
            segments.segment_path(self.directory, number).unlink(missing_ok=True)

    async def set_aside(self, position: Position) -> Position:
        """Keep the segment that is damaged at `position` as `.bad`; returns (and acknowledges) the position of the next
        good record."""
        aside, lost = await self._disk.call(self._set_aside, position, self._sizes[position.segment])
        about = f" ({lost.about})" if lost.about else ""
        where = position.offset, lost.size, about, aside
        log.error("journal damaged at byte %d: %d bytes are no record%s; dead_letters has them, and %s is kept", *where)
        self.watch.damaged("corrupt", str(aside), lost.size)
        end = Position(position.segment, lost.end)
        await self.acknowledge(end)
        return end

    def _set_aside(self, position: Position, until: int) -> tuple[Path, Damage]:
        if self._file is not None and self._file.number == position.segment:
            self._close_file()
        path = segments.segment_path(self.directory, position.segment)
        lost = segments.damage(path, position.offset, until)
        return segments.set_aside(self.directory, position.segment), lost

    async def shipped(self) -> None:
        """Wait until everything that is durable now is in PostgreSQL. Raises TimeoutError (`shipped_timeout_s`)."""
        target = self._durable
        self._wanted.set()
        async with asyncio.timeout(self.limits.shipped_timeout_s), self._acks:
            await self._acks.wait_for(lambda: self._acked >= target)


def _settle(batch: Iterable[_Queued], error: Exception | None) -> None:
    """Wake every appender that still waits."""
    for each in batch:
        if each.written.done():
            continue
        if error is None:
            each.written.set_result(None)
        else:
            each.written.set_exception(error)
