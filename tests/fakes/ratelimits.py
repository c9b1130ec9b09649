"""The RateLimits port in memory. Passes the same contract suite as Redis."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from gateway.adapters.redis.ratelimits import check_fits, left, refusal
from gateway.service.ports.request import RateState


@dataclass
class _Key:
    window: dict[str, tuple[float, int]] = field(default_factory=dict)  # request -> (admitted, tokens), oldest first
    flight: dict[str, float] = field(default_factory=dict)  # request -> end of lease

    def tokens(self) -> int:
        return sum(tokens for _, tokens in self.window.values())


class FakeRateLimits:
    def __init__(self, *, window_s: float = 60.0, lease_s: float = 900.0) -> None:
        self._window_s = window_s
        self._lease_s = lease_s
        self._keys: dict[str, _Key] = {}

    async def admit(
        self, key_id: str, request_id: str, tokens: int, rpm: int | None, tpm: int | None, concurrency: int | None
    ) -> RateState:
        if rpm is None and tpm is None and concurrency is None:
            return RateState()
        check_fits(tokens, tpm)
        key, now_s = self._keys.setdefault(key_id, _Key()), time.monotonic()
        key.window = {r: entry for r, entry in key.window.items() if entry[0] > now_s - self._window_s}
        key.flight = {r: until_s for r, until_s in key.flight.items() if until_s > now_s}
        if request_id not in key.window and request_id not in key.flight:
            by_requests, by_tokens = self._waits(key, now_s, tokens, rpm, tpm)
            if by_requests > 0 or by_tokens > 0:
                what = "requests" if by_requests >= by_tokens else "tokens"
                raise refusal(what, max(by_requests, by_tokens), rpm, tpm, concurrency)
            if concurrency is not None and len(key.flight) >= concurrency:
                raise refusal("in_flight", 1.0, rpm, tpm, concurrency)
            if rpm is not None or tpm is not None:
                key.window[request_id] = (now_s, tokens)
            if concurrency is not None:
                key.flight[request_id] = now_s + self._lease_s
        elif request_id in key.window:
            admitted_s, counted = key.window[request_id]
            _, by_tokens = self._waits(key, now_s, tokens - counted, None, tpm)
            if by_tokens > 0:
                raise refusal("tokens", by_tokens, rpm, tpm, concurrency)
            key.window[request_id] = (admitted_s, tokens)
        newest_s = max((at for at, _ in key.window.values()), default=now_s - self._window_s)
        empty_in_s = newest_s + self._window_s - now_s
        return RateState(rpm, left(rpm, len(key.window)), tpm, left(tpm, key.tokens()), empty_in_s)

    async def release(self, key_id: str, request_id: str, tokens_used: int | None) -> None:
        key = self._keys.setdefault(key_id, _Key())
        key.flight.pop(request_id, None)
        if tokens_used is not None and request_id in key.window:
            key.window[request_id] = (key.window[request_id][0], tokens_used)

    async def withdraw(self, key_id: str, request_id: str) -> None:
        key = self._keys.setdefault(key_id, _Key())
        key.flight.pop(request_id, None)
        key.window.pop(request_id, None)

    async def close(self) -> None:
        """Do nothing: there is no connection to close."""

    def _waits(self, key: _Key, now_s: float, tokens: int, rpm: int | None, tpm: int | None) -> tuple[float, float]:
        entries = list(key.window.values())
        by_requests = by_tokens = 0.0
        if rpm is not None and len(entries) >= rpm:
            by_requests = entries[len(entries) - rpm][0] + self._window_s - now_s
        excess = 0 if tpm is None else key.tokens() + tokens - tpm
        for admitted_s, used in entries:
            if excess <= 0:
                break
            excess -= used
            by_tokens = admitted_s + self._window_s - now_s
        return by_requests, by_tokens
