"""Clients that keep every reply, to compare them with the log."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from tests.faults.site import Gateway, Site
from tests.sizes import SLACK

QUESTION = {"model": "alpha", "messages": [{"role": "user", "content": "Say something."}], "max_tokens": 8}


@dataclass(frozen=True, slots=True)
class Reply:
    """The end of a request at the client. `status` 0: the connection broke; `whole`: the last byte came."""

    status: int
    code: str | None
    rollout_id: str
    took_s: float
    whole: bool
    at_s: float
    headers: dict[str, str] = field(default_factory=dict)
    text: str = ""


@dataclass(slots=True)
class Client:
    """Requests to the gateways of a site, in turns unless one is named."""

    site: Site
    body: dict[str, Any] = field(default_factory=lambda: dict(QUESTION))
    history: list[Reply] = field(default_factory=list)
    serving: list[Gateway] | None = None  # None: all that live
    slim: bool = False  # keep no headers and no text of good replies, to bound memory
    _turn: int = 0

    async def ask(self, gateway: Gateway | None = None, **changes: Any) -> Reply:
        """One request to its end, however it ends."""
        began_s = time.monotonic()
        headers = {"authorization": f"Bearer {self.site.key}", **changes.pop("headers", {})}
        rollout_id = ""
        try:
            one = gateway or self._next()
            url = f"{one.facts['base_url']}/chat/completions"
            async with self.site.http.post(url, json={**self.body, **changes}, headers=headers) as reply:
                rollout_id = reply.headers.get("x-baton-rollout-id", "")
                text = await reply.text()
                code = (await reply.json())["error"]["code"] if reply.status >= 400 else None
                whole = reply.status == 200 and (not changes.get("stream") or text.rstrip().endswith("[DONE]"))
                said = ({}, "") if self.slim and whole else (dict(reply.headers), text)
                seen = Reply(reply.status, code, rollout_id, time.monotonic() - began_s, whole, began_s, *said)
        except (aiohttp.ClientError, OSError, ValueError, TimeoutError) as error:
            took_s = time.monotonic() - began_s
            seen = Reply(0, type(error).__name__, rollout_id, took_s, False, began_s)
        self.history.append(seen)
        return seen

    async def many(self, n: int, at_once: int, **changes: Any) -> Sequence[Reply]:
        """Send `n` requests, at most `at_once` at a time."""
        slots = asyncio.Semaphore(at_once)

        async def one() -> Reply:
            async with slots:
                return await self.ask(**changes)

        return await asyncio.gather(*(one() for _ in range(n)))

    def load(self, at_once: int, pause_s: float = 0.0) -> Load:
        """Send requests for as long as the block lasts."""
        return Load(self, at_once, pause_s)

    def statuses(self, replies: Sequence[Reply] | None = None) -> Counter[str]:
        """Count replies by status, and by error code where that is not 200."""
        shown = self.history if replies is None else replies
        return Counter(f"{reply.status}{' ' + reply.code if reply.code else ''}" for reply in shown)

    def _next(self) -> Gateway:
        known = self.site.gateways if self.serving is None else self.serving
        living = [one for one in known if one.alive and one.facts_file.exists()]
        if not living:
            raise OSError("no gateway lives")
        self._turn += 1
        return living[self._turn % len(living)]


class Load:
    """Clients in a loop."""

    def __init__(self, client: Client, at_once: int, pause_s: float) -> None:
        self.client, self.at_once, self.pause_s = client, at_once, pause_s
        self._on = True
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Load:
        self._tasks = [asyncio.create_task(self._loop()) for _ in range(self.at_once)]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._on = False
        await asyncio.gather(*self._tasks)

    async def until(self, done: Callable[[Sequence[Reply]], bool], limit_s: float = 30.0 * SLACK) -> Sequence[Reply]:
        """Wait until `done` is true of the replies since this call, and return them."""
        first = len(self.client.history)
        until_s = time.monotonic() + limit_s
        while not done(seen := self.client.history[first:]):
            assert time.monotonic() < until_s, f"{self.client.statuses(seen)} {self.client.site.complaints()}"
            await asyncio.sleep(0.02)
        return seen

    async def _loop(self) -> None:
        while self._on:
            reply = await self.client.ask()
            await asyncio.sleep(self.pause_s if reply.status == 200 else max(self.pause_s, 0.05))


def good(replies: Sequence[Reply]) -> list[Reply]:
    return [reply for reply in replies if reply.status == 200]
