"""The journal's files: segments of checked records, the mark of what was shipped, the lock. Blocking; run in a thread.

    000000000001.log   record*          record = length (4 bytes, little-endian) ‖ CRC-32 (4) ‖ payload
    000000000002.log                    the CRC (zlib's) covers length and payload
    000000000001.bad                    a segment with a damaged record, kept until `baton journal recover`
    000000000001.recovered              the same after it
    shipped                             {"offset": …, "segment": …}: all before it is in PostgreSQL
    lock                                held by the one process that writes here

A segment is only ever appended to. What a crash leaves half-written is at the very end, was never acknowledged, and is
cut. A bad record with good ones after it is no such tail: it is damage, and reading goes on with the next good one.
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import re
import shutil
import struct
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

from gateway.errors import ConfigError
from gateway.files import sync_directory, write_atomic

HEADER = struct.Struct("<II")
PAYLOAD_START = b'{"id":'  # the start of every event's canonical form
NO_SPACE = {errno.ENOSPC, errno.EDQUOT}
_NAME = re.compile(r"^(\d{12})\.(log|bad|recovered)$")
DAMAGE_BYTES_MAX = 64 << 10  # of damaged bytes, that are stored
_ABOUT = re.compile(rb'"(?:hold_id|kind|rollout_id)":"([\w.:-]{1,64})"')
_MARK = "shipped"
RECORDS_AT_ONCE, BYTES_AT_ONCE = 500, 4 << 20
MARK_S = 1.0  # between two writes of the mark, which take four system calls that wait for the disk


class Position(NamedTuple):
    """A byte of the journal. Positions compare in the order in which records were written."""

    segment: int
    offset: int


class NoSpace(OSError):
    """The disk is full; the segment is as it was before the write."""


def encode(payload: bytes) -> bytes:
    """Encode one record."""
    length = len(payload).to_bytes(4, "little")
    return HEADER.pack(len(payload), zlib.crc32(payload, zlib.crc32(length))) + payload


def _payload(file: BinaryIO, left: int) -> bytes | None:
    """The next record's payload, if header and payload have at most `left` bytes. None if there is no good record."""
    header = file.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    length, crc = HEADER.unpack(header)
    if not 0 < length <= left - HEADER.size:
        return None
    payload = file.read(length)
    return payload if zlib.crc32(payload, zlib.crc32(header[:4])) == crc else None


@dataclass(frozen=True, slots=True)
class Chunk:
    """Payloads in order; `end` is the offset after the last one. `bad`: the bytes at `end` are not a record."""

    payloads: list[bytes]
    end: int
    bad: bool = False


def read(path: Path, offset: int, until: int, *, records_max: int, bytes_max: int) -> Chunk:
    """Read records from `offset` to `until`: at most `records_max` and `bytes_max`, but at least one."""
    payloads: list[bytes] = []
    start = offset
    with path.open("rb") as file:
        file.seek(offset)
        while offset < until and len(payloads) < records_max:
            payload = _payload(file, until - offset)
            if payload is None:
                return Chunk(payloads, offset, bad=True)
            size = HEADER.size + len(payload)
            if payloads and offset - start + size > bytes_max:
                break
            payloads.append(payload)
            offset += size
    return Chunk(payloads, offset)


def good_end(path: Path) -> int:
    """The offset after the last good record before the first bad one."""
    end, size = 0, path.stat().st_size
    with path.open("rb") as file:
        while end < size and (payload := _payload(file, size - end)) is not None:
            end += HEADER.size + len(payload)
    return end


def cut_torn_tail(path: Path) -> int:
    """Cut a record that a crash left half-written; return the number of bytes cut. Damage (see above) is left as it
    is."""
    end = good_end(path)
    with path.open("r+b") as file:
        file.seek(end)
        rest = file.read()
        if not rest or _next_record(rest) < len(rest):
            return 0
        file.truncate(end)
        os.fsync(file.fileno())
    return len(rest)


def _next_record(data: bytes) -> int:
    """The offset of the first complete good record in `data`; its length where there is none."""
    start = data.find(PAYLOAD_START, HEADER.size)
    while start >= 0:
        length, crc = HEADER.unpack_from(data, start - HEADER.size)
        payload = data[start : start + length]
        if len(payload) == length and zlib.crc32(payload, zlib.crc32(data[start - 8 : start - 4])) == crc:
            return start - HEADER.size
        start = data.find(PAYLOAD_START, start + 1)
    return len(data)


@dataclass(frozen=True, slots=True)
class Damage:
    """What stands between two good records. `start`: the first DAMAGE_BYTES_MAX of its bytes; `end`: the offset of the
    next good record, else that of the end."""

    start: bytes
    size: int
    end: int

    @property
    def about(self) -> str:
        """What can be read of it, such as a kind of event and the id of a hold; empty where nothing can."""
        return " ".join(dict.fromkeys(match[1].decode() for match in _ABOUT.finditer(self.start)))[:200]


def damage(path: Path, offset: int, until: int) -> Damage:
    """The damage at `offset`, in what was written before `until`."""
    with path.open("rb") as file:
        file.seek(offset)
        rest = file.read(until - offset)
    size = _next_record(rest)
    return Damage(rest[: min(size, DAMAGE_BYTES_MAX)], size, offset + size)


def every_record(path: Path) -> Iterator[bytes | Damage]:
    """Each good record of a segment, and each damage between them, in order."""
    offset, size = 0, path.stat().st_size
    while offset < size:
        chunk = read(path, offset, size, records_max=RECORDS_AT_ONCE, bytes_max=BYTES_AT_ONCE)
        yield from chunk.payloads
        offset = chunk.end
        if chunk.bad:
            yield (lost := damage(path, offset, size))
            offset = lost.end


@dataclass(frozen=True, slots=True)
class EventBatch:
    """Payloads in order and the position after them. `lost`: the bytes at that position, which are not a record."""

    payloads: list[bytes]
    position: Position
    lost: Damage | None = None


class Segment:
    """The file that is being written. After any error but NoSpace its state is unknown: do not use it again."""

    def __init__(self, directory: Path, number: int) -> None:
        self.number = number
        self.size = 0
        try:
            flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_APPEND
            self._fd = os.open(segment_path(directory, number), flags, 0o600)
        except OSError as error:
            raise _as_no_space(error) from error
        sync_directory(directory)

    def append(self, blob: bytes) -> None:
        """Write and fdatasync. Raises NoSpace, after it cut the file back to its old end, or OSError."""
        try:
            view = memoryview(blob)
            while view:
                view = view[os.write(self._fd, view) :]
        except OSError as error:
            os.ftruncate(self._fd, self.size)
            raise _as_no_space(error) from error
        os.fdatasync(self._fd)  # after an error here it is unknown which pages are on disk: fatal, never retried
        self.size += len(blob)

    def close(self) -> None:
        os.close(self._fd)


def _as_no_space(error: OSError) -> OSError:
    return NoSpace(*error.args) if error.errno in NO_SPACE else error


def segment_path(directory: Path, number: int, ending: str = "log") -> Path:
    return directory / f"{number:012d}.{ending}"


def numbers(directory: Path, ending: str = "log") -> list[int]:
    """Numbers of the segments in the directory, oldest first."""
    matches = (_NAME.match(path.name) for path in directory.iterdir())
    return sorted(int(match[1]) for match in matches if match and match[2] == ending)


def damaged(journal: Path) -> list[Path]:
    """The damaged segments of a journal and of those of its processes that nobody has recovered."""
    places = [place for place in (journal, *sorted(journal.glob("process-*"))) if place.is_dir()]
    return [segment_path(place, number, "bad") for place in places for number in numbers(place, "bad")]


def set_aside(directory: Path, number: int) -> Path:
    """Keep a damaged segment under another name, which is neither read nor deleted; return its path."""
    path, aside = segment_path(directory, number), segment_path(directory, number, "bad")
    with suppress(FileExistsError):
        try:
            os.link(path, aside)
        except OSError as error:
            if isinstance(error, FileExistsError):
                raise
            shutil.copyfile(path, aside)  # a disk without links
    sync_directory(directory)
    return aside


def read_mark(directory: Path) -> Position:
    """Where shipping continues. Without a usable mark it starts from the beginning: shipping twice does no harm."""
    try:
        mark = json.loads((directory / _MARK).read_bytes())
        return Position(int(mark["segment"]), int(mark["offset"]))
    except (OSError, ValueError, KeyError, TypeError):
        return Position(0, 0)


def write_mark(directory: Path, mark: Position) -> None:
    """Replace the mark, durably, in one step."""
    write_atomic(directory / _MARK, json.dumps(mark._asdict(), sort_keys=True))


class ShippedMark:
    """The mark of a journal, which may lag behind what was shipped."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._position = Position(0, 0)  # as written last
        self._written_s = -math.inf

    @property
    def is_old(self) -> bool:
        """Whether it was not written for MARK_S."""
        return time.monotonic() - self._written_s >= MARK_S

    def write(self, position: Position) -> None:
        """Write it. Raises OSError."""
        write_mark(self._directory, position)
        self._position, self._written_s = position, time.monotonic()

    def close(self, position: Position) -> None:
        """Write it for the last time, where it lags behind. Raises OSError."""
        if self._position < position:
            self.write(position)


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Lock the directory for this process. Raises ConfigError, which names it, if another process holds it."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (directory / "lock").open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"the journal in {directory} is in use by another process; stop it, or give this one a directory "
                "of its own"
            ) from None
        yield
