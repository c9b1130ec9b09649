"""Signals on a real PostgreSQL: found beside the traffic, stored once, and of those alone that allow it."""

from __future__ import annotations

import time
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.adapters.postgres.evidence.signals import PostgresSignals
from gateway.adapters.postgres.inserts import insert_outcome, insert_rows
from gateway.adapters.postgres.rows import event_rows
from gateway.core.log.events import uuid7
from tests.integration.test_judging import a_key
from tests.records import a_rollout, a_step, an_outcome, rollout_event

QUESTION = "What is the capital of Australia?"
AGAIN = "What's the capital of Australia, please?"
S = 1_000_000


async def asks(engine: AsyncEngine, key: str, ago_s: float, messages: Any, said: str = "Sydney.", **more: Any) -> str:
    """A stored request that began so long ago and took a second; its id."""
    began_us = time.time_ns() // 1_000 - round(ago_s * S)
    reply = {"choices": [{"message": {"role": "assistant", "content": said}}]}
    asked = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    record = a_rollout(
        **{
            "id": uuid7(began_us // 1_000),
            "key_id": key,
            "created_us": began_us,
            "finished_us": began_us + S,
            "request": {"model": "baton", "messages": asked},
            "reply": reply,
            "steps": [a_step(0)],
            **more,
        }
    )
    async with engine.begin() as connection:
        await connection.run_sync(insert_rows, event_rows(rollout_event(record)))
    return record.id


async def signals(engine: AsyncEngine) -> list[tuple[str, str, float]]:
    """(rollout, source, value) of all outcomes."""
    async with engine.begin() as connection:
        rows = await connection.execute(
            text("SELECT rollout_id, source, value FROM outcomes ORDER BY created_at, source")
        )
        return [(str(one.rollout_id), one.source, one.value) for one in rows]


def talk(*texts: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(texts)]


async def test_the_same_question_again_is_weak_evidence_against_the_reply(pg_engine: AsyncEngine) -> None:
    key = await a_key(pg_engine)
    first = await asks(pg_engine, key, 60, QUESTION)
    await asks(pg_engine, key, 30, QUESTION, end_user="bob")
    await asks(pg_engine, key, 20, AGAIN)
    looking = PostgresSignals(pg_engine)
    assert await looking.look(10) == 3
    assert await signals(pg_engine) == [(first, "signal:repeat", 0.0)]
    async with pg_engine.begin() as connection:
        query = text("SELECT source, success, weight FROM experience WHERE rollout_id = :id")
        source, success, weight = (await connection.execute(query, {"id": first})).one()
        (why,) = await connection.scalars(text("SELECT metadata ->> 'why' FROM outcomes"))
    assert (source, success, round(weight, 2), why) == ("signal:repeat", 0.0, 0.5, "same")
    assert await looking.look(10) == 0
    assert await PostgresSignals(pg_engine).look(10) == 3  # after a start it looks again, and stores nothing twice
    assert len(await signals(pg_engine)) == 1


async def test_a_conversation_that_goes_on_tells_what_became_of_the_reply(pg_engine: AsyncEngine) -> None:
    key = await a_key(pg_engine)
    first = await asks(pg_engine, key, 60, QUESTION, end_user=None)
    edited = talk(QUESTION, "Canberra.", "How many people live there?")
    second = await asks(pg_engine, key, 40, edited, said="Few.", end_user=None)
    await asks(pg_engine, key, 20, edited, said="470,000.", end_user=None)
    await PostgresSignals(pg_engine).look(10)
    found = await signals(pg_engine)
    assert (second, "signal:edit", 0.0) in found  # asked again
    assert (first, "signal:edit", 0.0) in found  # another word
    assert (first, "signal:repeat", 1.0) in found


async def test_a_failed_command_is_evidence_about_the_turn_that_called_it(pg_engine: AsyncEngine) -> None:
    key = await a_key(pg_engine)
    call = {"id": "c1", "type": "function", "function": {"name": "run_tests", "arguments": "{}"}}
    calls = {"role": "assistant", "content": None, "tool_calls": [call]}
    reply = {"choices": [{"message": calls}]}
    first = await asks(pg_engine, key, 60, "Mend it.", reply=reply)
    turn = [*talk("Mend it."), calls, {"role": "tool", "tool_call_id": "c1", "content": '{"exit_code": 1}'}]
    await asks(pg_engine, key, 20, turn)
    await PostgresSignals(pg_engine).look(10)
    assert await signals(pg_engine) == [(first, "signal:edit", 1.0), (first, "signal:test", 0.0)]
    async with pg_engine.begin() as connection:
        assert (await connection.scalars(text("SELECT DISTINCT source FROM experience"))).all() == ["signal:test"]


@pytest.mark.parametrize("source", ["person", "client", "label", "judge:wise"])
async def test_a_signal_never_overrides_an_outcome(pg_engine: AsyncEngine, source: str) -> None:
    key = await a_key(pg_engine)
    first = await asks(pg_engine, key, 60, QUESTION)
    async with pg_engine.begin() as connection:
        await connection.run_sync(insert_outcome, an_outcome(first, 1.0, key_id=key, source=source))
    await asks(pg_engine, key, 20, AGAIN)
    await PostgresSignals(pg_engine).look(10)
    assert (first, "signal:repeat", 0.0) in await signals(pg_engine)
    async with pg_engine.begin() as connection:
        ((by, success),) = (await connection.execute(text("SELECT source, success FROM experience"))).all()
    assert (by, success) == (source, 1.0)


@pytest.mark.parametrize(
    ("rights", "changes"),
    [
        ({"signals": False}, {}),
        ({"train": False}, {}),
        ({"log_mode": "metadata"}, {}),
        ({}, {"train": False}),
        ({}, {"log_mode": "metadata"}),
        ({}, {"status": "failed"}),
        ({}, {"depth": 1}),
    ],
)
async def test_what_may_not_be_looked_at_gives_no_signal(
    pg_engine: AsyncEngine, rights: dict[str, Any], changes: dict[str, Any]
) -> None:
    key = await a_key(pg_engine, **rights)
    await asks(pg_engine, key, 60, QUESTION, **changes)
    await asks(pg_engine, key, 20, AGAIN, **changes)
    await PostgresSignals(pg_engine).look(10)
    assert await signals(pg_engine) == []


async def test_keys_and_windows_are_kept_apart(pg_engine: AsyncEngine) -> None:
    one, other = await a_key(pg_engine), await a_key(pg_engine)
    await asks(pg_engine, one, 60, QUESTION)
    await asks(pg_engine, other, 3_000, QUESTION)
    await asks(pg_engine, other, 20, AGAIN)
    await PostgresSignals(pg_engine).look(10)
    assert await signals(pg_engine) == []


async def test_a_request_of_a_strange_shape_stops_nothing(pg_engine: AsyncEngine) -> None:
    key = await a_key(pg_engine)
    await asks(pg_engine, key, 60, QUESTION)
    await asks(pg_engine, key, 30, [5, {"role": "user", "content": AGAIN}], reply={"choices": [None, {"message": 5}]})
    looking = PostgresSignals(pg_engine)
    assert await looking.look(10) == 2
    assert [(source, value) for _, source, value in await signals(pg_engine)] == [("signal:repeat", 0.0)]
