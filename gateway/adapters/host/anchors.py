"""Heads of the audit in a file of the data directory: one line each, appended and never rewritten."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from gateway.core.access.audit import Anchor

ANCHORS = "audit.anchors"  # in the data directory
READ_BYTES_MAX = 64 << 20
HASH_CHARS = 64


class AnchorFile:
    """The port Anchors. Several processes may append to one file: a line is one write."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def add(self, anchor: Anchor, at: datetime) -> None:
        await asyncio.to_thread(self._add, f"{anchor.seq} {anchor.hash.hex()} {at.isoformat()}\n".encode())

    async def all(self) -> Sequence[Anchor]:
        return await asyncio.to_thread(self._all)

    def _add(self, line: bytes) -> None:
        file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(file, line)
            os.fsync(file)
        finally:
            os.close(file)

    def _all(self) -> list[Anchor]:
        """The latest anchors, within READ_BYTES_MAX. Lines that are not anchors, such as one cut by a crash, are
        skipped."""
        try:
            with self._path.open("rb") as file:
                file.seek(max(0, self._path.stat().st_size - READ_BYTES_MAX))
                lines = file.read(READ_BYTES_MAX).split(b"\n")
        except FileNotFoundError:
            return []
        fields = [line.decode("ascii", "replace").split(" ") for line in lines]
        return [
            Anchor(int(parts[0]), bytes.fromhex(parts[1]))
            for parts in fields
            if len(parts) == 3 and parts[0].isdigit() and _is_hash(parts[1])
        ]


def _is_hash(text: str) -> bool:
    return len(text) == HASH_CHARS and all(char in "0123456789abcdef" for char in text)
