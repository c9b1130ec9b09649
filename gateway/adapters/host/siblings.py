"""The processes that serve one gateway's public port: where each has its state, and what they ask of each other.

Each listens on a port of loopback of its own, named in `DIRECTORY/INDEX/run/port`, for health, metrics and flushes.

They also share counts: one file a count, one cell a process. A process writes its own cell and reads all. It adds first
and looks afterwards, so two processes that add at the same time may both be refused, and never both pass a limit. The
cell of a process that was killed counts until its successor clears it.
"""

from __future__ import annotations

import asyncio
import hashlib
import mmap
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

PORT_FILE = Path("run", "port")
REPLY_BYTES_MAX = 16 * 2**20
OK_LINE = b" 200 "
CELL = struct.Struct("=q")


@dataclass(frozen=True, slots=True)
class Siblings:
    """`count` processes with the indices from 1 on; `index` is that of this one, 0 where it only watches them."""

    directory: Path
    count: int
    index: int = 0

    @property
    def shared(self) -> Path:
        """The directory of shared counts."""
        return self.directory / "shared"

    def place(self, index: int) -> Path:
        """The data directory of a process."""
        return self.directory / str(index)

    def port_file(self, index: int) -> Path:
        """The file with the port on which a process answers its siblings."""
        return self.place(index) / PORT_FILE

    async def ask(self, path: str, limit_s: float) -> dict[int, bytes | None]:
        """The bodies of GET `path` from all other processes, by index; None where one does not answer 200 in time."""
        others = [index for index in range(1, self.count + 1) if index != self.index]
        bodies = await asyncio.gather(*(self.ask_one(index, path, limit_s) for index in others))
        return dict(zip(others, bodies, strict=True))

    async def ask_one(self, index: int, path: str, limit_s: float) -> bytes | None:
        """The body of GET `path` from one process; None where it does not answer 200 in time."""
        try:
            async with asyncio.timeout(limit_s), _connected(int(self.port_file(index).read_text())) as streams:
                reader, writer = streams
                writer.write(f"GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode())
                head, _, body = (await reader.read(-1)).partition(b"\r\n\r\n")
        except (OSError, ValueError):  # TimeoutError is an OSError
            return None
        return body if OK_LINE in head.split(b"\r\n", 1)[0] else None


@asynccontextmanager
async def _connected(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=REPLY_BYTES_MAX)
    try:
        yield reader, writer
    finally:
        writer.close()


# ---------------------------------------------------------------- counts


class SharedCount:
    """One count; `total` may be older than another process's last write by less than a microsecond."""

    def __init__(self, path: Path, process: int, processes: int) -> None:
        size = CELL.size * processes
        with path.open("a+b") as file:
            file.truncate(max(size, file.seek(0, 2)))
            self._cells = mmap.mmap(file.fileno(), size)
        self._offset = CELL.size * process
        self._all = struct.Struct(f"={processes}q")

    @property
    def own(self) -> int:
        """The count of this process."""
        return int(CELL.unpack_from(self._cells, self._offset)[0])

    @property
    def total(self) -> int:
        """The count of all processes."""
        return sum(self._all.unpack_from(self._cells))

    def put(self, number: int) -> None:
        """Set the count of this process."""
        CELL.pack_into(self._cells, self._offset, number)

    def add(self, number: int) -> None:
        """Change the count of this process."""
        self.put(self.own + number)

    def try_add(self, limit: int) -> bool:
        """Add one unless the total would be over `limit`; return whether it was added."""
        self.add(1)
        if self.total <= limit:
            return True
        self.add(-1)
        return False


class SharedCounts:
    """The counts in a directory, by name. `process` is the index of this process, from 0 to `processes` - 1."""

    def __init__(self, directory: Path, process: int, processes: int) -> None:
        self._directory = directory
        self._process = process
        self._processes = processes
        for path in directory.iterdir():  # what a killed predecessor counted
            count = SharedCount(path, process, processes)
            count.put(0)

    def count(self, name: str) -> SharedCount:
        """The count of that name, which the first process to ask makes."""
        file = hashlib.sha256(name.encode()).hexdigest()[:32]
        return SharedCount(self._directory / file, self._process, self._processes)
