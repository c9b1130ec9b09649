"""Replace a file in one step: a reader sees the old content or the new, never a part. And read a file that ships."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.resources import files
from pathlib import Path
from typing import BinaryIO

DATA = "data"  # the folder of files that ship with the gateway
PLAIN_MODE = 0o666  # the umask is taken off, as for any new file


@contextmanager
def replacing(path: Path, *, mode: int = PLAIN_MODE, durable: bool = True) -> Iterator[BinaryIO]:
    """Yield a binary file that replaces `path` when the block ends without an error.

    The file is `.NAME.tmp` in the same directory, so a path has one writer at a time. With `durable`, the content and
    the name are on disk when the block has ended. Raises OSError and whatever the block raises; `path` then keeps its
    old content and the temporary file is deleted.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    handle = _created(temporary, mode)
    try:
        with open(handle, "wb") as file:
            yield file
            if durable:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:  # boundary: the unfinished file is deleted, the error goes on
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    if durable:
        sync_directory(path.parent)


def _created(path: Path, mode: int) -> int:
    """Create a file and return its handle; delete what a killed writer left at that path."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    try:
        return os.open(path, flags, mode)
    except FileExistsError:
        path.unlink(missing_ok=True)
        return os.open(path, flags, mode)


def write_atomic(path: Path, data: bytes | str, *, mode: int = PLAIN_MODE, durable: bool = True) -> None:
    """Replace a file with `data`, a str as UTF-8. Parameters and errors are those of `replacing`."""
    with replacing(path, mode=mode, durable=durable) as file:
        file.write(data.encode() if isinstance(data, str) else data)


class NotPlain(OSError):
    """A link, a pipe or a device where a plain file is wanted."""


def open_plain(path: Path) -> BinaryIO:
    """Open a plain file to read; no link is followed and no pipe is waited for. Raises NotPlain, OSError."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise NotPlain(f"{path} is a link") from None
        raise
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise NotPlain(f"{path} is no plain file")
    return open(handle, "rb")


def sync_directory(directory: Path) -> None:
    """Make creations, renames and removals in a directory durable. Raises OSError."""
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def shipped(name: str) -> bytes:
    """Read a data file of this package. Raises OSError."""
    return files(__package__).joinpath(DATA, name).read_bytes()
