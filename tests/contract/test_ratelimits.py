"""The RateLimits port, on the fake and on a real Redis. Windows are short where time has to pass."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable

import pytest

from gateway.adapters.redis.ratelimits import RedisRateLimits
from gateway.errors import RateLimited, TooLarge
from gateway.service.ports.request import RateLimits, RateState
from tests.fakes.ratelimits import FakeRateLimits
from tests.redis_server import RedisServer
from tests.waiting import at_some_pace

Make = Callable[[float, float], RateLimits]


@pytest.fixture(params=["fake", "redis"])
async def make(request: pytest.FixtureRequest, redis_server: RedisServer) -> AsyncIterator[Make]:
    made: list[FakeRateLimits | RedisRateLimits] = []
    prefix = secrets.token_hex(4)

    def build(window_s: float, lease_s: float) -> RateLimits:
        if request.param == "fake":
            made.append(FakeRateLimits(window_s=window_s, lease_s=lease_s))
        else:
            made.append(
                RedisRateLimits(
                    redis_server.url, prefix=prefix, window_s=window_s, lease_s=lease_s, fail_open=False, deadline_s=5.0
                )
            )
        return made[-1]

    yield build
    for limits in made:
        await limits.close()


@pytest.fixture
def limits(make: Make) -> RateLimits:
    return make(60.0, 900.0)


async def test_requests_are_counted_up_to_the_limit(limits: RateLimits) -> None:
    assert await limits.admit("k", "a", 10, 2, None, None) == RateState(2, 1, None, None)
    assert await limits.admit("k", "b", 10, 2, None, None) == RateState(2, 0, None, None)
    with pytest.raises(RateLimited, match="allows 2 requests a minute") as caught:
        await limits.admit("k", "c", 10, 2, None, None)
    assert 0 < caught.value.retry_after_s <= 60
    assert await limits.admit("other", "c", 10, 2, None, None) == RateState(2, 1, None, None)


async def test_a_refused_request_counts_nothing(limits: RateLimits) -> None:
    await limits.admit("k", "a", 60, 5, 100, 5)
    for n in range(10):
        with pytest.raises(RateLimited, match="allows 100 tokens a minute"):
            await limits.admit("k", f"no{n}", 60, 5, 100, 5)
    assert await limits.admit("k", "b", 40, 5, 100, 5) == RateState(5, 3, 100, 0)


async def test_the_same_request_again_counts_once(limits: RateLimits) -> None:
    first = await limits.admit("k", "a", 60, 1, 100, 1)
    assert await limits.admit("k", "a", 60, 1, 100, 1) == first == RateState(1, 0, 100, 40)


async def test_release_sets_the_tokens_really_used(limits: RateLimits) -> None:
    await limits.admit("k", "a", 90, None, 100, None)
    await limits.release("k", "a", 30)
    assert (await limits.admit("k", "b", 60, None, 100, None)).tokens_left == 10
    await limits.release("k", "a", 30)
    await limits.release("k", "b", None)
    assert (await limits.admit("k", "c", 10, None, 100, None)).tokens_left == 0
    await limits.release("k", "c", 500)
    with pytest.raises(RateLimited):
        await limits.admit("k", "d", 0, None, 100, None)


async def test_places_in_flight_are_freed_by_release(limits: RateLimits) -> None:
    await limits.admit("k", "a", 1, None, None, 2)
    await limits.admit("k", "b", 1, None, None, 2)
    with pytest.raises(RateLimited, match="allows 2 requests at a time") as caught:
        await limits.admit("k", "c", 1, None, None, 2)
    assert caught.value.headers["retry-after"] == "1"
    await limits.release("k", "a", 1)
    await limits.release("k", "a", 1)
    await limits.admit("k", "c", 1, None, None, 2)
    with pytest.raises(RateLimited):
        await limits.admit("k", "d", 1, None, None, 2)


async def test_releasing_what_was_never_admitted_changes_nothing(limits: RateLimits) -> None:
    await limits.release("k", "never", 1000)
    assert await limits.admit("k", "a", 1, 2, 10, 1) == RateState(2, 1, 10, 9)


async def test_a_crashed_gateways_place_is_free_after_its_lease(make: Make) -> None:
    async def story(pace: int) -> None:
        limits, key = make(60.0, 0.15 * pace), f"k{pace}"
        await limits.admit(key, "crashed", 1, None, None, 1)
        with pytest.raises(RateLimited):
            await limits.admit(key, "a", 1, None, None, 1)
        await asyncio.sleep(0.2 * pace)
        await limits.admit(key, "a", 1, None, None, 1)

    await at_some_pace(story)


async def test_the_window_slides_and_retry_after_is_true(make: Make) -> None:
    async def story(pace: int) -> None:
        limits, key = make(0.6 * pace, 900.0), f"k{pace}"
        await limits.admit(key, "a", 1, 2, None, None)
        await asyncio.sleep(0.3 * pace)
        await limits.admit(key, "b", 1, 2, None, None)
        with pytest.raises(RateLimited) as caught:
            await limits.admit(key, "c", 1, 2, None, None)
        assert caught.value.retry_after_s <= 0.3 * pace
        await asyncio.sleep(caught.value.retry_after_s + 0.005)
        assert (await limits.admit(key, "c", 1, 2, None, None)).requests_left == 0
        with pytest.raises(RateLimited):
            await limits.admit(key, "d", 1, 2, None, None)

    await at_some_pace(story)


async def test_tokens_come_back_as_they_leave_the_window(make: Make) -> None:
    async def story(pace: int) -> None:
        limits, key = make(0.6 * pace, 900.0), f"k{pace}"
        await limits.admit(key, "a", 30, None, 100, None)
        await asyncio.sleep(0.3 * pace)
        await limits.admit(key, "b", 60, None, 100, None)
        with pytest.raises(RateLimited) as small:
            await limits.admit(key, "c", 20, None, 100, None)
        with pytest.raises(RateLimited) as large:
            await limits.admit(key, "c", 90, None, 100, None)
        assert 0 < small.value.retry_after_s <= 0.3 * pace < large.value.retry_after_s <= 0.6 * pace
        await asyncio.sleep(small.value.retry_after_s + 0.005)
        assert (await limits.admit(key, "c", 20, None, 100, None)).tokens_left == 20

    await at_some_pace(story)


async def test_a_request_without_tokens_leaves_the_window_too(make: Make) -> None:
    limits = make(0.1, 900.0)
    await limits.admit("k", "a", 0, 1, 10, None)
    await asyncio.sleep(0.12)
    assert await limits.admit("k", "b", 0, 1, 10, None) == RateState(1, 0, 10, 10)


async def test_the_limit_with_the_longest_wait_is_named(limits: RateLimits) -> None:
    await limits.admit("k", "a", 100, 1, 100, None)
    with pytest.raises(RateLimited, match="requests a minute"):
        await limits.admit("k", "b", 1, 1, 100, None)
    with pytest.raises(RateLimited, match="tokens a minute"):
        await limits.admit("k", "b", 1, 2, 100, None)


async def test_a_request_that_can_never_fit_is_told_so(limits: RateLimits) -> None:
    with pytest.raises(TooLarge, match="may use 101 tokens and its key allows 100 a minute") as caught:
        await limits.admit("k", "a", 101, None, 100, None)
    assert caught.value.param == "max_tokens"


async def test_without_limits_nothing_is_counted(limits: RateLimits) -> None:
    assert await limits.admit("k", "a", 10**9, None, None, None) == RateState()
    assert (await limits.admit("k", "a", 1, 5, None, None)).requests_left == 4


async def test_many_at_once_pass_exactly_as_the_limits_say(limits: RateLimits) -> None:
    async def one(n: int) -> bool:
        try:
            await limits.admit("k", f"r{n}", 7, 50, 1000, 37)
        except RateLimited:
            return False
        return True

    assert sum(await asyncio.gather(*(one(n) for n in range(200)))) == 37


async def test_tokens_are_weighed_once_the_request_is_known(limits: RateLimits) -> None:
    await limits.admit("k", "a", 70, 5, 100, 5)
    assert await limits.admit("k", "b", 0, 5, 100, 5) == RateState(5, 3, 100, 30)
    with pytest.raises(RateLimited, match="allows 100 tokens a minute") as caught:
        await limits.admit("k", "b", 40, 5, 100, 5)
    assert 0 < caught.value.retry_after_s <= 60
    assert await limits.admit("k", "b", 30, 5, 100, 5) == RateState(5, 3, 100, 0)


async def test_a_withdrawn_request_was_never_counted(limits: RateLimits) -> None:
    await limits.admit("k", "a", 70, 1, 100, 1)
    await limits.withdraw("k", "a")
    await limits.withdraw("k", "a")
    assert await limits.admit("k", "b", 100, 1, 100, 1) == RateState(1, 0, 100, 0)
