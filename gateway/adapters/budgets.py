"""Budgets in Redis: each call is one run of `budgets.lua`, so all scopes change together or not at all.

Redis is a fenced cache of the ledger. Every call carries the epoch of the rebuild it believes in; a Redis that was
flushed, restarted or replaced by a replica does not know that epoch, and then all money is refused until `load`.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from gateway.adapters.redis_script import RedisAway, RedisScript
from gateway.core.ledger import (
    Balance,
    Hold,
    Scope,
    Settled,
    budget_exceeded,
    check_hold,
    check_nano,
    hold_closed,
    hold_unknown,
)
from gateway.errors import MoneyUnavailable
from gateway.service.ports import OPEN_LEASE_S

log = logging.getLogger("gateway.budgets")
_FILL_SCOPES = 1000  # a rebuild sends this many scopes a call, so that no call blocks Redis for long
_NOT_ON_A_HOLD = frozenset({"begin", "fill", "commit", "expired", "balance", "ping"})
_OPEN_MAX = 100_000  # holds remembered for a rebuild; far above what one process has in flight


class RedisBudgets:
    """The Budgets port. `prefix` keeps deployments on one Redis apart; it is the hash tag of every key."""

    def __init__(self, url: str, *, prefix: str = "baton", deadline_s: float = 0.2, connections_max: int = 64) -> None:
        self._script = RedisScript(url, "budgets.lua", deadline_s=deadline_s, connections_max=connections_max)
        tag = "{" + prefix + "}"
        self._keys = [f"{tag}:{name}" for name in ("epoch", "posted", "held", "open")]
        self._hold_prefix = f"{tag}:hold:"
        self._epoch = b""
        self._loading = asyncio.Lock()
        self._open: dict[str, tuple[Hold, int]] = {}  # with the lease in ms: what a rebuild must put back

    @property
    def epoch_lost(self) -> bool:
        return not self._epoch

    async def hold(
        self, hold_id: str, amount_nano: int, amount_min_nano: int, scopes: Sequence[Scope], lease_s: float
    ) -> Hold:
        check_hold(amount_nano, amount_min_nano, scopes)
        limits = [part for s in scopes for part in (s.name, "" if s.limit_nano is None else s.limit_nano)]
        lease_ms = round(lease_s * 1000)
        status, *rest = await self._run("hold", hold_id, amount_nano, amount_min_nano, lease_ms, *limits)
        if status == b"refused":
            raise budget_exceeded(scopes[rest[0]], rest[1], amount_min_nano)
        if status == b"closed":
            raise hold_closed(hold_id)
        hold = Hold(hold_id, rest[0], tuple(scopes))
        self._remember(hold, lease_ms)
        return hold

    async def post(self, hold_id: str, actual_nano: int) -> int:
        return await self._settle(hold_id, "posted", check_nano(actual_nano))

    async def void(self, hold_id: str) -> int:
        return await self._settle(hold_id, "voided")

    async def uncertain(self, hold_id: str) -> int:
        return await self._settle(hold_id, "uncertain")

    async def renew(self, hold_id: str, lease_s: float) -> bool:
        _, renewed = await self._run("renew", hold_id, round(lease_s * 1000))
        return bool(renewed)

    async def expired(self, limit: int) -> Sequence[str]:
        _, ids = await self._run("expired", limit)
        return [hold_id.decode() for hold_id in ids]

    async def balance(self, scope: str) -> Balance:
        _, posted, held = await self._run("balance", scope)
        return Balance(posted, held)

    async def load(
        self, posted: Mapping[str, int], open_holds: Sequence[Hold] = (), lease_s: float = OPEN_LEASE_S
    ) -> None:
        for amount in posted.values():
            check_nano(amount)
        async with self._loading:
            epoch = await self._rebuild(posted)
            given = {hold.id: (hold, round(lease_s * 1000)) for hold in open_holds}
            for hold, lease_ms in list((given | self._open).values()):
                names = [scope.name for scope in hold.scopes]
                await self._run("restore", hold.id, hold.granted_nano, lease_ms, *names, epoch=epoch)
            self._epoch = epoch

    async def ready(self) -> bool:
        try:
            await self._run("ping")
        except MoneyUnavailable:
            return False
        return True

    async def close(self) -> None:
        await self._script.close()

    async def _settle(self, hold_id: str, state: Settled, actual_nano: int = 0) -> int:
        status, *rest = await self._run("settle", hold_id, state, actual_nano)
        self._open.pop(hold_id, None)
        if status == b"unknown":
            raise hold_unknown(hold_id)
        return int(rest[0])

    async def _rebuild(self, posted: Mapping[str, int]) -> bytes:
        """The new epoch, or the one in force: nothing was lost, or another gateway has rebuilt."""
        token = secrets.token_hex(8)
        status, *joined = await self._run("begin", token)
        if status == b"join":
            return bytes(joined[0])
        scopes = iter(posted.items())
        while chunk := list(islice(scopes, _FILL_SCOPES)):
            await self._run("fill", token, *(part for pair in chunk for part in pair))
        _, epoch = await self._run("commit", token)
        return bytes(epoch)

    async def _run(self, op: str, *args: str | int, epoch: bytes | None = None) -> list[Any]:
        """[status, …]. Raises MoneyUnavailable when Redis is away or fences this process out."""
        sent = self._epoch if epoch is None else epoch
        hold = self._hold_prefix if op in _NOT_ON_A_HOLD else f"{self._hold_prefix}{args[0]}"
        try:
            reply = await self._script([*self._keys, hold], [op, sent, *args])
        except RedisAway as error:
            log.warning("the budget store is away: %s", error)
            raise _unavailable("the budget store is away") from error
        if reply[0] == b"stale":
            if sent == self._epoch:
                self._epoch = b""
            raise _unavailable("the budget store was restarted or emptied and is rebuilding from the ledger")
        return reply

    def _remember(self, hold: Hold, lease_ms: int) -> None:
        self._open.setdefault(hold.id, (hold, lease_ms))
        if len(self._open) > _OPEN_MAX:
            del self._open[next(iter(self._open))]


def _unavailable(why: str) -> MoneyUnavailable:
    return MoneyUnavailable(f"No money can be reserved now: {why}. Retry shortly.", headers={"retry-after": "1"})
