"""The rates of a request: its key's, and its organisation's where that has any."""

from __future__ import annotations

from gateway.core.access.keys import Principal
from gateway.core.money.scopes import org_scope
from gateway.service.ports.request import RateLimits, RateState


class Rates:
    """Lets requests in by both, and gives both their places back."""

    def __init__(self, limits: RateLimits) -> None:
        self._limits = limits

    async def admit(self, who: Principal, request_id: str, tokens: int) -> RateState:
        """Count the request in; what is left to the key. Raises RateLimited, and then neither has it in flight."""
        state = await self._limits.admit(who.public_id, request_id, tokens, who.rpm, who.tpm, who.concurrency)
        org = who.organisation
        if org.rated:
            try:
                await self._limits.admit(org_scope(who.org), request_id, tokens, org.rpm, org.tpm, org.concurrency)
            except BaseException:  # boundary: whatever stopped it, the key's place in flight is given back
                await self._limits.release(who.public_id, request_id, 0)
                raise
        return state

    async def release(self, who: Principal, request_id: str, tokens_used: int | None) -> None:
        """The request ended. A key without limits was never counted in."""
        if not (who.rpm is None and who.tpm is None and who.concurrency is None):
            await self._limits.release(who.public_id, request_id, tokens_used)
        if who.organisation.rated:
            await self._limits.release(org_scope(who.org), request_id, tokens_used)
