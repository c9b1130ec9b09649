"""A disk that takes only so much: the operating system itself refuses the bytes beyond it, in the middle of a write."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager

FULL = "File too large"  # what the system calls it


@contextmanager
def no_file_over(size: int) -> Iterator[None]:
    """No file that this process writes can grow beyond `size` bytes. Python ignores the signal, so the write fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
