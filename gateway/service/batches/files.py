"""The use cases of files: upload, read, list, delete. A file belongs to the key that made it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from gateway.core.access.keys import Principal
from gateway.core.log.events import random_hex
from gateway.core.openai.batches.objects import INPUT, UploadedFile
from gateway.errors import NotFound
from gateway.service.ports.batches import FileStore
from gateway.service.ports.request import Clock

PAGE_FILES_MAX = 10_000


class Files:
    """`keep_s`: how long an upload is kept that does not say, in seconds. `key_bytes_max`: what the files of one key
    may hold together."""

    def __init__(self, store: FileStore, clock: Clock, *, keep_s: int, key_bytes_max: int) -> None:
        self._store = store
        self._clock = clock
        self._keep_s = keep_s
        self._key_bytes_max = key_bytes_max

    async def upload(
        self, who: Principal, name: str, pieces: AsyncIterator[bytes], keep_s: int | None
    ) -> dict[str, Any]:
        """Store a file for batches. Raises TooLarge, Unavailable."""
        now_s = int(self._clock.now().timestamp())
        expires_s = now_s + (keep_s or self._keep_s)
        file = UploadedFile(f"file-{random_hex()}", who.public_id, name, INPUT, 0, now_s, expires_s)
        return (await self._store.add(file, pieces, self._key_bytes_max)).as_json()

    async def get(self, who: Principal, file_id: str) -> dict[str, Any]:
        """A file of this key. Raises NotFound, Unavailable."""
        return (await self._require(who, file_id)).as_json()

    async def list(
        self, who: Principal, *, purpose: str | None, after: str | None, limit: int, newest_first: bool
    ) -> dict[str, Any]:
        """A page of this key's files. Raises NotFound for an unknown `after`, Unavailable."""
        key = who.public_id
        page = await self._store.page(key, purpose=purpose, after=after, limit=limit + 1, newest_first=newest_first)
        return listed([file.as_json() for file in page], limit)

    async def content(self, who: Principal, file_id: str) -> tuple[UploadedFile, AsyncIterator[bytes]]:
        """A file of this key with its bytes. Raises NotFound, Unavailable."""
        file = await self._require(who, file_id)
        return file, self._store.content(file.id)

    async def delete(self, who: Principal, file_id: str) -> dict[str, Any]:
        """Delete a file of this key. A batch that has begun has its own copy of the requests. Raises NotFound,
        Unavailable."""
        if not await self._store.delete(who.public_id, file_id):
            raise _unknown(file_id)
        return {"id": file_id, "object": "file", "deleted": True}

    async def _require(self, who: Principal, file_id: str) -> UploadedFile:
        file = await self._store.get(who.public_id, file_id)
        if file is None:
            raise _unknown(file_id)
        return file


def listed(objects: list[dict[str, Any]], limit: int) -> dict[str, Any]:
    """A page of objects in OpenAI's form. `objects` has one more than `limit` where another page follows."""
    page = objects[:limit]
    ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": None, "last_id": None}
    return {"object": "list", "data": page, **ends, "has_more": len(objects) > limit}


def _unknown(file_id: str) -> NotFound:
    return NotFound(f"No such File object: {file_id[:64]}", param="id")
