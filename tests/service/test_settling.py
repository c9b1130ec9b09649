"""When a reply leaves: the money's settlement is on its way to Redis then, and a slow Redis holds no reply back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.kit import KEY, Kit
from tests.waiting import BOUND_S


class SlowPost:
    """A budget store whose `post` answers once `go` is set."""

    def __init__(self, kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
        self.came, self.go = asyncio.Event(), asyncio.Event()
        self._post = kit.budgets.post
        monkeypatch.setattr(kit.budgets, "post", self.post)

    async def post(self, hold_id: str, actual_nano: int) -> int:
        self.came.set()
        await self.go.wait()
        return await self._post(hold_id, actual_nano)


SlowPosts = Callable[[Kit], SlowPost]


@pytest.fixture
def slow_post(monkeypatch: pytest.MonkeyPatch) -> SlowPosts:
    return lambda kit: SlowPost(kit, monkeypatch)


async def test_a_reply_leaves_once_its_settlement_is_on_its_way(slow_post: SlowPosts) -> None:
    kit = Kit()
    slow = slow_post(kit)
    running = await kit.start()
    await asyncio.wait_for(running.result(), BOUND_S)
    assert slow.came.is_set()
    assert await kit.posted_nano() == 0
    slow.go.set()
    await kit.completer.drain(BOUND_S)
    assert await kit.posted_nano() == running.record.cost_nano > 0


async def test_a_reply_waits_where_its_key_may_have_one_request_at_a_time(slow_post: SlowPosts) -> None:
    kit = Kit()
    slow = slow_post(kit)
    running = await kit.start(who=replace(KEY, concurrency=1))
    await asyncio.wait_for(slow.came.wait(), BOUND_S)
    assert not running.finished.is_set()
    slow.go.set()
    await asyncio.wait_for(running.result(), BOUND_S)


async def test_a_bug_after_the_reply_is_counted_and_takes_nothing_back(monkeypatch: pytest.MonkeyPatch) -> None:
    kit = Kit()

    async def broken(hold_id: str, actual_nano: int) -> int:
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        raise RuntimeError("a bug")

    monkeypatch.setattr(kit.budgets, "post", broken)
    running = await kit.start()
    reply = await asyncio.wait_for(running.result(), BOUND_S)
    await kit.completer.drain(BOUND_S)
    assert reply is running.body
    assert len(kit.metrics.bugs) == 1
