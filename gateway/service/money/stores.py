"""Gateways on one ledger count in one budget store. A gateway on another store is refused, or budgets would be spent
once for each store.

Every gateway claims its store in the ledger for as long as it lives. A claim that another one contradicts is tried
again for GRACE_S: a store may have restarted, and gateways notice that one after the other.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from gateway.errors import BatonError, ConfigError
from gateway.service.ports.money import Budgets, StoreClaims
from gateway.service.ports.request import Clock

log = logging.getLogger("gateway.stores")
WATCH_S = 2.0
FIRST_S = 0.25
GRACE_S = 6.0
OTHER_STORE = (
    "Gateways that share this database count budgets in another Redis, so this one would spend them a second time: set "
    "REDIS_URL to theirs, or stop them."
)
Sleep = Callable[[float], Awaitable[None]]


class StoreGuard:
    """Holds this gateway's claim. While another store is claimed, no money is reserved here."""

    def __init__(self, budgets: Budgets, claims: StoreClaims, clock: Clock, *, grace_s: float = GRACE_S) -> None:
        self._budgets = budgets
        self._claims = claims
        self._clock = clock
        self._grace_s = grace_s
        self._contradicted_s: float | None = None  # since when, on the monotonic clock

    async def start(self, sleep: Sleep = asyncio.sleep) -> None:
        """Claim the store. Raises ConfigError where other gateways use another one. A store or ledger that is away is
        claimed later."""
        self._contradicted_s = None
        while not await self.check():
            if self._is_over():
                raise ConfigError(OTHER_STORE)
            await sleep(FIRST_S)

    async def run(self, sleep: Sleep = asyncio.sleep) -> None:
        """Keep the claim, for ever."""
        while True:
            await sleep(WATCH_S)
            try:
                if not await self.check() and self._is_over():
                    log.error("%s", OTHER_STORE)
                    self._budgets.refuse(OTHER_STORE)
            except Exception:  # boundary: the guard outlives any surprise
                log.exception("claiming the budget store met an unexpected error")

    async def check(self) -> bool:
        """Claim the store that the budgets are in now. Returns False while another one is claimed."""
        try:
            claimed = await self._claims.claim(await self._budgets.server())
        except BatonError as error:
            log.warning("the budget store is not claimed now: %s", error.message)
            return True
        if claimed:
            self._contradicted_s = None
            self._budgets.refuse(None)
        elif self._contradicted_s is None:
            self._contradicted_s = self._clock.monotonic_s()
        return claimed

    def _is_over(self) -> bool:
        since_s = self._contradicted_s
        return since_s is not None and self._clock.monotonic_s() - since_s >= self._grace_s
