"""Who plans in each pool, from the settings and the judged requests in the log."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Container, Sequence
from contextlib import suppress

from gateway.core.policies.earning import Rewards
from gateway.core.pool.workers import PoolFile
from gateway.errors import BatonError
from gateway.service.policies.standing import Charge, PoolStanding, standing_of


class Standings:
    """Counts judged requests whenever somebody reads their rewards, and remembers the latest counts. `earned`: the
    kinds of work, by organisation, pool and task type, that are the conductor's."""

    earned: Container[tuple[str, str, str | None]] = ()

    def __init__(self, read: Callable[[], Awaitable[Sequence[Rewards]]], charge: Charge, pools: PoolFile) -> None:
        self._read = read
        self._charge, self._pools = charge, pools
        self._rewards: Sequence[Rewards] | None = None
        self._shorts: dict[tuple[str, str], str] = {}

    def adopt(self, pools: PoolFile) -> None:
        """Answer for this pool file from now on."""
        self._pools = pools
        self._shorts.clear()

    async def rewards(self) -> Sequence[Rewards]:
        """The rewards of rule and conductor now, by organisation, pool and task type. Raises Unavailable."""
        self._rewards = await self._read()
        self._shorts.clear()
        return self._rewards

    async def line(self) -> str:
        """Who plans in the default pool, and the next rung; without the counts while PostgreSQL is away."""
        with suppress(BatonError):
            await self.rewards()
        return self.of(self._pools.default).line

    async def count(self) -> list[PoolStanding]:
        """Who plans in each pool now, in the default pool first. Raises Unavailable."""
        await self.rewards()
        default = self._pools.default
        return [self.of(name) for name in sorted(self._pools.pools, key=lambda name: (name != default, name))]

    def of(self, pool: str, org: str | None = None) -> PoolStanding:
        """Who plans in a pool, by the latest counts, for an organisation or the one with the most."""
        return standing_of(self._pools, pool, self._charge, self._rewards, self.earned, org)

    def short(self, pool: str, org: str) -> str:
        """The next rung for a header, as `name=number`; empty before the first count. Computed once a count."""
        if self._rewards is None:
            return ""
        if (pool, org) not in self._shorts:
            self._shorts[pool, org] = self.of(pool, org).short
        return self._shorts[pool, org]
