"""Tensors on disk: a safetensors file fails to be written as any other file does."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

from safetensors import SafetensorError

SYSTEM_ERROR = re.compile(r"\(os error (\d+)\)")


@contextmanager
def file_errors() -> Iterator[None]:
    """Around `save_file` of safetensors. Raises OSError with the system's number in place of the writer's own error,
    which is no OSError: a full disk is then one line wherever others are."""
    try:
        yield
    except SafetensorError as error:
        match = SYSTEM_ERROR.search(str(error))
        number = int(match[1]) if match else errno.EIO
        raise OSError(number, os.strerror(number) if match else str(error)) from None
