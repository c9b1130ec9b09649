"""The port of stored responses: what the Responses API reads back from the log, and may have taken out of it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class LoggedResponse:
    """A rollout that was asked for as a response. `request` and `reply` are those of the chat it was served as."""

    id: str
    created_s: int
    finished_s: int
    status: str  # of the rollout: done | failed | aborted
    request: Mapping[str, Any]
    reply: Mapping[str, Any] | None
    error: Mapping[str, Any] | None

    @property
    def stored(self) -> bool:
        """Whether it can be read back: it was to be stored, its key's log keeps text, and nobody has deleted it."""
        return "response" in self.request


class ResponseStore(Protocol):
    """Responses by id, one key at a time. Every call raises Unavailable when the store is away."""

    async def find(self, response_ids: Collection[str], key_id: str) -> Mapping[str, LoggedResponse]:
        """Those of them that the log has."""
        ...

    async def erase(self, response_id: str, key_id: str) -> bool:
        """Take every text out of the rollout's tree, as if the key logged metadata only; it is never trained on.

        What it cost, how long it took and who worked stays. False where the log has no such response.
        """
        ...
