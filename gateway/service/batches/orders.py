"""The use cases of batches, for the key that made them: create, read, list, cancel."""

from __future__ import annotations

from typing import Any

from gateway.core.access.keys import Principal
from gateway.core.log.events import random_hex
from gateway.core.openai.batches.objects import INPUT, BatchOrder, OpenBatch
from gateway.errors import BadRequest, Conflict, NotFound
from gateway.service.batches.files import listed
from gateway.service.ports.batches import BatchStore, FileStore
from gateway.service.ports.request import Clock

BATCHES_OPEN_MAX = 100  # of one key, that have not ended; each has a copy of the lines of its file
ENDED = ("completed", "failed", "expired", "cancelled")


class Orders:
    """Batches of one key. `runner` carries them out."""

    def __init__(self, store: BatchStore, files: FileStore, clock: Clock) -> None:
        self._store = store
        self._files = files
        self._clock = clock

    async def create(self, who: Principal, order: BatchOrder) -> dict[str, Any]:
        """Begin a batch. Raises BadRequest for an unknown file, RateLimited for too many open ones, Unavailable."""
        file = await self._files.get(who.public_id, order.input_file_id)
        if file is None or file.purpose != INPUT:
            problem = f"No such File object: {order.input_file_id}; upload one with purpose '{INPUT}'."
            raise BadRequest(problem, param="input_file_id", code="invalid_value")
        now_s = int(self._clock.now().timestamp())
        batch_id = f"batch_{random_hex()}"
        batch = OpenBatch(batch_id, who.public_id, order, "validating", now_s, now_s + order.window_s)
        await self._store.create(batch, BATCHES_OPEN_MAX)
        return batch.as_json()

    async def get(self, who: Principal, batch_id: str) -> dict[str, Any]:
        """A batch of this key. Raises NotFound, Unavailable."""
        batch = await self._store.get(who.public_id, batch_id)
        if batch is None:
            raise _unknown(batch_id)
        return batch.as_json()

    async def list(self, who: Principal, *, after: str | None, limit: int) -> dict[str, Any]:
        """A page of this key's batches, newest first. Raises NotFound for an unknown `after`, Unavailable."""
        page = await self._store.page(who.public_id, after=after, limit=limit + 1)
        return listed([batch.as_json() for batch in page], limit)

    async def cancel(self, who: Principal, batch_id: str) -> dict[str, Any]:
        """Serve no further line of a batch; lines under way end. Raises NotFound, Conflict for a batch that has ended,
        Unavailable."""
        batch = await self._store.cancel(who.public_id, batch_id, int(self._clock.now().timestamp()))
        if batch is None:
            raise _unknown(batch_id)
        if batch.status in ENDED and batch.status != "cancelled":
            raise Conflict(f"Cannot cancel a batch with status '{batch.status}'.", param="batch_id")
        return batch.as_json()


def _unknown(batch_id: str) -> NotFound:
    return NotFound(f"No batch found with id '{batch_id[:64]}'.", param="batch_id")
