"""A request's rates: asked for where there are any, given back where they were counted."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gateway.core.access.keys import Organisation, Principal
from gateway.errors import RateLimited
from gateway.service.ports.request import RateState
from gateway.service.request.running import Rates

WHO = Principal("k", "data", "tests", "o", ("main",))


class Seen:
    """A RateLimits port that lets everybody in, but whom it is told not to."""

    def __init__(self, refuses: str = "") -> None:
        self.refuses, self.calls = refuses, list[tuple[str, str]]()

    async def admit(
        self, key_id: str, request_id: str, tokens: int, rpm: int | None, tpm: int | None, concurrency: int | None
    ) -> RateState:
        self.calls.append(("admit", key_id))
        if key_id == self.refuses:
            raise RateLimited("no", retry_after_s=1.0)
        return RateState()

    async def release(self, key_id: str, request_id: str, tokens_used: int | None) -> None:
        self.calls.append(("release", key_id))

    async def withdraw(self, key_id: str, request_id: str) -> None:
        self.calls.append(("withdraw", key_id))


async def test_a_key_without_limits_has_nothing_to_give_back() -> None:
    """A hung Redis would be waited for in vain, after the money that it refused."""
    seen = Seen()
    await Rates(seen).release(WHO, "r", 0)
    assert seen.calls == []


@pytest.mark.parametrize("who", [replace(WHO, rpm=5), replace(WHO, tpm=5), replace(WHO, concurrency=5)])
async def test_a_key_with_a_limit_gives_its_place_back(who: Principal) -> None:
    seen = Seen()
    await Rates(seen).admit(who, "r", 1)
    await Rates(seen).release(who, "r", 1)
    assert seen.calls == [("admit", "k"), ("release", "k")]


async def test_an_organisation_that_refuses_gives_the_keys_place_back() -> None:
    seen, who = Seen("org:o"), replace(WHO, rpm=5, organisation=Organisation(rpm=1))
    with pytest.raises(RateLimited):
        await Rates(seen).admit(who, "r", 1)
    assert seen.calls == [("admit", "k"), ("admit", "org:o"), ("release", "k")]


@pytest.mark.parametrize(("counts", "last"), [(True, "release"), (False, "withdraw")])
async def test_a_request_that_is_not_started_is_counted_out_of_key_and_organisation(counts: bool, last: str) -> None:
    seen, who = Seen(), replace(WHO, rpm=5, organisation=Organisation(rpm=9))
    rates = Rates(seen)
    entry = await rates.enter(who)
    entry.counts = counts
    await rates.weigh(entry, 10)  # without a limit on tokens there is nothing to ask
    await rates.leave(entry)
    assert seen.calls == [("admit", "k"), ("admit", "org:o"), (last, "k"), (last, "org:o")]


async def test_tokens_are_asked_for_where_they_are_limited() -> None:
    seen, who = Seen(), replace(WHO, tpm=5)
    entry = await Rates(seen).enter(who)
    await Rates(seen).weigh(entry, 3)
    assert seen.calls == [("admit", "k"), ("admit", "k")]
