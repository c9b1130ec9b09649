"""Rate limits in Redis: each call is one run of `ratelimits.lua`.

They protect capacity, not money, so by default requests are served while Redis is away (`fail_open`). Budgets never do
that, and still apply.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from gateway.adapters.redis.script import RedisAway, RedisScript
from gateway.errors import RateLimited, TooLarge, Unavailable
from gateway.service.ports.request import RateState

_log = logging.getLogger(__name__)


class RedisRateLimits:
    """The RateLimits port. `lease_s` frees the slot of a request whose gateway died; it must exceed any request's wall
    clock. After a failure Redis is not called for `pause_s`, so that a hung one delays few requests."""

    def __init__(
        self,
        url: str,
        *,
        prefix: str = "baton",
        window_s: float = 60.0,
        lease_s: float = 900.0,
        fail_open: bool = True,
        deadline_s: float = 0.1,
        pause_s: float = 1.0,
        connections_max: int = 64,
    ) -> None:
        self._script = RedisScript(url, "ratelimits.lua", deadline_s=deadline_s, connections_max=connections_max)
        self._prefix = prefix
        self._window_ms = round(window_s * 1000)
        self._lease_ms = round(lease_s * 1000)
        self._fail_open = fail_open
        self._pause_s = pause_s
        self._away_until_s = 0.0
        self._away = False

    async def admit(
        self, key_id: str, request_id: str, tokens: int, rpm: int | None, tpm: int | None, concurrency: int | None
    ) -> RateState:
        if rpm is None and tpm is None and concurrency is None:
            return RateState()
        check_fits(tokens, tpm)
        limits = ["" if limit is None else limit for limit in (rpm, tpm, concurrency)]
        reply = await self._run("admit", key_id, request_id, tokens, self._window_ms, self._lease_ms, *limits)
        if reply is None:
            return RateState()
        status, *rest = reply
        if status != b"ok":
            raise refusal(status.decode(), rest[0] / 1000, rpm, tpm, concurrency)
        return RateState(rpm, left(rpm, rest[0]), tpm, left(tpm, rest[1]), rest[2] / 1000)

    async def release(self, key_id: str, request_id: str, tokens_used: int | None) -> None:
        await self._run("release", key_id, request_id, "" if tokens_used is None else tokens_used)

    async def withdraw(self, key_id: str, request_id: str) -> None:
        await self._run("withdraw", key_id, request_id, "")

    async def close(self) -> None:
        await self._script.close()

    async def _run(self, op: str, key_id: str, *args: str | int) -> list[Any] | None:
        """The reply; None if Redis is away and `fail_open` is set. Otherwise raises Unavailable."""
        tag = "{" + f"{self._prefix}:{key_id}" + "}"
        if time.monotonic() < self._away_until_s:
            self._refuse_if_closed()
            return None
        try:
            reply = await self._script([f"{tag}:at", f"{tag}:tokens", f"{tag}:flight"], [op, *args])
        except RedisAway as error:
            self._away_until_s = time.monotonic() + self._pause_s
            self._note(away=True, why=str(error))
            self._refuse_if_closed()
            return None
        self._note(away=False, why="")
        return reply

    def _refuse_if_closed(self) -> None:
        if not self._fail_open:
            raise Unavailable(
                "Rate limits cannot be checked now; retry shortly.",
                code="rate_limits_unavailable",
                headers={"retry-after": "1"},
            )

    def _note(self, *, away: bool, why: str) -> None:
        if away and not self._away:
            _log.warning("rate limits are %s: Redis is away (%s)", "off" if self._fail_open else "closed", why)
        if self._away and not away:
            _log.warning("rate limits are on again")
        self._away = away


def check_fits(tokens: int, tpm: int | None) -> None:
    """Raises TooLarge for a request that exceeds the limit of a whole minute."""
    if tpm is not None and tokens > tpm:
        raise TooLarge(
            f"This request may use {tokens:,} tokens and its key allows {tpm:,} a minute: lower max_tokens or shorten "
            "the messages.",
            param="max_tokens",
        )


def refusal(what: str, wait_s: float, rpm: int | None, tpm: int | None, concurrency: int | None) -> RateLimited:
    """The error for a request over a limit. `what`: requests | tokens | in_flight."""
    limit = {
        "requests": f"{rpm} requests a minute",
        "tokens": f"{tpm} tokens a minute",
        "in_flight": f"{concurrency} requests at a time",
    }[what]
    rate = {"requests": RateState(rpm, 0, reset_s=wait_s), "tokens": RateState(None, None, tpm, 0, wait_s)}.get(what)
    headers = rate.headers() if rate else {}
    return RateLimited(f"This key allows {limit}; retry in {wait_s:.1f} s.", retry_after_s=wait_s, headers=headers)


def left(limit: int | None, used: int) -> int | None:
    return None if limit is None else max(0, limit - used)
