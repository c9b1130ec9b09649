"""The ports of work that survives its gateway: requests in the background, and what is saved of one while it runs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol
from uuid import UUID

Status = Literal["queued", "in_progress", "cancelling", "done", "cancelled", "failed"]
OPEN: tuple[Status, ...] = ("queued", "in_progress", "cancelling")


@dataclass(frozen=True, slots=True)
class BackgroundRequest:
    """A response in the background. `body`: as the client sent it. `options`: headers of Baton's. `state`, `records`:
    what was saved of its work, by place; `state` is None before its first call. `status` done: its rollout is in the
    log and says how it ended; `error`: why there is no rollout. Times are microseconds since the epoch."""

    id: str
    key_id: str
    body: Mapping[str, Any]
    options: Mapping[str, str]
    status: Status
    created_us: int
    expires_us: int
    error: Mapping[str, Any] | None = None
    state: Mapping[str, Any] | None = None
    records: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def rollout_id(self) -> str:
        """The id of its rollout, and of the hold of its money."""
        return self.hold_of(self.id)

    @staticmethod
    def hold_of(response_id: str) -> str:
        """The id of the hold of a response."""
        return str(UUID(response_id.removeprefix("resp_")))

    @property
    def open(self) -> bool:
        """Whether it has not ended."""
        return self.status in OPEN


class BackgroundStore(Protocol):
    """Requests in the background. `runner` is the id of one gateway process; what it takes is its own until `lease_s`
    after the last `renew`. Every call raises Unavailable when the store is away."""

    async def create(self, request: BackgroundRequest, open_max: int) -> None:
        """Store a new request. Raises RateLimited for a key with `open_max` requests that have not ended."""
        ...

    async def get(self, key_id: str, response_id: str) -> BackgroundRequest | None:
        """A request of this key, without what was saved of its work."""
        ...

    async def cancel(self, key_id: str, response_id: str) -> BackgroundRequest | None:
        """Begin to cancel a request that has not ended, and return it as it is then. None: the key has no such
        request."""
        ...

    async def delete(self, key_id: str, response_id: str) -> bool:
        """Delete a request that has ended. Return whether the key had it."""
        ...

    async def take(self, runner: str, limit: int, lease_s: float) -> Sequence[BackgroundRequest]:
        """Claim up to `limit` requests that have not ended, oldest first, with what was saved of them. Those that
        another runner has claimed come once its lease is over."""
        ...

    async def save(
        self, response_id: str, runner: str, state: Mapping[str, Any], records: Mapping[str, Mapping[str, Any]]
    ) -> Status | None:
        """Save the state of a request and records of its work, by place; return its status. None, without a change, if
        the claim is lost."""
        ...

    async def end(self, response_id: str, runner: str, status: Status, error: Mapping[str, Any] | None = None) -> bool:
        """End a request, and forget what was saved of its work. One that is being cancelled ends as `cancelled`. False,
        without a change, if the claim is lost."""
        ...

    async def postpone(self, response_id: str, runner: str, delay_s: float) -> None:
        """Give a request back for `delay_s`."""
        ...

    async def renew(self, runner: str, response_ids: Sequence[str], lease_s: float) -> Collection[str]:
        """Renew these claims; return the ids of those that are being cancelled."""
        ...

    async def release(self, runner: str) -> None:
        """Give up the claims of this runner."""
        ...

    async def holds(self) -> Collection[str]:
        """The ids of the holds of all requests that have not ended."""
        ...

    async def sweep(self, limit: int) -> int:
        """Delete up to `limit` requests that ended long ago; return how many."""
        ...
