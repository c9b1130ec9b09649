"""The ReplyStore port, on the fake and on PostgreSQL."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from uuid import uuid4

import pytest

from gateway.adapters.postgres.database import async_engine
from gateway.adapters.postgres.turns import PostgresReplies
from gateway.errors import IdempotencyReused, IdempotencyRunning, Unavailable
from gateway.service.ports.turns import ReplyStore, Slot, StoredReply
from tests.fakes.replies import FakeReplies
from tests.postgres_server import PostgresServer
from tests.waiting import BOUND_S

REPLY = StoredReply(200, {"content-type": "application/json", "x-baton-rollout-id": "r1"}, b'{"a":"\xc3\xa9\x00"}')
HOUR_S = 3600.0


@pytest.fixture(params=["fake", "postgres"])
async def replies(request: pytest.FixtureRequest) -> AsyncIterator[ReplyStore]:
    if request.param == "fake":
        yield FakeReplies()
        return
    engine = async_engine(request.getfixturevalue("database_url"), statement_timeout_s=20.0)
    yield PostgresReplies(engine, timeout_s=20.0)
    await engine.dispose()


def slot(key: str = "k1", header: bytes = b"one", body: bytes = b"same") -> Slot:
    return Slot(key, header.ljust(32), body.ljust(32), str(uuid4()))


async def test_the_first_claim_is_ours_and_the_next_is_told_to_wait(replies: ReplyStore) -> None:
    first = slot()
    assert await replies.claim(first, HOUR_S, HOUR_S) is None
    with pytest.raises(IdempotencyRunning) as waiting:
        await replies.claim(slot(), HOUR_S, HOUR_S)
    assert (waiting.value.status, waiting.value.headers["retry-after"]) == (409, "1")
    assert await replies.keep(first, REPLY)
    assert await replies.claim(slot(), HOUR_S, HOUR_S) == REPLY


async def test_another_body_is_refused_before_and_after_the_reply(replies: ReplyStore) -> None:
    first = slot()
    await replies.claim(first, HOUR_S, HOUR_S)
    for _ in range(2):
        with pytest.raises(IdempotencyReused) as refused:
            await replies.claim(slot(body=b"other"), HOUR_S, HOUR_S)
        assert (refused.value.status, refused.value.param) == (422, "Idempotency-Key")
        await replies.keep(first, REPLY)


async def test_keys_do_not_see_each_other(replies: ReplyStore) -> None:
    first = slot("k1")
    await replies.claim(first, HOUR_S, HOUR_S)
    await replies.keep(first, REPLY)
    assert await replies.claim(slot("k2", body=b"other"), HOUR_S, HOUR_S) is None


async def test_a_released_slot_is_free_for_any_body(replies: ReplyStore) -> None:
    first = slot()
    await replies.claim(first, HOUR_S, HOUR_S)
    assert await replies.release(first)
    assert not await replies.release(first)
    assert await replies.claim(slot(body=b"other"), HOUR_S, HOUR_S) is None


async def test_a_claim_that_was_given_up_goes_to_the_next_and_the_late_one_changes_nothing(replies: ReplyStore) -> None:
    dead, heir = slot(), slot()
    await replies.claim(dead, 0.0, HOUR_S)
    with pytest.raises(IdempotencyReused):  # also then only with the same body
        await replies.claim(slot(body=b"other"), HOUR_S, HOUR_S)
    assert await replies.claim(heir, HOUR_S, HOUR_S) is None
    assert not await replies.keep(dead, REPLY)
    assert not await replies.release(dead)
    late = StoredReply(200, {}, b"heir")
    assert await replies.keep(heir, late)
    assert await replies.claim(slot(), HOUR_S, HOUR_S) == late
    assert not await replies.release(heir)  # kept is kept


async def test_a_reply_that_was_not_kept_says_so(replies: ReplyStore) -> None:
    first = slot()
    await replies.claim(first, HOUR_S, HOUR_S)
    await replies.keep(first, StoredReply(200, {}, None))
    assert await replies.claim(slot(), HOUR_S, HOUR_S) == StoredReply(200, {}, None)


async def test_an_old_slot_counts_as_never_used_and_is_swept(replies: ReplyStore) -> None:
    first = slot()
    await replies.claim(first, HOUR_S, HOUR_S)
    await replies.keep(first, REPLY)
    assert await replies.sweep(HOUR_S, 10) == 0
    second = slot(body=b"other")
    assert await replies.claim(second, HOUR_S, 0.0) is None
    assert await replies.keep(second, REPLY)
    for n in range(3):
        await replies.claim(slot(header=b"%d" % n), HOUR_S, HOUR_S)
    assert await replies.sweep(0.0, 3) == 3
    assert await replies.sweep(0.0, 3) == 1
    assert await replies.claim(slot(), HOUR_S, HOUR_S) is None


async def test_a_hundred_at_once_are_one_claim(replies: ReplyStore) -> None:
    header = secrets.token_bytes(32)
    claims = [slot(header=header) for _ in range(100)]
    said = await asyncio.gather(*(replies.claim(one, HOUR_S, HOUR_S) for one in claims), return_exceptions=True)
    assert said.count(None) == 1
    late = (IdempotencyRunning, Unavailable)  # on a busy machine some get no connection in time, and claim nothing
    assert sum(isinstance(one, late) for one in said) == 99
    assert await replies.keep(claims[said.index(None)], REPLY)
    again = await asyncio.gather(*(replies.claim(one, HOUR_S, HOUR_S) for one in claims), return_exceptions=True)
    answers = [reply for reply in again if not isinstance(reply, Unavailable)]
    assert answers == [REPLY] * len(answers)
    assert await replies.claim(claims[-1], HOUR_S, HOUR_S) == REPLY


async def test_postgres_away_is_unavailable_in_bounded_time(empty_database_url: str, pg_server: PostgresServer) -> None:
    engine = async_engine(empty_database_url)
    pg_server.shut(empty_database_url)
    async with asyncio.timeout(BOUND_S):
        with pytest.raises(Unavailable):
            await PostgresReplies(engine).claim(slot(), HOUR_S, HOUR_S)
    await engine.dispose()
