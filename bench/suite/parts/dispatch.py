"""How long the first step waits for its plan: with a plan that is read while it is decoded, and with one that comes
whole.

The conductor takes as long for a token in both. In the second way it keeps the plan until its end, so that nothing can
be read before. One request at a time; when steps began is read from the log.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import text

from bench.suite.baton import USER, Baton, shipped
from bench.suite.client import Crowd
from bench.suite.rounds import rounded
from bench.suite.sizes import Size
from gateway.adapters.postgres.database import sync_engine

BYTES_PER_TOKEN = 4  # the scripted conductor's pieces are counted in bytes
DECODED, WHOLE = "decoded", "whole"
STATEMENT_S = 60.0
LATEST = text("""
SELECT extract(epoch FROM min(s.started_at) - r.created_at) * 1000,
  extract(epoch FROM min(p.finished_at) - r.created_at) * 1000,
  extract(epoch FROM r.finished_at - r.created_at) * 1000
FROM (SELECT id, created_at, finished_at FROM rollouts ORDER BY created_at DESC LIMIT :count) AS r
JOIN steps AS s ON s.rollout_id = r.id JOIN rounds AS p ON p.rollout_id = r.id
GROUP BY r.id, r.created_at, r.finished_at
""")
NAMES = ("first_ms", "plan_ms", "reply_ms")


def scripts(plan: Mapping[str, Any], size: Size) -> dict[str, dict[str, Any]]:
    """What the conductor is told in each way."""
    script = {"plan": plan, "gap_s": size.token_ms / 1000 / BYTES_PER_TOKEN}
    return {DECODED: script, WHOLE: script | {"whole": True}}


def measure(own: Baton, conductor: str, plan: Mapping[str, Any], size: Size) -> dict[str, Any]:
    """Milliseconds from the request to its first step, to the end of its plan and to its reply, in turns. The conductor
    keeps the last script."""
    ways = scripts(plan, size)
    samples: dict[str, list[tuple[float, ...]]] = {way: [] for way in ways}
    for number in range(size.dispatches):
        for way in (DECODED, WHOLE) if number % 2 else (WHOLE, DECODED):
            put(conductor, ways[way])
            asyncio.run(_ask_once(own))
            samples[way] += _latest(own, 1)
    tokens = len(json.dumps(plan, separators=(",", ":"))) // BYTES_PER_TOKEN
    medians = {
        way: dict(zip(NAMES, map(_median, zip(*rows, strict=True)), strict=True)) for way, rows in samples.items()
    }
    return {"tokens": tokens, "token_ms": size.token_ms, "requests": size.dispatches, **medians}


def put(conductor: str, script: Mapping[str, Any]) -> None:
    """Give the scripted conductor at this address its script."""
    request = urllib.request.Request(f"{conductor}/script", json.dumps(script).encode(), method="PUT")  # noqa: S310
    urllib.request.urlopen(request).close()  # noqa: S310


async def _ask_once(own: Baton) -> None:
    """One request; returns once it is in PostgreSQL. Raises SystemExit where it was refused."""
    target = own.target("baton")
    crowd = Crowd(target.address, [target.request(**USER)])
    replies = await crowd.closed(1, 0.0)
    crowd.close()
    if set(replies.statuses) != {200}:
        raise SystemExit(f"a plan was refused: {replies.examples}")
    await shipped(own.served)


def _latest(own: Baton, count: int) -> list[tuple[float, ...]]:
    """Of the latest rollouts: the first step, the plan, the reply."""
    engine = sync_engine(own.served.database_url, statement_timeout_s=STATEMENT_S)
    try:
        with engine.begin() as connection:
            return [tuple(map(float, row)) for row in connection.execute(LATEST, {"count": count})]
    finally:
        engine.dispose()


def _median(values: Sequence[float]) -> float:
    return rounded(statistics.median(values))
