"""How often checkers err, kept in memory: the store is asked seldom, whoever asks here."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import Request

from gateway.api.operator.figures import FiguresApi
from gateway.core.loop.replies.errors import CheckerErrors
from gateway.errors import Unavailable
from gateway.service.admin.checkers import EVERY_S, CheckerFigures, CheckerWatch
from gateway.service.loop.health.breakers import Breakers
from gateway.service.ports.request import Clock
from tests.fakes.reports import FakeReports
from tests.fakes.store import FakeStore
from tests.kit import pool_file
from tests.waiting import until

T0 = datetime(2026, 1, 1, tzinfo=UTC)


class HandClock(Clock):
    """Stands still until it is moved."""

    def __init__(self) -> None:
        self.gone_s = 0.0

    def now(self) -> datetime:
        return T0 + timedelta(seconds=self.gone_s)

    def monotonic_s(self) -> float:
        return 5.0 + self.gone_s


class Source:
    """Gives one script after the other; an exception is raised. `open`: whether a reading may end."""

    def __init__(self, *script: str | Exception) -> None:
        self.script = list(script)
        self.asked = 0
        self.open = asyncio.Event()
        self.open.set()

    async def errors(self) -> list[CheckerErrors]:
        self.asked += 1
        await self.open.wait()
        one = self.script.pop(0)
        if isinstance(one, Exception):
            raise one
        return [CheckerErrors(one)]


def watch_of(source: Source, clock: Clock, has: Callable[[], bool] = lambda: True) -> CheckerWatch:
    return CheckerWatch(source, has, clock)


def names(figures: CheckerFigures) -> list[str]:
    return [one.checker for one in figures.errors]


async def test_the_store_is_asked_once_an_interval_whoever_asks() -> None:
    source, clock = Source("check", "other"), HandClock()
    watch, known = watch_of(source, clock), None
    source.open.clear()
    waiting = [asyncio.create_task(watch.recent()) for _ in range(20)]
    await until(lambda: source.asked == 1)
    source.open.set()
    assert {(*names(each), each.at) for each in await asyncio.gather(*waiting)} == {("check", T0)}
    known = watch.known
    clock.gone_s = EVERY_S - 1
    late = await watch.recent()
    assert (names(late), late.at, source.asked) == (["check"], T0, 1)
    clock.gone_s = EVERY_S
    fresh = await watch.recent()
    assert (names(fresh), fresh.at, source.asked) == (["other"], clock.now(), 2)
    assert watch.known is known
    assert list(known) == ["other"]


@pytest.mark.parametrize("fault", [Unavailable("away"), RuntimeError("a bug")])
async def test_while_the_store_is_away_earlier_figures_stand_and_it_is_not_asked_more(fault: Exception) -> None:
    source, clock = Source(fault, "check", fault), HandClock()
    watch = watch_of(source, clock)
    assert [await watch.recent() for _ in range(3)] == [CheckerFigures()] * 3
    clock.gone_s = EVERY_S
    first = await watch.recent()
    clock.gone_s = 2 * EVERY_S
    assert [await watch.recent() for _ in range(3)] == [first] * 3
    assert (names(first), first.at, source.asked) == (["check"], T0 + timedelta(seconds=EVERY_S), 3)


class Anybody:
    """`Operators` that lets everybody in."""

    async def act(self, request: Request) -> None:
        """Every request is an operator's."""


async def test_the_page_of_workers_reads_them_once_and_says_when() -> None:
    source, clock, file = Source("check", "other"), HandClock(), pool_file()
    pools = SimpleNamespace(now=SimpleNamespace(loaded=SimpleNamespace(pools=file)))
    parts: Any = (FakeReports(FakeStore()), pools, Anybody(), clock, watch_of(source, clock), Breakers(clock))
    api = FiguresApi(*parts)
    request = Request({"type": "http", "method": "GET", "path": "/admin/workers", "query_string": b"", "headers": []})
    for gone_s, wanted, asked in ((0, "check", 1), (EVERY_S - 1, "check", 1), (EVERY_S, "other", 2)):
        clock.gone_s = gone_s
        replies = [json.loads(bytes((await api.workers(request)).body)) for _ in range(3)]
        assert [[one["checker"] for one in reply["checks"]] for reply in replies] == [[wanted]] * 3
        read_at = T0 if wanted == "check" else clock.now()
        assert {reply["checks_at"] for reply in replies} == {read_at.isoformat()}
        assert source.asked == asked


async def test_a_caller_that_goes_away_leaves_the_others_their_figures() -> None:
    source, clock = Source("check", "other"), HandClock()
    watch = watch_of(source, clock)
    source.open.clear()
    gone = asyncio.create_task(watch.recent())
    await until(lambda: source.asked == 1)
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    source.open.set()
    assert await watch.recent() == CheckerFigures()  # not within the interval
    clock.gone_s = EVERY_S
    assert names(await watch.recent()) == ["check"]


async def test_planners_need_them_where_the_pool_has_a_checker(monkeypatch: pytest.MonkeyPatch) -> None:
    has, slept = False, 0
    source, clock = Source("check", "other", "third"), HandClock()

    async def sleep(seconds: float) -> None:
        nonlocal has, slept
        slept += 1
        clock.gone_s += seconds
        if slept == 2:
            has = True
        if slept == 5:
            raise asyncio.CancelledError

    monkeypatch.setattr("gateway.service.admin.checkers.asyncio.sleep", sleep)
    watch = watch_of(source, clock, lambda: has)
    with pytest.raises(asyncio.CancelledError):
        await watch.run()
    assert (source.asked, list(watch.known), clock.gone_s) == (3, ["third"], 5 * EVERY_S)
